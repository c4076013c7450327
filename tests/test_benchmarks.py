"""The benchmarks as far as no GPU is needed: the results' format, the README's tables, and how samples are reported."""

from __future__ import annotations

import copy
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import traceback
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cufp8
from cufp8 import runtime
from cufp8.bench import command, linear, measure, results

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


table = _module("table")
rivals = _module("rivals")
bench_linear = _module("bench_linear")
bench_block_linear = _module("bench_block_linear")
bench_decode = _module("bench_decode")
bench_load = _module("bench_load")
bench_scaled_mm = _module("bench_scaled_mm")

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
def data() -> dict[str, Any]:
    """4.0 MB of codes and scales: 2 us are 2 TB/s, half of the ceiling."""
    rows = [_row("cufp8", 2.0), _row("torch-linear-bf16", 5.0), _row("cufp8", 4.0, 16)]
    return {"gpu": "NVIDIA H200", "runs": {"first": dict(RUN)}, "rows": rows}


@pytest.fixture
def folder(tmp_path: Path, data: dict[str, Any]) -> Path:
    made = tmp_path / "results"
    results.save(made / "h200" / "linear.json", data)
    return made


# --- the format ------------------------------------------------------------------------------------------


def test_a_good_file_has_no_faults(data: dict[str, Any]) -> None:
    assert results.faults(data) == []


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
def test_a_bad_field_is_a_fault(data: dict[str, Any], field: str, value: object) -> None:
    data["rows"][0][field] = value
    assert results.faults(data)


def test_bad_structure_is_a_fault(data: dict[str, Any]) -> None:
    twice = copy.deepcopy(data)
    twice["rows"].append(dict(twice["rows"][0]))
    more = copy.deepcopy(data)
    more["rows"][0]["more"] = 1
    unused = copy.deepcopy(data)
    unused["runs"]["second"] = dict(RUN)
    ceiling = copy.deepcopy(data)
    ceiling["runs"]["first"]["read_ceiling_tb_s"] = None
    for wrong in (twice, more, unused, ceiling, {"rows": []}):
        assert results.faults(wrong)


def test_a_new_run_replaces_whole_problems(data: dict[str, Any]) -> None:
    new = [_row("cufp8", 1.5)]
    del new[0]["run"]
    merged = results.merge(data, "NVIDIA H200", "second", dict(RUN), new)
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


def test_files_keep_what_was_saved(folder: Path, data: dict[str, Any]) -> None:
    path = folder / "h200" / "linear.json"
    assert results.load(path) == data
    assert len(path.read_text().splitlines()) == 8 + len(data["rows"]), "a row a line"
    assert results.load(folder / "h200" / "none.json") is None
    data["rows"][0]["time_us"] = float("nan")
    with pytest.raises(ValueError):
        results.save(path, data)
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
    assert "| N x K | M = 1 | M = 16 | TB/s, M = 1 | TB/s, M = 16 |" in lines
    assert "| 1000 x 3996 | 2.00 (2.50x) | 4.00 | 2.00, 50 % | 1.00, 25 % |" in lines
    assert "read ceiling 4.00 TB/s" in lines[-1]

    lines = table.complete(folder).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 1000 x 3996")]
    assert cells[0] == ["1000 x 3996", "1", "gemv", "**2.00**", "2.00", "50 %", "5.00", "2.50x", "1.6e-03"]
    assert cells[1][:6] == ["1000 x 3996", "16", "gemv", "**4.00**", "1.00", "25 %"]
    assert "5.00" not in cells[1], "no rival was measured at M = 16"
    assert "read ceiling 4.00 TB/s" in lines[-1]


def test_no_ratio_across_runs(folder: Path, data: dict[str, Any]) -> None:
    data["runs"]["second"] = dict(RUN)
    data["rows"][1]["run"] = "second"
    results.save(folder / "h200" / "linear.json", data)
    for text in (table.render(folder), table.complete(folder)):
        assert "2.50x" not in text
        assert "2.00" in text


def test_calls_outside_of_a_graph_are_marked(folder: Path, data: dict[str, Any]) -> None:
    data["rows"] += [_row("cufp8-eager", 2.5, kernel="cublas")]
    results.save(folder / "h200" / "linear.json", data)
    text = table.render(folder)
    assert "| 1000 x 3996 | 2.50* (2.00x) | 4.00 | 2.00, 50 % |" in text
    assert "* a call that is not in a graph" in text
    assert "| 2.50x | 2.50 |" in table.complete(folder)


