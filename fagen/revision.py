"""The templates of another git revision, from the checkout that fagen runs from, whose working tree stays as it is."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fagen import render as renderer
from fagen.errors import BuildError, SpecError
from fagen.plan import KernelPlan

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
# A hook's, which lead git away from the folder that it is asked about.
_OF_HOOKS = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"})


@contextmanager
def templates(revision: str) -> Iterator[Path]:
    """A temporary folder with the templates of `revision`, anything that git takes for a commit: HEAD~3, a branch, a
    tag.

    Raises SpecError, which leaves `revision` to be named, where there is no git, no checkout, no such commit, or none
    of fagen's templates in it.
    """
    if shutil.which("git") is None:
        raise SpecError("git, which would know of a commit, is not on PATH: install it")
    folder = renderer.template_dir()
    code, _, said = _git(folder, "rev-parse", "--is-inside-work-tree")
    if code != 0:
        raise SpecError(f"no commit is known, for fagen does not run from a git checkout ({folder}: {said})")
    code, out, _ = _git(folder, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    commit = out.decode(errors="replace").strip()
    if code != 0 or not _COMMIT.fullmatch(commit):
        raise SpecError("git knows no such commit in the checkout that fagen runs from")
    code, archive, said = _git(folder, "archive", "--format=zip", commit)  # of this folder alone
    if code != 0:
        raise SpecError(f"the commit of that name has no {folder.name} ({said})")
    with tempfile.TemporaryDirectory(prefix="fagen-revision-") as scratch:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            files.extractall(scratch)
        yield Path(scratch)


def check(kernels: Sequence[KernelPlan], revision: str, folder: Path) -> None:
    """Raises SpecError unless the Python at hand renders all `kernels` from `folder`, the templates of `revision`."""
    for kernel in kernels:
        try:
            renderer.render(kernel, "cuda", folder)
        except Exception as error:  # templates are programs: written for another Python side, they may raise anything
            what = (
                error.reason if isinstance(error, BuildError) else f"{kernel.slug}: {renderer.explain(error, folder)}"
            )
            raise SpecError(
                f"the Python side at hand cannot render the templates of {revision}: {what}. Inspect that commit in a "
                "worktree of its own with --save, and give the saved file"
            ) from error


def _git(folder: Path, *arguments: str) -> tuple[int, bytes, str]:
    """Exit status, standard output, and the first line of standard error without git's "fatal: "."""
    environment = {name: value for name, value in os.environ.items() if name not in _OF_HOOKS} | {"LC_ALL": "C"}
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, check=False)
    except OSError as error:
        raise SpecError(f"git does not start: {(error.strerror or str(error)).lower()}") from error
    said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
    return done.returncode, done.stdout, said.removeprefix("fatal: ")
