"""Layers that quantise x, and calibrate: on the CPU against the oracle, and (marked gpu) against their two steps."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import math
import os
import pickle
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
from test_interop import Foreign, cpu_array, gpu_jax, gpu_torch
from test_linear import (
    LAYOUTS,
    Cases,
    _ballast,
    assert_same_bits,
    capture,
    check_chain,
    check_late_x,
    floats,
    in_threads,
    into_a_wider,
    keep_busy,
    laid_out,
    outs,
    spoil,
    synchronize,
)

import cufp8
from cufp8 import activations, block_scaled, kernels, runtime
from cufp8.formats import FLOATS, SCHEMES
from cufp8.kernels import Target

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

E4M3 = "float8_e4m3fn"
HOST_ACC = 2.0**-19  # of NumPy's float32 products
QUANTISING = ("FP8_DYNAMIC", "FP8")
ROWS = (1, 16, 64, 300)  # of x: some for each kernel of scaled_mm
schemes = pytest.mark.parametrize("scheme", QUANTISING)
x_dtypes = pytest.mark.parametrize("x_dtype", FLOATS)


def options(scheme: str, input_scale: float = 0.01) -> dict[str, Any]:
    return {"scheme": scheme} | ({"input_scale": input_scale} if scheme == "FP8" else {})


def made(rng: np.random.Generator, scheme: str, n: int, k: int, bias: bool = True, **more: Any) -> cufp8.Linear:
    """A layer from floats, on the CPU unless told."""
    w = floats(rng, (n, k)) * np.exp2(rng.uniform(-4, 4, (n, 1))).astype(np.float32)
    settings = {"device": "cpu"} | options(scheme) | more
    return cufp8.Linear(w, floats(rng, n) if bias else None, **settings)


def steps(layer: cufp8.Linear, x: np.ndarray, weight: Any = None) -> np.ndarray:
    """What the layer says, by its two steps on the host."""
    dynamic = layer.scheme == "FP8_DYNAMIC"
    q = cufp8.quantize_activations(x, block=(1, -1) if dynamic else (-1, -1), scale=layer.input_scale)
    y = cufp8.scaled_mm(
        q, weight or layer.weight, bias=layer.bias, out_dtype=layer.out_dtype or x.dtype.name
    )  # fmt: skip
    return y.reshape(*x.shape[:-1], layer.shape[0])


def exact(layer: cufp8.Linear, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's, of the codes and scales that the oracle makes of x."""
    block = (1, -1) if layer.scheme == "FP8_DYNAMIC" else (-1, -1)
    codes, scale = reference.quantize_activations(x, block, E4M3, layer.input_scale)
    w = layer.weight
    return reference.scaled_product((codes, E4M3), (w.codes, E4M3), scale, w.scale, layer.bias)


# --- on the CPU -----------------------------------------------------------------------------------------------


@x_dtypes
@schemes
def test_against_the_oracle(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    with Cases() as cases:
        for i, (m, n, k) in enumerate(itertools.product((1, 7, 33), (1, 16, 129), (1, 65, 300))):
            layer, x = made(rng, scheme, n, k, bool(i % 2)), floats(rng, (m, k), x_dtype)
            with cases(m, n, k):
                y = layer(x)
                assert isinstance(y, np.ndarray)
                reference.assert_scaled_close(y, exact(layer, x), x_dtype, HOST_ACC)
                assert_same_bits(y, steps(layer, x))


@x_dtypes
@pytest.mark.parametrize("out_dtype", [*FLOATS, None])
@schemes
def test_out_dtype(rng: np.random.Generator, scheme: str, x_dtype: str, out_dtype: str | None) -> None:
    layer, x = made(rng, scheme, 33, 65, out_dtype=out_dtype), floats(rng, (9, 65), x_dtype)
    y = layer(x)
    reference.assert_scaled_close(y, exact(layer, x), out_dtype or x_dtype, HOST_ACC)
    out = np.full((9, 33), np.nan, FLOATS[out_dtype or x_dtype])
    assert layer(x, out) is out and layer(x, out=out) is out
    assert_same_bits(out, y)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0,), (2, 3), (2, 0, 3), (1, 1, 4), (2, 3, 1, 2)], ids=str)
@schemes
def test_shapes(rng: np.random.Generator, scheme: str, shape: tuple[int, ...]) -> None:
    layer, x = made(rng, scheme, 6, 10), floats(rng, (*shape, 10), "float16")
    y = layer(x)
    assert y.shape == (*shape, 6) and y.dtype == np.float16
    assert_same_bits(y, steps(layer, x))


@pytest.mark.parametrize("layout", LAYOUTS)
@schemes
def test_strides(rng: np.random.Generator, scheme: str, layout: str) -> None:
    base, x = laid_out(rng, layout, "bfloat16")
    before = base.copy()
    layer = made(rng, scheme, 21, x.shape[-1])
    x.flags.writeable = False
    assert_same_bits(layer(x), steps(layer, np.ascontiguousarray(x)))
    assert_same_bits(base, before)


