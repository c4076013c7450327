"""Small checkpoints of every family, made from one weight, and what each of their files means, in float64.

Nothing here comes from cufp8 or ml_dtypes: formats are those of `reference` and `reference_blocks`, layouts and the
directions of scales are written from each family's own definition. What a file means is computed from its stored
numbers, not from the weight that they were made of.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import reference
import reference_blocks as blocks

N, K = 200, 320  # ragged against 128 x 128
LAYER, OTHER = "model.layers.0.mlp.down_proj", "model.norm.weight"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"

Tensor = tuple[str, tuple[int, ...], bytes]  # dtype in the header, shape in the header, data


@dataclass(frozen=True)
class Made:
    """A checkpoint of one family.

    Attributes
    ----------
    name, family : str
        Of the case; what cufp8 calls the family.
    tensors : dict of str to (dtype, shape, bytes)
    values : dict of str to array
        Module -> what it means, float64 [N, K].
    declared : str
        The scheme that the file is made for.
    scales : tuple of str
        Names of all its scale tensors.
    config, modelopt : dict or None
        quantization_config, and hf_quant_config.json.
    metadata : dict
        Of the header.
    """

    name: str
    family: str
    tensors: dict[str, Tensor]
    values: dict[str, np.ndarray]
    declared: str
    scales: tuple[str, ...]
    config: dict[str, Any] | None = None
    modelopt: dict[str, Any] | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Those of `scales` that scale activations."""
        return tuple(
            s
            for s in self.scales
            if s.endswith((".input_scale", ".input_global_scale", ".scale_input", ".activation_scale"))
        )

    def without(self, name: str) -> Made:
        return replace(self, tensors={n: t for n, t in self.tensors.items() if n != name})

    def with_tensor(self, name: str, tensor: Tensor) -> Made:
        return replace(self, tensors={**self.tensors, name: tensor})


