"""`fagen why`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import plans
from fagen.spec import AttentionSpec
from fagen.why import explain

if TYPE_CHECKING:
    from fagen.why import Explanation


@takes_specs
def why(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    as_json: JsonOption = False,
) -> None:
    """Says of every kernel that the flags name whether `fagen build` would compile it, and why."""
    explanations = explain(plans(specs, arch, emulate=emulate), emulate=emulate)
    if as_json:
        output.emit({"kernels": [describe(one) for one in explanations]})
        return
    for one in explanations:
        print("\n".join(lines(one)))


def describe(one: Explanation) -> dict[str, Any]:
    """One kernel for `--json`."""
    return {
        "slug": one.slug,
        "arch": one.arch,
        "emulated": one.target == "emulate",
        "compiler": one.compiler,
        "digest": one.digest,
        "built": one.built,
        "directory": one.directory,
        "nearest": None if one.nearest is None else one.nearest.directory,
        "differences": [
            {"ingredient": each.ingredient, "built": each.built, "asked": each.asked} for each in one.differences
        ],
        "unreadable": [{"directory": path, "problem": problem} for path, problem in one.unreadable],
    }


def lines(one: Explanation) -> list[str]:
    """One kernel for people."""
    name = f"{one.slug}{' CPU' if one.target == 'emulate' else ''}"
    if one.directory is not None:
        return [f"{name}: built, in {output.short(one.directory)}", f"  compiler  {one.compiler}"]
    said = [f"{name}: would be built, no whole artifact has the digest {one.digest[:12]}"]
    said += [f"  {output.short(path)}: {problem}" for path, problem in one.unreadable]
    if one.nearest is None:
        return [*said, "  nothing to compare with: no other kernel of its kind is built"]
    used = output.age(time.time() - one.nearest.directory.stat().st_mtime)
    said.append(f"  nearest   {output.short(one.nearest.directory)}, used {used} ago")
    for each in one.differences:
        if each.ingredient == "source":
            said.append("  source    the templates, the tile or fagen itself changed; the first change:")
            said += [f"    - {line}" for line in each.built.splitlines()]
            said += [f"    + {line}" for line in each.asked.splitlines()]
        else:
            said.append(f"  {each.ingredient:8}  {each.built} -> {each.asked}")
    return said
