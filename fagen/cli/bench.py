"""`fagen bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer

from fagen.arch import resolve
from fagen.bench import compile as compile_bench
from fagen.bench import contestants, documents, page, plot
from fagen.bench import decode as decode_bench
from fagen.bench import speed as speed_bench
from fagen.bench import variants as variants_bench
from fagen.bench.compile import CompileReport
from fagen.bench.decode import DecodeReport
from fagen.bench.documents import Run
from fagen.bench.results import OURS, Report, Table
from fagen.bench.speed import SpeedReport
from fagen.bench.variants import VariantsReport
from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.cli.targets import resolve_archs
from fagen.errors import SpecError

Row = TypeVar("Row", compile_bench.Job, speed_bench.Row, decode_bench.Row, variants_bench.Row)
AnyRates = TypeVar("AnyRates", SpeedReport, DecodeReport)
_AnyReport: TypeAlias = CompileReport | SpeedReport | DecodeReport | VariantsReport


@dataclass(frozen=True)
class _Options:
    """What is measured of a measurement, None where it is left to that."""

    arch: str | None
    rows: str | None
    repeats: int | None
    against: list[str] | None
    flex: bool
    grid: bool


_AGAINST_HELP = (
    f"whom to time on a GPU: {', '.join(contestant.key for contestant in contestants.everyone())}; default: all that "
    "are installed"
)


def bench(
    compile_times: Annotated[bool, typer.Option("--compile", help="time builds, cold and warm")] = False,
    forward: Annotated[bool, typer.Option("--forward", help="time forward kernels on a GPU, beside others")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="time gradients on a GPU, beside others")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="time one query a sequence on a GPU, beside others and a copy")
    ] = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="with --decode: batches, heads and 256 to 131072 keys, all together")
    ] = False,
    variants: Annotated[
        bool, typer.Option("--variants", help="build and check one kernel after the other: cost, and error to float64")
    ] = False,
    saved: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="show what --json printed instead of measuring; can be repeated"),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="ARCH", help="target; default: sm80, on a GPU the GPU's")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="TEXT", help="only rows whose name contains this, such as d128")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, metavar="N", help="timings a row; default: 5, on a GPU 30")
    ] = None,
    against: Annotated[str | None, typer.Option("--against", metavar="NAME,...", help=_AGAINST_HELP)] = None,
    no_flex: Annotated[
        bool, typer.Option("--no-flex", help="without FlexAttention, which compiles for seconds in every row")
    ] = False,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="draw the speeds too: .png, .svg or .pdf")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="write a page with tables and plots, of --variants too"),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print a section for BENCHMARKS.md")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures one of them, or with --html any of them; medians."""
    command = shlex.join(["fagen", *sys.argv[1:]])
    asked = {
        "compile": compile_times,
        "forward": forward,
        "backward": backward,
        "decode": decode,
        "variants": variants,
    }
    measures = [name for name, wanted in asked.items() if wanted]
    options = {"arch": arch, "rows": rows, "repeats": repeats, "against": against, "no-flex": no_flex, "grid": grid}
    given = [*measures, *(name for name, value in options.items() if value not in (None, False))]
    if saved and given:
        raise SpecError(f"--from shows what was measured before: leave out --{given[0]}")
    if not saved:
        _check_measures(measures, given, html, plot_file)
    if markdown and as_json:
        raise SpecError("--markdown and --json exclude each other")
    if html is not None:
        page.check(html)
    if plot_file is not None:
        plot.check(plot_file)
    if saved:
        runs = [run for path in saved for run in documents.read(path)]
        if plot_file is not None and sum(isinstance(run.report, SpeedReport) for run in runs) != 1:
            raise SpecError("--plot draws one measurement of --forward or --backward")
    else:
        names = None if against is None else [name.strip() for name in against.split(",")]
        chosen = _Options(None if arch is None else resolve(arch).name, rows, repeats, names, not no_flex, grid)
        # What cannot be is refused before anything is measured.
        prepared = [_prepare(name, chosen) for name in measures]
        # With a page they come unasked, unless --rows has a name that only rows of the others have.
        if html is not None and not variants and _chosen(variants_bench.rows(), rows, may_be_none=True):
            prepared.append(_variants(chosen))
        today = date.today().isoformat()
        runs = [Run(measure(), today, command) for measure in prepared]
    if as_json:
        found = [documents.of(run) for run in runs]
        output.emit(found[0] if len(found) == 1 else {"documents": found})
    elif markdown:
        print("\n\n".join(_markdown(run) for run in runs))
    else:
        for index, run in enumerate(runs):
            if index:
                print()
            _print(run.report)
    for run in runs:
        if plot_file is not None and isinstance(run.report, SpeedReport):
            plot.save(run.report, plot_file, date=run.date)
            output.note(f"drawn: {output.short(plot_file)}")
    if html is not None:
        page.save(runs, html)
        output.note(f"written: {output.short(html)}")
    _finish([run.report for run in runs])


def _check_measures(measures: Sequence[str], given: Sequence[str], html: Path | None, plot_file: Path | None) -> None:
    """Raises SpecError where it is not said what to measure, and for options of what is not measured."""
    if not measures or (len(measures) > 1 and html is None):
        raise SpecError(
            "say what to measure: --compile, --forward, --backward, --decode or --variants; several with --html"
        )
    speeds = [name for name in measures if name in ("forward", "backward")]
    if ("no-flex" in given or plot_file is not None) and not speeds:
        raise SpecError("--no-flex and --plot belong to --forward and --backward")
    if plot_file is not None and len(speeds) > 1:
        raise SpecError("--plot draws one of --forward and --backward")
    if "against" in given and not speeds and "decode" not in measures:
        raise SpecError("--against belongs to --forward, --backward and --decode")
    if "grid" in given and "decode" not in measures:
        raise SpecError("--grid belongs to --decode")
    if "repeats" in given and list(measures) == ["variants"]:
        raise SpecError("--repeats belongs to what is timed, which --variants is not")