def tensor(dtype: str, a: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    a = np.ascontiguousarray(a)
    return dtype, a.shape if shape is None else shape, a.tobytes()


def f32(a: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    return tensor("F32", np.asarray(a, np.float32), shape)


def bf16(a: Any, shape: tuple[int, ...] | None = None) -> Tensor:
    """Cut, not rounded: `cut` gives the values."""
    return tensor("BF16", (np.asarray(a, np.float32).view(np.uint32) >> 16).astype(np.uint16), shape)


def cut(a: Any) -> np.ndarray:
    """To the numbers that bfloat16 has, in float64."""
    return (np.asarray(a, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)


def safetensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def write(folder: Path, made: Made, shards: int = 1) -> Path:
    """The checkpoint in a folder; with several shards tensors go round them, so that codes and scales are apart."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"model_type": "made"}
    if made.config is not None:
        config["quantization_config"] = made.config
    (folder / "config.json").write_text(json.dumps(config))
    if made.modelopt is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(made.modelopt))
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors(made.tensors, made.metadata))
        return folder
    places = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(made.tensors)}
    for shard in set(places.values()):
        part = {name: t for name, t in made.tensors.items() if places[name] == shard}
        (folder / shard).write_bytes(safetensors(part, made.metadata))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


# --- quantisers ------------------------------------------------------------------------------------------


def weight(n: int = N, k: int = K, seed: int = 0) -> np.ndarray:
    """float32, of several magnitudes, with a block of zeros."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k)) * 0.02 * 2.0 ** rng.integers(-3, 3, (n, 1))
    w[min(3, n - 1), 32:64] = 0
    return w.astype(np.float32)


def spread(scale: np.ndarray, n: int, k: int, rows: int = 128, columns: int = 128) -> np.ndarray:
    """A scale for each element, by the index of its block."""
    return scale[np.arange(n)[:, None] // rows, np.arange(k)[None, :] // columns]


def e4m3(w: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return reference.encode(np.clip(w.astype(np.float64) / scale, -448, 448))


def block_amax(w: np.ndarray, rows: int = 128, columns: int = 128) -> np.ndarray:
    a = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[0], rows), axis=0)
    return np.maximum.reduceat(a, np.arange(0, w.shape[1], columns), axis=1)


def power(codes: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, codes.astype(np.int64) - 127)


# --- the families ----------------------------------------------------------------------------------------


def _ct(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"g": group}}


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}
    return {
        "config": config,
        "modelopt": {"quantization": {"quant_algo": algorithm, "exclude_modules": ["lm_head"], **more}},
    }


def families(w: np.ndarray | None = None) -> dict[str, Made]:
    """Every family, of one weight."""
    w = weight() if w is None else w
    n, k = w.shape
    made: dict[str, Made] = {}

    def add(
        name: str,
        family: str,
        declared: str,
        tensors: dict[str, Tensor],
        values: Any,
        *,
        module: str = LAYER,
        **more: Any,
    ) -> None:
        scales = tuple(f"{module}{s}" for s in tensors if "scale" in s)
        named = {f"{module}{suffix}": t for suffix, t in tensors.items()}
        named |= {f"{module}.bias": bf16(np.arange(n) / 64), OTHER: bf16(np.ones(k))}
        made[name] = Made(name, family, named, {module: values}, declared, scales, **more)

    amax = np.abs(w).astype(np.float64)
    s = blocks.fp32(amax.max() / 448)
    row = blocks.fp32(amax.max(axis=1, keepdims=True) / 448)
    one = {".weight": tensor("F8_E4M3", e4m3(w, s)), ".weight_scale": f32(s, ()), ".input_scale": f32(0.05, ())}
    one_values = reference.VALUES[e4m3(w, s)] * s
    bits8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    token = {**bits8, "strategy": "token", "dynamic": True}

    t = cut(s)
    add("ct_fp8_tensor", "compressed-tensors FP8", "FP8", {
        ".weight": tensor("F8_E4M3", e4m3(w, t)), ".weight_scale": bf16(s, (1,)), ".input_scale": bf16(0.05, (1,)),
    }, reference.VALUES[e4m3(w, t)] * t,
        config=_ct("float-quantized", {**bits8, "strategy": "tensor"}, {**bits8, "strategy": "tensor"}))  # fmt: skip
    t = cut(row)
    add("ct_fp8_channel", "compressed-tensors FP8", "FP8_DYNAMIC", {
        ".weight": tensor("F8_E4M3", e4m3(w, t)), ".weight_scale": bf16(row),
    }, reference.VALUES[e4m3(w, t)] * t,
        config=_ct("float-quantized", {**bits8, "strategy": "channel"}, token))  # fmt: skip

    block = blocks.fp32(block_amax(amax) / 448)
    codes = e4m3(w, spread(block, n, k))
    block_values = reference.VALUES[codes] * spread(block, n, k)
    blocked = {".weight": tensor("F8_E4M3", codes)}
    add("ct_fp8_block", "compressed-tensors FP8", "FP8_BLOCK", {**blocked, ".weight_scale": f32(block)}, block_values,
        config=_ct("float-quantized", {**bits8, "strategy": "block", "block_structure": [128, 128]},
                   token))  # fmt: skip
    add("autofp8_static", "AutoFP8", "FP8", one, one_values,
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})  # fmt: skip
    add("autofp8_dynamic", "AutoFP8", "FP8_DYNAMIC", {x: one[x] for x in (".weight", ".weight_scale")}, one_values,
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None})  # fmt: skip

    deepseek = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    add("deepseek_v3", "DeepSeek FP8", "FP8_BLOCK", {**blocked, ".weight_scale_inv": f32(block)}, block_values,
        config=deepseek)  # fmt: skip
    t = cut(block)
    codes = e4m3(w, spread(t, n, k))
    add("qwen3_fp8", "DeepSeek FP8", "FP8_BLOCK", {
        ".weight": tensor("F8_E4M3", codes), ".weight_scale_inv": bf16(block),
    }, reference.VALUES[codes] * spread(t, n, k),
        config={**deepseek, "modules_to_not_convert": ["lm_head"]})  # fmt: skip
    t = cut(s)
    add("ministral_fp8", "DeepSeek FP8", "FP8", {
        ".weight": tensor("F8_E4M3", e4m3(w, t)), ".weight_scale_inv": bf16(s, ()), ".activation_scale": bf16(0.05, ()),
    }, reference.VALUES[e4m3(w, t)] * t,
        config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None})  # fmt: skip
    e = blocks.e8m0(blocks.fp32(block_amax(amax)), "RCEIL", "float8_e4m3fn")
    codes = e4m3(w, spread(power(e), n, k))
    add("deepseek_v4_dense", "DeepSeek-V4 FP8", "FP8_BLOCK", {
        ".weight": tensor("F8_E4M3", codes), ".scale": tensor("F8_E8M0", e),
    }, reference.VALUES[codes] * spread(power(e), n, k), module="layers.0.attn.wq_a",
        config={**deepseek, "scale_fmt": "ue8m0"})  # fmt: skip

    add("modelopt_fp8", "ModelOpt FP8", "FP8", one, one_values, **_modelopt("FP8"))
    codes = e4m3(w, row)
    row_values = reference.VALUES[codes] * row
    channel = {".weight": tensor("F8_E4M3", codes), ".weight_scale": f32(row[:, 0])}
    add(
        "modelopt_fp8_pc_pt",
        "ModelOpt FP8",
        "FP8_DYNAMIC",
        channel,
        row_values,
        **_modelopt("FP8_PER_CHANNEL_PER_TOKEN"),
    )
    add("modelopt_fp8_pb_wo", "ModelOpt FP8", "FP8A16", {
        **blocked, ".weight_scale": f32(block[:, None, :, None]),
    }, block_values, **_modelopt("fp8_pb_wo"))  # fmt: skip
    by_row = {**channel, ".weight_scale": f32(row)}
    add("ct_fp8_channel_f32", "compressed-tensors FP8", "FP8_DYNAMIC", by_row, row_values,
        config=_ct("float-quantized", {**bits8, "strategy": "channel"}, token))  # fmt: skip
    add("fbgemm_fp8", "fbgemm FP8", "FP8_DYNAMIC", by_row, row_values,
        config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0})  # fmt: skip
    label = tensor("U8", np.frombuffer(b'{"format": "float8_e4m3fn"}', np.uint8))
    add("comfyui", "ComfyUI FP8", "FP8", {**one, ".comfy_quant": label}, one_values, module="blocks.0.q",
        metadata={"_quantization_metadata": '{"layers": {}}'})  # fmt: skip
    add("comfyui_scaled", "ComfyUI scaled FP8", "FP8", {
        ".weight": one[".weight"], ".scale_weight": one[".weight_scale"], ".scale_input": one[".input_scale"],
    }, one_values, module="blocks.0.q")  # fmt: skip

    q = blocks.quantize(w, "NVFP4A16")
    divisor = blocks.fp32(1 / q.global_scale.astype(np.float64))
    g = blocks.fp32(1 / divisor)  # the multiplier that ModelOpt's file has too, so that both mean the same
    nv_values = _nvfp4(q, k) * g
    nv = {".weight": tensor("U8", q.codes), ".weight_scale": tensor("F8_E4M3", q.scale), ".weight_scale_2": f32(g, ())}
    static = {**nv, ".input_scale": f32(0.001, ())}
    add("modelopt_nvfp4", "ModelOpt NVFP4", "NVFP4", static, nv_values, **_modelopt("NVFP4", group_size=16))
    add("modelopt_w4a16", "ModelOpt NVFP4", "NVFP4A16", nv, nv_values, **_modelopt("W4A16_NVFP4", group_size=16))
    bits4 = {**bits8, "num_bits": 4, "group_size": 16, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}
    add("ct_nvfp4", "compressed-tensors NVFP4", "NVFP4", {
        ".weight_packed": nv[".weight"], ".weight_scale": nv[".weight_scale"],
        ".weight_global_scale": f32(divisor, (1,)), ".input_global_scale": f32(1000, (1,)),
    }, nv_values, config=_ct("nvfp4-pack-quantized", bits4, {**bits4, "dynamic": "local"}))  # fmt: skip

    q = blocks.quantize(w, "MXFP4A16")
    mx4, packed, exponents = (
        {**bits4, "group_size": 32, "strategy": "group"},
        tensor("U8", q.codes),
        tensor("U8", q.scale),
    )
    mx_values = blocks.FP4_VALUES[blocks.unpack(q.codes, k)] * spread(power(q.scale), n, k, 1, 32)
    add("ct_mxfp4", "compressed-tensors MXFP4", "MXFP4A16", {".weight_packed": packed, ".weight_scale": exponents},
        mx_values, config=_ct("mxfp4-pack-quantized", mx4, None))  # fmt: skip
    add("ct_mxfp4_both", "compressed-tensors MXFP4", "MXFP4", {".weight_packed": packed, ".weight_scale": exponents},
        mx_values, config=_ct("mxfp4-pack-quantized", mx4, {**mx4, "dynamic": True}))  # fmt: skip
    typed = ("F8_E8M0", *exponents[1:])
    add("mxfp4_typed", "MXFP4", "MXFP4A16", {".weight": ("F4", (n, k), packed[2]), ".weight_scale": typed}, mx_values)
    add("deepseek_v4_expert", "DeepSeek-V4 FP4", "MXFP4_FP8", {".weight": ("I8", *packed[1:]), ".scale": typed},
        mx_values, module="layers.0.ffn.experts.0.w1", config={**deepseek, "expert_dtype": "fp4"})  # fmt: skip

    q8 = blocks.quantize(w, "MXFP8A16")
    mx8 = {".weight": tensor("F8_E4M3", q8.codes), ".weight_scale": tensor("U8", q8.scale)}
    inverse = {".weight": mx8[".weight"], ".weight_scale_inv": mx8[".weight_scale"]}
    add("ct_mxfp8", "compressed-tensors MXFP8", "MXFP8", mx8, q8.values,
        config=_ct("mxfp8-quantized", {**bits8, "group_size": 32, "strategy": "group"}, token))  # fmt: skip
    add("modelopt_mxfp8", "ModelOpt MXFP8", "MXFP8", mx8, q8.values, **_modelopt("MXFP8", group_size=32))
    add("minimax_mxfp8", "MXFP8", "MXFP8", mx8, q8.values, config={"quant_method": "mxfp8"})
    add("sglang_mxfp8", "MXFP8", "MXFP8", inverse, q8.values, config={"quant_method": "mxfp8"})

    both = [q, blocks.quantize(w[::-1], "MXFP4A16")]
    stack = tensor("U8", np.stack([x.codes for x in both]).reshape(2, n, k // 32, 16))
    stacked_scales = tensor("U8", np.stack([x.scale for x in both]))
    bias = bf16(np.arange(2 * n).reshape(2, n) / 64)
    for name, family, module, parts in (
        ("gpt_oss", "gpt-oss MXFP4", EXPERTS, ("_blocks", "_scales", "_bias")),
        (
            "gpt_oss_original",
            "gpt-oss MXFP4 (original)",
            "block.0.mlp.mlp1",
            ("_weight.blocks", "_weight.scales", "_bias"),
        ),
    ):
        tensors = dict(zip((module + p for p in parts), (stack, stacked_scales, bias), strict=True))
        values = {f"{module}.0": mx_values, f"{module}.1": mx_values[::-1]}
        config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        tensors[OTHER] = bf16(np.ones(k))
        made[name] = Made(name, family, tensors, values, "MXFP4A16", (module + parts[1],), config)
    return made


def _nvfp4(q: blocks.Blocks, k: int) -> np.ndarray:
    """Without the global scale."""
    codes = blocks.FP4_VALUES[blocks.unpack(q.codes, k)]
    return codes * spread(reference.VALUES[q.scale], q.codes.shape[0], k, 1, 16)
