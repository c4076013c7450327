"""What all tests share: the `gpu` and `sanitize` marks, fresh seeds, poisoned outputs.

CUFP8_REQUIRE_GPU=1   a test marked `gpu` fails instead of being skipped, but for kernels of other architectures
CUFP8_SANITIZE=1      CuPy allocates each array by itself, so that compute-sanitizer sees its ends
CUFP8_TEST_SEED=n     repeats the random inputs of a run
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

OTHER_ARCH = "this GPU has no "  # kernel: the only reason to skip a test where a GPU is required
SKIPPED_FOR_GPU = "needs a GPU: "
GUARD_BYTES = 256  # beside each poisoned output; keeps its alignment

hypothesis.settings.register_profile("cufp8", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("cufp8")


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a usable NVIDIA GPU and CuPy")
    config.addinivalue_line("markers", "sanitize: small; what `make sanitize` runs")
    # Set once, before xdist starts its workers, so that all of them agree.
    os.environ.setdefault("CUFP8_TEST_SEED", str(secrets.randbits(32)))
    if _flag("CUFP8_SANITIZE"):
        import cupy

        cupy.cuda.set_allocator(None)


def pytest_report_header(config: pytest.Config) -> str:
    return f"cufp8: inputs drawn with CUFP8_TEST_SEED={os.environ['CUFP8_TEST_SEED']}"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    from cufp8 import runtime

    if runtime.available():
        return
    why = runtime.why_not()
    if _flag("CUFP8_REQUIRE_GPU"):
        pytest.fail(f"CUFP8_REQUIRE_GPU is set, but no GPU is used: {why}", pytrace=False)
    pytest.skip(f"{SKIPPED_FOR_GPU}{why}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = (yield).get_result()
    if _flag("CUFP8_REQUIRE_GPU") and item.get_closest_marker("gpu") is not None:
        fail_if_skipped(report)


def skip_for_other_arch(kernel: str) -> None:
    """Leave a test out whose kernel this GPU does not have, which is a reason where a GPU is required too."""
    pytest.skip(f"{OTHER_ARCH}{kernel}")


def fail_if_skipped(report: pytest.TestReport) -> None:
    """Where a GPU is required, only kernels of other architectures may be left out: not a torch without CUDA, say."""
    why = report.longrepr[2] if report.skipped and isinstance(report.longrepr, tuple) else None
    if why is not None and OTHER_ARCH not in why:
        report.outcome, report.longrepr = "failed", f"CUFP8_REQUIRE_GPU is set, but the test was skipped: {why}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = [
        report.longrepr[2].split(SKIPPED_FOR_GPU, 1)[1]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and SKIPPED_FOR_GPU in report.longrepr[2]
    ]
    if reasons:
        terminalreporter.write_line(f"{len(reasons)} GPU tests skipped: {reasons[0]}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator of its own for each test, from the run's seed and the test's name."""
    seed = int(os.environ["CUFP8_TEST_SEED"])
    print(f"repeat these inputs with CUFP8_TEST_SEED={seed}")
    return np.random.default_rng([seed, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def poison() -> Iterator[Callable[..., Any]]:
    """Makes outputs filled with 0xFF bytes (NaN in every float dtype), guarded at both ends.

    ``poison(shape, dtype, library="numpy", device=...)``, where `library` is "numpy", "cupy" or
    "torch" and `dtype` a name. The bytes beside each output are looked at when the test ends: a
    kernel that writes past its output fails even where nothing else notices. With CUFP8_SANITIZE=1
    there are no guards, so that the sanitizer sees the true ends.
    """
    guard = 0 if _flag("CUFP8_SANITIZE") else GUARD_BYTES
    made: list[tuple[Any, int, tuple[int, ...]]] = []

    def make(shape: tuple[int, ...], dtype: str, library: str = "numpy", device: str | None = None) -> Any:
        import ml_dtypes

        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        inner = int(np.prod(shape)) * kind.itemsize
        if library == "torch":
            import torch

            buffer = torch.full((inner + 2 * guard,), 0xFF, dtype=torch.uint8, device=device)
            view = buffer[guard : guard + inner].view(getattr(torch, dtype)).reshape(shape)
        else:
            if library == "cupy":
                import cupy as xp
            else:
                xp = np
            buffer = xp.full(inner + 2 * guard, 0xFF, xp.uint8)
            view = buffer[guard : guard + inner].view(kind).reshape(shape)
        made.append((buffer, inner, shape))
        return view

    yield make
    for buffer, inner, shape in made:
        before, after = buffer[:guard], buffer[guard + inner :]
        assert bool((before == 0xFF).all()), f"bytes before the output {list(shape)} were written"
        assert bool((after == 0xFF).all()), f"bytes past the output {list(shape)} were written"
