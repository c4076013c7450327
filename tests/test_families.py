"""Every family of quantised checkpoints: loaded, dequantised, multiplied; and every way in which a scale goes wrong."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoint_files as files
import ml_dtypes
import numpy as np
import pytest
import reference
from test_matmul import acc_of

import cufp8
from cufp8.checkpoint import CheckpointError, check, families
from cufp8.checkpoint.families import FAMILIES, ROLES
from cufp8.formats import SCHEMES

MADE = files.families()
NAMES = sorted(MADE)
GPU_ACC = 2.0**-16  # of the tensor cores' sums of 16-bit products; `acc_of` bounds those of FP8


def load(folder: Path, made: files.Made, **options: Any) -> cufp8.Checkpoint:
    return cufp8.load(files.write(folder, made), device="cpu", **options)


def errors(folder: Path) -> str:
    """The texts of the errors that `check` finds, one a line."""
    return "\n".join(str(f) for f in check.check(folder) if f.severity == "error")


def findings(folder: Path, made: files.Made) -> list[check.Finding]:
    return list(check.check(files.write(folder, made)))


def multiply(layer: cufp8.Linear, values: np.ndarray, bias: np.ndarray | None, rng: np.random.Generator) -> None:
    """Compare a layer with float64 on what the file means."""
    n, k = values.shape
    x = rng.standard_normal((5, k)).astype(np.float32)
    y, wide = layer(x), x.astype(np.float64)
    ref, size = wide @ values.T, np.abs(wide) @ np.abs(values).T
    if bias is not None:
        ref, size = ref + bias, size + np.abs(bias)
    assert y.dtype == np.float32 and (np.abs(y - ref) <= 2.0**-24 * np.abs(ref) + k * 2.0**-24 * size).all()
    if bias is None:
        np.testing.assert_array_equal(layer(np.eye(k, dtype=np.float32)).T, values.astype(np.float32))


# What a file means


@pytest.mark.parametrize("name", NAMES)
def test_family_means_what_its_definition_says(tmp_path: Path, name: str, rng: np.random.Generator) -> None:
    made = MADE[name]
    checkpoint = load(tmp_path, made)
    assert set(checkpoint) == set(made.values)
    for i, (module, values) in enumerate(made.values.items()):
        entry = checkpoint[module]
        assert (entry.family, entry.shape, entry.declared) == (made.family, values.shape, made.declared)
        assert entry.weight.scheme == entry.scheme and entry.weight.device == "cpu"
        np.testing.assert_array_equal(entry.dequantize(), values.astype(np.float32))
        bias = np.arange(files.N) / 64 + (i * files.N / 64 if len(made.values) > 1 else 0)
        multiply(entry.linear(), values, files.cut(bias), rng)
        multiply(cufp8.Linear.from_quantized(entry.weight, device="cpu"), values, None, rng)
    assert list(checkpoint.arrays) == [files.OTHER]
    assert (checkpoint.arrays[files.OTHER] == 1).all()
    with pytest.raises(KeyError):
        checkpoint.arrays[next(iter(made.tensors))]


@pytest.mark.parametrize("name", NAMES)
def test_tensors_alone_mean_the_same(tmp_path: Path, name: str) -> None:
    """Without a config, and with that of another family: only the family's name may differ."""
    made = MADE[name]
    for i, config in enumerate((None, {"quant_method": "unheard-of"}, MADE["modelopt_nvfp4"].config)):
        checkpoint = load(tmp_path / str(i), replace(made, config=config, modelopt=None))
        for module, values in made.values.items():
            np.testing.assert_array_equal(checkpoint[module].dequantize(), values.astype(np.float32))


