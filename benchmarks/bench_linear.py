"""Linear, FP8 weights and 16-bit x: cufp8 against F.linear and against the rivals that are installed.

`cufp8` runs as a chain with programmatic dependent launch, `cufp8-nopdl` without. A third of the cells
is measured in float16 as well. Where another kernel serves outside of captures, `cufp8-eager` is that
one: queued call by call while the GPU is kept busy, so that this too is GPU time.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import rivals
from measure import Contender, Weights

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def in_float16(n: int, k: int, m: int) -> bool:
    """Every third cell, another third for each shape."""
    return (SHAPES.index((n, k)) + ROWS.index(m)) % 3 == 0


def kernel(n: int, k: int, m: int, dtype: str, captured: bool) -> str | None:
    """The row of KERNELS that serves on this GPU; None without one."""
    from cufp8 import kernels, runtime

    if not runtime.available():
        return None
    problem = kernels.Problem("FP8A16", (1, k), dtype, dtype, m, n, k, captured=captured)
    return kernels.pick(runtime.target(), problem).name


def names(n: int, k: int, m: int) -> list[str]:
    torch = importlib.util.find_spec("torch") is not None
    half = in_float16(n, k, m)
    eager = kernel(n, k, m, "bfloat16", True) != kernel(n, k, m, "bfloat16", False)
    return [
        "cufp8",
        "cufp8-nopdl",
        *["cufp8-eager"] * eager,
        *["torch-linear-bf16"] * torch,
        *["cufp8-fp16"] * half,
        *["torch-linear-fp16"] * (half and torch),
        *(rivals.present(m) if torch else []),
    ]


ENTRIES = [
    pytest.param(n, k, m, name, id=f"{n}x{k}-m{m}-{name}") for n, k in SHAPES for m in ROWS for name in names(n, k, m)
]


def ours(queue: Any, weights: Weights, x: dict[str, list[Any]], name: str) -> Contender:
    """cufp8 in one of its ways; outputs go to two buffers in turn, so that nothing is allocated."""
    dtype = "float16" if name == "cufp8-fp16" else "bfloat16"
    layers = weights.layers(name != "cufp8-nopdl")
    m = len(x[dtype][0])
    buffers = [queue.empty((m, weights.n), dtype) for _ in range(2)]

    def call(i: int) -> None:
        layers[i % len(layers)](x[dtype][i % 2], out=buffers[i % 2])

    captured = name != "cufp8-eager"
    serves = kernel(weights.n, weights.k, m, dtype, captured)
    return Contender(name, call, len(layers), buffers, kernel=serves, captured=captured, x_dtype=dtype)


def group(bench: Any, n: int, k: int, m: int) -> dict[str, Any]:
    """Measure all contenders of one cell."""
    import cupy

    weights = bench.weights(n, k)
    wanted = names(n, k, m)
    rng = np.random.Generator(np.random.SFC64([n, k, m]))
    drawn = cupy.asarray(rng.standard_normal((2 * m, k), dtype=np.float32))
    dtypes = ["bfloat16", "float16"] if in_float16(n, k, m) else ["bfloat16"]
    pairs = {dtype: bench.queue.array(drawn, dtype) for dtype in dtypes}
    exact_x = {dtype: cupy.from_dlpack(both) for dtype, both in pairs.items()}
    x = {dtype: [both[:m], both[m:]] for dtype, both in pairs.items()}

    def build(name: str) -> Contender:
        if name.startswith("cufp8"):
            return ours(bench.queue, weights, x, name)
        if name in rivals.RIVALS:
            return rivals.RIVALS[name].build(weights, x["bfloat16"])
        dtype = "float16" if name == "torch-linear-fp16" else "bfloat16"
        return rivals.torch_linear(weights, x[dtype], dtype)

    contenders, failed = [], {}
    for name in wanted:
        try:
            contenders.append(build(name))
        except Exception as wrong:  # a rival that cannot be made must not take the group with it
            failed[name] = wrong
    return {**failed, **bench.linear("linear", weights, m, exact_x, contenders)}


@pytest.mark.parametrize(("n", "k", "m", "contender"), ENTRIES)
def test_linear(bench: Any, replay: Any, n: int, k: int, m: int, contender: str) -> None:
    measured = bench.once((n, k, m), lambda: group(bench, n, k, m))
    replay(f"linear {n} x {k}, M = {m}", measured[contender])
