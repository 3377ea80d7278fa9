"""`fagen show`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fagen import origin
from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import plans
from fagen.errors import SpecError
from fagen.render import Target, render
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.syntax import Syntax

    from fagen.plan import KernelPlan


@takes_specs
def show(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="KIND", help="only this kernel of each spec, such as bwd")
    ] = None,
    annotate: Annotated[
        bool, typer.Option("--annotate", help="beside each line the template, and the line there, that it comes from")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Prints the generated source of every kernel that the flags name, one after the other."""
    target: Target = "emulate" if emulate else "cuda"
    chosen = plans(specs, arch, emulate=emulate)
    if kernel is not None:
        kinds = dict.fromkeys(plan.kind for plan in chosen)
        chosen = [plan for plan in chosen if plan.kind == kernel]
        if not chosen:
            raise SpecError(f"no kernel of kind {kernel!r}; the flags name: {', '.join(kinds)}")
    if as_json:
        output.emit({"kernels": [_describe(plan, target, annotate) for plan in chosen]})
        return
    for plan in chosen:
        if annotate:
            _print_annotated(origin.lines(plan, target))
        elif not sys.stdout.isatty():
            sys.stdout.write(render(plan, target))
        else:
            output.console().print(_coloured(render(plan, target), target))


def _describe(plan: KernelPlan, target: Target, annotate: bool) -> dict[str, Any]:
    """One kernel for `--json`; `origins` has the template and the line there of each line, null where it is of none."""
    document: dict[str, Any] = {"slug": plan.slug, "target": target, "source": render(plan, target)}
    if annotate:
        lines = origin.lines(plan, target)
        document["origins"] = [[line.template, line.number] if line.template else None for line in lines]
    return document


def _print_annotated(lines: Sequence[origin.Line]) -> None:
    """Each line behind its origin: the template where another one begins, and the number in it."""
    width = max(len(line.template) for line in lines)
    before = ""
    for line in lines:
        name = line.template if line.template != before else ""
        before = line.template or before
        number = str(line.number) if line.number else ""
        print(f"{name:{width}} {number:>4} | {line.text}".rstrip())


def _coloured(text: str, target: Target) -> Syntax:
    from rich.syntax import Syntax

    lexer = "cpp" if target == "emulate" else "cuda"
    return Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True)
