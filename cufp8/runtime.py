"""Compile, cache, load, launch: the only module that knows NVRTC and the CUDA driver.

CuPy's NVRTC binding compiles a file of kernels_cu/ for the GPU's exact target, with options of our own
(CuPy's RawModule would add -ftz=true and its own -arch); the cubin goes to a cache on disk; CuPy loads
it; cuLaunchKernelEx launches it, for CuPy knows neither programmatic dependent launch nor clusters.
"""

from __future__ import annotations

# tempfile and concurrent.futures come in where a kernel is compiled or loaded: `import cufp8` is quicker.
import ctypes
import hashlib
import itertools
import os
import re
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from cufp8.formats import FLOATS
from cufp8.kernels import (
    ARCHS,
    FLAG_BYTES,
    KERNELS,
    LINEAR_ARGS,
    ROWS,
    TENSOR_MAP_BYTES,
    BlockProblem,
    Kernel,
    Launch,
    Problem,
    ScaledProblem,
    Target,
    arch_of,
)


class DeviceError(RuntimeError):
    """No usable GPU, driver or compiler, or the driver refused a call."""


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the text carries its log and the options."""


# --- sources ---------------------------------------------------------------------------------------------


@cache
def sources_dir() -> Path:
    """The folder kernels_cu/: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels_cu", here.parent / "kernels_cu"):
        if (folder / "linear.cuh").is_file():
            return folder
    raise DeviceError(f"cufp8's kernels_cu folder is missing beside {here}; install cufp8 again.")


@cache
def sources(source: str) -> dict[str, bytes]:
    """A file of kernels_cu/ and all that it includes, by name, the file first."""
    found = {source: (sources_dir() / source).read_bytes()}
    for name in re.findall(rb'^#include "([^"]+)"', found[source], re.M):
        found.update(sources(name.decode()))
    return found


def options(row: Kernel, arch: str) -> tuple[str, ...]:
    """NVRTC's options. Not -ftz: a scale or a code's value may be subnormal in float32."""
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        f"-DARGS_BYTES={row.args.size}",
        f"-DLINEAR_ARGS_BYTES={LINEAR_ARGS.size}",
        *(f"-D{name}={value}" for name, value in row.defines),
    )


def _probes() -> list[Problem | ScaledProblem | BlockProblem]:
    """Problems whose launches stand for a row's rule in its digest."""
    linear = ((1024, 8192), (4096, 4096), (4096, 14336), (6144, 4096), (28672, 8192), (151936, 4096), (1000, 4097))
    scaled = ((4096, 4096), (4096, 14336), (14336, 4096), (7168, 16384), (28672, 8192), (1000, 4097))
    e4m3 = "float8_e4m3fn"
    return [
        *(
            Problem("FP8A16", (1, k), x, x, m, n, k, aligned16=k % 8 == 0)
            for n, k in linear
            for m in (1, 2, 8, 16, 32, 64, 100, 256, 257, 4096)
            for x in FLOATS
        ),
        *(
            ScaledProblem(e4m3, e4m3, "bfloat16", m, n, k, fast_accum=fast, aligned16=k % 16 == 0)
            for n, k in scaled
            for m in (1, 16, 64, 128, 256, 512, 4096)
            for fast in (True, False)
        ),
        *(BlockProblem("nvfp4", "nvfp4", "bfloat16", m, n, k) for n, k in scaled for m in (1, 64, 512)),
    ]


@cache
def digests() -> dict[str, str]:
    """sha256 per row of KERNELS over its sources, its constants, and how it would be launched. Needs no GPU."""
    found, probes = {}, _probes()
    for row in KERNELS:
        h = hashlib.sha256()
        for name, text in sorted(sources(row.source).items()):
            h.update(name.encode() + b"\0" + text + b"\0")
        h.update(repr((row.args.format, row.defines)).encode())
        for target in (Target("sm_90a", 132, 232448, True), Target("sm_80", 108, 166912, False)):
            served = [p for p in probes if row.takes is type(p) and row.serves(target, p)]
            h.update(repr([row.plan(target, p) if row.plan else p for p in served]).encode())
        found[row.name] = h.hexdigest()
    return found


# --- the GPU ---------------------------------------------------------------------------------------------


