"""Compile, cache, load, launch: what can be seen without a GPU, and what only a driver answers."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8 import kernels, runtime
from cufp8.kernels import COPY_THREADS, KERNELS, ROWS, STREAM_THREADS, Kernel, Launch

SMALL = ROWS["stream"]  # the row that compiles fastest


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """What the module remembers of the machine is forgotten, before each test and after it."""

    def forget() -> None:
        for found in vars(runtime).values():
            if hasattr(found, "cache_clear") and getattr(found, "__module__", "") == runtime.__name__:
                found.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("CUFP8_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def needs_nvrtc() -> Any:
    """NVRTC's binding."""
    pytest.importorskip("cupy")
    try:
        runtime.nvrtc_version()
    except runtime.DeviceError as error:
        pytest.skip(str(error))
    from cupy.cuda import nvrtc

    return nvrtc


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The rows and archs that have been compiled; the compiler is a fake one, and so is its version."""
    seen = []

    def fake(row: Kernel, arch: str) -> runtime.Compiled:
        seen.append((row.name, arch))
        return runtime.Compiled(f"cubin of {row.name} for {arch}, number {len(seen)}".encode(), "", 0.0)

    monkeypatch.setattr(runtime, "compile", fake)
    monkeypatch.setattr(runtime, "nvrtc_version", lambda: (13, 0))
    return seen


# --- sources and digests --------------------------------------------------------------------------------


def copy_of_the_sources(to: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """kernels_cu/ copied, and the runtime reading the copy."""
    shutil.copytree(runtime.sources_dir(), to)
    monkeypatch.setattr(runtime, "sources_dir", lambda: to)
    runtime.sources.cache_clear()
    runtime.digests.cache_clear()
    return to


def reread() -> dict[str, str]:
    runtime.sources.cache_clear()
    runtime.digests.cache_clear()
    return runtime.digests()


def included(name: str, folder: Path) -> set[str]:
    """A file and all that it includes, however deep."""
    found, todo = set(), [name]
    while todo:
        one = todo.pop()
        found.add(one)
        todo += [n for n in re.findall(r'#\s*include "(.+?)"', (folder / one).read_text()) if n not in found]
    return found


@pytest.mark.parametrize("source", sorted({row.source for row in KERNELS}))
def test_sources_are_the_file_and_all_it_includes(source: str) -> None:
    found = runtime.sources(source)
    assert next(iter(found)) == source
    assert set(found) == included(source, runtime.sources_dir())
    for name, text in found.items():
        assert text == (runtime.sources_dir() / name).read_bytes()


def test_digests_are_stable_and_differ() -> None:
    first = runtime.digests()
    assert set(first) == {row.name for row in KERNELS}
    assert all(len(digest) == 64 and int(digest, 16) >= 0 for digest in first.values())
    assert len(set(first.values())) == len(first)
    code = "from cufp8 import runtime; print(runtime.digests())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(first)


def test_a_digest_needs_neither_cupy_nor_a_gpu() -> None:
    code = """
        import sys
        sys.modules["cupy"] = None  # importing it fails
        from cufp8 import runtime
        assert len(runtime.digests()) == len(runtime.KERNELS)
        print(runtime.why_not())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "CuPy is not installed" in done.stdout and "cufp8[cuda13]" in done.stdout


def test_a_header_changes_the_digests_of_all_that_include_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copy_of_the_sources(tmp_path / "kernels_cu", monkeypatch)
    first = runtime.digests()
    assert first == reread()
    sizes = set()
    for path in sorted(copied.iterdir()):
        changed = {row.name for row in KERNELS if path.name in included(row.source, copied)}
        sizes.add(len(changed))
        text = path.read_bytes()
        path.write_bytes(text + b"\n// x\n")
        second = reread()
        assert {row for row in first if first[row] != second[row]} == changed
        path.write_bytes(text)
    assert reread() == first
    assert 1 in sizes and max(sizes) > 1


def test_a_constant_and_a_rule_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = runtime.digests()
    gemv = ROWS["gemv"]
    for changes in (
        {"defines": (*gemv.defines, ("MORE", 1))},
        {"args": kernels.STREAM_ARGS},
        {"serves": lambda target, p: p.m == 12345},
        {"plan": lambda target, p: None},
    ):
        rows = tuple(dataclasses.replace(gemv, **changes) if row is gemv else row for row in KERNELS)
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "KERNELS", rows)
            runtime.digests.cache_clear()
            second = runtime.digests()
        assert {row for row in first if first[row] != second[row]} == {"gemv"}, changes
    runtime.digests.cache_clear()


def test_missing_sources_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "__file__", str(tmp_path / "cufp8" / "runtime.py"))
    runtime.sources_dir.cache_clear()
    with pytest.raises(runtime.DeviceError, match=r"kernels_cu folder is missing.*install cufp8 again"):
        runtime.sources_dir()


# --- the cache --------------------------------------------------------------------------------------------


def test_the_key_covers_all_that_a_cubin_depends_on(
    folder: Path, compiled: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy_of_the_sources(tmp_path / "kernels_cu", monkeypatch)
    first = runtime.cache_file(SMALL, "sm_90a")
    assert first == runtime.cache_file(SMALL, "sm_90a")
    assert first.parent == folder and first.name.startswith("stream-sm_90a-") and first.suffix == ".cubin"
    seen = {first}

    def new(path: Path) -> None:
        assert path not in seen
        seen.add(path)

    new(runtime.cache_file(SMALL, "sm_80"))
    new(runtime.cache_file(dataclasses.replace(SMALL, defines=(("N", 1),)), "sm_90a"))
    new(runtime.cache_file(dataclasses.replace(SMALL, defines=(("N", 2),)), "sm_90a"))
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "nvrtc_version", lambda: (13, 1))
        new(runtime.cache_file(SMALL, "sm_90a"))
    with monkeypatch.context() as patch:
        known = runtime.options
        patch.setattr(runtime, "options", lambda row, arch: (*known(row, arch), "-lineinfo"))
        new(runtime.cache_file(SMALL, "sm_90a"))
    text = (copied / "stream.cu").read_bytes()
    (copied / "stream.cu").write_bytes(text + b"\n")
    runtime.sources.cache_clear()
    new(runtime.cache_file(SMALL, "sm_90a"))
    (copied / "stream.cu").write_bytes(text)

    gemv = runtime.cache_file(ROWS["gemv"], "sm_90a")
    header = copied / "convert.cuh"
    header.write_bytes(header.read_bytes() + b"\n")
    runtime.sources.cache_clear()
    assert runtime.cache_file(ROWS["gemv"], "sm_90a") != gemv
    assert runtime.cache_file(SMALL, "sm_90a") == first


