"""Quantising weights and activations on the GPU: bytes read and written a second, beside the copy kernel.

`cufp8` takes bfloat16, `cufp8-fp32` float32: the kernel in a graph, sources and codes cold. `stream-copy` is
the copy kernel on as many bytes as `cufp8` moves. `cufp8-call` is the whole of `cufp8.quantize(w)` as Python
sees it: memory, the launch, and the wait for the count of values that are not finite.

Activations are bfloat16 [M, K], in a graph of calls with `out=`, kernels that start while the one before them ends:
`token`, `group` and `tensor` (a scale on the GPU) of x as it is, `tensor-dynamic`, which reads x twice, and what stands
before a layer fused with them. `stream-copy` copies as many bytes as `token` moves.

Formats with a scale for each block of a row: `nvfp4`, `mxfp4`, `mxfp8` (`mxfp8-e5m2`), weights and activations. `nvfp4`
reads a weight twice, which counts once; its activations have a global scale a token, found in the same read, or one
that is given (`nvfp4-given`). `stream-copy` copies as many bytes as `nvfp4` counts.
"""

from __future__ import annotations

import importlib
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
    grids = bench.memory.grids("stream_copy", half)
    blocks = grids[min(bench.memory.copy_grid, len(grids) - 1)]

    def call(i: int) -> Any:
        source, target = sources[i % copies], targets[i % copies]
        bench.memory.copy(source.data.ptr, target.data.ptr, half, blocks)
        return target

    return Contender("stream-copy", call, kernel="stream")


ACTIVATIONS = [(4096, 4096), (16384, 8192)]
TOKEN, GROUP, TENSOR = (1, -1), (1, 128), (-1, -1)
# What is fused, the block, bytes read and written for a value beside its code.
FORMS = {
    "token": (None, TOKEN, 2),
    "group": (None, GROUP, 2),
    "tensor": (None, TENSOR, 2),
    "tensor-dynamic": (None, TENSOR, 2),
    "rms-norm-token": ("rms_norm", TOKEN, 2),
    "rms-norm-token-nopdl": ("rms_norm", TOKEN, 2),
    "rms-norm-group": ("rms_norm", GROUP, 2),
    "rms-norm-tensor": ("rms_norm", TENSOR, 2),
    "rms-norm-residual-token": ("rms_norm", TOKEN, 6),
    "silu-mul-token": ("silu_mul", TOKEN, 4),
    "silu-mul-group": ("silu_mul", GROUP, 4),
    "silu-mul-tensor": ("silu_mul", TENSOR, 4),
}


