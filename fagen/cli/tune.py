"""`fagen tune`."""

from __future__ import annotations

import dataclasses
import itertools
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import tuned
from fagen.arch import resolve
from fagen.cli import output
from fagen.cli.options import ArchOption, JobsOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import resolve_archs
from fagen.errors import SpecError
from fagen.plan import plan
from fagen.spec import AttentionSpec
from fagen.target import FALLBACK, gpu_capability

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fagen.plan import Tile
    from fagen.tune import Outcome, Timed
    from fagen.tuned import Entry

_PANEL = "Shapes to time"
_KERNEL_HELP = "only this kernel of each spec: fwd, decode, bwd or bwd_dq"
_SHOWN = 6  # dropped tiles that are named


def _size(flag: str, what: str, default: str) -> Any:
    return typer.Option(flag, min=1, metavar="N", help=f"{what}; default: {default}", rich_help_panel=_PANEL)


@partial(takes_specs, unless=("list_entries", "forget"))
def tune(
    specs: list[AttentionSpec] | None,
    arch: ArchOption = None,
    batch: Annotated[int | None, _size("--batch", "sequences", "16384 keys in all")] = None,
    heads: Annotated[int | None, _size("--heads", "heads of q", "2048 columns in all")] = None,
    heads_k: Annotated[int | None, _size("--heads-k", "heads of k and v, a divisor of --heads", "as --heads")] = None,
    seqlen: Annotated[
        str | None,
        typer.Option(
            "--seqlen",
            metavar="N,...",
            help="keys a sequence; default: 1024,4096,16384",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    seqlen_q: Annotated[
        int | None, _size("--seqlen-q", "queries a sequence", "as many as keys, with --split-kv one")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="timings of the best tiles")] = 30,
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="KIND", help=_KERNEL_HELP)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="keep nothing of what is found")] = False,
    list_entries: Annotated[bool, typer.Option("--list", help="show what is kept, and tune nothing")] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="remove what is kept: of the kernels that the flags name, else all")
    ] = False,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compiles the tiles that fit, checks and times them, and keeps the fastest if it beats the table's by over 1%."""
    if list_entries and forget:
        raise SpecError("--list and --forget exclude each other")
    if list_entries or forget:
        _show_or_forget(specs, arch, kernel, forget, as_json)
        return
    assert specs is not None
    lengths = _lengths(seqlen)
    if gpu_capability() is None:
        raise SpecError(tuned.NO_CARD)
    archs = resolve_archs(arch)
    from fagen import tune as tuner  # which imports torch
    from fagen import tune_card

    sizes = {"batch": batch, "heads": heads, "heads_k": heads_k, "seqlens": lengths, "seqlen_q": seqlen_q}
    jobs_to_do = []
    for spec, target in itertools.product(specs, archs):
        shapes = tuner.shapes(spec, **sizes)  # type: ignore[arg-type]
        kinds = tuner.kinds(spec, target, shapes)
        if kernel is not None and kernel not in kinds:
            raise SpecError(f"no kernel of kind {kernel!r} to tune for {spec.slug}; there are: {', '.join(kinds)}")
        jobs_to_do.append((spec, target, shapes, [kind for kind in kinds if kernel in (None, kind)]))
    devices = {target: tune_card.Card(target) for target in archs}
    compiler = tuned.compiler_identity()
    documents, file = [], None
    for spec, target, shapes, wanted in jobs_to_do:
        outcomes = tuner.tune(
            spec, target, devices[target], shapes, wanted, samples=repeats, jobs=jobs, progress=output.progress
        )
        gpu = devices[target].card
        assert compiler is not None  # it has just compiled
        found = [outcome.entry(gpu, compiler, date.today()) for outcome in outcomes]
        entries = [entry for entry in found if entry is not None]
        if entries and not dry_run:
            file = tuned.keep(entries)
        for outcome in outcomes:
            documents.append({"card": gpu.name, "compiler": compiler, **describe(outcome)})
            if not as_json:
                print("\n".join([f"{outcome.kernel.slug} on {gpu.name}, {compiler}", *lines(outcome)]))
                output.console().print(_table(outcome))
                print(f"  {_verdict(outcome)}\n")
    if as_json:
        output.emit({"kernels": documents, "file": file})
    elif file is not None:
        output.note(f"kept in {output.short(file)}; fagen.load takes these tiles from now on")


