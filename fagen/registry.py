"""Score modifications from outside: of installed packages, and of folders that the user names.

A modification is one file `NAME.cuh.j2`: the fragment, as in `templates/mods/`, and in its head `declare`, the row that
`fagen.mods.MODS` has for those of fagen itself, with Python expressions in place of functions. So C++ stands where it
does elsewhere, in a template, and no second file is needed:

    {% set declare = {
        "argument": "reach",                              # keyword of the call; default the name of the file
        "description": "what --help says",
        "takes": "number",                                # or "tensor"
        "checks": [["value > 0", "must be positive"]],    # of the value; what the error says
        "fields": [["reach_log2", "float", "value * LOG2E", "a note"]],  # parameters of the kernel, and their values
        "eager": "scores - value * (row - col).abs()",    # the definition, in float64
        "example": "2.0",                                 # a value for checks
        "gradient": {"sum": "d_reach"},                   # of a tensor: see `Gradient`; `value_gradient` adds to it
    } %}

The expressions see `value`, `torch`, LOG2E, LN2 and what `CallContext` has; `eager` sees `scores` and what
`ScoreContext` has. What this cannot say, a Python file says that calls `register_mod`. Both are code of their author's,
and run: they are taken from where the user points alone, `--mods DIR`, FAGEN_MODS, or the entry points `fagen.mods` of
installed packages.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from fagen import env
from fagen.errors import FagenError, SpecError
from fagen.mods import LOG2E, MODS, CallContext, Gradient, Mod, ScoreContext
from fagen.params import Field

if TYPE_CHECKING:
    import torch

SUFFIX = ".cuh.j2"
ENTRY_POINTS = "fagen.mods"  # group of the entry points of packages: a module, or a function without arguments

# Of `Attention.__call__`, which modifications cannot take.
CALL_ARGUMENTS = (
    *("q", "k", "v", "softmax_scale", "window", "sink", "dropout_p", "seed", "return_lse", "num_splits", "block_table"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k", "leftpad_k", "cache_batch_idx"),
)

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_CTYPE = re.compile(r"i64|int|u32|float|(const )?(float|u16|u32|int|char|void|i64)\*")


@dataclass(frozen=True)
class Outside:
    """A modification that is not one of fagen's own, and where its fragment is."""

    mod: Mod
    fragment: Path


_registered: dict[str, Outside] = {}
_loaded: set[Path] = set()  # folders


def register_mod(mod: Mod, *, fragment: str | Path) -> None:
    """Adds a score modification: `AttentionSpec(..., NAME=True)` then builds it and `attn(..., ARGUMENT=value)` gives
    its value, NAME and ARGUMENT being those of `mod`. `fragment` is its template, as in `templates/mods/`. The same
    fragment may be registered again, as it is where its author works on it.

    Raises SpecError for a name, an argument or a parameter that is taken, and for a fragment that cannot be read, is
    malformed or lacks a macro.
    """
    from fagen.spec import AttentionSpec

    path = Path(fragment).absolute()
    taken = _registered.get(mod.name)
    if not _NAME.fullmatch(mod.name):
        raise SpecError(f"{path}: {mod.name!r} is no name of a modification: lower case, as in soft_sign")
    if mod.name in AttentionSpec.model_fields or hasattr(AttentionSpec, mod.name) or mod.name == "both":
        raise SpecError(f"{path}: fagen has a {mod.name!r} of its own: give the modification another name")
    if taken is not None and taken.fragment != path:
        raise SpecError(f"{path}: {taken.fragment} has the name {mod.name!r} already: rename one of them")
    others = [*MODS, *(outside.mod for name, outside in _registered.items() if name != mod.name)]
    arguments = {*CALL_ARGUMENTS, *(other.argument for other in others)}
    if not mod.argument.isidentifier() or mod.argument in arguments:
        raise SpecError(f"{path}: the argument {mod.argument!r} is taken, or no name: choose another for its value")
    fields = {field.name for other in others for field in other.all_fields}
    for field in mod.all_fields:
        if field.name in fields or not _CTYPE.fullmatch(field.ctype):
            raise SpecError(
                f"{path}: the parameter {field.ctype} {field.name} is another's, or of a type that no kernel takes: "
                "i64, int, u32, float or a pointer, named after the modification"
            )
    if mod.order < 0 or (mod.absorbs_scale and mod.order):
        raise SpecError(f"{path}: order must be at least 0, and 0 of one that absorbs the scale")
    _check_macros(mod, path, _module(path))
    _registered[mod.name] = Outside(mod, path)


def _check_macros(mod: Mod, path: Path, module: Any) -> None:
    wanted = {"setup": "what it declares once a block; may be empty", "output_scale": "none, or what a score lacks"}
    if not hasattr(module, "tile"):
        wanted["forward"] = "(score, scale), what changes a score"
    if mod.differentiable:
        wanted["backward"] = "(grad, output), what turns its gradient into that of the score; or differentiable=False"
    if mod.gradient is not None:
        wanted["value_gradient"] = "(grad), what adds to the sum of its gradient"
    missing = [f"{name} ({what})" for name, what in wanted.items() if not hasattr(module, name)]
    if missing:
        raise SpecError(f"{path}: the fragment lacks {'; '.join(missing)}")


