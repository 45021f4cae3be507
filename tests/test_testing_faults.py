"""Faults that generated modules have found, each with the smallest module that showed it."""

from __future__ import annotations

import pytest
import tvm
from hypothesis import HealthCheck, example, given, settings
from tvm import te, topi
from tvm.s_tir import dlight

from fusion_patterns import compile_module, tvm_compat
from fusion_patterns.run import Device, check
from fusion_patterns.table import load_table
from fusion_patterns.testing import Graph, Module, Op, Tensor, build, modules, properties

TABLE = load_table()
SHARE = settings(
    max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
Spec = Graph | Module


def constant(name: str, *shape: int, dtype: str = "float32") -> Tensor:
    return Tensor(name, shape, dtype, constant=True)


TWO_WALKS = Graph(
    "main",
    (
        Tensor("x", (2, 8, 8, 6)),
        Tensor("a", (4, 8, 1, 1)),
        Tensor("b", (8, 4, 1, 1)),
        constant("c", 4, 4, 3, 3),
    ),
    (
        Op("v0", "mean", ("x",), {"axis": [2, 3], "keepdims": True}),
        Op("v1", "nn.conv2d", ("v0", "a")),
        Op("v2", "nn.conv2d", ("v1", "b")),
        Op("v3", "multiply", ("x", "v2")),
        Op("v4", "strided_slice", ("x",), {"axes": [1], "begin": [4], "end": [8]}),
        Op("v5", "nn.conv2d", ("v4", "c"), {"padding": [1, 1]}),
        Op("v6", "subtract", ("v4", "v5")),
    ),
    ("v3", "v6"),
)
"""Composites are taken out and the way is walked again: two different kernels had one name."""

HALF_TRANSPOSED = Graph(
    "main",
    (
        Tensor("x", (1, 6, 5, 6), "float16"),
        constant("w", 6, 6, 3, 3, dtype="float16"),
        Tensor("u", (6, 5, 3, 3), "float16"),
    ),
    (
        Op("v0", "nn.conv2d", ("x", "w"), {"strides": [2, 2], "padding": [1, 1]}),
        Op("v1", "nn.conv2d_transpose", ("v0", "u"), {"strides": [2, 2]}),
    ),
    ("v1",),
)
"""Where a stride does not divide the kernel, the packed transposed convolution could not be made in float16."""

PAIR = Graph(
    "main",
    (Tensor("x", (2, 6, 6, 7)), constant("a", 5, 6, 3, 3), constant("b", 5, 6, 3, 3)),
    (Op("v0", "nn.conv2d", ("x", "a")), Op("v1", "nn.conv2d", ("x", "b")), Op("v2", "add", ("v1", "v0"))),
    ("v2",),
)
"""The saved plan listed a match's nodes in the order of the walk, and so changed when it was read and saved."""

DEPTHWISE = Graph(
    "main",
    (Tensor("x", ("n", 4, 2, 2)), Tensor("w", (4, 1, 1, 1))),
    (Op("v0", "nn.conv2d", ("x", "w"), {"groups": 4}), Op("v1", "sigmoid", ("v0",))),
    ("v1",),
)
"""A sum of one product and what follows it, in no row: dlight applied the sigmoid to the initial zero as well."""


@SHARE
@given(spec=modules(TABLE))
@example(spec=TWO_WALKS)
@example(spec=HALF_TRANSPOSED)
def test_the_whole_way(spec: Spec) -> None:
    check(compile_module(build(spec), None, TABLE).manifest)


@SHARE
@given(spec=modules(TABLE))
@example(spec=PAIR)
def test_round_trip(spec: Spec) -> None:
    properties.round_trips(spec, TABLE)


@pytest.mark.opencl
@pytest.mark.parametrize("spec", [TWO_WALKS, DEPTHWISE])
def test_on_a_device(opencl_device: Device, spec: Spec) -> None:
    properties.runs_the_same(spec, TABLE)


def test_an_epilogue_stays_out_of_a_sum_of_one_product() -> None:
    x, w = te.placeholder((1, 4, 6, 6), name="x"), te.placeholder((4, 1, 1, 1), name="w")
    sums = topi.nn.conv(x, w, 1, 0, 1, 4, "NCHW", "OIHW", "float32")
    mod = tvm.IRModule({"main": te.create_prim_func([x, w, topi.tanh(sums)])})
    tvm_compat.prepare()
    with tvm.target.Target("qcom/adreno-opencl-texture"):
        found = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(mod)
    assert str(found).count("T.tanh") == 1
