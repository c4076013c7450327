"""Block-scaled activations against the oracle, and (marked gpu) all of quantize_blocks.cu against the host, by bits."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
import reference
import reference_blocks as blocks
from test_activations import NAN, activations, on_device
from test_block_scaled import CASES, DATA, NV, any_float, assert_same, codes_and_ties, gaussian, nearest
from test_interop import gpu_maker, libraries
from test_quantize import DTYPES, LAYOUTS, assert_tells, kind_of, late_copy

import cufp8
from cufp8 import activations as activations_module
from cufp8 import kernels, quantize_activations
from cufp8.formats import FLOATS

F32 = np.float32
E2M1, E4M3, E5M2, E8M0 = "float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"
KINDS = {"NVFP4": (E2M1, E4M3), "MXFP4": (E2M1, E8M0), "MXFP8": (E4M3, E8M0), "MXFP8-e5m2": (E5M2, E8M0)}
RULES = ("RCEIL", "FLOOR", "EVEN")
RAGGED = (1, 15, 16, 17, 31, 32, 33, 48, 144, 160)
kinds = pytest.mark.parametrize("kind", KINDS)
ruled = pytest.mark.parametrize(
    ("kind", "rule"), [("NVFP4", "RCEIL"), *((kind, rule) for kind in KINDS if kind != "NVFP4" for rule in RULES)]
)
x_dtypes = pytest.mark.parametrize("x_dtype", FLOATS)


def options_of(kind: str, rule: str = "RCEIL") -> dict[str, Any]:
    dtype, scale_dtype = KINDS[kind]
    return {"block": (1, 16 if scale_dtype == E4M3 else 32), "dtype": dtype, "scale_dtype": scale_dtype, "e8m0": rule}


def quantize(x: Any, kind: str, rule: str = "RCEIL", **more: Any) -> cufp8.QuantizedTensor:
    return quantize_activations(x, **options_of(kind, rule), **more)


def check(x: np.ndarray, kind: str, rule: str = "RCEIL", global_scale: float | None = None) -> cufp8.QuantizedTensor:
    """Quantise x on the host and compare all of it with the oracle."""
    dtype, scale_dtype = KINDS[kind]
    q = quantize(x, kind, rule, global_scale=global_scale)
    want = blocks.quantize_activations(x, dtype, scale_dtype, rule, global_scale)
    if kind == "NVFP4":
        assert_same(q.global_scale.view(np.uint32), want.global_scale.view(np.uint32), "bits of global scales")
    else:
        assert q.global_scale is None
    assert_same(q.scale, want.scale, "scales")
    assert_same(q.codes, want.codes, "codes")
    assert (q.shape, q.dtype, q.scale_dtype, q.device) == (x.shape, dtype, scale_dtype, "cpu")
    assert q.scheme == kind.split("-")[0] and q.activations and q.scheme in repr(q)
    np.testing.assert_array_equal(q.dequantize("float64"), want.values)  # NaN where they are NaN
    return q


# --- activations on the host ----------------------------------------------------------------------
@ruled
@pytest.mark.parametrize("data", DATA)
def test_random_activations(rng: np.random.Generator, data: str, kind: str, rule: str) -> None:
    for m, k in [(64, 160), *((5, k) for k in RAGGED)]:
        check(DATA[data](rng, m, k).astype(F32), kind, rule)


@ruled
@x_dtypes
@pytest.mark.parametrize("k", RAGGED)
def test_activations_that_are_not_finite(rng: np.random.Generator, kind: str, rule: str, x_dtype: str, k: int) -> None:
    x = activations(rng, 12, k, dtype=x_dtype)
    clean = quantize(x, kind, rule)
    for i, value in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        x[1 + i, -1], x[6, i::7] = value, value
    x[7], x[8] = math.nan, -math.inf
    q = check(x, kind, rule)
    same = [0, 5, 9, 10, 11]
    for name in ("codes", "scale") if q.global_scale is None else ("codes", "scale", "global_scale"):
        assert_same(getattr(q, name)[same], getattr(clean, name)[same], name)
    if q.dtype == E2M1:
        assert (q.scale[[1, 2, 3, 4, 7, 8], -1] == (0x7F if kind == "NVFP4" else 0xFF)).all()
        assert not q.codes[7:9].any()
    else:
        assert (q.codes[1:5, -1] == NAN).all() and (q.codes[7:9] == NAN).all() and not q.scale[7:9].any()
    lost = np.isnan(q.dequantize())
    assert lost[7:9].all() and not lost[same].any()
    assert q.global_scale is None or (q.global_scale[7:9] == 1).all()


@kinds
def test_zeros_keep_their_sign(kind: str) -> None:
    x = np.zeros((3, 33), F32)
    x[1] = -0.0
    x[2, 32] = -0.0
    q = check(x, kind)
    assert not q.scale.any() and (q.global_scale is None or (q.global_scale == 1).all())
    minus = 0x88 if q.dtype == E2M1 else 0x80
    assert not q.codes[0].any() and (q.codes[1, :16] == minus).all()
    assert q.codes[2].tolist()[-1] == (8 if q.dtype == E2M1 else 0x80) and not q.codes[2, :-1].any()


@pytest.mark.parametrize("exponent", [0, 5, -100, -117, 100])
def test_every_e2m1_code_and_tie(exponent: int) -> None:
    values = codes_and_ties([*blocks.E2M1, 5.5], blocks.E2M1_TIES)
    codes = np.array([nearest(v, blocks.E2M1) for v in values], np.uint8)
    assert set(codes) == set(range(16))
    for kind, size, largest in (("NVFP4", 16, 2688), ("MXFP4", 32, 6)):
        # A row each: the value twice, and what makes its block's scale 1 (and the row's global scale).
        x = np.zeros((values.size, 2 * size), F32)
        x[:, 0], x[:, size - 2], x[:, 1], x[:, -1] = values, values, 6, largest
        q = check(x * F32(2.0**exponent), kind)
        found = blocks.unpack(q.codes, 2 * size)
        assert_same(found[:, 0], codes, "codes")
        assert_same(found[:, size - 2], codes, "codes")


@pytest.mark.parametrize("kind", ["MXFP8", "MXFP8-e5m2"])
@pytest.mark.parametrize("exponent", [0, -60, 60])
def test_every_fp8_code_and_tie(kind: str, exponent: int) -> None:
    element = reference.ELEMENTS[KINDS[kind][0]]
    values = codes_and_ties(np.array(element.magnitudes) * element.unit, element.ties)
    x = np.full((values.size, 32), element.max, F32)
    x[:, 7] = values
    q = check(x * F32(2.0**exponent), kind)
    codes = [reference.nearest_code(v, bool(np.signbit(v)), KINDS[kind][0]) for v in values]
    assert q.codes[:, 7].tolist() == codes


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@ruled
def test_every_16_bit_value(kind: str, rule: str, x_dtype: str) -> None:
    values = np.arange(2**16, dtype=np.uint16).view(kind_of(x_dtype))
    order = np.argsort(np.abs(values.astype(F32)), kind="stable")
    check(values[order].reshape(-1, 256), kind, rule)


@pytest.mark.parametrize("scheme", [NV, "MXFP4A16", "MXFP8A16"])
def test_a_token_is_quantised_as_a_weight_of_one_row(rng: np.random.Generator, scheme: str) -> None:
    x = DATA["blocks of many sizes"](rng, 9, 144).astype(F32)
    q = quantize(x, scheme.removesuffix("A16"))
    for i in range(9):
        w = cufp8.quantize(x[i : i + 1], scheme)
        assert_same(q.codes[i : i + 1], w.codes, "codes")
        assert_same(q.scale[i : i + 1], w.scale, "scales")
        assert w.global_scale is None or w.global_scale[0] == q.global_scale[i]


GIVEN = (1.0, 0.37, 2.0**-149, 2.0**-126, 1e-40, 2.0**125, 2.0**100, 2.0**-100, 3.3e30, 1e-20)


@pytest.mark.parametrize("given", GIVEN)
def test_given_global_scales(rng: np.random.Generator, given: float) -> None:
    x = activations(rng, 9, 200, wild=True)
    x[0, :6] = [3e38, -3e38, 1e-38, -1e-38, 1e30, -1e-30]
    q = check(x, "NVFP4", global_scale=given)
    assert q.global_scale.tolist() == [F32(given)]
    for form in (F32(given), F32([given]), F32([[given]])):
        assert_same(quantize(x, "NVFP4", global_scale=form).codes, q.codes, "codes")


@kinds
def test_dimensions_are_folded_and_there_may_be_no_tokens(rng: np.random.Generator, kind: str) -> None:
    x = activations(rng, 3, 4, 50)
    q = quantize(x.reshape(12, 50), kind)
    for view in (x, x.swapaxes(0, 1).copy().swapaxes(0, 1)):
        again = quantize(view, kind)
        assert again.shape == (12, 50)
        assert_same(again.codes, q.codes, "codes")
    assert quantize(x[0, 0], kind).shape == (1, 50)
    none = quantize(x[:0], kind)
    assert none.shape == (0, 50) and none.dequantize().shape == (0, 50)
    assert none.scale.shape == (0, 4 if kind == "NVFP4" else 2)
    if kind == "NVFP4":
        assert none.global_scale.shape == (0,) and quantize(x[:0], kind, global_scale=2).global_scale.tolist() == [2]


@kinds
def test_out(rng: np.random.Generator, kind: str) -> None:
    x = activations(rng, 6, 100, wild=True)
    q, out = quantize(x, kind), quantize(np.ones_like(x), kind)
    wide = np.full((6, 150), 0xEE, np.uint8)
    out.codes = wide[:, 3 : 3 + q.codes.shape[1]]
    assert quantize(x, kind, out=out) is out
    assert_same(out.codes, q.codes, "codes")
    assert_same(out.scale, q.scale, "scales")
    assert kind != "NVFP4" or (out.global_scale == q.global_scale).all()
    assert (wide[:, :3] == 0xEE).all() and (wide[:, 3 + q.codes.shape[1] :] == 0xEE).all()
    with pytest.raises(ValueError, match="needed is"):
        quantize(x[:5], kind, out=out)
    with pytest.raises(ValueError, match="needed is"):
        quantize_activations(x, out=out)
    if kind == "NVFP4":
        with pytest.raises(ValueError, match=r"out.global_scale has shape \[6\]; needed is \[1\]"):
            quantize(x, kind, out=out, global_scale=1)


def test_what_is_refused() -> None:
    x = np.ones((2, 64), F32)
    e8m0, e4m3 = {"scale_dtype": E8M0}, {"scale_dtype": E4M3, "dtype": E2M1, "block": (1, 16)}
    for text, options in [
        ("scale_dtype is 'float16'; allowed are float32, float8_e8m0fnu, float8_e4m3fn.", {"scale_dtype": "float16"}),
        ("block is (1, -1); allowed are (1, 32) with float8_e8m0fnu scales.", e8m0),
        ("block is (1, 16); allowed are (1, 32) with float8_e8m0fnu scales.", e8m0 | {"block": (1, 16)}),
        ("dtype is 'float8_e4m3fn'; allowed are float4_e2m1fn with float8_e4m3fn scales.", {"scale_dtype": E4M3}),
        ("dtype is 'float4_e2m1fn'; allowed are float8_e4m3fn, float8_e5m2.", {"dtype": E2M1}),
        ("e8m0 is 'CEIL'; allowed are RCEIL, FLOOR, EVEN.", e8m0 | {"block": (1, 32), "e8m0": "CEIL"}),
        ("a scale was given with block (1, 32);", e8m0 | {"block": (1, 32), "scale": 1.0}),
        ("a global_scale was given with float8_e8m0fnu scales,", e8m0 | {"block": (1, 32), "global_scale": 1.0}),
        ("a global_scale was given with float32 scales,", {"global_scale": 1.0}),
        *(
            (f"global_scale is {F32(g)} as float32; needed is above 0 and at most 2^125.", e4m3 | {"global_scale": g})
            for g in (0.0, -1.0, math.nan, math.inf, 2.0**126, 1e-60)
        ),
        ("global_scale has shape [2]; needed is one element.", e4m3 | {"global_scale": np.ones(2, F32)}),
    ]:
        with pytest.raises(ValueError) as error:
            quantize_activations(x, **options)
        assert str(error.value).startswith(f"quantize_activations: {text}"), str(error.value)
    with pytest.raises(TypeError, match="global_scale is float64; needed is a number or a float32 array"):
        quantize_activations(x, **e4m3, global_scale=np.ones(1))


@kinds
def test_a_tensor_of_its_parts(rng: np.random.Generator, kind: str) -> None:
    q = quantize(activations(rng, 5, 70, wild=True), kind)
    options = {name: getattr(q, name) for name in ("dtype", "scale_dtype", "shape", "block", "global_scale")}
    nan = 0x7F if kind == "NVFP4" else 0xFF
    scale = q.scale.copy()
    scale[2, 1] = nan
    back = cufp8.QuantizedTensor(q.codes, scale, activations=True, **options)
    assert back.scheme == kind.split("-")[0] and np.isnan(back.dequantize()[2, back.block[1] : 2 * back.block[1]]).all()
    with pytest.raises(ValueError, match="row 2, block 1"):
        clean = np.where(q.scale == nan, 0, scale).astype(np.uint8)
        clean[2, 1] = nan
        cufp8.QuantizedTensor(q.codes & 0x37, clean, **options)
    if kind == "NVFP4":
        scale[2, 1] = 0x81
        with pytest.raises(ValueError, match="row 2, block 1: code 0x81"):
            cufp8.QuantizedTensor(q.codes, scale, activations=True, **options)
    with pytest.raises(ValueError):
        cufp8.Linear.from_quantized(q, device="cpu")


PEAK = """
import tracemalloc, ml_dtypes, numpy as np, cufp8
shape, options = {case!r}
x = np.ones(shape, ml_dtypes.bfloat16)
run = lambda x: cufp8.quantize_activations(x, **options) if "block" in options else cufp8.quantize(x, **options)
run(x[:1])  # tables
tracemalloc.start()
kept = run(x).nbytes
print(tracemalloc.get_traced_memory()[1] - kept)
"""


@pytest.mark.parametrize("shape", [(6400, 4096), (5_000_000, 1), (2, 9_000_000)], ids=str)
@pytest.mark.parametrize("kind", ["NVFP4", "MXFP8", "MXFP4A16"])
def test_extra_memory_stays_under_64_mib(shape: tuple[int, int], kind: str) -> None:
    script = textwrap.dedent(PEAK.format(case=(shape, options_of(kind) if kind in KINDS else {"scheme": kind})))
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 64 << 20, f"{int(out.stdout) / 2**20:.0f} MiB"


# --- the table, and the kernel's arithmetic -------------------------------------------------------
@pytest.mark.parametrize("entry", kernels.ROWS["quantize_blocks"].entries(kernels.ARCHS["sm_90a"]))
@pytest.mark.parametrize("k", [1, 16, 32, 2880, 4096, 14_336, 16_384, 28_672, 2**20, 2**28])
def test_every_value_has_a_thread(entry: str, k: int) -> None:
    x, y, z = (launch := kernels.blocks_launch(entry, 7, k)).grid
    assert (x, z) == (7, 1) and 1 <= y <= 65_535 and launch.block % 32 == 0
    assert kernels.blocks_launch(entry, 0, k).grid[0] == 1  # there a global scale is still written
    what, x_dtype, *_ = entry.split("_")
    if entry.endswith("_any") or what == "dequantize":
        assert launch.block == kernels.BLOCK_THREADS
        return
    token = entry.endswith("_token") or what == "values"
    assert launch.block <= (kernels.BLOCK_ROW_THREADS if token else kernels.BLOCK_THREADS)
    if k <= kernels.block_most(x_dtype, token):
        values = 16 * kernels.BLOCK_KEPT[FLOATS[x_dtype].itemsize]
        assert values * launch.block * (y - 1) < k <= values * launch.block * y and (y == 1 or not token)
        many = kernels.blocks_launch(entry, 5000, k)
        assert many.grid == (5000, y, 1) and k <= values * many.block * y and many.block <= launch.block
    else:
        assert token


@pytest.mark.parametrize("bits", [8, 11], ids=["bfloat16", "float16"])
def test_the_short_division_beside_every_tie(bits: int) -> None:
    """quantize_blocks.cu's quotient of 16-bit values decides as IEEE's, but where a mantissa is all ones.

    Every mantissa of a value, and every divisor that takes it within four steps of where float32 quotients begin to
    round to a tie of e2m1 (its half): elsewhere an error of less than a step decides nothing.
    """
    ties = (blocks.E2M1_TIES / 2).astype(F32)
    edges = np.concatenate(
        [ties, *((ties.astype(np.float64) + np.nextafter(ties, F32(to)).astype(np.float64)) / 2 for to in (0, 9))]
    )
    v = np.arange(2 ** (bits - 1), 2**bits, dtype=np.float64)[:, None]
    by = v / edges
    power = np.exp2(23 - np.floor(np.log2(by)))
    by, v = by * power, v * power
    by = (np.floor(by)[..., None] + np.arange(-4, 5)).astype(F32)  # 24 bits
    v = np.broadcast_to(v[..., None], by.shape).astype(F32)
    fma, one = activations_module._fma, F32(1)
    reciprocal = one / by
    missing = fma(-by, reciprocal, one) * reciprocal
    got, want = fma(v, reciprocal, v * missing), v / by
    wrong = got != want
    assert (by[wrong].view(np.uint32) & 0x7FFFFF == 0x7FFFFF).all()
    assert wrong.sum() < 9  # else it would hardly be worth the branch


# --- on the GPU -----------------------------------------------------------------------------------
def assert_bits(q: cufp8.QuantizedTensor, wanted: cufp8.QuantizedTensor, *case: Any) -> None:
    """What the GPU made has the bits of the host's, and is where and what it should be."""
    import cupy

    assert all(isinstance(a, cupy.ndarray) for a in (q.codes, q.scale)), case
    assert q.device == f"cuda:{cupy.cuda.Device().id}"
    for name in ("shape", "block", "scheme", "dtype", "scale_dtype", "activations"):
        assert getattr(q, name) == getattr(wanted, name), (name, *case)
    here = q.to("cpu")
    if wanted.global_scale is not None:
        text = f"bits of global scales of {case}"
        assert_same(here.global_scale.view(np.uint32), wanted.global_scale.view(np.uint32), text)
    assert_same(here.scale, wanted.scale, f"scales of {case}")
    assert_same(here.codes, wanted.codes, f"codes of {case}")


