"""scaled_mm against the oracle: on the CPU, and (marked gpu) every row of KERNELS on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from conftest import skip_for_other_arch

import cufp8
from cufp8 import kernels, matmul, runtime
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, SCALED_FORMATS, Kernel, Launch, ScaledProblem, Target, pick

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PAIRS = tuple(SCALED_FORMATS)
SCALINGS = list(itertools.product((False, True), repeat=2))  # whether a, b have a scale per row
HOST_ACC = 2.0**-19  # of NumPy's float32 products
NAN = 0x7F  # in both formats
SIZES = (1, 7, 16, 17, 31, 33, 64, 65, 127, 129, 255, 1000, 4097)


def acc_of(k: int, fast: bool) -> float:
    """What FP8 tensor cores may lose: 13 bits behind the point for each 32 of k, in chains of 128 or of all."""
    return max(4, k / 32 if fast else 0) * 2.0**-13


def codes(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Codes of normal values, among them zeros of both signs.

    No value stands out: what tensor cores cut counts from the largest, and the bound from the sum of magnitudes.
    """
    found = reference.encode(rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 5), dtype)
    found[rng.random(shape) < 0.01] &= 0x80
    return found


def scale(rng: np.random.Generator, rows: int, by_row: bool) -> np.ndarray:
    return np.exp2(rng.uniform(-8, 0, (rows if by_row else 1, 1))).astype(np.float32)


def tensor(codes: Any, scale: Any, dtype: str = E4M3) -> cufp8.QuantizedTensor:
    whole = scale.shape[0] == 1 and codes.shape[0] != 1
    return cufp8.QuantizedTensor(
        codes, scale, dtype=dtype, scale_dtype="float32", shape=codes.shape,
        block=(-1, -1) if whole else (1, -1), activations=True,
    )  # fmt: skip


@dataclasses.dataclass
class Case:
    """Operands on the host, and what is exact of them."""

    a: np.ndarray
    b: np.ndarray
    scale_a: np.ndarray
    scale_b: np.ndarray
    bias: np.ndarray | None
    dtypes: tuple[str, str]

    @property
    def exact(self) -> tuple[np.ndarray, np.ndarray]:
        return reference.scaled_product(
            (self.a, self.dtypes[0]), (self.b, self.dtypes[1]), self.scale_a, self.scale_b, self.bias
        )

    def tensors(self, put: Callable[[Any], Any] = lambda x: x) -> tuple[cufp8.QuantizedTensor, cufp8.QuantizedTensor]:
        return (
            tensor(put(self.a), put(self.scale_a), self.dtypes[0]),
            tensor(put(self.b), put(self.scale_b), self.dtypes[1]),
        )

    def check(self, y: Any, out_dtype: str, acc: float) -> None:
        reference.assert_scaled_close(y, self.exact, out_dtype, acc)


def case(
    rng: np.random.Generator,
    m: int,
    n: int,
    k: int,
    dtypes: tuple[str, str] = (E4M3, E4M3),
    by_row: tuple[bool, bool] = (True, True),
    bias: bool = True,
) -> Case:
    return Case(
        codes(rng, (m, k), dtypes[0]),
        codes(rng, (n, k), dtypes[1]),
        scale(rng, m, by_row[0]),
        scale(rng, n, by_row[1]),
        rng.standard_normal(n).astype(np.float32) if bias else None,
        dtypes,
    )


# --- on the CPU -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_against_the_oracle(rng: np.random.Generator, dtypes: tuple[str, str], out_dtype: str) -> None:
    for i, (m, n, k) in enumerate(itertools.product((1, 7, 33), (1, 16, 129), (1, 65, 1000))):
        c = case(rng, m, n, k, dtypes, SCALINGS[i % 4], bias=bool(i % 2))
        y = cufp8.scaled_mm(*c.tensors(), bias=c.bias, out_dtype=out_dtype, fast_accum=bool(i % 3))
        assert isinstance(y, np.ndarray)
        c.check(y, out_dtype, HOST_ACC)


def test_many_parts_on_the_host(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "_HOST_ROWS", 16)
    monkeypatch.setattr(matmul, "_HOST_COLUMNS", 64)
    c = case(rng, 37, 50, 200)
    c.check(cufp8.scaled_mm(*c.tensors(), bias=c.bias), "bfloat16", HOST_ACC)


def test_the_order_of_the_scales() -> None:
    # No product of the two scales first: 2^-110 * 2^-30 is no float32, yet y is one. 2^27 * 2^90 * 2^30 is Inf.
    big = 0x7E  # 448
    a, b = np.full((3, 512), big, np.uint8), np.full((2, 512), big, np.uint8)
    for scale_a, scale_b in ((2.0**-100, 2.0**90), (2.0**-110, 2.0**-30), (2.0**90, 2.0**30)):
        x, w = (tensor(q, np.full((len(q), 1), s, np.float32)) for q, s in ((a, scale_a), (b, scale_b)))
        with np.errstate(over="ignore"):
            want = np.float32(np.float32(512 * 448.0**2 * scale_a) * np.float32(scale_b))
        y = cufp8.scaled_mm(x, w, out_dtype="float32")
        assert (y == want).all(), (scale_a, scale_b, y[0, 0], want)


