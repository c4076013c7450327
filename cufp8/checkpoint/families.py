"""Families of quantised checkpoints, a row each: which tensors a module has, and what they mean.

A module is quantised if its tensors say so, whatever lists the config has. A row tells the names and dtypes of its
tensors, the blocks that share a scale, and whether a second scale multiplies or divides. Rows with the same names and
dtypes mean the same: the config only chooses the family's name between them, and the scheme of the activations.
"""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cufp8.block_scaled import from_128x4
from cufp8.checkpoint.file import CheckpointError, Files, Stored
from cufp8.formats import FORMATS
from cufp8.quantize import QuantizedTensor

TENSOR, CHANNEL, BLOCK = (-1, -1), (1, -1), (128, 128)
FLOAT, E8M0, E4M3 = ("F32", "BF16", "F16"), ("U8", "F8_E8M0"), ("F8_E4M3",)
PACKED = ("U8", "I8", "F4")
_CONFIG_MAX = 64 << 20  # bytes
_LEAVE_OUT = "or leave the module out (ignore=, --ignore)"
_TILE = 1 << 20  # codes or scales looked at at once


@dataclass(frozen=True)
class Family:
    """What the tensors of a module mean. Suffixes begin with the character that parts them from the module's name.

    value = code * scale, times the global scale, or divided by it where `divides`.

    Attributes
    ----------
    name, source : str
        Of the family, and who defines the layout.
    methods : tuple of str
        `quant_method` of the configs that stand for it.
    codes, scale, global_scale, inputs : str
        Suffixes of the codes, of their scales, of the scale of all of them, of the scale of static activations; the
        last two None where there is none.
    codes_dtypes, scale_dtypes : tuple of str
        As safetensors calls them. U8 scales are e8m0 codes: 2^(code - 127), never a number.
    blocks : tuple of (rows, columns)
        What may share a scale; -1: all.
    divides : bool
        The global scale, and that of the activations, is a divisor.
    bias : str
        Suffix of the bias.
    stacked : bool
        Experts in one tensor: codes [E, N, K / 32, 16], scales [E, N, K / 32], bias [E, N].
    """

    name: str
    source: str
    methods: tuple[str, ...]
    codes: str
    codes_dtypes: tuple[str, ...]
    scale: str
    scale_dtypes: tuple[str, ...]
    blocks: tuple[tuple[int, int], ...]
    global_scale: str | None = None
    divides: bool = False
    inputs: str | None = None
    bias: str = ".bias"
    stacked: bool = False

    @property
    def dtype(self) -> str:
        """Of the codes, as in formats.FORMATS."""
        return "float8_e4m3fn" if self.codes_dtypes == E4M3 else "float4_e2m1fn"

    @property
    def scale_dtype(self) -> str:
        """Of the scales, as in formats.FORMATS, or float32."""
        return {FLOAT: "float32", E4M3: "float8_e4m3fn"}.get(self.scale_dtypes, "float8_e8m0fnu")

    @property
    def base(self) -> str:
        """FP8, MXFP8, MXFP4 or NVFP4."""
        if self.blocks[0][1] == 16:
            return "NVFP4"
        if self.dtype == "float4_e2m1fn":
            return "MXFP4"
        return "MXFP8" if self.blocks[0] == (1, 32) else "FP8"

    @cached_property
    def suffixes(self) -> dict[str, str]:
        """Suffix -> role."""
        roles = {"codes": self.codes, "scale": self.scale, "global_scale": self.global_scale, "inputs": self.inputs}
        return {suffix: role for role, suffix in (*roles.items(), ("bias", self.bias)) if suffix}


_FP8 = {"codes": ".weight", "codes_dtypes": E4M3, "scale": ".weight_scale", "scale_dtypes": FLOAT}
_MX8 = {"codes": ".weight", "codes_dtypes": E4M3, "scale_dtypes": E8M0, "blocks": ((1, 32),)}
_MX4 = {"scale_dtypes": E8M0, "blocks": ((1, 32),)}
_PAIRS = ("U8", "F4")
_CT, _MODELOPT = "compressed-tensors", "modelopt"

