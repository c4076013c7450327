"""The quantiser against the oracle, bit by bit, on the host and (marked gpu) on the device."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
from typing import Any

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from test_interop import gpu_maker

import cufp8

DTYPES = ("float16", "bfloat16", "float32", "float64")
SMALLEST = 2.0**-126  # the least scale


def kind_of(dtype: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def weights(rng: np.random.Generator, n: int, k: int, dtype: str = "float32") -> np.ndarray:
    """Rows of very different sizes, with outliers and zeros of both signs; finite in `dtype`."""
    spread = 4 if dtype == "float16" else 60
    w = rng.standard_t(4, size=(n, k)) * np.exp2(rng.integers(-spread, spread, (n, 1)))
    w[rng.random((n, k)) < 0.02] = 0
    w[rng.random((n, k)) < 0.02] = -0.0
    limit = 6e4 if dtype == "float16" else 1e38
    return np.clip(w, -limit, limit).astype(kind_of(dtype))


def assert_bits(q: cufp8.QuantizedTensor, codes: np.ndarray, scale: np.ndarray) -> None:
    """q holds these codes and scales, bit for bit, and says so in its other attributes."""
    n, k = codes.shape
    got, got_scale = reference.host(q.codes), reference.host(q.scale)
    assert (got.dtype, got.shape) == (np.dtype(np.uint8), (n, k))
    assert (got_scale.dtype, got_scale.shape) == (np.dtype(np.float32), (n, 1))
    wrong = got_scale.view(np.uint32) != scale.view(np.uint32)
    if wrong.any():
        i = int(np.argmax(wrong[:, 0]))
        raise AssertionError(
            f"{int(wrong.sum())} of {n} scales differ; the first is scale[{i}] = "
            f"{got_scale[i, 0]!r}, not {scale[i, 0]!r}"
        )
    wrong = got != codes
    if wrong.any():
        i, j = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        raise AssertionError(
            f"{int(wrong.sum())} of {n * k} codes differ; the first is codes[{i}, {j}] = "
            f"{got[i, j]:#04x}, not {codes[i, j]:#04x}"
        )
    assert q.shape == (n, k)
    assert tuple(q.block) == (1, k)
    assert (q.dtype, q.scale_dtype) == ("float8_e4m3fn", "float32")


def check(w: Any) -> cufp8.QuantizedTensor:
    """Quantise w and compare with the oracle."""
    q = cufp8.quantize(w)
    assert_bits(q, *reference.quantize(w))
    return q


# --- every code, every tie ----------------------------------------------------------------------
FINITE = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)


@pytest.mark.parametrize("exponent", [0, 1, -100, 100, -126])
def test_every_code_comes_back(exponent: int) -> None:
    scale = 2.0**exponent
    w = np.stack([reference.VALUES[FINITE], reference.VALUES[FINITE[::-1]]]) * scale
    q = cufp8.quantize(w.astype(np.float32))
    assert_bits(q, np.stack([FINITE, FINITE[::-1]]), np.full((2, 1), scale, np.float32))


def _between_neighbours() -> np.ndarray:
    """For each neighbouring pair v0 < v1: v0, v0 + 0.49 dv, the tie and its two neighbours in
    float32, v0 + 0.51 dv, v1."""
    low = np.array(reference.MAGNITUDES[:-1]) * reference.UNIT
    high = np.array(reference.MAGNITUDES[1:]) * reference.UNIT
    step, tie = high - low, reference.TIES.astype(np.float32)
    return np.concatenate(
        [
            low,
            low + 0.49 * step,
            np.nextafter(tie, np.float32(0)),
            tie,
            np.nextafter(tie, np.float32(1e9)),
            low + 0.51 * step,
            high,
        ]
    ).astype(np.float32)


@pytest.mark.parametrize("exponent", [0, -60, 60])
def test_every_tie_goes_to_the_even_code(exponent: int) -> None:
    values = _between_neighbours()
    row = np.concatenate([values, -values, [448]]).astype(np.float32)
    want = np.array([[reference.nearest_code(v, bool(np.signbit(v))) for v in row]], np.uint8)
    assert {int(c) & 0x7F for c in want[0]} == set(range(0x7F))
    q = cufp8.quantize(row[None] * np.float32(2.0**exponent))
    assert_bits(q, want, np.float32([[2.0**exponent]]))


def test_ties_under_any_scale(rng: np.random.Generator) -> None:
    # Where the scale is no power of two, the fp32 division decides: a product with the reciprocal,
    # or a division in another precision, moves some of these to the other neighbour.
    amax = np.exp2(rng.uniform(-80, 80, (200, 1))).astype(np.float32)
    scale = (amax.astype(np.float64) / 448).astype(np.float32)
    near = (scale * reference.TIES[None]).astype(np.float32)
    w = np.concatenate([near, np.nextafter(near, 0), np.nextafter(near, np.float32(1e38))], axis=1)
    w *= rng.choice(np.float32([-1, 1]), w.shape)
    check(np.concatenate([w, amax], axis=1))


def test_the_scale_is_an_ieee_quotient(rng: np.random.Generator) -> None:
    amax = rng.integers(1, 0x7F800000, 50_000, dtype=np.uint32).view(np.float32)
    amax[:3] = [np.finfo(np.float32).max, 448, 1]
    q = cufp8.quantize(amax[:, None])
    want = np.maximum((amax.astype(np.float64) / 448).astype(np.float32), np.float32(SMALLEST))
    np.testing.assert_array_equal(q.scale[:, 0], want)


def _every_16_bit_value(dtype: str) -> np.ndarray:
    """All finite values in rows of 256 that are near in size, signs mixed."""
    values = np.arange(2**16, dtype=np.uint16).view(kind_of(dtype))
    values = values[np.isfinite(values.astype(np.float32))]
    order = np.argsort(np.abs(values.astype(np.float32)), kind="stable")
    return values[order].reshape(-1, 256)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_value(dtype: str) -> None:
    check(_every_16_bit_value(dtype))


# --- properties ---------------------------------------------------------------------------------
def matrices(**floats: Any) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=24),
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False, **floats),
    )


# Numbers whose multiples by 2^-30 .. 2^30 neither overflow nor become subnormal, as do the scales.
moderate = matrices().map(
    lambda w: np.where(np.abs(w) < 2.0**-60, 0, np.clip(w, -(2.0**60), 2.0**60)).astype(np.float32)
)


@given(matrices())
def test_any_matrix_agrees_with_the_oracle(w: np.ndarray) -> None:
    q = check(w)
    assert np.isfinite(q.scale).all() and (q.scale >= SMALLEST).all()
    assert not np.isnan(reference.VALUES[q.codes]).any()
    amax = np.abs(w).max(axis=1).astype(np.float64)
    largest = np.abs(reference.VALUES[q.codes]).max(axis=1)
    assert (largest[amax / 448 >= SMALLEST] == reference.MAX).all()
    back = reference.dequantize(q.codes, q.scale)
    # Half a step: 2^-4 of the value, or half of 2^-9 steps below 2^-6; and the division's rounding.
    half_step = np.maximum(np.abs(w) * 2.0**-4, q.scale * 2.0**-10) * (1 + 2.0**-20)
    assert (np.abs(back - w) <= half_step).all()


@given(moderate, st.integers(-30, 30))
def test_a_power_of_two_moves_to_the_scale(w: np.ndarray, exponent: int) -> None:
    a, b = cufp8.quantize(w), cufp8.quantize(w * np.float32(2.0**exponent))
    np.testing.assert_array_equal(b.codes, a.codes)
    live = np.abs(w).max(axis=1) > 0
    np.testing.assert_array_equal(b.scale[live], a.scale[live] * np.float32(2.0**exponent))


@given(matrices())
def test_the_opposite_has_opposite_codes(w: np.ndarray) -> None:
    a, b = cufp8.quantize(w), cufp8.quantize(-w)
    np.testing.assert_array_equal(b.scale, a.scale)
    np.testing.assert_array_equal(b.codes, a.codes ^ 0x80)


@given(matrices(), st.randoms())
def test_rows_do_not_see_each_other(w: np.ndarray, random: Any) -> None:
    order = list(range(w.shape[0]))
    random.shuffle(order)
    a, b = cufp8.quantize(w), cufp8.quantize(w[order])
    np.testing.assert_array_equal(b.codes, a.codes[order])
    np.testing.assert_array_equal(b.scale, a.scale[order])


@given(matrices(min_value=-(2.0**127), max_value=2.0**127))
def test_quantising_twice_changes_no_code(w: np.ndarray) -> None:
    once = cufp8.quantize(w)
    twice = cufp8.quantize(once.dequantize("float32"))
    np.testing.assert_array_equal(twice.codes, once.codes)
    # A row of subnormals may have become zeros, whose scale is 1. Of the others, fp32(448 * scale)
    # / 448 is the scale where the product is exact, and else may be one step off.
    live = (once.codes & 0x7F).any(axis=1)
    old, new = once.scale[live], twice.scale[live]
    exact = (old * np.float32(448)).astype(np.float64) == old.astype(np.float64) * 448
    np.testing.assert_array_equal(new[exact], old[exact])
    np.testing.assert_array_max_ulp(new, old, maxulp=1)


# --- zero, subnormal, non-finite ----------------------------------------------------------------
def test_a_row_of_zeros() -> None:
    w = np.zeros((3, 5), np.float32)
    w[1] = [0, -0.0, 3, 0, -3]
    w[2] = -0.0
    q = cufp8.quantize(w)
    np.testing.assert_array_equal(q.scale[[0, 2]], 1)
    np.testing.assert_array_equal(q.codes[0], 0)
    np.testing.assert_array_equal(q.codes[1], [0, 0x80, 0x7E, 0, 0xFE])
    np.testing.assert_array_equal(q.codes[2], 0x80)  # a zero keeps its sign
    np.testing.assert_array_equal(q.dequantize("float32"), w)


def test_subnormal_weights(rng: np.random.Generator) -> None:
    tiny = np.float32(2.0**-149)
    w = np.zeros((6, 9), np.float32)
    w[0, 3] = tiny
    w[1] = rng.integers(-(2**20), 2**20, 9) * tiny
    w[2, 0] = np.float32(448 * SMALLEST)  # the first whose scale is above the least
    w[3, 0] = np.nextafter(w[2, 0], np.float32(0))
    w[4, 0] = np.nextafter(w[2, 0], np.float32(1))
    w[5] = np.float32(2.0**-135)  # one step of 2^-9 under the least scale
    q = check(w)
    assert (q.scale[[0, 1, 2, 3, 5]] == SMALLEST).all()
    assert (q.codes[5] == 1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite(rng: np.random.Generator, dtype: str, value: float) -> None:
    w = weights(rng, 40, 50, dtype)
    w[31, 7] = w[31, 49] = w[39, 0] = value
    with pytest.raises(ValueError) as error:
        cufp8.quantize(w)
    assert_tells(error, 3, (31, 7))


def assert_tells(error: pytest.ExceptionInfo, count: int, first: tuple[int, int]) -> None:
    """The text says how many there are and where the first is."""
    text = str(error.value)
    assert re.search(rf"\b{count}\b", text), text
    assert re.search(rf"\[{first[0]}, {first[1]}\]", text), text


def test_non_finite_weights_are_counted_over_the_whole_weight() -> None:
    w = np.ones((3000, 4000), np.float32)  # 48 MB: several chunks
    w[1000, 3999] = math.nan
    w[2999] = math.inf
    with pytest.raises(ValueError) as error:
        cufp8.quantize(w)
    assert_tells(error, 4001, (1000, 3999))


@pytest.mark.parametrize("value", [1e39, -1e300, float(np.finfo(np.float32).max) * (1 + 2.0**-24)])
def test_float64_that_overflows_float32(value: float) -> None:
    w = np.ones((4, 4))
    w[2, 1] = value
    with pytest.raises(ValueError) as error:
        cufp8.quantize(w)
    assert_tells(error, 1, (2, 1))


def test_float64_is_rounded_to_float32_first() -> None:
    # 1 + 2^-24 + 2^-40 is above the tie of float32's 1 and 1 + 2^-23.
    w = np.array([[1 + 2.0**-24 + 2.0**-40, 1.0], [1 + 2.0**-24, 1.0], [1e-300, -1e-200]])
    w[2, 0] = np.nextafter(float(np.finfo(np.float32).max) * (1 + 2.0**-25), 0)
    q = check(w)
    np.testing.assert_array_equal(q.scale, cufp8.quantize(w.astype(np.float32)).scale)
    assert cufp8.quantize(np.array([[1e-300, -1e-300]])).scale[0, 0] == 1


# --- what comes in ------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 257), (129, 1), (7, 15), (64, 1000)])
def test_dtypes_and_shapes(rng: np.random.Generator, dtype: str, shape: tuple[int, int]) -> None:
    w = weights(rng, *shape, dtype)
    q = check(w)
    assert q.device == "cpu" and isinstance(q.codes, np.ndarray)
    assert q.nbytes == shape[0] * shape[1] + 4 * shape[0]


LAYOUTS = {
    "fortran": np.asfortranarray,
    "transposed": lambda w: w.T,
    "rows backwards": lambda w: w[::-1],
    "columns backwards": lambda w: w[:, ::-1],
    "every third column": lambda w: w[:, 1::3],
    "every other row": lambda w: w[::2],
    "inner block": lambda w: w[3:-2, 5:-7],
    "one column": lambda w: w[:, 4:5],
    "one row for all": lambda w: np.broadcast_to(w[2], (6, w.shape[1])),
    "unaligned": lambda w: np.frombuffer(b"x" + w.tobytes(), np.uint8)[1:].view(w.dtype).reshape(w.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(rng: np.random.Generator, dtype: str, layout: str) -> None:
    w = LAYOUTS[layout](weights(rng, 37, 61, dtype))
    before = w.copy()
    w.flags.writeable = False
    check(w)
    np.testing.assert_array_equal(w, before)


def test_many_chunks(rng: np.random.Generator) -> None:
    check(weights(rng, 2500, 4099))


def test_a_row_longer_than_a_chunk(rng: np.random.Generator) -> None:
    w = weights(rng, 2, 9_000_001)
    w[0, -1], w[1, 0] = 2 * np.abs(w[0]).max(), 2 * np.abs(w[1]).max()
    check(w)


def test_the_other_byte_order(rng: np.random.Generator) -> None:
    w = weights(rng, 5, 9)
    try:
        q = cufp8.quantize(w.astype(w.dtype.newbyteorder()))
    except TypeError:
        return  # refusing is right too; reading the bytes the wrong way round is not
    assert_bits(q, *reference.quantize(w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_on_the_cpu(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    w = weights(rng, 33, 47, dtype)
    t = torch.from_numpy(w.astype(np.float64)).to(getattr(torch, dtype))
    want = reference.quantize(w)
    for tensor in (t, t.T.contiguous().T, torch.nn.Parameter(t)):
        q = cufp8.quantize(tensor)
        assert isinstance(q.codes, np.ndarray)
        assert_bits(q, *want)
    assert_bits(cufp8.quantize(t[1::2, 3:40:2]), *reference.quantize(w[1::2, 3:40:2]))


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_jax_arrays_on_the_cpu(rng: np.random.Generator, dtype: str) -> None:
    jax = pytest.importorskip("jax")
    w = weights(rng, 33, 47, dtype)
    array = jax.device_put(w, jax.devices("cpu")[0])
    assert_bits(cufp8.quantize(array), *reference.quantize(w))


@pytest.mark.parametrize(
    "w",
    [
        np.ones((2, 3), np.complex64),
        np.ones((2, 3), np.int8),
        np.ones((2, 3), np.uint8),
        np.ones((2, 3), bool),
        np.ones((2, 3), object),
        np.ones((2, 3), np.longdouble),
        np.ones((2, 3), ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda w: w.dtype.name,
)
def test_dtypes_that_are_refused(w: np.ndarray) -> None:
    with pytest.raises(TypeError) as error:
        cufp8.quantize(w)
    text = str(error.value)
    assert w.dtype.name in text and "float32" in text and "bfloat16" in text, text


@pytest.mark.parametrize("w", ["weight", None, 3.0, {"w": 1}], ids=repr)
def test_things_that_are_no_arrays(w: Any) -> None:
    with pytest.raises(TypeError) as error:
        cufp8.quantize(w)
    assert type(w).__name__ in str(error.value)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (0, 4), (4, 0), (0, 0)], ids=str)
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        cufp8.quantize(np.ones(shape, np.float32))
    assert str(list(shape)) in str(error.value)


def test_an_unknown_scheme() -> None:
    with pytest.raises(ValueError) as error:
        cufp8.quantize(np.ones((2, 3), np.float32), scheme="INT3")
    assert "INT3" in str(error.value) and "FP8A16" in str(error.value)


# --- memory -------------------------------------------------------------------------------------
PEAK = """
import tracemalloc, sys, ml_dtypes, numpy as np, cufp8
(n, k), dtype, layout, what = {case!r}
kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
w = np.empty((n, k), kind)
tile = np.random.default_rng(1).standard_normal(1 << 16).astype(kind)
flat = w.reshape(-1)
for i in range(0, flat.size, tile.size):
    flat[i : i + tile.size] = tile[: flat.size - i]
