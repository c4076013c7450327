"""Copies to a GPU through pinned buffers: on the CPU against a GPU that puts every copy off, and on a real one."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cufp8 import runtime, staging
from cufp8.checkpoint import CheckpointError, file
from cufp8.staging import Staging


class LateGpu:
    """As much of CuPy as staging uses. A copy happens when somebody waits for it, and not before.

    So a buffer that is filled again too soon, or a result for which CuPy's current stream does not wait, shows in the
    values.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.queued: list[tuple[int, int, int]] = []
        self.done = 0
        self.made: list[np.ndarray] = []
        self.copies: list[int] = []  # bytes of each
        self.plain = 0
        self.fail_at: int | None = None
        self.pinned: set[int] = set()
        self.pinned_bytes: list[int] = []
        self.events: dict[int, Event] = {}
        outer = self

        class Event:
            def __init__(self, **options: Any) -> None:
                self.until, self.ptr = 0, id(self)
                outer.events[self.ptr] = self

            def record(self) -> None:
                with outer.lock:
                    self.until = len(outer.queued)

            def synchronize(self) -> None:
                outer.run(self.until)

        class Stream:
            ptr = 7

            def __init__(self, **options: Any) -> None:
                assert options == {"non_blocking": True}
                self.waits: list[Event] = []

            def record(self) -> Event:
                event = Event()
                event.record()
                return event

            def synchronize(self) -> None:
                outer.run(len(outer.queued))

            def wait_event(self, event: Event) -> None:
                outer.log.append("current" if self is outer.current else "staging")
                self.waits.append(event)

        class Device:
            def __init__(self, index: int) -> None:
                assert index == 0

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        self.log: list[str] = []  # which stream was told to wait for the other, or sent a slice
        self.current = Stream(non_blocking=True)
        attributes = lambda ptr: SimpleNamespace(type=int(ptr in self.pinned))  # noqa: E731
        self.runtime = SimpleNamespace(
            getDevice=lambda: 0, setDevice=lambda device: None, pointerGetAttributes=attributes,
            eventSynchronize=lambda event: self.events[event].synchronize(),
        )  # fmt: skip
        self.cuda = SimpleNamespace(
            Event=Event, Stream=Stream, Device=Device, runtime=self.runtime, alloc_pinned_memory=self.pin,
            get_current_stream=lambda: self.current,
        )  # fmt: skip

    def pin(self, nbytes: int) -> bytearray:
        self.pinned_bytes.append(nbytes)
        return bytearray(nbytes)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        assert stream == 7
        with self.lock:
            if len(self.copies) == self.fail_at:
                self.fail_at = None
                raise RuntimeError("the bus broke")
            self.log.append("slice")
            self.copies.append(nbytes)
            self.queued.append((destination, source, nbytes))

    def record(self, event: int, stream: int) -> None:
        assert stream == 7
        self.events[event].record()

    def is_done(self, event: int) -> bool:
        return self.events[event].until <= self.done

    def read(self, out: Any) -> np.ndarray:
        """What a kernel on CuPy's current stream would see in an array."""
        for event in self.current.waits:
            event.synchronize()
        return out.array

    def run(self, until: int) -> None:
        with self.lock:
            for of in self.queued[self.done : until]:
                ctypes.memmove(*of)
            self.done = max(self.done, until)

    def empty(self, shape: Any, dtype: Any) -> Any:
        array = np.full(shape, 0xEE, np.uint8) if dtype == np.uint8 else np.zeros(shape, dtype)
        self.made.append(array)  # CuPy too gives memory away only to what follows on the stream
        return SimpleNamespace(array=array, data=SimpleNamespace(ptr=array.ctypes.data), set=self.set(array))

    def set(self, array: np.ndarray) -> Any:
        return lambda a: np.copyto(array, a)

    def asarray(self, a: Any) -> Any:
        self.plain += 1
        return SimpleNamespace(array=np.array(a))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGpu]:
    made = LateGpu()
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setitem(sys.modules, "cupy.cuda", made.cuda)
    monkeypatch.setattr(runtime, "copying", lambda: (made.copy, made.record, made.is_done))
    monkeypatch.setattr(staging, "_made", {})
    yield made
    staging.release()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 40_000, 40_123])
