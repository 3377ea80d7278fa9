"""`fagen bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fagen.arch import resolve
from fagen.bench import compile as compile_bench
from fagen.bench import contestants, plot
from fagen.bench import decode as decode_bench
from fagen.bench import speed as speed_bench
from fagen.bench.results import OURS, Rates, Report, Table
from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.errors import SpecError

Row = TypeVar("Row", compile_bench.Job, speed_bench.Row, decode_bench.Row)


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
    markdown: Annotated[bool, typer.Option("--markdown", help="print a section for BENCHMARKS.md")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures one of them; medians."""
    if compile_times + forward + backward + decode != 1:
        raise SpecError("say what to measure: --compile, --forward, --backward or --decode")
    if markdown and as_json:
        raise SpecError("--markdown and --json exclude each other")
    if compile_times and against:
        raise SpecError("--against belongs to --forward, --backward and --decode")
    if (compile_times or decode) and (no_flex or plot_file):
        raise SpecError("--no-flex and --plot belong to --forward and --backward")
    if grid and not decode:
        raise SpecError("--grid belongs to --decode")
    command = shlex.join(["fagen", *sys.argv[1:]])
    if compile_times:
        _compile(arch or "sm80", rows, repeats or 5, markdown, as_json, command)
        return
    target = None if arch is None else _one_arch(arch)
    names = None if against is None else [name.strip() for name in against.split(",")]
    samples = repeats or 30
    if decode:
        _decode(grid, rows, names, target, samples, markdown, as_json, command)
        return
    chosen = _chosen(speed_bench.rows() if forward else speed_bench.backward_rows(), rows)
    others = contestants.choose(names, flex=not no_flex)
    if plot_file is not None:
        plot.check(plot_file)
    with output.progress("measuring", len(chosen)) as step:
        report = speed_bench.run(
            chosen, against=others, arch=target, samples=samples, on_done=lambda row: step(row.name)
        )
    _speed(report, markdown, as_json, command, plot_file)


def _compile(arch: str, text: str | None, repeats: int, markdown: bool, as_json: bool, command: str) -> None:
    chosen = _chosen(compile_bench.jobs(_one_arch(arch)), text)
    with output.progress("measuring", (repeats + 1) * (len(chosen) + 1)) as step:
        report = compile_bench.run(chosen, repeats=repeats, on_done=step)
    today = date.today().isoformat()
    if as_json:
        rows = [_timing(timing) for timing in report.timings]
        empty = {"name": report.empty_name, "seconds": report.empty_median, "all_seconds": report.empty}
        output.emit(
            {
                "command": command,
                "date": today,
                "cores": report.cores,
                "compiler": report.compiler,
                "host_compiler": report.host_compiler,
                "empty_file": empty,
                "rows": rows,
            }
        )
        return
    if markdown:
        print(compile_bench.markdown(report, date=today, command=command))
        return
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
    output.note(f"{report.compiler}, {report.cores} cores, {repeats} timings a row in turns")


def _timing(timing: compile_bench.Timing) -> dict[str, Any]:
    job = timing.job
    return {
        "name": job.name,
        "kind": job.kind,
        "spec": job.spec and job.spec.model_dump(mode="json"),
        "arch": job.arch,
        "emulated": job.emulate,
        "warm": job.warm,
        "seconds": timing.median,
        "all_seconds": timing.seconds,
        "ratio": timing.ratio,
        "goal_seconds": job.goal,
        "goal_ratio": job.goal_ratio,
        "reached": timing.reached,
    }


def _speed(
    report: speed_bench.SpeedReport, markdown: bool, as_json: bool, command: str, plot_file: Path | None
) -> None:
    today = date.today().isoformat()
    if as_json:
        document = _document(report, today, command)
        document |= {"matmul_tflops": report.matmul, "rows": [_result(result) for result in report.results]}
        output.emit(document | {"host_us": report.host_us})
    elif markdown:
        print(speed_bench.markdown(report, date=today, command=command))
    else:
        _print(report, speed_bench.tables(report), [*speed_bench.legend(report), *speed_bench.host_line(report)])
    if plot_file is not None:
        plot.save(report, plot_file, date=today)
        output.note(f"drawn: {output.short(plot_file)}")
    _finish(report)


