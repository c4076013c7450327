"""Linear with scales for blocks of a weight: the layout and the arithmetic in its bits, what serves which problem, and
(marked gpu) every row of KERNELS on the device against float64.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import reference_blocks as blocks
from test_kernels import targets
from test_linear import Cases, assert_same_bits, choosing, floats, named

import cufp8
from cufp8 import kernels, linear, runtime
from cufp8.formats import FLOATS
from cufp8.kernels import ARCHS, KERNELS, WEIGHTS, Kernel, Problem, Target, Weight

WEIGHTS_CUH = (Path(__file__).parent.parent / "kernels_cu" / "weights.cuh").read_text()
TILED = [w for w in WEIGHTS.values() if w.block]  # whose scales stand in tiles
# How weights are made here -> dtype, scale_dtype, block. "wide": with e8m0 scales that do not fold into bfloat16.
KINDS = {
    "NVFP4": ("float4_e2m1fn", "float8_e4m3fn", (1, 16)),
    "MXFP4": ("float4_e2m1fn", "float8_e8m0fnu", (1, 32)),
    "MXFP4 wide": ("float4_e2m1fn", "float8_e8m0fnu", (1, 32)),
    "MXFP8": ("float8_e4m3fn", "float8_e8m0fnu", (1, 32)),
    "MXFP8 wide": ("float8_e4m3fn", "float8_e8m0fnu", (1, 32)),
    "blocks": ("float8_e4m3fn", "float32", (128, 128)),
    "e8m0 blocks": ("float8_e4m3fn", "float8_e8m0fnu", (128, 128)),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def scale_values(scale: np.ndarray, scale_dtype: str) -> np.ndarray:
    """What scales stand for, in float64."""
    if scale_dtype == "float32":
        return scale.astype(np.float64)
    if scale_dtype == "float8_e4m3fn":
        return reference.VALUES[scale]
    return np.ldexp(1.0, scale.astype(np.int64) - 127)


def quantized(
    kind: str, codes: np.ndarray, scale: np.ndarray, global_scale: np.ndarray | None = None
) -> tuple[cufp8.QuantizedTensor, np.ndarray]:
    """A weight of codes [n, k], one an element, and its values in float64."""
    dtype, scale_dtype, block = KINDS[kind]
    n, k = codes.shape
    fp4 = dtype == "float4_e2m1fn"
    if kind == "NVFP4" and global_scale is None:
        global_scale = np.ones(1, np.float32)
    q = cufp8.QuantizedTensor(
        blocks.pack(codes) if fp4 else codes, scale, dtype=dtype, scale_dtype=scale_dtype, shape=(n, k), block=block,
        global_scale=global_scale,
    )  # fmt: skip
    wide = scale_values(scale, scale_dtype)[np.arange(n)[:, None] // block[0], np.arange(k) // block[1]]
    values = (blocks.FP4_VALUES if fp4 else reference.VALUES)[codes] * wide
    return q, values if global_scale is None else values * global_scale.astype(np.float64)[:, None]


def drawn(
    rng: np.random.Generator, kind: str, n: int, k: int, row_scales: bool = False
) -> tuple[cufp8.QuantizedTensor, np.ndarray]:
    """Random codes, and scales that differ from block to block; a global scale for each row, or one for all."""
    dtype, scale_dtype, (rows, columns) = KINDS[kind]
    codes = rng.integers(0, 16 if dtype == "float4_e2m1fn" else 256, (n, k), np.uint8)
    if dtype == "float8_e4m3fn":
        codes[(codes & 0x7F) == 0x7F] ^= 1
    shape = -(-n // rows), -(-k // columns)
    if scale_dtype == "float32":
        scale = np.exp2(rng.uniform(-12, -4, shape)).astype(np.float32)
    elif scale_dtype == "float8_e4m3fn":
        scale = rng.integers(0, 0x7F, shape, np.uint8)
        scale[rng.random(shape) < 0.05] = 0x80  # -0
    else:
        scale = rng.integers(115, 124, shape, np.uint8)
        if kind.endswith("wide"):
            scale.reshape(-1)[rng.integers(scale.size)] = 135  # of a block that has a code above 0
            codes[(codes & 7) == 0] += 1
    g = np.exp2(rng.uniform(-14, -8, n if row_scales else 1)).astype(np.float32) if kind == "NVFP4" else None
    return quantized(kind, codes, scale, g)


def row_of(row: Kernel) -> str:
    """A row of KERNELS by its source: its name without the weight's."""
    return row.source.removesuffix(".cu")


