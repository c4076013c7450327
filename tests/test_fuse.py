"""`fuse`: several layers of the same x as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8 import formats

ROWS = (48, 1, 128)  # of q, k, v
K = 320


def weights(rng: np.random.Generator) -> list[np.ndarray]:
    """Of very different sizes, so that a scale that is shared wrongly shows."""
    return [rng.standard_normal((n, K)).astype(np.float32) * size for n, size in zip(ROWS, (1, 1e-3, 30), strict=True)]


def layers(rng: np.random.Generator, scheme: str, device: str = "cpu") -> list[cufp8.Linear]:
    more = {"input_scale": 0.01} if scheme == "FP8" else {}
    biases = rng.standard_normal(ROWS[0]).astype(np.float32), None, rng.standard_normal(ROWS[2]).astype(np.float32)
    return [cufp8.Linear(w, b, scheme=scheme, device=device, **more) for w, b in zip(weights(rng), biases, strict=True)]


def blocks(rng: np.random.Generator, n: int, k: int = K) -> cufp8.Linear:
    codes = rng.integers(0, 0x7F, (n, k)).astype(np.uint8)
    scale = np.exp2(rng.uniform(-9, 0, (-(-n // 128), -(-k // 128)))).astype(np.float32)
    q = cufp8.QuantizedTensor(
        codes, scale, dtype="float8_e4m3fn", scale_dtype="float32", shape=(n, k), block=(128, 128)
    )
    return cufp8.Linear.from_quantized(q, device="cpu")


def assert_near(y: np.ndarray, wanted: np.ndarray, share: float) -> None:
    """Up to a share of each channel's largest value, for sums may come in another order."""
    assert bool((np.abs(y - wanted) <= share * np.abs(wanted).max(axis=0)).all())


@pytest.mark.parametrize("scheme", formats.SCHEMES)
def test_it_computes_what_the_layers_compute(rng: np.random.Generator, scheme: str) -> None:
    parts = layers(rng, scheme)
    fused = cufp8.fuse(parts)
    assert fused.shape == (sum(ROWS), K) and fused.scheme == scheme and fused.device == "cpu"
    x = rng.standard_normal((5, K)).astype(np.float32)
    apart = np.concatenate([layer(x) for layer in parts], axis=1)
    assert_near(fused(x), apart, 2e-5)
    exact = np.concatenate([layer.weight.dequantize("float64") for layer in parts])
    np.testing.assert_array_equal(fused.weight.dequantize("float64"), exact)
    one = cufp8.fuse(iter(parts[:1]))
    np.testing.assert_array_equal(one(x), parts[0](x))


def test_what_was_fused_stays_apart(rng: np.random.Generator) -> None:
    parts = layers(rng, "FP8A16")
    fused = cufp8.fuse(parts)
    before = fused.weight.codes.copy()
    parts[0].weight.codes[...] = 0
    np.testing.assert_array_equal(fused.weight.codes, before)
    assert cufp8.fuse(parts[1:2]).bias is None


def test_blocks_of_rows(rng: np.random.Generator) -> None:
    parts = [blocks(rng, 256), blocks(rng, 128), blocks(rng, 70)]
    fused = cufp8.fuse(parts)
    exact = np.concatenate([layer.weight.dequantize("float64") for layer in parts])
    np.testing.assert_array_equal(fused.weight.dequantize("float64"), exact)
    with pytest.raises(ValueError, match="layer 0 has 70 rows; all but the last need a multiple of 128"):
        cufp8.fuse(parts[::-1])
    with pytest.raises(ValueError, match="needed are the same K and blocks"):
        cufp8.fuse([parts[0], cufp8.Linear(rng.standard_normal((3, K)).astype(np.float32), device="cpu")])


DIFFERENT: dict[str, Callable[[Any], tuple[str, dict[str, Any]]]] = {
    "scheme": lambda _: ("FP8_DYNAMIC", {}),
    "out_dtype": lambda _: ("FP8A16", {"out_dtype": "float32"}),
    "pdl": lambda _: ("FP8A16", {"pdl": False}),
    "batch_invariant": lambda _: ("FP8A16", {"batch_invariant": True}),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ(rng: np.random.Generator, name: str) -> None:
    w = rng.standard_normal((4, K)).astype(np.float32)
    scheme, more = DIFFERENT[name](None)
    with pytest.raises(ValueError, match=f"layer 1 has {name} .* and the first .*; needed is the same"):
        cufp8.fuse([cufp8.Linear(w, device="cpu"), cufp8.Linear(w, scheme=scheme, device="cpu", **more)])


def test_scales_of_x_that_differ(rng: np.random.Generator) -> None:
    w = rng.standard_normal((4, K)).astype(np.float32)
    two = [cufp8.Linear(w, scheme="FP8", input_scale=s, device="cpu") for s in (0.5, 0.25)]
    with pytest.raises(ValueError, match=r"layer 1 has input_scale 0.25 and the first 0.5"):
        cufp8.fuse(two)


def test_what_is_refused(rng: np.random.Generator) -> None:
    w = rng.standard_normal((4, K)).astype(np.float32)
    layer = cufp8.Linear(w, device="cpu")
    with pytest.raises(ValueError, match="there is no layer"):
        cufp8.fuse([])
    with pytest.raises(TypeError, match="layer 1 is a ndarray; needed are Linears"):
        cufp8.fuse([layer, w])
    with pytest.raises(ValueError, match="needed are the same K"):
        cufp8.fuse([layer, cufp8.Linear(w[:, :64], device="cpu")])


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["FP8A16", "FP8_DYNAMIC", "FP8"])
def test_on_the_gpu(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    parts = layers(rng, scheme, "cuda")
    fused = cufp8.fuse(parts)
    assert fused.device == parts[0].device
    for m in (1, 7, 40):
        x = cupy.asarray(rng.standard_normal((m, K)).astype(np.float16))
        apart = cupy.concatenate([layer(x) for layer in parts], axis=1).get().astype(np.float64)
        assert_near(fused(x).get().astype(np.float64), apart, 2e-3)
    exact = np.concatenate([layer.weight.to("cpu").dequantize("float64") for layer in parts])
    np.testing.assert_array_equal(fused.weight.to("cpu").dequantize("float64"), exact)
