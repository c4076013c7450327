"""Which kernel serves which problem on which GPU: two tables and `pick`. Pure: no GPU, no CuPy."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from cufp8.formats import FLOATS, FORMATS


@dataclass(frozen=True)
class Arch:
    """A GPU architecture, in NVRTC's spelling.

    `acc` bounds the error of a sum of products relative to the sum of their magnitudes, per kind of
    arithmetic ("cuda" cores or "tensor" cores): measured where `proven`, else taken from the nearest
    measured one.
    """

    name: str
    cc: tuple[int, int]  # compute capability
    proven: bool = False  # kernels ran and were timed on such a GPU
    acc: dict[str, float] = field(default_factory=lambda: {"cuda": 2**-20, "tensor": 2**-16}, hash=False)

    @property
    def bf16_mma(self) -> bool:
        return self.cc >= (8, 0)

    @property
    def fp8(self) -> bool:
        """The hardware converts to FP8 and back."""
        return self.cc >= (8, 9)

    @property
    def bulk(self) -> bool:
        """Bulk copies into shared memory, and clusters."""
        return self.cc >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """Tensor-core products of four warps, which read shared memory themselves."""
        return self.cc == (9, 0)

    @property
    def pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.cc >= (9, 0)


ARCHS = {
    a.name: a
    for a in (
        Arch("sm_75", (7, 5)),
        Arch("sm_80", (8, 0)),
        Arch("sm_86", (8, 6)),
        Arch("sm_89", (8, 9)),
        Arch("sm_90a", (9, 0), proven=True),
        Arch("sm_100a", (10, 0)),
        Arch("sm_103a", (10, 3)),
        Arch("sm_120a", (12, 0)),
        Arch("sm_121a", (12, 1)),
    )
}


def arch_of(name: str) -> Arch:
    """The row of ARCHS, or for a GPU that has none a row made from its name (`sm_110` -> 11.0)."""
    if name in ARCHS:
        return ARCHS[name]
    number = int(name.removeprefix("sm_").rstrip("af"))
    return Arch(name, (number // 10, number % 10))


@dataclass(frozen=True)
class Target:
    """A GPU as far as the choice of a kernel depends on it."""

    arch: str
    sms: int
    smem_bytes: int  # shared memory that one block may have
    proven: bool


@dataclass(frozen=True)
class Weight:
    """How the weights of some schemes lie on a GPU, and what multiplies them; a row of WEIGHTS.

    A tile of the kernels' layout is UNIT channels by STEP of k: codes, then the scales of its blocks
    (kernels_cu/weights.cuh).
    """

    name: str
    bits: int  # of a code
    block: int  # of k that a scale in the tile covers; 0: scales lie elsewhere
    # Dtypes of x with which, on tensor cores, scales multiply sums of the stretch of k that they cover: folded into the
    # codes they would be rounded.
    scales_sums: tuple[str, ...] = ()
    folds: tuple[int, int] | None = None  # e8m0 codes, first and last, that fold where they may; None: all scales do

    @property
    def scales(self) -> int:
        """Scales of a channel in a tile, a byte each."""
        return STEP // self.block if self.block else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of codes in a tile."""
        return UNIT * STEP * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        return self.code_bytes + UNIT * self.scales

    @property
    def own_bytes(self) -> int:
        """Of a tile, where each lane of a warp has its own copy of what it multiplies: scales of two channels."""
        return self.code_bytes + 32 * 2 * self.scales

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        sums = ((f"SUMS_{x.upper()}", int(x in self.scales_sums)) for x in ("bfloat16", "float16"))
        number = list(WEIGHTS).index(self.name)
        return ("WEIGHT", number), ("TILE_BYTES", self.tile_bytes), ("IS_MX", int(self.folds is not None)), *sums

    @property
    def scale_turn(self) -> int:
        """Bits by which a tile's words of four scales are turned to the left."""
        return 4 if self.folds is None else 7

    @property
    def layout(self) -> str:
        """The row of KERNELS that lays them out: one for codes in bytes whose tiles have no scales."""
        return f"layout_{self.name}" if self.block else "layout"


# In the order of Format in weights.cuh. A scale of NVFP4 is a power of two from 2^-9 to 2^8 and three more bits, which
# with a code fit bfloat16 and float16 both.
WEIGHTS = {
    w.name: w
    for w in (
        Weight("fp8", 8, 0),
        Weight("fp8_block", 8, 0, scales_sums=("bfloat16", "float16")),
        Weight("mxfp8", 8, 32, scales_sums=("float16",), folds=(3, 134)),
        Weight("mxfp4", 4, 32, scales_sums=("float16",), folds=(0, 128)),
        Weight("nvfp4", 4, 16),
    )
}


def weight_of(dtype: str, scale_dtype: str, block: tuple[int, int]) -> Weight:
    """How weights of such codes and scales lie on a GPU. dtypes are ml_dtypes names."""
    if scale_dtype == "float32" or block[0] > 1:
        return WEIGHTS["fp8_block" if block[0] > 1 else "fp8"]
    return next(w for w in WEIGHTS.values() if (w.bits, w.block) == (FORMATS[dtype].bits, block[1]))


@dataclass(frozen=True)
class Problem:
    """y [m, n] = x [m, k] @ w [n, k].T in one scheme. dtypes are ml_dtypes names."""

    scheme: str
    block: tuple[int, int]
    x_dtype: str
    out_dtype: str
    m: int
    n: int
    k: int
    aligned16: bool = True  # every row of x starts on a multiple of 16 bytes, and k values fill such pieces
    batch_invariant: bool = False  # the bits of a row of y depend on its row of x alone, not on m
    captured: bool = False  # the stream is being captured, which cuBLAS through CuPy refuses
    weight: str = "fp8"  # a name in WEIGHTS
    wide: bool = False  # the weight has e8m0 scales that do not fold (Weight.folds)


@dataclass(frozen=True)
class ScaledProblem:
    """y [m, n] = a [m, k] @ b [n, k].T with both operands in FP8. dtypes are ml_dtypes names."""

    a_dtype: str
    b_dtype: str
    out_dtype: str
    m: int
    n: int
    k: int
    fast_accum: bool = False  # sums may stay in the tensor cores' registers, which keep fewer bits than float32
    aligned16: bool = True  # every row of a and of b starts on a multiple of 16 bytes


@dataclass(frozen=True)
class BlockProblem:
    """y [m, n] = a [m, k] @ b [n, k].T with both operands in BLOCK_FORMATS, which a and b name."""

    a: str
    b: str
    out_dtype: str
    m: int
    n: int
    k: int


# The argument blocks of kernels, in struct's notation. `launch` packs them; the .cu files mirror them
# and fail to compile if the size differs.
# x codes scale bias y, strides of x and y, then m n k steps out panel wider split stages, and where tokens' factors lie
LINEAR_ARGS = struct.Struct("@PPPPPqqiiiiiiiiiq")
# the same, then a tile's units, how many tiles have one more, ways, where sums lie, early, and the tensor map of x
TENSOR_MAP_BYTES = 128
TILE_ARGS = struct.Struct(f"{LINEAR_ARGS.format}iiiii4x{TENSOR_MAP_BYTES}s")
# a b, scale a b, bias y workspace, strides of a b y, then m n k out, scales' steps of a b, aligned whole weights,
# stages split, tile early shared, and the tensor maps of a b y
SCALED_ARGS = struct.Struct("@PPPPPPPqqqiiiiiiiiiiiiii56x" + f"{TENSOR_MAP_BYTES}s" * 3)
QUANTIZE_ARGS = struct.Struct("@PPPPqqqq")  # w codes scale status, strides n k, pitch, k
# x second residual sum codes scale given, strides and steps, then m k value eps 1/k found mode e5m2
ACTIVATION_ARGS = struct.Struct("@PPPPPPPqqqqqqqiifffiii")
# x codes scale factor given status, strides and step, k, then m format rule mode value
BLOCK_ARGS = struct.Struct("@PPPPPPqqqqqiiiifxxxx")
# of a and of b: codes scales factor, strides of codes and scales, format, factor's step; bias y, y's stride, m n k out
BLOCK_PRODUCT_ARGS = struct.Struct("@" + "PPPqqii" * 2 + "PPqiiii")
STREAM_ARGS = struct.Struct("@PPqq")  # source, destination, 16-byte words, whether to store

# The layout that all kernels read (kernels_cu/linear.cuh): tiles of UNIT channels and STEP of k.
UNIT, STEP = 16, 64


