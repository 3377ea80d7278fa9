"""Matrices of variants: a small TOML file that names many kernels at once, and their division among machines.

    arch = ["sm80", "sm90a"]            # as --arch takes it; without it as where --arch is not given

    [[variants]]
    head_dim = [64, 128]                # lists multiply
    causal = [false, true]
    softcap = true

    [[variants]]
    head_dim = 256
    backward = true
    arch = "sm90a"                      # in place of the one above

    [[exclude]]                         # what agrees with all of it is left out
    head_dim = 64
    softcap = true
    arch = "sm80"

The fields are those of AttentionSpec and the score modifications from outside; one that is not named has its default.
In a `pyproject.toml` the same stands under `[tool.fagen]`: `[[tool.fagen.variants]]`.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fagen import registry
from fagen.arch import Arch, parse_list
from fagen.errors import SpecError
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = ("arch", "variants", "exclude")


@dataclass(frozen=True)
class Variant:
    """One kernel that a matrix names, for one target."""

    spec: AttentionSpec
    arch: Arch


def read(path: Path, targets: Callable[[str | None], Sequence[Arch]], arch: str | None = None) -> list[Variant]:
    """What the file `path` names, in its order, each once.

    targets: what a list of architectures means, and None, the default. arch: such a list, in place of all of the file.

    Raises SpecError for a file that cannot be read, a name that is none, a combination that no kernel serves, and an
    exclusion that excludes nothing, each with its place.
    """
    document = _document(path)
    variants = _tables(path, document, "variants")
    if not variants:
        raise SpecError(f"{path} names no variants: it needs at least one [[variants]] with a head_dim")
    exclusions = [_Exclusion(f"{path}, exclude {i}", table) for i, table in _tables(path, document, "exclude")]
    common = _arch_text(f"{path}: arch", document.get("arch"))
    chosen: dict[Variant, None] = {}
    for number, table in variants:
        place = f"{path}, variants {number}"
        own = _arch_text(f"{place}: arch", table.get("arch"))
        with _placed(place):
            archs = targets(arch or own or common)
        for values in _product({name: value for name, value in table.items() if name != "arch"}):
            kept = [one for one in archs if not _excluded(exclusions, values, one)]
            if kept:
                with _placed(place, "; [[exclude]] leaves out what is not served"):
                    spec = AttentionSpec(**values)
                chosen |= dict.fromkeys(Variant(spec, one) for one in kept)
    for exclusion in exclusions:
        if not exclusion.used:
            raise SpecError(f"{exclusion.place} excludes nothing: no variant has {exclusion}")
    return list(chosen)


def kernels(
    variants: Sequence[Variant], plan_of: Callable[[AttentionSpec, Arch], Sequence[KernelPlan]] = plan
) -> list[KernelPlan]:
    """The kernels of `variants`, each once: variants share some. `plan_of` chooses their tiles.

    SpecError where one does not fit its architecture.
    """
    return list(dict.fromkeys(kernel for variant in variants for kernel in plan_of(variant.spec, variant.arch)))


def shard(kernels: Sequence[KernelPlan], index: int, count: int) -> list[KernelPlan]:
    """The part `index` of `count`, from 1 on: the same on any machine, whatever compilers it has.

    Parts have the same number of kernels but for one, and so have their shares of each kind and head dim, which decide
    how long a kernel takes to compile; the features are spread by a hash.
    """
    return sorted(dict.fromkeys(kernels), key=_cost_then_hash)[index - 1 :: count]


def parse_shard(text: str) -> tuple[int, int]:
    """(3, 16) of "3/16". Raises SpecError."""
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip(), re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise SpecError(f"--shard {text} is not a part such as 3/16, the third of sixteen: from 1/16 to 16/16")
    return int(match[1]), int(match[2])


class _Exclusion:
    """One table of `exclude`: takes a variant that agrees with all its fields, of lists with any entry."""

    def __init__(self, place: str, table: Mapping[str, Any]) -> None:
        if not table:
            raise SpecError(f"{place} is empty: it would exclude everything")
        self.place = place
        self.used = False
        text = _arch_text(f"{place}: arch", table.get("arch"))
        with _placed(place):
            self._archs = None if text is None else parse_list(text)
        self._wanted = {name: _list(value) for name, value in table.items() if name != "arch"}

    def takes(self, values: Mapping[str, Any], arch: Arch) -> bool:
        agrees = self._archs is None or arch in self._archs
        agrees = agrees and all(_value(values, name) in wanted for name, wanted in self._wanted.items())
        self.used |= agrees
        return agrees

    def __str__(self) -> str:
        wanted: dict[str, list[Any]] = dict(self._wanted)
        if self._archs is not None:
            wanted["arch"] = [arch.name for arch in self._archs]
        return ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in wanted.items())


def _excluded(exclusions: Sequence[_Exclusion], values: Mapping[str, Any], arch: Arch) -> bool:
    """Asks every exclusion, so that each knows whether it is of use."""
    answers = [exclusion.takes(values, arch) for exclusion in exclusions]
    return any(answers)


def _document(path: Path) -> Mapping[str, Any]:
    """The tables of the file: of a pyproject.toml those under `[tool.fagen]`."""
    try:
        document: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from error
    if "tool" in document:
        document = document["tool"].get("fagen") if isinstance(document["tool"], dict) else None
        if not isinstance(document, dict):
            raise SpecError(f"{path} has no [tool.fagen]: put [[tool.fagen.variants]] with a head_dim there")
    _refuse_unknown(str(path), document, _TABLES)
    result: dict[str, Any] = document
    return result


def _tables(path: Path, document: Mapping[str, Any], name: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The tables `[[name]]`, numbered from 1."""
    tables = document.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SpecError(f"{path}: {name} must be tables, each headed by [[{name}]]")
    fields = (*(field for field in AttentionSpec.model_fields if field != "custom"), *registry.outside(), "arch")
    for number, table in enumerate(tables, 1):
        _refuse_unknown(f"{path}, {name} {number}", table, fields)
        for field, value in table.items():
            if value == [] or isinstance(value, dict):
                raise SpecError(f"{path}, {name} {number}: {field} must be a value or a list of values")
    return list(enumerate(tables, 1))


def _refuse_unknown(place: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in table:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise SpecError(f"{place}: there is no {name!r}{guess} Known: {', '.join(known)}")


def _product(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*map(_list, table.values())):
        yield dict(zip(table, values, strict=True))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _value(values: Mapping[str, Any], name: str) -> Any:
    """A field of a variant that may not name it."""
    if name in values:
        return values[name]
    if name == "head_dim_v":
        return values.get("head_dim")
    return AttentionSpec.model_fields[name].default if name in AttentionSpec.model_fields else False


def _arch_text(place: str, value: Any) -> str | None:
    """A string or a list of them as --arch spells them."""
    if value is None:
        return None
    if not all(isinstance(name, str) for name in _list(value)):
        raise SpecError(f'{place} must be a name such as "sm90a", or a list of names')
    return ",".join(_list(value))


@contextmanager
def _placed(place: str, advice: str = "") -> Iterator[None]:
    """Puts the place in front of what a SpecError says."""
    try:
        yield
    except SpecError as error:
        raise SpecError(f"{place}: {error}{advice}") from None


def _cost_then_hash(kernel: KernelPlan) -> tuple[str, int, int, bytes]:
    identity = f"{kernel.slug} {kernel.tile}".encode()
    return kernel.kind, kernel.spec.head_dim, kernel.spec.dim_v, hashlib.sha256(identity).digest()
