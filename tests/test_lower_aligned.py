"""Vectors that begin at a multiple of their length are single accesses; others stay as TVM prints them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from modules import array, const, graph, nn, var
from tvm import s_tir, te

from fusion_patterns import compile_module
from fusion_patterns.compiler import as_target
from fusion_patterns.lower.kernels import lower_kernels
from fusion_patterns.reference import Reference
from fusion_patterns.run import Device, Session
from fusion_patterns.table import load_table
from fusion_patterns.table.model import Scope


def source_of(begin: int, lanes: int = 4, dtype: str = "float32") -> str:
    """A kernel that copies 64 numbers from the place ``begin`` on, in vectors."""
    data = te.placeholder((64 + begin,), dtype, "data")
    sch = s_tir.Schedule(
        te.create_prim_func([data, te.compute((64,), lambda i: data[i + begin], name="out")])
    )
    outer, inner = sch.split(sch.get_loops(sch.get_sblock("out"))[0], [None, lanes])
    sch.bind(outer, "threadIdx.x")
    sch.vectorize(inner)
    kernels, faults = lower_kernels({"copy": sch.mod["main"]}, as_target())
    assert not faults
    source = kernels["copy"].launches[0].source
    return source[source.rindex("__kernel") :]


@pytest.mark.parametrize("lanes", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_an_aligned_vector_is_read_and_written_through_a_vectors_pointer(lanes: int, dtype: str) -> None:
    source = source_of(2 * lanes, lanes, dtype)
    kind = {"float32": "float", "float16": "half", "int32": "int"}[dtype]
    assert f"((__global {kind}{lanes}*)data_ptr)[((convert_int(get_local_id(0))) + 2)]" in source
    assert f"((__global {kind}{lanes}*)out_ptr)[(convert_int(get_local_id(0)))] =" in source
    assert "vload" not in source
    assert "vstore" not in source


@pytest.mark.parametrize("begin", [1, 2, 3, 5])
def test_a_vector_that_begins_between_two_is_not(begin: int) -> None:
    source = source_of(begin)
    assert "(__global float4*)data_ptr" not in source
    assert "((__global float4*)out_ptr)[" in source


def test_a_bool_takes_a_byte_and_stays() -> None:
    assert "vload4(0, data_ptr + " in source_of(0, dtype="bool")


def in_buffers() -> Any:
    """The built-in table with nothing in textures."""
    table = load_table()
    rows = [
        row.model_copy(update={"scopes": dict.fromkeys([*row.scopes, "output", "others"], Scope.GLOBAL)})
        for row in table.patterns
    ]
    return table.model_copy(update={"patterns": tuple(rows)})


@pytest.mark.opencl
@pytest.mark.parametrize("channels", [6, 7, 8])
def test_rows_that_four_does_not_divide_are_written_right(opencl_device: Device, channels: int) -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        return [emit(nn.relu(emit(nn.conv2d(x, const((channels, 5, 3, 3), 1), padding=1))))]

    mod, data = graph(build, [var("x", (2, 5, 7, 5))]), array((2, 5, 7, 5), 3)
    compiled = compile_module(mod, table=in_buffers())
    sources = "".join(kernel.source for kernel in compiled.manifest.kernels.values())
    assert "((__global float4*)" in sources
    (result,) = Session(compiled.manifest, opencl_device).run([data])
    (wanted,) = Reference(mod).run({"x": data})
    assert np.abs(result - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("profile", "wanted"), [("nvidia-opencl", True), ("pocl", False)])
def test_the_profile_says_how_vectors_are_accessed(profile: str, wanted: bool) -> None:
    def build(emit: Any, x: Any) -> list[Any]:
        return [emit(nn.conv2d(x, const((8, 8, 1, 1), 1)))]

    compiled = compile_module(graph(build, [var("x", (1, 8, 6, 4))]), profile=profile)
    sources = "".join(kernel.source for kernel in compiled.manifest.kernels.values())
    assert ("((__global float4*)" in sources) == wanted
    assert ("vload4(0, weight_ptr" in sources) != wanted