FAMILIES = (
    Family(
        "compressed-tensors FP8", "vllm-project/compressed-tensors, float-quantized", (_CT,),
        **_FP8, blocks=(TENSOR, CHANNEL, BLOCK), inputs=".input_scale",
    ),
    Family(
        "AutoFP8", "vllm-project/vllm, quantization/fp8.py", ("fp8",),
        **_FP8, blocks=(TENSOR, CHANNEL, BLOCK), inputs=".input_scale",
    ),
    Family(
        "ModelOpt FP8", "NVIDIA/Model-Optimizer, export/quant_utils.py", (_MODELOPT,),
        **_FP8, blocks=(TENSOR, CHANNEL, BLOCK), inputs=".input_scale",
    ),
    Family(
        "fbgemm FP8", "huggingface/transformers, integrations/fbgemm_fp8.py", ("fbgemm_fp8",),
        **_FP8, blocks=(CHANNEL,), inputs=".input_scale_ub",
    ),
    Family(
        "ComfyUI FP8", "comfyanonymous/ComfyUI, comfy/quant_ops.py", ("comfyui",),
        **_FP8, blocks=(TENSOR, CHANNEL), inputs=".input_scale",
    ),
    Family(
        "ComfyUI scaled FP8", "comfyanonymous/ComfyUI, comfy/ops.py", ("comfyui",),
        **{**_FP8, "scale": ".scale_weight"}, blocks=(TENSOR, CHANNEL), inputs=".scale_input",
    ),
    Family(
        "DeepSeek FP8", "deepseek-ai/DeepSeek-V3, inference/kernel.py: the inverse multiplies", ("fp8",),
        **{**_FP8, "scale": ".weight_scale_inv"}, blocks=(BLOCK, TENSOR), inputs=".activation_scale",
    ),
    Family(
        "DeepSeek-V4 FP8", "deepseek-ai/DeepSeek-V4", ("fp8",),
        codes=".weight", codes_dtypes=E4M3, scale=".scale", scale_dtypes=E8M0, blocks=(BLOCK,),
    ),
    Family(
        "DeepSeek-V4 FP4", "deepseek-ai/DeepSeek-V4", ("fp8",),
        codes=".weight", codes_dtypes=PACKED, scale=".scale", **_MX4,
    ),
    Family(
        "ModelOpt NVFP4", "NVIDIA/Model-Optimizer, qtensor/nvfp4_tensor.py", (_MODELOPT,),
        ".weight", _PAIRS, ".weight_scale", E4M3, ((1, 16),), ".weight_scale_2", inputs=".input_scale",
    ),
    Family(
        "compressed-tensors NVFP4", "vllm-project/compressed-tensors, nvfp4-pack-quantized", (_CT,),
        ".weight_packed", _PAIRS, ".weight_scale", E4M3, ((1, 16),), ".weight_global_scale", True,
        inputs=".input_global_scale",
    ),
    Family(
        "compressed-tensors MXFP4", "vllm-project/compressed-tensors, mxfp4-pack-quantized", (_CT,),
        codes=".weight_packed", codes_dtypes=_PAIRS, scale=".weight_scale", **_MX4,
    ),
    Family(
        "compressed-tensors MXFP8", "vllm-project/compressed-tensors, mxfp8-quantized", (_CT,),
        scale=".weight_scale", **_MX8,
    ),
    Family(
        "ModelOpt MXFP8", "NVIDIA/Model-Optimizer, MXFP8", (_MODELOPT,),
        scale=".weight_scale", **_MX8,
    ),
    Family("MXFP8", "sgl-project/sglang, quantization/fp8.py", ("mxfp8",), scale=".weight_scale_inv", **_MX8),
    Family("MXFP8", "MiniMaxAI/MiniMax-M3", ("mxfp8",), scale=".weight_scale", **_MX8),
    Family(
        "MXFP4", "OCP Microscaling Formats (MX) Specification 1.0, in safetensors' own dtypes", ("quark",),
        codes=".weight", codes_dtypes=_PAIRS, scale=".weight_scale", **_MX4,
    ),
    Family(
        "gpt-oss MXFP4", "openai/gpt-oss, as transformers has it", ("mxfp4",),
        codes="_blocks", codes_dtypes=_PAIRS, scale="_scales", **_MX4, bias="_bias", stacked=True,
    ),
    Family(
        "gpt-oss MXFP4 (original)", "openai/gpt-oss, gpt_oss/torch/weights.py", ("mxfp4",),
        codes="_weight.blocks", codes_dtypes=_PAIRS, scale="_weight.scales", **_MX4, bias="_bias", stacked=True,
    ),
)  # fmt: skip

