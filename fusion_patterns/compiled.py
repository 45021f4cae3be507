"""A compiled module in the user's hands."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm

from . import vm
from .place import Placement
from .report.summary import Report
from .run import Manifest, Session, save

__all__ = ["CompiledModule"]

Array = np.ndarray[Any, Any]
OnVM = Callable[[Mapping[str, Array], str], list[Array]]


class CompiledModule:
    """OpenCL kernels, the manifest that runs them, and what was decided on the way.

    ``report``: the figures. ``manifest``: the run as data. ``placement``: the form of every tensor. ``source``: the
    module that was compiled. ``fused``: the same module with composites, in its own layout.
    ``on_vm`` runs the module on TVM's own runtime (:mod:`.vm`).
    """

    def __init__(
        self,
        manifest: Manifest,
        report: Report,
        source: tvm.IRModule,
        fused: tvm.IRModule,
        placement: Placement,
        on_vm: OnVM,
    ) -> None:
        manifest.meta.update(report.to_dict())
        self.manifest = manifest
        self.report = report
        self.source = source
        self.fused = fused
        self.placement = placement
        self._on_vm = on_vm
        self._sessions: dict[str | None, Session] = {}

    @property
    def kernels(self) -> dict[str, str]:
        """OpenCL C of each kernel by its name."""
        return {name: kernel.source for name, kernel in self.manifest.kernels.items()}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the module as data (OpenCL C, ``manifest.json``, weights); it replays without TVM.

        An existing folder is replaced only at the end, and only if it holds a saved module.
        Raises :class:`ManifestError`.
        """
        save(self.manifest, folder)

    def run(
        self, inputs: Mapping[str, Array] | Sequence[Array], device: str | None = None, function: str = "main"
    ) -> list[Array]:
        """Run on an OpenCL device that has images; ``device`` is a name or number, ``None`` the best one.

        ``inputs``: arrays by parameter name or in order, of the parameters' shapes and dtypes. Returns the results,
        nested tuples flattened. ``device="tvm"`` runs on TVM's own OpenCL runtime and virtual machine, where TVM has
        one. Raises :class:`DeviceError`.
        """
        if device == vm.DEVICE:
            params = [str(param.name) for param in self.source[function].params]
            named = inputs if isinstance(inputs, Mapping) else dict(zip(params, inputs, strict=True))
            return self._on_vm(named, function)
        return self.session(device).run(inputs, function)

    def session(self, device: str | None = None) -> Session:
        """The session on a device, opened once: kernels built, constants uploaded."""
        if device not in self._sessions:
            self._sessions[device] = Session(self.manifest, device)
        return self._sessions[device]
