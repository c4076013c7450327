"""The contenders that are neither ours nor torch's: Humming, gemlite and FBGEMM, where they are installed.

All compute from the same codes and scales. Each builder takes the weight, two x [m, k] as torch tensors, and
gives a Contender. What a rival leaves out is in the row's note.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cufp8.bench.linear import Weights
from cufp8.bench.measure import Contender

# Humming compiles a kernel for each of these cells and gemlite tunes one, which takes far longer than to time it.
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
ROWS = [1, 4, 16, 32, 64, 256]


def humming(weights: Weights, x: list[Any]) -> Contender:
    """Humming with one heuristic configuration for this m; it keeps the scales in bfloat16."""
    import torch
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    def make() -> list[Any]:
        layers = []
        for _ in range(weights.copies):
            layer = HummingLayer(
                shape_n=weights.n,
                shape_k=weights.k,
                weight_config={"dtype": "float8e4m3"},
                torch_dtype=torch.bfloat16,
            ).cuda()
            codes, scale = torch_codes(weights)
            layer.load_from_tensors({"weight": codes.view(torch.int32), "weight_scale": scale.to(torch.bfloat16)})
            layer.transform()
            layers.append(layer)
        return layers

    layers = weights.kept("humming", make)
    m = len(x[0])
    config = json.dumps(get_heuristics_config(layers[0].humming_config, shape_m=m))
    buffers = [torch.empty((m, weights.n), dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def call(i: int) -> None:
        layers[i % len(layers)](x[i % 2], tuning_config=config, outputs=buffers[i % 2])

    return Contender("humming", call, buffers, note={"scale_dtype": "bfloat16"})


def gemlite(weights: Weights, x: list[Any]) -> Contender:
    """gemlite, which tunes itself in the first call of each shape."""
    import torch
    from gemlite.helper import A16W8_FP8

    def make() -> list[Any]:
        layers = []
        for _ in range(weights.copies):
            codes, scale = torch_codes(weights)
            maker = A16W8_FP8(device="cuda:0", dtype=torch.bfloat16)
            layers.append(maker.from_weights(codes.view(torch.float8_e4m3fn), None, scales=scale))
        return layers

    layers = weights.kept("gemlite", make)
    return Contender("gemlite", lambda i: layers[i % len(layers)](x[i % 2]))


def fbgemm(weights: Weights, x: list[Any]) -> Contender:
    """FBGEMM's GEMV, which knows one scalar scale: ours are multiplied in after the timing."""
    import torch

    if not hasattr(torch.ops.fbgemm, "bf16fp8bf16_fast_gemv"):
        torch.ops.load_library(str(_fbgemm_library()))

    def make() -> list[Any]:
        return [torch_codes(weights)[0].view(torch.float8_e4m3fn) for _ in range(weights.copies)]

    codes = weights.kept("fbgemm", make)
    one = torch.ones(1, dtype=torch.float32, device="cuda")
    scale = torch_codes(weights)[1].reshape(-1)
    gemv = torch.ops.fbgemm.bf16fp8bf16_fast_gemv
    return Contender(
        "fbgemm",
        lambda i: gemv(x[i % 2], codes[i % len(codes)], one),
        finish=lambda y: y.float() * scale,
        note={"without": "the scales of the channels"},
    )


def torch_codes(weights: Weights) -> tuple[Any, Any]:
    """Fresh torch tensors: codes uint8 [n, k] and scale float32 [n, 1]."""
    import torch

    q = weights.quantized
    return torch.from_dlpack(q.codes).clone(), torch.from_dlpack(q.scale).reshape(-1, 1).clone()


def _fbgemm_library() -> Path:
    spec = importlib.util.find_spec("fbgemm_gpu")
    if spec is None or spec.origin is None:
        raise ImportError("fbgemm_gpu is not installed")
    folder = Path(spec.origin).parent
    return folder / "experimental" / "gen_ai" / "fbgemm_gpu_experimental_gen_ai.so"


class Rival(NamedTuple):
    """A rival that takes FP8 weights: the package it comes from, the largest M it takes, its builder."""

    package: str
    largest_m: int
    build: Callable[[Weights, list[Any]], Contender]


RIVALS = {
    "humming": Rival("humming", 2**31, humming),
    "gemlite": Rival("gemlite", 2**31, gemlite),
    "fbgemm": Rival("fbgemm_gpu", 4, fbgemm),
}


def present(n: int, k: int, m: int) -> list[str]:
    """The rivals of a cell that are installed; nothing is imported to find out."""
    if (n, k) not in SHAPES or m not in ROWS:
        return []
    return [
        name
        for name, rival in RIVALS.items()
        if m <= rival.largest_m and importlib.util.find_spec(rival.package) is not None
    ]
