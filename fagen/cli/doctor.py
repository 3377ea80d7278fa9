"""`fagen doctor`."""

from __future__ import annotations

from dataclasses import asdict

import typer

from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.doctor import Diagnosis, diagnose

_STYLES = {"ok": "green", "not needed": "dim", "missing": "bold red", "problem": "bold red"}


def doctor(as_json: JsonOption = False) -> None:
    """Says what was found, and what to do about the rest. Exit code 0 if a kernel can be built and run in some way."""
    diagnosis = diagnose()
    if as_json:
        output.emit({"ok": diagnosis.ok, "summary": diagnosis.summary, **asdict(diagnosis)})
    else:
        _print(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    from rich.text import Text

    rows = output.table("part", "status", "found, and what to do")
    for finding in diagnosis.findings:
        found = Text(finding.found, overflow="fold")
        if finding.advice:
            found.append(f"\n{finding.advice}", style="italic")
        rows.add_row(finding.name, Text(finding.status, style=_STYLES[finding.status]), found)
    console = output.console()
    console.print(rows)
    console.print()
    console.print(Text(f"{diagnosis.summary[0].upper()}{diagnosis.summary[1:]}."))