def _prepare(measure: str, options: _Options) -> Callable[[], _AnyReport]:
    """What measures. Raises SpecError for rows and contestants that there are not."""
    if measure == "compile":
        return _compile(options)
    if measure == "decode":
        return _decode(options)
    return _variants(options) if measure == "variants" else _speed(measure == "backward", options)


def _compile(options: _Options) -> Callable[[], CompileReport]:
    chosen = _chosen(compile_bench.jobs(options.arch or "sm80"), options.rows)
    repeats = options.repeats or 5

    def measure() -> CompileReport:
        with output.progress("measuring", (repeats + 1) * (len(chosen) + 1)) as step:
            return compile_bench.run(chosen, repeats=repeats, on_done=step)

    return measure


def _speed(backward: bool, options: _Options) -> Callable[[], SpeedReport]:
    chosen = _chosen(speed_bench.backward_rows() if backward else speed_bench.rows(), options.rows)
    return _beside(speed_bench.run, chosen, contestants.choose(options.against, flex=options.flex), options)


def _decode(options: _Options) -> Callable[[], DecodeReport]:
    chosen = _chosen(decode_bench.grid() if options.grid else decode_bench.rows(), options.rows)
    others = contestants.choose(options.against, among=contestants.decoders())
    return _beside(decode_bench.run, chosen, others, options)


def _beside(
    run: Callable[..., AnyRates], rows: Sequence[Any], others: Sequence[contestants.Contestant], options: _Options
) -> Callable[[], AnyRates]:
    """What times fagen beside others."""

    def measure() -> AnyRates:
        with output.progress("measuring", len(rows)) as step:
            samples = options.repeats or 30
            return run(rows, against=others, arch=options.arch, samples=samples, on_done=lambda row: step(row.name))

    return measure


def _variants(options: _Options) -> Callable[[], VariantsReport]:
    chosen = _chosen(variants_bench.rows(), options.rows)

    def measure() -> VariantsReport:
        arch = resolve_archs(options.arch)[0].name
        with output.progress("checking", len(chosen)) as step:
            return variants_bench.run(chosen, arch=arch, on_done=lambda row: step(row.name))

    return measure


def _markdown(run: Run) -> str:
    report = run.report
    if isinstance(report, CompileReport):
        return compile_bench.markdown(report, date=run.date, command=run.command)
    if isinstance(report, SpeedReport):
        return speed_bench.markdown(report, date=run.date, command=run.command)
    if isinstance(report, DecodeReport):
        return decode_bench.markdown(report, date=run.date, command=run.command)
    return variants_bench.markdown(report, date=run.date, command=run.command)


def _print(report: _AnyReport) -> None:
    if isinstance(report, CompileReport):
        _print_compile(report)
    elif isinstance(report, SpeedReport):
        legend = [*speed_bench.legend(report), *speed_bench.host_line(report)]
        _print_tables(speed_bench.tables(report), _where(report), legend)
    elif isinstance(report, DecodeReport):
        _print_tables(decode_bench.tables(report), _where(report), decode_bench.legend(report))
    else:
        where = f"{report.device}, {report.arch}"
        _print_tables(variants_bench.tables(report), where, variants_bench.legend(report))


def _where(report: Report) -> str:
    return f"{report.machine.card}, {report.machine.arch}"


def _print_compile(report: CompileReport) -> None:
    table = output.table(
        "", output.right("median s"), output.right("least"), output.right("x empty file"), output.right("goal")
    )
    table.add_row(report.empty_name, f"{report.empty_median:.3f}", f"{min(report.empty):.3f}", "1.0", "")
    for timing in report.timings:
        style = "green" if timing.reached else "bold red"
        table.add_row(
            timing.job.name,
            f"[{style}]{timing.median:.3f}[/]",
            f"{min(timing.seconds):.3f}",
            f"{timing.ratio:.1f}",
            compile_bench.goal(timing.job),
        )
    output.console().print(table)
    output.note(f"{report.compiler}, {report.cores} cores, {len(report.empty)} timings a row in turns")


def _print_tables(tables: Sequence[Table], where: str, legend: Sequence[str]) -> None:
    for index, table in enumerate(tables):
        title, *names = (name.removeprefix(f"{OURS} ") for name in table.header)
        filled = output.table(title, *(output.right(name) for name in names))
        for row in table.rows:
            filled.add_row(*row)
        if index:
            print()
        output.console().print(filled)
    output.note(where)
    for line in legend:
        output.note(line)


def _finish(reports: Sequence[_AnyReport]) -> None:
    """Says what failed; exit code 1 where fagen's own kernel did, or is wrong."""
    failed = False
    for report in reports:
        if isinstance(report, CompileReport):
            continue
        for line in report.failures:
            output.note(line)
        if isinstance(report, VariantsReport):
            failed |= not all(one.passed for one in report.variants)
        else:
            failed |= any(OURS in result.failures for result in report.results)
    if failed:
        raise typer.Exit(1)


def _chosen(rows: Sequence[Row], text: str | None, *, may_be_none: bool = False) -> list[Row]:
    chosen = [row for row in rows if text is None or text in row.name]
    if not chosen and not may_be_none:
        raise SpecError(f"--rows {text!r} matches none of: {'; '.join(row.name for row in rows)}")
    return chosen