# Tensors without which a module computes something else, and which no layer here applies -> why.
_REFUSED = {
    ".pre_quant_scale": "scales the activations, which no layer here does; fold it into the weights",
    **dict.fromkeys(
        (".svdquant_lora_a", ".svdquant_lora_b"),
        "is half of a product that is added to y, which no layer here does; quantise without it",
    ),
}
# What the tensors of a module may be.
ROLES = {
    **{suffix: role for family in FAMILIES for suffix, role in family.suffixes.items()},
    **dict.fromkeys(_REFUSED, "refused"),
    ".comfy_quant": "label",
}
STACKED = {family.codes for family in FAMILIES if family.stacked}
QUANTISED = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "F6_E2M3", "F6_E3M2")

# What each algorithm of ModelOpt computes, as a scheme.
_ALGORITHMS = {
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8_DYNAMIC",
    "FP8_PB_WO": "FP8A16",
    "NVFP4": "NVFP4",
    "NVFP4_AWQ": "NVFP4",
    "NVFP4_SVD": "NVFP4",
    "W4A16_NVFP4": "NVFP4A16",
    "W4A8_NVFP4_FP8": "NVFP4_FP8",
    "MXFP4": "MXFP4",
    "W4A8_MXFP4_FP8": "MXFP4_FP8",
    "MXFP8": "MXFP8",
}


def split(name: str) -> tuple[str, str] | None:
    """Module and suffix of a tensor's name; None if no family has such a suffix."""
    dot = name.rfind(".")
    starts = {name.rfind("_", 0, dot) if dot > 0 else -1, dot, name.rfind("_")} - {-1, 0}
    for start in sorted(starts):
        if name[start:] in ROLES:
            return name[:start], name[start:]
    return None


def is_evidence(suffix: str, tensor: Stored) -> bool:
    """Whether this tensor makes its module a quantised one."""
    role = ROLES[suffix]
    if suffix[0] == "_":  # such as "num_blocks": a name alone says little
        return role != "bias" and tensor.dtype in (*PACKED, *E8M0)
    if suffix == ".weight":
        return tensor.dtype in QUANTISED or (tensor.dtype in PACKED and len(tensor.shape) == 2)
    if suffix == ".scale":  # norms have one too
        return tensor.dtype == "F8_E8M0"
    return role in ("codes", "scale", "global_scale", "refused", "label")


