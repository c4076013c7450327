"""What `cufp8 inspect` and `cufp8 check` print."""

from __future__ import annotations

import json as jsons
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cufp8.checkpoint import check as checks
from cufp8.checkpoint.reader import Checkpoint


def inspect(checkpoint: Checkpoint, json: bool) -> int:
    """Print what a checkpoint holds, a line for all layers that are alike; 1 if a module cannot be read."""
    facts = checks.inspect(checkpoint)
    broken = [module for module in facts["modules"] if "error" in module]
    if json:
        print(jsons.dumps(facts, indent=2))
        return 1 if broken else 0
    console = Console(highlight=False, markup=False)
    for members in _alike(facts["modules"]):
        console.print(_text(members), soft_wrap=True)
    for module in broken:
        console.print(checks.legible(f"{module['name']} cannot be read: {module['error']}"), soft_wrap=True)
    arrays, count = facts["arrays"], len(facts["modules"])
    others = f"{_many(arrays['count'], 'other tensor')} of {_size(arrays['bytes'])}" if arrays["count"] else "no others"
    console.print(f"{_many(count, 'quantised module')}, {others}, {_size(facts['bytes'])} in all.")
    if facts["cpu"]:
        console.print(f"No GPU is used: {facts['cpu']}", soft_wrap=True)
    return 1 if broken else 0


def _alike(modules: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = {}
    for module in modules:
        if "error" not in module:
            keys = ("family", "declared", "shape", "block")
            key = checks.pattern_of(module["name"]), *(str(module[k]) for k in keys)
            groups.setdefault(key, []).append(module)
    return list(groups.values())


def _text(members: list[dict[str, Any]]) -> str:
    """Three lines about modules that are alike."""
    first, count, served = members[0], len(members), members[0]["served_by"]
    name = first["name"] if count == 1 else f"{checks.pattern_of(first['name'])} ({count:,} modules)"
    least, largest = min(m["scale_min"] for m in members), max(m["scale_max"] for m in members)
    scales = f"{least:.2g}" if least == largest else f"{least:.2g} to {largest:.2g}"
    kernels = ", ".join(dict.fromkeys(served))
    shape, block = (" x ".join(map(str, first[key])) for key in ("shape", "block"))
    each = f"a scale for {block}"
    if first["block"] == first["shape"]:
        each = "one scale"
    elif first["block"] == [1, first["shape"][1]]:
        each = "a scale a row"
    return (
        f"{checks.legible(name)}\n    {first['family']}: {shape}, {each}, {scales}; "
        f"{_size(sum(m['bytes'] for m in members))}; made for {first['declared']}, with 16-bit activations "
        f"{first['scheme']}; served by {kernels}\n    known by {first['why']}"
    )


def check(path: Path, ignore: Sequence[str], json: bool) -> int:
    """Print the findings, with a bar on stderr where that is a terminal; 1 if one is an error."""
    bar = Progress(
        TextColumn("looking"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=Console(stderr=True), disable=json or not sys.stderr.isatty(), transient=True,
    )  # fmt: skip
    looked_at = 0
    with bar:
        task = bar.add_task("", total=None)

        def progress(done: int, total: int) -> None:
            nonlocal looked_at
            looked_at = done
            bar.update(task, completed=done, total=total)

        findings = list(checks.check(path, ignore=ignore, progress=progress))
    counts = Counter(finding.severity for finding in findings)
    if json:
        totals = {severity + "s": counts[severity] for severity in checks.SEVERITIES}
        print(jsons.dumps({"path": str(path), **totals, "findings": [vars(f) for f in findings]}, indent=2))
        return 1 if counts["error"] else 0
    console = Console(highlight=False, markup=False)
    for finding in sorted(findings, key=lambda f: checks.SEVERITIES.index(f.severity)):
        console.print(str(finding), soft_wrap=True)
    console.print(
        f"{_size(looked_at)} looked at: "
        + ", ".join(_many(counts[severity], severity) for severity in checks.SEVERITIES)
        + "."
    )
    return 1 if counts["error"] else 0


def _size(nbytes: int) -> str:
    for unit, name in ((1e9, "GB"), (1e5, "MB")):
        if nbytes >= unit:
            return f"{nbytes / max(unit, 1e6):,.1f} {name}"
    return f"{nbytes / 1e3:,.1f} kB"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