def units_steps(n: int, k: int) -> tuple[int, int]:
    """Units and steps of a weight [n, k] in the kernels' layout: a tile each pair."""
    return _ceil(n, UNIT), _ceil(k, STEP)


def _panels(units: int, panels: int) -> list[slice]:
    """The units of each panel: all but equal, the wider ones first."""
    width, wider = divmod(units, panels)
    firsts = [p * width + min(p, wider) for p in range(panels + 1)]
    return [slice(a, b) for a, b in zip(firsts, firsts[1:], strict=False)]


def pack(codes: np.ndarray, panels: int, weight: Weight | None = None, scale: np.ndarray | None = None) -> np.ndarray:
    """Codes and scales in the kernels' layout, uint8 [units * steps * tile_bytes]; zeros past n and k.

    Parameters
    ----------
    codes
        uint8 [n, k]; of 4 bits one a byte.
    weight
        A row of WEIGHTS; None: "fp8".
    scale
        Of weights whose tiles have scales: uint8 [n, ceil(k / block)].
    """
    weight = weight or WEIGHTS["fp8"]
    units, steps = units_steps(*codes.shape)
    wide = np.zeros((units * UNIT, steps * STEP), np.uint8)
    wide[: codes.shape[0], : codes.shape[1]] = codes
    # [unit, half, row, step, j, h, t, e]
    tiles = wide.reshape(units, 2, 8, steps, 4, 2, 4, 2)
    if weight.bits == 8:  # -> [unit, step, half, row, t, j, e, h]
        tiles = tiles.transpose(0, 3, 1, 2, 6, 4, 7, 5)
    else:  # -> [unit, step, row, t, j, pair, e]
        pairs = tiles.transpose(0, 3, 2, 6, 4, 5, 1, 7).reshape(units, steps, 8, 4, 4, 4, 2)
        tiles = _e2m1_words(pairs)[..., None].view(np.uint8)
    tiles = tiles.reshape(units, steps, weight.code_bytes)
    if weight.block:
        kept = np.zeros((units * UNIT, steps * weight.scales), np.uint8)
        kept[: scale.shape[0], : scale.shape[1]] = NVFP4_SCALES[scale] if weight.name == "nvfp4" else scale
        # [unit, half, row, step, word, block of two] -> [unit, step, row, word, half, block of two]
        kept = kept.reshape(units, 2, 8, steps, -1, 2).transpose(0, 3, 2, 4, 1, 5).reshape(units, steps, -1)
        words = _turned(kept.view(np.uint32), weight.scale_turn)
        tiles = np.concatenate([tiles, words.view(np.uint8)], axis=2)
    return np.concatenate([tiles[u].swapaxes(0, 1).ravel() for u in _panels(units, panels)])