def weight_on_device(w: np.ndarray, scheme: str, rule: str, view: Any = lambda a: a) -> cufp8.QuantizedTensor:
    q = cufp8.quantize(view(on_device(w)), scheme, e8m0=rule)
    assert_bits(q, cufp8.quantize(view(w), scheme, e8m0=rule), scheme, rule, w.dtype, w.shape)
    return q


def token_on_device(x: np.ndarray, kind: str, rule: str = "RCEIL", view: Any = lambda a: a, **more: Any) -> Any:
    q = quantize(view(on_device(x)), kind, rule, **more)
    assert_bits(q, quantize(view(x), kind, rule, **more), kind, rule, x.dtype, x.shape, more)
    return q


def cast(x: np.ndarray, dtype: str) -> np.ndarray:
    """Finite in the dtype too."""
    with np.errstate(over="ignore"):
        y = x.astype(kind_of(dtype))
    return np.where(np.isfinite(y.astype(F32)), y, y.dtype.type(1))


cases = pytest.mark.parametrize(("scheme", "rule"), CASES)
DEVICE_K = (*RAGGED, 2, 63, 64, 100, 2688, 4096, 4097, 4112, 14_336, 20_000, 33_024)


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_weights(rng: np.random.Generator, dtype: str, scheme: str, rule: str) -> None:
    for k in DEVICE_K:
        for n in (1, 7) if k > 4096 else (1, 2, 33):
            weight_on_device(cast(DATA["blocks of many sizes"](rng, n, k).astype(F32), dtype), scheme, rule)


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("data", DATA)
def test_device_weights_of_all_kinds(rng: np.random.Generator, data: str, scheme: str, rule: str) -> None:
    for dtype in DTYPES:
        for n, k in ((64, 640), (5, 100)):
            weight_on_device(cast(DATA[data](rng, n, k).astype(F32), dtype), scheme, rule)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_small_weights(rng: np.random.Generator, dtype: str) -> None:
    for scheme, rule in CASES:
        for n, k in ((1, 1), (3, 17), (5, 160)):
            weight_on_device(cast(gaussian(rng, n, k), dtype), scheme, rule)
        weight_on_device(cast(gaussian(rng, 9, 80), dtype), scheme, rule, lambda w: w[1::2, 1:-2])


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "unaligned" not in name])
def test_device_strides(rng: np.random.Generator, layout: str, scheme: str, rule: str) -> None:
    import cupy

    for dtype in DTYPES:
        w = cast(gaussian(rng, 37, 64), dtype)
        if layout == "fortran":
            q = cufp8.quantize(
                cupy.asfortranarray(on_device(w).view(f"u{w.itemsize}")).view(w.dtype), scheme, e8m0=rule
            )
            assert_bits(q, cufp8.quantize(w, scheme, e8m0=rule), dtype)
        elif layout == "one row for all":
            q = cufp8.quantize(cupy.broadcast_to(on_device(w)[2], (6, 64)), scheme, e8m0=rule)
            assert_bits(q, cufp8.quantize(np.broadcast_to(w[2], (6, 64)), scheme, e8m0=rule), dtype)
        else:
            weight_on_device(w, scheme, rule, LAYOUTS[layout])
        for offset in (1, 3, 8):
            flat = cast(gaussian(rng, 1, 13 * 96 + offset), dtype)[0]
            weight_on_device(flat, scheme, rule, lambda a, offset=offset: a[offset:].reshape(13, 96))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, 5, -60, -100, -117, 60, 100])
