"""Write the README's tables of figures from results/<gpu>/<bench>.json, between two comment lines.

    python benchmarks/table.py             rewrite README.md
    python benchmarks/table.py --check     exit 1 if README.md differs from what the files say
    python benchmarks/table.py --sources   exit 1 if a figure belongs to other sources than these

Pure Python, no GPU. Every ratio is taken between rows of one run.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import results
from results import Results, Row

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
ROOT = Path(__file__).resolve().parent.parent

OURS, RIVAL = "cufp8", "torch-linear-bf16"

# Columns of the Linear table that stand only where some row has them: contender -> heading.
MORE_CONTENDERS = {
    "cufp8-nopdl": "no PDL",
    "cufp8-eager": "eager (cuBLAS)",
    "humming": "Humming",
    "gemlite": "gemlite",
    "fbgemm": "FBGEMM",
}


def microseconds(time_us: float) -> str:
    """Three digits that mean something: 4.38, 31.0, 123."""
    return f"{time_us:.{2 if time_us < 9.995 else 1 if time_us < 99.95 else 0}f}"


def seconds(time_us: float) -> str:
    return f"{time_us / 1e6:.2f}"


def weight_bytes(row: Row) -> int:
    """The fewest bytes of weight a call must read: codes and the float32 scales of the channels."""
    return row["n"] * row["k"] + 4 * row["n"]


def tb_s(row: Row) -> float:
    return weight_bytes(row) / row["time_us"] / 1e6


def shape(row: Row) -> str:
    return f"{row['n']} x {row['k']}"


def layout(heading: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    heading = list(heading)
    rule = "|".join(["---", *["--:"] * (len(heading) - 1)])
    return [f"| {' | '.join(heading)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]


def groups(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Rows by problem and run, as contender -> row: everything in one of these may be compared."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["run"], *results.problem(row)), {})[row["contender"]] = row
    return list(found.values())


def runs_line(data: Results) -> str:
    lines = []
    for run in data["runs"].values():
        lines.append(
            f"{run['date'][:10]}, driver {run['driver']}, CUDA {run['cuda']}, CuPy {run['cupy']}: "
            f"read ceiling {run['read_ceiling_tb_s']:.2f} TB/s, copy {run['copy_tb_s']:.2f} TB/s"
        )
    return "; ".join(dict.fromkeys(lines)) + "."


def linear(data: Results) -> list[str]:
    every = [group for group in groups(data["rows"]) if OURS in group]
    more = [name for name in MORE_CONTENDERS if any(name in group for group in every)]
    half = any("cufp8-fp16" in group for group in every)
    heading = ["N x K", "M", "kernel", "µs", "TB/s", "of the ceiling", "`F.linear`", "faster"]
    heading += [MORE_CONTENDERS[name] for name in more] + ["error"] + ["fp16 (faster)"] * half
    lines = []
    for group in every:
        row = group[OURS]
        rate, ceiling = tb_s(row), data["runs"][row["run"]]["read_ceiling_tb_s"]
        line = [shape(row), str(row["m"]), row["kernel"], f"**{microseconds(row['time_us'])}**"]
        line += [f"{rate:.2f}", f"{100 * rate / ceiling:.0f} %", *_against(group.get(RIVAL), row)]
        line += [microseconds(group[name]["time_us"]) if name in group else "" for name in more]
        line += ["" if row["error"] is None else f"{row['error']:.1e}"]
        if half:
            line.append(_half(group.get("cufp8-fp16"), group.get("torch-linear-fp16")))
        lines.append(line)
    return [
        "Linear, bf16 x, FP8A16 weights: µs a call in one CUDA graph of back-to-back calls, weights cold. "
        "TB/s counts the weight's bytes (codes and scales) alone; `error` is relative L2 against float64 "
        "on the dequantised weight.",
        "",
        *layout(heading, lines),
    ]


def _against(rival: Row | None, row: Row) -> list[str]:
    if rival is None:
        return ["", ""]
    return [microseconds(rival["time_us"]), f"{rival['time_us'] / row['time_us']:.2f}x"]


def _half(ours: Row | None, rival: Row | None) -> str:
    if ours is None:
        return ""
    ratio = f" ({rival['time_us'] / ours['time_us']:.2f}x)" if rival else ""
    return microseconds(ours["time_us"]) + ratio


def host(data: Results) -> list[str]:
    every = groups(data["rows"])
    names = list(dict.fromkeys(row["contender"] for row in data["rows"]))
    heads = [f"M = {group[next(iter(group))]['m']}" for group in every]
    lines = []
    for name in names:
        cells = [microseconds(group[name]["time_us"]) if name in group else "" for group in every]
        what = next(group[name]["note"].get("what", name) for group in every if name in group)
        lines.append([what, *cells])
    return ["Host time of one call, µs:", "", *layout(["call", *heads], lines)]


QUANTIZERS = {"cufp8": "", "cufp8-fp32": "", "cufp8-call": ", `quantize(w)` as a whole"}


def quantize(data: Results) -> list[str]:
    lines = []
    for row in data["rows"]:
        if row["contender"] in QUANTIZERS:
            note = row["note"]
            line = [shape(row), note["w_dtype"] + QUANTIZERS[row["contender"]], microseconds(row["time_us"])]
            lines.append([*line, f"{note['tb_s']:.2f}", f"{100 * note['copy_share']:.0f} %"])
    heading = ["N x K", "from", "µs", "TB/s", "of the copy kernel"]
    return ["Quantising a weight on the GPU, bytes read + written:", "", *layout(heading, lines)]


def compile_times(data: Results) -> list[str]:
    lines = [[f"`{row['kernel']}`", seconds(row["time_us"])] for row in data["rows"]]
    return ["NVRTC, once per machine and version, each binary:", "", *layout(["kernel", "s"], lines)]


def import_times(data: Results) -> list[str]:
    lines = [[row["note"].get("what", row["contender"]), seconds(row["time_us"])] for row in data["rows"]]
    return ["Start of a process:", "", *layout(["until", "s"], lines)]


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "linear": linear,
    "host": host,
    "quantize": quantize,
    "import": import_times,
    "compile": compile_times,
}


def render(folder: Path = results.FOLDER) -> str:
    """Write the text that belongs between the two comment lines."""
    files = {(gpu, bench): data for gpu, bench, data in results.files(folder)}
    parts = []
    for gpu in dict.fromkeys(gpu for gpu, _ in files):
        of_gpu = {bench: files[gpu, bench] for bench in SECTIONS if (gpu, bench) in files}
        if not of_gpu:
            continue
        title = next(iter(of_gpu.values()))["gpu"]
        parts.append(f"#### {title}")
        for bench, data in of_gpu.items():
            parts.append("\n".join([*SECTIONS[bench](data), "", f"*{runs_line(data)}*"]))
    return "\n\n".join(parts) if parts else "No figures yet: `make bench` on a GPU measures them."


def insert(readme: str, table: str) -> str:
    """Put `table` between the two comment lines of `readme`.

    Raises
    ------
    ValueError
        If the lines are not there, once each and in order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README needs one line {BEGIN} and, below it, one line {END}.")
    before, rest = readme.split(BEGIN)
    if END not in rest:
        raise ValueError(f"the README has {END} above {BEGIN}.")
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def stale(digests: dict[str, str], folder: Path = results.FOLDER) -> list[str]:
    """Figures whose kernel's sources have changed since: "h200/linear: gemv, 12 rows"."""
    count: dict[str, int] = {}
    for gpu, bench, data in results.files(folder):
        for row in data["rows"]:
            if row["kernel"] is not None and digests.get(row["kernel"]) != row["sources_sha256"]:
                name = f"{gpu}/{bench}: {row['kernel']}"
                count[name] = count.get(name, 0) + 1
    return [f"{name}, {rows} rows" for name, rows in count.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; exit 1 on a difference")
    what.add_argument("--sources", action="store_true", help="exit 1 if figures are of other sources")
    options = parser.parse_args(arguments)

    if options.sources:
        sys.path.insert(0, str(ROOT))
        from cufp8 import runtime

        old = stale(runtime.digests(), options.results)
        print("\n".join(["measured with other sources:", *old]) if old else "all figures are of these sources")
        return 1 if old else 0

    try:
        readme = options.readme.read_text(encoding="utf-8")
        wanted = insert(readme, render(options.results))
    except (OSError, ValueError) as wrong:
        print(f"table: {wrong}", file=sys.stderr)
        return 1
    if options.check:
        difference = difflib.unified_diff(readme.splitlines(), wanted.splitlines(), "README.md", "results", n=0)
        lines = list(difference)
        print("\n".join([*lines[:40], "run `python benchmarks/table.py`"]) if lines else "README.md is in step")
        return 1 if readme != wanted else 0
    options.readme.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
