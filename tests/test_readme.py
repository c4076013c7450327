"""What README and CONTRIBUTING tell a reader to type works."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {p: (ROOT / p).read_text(encoding="utf-8") for p in ("README.md", "CONTRIBUTING.md")}


def examples() -> list[object]:
    """The Python blocks of README, named after the library that they begin with."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    parameters = []
    for block in blocks:
        library = re.match(r"import (\w+)", block)[1]
        marks = [pytest.mark.gpu] if library == "cupy" else []
        parameters.append(pytest.param(library, block, id=library, marks=marks))
    return parameters


@pytest.mark.parametrize("library, block", examples())
def test_example_runs_and_is_short(library: str, block: str) -> None:
    pytest.importorskip(library)
    assert sum(map(bool, block.splitlines())) <= 5
    names: dict[str, object] = {}
    exec(compile(block, f"README.md, {library}", "exec"), names)
    layer, y = names["layer"], names["y"]
    assert type(y).__module__.split(".")[0] in {library, "jaxlib"}
    assert y.shape[-1] == layer.shape[0]


def test_there_is_an_example_for_each_library() -> None:
    assert [parameter.id for parameter in examples()] == ["numpy", "cupy", "torch", "jax"]


def commands(page: str) -> list[str]:
    """Every `make ...` of a page, in a code span or a code block."""
    spans = re.findall(r"`(make [^`]+)`", page)
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return spans + [line[line.index("make ") :] for line in lines if "make " in line]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("name", PAGES)
def test_make_knows_the_targets(name: str) -> None:
    targets = {command.split()[1] for command in commands(PAGES[name])}
    assert targets
    for target in targets:
        asked = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        assert asked.returncode == 0, asked.stderr


def test_the_two_commands_stand_alone_in_a_block() -> None:
    block = re.search(r"## Two commands.*?^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make demo", "make test"]


@pytest.mark.parametrize("name", PAGES)
def test_relative_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", PAGES[name]):
        if "://" not in link:
            assert (ROOT / link).is_file(), link


def test_paths_in_the_map_exist() -> None:
    """The first column of CONTRIBUTING's map."""
    rows = re.findall(r"^\| (`[^|]*) \|", PAGES["CONTRIBUTING.md"], re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 5
    for path in paths:
        assert (ROOT / path).exists() or (ROOT / "cufp8" / path).exists(), path


def test_each_dependency_is_explained() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    names = {re.match(r"[\w-]+", line)[0] for text in lists for line in text.split()}
    table = PAGES["CONTRIBUTING.md"].split("## Dependencies")[1]
    assert [name for name in sorted(names) if name.removesuffix("-cu12") not in table] == []