def _decode(
    grid: bool,
    text: str | None,
    names: list[str] | None,
    arch: str | None,
    samples: int,
    markdown: bool,
    as_json: bool,
    command: str,
) -> None:
    chosen = _chosen(decode_bench.grid() if grid else decode_bench.rows(), text)
    others = contestants.choose(names, among=contestants.decoders())
    with output.progress("measuring", len(chosen)) as step:
        report = decode_bench.run(
            chosen, against=others, arch=arch, samples=samples, on_done=lambda row: step(row.name)
        )
    today = date.today().isoformat()
    if as_json:
        rows = [_decode_result(result) for result in report.results]
        output.emit(_document(report, today, command) | {"rows": rows, "smem_bytes": report.smem_bytes})
    elif markdown:
        print(decode_bench.markdown(report, date=today, command=command))
    else:
        _print(report, decode_bench.tables(report), decode_bench.legend(report))
    _finish(report)


def _print(report: Report, tables: Sequence[Table], legend: Sequence[str]) -> None:
    for index, table in enumerate(tables):
        title, *names = (name.removeprefix(f"{OURS} ") for name in table.header)
        filled = output.table(title, *(output.right(name) for name in names))
        for row in table.rows:
            filled.add_row(*row)
        if index:
            print()
        output.console().print(filled)
    output.note(f"{report.machine.card}, {report.machine.arch}")
    for line in legend:
        output.note(line)


def _finish(report: Report) -> None:
    """Says what failed; exit code 1 where fagen's own kernel did."""
    for line in report.failures:
        output.note(line)
    if any(OURS in result.failures for result in report.results):
        raise typer.Exit(1)


def _document(report: Report, today: str, command: str) -> dict[str, Any]:
    """What every document on speeds begins with."""
    return {"command": command, "date": today, **asdict(report.machine)}


def _compared(result: Rates, unit: str) -> dict[str, Any]:
    """What a row of every document on speeds has."""
    reference = result.row.reference
    return {
        unit: result.rates,
        "to_cudnn": {name: result.to_cudnn(name) for name in result.rates},
        "failures": result.failures,
        "reference": reference and asdict(reference),
        f"fa3_scaled_{unit}": result.fa3_scaled,
        "fa3_scaled_ratio": result.fa3_scaled_ratio,
        f"goal_{unit}": result.goal,
        "goal_ratio": result.goal_ratio,
        "difference": result.difference,
        "compared_with": result.compared_with,
    }


def _result(result: speed_bench.Result) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name,
        "spec": row.spec.model_dump(mode="json"),
        "batch": row.batch,
        "heads": row.heads,
        "seqlen": row.seqlen,
        "flop": row.flop,
        **_compared(result, "tflops"),
        "matmul_tflops": result.matmul,
        "share_of_matmul": result.share_of_matmul,
    }


def _decode_result(result: decode_bench.Result) -> dict[str, Any]:
    row = result.row
    return {
        "name": row.name,
        "spec": row.spec.model_dump(mode="json"),
        "batch": row.batch,
        "heads": row.heads,
        "heads_k": row.heads_k,
        "keys": row.keys,
        "bytes": row.bytes,
        "us": {name: result.microseconds(name) for name in result.rates if name != decode_bench.COPY},
        **_compared(result, "tbps"),
        "share_of_copy": result.share_of_copy,
    }


def _chosen(rows: Sequence[Row], text: str | None) -> list[Row]:
    chosen = [row for row in rows if text is None or text in row.name]
    if not chosen:
        raise SpecError(f"--rows {text!r} matches none of: {'; '.join(row.name for row in rows)}")
    return chosen


def _one_arch(text: str) -> str:
    return resolve(text).name
