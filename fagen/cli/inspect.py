"""`fagen inspect`."""

from __future__ import annotations

import dataclasses
import itertools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import build as builder
from fagen import inspection
from fagen import revision as revisions
from fagen.cli import output
from fagen.cli.options import ArchOption, JobsOption, JsonOption
from fagen.cli.specs import parse, takes_specs
from fagen.cli.targets import planner, resolve_archs
from fagen.errors import BuildError, SpecError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fagen.arch import Arch
    from fagen.banks import Use
    from fagen.inspection import Comparison, Inspection, Report
    from fagen.plan import KernelPlan

_DIFF_HELP = (
    "show only what differs: from other flags, which begin with -, such as '--head-dim 128'; from a file of --save; "
    "or, where there is no such file, from the templates of a git commit, such as HEAD~3"
)
_SAVE_HELP = "keep the reports, for a later --diff"
_EMULATE_HELP = "also run each kernel once on the CPU, and count bank conflicts and unwritten words of shared memory"
_NAMES = "instructions.names."  # before the path of a single instruction
_MOST_NAMES = 10
_MOST_LINES = 6


@takes_specs
def inspect(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    diff: Annotated[str | None, typer.Option("--diff", metavar="'FLAGS'|FILE|COMMIT", help=_DIFF_HELP)] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help=_SAVE_HELP)] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help=_EMULATE_HELP)] = False,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Builds every kernel that the flags name and shows what each costs, and why."""
    wanted = _variants(specs, arch)
    others, saved, revision = _others(diff, arch)
    if save is not None and not save.absolute().parent.is_dir():
        raise SpecError(f"--save {save}: there is no folder {save.parent}")
    if save is not None and save.is_dir():
        raise SpecError(f"--save {save}: is a folder, not a file")
    plan_of = planner(emulate)  # what runs on the CPU has the tiles of the tables
    plans_of = {one: plan_of(*one) for one in [*wanted, *others]}
    kernels, other_kernels = (
        list(dict.fromkeys(kernel for one in some for kernel in plans_of[one])) for some in (wanted, others)
    )
    if revision is not None:
        saved = _of_revision(kernels, revision, jobs)
    every = list(dict.fromkeys([*kernels, *other_kernels]))
    with output.progress("compiling", len(every)) as step:
        artifacts = dict(zip(every, builder.build(every, jobs=jobs, on_done=lambda it: step(it.slug)), strict=True))
    uses = _uses(list(plans_of)) if emulate else {}
    this = inspection.inspect(kernels, [artifacts[kernel] for kernel in kernels], uses)
    if save is not None:
        inspection.save(save, this)
    if saved is None and others:
        found = inspection.inspect(other_kernels, [artifacts[kernel] for kernel in other_kernels], uses)
        saved = list(found.reports)
    if revision is not None and emulate:
        lacking = f"--emulate counts nothing with the templates of {revision}, whose emulator may be another"
        this = dataclasses.replace(this, notes=(*this.notes, lacking))
    comparison = None if saved is None else inspection.compare(saved, this.reports)
    if as_json:
        output.emit(describe(this, comparison))
    elif comparison is not None:
        print("\n".join(difference_lines(comparison)))
    else:
        print("\n\n".join("\n".join(lines(report)) for report in this.reports))
    if not as_json:
        for note in this.notes:
            output.note(note)


def _variants(specs: Sequence[AttentionSpec], arch: str | None) -> list[tuple[AttentionSpec, Arch]]:
    return list(itertools.product(specs, resolve_archs(arch)))


def _others(
    diff: str | None, arch: str | None
) -> tuple[list[tuple[AttentionSpec, Arch]], list[Report] | None, str | None]:
    """What to compare with: other flags' kernels, or reports of a file, or the same kernels of a git revision."""
    if diff is None:
        return [], None, None
    if diff.lstrip().startswith("-"):
        specs, other_arch = parse("--diff", diff)
        return _variants(specs, other_arch or arch), None, None
    if os.path.exists(diff):  # which takes names that no file can have
        return [], inspection.read(Path(diff)), None
    return [], None, diff


