"""Layers whose x is in the weight's block format too, NVFP4, MXFP4 and MXFP8, against float64: on the CPU, on a GPU
that is none, and (marked gpu) on one.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
import reference
import test_block_linear
from test_block_scaled import DATA, SIZES, tokens_of
from test_block_scaled import TOKENS as HOST_TOKENS
from test_interop import gpu_maker, libraries
from test_linear import (
    Cases,
    assert_same_bits,
    capture,
    check_chain,
    check_late_x,
    floats,
    in_threads,
    into_a_wider,
    named,
    spoil,
    synchronize,
)
from test_quantize_blocks import cast
from test_scaled_linear import HOST_ACC, Library, Placed, at, check_strides

import cufp8
from cufp8 import kernels, linear, runtime
from cufp8.checkpoint import CheckpointError, check
from cufp8.formats import FLOATS, FORMATS, SCHEMES
from cufp8.kernels import ARCHS, Target
from cufp8.quantize import FACTOR_GIVEN, _block_launcher, values_queue

# How x is quantised.
X = {
    "MXFP8": {"block": (1, 32), "dtype": "float8_e4m3fn", "scale_dtype": "float8_e8m0fnu"},
    "MXFP4": {"block": (1, 32), "dtype": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu"},
    "NVFP4": {"block": (1, 16), "dtype": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn"},
}
schemes = pytest.mark.parametrize("scheme", X)
x_dtypes = pytest.mark.parametrize("x_dtype", FLOATS)


def made(rng: np.random.Generator, scheme: str, n: int, k: int, bias: bool = True, **more: Any) -> cufp8.Linear:
    """A layer from floats, on the CPU."""
    return cufp8.Linear(floats(rng, (n, k)), floats(rng, n) if bias else None, scheme=scheme, device="cpu", **more)


def exact(layer: cufp8.Linear, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y and the sum of magnitudes in float64, of the values that x and the weight have once quantised."""
    options = X[layer.scheme]
    if layer.input_scale is not None:
        options = options | {"global_scale": layer.input_scale}
    values = cufp8.quantize_activations(x, **options).dequantize("float64")
    w = layer.weight.to("cpu").dequantize("float64")
    offset = np.zeros(len(w)) if layer.bias is None else reference.to_float64(layer.bias)
    with np.errstate(invalid="ignore"):
        return values @ w.T + offset, np.abs(values) @ np.abs(w).T + np.abs(offset)


def check_layer(layer: cufp8.Linear, x: np.ndarray) -> None:
    """x is NumPy's, which a layer on a GPU takes there and back."""
    acc = HOST_ACC if layer.device == "cpu" else acc_here()
    reference.assert_scaled_close(layer(x), exact(layer, x), layer.out_dtype or x.dtype.name, acc)


def acc_here() -> float:
    return kernels.arch_of(runtime.target().arch).acc["tensor"]


