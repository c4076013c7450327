"""Which kernel serves which problem on which GPU: two tables and `pick`. Pure: no GPU, no CuPy."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from cufp8.formats import FLOATS


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


# The argument blocks of kernels, in struct's notation. `launch` packs them; the .cu files mirror them
# and fail to compile if the size differs.
# x codes scale bias y, strides of x and y, then m n k steps out panel wider split stages
LINEAR_ARGS = struct.Struct("@PPPPPqqiiiiiiiiixxxx")
# the same, then a tile's units, how many tiles have one more, where sums lie, early, and the tensor map of x
TENSOR_MAP_BYTES = 128
TILE_ARGS = struct.Struct(f"{LINEAR_ARGS.format}iiii16x{TENSOR_MAP_BYTES}s")
QUANTIZE_ARGS = struct.Struct("@PPPPqqqq")  # w codes scale status, strides n k, pitch, k
STREAM_ARGS = struct.Struct("@PPqq")  # source, destination, 16-byte words, whether to store

# The layout that all kernels read (kernels_cu/linear.cuh): tiles of UNIT channels and STEP of k.
UNIT, STEP = 16, 64


def units_steps(n: int, k: int) -> tuple[int, int]:
    """Units and steps of a weight [n, k] in the kernels' layout: 1 KiB each pair."""
    return _ceil(n, UNIT), _ceil(k, STEP)


def _panels(units: int, panels: int) -> list[slice]:
    """The units of each panel: all but equal, the wider ones first."""
    width, wider = divmod(units, panels)
    firsts = [p * width + min(p, wider) for p in range(panels + 1)]
    return [slice(a, b) for a, b in zip(firsts, firsts[1:], strict=False)]


def pack(codes: np.ndarray, panels: int) -> np.ndarray:
    """Codes uint8 [n, k] in the kernels' layout, uint8 [units * steps * 1024]; zeros past n and k."""
    units, steps = units_steps(*codes.shape)
    wide = np.zeros((units * UNIT, steps * STEP), np.uint8)
    wide[: codes.shape[0], : codes.shape[1]] = codes
    # [unit, half, row, step, j, h, t, e] -> [unit, step, half, row, t, j, e, h]
    tiles = wide.reshape(units, 2, 8, steps, 4, 2, 4, 2).transpose(0, 3, 1, 2, 6, 4, 7, 5)
    return np.concatenate([tiles[u].swapaxes(0, 1).ravel() for u in _panels(units, panels)])


def unpack(packed: np.ndarray, n: int, k: int, panels: int) -> np.ndarray:
    """The inverse of `pack`: uint8 [n, k]."""
    units, steps = units_steps(n, k)
    tiles = np.empty((units, steps, 2, 8, 4, 4, 2, 2), np.uint8)
    for u in _panels(units, panels):
        some = tiles[u]
        part = packed[u.start * steps * UNIT * STEP :][: some.size]
        some[...] = part.reshape(steps, len(some), *tiles.shape[2:]).swapaxes(0, 1)
    wide = tiles.transpose(0, 2, 3, 1, 5, 7, 4, 6).reshape(units * UNIT, steps * STEP)
    return np.ascontiguousarray(wide[:n, :k])


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


def _serves_nothing(target: Target, problem: Problem) -> bool:
    return False


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
    serves: Callable[[Target, Problem], bool] = _serves_nothing
    plan: Callable[[Target, Problem], Launch] | None = None
    dynamic_smem: bool = False  # launches ask for shared memory of their own size

    @property
    def linear(self) -> bool:
        """Whether the row serves products at all."""
        return self.serves is not _serves_nothing


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _token_groups(groups: int) -> tuple[int, int]:
    """Grid y and z for so many groups of tokens: y ends at 65,535."""
    return min(groups, 65535), _ceil(groups, 65535)


# --- gemv.cu ---------------------------------------------------------------------------------------------

GEMV_WARPS = 16


def _gemv_serves(target: Target, p: Problem) -> bool:
    # One token and one to three units a multiprocessor: there bulk_mma.cu takes longer to start than to read. us of a
    # chain on an H200: 4096x4096 6.1 against 8.0, 4096x14336 18.0 / 19.7, 6144x4096 9.5 / 9.9; but 1024x8192 8.9 / 7.0,
    # 8192x8192 20.2 / 18.9, 28672x8192 65 / 56.
    few = p.m == 1 and not p.batch_invariant and target.sms < units_steps(p.n, p.k)[0] <= 3 * target.sms
    return few or not (_tiles_serve(target, p) or _mma_serves(target, p))


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


def _mma_entries(arch: Arch) -> tuple[str, ...]:
    return tuple(f"mma_sync_{x}_{tokens}" for x in _mma_dtypes(arch) for tokens in _MMA_SHAPES)


def _mma_serves(target: Target, p: Problem) -> bool:
    # A row's sums are added in the same order for any number of tokens of a block.
    return (p.m > 1 or p.batch_invariant) and p.x_dtype in _mma_dtypes(arch_of(target.arch))


