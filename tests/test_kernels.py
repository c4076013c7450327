"""The tables of kernels: a row for each problem, a problem for each row, launches within limits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import cufp8
from cufp8 import kernels
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, KERNELS, Problem, Target, pick

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
TOKENS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 300_000, 5_000_000)
GRID_X, GRID_YZ = 2**31 - 1, 65_535  # CUDA's limits, from compute capability 3.0 on


def targets(arch: str) -> list[Target]:
    smem_bytes, many, few = LIMITS[arch]
    return [Target(arch, sms, smem_bytes, ARCHS[arch].proven) for sms in (many, few)]


@functools.cache
def problems(x_dtype: str) -> list[Problem]:
    return [
        Problem("FP8A16", (1, k), x_dtype, out, m, n, k, aligned16=aligned, captured=captured)
        for m, n, k in itertools.product(TOKENS, SIZES, SIZES)
        if n * k < 2**37
        for out in ({x_dtype, "float32"} if (m, n, k) == (8, 16, 33) else {x_dtype})
        for aligned in ((True, False) if k * FLOATS[x_dtype].itemsize % 16 == 0 else (False,))
        for captured in (True, False)
    ]


SERVING = [row for row in KERNELS if row.linear]
TENSOR = {"mma_sync", "bulk_mma"}  # rows on tensor cores
CASES = list(itertools.product(ARCHS, FLOATS))


def test_every_arch_has_a_row_with_its_own_name() -> None:
    assert set(ARCHS) == set(LIMITS)
    for name, arch in ARCHS.items():
        assert arch.name == name
        digits = re.fullmatch(r"sm_(\d+)a?", name).group(1)
        assert arch.cc == (int(digits[:-1]), int(digits[-1]))
        assert arch.bf16_mma == (name != "sm_75")
        assert arch.pdl == arch.bulk == (int(digits) >= 90)
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
    for target in targets(arch):
        for p in problems(x_dtype):
            row = pick(target, p)
            if row.plan is None:
                continue
            launch = row.plan(target, p)
            tokens = int(launch.entry.rsplit("_", 1)[1])
            most = {  # units of 16 channels that one block, or cluster, can serve
                "gemv": 1,
                "mma_sync": kernels._MMA_SHAPES.get(tokens),
                "bulk_mma": kernels.BULK_MAX_UNITS,
            }[row.name]
            x, y, z = launch.grid
            x //= launch.split
            units = kernels.units_steps(p.n, p.k)[0]
            assert x <= units <= x * most, (p, launch)
            assert p.m <= y * z * tokens, (p, launch)
            assert y * (z - 1) * tokens < p.m, (p, launch)


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
            assert have <= entries, f"never launched on {arch}: {sorted(have - entries)}"


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
        names = {pick(target, p).name for p in problems(x_dtype)}
        assert bool(names & TENSOR) == fits
        assert ("bulk_mma" in names) == (fits and ARCHS[arch].bulk)


@pytest.mark.parametrize(("arch", "x_dtype"), CASES)
def test_rows_get_only_what_they_can_do(arch: str, x_dtype: str) -> None:
    for target, p in itertools.product(targets(arch), problems(x_dtype)):
        name = pick(target, p).name
        if p.m == 1:
            assert name in ("gemv", "bulk_mma"), p
        if not p.aligned16 or p.k % kernels.STEP:
            assert name != "bulk_mma", p  # it copies x in pieces of 16 bytes, codes in steps of 64
        if x_dtype == "float32" or (x_dtype, arch) == ("bfloat16", "sm_75"):
            assert name not in TENSOR, p


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
                assert 1 <= panels <= units <= panels * kernels.BULK_MAX_UNITS
                assert split in (1, 2, 4, 8)


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
