"""What a run leaves behind: the format of its JSON, how it joins what is already there, figures made of rows.

Pure Python, no GPU. A file holds runs (one per session: date, versions, ceilings) and rows (one per
contender of a problem). Measuring a problem again replaces that problem's rows and leaves the others,
which keep the id of the run they came from: only rows of one run may be compared.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

BENCHES = (
    "linear",
    "block_linear",
    "scaled_mm",
    "grouped_mm",
    "quantize",
    "host",
    "decode_step",
    "model_decode",
    "load",
    "compile",
    "import",
)

RUN_FIELDS = {
    "date": str,
    "driver": str,
    "cuda": str,
    "cupy": str,
    "read_ceiling_tb_s": float,
    "copy_tb_s": float,
}

ROW_FIELDS = (
    "run",
    "scheme",
    "m",
    "n",
    "k",
    "contender",
    "kernel",
    "sources_sha256",
    "time_us",
    "error",
    "note",
)

# The contenders for one dtype of x: ours in a graph, ours queued call by call, torch's.
OURS = {"bfloat16": "cufp8", "float16": "cufp8-fp16"}
EAGER = {"bfloat16": "cufp8-eager", "float16": "cufp8-eager-fp16"}
TORCH = {"bfloat16": "torch-linear-bf16", "float16": "torch-linear-fp16"}

Row = dict[str, Any]
Results = dict[str, Any]


def folder_name(gpu: str) -> str:
    """Name the folder of a GPU: "NVIDIA H200" -> "h200", "NVIDIA GeForce RTX 4090" -> "geforce-rtx-4090"."""
    words = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return words.removeprefix("nvidia-")


def problem(row: Row) -> tuple[Any, ...]:
    """What a group of contenders shares: (scheme, m, n, k)."""
    return row["scheme"], row["m"], row["n"], row["k"]


def groups(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Rows by problem and run, as contender -> row: everything in one of these may be compared."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["run"], *problem(row)), {})[row["contender"]] = row
    return list(found.values())


def weight_bytes(row: Row) -> int:
    """The fewest bytes of FP8 weight a call must read: codes and the float32 scales of the channels."""
    return row["n"] * row["k"] + 4 * row["n"]


def tb_s(row: Row) -> float:
    """TB/s of weight bytes."""
    return weight_bytes(row) / row["time_us"] / 1e6


def microseconds(time_us: float) -> str:
    """Three digits that mean something: 4.38, 31.0, 123."""
    return f"{time_us:.{2 if time_us < 9.995 else 1 if time_us < 99.95 else 0}f}"


def _order(row: Row) -> tuple[Any, ...]:
    m, n, k = (row[name] or 0 for name in "mnk")
    return row["scheme"] or "", n * k, n, m


def merge(old: Results | None, gpu: str, run_id: str, run: dict[str, Any], rows: Iterable[Row]) -> Results:
    """Put the rows of one run in the place of all older rows of the same problems.

    Parameters
    ----------
    old : dict or None
        What the file holds so far.
    gpu : str
        The GPU's name as its driver gives it.
    run_id, run
        The session that measured `rows`, and its fields RUN_FIELDS.
    rows : iterable of dict
        New rows, whole groups: a contender that is missing from them is dropped from its problem.

    Returns
    -------
    dict
        The file's new content: problems in the order of size, contenders in the order measured;
        runs that no row belongs to any more are gone.

    Raises
    ------
    ValueError
        If `old` belongs to another GPU.
    """
    rows = [{"run": run_id, **row} for row in rows]
    if old and old["gpu"] != gpu:
        raise ValueError(f"results: the file belongs to {old['gpu']}; this run is of {gpu}.")
    measured = {problem(row) for row in rows}
    kept = [row for row in (old or {"rows": []})["rows"] if problem(row) not in measured]
    every = sorted(kept + rows, key=_order)  # a stable sort: contenders stay as they came
    runs = {**(old or {"runs": {}})["runs"], run_id: run}
    used = {row["run"] for row in every}
    return {
        "gpu": gpu,
        "runs": {name: runs[name] for name in sorted(runs) if name in used},
        "rows": [{name: row[name] for name in ROW_FIELDS} for row in every],
    }


def dumps(results: Results) -> str:
    """Write JSON with one run and one row a line, so that a new run is a short diff; NaN raises ValueError."""

    def line(value: object) -> str:
        return json.dumps(value, allow_nan=False)

    runs = ",\n".join(f"  {line(name)}: {line(run)}" for name, run in results["runs"].items())
    rows = ",\n".join(f"  {line(row)}" for row in results["rows"])
    return f'{{\n "gpu": {line(results["gpu"])},\n "runs": {{\n{runs}\n }},\n "rows": [\n{rows}\n ]\n}}\n'


def load(path: Path) -> Results | None:
    """Read a results file; None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def save(path: Path, results: Results) -> None:
    """Write a results file in one step: a session that is cut off leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(dumps(results), encoding="utf-8")
    os.replace(beside, path)


def files(folder: Path) -> Iterator[tuple[str, str, Results]]:
    """Every file <gpu>/<bench>.json of a folder as (GPU folder, bench, content), in a fixed order."""
    for path in sorted(folder.glob("*/*.json")):
        results = load(path)
        assert results is not None
        yield path.parent.name, path.stem, results


def faults(results: Any) -> list[str]:
    """What in a file's content breaks the format; an empty list if nothing does."""
    if not isinstance(results, dict) or set(results) != {"gpu", "runs", "rows"}:
        return ['the file is not {"gpu", "runs", "rows"}']
    found = []
    for name, run in results["runs"].items():
        if set(run) != set(RUN_FIELDS):
            found.append(f"run {name}: fields {sorted(run)}")
            continue
        for field, kind in RUN_FIELDS.items():
            if not isinstance(run[field], kind):
                found.append(f"run {name}: {field} is {run[field]!r}, not a {kind.__name__}")
            elif kind is float and not (math.isfinite(run[field]) and run[field] > 0):
                found.append(f"run {name}: {field} is {run[field]!r}")
    if set(results["runs"]) != {row.get("run") for row in results["rows"]}:
        found.append("runs and the rows' run ids differ")
    seen = set()
    for i, row in enumerate(results["rows"]):
        if tuple(row) != ROW_FIELDS:
            found.append(f"row {i}: fields {list(row)}")
            continue
        key = (*problem(row), row["contender"], row["kernel"])
        if key in seen:
            found.append(f"row {i}: {key} is there twice")
        seen.add(key)
        for name in "mnk":
            if row[name] is not None and (type(row[name]) is not int or row[name] < 0):
                found.append(f"row {i}: {name} is {row[name]!r}")
        if not _positive(row["time_us"]):
            found.append(f"row {i}: time_us is {row['time_us']!r}")
        if row["error"] is not None and not (_number(row["error"]) and row["error"] >= 0):
            found.append(f"row {i}: error is {row['error']!r}")
        if row["sources_sha256"] is not None and not re.fullmatch("[0-9a-f]{64}", str(row["sources_sha256"])):
            found.append(f"row {i}: sources_sha256 is {row['sources_sha256']!r}")
        if (row["kernel"] is None) != (row["sources_sha256"] is None):
            found.append(f"row {i}: a kernel of ours comes with its sources_sha256, a rival with neither")
        if not isinstance(row["note"], dict):
            found.append(f"row {i}: note is {row['note']!r}, not an object")
    return found


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _number(value) and value > 0  # type: ignore[operator]
