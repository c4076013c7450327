"""What the benchmarks share: one session's run, groups measured once, samples replayed to pytest-benchmark.

    pytest benchmarks                        all; results/<gpu>/<bench>.json is rewritten problem by problem
    pytest benchmarks -k 4096x4096-m16       some groups
    pytest benchmarks --results FOLDER       into another folder

CUFP8_REQUIRE_GPU=1 turns the skip of a machine without a GPU into a failure.
"""

from __future__ import annotations

import datetime
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's cufp8, whether or not it is installed

import results  # noqa: E402
import table  # noqa: E402
from measure import Contender, Measured, Weights, measure, relative_l2  # noqa: E402

COLUMNS = ["min", "median", "max", "rounds"]
LARGEST_ERROR = {"bfloat16": 1e-2, "float16": 2e-3}  # of contenders; rounding alone is 1.7e-3 and 2e-4


class Replay:
    """A clock that stands still but for the samples played back: pytest-benchmark then reports GPU time."""

    def __init__(self) -> None:
        self._now = 0.0

    def replayed_gpu_seconds(self) -> float:
        return self._now

    def play(self, benchmark: Any, group: str, seconds: Sequence[float]) -> None:
        """Make `seconds` the rounds of this entry."""
        samples = iter(seconds)

        def next_sample() -> None:
            self._now += next(samples)

        benchmark.group = group
        benchmark.pedantic(next_sample, rounds=len(seconds), iterations=1)


REPLAY = Replay()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--results",
        type=Path,
        default=results.FOLDER,
        metavar="FOLDER",
        help="where <gpu>/<bench>.json are read and rewritten (default: benchmarks/results)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.option.benchmark_columns = COLUMNS
    config.option.benchmark_sort = "fullname"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.benchmark(timer=REPLAY.replayed_gpu_seconds))