def test_nan_stays_in_its_row(rng: np.random.Generator) -> None:
    c = case(rng, 9, 20, 70, (E5M2, E4M3))
    c.a[4, 69], c.a[7, 0] = NAN, 0x7C  # Inf
    y = cufp8.scaled_mm(*c.tensors(), bias=c.bias)
    assert np.isnan(y[4].astype(np.float32)).all() and not np.isfinite(y[7].astype(np.float32)).any()
    c.check(y, "bfloat16", HOST_ACC)


def test_no_tokens(rng: np.random.Generator) -> None:
    for by_row in SCALINGS:
        c = case(rng, 0, 8, 16, by_row=by_row)
        y = cufp8.scaled_mm(*c.tensors(), bias=c.bias, out_dtype="float16")
        assert y.shape == (0, 8) and y.dtype == np.float16


def test_views_on_the_host(rng: np.random.Generator) -> None:
    c = case(rng, 12, 20, 40)
    wide = np.full((24, 99), NAN, np.uint8)
    wide[::2, 5:85:2] = c.a
    scales = np.full((24, 1), np.nan, np.float32)
    scales[::2] = c.scale_a
    a, b = tensor(wide[::2, 5:85:2], scales[::2]), c.tensors()[1]
    out = np.full((12, 33), np.nan, np.float32)
    y = cufp8.scaled_mm(a, b, bias=c.bias, out_dtype="float32", out=out[:, 2:22])
    assert y.base is out and np.isnan(out[:, :2]).all() and np.isnan(out[:, 22:]).all()
    c.check(y, "float32", HOST_ACC)


def test_torch_on_the_host(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    c = case(rng, 5, 6, 40)
    a, b = c.tensors(lambda x: torch.from_numpy(x))
    out = torch.full((5, 6), torch.nan, dtype=torch.bfloat16)
    assert cufp8.scaled_mm(a, b, bias=torch.from_numpy(c.bias), out=out) is out
    c.check(out, "bfloat16", HOST_ACC)


def test_what_is_refused(rng: np.random.Generator) -> None:
    c = case(rng, 4, 6, 32)
    a, b = c.tensors()
    mm = cufp8.scaled_mm
    for bad in (c.a, c.a.astype(np.float32), None):
        with pytest.raises(TypeError, match="needed is a QuantizedTensor"):
            mm(bad, b)
        with pytest.raises(TypeError, match="scaled_mm: b is a "):
            mm(a, bad)
    both = tensor(c.a, c.scale_a, E5M2), tensor(c.b, c.scale_b, E5M2)
    with pytest.raises(ValueError, match="a is float8_e5m2 and b float8_e5m2; allowed are"):
        mm(*both)
    with pytest.raises(ValueError, match=r"a is \[4, 32\] and b \[6, 16\]; both need the same K"):
        mm(a, tensor(c.b[:, :16], c.scale_b))
    groups = cufp8.quantize_activations(rng.standard_normal((4, 256), np.float32), block=(1, 128))
    with pytest.raises(ValueError, match=r"scales of shape \[4, 2\]; needed is float32 \[4, 1\]"):
        mm(groups, groups)
    with pytest.raises(ValueError, match="out_dtype is 'float64'; allowed are bfloat16"):
        mm(a, b, out_dtype="float64")
    with pytest.raises(TypeError, match="bias is float64; needed is float32"):
        mm(a, b, bias=np.zeros(6))
    with pytest.raises(ValueError, match=r"bias has shape \[1, 6\]; needed is \[6\]"):
        mm(a, b, bias=np.zeros((1, 6), np.float32))
    with pytest.raises(TypeError, match="bias is a list"):
        mm(a, b, bias=[0.0] * 6)
    with pytest.raises(ValueError, match=r"out is float32 \[4, 6\] on the CPU; needed is bfloat16 \[4, 6\]"):
        mm(a, b, out=np.zeros((4, 6), np.float32))
    with pytest.raises(TypeError, match="cannot be written"):
        mm(a, b, out=[1])
    frozen = np.zeros((4, 6), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match="cannot be written"):
        mm(a, b, out_dtype="float32", out=frozen)
    memory = np.zeros(256, np.uint8)
    shared = tensor(memory[:128].reshape(4, 32), c.scale_a)
    with pytest.raises(ValueError, match="out overlaps"):
        mm(shared, b, out_dtype="float32", out=memory[64:160].view(np.float32).reshape(4, 6))


# --- the tables -----------------------------------------------------------------------------------------------

TARGETS = {  # multiprocessors, shared memory of a block
    "sm_75": (72, 64), "sm_80": (108, 163), "sm_86": (84, 99), "sm_89": (142, 99), "sm_90a": (132, 227),
    "sm_100a": (148, 227), "sm_103a": (160, 227), "sm_120a": (188, 99), "sm_121a": (48, 99),
}  # fmt: skip
TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 127, 128, 129, 255, 256, 257, 512, 1000, 4096, 300_000)
CHANNELS = (1, 16, 33, 1000, 1536, 4096, 4097, 7168, 14_336, 28_672, 151_936, 2_000_000)


def problems() -> Iterator[ScaledProblem]:
    shapes = [s for s in itertools.product(TOKENS, CHANNELS, (1, 128, 129, 1536, 4096, 16_384)) if s[1] * s[2] < 2**34]
    for i, (m, n, k) in enumerate(shapes):
        for fast in (False, True):
            yield ScaledProblem(*PAIRS[i % 3], tuple(FLOATS)[i % 2], m, n, k, fast_accum=fast, aligned16=i % 5 > 0)


