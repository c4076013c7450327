"""What is wrong with a checkpoint, found before it becomes a wrong answer: every code and every scale is looked at."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cufp8.checkpoint.families import E8M0, FLOAT, QUANTISED, ROLES, expression, fault_of, global_factor, split
from cufp8.checkpoint.file import CheckpointError, Stored
from cufp8.checkpoint.reader import Checkpoint, Entry, load
from cufp8.formats import FORMATS

SEVERITIES = ("error", "warning", "note")
_LARGEST, _LEAST = 1e4, 1e-20  # no layer's weights have their greatest magnitude beyond these
_LEAST_SCALE = 1e-30  # memory that nobody has written looks like such a float
# Projections that engines join into one, whose scales they then want to be equal.
_JOINED = ({"q_proj", "k_proj", "v_proj"}, {"to_q", "to_k", "to_v"}, {"gate_proj", "up_proj"}, {"w1", "w3"})
_TILE = 1 << 20


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, or that other readers get wrong.

    Attributes
    ----------
    severity : str
        "error": the file cannot be read as it is meant. "warning": it can, but parts of it contradict each other, or
        its numbers are no layer's. "note": it is as it should be, and known to be misread.
    file, tensor : str
        Where; the tensor is empty if it is all of the file.
    position : list of int or None
        Of the first element that is wrong.
    what, todo : str
        What is wrong, and what to do.
    """

    severity: str
    file: str
    tensor: str
    position: list[int] | None
    what: str
    todo: str

    def __str__(self) -> str:
        text = f"{self.severity}: {self.tensor or self.file}: {self.what}" + (f" -> {self.todo}" if self.todo else "")
        return legible(text)


