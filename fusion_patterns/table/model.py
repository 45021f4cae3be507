"""The models of a pattern table: plain, frozen data.

A row is a small regular expression over a dataflow graph::

    row       = nodes, in topological order; the last one is the output unless `output:` names another
    node      = op alternatives, with `in:` operands; may be `optional` or a bounded `repeat`
    `$name`   = a set of ops (`sets:`) or a fragment, a small DAG with one input (`fragments:`)

Names in `in:` are earlier nodes or, if no node has that name, tensors: the composite's inputs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

__all__ = [
    "PARTS",
    "Broadcast",
    "Fragment",
    "Node",
    "Origin",
    "Predicate",
    "Repeat",
    "Row",
    "Scope",
    "Table",
    "TargetSpec",
]


PARTS = "parts"
"""The field of a node, in ``that:``, that says how many tensors its operator takes."""


def _as_tuple(value: Any) -> Any:
    """A single item stands for a list of one: ``op: add`` is ``op: [add]``."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,)


class _Data(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, populate_by_name=True, use_attribute_docstrings=True
    )


class Origin(_Data):
    """Where something was written. ``str()`` gives ``patterns/adreno.yaml:42``."""

    file: str = "<data>"
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Scope(StrEnum):
    """A wish for where a tensor lives. ``ANY`` leaves the choice to the placement."""

    TEXTURE = "texture"
    GLOBAL = "global"
    ANY = "any"


class Broadcast(StrEnum):
    """How an operand meets the value it is combined with, read against that value's (N, C, H, W) shape."""

    SCALAR = "scalar"
    """one element"""
    CHANNEL = "channel"
    """every dimension but C is 1 or absent"""
    SAME = "same"
    """the same shape"""
    OTHER = "other"
    """any other shape that broadcasts"""


Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple, json_schema_input_type=str | tuple[str, ...])]
Scalar = bool | int | float | str


class Repeat(_Data):
    """How often a node may follow itself: ``repeat: 16`` in YAML is ``{min: 0, max: 16}``."""

    min: int = Field(0, ge=0)
    """The least number of occurrences; 0: the node may be absent."""
    max: int = Field(ge=1, le=64)
    """The largest number of occurrences."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is more than max {self.max}; exchange them")
        return self


def _as_repeat(value: Any) -> Any:
    return {"min": 0, "max": value} if isinstance(value, int) and not isinstance(value, bool) else value


class Node(_Data):
    """One operator of a row, or a bounded run of operators.

    ``op``: operator names without ``relax.`` (``nn.conv2d``), or ``$name`` of a set or a fragment.
    ``inputs`` (``in:`` in YAML): operands in order; each is an earlier node or a tensor. Commuting ops match
    in both orders. Left out, the node follows the node before it: that value stands at any operand, and the
    other operands are tensors without a name (their scope wish is ``others``).
    ``optional``: the node may be absent; its name then means its first operand that is a node, or else its
    first operand, or without ``in:`` the node before it.
    ``repeat``: the node may occur several times in a row, each on the result of the one before; ``in:`` then
    names the one value that the first occurrence takes.
    """

    op: Names = Field(min_length=1)
    """Operators, one of which must stand here; `$name` is a set or a fragment."""
    inputs: Names | None = Field(None, alias="in")
    """Operands in order: earlier nodes or tensors. Left out: the node before this one."""
    optional: bool = False
    """True: the node may be absent."""
    repeat: Annotated[
        Repeat | None, BeforeValidator(_as_repeat, json_schema_input_type=int | Repeat | None)
    ] = None
    """How often the node may follow itself; a number N is `{min: 0, max: N}`."""


class Fragment(_Data):
    """A small DAG with one input, used as ``$name`` wherever an op may stand; its last node is its result."""

    value: str = Field("x", alias="in")
    """The name of the one input."""
    nodes: dict[str, Node] = Field(min_length=1)
    """Its nodes by name, in topological order."""


class Predicate(_Data):
    """A condition on a *named* node or tensor. Exactly one of ``node``, ``tensor``, ``that`` is the subject.

    node:   ``attr`` with one of ``equals``, ``among``, ``multiple_of``, ``between``; or ``uses``
    tensor: ``dtype``, ``rank``, ``constant``, ``static``, ``broadcast``, ``layout``, ``uses``, or ``dim``
            with one of ``equals``, ``among``, ``multiple_of``, ``between``. Dimensions are named by the
            tensor's layout (``C``) or counted (``1``). The tensor ``output`` is the value that leaves.
    that:   arithmetic over ``name.attr``, ``name.DIM`` and ``name.shape``, where a name is a node, a tensor
            or ``output``: ``conv.groups == data.C and weight.I == 1``
    Several conditions on one subject must all hold. On a repeated node a condition holds if it does for every
    occurrence. A condition on an optional node or tensor that is absent holds.
    """

    node: str | None = None
    """The node that the condition is on."""
    tensor: str | None = None
    """The tensor that the condition is on; `output` is the value that leaves."""
    that: str | None = None
    """Arithmetic over named nodes and tensors: `conv.groups == data.C`."""
    attr: str | None = None
    """The node's attribute that is compared."""
    dim: str | int | None = None
    """The tensor's dimension that is compared: a letter of its layout, or a number from 0."""
    equals: Scalar | tuple[Scalar, ...] | None = None
    """The one value that is allowed."""
    among: tuple[Scalar | tuple[Scalar, ...], ...] | None = Field(None, alias="in")
    """The values that are allowed."""
    multiple_of: int | None = Field(None, ge=1)
    """The value must be a multiple of this."""
    between: tuple[float, float] | None = None
    """The least and the largest value, both allowed."""
    dtype: Names | None = None
    """Element types that are allowed."""
    rank: int | None = Field(None, ge=0)
    """The number of dimensions."""
    constant: bool | None = None
    """Whether the tensor's elements must be known (true) or unknown (false) at compile time."""
    broadcast: (
        Annotated[
            tuple[Broadcast, ...],
            BeforeValidator(_as_tuple, json_schema_input_type=Broadcast | tuple[Broadcast, ...]),
        ]
        | None
    ) = None
    """How the tensor meets the value it is combined with."""
    layout: Names | None = None
    """Layouts that are allowed: `NCHW`."""
    uses: int | None = Field(None, ge=1)
    """How many operands, of any operators, the value is."""
    static: bool | None = None
    """True: every dimension must be a number known at compile time."""
    origin: Origin = Field(default_factory=Origin, exclude=True)


