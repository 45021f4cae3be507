"""What the tests share: an OpenCL device, the folder of hazards beside the checkout, reproducible draws."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hypothesis
import pytest

from fusion_patterns.errors import DeviceError
from fusion_patterns.run import Device, pick_device

SHARED = Path(__file__).resolve().parents[2] / "shared"

if (SHARED / "hazards").is_dir():
    sys.path.append(str(SHARED / "hazards"))

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def opencl_device() -> Device:
    """A device that has images and passed the probe; without one the test is skipped, with the reason."""
    try:
        return pick_device()
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder ``../shared`` with the hazards and the corpus; the test is skipped where it is not there."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there")
    return SHARED