def _mma_plan(target: Target, p: Problem) -> Launch:
    tokens = next((t for t in _MMA_SHAPES if p.m <= t), 32)
    grid = (_ceil(_ceil(p.n, UNIT), _MMA_SHAPES[tokens]), *_token_groups(_ceil(p.m, tokens)))
    return Launch(f"mma_sync_{p.x_dtype}_{tokens}", grid, 32 * MMA_WARPS)


# --- tiles.cuh: bulk_mma.cu, wgmma.cu --------------------------------------------------------------------

TILE_MAX_UNITS, TILE_MAX_STAGES = 8, 16
_TILE_THREADS = {256: 384}  # tokens of a block -> its threads, where they are not 320
# kernel -> tokens of a block -> blocks whose registers fit a multiprocessor
_TILES = {"bulk_mma": {8: 3, 16: 3, 32: 2, 64: 1}, "wgmma": {32: 2, 64: 2, 128: 1, 256: 1}}
_OWN_SUMS = 64  # to so many tokens a cluster's sums have memory of their own


def _tile_defines(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((f"BLOCKS_{tokens}", fitting) for tokens, fitting in _TILES[name].items())


def _tile_entries(name: str, arch: Arch) -> tuple[str, ...]:
    return tuple(f"{name}_{x}_{tokens}" for x in _mma_dtypes(arch) for tokens in _TILES[name])


def _tiles_serve(target: Target, p: Problem) -> bool:
    fits = arch_of(target.arch).bulk and p.x_dtype in ("bfloat16", "float16") and p.aligned16
    return fits and target.smem_bytes >= 99 << 10


def tile_launch(
    name: str,
    target: Target,
    p: Problem,
    tokens: int,
    tiles: int,
    split: int = 1,
    per_sm: int = 1,
    fitting: int | None = None,
) -> Launch:
    """The launch of a kernel of tiles.cuh.

    `tokens` of a block, `tiles` along n, `split` blocks that share k, `per_sm` blocks a multiprocessor, which take tile
    after tile where there are more, and `fitting` blocks that divide shared memory, of this launch and the next.
    """
    fitting = min(fitting or 8, _TILES[name][tokens]) if target.smem_bytes >= 200 << 10 else 1
    tile, wider = divmod(units_steps(p.n, p.k)[0], tiles)
    stage = tokens * STEP * 2 + (tile + (wider > 0)) * UNIT * STEP
    sums = tokens * TILE_MAX_UNITS * UNIT * 4 if split > 1 else 0
    own_sums = sums if tokens <= _OWN_SUMS else 0  # else the ring makes room
    room = target.smem_bytes // fitting - 1024 - own_sums  # the system's own share of a block
    stages = max(3, min(room // (stage + 16), TILE_MAX_STAGES))
    ring = stages * (stage + 16)
    blocks = tiles * _ceil(p.m, tokens) * split
    if split == 1:
        blocks = min(blocks, target.sms * min(per_sm, fitting))
    early = blocks % target.sms == 0 and blocks <= target.sms * fitting and split <= 2
    return Launch(
        f"{name}_{p.x_dtype}_{tokens}", (blocks, 1, 1), _TILE_THREADS.get(tokens, 320), split, stages,
        max(ring + own_sums, sums), (tile, wider, ring if own_sums else 0, early), tokens,
    )  # fmt: skip


def _few_tokens(target: Target, p: Problem, tokens: int) -> tuple[int, int, int, int]:
    """Tiles and what follows in `tile_launch`, where the weight's bytes decide: each multiprocessor reads as many."""
    # us of a chain on an H200. 4096x4096, M = 8: 32 tiles x 8 blocks 8.0, 66 x 2 9.2; 8192x8192, M = 8: 66 x 2 19.1,
    # 64 x 4 21.8; 28672x8192, M = 8: 264 tiles by 264 blocks 56, by 132 58; 151936x4096, M = 8: by 396 142, by 132 145.
    units, steps = units_steps(p.n, p.k)
    narrow = _ceil(units, TILE_MAX_UNITS)
    if tokens <= 16 and target.sms < units <= 2 * target.sms:
        return narrow, _split(steps, 8), 1, 3
    panels, split = panels_split(p.n, p.k, target.sms)
    return (panels, split, 3, 3) if narrow >= 8 * target.sms else (panels, split, 2, 2)


def _bulk_entries(arch: Arch) -> tuple[str, ...]:
    return _tile_entries("bulk_mma", arch) if arch.bulk else ()


def _invariant(name: str, target: Target, p: Problem) -> Launch:
    """One split for any m, and tokens of a block among which a row's products and sums come in the same order."""
    tokens = [t for t in _TILES[name] if t >= 32]
    return tile_launch(name, target, p, next((t for t in tokens if p.m <= t), tokens[-1]), *_few_tokens(target, p, 32))


def _bulk_plan(target: Target, p: Problem) -> Launch:
    if p.batch_invariant:
        return _invariant("bulk_mma", target, p)
    tokens = next((t for t in _TILES["bulk_mma"] if p.m <= t), 64)
    return tile_launch("bulk_mma", target, p, tokens, *_few_tokens(target, p, tokens))


# tokens of a block -> ns of a step of a tile; ns of adding up the sums of a cluster, on an H200
_WGMMA_NS = {64: (310, 900), 128: (400, 2000), 256: (650, 6000)}
_CLUSTERED = {1: 1.0, 2: 1.0, 4: 120 / 132, 8: 112 / 132}  # of the multiprocessors that clusters of so many blocks fill


def _wgmma_entries(arch: Arch) -> tuple[str, ...]:
    return _tile_entries("wgmma", arch) if arch.wgmma else ()


def _wgmma_serves(target: Target, p: Problem) -> bool:
    # us of a chain on an H200, M = 16, wgmma_32 against bulk_mma_16: 8192x8192 19.8 / 20.4, 14336x4096 17.4 / 18.4, but
    # 4096x4096 10.0 / 8.6, 151936x4096 158 / 147.
    units = units_steps(p.n, p.k)[0]
    least = 9 if 3 * target.sms <= units < 64 * target.sms else 17
    return arch_of(target.arch).wgmma and _tiles_serve(target, p) and (p.m >= least or p.batch_invariant)


def _wgmma_plan(target: Target, p: Problem) -> Launch:
    if p.batch_invariant:
        return _invariant("wgmma", target, p)
    if p.m <= 32:
        return tile_launch("wgmma", target, p, 32, *_few_tokens(target, p, 32))
    units, steps = units_steps(p.n, p.k)
    narrow = _ceil(units, TILE_MAX_UNITS)
    panels, shared = panels_split(p.n, p.k, target.sms)
    choices = {}
    for tokens, (step_ns, sums_ns) in _WGMMA_NS.items():
        for tiles, split in dict.fromkeys([(panels, shared), *((narrow, split) for split in _CLUSTERED)]):
            blocks, room = tiles * _ceil(p.m, tokens) * split, int(target.sms * _CLUSTERED[split])
            if split == 1:
                choices[tokens, tiles, split] = _ceil(blocks, room) * steps * step_ns
            elif blocks <= room and steps >= 4 * split:
                choices[tokens, tiles, split] = _ceil(steps, split) * step_ns + sums_ns
    # Of equals the panels, each with its own multiprocessor, where the weight's bytes decide; else the fewest tiles.
    tokens, tiles, split = min(choices, key=lambda c: (choices[c], -c[1] if p.m <= 64 else c[1]))
    return tile_launch("wgmma", target, p, tokens, tiles, split, _TILES["wgmma"][tokens])


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
    clusters = max(1, sms // split)
    return min(units, clusters * _ceil(narrow, clusters)), split


def _split(steps: int, most: int) -> int:
    """Blocks that share so many steps: a power of two up to `most`, each with four steps or more."""
    return next(s for s in (8, 4, 2, 1) if s <= most and (s == 1 or steps >= 4 * s))


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


def _layout_entries(arch: Arch) -> tuple[str, ...]:
    return ("pack", "unpack")


def _quantize_entries(arch: Arch) -> tuple[str, ...]:
    floats = (*FLOATS, "float64")
    return (
        *(f"quantize_{w}{end}" for w in floats for end in ("", "_any")),
        *(f"dequantize_{w}" for w in floats),
        "find_nan",
    )


KERNELS = (
    Kernel(
        "wgmma",
        "wgmma.cu",
        TILE_ARGS,
        _tile_defines("wgmma"),
        entries=_wgmma_entries,
        serves=_wgmma_serves,
        plan=_wgmma_plan,
        dynamic_smem=True,
    ),
    Kernel(
        "cublas",
        "widen.cu",
        LINEAR_ARGS,
        (),
        entries=_cublas_entries,
        serves=_cublas_serves,
    ),
    Kernel(
        "gemv",
        "gemv.cu",
        LINEAR_ARGS,
        (("WARPS", GEMV_WARPS), ("AHEAD", 1)),
        entries=_gemv_entries,
        serves=_gemv_serves,
        plan=_gemv_plan,
    ),
    Kernel(
        "bulk_mma",
        "bulk_mma.cu",
        TILE_ARGS,
        _tile_defines("bulk_mma"),
        entries=_bulk_entries,
        serves=_tiles_serve,
        plan=_bulk_plan,
        dynamic_smem=True,
    ),
    Kernel(
        "mma_sync",
        "mma_sync.cu",
        LINEAR_ARGS,
        (("WARPS", MMA_WARPS),),
        entries=_mma_entries,
        serves=_mma_serves,
        plan=_mma_plan,
    ),
    Kernel(
        "quantize",
        "quantize.cu",
        QUANTIZE_ARGS,
        (),
        entries=_quantize_entries,
    ),
    Kernel("layout", "layout.cu", LINEAR_ARGS, (), entries=_layout_entries),
    Kernel(
        "stream",
        "stream.cu",
        STREAM_ARGS,
        (),
        entries=lambda arch: ("stream_read", "stream_copy"),
    ),
)

ROWS = {row.name: row for row in KERNELS}


@cache
def pick(target: Target, problem: Problem) -> Kernel:
    """The first row of KERNELS that serves the problem on the target."""
    return next(row for row in KERNELS if row.serves(target, problem))
