"""What `cufp8 check` finds and `cufp8 inspect` tells; what was once read wrongly, each under its own name."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_files as files
import numpy as np
import pytest
import reference
import reference_blocks as blocks

import cufp8
from cufp8 import cli
from cufp8.checkpoint import CheckpointError, check, show
from cufp8.checkpoint.families import Config

MADE = files.families()
W = files.weight()


def load(folder: Path, made: files.Made, **options: Any) -> cufp8.Checkpoint:
    return cufp8.load(files.write(folder, made), device="cpu", **options)


def found(folder: Path, made: files.Made | None = None, severity: str | None = None) -> list[check.Finding]:
    """The findings in a folder, after `made` is written there."""
    if made is not None:
        files.write(folder, made)
    return [f for f in check.check(folder) if severity in (None, f.severity)]


def only(findings: list[check.Finding]) -> check.Finding:
    assert len(findings) == 1, [str(f) for f in findings]
    return findings[0]


def of(module: str, w: np.ndarray, name: str = "modelopt_fp8", **more: Any) -> dict[str, files.Tensor]:
    """The tensors of a family for another weight, under the name of another module."""
    made = files.families(w)[name]
    return {n.replace(files.LAYER, module): t for n, t in made.tensors.items() if n != files.OTHER}


@pytest.mark.parametrize("name", sorted(MADE))
def test_nothing_is_wrong_with_any_family(tmp_path: Path, name: str) -> None:
    """But a note where U8 scales are e8m0."""
    made = MADE[name]
    u8 = [n for n in made.scales if made.tensors[n][0] == "U8"]
    assert [(f.severity, f.tensor) for f in found(tmp_path, made)] == [("note", n) for n in u8]


# What was once read wrongly (numbers are those of the issue trackers)


def test_modelopt_multiplies_and_compressed_tensors_divides(tmp_path: Path) -> None:
    """modular#6600: a divisor taken for a multiplier. The same weight in both families gives the same y."""
    a, b = (load(tmp_path / n, MADE[n])[files.LAYER] for n in ("modelopt_nvfp4", "ct_nvfp4"))
    x = np.random.default_rng(1).standard_normal((7, files.K)).astype(np.float32)
    y = a.linear()(x)
    assert np.abs(y).max() > 0.1
    np.testing.assert_array_equal(y, b.linear()(x))
    np.testing.assert_array_equal(a.weight.global_scale, b.weight.global_scale)
    # The stored number is still there.
    assert b.tensors[".weight_global_scale"].array[0] == np.float32(1 / blocks.fp32(a.weight.global_scale[0]))


