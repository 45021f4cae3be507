"""A built module as data, and its run on any OpenCL device: no TVM in here.

from fusion_patterns.run import Session, load
outputs = Session(load("folder")).run({"data": array})
"""

from .check import check
from .interpret import InputError
from .manifest import (
    Alloc,
    Bind,
    Call,
    Copy,
    Dim,
    Function,
    If,
    Kernel,
    Launch,
    Manifest,
    Param,
    Result,
    Scalar,
    Shape,
    Step,
    Tensor,
    TensorTree,
    View,
)
from .opencl import Device, DeviceInfo, KernelTime, Session, devices, pick_device
from .store import FORMAT, check_folder, load, save

__all__ = [
    "FORMAT",
    "Alloc",
    "Bind",
    "Call",
    "Copy",
    "Device",
    "DeviceInfo",
    "Dim",
    "Function",
    "If",
    "InputError",
    "Kernel",
    "KernelTime",
    "Launch",
    "Manifest",
    "Param",
    "Result",
    "Scalar",
    "Session",
    "Shape",
    "Step",
    "Tensor",
    "TensorTree",
    "View",
    "check",
    "check_folder",
    "devices",
    "load",
    "pick_device",
    "save",
]