def _of_revision(kernels: Sequence[KernelPlan], revision: str, jobs: int | None) -> list[Report]:
    """Reports of `kernels` made from the templates of a git revision."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(revisions.templates(revision))
        except SpecError as error:
            raise SpecError(
                f"--diff {revision!r}: neither flags, which begin with -, nor a file that is there; and {error}"
            ) from error
        revisions.check(kernels, revision, folder)
        try:
            with output.progress(f"compiling {revision}", len(kernels)) as step:
                artifacts = builder.build(kernels, jobs=jobs, on_done=lambda it: step(it.slug), templates=folder)
        except BuildError as error:
            reason = f"with the templates of {revision}: {error.reason}"
            raise BuildError(reason, command=error.command, log=error.log, source=error.source) from error
    return list(inspection.inspect(kernels, artifacts).reports)


def _uses(variants: Sequence[tuple[AttentionSpec, Arch]]) -> dict[KernelPlan, Use]:
    """Runs all kernels emulated, with their use of shared memory counted."""
    from fagen import banks  # which computes

    found: dict[KernelPlan, Use] = {}
    with output.progress("emulating", len(variants)) as step:
        for spec, arch in variants:
            found |= banks.count(spec, arch)
            step(spec.slug)
    return found


def describe(found: Inspection, comparison: Comparison | None) -> dict[str, Any]:
    """The document of `--json`."""
    document: dict[str, Any] = {"kernels": list(found.reports), "notes": list(found.notes)}
    if comparison is not None:
        document["diff"] = dataclasses.asdict(comparison)
    return document


def lines(report: Report) -> list[str]:
    """One kernel for people."""
    rows = list(_rows(report))
    width = max(len(name) for name, _ in rows)
    return [report["slug"], *(f"  {name:{width}}  {text}" for name, text in rows)]


def _rows(report: Report) -> Iterator[tuple[str, str]]:
    yield "target", f"{report['arch']}: {report['made_of']}"
    yield "template", f"{report['template']}, of the {report['family']} family"
    if report["fallback"] is not None:
        yield "", f"the family of {report['arch']} does not have it: {report['fallback']}"
    yield "tile", report["tile_text"]
    yield "threads", f"{report['threads']} a block"
    shared = report["shared_memory"]
    if report["registers"] is not None:
        yield "registers", f"{report['registers']} a thread"
        stores, loads = output.size(report["spill_stores"]), output.size(report["spill_loads"])
        yield "spills", f"{stores} stored, {loads} loaded" if report["spill_stores"] + report["spill_loads"] else "none"
        yield "stack", output.size(report["stack"])
        yield "shared", f"{output.size(shared['dynamic'])} dynamic, {output.size(shared['static'])} static, a block"
    else:
        yield "shared", f"{output.size(shared['dynamic'])} dynamic a block"
    resident = report["occupancy"]
    if resident is not None:
        blocks = f"{resident['blocks']} block{'' if resident['blocks'] == 1 else 's'}"
        warps = f"{resident['warps']} of {resident['most_warps']} warps"
        yield "occupancy", f"{blocks} a multiprocessor, {warps}; limited by {' and '.join(resident['limits'])}"
    yield from _bank_rows(report)
    mix = report["instructions"]
    if mix is not None:
        yield "code", f"{mix['total']} instructions, those of loops counted once"
        for name, count in mix["classes"].items():
            of_class = _of_class(name, mix["names"])
            yield "", f"{count:>6}  {name}{f'  ({of_class})' if of_class else ''}"
    yield "compiler", f"{report['compiler']}, {output.size(report['size'])}"
    yield "source", output.short(Path(report["directory"]) / "kernel.cu")


def _bank_rows(report: Report) -> Iterator[tuple[str, str]]:
    counts = report["banks"]
    if counts is None:
        return
    sums = f"{counts['accesses']} accesses of shared memory by warps, {counts['wavefronts']} wavefronts"
    yield "banks", f"{sums}, {counts['conflicts'] or 'none'} of them for conflicts; no unwritten word read"
    for line in report["bank_lines"][:_MOST_LINES]:
        place = f"{line['template']}:{line['number']}"
        yield "", f"{line['conflicts']:>6}  at {place}, {line['primitive']}, {line['accesses']} accesses"
    left_out = len(report["bank_lines"][_MOST_LINES:])
    if left_out:
        yield "", f"        and at {left_out} more lines, which --json names"
    words, size = report["unwritten"]["words"], output.size(report["unwritten"]["bytes"])
    yield "unwritten", f"{words} words of the shared memory of a block, {size}" if words else "none"


def _of_class(name: str, names: dict[str, int]) -> str:
    """The three most frequent instructions of a class."""
    from fagen.disassembly import by_class

    chosen = [(each, count) for each, count in names.items() if name in by_class({each: count})]
    more = ", ..." if len(chosen) > 3 else ""
    return ", ".join(f"{each} {count}" for each, count in chosen[:3]) + more


def difference_lines(comparison: Comparison) -> list[str]:
    """What differs, for people."""
    said: list[str] = []
    for one in comparison.differences:
        said.append(one.this if one.other == one.this else f"{one.other} -> {one.this}")
        shown, left_out = _most_changed(one.changes)
        width = max(map(len, shown), default=0)
        said += [f"  {path.removeprefix(_NAMES):{width}}  {_change(*values)}" for path, values in shown.items()]
        if left_out:
            said.append(f"  and {left_out} more instructions, which --json names")
    said += [f"{slug}: only there" for slug in comparison.only_other]
    said += [f"{slug}: only here" for slug in comparison.only_this]
    return said or ["no difference"]


def _most_changed(changes: dict[str, tuple[Any, Any]]) -> tuple[dict[str, tuple[Any, Any]], int]:
    """`changes` with those single instructions that changed most, behind all others; and how many that leaves out."""
    names = [path for path in changes if path.startswith(_NAMES)]
    names.sort(key=lambda path: -abs(changes[path][1] - changes[path][0]) if _are_numbers(*changes[path]) else 0)
    kept = [path for path in changes if not path.startswith(_NAMES)] + names[:_MOST_NAMES]
    return {path: changes[path] for path in kept}, len(names[_MOST_NAMES:])


def _change(before: Any, after: Any) -> str:
    text = f"{_text(before)} -> {_text(after)}"
    if _are_numbers(before, after):
        text += f"  ({after - before:+})"
    return text


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
