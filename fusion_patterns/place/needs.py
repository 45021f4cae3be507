"""The layout that each operand of a composite must have for its packed kernel.

Needs are read off the composite's body, op by op: what the anchor wants (:mod:`.anchors`), and how each
operand of the epilogue meets the value (same shape, one number for each channel, any other broadcast). A
parameter that two ops want in two layouts (a tensor that is data and weight at once) is passed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import relax

from .anchors import ANCHORS, REDUCTIONS, ROW_RANK, NotPacked, conv2d, dense, global_pool
from .calls import op_name, static_shape, tensor_args
from .layouts import CHANNEL_VECTOR, DATA, PLAIN, WEIGHT

__all__ = ["ELEMENTWISE", "Needs", "Operand", "leading_moves", "needs_of"]

_ELEMENTWISE = """
    add subtract multiply divide maximum minimum power abs ceil clip cos erf exp floor log negative nn.relu
    nn.relu6 nn.leakyrelu nn.prelu nn.gelu nn.gelu_tanh nn.selu nn.silu nn.softplus round rsqrt sigmoid sign sin sqrt
    square tanh astype greater greater_equal less less_equal equal not_equal logical_and logical_or
    logical_not where
"""
ELEMENTWISE = frozenset(f"relax.{name}" for name in _ELEMENTWISE.split())
"""Ops whose packed form is the same op on packed tensors."""


SHUFFLE_STEPS = ("relax.reshape", "relax.permute_dims", "relax.reshape")
MOVES = frozenset(SHUFFLE_STEPS)
CHANNEL_POOL_STEPS = ("relax.expand_dims", "relax.nn.avg_pool3d", "relax.squeeze")
_MOVED = MOVES | frozenset(CHANNEL_POOL_STEPS)
FLATTENS = frozenset(("relax.reshape", "relax.squeeze", "relax.nn.batch_flatten"))


@dataclass(frozen=True)
class Operand:
    """One parameter of the packed composite: which of the composite's parameters, in which layout."""

    param: int
    name: str
    layout: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Needs:
    """What a composite needs: its operands, and for each op argument the operand that it reads.

    ``reads`` maps (number of the binding, number of the argument) to an index into ``operands``.
    """

    operands: tuple[Operand, ...]
    reads: dict[tuple[int, int], int]
    output_layout: str
    output_shape: tuple[int, ...]
    output_dtype: str


def broadcast_layout(shape: tuple[int, ...], result: tuple[int, ...]) -> str:
    """How an elementwise operand of ``shape`` is read when the result has shape (N, C, H, W).

    (1, C, 1, 1) is data of one pixel, so that a gate which another composite computes needs no conversion.
    """
    full = (1,) * (4 - len(shape)) + shape
    if prod(full) == 1 or full[1] != result[1]:
        return PLAIN
    if len(shape) == 4:
        return DATA
    return CHANNEL_VECTOR if full[2] == full[3] == 1 else PLAIN


class _Reader:
    def __init__(self, func: Any) -> None:
        self.params = list(func.params)
        self.number = {param: i for i, param in enumerate(self.params)}
        self.operands: list[Operand] = []
        self.index: dict[tuple[int, str], int] = {}
        self.reads: dict[tuple[int, int], int] = {}
        self.reduced: set[Any] = set()
        """Values that a reduction went into: to broadcast one would compute it again for every pixel."""
        self.rows: set[Any] = set()
        """Of them, what a dense layer computed: (N, C), row-major."""
        self.turned: set[Any] = set()
        """Results whose axes the composite puts in another order, row-major."""
        self.gates: set[Any] = set()
        """Of them, one pixel that layers on one pixel computed: a kernel may broadcast it to an image, and compute it
        once for each work group."""
        self.gated: list[str] = []
        """Names of values that such a pixel was broadcast to."""
        self.others: list[str] = []
        """Names of what anchors compute that are no such pixels, or none that the next one is computed from."""

    def read(self, binding: int, arg: int, expr: Any, layout: str, culprit: str) -> None:
        """Note that an op's argument reads ``expr`` in ``layout``, if ``expr`` is a parameter."""
        if expr not in self.number:
            if layout not in (DATA,) and not (layout == PLAIN and static_shape(expr) is not None):
                raise NotPacked(f"a value made inside the composite is wanted as {layout}", culprit)
            return
        number = self.number[expr]
        shape = static_shape(expr)
        if shape is None:
            raise NotPacked(f"parameter `{expr.name}` has no static shape", culprit)
        key = (number, layout)
        if key not in self.index:
            taken = any(other == number for other, _ in self.index)
            self.index[key] = len(self.operands)
            name = expr.name if not taken else f"{expr.name}_{layout.lower()}"
            self.operands.append(Operand(number, name, layout, shape, str(expr.ty.dtype)))
        self.reads[binding, arg] = self.index[key]


