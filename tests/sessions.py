"""Examples in documents: fenced blocks, and sessions of a terminal that are run and compared with what they print.

A block `console` has commands, each behind "$ ", with what it prints below. A line "..." stands for any lines. Numbers,
digests, units and the widths of columns are not compared. Lines of standard error begin with "fagen: " and follow those
of standard output; any of them may be left out. `$ echo $?` shows the exit code of the command before it, which
otherwise is 0. A command below which nothing stands prints nothing at all.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import python_path

ELISION = "..."


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


@dataclass
class Step:
    """A command of a session and what it prints."""

    command: str
    printed: list[str]


def steps(block: str) -> list[Step]:
    """The commands of a block `console`."""
    found: list[Step] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            found.append(Step(line[2:], []))
        else:
            found[-1].printed.append(line)
    return found


def text_of(session: Sequence[Step]) -> str:
    """The block that `steps` reads."""
    return "".join("\n".join([f"$ {step.command}", *step.printed]) + "\n" for step in session)


def run_in_process(command: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `fagen ...`."""
    from fagen import cli

    assert command[0] == "fagen"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(command[1:])
    return code, out.getvalue(), err.getvalue()


def replay(
    session: Sequence[Step],
    run: Callable[[Sequence[str]], tuple[int, str, str]] = run_in_process,
    folder: Path | None = None,
) -> list[Step]:
    """Runs a session in `folder`. Returns it with what it printed now where that differs, and as it is where not."""
    folder = folder or Path.cwd()
    replayed = []
    code = 0
    for index, step in enumerate(session):
        if step.command == "echo $?":
            replayed.append(Step(step.command, [str(code)]))
            continue
        words, _, target = step.command.partition(" > ")
        code, out, err = run(shlex.split(words))
        if target:
            (folder / target.strip()).write_text(out)
            out = ""
        told = index + 1 < len(session) and session[index + 1].command == "echo $?"
        assert code == 0 or told or any(line.startswith("fagen: error") for line in step.printed), f"{step}\n{out}{err}"
        actual = [line.rstrip() for line in [*out.rstrip().splitlines(), *err.splitlines()]]
        same = matches(step.printed, out.rstrip().splitlines(), err.splitlines()) and bool(step.printed) == bool(actual)
        replayed.append(step if same else Step(step.command, actual))
    return replayed


def matches(expected: Sequence[str], out: Sequence[str], err: Sequence[str]) -> bool:
    """Whether a command prints what its example says."""
    said = [plain(line) for line in expected]
    errors = [line for line in said if line.startswith("fagen: ")]
    rest = [line for line in said if not line.startswith("fagen: ")]
    pattern = "".join(r"(?:.*\n)*?" if line == ELISION else re.escape(line) + r"\n" for line in rest)
    text = "".join(f"{plain(line)}\n" for line in out)
    there = [plain(line) for line in err]
    if any(line.startswith("See: ") for line in rest):
        text += "".join(f"{line}\n" for line in there if line.startswith("See: "))
    return re.fullmatch(pattern, text) is not None and all(line in there for line in errors)


def plain(line: str) -> str:
    """A line without what differs from run to run and from machine to machine."""
    line = re.sub(r"\b[0-9a-f]{12,64}\b", "DIGEST", line.rstrip())
    line = re.sub(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?(?: (?:us|ms|s|min|B|KiB|MiB)\b)?", "0", line)
    return re.sub(r"\s+", " ", re.sub("─+", "─", line))


# Where the parts of a score modification go: before the first such text of the file, or for MODS before the last.
_PLACES = {"fagen/spec.py": "    bias: Flag =", "fagen/mods.py": "\n)\n", "tests/cases.py": "    *PAIRS,\n]"}


def add(block: str, root: Path) -> bool:
    """Does with a block what its first line says: a fragment is written to its file or, "in place of the empty
    backward", changed there; the lines of a part of a score modification go where it belongs. False for others."""
    first, _, rest = block.partition("\n")
    if match := re.match(r"\{# ([\w/]+\.cuh\.j2): ", first):
        (root / match[1]).parent.mkdir(exist_ok=True)
        (root / match[1]).write_text(block)
        return True
    if match := re.match(r"\{# ([\w/]+\.cuh\.j2), in place of the empty backward", first):
        text = (root / match[1]).read_text()
        empty = "{% macro backward(grad, output) %}{% endmacro %}\n"
        assert text.count(empty) == 1
        (root / match[1]).write_text(text.replace(empty, rest))
        return True
    match = re.match(r"# (\S+\.py), in \w+$", first)
    if match is None:
        return False
    path, before = root / match[1], _PLACES[match[1]]
    last = match[1] == "fagen/mods.py"  # MODS ends with the file
    head, mark, tail = path.read_text().rpartition(before) if last else path.read_text().partition(before)
    assert mark
    added = "".join(f"    {line}\n" for line in rest.splitlines())
    path.write_text(head + ("\n" if last else "") + added + mark.removeprefix("\n") + tail)
    return True


def copy_of_checkout(root: Path, target: Path) -> dict[str, str]:
    """Copies what a contributor changes, and returns the environment in which Python takes the copy."""
    for folder in ("fagen", "templates", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", "golden")
        shutil.copytree(root / folder, target / folder, ignore=ignored)
    return environment_of(target, target / "generated")


def environment_of(root: Path, cache: Path) -> dict[str, str]:
    """An environment in which Python takes the fagen of a checkout, with a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FAGEN_", "TORCH_CUDA"))}
    return environment | {
        "PYTHONPATH": python_path(root, root / "tests"),
        "FAGEN_CACHE_DIR": str(cache),
        "FAGEN_ARCH": "sm80",
    }
