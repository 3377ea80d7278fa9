"""`fagen show`."""

from __future__ import annotations

import sys

from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import plans
from fagen.render import Target, render
from fagen.spec import AttentionSpec


@takes_specs
def show(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Prints the generated source of every kernel that the flags name, one after the other."""
    target: Target = "emulate" if emulate else "cuda"
    rendered = [(kernel, render(kernel, target)) for kernel in plans(specs, arch)]
    if as_json:
        output.emit({"kernels": [{"slug": kernel.slug, "target": target, "source": text} for kernel, text in rendered]})
        return
    for _, text in rendered:
        if not sys.stdout.isatty():
            sys.stdout.write(text)
            continue
        from rich.syntax import Syntax

        lexer = "cpp" if emulate else "cuda"
        output.console().print(Syntax(text, lexer, theme="ansi_dark", background_color="default", word_wrap=True))
