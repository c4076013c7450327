"""What the benchmarks share: one session's run, groups measured once, samples replayed to pytest-benchmark.

    pytest benchmarks                        all; results/<gpu>/<bench>.json is rewritten problem by problem
    pytest benchmarks -k 4096x4096-m16-      some groups
    pytest benchmarks --quick                those marked so: a minute, and none of the others' rows is touched
    pytest benchmarks --results FOLDER       into another folder

CUFP8_REQUIRE_GPU=1 turns the skip of a machine without a GPU into a failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the checkout's cufp8, whether or not it is installed

import table  # noqa: E402

from cufp8.bench import results  # noqa: E402
from cufp8.bench.measure import Measured, without_arrays  # noqa: E402
from cufp8.bench.session import Session  # noqa: E402

COLUMNS = ["min", "median", "max", "rounds"]


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
        default=table.FOLDER,
        metavar="FOLDER",
        help="where <gpu>/<bench>.json are read and rewritten (default: benchmarks/results)",
    )
    parser.addoption("--quick", action="store_true", help="only the groups that are marked `quick`")


def pytest_configure(config: pytest.Config) -> None:
    config.option.benchmark_columns = COLUMNS
    config.option.benchmark_sort = "fullname"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.benchmark(timer=REPLAY.replayed_gpu_seconds))
    if config.getoption("--quick"):
        left_out = [item for item in mine if item.get_closest_marker("quick") is None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    from cufp8 import runtime

    if runtime.available():
        return
    if os.environ.get("CUFP8_REQUIRE_GPU", "") not in ("", "0"):
        pytest.fail(f"CUFP8_REQUIRE_GPU is set, but no GPU is used: {runtime.why_not()}", pytrace=False)
    pytest.skip(f"needs a GPU: {runtime.why_not()}")


class Bench(Session):
    """One session on one GPU whose rows go to files; every group is measured here once."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder / results.folder_name(self.gpu)
        self.written: set[Path] = set()
        self._groups: dict[Any, Any] = {}

    def once(self, key: Any, measure_group: Callable[[], Any]) -> Any:
        """What `measure_group` gives, or the exception it raises; later entries of the group get it again."""
        if key not in self._groups:
            try:
                self._groups[key] = measure_group()
            except Exception as wrong:
                self._groups[key] = without_arrays(wrong)
        found = self._groups[key]
        if isinstance(found, Exception):
            raise found
        return found

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
        sections = {**table.SECTIONS, **table.COMPLETE}
        if path.stem in sections:
            terminalreporter.write_line("\n".join(sections[path.stem](mine)))
        terminalreporter.write_line(f"written: {path}\n")
