"""The contenders that are neither ours nor torch's: Humming, gemlite and FBGEMM, where they are installed.

All compute from the same codes and scales. Each builder takes the weight, two x [m, k] as torch tensors, and
gives a Contender. What a rival leaves out is in the row's note.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from cufp8.bench.linear import Weights
from cufp8.bench.measure import Contender

# gemlite compiles and times 12 to 22 kernels a cell, and from M = 64 on took longer than F.linear on an H200: a few
# shapes are enough. Humming compiles seven kernels a shape for all M, FBGEMM none.
FEW_SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
# M that gemlite serves by one set of kernels, or by almost the same; those that compile longest first.
GEMLITE_ROWS = [(16, 32), (4, 8), (64,), (1,), (2,)]
GEMLITE_WARMUP_MS, GEMLITE_TUNING_MS = 5, 20  # of each kernel that it tries; Triton takes 25 and 100
Cell = tuple[int, int, int]  # n, k, m
Job = tuple[Any, ...]  # a function that compiles, and its arguments
# Scheme -> how Humming is told of it: a dtype alone has a scale per channel.
HUMMING: dict[str, dict[str, Any]] = {
    "FP8A16": {"dtype": "float8e4m3"},
    "NVFP4A16": {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"},
    "MXFP4A16": {"dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32},
}


def humming(weights: Weights, x: list[Any]) -> Contender:
    """Humming with one heuristic configuration for this m; it keeps the scales of channels in bfloat16."""
    import torch

    scheme = weights.quantized.scheme

    def make() -> list[Any]:
        layers = []
        for _ in range(weights.copies):
            with torch.device("cuda"):
                layer = _humming_layer(weights.n, weights.k, scheme)
            layer.load_from_tensors(humming_tensors(weights))
            layer.transform()
            layers.append(layer)
        return layers

    layers = weights.kept("humming", make)
    m = len(x[0])
    config = _humming_tuning(layers[0].humming_config, m)
    buffers = [torch.empty((m, weights.n), dtype=torch.bfloat16, device="cuda") for _ in range(2)]

    def call(i: int) -> None:
        layers[i % len(layers)](x[i % 2], tuning_config=config, outputs=buffers[i % 2])

    note = {"scale_dtype": "bfloat16"} if scheme == "FP8A16" else {}
    return Contender("humming", call, buffers, note=note)


def _humming_layer(n: int, k: int, scheme: str) -> Any:
    import torch
    from humming.layer import HummingLayer

    config = dict(HUMMING[scheme])  # Humming adds to it
    return HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16)


def humming_tensors(weights: Weights) -> dict[str, Any]:
    """Codes and scales under Humming's names; it multiplies with the second scale too."""
    import torch

    q = weights.quantized
    codes, scale = torch.from_dlpack(q.codes), torch.from_dlpack(q.scale)
    scale = scale.to(torch.bfloat16) if q.scale_dtype == "float32" else scale.view(getattr(torch, q.scale_dtype))
    tensors = {"weight": codes.view(torch.int32), "weight_scale": scale}
    if q.global_scale is not None:
        tensors["weight_scale_2"] = torch.from_dlpack(q.global_scale)
    return tensors


def _humming_tuning(layer_config: Any, m: int) -> str:
    from humming.tune import get_heuristics_config

    return json.dumps(get_heuristics_config(layer_config, shape_m=m))


def gemlite(weights: Weights, x: list[Any]) -> Contender:
    """gemlite, which tunes itself in the first call of each shape."""
    from gemlite.core import GEMLITE_TRITON_KERNELS
    from triton.testing import do_bench

    for kernel in GEMLITE_TRITON_KERNELS:
        for tuner in kernel.kernel:
            tuner._do_bench = partial(do_bench, warmup=GEMLITE_WARMUP_MS, rep=GEMLITE_TUNING_MS)
    layers = weights.kept("gemlite", lambda: [_gemlite_layer(*torch_codes(weights)) for _ in range(weights.copies)])
    note = {"tuning_ms": GEMLITE_TUNING_MS}
    return Contender("gemlite", lambda i: layers[i % len(layers)](x[i % 2]), note=note)