def unpack(
    packed: np.ndarray, n: int, k: int, panels: int, weight: Weight | None = None
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack`: codes uint8 [n, k], and the scales where tiles have some."""
    weight = weight or WEIGHTS["fp8"]
    units, steps = units_steps(n, k)
    tiles = np.empty((units, steps, weight.tile_bytes), np.uint8)
    for u in _panels(units, panels):
        some = tiles[u]
        part = packed[u.start * steps * weight.tile_bytes :][: some.size]
        some[...] = part.reshape(steps, len(some), -1).swapaxes(0, 1)
    codes = np.ascontiguousarray(tiles[..., : weight.code_bytes])
    if weight.bits == 8:
        wide = codes.reshape(units, steps, 2, 8, 4, 4, 2, 2).transpose(0, 2, 3, 1, 5, 7, 4, 6)
    else:
        pairs = _e2m1_pairs(codes.view(np.uint32).reshape(units, steps, 8, 4, 4))
        # [unit, step, row, t, j, h, half, e] -> [unit, half, row, step, j, h, t, e]
        wide = pairs.reshape(units, steps, 8, 4, 4, 2, 2, 2).transpose(0, 6, 2, 1, 4, 5, 3, 7)
    wide = np.ascontiguousarray(wide.reshape(units * UNIT, steps * STEP)[:n, :k])
    if not weight.block:
        return wide
    words = np.ascontiguousarray(tiles[..., weight.code_bytes :]).view(np.uint32)
    kept = _turned(words, 32 - weight.scale_turn).view(np.uint8).reshape(units, steps, 8, -1, 2, 2)
    kept = kept.transpose(0, 4, 2, 1, 3, 5).reshape(units * UNIT, steps * weight.scales)[:n, : _ceil(k, weight.block)]
    return wide, np.argsort(NVFP4_SCALES).astype(np.uint8)[kept] if weight.name == "nvfp4" else kept.copy()


# The bits of a word of eight e2m1 codes that each of its pairs has, and by how many bits each group of them is turned
# to the left to come to the sign's and the magnitude's place in the halves of a pair (e2m1_pair of weights.cuh).
_E2M1_BITS = (
    ((0x81C081C0, 0),),
    ((0x81C081C0, 6),),
    ((0x81C081C0, 12),),
    ((0x80C080C0, 2), (0x01000100, 26)),
)


def _turned(words: np.ndarray, bits: int) -> np.ndarray:
    return words << np.uint32(bits) | words >> np.uint32(-bits % 32) if bits else words


def _e2m1_words(pairs: np.ndarray) -> np.ndarray:
    """Codes [..., 4 pairs, 2] -> uint32 [...]: the pairs of a product's operands in a word."""
    wide = pairs.astype(np.uint32)
    halves = (wide & 8) << 12 | (wide & 7) << 6
    whole = halves[..., 0] | halves[..., 1] << 16
    words = np.zeros(whole.shape[:-1], np.uint32)
    for i, groups in enumerate(_E2M1_BITS):
        for bits, left in groups:
            words |= _turned(whole[..., i] & np.uint32(bits), -left % 32)
    return words


def _e2m1_pairs(words: np.ndarray) -> np.ndarray:
    """The inverse: codes uint8 [..., 4, 2]."""
    whole = [sum(_turned(words, left) & np.uint32(bits) for bits, left in groups) for groups in _E2M1_BITS]
    halves = np.stack(whole, axis=-1)[..., None] >> np.array([0, 16], np.uint32)
    return (halves >> 12 & 8 | halves >> 6 & 7).astype(np.uint8)


def _nvfp4_scales() -> np.ndarray:
    """How tiles keep each e4m3fn scale (weights.cuh); of the codes that no scale has, numbers that no other has."""
    kept = np.zeros(256, np.int64)
    for code in range(1, 0x7F):
        mantissa, exponent = np.frexp(float(FORMATS["float8_e4m3fn"].table[code]))
        kept[code] = (exponent - 1 + 9) * 8 + (mantissa * 2 - 1) * 8 + 1
    kept[[0, 0x80]] = 209, 210
    left = [code for code in range(256) if code not in (0, 0x80) and not kept[code]]
    kept[left] = np.setdiff1d(np.arange(256), kept[kept > 0])[: len(left)]
    return kept.astype(np.uint8)


NVFP4_SCALES = _nvfp4_scales()


@dataclass(frozen=True)
class Launch:
    """How one kernel is launched. The grid is (x, y, z) in blocks."""

    entry: str
    grid: tuple[int, int, int]
    block: int
    split: int = 1  # blocks of a cluster that share a panel's k
    stages: int = 0  # of a ring in shared memory
    smem_bytes: int = 0  # dynamic shared memory
    fields: tuple[int, ...] = ()  # of the argument block after those of LINEAR_ARGS
    box: int = 0  # rows of x that a copy by a tensor map brings; 0: the kernel takes no map
    boxes: tuple[int, int, int] = (0, 0, 0)  # rows of a, b, y in a copy by a tensor map, of a kernel of scaled.cuh
    workspace: int = 0  # bytes on the GPU that its blocks need to give each other sums


def _serves_nothing(target: Target, problem: Any) -> bool:
    return False


def _multiplies(weight: str, serves: Callable[[Target, Problem], bool], target: Target, p: Problem) -> bool:
    """A row that is compiled for one of WEIGHTS."""
    return p.weight == weight and serves(target, p)


def _too_wide(p: Problem) -> bool:
    """Whether scales would fold, but for those that this weight has."""
    return p.wide and p.x_dtype == "bfloat16"


@dataclass(frozen=True)
class Kernel:
    """A row of KERNELS: a source file, the constants it is compiled with, and what it serves.

    `entries(arch)` names the kernels that the binary holds; `serves(target, problem)` says whether the row
    fits; `plan(target, problem)` gives the launch. Rows that are no linear kernel serve nothing.
    """

    name: str
    source: str
    args: struct.Struct
    defines: tuple[tuple[str, int], ...]
    entries: Callable[[Arch], tuple[str, ...]]
    serves: Callable[[Target, Any], bool] = _serves_nothing
    plan: Callable[[Target, Any], Launch] | None = None
    dynamic_smem: bool = False  # launches ask for shared memory of their own size
    takes: type = Problem  # what `serves` and `plan` are asked about
    weight: str = ""  # a name in WEIGHTS, if it is compiled for one

    @property
    def linear(self) -> bool:
        """Whether the row serves linear layers."""
        return self.takes is Problem and self.serves is not _serves_nothing


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _token_groups(groups: int) -> tuple[int, int]:
    """Grid y and z for so many groups of tokens: y ends at 65,535."""
    return min(groups, 65535), _ceil(groups, 65535)


# --- gemv.cu ---------------------------------------------------------------------------------------------

GEMV_WARPS = 16


def _gemv_serves(target: Target, p: Problem) -> bool:
    return not (_async_serves(target, p) or _tiles_serve(target, p) or _mma_serves(target, p))


def _gemv_plan(target: Target, p: Problem) -> Launch:
    # Four tokens share a read of the weight; tensor cores serve what they can of more than one token.
    entries = _gemv_entries(arch_of(target.arch))
    tokens = 4 if (p.m > 1 or p.batch_invariant) and f"gemv_{p.x_dtype}_4" in entries else 1
    grid = (_ceil(p.n, UNIT), *_token_groups(_ceil(p.m, tokens)))
    return Launch(f"gemv_{p.x_dtype}_{tokens}", grid, 32 * GEMV_WARPS)


def _gemv_entries(arch: Arch) -> tuple[str, ...]:
    four = [x for x in FLOATS if x not in _mma_dtypes(arch)]
    return (*(f"gemv_{x}_1" for x in FLOATS), *(f"gemv_{x}_4" for x in four))


# --- mma_sync.cu -----------------------------------------------------------------------------------------

MMA_WARPS = 8
_MMA_SHAPES = {8: 1, 16: 2, 32: 2}  # tokens of a block -> units of a block


def _mma_dtypes(arch: Arch) -> tuple[str, ...]:
    return ("bfloat16", "float16") if arch.bf16_mma else ("float16",)


def _mma_entries(weight: Weight, arch: Arch) -> tuple[str, ...]:
    wide = ("bfloat16_wide",) if weight.folds and arch.bf16_mma else ()
    return tuple(f"mma_sync_{x}_{tokens}" for x in (*_mma_dtypes(arch), *wide) for tokens in _MMA_SHAPES)


def _mma_serves(target: Target, p: Problem) -> bool:
    # A row's sums are added in the same order for any number of tokens of a block.
    return (p.m > 1 or p.batch_invariant) and p.x_dtype in _mma_dtypes(arch_of(target.arch))


def _mma_plan(target: Target, p: Problem) -> Launch:
    tokens = next((t for t in _MMA_SHAPES if p.m <= t), 32)
    grid = (_ceil(_ceil(p.n, UNIT), _MMA_SHAPES[tokens]), *_token_groups(_ceil(p.m, tokens)))
    return Launch(f"mma_sync_{p.x_dtype}{'_wide' * _too_wide(p)}_{tokens}", grid, 32 * MMA_WARPS)


# --- async_mma.cu ----------------------------------------------------------------------------------------

# bits of a code -> tokens, units of a block -> steps of k that a warp has on their way
_ASYNC_SHAPES = {
    8: {(1, 1): 4, (8, 1): 4, (8, 2): 4, (16, 2): 2},
    4: {(1, 1): 4, (1, 2): 4, (8, 1): 4, (8, 2): 4, (16, 2): 2},
}
# tokens -> multiples of the multiprocessors: of more units than so many a block has two; the same for 4-bit codes and
# 128 steps or more. us of a chain on an H200, by one / by two. M = 8: 4096x4096 6.2 / 8.0, 8192x8192 18.8 / 17.4, 4-bit
# 4096x14336 14.8 / 13.6, 4096x4096 5.5 / 6.7. M = 1, 4-bit: 8192x8192 11.9 / 10.8, 28672x8192 36.4 / 34.0, 14336x4096
# 11.2 / 12.2.
_ASYNC_TWO = {1: (math.inf, 2), 8: (2, 1), 16: (0, 0)}


def _async_entries(weight: Weight, arch: Arch) -> tuple[str, ...]:
    if not arch.bf16_mma:
        return ()
    shapes = _ASYNC_SHAPES[weight.bits]
    return tuple(f"async_mma_{x}_{tokens}_{units}" for x in _mma_dtypes(arch) for tokens, units in shapes)


def _async_serves(target: Target, p: Problem) -> bool:
    # us of a chain on an H200, against bulk_mma.cu. M = 1: 4096x4096 5.7 / 7.8, 4096x14336 14.0 / 19.6, 8192x8192
    # 16.5 / 19.2, 151936x4096 140 / 154. M = 8: 4096x4096 6.2 / 7.9, 4096x14336 15.5 / 19.6, 8192x8192 17.4 / 19.4, but
    # 14336x4096 17.0 / 17.0, 28672x8192 59.4 / 56.6: each block reads x again. M = 16: 4096x4096 7.6 / 8.0, 4096x14336
    # 18.2 / 20.1, but 6144x4096 10.9 / 10.5. NVFP4, M = 8: 8192x8192 13.6 / 14.5, 14336x4096 13.5 / 13.4, 28672x8192
    # 41.9 / 35.1.
    arch, units = arch_of(target.arch), units_steps(p.n, p.k)[0]
    if not (arch.bf16_mma and p.x_dtype in _mma_dtypes(arch) and p.aligned16) or p.batch_invariant or _too_wide(p):
        return False
    if p.m <= 8:
        return p.m == 1 or units <= 4 * target.sms or not _tiles_serve(target, p)
    return p.m <= 16 and target.sms < units <= 2 * target.sms


def _async_plan(target: Target, p: Problem) -> Launch:
    # us of a chain on an H200 by 8 / by 16 warps, M = 1: 4096x4096 5.7 / 6.3, 4096x14336 16.4 / 14.0, 1024x8192
    # 7.1 / 4.7; 4-bit: 4096x4096 5.2 / 4.8, 4096x14336 14.6 / 10.6, 8192x8192 11.9 / 13.2, with two units and M = 8
    # 4096x14336 20.7 / 13.6. By 4 / by 8, 4-bit, M = 1: 28672x8192 with two units 34.0 / 36.5, 14336x4096 with one
    # 13.0 / 11.2.
    units, steps = units_steps(p.n, p.k)
    weight = WEIGHTS[p.weight]
    four = weight.bits == 4
    shapes = _ASYNC_SHAPES[weight.bits]
    tokens = next(t for t, _ in shapes if p.m <= t)
    wide = 1 + (units > _ASYNC_TWO[tokens][four and steps >= 128] * target.sms)
    group = shapes[tokens, wide]
    x_bytes = group * 160 if tokens == 1 else tokens * (group * 128 + 16)
    warp_bytes = group * wide * weight.own_bytes + x_bytes
    few = units <= (2 if four and (tokens == 1 or wide == 2) else 1) * target.sms
    if tokens == 16:
        most = 12
    elif four and wide == 2 and units > 4 * target.sms:
        most = 4
    else:
        most = 16 if few or (tokens == 1 and steps >= 224) else 8
    most = min(most, target.smem_bytes // warp_bytes)
    groups = _ceil(steps, group)
    warps = _ceil(groups, _ceil(groups, most))  # all with as many groups, or one fewer
    smem_bytes = warps * warp_bytes
    if tokens == 1 and units <= 3 * target.sms:
        # Three blocks a multiprocessor, not four: 5.7 / 6.3 us at 4096x4096. The next kernel's reads delay this one's.
        smem_bytes = max(smem_bytes, target.smem_bytes // 4)
    name = f"async_mma_{p.x_dtype}_{tokens}_{wide}"
    return Launch(name, (_ceil(units, wide), 1, 1), 32 * warps, smem_bytes=smem_bytes)


# --- tiles.cuh: bulk_mma.cu, wgmma.cu --------------------------------------------------------------------

TILE_MAX_UNITS, TILE_MAX_STAGES = 8, 16
# kernel -> tokens of a block -> blocks whose registers fit a multiprocessor; the same where scales multiply sums
_TILES = {"bulk_mma": {8: 2, 16: 2, 32: 2, 64: 1}, "wgmma": {32: 2, 64: 2, 128: 1, 256: 1}}
_SUMS_TILES = {"bulk_mma": {8: 2, 16: 2, 32: 1}, "wgmma": {32: 2, 64: 1, 128: 1}}
_WAYS = {"bulk_mma": (8, 4, 2), "wgmma": (2, 1)}  # in which 8 warps may take turns at the stages, the most first
_HELD = {"bulk_mma": 1, "wgmma": 3}  # stages that a way waits for before it gives the first of them back


def _tiles(name: str, weight: Weight, x_dtype: str) -> dict[int, int]:
    """Tokens of a block -> blocks whose registers fit a multiprocessor."""
    some = (_SUMS_TILES if x_dtype in weight.scales_sums else _TILES)[name]
    # Scales of blocks take the registers that bulk_mma.cu needs for the sums of 64 tokens.
    return {t: b for t, b in some.items() if t <= 32} if name == "bulk_mma" and weight.name != "fp8" else some


def _warp_units(name: str, weight: Weight, tokens: int) -> int:
    """Units of a warp that multiplies; 8 are all of a tile."""
    # us of a chain on an H200, NVFP4, M = 8, by 2 / by 8: 14336x4096 13.9 / 13.4, 28672x8192 43.0 / 35.1.
    return 1 if name == "wgmma" else 8 if weight.bits == 4 and tokens == 8 else 2


def _tile_threads(p: Problem, tokens: int) -> int:
    """Threads of a block: more for more sums, of which scales that multiply some need a second set."""
    sets = 2 if p.x_dtype in WEIGHTS[p.weight].scales_sums else 1
    return 384 if tokens * sets > 128 else 320


def _tile_defines(name: str) -> tuple[tuple[str, int], ...]:
    blocks = {"BLOCKS": _TILES[name], "SUMS_BLOCKS": _SUMS_TILES[name]}
    return tuple((f"{key}_{tokens}", some.get(tokens, 0)) for key, some in blocks.items() for tokens in _TILES[name])


def _tile_entries(name: str, weight: Weight, dtypes: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{name}_{x}_{tokens}" for x in dtypes for tokens in _tiles(name, weight, x))


def _tiles_serve(target: Target, p: Problem) -> bool:
    fits = arch_of(target.arch).bulk and p.x_dtype in ("bfloat16", "float16") and p.aligned16 and not _too_wide(p)
    return fits and target.smem_bytes >= 99 << 10


def tile_launch(
    name: str, target: Target, p: Problem, tokens: int, tiles: int, split: int = 1, per_sm: int = 1
) -> Launch:
    """The launch of a kernel of tiles.cuh.

    `tokens` of a block, `tiles` along n, `split` blocks that share k, `per_sm` blocks a multiprocessor, of this launch
    and the next; where there are more, they take tile after tile.
    """
    large = target.smem_bytes >= 200 << 10
    fitting = min(per_sm, _tiles(name, WEIGHTS[p.weight], p.x_dtype)[tokens]) if large else 1
    tile, wider = divmod(units_steps(p.n, p.k)[0], tiles)
    most = tile + (wider > 0)
    wanted = tiles * _ceil(p.m, tokens) * split
    blocks = min(wanted, target.sms * fitting) if split == 1 else wanted
    stage = tokens * STEP * 2 + _ceil(most * WEIGHTS[p.weight].tile_bytes, 1024) * 1024
    warp_units = _warp_units(name, WEIGHTS[p.weight], tokens)
    for ways in _WAYS[name]:
        sums = tokens * warp_units * TILE_MAX_UNITS * UNIT * 4 if split * ways > 1 else 0
        own = blocks < wanted or (split > 1 and tokens <= 64 and large) or (split == 1 and p.batch_invariant)
        own_sums = sums if own else 0  # else they take the ring's place; where m must not matter, the ways must not
        room = target.smem_bytes // fitting - 1024 - own_sums  # the system's own share of a block
        stages = min(room // (stage + 16), TILE_MAX_STAGES) // ways * ways
        enough = TILE_MAX_UNITS // ways * warp_units >= max(most, split)  # warps for the units and their sums
        least = 1 if warp_units == TILE_MAX_UNITS else max(2, _HELD[name])  # stages of a way
        if enough and stages >= least * ways:
            break
    else:
        raise AssertionError(f"{name}: no room for {tokens} tokens, {most} units, {split} blocks on {target}")
    ring = stages * (stage + 16)
    early = blocks % target.sms == 0 and blocks <= target.sms * fitting and split <= 2
    return Launch(
        f"{name}_{p.x_dtype}_{tokens}", (blocks, 1, 1), _tile_threads(p, tokens), split, stages,
        max(ring + own_sums, sums), (tile, wider, ways, ring if own_sums else 0, early), tokens,
    )  # fmt: skip


def _few_tokens(target: Target, p: Problem) -> tuple[int, int, int]:
    """Tiles and what follows in `tile_launch`, where the weight's bytes decide: each multiprocessor reads as many."""
    # us of a chain on an H200, M = 16: 4096x4096, 66 tiles x 2 blocks 8.0, 32 x 4 9.5; 28672x8192, 264 tiles by 264
    # blocks 57, by 132 62.
    return *panels_split(p.n, p.k, target.sms), 2


def _bulk_entries(weight: Weight, arch: Arch) -> tuple[str, ...]:
    # From sm_120 on shared memory has no room for the sums of 64 tokens.
    entries = _tile_entries("bulk_mma", weight, _mma_dtypes(arch)) if arch.bulk else ()
    return tuple(e for e in entries if arch.cc < (12, 0) or not e.endswith("_64"))


def _invariant(name: str, target: Target, p: Problem) -> Launch:
    """One split for any m, and tokens of a block among which a row's products and sums come in the same order."""
    tiles, split, per_sm = _few_tokens(target, p)
    narrow = 2 * _ceil(units_steps(p.n, p.k)[0], tiles) <= TILE_MAX_UNITS  # 256 tokens leave no room for two ways
    most = 32 if name == "bulk_mma" else 128 if narrow else 256
    usable = _tiles(name, WEIGHTS[p.weight], p.x_dtype)
    most = min(most, max(usable))
    tokens = next((t for t in usable if t >= min(p.m, most) and t >= 32), most)
    return tile_launch(name, target, p, tokens, tiles, split, per_sm)


def _bulk_plan(target: Target, p: Problem) -> Launch:
    if p.batch_invariant:
        return _invariant("bulk_mma", target, p)
    usable = _tiles("bulk_mma", WEIGHTS[p.weight], p.x_dtype)
    most = min(max(usable), 64 if target.smem_bytes >= 200 << 10 else 32)
    tokens = next(t for t in usable if t >= min(p.m, most))
    return tile_launch("bulk_mma", target, p, tokens, *_few_tokens(target, p))


# tokens of a block -> ns of a step of a tile, by one way and by two; ns of adding up the sums of a cluster. On an H200.
_WGMMA_NS = {64: (310, 170, 900), 128: (400, 225, 2000), 256: (650, 500, 6000)}
_CLUSTERED = {1: 1.0, 2: 1.0, 4: 120 / 132, 8: 112 / 132}  # of the multiprocessors that clusters of so many blocks fill


def _wgmma_dtypes(weight: Weight) -> tuple[str, ...]:
    """Of x, with which a step's products need no scales, or one."""
    return tuple(x for x in ("bfloat16", "float16") if not (weight.block and x in weight.scales_sums))


def _wgmma_entries(weight: Weight, x_dtype: str, many: bool, arch: Arch) -> tuple[str, ...]:
    """Of the binary for 256 tokens of a block (`many`), or of the one for fewer."""
    entries = _tile_entries("wgmma", weight, (x_dtype,)) if arch.wgmma else ()
    return tuple(e for e in entries if e.endswith("_256") == many)


def _wgmma_serves(entries: Callable[[Arch], tuple[str, ...]], target: Target, p: Problem) -> bool:
    # us of a chain on an H200, against bulk_mma.cu. M = 16: 14336x4096 18.2 / 17.6, 28672x8192 61 / 57; M = 32:
    # 14336x4096 18.0 / 20.2, 28672x8192 59 / 66, but 4096x14336 22.1 / 21.0; M = 64: 4096x14336 23.3 / 27.5.
    arch = arch_of(target.arch)
    fits = arch.wgmma and _tiles_serve(target, p) and (p.m > 16 or p.batch_invariant)
    return fits and _wgmma_plan(target, p).entry in entries(arch)


@cache
def _wgmma_plan(target: Target, p: Problem) -> Launch:
    if p.batch_invariant:
        return _invariant("wgmma", target, p)
    if p.m <= 32:
        return tile_launch("wgmma", target, p, 32, *_few_tokens(target, p))
    units, steps = units_steps(p.n, p.k)
    narrow, half = _ceil(units, TILE_MAX_UNITS), _ceil(units, TILE_MAX_UNITS // 2)
    shapes = [panels_split(p.n, p.k, target.sms), *((tiles, split) for tiles in (narrow, half) for split in _CLUSTERED)]
    choices = {}
    for tokens, (tiles, split) in itertools.product(_WGMMA_NS, shapes):
        if tokens in _tiles("wgmma", WEIGHTS[p.weight], p.x_dtype):
            *step_ns, sums_ns = _WGMMA_NS[tokens]
            step = step_ns[2 * _ceil(units, tiles) <= TILE_MAX_UNITS and split <= TILE_MAX_UNITS // 2]
            blocks, room = tiles * _ceil(p.m, tokens) * split, int(target.sms * _CLUSTERED[split])
            if split == 1:
                choices[tokens, tiles, split] = _ceil(blocks, room) * steps * step
            elif blocks <= room and steps >= 4 * split:
                choices[tokens, tiles, split] = _ceil(steps, split) * step + sums_ns
    # Of equals the panels, each with its own multiprocessor, where the weight's bytes decide; else the fewest tiles.
    tokens, tiles, split = min(choices, key=lambda c: (choices[c], -c[1] if p.m <= 64 else c[1]))
    # Two blocks a multiprocessor hide the start of the next; but us at M = 64, 4096x14336, one / two: 23.3 / 30.1.
    per_sm = 1 if 2 * _ceil(units, tiles) <= TILE_MAX_UNITS else 2
    return tile_launch("wgmma", target, p, tokens, tiles, split, per_sm)


@cache
def panels_split(n: int, k: int, sms: int) -> tuple[int, int]:
    """Panels of the layout, and blocks that share a panel's k where few tokens come.

    Together as many blocks as multiprocessors, or a multiple: in a chain of launches each then holds one block of a
    kernel and one of the next. Few units a multiprocessor: blocks share k, so that a panel is wide and x is read less.
    """
    units, steps = units_steps(n, k)
    narrow = _ceil(units, TILE_MAX_UNITS)
    if units <= sms:
        return narrow, _split(steps, 8)
    split = _split(steps, 2) if units <= 4 * sms else 1
    clusters = max(1, sms // split) * (1 if narrow <= sms else 2)
    return min(units, clusters * _ceil(narrow, clusters)), split


def _split(steps: int, most: int) -> int:
    """Blocks that share so many steps: a power of two up to `most`, each with four steps or more."""
    return next(s for s in (8, 4, 2, 1) if s <= most and (s == 1 or steps >= 4 * s))


# --- scaled.cuh: scaled_async.cu, scaled_wgmma.cu, scaled_few.cu, scaled_mma_sync.cu ------------------------

SCALED_FORMATS = {  # of a and b -> how rows and files call them
    ("float8_e4m3fn", "float8_e4m3fn"): "e4m3_e4m3",
    ("float8_e4m3fn", "float8_e5m2"): "e4m3_e5m2",
    ("float8_e5m2", "float8_e4m3fn"): "e5m2_e4m3",
}
SCALED_STEP = 128  # of k: bytes of a row that a stage has
SCALED_TOKENS = 256  # of a cluster's tile in scaled_wgmma.cu
SCALED_WIDE = {True: 256, False: 128}  # its channels, with sums in the tensor cores' registers and without
WGMMA_TAIL_BYTES = {  # of such a tile: y, scales and bias, barriers
    256: 2 * 64 * 512 + 2 * (256 * 8 + 128 * 4) + 64,
    128: 2 * 64 * 256 + (128 * 8 + 128 * 4) + 48,
}
FLAG_BYTES = 4096  # of the workspace of scaled_wgmma.cu, before the sums
FEW_TAIL_BYTES = 8 * 1024 + 128 * 8 + 256 * 4  # y, scales and bias in scaled_few.cu
# Entries of scaled_few.cu: tokens of a block, its channels at most -> blocks, of this launch and the next, whose
# registers fit a multiprocessor, where steps are added in float32 and where sums stay in the tensor cores' registers.
# us of a chain on an H200 where each is chosen, without and with sums in the tensor cores' registers, against the next
# best of them. 256 tokens by 128 channels compiled as long as all of these, and was the best of them only where
# scaled_wgmma.cu serves: 7168x16384, M = 512: 115 and 106; 14336x4096, M = 256: 30.0 and 27.2.
_FEW = {
    (32, 128): (2, 2),  # M = 16: 4096x4096 7.1 (scaled_async.cu 7.8), 14336x4096 16.8
    (64, 64): (2, 2),  # M = 64: 4096x4096 7.7 / 7.8 and 7.1 / 7.7, 4096x14336 18.2 / 18.2 and 17.6 / 17.8
    (64, 128): (2, 2),  # M = 64: 14336x4096 17.4 / 18.3 and 16.9 / 18.1, 7168x16384 32.2 / 34.5 and 31.4 / 33.6
    (128, 64): (2, 2),  # M = 256: 4096x4096 10.9 / 11.9 and 10.6 / 11.6
    (128, 128): (1, 2),  # M = 128: 14336x4096 19.0 / 19.5 and 18.6 / 19.6, 28672x8192 68.3 / 69.7 and 65.1 / 69.2
    (256, 64): (1, 2),  # M = 256: 4096x14336 27.0 / 29.9 and 27.1 / 30.5; 512: 47.7 / 48.6 and 44.6 / 44.9
}

# On an H200: ns of a step of a tile of scaled_wgmma.cu and of a tile's end, with sums in the tensor cores' registers
# and without; of its begin; of giving sums to another cluster and of taking them.
_SCALED_WGMMA_NS, _BEGIN_NS, _PARTS_NS, _PART_NS = {True: (780, 2000), False: (420, 800)}, 2000, 5000, 2000
# Of scaled_few.cu, on an H200: ns of a step besides, of its products of 256 tokens and 128 channels, and of what a
# warpgroup waits for its own and adds, while the other multiplies; of a block's begin and end, of as many sums' way to
# y, and of a cluster's sums. Bytes a ns that memory gives to all blocks, and of b to each two multiprocessors:
# 7168x16384, M = 64, takes 34.2 us by 112 blocks of 128 channels, 31.4 by 128 of 112; most have a neighbour in both.
_FEW_STEP_NS, _FEW_PRODUCT_NS, _FEW_WAIT_NS, _FEW_END_NS, _STORE_NS, _CLUSTER_NS = 25, 750, 95, 1900, 6000, 800
_MEMORY_RATE, _PAIR_RATE = 4550, 71


# Tokens and units of a block of scaled_async.cu -> steps of k that a warp has on their way.
_SCALED_ASYNC_SHAPES = {(8, 1): 2, (8, 2): 2, (16, 2): 2}
_SCALED_ASYNC_WARPS = 16  # of a block at most


def _has_formats(formats: tuple[str, str], target: Target, p: ScaledProblem) -> bool:
    return (p.a_dtype, p.b_dtype) == formats


def _scaled_async_entries(arch: Arch) -> tuple[str, ...]:
    if arch.cc < (8, 0):  # no cp.async
        return ()
    # On Hopper scaled_few.cu serves more tokens, and 8 where two units would pay.
    shapes = [shape for shape in _SCALED_ASYNC_SHAPES if shape == (8, 1) or not arch.wgmma]
    return tuple(f"scaled_async_{tokens}_{units}" for tokens, units in shapes)


def _scaled_async_serves(formats: tuple[str, str], target: Target, p: ScaledProblem) -> bool:
    # us of a chain on an H200, against scaled_few.cu. M = 16: 4096x4096 7.8 / 7.1, 4096x14336 18.5 / 17.8, 14336x4096
    # 25.1 / 16.8. M = 1, against a slower one: 4096x4096 5.6 / 8.1, 4096x14336 16.9 / 19.3, but 14336x4096 16.7 / 16.6,
    # 7168x16384 33.0 / 32.0, 28672x8192 60.8 / 58.3.
    arch, most = arch_of(target.arch), max(tokens for tokens, _ in _SCALED_ASYNC_SHAPES)
    fits = arch.cc >= (8, 0) and p.aligned16 and p.m <= most and _has_formats(formats, target, p)
    pays = p.m <= 8 and _ceil(p.n, UNIT) <= 2 * target.sms
    return fits and (pays or not _few_fits(formats, target, p))


def scaled_async_launch(
    target: Target, p: ScaledProblem, units: int, warps: int, per_sm: int = 0, early: bool = True
) -> Launch:
    """The launch of scaled_async.cu with `units` and at most `warps` warps of a block.

    `per_sm`: blocks of a multiprocessor at most, 0 for all that fit; `early`: whether the next kernel may start with
    this one.
    """
    tokens = next(t for t, u in _SCALED_ASYNC_SHAPES if p.m <= t and u == units)
    steps = _ceil(p.k, SCALED_STEP)
    warp_bytes = _SCALED_ASYNC_SHAPES[tokens, units] * (units * UNIT + tokens) * SCALED_STEP
    most = min(warps, _SCALED_ASYNC_WARPS, target.smem_bytes // warp_bytes)
    warps = _ceil(steps, _ceil(steps, most))  # all with as many steps, or one fewer
    smem_bytes = max(warps * warp_bytes, target.smem_bytes // (per_sm + 1) if per_sm else 0)
    return Launch(
        f"scaled_async_{tokens}_{units}", (_ceil(p.n, units * UNIT), 1, 1), 32 * warps, smem_bytes=smem_bytes,
        fields=(units * UNIT, early, 0),
    )  # fmt: skip


def _scaled_async_plan(target: Target, p: ScaledProblem) -> Launch:
    # us of a chain on an H200, 4096x4096, M = 1 by 4 / 8 / 12 warps: 6.1 / 5.6 / 6.2; M = 16 by 8 / 12: 8.0 / 7.7. Two
    # units share a's copies and conversions.
    units = 2 if p.m > 8 or _ceil(p.n, UNIT) > 4 * target.sms else 1
    return scaled_async_launch(target, p, units, 12 if p.m > 8 else 8, per_sm=2)


def _scaled_wgmma_tiles(target: Target, p: ScaledProblem) -> int:
    return _ceil(p.m, SCALED_TOKENS) * _ceil(p.n, SCALED_WIDE[p.fast_accum])


@cache
def _scaled_wgmma_choice(target: Target, p: ScaledProblem) -> tuple[float, int, int]:
    """ns, clusters, and how many tiles they share the steps of."""
    tiles, steps, room = _scaled_wgmma_tiles(target, p), _ceil(p.k, SCALED_STEP), target.sms // 2
    (step_ns, tile_ns), rounds = _SCALED_WGMMA_NS[p.fast_accum], _ceil(tiles, room)
    choices = [(rounds * (steps * step_ns + tile_ns) + _BEGIN_NS, min(tiles, room), 0)]
    # Of one round and what is left after it the steps are shared; where that is less than one round, also evenly.
    whole = max(0, tiles // room - 1)
    shared = tiles - whole * room
    for clusters in {room, room // shared * shared} if tiles % room else set():
        if shared < clusters <= shared * steps // 4 or (shared > clusters == room):
            ns = (whole * steps + _ceil(shared * steps, clusters)) * step_ns + rounds * tile_ns
            choices.append((ns + _BEGIN_NS + _PARTS_NS + _ceil(clusters, shared) * _PART_NS, clusters, shared))
    return min(choices)


def _scaled_wgmma_serves(formats: tuple[str, str], target: Target, p: ScaledProblem) -> bool:
    return _few_fits(formats, target, p) and _scaled_wgmma_choice(target, p)[0] < _few_choice(target, p)[0]


def scaled_wgmma_launch(target: Target, p: ScaledProblem, clusters: int, shared: int) -> Launch:
    """The launch of scaled_wgmma.cu with so many clusters, which share the steps of the first `shared` tiles."""
    wide = SCALED_WIDE[p.fast_accum]
    stage_bytes, tail_bytes = (128 + wide) * SCALED_STEP + 16, WGMMA_TAIL_BYTES[wide]
    stages = (target.smem_bytes - tail_bytes) // stage_bytes
    return Launch(
        f"scaled_wgmma_{'fast' if p.fast_accum else 'promoted'}", (2 * clusters, 1, 1), 384, 2, stages,
        stages * stage_bytes + tail_bytes, (0, 1, shared), boxes=(128, wide // 2, 64),
        workspace=FLAG_BYTES + target.sms // 2 * SCALED_TOKENS * wide * 4 if shared else 0,
    )  # fmt: skip


def _scaled_wgmma_plan(target: Target, p: ScaledProblem) -> Launch:
    return scaled_wgmma_launch(target, p, *_scaled_wgmma_choice(target, p)[1:])


def _few_fits(formats: tuple[str, str], target: Target, p: ScaledProblem) -> bool:
    fits = arch_of(target.arch).wgmma and p.aligned16 and target.smem_bytes >= 227 << 10
    return fits and _has_formats(formats, target, p)


def _few_serves(formats: tuple[str, str], fast: bool, target: Target, p: ScaledProblem) -> bool:
    return p.fast_accum == fast and _few_fits(formats, target, p)


@cache
def _few_choice(target: Target, p: ScaledProblem) -> tuple[float, tuple[int, int], int, int, int]:
    """ns, entry, channels of a block, blocks of a cluster, and how many blocks divide a multiprocessor."""
    steps, fast, choices = _ceil(p.k, SCALED_STEP), p.fast_accum, []
    fits = next((t for t, _ in _FEW if p.m <= t), 256)
    usable = [shape for shape in _FEW if shape[0] == fits or shape[0] == 128 < p.m]
    for shape, (split, share) in itertools.product(usable, _CLUSTERED.items()):
        tokens, widest = shape
        groups = _ceil(p.m, tokens)
        if split > few_most_split(shape) or (split > 1 and steps < 4 * split):
            continue
        for per_sm in {1, _FEW[shape][fast]}:
            room = max(1, int(target.sms * share) * per_sm // split)  # clusters at a time
            rounds = _ceil(_ceil(p.n, widest) * groups, room)
            even = min(widest, _ceil(_ceil(p.n, max(1, rounds * room // groups)), 16) * 16)
            for tile in {even, widest}:
                clusters = _ceil(p.n, tile) * groups
                if per_sm > 1 and (clusters * split <= target.sms or _few_stages(target, tokens, tile, per_sm) < 3):
                    continue
                rounds, there = _ceil(clusters, room), min(clusters, room) * split
                on_one = _ceil(there, target.sms)  # blocks on a multiprocessor
                part = tokens * widest / (256 * 128)
                on_two = _ceil(there, _ceil(target.sms, 2))
                step = _FEW_STEP_NS + max(
                    on_two * tile * SCALED_STEP / _PAIR_RATE,
                    on_one * part * _FEW_PRODUCT_NS,
                    0 if fast else part / 2 * _FEW_PRODUCT_NS + _FEW_WAIT_NS,
                )
                ns = rounds * (_ceil(steps, split) * step + _FEW_END_NS + on_one * part * _STORE_NS)
                ns += _CLUSTER_NS * (split > 1)
                choices.append((max(ns, p.n * p.k / _MEMORY_RATE), shape, tile, split, per_sm))
    # Of equals one block a multiprocessor, and the widest. us on an H200, M = 32, 64 / 128 channels: 4096x4096 7.8 /
    # 7.1, 4096x14336 18.2 / 17.9.
    return min(choices, key=lambda choice: (choice[0], choice[4], -choice[1][1], -choice[2]))


def few_most_split(shape: tuple[int, int]) -> int:
    """Blocks of a cluster at most: each stores 16 tokens or more of each warp."""
    tokens, widest = shape
    return min(8, tokens // 16 // (128 // widest))


def _few_stages(target: Target, tokens: int, tile: int, per_sm: int) -> int:
    room = target.smem_bytes // per_sm - 1024  # the system's own share of a block
    return min((room - FEW_TAIL_BYTES) // ((tile + tokens) * SCALED_STEP + 16), 16)


def few_launch(target: Target, p: ScaledProblem, shape: tuple[int, int], tile: int, split: int, per_sm: int) -> Launch:
    """The launch of the entry of scaled_few.cu that _FEW has as `shape`.

    `tile` channels of a block, `split` blocks that share k, `per_sm` blocks a multiprocessor, of this launch and the
    next.
    """
    tokens, _ = shape
    stages = _few_stages(target, tokens, tile, per_sm)
    x, (y, z) = _ceil(p.n, tile) * split, _token_groups(_ceil(p.m, tokens))
    return Launch(
        few_entry(shape), (x, y, z), 320 if _FEW[shape][p.fast_accum] > 1 else 384, split, stages,
        stages * ((tile + tokens) * SCALED_STEP + 16) + FEW_TAIL_BYTES,
        (tile, x * y * z <= target.sms * per_sm, 0), boxes=(tokens, tile, 0),
    )  # fmt: skip


def few_entry(shape: tuple[int, int]) -> str:
    return "scaled_few_{}_{}".format(*shape)


def _few_plan(target: Target, p: ScaledProblem) -> Launch:
    return few_launch(target, p, *_few_choice(target, p)[1:])


def _scaled_mma_plan(target: Target, p: ScaledProblem) -> Launch:
    tokens = 16 if p.m <= 32 else 128
    return Launch(
        f"scaled_mma_sync_{tokens}", (_ceil(p.n, 128), *_token_groups(_ceil(p.m, tokens))), 256, fields=(0, 1, 0)
    )


def _scaled_rows() -> list[Kernel]:
    rows = []
    for formats, name in SCALED_FORMATS.items():
        defines = tuple((f"{x}_IS_E5M2", int(dtype == "float8_e5m2")) for x, dtype in zip("AB", formats, strict=True))
        common = {"args": SCALED_ARGS, "takes": ScaledProblem}
        rows += [
            Kernel(
                f"scaled_async_{name}",
                "scaled_async.cu",
                defines=(*defines, *((f"RING_{t}_{u}", ring) for (t, u), ring in _SCALED_ASYNC_SHAPES.items())),
                entries=_scaled_async_entries,
                serves=partial(_scaled_async_serves, formats),
                plan=_scaled_async_plan,
                dynamic_smem=True,
                **common,
            ),
            Kernel(
                f"scaled_wgmma_{name}",
                "scaled_wgmma.cu",
                defines=(
                    *defines,
                    ("BAND", 8),  # tiles of tokens worked on together
                    *((f"WGMMA_TAIL_{wide}", tail_bytes) for wide, tail_bytes in WGMMA_TAIL_BYTES.items()),
                    ("WORKSPACE_FLAG_BYTES", FLAG_BYTES),
                ),
                entries=lambda arch: ("scaled_wgmma_fast", "scaled_wgmma_promoted") if arch.wgmma else (),
                serves=partial(_scaled_wgmma_serves, formats),
                plan=_scaled_wgmma_plan,
                dynamic_smem=True,
                **common,
            ),
            *(
                Kernel(
                    f"scaled_few_{'fast_' if fast else ''}{name}",
                    "scaled_few.cu",
                    defines=(*defines, ("FAST", int(fast)), ("FEW_TAIL_BYTES", FEW_TAIL_BYTES)),
                    entries=lambda arch: tuple(map(few_entry, _FEW)) if arch.wgmma else (),
                    serves=partial(_few_serves, formats, fast),
                    plan=_few_plan,
                    dynamic_smem=True,
                    **common,
                )
                for fast in (False, True)
            ),
            Kernel(
                f"scaled_mma_sync_{name}",
                "scaled_mma_sync.cu",
                defines=defines,
                entries=lambda arch: ("scaled_mma_sync_16", "scaled_mma_sync_128"),
                serves=partial(_has_formats, formats),
                plan=_scaled_mma_plan,
                **common,
            ),
        ]
    return rows


# --- cuBLAS ----------------------------------------------------------------------------------------------

SLICE_BYTES = 32 << 20  # a widened part of a weight is no larger


def slice_rows(x_dtype: str, k: int) -> int:
    """Rows of a weight, a multiple of UNIT, that are widened at once for a product by cuBLAS; may be 0."""
    return SLICE_BYTES // (_ceil(k, STEP) * STEP * FLOATS[x_dtype].itemsize) // UNIT * UNIT


def _cublas_serves(target: Target, p: Problem) -> bool:
    # m: where its tensor cores, after the widening, beat mma.sync (16-bit x), or gemv.cu (float32 x, and
    # bfloat16 on Turing). Dimensions and strides are 32-bit in its interface.
    least = CUBLAS_MIN_M["tensor" if p.x_dtype in _mma_dtypes(arch_of(target.arch)) else "cuda"]
    return p.m >= least and not (p.captured or p.batch_invariant) and slice_rows(p.x_dtype, p.k) > 0


CUBLAS_MIN_M = {"tensor": 257, "cuda": 33}


def _cublas_entries(arch: Arch) -> tuple[str, ...]:
    return (*(f"widen_{x}" for x in FLOATS), "epilogue")


def _layout_entries(weight: Weight, arch: Arch) -> tuple[str, ...]:
    return ("pack", "unpack", *(("pack_scales", "unpack_scales") if weight.block else ()))


def _quantize_entries(arch: Arch) -> tuple[str, ...]:
    floats = (*FLOATS, "float64")
    return (
        *(f"quantize_{w}{end}" for w in floats for end in ("", "_any")),
        *(f"dequantize_{w}" for w in floats),
        "find_nan",
    )


# --- activations.cuh: activations.cu, rms_norm.cu, silu_mul.cu -------------------------------------------

SCALINGS = {(-1, -1): "tensor", (1, -1): "token", (1, 128): "group"}  # block -> the end of an entry's name


ROW_THREADS = 1024  # of a block that has a row for itself, at most
SHARING_THREADS = 256  # of a block where several share a row, at most
_ROW_DEFINES = (
    ("MAX_THREADS", ROW_THREADS),
    ("SHARING_THREADS", SHARING_THREADS),
    ("NARROW_REGISTERS", 64),
    ("TENSOR_REGISTERS", 64),
)


def row_threads(k: int) -> int:
    """Threads of the block that has a row of k values: 32 values each while there are threads enough.

    Eight of them share 128 neighbours. The order in which rms_norm.cu adds a row up depends on it.
    """
    return min(ROW_THREADS, 32 * _ceil(_ceil(k, 128), 8))


def row_most(itemsize: int) -> int:
    """Values of a row that a block keeps in registers: 32 a thread, of half as many threads where they have 4 bytes."""
    return ROW_THREADS * 64 // itemsize


def row_launch(entry: str, m: int, k: int, whole: bool) -> Launch:
    """The launch of an entry of these files for m rows of k values; `whole`: a block has to know all of its row."""
    threads = row_threads(k) if whole else min(row_threads(k), SHARING_THREADS)
    return Launch(entry, (max(m, 1), 1 if whole else _ceil(k, 32 * threads), 1), threads)


def _row_entries(name: str, *kinds: tuple[str, str]) -> tuple[str, ...]:
    """For kinds (dtype of x, codes) an entry for each scaling; for every dtype one that takes any kind and any row."""
    fast = (f"{name}_{x}_{scaling}_{code}" for x, code in kinds for scaling in SCALINGS.values())
    return (*fast, *(f"{name}_{x}_any" for x in FLOATS))


_NARROW = (("bfloat16", "e4m3fn"), ("float16", "e4m3fn"))


def _activation_entries(arch: Arch) -> tuple[str, ...]:
    wide = (("bfloat16", "e5m2"), ("float16", "e5m2")) if arch.fp8 else ()
    amax = (f"amax_{x}{end}" for x in FLOATS for end in ("", "_any"))
    return (*_row_entries("quantize", *_NARROW, ("float32", "e4m3fn"), *wide), *amax)


# --- quantize_blocks.cu ----------------------------------------------------------------------------------

# Dtype of codes and of scales -> the end of an entry's name, in the order of `Format` there.
BLOCK_FORMATS = {
    ("float4_e2m1fn", "float8_e4m3fn"): "nvfp4",
    ("float4_e2m1fn", "float8_e8m0fnu"): "mxfp4",
    ("float8_e4m3fn", "float8_e8m0fnu"): "mxfp8_e4m3fn",
    ("float8_e5m2", "float8_e8m0fnu"): "mxfp8_e5m2",
}
BLOCK_NUMBERS = {name: i for i, name in enumerate(BLOCK_FORMATS.values())}  # in blocks.cuh
BLOCK_THREADS, BLOCK_ROW_THREADS = 256, 512  # of a block, at most; of one that has a row for itself
# Units of 16 values that a thread has at once, by the bytes of a value; of values_* few, while rows are few.
BLOCK_KEPT = {2: 4, 4: 2}
_FEW_ROWS = 1024


def values_dtype(arch: Arch, weight: str) -> str:
    """What values_* of quantize_blocks.cu write, for a row of WEIGHTS: what has them exactly, and products there."""
    return "bfloat16" if arch.bf16_mma else "float16" if weight == "nvfp4" else "float32"


def block_most(x_dtype: str, whole: bool) -> int:
    """Values of a row that entries without `_any` take; `whole`: a block has to know all of its row."""
    return 16 * BLOCK_KEPT[FLOATS[x_dtype].itemsize] * (BLOCK_ROW_THREADS if whole else 65535 * BLOCK_THREADS)


def blocks_launch(entry: str, m: int, k: int) -> Launch:
    """The launch of an entry of quantize_blocks.cu for m rows of k values."""
    what, x_dtype = entry.split("_")[:2]
    if entry.endswith("_any") or what == "dequantize":  # blocks take turns, eight and more
        return Launch(entry, (max(m, 1), min(_ceil(k, 8 * BLOCK_THREADS), 65535), 1), BLOCK_THREADS)
    values = 16 * BLOCK_KEPT[FLOATS[x_dtype].itemsize]  # of a thread
    most = BLOCK_ROW_THREADS if entry.endswith("_token") or what == "values" else BLOCK_THREADS
    threads = min(32 * _ceil(k, 32 * (16 if what == "values" and m <= _FEW_ROWS else values)), most)
    return Launch(entry, (max(m, 1), _ceil(k, values * threads), 1), threads)


def _block_entries(arch: Arch) -> tuple[str, ...]:
    kinds = ("nvfp4", "nvfp4_token", *(f for f in BLOCK_FORMATS.values() if f != "nvfp4"))
    return (
        *(f"quantize_{x}_{kind}" for x in FLOATS for kind in kinds),
        *(f"values_{x}_{kind}" for x in FLOATS for kind in ("nvfp4", "mxfp4", "mxfp8_e4m3fn", "any")),
        *(f"amax_{x}" for x in FLOATS),
        *(entry for x in (*FLOATS, "float64") for entry in (f"quantize_{x}_any", f"amax_{x}_any", f"dequantize_{x}")),
    )


# --- scaled_blocks.cu ------------------------------------------------------------------------------------


def _scaled_blocks_serves(target: Target, p: BlockProblem) -> bool:
    return True


def _scaled_blocks_plan(target: Target, p: BlockProblem) -> Launch:
    tokens = 16 if p.m <= 32 else 64
    return Launch(f"scaled_blocks_{tokens}", (_ceil(p.n, 64), *_token_groups(_ceil(p.m, tokens))), 128)


# --- stream.cu -------------------------------------------------------------------------------------------

# Threads of a block that reads, and of one that copies; 16-byte loads that a thread has in flight. TB/s of a copy of
# 403 MB in all on an H200: 1024 threads x 4 loads 4.09, 512 x 4 3.96, 256 x 4 3.84.
STREAM_THREADS, COPY_THREADS, STREAM_LOADS = 512, 1024, 4


def _linear_rows(weight: Weight) -> list[Kernel]:
    """The rows that multiply weights of this kind, and the one that lays them out."""

    def row(name: str, source: str, args: struct.Struct, defines: tuple[tuple[str, int], ...], **rest: Any) -> Kernel:
        if "serves" in rest:
            rest["serves"] = partial(_multiplies, weight.name, rest["serves"])
        name = weight.layout if name == "layout" else name if weight.name == "fp8" else f"{name}_{weight.name}"
        return Kernel(name, source, args, (*defines, *weight.defines), weight=weight.name, **rest)

    def wgmma_row(x_dtype: str, many: bool) -> Kernel:
        entries = partial(_wgmma_entries, weight, x_dtype, many)
        return row(
            f"wgmma_{x_dtype}{'_256' * many}",
            "wgmma.cu",
            TILE_ARGS,
            (("X_IS_FLOAT16", int(x_dtype == "float16")), ("TOKENS_256", int(many)), *_tile_defines("wgmma")),
            entries=entries,
            serves=partial(_wgmma_serves, entries),
            plan=_wgmma_plan,
            dynamic_smem=True,
        )

    rows = [
        *(wgmma_row(x, False) for x in _wgmma_dtypes(weight)),
        *(wgmma_row(x, True) for x in _wgmma_dtypes(weight) if 256 in _tiles("wgmma", weight, x)),
        row(
            "cublas",
            "widen.cu",
            LINEAR_ARGS,
            (),
            entries=_cublas_entries,
            serves=_cublas_serves,
        ),
        row(
            "async_mma",
            "async_mma.cu",
            LINEAR_ARGS,
            (),
            entries=partial(_async_entries, weight),
            serves=_async_serves,
            plan=_async_plan,
            dynamic_smem=True,
        ),
        row(
            "gemv",
            "gemv.cu",
            LINEAR_ARGS,
            (("WARPS", GEMV_WARPS), ("AHEAD", 1)),
            entries=_gemv_entries,
            serves=_gemv_serves,
            plan=_gemv_plan,
        ),
        row(
            "bulk_mma",
            "bulk_mma.cu",
            TILE_ARGS,
            _tile_defines("bulk_mma"),
            entries=partial(_bulk_entries, weight),
            serves=_tiles_serve,
            plan=_bulk_plan,
            dynamic_smem=True,
        ),
        row(
            "mma_sync",
            "mma_sync.cu",
            LINEAR_ARGS,
            (("WARPS", MMA_WARPS),),
            entries=partial(_mma_entries, weight),
            serves=_mma_serves,
            plan=_mma_plan,
        ),
        row("layout", "layout.cu", LINEAR_ARGS, (), entries=partial(_layout_entries, weight)),
    ]
    # cuBLAS knows no scales of blocks.
    spare = {"fp8": (), "fp8_block": ("widen.cu", "layout.cu")}.get(weight.name, ("widen.cu",))
    return [r for r in rows if r.source not in spare]


KERNELS = (
    *itertools.chain.from_iterable(_linear_rows(weight) for weight in WEIGHTS.values()),
    Kernel(
        "quantize",
        "quantize.cu",
        QUANTIZE_ARGS,
        (),
        entries=_quantize_entries,
    ),
    Kernel("activations", "activations.cu", ACTIVATION_ARGS, _ROW_DEFINES, entries=_activation_entries),
    Kernel(
        "rms_norm",
        "rms_norm.cu",
        ACTIVATION_ARGS,
        _ROW_DEFINES,
        entries=lambda arch: _row_entries("rms_norm", *_NARROW),
    ),
    Kernel(
        "silu_mul",
        "silu_mul.cu",
        ACTIVATION_ARGS,
        _ROW_DEFINES,
        entries=lambda arch: _row_entries("silu_mul", *_NARROW),
    ),
    Kernel(
        "quantize_blocks",
        "quantize_blocks.cu",
        BLOCK_ARGS,
        (
            ("THREADS", BLOCK_THREADS),
            ("ROW_THREADS", BLOCK_ROW_THREADS),
            *((f"KEPT_{8 * size}", kept) for size, kept in BLOCK_KEPT.items()),
        ),
        entries=_block_entries,
    ),
    Kernel(
        "scaled_blocks",
        "scaled_blocks.cu",
        BLOCK_PRODUCT_ARGS,
        (),
        entries=lambda arch: ("scaled_blocks_16", "scaled_blocks_64"),
        serves=_scaled_blocks_serves,
        plan=_scaled_blocks_plan,
        takes=BlockProblem,
    ),
    Kernel(
        "stream",
        "stream.cu",
        STREAM_ARGS,
        (("READ_THREADS", STREAM_THREADS), ("COPY_THREADS", COPY_THREADS), ("LOADS", STREAM_LOADS)),
        entries=lambda arch: ("stream_read", "stream_copy"),
    ),
    *_scaled_rows(),
)

ROWS = {row.name: row for row in KERNELS}


@cache
def pick(target: Target, problem: Problem | ScaledProblem | BlockProblem) -> Kernel:
    """The first row of KERNELS that serves the problem on the target."""
    return next(row for row in KERNELS if row.takes is type(problem) and row.serves(target, problem))
