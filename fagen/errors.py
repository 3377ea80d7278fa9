"""Every exception that fagen raises on purpose. The command line prints its text and exits with `exit_code`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_EXCERPT_LINES = 12
_ERROR_LINE = re.compile(r"\b(fatal\s+error|error|catastrophic|undefined reference)\b", re.IGNORECASE)


class FagenError(Exception):
    """Base of all errors of fagen."""

    exit_code = 1


class SpecError(FagenError, ValueError):
    """The request itself is invalid: a spec, an argument, an architecture or a setting that cannot mean anything."""

    exit_code = 2


class ToolchainError(FagenError):
    """No usable compiler, ninja or driver for the request; the text says what to install or set."""


class CacheError(FagenError):
    """The artifact cache cannot be read, written or trusted; the text says which variable or permission to change."""


class LaunchError(FagenError):
    """A kernel could not be launched, or stopped with a fault."""


class BuildError(FagenError):
    """A compiler rejected a kernel, or wrote something that is not one. Nothing was published.

    `command` is what ran, `log` all that it printed, `source` the kept copy of the rendered file (None where it could
    not be kept).
    """

    def __init__(self, reason: str, *, command: Sequence[str] = (), log: str = "", source: Path | None = None) -> None:
        self.reason = reason
        self.command = list(command)
        self.log = log
        self.source = source
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.reason]
        excerpt = first_errors(self.log)
        if excerpt:
            parts.append("\n".join(f"  {line}" for line in excerpt.splitlines()))
        if self.command:
            parts.append(f"command: {shlex.join(self.command)}")
        if self.source is not None:
            parts.append(f"source kept: {self.source}")
        return "\n".join(parts)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self.reason, self.command, self.log, self.source)


def _rebuild(reason: str, command: list[str], log: str, source: Path | None) -> BuildError:
    return BuildError(reason, command=command, log=log, source=source)


def first_errors(log: str, lines: int = _EXCERPT_LINES) -> str:
    """The part of a compiler's log worth showing: from its first error on, at most `lines` lines; else its end."""
    rows = [row.rstrip() for row in log.splitlines() if row.strip()]
    for index, row in enumerate(rows):
        if _ERROR_LINE.search(row):
            return "\n".join(rows[index : index + lines])
    return "\n".join(rows[-lines:])
