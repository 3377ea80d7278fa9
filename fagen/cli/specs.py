"""The flags that name kernels: derived from the fields of AttentionSpec, the same for every command.

A flag takes a list (`--head-dim 64,128`), a feature is on, off or, with `--both`, each in turn; several make a matrix.
"""

from __future__ import annotations

import inspect
import itertools
import shlex
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any

import typer

from fagen import registry
from fagen.cli.options import KERNEL_PANEL, MODS_HELP, ArchOption
from fagen.errors import SpecError
from fagen.spec import AttentionSpec, feature_names

_FEATURES = "Features (off unless given)"
_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # of typer's own click, or of the package


def takes_specs(command: Callable[..., Any], optional: bool = False, unless: Sequence[str] = ()) -> Callable[..., Any]:
    """`command(specs=[...], ...)` as a function that takes the spec flags in place of `specs`, for typer to read.

    With `optional` a file can take the place of the flags: that of the command's parameter `matrix`, with which `specs`
    is None. So it is without flags where one of the command's parameters `unless` is given.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name != "specs"
    ]
    flags = _flags(optional or bool(unless))

    @wraps(command)
    def run(**values: Any) -> Any:
        given = {flag.name: values.pop(flag.name) for flag in flags}
        given.pop("mods")  # read before the flags that it brings (fagen.cli)
        if optional and values["matrix"] is not None:
            if any(value not in (None, []) for value in given.values()):
                raise SpecError("--from names the kernels, and so do the flags: give one of them")
            return command(specs=None, **values)
        if any(values[name] for name in unless) and all(value in (None, []) for value in given.values()):
            return command(specs=None, **values)
        if unless and not given["head_dim"]:
            raise SpecError("say which kernel: --head-dim 128 and the features")
        if optional and not given["head_dim"]:
            raise SpecError("say which kernel: --head-dim 128 and the features, or a file with --from")
        return command(specs=matrix(given), **values)

    # Modifications from outside, which are known by the time a command line is read, have flags as well.
    run.anew = lambda: takes_specs(command, optional, unless)  # type: ignore[attr-defined]
    run.__signature__ = signature.replace(parameters=[*flags, *own])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*flags, *own]}
    return run


def parse(flag: str, text: str) -> tuple[list[AttentionSpec], str | None]:
    """The specs that the flags in `text` name, and its --arch. SpecError that names `flag` where they do not."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(add_help_option=False)(takes_specs(_named))
    try:
        words = shlex.split(text)
        named: tuple[list[AttentionSpec], str | None] = typer.main.get_command(app).main(words, standalone_mode=False)
    except _UsageError as error:
        raise SpecError(f"{flag} {text!r}: {error.format_message()}") from None
    except ValueError as error:  # a SpecError too
        raise SpecError(f"{flag} {text!r}: {error}") from None
    return named


def matrix(given: Mapping[str, Any]) -> list[AttentionSpec]:
    """The specs that the flags name, in the flags' order, each once.

    `given` maps each field to the texts of its flag, or for a feature to True, False or None; and "both" to names of
    features. Raises SpecError for what is not served.
    """
    fields, features = _fields(), _features()
    both = [_feature(name, features) for name in _split(given["both"])]
    axes: list[list[Any]] = []
    for name in fields:
        value = given[name]
        if name not in features:
            axes.append([_number(text) for text in _split(value)] or [None])
        elif name not in both:
            axes.append([bool(value)])
        elif value is None:
            axes.append([False, True])
        else:
            flag = _flag_name(name) if value else f"--no-{_flag_name(name)[2:]}"
            raise SpecError(f"--both {name.replace('_', '-')} and {flag} contradict each other")
    specs = []
    for values in itertools.product(*axes):
        named = dict(zip(fields, values, strict=True))
        specs.append(AttentionSpec(**{name: value for name, value in named.items() if value is not None}))
    return list(dict.fromkeys(specs))


def _features() -> list[str]:
    """Names of features, with those of modifications from outside."""
    return [*feature_names(), *registry.outside()]


def _fields() -> list[str]:
    """Names of what a flag gives: `custom` has one for each of its entries."""
    return [*(name for name in AttentionSpec.model_fields if name != "custom"), *registry.outside()]


def _flags(optional: bool) -> list[inspect.Parameter]:
    features = _features()
    flags = [_value_flag(name, optional) for name in _fields() if name not in features]
    flags += [_feature_flag(name) for name in features]
    both = typer.Option(
        None, "--both", metavar="FEATURE,...", help="once with and once without", rich_help_panel=_FEATURES
    )
    mods = typer.Option(None, "--mods", metavar="DIR", help=MODS_HELP, rich_help_panel=_FEATURES)
    return [*flags, _parameter("both", list[str] | None, both), _parameter("mods", list[str] | None, mods)]


def _value_flag(name: str, optional: bool) -> inspect.Parameter:
    field = AttentionSpec.model_fields[name]
    default_values = None if field.is_required() or field.default is None else [field.default]
    default: Any = None if optional else ... if field.is_required() else default_values
    option = typer.Option(
        default,
        _flag_name(name),
        metavar="N,..." if "head_dim" in name else "TYPE,...",
        help=field.description,
        show_default=str(field.default) if optional and default_values else True,
        rich_help_panel=KERNEL_PANEL,
    )
    return _parameter(name, list[str] | None, option)


def _feature_flag(name: str) -> inspect.Parameter:
    flag = _flag_name(name)
    outside = registry.find(name)
    description = outside.description if outside else AttentionSpec.model_fields[name].description
    option = typer.Option(
        None,
        f"{flag}/--no-{flag[2:]}",
        help=description,
        hidden=not _served(name),
        rich_help_panel=_FEATURES,
    )
    return _parameter(name, bool | None, option)


def _parameter(name: str, annotation: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def _served(feature: str) -> bool:
    """Whether any kernel has the feature: one that none has is named in an error, but not offered."""
    try:
        AttentionSpec(head_dim=64, **{feature: True})
    except SpecError:
        return False
    return True


def _feature(text: str, features: list[str]) -> str:
    name = text.removeprefix("--").replace("-", "_")
    if name in features:
        return name
    near = get_close_matches(name, features, n=1)
    guess = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
    raise SpecError(f"--both {text}: no such feature{guess} Known: {', '.join(features).replace('_', '-')}")


def _flag_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _split(texts: list[str] | None) -> list[str]:
    return [part.strip() for text in texts or [] for part in text.split(",") if part.strip()]


def _number(text: str) -> int | str:
    """A number where it is one; anything else goes to AttentionSpec, whose message says what it should have been."""
    try:
        return int(text)
    except ValueError:
        return text


def _named(specs: list[AttentionSpec], arch: ArchOption = None) -> tuple[list[AttentionSpec], str | None]:
    """What `parse` makes of its flags."""
    return specs, arch