class Row(_Data):
    """One pattern: a composite's shape, the conditions on it, and where its inputs want to live."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.\-]*$")
    """The row's name, and that of the composites it makes."""
    because: str = ""
    """Why the row is worth having, for people."""
    nodes: dict[str, Node] = Field(min_length=1)
    """The operators by name, in topological order."""
    anchor: str | None = None
    """The node a match starts from; default: the first that is neither optional nor repeated."""
    output: str | None = None
    """The node whose value leaves; default: the last one."""
    where: tuple[Predicate, ...] = ()
    """Conditions, all of which must hold."""
    leaves: Names = ()
    """Inner nodes whose values may leave as well. None, unless said."""
    scopes: dict[str, Scope] = Field(default_factory=dict)
    """Wish by tensor name; `output` for the result, `others` for all that are not named. Default `any`."""
    kernel: str | None = None
    """The kernel that computes the composite; left out, the lowering chooses."""
    priority: int = 0
    """Among candidates that overlap and save the same, the higher one wins."""
    origin: Origin = Field(default_factory=Origin, exclude=True)

    def anchor_name(self) -> str:
        """The name of the node a match starts from."""
        if self.anchor is not None:
            return self.anchor
        for name, node in self.nodes.items():
            if not node.optional and node.repeat is None:
                return name
        return next(iter(self.nodes))

    def output_name(self) -> str:
        """The name of the node whose value leaves the composite."""
        return self.output if self.output is not None else list(self.nodes)[-1]

    def scope_of(self, tensor: str | None) -> Scope:
        """The wish for a tensor by name (``None``: an operand without a name)."""
        if tensor is not None and tensor in self.scopes:
            return self.scopes[tensor]
        if tensor != "output" and "others" in self.scopes:
            return self.scopes["others"]
        return Scope.ANY


class TargetSpec(_Data):
    """What a table is for. A compilation target fits if its kind is equal and it has all the keys."""

    kind: str = "opencl"
    """The kind of the compilation target."""
    keys: Names = ()
    """Keys that the compilation target must have."""


class Table(_Data):
    """A pattern table, complete: ``extends`` is resolved, sets are expanded by ``ops_of``."""

    schema_version: Literal[1] = 1
    """The version of this format."""
    name: str = Field(min_length=1)
    """The table's name."""
    target: TargetSpec = Field(default_factory=TargetSpec)
    """What the table is for."""
    extends: str | None = None
    """A built-in table, or a path relative to this file; its sets, fragments and rows come first."""
    disable: Names = ()
    """Rows that are switched off, by name or with `*` and `?`."""
    sets: dict[str, Names] = Field(default_factory=dict)
    """Lists of operators by name; `$name` stands for the list."""
    fragments: dict[str, Fragment] = Field(default_factory=dict)
    """Small DAGs by name; `$name` stands for the DAG where an operator may stand."""
    patterns: tuple[Row, ...] = ()
    """The rows. Where two are equal in all else, the earlier one wins."""
    origin: Origin = Field(default_factory=Origin, exclude=True)
