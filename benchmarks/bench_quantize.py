"""Quantising weights on the GPU: bytes read and written a second, beside the copy kernel.

`cufp8` takes bfloat16, `cufp8-fp32` float32: the kernel in a graph, sources and codes cold. `stream-copy` is
the copy kernel on as many bytes as `cufp8` moves. `cufp8-call` is the whole of `cufp8.quantize(w)` as Python
sees it: memory, the launch, and the wait for the count of values that are not finite.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from cufp8.bench.measure import Contender, Measured, copies_for, measure, normal, numpy_dtype

SHAPES = [(4096, 4096), (14336, 4096), (28672, 8192)]
NAMES = {"cufp8": "bfloat16", "cufp8-fp32": "float32", "stream-copy": "", "cufp8-call": "bfloat16"}
CALL_ROUNDS = 11
BLOCK = 256  # THREADS in quantize.cu
CHECKED_ROWS = 32


def moved(n: int, k: int, dtype: str) -> int:
    """Bytes that must be read and written: w once, a code for each value, a float32 scale for each row."""
    return n * k * (numpy_dtype(dtype).itemsize + 1) + 4 * n


def quantizer(bench: Any, name: str, w: Any, dtype: str) -> Contender:
    """The kernel alone, over copies of w and codes of their own."""
    import cupy

    from cufp8 import kernels, runtime

    n, k = w.shape
    copies = copies_for(moved(n, k, dtype), bench.memory.l2_bytes)
    sources = [w.astype(numpy_dtype(dtype)) for _ in range(copies)]
    codes = [cupy.empty((n, k), np.uint8) for _ in range(copies)]
    scale = cupy.empty((n, 1), np.float32)
    status = cupy.asarray(np.array([0, 2**64 - 1], np.uint64))
    launch = kernels.Launch(f"quantize_{dtype}", (n, 1, 1), BLOCK)
    launcher = runtime.Launcher(runtime.row("quantize"), launch, bench.memory.device)

    def call(i: int) -> Any:
        source, to = sources[i % copies], codes[i % copies]
        addresses = (source.data.ptr, to.data.ptr, scale.data.ptr, status.data.ptr)
        launcher(bench.queue.stream(), *addresses, k, 1, to.shape[1], k)
        return to

    return Contender(name, call, kernel="quantize", x_dtype=dtype)


def copier(bench: Any, nbytes: int) -> Contender:
    """The copy kernel on `nbytes`, half of them read and half written."""
    import cupy

    half = nbytes // 32 * 16
    copies = copies_for(nbytes, bench.memory.l2_bytes)
    random = bench.memory.buffers[0]
    sources = [cupy.resize(random, half) for _ in range(copies)]
    targets = [cupy.empty(half, np.uint8) for _ in range(copies)]
    blocks = bench.memory.grids(half)[0]

    def call(i: int) -> Any:
        source, target = sources[i % copies], targets[i % copies]
        bench.memory.copy(source.data.ptr, target.data.ptr, half, blocks)
        return target

    return Contender("stream-copy", call, kernel="stream")


def whole_calls(w: Any) -> list[float]:
    """Seconds of `cufp8.quantize(w)` from Python."""
    import cufp8

    taken = []
    for _ in range(CALL_ROUNDS + 1):
        start = time.perf_counter()
        cufp8.quantize(w)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def group(bench: Any, n: int, k: int) -> dict[str, Any]:
    import cufp8

    w = normal((n, k), n, k)
    contenders = [quantizer(bench, "cufp8", w, "bfloat16"), quantizer(bench, "cufp8-fp32", w, "float32")]
    contenders.append(copier(bench, moved(n, k, "bfloat16")))
    last = slice(n - CHECKED_ROWS, n)

    def error(contender: Contender, outputs: list[Any]) -> float:
        if contender.kernel == "quantize":
            some = w[last].astype(numpy_dtype(contender.x_dtype)).get()
            wanted = cufp8.quantize(some).codes
            for codes in outputs:
                assert np.array_equal(codes[last, :k].get(), wanted), "codes differ from the host's"
        return 0.0

    done = measure(bench.queue, contenders, error, bench.memory.hold)
    whole = w.astype(numpy_dtype("bfloat16"))
    done["cufp8-call"] = Measured(whole_calls(whole), kernel="quantize")
    rows = []
    for name, result in done.items():
        if isinstance(result, Measured):
            result.error = None
            nbytes = moved(n, k, NAMES[name] or "bfloat16")
            result.note = rates(bench, nbytes, result.time_us * 1e-6, NAMES[name])
            rows.append(bench.row(name, result, scheme="FP8A16", n=n, k=k))
    bench.write("quantize", rows)
    return done


def rates(bench: Any, nbytes: int, seconds: float, w_dtype: str) -> dict[str, Any]:
    """For the note: TB/s, and the share of what the session's copy kernel reaches on large buffers."""
    tb_s = nbytes / seconds / 1e12
    share = tb_s / bench.run["copy_tb_s"]
    return {"w_dtype": w_dtype, "tb_s": round(tb_s, 3), "copy_share": round(share, 3), "fused": False}


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])
@pytest.mark.parametrize("contender", NAMES)
def test_quantize(bench: Any, replay: Any, n: int, k: int, contender: str) -> None:
    measured = bench.once(("quantize", n, k), lambda: group(bench, n, k))
    replay(f"quantize {n} x {k}", measured[contender])