@cache
def why_not() -> str | None:
    """One sentence that says why no GPU is used, or None where one is."""
    try:
        import cupy
    except ImportError as e:
        if e.name and e.name.partition(".")[0] != "cupy":
            return f"CuPy is installed but does not import: {e}."
        return "CuPy is not installed; install cufp8[cuda13] (driver 580 or newer) or cufp8[cuda12]."
    runtime = cupy.cuda.runtime
    try:
        driver, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    except Exception as e:
        return f"the CUDA runtime cannot be asked: {e}."
    if driver == 0:
        return "there is no NVIDIA driver (libcuda.so.1 is missing or finds no GPU)."
    if driver // 1000 < built // 1000:
        return (
            f"the NVIDIA driver supports CUDA {driver // 1000}.{driver % 1000 // 10}, CuPy is built for "
            f"{built // 1000}.x; update the driver or install cufp8[cuda{driver // 1000}]."
        )
    try:
        if runtime.getDeviceCount() == 0:
            return "the driver finds no GPU."
    except Exception as e:
        return f"the driver finds no GPU: {e}."
    return None


def available() -> bool:
    """Whether a GPU, its driver and CuPy can be used."""
    return why_not() is None


def require() -> None:
    """Raise DeviceError unless `available()`."""
    reason = why_not()
    if reason:
        raise DeviceError(f"cufp8 cannot use a GPU: {reason}")


def current_device() -> int:
    """The index of the calling thread's current GPU."""
    import cupy

    return cupy.cuda.runtime.getDevice()


def target(device: int | None = None) -> Target:
    """What `kernels.pick` needs to know of a GPU.

    Raises
    ------
    DeviceError
        If there is no such GPU, or it is older than sm_75.
    """
    require()
    return _target(current_device() if device is None else device)


@cache
def _target(device: int) -> Target:
    from cupy.cuda import runtime

    count = runtime.getDeviceCount()
    if not 0 <= device < count:
        raise DeviceError(f"there is no GPU cuda:{device}; this machine has {count}, counted from 0.")

    def attribute(number: int) -> int:
        return runtime.deviceGetAttribute(number, device)

    cc = attribute(75), attribute(76)
    if cc < (7, 5):
        raise DeviceError(f"cuda:{device} has compute capability {cc[0]}.{cc[1]}; cufp8 needs 7.5 or newer.")
    name = next((a.name for a in ARCHS.values() if a.cc == cc), None)
    if name is None:
        name = f"sm_{cc[0]}{cc[1]}"
        warnings.warn(f"cufp8 has no table row for {name}: its generic kernels serve, untimed.", stacklevel=2)
    return Target(name, attribute(16), attribute(97), arch_of(name).proven)


# --- compile ---------------------------------------------------------------------------------------------


class Compiled(NamedTuple):
    """What NVRTC made of a file: machine code, its log (resources of each kernel too), seconds."""

    cubin: bytes
    log: str
    seconds: float


@cache
def nvrtc_version() -> tuple[int, int]:
    """NVRTC's version.

    Raises
    ------
    DeviceError
        If CuPy or NVRTC is missing, or NVRTC is older than 12.8.
    """
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except ImportError:
        raise DeviceError("CuPy, which binds NVRTC, is missing; install cufp8[cuda13] or [cuda12].") from None
    except Exception as e:
        raise DeviceError(
            f"NVRTC, CUDA's run-time compiler, cannot be loaded: {e}. Install nvidia-cuda-nvrtc (CUDA 13) or "
            "nvidia-cuda-nvrtc-cu12, or a CUDA toolkit of 12.8 or newer."
        ) from None
    if version < (12, 8):
        raise DeviceError(f"NVRTC {version[0]}.{version[1]} is too old; cufp8 needs CUDA 12.8 or newer.")
    return version


