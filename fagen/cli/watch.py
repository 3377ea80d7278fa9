"""`fagen watch`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import watch as watcher
from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import resolve_archs
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fagen.inspection import Report
    from fagen.watch import Event, Judged, Row

_ALL_HELP = "every call of the case table that such a kernel can make, also those of kernels with fewer features"
_ONCE_HELP = "one verdict on the templates as they are; exit code 1 where a kernel is not right"
_LIMIT_HELP = "seconds after which a call that has not ended is stopped"
_MOST_FAILURES = 4


@takes_specs
def watch(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    every: Annotated[bool, typer.Option("--all", help=_ALL_HELP)] = False,
    limit: Annotated[float, typer.Option("--limit", metavar="SECONDS", help=_LIMIT_HELP)] = 60.0,
    once: Annotated[bool, typer.Option("--once", help=_ONCE_HELP)] = False,
    as_json: JsonOption = False,
) -> None:
    """Builds the kernels that the flags name, makes the calls that the case table has for them, and says how far off
    their results are and what they cost; again after each save of a template, beside the last run that was right.

    On the GPU if there is one, else emulated. Ctrl-C ends it.
    """
    if as_json and not once:
        raise SpecError("--json prints one document: add --once")
    if not (limit > 0 and math.isfinite(limit)):
        raise SpecError(f"--limit {limit:g} is no number of seconds above 0")
    variants = [watcher.Variant(*pair) for pair in itertools.product(specs, resolve_archs(arch))]
    for variant in variants:
        _ = variant.kernels  # SpecError for what its architecture cannot hold, before anything starts
    if once:
        _once(watcher.Watcher(variants, emulate=emulate, every=every, limit=limit), as_json)
        return
    watcher.check_installed()
    with watcher.Saves() as saves:
        folders = " and ".join(output.short(folder) for folder in watcher.template_folders())
        output.note(f"watching {folders}; Ctrl-C ends it")
        with watcher.Watcher(variants, emulate=emulate, every=every, limit=limit, saves=saves) as watching:
            for event in watching.events():
                _print(event)


def _once(watching: watcher.Watcher, as_json: bool) -> None:
    found: list[Judged] = []
    with watching:
        for event in watching.events():
            assert isinstance(event, watcher.Judged)
            found.append(event)
            if not as_json:
                _print(event)
    passed = all(each.verdict.passed for each in found)
    if as_json:
        output.emit({"passed": passed, "verdicts": [describe(each) for each in found]})
    if not passed:
        raise typer.Exit(1)


def describe(judged: Judged) -> dict[str, Any]:
    """One verdict for `--json`; `seconds` are those that it took, of `times` those of calls on a GPU."""
    verdict = judged.verdict
    return {
        "slug": verdict.variant.slug,
        "spec": verdict.variant.spec.model_dump(mode="json"),
        "arch": verdict.variant.arch.name,
        "device": verdict.device,
        "passed": verdict.passed,
        "state": verdict.state,
        "problem": verdict.problem,
        "calls": verdict.calls,
        "errors": {name: dataclasses.asdict(error) for name, error in verdict.errors.items()},
        "failures": [dataclasses.asdict(error) for error in verdict.failures],
        "kernels": list(verdict.reports),
        "times": verdict.seconds,
        "seconds": round(judged.seconds, 3),
        "notes": list(verdict.notes),
    }


def _print(event: Event) -> None:
    if isinstance(event, watcher.Saved):
        print(f"{time.strftime('%H:%M:%S')}  saved {_names(event.paths)}", flush=True)
    elif isinstance(event, watcher.Stale):
        output.note(f"{_names(event.paths)} is code of fagen itself, which counts from the next start of watch on")
    elif isinstance(event, watcher.Unchanged):
        for verdict in event.verdicts:
            print(f"{verdict.variant.slug}: unchanged, {verdict.state}", flush=True)
    else:
        _print_verdict(event)


def _names(paths: Sequence[Path]) -> str:
    return ", ".join(output.short(path) for path in paths)


def _print_verdict(judged: Judged) -> None:
    from rich.text import Text

    verdict = judged.verdict
    console = output.console()
    colour = "green" if verdict.passed else "bold red"
    facts = [verdict.device] if verdict.device else []
    facts += [f"{verdict.calls} call{'' if verdict.calls == 1 else 's'}"] if verdict.calls else []
    facts.append(f"{judged.seconds:.1f} s after the {'save' if judged.after_save else 'start'}")
    console.print(f"[bold]{verdict.variant.slug}[/]: [{colour}]{verdict.state}[/]  {', '.join(facts)}")
    if verdict.problem:
        console.print(Text(_indented(verdict.problem)))
    for error in verdict.failures[:_MOST_FAILURES]:
        console.print(Text(f"  {error.result} of {error.call}: {error.error:.2e} of {error.budget:.2e}"))
        if error.worst:
            console.print(Text(f"    {error.worst}"))
    left_out = len(verdict.failures[_MOST_FAILURES:])
    if left_out:
        console.print(f"  and {left_out} more results")
    rows = watcher.rows(verdict, judged.good)
    for line in lines(rows):
        console.print(Text(line))
    if judged.good is None and verdict.reports:
        console.print(_costs(verdict.reports))
    elif verdict.reports and not any(row.unit in ("", "B") for row in rows):
        console.print("  registers, spills, stack and shared memory as in the last good run")
    for note in verdict.notes:
        output.note(note)
    console.print()


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _costs(reports: Sequence[Report]) -> Any:
    """A row a kernel, for the first verdict."""
    names = ("registers", "spilled", "stack", "shared", "blocks a multiprocessor")
    table = output.table("  kernel", *(output.right(name) for name in names))
    for report in reports:
        shared = report["shared_memory"]
        cells = [shared["dynamic"] + (shared["static"] or 0), (report["occupancy"] or {}).get("blocks")]
        spilled = None if report["registers"] is None else report["spill_stores"] + report["spill_loads"]
        sizes = [_text(value, "B") for value in (spilled, report["stack"], cells[0])]
        table.add_row(f"  {report['kind']}", _text(report["registers"], ""), *sizes, _text(cells[1], ""))
    return table


def lines(rows: Sequence[Row]) -> list[str]:
    """A line a figure: what it was in the last good run, what it is, and the difference."""
    width = max((len(row.name) for row in rows), default=0)
    return [f"  {row.name:{width}}  {_figure(row)}" for row in rows]


def _figure(row: Row) -> str:
    now, behind = _text(row.after, row.unit), " of its budget" if row.unit == "budget" else ""
    if row.before is None:
        return f"{now}{behind}"
    before = _text(row.before, row.unit)
    if before == now:
        return f"{now}{behind}, as before"
    return f"{before} -> {now}{_change(row)}{behind}"


def _change(row: Row) -> str:
    change = math.nan if row.after is None else row.after - row.before
    if not math.isfinite(change):
        return ""
    if row.unit == "s":
        return f" ({change / row.before:+.1%})"
    if row.unit == "budget":
        return f" ({change:+.3f})"
    return f" ({'+' if change > 0 else '-'}{_text(abs(change), row.unit)})"


def _text(value: Any, unit: str) -> str:
    if value is None:
        return "unknown"
    if unit == "budget":
        return f"{value:.3f}"
    if unit == "B":
        return output.size(value)
    return output.duration(value) if unit == "s" else str(value)
