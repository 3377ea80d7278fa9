"""What to say of a kernel that is not built where none may be compiled: its name, what is near, how to build it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen import bundle, cache
from fagen.cache import Target
from fagen.errors import CacheError

if TYPE_CHECKING:
    from fagen.plan import KernelPlan

_SHOWN = 3


@dataclass(frozen=True)
class Built:
    """One kernel of the cache or of a bundle."""

    slug: str
    entry: str
    arch: str
    spec: dict[str, Any]
    compiler: str
    bundle: Path | None  # None: the cache


def missing(kernel: KernelPlan, target: Target, compiler: str | None) -> CacheError:
    """The error for `kernel`, which neither the cache nor a bundle has. `compiler` is the identity of the one here."""
    flags = [*kernel.spec.cli_flags(), "--arch", kernel.arch.name, *(["--emulate"] if target == "emulate" else [])]
    for_whom = f" for {compiler}" if compiler else ""
    near = [_describe(one, kernel) for one in nearest(kernel, target)[:_SHOWN]]
    bundles = "" if target == "emulate" else ", or name a bundle that has it in FAGEN_BUNDLES"
    return CacheError(
        f"{kernel.slug} is not built{for_whom}, and FAGEN_JIT=0 forbids to compile it now: "
        f"run `{shlex.join(['fagen', 'build', *flags])}` first{bundles}; "
        + (f"nearest of what is built: {', '.join(near)}" if near else "no kernel of its kind is built")
    )


def nearest(kernel: KernelPlan, target: Target) -> list[Built]:
    """What is built of the same kind, nearest first: by how many fields of the spec and the architecture differ, then
    by how far the head dims are apart."""
    wanted: dict[str, Any] = json.loads(kernel.spec.model_dump_json())

    def distance(one: Built) -> tuple[int, int, str]:
        names = {*wanted, *one.spec}
        differing = sum(wanted.get(name) != one.spec.get(name) for name in names) + (one.arch != kernel.arch.name)
        return differing, abs(_number(wanted) - _number(one.spec)), one.slug

    return sorted((one for one in _everything(target) if one.entry == kernel.entry), key=distance)


def _everything(target: Target) -> Iterator[Built]:
    for one in cache.list_artifacts():
        if one.target == target:
            try:
                yield Built(one.slug, one.entry, one.arch, one.spec, one.compiler, None)
            except (OSError, ValueError):  # gone or damaged meanwhile
                continue
    if target == "cuda":
        for each in bundle.search():
            for entry in each.entries:
                yield Built(entry.slug, entry.entry, entry.arch, entry.spec, entry.compiler, each.path)


def _describe(one: Built, kernel: KernelPlan) -> str:
    notes = [f"in {one.bundle}"] if one.bundle else []
    if one.slug == kernel.slug:  # the same by name: another compiler's where it is in the cache, or of another source
        notes = [f"by {one.compiler}" + (f" in {one.bundle}, of other templates" if one.bundle else "")]
    return one.slug + (f" ({', '.join(notes)})" if notes else "")


def _number(spec: dict[str, Any]) -> int:
    value = spec.get("head_dim")
    return value if isinstance(value, int) else 0