def test_readme_shows_some_shapes_and_the_other_page_all(folder: Path, data: dict[str, Any]) -> None:
    data["rows"] += [_row("cufp8", 5.0, n=4096, k=4096), _row("cufp8", 5.5, 2, n=4096, k=4096)]
    results.save(folder / "h200" / "linear.json", data)
    assert "1000 x 3996" not in table.render(folder) and "5.50" not in table.render(folder)
    assert "1000 x 3996" in table.complete(folder) and "**5.50**" in table.complete(folder)


def test_rivals_and_float16_get_columns(folder: Path, data: dict[str, Any]) -> None:
    data["rows"] += [_row("humming", 3.0), _row("cufp8-fp16", 2.5), _row("torch-linear-fp16", 6.0)]
    results.save(folder / "h200" / "linear.json", data)
    text = table.complete(folder)
    assert "Humming" in text and "gemlite" not in text
    assert "2.50 (2.40x)" in text


def test_every_section_renders(folder: Path, data: dict[str, Any]) -> None:
    bare = {"m": None, "n": None, "k": None}
    loaded = {"bytes": 2_000_000_000, "shards": 2, "layers": 34, "anonymous_mib": 48.4}
    shared = {"w_dtype": "bfloat16", "tb_s": 3.0, "copy_share": 0.86, "fused": False}
    more = {
        "host": [_row("cufp8", 12.0, note={"what": "`layer(x)`"}), _row("cufp8", 13.0, 16)],
        "quantize": [
            _row("cufp8", 20.0, note=shared) | {"m": None},
            _row("rms-norm-token", 12.0, 4096, n=None, scheme="FP8", note=shared),
            _row("nvfp4", 21.0, scheme="NVFP4A16", note=shared) | {"m": None},
            _row("nvfp4", 13.0, 4096, n=None, scheme="NVFP4", note=shared),
        ],
        "compile": [_row("cufp8", 1.5e6, **bare), _row("cufp8", 2e6, **bare, kernel="mma_sync")],
        "decode_step": [
            _row("cufp8", 2000.0, 8, n=None, k=None, note={"model": "Llama-3-8B", "weight_bytes": 7_000_000_000}),
            _row("torch-linear-bf16", 3500.0, 8, n=None, k=None),
        ],
        "import": [_row("cufp8-import", 2e5, **bare, note={"what": "`import cufp8` done"})],
        "load": [
            _row("pinned-copy", 4e4, **bare, note={**loaded, "what": "a copy", "gb_s": 50.0, "share": 1.0}),
            _row("cufp8", 5e4, **bare, note={**loaded, "what": "`entry.linear()`", "gb_s": 40.0, "share": 0.8}),
            _row("cufp8-open", 1500.0, **bare, note={**loaded, "what": "`cufp8.load(folder)`, a shard"}),
        ],
    }
    sized = {"n": 1000, "k": 4000}
    more["scaled_mm"] = [
        _row("cufp8", 100.0, 1024, scheme="row-fast", **sized),
        _row("cublaslt-row-fast", 90.0, 1024, scheme="row-fast", **sized),
        _row("torch-linear-bf16", 150.0, 1024, scheme="row-fast", **sized),
        _row("cufp8", 4.0, 1, scheme="row-fast", **sized),
        _row("cublaslt-row-fast", 9.0, 1, scheme="row-fast", **sized),
        _row("cublaslt-tensor-fast", 5.0, 1, scheme="tensor-fast", **sized),
        _row("cufp8", 8.0, 16, scheme="FP8_DYNAMIC", **sized),
        _row("cufp8-fast", 6.0, 16, scheme="FP8_DYNAMIC", **sized),
        _row("torch-linear-bf16", 9.0, 16, scheme="FP8_DYNAMIC", **sized),
        _row("cufp8", 5.0, 16, scheme="MXFP8", error=1.7e-3, **sized),
        _row("cufp8-mxfp8a16", 4.0, 16, scheme="MXFP8", **sized),
        _row("torch-linear-bf16", 10.0, 16, scheme="MXFP8", **sized),
    ]
    for bench, rows in more.items():
        one = {**data, "rows": rows}
        assert results.faults(one) == []
        results.save(folder / "h200" / f"{bench}.json", one)
    text = table.render(folder)
    for line in (
        "| `layer(x)` | 12.0 | 13.0 |",
        "| 1024 x 1000 x 4000 |  |  |  | 82 | 0.90x | 1.50x |  |  |  |",
        "| geometric mean |  |  |  |  | 0.90x |  |  |  |  |",
        "| 1000 x 4000 | 4.00 (1.25x) |",  # of cuBLASLt's modes the fastest
        "| 1000 x 4000 | 16 | 8.00 (1.12x) | 6.00 (1.50x) |  | 9.00 |",
        "| 1000 x 4000 | 16 |  |  |  |  | 5.00 (2.00x) | 4.00 (2.50x) |",
        "against float64 on x and w as quantised: at most 1.7e-03.",
        "| 1000 x 3996 | bfloat16 | 20.0 | 3.00 | 86 % |",
        "| 1000 x 3996 | bfloat16, to NVFP4 (w is read twice) | 21.0 | 3.00 | 86 % |",
        "| 4096 x 3996 | NVFP4, a global scale per token | 13.0 | 3.00 | 86 % |",
        "| 8 | **2.00** | 3.50 | 88 % | 4,000 |  | 3.50 | 1.75x |",
        "| `mma_sync` | 2.00 |",
        "| `import cufp8` done | 0.20 |",
        "A checkpoint of 2.0 GB in 2 files, in the page cache, to 34 finished layers on the GPU;",
        "To open it takes 1.5 ms a file.",
        "| `entry.linear()` | 40.0 | 80 % | 48 |",
    ):
        assert line in text


