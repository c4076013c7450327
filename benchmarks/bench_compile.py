"""What a machine pays once, and what every process pays: NVRTC for each binary, and the way to the first result.

The start is measured in processes of their own: from a CUDA context that is already there to the first result
on the GPU, through `import cufp8`, with an empty cache and with a full one. Making the arrays is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cufp8.bench.measure import Measured
from cufp8.kernels import KERNELS

ROOT = Path(__file__).resolve().parent.parent
EMPTY_ROUNDS = 2
FULL_ROUNDS = 5

WHAT = {
    "cufp8-empty-cache": "first result, empty cache",
    "cufp8-warm-cache": "first result, full cache",
    "cufp8-import": "`import cufp8` done",
}

START = """
import ctypes, json, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context = ctypes.c_int(), ctypes.c_void_p()
start = time.perf_counter()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
context_ready = time.perf_counter()
import cufp8
imported = time.perf_counter()
import numpy as np
rng = np.random.default_rng(0)
w = rng.standard_normal((4096, 4096), dtype=np.float32)
x = rng.standard_normal((1, 4096), dtype=np.float32).astype(np.float16)
arrays_made = time.perf_counter()
y = cufp8.Linear(w, device="cuda")(x)
done = time.perf_counter()
assert np.isfinite(y.astype(np.float32)).all()
seconds = {"context": context_ready - start, "import": imported - context_ready, "first": done - arrays_made}
print(json.dumps(seconds))
"""


# Of the rows that differ in the formats that they multiply, those of e4m3fn.
NAMES = [row.name for row in KERNELS if row.weight in ("", "fp8") and "e5m2" not in row.name]
COMPILE = """
import json, sys
from cufp8 import runtime
arch, *names = sys.argv[1:]
print(json.dumps({name: runtime.compile(runtime.row(name), arch).seconds for name in names}))
"""


def alone(cache: Path, *command: str) -> str:
    """The last line that a Python process prints, with its caches (ours, CuPy's and NVRTC's) in a folder."""
    env = {
        **os.environ,
        "CUFP8_CACHE_DIR": str(cache / "cufp8"),
        "CUPY_CACHE_DIR": str(cache / "cupy"),
        "CUDA_CACHE_PATH": str(cache / "nvidia"),  # NVRTC keeps results of its own there
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }
    done = subprocess.run([sys.executable, "-c", *command], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def start_once(cache: Path) -> dict[str, float]:
    """Seconds of one process."""
    return json.loads(alone(cache, START))


def group_start(bench: Any, folder: Path) -> dict[str, Any]:
    empty = [start_once(folder / f"empty{i}") for i in range(EMPTY_ROUNDS)]
    full = [start_once(folder / "empty0") for _ in range(FULL_ROUNDS)]
    found = {
        "cufp8-empty-cache": [one["import"] + one["first"] for one in empty],
        "cufp8-warm-cache": [one["import"] + one["first"] for one in full],
        "cufp8-import": [one["import"] for one in full],
    }
    context = statistics.median(one["context"] for one in full)
    done = {
        name: Measured(seconds, note={"what": WHAT[name], "cuda_context_us": round(context * 1e6)})
        for name, seconds in found.items()
    }
    bench.write("import", [bench.row(name, one, scheme="FP8A16") for name, one in done.items()])
    return done


def group_compile(bench: Any, folder: Path) -> dict[str, Any]:
    from cufp8 import runtime

    arch = runtime.target().arch
    note = {"arch": arch, "nvrtc": runtime.info()["nvrtc"]}
    seconds = json.loads(alone(folder, COMPILE, arch, *NAMES))
    done = {name: Measured([seconds[name]], kernel=name, note=note) for name in NAMES}
    bench.write("compile", [bench.row("cufp8", one) for one in done.values()])
    return done


@pytest.mark.parametrize("kernel", NAMES)
def test_compile(bench: Any, replay: Any, tmp_path_factory: Any, kernel: str) -> None:
    folder = tmp_path_factory.mktemp("compile")
    replay("compile", bench.once("compile", lambda: group_compile(bench, folder))[kernel])


@pytest.mark.parametrize("until", WHAT)
def test_start(bench: Any, replay: Any, tmp_path_factory: Any, until: str) -> None:
    folder = tmp_path_factory.mktemp("start")
    replay("start", bench.once("start", lambda: group_start(bench, folder))[until])
