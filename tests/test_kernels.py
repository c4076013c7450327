"""The tables of kernels: a row for each problem, a problem for each row, launches within limits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8 import kernels
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, KERNELS, Launch, Problem, Target, pick

# Shared memory that one block may have with opting in, in bytes (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"), and the multiprocessors of a large and a small
# GPU of the kind.
KIB = 1024
LIMITS = {
    "sm_75": (64 * KIB, 72, 14),
    "sm_80": (163 * KIB, 108, 56),
    "sm_86": (99 * KIB, 84, 16),
    "sm_89": (99 * KIB, 142, 20),
    "sm_90a": (227 * KIB, 132, 78),
    "sm_100a": (227 * KIB, 148, 132),
    "sm_103a": (227 * KIB, 160, 148),
    "sm_120a": (99 * KIB, 188, 20),
    "sm_121a": (99 * KIB, 48, 48),
}
SIZES = (1, 16, 33, 1000, 4096, 4097, 14_336, 50_257, 20_000_000)
CHANNELS = (*SIZES, 2112, 8448)  # also between one, two and four units a multiprocessor
TOKENS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 300_000, 5_000_000)
GRID_X, GRID_YZ = 2**31 - 1, 65_535  # CUDA's limits, from compute capability 3.0 on


def targets(arch: str) -> list[Target]:
    smem_bytes, many, few = LIMITS[arch]
    return [Target(arch, sms, smem_bytes, ARCHS[arch].proven) for sms in (many, few)]


@functools.cache
def problems(x_dtype: str) -> list[Problem]:
    return [
        Problem("FP8A16", (1, k), x_dtype, out, m, n, k, aligned16=aligned, captured=captured)
        for m, n, k in itertools.product(TOKENS, CHANNELS, SIZES)
        if n * k < 2**37
        for out in ({x_dtype, "float32"} if (m, n, k) == (8, 16, 33) else {x_dtype})
        for aligned in ((True, False) if k * FLOATS[x_dtype].itemsize % 16 == 0 else (False,))
        for captured in (True, False)
    ]


def numbers_of(launch: Launch) -> tuple[int, ...]:
    """The numbers at the end of a kernel's name."""
    return tuple(int(number) for number in re.search(r"(_\d+)+$", launch.entry).group()[1:].split("_"))


def tokens_of(launch: Launch) -> int:
    """Tokens of a block, by the kernel's name."""
    return numbers_of(launch)[0]


SERVING = [row for row in KERNELS if row.linear and row.weight == "fp8"]  # the others: test_block_linear.py
MAX_ASYNC_WARPS = 16
TENSOR = {"mma_sync.cu", "async_mma.cu", "bulk_mma.cu", "wgmma.cu"}  # files of rows on tensor cores
CASES = list(itertools.product(ARCHS, FLOATS))


def test_every_arch_has_a_row_with_its_own_name() -> None:
    assert set(ARCHS) == set(LIMITS)
    for name, arch in ARCHS.items():
        assert arch.name == name
        digits = re.fullmatch(r"sm_(\d+)a?", name).group(1)
        assert arch.cc == (int(digits[:-1]), int(digits[-1]))
        assert arch.bf16_mma == (name != "sm_75")
        assert arch.pdl == arch.bulk == (int(digits) >= 90)
        assert arch.wgmma == (digits == "90")
        assert arch.fp8 == (int(digits) >= 89)
        assert set(arch.acc) == {"cuda", "tensor"}
        # Below one fp32 rounding no sum can stay; above a bf16 rounding the bound says nothing.
        assert all(2**-24 <= value <= 2**-10 for value in arch.acc.values())
    assert ARCHS["sm_90a"].proven


def test_rows_have_names_and_sources_of_their_own() -> None:
    names = [row.name for row in KERNELS]
    assert len(set(names)) == len(names)
    folder = Path(__file__).parent.parent / "kernels_cu"
    assert {row.source for row in KERNELS} == {path.name for path in folder.glob("*.cu")}
    for row in KERNELS:
        assert row.args.size % 8 == 0
        assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*", name) for name, _ in row.defines)


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_every_problem_has_a_row_and_a_launch_within_the_limits(arch: str, x_dtype: str) -> None:
    for target in targets(arch):
        for p in problems(x_dtype):
            row = pick(target, p)
            assert row in SERVING, p
            if row.plan is None:
                assert row.name == "cublas"
                continue
            launch = row.plan(target, p)
            x, y, z = launch.grid
            assert 1 <= x <= GRID_X and 1 <= y <= GRID_YZ and 1 <= z <= GRID_YZ, (p, launch)
            assert launch.entry in row.entries(ARCHS[arch]), (p, launch)
            assert p.x_dtype in launch.entry, (p, launch)
            assert launch.block % 32 == 0 and 32 <= launch.block <= 1024, (p, launch)
            assert 0 <= launch.smem_bytes <= target.smem_bytes, (p, launch)
            assert launch.split in (1, 2, 4, 8) and x % launch.split == 0, (p, launch)
            assert launch.split == 1 or ARCHS[arch].bulk, (p, launch)


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_every_output_has_a_block_and_no_block_is_idle(arch: str, x_dtype: str) -> None:
    """Of the kernels whose blocks have one place each; those of tiles.cuh are below."""
    for target in targets(arch):
        for p in problems(x_dtype):
            row = pick(target, p)
            if row.plan is None or row.args is kernels.TILE_ARGS:
                continue
            launch = row.plan(target, p)
            tokens, *rest = numbers_of(launch)
            shapes = {"gemv": 1, "mma_sync": kernels._MMA_SHAPES.get(tokens), "async_mma": rest and rest[0]}
            most = shapes[row.name]  # units of a block
            x, y, z = launch.grid
            units = kernels.units_steps(p.n, p.k)[0]
            assert (x - 1) * most < units <= x * most, (p, launch)
            if row.name == "async_mma":
                check_async_launch(target, p, launch)
            assert p.m <= y * z * tokens, (p, launch)
            assert y * (z - 1) * tokens < p.m, (p, launch)
            assert launch.split == 1 and not launch.fields and not launch.box, (p, launch)


