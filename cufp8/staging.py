"""From host memory, or the file that is mapped there, to a GPU through pinned buffers that several threads fill."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from cufp8 import runtime

# GB/s of finished layers on an H200 by threads x MiB of a slice, ahead: 8 x 8, 10 27.7; 8 x 4, 16 26.5; 12 x 8, 7 24.5;
# 12 x 4, 24 23.6, none 12.7; 16 x 4, 16 21.5.
THREADS = 8  # at most
SLICE_BYTES = 8 << 20  # of a buffer: each slice costs Python some 20 us, in which the other threads get no further
AHEAD = 10  # slices: more than a layer's codes, so that the bus finds buffers full when the next array comes
SLICES_EACH = 4  # of a thread, if the slices are not too short then: the bus waits until the first are full
LEAST_SLICE = 512 << 10
LEAST_BYTES = 1 << 20  # of an array: below this the threads would cost more time than they save
_PINNED = 1  # cudaMemoryType


class _Buffer(NamedTuple):
    bytes: np.ndarray
    address: int
    sent: int  # the event of the last copy out of it


class _Copy:
    """An array on its way: how many slices are to come, and the first error."""

    def __init__(self) -> None:
        self.left = 0
        self.error: Exception | None = None
        self.ended: SimpleQueue[None] = SimpleQueue()


class _Slice:
    """Bytes `start` to `stop` of a source, which a thread reads into a buffer.

    read: fills an array with the source from a byte on; None as soon as it has. wanted: what is to be sent then: first,
    last, address on the GPU, copy. buffer: where the bytes are, while they are kept for the next array.
    """

    def __init__(self, read: Callable[..., None], start: int, stop: int) -> None:
        self.read: Callable[..., None] | None = read
        self.start, self.stop = start, stop
        self.wanted: list[tuple[int, int, int, _Copy]] = []
        self.buffer: _Buffer | None = None


class Staging:
    """Threads that fill pinned buffers, and send each on to a GPU.

    Whichever thread is free takes the next slice, and the buffer whose copy is oldest, so that no thread waits for
    another. Several arrays may be on their way at once. What lies in the map of a checkpoint's file is read from the
    file: each page of a new map would cost a fault, and those wait for each other. Who takes the arrays of a file in
    their order finds what comes next in the buffers: it is read ahead, while the GPU packs the array before.

    Parameters
    ----------
    device : int
        The GPU's index.
    threads : int, optional
        THREADS, or one for each core that this process may use where these are fewer.
    slice_bytes : int
        Of a buffer; there are 2 * threads + ahead.
    ahead : int
        Slices that are read ahead.
    """

    def __init__(
        self, device: int, threads: int | None = None, slice_bytes: int = SLICE_BYTES, ahead: int = AHEAD
    ) -> None:
        import cupy

        if threads is None:
            threads = min(THREADS, len(os.sched_getaffinity(0)))
        self.device, self.threads, self.slice_bytes, self.ahead = device, threads, slice_bytes, ahead
        count = 2 * threads + ahead
        self.nbytes = count * slice_bytes
        self._queue_copy, self._record, self._query = runtime.copying()
        self._wait = cupy.cuda.runtime.eventSynchronize
        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            # Kept here: when the threads have ended, copies out of it may still be under way.
            self._pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(self.nbytes), np.uint8, self.nbytes)
            self._events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(count)]
        self._free: SimpleQueue[_Buffer] = SimpleQueue()
        for part, event in zip(self._pinned.reshape(-1, slice_bytes), self._events, strict=True):
            self._free.put(_Buffer(part, part.ctypes.data, event.ptr))
        self._slices: SimpleQueue[_Slice | None] = SimpleQueue()  # what a thread is to do next; None: to end
        self._lock = threading.Lock()  # of what is wanted, left, and read ahead
        self._file: Callable[[], Any] = lambda: None  # a weak reference to the file of the last array
        self._end = 0  # of that array in it
        self._next: list[_Slice] = []  # what is read ahead, in order and without gaps
        self._workers = [threading.Thread(target=self._work, name="cufp8-staging", daemon=True) for _ in range(threads)]
        for worker in self._workers:
            worker.start()

    def copy(self, a: np.ndarray) -> Any:
        """A contiguous host array as a CuPy array on the GPU, ordered on CuPy's current stream; `a` has been read.

        Raises
        ------
        CheckpointError
            If `a` lies in the map of a checkpoint's file that ends before it by now, or that cannot be read.
        cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError, DeviceError
            As CuPy and the driver do. Whatever is raised, nothing is on its way then, and no array is left.
        """
        import cupy

        source = a.reshape(-1).view(np.uint8)
        with cupy.cuda.Device(self.device):
            out, current = cupy.empty(a.shape, a.dtype), cupy.cuda.get_current_stream()
            # Kernels that are queued already may still use that memory for what lay there before.
            self._stream.wait_event(current.record())
            copy = _Copy()
            waiting = self._begin(source, out.data.ptr, copy)
            try:
                if waiting:
                    copy.ended.get()
                    waiting = False
            finally:  # after an interrupt too: the threads write into memory that is about to be given back
                if waiting:
                    copy.ended.get()
                current.wait_event(self._stream.record())
            if copy.error is not None:
                self._stream.synchronize()
                raise copy.error
        return out

    def _begin(self, source: np.ndarray, destination: int, copy: _Copy) -> bool:
        """Send what is in buffers already and have the rest read, and what follows; whether any is to come."""
        file, start = _place(source)
        read = partial(_read_memory, source) if file is None else file.read_into
        at, stop = start, start + source.size
        new: list[_Slice] = []
        with self._lock:
            same = file is not None and file is self._file()
            ordered = same and 0 <= start - self._end < LEAST_BYTES
            if same and self._next and self._next[0].start <= start < self._next[-1].stop:
                ordered = True
                for s in self._next:
                    if s.stop > start and at < stop:
                        last = min(s.stop, stop)
                        self._want(s, at, last, destination + at - start, copy)
                        at = last
                used = sum(s.stop <= stop for s in self._next)
                self._keep(self._next[used:], self._next[:used])
            elif file is not None and (ordered or not same):
                self._keep([], self._next)
            step = min(self.slice_bytes, -(-(stop - at) // (SLICES_EACH * self.threads * LEAST_SLICE)) * LEAST_SLICE)
            for first in range(at, stop, step or 1):
                new.append(_Slice(read, first, min(first + step, stop)))
                self._want(new[-1], first, new[-1].stop, destination + first - start, copy)
            if file is not None:
                self._file, self._end = weakref.ref(file), stop
            if ordered:
                begin = self._next[-1].stop if self._next else stop
                for first in range(begin, len(file), self.slice_bytes)[: self.ahead - len(self._next)]:
                    new.append(_Slice(read, first, min(first + self.slice_bytes, len(file))))
                    self._next.append(new[-1])
            for s in new:
                self._slices.put(s)
            return copy.left > 0

    def _want(self, s: _Slice, first: int, last: int, destination: int, copy: _Copy) -> None:
        """Send bytes of a slice now, or when they have been read."""
        if s.buffer is None:
            s.wanted.append((first, last, destination, copy))
            copy.left += 1
        else:
            self._send(s.buffer, first - s.start, last - first, destination, copy)

    def _keep(self, kept: list[_Slice], dropped: list[_Slice]) -> None:
        """Give back the buffers of some of what was read ahead; one that is being filled goes back then."""
        for s in dropped:
            if s.buffer is not None:
                self._free.put(s.buffer)
        self._next = kept

    def _send(self, buffer: _Buffer, offset: int, nbytes: int, destination: int, copy: _Copy) -> None:
        try:
            self._queue_copy(destination, buffer.address + offset, nbytes, self._stream.ptr)
            self._record(buffer.sent, self._stream.ptr)
        except Exception as error:
            copy.error = copy.error or error

    def _work(self) -> None:
        import cupy

        cupy.cuda.runtime.setDevice(self.device)
        while self._fill():
            pass

    def _fill(self) -> bool:
        """Wait for a slice that is to be read, read it and send it. Nothing of it is held when this returns."""
        s = self._slices.get()
        if s is None:
            return False
        if s not in self._next and not s.wanted:  # in this order: it is dropped after it was wanted
            return True
        buffer, error = self._free.get(), None
        try:
            if not self._query(buffer.sent):
                self._wait(buffer.sent)  # what it held before has left it
            s.read(buffer.bytes[: s.stop - s.start], s.start)
        except Exception as e:
            error = e
        with self._lock:
            s.read = None
            for first, last, destination, copy in s.wanted:
                if error is None:
                    self._send(buffer, first - s.start, last - first, destination, copy)
                else:
                    copy.error = copy.error or error
                copy.left -= 1
                if not copy.left:
                    copy.ended.put(None)
            s.wanted.clear()
            if s in self._next and error is None:
                s.buffer = buffer
            else:
                self._free.put(buffer)
                if s in self._next:  # without gaps
                    i = self._next.index(s)
                    self._keep(self._next[:i], self._next[i:])
        return True

    def close(self) -> None:
        """Let the threads and the buffers go, once the copies that have begun are done."""
        for _ in self._workers:
            self._slices.put(None)
        for worker in self._workers:
            worker.join()
        self._stream.synchronize()


def _place(source: np.ndarray) -> tuple[Any, int]:
    """The `Map` that an array lies in, and where; or None, and 0."""
    base: Any = source
    while isinstance(base, np.ndarray):
        base = base.base  # the array's own owner, so that nothing else can lie at its address by now
    if isinstance(base, memoryview):
        base = base.obj
    if not hasattr(base, "read_into"):
        return None, 0
    return base, source.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data


def _read_memory(source: np.ndarray, buffer: np.ndarray, start: int) -> None:
    buffer[:] = source[start : start + buffer.size]


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
