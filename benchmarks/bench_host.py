"""Host time of one call, `layer(x)` against F.linear: many calls queued, the GPU keeps up, nobody waits for it.

`cufp8` takes and gives torch tensors like its rival. A NumPy x also crosses the bus twice and waits for the
result: its entry is the whole of that.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cufp8.bench.measure import Measured, numpy_dtype

N = K = 4096
ROWS = [1, 16]
ROUNDS = 15
CALLS = 200  # well under the about 1000 launches that the driver queues before it makes the host wait

WHAT = {
    "cufp8": "`layer(x)`, torch tensor",
    "cufp8-out": "`layer(x, out=y)`, torch tensor",
    "cufp8-cupy": "`layer(x)`, CuPy array",
    "cufp8-jax": "`layer(x)`, JAX array",
    "cufp8-numpy": "`layer(x)`, NumPy array, with both copies and the wait",
    "torch-linear-bf16": "`F.linear(x, w)`, torch tensor",
}
NEEDS = {"cufp8": "torch", "cufp8-out": "torch", "torch-linear-bf16": "torch", "cufp8-jax": "jax"}
NAMES = [n for n in WHAT if n not in NEEDS or importlib.util.find_spec(NEEDS[n]) is not None]


def calls_of(name: str, layer: Any, m: int) -> Callable[[], Any]:
    """One call of a contender, without arguments."""
    import cupy

    rng = np.random.default_rng([m, 3])
    x = rng.standard_normal((m, K), dtype=np.float32).astype(numpy_dtype("bfloat16"))
    if name == "cufp8-numpy":
        return lambda: layer(x)
    on_gpu = cupy.asarray(x)
    if name == "cufp8-cupy":
        return lambda: layer(on_gpu)
    if name == "cufp8-jax":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory
        import jax

        jax_x = jax.device_put(x)
        return lambda: layer(jax_x)
    import torch

    torch_x = torch.from_dlpack(on_gpu).clone()
    if name == "cufp8":
        return lambda: layer(torch_x)
    y = torch.empty((m, N), dtype=torch.bfloat16, device="cuda")
    if name == "cufp8-out":
        return lambda: layer(torch_x, out=y)
    w = torch.randn((N, K), dtype=torch.bfloat16, device="cuda")
    linear = torch.nn.functional.linear
    return lambda: linear(torch_x, w)


def group(bench: Any, m: int) -> dict[str, Any]:
    """Measure all contenders in turns."""
    layer = bench.weights(N, K).layers(True)[0]
    ready: dict[str, Callable[[], Any]] = {}
    failed: dict[str, Any] = {}
    for name in NAMES:
        try:
            ready[name] = calls_of(name, layer, m)
            ready[name]()
        except Exception as wrong:  # one library that fails must not take the group with it
            failed[name] = wrong
            ready.pop(name, None)
    taken: dict[str, list[float]] = {name: [] for name in ready}
    gc.collect()
    gc.disable()
    try:
        for turn in range(ROUNDS + 1):
            for name, call in ready.items():
                calls = CALLS if name not in ("cufp8-numpy", "cufp8-jax") else CALLS // 10
                bench.queue.wait()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                seconds = (time.perf_counter() - start) / calls
                if turn:
                    taken[name].append(seconds)
            bench.queue.wait()
    finally:
        gc.enable()
    kernel = layer.kernels(m, x_dtype="bfloat16")
    done = {
        name: Measured(
            seconds,
            kernel=kernel if name.startswith("cufp8") else None,
            note={"what": WHAT[name], "x_dtype": "bfloat16"},
        )
        for name, seconds in taken.items()
    }
    bench.write("host", [bench.row(name, one, scheme="FP8A16", m=m, n=N, k=K) for name, one in done.items()])
    return {**failed, **done}


@pytest.mark.parametrize("m", ROWS, ids=[f"m{m}" for m in ROWS])
@pytest.mark.parametrize("contender", NAMES)
def test_host(bench: Any, replay: Any, m: int, contender: str) -> None:
    measured = bench.once(("host", m), lambda: group(bench, m))
    replay(f"host {N} x {K}, M = {m}", measured[contender])