# --- on the CPU: the layout ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=lambda w: w.name)
@pytest.mark.parametrize("n, k", [(1, 1), (16, 64), (17, 65), (40, 31), (72, 200), (8, 160)], ids=str)
def test_layout_and_back(rng: np.random.Generator, weight: Weight, n: int, k: int) -> None:
    codes = rng.integers(0, 1 << weight.bits, (n, k), np.uint8)
    scale = rng.integers(0, 256, (n, -(-k // weight.block)), np.uint8) if weight.block else None
    units, steps = kernels.units_steps(n, k)
    for panels in range(1, units + 1):
        packed = kernels.pack(codes, panels, weight, scale)
        assert packed.shape == (units * steps * weight.tile_bytes,) and packed.dtype == np.uint8
        back = kernels.unpack(packed, n, k, panels, weight)
        if scale is not None:
            np.testing.assert_array_equal(back[1], scale)
            back = back[0]
        np.testing.assert_array_equal(back, codes)


def lane_word(packed: np.ndarray, weight: Weight, lane: int, j: int) -> int:
    """Word j of a lane's first piece of a weight that is one tile."""
    return int(packed[: weight.tile_bytes][lane * 16 + 4 * j :][:4].view(np.uint32)[0])


@pytest.mark.parametrize("weight", TILED, ids=lambda w: w.name)
def test_a_lane_finds_its_scales(rng: np.random.Generator, weight: Weight) -> None:
    scale = rng.integers(1, 0x7F, (16, weight.scales), np.uint8)
    packed = kernels.pack(np.zeros((16, 64), np.uint8), 1, weight, scale)
    kept = kernels.NVFP4_SCALES[scale] if weight.name == "nvfp4" else scale
    words = packed[weight.code_bytes : weight.tile_bytes].view(np.uint32).reshape(8, -1)
    assert "SCALE_TURN = MX ? 7 : 4;" in WEIGHTS_CUH and "turn_right(four, 8)" in WEIGHTS_CUH
    mask, place = (0x7F807F80, 7) if weight.folds else (0x0FF00FF0, 4)
    assert f"turned & 0x{mask:08x}u" in WEIGHTS_CUH
    for row, block in itertools.product(range(8), range(weight.scales)):
        word = int(words[row, block // 2])
        scales = ((word >> 8 | word << 24) if block % 2 else word) & mask
        assert (scales >> place & 0xFF, scales >> place + 16) == (kept[row, block], kept[row + 8, block])


# --- on the CPU: the arithmetic of weights.cuh, in NumPy ----------------------------------------------------


def e2m1_pair(word: int, i: int) -> int:
    """As the function of that name."""
    turned = (word << 12 | word >> 20) & 0xFFFFFFFF
    if i < 3:
        return (word, word << 6, turned)[i] & 0x81C081C0
    return (word << 2 & 0x80C080C0) | (word >> 6 & 0x01000100)


def half(bits: int, dtype: str) -> float:
    """A 16-bit float by its bits."""
    return float(np.array(bits & 0xFFFF, np.uint16).view(FLOATS[dtype]).astype(np.float64))


def test_pairs_are_those_of_the_source() -> None:
    for text in (
        "0x81c081c0u",
        "word << 6 &",
        "turn_left(word, 12)",
        "(word << 2 & 0x80c080c0u) | (word >> 6 & 0x01000100u)",
    ):
        assert text in WEIGHTS_CUH


@pytest.mark.parametrize("weight", [w for w in TILED if w.bits == 4], ids=lambda w: w.name)
def test_a_lane_finds_its_e2m1_codes(rng: np.random.Generator, weight: Weight) -> None:
    codes = rng.integers(0, 16, (16, 64), np.uint8)
    packed = kernels.pack(codes, 1, weight, np.zeros((16, weight.scales), np.uint8))
    for lane, j, i, e in itertools.product(range(32), range(4), range(4), range(2)):
        pair = e2m1_pair(lane_word(packed, weight, lane, j), i) >> 16 * e
        channel, k = lane // 4 + 8 * (i % 2), 16 * j + 8 * (i // 2) + 2 * (lane % 4) + e
        value = blocks.FP4_VALUES[codes[channel, k]]
        assert half(pair, "bfloat16") * 2.0**126 == value
        assert half((pair & 0x1C0) * 7 + (pair & 0xFFFF), "float16") * 2.0**14 == value


def e2m1_bits(code: int) -> int:
    return (code & 8) << 12 | (code & 7) << 6


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_nvfp4_scales_fold_exactly(x_dtype: str) -> None:
    by, first, factor = {"bfloat16": (16, 0x75F0, 2.0**8), "float16": (128, 0x1780, 2.0**14)}[x_dtype]
    assert f"bits{' * 8' * (by == 128)} + 0x{first:04x}{first:04x}u" in WEIGHTS_CUH
    assert "same<X, F16> ? 16384.0f : 256.0f" in WEIGHTS_CUH
    assert len(set(kernels.NVFP4_SCALES.tolist())) == 256
    for scale, code in itertools.product((*range(0x7F), 0x80), range(16)):
        multiplier = int(kernels.NVFP4_SCALES[scale]) * by + first
        assert multiplier < 1 << 16
        bits = e2m1_bits(code)
        small = half(bits + (bits & 0x1C0) * 7 if x_dtype == "float16" else bits, x_dtype)
        product = np.float64(small * half(multiplier, x_dtype)).astype(FLOATS[x_dtype])
        exact = blocks.FP4_VALUES[code] * reference.VALUES[scale]
        assert float(product) * factor == exact and np.isfinite(product), (scale, code)


@pytest.mark.parametrize("weight", [w for w in TILED if w.folds], ids=lambda w: w.name)
def test_e8m0_scales_fold_exactly_within_the_limits(weight: Weight) -> None:
    first, table, values, least = {
        4: (0x3F00, [e2m1_bits(code) for code in range(16)], blocks.FP4_VALUES, 0),
        8: (0x3C00, [(code & 0x80) << 8 | (code & 0x7F) << 4 for code in range(256)], reference.VALUES, 3),
    }[weight.bits]
    assert f"0x{first:04x}{first:04x}u" in WEIGHTS_CUH

    def exact(scale: int) -> bool:
        multiplier = scale * 128 + first
        if multiplier >= 0x7F80:  # Inf, or more than the half has bits
            return False
        with np.errstate(under="ignore"):
            small = np.array(table, np.uint16).view(FLOATS["bfloat16"]).astype(np.float64)
            product = (small * half(multiplier, "bfloat16")).astype(FLOATS["bfloat16"]).astype(np.float64)
        finite = np.isfinite(values)
        return bool((product == values * np.ldexp(1.0, scale - 127))[finite].all())

    fold = [scale for scale in range(255) if exact(scale)]
    assert (fold[0], fold[-1]) == weight.folds == (least, fold[-1]) and len(fold) == fold[-1] - fold[0] + 1


def test_float32_of_kept_scales() -> None:
    """What gemv multiplies with, and what multiplies sums."""
    assert "__uint_as_float((byte + 943) << 20)" in WEIGHTS_CUH and "max(code << 23, 1u << 22)" in WEIGHTS_CUH
    kept = kernels.NVFP4_SCALES[:0x7F].astype(np.uint32)
    seen = np.where(kept >= 209, np.float32(0), ((kept + 943) << 20).view(np.float32))
    np.testing.assert_array_equal(seen, reference.VALUES[:0x7F])
    codes = np.arange(255, dtype=np.uint32)
    with np.errstate(under="ignore"):
        e8m0 = np.maximum(codes << 23, 1 << 22).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(e8m0.astype(np.float64), np.ldexp(1.0, codes.astype(np.int64) - 127))


@kinds
def test_wide_scales_are_found(rng: np.random.Generator, kind: str) -> None:
    for _ in range(5):
        q, _ = drawn(rng, kind, 5, 77)
        assert linear._scales_are_wide(q) == kind.endswith("wide")


@pytest.mark.parametrize("kind, scale, wide", [
    ("MXFP8", 2, True), ("MXFP8", 3, False), ("MXFP8", 134, False), ("MXFP8", 135, True), ("MXFP4", 0, False),
    ("MXFP4", 128, False), ("MXFP4", 129, True), ("MXFP8", 0, True), ("MXFP4", 254, True),
])  # fmt: skip
def test_where_scales_begin_to_be_wide(kind: str, scale: int, wide: bool) -> None:
    codes, scales = np.ones((3, 70), np.uint8), np.full((3, 3), 120, np.uint8)
    scales[1, 2] = scale
    assert linear._scales_are_wide(quantized(kind, codes, scales)[0]) == wide
    codes[1, 64:] = 0  # a block of zeros may have any scale
    codes[1, 65] = 8 if kind == "MXFP4" else 0x80
    assert not linear._scales_are_wide(quantized(kind, codes, scales)[0])


# --- on the CPU: what serves which problem ------------------------------------------------------------------

CHANNELS, LENGTHS = (1, 1000, 1856, 4096, 8448, 50_257), (8, 31, 144, 8192)
TOKENS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 300, 300_000)


def problems(weight: Weight, x_dtype: str) -> Iterator[Problem]:
    block = (128, 128) if weight.name == "fp8_block" else (1, weight.block)
    for m, n, k in itertools.product(TOKENS, CHANNELS, LENGTHS):
        for aligned16, invariant, wide in itertools.product(
            (True, False) if k * FLOATS[x_dtype].itemsize % 16 == 0 else (False,), (False, True), (False, True)
        ):
            if (not wide or weight.folds) and (not invariant or n == 4096):
                yield Problem(
                    "scheme", block, x_dtype, x_dtype, m, n, k, aligned16=aligned16, batch_invariant=invariant,
                    weight=weight.name, wide=wide,
                )  # fmt: skip


def stage_bytes(p: Problem, launch: kernels.Launch) -> int:
    """Of a kernel of tiles.cuh: x, then tiles, from 1 KiB to 1 KiB."""
    tile, wider = launch.fields[:2]
    units = tile + (wider > 0)
    return launch.box * 128 + -(-units * WEIGHTS[p.weight].tile_bytes // 1024) * 1024


@pytest.mark.parametrize("weight", [w for w in WEIGHTS.values() if w.name != "fp8"], ids=lambda w: w.name)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_problem_has_a_row_and_every_entry_a_problem(arch: str, weight: Weight) -> None:
    rows = [row for row in KERNELS if row.linear and row.weight == weight.name]
    seen: dict[str, set[str]] = {row.name: set() for row in rows}
    for x_dtype, target in itertools.product(FLOATS, targets(arch)):
        for p in problems(weight, x_dtype):
            row = kernels.pick(target, p)
            assert row in rows, p
            launch = row.plan(target, p)
            seen[row.name].add(launch.entry)
            assert launch.entry in row.entries(ARCHS[arch]), (p, launch)
            assert 0 <= launch.smem_bytes <= target.smem_bytes, (p, launch)
            sums = x_dtype in weight.scales_sums or p.wide
            if row_of(row) in ("bulk_mma", "wgmma"):
                assert launch.stages * (stage_bytes(p, launch) + 16) <= launch.smem_bytes, (p, launch)
                assert not (p.wide and x_dtype == "bfloat16") and p.aligned16
                _, _, ways, sums_at, _ = launch.fields
                warp_units = kernels._warp_units(row_of(row), weight, launch.box)
                assert launch.stages % ways == 0 and (warp_units < 8 or ways == 8), (p, launch)
                if ways * launch.split > 1:
                    assert sums_at + launch.box * 8 * warp_units * 64 <= launch.smem_bytes, (p, launch)
                assert launch.block == (384 if launch.box * (1 + sums) > 128 else 320), (p, launch)
            if row_of(row) == "wgmma":
                assert not (sums and weight.block), (p, launch)
            if row_of(row) == "async_mma":
                tokens, units = (int(part) for part in launch.entry.rsplit("_", 2)[1:])
                steps = kernels._ASYNC_SHAPES[weight.bits][tokens, units]
                x_bytes = steps * 160 if tokens == 1 else tokens * (steps * 128 + 16)
                own = steps * units * weight.own_bytes
                assert launch.block // 32 * (own + x_bytes) <= launch.smem_bytes, (p, launch)
                assert tokens < 16 or launch.block <= 32 * 12, (p, launch)
            assert ("wide" in launch.entry) == (p.wide and x_dtype == "bfloat16" and row_of(row) == "mma_sync"), p
    for row in rows:
        spare = {e for e in row.entries(ARCHS[arch]) if ARCHS[arch].wgmma and int(e.rsplit("_", 1)[1]) > 16}
        missing = set(row.entries(ARCHS[arch])) - seen[row.name]
        assert missing <= (spare if row_of(row) == "bulk_mma" else set()), f"never launched on {arch}: {missing}"


@kinds
def test_the_rows_of_a_layer(rng: np.random.Generator, kind: str) -> None:
    layer = cufp8.Linear.from_quantized(drawn(rng, kind, 40, 70)[0], device="cpu")
    name = {"NVFP4": "nvfp4", "MXFP4": "mxfp4", "MXFP8": "mxfp8"}.get(kind.removesuffix(" wide"), "fp8_block")
    assert linear._kind(layer.weight) is WEIGHTS[name]
    names = {row.name for row in layer._rows(layer.weight)}
    wgmma = {"fp8_block": ("bfloat16", "float16"), "nvfp4": ("bfloat16", "float16", "bfloat16_256", "float16_256")}
    some = (f"wgmma_{end}" for end in wgmma.get(name, ("bfloat16", "bfloat16_256")))
    assert names == {f"{row}_{name}" for row in ("gemv", "mma_sync", "async_mma", "bulk_mma", *some)}
    assert WEIGHTS[name].layout in kernels.ROWS


def test_async_mma_has_the_tables_numbers() -> None:
    text = (Path(__file__).parent.parent / "kernels_cu" / "async_mma.cu").read_text()
    assert "SUMS_WARPS = 12;" in text
    order = re.search(r"enum Format \{ (.*?) \}", WEIGHTS_CUH).group(1)
    assert order.lower().split(", ") == list(WEIGHTS)


# --- on the GPU ---------------------------------------------------------------------------------------------

SHAPES = ((1, 1), (8, 16), (72, 31), (96, 160), (1856, 144), (72, 2688), (8, 48))
MANY = (*range(1, 18), 33, 64, 65, 128, 200, 256, 300)


def on_gpu(q: cufp8.QuantizedTensor, bias: Any = None, **options: Any) -> cufp8.Linear:
    return cufp8.Linear.from_quantized(q, bias, device="cuda", **options)


def can(row: Kernel, target: Target, p: Problem) -> bool:
    """Whether the row can do a problem, though another may be faster."""
    arch = kernels.arch_of(target.arch)
    tensor = p.x_dtype in kernels._mma_dtypes(arch)
    tiles = tensor and kernels._tiles_serve(target, p)
    return {
        "gemv": True,
        "mma_sync": tensor,
        "async_mma": tensor and arch.bf16_mma and p.aligned16 and p.m <= 16 and not kernels._too_wide(p),
        "bulk_mma": tiles,
        "wgmma": tiles and arch.wgmma and kernels._wgmma_plan(target, p).entry in row.entries(arch),
    }[row_of(row)]


def by_every_row(layer: cufp8.Linear, x: Any, poison: Callable[..., Any], p: Problem | None = None) -> dict[str, Any]:
    """What each row that can makes of x, in poisoned memory, and what the layer makes by itself; p: if not of x."""
    found = {"picked": layer(x)}
    p = p or layer._problem(len(x), x.dtype.name, layer.shape[1] * x.itemsize % 16 == 0)
    for row in KERNELS:
        if row.linear and row.weight == layer._kind.name and can(row, layer._target, p):
            out = poison((len(x), layer.shape[0]), layer.out_dtype or x.dtype.name, "cupy")
            with choosing(layer, lambda target, p, row=row: row):
                layer(x, out=out)
            found[row.name] = out
    return found


def acc_of(x_dtype: str) -> float:
    return kernels.arch_of(runtime.target(0).arch).acc["cuda" if x_dtype == "float32" else "tensor"]


def exact(x: np.ndarray, values: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """x @ values.T + bias in float64, and the sum of magnitudes."""
    wide, offset = x.astype(np.float64), 0 if bias is None else bias.astype(np.float64)
    return wide @ values.T + offset, np.abs(wide) @ np.abs(values).T + np.abs(offset)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
@kinds
def test_every_row_against_float64(
    rng: np.random.Generator, poison: Callable[..., Any], kind: str, x_dtype: str
) -> None:
    import cupy

    with Cases() as cases:
        for i, (n, k) in enumerate(SHAPES):
            q, values = drawn(rng, kind, n, k, row_scales=bool(i % 2))
            x, bias = floats(rng, (MANY[-1], k), x_dtype), floats(rng, n, scale=0.01) if i % 2 else None
            layer, there, (ref, mag) = on_gpu(q, bias), cupy.asarray(x), exact(x, values, bias)
            for m in MANY:
                with cases("m", m, "n", n, "k", k):
                    for name, y in by_every_row(layer, there[:m], poison).items():
                        with named(name):
                            reference.assert_scaled_close(y, (ref[:m], mag[:m]), x_dtype, acc_of(x_dtype))


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("x_dtype", FLOATS)
@kinds
def test_small_problems(rng: np.random.Generator, poison: Callable[..., Any], kind: str, x_dtype: str) -> None:
    import cupy

    q, values = drawn(rng, kind, 150, 200)
    layer = on_gpu(q)
    assert_same_weight(layer.weight, q)
    for m in (1, 5, 16, 40, 130):
        x = floats(rng, (m, 200), x_dtype)
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            with named(f"m {m}, {name}"):
                reference.assert_scaled_close(y, exact(x, values), x_dtype, acc_of(x_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("sms", (1, 4, 8))
@pytest.mark.parametrize("x_dtype", ("bfloat16", "float16"))
@kinds
def test_launches_of_long_rows(
    rng: np.random.Generator, poison: Callable[..., Any], kind: str, x_dtype: str, sms: int
) -> None:
    """As many units for each multiprocessor as larger weights have: blocks of one unit and of two, tile after tile."""
    import cupy

    q, values = drawn(rng, kind, 150, 8200)
    layer = on_gpu(q)
    layer._target = dataclasses.replace(layer._target, sms=sms)
    for m in (1, 2, 8, 16):
        x = floats(rng, (m, 8200), x_dtype)
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            with named(f"m {m}, {name}"):
                reference.assert_scaled_close(y, exact(x, values), x_dtype, acc_of(x_dtype))


def every_pair(kind: str, scales: list[int]) -> tuple[cufp8.QuantizedTensor, np.ndarray, int]:
    """A weight with a row for each code and a block for each of the scales, its values, and a block's length."""
    dtype, scale_dtype, (_, size) = KINDS[kind]
    codes = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    q, values = quantized(
        kind,
        np.repeat(codes[:, None], size * len(scales), axis=1),
        np.tile(np.array(scales, np.uint8), (len(codes), 1)),
    )
    return q, values, size


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("kind, scales", [
    ("NVFP4", [*range(0x7F), 0x80]), ("MXFP4", list(range(129))), ("MXFP4", list(range(255))),
    ("MXFP8", list(range(3, 135))), ("MXFP8", list(range(255))),
], ids=["NVFP4", "MXFP4 folded", "MXFP4", "MXFP8 folded", "MXFP8"])  # fmt: skip
def test_every_code_with_every_scale(poison: Callable[..., Any], kind: str, scales: list[int], x_dtype: str) -> None:
    """Rows of x with one 1 pick single values: they come exactly, Inf where float32 ends."""
    import cupy

    q, values, size = every_pair(kind, scales)
    layer, k = on_gpu(q, out_dtype="float32"), values.shape[1]
    with np.errstate(over="ignore", under="ignore"):
        wanted = values.astype(np.float32)
    for shift in (0, size - 1):
        at = np.arange(shift, k, size)
        x = np.zeros((len(at), k), FLOATS[x_dtype])
        x[np.arange(len(at)), at] = 1
        there = cupy.asarray(x)
        for m in (1, 8, 16, len(at)):
            for name, y in by_every_row(layer, there[-m:], poison).items():
                np.testing.assert_array_equal(y.get(), wanted[:, at[-m:]].T, f"{name}, m {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_block_scales_at_the_ends(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    import cupy

    q, values = quantized(
        "e8m0 blocks", rng.integers(0, 0x7F, (300, 512), np.uint8),
        np.array([[0, 1, 2, 3], [126, 134, 135, 200], [127, 254, 0, 90]], np.uint8),
    )  # fmt: skip
    layer, x = on_gpu(q, out_dtype="float32"), np.zeros((40, 512), FLOATS[x_dtype])
    at = rng.integers(0, 512, 40)
    x[np.arange(40), at] = 1
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float32)[:, at].T
    for m in (1, 7, 16, 40):
        for name, y in by_every_row(layer, cupy.asarray(x[:m]), poison).items():
            np.testing.assert_array_equal(y.get(), wanted[:m], f"{name}, m {m}")


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_the_global_scale_comes_last(rng: np.random.Generator, poison: Callable[..., Any], x_dtype: str) -> None:
    """Sums beyond float16's range, brought back by a global scale; and global scales at the ends of float32."""
    import cupy

    n, k = 40, 640
    codes, scale = rng.integers(0, 8, (n, k), np.uint8), np.full((n, k // 16), 0x7E, np.uint8)
    for low, high in ((-20, -10), (-126, -120), (100, 127)):
        g = np.exp2(rng.uniform(low, high, n)).astype(np.float32)
        q, values = quantized("NVFP4", codes, scale, g)
        size = 1.0 if high < 100 else 2.0**-20
        x = np.abs(floats(rng, (33, k), x_dtype, scale=size))
        sums = x.astype(np.float64) @ (values / g.astype(np.float64)[:, None]).T
        assert high >= 100 or sums.min() > 65504
        layer = on_gpu(q, out_dtype="float16" if high < -5 else "float32")
        for m in (1, 8, 33):
            for name, y in by_every_row(layer, cupy.asarray(x[:m]), poison).items():
                with named(f"g 2^{low} to 2^{high}, {name}"), np.errstate(over="ignore"):
                    reference.assert_scaled_close(y, exact(x[:m], values), layer.out_dtype, acc_of(x_dtype))


@pytest.mark.gpu
@kinds
def test_nan_stays_in_its_row(rng: np.random.Generator, poison: Callable[..., Any], kind: str) -> None:
    import cupy

    q, _ = drawn(rng, kind, 70, 328)
    layer = on_gpu(q)
    for m in (3, 16, 80):
        clean = floats(rng, (m, 328), "bfloat16")
        x, bad = clean.copy(), np.arange(m) % 3 == 1
        x[bad, 327], x[bad, 5] = np.nan, np.inf
        pure = by_every_row(layer, cupy.asarray(clean), poison)
        for name, y in by_every_row(layer, cupy.asarray(x), poison).items():
            assert np.isnan(y.get()[bad].astype(np.float32)).all(), name
            assert_same_bits(y.get()[~bad], pure[name].get()[~bad], name)


def assert_same_weight(a: cufp8.QuantizedTensor, b: cufp8.QuantizedTensor) -> None:
    a, b = a.to("cpu"), b.to("cpu")
    assert (a.scheme, a.dtype, a.scale_dtype, a.shape, a.block) == (b.scheme, b.dtype, b.scale_dtype, b.shape, b.block)
    assert_same_bits(a.codes, b.codes, "codes")
    assert_same_bits(a.scale, b.scale, "scales")
    assert (a.global_scale is None) == (b.global_scale is None)
    if a.global_scale is not None:
        assert_same_bits(a.global_scale, b.global_scale, "global scales")


@pytest.mark.gpu
@kinds
def test_weights_come_back(rng: np.random.Generator, kind: str) -> None:
    for i, (n, k) in enumerate((*SHAPES, (200, 300), (17, 4097))):
        q, _ = drawn(rng, kind, n, k, row_scales=bool(i % 2))
        if kind == "NVFP4":
            q.scale.reshape(-1)[:] = np.resize(np.array([*range(0x7F), 0x80], np.uint8), q.scale.size)
        layer = on_gpu(q)
        assert_same_weight(layer.weight, q)
        assert_same_weight(layer.to("cpu").weight, q)
        packed = layer._codes.get()
        kind_, codes = layer._kind, blocks.unpack(q.codes, k) if layer._kind.bits == 4 else q.codes
        np.testing.assert_array_equal(
            packed, kernels.pack(codes, layer._panels, kind_, q.scale if kind_.block else None)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", blocks.SCHEMES)
def test_layers_of_floats(rng: np.random.Generator, scheme: str) -> None:
    import cupy

    w, bias = floats(rng, (72, 200), scale=0.05), floats(rng, 72)
    there, here = (cufp8.Linear(w, bias, scheme=scheme, device=device) for device in ("cuda", "cpu"))
    assert_same_weight(there.weight, here.weight)
    assert (there.scheme, there.nbytes) == (scheme, here.nbytes) and scheme in repr(there)
    moved = here.to("cuda")
    x = floats(rng, (9, 200), "float16")
    y = moved(cupy.asarray(x))
    assert_same_bits(y, there(cupy.asarray(x)))
    values = here.weight.dequantize("float64")
    reference.assert_scaled_close(y, exact(x, values, bias), "float16", acc_of("float16"))
    both = cufp8.fuse([there, cufp8.Linear(w[::-1] * 3, scheme=scheme, device="cuda")])
    assert both.shape == (144, 200)
    fused = both(cupy.asarray(x))
    values = np.concatenate([values, cufp8.quantize(w[::-1] * 3, scheme).dequantize("float64")])
    reference.assert_scaled_close(
        fused, exact(x, values, np.concatenate([bias, np.zeros(72)])), "float16", acc_of("float16")
    )


@pytest.mark.gpu
@kinds
def test_rows_do_not_depend_on_their_number(rng: np.random.Generator, kind: str) -> None:
    import cupy

    q, values = drawn(rng, kind, 200, 640)
    for x_dtype in FLOATS:
        layer, x = on_gpu(q, batch_invariant=True), floats(rng, (300, 640), x_dtype)
        there = cupy.asarray(x)
        whole = layer(there)
        reference.assert_scaled_close(whole, exact(x, values), x_dtype, acc_of(x_dtype))
        for m in (1, 2, 9, 33, 70, 129):
            assert_same_bits(layer(there[:m]), whole[:m], (x_dtype, m))


@pytest.mark.gpu
@kinds
def test_a_captured_chain(rng: np.random.Generator, kind: str) -> None:
    """Layers one after another, each started before the one before is done, in a graph that is run again."""
    import cupy

    n = 256
    made = [drawn(rng, kind, n, n) for _ in range(4)]
    layers = [on_gpu(q) for q, _ in made]
    for m in (1, 8, 40):
        x = cupy.asarray(floats(rng, (m, n), "bfloat16"))
        ys = [cupy.empty((m, n), FLOATS["bfloat16"]) for _ in layers]

        def chain(x: Any = x, ys: Any = ys) -> None:
            for layer, before, y in zip(layers, (x, *ys), ys, strict=False):
                layer(before, out=y)

        chain()
        wanted = [y.get() for y in ys]
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            chain()
            graph = stream.end_capture()
        for _ in range(20):
            for y in ys:
                y.view(cupy.uint16)[...] = 0xFFFF
            cupy.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            stream.synchronize()
            for y, want in zip(ys, wanted, strict=True):
                assert_same_bits(y, want, m)


@pytest.mark.gpu
def test_weights_that_are_replaced(rng: np.random.Generator) -> None:
    """A new layer at the old one's addresses, which a graph goes on to use."""
    import cupy

    first, second = (drawn(rng, "NVFP4", 128, 512) for _ in range(2))
    layer, other = on_gpu(first[0], out_dtype="float32"), on_gpu(second[0])
    x = floats(rng, (4, 512), "bfloat16")
    there, out = cupy.asarray(x), cupy.empty((4, 128), np.float32)
    layer(there, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        layer(there, out=out)
        graph = stream.end_capture()
    layer._codes[...], layer._scale[...] = other._codes, other._scale
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    reference.assert_scaled_close(out, exact(x, second[1]), "float32", acc_of("bfloat16"))
