"""The benchmarks as far as no GPU is needed: the results' format, the README's tables, and how samples are reported."""

from __future__ import annotations

import copy
import datetime
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cufp8 import runtime

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"


def _module(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package: its files import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


results = _module("results")
table = _module("table")
measure = _module("measure")

RUN = {
    "date": "2026-11-30T10:00:00+00:00",
    "driver": "580.95.05",
    "cuda": "13.0",
    "cupy": "14.2.0",
    "read_ceiling_tb_s": 4.0,
    "copy_tb_s": 3.5,
}


def _row(contender: str, time_us: float, m: int = 1, **more: Any) -> dict[str, Any]:
    ours = contender.startswith("cufp8")
    return {
        "run": "first",
        "scheme": "FP8A16",
        "m": m,
        "n": 1000,
        "k": 3996,
        "contender": contender,
        "kernel": "gemv" if ours else None,
        "sources_sha256": "a" * 64 if ours else None,
        "time_us": time_us,
        "error": 0.0016,
        "note": {"x_dtype": "bfloat16"},
        **more,
    }


@pytest.fixture
def linear() -> dict[str, Any]:
    """4.0 MB of codes and scales: 2 us are 2 TB/s, half of the ceiling."""
    rows = [_row("cufp8", 2.0), _row("torch-linear-bf16", 5.0), _row("cufp8", 4.0, 16)]
    return {"gpu": "NVIDIA H200", "runs": {"first": dict(RUN)}, "rows": rows}


@pytest.fixture
def folder(tmp_path: Path, linear: dict[str, Any]) -> Path:
    made = tmp_path / "results"
    results.save(made / "h200" / "linear.json", linear)
    return made


# --- the format ------------------------------------------------------------------------------------------


def test_a_good_file_has_no_faults(linear: dict[str, Any]) -> None:
    assert results.faults(linear) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_us", 0.0),
        ("time_us", float("nan")),
        ("time_us", True),
        ("error", -1.0),
        ("error", float("nan")),
        ("m", 1.0),
        ("n", -1),
        ("sources_sha256", "a" * 63),
        ("sources_sha256", None),
        ("kernel", None),
        ("note", None),
        ("run", "another"),
    ],
)
def test_a_bad_field_is_a_fault(linear: dict[str, Any], field: str, value: object) -> None:
    linear["rows"][0][field] = value
    assert results.faults(linear)


def test_bad_structure_is_a_fault(linear: dict[str, Any]) -> None:
    twice = copy.deepcopy(linear)
    twice["rows"].append(dict(twice["rows"][0]))
    more = copy.deepcopy(linear)
    more["rows"][0]["more"] = 1
    unused = copy.deepcopy(linear)
    unused["runs"]["second"] = dict(RUN)
    ceiling = copy.deepcopy(linear)
    ceiling["runs"]["first"]["read_ceiling_tb_s"] = None
    for wrong in (twice, more, unused, ceiling, {"rows": []}):
        assert results.faults(wrong)


def test_a_new_run_replaces_whole_problems(linear: dict[str, Any]) -> None:
    new = [_row("cufp8", 1.5)]
    del new[0]["run"]
    merged = results.merge(linear, "NVIDIA H200", "second", dict(RUN), new)
    found = [(r["run"], r["m"], r["contender"], r["time_us"]) for r in merged["rows"]]
    assert found == [("second", 1, "cufp8", 1.5), ("first", 16, "cufp8", 4.0)]
    assert set(merged["runs"]) == {"first", "second"}
    assert results.faults(merged) == []

    new = [{**_row("cufp8", 3.0, 16)}]
    del new[0]["run"]
    merged = results.merge(merged, "NVIDIA H200", "third", dict(RUN), new)
    assert set(merged["runs"]) == {"second", "third"}, "a run without rows goes"
    with pytest.raises(ValueError, match="belongs to NVIDIA H200"):
        results.merge(merged, "NVIDIA A100", "fourth", dict(RUN), new)


