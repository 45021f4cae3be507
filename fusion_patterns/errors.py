"""The errors that a user may see. Each says what is wrong, where, and what to do about it."""

from __future__ import annotations


class FusionPatternsError(Exception):
    """Base of every error this package raises on purpose; the command line prints it as one line."""


class TableError(FusionPatternsError):
    """A pattern table is not valid. The message starts with ``file:line:column``."""


class VersionError(FusionPatternsError):
    """An installed TVM (or its FFI) is not one that this package was tried with."""


class ModelError(FusionPatternsError):
    """A model file can't be read or imported."""


class BuildError(FusionPatternsError):
    """A module can't be compiled for the target."""


class DeviceError(FusionPatternsError):
    """No usable OpenCL device, or a device refused a kernel."""


class ManifestError(FusionPatternsError):
    """A saved module is damaged, incomplete or of another format."""