@x_dtypes
@schemes
def test_against_float64(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    with Cases() as cases:
        for i, k in enumerate((1, 15, 16, 31, 33, 160, 301, 2100)):
            for m, n in ((1, 1), (7, 129), (33, 16)):
                layer, x = made(rng, scheme, n, k, bool(i % 2)), floats(rng, (m, k), x_dtype)
                x *= np.exp2(rng.integers(-6, 6, (m, 1))).astype(x.dtype)
                with cases(m, n, k):
                    check_layer(layer, x)
        for i, (n, k) in enumerate(SIZES):
            layer, x = made(rng, scheme, n, k, bool(i % 2)), floats(rng, (HOST_TOKENS[-1], k), x_dtype)
            ref, mag = exact(layer, x)
            for m in tokens_of((n, k)):
                with cases("m", m, "n", n, "k", k):
                    reference.assert_scaled_close(layer(x[:m]), (ref[:m], mag[:m]), x_dtype, HOST_ACC)


@x_dtypes
@pytest.mark.parametrize("input_scale", [2.0**-11, np.float32(0.003), np.array([0.0007], np.float32)], ids=repr)
def test_one_global_scale_for_all_tokens(rng: np.random.Generator, input_scale: Any, x_dtype: str) -> None:
    layer, x = made(rng, "NVFP4", 33, 77, input_scale=input_scale), floats(rng, (9, 77), x_dtype)
    assert layer.input_scale == float(np.float32(np.ravel(input_scale)[0]))
    check_layer(layer, x)
    static = layer(x)
    layer.input_scale = 1.0  # which is far from the tokens' own
    assert (layer(x) != static).any()
    check_layer(layer, x)


@pytest.mark.parametrize("input_scale", [None, 0.0007])
def test_the_steps_of_global_scales(rng: np.random.Generator, input_scale: float | None) -> None:
    """In one block the sums are exact: then the token's global scale in float32, and one fmaf."""
    layer, x = made(rng, "NVFP4", 65, 16, input_scale=input_scale), floats(rng, (40, 16))
    q, w = cufp8.quantize_activations(x, global_scale=input_scale, **X["NVFP4"]), layer.weight
    each = slice(0, 16)
    sums = q.widened(slice(0, 40), each).astype(np.float64) @ w.widened(slice(0, 65), each).T.astype(np.float64)
    assert (sums == sums.astype(np.float32)).all() and len(q.global_scale) == (40 if input_scale is None else 1)
    sums = sums.astype(np.float32) * q.global_scale[:, None]
    y = sums.astype(np.float64) * w.global_scale.astype(np.float64) + layer.bias.astype(np.float64)
    assert_same_bits(layer(x), y.astype(np.float32))


@pytest.mark.parametrize("out_dtype", FLOATS)
@schemes
def test_out_dtype_and_shapes(rng: np.random.Generator, scheme: str, out_dtype: str) -> None:
    layer, x = made(rng, scheme, 6, 40, out_dtype=out_dtype), floats(rng, (2, 3, 40), "float16")
    y = layer(x)
    assert y.shape == (2, 3, 6) and y.dtype == FLOATS[out_dtype]
    check_layer(layer, x.reshape(6, 40))
    out = np.full((2, 3, 6), np.nan, FLOATS[out_dtype])
    assert layer(x, out) is out
    assert_same_bits(out, y)
    assert layer(x[:, :0]).shape == (2, 0, 6) and layer(x[0, 0]).shape == (6,)


@schemes
def test_a_sum_that_fits_no_float16_before_its_bias(scheme: str) -> None:
    w, x = np.full((2, 32), 384, np.float32), np.full((1, 32), 6, np.float16)
    layer = cufp8.Linear(w, np.array([-73000, 0], np.float32), scheme=scheme, device="cpu")
    y = layer(x)
    assert np.isfinite(y[0, 0]) and y[0, 1] == math.inf
    check_layer(layer, x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@schemes
def test_what_is_not_finite_poisons_its_own_row(rng: np.random.Generator, scheme: str, bad: float) -> None:
    layer, x = made(rng, scheme, 9, 70), floats(rng, (5, 70))
    x[3, 66] = bad
    y = layer(x)
    assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, 0)).all()
    check_layer(layer, x)


def check_rows_of_zeros_and_of_every_size(layer: cufp8.Linear, rng: np.random.Generator) -> None:
    x = floats(rng, (8, layer.shape[1]))
    x *= np.float32([[1], [0], [2.0**-130], [2.0**90], [-1], [2.0**-60], [2.0**120], [2.0**-100]])
    check_layer(layer, x)
    assert_same_bits(layer(x)[1], layer.bias)


@schemes
def test_rows_of_zeros_and_of_every_size(rng: np.random.Generator, scheme: str) -> None:
    check_rows_of_zeros_and_of_every_size(made(rng, scheme, 5, 64), rng)


