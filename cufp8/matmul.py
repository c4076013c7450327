"""scaled_mm: y = a @ b.T with both operands in FP8, scaled by tensor or by row, or in FP8 or FP4 by blocks of a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from cufp8 import interop, kernels, runtime
from cufp8.formats import FLOATS
from cufp8.kernels import BLOCK_FORMATS, BLOCK_NUMBERS, SCALED_FORMATS, BlockProblem, Launch, ScaledProblem, pick
from cufp8.quantize import QuantizedTensor

_OUT = {name: i for i, name in enumerate(FLOATS)}  # ScaledOut in kernels_cu/scaled.cuh
_SIZES = {name: dtype.itemsize for name, dtype in FLOATS.items()}
_HOST_ROWS, _HOST_COLUMNS = 512, 2048  # of a and b that are widened at once on the host


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: Any = None,
    out_dtype: str = "bfloat16",
    fast_accum: bool = False,
    out: Any = None,
) -> Any:
    """y = a @ b.T of two FP8 matrices, or of two with scales for blocks of a row, in FP8 or FP4.

    y = round(fmaf(scale_a[m] * sum_k a[m, k] * b[n, k], scale_b[n], bias[n])): the sum, its product with scale_a, and
    the fmaf in float32; then one rounding, to out_dtype, ties to even. With block scales the sum is of codes times
    their scales, no product of which is rounded, and scale_a and scale_b are the global scales of NVFP4, else 1; if one
    is below 1 and the other is not, their product, rounded to float32, stands for both, so that nothing overflows that
    the result does not.

    Parameters
    ----------
    a
        QuantizedTensor [M, K], M at least 0, one float32 scale per tensor, block (-1, -1), or per row (token), (1, K).
        Or float4_e2m1fn with float8_e4m3fn scales of 16 (NVFP4), or float8_e8m0fnu scales of 32 (MXFP4, or MXFP8 with
        float8_e4m3fn or float8_e5m2), as `quantize_activations` and `quantize` make them.
    b
        QuantizedTensor [N, K], scaled per tensor or per row (channel), on the device of a. One of a and b may be
        float8_e5m2, else they are float8_e4m3fn. If a has block scales, so has b: any of those formats, not only a's.
        Rows may lie apart; codes in another order are copied first.
    bias
        None, or float32 [N] on the device of a.
    out_dtype
        "bfloat16", "float16" or "float32".
    fast_accum
        On a GPU of sm_90: True lets sums of any K stay in the tensor cores' registers, which cut each product and each
        sum of 32 to 13 bits behind the point; False adds every 128 of K in float32. Elsewhere, and with block scales,
        the same as False.
    out
        Where the result goes: any library's array on the device of a, [M, N] of out_dtype, rows contiguous; it may
        share memory with nothing that is read. None: a new array.

    Returns
    -------
    array
        out, or [M, N]: NumPy's on the CPU, CuPy's on a GPU. There the work is queued on the stream of out's library,
        without out on CuPy's current one. A capture takes all but the first call of a kind, which compiles.

    Raises
    ------
    TypeError
        If a or b is no QuantizedTensor, bias no float32 array, or out no array that can be written.
    ValueError
        If dtypes of a and b are no such pair, their K differ, a scale is per group, per block of several rows or, of
        one of the two alone, per block of a row, out_dtype is not one of the three, bias or out does not fit, out
        overlaps what is read, or not all are on one device.
    runtime.DeviceError
        If the driver refuses the launch.

    Source: OCP 8-bit Floating Point Specification (OFP8) 1.0, section 5, and OCP Microscaling Formats (MX)
    Specification 1.0, sections 5 and 6.2, for the formats and their product; DeepSeek-V3 Technical Report, section
    3.5.2, for the bits that tensor cores keep.
    """
    _check_operands(a, b, out_dtype)
    if interop.on_host(a.codes):
        return on_host(a, b, bias, out_dtype, out)
    import cupy

    codes = a.codes
    device = codes.data.device_id
    if cupy.cuda.runtime.getDevice() != device:
        with cupy.cuda.Device(device):
            return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum, out=out)

    (m, k), n = a.shape, b.shape[0]
    bias = None if bias is None else _check_bias(bias, n, device)
    if out is None:
        library = interop.adapter_for("cupy")
        stream = library.stream(codes)
        y, y_ptr = library.maker((m, n), out_dtype, device)(stream)
        y_stride = n
    else:
        library, y = interop.adapter(out), out
        read = a.codes, a.scale, a.global_scale, b.codes, b.scale, b.global_scale, bias
        y_ptr, y_stride = _check_out(library, out, (m, n), out_dtype, device, read)
        stream = library.stream(out)
    bias_ptr = 0 if bias is None else bias.data.ptr
    if m == 0:
        return y
    if a._scaled_in_blocks:
        _queue_blocks(stream, device, (m, n, k), out_dtype, a, b, bias_ptr, (y_ptr, y_stride))
        return y
    (a_codes, a_stride), (b_codes, b_stride) = _rows(codes, stream), _rows(b.codes, stream)
    a_ptr, b_ptr = a_codes.data.ptr, b_codes.data.ptr
    aligned = not (a_ptr | b_ptr | a_stride | b_stride) & 15
    launcher, launch = _launcher(device, a.dtype, b.dtype, out_dtype, m, n, k, bool(fast_accum), aligned)
    _queue(
        stream, launcher, launch, (m, n, k), out_dtype, aligned, False,
        (a_ptr, a_stride, a.scale.data.ptr, _step(a)), (b_ptr, b_stride, b.scale.data.ptr, _step(b)), bias_ptr,
        (y_ptr, y_stride),
    )  # fmt: skip
    return y


def _queue(
    stream: int,
    launcher: runtime.Launcher,
    launch: Launch,
    shape: tuple[int, int, int],
    out_dtype: str,
    aligned: bool,
    weights: bool,
    a: tuple[int, int, int, int],
    b: tuple[int, int, int, int],
    bias: int,
    y: tuple[int, int],
) -> None:
    """Launch on `stream`. a and b: address, bytes from one row to the next, and both of the scales; y: the first two.

    `weights`: no kernel writes b at that time, so that it may be read before the kernel before this one is done.
    """
    (m, n, k), size = shape, _SIZES[out_dtype]
    (a_ptr, a_stride, scale_a, step_a), (b_ptr, b_stride, scale_b, step_b), (y_ptr, y_stride) = a, b, y
    whole = not (y_ptr | y_stride * size | n * size) & 15
    of_a, of_b, of_y = launch.boxes
    maps = (
        runtime.tensor_map(a_ptr, m, k, a_stride, of_a, 1) if of_a else b"",
        runtime.tensor_map(b_ptr, n, k, b_stride, of_b, 1) if of_b else b"",
        runtime.tensor_map(y_ptr, m, n, y_stride, of_y, size) if of_y and whole else b"",
    )
    workspace = launch.workspace and runtime.workspace(launcher.device, stream, launch.workspace)
    launcher(
        stream, a_ptr, b_ptr, scale_a, scale_b, bias, y_ptr, workspace, a_stride, b_stride, y_stride,
        m, n, k, _OUT[out_dtype], step_a, step_b, aligned, whole, weights, launch.stages, launch.split,
        *launch.fields, *maps,
    )  # fmt: skip


def queue_of(
    problem: ScaledProblem,
    b: tuple[int, int, int, int],
    bias: int,
    step_a: int,
    *,
    a_stride: int,
    device: int,
    pdl: bool,
) -> Callable[[int, int, int, int, int], None]:
    """`scaled_mm` with one b in prepared memory on a GPU, for many calls.

    Called with (stream, address of a, address of its scales, address of y, values from one row of y to the next). b:
    address, bytes from one row to the next, address of scales and elements from one to the next, 0 where all rows have
    one; `step_a` and `a_stride` are the same of a, bias an address or 0. With pdl, b is read before the kernel before
    this one is done.
    """
    target = runtime.target(device)
    row = pick(target, problem)
    launch, p = row.plan(target, problem), problem
    pdl = pdl and kernels.arch_of(target.arch).pdl
    launcher = runtime.Launcher(row, launch, device, pdl)
    only = -(-p.n // 16) * 16 if p.m == 1 else 0  # one row may come with any stride

    def queue(stream: int, a: int, scale_a: int, y: int, y_stride: int) -> None:
        _queue(
            stream, launcher, launch, (p.m, p.n, p.k), p.out_dtype, p.aligned16, pdl,
            (a, a_stride, scale_a, step_a), b, bias, (y, only or y_stride),
        )  # fmt: skip

    return queue


@lru_cache(4096)
def _launcher(device: int, *fields: Any) -> tuple[runtime.Launcher, Launch]:
    """What serves a problem of these fields."""
    target, problem = runtime.target(device), ScaledProblem(*fields)
    row = pick(target, problem)
    launch = row.plan(target, problem)
    return runtime.Launcher(row, launch, device, pdl=kernels.arch_of(target.arch).pdl), launch


def _queue_blocks(
    stream: int,
    device: int,
    shape: tuple[int, int, int],
    out_dtype: str,
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: int,
    y: tuple[int, int],
) -> None:
    """Launch the row that multiplies operands with block scales. y: address, values from one row to the next."""
    forms = [BLOCK_FORMATS[q.dtype, q.scale_dtype] for q in (a, b)]
    fields, held = [], []
    for q, form in zip((a, b), forms, strict=True):
        (codes, stride), (scale, scale_stride), g = _rows(q.codes, stream), _rows(q.scale, stream), q.global_scale
        factor, step = (0, 0) if g is None else (g.data.ptr, 0 if len(g) == 1 else g.strides[0] // 4)
        fields += codes.data.ptr, scale.data.ptr, factor, stride, scale_stride, BLOCK_NUMBERS[form], step
        held += codes, scale
    _block_launcher(device, *forms, out_dtype, *shape)(stream, *fields, bias, *y, *shape, _OUT[out_dtype])


@lru_cache(4096)
def _block_launcher(device: int, *fields: Any) -> runtime.Launcher:
    """What serves a `BlockProblem` of these fields."""
    target, problem = runtime.target(device), BlockProblem(*fields)
    row = pick(target, problem)
    return runtime.Launcher(row, row.plan(target, problem), device, pdl=kernels.arch_of(target.arch).pdl)


def _step(q: QuantizedTensor) -> int:
    """Elements from a row's scale to the next one's; 0 where all rows have one."""
    return 0 if q.scale.shape[0] == 1 else q.scale.strides[0] // 4


def _rows(codes: Any, stream: int) -> tuple[Any, int]:
    """Codes whose rows are contiguous and do not overlap, copied if need be, and the bytes from one to the next."""
    (rows, k), (pitch, step) = codes.shape, codes.strides
    if (step == 1 or k == 1) and (pitch >= k or rows == 1):
        return codes, pitch if rows > 1 else -(-k // 16) * 16
    with runtime.stream(stream):
        return interop.adapter_for("cupy").contiguous(codes), k


def _check_operands(a: Any, b: Any, out_dtype: str) -> None:
    for name, q in (("a", a), ("b", b)):
        if not isinstance(q, QuantizedTensor):
            raise TypeError(
                f"scaled_mm: {name} is a {type(q).__name__}; needed is a QuantizedTensor, for codes alone do not tell "
                "e4m3fn from e5m2: QuantizedTensor(codes, scale, dtype='float8_e4m3fn', ...) takes them without a copy."
            )
    by_blocks = a._scaled_in_blocks, b._scaled_in_blocks
    if by_blocks[0] != by_blocks[1]:
        came = (f"{name} is {q.dtype} with {q.scale_dtype} scales, block {q.block}" for name, q in (("a", a), ("b", b)))
        raise ValueError(
            f"scaled_mm: {', '.join(came)}; needed are scales of 16 or 32 of a row in both, or in neither: "
            "quantise one of them anew."
        )
    if not by_blocks[0] and (a.dtype, b.dtype) not in SCALED_FORMATS:
        pairs = ", ".join(" x ".join(pair) for pair in SCALED_FORMATS)
        raise ValueError(f"scaled_mm: a is {a.dtype} and b {b.dtype}; allowed are {pairs}.")
    for name, q, each in (("a", a, "M"), ("b", b, "N")):
        if not (q._scaled_by_row or by_blocks[0]):
            raise ValueError(
                f"scaled_mm: {name} has {q.scale_dtype} scales of shape {list(q.scale.shape)}; needed is float32 "
                f"[{q.shape[0]}, 1], a scale per row ({each}), or [1, 1], one for all."
            )
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_mm: a is {list(a.shape)} and b {list(b.shape)}; both need the same K.")
    if a.device != b.device:
        raise ValueError(f"scaled_mm: a is on {a.device} and b on {b.device}; move one of them: b.to({a.device!r}).")
    if out_dtype not in FLOATS:
        raise ValueError(f"scaled_mm: out_dtype is {out_dtype!r}; allowed are {', '.join(FLOATS)}.")


def _check_bias(bias: Any, n: int, device: int | None) -> Any:
    """bias as a NumPy or CuPy array."""
    found = interop.array(bias, "scaled_mm: bias")
    if found.dtype != np.float32:
        raise TypeError(f"scaled_mm: bias is {found.dtype}; needed is float32.")
    if found.shape != (n,):
        raise ValueError(f"scaled_mm: bias has shape {list(found.shape)}; needed is [{n}].")
    here = None if interop.on_host(found) else found.data.device_id
    if here != device:
        where, wish = ("the CPU" if i is None else f"cuda:{i}" for i in (here, device))
        raise ValueError(f"scaled_mm: bias is on {where}, a and b are on {wish}; move bias.")
    if found.strides != (4,) and n > 1:
        raise ValueError(f"scaled_mm: bias has a stride of {found.strides[0]} bytes; needed is a contiguous one.")
    return found


def _check_out(
    library: Any, out: Any, shape: tuple[int, int], dtype: str, device: int | None, read: tuple[Any, ...]
) -> tuple[int, int]:
    """Address and row stride of `out`, which must fit; a view of a wider array may."""
    if library is None or not library.writeable(out):
        raise TypeError(f"scaled_mm: out is a {type(out).__name__}, which cannot be written to.")
    w = library.view(out)
    if w.dtype != dtype or tuple(w.shape) != shape or w.device != device:
        places = ("the CPU" if i is None else f"cuda:{i}" for i in (w.device, device))
        raise ValueError(
            f"scaled_mm: out is {w.dtype} {list(w.shape)} on {next(places)}; needed is {dtype} {list(shape)} on "
            f"{next(places)}."
        )
    m, n = shape
    y_stride = w.strides[0] if m > 1 else -(-n // 16) * 16
    if m and ((n > 1 and w.strides[1] != 1) or y_stride < n):
        raise ValueError(f"scaled_mm: out has strides {list(w.strides)}; needed are contiguous rows, one pitch.")
    low, high = interop.extent(w, _SIZES[dtype])
    for x in read:
        if x is None:
            continue
        v = interop.adapter(x).view(x)
        first, last = interop.extent(v, x.dtype.itemsize)
        if low < last and first < high:
            raise ValueError("scaled_mm: out overlaps a, b, a scale or bias in memory; give it memory of its own.")
    return w.ptr, y_stride


# --- on the host -----------------------------------------------------------------------------------------


def on_host(a: QuantizedTensor, b: QuantizedTensor, bias: Any, out_dtype: str, out: Any = None) -> Any:
    """`scaled_mm` of operands on the host that fit, of any scales that `QuantizedTensor.widened` takes."""
    (m, k), n = a.shape, b.shape[0]
    offset = None if bias is None else _check_bias(bias, n, None)
    if out is None:
        y = np.empty((m, n), FLOATS[out_dtype])
    else:
        library = interop.adapter(out)
        if library is None or not library.writeable(out):
            raise TypeError(f"scaled_mm: out is a {type(out).__name__}, which cannot be written to.")
        y = library.array(out)
        here = interop.on_host(y)
        if not here or y.dtype != FLOATS[out_dtype] or y.shape != (m, n):
            raise ValueError(
                f"scaled_mm: out is {y.dtype} {list(y.shape)} on {'the CPU' if here else 'a GPU'}; needed is "
                f"{out_dtype} {[m, n]} on the CPU."
            )
        read = a.codes, a.scale, a.global_scale, b.codes, b.scale, b.global_scale, offset
        if any(np.may_share_memory(y, x) for x in read if x is not None):
            raise ValueError("scaled_mm: out overlaps a, b, a scale or bias in memory; give it memory of its own.")
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for c in _parts(n, _HOST_ROWS):
            for r in _parts(m, _HOST_ROWS):
                sums = np.zeros((r.stop - r.start, c.stop - c.start), np.float32)
                for i in _parts(k, _HOST_COLUMNS):
                    sums += a.widened(r, i) @ b.widened(c, i).T
                ga, gb = a.row_scale(r)[:, None], b.row_scale(c)
                if a.global_scale is not None:  # as kernels_cu/factors.cuh does
                    apart = (ga < 1) != (gb < 1)
                    ga, gb = np.where(apart, ga * gb, ga), np.where(apart, np.float32(1), gb)
                sums *= ga
                # In float64 the product is exact and the sum's rounding is far below float32's: as one fmaf.
                v = sums.astype(np.float64) * gb
                if offset is not None:
                    v += offset[c]
                y[r, c] = v.astype(np.float32).astype(y.dtype)
    return y if out is None else out


def _parts(count: int, most: int) -> list[slice]:
    return [slice(i, min(i + most, count)) for i in range(0, count, most)]
