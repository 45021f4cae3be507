"""Hand-written manifests on a real OpenCL device, against NumPy."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fusion_patterns.errors import DeviceError, ManifestError
from fusion_patterns.run import (
    Alloc,
    Bind,
    Call,
    Copy,
    Device,
    Function,
    If,
    InputError,
    Kernel,
    Launch,
    Manifest,
    Param,
    Scalar,
    Session,
    Shape,
    Tensor,
    View,
    devices,
    pick_device,
)
from fusion_patterns.run import device as device_module
from fusion_patterns.run.interpret import image_extent

pytestmark = pytest.mark.opencl

ADD = Kernel(
    "add",
    """
__kernel void add(__global float* out, __global const float* a, __global const float* b, int n) {
  int i = get_global_id(0);
  if (i < n) out[i] = a[i] + b[i];
}
""",
    ("buffer", "buffer", "buffer", "scalar:int32"),
)
# where(x, y, layer) of every texel, and back: each shows one direction without relying on the other
WHERE = Kernel(
    "where",
    """
__kernel void where(write_only image2d_array_t out) {
  int4 at = (int4)(get_global_id(0), get_global_id(1), get_global_id(2), 0);
  write_imagef(out, at, convert_float4(at) + (float4)(0, 0, 0, 0.5f));
}
""",
    ("image_write",),
)
FETCH = Kernel(
    "fetch",
    """
__kernel void fetch(__global float4* out, read_only image2d_array_t image) {
  int x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);
  out[(z * get_global_size(1) + y) * get_global_size(0) + x] = read_imagef(image, (int4)(x, y, z, 0));
}
""",
    ("buffer", "image_read"),
)
N = Tensor(("n",), "float32")
FLAG = Tensor((), "bool")


@pytest.fixture(scope="module")
def device() -> Device:
    try:
        return pick_device()
    except DeviceError as error:
        pytest.skip(str(error))


def manifest(
    *functions: Function, kernels: tuple[Kernel, ...] = (ADD, WHERE, FETCH), **more: Any
) -> Manifest:
    return Manifest("m", "opencl", {f.name: f for f in functions}, {k.name: k for k in kernels}, **more)


def add(out: str, a: str, b: str, n: str = "n", label: str = "add") -> Launch:
    return Launch("add", (out, a, b, Scalar(n, "int32")), (f"({n} + 3) // 4", 1, 1), (4, 1, 1), label)


def draw(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SUM = Function("main", (Param("a", N), Param("b", N)), (Alloc("c", N), add("c", "a", "b")), "c")


@pytest.mark.parametrize("n", [0, 1, 5, 4096])
def test_a_buffer_kernel_with_a_symbolic_extent(device: Device, n: int) -> None:
    a, b = draw(n), draw(n, seed=1)
    session = Session(manifest(SUM), device)
    for inputs in ([a, b], {"b": b, "a": a}):
        (c,) = session.run(inputs)
        assert c.dtype == np.float32
        assert np.array_equal(c, a + b)


FOLDINGS = [
    ((2, 3, 5, 7, 4), "global.texture"),
    ((2, 3, 5, 7, 4), "global.texture-nhwc"),
    ((2, 3, 5, 7, 4), "global.texture-weight"),
    ((5, 7, 4), "global.texture"),  # one layer
    ((2, 5, 7, 4), "global.texture-nhwc"),
    ((7, 4), "global.texture"),
    ((7, 4), "global.texture-weight"),
]


@pytest.mark.parametrize(("shape", "scope"), FOLDINGS)
def test_images_fold_as_tvm_folds_them(device: Device, shape: tuple[int, ...], scope: str) -> None:
    image = Tensor(shape, "float32", scope)
    plain = replace(image, scope="global")
    extent = image_extent(shape, scope)
    body = (
        Alloc("w", image),
        Launch("where", ("w",), extent, (1, 1, 1)),
        Copy("out", "w", plain),
        Alloc("f", plain),
        Launch("fetch", ("f", "x"), extent, (1, 1, 1)),
        Copy("image", "y", image),
        Alloc("g", plain),
        Launch("fetch", ("g", "image"), extent, (1, 1, 1)),
    )
    function = Function("main", (Param("x", image), Param("y", plain)), body, ("w", "out", "f", "g"))
    x, y = draw(*shape), draw(*shape, seed=1)
    read, copied, fetched, of_copy = Session(manifest(function), device).run([x, y])

    # TVM's rule once more, by axes: which element has which texel
    s = {"texture": len(shape) - 2, "texture-nhwc": 2, "texture-weight": 1}[scope.removeprefix("global.")]
    axes = np.indices(shape[:-1])
    parts = (
        [range(s, len(shape) - 1), range(s - 1, s), range(s - 1)] if s else [(), (), range(len(shape) - 1)]
    )
    texel = np.full(shape, 0.5, np.float32)
    for channel, part in enumerate(parts):
        texel[..., channel] = 0
        for axis in part:
            texel[..., channel] = texel[..., channel] * shape[axis] + axes[axis]
    assert np.array_equal(read, texel)
    assert np.array_equal(copied, texel)
    assert np.array_equal(fetched, x)
    assert np.array_equal(of_copy, y)


def test_copies_between_all_scopes_keep_the_order(device: Device) -> None:
    shape = (2, 3, 5, 4)
    tensors = [Tensor(shape, "float32", s) for s in ("global", "global.texture", "global.texture-nhwc")]
    tensors += [
        replace(tensors[0], scope="global.texture-weight"),
        Tensor((6, 5, 4), "float32", "global.texture"),
    ]
    body = [Copy(f"v{i}", "x", t) for i, t in enumerate(tensors)]
    pairs = [(i, j) for i in range(len(tensors)) for j in range(len(tensors))]
    body += [Copy(f"v{i}_{j}", f"v{i}", tensors[j]) for i, j in pairs]
    result = tuple(step.value for step in body)
    x = draw(*shape)
    function = Function("main", (Param("x", tensors[0]),), tuple(body), result)
    for got in Session(manifest(function), device).run([x]):
        assert np.array_equal(got.reshape(shape), x)


def test_half_images_need_no_float16_arithmetic(device: Device) -> None:
    image = Tensor((3, 4), "float16", "global.texture-weight")
    body = (Alloc("f", Tensor((3, 4), "float32")), Launch("fetch", ("f", "w"), (1, 3, 1), (1, 1, 1)))
    w = draw(3, 4).astype(np.float16)
    session = Session(
        manifest(Function("main", (), body, ("f", "w")), constants={"w": w}, constant_tensors={"w": image}),
        device,
    )
    for _ in range(2):  # constants outlive a run
        fetched, back = session.run([])
        assert back.dtype == np.float16
        assert np.array_equal(back, w)
        assert np.array_equal(fetched, w.astype(np.float32))


def test_float16_kernels_on_a_device_without_float16(device: Device) -> None:
    source = """
