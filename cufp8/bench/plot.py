"""TB/s over M, a panel a shape, with the read ceiling as a line. Needs matplotlib, the extra `plot`."""

from __future__ import annotations

import math
from pathlib import Path

from cufp8.bench import results
from cufp8.bench.results import EAGER, OURS, TORCH, tb_s

STYLES = {
    "cufp8": {"color": "#76b900", "marker": "o", "linewidth": 2.2, "zorder": 3},
    "cufp8-eager": {"color": "#76b900", "marker": "D", "linestyle": "--"},
    "cufp8-nopdl": {"color": "#76b900", "marker": "o", "linestyle": ":"},
    "cufp8-invariant": {"color": "#a6d96a", "marker": ".", "linestyle": ":"},
    "F.linear": {"color": "#666666", "marker": "s"},
    "humming": {"color": "#d95f02", "marker": "^"},
    "gemlite": {"color": "#7570b3", "marker": "v"},
    "fbgemm": {"color": "#e7298a", "marker": "x"},
}


def draw(data: results.Results, out: Path) -> None:
    """Draw every contender's rate: the FP8 weight's bytes over its time, so that higher is faster.

    Parameters
    ----------
    data : dict
        What a file of the bench "linear" holds. Rows in float16 are drawn where there are none in bfloat16.
    out : Path
        The picture; its ending is a format of matplotlib's, such as .png or .svg.

    Raises
    ------
    ValueError
        If matplotlib does not know the ending.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = data["rows"]
    dtype = "bfloat16" if any(row["contender"] == OURS["bfloat16"] for row in every) else "float16"
    names = {OURS[dtype]: "cufp8", EAGER[dtype]: "cufp8-eager", TORCH[dtype]: "F.linear"}
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in every))
    wide = len(shapes) if len(shapes) <= 4 else math.ceil(len(shapes) / 2)
    high = math.ceil(len(shapes) / wide)
    figure, grid = pyplot.subplots(
        high, wide, figsize=(3.4 * wide, 0.4 + 3 * high), sharey=True, squeeze=False, layout="constrained"
    )
    ceiling = max(run["read_ceiling_tb_s"] for run in data["runs"].values())
    handles = {}
    for panel, shape in zip(grid.flat, shapes, strict=False):
        here = [row for row in every if (row["n"], row["k"]) == shape]
        for name, style in STYLES.items():
            rows = [row for row in here if names.get(row["contender"], row["contender"]) == name]
            if rows:
                (handles[name],) = panel.plot([r["m"] for r in rows], [tb_s(r) for r in rows], **style)
        handles["read ceiling"] = panel.axhline(ceiling, color="black", linestyle="--", linewidth=1)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["m"] for row in here})
        panel.set_xticks(ticks, [str(m) for m in ticks], fontsize=7)
        panel.set_title(f"{shape[0]} x {shape[1]}")
        panel.set_xlabel("M (rows of x)")
        panel.grid(alpha=0.3)
    for panel in list(grid.flat)[len(shapes) :]:
        panel.set_axis_off()
    for panel in grid[:, 0]:
        panel.set_ylabel("FP8 weight bytes / time, TB/s")
    grid[0][0].set_ylim(bottom=0)
    figure.suptitle(f"y = x @ w.T on {data['gpu']}, x in {dtype}, cold weights")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    try:
        figure.savefig(out, dpi=100)
    finally:
        pyplot.close(figure)
