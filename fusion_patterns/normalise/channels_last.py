"""Channels that importers put last for a while, left where a convolution wants them.

    permute_dims(x, [0, 2, 3, 1]) -> layer_norm, matmul, elementwise ... -> permute_dims(.., [0, 3, 1, 2])
    reshape(x, (N, C, HW)), permute_dims(.., [0, 2, 1]) -> the same, on tokens

is computed on images (N, C, H, W): a matmul with a constant becomes a 1x1 convolution, a layer norm one of axis 1,
anything elementwise stays what it is. A *region* is what such values reach through these operators. It is rewritten as
a whole, and only if that leaves fewer transpositions: where others read one of its values as it was, that one is
transposed again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from tvm import relax
from tvm.ir import Call, GenericConst

from fusion_patterns.normalise.movement import Movement
from fusion_patterns.normalise.rewrite import constant_of, op_name, static_shape

__all__ = ["channels_first"]

_RESHAPES = ("reshape", "squeeze", "expand_dims", "flatten", "nn.batch_flatten")
_UNARY = (
    *(
        "nn.relu",
        "nn.gelu",
        "nn.gelu_tanh",
        "nn.silu",
        "nn.leakyrelu",
        "nn.softplus",
        "sigmoid",
        "tanh",
        "clip",
    ),
    *("abs", "erf", "exp", "log", "negative", "sqrt", "rsqrt", "square"),
)
_BINARY = ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
_FLOATS = ("float16", "float32")

Image = tuple[int, int, int]
"""Batch, channels, pixels."""


def channels_first(func: relax.Function) -> relax.Function:
    """*func* with those regions of its dataflow blocks rewritten that get rid of transpositions, or *func* itself.

    What is not a tensor of known shape is left alone.
    """
    blocks, changed = [], False
    for block in func.body.blocks:
        region = _Block(block) if isinstance(block, relax.DataflowBlock) else None
        worth = region.worth() if region is not None else set()
        if region is not None and worth:
            block, changed = _Writer(region, worth).block(), True
        blocks.append(block)
    if not changed:
        return func
    body = relax.BlockBuilder().normalize(relax.SeqExpr(blocks, func.body.body))
    return relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs, func.span)


@dataclass(frozen=True)
class _View:
    """A value as what was moved of ``origin``: of a tensor as it is, or of the image of a value of a region."""

    origin: relax.Expr
    movement: Movement
    turned: bool
    """Whether a transposition is among the moves."""
    whole: Image | None = None
    """The image that the origin is, if it is a value of a region."""

    def image(self) -> Image | None:
        """Batch, channels and pixels, if the value is an image whose channels were put last."""
        found = self.movement.channels_last() if self.turned else None
        if found is None or found == self.whole:
            return found
        # an image of one pixel is a row of a matrix as well: the source says which
        one_pixel = static_shape(self.origin) == (*found, 1)
        return found if self.whole is None and (found[2] > 1 or one_pixel) else None


@dataclass
class _Region:
    """Values that are rewritten together: their transpositions ``before``, and those that are left ``after``."""

    before: int = 0
    after: int = 0


@dataclass
class _Block:
    """A dataflow block: its views of images, what is computed on them, and the regions that these form."""

    block: relax.DataflowBlock
    views: dict[relax.Var, _View] = field(default_factory=dict)
    computed: dict[relax.Var, Image] = field(default_factory=dict)
    """Values that can be computed on images."""
    parents: dict[relax.Expr, relax.Expr] = field(default_factory=dict)
    read: set[relax.Var] = field(default_factory=set)
    """Views and computed values that others read as they are."""

    def __post_init__(self) -> None:
        for binding in self.block.bindings:
            var, value = binding.var, getattr(binding, "value", None)
            if isinstance(binding, relax.VarBinding) and (
                self._move(var, value) or self._compute(var, value)
            ):
                if not isinstance(var, relax.DataflowVar):
                    self.read.add(var)
            elif value is not None:
                self.read.update(relax.analysis.free_vars(value))

    def worth(self) -> set[relax.Expr]:
        """The regions, each by its first value, that are left with fewer transpositions than they have."""
        regions: dict[relax.Expr, _Region] = {self.root(var): _Region() for var in self.computed}
        for binding in self.block.bindings:
            view = self.views.get(binding.var)
            region = regions.get(self.root(view.origin)) if view is not None else None
            if view is not None and region is not None:
                region.before += op_name(binding.value) == "permute_dims"
                region.after += binding.var in self.read and not view.movement.is_reshape
        return {root for root, region in regions.items() if region.after < region.before}

    def root(self, value: relax.Expr) -> relax.Expr:
        """The first value of the region to which a value belongs."""
        while value in self.parents:
            value = self.parents[value]
        return value

    def _move(self, var: relax.Var, value: relax.Expr) -> bool:
        """Note a reshape or a transposition; False if the value is none that can be followed."""
        name = op_name(value)
        if name not in (*_RESHAPES, "permute_dims"):
            return False
        assert isinstance(value, Call)
        source, shape = value.args[0], static_shape(value)
        before = self._view(source)
        if before is None or shape is None:
            return False
        if name == "permute_dims":
            axes = value.attrs.axes
            order = (
                tuple(range(len(shape)))[::-1] if axes is None else tuple(int(a) % len(shape) for a in axes)
            )
            movement: Movement | None = before.movement.permuted(order)
        else:
            movement = before.movement.reshaped(shape)
        if movement is None:
            return False
        turned = before.turned or name == "permute_dims"
        self.views[var] = _View(before.origin, movement, turned, before.whole)
        return True

    def _view(self, expr: relax.Expr) -> _View | None:
        if expr in self.views:
            return self.views[expr]
        shape = static_shape(expr) if isinstance(expr, relax.Var) else None
        return None if not shape or 0 in shape else _View(expr, Movement.of(shape), False)

    def _compute(self, var: relax.Var, value: relax.Expr) -> bool:
        """Note what can be computed on images; False if the value is none of that."""
        name, shape = op_name(value), static_shape(var)
        if shape is None or str(getattr(var.ty, "dtype", "")) not in _FLOATS:
            return False
        taken = _operands(name, value, shape)
        views = [self.views[expr] for expr in taken if expr in self.views]
        images = {view.image() for view in views}
        if not taken or len(views) < len(taken) or len(images) > 1 or None in images:
            return False
        ((batch, channels, pixels),) = [image for image in images if image is not None]
        image = batch, shape[-1], pixels
        if name != "matmul" and channels != shape[-1]:
            return False
        moved = Movement.of((batch, shape[-1], pixels)).permuted((0, 2, 1)).reshaped(shape)
        if moved is None:
            return False
        self.views[var], self.computed[var] = _View(var, moved, True, image), image
        for view in views:
            self._join(var, view.origin)
        self.read.update(arg for arg in value.args if isinstance(arg, relax.Var) and arg not in taken)
        return True

    def _join(self, one: relax.Expr, other: relax.Expr) -> None:
        one, other = self.root(one), self.root(other)
        if not one.same_as(other):
            self.parents[one] = other


def _operands(name: str | None, value: relax.Expr, shape: tuple[int, ...]) -> list[relax.Expr]:
    """The operands of a call that have to be images; none if it can't be computed on images."""
    args = list(value.args) if isinstance(value, Call) else []
    if name in _UNARY:
        return args[:1]
    if name in _BINARY:
        constants = [arg for arg in args if isinstance(arg, GenericConst)]
        others = [arg for arg in args if not isinstance(arg, GenericConst)]
        fits = all(_constant_fits(static_shape(constant), shape) for constant in constants)
        return others if fits and all(static_shape(other) == shape for other in others) else []
    if name == "nn.layer_norm" and isinstance(value, Call):
        axes = [int(axis) % len(shape) for axis in value.attrs.axes]
        return args[:1] if axes == [len(shape) - 1] else []
    if name == "matmul" and isinstance(value, Call):
        left, right = args
        matrix = static_shape(right) or ()
        known = isinstance(right, GenericConst) and len(matrix) >= 2 and prod(matrix[:-2]) == 1
        same = len({str(each.ty.dtype) for each in (value, left, right)}) == 1
        return [left] if known and same and len(static_shape(left) or ()) >= 2 else []
    return []


