"""Linear against the oracle: on the CPU, and (marked gpu) every row of KERNELS on the device."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
from conftest import skip_for_other_arch
from test_interop import Foreign, cpu_array, gpu_jax, gpu_torch

import cufp8
from cufp8 import kernels, linear, runtime
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, KERNELS, ROWS, Kernel, Problem, Target

# JAX would else take three quarters of the GPU's memory when it starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

SIZES = (1, 7, 8, 15, 16, 17, 31, 33, 63, 65, 129, 1000, 4095, 4097)
HOST_ACC = 2.0**-20  # of NumPy's float32 products
MANY = max(300, *kernels.CUBLAS_MIN_M.values())  # tokens: cuBLAS serves what no row before it does


# --- what the tests feed and how they judge ---------------------------------------------------------------


def floats(rng: np.random.Generator, shape: Any, dtype: str = "float32", scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(FLOATS[dtype])


def quantized(rng: np.random.Generator, n: int, k: int, low: float = -9, high: float = -5) -> cufp8.QuantizedTensor:
    """All finite codes alike often, scales of 2^low to 2^high; on the host."""
    codes = rng.integers(0, 256, (n, k), np.uint8)
    codes[(codes & 0x7F) == 0x7F] ^= 1
    return tensor(codes, np.exp2(rng.uniform(low, high, (n, 1))).astype(np.float32))


def tensor(codes: Any, scale: Any) -> cufp8.QuantizedTensor:
    n, k = codes.shape
    return cufp8.QuantizedTensor(
        codes, scale, dtype="float8_e4m3fn", scale_dtype="float32", shape=(n, k), block=(1, k)
    )  # fmt: skip


def raw(a: Any) -> Any:
    """A NumPy or CuPy array seen as unsigned integers: CuPy has few operations on bfloat16."""
    return a.view(f"uint{8 * a.itemsize}")


def bits(a: Any) -> np.ndarray:
    """The bytes of an array of any library, on the host."""
    if type(a).__module__.partition(".")[0] == "torch":
        import torch

        a = a.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    a = raw(a).get() if hasattr(a, "get") else np.asarray(a)
    return np.ascontiguousarray(a).view(np.uint8)


def assert_same_bits(a: Any, b: Any, what: Any = "") -> None:
    a, b = bits(a), bits(b)
    assert a.size == b.size, what
    differ = int(np.count_nonzero(a.reshape(-1) != b.reshape(-1)))
    assert not differ, f"{what}: {differ} of {a.size} bytes differ"


class Cases:
    """Many small cases in one test: all of them run, and those that fail are named."""

    def __init__(self) -> None:
        self.count, self.failed = 0, []

    @contextlib.contextmanager
    def __call__(self, *what: Any) -> Iterator[None]:
        self.count += 1
        try:
            yield
        except Exception as error:
            self.failed.append(f"{' '.join(map(str, what))}: {type(error).__name__}: {error}")
            if len(self.failed) == 20:
                self.close()

    def close(self) -> None:
        assert self.count, "no case ran"
        if self.failed:
            pytest.fail(f"{len(self.failed)} of {self.count} cases failed:\n" + "\n".join(self.failed), pytrace=False)

    def __enter__(self) -> Cases:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()


# --- on the CPU -----------------------------------------------------------------------------------------------


def on_cpu(q: cufp8.QuantizedTensor, bias: Any = None, **options: Any) -> cufp8.Linear:
    return cufp8.Linear.from_quantized(q, bias, device="cpu", **options)


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_against_the_oracle(rng: np.random.Generator, x_dtype: str) -> None:
    sizes = (1, 7, 16, 33, 129)
    with Cases() as cases:
        for i, (m, n, k) in enumerate(itertools.product(sizes, (*sizes, 1000), (*sizes, 1000))):
            q, x = quantized(rng, n, k), floats(rng, (m, k), x_dtype)
            bias = floats(rng, n) if i % 2 else None
            with cases(m, n, k, "bias" if i % 2 else ""):
                y = on_cpu(q, bias)(x)
                assert isinstance(y, np.ndarray)
                reference.assert_close(y, x, q.codes, q.scale, bias, x_dtype, HOST_ACC)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", [*FLOATS, None])
def test_out_dtype(rng: np.random.Generator, x_dtype: str, out_dtype: str | None) -> None:
    q, x, bias = quantized(rng, 33, 65), floats(rng, (9, 65), x_dtype), floats(rng, 33)
    layer = on_cpu(q, bias, out_dtype=out_dtype)
    assert layer.out_dtype == out_dtype
    y = layer(x)
    reference.assert_close(y, x, q.codes, q.scale, bias, out_dtype or x_dtype, HOST_ACC)
    out = np.full((9, 33), np.nan, FLOATS[out_dtype or x_dtype])
    assert layer(x, out) is out and layer(x, out=out) is out
    assert_same_bits(out, y)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3), (2, 0, 3), (1, 1, 4), (2, 3, 1, 2)], ids=str)
def test_shapes(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    q, x = quantized(rng, 6, 10), floats(rng, (*shape, 10), "float16")
    y = on_cpu(q)(x)
    assert y.shape == (*shape, 6) and y.dtype == np.float16
    reference.assert_close(y, x, q.codes, q.scale, None, "float16", HOST_ACC)


M, K = 35, 320  # 35 = 5 * 7
# Ways to see an x: the array that lies in memory, and the view of it that is multiplied.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any], Any]]] = {
    "contiguous": ((M, K), lambda a, xp: a),
    "one element off": ((M * K + 1,), lambda a, xp: a[1:].reshape(M, K)),
    "eight elements off": ((M * K + 8,), lambda a, xp: a[8:].reshape(M, K)),
    "row pitch": ((M, K + 8), lambda a, xp: a[:, :K]),
    "odd row pitch": ((M, K + 3), lambda a, xp: a[:, :K]),
    "inner columns": ((M, K + 9), lambda a, xp: a[:, 5 : 5 + K]),
    "an odd number of columns": ((M, K), lambda a, xp: a[:, : K - 1]),
    "every other row": ((2 * M, K), lambda a, xp: a[::2]),
    "rows backwards": ((M, K), lambda a, xp: a[::-1]),
    "every third column": ((M, 3 * K), lambda a, xp: a[:, 1::3]),
    "columns backwards": ((M, K), lambda a, xp: a[:, ::-1]),
    "transposed": ((K, M), lambda a, xp: a.T),
    "one row for all": ((1, K), lambda a, xp: xp.broadcast_to(a, (M, K))),
    "one column for all": ((M, 1), lambda a, xp: xp.broadcast_to(a, (M, K))),
    "sliding windows": (
        (3 * M + K,),
        lambda a, xp: xp.lib.stride_tricks.as_strided(a, (M, K), (3 * a.itemsize, a.itemsize)),
    ),
    "three dimensions": ((5, 7, K + 8), lambda a, xp: a[..., :K]),
    "three uneven dimensions": ((5, 9, K), lambda a, xp: a[:, 1:8]),
    "dimensions in another order": ((7, 5, K), lambda a, xp: a.transpose(1, 0, 2)),
    "one row": ((3, K), lambda a, xp: a[1:2]),
    "a vector": ((K,), lambda a, xp: a),
    "a vector off by one": ((K + 1,), lambda a, xp: a[1:]),
    "a vector with steps": ((2 * K,), lambda a, xp: a[::2]),
    "a batch of one": ((1, 1, K), lambda a, xp: a),
}


def laid_out(rng: np.random.Generator, layout: str, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The array in memory and its view; what the view does not show is NaN."""
    shape, view = LAYOUTS[layout]
    base = floats(rng, shape, dtype)
    shown = np.zeros(base.size, bool)
    shown[view(np.arange(base.size).reshape(shape), np)] = True
    base.reshape(-1)[~shown] = np.nan
    return base, view(base, np)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_strides(rng: np.random.Generator, x_dtype: str, layout: str) -> None:
    base, x = laid_out(rng, layout, x_dtype)
    before = base.copy()
    q, bias = quantized(rng, 21, x.shape[-1]), floats(rng, 21)
    x.flags.writeable = False
    y = on_cpu(q, bias)(x)
    reference.assert_close(y, x, q.codes, q.scale, bias, x_dtype, HOST_ACC)
    assert_same_bits(base, before)