@schemes
def test_weights_are_those_of_the_scheme_with_16_bit_activations(rng: np.random.Generator, scheme: str) -> None:
    w, x = floats(rng, (12, 50)), floats(rng, (3, 50))
    q, plain = cufp8.quantize(w, scheme), cufp8.quantize(w, scheme + "A16")
    assert (q.scheme, plain.scheme, q.activations) == (scheme, scheme + "A16", False)
    for name in ("codes", "scale", "global_scale"):
        np.testing.assert_array_equal(getattr(q, name), getattr(plain, name))
    of = cufp8.Linear.from_quantized
    layer = of(plain, scheme=scheme, device="cpu")
    assert layer.weight is plain and (layer.scheme, layer.device) == (scheme, "cpu")
    assert of(q, device="cpu").scheme == scheme and of(plain, device="cpu").scheme == scheme + "A16"
    y = layer(x)
    for same in (of(q, device="cpu"), layer.to("cpu"), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert_same_bits(same(x), y)
    assert_same_bits(of(q, scheme=scheme + "A16", device="cpu")(x), of(plain, device="cpu")(x))
    assert scheme in repr(layer) and layer.kernels(1) == "numpy" and layer.nbytes == plain.nbytes


def test_fused_layers_share_the_scale_of_x(rng: np.random.Generator) -> None:
    parts = [made(rng, "NVFP4", n, 40, input_scale=0.002) for n in (3, 8)]
    fused, x = cufp8.fuse(parts), floats(rng, (4, 40))
    assert (fused.scheme, fused.input_scale, fused.shape) == ("NVFP4", parts[0].input_scale, (11, 40))
    check_layer(fused, x)
    with pytest.raises(ValueError, match="layer 1 has input_scale None and the first 0.002"):
        cufp8.fuse([parts[0], made(rng, "NVFP4", 3, 40)])


def test_what_is_refused(rng: np.random.Generator) -> None:
    w = floats(rng, (4, 32))
    for options, text in (
        ({"scheme": "MXFP4", "input_scale": 0.1}, "MXFP4 finds it in each call; FP8 and NVFP4 have one"),
        ({"scheme": "NVFP4", "input_scale": 0.0}, "input_scale is 0.0 as float32; needed is finite and above 0"),
        ({"scheme": "NVFP4", "input_scale": 2.0**126}, r"NVFP4 needs at most 2\^125"),
        ({"scheme": "MXFP8", "fast_accum": True}, "fast_accum was set, and MXFP8 has none"),
        ({"scheme": "NVFP4", "batch_invariant": True}, "batch_invariant was set, and NVFP4 has none"),
    ):
        with pytest.raises(ValueError, match=text):
            cufp8.Linear(w, device="cpu", **options)
    of = cufp8.Linear.from_quantized
    for scheme in X:  # not a scale a row, nor another block format
        for other in {"FP8A16", "FP8", "MXFP8A16", "MXFP4A16", "NVFP4A16"} - {scheme + "A16"}:
            with pytest.raises(ValueError, match=f"{scheme} needs {SCHEMES[scheme].dtype} codes with .* scales of sh"):
                of(cufp8.quantize(w, other), scheme=scheme, device="cpu")
            with pytest.raises(ValueError, match="; .* needs .* codes with .* scales of shape"):
                of(cufp8.quantize(w, scheme), scheme=other, device="cpu")
        with pytest.raises(ValueError, match=rf"holds activations \({scheme}: "):
            of(cufp8.quantize_activations(w, **X[scheme]), device="cpu")
    e5m2 = cufp8.QuantizedTensor(
        np.zeros((4, 32), np.uint8), np.full((4, 1), 127, np.uint8), dtype="float8_e5m2",
        scale_dtype="float8_e8m0fnu", shape=(4, 32), block=(1, 32),
    )  # fmt: skip
    for scheme in ("MXFP8", None):
        with pytest.raises(ValueError, match="is of no scheme of weights"):
            of(e5m2, scheme=scheme, device="cpu")
    with pytest.raises(ValueError, match="layer 0 is of scheme NVFP4; needed is FP8"):
        cufp8.calibrate([made(rng, "NVFP4", 3, 4)], [])
    for kind, scheme in (("ScaledLinear", "NVFP4"), ("BlockScaledLinear", "FP8")):
        with pytest.raises(TypeError, match=f"{kind} does not compute {scheme}; make the layer by Linear"):
            getattr(cufp8.scaled_linear, kind)(w, scheme=scheme, device="cpu")


# --- from checkpoints -----------------------------------------------------------------------------------------


MADE = files.families()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["modelopt_nvfp4", "ct_nvfp4", "ct_mxfp4_both", "ct_mxfp8", "modelopt_mxfp8"])
def test_layers_of_checkpoints(tmp_path: Path, rng: np.random.Generator, name: str, device: str) -> None:
    wanted = MADE[name]
    folder = files.write(tmp_path, wanted)
    entry = cufp8.load(folder, device=device)[files.LAYER]
    layer = entry.linear(activations="declared")
    assert entry.declared == layer.scheme == wanted.declared and layer.device.startswith(device)
    # 0.001 in the file of ModelOpt, whose scale multiplies; 1000 in the other's, where it divides.
    assert layer.input_scale == (float(np.float32(0.001)) if layer.scheme == "NVFP4" else None)
    assert layer.bias is None or layer.bias.shape == (files.N,)
    check_layer(layer, floats(rng, (5, files.K), "bfloat16"))


def test_a_config_that_says_each_token_has_its_own_scale(tmp_path: Path, rng: np.random.Generator) -> None:
    """compressed-tensors' `dynamic: true` needs no tensor; "local", which leaves the global scale static, does."""
    of, scale = MADE["ct_nvfp4"], files.LAYER + ".input_global_scale"
    group = of.config["config_groups"]["g"]
    for dynamic in (True, "local"):
        said = {**group, "input_activations": {**group["input_activations"], "dynamic": dynamic}}
        config = {**of.config, "config_groups": {"g": said}}
        folder = files.write(tmp_path / str(dynamic), replace(of.without(scale), config=config))
        entry = cufp8.load(folder, device="cpu")[files.LAYER]
        found = [finding.tensor for finding in check.check(folder) if finding.severity == "error"]
        if dynamic is True:
            layer = entry.linear(activations="declared")
            assert (layer.scheme, layer.input_scale, found) == ("NVFP4", None, [])
            check_layer(layer, floats(rng, (5, files.K)))
            continue
        assert found == [scale]
        with pytest.raises(CheckpointError, match=f"NVFP4 needs {scale}, which is missing"):
            entry.linear(activations="declared")


# --- what the kernels are given: a GPU that is none -----------------------------------------------------------


