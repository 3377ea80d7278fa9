"""`fagen list` and `fagen clean`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import cache
from fagen.cli import output
from fagen.cli.amounts import parse_age, parse_size
from fagen.cli.options import JsonOption
from fagen.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fagen.cache import Artifact, Entry

_NAMES_HELP = "variants, with or without their architecture, or directories; * and ? as in a shell; default: all"
_OLDER_HELP = "only what was last used longer ago than this: 90min, 12h, 30d, 8w"
_KEEP_HELP = "only what was used longest ago, until what is left has at most this size: 500M, 2G"

NamesArgument = Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=_NAMES_HELP, show_default=False)]


def list_artifacts(names: NamesArgument = None, as_json: JsonOption = False) -> None:
    """Lists what the cache holds: the kernels, what compiled each, and when it was last used."""
    entries = select(names)
    rows = [row for entry in entries if (row := describe(entry)) is not None]
    waste = [entry for entry in entries if entry.artifact is None]
    if as_json:
        unreadable = [{"directory": one.directory, "problem": one.problem, "disk": one.size} for one in waste]
        output.emit({"cache": cache.cache_dir(), "artifacts": rows, "unreadable": unreadable})
        return
    if rows:
        print_artifacts(rows)
    total = output.size(sum(entry.size for entry in entries))
    output.note(f"{_count(len(rows))}, {total}, in {output.short(cache.cache_dir())}")
    for one in waste:
        output.note(f"no kernel in {output.short(one.directory)}: {one.problem}")


def clean(
    names: NamesArgument = None,
    older_than: Annotated[str | None, typer.Option("--older-than", metavar="AGE", help=_OLDER_HELP)] = None,
    keep_size: Annotated[str | None, typer.Option("--keep-size", metavar="SIZE", help=_KEEP_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="only say what would go")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: JsonOption = False,
) -> None:
    """Removes built kernels; without names all of them, and what failed builds left."""
    age = None if older_than is None else parse_age("--older-than", older_than)
    room = None if keep_size is None else parse_size("--keep-size", keep_size)
    doomed = choose(select(names), age, room, time.time())
    rows = [row for entry in doomed if (row := describe(entry)) is not None]
    waste = len(doomed) - len(rows)
    what = _count(len(rows)) + (f" and {waste} that cannot be read or failed" if waste else "")
    where = output.short(cache.cache_dir())
    removed, freed = 0, 0
    if not dry_run:
        if not yes:
            _confirm(f"Remove {what} from {where}?")
        last_use = {entry.directory: entry.used for entry in doomed}
        # Of what was used in the meantime the age is another; without a limit it goes all the same.
        limited = age is not None or room is not None
        removed, freed = cache.clean(
            lambda entry: entry.directory in last_use and not (limited and entry.used > last_use[entry.directory])
        )
        if not (names or limited):
            cache.forget_templates()
    if as_json:
        output.emit({"dry_run": dry_run, "removed": removed, "freed": freed, "artifacts": rows})
    elif dry_run:
        if rows:
            print_artifacts(rows)
        output.note(f"{what} would be removed from {where}, {output.size(sum(entry.size for entry in doomed))}")
    else:
        output.note(f"removed {removed} from {where}, {output.size(freed)}")


def select(names: Sequence[str] | None) -> list[Entry]:
    """The entries that `names` match, by variant; without names all. Raises SpecError for a name that matches none."""
    entries = sorted(cache.entries(), key=_order)
    if not names:
        return entries
    from difflib import get_close_matches
    from fnmatch import fnmatchcase

    chosen: dict[Path, Entry] = {}
    for name in names:
        matching = [entry for entry in entries if any(fnmatchcase(called, name) for called in _called(entry))]
        if not matching:
            near = get_close_matches(name, [called for entry in entries for called in _called(entry)], n=1)
            guess = f"; did you mean {near[0]}?" if near else "; fagen list shows what there is"
            raise SpecError(f"no built kernel is called {name!r}{guess}")
        chosen |= {entry.directory: entry for entry in matching}
    return list(chosen.values())


def choose(entries: Sequence[Entry], age: float | None, room: float | None, now: float) -> list[Entry]:
    """Of `entries`, those that the limits let go: last used more than `age` seconds before `now`; and beyond `room`
    bytes for what then is left, those used longest ago. Without a limit, all."""
    if age is None and room is None:
        return list(entries)
    gone = [entry for entry in entries if age is not None and now - entry.used > age]
    if room is not None:
        left = sorted((entry for entry in entries if entry not in gone), key=lambda entry: entry.used)
        size = sum(entry.size for entry in left)
        for entry in left:
            if size <= room:
                break
            gone.append(entry)
            size -= entry.size
    return sorted(gone, key=_order)


def describe(entry: Entry) -> dict[str, Any] | None:
    """One artifact for `--json`; None where there is none, or it has just been removed. `size` are the bytes of the
    binary, `disk` those of all files, `age` and `used` the seconds since it was built and last used."""
    artifact = entry.artifact
    if artifact is None:
        return None
    try:
        return {
            "slug": artifact.slug,
            "kind": artifact.entry.removeprefix("fagen_"),
            "spec": artifact.spec,
            "arch": artifact.arch,
            "emulated": artifact.target == "emulate",
            "compiler": artifact.compiler,
            "flags": list(artifact.flags),
            "seconds": artifact.seconds,
            "size": artifact.size,
            "disk": entry.size,
            "age": round(max(0.0, time.time() - artifact.built), 1),
            "used": round(max(0.0, time.time() - entry.used), 1),
            "digest": artifact.digest,
            "directory": artifact.directory,
        }
    except (OSError, ValueError):
        return None


def print_artifacts(rows: Sequence[dict[str, Any]]) -> None:
    """One row an artifact."""
    columns = (
        output.folded("variant"),
        "arch",
        "compiler",
        output.right("size"),
        output.right("built"),
        output.right("used"),
        "digest",
    )
    output.print_rows(
        columns,
        [
            (
                row["slug"].removesuffix(f"_{row['arch']}"),
                f"{row['arch']} CPU" if row["emulated"] else row["arch"],
                row["compiler"],
                output.size(row["disk"]),
                f"{output.age(row['age'])} ago",
                f"{output.age(row['used'])} ago",
                row["digest"][:12],
            )
            for row in rows
        ],
    )


def variant(artifact: Artifact) -> str:
    """The slug without the architecture, "fwd_hdim128_bf16"."""
    return artifact.slug.removesuffix(f"_{artifact.arch}")


def _called(entry: Entry) -> tuple[str, ...]:
    """What a NAME may call it."""
    directory = entry.directory.name
    if entry.artifact is None:
        return (directory.rpartition("-")[0], directory)
    return (entry.artifact.slug, variant(entry.artifact), directory)


def _order(entry: Entry) -> tuple[str, str, str]:
    artifact = entry.artifact
    return (_called(entry)[0], "" if artifact is None else artifact.target, entry.directory.name)


def _count(number: int) -> str:
    return f"{number} built kernel{'' if number == 1 else 's'}"


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise SpecError("clean asks before it removes, and there is no terminal to ask on: add --yes, or --dry-run")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
