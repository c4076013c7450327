"""Formats as data, and the oracle that the other tests trust."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import reference

from cufp8 import formats


def test_e4m3fn_is_what_the_specification_says() -> None:
    # Landmarks of OFP8 revision 1.0, table 2, written out so that a wrong oracle cannot agree with
    # itself.
    for code, value in {
        0x00: 0.0,
        0x01: 2.0**-9,
        0x07: 0.875 * 2.0**-6,
        0x08: 2.0**-6,
        0x38: 1.0,
        0x39: 1.125,
        0x7E: 448.0,
        0xB8: -1.0,
        0xFE: -448.0,
    }.items():
        assert reference.VALUES[code] == value, hex(code)
    assert math.isnan(reference.VALUES[0x7F]) and math.isnan(reference.VALUES[0xFF])
    assert np.isnan(reference.VALUES).sum() == 2
    assert math.copysign(1, reference.VALUES[0x80]) == -1
    assert np.all(np.diff(reference.VALUES[:0x7F]) > 0)


def test_e5m2_is_what_the_specification_says() -> None:
    values = reference.ELEMENTS["float8_e5m2"].values
    for code, value in {
        0x00: 0.0,
        0x01: 2.0**-16,
        0x03: 0.75 * 2.0**-14,
        0x04: 2.0**-14,
        0x3C: 1.0,
        0x3D: 1.25,
        0x7B: 57344.0,
        0x7C: math.inf,
        0xBC: -1.0,
        0xFC: -math.inf,
    }.items():
        assert values[code] == value, hex(code)
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]
    assert math.copysign(1, values[0x80]) == -1
    assert np.all(np.diff(values[:0x7D]) > 0)


@pytest.mark.parametrize("dtype", reference.ELEMENTS)
def test_ml_dtypes_agrees_with_the_oracle_on_all_256_codes(dtype: str) -> None:
    want = reference.ELEMENTS[dtype].values
    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype)).astype(np.float64)
    np.testing.assert_array_equal(values, want)
    sure = ~np.isnan(want)
    assert np.array_equal(np.signbit(values[sure]), np.signbit(want[sure]))


@pytest.mark.parametrize("dtype", reference.ELEMENTS)
def test_the_oracles_two_encoders_agree(rng: np.random.Generator, dtype: str) -> None:
    element = reference.ELEMENTS[dtype]
    edges = np.concatenate([element.ties, np.array(element.magnitudes) * element.unit])
    near = np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1e9), [448.1, 1e30]])
    values = np.concatenate([near, -near, rng.normal(0, 100, 200), rng.normal(0, 0.01, 200)])
    want = [reference.nearest_code(v, bool(np.signbit(v)), dtype) for v in values]
    np.testing.assert_array_equal(reference.encode(values, dtype), want)


def test_the_oracle_on_ties_of_fractions() -> None:
    assert reference.nearest_code(Fraction(1, 1024)) == 0  # half the smallest: the even zero
    assert reference.nearest_code(Fraction(3, 1024)) == 2


@pytest.mark.parametrize("dtype", sorted(reference.OUTPUTS))
def test_the_oracles_output_dtypes(dtype: str) -> None:
    out = reference.OUTPUTS[dtype]
    info = ml_dtypes.finfo(dtype)
    assert out.max == float(info.max)
    assert 2 * out.u == float(info.eps)
    assert 2 * out.eta == float(info.smallest_subnormal)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):
        assert np.isinf(np.float64(out.overflow).astype(kind))
        assert np.isfinite(np.float64(out.overflow * (1 - 2.0**-20)).astype(kind))


# The judge itself: what it must refuse, and that it accepts a right result.
def _case(rng: np.random.Generator, out_dtype: str) -> tuple:
    x = rng.normal(size=(3, 40)).astype(np.float32)
    codes, scale = reference.quantize(rng.normal(size=(5, 40)))
    bias = rng.normal(size=5).astype(np.float32)
    kind = np.dtype(ml_dtypes.bfloat16 if out_dtype == "bfloat16" else out_dtype)
    y = reference.product(x, codes, scale, bias)[0].astype(np.float32).astype(kind)
    return y, x, codes, scale, bias


@pytest.mark.parametrize("dtype", sorted(reference.OUTPUTS))
def test_the_judge_accepts_a_rounded_result_and_nothing_else(rng: np.random.Generator, dtype: str) -> None:
    y, x, codes, scale, bias = _case(rng, dtype)
    acc = 2.0**-23
    assert 0 <= reference.measured_acc(y, x, codes, scale, bias, dtype) <= acc
    assert reference.assert_close(y, x, codes, scale, bias, dtype, acc) <= 1.0
    for value in (math.nan, math.inf, -math.inf, float(y[1, 2]) * 1.02 + 1e-3):
        wrong = y.copy()
        wrong[1, 2] = value
        with pytest.raises(AssertionError, match=r"^1 of 15 .* y\[1, 2\] = "):
            reference.assert_close(wrong, x, codes, scale, bias, dtype, acc)
        needed = reference.measured_acc(wrong, x, codes, scale, bias, dtype)
        assert needed > acc
        if math.isfinite(needed):
            reference.assert_close(wrong, x, codes, scale, bias, dtype, needed)
    for other in (x[:, ::-1], x * np.float32(1.01)):
        with pytest.raises(AssertionError):
            reference.assert_close(y, other, codes, scale, bias, dtype, acc)
    with pytest.raises(AssertionError, match="shape"):
        reference.assert_close(y[:2], x, codes, scale, bias, dtype, acc)
    with pytest.raises(AssertionError, match="not float64"):
        reference.assert_close(y, x, codes, scale, bias, "float64", acc)


def test_the_judge_on_values_that_are_not_finite() -> None:
    codes = reference.encode(np.array([[1.0, 0.0], [-2.0, 1.0]]))
    scale = np.ones((2, 1), np.float32)
    x = np.array([[math.inf, 1], [math.nan, 1], [1, math.inf], [1, 2]], np.float32)
    y = np.array([[math.inf, -math.inf], [math.nan] * 2, [math.nan, math.inf], [1, 0]], np.float32)
    assert reference.assert_close(y, x, codes, scale, None, "float32", 1e-6) <= 1.0
    for at in np.ndindex(y.shape):
        for value in (0.5, math.nan, math.inf, -math.inf):
            wrong = y.copy()
            wrong[at] = value
            if not np.array_equal(wrong, y, equal_nan=True):
                with pytest.raises(AssertionError):
                    reference.assert_close(wrong, x, codes, scale, None, "float32", 1e-6)


def test_the_allowance_is_of_the_scaled_magnitudes(rng: np.random.Generator) -> None:
    # An error of acc * (abs(x) @ abs(w).T + abs(bias)) is measured as just that acc.
    x = rng.normal(size=(2, 50)).astype(np.float32)
    codes, scale = reference.quantize(rng.normal(size=(3, 50)) * 1e-3)
    bias = rng.normal(size=3).astype(np.float32) * np.float32(1e-3)
    w = np.abs(reference.dequantize(codes, scale))
    magnitude = np.abs(x).astype(np.float64) @ w.T + np.abs(bias)
    exact, _ = reference.product(x, codes, scale, bias)
    np.testing.assert_allclose(exact, x @ reference.dequantize(codes, scale).T + bias, rtol=1e-9)
    y = exact.astype(np.float32)
    y[1, 2] = exact[1, 2] + 0.01 * magnitude[1, 2]
    assert reference.measured_acc(y, x, codes, scale, bias, "float32") == pytest.approx(0.01, 1e-3)


def test_the_judge_on_overflow() -> None:
    codes = reference.encode(np.full((4, 1), 448.0))
    # 65504 is the largest float16; from 65520 on, results round to infinity.
    exact = np.array([65519.0, 65521.0, -65521.0, 65504.0])
    scale = np.array([1, 1, 1, 1], np.float32)
    x = np.zeros((1, 1), np.float32)
    y = np.array([[65504, math.inf, -math.inf, 65504]], np.float16)
    assert reference.measured_acc(y, x, codes, scale, exact, "float16") == 0.0
    for i, value in enumerate([math.inf, 65504, 65504, -math.inf]):
        wrong = y.copy()
        wrong[0, i] = value
        assert reference.measured_acc(wrong, x, codes, scale, exact, "float16") > 1e-5
    # The wrong infinity, where the right one would be accepted.
    for i, value in ((1, -math.inf), (2, math.inf)):
        wrong = y.copy()
        wrong[0, i] = value
        assert reference.measured_acc(wrong, x, codes, scale, exact, "float16") == math.inf
    with pytest.raises(ValueError, match="overflow fp32"):
        reference.product(np.float32([[1e38]]), codes, scale)


# --- the package's tables -----------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_formats_row_agrees_with_ml_dtypes(name: str) -> None:
    row = formats.FORMATS[name]
    assert row.name == row.dtype.name == name
    assert row.max == float(ml_dtypes.finfo(name).max)


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448), ("float8_e5m2", 57344)])
def test_fp8_formats_have_rows(dtype: str, largest: float) -> None:
    row, element = formats.FORMATS[dtype], reference.ELEMENTS[dtype]
    assert row.max == element.max == largest
    assert row.table.dtype == np.float32
    np.testing.assert_array_equal(row.table, element.values.astype(np.float32))
    sure = ~np.isnan(element.values)
    assert np.array_equal(np.signbit(row.table[sure]), np.signbit(element.values[sure]))


def test_the_default_scheme() -> None:
    scheme = formats.scheme("FP8A16")
    assert (scheme.dtype, scheme.scale_dtype) == ("float8_e4m3fn", "float32")
    assert scheme.block == (1, -1)
    for name, row in formats.SCHEMES.items():
        assert row.name == name
        assert row.dtype in formats.FORMATS


def test_what_quantised_activations_may_be() -> None:
    rows = {(row.dtype, row.scale_dtype, row.block) for row in formats.ACTIVATIONS}
    blocks = ((-1, -1), (1, -1), (1, 128))
    e8m0 = {(dtype, "float8_e8m0fnu", (1, 32)) for dtype in (*reference.ELEMENTS, "float4_e2m1fn")}
    nvfp4 = ("float4_e2m1fn", "float8_e4m3fn", (1, 16))
    assert rows == {(dtype, "float32", block) for dtype in reference.ELEMENTS for block in blocks} | e8m0 | {nvfp4}
    assert len(formats.ACTIVATIONS) == len(rows)
    assert [row.dtype for row in formats.ACTIVATIONS if row.global_scale] == ["float4_e2m1fn"]
    # A scheme of the same name quantises x so.
    same = [(row, formats.SCHEMES[row.name]) for row in formats.ACTIVATIONS if row.name in formats.SCHEMES]
    assert {row.name for row, _ in same} == {"MXFP8", "MXFP4", "NVFP4"}
    for row, scheme in same:
        assert (row.scale_dtype, row.block, row.global_scale) == (
            scheme.scale_dtype,
            scheme.x_block,
            scheme.global_scale,
        )
        assert row.dtype in (scheme.dtype, "float8_e5m2")


def test_an_unknown_scheme_is_named_beside_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="INT3.*FP8A16"):
        formats.scheme("INT3")


def test_activation_dtypes() -> None:
    # The order is that of `Out` in kernels_cu/linear.cuh.
    assert list(formats.FLOATS) == ["bfloat16", "float16", "float32"]
    assert all(dtype.name == name for name, dtype in formats.FLOATS.items())


def test_the_least_scale_is_the_smallest_normal_float32() -> None:
    assert formats.SCALE_MIN == 2.0**-126


@pytest.mark.parametrize("module", ["formats", "kernels"])
def test_tables_import_nothing_heavy(module: str) -> None:
    heavy = ["cupy", "torch", "jax", "cuda"]
    code = f"import sys, cufp8.{module}; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