def test_async_mma_has_the_tables_numbers() -> None:
    text = (Path(__file__).parent.parent / "kernels_cu" / "async_mma.cu").read_text()
    assert f"MAX_WARPS = {MAX_ASYNC_WARPS};" in text and "GROUP = TOKENS > 8 ? 2 : 4;" in text
    for shapes in kernels._ASYNC_SHAPES.values():
        assert all(group == (2 if tokens > 8 else 4) for (tokens, _), group in shapes.items())


def check_async_launch(target: Target, p: Problem, launch: Launch) -> None:
    """What async_mma.cu takes for granted."""
    what = target, p, launch
    tokens, units = numbers_of(launch)
    warps, steps = launch.block // 32, kernels.units_steps(p.n, p.k)[1]
    assert p.m <= tokens and (tokens, units) in kernels._ASYNC_SHAPES[8] and launch.grid[1:] == (1, 1), what
    group = kernels._ASYNC_SHAPES[8][tokens, units]
    assert 1 <= warps <= MAX_ASYNC_WARPS and launch.block == 32 * warps, what
    assert launch.block % (16 * units) == 0, what  # a thread stores one channel alone
    # for (group = warp; group < groups; group += warps): each warp has one, and none has two more than another.
    groups = -(-steps // group)
    shares = [len(range(warp, groups, warps)) for warp in range(warps)]
    assert sum(shares) == groups and 1 <= min(shares) and max(shares) <= min(shares) + 1, what
    # Shared memory: of each warp the codes of a group, then its x; in the end the sums of all warps in their place.
    mine = group * units * 1024 + (group * 160 if tokens == 1 else tokens * (group * 128 + 16))
    assert mine % 16 == 0 and warps * mine <= launch.smem_bytes <= target.smem_bytes, what
    sums = warps * units * 16 * 4 if tokens == 1 else warps * units * (tokens // 8) * 32 * 16
    assert sums <= launch.smem_bytes, what


@pytest.mark.parametrize("arch", ARCHS)
def test_every_row_and_entry_is_reached(arch: str) -> None:
    rows: set[str] = set()
    entries: set[str] = set()
    for x_dtype, target in itertools.product(FLOATS, targets(arch)):
        for p in problems(x_dtype):
            row = pick(target, p)
            rows.add(row.name)
            if row.plan is not None:
                entries.add(row.plan(target, p).entry)
    assert rows == {row.name for row in SERVING if row.entries(ARCHS[arch])}
    for row in SERVING:
        if row.plan is not None:
            have = set(row.entries(ARCHS[arch]))
            # Where wgmma is, it takes all that has more than 16 tokens: bulk_mma's kernels for them are compiled there
            # to be tested on a GPU that there is.
            spare = {e for e in have if row.name == "bulk_mma" and ARCHS[arch].wgmma and int(e.rsplit("_", 1)[1]) > 16}
            assert have - entries <= spare, f"never launched on {arch}: {sorted(have - entries)}"


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_a_captured_problem_never_gets_cublas(arch: str, x_dtype: str) -> None:
    seen = set()
    for target, p in itertools.product(targets(arch), problems(x_dtype)):
        free = pick(target, dataclasses.replace(p, captured=False)).name
        caught = pick(target, dataclasses.replace(p, captured=True)).name
        assert caught != "cublas", p
        assert free in ("cublas", caught), p  # only cuBLAS gives way
        seen.add(free)
    assert "cublas" in seen


@pytest.mark.parametrize("arch", ARCHS)
def test_tensor_cores_multiply_16_bit_numbers_only(arch: str) -> None:
    for x_dtype, target in itertools.product(FLOATS, targets(arch)):
        fits = x_dtype == "float16" or (x_dtype == "bfloat16" and arch != "sm_75")
        files = {pick(target, p).source for p in problems(x_dtype)}
        assert bool(files & TENSOR) == fits
        assert ("bulk_mma.cu" in files) == (fits and ARCHS[arch].bulk)
        assert ("wgmma.cu" in files) == (fits and ARCHS[arch].wgmma)


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_rows_get_only_what_they_can_do(arch: str, x_dtype: str) -> None:
    for target, p in itertools.product(targets(arch), problems(x_dtype)):
        picked = pick(target, p)
        name = picked.name
        if p.m == 1:
            assert name == ("async_mma" if arch != "sm_75" and x_dtype != "float32" and p.aligned16 else "gemv"), p
        if not p.aligned16:
            assert name != "async_mma" and picked.args is not kernels.TILE_ARGS, p  # they copy 16 bytes of x, or more
        if name == "async_mma":
            assert p.m <= 16, p
        if picked.source == "wgmma.cu":
            assert p.m > 16, p
            assert (x_dtype in name, name.endswith("_256")) == (True, tokens_of(picked.plan(target, p)) == 256), p
        if name == "gemv":  # what no other row can
            assert not any(row.serves(target, p) for row in SERVING if row.name not in ("gemv", "cublas")), p
        if x_dtype == "float32" or (x_dtype, arch) == ("bfloat16", "sm_75"):
            assert picked.source not in TENSOR, p


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_what_does_not_depend_on_m_is_served_alike(arch: str, x_dtype: str) -> None:
    """Batch invariant: one file, one kind of kernel, one way to add up k for all numbers of tokens, captured or not."""
    sizes = (1, 1000, 2112, 4096, 50_257), (8, 384, 448, 1000, 1024, 4096), (True, False)
    for target in [*targets(arch), *(dataclasses.replace(target, sms=1) for target in targets(arch)[:1])]:
        for n, k, aligned16 in itertools.product(*sizes):
            seen = {}
            for m, captured in itertools.product(TOKENS, (True, False)):
                p = Problem("FP8A16", (1, k), x_dtype, x_dtype, m, n, k, aligned16, True, captured)
                row = pick(target, p)
                launch = row.plan(target, p)
                assert launch.entry in row.entries(ARCHS[arch])
                if row.args is kernels.TILE_ARGS:
                    check_tile_launch(target, p, launch)
                    assert tokens_of(launch) >= 32, (p, launch)  # fewer add up k in two sums
                    args = tile_fields(launch)
                    seen.setdefault((row.source, launch.split, args["ways"], args["tile"], args["wider"]), m)
                else:
                    assert row.name in ("gemv", "mma_sync"), (p, launch)
                    seen.setdefault((row.source, launch.split), m)
            assert len(seen) == 1, (target, n, k, seen)


def test_pick_is_pure_and_cached() -> None:
    target = targets("sm_90a")[0]
    p = Problem("FP8A16", (1, 4096), "bfloat16", "bfloat16", 3, 4096, 4096)
    first = pick(target, p)
    hits = pick.cache_info().hits
    again = pick(dataclasses.replace(target), dataclasses.replace(p))
    assert again is first and pick.cache_info().hits == hits + 1
    assert pick.__wrapped__(target, p) is first
    for instance, name in ((target, "sms"), (p, "m"), (first, "name"), (ARCHS["sm_80"], "cc")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(instance, name, 1)


@pytest.mark.parametrize(("name", "cc"), [("sm_87", (8, 7)), ("sm_110", (11, 0)), ("sm_110a", (11, 0))])
def test_a_gpu_outside_the_table_gets_the_general_rows(name: str, cc: tuple[int, int]) -> None:
    assert name not in ARCHS
    arch = kernels.arch_of(name)
    assert (arch.name, arch.cc, arch.proven) == (name, cc, False)
    for x_dtype in FLOATS:
        for p in problems(x_dtype)[::37]:
            row = pick(Target(name, 20, 99 * KIB, False), p)
            assert row in SERVING
            assert row.plan is None or row.plan(Target(name, 20, 99 * KIB, False), p)


def test_arch_of_a_known_name_is_the_row() -> None:
    assert all(kernels.arch_of(name) is row for name, row in ARCHS.items())


@pytest.mark.parametrize("x_dtype", FLOATS)
def test_a_widened_slice_is_at_most_32_mib(x_dtype: str) -> None:
    for k in SIZES:
        row_bytes = -(-k // 64) * 64 * FLOATS[x_dtype].itemsize
        rows = kernels.slice_rows(x_dtype, k)
        assert rows % kernels.UNIT == 0
        assert rows * row_bytes <= 32 << 20 < (rows + kernels.UNIT) * row_bytes
        if rows == 0:  # not even one unit: cuBLAS must not be asked
            p = Problem("FP8A16", (1, k), x_dtype, x_dtype, 1000, 16, k, aligned16=False)
            assert pick(targets("sm_90a")[0], p).name != "cublas"
    assert kernels.slice_rows(x_dtype, 20_000_000) == 0


# --- the launches of tiles.cuh ----------------------------------------------------------------------
BAND = 4
# The fields that TILE_ARGS adds to LINEAR_ARGS, as the kernel names them.
TILES_CUH = (Path(__file__).parent.parent / "kernels_cu" / "tiles.cuh").read_text()
TILE_FIELDS = re.findall(r"^\s+int (\w+);", TILES_CUH.split("struct TileArgs {")[1].split("};")[0], re.M)


# Ways that launches of each kernel are seen with.
WAYS = {
    **{("bulk_mma", tokens): {2, 4, 8} for tokens in (8, 16, 32)},
    ("bulk_mma", 64): {2, 4, 8},
    **{("wgmma", tokens): {1, 2} for tokens in (32, 64, 128, 256)},
}


def tile_fields(launch: Launch) -> dict[str, int]:
    return dict(zip(TILE_FIELDS, launch.fields, strict=True))


def tile_problems() -> Iterator[tuple[Target, Problem, Launch]]:
    """Launches of tiles.cuh that the table makes, and others that `tile_launch` can make."""
    sizes = (1, 16, 17, 129, 300, 1024, 2112, 2113, 4096, 8448, 14_336, 50_257)
    tokens = (1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 129, 256, 257, 300, 1000, 1025, 4097)
    for arch in ("sm_90a", "sm_100a", "sm_120a"):
        few = [Target(arch, sms, LIMITS[arch][0], False) for sms in (1, 13)]
        for target in [*targets(arch), *few]:
            for m, n, k in itertools.product(tokens, sizes, (8, 64, 72, 512, 1024, 4096, 4104)):
                p = Problem("FP8A16", (1, k), "bfloat16", "bfloat16", m, n, k)
                row = pick(target, p)
                if row.args is kernels.TILE_ARGS:
                    yield target, p, row.plan(target, p)
    shapes = [(name, some) for name, tokens in kernels._TILES.items() for some in tokens]
    sizes = (1, 4096), (17, 520), (300, 2048), (2000, 64)
    for (name, some), (n, k), split, sms in itertools.product(shapes, sizes, (1, 2, 4, 8), (1, 3, 132)):
        target, (units, steps) = Target("sm_90a", sms, 227 * KIB, True), kernels.units_steps(n, k)
        if steps >= split:
            narrow = -(-units // kernels.TILE_MAX_UNITS)
            m_tiles = itertools.product((1, some, some + 1, 13 * some - 1), {narrow, (narrow + units) // 2, units})
            for (m, tiles), per_sm in itertools.product(m_tiles, (1, 2)):
                p = Problem("FP8A16", (1, k), "float16", "float16", m, n, k)
                yield target, p, kernels.tile_launch(name, target, p, some, tiles, split, per_sm)


def tile_at(p: Problem, launch: Launch, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first token, the first unit, and the units of tiles, as the C++ struct Tile finds them."""
    tokens, args = tokens_of(launch), tile_fields(launch)
    tiles = (kernels.units_steps(p.n, p.k)[0] - args["wider"]) // args["tile"]
    groups = -(-p.m // tokens)
    band = index // (tiles * BAND)
    wide = np.minimum(BAND, groups - band * BAND)
    within = index - band * tiles * BAND
    tile = within // wide
    token = (band * BAND + within % wide) * tokens
    return token, tile * args["tile"] + np.minimum(tile, args["wider"]), args["tile"] + (tile < args["wider"])


def tile_count(p: Problem, launch: Launch) -> int:
    args = tile_fields(launch)
    return (kernels.units_steps(p.n, p.k)[0] - args["wider"]) // args["tile"] * -(-p.m // tokens_of(launch))


def parts_of_k(steps: int, split: int) -> list[tuple[int, int]]:
    """The first step of each block of a cluster and the one past its last."""
    return [(steps * rank // split, steps * (rank + 1) // split) for rank in range(split)]


def ring_bytes(launch: Launch) -> tuple[int, int]:
    """Bytes of all stages, and with their barriers, as tiles.cuh lays them out."""
    args = tile_fields(launch)
    stage = tokens_of(launch) * 128 + (args["tile"] + (args["wider"] > 0)) * 1024
    return launch.stages * stage, launch.stages * (stage + 16)


def name_of(launch: Launch) -> str:
    return launch.entry.split("_float16_")[0].split("_bfloat16_")[0]


def held(launch: Launch) -> int:
    """Stages that a warp has waited for, the last of them included, before it gives back the first."""
    tokens = tokens_of(launch)
    return 1 + (tokens <= 16) if name_of(launch) == "bulk_mma" else 2 + (tokens != 64)


def check_tile_launch(target: Target, p: Problem, launch: Launch) -> None:
    """What a kernel of tiles.cuh takes for granted."""
    what = target, p, launch
    tokens, args = tokens_of(launch), tile_fields(launch)
    units, steps = kernels.units_steps(p.n, p.k)
    assert launch.box == tokens and launch.grid[1:] == (1, 1), what
    assert launch.block == (384 if tokens > 128 else 320), what
    assert 1 <= args["tile"] <= args["tile"] + (args["wider"] > 0) <= kernels.TILE_MAX_UNITS == 8, what
    tiles, rest = divmod(units - args["wider"], args["tile"])
    assert rest == 0 and args["wider"] < tiles, what
    assert launch.split in (1, 2, 4, 8), what
    assert all(a < b for a, b in parts_of_k(steps, launch.split)), what
    # The ways take the stages in turn; eight warps are enough for a tile, and for parts of it that are a cluster's.
    name, ways = name_of(launch), args["ways"]
    warp_units = kernels._warp_units(name, kernels.WEIGHTS[p.weight], tokens)
    most, own = args["tile"] + (args["wider"] > 0), 8 // ways * warp_units // launch.split
    assert ways in kernels._WAYS[name] and 8 // ways * warp_units >= max(most, launch.split), what
    assert own in (1, 2, 4, 8) and own * launch.split == 8 // ways * warp_units, what
    assert launch.stages % ways == 0, what
    assert held(launch) * ways <= launch.stages <= kernels.TILE_MAX_STAGES == 16, what
    # Shared memory: stages on 1 KiB, barriers, then the sums or in their place.
    stages, ring = ring_bytes(launch)
    assert stages // launch.stages % 1024 == 0 and stages < ring <= launch.smem_bytes <= target.smem_bytes, what
    assert args["sums"] % 16 == 0 and args["sums"] in (0, ring), what
    several = launch.grid[0] < tile_count(p, launch) * launch.split
    if launch.split * ways > 1:
        sums = launch.split * ways * own * (tokens // 8) * 32 * 16
        assert sums == tokens * 8 * warp_units * 16 * 4 and args["sums"] + sums <= launch.smem_bytes, what
        assert args["sums"] or not several, what  # a next tile is copied while the sums of one are added up
        # Lanes of the warps that copy may still look at the barriers, if no cluster waits for them.
        assert args["sums"] or launch.split > 1 or sums <= stages, what
    else:
        assert warp_units == 1 and not args["sums"], what
    assert bool(args["early"]) <= (launch.grid[0] % target.sms == 0), what
    # A box of x is whole, and its map is the last of the block.
    assert 8 <= launch.box <= 256 and launch.box * 128 % 1024 == 0, what
    tail = p.m, p.n, p.k, steps, 0, units, 0, launch.split, launch.stages, 0, *launch.fields
    assert len(kernels.TILE_ARGS.pack(*range(7), *tail, b"")) == kernels.TILE_ARGS.size, what


@pytest.mark.parametrize("arch", [name for name, arch in ARCHS.items() if arch.bulk])
def test_launches_of_tiles_are_what_the_kernels_take(arch: str) -> None:
    count = 0
    for x_dtype, target in itertools.product(("bfloat16", "float16"), targets(arch)):
        for p in problems(x_dtype):
            row = pick(target, p)
            if row.args is not kernels.TILE_ARGS:
                continue
            launch = row.plan(target, p)
            tokens = tokens_of(launch)
            check_tile_launch(target, p, launch)
            # As many as registers allow, and shared memory: a multiprocessor has as much as one block may have, and
            # 1 KiB that the system keeps for each block.
            blocks = kernels._TILES[name_of(launch)][tokens]
            fitting = min(blocks, (target.smem_bytes + KIB) // (launch.smem_bytes + KIB))
            assert fitting >= 1
            if launch.split == 1:  # blocks that take tile after tile run at once
                assert launch.grid[0] <= target.sms * fitting, (target, p, launch)
            if tile_fields(launch)["early"]:  # all blocks find room before the first of the next kernel
                assert launch.grid[0] <= target.sms * fitting, (target, p, launch)
            assert launch.grid[0] <= tile_count(p, launch) * launch.split, (target, p, launch)  # no block is idle
            count += 1
    assert count > 1000


def test_tiles_cover_every_output_once() -> None:
    """A model of the kernels' loops: which block takes which tile, and which steps of it."""
    seen, ways = set(), set()
    for target, p, launch in tile_problems():
        check_tile_launch(target, p, launch)
        what = target, p, launch
        tokens, split, grid = tokens_of(launch), launch.split, launch.grid[0]
        units, _ = kernels.units_steps(p.n, p.k)
        count = tile_count(p, launch)
        # for (index = blockIdx.x / split; index < count; index += gridDim.x)
        blocks = np.arange(grid)
        if split > 1:
            assert grid == count * split, what  # each block has one tile
            np.testing.assert_array_equal(np.bincount(blocks // split), np.full(count, split))
            turns = 1
        else:
            taken = np.sort(np.concatenate([np.arange(first, count, grid) for first in range(min(grid, count))]))
            np.testing.assert_array_equal(taken, np.arange(count))
            assert grid <= count, what
            turns = -(-count // grid)
        # The tiles are a partition of units by groups of tokens.
        token, unit, width = tile_at(p, launch, np.arange(count))
        assert (token % tokens == 0).all() and token.max() < p.m <= token.max() + tokens, what
        assert width.min() >= 1 and width.max() <= 8 and (unit + width).max() == units and unit.min() == 0, what
        groups = -(-p.m // tokens)
        starts = np.zeros((groups, units + 1), np.int64)
        np.add.at(starts, (token // tokens, unit), 1)
        np.add.at(starts, (token // tokens, unit + width), -1)
        assert (np.cumsum(starts, axis=1)[:, :units] == 1).all(), what
        seen.add((name_of(launch), tokens, split, turns > 1))
        ways.add((name_of(launch), tokens, tile_fields(launch)["ways"]))
    shared = {(1, True), (1, False), (2, False), (4, False), (8, False)}
    shapes = [(name, tokens) for name, some in kernels._TILES.items() for tokens in some]
    assert seen == {(*shape, *some) for shape in shapes for some in shared}
    assert ways == {(name, tokens, some) for name, tokens in shapes for some in WAYS[name, tokens]}


# A ring as its users see it: barriers that know one bit of their phase, stages that hold the number of a step.


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.phase = 0

    def arrive(self) -> None:
        self.pending -= 1
        assert self.pending >= 0
        if not self.pending:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def passes(self, parity: int) -> bool:
        """mbarrier.try_wait.parity: the phase of that parity is done, as far as one bit tells."""
        return self.phase % 2 != parity


class RingModel:
    """tiles.cuh: a block's warps over some tiles. A generator for each, which yields what it waits for."""

    def __init__(self, stages: int, ways: int, steps: int, tiles: int, kind: str) -> None:
        self.stages, self.ways, self.steps, self.tiles, self.kind = stages, ways, steps, tiles, kind
        self.warps = min(2, 8 // ways)  # of a way; they do the same
        self.full = [Barrier(2) for _ in range(stages)]
        self.empty = [Barrier(self.warps) for _ in range(stages)]
        self.holds = {part: [-1] * stages for part in ("codes", "x")}
        self.taken = [0] * (steps * tiles)

    def advance(self, at: tuple[int, int], by: int = 1) -> tuple[int, int]:
        slot, parity = at[0] + by, at[1]
        return (slot - self.stages, parity ^ 1) if slot >= self.stages else (slot, parity)

    def copies(self, part: str) -> Iterator[tuple[Barrier, int]]:
        at = 0, 0
        for step in range(self.steps * self.tiles):
            yield self.empty[at[0]], at[1] ^ 1
            self.holds[part][at[0]] = step
            self.full[at[0]].arrive()
            at = self.advance(at)

    def reads(self, part: str, at: tuple[int, int], step: int) -> None:
        assert self.holds[part][at[0]] == step, (part, at, step, self.holds)

    def gives_back(self, at: tuple[int, int], step: int) -> None:
        self.reads("x", at, step)
        self.taken[step] += 1
        self.empty[at[0]].arrive()

    def multiplies(self, way: int) -> Iterator[tuple[Barrier, int]]:
        at, step, first = (way, 0), way, 0  # `step` of the tile whose first is `first`
        for _ in range(self.tiles):
            at, step = yield from getattr(self, self.kind)(at, step, first)
            step, first = step - self.steps, first + self.steps

    # Product::add of bulk_mma.cu (of 8 and 16 tokens, and of more), and of wgmma.cu (of 64 tokens, and of others).
    def ahead(self, at: Any, step: int, first: int) -> Any:
        if step < self.steps:
            yield self.full[at[0]], at[1]
            self.reads("codes", at, first + step)
        while step < self.steps:
            now, at = at, self.advance(at, self.ways)
            if step + self.ways < self.steps:
                yield self.full[at[0]], at[1]
                self.reads("codes", at, first + step + self.ways)
            self.gives_back(now, first + step)
            step += self.ways
        return at, step

    def plain(self, at: Any, step: int, first: int) -> Any:
        while step < self.steps:
            yield self.full[at[0]], at[1]
            self.reads("codes", at, first + step)
            self.gives_back(at, first + step)
            at, step = self.advance(at, self.ways), step + self.ways
        return at, step

    def wgmma(self, at: Any, step: int, first: int, tight: bool = False) -> Any:
        if step >= self.steps:
            return at, step
        yield self.full[at[0]], at[1]
        self.reads("codes", at, first + step)
        ahead = self.advance(at, self.ways)
        if step + self.ways < self.steps:
            yield self.full[ahead[0]], ahead[1]
            self.reads("codes", ahead, first + step + self.ways)
        while step < self.steps:
            ahead, more = self.advance(ahead, self.ways), step + 2 * self.ways < self.steps
            for late in (False, True):
                if late:
                    self.gives_back(at, first + step)
                if more and tight == late:
                    yield self.full[ahead[0]], ahead[1]
                    self.reads("codes", ahead, first + step + 2 * self.ways)
            at, step = self.advance(at, self.ways), step + self.ways
        return at, step

    def tight(self, at: Any, step: int, first: int) -> Any:
        return self.wgmma(at, step, first, tight=True)

    def run(self, order: str) -> None:
        """Until all are done; `order`: who goes first whenever several can."""
        users = [self.copies("codes"), self.copies("x")]
        users += [self.multiplies(way) for way in range(self.ways) for _ in range(self.warps)]
        users = users[::-1] if order == "last first" else users
        users = users[2:] + users[:2] if order == "copies last" else users
        users = users[1:] + users[:1] if order == "one last" else users
        waits: list[Any] = [next(user, None) for user in users]
        while any(waits):
            ready = [i for i, wait in enumerate(waits) if wait and wait[0].passes(wait[1])]
            assert ready, "they wait for one another"
            for i in ready if order == "in turn" else ready[:1]:
                waits[i] = next(users[i], None)
        assert self.taken == [self.warps] * len(self.taken)


ORDERS = ("in turn", "first first", "last first", "copies last", "one last")


def kind_of(launch: Launch) -> str:
    tokens = tokens_of(launch)
    if name_of(launch) == "bulk_mma":
        return "ahead" if tokens <= 16 else "plain"
    return "tight" if tokens == 64 else "wgmma"


def test_no_ring_of_a_launch_stops_or_mixes_steps() -> None:
    """Each step is read by the warps of its way alone, before it is overwritten; nobody waits for ever."""
    rings = {(kind_of(launch), launch.stages, tile_fields(launch)["ways"]) for _, _, launch in tile_problems()}
    rings |= {
        (kind_of(launch), launch.stages, tile_fields(launch)["ways"])
        for arch in ARCHS
        for target in targets(arch)
        for p in problems("bfloat16")
        if (row := pick(target, p)).args is kernels.TILE_ARGS and (launch := row.plan(target, p))
    }
    rings |= {("plain", stages, 8) for stages in (8, 16)}  # of 4-bit codes and 8 tokens
    assert {kind for kind, _, _ in rings} == {"ahead", "plain", "wgmma", "tight"}
    for kind, stages, ways in sorted(rings):
        some = {1, 2, ways - 1, ways, ways + 1, 2 * ways + 1, stages - 1, stages, stages + 1, 2 * stages + ways + 1}
        for steps, tiles, order in itertools.product(sorted(some - {0}), (1, 4), ORDERS):
            try:
                RingModel(stages, ways, steps, tiles, kind).run(order)
            except AssertionError as error:
                raise AssertionError(f"{kind} {stages=} {ways=} {steps=} {tiles=} {order}: {error}") from None


@pytest.mark.parametrize(
    ("kind", "stages", "ways", "held"),
    [("ahead", 8, 8, 2), ("ahead", 2, 2, 2), ("tight", 2, 2, 2), ("wgmma", 4, 2, 3), ("wgmma", 2, 1, 3)],
)
def test_the_model_of_a_ring_sees_one_that_stops(kind: str, stages: int, ways: int, held: int) -> None:
    for order in ORDERS:
        with pytest.raises(AssertionError, match="they wait for one another"):
            RingModel(stages, ways, 40, 1, kind).run(order)
        RingModel(held * ways, ways, 40, 2, kind).run(order)
    RingModel(stages, ways, stages, 1, kind).run("in turn")  # as long as no stage is used again


def test_the_model_of_a_ring_sees_a_stage_that_is_taken_too_early() -> None:
    class Hasty(RingModel):
        """Gives a stage back before it has read it."""

        def plain(self, at: Any, step: int, first: int) -> Any:
            passed = Barrier(1)
            passed.arrive()
            while step < self.steps:
                yield self.full[at[0]], at[1]
                self.empty[at[0]].arrive()
                yield passed, 0
                self.reads("x", at, first + step)
                at, step = self.advance(at, self.ways), step + self.ways
            return at, step

    with pytest.raises(AssertionError, match=r"'x', \("):
        Hasty(6, 2, 40, 1, "plain").run("first first")


@pytest.mark.parametrize(("warp_units", "ways", "split"), [
    (units, ways, split)
    for units, some in ((2, kernels._WAYS["bulk_mma"]), (1, kernels._WAYS["wgmma"]), (8, (8,)))
    for ways, split in itertools.product(some, (1, 2, 4, 8))
    if split <= 8 // ways * units and split * ways > 1
])  # fmt: skip
def test_sums_of_all_parts_meet(warp_units: int, ways: int, split: int) -> None:
    """A model of the end of a tile: where each warp's sums go, and what each adds up, part after part of k."""
    token_tiles = 1 if warp_units == 8 else 4
    groups = 8 // ways
    own = groups * warp_units // split
    memory: list[dict[int, tuple[int, int, int]]] = [{} for _ in range(split)]  # of each block: part, unit, tokens
    for rank, warp, u, t in itertools.product(range(split), range(8), range(warp_units), range(token_tiles)):
        way, unit = warp // groups, warp % groups * warp_units
        to = ((rank * ways + way) * own + (unit + u) % own) * token_tiles + t
        there = memory[(unit + u) // own]
        assert to not in there
        there[to] = rank * ways + way, unit + u, t
    done = []
    for rank, warp in itertools.product(range(split), range(8)):
        for t in range(warp // own, token_tiles, 8 // own):
            parts = [
                memory[rank][part * own * token_tiles + warp % own * token_tiles + t] for part in range(split * ways)
            ]
            assert [part for part, _, _ in parts] == list(range(split * ways))
            assert {(unit, tokens) for _, unit, tokens in parts} == {(rank * own + warp % own, t)}
            done.append((rank * own + warp % own, t))
    assert sorted(done) == list(itertools.product(range(groups * warp_units), range(token_tiles)))
    size = split * ways * own * token_tiles
    assert all(set(there) == set(range(size)) for there in memory) and size == 8 * warp_units * token_tiles


def test_groups_of_a_band_come_first() -> None:
    """Neighbouring blocks read the same codes: up to four groups of tokens before the next tile along n."""
    p = Problem("FP8A16", (1, 64), "float16", "float16", 6 * 32, 256, 64)
    launch = kernels.tile_launch("wgmma", Target("sm_90a", 132, 227 * KIB, True), p, 32, 2)
    token, unit, _ = tile_at(p, launch, np.arange(12))
    assert list(token // 32) == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 4, 5]
    assert list(unit) == [0, 0, 0, 0, 8, 8, 8, 8, 0, 0, 8, 8]


# --- the layout of the codes --------------------------------------------------------------------
LAYOUTS = [
    (n, k, panels)
    for n, k in [(1, 1), (15, 63), (16, 64), (17, 65), (128, 256), (129, 100), (300, 1000)]
    for panels in sorted({1, 2, 3, -(-n // 128), -(-n // 16)})
    if panels <= -(-n // 16)
]


@pytest.mark.parametrize(("n", "k", "panels"), LAYOUTS)
def test_packing_is_a_permutation_with_an_inverse(rng: np.random.Generator, n: int, k: int, panels: int) -> None:
    units, steps = kernels.units_steps(n, k)
    assert (units, steps) == (-(-n // 16), -(-k // 64))
    codes = rng.integers(1, 256, (n, k), dtype=np.uint8)
    packed = kernels.pack(codes, panels)
    assert packed.dtype == np.uint8 and packed.shape == (units * steps * 1024,)
    np.testing.assert_array_equal(kernels.unpack(packed, n, k, panels), codes)
    # Each code once, zeros past n and k.
    want = np.bincount(codes.ravel(), minlength=256)
    want[0] = packed.size - n * k
    np.testing.assert_array_equal(np.bincount(packed, minlength=256), want)
    # A KiB holds a tile: one unit of 16 channels, one step of 64 along k; all tiles are there.
    unit = np.broadcast_to(np.arange(n)[:, None] // 16 + 1, (n, k)).astype(np.uint8)
    step = np.broadcast_to(np.arange(k)[None] // 64 + 1, (n, k)).astype(np.uint8)
    seen = set()
    for parts in zip(
        kernels.pack(unit, panels).reshape(-1, 1024),
        kernels.pack(step, panels).reshape(-1, 1024),
        strict=True,
    ):
        (at,) = {(int(u), int(s)) for u, s in zip(*parts, strict=True) if u or s}
        seen.add(at)
    assert seen == set(itertools.product(range(1, units + 1), range(1, steps + 1)))


def test_panels_are_no_wider_than_a_block_can_serve() -> None:
    for _, many, few in LIMITS.values():
        for n in (*range(1, 300), *SIZES):
            for k, sms in itertools.product((1, 64, 1024, 14_336), (many, few)):
                panels, split = kernels.panels_split(n, k, sms)
                units = kernels.units_steps(n, k)[0]
                assert 1 <= panels <= units <= panels * kernels.TILE_MAX_UNITS
                assert split in (1, 2, 4, 8)


def copied_codes(
    packed: np.ndarray, panels: int, p: Problem, first_unit: int, units: int, first_step: int, steps: int
) -> Iterator[tuple[np.ndarray, int]]:
    """A model of the warp that copies the codes of a tile: for each step what lies in the ring, and the bytes that its
    barrier was told of. What no copy wrote is -1; what two wrote fails."""
    all_units, all_steps = kernels.units_steps(p.n, p.k)
    a_panel, a_wider = divmod(all_units, panels)
    copies = []  # of each lane: units, where the first step lies, where it goes, and how far the next step is
    for lane in range(32):
        mine, panel_unit, within, width = 0, 0, 0, 1
        i, unit, left = 0, first_unit, units
        while left > 0:
            narrow = a_wider * (a_panel + 1)
            wide = a_panel + (unit < narrow)
            passed = (unit if unit < narrow else unit - narrow) % wide
            some = min(left, wide - passed)
            if i == lane:
                mine, panel_unit, within, width = some, unit - passed, passed, wide
            unit, left, i = unit + some, left - some, i + 1
        assert i <= 32  # there is a lane for each part
        if mine:
            start = (panel_unit * all_steps + first_step * width + within) * 1024
            copies.append((mine * 1024, start, (panel_unit + within - first_unit) * 1024, width * 1024))
    for step in range(steps):
        there = np.full(kernels.TILE_MAX_UNITS * 1024, -1, np.int16)
        for size, start, to, pitch in copies:
            at = start + step * pitch
            assert 0 <= to and to + size <= units * 1024 and at + size <= packed.size
            assert (there[to : to + size] == -1).all()
            there[to : to + size] = packed[at : at + size]
        yield there, units * 1024


@pytest.mark.parametrize("k", [8, 64, 72, 192, 520])
@pytest.mark.parametrize("n", [1, 16, 17, 100, 129, 300, 1000, 2100])
def test_copies_bring_a_tiles_codes(rng: np.random.Generator, n: int, k: int) -> None:
    """Whatever panels the weight was packed in, and whatever tiles a launch has: each step's place in the ring holds
    the tile's units, all bytes that the barrier waits for."""
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    units, steps = kernels.units_steps(n, k)
    narrow = -(-units // kernels.TILE_MAX_UNITS)
    plain = kernels.pack(codes, units).reshape(units, steps, 1024)  # a panel for each unit
    target, p = Target("sm_90a", 132, 227 * KIB, True), Problem("FP8A16", (1, k), "bfloat16", "bfloat16", 1, n, k)
    counts = sorted({narrow, kernels.panels_split(n, k, 132)[0], (narrow + units) // 2, min(units, narrow + 1), units})
    for panels, tiles in itertools.product(counts, counts):
        packed = kernels.pack(codes, panels)
        for split in (s for s in (1, 2, 8) if s <= steps):
            launch = kernels.tile_launch("bulk_mma", target, p, 8, tiles, split)
            some = sorted({0, tiles // 2, tiles - 1, tile_fields(launch)["wider"] % tiles})
            for (first, past), index in itertools.product(parts_of_k(steps, split), some):
                _, unit, width = (int(v[0]) for v in tile_at(p, launch, np.array([index])))
                seen = list(copied_codes(packed, panels, p, unit, width, first, past - first))
                assert len(seen) == past - first
                for step, (there, told) in enumerate(seen, first):
                    assert told == width * 1024 == np.count_nonzero(there >= 0), (panels, tiles, split, index)
                    want = plain[unit : unit + width, step].ravel()
                    np.testing.assert_array_equal(there[:told], want, f"{panels} {tiles} {split} {index}")


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 65), (129, 100), (300, 1000), (5000, 4096)])
def test_the_device_packs_as_the_table_says(rng: np.random.Generator, n: int, k: int) -> None:
    codes = rng.integers(0, 0x7F, (n, k), dtype=np.uint8)
    q = cufp8.QuantizedTensor(
        codes,
        np.ones((n, 1), np.float32),
        dtype="float8_e4m3fn",
        scale_dtype="float32",
        shape=(n, k),
        block=(1, k),
    )
    layer = cufp8.Linear.from_quantized(q, device="cuda")
    packed = kernels.pack(codes, layer._panels)
    np.testing.assert_array_equal(layer._codes.get().ravel(), packed)
    np.testing.assert_array_equal(layer.weight.codes.get(), codes)


@pytest.mark.parametrize(
    "k", [1, 8, 127, 128, 129, 1024, 1025, 4096, 8192, 14_336, 16_384, 28_672, 32_768, 65_536, 2**24]
)
@pytest.mark.parametrize("m", [0, 1, 300_000])
def test_every_value_of_a_row_of_activations_has_a_thread(m: int, k: int) -> None:
    for whole in (True, False):
        launch = kernels.row_launch("quantize_bfloat16_token_e4m3fn", m, k, whole)
        x, y, z = launch.grid
        assert x == max(m, 1) and z == 1 and 1 <= y <= GRID_YZ
        most = kernels.ROW_THREADS if whole else kernels.SHARING_THREADS
        assert launch.block % 32 == 0 and 32 <= launch.block <= most
        held = 32 * launch.block * y  # by the threads' two units of 16 values, in whole groups of 128
        assert held % 128 == 0
        assert held >= k or (whole and k > kernels.row_most(2))
        assert held - k < 1024 * y or not whole  # no warp is idle
    # A block of a float32 row has half as many threads at most, by its launch bounds.
    assert kernels.row_threads(kernels.row_most(4)) == kernels.ROW_THREADS // 2
    assert kernels.row_threads(kernels.row_most(2)) == kernels.ROW_THREADS