#ifdef cl_khr_fp16
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#else
#error no half
#endif
__kernel void h(__global half* a) { a[0] += 1.0h; }
"""
    half = Manifest("m", "opencl", {}, {"h": Kernel("h", source, ("buffer",))})
    if device.info.float16:
        Session(half, device)
    else:
        with pytest.raises(
            DeviceError, match=r"kernel h: needs float16 arithmetic, which .* lacks; choose another"
        ):
            Session(half, device)


def test_branches_calls_views_and_tuples(device: Device) -> None:
    double = Function("double", (Param("x", (N, N)),), (Alloc("y", N), add("y", "x#0", "x#1")), ("y", "x"))
    square = Tensor(("n // 2", 2), "float32")
    branch = If(
        "flag",
        (Call("double", (("p#0", "p#0"),), "d"), Bind("alias", "d#0")),
        (Alloc("y", N), add("y", "p#0", "p#1#0"), If("flag", (), (), "inner", "p#0", "y")),
        "chosen",
        ("alias", "p#1"),
        ("inner", "p#1"),
    )
    body = (branch, View("v", "chosen#0", square), Shape("s", ("n", "n * n")), Bind("b", (("v",), None, "s")))
    main = Function("main", (Param("p", (N, (N,))), Param("flag", FLAG)), body, ("b", "chosen#1#0", "b#0#0"))
    session = Session(manifest(double, main), device)
    a, b = draw(6), draw(6, seed=1)
    for flag, expected in ((True, a + a), (False, a + b)):
        v, s, second, again = session.run([(a, (b,)), np.array(flag)])
        assert np.array_equal(v, expected.reshape(3, 2))
        assert np.array_equal(again, v)
        assert s.dtype == np.int64
        assert s.tolist() == [6, 36]
        assert np.array_equal(second, b)
    with pytest.raises(ManifestError, match="view v of chosen#0: expected 20 bytes, got 16"):
        session.run([(draw(5), (draw(5),)), np.array(True)])


def test_a_call_checks_the_shapes_it_is_given(device: Device) -> None:
    body = (Call("sum", ("x", "y"), "z"),)
    main = Function("main", (Param("x", N), Param("y", Tensor(("m",), "float32"))), body, "z")
    with pytest.raises(InputError, match="parameter b, dimension 0: expected 3"):
        Session(manifest(main, replace(SUM, name="sum")), device).run([draw(3), draw(4)])


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "bfloat16"]
)
def test_every_dtype_and_empty_and_rank_0_tensors_pass_through(device: Device, dtype: str) -> None:
    kept = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
    params = tuple(Param(f"p{i}", Tensor(shape, dtype)) for i, shape in enumerate([(), (0, 3), (2, 3)]))
    body = tuple(Copy(f"c{i}", f"p{i}", param.tensor) for i, param in enumerate(params))  # type: ignore[arg-type]
    session = Session(
        manifest(Function("main", params, body, ("c0", "c1", "c2", "w")), constants={"w": np.array(True)}),
        device,
    )
    given = [
        np.asarray(np.arange(6).reshape(2, 3)[index] % 2).astype(kept) for index in ((0, 1), slice(0, 0), ...)
    ]
    for got, x in zip(session.run(given), [*given, np.array(True)], strict=True):
        assert (got.dtype, got.shape) == (x.dtype, x.shape)
        assert np.array_equal(got, x)


def test_scalars_of_every_kind(device: Device) -> None:
    kernel = Kernel(
        "scalars",
        """
