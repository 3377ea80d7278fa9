"""What the documents say is true: commands and Python run, the example works, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fagen import cli, env
from fagen.arch import known

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def shell_lines() -> list[str]:
    texts = [path.read_text() for path in DOCUMENTS]
    lines = [line for text in texts for block in blocks(text, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line.split(" # ")[0].strip() for line in lines if line.strip()))


def test_every_kind_of_block_is_known() -> None:
    for path in DOCUMENTS:
        assert set(re.findall(r"^```(\w+)", path.read_text(), re.M)) <= {"bash", "python", "jinja", "toml"}, path.name


def test_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (matrix,) = blocks(README, "toml")
    Path(matrix.splitlines()[0].removeprefix("# ")).write_text(matrix)
    lines = [line for line in shell_lines() if line.startswith("fagen ")]
    assert lines
    for line in lines:
        assert cli.main(shlex.split(line)[1:]) == 0, f"{line}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("line", [line for line in shell_lines() if not line.startswith("fagen ")])
def test_other_commands_exist(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
    else:
        assert line == "pip install '.[cuda]'"
        assert "\ncuda = [" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("target", re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
def test_make_help_lists_every_target(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert target in ("help", "env") or f'@echo "make {target} ' in makefile
    assert target in re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split()  # type: ignore[index]


def test_python_runs() -> None:
    names: dict[str, object] = {}
    snippets = [block for block in blocks(README, "python") if "import fagen" in block]
    assert snippets
    for snippet in snippets:
        exec(snippet, names)
    assert names["o"].shape == (1, 200, 4, 128) and names["lse"].shape == (1, 4, 200)  # type: ignore[attr-defined]


def test_environment_variables_are_those_that_are_read() -> None:
    table = re.search(r"^\| variable .*?\n\n", str(env.__doc__), re.M | re.S)
    assert table is not None and table[0].rstrip() in README
    variable = r'"((?:FAGEN_|CUDA_|TORCH_|CONDA_)[A-Z_]+|CXX|MAX_JOBS)"'
    read = set(re.findall(variable, (ROOT / "fagen" / "env.py").read_text()))
    assert read and read <= set(re.findall(r"`([A-Z_]+)`", str(env.__doc__)))
    for path in (ROOT / "fagen").rglob("*.py"):
        asked = re.findall(rf"environ(?:\.get\(|\[){variable}", path.read_text())
        assert path.name == "env.py" or not asked, f"{path.name} reads {asked}"


def test_architectures_are_those_that_are_known() -> None:
    listed = re.search(r"cards \(sm([\d, ]+)\)", README)
    assert listed is not None and "(sm90a, the default there)" in README
    assert {*(f"sm{number}" for number in listed[1].split(", ")), "sm90a"} == set(known())


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_paths(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r"`((?:fagen|templates|tests|docs)/[\w./-]*)`", text):
        assert (ROOT / name).exists() or "nearness" in name, name


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 80


def test_the_example_of_a_modification(tmp_path: Path) -> None:
    """The files of README's example, put where it says, give a kernel that is right, alone and with others."""
    for folder in ("fagen", "templates", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "golden"))
    (fragment,) = blocks(README, "jinja")
    (tmp_path / re.search(r"\{# (\S+):", fragment)[1]).write_text(fragment)  # type: ignore[index]
    places = {
        "fagen/spec.py": ("    bias: Flag =", "    "),
        "fagen/mods.py": ("\n)\n", "    "),  # the end of MODS, the last thing in the file
        "tests/cases.py": ("    *PAIRS,\n]", "    "),
    }
    for name, (before, indent) in places.items():
        (block,) = (block for block in blocks(README, "python") if block.startswith(f"# {name}, in "))
        added = "".join(indent + line + "\n" for line in block.splitlines()[1:])
        text = (tmp_path / name).read_text()
        head, mark, tail = text.rpartition(before) if name == "fagen/mods.py" else text.partition(before)
        assert mark
        joint = "\n" if name == "fagen/mods.py" else ""
        (tmp_path / name).write_text(head + joint + added + mark.removeprefix("\n") + tail)

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(tmp_path / "tests")])}
    environment |= {"FAGEN_CACHE_DIR": str(tmp_path / "cache"), "FAGEN_ARCH": "sm80"}
    row = (
        "from cases import CASES; from test_forward import judge; import fagen\n"
        "cases = [case for case in CASES if case.spec.nearness]\n"
        "judge(*cases, 'cpu')\n"
        "inputs = cases[0].inputs()\n"
        "fagen.load(cases[0].spec)(inputs.q, inputs.k, inputs.v, falloff=0.01)\n"
    )
    command = re.search(r"`fagen (check [^`]*--nearness[^`]*)`", README)
    assert command is not None
    for arguments in (["-c", row], ["-m", "fagen", *shlex.split(command[1]), "--emulate"]):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == 2
