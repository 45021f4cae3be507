"""TVM's own OpenCL runtime, where it is present: its virtual machine instead of our manifest.

TVM's wheel has no OpenCL runtime. It loads one that lies beside its libraries, or that a package offers through the
entry points ``tvm.backends``; then ``CompiledModule.run(inputs, device="tvm")`` goes this way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from .errors import DeviceError
from .lower.kernels import first_line
from .reference import flatten

__all__ = ["DEVICE", "has_runtime", "run_on_vm"]

Array = np.ndarray[Any, Any]

DEVICE = "tvm"
"""The name that asks for TVM's runtime where a device is named."""


def has_runtime() -> bool:
    """Whether TVM has an OpenCL runtime and a device for it."""
    return bool(tvm.opencl(0).exist)


def run_on_vm(
    mod: tvm.IRModule, target: Any, pipeline: Any, inputs: Mapping[str, Array], function: str = "main"
) -> list[Array]:
    """Build a module with our pipeline for TVM's VM and run it on ``tvm.opencl(0)``.

    ``inputs``: arrays by the module's parameter names. Returns the results, nested tuples flattened.
    Raises :class:`DeviceError` if TVM has no OpenCL runtime, or refuses the module.
    """
    if not has_runtime():
        raise DeviceError(
            "TVM has no OpenCL runtime here (its wheel is built without one); leave the device out to run on any "
            "OpenCL device through pyopencl"
        )
    try:
        executable = relax.build(mod, target, relax_pipeline=pipeline)
        # TVM wants a device for each vdevice of the module, whatever their scopes; a spare one does no harm
        machine = relax.VirtualMachine(executable, [tvm.opencl(0)] * 4)
        device = tvm.opencl(0)
        args = [tvm.runtime.tensor(np.asarray(inputs[str(p.name)]), device) for p in mod[function].params]
        return flatten(machine[function](*args))
    except Exception as error:  # TVM raises many kinds
        raise DeviceError(f"TVM's OpenCL runtime: {first_line(error)}") from None
