"""Which of the overlapping candidates to take.

Candidates that share an operator exclude each other: with candidates as nodes and overlaps as edges, the best
choice is a heaviest independent set. A candidate weighs what it saves, in bytes of inner values that are not
written; equal savings are decided by priority, then by the number of operators, then by the order of rows in
the table, then by program order.

Most groups of overlapping candidates have one that covers all others and outweighs each: it is taken. Others
are swept in program order, which finds the best choice; a group with too many open choices at one place keeps
the heaviest of them, and the plan says how much a better choice could save at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fusion_patterns.match.plan import Selection
from fusion_patterns.match.search import Candidate

__all__ = ["MOST_STATES", "select"]

MOST_STATES = 4096
"""The most open choices that are kept at one place of the program."""
MOST_WORK = 1_000_000
"""In very large groups fewer are kept, so that no module takes forever; 64 are always."""

Weight = tuple[int, int, int, int, int]
_NOTHING: Weight = (0, 0, 0, 0, 0)
_Op = tuple[str, int]


def select(
    candidates: Iterable[Candidate], confirm: Callable[[Candidate], bool]
) -> tuple[list[Candidate], Selection]:
    """Returns the candidates to take, in program order, and how they were chosen.

    ``confirm`` is asked about each candidate that would be taken; where it refuses one, the choice among the
    others is made again.
    """
    chosen: list[Candidate] = []
    saved = bound = groups = largest = 0
    method = "exact"
    for group in _groups(candidates):
        while True:
            contenders = _contenders(group)
            taken, is_exact = _choose(contenders)
            refused = {id(candidate) for candidate in taken if not confirm(candidate)}
            if not refused:
                break
            group = [candidate for candidate in group if id(candidate) not in refused]
        gain = sum(candidate.saved for candidate in taken)
        chosen += taken
        saved += gain
        bound += gain if is_exact else max(gain, _bound(contenders))
        if not is_exact:
            method = "beam"
        if len(contenders) > 1:
            groups += 1
            largest = max(largest, len(contenders))
    chosen.sort(key=lambda candidate: (candidate.graph.name, candidate.outputs[0]))
    return chosen, Selection(method, saved, bound, groups, largest)


def _weight(candidate: Candidate, lowest: int = 0) -> Weight:
    """Weights add up, so a set of candidates can be weighed; no candidate weighs nothing.

    The last part gives operators to early anchors: in a sum of two convolutions the first takes the sum.
    """
    acceptance, count = candidate.acceptance, len(candidate.slots)
    priority = acceptance.row.priority - lowest + 1
    return candidate.saved, priority, count, -acceptance.program, -candidate.anchor * count


def _sum(left: Weight, right: Weight) -> Weight:
    return (
        left[0] + right[0],
        left[1] + right[1],
        left[2] + right[2],
        left[3] + right[3],
        left[4] + right[4],
    )


def _groups(candidates: Iterable[Candidate]) -> Iterable[list[Candidate]]:
    """Returns the candidates grouped by shared operators, over any number of steps, in a fixed order."""
    parent: dict[_Op, _Op] = {}

    def root(op: _Op) -> _Op:
        while (above := parent.setdefault(op, op)) != op:
            parent[op] = parent[above]
            op = above
        return op

    candidates = list(candidates)
    for candidate in candidates:
        name = candidate.graph.name
        first = root((name, candidate.anchor))
        for number in candidate.slots[1:]:
            other = root((name, number))
            if other != first:
                parent[other] = first
    groups: dict[_Op, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(root((candidate.graph.name, candidate.anchor)), []).append(candidate)
    return groups.values()


def _contenders(group: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates of a group that may win.

    An operator is contested if candidates from several anchors want it. Of the candidates from one anchor
    that take the same contested operators only the heaviest matters: whatever excludes it excludes them all.
    """
    claims: dict[int, int] = {}
    contested: set[int] = set()
    for candidate in group:
        for number in candidate.slots:
            if claims.setdefault(number, candidate.anchor) != candidate.anchor:
                contested.add(number)
    best: dict[tuple[int, frozenset[int]], Candidate] = {}
    for candidate in group:
        key = candidate.anchor, frozenset(contested.intersection(candidate.slots))
        known = best.get(key)
        if known is None or _weight(candidate) > _weight(known):
            best[key] = candidate
    return list(best.values())


def _choose(group: Iterable[Candidate]) -> tuple[list[Candidate], bool]:
    """Returns a set of candidates that share no operator, and whether none is heavier."""
    group = list(group)
    if not group:
        return [], True
    lowest = min(candidate.acceptance.row.priority for candidate in group)
    group = sorted(group, key=lambda candidate: _weight(candidate, lowest), reverse=True)
    whole = set(group[0].slots)
    if all(whole.issuperset(candidate.slots) for candidate in group):
        return [group[0]], True
    return _sweep(group, lambda candidate: _weight(candidate, lowest))


def _conflicts(group: Sequence[Candidate]) -> list[int]:
    """Returns for each candidate those that share an operator with it, itself included, as bits."""
    takers: dict[int, int] = {}
    for place, candidate in enumerate(group):
        for number in candidate.slots:
            takers[number] = takers.get(number, 0) | 1 << place
    conflicts = []
    for candidate in group:
        others = 0
        for number in candidate.slots:
            others |= takers[number]
        conflicts.append(others)
    return conflicts


def _sweep(
    group: Sequence[Candidate], weight_of: Callable[[Candidate], Weight]
) -> tuple[list[Candidate], bool]:
    """Sweeps over the candidates in program order; returns the choice, and whether no other is heavier.

    What was decided matters to the rest only by the candidates that it still excludes. Candidates overlap
    near their places in the program, so there are few such sets, however many candidates there are; where
    there are more than `MOST_STATES` the lightest are dropped, and the choice may not be the best.
    """
    # The sort is stable, so of candidates that take the same the heavier comes first.
    order = sorted(group, key=lambda candidate: (min(candidate.slots), max(candidate.slots)))
    exact = True
    most = min(MOST_STATES, max(64, MOST_WORK // len(group)))
    # excluded candidates, as bits from the next one on -> the best choice so far, as a linked list
    states: dict[int, tuple[Weight, tuple[Candidate, Any] | None]] = {0: (_NOTHING, None)}
    for number, (candidate, conflicts) in enumerate(zip(order, _conflicts(order), strict=True)):
        own, forbidden = weight_of(candidate), conflicts >> number
        following: dict[int, tuple[Weight, tuple[Candidate, Any] | None]] = {}
        for excluded, (weight, taken) in states.items():
            options = [(excluded >> 1, weight, taken)]
            if not excluded & 1:
                options.append(((excluded | forbidden) >> 1, _sum(weight, own), (candidate, taken)))
            for key, total, choice in options:
                known = following.get(key)
                if known is None or total > known[0]:
                    following[key] = total, choice
        if len(following) > most:
            exact = False
            heaviest = sorted(following.items(), key=lambda item: item[1][0], reverse=True)
            following = dict(heaviest[: most // 4])
        states = following
    _, link = max(states.values(), key=lambda state: state[0])
    taken_here = []
    while link is not None:
        taken_here.append(link[0])
        link = link[1]
    return taken_here[::-1], exact


def _bound(group: Sequence[Candidate]) -> int:
    """Returns what no choice can exceed: from each anchor at most its best candidate."""
    best: dict[int, int] = {}
    for candidate in group:
        best[candidate.anchor] = max(best.get(candidate.anchor, 0), candidate.saved)
    return sum(best.values())