def test_device_every_e2m1_code_and_tie(rng: np.random.Generator, exponent: int) -> None:
    values = codes_and_ties([*blocks.E2M1, 5.5], blocks.E2M1_TIES)
    for scheme, size, largest in ((NV, 16, 2688), ("MXFP4A16", 32, 6)):
        w = np.full((values.size, size), 6, F32)
        w[np.arange(values.size), rng.integers(0, size, values.size)] = values
        w = np.concatenate([w, np.full((1, size), largest, F32)]) * F32(2.0**exponent)
        q = weight_on_device(w, scheme, "RCEIL")
        assert set(blocks.unpack(q.codes.get(), size).ravel()) == set(range(16))
        token_on_device(w, scheme.removesuffix("A16"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["MXFP8", "MXFP8-e5m2"])
@pytest.mark.parametrize("exponent", [0, -60, 60])
def test_device_every_fp8_code_and_tie(kind: str, exponent: int) -> None:
    element = reference.ELEMENTS[KINDS[kind][0]]
    values = codes_and_ties(np.array(element.magnitudes) * element.unit, element.ties)
    x = np.full((values.size, 32), element.max, F32)
    x[np.arange(values.size), np.arange(values.size) % 32] = values
    token_on_device(x * F32(2.0**exponent), kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_device_quotients_beside_every_tie(rng: np.random.Generator, dtype: str) -> None:
    """Every mantissa of a 16-bit value under divisors that take it to a tie or a step beside it."""
    bits = 8 if dtype == "bfloat16" else 11
    mantissas = np.arange(2 ** (bits - 1), 2**bits) * 2.0 ** (1 - bits)  # 1 to 2
    for step in (-3, -2, -1, 0, 1, 2, 3):
        x = np.zeros((mantissas.size, 128), F32)
        x[:, 1::16], x[:, 2::16] = mantissas[:, None], -mantissas[:, None]
        x[:, 0::16] = np.concatenate([mantissas[:, None] / blocks.E2M1_TIES, np.ones((mantissas.size, 1))], axis=1) * 6
        for by in np.nextafter(mantissas[:: 1 << (bits - 8)].astype(F32), F32(9)).tolist()[::16] + [1.0, 1.9999999]:
            given = F32(by)
            for _ in range(abs(step)):
                given = np.nextafter(given, F32(math.copysign(9, step)))
            token_on_device(x.astype(kind_of(dtype)), "NVFP4", global_scale=float(given))
    for _ in range(20):  # divisors near v / tie: the row's own global scale from any largest magnitude
        w = rng.uniform(1, 2, (512, 160)) * np.exp2(rng.integers(-9, 0, (512, 10))).repeat(16, axis=1)
        token_on_device(w.astype(kind_of(dtype)), "NVFP4")


@pytest.mark.gpu
@x_dtypes
def test_device_divisors_with_a_mantissa_of_ones(rng: np.random.Generator, x_dtype: str) -> None:
    ones = np.nextafter(F32(2), F32(0))
    # In each block 12 times a power of two, so that the block's scale is a power of two, and quotients about 1/4.
    x = np.exp2(rng.integers(-2, 3, (64, 256)))
    x[:, ::16] = 12
    x *= np.exp2(rng.integers(-4, 5, (64, 16))).repeat(16, axis=1) * rng.choice([-1, 1], x.shape)
    for power in (-8, -3, 0, 4):
        w = (x * 2.0**power).astype(kind_of(x_dtype))
        q = token_on_device(w, "NVFP4", global_scale=float(ones * F32(2.0**power)))
        assert set(reference.VALUES[q.scale.get()].ravel()) <= set(np.exp2(np.arange(-5, 6)))


@pytest.mark.gpu
def test_device_any_float(rng: np.random.Generator) -> None:
    w = any_float(rng, 3000, 4096)
    for scheme, rule in CASES:
        weight_on_device(w, scheme, rule)
    for kind in KINDS:
        token_on_device(w, kind)


@pytest.mark.gpu
@ruled
@x_dtypes
def test_device_activations(rng: np.random.Generator, x_dtype: str, kind: str, rule: str) -> None:
    for k in DEVICE_K:
        for m in (0, 1, 7) if k > 4096 else (0, 1, 2, 33):
            token_on_device(activations(rng, m, k, dtype=x_dtype), kind, rule)
            token_on_device(activations(rng, m, k, dtype=x_dtype, wild=True), kind, rule)


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("data", DATA)
def test_device_activations_of_all_kinds(rng: np.random.Generator, data: str, kind: str) -> None:
    for dtype in FLOATS:
        for m, k in ((64, 640), (5, 100)):
            token_on_device(cast(DATA[data](rng, m, k).astype(F32), dtype), kind)


@pytest.mark.gpu
@pytest.mark.sanitize
@x_dtypes
def test_device_small_activations(rng: np.random.Generator, x_dtype: str) -> None:
    for kind in KINDS:
        for m, k in ((0, 32), (1, 1), (3, 17), (5, 160), (2, 2080)):
            token_on_device(activations(rng, m, k, dtype=x_dtype, wild=True), kind)
        token_on_device(activations(rng, 9, 80, dtype=x_dtype), kind, "RCEIL", lambda x: x[1::2, 1:-2])


@pytest.mark.gpu
@kinds
@x_dtypes
@pytest.mark.parametrize("k", [96, 4096, 4099])
def test_device_zeros_subnormals_and_values_that_are_not_finite(
    rng: np.random.Generator, x_dtype: str, kind: str, k: int
) -> None:
    tiny = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[x_dtype]
    x = activations(rng, 12, k, dtype=x_dtype)
    x[1], x[2], x[4] = 0, -0.0, 0
    x[3] = (rng.integers(-(2**6), 2**6, k) * tiny).astype(x.dtype)
    x[4, -1] = tiny
    for i, value in enumerate((math.nan, -math.nan, math.inf, -math.inf)):
        x[5 + i, [0, k // 2, -1]] = value
        x[9, i::7] = value
    x[10], x[11] = math.inf, math.nan
    token_on_device(x, kind)
    token_on_device(x, kind, "RCEIL", lambda x: x[:, 1:])


@pytest.mark.gpu
@kinds
@x_dtypes
def test_device_views(rng: np.random.Generator, x_dtype: str, kind: str) -> None:
    x = activations(rng, 4, 6, 192, dtype=x_dtype, wild=True)
    for view in (
        lambda a: a.swapaxes(0, 1), lambda a: a[..., 3:-5], lambda a: a[:, 1], lambda a: a[::-1, :, 32:],
        lambda a: a[..., ::-1], lambda a: a[0, 0], lambda a: a[..., 32:96], lambda a: a[:, ::2],
    ):  # fmt: skip
        token_on_device(x, kind, "RCEIL", view)


@pytest.mark.gpu
@x_dtypes
def test_device_given_global_scales(rng: np.random.Generator, x_dtype: str) -> None:
    for k in (160, 1001):
        x = activations(rng, 5, k, dtype=x_dtype, wild=True)
        if x_dtype != "float16":
            x[0, :6] = [3e38, -3e38, 1e-38, -1e-38, 1e30, -1e-30]
        there = on_device(x)
        for given in GIVEN:
            wanted = quantize(x, "NVFP4", global_scale=given)
            for form in (given, F32([given]), on_device(F32([given])), on_device(F32([[given]]))):
                assert_bits(quantize(there, "NVFP4", global_scale=form), wanted, given, k)
        for bad in (0.0, -1.0, math.nan, math.inf, 2.0**126):  # which no host has seen
            q = quantize(there, "NVFP4", global_scale=on_device(F32([bad])))
            assert (q.scale.get() == 0x7F).all() and not q.codes.get().any()
            np.testing.assert_array_equal(q.global_scale.get(), F32([bad]))


@pytest.mark.gpu
@pytest.mark.sanitize
@kinds
def test_device_out(rng: np.random.Generator, poison: Any, kind: str) -> None:
    for k in (160, 100):
        x = activations(rng, 6, k, dtype="bfloat16", wild=True)
        there, wanted = on_device(x), quantize(x, kind)
        for offset in (0, 1, 16):
            out = quantize(there, kind)
            wide = poison((6, k + 16), "uint8", "cupy")
            out.codes = wide[:, offset : offset + wanted.codes.shape[1]]
            out.scale = poison(wanted.scale.shape, "uint8", "cupy")
            if kind == "NVFP4":
                out.global_scale = poison((6,), "float32", "cupy")
            assert quantize(there, kind, out=out) is out
            assert_bits(out, wanted, offset)
            beside = wide.get()
            beside[:, offset : offset + wanted.codes.shape[1]] = 0xFF
            assert (beside == 0xFF).all()


@pytest.mark.gpu
@cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1000, 8192])
def test_device_weights_that_are_not_finite(
    rng: np.random.Generator, dtype: str, scheme: str, rule: str, k: int
) -> None:
    for value in (math.nan, math.inf, -math.inf):
        w = cast(gaussian(rng, 100, k), dtype)
        at = rng.choice(w.size, 57, replace=False)
        w.reshape(-1)[at] = value
        with pytest.raises(ValueError) as error:
            cufp8.quantize(on_device(w), scheme, e8m0=rule)
        assert_tells(error, 57, divmod(int(at.min()), k))
        with pytest.raises(ValueError) as host_error:
            cufp8.quantize(w, scheme, e8m0=rule)
        assert str(error.value) == str(host_error.value)


@pytest.mark.gpu
@cases
def test_device_float64_is_rounded_to_float32_first(rng: np.random.Generator, scheme: str, rule: str) -> None:
    w = np.array([[6, 2.5 + 2.0**-40, 3.5 - 2.0**-40, 5 + 2.0**-30, 1e-200, -1e-300]])
    weight_on_device(w, scheme, rule)
    w[0, 3] = 1e39
    with pytest.raises(ValueError) as error:
        cufp8.quantize(on_device(w), scheme, e8m0=rule)
    assert_tells(error, 1, (0, 3))


@pytest.mark.gpu
@kinds
def test_device_capture(rng: np.random.Generator, kind: str) -> None:
    """Calls in a graph, each behind what writes its x, and their results read behind them."""
    import cupy

    for k in (4096, 515):
        x = on_device(activations(rng, 9, k, dtype="bfloat16"))
        some = {"static": {"global_scale": on_device(F32([0.03]))}} if kind == "NVFP4" else {}
        forms = {"found": {}, **some}
        for more in forms.values():
            quantize(x, kind, **more)  # compiles
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            try:
                results = {name: quantize(x, kind, **more) for name, more in forms.items()}
            finally:
                graph = stream.end_capture()
        for _ in range(3):
            fresh = activations(rng, 9, k, dtype="bfloat16", wild=True)
            x.set(fresh)
            for q in results.values():
                q.codes[...], q.scale[...] = 0xEE, 0xEE
                if q.global_scale is not None:
                    q.global_scale[...] = math.nan
            cupy.cuda.runtime.deviceSynchronize()
            with stream:
                graph.launch()
            stream.synchronize()
            for name, q in results.items():
                given = {"global_scale": 0.03} if name == "static" else {}
                assert_bits(q, quantize(fresh, kind, **given), name)


@pytest.mark.gpu
def test_device_on_a_stream_of_its_own(rng: np.random.Generator) -> None:
    import cupy

    x = activations(rng, 2000, 3008, dtype="bfloat16")
    there = on_device(x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        late = late_copy(there)
        tokens = {kind: quantize(late, kind) for kind in KINDS}
        weight = cufp8.quantize(late, NV)
    stream.synchronize()
    assert_bits(weight, cufp8.quantize(x, NV))
    for kind, q in tokens.items():
        assert_bits(q, quantize(x, kind), kind)


@pytest.mark.gpu
@x_dtypes
@libraries
def test_device_arrays_of_torch_and_jax(rng: np.random.Generator, library: str, x_dtype: str) -> None:
    into, x = gpu_maker(library), activations(rng, 12, 288, dtype=x_dtype)
    for view in (lambda a: a, lambda a: a[3:, 1:], lambda a: a.T):
        there = view(into(x))
        for kind in KINDS:
            assert_bits(quantize(there, kind), quantize(view(x), kind), kind)
        for scheme, rule in CASES:
            q = cufp8.quantize(there, scheme, e8m0=rule)
            assert_bits(q, cufp8.quantize(view(x), scheme, e8m0=rule), scheme)


@pytest.mark.gpu
@kinds
def test_device_dequantize(rng: np.random.Generator, kind: str) -> None:
    """Random codes under every scale, as the host has them; a factor for all and for each row."""
    dtype, scale_dtype = KINDS[kind]
    for k in (512, 31, 100):
        size = 16 if kind == "NVFP4" else 32
        codes = rng.integers(0, 256, (256, -(-k // (2 if dtype == E2M1 else 1))), np.uint8)
        scale = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, -(-k // size)))
        if kind == "NVFP4":
            scale &= 0x7F
        for factors in (None,) if kind != "NVFP4" else (1, 256):
            g = None if factors is None else np.exp2(rng.uniform(-149, 120, factors)).astype(F32)
            q = cufp8.QuantizedTensor(
                codes, scale, dtype=dtype, scale_dtype=scale_dtype, shape=(256, k), block=(1, size), global_scale=g,
                activations=True,
            )  # fmt: skip
            there = q.to("cuda")
            for out in (*FLOATS, "float64"):
                with np.errstate(over="ignore"):
                    got, want = there.dequantize(out), q.dequantize(out)
                assert got.dtype == want.dtype and got.shape == want.shape
                got, want = (a.astype(np.float64) for a in (got.get(), want))
                np.testing.assert_array_equal(got, want)
                sure = ~np.isnan(want)
                np.testing.assert_array_equal(np.signbit(got[sure]), np.signbit(want[sure]))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1_048_583, 2080), (2053, 1_048_608)], ids=str)
def test_device_beyond_2_31_elements(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    import cupy

    (n, k), columns = shape, min(shape[1], 4128)
    assert n * k > 2**31
    tile = cast(gaussian(rng, 64, columns), "bfloat16")
    w, rows = cupy.zeros(shape, tile.dtype), cupy.arange(n) % 64
    for i in range(0, n, 65_536):
        w[i : i + 65_536, k - columns :] = on_device(tile)[rows[i : i + 65_536]]
    for make in (lambda w: cufp8.quantize(w, NV), lambda x: quantize(x, "MXFP8"), lambda x: quantize(x, "NVFP4")):
        host, q = make(tile), make(w)
        start = q.codes.shape[1] - host.codes.shape[1]
        blocks_start = q.scale.shape[1] - host.scale.shape[1]
        for i in range(0, n, 65_536):
            some = rows[i : i + 65_536]
            assert bool((q.codes[i : i + 65_536, start:] == cupy.asarray(host.codes)[some]).all())
            assert bool((q.scale[i : i + 65_536, blocks_start:] == cupy.asarray(host.scale)[some]).all())
            assert not bool(q.codes[i : i + 65_536, :start].any())
        if host.global_scale is not None and host.global_scale.size > 1:
            assert bool((q.global_scale == cupy.asarray(host.global_scale)[rows]).all())
        del q
