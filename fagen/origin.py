"""Where each line of a generated file comes from: the template, and the line in it.

A second environment renders the same templates with an invisible mark behind the first character of every line of
template text. What has lost its marks must be the file itself, or no origin is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.lexer import Token, TokenStream

from fagen import render as renderer
from fagen.errors import FagenError
from fagen.plan import KernelPlan

# Of the private use area of Unicode: no template has them, and no filter of the templates takes them for white space.
_OPEN, _BETWEEN, _CLOSE = "\ue000", "\ue001", "\ue002"
_MARK = re.compile(f"{_OPEN}([^{_BETWEEN}]*){_BETWEEN}(\\d+){_CLOSE}")

# kernel.cu(12) of NVRTC and nvcc, kernel.cpp:12:5 of host compilers, "line 12" of the emulator.
_NAMED_LINE = re.compile(
    r"\b(?P<file>kernel\.(?:cu|cpp))(?:\((?P<call>\d+)\)|:(?P<colon>\d+)(?::\d+)?)|\bline (?P<word>\d+)\b"
)


@dataclass(frozen=True)
class Line:
    """One line of a generated file, and where its first text stands: `template` is relative to `templates/`, `number`
    counts from 1. Empty and 0 for a blank line, and for one that is nothing but values."""

    text: str
    template: str = ""
    number: int = 0


def lines(kernel: KernelPlan, target: renderer.Target = "cuda") -> list[Line]:
    """`render.render(kernel, target)` line by line. Raises BuildError as it does."""
    source = renderer.render(kernel, target)
    template = _environment(renderer.environment()).get_template("kernel.j2")
    marked = template.render(**renderer.context(kernel), target=target)
    if _MARK.sub("", marked) != source:
        raise FagenError(f"{kernel.slug}: its templates look at their own text, which has no origin then")
    return [_line(text) for text in marked.removesuffix("\n").split("\n")]


def _line(text: str) -> Line:
    mark = _MARK.search(text)
    plain = _MARK.sub("", text)
    return Line(plain) if mark is None else Line(plain, mark[1], int(mark[2]))


def locate(text: str, lines: Sequence[Line]) -> str:
    """`text`, which a compiler or the emulator said of a generated file with these `lines`, with the template and the
    line there beside each line that it names."""

    def place(match: re.Match[str]) -> str:
        number = int(match["call"] or match["colon"] or match["word"])
        line = lines[number - 1] if 0 < number <= len(lines) else Line("")
        if not line.template:
            return match[0]
        there = f"{line.template}:{line.number}"
        return f"{match[0]} ({there})" if match["word"] else f"{there} ({match['file']}:{number})"

    return _NAMED_LINE.sub(place, text)


class _Marks(Extension):
    """Marks the text of templates, after the lexer has taken away what blocks leave."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        for token in stream:
            value = token.value
            if token.type == "data":
                value = _marked(value, stream.name or "", token.lineno)
            yield Token(token.lineno, token.type, value)


def _marked(text: str, template: str, first: int) -> str:
    """`text`, which begins in line `first`, with a mark behind the first character of each line that has any."""
    marked = []
    for number, line in enumerate(text.split("\n"), first):
        indent = len(line) - len(line.lstrip())
        mark = f"{_OPEN}{template}{_BETWEEN}{number}{_CLOSE}" if line[indent:] else ""
        marked.append(line[: indent + 1] + mark + line[indent + 1 :])
    return "\n".join(marked)


@cache
def _environment(plain: jinja2.Environment) -> jinja2.Environment:
    result = plain.overlay(extensions=[_Marks], bytecode_cache=None)  # its code is of other text, of the same name
    whole: Any = plain.globals["plain"]
    result.globals = {**plain.globals, "plain": lambda path: _marked(whole(path), path, 1)}
    return result