def test_rows_with_the_same_tensors_mean_the_same() -> None:
    meanings: dict[Any, Any] = {}
    for f in FAMILIES:
        for key in ((f.codes, c, f.scale, s, f.global_scale) for c in f.codes_dtypes for s in f.scale_dtypes):
            meaning = f.dtype, f.scale_dtype, f.divides, f.stacked
            assert meanings.setdefault(key, meaning) == meaning
    assert {f.name for f in FAMILIES} == {made.family for made in MADE.values()}  # every row has a file
    assert all(f.source and f.suffixes.keys() <= ROLES.keys() for f in FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_declared_activations(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    made = MADE[name]
    entry = next(iter(load(tmp_path, made).values()))
    if made.declared.endswith("A16"):
        assert entry.linear(activations="declared").scheme == made.declared == entry.scheme
        return
    if made.declared in ("FP8_DYNAMIC", "FP8") and name != "fbgemm_fp8":  # which has a bound of its scales
        layer = entry.linear(activations="declared")
        assert layer.scheme == made.declared and layer.device == "cpu"
        x = rng.standard_normal((5, layer.shape[1])).astype(np.float32)
        if made.declared == "FP8":
            assert layer.input_scale == pytest.approx(0.05, rel=4e-3)  # as checkpoint_files has it, some in bfloat16
            q = cufp8.quantize_activations(x, block=(-1, -1), scale=layer.input_scale)
        else:
            q = cufp8.quantize_activations(x)
        bias = None if entry.bias is None else entry.bias.astype(np.float32)
        np.testing.assert_array_equal(layer(x), cufp8.scaled_mm(q, entry.weight, bias=bias, out_dtype="float32"))
        return
    if made.declared in SCHEMES and name != "fbgemm_fp8":  # test_block_activations_linear.py tells what it computes
        layer = entry.linear(activations="declared")
        assert layer.scheme == made.declared and layer.device == "cpu"
        assert layer.input_scale == (pytest.approx(0.001) if made.declared == "NVFP4" else None)
        return
    with pytest.raises(ValueError, match=f"is made for {made.declared}, .* no layer .* yet; .*'16bit'.*{entry.scheme}"):
        entry.linear(activations="declared")
    with pytest.raises(ValueError, match="activations is 'fp8'; allowed are '16bit' and 'declared'"):
        entry.linear(activations="fp8")


def same_weights() -> list[list[str]]:
    """The names of the files that mean the same, several each."""
    groups: dict[bytes, list[str]] = {}
    for name in NAMES:
        groups.setdefault(b"".join(v.tobytes() for v in MADE[name].values.values()), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def test_the_groups_of_same_weights_join_libraries() -> None:
    joined = {frozenset(MADE[name].family for name in group) for group in same_weights()}
    for pair in ("NVFP4", "MXFP8", "FP8"):
        assert any({f"ModelOpt {pair}", f"compressed-tensors {pair}"} <= group for group in joined), pair
    assert len(joined) >= 5


def outputs(folder: Path, group: list[str], device: str) -> dict[str, bytes]:
    """y of one x, by each of the files."""
    x = np.random.default_rng(4).standard_normal((9, files.K)).astype(ml_dtypes.bfloat16)
    found = {}
    for name in group:
        checkpoint = cufp8.load(files.write(folder / name, MADE[name]), device=device)
        y = next(iter(checkpoint.values())).linear()(x)
        assert np.abs(y.astype(np.float32)).max() > 0.1
        found[name] = y.tobytes()
    return found


@pytest.mark.parametrize("group", same_weights(), ids="-".join)
def test_the_same_weight_in_several_families_gives_the_same_bits(tmp_path: Path, group: list[str]) -> None:
    assert len(set(outputs(tmp_path, group, "cpu").values())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("group", same_weights(), ids="-".join)
def test_the_same_weight_gives_the_same_bits_on_a_gpu(tmp_path: Path, group: list[str]) -> None:
    assert len(set(outputs(tmp_path, group, "cuda").values())) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_family_on_a_gpu(tmp_path: Path, rng: np.random.Generator, name: str, x_dtype: str) -> None:
    """Through `load` and `Linear` there, against what the file means, and against the layer on the CPU."""
    made = MADE[name]
    folder = files.write(tmp_path, made, shards=2)
    here, there = (cufp8.load(folder, device=device) for device in ("cpu", "cuda"))
    for activations in ("16bit", "declared"):
        for module, values in made.values.items():
            try:
                layer = there[module].linear(activations=activations)
            except ValueError as refused:
                assert activations == "declared" and "no layer quantises yet" in str(refused)
                continue
            on_cpu = here[module].linear(activations=activations)
            assert layer.device.startswith("cuda") and layer.scheme == on_cpu.scheme
            np.testing.assert_array_equal(layer.weight.to("cpu").codes, on_cpu.weight.codes)
            for m in (1, 7, 40, 300):
                x = rng.standard_normal((m, files.K)).astype(np.dtype(getattr(ml_dtypes, x_dtype, x_dtype)))
                seen, acc, row = x.astype(np.float64), GPU_ACC, SCHEMES[layer.scheme]
                if row.x_block is not None:
                    options = {"block": row.x_block, "dtype": row.dtype, "scale_dtype": row.scale_dtype}
                    options["global_scale" if row.x_in_blocks else "scale"] = layer.input_scale
                    seen = cufp8.quantize_activations(x, **options).dequantize("float64")
                    acc = GPU_ACC if row.x_in_blocks else acc_of(files.K, layer.fast_accum)
                bias = 0.0 if on_cpu.bias is None else on_cpu.bias.astype(np.float64)
                exact = seen @ values.T + bias, np.abs(seen) @ np.abs(values).T + np.abs(bias)
                reference.assert_scaled_close(layer(x), exact, x_dtype, acc)
                reference.assert_scaled_close(on_cpu(x), exact, x_dtype, GPU_ACC)


@pytest.mark.parametrize("nan", [False, True])
def test_codes_that_go_to_a_gpu_are_looked_through_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nan: bool
) -> None:
    """As if there was one: the host reads them only where it has found NaN, for the message."""
    made, seen = MADE["deepseek_v3"], []
    dtype, shape, data = made.tensors[files.LAYER + ".weight"]
    if nan:
        made = made.with_tensor(files.LAYER + ".weight", (dtype, shape, b"\x7f" + data[1:]))
    entry, look = load(tmp_path, made)[files.LAYER], families.fault_of
    monkeypatch.setattr(families, "fault_of", lambda tensor, role: seen.append(role) or look(tensor, role))
    monkeypatch.setattr(cufp8.QuantizedTensor, "to", lambda self, device: seen.append(device) or self)
    if nan:
        with pytest.raises(CheckpointError, match=r"1 of 64000 codes are NaN, the first at \[0, 0\]"):
            families.build(entry.match, entry.tensors, device="cuda:0")
    else:
        families.build(entry.match, entry.tensors, device="cuda:0")
    assert seen == ["scale", "cuda:0", *["codes"] * nan]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(200, 320), (6001, 1024)])
def test_codes_that_are_nan_are_found_on_a_gpu(tmp_path: Path, shape: tuple[int, int]) -> None:
    """Below and above what goes there through pinned buffers: the error is that of the CPU."""
    n, k = shape
    codes = np.full(n * k, 0x38, np.uint8)
    codes[[n * k // 2, -1]] = 0x7F, 0xFF
    tensors = {
        files.LAYER + ".weight": ("F8_E4M3", shape, codes.tobytes()),
        files.LAYER + ".weight_scale": files.f32(np.ones(n)),
    }
    folder = files.write(tmp_path, replace(MADE["modelopt_fp8_pc_pt"], tensors=tensors))
    messages = []
    for device in ("cpu", "cuda"):
        with pytest.raises(CheckpointError, match="2 of .* codes are NaN, the first at") as caught:
            cufp8.load(folder, device=device)[files.LAYER].linear()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# Folders


@pytest.mark.parametrize("name", NAMES)
def test_codes_and_scales_in_different_shards(tmp_path: Path, name: str) -> None:
    made = MADE[name]
    checkpoint = cufp8.load(files.write(tmp_path, made, shards=3), device="cpu")
    entry = next(iter(checkpoint.values()))
    assert len({t.file for t in entry.tensors.values()}) > 1
    for module, values in made.values.items():
        np.testing.assert_array_equal(checkpoint[module].dequantize(), values.astype(np.float32))


def test_a_file_an_index_and_the_hubs_cache(tmp_path: Path) -> None:
    made = MADE["ct_nvfp4"]
    hub = tmp_path / "models--a--b"
    snapshot, blobs = hub / "snapshots" / "abc", files.write(hub / "blobs", made, shards=2)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        os.symlink(f"../../blobs/{blob.name}", snapshot / blob.name)
    single = files.write(tmp_path / "single", made)
    for path in (hub, snapshot, snapshot / "model.safetensors.index.json", single / "model.safetensors"):
        checkpoint = cufp8.load(path, device="cpu")
        assert checkpoint.config.method == "compressed-tensors"
        np.testing.assert_array_equal(checkpoint[files.LAYER].dequantize(), made.values[files.LAYER].astype(np.float32))


def test_ignored_modules_are_plain_arrays(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, MADE["modelopt_fp8"], ignore=("*.down_proj", "x"))
    assert len(checkpoint) == 0 and set(checkpoint.arrays) == set(MADE["modelopt_fp8"].tensors)
    with pytest.raises(TypeError, match="ignore is the string"):
        cufp8.load(tmp_path, ignore="*")


def test_nothing_is_mapped_before_it_is_asked_for_and_views_outlive_the_files(tmp_path: Path) -> None:
    made = MADE["ct_fp8_block"]
    with load(tmp_path, made) as checkpoint:
        entry = checkpoint[files.LAYER]
        assert entry.shape and entry.family and entry.nbytes and repr(entry) and repr(checkpoint)
        assert all(t._shard._bytes is None for t in entry.tensors.values())
        weight = entry.weight
        assert not weight.codes.flags.owndata and not weight.codes.flags.writeable
    np.testing.assert_array_equal(weight.dequantize(), made.values[files.LAYER].astype(np.float32))
    with pytest.raises(CheckpointError, match="closed"):
        entry.weight  # noqa: B018


def test_what_only_modelopts_own_file_says(tmp_path: Path) -> None:
    """hf_quant_config.json without a quantization_config in config.json, as MXFP8 has it."""
    for i, (name, family) in enumerate((("modelopt_mxfp8", "ModelOpt MXFP8"), ("modelopt_fp8_pb_wo", "ModelOpt FP8"))):
        made = replace(MADE[name], config=None)
        entry = load(tmp_path / str(i), made)[files.LAYER]
        assert (entry.family, entry.declared) == (family, made.declared)


def test_scales_of_the_cache_are_plain_arrays(tmp_path: Path) -> None:
    """k_scale and v_scale beside the projections belong to no weight."""
    made, scale = MADE["modelopt_fp8"], files.f32(0.5, ())
    for name in ("k_proj.k_scale", "v_proj.v_scale", "k_scale"):
        made = made.with_tensor(f"model.layers.0.self_attn.{name}", scale)
    made = made.with_tensor(files.LAYER + ".k_scale", scale)
    checkpoint = load(tmp_path, made)
    assert list(checkpoint) == [files.LAYER] and len(checkpoint.arrays) == 5
    assert not findings(tmp_path, made)


def test_fbgemms_bound_may_be_a_tensor(tmp_path: Path) -> None:
    made = MADE["fbgemm_fp8"].with_tensor(files.LAYER + ".input_scale_ub", files.f32(1200, (1,)))
    entry = load(tmp_path, made)[files.LAYER]
    assert entry.linear().scheme == "FP8A16" and not findings(tmp_path, made)
    with pytest.raises(ValueError, match="whose activations no layer quantises yet"):
        entry.linear(activations="declared")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_a_config_that_is_none(tmp_path: Path, content: bytes) -> None:
    folder = files.write(tmp_path, MADE["modelopt_fp8"])
    (folder / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="config.json: "):
        cufp8.load(folder)


@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {"a": 1}], ids=repr)
def test_a_config_of_other_types_is_survived(tmp_path: Path, value: Any) -> None:
    made = MADE["ct_fp8_block"]
    keys = ("quant_method", "ignore", "weight_block_size", "config_groups", "quant_algo", "quantized_layers")
    for i, config in enumerate([value, dict.fromkeys(keys, value), {**made.config, "config_groups": {"g": value}}]):
        for method in ("modelopt", "compressed-tensors", "fp8"):
            said = {**config, "quant_method": method} if isinstance(config, dict) else config
            checkpoint = load(tmp_path / f"{i}{method}", replace(made, config=said))
            entry = checkpoint[files.LAYER]
            assert entry.declared and entry.dequantize().shape == (files.N, files.K)
            assert list(check.check(checkpoint.files.path)) is not None


def test_random_files_are_read_or_refused(tmp_path: Path) -> None:
    """Tensors of another dtype, of another shape, missing, or of another family: an error that names one, no crash."""
    rng = np.random.default_rng(6)
    small = files.families(files.weight(40, 64))
    pool = [(n.rpartition(".")[2], t) for made in small.values() for n, t in made.tensors.items()]
    bits = {"F4": 4, "BF16": 16, "F32": 32, "I64": 64, "F6_E2M3": 6, "C64": 64}
    dtypes = [*bits, "U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ"]
    read = refused = 0
    for case in range(200):
        made = small[NAMES[case % len(NAMES)]]
        tensors = dict(made.tensors)
        name = list(tensors)[rng.integers(len(tensors))]
        dtype, shape, data = tensors[name]
        kind = rng.integers(4)
        if kind == 0:
            dtype = dtypes[rng.integers(len(dtypes))]
            shape = (len(data) * 8 // bits.get(dtype, 8),)
            data = data[: shape[0] * bits.get(dtype, 8) // 8]
            shape = shape if len(data) * 8 == shape[0] * bits.get(dtype, 8) else (0,)
            tensors[name] = dtype, shape, data if shape[0] else b""
        elif kind == 1:
            tensors[name] = dtype, [(0, 3), (*shape, 1), (1, *shape)][rng.integers(3)], data
            if 0 in tensors[name][1]:
                tensors[name] = *tensors[name][:2], b""
        elif kind == 2:
            del tensors[name]
        else:
            leaf, other = pool[rng.integers(len(pool))]
            tensors[f"{next(iter(made.values))}.{leaf}"] = other
        folder = files.write(tmp_path / str(case), replace(made, tensors=tensors))
        found = list(check.check(folder))
        try:
            entries = list(cufp8.load(folder, device="cpu").values())
        except CheckpointError as error:  # an expert and a module of one name
            assert [f.what for f in found] == [error.what]
            refused += 1
            continue
        for entry in entries:
            try:
                assert entry.linear().weight.shape == entry.shape
                read += 1
            except CheckpointError as error:
                assert any(f.severity == "error" for f in found) and "model.safetensors" in str(error)
                refused += 1
    assert read > 40 and refused > 40


def test_readme_names_every_family() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert f"| {family.name} |" in readme
        assert all(f"`{s[1:]}`" in readme for s in (family.codes, family.scale, family.global_scale) if s)


# Each scale tensor deleted, or corrupted, in turn


def damaged(tensor: files.Tensor, inputs: bool) -> dict[str, files.Tensor]:
    """A tensor in every way in which it may be wrong."""
    dtype, shape, data = tensor
    size = {"F32": 4, "BF16": 2}.get(dtype, 1)
    last = len(data) // size - 1
    bad = {
        "F32": {
            "NaN": np.float32(np.nan),
            "Inf": np.float32(np.inf),
            "zero": np.float32(0),
            "negative": np.float32(-1),
        },
        "BF16": {
            "NaN": np.uint16(0x7FC0),
            "Inf": np.uint16(0xFF80),
            "zero": np.uint16(0),
            "negative": np.uint16(0xBF80),
        },
        "F8_E4M3": {"NaN": np.uint8(0x7F), "-NaN": np.uint8(0xFF), "negative": np.uint8(0x81)},
        "U8": {"NaN": np.uint8(0xFF)},
        "F8_E8M0": {"NaN": np.uint8(0xFF)},
    }[dtype]
    found = {}
    for kind, value in bad.items():
        raw = value.tobytes()
        assert len(raw) == size
        found[kind] = (dtype, shape, data[: last * size] + raw)
    if not inputs:
        other = "I32" if len(data) % 4 == 0 else "I8"
        found["dtype"] = (other, (len(data) // (4 if other == "I32" else 1),), data)
        found["shape"] = (dtype, (last + 1, 1, 1), data)
        found["size"] = (dtype, (last + 2,), data + data[-size:])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_each_scale_tensor_deleted(tmp_path: Path, name: str) -> None:
    made = MADE[name]
    assert made.scales
    for i, scale in enumerate(made.scales):
        checkpoint = load(tmp_path / str(i), made.without(scale))
        module = next(iter(made.values))
        if scale in made.inputs:  # the weight means the same without it
            assert checkpoint[module].dequantize().shape
            if made.declared in ("FP8", "NVFP4") and made.config is not None:
                with pytest.raises(CheckpointError, match=f"{made.declared} needs {scale}, which is missing"):
                    checkpoint[module].linear(activations="declared")
                assert scale in errors(tmp_path / str(i))
            continue
        for use in ("weight", "dequantize", "linear", "family", "bias"):
            with pytest.raises(CheckpointError, match="is missing") as caught:
                getattr(checkpoint[module], use)()
            assert scale in str(caught.value) and "ignore=" in str(caught.value)
        assert scale in errors(tmp_path / str(i))
        assert "cannot be read" in repr(checkpoint[module])


@pytest.mark.parametrize("name", NAMES)
def test_each_scale_tensor_corrupted(tmp_path: Path, name: str) -> None:
    made = MADE[name]
    for i, scale in enumerate(made.scales):
        inputs = scale in made.inputs
        for kind, tensor in damaged(made.tensors[scale], inputs).items():
            folder = tmp_path / f"{i}{kind}"
            checkpoint = load(folder, made.with_tensor(scale, tensor))
            assert scale in errors(folder), kind
            if not inputs:
                with pytest.raises(CheckpointError) as caught:
                    checkpoint[list(made.values)[-1]].weight  # noqa: B018
                assert scale in str(caught.value), kind


@pytest.mark.parametrize("name", NAMES)
def test_codes_deleted_or_corrupted(tmp_path: Path, name: str) -> None:
    made = MADE[name]
    codes = next(n for n in made.tensors if n.endswith(("weight", "weight_packed", "blocks")))
    dtype, shape, data = made.tensors[codes]
    load(tmp_path / "deleted", made.without(codes))
    assert codes in errors(tmp_path / "deleted")
    load(tmp_path / "shape", made.with_tensor(codes, (dtype, (2 * shape[0], shape[1], *shape[2:]), data * 2)))
    assert "has shape" in errors(tmp_path / "shape") or "bias: is BF16 [200]; needed is" in errors(tmp_path / "shape")
    load(tmp_path / "dtype", made.with_tensor(codes, ("BF16", (len(data) // 2,), data)))
    assert codes in errors(tmp_path / "dtype")
    if dtype == "F8_E4M3":
        checkpoint = load(tmp_path / "NaN", made.with_tensor(codes, (dtype, shape, data[:700] + b"\xff" + data[701:])))
        row, column = divmod(700, shape[1])
        with pytest.raises(CheckpointError, match=rf"1 of {len(data)} codes are NaN, the first at \[{row}, {column}\]"):
            next(iter(checkpoint.values())).weight  # noqa: B018
        assert f"[{row}, {column}]" in errors(tmp_path / "NaN") and codes in errors(tmp_path / "NaN")