def test_a_kernel_is_compiled_once(folder: Path, compiled: list) -> None:
    first = runtime.binary(SMALL, "sm_90a")
    assert runtime.binary(SMALL, "sm_90a") == first and compiled == [("stream", "sm_90a")]
    runtime.binary(SMALL, "sm_80")
    assert len(compiled) == 2
    assert len(list(folder.iterdir())) == 2  # no temporary file stays behind
    blob = runtime.cache_file(SMALL, "sm_90a").read_bytes()
    assert blob == hashlib.sha256(first).digest() + first


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda blob: b"",
    "cut": lambda blob: blob[:-1],
    "cut to the hash": lambda blob: blob[:32],
    "cut inside the hash": lambda blob: blob[:10],
    "one bit": lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
    "one bit of the hash": lambda blob: bytes([blob[0] ^ 128]) + blob[1:],
    "longer": lambda blob: blob + b"\0",
    "something else": lambda blob: b"\x7fELF" + bytes(1000),
    "the hash of nothing": lambda blob: hashlib.sha256(b"").digest(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again_and_repaired(folder: Path, compiled: list, damage: str) -> None:
    runtime.binary(SMALL, "sm_90a")
    path = runtime.cache_file(SMALL, "sm_90a")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    again = runtime.binary(SMALL, "sm_90a")
    assert len(compiled) == 2 and again.endswith(b"number 2")
    assert runtime.binary(SMALL, "sm_90a") == again and len(compiled) == 2
    assert [p.name for p in folder.iterdir()] == [path.name]


def test_a_real_cubin_comes_back_from_the_cache(folder: Path) -> None:
    needs_nvrtc()
    first = runtime.binary(SMALL, "sm_90a")
    assert first[:4] == b"\x7fELF"
    path = runtime.cache_file(SMALL, "sm_90a")
    path.write_bytes(path.read_bytes()[:-100])
    assert runtime.binary(SMALL, "sm_90a") == first  # the compiler is deterministic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "compile", lambda *_: pytest.fail("compiled again"))
        assert runtime.binary(SMALL, "sm_90a") == first


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUFP8_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value, want in (
        ("XDG_CACHE_HOME", None, tmp_path / "home" / ".cache" / "cufp8"),
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg" / "cufp8"),
        ("CUFP8_CACHE_DIR", tmp_path / "a" / "b", tmp_path / "a" / "b"),
    ):
        monkeypatch.setenv(name, str(value)) if value else monkeypatch.delenv(name, raising=False)
        runtime.cache_dir.cache_clear()
        assert runtime.cache_dir() == want and want.is_dir()
        assert not list(want.iterdir())


def test_an_unwritable_folder_is_said_once(tmp_path: Path, compiled: list, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    wish = tmp_path / "file" / "cache"  # a folder cannot be made there, not even by root
    monkeypatch.setenv("CUFP8_CACHE_DIR", str(wish))
    with pytest.warns(UserWarning) as said:
        runtime.binary(SMALL, "sm_90a")
        runtime.binary(ROWS["gemv"], "sm_90a")
        runtime.binary(SMALL, "sm_90a")
    assert len(said) == 1 and len(compiled) == 2
    text = str(said[0].message)
    other = runtime.cache_dir()
    assert "CUFP8_CACHE_DIR" in text and str(other) in text and str(wish) in text
    assert other.is_dir() and len(list(other.iterdir())) == 2
    shutil.rmtree(other)


def test_a_folder_that_refuses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a read-only folder does, which root would write into all the same.
    monkeypatch.setenv("CUFP8_CACHE_DIR", str(tmp_path / "cache"))
    real = tempfile.NamedTemporaryFile

    def refuse(*args: Any, dir: Any = None, **options: Any) -> Any:
        if Path(dir) == tmp_path / "cache":
            raise PermissionError(13, "Permission denied", str(dir))
        return real(*args, dir=dir, **options)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    with pytest.warns(UserWarning, match="cannot be written.*Permission denied"):
        other = runtime.cache_dir()
    assert other != tmp_path / "cache" and other.is_dir()
    other.rmdir()


def test_a_home_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("CUFP8_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(runtime.Path, "home", homeless)
    with pytest.warns(UserWarning, match="home directory"):
        other = runtime.cache_dir()
    other.rmdir()


def test_a_file_that_cannot_be_replaced(folder: Path, compiled: list) -> None:
    path = runtime.cache_file(SMALL, "sm_90a")
    path.mkdir(parents=True)
    (path / "in the way").write_text("")
    with pytest.warns(UserWarning, match="cannot write"):
        assert runtime.binary(SMALL, "sm_90a") == b"cubin of stream for sm_90a, number 1"
    assert [p.name for p in folder.iterdir()] == [path.name], "a temporary file was left behind"


COMPILER = """
import hashlib, sys, time
from pathlib import Path
from cufp8 import runtime
from cufp8.kernels import ROWS
print("ready", flush=True)
sys.stdin.readline()
for name in ("stream", "quantize", "stream"):
    cubin = runtime.binary(ROWS[name], "sm_90a")
    print(hashlib.sha256(cubin).hexdigest(), flush=True)
"""


def test_processes_that_compile_the_same_kernels_at_once(folder: Path) -> None:
    needs_nvrtc()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", COMPILER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for worker in workers:
        assert worker.stdout.readline() == "ready\n"
    for worker in workers:
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outputs = []
    for worker in workers:
        out, err = worker.communicate(timeout=300)
        assert worker.returncode == 0, err
        outputs.append(out)
    assert len(set(outputs)) == 1
    files = sorted(folder.iterdir())
    assert [f.name.split("-")[0] for f in files] == ["quantize", "stream"]
    assert all(runtime._read_cached(f) for f in files)


def test_threads_that_compile_the_same_kernel_at_once(folder: Path, compiled: list) -> None:
    together = threading.Barrier(8)
    found = []

    def work() -> None:
        together.wait()
        found.append(runtime.binary(SMALL, "sm_90a"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(found) == 8 and len(list(folder.iterdir())) == 1
    assert runtime._read_cached(runtime.cache_file(SMALL, "sm_90a")) in found


# --- compile ----------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_nvrtc()
    broken = b'#include "part.cuh"\nextern "C" __global__ void f() { no_such_thing(); }\n'
    monkeypatch.setattr(runtime, "sources", lambda name: {"broken.cu": broken, "part.cuh": b"// empty\n"})
    row = dataclasses.replace(SMALL, source="broken.cu", defines=(("SIDE", 3),))
    with pytest.raises(runtime.CompileError) as error:
        runtime.binary(row, "sm_80")
    text = str(error.value)
    first, options, *log = text.splitlines()
    assert first.startswith("broken.cu does not compile for sm_80: ")
    assert options == (
        f"options: --gpu-architecture=sm_80 --std=c++17 --ptxas-options=-v -DARGS_BYTES={SMALL.args.size} "
        f"-DLINEAR_ARGS_BYTES={kernels.LINEAR_ARGS.size} -DSIDE=3"
    )
    assert any("broken.cu(2)" in line and "error" in line for line in log), text
    assert any("no_such_thing" in line for line in log)
    assert isinstance(error.value, RuntimeError) and error.value.__cause__ is None
    assert not list(folder.iterdir())  # no half-made file


def test_an_arch_that_nvrtc_does_not_know() -> None:
    needs_nvrtc()
    with pytest.raises(runtime.CompileError, match=r"sm_42(.|\n)*--gpu-architecture=sm_42"):
        runtime.compile(SMALL, "sm_42")


def test_what_a_compilation_tells() -> None:
    needs_nvrtc()
    done = runtime.compile(SMALL, "sm_90a")
    assert done.cubin[:4] == b"\x7fELF" and done.seconds > 0
    assert "stream_copy" in done.log and "registers" in done.log


# --- why there is no GPU --------------------------------------------------------------------------------------


def fake_cupy(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> types.SimpleNamespace:
    """A CuPy whose runtime answers as told: a value, or an exception that it raises."""

    def answer(value: Any) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value(*_) if callable(value) else value

        return call

    calls = {"driverGetVersion": 13000, "runtimeGetVersion": 13000, "getDeviceCount": 1, "getDevice": 0} | answers
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.runtime = types.SimpleNamespace(**{name: answer(value) for name, value in calls.items()})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    return cupy


REASONS = [
    ({}, None),
    ({"driverGetVersion": 0}, "there is no NVIDIA driver"),
    ({"driverGetVersion": 12080}, r"driver supports CUDA 12\.8, CuPy is built for 13\.x; update.*cufp8\[cuda12\]"),
    ({"driverGetVersion": 13010, "runtimeGetVersion": 12090}, None),
    ({"getDeviceCount": 0}, "the driver finds no GPU"),
    ({"getDeviceCount": RuntimeError("cudaErrorNoDevice: none detected")}, "finds no GPU: cudaErrorNoDevice"),
    ({"driverGetVersion": RuntimeError("libcudart.so.13: broken")}, "runtime cannot be asked: libcudart.so.13"),
]


@pytest.mark.parametrize(("answers", "reason"), REASONS, ids=[str(reason)[:30] for _, reason in REASONS])
def test_why_no_gpu_is_used(answers: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, **answers)
    if reason is None:
        assert runtime.why_not() is None and runtime.available()
        runtime.require()
        return
    assert not runtime.available()
    with pytest.raises(runtime.DeviceError, match=reason) as error:
        runtime.require()
    text = runtime.why_not()
    assert text.endswith(".") and not text.endswith("..") and "\n" not in text
    assert str(error.value) == f"cufp8 cannot use a GPU: {text}"


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    assert "CuPy is not installed" in runtime.why_not()
    with pytest.raises(runtime.DeviceError, match=r"CuPy.*missing.*cufp8\[cuda13\]"):
        runtime.nvrtc_version()
    with pytest.raises(runtime.DeviceError):
        runtime.target(0)


def test_a_cupy_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("import no_such_dependency_of_cupy\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert "does not import" in runtime.why_not() and "no_such_dependency_of_cupy" in runtime.why_not()


def test_nvrtc_that_is_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(monkeypatch)

    def absent() -> None:
        raise RuntimeError("CuPy failed to load libnvrtc.so.13: OSError: not found")

    cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=absent)
    with pytest.raises(runtime.DeviceError, match=r"libnvrtc\.so\.13.*nvidia-cuda-nvrtc") as error:
        runtime.nvrtc_version()
    assert "12.8" in str(error.value)
    cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: (12, 6))
    with pytest.raises(runtime.DeviceError, match=r"NVRTC 12\.6 is too old.*12\.8"):
        runtime.nvrtc_version()
    with pytest.raises(runtime.DeviceError, match=r"NVRTC 12\.6"):
        runtime.compile(SMALL, "sm_90a")
    cupy.cuda.nvrtc = types.SimpleNamespace(getVersion=lambda: (12, 8))
    assert runtime.nvrtc_version() == (12, 8)


def test_without_the_drivers_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(runtime.ctypes, "CDLL", absent)
    with pytest.raises(runtime.DeviceError, match=r"driver's library cannot be loaded: libcuda\.so\.1"):
        runtime._driver()


def gpu(cc: tuple[int, int], sms: int = 100, smem_bytes: int = 99 << 10) -> Callable[[int, int], int]:
    """deviceGetAttribute of a GPU."""
    return lambda number, device: {75: cc[0], 76: cc[1], 16: sms, 97: smem_bytes}[number]


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, deviceGetAttribute=gpu((9, 0), 132, 227 << 10), getDeviceCount=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.target(0) == kernels.Target("sm_90a", 132, 227 << 10, True)
        assert runtime.target() == runtime.target(0)
    for absent in (2, -1):
        with pytest.raises(runtime.DeviceError, match=rf"no GPU cuda:{absent}; this machine has 2"):
            runtime.target(absent)


def test_the_current_gpu_is_asked_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    ccs = {0: (9, 0), 1: (8, 0)}
    fake_cupy(
        monkeypatch,
        getDevice=lambda: current[0],
        getDeviceCount=2,
        deviceGetAttribute=lambda number, device: gpu(ccs[device])(number, device),
    )
    assert runtime.target().arch == "sm_90a"
    current[0] = 1
    assert runtime.target().arch == "sm_80"


@pytest.mark.parametrize(("cc", "name"), [((8, 7), "sm_87"), ((11, 0), "sm_110"), ((13, 7), "sm_137")])
def test_a_gpu_outside_the_table_is_said_once(cc: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, deviceGetAttribute=gpu(cc))
    with pytest.warns(UserWarning, match=name) as said:
        found = runtime.target(0)
        runtime.target(0)
    assert len(said) == 1
    assert (found.arch, found.proven) == (name, False)


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy(monkeypatch, deviceGetAttribute=gpu((7, 0)))
    with pytest.raises(runtime.DeviceError, match=r"7\.0; cufp8 needs 7\.5"):
        runtime.target(0)


# --- launch, against a driver that only takes notes ------------------------------------------------------------

STUB = r"""
#include <stdint.h>
#include <string.h>
typedef struct { uint32_t grid[3], block[3], smem; void *stream; void *attributes; uint32_t count; } Config;
typedef struct { int id; char pad[4]; unsigned char value[64]; } Attribute;
typedef struct {
    uint32_t grid[3], block[3], smem, count;
    uint64_t stream, function;
    int ids[4], values[4][4];
    unsigned char args[ARGS];
} Note;
Note note;
int calls, status, capturing, args_bytes;
typedef struct {
    int calls, type, rank, interleave, swizzle, promotion, fill, aligned;
    uint64_t address, dims[2], strides[1];
    uint32_t box[2], steps[2];
} Map;
Map map;
int cuTensorMapEncodeTiled(void *to, int type, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    ++map.calls;
    map.type = type, map.rank = rank, map.interleave = interleave, map.swizzle = swizzle, map.promotion = promotion;
    map.fill = fill, map.aligned = (uint64_t)to % 64 == 0, map.address = (uint64_t)address, map.strides[0] = *strides;
    memcpy(map.dims, dims, 16), memcpy(map.box, box, 8), memcpy(map.steps, steps, 8);
    memset(to, 0x5A, 128), memcpy(to, &address, 8), memcpy((char *)to + 8, strides, 8);
    return status;
}
int cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) {
    ++calls;
    memcpy(note.grid, c->grid, 12), memcpy(note.block, c->block, 12);
    note.smem = c->smem, note.count = c->count, note.stream = (uint64_t)c->stream, note.function = (uint64_t)f;
    for (uint32_t i = 0; i < c->count; ++i) {
        const Attribute *a = (const Attribute *)c->attributes + i;
        note.ids[i] = a->id, memcpy(note.values[i], a->value, 16);
    }
    memcpy(note.args, params[0], args_bytes);
    return extra ? -1 : status;
}
int cuGetErrorName(int s, const char **text) { *text = s == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : 0; return s != 700; }
int cuGetErrorString(int s, const char **text) { *text = s == 700 ? "an illegal address" : 0; return s != 700; }
int cuStreamIsCapturing(void *stream, int *out) { *out = stream == (void *)0x77 ? capturing : 0; return 0; }
int cuStreamGetCaptureInfo_v2(void *stream, int *out, uint64_t *id, void **graph, void **d, uint64_t *n) {
    *out = capturing, *id = 5, *graph = (void *)0x66;
    return d || n ? 1 : 0;
}
void *object_ptr, *retained_graph, *retained_object;
void (*object_destroy)(void *);
int retained_count, retained_flags, object_count, object_flags;
int cuUserObjectCreate(void **out, void *ptr, void (*destroy)(void *), unsigned count, unsigned flags) {
    *out = (void *)0x55, object_ptr = ptr, object_destroy = destroy, object_count = count, object_flags = flags;
    return 0;
}
int cuGraphRetainUserObject(void *graph, void *object, unsigned count, unsigned flags) {
    retained_graph = graph, retained_object = object, retained_count = count, retained_flags = flags;
    return 0;
}
void graph_is_gone(void) { object_destroy(object_ptr); }
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The stub, compiled."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    here = tmp_path_factory.mktemp("driver")
    (here / "stub.c").write_text(STUB)
    flags = [f"-DARGS={kernels.TILE_ARGS.size}", "-shared", "-fPIC", "-O1"]
    subprocess.run([compiler, *flags, "-o", str(here / "stub.so"), str(here / "stub.c")], check=True)
    return ctypes.CDLL(str(here / "stub.so"))


class Note(ctypes.Structure):
    """What the stub noted of a launch."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("smem", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("function", ctypes.c_uint64),
        ("ids", ctypes.c_int * 4),
        ("values", (ctypes.c_int * 4) * 4),
        ("args", ctypes.c_ubyte * kernels.TILE_ARGS.size),
    ]

    def fields(self, row: Kernel) -> tuple[Any, ...]:
        """The fields of the argument block."""
        return row.args.unpack(bytes(self.args)[: row.args.size])


class Map(ctypes.Structure):
    """What the stub noted of a tensor map."""

    _fields_ = [
        *((name, ctypes.c_int) for name in "calls type rank interleave swizzle promotion fill aligned".split()),
        ("address", ctypes.c_uint64),
        ("dims", ctypes.c_uint64 * 2),
        ("strides", ctypes.c_uint64 * 1),
        ("box", ctypes.c_uint32 * 2),
        ("steps", ctypes.c_uint32 * 2),
    ]


FUNCTION = 0x7F12_3456_789A
ROW = next(row for row in KERNELS if row.args is kernels.LINEAR_ARGS)
TILES = next(row for row in KERNELS if row.args is kernels.TILE_ARGS)
# A value for each field of the argument block that only its own C type holds.
FIELDS = tuple(
    {"P": 0x7FFF_0000_1000 + i, "q": -(2**40) - i, "i": 2**31 - 1 - i}[kind]
    for i, kind in enumerate(kernels.LINEAR_ARGS.format.strip("@x"))
)


@pytest.fixture
def driver(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The runtime on the stub: a kernel called `entry` of ROW, and of TILES, is loaded on the GPUs 0 and 3."""
    fake_cupy(monkeypatch, setDevice=lambda device: current.append(device))
    current: list[int] = []
    library.current = current
    for name in ("calls", "status", "capturing"):
        ctypes.c_int.in_dll(library, name).value = 0
    ctypes.c_int.in_dll(library, "args_bytes").value = kernels.LINEAR_ARGS.size
    ctypes.memset(ctypes.byref(Map.in_dll(library, "map")), 0, ctypes.sizeof(Map))
    monkeypatch.setattr(runtime, "_driver", lambda: library)
    loaded = {(row.name, device): {"entry": FUNCTION + device} for row in (ROW, TILES) for device in (0, 3)}
    monkeypatch.setattr(runtime, "_functions", loaded)
    monkeypatch.setattr(runtime, "_kept", {})
    monkeypatch.setattr(runtime, "_released", [])
    yield library


def note_of(library: ctypes.CDLL) -> Note:
    return Note.in_dll(library, "note")


def test_a_launch_hands_everything_over(driver: ctypes.CDLL) -> None:
    launch = Launch("entry", (5, 65535, 7), 256, smem_bytes=1234)
    runtime.Launcher(ROW, launch, 0)(0xABCD_0000_1234, *FIELDS)
    note = note_of(driver)
    assert (tuple(note.grid), tuple(note.block), note.smem) == ((5, 65535, 7), (256, 1, 1), 1234)
    assert (note.stream, note.function, note.count) == (0xABCD_0000_1234, FUNCTION, 0)
    assert note.fields(ROW) == FIELDS
    assert driver.current == [0]


def struct_of_c(header: str, name: str, known: dict[str, Any]) -> list[tuple[str, Any]]:
    """The fields of a struct in a file of kernels_cu/, for ctypes."""
    text = (runtime.sources_dir() / header).read_text()
    body = re.sub(r"//.*", "", text.split(f"struct {name} {{")[1].split("};")[0])
    fields: list[tuple[str, Any]] = []
    for kind, names in re.findall(r"([\w ]+?\*?) ?\b(\w+(?:, \w+)*);", body):
        c = ctypes.c_void_p if "*" in kind else known[kind.strip()]
        fields += [(name, c) for name in names.split(", ")]
    return fields


C_TYPES = {"int64_t": ctypes.c_int64, "int": ctypes.c_int}


def test_the_argument_block_is_the_struct_of_c(driver: ctypes.CDLL) -> None:
    """Every field where C lays it out, by the struct that the kernels declare."""
    fields = struct_of_c("linear.cuh", "LinearArgs", C_TYPES)
    assert len(fields) == len(FIELDS)
    Args = type("Args", (ctypes.Structure,), {"_fields_": fields})
    assert ctypes.sizeof(Args) == kernels.LINEAR_ARGS.size
    runtime.Launcher(ROW, Launch("entry", (1, 1, 1), 32), 0)(0, *FIELDS)
    seen = Args.from_buffer_copy(bytes(note_of(driver).args))
    assert tuple(getattr(seen, name) for name, _ in fields) == FIELDS


def test_the_argument_block_with_a_tensor_map_is_the_struct_of_c() -> None:
    """`LinearArgs`, the fields of `Launch.fields`, and the map on a multiple of 64 bytes, last."""
    text = (runtime.sources_dir() / "tiles.cuh").read_text()
    assert re.search(r"alignas\(64\) uint8_t x_map\[128\];\n};", text)
    Linear = type("Linear", (ctypes.Structure,), {"_fields_": struct_of_c("linear.cuh", "LinearArgs", C_TYPES)})
    fields = struct_of_c("tiles.cuh", "TileArgs", C_TYPES | {"LinearArgs": Linear})
    Args = type("Args", (ctypes.Structure,), {"_fields_": fields})
    (linear, _), *rest = fields
    p = kernels.Problem("FP8A16", (1, 64), "bfloat16", "bfloat16", 8, 16, 64)
    launch = kernels.tile_launch("bulk_mma", kernels.Target("sm_90a", 132, 227 << 10, True), p, 8, 1)
    assert linear == "linear" and len(rest) == len(launch.fields)
    values = tuple(range(101, 101 + len(rest)))
    block = kernels.TILE_ARGS.pack(*FIELDS, *values, bytes(range(128)))
    seen = Args.from_buffer_copy(block)
    assert tuple(getattr(seen, name) for name, _ in rest) == values
    assert tuple(getattr(seen.linear, name) for name, _ in Linear._fields_) == FIELDS
    at = -(-ctypes.sizeof(Args) // 64) * 64
    assert len(block) == at + kernels.TENSOR_MAP_BYTES and block[at:] == bytes(range(128))


def test_a_product_rewrites_where_x_and_y_are(driver: ctypes.CDLL) -> None:
    x, *weight = FIELDS[:4]
    y, *strides = FIELDS[4:7]
    for row in KERNELS:
        if row.linear:
            assert row.args.format.startswith(runtime._POINTERS_STRIDES.format)
    product = runtime.Product(ROW, Launch("entry", (1, 1, 1), 32), 0, True, tuple(weight), FIELDS[7:])
    for i in range(3):
        product.queue(0x99 + i, x + i, strides[0] - i, y + 2 * i, strides[1] - 2 * i)
        note = note_of(driver)
        assert (note.stream, note.function, note.count) == (0x99 + i, FUNCTION, 1)
        where = x + i, *weight, y + 2 * i, strides[0] - i, strides[1] - 2 * i
        assert note.fields(ROW) == (*where, *FIELDS[7:])
    assert driver.current == [0]  # once a thread
    ctypes.c_int.in_dll(driver, "status").value = 700
    with pytest.raises(runtime.DeviceError, match="launching entry on cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS"):
        product.queue(0, x, 1, y, 1)
    for wrong in (FIELDS[7:-1], (*FIELDS[7:-1], 2**63)):
        with pytest.raises(Exception):  # noqa: B017 - struct.error, whatever it derives from
            runtime.Product(ROW, Launch("entry", (1, 1, 1), 32), 0, False, tuple(weight), wrong)


def product_with_a_map(m: int, k: int, box: int, pdl: bool = True) -> tuple[runtime.Product, tuple[int, ...]]:
    """A product of TILES whose kernel takes a tensor map, and the fields after the strides."""
    more = kernels.TILE_ARGS.format.removeprefix(kernels.LINEAR_ARGS.format).partition("4")[0]
    assert set(more) == {"i"}
    rest = (m, 48, k, *FIELDS[10:], *range(1, 1 + len(more)))
    launch = Launch("entry", (6, 1, 1), 320, split=2, smem_bytes=4096, box=box)
    return runtime.Product(TILES, launch, 0, pdl, FIELDS[1:4], rest), rest


def test_a_product_makes_the_map_of_x(driver: ctypes.CDLL) -> None:
    """The driver is asked for a map of x as it lies, once for each address and stride; the block carries the answer."""
    ctypes.c_int.in_dll(driver, "args_bytes").value = kernels.TILE_ARGS.size
    made = Map.in_dll(driver, "map")
    product, rest = product_with_a_map(300, 72, 64)
    places = [(0x7F00_0000_0010, 72), (0x7F00_0000_0010, 80), (0x7F11_2233_4450, 4104), (0x7F00_0000_0010, 72)]
    for turn, (x, stride) in enumerate(places):
        product.queue(0x99, x, stride, 0x1234, 49)
        assert made.calls == min(turn + 1, 3)
        if turn < 3:
            # UINT16, two dimensions, no interleaving, 128-byte swizzle, zeros for what lies outside.
            assert (made.type, made.rank, made.interleave, made.swizzle, made.fill) == (1, 2, 0, 3, 0)
            assert made.address == x and list(made.dims) == [72, 300] and list(made.strides) == [2 * stride]
            assert list(made.box) == [64, 64] and list(made.steps) == [1, 1] and made.aligned
        note = note_of(driver)
        *fields, there = note.fields(TILES)
        assert (note.stream, note.function, note.smem, note.count) == (0x99, FUNCTION, 4096, 2)
        assert tuple(fields) == (x, *FIELDS[1:4], 0x1234, stride, 49, *rest)
        assert len(there) == 128 and there[16:] == b"\x5a" * 112
        assert (int.from_bytes(there[:8], "little"), int.from_bytes(there[8:16], "little")) == (x, 2 * stride)


def test_products_of_other_sizes_have_maps_of_their_own(driver: ctypes.CDLL) -> None:
    made = Map.in_dll(driver, "map")
    for calls, (m, k, box) in enumerate(((300, 72, 64), (301, 72, 64), (300, 80, 64), (300, 72, 128)), 1):
        product_with_a_map(m, k, box)[0].queue(0, 0x7F00_0000_0010, 80, 0, 48)
        assert (made.calls, list(made.dims), list(made.box)) == (calls, [k, m], [64, box])


def test_a_product_without_a_box_asks_for_no_map(driver: ctypes.CDLL) -> None:
    runtime.Product(ROW, Launch("entry", (1, 1, 1), 32), 0, True, FIELDS[1:4], FIELDS[7:]).queue(0, 16, 1, 16, 1)
    assert Map.in_dll(driver, "map").calls == 0


def test_a_map_that_the_driver_refuses(driver: ctypes.CDLL) -> None:
    ctypes.c_int.in_dll(driver, "args_bytes").value = kernels.TILE_ARGS.size
    product, _ = product_with_a_map(3, 72, 8)
    ctypes.c_int.in_dll(driver, "status").value = 700
    with pytest.raises(
        runtime.DeviceError, match=r"making a tensor map of \[3, 72\] at 0x7f0000000010: CUDA_ERROR_ILLEGAL_ADDRESS"
    ):
        product.queue(0, 0x7F00_0000_0010, 72, 0, 48)
    assert ctypes.c_int.in_dll(driver, "calls").value == 0  # nothing was launched
    ctypes.c_int.in_dll(driver, "status").value = 0
    product.queue(0, 0x7F00_0000_0010, 72, 0, 48)  # and the refusal was not remembered
    assert ctypes.c_int.in_dll(driver, "calls").value == 1


def test_programmatic_launch_and_clusters_are_attributes(driver: ctypes.CDLL) -> None:
    plain, shared = Launch("entry", (8, 1, 1), 128), Launch("entry", (8, 1, 1), 128, split=4)
    runtime.Launcher(ROW, plain, 3, pdl=True)(1, *FIELDS)
    note = note_of(driver)
    assert (note.count, note.ids[0], note.values[0][0]) == (1, 6, 1)
    assert note.function == FUNCTION + 3 and driver.current == [3]
    runtime.Launcher(ROW, shared, 0, pdl=True)(1, *FIELDS)
    note = note_of(driver)
    assert (note.count, list(note.ids[:2])) == (2, [6, 4])
    assert note.values[0][0] == 1 and list(note.values[1][:3]) == [4, 1, 1]
    runtime.Launcher(ROW, shared, 0)(1, *FIELDS)
    note = note_of(driver)
    assert (note.count, note.ids[0], list(note.values[0][:3])) == (1, 4, [4, 1, 1])


def test_a_launch_that_the_driver_refuses(driver: ctypes.CDLL) -> None:
    launcher = runtime.Launcher(ROW, Launch("entry", (1, 1, 1), 32), 0)
    ctypes.c_int.in_dll(driver, "status").value = 700
    with pytest.raises(
        runtime.DeviceError, match=r"launching entry on cuda:0: CUDA_ERROR_ILLEGAL_ADDRESS \(an illegal address\)\."
    ):
        launcher(0, *FIELDS)
    ctypes.c_int.in_dll(driver, "status").value = 12345
    with pytest.raises(runtime.DeviceError, match="error 12345"):
        launcher(0, *FIELDS)
    ctypes.c_int.in_dll(driver, "status").value = 0
    launcher(0, *FIELDS)


def test_fields_that_do_not_fit_are_refused(driver: ctypes.CDLL) -> None:
    launcher = runtime.Launcher(ROW, Launch("entry", (1, 1, 1), 32), 0)
    last = len(FIELDS) - 1
    for wrong in (FIELDS[:-1], (*FIELDS, 1), (*FIELDS[:last], 2**63), (*FIELDS[:last], 1.5), (*FIELDS[:last], None)):
        with pytest.raises(Exception):  # noqa: B017 - struct.error, whatever it derives from
            launcher(0, *wrong)
    assert ctypes.c_int.in_dll(driver, "calls").value == 0


def test_threads_do_not_share_an_argument_block(driver: ctypes.CDLL) -> None:
    launcher = runtime.Launcher(ROW, Launch("entry", (1, 1, 1), 32), 0)
    blocks, together = [], threading.Barrier(4)

    def work() -> None:
        launcher(0, *FIELDS)
        blocks.append(ctypes.addressof(launcher.local.slots[0]))
        launcher(0, *FIELDS)
        together.wait()

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(set(blocks)) == 4
    assert ctypes.c_int.in_dll(driver, "calls").value == 8
    assert driver.current == [0] * 4  # once a thread


def test_an_object_is_kept_while_a_graph_lives(driver: ctypes.CDLL) -> None:
    class Array:
        pass

    kept = Array()
    runtime.keep_for_capture(0x77, kept)  # the stream is not being captured
    assert not runtime._kept
    ctypes.c_int.in_dll(driver, "capturing").value = 1
    runtime.keep_for_capture(0x88, kept)  # another stream is
    assert not runtime._kept
    runtime.keep_for_capture(0x77, kept)
    assert list(runtime._kept.values()) == [kept]

    def value(kind: Any, name: str) -> int:
        return kind.in_dll(driver, name).value

    # One reference, made for us with the only flag there is, goes over to the captured graph.
    assert (value(ctypes.c_int, "object_count"), value(ctypes.c_int, "object_flags")) == (1, 1)
    assert (value(ctypes.c_void_p, "retained_graph"), value(ctypes.c_void_p, "retained_object")) == (0x66, 0x55)
    assert (value(ctypes.c_int, "retained_count"), value(ctypes.c_int, "retained_flags")) == (1, 1)
    thread = threading.Thread(target=driver.graph_is_gone)  # the driver calls on a thread of its own
    thread.start()
    thread.join()
    ctypes.c_int.in_dll(driver, "capturing").value = 0
    runtime.keep_for_capture(0x77, Array())
    assert not runtime._kept


def test_an_object_is_kept_until_the_last_of_its_graphs_is_gone(driver: ctypes.CDLL) -> None:
    kept = object()
    ctypes.c_int.in_dll(driver, "capturing").value = 1
    runtime.keep_for_capture(0x77, kept)
    runtime.keep_for_capture(0x77, kept)
    ctypes.c_int.in_dll(driver, "capturing").value = 0
    driver.graph_is_gone()  # the second one
    runtime.keep_for_capture(0x77, None)
    assert list(runtime._kept.values()) == [kept]


def test_a_workspace_is_that_of_a_stream_or_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []
    number = 0  # of the capture, 0: none

    class Memory(np.ndarray):
        data = property(lambda self: types.SimpleNamespace(ptr=self.ctypes.data))

    def empty(size: int, dtype: str) -> np.ndarray:
        made.append(np.full(size, 0xFF, dtype).view(Memory))
        return made[-1]

    kept: list[Any] = []
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(empty=empty))
    monkeypatch.setattr(runtime, "_workspaces", {})
    monkeypatch.setattr(runtime, "capturing", lambda ptr: number > 0)
    monkeypatch.setattr(runtime, "_captured_graph", lambda ptr: (number, None))
    monkeypatch.setattr(runtime, "keep_for_capture", lambda ptr, memory: number and kept.append(memory))
    monkeypatch.setattr(runtime, "stream", lambda ptr: contextlib.nullcontext())
    monkeypatch.setattr(runtime, "_allocations_allowed", contextlib.nullcontext)
    size = runtime.FLAG_BYTES + 1000
    first = runtime.workspace(0, 0x10, size)
    assert first == made[0].ctypes.data and not made[0][: runtime.FLAG_BYTES].any() and made[0][-1] == 0xFF
    assert runtime.workspace(0, 0x10, size - 8) == first != runtime.workspace(0, 0x20, size)
    assert runtime.workspace(1, 0x10, size) != first and len(made) == 3
    for graph in (7, 8):
        number = graph
        mine = runtime.workspace(0, 0x10, size)
        assert runtime.workspace(0, 0x10, size) == mine != first and kept[-1] is made[-1]
        assert runtime.workspace(0, 0x20, size) != mine  # a branch of the graph
    number = 0
    assert runtime.workspace(0, 0x10, size) == first and len(made) == 7 and len(kept) == 4
    larger = runtime.workspace(0, 0x10, 2 * size)
    assert larger != first and runtime.workspace(0, 0x10, size) == larger
    per_thread = [runtime.workspace(0, 2, size)]
    thread = threading.Thread(target=lambda: per_thread.append(runtime.workspace(0, 2, size)))
    thread.start()
    thread.join()
    assert len(set(per_thread)) == 2 and runtime.workspace(0, 2, size) == per_thread[0]
    for ptr in range(1, 40):  # no stream keeps one for ever
        runtime.workspace(0, ptr, size)
    assert len(runtime._workspaces) == 16


def test_capturing_is_asked_of_the_stream(driver: ctypes.CDLL) -> None:
    for state in (0, 1, 2):  # none, active, invalidated
        ctypes.c_int.in_dll(driver, "capturing").value = state
        assert runtime.capturing(0x77) == (state != 0)
        assert not runtime.capturing(0x78)


def test_the_drivers_structs_have_the_drivers_sizes() -> None:
    assert ctypes.sizeof(runtime._Config) == 56 and runtime._Config.stream.offset == 32
    assert runtime._Config.attributes.offset == 40 and runtime._Config.count.offset == 48
    assert ctypes.sizeof(runtime._Attribute) == 72 and runtime._Attribute.value.offset == 8


# --- load ------------------------------------------------------------------------------------------------------


def test_rows_are_loaded_once(folder: Path, compiled: list, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    cupy = fake_cupy(monkeypatch)
    loaded = []

    class Module:
        def load(self, cubin: bytes) -> None:
            loaded.append(cubin)

        def get_function(self, entry: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(ptr=len(loaded) * 1000 + len(entry))

    class Device:
        def __init__(self, index: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *_: Any) -> None: ...

    cupy.cuda.Module, cupy.cuda.Device = Module, Device
    raised = []
    cupy.cuda.driver = types.SimpleNamespace(funcSetAttribute=lambda *a: raised.append(a))
    monkeypatch.setattr(runtime, "_functions", {})
    monkeypatch.setattr(runtime, "_modules", [])
    monkeypatch.setattr(runtime, "target", lambda device: kernels.Target("sm_90a", 132, 227 << 10, True))
    rows = [row for row in KERNELS if row.linear]
    runtime.load(rows, 0)
    assert sorted(compiled) == sorted((row.name, "sm_90a") for row in rows) and len(loaded) == len(rows)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(folder) in said and all(row.name in said for row in rows)
    for row in rows:
        assert set(runtime._functions[row.name, 0]) == set(row.entries(kernels.ARCHS["sm_90a"]))
    # The most shared memory that a block may have, for the kernels whose launches ask for it.
    large = [entry for row in rows if row.dynamic_smem for entry in runtime._functions[row.name, 0].values()]
    assert sorted(raised) == sorted((entry, 8, 227 << 10) for entry in large)
    runtime.load(rows, 0)
    some = next(iter(runtime._functions[rows[0].name, 0]))
    assert runtime.function(rows[0], some, 0) == runtime._functions[rows[0].name, 0][some]
    assert len(loaded) == len(rows) and capsys.readouterr().err == ""
    runtime.load(rows, 1)  # another GPU: loaded there too, but not compiled again
    assert len(compiled) == len(rows) and len(loaded) == 2 * len(rows) and capsys.readouterr().err == ""
    assert len(runtime._modules) == 2 * len(rows)


# --- on the GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_the_gpu_is_known() -> None:
    from cupy.cuda import Device
    from cupy.cuda import runtime as cudart

    device = Device().id
    found = runtime.target(device)
    properties = cudart.getDeviceProperties(device)
    assert found.sms == properties["multiProcessorCount"]
    assert kernels.arch_of(found.arch).cc == (properties["major"], properties["minor"])
    assert found.smem_bytes == properties.get("sharedMemPerBlockOptin", found.smem_bytes)
    assert runtime.target() == found
    with pytest.raises(runtime.DeviceError, match="there is no GPU cuda:99"):
        runtime.target(99)
    told = runtime.info()
    assert told["arch"] == found.arch and told["why_not"] is None and told["gpu"]
    arch = kernels.arch_of(found.arch)
    assert told["kernels"] == {row.name: bool(row.entries(arch)) for row in KERNELS}


@pytest.mark.gpu
def test_every_row_loads() -> None:
    arch = kernels.arch_of(runtime.target(0).arch)
    for row in KERNELS:
        functions = {entry: runtime.function(row, entry, 0) for entry in row.entries(arch)}
        assert all(functions.values()) and len(set(functions.values())) == len(functions)


FIRST = """
import time, sys
import cupy
cupy.zeros(1)  # the context
import numpy as np
import cufp8
w = np.zeros((64, 64), np.float32)
started = time.perf_counter()
layer = cufp8.Linear(w, device="cuda")
print(time.perf_counter() - started)
"""


@pytest.mark.gpu
def test_the_first_layer_of_a_machine_and_of_a_process(folder: Path) -> None:
    """A cold cache costs at most 15 s, a warm one 1.0 s."""
    for limit_s, said in ((15.0, True), (1.0, False)):
        done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True, timeout=120)
        assert ("compiling" in done.stderr) == said, done.stderr
        assert float(done.stdout) <= limit_s, f"{float(done.stdout):.2f} s"


@pytest.mark.gpu
def test_a_damaged_cache_is_repaired(folder: Path) -> None:
    arch = runtime.target(0).arch
    want = runtime.binary(SMALL, arch)
    path = runtime.cache_file(SMALL, arch)
    path.write_bytes(path.read_bytes()[: len(want) // 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "_functions", {})
        assert runtime.function(SMALL, "stream_copy", 0)
    assert runtime._read_cached(path) == want


@pytest.mark.gpu
@pytest.mark.sanitize
def test_the_copy_kernel_copies() -> None:
    import cupy

    for words, blocks in ((1, 1), (2048, 1), (2049, 2), (10_000, 3)):
        source = cupy.asarray(np.random.default_rng(words).integers(0, 2**32, words * 4, np.uint32))
        target = cupy.zeros_like(source)
        launcher = runtime.Launcher(SMALL, Launch("stream_copy", (blocks, 1, 1), COPY_THREADS), 0)
        launcher(0, source.data.ptr, target.data.ptr, words, 0)
        np.testing.assert_array_equal(target.get(), source.get())
        seen = cupy.zeros((blocks, STREAM_THREADS), cupy.uint32)
        launcher = runtime.Launcher(SMALL, Launch("stream_read", (blocks, 1, 1), STREAM_THREADS), 0)
        launcher(0, source.data.ptr, seen.data.ptr, words, 1)
        assert np.bitwise_xor.reduce(seen.get(), axis=None) == np.bitwise_xor.reduce(source.get())


@pytest.mark.gpu
def test_an_illegal_launch_is_an_error_with_a_name() -> None:
    launcher = runtime.Launcher(SMALL, Launch("stream_copy", (1, 1, 1), 2048), 0)  # no block is that large
    with pytest.raises(runtime.DeviceError, match=r"launching stream_copy on cuda:0: CUDA_ERROR_"):
        launcher(0, 0, 0, 0, 0)


@pytest.mark.gpu
def test_what_a_graph_holds_is_let_go_with_it() -> None:
    """Through CuPy's own graphs, with the real driver."""
    import cupy

    class Array:
        pass

    stream = cupy.cuda.Stream(non_blocking=True)
    busy = cupy.zeros(16, cupy.float32)
    busy += 1  # compiled before the capture
    cupy.cuda.runtime.deviceSynchronize()
    kept = [Array(), Array()]
    alive = [weakref.ref(one) for one in kept]
    with stream:
        stream.begin_capture()
        busy += 1
        for one in kept:
            runtime.keep_for_capture(stream.ptr, one)
        graph = stream.end_capture()
    kept.clear()
    del one
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    runtime.keep_for_capture(stream.ptr, None)  # not captured any more; frees what was released
    assert all(ref() for ref in alive)
    del graph
    gc.collect()
    deadline = time.monotonic() + 20
    while any(ref() for ref in alive) and time.monotonic() < deadline:
        time.sleep(0.01)
        runtime.keep_for_capture(stream.ptr, None)
    assert not any(ref() for ref in alive)
    assert float(busy[0]) == 4


EXIT = """
import cupy, numpy as np, cufp8
layer = cufp8.Linear(np.ones((64, 64), np.float32), device="cuda")
x = cupy.ones((2, 64), cupy.float16)
stream = cupy.cuda.Stream(non_blocking=True)
cupy.cuda.runtime.deviceSynchronize()
with stream:
    stream.begin_capture()
    y = layer(x)
    graph = stream.end_capture()
    graph.launch()
stream.synchronize()
print(float(y[0, 0]))
"""


@pytest.mark.gpu
def test_a_process_ends_well_with_a_graph_alive() -> None:
    """The driver may let go of what a graph holds when there is no interpreter any more."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.strip() == "64.0" and "Traceback" not in done.stderr, done.stderr


@pytest.mark.gpu
def test_the_cache_is_only_the_users(folder: Path) -> None:
    path = runtime.cache_file(SMALL, runtime.target(0).arch)
    runtime.binary(SMALL, runtime.target(0).arch)
    assert path.is_file() and not stat.S_IMODE(os.stat(path).st_mode) & 0o022


@pytest.mark.parametrize("by", ["use", "with"])
@pytest.mark.parametrize("ptr", [0, 77])
def test_a_callers_stream_stays_current(monkeypatch: pytest.MonkeyPatch, by: str, ptr: int) -> None:
    """CuPy's `with` puts back what the `with` around it set, and forgets what `use()` set."""
    current, stack = [None], [None]

    class Stream:
        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        @staticmethod
        def from_external(owner: Any) -> Stream:
            return Stream(owner.__cuda_stream__()[1])

        def use(self) -> None:
            current[0] = self

        def __enter__(self) -> None:
            stack.append(self)
            current[0] = self

        def __exit__(self, *_: Any) -> None:
            stack.pop()
            current[0] = stack[-1]

    Stream.null = Stream(0)
    cuda = types.SimpleNamespace(Stream=Stream, get_current_stream=lambda: current[0] or Stream.null)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    mine = Stream(5)
    mine.use() if by == "use" else mine.__enter__()
    with pytest.raises(KeyError), runtime.stream(ptr):
        assert current[0].ptr == ptr
        raise KeyError
    assert current[0] is mine


@pytest.mark.gpu
def test_a_layer_leaves_the_current_stream_alone() -> None:
    import cupy

    mine = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    mine.use()
    try:
        layer = cufp8.Linear(cupy.ones((16, 64), cupy.float32))
        layer(cupy.ones((300, 64), cupy.float32))
        assert cupy.cuda.get_current_stream().ptr == mine.ptr
    finally:
        before.use()
