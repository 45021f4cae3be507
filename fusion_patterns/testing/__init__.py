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
build        plain data -> Relax
draft        a graph in the making
operands     operands and attributes for a row's operators
conditions   a row's conditions, asked of plain data
instances    graphs that a row must take, and near misses
nets         convolutional networks
variants     the same graph written otherwise, or smaller
strategies   all of these for Hypothesis
properties   what must hold
check        all properties of a table
plugin       the same for pytest
fuzz         many modules through everything
"""

from __future__ import annotations

from fusion_patterns.testing.build import build
from fusion_patterns.testing.check import CheckReport, check_table
from fusion_patterns.testing.instances import Instance, NearMiss
from fusion_patterns.testing.spec import Graph, Module, Op, Tensor
from fusion_patterns.testing.strategies import instances, modules, near_misses

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