__kernel void scalars(__global float* out, char a, int b, long c, float d, char e) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e;
}
""",
        ("buffer", "scalar:int8", "scalar:int32", "scalar:int64", "scalar:float32", "scalar:bool"),
    )
    args = (
        "o",
        Scalar(-3, "int8"),
        Scalar("n // 2", "int32"),
        Scalar(7, "int64"),
        Scalar(float("inf"), "float32"),
    )
    body = (
        Alloc("o", Tensor((5,), "float32")),
        Launch("scalars", (*args, Scalar(1, "bool")), (1, 1, 1), (1, 1, 1)),
    )
    function = Function("main", (Param("x", N),), body, "o")
    (out,) = Session(manifest(function, kernels=(kernel,)), device).run([draw(9)])
    assert out.tolist() == [-3, 4, 7, np.inf, 1]
    launch = replace(body[1], args=("o", Scalar("n", "int8"), *body[1].args[2:]))
    broken = replace(function, body=(body[0], launch))
    with pytest.raises(ManifestError, match=r"kernel scalars .* 999 does not fit int8"):
        Session(manifest(broken, kernels=(kernel,)), device).run([draw(999)])


def test_true_is_one_whatever_byte_a_kernel_writes(device: Device) -> None:
    kernel = Kernel(
        "yes", "__kernel void yes(__global char* out) { out[0] = 0; out[1] = -1; out[2] = 2; }", ("buffer",)
    )
    body = (Alloc("o", Tensor((3,), "bool")), Launch("yes", ("o",), (1, 1, 1), (1, 1, 1)))
    (out,) = Session(manifest(Function("main", (), body, "o"), kernels=(kernel,)), device).run([])
    assert out.view(np.uint8).tolist() == [0, 1, 1]


def chain(length: int) -> Function:
    body: list[Any] = []
    for i in range(length):
        body += [Alloc(f"v{i + 1}", N), add(f"v{i + 1}", f"v{i}", "v0", label=f"row {i % 2}")]
    return Function("main", (Param("v0", N),), tuple(body), f"v{length}")


def test_memory_is_free_again_after_the_last_use(device: Device) -> None:
    session = Session(manifest(chain(20)), device)
    x = draw(1000)
    for _ in range(2):
        (out,) = session.run([x])
        assert np.allclose(out, x * 21, rtol=1e-5)
        assert session.pool.peak_bytes == 3 * x.nbytes  # the input, one that is read, one that is written
        assert session.pool.live_bytes == 0


def test_shared_memory_lives_until_the_last_name_is_gone(device: Device) -> None:
    body = (
        Alloc("a", N),
        add("a", "x", "x"),
        View("v", "a", Tensor(("n", 1), "float32")),
        Bind("t", ("v", "x")),
        Alloc("b", N),  # "a" is dead here, its bytes are not
        add("b", "x", "x"),
        Alloc("c", N),
        add("c", "b", "b"),
    )
    x = draw(64)
    got, _, c = Session(manifest(Function("main", (Param("x", N),), body, ("t", "c"))), device).run([x])
    assert np.array_equal(got[:, 0], x + x)
    assert np.array_equal(c, x * 4)


def test_profile_lists_every_launch(device: Device) -> None:
    function = chain(5)
    image = Tensor((1, 4), "float32", "global.texture")
    body = (*function.body, Copy("i", "w", image))
    session = Session(
        manifest(replace(function, body=body, result=("v5", "i")), constants={"w": draw(1, 4)}), device
    )
    times = session.profile([draw(100)], repeats=3)
    assert [(t.name, t.label, t.count) for t in times] == [
        ("add", "row 0", 3),
        ("add", "row 1", 2),
        ("copy", "global -> global.texture", 1),
    ]
    assert all(0 < t.median_ns <= t.total_ns or t.count > 1 for t in times)
    with pytest.raises(ValueError, match="repeats"):
        session.profile([draw(100)], repeats=0)


def test_a_gpu_is_kept_busy_while_commands_reach_it(device: Device) -> None:
    gpu = replace(device, info=replace(device.info, kind="gpu"))
    session = Session(manifest(chain(5)), gpu)
    with gpu.hold(session.queue, 10_000):  # for at most a quarter of a second
        event = device_module.opencl().enqueue_marker(session.queue)
        begin = time.monotonic()
    assert event.command_execution_status != device_module.opencl().command_execution_status.COMPLETE
    event.wait()
    assert 0.02 < time.monotonic() - begin < 10
    assert [t.count for t in session.profile([draw(100)], repeats=2)] == [3, 2]


def test_the_time_of_one_run_of_many(device: Device) -> None:
    session = Session(manifest(chain(5)), device)
    assert 0 <= session.seconds_per_run([draw(100)], runs=2, repeats=3) < 10
    with pytest.raises(ValueError, match="runs and repeats"):
        session.seconds_per_run([draw(100)], runs=0)
    with pytest.raises(InputError, match="expected 1 inputs, got 2"):
        session.seconds_per_run([draw(100), draw(100)])


# --- what goes wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("__kernel void add(__global float* a) { a[0] = b; }", r"add .my row.: does not compile on .*'b'"),
        ("__kernel void other(__global float* a) { }", r"add .my row.: its source has no __kernel"),
        ("__kernel void add(__global float* a) { }", r"takes 1 arguments, the manifest says 4"),
    ],
)
def test_a_kernel_that_cannot_be_built_is_named(device: Device, source: str, message: str) -> None:
    function = replace(SUM, body=(SUM.body[0], add("c", "a", "b", label="my row")))
    with pytest.raises(DeviceError, match=message) as caught:
        Session(manifest(function, kernels=(replace(ADD, source=source),)), device)
    assert "\n" not in str(caught.value)


def test_what_is_too_large_is_refused_before_the_driver_sees_it(device: Device) -> None:
    limit = device.info.max_work_group
    body = (*SUM.body[:1], replace(SUM.body[1], block=(limit + 1, 1, 1)))  # type: ignore[arg-type]
    with pytest.raises(
        DeviceError, match=r"kernel add \(add\): a work group of .* too large .* smaller work groups"
    ):
        Session(manifest(replace(SUM, body=body)), device).run([draw(3), draw(3)])
    width = device.info.max_image[0] + 1
    wide = Alloc("w", Tensor((1, width, 4), "float32", "global.texture"))
    with pytest.raises(DeviceError, match=r"value w: .* keep it in a buffer"):
        Session(manifest(Function("main", (), (wide,), ())), device).run([])
    huge = Alloc("w", Tensor((1 << 50,), "int8"))
    with pytest.raises(DeviceError, match=r"value w: .* allocates at most"):
        Session(manifest(Function("main", (), (huge,), ())), device).run([])


def test_negative_grids_and_unknown_functions(device: Device) -> None:
    body = (*SUM.body[:1], replace(SUM.body[1], grid=("n - 9", 1, 1)))  # type: ignore[arg-type]
    session = Session(manifest(replace(SUM, body=body)), device)
    with pytest.raises(ManifestError, match=r"kernel add .*: grid \[-6, 1, 1\]"):
        session.run([draw(3), draw(3)])
    with pytest.raises(ManifestError, match="no function 'other'; there are: main"):
        session.run([], function="other")


def test_devices_are_found_by_index_and_name(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.info in devices()
    assert pick_device(device.info.index) is device
    assert pick_device(device.info.name[2:].upper()).info.name == device.info.name
    monkeypatch.setenv("FUSION_PATTERNS_DEVICE", "no such device")
    with pytest.raises(DeviceError, match="no OpenCL device fits 'no such device'; there are: "):
        pick_device()
    monkeypatch.setattr(device_module, "_found", list)
    with pytest.raises(DeviceError, match=r"no OpenCL device; .*apt install pocl-opencl-icd"):
        pick_device()


def test_a_device_that_fails_the_probe_is_not_used(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    real, index = device_module._probed.__wrapped__, device.info.index
    monkeypatch.setattr(device_module, "_probed", real)
    monkeypatch.setattr(
        device_module, "_PROBE", replace(device_module._PROBE, source="__kernel void probe() { x; }")
    )
    with pytest.raises(DeviceError, match=r"no usable OpenCL device .*does not compile.*apt install"):
        pick_device(index)
    monkeypatch.undo()
    monkeypatch.setattr(device_module, "_probed", real)
    wrong = device_module._PROBE.source.replace("2.0f", "3.0f")
    monkeypatch.setattr(device_module, "_PROBE", replace(device_module._PROBE, source=wrong))
    with pytest.raises(DeviceError, match="computes wrong results with images"):
        pick_device(index)