def known() -> tuple[Mod, ...]:
    """All modifications, fagen's own and those from outside, in the order in which they apply."""
    return in_order([*MODS, *(outside.mod for outside in _registered.values())])


def in_order(mods: Iterable[Mod]) -> tuple[Mod, ...]:
    """By `Mod.order`, so that a cap comes before what is added; the one that absorbs the scale first, then by name."""
    return tuple(sorted(mods, key=lambda mod: (mod.order, not mod.absorbs_scale, mod.name)))


def outside() -> Mapping[str, Outside]:
    """The modifications from outside by name: of FAGEN_MODS and of packages too."""
    _discover()
    return dict(_registered)


def find(name: str) -> Mod | None:
    """The modification from outside of that name."""
    if name not in _registered:
        _discover()
    return _registered[name].mod if name in _registered else None


def named(name: str) -> Mod:
    """The same. SpecError that says what to do where there is none."""
    mod = find(name)
    if mod is None:
        there = ", ".join(_registered) or "none"
        raise SpecError(
            f"there is no score modification {name!r} here (from outside: {there}): name its folder with --mods DIR or "
            "FAGEN_MODS, or call fagen.register_mod before"
        )
    return mod


def fragment_path(template: str) -> Path | None:
    """The file of the template `mods/NAME.cuh.j2` of a modification from outside; None for any other template."""
    name = template.removeprefix("mods/").removesuffix(SUFFIX)
    found = _registered.get(name) if template == f"mods/{name}{SUFFIX}" else None
    return None if found is None else found.fragment


def load_mods(folder: str | Path, *, source: str = "folder") -> None:
    """Registers the score modifications in `folder`: runs its Python files, then takes every `NAME.cuh.j2` that
    declares itself. `source` is what named the folder, for errors.

    Raises SpecError for a folder that is none or has no modification,
    and for what is wrong with one, with its file and line.
    """
    folder = Path(folder).absolute()
    if folder in _loaded:
        return
    if not folder.is_dir():
        raise SpecError(f"{source} {folder}: there is no such folder")
    fragments = sorted(folder.glob(f"*{SUFFIX}"))
    if not fragments:
        raise SpecError(f"{source} {folder}: no modification in it; one is a file NAME{SUFFIX} (see examples/)")
    for script in sorted(folder.glob("*.py")):
        _run(script)
    for path in fragments:
        declared = getattr(_module(path), "declare", None)
        if declared is not None:
            register_mod(_declared(path, declared), fragment=path)
        elif path not in [outside.fragment for outside in _registered.values()]:
            raise SpecError(f"{path}: it has no `declare`, and no Python file beside it registers it")
    _loaded.add(folder)


def folders() -> tuple[Path, ...]:
    """The folders whose modifications are loaded."""
    return tuple(sorted(_loaded))


def _discover() -> None:
    """Loads the folders of FAGEN_MODS, and once what installed packages offer."""
    for folder in env.mods():
        load_mods(folder, source="FAGEN_MODS")
    _of_packages()


@cache
def _of_packages() -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        with _Placed(f"entry point {entry.name} = {entry.value}"):
            loaded = entry.load()
            if callable(loaded):
                loaded()


