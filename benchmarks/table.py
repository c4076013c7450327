"""Write the README's tables of figures from results/<gpu>/<bench>.json, between two comment lines.

README.md shows some cells of the linear layers; results/README.md, which this makes as a whole, shows all.

    python benchmarks/table.py             rewrite both
    python benchmarks/table.py --check     exit 1 if one differs from what the files say
    python benchmarks/table.py --sources   exit 1 if a figure belongs to other sources than these

Pure Python, no GPU. Every ratio is taken between rows of one run.
"""

from __future__ import annotations

import argparse
import difflib
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout's cufp8, whether or not it is installed

from cufp8.bench import results  # noqa: E402
from cufp8.bench.results import Results, Row, groups, microseconds, tb_s  # noqa: E402

BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
FOLDER = ROOT / "benchmarks" / "results"

OURS, EAGER, RIVAL = (names["bfloat16"] for names in (results.OURS, results.EAGER, results.TORCH))

# README's part of the linear layers: M of its columns, and those whose TB/s it tells.
FEW_ROWS, DECODE_ROWS = (1, 4, 16, 32, 64, 256, 1024, 4096), (1, 16)
FEW_SHAPES = ((4096, 4096), (6144, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192))

# Columns of the complete table that stand only where some row has them: contender -> heading.
MORE_CONTENDERS = {
    "cufp8-nopdl": "no PDL",
    "cufp8-invariant": "batch-invariant",
    "cufp8-eager": "eager (cuBLAS)",
    "humming": "Humming",
    "gemlite": "gemlite",
    "fbgemm": "FBGEMM",
}


def seconds(time_us: float) -> str:
    return f"{time_us / 1e6:.2f}"


def shape(row: Row) -> str:
    return f"{row['n']} x {row['k']}"