def target_of(arch: str) -> Target:
    sms, kib = TARGETS[arch]
    return Target(arch, sms, kib << 10, ARCHS[arch].proven)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_launch_within_the_limits(arch: str) -> None:
    target, entries = target_of(arch), set()
    for p in problems():
        row = pick(target, p)
        assert row.takes is ScaledProblem and SCALED_FORMATS[p.a_dtype, p.b_dtype] in row.name
        launch = row.plan(target, p)
        assert launch.entry in row.entries(ARCHS[arch]), (p, launch)
        entries.add(launch.entry)
        check_launch(target, p, row, launch)
    assert entries == {e for row in kernels.KERNELS if row.takes is ScaledProblem for e in row.entries(ARCHS[arch])}


def check_launch(target: Target, p: ScaledProblem, row: Kernel, launch: Launch) -> None:
    x, y, z = launch.grid
    assert 1 <= x < 2**31 and 1 <= y <= 65_535 and 1 <= z <= 65_535, (p, launch)
    assert launch.smem_bytes <= target.smem_bytes and len(launch.fields) == 3, (p, launch)
    if row.source == "scaled_async.cu":
        assert p.m <= 16 and p.aligned16 and ARCHS[target.arch].cc >= (8, 0), (p, launch)
        check_async_launch(target, p, launch)
        return
    assert p.m > 16 or not p.aligned16 or target.arch == "sm_75" or row.source == "scaled_few.cu", (p, row.name)
    if row.source == "scaled_mma_sync.cu":
        tokens = int(launch.entry.rsplit("_", 1)[1])
        assert x * 128 >= p.n > (x - 1) * 128 and y * z * tokens >= p.m > y * (z - 1) * tokens, (p, launch)
        assert launch.boxes == (0, 0, 0) and launch.split == 1
        return
    assert p.aligned16 and ARCHS[target.arch].wgmma
    barriers = 16 * launch.stages
    if row.source == "scaled_wgmma.cu":
        assert launch.split == 2 and x % 2 == 0 and y == z == 1 and x <= target.sms, (p, launch)
        wide, shared = 256 if p.fast_accum else 128, launch.fields[2]
        tiles = -(-p.m // 256) * -(-p.n // wide)
        # Each cluster has a tile or, where they share the steps of some, a step at least; none of these stands alone.
        assert x // 2 <= tiles if shared == 0 else shared <= tiles and x // 2 <= shared * -(-p.k // 128), (p, launch)
        assert launch.workspace == (0 if shared == 0 else kernels.FLAG_BYTES + target.sms // 2 * 256 * wide * 4)
        assert x // 2 * 4 * 4 <= kernels.FLAG_BYTES
        assert launch.stages == (3 if p.fast_accum else 6) and launch.boxes == (128, wide // 2, 64)
        ring = launch.stages * (128 + wide) * 128
        assert launch.smem_bytes == ring + barriers + kernels.WGMMA_TAIL_BYTES[wide]
        assert launch.entry.endswith("_fast") == p.fast_accum
        return
    shape = next(shape for shape in kernels._FEW if kernels.few_entry(shape) == launch.entry)
    (tokens, widest), (tile, early, _) = shape, launch.fields
    assert row.name.startswith("scaled_few_fast" if p.fast_accum else "scaled_few_e"), (p, row.name)
    assert tile % 16 == 0 and 16 <= tile <= widest and launch.boxes == (tokens, tile, 0), (p, launch)
    assert launch.split in (1, 2, 4, 8) and (launch.split == 1 or -(-p.k // 128) >= launch.split), (p, launch)
    # Each block of a cluster has two fragments of 8 tokens of each warp, or more.
    fragments = tokens // 8 // (1 if widest == 128 else 2)
    assert fragments % (2 * launch.split) == 0 and launch.split <= kernels.few_most_split(shape), (p, launch)
    assert x == -(-p.n // tile) * launch.split and y * z * tokens >= p.m, (p, launch)
    assert 3 <= launch.stages <= 16, (p, launch)
    ring = launch.stages * (tile + tokens) * 128
    assert launch.smem_bytes == ring + barriers + kernels.FEW_TAIL_BYTES, (p, launch)
    # In the ring's place the sums of the other blocks; after it what wgmma reads of the last stage.
    assert ring >= (launch.split - 1) * tokens * widest * 4 // launch.split, (p, launch)
    assert kernels.FEW_TAIL_BYTES >= (widest - tile - tokens) * 128, (p, launch)
    blocks = kernels._FEW[shape][p.fast_accum]
    assert launch.block == (320 if blocks > 1 else 384), (p, launch)
    on_one = -(-x * y * z // target.sms)  # blocks of a multiprocessor, if all are there at once
    fits = on_one <= blocks and (launch.smem_bytes + 1024) * on_one <= target.smem_bytes + 1024
    assert fits or not early, (p, launch)


def check_async_launch(target: Target, p: ScaledProblem, launch: Launch) -> None:
    """What scaled_async.cu takes for granted."""
    what = target, p, launch
    tokens, units = map(int, launch.entry.split("_")[2:])
    warps, steps, ring = launch.block // 32, -(-p.k // 128), kernels._SCALED_ASYNC_SHAPES[tokens, units]
    x, y, z = launch.grid
    assert p.m <= tokens and y == z == 1 and x * 16 * units >= p.n > (x - 1) * 16 * units, what
    assert 1 <= warps <= kernels._SCALED_ASYNC_WARPS and launch.block == 32 * warps, what
    assert launch.block % (16 * units) == 0, what  # a thread stores one channel alone
    # for (step = warp; step < steps; step += warps): each warp has one, and none has two more than another.
    shares = [len(range(warp, steps, warps)) for warp in range(warps)]
    assert sum(shares) == steps and 1 <= min(shares) and max(shares) <= min(shares) + 1, what
    # Shared memory: of each warp b and a of the steps on their way; in the end the sums of all warps in their place.
    mine, sums = ring * (units * 4 + tokens // 8 * 2) * 512, units * (tokens // 8) * 512
    assert warps * max(mine, sums) <= launch.smem_bytes <= target.smem_bytes, what
    assert launch.boxes == (0, 0, 0) and launch.split == 1 and launch.fields[0] == 16 * units, what


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if arch != "sm_75"])
def test_launches_of_few_tokens(arch: str) -> None:
    """Whatever is asked for, and the tokens that decide which entry it is."""
    target = target_of(arch)
    for (tokens, units), m in itertools.product(kernels._SCALED_ASYNC_SHAPES, (1, 8, 9, 16)):
        if m > tokens:
            continue
        for n, k, warps in itertools.product((1, 33, 4096), (1, 129, 1536, 14_336), (1, 3, 8, 12, 16, 99)):
            p = ScaledProblem(E4M3, E4M3, "bfloat16", m, n, k)
            for per_sm in (0, 1, 3):
                launch = kernels.scaled_async_launch(target, p, units, warps, per_sm)
                assert launch.block <= 32 * warps
                check_async_launch(target, p, launch)
                # A multiprocessor has 1 KiB more than a block may have, and keeps as much of each block for itself.
                assert not per_sm or (launch.smem_bytes + 1024) * (per_sm + 1) > target.smem_bytes + 1024


def test_scaled_async_has_the_tables_numbers() -> None:
    text = (Path(__file__).parent.parent / "kernels_cu" / "scaled_async.cu").read_text()
    assert f"MAX_WARPS = {kernels._SCALED_ASYNC_WARPS}, UNIT = 16, K_STEP = {kernels.SCALED_STEP}," in text
    for tokens, units in kernels._SCALED_ASYNC_SHAPES:
        assert f"ENTRY({tokens}, {units}, RING_{tokens}_{units}, " in text


@pytest.mark.parametrize("k", [1, 16, 100, 127, 128, 129, 1000, 4104, 14_336])
def test_the_lanes_of_scaled_async_multiply_each_code_once(k: int) -> None:
    """A model of the copies of scaled_async.cu: a row's codes, by the warps and lanes that multiply them."""
    codes = np.arange(1, k + 1)  # 0: what was filled in
    ragged, (full, left) = int(k % 128 > 0), divmod(k, 128)
    quarters = np.arange(4)[:, None] * 16 + np.arange(16)  # of half a step, by lane % 4
    for warps in (1, 3, 8, 16):
        seen = []
        for warp in range(min(warps, full + ragged)):
            row = (warp - ragged) * 128  # of the step that is copied next
            for step in range(warp, full + ragged, warps):
                for half in (0, 1):
                    if ragged and step == 0:
                        there = half * 64 + quarters < left
                        at = row + (full + 1) * 128 + half * 64 + quarters
                    else:
                        there, at = np.full((4, 16), True), row + half * 64 + quarters
                    assert (at[there] >= 0).all() and (at[there] < k).all()
                    seen.append(np.where(there, codes[np.where(there, at, 0)], 0))
                row += warps * 128
        found = np.sort(np.concatenate(seen, axis=None))
        assert (found[-k:] == codes).all() and not found[:-k].any(), warps


def test_the_block_of_arguments() -> None:
    assert kernels.SCALED_ARGS.size == 192 + 3 * kernels.TENSOR_MAP_BYTES


# --- on the GPU -----------------------------------------------------------------------------------------------

ROWS = ("scaled_mma_sync", "scaled_async", "scaled_few", "scaled_wgmma")


@contextlib.contextmanager
def served_by(name: str | None, launch_of: Callable[[Target, ScaledProblem], Launch] | None = None) -> Iterator[None]:
    """Within, that row serves, whatever `pick` says."""
    if name is None:
        yield
        return

    def launcher(device: int, *fields: Any) -> tuple[runtime.Launcher, Launch]:
        target, p = runtime.target(device), ScaledProblem(*fields)
        fast = "_fast" if name == "scaled_few" and p.fast_accum else ""
        row = runtime.row(f"{name}{fast}_{SCALED_FORMATS[p.a_dtype, p.b_dtype]}")
        assert p.aligned16 or name == "scaled_mma_sync"
        launch = (launch_of or row.plan)(target, p)
        return runtime.Launcher(row, launch, device, pdl=kernels.arch_of(target.arch).pdl), launch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "_launcher", launcher)
        yield


def rows_here() -> tuple[str, ...]:
    arch = kernels.arch_of(runtime.target().arch)
    return ROWS if arch.wgmma else ROWS[:2] if arch.cc >= (8, 0) else ROWS[:1]


def need(name: str | None, entry: str | None = None) -> None:
    """Skip the test where the GPU has no kernel of that name, or not that entry of it."""
    if name is not None and name not in rows_here():
        skip_for_other_arch(name)
    arch = kernels.arch_of(runtime.target().arch)
    if entry is not None and entry not in runtime.row(f"{name}_e4m3_e4m3").entries(arch):
        skip_for_other_arch(entry)


def most_streamed() -> int:
    """Tokens that scaled_async.cu takes on this GPU."""
    entries = runtime.row("scaled_async_e4m3_e4m3").entries(kernels.arch_of(runtime.target().arch))
    return max(int(entry.split("_")[2]) for entry in entries)


def tokens_for(name: str | None, *tokens: int) -> list[int]:
    """The same, as far as that kernel takes so many."""
    return sorted({min(m, most_streamed()) if name == "scaled_async" else m for m in tokens})


def placed(values: np.ndarray, pitch: int = 0, offset: int = 0) -> Any:
    """The array on the GPU as a view of a larger one, which is full of NaN codes: rows `pitch` bytes further apart."""
    import cupy

    m, k = values.shape
    memory = cupy.full(offset + m * (k + pitch), NAN, cupy.uint8)
    view = memory[offset:].reshape(m, k + pitch)[:, :k]
    view[...] = cupy.asarray(values)
    return view


def multiply(
    c: Case, poison: Any, out_dtype: str = "bfloat16", fast: bool = False, pitch: int = 0, offset: int = 0
) -> Any:
    """y in a poisoned array with guards."""
    import cupy

    a = tensor(placed(c.a, pitch, offset), cupy.asarray(c.scale_a), c.dtypes[0])
    b = tensor(placed(c.b, pitch, offset), cupy.asarray(c.scale_b), c.dtypes[1])
    out = poison((len(c.a), len(c.b)), out_dtype, "cupy")
    bias = None if c.bias is None else cupy.asarray(c.bias)
    assert cufp8.scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accum=fast, out=out) is out
    return out


def aligned(k: int) -> int:
    """The pitch that lets rows of k bytes start on 16."""
    return -k % 16


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("fast", [False, True])
def test_sizes(rng: np.random.Generator, poison: Any, name: str, fast: bool) -> None:
    need(name)
    shapes = {s for s in itertools.product(SIZES, repeat=3) if s[0] * s[1] * s[2] < 2**30 and sum(s) % 17 == 0}
    shapes |= {(s, 129, 65) for s in SIZES} | {(65, s, 129) for s in SIZES} | {(129, 65, s) for s in SIZES}
    if name == "scaled_async":
        shapes = {(min(m, i % most_streamed() + 1), n, k) for i, (m, n, k) in enumerate(sorted(shapes))}
    for i, (m, n, k) in enumerate(sorted(shapes)):
        c = case(rng, m, n, k, PAIRS[i % 3], SCALINGS[i % 4], bias=bool(i % 2))
        out_dtype = tuple(FLOATS)[i % 3]
        pitch = 0 if name == "scaled_mma_sync" else aligned(k)
        with served_by(name):
            y = multiply(c, poison, out_dtype, fast, pitch)
        try:
            c.check(y, out_dtype, acc_of(k, fast))
        except AssertionError as wrong:
            raise AssertionError(f"{name} m {m} n {n} k {k} {c.dtypes} {out_dtype} fast {fast}: {wrong}") from None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_out_in_wider_rows(rng: np.random.Generator, name: str, out_dtype: str) -> None:
    """Rows start on 16 bytes and end anywhere: what is beside them stays."""
    import cupy

    need(name)
    for m, n in itertools.product(tokens_for(name, 1, 70, 300), (1, 17, 30, 40, 129, 260)):
        c = case(rng, m, n, 144)
        a, b = c.tensors(cupy.asarray)
        whole = cupy.full((m, 320), 77, FLOATS[out_dtype])
        with served_by(name):
            cufp8.scaled_mm(a, b, bias=cupy.asarray(c.bias), out_dtype=out_dtype, out=whole[:, :n])
        c.check(whole[:, :n], out_dtype, acc_of(144, False))
        assert bool((whole[:, n:] == 77).all()), (m, n)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ROWS, None])
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("dtypes", PAIRS, ids="-".join)
def test_dtypes_and_scalings(
    rng: np.random.Generator, poison: Any, name: str | None, out_dtype: str, dtypes: tuple[str, str]
) -> None:
    need(name)
    for by_row, bias, fast in itertools.product(SCALINGS, (False, True), (False, True)):
        c = case(rng, *tokens_for(name, 150), 328, 400, dtypes, by_row, bias)
        with served_by(name):
            c.check(multiply(c, poison, out_dtype, fast), out_dtype, acc_of(400, fast))


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize(
    "shape",
    [pytest.param(s, marks=[pytest.mark.sanitize] * (s == (64, 64))) for s in kernels._FEW],
    ids=kernels.few_entry,
)
def test_tiles_and_splits_of_few_tokens(
    rng: np.random.Generator, poison: Any, shape: tuple[int, int], fast: bool
) -> None:
    need("scaled_few")
    tokens, widest = shape
    for tile, split, m in itertools.product((16, widest - 16, widest), (1, 2, 4, 8), (tokens, 2 * tokens + 3)):
        if split > kernels.few_most_split(shape):
            continue
        c = case(rng, m, 600, 1040)
        for per_sm in {1, kernels._FEW[shape][fast]}:
            of = shape, tile, split, per_sm
            with served_by("scaled_few", lambda t, p, of=of: kernels.few_launch(t, p, *of)):
                y, again = (multiply(c, poison, fast=fast) for _ in range(2))
            np.testing.assert_array_equal(y.get().view(np.uint16), again.get().view(np.uint16))
            try:
                c.check(y, "bfloat16", acc_of(1040, fast))
            except AssertionError as wrong:
                raise AssertionError(f"tile {tile} split {split} a multiprocessor {per_sm} m {m}: {wrong}") from None


# m, n, k, then clusters and the tiles whose steps they share
SHARED = [
    pytest.param((256, 256, 1008, 8, 1), marks=pytest.mark.sanitize),
    (300, 500, 1280, 3, 4), (300, 500, 1280, 7, 4), (300, 500, 1280, 40, 4), (300, 1100, 640, 4, 6),
    (300, 1100, 640, 5, 10), (1, 2000, 384, 10, 8), (700, 700, 128, 5, 4),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("of", SHARED)
def test_clusters_that_share_the_steps_of_a_tile(
    rng: np.random.Generator, poison: Any, of: tuple[int, ...], fast: bool
) -> None:
    """Again and again on one stream: each launch leaves the flags as it found them."""
    need("scaled_wgmma")
    m, n, k, *plan = of
    with served_by("scaled_wgmma", lambda t, p: kernels.scaled_wgmma_launch(t, p, *plan)):
        for out_dtype in FLOATS:
            c = case(rng, m, n, k)
            y, again = (multiply(c, poison, out_dtype, fast) for _ in range(2))
            c.check(y, out_dtype, acc_of(k, fast))
            np.testing.assert_array_equal(again.get().view(np.uint8), y.get().view(np.uint8))


@pytest.mark.gpu
def test_streams_and_graphs_have_a_workspace_each(rng: np.random.Generator) -> None:
    """Launches on several streams, and in graphs, run at the same time and give one another no sums."""
    import cupy

    need("scaled_wgmma")
    m, n, k = 256, 1024, 4096
    cases = [case(rng, m, n, k) for _ in range(4)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
    with served_by("scaled_wgmma", lambda t, p: kernels.scaled_wgmma_launch(t, p, 16, 4)):
        operands = [c.tensors(cupy.asarray) for c in cases]
        want = [cufp8.scaled_mm(a, b) for a, b in operands]
        got: list[Any] = []
        graphs = []
        cupy.cuda.runtime.deviceSynchronize()
        for stream, (a, b) in zip(streams, operands, strict=True):
            with stream:
                got.append([cufp8.scaled_mm(a, b) for _ in range(8)])
        cupy.cuda.runtime.deviceSynchronize()
        for stream, (a, b) in zip(streams, operands, strict=True):
            with stream:
                stream.begin_capture()
                y = [cufp8.scaled_mm(a, b) for _ in range(3)]
                graphs.append((stream.end_capture(), y))
        for _, y in graphs:
            for z in y:
                z.fill(np.nan)
        cupy.cuda.runtime.deviceSynchronize()
        for _ in range(3):
            for stream, (graph, _) in zip(streams, graphs, strict=True):
                graph.launch(stream)
        cupy.cuda.runtime.deviceSynchronize()
    for i, y in enumerate(want):
        for z in (*got[i], *graphs[i][1]):
            np.testing.assert_array_equal(z.get().view(np.uint16), y.get().view(np.uint16))


FEW_SHAPES = ((1, 1), (17, 16), (33, 100), (100, 1000), (129, 4104), (2200, 144), (4300, 400), (40, 14_336))


def acc_of_few(k: int) -> float:
    """As tight as the tensor cores' own float32 sums allow where codes are multiplied as float16."""
    arch = kernels.arch_of(runtime.target().arch)
    return arch.acc["tensor"] if arch.cc == (9, 0) else acc_of(k, False)


def acc_of_pick(p: ScaledProblem) -> float:
    """Of the kernel that `pick` chooses for few tokens."""
    streamed = pick(runtime.target(), p).source == "scaled_async.cu"
    return acc_of_few(p.k) if streamed else acc_of(p.k, p.fast_accum)


@pytest.mark.gpu
@pytest.mark.parametrize("m", range(1, 18))
def test_few_tokens(rng: np.random.Generator, poison: Any, m: int) -> None:
    """As `pick` chooses, between NaN codes on all sides."""
    for i, (n, k) in enumerate(FEW_SHAPES, m):
        c = case(rng, m, n, k, PAIRS[i % 3], SCALINGS[i % 4], bias=bool(i % 2))
        out_dtype, fast = tuple(FLOATS)[i // 2 % 3], bool(i % 5 % 2)
        y = multiply(c, poison, out_dtype, fast, pitch=aligned(k) + i % 2 * 112, offset=16)
        try:
            p = ScaledProblem(*c.dtypes, out_dtype, m, n, k, fast)
            c.check(y, out_dtype, acc_of_pick(p))
        except AssertionError as wrong:
            raise AssertionError(f"n {n} k {k} {c.dtypes} {out_dtype} fast {fast}: {wrong}") from None


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "units"), kernels._SCALED_ASYNC_SHAPES)
def test_warps_and_units_of_few_tokens(rng: np.random.Generator, poison: Any, tokens: int, units: int) -> None:
    need("scaled_async", f"scaled_async_{tokens}_{units}")
    for warps, (m, n, k), early in itertools.product(
        (1, 2, 3, 5, 8, 16), ((tokens, 1000, 1040), (tokens - 3, 77, 4104), (tokens, 40, 128)), (False, True)
    ):
        c = case(rng, m, n, k)
        with served_by(
            "scaled_async", lambda t, p, w=warps, e=early: kernels.scaled_async_launch(t, p, units, w, early=e)
        ):
            y, again = (multiply(c, poison, "float32", pitch=aligned(k)) for _ in range(2))
        assert (y.view(np.uint32) == again.view(np.uint32)).all()
        try:
            c.check(y, "float32", acc_of_few(k))
        except AssertionError as wrong:
            raise AssertionError(f"warps {warps} m {m} n {n} k {k} early {early}: {wrong}") from None


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [False, True])
def test_few_tokens_whose_b_may_be_read_early(rng: np.random.Generator, weights: bool) -> None:
    """`queue_of`, with b as a weight and not, in a chain that writes a anew before each call."""
    import cupy

    for m, n, k in ((1, 300, 400), (8, 40, 4104), (16, 4200, 272)):
        c = case(rng, m, n, k)
        a, b = placed(c.a, aligned(k)), placed(c.b, aligned(k))
        scale_a, scale_b, bias = map(cupy.asarray, (c.scale_a, c.scale_b, c.bias))
        p = ScaledProblem(E4M3, E4M3, "float32", m, n, k)
        y = cupy.full((m, n), cupy.nan, np.float32)
        queue = matmul.queue_of(
            p, (b.data.ptr, b.strides[0], scale_b.data.ptr, 1), bias.data.ptr, 1, a_stride=k + aligned(k),
            device=runtime.current_device(), pdl=weights,
        )  # fmt: skip
        good, stream = a.copy(), cupy.cuda.get_current_stream()
        for _ in range(10):
            a[...] = NAN
            a[...] = good
            queue(stream.ptr, a.data.ptr, scale_a.data.ptr, y.data.ptr, n)
        c.check(y, "float32", acc_of_pick(p))


@pytest.mark.gpu
@pytest.mark.parametrize(("pitch", "offset"), [(0, 0), (16, 0), (16, 16), (3, 0), (0, 1), (5, 7), (8, 8), (1, 15)])
def test_pitches_and_offsets(rng: np.random.Generator, poison: Any, pitch: int, offset: int) -> None:
    for m, k in ((5, 320), (16, 77), (130, 320), (300, 77)):
        c = case(rng, m, 200, k)
        c.check(multiply(c, poison, pitch=pitch, offset=offset), "bfloat16", acc_of(k, False))


@pytest.mark.gpu
def test_views_in_any_order(rng: np.random.Generator) -> None:
    import cupy

    c = case(rng, 40, 48, 64)
    a, b = c.tensors(cupy.asarray)
    views = {
        "transposed": cupy.asarray(np.ascontiguousarray(c.a.T)).T,
        "backwards": cupy.asarray(np.ascontiguousarray(c.a[::-1]))[::-1],
        "every other column": cupy.asarray(np.repeat(c.a, 2, axis=1))[:, ::2],
        "every other row": cupy.asarray(np.repeat(c.a, 2, axis=0))[::2],
    }
    scales = cupy.asarray(np.repeat(c.scale_a, 3, axis=0))[::3]
    for what, view in views.items():
        y = cufp8.scaled_mm(tensor(view, scales), b, bias=cupy.asarray(c.bias))
        try:
            c.check(y, "bfloat16", acc_of(64, False))
        except AssertionError as wrong:
            raise AssertionError(f"{what}: {wrong}") from None
    one = dataclasses.replace(c, a=np.repeat(c.a[:1], 40, axis=0))
    y = cufp8.scaled_mm(tensor(cupy.broadcast_to(a.codes[:1], (40, 64)), a.scale), b, bias=cupy.asarray(c.bias))
    one.check(y, "bfloat16", acc_of(64, False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*ROWS, None])
def test_nan_poisons_its_own_row(rng: np.random.Generator, poison: Any, name: str | None) -> None:
    need(name)
    for dtypes, m in itertools.product(PAIRS, tokens_for(name, 9, 200)):
        c = case(rng, m, 136, 304, dtypes)
        c.a[m - 2, 303] = c.a[3, 0] = NAN
        c.b[70, 200] = NAN
        with served_by(name):
            y = multiply(c, poison)
        values = reference.to_float64(y)
        nan = np.zeros_like(values, bool)
        nan[m - 2] = nan[3] = True
        nan[:, 70] = True
        assert (np.isnan(values) == nan).all(), (dtypes, m)
        c.check(y, "bfloat16", acc_of(304, False))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_outputs_of_any_pitch(rng: np.random.Generator, name: str) -> None:
    import cupy

    need(name)
    for m, (n, pitch, offset), out_dtype in itertools.product(
        tokens_for(name, 3, 300), ((128, 144, 8), (120, 129, 1), (257, 257, 0), (64, 200, 3)), FLOATS
    ):
        c = case(rng, m, n, 160)
        a, b = c.tensors(cupy.asarray)
        size = FLOATS[out_dtype].itemsize
        memory = cupy.full((m * pitch + offset) * size, 0xFF, cupy.uint8)
        out = memory.view(FLOATS[out_dtype])[offset:].reshape(m, pitch)[:, :n]
        with served_by(name):
            cufp8.scaled_mm(a, b, bias=cupy.asarray(c.bias), out_dtype=out_dtype, out=out)
        c.check(out, out_dtype, acc_of(160, False))
        outside = np.ones((m, pitch * size), bool)
        outside[:, : n * size] = False
        left = memory.get()
        assert (left[: offset * size] == 0xFF).all() and (left[offset * size :].reshape(m, -1)[outside] == 0xFF).all()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 64, 128, 300, 1000])
