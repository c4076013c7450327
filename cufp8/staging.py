"""From host memory to a GPU through pinned buffers: what a memory map holds goes there as fast as the bus is."""

from __future__ import annotations

# concurrent.futures comes in with the first copy: `import cufp8` is quicker.
import os
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np

THREADS = 8  # at most; one copies 8 to 12 GB/s, and PCIe 5.0 takes 55
SLICE_BYTES = 1 << 20  # of a buffer: the bus waits until the first are full, and each copy takes some time to start
LEAST_BYTES = 1 << 20  # below this the threads would cost more time than they save
_HOST_TO_DEVICE, _PINNED = 1, 1  # cudaMemcpyKind, cudaMemoryType


class Staging:
    """Threads that fill pinned buffers, and send each on to a GPU.

    A thread has two buffers: it fills one while the other crosses the bus. Whichever thread is free takes the next
    slice of an array, so that no thread waits for another. Several arrays may be on their way at once.

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
        from concurrent.futures import ThreadPoolExecutor

        import cupy

        if threads is None:
            threads = min(THREADS, len(os.sched_getaffinity(0)))
        self.device, self.threads, self.slice_bytes = device, threads, slice_bytes
        self.nbytes = 2 * threads * slice_bytes
        with cupy.cuda.Device(device):
            self._stream = cupy.cuda.Stream(non_blocking=True)
            pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(self.nbytes), np.uint8, self.nbytes)
            events = [cupy.cuda.Event(block=True, disable_timing=True) for _ in range(2 * threads)]
        # Each with its address and the event of its last copy.
        buffers = [(b, b.ctypes.data, e) for b, e in zip(pinned.reshape(-1, slice_bytes), events, strict=True)]
        self._pairs: SimpleQueue[list[Any]] = SimpleQueue()
        for i in range(0, len(buffers), 2):
            self._pairs.put(buffers[i : i + 2])
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="cufp8-staging")

    def copy(self, a: np.ndarray) -> Any:
        """A contiguous host array as a CuPy array on the GPU, complete when this returns.

        Raises
        ------
        cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError
            As CuPy does; nothing is on its way then, and no array is left.
        """
        from concurrent.futures import wait

        import cupy

        source = a.reshape(-1).view(np.uint8)
        with cupy.cuda.Device(self.device):
            out = cupy.empty(a.shape, a.dtype)
            # Kernels that are queued already may still use that memory for what lay there before.
            self._stream.wait_event(cupy.cuda.get_current_stream().record())
            starts = iter(range(0, source.size, self.slice_bytes))  # shared: each start goes to one thread
            count = min(self.threads, -(-source.size // self.slice_bytes))
            tasks: list[Any] = []
            try:
                for _ in range(count):
                    tasks.append(self._pool.submit(self._send, starts, source, out.data.ptr))
                for task in tasks:
                    task.result()
            finally:
                wait(tasks)  # also where one has failed: the others write into memory that is about to be given back
                self._stream.record().synchronize()
        return out

    def _send(self, starts: Iterator[int], source: np.ndarray, destination: int) -> None:
        """Slices to an address on the GPU, one after another, until there are no more."""
        import cupy

        copy, pair = cupy.cuda.runtime.memcpyAsync, self._pairs.get()
        try:
            with cupy.cuda.Device(self.device):
                for start in starts:
                    pair.reverse()
                    buffer, address, sent = pair[0]
                    part = source[start : start + self.slice_bytes]
                    sent.synchronize()  # what the buffer held before has left it
                    buffer[: part.size] = part  # without the GIL
                    copy(destination + start, address, part.size, _HOST_TO_DEVICE, self._stream.ptr)
                    sent.record(self._stream)
        finally:
            self._pairs.put(pair)

    def close(self) -> None:
        """Let the threads and the buffers go, once the copies that have begun are done."""
        self._pool.shutdown()


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
        Complete, if `a` is of LEAST_BYTES or more; else ordered on CuPy's current stream.
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