@pytest.mark.parametrize("name, suffix", [("ct_nvfp4", ".weight_global_scale"), ("modelopt_nvfp4", ".weight_scale_2")])
def test_a_global_scale_in_the_other_direction_is_noticed(tmp_path: Path, name: str, suffix: str) -> None:
    made = MADE[name]
    stored = np.frombuffer(made.tensors[files.LAYER + suffix][2], np.float32)
    finding = only(found(tmp_path, made.with_tensor(files.LAYER + suffix, files.f32(1 / stored, (1,)))))
    assert finding.severity == "warning" and finding.tensor == files.LAYER + suffix
    assert "the greatest weight is" in finding.what and "was it written as one that" in finding.todo


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("n, k", [(200, 320), (72, 144), (130, 64), (8, 16)])
def test_linear_scales_are_not_swizzled_again_and_swizzled_ones_are_undone(
    tmp_path: Path, n: int, k: int, flat: bool
) -> None:
    """modular#6600: linear scales were swizzled. Padded shapes tell the two apart."""
    made = files.families(files.weight(256, 320))["modelopt_nvfp4"]  # made for any shape by what follows
    q = blocks.quantize(files.weight(n, k), "NVFP4A16")
    buffer = np.zeros(-(-n // 128) * 128 * -(-q.scale.shape[1] // 4) * 4, np.uint8)
    for r in range(n):
        for c in range(q.scale.shape[1]):
            buffer[blocks.offset_128x4(r, c, q.scale.shape[1])] = q.scale[r, c]
    shape = (buffer.size,) if flat else (-(-n // 128) * 128, -(-q.scale.shape[1] // 4) * 4)
    weights = {
        files.LAYER + ".weight": files.tensor("U8", q.codes),
        files.LAYER + ".weight_scale_2": files.f32(q.global_scale, ()),
        files.LAYER + ".input_scale": files.f32(1, ()),
    }
    values = []
    for i, scale in enumerate((files.tensor("F8_E4M3", q.scale), ("F8_E4M3", shape, buffer.tobytes()))):
        tensors = {**weights, files.LAYER + ".weight_scale": scale}
        entry = load(tmp_path / str(i), replace(made, tensors=tensors))[files.LAYER]
        assert entry.match.swizzled == bool(i)
        values.append(entry.dequantize())
        assert not found(tmp_path / str(i))
    np.testing.assert_array_equal(values[0], q.values.astype(np.float32))
    np.testing.assert_array_equal(values[1], values[0])


@pytest.mark.parametrize("name", ["modelopt_nvfp4", "ct_nvfp4", "ct_mxfp4", "mxfp4_typed", "deepseek_v4_expert"])
def test_the_first_of_two_codes_is_in_the_low_nibble(tmp_path: Path, name: str) -> None:
    """imp#567: the nibbles of another format's order. A row that counts up through all codes cannot hide that."""
    ramp = np.tile(np.concatenate([blocks.E2M1, -blocks.E2M1]), (4, 4)).astype(np.float32)
    made = files.families(ramp)[name]
    codes = next(t for n, t in made.tensors.items() if n.endswith(("weight", "weight_packed")))
    assert codes[2][:8] == bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
    w = next(iter(load(tmp_path, made).values())).dequantize()
    np.testing.assert_allclose(w, ramp, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_u8_scales_are_e8m0_codes_and_no_numbers(tmp_path: Path, dtype: str) -> None:
    """omlx#2159: weights 450,000 times too large. Both spellings mean powers of two, and check says so."""
    made = MADE["modelopt_mxfp8"]
    name = files.LAYER + ".weight_scale"
    made = made.with_tensor(name, (dtype, *made.tensors[name][1:]))
    entry = load(tmp_path, made)[files.LAYER]
    np.testing.assert_array_equal(entry.dequantize(), made.values[files.LAYER].astype(np.float32))
    assert ["e8m0 codes" in f.what for f in found(tmp_path)] == [True] * (dtype == "U8")


def test_e8m0_scales_that_were_converted_as_numbers_are_noticed(tmp_path: Path) -> None:
    """sglang#26701: 2^-7, 2^-2, 1, 8, 2^13 became the bytes 0, 0, 1, 8, 0."""
    made = MADE["modelopt_mxfp8"]
    name = files.LAYER + ".weight_scale"
    numbers = np.resize(np.array([0, 0, 1, 8, 0], np.uint8), made.tensors[name][1])
    finding = only(found(tmp_path, made.with_tensor(name, files.tensor("U8", numbers)), "warning"))
    assert finding.tensor == name and "converted as numbers" in finding.todo


@pytest.mark.parametrize("n, k", [(576, 256), (587, 300), (1000, 128), (8, 4544), (1, 1), (128, 129)])
@pytest.mark.parametrize("name", ["deepseek_v3", "ct_fp8_block", "modelopt_fp8_pb_wo", "deepseek_v4_dense"])
def test_blocks_of_128_at_ragged_edges(tmp_path: Path, name: str, n: int, k: int) -> None:
    """Model-Connect#1115: 1000 / 8 = 125 taken for the block; compressed-tensors#547, auto-round#747: not divisible;
    unsloth#6848: nor with e8m0 scales."""
    w = np.random.default_rng(2).standard_normal((n, k)).astype(np.float32)
    w *= 2.0 ** np.repeat(np.arange(-(-n // 128)) % 5, 128)[:n, None].astype(np.float32)  # each block another scale
    amax = files.block_amax(np.abs(w))
    made = MADE[name]
    module = next(iter(made.values))
    if name == "deepseek_v4_dense":
        e = blocks.e8m0(blocks.fp32(amax), "RCEIL", "float8_e4m3fn")
        scale, stored = files.power(e), files.tensor("F8_E8M0", e)
    else:
        scale = blocks.fp32(amax / 448)
        stored = files.f32(scale[:, None, :, None] if "pb_wo" in name else scale)
    codes = files.e4m3(w, files.spread(scale, n, k))
    tensors = {f"{module}.weight": files.tensor("F8_E4M3", codes), made.scales[0]: stored}
    entry = load(tmp_path, replace(made, tensors=tensors))[module]
    values = (reference.VALUES[codes] * files.spread(scale, n, k)).astype(np.float32)
    np.testing.assert_array_equal(entry.dequantize(), values)
    np.testing.assert_array_equal(entry.linear()(np.eye(k, dtype=np.float32)).T, values)
    assert not found(tmp_path)


def test_projections_with_different_scales_are_told_and_not_merged(tmp_path: Path) -> None:
    """vllm#47515: q, k and v with scales 1 : 2 : 5 got one of them by max()."""
    tensors, values = {}, {}
    for name, factor in (("q_proj", 1), ("k_proj", 2), ("v_proj", 5)):
        made = files.families(W * np.float32(factor))["modelopt_nvfp4"]
        tensors |= of(f"layers.0.attn.{name}", W * np.float32(factor), "modelopt_nvfp4")
        values[f"layers.0.attn.{name}"] = made.values[files.LAYER]
    checkpoint = load(tmp_path, replace(MADE["modelopt_nvfp4"], tensors=tensors))
    for module, value in values.items():
        np.testing.assert_array_equal(checkpoint[module].dequantize(), value.astype(np.float32))
    finding = only(found(tmp_path))
    assert finding.severity == "note" and "differ by a factor up to 5" in finding.what


def test_projections_with_different_global_scales_are_fused_exactly(tmp_path: Path) -> None:
    """vllm#47515, vllm#41769, auto-round#2379: one global scale for q, k and v of 1 : 2 : 5 makes two of them wrong."""
    x = np.random.default_rng(5).standard_normal((6, files.K)).astype(np.float32)
    layers, values = [], []
    for i, factor in enumerate((1, 2, 5)):
        made = files.families(W * np.float32(factor))[("modelopt_nvfp4", "ct_nvfp4", "modelopt_nvfp4")[i]]
        layers.append(load(tmp_path / str(i), made)[files.LAYER].linear())
        values.append(made.values[files.LAYER])
    fused = cufp8.fuse(layers)
    np.testing.assert_array_equal(fused.weight.dequantize(), np.concatenate(values).astype(np.float32))
    assert len(np.unique(fused.weight.global_scale)) == 3
    np.testing.assert_allclose(fused(x), np.concatenate([layer(x) for layer in layers], axis=1), rtol=1e-5, atol=1e-5)


def test_rows_keep_the_scale_of_their_block_when_projections_are_joined(tmp_path: Path) -> None:
    """sglang#35703: rows of q, k and v were put elsewhere, and the scales of their blocks were not."""
    layers, values = [], []
    for i, n in enumerate((256, 128, 200)):
        w = files.weight(n, 320, seed=i) * 2.0 ** np.repeat(np.arange(-(-n // 128)), 128)[:n, None]
        made = files.families(w.astype(np.float32))["deepseek_v3"]
        layers.append(load(tmp_path / str(i), made)[files.LAYER].linear())
        values.append(made.values[files.LAYER])
    fused = cufp8.fuse(layers)
    np.testing.assert_array_equal(fused.weight.dequantize(), np.concatenate(values).astype(np.float32))
    with pytest.raises(ValueError, match="fuse: layer 0 has 200 rows; all but the last need a multiple of 128"):
        cufp8.fuse(layers[::-1])


def test_a_missing_scale_of_activations_is_an_error_and_no_zero(tmp_path: Path) -> None:
    """vllm#45212: an expert without input_scale divided by 0."""
    made = MADE["modelopt_nvfp4"].without(files.LAYER + ".input_scale")
    finding = only(found(tmp_path, made))
    assert (finding.severity, finding.tensor) == ("error", files.LAYER + ".input_scale")
    with pytest.raises(CheckpointError, match="input_scale, which is missing"):
        cufp8.load(tmp_path, device="cpu")[files.LAYER].linear(activations="declared")


def test_fp8_codes_without_a_scale_are_no_weight(tmp_path: Path) -> None:
    """miles#1641: the codes were passed on as the weight."""
    made = MADE["deepseek_v3"].without(files.LAYER + ".weight_scale_inv")
    with pytest.raises(
        CheckpointError, match=r"weight_scale.* is missing \(or .*\) beside weight F8_E4M3 \[200, 320\]"
    ):
        load(tmp_path, made)[files.LAYER].weight  # noqa: B018
    assert only(found(tmp_path)).severity == "error"


@pytest.mark.parametrize("value", [1e-39, 1e30])
def test_scales_that_were_never_written_are_noticed(tmp_path: Path, value: float) -> None:
    """vllm#54444: memory that was allocated and never loaded."""
    made = MADE["modelopt_fp8_pc_pt"]
    name = files.LAYER + ".weight_scale"
    scale = np.frombuffer(made.tensors[name][2], np.float32).copy()
    scale[7] = value
    finding = only(found(tmp_path, made.with_tensor(name, files.f32(scale))))
    assert finding.severity == "warning" and finding.tensor == name


def test_nan_in_a_block_of_zeros_scale_is_reported_with_its_position(tmp_path: Path) -> None:
    """Model-Optimizer#1633: 0x7F for a block of zeros."""
    made = MADE["modelopt_nvfp4"]
    name = files.LAYER + ".weight_scale"
    scale = np.frombuffer(made.tensors[name][2], np.uint8).reshape(files.N, -1).copy()
    scale[3, 2] = 0x7F
    finding = only(found(tmp_path, made.with_tensor(name, files.tensor("F8_E4M3", scale))))
    assert (finding.severity, finding.tensor, finding.position) == ("error", name, [3, 2])
    assert "nan (code 0x7f)" in finding.what and "block of zeros" in finding.todo
    with pytest.raises(CheckpointError, match=rf"{name}.*1 of 4000 .* the first at \[3, 2\]"):
        cufp8.load(tmp_path, device="cpu")[files.LAYER].weight  # noqa: B018


def test_input_scale_of_an_excluded_layer_is_extra_and_harmless(tmp_path: Path) -> None:
    """vllm#45132: lm_head.input_scale beside exclude_modules lm_head*."""
    made = MADE["modelopt_nvfp4"]
    made = made.with_tensor("lm_head.weight", files.bf16(W)).with_tensor("lm_head.input_scale", files.f32(1, ()))
    checkpoint = load(tmp_path, made)
    assert "lm_head" not in checkpoint and "lm_head.weight" in checkpoint.arrays
    finding = only(found(tmp_path))
    assert (finding.severity, finding.tensor) == ("warning", "lm_head.input_scale")
    assert "lm_head.weight is BF16" in finding.what


@pytest.mark.parametrize("name", ["modelopt_fp8", "ct_fp8_channel", "autofp8_static", "gpt_oss"])
def test_a_list_that_excludes_a_quantised_module(tmp_path: Path, name: str) -> None:
    """TensorRT-LLM#16196, vllm#31757: the list says no, the tensors say FP8. The tensors count."""
    made = MADE[name]
    module = next(iter(made.values)).removesuffix(".0") if name == "gpt_oss" else files.LAYER
    key = {"modelopt_fp8": "ignore", "ct_fp8_channel": "ignore"}.get(name, "modules_to_not_convert")
    pattern = {"modelopt_fp8": "model.layers.0*", "ct_fp8_channel": "re:.*mlp", "autofp8_static": "mlp"}
    config = {**made.config, key: [pattern.get(name, "model.layers.*.mlp.experts")]}
    checkpoint = load(tmp_path, replace(made, config=config))
    assert len(checkpoint) == len(made.values) and next(iter(checkpoint.values())).weight
    finding = only(found(tmp_path, severity="warning"))
    assert finding.tensor == module and "list of modules that are not quantised names it" in finding.what


def test_mlp_gate_does_not_swallow_mlp_gate_up_proj(tmp_path: Path) -> None:
    """sglang#23467, vllm#44628: short names in the list, matched by their beginning."""
    gate, up = "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_up_proj"
    cases = [("autofp8_static", p) for p in ("mlp.gate", gate)] + [
        ("ct_fp8_tensor", p) for p in (gate, r"re:.*\.gate$")
    ]
    for i, (name, pattern) in enumerate(cases):
        made = MADE[name]
        tensors = {**of(up, W, name), f"{gate}.weight": files.bf16(W), files.OTHER: made.tensors[files.OTHER]}
        key = "ignored_layers" if name == "autofp8_static" else "ignore"
        checkpoint = load(tmp_path / str(i), replace(made, tensors=tensors, config={**made.config, key: [pattern]}))
        assert list(checkpoint) == [up] and f"{gate}.weight" in checkpoint.arrays
        np.testing.assert_array_equal(checkpoint[up].dequantize(), made.values[files.LAYER].astype(np.float32))
        assert checkpoint.config.excludes(gate) == pattern and checkpoint.config.excludes(up) is None
        assert not found(tmp_path / str(i))


def test_a_bf16_layer_that_no_list_excludes(tmp_path: Path) -> None:
    """transformers#48349: a list with another prefix matches nothing, without a word."""
    made = MADE["ct_fp8_channel"]
    other = files.LAYER.replace(".0.", ".1.")
    made = made.with_tensor(f"{other}.weight", files.bf16(W))
    finding = only(found(tmp_path / "a", made))
    assert finding.severity == "warning" and finding.tensor == f"{other}.weight" and "called down_proj" in finding.what
    assert not found(tmp_path / "b", replace(made, config={**made.config, "ignore": [other]}))


def test_all_sixteen_codes_times_scales(tmp_path: Path) -> None:
    """tilelang#2704: 0.5 read as a normal number. All codes, with -0, and scales that are subnormal or the largest."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (126, 1))
    scale = np.arange(126, dtype=np.uint8)[:, None] + 1  # from 2^-9 to 448
    made = MADE["modelopt_nvfp4"]
    tensors = {
        files.LAYER + ".weight": files.tensor("U8", blocks.pack(codes)),
        files.LAYER + ".weight_scale": files.tensor("F8_E4M3", scale),
        files.LAYER + ".weight_scale_2": files.f32(1, ()),
        files.LAYER + ".input_scale": files.f32(1, ()),
    }
    w = load(tmp_path, replace(made, tensors=tensors))[files.LAYER].dequantize()
    want = (blocks.FP4_VALUES[codes] * reference.VALUES[scale]).astype(np.float32)
    np.testing.assert_array_equal(w.view(np.uint32), want.view(np.uint32))  # with the sign of -0


def test_values_beside_a_tie_go_to_the_nearest_code() -> None:
    """tt-metal#51971: 0.25000006 became 0. Both sides of each tie between codes, and each code itself."""
    up = np.nextafter(TIES := np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), np.float32(9))
    row = np.concatenate(
        [np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6]), TIES, up, np.nextafter(TIES, np.float32(0)), [0] * 3]
    )
    codes = [*range(8), 0, 2, 2, 4, 4, 6, 6, *range(1, 8), *range(7), 0, 0, 0]
    q = cufp8.quantize(np.stack([row, -row]).astype(np.float32), "MXFP4A16")
    assert q.scale.tolist() == [[127], [127]]
    found_codes = blocks.unpack(q.codes, 32)
    assert found_codes[0].tolist() == codes and found_codes[1].tolist() == [8 + code for code in codes]


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16", "MXFP8A16"])
def test_codes_are_those_of_the_scale_that_is_stored(scheme: str) -> None:
    """transformers#46763: divided by the scale before it was rounded. No other code is nearer with the stored one."""
    q, w = cufp8.quantize(W, scheme), W.astype(np.float64)
    size = q.block[1]
    scale = files.power(q.scale) if q.scale_dtype == "float8_e8m0fnu" else reference.VALUES[q.scale] * q.global_scale
    scale = files.spread(scale, *W.shape, 1, size)
    codes = reference.VALUES[~np.isnan(reference.VALUES)] if scheme == "MXFP8A16" else blocks.FP4_VALUES
    least = np.full(W.shape, np.inf)
    for value in codes:
        least = np.minimum(least, np.abs(w - value * scale))
    assert (np.abs(w - q.dequantize("float64")) <= least + 2.0**-22 * np.abs(w)).all()


@pytest.mark.parametrize("n", [1, 8, 72, 96, 1856])
@pytest.mark.parametrize("k", [16, 48, 144, 160, 2688])
def test_odd_sizes_need_no_padding(tmp_path: Path, n: int, k: int) -> None:
    """vllm#41232, flashinfer#4653: rejected or wrongly padded."""
    rng = np.random.default_rng(3)
    codes, scale = rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(1, 127, (n, k // 16), np.uint8)
    made = MADE["ct_nvfp4"]
    tensors = {
        files.LAYER + ".weight_packed": files.tensor("U8", codes),
        files.LAYER + ".weight_scale": files.tensor("F8_E4M3", scale),
        files.LAYER + ".weight_global_scale": files.f32(64, (1,)),
        files.LAYER + ".input_global_scale": files.f32(1, (1,)),
    }
    w = load(tmp_path, replace(made, tensors=tensors))[files.LAYER].dequantize()
    want = blocks.FP4_VALUES[blocks.unpack(codes, k)] * files.spread(reference.VALUES[scale], n, k, 1, 16) / 64
    np.testing.assert_array_equal(w, want.astype(np.float32))


@pytest.mark.parametrize("g, dtype", [(1.0, "bfloat16"), (2.0**-13, "float16")])
def test_small_scales_do_not_underflow_nor_large_sums_overflow(tmp_path: Path, g: float, dtype: str) -> None:
    """vllm#37464: scales from 2^-9 on, lost in bfloat16; vllm#37135: sums above 65504 before the global scale."""
    import ml_dtypes

    n, k = 16, 512
    codes = np.full((n, k // 2), 0x77, np.uint8)  # 6, 6
    scale = (
        np.tile(np.arange(1, 17, dtype=np.uint8)[:, None], (1, k // 16))
        if g == 1
        else np.full((n, k // 16), 0x7E, np.uint8)
    )
    made = MADE["modelopt_nvfp4"]
    tensors = {
        files.LAYER + ".weight": files.tensor("U8", codes),
        files.LAYER + ".weight_scale": files.tensor("F8_E4M3", scale),
        files.LAYER + ".weight_scale_2": files.f32(g, ()),
        files.LAYER + ".input_scale": files.f32(1, ()),
    }  # fmt: skip
    layer = load(tmp_path, replace(made, tensors=tensors))[files.LAYER].linear()
    y = layer(np.ones((1, k), getattr(ml_dtypes, dtype, dtype))).astype(np.float64)[0]
    want = 6 * k * g * reference.VALUES[scale[:, 0]]
    assert 6 * k * 448 > 65504 and np.isfinite(y).all() and (y > 0).all()
    np.testing.assert_allclose(y, want, rtol=2.0**-8)


def test_e8m0_codes_at_both_ends(tmp_path: Path) -> None:
    """vllm#46676: code 0 is 2^-127, no zero; 254 is 2^127; 255 is NaN and refused."""
    codes = np.array([[0, 1, 126, 254]], np.uint8).T
    made = MADE["ct_mxfp4"]
    weight, name = files.LAYER + ".weight_packed", files.LAYER + ".weight_scale"
    made = made.with_tensor(weight, files.tensor("U8", np.full((4, 16), 0x21, np.uint8)))
    made = made.with_tensor(name, files.tensor("U8", codes)).without(files.LAYER + ".bias")
    w = load(tmp_path, made)[files.LAYER].dequantize()
    want = np.tile([0.5, 1.0], (4, 16)) * files.power(codes)
    np.testing.assert_array_equal(w, want.astype(np.float32))
    assert (w > 0).all() and np.isfinite(w).all()
    made = made.with_tensor(name, files.tensor("U8", np.maximum(codes, [[0], [0], [255], [0]]).astype(np.uint8)))
    finding = found(tmp_path, made)[0]
    assert (finding.severity, finding.position) == ("error", [2, 0]) and "0xff" in finding.what


def test_an_nvfp4_label_on_fp8_tensors_is_told(tmp_path: Path) -> None:
    """Model-Optimizer#868: an "NVFP4" export that was FP8."""
    finding = only(found(tmp_path, replace(MADE["modelopt_fp8"], config=MADE["modelopt_nvfp4"].config)))
    assert finding.severity == "warning" and "the config says NVFP4, but F8_E4M3 codes" in finding.what
    assert cufp8.load(tmp_path, device="cpu")[files.LAYER].scheme == "FP8A16"


def test_the_path_of_weight_only_checkpoints_is_told(tmp_path: Path) -> None:
    """W4A16_NVFP4 runs weight-only everywhere, which people took for W4A4 (nvidia/Qwen3.6-27B-NVFP4, discussion 12)."""
    entry = load(tmp_path, MADE["modelopt_w4a16"])[files.LAYER]
    assert entry.declared == entry.scheme == "NVFP4A16"
    module = check.inspect(cufp8.load(tmp_path))["modules"][0]
    assert module["declared"] == module["scheme"] == "NVFP4A16"


@pytest.mark.parametrize("value", [np.inf, 0.0, np.nan, -1.0, 1e-45])
@pytest.mark.parametrize("name, suffix", [("ct_nvfp4", ".weight_global_scale"), ("modelopt_nvfp4", ".weight_scale_2")])
def test_a_global_scale_of_a_module_that_calibration_missed(
    tmp_path: Path, name: str, suffix: str, value: float
) -> None:
    """compressed-tensors#595: inf in 14 of 92,400 tensors."""
    made = MADE[name].with_tensor(files.LAYER + suffix, files.f32(value, (1,)))
    finding = found(tmp_path, made)[0]
    assert finding.tensor == files.LAYER + suffix
    if name == "ct_nvfp4" or value != 1e-45:  # ModelOpt's may be tiny: that is implausible, no error
        assert finding.severity == "error" and "calibrate again" in finding.todo
        with pytest.raises(CheckpointError, match=suffix):
            cufp8.load(tmp_path, device="cpu")[files.LAYER].weight  # noqa: B018


def test_layers_that_share_a_projection_need_not_have_it(tmp_path: Path) -> None:
    """TensorRT-LLM#16867: v_proj is k_proj's, and its name was asked for."""
    tensors = of("layers.0.attn.q_proj", W) | of("layers.0.attn.k_proj", W)
    checkpoint = load(tmp_path, replace(MADE["modelopt_fp8"], tensors=tensors))
    assert list(checkpoint) == ["layers.0.attn.q_proj", "layers.0.attn.k_proj"] and not found(tmp_path)
    with pytest.raises(KeyError):
        checkpoint["layers.0.attn.v_proj"]


@pytest.mark.parametrize(
    "bias", [files.bf16(np.full(files.N, np.nan)), files.f32([1]), ("I8", (files.N,), bytes(files.N))]
)
def test_a_bias_that_is_none(tmp_path: Path, bias: files.Tensor) -> None:
    made = MADE["ct_fp8_block"].with_tensor(files.LAYER + ".bias", bias)
    with pytest.raises(CheckpointError, match="down_proj.bias"):
        load(tmp_path, made)[files.LAYER].linear()
    assert "down_proj.bias" in str(only(found(tmp_path)))


def test_pre_quant_scale_is_refused_by_name(tmp_path: Path) -> None:
    made = MADE["modelopt_nvfp4"].with_tensor(files.LAYER + ".pre_quant_scale", files.bf16(np.ones(files.K)))
    with pytest.raises(CheckpointError, match="pre_quant_scale.*scales the activations"):
        load(tmp_path, made)[files.LAYER].linear()
    assert only(found(tmp_path)).severity == "error"


@pytest.mark.parametrize("half", ["a", "b"])
def test_a_low_rank_product_beside_the_weight_is_refused_by_name(tmp_path: Path, half: str) -> None:
    """NVFP4_SVD of ModelOpt: y has a product added to it; without it the weight is another."""
    name = f"{files.LAYER}.svdquant_lora_{half}"
    made = MADE["modelopt_nvfp4"].with_tensor(name, files.bf16(np.ones((8, files.K))))
    with pytest.raises(CheckpointError, match=f"{name}.*half of a product that is added to y.*ignore="):
        load(tmp_path, made)[files.LAYER].linear()
    assert only(found(tmp_path)).tensor == name
    assert not cufp8.load(tmp_path, ignore=[files.LAYER])


def test_codes_under_a_name_that_nobody_knows_are_told(tmp_path: Path) -> None:
    """Other libraries keep codes and scales under names of their own: a plain array of them is no weight."""
    made = MADE["modelopt_fp8"]
    codes = made.tensors[files.LAYER + ".weight"]
    tensors = {
        **made.tensors,
        "model.layers.1.mlp.down_proj._weight_qdata": codes,
        "scaled_fp8": (codes[0], (2,), b"12"),
    }
    finding = only(found(tmp_path, replace(made, tensors=tensors)))
    assert (finding.severity, finding.tensor) == ("warning", "model.layers.1.mlp.down_proj._weight_qdata")
    assert "is F8_E4M3, and no family that is known has codes of that name" in finding.what


def test_groups_of_compressed_tensors_are_chosen_by_name_then_by_class() -> None:
    bits8 = {"num_bits": 8, "type": "float"}
    groups = {
        "a": {"targets": ["re:.*experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
        "b": {"targets": ["Linear"], "weights": bits8, "input_activations": {**bits8, "dynamic": True}},
        "c": {"targets": ["x.o_proj"], "weights": {"num_bits": 8, "type": "int"}},
    }
    config = Config("compressed-tensors", {"config_groups": groups})
    names = ("x.experts.0.up", "x.q_proj", "x.o_proj")
    assert [config.scheme(name) for name in names] == ["NVFP4A16", "FP8_DYNAMIC", "INT8"]


def test_the_algorithm_of_all_experts_is_that_of_each() -> None:
    """ModelOpt's MIXED_PRECISION names the module that holds them."""
    layers = {"m.experts": {"quant_algo": "NVFP4"}, "m.experts.1.up": {"quant_algo": "FP8"}}
    config = Config("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    names = ("m.experts.0.down", "m.experts.1.up", "m.expertsx", "lm_head")
    assert [config.scheme(name) for name in names] == ["NVFP4", "FP8", None, None]
    assert Config("modelopt", {"quant_algo": "W4A8_MXFP4_FP8"}).scheme("x") == "MXFP4_FP8"


def test_quarks_list_of_excluded_modules_is_read(tmp_path: Path) -> None:
    config = {"quant_method": "quark", "exclude": ["lm_head", "re:.*down_proj"]}
    finding = only(found(tmp_path, replace(MADE["mxfp4_typed"], config=config)))
    assert finding.tensor == files.LAYER and "re:.*down_proj" in finding.what


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v4_dense", "ministral_fp8"])
def test_static_activations_without_their_scale_are_an_error(tmp_path: Path, name: str) -> None:
    """The config says static, whatever the family: the scale that is missing is named."""
    made = MADE[name]
    module = next(iter(made.values))
    scale = module + (".input_scale" if name == "deepseek_v4_dense" else ".activation_scale")
    made = replace(made.without(scale), config={"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(CheckpointError, match=f"FP8 needs {scale}, which is missing"):
        load(tmp_path, made)[module].linear(activations="declared")
    assert only(found(tmp_path, severity="error")).tensor == scale


@pytest.mark.parametrize("label", [b'{"format": "nvfp4"}', b"{", b"[1]", b"\xff", b'{"format": ["x"]}', b"null"])
def test_another_format_of_comfyui_is_refused(tmp_path: Path, label: bytes) -> None:
    made = MADE["comfyui"].with_tensor("blocks.0.q.comfy_quant", files.tensor("U8", np.frombuffer(label, np.uint8)))
    with pytest.raises(
        CheckpointError, match="comfy_quant.*convert it to the one that is read, 'float8_e4m3fn'.*ignore="
    ):
        load(tmp_path, made)["blocks.0.q"].weight  # noqa: B018


def test_another_block_than_128_is_refused(tmp_path: Path) -> None:
    made = MADE["deepseek_v3"]
    scale = np.ones((-(-files.N // 64), -(-files.K // 64)))
    made = made.with_tensor(files.LAYER + ".weight_scale_inv", files.f32(scale))
    made = replace(made, config={**made.config, "weight_block_size": [64, 64]})
    with pytest.raises(CheckpointError, match="blocks of 64 x 64, says the config; read are 128 x 128"):
        load(tmp_path, made)[files.LAYER].weight  # noqa: B018


@pytest.mark.parametrize(
    "pattern", ["re:(a+)+$", "re:(a|aa)*b", "re:((a+))+b", "re:(", "re:" + "(x?" * 3000, "re:.*.*.*.*.*!"], ids=len
)
def test_an_expression_that_may_never_end_is_left_out(tmp_path: Path, pattern: str) -> None:
    made = MADE["ct_fp8_channel"]
    finding = only(found(tmp_path, replace(made, config={**made.config, "ignore": [pattern]})))
    assert finding.severity == "note" and "an expression that is none or may take for ever" in finding.what


def test_names_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = "a\x1b[2J\n\r\u202eb[bold]"
    files.write(tmp_path / "a", replace(MADE["modelopt_fp8"], tensors=of(module, W)))
    files.write(tmp_path / "b", replace(MADE["modelopt_fp8"], tensors=of(module, W)).without(f"{module}.weight_scale"))
    for arguments, code in ((("inspect", "a"), 0), (("inspect", "b"), 1), (("check", "b"), 1)):
        text = run(capsys, arguments[0], tmp_path / arguments[1], code=code)
        assert "[2J" in text and "b[bold]" in text
        assert not {"\x1b", "\r", "\u202e"} & set(text)


def test_a_config_without_quantised_tensors_is_told(tmp_path: Path) -> None:
    made = MADE["modelopt_fp8"]
    tensors = {files.LAYER + ".weight": files.bf16(W)}
    finding = only(found(tmp_path, replace(made, tensors=tensors)))
    assert finding.severity == "warning" and "says modelopt, but no module has codes and scales" in finding.what


def test_the_readmes_lines_run(tmp_path: Path) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"^```py\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL) if "cufp8.load" in b)
    files.write(tmp_path, MADE["modelopt_nvfp4"])
    names: dict[str, Any] = {}
    exec(block.replace('"path/to/model"', f"{str(tmp_path)!r}, device='cpu'"), names)
    assert names["layer"].shape == names["w"].shape == (files.N, files.K) and names["norm"].shape == (files.K,)


def test_the_readmes_output_is_that_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, tensors = MADE["modelopt_nvfp4"], {"lm_head.weight": files.bf16(np.ones((1000, 256)))}
    for i, name in enumerate(("gate_proj", "down_proj") * 3):
        part = of(f"model.layers.{i // 2}.mlp.{name}", files.weight(512, 256, seed=i), "modelopt_nvfp4")
        tensors |= {n: t for n, t in part.items() if not n.endswith(".bias")}
    files.write(tmp_path / "good", replace(made, tensors=tensors))
    dtype, shape, data = tensors["model.layers.1.mlp.down_proj.weight_scale"]
    at = 18 * shape[1] + 3
    broken = {**tensors, "lm_head.input_scale": files.f32(1, ())}
    broken["model.layers.1.mlp.down_proj.weight_scale"] = dtype, shape, data[:at] + b"\x7f" + data[at + 1 :]
    del broken["model.layers.2.mlp.gate_proj.weight_scale_2"]
    files.write(tmp_path / "bad", replace(made, tensors=broken))
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\n\n```\n(.*?\n)```\n", readme, re.DOTALL)
    inspected, checked = run(capsys, "inspect", tmp_path / "good"), run(capsys, "check", tmp_path / "bad", code=1)
    assert checked == next(block for block in shown if block.startswith("error: "))
    for line in next(block for block in shown if block.startswith("model.")).splitlines():
        assert line.split("; served by")[0] in inspected


# The commands


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "cufp8", *map(str, arguments)], capture_output=True, text=True)


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main([str(a) for a in arguments]) == code
    return capsys.readouterr().out


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = MADE["ct_nvfp4"]
    good, bad = files.write(tmp_path / "good", made), tmp_path / "bad"
    files.write(bad, made.without(files.LAYER + ".weight_scale"))
    assert "kB looked at: 0 errors, 0 warnings, 0 notes" in run(capsys, "check", good)
    assert not json.loads(run(capsys, "check", good, "--json"))["findings"]
    text = " ".join(run(capsys, "check", bad, code=1).split())
    assert "weight_scale: is missing" in text and "1 error" in text
    result = json.loads(run(capsys, "check", bad, "--json", code=1))
    assert result["findings"][0].keys() == {"severity", "file", "tensor", "position", "what", "todo"}
    assert (result["errors"], result["warnings"], result["notes"]) == (1, 0, 0)
    assert json.loads(run(capsys, "check", bad, "--json", "--ignore", "*.down_proj"))["errors"] == 0
    (bad / "model.safetensors").write_bytes(b"\xff" * 20)
    assert json.loads(run(capsys, "check", bad, "--json", code=1))["errors"] == 1
    (finding,) = json.loads(run(capsys, "check", bad, "--json", code=1))["findings"]
    assert finding["file"] == str(bad / "model.safetensors") and "get the file again" in finding["todo"]
    done = command("check", tmp_path / "nowhere")
    assert (
        done.returncode == 1 and "cannot be opened" in " ".join(done.stdout.split()) and "Traceback" not in done.stderr
    )


def broken(folder: Path) -> dict[str, Path]:
    """What cannot be opened, each in its way."""
    made = {name: folder / name for name in ("cut", "dtype", "loop", "link", "config", "nothing", "index")}
    for name in ("cut", "dtype", "config"):
        files.write(made[name], MADE["modelopt_fp8"])
    file = made["cut"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    file = made["dtype"] / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"F8_E4M3", b"F8_E3M4"))
    (made["config"] / "config.json").write_text("{")
    for name in ("loop", "nothing", "index"):
        made[name].mkdir()
    (made["loop"] / "a.safetensors").symlink_to("b.safetensors")
    (made["loop"] / "b.safetensors").symlink_to("a.safetensors")
    made["link"].symlink_to("link")
    (made["index"] / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}')
    return made


@pytest.mark.parametrize(
    "name, where, tensor, words",
    [
        ("cut", "cut/model.safetensors", files.OTHER, "bytes of data follow the header; the file is cut short"),
        ("dtype", "dtype/model.safetensors", f"{files.LAYER}.weight", "'F8_E3M4'; known are"),
        ("loop", "loop/a.safetensors", "", "Too many levels of symbolic links"),
        ("link", "link", "", "Too many levels of symbolic links"),
        ("config", "config/config.json", "", "repair it, or move it away"),
        ("nothing", "nothing", "", "holds neither *.safetensors nor"),
        ("index", "index/model.safetensors.index.json", "w", "allowed is a plain file name"),
    ],
)
def test_what_cannot_be_opened_is_told_once_and_in_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, where: str, tensor: str, words: str
) -> None:
    path = broken(tmp_path)[name]
    (finding,) = json.loads(run(capsys, "check", path, "--json", code=1))["findings"]
    assert finding["file"] == str(tmp_path / where) and words in finding["what"]
    assert finding["tensor"].startswith(tensor) and bool(finding["tensor"]) == bool(tensor)
    text = run(capsys, "check", path, code=1)
    assert words in text and text.count(str(tmp_path)) <= 1 and "1 error" in text
    facts = json.loads(run(capsys, "inspect", path, "--json", code=1))
    assert facts["path"] == str(path) and words in facts["error"]
    assert cli.main(["inspect", str(path)]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("cufp8: ") and words in said.err


@pytest.mark.parametrize("nbytes, text", [(0, "0.0 kB"), (6_800, "6.8 kB"), (1e5, "0.1 MB"), (1e9, "1.0 GB")])
def test_sizes(nbytes: float, text: str) -> None:
    assert show._size(int(nbytes)) == text


def test_several_patterns_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the path as well as behind it."""
    tensors = of("a", W) | of("b", W) | of("c", W)
    path = files.write(tmp_path, replace(MADE["modelopt_fp8"], tensors=tensors))
    text = run(capsys, "inspect", "--ignore", "a", path, "--ignore", "b")
    assert text.startswith("c\n") and "1 quantised module, 8 other tensors of" in text


def test_warnings_alone_are_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.write(tmp_path, replace(MADE["modelopt_fp8"], config=MADE["modelopt_nvfp4"].config))
    assert "1 warning" in run(capsys, "check", tmp_path)


def test_progress_ends_at_all_bytes(tmp_path: Path) -> None:
    files.write(tmp_path, MADE["gpt_oss"])
    seen: list[tuple[int, int]] = []
    list(check.check(tmp_path, progress=lambda done, total: seen.append((done, total))))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("name", sorted(MADE))
def test_inspect_command(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = MADE[name]
    files.write(tmp_path, made)
    result = json.loads(run(capsys, "inspect", tmp_path, "--json"))
    assert [m["name"] for m in result["modules"]] == list(made.values)
    assert result["arrays"] == {"count": 1, "bytes": 2 * files.K}
    assert result["bytes"] == sum(len(data) for _, _, data in made.tensors.values())
    for module in result["modules"]:
        assert (module["family"], module["declared"]) == (made.family, made.declared)
        assert module["shape"] == [files.N, files.K] and 0 < module["scale_min"] <= module["scale_max"] < 1
    text = run(capsys, "inspect", tmp_path)
    each = "one scale, |a scale a row, |a scale for (1 x 16|1 x 32|128 x 128), "
    assert re.search(f"{re.escape(made.family)}: 200 x 320, ({each})", text) and f"made for {made.declared}" in text
    assert f"; the config says {made.config['quant_method'] if made.config else ''}" in text


def test_inspect_names_the_kernels_of_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cufp8 import kernels, runtime

    monkeypatch.setattr(runtime, "available", lambda: True)
    monkeypatch.setattr(runtime, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "target", lambda index: kernels.Target("sm_90a", 132, 232448, True))
    names = {row.name for row in kernels.KERNELS if row.linear}
    for name in sorted(MADE):
        served = check.inspect(load(tmp_path / name, MADE[name]))["modules"][0]["served_by"]
        assert len(served) == 3 and set(served) <= names, name
        weights = {kernels.ROWS[row].weight for row in served}
        kind = {"deepseek_v3": "fp8_block", "ct_mxfp8": "mxfp8", "gpt_oss": "mxfp4", "modelopt_nvfp4": "nvfp4"}
        assert len(weights) == 1 and weights == {kind.get(name, *weights)}, name


@pytest.mark.parametrize("name", sorted(MADE))
def test_ignored_modules_have_no_findings(tmp_path: Path, name: str) -> None:
    files.write(tmp_path, MADE[name])
    assert not list(check.check(tmp_path, ignore=["*"]))


@pytest.mark.parametrize("shape", [(10**12, 0), (10**12, 0, 3, 16), (2, 200, 320)])
def test_a_stack_that_is_none_has_no_experts(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = files.EXPERTS + "_blocks"
    made = MADE["gpt_oss"].with_tensor(name, ("U8", shape, bytes(int(np.prod(shape, dtype=np.int64)))))
    assert list(load(tmp_path, made)) == [files.EXPERTS]
    finding = only(found(tmp_path, severity="error"))
    assert finding.tensor == name and "gpt-oss MXFP4 needs [E, N, K / 32, 16]" in finding.what


def test_an_expert_and_a_module_of_one_name(tmp_path: Path) -> None:
    made = replace(MADE["gpt_oss"], tensors={**MADE["gpt_oss"].tensors, **of(f"{files.EXPERTS}.1", W)})
    with pytest.raises(CheckpointError, match="gate_up_proj.1' is there by itself and as an expert"):
        load(tmp_path, made)
    assert len(cufp8.load(tmp_path, ignore=[f"{files.EXPERTS}.1"])) == 2


def test_other_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    """INT8 and packed INT4 of compressed-tensors, e5m2, a stack of experts."""
    n, k = files.N, files.K
    scale = {files.LAYER + ".weight_scale": files.bf16(np.ones((n, 1)))}
    for i, (suffix, weight) in enumerate(
        [
            (".weight", ("I8", (n, k), bytes(n * k))),
            (".weight_packed", ("I32", (n, k // 8), bytes(n * k // 2))),
            (".weight", ("F8_E5M2", (n, k), bytes(n * k))),
            (".weight", ("F8_E4M3", (2, n // 2, k), bytes(n * k))),
        ]
    ):
        tensors = {files.LAYER + suffix: weight, **scale}
        checkpoint = load(tmp_path / str(i), replace(MADE["ct_fp8_channel"], tensors=tensors))
        with pytest.raises(CheckpointError, match=f"tensor '{files.LAYER}.*': "):
            checkpoint[files.LAYER].weight  # noqa: B018
        assert only(found(tmp_path / str(i))).severity == "error"


def test_inspect_joins_layers_and_tells_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {n: t for i in range(12) for n, t in of(f"model.layers.{i}.up", W).items()}
    files.write(tmp_path, replace(MADE["modelopt_fp8"], tensors=tensors))
    text = " ".join(run(capsys, "inspect", tmp_path).split())
    assert "model.layers.*.up (12 modules)" in text
    del tensors["model.layers.3.up.weight_scale"]
    files.write(tmp_path, replace(MADE["modelopt_fp8"], tensors=tensors))
    text = " ".join(run(capsys, "inspect", tmp_path, code=1).split())
    assert "model.layers.3.up.weight_scale': is missing" in text


def test_memory_of_a_check_is_bounded(tmp_path: Path) -> None:
    """A file of 256 MiB (sparse: it takes no room) is looked through with at most 64 MiB beside the map."""
    n, k = 8192, 32768
    header = {
        "w.weight": {"dtype": "F8_E4M3", "shape": [n, k], "data_offsets": [0, n * k]},
        "w.weight_scale": {"dtype": "F32", "shape": [n, 1], "data_offsets": [n * k, n * k + 4 * n]},
    }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.seek(n * k, 1)
        f.write(np.ones(n, np.float32).tobytes())
    program = f"""
from cufp8.checkpoint import check
def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
before, peak = anonymous(), [0]
def look(done, total):
    peak[0] = max(peak[0], anonymous())
print(len(list(check.check({str(tmp_path)!r}, progress=look))), peak[0] - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count == 0 and grown_kib < 64 << 10