def compile(row: Kernel, arch: str) -> Compiled:
    """Compile a row's file for an arch with NVRTC; no GPU needed, no cache asked.

    Raises
    ------
    CompileError
        If NVRTC refuses; with its log and the options.
    DeviceError
        As `nvrtc_version`.
    """
    nvrtc_version()
    from cupy.cuda import nvrtc

    (name, text), *included = sources(row.source).items()
    line = options(row, arch)
    started = time.perf_counter()
    program = nvrtc.createProgram(
        text.decode(), name, [body for _, body in included], [header.encode() for header, _ in included]
    )
    try:
        nvrtc.compileProgram(program, line)
        return Compiled(nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program), time.perf_counter() - started)
    except nvrtc.NVRTCError as e:
        log = nvrtc.getProgramLog(program).strip() or "(NVRTC left no log)"
        raise CompileError(f"{name} does not compile for {arch}: {e}\noptions: {' '.join(line)}\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


# --- cache -----------------------------------------------------------------------------------------------


@cache
def cache_dir() -> Path:
    """Where cubins are kept: CUFP8_CACHE_DIR, else the user's cache folder, else (said once) a temporary one."""
    import tempfile

    wish = os.environ.get("CUFP8_CACHE_DIR")
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(wish) if wish else Path(base) / "cufp8"
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
        return folder
    except (OSError, RuntimeError) as e:
        folder = Path(tempfile.mkdtemp(prefix="cufp8-"))
        warnings.warn(
            f"cufp8's cache folder cannot be written ({e}): kernels are kept in {folder} and compiled again by the "
            "next process. Set CUFP8_CACHE_DIR to a folder that can be.",
            stacklevel=2,
        )
        return folder


def cache_file(row: Kernel, arch: str) -> Path:
    """The row's file in the cache; its name is the digest of all that the cubin depends on."""
    h = hashlib.sha256(repr((arch, options(row, arch), nvrtc_version())).encode())
    for name, text in sources(row.source).items():
        h.update(name.encode() + b"\0" + text + b"\0")
    return cache_dir() / f"{row.name}-{arch}-{h.hexdigest()[:32]}.cubin"


def _read_cached(path: Path) -> bytes | None:
    """The cubin in a cache file: 32 bytes of sha256, then the code. None if it is absent, cut or altered."""
    try:
        blob = path.read_bytes()
    except OSError:
        return None
    digest, cubin = blob[:32], blob[32:]
    return cubin if cubin and hashlib.sha256(cubin).digest() == digest else None


def binary(row: Kernel, arch: str) -> bytes:
    """The row's cubin for an arch, from the cache or compiled into it."""
    import tempfile

    path = cache_file(row, arch)
    cubin = _read_cached(path)
    if cubin is None:
        cubin = compile(row, arch).cubin
        try:
            # Written beside and moved: two processes may compile at once, the later one wins, none reads a part.
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, delete=False) as f:
                f.write(hashlib.sha256(cubin).digest() + cubin)
            try:
                os.chmod(f.name, 0o644)  # a folder may serve several users
                os.replace(f.name, path)
            except OSError:
                os.unlink(f.name)
                raise
        except OSError as e:
            warnings.warn(f"cufp8 cannot write {path}: {e}; it compiles again next time.", stacklevel=2)
    return cubin


# --- load ------------------------------------------------------------------------------------------------

_functions: dict[tuple[str, int], dict[str, int]] = {}  # (row, device) -> entry -> CUfunction
_modules: list[Any] = []  # never unloaded: a graph may hold their kernels
_loading = threading.Lock()


def load(rows: Iterable[Kernel], device: int) -> None:
    """Compile where needed (several at once) and load the rows' kernels on a GPU."""
    from concurrent.futures import ThreadPoolExecutor

    with _loading:
        arch = target(device).arch
        missing = [row for row in rows if (row.name, device) not in _functions and row.entries(arch_of(arch))]
        if not missing:
            return
        import cupy

        absent = [row for row in missing if _read_cached(cache_file(row, arch)) is None]
        if absent:
            names = ", ".join(row.name for row in absent)
            print(f"cufp8: compiling {names} for {arch} (once; kept in {cache_dir()})", file=sys.stderr)
        with ThreadPoolExecutor(max(1, len(absent))) as pool:
            cubins = list(pool.map(lambda row: binary(row, arch), missing))
        with cupy.cuda.Device(device):
            for row, cubin in zip(missing, cubins, strict=True):
                module = cupy.cuda.Module()
                module.load(cubin)
                _modules.append(module)
                found = {entry: module.get_function(entry).ptr for entry in row.entries(arch_of(arch))}
                if row.dynamic_smem:  # the limit belongs to the kernel, not to a launch: as high as it goes
                    for entry in found.values():
                        cupy.cuda.driver.funcSetAttribute(entry, _MAX_DYNAMIC_SMEM, target(device).smem_bytes)
                _functions[row.name, device] = found


