"""Number formats and schemes as rows of data; everything else about them is derived.

Sources: OCP 8-bit Floating Point Specification 1.0, section 5, for e4m3fn and e5m2; OCP Microscaling Formats (MX)
Specification 1.0, section 5.2 for MXFP8 and MXFP4, section 5.3 for e2m1, section 5.4 for e8m0.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """An element format of codes or scales, named as in ml_dtypes."""

    name: str
    bits: int = 8

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype (ml_dtypes for the 8- and 4-bit formats)."""
        return np.dtype(getattr(ml_dtypes, self.name, self.name))

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def mantissa_bits(self) -> int:
        """Stored bits of the mantissa."""
        return int(ml_dtypes.finfo(self.dtype).nmant)

    @property
    def table(self) -> np.ndarray:
        """The value of each code as float32, shape [2^bits]; NaN codes are NaN."""
        return np.arange(2**self.bits, dtype=np.uint8).view(self.dtype).astype(np.float32)


@dataclass(frozen=True)
class Scheme:
    """What is quantised, to which format, with which scales. Names are compressed-tensors' or in its style."""

    name: str
    dtype: str  # of the weight's codes
    scale_dtype: str
    block: tuple[int, int]  # rows and columns that share a scale; -1: all of them
    global_scale: bool = False  # one more float32 factor, for the whole weight or for each row
    x_block: tuple[int, int] | None = None  # which values of x, in these formats too, share a scale; None: x stays
    x_static: bool = False  # the scale of x is given once, not found in each call

    @property
    def x_in_blocks(self) -> bool:
        """Whether x is quantised with the block scales that the weight has."""
        return self.x_block is not None and self.scale_dtype != "float32"

    @property
    def takes_input_scale(self) -> bool:
        """Whether a scale of x may be given: that of all its values, or the global scale over those of blocks."""
        return self.x_block is not None and (self.x_static or self.global_scale)


FORMATS = {
    f.name: f
    for f in (
        Format("float8_e4m3fn"),
        Format("float8_e5m2"),
        Format("float8_e8m0fnu"),
        Format("float4_e2m1fn", 4),
    )
}

# A QuantizedTensor of codes made elsewhere is called by the first of these that has its dtypes and block.
SCHEMES = {
    s.name: s
    for s in (
        Scheme("FP8A16", "float8_e4m3fn", "float32", (1, -1)),
        Scheme("FP8_DYNAMIC", "float8_e4m3fn", "float32", (1, -1), x_block=(1, -1)),
        Scheme("FP8", "float8_e4m3fn", "float32", (-1, -1), x_block=(-1, -1), x_static=True),
        Scheme("MXFP8A16", "float8_e4m3fn", "float8_e8m0fnu", (1, 32)),
        Scheme("MXFP4A16", "float4_e2m1fn", "float8_e8m0fnu", (1, 32)),
        Scheme("NVFP4A16", "float4_e2m1fn", "float8_e4m3fn", (1, 16), global_scale=True),
        Scheme("MXFP8", "float8_e4m3fn", "float8_e8m0fnu", (1, 32), x_block=(1, 32)),
        Scheme("MXFP4", "float4_e2m1fn", "float8_e8m0fnu", (1, 32), x_block=(1, 32)),
        Scheme("NVFP4", "float4_e2m1fn", "float8_e4m3fn", (1, 16), global_scale=True, x_block=(1, 16)),
    )
}

# Weights that checkpoints have beside those of SCHEMES: a scale for each 128 x 128 block. `quantize` makes none.
BLOCKS = tuple(
    Scheme("FP8A16", "float8_e4m3fn", scale_dtype, (128, 128)) for scale_dtype in ("float32", "float8_e8m0fnu")
)

# What quantised activations may be, and with them any operand of a product of two: a scale per tensor, token (row) or
# group of neighbours. Where it is a weight made elsewhere, one of the same layout is called by the first row of SCHEMES
# that has it: e4m3fn per token FP8A16, NVFP4 NVFP4A16.
ACTIVATIONS = tuple(
    Scheme(name, dtype, "float32", block)
    for dtype in ("float8_e4m3fn", "float8_e5m2")
    for name, block in (("FP8_TENSOR", (-1, -1)), ("FP8_TOKEN", (1, -1)), ("FP8_GROUP", (1, 128)))
) + (
    Scheme("MXFP8", "float8_e4m3fn", "float8_e8m0fnu", (1, 32)),
    Scheme("MXFP8", "float8_e5m2", "float8_e8m0fnu", (1, 32)),
    Scheme("MXFP4", "float4_e2m1fn", "float8_e8m0fnu", (1, 32)),
    Scheme("NVFP4", "float4_e2m1fn", "float8_e4m3fn", (1, 16), global_scale=True),
)

# What x and y may be, in the order of `Out` in kernels_cu/linear.cuh.
FLOATS = {name: Format(name).dtype for name in ("bfloat16", "float16", "float32")}

# The least scale: the smallest normal float32. A smaller one would lose bits of its own.
SCALE_MIN = float(np.finfo(np.float32).tiny)


def scheme(name: str) -> Scheme:
    """The scheme of that name.

    Raises
    ------
    ValueError
        If there is none.
    """
    if name not in SCHEMES:
        raise ValueError(f"scheme {name!r} is not known; known are {', '.join(SCHEMES)}.")
    return SCHEMES[name]