def test_every_byte_arrives_once(gpu: LateGpu, rng: np.random.Generator, threads: int, size: int) -> None:
    s = Staging(0, threads=threads, slice_bytes=1000)
    for _ in range(3):
        a = rng.integers(0, 256, size, np.uint8)
        gpu.log.clear()
        out, kept = s.copy(a), a.copy()
        a[:] = 0  # it has been read
        np.testing.assert_array_equal(gpu.read(out), kept)
        assert gpu.log == ["staging", *["slice"] * -(-size // 1000), "current"]  # the first for what memory held before
    assert sum(gpu.copies) == 3 * size and max(gpu.copies) <= 1000 and len(gpu.copies) == 3 * -(-size // 1000)
    assert gpu.pinned_bytes == [(2 * threads + staging.AHEAD) * 1000] == [s.nbytes]
    if threads == 1:
        count = min(2 + staging.AHEAD, len(gpu.copies))
        assert len({source for _, source, _ in gpu.queued}) == count, "the buffers take turns"
    s.close()


def test_several_arrays_at_once(gpu: LateGpu, rng: np.random.Generator) -> None:
    s = Staging(0, threads=3, slice_bytes=512)
    arrays = [rng.integers(0, 256, (int(n), 7), np.uint8) for n in rng.integers(1, 3000, 24)]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(arrays, pool.map(s.copy, arrays), strict=True):
            np.testing.assert_array_equal(gpu.read(b), a)
    s.close()


def test_slices_of_smaller_arrays_are_shorter(gpu: LateGpu) -> None:
    """The bus waits until the first are full."""
    for size, step in ((1 << 20, 512 << 10), (14336 * 4096, 2 << 20), (130_000_000, 4 << 20)):  # of eight threads
        s = Staging(0, threads=8)
        s.copy(np.zeros(size, np.uint8))
        assert sorted(gpu.copies)[1:] == [step] * (-(-size // step) - 1) and sum(gpu.copies) == size
        gpu.copies.clear()
        s.close()


def test_addresses_that_no_dtype_has(gpu: LateGpu, rng: np.random.Generator) -> None:
    """As in a file's map."""
    a = rng.integers(0, 256, 8001, np.uint8)[1:].view(np.float32).reshape(20, 100)
    a.flags.writeable = False
    s = Staging(0, threads=2, slice_bytes=1000)
    b = gpu.read(s.copy(a))
    assert b.dtype == np.float32 and b.shape == a.shape and b.tobytes() == a.tobytes()
    s.close()


def test_an_error_leaves_nothing_under_way(gpu: LateGpu, rng: np.random.Generator) -> None:
    s = Staging(0, threads=3, slice_bytes=100)
    a = rng.integers(0, 256, 5000, np.uint8)
    for at in (0, 1, 17, 49):
        gpu.fail_at = len(gpu.copies) + at
        with pytest.raises(RuntimeError, match="the bus broke"):
            s.copy(a)
        assert gpu.done == len(gpu.queued), "a copy was on its way into memory that is free again"
        np.testing.assert_array_equal(gpu.read(s.copy(a)), a)
    s.close()


def in_a_file(folder: Path, a: np.ndarray) -> np.ndarray:
    """The array as a view of a file's map, at an odd address."""
    path = folder / "a.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": list(a.shape), "data_offsets": [0, a.nbytes]}}).encode()
    header += b" " * (len(header) % 2 == 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + a.tobytes())
    with file.open(path) as files:
        return files["a"].array


def test_what_lies_in_a_file_is_read_from_it(
    gpu: LateGpu, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a part of it under another dtype; not what is like it, but lies elsewhere."""
    a = rng.integers(0, 256, (90, 512), np.uint8)
    mapped, from_memory, read = in_a_file(tmp_path, a), [], staging._read_memory
    monkeypatch.setattr(staging, "_read_memory", lambda *of: from_memory.append(of[-1]) or read(*of))
    s = Staging(0, threads=3, slice_bytes=1000)
    for part in (mapped, mapped[7:80], mapped.view(np.float32)[1], mapped[5:9].reshape(2, -1).view(np.int8)):
        assert gpu.read(s.copy(part)).tobytes() == part.tobytes() and not from_memory
    np.testing.assert_array_equal(gpu.read(s.copy(mapped.copy())), a)
    assert from_memory
    s.close()


def files_parts(mapped: np.ndarray) -> list[np.ndarray]:
    """As layers have them: one after another, with something small between."""
    return [mapped[i : i + 7_300] for i in range(0, mapped.size - 7_300, 7_777)]


@pytest.mark.parametrize("ahead", [0, 1, 5, 40])
@pytest.mark.parametrize("callers", [1, 3])
def test_what_comes_next_in_a_file_is_read_ahead(
    gpu: LateGpu, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, callers: int
) -> None:
    """And whatever comes instead: another order, another file, memory; nothing is lost of what is in order."""
    (tmp_path / "b").mkdir()
    a = rng.integers(0, 256, 200_000, np.uint8)
    parts, other = files_parts(in_a_file(tmp_path, a)), files_parts(in_a_file(tmp_path / "b", a[::-1].copy()))
    asked: list[int] = []
    read = file.Map.read_into
    monkeypatch.setattr(file.Map, "read_into", lambda *of: asked.append(of[1].size) or read(*of))
    s = Staging(0, threads=3, slice_bytes=1000, ahead=ahead)
    orders = parts, parts[::2] + other[:4] + [parts[3].copy()] + parts[5:9] + other[5:2:-1] + parts[::-1], other
    for i, order in enumerate(orders):
        asked.clear()
        with ThreadPoolExecutor(callers) as pool:
            for part, b in zip(order, pool.map(s.copy, order), strict=True):
                np.testing.assert_array_equal(gpu.read(b), part)
        if callers == 1 and i == 0 and ahead:
            assert sum(asked) <= 1.1 * mapped_bytes(parts), "no byte is read twice"
    s.copy(a)
    for _ in range(s.nbytes // 1000 - ahead):  # the buffers are all there
        s._free.get(timeout=5)
    s.close()


def mapped_bytes(parts: list[np.ndarray]) -> int:
    return parts[-1].ctypes.data + parts[-1].nbytes - parts[0].ctypes.data


def test_a_file_that_was_cut_short(gpu: LateGpu, rng: np.random.Generator, tmp_path: Path) -> None:
    """To read the map would end the process."""
    a = rng.integers(0, 256, 90_000, np.uint8)
    mapped, s = in_a_file(tmp_path, a), Staging(0, threads=3, slice_bytes=1000)
    os.truncate(tmp_path / "a.safetensors", 50_000)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: the file ends at byte 50000, but 1000 bytes from byte"):
        s.copy(mapped)
    assert gpu.done == len(gpu.queued)
    np.testing.assert_array_equal(gpu.read(s.copy(mapped[:40_000])), a[:40_000])
    s.close()


def test_an_idle_thread_keeps_no_file_open(gpu: LateGpu, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    s, mapped = Staging(0, threads=2, slice_bytes=1000), in_a_file(tmp_path, np.zeros(9000, np.uint8))
    threads = set(threading.enumerate())
    for _ in range(3):
        s.copy(mapped)
    assert set(threading.enumerate()) == threads, "a copy starts no threads"
    del mapped
    for _ in range(200):  # the last thread may still be on its way back
        if len(os.listdir("/proc/self/fd")) == before:
            break
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) == before
    s.close()


def test_an_interrupt_waits_for_the_threads(gpu: LateGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that they write into is given back then."""
    s, a, interrupted = Staging(0, threads=2, slice_bytes=100), np.ones(1000, np.uint8), []

    class Queue(SimpleQueue):
        def get(self) -> Any:
            if not interrupted:
                interrupted.append(True)
                raise KeyboardInterrupt
            return super().get()

    monkeypatch.setattr(staging, "SimpleQueue", Queue)
    with pytest.raises(KeyboardInterrupt):
        s.copy(a)
    assert sum(gpu.copies) == 1000 and gpu.current.waits[-1].until == len(gpu.queued)
    s.close()


def test_what_needs_no_buffers_makes_none(gpu: LateGpu) -> None:
    big = np.arange(staging.LEAST_BYTES, dtype=np.uint32).astype(np.uint8)
    for a in (big[: staging.LEAST_BYTES - 1], np.empty(0, np.uint8), np.stack([big, big], axis=1)[:, 0]):
        np.testing.assert_array_equal(staging.to_gpu(a).array, a)
    assert gpu.plain == 3
    gpu.pinned.add(big.ctypes.data)
    np.testing.assert_array_equal(staging.to_gpu(big).array, big)
    assert not gpu.pinned_bytes and not gpu.copies
    gpu.pinned.clear()
    np.testing.assert_array_equal(gpu.read(staging.to_gpu(big)), big)
    assert gpu.plain == 3 and sum(gpu.copies) == big.size


def test_buffers_are_made_once_and_released(gpu: LateGpu) -> None:
    a = np.ones(staging.LEAST_BYTES, np.uint8)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(staging.to_gpu, [a] * 8))
    most = (2 * staging.THREADS + staging.AHEAD) * staging.SLICE_BYTES
    assert len(gpu.pinned_bytes) == 1 and gpu.pinned_bytes[0] <= most == 208 << 20  # as README says
    staging.release()
    staging.release()
    assert not [t for t in threading.enumerate() if t.name.startswith("cufp8-staging")]
    np.testing.assert_array_equal(gpu.read(staging.to_gpu(a)), a)
    assert len(gpu.pinned_bytes) == 2


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("size", [staging.LEAST_BYTES, 3 * staging.SLICE_BYTES + 17, 77_777_777])
def test_a_gpu_gets_every_byte(rng: np.random.Generator, size: int) -> None:
    import cupy

    a = rng.integers(0, 256, size + 1, np.uint8)[1:]
    for _ in range(2):
        b = staging.to_gpu(a)
        np.testing.assert_array_equal(cupy.asnumpy(b), a)
        b.fill(0xEE)  # the second round may get this memory, while it is being filled
        del b


@pytest.mark.gpu
def test_a_gpu_gets_what_lies_in_a_file(rng: np.random.Generator, tmp_path: Path) -> None:
    import cupy

    a = rng.integers(0, 256, 77_777_777, np.uint8)
    mapped = in_a_file(tmp_path, a)
    for part in (mapped, mapped[1_234_567:5_000_000]):
        with cupy.cuda.Stream(non_blocking=True):  # which waits for the copy
            b = staging.to_gpu(part) ^ np.uint8(0x5A)
            np.testing.assert_array_equal(cupy.asnumpy(b), part ^ 0x5A)
    os.truncate(tmp_path / "a.safetensors", 50_000_000)
    with pytest.raises(CheckpointError, match="the file ends at byte 50000000"):
        staging.to_gpu(mapped)


@pytest.mark.gpu
def test_a_gpu_gets_several_arrays_at_once(rng: np.random.Generator) -> None:
    import cupy

    arrays = [rng.integers(0, 256, int(n), np.uint8) for n in rng.integers(1, 30_000_000, 12)]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(arrays, pool.map(staging.to_gpu, arrays), strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(b), a)
    staging.release()


@pytest.mark.gpu
def test_pinned_memory_is_not_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(staging, "_made", {})
    memory = cupy.cuda.alloc_pinned_memory(8 << 20)
    a = np.frombuffer(memory, np.uint8, 8 << 20)
    a[:] = np.arange(a.size, dtype=np.uint32).astype(np.uint8)
    np.testing.assert_array_equal(cupy.asnumpy(staging.to_gpu(a)), a)
    assert not staging._made
    assert staging.to_gpu(b := cupy.ones(3)) is b
