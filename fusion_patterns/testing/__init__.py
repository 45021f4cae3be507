"""Property tests for pattern tables: the built-in one's, and your own.

    from hypothesis import given
    from fusion_patterns.testing import instances, modules, near_misses, properties

    @given(instances(row, table))
    def test_takes(instance):
        properties.takes(instance, row, table)

    pytest --fusion-table my.yaml            the same for all rows and properties, without a line of code
    fusion-patterns check my.yaml            the same without pytest

spec         graphs as plain data, printable as Python
shapes       their types, by arithmetic
building     plain data -> Relax
draft        a graph in the making
operands     operands and attributes for a row's operators
conditions   a row's conditions, asked of plain data
rows         graphs that a row must take, and near misses
nets         convolutional networks
variants     the same graph written otherwise, or smaller
strategies   all of these for Hypothesis
properties   what must hold
check        all properties of a table
plugin       the same for pytest
fuzz         many modules through everything
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_patterns.testing.building import build
    from fusion_patterns.testing.check import CheckReport, check_table
    from fusion_patterns.testing.rows import Instance, NearMiss
    from fusion_patterns.testing.spec import Graph, Module, Op, Tensor
    from fusion_patterns.testing.strategies import instances, modules, near_misses

_HOME = {
    "CheckReport": "check",
    "Graph": "spec",
    "Instance": "rows",
    "Module": "spec",
    "NearMiss": "rows",
    "Op": "spec",
    "Tensor": "spec",
    "build": "building",
    "check_table": "check",
    "instances": "strategies",
    "modules": "strategies",
    "near_misses": "strategies",
}

__all__ = [
    "CheckReport",
    "Graph",
    "Instance",
    "Module",
    "NearMiss",
    "Op",
    "Tensor",
    "build",
    "check_table",
    "instances",
    "modules",
    "near_misses",
]


def __getattr__(name: str) -> Any:
    # pytest imports the plugin, and so this package, in every run: TVM comes with the first use.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
