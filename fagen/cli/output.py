"""How results reach a terminal, a pipe or a program."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

    from fagen.cache import Artifact

# Wide enough that a table in a pipe or a file keeps each row on one line.
_PIPE_WIDTH = 1000


def note(message: str) -> None:
    """A line for the person at the terminal, on standard error."""
    print(f"fagen: {message}", file=sys.stderr)


def console(stream: TextIO | None = None) -> Console:
    """A rich console that wraps for a terminal only."""
    from rich.console import Console

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, soft_wrap=False)


@contextmanager
def progress(verb: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's standard error, elsewhere nothing. What it yields is called with the name of each finished
    part."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console(sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


def table(*columns: Column | str) -> Table:
    """An empty table in the one look of all commands."""
    from rich import box
    from rich.table import Table

    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))


def right(name: str) -> Column:
    """A column of numbers."""
    from rich.table import Column

    return Column(name, justify="right", no_wrap=True)


def folded(name: str) -> Column:
    """A column of names and paths, broken anywhere rather than cut."""
    from rich.table import Column

    return Column(name, overflow="fold")


def print_rows(columns: Sequence[Column | str], rows: Iterable[Sequence[str]]) -> bool:
    """Prints a table whose last column is left out where a terminal is too narrow for it. Returns whether it was."""
    rows = list(rows)
    out = console()
    unbounded = out.options.update(width=_PIPE_WIDTH)
    for count in (len(columns), len(columns) - 1):
        filled = table(*columns[:count])
        for row in rows:
            filled.add_row(*row[:count])
        if count < len(columns) or out.measure(filled, options=unbounded).maximum <= out.width:
            break
    out.print(filled)
    return count < len(columns)


def emit(document: Mapping[str, Any]) -> None:
    """The one JSON document of a command. Numbers that JSON lacks become the strings "inf", "-inf" and "nan"."""
    print(json.dumps(_plain(document), indent=2, allow_nan=False, ensure_ascii=False))


def emit_error(error: BaseException, code: int, message: str) -> None:
    """A failure as the one JSON document of a command."""
    # A failed compiler's log and command are fields of their own.
    message = getattr(error, "reason", message)
    details: dict[str, Any] = {"type": type(error).__name__, "message": message, "exit_code": code}
    for name in ("command", "log", "source"):
        if getattr(error, name, None):
            details[name] = getattr(error, name)
    emit({"error": details})


def arch(artifact: Artifact) -> str:
    """What an artifact runs on: "sm80", or "sm80 CPU" for the emulated kernel."""
    return artifact.arch if artifact.target == "cuda" else f"{artifact.arch} CPU"


def size(count: float) -> str:
    """Bytes for people: "512 B", "34.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float) -> str:
    """Time for people, three digits: "0.412 s", "35.0 us"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us" or (unit == "s" and seconds >= 0.1):
            return f"{seconds * factor:#.3g} {unit}".replace(". ", " ")
    raise AssertionError("unreachable")


def age(seconds: float) -> str:
    """How long ago, in the largest whole unit: "3 h"."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def short(path: Path) -> str:
    """The path as seen from here: relative where it lies below the working directory."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Path):
        return str(value)
    return value