@x_dtypes
@schemes
def test_nan_and_inf_poison_their_own_row(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    layer, clean = made(rng, scheme, 40, 77), floats(rng, (30, 77), x_dtype)
    x, bad = spoil(rng, clean)
    y = layer(x)
    assert np.isnan(y[bad].astype(np.float32)).all()
    assert_same_bits(y[~bad], layer(clean)[~bad])


def test_a_static_scale_saturates(rng: np.random.Generator) -> None:
    layer = made(rng, "FP8", 5, 40, bias=False, input_scale=2.0**-6)
    x = floats(rng, (3, 40), scale=100.0)
    assert_same_bits(layer(x), layer(np.clip(x, -7, 7)))  # 448 / 64
    assert not np.array_equal(layer(x), layer(np.clip(x, -6, 6)))


@x_dtypes
@schemes
def test_torch_on_the_cpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    torch = pytest.importorskip("torch")
    layer = made(rng, scheme, 12, 20)
    a = floats(rng, (2, 3, 40), x_dtype)
    x = torch.from_numpy(a.astype(np.float32)).to(getattr(torch, x_dtype))[..., ::2]
    y = layer(x)
    assert type(y) is torch.Tensor and y.dtype == x.dtype and y.shape == (2, 3, 12)
    assert_same_bits(y, layer(np.ascontiguousarray(a[..., ::2])))
    wide = torch.full((2, 3, 15), math.nan, dtype=x.dtype)
    layer(x, out=wide[..., 2:14])
    assert_same_bits(wide[..., 2:14], y)
    assert layer(x[:0]).shape == (0, 3, 12)
    with pytest.raises(RuntimeError, match=r"requires grad.*no_grad\(\).*detach\(\)"):
        layer(x.clone().requires_grad_())


@schemes
def test_other_libraries_on_the_cpu(rng: np.random.Generator, scheme: str) -> None:
    layer, a = made(rng, scheme, 12, 20), floats(rng, (3, 20))
    assert_same_bits(layer(Foreign(a)), layer(a))
    jax = pytest.importorskip("jax")
    x = cpu_array(jax, a)
    y = layer(x)
    assert isinstance(y, jax.Array) and y.devices() == x.devices()
    assert_same_bits(np.asarray(y), layer(a))
    assert layer(x[:0]).shape == (0, 12)


# --- making a layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "float64"])
def test_weights_of_each_scheme(rng: np.random.Generator, dtype: str) -> None:
    w = floats(rng, (30, 50)).astype(FLOATS.get(dtype, dtype))
    channels = cufp8.Linear(w, scheme="FP8_DYNAMIC", device="cpu").weight
    want = cufp8.quantize(w)
    assert_same_bits(channels.codes, want.codes)
    assert_same_bits(channels.scale, want.scale)
    whole = cufp8.Linear(w, scheme="FP8", device="cpu").weight
    codes, scale = reference.quantize_activations(w, (-1, -1))
    assert (whole.scheme, whole.block, whole.scale.shape) == ("FP8", (-1, -1), (1, 1))
    assert_same_bits(whole.codes, codes)
    assert_same_bits(whole.scale, scale)
    assert channels.scheme == cufp8.quantize(w, "FP8_DYNAMIC").to("cpu").scheme == "FP8_DYNAMIC"


def test_one_scale_for_a_weight_of_many_parts(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    w = floats(rng, (40, 30))
    w[3, 5], w[33, 7], w[7] = -50, 1e-30, 0
    want = cufp8.quantize(w, "FP8")
    monkeypatch.setattr(block_scaled, "_TILE", 64)
    q = cufp8.quantize(w, "FP8")
    assert_same_bits(q.codes, want.codes)
    assert q.scale[0, 0] == want.scale[0, 0] == np.float32(50 / np.float32(448))
    assert cufp8.quantize(np.zeros((3, 4), np.float32), "FP8").scale[0, 0] == 1
    w[12, 3], w[39, 29] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 1200 weights are not finite as float32 .*\[12, 3\]"):
        cufp8.quantize(w, "FP8")
    report = cufp8.error_report(floats(rng, (9, 20)), cufp8.quantize(floats(rng, (9, 20)), "FP8"))
    assert report.bytes_after == 9 * 20 + 4


def weight(rng: np.random.Generator, n: int, k: int, whole: bool, dtype: str = E4M3) -> cufp8.QuantizedTensor:
    codes = reference.encode(rng.standard_normal((n, k)) * 8, dtype)
    scale = np.exp2(rng.uniform(-6, -2, (1 if whole else n, 1))).astype(np.float32)
    return cufp8.QuantizedTensor(
        codes, scale, dtype=dtype, scale_dtype="float32", shape=(n, k), block=(-1, -1) if whole else (1, -1)
    )  # fmt: skip


@pytest.mark.parametrize("whole", [False, True])
@schemes
def test_from_quantized(rng: np.random.Generator, scheme: str, whole: bool) -> None:
    q, bias, x = weight(rng, 12, 40, whole), floats(rng, 12), floats(rng, (5, 40), "float16")
    layer = cufp8.Linear.from_quantized(q, bias, device="cpu", **options(scheme))
    assert layer.scheme == scheme and layer.weight is q and isinstance(layer, cufp8.Linear)
    reference.assert_scaled_close(layer(x), exact(layer, x), "float16", HOST_ACC)


def test_the_scheme_that_from_quantized_takes_by_itself(rng: np.random.Generator) -> None:
    of = cufp8.Linear.from_quantized
    assert of(weight(rng, 3, 4, False), device="cpu").scheme == "FP8A16"
    assert of(weight(rng, 3, 4, True), device="cpu").scheme == "FP8"
    w = floats(rng, (3, 4))
    for scheme in ("FP8A16", "FP8_DYNAMIC", "FP8"):
        assert of(cufp8.quantize(w, scheme), device="cpu").scheme == scheme
    x = floats(rng, (2, 4))  # the same codes and scales: any of the two takes them
    plain = of(cufp8.quantize(w, "FP8_DYNAMIC"), scheme="FP8A16", device="cpu")
    assert_same_bits(plain(x), cufp8.Linear(w, device="cpu")(x))
    dynamic = of(cufp8.quantize(w), scheme="FP8_DYNAMIC", device="cpu")
    assert_same_bits(dynamic(x), cufp8.Linear(w, scheme="FP8_DYNAMIC", device="cpu")(x))


def test_wrong_weights(rng: np.random.Generator) -> None:
    of = cufp8.Linear.from_quantized
    rows, whole = weight(rng, 3, 64, False), weight(rng, 3, 64, True)
    mx, nv = (cufp8.quantize(floats(rng, (3, 64)), scheme) for scheme in ("MXFP8A16", "NVFP4A16"))
    for scheme, q, text in (
        ("FP8A16", whole, r"scales of shape \[1, 1\]; FP8A16 needs .* float32 scales of shape \[3, 1\]"),
        ("FP8_DYNAMIC", mx, r"\[3, 2\]; FP8_DYNAMIC needs .*\[3, 1\] or \[1, 1\]"),
        ("FP8", nv, "float4_e2m1fn codes .*; FP8 needs float8_e4m3fn codes"),
        ("MXFP8A16", rows, r"needs float8_e4m3fn codes with float8_e8m0fnu scales of shape \[3, 2\]"),
        ("FP8_DYNAMIC", weight(rng, 3, 4, False, "float8_e5m2"), "is of no scheme of weights"),
        ("FP4", rows, "scheme 'FP4' is not known; known are FP8A16"),
    ):
        with pytest.raises(ValueError, match=text):
            of(q, scheme=scheme, device="cpu")
    for wrong, kind, text in (
        (np.ones((4, 1), np.float32), ValueError, r"scale has shape \[4, 1\]; needed is \[3, 1\], a scale per row"),
        (np.ones((3, 1)), TypeError, "scale is float64; needed is float32"),
    ):
        with pytest.raises(kind, match=text):
            cufp8.QuantizedTensor(
                np.zeros((3, 4), np.uint8), wrong, dtype=E4M3, scale_dtype="float32", shape=(3, 4), block=(1, -1)
            )  # fmt: skip


SCALES = [
    (math.nan, ValueError, "input_scale is nan as float32; needed is finite and above 0"),
    (0, ValueError, "input_scale is 0.0"),
    (-1.0, ValueError, "needed is finite and above 0"),
    (1e39, ValueError, "input_scale is inf"),
    (np.float32([[1, 2]]), ValueError, r"input_scale is float32 of shape \[1, 2\]; needed is .* one element"),
    (np.float64([1]), TypeError, r"input_scale is float64 of shape \[1\]; needed is a number, or a float32 array"),
    (np.int32([1]), TypeError, "input_scale is int32"),
    ("0.1", TypeError, "Linear: input_scale is a str"),
]


@pytest.mark.parametrize(("scale", "kind", "text"), SCALES, ids=lambda v: str(v)[:12])
def test_a_wrong_input_scale(rng: np.random.Generator, scale: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        made(rng, "FP8", 3, 4, input_scale=scale)
    layer = made(rng, "FP8", 3, 4)
    with pytest.raises(kind, match=text):
        layer.input_scale = scale
    assert layer.input_scale == np.float32(0.01)


def test_forms_of_an_input_scale(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    value = float(np.float32(0.03))
    for scale in (0.03, np.float32(0.03), np.float64(0.03), np.float32([0.03]), np.full((1, 1), 0.03, np.float32),
                  torch.tensor(0.03), torch.tensor([0.03])):  # fmt: skip
        assert made(rng, "FP8", 3, 4, input_scale=scale).input_scale == value


def test_options_that_a_scheme_has_not(rng: np.random.Generator) -> None:
    w = floats(rng, (3, 4))
    for scheme, wrong, text in (
        ("FP8A16", {"input_scale": 0.1}, "an input_scale was given, and FP8A16 has none; FP8 and NVFP4 have"),
        ("FP8A16", {"fast_accum": True}, "fast_accum was set, and FP8A16 has none; FP8_DYNAMIC and FP8 have"),
        ("FP8_DYNAMIC", {"input_scale": 0.1}, "input_scale was given, and FP8_DYNAMIC finds it in each call"),
        ("FP8_DYNAMIC", {"batch_invariant": True}, "batch_invariant was set, and FP8_DYNAMIC has none"),
        ("FP8", {"batch_invariant": True}, "batch_invariant was set, and FP8 has none"),
        ("FP8", {"out_dtype": "float64"}, "out_dtype is 'float64'"),
    ):
        with pytest.raises(ValueError, match=text):
            cufp8.Linear(w, scheme=scheme, device="cpu", **wrong)
    with pytest.raises(AttributeError):
        cufp8.Linear(w, device="cpu").no_such_thing  # noqa: B018


def test_a_subclass_does_not_compute_what_it_does_not_know(rng: np.random.Generator) -> None:
    class Mine(cufp8.Linear):
        pass

    w = floats(rng, (3, 4))
    assert type(Mine(w, device="cpu")) is Mine
    with pytest.raises(TypeError, match="Mine does not compute FP8_DYNAMIC; make the layer by Linear"):
        Mine(w, scheme="FP8_DYNAMIC", device="cpu")
    scaled = type(cufp8.Linear(w, scheme="FP8_DYNAMIC", device="cpu"))
    with pytest.raises(TypeError, match="ScaledLinear does not compute FP8A16"):
        scaled(w, device="cpu")


def test_errors_of_x_and_out(rng: np.random.Generator) -> None:
    for scheme in QUANTISING:
        layer = made(rng, scheme, 3, 4)
        with pytest.raises(ValueError, match=r"x has 5 features \(shape \[2, 5\]\); the weight \[3, 4\] needs 4"):
            layer(np.zeros((2, 5), np.float32))
        with pytest.raises(TypeError, match="x is float64; allowed are bfloat16, float16, float32"):
            layer(np.zeros((2, 4)))
        for out, kind, text in outs(rng):
            with pytest.raises(kind, match=text):
                layer(floats(rng, (2, 4)), out=out)


@schemes
def test_what_a_layer_tells(rng: np.random.Generator, scheme: str) -> None:
    layer = made(rng, scheme, 30, 20, fast_accum=True, pdl=False, out_dtype="float32")
    assert (layer.scheme, layer.shape, layer.device, layer.fast_accum, layer.pdl) == (
        scheme,
        (30, 20),
        "cpu",
        True,
        False,
    )
    assert layer.nbytes == 30 * 20 + 4 * (30 if scheme == "FP8_DYNAMIC" else 1) + 4 * 30
    assert layer.kernels(5) == "numpy" and scheme in repr(layer)
    assert layer.input_scale == (np.float32(0.01) if scheme == "FP8" else None)
    assert layer.to("cpu") is layer
    x = floats(rng, (3, 20))
    for other in (copy.copy(layer), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert_same_bits(other(x), layer(x))
    plain = cufp8.Linear(floats(rng, (3, 4)), device="cpu")
    assert plain.input_scale is None and plain.fast_accum is False


# --- calibration ----------------------------------------------------------------------------------------------


def static(rng: np.random.Generator, n: int = 6, k: int = 8, **more: Any) -> cufp8.Linear:
    return made(rng, "FP8", n, k, **({"input_scale": None} | more))


def scale_for(*xs: np.ndarray) -> float:
    """The reference's scale of all finite values."""
    return float(
        reference.quantize_activations(np.concatenate([x.reshape(1, -1) for x in xs], axis=1), (-1, -1))[1][0, 0]
    )


def test_a_layer_without_an_input_scale(rng: np.random.Generator) -> None:
    layer = static(rng)
    assert layer.input_scale is None
    with pytest.raises(ValueError, match=r"FP8 has no input_scale yet; .* cufp8.calibrate\(layers, batches\)"):
        layer(floats(rng, (2, 8)))
    assert layer(floats(rng, (0, 8))).shape == (0, 6)


@x_dtypes
def test_calibrate_one_layer(rng: np.random.Generator, x_dtype: str) -> None:
    layer = static(rng)
    batches = [floats(rng, (m, 8), x_dtype, s) for m, s in ((3, 1.0), (1, 7.0), (0, 1.0), (20, 0.1))]
    found = cufp8.calibrate(layer, iter(batches))
    assert found == {0: scale_for(*batches)} and layer.input_scale == found[0]
    assert_same_bits(layer(batches[0]), steps(layer, batches[0]))


def test_calibrate_lists_and_mappings(rng: np.random.Generator) -> None:
    x, z = floats(rng, (3, 8)), floats(rng, (5, 8), scale=3.0)
    several = [static(rng), static(rng, input_scale=1.0)]
    assert cufp8.calibrate(several, [x, z]) == dict.fromkeys((0, 1), scale_for(x, z))
    named = {"up": static(rng), "down": static(rng, k=6)}
    h = floats(rng, (2, 6))
    found = cufp8.calibrate(named, [{"up": x}, {"up": z, "down": h}])
    assert found == {"up": scale_for(x, z), "down": scale_for(h)} == {k: v.input_scale for k, v in named.items()}


def test_calibrate_a_model(rng: np.random.Generator) -> None:
    layers = {"up": static(rng, 16, 8), "down": static(rng, 8, 16)}
    seen: list[np.ndarray] = []

    def model(x: np.ndarray) -> np.ndarray:
        h = np.maximum(layers["up"](x), 0)
        seen.append(h)
        return layers["down"](h)

    batches = [floats(rng, (m, 8)) for m in (4, 9)]
    found = cufp8.calibrate(layers, batches, model)
    assert found == {"up": scale_for(*batches), "down": scale_for(*seen)}
    # Meanwhile each call had the scale of its own x.
    q = cufp8.quantize_activations(batches[1], block=(-1, -1))
    h = cufp8.scaled_mm(q, layers["up"].weight, bias=layers["up"].bias, out_dtype="float32")
    assert_same_bits(seen[1], np.maximum(h, 0))
    y = model(batches[0])
    assert np.isfinite(y).all()


def test_the_ends_of_calibration(rng: np.random.Generator) -> None:
    x = floats(rng, (3, 8))
    x[1, 2], x[2, 3], x[0, 0] = np.nan, np.inf, 9
    assert cufp8.calibrate(static(rng), [x]) == {0: float(np.float32(9) / np.float32(448))}
    zero = np.zeros((2, 8), np.float32)
    assert cufp8.calibrate(static(rng), [zero]) == {0: 1.0}
    tiny = np.full((2, 8), 1e-30, np.float32)  # after it zeros do not count as 1
    assert cufp8.calibrate(static(rng), [tiny, zero]) == {0: scale_for(tiny)}
    one = np.full((2, 8), 448, np.float32)  # the scale of which is 1
    assert cufp8.calibrate(static(rng), [one, zero, tiny]) == {0: 1.0}
    assert cufp8.calibrate(static(rng), [np.full((1, 8), 1e-44, np.float32)]) == {0: 2.0**-126}


def test_calibration_that_fails_changes_nothing(rng: np.random.Generator) -> None:
    x, layer, other = floats(rng, (3, 8)), static(rng, input_scale=0.5), static(rng)
    for batches, run, kind, text in (
        ([x, x[:, :7]], None, ValueError, "x has 7 features"),
        ([], None, ValueError, r"2 of 2 layers were called with no row of x: \['a', 'b'\]"),
        ([x[:0]], None, ValueError, "2 of 2 layers"),
        ([{"a": x}], None, ValueError, r"1 of 2 layers were called with no row of x: \['b'\]"),
        ([{"c": x}], None, ValueError, r"a batch has x for 'c'; the layers are \['a', 'b'\]"),
        ([x], lambda x: 1 / 0, ZeroDivisionError, "division"),
    ):
        with pytest.raises(kind, match=text):
            cufp8.calibrate({"a": layer, "b": other}, batches, run)
        assert layer.input_scale == 0.5 and other.input_scale is None
        assert_same_bits(layer(x), steps(layer, x))
    with pytest.raises(ValueError, match="layer 1 is of scheme FP8_DYNAMIC; needed is FP8"):
        cufp8.calibrate([layer, made(rng, "FP8_DYNAMIC", 3, 4)], [x])
    with pytest.raises(ValueError, match="is of scheme FP8A16; needed is FP8"):
        cufp8.calibrate(cufp8.Linear(floats(rng, (3, 4)), device="cpu"), [x])
    with pytest.raises(TypeError, match="layer 'a' is a ndarray; needed is a Linear of scheme FP8"):
        cufp8.calibrate({"a": x}, [x])


def test_schemes_say_how_x_is_quantised() -> None:
    for name, row in SCHEMES.items():
        assert (row.x_block is not None and not row.x_in_blocks) == (name in QUANTISING)
        assert row.x_block is None or row.x_in_blocks or row.x_block in kernels.SCALINGS
        assert not row.x_static or row.x_block == (-1, -1)


# --- what the kernels are given: a GPU that is none -----------------------------------------------------------


def at(address: int, shape: tuple[int, int], strides: tuple[int, int], dtype: Any) -> np.ndarray:
    """Host memory as an array; strides in bytes."""
    dtype = np.dtype(dtype)
    size = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    return np.ndarray(shape, dtype, (ctypes.c_char * size).from_address(address), 0, strides)


class Placed:
    """An array on the host in the clothes of one on a GPU, on 16 bytes."""

    def __init__(self, values: np.ndarray) -> None:
        self.memory = np.zeros(values.nbytes + 16, np.uint8)
        offset = -self.memory.ctypes.data % 16
        self.array = self.memory[offset : offset + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values
        self.data = types.SimpleNamespace(ptr=self.array.ctypes.data)
        self.nbytes = values.nbytes

    def __len__(self) -> int:
        return len(self.array)


class Launched:
    """A Launcher that computes on the host what the kernels of activations.cu and scaled.cuh are to compute."""

    log: list[tuple[str, bool, tuple[Any, ...]]] = []

    def __init__(self, row: Any, launch: Any, device: int, pdl: bool = False) -> None:
        self.row, self.launch, self.pdl = row, launch, pdl

    def __call__(self, stream: int, *fields: Any) -> None:
        self.row.args.pack(*fields)
        self.log.append((self.row.name, self.pdl, fields))
        if self.row.name == "activations":
            self.quantize(*fields)
        else:
            self.multiply(*fields)

    def quantize(self, *f: Any) -> None:
        x, codes, scale, x_stride, x_step, pitch, scale_stride, m, k, value, found, mode, e5m2 = (
            f[i] for i in (0, 4, 5, 7, 8, 12, 13, 14, 15, 16, 19, 20, 21)
        )
        dtype = FLOATS[self.launch.entry.split("_")[1]]
        tensor = mode == 0
        assert x_step == 1 and not found and not e5m2 and f[6] == 0 and self.launch.grid[0] == m
        assert f"_{list(kernels.SCALINGS.values())[mode]}_e4m3fn" in self.launch.entry or "_any" in self.launch.entry
        if "_any" not in self.launch.entry:
            assert not (x | x_stride * dtype.itemsize | k * dtype.itemsize | codes | pitch) & 15
        values = at(x, (m, k), (x_stride * dtype.itemsize, dtype.itemsize), dtype)
        q = cufp8.quantize_activations(values, block=(-1, -1) if tensor else (1, -1), scale=value if tensor else None)
        at(codes, (m, k), (pitch, 1), np.uint8)[...] = q.codes
        at(scale, q.scale.shape, (4 * scale_stride, 4), np.float32)[...] = q.scale

    def multiply(self, *f: Any) -> None:
        a, b, scale_a, scale_b, bias, y, workspace, a_stride, b_stride, y_stride = f[:10]
        m, n, k, out, step_a, step_b, aligned = f[10:17]
        assert aligned and not (a | b | a_stride | b_stride) & 15 and not workspace
        dtype = list(FLOATS.values())[out]
        sides = []
        for codes, pitch, rows, scale, step in ((a, a_stride, m, scale_a, step_a), (b, b_stride, n, scale_b, step_b)):
            scales = at(scale, (rows if step else 1, 1), (4 * step, 4), np.float32)
            sides.append(
                cufp8.QuantizedTensor(
                    at(codes, (rows, k), (pitch, 1), np.uint8), scales, dtype=E4M3, scale_dtype="float32",
                    shape=(rows, k), block=(1, -1) if step or rows == 1 else (-1, -1), activations=True,
                )
            )  # fmt: skip
        offset = at(bias, (1, n), (4 * n, 4), np.float32)[0] if bias else None
        place = at(y, (m, n), (y_stride * dtype.itemsize, dtype.itemsize), dtype)
        cufp8.scaled_mm(*sides, bias=offset, out_dtype=dtype.name, out=place)


def tensor_map(x: int, rows: int, columns: int, stride: int, box: int, size: int = 2) -> bytes:
    assert not (x | stride * size) & 15 and rows and columns and 0 < box <= 256 and stride * size
    return bytes(kernels.TENSOR_MAP_BYTES)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Launches go to `Launched`, for a GPU of the arch that it is called with."""

    def forget() -> None:
        activations._launcher.cache_clear()
        activations._entries.cache_clear()

    def become(arch: str) -> None:
        forget()
        monkeypatch.setattr(runtime, "target", lambda device=None: Target(arch, 132, 227 << 10, True))
        Launched.log.clear()

    monkeypatch.setattr(runtime, "Launcher", Launched)
    monkeypatch.setattr(runtime, "tensor_map", tensor_map)
    yield become
    forget()


def as_if_on_a_gpu(layer: cufp8.Linear) -> cufp8.Linear:
    n, k = layer.shape
    pitch = -(-k // 16) * 16
    there, codes = copy.copy(layer), np.full((n, pitch), 0x7F, np.uint8)
    codes[:, :k] = layer.weight.codes
    there._index, there._target = 0, runtime.target(0)
    there._codes, there._scale = Placed(codes), Placed(layer.weight.scale)
    there.bias = None if layer.bias is None else Placed(layer.bias)
    return there


class Library:
    """What of an adapter a plan needs; memory comes full of NaN codes, with a guard behind it."""

    kind = "CuPy"

    def __init__(self) -> None:
        self.made: list[Placed] = []

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[int], tuple[Any, int]]:
        assert dtype == "uint8" and len(shape) == 1

        def make(stream: int) -> tuple[Any, int]:
            self.made.append(Placed(np.full(shape[0] + 64, 0x7F, np.uint8)))
            return self.made[-1], self.made[-1].data.ptr

        return make


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("pdl", [True, False])
@schemes
def test_what_the_two_kernels_are_given(
    rng: np.random.Generator, no_gpu: Callable[[str], None], scheme: str, pdl: bool, arch: str
) -> None:
    no_gpu(arch)
    with Cases() as cases:
        for i, (m, n, k) in enumerate(itertools.product((1, 5, 300), (1, 24, 33), (64, 65, 200))):
            x_dtype, bias = tuple(FLOATS)[i % 3], bool(i % 2)
            here = made(rng, scheme, n, k, bias, pdl=pdl, fast_accum=bool(i % 5 == 0))
            layer, library = as_if_on_a_gpu(here), Library()
            size = FLOATS[x_dtype].itemsize
            pitch = -(-k // 8) * 8 + (8 if m > 1 else 0)
            x, y = Placed(floats(rng, (m, pitch), x_dtype)), Placed(np.zeros((m, n + 7), FLOATS[x_dtype]))
            y.array[...] = np.nan
            aligned = not k * size & 15
            with cases(m, n, k, x_dtype):
                plan = layer._plan(m, x_dtype, aligned, library)
                assert layer._plan(m, x_dtype, aligned, library) is plan
                want = here(x.array[:, :k])
                for _ in range(2):
                    plan(0, x.data.ptr, pitch, y.data.ptr, n + 7)
                    assert_same_bits(np.ascontiguousarray(y.array[:, :n]), want)
                assert np.isnan(y.array[:, n:].astype(np.float32)).all()
                assert len(library.made) == 2 and (library.made[0].array[-64:] == 0x7F).all()
                (name, first, _), (product, second, fields) = Launched.log[-2:]
                early = pdl and kernels.arch_of(arch).pdl
                assert name == "activations" and product == layer.kernels(m, x_dtype)
                assert first is second is early and bool(fields[18]) is early


def test_plans_go_with_the_library_and_the_scale(rng: np.random.Generator, no_gpu: Callable[[str], None]) -> None:
    no_gpu("sm_90a")
    layer, cupys, torchs = as_if_on_a_gpu(made(rng, "FP8", 8, 16)), Library(), Library()
    torchs.kind = "torch"
    first = layer._plan(2, "float16", True, cupys)
    assert layer._plan(2, "float16", True, torchs) is not first and layer._plan(2, "float16", True, cupys) is first
    layer.input_scale = 0.5
    x, y = Placed(floats(rng, (2, 16), "float16")), Placed(np.zeros((2, 8), np.float16))
    layer._plan(2, "float16", True, cupys)(0, x.data.ptr, 16, y.data.ptr, 8)
    assert Launched.log[0][2][16] == 0.5
    layer._observed = []
    layer._plans.clear()
    assert layer._plan(2, "float16", True, cupys).__qualname__.startswith("ScaledLinear._observing")


def test_the_kernels_that_may_serve(rng: np.random.Generator) -> None:
    for scheme in QUANTISING:
        layer = made(rng, scheme, 3, 4)
        names = [row.name for row in layer._rows(layer.weight)]
        products = ("scaled_async", "scaled_wgmma", "scaled_few", "scaled_few_fast", "scaled_mma_sync")
        assert names == ["activations", *(f"{product}_e4m3_e4m3" for product in products)]


# --- on the GPU -----------------------------------------------------------------------------------------------


def there(rng: np.random.Generator, scheme: str, n: int, k: int, bias: bool = True, **more: Any) -> cufp8.Linear:
    return made(rng, scheme, n, k, bias, **({"device": "cuda"} | more))


def padded(q: cufp8.QuantizedTensor) -> cufp8.QuantizedTensor:
    """The same on the GPU in rows that start on 16 bytes, the pitch full of NaN codes: scaled_mm takes the kernel of
    the layer then."""
    import cupy

    n, k = q.shape
    codes = cupy.full((n, -(-k // 16) * 16), 0x7F, cupy.uint8)
    codes[:, :k] = q.codes
    return cufp8.QuantizedTensor(
        codes[:, :k], q.scale, dtype=E4M3, scale_dtype="float32", shape=q.shape, block=q.block, activations=True
    )


def two_steps(layer: cufp8.Linear, x: Any) -> Any:
    """quantize_activations and scaled_mm of a CuPy x, one waited for before the other begins."""
    import cupy

    flat = x.reshape(-1, layer.shape[1]) if x.ndim != 2 else x
    block = (1, -1) if layer.scheme == "FP8_DYNAMIC" else (-1, -1)
    q = padded(cufp8.quantize_activations(flat, block=block, scale=layer.input_scale))
    w = padded(layer.weight)
    synchronize()
    out_dtype = layer.out_dtype or x.dtype.name
    # Filled before: compute-sanitizer does not see what a store by a tensor map writes.
    y = cupy.full((len(flat), layer.shape[0] * FLOATS[out_dtype].itemsize), 0xFF, "uint8").view(FLOATS[out_dtype])
    cufp8.scaled_mm(q, w, bias=layer.bias, out_dtype=out_dtype, fast_accum=layer.fast_accum, out=y)
    return y.reshape(*x.shape[:-1], layer.shape[0])


@pytest.mark.gpu
@x_dtypes
@schemes
def test_a_layer_is_its_two_steps(rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str) -> None:
    import cupy

    sizes = (1, 2, 8, 16, 17, 33, 64, 65, 128, 129, 256, 257, 600)
    with Cases() as cases:
        for i, (m, (n, k)) in enumerate(
            itertools.product(sizes, ((129, 320), (33, 65), (1, 1), (256, 1000), (64, 136)))
        ):
            out_dtype = (*FLOATS, None)[i % 4]
            layer = there(rng, scheme, n, k, bool(i % 2), out_dtype=out_dtype, fast_accum=bool(i % 3))
            x, out = cupy.asarray(floats(rng, (m, k), x_dtype)), poison((m, n), out_dtype or x_dtype, "cupy")
            with cases(m, n, k, out_dtype, layer.kernels(m, x_dtype)):
                y = layer(x)
                assert isinstance(y, cupy.ndarray) and y.dtype == FLOATS[out_dtype or x_dtype]
                assert_same_bits(y, two_steps(layer, x))
                assert layer(x, out=out) is out
                assert_same_bits(out, y, "out")
                assert_same_bits(layer(x), y, "again")


@pytest.mark.gpu
@schemes
def test_large_layers(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    with Cases() as cases:
        for n, k in ((4096, 4096), (1000, 8192), (6144, 2048), (512, 40_000)):
            for fast in (False, True):
                layer = there(rng, scheme, n, k, fast_accum=fast)
                for m in (*ROWS, 2048):
                    x = cupy.asarray(floats(rng, (m, k), "bfloat16"))
                    with cases(m, n, k, fast, layer.kernels(m)):
                        assert_same_bits(layer(x), two_steps(layer, x))


@pytest.mark.gpu
@schemes
def test_against_the_oracle_on_the_gpu(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    for m, (n, k) in itertools.product((1, 20, 300), ((129, 320), (40, 77))):
        here = made(rng, scheme, n, k)
        layer, x = here.to("cuda"), floats(rng, (m, k), "float16")
        acc = 4 * 2.0**-13  # what tensor cores lose of 128 products
        reference.assert_scaled_close(layer(cupy.asarray(x)), exact(here, x), "float16", acc)


@pytest.mark.gpu
@pytest.mark.sanitize
@x_dtypes
@schemes
def test_each_kernel_once(rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str) -> None:
    import cupy

    for m, n, k, fast in ((3, 24, 80, False), (20, 33, 65, False), (300, 136, 144, True), (300, 264, 144, False)):
        layer = there(rng, scheme, n, k, fast_accum=fast)
        x, out = cupy.asarray(floats(rng, (m, k), x_dtype)), poison((m, n), x_dtype, "cupy")
        layer(x, out=out)
        assert_same_bits(out, two_steps(layer, x), (m, n, k))


def check_strides(
    rng: np.random.Generator, x_dtype: str, made: Callable[[int], cufp8.Linear], of_whole: Callable[..., Any]
) -> None:
    """Every layout of x gives the bits of `of_whole(layer, x in one piece)`; made: a layer of so many inputs."""
    import cupy

    with Cases() as cases:
        for layout, (_, view) in LAYOUTS.items():
            base, x = laid_out(rng, layout, x_dtype)
            layer, on_gpu = made(x.shape[-1]), cupy.asarray(base)
            with cases(layout):
                seen = view(on_gpu, cupy)
                want = of_whole(layer, cupy.asarray(np.ascontiguousarray(x)))
                assert_same_bits(layer(seen), want)
                assert_same_bits(layer(seen), want, "again")
                assert_same_bits(on_gpu, base, "x was written")


@pytest.mark.gpu
@x_dtypes
@schemes
def test_strides_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    check_strides(rng, x_dtype, lambda k: there(rng, scheme, 65, k), two_steps)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_places_with_a_pitch(rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str) -> None:
    import cupy

    sides = ((0, 0), (0, 3), (1, 0), (1, 1), (8, 8))
    with Cases() as cases:
        for m, (n, k), (left, right) in itertools.product(ROWS, ((33, 65), (48, 80), (256, 128)), sides):
            layer, x = there(rng, scheme, n, k), cupy.asarray(floats(rng, (m, k), x_dtype))
            with cases(m, n, k, left, right):
                assert_same_bits(into_a_wider(layer, x, poison, left, right), two_steps(layer, x))
    # One row whose stride says nothing.
    layer, x = there(rng, scheme, 64, 128), cupy.asarray(floats(rng, (1, 128), x_dtype))
    memory = cupy.zeros(64, FLOATS[x_dtype])
    size = memory.itemsize
    for stride in (0, size, 63 * size):
        out = cupy.lib.stride_tricks.as_strided(memory, (1, 64), (stride, size))
        assert_same_bits(layer(x, out=out), two_steps(layer, x), stride)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_nan_and_inf_poison_their_own_row_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    import cupy

    for m, k in itertools.product((1, 9, 70, 300), (77, 80)):
        layer, clean = there(rng, scheme, 136, k), floats(rng, (m, k), x_dtype)
        x, bad = spoil(rng, clean)
        y, want = (layer(cupy.asarray(a)).get() for a in (x, clean))
        assert np.isnan(y[bad].astype(np.float32)).all(), (m, k)
        assert_same_bits(y[~bad], want[~bad], (m, k))


@pytest.mark.gpu
@x_dtypes
@schemes
def test_no_rows_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    import cupy

    layer = there(rng, scheme, 12, 20)
    for shape in ((0, 20), (3, 0, 20), (0, 3, 20), (0, 0, 20)):
        x = cupy.zeros(shape, FLOATS[x_dtype])
        y = layer(x)
        assert isinstance(y, cupy.ndarray) and y.shape == (*shape[:-1], 12) and y.dtype == x.dtype
        out = cupy.empty_like(y)
        assert layer(x, out=out) is out


@pytest.mark.gpu
@schemes
def test_a_call_waits_for_what_its_stream_did_before(rng: np.random.Generator, scheme: str) -> None:
    with Cases() as cases:
        for m, k, x_dtype in itertools.product(ROWS, (320, 321), ("bfloat16", "float32")):
            layer = there(rng, scheme, 129, k)
            with cases(m, k, x_dtype):
                check_late_x(layer, floats(rng, (m, k), x_dtype))


@pytest.mark.gpu
@schemes
def test_two_streams_at_once(rng: np.random.Generator, scheme: str) -> None:
    """One layer on two streams: what lies between its kernels is each call's own."""
    import cupy

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with Cases() as cases:
        for m in ROWS:
            layer = there(rng, scheme, 513, 528)
            xs = [[cupy.asarray(floats(rng, (m, 528), "bfloat16")) for _ in range(20)] for _ in range(2)]
            wants = [[layer(x).get() for x in some] for some in xs]
            synchronize()
            ys: list[list[Any]] = [[], []]
            for i, side in itertools.product(range(20), range(2)):
                with streams[side]:
                    ys[side].append(layer(xs[side][i]))
            synchronize()
            for side in range(2):
                with cases(m, "stream", side):
                    for y, want in zip(ys[side], wants[side], strict=True):
                        assert_same_bits(y, want)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_capture_and_replay_in_cupy(rng: np.random.Generator, poison: Any, scheme: str, x_dtype: str) -> None:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with Cases() as cases:
        for m, first in itertools.product(ROWS, (True, False)):
            n, k = 136, 320
            layer = there(rng, scheme, n, k)
            x, out = cupy.asarray(floats(rng, (m, k), x_dtype)), poison((m, n), x_dtype, "cupy")
            if not first:
                layer(x)
            synchronize()
            with cases(m, "first call" if first else ""):
                graph, (y, z) = capture(stream, lambda: (layer(x), layer(x, out=out)))  # noqa: B023
                assert z is out
                with stream:  # as large as what the capture has made: the pool would give its blocks to these
                    others = [cupy.full(m * (k + 4), i, cupy.uint8) for i in range(16)]
                for _ in range(3):
                    fresh = floats(rng, (m, k), x_dtype)
                    with stream:
                        x.set(fresh)
                        graph.launch()
                    stream.synchronize()
                    assert_same_bits(out, y)
                    assert_same_bits(y, two_steps(layer, cupy.asarray(fresh)), "captured and not")
                assert all(bool((other == i).all()) for i, other in enumerate(others))


@pytest.mark.gpu
def test_what_a_capture_keeps_goes_with_the_graph(rng: np.random.Generator) -> None:
    import cupy

    stream, before = cupy.cuda.Stream(non_blocking=True), set(runtime._kept)
    layer, x = there(rng, "FP8_DYNAMIC", 64, 64), cupy.asarray(floats(rng, (5, 64), "float16"))
    graph, y = capture(stream, lambda: layer(x))
    assert len(set(runtime._kept) - before) == 2  # y, and what lies between the kernels
    del graph, y
    gc.collect()
    deadline = time.monotonic() + 20
    while set(runtime._kept) - before and time.monotonic() < deadline:
        time.sleep(0.01)
        runtime.keep_for_capture(stream.ptr, None)
    assert set(runtime._kept) <= before


@pytest.mark.gpu
@schemes
def test_capture_and_replay_in_torch(rng: np.random.Generator, scheme: str) -> None:
    torch = gpu_torch()
    with Cases() as cases:
        for x_dtype, m, first in itertools.product(FLOATS, ROWS, (True, False)):
            layer = there(rng, scheme, 136, 320)
            x = torch.from_numpy(floats(rng, (m, 320))).to("cuda", getattr(torch, x_dtype))
            out = torch.full((m, 136), math.nan, dtype=x.dtype, device="cuda")
            if not first:
                layer(x)
            with cases(x_dtype, m, "first call" if first else ""):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    y = layer(x)
                    z = layer(x, out=out)
                assert z is out
                for _ in range(3):
                    x.copy_(torch.from_numpy(floats(rng, (m, 320))).to("cuda", x.dtype))
                    graph.replay()
                    torch.cuda.synchronize()
                    assert_same_bits(y, out)
                    assert_same_bits(layer(x), y, "captured and not")


def chain_of(rng: np.random.Generator, scheme: str, count: int, k: int, **more: Any) -> list[cufp8.Linear]:
    """Layers [k, k] that keep the size of what goes through them."""
    weights = [floats(rng, (k, k), scale=k**-0.5) for _ in range(count)]
    return [cufp8.Linear(w, device="cuda", **options(scheme, 8 / 448), **more) for w in weights]


def without_pdl(layers: list[cufp8.Linear]) -> list[cufp8.Linear]:
    return [
        cufp8.Linear.from_quantized(
            layer.weight, device="cuda", pdl=False, fast_accum=layer.fast_accum, **options(layer.scheme, 8 / 448)
        )
        for layer in layers
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("m", ROWS)
@schemes
def test_chains_through_two_buffers(rng: np.random.Generator, scheme: str, m: int) -> None:
    """y of each layer is the x of the next; with and without programmatic launch, captured or not."""
    import cupy

    for x_dtype, k, fast in (("bfloat16", 512, False), ("float16", 1024, True), ("float32", 520, False)):
        layers = chain_of(rng, scheme, 24, k, fast_accum=fast)
        check_chain(layers, without_pdl(layers), cupy.asarray(floats(rng, (m, k), x_dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 256])
def test_chains_of_schemes_in_turn(rng: np.random.Generator, m: int) -> None:
    """Layers of 16-bit x between those that quantise it: a kernel of each kind starts before one of each is done."""
    import cupy

    names = ("FP8_DYNAMIC", "FP8A16", "FP8", "FP8", "FP8_DYNAMIC", "FP8A16")
    weights = [floats(rng, (512, 512), scale=512**-0.5) for _ in names * 3]
    sides = [
        [
            cufp8.Linear(w, device="cuda", pdl=pdl, **options(name, 8 / 448))
            for w, name in zip(weights, names * 3, strict=True)
        ]
        for pdl in (True, False)
    ]
    check_chain(*sides, cupy.asarray(floats(rng, (m, 512), "bfloat16")))


@pytest.mark.gpu
@schemes
def test_weights_replaced_just_before_a_call(rng: np.random.Generator, scheme: str) -> None:
    """The pool gives a new layer the memory of the old one, while kernels of the old one may still run."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    _ballast()
    n, k = 512, 1024
    weights = [floats(rng, (n, k), scale=0.02) for _ in range(4)]
    xs = {m: cupy.asarray(floats(rng, (m, k), "bfloat16")) for m in ROWS}
    wants = {}
    for m, i in itertools.product(ROWS, range(4)):
        wants[m, i] = cufp8.Linear(weights[i], device="cuda", pdl=False, **options(scheme))(xs[m]).get()
    with Cases() as cases:
        for turn, (m, on_host) in enumerate(itertools.product(ROWS * 3, (True, False))):
            i = turn % 4
            synchronize()
            with cases(m, on_host, turn), stream if turn % 4 < 2 else contextlib.nullcontext():
                before = cufp8.Linear(weights[i - 1], device="cuda", **options(scheme))
                keep_busy(1)
                before(xs[m])
                del before
                w = weights[i] if on_host else cupy.asarray(weights[i])
                layer = cufp8.Linear(w, device="cuda", **options(scheme))
                assert_same_bits(layer(xs[m]).get(), wants[m, i])


@pytest.mark.gpu
@schemes
def test_weights_written_in_place_without_pdl(rng: np.random.Generator, scheme: str) -> None:
    """pdl=False: codes that a kernel writes just before the call are those that are multiplied."""
    import cupy

    _ballast()
    n, k = 512, 1024
    first, second = (made(rng, scheme, n, k, bias=False) for _ in range(2))
    for m in ROWS:
        x = cupy.asarray(floats(rng, (m, k), "bfloat16"))
        layer = cufp8.Linear.from_quantized(first.weight, device="cuda", pdl=False, **options(scheme))
        want = cufp8.Linear.from_quantized(second.weight, device="cuda", pdl=False, **options(scheme))(x).get()
        codes, scale = cupy.asarray(second.weight.codes), cupy.asarray(second.weight.scale)
        layer(x)
        synchronize()
        with cupy.cuda.Stream(non_blocking=True):
            keep_busy()
            layer._codes[:, :k] = codes
            layer._scale[...] = scale
            assert_same_bits(layer(x).get(), want, m)


@pytest.mark.gpu
@schemes
def test_a_layer_has_codes_of_its_own(rng: np.random.Generator, scheme: str) -> None:
    """What is written into what it was made from, or into what it gives away, changes nothing."""
    import cupy

    x = cupy.asarray(floats(rng, (3, 64), "float16"))
    q = made(rng, scheme, 32, 64).weight.to("cuda")
    layer = cufp8.Linear.from_quantized(q, device="cuda", **options(scheme))
    want = layer(x).get()
    for w in (q, layer.weight):
        w.codes.fill(0x38)
        w.scale.fill(1)
    assert_same_bits(layer(x), want)
    assert layer.weight.codes.flags.c_contiguous and layer.weight.codes.shape == (32, 64)


@pytest.mark.gpu
@schemes
def test_weights_from_every_library(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    w, x = floats(rng, (70, 90), scale=0.1), cupy.asarray(floats(rng, (5, 90)))
    here = cufp8.Linear(w, device="cpu", **options(scheme))
    given = {"NumPy": w, "CuPy": cupy.asarray(w), "CuPy, transposed": cupy.asarray(w.T.copy()).T}
    given["float64"] = cupy.asarray(w.astype(np.float64))
    with contextlib.suppress(pytest.skip.Exception):
        torch = gpu_torch()
        given["torch"] = torch.from_numpy(w).cuda()
    want = two_steps(here.to("cuda"), x).get()
    with Cases() as cases:
        for name, weights in given.items():
            with cases(name):
                layer = cufp8.Linear(weights, device="cuda", **options(scheme))
                assert layer.device == "cuda:0" and layer.nbytes == here.nbytes
                assert_same_bits(layer.weight.to("cpu").codes, here.weight.codes)
                assert_same_bits(layer.weight.to("cpu").scale, here.weight.scale)
                assert_same_bits(layer(x), want)


@pytest.mark.gpu
@schemes
def test_a_layer_between_devices(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    here = made(rng, scheme, 33, 65, out_dtype="float32", pdl=False, fast_accum=True)
    x = floats(rng, (9, 65), "float16")
    layer = here.to("cuda")
    kept = ("scheme", "out_dtype", "pdl", "fast_accum", "input_scale", "nbytes", "shape")
    back = layer.to("cpu")
    for name in kept:
        assert getattr(here, name) == getattr(layer, name) == getattr(back, name), name
    assert layer.device == "cuda:0" and back.device == "cpu" and layer.to("cuda") is layer
    assert_same_bits(back.weight.codes, here.weight.codes)
    assert_same_bits(back(x), here(x))
    assert_same_bits(layer(x), layer(cupy.asarray(x)))  # NumPy goes there and comes back
    assert layer.kernels(9, "float16") in kernels.ROWS and layer.kernels(9, "float16") in repr(layer)
    for other in (copy.copy(layer), copy.deepcopy(layer)):
        assert_same_bits(other(cupy.asarray(x)), layer(cupy.asarray(x)))


@pytest.mark.gpu
@x_dtypes
@schemes
def test_torch_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    torch = gpu_torch()
    import cupy

    layer = there(rng, scheme, 129, 320)
    with Cases() as cases:
        for m in ROWS:
            a = floats(rng, (m, 640), x_dtype)
            x = torch.from_numpy(a.astype(np.float32)).to("cuda", getattr(torch, x_dtype))
            for name, part in {"whole": (x[:, :320], a[:, :320]), "steps": (x[:, ::2], a[:, ::2])}.items():
                with cases(m, name):
                    want = two_steps(layer, cupy.asarray(np.ascontiguousarray(part[1])))
                    y = layer(part[0])
                    assert type(y) is torch.Tensor and y.dtype == x.dtype and y.device == x.device
                    assert_same_bits(y, want)
                    out = torch.full_like(y, math.nan)
                    assert layer(part[0], out=out) is out
                    assert_same_bits(out, want)
    assert layer(x[:0, :320]).shape == (0, 129)


@pytest.mark.gpu
@schemes
def test_torch_allocates_the_result_and_what_lies_between(rng: np.random.Generator, scheme: str) -> None:
    torch = gpu_torch()
    import cupy

    layer = there(rng, scheme, 512, 512)
    pool = cupy.get_default_memory_pool()
    for m in ROWS:
        x = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
        del y
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, cupys = torch.cuda.memory_allocated(), pool.used_bytes()
        y = layer(x)
        between = -(-(m * 512 + 4 * (m if scheme == "FP8_DYNAMIC" else 1)) // 512) * 512
        assert torch.cuda.memory_allocated() - before == y.numel() * 2
        assert torch.cuda.max_memory_allocated() - before == y.numel() * 2 + between
        assert pool.used_bytes() == cupys


@pytest.mark.gpu
@schemes
def test_torch_streams_are_torchs(rng: np.random.Generator, scheme: str) -> None:
    """Late inputs on a side stream of torch, while CuPy's current stream is another; memory changes hands at once."""
    torch = gpu_torch()
    layer, side = there(rng, scheme, 129, 320), torch.cuda.Stream()
    busy = torch.ones(1 << 25, device="cuda")
    with Cases() as cases:
        for m in ROWS:
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
                taken = [torch.full((m * 324,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
                side.synchronize()
                assert_same_bits(y, want)
                assert all(bool((t == 255).all()) for t in taken)


@pytest.mark.gpu
@x_dtypes
@schemes
def test_jax_on_the_gpu(rng: np.random.Generator, scheme: str, x_dtype: str) -> None:
    jax = gpu_jax()
    import cupy

    layer = there(rng, scheme, 129, 320)
    with Cases() as cases:
        for shape in ((320,), (1, 320), (16, 320), (300, 320), (2, 3, 320)):
            a = floats(rng, shape, x_dtype)
            x = jax.device_put(a, jax.devices("gpu")[0])
            with cases(shape):
                y = layer(x)
                assert isinstance(y, jax.Array) and y.dtype == x.dtype and y.devices() == x.devices()
                assert_same_bits(np.asarray(y), two_steps(layer, cupy.asarray(a)))
    assert layer(jax.numpy.zeros((0, 320), "bfloat16")).shape == (0, 129)


@pytest.mark.gpu
def test_libraries_take_turns(rng: np.random.Generator) -> None:
    torch = gpu_torch()
    import cupy

    layer, a = there(rng, "FP8_DYNAMIC", 64, 128), floats(rng, (4, 128), "float16")
    x, t = cupy.asarray(a), torch.from_numpy(a).cuda()
    want = two_steps(layer, x).get()
    for _ in range(3):
        y, z = layer(x), layer(t)
        assert isinstance(y, cupy.ndarray) and type(z) is torch.Tensor
        assert_same_bits(y, want)
        assert_same_bits(z, want)
        assert_same_bits(layer(a), want)


@pytest.mark.gpu
@schemes
def test_errors_on_the_gpu(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    layer, here = there(rng, scheme, 4, 4), made(rng, scheme, 4, 4)
    x = cupy.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match=r"x has 5 features \(shape \[2, 5\]\); the weight \[4, 4\] needs 4"):
        layer(cupy.zeros((2, 5), np.float32))
    with pytest.raises(TypeError, match="x is float64; allowed are"):
        layer(cupy.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"x is on cuda:0, the layer on cpu; move x, or the layer by .*'cuda:0'"):
        here(x)
    for out, text in (
        (x, "out overlaps x"),
        (layer._codes.ravel()[:32].view(np.float32).reshape(2, 4), "out overlaps the weight"),
        (cupy.zeros((2, 5), np.float32), r"out is float32 \[2, 5\] on device 0; needed is float32 \[2, 4\]"),
    ):
        with pytest.raises(ValueError, match=text):
            layer(x, out=out)
    torch = gpu_torch()
    with pytest.raises(ValueError, match="x is on the CPU, the layer on cuda:0"):
        layer(torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match="requires grad"):
        layer(torch.zeros(2, 4, device="cuda", requires_grad=True))
    q = made(rng, scheme, 3, 4).weight
    with pytest.raises(ValueError, match="codes and scale lie on different devices"):
        cufp8.QuantizedTensor(
            q.codes, cupy.asarray(q.scale), dtype=E4M3, scale_dtype="float32", shape=q.shape, block=q.block
        )


@pytest.mark.gpu
@schemes
def test_eight_threads(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    layer = there(rng, scheme, 256, 512)
    xs = [cupy.asarray(floats(rng, (m, 512), "bfloat16")) for m in (1, 16, 64, 300)]
    wants = [layer(x).get() for x in xs]
    synchronize()

    def work(i: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for turn in range(50):
                at = (i + turn) % 4
                assert_same_bits(layer(xs[at]).get(), wants[at])

    in_threads(8, work)


@pytest.mark.gpu
@x_dtypes
def test_calibrate_on_the_gpu(rng: np.random.Generator, x_dtype: str) -> None:
    import cupy

    up, down = static(rng, 16, 8, device="cuda"), static(rng, 8, 16, device="cuda")
    seen: list[np.ndarray] = []

    def model(x: Any) -> Any:
        h = up(x)
        seen.append(h.get())
        return down(h)

    batches = [floats(rng, (m, 8), x_dtype, 1 + m / 100) for m in (4, 1, 0, 300)]
    batches[0][1, 2] = np.nan
    with pytest.raises(ValueError, match="no input_scale yet"):
        up(cupy.asarray(batches[0]))
    found = cufp8.calibrate({"up": up, "down": down}, [cupy.asarray(b) for b in batches], model)
    assert found == {"up": scale_for(*batches), "down": scale_for(*seen)}
    for layer, x in ((up, batches[3]), (down, seen[3])):
        assert_same_bits(layer(cupy.asarray(x)), two_steps(layer, cupy.asarray(x)))
    # Meanwhile each call had the scale of its own x.
    q = cufp8.quantize_activations(cupy.asarray(batches[3]), block=(-1, -1))
    assert_same_bits(seen[3], cufp8.scaled_mm(q, padded(up.weight), bias=up.bias, out_dtype=x_dtype))


@pytest.mark.gpu
def test_calibrate_by_other_libraries(rng: np.random.Generator) -> None:
    a = floats(rng, (5, 64), scale=3.0)
    given = {"NumPy": a}
    with contextlib.suppress(pytest.skip.Exception):
        given["torch"] = gpu_torch().from_numpy(a).cuda()
    with contextlib.suppress(pytest.skip.Exception):
        given["JAX"] = gpu_jax().device_put(a)
    with Cases() as cases:
        for name, x in given.items():
            layer = static(rng, 24, 64, device="cuda")
            with cases(name):
                assert cufp8.calibrate(layer, [x]) == {0: scale_for(a)}
                assert cufp8.calibrate(layer, [x, x]) == {0: scale_for(a)}  # again, from the scale of before
                assert layer(x).shape == (5, 24)


@pytest.mark.gpu
def test_a_scale_that_is_replaced(rng: np.random.Generator) -> None:
    import cupy

    layer, x = there(rng, "FP8", 24, 64), cupy.asarray(floats(rng, (5, 64), "bfloat16"))
    first = layer(x).get()
    for scale, value in ((cupy.full(1, 0.5, np.float32), 0.5), (0.25, 0.25)):
        layer.input_scale = scale
        assert layer.input_scale == value
        assert_same_bits(layer(x), two_steps(layer, x))
        assert not np.array_equal(layer(x).get(), first)
