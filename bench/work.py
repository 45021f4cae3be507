"""What a kernel of ours has to do: the bytes it must move and the operations it must compute, at the very least.

Bytes are read off the manifest, so they need no TVM; operations come from the composites.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import Any

from fusion_patterns.run import manifest as m

__all__ = ["flops_of", "kernel_bytes", "work_of"]

Work = dict[str, Any]


def work_of(manifest: m.Manifest, fused: Any) -> dict[str, Work]:
    """By kernel: ``bytes``, ``flops`` (0 where no composite is known for it), and ``conv3x3``.

    ``fused``: the module with composites (``CompiledModule.fused``). ``conv3x3`` is whether most of the operations are
    a 3x3 convolution's that is not depthwise or grouped. Launches with shapes that only a run knows are left out.
    """
    composites = {str(gv.name_hint): func for gv, func in fused.functions_items()}
    work: dict[str, Work] = {}
    for kernel, size in kernel_bytes(manifest).items():
        func = composites.get(composite_name(kernel, composites) or "")
        flops, of_3x3 = flops_of(func) if func is not None else (0, 0)
        work[kernel] = {"bytes": size, "flops": flops, "conv3x3": 2 * of_3x3 > flops}
    return work


def composite_name(kernel: str, names: Any) -> str | None:
    """The composite that a kernel was made from: ``fused_conv2d_chain_0_kernel`` comes from ``fused_conv2d_chain_0``.

    A kernel has a number more where its name was taken in an earlier walk of the compilation.
    """
    stem = re.sub(r"_kernel(_\d+)?$", "", kernel)
    return next((name for name in (stem, re.sub(r"_\d+$", "", stem)) if name in names), None)


def kernel_bytes(manifest: m.Manifest) -> dict[str, int]:
    """Bytes of the distinct tensors that a launch of each kernel reads and writes, each tensor counted once.

    The greatest of all its launches; launches with a tensor of unknown shape are left out.
    """
    constants = {name: (name, nbytes(tensor)) for name, tensor in manifest.constant_tensors.items()}
    found: dict[str, int] = {}
    for function in manifest.functions.values():
        known = dict(constants)
        for param in function.params:
            known.update({name: (name, nbytes(tensor)) for name, tensor in leaves(param.name, param.tensor)})
        for step in m.all_steps(function.body):
            if isinstance(step, m.Alloc | m.Copy):
                known[step.value] = step.value, nbytes(step.tensor)
            elif isinstance(step, m.View) and step.of in known:
                known[step.value] = known[step.of]  # the same bytes
            elif isinstance(step, m.Launch):
                names = [arg for arg in step.args if isinstance(arg, str)]
                tensors = {known[name] for name in names if name in known}
                if all(name in known for name in names) and all(size is not None for _, size in tensors):
                    total = sum(size or 0 for _, size in tensors)
                    found[step.kernel] = max(found.get(step.kernel, 0), total)
    return found


def leaves(name: str, tree: m.TensorTree) -> Iterator[tuple[str, m.Tensor]]:
    """The tensors of a parameter as steps refer to them: ``x``, or ``x#0#1`` inside tuples."""
    if isinstance(tree, m.Tensor):
        yield name, tree
    else:
        for index, part in enumerate(tree):
            yield from leaves(f"{name}#{index}", part)


def nbytes(tensor: m.Tensor) -> int | None:
    """Bytes of a tensor in the form in which it is held; ``None`` where a dimension is only known in a run."""
    dims = [dim for dim in tensor.shape if isinstance(dim, int)]
    return prod(dims) * m.STORAGE[tensor.dtype].itemsize if len(dims) == len(tensor.shape) else None


def flops_of(func: Any) -> tuple[int, int]:
    """Floating point operations of a composite's convolutions and matrix products; those of its full 3x3 convolutions.

    A multiply-add is two. Padding, bias and epilogue count for nothing. ``func``: a Relax function.
    """
    total = of_3x3 = 0
    for block in func.body.blocks:
        for binding in block.bindings:
            call = binding.value
            name = getattr(getattr(call, "op", None), "name", "")
            try:
                if name == "relax.nn.conv2d":
                    _, inputs, height, width = shape(call.args[1])
                    flops = 2 * prod(shape(binding.var)) * inputs * height * width
                    of_3x3 += flops if (height, width, int(call.attrs.groups)) == (3, 3, 1) else 0
                elif name == "relax.nn.conv2d_transpose":
                    _, outputs, height, width = shape(call.args[1])
                    flops = 2 * prod(shape(call.args[0])) * outputs * height * width
                elif name == "relax.matmul":
                    flops = 2 * prod(shape(binding.var)) * shape(call.args[0])[-1]
                else:
                    continue
            except TypeError:  # a symbol for a dimension
                continue
            total += flops
    return total, of_3x3


def shape(expr: Any) -> tuple[int, ...]:
    """The shape of a value; :class:`TypeError` where a dimension is a symbol."""
    return tuple(int(dim) for dim in expr.ty.shape.values)
