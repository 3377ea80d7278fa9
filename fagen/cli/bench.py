"""`fagen bench`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import date
from typing import Annotated, Any, TypeVar

import typer

from fagen.arch import resolve
from fagen.bench import compile as compile_bench
from fagen.bench import speed as speed_bench
from fagen.cli import output
from fagen.cli.options import JsonOption
from fagen.errors import SpecError

Row = TypeVar("Row", compile_bench.Job, speed_bench.Row)


def bench(
    compile_times: Annotated[bool, typer.Option("--compile", help="time builds, cold and warm")] = False,
    forward: Annotated[bool, typer.Option("--forward", help="time forward kernels on a GPU, beside PyTorch's")] = False,
    backward: Annotated[bool, typer.Option("--backward", help="time gradients on a GPU, beside PyTorch's")] = False,
    arch: Annotated[
        str | None, typer.Option("--arch", metavar="ARCH", help="target; default: sm80, on a GPU the GPU's")
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", metavar="TEXT", help="only rows whose name contains this, such as d128")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, metavar="N", help="timings a row; default: 5, on a GPU 30")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print a section for BENCHMARKS.md")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures one of them; medians."""
    if compile_times + forward + backward != 1:
        raise SpecError("say what to measure: --compile, --forward or --backward")
    if markdown and as_json:
        raise SpecError("--markdown and --json exclude each other")
    command = shlex.join(["fagen", *sys.argv[1:]])
    if compile_times:
        _compile(arch or "sm80", rows, repeats or 5, markdown, as_json, command)
    else:
        chosen = _chosen(speed_bench.rows() if forward else speed_bench.backward_rows(), rows)
        _speed(chosen, arch, repeats or 30, markdown, as_json, command)


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
    chosen: list[speed_bench.Row], arch: str | None, samples: int, markdown: bool, as_json: bool, command: str
) -> None:
    arch = None if arch is None else _one_arch(arch)
    with output.progress("measuring", len(chosen)) as step:
        report = speed_bench.run(chosen, arch=arch, samples=samples, on_done=lambda row: step(row.name))
    today = date.today().isoformat()
    if as_json:
        rows = [
            {
                "name": result.row.name,
                "spec": result.row.spec.model_dump(mode="json"),
                "batch": result.row.batch,
                "heads": result.row.heads,
                "seqlen": result.row.seqlen,
                "flop": result.row.flop,
                "tflops": result.tflops,
                "difference": result.difference,
            }
            for result in report.results
        ]
        output.emit(
            {
                "command": command,
                "date": today,
                "card": report.card,
                "arch": report.arch,
                "torch": report.torch,
                "driver": report.driver,
                "rows": rows,
                "host_us": report.host_us,
            }
        )
        return
    if markdown:
        print(speed_bench.markdown(report, date=today, command=command))
        return
    columns = (speed_bench.OURS, speed_bench.FA2, speed_bench.CUDNN, speed_bench.PLAIN)
    table = output.table(
        "TFLOP/s",
        *(output.right(name) for name in columns),
        *(output.right(f"/ {name}") for name in columns[1:]),
        output.right("difference"),
    )
    for result in report.results:
        table.add_row(
            result.row.name,
            *(speed_bench.number(result.tflops.get(name)) for name in columns),
            *(speed_bench.number(result.ratio(name), 2) for name in columns[1:]),
            "-" if result.difference is None else f"{result.difference:.1e}",
        )
    output.console().print(table)
    host = ", ".join(f"{name} {us:.1f} us" for name, us in report.host_us.items())
    output.note(f"{report.card}, {report.arch}; host time of one call, B=1, S=128: {host}")


def _chosen(rows: Sequence[Row], text: str | None) -> list[Row]:
    chosen = [row for row in rows if text is None or text in row.name]
    if not chosen:
        raise SpecError(f"--rows {text!r} matches none of: {'; '.join(row.name for row in rows)}")
    return chosen


def _one_arch(text: str) -> str:
    return resolve(text).name