def test_formats_with_block_scales_get_a_table_each(folder: Path, data: dict[str, Any]) -> None:
    """The ceiling is 4 TB/s, so that 4.0 MB take 1 us there."""

    def row(scheme: str, name: str, time_us: float, mb: float, m: int = 1, **more: Any) -> dict[str, Any]:
        return _row(name, time_us, m, scheme=scheme, note={"weight_bytes": round(mb * 1e6)}, **more)

    rows = [
        row("FP8A16", "cufp8", 1.25, 4.0),
        row("FP8A16", "torch-linear-bf16", 2.5, 8.0),
        row("FP8A16", "cufp8", 2.0, 4.0, 16),
        row("FP8A16 128x128", "cufp8", 1.25, 4.0, error=0.0017),
        row("FP8A16 128x128", "cufp8-fp16", 1.5, 4.0, error=0.0002),
        row("FP8A16 128x128", "cufp8", 2.5, 4.0, 16),
        row("NVFP4A16", "cufp8", 0.8, 2.4),
        row("NVFP4A16", "humming", 1.2, 2.4),
    ]
    one = {**data, "rows": rows}
    assert results.faults(one) == []
    results.save(folder / "h200" / "block_linear.json", one)
    text = table.render(folder)
    for line in (
        "| NVFP4A16 | M = 1 |",
        "| 1000 x 3996 | 75 % (3.12x) |",
        "Times as fast as Humming in the same format, the least of its shapes: M = 1 1.50x.",
        "| FP8A16 128x128 | M = 1 | M = 16 |",
        "| 1000 x 3996 | 80 % (2.00x) | 40 % |",
        "Bytes/s relative to FP8A16 with a scale per channel, 2 cells: least 0.80, median 0.90.",
        "at most 1.7e-03 in bfloat16 and 2.0e-04 in float16.",
    ):
        assert line in text
    assert "| MXFP4A16 |" not in text and "| FP8A16 |" not in text


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
    page = folder / "README.md"
    assert page.read_text(encoding="utf-8") == table.complete(folder)
    page.write_text("edited by hand", encoding="utf-8")
    assert table.main([*arguments, "--check"]) == 1
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
    for folder, bench, data in results.files(table.FOLDER):
        where = f"{folder}/{bench}.json"
        assert bench in results.BENCHES, where
        assert results.faults(data) == [], where
        assert results.folder_name(data["gpu"]) == folder, where
        for run in data["runs"].values():
            assert datetime.datetime.fromisoformat(run["date"]).tzinfo is not None, where
        text = (table.FOLDER / folder / f"{bench}.json").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 4.3e-6, 55e-6, 1.4e-3, 26e-3])
def test_sequences_are_even_and_last(seconds: float) -> None:
    calls = measure.calls_for(seconds)
    assert calls % 2 == 0 and 2 <= calls <= 1500
    assert calls * max(seconds, 1e-6) >= measure.GRAPH_SECONDS
    assert (calls - 2) * seconds < measure.GRAPH_SECONDS, "no longer than that takes"


