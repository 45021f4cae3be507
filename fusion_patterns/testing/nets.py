"""Convolutional networks as plain data: small, and with everything in them that makes fusion hard.

Chains, residuals in both orders, diamonds, squeeze-excite, shared weights, values that many read or that are
returned early, concat and parts of it, pools, prologues, depthwise and grouped convolutions, channels that
four does not divide, float16, a number of images that is not known, importers' kernels, several functions;
and, where a table is given, instances of its rows on values of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusion_patterns.table.model import Table
from fusion_patterns.testing.draft import Draft, Pick
from fusion_patterns.testing.rows import graft
from fusion_patterns.testing.shapes import Infeasible
from fusion_patterns.testing.spec import Graph, Module, Op

__all__ = ["draw_net", "is_tame"]

MOST_MOVES = 7
_JUMPS = {"floor", "ceil", "round", "trunc", "sign", "floor_divide", "floor_mod", "mod"}
_LEAVES = {
    "power",
    "log",
    "exp",
    "sqrt",
    "rsqrt",
    "tan",
    "acos",
    "asin",
    "atanh",
    "acosh",
    "cosh",
    "sinh",
    "atan2",
}
_WILD = frozenset({*_JUMPS, *_LEAVES, "log_add_exp", "bitwise_not", "left_shift", "right_shift"})
"""Operators whose results jump or leave their range: two right ways to compute them may differ at will."""


_BINARY = ("add", "multiply", "subtract", "divide", "maximum", "minimum")
_UNARY = (
    "nn.relu",
    "sigmoid",
    "clip",
    "tanh",
    "nn.silu",
    "nn.prelu",
    "nn.leakyrelu",
    "elementwise",
    "nn.gelu",
    "abs",
)
_CHAIN = (*_UNARY, *_BINARY)


def is_tame(spec: Graph | Module) -> bool:
    """Whether a small error stays small: numbers of two runs can be compared."""
    functions = spec.functions if isinstance(spec, Module) else (spec,)
    return all(_is_tame(graph, op) for graph in functions for op in graph.ops)


def _is_tame(graph: Graph, op: Op) -> bool:
    if op.op == "divide":
        return any(tensor.name == op.args[1] and tensor.constant for tensor in graph.tensors)
    return op.op not in _WILD


def draw_net(pick: Pick, table: Table | None = None, *, tame: bool = False) -> Module:
    """A network; ``tame``: one whose numbers can be compared."""
    functions = pick(((("main", "xcv"),),) * 5 + ((("main", "xcv"), ("other", "ybw")),))
    return Module(tuple(_Net(pick, table, tame, name, letters).graph() for name, letters in functions))


class _Net:
    def __init__(self, pick: Pick, table: Table | None, tame: bool, name: str, letters: str) -> None:
        self.pick, self.table, self.tame = pick, table, tame
        self.draft = Draft(pick(("float32",) * 5 + ("float16",)), name, letters)
        batch = pick((1, 1, 1, 2, "n"))
        self.live = [self.draft.tensor((batch, pick((8, 4, 3, 6, 5)), pick((6, 5, 8)), pick((6, 5, 7))))]
        self.weights: list[str] = []

    def graph(self) -> Graph:
        for _ in range(self.pick(range(1, MOST_MOVES + 1))):
            draft = self.draft
            sizes = len(draft.ops), len(draft.tensors), len(draft.results), len(self.live)
            try:
                self.pick(self._moves())()
                made = Graph(draft.name, tuple(draft.tensors), tuple(draft.ops[sizes[0] :]), ())
                if self.tame and not is_tame(made):
                    raise Infeasible("its numbers can't be compared")
            except Infeasible:
                self._undo(*sizes)
        if not self.draft.ops:
            self._conv()
        if self.pick((False, False, True)):
            self.draft.results.append(self.pick([op.name for op in self.draft.ops]))
        graph = self.draft.graph()
        return replace(graph, results=tuple(dict.fromkeys(graph.results)))

    def _undo(self, ops: int, tensors: int, results: int, live: int) -> None:
        draft = self.draft
        for name in [made.name for made in draft.ops[ops:]] + [made.name for made in draft.tensors[tensors:]]:
            del draft.types[name]
        del draft.ops[ops:], draft.tensors[tensors:], draft.results[results:], self.live[live:]
        self.weights = [weight for weight in self.weights if weight in draft.types]

    def _moves(self) -> tuple[Callable[[], None], ...]:
        usual = (
            *(self._conv, self._conv, self._conv, self._conv, self._residual, self._residual, self._diamond),
            *(self._squeeze_excite, self._concat, self._part, self._pool, self._resize, self._transposed),
            *(self._prologue, self._pair, self._shared, self._kernel, self._other),
        )
        return (*usual, self._row, self._row, self._row) if self.table is not None else usual

    # Values

    def _value(self) -> str:
        """A value to go on from: most often the last."""
        return str(self.pick([self.live[-1], self.live[-1], *self.live]))

    def _emit(self, op: str, *args: str, **attrs: object) -> str:
        return self.draft.emit(op, *args, **attrs)

    def _constant(self, *shape: int) -> str:
        return self.draft.tensor(shape, constant=self.pick((True, True, True, False)))

    def _channels(self, value: str) -> int:
        shape = self.draft.shape(value)
        if len(shape) != 4 or not isinstance(shape[1], int):
            raise Infeasible("no image")
        return shape[1]

    def _vector(self, value: str) -> str:
        channels = self._channels(value)
        shape = self.pick(((1, channels, 1, 1), (channels, 1, 1), (1, 1, 1, 1), ()))
        return self.draft.tensor(shape, constant=True)

    # Moves

    def _convolve(self, value: str, out: int | None = None, stride: int = 1) -> str:
        """A convolution with a chain of operators behind it."""
        channels = self._channels(value)
        mode = self.pick(("plain", "plain", "plain", "depthwise", "grouped", "multiplier"))
        size = self.pick((1, 3))
        groups, given = 1, channels
        if out is None:
            out = self.pick((8, 4, channels, 6, 5, 12))
            stride = self.pick((1, 1, 1, 2))
        if mode in ("depthwise", "multiplier") and out in (channels, 8):
            groups, given, out = channels, 1, channels * (1 if mode == "depthwise" else 2)
        elif mode == "grouped" and channels % 2 == 0 and out % 2 == 0:
            groups, given = 2, channels // 2
        weight = self._constant(out, given, size, size)
        if groups == 1:
            self.weights.append(weight)
        pad = [size // 2] * 2
        made = self._emit("nn.conv2d", value, weight, strides=[stride] * 2, padding=pad, groups=groups)
        return self._chain(made)

    def _chain(self, value: str) -> str:
        for _ in range(self.pick((0, 1, 2, 3))):
            value = self._one(value)
        return value

    def _one(self, value: str) -> str:
        op = self.pick(_CHAIN)
        if op == "nn.prelu":
            return self._emit(op, value, self.draft.tensor((self._channels(value),), constant=True), axis=1)
        if op == "clip":
            return self._emit(op, value, min=0.0, max=6.0)
        if op == "nn.leakyrelu":
            return self._emit(op, value, alpha=0.1)
        if op in _BINARY:
            other = self._vector(value)
            return self._emit(
                op, *((value, other) if op == "divide" or self.pick((True, False)) else (other, value))
            )
        return self._emit(op, value)

    def _conv(self) -> None:
        self.live.append(self._convolve(self._value()))

    def _residual(self) -> None:
        value = self._value()
        made = self._convolve(value, self._channels(value))
        operands = (value, made) if self.pick((True, False)) else (made, value)
        self.live.append(self._chain(self._emit(self.pick(("add", "subtract", "multiply")), *operands)))

    def _pair(self) -> None:
        value = self._value()
        out = self.pick((8, 5))
        first, second = self._convolve(value, out), self._convolve(self._value(), out)
        self.live.append(self._chain(self._emit("add", first, second)))

    def _diamond(self) -> None:
        value = self._convolve(self._value()) if self.pick((True, False)) else self._value()
        one = self._emit(self.pick(("sigmoid", "tanh", "nn.relu")), value)
        two = self.pick((value, self._emit("nn.relu", value)))
        self.live.append(self._emit(self.pick(("multiply", "add", "subtract", "maximum")), two, one))

    def _squeeze_excite(self) -> None:
        value = self._value()
        channels = self._channels(value)
        pooled = self._emit("mean", value, axis=[2, 3], keepdims=True)
        few = self._emit("nn.relu", self._emit("nn.conv2d", pooled, self._constant(4, channels, 1, 1)))
        gate = self._emit("sigmoid", self._emit("nn.conv2d", few, self._constant(channels, 4, 1, 1)))
        self.live.append(
            self._emit("multiply", *((value, gate) if self.pick((True, False)) else (gate, value)))
        )

    def _concat(self) -> None:
        value = self._value()
        other = self.pick((value, self._convolve(value, self.pick((4, 8, 6)))))
        self.live.append(self._chain(self._emit("concat", value, other, axis=self.pick((1, -3)))))

    def _part(self) -> None:
        value = self._value()
        channels = self._channels(value)
        for begin, end in ((0, channels // 2), (channels // 2, channels)):
            self.live.append(self._emit("strided_slice", value, axes=[1], begin=[begin], end=[end]))

    def _pool(self) -> None:
        value = self._value()
        op = self.pick(("nn.max_pool2d", "nn.avg_pool2d"))
        size, stride = self.pick((2, 3)), self.pick((1, 2))
        pads = self.pick(([0, 0], [1, 1]))
        ceil = self.pick((False, False, True))
        made = self._emit(op, value, pool_size=[size] * 2, strides=[stride] * 2, padding=pads, ceil_mode=ceil)
        self.live.append(self._chain(made))

    def _resize(self) -> None:
        value = self._value()
        _, _, height, width = self.draft.shape(value)
        if not isinstance(height, int) or not isinstance(width, int) or height * width > 100:
            raise Infeasible("large enough")
        self.live.append(
            self._chain(
                self._emit(
                    "image.resize2d",
                    value,
                    size=[2 * height, 2 * width],
                    layout="NCHW",
                    method=self.pick(("nearest_neighbor", "linear")),
                    coordinate_transformation_mode="half_pixel",
                    rounding_method="round_prefer_ceil",
                )
            )
        )

    def _transposed(self) -> None:
        value = self._value()
        size = self.pick((2, 3))
        weight = self._constant(self._channels(value), self.pick((8, 5)), size, size)
        made = self._emit("nn.conv2d_transpose", value, weight, strides=[self.pick((1, 2))] * 2)
        self.live.append(self._chain(made))

    def _prologue(self) -> None:
        value = self._value()
        scaled = self._emit("multiply", value, self._vector(value))
        shifted = self._emit("nn.relu", self._emit("add", scaled, self._vector(value)))
        self.live.append(self._convolve(shifted))
        self.live.append(self._emit("concat", value, self._convolve(shifted, 4), axis=1))

    def _shared(self) -> None:
        if not self.weights:
            raise Infeasible("no weights yet")
        value, weight = self._value(), self.pick(self.weights)
        pad = [int(self.draft.shape(weight)[2]) // 2] * 2
        self.live.append(self._chain(self._emit("nn.conv2d", value, weight, padding=pad)))

    def _kernel(self) -> None:
        value = self._value()
        self.live.append(self._emit("elementwise", *([value] * self.pick((1, 2)))))

    def _other(self) -> None:
        """Operators that a table may not know."""
        value = self._value()
        op = self.pick(("nn.softmax", "permute_dims", "nn.pad", "astype", "negative"))
        attrs: dict[str, dict[str, object]] = {
            "nn.softmax": {"axis": 1},
            "permute_dims": {"axes": [0, 1, 3, 2]},
            "nn.pad": {"pad_width": [0, 0, 0, 0, 1, 1, 1, 1]},
            "astype": {"dtype": self.draft.types[value].dtype},
        }
        self.live.append(self._emit(op, value, **attrs.get(op, {})))

    def _row(self) -> None:
        assert self.table is not None
        made = graft(self.draft, self.pick, self.pick(self.table.patterns), self.table, self.live)
        # The graft says what leaves it; here whatever nothing takes does.
        self.draft.results.pop()
        if len(self.draft.shape(made)) == 4:
            self.live.append(made)