def _run(script: Path) -> None:
    spec = importlib.util.spec_from_file_location(f"fagen_mods_{script.stem}_{abs(hash(script))}", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look there
    with _Placed(str(script)):
        spec.loader.exec_module(module)


class _Placed:
    """Turns whatever an author's code raises into one line with its file and line number."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, SyntaxError) and error.filename:
            raise SpecError(f"{error.filename}, line {error.lineno}: {error.msg}") from error
        frames = [frame for frame in traceback.extract_tb(trace) if frame.filename != __file__]
        lines = [frame.lineno for frame in frames if frame.filename == self._place]
        at = f"{self._place}, line {lines[-1]}" if lines else self._place
        if isinstance(error, FagenError):
            raise error
        raise SpecError(f"{at}: {type(error).__name__}: {error}") from error


# ---------------------------------------------------------------- fragments that declare themselves


def _module(path: Path) -> Any:
    """What the template at `path` defines."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not text: {error}") from error
    try:
        template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"{path}, line {error.lineno}: {error.message}") from error
    try:
        return template.module
    except Exception as error:
        lines = [f.lineno or 1 for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
        raise SpecError(f"{path}, line {template.get_corresponding_lineno(lines[-1])}: {error}") from error


_KEYS = {
    *("argument", "description", "takes", "checks", "fields", "eager", "example", "gradient", "order", "primitives"),
    *("reads_position", "unserved_with", "dtypes"),
}


def _declared(path: Path, declared: Any) -> Mod:
    """The row that the head of a fragment declares."""
    name = path.name.removesuffix(SUFFIX)
    if not isinstance(declared, Mapping):
        raise SpecError(f"{path}: declare must be a mapping")
    unknown = set(declared) - _KEYS
    missing = {"fields", "eager", "example"} - set(declared)
    if unknown or missing:
        both = {"knows no": unknown, "has no": missing}
        wrong = " and ".join(f"{what} {', '.join(sorted(keys))}" for what, keys in both.items() if keys)
        raise SpecError(f"{path}: declare {wrong}; its keys are {', '.join(sorted(_KEYS))}")
    argument = declared.get("argument", name)
    takes = declared.get("takes", "number")
    if takes not in ("number", "tensor"):
        raise SpecError(f'{path}: takes must be "number" or "tensor", not {takes!r}')
    dtypes = declared.get("dtypes", ["float32"])
    checks = [(_expression(path, "checks", text), message) for text, message in declared.get("checks", [])]
    fields, values = _fields(path, "fields", declared["fields"])
    eager = _expression(path, "eager", declared["eager"])
    example = _expression(path, "example", declared["example"])

    def pack(value: Any, call: CallContext) -> Mapping[str, Any]:
        _check_kind(argument, value, takes, dtypes, call)
        names = _names(value, vars(call))
        for holds, message in checks:
            if not holds(names):
                raise SpecError(f"{argument} {message}, got {_shown(value)}")
        return {field: compute(names) for field, compute in values.items()}

    def of_scores(scores: torch.Tensor, value: Any, context: ScoreContext) -> Any:
        return eager(_names(value, vars(context)) | {"scores": scores})

    return Mod(
        name=name,
        argument=argument,
        description=declared.get("description", f"the score modification of {path.name}"),
        fields=fields,
        pack=pack,
        eager=of_scores,
        example=lambda call: example(_names(None, vars(call))),
        primitives=tuple(declared.get("primitives", ())),
        differentiable=hasattr(_module(path), "backward"),
        order=declared.get("order", Mod.order),
        reads_position=declared.get("reads_position", False),
        gradient=_gradient(path, declared.get("gradient")),
        unserved_with=dict(declared.get("unserved_with", {})),
    )


def _gradient(path: Path, declared: Any) -> Gradient | None:
    """The gradient that a head declares: by default a sum as large as the value, in its order."""
    if declared is None:
        return None
    if not isinstance(declared, Mapping) or "sum" not in declared or set(declared) - {"sum", "fields", "shape"}:
        raise SpecError(f'{path}: gradient is {{"sum": "d_name"}}, and may have fields and shape')
    fields, values = _fields(path, "gradient", declared.get("fields", []))
    shape = _expression(path, "gradient", declared.get("shape", "value.shape"))

    def pack(value: torch.Tensor, call: CallContext) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        names = _names(value, vars(call))
        return tuple(shape(names)), {field: compute(names) for field, compute in values.items()}

    total = Field(declared["sum"], "float*", "zero before; null where it is not wanted")
    return Gradient(fields=(total, *fields), pack=pack, finish=_in_shape_of, ordered=False)


def _in_shape_of(total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return total.sum_to_size(value.shape).to(value.dtype)


def _fields(
    path: Path, what: str, rows: Sequence[Sequence[str]]
) -> tuple[tuple[Field, ...], dict[str, Callable[[Mapping[str, Any]], Any]]]:
    """Parameters of the kernel, and what computes each."""
    for row in rows:
        if not (isinstance(row, list | tuple) and 3 <= len(row) <= 4 and all(isinstance(text, str) for text in row)):
            raise SpecError(f"{path}: {what}: {row!r} is not [name, type, expression] or with a note behind")
    fields = tuple(Field(row[0], row[1], row[3] if len(row) == 4 else "") for row in rows)
    return fields, {row[0]: _expression(path, f"{what}, {row[0]}", row[2]) for row in rows}


def _expression(path: Path, what: str, text: Any) -> Callable[[Mapping[str, Any]], Any]:
    """`text` as a function of the names in it."""
    if not isinstance(text, str):
        raise SpecError(f"{path}: {what}: {text!r} is not an expression in quotes")
    try:
        compiled = compile(text, str(path), "eval")
    except SyntaxError as error:
        raise SpecError(f"{path}: {what}: {text}: {error.msg}") from error

    def compute(names: Mapping[str, Any]) -> Any:
        try:
            return eval(compiled, dict(names))
        except Exception as error:
            raise SpecError(f"{path}: {what}: {text}: {error}") from error

    return compute


def _names(value: Any, context: Mapping[str, Any]) -> dict[str, Any]:
    """What expressions see."""
    import torch

    return {"torch": torch, "LOG2E": LOG2E, "LN2": 1 / LOG2E, "value": value, **context}


def _check_kind(argument: str, value: Any, takes: str, dtypes: Sequence[str], call: CallContext) -> None:
    import torch

    if takes == "number":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SpecError(f"{argument} must be a number, got {type(value).__name__}")
        return
    if not isinstance(value, torch.Tensor):
        raise SpecError(f"{argument} must be a tensor, got {type(value).__name__}")
    if str(value.dtype).removeprefix("torch.") not in dtypes:
        raise SpecError(f"{argument} has dtype {value.dtype}; expected {' or '.join(dtypes)}")
    if value.device != call.device:
        raise SpecError(f"{argument} is on {value.device}, q on {call.device}")


def _shown(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if hasattr(value, "shape") else repr(value)