def halves(q: cufp8.QuantizedTensor, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What values_* of quantize_blocks.cu make of x that is q: values [M, K], factors [M], and which values are kept.

    Kept are all but those of blocks whose e8m0 scale is less than 2^-187 of the token's largest, itself above 2^60.
    """
    q, every = q.to("cpu"), slice(0, q.shape[1])
    if q.global_scale is not None:
        values = q.widened(slice(0, q.shape[0]), every)
        return values.astype(FLOATS[dtype]), np.broadcast_to(q.global_scale, q.shape[:1]), np.ones(q.shape, bool)
    scale, element = q.scale.astype(np.int64), FORMATS[q.dtype]
    shift = np.maximum(np.where(scale == 255, 0, scale).max(axis=1, keepdims=True) - 190, -3)
    each = np.repeat(np.where(scale == 255, 255, scale - shift), q.block[1], axis=1)[:, : q.shape[1]]
    plain = {name: getattr(q, name) for name in ("dtype", "scale_dtype", "shape", "block")}
    ones = cufp8.QuantizedTensor(q.codes, np.full_like(q.scale, 127), activations=True, **plain)
    with np.errstate(invalid="ignore", over="ignore"):
        values = np.where(each == 255, np.nan, np.ldexp(ones.dequantize("float64"), each - 127))
        assert element.bits in (4, 8) and (np.abs(values[np.isfinite(values)]) < 2.0**73).all()
        return values.astype(FLOATS[dtype]), np.ldexp(1.0, shift[:, 0]).astype(np.float32), each >= 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@schemes
def test_values_of_codes_are_numbers_of_16_bits(rng: np.random.Generator, scheme: str, dtype: str) -> None:
    """The arithmetic of the kernel: exact but for the factor, wherever a token's scales lie within 2^187."""
    for data in DATA.values():
        q = cufp8.quantize_activations(data(rng, 40, 100).astype(np.float32), **X[scheme])
        values, factors, kept = halves(q, dtype)
        back, want = values.astype(np.float64) * factors.astype(np.float64)[:, None], q.dequantize("float64")
        np.testing.assert_array_equal(back[kept], want[kept])
        amax = np.abs(want).max(axis=1, keepdims=True)
        assert (np.abs(back - want) <= amax * 2.0**-190).all()


class LaunchedBlocks:
    """A Launcher that computes on the host what values_* of quantize_blocks.cu are to compute."""

    log: list[tuple[str, bool]] = []

    def __init__(self, row: Any, launch: Any, device: int, pdl: bool = False) -> None:
        assert row.name == "quantize_blocks"
        self.row, self.launch, self.pdl = row, launch, pdl

    def __call__(self, stream: int, *fields: Any) -> None:
        self.row.args.pack(*fields)
        self.log.append((self.launch.entry, self.pdl))
        x, to, _, factors, given, status, x_stride, x_step, pitch, _, k, m, form, rule, mode, value = fields
        assert not (given or status or rule) and x_step == 1 and self.launch.grid[0] == m
        what, x_dtype, *name = self.launch.entry.split("_")
        scheme = ("NVFP4", "MXFP4", "MXFP8")[form]
        assert what == "values" and name in (["any"], list(kernels.BLOCK_FORMATS.values())[form].split("_"))
        size = FLOATS[x_dtype].itemsize
        if name != ["any"]:
            assert not (x | x_stride * size | to | 2 * pitch) & 15 and k % X[scheme]["block"][1] == 0
            assert self.launch.grid[1] == 1
        more = {"global_scale": value} if mode == FACTOR_GIVEN else {}
        q = cufp8.quantize_activations(at(x, (m, k), (x_stride * size, size), FLOATS[x_dtype]), **X[scheme], **more)
        inner = FLOATS[LaunchedProduct.x_dtype]
        values, found, _ = halves(q, inner.name)
        place = at(to, (m, pitch), (pitch * inner.itemsize, inner.itemsize), inner)
        place[:, :k], place[:, k:] = values, 0
        at(factors, (1, m), (4 * m, 4), np.float32)[0] = found


class LaunchedProduct:
    """A Product that computes on the host what a kernel of linear.cuh is to compute, with a factor for each token."""

    x_dtype = ""  # of the values
    layer: Any = None

    def __init__(self, row: Any, launch: Any, device: int, pdl: bool, weight: Any, rest: tuple[Any, ...]) -> None:
        self.row, self.launch, self.pdl, self.rest = row, launch, pdl, rest
        row.args.pack(0, *weight, 0, 0, 0, *rest, *((b"",) if launch.box else ()))

    def queue(self, stream: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
        LaunchedBlocks.log.append((self.launch.entry, self.pdl))
        (m, n, k, _, out), factors = self.rest[:5], self.rest[9]
        inner, dtype = FLOATS[self.x_dtype], list(FLOATS.values())[out]
        assert f"_{self.x_dtype}_" in self.launch.entry and factors >= m * x_stride * inner.itemsize
        assert not (x | x_stride * inner.itemsize) & 15 and x_stride - k < 8
        values = at(x, (m, x_stride), (x_stride * inner.itemsize, inner.itemsize), inner).astype(np.float64)
        assert not values[:, k:].any()
        token = at(x + factors, (m, 1), (4, 4), np.float32).astype(np.float64)
        w, bias = self.layer.weight, self.layer.bias
        sums = values[:, :k] @ w.dequantize("float64").T * token + (0 if bias is None else bias)
        at(y, (m, n), (y_stride * dtype.itemsize, dtype.itemsize), dtype)[...] = sums


def as_if_on_a_gpu(layer: cufp8.Linear) -> cufp8.Linear:
    there, q = copy.copy(layer), layer.weight
    there._index, there._target = 0, runtime.target(0)
    there._kind, there._wide = linear._kind(q), linear._scales_are_wide(q)
    there._panels, there._form = kernels.panels_split(*q.shape, there._target.sms)[0], {"block": q.block}
    there._codes = there._scale = types.SimpleNamespace(data=types.SimpleNamespace(ptr=64), nbytes=0)
    there.bias = None if layer.bias is None else Placed(layer.bias)
    return there


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("pdl", [True, False])
@schemes
def test_what_the_two_kernels_are_given(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, scheme: str, pdl: bool, arch: str
) -> None:
    monkeypatch.setattr(runtime, "target", lambda device=None: Target(arch, 132, 99 << 10, True))
    monkeypatch.setattr(runtime, "Launcher", LaunchedBlocks)
    monkeypatch.setattr(runtime, "Product", LaunchedProduct)
    inner = "bfloat16" if arch != "sm_75" else "float16" if scheme == "NVFP4" else "float32"
    monkeypatch.setattr(LaunchedProduct, "x_dtype", inner)
    _block_launcher.cache_clear()
    with Cases() as cases:
        for i, (m, n, k) in enumerate(itertools.product((1, 5, 300), (1, 24, 33), (64, 65, 200, 320))):
            x_dtype, given = tuple(FLOATS)[i % 3], scheme == "NVFP4" and i % 4 == 0
            more = {"input_scale": 0.01} if given else {}
            here = made(rng, scheme, n, k, bool(i % 2), pdl=pdl, out_dtype=(*FLOATS, None)[i % 4], **more)
            layer, library = as_if_on_a_gpu(here), Library()
            monkeypatch.setattr(LaunchedProduct, "layer", here)
            size, out_dtype = FLOATS[x_dtype].itemsize, here.out_dtype or x_dtype
            pitch = -(-k // 8) * 8 + (8 if m > 1 else 0)
            x, y = Placed(floats(rng, (m, pitch), x_dtype)), Placed(np.zeros((m, n + 7), FLOATS[out_dtype]))
            y.array[...] = np.nan
            with cases(m, n, k, x_dtype):
                plan = layer._plan(m, x_dtype, not k * size & 15, library)
                assert layer._plan(m, x_dtype, not k * size & 15, library) is plan
                plan(0, x.data.ptr, pitch, y.data.ptr, n + 7)
                seen = np.ascontiguousarray(y.array[:, :n])
                reference.assert_scaled_close(seen, exact(here, x.array[:, :k]), out_dtype, HOST_ACC)
                assert np.isnan(y.array[:, n:].astype(np.float32)).all()
                assert len(library.made) == 1 and (library.made[0].array[-64:] == 0x7F).all()
                (first, early), (_, second) = LaunchedBlocks.log[-2:]
                assert first.endswith("_any") == bool(k % X[scheme]["block"][1])
                assert early is second is (pdl and ARCHS[arch].pdl)
                assert layer.kernels(m, x_dtype) in {row.name for row in layer._rows(here.weight)}
    _block_launcher.cache_clear()


# --- on the GPU -----------------------------------------------------------------------------------------------

TOKENS = (*HOST_TOKENS, 128, 200, 256, 300)
ROWS = (1, 16, 64, 300)


def there(rng: np.random.Generator, scheme: str, n: int, k: int, bias: bool = True, **more: Any) -> cufp8.Linear:
    return made(rng, scheme, n, k, bias, **more).to("cuda")


def values_on_gpu(
    x: Any, scheme: str, factor: float | None = None, aligned: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """What `values_queue` makes of a CuPy x [M, K], in memory full of NaN; past K there are zeros."""
    import cupy

    (m, k), size = x.shape, x.itemsize
    inner = kernels.values_dtype(kernels.arch_of(runtime.target().arch), scheme.lower())
    pitch = -(-k // 8) * 8
    to = cupy.full(m * pitch * FLOATS[inner].itemsize + 256, 0xFF, cupy.uint8)
    factors = cupy.full(m + 1, np.nan, np.float32)
    aligned = aligned and not (x.data.ptr | x.strides[0] | k * size) & 15
    queue = values_queue(
        SCHEMES[scheme], x.dtype.name, m, k, factor, pitch=pitch, aligned=aligned, device=0, pdl=True
    )  # fmt: skip
    queue(cupy.cuda.get_current_stream().ptr, x.data.ptr, x.strides[0] // size, to.data.ptr, factors.data.ptr)
    seen, found = to.get(), factors.get()
    assert (seen[-256:] == 0xFF).all() and np.isnan(found[-1])
    values = seen[:-256].view(FLOATS[inner]).reshape(m, pitch)
    assert not values[:, k:].any()
    return values[:, :k], found[:-1]


def check_values(x: np.ndarray, scheme: str, factor: float | None = None, view: Any = lambda a: a) -> None:
    import cupy

    q = cufp8.quantize_activations(view(x), **X[scheme], **({} if factor is None else {"global_scale": factor}))
    for aligned in (True, False):
        values, factors = values_on_gpu(view(cupy.asarray(x)), scheme, factor, aligned)
        want, wanted, kept = halves(q, values.dtype.name)
        assert_same_bits(factors, np.broadcast_to(wanted, factors.shape), "factors")
        np.testing.assert_array_equal(values.astype(np.float64)[kept], want.astype(np.float64)[kept])
        lost = np.abs(values.astype(np.float64) - want.astype(np.float64))[~kept]
        assert (lost <= FORMATS[q.dtype].max * 2.0**-127).all()


@pytest.mark.gpu
@x_dtypes
@schemes
def test_values_of_all_kinds(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    with Cases() as cases:
        for name, data in DATA.items():
            for m, k in ((64, 640), (5, 100), (2, 8192)):
                with cases(name, m, k):
                    check_values(cast(data(rng, m, k).astype(np.float32), x_dtype), scheme)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_values_of_all_sizes(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, scheme: str, x_dtype: str
) -> None:
    monkeypatch.setattr(kernels, "_FEW_ROWS", 32)  # so that both ways are met
    _block_launcher.cache_clear()
    with Cases() as cases:
        for k in (
            1,
            2,
            15,
            16,
            17,
            31,
            32,
            33,
            48,
            63,
            64,
            100,
            144,
            160,
            2688,
            4096,
            4097,
            4112,
            14_336,
            20_000,
            33_024,
        ):
            for m in (1, 7) if k > 4096 else (1, 2, 33, 133):
                x = cast(DATA["blocks of many sizes"](rng, m, k).astype(np.float32), x_dtype)
                with cases(m, k):
                    check_values(x, scheme)
                    if scheme == "NVFP4":
                        check_values(x, scheme, 0.0037)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_values_of_what_is_not_finite(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    for k in (96, 4096, 4099):
        x = floats(rng, (40, k), x_dtype)
        x[3:], bad = spoil(rng, x[3:])
        x[0], x[1] = math.nan, -math.inf
        check_values(x, scheme)
        check_values(x, scheme, None, lambda x: x[1::2, 1:])


@pytest.mark.gpu
@pytest.mark.sanitize
@x_dtypes
@schemes
def test_small_values(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    for m, k in ((1, 1), (3, 17), (5, 160), (2, 2080), (140, 32)):
        check_values(floats(rng, (m, k), x_dtype), scheme)


def by_every_row(layer: cufp8.Linear, x: Any, poison: Any) -> dict[str, Any]:
    """The same for the values of x, which is what rows multiply."""
    return test_block_linear.by_every_row(layer, x, poison, layer._product(len(x), x.dtype.name))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [*FLOATS, None])
@schemes
def test_every_row_against_float64(rng: np.random.Generator, poison: Any, scheme: str, out_dtype: str | None) -> None:
    import cupy

    with Cases() as cases:
        for i, (n, k) in enumerate(SIZES):
            x_dtype, given = tuple(FLOATS)[i % 3], {"input_scale": 0.0015} if scheme == "NVFP4" and i % 2 else {}
            layer = there(rng, scheme, n, k, bool(i % 2), out_dtype=out_dtype, **given)
            x = floats(rng, (TOKENS[-1], k), x_dtype)
            x *= np.exp2(rng.integers(-6, 6, (len(x), 1))).astype(x.dtype)
            (ref, mag), there_x = exact(layer, x), cupy.asarray(x)
            for m in TOKENS:
                with cases("m", m, "n", n, "k", k, x_dtype):
                    for name, y in by_every_row(layer, there_x[:m], poison).items():
                        with named(name):
                            reference.assert_scaled_close(y, (ref[:m], mag[:m]), out_dtype or x_dtype, acc_here())


@pytest.mark.gpu
@pytest.mark.sanitize
@x_dtypes
@schemes
def test_each_kernel_once(rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str) -> None:
    import cupy

    for m, n, k in ((1, 40, 80), (3, 24, 96), (20, 33, 65), (40, 150, 200), (130, 136, 144)):
        layer, x = there(rng, scheme, n, k), floats(rng, (m, k), x_dtype)
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            with named(f"m {m}, {name}"):
                reference.assert_scaled_close(y, exact(layer, x), x_dtype, acc_here())


@pytest.mark.gpu
@schemes
def test_large_layers(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    with Cases() as cases:
        for n, k in ((4096, 4096), (1000, 8192), (6144, 2048), (512, 40_000)):
            layer, x = there(rng, scheme, n, k), floats(rng, (300, k), "bfloat16")
            ref, mag = exact(layer, x)
            for m in ROWS:
                with cases(m, n, k, layer.kernels(m)):
                    y = layer(cupy.asarray(x[:m]))
                    reference.assert_scaled_close(y, (ref[:m], mag[:m]), "bfloat16", acc_here())
                    error = np.linalg.norm(reference.to_float64(y) - ref[:m]) / np.linalg.norm(ref[:m])
                    assert error <= 1.8e-3


@pytest.mark.gpu
@pytest.mark.parametrize("input_scale", [None, 0.0007])
def test_the_steps_of_global_scales_on_the_gpu(rng: np.random.Generator, input_scale: float | None) -> None:
    """In one block the sums are exact: the same bits as on the host, by every row."""
    import cupy

    here, x = made(rng, "NVFP4", 65, 16, input_scale=input_scale), floats(rng, (40, 16))
    layer, want = here.to("cuda"), here(x)
    for m in (1, 8, 16, 40):
        for name, y in by_every_row(layer, cupy.asarray(x[:m]), lambda *what: cupy.empty(*what[:2])).items():
            assert_same_bits(y, want[:m], name)


@pytest.mark.gpu
@schemes
def test_rows_of_zeros_and_of_every_size_on_the_gpu(rng: np.random.Generator, scheme: str) -> None:
    check_rows_of_zeros_and_of_every_size(there(rng, scheme, 5, 64), rng)
    # Of one row, too: what is far below its largest value counts where the weight is 0 elsewhere.
    w = floats(rng, (5, 96))
    w[:, :64] = 0
    for scale in (2.0**-120, 2.0**-100, 2.0**-40):
        x = floats(rng, (3, 96))
        x[:, :64] *= np.float32(2.0**60)
        x[:, 64:] *= np.float32(scale)
        check_layer(cufp8.Linear(w, scheme=scheme, device="cuda"), x)


@pytest.mark.gpu
def test_a_global_scale_for_each_channel(rng: np.random.Generator, poison: Any) -> None:
    import cupy

    parts = [cufp8.quantize(floats(rng, (40, 96), scale=s), "NVFP4") for s in (1.0, 0.01, 300.0)]
    layers = [cufp8.Linear.from_quantized(q, floats(rng, 40), device="cuda") for q in parts]
    fused, x = cufp8.fuse(layers), floats(rng, (300, 96), "bfloat16")
    assert (fused.scheme, fused.device, len(fused.weight.global_scale)) == ("NVFP4", "cuda:0", 120)
    ref, mag = exact(fused, x)
    for m in ROWS:
        for name, y in by_every_row(fused, cupy.asarray(x[:m]), poison).items():
            with named(name):
                reference.assert_scaled_close(y, (ref[:m], mag[:m]), "bfloat16", acc_here())


@pytest.mark.gpu
@x_dtypes
@schemes
def test_nan_and_inf_poison_their_own_row_on_the_gpu(
    rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str
) -> None:
    import cupy

    for m, k in itertools.product((1, 9, 70), (77, 96)):
        layer, clean = there(rng, scheme, 136, k), floats(rng, (m, k), x_dtype)
        x, bad = spoil(rng, clean)
        pure = by_every_row(layer, cupy.asarray(clean), poison)
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            assert np.isnan(y.get()[bad].astype(np.float32)).all(), (name, m, k)
            assert_same_bits(y.get()[~bad], pure[name].get()[~bad], (name, m, k))


@pytest.mark.gpu
@x_dtypes
@schemes
def test_strides_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    check_strides(rng, x_dtype, lambda k: there(rng, scheme, 65, k), lambda layer, x: layer(x))


@pytest.mark.gpu
@schemes
def test_places_with_a_pitch(rng: np.random.Generator, poison: Any, scheme: str) -> None:
    import cupy

    for m, (n, k), sides in itertools.product(ROWS, ((33, 65), (256, 128)), ((0, 3), (1, 0), (8, 8))):
        layer, x = there(rng, scheme, n, k), cupy.asarray(floats(rng, (m, k), "float16"))
        assert_same_bits(into_a_wider(layer, x, poison, *sides), layer(x), (m, n, k, sides))
    assert layer(x[:0]).shape == (0, n) and layer(x[0]).shape == (n,)


@pytest.mark.gpu
@schemes
def test_a_call_waits_for_what_its_stream_did_before(rng: np.random.Generator, scheme: str) -> None:
    with Cases() as cases:
        for m, k in itertools.product(ROWS, (320, 321)):
            with cases(m, k):
                check_late_x(there(rng, scheme, 129, k), floats(rng, (m, k), "bfloat16"))


@pytest.mark.gpu
@schemes
def test_capture_and_replay(rng: np.random.Generator, poison: Any, scheme: str) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    for m, k in itertools.product(ROWS, (320, 75)):
        layer, x = there(rng, scheme, 129, k), cupy.asarray(floats(rng, (m, k), "bfloat16"))
        out = poison((m, 129), "bfloat16", "cupy")
        layer(x)
        synchronize()
        graph, (y, z) = capture(stream, lambda: (layer(x), layer(x, out=out)))  # noqa: B023
        for _ in range(3):
            fresh = floats(rng, (m, k), "bfloat16")
            x.set(fresh)
            y.view("uint8").fill(0xFF)
            z.view("uint8").fill(0xFF)
            synchronize()
            graph.launch(stream)
            stream.synchronize()
            want = layer(cupy.asarray(fresh))
            assert_same_bits(y, want, (m, k))
            assert_same_bits(out, want, (m, k))


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
@schemes
def test_chains_through_two_buffers(rng: np.random.Generator, scheme: str, m: int) -> None:
    """y of each layer is the x of the next; with and without programmatic launch, captured or not."""
    import cupy

    for x_dtype, k in (("bfloat16", 512), ("float16", 1024), ("float32", 528)):
        layers = [
            cufp8.Linear(floats(rng, (k, k), scale=k**-0.5), scheme=scheme, device="cuda") for _ in range(24)
        ]  # fmt: skip
        plain = [
            cufp8.Linear.from_quantized(layer.weight, scheme=scheme, device="cuda", pdl=False) for layer in layers
        ]  # fmt: skip
        check_chain(layers, plain, cupy.asarray(floats(rng, (m, k), x_dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
def test_chains_of_schemes_in_turn(rng: np.random.Generator, m: int) -> None:
    import cupy

    names = ("NVFP4", "NVFP4A16", "MXFP8", "FP8_DYNAMIC", "MXFP4", "FP8A16", "MXFP8A16", "NVFP4") * 3
    weights = [floats(rng, (512, 512), scale=512**-0.5) for _ in names]
    sides = [
        [cufp8.Linear(w, scheme=name, device="cuda", pdl=pdl) for w, name in zip(weights, names, strict=True)]
        for pdl in (True, False)
    ]
    check_chain(*sides, cupy.asarray(floats(rng, (m, 512), "bfloat16")))


@pytest.mark.gpu
@libraries
@schemes
def test_arrays_of_torch_and_jax(rng: np.random.Generator, scheme: str, library: str) -> None:
    import cupy

    into, layer = gpu_maker(library), there(rng, scheme, 129, 320)
    for shape in ((320,), (1, 320), (16, 320), (300, 320), (2, 3, 320)):
        for x_dtype in FLOATS:
            x = floats(rng, shape, x_dtype)
            y = layer(into(x))
            assert type(y).__module__.startswith(("torch", "jax")) and y.shape == (*shape[:-1], 129)
            assert_same_bits(y if library == "torch" else np.asarray(y), layer(cupy.asarray(x)), (shape, x_dtype))


@pytest.mark.gpu
@schemes
def test_a_layer_between_devices(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    here = made(
        rng, scheme, 33, 65, out_dtype="float32", pdl=False, **({"input_scale": 0.01} if scheme == "NVFP4" else {})
    )
    x, layer = floats(rng, (9, 65), "float16"), here.to("cuda")
    back = layer.to("cpu")
    for name in ("scheme", "out_dtype", "pdl", "input_scale", "nbytes", "shape"):
        assert getattr(here, name) == getattr(layer, name) == getattr(back, name), name
    assert layer.device == "cuda:0" and back.device == "cpu" and layer.to("cuda") is layer
    assert here.weight.scheme == layer.weight.scheme == back.weight.scheme
    for name in ("codes", "scale"):
        assert_same_bits(getattr(back.weight, name), getattr(here.weight, name))
    assert_same_bits(back(x), here(x))
    assert_same_bits(layer(x), layer(cupy.asarray(x)))  # NumPy goes there and comes back
    assert layer.kernels(9, "float16") in kernels.ROWS and layer.kernels(9, "float16") in repr(layer)
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        assert_same_bits(other(cupy.asarray(x)), layer(cupy.asarray(x)))
    if scheme == "NVFP4":
        first = layer(x)
        layer.input_scale = 0.5
        assert (layer(x) != first).any()
        check_layer(layer, x)


@pytest.mark.gpu
@schemes
def test_eight_threads(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    layer = there(rng, scheme, 256, 512)
    xs = [cupy.asarray(floats(rng, (m, 512), "bfloat16")) for m in ROWS]
    wants = [layer(x).get() for x in xs]
    synchronize()

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(30):
                assert_same_bits(layer(xs[(i + turn) % 4]).get(), wants[(i + turn) % 4])

    in_threads(8, work)
