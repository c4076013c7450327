"""The fallback for many tokens: slices, sums in float32, one rounding; and another row during a capture."""

from __future__ import annotations

import gc
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import reference
from test_linear import (
    MANY,
    Cases,
    acc_of,
    assert_all_close,
    assert_same_bits,
    capture,
    floats,
    forced,
    keep_busy,
    nans,
    on_gpu,
    problem,
    quantized,
    raw,
    synchronize,
    tensor,
)

import cufp8
from cufp8 import cublas, kernels, runtime
from cufp8.formats import FLOATS

# --- without a GPU ----------------------------------------------------------------------------------------


class Recorder:
    """A CuPy, a cuBLAS and a launcher that take notes; memory is a range of numbers."""

    def __init__(self) -> None:
        self.next, self.alive, self.peak = 1 << 40, 0, 0
        self.streams: list[int] = []
        self.calls: list[tuple[Any, ...]] = []

    def alloc(self, size: int) -> Any:
        recorder = self

        class Block:
            def __init__(self) -> None:
                self.ptr, self.size = recorder.next, size
                recorder.next += size + 4096
                recorder.alive += size
                recorder.peak = max(recorder.peak, recorder.alive)

            def __del__(self) -> None:
                recorder.alive -= self.size

        return Block()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    found = Recorder()

    class Device:
        def __init__(self, index: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    class Stream:
        def __init__(self, ptr: int = 0) -> None:
            self.ptr = ptr

        @classmethod
        def from_external(cls, owner: Any) -> Stream:
            version, ptr = owner.__cuda_stream__()
            assert version == 0
            return cls(ptr)

        def __enter__(self) -> None:
            found.streams.append(self.ptr)

        def __exit__(self, *_: Any) -> None: ...

    Stream.null = Stream()

    class Launcher:
        def __init__(self, row: Any, launch: Any, device: int, pdl: bool = False) -> None:
            assert row.name == "cublas" and not pdl  # cuBLAS knows nothing of programmatic launch
            assert launch.entry in row.entries(kernels.ARCHS["sm_90a"])
            assert all(1 <= size <= limit for size, limit in zip(launch.grid, (2**31 - 1, 65535, 65535), strict=True))
            self.launch = launch

        def __call__(self, stream: int, *fields: int) -> None:
            kernels.LINEAR_ARGS.pack(*fields)
            found.calls.append((self.launch.entry, stream, self.launch, fields))

    cupy, cuda = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    cupy.cuda, cuda.Device, cuda.Stream, cuda.alloc = cuda, Device, Stream, found.alloc
    cuda.get_current_stream = lambda: Stream.null
    cuda.device = types.SimpleNamespace(get_cublas_handle=lambda: 77)
    cuda.cublas = types.SimpleNamespace(gemmEx=lambda *a: found.calls.append(("gemm", None, None, a)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(runtime, "Launcher", Launcher)
    yield found


def call(m: int, n: int, k: int, x_dtype: str, *, stream: int = 0x99, out: int = 0, bias: int = 0) -> None:
    given = dict(codes=0x1000, scale=0x2000, bias=bias, m=m, n=n, k=k, x_dtype=x_dtype, out=out, device=0)
    given |= {"panels": 1}
    cublas.product(stream, 0x10_0000, k + 3, 0x20_0000, n + 5, **given)


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("bias", [0, 0x3000])
def test_slices_cover_every_output_once(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, x_dtype: str, bias: int
) -> None:
    size = FLOATS[x_dtype].itemsize
    for m, n, k, slice_bytes, sums in (
        (1, 1, 1, 1 << 20, 1 << 20),
        (130, 100, 77, 32 * 128 * size, 1 << 20),
        (130, 100, 77, 1 << 20, 300),
        (33, 65, 64, 16 * 64 * size, 5 * 16),
        (7, 48, 130, 48 * 192 * size, 48),
        (3, 17, 4, 1 << 20, 1),
    ):
        monkeypatch.setattr(kernels, "SLICE_BYTES", slice_bytes)
        monkeypatch.setattr(cublas, "_SUMS", sums)
        recorder.calls.clear()
        recorder.peak = recorder.alive = 0
        call(m, n, k, x_dtype, out=2, bias=bias)
        assert recorder.streams[-1] == 0x99
        covered = np.zeros((m, n), int)
        wide = sums_at = None
        for entry, stream, launch, fields in recorder.calls:
            if entry == "gemm":
                (handle, transa, transb, count, some, depth, alpha, a, a_type, lda, b, b_type, ldb, beta, c, c_type,
                 ldc, compute, algo) = fields  # fmt: skip
                assert (handle, transa, transb, depth, algo) == (77, 1, 0, k, -1)
                assert a == wide and lda >= k and (a_type, b_type, c_type) == (*[cublas._CUDA_TYPES[x_dtype]] * 2, 0)
                assert compute == (69 if x_dtype == "float32" else 68)  # never TF32, never 16-bit sums
                assert ldb == k + 3 and ldc >= count
                first_token, rest = divmod(b - 0x10_0000, (k + 3) * size)
                assert rest == 0 and count * some <= max(sums, count)
                sums_at = c
                continue
            assert stream == 0x99
            named = dict(zip(("x", "codes", "scale", "bias", "y", "x_stride", "y_stride"), fields, strict=False))
            if entry == "epilogue":
                assert named["x"] == sums_at and (launch.grid[0], launch.block) == (some, 256)
                assert launch.grid[1] == -(-count // 256)
                first = (named["scale"] - 0x2000) // 4
                assert named["bias"] == (bias + 4 * first if bias else 0)
                token, channel = divmod((named["y"] - 0x20_0000) // 4, n + 5)
                assert (token, channel, named["y_stride"]) == (first_token, first, n + 5)
                covered[token : token + some, channel : channel + count] += 1
            else:
                assert entry == f"widen_{x_dtype}"
                wide = named["y"]
        assert (covered == 1).all(), (m, n, k)
        assert recorder.alive == 0  # nothing outlives the call
        assert recorder.peak <= slice_bytes + 4 * max(sums, 16 * -(-n // 16)) + 4096


def test_the_default_stream_is_cupys(recorder: Recorder) -> None:
    call(3, 4, 5, "bfloat16", stream=0)
    assert recorder.streams[-1] == 0


def test_slices_are_as_large_as_they_may_be() -> None:
    assert kernels.SLICE_BYTES == 32 << 20
    for x_dtype, k in itertools.product(FLOATS, (1, 16, 64, 100, 4096, 14_336, 1 << 19)):
        rows = kernels.slice_rows(x_dtype, k)
        row_bytes = -(-k // kernels.STEP) * kernels.STEP * FLOATS[x_dtype].itemsize
        assert rows % kernels.UNIT == 0
        assert rows * row_bytes <= 32 << 20 < (rows + kernels.UNIT) * row_bytes


# --- on the GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_small_slices(
    rng: np.random.Generator, poison: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, x_dtype: str
) -> None:
    """Slices of channels and of tokens, whole ones and rests, into every dtype."""
    import cupy

    size = FLOATS[x_dtype].itemsize
    with Cases() as cases:
        for m, n, k in ((1, 1, 1), (9, 33, 65), (21, 100, 64), (17, 48, 130)):
            padded = -(-k // kernels.STEP) * kernels.STEP
            q, x, bias = quantized(rng, n, k), floats(rng, (m, k), x_dtype), floats(rng, n)
            there = cupy.asarray(x)
            for channels, sums, out_dtype in ((32, 1 << 20, "bfloat16"), (16, 100, "float16"), (1024, 1, "float32")):
                with cases(m, n, k, channels, sums, out_dtype), monkeypatch.context() as patch:
                    patch.setattr(kernels, "SLICE_BYTES", channels * padded * size)
                    patch.setattr(cublas, "_SUMS", sums)
                    layer = on_gpu(q, bias, out_dtype=out_dtype)
                    out = poison((m, n), out_dtype, "cupy")
                    with forced(layer, "cublas"):
                        layer(there, out=out)
                    reference.assert_close(out, x, q.codes, q.scale, bias, out_dtype, acc_of("cublas", x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_real_slices(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """Weights of more than 32 MiB when they are widened, in three and more slices, the last one short."""
    import cupy

    with Cases() as cases:
        for m, n, k in ((MANY, 9001, 4097), (MANY + 1, 14_336, 4096), (MANY, 300_000, 40), (MANY, 7, 200_000)):
            rows = kernels.slice_rows(x_dtype, k)
            with cases(m, n, k, "slices", -(-n // rows)):
                q, x, bias = quantized(rng, n, k), floats(rng, (m, k), x_dtype), floats(rng, n)
                layer = on_gpu(q, bias)
                out = poison((m, n), x_dtype, "cupy")
                with forced(layer, "cublas"):
                    layer(cupy.asarray(x), out=out)
                assert_all_close({"cublas": out}, x, q, bias, x_dtype, x_dtype)


@pytest.mark.gpu
def test_more_sums_than_are_held_at_once(rng: np.random.Generator, poison: Callable[..., Any]) -> None:
    import cupy

    m, n, k = 40_000, 4000, 64
    assert m * n > cublas._SUMS
    q, x = quantized(rng, n, k), floats(rng, (m, k), "float16")
    out = poison((m, n), "float16", "cupy")
    layer = on_gpu(q)
    with forced(layer, "cublas"):
        layer(cupy.asarray(x), out=out)
    assert_all_close({"cublas": out}, x, q, None, "float16", "float16")


@pytest.mark.gpu
def test_sums_are_never_kept_in_16_bits(rng: np.random.Generator) -> None:
    """Sums beyond float16's range that come back, and sums whose low bits a 16-bit sum would lose."""
    import cupy

    m, n, k = MANY, 64, 512
    half = np.full((n, k // 2), 0x7E, np.uint8)  # 448
    q = tensor(np.concatenate([half, half | 0x80], 1), np.full((n, 1), 0.5, np.float32))
    x = np.full((m, k), 100, np.float32)
    x[:, 0] += np.arange(m) % 7  # the halves cancel but for this
    for x_dtype in ("float16", "bfloat16"):
        values = x.astype(FLOATS[x_dtype])
        layer = on_gpu(q, out_dtype="float32")
        with forced(layer, "cublas"):
            y = layer(cupy.asarray(values)).get()
        want = (values[:, :1].astype(np.float64) - values[:, 1:2].astype(np.float64)) * 448 * 0.5
        magnitude = 448 * 100 * k * 0.5
        assert np.isfinite(y).all()
        assert np.abs(y - want).max() <= acc_of("cublas", x_dtype) * magnitude
        noise = floats(rng, (m, k), x_dtype)
        dense = quantized(rng, n, k)
        layer = on_gpu(dense, out_dtype="float32")
        with forced(layer, "cublas"):
            y = layer(cupy.asarray(noise))
        reference.assert_close(y, noise, dense.codes, dense.scale, None, "float32", acc_of("cublas", x_dtype))


@pytest.mark.gpu
def test_tf32_is_never_used(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setenv("CUPY_TF32", "1")
    q, x = quantized(rng, 256, 1024), floats(rng, (MANY, 1024))
    layer = on_gpu(q)
    assert layer.kernels(MANY, "float32") == "cublas"
    y = layer(cupy.asarray(x))
    worst = reference.measured_acc(y, x, q.codes, q.scale, None, "float32")
    assert worst < 2.0**-18, f"2^{math.log2(worst):.1f}: TF32 rounds x to 2^-11"


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_a_capture_gets_another_row(rng: np.random.Generator, x_dtype: str) -> None:
    import cupy

    m, n, k = MANY, 129, 321  # of 320 a row that wants aligned x may take both
    q, bias, x = quantized(rng, n, k), floats(rng, n), floats(rng, (m, k), x_dtype)
    layer, there = on_gpu(q, bias), cupy.asarray(x)
    assert layer.kernels(m, x_dtype) == "cublas"
    other = kernels.pick(runtime.target(0), problem(m, n, k, x_dtype, captured=True)).name
    assert other != "cublas"
    eager, out, stream = layer(there), nans((m, n), x_dtype), cupy.cuda.Stream(non_blocking=True)
    synchronize()
    graph, _ = capture(stream, lambda: layer(there, out=out))
    assert bool((raw(out) == raw(nans((1, 1), x_dtype))[0, 0]).all())  # captured, not run
    with stream:
        graph.launch()
    stream.synchronize()
    assert_all_close({other: out, "cublas": eager}, x, q, bias, x_dtype, x_dtype)
    with forced(layer, other):
        assert_same_bits(layer(there), out)
    assert_same_bits(layer(there), eager)  # and after the capture cuBLAS serves as before


@pytest.mark.gpu
def test_nothing_outlives_the_call(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    sizes: list[int] = []
    alloc = cupy.cuda.alloc

    def noted(size: int) -> Any:
        sizes.append(size)
        return alloc(size)

    pool = cupy.get_default_memory_pool()
    for x_dtype in FLOATS:
        q, x = quantized(rng, 9001, 4096), cupy.asarray(floats(rng, (MANY, 4096), x_dtype))
        layer, out = on_gpu(q), nans((MANY, 9001), x_dtype)
        with forced(layer, "cublas"):
            layer(x, out=out)
            synchronize()
            gc.collect()  # of what other tests have left
            before = pool.used_bytes()
            with monkeypatch.context() as patch:
                patch.setattr(cupy.cuda, "alloc", noted)
                layer(x, out=out)
            assert pool.used_bytes() == before
    wide, sums = sizes[::2], sizes[1::2]
    assert len(wide) == len(FLOATS)
    assert max(wide) <= 32 << 20 and max(sums) <= 4 * cublas._SUMS


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_stream_of_x_is_used(rng: np.random.Generator, x_dtype: str) -> None:
    """Late inputs and early overwriting on a side stream, through several slices."""
    import cupy

    q, x = quantized(rng, 9001, 2048), floats(rng, (MANY, 2048), x_dtype)
    layer, source, late = on_gpu(q), cupy.asarray(x), nans((MANY, 2048), x_dtype)
    with forced(layer, "cublas"):
        want = layer(source).get()
        raw(late)[...] = raw(source)
        keep_busy(1)
        stream = cupy.cuda.Stream(non_blocking=True)
        synchronize()
        with stream:
            late.view("uint8").fill(0xFF)
            keep_busy()
            raw(late)[...] = raw(source)
            y = layer(late)
            late.view("uint8").fill(0xFF)
            got = y.get()
    assert_same_bits(got, want)


@pytest.mark.gpu
def test_torch_streams_through_the_fallback(rng: np.random.Generator) -> None:
    from test_interop import gpu_torch

    torch = gpu_torch()
    q = quantized(rng, 9001, 2048)
    layer, side = on_gpu(q), torch.cuda.Stream()
    x = torch.randn(MANY, 2048, device="cuda", dtype=torch.bfloat16)
    with forced(layer, "cublas"):
        want = layer(x).cpu()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            late = torch.full_like(x, math.nan)
            busy = torch.ones(1 << 25, device="cuda")
            for _ in range(80):
                busy.mul_(1.0)
            late.copy_(x)
            y = layer(late)
            late.fill_(math.nan)
            side.synchronize()
            assert_same_bits(y, want)


@pytest.mark.gpu
def test_many_shapes_share_one_layer(rng: np.random.Generator) -> None:
    """Numbers of tokens on both sides of the fallback's threshold, in turn."""
    import cupy

    edges = [least + step for least in kernels.CUBLAS_MIN_M.values() for step in (-1, 0, 1)]
    with Cases() as cases:
        for k in (320, 321):  # of aligned x another row may take all numbers of tokens
            q = quantized(rng, 500, k)
            layer = on_gpu(q)
            for turn, m, x_dtype in itertools.product(range(2), (*edges, 1, MANY, 8), FLOATS):
                x = floats(rng, (m, k), x_dtype)
                with cases(turn, m, k, x_dtype):
                    name = layer.kernels(m, x_dtype)
                    assert_all_close({name: layer(cupy.asarray(x))}, x, q, None, x_dtype, x_dtype)
            assert layer.kernels(MANY, "float32") == "cublas"
        assert layer.kernels(MANY, "bfloat16") == layer.kernels(MANY, "float16") == "cublas"


@pytest.mark.gpu
def test_a_row_too_long_for_a_slice(rng: np.random.Generator) -> None:
    """Where not even sixteen widened channels fit 32 MiB, another row serves."""
    import cupy

    k = 600_000
    assert kernels.slice_rows("float32", k) == 0
    q = quantized(rng, 3, k, -13, -12)
    layer = cufp8.Linear.from_quantized(q, device="cuda")
    x = floats(rng, (MANY, k), "float32")
    assert layer.kernels(MANY, "float32") != "cublas"
    y = layer(cupy.asarray(x))
    rows = np.array([0, 1, 64, MANY - 1])
    got = y[cupy.asarray(rows)].get()
    reference.assert_close(got, x[rows], q.codes, q.scale, None, "float32", acc_of("gemv", "float32"))