# --- the config ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """What config.json and hf_quant_config.json beside the files say.

    Attributes
    ----------
    method : str or None
        `quant_method`; "comfyui" if the header of a file says so; None: nobody says.
    content : dict
        `quantization_config`, joined with what hf_quant_config.json has under `quantization`.
    excluded : tuple of str
        The list of modules that are said not to be quantised.
    """

    method: str | None = None
    content: Mapping[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()

    @classmethod
    def read(cls, files: Files) -> Config:
        """The config of opened files: from the folder in which the first of them lies.

        Raises
        ------
        CheckpointError
            If a config is there but is no JSON object, or too large.
        """
        folder = next(iter(files.metadata)).parent
        config, modelopt = _json(folder / "config.json"), _json(folder / "hf_quant_config.json")
        content: dict[str, Any] = {}
        for holder in (config, _dict(config.get("text_config"))):
            content = content or _dict(holder.get("quantization_config"))
        content = {**_dict(modelopt.get("quantization")), **content}
        if "expert_dtype" in config:
            content.setdefault("expert_dtype", config["expert_dtype"])
        method = content.get("quant_method")
        if not isinstance(method, str):
            method = _MODELOPT if modelopt else None
        if method and method.startswith(_MODELOPT):
            method = _MODELOPT
        if method is None and any("_quantization_metadata" in metadata for metadata in files.metadata.values()):
            method = "comfyui"
        excluded: dict[str, None] = {}
        for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "exclude"):
            listed = content.get(key)
            excluded |= dict.fromkeys(p for p in (listed if isinstance(listed, list) else ()) if isinstance(p, str))
        return cls(method, content, tuple(excluded))

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block, where scales are two-dimensional: 128 x 128 if nothing is said."""
        said = [self.content.get("weight_block_size")]
        said += [_dict(group.get("weights")).get("block_structure") for group in self._groups]
        for block in said:
            if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
                return block[0], block[1]
        return BLOCK

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [_dict(group) for group in _dict(self.content.get("config_groups")).values()]

    def _group(self, module: str) -> dict[str, Any]:
        """What compressed-tensors' config says about a module; {} if nothing."""
        groups = self._groups
        named = [g for g in groups if any(_matches(module, target) for target in _list(g.get("targets")))]
        # Else by the class of the module, which is in no file: that of a layer with a weight [N, K].
        named = named or [g for g in groups if "Linear" in _list(g.get("targets"))] or groups
        return named[0] if named else {}

    def scales_by_token(self, module: str) -> bool:
        """Whether NVFP4's global scale of activations is found in each call, so that no file has it.

        compressed-tensors' `"dynamic": true`; with "local" the scales of blocks are found alone.
        """
        inputs = _dict(self._group(module).get("input_activations")) if self.method == _CT else {}
        return self.scheme(module) == "NVFP4" and inputs.get("dynamic") is True

    def scheme(self, module: str) -> str | None:
        """The scheme that the config names for a module, as compressed-tensors calls it; None: it does not say."""
        content = self.content
        if self.method == _CT:
            return _group_scheme(self._group(module))
        if self.method == _MODELOPT:
            layers = _dict(content.get("quantized_layers"))
            name = module
            while name and name not in layers:  # what holds all experts may stand for them
                name = name.rpartition(".")[0]
            algorithm = _dict(layers.get(name)).get("quant_algo") or content.get("quant_algo")
            return _ALGORITHMS.get(algorithm.upper()) if isinstance(algorithm, str) else None
        if self.method == "fp8":
            if content.get("expert_dtype") == "fp4" and "experts." in module:
                return "MXFP4_FP8"
            if content.get("activation_scheme") == "static":
                return "FP8"
            return "FP8_BLOCK" if content.get("weight_block_size") else "FP8_DYNAMIC"
        return {"mxfp4": "MXFP4A16", "mxfp8": "MXFP8", "fbgemm_fp8": "FP8_DYNAMIC"}.get(self.method or "")

    def excludes(self, module: str) -> str | None:
        """The entry of the exclusion list that names a module; None if none does.

        Matched as the config's own library does: compressed-tensors by the whole name, ModelOpt by `*` and `?`, the
        others by whole parts of the name between dots; behind `re:` an expression.
        """
        for pattern in self.excluded:
            if self.method == _CT or pattern.startswith("re:"):
                found = _matches(module, pattern)
            elif self.method == _MODELOPT:
                found = fnmatch.fnmatchcase(module, pattern)
            elif "*" in pattern:
                found = fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, pattern + ".*")
            else:
                found = f".{pattern}." in f".{module}."
            if found:
                return pattern
        return None


