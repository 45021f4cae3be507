"""What reshapes and transpositions that follow each other do to the order of a tensor's elements.

The source's dimensions are split into factors until every reshape on the way begins and ends between two of them. A
chain is then a permutation of factors, and what it means can be read off: nothing was moved, or the channels went last.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

__all__ = ["Movement"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Movement:
    """``shape``: of the result. ``factors``: sizes that the source's dimensions were split into, in the source's order.
    ``order``: for each place of the result the factor that lies there. Factors of 1 are left out.
    """

    shape: Shape
    factors: Shape
    order: Shape

    @classmethod
    def of(cls, shape: Shape) -> Movement:
        """Nothing moved yet: a tensor of ``shape``, without empty dimensions."""
        factors = tuple(dim for dim in shape if dim != 1)
        return cls(shape, factors, tuple(range(len(factors))))

    def reshaped(self, shape: Shape) -> Movement | None:
        """The same elements in another ``shape``; None where that takes a factor apart that it does not divide."""
        sizes = [[size] for size in self.factors]
        places = [(factor, 0) for factor in self.order]
        at = 0
        for dim in shape:
            while dim > 1:
                if at == len(places):
                    return None
                factor, part = places[at]
                size = sizes[factor][part]
                if size > dim:
                    if size % dim:
                        return None
                    sizes[factor][part : part + 1] = [dim, size // dim]
                    places.insert(at + 1, (factor, part + 1))
                    size = dim
                elif dim % size:
                    return None
                dim //= size
                at += 1
        first = [sum(map(len, sizes[:factor])) for factor in range(len(sizes))]
        order = tuple(first[factor] + part for factor, part in places)
        return Movement(shape, tuple(size for parts in sizes for size in parts), order)

    def permuted(self, axes: Shape) -> Movement:
        """The dimensions in another order."""
        groups = self._groups()
        order = tuple(factor for axis in axes for factor in groups[axis])
        return Movement(tuple(self.shape[axis] for axis in axes), self.factors, order)

    @property
    def is_reshape(self) -> bool:
        """Whether the elements lie in the order in which they lay."""
        return self.order == tuple(range(len(self.factors)))

    def channels_last(self) -> tuple[int, int, int] | None:
        """(batch, channels, pixels) if the source holds them in this order, and the result the channels last."""
        last = self._groups()[-1] if self.shape else []
        if not last or last != list(range(last[0], last[0] + len(last))):
            return None
        if list(self.order) != [i for i in range(len(self.factors)) if i not in last] + last:
            return None
        before, after = self.factors[: last[0]], self.factors[last[-1] + 1 :]
        return prod(before), self.shape[-1], prod(after)

    def _groups(self) -> list[list[int]]:
        """The factors of each dimension of the result."""
        rest = iter(self.order)
        groups: list[list[int]] = []
        for dim in self.shape:
            group: list[int] = []
            while prod(self.factors[factor] for factor in group) < dim:
                group.append(next(rest))
            groups.append(group)
        return groups
