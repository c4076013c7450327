"""A float64 oracle of the block-scaled formats, written from the specifications alone.

Nothing here comes from cufp8, nor from ml_dtypes. e2m1 and e8m0 follow the "OCP Microscaling Formats (MX)
Specification", revision 1.0, sections 5.3 and 5.4; FLOOR is its section 6.3. Logarithms are exact (frexp), and every
fp32 operation of the contract is taken in float64 and rounded once more: products of two fp32 numbers are exact there,
and quotients round to the same fp32 number (Figueroa 1995), except among subnormals, which lead to code 0 either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import reference

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # of the codes 0..7; bit 3 is the sign
E2M1_TIES = (E2M1[1:] + E2M1[:-1]) / 2
FP4_VALUES = np.concatenate([E2M1, -E2M1])
ELEMENTS = {  # max, emax, bits of the mantissa
    "float4_e2m1fn": (6.0, 2, 1),
    "float8_e4m3fn": (448.0, 8, 3),
    "float8_e5m2": (57344.0, 15, 2),
}
SCHEMES = {  # dtype, scale_dtype, values in a block
    "NVFP4A16": ("float4_e2m1fn", "float8_e4m3fn", 16),
    "MXFP4A16": ("float4_e2m1fn", "float8_e8m0fnu", 32),
    "MXFP8A16": ("float8_e4m3fn", "float8_e8m0fnu", 32),
}


@dataclass(frozen=True)
class Blocks:
    """Codes (packed if e2m1), scale codes, global scale or None, and the values that they stand for, float64 [N, K]."""

    codes: np.ndarray
    scale: np.ndarray
    global_scale: np.ndarray | None
    values: np.ndarray


def fp32(a: Any) -> np.ndarray:
    """Rounded to float32, held in float64."""
    with np.errstate(under="ignore"):
        return np.asarray(a, np.float64).astype(np.float32).astype(np.float64)


def encode_e2m1(values: np.ndarray) -> np.ndarray:
    """The code nearest to each finite number: ties to even, saturating, a zero keeps its sign."""
    magnitude = np.abs(values)
    index = sum((magnitude > tie) | ((magnitude == tie) & (i % 2 == 1)) for i, tie in enumerate(E2M1_TIES))
    return (index + 8 * np.signbit(values)).astype(np.uint8)


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the first in the low nibble; an odd row ends in a high nibble of 0."""
    out = codes[:, ::2].copy()
    out[:, : codes.shape[1] // 2] += 16 * codes[:, 1::2]
    return out


def unpack(packed: np.ndarray, k: int) -> np.ndarray:
    """The codes 0..15 of K values a row."""
    return np.stack([packed % 16, packed // 16], axis=2).reshape(packed.shape[0], -1)[:, :k]


def floor_log2(a: np.ndarray) -> np.ndarray:
    return np.frexp(a)[1] - 1


def e8m0(amax: np.ndarray, rule: str, dtype: str) -> np.ndarray:
    """Scale codes of blocks whose greatest magnitudes are these float32 numbers; 0 for a block of zeros."""
    top, emax, bits = ELEMENTS[dtype]
    if rule == "RCEIL":
        least = np.maximum(fp32(amax * fp32(1 / top)), 2.0**-149)  # the product may round to 0
        fraction, exponent = np.frexp(least)
        power = exponent - (fraction == 0.5)  # ceil(log2), exactly
    elif rule == "FLOOR":
        power = floor_log2(amax) - emax
    else:  # EVEN: 2^n (1 + f) counts as 2^(n + 1) if it is within half of a step of the mantissa below it
        fraction = np.frexp(amax)[0] * 2
        power = floor_log2(amax) + (fraction + 2.0 ** -(bits + 1) >= 2) - emax
    return np.where(amax == 0, 0, np.clip(power + 127, 0, 254)).astype(np.uint8)


def amax_of_blocks(w: np.ndarray, size: int) -> np.ndarray:
    return np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[1], size), axis=1)


def factor(amax: Any) -> np.ndarray:
    """NVFP4's global scale of values up to amax."""
    return np.where(amax == 0, 1, np.maximum(fp32(amax / 2688), 2.0**-126))


def encode(w: np.ndarray, dtype: str, size: int, rule: str, g: Any = None) -> Blocks:
    """Blocks of finite float32 numbers in float64; g: NVFP4's global scale, float64, one or [rows, 1]."""
    amax = amax_of_blocks(w, size)
    if g is not None:
        with np.errstate(over="ignore"):
            scale = reference.encode(np.minimum(fp32(amax / fp32(6 * g)), 448))
        exact = reference.VALUES[scale] * g
        step = fp32(exact)
    else:
        scale = e8m0(amax, rule, dtype)
        exact = step = np.ldexp(1.0, scale.astype(np.int64) - 127)
    exact, step = (np.repeat(a, size, axis=1)[:, : w.shape[1]] for a in (exact, step))
    with np.errstate(over="ignore"):
        ratio = fp32(np.where(step == 0, np.copysign(0, w), w / np.where(step == 0, 1, step)))
    if dtype == "float4_e2m1fn":
        codes = encode_e2m1(ratio)
        values = FP4_VALUES[codes] * exact
        codes = pack(codes)
    else:
        codes = reference.encode(ratio, dtype)
        values = reference.ELEMENTS[dtype].values[codes] * exact
    return Blocks(codes, scale, None if g is None else np.ravel(g).astype(np.float32), values)


def quantize(w: Any, scheme: str, rule: str = "RCEIL") -> Blocks:
    """Codes, scales and values of a finite weight [N, K]."""
    dtype, _, size = SCHEMES[scheme]
    w = fp32(reference.to_float64(w))
    return encode(w, dtype, size, rule, factor(np.abs(w).max()) if scheme == "NVFP4A16" else None)


def quantize_activations(
    x: Any, dtype: str, scale_dtype: str, rule: str = "RCEIL", global_scale: float | None = None
) -> Blocks:
    """The same of activations [M, K], which may hold NaN and Inf; NVFP4's global scale is each row's, or given."""
    x = reference.to_float64(x)
    finite = np.isfinite(x)
    clean = np.where(finite, x, 0)
    g, size = None, 32
    if scale_dtype == "float8_e4m3fn":
        size = 16
        given = None if global_scale is None else np.float64(np.float32(global_scale))
        g = factor(np.abs(clean).max(axis=1, keepdims=True)) if given is None else given
    found = encode(clean, dtype, size, rule, g)
    if dtype != "float4_e2m1fn":
        found.codes[~finite] = 0x7F
        found.values[~finite] = np.nan
        return found
    codes = unpack(found.codes, x.shape[1])
    for i, j in np.argwhere(~finite):
        block = slice(j // size * size, j // size * size + size)
        found.scale[i, j // size] = 0x7F if size == 16 else 0xFF
        codes[i, block], found.values[i, block] = 0, np.nan
    found.codes[...] = pack(codes)
    return found


def offset_128x4(r: int, c: int, columns: int) -> int:
    """Where the scale of row r and block c lies in the layout of 128 x 4 tiles, in bytes."""
    tile = (r // 128) * -(-columns // 4) + c // 4
    return 512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4
