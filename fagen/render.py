"""From a kernel plan to the text of its one self-contained file."""

from __future__ import annotations

import hashlib
import shlex
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.bccache import Bucket

from fagen import cache as artifacts
from fagen import registry
from fagen.errors import BuildError, FagenError
from fagen.files import replacing
from fagen.plan import KernelPlan
from fagen.stages import TracedPlan

Target = Literal["cuda", "emulate"]


def template_dir() -> Path:
    """Where the templates are: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "templates", package.parent / "templates"):
        if candidate.is_dir():
            return candidate
    raise FagenError(f"no templates beside {package}: the installation is incomplete, install fagen again")


class _Loader(jinja2.FileSystemLoader):
    """Takes a template for changed where its text is: what a file's time says depends on clocks and tools. Fragments of
    score modifications from outside are where the registry says."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        outside = registry.fragment_path(template)
        if outside is None:
            source, filename, _ = super().get_source(environment, template)
        else:
            source, filename = outside.read_text(encoding="utf-8"), str(outside)
        path, content = Path(filename), Path(filename).read_bytes()

        def same() -> bool:
            try:
                return registry.fragment_path(template) == outside and path.read_bytes() == content
            except OSError:
                return False

        return source, filename, same


class _Compiled(jinja2.BytecodeCache):
    """Templates as Python code, beside the kernels: to compile those of a kernel takes ten times as long as to render
    it.

    Jinja knows the code again by the template's text. Here it is bound to what else decides it, which is in this module
    and in Jinja, and checked before it is read.
    """

    def __init__(self) -> None:
        self._key = jinja2.__version__.encode() + Path(__file__).read_bytes()

    def _sum(self, code: bytes) -> bytes:
        return hashlib.sha256(self._key + code).digest()

    def load_bytecode(self, bucket: Bucket) -> None:
        path = artifacts.templates_file(bucket.key)
        if path is None:
            return
        with suppress(OSError):
            content = path.read_bytes()
            checksum, code = content[:32], content[32:]
            if checksum == self._sum(code):
                bucket.bytecode_from_string(code)

    def dump_bytecode(self, bucket: Bucket) -> None:
        path = artifacts.templates_file(bucket.key)
        if path is None:
            return
        code = bucket.bytecode_to_string()
        with suppress(OSError):  # a cache that this user may only read, a full disk: it is only slower
            path.parent.mkdir(mode=0o755, exist_ok=True)
            with replacing(path, sync=False) as file:
                file.write(self._sum(code) + code)


@cache
def environment() -> jinja2.Environment:
    """The Jinja environment of `template_dir()`: an undefined name is an error, and blocks leave no blank lines."""
    return _environment(template_dir())


@cache
def _environment(folder: Path) -> jinja2.Environment:
    loader = _Loader(folder)
    result = jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=True,
        bytecode_cache=_Compiled(),
    )
    result.filters["inset"] = _inset
    result.filters["deeper"] = _deeper
    # Plain headers go in as they are: the operands of inline PTX, {%0, %1}, would read as Jinja.
    result.globals["plain"] = lambda path: loader.get_source(result, path)[0]
    # Those that name shapes of the kernel are templates.
    result.globals["rendered"] = lambda path: (folder / f"{path}.j2").is_file()
    return result


def _inset(text: str, width: int) -> str:
    """Code of a macro, moved right by `width` columns but for the first line; `#pragma` lines stay at the margin."""
    first, *rest = text.strip().split("\n")
    return "\n".join([first, *_deeper("\n".join(rest), width).split("\n")]) if rest else first


def _deeper(text: str, width: int) -> str:
    """Code moved right by `width` columns; `#pragma` lines stay at the margin."""
    return "\n".join(line if not line or line.startswith("#") else " " * width + line for line in text.split("\n"))


def render(kernel: KernelPlan, target: Target = "cuda", templates: Path | None = None) -> str:
    """The text of `kernel`, for nvcc or NVRTC ("cuda") or for a host C++ compiler ("emulate"), from the folder
    `templates` in place of `template_dir()`.

    The same plan gives the same bytes, on any machine: no path, time or environment enters.

    Raises BuildError for a template that is missing, malformed or uses an undefined name.
    """
    try:
        chosen = environment() if templates is None else _environment(templates)
        return chosen.get_template("kernel.j2").render(**context(kernel), target=target)
    except jinja2.TemplateError as error:
        raise BuildError(f"{kernel.slug}: {explain(error, templates)}") from error


def explain(error: Exception, templates: Path | None = None) -> str:
    """What is wrong, with the template and the line where it is."""
    if isinstance(error, jinja2.TemplateNotFound):
        return f"there is no template {error.name}"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.name}, line {error.lineno}: {error.message}"
    folder = templates or template_dir()
    outside = {str(one.fragment) for one in registry.outside().values()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if frame.filename in outside or folder in path.parents:
            place = path.relative_to(folder) if folder in path.parents else path
            return f"{place}, line {frame.lineno}: {error}"
    return str(error)


def context(kernel: KernelPlan) -> dict[str, Any]:
    folder = ["--mods", "DIR"] if kernel.spec.custom else []
    command = ["fagen", "show", *folder, *kernel.spec.cli_flags(), "--arch", kernel.arch.name]
    if kernel.spec.backward or kernel.spec.split_kv:  # then there are several kernels
        command += ["--kernel", kernel.kind]
    traced = isinstance(kernel, TracedPlan)
    if traced:
        command[1] = "trace"
    return {
        "kernel": kernel,
        "traced": traced,
        "spec": kernel.spec,
        "tile": kernel.tile,
        "arch": kernel.arch,
        "command": shlex.join(command),
        "spec_json": kernel.spec.model_dump_json(exclude_defaults=True),
    }