def pytest_runtest_setup(item: pytest.Item) -> None:
    from cufp8 import runtime

    if runtime.available():
        return
    if os.environ.get("CUFP8_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail(f"CUFP8_REQUIRE_GPU is set, but no GPU is used: {runtime.why_not()}", pytrace=False)
    pytest.skip(f"needs a GPU: {runtime.why_not()}")


class Bench:
    """One session on one GPU: its queue, its ceilings, its run id; every group is measured here once."""

    def __init__(self, folder: Path) -> None:
        from ceilings import Memory
        from measure import CupyQueue, TorchQueue

        from cufp8 import runtime

        info = runtime.info()
        try:
            import torch

            self.queue: Any = TorchQueue() if torch.cuda.is_available() else CupyQueue()
        except ImportError:
            self.queue = CupyQueue()
        self.memory = Memory(self.queue)
        self.gpu: str = info["gpu"]
        self.digests = runtime.digests()
        self.folder = folder / results.folder_name(self.gpu)
        now = datetime.datetime.now(datetime.timezone.utc)
        self.run_id = now.strftime("%Y%m%dT%H%M%SZ")
        self.memory.warm_up()
        read, copy = self.memory.ceilings()
        self.run = {
            "date": now.isoformat(timespec="seconds"),
            "driver": str(info["driver"] or "unknown"),
            "cuda": str(info["cuda"]),
            "cupy": str(info["cupy"]),
            "read_ceiling_tb_s": round(read, 3),
            "copy_tb_s": round(copy, 3),
        }
        self.written: set[Path] = set()
        self._groups: dict[Any, Any] = {}
        self._weights: Weights | None = None

    def weights(self, n: int, k: int) -> Weights:
        """The weight of one shape; that of the shape before goes, with all its copies."""
        if self._weights is None or (self._weights.n, self._weights.k) != (n, k):
            self._weights = None
            gc.collect()  # layers and their launch plans refer to each other
            self._weights = Weights(n, k, self.memory.l2_bytes)
        return self._weights

    def once(self, key: Any, measure_group: Callable[[], Any]) -> Any:
        """What `measure_group` gives, or the exception it raises; later entries of the group get it again."""
        if key not in self._groups:
            try:
                self._groups[key] = measure_group()
            except Exception as wrong:
                self._groups[key] = wrong
        found = self._groups[key]
        if isinstance(found, Exception):
            raise found
        return found

    def linear(
        self, bench: str, weights: Weights, m: int, x: dict[str, Any], contenders: list[Contender]
    ) -> dict[str, Measured | Exception]:
        """Measure one group of y = x @ w.T and write its rows.

        Parameters
        ----------
        x : dict
            dtype -> the two x of the group as one CuPy array [2 * m, k] of that dtype.
        """
        exact = {dtype: weights.reference(both) for dtype, both in x.items()}

        def error(contender: Contender, outputs: list[Any]) -> float:
            import cupy

            if contender.finish is not None:
                outputs = [contender.finish(y) for y in outputs]
            y = cupy.concatenate([cupy.from_dlpack(y).astype("float64") for y in outputs])
            found = relative_l2(y, exact[contender.x_dtype])
            if not found <= LARGEST_ERROR[contender.x_dtype]:
                raise AssertionError(f"{contender.name}: relative L2 error {found:.2e}")
            return found

        done = measure(self.queue, contenders, weights.nbytes, error, self.memory.hold)
        rows = [
            self.row(name, result, scheme="FP8A16", m=m, n=weights.n, k=weights.k)
            for name, result in done.items()
            if isinstance(result, Measured)
        ]
        self.write(bench, rows)
        return done

    def row(
        self,
        contender: str,
        measured: Measured,
        *,
        scheme: str | None = None,
        m: int | None = None,
        n: int | None = None,
        k: int | None = None,
    ) -> results.Row:
        """One row of the results: the median of the rounds, and in the note the least and the most."""
        kernel, error, seconds = measured.kernel, measured.error, measured.seconds
        return {
            "run": self.run_id,
            "scheme": scheme,
            "m": m,
            "n": n,
            "k": k,
            "contender": contender,
            "kernel": kernel,
            "sources_sha256": None if kernel is None else self.digests[kernel],
            "time_us": _digits(measured.time_us),
            "error": None if error is None else _digits(error),
            "note": {
                **measured.note,
                "low_us": _digits(min(seconds) * 1e6),
                "high_us": _digits(max(seconds) * 1e6),
                "rounds": len(seconds),
            },
        }

    def write(self, bench: str, rows: list[results.Row]) -> None:
        """Put whole groups into the bench's file at once: a session that is cut off keeps what it has."""
        if not rows:
            return
        path = self.folder / f"{bench}.json"
        merged = results.merge(results.load(path), self.gpu, self.run_id, self.run, rows)
        faults = results.faults(merged)
        assert not faults, faults
        results.save(path, merged)
        self.written.add(path)


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Bench:
    made = Bench(request.config.getoption("--results"))
    request.config.stash[_BENCH] = made
    return made


@pytest.fixture
def replay(benchmark: Any) -> Callable[[str, Any], None]:
    """``replay(group, result)``: report the samples of `result`, or fail with what kept it from running."""

    def report(group: str, result: Measured | Exception) -> None:
        if isinstance(result, Exception):
            raise result
        REPLAY.play(benchmark, group, result.seconds)

    return report


_BENCH = pytest.StashKey[Bench]()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Last, where a cut log still shows it: the tables of what was just measured."""
    made = config.stash.get(_BENCH, None)
    if made is None or not made.written:
        return
    terminalreporter.section("figures")
    for path in sorted(made.written):
        data = results.load(path)
        assert data is not None
        mine = {
            "gpu": data["gpu"],
            "runs": {made.run_id: made.run},
            "rows": [row for row in data["rows"] if row["run"] == made.run_id],
        }
        if path.stem in table.SECTIONS:
            terminalreporter.write_line("\n".join(table.SECTIONS[path.stem](mine)))
        terminalreporter.write_line(f"written: {path}\n")
