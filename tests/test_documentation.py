"""What the documents say is true: commands and Python run, the example works, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import add, blocks, copy_of_checkout, environment_of, replay, steps, text_of

from fagen import cli, env
from fagen.arch import known

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = ROOT / "docs" / "commands"
SHARED_PAGE = "kernel-flags.md"
ACCEPT = "FAGEN_ACCEPT"  # in the environment: rewrites what examples print
README = (ROOT / "README.md").read_text()


def shell_lines() -> list[str]:
    texts = [path.read_text() for path in DOCUMENTS]
    lines = [line for text in texts for block in blocks(text, "bash") for line in block.splitlines()]
    return list(dict.fromkeys(line.split(" # ")[0].strip() for line in lines if line.strip()))


def rewrite(path: Path, block: str, now: str) -> None:
    """Puts what is printed now in place of a block `console`."""
    path.write_text(path.read_text().replace(f"```console\n{block}```", f"```console\n{now}```", 1))


LANGUAGES = {"bash", "console", "python", "jinja", "toml", "text"}


def test_every_kind_of_block_is_known() -> None:
    for path in DOCUMENTS:
        assert set(re.findall(r"^```(\w+)", path.read_text(), re.M)) <= LANGUAGES, path.name


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


def options(command: str) -> set[str]:
    """The options that the help of a command shows, in their long forms."""
    return {
        name
        for param in cli.load(command).params
        if not getattr(param, "hidden", False)
        for name in param.opts
        if name.startswith("--") and name != "--help"
    }


def all_options(command: str) -> set[str]:
    return {name for param in cli.load(command).params for name in (*param.opts, *param.secondary_opts)}


def test_every_command_has_a_page() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {*cli.COMMANDS, Path(SHARED_PAGE).stem}
    index = (ROOT / "docs" / "README.md").read_text()
    for path in DOCUMENTS:
        if path.is_relative_to(ROOT / "docs") and path.name != "README.md":
            assert f"({path.relative_to(ROOT / 'docs').as_posix()})" in index, path.name


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_page_names_every_option_and_no_other(command: str) -> None:
    text = (PAGES / f"{command}.md").read_text()
    assert text.startswith(f"# fagen {command}\n") and "Exit codes: 0" in text
    shared = set(re.findall(r"^\| `(--[a-z-]+)", (PAGES / SHARED_PAGE).read_text(), re.M))
    named = {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)}
    linked = shared if f"({SHARED_PAGE})" in text else set()
    assert options(command) <= named | linked, "options of the help that the page does not name"
    tabled = set(re.findall(r"`(--[a-z-]+)", "".join(re.findall(r"^\|.*\|$", text, re.M))))
    assert tabled <= all_options(command), "options in the page's table that do not exist"
    short = set(re.findall(r"`(-[a-z])\b", text))
    assert short <= all_options(command) and shared & options(command) <= linked | named


def test_the_flags_that_name_kernels_are_those_of_the_page() -> None:
    shared = set(re.findall(r"^\| `(--[a-z-]+)", (PAGES / SHARED_PAGE).read_text(), re.M))
    panels = {
        param.opts[0]
        for param in cli.load("check").params
        if getattr(param, "rich_help_panel", None) not in (None, "Call") and not param.hidden
    }
    assert panels <= shared <= all_options("check")


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if path.name != "tutorial.md" and blocks(path.read_text(), "console")],
    ids=lambda p: p.stem,
)
def test_sessions_print_what_they_say(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks `console` of a page, one after the other, in a folder of their own. FAGEN_ACCEPT=1 rewrites them."""
    for variable in ("FAGEN_ARCH", "TORCH_CUDA_ARCH_LIST", "FAGEN_BUNDLES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "generated"))
    monkeypatch.chdir(tmp_path)
    text = path.read_text()
    for block in blocks(text, "toml"):
        Path(block.splitlines()[0].removeprefix("# ")).write_text(block)
    for block in blocks(text, "console"):
        now = text_of(replay(steps(block)))
        if os.environ.get(ACCEPT):
            rewrite(path, block, now)
        else:
            assert now == block, f"{path}: FAGEN_ACCEPT=1 rewrites it"


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 80


def run_there(environment: dict[str, str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of Python in a copy of the checkout."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def test_the_example_of_a_modification(tmp_path: Path) -> None:
    """The files of README's example, put where it says, give a kernel that is right, alone and with others."""
    environment = copy_of_checkout(ROOT, tmp_path)
    added = [add(block, tmp_path) for language in ("jinja", "python") for block in blocks(README, language)]
    assert added.count(True) == 4
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
        code, out, err = run_there(environment, tmp_path, *arguments)
        assert code == 0, out + err
    assert out.count("right") == 2


def test_the_tutorial(tmp_path: Path) -> None:
    """Its files and commands in their order, in a folder of their own; what it prints is what it says."""
    path = ROOT / "docs" / "tutorial.md"
    environment = environment_of(ROOT, tmp_path / "generated")
    programs, verdicts = [], []
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text(), re.M | re.S):
        if language == "console":
            session = replay(steps(block), lambda words: run_there(environment, tmp_path, "-m", *words), tmp_path)
            verdicts += [line for step in session for line in step.printed if line.startswith("result ")]
            if os.environ.get(ACCEPT):
                rewrite(path, block, text_of(session))
            else:
                assert text_of(session) == block, "FAGEN_ACCEPT=1 rewrites it"
        elif not add(block, tmp_path):
            programs.append(block)
    assert [line.split(maxsplit=1)[1] for line in verdicts] == ["right", "past the budget", "right"]
    (program,) = programs
    code, out, err = run_there(environment, tmp_path, "-c", program)
    assert code == 0 and out == "torch.Size([1, 60, 2, 64]) torch.Size([1, 60, 2, 64])\n", out + err
