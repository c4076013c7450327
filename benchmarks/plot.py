"""Draw TB/s over M, a panel a shape, with the read ceiling as a line: results/<gpu>/linear.json -> linear.png.

    python benchmarks/plot.py [--gpu h200] [--out picture.png]

Needs matplotlib, which nothing else here does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import results
from table import tb_s

STYLES = {
    "cufp8": {"color": "#76b900", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "cufp8-nopdl": {"color": "#76b900", "marker": "o", "linestyle": ":"},
    "torch-linear-bf16": {"color": "#666666", "marker": "s"},
    "humming": {"color": "#d95f02", "marker": "^"},
    "gemlite": {"color": "#7570b3", "marker": "v"},
    "fbgemm": {"color": "#e7298a", "marker": "x"},
}


def draw(data: results.Results, out: Path) -> None:
    """One panel a shape; every contender's rate is the FP8 weight's bytes over its time, so that higher is faster."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in data["rows"]))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(3.4 * len(shapes), 3.4), sharey=True, squeeze=False)
    ceiling = max(run["read_ceiling_tb_s"] for run in data["runs"].values())
    for panel, (n, k) in zip(panels[0], shapes, strict=True):
        for name, style in STYLES.items():
            rows = [r for r in data["rows"] if (r["n"], r["k"], r["contender"]) == (n, k, name)]
            if rows:
                panel.plot([r["m"] for r in rows], [tb_s(r) for r in rows], label=name, **style)
        panel.axhline(ceiling, color="black", linestyle="--", linewidth=1, label="read ceiling")
        panel.set_xscale("log", base=2)
        ticks = sorted({row["m"] for row in data["rows"] if (row["n"], row["k"]) == (n, k)})
        panel.set_xticks(ticks, [str(m) for m in ticks])
        panel.set_title(f"{n} x {k}")
        panel.set_xlabel("M (rows of x)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("FP8 weight bytes / time, TB/s")
    panels[0][0].set_ylim(bottom=0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.suptitle(f"y = x @ w.T on {data['gpu']}, cold weights")
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(out, dpi=100)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", default="h200", help="a folder of results/")
    parser.add_argument("--results", type=Path, default=results.FOLDER)
    parser.add_argument("--out", type=Path, help="default: beside the JSON file")
    options = parser.parse_args()
    source = options.results / options.gpu / "linear.json"
    data = results.load(source)
    if data is None:
        parser.error(f"there is no {source}")
    draw(data, options.out or source.with_suffix(".png"))


if __name__ == "__main__":
    main()