class _Clock:
    """A queue of NumPy arrays on which each call takes the seconds that its contender says."""

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

    def array(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return values.astype(measure.numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, measure.numpy_dtype(dtype))


def test_a_group_is_measured_in_turns() -> None:
    clock, order, held = _Clock(), [], []

    def contender(name: str, seconds: float, captured: bool = True) -> Any:
        buffers = [np.zeros(3, np.float32) for _ in range(2)]

        def call(i: int) -> None:
            clock.now += seconds
            if not order or order[-1] != name:
                order.append(name)
            buffers[i % 2][:] = i % 2 + 1

        return measure.Contender(name, call, buffers, kernel="gemv", captured=captured)

    def broken(i: int) -> None:
        raise RuntimeError("no such kernel")

    contenders = [
        contender("a", 1e-6),
        measure.Contender("broken", broken),
        contender("b", 2e-6),
        contender("eager", 3e-6, captured=False),
    ]
    seen: list[Any] = []

    def error(one: Any, outputs: list[Any]) -> float:
        seen.append([one.name, *(float(y[0]) for y in outputs)])
        return 0.001

    done = measure.measure(clock, contenders, error, held.append, rounds=3)
    assert isinstance(done["broken"], RuntimeError)
    assert seen == [["a", 1.0, 2.0], ["b", 1.0, 2.0], ["eager", 1.0, 2.0]]
    for name, seconds in (("a", 1e-6), ("b", 2e-6), ("eager", 3e-6)):
        assert done[name].seconds == pytest.approx([seconds] * 3)
        assert (done[name].error, done[name].kernel) == (0.001, "gemv")
        assert done[name].time_us == pytest.approx(seconds * 1e6)
    assert order[-12:] == ["a", "b", "eager"] * 4, "a warming round, then three: ABAB"
    assert clock.captures == 2
    assert held[:2] == [measure.HOLD_SECONDS] * 2 and len(held) == 14, "a graph's first calls, then every sample"


def test_a_long_group_gets_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "GROUP_SECONDS", 0.0)
    buffers = [np.zeros(3, np.float32) for _ in range(2)]
    one = measure.Contender("slow", lambda i: None, buffers)
    done = measure.measure(_Clock(), [one], lambda *_: 0.0, lambda seconds: None)
    assert len(done["slow"].seconds) == measure.LEAST_ROUNDS
    done = measure.measure(_Clock(), [one], lambda *_: 0.0, lambda seconds: None, rounds=3)
    assert len(done["slow"].seconds) == 3


def test_a_failure_holds_no_memory() -> None:
    class Array:
        pass

    def fails(i: int) -> None:
        array = Array()
        seen.append(weakref.ref(array))
        raise RuntimeError("no")

    seen: list[Any] = []
    done = measure.measure(_Clock(), [measure.Contender("fails", fails)], lambda *_: 0.0, lambda seconds: None)
    assert "fails" in "".join(traceback.format_exception(done["fails"]))
    assert seen and all(one() is None for one in seen)


def test_an_output_that_is_not_written_is_nan() -> None:
    import math

    buffers = [np.zeros(3, np.float32) for _ in range(2)]
    lazy = measure.Contender("lazy", lambda i: None, buffers)
    seen: list[float] = []

    def error(one: Any, outputs: list[Any]) -> float:
        seen.extend(float(y[0]) for y in outputs)
        raise AssertionError("wrong")

    done = measure.measure(_Clock(), [lazy], error, lambda s: None, rounds=1)
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