def spoil(rng: np.random.Generator, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x with NaN and Inf in some rows, and which rows those are."""
    m, k = x.shape
    bad = np.zeros(m, bool)
    bad[rng.choice(m, max(1, m // 3), replace=False)] = True
    spoiled = x.copy()
    for i, row in enumerate(np.flatnonzero(bad)):
        for value in ([math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [math.nan, math.inf])[i % 5]:
            spoiled[row, rng.integers(k)] = value
    spoiled[np.flatnonzero(bad)[-1], k - 1] = math.nan  # the last column, beside the padding
    return spoiled, bad


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_nan_and_inf_stay_in_their_row(rng: np.random.Generator, x_dtype: str) -> None:
    q = quantized(rng, 40, 77)
    q.codes[:, ::5] = 0  # Inf * 0 is NaN
    clean = floats(rng, (30, 77), x_dtype)
    x, bad = spoil(rng, clean)
    layer = on_cpu(q, floats(rng, 40))
    y = layer(x)
    reference.assert_close(y, x, q.codes, q.scale, layer.bias, x_dtype, HOST_ACC)
    assert_same_bits(y[~bad], layer(clean)[~bad])
    assert not np.isfinite(y[bad].astype(np.float32)).all(axis=1).any()


def extremes(rng: np.random.Generator, x_dtype: str) -> Iterator[tuple[str, np.ndarray, cufp8.QuantizedTensor, str]]:
    """Scales and inputs at the ends of their ranges: a name, x [m, k], the weight [n, k], the result's dtype."""
    m, n, k = 17, 65, 192
    one = floats(rng, (m, k), x_dtype)
    yield "subnormal scales", one, quantized(rng, n, k, -149, -126), "float32"
    yield "subnormal scales", one, quantized(rng, n, k, -145, -126), "bfloat16"
    yield "subnormal results", one, quantized(rng, n, k, -40, -28), "float16"
    yield "results that vanish", one, quantized(rng, n, k, -149, -140), "float16"
    yield "results that overflow", one, quantized(rng, n, k, 2, 8), "float16"
    yield "results that overflow", one, quantized(rng, n, k, 114, 120), "bfloat16"
    yield "results that overflow", one, quantized(rng, n, k, 114, 120), "float32"
    if x_dtype != "float16":
        large, small = (np.float32(2.0**e) for e in (80, -80))
        yield "large x", (one.astype(np.float32) * large).astype(one.dtype), quantized(rng, n, k, -149, -126), "float32"
        yield "small x", (one.astype(np.float32) * small).astype(one.dtype), quantized(rng, n, k, 80, 100), x_dtype


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_ends_of_the_ranges(rng: np.random.Generator, x_dtype: str) -> None:
    with Cases() as cases:
        for name, x, q, out_dtype in extremes(rng, x_dtype):
            with cases(name, out_dtype):
                y = on_cpu(q, out_dtype=out_dtype)(x)
                reference.assert_close(y, x, q.codes, q.scale, None, out_dtype, HOST_ACC)
                if "overflow" in name:
                    seen = y.astype(np.float32)
                    assert np.isposinf(seen).any() and np.isneginf(seen).any() and np.isfinite(seen).any()


def test_one_rounding(rng: np.random.Generator) -> None:
    """The bias meets the exact product: fmaf, not a product that is rounded first."""
    x = np.ones((1, 1), np.float32)
    scale = np.float32(1 + 2.0**-23)
    q = tensor(np.full((1, 1), 0x39, np.uint8), np.full((1, 1), scale, np.float32))  # 1.125
    bias = np.array([-1.125], np.float32)
    y = on_cpu(q, bias)(x)
    assert float(y[0, 0]) == 1.125 * 2.0**-23  # scale * 1.125 rounded to float32 first would give 2^-23


def test_several_slices_of_rows_and_columns(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_HOST_SLICE", 700)
    q, x = quantized(rng, 50, 129), floats(rng, (3, 129))
    y = on_cpu(q)(x)
    reference.assert_close(y, x, q.codes, q.scale, None, "float32", HOST_ACC)
    long = quantized(rng, 2, (1 << 20) + 5)
    x = floats(rng, (1, (1 << 20) + 5))
    y = on_cpu(long)(x)
    reference.assert_close(y, x, long.codes, long.scale, None, "float32", HOST_ACC)


def test_no_float_copy_of_the_weight_is_kept(rng: np.random.Generator) -> None:
    n, k = 4096, 8192  # 32 MiB of codes, 128 MiB as float32
    tile = quantized(rng, 64, k)
    q = tensor(np.tile(tile.codes, (n // 64, 1)), np.tile(tile.scale, (n // 64, 1)))
    x = floats(rng, (2, k), "bfloat16")
    tracemalloc.start()
    try:
        layer = on_cpu(q)
        assert layer.weight.codes is q.codes
        layer(x)
        gc.collect()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        layer(x)
        now, peak = tracemalloc.get_traced_memory()
        assert now < 4 << 20, f"{now / 2**20:.1f} MiB are kept"
        assert peak - before < 64 << 20, f"{(peak - before) / 2**20:.1f} MiB for one call"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_torch_on_the_cpu(rng: np.random.Generator, x_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    q, bias = quantized(rng, 12, 20), floats(rng, 12)
    layer = on_cpu(q, torch.from_numpy(bias))
    x = torch.from_numpy(floats(rng, (2, 3, 40)).astype(np.float32)).to(getattr(torch, x_dtype))[..., ::2]
    y = layer(x)
    assert type(y) is torch.Tensor and y.dtype == x.dtype and y.device.type == "cpu" and y.shape == (2, 3, 12)
    seen = reference.to_float64(x).astype(FLOATS[x_dtype])
    reference.assert_close(y, seen, q.codes, q.scale, bias, x_dtype, HOST_ACC)
    out = torch.full((2, 3, 12), math.nan, dtype=x.dtype)
    assert layer(x, out=out) is out
    assert_same_bits(out, y)
    wide = torch.full((2, 3, 15), math.nan, dtype=x.dtype)
    layer(x, out=wide[..., 2:14])
    assert_same_bits(wide[..., 2:14], y)
    assert bool(torch.isnan(wide[..., :2].float()).all()) and bool(torch.isnan(wide[..., 14:].float()).all())
    with torch.no_grad():
        assert_same_bits(layer(torch.nn.Parameter(x)), y)
    for empty in (x[:0], x[:, :0]):
        assert layer(empty).shape == (*empty.shape[:-1], 12)


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_jax_on_the_cpu(rng: np.random.Generator, x_dtype: str) -> None:
    jax = pytest.importorskip("jax")
    q, bias, a = quantized(rng, 12, 20), floats(rng, 12), floats(rng, (2, 3, 20), x_dtype)
    x = cpu_array(jax, a)
    layer = on_cpu(q, cpu_array(jax, bias))
    y = layer(x)
    assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
    reference.assert_close(np.asarray(y), a, q.codes, q.scale, bias, x_dtype, HOST_ACC)
    assert layer(x[:0]).shape == (0, 3, 12)
    with pytest.raises(TypeError, match="out is a JAX array"):
        layer(x, out=y)
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(layer)(x)


def test_a_library_that_nobody_knows(rng: np.random.Generator) -> None:
    q, x = quantized(rng, 5, 9), floats(rng, (4, 9))
    layer = on_cpu(q)
    y = layer(Foreign(x))
    assert isinstance(y, np.ndarray)
    assert_same_bits(y, layer(x))
    out = np.empty((4, 5), np.float32)
    try:
        layer(Foreign(x), out=Foreign(out))
    except TypeError as error:
        assert "out" in str(error)
    else:
        assert_same_bits(out, y)


# --- making a layer ---------------------------------------------------------------------------------------


def test_a_layer_from_floats(rng: np.random.Generator) -> None:
    w, bias = floats(rng, (30, 50), scale=0.1), floats(rng, 30).astype(np.float64)
    layer = cufp8.Linear(w, bias, device="cpu")
    want = cufp8.quantize(w)
    assert_same_bits(layer.weight.codes, want.codes)
    assert_same_bits(layer.weight.scale, want.scale)
    assert layer.bias.dtype == np.float32 and layer.shape == (30, 50)
    x = floats(rng, (7, 50))
    reference.assert_close(layer(x), x, want.codes, want.scale, layer.bias, "float32", HOST_ACC)
    for other in (np.asfortranarray(w), w.astype(np.float64), w.astype(FLOATS["bfloat16"])):
        assert cufp8.Linear(other, device="cpu").shape == (30, 50)


def test_what_a_layer_tells(rng: np.random.Generator) -> None:
    q = quantized(rng, 1000, 2000)
    layer = on_cpu(q)
    assert (layer.device, layer.shape, layer.out_dtype, layer.pdl) == ("cpu", (1000, 2000), None, True)
    assert layer.weight is q and layer.bias is None
    assert layer.nbytes == q.nbytes == 1000 * 2000 + 4 * 1000
    with_bias = on_cpu(q, floats(rng, 1000), pdl=False, out_dtype="float16")
    assert with_bias.nbytes == q.nbytes + 4 * 1000 and not with_bias.pdl
    assert layer.to("cpu") is layer
    for m, dtype in ((1, "bfloat16"), (16, "float16"), (256, "float32")):
        assert layer.kernels(m, dtype) == "numpy"
    text = repr(layer)
    for part in ("[1000, 2000]", "FP8A16", "cpu", "2,004,000 bytes", "M=1 ", "M=16 ", "M=256 ", "numpy"):
        assert part in text, text


def test_without_a_gpu_a_layer_goes_to_the_cpu(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "why_not", lambda: "it is a test.")
    w = floats(rng, (3, 4))
    assert cufp8.Linear(w).device == "cpu"
    assert cufp8.Linear.from_quantized(cufp8.quantize(w)).device == "cpu"
    for device in ("cuda", "cuda:0"):
        with pytest.raises(runtime.DeviceError, match=r"cannot use a GPU: it is a test\."):
            cufp8.Linear(w, device=device)
        with pytest.raises(runtime.DeviceError, match="it is a test"):
            cufp8.Linear(w, device="cpu").to(device)


# --- errors ----------------------------------------------------------------------------------------------


def test_a_wrong_number_of_features() -> None:
    layer = on_cpu(tensor(np.zeros((8192, 4096), np.uint8), np.ones((8192, 1), np.float32)))
    with pytest.raises(ValueError) as error:
        layer(np.zeros((7, 4095), np.float32))
    assert str(error.value) == "Linear: x has 4095 features (shape [7, 4095]); the weight [8192, 4096] needs 4096."
    with pytest.raises(ValueError, match=r"x has no dimension; the weight \[8192, 4096\] needs 4096"):
        layer(np.zeros((), np.float32))
    with pytest.raises(ValueError, match=r"x has 0 features \(shape \[3, 0\]\)"):
        layer(np.zeros((3, 0), np.float32))


@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32", "uint8", "bool", "float8_e4m3fn"])
def test_a_wrong_dtype(rng: np.random.Generator, dtype: str) -> None:
    import ml_dtypes

    layer = on_cpu(quantized(rng, 3, 4))
    with pytest.raises(TypeError) as error:
        layer(np.zeros((2, 4), getattr(ml_dtypes, dtype, dtype)))
    assert str(error.value) == f"Linear: x is {dtype}; allowed are bfloat16, float16, float32. Convert x first."
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=rf"x is {dtype}; allowed are"):
        layer(torch.zeros(2, 4).to(getattr(torch, dtype)))


@pytest.mark.parametrize("x", [None, 1.0, [1.0, 2.0], "x"], ids=repr)
def test_no_array(rng: np.random.Generator, x: Any) -> None:
    with pytest.raises(TypeError, match=rf"x is a {type(x).__name__}; allowed is a NumPy, CuPy, torch or JAX array"):
        on_cpu(quantized(rng, 3, 4))(x)


def test_the_other_byte_order(rng: np.random.Generator) -> None:
    layer, x = on_cpu(quantized(rng, 3, 4)), floats(rng, (2, 4))
    assert_same_bits(layer(x.astype(">f4")), layer(x))
    out = np.zeros((2, 3), ">f4")
    try:
        layer(x, out=out)
    except (TypeError, ValueError) as error:
        assert "out" in str(error)
    else:
        np.testing.assert_array_equal(out, layer(x))


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_a_torch_tensor_that_requires_grad(rng: np.random.Generator, x_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = on_cpu(quantized(rng, 3, 4))
    x = torch.ones(2, 4, dtype=getattr(torch, x_dtype), requires_grad=True)
    for refused in (x, x * 2, torch.nn.Parameter(x)):
        with pytest.raises(RuntimeError, match=r"requires grad.*no_grad\(\).*detach\(\)"):
            layer(refused)
    with torch.no_grad():
        layer(x)
    layer(x.detach())


def outs(rng: np.random.Generator) -> Iterator[tuple[Any, type[Exception], str]]:
    """Results' places that do not fit x [2, 4] and the weight [3, 4]."""
    read_only = np.zeros((2, 3), np.float32)
    read_only.flags.writeable = False
    yield read_only, TypeError, r"out is a NumPy array, x a NumPy one; out must be x's kind and writeable"
    yield [0.0], TypeError, r"out is a list array"
    yield np.zeros((2, 3), np.float16), ValueError, r"out is float16 \[2, 3\]; needed is float32 \[2, 3\]"
    yield np.zeros((2, 3), np.float64), ValueError, r"out is float64"
    yield np.zeros((3, 2), np.float32), ValueError, r"out is float32 \[3, 2\]; needed is float32 \[2, 3\]"
    yield np.zeros(6, np.float32), ValueError, r"out is float32 \[6\]"


def test_places_that_do_not_fit(rng: np.random.Generator) -> None:
    layer, x = on_cpu(quantized(rng, 3, 4)), floats(rng, (2, 4))
    for out, kind, text in outs(rng):
        with pytest.raises(kind, match=text):
            layer(x, out=out)
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="out is a torch array, x a NumPy one"):
        layer(x, out=torch.zeros(2, 3))


def test_a_place_that_overlaps_x(rng: np.random.Generator) -> None:
    layer = on_cpu(quantized(rng, 4, 4))
    memory = floats(rng, 40)
    before = memory.copy()
    x = memory[:8].reshape(2, 4)
    for out in (x, memory[4:12].reshape(2, 4), memory[:16].reshape(2, 8)[:, ::2]):
        with pytest.raises(ValueError, match="out overlaps x in memory"):
            layer(x, out=out)
    assert_same_bits(memory, before)
    layer(x, out=memory[8:16].reshape(2, 4))
    layer(memory[:16].reshape(2, 8)[:, :4], out=memory[:16].reshape(2, 8)[:, 4:])  # they interleave, but share nothing
    assert_same_bits(memory[8:16].reshape(2, 4)[1:, :0], before[:0])


def test_places_of_any_strides_on_the_host(rng: np.random.Generator) -> None:
    layer, x = on_cpu(quantized(rng, 3, 4)), floats(rng, (2, 4))
    y = layer(x)
    for view in (
        lambda a: a[:2, :3],
        lambda a: a[:3, :2].T,
        lambda a: a[5:3:-1, ::2][:, :3],
    ):
        memory = np.full((6, 6), np.nan, np.float32)
        out = view(memory)
        assert layer(x, out=out) is out
        assert_same_bits(out, y)
        assert np.count_nonzero(~np.isnan(memory)) == 6


@pytest.mark.parametrize(
    ("bias", "kind", "text"),
    [
        (np.zeros(4, np.float32), ValueError, r"bias is float32 of shape \[4\]; the weight \[3, 4\] needs .*\[3\]"),
        (np.zeros((3, 1), np.float32), ValueError, r"shape \[3, 1\]"),
        (np.zeros(3, np.int32), ValueError, r"bias is int32"),
        (np.array([0, math.nan, 0], np.float32), ValueError, r"bias\[1\] is not finite as float32"),
        (np.array([0, 0, 1e39]), ValueError, r"bias\[2\] is not finite as float32"),
        ([0.0, 0.0, 0.0], TypeError, r"Linear: bias is a list"),
    ],
    ids=["too long", "two dimensions", "integers", "NaN", "too large", "a list"],
)
def test_a_bias_that_does_not_fit(rng: np.random.Generator, bias: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        cufp8.Linear(floats(rng, (3, 4)), bias, device="cpu")
    with pytest.raises(kind, match=text):
        on_cpu(quantized(rng, 3, 4), bias)


def test_a_layer_that_cannot_be_made(rng: np.random.Generator) -> None:
    w = floats(rng, (3, 4))
    for options, text in (
        ({"out_dtype": "float64"}, r"Linear: out_dtype is 'float64'; allowed are bfloat16, float16, float32 and None"),
        ({"out_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"scheme": "FP4"}, r"scheme 'FP4' is not known; known are FP8A16, FP8_DYNAMIC, FP8"),
        ({"device": "tpu"}, r"device is 'tpu'; allowed are 'cpu', 'cuda' and 'cuda:<index>'"),
        ({"device": "cuda:x"}, r"device is 'cuda:x'"),
        ({"device": "cuda:-1"}, r"device is 'cuda:-1'"),
    ):
        with pytest.raises(ValueError, match=text):
            cufp8.Linear(w, **({"device": "cpu"} | options))
    with pytest.raises(TypeError, match=r"Linear: weights is a list; allowed is a NumPy"):
        cufp8.Linear([[1.0]], device="cpu")
    with pytest.raises(TypeError, match="w is int64"):
        cufp8.Linear(np.ones((3, 4), np.int64), device="cpu")
    with pytest.raises(ValueError, match=r"w has shape \[4\]"):
        cufp8.Linear(w[0], device="cpu")
    w[2, 1] = math.inf
    with pytest.raises(ValueError, match=r"1 of 12 weights are not finite.*\[2, 1\]"):
        cufp8.Linear(w, device="cpu")


# --- which row does what: a choice the GPU tests make --------------------------------------------------------

# What a row can compute, beyond what KERNELS gives it to do.
ABLE: dict[str, Callable[[Problem], bool]] = {
    "gemv": lambda p: True,
    "mma_sync": lambda p: p.x_dtype != "float32",
    "cublas": lambda p: not p.captured,
}
LINEAR = tuple(row for row in KERNELS if row.linear and row.weight == "fp8")  # others: test_block_linear.py
ASYNC = tuple(kernels._ASYNC_SHAPES[8])  # tokens, units of a block of async_mma.cu; the most tokens last


def can(row: Kernel, target: Target, p: Problem) -> bool:
    arch = kernels.arch_of(target.arch)
    if p.x_dtype == "bfloat16" and not arch.bf16_mma and row.name == "mma_sync":
        return False
    if row.source == "wgmma.cu":  # any number of tokens
        fits = arch.wgmma and ROWS["bulk_mma"].serves(target, p)
        return fits and row.plan(target, p).entry in row.entries(arch)
    if row.name == "async_mma":  # any number of channels
        return bool(row.entries(arch)) and p.x_dtype != "float32" and p.aligned16 and p.m <= ASYNC[-1][0]
    return bool(row.serves(target, p) or ABLE.get(row.name, lambda p: False)(p))


def problem(m: int, n: int, k: int, x_dtype: str, **changes: Any) -> Problem:
    """As Linear states it for an x that starts on 16 bytes."""
    aligned16 = k * FLOATS[x_dtype].itemsize % 16 == 0
    return Problem("FP8A16", (1, k), x_dtype, x_dtype, m, n, k, **({"aligned16": aligned16} | changes))


def smallest(row: Kernel, target: Target, x_dtype: str) -> dict[tuple[str, bool], tuple[Target, Problem]]:
    """For each kernel of the row, with and without a cluster, a small problem that it serves.

    The number of multiprocessors is made up: it decides how a weight is shared among blocks.
    """
    found: dict[tuple[str, bool], tuple[Target, Problem]] = {}
    targets = [dataclasses.replace(target, sms=sms) for sms in (1, 8, 132, 10_000)]
    sizes = itertools.product((1, 2, 3, 5, 9, 17, 25, 33, 65, 129), (1, 17, 33, 65, 130), (16, 17, 64, 512, 528, 1088))
    for m, n, k in sorted(sizes, key=math.prod):
        for some in targets:
            p = problem(m, n, k, x_dtype)
            if can(row, some, p):
                launch = row.plan(some, p) if row.plan else None
                found.setdefault((launch.entry, launch.split > 1) if launch else (row.name, False), (some, p))
    return found


@pytest.mark.parametrize("row", LINEAR, ids=lambda row: row.name)
def test_small_problems_reach_every_kernel(row: Kernel) -> None:
    target = Target("sm_90a", 132, 227 << 10, True)
    entries = {entry for x_dtype in FLOATS for entry, _ in smallest(row, target, x_dtype)}
    assert entries == ({row.name} if row.plan is None else set(row.entries(ARCHS["sm_90a"])))


# --- on the GPU --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def choosing(layer: cufp8.Linear, pick: Callable[[Target, Problem], Kernel]) -> Iterator[None]:
    """Inside, `pick` chooses the row that serves the layer's calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "pick", pick)
        patch.setattr(layer, "_plans", {})
        yield


def forced(layer: cufp8.Linear, name: str) -> contextlib.AbstractContextManager[None]:
    """Inside, the row of that name serves the layer's calls, whatever KERNELS would choose."""

    def pick(target: Target, p: Problem) -> Kernel:
        if p.captured and not can(ROWS[name], target, p):
            return kernels.pick(target, p)  # asked beforehand, in case that a capture comes
        assert can(ROWS[name], target, p), f"{name} cannot do {p}"
        return ROWS[name]

    return choosing(layer, pick)


def rows_of(layer: cufp8.Linear, x: Any) -> list[str]:
    """The rows that can do what layer(x) asks for, which the layer is called once to tell."""
    asked: list[tuple[Target, Problem]] = []

    def pick(target: Target, p: Problem) -> Kernel:
        asked.append((target, p))
        return kernels.pick(target, p)

    with choosing(layer, pick):
        layer(x)
    return [row.name for row in LINEAR if can(row, *asked[0])]


@contextlib.contextmanager
def on_a_gpu_with(**changes: Any) -> Iterator[Target]:
    """Inside, layers are made for a GPU that differs from this one as told."""
    target = dataclasses.replace(runtime.target(0), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "target", lambda device=None: target)
        yield target


def acc_of(name: str, x_dtype: str) -> float:
    """The error that a row's sums may have."""
    tensor_cores = x_dtype != "float32" and name != "gemv"
    return kernels.arch_of(runtime.target(0).arch).acc["tensor" if tensor_cores else "cuda"]


def on_gpu(q: cufp8.QuantizedTensor, bias: Any = None, **options: Any) -> cufp8.Linear:
    return cufp8.Linear.from_quantized(q, bias, device="cuda", **options)


def synchronize() -> None:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()


def nans(shape: tuple[int, int], dtype: str) -> Any:
    """A CuPy array of NaN."""
    import cupy

    m, n = shape
    return cupy.full((m, n * FLOATS[dtype].itemsize), 0xFF, cupy.uint8).view(FLOATS[dtype])


def to_float64(y: Any) -> Any:
    """A CuPy array in float64; bfloat16 by its bits."""
    import cupy

    if y.dtype == FLOATS["bfloat16"]:
        y = (y.view(cupy.uint16).astype(cupy.uint32) << 16).view(cupy.float32)
    return y.astype(cupy.float64)


def assert_all_close(
    ys: dict[str, Any], x: np.ndarray, q: cufp8.QuantizedTensor, bias: Any, out_dtype: str, x_dtype: str
) -> None:
    """`reference.assert_close` for what several rows made of the same problem, the exact result found once.

    The oracle's bound is taken element by element; for many elements on the GPU, in float64.
    """
    m, k = math.prod(x.shape[:-1]), x.shape[-1]
    if m * q.shape[0] < 20_000 and m * q.shape[0] * k < 4_000_000:
        exact = reference.product(x, q.codes, q.scale, bias)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "product", lambda *_: exact)
            for name, y in ys.items():
                with named(name):
                    reference.assert_close(y, x, q.codes, q.scale, bias, out_dtype, acc_of(name, x_dtype))
        return
    exact = exact_on_gpu(x.reshape(m, k), q, bias)
    for name, y in ys.items():
        with named(name):
            assert y.shape == (*x.shape[:-1], q.shape[0])
            assert_close_on_gpu(y.reshape(exact[0].shape), exact, out_dtype, acc_of(name, x_dtype))


def exact_on_gpu(x: np.ndarray, q: cufp8.QuantizedTensor, bias: Any) -> tuple[Any, Any]:
    """`reference.product` of finite x [m, k], taken by the GPU in float64."""
    import cupy

    wide = cupy.asarray(x.astype(np.float64))
    values = cupy.asarray(reference.VALUES)[cupy.asarray(q.codes)]
    scale = cupy.asarray(q.scale.reshape(1, -1).astype(np.float64))
    offset = cupy.asarray(np.zeros(1) if bias is None else bias.astype(np.float64))
    return (wide @ values.T) * scale + offset, (cupy.abs(wide) @ cupy.abs(values).T) * scale + cupy.abs(offset)


def assert_close_on_gpu(y: Any, exact: tuple[Any, Any], out_dtype: str, acc: float) -> None:
    """`reference.assert_close` of a CuPy y [m, n] against an exact result that no dtype overflows."""
    import cupy

    out, (ref, magnitude) = reference.OUTPUTS[out_dtype], exact
    assert y.dtype == FLOATS[out_dtype] and y.shape == ref.shape
    assert float(cupy.abs(ref).max()) < out.max  # overflow is the host's to judge
    error = cupy.abs(to_float64(y) - ref)
    bad = ~(error <= out.u * cupy.abs(ref) + out.eta + acc * magnitude)
    count = int(cupy.count_nonzero(bad))
    if count:
        i, j = divmod(int(cupy.argmax(bad)), ref.shape[1])
        raise AssertionError(
            f"{count} of {bad.size} elements are out of bounds, the first y[{i}, {j}] = "
            f"{float(to_float64(y)[i, j])!r}, reference {float(ref[i, j])!r}"
        )


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None


def by_every_row(layer: cufp8.Linear, x: Any, poison: Callable[..., Any]) -> dict[str, Any]:
    """What each row makes of x, twice into poisoned memory: the same bits both times."""
    out_dtype = layer.out_dtype or x.dtype.name
    ys = {}
    for name in rows_of(layer, x):
        first, second = (poison((*x.shape[:-1], layer.shape[0]), out_dtype, "cupy") for _ in range(2))
        with forced(layer, name):
            assert layer(x, out=first) is first
            layer(x, out=second)
        differ = first.view("uint8") != second.view("uint8")
        assert not bool(differ.any()), f"{name}: two calls differ in {int(differ.sum())} bytes"
        ys[name] = first
    return ys


def check_rows(
    rng: np.random.Generator,
    poison: Callable[..., Any],
    m: int,
    n: int,
    k: int,
    x_dtype: str,
    *,
    bias: bool,
    x: np.ndarray | None = None,
    **options: Any,
) -> None:
    import cupy

    q = quantized(rng, n, k)
    x = floats(rng, (m, k), x_dtype) if x is None else x
    offset = floats(rng, n) if bias else None
    layer = on_gpu(q, offset, **options)
    ys = by_every_row(layer, cupy.asarray(x), poison)
    assert layer.kernels(m, x_dtype) in ys
    assert_all_close(ys, x, q, offset, layer.out_dtype or x_dtype, x_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_ragged_sizes(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str, half: int) -> None:
    """A Latin square: each pair of two sizes in each two of the places m, n, k, by every row."""
    count, shift = len(SIZES), 5 * list(FLOATS).index(x_dtype)
    with Cases() as cases:
        for i, j in itertools.product(range(half * count // 2, (half + 1) * count // 2), range(count)):
            m, n, k = SIZES[i], SIZES[j], SIZES[(i + j + shift) % count]
            with cases("m", m, "n", n, "k", k):
                check_rows(rng, poison, m, n, k, x_dtype, bias=bool((i + j) % 2))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_large_aligned_sizes(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    shapes = [(1, 4096, 14336), (2, 8448, 4096), (4, 4096, 4096), (16, 14336, 4096), (33, 8448, 1024), (64, 4096, 4096)]
    with Cases() as cases:
        for m, n, k in [*shapes, (128, 8448, 512), (130, 4096, 4096), (300, 1024, 8192), (1000, 1032, 1088)]:
            with cases("m", m, "n", n, "k", k):
                check_rows(rng, poison, m, n, k, x_dtype, bias=m % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_every_number_of_tokens(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    with Cases() as cases:
        for m in (*range(1, 36), 63, 64, 65, 127, 128, 129, 130, 255, 256, 257):
            for k in (136, 192):
                with cases("m", m, "k", k):
                    check_rows(rng, poison, m, 72, k, x_dtype, bias=True)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_every_length_of_k(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    with Cases() as cases:
        for k in (*range(1, 140), 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 8191, 8192, 8193):
            for m in (1, 9) if k % 8 else (1, 9, 17):
                with cases("m", m, "k", k):
                    check_rows(rng, poison, m, 19, k, x_dtype, bias=False)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_out_dtypes_on_the_gpu(
    rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str, out_dtype: str
) -> None:
    with Cases() as cases:
        for m, k in itertools.product((1, 16, MANY), (129, 192)):
            with cases("m", m, "k", k):
                check_rows(rng, poison, m, 65, k, x_dtype, bias=True, out_dtype=out_dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("row", LINEAR, ids=lambda row: row.name)
def test_every_kernel_once(rng: np.random.Generator, poison: Callable[..., Any], row: Kernel, x_dtype: str) -> None:
    import cupy

    some = smallest(row, runtime.target(0), x_dtype)
    if not some:
        assert row.name not in ("gemv", "cublas")  # which multiply everything
        return
    with Cases() as cases:
        for (entry, cluster), (target, p) in some.items():
            with cases(entry, "cluster" if cluster else "", p), on_a_gpu_with(sms=target.sms):
                q, x, bias = quantized(rng, p.n, p.k), floats(rng, (p.m, p.k), x_dtype), floats(rng, p.n)
                layer = on_gpu(q, bias)
                out = poison((p.m, p.n), x_dtype, "cupy")
                with forced(layer, row.name):
                    layer(cupy.asarray(x), out=out)
                reference.assert_close(out, x, q.codes, q.scale, bias, x_dtype, acc_of(row.name, x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_every_way_to_share_a_weight(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """Panels of every width and clusters of every size, as GPUs with other numbers of multiprocessors get them."""
    import cupy

    with Cases() as cases:
        for sms, n in itertools.product((1, 2, 3, 5, 8, 13, 30, 132, 1000), (1, 16, 17, 100, 129, 400)):
            with cases("sms", sms, "n", n), on_a_gpu_with(sms=sms):
                q, bias = quantized(rng, n, 1088), floats(rng, n)
                layer = on_gpu(q, bias)
                assert_same_bits(layer.weight.to("cpu").codes, q.codes, "codes that came back")
                for m in (1, 12, 40, 70):
                    x = floats(rng, (m, 1088), x_dtype)
                    ys = by_every_row(layer, cupy.asarray(x), poison)
                    assert_all_close(ys, x, q, bias, x_dtype, x_dtype)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_a_weight_checked_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    q, x = quantized(rng, 5, 19), floats(rng, (2, 19), "float16")
    there = tensor(cupy.asarray(q.codes), cupy.asarray(q.scale))
    layer = cufp8.Linear.from_quantized(there)
    reference.assert_close(layer(cupy.asarray(x)), x, q.codes, q.scale, None, "float16", acc_of("mma_sync", "float16"))
    assert_same_bits(layer.weight.codes, q.codes)
    for dtype in (*FLOATS, "float64"):
        assert_same_bits(there.dequantize(dtype), q.dequantize(dtype), dtype)
    there.codes[4, 18] = 0xFF
    with pytest.raises(ValueError, match=r"1 of the float8_e4m3fn codes are NaN, the first at \[4, 18\]"):
        tensor(there.codes, there.scale)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_strides_on_the_gpu(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    import cupy

    with Cases() as cases:
        for layout, (_, view) in LAYOUTS.items():
            base, x = laid_out(rng, layout, x_dtype)
            q, bias = quantized(rng, 65, x.shape[-1]), floats(rng, 65)
            layer = on_gpu(q, bias)
            there = cupy.asarray(base)
            with cases(layout):
                ys = by_every_row(layer, view(there, cupy), poison)
                assert_all_close(ys, x, q, bias, x_dtype, x_dtype)
                assert_same_bits(there, base, "x was written")
                y = layer(view(there, cupy))
                assert y.shape == (*x.shape[:-1], 65)
                assert any(bool((y.view("uint8") == other.view("uint8")).all()) for other in ys.values())


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_places_with_a_pitch(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """The result goes into part of a wider array, whose other columns stay as they were."""
    import cupy

    sides = ((0, 0), (0, 3), (1, 0), (1, 1), (8, 8))
    with Cases() as cases:
        for m, (n, k), (left, right) in itertools.product((1, 5, 40, MANY), ((33, 65), (33, 72), (48, 72)), sides):
            q, x = quantized(rng, n, k), floats(rng, (m, k), x_dtype)
            layer, there = on_gpu(q), cupy.asarray(x)
            for name in rows_of(layer, there):
                with cases(name, m, n, k, left, right), forced(layer, name):
                    y = into_a_wider(layer, there, poison, left, right)
                    assert_all_close({name: y}, x, q, None, x_dtype, x_dtype)


def into_a_wider(layer: cufp8.Linear, x: Any, poison: Callable[..., Any], left: int, right: int) -> Any:
    """layer(x) by way of some columns of a wider array, whose other columns must stay as they were."""
    import cupy

    (m, _), n, dtype = x.shape, layer.shape[0], layer.out_dtype or x.dtype.name
    wide = poison((m, left + n + right), dtype, "cupy")
    out = wide[:, left : left + n]
    assert layer(x, out=out) is out
    for beside in filter(len, (wide[:, :left].T, wide[:, left + n :].T)):
        written = cupy.ascontiguousarray(raw(beside)).view(cupy.uint8) != 0xFF
        assert not bool(written.any()), "columns beside the result were written"
    return cupy.ascontiguousarray(raw(out)).view(out.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_scaled_inputs(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    import cupy

    with Cases() as cases:
        for m, k in ((1, 1000), (1, 1024), (17, 1000), (17, 1024), (MANY, 320)):
            q, x = quantized(rng, 129, k), floats(rng, (m, k), x_dtype)
            layer = on_gpu(q)
            plain = by_every_row(layer, cupy.asarray(x), poison)
            for factor in (3, 0.01, -1, 4):
                scaled = (x.astype(np.float32) * np.float32(factor)).astype(x.dtype)
                with cases(m, k, "times", factor):
                    ys = by_every_row(layer, cupy.asarray(scaled), poison)
                    assert_all_close(ys, scaled, q, None, x_dtype, x_dtype)
                    # Exact where every rounding moves along; results that are subnormal in float16 do not.
                    for name in plain if factor == 4 else [n for n in plain if n == "gemv" and factor == -1]:
                        want = reference.to_float64(plain[name]) * factor
                        normal = np.abs(want) >= 2.0**-11
                        np.testing.assert_array_equal(reference.to_float64(ys[name])[normal], want[normal], name)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_nan_and_inf_stay_in_their_row_on_the_gpu(
    rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str
) -> None:
    import cupy

    with Cases() as cases:
        for m, k in ((4, 77), (9, 128), (40, 520), (64, 640), (MANY, 77), (MANY, 128)):
            q = quantized(rng, 40, k)
            q.codes[:, ::5] = 0
            clean = floats(rng, (m, k), x_dtype)
            x, bad = spoil(rng, clean)
            layer = on_gpu(q)
            with cases(m, k):
                pure = by_every_row(layer, cupy.asarray(clean), poison)
                for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
                    with named(name):
                        reference.assert_close(y, x, q.codes, q.scale, None, x_dtype, acc_of(name, x_dtype))
                        assert_same_bits(y.get()[~bad], pure[name].get()[~bad], "rows that were clean")


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_ends_of_the_ranges_on_the_gpu(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    import cupy

    with Cases() as cases:
        for what, x, q, out_dtype in extremes(rng, x_dtype):
            layer = on_gpu(q, out_dtype=out_dtype)
            for rows in (x, x[:1]):
                for name, y in by_every_row(layer, cupy.asarray(rows), poison).items():
                    with cases(what, out_dtype, "m", len(rows), name):
                        reference.assert_close(y, rows, q.codes, q.scale, None, out_dtype, acc_of(name, x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_subnormal_inputs(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """Nothing is flushed to zero on the way: not x, not the sums."""
    import cupy

    # For float32 not the least: its products with the least code have no smaller subnormal to be.
    exponent = {"float16": -24, "bfloat16": -133, "float32": -137}[x_dtype]
    x = (rng.integers(-100, 101, (17, 192)) * 2.0**exponent).astype(FLOATS[x_dtype])
    assert (x != 0).any() and np.abs(x.astype(np.float64)).max() < 2.0 ** (exponent + 7)
    q = quantized(rng, 65, 192, 20, 24)
    layer = on_gpu(q, out_dtype="float32")
    with Cases() as cases:
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            with cases(name):
                reference.assert_close(y, x, q.codes, q.scale, None, "float32", acc_of(name, x_dtype))


@pytest.mark.gpu
def test_one_rounding_on_the_gpu(poison: Callable[..., Any]) -> None:
    import cupy

    scale = np.full((1, 1), np.float32(1 + 2.0**-23), np.float32)
    layer = on_gpu(tensor(np.full((1, 1), 0x39, np.uint8), scale), np.array([-1.125], np.float32))
    x = cupy.ones((1, 1), cupy.float32)
    for name, y in by_every_row(layer, x, poison).items():
        assert float(y[0, 0]) == 1.125 * 2.0**-23, name


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_error_that_sums_may_have_is_the_tables(rng: np.random.Generator, x_dtype: str) -> None:
    """What `acc` of ARCHS must allow, measured: random signs, and one sign alone, where truncation adds up."""
    import cupy

    worst: dict[str, float] = {}
    for sign, (m, n, k) in itertools.product(
        (False, True), ((1, 64, 4096), (9, 64, 4097), (32, 64, 14336), (40, 64, 4096))
    ):
        q, x = quantized(rng, n, k), floats(rng, (m, k), x_dtype)
        if sign:
            q.codes[...] &= 0x7F
            x = np.abs(x)
        layer, there = on_gpu(q, out_dtype="float32"), cupy.asarray(x)
        for name in rows_of(layer, there):
            with forced(layer, name):
                found = reference.measured_acc(layer(there), x, q.codes, q.scale, None, "float32")
            worst[f"{name}, {'one sign' if sign else 'random signs'}"] = max(
                found, worst.get(f"{name}, {'one sign' if sign else 'random signs'}", 0.0)
            )
    table = "\n".join(f"{x_dtype} {name}: 2^{math.log2(max(value, 2.0**-60)):.2f}" for name, value in worst.items())
    print(table)
    over = {name: value for name, value in worst.items() if value > acc_of(name.split(",")[0], x_dtype)}
    assert not over, f"acc in ARCHS allows 2^{math.log2(acc_of('gemv', x_dtype)):.1f} at least; measured:\n{table}"


@pytest.mark.gpu
def test_a_layer_holds_the_codes_and_nothing_else(rng: np.random.Generator) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    for n, k in ((4096, 4096), (1000, 3000)):
        q = quantized(rng, n, k)
        gc.collect()
        before = pool.used_bytes()
        layer = on_gpu(q, np.zeros(n, np.float32))
        gc.collect()
        padded = math.prod(-(-size // step) * step for size, step in ((n, 16), (k, 64)))
        assert layer.nbytes == n * k + 8 * n
        assert pool.used_bytes() - before <= padded + 8 * n + 3 * 512
        assert_same_bits(layer.weight.to("cpu").codes, q.codes)
        assert_same_bits(layer.weight.to("cpu").scale, q.scale)
        gc.collect()
        assert pool.used_bytes() - before <= padded + 8 * n + 3 * 512


# --- streams, graphs, chains ------------------------------------------------------------------------------


@functools.cache
def _ballast() -> Any:
    import cupy

    a = cupy.ones(1 << 25, cupy.float32)
    cupy.multiply(a, cupy.float32(1), out=a)  # compiled
    synchronize()
    return a


def keep_busy(milliseconds: float = 5) -> None:
    """Work on CuPy's current stream, so that whoever does not wait for it comes too early."""
    import cupy

    a = _ballast()
    for _ in range(int(milliseconds / 0.06)):
        cupy.multiply(a, cupy.float32(1), out=a)


def check_late_x(layer: cufp8.Linear, x: np.ndarray, turns: int = 3, milliseconds: float = 5) -> None:
    """x is written just before the call that reads it, and just after: on a stream of its own, which is behind."""
    import cupy

    source, late = cupy.asarray(x), nans(x.shape, x.dtype.name)
    want = layer(source).get()
    _ballast()
    raw(late)[...] = raw(source)  # compiled
    synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        for turn in range(turns):
            late.view("uint8").fill(0xFF)
            keep_busy(milliseconds)
            raw(late)[...] = raw(source)
            y = layer(late)
            late.view("uint8").fill(0xFF)  # after it was read
            assert_same_bits(y.get(), want, f"turn {turn}")


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_a_call_waits_for_what_its_stream_did_before(rng: np.random.Generator, x_dtype: str) -> None:
    with Cases() as cases:
        for m, k in itertools.product((1, 8, 16, MANY), (320, 321)):
            layer = on_gpu(quantized(rng, 129, k))
            with cases(m, k):
                check_late_x(layer, floats(rng, (m, k), x_dtype))


@pytest.mark.gpu
def test_two_streams_at_once(rng: np.random.Generator) -> None:
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with Cases() as cases:
        for m in (1, 16, MANY):
            layers = [on_gpu(quantized(rng, 513, 520)) for _ in range(2)]
            xs = [[cupy.asarray(floats(rng, (m, 520), "bfloat16")) for _ in range(20)] for _ in range(2)]
            wants = [[layer(x).get() for x in some] for layer, some in zip(layers, xs, strict=True)]
            synchronize()
            ys: list[list[Any]] = [[], []]
            for i, side in itertools.product(range(20), range(2)):
                with streams[side]:
                    ys[side].append(layers[side](xs[side][i]))
            synchronize()
            for side in range(2):
                with cases(m, "stream", side):
                    for y, want in zip(ys[side], wants[side], strict=True):
                        assert_same_bits(y, want)


def capture(stream: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """A CuPy graph of what `work` queues on the stream, and what it returned."""
    with stream:
        stream.begin_capture()
        try:
            result = work()
        finally:
            graph = stream.end_capture()
    return graph, result


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_capture_and_replay_in_cupy(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with Cases() as cases:
        for m, first in itertools.product((1, 2, 9, 64, MANY), (True, False)):
            n, k = 129, 320
            q, bias = quantized(rng, n, k), floats(rng, n)
            layer = on_gpu(q, bias)
            x, out = cupy.asarray(floats(rng, (m, k), x_dtype)), poison((m, n), x_dtype, "cupy")
            captured = kernels.pick(runtime.target(0), problem(m, n, k, x_dtype, captured=True)).name
            eager = layer.kernels(m, x_dtype)
            if not first:
                layer(x)
            synchronize()
            with cases(m, "first call" if first else "", eager, "->", captured):
                graph, (y, z) = capture(stream, lambda: (layer(x), layer(x, out=out)))  # noqa: B023
                assert z is out
                for _ in range(3):
                    fresh = floats(rng, (m, k), x_dtype)
                    with stream:
                        x.set(fresh)
                        graph.launch()
                    stream.synchronize()
                    assert_all_close({captured: y}, fresh, q, bias, x_dtype, x_dtype)
                    assert_same_bits(y, out)
                    with forced(layer, captured):
                        assert_same_bits(layer(x), y, "captured and not")
                    if eager == captured:
                        assert_same_bits(layer(x), y, "captured and not")
            # cuBLAS alone refuses captures: what another row serves, it serves in both.
            assert eager in ("cublas", captured)


@pytest.mark.gpu
def test_what_a_captured_call_makes_lives_as_long_as_the_graph(rng: np.random.Generator) -> None:
    """Results that nobody holds, and copies of strided inputs, are not handed out again while a graph writes them."""
    import cupy

    m, k = 8, 512
    stream, before = cupy.cuda.Stream(non_blocking=True), set(runtime._kept)
    for strided in (False, True):
        first, second = (on_gpu(quantized(rng, k, k, -13, -12)) for _ in range(2))
        base = cupy.asarray(floats(rng, (m, 2 * k), "bfloat16"))
        x = base[:, ::2] if strided else base[:, :k]
        out = cupy.empty((m, k), FLOATS["bfloat16"])
        want = second(first(x)).get()
        synchronize()
        graph, _ = capture(stream, lambda: second(first(x), out=out))  # noqa: B023
        with stream:
            # As large as what the capture has made: the pool would give its blocks to these.
            others = [cupy.full((m, k), i, cupy.uint16) for i in range(64)]
            for _ in range(3):
                graph.launch()
        stream.synchronize()
        assert_same_bits(out, want, "the result")
        for i, other in enumerate(others):
            assert bool((other == i).all()), (
                f"array {i} was overwritten by the graph ({'strided' if strided else 'contiguous'} x)"
            )
        del graph
        gc.collect()
    deadline = time.monotonic() + 20
    while set(runtime._kept) - before and time.monotonic() < deadline:
        time.sleep(0.01)
        runtime.keep_for_capture(stream.ptr, None)
    assert set(runtime._kept) <= before


@pytest.mark.gpu
def test_capture_and_replay_in_torch(rng: np.random.Generator) -> None:
    torch = gpu_torch()
    with Cases() as cases:
        for x_dtype, m, first in itertools.product(FLOATS, (1, 16, MANY), (True, False)):
            n, k = 129, 320
            q, bias = quantized(rng, n, k), floats(rng, n)
            layer = on_gpu(q, bias)
            x = torch.from_numpy(floats(rng, (m, k))).to("cuda", getattr(torch, x_dtype))
            out = torch.full((m, n), math.nan, dtype=x.dtype, device="cuda")
            captured = kernels.pick(runtime.target(0), problem(m, n, k, x_dtype, captured=True)).name
            if not first:
                layer(x)
            with cases(x_dtype, m, "first call" if first else "", captured):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = layer(x)
                    z = layer(x[:, ::1], out=out)
                assert z is out
                for _ in range(3):
                    fresh = torch.from_numpy(floats(rng, (m, k))).to("cuda", x.dtype)
                    x.copy_(fresh)
                    graph.replay()
                    torch.cuda.synchronize()
                    seen = reference.to_float64(x).astype(FLOATS[x_dtype])
                    acc = acc_of(captured, x_dtype)
                    reference.assert_close(y, seen, q.codes, q.scale, bias, x_dtype, acc)
                    assert_same_bits(y, out)
                    with forced(layer, captured):
                        assert_same_bits(layer(x), y, "captured and not")


def chain_of(rng: np.random.Generator, count: int, k: int, **options: Any) -> list[cufp8.Linear]:
    """Layers [k, k] that keep the size of what goes through them."""
    # The mean square of all finite codes, each as likely, is 150^2 and a little.
    size = math.sqrt(float(np.nanmean(np.square(reference.VALUES))) * k)
    exponent = -math.log2(size)
    return [on_gpu(quantized(rng, k, k, exponent, exponent + 0.01), **options) for _ in range(count)]


def without_pdl(layers: list[cufp8.Linear]) -> list[cufp8.Linear]:
    """The same weights, launched one kernel after the other."""
    return [cufp8.Linear.from_quantized(layer.weight.to("cpu"), device="cuda", pdl=False) for layer in layers]


def through(layers: list[cufp8.Linear], x: Any, buffers: list[Any]) -> Any:
    """y of each layer is the x of the next, by way of two buffers in turn."""
    for i, layer in enumerate(layers):
        x = layer(x, out=buffers[i % 2])
    return x


def check_chain(layers: list[cufp8.Linear], plain: list[cufp8.Linear], start: Any) -> None:
    """Through two poisoned buffers: with and without (`plain`) programmatic launch, captured or not, the same bits as
    layer by layer into memory of their own."""
    import cupy

    stream, x = cupy.cuda.Stream(non_blocking=True), start
    buffers = [nans(start.shape, start.dtype.name) for _ in range(2)]

    def poison_all() -> None:
        for buffer in buffers:
            buffer.view("uint8").fill(0xFF)

    for layer in plain:
        x = layer(x)
        synchronize()
    want = x.get()
    size = np.abs(want.astype(np.float32))
    assert np.isfinite(size).all() and size.max() > 1e-3
    for some, turn in itertools.product((layers, plain), range(4)):
        poison_all()
        assert_same_bits(through(some, start, buffers), want, f"pdl={some is layers}, turn {turn}")
    for some in (layers, plain):
        synchronize()
        graph, y = capture(stream, lambda: through(some, start, buffers))  # noqa: B023
        for turn in range(3):
            with stream:
                poison_all()
                graph.launch()
                graph.launch()
            stream.synchronize()
            assert_same_bits(y, want, f"captured, pdl={some is layers}, turn {turn}")


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("m", [1, 4, 16, MANY])
def test_chains_through_two_buffers(rng: np.random.Generator, x_dtype: str, m: int) -> None:
    """Fifty layers, y of each the x of the next: with and without programmatic launch, captured or not."""
    import cupy

    layers = chain_of(rng, 50, 512)
    plain = without_pdl(layers)
    stream = cupy.cuda.Stream(non_blocking=True)
    start = cupy.asarray(floats(rng, (m, 512), x_dtype))
    captured = kernels.pick(runtime.target(0), problem(m, 512, 512, x_dtype, captured=True)).name

    # One layer at a time, each result in memory of its own and judged.
    rows, x, want = layers[0].kernels(m, x_dtype), start, None
    steps = {}
    for name in {rows, captured}:
        x = start
        for i, layer in enumerate(plain):
            with forced(layer, name):
                y = layer(x)
            synchronize()
            if i % 10 == 0:
                assert_all_close({name: y}, x.get(), layer.weight.to("cpu"), None, x_dtype, x_dtype)
            x = y
        steps[name] = y.get()
        assert np.isfinite(steps[name].astype(np.float32)).all() and np.abs(steps[name].astype(np.float32)).max() > 1e-3

    for some, turn in itertools.product((layers, plain), range(10)):
        buffers = [nans((m, 512), x_dtype) for _ in range(2)]
        if turn % 2:
            synchronize()
            with stream:
                y = through(some, start, buffers)
            stream.synchronize()
        else:
            y = through(some, start, buffers)
        assert_same_bits(y, steps[rows], f"pdl={some is layers}, turn {turn}")
    for some in (layers, plain):
        buffers = [nans((m, 512), x_dtype) for _ in range(2)]
        synchronize()
        graph, want = capture(stream, lambda: through(some, start, buffers))  # noqa: B023
        for turn in range(10):
            with stream:
                want.view("uint8").fill(0xFF)
                graph.launch()
                graph.launch()
            stream.synchronize()
            assert_same_bits(want, steps[captured], f"captured, pdl={some is layers}, turn {turn}")


@pytest.mark.gpu
def test_chains_of_layers_that_differ(rng: np.random.Generator) -> None:
    """Other shapes, rows of KERNELS and kernels of CuPy in between."""
    import cupy

    widths = [256, 1000, 64, 4097, 8, 1, 513, 256]
    for m, x_dtype in itertools.product((1, 16, MANY), FLOATS):
        weights = [quantized(rng, n, k, -12, -11) for k, n in itertools.pairwise(widths)]
        results = []
        for pdl in (True, False):
            layers = [on_gpu(q, pdl=pdl) for q in weights]
            x = cupy.asarray(np.linspace(-1, 1, m * 256).reshape(m, 256).astype(FLOATS[x_dtype]))
            for _ in range(5):
                h = x
                for layer in layers:
                    h = layer(h)
                    h = (raw(h) ^ raw(h).dtype.type(1 << 8 * h.itemsize - 1)).view(h.dtype)  # -h
                results.append(h.get())
        for other in results[1:]:
            assert_same_bits(other, results[0], (m, x_dtype))


@pytest.mark.gpu
def test_weights_replaced_just_before_a_call(rng: np.random.Generator) -> None:
    """The pool gives a new layer the memory of the old one, while kernels of the old one may still run."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    _ballast()
    n, k = 512, 1024
    weights = [floats(rng, (n, k), scale=0.02) for _ in range(6)]
    codes = [cufp8.quantize(w) for w in weights]
    xs = {m: floats(rng, (m, k), "bfloat16") for m in (1, 8, 16, MANY)}
    with Cases() as cases:
        for turn, (m, on_host) in enumerate(itertools.product((1, 8, 16, MANY) * 3, (True, False))):
            x, i = cupy.asarray(xs[m]), turn % len(weights)
            synchronize()
            with cases(m, on_host, turn), stream if turn % 4 < 2 else contextlib.nullcontext():
                before = cufp8.Linear(weights[i - 1], device="cuda")
                keep_busy(1)
                before(x)
                del before
                w = weights[i] if on_host else cupy.asarray(weights[i])
                layer = cufp8.Linear(w, device="cuda")
                y = layer(x)
                assert_all_close({layer.kernels(m): y}, xs[m], codes[i], None, "bfloat16", "bfloat16")


# --- the kernels of tiles.cuh: every way to launch them ------------------------------------------------------

TILES = [(name, tokens) for name, shapes in kernels._TILES.items() for tokens in shapes]


@dataclasses.dataclass(frozen=True)
class Way:
    """How a kernel of tiles.cuh is launched: `kernels.tile_launch`, and whether the next kernel may start early.

    `sms`: of the GPU that is said to be there; few, so that a block takes several tiles. `ways`: in which the warps
    take turns, where it is not as many as fit.
    """

    name: str
    tokens: int
    tiles: int
    split: int = 1
    per_sm: int = 1
    sms: int | None = None
    early: bool | None = None
    ways: int | None = None

    def launch(self, target: Target, p: Problem) -> kernels.Launch:
        target = dataclasses.replace(target, sms=self.sms or target.sms)
        with pytest.MonkeyPatch.context() as patch:
            if self.ways:
                patch.setitem(kernels._WAYS, self.name, (self.ways,))
            made = kernels.tile_launch(self.name, target, p, self.tokens, self.tiles, self.split, self.per_sm)
        if self.early is not None:
            made = dataclasses.replace(made, fields=(*made.fields[:-1], int(self.early)))
        return made


def ways_of(launch: kernels.Launch) -> int:
    return launch.fields[2]


@contextlib.contextmanager
def launched(layers: list[cufp8.Linear], way: Way | AsyncWay) -> Iterator[None]:
    """Inside, the layers' calls are launched in that way."""

    def pick(target: Target, p: Problem) -> Kernel:
        entry, arch = way.launch(target, p).entry, kernels.arch_of(target.arch)
        return dataclasses.replace(next(row for row in LINEAR if entry in row.entries(arch)), plan=way.launch)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(choosing(layer, pick))
        yield


def needs(name: str) -> None:
    arch = kernels.arch_of(runtime.target(0).arch)
    if not any(row.entries(arch) for row in LINEAR if row.source == f"{name}.cu"):
        skip_for_other_arch(name)


def tile_shapes(tokens: int) -> list[tuple[int, int, int]]:
    """m, n, k: ragged ends, bands of groups, fewer steps than stages."""
    return [
        (tokens + 1, 129, 2056),
        (9 * tokens - 3, 300, 520),
        (tokens, 1000, 128),
        (max(1, tokens // 2 - 1), 64, 192),
        (3, 48, 64),
        (1, 17, 8),
    ]


def ways(name: str, tokens: int, target: Target, p: Problem) -> Iterator[tuple[Way, kernels.Launch]]:
    """Tiles of 8 units, of fewer and of one; k shared or not, by blocks and by a block's warps in all ways that
    there is room for; blocks that take one tile, several or all of them."""
    units, steps = kernels.units_steps(p.n, p.k)
    narrow = -(-units // kernels.TILE_MAX_UNITS)
    fitting = kernels._TILES[name][tokens]
    early = itertools.cycle((True, False, None))
    shared = [(1, per_sm, sms) for sms, per_sm in ((1, 1), (3, fitting), (None, 1), (None, fitting))]
    shared += [(split, 1, None) for split in (2, 4, 8) if steps >= split]
    for tiles in sorted({narrow, (narrow + units) // 2, min(units, narrow + 1), units}):
        for (split, per_sm, sms), some in itertools.product(shared, kernels._WAYS[name]):
            way = Way(name, tokens, tiles, split, per_sm, sms, next(early), some)
            with contextlib.suppress(AssertionError):  # no room, or too few warps
                yield way, way.launch(target, p)


@pytest.mark.parametrize(("name", "tokens"), TILES)
def test_the_ways_reach_all_there_is(name: str, tokens: int) -> None:
    """Of what the GPU tests below launch: each split, rings longer than k, blocks with several tiles, early or not."""
    target, seen = Target("sm_90a", 132, 227 << 10, True), set()
    for m, n, k in tile_shapes(tokens):
        p = problem(m, n, k, "bfloat16")
        assert p.aligned16
        steps = kernels.units_steps(n, k)[1]
        for way, launch in ways(name, tokens, target, p):
            assert launch.entry == f"{name}_bfloat16_{tokens}" and launch.smem_bytes <= target.smem_bytes
            assert ways_of(launch) == way.ways
            several = launch.grid[0] < way.tiles * -(-m // tokens) * launch.split
            seen.add(("split", launch.split))
            seen.add(("ways", way.ways, launch.split > 1, several))
            seen |= {("several", bool(launch.fields[-1]))} if several else set()
            seen |= {("early", way.early, launch.split > 1)}
            seen |= {"short"} if steps < launch.stages else {"long"}
            if steps // launch.split < way.ways:
                seen.add(("a way without a step", launch.split > 1, several))
    assert {("ways", some, split, False) for some in kernels._WAYS[name] for split in (True, False)} <= seen
    # Several tiles of 256 tokens leave no room for the sums of two ways.
    alone = kernels._WAYS[name] if tokens < 256 else (1,)
    assert {("ways", some, False, True) for some in alone} <= seen
    assert {("a way without a step", split, False) for split in (True, False)} <= seen
    assert tokens == 256 or ("a way without a step", False, True) in seen
    assert {"short", "long"} <= seen
    assert {("split", split) for split in (1, 2, 4, 8)} <= seen
    assert {("several", True), ("several", False)} <= seen
    assert {("early", early, shared) for early in (True, False) for shared in (True, False)} <= seen


def amid_nan(x: np.ndarray) -> Any:
    """x on the GPU with a pitch of a multiple of 16 bytes; beside it, before it and after it is NaN."""
    import cupy

    m, k = x.shape
    wide = np.full((m + 3, k + 16), np.nan, x.dtype)
    wide[1 : 1 + m, 8 : 8 + k] = x
    return cupy.asarray(wide)[1 : 1 + m, 8 : 8 + k]


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "tokens"), TILES)
def test_every_way_to_launch_tiles(
    rng: np.random.Generator, poison: Callable[..., Any], name: str, tokens: int, x_dtype: str
) -> None:
    """All ways that add up k in the same parts give the same bits; one of them is judged."""
    needs(name)
    sides = itertools.cycle(((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 8)))
    out_dtypes = itertools.cycle((None, "float32", "bfloat16", "float16"))
    with Cases() as cases:
        for turn, (m, n, k) in enumerate(tile_shapes(tokens)):
            q, bias = quantized(rng, n, k), floats(rng, n) if turn % 2 else None
            x, out_dtype = floats(rng, (m, k), x_dtype), next(out_dtypes)
            layer, there, exact = on_gpu(q, bias, out_dtype=out_dtype), amid_nan(x), exact_on_gpu(x, q, bias)
            seen: dict[Any, Any] = {}
            for way, _ in ways(name, tokens, layer._target, problem(m, n, k, x_dtype)):
                with cases(m, n, k, out_dtype or "", way), launched([layer], way):
                    y = into_a_wider(layer, there, poison, *next(sides))
                    if (way.split, way.ways) in seen:
                        assert_same_bits(y, seen[way.split, way.ways], "another launch with the same parts of k")
                    else:
                        acc = kernels.arch_of(layer._target.arch).acc["tensor"]
                        assert_close_on_gpu(y, exact, out_dtype or x_dtype, acc)
                        seen[way.split, way.ways] = y


SOME_WAYS = [
    (Way("bulk_mma", 8, 1), 3, 33, 2048),
    (Way("bulk_mma", 8, 1), 3, 100, 2056),
    (Way("bulk_mma", 8, 1, split=8), 3, 17, 2048),
    (Way("bulk_mma", 8, 2, split=2), 3, 33, 520),
    (Way("bulk_mma", 16, 3, sms=1), 17, 33, 1160),
    (Way("bulk_mma", 16, 2, split=4), 17, 33, 2056),
    (Way("bulk_mma", 32, 3, sms=1, early=True), 40, 40, 192),
    (Way("bulk_mma", 64, 1, split=2), 9, 72, 520),
    (Way("wgmma", 32, 1), 33, 20, 136),
    (Way("wgmma", 32, 2, split=4, early=True), 31, 40, 520),
    (Way("wgmma", 64, 2, sms=1), 65, 40, 520),
    (Way("wgmma", 64, 1, split=4), 65, 40, 512),
    (Way("wgmma", 64, 1, split=8, early=False), 5, 100, 520),
    (Way("wgmma", 128, 1, split=2), 130, 72, 512),
    (Way("wgmma", 128, 2, split=8, early=True), 3, 33, 520),
    (Way("wgmma", 256, 1, sms=1), 300, 72, 136),
    (Way("wgmma", 256, 1, split=2), 257, 17, 136),
]


def test_some_ways_are_each_number_of_ways() -> None:
    """Alone, in a cluster, and (where it is not two ways of 256 tokens) with several tiles a block."""
    target, seen = Target("sm_90a", 132, 227 << 10, True), set()
    for way, m, n, k in SOME_WAYS:
        launch = way.launch(target, problem(m, n, k, "bfloat16"))
        several = launch.grid[0] < way.tiles * -(-m // way.tokens) * launch.split
        seen.add((way.name, ways_of(launch), launch.split > 1, several))
    assert {(name, some) for name, some, _, _ in seen} == {
        (name, n) for name, some in kernels._WAYS.items() for n in some
    }
    for name in kernels._WAYS:
        assert {kind[2:] for kind in seen if kind[0] == name} == {(False, False), (True, False), (False, True)}


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("way", "m", "n", "k"),
    SOME_WAYS,
    ids=lambda v: f"{v.name}_{v.tokens}-{v.tiles}x{v.split}" if isinstance(v, Way) else str(v),
)
def test_some_ways_to_launch_tiles(
    rng: np.random.Generator, poison: Callable[..., Any], way: Way, m: int, n: int, k: int
) -> None:
    """Small ones: each kernel, sums with memory of their own and in the ring's place, a block with several tiles."""
    import cupy

    needs(way.name)
    for x_dtype in ("bfloat16", "float16"):
        q, bias, x = quantized(rng, n, k), floats(rng, n), floats(rng, (m, k), x_dtype)
        layer, out = on_gpu(q, bias), poison((m, n), x_dtype, "cupy")
        with launched([layer], way):
            layer(cupy.asarray(x), out=out)
        reference.assert_close(out, x, q.codes, q.scale, bias, x_dtype, acc_of(way.name, x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("name", "tokens"), TILES)
def test_chains_of_tiles(rng: np.random.Generator, name: str, tokens: int, early: bool) -> None:
    """Through two poisoned buffers: with and without programmatic launch, captured or not, the same bits."""
    import cupy

    needs(name)
    x_dtype, k, m = "bfloat16" if early else "float16", 520, 3 * tokens - 1
    layers = chain_of(rng, 12, k)
    plain = without_pdl(layers)
    start = cupy.asarray(floats(rng, (m, k), x_dtype))
    fitting = kernels._TILES[name][tokens]
    with Cases() as cases:
        for tiles, split, sms in (
            (5, 1, 3),
            (11, 1, None),
            (33, 1, 3),
            (5, 2, None),
            (17, 2, None),
            (5, 8, None),
            (9, 4, None),
        ):
            way = Way(name, tokens, tiles, split, fitting, sms, early)
            with cases(way), launched([*layers, *plain], way):
                check_chain(layers, plain, start)


# --- async_mma.cu: each kernel with any number of warps ------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AsyncWay:
    """How async_mma.cu is launched: the kernel, and its warps; as many as there is room for, where it is not told."""

    tokens: int
    units: int
    warps: int = 16
    name: str = "async_mma"

    def launch(self, target: Target, p: Problem) -> kernels.Launch:
        assert p.m <= self.tokens
        group = kernels._ASYNC_SHAPES[8][self.tokens, self.units]
        x_bytes = group * 160 if self.tokens == 1 else self.tokens * (group * 128 + 16)
        warp_bytes = group * self.units * 1024 + x_bytes
        warps = min(self.warps, target.smem_bytes // warp_bytes)
        blocks = -(-kernels.units_steps(p.n, p.k)[0] // self.units)
        entry = f"async_mma_{p.x_dtype}_{self.tokens}_{self.units}"
        return kernels.Launch(entry, (blocks, 1, 1), 32 * warps, smem_bytes=warps * warp_bytes)


@pytest.mark.parametrize(("n", "k"), [(16, 64), (1000, 4096), (4096, 14336), (8448, 4104)])
@pytest.mark.parametrize("m", range(1, ASYNC[-1][0] + 1))
def test_async_ways_are_the_tables(m: int, n: int, k: int) -> None:
    """What the tests below launch is what the table does, but for the number of warps."""
    for arch, smem_bytes in (("sm_80", 163), ("sm_86", 99), ("sm_90a", 227), ("sm_120a", 99)):
        target, p = Target(arch, 132, smem_bytes << 10, False), problem(m, n, k, "float16")
        planned = kernels._async_plan(target, p)
        tokens, units = map(int, planned.entry.rsplit("_", 2)[1:])
        made = AsyncWay(tokens, units, planned.block // 32).launch(target, p)
        assert planned.smem_bytes >= made.smem_bytes
        assert dataclasses.replace(made, smem_bytes=planned.smem_bytes) == planned


def async_warps(k: int, tokens: int, units: int) -> list[int]:
    """One warp for all of k, as many as there are, and some in between."""
    groups = -(-kernels.units_steps(1, k)[1] // kernels._ASYNC_SHAPES[8][tokens, units])
    return sorted({1, min(3, groups), min(7, groups), 16})


ASYNC_CHANNELS = (1, 8, 15, 16, 17, 31, 33, 1000, 4097)
ASYNC_LENGTHS = (8, 16, 64, 72, 120, 1000, 4096, 4104, 14336, 28672)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "units"), ASYNC)
def test_every_way_to_launch_async_mma(
    rng: np.random.Generator, poison: Callable[..., Any], tokens: int, units: int, x_dtype: str
) -> None:
    """All sizes and numbers of tokens, x with a pitch amid NaN; a row's bits are its own, twice the same."""
    needs("async_mma")
    sides = itertools.cycle(((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 8)))
    turns = itertools.count()
    with Cases() as cases:
        for k in ASYNC_LENGTHS:
            whole, x, offset = (
                quantized(rng, max(ASYNC_CHANNELS), k),
                floats(rng, (tokens, k), x_dtype),
                floats(rng, 4097),
            )
            there = amid_nan(x)
            for n in ASYNC_CHANNELS:
                turn = next(turns)
                q, bias = tensor(whole.codes[:n], whole.scale[:n]), offset[:n] if turn % 2 else None
                out_dtype = (None, "float32", "bfloat16", "float16")[turn % 4]
                layer, exact = on_gpu(q, bias, out_dtype=out_dtype), exact_on_gpu(x, q, bias)
                acc = acc_of("async_mma", x_dtype)
                for warps in async_warps(k, tokens, units):
                    with cases(n, k, out_dtype or "", warps), launched([layer], AsyncWay(tokens, units, warps)):
                        all_rows = into_a_wider(layer, there, poison, *next(sides))
                        assert_close_on_gpu(all_rows, exact, out_dtype or x_dtype, acc)
                        assert_same_bits(into_a_wider(layer, there, poison, *next(sides)), all_rows, "again")
                        for m in range(1, tokens) if n in (17, 33) else (1 + turn % tokens,):
                            y = into_a_wider(layer, there[:m], poison, *next(sides))
                            assert_same_bits(y, all_rows[:m], f"m {m}")


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize(("tokens", "units"), ASYNC, ids=lambda v: str(v))
def test_some_ways_to_launch_async_mma(
    rng: np.random.Generator, poison: Callable[..., Any], tokens: int, units: int
) -> None:
    """Small: warps with several groups of steps and with one, a ragged step, channels and tokens that are not there."""
    import cupy

    needs("async_mma")
    m, n, k = max(1, tokens - 1), 33, 1096
    for x_dtype in ("bfloat16", "float16"):
        q, bias, x = quantized(rng, n, k), floats(rng, n), floats(rng, (m, k), x_dtype)
        layer, out = on_gpu(q, bias), poison((m, n), x_dtype, "cupy")
        with launched([layer], AsyncWay(tokens, units, 3)):
            layer(cupy.asarray(x), out=out)
        reference.assert_close(out, x, q.codes, q.scale, bias, x_dtype, acc_of("async_mma", x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "units"), [shape for shape in ASYNC if shape[0] > 1])
def test_nan_and_inf_stay_in_their_row_of_async_mma(
    rng: np.random.Generator, tokens: int, units: int, x_dtype: str
) -> None:
    """Each row in turn is spoiled, at either end of k or within; no other row changes by a bit."""
    import cupy

    needs("async_mma")
    n, k = 40, 1000
    q, clean = quantized(rng, n, k), floats(rng, (tokens, k), x_dtype)
    q.codes[:, ::5] = 0  # Inf * 0 is NaN
    layer = on_gpu(q)
    with Cases() as cases:
        for m, warps in itertools.product(sorted({2, 3, 7, tokens}), (1, 4)):
            with launched([layer], AsyncWay(tokens, units, warps)):
                pure = layer(cupy.asarray(clean[:m])).get()
                for bad, at, value in itertools.product(range(m), (0, 515, k - 1), (math.nan, math.inf)):
                    with cases(m, warps, "row", bad, "k", at, value):
                        x = clean[:m].copy()
                        x[bad, at] = value
                        y = layer(cupy.asarray(x)).get()
                        others = np.arange(m) != bad
                        assert_same_bits(y[others], pure[others])
                        assert not np.isfinite(y[bad].astype(np.float32)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "units"), ASYNC)
def test_chains_of_async_mma(rng: np.random.Generator, tokens: int, units: int, x_dtype: str) -> None:
    import cupy

    needs("async_mma")
    k, m = 1032, max(1, tokens - 1)
    layers = chain_of(rng, 12, k)
    plain = without_pdl(layers)
    start = cupy.asarray(floats(rng, (m, k), x_dtype))
    with Cases() as cases:
        for warps in async_warps(k, tokens, units):
            way = AsyncWay(tokens, units, warps)
            with cases(way), launched([*layers, *plain], way):
                check_chain(layers, plain, start)


@pytest.mark.gpu
def test_chains_of_kernels_in_turn(rng: np.random.Generator) -> None:
    """Each kernel of few tokens after each other one: none reads what the one before has not written yet."""
    import cupy

    names, k, x_dtype = ("async_mma", "bulk_mma", "mma_sync", "async_mma", "gemv"), 1032, "bfloat16"
    names = tuple(name for name in names if ROWS[name].entries(kernels.arch_of(runtime.target(0).arch)))
    layers = chain_of(rng, 4 * len(names), k)
    plain = without_pdl(layers)
    with Cases() as cases:
        for m in (1, 3, 8, 16):
            start = cupy.asarray(floats(rng, (m, k), x_dtype))
            with cases(m), pytest.MonkeyPatch.context() as patch:
                for i, layer in enumerate([*layers, *plain]):
                    with forced(layer, names[i % len(names)]):
                        layer(start)
                        plans = layer._plans
                    patch.setattr(layer, "_plans", plans)  # so that it keeps its kernel beside layers with others
                check_chain(layers, plain, start)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("tokens", "units"), ASYNC)
def test_late_x_of_async_mma(rng: np.random.Generator, tokens: int, units: int, x_dtype: str) -> None:
    needs("async_mma")
    with Cases() as cases:
        for n, k in ((129, 320), (4096, 4096)):
            layer = on_gpu(quantized(rng, n, k))
            for warps in async_warps(k, tokens, units):
                with cases(n, k, warps), launched([layer], AsyncWay(tokens, units, warps)):
                    check_late_x(layer, floats(rng, (tokens, k), x_dtype), 20, 0.5)


PLAN_TOKENS = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256, 257, 300, 511, 513, 1000, 1025, 4097)
PLAN_CHANNELS = (1, 8, 15, 16, 17, 100, 129, 1000, 1024, 4095, 4097)
PLAN_LENGTHS = (8, 1000, 128, 4104, 64, 72, 4096, 2048)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_many_tokens_as_the_table_plans_them(
    rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str
) -> None:
    """Aligned k, whatever row serves: a layer for each number of channels, all numbers of tokens; x as it is, and x at
    another address and with a pitch."""
    import cupy

    shift = 3 if x_dtype == "float16" else 0
    served = set()
    with Cases() as cases:
        for i, n in enumerate(PLAN_CHANNELS):
            k = PLAN_LENGTHS[(3 * i + shift) % len(PLAN_LENGTHS)]
            out_dtype = (None, "float32", "float16", "bfloat16")[i % 4]
            q, bias = quantized(rng, n, k), floats(rng, n) if i % 2 else None
            x = floats(rng, (max(PLAN_TOKENS), k), x_dtype)
            layer, exact = on_gpu(q, bias, out_dtype=out_dtype), exact_on_gpu(x, q, bias)
            there, pitched = cupy.asarray(x), amid_nan(x)
            for m in PLAN_TOKENS:
                name = layer.kernels(m, x_dtype)
                served.add(name)
                with cases(m, n, k, out_dtype or "", name):
                    y = poison((m, n), out_dtype or x_dtype, "cupy")
                    assert layer(there[:m], out=y) is y
                    assert_close_on_gpu(y, tuple(e[:m] for e in exact), out_dtype or x_dtype, acc_of(name, x_dtype))
                    assert_same_bits(layer(pitched[:m]), y, "x elsewhere")
    arch = kernels.arch_of(runtime.target(0).arch)
    names = ("async_mma", "bulk_mma", f"wgmma_{x_dtype}", f"wgmma_{x_dtype}_256")
    assert {name for name in names if ROWS[name].entries(arch)} <= served


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_rows_past_the_last_are_not_read(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """NaN in the rows after x's last, and Inf in some rows of x: neither is seen in the rows beside them."""
    import cupy

    n, k = 100, 200
    q = quantized(rng, n, k)
    layer = on_gpu(q)
    with Cases() as cases:
        for m in (1, 7, 9, 17, 33, 65, 129, 257, 513):
            clean = floats(rng, (m, k), x_dtype)
            x, bad = spoil(rng, clean) if m > 1 else (clean, np.zeros(m, bool))
            after = cupy.asarray(np.concatenate([x, np.full((300, k), np.nan, x.dtype)]))[:m]
            pure = by_every_row(layer, cupy.asarray(clean), poison)
            for name, y in by_every_row(layer, after, poison).items():
                with cases(name, m):
                    reference.assert_close(y, x, q.codes, q.scale, None, x_dtype, acc_of(name, x_dtype))
                    assert_same_bits(y.get()[~bad], pure[name].get()[~bad], "rows that were clean")


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_batch_invariant_on_the_cpu(rng: np.random.Generator, x_dtype: str) -> None:
    q, x = quantized(rng, 33, 520), floats(rng, (70, 520), x_dtype)
    layer = on_cpu(q, batch_invariant=True)
    y = layer(x)
    reference.assert_close(y, x, q.codes, q.scale, None, x_dtype, HOST_ACC)
    for some in (slice(0, 1), slice(3, 5), slice(1, 70), slice(0, 0)):
        assert_same_bits(layer(x[some]), y[some], some)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_batch_invariant_on_the_gpu(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """A row of y has the same bits whatever rows come with it: alone, in the middle, in blocks of other kernels."""
    import cupy

    with Cases() as cases:
        for n, k in ((100, 2056), (3000, 1024), (3000, 448), (9000, 136), (100, 129)):
            q, x = quantized(rng, n, k), floats(rng, (1025, k), x_dtype)
            layer, there, exact = on_gpu(q, batch_invariant=True), cupy.asarray(x), exact_on_gpu(x, q, None)
            whole = poison((1025, n), x_dtype, "cupy")
            layer(there, out=whole)
            assert_close_on_gpu(whole, exact, x_dtype, acc_of(layer.kernels(1025, x_dtype), x_dtype))
            for m in (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 300, 1024):
                first = int(rng.integers(0, 1025 - m + 1))  # all rows of x are on 16 bytes, or none
                with cases(n, k, m, first, layer.kernels(m, x_dtype)):
                    assert_same_bits(layer(there[first : first + m]), whole[first : first + m])


# --- other libraries on the GPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_torch_on_the_gpu(rng: np.random.Generator, x_dtype: str) -> None:
    torch = gpu_torch()
    q, bias = quantized(rng, 129, 320), floats(rng, 129)
    layer = on_gpu(q, bias)
    with Cases() as cases:
        for m in (1, 16, MANY):
            x = torch.from_numpy(floats(rng, (m, 320))).to("cuda", getattr(torch, x_dtype))
            seen = reference.to_float64(x).astype(FLOATS[x_dtype])
            name = layer.kernels(m, x_dtype)
            with cases(m):
                y = layer(x)
                assert type(y) is torch.Tensor and y.dtype == x.dtype and y.device == x.device
                assert y.shape == (m, 129) and y.is_contiguous() and not y.requires_grad
                reference.assert_close(y, seen, q.codes, q.scale, bias, x_dtype, acc_of(name, x_dtype))
                for view in (x[None], x.reshape(m, 1, 320), x.t().contiguous().t(), torch.cat([x, x], 1)[:, 320:]):
                    assert_same_bits(layer(view), y)
                assert layer(x[0]).shape == (129,)
                out = torch.full((m, 140), math.nan, dtype=x.dtype, device="cuda")[:, 3:132]
                assert layer(x, out=out) is out
                assert_same_bits(out, y)
                with torch.no_grad():
                    assert_same_bits(layer(torch.nn.Parameter(x)), y)
                with torch.inference_mode():
                    assert_same_bits(layer(x.clone()), y)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    there = layer(x * 1)
                side.synchronize()
                assert_same_bits(there, y)
            with cases("no rows"):
                assert layer(x[:0]).shape == (0, 129) and layer(x[:, None][:, :0]).shape == (m, 0, 129)


@pytest.mark.gpu
def test_torch_allocates_the_result_and_nothing_else(rng: np.random.Generator) -> None:
    torch = gpu_torch()
    import cupy

    layer = on_gpu(quantized(rng, 512, 512))
    pool = cupy.get_default_memory_pool()
    for m in (1, 16):
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
        del y
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, cupys = torch.cuda.memory_allocated(), pool.used_bytes()
        y = layer(x)
        assert torch.cuda.max_memory_allocated() - before == y.numel() * 2 == torch.cuda.memory_allocated() - before
        assert pool.used_bytes() == cupys
        out = torch.empty_like(y)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x, out=out)
        assert torch.cuda.max_memory_allocated() == before


@pytest.mark.gpu
def test_torch_streams_are_torchs(rng: np.random.Generator) -> None:
    """Late inputs on a side stream of torch, while CuPy's current stream is another."""
    torch = gpu_torch()
    layer = on_gpu(quantized(rng, 129, 320))
    side = torch.cuda.Stream()
    busy = torch.ones(1 << 25, device="cuda")
    with Cases() as cases:
        for m in (1, 16, MANY):
            x = torch.randn(m, 320, device="cuda", dtype=torch.bfloat16)
            want = layer(x).cpu()
            late = torch.full_like(x, math.nan)
            torch.cuda.synchronize()
            with cases(m), torch.cuda.stream(side):
                for _ in range(80):
                    busy.mul_(1.0)
                late.copy_(x)
                y = layer(late)
                late.fill_(math.nan)
                side.synchronize()
                assert_same_bits(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_jax_on_the_gpu(rng: np.random.Generator, x_dtype: str) -> None:
    jax = gpu_jax()
    q, bias = quantized(rng, 129, 320), floats(rng, 129)
    layer = on_gpu(q, bias)
    with Cases() as cases:
        for shape in ((320,), (1, 320), (16, 320), (MANY, 320), (2, 3, 320), (1, 1, 320)):
            a = floats(rng, shape, x_dtype)
            x = jax.device_put(a, jax.devices("gpu")[0])
            name = layer.kernels(math.prod(shape[:-1]), x_dtype)
            with cases(shape):
                y = layer(x)
                assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
                assert y.shape == (*shape[:-1], 129)
                reference.assert_close(np.asarray(y), a, q.codes, q.scale, bias, x_dtype, acc_of(name, x_dtype))
                np.testing.assert_array_equal(np.asarray(x), a)
                # What JAX makes of it, and back again.
                again = layer(jax.numpy.concatenate([x, x], -1)[..., :320])
                assert_same_bits(np.asarray(again), np.asarray(y))


@pytest.mark.gpu
def test_jax_without_rows(rng: np.random.Generator) -> None:
    jax = gpu_jax()
    layer = on_gpu(quantized(rng, 12, 20))
    for shape in ((0, 20), (3, 0, 20)):
        y = layer(jax.numpy.zeros(shape, "bfloat16"))
        assert isinstance(y, jax.Array) and y.shape == (*shape[:-1], 12) and y.dtype == "bfloat16"


@pytest.mark.gpu
def test_jax_inputs_live_until_they_are_read(rng: np.random.Generator) -> None:
    """JAX frees an array when Python does, and may give its memory to the next one at once."""
    jax = gpu_jax()
    import cupy

    _ballast()
    layer = on_gpu(quantized(rng, 512, 512))
    with Cases() as cases:
        for m in (1, 16, MANY):
            values = [floats(rng, (m, 512), "bfloat16") for _ in range(12)]
            wants = [layer(cupy.asarray(a)).get() for a in values]
            jax.block_until_ready(jax.device_put(values[0]))
            synchronize()
            ys = []
            for a in values:
                x = jax.device_put(a)
                keep_busy(2)
                ys.append(layer(x))
                del x
                for i in range(4):
                    jax.numpy.full((m, 512), i, "bfloat16") + 1  # may land where x was
            with cases(m):
                for y, want in zip(ys, wants, strict=True):
                    assert_same_bits(np.asarray(y), want)
    synchronize()
    from cufp8 import interop

    layer(jax.device_put(values[0]))
    synchronize()
    layer(jax.device_put(values[0]))
    assert len(interop.adapter_for("jax").borrowed) <= 2  # what is done is let go


@pytest.mark.gpu
def test_results_given_to_jax_live_until_they_are_read(rng: np.random.Generator) -> None:
    """A result that JAX still computes with is not handed out again by CuPy's pool."""
    jax = gpu_jax()
    import cupy

    layer = on_gpu(quantized(rng, 512, 512, -12, -11))
    values = [floats(rng, (16, 512), "bfloat16") for _ in range(8)]
    xs = [jax.device_put(a) for a in values]
    wants = [layer(cupy.asarray(a)).get() for a in values]
    heavy = jax.numpy.ones((4096, 4096), "float32") / 4096

    @jax.jit
    def late(heavy: Any, y: Any) -> Any:
        """y, but read only after some milliseconds of other work."""
        h = heavy
        for _ in range(8):
            h = h @ heavy
        return y + (h[0, 0] * 0).astype(y.dtype)

    jax.block_until_ready([*xs, heavy, late(heavy, layer(xs[0]))])
    synchronize()
    seen = []
    for x in xs:
        seen.append(late(heavy, layer(x)))  # the result itself is dropped at once
    for got, want in zip(seen, wants, strict=True):
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), want.astype(np.float32))


@pytest.mark.gpu
def test_numpy_through_a_gpu_layer(rng: np.random.Generator) -> None:
    q, bias = quantized(rng, 33, 65), floats(rng, 33)
    layer = on_gpu(q, bias)
    with Cases() as cases:
        for x_dtype, shape in itertools.product(FLOATS, ((65,), (1, 65), (2, 8, 65), (MANY, 65), (0, 65))):
            x = floats(rng, (*shape[:-1], 130), x_dtype)[..., ::2]
            name = layer.kernels(max(1, math.prod(shape[:-1])), x_dtype)
            with cases(x_dtype, shape):
                y = layer(x)
                assert isinstance(y, np.ndarray) and y.shape == (*shape[:-1], 33)
                reference.assert_close(y, x, q.codes, q.scale, bias, x_dtype, acc_of(name, x_dtype))
                out = np.full(y.shape, np.nan, y.dtype)
                assert layer(x, out=out) is out
                assert_same_bits(out, y)
    for out, kind, text in outs(rng):
        small = on_gpu(quantized(rng, 3, 4))
        with pytest.raises(kind, match=text):
            small(floats(rng, (2, 4)), out=out)


@pytest.mark.gpu
def test_weights_from_every_library(rng: np.random.Generator) -> None:
    import cupy

    w, bias, x = floats(rng, (70, 90), scale=0.1), floats(rng, 70), floats(rng, (5, 90))
    want = cufp8.quantize(w)
    given: dict[str, tuple[Any, Any]] = {
        "NumPy": (w, bias),
        "CuPy": (cupy.asarray(w), cupy.asarray(bias)),
        "CuPy, transposed": (cupy.asarray(w.T.copy()).T, bias),
        "DLPack": (Foreign(cupy.asarray(w)), Foreign(cupy.asarray(bias))),
    }
    with contextlib.suppress(pytest.skip.Exception):
        torch = gpu_torch()
        t = torch.from_numpy(w)
        given["torch"] = t.cuda(), torch.from_numpy(bias).cuda()
        given["torch on the CPU"] = t, torch.from_numpy(bias)
        given["torch's own"] = torch.nn.Parameter(t.cuda()), torch.nn.Parameter(torch.from_numpy(bias).cuda())
    with contextlib.suppress(pytest.skip.Exception):
        jax = gpu_jax()
        given["JAX"] = jax.device_put(w), jax.device_put(bias)
        given["JAX on the CPU"] = cpu_array(jax, w), cpu_array(jax, bias)
    with Cases() as cases:
        for name, (weights, offset) in given.items():
            with cases(name):
                layer = cufp8.Linear(weights, offset)
                assert layer.device == f"cuda:{cupy.cuda.Device().id}" and layer.shape == (70, 90)
                assert_same_bits(layer.weight.to("cpu").codes, want.codes)
                assert_same_bits(layer.weight.to("cpu").scale, want.scale)
                y = layer(cupy.asarray(x))
                reference.assert_close(y, x, want.codes, want.scale, bias, "float32", acc_of("gemv", "float32"))
                assert cufp8.Linear(weights, offset, device="cpu").device == "cpu"


@pytest.mark.gpu
def test_a_layer_between_devices(rng: np.random.Generator) -> None:
    import cupy

    q, bias, x = quantized(rng, 33, 65), floats(rng, 33), floats(rng, (9, 65), "float16")
    here = on_cpu(q, bias, out_dtype="float32", pdl=False)
    there = here.to("cuda")
    assert there.device == "cuda:0" and (there.out_dtype, there.pdl) == ("float32", False)
    assert there.nbytes == here.nbytes == 33 * 65 + 8 * 33
    assert there.to("cuda:0") is there and there.to("cuda") is there
    back = there.to("cpu")
    assert back.device == "cpu" and (back.out_dtype, back.pdl) == ("float32", False)
    assert_same_bits(back.weight.codes, q.codes)
    assert_same_bits(back.bias, bias)
    for y in (there(cupy.asarray(x)), back(x), there(x)):
        reference.assert_close(y, x, q.codes, q.scale, bias, "float32", acc_of("mma_sync", "float16"))
    text = repr(there)
    for m in (1, 16, 256):
        assert f"M={m} {there.kernels(m)}" in text and there.kernels(m) in ROWS
    for part in ("[33, 65]", "FP8A16", "cuda:0", "2,409 bytes"):
        assert part in text, text
    with pytest.raises(runtime.DeviceError, match="no GPU cuda:99"):
        here.to("cuda:99")
    with pytest.raises(runtime.DeviceError, match="no GPU cuda:99"):
        cufp8.Linear(floats(rng, (3, 4)), device="cuda:99")


def test_a_copied_layer_makes_its_own_plans(rng: np.random.Generator) -> None:
    layer, x = on_cpu(quantized(rng, 12, 20)), floats(rng, (3, 20))
    layer._plans["what it has seen"] = object()
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        assert not other._plans and layer._plans
        assert_same_bits(other(x), layer(x))


@pytest.mark.gpu
def test_no_rows_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    layer = on_gpu(quantized(rng, 12, 20))
    for x_dtype, shape in itertools.product(FLOATS, ((0, 20), (3, 0, 20), (0, 3, 20), (0, 0, 20))):
        x = cupy.zeros(shape, FLOATS[x_dtype])
        y = layer(x)
        assert isinstance(y, cupy.ndarray) and y.shape == (*shape[:-1], 12) and y.dtype == x.dtype
        out = cupy.empty_like(y)
        assert layer(x, out=out) is out


# --- errors on the GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_errors_of_x_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    layer, cpu = on_gpu(quantized(rng, 3, 4)), on_cpu(quantized(rng, 3, 4))
    for dtype in ("float64", "complex64", "int32", "uint8", "bool"):
        with pytest.raises(TypeError, match=rf"x is {dtype}; allowed are bfloat16, float16, float32"):
            layer(cupy.zeros((2, 4), dtype))
    for shape, text in (((2, 5), r"5 features \(shape \[2, 5\]\); the weight \[3, 4\] needs 4"), ((), "no dimension")):
        with pytest.raises(ValueError, match=text):
            layer(cupy.zeros(shape, cupy.float32))
    with pytest.raises(ValueError, match=r"x is on cuda:0, the layer on cpu; move x, or the layer by .*'cuda:0'"):
        cpu(cupy.zeros((2, 4), cupy.float32))
    torch = gpu_torch()
    with pytest.raises(ValueError, match=r"x is on the CPU, the layer on cuda:0; move x, or the layer by .*'cpu'"):
        layer(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"x is on cuda:0, the layer on cpu"):
        cpu(torch.zeros(2, 4, device="cuda"))
    with pytest.raises(TypeError, match=r"x is (torch\.)?complex64; allowed are"):
        layer(torch.zeros(2, 4, device="cuda", dtype=torch.complex64))
    x = torch.zeros(2, 4, device="cuda", requires_grad=True)
    for refused in (x, x * 2):
        with pytest.raises(RuntimeError, match=r"requires grad.*no_grad\(\).*detach\(\)"):
            layer(refused)
    layer(x.detach())
    jax = gpu_jax()
    with pytest.raises(ValueError, match=r"x is on the CPU, the layer on cuda:0"):
        layer(cpu_array(jax, np.zeros((2, 4), np.float32)))
    with pytest.raises(ValueError, match=r"x is on cuda:0, the layer on cpu"):
        cpu(jax.numpy.zeros((2, 4)))
    with pytest.raises(TypeError, match="tracer"):
        jax.jit(layer)(jax.numpy.zeros((2, 4)))


@pytest.mark.gpu
def test_errors_of_out_on_the_gpu(rng: np.random.Generator) -> None:
    import cupy

    layer = on_gpu(quantized(rng, 4, 4))
    x = cupy.asarray(floats(rng, (2, 4)))
    wide = cupy.zeros((4, 16), cupy.float32)
    for out, kind, text in (
        (np.zeros((2, 4), np.float32), TypeError, "out is a NumPy array, x a CuPy one"),
        ([1.0], TypeError, "out is a list array"),
        (cupy.zeros((2, 4), cupy.float16), ValueError, r"out is float16 \[2, 4\].*needed is float32 \[2, 4\]"),
        (cupy.zeros((4, 2), cupy.float32), ValueError, r"out is float32 \[4, 2\]"),
        (cupy.zeros(8, cupy.float32), ValueError, r"out is float32 \[8\]"),
        (wide[:2, :8:2], ValueError, "out has strides"),
        (wide[:4, :2].T, ValueError, "out has strides"),
        (wide[1::-1, :4], ValueError, "out has strides"),
        (cupy.broadcast_to(wide[0, :4], (2, 4)), ValueError, "out has strides"),
        (x, ValueError, "out overlaps x in memory"),
        (x[::1], ValueError, "out overlaps x in memory"),
    ):
        with pytest.raises(kind, match=text):
            layer(x, out=out)
    memory = cupy.asarray(floats(rng, 40))
    x = memory[:8].reshape(2, 4)
    with pytest.raises(ValueError, match="out overlaps x"):
        layer(x, out=memory[4:12].reshape(2, 4))
    with pytest.raises(ValueError, match="out overlaps x"):
        layer(memory[2:10].reshape(2, 4), out=memory[:8].reshape(2, 4))
    layer(x, out=memory[8:16].reshape(2, 4))
    layer(memory[8:16].reshape(2, 4), out=memory[:8].reshape(2, 4))
    torch = gpu_torch()
    t = torch.zeros(2, 4, device="cuda")
    with pytest.raises(TypeError, match="out is a CuPy array, x a torch one"):
        layer(t, out=wide[:2, :4])
    with pytest.raises(ValueError, match=r"out is float32 \[2, 4\] on device None.*on device 0"):
        layer(t, out=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="out has strides"):
        layer(t, out=torch.zeros(4, 2, device="cuda").t())
    jax = gpu_jax()
    with pytest.raises(TypeError, match="out is a JAX array, x a JAX one; out must be x's kind and writeable"):
        layer(jax.numpy.zeros((2, 4)), out=jax.numpy.zeros((2, 4)))


# --- threads ---------------------------------------------------------------------------------------------------


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """`work(i)` in so many threads at once; the first error is raised here."""
    errors: list[BaseException] = []
    together = threading.Barrier(count)

    def run(i: int) -> None:
        try:
            together.wait()
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False])
def test_eight_threads(rng: np.random.Generator, shared: bool) -> None:
    """With streams of their own; with a layer each, or all with one."""
    import cupy

    count = 8
    layers = [on_gpu(quantized(rng, 257, 320)) for _ in range(1 if shared else count)] * (count if shared else 1)
    xs = [{m: cupy.asarray(floats(rng, (m, 320), "bfloat16")) for m in (1, 9, MANY)} for _ in range(count)]
    wants = [{m: layer(x).get() for m, x in some.items()} for layer, some in zip(layers, xs, strict=True)]
    # Made here, so that nothing a thread does before the call gives it a context.
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(count)]
    for i in range(count):
        with streams[i]:  # the pool has a block for each result of this stream: the thread asks for no memory
            for x in xs[i].values():
                layers[i](x)
    synchronize()

    def work(i: int) -> None:
        with streams[i]:
            for turn in range(30):
                for m, x in xs[i].items():
                    y = layers[i](x)
                    if turn % 10 == 9:
                        assert_same_bits(y.get(), wants[i][m], f"thread {i}, m {m}, turn {turn}")

    in_threads(count, work)


@pytest.mark.gpu
def test_layers_made_in_threads(rng: np.random.Generator) -> None:
    import cupy

    weights, x = [floats(rng, (64, 96)) for _ in range(8)], floats(rng, (3, 96), "float16")
    there = cupy.asarray(x)
    synchronize()

    def work(i: int) -> None:
        layer = cufp8.Linear(weights[i], device="cuda")
        want = cufp8.quantize(weights[i])
        y = layer(there)
        reference.assert_close(y, x, want.codes, want.scale, None, "float16", acc_of("mma_sync", "float16"))

    in_threads(8, work)


@pytest.mark.gpu
def test_torch_in_threads(rng: np.random.Generator) -> None:
    torch = gpu_torch()
    layer = on_gpu(quantized(rng, 257, 320))
    xs = {m: torch.randn(m, 320, device="cuda", dtype=torch.float16) for m in (1, 9, MANY)}
    wants = {m: layer(x).cpu() for m, x in xs.items()}
    streams = [torch.cuda.Stream() for _ in range(8)]
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            for x in xs.values():
                layer(x)
    torch.cuda.synchronize()

    def work(i: int) -> None:
        with torch.cuda.stream(streams[i]):
            for _ in range(10):
                ys = {m: layer(x) for m, x in xs.items()}
            streams[i].synchronize()
            for m, y in ys.items():
                assert_same_bits(y, wants[m])

    in_threads(8, work)


# --- very large ------------------------------------------------------------------------------------------------


@pytest.fixture
def room() -> Iterator[None]:
    """What the memory pools hold is given back, before and after."""

    def give_back() -> None:
        import cupy

        gc.collect()
        synchronize()
        cupy.get_default_memory_pool().free_all_blocks()
        with contextlib.suppress(ImportError):
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    give_back()
    yield
    give_back()


def spread(rows: int, some: int) -> np.ndarray:
    """For each of many rows, which of a few it repeats: neighbours differ, and so do rows 2^k apart."""
    i = np.arange(rows, dtype=np.int64)
    return (i * 2_654_435_761 % 4_294_967_291) % some


def sample(rng: np.random.Generator, rows: int, width: int, count: int = 48) -> np.ndarray:
    """Rows to look at: the ends, both sides of 2^31 and 2^32 elements, of 65,535 groups, and some at random."""
    edges = [0, 1, rows - 2, rows - 1]
    for limit in (2**31, 2**32, 65_535 * width, 65_535 * 4 * width, 65_535 * 8 * width):
        edges += [limit // width - 1, limit // width, limit // width + 1]
    edges = [i for i in edges if 0 <= i < rows]
    return np.unique(np.concatenate([edges, rng.integers(0, rows, count)]))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
def test_x_beyond_2_31_elements(rng: np.random.Generator, room: None, x_dtype: str) -> None:
    import cupy

    m, n, k = 524_800, 24, 4096
    assert m * k > 2**31
    tile, q = floats(rng, (1021, k), x_dtype), quantized(rng, n, k)
    which = spread(m, len(tile))
    bits = np.dtype(f"uint{8 * tile.itemsize}")
    there, x = cupy.asarray(tile.view(bits)), cupy.empty((m, k), bits)
    for i in range(0, m, 65_536):
        x[i : i + 65_536] = there[cupy.asarray(which[i : i + 65_536])]
    x = x.view(FLOATS[x_dtype])
    layer, rows = on_gpu(q), sample(rng, m, k)
    with Cases() as cases:
        for name in rows_of(layer, x):
            with cases(name), forced(layer, name):
                y = raw(layer(x))[cupy.asarray(rows)].get().view(x.dtype)
                seen = tile[which[rows]]
                reference.assert_close(y, seen, q.codes, q.scale, None, x_dtype, acc_of(name, x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
def test_y_beyond_2_31_elements(rng: np.random.Generator, room: None, x_dtype: str) -> None:
    import cupy

    m, n, k = 524_800, 4097, 64
    assert m * n > 2**31
    x, q = floats(rng, (m, k), x_dtype), quantized(rng, n, k)
    layer, rows, there = on_gpu(q), sample(rng, m, n), cupy.asarray(x)
    with Cases() as cases:
        for name in rows_of(layer, there):
            with cases(name), forced(layer, name):
                y = layer(there)
                part = raw(y)[cupy.asarray(rows)].get().view(y.dtype)
                del y
                reference.assert_close(part, x[rows], q.codes, q.scale, None, x_dtype, acc_of(name, x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 4100])
def test_a_weight_beyond_2_31_codes(rng: np.random.Generator, room: None, k: int) -> None:
    import cupy

    n = 524_800
    assert n * k > 2**31
    tile = quantized(rng, 1021, k)
    which = spread(n, 1021)
    there, codes = cupy.asarray(tile.codes), cupy.empty((n, k), cupy.uint8)
    for i in range(0, n, 65_536):
        codes[i : i + 65_536] = there[cupy.asarray(which[i : i + 65_536])]
    scale, bias = tile.scale[which], floats(rng, n)
    layer = cufp8.Linear.from_quantized(tensor(codes, cupy.asarray(scale)), bias)
    del codes
    channels = sample(rng, n, k)
    with Cases() as cases:
        for x_dtype, m in itertools.product(FLOATS, (1, 3, 16, 140)):
            x = floats(rng, (m, k), x_dtype)
            there = cupy.asarray(x)
            for name in rows_of(layer, there):
                with cases(x_dtype, m, name), forced(layer, name):
                    y = raw(layer(there))[:, cupy.asarray(channels)].get().view(x.dtype)
                    part = tile.codes[which[channels]]
                    acc = acc_of(name, x_dtype)
                    reference.assert_close(y, x, part, scale[channels], bias[channels], x_dtype, acc)


def test_the_cases_collector() -> None:
    """A failure inside is told with its case, and no case at all is a failure too."""
    with pytest.raises(pytest.fail.Exception, match=r"1 of 2 cases failed:\n3 x: ValueError: y"), Cases() as cases:
        with cases(3, "x"):
            raise ValueError("y")
        with cases(4):
            pass
    with pytest.raises(AssertionError, match="no case ran"), Cases():
        pass
    assert re.fullmatch(r"(sm_\d+a?,?)+", ",".join(ARCHS))