def describe(outcome: Outcome) -> dict[str, Any]:
    """One kernel for `--json`. `gain` and `ratios` are how many times as fast as the table's tile."""
    kernel = outcome.kernel
    return {
        "slug": kernel.slug,
        "kind": kernel.kind,
        "spec": kernel.spec.model_dump(mode="json"),
        "arch": kernel.arch.name,
        "considered": outcome.considered,
        "fitting": outcome.fitting,
        "compiled": outcome.compiled,
        "right": outcome.right,
        "shapes": [dataclasses.asdict(shape) for shape in outcome.shapes],
        "shipped": dataclasses.asdict(kernel.tile),
        "tiles": [
            {**dataclasses.asdict(one), "gain": one.gain, "shipped": one.tile == kernel.tile} for one in outcome.timed
        ],
        "winner": None if outcome.winner is None else dataclasses.asdict(outcome.winner.tile),
        "gain": None if outcome.winner is None else outcome.winner.gain,
        "dropped": [{"tile": dataclasses.asdict(tile), "reason": reason} for tile, reason in outcome.dropped],
    }


def lines(outcome: Outcome) -> list[str]:
    """What became of the range, for people."""
    counts = (
        f"  {outcome.fitting} of {outcome.considered} tiles fit beside the table's, {outcome.compiled} of them spill "
        f"no more, {outcome.right} of them are right"
    )
    legend = "  seconds of a call, in parentheses how many times as fast it is as with the table's tile:"
    named = [f"  dropped: {fields(tile)}: {reason}" for tile, reason in outcome.dropped[:_SHOWN]]
    more = len(outcome.dropped) - _SHOWN
    return [counts, *named, *([f"  and {more} more, which --json names"] if more > 0 else []), legend]


def fields(tile: Tile) -> str:
    """All of a tile: "tile_m=128 tile_n=64 warps=4 ..."."""
    return _text(dataclasses.asdict(tile))


def _text(values: Mapping[str, int]) -> str:
    return " ".join(f"{name}={value:d}" for name, value in values.items())


def _verdict(outcome: Outcome) -> str:
    if outcome.winner is None:
        return "the table's tile stays: none is faster by more than 1% in the mean and as fast on each shape"
    return f"{fields(outcome.winner.tile)}: {outcome.winner.gain:.3f} times as fast as the table's tile"


def _table(outcome: Outcome) -> Any:
    """Seconds of each shape and the ratio to the table's tile, the fastest first."""
    heads = [output.right(shape.name) for shape in outcome.shapes]
    table = output.table("  tile", output.right("regs"), output.right("spills"), *heads, output.right("mean"))
    the_table_s = " (the table's)"
    for one in outcome.timed:
        shipped = one.tile == outcome.kernel.tile
        table.add_row(
            f"  {fields(one.tile)}{the_table_s if shipped else ''}", *_registers(one), *_cells(one), f"{one.gain:.3f}"
        )
    return table


def _registers(one: Timed) -> tuple[str, str]:
    if one.registers is None or one.spills is None:
        return "-", "-"
    return str(one.registers), output.size(one.spills)


def _cells(one: Timed) -> list[str]:
    return [f"{output.duration(seconds)} ({ratio:.3f})" for seconds, ratio in zip(one.seconds, one.ratios, strict=True)]


def _lengths(text: str | None) -> list[int]:
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part) > 0):
            raise SpecError(f"--seqlen {part!r} is no number of keys; write a list such as 1024,16384")
    return list(dict.fromkeys(map(int, parts)))


def _show_or_forget(
    specs: Sequence[AttentionSpec] | None, arch: str | None, kernel: str | None, forget: bool, as_json: bool
) -> None:
    archs = None if arch is None else {one.name for one in resolve_archs(arch)}
    named = None
    if specs is not None:
        kernels = [one for spec in specs for one in plan(spec, resolve(FALLBACK))]
        named = {(one.kind, tuned.spec_text(one.spec)) for one in kernels}

    def chosen(entry: Entry) -> bool:
        return (
            (named is None or (entry.kind, entry.spec_text) in named)
            and (archs is None or entry.arch in archs)
            and kernel in (None, entry.kind)
        )

    entries = tuned.forget(chosen) if forget else [entry for entry in tuned.entries() if chosen(entry)]
    compiler = tuned.compiler_identity()
    if as_json:
        rows = [dataclasses.asdict(entry) | {"current": tuned.is_current(entry, compiler)} for entry in entries]
        output.emit({"forgotten" if forget else "entries": rows})
        return
    if entries:
        columns = ("kernel", "card", "compiler", output.folded("tile"), output.right("gain"), "found", "")
        output.print_rows(columns, [_row(entry, compiler) for entry in entries])
    what = f"{len(entries)} tuned tile{'' if len(entries) == 1 else 's'}"
    output.note(f"{what} forgotten" if forget else what)


def _row(entry: Entry, compiler: str | None) -> tuple[str, ...]:
    return (
        entry.slug,
        entry.card,
        entry.compiler,
        _text(entry.tile),
        f"{entry.gain:.3f}",
        entry.date,
        "" if tuned.is_current(entry, compiler) else "of another compiler or fagen: not used",
    )
