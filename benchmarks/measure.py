"""Measure a group of contenders for one problem: cold weights, captured graphs, interleaved rounds, CUDA events.

A contender is a function that queues many calls, which cycle over copies of the weight that together are
larger than L2 several times over. Where it can be captured it becomes a CUDA graph, so that the host's speed
is not in the figure. Each round queues every contender once (ABAB), each behind a read of a large buffer:
that empties L2 of what another contender left there, and keeps the GPU busy until all of the round is queued.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS = 11
GRAPH_SECONDS = 1.5e-3  # what one replay should last at least: its start and end cost about 5 us
MIN_CALLS = 24
EAGER_CALLS = 4  # of many launches each, all of which must fit the driver's queue
COLD_BYTES = 300_000_000  # of weight copies, and 4 * L2 where that is more


@dataclass
class Contender:
    """One way to compute the problem.

    Attributes
    ----------
    call : callable
        ``call(i)`` queues one call, the i-th of a sequence, on copy ``i % copies`` of the weight and
        on ``x[i % 2]``; returns y, or None where it writes into ``buffers[i % 2]``.
    copies : int
        Copies of the weight that `call` cycles over: an even number.
    buffers : list
        Preallocated outputs, or empty.
    finish : callable, optional
        What is left to do to y outside the timing before it can be compared.
    kernel : str, optional
        The row of KERNELS that serves; None for a rival.
    captured : bool
        False for calls that a stream capture refuses: their sequence is queued call by call.
    x_dtype : str
        "bfloat16" or "float16".
    note : dict
        More for the row's note.
    """

    name: str
    call: Callable[[int], Any]
    copies: int
    buffers: list[Any] = field(default_factory=list)
    finish: Callable[[Any], Any] | None = None
    kernel: str | None = None
    captured: bool = True
    x_dtype: str = "bfloat16"
    note: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """What a contender did: seconds a call in each round, relative L2 error, and what its row tells besides."""

    seconds: list[float]
    error: float | None = None
    kernel: str | None = None
    note: dict[str, Any] = field(default_factory=dict)

    @property
    def time_us(self) -> float:
        return statistics.median(self.seconds) * 1e6


def copies_for(nbytes: int, l2_bytes: int) -> int:
    """An even number of copies of a weight of `nbytes`, larger together than L2 several times over."""
    return max(2, 2 * math.ceil(max(COLD_BYTES, 4 * l2_bytes) / nbytes / 2))


def calls_for(nbytes: int, copies: int) -> int:
    """A multiple of `copies` (so an even number) that lasts about GRAPH_SECONDS or more, at 4 TB/s."""
    enough = max(MIN_CALLS, GRAPH_SECONDS / (nbytes / 4e12 + 2e-6))
    return copies * math.ceil(enough / copies)


class TorchQueue:
    """Captures, events and arrays by torch, on its current stream."""

    library = "torch"

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._aside = torch.cuda.Stream()  # captures refuse the default stream

    def array(self, values: Any, dtype: str) -> Any:
        """A CuPy float32 array -> a torch tensor of `dtype`."""
        return self.torch.from_dlpack(values).to(getattr(self.torch, dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device="cuda")

    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream

    def capture(self, run: Callable[[], None], first: Callable[[], None] = lambda: None) -> Callable[[], None]:
        """A graph of what `run` queues; `first` is run before, on the same stream, to get its workspaces made."""
        graph = self.torch.cuda.CUDAGraph()
        self.wait()
        # torch.cuda.graph() would do the same, and collect garbage and empty the allocator each time.
        with self.torch.cuda.stream(self._aside):
            first()
            self.wait()
            graph.capture_begin()
            try:
                run()
            finally:
                graph.capture_end()
        return graph.replay

    def event(self) -> Any:
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) * 1e-3

    def wait(self) -> None:
        self.torch.cuda.synchronize()


class CupyQueue:
    """The same by CuPy alone, for a machine without torch."""

    library = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()

    def array(self, values: Any, dtype: str) -> Any:
        return values.astype(numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.cupy.empty(shape, numpy_dtype(dtype))

    def stream(self) -> int:
        return self._stream.ptr

    def capture(self, run: Callable[[], None], first: Callable[[], None] = lambda: None) -> Callable[[], None]:
        first()
        self.wait()
        self._stream.begin_capture()
        try:
            run()
        finally:
            graph = self._stream.end_capture()
        return lambda: graph.launch(self._stream)

    def event(self) -> Any:
        event = self.cupy.cuda.Event()
        event.record(self._stream)
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return self.cupy.cuda.get_elapsed_time(start, end) * 1e-3

    def wait(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


def numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class _Prepared:
    """A contender with its sequence of calls ready to be queued."""

    def __init__(self, queue: Any, contender: Contender, calls: int) -> None:
        self.contender = contender
        self.calls = calls
        self.host_seconds = 0.0
        self._last: list[Any] = [None, None]
        self._position = 0
        self._replay = None
        if contender.captured:
            self._replay = queue.capture(self._run, self._first)
        else:
            self._first()
        self.queue()  # a graph's first launch also uploads it
        queue.wait()

    @property
    def results(self) -> list[Any]:
        """y of x[0] and y of x[1], as the last sequence left them."""
        return self.contender.buffers or self._last

    def _first(self) -> None:
        """Compiles, tunes and allocates, outside of any capture."""
        for i in range(2):
            self.contender.call(i)

    def _run(self) -> None:
        for i in range(self._position, self._position + self.calls):
            self._last[i % 2] = self.contender.call(i)

    def queue(self) -> None:
        if self._replay is not None:
            self._replay()
            return
        start = time.perf_counter()
        self._run()
        self._position += self.calls  # the next sequence goes on with the copies that rested longest
        self.host_seconds = time.perf_counter() - start


def measure(
    queue: Any,
    contenders: Sequence[Contender],
    nbytes: int,
    error: Callable[[Contender, list[Any]], float],
    hold: Callable[[float], None],
    rounds: int = ROUNDS,
) -> dict[str, Measured | Exception]:
    """Measure all contenders of one problem against each other.

    Parameters
    ----------
    queue : TorchQueue or CupyQueue
    contenders : sequence of Contender
    nbytes : int
        Bytes of one copy of the FP8 weight: how many calls make a sequence follows from it.
    error : callable
        ``error(contender, [y of x[0], y of x[1]])`` -> relative L2 error.
    hold : callable
        ``hold(seconds)`` queues reads of a large buffer that last so long, at least one.
    rounds : int
        Measured rounds; one more warms up.

    Returns
    -------
    dict
        Contender name -> Measured, or the exception that kept it from running.
    """
    ready: list[tuple[_Prepared, Measured]] = []
    done: dict[str, Measured | Exception] = {}
    for contender in contenders:
        calls = calls_for(nbytes, contender.copies) if contender.captured else EAGER_CALLS
        try:
            one = _Prepared(queue, contender, calls)
            for y in one.results:
                poison(y)
            queue.wait()  # the arrays may be filled on another stream
            one.queue()
            queue.wait()
            note = {"x_dtype": contender.x_dtype, **contender.note}
            result = Measured([], error(contender, one.results), contender.kernel, note)
        except Exception as wrong:  # a rival that fails must not take the group with it
            done[contender.name] = wrong
            continue
        done[contender.name] = result
        ready.append((one, result))

    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            marks = []
            for one, _ in ready:
                hold(2 * one.host_seconds)
                start = queue.event()
                one.queue()
                marks.append((start, queue.event()))
            queue.wait()
            if turn:
                for (one, result), (start, end) in zip(ready, marks, strict=True):
                    result.seconds.append(queue.seconds(start, end) / one.calls)
    finally:
        if collecting:
            gc.enable()
    return done


def poison(y: Any) -> None:
    """Fill an output with NaN, or with the code of NaN."""
    if y.dtype == np.uint8:
        y.fill(0x7F)
    elif hasattr(y, "fill_"):
        y.fill_(math.nan)
    else:
        y.fill(math.nan)


class Weights:
    """A random weight [n, k], its FP8A16 codes, and copies of it in any form that a contender wants."""

    def __init__(self, n: int, k: int, l2_bytes: int) -> None:
        import cupy

        import cufp8

        self.n, self.k, self.l2_bytes = n, k, l2_bytes
        rng = np.random.Generator(np.random.SFC64([n, k]))
        w = cupy.asarray(rng.standard_normal((n, k), dtype=np.float32))
        w *= np.float32(0.02)
        self.quantized = cufp8.quantize(w)
        self.nbytes = self.quantized.nbytes
        self.copies = copies_for(self.nbytes, l2_bytes)
        self._kept: dict[Any, Any] = {}

    def kept(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made once for this weight: contenders of every M share their copies."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def fresh(self) -> Any:
        """A QuantizedTensor of the same codes and scales in memory of its own."""
        q = self.quantized
        return type(q)(
            q.codes.copy(),
            q.scale.copy(),
            dtype=q.dtype,
            scale_dtype=q.scale_dtype,
            shape=q.shape,
            block=q.block,
        )

    def layers(self, pdl: bool) -> list[Any]:
        """`copies` layers, each with a weight at an address of its own."""
        import cufp8

        def make() -> list[Any]:
            made = [cufp8.Linear.from_quantized(self.fresh(), pdl=pdl) for _ in range(self.copies)]
            starts = {layer._codes.data.ptr for layer in made}
            assert len(starts) == self.copies, "the layers share one weight: it would not be cold"
            return made

        return self.kept(("layers", pdl), make)

    def dequantized(self, rows: slice, dtype: Any) -> Any:
        """Rows of the weight that codes and scales stand for, by a table of the 256 codes, computed in float64."""
        import cupy
        import ml_dtypes

        codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        table = self.kept("table", lambda: cupy.asarray(codes))
        q = self.quantized
        exact = table[q.codes[rows, : self.k]] * q.scale[rows].astype(np.float64)
        return exact.astype(dtype)

    def torch_copies(self, dtype: str) -> list[Any]:
        """Torch tensors [n, k] of the dequantised weight, rounded to `dtype`."""
        import torch

        def make() -> list[Any]:
            kind = getattr(torch, dtype)
            first = torch.empty((self.n, self.k), dtype=kind, device="cuda")
            for at in range(0, self.n, 2048):
                rows = slice(at, min(at + 2048, self.n))
                first[rows] = torch.from_dlpack(self.dequantized(rows, np.float64)).to(kind)
            more = copies_for(first.nbytes, self.l2_bytes) - 1
            return [first, *(first.clone() for _ in range(more))]

        return self.kept(("torch", dtype), make)

    def reference(self, x: Any) -> Any:
        """x @ w.T in float64, [rows of x, n], on the GPU, with a temporary of 2048 channels at a time."""
        import cupy

        wide = x.astype(np.float64)
        y = cupy.empty((len(x), self.n), np.float64)
        for at in range(0, self.n, 2048):
            rows = slice(at, min(at + 2048, self.n))
            y[:, rows] = wide @ self.dequantized(rows, np.float64).T
        return y


def relative_l2(y: Any, exact: Any) -> float:
    """||y - exact|| / ||exact|| in float64; NaN if y has one."""
    import cupy

    return float(cupy.linalg.norm(y.astype(np.float64) - exact) / cupy.linalg.norm(exact))
