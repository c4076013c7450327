"""Block-scaled formats on the host (NVFP4, MXFP4, MXFP8) against the oracle, bit by bit."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import reference
import reference_blocks as blocks
from reference_blocks import SCHEMES
from test_linear import Cases
from test_quantize import DTYPES, LAYOUTS, assert_tells, kind_of

import cufp8

NV, MX4, MX8 = SCHEMES
E5M2 = "float8_e5m2"
RULES = ("RCEIL", "FLOOR", "EVEN")
CASES = [(NV, "RCEIL"), *((s, rule) for s in (MX4, MX8) for rule in RULES)]  # NVFP4 has no rule to choose
cases = pytest.mark.parametrize(("scheme", "rule"), CASES)
schemes = pytest.mark.parametrize("scheme", SCHEMES)
F32 = np.float32
TOP = np.finfo(F32).max
RAGGED = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 100)
SIZES = ((1, 1), (8, 16), (72, 31), (96, 48), (96, 160), (1856, 144), (72, 2688), (40, 520))  # n and k of layers
HOST_SIZES = (*SIZES, (5, 33), (129, 100), (70, 1000))
TOKENS = (*range(1, 18), 33, 64, 65)


def tokens_of(size: tuple[int, int]) -> tuple[int, ...]:
    """A quarter of TOKENS for each size; four in a row have all."""
    return TOKENS[HOST_SIZES.index(size) % 4 :: 4]


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
    """The exact products, rounded once. Signs of zeros count, those of NaN do not."""
    for dtype in ("float32", "float64"):
        with np.errstate(over="ignore", under="ignore"):
            got, want = q.dequantize(dtype), values.astype(dtype)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got) & ~np.isnan(got), np.signbit(want) & ~np.isnan(want))


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


# Of elements and of scales: values of all codes, from the definitions alone; NaN is that of activations.
VALUES = {"float4_e2m1fn": blocks.FP4_VALUES} | {name: e.values for name, e in reference.ELEMENTS.items()}
SCALES = {"float8_e4m3fn": reference.VALUES, "float8_e8m0fnu": np.append(np.exp2(np.arange(-127.0, 128)), np.nan)}
FACTORS = {"1": [1], "0.0037": [0.0037], "the least": [2.0**-149], "the largest": [TOP], "each row": None}
PRODUCTS = [
    (*SCHEMES[NV], factor, activations) for factor in FACTORS for activations in (False, True)
] + [
    *((*SCHEMES[scheme], None, activations) for scheme in (MX4, MX8) for activations in (False, True)),
    (E5M2, SCHEMES[MX8][1], 32, None, True),  # which is of no scheme of weights
]  # fmt: skip


def allowed(dtype: str, scale_dtype: str, activations: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes, one byte each, and scale codes that a tensor may have: a scale of -0, 0x80, is a zero."""
    codes, scales = VALUES[dtype], SCALES[scale_dtype]
    valid = activations | np.isfinite(codes), (scales >= 0) | (activations & np.isnan(scales))
    return tuple(np.flatnonzero(v).astype(np.uint8) for v in valid)


