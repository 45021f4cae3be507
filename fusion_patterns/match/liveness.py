"""What a row may still ask for, from each place in its program on.

A value that an operator outside takes can only end up inside if that operator is matched later. It would be
found among the users of a slot that some later `Visit` reads, or further down from one. So registers that no
later `Visit` reads are of no use for closing a match: the analysis is that of live variables in a compiler.
"""

from __future__ import annotations

from fusion_patterns.match.order import Reach
from fusion_patterns.match.program import Accept, Assign, Clear, Instruction, Loop, Split, Unify, Visit

__all__ = ["LOOKS_BACK", "live_registers"]

LOOKS_BACK = 1
"""The bit that says that a later `Visit` looks for the producer of an operand; register n has bit n + 1."""


def live_registers(start: Instruction) -> dict[int, int]:
    """Returns for each `Visit`, by its identity, the registers that it or a later one reads, as bits."""
    order = _postorder(start)
    live = {id(instruction): 0 for instruction in order}
    changed = True
    while changed:
        changed = False
        for instruction in order:
            after = 0
            for successor in _successors(instruction):
                after |= live[id(successor)]
            before = _before(instruction, after)
            if before != live[id(instruction)]:
                live[id(instruction)] = before
                changed = True
    return {id(instruction): live[id(instruction)] for instruction in order if isinstance(instruction, Visit)}


def _postorder(start: Instruction) -> list[Instruction]:
    order: list[Instruction] = []
    seen = {id(start)}
    stack = [(start, iter(_successors(start)))]
    while stack:
        instruction, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            order.append(instruction)
            stack.pop()
        elif id(following) not in seen:
            seen.add(id(following))
            stack.append((following, iter(_successors(following))))
    return order


def _successors(instruction: Instruction) -> tuple[Instruction, ...]:
    if isinstance(instruction, Accept):
        return ()
    if isinstance(instruction, Split):
        return instruction.ways
    if isinstance(instruction, Loop) and instruction.body is not None:
        return instruction.then, instruction.body
    return (instruction.then,)


def _before(instruction: Instruction, after: int) -> int:
    """Returns what is live before an instruction, given what is live after it."""
    if isinstance(instruction, Visit):
        if instruction.reach is Reach.BACKWARD:
            return after | _bits(*instruction.operands, instruction.start) | LOOKS_BACK
        return after & ~_bits(instruction.own, instruction.result) | _bits(*instruction.operands)
    if isinstance(instruction, Assign):
        if not after & _bits(instruction.target):
            return after
        kept = after if instruction.keep else after & ~_bits(instruction.target)
        return kept | _bits(instruction.source)
    if isinstance(instruction, Clear):
        return after & ~_bits(*instruction.registers)
    if isinstance(instruction, Unify) and after & _bits(instruction.left, instruction.right):
        return after | _bits(instruction.left, instruction.right)
    return after


def _bits(*registers: int) -> int:
    bits = 0
    for register in registers:
        bits |= 2 << register
    return bits
