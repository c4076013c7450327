"""Arrays of others in and out: NumPy, CuPy, torch, JAX, and anything else that speaks DLPack.

An adapter per library says where an array lies (`view`), which stream its work is ordered on (`stream`),
and makes results of the same kind (`maker`, `finish`). `seen` is what a call looks at when it has served an
array of that form before. torch and JAX are found through the arrays handed in and never imported from here.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cufp8.formats import FLOATS, FORMATS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KNOWN = "a NumPy, CuPy, torch or JAX array, or one with __dlpack__"

# Of `seen`: an array that only `view` can judge. No array lies at an odd address.
UNSEEN = 1, None


class View(NamedTuple):
    """Where an array lies. Strides count elements; device is None on the host."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int | None


class _NumPy:
    kind = "NumPy"

    def view(self, x: np.ndarray) -> View:
        size = x.dtype.itemsize or 1
        return View(
            x.__array_interface__["data"][0],
            x.shape,
            tuple(s // size for s in x.strides),
            x.dtype.name if x.dtype.isnative else x.dtype.str,
            None,
        )

    def array(self, x: np.ndarray) -> np.ndarray:
        return x if x.dtype.isnative else x.astype(x.dtype.newbyteorder("="))

    def from_host(self, like: Any, y: np.ndarray) -> np.ndarray:
        return y

    def writeable(self, x: np.ndarray) -> bool:
        return x.flags.writeable


class _CuPy:
    kind = "CuPy"

    def __init__(self) -> None:
        import cupy

        from cufp8 import runtime

        self.cupy = cupy
        self.current = cupy.cuda.get_current_stream
        self.keep = runtime.keep_for_capture

    def seen(self, x: Any) -> tuple[int, Any]:
        """x's address, and its form: all else that decides how a call is served, as a key."""
        data = x.data
        return data.ptr, (x.shape, x.strides, x.dtype, data.device_id)

    def view(self, x: Any) -> View:
        size = x.dtype.itemsize
        return View(
            x.data.ptr,
            x.shape,
            tuple(s // size for s in x.strides),
            x.dtype.name,
            x.data.device_id,
        )

    def array(self, x: Any) -> Any:
        return x

    def stream(self, x: Any) -> int:
        return self.current(x.data.device_id).ptr

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[int], tuple[Any, int]]:
        """Makes results of one shape and dtype: called with the stream, it gives an array and its address."""
        ndarray, kind = self.cupy.ndarray, np.dtype(FLOATS.get(dtype, dtype))

        def make(stream: int) -> tuple[Any, int]:
            y = ndarray(shape, kind)  # all that cupy.empty does
            if stream:
                self.keep(stream, y)
            return y, y.data.ptr

        return make

    def contiguous(self, x: Any) -> Any:
        y, stream = self.cupy.ascontiguousarray(x), self.stream(x)
        if stream:
            self.keep(stream, y)
        return y

    def finish(self, x: Any, y: Any, stream: int) -> Any:
        return y

    def writeable(self, x: Any) -> bool:
        return True


class _Torch:
    kind = "torch"

    def __init__(self) -> None:
        torch = self.torch = sys.modules["torch"]
        names = ("bfloat16", "float16", "float32", "float64", "uint8", *FORMATS)
        self.dtypes = {n: getattr(torch, n) for n in names if hasattr(torch, n)}  # older ones have fewer
        self.names = {kind: n for n, kind in self.dtypes.items()}
        self.grad_enabled = torch.is_grad_enabled
        raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        # torch's public way builds a Stream object first: 8 microseconds against 0.2.
        self.raw_stream = raw or (lambda i: torch.cuda.current_stream(i).cuda_stream)
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        quick = getattr(guards, "_empty_strided_cuda", None)
        self.empty_strided = quick or (lambda *of: torch.empty_strided(of[0], of[1], dtype=of[2], device="cuda"))

    def seen(self, x: Any) -> tuple[int, Any]:
        if x.requires_grad:
            return UNSEEN
        return x.data_ptr(), (x.shape, x.stride(), x.dtype, x.device)

    def view(self, x: Any) -> View:
        if x.requires_grad and self.grad_enabled():
            raise RuntimeError(
                "Linear: the torch tensor requires grad and grad mode is on, but no gradient flows through "
                "cufp8 yet; call under torch.no_grad() or pass x.detach()."
            )
        return self._view(x)

    def _view(self, x: Any) -> View:
        device = x.device
        if device.type == "cuda":
            index = device.index
        elif device.type == "cpu":
            index = None
        else:
            raise ValueError(f"a torch tensor on {device} was given; allowed are cpu and cuda.")
        return View(x.data_ptr(), x.shape, x.stride(), self.names.get(x.dtype) or str(x.dtype), index)

    def array(self, x: Any) -> Any:
        x = x.detach().resolve_neg()
        v = self._view(x)
        if v.device is not None:
            return _borrow(v, x)
        if x.dtype is self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(BFLOAT16)
        if v.dtype in FORMATS:
            return x.view(self.torch.uint8).numpy().view(FORMATS[v.dtype].dtype)
        return x.numpy()

    def stream(self, x: Any) -> int:
        return self.raw_stream(x.get_device())

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[int], tuple[Any, int]]:
        # torch.empty goes through torch's dispatcher, 1.2 us longer; torch's compiled code calls this instead. It takes
        # the GPU that torch holds for current, which need not be the driver's.
        empty, empty_strided, kind = self.torch.empty, self.empty_strided, self.dtypes[dtype]
        strides = _strides(shape)

        def make(stream: int) -> tuple[Any, int]:
            y = empty_strided(shape, strides, kind)
            if y.get_device() != device:
                y = empty(shape, dtype=kind, device=f"cuda:{device}")
            return y, y.data_ptr()

        return make

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def finish(self, x: Any, y: Any, stream: int) -> Any:
        return y

    def from_host(self, like: Any, y: np.ndarray) -> Any:
        if y.dtype == BFLOAT16:
            return self.torch.from_numpy(y.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(y)

    def writeable(self, x: Any) -> bool:
        return True


class _Jax:
    kind = "JAX"

    def __init__(self) -> None:
        self.jax = sys.modules["jax"]
        self.copy = self.jax.jit(self.jax.numpy.copy)  # as jnp.copy, but found by JAX's C++: 6 us against 30
        self.borrowed: deque[tuple[Any, Any]] = deque()  # (result, arrays it is made from)
        self.lock = threading.Lock()

    def seen(self, x: Any) -> tuple[int, Any]:
        return UNSEEN

    def view(self, x: Any) -> View:
        if isinstance(x, self.jax.core.Tracer):
            raise TypeError(
                "Linear: x is a JAX tracer, so the call stands inside jit, grad or vmap, which cufp8 does not "
                "support yet; call the layer on concrete arrays."
            )
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(f"a JAX array on {len(devices)} devices was given; allowed is one device.")
        device = next(iter(devices))
        strides = _strides(x.shape)
        if device.platform == "cpu":
            return View(0, x.shape, strides, x.dtype.name, None)
        index = device.local_hardware_id
        return View(x.unsafe_buffer_pointer(), x.shape, strides, x.dtype.name, index)

    def array(self, x: Any) -> Any:
        v = self.view(x)
        if v.device is None:
            return np.asarray(x)
        return _borrow(v, (x, self._capsule(x)))

    def _capsule(self, x: Any) -> Any:
        """A DLPack capsule; taking it makes CuPy's current stream wait until x is there."""
        import cupy

        # DLPack has no 0 on CUDA: 1 is the legacy default stream.
        return x.__dlpack__(stream=cupy.cuda.get_current_stream().ptr or 1)

    def stream(self, x: Any) -> int:
        import cupy

        self._capsule(x)
        return cupy.cuda.get_current_stream().ptr

    def maker(self, shape: tuple[int, ...], dtype: str, device: int) -> Callable[[int], tuple[Any, int]]:
        return adapter_for("cupy").maker(shape, dtype, device)

    def contiguous(self, x: Any) -> Any:
        return x

    def finish(self, x: Any, y: Any, stream: int) -> Any:
        """y in a buffer of JAX's own. x and y are kept until it is filled.

        JAX frees x, and would give y's block back to CuPy, without asking which stream still works on them.
        """
        result = self.copy(self.jax.dlpack.from_dlpack(y))
        with self.lock:
            self.borrowed.append((result, (x, y)))
            while self.borrowed and _is_ready(self.borrowed[0][0]):
                self.borrowed.popleft()
        return result

    def from_host(self, like: Any, y: np.ndarray) -> Any:
        return self.jax.device_put(y, next(iter(like.devices())))

    def writeable(self, x: Any) -> bool:
        return False


def _is_ready(result: Any) -> bool:
    """Whether a JAX array has been filled; for one that was deleted meanwhile it waits until it must have been."""
    if result.is_deleted():
        import cupy

        cupy.cuda.runtime.deviceSynchronize()
        return True
    return result.is_ready()


class _DLPack:
    """Any other library: its arrays are read through DLPack, results are NumPy's or CuPy's."""

    kind = "DLPack"

    def stream(self, x: Any) -> int:
        return adapter_for("cupy").current().ptr

    def array(self, x: Any) -> Any:
        kind = int(x.__dlpack_device__()[0])
        if kind in (1, 3):  # kDLCPU, kDLCUDAHost
            try:
                return np.from_dlpack(x)
            except Exception as e:
                raise TypeError(
                    f"NumPy cannot take a {type(x).__name__} through DLPack ({e}); convert it to a NumPy array first."
                ) from None
        if kind in (2, 13):  # kDLCUDA, kDLCUDAManaged
            import cupy

            return cupy.from_dlpack(x)
        raise ValueError(f"a DLPack array on device type {kind} was given; allowed are CPU and CUDA.")

    def writeable(self, x: Any) -> bool:
        return False


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of an array whose rows follow one another."""
    return tuple(math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape)))


def _borrow(v: View, owner: Any) -> Any:
    """A CuPy array over memory of another library, which `owner` keeps alive. float8 comes as uint8."""
    import cupy

    try:
        dtype = np.dtype("uint8" if v.dtype in FORMATS else FLOATS.get(v.dtype, v.dtype))
    except TypeError:
        raise TypeError(f"a {v.dtype} array on a GPU was given, which CuPy does not know.") from None
    extent = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True)) + 1 if 0 not in v.shape else 0
    memory = cupy.cuda.UnownedMemory(v.ptr, extent * dtype.itemsize, owner, v.device)
    strides = tuple(s * dtype.itemsize for s in v.strides)
    with cupy.cuda.Device(v.device):
        return cupy.ndarray(v.shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


_MAKERS = {"numpy": _NumPy, "cupy": _CuPy, "torch": _Torch, "jax": _Jax}
_BY_LIBRARY: dict[str, Any] = {}
_BY_TYPE: dict[type, Any] = {}


def adapter_for(library: str) -> Any:
    """The adapter of a library that is already imported (or, for CuPy, can be)."""
    found = _BY_LIBRARY.get(library)
    if found is None:
        found = _BY_LIBRARY[library] = _MAKERS[library]()
    return found


def adapter(x: Any) -> Any:
    """The adapter of the library that x belongs to, or None where x is no array of any.

    Subclasses count: torch.nn.Parameter is torch's.
    """
    found = _BY_TYPE.get(type(x))
    if found is None:
        found = _find(x)
        if found is not None:
            _BY_TYPE[type(x)] = found
    return found


def _find(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return adapter_for("numpy")
    for base in type(x).__mro__:
        library = base.__module__.partition(".")[0]
        if library == "cupy" and hasattr(x, "__cuda_array_interface__"):
            return adapter_for("cupy")
        if library == "torch" and hasattr(x, "data_ptr"):
            return adapter_for("torch")
        if library in ("jax", "jaxlib") and hasattr(x, "aval"):
            return adapter_for("jax")
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _BY_LIBRARY.setdefault("dlpack", _DLPack())
    return None


def array(x: Any, what: str) -> Any:
    """x as a NumPy or a CuPy array, without a copy where it lies in such memory already.

    A CuPy array that borrows another library's memory is ordered on that library's stream (`stream`).

    Raises
    ------
    TypeError
        If x is no array; `what` names it in the text.
    """
    found = adapter(x)
    if found is None:
        raise TypeError(f"{what} is a {type(x).__name__}; allowed is {KNOWN}.")
    return found.array(x)


def stream(x: Any) -> int:
    """The stream on which the library of x (an array on a GPU) orders its work, as an integer."""
    found = adapter(x)
    return found.stream(x)


def on_host(a: Any) -> bool:
    """Whether `array` gave a NumPy array."""
    return isinstance(a, np.ndarray)


def to_host(a: Any) -> np.ndarray:
    """A NumPy array of a NumPy or CuPy array; not for the way of a call, for it waits until the GPU is idle."""
    if isinstance(a, np.ndarray):
        return a
    import cupy

    with a.device:
        cupy.cuda.runtime.deviceSynchronize()  # it may borrow what another library's stream is still writing
        return a.get()


def extent(v: View, itemsize: int) -> tuple[int, int]:
    """First and one-past-last address of an array."""
    if 0 in v.shape:
        return v.ptr, v.ptr
    low = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(v.shape, v.strides, strict=True) if s > 0)
    return v.ptr + low * itemsize, v.ptr + (high + 1) * itemsize


def rows(v: View) -> tuple[int, int] | None:
    """(m, elements from one row to the next) of [..., k] seen as [m, k], or None where that needs a copy."""
    shape, strides = v.shape, v.strides
    if len(shape) == 2:
        m, k = shape
        if k == 1 or strides[1] == 1:
            return m, strides[0]
        return None
    k = shape[-1]
    if k != 1 and strides[-1] != 1:
        return None
    m, step = 1, k
    for n, s in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if n == 1:
            continue
        if m == 1:
            step = s
        elif s != step * m:
            return None
        m *= n
    return m, step