def layout(heading: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    heading = list(heading)
    rule = "|".join(["---", *["--:"] * (len(heading) - 1)])
    return [f"| {' | '.join(heading)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]


def runs_line(data: Results) -> str:
    lines = []
    for run in data["runs"].values():
        lines.append(
            f"{run['date'][:10]}, driver {run['driver']}, CUDA {run['cuda']}, CuPy {run['cupy']}: "
            f"read ceiling {run['read_ceiling_tb_s']:.2f} TB/s, copy {run['copy_tb_s']:.2f} TB/s"
        )
    return "; ".join(dict.fromkeys(lines)) + "."


def linear(data: Results) -> list[str]:
    """A row a shape, a column an M: what README shows."""
    by_shape: dict[tuple[int, int], dict[int, dict[str, Row]]] = {}
    for group in groups(data["rows"]):
        if OURS in group:
            row = group[OURS]
            by_shape.setdefault((row["n"], row["k"]), {})[row["m"]] = group
    shapes = [one for one in by_shape if one in FEW_SHAPES] or list(by_shape)
    columns = [m for m in FEW_ROWS if any(m in by_shape[one] for one in shapes)]
    decode = [m for m in DECODE_ROWS if m in columns]
    heading = ["N x K", *[f"M = {m}" for m in columns], *[f"TB/s, M = {m}" for m in decode]]
    lines = []
    for n, k in shapes:
        cells = by_shape[n, k]
        line = [f"{n} x {k}", *[_time(cells[m]) if m in cells else "" for m in columns]]
        lines.append(line + [_rate(cells[m][OURS], data) if m in cells else "" for m in decode])
    text = (
        "Linear, bf16 x, FP8A16 weights: µs a call in one CUDA graph of back-to-back calls, weights cold, and how many "
        "times as fast as `F.linear` in bf16 that is. TB/s counts the weight's bytes (codes and scales) alone, and is "
        "followed by its share of the read ceiling. "
    )
    if any(EAGER in group for one in shapes for m, group in by_shape[one].items() if m in columns):
        text += "* a call that is not in a graph: cuBLAS serves there, and in a graph another kernel. "
    text += "Every cell, with errors, float16 and the rivals: [benchmarks/results](benchmarks/results/README.md)."
    return [text, "", *layout(heading, lines)]


def _time(group: dict[str, Row]) -> str:
    """A cell of README's table: of two ways to call, what eager calls take, with a star."""
    row = group.get(EAGER, group[OURS])
    ratio = f" ({group[RIVAL]['time_us'] / row['time_us']:.2f}x)" if RIVAL in group else ""
    return f"{microseconds(row['time_us'])}{'*' if EAGER in group else ''}{ratio}"


def _rate(row: Row, data: Results) -> str:
    rate = tb_s(row)
    return f"{rate:.2f}, {100 * rate / data['runs'][row['run']]['read_ceiling_tb_s']:.0f} %"


def linear_complete(data: Results) -> list[str]:
    """A row a cell, with all that was measured."""
    every = [group for group in groups(data["rows"]) if OURS in group]
    more = [name for name in MORE_CONTENDERS if any(name in group for group in every)]
    half = any("cufp8-fp16" in group for group in every)
    heading = ["N x K", "M", "kernel", "µs", "TB/s", "of the ceiling", "`F.linear`", "faster"]
    heading += [MORE_CONTENDERS[name] for name in more] + ["error"] + ["fp16 (faster)"] * half
    lines = []
    for group in every:
        row = group[OURS]
        line = [shape(row), str(row["m"]), row["kernel"], f"**{microseconds(row['time_us'])}**"]
        line += [*_rate(row, data).split(", "), *_against(group.get(RIVAL), row)]
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


BLOCK_SCHEMES = ("NVFP4A16", "MXFP4A16", "MXFP8A16", "FP8A16 128x128")  # as bench_block_linear.py names them
EIGHT_BITS, CHANNEL = BLOCK_SCHEMES[2:], "FP8A16"  # and what these are compared with


def block_linear(data: Results) -> list[str]:
    """A table a format: a row a shape, a column an M; below it what it is compared with besides."""
    cells: dict[tuple[str, int, int, int], dict[tuple[str, str], Row]] = {}
    for row in data["rows"]:
        cell = cells.setdefault((row["run"], row["n"], row["k"], row["m"]), {})
        cell[row["scheme"], row["contender"]] = row
    errors = {
        dtype: max((row["error"] for row in data["rows"] if row["contender"] == results.OURS[dtype]), default=None)
        for dtype in results.OURS
    }
    most = " and ".join(f"{error:.1e} in {dtype}" for dtype, error in errors.items() if error is not None)
    text = [
        "Linear, bf16 x, weights with block scales, measured as above: the packed weight's bytes (codes and scales) "
        "over the time as a share of the read ceiling, and how many times as fast as `F.linear` in bf16 that is. "
        f"Relative L2 error against float64 on the dequantised weight: at most {most}."
    ]
    for scheme in (scheme for scheme in BLOCK_SCHEMES if any((scheme, OURS) in cell for cell in cells.values())):
        mine = {(n, k, m): cell for (_, n, k, m), cell in cells.items() if (scheme, OURS) in cell}
        columns = sorted({m for _, _, m in mine})
        lines = []
        for n, k in dict.fromkeys((n, k) for n, k, _ in mine):
            there = (mine.get((n, k, m)) for m in columns)
            lines.append([f"{n} x {k}", *("" if cell is None else _share(cell, scheme, data) for cell in there)])
        text += ["", *layout([scheme, *[f"M = {m}" for m in columns]], lines)]
        text += _beside(scheme, mine)
    return text


def _packed_tb_s(row: Row) -> float:
    return row["note"]["weight_bytes"] / row["time_us"] / 1e6


def _share(cell: dict[tuple[str, str], Row], scheme: str, data: Results) -> str:
    """A cell: "88 % (4.21x)"."""
    row, rival = cell[scheme, OURS], cell.get((CHANNEL, RIVAL))
    ratio = f" ({rival['time_us'] / row['time_us']:.2f}x)" if rival else ""
    return f"{100 * _packed_tb_s(row) / data['runs'][row['run']]['read_ceiling_tb_s']:.0f} %{ratio}"


def _beside(scheme: str, cells: dict[tuple[int, int, int], dict[tuple[str, str], Row]]) -> list[str]:
    """The line below a format's table: Humming's time over cufp8's, or bytes/s over those of FP8A16 per channel."""
    if scheme in EIGHT_BITS:
        both = [cell for cell in cells.values() if (CHANNEL, OURS) in cell]
        if not both:
            return []
        rates = [_packed_tb_s(cell[scheme, OURS]) / _packed_tb_s(cell[CHANNEL, OURS]) for cell in both]
        least, median = min(rates), statistics.median(rates)
        what = f"Bytes/s relative to {CHANNEL} with a scale per channel, {len(rates)} cells"
        return ["", f"{what}: least {least:.2f}, median {median:.2f}."]
    ratios: dict[int, list[float]] = {}
    for (_, _, m), cell in cells.items():
        if (scheme, "humming") in cell:
            ratios.setdefault(m, []).append(cell[scheme, "humming"]["time_us"] / cell[scheme, OURS]["time_us"])
    each = ", ".join(f"M = {m} {min(some):.2f}x" for m, some in sorted(ratios.items()))
    return ["", f"Times as fast as Humming in the same format, the least of its shapes: {each}."] if each else []


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


def decode_step(data: Results) -> list[str]:
    lines = []
    for group in groups(data["rows"]):
        if OURS not in group:
            continue
        row = group[OURS]
        time_us, nbytes = row["time_us"], row["note"]["weight_bytes"]
        rate, ceiling = nbytes / time_us / 1e6, data["runs"][row["run"]]["read_ceiling_tb_s"]
        line = [str(row["m"]), f"**{time_us / 1e3:.2f}**", f"{rate:.2f}", f"{100 * rate / ceiling:.0f} %"]
        line.append(f"{row['m'] / time_us * 1e6:,.0f}")
        others = {name: one["time_us"] for name, one in group.items()}
        line += [f"{others[name] / 1e3:.2f}" if name in others else "" for name in ("cufp8-nopdl", RIVAL)]
        lines.append([*line, f"{others[RIVAL] / time_us:.2f}x" if RIVAL in others else ""])
    note = data["rows"][0]["note"]
    heading = ["M", "ms", "TB/s", "of the ceiling", "tokens/s at most", "no PDL", "`F.linear`", "faster"]
    return [
        f"One decoding step through all linear layers of {note['model']}, {note['weight_bytes'] / 1e9:.1f} GB in FP8, "
        "each reading what the one before it wrote, in one CUDA graph. Attention, norms and activations are left out: "
        "M over this time bounds the tokens a second.",
        "",
        *layout(heading, lines),
    ]


QUANTIZERS = {
    "cufp8": "",
    "cufp8-fp32": "",
    "cufp8-call": ", `quantize(w)` as a whole",
    "nvfp4": ", to NVFP4 (w is read twice)",
    "mxfp4": ", to MXFP4",
    "mxfp8": ", to MXFP8",
}


# Forms of activations, as bench_quantize.py names them -> what they are.
ACTIVATIONS = {
    "token": "`quantize_activations`, per token",
    "group": "`quantize_activations`, per group of 128",
    "tensor": "`quantize_activations`, a given scale",
    "tensor-dynamic": "`quantize_activations`, per tensor (x is read twice)",
    "rms-norm-token": "`rms_norm_quantize`, per token",
    "rms-norm-group": "`rms_norm_quantize`, per group of 128",
    "rms-norm-tensor": "`rms_norm_quantize`, a given scale",
    "rms-norm-residual-token": "`rms_norm_quantize` with a residual, per token",
    "silu-mul-token": "`silu_mul_quantize`, per token",
    "silu-mul-group": "`silu_mul_quantize`, per group of 128",
    "silu-mul-tensor": "`silu_mul_quantize`, a given scale",
}
BLOCK_ACTIVATIONS = {
    "nvfp4": "NVFP4, a global scale per token",
    "nvfp4-given": "NVFP4, a given global scale",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
    "mxfp8-e5m2": "MXFP8, e5m2",
}


def quantize(data: Results) -> list[str]:
    tables = [
        ("Quantising a weight on the GPU, bytes read + written:", ["N x K", "from"], []),
        ("Quantising bfloat16 activations to e4m3fn on the GPU, bytes read + written:", ["M x K", "by"], []),
        ("Quantising bfloat16 activations with block scales on the GPU, bytes read + written:", ["M x K", "to"], []),
    ]
    for row in data["rows"]:
        note, name, size = row["note"], row["contender"], f"{row['m']} x {row['k']}"
        if row["n"] is not None:
            if name not in QUANTIZERS:
                continue
            i, size, what = 0, shape(row), note["w_dtype"] + QUANTIZERS[name]
        elif name in ACTIVATIONS:
            i, what = 1, ACTIVATIONS[name]
        elif name in BLOCK_ACTIVATIONS:
            i, what = 2, BLOCK_ACTIVATIONS[name]
        else:
            continue
        share = f"{100 * note['copy_share']:.0f} %"
        tables[i][2].append([size, what, microseconds(row["time_us"]), f"{note['tb_s']:.2f}", share])
    text = []
    for title, heading, lines in tables:
        if lines:
            text += [""] * bool(text) + [title, "", *layout([*heading, "µs", "TB/s", "of the copy kernel"], lines)]
    return text


def compile_times(data: Results) -> list[str]:
    lines = [[f"`{row['kernel']}`", seconds(row["time_us"])] for row in data["rows"]]
    return ["NVRTC, once per machine and version, each binary:", "", *layout(["kernel", "s"], lines)]


def import_times(data: Results) -> list[str]:
    lines = [[row["note"].get("what", row["contender"]), seconds(row["time_us"])] for row in data["rows"]]
    return ["Start of a process:", "", *layout(["until", "s"], lines)]


def load_times(data: Results) -> list[str]:
    rows = {row["contender"]: row for row in data["rows"]}
    lines = []
    for row in rows.values():
        note = row["note"]
        if "gb_s" in note:
            line = [note["what"], f"{note['gb_s']:.1f}", f"{100 * note['share']:.0f} %", f"{note['anonymous_mib']:.0f}"]
            lines.append(line)
    note = data["rows"][0]["note"]
    text = (
        f"A checkpoint of {note['bytes'] / 1e9:.1f} GB in {note['shards']} files, in the page cache, to "
        f"{note['layers']} finished layers on the GPU; MiB by which the process's memory beside files grew."
    )
    if "cufp8-open" in rows:
        text += f" To open it takes {rows['cufp8-open']['time_us'] / 1e3:.1f} ms a file."
    return [text, "", *layout(["", "GB/s", "of the pinned copy", "MiB"], lines)]


# Schemes of scaled_mm, as bench_scaled_mm.py names them -> what they are.
SCHEMES = {
    "tensor-fast": "a scale a tensor, fast_accum",
    "row-fast": "a scale a row, fast_accum",
    "row-full": "a scale a row, float32 every 128",
}
BLOCK_LAYERS = ("NVFP4", "MXFP4", "MXFP8")  # its layers that quantise x in blocks
MANY_ROWS = 1024  # of tokens, from which on arithmetic decides


def beside_rival(group: dict[str, Row], name: str) -> str:
    """Microseconds of a contender, and how many times as fast as `F.linear` that is."""
    if name not in group:
        return ""
    faster = f" ({group[RIVAL]['time_us'] / group[name]['time_us']:.2f}x)" if RIVAL in group and name != RIVAL else ""
    return microseconds(group[name]["time_us"]) + faster


def scaled_mm(data: Results) -> list[str]:
    """Many tokens: TFLOP/s by scheme. Few: us by M. And layers, which quantise x too."""
    problems: dict[tuple[int, int, int], dict[str, dict[str, Row]]] = {}
    for group in groups(data["rows"]):
        row = next(iter(group.values()))
        problems.setdefault((row["n"], row["k"], row["m"]), {})[row["scheme"]] = group
    text = []
    many = {of: found for of, found in problems.items() if of[2] >= MANY_ROWS and SCHEMES.keys() & found}
    if many:
        lines, ratios, worst = [], {scheme: [] for scheme in SCHEMES}, 0.0
        for (n, k, m), found in many.items():
            line = [f"{m} x {n} x {k}"]
            for scheme in SCHEMES:
                group = found.get(scheme, {})
                if OURS not in group:
                    line += ["", "", ""]
                    continue
                row = group[OURS]
                worst = max(worst, row["error"] or 0.0) if scheme == "row-full" else worst
                rivals = [r["time_us"] for name, r in group.items() if name.startswith(("cublaslt", "deepgemm"))]
                if rivals:
                    ratios[scheme].append(min(rivals) / row["time_us"])
                bf16 = [group[RIVAL]["time_us"]] if RIVAL in group else []
                line += [f"{2e-6 * m * n * k / row['time_us']:,.0f}"]
                line += [f"{min(times) / row['time_us']:.2f}x" if times else "" for times in (rivals, bf16)]
            lines.append(line)
        means = [f"{statistics.geometric_mean(found):.2f}x" if found else "" for found in ratios.values()]
        lines.append(["geometric mean", *(cell for mean in means for cell in ("", mean, ""))])
        heading = ["M x N x K", *(part for what in SCHEMES.values() for part in (what, "cuBLASLt", "bf16"))]
        text += [
            "`scaled_mm`, e4m3fn by e4m3fn to bf16, TFLOP/s, and how many times as fast as cuBLASLt's kernel for the "
            "same (`torch._scaled_mm`) and as `F.linear` in bf16, measured in turns with it, that is. Relative L2 "
            f"error against float64 on the operands with float32 sums: at most {worst:.1e}.",
            "",
        ]
        text += layout(heading, lines)
    few = {of: found["row-fast"] for of, found in problems.items() if of[2] < MANY_ROWS and "row-fast" in found}
    if few:
        columns = sorted({m for *_, m in few})
        lines = []
        for n, k in dict.fromkeys(of[:2] for of in few):
            line = [f"{n} x {k}"]
            for m in columns:
                group, all_modes = few.get((n, k, m), {}), problems.get((n, k, m), {})
                if OURS not in group:
                    line.append("")
                    continue
                rivals = [
                    row["time_us"]
                    for scheme in SCHEMES
                    for name, row in all_modes.get(scheme, {}).items()
                    if name.startswith("cublaslt")
                ]
                time_us = group[OURS]["time_us"]
                line.append(microseconds(time_us) + (f" ({min(rivals) / time_us:.2f}x)" if rivals else ""))
            lines.append(line)
        text += [""] * bool(text) + [
            "The same for fewer tokens, a scale a row, fast_accum: µs, and how many times as fast as the fastest of "
            "cuBLASLt's modes, also that with one scale a tensor:",
            "",
        ]
        text += layout(["N x K", *(f"M = {m}" for m in columns)], lines)
    layers = {of: found["FP8_DYNAMIC"] for of, found in problems.items() if OURS in found.get("FP8_DYNAMIC", {})}
    if layers:
        names = {
            "cufp8": "FP8_DYNAMIC",
            "cufp8-fast": "the same, fast_accum",
            "cufp8-fp8a16": "FP8A16",
            RIVAL: "`F.linear`",
        }
        lines = []
        for (n, k, m), group in layers.items():
            lines.append([f"{n} x {k}", str(m), *(beside_rival(group, name) for name in names)])
        text += [""] * bool(text) + [
            "Layers of bf16 x, µs, and how many times as fast as `F.linear` in bf16; FP8_DYNAMIC quantises x in a "
            "kernel of its own before:",
            "",
        ]
        text += layout(["N x K", "M", *names.values()], lines)
    blocks = {of: found for of, found in problems.items() if any(OURS in found.get(s, {}) for s in BLOCK_LAYERS)}
    if blocks:
        lines, worst = [], 0.0
        for (n, k, m), found in blocks.items():
            line = [f"{n} x {k}", str(m)]
            for scheme in BLOCK_LAYERS:
                group = found.get(scheme, {})
                line += [beside_rival(group, name) for name in (OURS, f"{OURS}-{scheme.lower()}a16")]
                worst = max(worst, group[OURS]["error"] or 0.0 if OURS in group else 0.0)
            lines.append(line)
        text += [""] * bool(text) + [
            "Layers of bf16 x that quantise x as their weights are, beside those of the same weights and 16-bit x: µs, "
            "and how many times as fast as `F.linear` in bf16. Relative L2 error against float64 on x and w as "
            f"quantised: at most {worst:.1e}.",
            "",
        ]
        text += layout(["N x K", "M", *(name for scheme in BLOCK_LAYERS for name in (scheme, f"{scheme}A16"))], lines)
    return text


SECTIONS: dict[str, Callable[[Results], list[str]]] = {
    "linear": linear,
    "block_linear": block_linear,
    "decode_step": decode_step,
    "scaled_mm": scaled_mm,
    "host": host,
    "quantize": quantize,
    "load": load_times,
    "import": import_times,
    "compile": compile_times,
}


COMPLETE: dict[str, Callable[[Results], list[str]]] = {"linear": linear_complete}


def render(folder: Path = FOLDER, sections: dict[str, Callable[[Results], list[str]]] = SECTIONS) -> str:
    """Write the text that belongs between the two comment lines, or other sections of the files."""
    files = {(gpu, bench): data for gpu, bench, data in results.files(folder)}
    parts = []
    for gpu in dict.fromkeys(gpu for gpu, _ in files):
        of_gpu = {bench: files[gpu, bench] for bench in sections if (gpu, bench) in files}
        if not of_gpu:
            continue
        title = next(iter(of_gpu.values()))["gpu"]
        parts.append(f"#### {title}")
        for bench, data in of_gpu.items():
            parts.append("\n".join([*sections[bench](data), "", f"*{runs_line(data)}*"]))
    return "\n\n".join(parts) if parts else "No figures yet: `make bench` on a GPU measures them."


def complete(folder: Path = FOLDER) -> str:
    """Write results/README.md."""
    head = "# Every cell of the linear layers\n\nMade by `python benchmarks/table.py` from the JSON files beside it."
    return f"{head}\n\n{render(folder, COMPLETE)}\n"


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


def stale(digests: dict[str, str], folder: Path = FOLDER) -> list[str]:
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
    parser.add_argument("--results", type=Path, default=FOLDER)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="change nothing; exit 1 on a difference")
    what.add_argument("--sources", action="store_true", help="exit 1 if figures are of other sources")
    options = parser.parse_args(arguments)

    if options.sources:
        from cufp8 import runtime

        old = stale(runtime.digests(), options.results)
        print("\n".join(["measured with other sources:", *old]) if old else "all figures are of these sources")
        return 1 if old else 0

    page = options.results / "README.md"
    try:
        readme = options.readme.read_text(encoding="utf-8")
        wanted = {options.readme: insert(readme, render(options.results)), page: complete(options.results)}
        there = {options.readme: readme, page: page.read_text(encoding="utf-8") if page.is_file() else ""}
    except (OSError, ValueError) as wrong:
        print(f"table: {wrong}", file=sys.stderr)
        return 1
    if not options.check:
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
        return 0
    for path, text in wanted.items():
        lines = list(difflib.unified_diff(there[path].splitlines(), text.splitlines(), str(path), "results", n=0))
        if lines:
            print("\n".join([*lines[:40], "run `python benchmarks/table.py`"]))
    if there == wanted:
        print("README.md and results/README.md are in step")
    return 1 if there != wanted else 0


if __name__ == "__main__":
    sys.exit(main())
