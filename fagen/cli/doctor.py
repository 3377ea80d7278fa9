"""`fagen doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.doctor import Architecture, Diagnosis, architectures, diagnose

_STYLES = {"ok": "green", "not needed": "dim", "missing": "bold red", "problem": "bold red"}


_CARDS_HELP = "instead, what cards of each compute capability run, and why"


def doctor(
    cards: Annotated[bool, typer.Option("--cards", help=_CARDS_HELP)] = False,
    as_json: JsonOption = False,
) -> None:
    """Says what was found, and what to do about the rest. Exit code 0 if a kernel can be built and run in some way."""
    if cards:
        rows = architectures()
        if as_json:
            output.emit({"cards": [asdict(row) for row in rows]})
        else:
            _print_cards(rows)
        return
    diagnosis = diagnose()
    if as_json:
        output.emit({"ok": diagnosis.ok, "summary": diagnosis.summary, **asdict(diagnosis)})
    else:
        _print(diagnosis)
    if not diagnosis.ok:
        raise typer.Exit(1)


def _print_cards(cards: tuple[Architecture, ...]) -> None:
    rows = output.table(*map(output.right, ("card", "shared memory")), "target", "kernels, and why")
    for card in cards:
        target = card.target if card.compiles is not False else f"{card.target}, unknown to the compiler here"
        because = "" if card.why == "its own" else f"\n{card.target}: {card.why}"
        rows.add_row(card.capability, f"{card.shared_kib} KiB", target, f"{card.generation}: {card.made_of}{because}")
    output.console().print(rows)


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
