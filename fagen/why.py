"""Why a kernel would be built, or not: its key beside that of the nearest artifact, ingredient by ingredient.

The ingredients are those of `cache.digest`: the source, which follows from spec, architecture, tiles and templates; the
compiler's flags; the architecture; and the compiler's identity.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fagen import build, cache, toolchain
from fagen.cache import Artifact, Entry

if TYPE_CHECKING:
    from fagen.plan import KernelPlan

_SHOWN_LINES = 6

Ingredient = Literal["spec", "arch", "source", "flags", "compiler"]


@dataclass(frozen=True)
class Difference:
    """One ingredient of the key: what the nearest artifact has, and what the kernel would have."""

    ingredient: Ingredient
    built: str
    asked: str


@dataclass(frozen=True)
class Explanation:
    """Whether one kernel is `built` under its `digest`, in `directory` if so, and what is to say where it is not.

    `nearest` is the artifact of the same kind and target that differs least, the last used of several; None where
    there is none. `unreadable` are the directories of the kernel's name that hold no artifact, each with the reason.
    """

    slug: str
    arch: str
    target: cache.Target
    compiler: str
    digest: str
    built: bool
    directory: Path | None
    nearest: Artifact | None
    differences: tuple[Difference, ...]
    unreadable: tuple[tuple[Path, str], ...]


def explain(kernels: Sequence[KernelPlan], *, emulate: bool = False) -> list[Explanation]:
    """What `build.build` would do with each of `kernels`, and why. Builds nothing, and counts as no use of an artifact.

    Raises ToolchainError where there is no compiler, whose identity is a part of every key.
    """
    compiler = toolchain.find_host_compiler() if emulate else toolchain.find_cuda_compiler()
    requests = [build.request_of(kernel, compiler, emulate) for kernel in kernels]
    entries = cache.entries()
    return [_explain(request, entries) for request in requests]


def _explain(request: build.Request, entries: Sequence[Entry]) -> Explanation:
    kernel, found = request.kernel, request.find(warn=False, use=False)
    nearest = None if found is not None else _nearest(request, entries)
    return Explanation(
        slug=kernel.slug,
        arch=kernel.arch.name,
        target=request.target,
        compiler=request.compiler.identity,
        digest=request.digest,
        built=found is not None,
        directory=None if found is None else found.directory,
        nearest=nearest,
        differences=() if nearest is None else differences(request, nearest),
        unreadable=() if found is not None else _unreadable(request, entries),
    )


def differences(request: build.Request, artifact: Artifact) -> tuple[Difference, ...]:
    """The ingredients in which the key of `request` differs from that of `artifact`; none where the keys are equal.

    Another spec or architecture has another source anyway, so the source is named only where both are the same.
    """
    kernel = request.kernel
    found: list[Difference] = []
    was, now = artifact.spec, _fields(kernel)
    for name in dict.fromkeys([*was, *now]):
        if was.get(name) != now.get(name):
            found.append(Difference("spec", f"{name}={was.get(name)}", f"{name}={now.get(name)}"))
    if artifact.arch != kernel.arch.name:
        found.append(Difference("arch", artifact.arch, kernel.arch.name))
    if not found:
        source = artifact.source.read_text(encoding="utf-8")
        if source != request.source:
            found.append(Difference("source", *_changed_lines(source, request.source)))
    flags = request.compiler.flags(kernel.arch)
    same_compiler = artifact.compiler == request.compiler.identity
    # Flags name the architecture, and those of another compiler mean nothing to this one.
    if artifact.flags != flags and same_compiler and artifact.arch == kernel.arch.name:
        found.append(Difference("flags", _without(artifact.flags, flags), _without(flags, artifact.flags)))
    if not same_compiler:
        found.append(Difference("compiler", artifact.compiler, request.compiler.identity))
    return tuple(found)


def _nearest(request: build.Request, entries: Sequence[Entry]) -> Artifact | None:
    """The artifact to compare with: of the same target and kind, with the fewest differences, then last used."""
    ranked: list[tuple[int, float, Artifact]] = []
    for entry in entries:
        artifact = entry.artifact
        if artifact is None or artifact.target != request.target or artifact.entry != request.kernel.entry:
            continue
        try:
            ranked.append((len(differences(request, artifact)), -entry.used, artifact))
        except (OSError, ValueError):  # gone, or damaged: it is judged by its checksums when it is used
            continue
    # Without a difference it is the very artifact, which is damaged, or else `find` would have found it.
    ranked = [one for one in ranked if one[0]]
    return min(ranked, key=lambda one: one[:2])[2] if ranked else None


def _unreadable(request: build.Request, entries: Sequence[Entry]) -> tuple[tuple[Path, str], ...]:
    """Directories of this kernel's name from which no kernel can be taken, with the reason."""
    found: list[tuple[Path, str]] = []
    for entry in entries:
        if entry.artifact is None and entry.directory.name.rpartition("-")[0] == request.name.rpartition("-")[0]:
            found.append((entry.directory, entry.problem))
        elif entry.directory.name == request.name:
            try:
                cache.read(entry.directory)
            except (FileNotFoundError, cache.CorruptArtifact) as error:
                found.append((entry.directory, str(error)))
    return tuple(found)


def _fields(kernel: KernelPlan) -> dict[str, Any]:
    fields: dict[str, Any] = kernel.spec.model_dump(mode="json")
    return fields


def _changed_lines(old: str, new: str) -> tuple[str, str]:
    """The first lines that differ, of each text."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changes = [code for code in matcher.get_opcodes() if code[0] != "equal"]
    if not changes:  # only the last line break
        return "", ""
    _, a, b, c, d = changes[0]
    return _quote(before, a, b), _quote(after, c, d)


def _quote(lines: Sequence[str], start: int, stop: int) -> str:
    shown = lines[start : min(stop, start + _SHOWN_LINES)]
    return f"line {start + 1}: " + "\n".join(shown) if shown else f"nothing before line {start + 1}"


def _without(these: Sequence[str], those: Sequence[str]) -> str:
    return " ".join(flag for flag in these if flag not in those) or "none of these"