@pytest.mark.parametrize("fast", [False, True])
def test_the_same_bits_again_and_in_a_graph(rng: np.random.Generator, m: int, fast: bool) -> None:
    import cupy

    c = case(rng, m, 1024, 2048)
    a, b = c.tensors(cupy.asarray)
    bias = cupy.asarray(c.bias)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        first = cufp8.scaled_mm(a, b, bias=bias, fast_accum=fast)
        out = cupy.empty_like(first)
        stream.begin_capture()
        for _ in range(20):  # each may start before the one before is done
            cufp8.scaled_mm(a, b, bias=bias, fast_accum=fast, out=out)
        graph = stream.end_capture()
        for _ in range(5):
            out.view(np.uint16).fill(0xFFFF)
            graph.launch(stream)
            stream.synchronize()
            assert (out.view(np.uint16) == first.view(np.uint16)).all()
    c.check(first, "bfloat16", acc_of(2048, fast))


@pytest.mark.gpu
def test_a_chain_reads_what_the_call_before_wrote(rng: np.random.Generator) -> None:
    """Codes of y's bytes: the second call starts before the first is done, and must wait for it."""
    import cupy

    for m in (4, 64, 512):
        c = case(rng, m, 2048, 1024)
        a, b = c.tensors(cupy.asarray)
        n_bytes = cupy.empty((m, 2048), FLOATS["float16"])
        codes_of_y = n_bytes.view(np.uint8)[:, :1024]  # any bytes are codes
        second = tensor(codes_of_y, cupy.ones((m, 1), np.float32))
        last = case(rng, 8, 512, 1024)
        w = tensor(cupy.asarray(last.b), cupy.asarray(last.scale_b))
        results = []
        for wait in (True, False, False):
            n_bytes.view(np.uint16).fill(0x3C3C)
            cupy.cuda.runtime.deviceSynchronize()
            cufp8.scaled_mm(a, b, out_dtype="float16", out=n_bytes)
            if wait:
                cupy.cuda.runtime.deviceSynchronize()
            results.append(cufp8.scaled_mm(second, w, out_dtype="float32").view(np.uint32).get())
        assert (results[0] == results[1]).all() and (results[0] == results[2]).all(), m


