"""Block-scaled formats on the host (NVFP4, MXFP4, MXFP8) against the oracle, bit by bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import reference
import reference_blocks as blocks
from reference_blocks import SCHEMES
from test_quantize import DTYPES, LAYOUTS, assert_tells, kind_of

import cufp8

NV, MX4, MX8 = SCHEMES
RULES = ("RCEIL", "FLOOR", "EVEN")
CASES = [(NV, "RCEIL"), *((s, rule) for s in (MX4, MX8) for rule in RULES)]  # NVFP4 has no rule to choose
cases = pytest.mark.parametrize(("scheme", "rule"), CASES)
schemes = pytest.mark.parametrize("scheme", SCHEMES)
F32 = np.float32
TOP = np.finfo(F32).max
RAGGED = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 100)


def assert_same(got: Any, want: np.ndarray, what: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    wrong = got != want
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(f"{wrong.sum()} {what} differ, the first at {at}: {got[at]}, not {want[at]}")


def check(w: Any, scheme: str, rule: str = "RCEIL") -> cufp8.QuantizedTensor:
    """Quantise w and compare all of it with the oracle."""
    n, k = w.shape
    dtype, scale_dtype, size = SCHEMES[scheme]
    q, want = cufp8.quantize(w, scheme, e8m0=rule), blocks.quantize(w, scheme, rule)
    if want.global_scale is None:
        assert q.global_scale is None
    else:
        assert_same(q.global_scale.view(np.uint32), want.global_scale.view(np.uint32), "bits of the global scale")
    assert_same(q.scale, want.scale, "scales")
    assert_same(q.codes, want.codes, "codes")
    assert (q.shape, tuple(q.block), q.dtype, q.scale_dtype) == ((n, k), (1, size), dtype, scale_dtype)
    assert q.device == "cpu"
    assert q.nbytes == want.codes.size + want.scale.size + (4 if scheme == NV else 0)
    assert_values(q, want.values)
    return q


def assert_values(q: cufp8.QuantizedTensor, values: np.ndarray) -> None:
    """The exact products, rounded once. Signs of zeros count."""
    for dtype in ("float32", "float64"):
        with np.errstate(over="ignore", under="ignore"):
            got, want = q.dequantize(dtype), values.astype(dtype)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


# --- random data --------------------------------------------------------------------------------
def gaussian(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.standard_normal((n, k)) * 0.02


def per_block(rng: np.random.Generator, n: int, k: int, low: int, high: int) -> np.ndarray:
    """One power of two for each 16 values: an amax of its own in each block."""
    return np.repeat(np.exp2(rng.integers(low, high, (n, -(-k // 16)))), 16, axis=1)[:, :k]


def zeros(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    live = (rng.random((n, -(-k // 16))) < 0.4).repeat(16, axis=1)[:, :k]
    return np.where(live & (rng.random((n, k)) < 0.5), gaussian(rng, n, k), rng.choice([0.0, -0.0], (n, k)))


def outlier(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    w = gaussian(rng, n, k)
    w[rng.integers(n), rng.integers(k)] = -2e4
    return w


def any_float(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    bits = rng.integers(0, 2**32, (n, k), np.uint32)
    return np.where(bits & 0x7F800000 == 0x7F800000, bits & 0x807FFFFF, bits).astype(np.uint32).view(F32)


DATA = {
    "gaussian": gaussian,
    "blocks of many sizes": lambda r, n, k: r.standard_t(4, (n, k)) * per_block(r, n, k, -24, 1),
    "blocks of all sizes": lambda r, n, k: r.uniform(-1, 1, (n, k)) * per_block(r, n, k, -148, 128),
    "any float": any_float,
    "powers of two": lambda r, n, k: (
        r.choice([-1, 1], (n, k)) * np.exp2(r.integers(-9, 1, (n, k))) * per_block(r, n, k, -130, 128)
    ),
    "few bits": lambda r, n, k: r.integers(-28, 29, (n, k)) * 0.25 * per_block(r, n, k, -6, 6),
    "subnormal": lambda r, n, k: r.integers(-(2**23), 2**23, (n, k)) * 2.0**-149 * per_block(r, n, k, -22, 1),
    "about the least scale": lambda r, n, k: r.uniform(-1, 1, (n, k)) * per_block(r, n, k, -130, -112),
    "huge": lambda r, n, k: r.choice([-1, 1], (n, k)) * np.minimum(r.uniform(0.4, 1.1, (n, k)), 1) * float(TOP),
    "zeros": zeros,
    "only zeros": lambda r, n, k: r.choice([0.0, -0.0], (n, k)),
    "one outlier": outlier,
}


@cases
@pytest.mark.parametrize("data", DATA)
def test_random_weights(rng: np.random.Generator, data: str, scheme: str, rule: str) -> None:
    for n, k in [(1, 640), (64, 160)] + [(n, k) for k in RAGGED for n in (1, 5)]:
        check(DATA[data](rng, n, k).astype(F32), scheme, rule)


def test_the_default_rule_is_rceil(rng: np.random.Generator) -> None:
    w = gaussian(rng, 20, 320).astype(F32)
    for scheme in (MX4, MX8):
        assert_same(cufp8.quantize(w, scheme).scale, blocks.quantize(w, scheme, "RCEIL").scale, "scales")


# --- every code, every tie, every edge of a scale -------------------------------------------------
def nearest(value: float, codes: np.ndarray) -> int:
    """By exact arithmetic, looking at each magnitude: ties to even, saturating."""
    best = min(range(len(codes)), key=lambda c: (abs(Fraction(float(codes[c])) - abs(Fraction(float(value)))), c & 1))
    return best | (len(codes) if np.signbit(value) else 0)


def with_neighbours(a: Any) -> np.ndarray:
    a = np.asarray(a, F32)
    with np.errstate(over="ignore"):
        a = np.concatenate([a, np.nextafter(a, F32(0)), np.nextafter(a, F32(np.inf))])
    return a[np.isfinite(a)]


def codes_and_ties(magnitudes: Any, ties: Any) -> np.ndarray:
    """Those values and the ties with their neighbours, of both signs, float32."""
    values = np.concatenate([magnitudes, with_neighbours(ties)]).astype(F32)
    return np.concatenate([values, -values])


@pytest.mark.parametrize("exponent", [0, 5, -100, -117, 100])
def test_every_e2m1_code_and_tie(exponent: int) -> None:
    values = codes_and_ties([*blocks.E2M1, 5.5], blocks.E2M1_TIES)
    want = np.array([nearest(v, blocks.E2M1) for v in values], np.uint8)
    assert set(want) == set(range(16))
    # Each block of 16 ends in a 6, so that its scale is 2^exponent; for NVFP4 one value is 448 times as much.
    rows = np.full((-(-values.size // 15), 16), 6, F32)
    codes = np.full(rows.shape, 7, np.uint8)
    for i, (v, c) in enumerate(zip(values, want, strict=True)):
        rows[i // 15, i % 15], codes[i // 15, i % 15] = v, c
    for scheme in (NV, MX4):
        w = np.concatenate([rows, np.full((1, 16), 2688 if scheme == NV else 6)]) * 2.0**exponent
        q = check(w.astype(F32), scheme)
        assert_same(blocks.unpack(q.codes, 16)[:-1], codes, "codes")
        assert (q.scale[:-1] == (0x38 if scheme == NV else 127 + exponent)).all()
    # Two different codes in one byte, told by hand: 1 is code 2, -3 is code 13.
    assert cufp8.quantize(F32([[1, -3, 6]]), MX4).codes.tolist() == [[0xD2, 0x07]]


def test_nvfp4_ties_under_any_scale(rng: np.random.Generator) -> None:
    for _ in range(20):
        w = np.zeros((64, 32), F32)
        w[:, ::16] = np.exp2(rng.uniform(-16, 0, (64, 2))) * np.exp2(rng.uniform(-100, 100))
        q = blocks.quantize(w, NV)
        step = blocks.fp32(reference.VALUES[q.scale] * float(q.global_scale[0]))
        near = (step.repeat(15, axis=1) * rng.choice(blocks.E2M1_TIES, (64, 30))).astype(F32)
        near = np.nextafter(near, rng.choice(F32([-np.inf, 1, np.inf]), near.shape) * near).astype(F32)
        w[:, np.arange(32) % 16 > 0] = near * rng.choice(F32([-1, 1]), near.shape)
        limit = np.repeat(np.abs(w[:, ::16]), 16, axis=1)
        check(np.clip(w, -limit, limit), NV)


@pytest.mark.parametrize("exponent", [0, 0.3, -60.7, 90, -126])
def test_nvfp4_edges_of_a_block_scale(exponent: float) -> None:
    # Ties of e4m3, its least values, and what exceeds 448 by a rounding: block maxima of 6 g times these.
    g = F32(2.0**exponent)
    edges = with_neighbours(np.concatenate([reference.TIES, np.array(reference.MAGNITUDES) * 2.0**-9, [2.0**-12]]))
    w = np.zeros((edges.size, 16), F32)
    w[:, 5] = np.minimum(edges.astype(np.float64) * 6 * float(g), 2688.0 * float(g))
    w[:, 9] = w[:, 5] / 3
    w[-1, 5] = F32(2688.0 * float(g))
    q = check(w, NV)
    assert 0 in q.scale and 1 in q.scale and 0x7E in q.scale


def test_nvfp4_the_global_scale_is_an_ieee_quotient(rng: np.random.Generator) -> None:
    amax = [*np.exp2(rng.uniform(-149, 127.9, 300)), TOP, 2688, 2688 * 2.0**-126, 1e-45]
    for value in with_neighbours(amax):
        check(np.array([[value, -value / 7]], F32), NV)


@pytest.mark.parametrize("scheme", [MX4, MX8])
@pytest.mark.parametrize("rule", RULES)
def test_edges_of_e8m0_scales(rng: np.random.Generator, scheme: str, rule: str) -> None:
    lead = [1, 1.5, 1.75, 1.875, 1.9375]
    amax = with_neighbours([m * 2.0**e for m in lead for e in range(-149, 128)])
    w = (amax[:, None] * rng.uniform(-1, 1, (amax.size, 32))).astype(F32)
    w[np.arange(amax.size), rng.integers(0, 32, amax.size)] = amax * rng.choice(F32([-1, 1]), amax.size)
    q = check(w, scheme, rule)
    top = blocks.ELEMENTS[SCHEMES[scheme][0]][0]
    if rule == "RCEIL":  # nothing saturates but for the rounding of 1 / max
        assert (amax <= top * (1 + 2.0**-23) * np.exp2(q.scale[:, 0] - 127.0)).all()


def test_e8m0_scales_by_hand() -> None:
    w = F32([[6], [6.0000005], [7], [6.99], [4], [3], [0], [2.0**-140], [448], [TOP]])
    want = {"RCEIL": [127, 128, 128, 128, 127, 126, 0, 0, 134, 253], "FLOOR": [127, 127, 127, 127, 127, 126, 0, 0, 133]}
    want["EVEN"] = [127, 127, 128, 127, 127, 126, 0, 0, 134, 253]
    want["FLOOR"].append(252)
    assert {rule: cufp8.quantize(w, MX4, e8m0=rule).scale[:, 0].tolist() for rule in RULES} == want
    assert cufp8.quantize(w, MX8).scale[:, 0].tolist() == [121, 121, 121, 121, 121, 120, 0, 0, 127, 247]
    assert cufp8.quantize(with_neighbours([7])[:, None], MX8).scale.tolist() == [[121], [121], [122]]


def test_every_e4m3_code_of_mxfp8() -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0x7E] * 25, np.uint8).reshape(-1, 31)
    codes = np.concatenate([codes, np.full((len(codes), 1), 0xFE, np.uint8)], axis=1)
    for exponent in (0, -118, 118):
        q = check((reference.VALUES[codes] * 2.0**exponent).astype(F32), MX8)
        assert_same(q.codes, codes, "codes")
        assert (q.scale == 127 + exponent).all()


# --- properties ---------------------------------------------------------------------------------
@pytest.mark.parametrize("scheme", [MX4, MX8])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("data", [d for d in DATA if d not in ("huge", "any float", "blocks of all sizes")])
def test_mx_values_are_fixed_points(rng: np.random.Generator, data: str, scheme: str, rule: str) -> None:
    # A block's amax may round down to half of the largest value (3 of 6): RCEIL then takes half the scale, and all
    # codes double, which e2m1 and e4m3 can hold. FLOOR and EVEN find their scale again. Values never change.
    once = cufp8.quantize(DATA[data](rng, 40, 100).astype(F32) * F32(2.0**-3), scheme, e8m0=rule)
    back = once.dequantize("float32")
    twice = cufp8.quantize(back, scheme, e8m0=rule)
    again = twice.dequantize("float32")
    np.testing.assert_array_equal(again, back)
    np.testing.assert_array_equal(np.signbit(again), np.signbit(back))
    if rule != "RCEIL":
        live = blocks.amax_of_blocks(back, 32) > 0
        assert_same(twice.scale[live], once.scale[live], "scales")
        assert_same(twice.codes, once.codes, "codes")


# --- what comes in ------------------------------------------------------------------------------
@schemes
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_strides(rng: np.random.Generator, dtype: str, scheme: str) -> None:
    w = DATA["blocks of many sizes"](rng, 37, 83).astype(kind_of(dtype))
    check(w, scheme)
    for layout in LAYOUTS.values():
        view = layout(w)
        view.flags.writeable = False
        before = view.copy()
        check(view, scheme)
        np.testing.assert_array_equal(view, before)


@schemes
@pytest.mark.parametrize("shape", [(2500, 1031), (2, 2_100_003)])
def test_many_chunks(rng: np.random.Generator, scheme: str, shape: tuple[int, int]) -> None:
    w = rng.standard_normal(shape, F32)
    w[-1, -1] = -50  # NVFP4's global scale is in the last chunk
    q, want = cufp8.quantize(w, scheme), blocks.quantize(w, scheme)
    assert_same(q.scale, want.scale, "scales")
    assert_same(q.codes, want.codes, "codes")
    assert_values(q, want.values)


@schemes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
def test_weights_that_are_not_finite(rng: np.random.Generator, scheme: str, value: float) -> None:
    w = gaussian(rng, 40, 50)
    w[31, 7] = w[31, 49] = w[39, 0] = value
    with pytest.raises(ValueError) as error:
        cufp8.quantize(w, scheme)
    assert_tells(error, 3, (31, 7))


@schemes
def test_float64_is_rounded_to_float32_first(rng: np.random.Generator, scheme: str) -> None:
    w = np.array([[6, 2.5 + 2.0**-40, 3.5 - 2.0**-40, 5 + 2.0**-30, 1e-200, -1e-300]])
    check(w, scheme)
    assert_same(cufp8.quantize(w, scheme).codes, cufp8.quantize(w.astype(F32), scheme).codes, "codes")


def test_names_that_are_refused() -> None:
    w = np.ones((2, 32), F32)
    with pytest.raises(ValueError, match="CEILING") as error:
        cufp8.quantize(w, MX4, e8m0="CEILING")
    assert all(rule in str(error.value) for rule in RULES)
    with pytest.raises(ValueError, match="NVFP5") as error:
        cufp8.quantize(w, "NVFP5")
    assert all(scheme in str(error.value) for scheme in SCHEMES)


# --- codes and scales handed in -------------------------------------------------------------------
def tensor(q: cufp8.QuantizedTensor, **changes: Any) -> cufp8.QuantizedTensor:
    names = ("codes", "scale", "dtype", "scale_dtype", "shape", "block", "global_scale")
    fields = {name: getattr(q, name) for name in names} | changes
    return cufp8.QuantizedTensor(fields.pop("codes"), fields.pop("scale"), **fields)


@schemes
@pytest.mark.parametrize("k", [33, 128])
def test_a_tensor_of_its_parts(rng: np.random.Generator, scheme: str, k: int) -> None:
    w = gaussian(rng, 6, k).astype(F32)
    q, values = cufp8.quantize(w, scheme), blocks.quantize(w, scheme).values
    assert_values(tensor(q), values)
    if scheme == NV:
        rows = np.exp2(rng.integers(-3, 3, 6)).astype(F32)
        many = tensor(q, global_scale=q.global_scale * rows)
        assert many.nbytes == q.codes.size + q.scale.size + 24
        assert_values(many, values * rows[:, None])


@schemes
@pytest.mark.parametrize("k", [100, 128])
def test_shapes_that_are_refused(rng: np.random.Generator, scheme: str, k: int) -> None:
    q = cufp8.quantize(gaussian(rng, 6, k).astype(F32), scheme)
    other = 32 if scheme == NV else 16  # the block of the other family
    columns, rightly = -(-k // other), q.scale.shape[1]
    with pytest.raises(ValueError) as error:
        tensor(q, scale=np.resize(q.scale, (6, columns)))
    assert f"[6, {columns}]" in str(error.value) and f"[6, {rightly}]" in str(error.value), str(error.value)
    with pytest.raises(ValueError):
        tensor(q, block=(1, other))
    for wrong in (q.scale[:5], q.scale[0], q.scale.T):
        with pytest.raises(ValueError):
            tensor(q, scale=wrong)
    for wrong in (q.codes[:, :-1], q.codes[:5], q.codes[0]):
        with pytest.raises(ValueError):
            tensor(q, codes=wrong)
    with pytest.raises(TypeError):
        tensor(q, scale=q.scale.astype(F32))
    with pytest.raises(TypeError):
        tensor(q, codes=q.codes.astype(np.int16))
    with pytest.raises(ValueError):
        tensor(q, global_scale=np.ones(5, F32) if scheme == NV else np.ones(1, F32))


@schemes
def test_codes_and_scales_that_are_refused(rng: np.random.Generator, scheme: str) -> None:
    q = cufp8.quantize(gaussian(rng, 6, 100).astype(F32), scheme)
    for nan in (0x7F, 0xFF) if scheme == NV else (0xFF,):
        scale = q.scale.copy()
        scale[3, 2] = scale[5, 0] = nan
        with pytest.raises(ValueError, match="scale") as error:
            tensor(q, scale=scale)
        assert "2 of" in str(error.value) and "row 3, block 2" in str(error.value), str(error.value)
    if scheme == NV:
        with pytest.raises(ValueError, match="row 0, block 0"):
            tensor(q, scale=q.scale | np.uint8(0x80))
    scale = q.scale.copy()
    scale[0, 0], scale[0, 1] = 0, 0x7E if scheme == NV else 0xFE  # the ends that are allowed
    assert tensor(q, scale=scale).scale[0, 1] == scale[0, 1]
    if scheme == MX8:
        codes = q.codes.copy()
        codes[2, 99], codes[4, 0] = 0x7F, 0xFF
        with pytest.raises(ValueError, match="codes") as error:
            tensor(q, codes=codes)
        assert_tells(error, 2, (2, 99))
    if scheme == NV:
        for value in (0, -1, math.inf, math.nan):
            for size, at in ((1, 0), (6, 4)):
                g = np.ones(size, F32)
                g[at] = value
                with pytest.raises(ValueError, match="global") as error:
                    tensor(q, global_scale=g)
                assert str(at) in str(error.value), str(error.value)


# --- layouts ------------------------------------------------------------------------------------
def test_pack_fp4(rng: np.random.Generator) -> None:
    low, high = np.divmod(np.arange(256, dtype=np.uint8), 16)
    packed = cufp8.pack_fp4(low, high)
    assert packed.dtype == np.uint8 and packed.tolist() == [i // 16 + 16 * (i % 16) for i in range(256)]
    for shape in ((1, 1), (5, 7), (3, 0), (2, 3, 4)):
        low, high = rng.integers(0, 16, (2, *shape), np.uint8)
        back = cufp8.unpack_fp4(cufp8.pack_fp4(low, high))
        assert_same(back[0], low, "low nibbles")
        assert_same(back[1], high, "high nibbles")
    for wrong in (np.uint8([1, 16]), np.uint8([255, 0])):
        with pytest.raises(ValueError):
            cufp8.pack_fp4(wrong, np.uint8([1, 2]))
        with pytest.raises(ValueError):
            cufp8.pack_fp4(np.uint8([1, 2]), wrong)


@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (32, 5), (33, 3), (127, 8), (128, 4), (129, 9), (300, 13)], ids=str)
def test_128x4(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    rows, columns = shape
    scales = rng.integers(1, 256, shape, np.uint8)
    want = np.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, np.uint8)
    for r in range(rows):
        for c in range(columns):
            want[blocks.offset_128x4(r, c, columns)] = scales[r, c]
    got = cufp8.to_128x4(scales)
    assert_same(got, want, "bytes")
    assert_same(cufp8.to_128x4(np.asfortranarray(scales)), want, "bytes")
    assert_same(cufp8.from_128x4(got, rows, columns), scales, "scales")
    with pytest.raises(ValueError):
        cufp8.from_128x4(got[:-1], rows, columns)


# --- the error report, and Linear -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "rule", "about"),
    [(NV, "RCEIL", 0.0951), (MX4, "RCEIL", 0.1184), (MX4, "FLOOR", 0.1140), (MX8, "RCEIL", 0.0266)],
)
def test_error_report(rng: np.random.Generator, scheme: str, rule: str, about: float) -> None:
    w = gaussian(rng, 512, 1024).astype(kind_of("bfloat16"))
    x = rng.standard_normal((9, 1024), F32)
    q = cufp8.quantize(w, scheme, e8m0=rule)
    report = cufp8.error_report(w, q, x)
    exact, back = w.astype(np.float64), blocks.quantize(w, scheme, rule).values
    assert report.rel_l2 == pytest.approx(np.linalg.norm(exact - back) / np.linalg.norm(exact), rel=1e-5)
    assert report.rel_l2 == pytest.approx(about, rel=0.03)
    assert report.underflow == pytest.approx(((exact != 0) & (back == 0)).sum() / (exact != 0).sum())
    assert (report.bytes_before, report.bytes_after) == (2 * w.size, q.nbytes)
    y, z = x.astype(np.float64) @ exact.T, x.astype(np.float64) @ back.T
    assert report.output_rel_l2 == pytest.approx(np.linalg.norm(z - y) / np.linalg.norm(y), rel=1e-3)


HOST_ACC = 2.0**-20  # of NumPy's float32 products


@schemes
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (129, 100), (70, 1000)], ids=str)
def test_linear_on_the_cpu(rng: np.random.Generator, shape: tuple[int, int], dtype: str, scheme: str) -> None:
    n, k = shape
    w = gaussian(rng, n, k).astype(F32)
    x, bias = rng.standard_normal((3, 2, k)).astype(kind_of(dtype)), rng.standard_normal(n).astype(F32)
    for b in (None, bias):
        layer = cufp8.Linear(w, b, scheme=scheme, device="cpu")
        q = layer.weight
        assert_same(q.codes, blocks.quantize(w, scheme).codes, "codes")
        assert (layer.scheme, layer.shape, layer.device) == (scheme, (n, k), "cpu")
        assert layer.nbytes == q.nbytes + (0 if b is None else 4 * n)
        assert scheme in repr(layer)
        wide, offset = q.dequantize("float64"), np.zeros(n) if b is None else b.astype(np.float64)
        ref = x.astype(np.float64) @ wide.T + offset
        bound = np.abs(x.astype(np.float64)) @ np.abs(wide).T + np.abs(offset)
        out = reference.OUTPUTS[dtype]
        for y in (layer(x), cufp8.Linear.from_quantized(q, b, device="cpu")(x)):
            assert (y.dtype, y.shape) == (x.dtype, (3, 2, n))
            error = np.abs(y.astype(np.float64) - ref)
            assert (error <= out.u * np.abs(ref) + out.eta + HOST_ACC * bound).all()


# 128 x 128 blocks, which only checkpoints have


def blocked(
    n: int, k: int, scale_dtype: str, rng: np.random.Generator, **options: Any
) -> tuple[cufp8.QuantizedTensor, np.ndarray]:
    """Random codes and scales, and their values in float64."""
    codes = rng.integers(0, 0x7F, (n, k), np.uint8) | rng.integers(0, 2, (n, k), np.uint8) << 7
    shape = -(-n // 128), -(-k // 128)
    if scale_dtype == "float32":
        scale = rng.uniform(1e-3, 1, shape).astype(np.float32)
        wide = scale.astype(np.float64)
    else:
        scale = rng.integers(0, 255, shape, np.uint8)
        wide = np.ldexp(1.0, scale.astype(np.int64) - 127)
    q = cufp8.QuantizedTensor(
        codes, scale, dtype="float8_e4m3fn", scale_dtype=scale_dtype, shape=(n, k), block=(128, 128), **options
    )
    return q, reference.VALUES[codes] * wide[np.arange(n)[:, None] // 128, np.arange(k) // 128]


@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
@pytest.mark.parametrize(
    "n, k", [(1, 1), (128, 128), (129, 127), (300, 128), (257, 300), (9, 4544), (3, 1 << 20)], ids=str
)
def test_blocks_of_rows_and_columns(n: int, k: int, scale_dtype: str, rng: np.random.Generator) -> None:
    q, values = blocked(n, k, scale_dtype, rng)
    assert (q.scheme, q.block, q.nbytes) == ("FP8A16", (128, 128), n * k + q.scale.nbytes)
    np.testing.assert_array_equal(q.dequantize("float64"), values)
    with np.errstate(over="ignore", under="ignore"):
        np.testing.assert_array_equal(q.dequantize(), values.astype(np.float32))
    if scale_dtype == "float32":
        x = rng.standard_normal((2, k)).astype(np.float32)
        y, ref = cufp8.Linear.from_quantized(q, device="cpu")(x), x.astype(np.float64) @ values.T
        assert (
            np.abs(y - ref) <= 2.0**-24 * np.abs(ref) + 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(values).T)
        ).all()


def test_blocks_of_rows_and_columns_that_do_not_fit(rng: np.random.Generator) -> None:
    make = dict(dtype="float8_e4m3fn", scale_dtype="float32", shape=(200, 100), block=(128, 128))
    codes = np.zeros((200, 100), np.uint8)
    for scale in (np.ones((200, 1), np.float32), np.ones(2, np.float32), np.ones((1, 2), np.float32)):
        with pytest.raises(ValueError, match=r"needed is \[2, 1\], a scale per block of 128 rows and 128 columns"):
            cufp8.QuantizedTensor(codes, scale, **make)
    with pytest.raises(ValueError, match="are no scheme"):
        cufp8.QuantizedTensor(codes, np.ones((2, 1), np.float32), **make, activations=True)
    with pytest.raises(ValueError, match="are no scheme"):
        cufp8.QuantizedTensor(codes, np.ones((4, 2), np.float32), **{**make, "block": (64, 64)})


@pytest.mark.gpu
def test_blocks_of_rows_and_columns_on_a_gpu(rng: np.random.Generator) -> None:
    q, _ = blocked(200, 300, "float32", rng)
    on_gpu = q.to("cuda")
    np.testing.assert_array_equal(on_gpu.dequantize().get(), q.dequantize())
