"""`cufp8 bench`: time linear layers on this GPU, print a table and a sentence, keep JSON and a picture if asked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from cufp8 import runtime
from cufp8.bench import results
from cufp8.bench.results import EAGER, OURS, TORCH, Results, Row, microseconds, tb_s


def run(
    shapes: Iterable[tuple[int, int]],
    rows: Iterable[int],
    dtype: str = "bfloat16",
    torch: bool = True,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Measure every shape with every number of rows.

    Parameters
    ----------
    shapes : iterable of (int, int)
        N and K of the weights.
    rows : iterable of int
        M, the rows of x.
    dtype : str
        Of x and y: "bfloat16" or "float16".
    torch : bool
        Compare with F.linear where torch can use the GPU; False: torch is not imported.
    json, plot : Path, optional
        Where the results and their picture go.

    Returns
    -------
    int
        0; 1 if some of the cells could not be measured.

    Raises
    ------
    RuntimeError
        If there is no GPU, or no matplotlib for `plot`.
    ValueError
        If matplotlib cannot write such a picture.
    """
    if why_not := runtime.why_not():
        raise RuntimeError(f"bench measures on a GPU, and none can be used: {why_not}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise RuntimeError("--plot needs matplotlib; install cufp8[plot].")

    from rich.console import Console
    from rich.progress import Progress

    from cufp8.bench import linear
    from cufp8.bench.measure import without_arrays
    from cufp8.bench.session import Session

    console, errors = Console(highlight=False, markup=False), Console(stderr=True, highlight=False, markup=False)
    cells = [(n, k, m) for n, k in dict.fromkeys(shapes) for m in sorted(set(rows))]
    measured: list[Row] = []
    wrong: list[str] = []
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("the memory's ceiling", total=len(cells))
        session = Session(torch)
        for n, k, m in cells:
            progress.update(task, description=f"{n} x {k}, M = {m}")
            names = [OURS[dtype]]
            names += [EAGER[dtype]] * linear.eager_differs(n, k, m, dtype)
            names += [TORCH[dtype]] * (session.without_torch is None)
            try:
                done = linear.cell(session, n, k, m, names)
            except Exception as e:  # such as no memory for this shape: the others may have it
                done = {"all": without_arrays(e)}
            measured += session.rows(done, m, n, k)
            for name, result in done.items():
                if isinstance(result, Exception):
                    wrong.append(f"{n} x {k}, M = {m}, {name}: {result or type(result).__name__}")
            progress.advance(task)
    data = {"gpu": session.gpu, "runs": {session.run_id: session.run}, "rows": measured}
    ours = [row for row in measured if row["contender"] == OURS[dtype]]
    if ours:
        for line in report(data, dtype, session.without_torch):
            console.print(line)
        if json is not None:
            results.save(json, data)
        if plot is not None:
            from cufp8.bench.plot import draw

            plot.parent.mkdir(parents=True, exist_ok=True)
            draw(data, plot)
    for line in wrong:
        errors.print(f"cufp8: not measured: {line}", soft_wrap=True)
    return 1 if wrong else 0


def report(data: Results, dtype: str, without_torch: str | None) -> list[object]:
    """The table, what its columns mean, and the sentence, as rich prints them."""
    from rich.table import Table
    from rich.text import Text

    groups = [group for group in results.groups(data["rows"]) if OURS[dtype] in group]
    ceiling = next(iter(data["runs"].values()))["read_ceiling_tb_s"]
    eager, rival = (any(names[dtype] in group for group in groups) for names in (EAGER, TORCH))
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nN x K", no_wrap=True)
    headings = ["\nM", "\nkernel", "us a\ncall", "weights\nTB/s", "of the\nceiling"]
    headings += ["us a call\nnot in a graph"] * eager + ["F.linear\nus", "\nfaster"] * rival
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for group in groups:
        row = group[OURS[dtype]]
        cells = [f"{row['n']} x {row['k']}", str(row["m"]), row["kernel"], microseconds(row["time_us"])]
        cells += [f"{tb_s(row):.2f}", f"{100 * tb_s(row) / ceiling:.0f} %"]
        if eager:
            cells.append(microseconds(group[EAGER[dtype]]["time_us"]) if EAGER[dtype] in group else "")
        if rival and TORCH[dtype] in group:
            time_us = group[TORCH[dtype]]["time_us"]
            cells += [microseconds(time_us), f"{time_us / row['time_us']:.2f}x"]
        table.add_row(*cells)
    notes = "us: a call in a CUDA graph of back-to-back calls, weights cold. TB/s: bytes of codes and scales."
    if without_torch:
        notes += f" F.linear was not measured: {without_torch}."
    return [table, Text(notes, style="dim"), sentence(data, dtype)]


def sentence(data: Results, dtype: str) -> str:
    """What the smallest M says, and where F.linear is faster."""
    ours, rival = OURS[dtype], TORCH[dtype]
    groups = [group for group in results.groups(data["rows"]) if ours in group]
    ceiling = next(iter(data["runs"].values()))["read_ceiling_tb_s"]
    m = min(group[ours]["m"] for group in groups)
    few = [group for group in groups if group[ours]["m"] == m]
    shares = _range([f"{100 * tb_s(group[ours]) / ceiling:.0f}" for group in few])
    text = f"On {data['gpu']}, M = {m}, cufp8 reads weights at {shares} % of what the memory gives ({ceiling:.2f} TB/s)"
    ratios = [group[rival]["time_us"] / group[ours]["time_us"] for group in few if rival in group]
    if not ratios:
        return text + "."
    text += f" and runs {_range([f'{ratio:.2f}' for ratio in ratios])} times as fast as F.linear in {dtype}"
    both = [group for group in groups if rival in group]
    slower = [group for group in both if _best(group, dtype) > group[rival]["time_us"]]
    if slower:
        least = min(group[ours]["m"] for group in slower)
        text += f"; F.linear is faster in {len(slower)} of {len(both)} cells, from M = {least} on"
    return text + "."


def _best(group: dict[str, Row], dtype: str) -> float:
    return min(group[name]["time_us"] for name in (OURS[dtype], EAGER[dtype]) if name in group)


def _range(figures: list[str]) -> str:
    low, high = min(figures, key=float), max(figures, key=float)
    return low if low == high else f"{low} to {high}"
