"""Operands and attributes for an operator of a row: what the row's conditions ask for, from small ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_patterns.table import expr
from fusion_patterns.table.model import Broadcast, Predicate, Row
from fusion_patterns.table.ops import OPS, Kind
from fusion_patterns.testing.draft import Draft, Pick
from fusion_patterns.testing.shapes import Dim, Infeasible, Shape, broadcast

__all__ = ["Operands", "Profile", "Slot"]


@dataclass(frozen=True)
class Profile:
    """The choices that most conditions hang on."""

    convolution: str = "plain"
    """``plain``, ``depthwise``, ``grouped`` or ``multiplier``: depthwise with more results than channels"""
    shared: bool = False
    """Tensors whose uses the row counts have another user."""
    oversized: bool = False
    """An operand may be larger than the value it is combined with."""
    symbolic: bool = False
    """The number of images is not known at compile time."""


@dataclass
class Slot:
    """What a name of the row means: a value, or nothing yet."""

    name: str | None
    value: str | None = None


class Operands:
    """Fills the slots of operators. ``broken`` is the number of a condition that is to fail."""

    def __init__(
        self, row: Row, pick: Pick, profile: Profile, broken: int | None, draft: Draft | None = None
    ) -> None:
        self.row, self.pick, self.profile, self.broken = row, pick, profile, broken
        self.live: list[str] = []
        """Values that tensors may be, besides new ones."""
        self.beside: Shape | None = None
        """The shape of what the next operator's result is added to or joined with, if that is there already."""
        dtypes = self._options(lambda p: p.tensor is not None, "dtype", ("float32", "float16", "int32"))
        self.draft = draft if draft is not None else Draft(pick(dtypes))
        self.channels = pick((8, 4, 3, 12, 6))
        self.out = pick((self.channels, 8, 16, 5))
        self.stride = pick((1, 1, 2))
        self.padded = pick((True, True, False))
        self.size = {
            "N": pick(("n",) if profile.symbolic else (1, 2)),
            "H": pick((6, 5, 8)),
            "W": pick((6, 5, 7)),
        }

    # What the conditions leave

    def _options(
        self, is_about: Callable[[Predicate], bool], what: str, otherwise: Sequence[Any]
    ) -> tuple[Any, ...]:
        """The values that may stand at ``what`` (an attribute, a field, or a dimension as ``dim C``)."""
        options: tuple[Any, ...] = tuple(otherwise)
        narrowed = False
        for number, predicate in enumerate(self.row.where):
            if predicate.that is not None or not is_about(predicate):
                continue
            check = _check_of(predicate, what)
            if check is None:
                continue
            explicit, holds = check
            if number == self.broken:
                options = tuple(option for option in options if not holds(option))
            else:
                options = tuple(o for o in (options if narrowed else (*options, *explicit)) if holds(o))
                narrowed = True
        if not options:
            raise Infeasible(f"nothing is left for {what}")
        return options

    def _attr(self, label: str, attr: str, otherwise: Sequence[Any]) -> Any:
        return self.pick(self._options(lambda p: p.node == label, f"attr {attr}", otherwise))

    def _of(self, name: str | None, what: str, otherwise: Sequence[Any]) -> Any:
        return self.pick(self._options(lambda p: name is not None and p.tensor == name, what, otherwise))

    # New tensors

    def _tensor(
        self, slot: Slot, shape: Sequence[Dim], *, constants: Sequence[bool], dtype: str | None = None
    ) -> None:
        reusable = [v for v in self.live if self.draft.types[v] == (tuple(shape), dtype or self.draft.dtype)]
        if reusable and self.pick((True, False)):
            slot.value = self.pick(reusable)
            return
        slot.value = self.draft.tensor(
            shape, constant=self._of(slot.name, "constant", constants), dtype=dtype
        )

    def natural(
        self, slot: Slot, rank: int = 4, layout: str = "", known: Mapping[str, Dim] | None = None
    ) -> None:
        """A value for the operand that an operator works on: an image, if nothing speaks against it.

        ``known``: dimensions by their letters, if something else says what they are.
        """
        images = [
            v
            for v in self.live
            if len(self.draft.shape(v)) == rank and self.draft.types[v][1] == self.draft.dtype
        ]
        if images and (layout or "NCHW").startswith("NC"):
            slot.value = self.pick(images)
            return
        if not layout:
            about = None if self.broken is None else self.row.where[self.broken]
            other = (3, 2) if about is not None and about.rank is not None else ()
            rank = self._of(slot.name, "rank", (rank, *other))
            layout = {3: "NCW", 4: "NCHW", 5: "NCDHW"}.get(rank, "NCHW"[:rank] if rank < 3 else "NCDHW")
        usual = self.size | {"C": self.channels, "D": 4, **(known or {})}
        shape = [self._dim(slot.name, axis, place, usual[axis]) for place, axis in enumerate(layout)]
        self._tensor(slot, shape, constants=(False,))

    def _dim(self, name: str | None, axis: str, place: int, usual: Dim) -> Any:
        """A dimension that conditions on its letter and on its number leave."""
        options = self._options(lambda p: name is not None and p.tensor == name, f"dim {axis}", (usual,))
        return self.pick(
            self._options(lambda p: name is not None and p.tensor == name, f"dim {place}", options)
        )

    # Operators

    def fill(self, op: str, slots: list[Slot], label: str) -> dict[str, Any]:
        """Gives every slot a value, and returns the operator's attributes."""
        kind = OPS[op].kind
        if kind is Kind.CONVOLUTION:
            return self._convolution(op, slots, label)
        if op == "matmul":
            return self._matmul(slots)
        if op == "concat":
            return self._concat(slots, label)
        if OPS[op].is_elementwise and len(slots) > 1:
            return self._elementwise(op, slots)
        layout = str(self._attr(label, "layout", _layouts(op))) if "layout" in OPS[op].attrs else ""
        if slots[0].value is None:
            beside = self._beside(layout) if op == "image.resize2d" else {}
            kept = {axis: dim for axis, dim in beside.items() if axis in "NC"}
            self.natural(slots[0], len(layout) or 4, layout, kept)
        shape = self.draft.shape(str(slots[0].value))
        if kind is Kind.NORMALISATION:
            return self._normalisation(op, slots, shape, label)
        if len(slots) > 1:
            raise Infeasible(f"no operands for {op}")
        attrs = self._attributes(op, shape, label, layout)
        return attrs | ({"layout": layout} if layout else {})

    def _beside(self, layout: str) -> dict[str, Dim]:
        """What is known of the next result's dimensions, by their letters in its layout."""
        beside = self.beside
        return dict(zip(layout, beside, strict=True)) if beside and len(beside) == len(layout) else {}

    def _elementwise(self, op: str, slots: list[Slot]) -> dict[str, Any]:
        if all(slot.value is None for slot in slots):
            self.natural(slots[-1] if op == "where" else slots[0])
        known = [self.draft.shape(slot.value) for slot in slots if slot.value is not None]
        whole = broadcast(known)
        attrs: dict[str, Any] = {}
        if op == "nn.prelu":
            if len(whole) < 2 or not self.draft.dtype.startswith("float"):
                raise Infeasible("prelu without channels, or of integers")
            attrs["axis"] = 1
        for place, slot in enumerate(slots):
            if slot.value is not None:
                continue
            if op == "nn.prelu":
                self._tensor(slot, (whole[1],), constants=(True, False))
                continue
            # What the row gives a name of its own may be the image that a value of one pixel is spread over.
            spreads = slot.name is not None and _is_pixel(whole)
            spread_often = spreads and not self._speaks_of(slot.name)
            likely = (Broadcast.OTHER,) * 8 if self.profile.oversized or spread_often else ()
            form = self._of(slot.name, "broadcast", (*tuple(Broadcast), *likely))
            shape = self._form(form, whole, spreads)
            dtype = "bool" if op == "where" and place == 0 else None
            self._tensor(slot, shape, constants=(True, False), dtype=dtype)
        return attrs

    def _form(self, form: Broadcast, whole: Shape, spreads: bool) -> Shape:
        """A shape that meets ``whole`` in this form; ``spreads``: ``whole`` is one pixel of a larger image."""
        if form is Broadcast.SCALAR:
            return tuple(self.pick(((), (1,) * len(whole))))
        if form is Broadcast.SAME or len(whole) < 3:
            return whole
        if form is Broadcast.CHANNEL:
            vector = (whole[1], *(1,) * (len(whole) - 2))
            return tuple(self.pick(((1, *vector), vector)))
        image = (*whole[:2], self.size["H"], self.size["W"])
        if spreads and not self.profile.oversized:
            return image
        larger = [(2, *whole[1:])] if whole[0] == 1 else []
        if _is_pixel(whole):
            larger = [image, *larger, *((2, *image[1:]) for _ in larger)]
        if self.profile.oversized and larger:
            return tuple(self.pick(larger))
        return tuple(self.pick(((1, 1, *whole[2:]), (1, *whole[1:]), (*(1,) * (len(whole) - 1), whole[-1]))))

    def _convolution(self, op: str, slots: list[Slot], label: str) -> dict[str, Any]:
        data, weight = slots
        dims, transposed = int(op[7]), op.endswith("transpose")
        spatial = "DHW"[3 - dims :]
        attrs: dict[str, Any] = {
            "data_layout": self._attr(
                label, "data_layout", (f"NC{spatial}", f"N{spatial}C")[: 1 + self._is_broken(label)]
            ),
            "kernel_layout": self._attr(label, "kernel_layout", _kernel_layouts(spatial, transposed)),
            "out_layout": self._attr(label, "out_layout", ("", f"N{spatial}C")[: 1 + self._is_broken(label)]),
        }
        if data.value is None:
            self.natural(data, dims + 2, attrs["data_layout"])
        shape = self.draft.shape(str(data.value))
        if len(shape) != dims + 2:
            raise Infeasible("rank of a convolution's data")
        channels = dict(zip(attrs["data_layout"], shape, strict=True))["C"]
        if not isinstance(channels, int):
            raise Infeasible("symbolic channels")
        groups, given, out = self._grouping(channels, weight)
        if weight.value is None:
            # What lies around a single pixel is padding.
            size = self.pick((1, 1, 1, 3) if _is_pixel(shape) else (1, 3))
            if transposed:
                given, out = channels, out // groups
            extent = {"O": self._of(weight.name, "dim O", (out,)), "I": given, **dict.fromkeys(spatial, size)}
            self._tensor(weight, [extent[axis] for axis in attrs["kernel_layout"]], constants=(True, False))
        kernel = dict(zip(attrs["kernel_layout"], self.draft.shape(str(weight.value)), strict=True))
        dilation = self._attr(label, "dilation", ([1] * dims, [2] * dims))
        strides = self._attr(label, "strides", ([self.stride] * dims,))
        same = [d * (int(kernel[axis]) - 1) // 2 for axis, d in zip(spatial, dilation, strict=True)]
        padding = same if self.padded else [0] * dims
        if transposed:
            dilation = [1] * dims
        return attrs | {
            "groups": groups,
            "dilation": list(dilation),
            "strides": list(strides),
            "padding": padding,
        }

    def _speaks_of(self, name: str | None) -> bool:
        """Whether the condition that is to fail is about this name."""
        if self.broken is None:
            return False
        about = self.row.where[self.broken]
        if about.that is not None:
            return name in {subject for subject, _ in expr.parse(about.that).names()}
        return name in (about.node, about.tensor)

    def _is_broken(self, label: str) -> bool:
        return self.broken is not None and self.row.where[self.broken].node == label

    def _grouping(self, channels: int, weight: Slot) -> tuple[int, int, int]:
        """(groups, channels of the weight, results) of a convolution."""
        mode = self.profile.convolution
        out = self._of(weight.name, "dim O", (self.out,))
        if mode == "plain" or weight.value is not None:
            return 1, channels, out
        if mode == "grouped":
            divisors = [g for g in range(2, channels) if channels % g == 0]
            if not divisors:
                raise Infeasible("channels that have no groups")
            groups = self.pick(divisors)
            return groups, channels // groups, groups * self.pick((1, 2, 4))
        return channels, 1, channels * (2 if mode == "multiplier" else 1)

    def _matmul(self, slots: list[Slot]) -> dict[str, Any]:
        if all(slot.value is None for slot in slots):
            self.natural(slots[0], 2)
        first, second = slots
        if not all(self.draft.shape(slot.value) for slot in slots if slot.value is not None):
            raise Infeasible("matmul of a number")
        if second.value is None:
            self._tensor(second, (self.draft.shape(str(first.value))[-1], self.out), constants=(True, False))
        elif first.value is None:
            self._tensor(first, (4, self.draft.shape(second.value)[-2]), constants=(False,))
        return {}

    def _concat(self, slots: list[Slot], label: str) -> dict[str, Any]:
        if all(slot.value is None for slot in slots):
            self.natural(slots[0])
        shape = next(self.draft.shape(slot.value) for slot in slots if slot.value is not None)
        axis = self._attr(label, "axis", (1, 2) if self.broken is not None else (1,))
        for slot in slots:
            if slot.value is None:
                size = self.pick((4, 8, 6))
                place = axis % len(shape)
                self._tensor(slot, (*shape[:place], size, *shape[place + 1 :]), constants=(False,))
        return {"axis": axis}

    def _normalisation(self, op: str, slots: list[Slot], shape: Shape, label: str) -> dict[str, Any]:
        if op in ("nn.softmax", "nn.log_softmax"):
            return {"axis": -1}
        if op == "nn.batch_norm":
            raise Infeasible("no instances of operators with several results")
        axes = self._attr(label, "axes", ([-1],)) if op in ("nn.layer_norm", "nn.rms_norm") else [1]
        if not -len(shape) <= axes[0] < len(shape):
            raise Infeasible(f"no axis {axes[0]} in {len(shape)} dimensions")
        along = shape[axes[0]]
        for slot in slots[1:]:
            if slot.value is None:
                self._tensor(slot, (along,), constants=(True, False))
        rest = list(range(2, len(shape)))
        if op == "nn.group_norm":
            return {"num_groups": 1, "channel_axis": 1, "axes": rest}
        return {"channel_axis": 1, "axes": rest} if op == "nn.instance_norm" else {"axes": list(axes)}

    def _attributes(self, op: str, shape: Shape, label: str, layout: str) -> dict[str, Any]:
        """Attributes of an operator that takes one tensor."""
        rank = len(shape)
        if OPS[op].kind is Kind.POOL:
            return self._pooling(op, label, layout)
        if OPS[op].kind is Kind.REDUCTION:
            axis = self._attr(label, "axis", ((rank - 2, rank - 1), (1,)))
            return {"axis": list(axis), "keepdims": self._attr(label, "keepdims", (True, False))}
        if op == "strided_slice":
            channels = shape[1] if rank > 1 else 0
            if not isinstance(channels, int) or channels < 5:
                raise Infeasible("too few channels for a part of them")
            begin = self.pick((0, 4))
            return {"axes": [1], "begin": [begin], "end": [self.pick((channels, begin + 4)) if begin else 4]}
        if op == "image.resize2d":
            if rank != 4:
                raise Infeasible("resize2d of no image")
            sizes = dict(zip(layout, shape, strict=True))
            if not isinstance(sizes["H"], int) or not isinstance(sizes["W"], int):
                raise Infeasible("resize2d of an unknown size")
            method = self._attr(
                label, "method", ("nearest_neighbor", "linear", "cubic")[: 2 + self._is_broken(label)]
            )
            mode = "asymmetric" if method == "nearest_neighbor" else "half_pixel"
            # the size of another image, so that both can meet in one operator
            others = {t.shape[2:] for t in self.draft.tensors if len(t.shape) == 4 and not t.constant}
            known = sorted(o for o in others if layout == "NCHW" and all(isinstance(d, int) for d in o))
            beside = self._beside(layout)
            wanted = [(beside["H"], beside["W"])] * 8 if beside else []
            return {
                "size": list(self.pick((*wanted, (2 * sizes["H"], 2 * sizes["W"]), *known))),
                "method": method,
                "coordinate_transformation_mode": mode,
                "rounding_method": "floor" if method == "nearest_neighbor" else "",
            }
        simple: dict[str, Callable[[], dict[str, Any]]] = {
            "clip": lambda: {"min": 0.0, "max": self.pick((6.0, 1.0))},
            "nn.leakyrelu": lambda: {"alpha": self._attr(label, "alpha", (0.1,))},
            "nn.softplus": lambda: {"beta": self._attr(label, "beta", (1.0,))},
            "astype": lambda: {"dtype": self._attr(label, "dtype", ("float32", "float16"))},
            "nn.pad": lambda: {"pad_width": [0, 0] * (rank - 1) + [1, 1]},
            "permute_dims": lambda: {
                "axes": list(self._attr(label, "axes", (tuple(range(rank))[::-1], (0, 2, 1, 3, 4)[:rank])))
            },
            "flip": lambda: {"axis": rank - 1},
            "expand_dims": lambda: {"axis": list(self._attr(label, "axis", ((0,), (rank,))))},
            "squeeze": lambda: {"axis": list(self._attr(label, "axis", _ones(shape)))},
            "reshape": lambda: {"shape": self._reshaped(shape)},
        }
        if op in simple:
            return simple[op]()
        if OPS[op].kind is Kind.UNARY or op in ("flatten", "nn.batch_flatten"):
            return {}
        raise Infeasible(f"no attributes for {op}")

    def _reshaped(self, shape: Shape) -> list[Dim]:
        """One pixel as a row or back, channels split into two groups, or their two axes joined; else an axis more."""
        if _is_pixel(shape):
            return list(shape[:2])
        if len(shape) == 2:
            return [*shape, 1, 1]
        if len(shape) == 4 and isinstance(shape[1], int) and shape[1] % 2 == 0:
            return [shape[0], 2, shape[1] // 2, *shape[2:]]
        if len(shape) == 5 and isinstance(shape[1], int) and isinstance(shape[2], int):
            return [shape[0], shape[1] * shape[2], *shape[3:]]
        return [*shape, 1]

    def _pooling(self, op: str, label: str, layout: str) -> dict[str, Any]:
        dims = int(op[-2])
        other = layout[0] + layout[2:] + layout[1]
        attrs = {"out_layout": self._attr(label, "out_layout", ("", other)[: 1 + self._is_broken(label)])}
        if "adaptive" in op:
            return attrs | {"output_size": list(self._attr(label, "output_size", ((1,) * dims, (2,) * dims)))}
        size = self._attr(label, "pool_size", ((2,) * dims, (3,) * dims))
        padding = self.pick(([0] * dims, [length // 2 for length in size]))
        strides = self._attr(label, "strides", ((1,) * dims, (2,) * dims))
        if op.startswith("nn.avg"):
            attrs["count_include_pad"] = self._attr(label, "count_include_pad", (False,))
        return attrs | {"pool_size": list(size), "strides": list(strides), "padding": padding}


def _is_pixel(shape: Shape) -> bool:
    """Whether each image, in NCHW, has one pixel."""
    return len(shape) == 4 and shape[2:] == (1, 1)


def _ones(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """The axes of one element, each alone: what can be taken off a shape."""
    return tuple((place,) for place, dim in enumerate(shape) if dim == 1)


def _layouts(op: str) -> tuple[str, ...]:
    dims = next((int(letter) for letter in op if letter.isdigit()), 2)
    spatial = "DHW"[3 - dims :]
    return f"NC{spatial}", f"N{spatial}C"


def _kernel_layouts(spatial: str, transposed: bool) -> tuple[str, ...]:
    pair = "IO" if transposed else "OI"
    return f"{pair}{spatial}", f"{spatial}{pair}"


_Check = tuple[tuple[Any, ...], Callable[[Any], bool]]


def _check_of(predicate: Predicate, what: str) -> _Check | None:
    """What a condition says about ``what``: values that it names, and whether a value satisfies it."""
    kind, _, name = what.partition(" ")
    if kind in ("attr", "dim"):
        if str(getattr(predicate, kind)) != name:
            return None
        return _compared(predicate)
    allowed = getattr(predicate, kind)
    if allowed is None:
        return None
    if isinstance(allowed, tuple):
        return allowed, lambda value: value in allowed
    return (allowed,), lambda value: bool(value == allowed)


def _compared(predicate: Predicate) -> _Check:
    if predicate.equals is not None:
        return (predicate.equals,), lambda value: bool(_plain(value) == predicate.equals)
    if predicate.among is not None:
        among = predicate.among
        return among, lambda value: _plain(value) in among
    if predicate.multiple_of is not None:
        step = predicate.multiple_of
        return (step, 2 * step), lambda value: isinstance(value, int) and value % step == 0
    assert predicate.between is not None
    least, most = predicate.between
    between = (int(-(-least // 1)), int(min(most, least + 16)))
    return between, lambda value: isinstance(value, int) and least <= value <= most


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
