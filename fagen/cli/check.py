"""`fagen check`."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import build as builder
from fagen.cli import output
from fagen.cli.options import (
    CALL_PANEL,
    ArchOption,
    BatchOption,
    EmulateOption,
    HeadsKOption,
    HeadsOption,
    JsonOption,
    KeysOption,
    QueriesOption,
    SeedOption,
)
from fagen.cli.specs import takes_specs
from fagen.cli.targets import planner, resolve_archs
from fagen.errors import LaunchError
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fagen.check import Case, CheckResult, Comparison
    from fagen.check_decode import DecodeCall, DecodeCheckResult
    from fagen.plan import KernelPlan


@takes_specs
def check(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    batch: BatchOption = None,
    heads: HeadsOption = None,
    heads_k: HeadsKOption = None,
    seqlen_q: QueriesOption = None,
    seqlen_k: KeysOption = None,
    seed: SeedOption = 0,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="with --split-kv: few queries, a grid of batches, heads, keys and splits; a size given fixes its axis",
            rich_help_panel=CALL_PANEL,
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Builds and runs every kernel that the flags name, on the GPU if there is one, else emulated.

    Exit code 1 where one is past its budget or stops with a fault.
    """
    archs = resolve_archs(arch)
    import torch  # not before the flags are known to be right

    from fagen import check as checker
    from fagen import check_decode as decode_checker

    emulated = emulate or not torch.cuda.is_available()
    plan_of = planner(emulated)
    # Kernels that several specs share are built once.
    plans = [plan_of(spec, target) for spec, target in itertools.product(specs, archs)]
    kernels = list(dict.fromkeys(itertools.chain.from_iterable(plans)))
    sizes = {"batch": batch, "heads": heads, "heads_k": heads_k, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    # Refuses what cannot be before anything is built.
    grids = {spec: decode_checker.problems(spec, emulated, seed=seed, **sizes) for spec in specs} if decode else {}
    with output.progress("compiling", len(kernels)) as step:
        builder.build(kernels, emulate=emulated, on_done=lambda artifact: step(artifact.slug))
    documents, passed = [], 0
    for kernel in (checker.main_kernel(kernels_of_spec) for kernels_of_spec in plans):
        result: CheckResult | DecodeCheckResult
        try:
            if decode:
                result = _check_grid(grids[kernel.spec], kernel.arch.name, emulated)
            else:
                result = checker.check(kernel.spec, arch=kernel.arch.name, emulate=emulated, seed=seed, **sizes)
        except LaunchError as error:
            documents.append({"slug": kernel.slug, "passed": False, "fault": str(error)})
            if not as_json:
                _print_fault(kernel, str(error))
            continue
        passed += result.passed
        documents.append(result.to_json())
        if not as_json:
            _print_grid(result) if isinstance(result, decode_checker.DecodeCheckResult) else _print(result)
    if as_json:
        output.emit({"passed": passed == len(plans), "checks": documents})
    elif len(plans) > 1:
        output.note(f"{passed} of {len(plans)} kernels are right")
    if passed < len(plans):
        raise typer.Exit(1)


def _check_grid(cases: Sequence[Case], arch: str, emulate: bool) -> DecodeCheckResult:
    from fagen.check_decode import check_decode

    with output.progress("checking", len(cases)) as step:
        return check_decode(cases, arch=arch, emulate=emulate, on_done=lambda case: step(case.id))


def _print(result: CheckResult) -> None:
    shape = result.shape
    rows = _facts(result.slug, result.device)
    rows.add_row(
        "call",
        f"batch {shape['batch']}, {shape['heads']} heads over {shape['heads_k']}, "
        f"{shape['seqlen_q']} queries, {shape['seqlen_k']} keys, seed {result.seed}",
    )
    rows.add_row("first of o", "reference  " + "  ".join(f"{value:+.5f}" for value in result.first_reference))
    rows.add_row("", "kernel     " + "  ".join(f"{value:+.5f}" for value in result.first_values))
    _add(rows, "o", result.o)
    if result.flash_error is not None:
        _add_flash(rows, result.flash_error)
    _add(rows, "lse", result.lse)
    for name, comparison in result.gradients.items():
        _add(rows, name, comparison)
        if name in result.flash_gradient_errors:
            _add_flash(rows, result.flash_gradient_errors[name])
    time = output.duration(result.seconds)
    if result.backward_seconds is not None:
        time += f", its gradients {output.duration(result.backward_seconds)}"
    rows.add_row("time", time)
    rows.add_row("shared", f"{output.size(result.smem_bytes)} a block")
    rows.add_row("result", _result(result.passed))
    console = output.console()
    console.print(rows)
    console.print()


def _print_grid(result: DecodeCheckResult) -> None:
    """A row a call, and the whole of the worst one."""
    facts = _facts(result.slug, result.device)
    sizes = ", ".join(f"{kind} {output.size(count)}" for kind, count in result.smem_bytes.items() if count)
    facts.add_row("shared", f"{sizes} a block")
    names = ("batch", "heads", "queries", "keys", "splits", "error of o", "error of lse")
    timed = ("time", "TB/s") if not result.emulated else ()
    table = output.table(*(output.right(name) for name in (*names, *timed)), "")
    for call in result.calls:
        table.add_row(*_cells(call), "[green]right[/]" if call.passed else "[bold red]too much[/]")
    worst = _cells(result.worst)
    rows = _grid()
    rows.add_row("worst call", ", ".join(f"{name} {cell}" for name, cell in zip(names[:5], worst, strict=False)))
    _add(rows, "o", result.worst.o)
    _add(rows, "lse", result.worst.lse)
    rows.add_row("result", _result(result.passed))
    console = output.console()
    for part in (facts, "", table, "", rows, ""):
        console.print(part)


def _cells(call: DecodeCall) -> list[str]:
    """A call as a row of the table, but for its verdict."""
    case, used = call.case, call.case.used
    ragged = f"{used[0]} of {case.seqlen_k}" if case.batch == 1 else f"{min(used)} to {max(used)}"
    cells = [
        str(case.batch),
        f"{case.heads}/{case.heads_k}",
        str(case.seqlen_q),
        ragged if case.ragged else str(case.seqlen_k),
        "chosen" if case.num_splits is None else str(case.num_splits),
        f"{call.o.error:.2e}",
        f"{call.lse.error:.2e}",
    ]
    if call.seconds is not None:
        cells += [output.duration(call.seconds), f"{call.tbps:.2f}"]
    return cells


def _add(rows: Any, name: str, comparison: Comparison) -> None:
    kind = "largest, absolute" if name == "lse" else "relative, of the whole"
    rows.add_row(
        f"error of {name}", f"{comparison.error:.2e} of {comparison.budget:.2e} ({kind}){_verdict(comparison.passed)}"
    )
    worst = comparison.worst
    if worst is not None:
        from fagen.check import place

        rows.add_row("  worst", place(name, worst))
        rows.add_row("", f"{comparison.elementwise:.2f} of what one element may be off by")


def _add_flash(rows: Any, error: float) -> None:
    rows.add_row("", f"PyTorch's flash kernel: {error:.2e}")


def _print_fault(kernel: KernelPlan, message: str) -> None:
    rows = _facts(kernel.slug, "")
    from rich.text import Text

    rows.add_row("fault", Text(message))
    rows.add_row("result", "[bold red]stopped[/]")
    console = output.console()
    console.print(rows)
    console.print()


def _facts(slug: str, device: str) -> Any:
    rows = _grid()
    rows.add_row("kernel", f"[bold]{slug}[/]")
    if device:
        rows.add_row("device", device)
    return rows


def _grid() -> Any:
    """Names on the left, facts on the right."""
    from rich.table import Table

    return Table.grid("", "", padding=(0, 2))


def _result(passed: bool) -> str:
    return "[green]right[/]" if passed else "[bold red]past the budget[/]"


def _verdict(passed: bool) -> str:
    return "" if passed else "  [bold red]too much[/]"