def function(row: Kernel, entry: str, device: int) -> int:
    """The CUfunction of a kernel as an integer, compiled and loaded if it is not yet."""
    if (row.name, device) not in _functions:
        load([row], device)
    return _functions[row.name, device][entry]


# --- launch ----------------------------------------------------------------------------------------------


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a value of 64 bytes at offset 8."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16)]


_POINTERS_STRIDES = struct.Struct("@PPPPPqq")  # what LINEAR_ARGS begins with
_CLUSTER, _PROGRAMMATIC_LAUNCH = 4, 6  # CUlaunchAttributeID
_MAX_DYNAMIC_SMEM = 8  # CUfunction_attribute


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        raise DeviceError(f"the NVIDIA driver's library cannot be loaded: {e}.") from None


def _check(status: int, what: str) -> None:
    if status:
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(name))
        _driver().cuGetErrorString(status, ctypes.byref(text))
        known = (name.value or b"error %d" % status).decode(), (text.value or b"").decode()
        raise DeviceError(f"{what}: {known[0]} ({known[1]}).")


@cache
def copying() -> tuple[Callable[[int, int, int, int], None], Callable[[int, int], None], Callable[[int], bool]]:
    """From pinned memory to the current GPU: copy(to, from, bytes, stream), record(event, stream), is_done(event).

    A thread keeps the GIL in them: they return within microseconds; among a dozen threads to get it back takes longer.
    """
    _driver()
    library = ctypes.PyDLL("libcuda.so.1")
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    cu_copy, cu_record, cu_query = library.cuMemcpyHtoDAsync_v2, library.cuEventRecord, library.cuEventQuery
    cu_copy.argtypes, cu_record.argtypes, cu_query.argtypes = (
        (pointer, pointer, size, pointer),
        (pointer,) * 2,
        (pointer,),
    )

    def copy(to: int, source: int, nbytes: int, stream: int) -> None:
        if status := cu_copy(to, source, nbytes, stream):
            _check(status, "copying to the GPU")

    def record(event: int, stream: int) -> None:
        if status := cu_record(event, stream):
            _check(status, "copying to the GPU")

    return copy, record, lambda event: not cu_query(event)


class Launcher:
    """One kernel with its geometry on one GPU; called with a stream and the fields of its argument block.

    The argument block and the launch configuration are made once per thread; a call rewrites the fields.
    """

    def __init__(self, row: Kernel, launch: Launch, device: int, pdl: bool = False) -> None:
        self.row, self.launch, self.device = row, launch, device
        self.function = ctypes.c_void_p(function(row, launch.entry, device))
        self.attributes = [(_PROGRAMMATIC_LAUNCH, (1,))] if pdl else []
        if launch.split > 1:
            self.attributes.append((_CLUSTER, (launch.split, 1, 1)))
        self.pack, self.fields = row.args.pack_into, bytes(row.args.size)
        self.cu_launch = _driver().cuLaunchKernelEx
        self.local = threading.local()

    def _slots(self) -> tuple[Any, ...]:
        """This thread's argument block and configuration; also makes the GPU's context this thread's."""
        import cupy

        cupy.cuda.runtime.setDevice(self.device)
        block = ctypes.create_string_buffer(self.fields, len(self.fields))
        params = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        attributes = (_Attribute * max(1, len(self.attributes)))()
        for slot, (number, values) in zip(attributes, self.attributes, strict=False):
            slot.id = number
            for i, value in enumerate(values):
                slot.value[i] = value
        config = _Config(
            self.launch.grid,
            (self.launch.block, 1, 1),
            self.launch.smem_bytes,
            None,
            ctypes.addressof(attributes),
            len(self.attributes),
        )
        self.local.slots = slots = (block, config, ctypes.byref(config), params, attributes)
        return slots

    def __call__(self, stream: int, *fields: int) -> None:
        """Launch on `stream`. The calling thread's current GPU must be the launcher's."""
        try:
            block, config, config_ref, params, _ = self.local.slots
        except AttributeError:
            block, config, config_ref, params, _ = self._slots()
        self.pack(block, 0, *fields)
        config.stream = stream
        status = self.cu_launch(config_ref, self.function, params, None)
        if status:
            _check(status, f"launching {self.launch.entry} on cuda:{self.device}")


