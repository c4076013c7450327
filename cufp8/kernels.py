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
    batch_invariant: bool = False
    captured: bool = False  # the stream is being captured, which cuBLAS through CuPy refuses


# The argument blocks of kernels, in struct's notation. `launch` packs them; the .cu files mirror them
# and fail to compile if the size differs.
# x codes scale bias y, strides of x and y, then m n k steps out panel wider split stages
LINEAR_ARGS = struct.Struct("@PPPPPqqiiiiiiiiixxxx")
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
    # One token and at most two units a multiprocessor: there bulk_mma.cu takes longer to start than to read. On an
    # H200, us of a chain: 4096x4096 6.4 against 7.9, 4096x14336 18.3 / 20.6, 1024x8192 8.0 / 10.4; but 6144x4096
    # 9.7 / 9.8, 8192x8192 20.4 / 18.8, 28672x8192 66 / 56.
    few = p.m == 1 and units_steps(p.n, p.k)[0] <= 2 * target.sms
    return few or not (_bulk_serves(target, p) or _mma_serves(target, p))


def _gemv_plan(target: Target, p: Problem) -> Launch:
    # Four tokens share a read of the weight; tensor cores serve what they can of more than one token.
    entries = _gemv_entries(arch_of(target.arch))
    tokens = 4 if p.m > 1 and f"gemv_{p.x_dtype}_4" in entries else 1
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
    return p.m > 1 and p.x_dtype in _mma_dtypes(arch_of(target.arch))


def _mma_plan(target: Target, p: Problem) -> Launch:
    tokens = next((t for t in _MMA_SHAPES if p.m <= t), 32)
    grid = (_ceil(_ceil(p.n, UNIT), _MMA_SHAPES[tokens]), *_token_groups(_ceil(p.m, tokens)))
    return Launch(f"mma_sync_{p.x_dtype}_{tokens}", grid, 32 * MMA_WARPS)


# --- bulk_mma.cu -----------------------------------------------------------------------------------------

BULK_THREADS, BULK_MAX_UNITS, BULK_MAX_STAGES = 384, 8, 12
# tokens of a block -> (warps along k, blocks that fit a multiprocessor)
_BULK_SHAPES = {8: (4, 2), 16: (2, 2), 32: (4, 1), 64: (2, 1)}


def _bulk_entries(arch: Arch) -> tuple[str, ...]:
    if not arch.bulk:
        return ()
    return tuple(f"bulk_mma_{x}_{tokens}" for x in _mma_dtypes(arch) for tokens in _BULK_SHAPES)


def _bulk_serves(target: Target, p: Problem) -> bool:
    fits = arch_of(target.arch).bulk and p.x_dtype in ("bfloat16", "float16") and p.aligned16
    return fits and p.k % STEP == 0 and target.smem_bytes >= 99 << 10


def _bulk_plan(target: Target, p: Problem) -> Launch:
    units, steps = units_steps(p.n, p.k)
    panels, split = panels_split(p.n, p.k, target.sms)
    tokens = next((t for t in _BULK_SHAPES if p.m <= t), 64)
    k_warps, blocks = _BULK_SHAPES[tokens]
    widest = _ceil(units, panels)
    stage = widest * k_warps * UNIT * STEP + tokens * (k_warps * STEP * 2 + 16)
    room = target.smem_bytes // blocks - 1024  # the system's own share of a block
    stages = max(2, min(room // (stage + 16), _ceil(_ceil(steps, split), k_warps), BULK_MAX_STAGES))
    smem = max(stages * stage, k_warps * tokens * widest * UNIT * 4) + 16 * stages
    grid = (panels * split, *_token_groups(_ceil(p.m, tokens)))
    return Launch(f"bulk_mma_{p.x_dtype}_{tokens}", grid, BULK_THREADS, split, stages, smem)


@cache
def panels_split(n: int, k: int, sms: int) -> tuple[int, int]:
    """Panels of the layout and blocks that share a panel's k: as many blocks as multiprocessors, or a multiple.

    In a chain of launches each multiprocessor then holds one block of a kernel and one of the next. Few units a
    multiprocessor: two or four blocks share k, so that a panel is wide and x is read less.
    """
    units, steps = units_steps(n, k)
    # us of a chain on an H200, M = 8 / 64: 8192x8192 by 66 panels x 2 blocks 20.5 / 45, by 132 x 1 23.3 / 55; 1024x8192
    # by 33 x 4 7.6 / 29, by 64 x 2 11.4 / 25; 4096x4096 by 66 x 2 8.9 / 21, by 33 x 4 9.1 / 30.
    split = next((s for s, most in ((4, sms // 2), (2, 4 * sms)) if units <= most and steps >= 8 * s), 1)
    clusters = max(1, sms // split)
    panels = clusters * _ceil(units, clusters * BULK_MAX_UNITS)
    return min(units, panels), split


# --- cuBLAS ----------------------------------------------------------------------------------------------

SLICE_BYTES = 32 << 20  # a widened part of a weight is no larger


def slice_rows(x_dtype: str, k: int) -> int:
    """Rows of a weight, a multiple of UNIT, that are widened at once for a product by cuBLAS; may be 0."""
    return SLICE_BYTES // (_ceil(k, STEP) * STEP * FLOATS[x_dtype].itemsize) // UNIT * UNIT


def _cublas_serves(target: Target, p: Problem) -> bool:
    # m: where its tensor cores, after the widening, beat mma.sync (16-bit x), or gemv.cu (float32 x, and
    # bfloat16 on Turing). Dimensions and strides are 32-bit in its interface.
    least = CUBLAS_MIN_M["tensor" if p.x_dtype in _mma_dtypes(arch_of(target.arch)) else "cuda"]
    return p.m >= least and not p.captured and slice_rows(p.x_dtype, p.k) > 0


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
        LINEAR_ARGS,
        tuple((f"K_WARPS_{tokens}", warps) for tokens, (warps, _) in _BULK_SHAPES.items()),
        entries=_bulk_entries,
        serves=_bulk_serves,
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