def _constant_fits(constant: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether a constant is one number, one for each channel, or of the whole shape."""
    return (
        constant is not None
        and len(constant) <= len(shape)
        and (constant == shape or (prod(constant[:-1]) == 1 and prod(constant) in (1, shape[-1])))
    )


class _Writer:
    """Writes a block with some of its regions on images."""

    def __init__(self, of: _Block, regions: set[relax.Expr]) -> None:
        self.of, self.regions = of, regions
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.Binding] = []
        self.images: dict[relax.Expr, relax.Expr] = {}
        self.sizes = self._sizes()

    def block(self) -> relax.DataflowBlock:
        for binding in self.of.block.bindings:
            var, view = binding.var, self.of.views.get(binding.var)
            if view is None or self.of.root(view.origin) not in self.regions:
                self.bindings.append(binding)
                continue
            if var in self.of.computed:
                self.images[var] = self._image_of(var, binding.value)
            if var in self.of.read:
                moved = self._moved(self.images.get(view.origin, view.origin), view.movement)
                self.bindings.append(relax.VarBinding(var, self.builder.normalize(moved)))
        return relax.DataflowBlock(self.bindings)

    def _sizes(self) -> dict[tuple[relax.Expr, int], tuple[int, int]]:
        """Rows and columns of images of so many pixels, by region: as an image has them that goes into it."""
        sizes: dict[tuple[relax.Expr, int], tuple[int, int]] = {}
        for view in self.of.views.values():
            shape, image = static_shape(view.origin), view.image()
            if view.origin in self.of.computed or shape is None or image is None:
                continue
            if len(shape) == 4 and shape[:2] == image[:2]:
                sizes.setdefault((self.of.root(view.origin), image[2]), shape[2:])
        return sizes

    def _shape(self, root: relax.Expr, image: Image) -> tuple[int, ...]:
        batch, channels, pixels = image
        return (batch, channels, *self.sizes.get((root, pixels), (pixels, 1)))

    def _image_of(self, var: relax.Var, value: Call) -> relax.Expr:
        """A value of a region as an image."""
        name, args = op_name(value), list(value.args)
        shape = self._shape(self.of.root(var), self.of.computed[var])
        if name == "matmul":
            array = args[1].value.numpy()
            weight = array.reshape(array.shape[-2:]).T[:, :, None, None]
            return self._emit(relax.op.nn.conv2d(self._operand(args[0]), constant_of(weight)))
        if name == "nn.layer_norm":
            attrs = value.attrs
            rest = float(attrs.epsilon), bool(attrs.center), bool(attrs.scale)
            return self._emit(relax.op.nn.layer_norm(self._operand(args[0]), *args[1:], [1], *rest))
        operands = [
            self._constant(arg, shape)
            if isinstance(arg, GenericConst)
            else self._operand(arg)
            if isinstance(arg, relax.Var) and arg in self.of.views
            else arg
            for arg in args
        ]
        return self._emit(Call(value.op, operands, value.attrs))

    def _operand(self, expr: relax.Expr) -> relax.Expr:
        """What an operator of a region reads, as an image."""
        view = self.of.views[expr]
        image = view.image()
        assert image is not None
        shape = self._shape(self.of.root(view.origin), image)
        source = self.images.get(view.origin, view.origin)
        return source if static_shape(source) == shape else self._emit(relax.op.reshape(source, shape))

    def _constant(self, constant: GenericConst, shape: tuple[int, ...]) -> relax.Expr:
        """A constant operand, for images of ``shape``."""
        array = constant.value.numpy()
        if array.size == 1:
            return constant_of(array.reshape(()))
        if array.size == shape[1]:
            return constant_of(array.reshape(1, -1, 1, 1))
        batch, channels = shape[:2]
        return constant_of(array.reshape(batch, -1, channels).transpose(0, 2, 1).reshape(shape))

    def _moved(self, image: relax.Expr, movement: Movement) -> relax.Expr:
        """What a region gives to others, moved as they expect it."""
        if not movement.is_reshape:
            image = self._emit(relax.op.reshape(image, movement.factors))
            image = self._emit(relax.op.permute_dims(image, list(movement.order)))
        return image if static_shape(image) == movement.shape else relax.op.reshape(image, movement.shape)

    def _emit(self, expr: relax.Expr) -> relax.Expr:
        expr = self.builder.normalize(expr)
        var = relax.DataflowVar("image", expr.ty)
        self.bindings.append(relax.VarBinding(var, expr))
        return var