def check(
    path: str | os.PathLike[str],
    *,
    ignore: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Look through a checkpoint, in memory of a few MiB whatever its size.

    Parameters
    ----------
    path, ignore
        As for `load`.
    progress
        Called with the bytes that have been looked at, and all of them.

    Yields
    ------
    Finding
        In the order of the modules. What cannot be opened at all is one finding.
    """
    try:
        checkpoint = load(path, ignore=ignore)
    except CheckpointError as error:
        what = error.what or str(error)
        if error.tensor:
            what += f" (in {Path(error.file).name})"
        yield Finding("error", error.file or str(path), error.tensor, None, what, error.todo)
        return
    with checkpoint:
        yield from _check(checkpoint, progress)


def _check(checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> Iterator[Finding]:
    entries = [entry for entry in checkpoint.values() if not entry.expert]  # experts share their tensors
    total = sum(t.nbytes for entry in entries for t in entry.tensors.values())
    done = 0

    def steps(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress:
            progress(done, total)

    for entry in entries:
        found = list(_faults(entry, steps))
        yield from found
        try:
            entry.bias  # noqa: B018
        except CheckpointError as error:
            first = next(iter(entry.tensors.values()))
            name = error.tensor or entry.module
            yield _finding("error", first, error.what or str(error), "", name=name)
            continue
        yield from _contradictions(entry, checkpoint)
        if not found:
            yield from _implausible(entry)
    yield from _leftovers(checkpoint)
    yield from _unequal(entries)
    bytes_of_scales = [t for e in entries for s, t in e.tensors.items() if ROLES[s] == "scale" and t.dtype == "U8"]
    if bytes_of_scales:
        others = f" here and in {len(bytes_of_scales) - 1} more tensors" if len(bytes_of_scales) > 1 else ""
        todo = "read the bytes as float8_e8m0fnu; converted as numbers they are wrong by powers of two"
        yield _finding("note", bytes_of_scales[0], f"U8 scales are e8m0 codes, 2^(code - 127){others}", todo)
    if progress:
        progress(total, total)


def _finding(
    severity: str, tensor: Stored, what: str, todo: str, position: list[int] | None = None, name: str | None = None
) -> Finding:
    return Finding(severity, str(tensor.file), tensor.name if name is None else name, position, what, todo)


def _faults(entry: Entry, steps: Callable[[int], None]) -> Iterator[Finding]:
    """Codes and scales that no format allows."""
    for suffix, tensor in entry.tensors.items():
        role = ROLES[suffix]
        if role not in ("codes", "scale", "global_scale", "inputs"):
            continue
        try:
            fault = fault_of(tensor, role, steps)
        except (CheckpointError, TypeError) as error:
            yield _finding("error", tensor, str(error), "")
            continue
        if fault is None:
            continue
        todo = "quantise the module again"
        if role == "scale" and tensor.dtype == "F8_E4M3":
            todo += "; where all codes of the block are 0, the scale of a block of zeros was written as NaN"
        elif role in ("global_scale", "inputs"):
            todo = "calibrate again with data that reaches the module: its largest magnitude was 0 or not finite"
        yield _finding("error", tensor, fault.text, todo, fault.position)


def _contradictions(entry: Entry, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Where the config says another thing than the tensors do."""
    family, config = entry.match.family, checkpoint.config
    codes = entry.tensors[family.codes]
    pattern = config.excludes(entry.module)
    if pattern is not None:
        what = f"the config's list of modules that are not quantised names it ({pattern!r}), but its scales are here"
        yield _finding("warning", codes, what, "correct the list; cufp8 goes by the tensors", name=entry.module)
    said = config.scheme(entry.module)
    if said is not None and not said.startswith(family.base):
        what = f"the config says {said}, but {codes.dtype} codes and {entry.tensors[family.scale].dtype} scales are "
        yield _finding("warning", codes, what + family.base, "correct the config; cufp8 goes by the tensors")
    needs = entry.declared
    inputs = family.inputs or ".input_scale"
    if said is not None and entry.static and inputs not in entry.tensors:
        name = entry.module + inputs
        what = f"is missing, but {needs} quantises activations by it"
        yield _finding("error", codes, what, "get it, or use activations='16bit', which needs none", name=name)
    for suffix, tensor in entry.tensors.items():
        if ROLES[suffix] == "inputs" and suffix != family.inputs:
            yield _finding("warning", tensor, f"is no tensor of {family.name}", "leave it out")


def _implausible(entry: Entry) -> Iterator[Finding]:
    """Scales with which the weights are none."""
    family = entry.match.family
    tensor = entry.tensors[family.scale]
    least, largest = _extent(tensor)
    if largest == 0:
        return
    if family.scale_dtype == "float32" and least < _LEAST_SCALE:
        todo = "see whether the module was loaded when the file was made"
        yield _finding("warning", tensor, f"has scales down to {least:g}, which look uninitialised", todo)
    factor, stored = 1.0, None
    if family.global_scale:
        stored = entry.tensors[family.global_scale]
        try:
            factor = float(global_factor(family, stored)[0])
        except CheckpointError as error:
            yield _finding("error", stored, error.what, "calibrate again")
            return
    top = FORMATS[family.dtype].max * largest * factor
    if not _LEAST < top < _LARGEST:
        where, todo = tensor, "see whether e8m0 codes were converted as numbers, or the scales never written"
        if stored is not None:
            where = stored
            other = "multiplies" if family.divides else "divides"
            todo = f"in {family.name} it {'divides' if family.divides else 'multiplies'}; was it written as one that "
            todo += f"{other}?"
        yield _finding("warning", where, f"with it the greatest weight is {top:.3g}, which no layer has", todo)


def _extent(tensor: Stored) -> tuple[float, float]:
    """The least and the largest scale above 0; 0, 0 if there is none."""
    flat = tensor.array.reshape(-1)
    least, largest = np.inf, 0.0
    for start in range(0, flat.size, _TILE):
        part = flat[start : start + _TILE]
        if tensor.dtype in E8M0:
            part = part.view(np.uint8).view(FORMATS["float8_e8m0fnu"].dtype)
        values = part.astype(np.float64)
        values = values[np.isfinite(values) & (values > 0)]
        if values.size:
            least, largest = min(least, float(values.min())), max(largest, float(values.max()))
    return (least, largest) if largest else (0.0, 0.0)


def _leftovers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What belongs to no quantised module, and looks as if it should."""
    quantised = Counter(entry.module.rpartition(".")[2] for entry in checkpoint.values())
    modules = {entry.module for entry in checkpoint.values()}
    config = checkpoint.config
    listed = config.content.get("quantized_layers")
    if config.method and not modules and not checkpoint.ignored:
        what = f"the config says {config.method}, but no module has codes and scales"
        yield Finding("warning", str(checkpoint.files.path), "", None, what, "see whether these are the right files")
    for pattern in config.excluded:
        if pattern.startswith("re:") and not expression(pattern):
            what = f"the config excludes modules by {pattern!r:.200}, an expression that is none or may take for ever"
            yield Finding("note", str(checkpoint.files.path), "", None, what, "it was not compared with the tensors")
    for name in checkpoint.arrays:
        module, suffix = split(name) or ("", "")
        tensor = checkpoint.files[name]
        if module in modules or module in checkpoint.ignored:
            continue
        leaf = module.rpartition(".")[2]
        if suffix and ROLES[suffix] == "inputs":
            weight = checkpoint.files.get(f"{module}.weight")
            but = f"{weight.name} is {weight.dtype}" if weight else "its module has no weight"
            yield _finding(
                "warning",
                tensor,
                f"is a scale of activations, but {but}",
                "leave it out, or get the scales of the weight",
            )
        elif tensor.dtype in QUANTISED and len(tensor.shape) > 1:
            what = f"is {tensor.dtype}, and no family that is known has codes of that name"
            yield _finding("warning", tensor, what, "without its scales, if it has any, it is no weight")
        elif suffix == ".weight" and len(tensor.shape) == 2 and tensor.dtype in FLOAT:
            if isinstance(listed, dict) and module in listed:
                what = f"is {tensor.dtype} without scales, but quantized_layers of the config names the module"
                yield _finding("warning", tensor, what, "correct the config; cufp8 goes by the tensors")
            elif config.method and config.excludes(module) is None and quantised[leaf] and not leaf.isdigit():
                what = f"is {tensor.dtype} without scales, while {quantised[leaf]} modules called {leaf} are quantised"
                todo = "add it to the config's list of modules that are not quantised, if that is meant"
                yield _finding("warning", tensor, what, todo)


def _unequal(entries: list[Entry]) -> Iterator[Finding]:
    """Projections that engines join, whose one scale differs."""
    groups: dict[tuple[str, int], list[tuple[Stored, float]]] = {}
    for entry in entries:
        parent, _, leaf = entry.module.rpartition(".")
        which = next((i for i, names in enumerate(_JOINED) if leaf in names), None)
        try:
            family = entry.match.family
            tensor = entry.tensors[family.global_scale or family.scale]
            if which is None or tensor.nbytes > 4 or tensor.dtype in E8M0:
                continue
            factor = (
                global_factor(family, tensor) if family.global_scale else tensor.array.astype(np.float32).reshape(1)
            )
        except CheckpointError:
            continue
        if np.isfinite(factor[0]) and factor[0] > 0:
            groups.setdefault((parent, which), []).append((tensor, float(factor[0])))
    for members in groups.values():
        factors = [factor for _, factor in members]
        if min(factors) != max(factors):
            names = ", ".join(tensor.name for tensor, _ in members)
            what = f"{names} differ by a factor up to {max(factors) / min(factors):.3g}"
            todo = "keep the layers apart: one scale for the joined layer makes the others wrong by that"
            yield _finding("note", members[0][0], what, todo)


# --- what is in it ---------------------------------------------------------------------------------------


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint holds, as `cufp8 inspect --json` prints it.

    Returns
    -------
    dict
        path; method: the config's quant_method or None; modules: a list of {name, family, scheme, declared, shape,
        block, bytes, scale_min, scale_max, why, served_by}, or {name, error} where a module cannot be read; arrays:
        {count, bytes} of the tensors that are not quantised; bytes: of all; cpu: why no GPU is used, or None.
        scale_min and scale_max are of the scales above 0, times the global one. served_by: the kernels for 1, 16 and
        256 rows of x on the current GPU, "numpy" without one, None where that GPU has no kernel.
    """
    from cufp8 import runtime

    modules: list[dict[str, Any]] = []
    extents: dict[str, tuple[float, float]] = {}
    for entry in checkpoint.values():
        try:
            modules.append(_module(entry, checkpoint, extents))
        except CheckpointError as error:
            modules.append({"name": entry.name, "error": str(error)})
    return {
        "path": str(Path(checkpoint.files.path)),
        "method": checkpoint.config.method,
        "modules": modules,
        "arrays": {
            "count": len(checkpoint.arrays),
            "bytes": sum(checkpoint.files[name].nbytes for name in checkpoint.arrays),
        },
        "bytes": sum(tensor.nbytes for tensor in checkpoint.files.values()),
        "cpu": None if runtime.available() else str(runtime.why_not()),
    }


def _module(entry: Entry, checkpoint: Checkpoint, extents: dict[str, tuple[float, float]]) -> dict[str, Any]:
    family, scale = entry.match.family, entry.tensors[entry.match.family.scale]
    if scale.name not in extents:  # experts share it
        extents[scale.name] = _extent(scale)
    factor = float(global_factor(family, entry.tensors[family.global_scale])[0]) if family.global_scale else 1.0
    n, k = entry.shape
    rows, columns = entry.match.block
    tensors = ", ".join(f"{s.lstrip('._')} {t.dtype} {list(t.shape)}" for s, t in entry.tensors.items())
    return {
        "name": entry.name,
        "family": family.name,
        "scheme": entry.scheme,
        "declared": entry.declared,
        "shape": [n, k],
        "block": [n if rows == -1 else rows, k if columns == -1 else columns],
        "bytes": entry.nbytes,
        "scale_min": extents[scale.name][0] * factor,
        "scale_max": extents[scale.name][1] * factor,
        "why": f"{tensors}; the config says {checkpoint.config.method or 'nothing'}",
        "served_by": _served_by(entry),
    }


def _served_by(entry: Entry) -> list[str]:
    from cufp8 import kernels, runtime

    if not runtime.available():
        return ["numpy"]
    target, (n, k) = runtime.target(runtime.current_device()), entry.shape
    family, block = entry.match.family, entry.match.block
    weight = kernels.weight_of(family.dtype, family.scale_dtype, block).name
    problems = (
        kernels.Problem(entry.scheme, block, "bfloat16", "bfloat16", m, n, k, aligned16=True, weight=weight)
        for m in (1, 16, 256)
    )
    return [kernels.pick(target, problem).name for problem in problems]


def legible(text: str) -> str:
    """What a terminal may be given: names in a file can hold what moves its cursor."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def pattern_of(name: str) -> str:
    """The name with * for each number, so that the layers of a model are one line."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