_REPEATS = re.compile(r"[*+{]")
_NAME_MAX = 300


def _matches(module: str, pattern: Any) -> bool:
    """Whether compressed-tensors' pattern names a module."""
    if not isinstance(pattern, str):
        return False
    if not pattern.startswith("re:"):
        return pattern == module
    found = expression(pattern)
    return found is not None and len(module) <= _NAME_MAX and found.match(module) is not None


@lru_cache(1024)
def expression(pattern: str) -> re.Pattern[str] | None:
    """The expression behind `re:`; None if it is none, or one that could take for ever.

    That is one in which a group repeats, or more than four things do: on a name that almost matches they are tried in
    every combination, and both came with a download.
    """
    text = pattern[3:]
    if len(text) > 1000 or len(_REPEATS.findall(text)) > 4 or re.search(r"\)[*+{]", text):
        return None
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return None


def _group_scheme(group: dict[str, Any]) -> str | None:
    weights, inputs = _dict(group.get("weights")), _dict(group.get("input_activations"))
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if weights.get("type") == "int":
        return f"INT{bits}"
    if bits == 4:
        base = "NVFP4" if size == 16 else "MXFP4"
    elif bits == 8:
        base = "MXFP8" if size == 32 else "FP8"
    else:
        return None
    if not inputs:
        return base + "A16"
    if base != "FP8":
        return base
    if weights.get("strategy") == "block":
        return "FP8_BLOCK"
    return "FP8_DYNAMIC" if inputs.get("dynamic") else "FP8"


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Unlike a header it may hold NaN and Infinity, as Python writes."""
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as stream:
            text = stream.read(_CONFIG_MAX + 1)
        if len(text) > _CONFIG_MAX:
            raise ValueError(f"it is longer than {_CONFIG_MAX} bytes")
        content = json.loads(text.decode("utf-8"))
    except RecursionError:
        raise CheckpointError.of(path, "is JSON nested too deeply; repair it, or move it away") from None
    except (ValueError, OSError) as error:
        raise CheckpointError.of(path, f"cannot be read: {error}; repair it, or move it away") from None
    if not isinstance(content, dict):
        raise CheckpointError.of(path, f"is a JSON {type(content).__name__}; an object is needed")
    return content


# --- which family ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """The family of a module, and how its tensors lie.

    Attributes
    ----------
    family : Family
    shape : tuple of int
        (N, K).
    experts : int or None
        How many are in one tensor; None where a module has its own.
    block : tuple of int
        Rows and columns that share a scale, one of family.blocks.
    swizzled : bool
        The scales lie in the 128x4 layout of `block_scaled.to_128x4`.
    """

    family: Family
    shape: tuple[int, int]
    experts: int | None
    block: tuple[int, int]
    swizzled: bool


class _Misfit(Exception):
    """Why a row does not fit: how far it fitted, and the text, or the suffix of the tensor that is missing."""

    def __init__(self, step: int, text: str = "", missing: str = "", tensor: str | None = None) -> None:
        super().__init__(text)
        self.step, self.text, self.missing, self.tensor = step, text, missing, tensor


def recognise(module: str, tensors: Mapping[str, Stored], config: Config) -> Match:
    """The family of a module with these tensors (suffix -> tensor).

    Raises
    ------
    CheckpointError
        If a tensor is missing, is too many, or has a dtype or shape that no family gives it: named with its file, and
        with what would be right in the family that comes nearest.
    """
    label = _comfy_label(module, tensors)
    method = "comfyui" if label else config.method
    near = [family for family in FAMILIES if family.codes in tensors and family.scale in tensors]
    for family in sorted(near, key=lambda family: method not in family.methods):
        with suppress(_Misfit):
            return _fit(module, family, tensors, config)
    misfits: list[tuple[tuple[int, bool, int], _Misfit]] = []
    for family in FAMILIES:
        try:
            _fit(module, family, tensors, config)
        except _Misfit as misfit:
            known = sum(suffix in family.suffixes for suffix in tensors)
            misfits.append(((misfit.step, method in family.methods, known), misfit))
    best = max(score for score, _ in misfits)
    nearest = [misfit for score, misfit in misfits if score == best]
    where, first = next(iter(tensors.values())), nearest[0]
    if first.missing:
        names = dict.fromkeys(f"{module}{m.missing}" for m in nearest if m.missing)
        here = ", ".join(f"{suffix.lstrip('._')} {t.dtype} {list(t.shape)}" for suffix, t in tensors.items())
        or_else = "".join(f" (or {name})" for name in list(names)[1:])
        raise wrong(
            where,
            f"is missing{or_else} beside {here}; get the file that has it, {_LEAVE_OUT}",
            next(iter(names)),
        )
    raise wrong(tensors[first.tensor] if first.tensor else where, f"{first.text}, {_LEAVE_OUT}")


def wrong(tensor: Stored, what: str, name: str | None = None) -> CheckpointError:
    """The error about a tensor, or about one of that name which should lie in its file."""
    return CheckpointError.of(tensor.file, what, tensor.name if name is None else name)


def _comfy_label(module: str, tensors: Mapping[str, Stored]) -> bool:
    """Whether there is ComfyUI's label, which must name the one format that is read."""
    label = tensors.get(".comfy_quant")
    if label is None:
        return False
    try:
        said = json.loads(label.array[:10_000].tobytes())["format"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        said = None
    if said != "float8_e4m3fn":
        text = f"names the format {said!r:.80}; convert it to the one that is read, 'float8_e4m3fn'"
        raise wrong(label, f"{text}, {_LEAVE_OUT}")
    return True


def _fit(module: str, family: Family, tensors: Mapping[str, Stored], config: Config) -> Match:
    def has(step: int, suffix: str, dtypes: tuple[str, ...]) -> Stored:
        found = tensors.get(suffix)
        if found is None:
            raise _Misfit(step, missing=suffix)
        if found.dtype not in dtypes:
            text = f"is {found.dtype}; {family.name} needs {' or '.join(dtypes)}: correct the file"
            raise _Misfit(step + 1, text, tensor=suffix)
        return found

    codes = has(0, family.codes, family.codes_dtypes)
    scale = has(2, family.scale, family.scale_dtypes)
    if family.global_scale:
        g = has(4, family.global_scale, FLOAT)
        if g.shape not in ((), (1,), (1, 1)):
            raise _Misfit(
                7, f"has shape {list(g.shape)}; needed is one number: correct the file", tensor=family.global_scale
            )
    for suffix in tensors:
        role = ROLES[suffix]
        if role == "refused":
            raise _Misfit(6, _REFUSED[suffix], tensor=suffix)
        if role in ("codes", "scale", "global_scale") and suffix not in family.suffixes:
            text = (
                f"is one tensor too many: {family.name} has no {suffix[1:]}, and no other family fits; correct the file"
            )
            raise _Misfit(6, text, tensor=suffix)
    shape, experts = _shape(family, codes)
    scale_shape = scale.shape
    if experts is not None:
        if scale_shape[:1] != (experts,):
            raise _Misfit(
                7,
                f"has shape {list(scale_shape)}; {experts} experts need [{experts}, ...]: correct the file",
                tensor=family.scale,
            )
        scale_shape = scale_shape[1:]
    allowed: list[list[int]] = []
    for block in family.blocks:
        if block == BLOCK:
            block = config.block
        for wanted, swizzled in _arrangements(shape, block, family.stacked):
            allowed.append(list(wanted))
            if scale_shape == wanted:
                if block not in family.blocks:
                    text = (
                        f"belongs to blocks of {block[0]} x {block[1]}, says the config; read are 128 x 128: convert it"
                    )
                    raise _Misfit(8, text, tensor=family.scale)
                return Match(family, shape, experts, block, swizzled)
    text = f"has shape {list(scale.shape)}; the weight {list(shape)} of {family.name} needs "
    text += " or ".join(map(str, allowed)) + (" for each expert" if experts is not None else "") + ": correct the file"
    raise _Misfit(7, text, tensor=family.scale)


def _shape(family: Family, codes: Stored) -> tuple[tuple[int, int], int | None]:
    """(N, K), and the number of experts."""
    shape, wanted = codes.shape, "[N, K]" if family.dtype == "float8_e4m3fn" else "[N, K / 2]"
    per_byte = 2 if family.dtype == "float4_e2m1fn" and codes.dtype != "F4" else 1
    if family.stacked:
        wanted = "[E, N, K / 32, 16]"
        if len(shape) == 4 and shape[3] * per_byte == 32 and 0 not in shape:
            return (shape[1], shape[2] * 32), shape[0]
    elif len(shape) == 2 and 0 not in shape:
        return (shape[0], shape[1] * per_byte), None
    text = f"has shape {list(shape)}; {family.name} needs {wanted}, each at least 1: correct the file"
    raise _Misfit(7, text, tensor=family.codes)


def experts_in(codes: Stored) -> int:
    """How many experts a stack of codes [E, N, K / 32, 16] has; 0 if it is none."""
    return codes.shape[0] if len(codes.shape) == 4 and 0 not in codes.shape else 0


def _arrangements(
    shape: tuple[int, int], block: tuple[int, int], stacked: bool
) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The shapes that scales may have, and whether they are swizzled then."""
    n, k = shape
    if block == TENSOR:
        yield from (((), False), ((1,), False), ((1, 1), False))
    elif block == CHANNEL:
        yield from (((n, 1), False), ((n,), False))
    else:
        rows, columns = -(-n // block[0]), -(-k // block[1])
        yield (rows, columns), False
        if block[0] > 1:
            yield (rows, 1, columns, 1), False
        elif not stacked:
            # Padded to whole tiles of 128 x 4, which tells it from rows and columns. Where nothing is padded, only the
            # family could tell, and none of the table swizzles.
            padded = -(-rows // 128) * 128, -(-columns // 4) * 4
            if padded != (rows, columns):
                yield padded, True
                yield (math.prod(padded),), True


# --- what the tensors hold -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """Elements of a tensor that are wrong: how many, where the first is, and what it is."""

    count: int
    position: list[int]
    text: str


def fault_of(tensor: Stored, role: str, steps: Any = None) -> Fault | None:
    """Look through codes or scales, at most 2^20 elements at once.

    Wrong are: e4m3 codes and scales that are NaN; e8m0 scales that are NaN (0xFF); e4m3 scales below 0; floating-point
    scales that are NaN, Inf, 0 or negative. e2m1 codes cannot be wrong, an e4m3 scale may be 0 (its block is zeros).
    Other dtypes are not looked at: no family has them.

    Parameters
    ----------
    tensor : Stored
    role : str
        "codes", "scale", "global_scale" or "inputs".
    steps : callable, optional
        Called with the number of bytes of each part that has been looked at.
    """
    e4m3, e8m0 = tensor.dtype == "F8_E4M3", tensor.dtype in E8M0
    if not e4m3 and (role == "codes" or not (e8m0 or tensor.dtype in FLOAT)):
        if steps:
            steps(tensor.nbytes)
        return None
    flat = tensor.array.reshape(-1)
    count, first, what = 0, 0, ""
    for start in range(0, flat.size, _TILE):
        part = flat[start : start + _TILE]
        if e4m3:
            bits = part.view(np.uint8)
            bad = bits & 0x7F == 0x7F
            if role != "codes":
                bad |= bits > 0x80
        elif e8m0:
            bad = part.view(np.uint8) == 0xFF
        else:
            value = part.astype(np.float32)
            bad = ~(np.isfinite(value) & (value > 0))
        if bad.any():
            if not count:
                at = int(np.argmax(bad))
                first, what = start + at, f"{float(part.view(np.uint8).view(_E8M0)[at] if e8m0 else part[at]):g}"
                if e4m3 or e8m0:
                    what += f" (code {int(part.view(np.uint8)[at]):#04x})"
            count += int(np.count_nonzero(bad))
        if steps:
            steps(part.nbytes)
    if not count:
        return None
    position = [int(i) for i in np.unravel_index(first, tensor.shape)] if tensor.shape else []
    kind = {"codes": "codes are NaN", "scale": "scales are not finite and positive"}.get(
        role, "numbers are not finite and positive"
    )
    return Fault(count, position, f"{count} of {flat.size} {kind}, the first at {position}: {what}")


_E8M0 = FORMATS["float8_e8m0fnu"].dtype


def build(
    match: Match, tensors: Mapping[str, Stored], expert: int | None = None, device: str = "cpu"
) -> QuantizedTensor:
    """The weight that the tensors of a module mean: on the host, codes stay in the map; or on a GPU.

    A scale for the whole tensor stands in every row. A global scale that divides is inverted once, in float32. On a
    GPU codes are looked through there: the host alone would take longer than to copy them.

    Raises
    ------
    CheckpointError
        If a code is NaN, or a scale not finite and positive (`fault_of`).
    """
    family = match.family
    _refuse(tensors, family.scale, "scale")
    _refuse(tensors, family.global_scale, "global_scale")
    n, k = match.shape
    codes, scale = tensors[family.codes].array, tensors[family.scale].array
    if match.experts is not None:
        codes, scale = codes[expert], scale[expert]
    codes = codes.view(np.uint8).reshape(n, -1)
    if family.scale_dtype != "float32":
        scale = scale.view(np.uint8)
        if match.swizzled:
            scale = from_128x4(scale.reshape(-1), n, -(-k // match.block[1]))
    else:
        scale = scale.astype(np.float32)  # exact, and on addresses of its own
        if match.block == TENSOR:
            scale = np.full((n, 1), scale.reshape(()))
        elif match.block != CHANNEL:
            scale = scale.reshape(-(-n // match.block[0]), -1)
    factor = None
    if family.global_scale:
        factor = global_factor(family, tensors[family.global_scale])
    weight = QuantizedTensor(
        codes,
        scale,
        dtype=family.dtype,
        scale_dtype=family.scale_dtype,
        shape=match.shape,
        block=CHANNEL if match.block == TENSOR else match.block,
        global_scale=factor,
        _trusted=True,
    ).to(device)
    if device == "cpu" or weight.has_nan():
        _refuse(tensors, family.codes, "codes")
    return weight


def _refuse(tensors: Mapping[str, Stored], suffix: str | None, role: str) -> None:
    if suffix and (fault := fault_of(tensors[suffix], role)):
        raise wrong(tensors[suffix], f"{fault.text}; the file must be made again")


def global_factor(family: Family, tensor: Stored) -> np.ndarray:
    """What multiplies, float32 [1]: the stored number, or its inverse where the family divides.

    Raises
    ------
    CheckpointError
        If the inverse is not finite and positive in float32.
    """
    value = tensor.array.astype(np.float32).reshape(1)
    with np.errstate(divide="ignore", over="ignore", under="ignore"):
        factor = np.float32(1) / value if family.divides else value
    if not (np.isfinite(factor) & (factor > 0)).all():
        raise wrong(tensor, f"{'1 / ' if family.divides else ''}{value[0]:g} is no positive float32 number")
    return factor
