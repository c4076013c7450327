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
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDS = 11
LEAST_ROUNDS = 5
GROUP_SECONDS = 1.0  # after so long a group that has LEAST_ROUNDS gets no more
GRAPH_SECONDS = 1.5e-3  # what one replay should last: its start and end cost about 5 us
EAGER_CALLS = 4  # of many launches each, all of which must fit the driver's queue
HOLD_SECONDS = 5e-4  # in which the host queues the two calls that tell how long one lasts
COLD_BYTES = 300_000_000  # of weight copies, and 4 * L2 where that is more


@dataclass
class Contender:
    """One way to compute the problem.

    Attributes
    ----------
    call : callable
        ``call(i)`` queues one call, the i-th of a sequence, on a copy of the weight that has rested for
        longest and on ``x[i % 2]``; returns y, or None where it writes into ``buffers[i % 2]``.
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


def calls_for(seconds: float) -> int:
    """An even number of calls of so many seconds each that last GRAPH_SECONDS or more."""
    return 2 * math.ceil(GRAPH_SECONDS / max(seconds, 1e-6) / 2)


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

    def release(self) -> None:
        """Give memory that nothing uses back to the driver: torch and CuPy keep it, each for itself."""
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        self.torch.cuda.empty_cache()


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

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()


def numpy_dtype(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


class _Prepared:
    """A contender with its sequence of calls ready to be queued."""

    def __init__(self, queue: Any, contender: Contender, hold: Callable[[float], None]) -> None:
        self.contender = contender
        self.calls = EAGER_CALLS
        self.host_seconds = 0.0
        self._last: list[Any] = [None, None]
        self._position = 0
        self._replay = None
        self._first()
        if contender.captured:
            hold(HOLD_SECONDS)
            start = queue.event()
            self._first()
            end = queue.event()
            queue.wait()
            self.calls = calls_for(queue.seconds(start, end) / 2)
            self._replay = queue.capture(self._run, self._first)
        self.queue()  # a graph's first launch also uploads it
        queue.wait()

    @property
    def results(self) -> list[Any]:
        """y of x[0] and y of x[1], as the last sequence left them."""
        return self.contender.buffers or self._last

    def _first(self) -> None:
        """Two calls outside of any capture: the first ones compile, tune and allocate, some on each stream."""
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
    error: Callable[[Contender, list[Any]], float],
    hold: Callable[[float], None],
    rounds: int = ROUNDS,
) -> dict[str, Measured | Exception]:
    """Measure all contenders of one problem against each other.

    Parameters
    ----------
    queue : TorchQueue or CupyQueue
    contenders : sequence of Contender
    error : callable
        ``error(contender, [y of x[0], y of x[1]])`` -> relative L2 error.
    hold : callable
        ``hold(seconds)`` queues reads of a large buffer that last so long, at least one.
    rounds : int
        Measured rounds; one more warms up. After GROUP_SECONDS LEAST_ROUNDS are enough.

    Returns
    -------
    dict
        Contender name -> Measured, or the exception that kept it from running.
    """
    ready: list[tuple[_Prepared, Measured]] = []
    done: dict[str, Measured | Exception] = {}
    for contender in contenders:
        try:
            one = _Prepared(queue, contender, hold)
            for y in one.results:
                poison(y)
            queue.wait()  # the arrays may be filled on another stream
            one.queue()
            queue.wait()
            note = {"x_dtype": contender.x_dtype, **contender.note}
            result = Measured([], error(contender, one.results), contender.kernel, note)
        except Exception as wrong:  # a rival that fails must not take the group with it
            done[contender.name] = without_arrays(wrong)
            continue
        done[contender.name] = result
        ready.append((one, result))

    collecting = gc.isenabled()
    gc.disable()
    try:
        started = time.perf_counter()
        for turn in range(rounds + 1):
            if turn > LEAST_ROUNDS and time.perf_counter() - started > GROUP_SECONDS:
                break
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


def without_arrays(wrong: Exception) -> Exception:
    """The exception without the variables of the functions that it came through: they hold memory of the GPU."""
    at = wrong.__traceback__
    traceback.clear_frames(at)
    return wrong.with_traceback(at and at.tb_next)  # the first one is still running and cannot be cleared


def poison(y: Any) -> None:
    """Fill an output with NaN, or with the code of NaN."""
    if y.dtype == np.uint8:
        y.fill(0x7F)
    elif hasattr(y, "fill_"):
        y.fill_(math.nan)
    else:
        y.fill(math.nan)


def relative_l2(y: Any, exact: Any) -> float:
    """||y - exact|| / ||exact|| of CuPy arrays, in float64; NaN if y has one."""
    import cupy

    return float(cupy.linalg.norm(y.astype(np.float64) - exact) / cupy.linalg.norm(exact))


PIECE = 1_048_573  # a prime, so that no two rows of a matrix are alike


def normal(shape: tuple[int, int], *seed: int) -> Any:
    """A CuPy float32 array of normal values: PIECE of them, drawn on the host, again and again.

    To draw them all there would take seconds, and CuPy's own generators cuRAND, which cufp8 does not ask for.
    """
    import cupy

    rng = np.random.Generator(np.random.SFC64(seed))
    return cupy.resize(cupy.asarray(rng.standard_normal(PIECE, dtype=np.float32)), shape)
