"""`fagen trace`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fagen import stages
from fagen.cli import output
from fagen.cli.options import (
    ArchOption,
    BatchOption,
    EmulateOption,
    HeadsKOption,
    HeadsOption,
    JsonOption,
    KeysOption,
    QueriesOption,
    SeedOption,
    SplitsOption,
)
from fagen.cli.specs import takes_specs
from fagen.cli.targets import resolve_archs
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from fagen.trace import Block, Stage, Trace

_KERNEL_HELP = f"which kernel of the spec: {', '.join(stages.KINDS)}; default: the forward that the call runs"
_BLOCK_HELP = (
    "the block of this head and tile of queries, for bwd of this head of k and v and tile of keys; "
    "default: the one that computes the worst element"
)
_PNG_HELP = r"heat maps of all stages (pip install 'fagen\[bench]')"
_TILE_HELP = "only this step of the block: a tile of keys, for bwd of queries, for combine a part; default: all"


@takes_specs
def trace(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    kernel: Annotated[str | None, typer.Option("--kernel", metavar="KIND", help=_KERNEL_HELP)] = None,
    block: Annotated[str | None, typer.Option("--block", metavar="BATCH,HEAD,TILE", help=_BLOCK_HELP)] = None,
    tile: Annotated[int | None, typer.Option("--tile", metavar="N", help=_TILE_HELP)] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="keep what was captured and expected, .npz or .safetensors"),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help=_PNG_HELP)] = None,
    batch: BatchOption = None,
    heads: HeadsOption = None,
    heads_k: HeadsKOption = None,
    seqlen_q: QueriesOption = None,
    seqlen_k: KeysOption = None,
    num_splits: SplitsOption = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Compares what one block of a kernel computes on the way with float64, on the GPU if there is one, else emulated.

    Exit code 1 where a stage departs from the definition, or the kernel stops with a fault.
    """
    archs = resolve_archs(arch)
    if len(specs) * len(archs) > 1:
        raise SpecError(f"trace follows one kernel, and the flags name {len(specs) * len(archs)} variants")
    import torch  # not before the flags are known to be right

    from fagen import arrays
    from fagen import trace as tracer
    from fagen.bench import plot

    if save is not None:
        arrays.check_path("--save", save)
    if png is not None:
        plot.check(png, "--png")
    found = tracer.trace(
        specs[0],
        kind=kernel,
        arch=archs[0].name,
        emulate=emulate or not torch.cuda.is_available(),
        block=None if block is None else _block(block),
        tile=tile,
        seed=seed,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_splits=num_splits,
    )
    if save is not None and found.parts:
        arrays.save(save, found.arrays())
    if png is not None and found.parts:
        from fagen.trace import picture

        picture.save(found, png)
    if as_json:
        output.emit(found.to_json())
    else:
        _print(found)
    if not found.passed:
        raise typer.Exit(1)


def _block(text: str) -> Block:
    from fagen.trace import Block

    try:
        batch, head, tile = (int(part) for part in text.split(","))
    except ValueError:
        raise SpecError(f"--block {text!r}: expected three numbers, BATCH,HEAD,TILE, such as 0,1,2") from None
    return Block(batch, head, tile)


def _print(found: Trace) -> None:
    from rich.table import Table
    from rich.text import Text

    problem, case = found.problem, found.problem.case
    facts = Table.grid("", "", padding=(0, 2))
    facts.add_row("kernel", f"[bold]{problem.kernel.slug}[/]")
    facts.add_row("device", found.device)
    facts.add_row(
        "call",
        f"batch {case.batch}, {case.heads} heads over {case.heads_k}, {case.seqlen_q} queries, {case.seqlen_k} keys, "
        f"seed {case.seed}",
    )
    console = output.console()
    if found.fault is not None:
        facts.add_row("fault", Text(found.fault))
        for line in found.fault_lines:
            facts.add_row("", line)
        facts.add_row("result", "[bold red]stopped[/]: no stage can be compared before this is mended")
        console.print(facts)
        return
    if found.block is not None:
        facts.add_row("block", problem.place(found.block))
        if problem.spec.split_kv:
            facts.add_row("parts", ", ".join(map(_tiles, problem.tiles_of_parts(found.block))) + " of the keys")
    for name, result in found.results.items():
        verdict = "" if result.passed else "  [bold red]too much[/]"
        facts.add_row(f"error of {name}", f"{result.error:.2e} of {result.budget:.2e}{verdict}")
    if not found.same_bits:
        facts.add_row("note", "the traced kernel rounds otherwise than the kernel: its results differ in some bits")
    names = ("error", "relative", "of bound", "head", problem.unit, "row", "col", "captured", "expected")
    table = output.table("stage", *(output.right(name) for name in names), "")
    for stage in found.stages:
        table.add_row(*_cells(stage))
    for part in (facts, "", table, ""):
        console.print(part)
    console.print(_verdict(found))


def _tiles(tiles: range) -> str:
    if len(tiles) < 2:
        return f"tile {tiles[0]}" if tiles else "none"
    return f"tiles {tiles[0]} to {tiles[-1]}"


def _cells(stage: Stage) -> list[str]:
    """One stage as a row of the table."""
    worst = stage.worst
    if worst is None:
        return [stage.name, *["-"] * 9, "nothing to judge"]
    return [
        stage.name,
        f"{stage.error:.2e}",
        f"{stage.relative:.2e}",
        "<0.01" if stage.badness < 0.01 else f"{stage.badness:.2f}" if stage.badness < 1000 else ">1000",
        str(stage.head),
        "end" if stage.tile is None else str(stage.tile),
        str(worst.row),
        "-" if worst.column is None else str(worst.column),
        "none" if worst.captured is None else f"{worst.captured:+.6g}",
        f"{worst.expected:+.6g}",
        "[bold red]departs[/]" if stage.departs else "[green]right[/]",
    ]


def _verdict(found: Trace) -> str:
    first = found.first
    if first is None or first.worst is None:
        wrong = [name for name, result in found.results.items() if not result.passed]
        if wrong:
            return f"no stage of this block departs, yet {' and '.join(wrong)} past the budget: look at another block"
        return "no stage departs"
    worst = first.worst
    place = f"head {first.head}, row {worst.row}" + ("" if worst.column is None else f", column {worst.column}")
    step = "at the end" if first.tile is None else f"at {found.problem.unit} {first.tile}"
    captured = "nothing was computed" if worst.captured is None else f"{worst.captured:+.6g}"
    found_and_wanted = f"{captured}, expected {worst.expected:+.6g}"
    return f"first stage that departs: [bold red]{first.name}[/], {step}, {place}: {found_and_wanted}"
