"""What no rule schedules still runs: adaptive pooling with windows of several sizes."""

from __future__ import annotations

from typing import Any

import pytest
from test_normalise import function
from tvm import relax

from fusion_patterns import verify


@pytest.mark.opencl
@pytest.mark.parametrize(
    ("size", "out"), [((8, 8), (3, 3)), ((8, 8), (6, 6)), ((13, 14), (5, 3)), ((3, 3), (6, 6)), ((4, 5), (4, 1))]
)  # fmt: skip
def test_adaptive_pool_with_unequal_windows(
    opencl_device: Any, size: tuple[int, int], out: tuple[int, int]
) -> None:
    mod = function(lambda bb, x: bb.emit(relax.op.nn.adaptive_avg_pool2d(x, out)), (2, 5, *size))
    assert verify(mod).ok


@pytest.mark.opencl
def test_adaptive_pool_between_convolutions(opencl_device: Any) -> None:
    """As in a pyramid: the pool itself is plain, what is around it is packed."""

    def build(bb: Any, x: Any, w: Any) -> Any:
        y = bb.emit(relax.op.nn.relu(bb.emit(relax.op.nn.conv2d(x, w, padding=1))))
        y = bb.emit(relax.op.nn.adaptive_avg_pool2d(y, (3, 3)))
        return bb.emit(relax.op.nn.conv2d(y, w, padding=1))

    report = verify(function(build, (1, 8, 8, 8), (8, 8, 3, 3)))
    assert report.ok
    assert report.compiled is not None
    assert report.compiled.report.convs == {"total": 2, "covered": 2}