def test_quick_is_a_small_part() -> None:
    done = _pytest("benchmarks", "--collect-only", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = {line.split("[")[1].rsplit("-cufp8", 1)[0] for line in done.stdout.splitlines() if "test_linear[" in line}
    assert {"4096x4096-m1", "28672x8192-m1024"} <= {cell.split("-torch")[0] for cell in cells}
    assert "test_decode_step[" in done.stdout
    assert not any("-m2-" in line or "test_host" in line for line in done.stdout.splitlines())


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


# --- the linear layers -----------------------------------------------------------------------------------


def test_a_third_of_the_cells_is_measured_in_float16() -> None:
    cells = [(n, k, m) for n, k in bench_linear.SHAPES for m in bench_linear.ROWS]
    half = [cell for cell in cells if bench_linear.in_float16(*cell)]
    assert len(cells) == 108 and len(half) == 36
    assert {cell[:2] for cell in half} == set(bench_linear.SHAPES)
    assert {cell[2] for cell in half} == set(bench_linear.ROWS)
    for n, k, m in cells:
        names = bench_linear.names(n, k, m)
        assert names[0] == "cufp8" and len(set(names)) == len(names)
        assert ("cufp8-fp16" in names) == ((n, k, m) in half)
        assert ("cufp8-nopdl" in names) == ("cufp8-invariant" in names) == (m in (1, 8, 32, 256))
        for name in names:
            assert linear.dtype_of(name) == ("float16" if "fp16" in name else "bfloat16")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all rivals were."""
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_rivals_are_measured_where_they_make_sense() -> None:
    for n, k in bench_linear.SHAPES:
        some = ["gemlite"] * ((n, k) in rivals.FEW_SHAPES)
        assert rivals.present(n, k, 1) == ["humming", *some, "fbgemm"]
        assert rivals.present(n, k, 64) == ["humming", *some]
        assert rivals.present(n, k, 256) == ["humming"]
        assert rivals.present(n, k, 4096) == ["humming"]
    assert set(rivals.FEW_SHAPES) < set(bench_linear.SHAPES)


@pytest.mark.usefixtures("installed")
def test_all_that_rivals_compile_is_compiled_ahead_and_once() -> None:
    cells = {(n, k, m) for n, k in bench_linear.SHAPES for m in bench_linear.ROWS}
    todo = rivals.jobs(cells)
    for name, compiles in (("humming", rivals.compile_humming), ("gemlite", rivals.compile_gemlite)):
        found = [(n, k, m) for one, n, k, rows in todo if one is compiles for m in rows]
        assert len(set(found)) == len(found)
        assert set(found) == {cell for cell in cells if name in rivals.present(*cell)}
    assert rivals.jobs({(4096, 4096, 8), (4096, 4096, 4)}) == [
        (rivals.compile_humming, 4096, 4096, [4, 8]),
        (rivals.compile_gemlite, 4096, 4096, [4, 8]),
    ]


def test_compiling_ahead_takes_processes_and_tells_of_failures() -> None:
    rivals.compile_ahead([])
    with pytest.warns(UserWarning, match="compiling ahead: ValueError.*no number"):
        rivals.compile_ahead([(os.getpid,), (int, "no number"), (os.getpid,)])


class _HostSession:
    """A session on NumPy: what it times is nothing, what it computes is what a GPU's would."""

    def __init__(self) -> None:
        self.queue = _Clock()
        self.memory = self
        self.l2_bytes = 60 << 20
        self.kept: dict[tuple[int, int], Any] = {}
        self.written: list[Any] = []

    def hold(self, seconds: float) -> None:
        pass

    def forget(self) -> None:
        pass

    def weights(self, n: int, k: int) -> Any:
        return self.kept.setdefault((n, k), linear.Weights(n, k, self.l2_bytes, copies=2))

    def row(self, name: str, measured: Any, *, scheme: str, m: int, n: int, k: int) -> dict[str, Any]:
        return _row(name, 1.0, m, scheme=scheme, n=n, k=k, note=measured.note, error=measured.error)

    def rows(self, done: dict[str, Any], m: int, n: int | None, k: int | None) -> list[Any]:
        return [_row(name, 1.0, m, n=n, k=k, note=one.note) for name, one in done.items()]

    def write(self, bench: str, rows: list[Any]) -> None:
        self.written += rows


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> _HostSession:
    def layers(self: Any, pdl: bool, batch_invariant: bool = False) -> list[cufp8.Linear]:
        return [cufp8.Linear.from_quantized(self.fresh(), device="cpu") for _ in range(self.copies)]

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(linear, "kernel", lambda *problem: "gemv")
    monkeypatch.setattr(linear.Weights, "layers", layers)
    return _HostSession()


def test_a_cell_compares_with_float64(host: _HostSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "CHECKED_CHANNELS", 50)
    names = ["cufp8", "cufp8-eager", "cufp8-fp16"]
    done = linear.cell(host, 200, 128, 3, names)
    assert host.weights(200, 128).checked.step == 5
    assert [done[name].error for name in names] == [
        pytest.approx(1.7e-3, rel=0.2),
        pytest.approx(1.7e-3, rel=0.2),
        pytest.approx(2.1e-4, rel=0.2),
    ]
    assert [done[name].note["x_dtype"] for name in names] == ["bfloat16", "bfloat16", "float16"]
    w = host.weights(200, 128).quantized.dequantize()
    assert np.std(w) == pytest.approx(128**-0.5, rel=0.05)


def test_a_cell_keeps_going_without_a_rival(host: _HostSession) -> None:
    def missing(weights: Any, x: Any) -> Any:
        raise ImportError("no gemlite here")

    def wrong(weights: Any, x: Any) -> Any:
        return measure.Contender("humming", lambda i: np.full((len(x[0]), weights.n), 1.0, np.float32))

    done = linear.cell(host, 48, 64, 2, ["cufp8", "gemlite", "humming"], {"gemlite": missing, "humming": wrong})
    assert isinstance(done["gemlite"], ImportError)
    assert "relative L2 error" in str(done["humming"])
    assert done["cufp8"].seconds


def test_a_decoding_step_feeds_each_layer_the_one_before(host: _HostSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the float64 chain, with shapes that are Llama's in small."""
    block = {"qkv": (96, 64), "o": (64, 64), "gate_up": (448, 64), "down": (64, 224)}
    for name, value in {"BLOCK": block, "HEAD": (160, 64), "DEPTH": 3, "NAMES": ["cufp8"]}.items():
        monkeypatch.setattr(bench_decode, name, value)
    weights = bench_decode.make_weights(host)
    assert len(weights) == 13
    assert not np.array_equal(weights[0].quantized.codes, weights[4].quantized.codes)
    done = bench_decode.group(host, weights, 2)
    assert done["cufp8"].error < 0.02
    (row,) = host.written
    assert row["note"]["weight_bytes"] == sum(n * k + 4 * n for n, k in [*block.values()] * 3 + [(160, 64)])
    assert set(row["note"]["kernels"]) == {"96x64", "64x64", "448x64", "64x224", "160x64"}


def test_llamas_layers() -> None:
    assert sum(n * k for n, k in bench_decode.BLOCK.values()) * bench_decode.DEPTH == 6_979_321_856
    assert bench_decode.HEAD == (128256, 4096)


# --- formats with block scales ---------------------------------------------------------------------------

FORMATS = {"FP8A16": cufp8.quantize, **bench_block_linear.FORMATS}


def test_the_cells_of_formats_with_block_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_block_linear.importlib.util, "find_spec", lambda name: name)
    cells = {(n, k, m) for n, k in bench_block_linear.SHAPES for m in bench_block_linear.ROWS}
    names = {cell: bench_block_linear.names(*cell) for cell in cells}
    for found in names.values():
        assert len(set(found)) == len(found)
        assert {scheme for scheme, name in found if name == "cufp8"} == set(FORMATS)
        assert ("FP8A16", "torch-linear-bf16") in found
    half = {cell for cell in cells if ("NVFP4A16", "cufp8-fp16") in names[cell]}
    assert len(half) == 8 and all(("FP8A16", "torch-linear-fp16") in names[cell] for cell in half)
    assert set(table.BLOCK_SCHEMES) == set(bench_block_linear.FORMATS)
    assert set(table.EIGHT_BITS) < set(table.BLOCK_SCHEMES)

    wanted = {(*cell, scheme) for cell in cells for scheme, name in names[cell] if name == "humming"}
    todo = bench_block_linear.jobs(cells)
    assert {(n, k, m, scheme) for _, n, k, rows, scheme in todo for m in rows} == wanted
    assert {cell[3] for cell in wanted} == {"NVFP4A16", "MXFP4A16"} and len(todo) == 6
    assert max(cell[2] for cell in wanted) == 128


@pytest.mark.parametrize("scheme", FORMATS)
def test_weights_of_every_format_are_dequantised(host: _HostSession, scheme: str) -> None:
    """By the bench's own tables as by the library, with blocks that are not whole."""
    one = host.weights(130, 144).otherwise(FORMATS[scheme])
    assert one is host.weights(130, 144).otherwise(FORMATS[scheme])
    exact = one.dequantized(slice(None))
    every, q = slice(0, 130), one.quantized
    assert np.array_equal(exact, q.widened(every, slice(0, 144)) * q.row_scale(every)[:, None].astype(np.float64))
    assert np.array_equal(one.dequantized(slice(1, None, 3)), exact[1::3])
    w = measure.normal((130, 144), 130, 144, 0) * np.float32(144**-0.5)
    assert measure.relative_l2(exact, w) < (0.15 if "FP4" in scheme else 0.04)
    again = one.fresh()
    assert again.scheme == q.scheme and not np.shares_memory(again.codes, q.codes)
    assert np.array_equal(again.dequantize("float64"), q.dequantize("float64"))


@pytest.mark.usefixtures("host")
def test_blocks_of_128_by_128_have_the_scale_of_their_largest_value() -> None:
    w = measure.normal((130, 300), 5)
    w[129, 299], w[0, 127] = 60.0, -90.0
    q = bench_block_linear.by_blocks(w)
    assert q.scheme == "FP8A16" and q.block == (128, 128) and q.scale.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        largest = np.abs(w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]).max()
        assert q.scale[i, j] == largest / np.float32(448)
    assert q.dequantize()[[129, 0], [299, 127]] == pytest.approx([60.0, -90.0])