@pytest.mark.parametrize(("dtype", "scale_dtype", "size", "factor", "activations"), PRODUCTS)
def test_every_code_times_every_scale(
    rng: np.random.Generator, dtype: str, scale_dtype: str, size: int, factor: str | None, activations: bool
) -> None:
    """All at once, no two neighbouring blocks with one scale; and each scale alone, whose products float32 may hold."""
    codes, scales = allowed(dtype, scale_dtype, activations)
    four = dtype == "float4_e2m1fn"
    codes = np.tile(codes, 3) if four else codes  # 48 values: of blocks of 32 one and a half
    n, k, columns = len(scales), len(codes), -(-len(codes) // size)
    g = None if factor is None else F32(FACTORS[factor] or rng.uniform(1e-3, 1, n))

    def made(scale: np.ndarray, g: np.ndarray | None) -> tuple[cufp8.QuantizedTensor, np.ndarray]:
        every = np.broadcast_to(codes, (len(scale), k))
        values = VALUES[dtype][every] * np.repeat(SCALES[scale_dtype][scale], size, axis=1)[:, :k]
        q = cufp8.QuantizedTensor(
            blocks.pack(every) if four else every.copy(), scale, dtype=dtype, scale_dtype=scale_dtype,
            shape=every.shape, block=(1, size), global_scale=g, activations=activations,
        )  # fmt: skip
        return q, values if g is None else values * g.astype(np.float64)[:, None]

    with np.errstate(invalid="ignore"):  # an infinite code by a scale that is NaN
        tensors = [made(scales[(np.arange(n)[:, None] + 97 * np.arange(columns)) % n], g)]
        tensors += [made(np.full((1, columns), scale), None if g is None else g[:1]) for scale in scales]
    for q, values in tensors:
        assert_values(q, values)
        np.testing.assert_array_equal(np.isinf(q.dequantize()), np.abs(values) >= 2.0**128 - 2.0**103)  # half a step on
        if activations:
            continue
        with np.errstate(over="ignore", under="ignore"):
            want = values.T.astype(F32)
        # Of x in blocks too a one stays itself, but for NVFP4's, whose scales are no powers of two.
        for scheme in [q.scheme] if q.scheme == NV else [q.scheme, q.scheme.removesuffix("A16")]:
            layer = cufp8.Linear.from_quantized(q, scheme=scheme, device="cpu")
            np.testing.assert_array_equal(layer(np.eye(k, dtype=F32)), want)


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
        text = f"codes have shape {list(wrong.shape)}; needed is [6, {k if scheme == MX8 else k // 2}]"
        with pytest.raises(ValueError, match=re.escape(text)):
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
    for wrong, seen in ((np.uint8([1, 16]), "[1] is 16"), (np.uint8([255, 0]), "[0] is 255")):
        with pytest.raises(ValueError, match=re.escape(f"low{seen}; an e2m1 code is 0 to 15")):
            cufp8.pack_fp4(wrong, np.uint8([1, 2]))
        with pytest.raises(ValueError, match=re.escape(f"high{seen}; an e2m1 code is 0 to 15")):
            cufp8.pack_fp4(np.uint8([1, 2]), wrong)


BYTES, MATRIX, BUFFER = np.zeros(4, np.uint8), np.zeros((4, 2), np.uint8), np.zeros(512, np.uint8)


@pytest.mark.parametrize(
    ("call", "arguments", "text"),
    [
        ("pack_fp4", (BYTES, BYTES[:3]), "low is uint8 [4], high uint8 [3]; needed are two uint8 arrays of one shape"),
        ("pack_fp4", (MATRIX, MATRIX.T), "low is uint8 [4, 2], high uint8 [2, 4]; needed are two uint8 arrays"),
        ("pack_fp4", (MATRIX, BYTES), "low is uint8 [4, 2], high uint8 [4]; needed are two uint8 arrays"),
        ("pack_fp4", (BYTES.view(np.int8), BYTES), "low is int8 [4], high uint8 [4]; needed are two uint8 arrays"),
        ("pack_fp4", (BYTES, BYTES.astype(F32)), "low is uint8 [4], high float32 [4]; needed are two uint8 arrays"),
        ("unpack_fp4", (BYTES.view(np.int8),), "packed is int8; needed is uint8"),
        ("unpack_fp4", (BYTES.astype(F32),), "packed is float32; needed is uint8"),
        ("to_128x4", (BYTES,), "scales are uint8 [4]; needed is one byte each, 2-D"),
        ("to_128x4", (MATRIX[None],), "scales are uint8 [1, 4, 2]; needed is one byte each, 2-D"),
        ("to_128x4", (MATRIX.astype(F32),), "scales are float32 [4, 2]; needed is one byte each, 2-D"),
        ("to_128x4", (MATRIX.astype(np.uint16),), "scales are uint16 [4, 2]; needed is one byte each, 2-D"),
        ("from_128x4", (BUFFER, 129, 4), "buffer is uint8 [512]; 129 x 4 scales need uint8 [1024]"),
        ("from_128x4", (BUFFER, 128, 5), "buffer is uint8 [512]; 128 x 5 scales need uint8 [1024]"),
        ("from_128x4", (BUFFER[:-1], 128, 4), "buffer is uint8 [511]; 128 x 4 scales need uint8 [512]"),
        ("from_128x4", (BUFFER.reshape(128, 4), 128, 4), "buffer is uint8 [128, 4]; 128 x 4 scales need uint8 [512]"),
        ("from_128x4", (BUFFER.view(np.int8), 128, 4), "buffer is int8 [512]; 128 x 4 scales need uint8 [512]"),
        ("from_128x4", (BUFFER, -200, -5), "rows is -200, columns -5; needed are whole numbers, at least 0"),
        ("from_128x4", (BUFFER, 128, 4.0), "rows is 128, columns 4.0; needed are whole numbers, at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_layouts_of_what_does_not_fit(call: str, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{call}: {text}")):
        getattr(cufp8, call)(*arguments)


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
    for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu):
        assert_same(cufp8.to_128x4(scales.view(kind)), want, "bytes")
        assert_same(cufp8.to_128x4(np.asfortranarray(scales).view(kind)), want, "bytes")
    assert_same(cufp8.to_128x4(scales.repeat(2, axis=1)[:, ::2]), want, "bytes")
    with pytest.raises(ValueError, match=rf"need uint8 \[{want.size}\]"):
        cufp8.from_128x4(got[:-1], rows, columns)


# --- the error report, and Linear -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("scheme", "rule", "about"),
    [
        (NV, "RCEIL", 0.0951),
        *((MX4, "RCEIL", 0.1184), (MX4, "FLOOR", 0.1140), (MX4, "EVEN", 0.1121)),
        *((MX8, "RCEIL", 0.0266), (MX8, "EVEN", 0.0279)),
        *((E5M2, "RCEIL", 0.0528), (E5M2, "FLOOR", 0.0538), (E5M2, "EVEN", 0.0528)),
    ],
)
def test_error_report(rng: np.random.Generator, scheme: str, rule: str, about: float) -> None:
    w = gaussian(rng, 512, 1024).astype(kind_of("bfloat16"))
    x = rng.standard_normal((9, 1024), F32)
    if scheme == E5M2:  # of activations alone
        kind = {"dtype": E5M2, "scale_dtype": SCHEMES[MX8][1]}
        q = cufp8.quantize_activations(w, block=(1, 32), e8m0=rule, **kind)
        back = blocks.quantize_activations(w, rule=rule, **kind).values
    else:
        q, back = cufp8.quantize(w, scheme, e8m0=rule), blocks.quantize(w, scheme, rule).values
    report, exact = cufp8.error_report(w, q, x), w.astype(np.float64)
    assert report.rel_l2 == pytest.approx(np.linalg.norm(exact - back) / np.linalg.norm(exact), rel=1e-5)
    assert report.rel_l2 == pytest.approx(about, rel=0.03)
    assert report.underflow == pytest.approx(((exact != 0) & (back == 0)).sum() / (exact != 0).sum())
    assert (report.bytes_before, report.bytes_after) == (2 * w.size, q.nbytes)
    y, z = x.astype(np.float64) @ exact.T, x.astype(np.float64) @ back.T
    assert report.output_rel_l2 == pytest.approx(np.linalg.norm(z - y) / np.linalg.norm(y), rel=1e-3)


