"""What this GPU's memory can do, by stream.cu: a read-only stream and a copy over buffers much larger than L2."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cufp8.kernels import COPY_THREADS, STREAM_LOADS, STREAM_THREADS

BUFFER_BYTES = 512 << 20  # and 4 * L2 where that is more; there are two buffers
PIECE_BYTES = 64 << 20  # of random bytes, repeated over a buffer
BLOCKS = {"stream_read": STREAM_THREADS, "stream_copy": COPY_THREADS}
TILE_BYTES = {entry: threads * STREAM_LOADS * 16 for entry, threads in BLOCKS.items()}
WARM_UP_SECONDS = 0.3  # an idle GPU needs a while to raise its clocks
ROUNDS = 7


class Memory:
    """Two large buffers of random bytes, the kernels that read and copy them, and the rates these reach."""

    def __init__(self, queue: Any) -> None:
        import cupy

        from cufp8 import runtime

        self._queue = queue
        self.device = runtime.current_device()
        properties = cupy.cuda.runtime.getDeviceProperties(self.device)
        self.l2_bytes: int = properties["l2CacheSize"]
        self.sms: int = properties["multiProcessorCount"]
        piece = np.random.Generator(np.random.SFC64(1)).bytes(PIECE_BYTES)
        pieces = math.ceil(max(BUFFER_BYTES, 4 * self.l2_bytes) / len(piece))
        random = cupy.asarray(np.frombuffer(piece, np.uint8))
        self.buffers = [cupy.tile(random, pieces) for _ in range(2)]
        self.nbytes: int = self.buffers[0].nbytes
        self._launchers: dict[tuple[str, int], Any] = {}
        self._turn = 0
        self._check()
        self.read_seconds = self.nbytes / 1e12  # until measured
        self.copy_grid = 0  # of `grids`, the one that copies fastest

    def read(self, source: int, nbytes: int, blocks: int, sink: int = 0) -> None:
        """Queue one read of `nbytes` at address `source`; each thread's xor goes to `sink` where there is one."""
        self._launch("stream_read", blocks, source, sink, nbytes)

    def copy(self, source: int, destination: int, nbytes: int, blocks: int) -> None:
        """Queue one copy."""
        self._launch("stream_copy", blocks, source, destination, nbytes)

    def _launch(self, entry: str, blocks: int, source: int, destination: int, nbytes: int) -> None:
        launcher = self._launchers.get((entry, blocks))
        if launcher is None:
            from cufp8 import kernels, runtime

            launch = kernels.Launch(entry, (blocks, 1, 1), BLOCKS[entry])
            launcher = runtime.Launcher(runtime.row("stream"), launch, self.device)
            self._launchers[entry, blocks] = launcher
        assert nbytes % 16 == 0
        keep = entry == "stream_read" and destination != 0
        launcher(self._queue.stream(), source, destination, nbytes // 16, int(keep))

    def _check(self) -> None:
        """The kernels do what is timed: every word is read once, every word is copied."""
        import cupy

        source, destination = self.buffers
        blocks, nbytes = 3 * self.sms, min(10 * TILE_BYTES["stream_copy"] * self.sms + 16 * 77, PIECE_BYTES)
        seen = cupy.zeros(blocks * STREAM_THREADS, np.uint32)
        destination[:nbytes] = 0
        self._queue.wait()
        self.read(source.data.ptr, nbytes, blocks, seen.data.ptr)
        self.copy(source.data.ptr, destination.data.ptr, nbytes, blocks)
        self._queue.wait()
        wanted = np.bitwise_xor.reduce(source[:nbytes].get().view(np.uint32))
        assert np.bitwise_xor.reduce(seen.get()) == wanted, "stream_read left something out"
        assert bool((destination == source).all()), "stream_copy left something out"

    def hold(self, seconds: float) -> None:
        """Queue reads of a large buffer for `seconds` and at least once: L2 then holds nothing of a weight."""
        for _ in range(max(1, math.ceil(seconds / self.read_seconds))):
            self._turn ^= 1
            self.read(self.buffers[self._turn].data.ptr, self.nbytes, self.grids("stream_read", self.nbytes)[0])

    def warm_up(self) -> None:
        """Keep the GPU busy until its clocks are up."""
        end = time.perf_counter() + WARM_UP_SECONDS
        while time.perf_counter() < end:
            self.hold(0.0)
            self._queue.wait()

    def grids(self, entry: str, nbytes: int) -> list[int]:
        """Block counts to try: one tile a block, or a few blocks for each multiprocessor."""
        tiles = math.ceil(nbytes / TILE_BYTES[entry])
        return list(dict.fromkeys(min(tiles, blocks) for blocks in (16384, *(n * self.sms for n in (16, 8, 4, 2)))))

    def ceilings(self) -> tuple[float, float]:
        """(read, copy) in TB/s, copy counting bytes read + written: the best grid, the median of the rounds."""
        a, b = (buffer.data.ptr for buffer in self.buffers)

        def read(i: int, blocks: int) -> None:
            self.read(b if i % 2 else a, self.nbytes, blocks)

        def copy(i: int, blocks: int) -> None:
            self.copy(*((b, a) if i % 2 else (a, b)), self.nbytes, blocks)

        best_read = max(self._rate(read, blocks, self.nbytes) for blocks in self.grids("stream_read", self.nbytes))
        copies = [self._rate(copy, blocks, 2 * self.nbytes) for blocks in self.grids("stream_copy", self.nbytes)]
        best_copy = max(copies)
        self.copy_grid = copies.index(best_copy)
        self.read_seconds = self.nbytes / best_read
        return best_read / 1e12, best_copy / 1e12

    def _rate(self, one: Callable[[int, int], None], blocks: int, nbytes: int) -> float:
        """Bytes a second of a graph of eight launches."""
        launches = 8
        one(0, blocks)
        self._queue.wait()

        def queue() -> None:
            for i in range(launches):
                one(i, blocks)

        replay = self._queue.capture(queue)
        taken = []
        for _ in range(ROUNDS + 1):
            self.hold(0.0)
            start = self._queue.event()
            replay()
            end = self._queue.event()
            self._queue.wait()
            taken.append(self._queue.seconds(start, end))
        return launches * nbytes / statistics.median(taken[1:])
