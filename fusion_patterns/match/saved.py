"""Plans as JSON text, and back.

Operators are named by function and place among its bindings, so a plan can be used in another process. It
belongs to one module and one table: both are hashed, and a plan for others is refused. Elements of constants
don't count; a plan holds for other weights as well.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import tvm_ffi
from tvm.ir import IRModule

from fusion_patterns.errors import FusionPatternsError
from fusion_patterns.match.automaton import Acceptance
from fusion_patterns.match.plan import FusionPlan, Selection
from fusion_patterns.match.search import Candidate
from fusion_patterns.table.model import Table

if TYPE_CHECKING:
    from fusion_patterns.match.choice import Choice
    from fusion_patterns.match.engine import Engine

__all__ = ["dump", "load"]

FORMAT = "fusion_patterns.plan"
VERSION = 1


def dump(choice: Choice, selection: Selection) -> str:
    """Returns the chosen candidates as JSON text; equal plans give equal texts."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "module": _module_hash(choice.engine.mod),
        "table": _table_hash(choice.engine.table),
        "selection": asdict(selection),
        "matches": [
            _to_data(candidate, name) for candidate, name in zip(choice.candidates, choice.names, strict=True)
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def load(engine: Engine, text: str) -> FusionPlan:
    """Returns the plan in ``text`` for the engine's module and table, or raises if it is for others."""
    try:
        data = json.loads(text)
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise FusionPatternsError(f"this is no plan of version {VERSION}; make it again")
        for what, found in (("module", _module_hash(engine.mod)), ("table", _table_hash(engine.table))):
            if data[what] != found:
                raise FusionPatternsError(f"the plan was made for another {what}; make it again")
        selection = Selection(**data["selection"])
        chosen = [_from_data(engine, item) for item in data["matches"]]
        names = tuple(str(item["composite"]) for item in data["matches"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise FusionPatternsError(f"the plan is damaged: {error!r}") from error
    return engine.planned(chosen, selection, names)


def _module_hash(mod: IRModule) -> str:
    return f"{tvm_ffi.structural_hash(mod, skip_tensor_content=True):016x}"


def _table_hash(table: Table) -> str:
    return hashlib.sha256(table.model_dump_json().encode()).hexdigest()[:16]


def _to_data(candidate: Candidate, name: str) -> dict[str, Any]:
    acceptance, slots = candidate.acceptance, candidate.slots
    names = list(acceptance.row.nodes)
    nodes: dict[str, list[int]] = {}
    # By node as the row has them, and in program order: how the walk went does not show.
    for label, number in sorted(zip(acceptance.labels, slots, strict=True)):
        nodes.setdefault(names[label], []).append(number)
    return {
        "row": acceptance.row.name,
        "function": candidate.graph.name,
        "composite": name,
        "anchor": candidate.anchor,
        "nodes": nodes,
        "tensors": {name: [slots[slot], position] for name, (slot, position) in acceptance.named},
        "outputs": list(candidate.outputs),
        "saved_bytes": candidate.saved,
        "word": list(candidate.word),
    }


def _from_data(engine: Engine, data: dict[str, Any]) -> Candidate:
    programs = {program.row.name: number for number, program in enumerate(engine.automaton.programs)}
    number = programs[data["row"]]
    row = engine.automaton.programs[number].row
    graph = next(graph for graph in engine.graphs if graph.name == data["function"])
    names = list(row.nodes)
    labels = {place: names.index(name) for name, places in data["nodes"].items() for place in places}
    slots = tuple(sorted(labels, key=lambda place: (place != data["anchor"], place)))
    acceptance = Acceptance(
        program=number,
        row=row,
        labels=tuple(labels[place] for place in slots),
        output=slots.index(data["outputs"][0]),
        leaves=frozenset(slots.index(place) for place in data["outputs"][1:]),
        named=tuple((name, (slots.index(at), position)) for name, (at, position) in data["tensors"].items()),
    )
    candidate = Candidate(graph, acceptance, slots, tuple(data["outputs"]), data["saved_bytes"])
    _confirm(engine, candidate, data)
    return candidate


def _confirm(engine: Engine, candidate: Candidate, data: dict[str, Any]) -> None:
    found = list(candidate.word)
    refusal = engine.refusal(candidate)
    if found != data["word"] or refusal is not None:
        reason = refusal[1] if refusal is not None else f"it reads {' '.join(found)}"
        raise FusionPatternsError(f"the plan is damaged: {data['row']} at binding {data['anchor']}: {reason}")
