"""Arrays of others, in and out: where they lie, which stream they are ordered on, what comes back."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cufp8
from cufp8 import interop
from cufp8.formats import FLOATS
from cufp8.interop import View

# JAX would else take three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


class Foreign:
    """An array of a library that nobody knows: it speaks DLPack and nothing else."""

    def __init__(self, array: Any) -> None:
        self.inner = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.inner.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.inner.__dlpack_device__()


def test_a_library_whose_dtype_numpy_cannot_take() -> None:
    class Refusing(Foreign):
        def __dlpack__(self, **options: Any) -> Any:
            raise BufferError("bfloat16 is not exported")

    layer = cufp8.Linear(np.ones((2, 3), np.float32), device="cpu")
    with pytest.raises(TypeError, match=r"Refusing through DLPack \(bfloat16 is not exported\); convert it"):
        layer(Refusing(np.ones((1, 3), np.float32)))


def view_of(a: np.ndarray) -> View:
    return interop.adapter(a).view(a)


# --- rows and extent against brute force ----------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> np.ndarray:
    """Arrays seen through slices of any step, transposition and broadcasting; up to four dimensions."""
    ndim = draw(st.integers(1, 4))
    shape = tuple(draw(st.integers(0 if draw(st.booleans()) else 1, 4)) for _ in range(ndim))
    a = np.zeros(shape, draw(st.sampled_from([np.float32, np.float16])))
    index = []
    for n in shape:
        start, stop = draw(st.integers(0, n)), draw(st.integers(0, n))
        step = draw(st.sampled_from([1, 1, 1, 2, 3, -1, -2]))
        full = draw(st.booleans())
        index.append(slice(None, None, step) if full else slice(start, stop, step))
    a = a[tuple(index)]
    if draw(st.booleans()):
        a = a.transpose(draw(st.permutations(range(a.ndim))))
    if draw(st.booleans()):
        a = np.broadcast_to(a, (draw(st.integers(1, 3)), *a.shape))
    if draw(st.booleans()):
        a = a[draw(st.integers(0, a.ndim)) * (slice(None),) + (None,)]
    return a


def addresses(a: np.ndarray) -> np.ndarray:
    """The address of each element."""
    base = a.__array_interface__["data"][0]
    where = np.full(a.shape, base, np.int64)
    for axis, (n, stride) in enumerate(zip(a.shape, a.strides, strict=True)):
        steps = np.arange(n) * stride
        where += steps.reshape(-1, *(1 for _ in a.shape[axis + 1 :]))
    return where


@given(views())
def test_rows_is_right_wherever_it_answers(a: np.ndarray) -> None:
    found = interop.rows(view_of(a))
    where = addresses(a)
    m, k = math.prod(a.shape[:-1]), a.shape[-1]
    if found is not None:
        assert found[0] == m
        if a.size:
            want = where.flat[0] + a.itemsize * (np.arange(m)[:, None] * found[1] + np.arange(k))
            np.testing.assert_array_equal(where.reshape(m, k), want)
    elif a.size:
        # Then there is no such answer: neighbours along k are apart, or rows have no one distance.
        flat = where.reshape(m, k)
        apart = k > 1 and bool((np.diff(flat, axis=1) != a.itemsize).any())
        uneven = m > 1 and len(set(np.diff(flat[:, 0]))) > 1
        assert apart or uneven


@given(views())
def test_extent_is_the_hull_of_all_elements(a: np.ndarray) -> None:
    first, end = interop.extent(view_of(a), a.itemsize)
    if not a.size:
        assert first == end
        return
    where = addresses(a)
    assert (first, end) == (where.min(), where.max() + a.itemsize)


def test_rows_of_common_arrays() -> None:
    x = np.zeros((4, 6, 8), np.float32)
    cases = [
        (x, (24, 8)),
        (x[0], (6, 8)),
        (x[0, 0], (1, 8)),
        (x[..., :5], (24, 8)),
        (x[:, 0], (4, 48)),
        (x[:, 1:5], None),
        (x[0, ::2], (3, 16)),
        (x[0].T, None),
        (x[0, :, :1], (6, 8)),
        (x[0, :, ::2], None),
        (x[0, ::-1], (6, -8)),
        (np.broadcast_to(x[0, 0], (5, 8)), (5, 0)),
        (x[:0, 0], (0, 48)),
        (x[:1, :, None][:, :1], (1, 8)),
    ]
    for a, want in cases:
        found = interop.rows(view_of(a))
        if want is None or want[0] > 1:
            assert found == want, (a.shape, a.strides)
        else:
            assert found[0] == want[0], (a.shape, a.strides)


# --- NumPy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "uint8", "int32", "complex64"])
def test_a_numpy_array_is_taken_as_it_is(dtype: str) -> None:
    a = np.zeros((3, 5), FLOATS.get(dtype, dtype))[:, ::2]
    found = interop.adapter(a)
    assert found.kind == "NumPy"
    v = found.view(a)
    assert (v.ptr, v.shape, v.strides) == (a.ctypes.data, (3, 3), (5, 2))
    assert (v.dtype, v.device) == (dtype, None)
    assert found.array(a) is a and found.from_host(a, a) is a
    assert interop.array(a, "a") is a and interop.on_host(a) and interop.to_host(a) is a


def test_the_other_byte_order_is_converted() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    swapped = a.astype(a.dtype.newbyteorder())
    taken = interop.array(swapped, "a")
    assert taken.dtype.isnative
    np.testing.assert_array_equal(taken, a)
    assert interop.adapter(swapped).view(swapped).dtype not in FLOATS


def test_a_read_only_array_is_known_as_such() -> None:
    a = np.zeros(3)
    assert interop.adapter(a).writeable(a)
    a.flags.writeable = False
    assert not interop.adapter(a).writeable(a)


class Mine(np.ndarray):
    """A subclass, as libraries make."""


def test_subclasses_count() -> None:
    a = np.zeros((2, 3), np.float32).view(Mine)
    assert interop.adapter(a).kind == "NumPy"
    assert interop.adapter(a) is interop.adapter(np.zeros(1))


# --- what is no array -------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [None, 1.5, "x", [1.0], (1.0,), {"a": 1}, object(), np.float32(1), memoryview(b"abcd")])
def test_what_is_no_array(x: Any) -> None:
    assert interop.adapter(x) is None
    with pytest.raises(TypeError) as error:
        interop.array(x, "Something: x")
    text = str(error.value)
    assert text.startswith(f"Something: x is a {type(x).__name__};")
    for word in ("NumPy", "CuPy", "torch", "JAX", "__dlpack__"):
        assert word in text


def test_classes_that_only_pretend() -> None:
    # Objects of torch, JAX and CuPy that are no arrays; and one half of the DLPack protocol.
    Pretender = type("Pretender", (), {"__module__": "torch.nn.modules"})
    Half = type("Half", (), {"__dlpack__": lambda self: None})
    for x in (Pretender(), Half()):
        assert interop.adapter(x) is None


def test_importing_brings_no_other_library() -> None:
    code = (
        "import sys, numpy as np, cufp8\n"
        "layer = cufp8.Linear(np.ones((3, 4), np.float32), device='cpu')\n"
        "layer(np.ones((2, 4), np.float32)), cufp8.interop.adapter([1.0]), repr(layer)\n"
        "print([m for m in ('cupy', 'torch', 'jax', 'jaxlib', 'rich', 'cuda') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- DLPack -----------------------------------------------------------------------------------------------


def test_an_unknown_library_is_read_through_dlpack() -> None:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    x = Foreign(a)
    assert interop.adapter(x).kind == "DLPack"
    taken = interop.array(x, "x")
    assert np.shares_memory(taken, a)
    np.testing.assert_array_equal(taken, a)
    strided = interop.array(Foreign(a[::2, ::3]), "x")
    np.testing.assert_array_equal(strided, a[::2, ::3])


def test_a_dlpack_array_elsewhere_is_refused() -> None:
    class OnMetal(Foreign):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 8, 0

    with pytest.raises(ValueError, match=r"device type 8.*CPU and CUDA"):
        interop.array(OnMetal(np.zeros(3)), "x")


# --- torch on the CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "uint8"])
def test_torch_tensors_share_their_memory(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    t = torch.arange(24).reshape(4, 6).to(getattr(torch, dtype))
    found = interop.adapter(t)
    assert found.kind == "torch"
    for x in (t, t[1:, ::2], t.T, t[0]):
        v, a = found.view(x), found.array(x)
        assert (v.ptr, tuple(v.shape), tuple(v.strides)) == (x.data_ptr(), tuple(x.shape), x.stride())
        assert (v.dtype, v.device) == (dtype, None)
        assert isinstance(a, np.ndarray) and a.ctypes.data == x.data_ptr()
        assert a.dtype == np.dtype(FLOATS.get(dtype, dtype))
        np.testing.assert_array_equal(a.astype(np.float64), x.double().numpy())


FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


def torch_float8(torch: Any, dtype: str) -> Any:
    if not hasattr(torch, dtype):
        pytest.skip(f"this torch has no {dtype}")
    return getattr(torch, dtype)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_torch_float8(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    codes = torch.arange(8, dtype=torch.uint8).view(torch_float8(torch, dtype))
    a = interop.array(codes, "codes")
    assert a.dtype == np.dtype(getattr(ml_dtypes, dtype)) and a.ctypes.data == codes.data_ptr()
    assert interop.adapter(codes).view(codes).dtype == dtype


def test_quantized_tensors_take_torch_float8_without_a_copy() -> None:
    import cufp8

    torch = pytest.importorskip("torch")
    for dtype, scale_dtype, block in (
        ("float8_e4m3fn", "float32", (1, -1)),
        ("float8_e5m2", "float32", (1, 128)),
        ("float8_e4m3fn", "float8_e8m0fnu", (1, 32)),
    ):
        codes = torch.arange(3 * 64, dtype=torch.uint8).reshape(3, 64) % 0x70
        scale = torch.full((3, 2 if block == (1, 32) else 1), 1.0)
        if scale_dtype != "float32":
            scale = torch.full((3, 2), 127, dtype=torch.uint8).view(torch_float8(torch, scale_dtype))
        q = cufp8.QuantizedTensor(
            codes.view(torch_float8(torch, dtype)), scale,
            dtype=dtype, scale_dtype=scale_dtype, shape=(3, 64), block=block,
        )  # fmt: skip
        assert q.codes.dtype == np.uint8 and q.codes.ctypes.data == codes.data_ptr()
        assert q.scale.ctypes.data == scale.data_ptr()
        np.testing.assert_array_equal(q.codes, codes.numpy())


def test_other_torch_dtypes() -> None:
    torch = pytest.importorskip("torch")
    t = torch.zeros(3, dtype=torch.complex64)
    assert interop.adapter(t).view(t).dtype == "torch.complex64"


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_become_torch_tensors_without_a_copy(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    like = torch.zeros(1)
    y = np.arange(6).reshape(2, 3).astype(FLOATS[dtype])
    t = interop.adapter(like).from_host(like, y)
    assert t.dtype == getattr(torch, dtype) and t.data_ptr() == y.ctypes.data
    np.testing.assert_array_equal(t.float().numpy(), y.astype(np.float32))


def test_a_parameter_is_a_tensor_and_grad_mode_counts() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    found = interop.adapter(parameter)
    assert found is interop.adapter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"no_grad\(\).*detach\(\)"):
        found.view(parameter)
    with torch.no_grad():
        assert found.view(parameter).ptr == parameter.data_ptr()
    with torch.inference_mode():
        found.view(parameter)
    found.view(parameter.detach())
    assert found.array(parameter).shape == (2, 3)  # weights are taken as they are


def test_a_tensors_form_is_all_but_its_address() -> None:
    torch = pytest.importorskip("torch")
    t = torch.zeros(4, 6)
    found = interop.adapter(t)
    assert found.seen(t) == (t.data_ptr(), found.seen(torch.ones(4, 6))[1])
    forms = [t, t.to(torch.bfloat16), t.T, t[:, :3], t[:1], t[0], t[None], t.to("meta"), t.expand(2, 4, 6)]
    assert len({found.seen(x)[1] for x in forms}) == len(forms)
    # These are judged afresh each time.
    assert found.seen(torch.nn.Parameter(t)) == found.seen(t.clone().requires_grad_() * 2) == interop.UNSEEN
    with torch.no_grad():
        assert found.seen(torch.nn.Parameter(t)) == interop.UNSEEN


@pytest.mark.parametrize("dtype", FLOATS)
def test_results_as_torch_would_make_them(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    found, kind = interop.adapter(torch.zeros(1)), getattr(torch, dtype)

    def empty_strided(shape: tuple[int, ...], strides: tuple[int, ...], kind: Any) -> Any:
        return torch.empty_strided(shape, strides, dtype=kind)

    monkeypatch.setattr(found, "empty_strided", empty_strided)
    for shape in ((5,), (1, 5), (3, 4, 5), (0, 5), (3, 0, 5), (2, 1, 1, 5)):
        y, pointer = found.maker(shape, dtype, -1)(0)  # the CPU's number
        like = torch.empty(shape, dtype=kind)
        assert (y.shape, y.stride(), y.dtype, pointer) == (like.shape, like.stride(), kind, y.data_ptr())
        assert not y.requires_grad
    with torch.inference_mode():
        assert found.maker((2, 5), dtype, -1)(0)[0].is_inference()

    # torch's current GPU is not the one that was asked for.
    asked = []

    class Torch:
        @staticmethod
        def empty(*given: Any, **options: Any) -> Any:
            asked.append((*given, options))
            return torch.zeros(2, 5, dtype=kind)

    monkeypatch.setattr(found, "torch", Torch)
    y, pointer = found.maker((2, 5), dtype, 3)(0)
    assert asked == [((2, 5), {"dtype": kind, "device": "cuda:3"})] and pointer == y.data_ptr()


def test_a_torch_without_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    asked = []
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **options: asked.append((given, options)))
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda", raising=False)
    interop._Torch().empty_strided((2, 5), (5, 1), torch.float16)
    monkeypatch.delattr(torch._C, "_dynamo")
    interop._Torch().empty_strided((2, 5), (5, 1), torch.float16)
    assert asked == [(((2, 5), (5, 1)), {"dtype": torch.float16, "device": "cuda"})] * 2


def test_a_tensor_on_another_device_is_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 3, device="meta")
    with pytest.raises(ValueError, match="meta.*cpu and cuda"):
        interop.adapter(x).view(x)


# --- JAX on the CPU -----------------------------------------------------------------------------------------


def cpu_array(jax: Any, a: np.ndarray) -> Any:
    return jax.device_put(a, jax.devices("cpu")[0])


@pytest.mark.parametrize("dtype", FLOATS)
def test_jax_arrays(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    a = np.arange(24).reshape(2, 3, 4).astype(FLOATS[dtype])
    x = cpu_array(jax, a)
    found = interop.adapter(x)
    assert found.kind == "JAX"
    v = found.view(x)
    assert (tuple(v.shape), v.strides, v.dtype, v.device) == ((2, 3, 4), (12, 4, 1), dtype, None)
    taken = found.array(x)
    assert taken.dtype == FLOATS[dtype]
    np.testing.assert_array_equal(taken, a)
    back = found.from_host(x, a)
    assert isinstance(back, jax.Array) and back.devices() == x.devices() and back.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(back), a)
    assert not found.writeable(x)
    copied = found.copy(x)
    assert copied.unsafe_buffer_pointer() != x.unsafe_buffer_pointer() and copied.devices() == x.devices()
    np.testing.assert_array_equal(np.asarray(copied), a)


def test_jax_tracers_are_refused() -> None:
    jax = pytest.importorskip("jax")
    x = cpu_array(jax, np.ones((2, 3), np.float32))
    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda v: f(v).sum())):
        with pytest.raises(TypeError, match=r"tracer.*jit, grad or vmap.*concrete"):
            transform(lambda v: interop.array(v, "x"))(x)


# --- on the GPU ---------------------------------------------------------------------------------------------


def gpu_torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return torch


def gpu_jax() -> Any:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    return jax


def gpu_maker(library: str) -> Callable[[np.ndarray], Any]:
    """What takes an array of NumPy to the GPU as one of "torch" or "JAX", of the same dtype."""
    if library == "JAX":
        return gpu_jax().device_put
    torch = gpu_torch()
    return lambda a: torch.from_numpy(a.astype(np.float64)).to("cuda", getattr(torch, a.dtype.name))


libraries = pytest.mark.parametrize("library", ["torch", "JAX"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "uint8"])
def test_cupy_arrays(dtype: str) -> None:
    import cupy

    kind = FLOATS.get(dtype, np.dtype(dtype))
    base = cupy.zeros((4, 6, 8), kind)
    for x in (base, base[:, 1:5], base[0].T, base[0, ::-1], base[..., 3], cupy.broadcast_to(base[0, 0], (3, 8))):
        found = interop.adapter(x)
        assert found.kind == "CuPy"
        v = found.view(x)
        assert (v.ptr, tuple(v.shape), v.dtype, v.device) == (x.data.ptr, x.shape, dtype, cupy.cuda.Device().id)
        assert tuple(s * kind.itemsize for s in v.strides) == x.strides
        # The hull, from the corners that the strides reach.
        corners = [
            v.ptr + sum(i * s for i, s in zip(corner, x.strides, strict=True))
            for corner in itertools.product(*((0, n - 1) for n in x.shape))
        ]
        assert interop.extent(v, kind.itemsize) == (min(corners), max(corners) + kind.itemsize)
        assert found.array(x) is x and not interop.on_host(x)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["CuPy", "torch"])
def test_calls_on_a_form_seen_before(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """The first call of a form looks at all of x, the next ones remember: the same results, the same errors."""
    import cupy

    rng = np.random.default_rng(5)
    layer = cufp8.Linear(rng.standard_normal((40, 64)).astype(np.float32), device="cuda")
    room = cupy.asarray(rng.standard_normal((8, 160)).astype(np.float16))
    if library == "torch":
        room = gpu_torch().from_dlpack(room).clone()

    def bits(y: Any) -> Any:
        return (y.cpu().numpy() if library == "torch" else y.get()).view(np.uint16)

    def afresh(x: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_plans", {})
            return bits(layer(x))

    for form in (
        lambda i: room[i : i + 1, :64],
        lambda i: room[i : i + 3, 8 * i : 8 * i + 64],
        lambda i: room[i, 16:80],
        lambda i: room[None, i : i + 2, None, :64],
        lambda i: room[i : i + 2, i : i + 64],  # not always on 16 bytes
        lambda i: room[i : i + 2, :128:2],  # copied each time
        lambda i: room[i:i, :64],
    ):
        for i in (0, 1, 2, 3, 0):
            x = form(i)
            want, y, out = afresh(x), layer(x), layer(x)
            assert type(y) is type(room) and tuple(y.shape) == (*x.shape[:-1], 40)
            np.testing.assert_array_equal(bits(y), want)
            out[...] = 7
            assert layer(x, out=out) is out
            np.testing.assert_array_equal(bits(out), want)
    x = room[1:3, :64]
    want = afresh(x)
    for first in (3, 5, 0, 1, 2, 6):  # outs of one form
        if first < 3:
            with pytest.raises(ValueError, match="out overlaps x"):
                layer(x, out=room[first : first + 2, 20:60])
        else:
            layer(x, out=room[first : first + 2, 20:60])
            np.testing.assert_array_equal(bits(room[first : first + 2, 20:60]), want)
    if library == "torch":
        with pytest.raises(RuntimeError, match="requires grad"):
            layer(x.clone().requires_grad_())
        with gpu_torch().no_grad():
            np.testing.assert_array_equal(bits(layer(gpu_torch().nn.Parameter(x))), want)


@pytest.mark.gpu
def test_the_stream_is_the_current_one_of_each_library() -> None:
    import cupy

    a = cupy.zeros(4, cupy.float32)
    assert interop.stream(a) == 0
    mine = cupy.cuda.Stream(non_blocking=True)
    with mine:
        assert interop.stream(a) == mine.ptr
        assert interop.stream(Foreign(a)) == mine.ptr  # an unknown library is read on CuPy's
    assert interop.stream(a) == 0
    torch = gpu_torch()
    t = torch.zeros(4, device="cuda")
    assert interop.stream(t) == 0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side), mine:
        assert interop.stream(t) == side.cuda_stream
        assert interop.stream(a) == mine.ptr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, "float64", "uint8"])
def test_torch_tensors_on_the_gpu_are_borrowed(dtype: str) -> None:
    torch = gpu_torch()
    import cupy

    t = torch.arange(24, device="cuda").reshape(4, 6).to(getattr(torch, dtype))
    found = interop.adapter(t)
    for x in (t, t[1:, ::2], t.T, t[0], t[:0]):
        v, a = found.view(x), found.array(x)
        assert (tuple(v.shape), v.device, v.dtype) == (tuple(x.shape), t.device.index, dtype)
        assert isinstance(a, cupy.ndarray) and a.shape == tuple(x.shape)
        if x.numel():
            assert a.data.ptr == x.data_ptr() == v.ptr
            assert a.strides == tuple(s * a.itemsize for s in x.stride())
            np.testing.assert_array_equal(a.get().astype(np.float64), x.double().cpu().numpy())
    a = found.array(t)
    pointer, values = t.data_ptr(), t.double().cpu().numpy()
    del t, x, v
    fresh = torch.full((4, 6), 99, device="cuda").to(getattr(torch, dtype))
    assert fresh.data_ptr() != pointer  # `a` keeps the tensor's memory
    np.testing.assert_array_equal(a.get().astype(np.float64), values)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT8)
def test_torch_float8_on_the_gpu_comes_as_codes(dtype: str) -> None:
    torch = gpu_torch()
    codes = torch.arange(100, dtype=torch.uint8, device="cuda").reshape(10, 10)
    a = interop.array(codes.view(torch_float8(torch, dtype))[1:, 2:], "codes")
    assert a.dtype == np.uint8
    np.testing.assert_array_equal(a.get(), codes[1:, 2:].cpu().numpy())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_jax_arrays_on_the_gpu_are_borrowed(dtype: str) -> None:
    jax = gpu_jax()
    values = np.arange(24).reshape(4, 6).astype(FLOATS[dtype])
    x = jax.device_put(values, jax.devices("gpu")[0])
    found = interop.adapter(x)
    v, a = found.view(x), found.array(x)
    assert (tuple(v.shape), v.strides, v.dtype, v.device) == ((4, 6), (6, 1), dtype, 0)
    assert a.data.ptr == v.ptr == x.unsafe_buffer_pointer()
    pointer = v.ptr
    del x
    fresh = [jax.device_put(values * 0 + i) for i in range(20)]
    assert all(other.unsafe_buffer_pointer() != pointer for other in fresh)
    np.testing.assert_array_equal(a.get(), values)


@pytest.mark.gpu
def test_an_unknown_library_on_the_gpu() -> None:
    import cupy

    import cufp8

    a = cupy.arange(24, dtype=cupy.float32).reshape(4, 6)
    taken = interop.array(Foreign(a), "x")
    assert isinstance(taken, cupy.ndarray) and taken.data.ptr == a.data.ptr
    q = cufp8.quantize(Foreign(a))
    assert bool((q.codes == cufp8.quantize(a).codes).all())
    layer = cufp8.Linear(Foreign(a))
    y = layer(Foreign(a))
    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), layer(a).get())


@pytest.mark.gpu
def test_all_libraries_see_one_another() -> None:
    torch, jax = gpu_torch(), gpu_jax()
    kinds = set()
    import cupy

    for x in (np.zeros(2), cupy.zeros(2), torch.zeros(2), torch.zeros(2, device="cuda"), jax.numpy.zeros(2)):
        kinds.add(interop.adapter(x).kind)
    assert kinds == {"NumPy", "CuPy", "torch", "JAX"}
