"""`load`: the modules of a checkpoint, each with its weight in codes and scales, made when it is asked for."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from cufp8.checkpoint import file
from cufp8.checkpoint.families import (
    FLOAT,
    STACKED,
    Config,
    Match,
    build,
    experts_in,
    global_factor,
    is_evidence,
    recognise,
    split,
    wrong,
)
from cufp8.checkpoint.file import CheckpointError, Files, Stored
from cufp8.formats import SCHEMES
from cufp8.linear import Linear, _place
from cufp8.quantize import QuantizedTensor

STATIC = ("FP8", "NVFP4")  # schemes whose activations need a scale from the file
_ON_HOST = np.empty(0)  # as a file's arrays are
UPPER_BOUND = ".input_scale_ub"  # a family that has it bounds the scales found in each call; no layer does


class Entry:
    """A quantised module of a checkpoint. Nothing is read before it is asked for, and nothing is kept.

    Attributes
    ----------
    name : str
        Of the module; of experts in one tensor with their number behind it: "...experts.gate_up_proj.3".
    module, expert : str, int or None
        The name before the suffixes of its tensors, and that number.
    tensors : dict of str to Stored
        Its tensors as they lie in the files, by their suffix: ".weight", ".weight_scale", ...
    """

    def __init__(
        self, name: str, module: str, expert: int | None, tensors: dict[str, Stored], config: Config, device: str | None
    ) -> None:
        self.name, self.tensors = name, tensors
        self.module, self.expert, self._config, self._device = module, expert, config, device

    @cached_property
    def match(self) -> Match:
        """Family, shape and block, from the tensors' names, dtypes and shapes.

        Raises
        ------
        CheckpointError
            If a tensor is missing or too many, or has a dtype or shape that no family gives it.
        """
        return recognise(self.module, self.tensors, self._config)

    @property
    def family(self) -> str:
        """The name of the family; raises as `match`."""
        return self.match.family.name

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K); raises as `match`."""
        return self.match.shape

    @property
    def scheme(self) -> str:
        """The scheme with activations in 16 bits: "FP8A16", "NVFP4A16", "MXFP4A16" or "MXFP8A16"; raises as `match`."""
        return self.match.family.base + "A16"

    @property
    def declared(self) -> str:
        """The scheme that the checkpoint is made for, in compressed-tensors' names: "FP8_DYNAMIC", "NVFP4", ...

        What the config says; where it says nothing, static activations if there is a scale for them. Raises as `match`.
        """
        family = self.match.family
        said = self._config.scheme(self.module)
        if said is not None and said.startswith(family.base):
            return said
        if family.inputs in self.tensors and family.base in STATIC:
            return family.base
        return {"FP8": "FP8_DYNAMIC", "NVFP4": "NVFP4A16", "MXFP4": "MXFP4A16"}.get(family.base, family.base)

    @property
    def static(self) -> bool:
        """Whether the declared scheme quantises activations by a scale that belongs in the files; raises as `match`."""
        return self.declared in STATIC and not self._config.scales_by_token(self.module)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors in the files; of experts in one tensor its share."""
        return sum(t.nbytes for t in self.tensors.values()) // (1 if self.expert is None else self.match.experts)

    @property
    def weight(self) -> QuantizedTensor:
        """Codes and scales on the host, the codes in the map; every code and scale is looked at once.

        Raises
        ------
        CheckpointError
            As `match`; or if a code is NaN or a scale not finite and positive.
        """
        return build(self.match, self.tensors, self.expert)

    @property
    def bias(self) -> np.ndarray | None:
        """The bias as it is stored, [N], or None.

        Raises
        ------
        CheckpointError
            As `match`; or if it is no float, not finite, or of another shape.
        """
        stored = self.tensors.get(self.match.family.bias)
        if stored is None:
            return None
        need = self.shape[:1] if self.expert is None else (self.match.experts, self.shape[0])
        if stored.shape != need or stored.dtype not in (*FLOAT, "F64"):
            what = f"is {stored.dtype} {list(stored.shape)}; needed is {', '.join(FLOAT)} or F64 {list(need)}"
        else:
            array = stored.array if self.expert is None else stored.array[self.expert]
            with np.errstate(over="ignore"):
                bad = np.flatnonzero(~np.isfinite(array.astype(np.float32)))
            if not bad.size:
                return array
            what = f"{bad.size} of {array.size} numbers are not finite as float32, the first at {[int(bad[0])]}"
        raise wrong(stored, what)

    def dequantize(self, dtype: str = "float32") -> np.ndarray:
        """The values [N, K], as `QuantizedTensor.dequantize` rounds them; raises as `weight`."""
        return self.weight.dequantize(dtype)

    def linear(self, activations: str = "16bit") -> Linear:
        """A layer of the weight and the bias, on the device that `load` was given.

        Parameters
        ----------
        activations
            "16bit": as they are, the weight alone is quantised. "declared": as the checkpoint is made for.

        Raises
        ------
        CheckpointError
            As `weight`; or if the declared scheme needs a scale of the activations that is not there.
        ValueError
            If activations is neither, or if no layer computes the declared scheme.
        """
        if activations not in ("16bit", "declared"):
            raise ValueError(f"linear: activations is {activations!r}; allowed are '16bit' and 'declared'.")
        options: dict[str, Any] = {}
        if activations == "declared":
            scheme, inputs = self.declared, self.match.family.inputs or ".input_scale"
            if self.static and inputs not in self.tensors:
                raise CheckpointError(f"module {self.name!r}: {scheme} needs {self.module}{inputs}, which is missing.")
            if scheme not in SCHEMES or inputs == UPPER_BOUND:
                raise ValueError(
                    f"linear: {self.name} is made for {scheme}, whose activations no layer quantises yet; allowed is "
                    f"activations='16bit', which computes {self.scheme}."
                )
            options["scheme"] = scheme
            if self.static:
                options["input_scale"] = self._input_scale(self.tensors[inputs])
        bias, device = self.bias, _place(self._device, _ON_HOST)
        weight = build(self.match, self.tensors, self.expert, device)
        return Linear.from_quantized(weight, bias, device=device, _ordered=True, **options)

    def _input_scale(self, stored: Stored) -> float:
        """The scale of the activations, which multiplies their codes: the stored one, or its inverse."""
        if stored.dtype not in (*FLOAT, "F64") or stored.array.size != 1:
            need = f"{', '.join(FLOAT)} or F64 of one element"
            raise wrong(stored, f"is {stored.dtype} {list(stored.shape)}; needed is {need}")
        with np.errstate(over="ignore", under="ignore"):
            scale = np.float32(stored.array.reshape(())[()])
        if not (np.isfinite(scale) and scale > 0):
            raise wrong(stored, f"is {scale} as float32; needed is finite and above 0")
        return float(global_factor(self.match.family, stored)[0] if self.match.family.divides else scale)

    def __repr__(self) -> str:
        try:
            return f"Entry({self.name!r}: {self.family}, {list(self.shape)}, {self.nbytes:,} bytes)"
        except CheckpointError as error:
            return f"Entry({self.name!r}: cannot be read: {error})"


class _Arrays(Mapping[str, np.ndarray]):
    """Tensor name -> array in the map."""

    def __init__(self, files: Files, names: dict[str, None]) -> None:
        self._files, self._names = files, names

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(name)
        return self._files[name].array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Checkpoint(Mapping[str, Entry]):
    """Module name -> `Entry`, of the quantised modules. Made by `load`; a context manager.

    Attributes
    ----------
    files : Files
        All tensors as they are stored.
    config : Config
        What the config beside them says.
    ignored : frozenset of str
        The quantised modules that were left out.
    arrays : mapping of str to array
        The tensors that belong to no quantised module, by name, as read-only views of the map.
    """

    def __init__(self, files: Files, config: Config, device: str | None, ignore: Sequence[str]) -> None:
        self.files, self.config = files, config
        parts: dict[str, dict[str, Stored]] = {}
        quantised: dict[str, None] = {}
        for name, tensor in files.items():
            if (found := split(name)) is not None:
                module, suffix = found
                parts.setdefault(module, {})[suffix] = tensor
                if is_evidence(suffix, tensor):
                    quantised[module] = None
        self._entries: dict[str, Entry] = {}
        self.ignored = frozenset(m for m in quantised if any(fnmatch.fnmatchcase(m, pattern) for pattern in ignore))
        owned: set[str] = set()
        for module in quantised:
            if module in self.ignored:
                continue
            tensors = parts[module]
            owned.update(tensor.name for tensor in tensors.values())
            experts = next((experts_in(tensor) for suffix, tensor in tensors.items() if suffix in STACKED), 0)
            for expert in range(experts) if experts else (None,):
                name = module if expert is None else f"{module}.{expert}"
                if name in self._entries:
                    both = "is there by itself and as an expert of another; leave one out (ignore=, --ignore)"
                    raise CheckpointError.of(files.path, f"module {name!r} {both}")
                self._entries[name] = Entry(name, module, expert, tensors, config, device)
        self.arrays: Mapping[str, np.ndarray] = _Arrays(files, dict.fromkeys(n for n in files if n not in owned))

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.files.path)!r}: {len(self)} quantised modules, {len(self.arrays)} other tensors)"

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files; arrays and weights that were taken stay valid."""
        self.files.close()


def load(path: str | os.PathLike[str], *, device: str | None = None, ignore: Sequence[str] = ()) -> Checkpoint:
    """Open a quantised checkpoint: headers and config are read, weights when they are asked for.

    Parameters
    ----------
    path
        A safetensors file, an index, a folder of shards, or a folder of the hub's cache, as `file.open` takes them.
    device
        Where `.linear()` puts its layers: "cpu", "cuda", "cuda:i"; None: the current GPU, or the CPU if there is none.
    ignore
        Names of modules, with `*` and `?` as in file names, whose tensors are left as plain arrays.

    Returns
    -------
    Checkpoint
        Module name -> `Entry`. A module is in it if its tensors are those of a quantised one, whatever the config
        says; one that cannot be read raises when it is used, with the tensor that is wrong.

    Raises
    ------
    CheckpointError
        If a file or the config cannot be read, or breaks the format.
    TypeError
        If ignore is a string and not a sequence of them.
    """
    if isinstance(ignore, str):
        raise TypeError(f"load: ignore is the string {ignore!r}; needed is a sequence of them: ({ignore!r},).")
    files = file.open(path)
    return Checkpoint(files, Config.read(files), device, ignore)
