"""Layers whose x is in the weight's block format too, NVFP4, MXFP4 and MXFP8: on the CPU, against float64."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
import reference
from test_linear import Cases, assert_same_bits, floats
from test_scaled_linear import HOST_ACC

import cufp8
from cufp8.checkpoint import CheckpointError, check
from cufp8.formats import FLOATS, SCHEMES

# How x is quantised.
X = {
    "MXFP8": {"block": (1, 32), "dtype": "float8_e4m3fn", "scale_dtype": "float8_e8m0fnu"},
    "MXFP4": {"block": (1, 32), "dtype": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu"},
    "NVFP4": {"block": (1, 16), "dtype": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn"},
}
schemes = pytest.mark.parametrize("scheme", X)
x_dtypes = pytest.mark.parametrize("x_dtype", FLOATS)
ON_GPU = r"no kernel serves {} on a GPU yet; allowed there are FP8A16, MXFP8A16, MXFP4A16, NVFP4A16, .* device='cpu'"


def made(rng: np.random.Generator, scheme: str, n: int, k: int, bias: bool = True, **more: Any) -> cufp8.Linear:
    """A layer from floats, on the CPU."""
    return cufp8.Linear(floats(rng, (n, k)), floats(rng, n) if bias else None, scheme=scheme, device="cpu", **more)


def exact(layer: cufp8.Linear, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y and the sum of magnitudes in float64, of the values that x and the weight have once quantised."""
    options = X[layer.scheme]
    if layer.input_scale is not None:
        options = options | {"global_scale": layer.input_scale}
    values = cufp8.quantize_activations(x, **options).dequantize("float64")
    w = layer.weight.dequantize("float64")
    offset = np.zeros(len(w)) if layer.bias is None else layer.bias.astype(np.float64)
    with np.errstate(invalid="ignore"):
        return values @ w.T + offset, np.abs(values) @ np.abs(w).T + np.abs(offset)


def check_layer(layer: cufp8.Linear, x: np.ndarray) -> None:
    reference.assert_scaled_close(layer(x), exact(layer, x), layer.out_dtype or x.dtype.name, HOST_ACC)


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


@schemes
def test_rows_of_zeros_and_of_every_size(rng: np.random.Generator, scheme: str) -> None:
    layer, x = made(rng, scheme, 5, 64), floats(rng, (6, 64))
    x *= np.float32([[1], [0], [2.0**-130], [2.0**90], [-1], [2.0**-60]])
    check_layer(layer, x)
    assert_same_bits(layer(x)[1], layer.bias)


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


@schemes
def test_on_a_gpu_they_are_refused_by_name(rng: np.random.Generator, scheme: str) -> None:
    layer, text = made(rng, scheme, 4, 32), ON_GPU.format(scheme)
    for move in (
        lambda: layer.to("cuda:0"),
        lambda: cufp8.Linear(floats(rng, (4, 32)), scheme=scheme, device="cuda:0"),
        lambda: cufp8.Linear.from_quantized(layer.weight, scheme=scheme, device="cuda:0"),
    ):
        with pytest.raises(ValueError, match=text):
            move()


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


@pytest.mark.parametrize("name", ["modelopt_nvfp4", "ct_nvfp4", "ct_mxfp4_both", "ct_mxfp8", "modelopt_mxfp8"])
def test_layers_of_checkpoints(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    wanted = MADE[name]
    folder = files.write(tmp_path, wanted)
    entry = cufp8.load(folder, device="cpu")[files.LAYER]
    layer = entry.linear(activations="declared")
    assert (entry.declared, layer.scheme, layer.device) == (wanted.declared, wanted.declared, "cpu")
    # 0.001 in the file of ModelOpt, whose scale multiplies; 1000 in the other's, where it divides.
    assert layer.input_scale == (float(np.float32(0.001)) if layer.scheme == "NVFP4" else None)
    assert layer.bias is None or layer.bias.shape == (files.N,)
    check_layer(layer, floats(rng, (5, files.K), "bfloat16"))
    there = cufp8.load(folder, device="cuda:0")[files.LAYER]
    with pytest.raises(ValueError, match=ON_GPU.format(wanted.declared)):
        there.linear(activations="declared")


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