def _gemlite_layer(codes: Any, scale: Any) -> Any:
    import torch
    from gemlite.helper import A16W8_FP8

    maker = A16W8_FP8(device="cuda:0", dtype=torch.bfloat16)
    return maker.from_weights(codes.view(torch.float8_e4m3fn), None, scales=scale)


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
    """A rival that takes FP8 weights.

    Attributes
    ----------
    package : str
        What it is imported from.
    largest_m, on_few_shapes : int
        The largest M that is measured: on any shape, and on FEW_SHAPES.
    build : callable
    """

    package: str
    largest_m: int
    on_few_shapes: int
    build: Callable[[Weights, list[Any]], Contender]


RIVALS = {
    "humming": Rival("humming", 4096, 4096, humming),
    "gemlite": Rival("gemlite", 0, 64, gemlite),
    "fbgemm": Rival("fbgemm_gpu", 4, 4, fbgemm),
}


def present(n: int, k: int, m: int) -> list[str]:
    """The rivals of a cell that are installed; nothing is imported to find out."""
    few = (n, k) in FEW_SHAPES
    return [
        name
        for name, rival in RIVALS.items()
        if m <= (rival.on_few_shapes if few else rival.largest_m) and importlib.util.find_spec(rival.package)
    ]


# --- compiling ahead -------------------------------------------------------------------------------------


def compile_ahead(todo: list[Job]) -> None:
    """Have the rivals' kernels compiled into their caches on disk, on all cores.

    One after the other they take minutes. A kernel that fails here does so again in its cell, which then tells.
    """
    if not todo:
        return
    # Processes, as much of Triton's compiler is Python.
    workers = min(len(todo), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for job in [pool.submit(*one) for one in todo]:
            if (wrong := job.exception()) is not None:
                warnings.warn(f"compiling ahead: {wrong!r}", stacklevel=2)


def jobs(cells: Iterable[Cell]) -> list[Job]:
    """What there is to compile for FP8 weights: functions with n, k and rows, those that take longest first."""
    rows: dict[tuple[str, int, int], set[int]] = {}
    for n, k, m in cells:
        for name in present(n, k, m):
            rows.setdefault((name, n, k), set()).add(m)
    todo: list[Job] = [(compile_humming, n, k, sorted(ms)) for (name, n, k), ms in rows.items() if name == "humming"]
    for together in GEMLITE_ROWS:
        for (name, n, k), ms in rows.items():
            if name == "gemlite" and ms.intersection(together):
                todo.append((compile_gemlite, n, k, sorted(ms.intersection(together))))
    return todo


def compile_humming(n: int, k: int, rows: list[int], scheme: str = "FP8A16") -> None:
    import torch
    from humming.kernel.humming import HummingKernel
    from humming.transform import prepare_layer_config

    with torch.device("meta"):
        layer = _humming_layer(n, k, scheme)
    config = prepare_layer_config(
        n, k, weight_schema=layer.weight_schema, input_schema=layer.input_schema, torch_dtype=torch.bfloat16
    )
    for m in rows:
        HummingKernel.prepare_kernels(config.to_str(), None, _humming_tuning(config, m))


def compile_gemlite(n: int, k: int, rows: list[int]) -> None:
    import torch
    from triton.runtime.autotuner import Autotuner

    def compile_only(tuner: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        for config in tuner.prune_configs(kwargs):
            with contextlib.suppress(Exception):  # tuning passes over a kernel that does not compile
                tuner.fn.warmup(*args, grid=grid, **kwargs, **config.all_kwargs())

    codes = torch.empty((n, k), dtype=torch.uint8, device="cuda")
    layer = _gemlite_layer(codes, torch.empty((n, 1), dtype=torch.float32, device="cuda"))
    with mock.patch.object(Autotuner, "run", compile_only):
        for m in rows:
            layer(torch.empty((m, k), dtype=torch.bfloat16, device="cuda"))