def needs_of(func: Any) -> Needs:
    """What the packed kernel of a composite needs.

    Raises :class:`NotPacked` with the reason if there is none.
    """
    reader = _Reader(func)
    bindings = [b for block in func.body.blocks for b in block.bindings]
    if not bindings:
        raise NotPacked("the composite is empty", "")
    moves = leading_moves(bindings)
    if moves:
        _move(reader, bindings[moves - 1], bindings[0])
    for number in range(moves, len(bindings)):
        _binding(reader, number, bindings, func.body.body)
    if reader.gated and reader.others:
        also = reader.others[0]
        raise NotPacked(
            f"`{reader.gated[0]}` broadcasts a pixel, and no kernel computes `{also}` as well", also
        )
    output = func.body.body
    shape = static_shape(output)
    if shape is None or not any(output.same_as(b.var) for b in bindings):
        raise NotPacked("the composite returns more than one value", "")
    if len(shape) == ROW_RANK and output not in reader.rows:
        raise NotPacked("rows that no dense layer computed have no packed kernel", str(output.name))
    held = PLAIN if len(shape) == ROW_RANK or output in reader.turned else DATA
    return Needs(tuple(reader.operands), reader.reads, held, shape, str(output.ty.dtype))


def _binding(reader: _Reader, number: int, bindings: list[Any], output: Any) -> None:
    binding = bindings[number]
    call, name, shape = binding.value, str(binding.var.name), static_shape(binding.var)
    if isinstance(call, relax.Var):
        return
    op = op_name(call)
    if shape is not None and len(shape) == ROW_RANK:
        _row(reader, number, binding, op, shape)
    elif op == "relax.reshape" and call.args[0] in reader.rows:
        _pixel(reader, binding)
    elif op in _MOVED and shape is not None:
        _moved(reader, number, bindings, output)
    elif shape is None or len(shape) != 4:
        raise NotPacked(f"`{name}` is not a tensor of four static dimensions", name)
    else:
        _image(reader, number, binding, op, shape)


def _image(reader: _Reader, number: int, binding: Any, op: str, shape: tuple[int, ...]) -> None:
    call, name = binding.value, str(binding.var.name)
    if op in REDUCTIONS or any(arg in reader.reduced for arg in tensor_args(call)):
        reader.reduced.add(binding.var)
    if _is_gate(reader, call, op, shape, name):
        reader.gates.add(binding.var)
    if op in ANCHORS:
        _anchor(reader, number, call, binding.var)
    elif op in ELEMENTWISE:
        _elementwise(reader, number, call, op, shape, name)
    else:
        raise NotPacked(f"no packed kernel for {op or type(call).__name__}", name)


def _anchor(reader: _Reader, number: int, call: Any, var: Any) -> None:
    name, before = str(var.name), (reader.gates | reader.rows) - {var}
    if var not in reader.gates or (before and tensor_args(call)[0] not in before):
        reader.others.append(name)
    wanted = ANCHORS[op_name(call)](call, name)
    for arg, (expr, kind) in enumerate(zip(tensor_args(call), wanted, strict=True)):
        reader.read(number, arg, expr, kind, name)


