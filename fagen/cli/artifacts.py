"""`fagen list` and `fagen clean`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import cache
from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fagen.cache import Artifact

_NAMES_HELP = "variants, with or without their architecture, or directories; * and ? as in a shell; default: all"

NamesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=_NAMES_HELP, show_default=False)]


def list_artifacts(names: NamesArgument = None, as_json: JsonOption = False) -> None:
    """Lists what the cache holds."""
    artifacts = select(names)
    if as_json:
        output.emit({"cache": cache.cache_dir(), "artifacts": [describe(artifact) for artifact in artifacts]})
        return
    if artifacts:
        print_artifacts(artifacts)
    total = output.size(sum(artifact.size for artifact in artifacts))
    output.note(f"{_count(artifacts)}, {total}, in {output.short(cache.cache_dir())}")


def clean(
    names: NamesArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="only say what would go")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: JsonOption = False,
) -> None:
    """Removes built kernels; without names all of them, and what failed builds left."""
    artifacts = select(names)
    doomed = {artifact.directory for artifact in artifacts}
    rows = [describe(artifact) for artifact in artifacts] if as_json else []
    where = output.short(cache.cache_dir())
    if dry_run:
        removed, freed = 0, 0
    else:
        if not yes:
            _confirm(f"Remove {_count(artifacts)}{'' if names else ' and what failed builds left'} from {where}?")
        removed, freed = cache.clean((lambda artifact: artifact.directory in doomed) if names else None)
    if as_json:
        output.emit({"dry_run": dry_run, "removed": removed, "freed": freed, "artifacts": rows})
        return
    if dry_run:
        if artifacts:
            print_artifacts(artifacts)
        output.note(f"{_count(artifacts)} would be removed from {where}")
        return
    output.note(f"removed {removed} from {where}, {output.size(freed)}")


def select(names: Sequence[str] | None) -> list[Artifact]:
    """The artifacts that `names` match, all without names. Raises SpecError for a name that matches none."""
    artifacts = cache.list_artifacts()
    if not names:
        return artifacts
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    chosen: dict[Path, Artifact] = {}
    for name in names:
        matching = [
            artifact
            for artifact in artifacts
            if any(fnmatchcase(called, name) for called in (variant(artifact), artifact.slug, artifact.directory.name))
        ]
        if not matching:
            near = get_close_matches(name, [artifact.slug for artifact in artifacts], n=1)
            guess = f"; did you mean {near[0]}?" if near else "; fagen list shows what there is"
            raise SpecError(f"no built kernel is called {name!r}{guess}")
        chosen |= {artifact.directory: artifact for artifact in matching}
    return list(chosen.values())


def describe(artifact: Artifact) -> dict[str, Any]:
    """One artifact for `--json`."""
    return {
        "slug": artifact.slug,
        "spec": artifact.spec,
        "arch": artifact.arch,
        "emulated": artifact.target == "emulate",
        "compiler": artifact.compiler,
        "seconds": artifact.seconds,
        "size": artifact.size,
        "age": round(age(artifact), 1),
        "digest": artifact.digest,
        "directory": artifact.directory,
    }


def print_artifacts(artifacts: Sequence[Artifact]) -> None:
    """One row an artifact."""
    columns = (output.folded("variant"), "arch", "compiler", output.right("size"), output.right("age"), "digest")
    rows = [
        (
            variant(artifact),
            output.arch(artifact),
            artifact.compiler,
            output.size(artifact.size),
            output.age(age(artifact)),
            artifact.digest[:12],
        )
        for artifact in artifacts
    ]
    output.print_rows(columns, rows)


def variant(artifact: Artifact) -> str:
    """The slug without the architecture, "fwd_hdim128_bf16"."""
    return artifact.slug.removesuffix(f"_{artifact.arch}")


def age(artifact: Artifact) -> float:
    """Seconds since the artifact was built."""
    return time.time() - (artifact.directory / cache.MANIFEST).stat().st_mtime


def _count(artifacts: Sequence[Artifact]) -> str:
    return f"{len(artifacts)} built kernel{'' if len(artifacts) == 1 else 's'}"


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise SpecError("clean asks before it removes, and there is no terminal to ask on: add --yes, or --dry-run")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
