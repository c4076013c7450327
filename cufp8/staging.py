"""From host memory, or the file that is mapped there, to a GPU through pinned buffers that several threads fill."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

THREADS = 8  # at most; on an H200 machine four read 20 GB/s from files, eight 27, and its bus takes 55
SLICE_BYTES = 4 << 20  # of a buffer: each slice costs Python some 10 us, in which the other threads get no further
SLICES_EACH = 4  # of a thread, if the slices are not too short then: the bus waits until the first are full
LEAST_SLICE = 512 << 10
LEAST_BYTES = 1 << 20  # of an array: below this the threads would cost more time than they save
_HOST_TO_DEVICE, _PINNED = 1, 1  # cudaMemcpyKind, cudaMemoryType


class Staging:
    """Threads that fill pinned buffers, and send each on to a GPU.

    A thread has two buffers: it fills one while the other crosses the bus. Whichever thread is free takes the next
    slice of an array, so that no thread waits for another. Several arrays may be on their way at once. What lies in the
    map of a checkpoint's file is read from the file: each page of a new map would cost a fault, and those wait for each
    other.

    Parameters
    ----------
    device : int
        The GPU's index.
    threads : int, optional
        THREADS, or one for each core that this process may use where these are fewer.
    slice_bytes : int
        Of a buffer; there are 2 * threads.
    """

    def __init__(self, device: int, threads: int | None = None, slice_bytes: int = SLICE_BYTES) -> None:
        import cupy

        if threads is None:
            threads = min(THREADS, len(os.sched_getaffinity(0)))
        self.device, self.threads, self.slice_bytes = device, threads, slice_bytes
        self.nbytes = 2 * threads * slice_bytes
        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            # Kept here: when the threads have ended, copies out of it may still be under way.
            self._pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(self.nbytes), np.uint8, self.nbytes)
            self._events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(2 * threads)]
        # Each with its address and the event of its last copy.
        parts = self._pinned.reshape(-1, slice_bytes)
        buffers = [(b, b.ctypes.data, e.ptr) for b, e in zip(parts, self._events, strict=True)]
        self._parts: SimpleQueue[Any] = SimpleQueue()  # what a thread is to do next; None: to end
        self._workers = [
            threading.Thread(target=self._work, args=(buffers[i : i + 2],), name="cufp8-staging", daemon=True)
            for i in range(0, len(buffers), 2)
        ]
        for worker in self._workers:
            worker.start()

    def copy(self, a: np.ndarray) -> Any:
        """A contiguous host array as a CuPy array on the GPU, ordered on CuPy's current stream; `a` has been read.

        Raises
        ------
        CheckpointError
            If `a` lies in the map of a checkpoint's file that ends before it by now, or that cannot be read.
        cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError
            As CuPy does. Whatever is raised, nothing is on its way then, and no array is left.
        """
        import cupy

        source = a.reshape(-1).view(np.uint8)
        size = source.size
        step = min(self.slice_bytes, -(-size // (SLICES_EACH * self.threads * LEAST_SLICE)) * LEAST_SLICE)
        slices = [(start, min(start + step, size)) for start in range(0, size, step)]
        count = min(self.threads, len(slices))
        with cupy.cuda.Device(self.device):
            out, current = cupy.empty(a.shape, a.dtype), cupy.cuda.get_current_stream()
            # Kernels that are queued already may still use that memory for what lay there before.
            self._stream.wait_event(current.record())
            ended: SimpleQueue[Exception | None] = SimpleQueue()
            errors: list[Exception | None] = []
            part = iter(slices), _reader(source), out.data.ptr, ended  # each slice goes to one thread
            for _ in range(count):
                self._parts.put(part)
            try:
                while len(errors) < count:
                    errors.append(ended.get())
            finally:  # after an interrupt too: the threads write into memory that is about to be given back
                while len(errors) < count:
                    errors.append(ended.get())
                current.wait_event(self._stream.record())
            for error in filter(None, errors):
                self._stream.synchronize()
                raise error
        return out

    def _work(self, pair: list[Any]) -> None:
        while self._take_part(pair):
            pass

    def _take_part(self, pair: list[Any]) -> bool:
        """Wait for an array that is to be copied, and send slices of it. Nothing of it is held when this returns."""
        import cupy

        part = self._parts.get()
        if part is None:
            return False
        *what, ended = part
        try:
            with cupy.cuda.Device(self.device):
                self._send(pair, *what)
        except Exception as error:
            ended.put(error)
        else:
            ended.put(None)
        return True

    def _send(
        self, pair: list[Any], slices: Iterator[tuple[int, int]], read: Callable[..., None], destination: int
    ) -> None:
        """Slices to an address on the GPU, one after another, until there are no more."""
        from cupy.cuda import runtime

        wait, copy, record, stream = (
            runtime.eventSynchronize,
            runtime.memcpyAsync,
            runtime.eventRecord,
            self._stream.ptr,
        )
        for start, stop in slices:
            pair.reverse()
            buffer, address, sent = pair[0]
            wait(sent)  # what the buffer held before has left it
            read(buffer[: stop - start], start)
            copy(destination + start, address, stop - start, _HOST_TO_DEVICE, stream)
            record(sent, stream)

    def close(self) -> None:
        """Let the threads and the buffers go, once the copies that have begun are done."""
        for _ in self._workers:
            self._parts.put(None)
        for worker in self._workers:
            worker.join()
        self._stream.synchronize()


def _reader(source: np.ndarray) -> Callable[[np.ndarray, int], None]:
    """What fills a buffer with the bytes of an array from some byte on, without the GIL."""
    base: Any = source
    while isinstance(base, np.ndarray):
        base = base.base  # the array's own owner, so that nothing else can lie at its address by now
    if isinstance(base, memoryview):
        base = base.obj
    if not hasattr(base, "read_into"):
        return partial(_read_memory, source)
    return partial(_read_file, base.read_into, source.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data)


def _read_memory(source: np.ndarray, buffer: np.ndarray, start: int) -> None:
    buffer[:] = source[start : start + buffer.size]


def _read_file(read_into: Callable[..., None], offset: int, buffer: np.ndarray, start: int) -> None:
    read_into(buffer, offset + start)


_made: dict[int, Staging] = {}  # GPU -> its own
_making = threading.Lock()


def to_gpu(a: Any) -> Any:
    """An array on the current GPU, as CuPy has it; from host memory that is not pinned through a `Staging`.

    Parameters
    ----------
    a : array
        NumPy or CuPy, of a dtype that CuPy knows. One on the GPU is returned as it is.

    Returns
    -------
    cupy.ndarray
        Ordered on CuPy's current stream; `a` may be written again.

    Raises
    ------
    CheckpointError
        As `Staging.copy`.
    """
    import cupy

    if not isinstance(a, np.ndarray) or a.nbytes < LEAST_BYTES or not a.flags.c_contiguous:
        return cupy.asarray(a)
    runtime = cupy.cuda.runtime
    if runtime.pointerGetAttributes(a.ctypes.data).type == _PINNED:
        out = cupy.empty(a.shape, a.dtype)
        out.set(a)
        cupy.cuda.get_current_stream().synchronize()
        return out
    device = runtime.getDevice()
    with _making:
        staging = _made.get(device)
        if staging is None:
            staging = _made[device] = Staging(device)
    return staging.copy(a)


def release() -> None:
    """Give all pinned buffers back to CuPy's pool; the next copy makes them again. None may be under way."""
    with _making:
        while _made:
            _made.popitem()[1].close()
