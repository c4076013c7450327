"""From a file in the page cache to finished layers on the GPU, against a copy of as many bytes out of pinned memory.

The folder has SHARDS files with LAYERS modules of FP8 weights and a scale a channel. A round opens it anew, so that its
map has no pages yet, and makes a `Linear` of each module, one after another or two at a time; memory that the layers
of the round before held is kept by CuPy's pool, as the copy's target is. RssAnon is what the process has in memory
beside files.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8.bench.measure import Measured

N, K = 14336, 4096
LAYERS, SHARDS = 34, 2
ROUNDS = 7

WHAT = {
    "pinned-copy": "a copy out of pinned memory",
    "cufp8": "`entry.linear()` of each module",
    "cufp8-two-threads": "`entry.linear()`, from two threads",
    "cufp8-open": "`cufp8.load(folder)`, a shard",
}


def write(folder: Path) -> int:
    """A checkpoint; the bytes of its tensors."""
    rng = np.random.Generator(np.random.SFC64(0))
    codes = rng.integers(0, 0x7F, (N, K), np.uint8)  # 0x7F would be NaN
    scale = np.full((N, 1), 2.0**-9, np.float32)
    places, total = {}, 0
    for shard in range(SHARDS):
        modules = [f"model.layers.{i}.mlp.up_proj" for i in range(shard, LAYERS, SHARDS)]
        header, end = {}, 0
        for module in modules:
            for suffix, dtype, a in (("weight", "F8_E4M3", codes), ("weight_scale", "F32", scale)):
                offsets = [end, end + a.nbytes]
                header[f"{module}.{suffix}"] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": offsets}
                end += a.nbytes
        text = json.dumps(header).encode()
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in modules:
                file.write(codes)
                file.write(scale)
            file.flush()
            os.fsync(file.fileno())  # else the disk would be written to while memory is measured
        places |= dict.fromkeys(header, name)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def anonymous() -> int:
    """Bytes of RssAnon."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


class Peak:
    """The most that RssAnon grows by within a `with`, looked at every 5 ms."""

    def __enter__(self) -> Peak:
        self._before, self.grown, self._end = anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self._look()

    def _look(self) -> None:
        self.grown = max(self.grown, anonymous() - self._before)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()


def pinned_copy(nbytes: int) -> Callable[[], None]:
    """A copy of so many bytes, a layer's at once."""
    import cupy

    source = cupy.cuda.alloc_pinned_memory(N * K)
    np.frombuffer(source, np.uint8, N * K)[:] = 1
    stream, target = cupy.cuda.Stream(non_blocking=True), cupy.empty(N * K, np.uint8)

    def copy() -> None:
        for start in range(0, nbytes, N * K):
            target.data.copy_from_host_async(source.ptr, min(N * K, nbytes - start), stream)
        stream.synchronize()

    return copy


def load_all(folder: Path, threads: int) -> float:
    """Seconds until every module is a layer on the GPU."""
    with cufp8.load(folder, device="cuda") as checkpoint:
        entries = list(checkpoint.values())
        start = time.perf_counter()
        if threads == 1:
            layers = [entry.linear() for entry in entries]
        else:
            with ThreadPoolExecutor(threads) as pool:
                layers = list(pool.map(lambda entry: entry.linear(), entries))
        seconds = time.perf_counter() - start
    assert all(layer.device.startswith("cuda") for layer in layers)
    return seconds


def open_all(folder: Path) -> float:
    """Seconds of opening, for each shard."""
    start = time.perf_counter()
    cufp8.load(folder).close()
    return (time.perf_counter() - start) / SHARDS


def check(folder: Path) -> None:
    """The last layer has the codes of its file."""
    with cufp8.load(folder, device="cuda") as checkpoint:
        entry = list(checkpoint.values())[-1]
        assert np.array_equal(entry.linear().weight.to("cpu").codes, entry.weight.codes)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def group(bench: Any, folder: Path) -> dict[str, Any]:
    """Measure in turns. The first round makes the buffers and fills CuPy's pool: of it the memory counts alone."""
    from cufp8 import staging

    bench.forget()
    nbytes = write(folder)
    check(folder)  # compiles the kernels, if nobody has
    copy = pinned_copy(nbytes)
    calls: dict[str, Callable[[], float]] = {
        "pinned-copy": lambda: timed(copy),
        "cufp8": lambda: load_all(folder, 1),
        "cufp8-two-threads": lambda: load_all(folder, 2),
        "cufp8-open": lambda: open_all(folder),
    }
    staging.release()  # so that the first round makes them again
    taken: dict[str, list[float]] = {name: [] for name in calls}
    grown = dict.fromkeys(calls, 0)
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            with Peak() as peak:
                seconds = call()
            grown[name] = max(grown[name], peak.grown)
            if turn:
                taken[name].append(seconds)
    rate = {name: nbytes / float(np.median(seconds)) / 1e9 for name, seconds in taken.items() if name != "cufp8-open"}
    done = {}
    for name, seconds in taken.items():
        note: dict[str, Any] = {"what": WHAT[name], "shards": SHARDS, "layers": LAYERS, "bytes": nbytes}
        if name in rate:
            note |= {"gb_s": round(rate[name], 2), "share": round(rate[name] / rate["pinned-copy"], 4)}
        note["anonymous_mib"] = round(grown[name] / 2**20, 1)
        done[name] = Measured(seconds, note=note)
    bench.write("load", [bench.row(name, one, scheme="FP8A16", n=N, k=K) for name, one in done.items()])
    return done


@pytest.mark.parametrize("contender", WHAT)
def test_load(bench: Any, replay: Any, tmp_path_factory: Any, contender: str) -> None:
    measured = bench.once("load", lambda: group(bench, tmp_path_factory.mktemp("load")))
    replay("load", measured[contender])
