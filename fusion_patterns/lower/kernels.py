"""Scheduled PrimFuncs -> OpenCL C, and how the host starts it.

The stock TIR pipeline runs up to the split of host and device; what would wrap the host part into TVM's calling
convention is left out, because our host is the manifest: a list of launches with their arguments and extents.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import structural_map, structural_walk

from .. import tvm_compat
from .aligned import with_aligned_vectors
from .dims import dim

__all__ = ["Argument", "KernelFault", "KernelLaunch", "LoweredFunc", "lower_kernels"]

HOST_PACKAGING = ["tirx.MakePackedAPI", "tirx.FP8StorageLegalize", "tirx.BF16StorageLegalize"]
"""Passes that come after the split and shape the host part only."""


class KernelFault(Exception):
    """A scheduled PrimFunc that must not reach a device. The message is the reason."""


@dataclass(frozen=True)
class Argument:
    """What a kernel's argument is: parameter ``index`` of the PrimFunc, scratch ``index``, or a number."""

    kind: str
    index: int = 0
    expr: int | str = 0
    dtype: str = ""


@dataclass(frozen=True)
class KernelLaunch:
    """One kernel start: its name and source, what each position takes, arguments, work groups and work items."""

    kernel: str
    source: str
    signature: tuple[str, ...]
    args: tuple[Argument, ...]
    grid: tuple[int | str, int | str, int | str]
    block: tuple[int | str, int | str, int | str]


@dataclass(frozen=True)
class LoweredFunc:
    """A PrimFunc on the device: scratch tensors (shape, dtype) and kernel starts in order.

    Extents and shapes that are not known are expressions over the PrimFunc's own symbols.
    """

    scratch: tuple[tuple[tuple[int | str, ...], str], ...]
    launches: tuple[KernelLaunch, ...]


def lower_kernels(
    funcs: dict[str, Any], target: Any, *, aligned: bool = True
) -> tuple[dict[str, LoweredFunc], dict[str, str]]:
    """Lower scheduled PrimFuncs to OpenCL C.

    ``aligned``: access aligned vectors of a buffer through a vector's pointer (see :mod:`.aligned`), not as stock does.
    Returns what was lowered by name, and for each PrimFunc that failed the reason. One bad PrimFunc does not
    stop the others.
    """
    done: dict[str, LoweredFunc] = {}
    faults: dict[str, str] = {}
    for name, func in funcs.items():
        try:
            done[name] = _lower(name, func, target, aligned)
        except KernelFault as fault:
            faults[name] = str(fault)
        except Exception as error:  # TVM raises many kinds; whichever it was, this kernel can't be built
            faults[name] = first_line(error)
    return done, faults


def first_line(error: Exception) -> str:
    """The sentence of a TVM error: its last line that is not a trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "rror" in line and not line.startswith("File")]
    return (named or lines or [type(error).__name__])[-1][:300]


def _lower(name: str, func: Any, target: Any, aligned: bool) -> LoweredFunc:
    func = with_c_names(func).with_attr("global_symbol", name)
    mod = tvm.IRModule({name: func})
    mod = tirx.transform.BindTarget(target)(mod)
    with tvm.transform.PassContext(disabled_pass=HOST_PACKAGING):
        mod = tvm_compat.adreno_tir_pipeline()[0](mod)
    host = None
    sources: dict[str, tuple[str, tuple[str, ...]]] = {}
    for gv, part in sorted(mod.functions_items(), key=lambda item: str(item[0].name_hint)):
        if "calling_conv" in part.attrs:
            _check_stores(part)
            source = _codegen(gv, part, target, aligned)
            sources[str(gv.name_hint)] = source, signature_of(source)
        else:
            host = part
    if host is None:
        raise KernelFault("no host part")
    return _Host(host, sources).read()


def with_c_names(func: Any) -> Any:
    """The PrimFunc with parameters that OpenCL C can name; importers keep names such as ``gpu_0/data_0``."""
    taken = {str(param.name) for param in func.params}
    changed = {}
    for param in func.params:
        name = str(param.name)
        if (name.isidentifier() and name.isascii()) or not hasattr(param.ty, "storage_scope"):
            continue
        stem = new = "p_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        count = 0
        while new in taken:
            count += 1
            new = f"{stem}_{count}"
        taken.add(new)
        scope = str(param.ty.storage_scope) or "global"
        changed[param] = tirx.decl_buffer(param.ty.shape, param.ty.dtype, new, scope=scope)
    if not changed:
        return func
    params = [changed.get(param, param) for param in func.params]
    body = structural_map(func.body, (tvm.ir.Var, lambda var: changed.get(var, var)))
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def _codegen(gv: Any, kernel: Any, target: Any, aligned: bool) -> str:
    build = importlib.import_module("tvm.tirx.build")
    device = tvm_compat.adreno_tir_pipeline()[2]()(tvm.IRModule({gv: kernel}))
    if aligned:
        device = tvm.IRModule({gv: with_aligned_vectors(device[gv])})
    source = str(build.codegen_build(device, target).inspect_source())
    return "".join(line for line in source.splitlines(keepends=True) if not line.startswith("// Function:"))


def signature_of(source: str) -> tuple[str, ...]:
    """What each argument of the kernel takes, read from its prototype."""
    match = re.search(r"__kernel void \w+\((.*?)\)[;\s]", source, re.S)
    if match is None:
        raise KernelFault("the generated source has no kernel")
    kinds = []
    for argument in filter(None, (part.strip() for part in match.group(1).split(","))):
        if "__read_only" in argument:
            kinds.append("image_read")
        elif "__write_only" in argument:
            kinds.append("image_write")
        elif "__global" in argument or "*" in argument:
            kinds.append("buffer")
        else:
            kinds.append("scalar:" + _SCALARS.get(argument.split()[-2], argument.split()[-2]))
    return tuple(kinds)


_SCALARS = {"int": "int32", "uint": "uint32", "long": "int64", "ulong": "uint64", "float": "float32"}


def _check_stores(kernel: Any) -> None:
    """Every store to a texture moves a whole texel."""

    def visit(call: Any) -> None:
        if getattr(call.op, "name", "") == "tirx.texture2d_store":
            lanes = int(tvm.DataType(str(call.args[-1].ty.dtype)).lanes)
            if lanes != 4:
                raise KernelFault(f"a texture store moves {lanes} lanes, not a whole texel")

    structural_walk(kernel.body, (tvm.ir.Call, visit))


def symbols_of(func: Any) -> set[str]:
    """Names of the numbers that a PrimFunc is given: scalar parameters, and what its parameters' shapes bind."""
    names = {str(param.name) for param in func.params if not hasattr(param.ty, "storage_scope")}
    for param in func.params:
        for extent in getattr(param.ty, "shape", ()):
            structural_walk(extent, (tvm.ir.Var, lambda var: names.add(str(var.name))))
    return names