def form_bytes(name: str, m: int, k: int) -> int:
    fused, block, each = FORMS[name]
    scales = {TOKEN: m, GROUP: m * -(-k // 128), TENSOR: 1}[block]
    return m * k * (each + 1) + 4 * scales + (2 * k if fused == "rms_norm" else 0)


def call_form(name: str, x: Any, weight: Any, scale: Any, out: Any) -> Any:
    """One form of x, on any device; `out` may be None."""
    import cufp8

    fused, block, each = FORMS[name]
    options = {"block": block, "scale": scale if block == TENSOR and "dynamic" not in name else None, "out": out}
    if fused == "silu_mul":
        return cufp8.silu_mul_quantize(x, **options)
    if fused is None:
        return cufp8.quantize_activations(x, **options)
    if each == 6:
        return cufp8.rms_norm_quantize(x, weight, 1e-6, x, **options)[0]
    return cufp8.rms_norm_quantize(x, weight, 1e-6, pdl="nopdl" not in name, **options)


def quantizer_of(bench: Any, name: str, x: Any, weight: Any, scale: Any) -> Contender:
    """A form of x over copies of x, with results of their own."""
    fused, _, _ = FORMS[name]
    m, k = x.shape[0], x.shape[1] // (1 + (fused == "silu_mul"))
    copies = copies_for(form_bytes(name, m, k), bench.memory.l2_bytes)
    sources = [bench.queue.array(x, "bfloat16") for _ in range(copies)]
    w, s = bench.queue.array(weight, "bfloat16"), bench.queue.array(scale, "float32")
    outs = [call_form(name, source, w, s, None) for source in sources]

    def call(i: int) -> Any:
        return call_form(name, sources[i % copies], w, s, outs[i % copies]).codes

    return Contender(name, call, kernel=fused or "activations")


def activations_group(bench: Any, m: int, k: int) -> dict[str, Any]:
    import cupy

    x, weight = normal((m, 2 * k), m, k), normal((1, k), k)[0]
    scale = cupy.full(1, 0.01, np.float32)
    last = slice(m - CHECKED_ROWS, m)

    def error(contender: Contender, outputs: list[Any]) -> float:
        if contender.kernel != "stream":
            columns = 2 * k if contender.kernel == "silu_mul" else k
            some = (array.astype(numpy_dtype("bfloat16")).get() for array in (x[last, :columns], weight))
            if "dynamic" not in contender.name:
                wanted = call_form(contender.name, *some, 0.01, None).codes
                for codes in outputs:
                    assert np.array_equal(codes[last].get(), wanted), "codes differ from the host's"
        return 0.0

    first = cupy.ascontiguousarray(x[:, :k])
    contenders = [
        quantizer_of(bench, name, x if FORMS[name][0] == "silu_mul" else first, weight, scale) for name in FORMS
    ]
    contenders.append(copier(bench, form_bytes("token", m, k)))
    done = measure(bench.queue, contenders, error, bench.memory.hold)
    rows = []
    for name, result in done.items():
        if isinstance(result, Measured):
            result.error = None
            nbytes = form_bytes(name if name in FORMS else "token", m, k)
            result.note |= rates(bench, nbytes, result.time_us * 1e-6, "", name in FORMS and FORMS[name][0] is not None)
            rows.append(bench.row(name, result, scheme="FP8", m=m, k=k))
    bench.write("quantize", rows)
    return done


BLOCK_WEIGHTS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16"}
_E8M0 = {"block": (1, 32), "scale_dtype": "float8_e8m0fnu"}
_NVFP4 = {"block": (1, 16), "scale_dtype": "float8_e4m3fn", "dtype": "float4_e2m1fn"}
BLOCK_FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("NVFP4", _NVFP4),
    "nvfp4-given": ("NVFP4", _NVFP4),
    "mxfp4": ("MXFP4", _E8M0 | {"dtype": "float4_e2m1fn"}),
    "mxfp8": ("MXFP8", _E8M0),
    "mxfp8-e5m2": ("MXFP8", _E8M0 | {"dtype": "float8_e5m2"}),
}


def block_bytes(name: str, m: int, k: int, activations: bool) -> int:
    """Bytes that must be read and written: bfloat16 once, codes, scale codes, and global scales of tokens."""
    fp4, size = "fp4" in name, 16 if "nvfp4" in name else 32
    return 2 * m * k + m * -(-k // (1 + fp4)) + m * -(-k // size) + 4 * m * (activations and name == "nvfp4")


def block_quantizer(bench: Any, name: str, w: Any) -> Contender:
    """The kernels of a weight alone, over copies of w and codes of their own."""
    import cupy

    from cufp8.formats import FORMATS, SCHEMES

    module, row = importlib.import_module("cufp8.quantize"), SCHEMES[BLOCK_WEIGHTS[name]]
    (n, k), device = w.shape, bench.memory.device
    copies = copies_for(block_bytes(name, n, k, False), bench.memory.l2_bytes)
    sources = [w.astype(numpy_dtype("bfloat16")) for _ in range(copies)]
    codes = [cupy.empty((n, k * FORMATS[row.dtype].bits // 8), np.uint8) for _ in range(copies)]
    scale, factors = cupy.empty((n, -(-k // row.block[1])), np.uint8), cupy.empty(2, np.float32)
    status = cupy.asarray(np.array([0, 2**64 - 1], np.uint64))
    g, amax = factors.data.ptr, factors.data.ptr + 4

    def call(i: int) -> Any:
        source, to, stream = sources[i % copies], codes[i % copies], bench.queue.stream()
        places = to.data.ptr, to.shape[1], scale.data.ptr, scale.shape[1]
        rows = module.BlockRows("bfloat16", (n, k), source.data.ptr, k, 1, *places)
        if not row.global_scale:
            module.queue_blocks("quantize", row, "RCEIL", rows, device, stream, status=status.data.ptr)
            return to
        cupy.cuda.runtime.memsetAsync(amax, 0, 4, stream)
        module.queue_blocks("amax", row, "RCEIL", rows, device, stream, factor=amax, status=status.data.ptr)
        options = {"mode": module.FACTOR_OF_AMAX, "factor": g, "given": amax}
        module.queue_blocks("quantize", row, "RCEIL", rows, device, stream, **options)
        return to

    return Contender(name, call, kernel="quantize_blocks")


def block_former(bench: Any, name: str, x: Any, scale: Any) -> Contender:
    """Activations in such a format, over copies of x, with results of their own."""
    import cufp8

    m, k = x.shape
    copies = copies_for(block_bytes(name, m, k, True), bench.memory.l2_bytes)
    sources = [bench.queue.array(x, "bfloat16") for _ in range(copies)]
    options = dict(BLOCK_FORMS[name][1])
    if name.endswith("-given"):
        options["global_scale"] = bench.queue.array(scale, "float32")
    outs = [cufp8.quantize_activations(source, **options) for source in sources]

    def call(i: int) -> Any:
        return cufp8.quantize_activations(sources[i % copies], **options, out=outs[i % copies]).codes

    return Contender(name, call, kernel="quantize_blocks")


def blocks_group(bench: Any, m: int, k: int, activations: bool) -> dict[str, Any]:
    import cupy

    import cufp8
    from cufp8.block_scaled import encode_blocks, factors_of, store
    from cufp8.formats import FORMATS, SCHEMES

    x, scale = normal((m, k), m, k), cupy.full(1, 0.01, np.float32)
    last = slice(m - CHECKED_ROWS, m)
    some = x[last].astype(numpy_dtype("bfloat16")).get()
    amax = float(abs(x.astype(numpy_dtype("bfloat16")).astype(np.float32)).max())

    def wanted(name: str) -> np.ndarray:
        if activations:
            given = {"global_scale": 0.01} if name.endswith("-given") else {}
            return cufp8.quantize_activations(some, **BLOCK_FORMS[name][1], **given).codes
        row = SCHEMES[BLOCK_WEIGHTS[name]]
        g = factors_of(np.float32(amax))[()] if row.global_scale else None
        element = FORMATS[row.dtype]
        packed = np.empty((CHECKED_ROWS, k * element.bits // 8), np.uint8)
        codes = encode_blocks(some.astype(np.float32), row, "RCEIL", g)[0]
        store(codes, packed, element, slice(0, CHECKED_ROWS), slice(0, k))
        return packed

    def error(contender: Contender, outputs: list[Any]) -> float:
        if contender.kernel == "quantize_blocks":
            for codes in outputs:
                assert np.array_equal(codes[last].get(), wanted(contender.name)), "codes differ from the host's"
        return 0.0

    if activations:
        contenders = [block_former(bench, name, x, scale) for name in BLOCK_FORMS]
    else:
        contenders = [block_quantizer(bench, name, x) for name in BLOCK_WEIGHTS]
    contenders.append(copier(bench, block_bytes("nvfp4", m, k, activations)))
    done = measure(bench.queue, contenders, error, bench.memory.hold)
    rows = []
    for name, result in done.items():
        if isinstance(result, Measured):
            result.error = None
            known = name if name in BLOCK_FORMS else "nvfp4"
            result.note |= rates(bench, block_bytes(known, m, k, activations), result.time_us * 1e-6, "bfloat16")
            if activations:
                rows.append(bench.row(name, result, scheme=BLOCK_FORMS[known][0], m=m, k=k))
            else:
                rows.append(bench.row(name, result, scheme=BLOCK_WEIGHTS[known], n=m, k=k))
    bench.write("quantize", rows)
    return done


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


def rates(bench: Any, nbytes: int, seconds: float, w_dtype: str, fused: bool = False) -> dict[str, Any]:
    """For the note: TB/s, and the share of what the session's copy kernel reaches on large buffers."""
    tb_s = nbytes / seconds / 1e12
    share = tb_s / bench.run["copy_tb_s"]
    return {"w_dtype": w_dtype, "tb_s": round(tb_s, 3), "copy_share": round(share, 3), "fused": fused}


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])
@pytest.mark.parametrize("contender", NAMES)
def test_quantize(bench: Any, replay: Any, n: int, k: int, contender: str) -> None:
    measured = bench.once(("quantize", n, k), lambda: group(bench, n, k))
    replay(f"quantize {n} x {k}", measured[contender])


@pytest.mark.parametrize(("m", "k"), ACTIVATIONS, ids=[f"{m}x{k}" for m, k in ACTIVATIONS])
@pytest.mark.parametrize("contender", [*FORMS, "stream-copy"])
def test_quantize_activations(bench: Any, replay: Any, m: int, k: int, contender: str) -> None:
    measured = bench.once(("activations", m, k), lambda: activations_group(bench, m, k))
    replay(f"quantize activations {m} x {k}", measured[contender])


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=[f"{n}x{k}" for n, k in SHAPES])
@pytest.mark.parametrize("contender", [*BLOCK_WEIGHTS, "stream-copy"])
def test_quantize_blocks(bench: Any, replay: Any, n: int, k: int, contender: str) -> None:
    measured = bench.once(("quantize blocks", n, k), lambda: blocks_group(bench, n, k, False))
    replay(f"quantize blocks {n} x {k}", measured[contender])


@pytest.mark.parametrize(("m", "k"), ACTIVATIONS, ids=[f"{m}x{k}" for m, k in ACTIVATIONS])
@pytest.mark.parametrize("contender", [*BLOCK_FORMS, "stream-copy"])
def test_quantize_activation_blocks(bench: Any, replay: Any, m: int, k: int, contender: str) -> None:
    measured = bench.once(("activation blocks", m, k), lambda: blocks_group(bench, m, k, True))
    replay(f"quantize blocks of activations {m} x {k}", measured[contender])