@lru_cache(256)
def launcher(name: str, launch: Launch, device: int) -> Launcher:
    """The `Launcher` of a row of KERNELS, made once: for kernels that many layers are made with."""
    return Launcher(row(name), launch, device)


class Product(Launcher):
    """A linear kernel over one weight, which `queue` gives its x and y.

    `weight`: addresses of codes, scale and bias. `rest`: the fields after the strides, from m, n, k on. Both are
    written once per thread.
    """

    def __init__(
        self, row: Kernel, launch: Launch, device: int, pdl: bool, weight: tuple[int, int, int], rest: tuple[int, ...]
    ) -> None:
        super().__init__(row, launch, device, pdl)
        self.weight, self.box, (self.m, _, self.k) = weight, launch.box, rest[:3]
        self.fields = row.args.pack(0, *weight, 0, 0, 0, *rest, *((b"",) if self.box else ()))

    def queue(self, stream: int, x: int, x_stride: int, y: int, y_stride: int) -> None:
        """Launch on `stream`, as a Launcher does: 0.3 us sooner on the host, for it passes on a third of the fields."""
        try:
            block, config, config_ref, params, _ = self.local.slots
        except AttributeError:
            block, config, config_ref, params, _ = self._slots()
        codes, scale, bias = self.weight
        _POINTERS_STRIDES.pack_into(block, 0, x, codes, scale, bias, y, x_stride, y_stride)
        if self.box:
            block[-TENSOR_MAP_BYTES:] = tensor_map(x, self.m, self.k, x_stride, self.box)
        config.stream = stream
        status = self.cu_launch(config_ref, self.function, params, None)
        if status:
            _check(status, f"launching {self.launch.entry} on cuda:{self.device}")


@lru_cache(4096)
def tensor_map(x: int, rows: int, columns: int, stride: int, box: int, size: int = 2) -> bytes:
    """A CUtensorMap: how kernels copy x, values [rows, columns] of `size` bytes at an address.

    Rows are `stride` values apart; x and rows start on 16 bytes. A copy brings `box` rows of 128 bytes, zeros for what
    lies outside, or stores them but for that.
    """
    room = ctypes.create_string_buffer(TENSOR_MAP_BYTES + 64)
    at = -(-ctypes.addressof(room) // 64) * 64
    swizzle_128, promote_256 = 3, 3  # CUtensorMapSwizzle, CUtensorMapL2promotion
    kind = {1: 0, 2: 1, 4: 2}[size]  # CUtensorMapDataType: unsigned integers
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), kind, 2, ctypes.c_void_p(x),
        (ctypes.c_uint64 * 2)(columns, rows), (ctypes.c_uint64 * 1)(size * stride),
        (ctypes.c_uint32 * 2)(128 // size, box),
        (ctypes.c_uint32 * 2)(1, 1), 0, swizzle_128, promote_256, 0,
    )  # fmt: skip
    _check(status, f"making a tensor map of [{rows}, {columns}] at {x:#x}")
    return ctypes.string_at(at, TENSOR_MAP_BYTES)


