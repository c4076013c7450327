"""quantize_activations and its fused forms against the oracle, on the host and (marked gpu) on the device."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
import types
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from test_interop import gpu_maker, gpu_torch, libraries
from test_quantize import late_copy

import cufp8
from cufp8 import activations as activations_module
from cufp8 import interop, quantize_activations, rms_norm_quantize, silu_mul_quantize

F32 = np.float32
FLOATS = ("bfloat16", "float16", "float32")
TENSOR, TOKEN, GROUP = (-1, -1), (1, -1), (1, 128)
NAN = 0x7F

blocks = pytest.mark.parametrize("block", [TENSOR, TOKEN, GROUP], ids=["tensor", "token", "group"])
formats = pytest.mark.parametrize("dtype", reference.ELEMENTS)


def kind_of(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def activations(rng: np.random.Generator, *shape: int, dtype: str = "float32", wild: bool = False) -> np.ndarray:
    """Tokens of very different sizes, with zeros of both signs; if `wild`, also NaN and Inf."""
    spread = 4 if dtype == "float16" else 30
    x = rng.standard_t(4, size=shape) * np.exp2(rng.integers(-spread, spread, (*shape[:-1], 1)))
    x[rng.random(shape) < 0.02] = 0
    x[rng.random(shape) < 0.02] = -0.0
    limit = 6e4 if dtype == "float16" else 1e38
    x = np.clip(x, -limit, limit)
    if wild:
        for value in (math.nan, math.inf, -math.inf):
            x[rng.random(shape) < 0.003] = value
    return x.astype(kind_of(dtype))


def assert_bits(q: cufp8.QuantizedTensor, codes: np.ndarray, scale: np.ndarray, block: tuple, dtype: str) -> None:
    """q holds these codes and scales, bit for bit, and says so in its other attributes."""
    assert isinstance(q.codes, np.ndarray) and isinstance(q.scale, np.ndarray)
    assert (q.codes.dtype, q.scale.dtype) == (np.uint8, np.float32)
    assert q.codes.shape == q.shape == codes.shape and q.scale.shape == scale.shape
    np.testing.assert_array_equal(q.scale.view(np.uint32), scale.view(np.uint32))
    np.testing.assert_array_equal(q.codes, codes)
    assert (q.dtype, q.scale_dtype, q.device) == (dtype, "float32", "cpu")
    assert q.block == ((1, codes.shape[1]) if block == TOKEN else block)
    assert q.nbytes == codes.size + 4 * scale.size
    assert q.global_scale is None


def check(x: Any, block: tuple, dtype: str, scale: Any = None) -> cufp8.QuantizedTensor:
    """Quantise x and compare with the oracle."""
    q = quantize_activations(x, block=block, dtype=dtype, scale=scale)
    assert_bits(q, *reference.quantize_activations(x, block, dtype, scale), block, dtype)
    return q


# --- every code, every tie ----------------------------------------------------------------------
LARGEST = {"float8_e4m3fn": 0x7E, "float8_e5m2": 0x7B}


def finite_codes(dtype: str) -> np.ndarray:
    return np.flatnonzero(np.isfinite(reference.ELEMENTS[dtype].values)).astype(np.uint8)


@formats
@pytest.mark.parametrize("exponent", [0, 1, -100, 100, -126])
def test_every_code_comes_back(dtype: str, exponent: int) -> None:
    element, codes = reference.ELEMENTS[dtype], finite_codes(dtype)
    rows = np.stack([codes, codes[::-1]])
    scale = 2.0**exponent
    x = (element.values[rows] * scale).astype(F32)
    check(x, GROUP, dtype)  # where not every group has the largest value
    for block, options in ((TOKEN, {}), (TENSOR, {}), (TENSOR, {"scale": scale})):
        q = quantize_activations(x, block=block, dtype=dtype, **options)
        assert_bits(q, rows, np.full((2 if block == TOKEN else 1, 1), scale, F32), block, dtype)


@formats
@pytest.mark.parametrize("exponent", [0, -60, 60])
def test_every_tie_goes_to_the_even_code(dtype: str, exponent: int) -> None:
    element = reference.ELEMENTS[dtype]
    exact = np.array(element.magnitudes) * element.unit
    ties = element.ties.astype(F32)
    values = np.concatenate([exact, ties, np.nextafter(ties, F32(0)), np.nextafter(ties, F32(1e9))])
    row = np.concatenate([values, -values, [element.max]]).astype(F32)
    want = np.array([[reference.nearest_code(v, bool(np.signbit(v)), dtype) for v in row]], np.uint8)
    assert set(want[0]) == set(finite_codes(dtype))
    power = F32(2.0**exponent)
    for block, scale in ((TOKEN, None), (TENSOR, None), (TENSOR, power)):
        q = quantize_activations(row[None] * power, block=block, dtype=dtype, scale=scale)
        assert_bits(q, want, np.full((1, 1), power), block, dtype)


@formats
def test_ties_under_any_scale(rng: np.random.Generator, dtype: str) -> None:
    element = reference.ELEMENTS[dtype]
    amax = np.exp2(rng.uniform(-80, 80, (100, 1))).astype(F32)
    scale = (amax.astype(np.float64) / element.max).astype(F32)
    near = (scale * element.ties[None]).astype(F32)
    x = np.concatenate([near, np.nextafter(near, F32(0)), np.nextafter(near, F32(1e38)), amax], axis=1)
    check(np.minimum(x, amax) * rng.choice(F32([-1, 1]), x.shape), TOKEN, dtype)
    for i in range(10):
        check(x[i], TENSOR, dtype, scale[i, 0])


@formats
@blocks
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_every_16_bit_value(dtype: str, block: tuple, x_dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(kind_of(x_dtype))  # NaN and Inf too
    order = np.argsort(np.abs(values.astype(F32)), kind="stable")
    check(values[order].reshape(-1, 256), block, dtype)
    check(values.reshape(-1, 256), TENSOR, dtype, 0.37)


# --- properties ---------------------------------------------------------------------------------
def matrices(**floats: Any) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 6), st.sampled_from([1, 5, 127, 128, 129, 300])),
        elements=st.floats(width=32, **floats),
        fill=st.floats(width=32, **floats),
    )


any_block = st.sampled_from([TENSOR, TOKEN, GROUP])
any_dtype = st.sampled_from(list(reference.ELEMENTS))
finite = matrices(allow_nan=False, allow_infinity=False)
# Numbers whose multiples by 2^-30 .. 2^30 neither overflow nor become subnormal, as do the scales.
moderate = finite.map(lambda x: np.where(np.abs(x) < 2.0**-60, 0, np.clip(x, -(2.0**60), 2.0**60)).astype(F32))


@given(matrices(), any_block, any_dtype)
def test_anything_agrees_with_the_oracle(x: np.ndarray, block: tuple, dtype: str) -> None:
    q = check(x, block, dtype)
    assert np.isfinite(q.scale).all() and (q.scale >= 2.0**-126).all()
    values = reference.ELEMENTS[dtype].values[q.codes]
    np.testing.assert_array_equal(np.isfinite(values), np.isfinite(x))
    sure = np.isfinite(x)
    assert np.array_equal(np.signbit(values[sure]), np.signbit(x[sure]))


@given(finite, st.floats(2.0**-149, 2.0**127, width=32), any_dtype)
def test_any_static_scale_agrees_with_the_oracle(x: np.ndarray, scale: float, dtype: str) -> None:
    check(x, TENSOR, dtype, scale)


@given(moderate, any_block, any_dtype, st.integers(-30, 30))
def test_a_power_of_two_moves_to_the_scale(x: np.ndarray, block: tuple, dtype: str, exponent: int) -> None:
    power = F32(2.0**exponent)
    a = quantize_activations(x, block=block, dtype=dtype)
    b = quantize_activations(x * power, block=block, dtype=dtype)
    np.testing.assert_array_equal(b.codes, a.codes)
    zero = quantize_activations(np.where(x == 0, 0, F32(1)), block=block, dtype=dtype).scale == 1
    np.testing.assert_array_equal(b.scale[~zero], a.scale[~zero] * power)


@given(matrices(), st.sampled_from([TOKEN, GROUP]), any_dtype, st.randoms())
def test_rows_do_not_see_each_other(x: np.ndarray, block: tuple, dtype: str, random: Any) -> None:
    order = list(range(x.shape[0]))
    random.shuffle(order)
    a = quantize_activations(x, block=block, dtype=dtype)
    b = quantize_activations(x[order], block=block, dtype=dtype)
    np.testing.assert_array_equal(b.codes, a.codes[order])
    np.testing.assert_array_equal(b.scale, a.scale[order])


@given(finite, any_block, any_dtype)
def test_representable_values_come_back(x: np.ndarray, block: tuple, dtype: str) -> None:
    x = np.clip(x, -(2.0**120), F32(2.0**120))
    first = quantize_activations(x, block=block, dtype=dtype)
    # Power-of-two scales, so that code * scale is exact and its block has the largest value.
    scale = np.exp2(np.clip(np.round(np.log2(first.scale)), -100, 100)).astype(F32)
    each = np.repeat(scale, block[1] if block == GROUP else x.shape[1], axis=1)[:, : x.shape[1]]
    codes = first.codes.copy()
    codes[:, :: 128 if block == GROUP else x.shape[1]] = LARGEST[dtype]
    exact = (reference.ELEMENTS[dtype].values[codes] * each).astype(F32)
    q = quantize_activations(exact, block=block, dtype=dtype)
    assert_bits(q, codes, scale, block, dtype)
    np.testing.assert_array_equal(q.dequantize(), exact)


# --- zero, subnormal, NaN and Inf ---------------------------------------------------------------
@formats
@blocks
def test_zeros(dtype: str, block: tuple) -> None:
    x = np.zeros((3, 130), F32)
    x[1] = -0.0
    q = quantize_activations(x, block=block, dtype=dtype)
    assert (q.scale == 1).all()
    np.testing.assert_array_equal(q.codes, [[0] * 130, [0x80] * 130, [0] * 130])
    np.testing.assert_array_equal(q.dequantize().view(np.uint32), x.view(np.uint32))


@formats
@blocks
def test_subnormals(rng: np.random.Generator, dtype: str, block: tuple) -> None:
    x = (rng.integers(-(2**20), 2**20, (4, 200)) * 2.0**-149).astype(F32)
    assert (check(x, block, dtype).scale == F32(2.0**-126)).all()
    top = F32(reference.ELEMENTS[dtype].max * 2.0**-126)
    for amax in (top, np.nextafter(top, F32(0)), np.nextafter(top, F32(1))):
        x[:, ::128] = amax
        check(x, block, dtype)
    check(x, TENSOR, dtype, 2.0**-149)


@formats
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_inf_poison_their_own_value(rng: np.random.Generator, dtype: str, x_dtype: str, value: float) -> None:
    for block, scale in ((TOKEN, None), (GROUP, None), (TENSOR, None), (TENSOR, 0.01)):
        x = activations(rng, 4, 300, dtype=x_dtype)
        x[1, 7] = x[1, 299] = 0  # so that amax is the same without them
        clean = quantize_activations(x, block=block, dtype=dtype, scale=scale)
        x[1, 7] = x[1, 299] = value
        q = quantize_activations(x, block=block, dtype=dtype, scale=scale)
        np.testing.assert_array_equal(q.scale, clean.scale)
        clean.codes[1, [7, 299]] = NAN
        np.testing.assert_array_equal(q.codes, clean.codes)
        for kind in (*FLOATS, "float64"):
            bad = np.argwhere(np.isnan(q.dequantize(kind)))
            assert bad.tolist() == [[1, 7], [1, 299]]


@formats
@blocks
def test_a_block_with_nothing_finite_has_scale_1(dtype: str, block: tuple) -> None:
    q = quantize_activations(np.full((2, 140), math.inf, F32), block=block, dtype=dtype)
    assert (q.scale == 1).all() and (q.codes == NAN).all()


@formats
def test_what_is_beyond_the_largest_value_becomes_it(dtype: str) -> None:
    top = reference.ELEMENTS[dtype].max
    x = F32([top, top * 1.01, 3e38, -top * 1.2, -3e38])
    for scale in (1.0, 1e-30):
        q = quantize_activations(x, block=TENSOR, dtype=dtype, scale=scale)
        np.testing.assert_array_equal(q.dequantize()[0], F32(top) * F32(scale) * F32([1, 1, 1, -1, -1]))


# --- what comes in ------------------------------------------------------------------------------
@formats
@blocks
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(1,), (300,), (1, 1), (5, 127), (5, 128), (3, 129), (2, 3, 260), (2, 1, 3, 4)], ids=str
)
def test_dtypes_and_shapes(rng: np.random.Generator, dtype: str, block: tuple, x_dtype: str, shape: tuple) -> None:
    q = check(activations(rng, *shape, dtype=x_dtype, wild=True), block, dtype)
    m, k = math.prod(shape[:-1]), shape[-1]
    assert q.shape == (m, k)
    assert q.scale.shape == {TENSOR: (1, 1), TOKEN: (m, 1), GROUP: (m, -(-k // 128))}[block]


@formats
@blocks
@pytest.mark.parametrize("shape", [(0, 5), (0, 300), (3, 0, 4)], ids=str)
def test_no_tokens(dtype: str, block: tuple, shape: tuple) -> None:
    q = check(np.empty(shape, F32), block, dtype)
    assert q.shape == (0, shape[-1])
    assert q.dequantize("bfloat16").shape == q.shape
    assert quantize_activations(np.empty(shape, F32), block=block, dtype=dtype, out=q) is q
    if block == TENSOR:
        assert q.scale.tolist() == [[1]]
        assert check(np.empty(shape, F32), block, dtype, 0.5).scale.tolist() == [[0.5]]


LAYOUTS = {
    "fortran": np.asfortranarray,
    "transposed": lambda x: x.T,
    "swapped": lambda x: x.reshape(6, 5, -1).transpose(1, 0, 2),
    "features first": lambda x: x.reshape(6, 5, -1).transpose(2, 0, 1),
    "backwards": lambda x: x[::-1, ::-1],
    "every third feature": lambda x: x[:, 1::3],
    "inner block": lambda x: x[3:-2, 5:-7],
    "one token for all": lambda x: np.broadcast_to(x[2], (6, x.shape[1])),
    "unaligned": lambda x: np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape),
    "other byte order": lambda x: x.astype(x.dtype.newbyteorder()) if x.dtype != ml_dtypes.bfloat16 else x,
}


@formats
@blocks
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_strides(rng: np.random.Generator, dtype: str, block: tuple, layout: str, x_dtype: str) -> None:
    x = LAYOUTS[layout](activations(rng, 30, 290, dtype=x_dtype, wild=True))
    before = x.copy()
    x.flags.writeable = False
    check(x, block, dtype)
    assert x.tobytes() == before.tobytes()


@blocks
@pytest.mark.parametrize("shape", [(2500, 1031), (2, 2_100_003), (1_100_001, 1)], ids=str)
def test_many_chunks(rng: np.random.Generator, block: tuple, shape: tuple) -> None:
    x = rng.standard_normal(shape, F32)
    x[-1, -1] = -50  # the amax of all is in the last chunk
    x[0, 0] = math.nan
    q = quantize_activations(x, block=block)
    element = reference.ELEMENTS["float8_e4m3fn"]
    size = 128 if block == GROUP else shape[1]
    pad = np.zeros((shape[0], -(-shape[1] // size) * size), F32)
    pad[:, : shape[1]] = np.nan_to_num(np.abs(x))
    amax = pad.reshape(shape[0], -1, size).max(axis=2)
    amax = amax.max(keepdims=True) if block == TENSOR else amax
    scale = np.where(amax == 0, 1, amax / F32(element.max))
    np.testing.assert_array_equal(q.scale, scale)
    quotient = x / np.repeat(scale, size, axis=1)[:, : shape[1]]
    want = reference.encode(np.nan_to_num(quotient))
    want[0, 0] = NAN
    np.testing.assert_array_equal(q.codes, want)
    view = np.empty((shape[1], shape[0]), F32).T
    view[...] = x
    np.testing.assert_array_equal(quantize_activations(view, block=block).codes, want)


@formats
@blocks
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_torch_and_jax_on_the_cpu(rng: np.random.Generator, dtype: str, block: tuple, x_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    x = activations(rng, 3, 4, 150, dtype=x_dtype, wild=True)
    t = torch.from_numpy(x.astype(F32)).to(getattr(torch, x_dtype))
    want = quantize_activations(x, block=block, dtype=dtype)
    for tensor in (t, t.transpose(0, 1).contiguous().transpose(0, 1), t.clone().requires_grad_().detach()):
        q = quantize_activations(tensor, block=block, dtype=dtype)
        assert_bits(q, want.codes, want.scale, block, dtype)
    jax = pytest.importorskip("jax")
    q = quantize_activations(jax.device_put(x, jax.devices("cpu")[0]), block=block, dtype=dtype)
    assert_bits(q, want.codes, want.scale, block, dtype)


def test_a_tensor_that_requires_grad() -> None:
    torch = pytest.importorskip("torch")
    t = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"quantize_activations: .* pass x\.detach\(\)"):
        quantize_activations(t)
    with torch.no_grad():
        assert quantize_activations(t).shape == (2, 3)


@pytest.mark.parametrize("scale", [0.25, F32(0.25), np.full((1, 1), 0.25, F32), np.array(0.25, F32)], ids=repr)
def test_forms_of_a_static_scale(scale: Any) -> None:
    q = quantize_activations(F32([[1, -2]]), block=TENSOR, scale=scale)
    assert_bits(q, reference.encode([[4, -8]]), np.full((1, 1), 0.25, F32), TENSOR, "float8_e4m3fn")
    torch = pytest.importorskip("torch")
    assert quantize_activations(F32([[1, -2]]), block=TENSOR, scale=torch.tensor(0.25)).scale == 0.25


# --- out ----------------------------------------------------------------------------------------
@formats
@blocks
@pytest.mark.parametrize("k", [20, 128, 300])
def test_out_is_overwritten_and_returned(rng: np.random.Generator, dtype: str, block: tuple, k: int) -> None:
    out = quantize_activations(activations(rng, 6, k), block=block, dtype=dtype)
    codes, scale = out.codes, out.scale
    x = activations(rng, 2, 3, k, wild=True)
    assert quantize_activations(x, block=block, dtype=dtype, out=out) is out
    assert out.codes is codes and out.scale is scale
    assert_bits(out, *reference.quantize_activations(x, block, dtype), block, dtype)


def test_out_over_memory_of_another() -> None:
    buffer = np.full((2, 16), 0xEE, np.uint8)
    out = cufp8.QuantizedTensor(
        buffer[:, :5],
        np.ones(2, F32),
        dtype="float8_e5m2",
        scale_dtype="float32",
        shape=(2, 5),
        block=TOKEN,
        activations=True,
    )
    quantize_activations(np.ones((2, 5), F32), dtype="float8_e5m2", out=out)
    assert (buffer[:, :5] == 0x7B).all() and (buffer[:, 5:] == 0xEE).all()


def test_an_out_that_does_not_fit_stays_as_it_is() -> None:
    x = np.ones((3, 40), F32)
    out = quantize_activations(2 * x)
    codes, scale = out.codes.copy(), out.scale.copy()
    mine = (r"float8_e4m3fn with float32 scales, block \(1, 40\), shape \(3, 40\) on cpu",)
    for error, words, wrong, options in [
        (ValueError, (*mine, r"shape \(2, 40\)"), x[:2], {}),
        (ValueError, (*mine, r"shape \(3, 39\)"), x[:, 1:], {}),
        (ValueError, (*mine, "float8_e5m2"), x, {"dtype": "float8_e5m2"}),
        (ValueError, (*mine, r"block \(1, 128\)"), x, {"block": GROUP}),
        (ValueError, (*mine, r"block \(-1, -1\)"), x, {"block": TENSOR}),
        (ValueError, ("scale is 0.0",), x, {"block": TENSOR, "scale": 0.0}),
        (TypeError, ("float64",), x.astype(float), {}),
        (
            ValueError,
            ("out.codes shares memory with x",),
            np.broadcast_to(out.codes.view(np.float16)[0, :1], (3, 40)),
            {},
        ),
        (ValueError, ("out.scale shares memory with x",), np.broadcast_to(out.scale, (3, 40)), {}),
    ]:
        with pytest.raises(error) as caught:
            quantize_activations(wrong, out=out, **options)
        assert all(re.search(word, str(caught.value)) for word in words), caught.value
        np.testing.assert_array_equal(out.codes, codes)
        np.testing.assert_array_equal(out.scale, scale)
    weight = cufp8.quantize(np.ones((3, 32), F32), "MXFP8A16")
    with pytest.raises(ValueError, match="float8_e8m0fnu scales"):
        quantize_activations(np.ones((3, 32), F32), out=weight)
    with pytest.raises(TypeError, match="out is a ndarray"):
        quantize_activations(x, out=np.empty((3, 40), np.uint8))
    for name in ("codes", "scale"):
        out = quantize_activations(x)
        getattr(out, name).flags.writeable = False
        with pytest.raises(ValueError, match=f"out.{name} is read-only"):
            quantize_activations(x, out=out)


# --- what is refused ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "x",
    [np.ones((2, 3), kind) for kind in (np.float64, np.int8, np.complex64, bool, ml_dtypes.float8_e4m3fn)],
    ids=lambda x: x.dtype.name,
)
def test_dtypes_that_are_refused(x: np.ndarray) -> None:
    with pytest.raises(TypeError) as error:
        quantize_activations(x)
    text = f"quantize_activations: x is {x.dtype}; allowed are bfloat16, float16, float32."
    assert str(error.value) == text


@pytest.mark.parametrize("x", ["x", None, 3.0, [[1.0]]], ids=repr)
def test_things_that_are_no_arrays(x: Any) -> None:
    with pytest.raises(TypeError, match=f"quantize_activations: x is a {type(x).__name__}; allowed is a NumPy"):
        quantize_activations(x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 0, 0)], ids=str)
def test_shapes_that_are_refused(shape: tuple) -> None:
    with pytest.raises(ValueError) as error:
        quantize_activations(np.ones(shape, F32))
    text = f"quantize_activations: x has shape {list(shape)}; needed is [..., K] with K at least 1."
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "e4m3"}, "dtype is 'e4m3'; allowed are float8_e4m3fn, float8_e5m2."),
        ({"block": 128}, "block is 128; allowed are (-1, -1), (1, -1), (1, 128): per tensor, per token, per group."),
        ({"dtype": "float8_e8m0fnu"}, "dtype is 'float8_e8m0fnu'; allowed are float8_e4m3fn, float8_e5m2."),
        (
            {"block": (128, 128)},
            "block is (128, 128); allowed are (-1, -1), (1, -1), (1, 128): per tensor, per token, per group.",
        ),
        (
            {"scale": 1.0},
            "a scale was given with block (1, -1); a given scale is for the whole of x: pass block=(-1, -1), or leave "
            "the scale out.",
        ),
        ({"block": TENSOR, "scale": -1.0}, "scale is -1.0 as float32; needed is finite and above 0."),
        ({"block": TENSOR, "scale": 0}, "scale is 0.0 as float32; needed is finite and above 0."),
        ({"block": TENSOR, "scale": 1e-60}, "scale is 0.0 as float32; needed is finite and above 0."),
        ({"block": TENSOR, "scale": 1e60}, "scale is inf as float32; needed is finite and above 0."),
        ({"block": TENSOR, "scale": F32([math.nan])}, "scale is nan as float32; needed is finite and above 0."),
        ({"block": TENSOR, "scale": np.ones(2, F32)}, "scale has shape [2]; needed is one element."),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError) as error:
        quantize_activations(np.ones((2, 256), F32), **options)
    assert str(error.value) == f"quantize_activations: {text}"


@pytest.mark.parametrize("scale", [np.ones(1), np.ones(1, np.float16), "1", [1.0]], ids=repr)
def test_scales_of_the_wrong_type(scale: Any) -> None:
    with pytest.raises(TypeError, match="quantize_activations: scale is"):
        quantize_activations(np.ones((2, 3), F32), block=TENSOR, scale=scale)


def test_a_scale_on_a_gpu_for_what_is_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    there = types.SimpleNamespace(dtype=np.dtype(F32), size=1, device=types.SimpleNamespace(id=3))
    array = interop.array
    monkeypatch.setattr(interop, "array", lambda a, what: a if a is there else array(a, what))
    with pytest.raises(ValueError) as error:
        quantize_activations(np.ones((2, 3), F32), block=TENSOR, scale=there)
    text = "scale is on cuda:3, what is quantised on cpu; move one of them."
    assert str(error.value) == f"quantize_activations: {text}"


# --- QuantizedTensor ----------------------------------------------------------------------------
def tensor(q: cufp8.QuantizedTensor, **changes: Any) -> cufp8.QuantizedTensor:
    fields = {n: getattr(q, n) for n in ("codes", "scale", "dtype", "scale_dtype", "shape", "block")} | changes
    return cufp8.QuantizedTensor(fields.pop("codes"), fields.pop("scale"), **fields)


@formats
@blocks
@pytest.mark.parametrize("k", [20, 128, 300])
def test_a_tensor_from_its_parts(rng: np.random.Generator, dtype: str, block: tuple, k: int) -> None:
    x = activations(rng, 5, k)
    q = quantize_activations(x, block=block, dtype=dtype)
    own = q.codes.view(getattr(ml_dtypes, dtype))
    for again in (tensor(q), tensor(q, codes=own, block=block), q.to("cpu")):
        assert np.shares_memory(again.codes, q.codes) and np.shares_memory(again.scale, q.scale)
        assert_bits(again, q.codes, q.scale, block, dtype)
    assert dtype in repr(q) and "[5, " in repr(q)
    if q.scale.shape[1] == 1:
        assert tensor(q, scale=q.scale[:, 0]).scale.shape == q.scale.shape
    if block == TENSOR:
        assert tensor(q, scale=q.scale.reshape(())).scale.shape == (1, 1)


@formats
@blocks
@pytest.mark.parametrize("kind", [*FLOATS, "float64"])
@pytest.mark.parametrize("shape", [(5, 20), (5, 300), (3, 1_100_000)], ids=str)
def test_dequantize(rng: np.random.Generator, dtype: str, block: tuple, kind: str, shape: tuple) -> None:
    x = rng.standard_normal(shape, F32)
    q = quantize_activations(x, block=block, dtype=dtype)
    back = q.dequantize(kind)
    assert back.dtype == kind_of(kind) and back.shape == shape
    each = np.repeat(q.scale, 128 if block == GROUP else shape[1], axis=1)[:, : shape[1]]
    exact = reference.ELEMENTS[dtype].values[q.codes] * each.astype(np.float64)
    # code * scale rounded to float32, and again to 16 bits; in float64 it is exact where a row has several scales.
    single = exact if kind == "float64" and q.scale.shape[1] > 1 else exact.astype(F32)
    np.testing.assert_array_equal(back.astype(np.float64), single.astype(back.dtype).astype(np.float64))


@formats
@blocks
def test_nan_codes_are_for_activations(dtype: str, block: tuple) -> None:
    x = np.ones((3, 5), F32)
    x[1, 4] = x[2, 0] = math.nan
    q = quantize_activations(x, block=block, dtype=dtype)
    kinds = "NaN or Inf" if dtype == "float8_e5m2" else "NaN"
    with pytest.raises(ValueError) as error:
        tensor(q)
    assert str(error.value) == (
        f"QuantizedTensor: 2 of the {dtype} codes are {kinds}, the first at [1, 4]; a weight may have none, "
        "activations may: QuantizedTensor(..., activations=True)."
    )
    assert_bits(tensor(q, activations=True), q.codes, q.scale, block, dtype)
    none = quantize_activations(x[:0], block=block, dtype=dtype)
    with pytest.raises(ValueError, match="each at least 1"):
        tensor(none)
    assert_bits(tensor(none, activations=True), none.codes, none.scale, block, dtype)
    with pytest.raises(ValueError, match="K at least 1"):
        tensor(none, shape=(0, 0), activations=True)


def test_inf_codes_of_e5m2_are_for_activations() -> None:
    q = quantize_activations(np.ones((2, 3), F32), dtype="float8_e5m2")
    q.codes[1, 2] = 0xFC
    with pytest.raises(ValueError, match=r"1 of .* NaN or Inf, the first at \[1, 2\]"):
        tensor(q)
    assert tensor(q, activations=True).dequantize()[1, 2] == -math.inf


@formats
@blocks
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_scales_that_are_refused(dtype: str, block: tuple, value: float) -> None:
    q = quantize_activations(np.ones((2, 300), F32), block=block, dtype=dtype)
    q.scale[-1, -1] = value
    with pytest.raises(ValueError, match="1 of .* scales are not finite and positive"):
        tensor(q, activations=True)


def test_parts_that_do_not_fit() -> None:
    whole = quantize_activations(np.ones((3, 300), F32), block=TENSOR)
    group = quantize_activations(np.ones((3, 300), F32), block=GROUP)
    for q, changes, words in [
        (whole, {"scale": np.ones((3, 1), F32)}, ["[3, 1]", "[1, 1]", "a scale per tensor"]),
        (whole, {"scale": np.ones(3, F32)}, ["[3]", "[1, 1]"]),
        (group, {"scale": np.ones((3, 1), F32)}, ["[3, 1]", "[3, 3]", "a scale per 128 values of a row"]),
        (group, {"block": (64, 128)}, ["(64, 128)", "(1, 300)", "(-1, -1)", "(1, 128)"]),
        (group, {"block": (1, 64), "dtype": "float8_e5m2"}, ["(1, 64)", "float8_e5m2", "(1, 128)"]),
    ]:
        with pytest.raises(ValueError) as error:
            tensor(q, **changes)
        for word in words:
            assert word in str(error.value)


SCHEME = {TENSOR: "FP8_TENSOR", TOKEN: "FP8_TOKEN", GROUP: "FP8_GROUP"}


@formats
@blocks
def test_they_are_called_what_they_are(dtype: str, block: tuple) -> None:
    q = quantize_activations(np.ones((3, 5), F32), block=block, dtype=dtype)
    for one in (q, q.to("cpu"), q._moved(lambda a: a), tensor(q, activations=True)):
        assert one.scheme == SCHEME[block] and one.activations
        assert repr(one) == f"QuantizedTensor([3, 5], {SCHEME[block]}, {dtype}, device='cpu')"
    weight = tensor(q)
    assert not weight.activations
    known = {("float8_e4m3fn", TOKEN): "FP8A16", ("float8_e4m3fn", TENSOR): "FP8"}
    assert weight.scheme == known.get((dtype, block), SCHEME[block])


@formats
@blocks
def test_no_layer_takes_them_for_its_weight(rng: np.random.Generator, dtype: str, block: tuple) -> None:
    x = rng.standard_normal((7, 300), F32)
    x[1, 2] = math.nan
    q = quantize_activations(x, block=block, dtype=dtype)
    none = quantize_activations(x[:0], block=block, dtype=dtype)
    for one in (q, none, tensor(quantize_activations(x[2:], block=block, dtype=dtype), activations=True)):
        with pytest.raises(ValueError) as error:
            cufp8.Linear.from_quantized(one, device="cpu")
        assert str(error.value).startswith(f"Linear: the QuantizedTensor holds activations ({SCHEME[block]}: {dtype}, ")
        assert "allowed are weights of FP8A16, " in str(error.value) and "quantize(w)" in str(error.value)
    weight = tensor(quantize_activations(x[2:], block=block, dtype=dtype))
    if weight.scheme == "FP8A16":
        y = cufp8.Linear.from_quantized(weight, device="cpu")(x[:1])
        np.testing.assert_allclose(y, x[:1] @ weight.dequantize("float64").T, rtol=1e-4, atol=1e-4)
    elif weight.scheme == "FP8":
        assert cufp8.Linear.from_quantized(weight, device="cpu", input_scale=0.01)(x[:1]).shape == (1, 5)
    else:
        with pytest.raises(ValueError, match=f"is of no scheme of weights .{SCHEME[block]}: {dtype}"):
            cufp8.Linear.from_quantized(weight, device="cpu")


# --- what stands before ---------------------------------------------------------------------------
FUSED = ((TOKEN, None), (GROUP, None), (TENSOR, 0.02))
fused = pytest.mark.parametrize(("block", "scale"), FUSED, ids=["token", "group", "tensor"])
x_dtypes = pytest.mark.parametrize("x_dtype", FLOATS)


def columns(block: tuple, k: int) -> int:
    return block[1] if block == GROUP else k


def test_a_sum_of_products_is_rounded_once(rng: np.random.Generator) -> None:
    a, b, c = ((rng.standard_normal(3000) * np.exp2(rng.integers(-30, 30, 3000))).astype(F32) for _ in range(3))
    c[::3] = -(a[::3].astype(np.float64) * b[::3])  # what is left is what the rounding of c took
    c[1::3] = a[1::3] * b[1::3] * F32(2.0**24)  # far from the product: ties, all but
    a[1::3] = np.exp2(rng.integers(-9, 9, 1000))
    a[5:8], b[5:8], c[5:8] = 2.0**-70, 2.0**-75, [2.0**-149, 2.0**-140, 3 * 2.0**-149]
    wanted = [reference.fma(*map(float, each)) for each in zip(a, b, c, strict=True)]
    np.testing.assert_array_equal(activations_module._fma(a, b, c), F32(wanted))
    odd = F32([math.inf, math.nan, -math.inf, 3e38])
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(activations_module._fma(odd, odd, -odd), odd * odd - odd)


@x_dtypes
@pytest.mark.parametrize("k", [1, 15, 130, 512, 1030, 2100])
def test_the_order_of_a_sum_of_squares(rng: np.random.Generator, x_dtype: str, k: int) -> None:
    h = activations(rng, 2, k, dtype=x_dtype)
    piece = 16 // h.itemsize
    got = activations_module._sum_of_squares(h.astype(F32), piece)
    threads = min(1024, 32 * -(-k // 1024))
    wanted = [reference.sum_of_squares([float(v) for v in row], threads, piece) for row in h]
    np.testing.assert_array_equal(got[:, 0], F32(wanted))


@fused
@formats
@x_dtypes
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("k", [1, 130, 4097])
def test_rms_norm(
    rng: np.random.Generator, block: tuple, scale: Any, dtype: str, x_dtype: str, with_residual: bool, k: int
) -> None:
    kind = kind_of(x_dtype)
    x, r = (activations(rng, 2, 3, k, dtype=x_dtype) for _ in range(2))
    r = np.clip(r.astype(F32), -1e4, 1e4).astype(kind).transpose(1, 0, 2).copy().transpose(1, 0, 2)
    w = rng.normal(1, 0.3, k).astype(kind)
    q = rms_norm_quantize(x, w, 1e-5, r if with_residual else None, block=block, dtype=dtype, scale=scale)
    exact, h = reference.rms_norm(x, w, 1e-5, r if with_residual else None, x_dtype)
    if with_residual:
        q, total = q
        assert total.dtype == kind and total.shape == x.shape
        np.testing.assert_array_equal(total.astype(np.float64), h)
    assert q.shape == (6, k) and q.scheme == SCHEME[block] and q.dtype == dtype
    reference.assert_quantised(q.codes, q.scale, exact, columns(block, k), dtype, 2.0**-20)


@fused
@formats
@x_dtypes
@pytest.mark.parametrize("k", [1, 130, 2049])
def test_silu_mul(rng: np.random.Generator, block: tuple, scale: Any, dtype: str, x_dtype: str, k: int) -> None:
    x = np.concatenate([rng.uniform(-60, 60, (2, 3, k)), rng.standard_normal((2, 3, k))], axis=2).astype(
        kind_of(x_dtype)
    )
    x[0, 0, :k] = [0, -0.0, 100, -100, 88, -88][: min(k, 6)] + [1] * (k - 6)
    q = silu_mul_quantize(x, block=block, dtype=dtype, scale=scale)
    assert q.shape == (6, k) and q.scheme == SCHEME[block] and q.dtype == dtype
    reference.assert_quantised(q.codes, q.scale, reference.silu_mul(x), columns(block, k), dtype, 2.0**-18.5)


def test_sigmoid_is_as_near_as_is_said(rng: np.random.Generator) -> None:
    v = np.concatenate([rng.uniform(-90, 90, 200_000), rng.uniform(-16, 16, 200_000), rng.normal(0, 1e-3, 9999), [0]])
    v = v.astype(F32)
    got = activations_module._sigmoid(v).astype(np.float64)
    exact = 1 / (1 + np.exp(-np.clip(v.astype(np.float64), -87, 87)))
    error = np.abs(got / exact - 1)
    assert error.max() < 2.0**-19 and error[np.abs(v) < 16].max() < 2.0**-21 and got[-1] == 0.5


def test_computed_values_that_are_not_finite(rng: np.random.Generator) -> None:
    w = np.ones(200, F32)
    x = rng.standard_normal((4, 200), F32)
    clean = rms_norm_quantize(x, w, 0)
    x[1, 7], x[2, 7] = math.nan, math.inf
    q = rms_norm_quantize(x, w, 0)
    np.testing.assert_array_equal(q.codes[[0, 3]], clean.codes[[0, 3]])
    assert (q.codes[1] == NAN).all() and q.codes[2, 7] == NAN and not (np.delete(q.codes[2], 7) & 0x7F).any()
    assert (q.scale[1:3] == 1).all()
    assert (rms_norm_quantize(np.zeros((2, 9), F32), w[:9], 1e-6).codes == 0).all()
    gate_up = np.tile(F32([1, 2, 3, 1, 1, 1]), (5, 1))
    gate_up[0, 1], gate_up[1, 4], gate_up[2, 1] = math.nan, math.inf, -math.inf
    gate_up[3, [1, 4]] = 3e38, 3e38  # beyond float32
    q = silu_mul_quantize(gate_up)
    assert (q.codes[:4, 1] == NAN).all() and (q.codes[:4, [0, 2]] == q.codes[4, [0, 2]]).all()


@fused
@x_dtypes
def test_fused_forms_take_views_and_other_libraries(
    rng: np.random.Generator, block: tuple, scale: Any, x_dtype: str
) -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    x = activations(rng, 30, 260, dtype=x_dtype)
    x = np.clip(x.astype(F32), -100, 100).astype(x.dtype)
    w = rng.standard_normal(520).astype(x.dtype)[::2]
    options = {"block": block, "scale": scale}
    silu, (norm, total) = silu_mul_quantize(x, **options), rms_norm_quantize(x, w, 1e-6, x, **options)
    wide = np.zeros((30, 600), x.dtype)
    wide[:, 7:527:2] = x
    for view in (np.asfortranarray(x), wide[:, 7:527:2]):
        assert_bits(silu_mul_quantize(view, **options), silu.codes, silu.scale, block, "float8_e4m3fn")
        again, h = rms_norm_quantize(view, w, 1e-6, np.asfortranarray(view), **options)
        assert_bits(again, norm.codes, norm.scale, block, "float8_e4m3fn")
        np.testing.assert_array_equal(h, total)
    for into in (
        lambda a: torch.from_numpy(np.ascontiguousarray(a).astype(F32)).to(getattr(torch, x_dtype)),
        lambda a: jax.device_put(a, jax.devices("cpu")[0]),
    ):
        assert_bits(silu_mul_quantize(into(x), **options), silu.codes, silu.scale, block, "float8_e4m3fn")
        again, h = rms_norm_quantize(into(x), into(w), 1e-6, into(x), **options)
        assert_bits(again, norm.codes, norm.scale, block, "float8_e4m3fn")
        assert type(h) is type(into(x)) and h.dtype == into(x).dtype
        np.testing.assert_array_equal(reference.to_float64(h), total.astype(np.float64))


@fused
def test_fused_forms_without_tokens_and_with_out(rng: np.random.Generator, block: tuple, scale: Any) -> None:
    options = {"block": block, "scale": scale}
    x, w = rng.standard_normal((6, 260), F32), np.ones(260, F32)
    for call in (
        lambda x, **more: silu_mul_quantize(np.concatenate([x, x], axis=1), **options, **more),
        lambda x, **more: rms_norm_quantize(x, w, 1e-6, **options, **more),
    ):
        assert call(x[:0]).shape == (0, 260)
        q, out = call(x), call(x + 1)
        assert call(x, out=out) is out
        assert_bits(out, q.codes, q.scale, block, "float8_e4m3fn")


def test_what_fused_forms_refuse() -> None:
    x, w = np.ones((2, 4), F32), np.ones(4, F32)
    torch = pytest.importorskip("torch")
    scaleless = "block (-1, -1) needs a scale here; pass one, or a block of (1, -1) or (1, 128)."
    for error, text, call in [
        (ValueError, f"rms_norm_quantize: {scaleless}", lambda: rms_norm_quantize(x, w, 1e-6, block=TENSOR)),
        (ValueError, f"silu_mul_quantize: {scaleless}", lambda: silu_mul_quantize(x, block=TENSOR)),
        (ValueError, "silu_mul_quantize: gate_up has shape [2, 3]; needed is [..., 2K]: K gates and K factors.",
         lambda: silu_mul_quantize(x[:, :3])),
        (TypeError, "silu_mul_quantize: gate_up is float64; allowed are bfloat16, float16, float32.",
         lambda: silu_mul_quantize(x.astype(float))),
        (TypeError, "rms_norm_quantize: weight is float16, x float32; convert it once.",
         lambda: rms_norm_quantize(x, w.astype(np.float16), 1e-6)),
        (ValueError, "rms_norm_quantize: weight has shape [3]; needed is [4].",
         lambda: rms_norm_quantize(x, w[:3], 1e-6)),
        (ValueError, "rms_norm_quantize: residual has shape [1, 4]; needed is [2, 4].",
         lambda: rms_norm_quantize(x, w, 1e-6, x[:1])),
        (TypeError, "rms_norm_quantize: residual is float64, x float32; convert it once.",
         lambda: rms_norm_quantize(x, w, 1e-6, x.astype(float))),
        (ValueError, "rms_norm_quantize: eps is -1.0; needed is finite and 0 or more.",
         lambda: rms_norm_quantize(x, w, -1.0)),
        (ValueError, "rms_norm_quantize: eps is nan; needed is finite and 0 or more.",
         lambda: rms_norm_quantize(x, w, math.nan)),
        (RuntimeError, "rms_norm_quantize: the torch tensor requires grad and grad mode is on, but no gradient flows "
         "through cufp8 yet; call under torch.no_grad() or pass x.detach().",
         lambda: rms_norm_quantize(x, torch.nn.Parameter(torch.ones(4)), 1e-6)),
    ]:  # fmt: skip
        with pytest.raises(error) as caught:
            call()
        assert str(caught.value) == text


# --- on the GPU ---------------------------------------------------------------------------------
COLUMNS = (1, 7, 8, 127, 128, 129, 4096, 14_336, 28_672, 65_537)


def on_device(a: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(np.ascontiguousarray(a).view(f"u{a.itemsize}")).view(a.dtype)


def assert_same(q: cufp8.QuantizedTensor, wanted: cufp8.QuantizedTensor, *case: Any) -> None:
    """What the GPU made has the bits that the host makes, and is where and what it should be."""
    import cupy

    assert isinstance(q.codes, cupy.ndarray) and isinstance(q.scale, cupy.ndarray), case
    assert q.device == f"cuda:{cupy.cuda.Device().id}" and q.activations
    assert (q.shape, q.block, q.scheme, q.dtype) == (wanted.shape, wanted.block, wanted.scheme, wanted.dtype), case
    cupy.cuda.runtime.deviceSynchronize()
    scale, codes = q.scale.get(), q.codes.get()
    wrong = scale.view(np.uint32) != wanted.scale.view(np.uint32)
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        text = f"{int(wrong.sum())} of {wrong.size} scales, the first [{i}, {j}]: {scale[i, j]!r}, not"
        raise AssertionError(f"{case}: {text} {wanted.scale[i, j]!r}")
    wrong = codes != wanted.codes
    if wrong.any():
        i, j = np.argwhere(wrong)[0]
        text = f"{int(wrong.sum())} of {wrong.size} codes, the first [{i}, {j}]: {codes[i, j]:#04x}, not"
        raise AssertionError(f"{case}: {text} {wanted.codes[i, j]:#04x}")


def check_on_device(x: np.ndarray, block: tuple, dtype: str, scale: Any = None, view: Any = None) -> Any:
    """Quantise (a view of) x on the device and on the host."""
    there = on_device(x)
    seen, same = (there, x) if view is None else (view(there), view(x))
    q = quantize_activations(seen, block=block, dtype=dtype, scale=scale)
    assert_same(q, quantize_activations(same, block=block, dtype=dtype, scale=scale), x.dtype, x.shape, block, dtype)
    return q


def fuse_on_device(x: np.ndarray, w: np.ndarray, r: np.ndarray, block: tuple, dtype: str, scale: Any) -> None:
    """Both fused forms, with and without a residual, on the device and on the host."""
    options = {"block": block, "dtype": dtype, "scale": scale}
    case = x.dtype, x.shape, block, dtype
    x_there, w_there, r_there = on_device(x), on_device(w), on_device(r)
    if x.shape[-1] % 2 == 0:
        assert_same(silu_mul_quantize(x_there, **options), silu_mul_quantize(x, **options), "silu", *case)
    assert_same(rms_norm_quantize(x_there, w_there, 1e-6, **options), rms_norm_quantize(x, w, 1e-6, **options), *case)
    q, h = rms_norm_quantize(x_there, w_there, 1e-6, r_there, **options)
    wanted, total = rms_norm_quantize(x, w, 1e-6, r, **options)
    assert_same(q, wanted, "residual", *case)
    assert h.dtype == x.dtype and h.shape == x.shape
    np.testing.assert_array_equal(h.get().astype(np.float64), total.astype(np.float64))


@pytest.mark.gpu
@formats
@blocks
@x_dtypes
@pytest.mark.parametrize("k", COLUMNS)
def test_device_shapes(rng: np.random.Generator, dtype: str, block: tuple, x_dtype: str, k: int) -> None:
    for m in (0, 1, 3, 17, 300) if k <= 4096 else (1, 3, 17) if k < 20_000 else (1, 3):
        check_on_device(activations(rng, m, k, dtype=x_dtype, wild=True), block, dtype)
        if block == TENSOR:
            check_on_device(activations(rng, m, k, dtype=x_dtype, wild=True), block, dtype, 0.37)


@pytest.mark.gpu
@pytest.mark.sanitize
@blocks
@x_dtypes
def test_device_small(rng: np.random.Generator, block: tuple, x_dtype: str) -> None:
    for dtype, k in zip(reference.ELEMENTS, (264, 129), strict=True):
        x = activations(rng, 3, k, dtype=x_dtype, wild=True)
        check_on_device(x, block, dtype)
        check_on_device(activations(rng, 7, k + 9, dtype=x_dtype), block, dtype, view=lambda a: a[1::2, 1:-8])
        scale = None if block != TENSOR else 0.3
        x = np.clip(activations(rng, 3, k, dtype=x_dtype), -50, 50).astype(x.dtype)
        fuse_on_device(x, rng.standard_normal(k).astype(x.dtype), x[::-1], block, dtype, scale)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_device_static_scale_small(rng: np.random.Generator) -> None:
    x = activations(rng, 3, 136, dtype="bfloat16", wild=True)
    check_on_device(x, TENSOR, "float8_e4m3fn", 0.02)
    assert_same(
        quantize_activations(on_device(x), block=TENSOR, scale=on_device(F32([0.02]))),
        quantize_activations(x, block=TENSOR, scale=0.02),
    )


VIEWS = {
    "transposed": lambda x: x.T,
    "swapped": lambda x: x.reshape(6, 5, -1).transpose(1, 0, 2),
    "features first": lambda x: x.reshape(6, 5, -1).transpose(2, 0, 1),
    "backwards": lambda x: x[::-1, ::-1],
    "rows backwards": lambda x: x[::-1],
    "every third feature": lambda x: x[:, 1::3],
    "every other row": lambda x: x[::2],
    "inner block": lambda x: x[3:-2, 5:-7],
    "aligned block": lambda x: x[1:, 8:-8],
    "one row": lambda x: x[4],
    "a column": lambda x: x[:, 5:6],
    "off 16 bytes": lambda x: x.reshape(-1)[1:2561].reshape(10, 256),
    "off 8 bytes": lambda x: x.reshape(-1)[8 // x.itemsize :][:2560].reshape(10, 256),
}


@pytest.mark.gpu
@formats
@blocks
@pytest.mark.parametrize("layout", VIEWS)
@x_dtypes
def test_device_strides(rng: np.random.Generator, dtype: str, block: tuple, layout: str, x_dtype: str) -> None:
    import cupy

    x = activations(rng, 30, 272, dtype=x_dtype, wild=True)
    there = on_device(x)
    before = there.copy()
    q = quantize_activations(VIEWS[layout](there), block=block, dtype=dtype)
    assert_same(q, quantize_activations(VIEWS[layout](x), block=block, dtype=dtype))
    assert bool((there.view(f"u{x.itemsize}") == before.view(f"u{x.itemsize}")).all())
    one = cupy.broadcast_to(there[2], (6, 272))
    wanted = quantize_activations(np.broadcast_to(x[2], (6, 272)), block=block, dtype=dtype)
    assert_same(quantize_activations(one, block=block, dtype=dtype), wanted)


@pytest.mark.gpu
@fused
@pytest.mark.parametrize("layout", VIEWS)
@x_dtypes
def test_device_strides_of_fused_forms(
    rng: np.random.Generator, block: tuple, scale: Any, layout: str, x_dtype: str
) -> None:
    options = {"block": block, "scale": scale}
    x, r = (np.clip(activations(rng, 30, 272, dtype=x_dtype), -60, 60).astype(kind_of(x_dtype)) for _ in range(2))
    view = VIEWS[layout]
    x_there, r_there, there, same = on_device(x), on_device(r), view(on_device(x)), view(x)
    k = same.shape[-1]
    w = rng.standard_normal(2 * k + 1).astype(x.dtype)
    w_there = on_device(w)
    if k % 2 == 0:
        assert_same(silu_mul_quantize(there, **options), silu_mul_quantize(same, **options), layout)
    for some in (slice(0, k), slice(1, k + 1), slice(None, 2 * k, 2)):
        q, h = rms_norm_quantize(there, w_there[some], 1e-6, view(r_there), **options)
        wanted, total = rms_norm_quantize(same, w[some], 1e-6, view(r), **options)
        assert_same(q, wanted, layout, some)
        np.testing.assert_array_equal(h.get().astype(np.float64), total.astype(np.float64))
    if same.ndim == 2:  # strides of one side alone
        q, h = rms_norm_quantize(there, w_there[:k], 1e-6, on_device(view(r)), **options)
        assert_same(q, rms_norm_quantize(same, w[:k], 1e-6, view(r), **options)[0], layout)
    assert bool((x_there == on_device(x)).all())


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("exponent", [0, -60, 60, -110])
def test_device_codes_and_ties(rng: np.random.Generator, dtype: str, exponent: int) -> None:
    element = reference.ELEMENTS[dtype]
    ties = element.ties.astype(F32)
    values = np.concatenate([element.values[finite_codes(dtype)], ties, np.nextafter(ties, F32(0)),
                             np.nextafter(ties, F32(1e9)), [element.max] * 8])  # fmt: skip
    row = np.concatenate([values, -values]).astype(F32)
    row = np.pad(row, (0, -len(row) % 4))
    power = F32(2.0**exponent)
    x = np.stack([row, rng.permutation(row)]) * power
    assert set(check_on_device(x, TOKEN, dtype).codes.get().ravel()) == set(finite_codes(dtype))
    for scale in (None, power):
        check_on_device(x, TENSOR, dtype, scale)
    check_on_device(x, GROUP, dtype)


@pytest.mark.gpu
@formats
@blocks
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_device_every_16_bit_value(rng: np.random.Generator, dtype: str, block: tuple, x_dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(kind_of(x_dtype))  # NaN and Inf too
    with np.errstate(invalid="ignore"):
        order = np.argsort(np.abs(values.astype(F32)), kind="stable")
    check_on_device(values[order].reshape(-1, 256), block, dtype)
    check_on_device(rng.permutation(values).reshape(-1, 512), block, dtype)
    for scale in (0.37, 2.0**-149, 3e-40, 3e38, float(F32(1) - F32(2.0**-24))):
        check_on_device(values[order].reshape(-1, 256), TENSOR, dtype, scale)
    gate_up = np.concatenate([values[order], rng.permutation(values)]).reshape(2, -1, 256).swapaxes(0, 1)
    gate_up = np.ascontiguousarray(gate_up).reshape(-1, 512)
    assert_same(silu_mul_quantize(on_device(gate_up), block=GROUP), silu_mul_quantize(gate_up, block=GROUP))


@pytest.mark.gpu
@formats
@pytest.mark.parametrize(
    ("x_dtype", "exponent"), [("float16", e) for e in (15, -14)] + [("bfloat16", e) for e in (127, 0, -100, -118, -126)]
)
def test_device_every_quotient_of_16_bit_values(dtype: str, x_dtype: str, exponent: int) -> None:
    # A row for each amax of a binade, with all values down to those whose code is 0, as for weights: what the short
    # division rests on.
    values = np.arange(2**15, dtype=np.uint16).view(kind_of(x_dtype)).astype(np.float64)
    reach = 35 if dtype == "float8_e5m2" else 19
    values = values[np.isfinite(values) & (values >= 2.0 ** (exponent - reach)) & (values < 2.0 ** (exponent + 1))]
    values = values[: len(values) // 8 * 8]
    amax = values[values >= 2.0**exponent]
    x = np.minimum(values, amax[:, None])
    x[:, 1::2] *= -1
    check_on_device(x.astype(kind_of(x_dtype)), TOKEN, dtype)


@pytest.mark.gpu
@formats
@blocks
def test_device_ties_under_any_scale(rng: np.random.Generator, dtype: str, block: tuple) -> None:
    element = reference.ELEMENTS[dtype]
    for low, high in ((-80, 80), (-120, -80), (80, 127.9)):
        amax = np.exp2(rng.uniform(low, high, (200, 1))).astype(F32)
        scale = np.maximum(amax.astype(np.float64) / element.max, 2.0**-126).astype(F32)
        near = (scale * rng.choice(element.ties, (200, 380))).astype(F32)
        near = np.minimum(np.where(rng.random(near.shape) < 0.3, np.nextafter(near, F32(0)), near), amax)
        x = np.concatenate([near, amax, -amax, amax, amax], axis=1) * rng.choice(F32([-1, 1]), (200, 384))
        check_on_device(x, block, dtype)
        for i in range(5):
            check_on_device(x[i], TENSOR, dtype, scale[i, 0])


@pytest.mark.gpu
@formats
@blocks
@x_dtypes
@pytest.mark.parametrize("k", [136, 4096, 4099])
def test_device_zeros_subnormals_and_values_that_are_not_finite(
    rng: np.random.Generator, dtype: str, block: tuple, x_dtype: str, k: int
) -> None:
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[x_dtype]
    x = activations(rng, 12, k, dtype=x_dtype)
    if block == TENSOR:
        x[1:] = 0
    x[1], x[2] = 0, -0.0
    x[3] = (rng.integers(-(2**6), 2**6, k) * tiny).astype(x.dtype)
    x[4] = 0
    x[4, -1] = tiny
    for i, value in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        x[5 + i, [0, k // 2, -1]] = value
        x[9, i::7] = value
    x[10], x[11] = math.inf, math.nan
    check_on_device(x, block, dtype)
    check_on_device(x[1:5], block, dtype)
    check_on_device(x[9:], block, dtype)
    check_on_device(x[10:], block, dtype)


@pytest.mark.gpu
@formats
@x_dtypes
@pytest.mark.parametrize("k", [1024, 1001])
def test_device_static_scales(rng: np.random.Generator, dtype: str, x_dtype: str, k: int) -> None:
    x = activations(rng, 5, k, dtype=x_dtype, wild=True)
    x[0, :8] = [0, -0.0, 6e4, -6e4, math.nan, math.inf, -math.inf, 1]
    if x_dtype != "float16":
        x[1, :6] = [3e38, -3e38, 1e-38, -1e-38, 1e30, -1e-30]
    there = on_device(x)
    for scale in (
        1.0,
        0.37,
        2.0**-126,
        2.0**-149,
        1e-40,
        3.4e38,
        2.0**127,
        2.0**-20,
        1e10,
        float(np.nextafter(F32(1), F32(0))),
    ):
        wanted = quantize_activations(x, block=TENSOR, dtype=dtype, scale=scale)
        for form in (scale, F32([scale]), on_device(F32([scale])), on_device(F32([[scale]]))):
            assert_same(quantize_activations(there, block=TENSOR, dtype=dtype, scale=form), wanted, scale)


@pytest.mark.gpu
@formats
@x_dtypes
@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_device_scales_that_no_host_has_seen(rng: np.random.Generator, dtype: str, x_dtype: str, bad: float) -> None:
    for k in (256, 250):
        x = activations(rng, 3, k, dtype=x_dtype)
        there, scale = on_device(x), on_device(F32([bad]))
        for q in (
            quantize_activations(there, block=TENSOR, dtype=dtype, scale=scale),
            silu_mul_quantize(there, block=TENSOR, dtype=dtype, scale=scale),
            rms_norm_quantize(there, there[0], 1e-6, block=TENSOR, dtype=dtype, scale=scale),
        ):
            assert (q.codes.get() == NAN).all()
            np.testing.assert_array_equal(q.scale.get(), F32([[bad]]))
        with pytest.raises(ValueError, match="needed is finite and above 0"):
            quantize_activations(there, block=TENSOR, dtype=dtype, scale=bad)


@pytest.mark.gpu
@formats
@fused
@x_dtypes
@pytest.mark.parametrize("k", [1, 7, 8, 128, 130, 1032, 4096, 8192, 14_336, 28_672, 32_776])
def test_device_fused_forms(
    rng: np.random.Generator, dtype: str, block: tuple, scale: Any, x_dtype: str, k: int
) -> None:
    for m in (0, 1, 17) if k <= 8192 else (2,):
        x, r = (activations(rng, m, k, dtype=x_dtype) for _ in range(2))
        gate_up = np.clip(x, -80, 80).astype(x.dtype)
        w = rng.normal(1, 0.4, k).astype(x.dtype)
        fuse_on_device(gate_up, w, r, block, dtype, scale)
        fuse_on_device(activations(rng, m, k, dtype=x_dtype, wild=True), w, r, block, dtype, scale)


@pytest.mark.gpu
@formats
@blocks
@pytest.mark.parametrize("k", [264, 4096, 257])
def test_device_out(rng: np.random.Generator, poison: Any, dtype: str, block: tuple, k: int) -> None:
    import cupy

    x = activations(rng, 6, k, dtype="bfloat16", wild=True)
    groups = -(-k // 128) if block == GROUP else 1
    for offset in (0, 1, 8):
        wide = poison((6, k + 16), "uint8", "cupy")
        codes = wide[:, offset : offset + k]
        scale = poison((1 if block == TENSOR else 6, groups), "float32", "cupy")
        one = cupy.ones_like(scale)
        out = cufp8.QuantizedTensor(
            codes, one, dtype=dtype, scale_dtype="float32", shape=(6, k), block=block, activations=True
        )
        out.scale = scale
        there = on_device(x)
        assert quantize_activations(there, block=block, dtype=dtype, out=out) is out
        assert_same(out, quantize_activations(x, block=block, dtype=dtype), offset)
        beside = wide.get()
        beside[:, offset : offset + k] = 0xFF
        assert (beside == 0xFF).all()
    fresh = quantize_activations(there, block=block, dtype=dtype)
    with pytest.raises(ValueError, match="shape"):
        quantize_activations(there[:3], block=block, dtype=dtype, out=fresh)
    mine = cupy.empty((6, 2 * k), np.uint8)
    own = quantize_activations(mine.view(np.float16), block=block, dtype=dtype)
    own.codes = mine[:, :k]
    with pytest.raises(ValueError, match="out.codes shares memory with x"):
        quantize_activations(mine.view(np.float16), block=block, dtype=dtype, out=own)
    with pytest.raises(ValueError, match="on cpu; needed is"):
        quantize_activations(there, block=block, dtype=dtype, out=fresh.to("cpu"))


def calls(w: Any, scale: Any) -> dict[str, Any]:
    """What a capture must take, by name: x -> result."""
    options = [{"block": TOKEN}, {"block": GROUP}, {"block": TENSOR, "scale": scale}]
    made = {"tensor": lambda x: quantize_activations(x, block=TENSOR)}
    for i, some in enumerate(options):
        made[f"plain {i}"] = lambda x, some=some: quantize_activations(x, **some)
        made[f"silu {i}"] = lambda x, some=some: silu_mul_quantize(x, **some)
        made[f"norm {i}"] = lambda x, some=some: rms_norm_quantize(x, w, 1e-6, **some)
        made[f"residual {i}"] = lambda x, some=some: rms_norm_quantize(x, w, 1e-6, x, **some)[0]
    return made


@pytest.mark.gpu
@x_dtypes
@pytest.mark.parametrize("k", [4096, 514])
def test_device_capture_in_cupy(rng: np.random.Generator, x_dtype: str, k: int) -> None:
    import cupy

    w, scale = np.ones(k, kind_of(x_dtype)), F32([0.03])
    host, there = calls(w, float(scale[0])), calls(on_device(w), on_device(scale))
    x = on_device(activations(rng, 9, k, dtype=x_dtype))
    for call in there.values():
        call(x)  # compiles
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        try:
            results = {name: call(x) for name, call in there.items()}
        finally:
            graph = stream.end_capture()
    for _ in range(3):
        fresh = np.clip(activations(rng, 9, k, dtype=x_dtype), -60, 60).astype(kind_of(x_dtype))
        x.set(fresh)
        cupy.cuda.runtime.deviceSynchronize()
        for q in results.values():
            q.codes[...], q.scale[...] = 0xEE, math.nan
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            graph.launch()
        for name, q in results.items():
            assert_same(q, host[name](fresh), name)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_device_capture_in_torch(rng: np.random.Generator, x_dtype: str) -> None:
    torch, into = gpu_torch(), gpu_maker("torch")
    k = 1024
    w, scale = np.ones(k, kind_of(x_dtype)), F32([0.03])
    host, there = calls(w, float(scale[0])), calls(into(w), into(scale))
    x = into(activations(rng, 9, k, dtype=x_dtype))
    for call in there.values():
        call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {name: call(x) for name, call in there.items()}
    for _ in range(3):
        fresh = np.clip(activations(rng, 9, k, dtype=x_dtype), -60, 60).astype(kind_of(x_dtype))
        x.copy_(into(fresh))
        for q in results.values():
            q.codes[...], q.scale[...] = 0xEE, math.nan
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for name, q in results.items():
            assert_same(q, host[name](fresh), name)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 515])
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
def test_device_chains(rng: np.random.Generator, x_dtype: str, k: int) -> None:
    """Each kernel reads what the one before it wrote, while that may still be running: eagerly and in a graph."""
    import cupy

    steps, m = 40, 300
    x = rng.standard_normal((m, k)).astype(kind_of(x_dtype))
    w, one = rng.normal(1, 0.1, k).astype(x.dtype), rng.standard_normal((m, k)).astype(x.dtype)
    x_there, w_there, one_there = on_device(x), on_device(w), on_device(one)

    def chain(x: Any, w: Any, one: Any) -> list[Any]:
        made = []
        for i in range(steps):
            block = TOKEN if i % 2 else GROUP
            q, x = rms_norm_quantize(x, w, 1e-6, one, block=block)
            made += [q, quantize_activations(x, block=TENSOR)]
            # The scale that the kernel before has just written.
            made.append(quantize_activations(x, block=TENSOR, scale=made[-1].scale))
        return made

    wanted = chain(x, w, one)
    for q, host in zip(chain(x_there, w_there, one_there), wanted, strict=True):
        assert_same(q, host)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            made = chain(x_there, w_there, one_there)
        finally:
            graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
    for q, host in zip(made, wanted, strict=True):
        assert_same(q, host)


@pytest.mark.gpu
def test_device_on_a_stream_of_its_own(rng: np.random.Generator) -> None:
    import cupy

    x = activations(rng, 2000, 3000, dtype="bfloat16")
    there = on_device(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q = quantize_activations(late_copy(there))
    stream.synchronize()
    assert_same(q, quantize_activations(x))


@pytest.mark.gpu
@formats
@blocks
@x_dtypes
@libraries
def test_device_arrays_of_torch_and_jax(
    rng: np.random.Generator, library: str, dtype: str, block: tuple, x_dtype: str
) -> None:
    into = gpu_maker(library)
    scale = 0.03 if block == TENSOR else None
    x = np.clip(activations(rng, 3, 4, 264, dtype=x_dtype), -60, 60).astype(kind_of(x_dtype))
    w = rng.standard_normal(264).astype(x.dtype)
    options = {"block": block, "dtype": dtype, "scale": scale}
    there = into(x)
    assert_same(quantize_activations(there, **options), quantize_activations(x, **options))
    assert_same(silu_mul_quantize(there, **options), silu_mul_quantize(x, **options))
    q, h = rms_norm_quantize(there, into(w), 1e-6, there, **options)
    wanted, total = rms_norm_quantize(x, w, 1e-6, x, **options)
    assert_same(q, wanted)
    assert type(h) is type(there) and h.dtype == there.dtype and tuple(h.shape) == x.shape
    np.testing.assert_array_equal(reference.to_float64(h), total.astype(np.float64))
    for view in (lambda a: a.swapaxes(0, 1), lambda a: a[..., 3:-5], lambda a: a[:, 1]):
        assert_same(quantize_activations(view(there), **options), quantize_activations(view(x), **options))


@pytest.mark.gpu
def test_device_refuses_what_the_host_refuses() -> None:
    import cupy

    x, w = np.ones((2, 4), F32), np.ones(4, F32)
    for call in (
        lambda move: quantize_activations(move(x.astype(float))),
        lambda move: quantize_activations(move(x[:, :0])),
        lambda move: quantize_activations(move(x), scale=1.0),
        lambda move: quantize_activations(move(x), block=TENSOR, scale=0.0),
        lambda move: quantize_activations(move(x), block=TENSOR, scale=move(np.ones(2, F32))),
        lambda move: quantize_activations(move(x), block=TENSOR, scale=move(np.ones(1))),
        lambda move: rms_norm_quantize(move(x), move(w[:3]), 1e-6),
        lambda move: rms_norm_quantize(move(x), move(w.astype(np.float16)), 1e-6),
        lambda move: rms_norm_quantize(move(x), move(w), 1e-6, move(x[:1])),
        lambda move: silu_mul_quantize(move(x[:, :3])),
    ):
        errors = []
        for move in (cupy.asarray, lambda a: a):
            with pytest.raises((TypeError, ValueError)) as caught:
                call(move)
            errors.append((caught.type, str(caught.value)))
        assert errors[0] == errors[1]
    with pytest.raises(ValueError, match="weight is on cpu, what is quantised on cuda:0; move one of them"):
        rms_norm_quantize(cupy.asarray(x), w, 1e-6)


@pytest.mark.gpu
@formats
@blocks
def test_device_results_move_and_dequantise(rng: np.random.Generator, dtype: str, block: tuple) -> None:
    x = activations(rng, 5, 300, wild=True)
    there = quantize_activations(on_device(x), block=block, dtype=dtype)
    host = quantize_activations(x, block=block, dtype=dtype)
    back = there.to("cpu")
    assert_bits(back, host.codes, host.scale, block, dtype)
    assert (back.scheme, back.activations) == (there.scheme, True) == (host.scheme, True)
    assert_same(back.to("cuda"), host)
    for kind in (*FLOATS, "float64"):
        np.testing.assert_array_equal(
            there.dequantize(kind).get().astype(np.float64), host.dequantize(kind).astype(np.float64)
        )
    with pytest.raises(ValueError, match="holds activations"):
        cufp8.Linear.from_quantized(there)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [TOKEN, GROUP, TENSOR], ids=["token", "group", "tensor"])
@pytest.mark.parametrize("shape", [(1_048_583, 2056), (2053, 1_048_584)], ids=str)
def test_device_beyond_2_31_elements(rng: np.random.Generator, block: tuple, shape: tuple[int, int]) -> None:
    import cupy

    m, k = shape
    assert m * k > 2**31
    # 64 rows are drawn, with values at the far end; x repeats them, so that the host has to see them only once.
    some, columns = min(64, m), 4104
    tile = np.zeros((some, columns), kind_of("bfloat16"))
    tile[:, -2048:] = activations(rng, some, 2048, dtype="bfloat16")
    tile = tile[:, -min(k, columns) :]
    x = cupy.zeros(shape, np.uint16)
    rows = cupy.arange(m) % some
    there = cupy.asarray(tile.view(np.uint16))
    for i in range(0, m, 65_536):
        x[i : i + 65_536, k - tile.shape[1] :] = there[rows[i : i + 65_536]]
    q = quantize_activations(x.view(tile.dtype), block=block)
    del x
    start = k - tile.shape[1]
    last = -(-k // 128) - 4 if block == GROUP else 0  # groups that hold nothing but a tile's values
    host = quantize_activations(tile if block != GROUP else np.pad(tile, ((0, 0), (start % 128, 0))), block=block)
    codes = cupy.asarray(host.codes[:, -tile.shape[1] :])
    for i in range(0, m, 65_536):
        part = q.codes[i : i + 65_536]
        assert bool((part[:, start:] == codes[rows[i : i + 65_536]]).all())
        assert not bool(part[:, :start].any())
    if block == TENSOR:
        assert bool((q.scale == cupy.asarray(host.scale)).all())
    else:
        assert bool((q.scale[:, last:] == cupy.asarray(host.scale)[rows][:, -(q.scale.shape[1] - last) :]).all())


# --- memory -------------------------------------------------------------------------------------
PEAK = """
import tracemalloc, sys, ml_dtypes, numpy as np, cufp8
(n, k), dtype, layout, block = {case!r}
x = np.ones((n, k), np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))
x = x.T if layout == "T" else x.reshape(2, n // 2, k).transpose(1, 0, 2) if layout == "3D" else x
cufp8.quantize_activations(x[:1, :1], block=block)  # imports and tables
high = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
if sys.platform == "linux":
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    start = high()
tracemalloc.start()
kept = cufp8.quantize_activations(x, block=block).nbytes
traced = tracemalloc.get_traced_memory()[1] - kept
resident = high() - start - kept if sys.platform == "linux" else 0
print(traced, resident)
"""


@pytest.mark.parametrize(
    "case",
    [
        ((12_800, 4096), "float32", "C", TOKEN),
        ((12_800, 4096), "float32", "C", TENSOR),
        ((12_800, 4096), "bfloat16", "3D", GROUP),
        ((2, 26_000_000), "float16", "C", GROUP),
        ((4096, 12_800), "bfloat16", "T", TENSOR),
        ((20_000_000, 1), "float32", "C", GROUP),
    ],
    ids=lambda case: "-".join(str(part) for part in case),
)
def test_extra_memory_stays_under_64_mib(case: tuple) -> None:
    script = textwrap.dedent(PEAK.format(case=case))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    traced, resident = map(int, out.stdout.split())
    assert traced < 64 << 20, f"{traced / 2**20:.0f} MiB of arrays"
    assert resident < 64 << 20, f"{resident / 2**20:.0f} MiB resident"