class _Host:
    """Reads launches off the host part of a split PrimFunc."""

    def __init__(self, func: Any, sources: dict[str, tuple[str, tuple[str, ...]]]) -> None:
        self.func, self.sources = func, sources
        self.buffers: dict[Any, Argument] = {
            param: Argument("param", index) for index, param in enumerate(func.params)
        }
        self.known: dict[str, int | str] = {}
        self.symbols = symbols_of(func)
        self.scratch: list[tuple[tuple[int | str, ...], str]] = []
        self.launches: list[KernelLaunch] = []

    def read(self) -> LoweredFunc:
        self._statement(self.func.body)
        if not self.launches:
            raise KernelFault("nothing in it runs on the device: a loop is bound to no thread")
        return LoweredFunc(tuple(self.scratch), tuple(self.launches))

    def _statement(self, node: Any) -> None:
        kind = type(node).__name__
        if kind == "SeqStmt":
            for part in node.seq:
                self._statement(part)
        elif kind == "DeclBuffer":
            self.buffers[node.buffer] = self._buffer(node.data)
        elif kind == "Bind":
            self.known[str(node.var.name)] = dim(node.value, self.known)
        elif kind == "AllocBuffer":
            self._allocate(node.buffer)
            if hasattr(node, "body"):
                self._statement(node.body)
        elif kind == "AttrStmt":
            self._statement(node.body)
        elif kind == "Evaluate":
            self._launch(node.value)
        else:
            raise KernelFault(f"a statement would run on the host ({kind}): a loop is bound to no thread")

    def _allocate(self, buffer: Any) -> None:
        self.buffers[buffer] = Argument("scratch", len(self.scratch))
        kind = tvm.DataType(str(buffer.ty.dtype))
        lanes = (int(kind.lanes),) if kind.lanes > 1 else ()
        shape = tuple(dim(d, self.known) for d in buffer.ty.shape) + lanes
        self.scratch.append((shape, str(kind).split("x")[0]))

    def _buffer(self, data: Any) -> Argument:
        buffer = data.args[0] if isinstance(data, tvm.ir.Call) else data
        if buffer not in self.buffers:
            raise KernelFault(f"the host part reads `{buffer}`, which it does not define")
        return self.buffers[buffer]

    def _launch(self, call: Any) -> None:
        name = getattr(getattr(call, "op", None), "name", "")
        if name != "tirx.call_ffi_kernel":
            raise KernelFault(f"the host part calls {name or call}")
        kernel = str(call.args[0].value)
        source, signature = self.sources[kernel]
        tags = [str(tag) for tag in call.attrs.launch_params]
        values = list(call.args[1:])
        arguments, sizes = values[: len(values) - len(tags)], values[len(values) - len(tags) :]
        grid: dict[str, int | str] = {}
        block: dict[str, int | str] = {}
        for tag, size in zip(tags, sizes, strict=True):
            if not tag.startswith(("blockIdx.", "threadIdx.")):
                raise KernelFault(f"a loop is bound to {tag}, which OpenCL has not")
            (grid if tag.startswith("block") else block)[tag[-1]] = dim(size, self.known)
        self.launches.append(
            KernelLaunch(
                kernel,
                source,
                signature,
                tuple(self._argument(a) for a in arguments),
                (grid.get("x", 1), grid.get("y", 1), grid.get("z", 1)),
                (block.get("x", 1), block.get("y", 1), block.get("z", 1)),
            )
        )

    def _argument(self, value: Any) -> Argument:
        if getattr(getattr(value, "op", None), "name", "") == "tirx.buffer_data" or value in self.buffers:
            return self._buffer(value)
        expr = dim(value, self.known)
        unknown = set(re.findall(r"[A-Za-z_]\w*", str(expr))) - self.symbols - {"min", "max"}
        if unknown:
            # a lane that TVM could not vectorize stays in the kernel as a variable that nothing defines
            raise KernelFault(f"the kernel reads `{min(unknown)}`, which nothing defines")
        return Argument("scalar", expr=expr, dtype=str(value.ty.dtype))