class _External:
    """A stream of another library, as CuPy's protocol wants it."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr


@contextmanager
def stream(ptr: int) -> Iterator[None]:
    """A context in which CuPy allocates and works on the stream of that address (0: the default stream)."""
    import cupy

    before = cupy.cuda.get_current_stream()
    try:
        with cupy.cuda.Stream.from_external(_External(ptr)) if ptr else cupy.cuda.Stream.null:
            yield
    finally:  # CuPy forgets a stream that was made the current one by `use()`
        if cupy.cuda.get_current_stream().ptr != before.ptr:
            before.use()


# --- captures --------------------------------------------------------------------------------------------


def capturing(stream: int) -> bool:
    """Whether work on the stream is being captured into a graph."""
    status = ctypes.c_int()
    _check(_driver().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status)), "asking for a capture")
    return status.value != 0


_kept: dict[int, Any] = {}  # what graphs write or read, until they are gone; a key for each graph that does
_keys = itertools.count(1)
_released: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(key: int | None) -> None:
    # The driver calls this on a thread of its own, where no CUDA call is allowed: freeing waits.
    _released.append(key or 0)


def _captured_graph(stream: int) -> tuple[int, ctypes.c_void_p]:
    """The number of the capture that the stream is in and its graph; 0 outside of a capture."""
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    _check(
        _driver().cuStreamGetCaptureInfo_v2(
            ctypes.c_void_p(stream),
            ctypes.byref(status),
            ctypes.byref(number),
            ctypes.byref(graph),
            None,
            None,
        ),
        "asking for the captured graph",
    )
    return number.value if status.value else 0, graph


def keep_for_capture(stream: int, kept: Any) -> None:
    """If the stream is being captured, keep an object for as long as the graph, or an executable of it, lives."""
    while _released:
        _kept.pop(_released.pop(), None)
    if not capturing(stream):
        return
    driver, (_, graph) = _driver(), _captured_graph(stream)
    key = next(_keys)
    holder = ctypes.c_void_p()
    no_destructor_sync = 1  # CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, the only flag there is
    _check(
        driver.cuUserObjectCreate(ctypes.byref(holder), ctypes.c_void_p(key), _release, 1, no_destructor_sync),
        "making a user object",
    )
    move = 1  # CU_GRAPH_USER_OBJECT_MOVE: the graph takes our reference over
    _check(driver.cuGraphRetainUserObject(graph, holder, 1, move), "handing an array to the graph")
    _kept[key] = kept


_PER_THREAD = 2  # cudaStreamPerThread: for each thread another stream of that address
# GPU, stream, thread, captured -> number of the capture, memory
_workspaces: dict[tuple[int, int, int, bool], tuple[int, Any]] = {}


def workspace(device: int, ptr: int, size: int) -> int:
    """Address of `size` bytes on the GPU for the launches on the stream of that address, which come one after another.

    A captured graph has its own for each of its streams. The first FLAG_BYTES are zeros; who writes there leaves zeros.
    """
    number = _captured_graph(ptr)[0] if capturing(ptr) else 0
    key = device, ptr, threading.get_ident() if ptr == _PER_THREAD else 0, number > 0
    found, memory = _workspaces.get(key, (0, None))
    if memory is None or found != number or memory.nbytes < size:
        import cupy

        with stream(ptr), _allocations_allowed():
            memory = cupy.empty(size, "uint8")
            memory[:FLAG_BYTES].fill(0)
        keep_for_capture(ptr, memory)
        if len(_workspaces) >= 16:
            del _workspaces[next(iter(_workspaces))]
        _workspaces[key] = number, memory
    return memory.data.ptr


@contextmanager
def _allocations_allowed() -> Iterator[None]:
    """Within, this thread may ask the driver for memory while streams are being captured."""
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    _check(_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "changing the mode of captures")
    try:
        yield
    finally:
        _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # now the mode that was before


# --- report ----------------------------------------------------------------------------------------------


def info() -> dict[str, Any]:
    """Versions, GPU, cache, kernels and source digests, as `cufp8 info --json` prints them."""
    from cufp8 import __version__

    found: dict[str, Any] = {
        "version": __version__,
        "gpu": None,
        "arch": None,
        "driver": None,
        "cuda": None,
        "nvrtc": None,
        "cupy": None,
        "cache_dir": str(cache_dir()),
        "cache_bytes": sum(f.stat().st_size for f in cache_dir().glob("*.cubin")),
        "why_not": why_not(),
        "kernels": {},
        "sources": digests(),
    }
    if sys.modules.get("cupy"):
        found["cupy"] = sys.modules["cupy"].__version__
        try:
            found["nvrtc"] = ".".join(map(str, nvrtc_version()))
        except DeviceError:
            pass
    if available():
        import cupy

        device = current_device()
        here = target(device)
        version = cupy.cuda.runtime.driverGetVersion()
        found["gpu"] = cupy.cuda.runtime.getDeviceProperties(device)["name"].decode()
        found["arch"] = here.arch
        found["driver"] = _driver_version()
        found["cuda"] = f"{version // 1000}.{version % 1000 // 10}"
        found["kernels"] = {row.name: bool(row.entries(arch_of(here.arch))) for row in KERNELS}
    return found


def _driver_version() -> str | None:
    """The driver's own version, such as 580.95, which the kernel module tells."""
    try:
        found = re.search(r"\b(\d{3}\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def row(name: str) -> Kernel:
    """The row of KERNELS of that name."""
    return ROWS[name]