def test_files_keep_what_was_saved(folder: Path, linear: dict[str, Any]) -> None:
    path = folder / "h200" / "linear.json"
    assert results.load(path) == linear
    assert len(path.read_text().splitlines()) == 8 + len(linear["rows"]), "a row a line"
    assert results.load(folder / "h200" / "none.json") is None
    linear["rows"][0]["time_us"] = float("nan")
    with pytest.raises(ValueError):
        results.save(path, linear)
    assert results.faults(results.load(path)) == [], "a file that cannot be written leaves the old one"
    assert [p.name for p in path.parent.iterdir()] == ["linear.json"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_a_folder_is_named_after_the_gpu(gpu: str, name: str) -> None:
    assert results.folder_name(gpu) == name


# --- the tables ------------------------------------------------------------------------------------------


def test_the_table_says_what_the_file_says(folder: Path) -> None:
    lines = table.render(folder).splitlines()
    assert lines[0] == "#### NVIDIA H200"
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 1000 x 3996")]
    assert cells[0] == ["1000 x 3996", "1", "gemv", "**2.00**", "2.00", "50 %", "5.00", "2.50x", "1.6e-03"]
    assert cells[1][:6] == ["1000 x 3996", "16", "gemv", "**4.00**", "1.00", "25 %"]
    assert "5.00" not in cells[1], "no rival was measured at M = 16"
    assert "read ceiling 4.00 TB/s" in lines[-1]


def test_no_ratio_across_runs(folder: Path, linear: dict[str, Any]) -> None:
    linear["runs"]["second"] = dict(RUN)
    linear["rows"][1]["run"] = "second"
    results.save(folder / "h200" / "linear.json", linear)
    text = table.render(folder)
    assert "2.50x" not in text
    assert "**2.00**" in text


def test_rivals_and_float16_get_columns(folder: Path, linear: dict[str, Any]) -> None:
    linear["rows"] += [_row("humming", 3.0), _row("cufp8-fp16", 2.5), _row("torch-linear-fp16", 6.0)]
    results.save(folder / "h200" / "linear.json", linear)
    text = table.render(folder)
    assert "Humming" in text and "gemlite" not in text
    assert "2.50 (2.40x)" in text


def test_every_section_renders(folder: Path, linear: dict[str, Any]) -> None:
    bare = {"m": None, "n": None, "k": None}
    shared = {"w_dtype": "bfloat16", "tb_s": 3.0, "copy_share": 0.86, "fused": False}
    more = {
        "host": [_row("cufp8", 12.0, note={"what": "`layer(x)`"}), _row("cufp8", 13.0, 16)],
        "quantize": [_row("cufp8", 20.0, note=shared) | {"m": None}],
        "compile": [_row("cufp8", 1.5e6, **bare), _row("cufp8", 2e6, **bare, kernel="mma_sync")],
        "import": [_row("cufp8-import", 2e5, **bare, note={"what": "`import cufp8` done"})],
    }
    for bench, rows in more.items():
        data = {**linear, "rows": rows}
        assert results.faults(data) == []
        results.save(folder / "h200" / f"{bench}.json", data)
    text = table.render(folder)
    for line in (
        "| `layer(x)` | 12.0 | 13.0 |",
        "| 1000 x 3996 | bfloat16 | 20.0 | 3.00 | 86 % |",
        "| `mma_sync` | 2.00 |",
        "| `import cufp8` done | 0.20 |",
    ):
        assert line in text


def test_without_results_the_table_says_so(tmp_path: Path) -> None:
    assert "make bench" in table.render(tmp_path)


@pytest.mark.parametrize(
    ("time_us", "text"),
    [(4.384, "4.38"), (9.994, "9.99"), (9.996, "10.0"), (31.04, "31.0"), (99.96, "100"), (1234.5, "1234")],
)
def test_three_digits(time_us: float, text: str) -> None:
    assert table.microseconds(time_us) == text


def test_check_and_rewrite(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    arguments = ["--readme", str(readme), "--results", str(folder)]
    readme.write_text(f"above\n{table.BEGIN}\nold\n{table.END}\nbelow\n", encoding="utf-8")
    assert table.main([*arguments, "--check"]) == 1
    assert "old" in readme.read_text(encoding="utf-8"), "--check changes nothing"
    assert table.main(arguments) == 0
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"above\n{table.BEGIN}\n#### NVIDIA H200")
    assert text.endswith(f"{table.END}\nbelow\n")
    assert table.main([*arguments, "--check"]) == 0
    assert table.main(arguments) == 0
    assert readme.read_text(encoding="utf-8") == text

    for wrong in ("no lines", f"{table.END}{table.BEGIN}", table.BEGIN + table.END * 2):
        readme.write_text(wrong, encoding="utf-8")
        assert table.main(arguments) == 1
        assert readme.read_text(encoding="utf-8") == wrong
    assert "table:" in capsys.readouterr().err


def test_figures_of_other_sources_are_told(folder: Path) -> None:
    assert table.stale({"gemv": "a" * 64}, folder) == []
    assert table.stale({"gemv": "b" * 64}, folder) == ["h200/linear: gemv, 2 rows"]


# --- what is committed -----------------------------------------------------------------------------------


def test_committed_results_follow_the_format() -> None:
    for folder, bench, data in results.files():
        where = f"{folder}/{bench}.json"
        assert bench in results.BENCHES, where
        assert results.faults(data) == [], where
        assert results.folder_name(data["gpu"]) == folder, where
        for run in data["runs"].values():
            assert datetime.datetime.fromisoformat(run["date"]).tzinfo is not None, where
        text = (results.FOLDER / folder / f"{bench}.json").read_text(encoding="utf-8")
        assert text == results.dumps(data), f"{where} was edited by hand"
        ours = {row["kernel"] for row in data["rows"]} - {None}
        assert ours <= set(runtime.digests()), where


def test_the_readme_is_in_step() -> None:
    done = subprocess.run([sys.executable, str(FOLDER / "table.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# --- measuring -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1 << 10, 4096 * 4096, 14336 * 4096, 28672 * 8192, 2 * 28672 * 8192, 1 << 40])
def test_weights_are_cold_and_sequences_even(nbytes: int) -> None:
    for l2 in (4 << 20, 60 << 20, 128 << 20):
        copies = measure.copies_for(nbytes, l2)
        assert copies % 2 == 0 and copies >= 2
        assert copies * nbytes >= max(300_000_000, 4 * l2)
        calls = measure.calls_for(nbytes, copies)
        assert calls % copies == 0 and calls >= measure.MIN_CALLS


class _Clock:
    """A queue on which each call takes the seconds that its contender says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.captures = 0

    def capture(self, run: Any, first: Any) -> Any:
        self.captures += 1
        first()
        run()
        return run

    def event(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait(self) -> None:
        pass


def test_a_group_is_measured_in_turns() -> None:
    import numpy as np

    clock, order, held = _Clock(), [], []

    def contender(name: str, seconds: float, captured: bool = True) -> Any:
        buffers = [np.zeros(3, np.float32) for _ in range(2)]

        def call(i: int) -> None:
            clock.now += seconds
            if not order or order[-1] != name:
                order.append(name)
            buffers[i % 2][:] = i % 2 + 1

        return measure.Contender(name, call, 2, buffers, kernel="gemv", captured=captured)

    def broken(i: int) -> None:
        raise RuntimeError("no such kernel")

    contenders = [
        contender("a", 1e-6),
        measure.Contender("broken", broken, 2),
        contender("b", 2e-6),
        contender("eager", 3e-6, captured=False),
    ]
    seen: list[Any] = []

    def error(one: Any, outputs: list[Any]) -> float:
        seen.append([one.name, *(float(y[0]) for y in outputs)])
        return 0.001

    done = measure.measure(clock, contenders, 1 << 20, error, held.append, rounds=3)
    assert isinstance(done["broken"], RuntimeError)
    assert seen == [["a", 1.0, 2.0], ["b", 1.0, 2.0], ["eager", 1.0, 2.0]]
    for name, seconds in (("a", 1e-6), ("b", 2e-6), ("eager", 3e-6)):
        assert done[name].seconds == pytest.approx([seconds] * 3)
        assert (done[name].error, done[name].kernel) == (0.001, "gemv")
        assert done[name].time_us == pytest.approx(seconds * 1e6)
    assert order[-12:] == ["a", "b", "eager"] * 4, "a warming round, then three: ABAB"
    assert clock.captures == 3, "the broken one too"
    assert len(held) == 12


def test_an_output_that_is_not_written_is_nan() -> None:
    import math

    import numpy as np

    buffers = [np.zeros(3, np.float32) for _ in range(2)]
    lazy = measure.Contender("lazy", lambda i: None, 2, buffers)
    seen: list[float] = []

    def error(one: Any, outputs: list[Any]) -> float:
        seen.extend(float(y[0]) for y in outputs)
        raise AssertionError("wrong")

    done = measure.measure(_Clock(), [lazy], 1 << 20, error, lambda s: None, rounds=1)
    assert isinstance(done["lazy"], AssertionError)
    assert all(math.isnan(v) for v in seen)


def _pytest(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUFP8_REQUIRE_GPU": "0"}
    for name in list(env):
        if name.startswith("PYTEST_"):
            del env[name]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def test_benchmarks_are_found_and_skipped_without_a_gpu() -> None:
    only = ["--collect-only"] if runtime.available() else ["-rs"]
    done = _pytest("benchmarks", *only)
    assert done.returncode == 0, done.stdout + done.stderr
    if runtime.available():
        assert "test_linear[28672x8192-m256-cufp8]" in done.stdout
    else:
        assert "needs a GPU" in done.stdout and " passed" not in done.stdout


def test_pytest_benchmark_reports_the_replayed_samples(tmp_path: Path) -> None:
    (tmp_path / "test_replay.py").write_text(
        f"""
import importlib.util, pytest
spec = importlib.util.spec_from_file_location("bench_conftest", {str(FOLDER / "conftest.py")!r})
bench = importlib.util.module_from_spec(spec)
import sys; sys.path.insert(0, {str(FOLDER)!r})
spec.loader.exec_module(bench)

@pytest.mark.benchmark(timer=bench.REPLAY.replayed_gpu_seconds)
def test_replay(benchmark):
    bench.REPLAY.play(benchmark, "a group", [3e-6, 1e-6, 2e-6])
"""
    )
    done = _pytest("test_replay.py", "--benchmark-json=out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert entry["group"] == "a group"
    assert entry["stats"]["data"] == pytest.approx([3e-6, 1e-6, 2e-6])
    assert entry["stats"]["median"] == pytest.approx(2e-6)
