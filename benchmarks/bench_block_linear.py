"""Linear, weights with block scales and 16-bit x: cufp8 in four formats against FP8A16, F.linear and Humming.

All contenders of a cell get the same x and the same float weight, each in its own format; the GPU quantises it, and
each cycles over as many copies as keep its format cold. Rows of F.linear stand under FP8A16, whose dequantised weight
it gets. The packed weight's bytes, codes and scales, are in each row's note.

That everything takes about a minute once the kernels are compiled, float16 is measured on two shapes, and Humming on
three and up to M = 128, for it compiles several kernels for each shape and format.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import rivals
from bench_linear import LLAMA_SHAPES

import cufp8
from cufp8.bench import linear
from cufp8.bench.measure import Measured, measure, normal, relative_l2, without_arrays
from cufp8.bench.results import OURS, TORCH

BLOCK = 128
CHANNEL = "FP8A16"  # a scale per channel: what formats of 8 bits are compared with


def by_blocks(w: Any) -> cufp8.QuantizedTensor:
    """FP8A16 with a scale for each block of 128 x 128, by the rule of `quantize`: a block becomes one of its rows."""
    import cupy

    n, k = w.shape
    high, wide = -(-n // BLOCK), -(-k // BLOCK)
    padded = cupy.zeros((high * BLOCK, wide * BLOCK), w.dtype)
    padded[:n, :k] = w
    blocks = padded.reshape(high, BLOCK, wide, BLOCK).transpose(0, 2, 1, 3).reshape(high * wide, BLOCK * BLOCK)
    q = cufp8.quantize(blocks)
    codes = q.codes.reshape(high, wide, BLOCK, BLOCK).transpose(0, 2, 1, 3).reshape(padded.shape)
    return cufp8.QuantizedTensor(
        cupy.ascontiguousarray(codes[:n, :k]), q.scale.reshape(high, wide),
        dtype=q.dtype, scale_dtype=q.scale_dtype, shape=(n, k), block=(BLOCK, BLOCK),
    )  # fmt: skip


# Scheme of a row -> what makes the weight.
FORMATS: dict[str, Callable[[Any], cufp8.QuantizedTensor]] = {
    **{scheme: partial(cufp8.quantize, scheme=scheme) for scheme in ("NVFP4A16", "MXFP4A16", "MXFP8A16")},
    "FP8A16 128x128": by_blocks,
}
SHAPES = [*LLAMA_SHAPES, (2880, 2880), (5760, 2880)]
ROWS = [1, 8, 16, 32, 64, 128, 256, 1024]
HALF_SHAPES, HALF_ROWS = [(14336, 4096), (5760, 2880)], [1, 16, 64, 256]
HUMMING_SHAPES, HUMMING_SCHEMES = [(4096, 4096), (14336, 4096), (28672, 8192)], ["NVFP4A16", "MXFP4A16"]
HUMMING_LARGEST_M = 128
QUICK_SHAPES, QUICK_ROWS = [(4096, 4096), (28672, 8192)], [1, 32, 256]
LARGEST_ERROR = {"bfloat16": 1.8e-3, "float16": 2.5e-4}  # of cufp8: little more than the rounding of y


def names(n: int, k: int, m: int) -> list[tuple[str, str]]:
    """The contenders of a cell with their schemes, in the order of their turns."""
    torch = importlib.util.find_spec("torch") is not None
    half = (n, k) in HALF_SHAPES and m in HALF_ROWS
    found = []
    for dtype in ["bfloat16", *["float16"] * half]:
        found += [(scheme, OURS[dtype]) for scheme in [*FORMATS, CHANNEL]]
        found += [(CHANNEL, TORCH[dtype])] * torch
    if torch and (n, k) in HUMMING_SHAPES and m <= HUMMING_LARGEST_M and importlib.util.find_spec("humming"):
        found += [(scheme, "humming") for scheme in HUMMING_SCHEMES]
    return found


def group(bench: Any, n: int, k: int, m: int) -> dict[tuple[str, str], Measured | Exception]:
    """Measure all contenders of one cell and write its rows."""
    import cupy

    drawn = normal((2 * m, k), m, k)
    pairs = {dtype: bench.queue.array(drawn, dtype) for dtype in {linear.dtype_of(name) for _, name in names(n, k, m)}}
    x = {dtype: [both[:m], both[m:]] for dtype, both in pairs.items()}
    channel = bench.weights(n, k)
    weights = {CHANNEL: channel, **{scheme: channel.otherwise(make) for scheme, make in FORMATS.items()}}
    exact = {
        (scheme, dtype): one.product(linear.on_cupy(both), one.checked)
        for scheme, one in weights.items()
        for dtype, both in pairs.items()
    }
    contenders, found, of = [], {}, {}
    for scheme, name in names(n, k, m):
        try:
            made = linear.build(bench.queue, weights[scheme], x, name, {"humming": rivals.humming})
        except Exception as wrong:  # a rival that cannot be made must not take the group with it
            found[scheme, name] = without_arrays(wrong)
            continue
        made.note["weight_bytes"] = 2 * n * k if name in TORCH.values() else weights[scheme].nbytes
        made.name = f"{scheme} {name}"  # one in the group
        of[made.name] = scheme, name
        contenders.append(made)

    def error(contender: Any, outputs: list[Any]) -> float:
        scheme, name = of[contender.name]
        largest = LARGEST_ERROR[contender.x_dtype] if name in OURS.values() else None
        parts = [linear.on_cupy(y)[:, weights[scheme].checked].astype(np.float64) for y in outputs]
        off = relative_l2(cupy.concatenate(parts), exact[scheme, contender.x_dtype])
        return linear.acceptable(contender, off, largest)

    for key, result in measure(bench.queue, contenders, error, bench.memory.hold).items():
        found[of[key]] = result
    ran = {key: result for key, result in found.items() if isinstance(result, Measured)}
    bench.write("block_linear", [bench.row(name, r, scheme=s, m=m, n=n, k=k) for (s, name), r in ran.items()])
    return found


def jobs(cells: set[rivals.Cell]) -> list[rivals.Job]:
    """What Humming has to compile for these cells."""
    rows: dict[tuple[int, int, str], list[int]] = {}
    for n, k, m in sorted(cells):
        for scheme, name in names(n, k, m):
            if name == "humming":
                rows.setdefault((n, k, scheme), []).append(m)
    return [(rivals.compile_humming, n, k, ms, scheme) for (n, k, scheme), ms in rows.items()]


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    rivals.compile_ahead(jobs({(cell["n"], cell["k"], cell["m"]) for cell in chosen}))


ENTRIES = [
    pytest.param(
        n, k, m, scheme, name,
        id=f"{n}x{k}-m{m}-{scheme.replace(' ', '-')}-{name}",
        marks=[pytest.mark.quick] if (n, k) in QUICK_SHAPES and m in QUICK_ROWS else [],
    )
    for n, k in SHAPES
    for m in ROWS
    for scheme, name in names(n, k, m)
]  # fmt: skip


@pytest.mark.parametrize(("n", "k", "m", "scheme", "contender"), ENTRIES)
def test_block_linear(bench: Any, replay: Any, n: int, k: int, m: int, scheme: str, contender: str) -> None:
    measured = bench.once(("block_linear", n, k, m), lambda: group(bench, n, k, m))
    replay(f"block_linear {n} x {k}, M = {m}", measured[scheme, contender])