def _row(reader: _Reader, number: int, binding: Any, op: str, shape: tuple[int, ...]) -> None:
    """Values of two dimensions (N, C): averages of whole images, what a dense layer makes of rows, its epilogue."""
    call, name = binding.value, str(binding.var.name)
    tensors = tensor_args(call)
    if op == "relax.mean":
        (kind,) = global_pool(call, name)
        reader.others.append(name)
        reader.read(number, 0, tensors[0], kind, name)
    elif op in FLATTENS and tensors[0] in reader.reduced and static_shape(tensors[0]) == (*shape, 1, 1):
        pass
    elif op == "relax.matmul":
        if tensors[0] in reader.rows:
            raise NotPacked(f"`{name}` multiplies what the composite's own dense layer computes", name)
        if reader.gates or reader.rows:
            reader.others.append(name)
        for arg, (expr, kind) in enumerate(zip(tensors, dense(call, name), strict=True)):
            reader.read(number, arg, expr, kind, name)
        reader.rows.add(binding.var)
    elif op in ELEMENTWISE and any(tensor in reader.rows for tensor in tensors):
        if op == "relax.nn.prelu" and int(call.attrs.axis) not in (1, -1):
            raise NotPacked("prelu along another axis than the channels", name)
        for arg, expr in enumerate(tensors):
            operand = static_shape(expr)
            if operand is None or len(operand) > ROW_RANK:
                raise NotPacked(f"an operand of `{name}` is not a row of known size", name)
            reader.read(number, arg, expr, PLAIN, name)
        reader.rows.add(binding.var)
    else:
        raise NotPacked(f"no packed kernel for {op or type(call).__name__} on rows", name)
    reader.reduced.add(binding.var)


def _moved(reader: _Reader, number: int, bindings: list[Any], output: Any) -> None:
    """Ops that view a tensor in another way or change the order of its axes, and what stands among them."""
    binding = bindings[number]
    call, name = binding.value, str(binding.var.name)
    if op_name(call) == "relax.permute_dims" and _is_turn(call):
        _turn(reader, number, binding, output.same_as(binding.var))
    elif op_name(call) in MOVES:
        _shuffle(reader, number, call, bindings, name)
    else:
        _channel_pool(reader, number, bindings, name)


def _is_turn(call: Any) -> bool:
    """Whether a call puts the axes of an image in another order; a shuffle's have five axes."""
    source = static_shape(call.args[0])
    return source is not None and len(source) == 4 and call.attrs.axes is not None


def _turn(reader: _Reader, number: int, binding: Any, is_result: bool) -> None:
    """The composite's result in another order of axes, written plain."""
    var, name = binding.var, str(binding.var.name)
    if not is_result:
        raise NotPacked(f"`{name}` changes the order of axes inside of the composite", name)
    reader.turned.add(var)


def leading_moves(bindings: list[Any]) -> int:
    """How many reshapes and transpositions a composite begins with, if the first is a transposition."""
    if not bindings or op_name(bindings[0].value) != "relax.permute_dims":
        return 0
    count = 1
    while (
        count < len(bindings)
        and op_name(bindings[count].value) in MOVES
        and bindings[count].value.args[0].same_as(bindings[count - 1].var)
    ):
        count += 1
    return count


def _move(reader: _Reader, last: Any, first: Any) -> None:
    """A tensor of any rank as the module has it, moved into the order of an image."""
    name, shape = str(last.var.name), static_shape(last.var)
    if shape is None or len(shape) != 4:
        raise NotPacked(f"`{name}` is moved to no tensor of four static dimensions", name)
    if str(last.var.ty.dtype) not in ("float32", "float16"):
        raise NotPacked(f"{last.var.ty.dtype} is not moved into packed layout", name)
    reader.read(0, 0, first.value.args[0], PLAIN, name)


def _pixel(reader: _Reader, binding: Any) -> None:
    """A row that a dense layer computed, (N, C), seen as an image of one pixel, (N, C, 1, 1)."""
    row, name = static_shape(binding.value.args[0]), str(binding.var.name)
    if row is None or static_shape(binding.var) != (*row, 1, 1):
        raise NotPacked(f"only as (N, C, 1, 1) the row that becomes `{name}` has a packed kernel", name)
    reader.reduced.add(binding.var)
    reader.gates.add(binding.var)


