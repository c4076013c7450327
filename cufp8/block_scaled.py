"""Codes with a scale for every 16 or 32 neighbours of a row: NVFP4, MXFP4, MXFP8. On the host, in float32.

kernels_cu/quantize_blocks.cu makes the same bits on a GPU.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 to 5.4 for the formats, 6.3 for the shared
exponent; the rules for it that round up are those of cuBLAS (RCEIL) and of torchao (EVEN).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cufp8.formats import FORMATS, SCALE_MIN, Format, Scheme

_TILE = 1 << 20  # values handled at once: 4 MiB as float32; a multiple of every block
E8M0_RULES = ("RCEIL", "FLOOR", "EVEN")
_E4M3, _E2M1 = FORMATS["float8_e4m3fn"], FORMATS["float4_e2m1fn"]


def tiles(shape: tuple[int, int], block: int = 1) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of a matrix, at most _TILE values together where each row is whole blocks; no block is cut."""
    n, k = shape
    rows = max(1, _TILE // (-(-k // block) * block))
    for i in range(0, n, rows):
        for j in range(0, k, _TILE):
            yield slice(i, min(i + rows, n)), slice(j, min(j + _TILE, k))


@dataclass
class Wrong:
    """How many elements of a matrix with k columns are wrong, and the index, row * k + column, of the first."""

    k: int
    count: int = 0
    first: int = 0

    @property
    def position(self) -> list[int]:
        """[row, column] of the first."""
        return list(divmod(self.first, self.k))

    def add(self, wrong: np.ndarray, r: slice, c: slice) -> None:
        """Count the True elements of `wrong`, which tells of the rows r and the columns c."""
        if wrong.any():
            i, j = np.argwhere(wrong)[0]
            at = (r.start + int(i)) * self.k + c.start + int(j)
            self.first = min(self.first, at) if self.count else at
            self.count += int(np.count_nonzero(wrong))


def survey(w: np.ndarray) -> tuple[np.float32, Wrong]:
    """The largest finite magnitude of w as float32, and which values are not finite as float32."""
    amax, wrong = np.float32(0), Wrong(w.shape[1])
    for r, c in tiles(w.shape):
        with np.errstate(over="ignore"):
            tile = np.abs(w[r, c].astype(np.float32))
        finite = np.isfinite(tile)
        wrong.add(~finite, r, c)
        amax = np.maximum(amax, tile.max(initial=0, where=finite))
    return amax, wrong


def exponent_codes(amax: np.ndarray, element: Format, rule: str) -> np.ndarray:
    """e8m0 codes for blocks of that largest magnitude (float32): the scale is 2^(code - 127), 2^-127 for zeros.

    RCEIL: the least power of two with which amax * (1 / max) is at most 1, as `cvt.rp.satfinite.ue8m0x2.f32` finds it.
    FLOOR: 2^(floor(log2(amax)) - emax). EVEN: FLOOR of amax rounded to the element's mantissa.

    Source: OCP MX 1.0, section 5.4, for e8m0, and section 6.3 for FLOOR; PTX ISA, cvt, for RCEIL; torchao for EVEN.
    """
    if rule == "RCEIL":
        bits = (amax * np.float32(1 / element.max)).view(np.uint32)
        exponent, mantissa = bits >> 23, bits & 0x7FFFFF
        up = np.where(exponent == 0, mantissa > 0x400000, mantissa != 0)
        return np.minimum(exponent + up, 254).astype(np.uint8)
    bits = amax.view(np.uint32)
    if rule == "EVEN":
        bits = bits + np.uint32(1 << (23 - element.mantissa_bits - 1))
    emax = int(math.floor(math.log2(element.max)))
    return np.clip((bits >> 23).astype(np.int32) - emax, 0, 254).astype(np.uint8)


def factors_of(amax: np.ndarray) -> np.ndarray:
    """NVFP4's global scales of values up to amax (float32): max(amax / 2688, 2^-126), 1 where amax is 0.

    2688 = 6 * 448, the largest e2m1 and the largest e4m3fn: the largest block gets the largest scale.

    Source: NVIDIA, Pretraining Large Language Models with NVFP4, 2025 (arXiv 2509.25149), for the two levels of scales;
    NVIDIA ModelOpt, `weight_scale_2` of NVFP4, for the factor that multiplies.
    """
    least = np.maximum(amax / np.float32(_E4M3.max * _E2M1.max), np.float32(SCALE_MIN))
    return np.where(amax == 0, np.float32(1), least)


def encode_blocks(values: np.ndarray, row: Scheme, rule: str, g: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes, a byte each [rows, columns], and scale codes [rows, blocks] of float32 values, which begin a block.

    g: NVFP4's global scale, a float32 number or [rows, 1]. In this order: s = e4m3fn(min(amax_block / (6 * g), 448));
    code = e2m1(v / (s * g)), a signed zero where s is 0. MX: code = element(v / 2^(c - 127)), with c of
    `exponent_codes`. Ties to even; what is beyond the largest value becomes it; -0 keeps its sign.

    Source of MX: OCP MX 1.0, section 6.3.
    """
    element, size = FORMATS[row.dtype], row.block[1]
    top = np.float32(element.max)
    rows, columns = values.shape
    blocks = -(-columns // size)
    padded = np.zeros((rows, blocks * size), np.float32)
    padded[:, :columns] = values
    parts = padded.reshape(rows, blocks, size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore", divide="ignore"):
        largest = np.abs(parts).max(axis=2)
        if row.global_scale:
            found = np.minimum(largest / (top * g), np.float32(_E4M3.max)).astype(_E4M3.dtype).view(np.uint8)
            by = _E4M3.table[found] * g
        else:
            found = exponent_codes(largest, element, rule)
            by = np.ldexp(np.float32(1), found.astype(np.int32) - 127)
        # A scale of 0 (its block is far below the others) leaves signed zeros.
        quotients = np.where(by[..., None] > 0, parts / by[..., None], np.copysign(np.float32(0), parts))
        codes = np.clip(quotients, -top, top).reshape(rows, -1)[:, :columns].astype(element.dtype).view(np.uint8)
    return (codes & 15 if element.bits == 4 else codes), found


def encode_activations(values: np.ndarray, row: Scheme, rule: str, g: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """`encode_blocks` of the finite values; NaN and Inf become the code 0x7F, which is NaN.

    e2m1 has no NaN: there the scale of their block becomes NaN, 0xFF (e8m0) or 0x7F (e4m3fn), and its codes 0.
    """
    finite = np.isfinite(values)
    if finite.all():
        return encode_blocks(values, row, rule, g)
    codes, found = encode_blocks(np.where(finite, values, np.float32(0)), row, rule, g)
    if FORMATS[row.dtype].bits == 8:
        codes[~finite] = 0x7F
        return codes, found
    size = row.block[1]
    lost = ~np.logical_and.reduceat(finite, np.arange(0, values.shape[1], size), axis=1)
    codes[np.repeat(lost, size, axis=1)[:, : values.shape[1]]] = 0
    found[lost] = 0x7F if row.global_scale else 0xFF
    return codes, found


def store(codes: np.ndarray, into: np.ndarray, element: Format, r: slice, c: slice) -> None:
    """Write codes, a byte each, of some rows and columns where they belong: two 4-bit ones share a byte."""
    if element.bits == 8:
        into[r, c] = codes
        return
    wide = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    into[r, c.start // 2 : -(-c.stop // 2)] = pack_fp4(wide[:, ::2], wide[:, 1::2])


def quantize_blocks(
    w: np.ndarray, scheme: Scheme, rule: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, Wrong]:
    """Codes, scale codes, global scale or None, and which values are not finite.

    The global scale is `factors_of` the largest magnitude of w; codes and scales are those of `encode_blocks`.
    """
    n, k = w.shape
    element, size = FORMATS[scheme.dtype], scheme.block[1]
    amax, wrong = survey(w)
    g = factors_of(amax).astype(np.float32)[()] if scheme.global_scale else None
    codes = np.empty((n, -(-k * element.bits // 8)), np.uint8)
    scale = np.empty((n, -(-k // size)), np.uint8)
    for r, c in tiles(w.shape, size):
        with np.errstate(over="ignore"):
            tile = w[r, c].astype(np.float32)
        some, scale[r, c.start // size : -(-c.stop // size)] = encode_blocks(tile, scheme, rule, g)
        store(some, codes, element, r, c)
    return codes, scale, np.array([g], np.float32) if scheme.global_scale else None, wrong


def pack_fp4(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two e2m1 codes (uint8, 0 to 15) a byte, `low`, the first of two neighbours, in the low nibble.

    Raises
    ------
    ValueError
        If the shapes differ, or a value needs more than four bits.

    Source: OCP MX 1.0, section 5.3, for e2m1; the order in a byte, which it leaves open, is that of ModelOpt and
    compressed-tensors.
    """
    low, high = np.asarray(low), np.asarray(high)
    if low.shape != high.shape or low.dtype != np.uint8 or high.dtype != np.uint8:
        raise ValueError(
            f"pack_fp4: low is {low.dtype} {list(low.shape)}, high {high.dtype} {list(high.shape)}; needed are two "
            "uint8 arrays of one shape."
        )
    for name, a in (("low", low), ("high", high)):
        if (a > 15).any():
            at = np.argwhere(a > 15)[0].tolist()
            raise ValueError(f"pack_fp4: {name}{at} is {a[tuple(at)]}; an e2m1 code is 0 to 15.")
    return low | high << 4


def unpack_fp4(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first and the second e2m1 code of each byte: the inverse of `pack_fp4`, whose sources it shares.

    Raises
    ------
    ValueError
        If packed is not uint8.
    """
    packed = np.asarray(packed)
    if packed.dtype != np.uint8:
        raise ValueError(f"unpack_fp4: packed is {packed.dtype}; needed is uint8.")
    return packed & 15, packed >> 4


def _swizzled(rows: int, columns: int) -> np.ndarray:
    """Where scale [r, c] lies in the 128x4 layout."""
    r, c = np.arange(rows)[:, None], np.arange(columns)[None, :]
    return ((r // 128) * -(-columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def to_128x4(scales: np.ndarray) -> np.ndarray:
    """Scale codes [rows, columns] (one byte each) in the layout of cuBLASLt and tcgen05, zeros where there is none.

    Returns
    -------
    array
        uint8, ceil(rows / 128) * 128 * ceil(columns / 4) * 4 bytes: blocks of 128 rows and 4 columns, 512 bytes each.

    Raises
    ------
    ValueError
        If scales are not two-dimensional, or not one byte each.

    Source: cuBLAS documentation, 1D Block Scaling Factors Layout.
    """
    scales = np.asarray(scales)
    if scales.ndim != 2 or scales.dtype.itemsize != 1:
        raise ValueError(f"to_128x4: scales are {scales.dtype} {list(scales.shape)}; needed is one byte each, 2-D.")
    rows, columns = scales.shape
    buffer = np.zeros(-(-rows // 128) * 128 * -(-columns // 4) * 4, np.uint8)
    buffer[_swizzled(rows, columns)] = scales.view(np.uint8)
    return buffer


def from_128x4(buffer: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Scale codes uint8 [rows, columns] out of a buffer that `to_128x4` describes.

    Raises
    ------
    ValueError
        If rows or columns is not a whole number of at least 0, or the buffer not uint8 of the size that they need.
    """
    if not all(isinstance(count, int | np.integer) and count >= 0 for count in (rows, columns)):
        raise ValueError(f"from_128x4: rows is {rows}, columns {columns}; needed are whole numbers, at least 0.")
    buffer = np.asarray(buffer)
    size = -(-rows // 128) * 128 * -(-columns // 4) * 4
    if buffer.shape != (size,) or buffer.dtype != np.uint8:
        raise ValueError(
            f"from_128x4: buffer is {buffer.dtype} {list(buffer.shape)}; {rows} x {columns} scales need uint8 [{size}]."
        )
    return buffer[_swizzled(rows, columns)]