HOST_ACC = 2.0**-20  # of NumPy's float32 products


@schemes
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("shape", HOST_SIZES, ids=str)
def test_linear_on_the_cpu(rng: np.random.Generator, shape: tuple[int, int], dtype: str, scheme: str) -> None:
    n, k = shape
    w = gaussian(rng, n, k).astype(F32)
    x, bias = rng.standard_normal((TOKENS[-1], k)).astype(kind_of(dtype)), rng.standard_normal(n).astype(F32)
    for b in (None, bias):
        layer = cufp8.Linear(w, b, scheme=scheme, device="cpu")
        q = layer.weight
        assert_same(q.codes, blocks.quantize(w, scheme).codes, "codes")
        assert (layer.scheme, layer.shape, layer.device) == (scheme, (n, k), "cpu")
        assert layer.nbytes == q.nbytes + (0 if b is None else 4 * n)
        assert scheme in repr(layer)
        wide, offset = q.dequantize("float64"), np.zeros(n) if b is None else b.astype(np.float64)
        exact = x.astype(np.float64) @ wide.T + offset, np.abs(x.astype(np.float64)) @ np.abs(wide).T + np.abs(offset)
        with Cases() as cases:
            for m in tokens_of(shape):
                with cases("m", m):
                    reference.assert_scaled_close(layer(x[:m]), tuple(e[:m] for e in exact), dtype, HOST_ACC)
        y = cufp8.Linear.from_quantized(q, b, device="cpu")(x[:6].reshape(3, 2, k))
        assert y.shape == (3, 2, n)
        reference.assert_scaled_close(y.reshape(6, n), tuple(e[:6] for e in exact), dtype, HOST_ACC)


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