@pytest.mark.gpu
def test_libraries_and_no_tokens(rng: np.random.Generator) -> None:
    import cupy

    torch = pytest.importorskip("torch")
    c = case(rng, 20, 96, 64)
    a, b = c.tensors(lambda x: torch.from_numpy(x).cuda())
    out = torch.full((20, 96), torch.nan, dtype=torch.float16, device="cuda")
    bias = torch.from_numpy(c.bias).cuda()
    torch.cuda.synchronize()
    assert cufp8.scaled_mm(a, b, bias=bias, out_dtype="float16", out=out) is out
    c.check(out, "float16", acc_of(64, False))
    none = case(rng, 0, 96, 64)
    y = cufp8.scaled_mm(*none.tensors(cupy.asarray))
    assert isinstance(y, cupy.ndarray) and y.shape == (0, 96)
    with pytest.raises(ValueError, match="a is on cuda:0 and b on cpu"):
        cufp8.scaled_mm(a, c.tensors()[1])
    with pytest.raises(ValueError, match="bias is on the CPU"):
        cufp8.scaled_mm(a, b, bias=c.bias)
    memory = cupy.zeros(20 * 96 * 4, np.uint8)
    shared = tensor(memory[: 20 * 64].reshape(20, 64), a.scale)
    with pytest.raises(ValueError, match="out overlaps"):
        cufp8.scaled_mm(shared, b, out_dtype="float32", out=memory.view(np.float32).reshape(20, 96))
    with pytest.raises(ValueError, match=r"needed is bfloat16 \[20, 96\] on cuda:0"):
        cufp8.scaled_mm(a, b, out=cupy.empty((20, 95), np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 64, 256, 2048])
def test_relative_errors(rng: np.random.Generator, m: int) -> None:
    import cupy

    # So many outputs of one size that what rounding does to them hardly varies.
    c = case(rng, m, max(1024, 16384 // m), 4096, by_row=(True, m > 64), bias=False)
    a, b = c.tensors(cupy.asarray)
    exact = c.exact[0]
    for out_dtype, largest in (("bfloat16", 1.8e-3), ("float32", 3e-4)):
        y = reference.to_float64(cufp8.scaled_mm(a, b, out_dtype=out_dtype))
        error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
        assert error <= largest, (out_dtype, error)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("name", ROWS)
def test_some_ways_for_the_sanitizer(rng: np.random.Generator, poison: Any, name: str) -> None:
    need(name)
    for (m,), n, k in ((tokens_for(name, 5), 40, 80), (tokens_for(name, 130), 264, 272)):
        for out_dtype, fast in (("bfloat16", True), ("float32", False)):
            c = case(rng, m, n, k)
            with served_by(name):
                c.check(multiply(c, poison, out_dtype, fast), out_dtype, acc_of(k, fast))
    if name == "scaled_mma_sync":
        c = case(rng, 19, 37, 67)
        c.check(multiply(c, poison), "bfloat16", acc_of(67, False))
