"""What is shipped: the wheel and the sdist, and what `import cufp8` costs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = sorted(p.name for p in (ROOT / "kernels_cu").iterdir() if p.suffix in {".cu", ".cuh"})
MODULES = sorted(str(p.relative_to(ROOT / "cufp8")) for p in (ROOT / "cufp8").rglob("*.py"))


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Standard output of a command that must succeed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, tree: Path, into: Path) -> Path:
    """Build a "wheel" or an "sdist" of the tree with the setuptools that is installed here."""
    into.mkdir()
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    run(sys.executable, "-c", code, cwd=tree)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout: building leaves files behind."""
    copy = tmp_path_factory.mktemp("checkout") / "cufp8"
    skipped = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "results")
    shutil.copytree(ROOT, copy, ignore=skipped)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel") / "out")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed") / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--no-index", "--no-deps", "--target", target, wheel, cwd=target.parent)
    return target


def in_installed(installed: Path, code: str) -> str:
    """Run `code` with the installed package in front, away from the checkout."""
    header = "import sys; sys.path.insert(0, sys.argv[1])\n"
    return run(sys.executable, "-c", header + code, installed, cwd=installed.parent)


def wheel_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(n for n in archive.namelist() if ".dist-info/" not in n)


def test_wheel_has_the_modules_and_the_kernels_and_nothing_else(wheel: Path) -> None:
    expected = [f"cufp8/{name}" for name in MODULES] + [f"cufp8/kernels_cu/{k}" for k in KERNELS]
    assert KERNELS
    assert wheel_files(wheel) == sorted(expected)


def test_wheel_carries_the_licence_and_the_metadata(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(n).name: n for n in archive.namelist() if ".dist-info/" in n}
        assert archive.read(names["LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        metadata = archive.read(names["METADATA"]).decode()
        entry_points = archive.read(names["entry_points.txt"]).decode()
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    core = {line.split()[1].split(">")[0] for line in required if "extra ==" not in line}
    assert core == {"numpy", "ml_dtypes", "rich"}
    assert "cufp8 = cufp8.cli:main" in entry_points


def test_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", tree, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    for name in ("LICENSE", "Makefile", "tests/reference.py", "examples/minilm.py"):
        assert (unpacked / name).is_file(), name
    assert wheel_files(build("wheel", unpacked, tmp_path / "wheel")) == wheel_files(wheel)


def test_installed_package_works_outside_the_checkout(installed: Path) -> None:
    code = """
import json
import numpy as np
import cufp8
from cufp8 import runtime
w = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
layer = cufp8.Linear(w, bias=np.ones(4, np.float32), device="cpu")
x = np.ones((2, 6), np.float32)
expected = x @ layer.weight.dequantize().T + 1
np.testing.assert_allclose(layer(x), expected, rtol=1e-6, atol=1e-6)
print(json.dumps({"file": cufp8.__file__, "digests": runtime.digests()}))
"""
    said = json.loads(in_installed(installed, code))
    assert Path(said["file"]).is_relative_to(installed)

    from cufp8 import runtime

    assert said["digests"] == runtime.digests()


def test_installed_command_line_works(installed: Path) -> None:
    code = "from cufp8.cli import main; sys.exit(main(['info', '--json']))"
    facts = json.loads(in_installed(installed, code))
    assert set(facts["sources"]) and all(len(digest) == 64 for digest in facts["sources"].values())


def test_kernels_compile_from_the_installed_package(installed: Path) -> None:
    pytest.importorskip("cupy")
    code = "from cufp8 import runtime; print(len(runtime.compile(runtime.row('gemv'), 'sm_90a').cubin))"
    assert int(in_installed(installed, code)) > 0


def test_import_is_light(installed: Path) -> None:
    code = "import cufp8; print([m for m in ('torch', 'jax', 'cupy') if m in sys.modules])"
    assert in_installed(installed, code).strip() == "[]"


def cpu_seconds(code: str, bytecode: Path) -> float:
    """Processor time of a Python process that runs `code`; a busy machine stretches the clock's much more.

    Modules are compiled once, into the folder `bytecode`, as they are where a package is installed.
    """
    kept = {"PYTHONPYCACHEPREFIX": str(bytecode), "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(sys.executable, "-c", code, cwd=ROOT, env={**os.environ, **kept})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_is_fast(tmp_path: Path) -> None:
    """0.3 s for all of `python -c "import cufp8"`, or 0.1 s above NumPy's share where that alone takes as long."""
    numpy = ours = float("inf")
    for _ in range(15):
        numpy = min(numpy, cpu_seconds("import numpy", tmp_path))
        ours = min(ours, cpu_seconds("import cufp8", tmp_path))
        if ours < max(0.3, numpy + 0.1):
            return
    pytest.fail(f"import cufp8 takes {ours:.3f} s of processor time, import numpy {numpy:.3f} s")
