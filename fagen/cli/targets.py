"""What `--arch` names, and the kernels that specs become there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fagen import target
from fagen.arch import Arch, parse_list
from fagen.cli.output import note
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec
from fagen.tuned import plan_here

Planner = Callable[[AttentionSpec, Arch], Sequence[KernelPlan]]


def resolve_archs(text: str | None) -> tuple[Arch, ...]:
    """The targets that `--arch` names, or the default ones, with a line that says so where nothing decided them."""
    if text is not None:
        return parse_list(text, target.gpu_capability)
    archs, source = target.default_archs()
    if not source:
        names = ", ".join(arch.name for arch in archs)
        note(f"no GPU found, and neither --arch, FAGEN_ARCH nor TORCH_CUDA_ARCH_LIST is set: using {names}")
    return archs


def matrix_plans(path: Path, arch: str | None, shard: str | None, plan_of: Planner = plan) -> list[KernelPlan]:
    """Every kernel that the matrix at `path` names, each once, or its part `shard`. SpecError as for `matrix.read`."""
    from fagen import matrix

    part = None if shard is None else matrix.parse_shard(shard)
    kernels = matrix.kernels(matrix.read(path, resolve_archs, arch), plan_of)
    return kernels if part is None else matrix.shard(kernels, *part)


def plans(specs: Sequence[AttentionSpec], arch: str | None, *, emulate: bool) -> list[KernelPlan]:
    """Every kernel of `specs` on every target, as `load` runs it here. Raises SpecError before anything is built."""
    archs = resolve_archs(arch)
    plan_of = planner(emulate)
    return [kernel for spec in specs for target_arch in archs for kernel in plan_of(spec, target_arch)]


def planner(emulate: bool) -> Planner:
    """What chooses tiles for this machine: those tuned on its card, or emulated those of the tables."""
    return plan if emulate else plan_here