def test_formats_are_measured_in_one_group(host: _HostSession, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [(scheme, name) for name in ("cufp8", "cufp8-fp16") for scheme in FORMATS]
    monkeypatch.setattr(bench_block_linear, "names", lambda *cell: [*names, ("NVFP4A16", "humming")])

    def missing(weights: Any, x: Any) -> Any:
        raise ImportError("no Humming here")

    monkeypatch.setattr(rivals, "humming", missing)
    monkeypatch.setattr(measure, "GRAPH_SECONDS", 2e-6)  # two calls, for they are NumPy's
    done = bench_block_linear.group(host, 200, 144, 3)
    assert isinstance(done["NVFP4A16", "humming"], ImportError)
    assert [(row["scheme"], row["contender"]) for row in host.written] == names
    for row in host.written:
        assert row["error"] == pytest.approx(1.7e-3 if row["contender"] == "cufp8" else 2.1e-4, rel=0.2)
    nbytes = {row["scheme"]: row["note"]["weight_bytes"] for row in host.written}
    codes = 200 * 144
    assert nbytes == {
        "FP8A16": codes + 4 * 200,
        "NVFP4A16": codes // 2 + 200 * 9 + 4,
        "MXFP4A16": codes // 2 + 200 * 5,
        "MXFP8A16": codes + 200 * 5,
        "FP8A16 128x128": codes + 4 * 2 * 2,
    }

    monkeypatch.setitem(bench_block_linear.LARGEST_ERROR, "bfloat16", 1e-3)
    done = bench_block_linear.group(host, 200, 144, 3)
    assert "MXFP4A16 cufp8: relative L2 error" in str(done["MXFP4A16", "cufp8"])
    assert done["MXFP4A16", "cufp8-fp16"].seconds


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4", "MXFP4", "MXFP8"])
def test_layers_that_quantise_x_are_measured(host: _HostSession, monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setattr(bench_scaled_mm.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(measure, "GRAPH_SECONDS", 2e-6)
    bench_scaled_mm.layer_group(host, scheme, 3, 200, 160)
    *names, rival = bench_scaled_mm.layer_names(scheme)
    assert [row["contender"] for row in host.written] == names and rival == "torch-linear-bf16"
    assert set(table.BLOCK_LAYERS) == set(bench_scaled_mm.QUANTIZERS)
    for row in host.written:
        assert row["scheme"] == scheme and row["error"] == pytest.approx(1.7e-3, rel=0.2)


@pytest.fixture
def torch() -> Any:
    """Imported before `host` puts NumPy in CuPy's place, which torch would stumble over."""
    return pytest.importorskip("torch")


def test_humming_gets_the_same_codes_and_scales(torch: Any, host: _HostSession) -> None:
    for scheme, size, dtype in (("NVFP4A16", 16, torch.float8_e4m3fn), ("MXFP4A16", 32, torch.float8_e8m0fnu)):
        one = host.weights(8, 96).otherwise(FORMATS[scheme])
        tensors = rivals.humming_tensors(one)
        assert tensors["weight"].shape == (8, 12) and tensors["weight"].dtype == torch.int32
        scale = tensors["weight_scale"]
        assert scale.shape == (8, 96 // size) and scale.dtype == dtype
        word = int(tensors["weight"].view(torch.int64)[3, 5]) & (2**64 - 1)
        codes = torch.tensor([word >> 4 * i & 15 for i in range(16)])
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * (1 - 2 * (codes >> 3))
        second = tensors["weight_scale_2"] if scheme == "NVFP4A16" else 1.0
        found = values * scale[3, 80 // size].float() * second
        assert found.numpy() == pytest.approx(one.dequantized(slice(3, 4))[0, 80:96])
        assert ("weight_scale_2" in tensors) == (scheme == "NVFP4A16")
    channel = rivals.humming_tensors(host.weights(8, 96))
    assert channel["weight"].shape == (8, 24) and channel["weight_scale"].dtype == torch.bfloat16


# --- loading ---------------------------------------------------------------------------------------------


def test_loading_is_measured_and_its_memory_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with layers in small: what the rows say, not how fast it is."""
    for name, value in {"N": 256, "K": 128, "LAYERS": 5, "ROUNDS": 2}.items():
        monkeypatch.setattr(bench_load, name, value)
    load, ballast = cufp8.load, 64 << 20
    monkeypatch.setattr(bench_load.cufp8, "load", lambda path, device=None: load(path, device="cpu"))

    def layers(folder: Path, threads: int) -> float:
        held = np.ones(ballast if threads == 1 else 1, np.uint8)
        with cufp8.load(folder) as checkpoint:
            assert [entry.linear().shape for entry in checkpoint.values()] == [(256, 128)] * 5
        return 1e-3 * threads + 0.0 * held[0]

    monkeypatch.setattr(bench_load, "load_all", layers)
    monkeypatch.setattr(bench_load, "pinned_copy", lambda nbytes: lambda: None)
    monkeypatch.setattr(bench_load, "timed", lambda call: 0.5e-3)

    class Session:
        written: list[Any] = []  # noqa: RUF012

        def forget(self) -> None: ...

        def row(self, name: str, measured: Any, **problem: Any) -> dict[str, Any]:
            return {"contender": name, "note": measured.note, "time_us": measured.time_us}

        def write(self, bench: str, rows: list[Any]) -> None:
            assert bench == "load"
            self.written += rows

    done = bench_load.group(Session(), tmp_path)
    assert list(done) == list(bench_load.WHAT) and all(len(one.seconds) == 2 for one in done.values())
    nbytes = 5 * (256 * 128 + 4 * 256)
    assert {one.note["bytes"] for one in done.values()} == {nbytes}
    assert [done[name].note["share"] for name in ("pinned-copy", "cufp8", "cufp8-two-threads")] == [1.0, 0.5, 0.25]
    assert done["cufp8"].note["anonymous_mib"] >= 31 > done["pinned-copy"].note["anonymous_mib"]
    assert "gb_s" not in done["cufp8-open"].note
    text = "\n".join(table.load_times({"rows": Session.written}))
    assert "5 finished layers" in text and "| `entry.linear()` of each module | 0.2 | 50 % |" in text


# --- what `cufp8 bench` prints -----------------------------------------------------------------------------


def test_the_sentence(data: dict[str, Any]) -> None:
    assert command.sentence(data, "bfloat16") == (
        "On NVIDIA H200, M = 1, cufp8 reads weights at 50 % of what the memory gives (4.00 TB/s) and runs 2.50 times "
        "as fast as F.linear in bfloat16."
    )
    data["rows"] += [
        _row("cufp8", 1.0, n=999),
        _row("torch-linear-bf16", 1.8, n=999),
        _row("torch-linear-bf16", 2.0, 16),
    ]
    assert command.sentence(data, "bfloat16").endswith(
        "at 50 to 100 % of what the memory gives (4.00 TB/s) and runs 1.80 to 2.50 times as fast as F.linear in "
        "bfloat16; F.linear is faster in 1 of 3 cells, from M = 16 on."
    )
    data["rows"] = [row for row in data["rows"] if row["contender"] == "cufp8"]
    assert "F.linear" not in command.sentence(data, "bfloat16")


def test_the_table_of_the_command(data: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    def lines(without_torch: str | None) -> list[str]:
        for part in command.report(data, "bfloat16", without_torch):
            Console(width=120, highlight=False, markup=False).print(part)
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    assert "1000 x 3996 1 gemv 2.00 2.00 50 % 5.00 2.50x" in lines(None)
    data["rows"] = [row for row in data["rows"] if row["contender"] == "cufp8"]
    data["rows"].append(_row("cufp8-eager", 3.0, 16))
    found = lines("torch is not installed")
    assert "1000 x 3996 16 gemv 4.00 1.00 25 % 3.00" in found
    assert "F.linear was not measured: torch is not installed." in " ".join(found)


class _Session:
    """Stands for a GPU's session."""

    gpu, run_id, run = "NVIDIA H200", "first", RUN

    def __init__(self, torch: bool) -> None:
        self.without_torch = None if torch else "as asked"

    def rows(self, done: dict[str, Any], m: int, n: int, k: int) -> list[Any]:
        return [_row(name, one, m, n=n, k=k) for name, one in done.items() if isinstance(one, float)]


def test_the_command_measures_prints_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import cufp8.bench.session
    from cufp8 import cli

    def cell(session: Any, n: int, k: int, m: int, names: list[str]) -> dict[str, Any]:
        if m == 9:
            raise MemoryError("out of memory")
        return {name: 3.0 if name.startswith("cufp8") else 5.0 for name in names}

    monkeypatch.setattr(runtime, "why_not", lambda: None)
    monkeypatch.setattr(cufp8.bench.session, "Session", _Session)
    monkeypatch.setattr(linear, "cell", cell)
    monkeypatch.setattr(linear, "eager_differs", lambda n, k, m, dtype: m > 4)
    path = tmp_path / "deep" / "mine.json"
    arguments = ["bench", "--shapes", "1024x2048", "2048X1024", "--m", "8", "1", "--json", str(path)]
    assert cli.main(arguments) == 0
    assert "2048 x 1024" in capsys.readouterr().out
    found = results.load(path)
    assert results.faults(found) == []
    assert [(r["n"], r["m"], r["contender"]) for r in found["rows"][:5]] == [
        (1024, 1, "cufp8"),
        (1024, 1, "torch-linear-bf16"),
        (1024, 8, "cufp8"),
        (1024, 8, "cufp8-eager"),
        (1024, 8, "torch-linear-bf16"),
    ]

    picture = tmp_path / "mine.svg"
    assert cli.main(["bench", "--m", "1", "9", "--dtype", "float16", "--no-torch", "--plot", str(picture)]) == 1
    said = capsys.readouterr()
    assert "not measured: as asked" in " ".join(said.out.split())
    assert "28672 x 8192, M = 9, all: out of memory" in said.err
    assert picture.read_bytes()[:5] == b"<?xml"

    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", str(picture)]) == 1
    assert "install cufp8[plot]" in capsys.readouterr().err


@pytest.mark.parametrize("shapes", [1, 4, 9])
def test_a_picture_of_any_number_of_shapes(tmp_path: Path, data: dict[str, Any], shapes: int) -> None:
    pytest.importorskip("matplotlib")
    from cufp8.bench.plot import draw

    data["rows"] = [{**row, "n": 1000 + i} for i in range(shapes) for row in data["rows"]]
    draw(data, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
