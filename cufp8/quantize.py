"""Float weights -> codes and scales, on the host and on the GPU (the same bits), and the error that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cufp8 import interop, kernels, runtime, staging
from cufp8.block_scaled import E8M0_RULES, Wrong, quantize_blocks, tiles
from cufp8.formats import ACTIVATIONS, BLOCKS, FLOATS, FORMATS, SCALE_MIN, SCHEMES, Format, Scheme
from cufp8.formats import scheme as scheme_of

_TILE = 1 << 20  # values handled at once on the host: 4 MiB as float32
_STAGE_BYTES = 32 << 20  # part of a host weight that is on the GPU at once while it is quantised there
_WEIGHTS = {**FLOATS, "float64": np.dtype(np.float64)}


class QuantizedTensor:
    """Codes and scales of a matrix: value = code * scale.

    Parameters
    ----------
    codes
        uint8 (or the format's own dtype, one byte each): [N, K], or [N, ceil(K / 2)] where two 4-bit codes share a
        byte, the first in the low half.
    scale
        One per block: [N, 1] (or [N]) for the block (1, K), [N, ceil(K / 16)] for (1, 16), and so on,
        [ceil(N / 128), ceil(K / 128)] for (128, 128), [1, 1] (or [1], or []) for (-1, -1); float32, or uint8 codes of
        scale_dtype.
    dtype, scale_dtype, block
        As a row of formats.SCHEMES, formats.BLOCKS or formats.ACTIVATIONS has them together: ml_dtypes names, and the
        rows and columns that share a scale; (1, K) may be written (1, -1), and (-1, -1) is the whole matrix.
    shape
        (N, K).
    global_scale
        float32 [1] or [N], one more factor, where the scheme has one; else None.
    activations
        True: what activations may be and weights may not is allowed, which is NaN (and Inf) codes, NaN codes of block
        scales, and no rows at all. No layer takes such a tensor for its weight.

    `scheme` is the name that `quantize` was given; of codes and scales made elsewhere the first in formats.SCHEMES that
    has them: FP8A16, not FP8_DYNAMIC, which differ in how a layer takes x alone.

    Codes and scales are NumPy arrays where `device` is "cpu", CuPy arrays where it is "cuda:i"; arrays of torch, JAX or
    DLPack are taken without a copy.

    Raises
    ------
    TypeError
        If codes or scales are no arrays, or of another dtype.
    ValueError
        If no scheme has these dtypes and block, shapes do not fit together, a code is NaN or Inf, or a scale is NaN,
        not finite, negative, or (float32) zero.

    Source: OCP 8-bit Floating Point Specification 1.0, section 5, for FP8 codes; OCP MX 1.0, section 5.2 for blocks of
    32, 5.3 for e2m1 codes, 5.4 for e8m0 scales.
    """

    def __init__(
        self,
        codes: Any,
        scale: Any,
        *,
        dtype: str,
        scale_dtype: str,
        shape: tuple[int, int],
        block: tuple[int, int],
        global_scale: Any = None,
        activations: bool = False,
        _trusted: bool = False,
        _scheme: str | None = None,
    ) -> None:
        if dtype not in FORMATS:
            raise ValueError(f"QuantizedTensor: dtype {dtype!r} is not known; known: {', '.join(FORMATS)}.")
        shape = tuple(int(n) for n in shape)
        least = 0 if activations else 1
        if len(shape) != 2 or shape[0] < least or shape[1] < 1:
            each = "K at least 1" if activations else "each at least 1"
            raise ValueError(f"QuantizedTensor: shape is {list(shape)}; needed is [N, K], {each}.")
        n, k = shape
        scheme = _scheme_like(dtype, scale_dtype, tuple(block), k, activations)
        size = k if scheme.block[1] == -1 else scheme.block[1]
        codes = _bytes_of(interop.array(codes, "QuantizedTensor: codes"), dtype, "codes")
        scale = interop.array(scale, "QuantizedTensor: scale")
        wanted = (n, -(-k * FORMATS[dtype].bits // 8))
        if tuple(codes.shape) != wanted:
            raise ValueError(f"QuantizedTensor: codes have shape {list(codes.shape)}; needed is {list(wanted)}.")
        if scale_dtype != "float32":
            scale = _bytes_of(scale, scale_dtype, "scale")
        elif scale.dtype != np.float32:
            raise TypeError(f"QuantizedTensor: scale is {scale.dtype}; needed is float32.")
        whole = scheme.block[0] == -1
        wanted = (1 if whole else -(-n // scheme.block[0]), -(-k // size))
        flat = () if wanted[1] > 1 or scheme.block[0] > 1 else ((), (1,)) if whole else ((n,),)
        if tuple(scale.shape) not in (wanted, *flat):
            each = "tensor" if whole else "row" if size == k else f"{size} values of a row"
            if scheme.block[0] > 1:
                each = f"block of {scheme.block[0]} rows and {size} columns"
            raise ValueError(
                f"QuantizedTensor: scale has shape {list(scale.shape)}; needed is {list(wanted)}, a scale per {each}."
            )
        self.codes, self.scale = codes, scale.reshape(wanted)
        self.dtype, self.scale_dtype, self.activations = dtype, scale_dtype, activations
        self.scheme = _scheme or scheme.name
        self.shape, self.block = shape, scheme.block if whole else (scheme.block[0], size)
        self.global_scale = self._global(global_scale, scheme, _trusted)
        if interop.on_host(codes) != interop.on_host(scale):
            raise ValueError("QuantizedTensor: codes and scale lie on different devices; move one of them.")
        if not interop.on_host(codes) and codes.device != scale.device:
            raise ValueError("QuantizedTensor: codes and scale lie on different GPUs; move one of them.")
        if not _trusted:
            self._check(activations)

    def _global(self, given: Any, scheme: Scheme, trusted: bool) -> Any:
        if (given is not None) != scheme.global_scale:
            text = "needs a global_scale; none was" if given is None else "has no global_scale; one was"
            raise ValueError(f"QuantizedTensor: {scheme.name} {text} given.")
        if given is None:
            return None
        g = interop.array(given, "QuantizedTensor: global_scale")
        if g.dtype != np.float32 or tuple(g.shape) not in ((1,), (self.shape[0],)):
            raise ValueError(
                f"QuantizedTensor: global_scale is {g.dtype} {list(g.shape)}; needed is float32 [1] or "
                f"[{self.shape[0]}]."
            )
        if trusted:
            return g
        host = interop.to_host(g)
        bad = np.flatnonzero(~(np.isfinite(host) & (host > 0)))
        if bad.size:
            raise ValueError(
                f"QuantizedTensor: global_scale[{bad[0]}] is {host[bad[0]]}; needed is finite and positive."
            )
        return g

    def _check(self, activations: bool) -> None:
        if not interop.on_host(self.codes):
            import cupy

            with self.codes.device:
                cupy.cuda.runtime.deviceSynchronize()  # codes and scale may come from any library's stream
        scale = interop.to_host(self.scale)
        if self.scale_dtype == "float32":
            wrong = ~(np.isfinite(scale) & (scale > 0))
        else:
            values = FORMATS[self.scale_dtype].table[scale]
            # An e4m3fn scale may be 0, for a block of zeros; NaN marks a block of activations that held one.
            wrong = ~((values >= 0) | (activations & np.isnan(values)))
        if wrong.any():
            at = np.argwhere(wrong)[0]
            shown = scale[tuple(at)] if self.scale_dtype == "float32" else f"code {scale[tuple(at)]:#04x}"
            raise ValueError(
                f"QuantizedTensor: {np.count_nonzero(wrong)} of {scale.size} scales are not finite and positive, the "
                f"first at row {at[0]}, block {at[1]}: {shown}."
            )
        if activations or np.isfinite(FORMATS[self.dtype].table).all():
            return
        wrong = _find_nan(self.codes, FORMATS[self.dtype])
        if wrong.count:
            kinds = "NaN or Inf" if self.dtype == "float8_e5m2" else "NaN"
            raise ValueError(
                f"QuantizedTensor: {wrong.count} of the {self.dtype} codes are {kinds}, the first at {wrong.position}; "
                "a weight may have none, activations may: QuantizedTensor(..., activations=True)."
            )

    def has_nan(self) -> bool:
        """Whether a code is NaN or Inf; they are looked through where they lie."""
        fmt = FORMATS[self.dtype]
        return not np.isfinite(fmt.table).all() and _find_nan(self.codes, fmt).count > 0

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:i"."""
        return _device_of(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, without padding."""
        extra = 0 if self.global_scale is None else self.global_scale.nbytes
        return self.codes.nbytes + self.scale.nbytes + extra

    def to(self, device: str) -> QuantizedTensor:
        """The same tensor on "cpu" or "cuda:i"; itself if it is there already."""
        if device == "cuda":
            device = f"cuda:{_current_device()}"
        if device == self.device:
            return self
        if self.device != "cpu":
            here = self._moved(interop.to_host)
            return here if device == "cpu" else here.to(device)
        cupy, index = _gpu(device)
        with cupy.cuda.Device(index):
            cupy.cuda.runtime.deviceSynchronize()  # any library's stream may still read what lay in CuPy's memory
            moved = self._moved(staging.to_gpu)
            cupy.cuda.get_current_stream().synchronize()  # and any may be the next to read it
            return moved

    def _moved(self, move: Callable[[Any], Any]) -> QuantizedTensor:
        scale = move(self.scale)  # first: it would wait for the codes on the stream
        return QuantizedTensor(
            move(self.codes),
            scale,
            dtype=self.dtype,
            scale_dtype=self.scale_dtype,
            shape=self.shape,
            block=self.block,
            global_scale=None if self.global_scale is None else move(self.global_scale),
            activations=self.activations,
            _trusted=True,
            _scheme=self.scheme,
        )

    def dequantize(self, dtype: str = "float32") -> Any:
        """The values, rounded to `dtype` (a float's ml_dtypes name); NumPy or CuPy, shape [N, K].

        One float32 scale a row, or for all: code * scale in float32, rounded again to a 16-bit dtype. Block scales: the
        exact product of code, scale and global scale; other dtypes than float64 get it by way of float32. A tensor on a
        GPU is computed there with a scale a row (FP8A16, FP8_DYNAMIC), 16 or 32 neighbours; others on the host.

        Raises
        ------
        ValueError
            If the dtype is not bfloat16, float16, float32 or float64.
        """
        if dtype not in _WEIGHTS:
            raise ValueError(f"dequantize: dtype is {dtype!r}; allowed are {', '.join(_WEIGHTS)}.")
        if not interop.on_host(self.codes):
            if self.scheme in SCHEMES and _by_channel(SCHEMES[self.scheme]) and self._scaled_by_row:
                return _dequantize_gpu(self, dtype)
            if self._scaled_in_blocks:
                return _dequantize_blocks_gpu(self, dtype)
            import cupy

            with self.codes.device:
                return cupy.asarray(self.to("cpu").dequantize(dtype))
        out = np.empty(self.shape, FLOATS.get(dtype, dtype))
        with np.errstate(over="ignore"):
            for r, c in tiles(self.shape):
                values = self._values(r, c)
                out[r, c] = values if dtype == "float64" else values.astype(np.float32).astype(out.dtype)
        return out

    def _values(self, r: slice, c: slice) -> np.ndarray:
        """Some rows and columns, on the host: float32 for one scale a row, else float64, exact."""
        factor = self.row_scale(r)[:, None]
        return self.widened(r, c) * (factor if self._scaled_by_row else factor.astype(np.float64))

    @property
    def _scaled_in_blocks(self) -> bool:
        """Whether it has a format of `kernels.BLOCK_FORMATS`: scales for blocks of a row."""
        return (self.dtype, self.scale_dtype) in kernels.BLOCK_FORMATS and self.block[0] == 1

    @property
    def _scaled_by_row(self) -> bool:
        """Whether a row has one scale, of float32: its own, or that of the whole matrix."""
        return self.scale_dtype == "float32" and self.block[0] < 2 and self.scale.shape[1] == 1

    def widened(self, r: slice, c: slice) -> np.ndarray:
        """code * block scale of some rows and columns, on the host and without a rounding.

        float32 where that is exact: everywhere but for blocks with float32 scales, or with e8m0 scales near the ends of
        their range, where it is float64. A scale per row is left out: it is `row_scale`. c starts on a multiple of the
        block.
        """
        fmt = FORMATS[self.dtype]
        if fmt.bits == 4:
            pairs = np.stack([fmt.table[np.arange(256) & 15], fmt.table[np.arange(256) >> 4]], axis=1)
            packed = self.codes[r, c.start // 2 : -(-c.stop // 2)]
            values = pairs.take(packed, axis=0).reshape(packed.shape[0], -1)[:, : c.stop - c.start]
        else:
            values = fmt.table.take(self.codes[r, c])
        if self._scaled_by_row:
            return values
        size = self.block[1]
        scale = self.scale[r if self.block[0] == 1 else np.arange(r.start, r.stop) // self.block[0]]
        scale = scale[:, c.start // size : -(-c.stop // size)]
        if self.scale_dtype == "float32":
            values = values.astype(np.float64)
        else:
            most = 254 - int(math.log2(fmt.max))  # with which the largest code is below 2^128
            if self.scale_dtype == "float8_e8m0fnu" and (scale.max(initial=0) > most or scale.min(initial=3) < 3):
                values = values.astype(np.float64)
            scale = FORMATS[self.scale_dtype].table[scale]
        return values * np.repeat(scale, size, axis=1)[:, : c.stop - c.start]

    def row_scale(self, r: slice) -> np.ndarray:
        """The float32 factor of each of some rows that `widened` leaves out, on the host: [rows]."""
        if self._scaled_by_row:
            return np.broadcast_to(self.scale[:, 0], self.shape[:1])[r]
        if self.global_scale is None:
            return np.ones(r.stop - r.start, np.float32)
        return np.broadcast_to(self.global_scale, self.shape[:1])[r]

    def __repr__(self) -> str:
        return f"QuantizedTensor({list(self.shape)}, {self.scheme}, {self.dtype}, device={self.device!r})"


def quantize(w: Any, scheme: str = "FP8A16", *, e8m0: str = "RCEIL") -> QuantizedTensor:
    """Quantise a weight matrix.

    FP8A16, FP8_DYNAMIC: `scale[n] = max(amax(abs(w[n, :])) / 448, 2^-126)`, 1 for a row of zeros;
    `codes = e4m3fn(clip(w / scale, -448, 448))`, ties to even; all in float32 (float64 is rounded first).
    FP8: the same with one scale for all of w; runs on the host.
    NVFP4A16, MXFP4A16, MXFP8A16, and NVFP4, MXFP4, MXFP8, which differ in how a layer takes x alone:
    `block_scaled.quantize_blocks`.
    Where w is on a GPU, all but FP8 are computed there, with the same bits.

    Parameters
    ----------
    w
        float16, bfloat16, float32 or float64, shape [N, K], any strides; NumPy, CuPy, torch or JAX.
    scheme
        A name in formats.SCHEMES.
    e8m0
        How MX schemes choose a block's power of two: "RCEIL", "FLOOR" or "EVEN" (`block_scaled.exponent_codes`).

    Returns
    -------
    QuantizedTensor
        On the device where w is. On a host it takes at most 64 MiB beside w and the result. NVFP4 reads w twice, for
        its largest magnitude first. On a GPU rows of w that are not contiguous, or whose 16-byte pieces or blocks are
        not whole, are read value by value.

    Raises
    ------
    TypeError
        If w is no array or no such float.
    ValueError
        If w is not two-dimensional or is empty, or has a value that is not finite as float32: the text says
        how many and where the first is. If the scheme is not known.

    Source: OCP 8-bit Floating Point Specification 1.0 for e4m3fn; OCP MX 1.0, section 6.3, for MX.
    """
    row = scheme_of(scheme)
    if e8m0 not in E8M0_RULES:
        raise ValueError(f"quantize: e8m0 is {e8m0!r}; allowed are {', '.join(E8M0_RULES)}.")
    a = _weights(w)
    if row.scale_dtype != "float32":
        found = quantize_blocks(a, row, e8m0) if interop.on_host(a) else _quantize_blocks_gpu(w, a, row, e8m0)
        codes, scale, global_scale, wrong = found
        _refuse(wrong, a.shape)
        return _quantized(codes, scale, row, a.shape, global_scale)
    if interop.on_host(a) or not _by_channel(row):
        codes, scale, wrong = _quantize_host(interop.to_host(a), row)
    else:
        codes, scale, wrong = _quantize_gpu(a, a.device.id, interop.stream(w))
    _refuse(wrong, a.shape)
    return _quantized(codes, scale, row, a.shape).to(_device_of(a))


def quantize_to(w: Any, device: str, scheme: str = "FP8A16") -> QuantizedTensor:
    """`quantize` of a weight that is wanted on `device`: on a GPU it is quantised there, part by part."""
    row = scheme_of(scheme)
    a = _weights(w)
    if device == "cpu" or not interop.on_host(a) or not _by_channel(row):
        return quantize(w, scheme).to(device)
    cupy, index = _gpu(device)
    n, k = a.shape
    with cupy.cuda.Device(index):
        codes, scale, wrong = cupy.empty((n, k), np.uint8), cupy.empty((n, 1), np.float32), Wrong(k)
        for r in _row_chunks(a.shape, _STAGE_BYTES // a.dtype.itemsize):
            part = staging.to_gpu(np.ascontiguousarray(a[r]).view(f"u{a.dtype.itemsize}")).view(_cupy_dtype(a.dtype))
            found = _quantize_gpu(part, index, cupy.cuda.get_current_stream().ptr, codes[r], scale[r])[2]
            if found.count:
                wrong = Wrong(k, wrong.count + found.count, wrong.first if wrong.count else r.start * k + found.first)
    _refuse(wrong, a.shape)
    return _quantized(codes, scale, row, a.shape)


def _by_channel(row: Scheme) -> bool:
    """Whether quantize.cu makes it."""
    return row.scale_dtype == "float32" and row.block == (1, -1)


def _device_of(a: Any) -> str:
    return "cpu" if interop.on_host(a) else f"cuda:{a.device.id}"


def _quantized(codes: Any, scale: Any, row: Scheme, shape: Any, global_scale: Any = None) -> QuantizedTensor:
    return QuantizedTensor(
        codes,
        scale,
        dtype=row.dtype,
        scale_dtype=row.scale_dtype,
        shape=shape,
        block=row.block,
        global_scale=global_scale,
        _trusted=True,
        _scheme=row.name,
    )


def _scheme_like(dtype: str, scale_dtype: str, block: tuple[int, ...], k: int, activations: bool) -> Scheme:
    """The scheme with these dtypes and this block; where weights and activations have one, that of what it is."""
    weights = tuple(SCHEMES.values())
    rows = ACTIVATIONS + weights if activations else weights + BLOCKS + ACTIVATIONS
    same = [s for s in rows if s.dtype == dtype]
    for s in same:
        if s.scale_dtype == scale_dtype and (block == s.block or (s.block == (1, -1) and block == (1, k))):
            return s
    known = "; ".join(
        dict.fromkeys(f"{s.scale_dtype} with block {(1, k) if s.block == (1, -1) else s.block}" for s in same)
    )
    raise ValueError(
        f"QuantizedTensor: {dtype} codes with scale_dtype {scale_dtype!r} and block {block} are no scheme; allowed: "
        f"{known or 'none'}."
    )


def _bytes_of(a: Any, dtype: str, what: str) -> Any:
    """Codes as uint8: the same bytes of an array of the format's own dtype."""
    if interop.on_host(a) and a.dtype == FORMATS[dtype].dtype and FORMATS[dtype].bits == 8:
        a = a.view(np.uint8)
    if a.dtype != np.uint8:
        raise TypeError(f"QuantizedTensor: {what} are {a.dtype}; needed is uint8 (codes of {dtype}).")
    return a


def _weights(w: Any) -> Any:
    a = interop.array(w, "quantize: w")
    if a.dtype.name not in _WEIGHTS:
        raise TypeError(f"quantize: w is {a.dtype}; allowed are {', '.join(_WEIGHTS)}.")
    if a.ndim != 2 or 0 in a.shape:
        raise ValueError(f"quantize: w has shape {list(a.shape)}; needed is [N, K], each at least 1.")
    return a


def _refuse(wrong: Wrong, shape: tuple[int, int]) -> None:
    if wrong.count:
        raise ValueError(
            f"quantize: {wrong.count} of {math.prod(shape)} weights are not finite as float32 (NaN, Inf or beyond "
            f"3.4e38), the first at {wrong.position}."
        )


# --- on the host -----------------------------------------------------------------------------------------


def _row_chunks(shape: tuple[int, int], values: int) -> Iterator[slice]:
    step = max(1, values // shape[1])
    return (slice(i, min(i + step, shape[0])) for i in range(0, shape[0], step))


def _column_chunks(shape: tuple[int, int]) -> Iterator[slice]:
    return (slice(i, min(i + _TILE, shape[1])) for i in range(0, shape[1], _TILE))


def scales_of(amax: np.ndarray, fmt: Format) -> np.ndarray:
    """The float32 scale with which the largest magnitude (float32) becomes the format's; 1 where there is none."""
    return np.where(amax == 0, np.float32(1), np.maximum(amax / np.float32(fmt.max), np.float32(SCALE_MIN)))


def codes_of(values: np.ndarray, scale: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of values / scale, both float32: ties to even, saturated; NaN becomes some NaN code, Inf the largest."""
    top = np.float32(fmt.max)
    quotient = values / scale
    np.clip(quotient, -top, top, out=quotient)
    return quotient.astype(fmt.dtype).view(np.uint8)


def _quantize_host(w: np.ndarray, row: Scheme) -> tuple[np.ndarray, np.ndarray, Wrong]:
    """Codes, scales, and which values are not finite."""
    (n, k), fmt, whole = w.shape, FORMATS[row.dtype], row.block[0] == -1
    codes, scale, wrong = np.empty((n, k), np.uint8), np.empty((1 if whole else n, 1), np.float32), Wrong(k)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for rows in [slice(0, n)] if whole else _row_chunks(w.shape, _TILE):
            at = slice(0, 1) if whole else rows
            amax = np.zeros(scale[at].shape, np.float32)
            parts = list(tiles(w.shape)) if whole else [(rows, c) for c in _column_chunks(w.shape)]
            for r, c in parts:
                tile = np.abs(w[r, c].astype(np.float32))
                wrong.add(~np.isfinite(tile), r, c)
                np.maximum(amax, tile.max(axis=None if whole else 1, keepdims=True), out=amax)
            scale[at] = scales_of(amax, fmt)
            for r, c in parts:
                codes[r, c] = codes_of(w[r, c].astype(np.float32), scale[at], fmt)
    return codes, scale, wrong


# --- on the GPU ------------------------------------------------------------------------------------------


def _cupy_dtype(dtype: np.dtype) -> np.dtype:
    return np.dtype(FLOATS.get(dtype.name, dtype))


def _current_device() -> int:

    runtime.require()
    return runtime.current_device()


def _gpu(device: str) -> tuple[Any, int]:
    """CuPy and the index that "cuda" or "cuda:i" names."""

    name, _, number = device.partition(":")
    if name != "cuda" or (number and not number.isdecimal()):
        raise ValueError(f"device is {device!r}; allowed are 'cpu', 'cuda' and 'cuda:<index>'.")
    runtime.require()
    index = int(number) if number else runtime.current_device()
    runtime.target(index)
    import cupy

    return cupy, index


def _quantize_gpu(w: Any, device: int, stream: int, codes: Any = None, scale: Any = None) -> tuple[Any, Any, Wrong]:
    """As _quantize_host, by quantize.cu on `stream`; ends in a synchronise: weights never change again."""
    import cupy

    n, k = w.shape
    size = w.dtype.itemsize
    with cupy.cuda.Device(device), runtime.stream(stream):
        if codes is None:
            codes, scale = cupy.empty((n, k), np.uint8), cupy.empty((n, 1), np.float32)
        stride_n, stride_k = (s // size for s in w.strides)
        whole = stride_k == 1 and k * size % 16 == 0 and stride_n * size % 16 == 0 and w.data.ptr % 16 == 0
        entry = f"quantize_{w.dtype.name}{'' if whole else '_any'}"
        fields = (w.data.ptr, codes.data.ptr, scale.data.ptr), (stride_n, stride_k, codes.strides[0], k)
        wrong = _with_status(entry, n, device, stream, *fields)
    return codes, scale, wrong


def _with_status(
    entry: str, rows: int, device: int, stream: int, arrays: tuple[int, ...], strides: tuple[int, ...]
) -> Wrong:
    """Launch an entry of quantize.cu over `rows`; what it has found. The last of `strides` is k."""
    launcher = runtime.launcher("quantize", kernels.Launch(entry, (rows, 1, 1), 256), device)
    return _watched(strides[-1], stream, lambda status: launcher(stream, *arrays, status, *strides))


def _watched(k: int, stream: int, queue: Callable[[int], None]) -> Wrong:
    """What kernels have found that `queue` launches on the stream, with the address of the status; waits for them."""
    import cupy

    status = np.array([0, 2**64 - 1], np.uint64)
    on_gpu = cupy.cuda.alloc(16)
    copy = cupy.cuda.runtime.memcpyAsync
    copy(on_gpu.ptr, status.ctypes.data, 16, 1, stream)
    queue(on_gpu.ptr)
    copy(status.ctypes.data, on_gpu.ptr, 16, 2, stream)
    cupy.cuda.runtime.streamSynchronize(stream)
    count, first = (int(v) for v in status)
    return Wrong(k, count, first if count else 0)


def _dequantize_gpu(q: QuantizedTensor, dtype: str) -> Any:
    """On CuPy's current stream; not by CuPy's own kernels, which flush what is subnormal in float32."""
    import cupy

    n, k = q.shape
    device = q.codes.device.id
    with cupy.cuda.Device(device):
        codes, scale = cupy.ascontiguousarray(q.codes), cupy.ascontiguousarray(q.scale)
        out = cupy.empty((n, k), FLOATS.get(dtype, dtype))
        launch = kernels.Launch(f"dequantize_{dtype}", (n, 1, 1), 256)
        launcher = runtime.launcher("quantize", launch, device)
        stream = cupy.cuda.get_current_stream().ptr
        launcher(stream, out.data.ptr, codes.data.ptr, scale.data.ptr, 0, k, 1, k, k)
    return out


class BlockRows(NamedTuple):
    """Rows of x on a GPU and where their codes and scales go: addresses, and values or bytes from one to the next."""

    x_dtype: str
    shape: tuple[int, int]
    x: int
    x_stride: int
    x_step: int
    codes: int
    codes_stride: int
    scale: int
    scale_stride: int


# Where the global scale comes from, in the order of `Mode` in kernels_cu/quantize_blocks.cu.
NO_FACTOR, FACTOR_BY_ROW, FACTOR_OF_AMAX, FACTOR_GIVEN = range(4)


def queue_blocks(
    what: str,
    row: Scheme,
    rule: str,
    rows: BlockRows,
    device: int,
    stream: int,
    *,
    mode: int = NO_FACTOR,
    factor: int = 0,
    given: int = 0,
    value: float = 0.0,
    status: int = 0,
    pdl: bool = False,
) -> None:
    """Launch the entry of quantize_blocks.cu that serves, "quantize" or "amax"; factor, given, status: addresses."""
    name, (m, k), size = kernels.BLOCK_FORMATS[row.dtype, row.scale_dtype], rows.shape, _WEIGHTS[rows.x_dtype].itemsize
    codes_unit = 2 * FORMATS[row.dtype].bits  # bytes of 16 codes
    whole = rows.x_step == 1 and not ((rows.x | rows.x_stride * size) & 15 or k % row.block[1])
    whole = whole and rows.x_dtype in FLOATS and not (rows.codes | rows.codes_stride) % codes_unit
    whole = whole and k <= kernels.block_most(rows.x_dtype, mode == FACTOR_BY_ROW)
    end = "any" if not whole else name + "_token" * (mode == FACTOR_BY_ROW)
    entry = f"{what}_{rows.x_dtype}_{end}" if what == "quantize" or not whole else f"amax_{rows.x_dtype}"
    _block_launcher(entry, m, k, device, pdl)(
        *(stream, rows.x, rows.codes, rows.scale, factor, given, status),
        *(rows.x_stride, rows.x_step, rows.codes_stride, rows.scale_stride, k),
        *(m, kernels.BLOCK_NUMBERS[name], E8M0_RULES.index(rule), mode, value),
    )


def values_queue(
    row: Scheme,
    x_dtype: str,
    m: int,
    k: int,
    factor: float | None,
    *,
    pitch: int,
    aligned: bool,
    device: int,
    pdl: bool,
) -> Callable[[int, int, int, int, int], None]:
    """`quantize_activations` of m rows and at once `dequantize`, exact but for a factor of each row, for many calls.

    Called with (stream, address of x, values from one row of it to the next, address of the result, address of the
    factors, float32 [m]). Rows of the result, of the dtype `kernels.values_dtype`, lie `pitch` values apart, zeros past
    k. factor: NVFP4's global scale where it is given. `aligned`: as for `activations.queue_of`.
    """
    name = kernels.BLOCK_FORMATS[row.dtype, row.scale_dtype]
    whole = aligned and k % row.block[1] == 0 and k <= kernels.block_most(x_dtype, True)
    launcher = _block_launcher(f"values_{x_dtype}_{name if whole else 'any'}", m, k, device, pdl)
    mode = FACTOR_BY_ROW if factor is None else FACTOR_GIVEN
    last = m, kernels.BLOCK_NUMBERS[name], 0, mode, 0.0 if factor is None else factor

    def queue(stream: int, x: int, x_stride: int, values: int, factors: int) -> None:
        launcher(stream, x, values, 0, factors, 0, 0, x_stride, 1, pitch, 0, k, *last)

    return queue


@lru_cache(1024)
def _block_launcher(entry: str, m: int, k: int, device: int, pdl: bool) -> runtime.Launcher:
    pdl = pdl and kernels.arch_of(runtime.target(device).arch).pdl
    return runtime.Launcher(runtime.row("quantize_blocks"), kernels.blocks_launch(entry, m, k), device, pdl)


def _quantize_blocks_gpu(given: Any, w: Any, row: Scheme, rule: str) -> tuple[Any, Any, Any, Wrong]:
    """As quantize_blocks, on the stream of the library of `given`, whose array w is; ends in a synchronise."""
    import cupy

    (n, k), device, stream = w.shape, w.device.id, interop.stream(given)
    with cupy.cuda.Device(device), runtime.stream(stream):
        codes = cupy.empty((n, -(-k * FORMATS[row.dtype].bits // 8)), np.uint8)
        scale = cupy.empty((n, -(-k // row.block[1])), np.uint8)
        factor, amax = (cupy.empty(1, np.float32), cupy.zeros(1, np.float32)) if row.global_scale else (None, None)
        strides = (s // w.dtype.itemsize for s in w.strides)
        places = codes.data.ptr, codes.strides[0], scale.data.ptr, scale.strides[0]
        launch = partial(
            queue_blocks, row=row, rule=rule, rows=BlockRows(w.dtype.name, (n, k), w.data.ptr, *strides, *places),
            device=device, stream=stream,
        )  # fmt: skip

        def queue(status: int) -> None:
            if factor is None:
                launch("quantize", status=status)
            else:
                launch("amax", factor=amax.data.ptr, status=status)
                launch("quantize", mode=FACTOR_OF_AMAX, factor=factor.data.ptr, given=amax.data.ptr)

        return codes, scale, factor, _watched(k, stream, queue)


def _dequantize_blocks_gpu(q: QuantizedTensor, dtype: str) -> Any:
    """On CuPy's current stream."""
    import cupy

    (m, k), device = q.shape, q.codes.device.id
    with cupy.cuda.Device(device):
        codes, scale = cupy.ascontiguousarray(q.codes), cupy.ascontiguousarray(q.scale)
        factor = None if q.global_scale is None else cupy.ascontiguousarray(q.global_scale)
        out = cupy.empty((m, k), FLOATS.get(dtype, dtype))
        if m == 0:
            return out
        mode = NO_FACTOR if factor is None else FACTOR_BY_ROW if factor.size > 1 else FACTOR_GIVEN
        name = kernels.BLOCK_NUMBERS[kernels.BLOCK_FORMATS[q.dtype, q.scale_dtype]]
        _block_launcher(f"dequantize_{dtype}", m, k, device, False)(
            *(cupy.cuda.get_current_stream().ptr, out.data.ptr, codes.data.ptr, scale.data.ptr),
            *(0 if factor is None else factor.data.ptr, 0, 0),
            *(k, 1, codes.shape[1], scale.shape[1], k, m, name, 0, mode, 0.0),
        )
    return out


def _find_nan(codes: Any, fmt: Format) -> Wrong:
    """Which codes are NaN or Inf; on a GPU by quantize.cu where the format is the one that it knows."""
    n, k = codes.shape
    if fmt.name != "float8_e4m3fn":
        codes = interop.to_host(codes)
    if not interop.on_host(codes):
        import cupy

        device = codes.device.id
        with cupy.cuda.Device(device):
            if codes.strides[1] != 1 and k > 1:
                codes = cupy.ascontiguousarray(codes)
            stream = interop.stream(codes)
            arrays = (0, codes.data.ptr, 0)
            return _with_status("find_nan", n, device, stream, arrays, (0, 0, codes.strides[0], k))
    wrong, finite = Wrong(k), np.isfinite(fmt.table)
    for r, c in tiles(codes.shape):
        wrong.add(~finite[codes[r, c]], r, c)
    return wrong


# --- the error -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ErrorReport:
    """What quantising a weight costs, as `error_report` defines it. All but the bytes are ratios."""

    rel_l2: float
    worst_channel_rel_l2: float
    underflow: float
    crest: float
    bytes_before: int
    bytes_after: int
    output_rel_l2: float | None = None
    output_cosine: float | None = None


def error_report(w: Any, q: QuantizedTensor, x: Any = None) -> ErrorReport:
    """Compare a weight with its quantised form, on the host, in float64 (products with x in float32).

    Parameters
    ----------
    w
        The float weight, shape [N, K], any library.
    q
        What `quantize` made of it.
    x
        Activations [..., K], any library: adds the error of x @ w.T.

    Returns
    -------
    ErrorReport
        rel_l2: norm(w - deq) / norm(w). worst_channel_rel_l2: the largest of that over rows with a norm above 0.
        underflow: the share of non-zero weights whose dequantised value is 0. crest: the largest amax / rms over
        rows. bytes_before: of w as it was given; bytes_after: codes and scales. output_rel_l2 and output_cosine:
        of x @ deq.T against x @ w.T. A weight of zeros has all errors 0.

    Raises
    ------
    TypeError, ValueError
        If w or x is no float array or a shape does not fit q.
    """
    a = _weights(w)
    if tuple(a.shape) != q.shape:
        raise ValueError(f"error_report: w has shape {list(a.shape)}; q has {list(q.shape)}.")
    before = int(a.size * a.dtype.itemsize)
    a, q = interop.to_host(a), q.to("cpu")
    n, k = q.shape
    if x is not None:
        x = interop.to_host(interop.array(x, "error_report: x"))
        if x.dtype.name not in _WEIGHTS or x.ndim < 1 or x.shape[-1] != k:
            raise ValueError(f"error_report: x is {x.dtype} of shape {list(x.shape)}; needed is a float [..., {k}].")
        x = x.reshape(-1, k).astype(np.float32)
    square = error = 0.0
    nonzero = lost = 0
    worst = crest = 0.0
    outputs = np.zeros(3)  # |x w|^2, |x (deq - w)|^2, |x deq|^2
    dot = 0.0
    for r in _row_chunks(q.shape, _TILE):
        exact = a[r].astype(np.float32)
        deq = q._values(r, slice(0, k))
        wide = exact.astype(np.float64)
        squares = np.square(wide).sum(axis=1)
        errors = np.square(wide - deq).sum(axis=1)
        square, error = square + squares.sum(), error + errors.sum()
        some = squares > 0
        if some.any():
            worst = max(worst, float(np.sqrt(errors[some] / squares[some]).max()))
            peak = np.abs(wide[some]).max(axis=1)
            crest = max(crest, float((peak / np.sqrt(squares[some] / k)).max()))
        nonzero += int(np.count_nonzero(exact))
        lost += int(np.count_nonzero((exact != 0) & (deq == 0)))
        if x is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                y, z = (x @ exact.T).astype(np.float64), (x @ deq.astype(np.float32).T).astype(np.float64)
            outputs += np.square(y).sum(), np.square(z - y).sum(), np.square(z).sum()
            dot += float((y * z).sum())
    return ErrorReport(
        rel_l2=_ratio(error, square),
        worst_channel_rel_l2=worst,
        underflow=lost / nonzero if nonzero else 0.0,
        crest=crest,
        bytes_before=before,
        bytes_after=q.nbytes,
        output_rel_l2=None if x is None else _ratio(outputs[1], outputs[0]),
        output_cosine=None if x is None else _cosine(dot, outputs[0], outputs[2]),
    )


def _ratio(error: float, square: float) -> float:
    return math.sqrt(error / square) if square else 0.0


def _cosine(dot: float, a: float, b: float) -> float:
    return dot / math.sqrt(a * b) if a and b else 1.0
