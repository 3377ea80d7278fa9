"""`fagen show`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import plans
from fagen.errors import SpecError
from fagen.render import Target, render
from fagen.spec import AttentionSpec


@takes_specs
def show(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    kernel: Annotated[
        str | None, typer.Option("--kernel", metavar="KIND", help="only this kernel of each spec, such as bwd")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Prints the generated source of every kernel that the flags name, one after the other."""
    target: Target = "emulate" if emulate else "cuda"
    chosen = plans(specs, arch)
    if kernel is not None:
        kinds = dict.fromkeys(plan.kind for plan in chosen)
        chosen = [plan for plan in chosen if plan.kind == kernel]
        if not chosen:
            raise SpecError(f"no kernel of kind {kernel!r}; the flags name: {', '.join(kinds)}")
    rendered = [(plan, render(plan, target)) for plan in chosen]
    if as_json:
        output.emit({"kernels": [{"slug": plan.slug, "target": target, "source": text} for plan, text in rendered]})
        return
    for _, text in rendered:
        if not sys.stdout.isatty():
            sys.stdout.write(text)
            continue
        from rich.syntax import Syntax

        lexer = "cpp" if emulate else "cuda"
        output.console().print(Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True))