if layout == "T":
    w = w.T
cufp8.error_report(w[:2, :2], cufp8.quantize(w[:2, :2]))  # imports and tables
q = cufp8.quantize(w) if what == "report" else None
high = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
if sys.platform == "linux":
    open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts anew
    start = high()
tracemalloc.start()
if what == "report":
    cufp8.error_report(w, q)
    kept = 0
else:
    q = cufp8.quantize(w)
    kept = q.nbytes
traced = tracemalloc.get_traced_memory()[1] - kept
resident = high() - start - kept if sys.platform == "linux" else 0
print(traced, resident)
"""


@pytest.mark.parametrize(
    "case",
    [
        ((12_800, 4096), "float32", "C", "quantize"),
        ((2, 26_000_000), "float32", "C", "quantize"),
        ((8192, 12_800), "bfloat16", "T", "quantize"),
        ((25_600, 4096), "float16", "C", "quantize"),
        ((6400, 4096), "float64", "C", "quantize"),
        ((12_800, 4096), "float32", "C", "report"),
    ],
    ids=lambda case: "-".join(str(part) for part in case),
)
def test_extra_memory_stays_under_64_mib(case: tuple) -> None:
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PEAK.format(case=case))],
        capture_output=True,
        text=True,
        check=True,
    )
    traced, resident = map(int, out.stdout.split())
    assert traced < 64 << 20, f"{traced / 2**20:.0f} MiB of arrays"
    assert resident < 64 << 20, f"{resident / 2**20:.0f} MiB resident"


# --- QuantizedTensor ----------------------------------------------------------------------------
def parts(n: int = 3, k: int = 5) -> dict[str, Any]:
    return {
        "codes": np.full((n, k), 0x38, np.uint8),
        "scale": np.full((n, 1), 0.5, np.float32),
        "dtype": "float8_e4m3fn",
        "scale_dtype": "float32",
        "shape": (n, k),
        "block": (1, k),
    }


def make(**changes: Any) -> cufp8.QuantizedTensor:
    given = {**parts(), **changes}
    codes, scale = given.pop("codes"), given.pop("scale")
    return cufp8.QuantizedTensor(codes, scale, **given)


def test_a_tensor_from_its_parts() -> None:
    q = make()
    assert_bits(q, parts()["codes"], parts()["scale"])
    assert q.nbytes == 15 + 12
    assert q.device == "cpu"
    np.testing.assert_array_equal(q.dequantize(), np.full((3, 5), 0.5, np.float32))
    for word in ("3", "5", "float8_e4m3fn", "cpu"):
        assert word in repr(q)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_codes_are_refused(code: int) -> None:
    codes = parts()["codes"]
    codes[1, 4] = codes[2, 0] = code
    with pytest.raises(ValueError) as error:
        make(codes=codes)
    assert_tells(error, 2, (1, 4))


@pytest.mark.parametrize(
    "dtype, bad",
    [
        ("float8_e4m3fn", {0x7F, 0xFF}),
        ("float8_e5m2", {*range(0x7C, 0x80), *range(0xFC, 0x100)}),
        ("float4_e2m1fn", set()),
    ],
)
def test_a_tensor_tells_whether_it_has_nan(dtype: str, bad: set[int]) -> None:
    packed, block = (2, 32) if dtype == "float4_e2m1fn" else (1, -1)
    kind = {"scale_dtype": "float8_e8m0fnu"} if packed == 2 else {"scale_dtype": "float32", "activations": True}
    scale = np.ones((1, 1), np.uint8 if packed == 2 else np.float32)
    for code in range(256):
        codes = np.full((1, 32 // packed), 0x11, np.uint8)
        codes[0, -1] = code
        q = cufp8.QuantizedTensor(codes, scale, dtype=dtype, shape=(1, 32), block=(1, block), **kind)
        assert q.has_nan() == (code in bad), code


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_scales_that_are_refused(value: float) -> None:
    scale = parts()["scale"]
    scale[2, 0] = value
    with pytest.raises(ValueError) as error:
        make(scale=scale)
    text = str(error.value)
    assert re.search(r"\b1\b", text) and re.search(r"\b2\b", text) and str(value) in text, text


def test_a_subnormal_scale_is_allowed() -> None:
    scale = parts()["scale"]
    scale[1, 0] = 2.0**-149
    assert make(scale=scale).dequantize("float32")[1, 0] == np.float32(2.0**-149)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codes": np.zeros((3, 4), np.uint8)}, ["[3, 4]", "[3, 5]"]),
        ({"codes": np.zeros(15, np.uint8)}, ["[15]", "[3, 5]"]),
        ({"scale": np.ones((1, 5), np.float32)}, ["[1, 5]", "[3, 1]"]),
        ({"scale": np.ones((4, 1), np.float32)}, ["[4, 1]", "[3, 1]"]),
        ({"shape": (3, 6), "block": (1, 6)}, ["[3, 5]", "[3, 6]"]),
        ({"shape": (0, 5), "codes": np.zeros((0, 5), np.uint8)}, ["[0, 5]"]),
        ({"block": (3, 5)}, ["3, 5", "1, 5"]),
        ({"block": (1, 4)}, ["1, 4", "1, 5"]),
        ({"dtype": "e4m3"}, ["e4m3", "float8_e4m3fn"]),
        ({"scale_dtype": "float8_e8m0fnu"}, ["float8_e8m0fnu", "float32"]),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_parts_that_do_not_fit(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make(**changes)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codes": np.zeros((3, 5), np.int8)}, ["int8", "uint8"]),
        ({"codes": np.zeros((3, 5), np.float32)}, ["float32", "uint8"]),
        ({"scale": np.ones((3, 1), np.float64)}, ["float64", "float32"]),
        ({"scale": np.ones((3, 1), np.float16)}, ["float16", "float32"]),
    ],
    ids=["int8 codes", "float32 codes", "float64 scales", "float16 scales"],
)
def test_parts_of_the_wrong_dtype(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TypeError) as error:
        make(**changes)
    for word in words:
        assert word in str(error.value)


def test_to_the_cpu_and_to_nowhere() -> None:
    q = make()
    assert q.to("cpu").device == "cpu"
    assert_bits(q.to("cpu"), q.codes, q.scale)
    with pytest.raises(ValueError, match="tpu"):
        q.to("tpu")


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_dequantize(rng: np.random.Generator, dtype: str) -> None:
    q = cufp8.quantize(weights(rng, 9, 31, "float16"))
    back = q.dequantize(dtype)
    assert back.dtype == kind_of(dtype) and back.shape == (9, 31)
    # code * scale in float32, one product; then one rounding to a narrower dtype.
    single = (reference.VALUES[q.codes] * q.scale.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_equal(back.astype(np.float64), single.astype(back.dtype).astype(float))


@pytest.mark.parametrize("dtype", ["int8", "complex64", "float8_e4m3fn", "nonsense"])
def test_dequantize_to_what_it_cannot_be(dtype: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        make().dequantize(dtype)
    assert dtype in str(error.value) and "float32" in str(error.value)


# --- the error report ---------------------------------------------------------------------------
def close(report: Any, want: dict[str, float], rel: float = 1e-5) -> None:
    for name, value in want.items():
        assert getattr(report, name) == pytest.approx(value, rel=rel, abs=1e-12), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_report(rng: np.random.Generator, dtype: str) -> None:
    w = weights(rng, 70, 300, dtype)
    w[:, :100] = (w[:, :100].astype(np.float64) * 1e-4).astype(w.dtype)  # some underflow
    w[11] = 0
    x = rng.normal(size=(4, 6, 300)).astype(np.float32)
    q = cufp8.quantize(w)
    report = cufp8.error_report(w, q)
    want = reference.error_report(w, q.codes, q.scale)
    assert want["underflow"] > 0
    close(report, want)
    assert report.bytes_before == w.size * w.itemsize
    assert report.bytes_after == q.nbytes
    assert report.output_rel_l2 is None and report.output_cosine is None
    with_x = cufp8.error_report(w, q, x)
    close(with_x, reference.error_report(w, q.codes, q.scale, x), rel=1e-3)
    assert with_x.rel_l2 == report.rel_l2
    for name in ("rel_l2", "worst_channel_rel_l2", "underflow", "crest", "output_cosine"):
        assert type(getattr(with_x, name)) is float, name


def test_error_report_of_a_gaussian(rng: np.random.Generator) -> None:
    w = rng.normal(size=(256, 1024)).astype(np.float32)
    report = cufp8.error_report(w, cufp8.quantize(w), rng.normal(size=(32, 1024)))
    assert 0.02 < report.rel_l2 < 0.035
    assert report.rel_l2 <= report.worst_channel_rel_l2 < 0.04
    assert report.underflow < 1e-3
    assert 3 < report.crest < 6
    assert 0.02 < report.output_rel_l2 < 0.035
    assert report.output_cosine > 0.999


def test_error_report_of_what_e4m3_holds_exactly() -> None:
    w = np.concatenate([reference.VALUES[FINITE]] * 3).reshape(3, -1).astype(np.float32)
    report = cufp8.error_report(w, cufp8.quantize(w), w[:2])
    assert (report.rel_l2, report.worst_channel_rel_l2, report.underflow) == (0, 0, 0)
    assert report.output_rel_l2 == 0
    assert report.output_cosine == pytest.approx(1, abs=1e-6)


def test_error_report_of_zeros() -> None:
    w = np.zeros((3, 8), np.float32)
    report = cufp8.error_report(w, cufp8.quantize(w), np.ones((2, 8), np.float32))
    assert (report.rel_l2, report.worst_channel_rel_l2) == (0, 0)
    assert (report.underflow, report.crest, report.output_rel_l2) == (0, 0, 0)


def test_error_report_finds_the_worst_channel(rng: np.random.Generator) -> None:
    w = rng.normal(size=(6000, 700)).astype(np.float32)  # several chunks
    q = cufp8.quantize(w)
    spoiled = q.codes.copy()
    spoiled[4321] ^= 0x80
    q = cufp8.QuantizedTensor(spoiled, q.scale, dtype=q.dtype, scale_dtype=q.scale_dtype, shape=q.shape, block=q.block)
    report = cufp8.error_report(w, q)
    assert report.worst_channel_rel_l2 == pytest.approx(2, rel=0.02)
    close(report, reference.error_report(w, q.codes, q.scale))


def test_error_report_of_things_that_do_not_fit(rng: np.random.Generator) -> None:
    w = weights(rng, 4, 6)
    q = cufp8.quantize(w)
    with pytest.raises(ValueError, match=re.escape("[6, 4]")):
        cufp8.error_report(w.T, q)
    with pytest.raises(ValueError, match="7"):
        cufp8.error_report(w, q, np.ones((2, 7), np.float32))


# --- on the GPU ---------------------------------------------------------------------------------
def on_device(w: np.ndarray) -> Any:
    import cupy

    return cupy.asarray(w)


def late_copy(there: Any) -> Any:
    """A copy of an array of CuPy that the current stream makes after much else, so that reading it too early shows."""
    import cupy

    late = cupy.zeros(there.shape, f"u{there.itemsize}")
    for _ in range(200):
        late += late.dtype.type(0)
    late[...] = there.view(late.dtype)
    return late.view(there.dtype)


def check_on_device(w: np.ndarray, view: Any = lambda array: array) -> cufp8.QuantizedTensor:
    """Quantise a view of w on the device; codes, scales and their place must be right."""
    import cupy

    q = cufp8.quantize(view(on_device(w)))
    assert isinstance(q.codes, cupy.ndarray) and isinstance(q.scale, cupy.ndarray)
    assert q.device == f"cuda:{cupy.cuda.Device().id}"
    assert_bits(q, *reference.quantize(view(w)))
    return q


COLUMNS = (1, 7, 8, 15, 16, 17, 31, 33, 63, 65, 129, 1000, 4095, 4096, 4097, 20_011)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", COLUMNS)
def test_device_shapes(rng: np.random.Generator, dtype: str, k: int) -> None:
    for n in (1, 2, 7, 33, 130):
        check_on_device(weights(rng, n, k, dtype))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_small(rng: np.random.Generator, dtype: str) -> None:
    for n, k in ((1, 1), (3, 17), (5, 129)):
        check_on_device(weights(rng, n, k, dtype))
    check_on_device(weights(rng, 9, 40, dtype), lambda w: w[1::2, 1:-2])


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "unaligned" not in name])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_strides(rng: np.random.Generator, dtype: str, layout: str) -> None:
    import cupy

    w = weights(rng, 37, 61, dtype)
    if layout == "fortran":
        q = cufp8.quantize(cupy.asfortranarray(on_device(w)))
        assert_bits(q, *reference.quantize(w))
    elif layout == "one row for all":
        q = cufp8.quantize(cupy.broadcast_to(on_device(w)[2], (6, 61)))
        assert_bits(q, *reference.quantize(np.broadcast_to(w[2], (6, 61))))
    else:
        check_on_device(w, LAYOUTS[layout])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 3, 8])
def test_device_bases_off_16_bytes(rng: np.random.Generator, dtype: str, offset: int) -> None:
    n, k = 13, 264
    flat = weights(rng, 1, n * k + offset, dtype)[0]
    check_on_device(flat, lambda a: a[offset:].reshape(n, k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [255, 2048, 4104, 8192, 8200, 14336])
def test_device_rows_kept_and_rows_read_twice(rng: np.random.Generator, dtype: str, k: int) -> None:
    w = weights(rng, 5, k + 16, dtype)
    check_on_device(np.ascontiguousarray(w[:, :k]))
    check_on_device(w, lambda w: w[:, :k])
    check_on_device(w, lambda w: w[:, 1 : k + 1])  # never on 16 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, -60, 60, -126, 119])
def test_device_codes_and_ties(rng: np.random.Generator, exponent: int) -> None:
    values = _between_neighbours()
    row = np.concatenate([values, -values, reference.VALUES[FINITE], [448, -448]]).astype(np.float32)
    assert len(row) % 4 == 0  # whole pieces of 16 bytes
    w = np.stack([row, rng.permutation(row)]) * np.float32(2.0**exponent)
    q = check_on_device(w)
    assert set(q.codes.get().ravel()) == set(FINITE)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_device_every_16_bit_value(dtype: str) -> None:
    check_on_device(_every_16_bit_value(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "exponent"), [("float16", e) for e in (15, -14)] + [("bfloat16", e) for e in (127, 0, -100, -118, -126)]
)
def test_device_every_quotient_of_16_bit_values(dtype: str, exponent: int) -> None:
    # A row for each amax of a binade, with all values down to those whose code is 0: what the single step of the
    # division in quantize.cu rests on. Many quotients are ties, or one step of float32 beside them.
    values = np.unique(np.abs(_every_16_bit_value(dtype).astype(np.float64)))
    values = values[(values >= 2.0 ** (exponent - 19)) & (values < 2.0 ** (exponent + 1))]
    amax = values[values >= 2.0**exponent]
    w = np.minimum(values, amax[:, None])
    w[:, 1::2] *= -1
    check_on_device(w.astype(kind_of(dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize(("low", "high"), [(-80, 80), (-125, -80), (80, 127.9)])
def test_device_ties_under_any_scale(rng: np.random.Generator, low: float, high: float) -> None:
    amax = np.exp2(rng.uniform(low, high, (500, 1))).astype(np.float32)
    scale = np.maximum(amax.astype(np.float64) / 448, SMALLEST).astype(np.float32)
    near = (scale * reference.TIES[None]).astype(np.float32)
    near = np.where(near < amax, near, 0)
    w = np.concatenate([near, np.nextafter(near, 0), np.nextafter(near, amax)], axis=1)
    w *= rng.choice(np.float32([-1, 1]), w.shape)
    w = np.concatenate([w, amax, -amax], axis=1)
    assert w.shape[1] % 4 == 0  # whole pieces of 16 bytes
    check_on_device(w)


@pytest.mark.gpu
def test_device_scales_are_ieee_quotients(rng: np.random.Generator) -> None:
    amax = rng.integers(1, 0x7F800000, 200_000, dtype=np.uint32).view(np.float32)
    check_on_device(amax[:, None])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_device_zeros_and_subnormals(rng: np.random.Generator, dtype: str) -> None:
    tiny = 2.0**-149 if dtype != "bfloat16" else 2.0**-133
    w = weights(rng, 8, 300, dtype)
    w[0] = 0
    w[1] = -0.0
    w[2] = 0
    w[2, 299] = tiny
    w[3] = (rng.integers(-(2**16), 2**16, 300) * tiny).astype(w.dtype)
    w[4] = 0
    w[4, 0] = 448 * SMALLEST
    w[5] = 0
    w[5, 7] = np.nextafter(np.float32(448 * SMALLEST), np.float32(0)).astype(w.dtype)
    w[6] = 2.0**-130
    q = check_on_device(w)
    assert (q.scale.get()[:2] == 1).all()
    np.testing.assert_array_equal(q.codes.get()[:2], [[0] * 300, [0x80] * 300])


@pytest.mark.gpu
def test_device_float64_is_rounded_to_float32_first(rng: np.random.Generator) -> None:
    w = rng.normal(size=(64, 500)) * np.exp2(rng.integers(-160, 120, (64, 1)))
    w[:, 0] = w[:, 1].astype(np.float32).astype(np.float64) * (1 + 2.0**-24)  # ties of float32
    check_on_device(w)
    w[9, 10] = 1e39
    with pytest.raises(ValueError) as error:
        cufp8.quantize(on_device(w))
    assert_tells(error, 1, (9, 10))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_device_largest_and_smallest_values(dtype: str) -> None:
    top, tiny = float(np.finfo(np.float32).max), 2.0**-149
    amax = np.array([top, 2.0**127, 1, 448 * SMALLEST, 2.0**-117, SMALLEST, 447 * tiny, tiny])[:, None]
    w = amax * np.array([1, -1, 0.5, -(2.0**-18), 0.0, -0.0, -(2.0**-20), 1e-30])
    check_on_device(np.tile(w, 33).astype(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_device_finds_every_16_bit_value_that_is_not_finite(rng: np.random.Generator, dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(kind_of(dtype))
    values = values[~np.isfinite(values.astype(np.float32))]
    w = weights(rng, len(values), 64, dtype)
    at = np.arange(3, 3 + len(values)) % 64
    w[np.arange(len(values)), at] = values
    with pytest.raises(ValueError) as error:
        cufp8.quantize(on_device(w))
    assert_tells(error, len(values), (0, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("k", [1001, 8200])
def test_device_weights_that_are_not_finite(rng: np.random.Generator, dtype: str, value: float, k: int) -> None:
    w = weights(rng, 300, k, dtype)
    at = rng.choice(w.size, 57, replace=False)
    w.reshape(-1)[at] = value
    first = divmod(int(at.min()), k)
    with pytest.raises(ValueError) as error:
        cufp8.quantize(on_device(w))
    assert_tells(error, 57, first)
    with pytest.raises(ValueError) as host_error:
        cufp8.quantize(w)
    assert str(error.value) == str(host_error.value)


@pytest.mark.gpu
def test_device_refuses_what_the_host_refuses() -> None:
    import cupy

    for array, kind in [
        (cupy.ones((2, 3), cupy.int8), TypeError),
        (cupy.ones((2, 3), cupy.complex64), TypeError),
        (cupy.ones((2, 0), cupy.float32), ValueError),
        (cupy.ones(4, cupy.float32), ValueError),
    ]:
        with pytest.raises(kind) as error:
            cufp8.quantize(array)
        with pytest.raises(kind) as host_error:
            cufp8.quantize(array.get())
        assert str(error.value) == str(host_error.value)


@pytest.mark.gpu
def test_device_and_host_and_back(rng: np.random.Generator) -> None:
    w = weights(rng, 33, 129)
    codes, scale = reference.quantize(w)
    there = cufp8.quantize(on_device(w))
    back = there.to("cpu")
    assert back.device == "cpu" and isinstance(back.codes, np.ndarray)
    assert_bits(back, codes, scale)
    assert_bits(cufp8.quantize(w).to("cuda"), codes, scale)
    assert_bits(back.to(there.device), codes, scale)
    assert there.nbytes == back.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_device_and_host_dequantize_alike(rng: np.random.Generator, dtype: str) -> None:
    w = weights(rng, 12, 300)
    w[3] = rng.integers(-(2**20), 2**20, 300) * 2.0**-149  # values subnormal, scale the least
    w[4] = 0
    there = cufp8.quantize(on_device(w))
    got, want = there.dequantize(dtype), there.to("cpu").dequantize(dtype)
    assert got.dtype == want.dtype
    assert (want[3] != 0).any() or dtype == "float16"
    np.testing.assert_array_equal(got.get().astype(np.float64), want.astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["codes", "scale"])
def test_device_tensors_are_validated(bad: str) -> None:
    given = parts()
    if bad == "codes":
        given["codes"][1, 4] = 0xFF
    else:
        given["scale"][1] = 0
    codes, scale = on_device(given.pop("codes")), on_device(given.pop("scale"))
    with pytest.raises(ValueError):
        cufp8.QuantizedTensor(codes, scale, **given)


@pytest.mark.gpu
def test_device_quantiser_on_a_stream_of_its_own(rng: np.random.Generator) -> None:
    import cupy

    w = weights(rng, 2000, 3001)
    there = on_device(w)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        q = cufp8.quantize(late_copy(there))
    stream.synchronize()
    assert_bits(q, *reference.quantize(w))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_tensors_on_the_gpu(rng: np.random.Generator, dtype: str) -> None:
    into = gpu_maker("torch")
    w = weights(rng, 65, 259, dtype)
    t = into(w)
    assert_bits(cufp8.quantize(t), *reference.quantize(w))
    assert_bits(cufp8.quantize(t.T), *reference.quantize(w.T))
    assert_bits(cufp8.quantize(t[3:, 1:]), *reference.quantize(w[3:, 1:]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_jax_arrays_on_the_gpu(rng: np.random.Generator, dtype: str) -> None:
    into = gpu_maker("JAX")
    w = weights(rng, 65, 259, dtype)
    assert_bits(cufp8.quantize(into(w)), *reference.quantize(w))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_made_from_host_weights_has_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    w = weights(rng, 3000, 4001, dtype)  # more than one 32 MiB slice in float32
    assert_bits(cufp8.Linear(w, device="cuda").weight, *reference.quantize(w))
    view = w[::-2, 5::3]
    assert_bits(cufp8.Linear(view, device="cuda").weight, *reference.quantize(view))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1_048_583, 2056), (2053, 1_048_583)], ids=str)
def test_device_beyond_2_31_elements(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    import cupy

    n, k = shape
    assert n * k > 2**31
    # 64 rows are drawn; the weight repeats them, so that the oracle has to see them only once.
    some = min(64, n)
    columns = min(k, 4099)
    tile = weights(rng, some, columns, "bfloat16")
    codes, scale = reference.quantize(tile)
    w = cupy.zeros(shape, tile.dtype)
    start = k - columns  # values at the far end of each row, zeros before
    rows = cupy.arange(n) % some
    for i in range(0, n, 65_536):
        w[i : i + 65_536, start:] = cupy.asarray(tile)[rows[i : i + 65_536]]
    q = cufp8.quantize(w)
    del w
    assert bool((q.scale == cupy.asarray(scale)[rows]).all())
    for i in range(0, n, 65_536):
        part = q.codes[i : i + 65_536]
        assert bool((part[:, start:] == cupy.asarray(codes)[rows[i : i + 65_536]]).all())
        assert not bool(part[:, :start].any())
