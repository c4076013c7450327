"""Linear, FP8 weights and 16-bit x: cufp8 against F.linear and against the rivals that are installed.

A cell is measured as `cufp8.bench.linear` says. A third of the cells is measured in float16 as well. What the rivals
run in the chosen cells is compiled before the first of them.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import rivals

from cufp8.bench import linear
from cufp8.bench.results import EAGER, OURS, TORCH

LLAMA_SHAPES = [(4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672)]
SHAPES = [*LLAMA_SHAPES, (1024, 8192), (151936, 4096)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096]
WAYS = ["cufp8-nopdl", "cufp8-invariant"]
WAYS_ROWS = [1, 8, 32, 256]
QUICK_SHAPES, QUICK_ROWS = [(4096, 4096), (14336, 4096), (28672, 8192)], [1, 8, 32, 256, 1024]


def in_float16(n: int, k: int, m: int) -> bool:
    """Every third cell, another third for each shape."""
    return (SHAPES.index((n, k)) + ROWS.index(m)) % 3 == 0


def names(n: int, k: int, m: int) -> list[str]:
    """The contenders of a cell, in the order of their turns."""
    torch = importlib.util.find_spec("torch") is not None
    found = []
    for dtype in ["bfloat16", *["float16"] * in_float16(n, k, m)]:
        found.append(OURS[dtype])
        found += WAYS * (dtype == "bfloat16" and m in WAYS_ROWS)
        found += [EAGER[dtype]] * linear.eager_differs(n, k, m, dtype)
        found += [TORCH[dtype]] * torch
    return found + (rivals.present(n, k, m) if torch else [])


def quick(n: int, k: int, m: int) -> list[pytest.MarkDecorator]:
    return [pytest.mark.quick] if (n, k) in QUICK_SHAPES and m in QUICK_ROWS else []


ENTRIES = [
    pytest.param(n, k, m, name, id=f"{n}x{k}-m{m}-{name}", marks=quick(n, k, m))
    for n, k in SHAPES
    for m in ROWS
    for name in names(n, k, m)
]


def group(bench: Any, n: int, k: int, m: int) -> dict[str, Any]:
    """Measure all contenders of one cell and write its rows."""
    builders = {name: rival.build for name, rival in rivals.RIVALS.items()}
    done = linear.cell(bench, n, k, m, names(n, k, m), builders)
    bench.write("linear", bench.rows(done, m, n, k))
    return done


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    rivals.compile_ahead(rivals.jobs({(cell["n"], cell["k"], cell["m"]) for cell in chosen}))


@pytest.mark.parametrize(("n", "k", "m", "contender"), ENTRIES)
def test_linear(bench: Any, replay: Any, n: int, k: int, m: int, contender: str) -> None:
    measured = bench.once((n, k, m), lambda: group(bench, n, k, m))
    replay(f"linear {n} x {k}, M = {m}", measured[contender])