def _is_gate(reader: _Reader, call: Any, op: str, shape: tuple[int, ...], name: str) -> bool:
    """Whether a value is one pixel that a layer on one pixel computes, or is made of such a one."""
    tensors = tensor_args(call)
    if prod(shape[2:]) > 1:
        return False
    if op == "relax.nn.conv2d":
        shapes = [static_shape(tensor) for tensor in tensors]
        is_dense = int(call.attrs.groups) == 1 and conv2d(call, name)[1] == WEIGHT
        return is_dense and all(one is not None and prod(one[2:]) == 1 for one in shapes)
    return op in ELEMENTWISE and any(tensor in reader.gates for tensor in tensors)


def _shuffle(reader: _Reader, number: int, call: Any, bindings: list[Any], name: str) -> None:
    """Channels shuffled between groups: (N, G, C/G, H, W) -> (N, C/G, G, H, W), before and after (N, C, H, W)."""
    steps = [binding.value for binding in bindings[number : number + 3]]
    source = static_shape(call.args[0])
    if op_name(call) == "relax.reshape" and source is not None and len(source) == 4:
        shapes = [static_shape(step) for step in steps]
        if [op_name(step) for step in steps] == list(SHUFFLE_STEPS) and None not in shapes:
            split = shapes[0]
            assert split is not None
            n, channels, height, width = source
            groups = split[1] if len(split) == 5 else 1
            axes = [int(axis) for axis in steps[1].attrs.axes or ()]
            regular = split == (n, groups, channels // groups, height, width) and shapes[2] == source
            if regular and axes == [0, 2, 1, 3, 4]:
                reader.read(number, 0, call.args[0], DATA, name)
                return
    elif (
        number
        and op_name(bindings[number - 1].value) in MOVES
        and call.args[0].same_as(bindings[number - 1].var)
    ):
        return
    raise NotPacked("only a shuffle of channels between groups has a packed kernel", name)


def _channel_pool(reader: _Reader, number: int, bindings: list[Any], name: str) -> None:
    """Averages over neighbouring channels: the channels as the depth of a volume, and back to (N, C, H, W)."""
    variables = [binding.var for binding in bindings[number : number + 3]]
    calls = [binding.value for binding in bindings[number : number + 3]]
    if [op_name(call) for call in calls] == list(CHANNEL_POOL_STEPS):
        source, attrs = static_shape(calls[0].args[0]), calls[1].attrs
        volume = None if source is None else (source[0], 1, *source[1:])
        chained = all(call.args[0].same_as(var) for var, call in zip(variables, calls[1:], strict=False))
        regular = [static_shape(var) for var in variables] == [volume, volume, source]
        window = [int(size) for size in attrs.pool_size]
        ones = all(int(step) == 1 for step in (*window[1:], *attrs.strides, *attrs.dilation))
        counts = bool(attrs.count_include_pad) and str(attrs.layout) == "NCDHW"
        if chained and regular and ones and counts:
            reader.read(number, 0, calls[0].args[0], DATA, name)
            return
    elif op_name(bindings[number].value) in CHANNEL_POOL_STEPS[1:]:
        before = bindings[number - 1]
        if bindings[number].value.args[0].same_as(before.var) and op_name(before.value) in CHANNEL_POOL_STEPS:
            reader.reduced.add(bindings[number].var)
            return
    raise NotPacked("only averages over neighbouring channels have a packed kernel in a volume", name)


def _elementwise(reader: _Reader, number: int, call: Any, op: str, shape: tuple[int, ...], name: str) -> None:
    tensors = tensor_args(call)
    computed = [arg for arg in tensors if arg in reader.reduced]
    if computed and all(static_shape(arg) != shape for arg in computed):
        if not all(arg in reader.gates and static_shape(arg) == (*shape[:2], 1, 1) for arg in computed):
            raise NotPacked(f"`{name}` broadcasts the value that the composite computes to {shape}", name)
        reader.gated.append(name)
    for arg, expr in enumerate(tensors):
        operand = static_shape(expr)
        if operand is None:
            raise NotPacked(f"an operand of `{name}` has no static shape", name)
        if op == "relax.nn.prelu" and arg == 1:
            if int(call.attrs.axis) != 1:
                raise NotPacked("prelu along another axis than the channels", name)
            wanted = CHANNEL_VECTOR if operand[0] == shape[1] and shape[1] > 1 else PLAIN
        else:
            wanted = broadcast_layout(operand, shape)
        reader.read(number, arg, expr, wanted, name)
