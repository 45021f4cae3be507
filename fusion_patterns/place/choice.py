"""One tensor and its readers -> the scope in which it is held, exactly: every alternative is priced.

Nothing here depends on any other tensor: a kernel reads and writes texture and buffers in any mixture. A
reader that names a scope gets it; one that says ``any`` reads the cheapest form that there is.
"""

from __future__ import annotations

from dataclasses import dataclass

from .decision import ANY, GLOBAL, PLAIN_FORM, TEXTURE, Alternative, Conversion, Form, Wish
from .limits import TextureLimits
from .profiles import Profile

__all__ = ["Choice", "Tensor", "choose"]


@dataclass(frozen=True)
class Tensor:
    """A packed tensor about which is to be decided.

    ``layout``, ``shape`` (packed), ``dtype``, ``bytes``: its own. ``wishes``: of the readers in this
    layout. ``own``: the writer's wish; ``None`` if no composite writes the tensor in this layout, so that
    each form is made from the plain one. ``constant``: the plain one is known to the compiler.
    ``read_plain``: somebody reads the plain one as well. ``is_view``: packed and plain are the same bytes.
    """

    layout: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    wishes: tuple[Wish, ...]
    own: str | None
    constant: bool = False
    read_plain: bool = False
    is_view: bool = False


@dataclass(frozen=True)
class Choice:
    """The scope of the tensor, what it costs there, the scope in which each reader gets it, and why."""

    scope: str
    cost: int
    readers: tuple[str, ...]
    reason: str
    alternatives: tuple[Alternative, ...]
    conversions: tuple[Conversion, ...]


def choose(tensor: Tensor, limits: TextureLimits, profile: Profile) -> Choice:
    """The cheapest scope for a tensor that gives its readers (or else its writer) what they ask."""
    work = _Work(tensor, profile, *limits.folding(tensor.shape, tensor.dtype))
    candidates = [work.texture, GLOBAL] if work.texture else [GLOBAL]
    costs = {scope: work.cost(scope) for scope in candidates}
    scope, reason = work.pick(costs)
    alternatives = [Alternative(tensor.layout, each, costs[each]) for each in candidates]
    if work.is_settled:
        alternatives = [Alternative(tensor.layout, scope, costs[scope], "as its readers ask")]
    elif work.texture is None:
        alternatives.insert(0, Alternative(tensor.layout, TEXTURE, None, work.why_not))
    return Choice(
        scope,
        costs[scope],
        tuple(work.read_in(wish, scope) for wish in tensor.wishes),
        reason,
        tuple(alternatives),
        work.conversions(scope),
    )


class _Work:
    def __init__(self, tensor: Tensor, profile: Profile, texture: str | None, why_not: str) -> None:
        self.tensor, self.profile = tensor, profile
        self.texture, self.why_not = texture, why_not
        self.asked = tuple(self._resolved(wish.scope) for wish in tensor.wishes)

    def _resolved(self, wish: str) -> str:
        """The scope that a wish comes to on this device, or ``any``."""
        return wish if wish == ANY else (self.texture or GLOBAL) if wish == TEXTURE else GLOBAL

    @property
    def is_settled(self) -> bool:
        """Whether its readers leave nothing to choose, and no composite writes it."""
        return self.tensor.own is None and bool(self.asked) and ANY not in self.asked

    def available(self, scope: str) -> list[str]:
        """The scopes in which the tensor exists, its own first, if it is held in ``scope``."""
        wanted = sorted(asked for asked in self.asked if asked != ANY)
        return list(dict.fromkeys(wanted if self.is_settled else [scope, *wanted]))

    def read_in(self, wish: Wish, scope: str) -> str:
        """The scope in which a reader gets the tensor."""
        asked = self._resolved(wish.scope)
        if asked != ANY:
            return asked
        size = self.tensor.bytes
        return min(self.available(scope), key=lambda each: self.profile.read(each, size, wish.times))

    def cost(self, scope: str) -> int:
        """All that is moved because of this tensor if it is held in ``scope``."""
        size, profile = self.tensor.bytes, self.profile
        written = profile.write(scope, size) if self.tensor.own is not None else 0
        read = sum(profile.read(self.read_in(wish, scope), size, wish.times) for wish in self.tensor.wishes)
        return written + read + sum(conversion.cost for conversion in self.conversions(scope))

    def conversions(self, scope: str) -> tuple[Conversion, ...]:
        """The forms that are made of it: packed or copied for readers, unpacked for others."""
        tensor, made = self.tensor, []
        readers = [self.read_in(wish, scope) for wish in tensor.wishes]
        if tensor.own is None:
            kind = "constant" if tensor.constant else "pack"
            for each in self.available(scope):
                form = Form(tensor.layout, each)
                made.append(self._conversion(kind, GLOBAL, form, readers.count(each)))
            return tuple(made)
        for each in self.available(scope)[1:]:
            made.append(self._conversion("copy", scope, Form(tensor.layout, each), readers.count(each)))
        if tensor.read_plain:
            made.append(self._conversion("unpack", scope, PLAIN_FORM, 1))
        return tuple(made)

    def _conversion(self, kind: str, source: str, form: Form, readers: int) -> Conversion:
        size = self.tensor.bytes
        if self.tensor.is_view and source == form.scope == GLOBAL and kind != "constant":
            kind = "view"
        free = kind in ("constant", "view")
        return Conversion(
            kind, form, size, 0 if free else self.profile.convert(size, source, form.scope), readers
        )

    def pick(self, costs: dict[str, int]) -> tuple[str, str]:
        """The scope and the reason: least cost, then the vote, then the writer's wish, then a buffer."""
        wishes = [wish.scope for wish in self.tensor.wishes]
        texture, buffer = wishes.count(TEXTURE), wishes.count(GLOBAL)
        own = self.tensor.own or ANY
        voted = TEXTURE if texture > buffer else GLOBAL if buffer > texture else None
        vote = f"{texture} of {len(wishes)} readers ask for texture, {buffer} for a buffer"
        if self.texture is None:
            wanted_buffer = voted == GLOBAL or (voted is None and own == GLOBAL)
            return GLOBAL, (vote if voted else OWN_WISH) if wanted_buffer else self.why_not
        in_texture, in_buffer = costs[self.texture], costs[GLOBAL]
        cheaper = None if in_texture == in_buffer else TEXTURE if in_texture < in_buffer else GLOBAL
        price = f"{in_texture} bytes moved in texture, {in_buffer} in a buffer"
        if wishes and not texture and not buffer and own != ANY:
            wanted, reason = own, OWN_WISH  # readers that leave it open follow the writer
        elif cheaper is not None:
            wanted, reason = cheaper, vote if cheaper == voted else price
        elif voted is not None:
            wanted, reason = voted, vote
        else:
            wanted, reason = (GLOBAL, price) if own == ANY else (own, OWN_WISH)
        return (self.texture if wanted == TEXTURE else GLOBAL), reason


OWN_WISH = "the row's wish for its output"
