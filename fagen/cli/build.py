"""`fagen build`."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fagen import build as builder
from fagen.cache import Artifact
from fagen.cli import output
from fagen.cli.options import KERNEL_PANEL, ArchOption, EmulateOption, JobsOption, JsonOption, ShardOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import matrix_plans, planner, plans
from fagen.errors import SpecError
from fagen.plan import KernelPlan
from fagen.spec import AttentionSpec

_FROM_HELP = "a matrix in place of the flags: a TOML file, or a pyproject.toml with a table tool.fagen"


@partial(takes_specs, optional=True)
def build(
    specs: list[AttentionSpec] | None,
    arch: ArchOption = None,
    matrix: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help=_FROM_HELP, rich_help_panel=KERNEL_PANEL)
    ] = None,
    shard: ShardOption = None,
    emulate: EmulateOption = False,
    jobs: JobsOption = None,
    force: Annotated[bool, typer.Option("--force", help="build again what the cache has")] = False,
    as_json: JsonOption = False,
) -> None:
    """Builds every kernel that the flags or a matrix name and shows what each became."""
    kernels = _chosen(specs, arch, matrix, shard, emulate)
    started = time.perf_counter()
    with output.progress("compiling", len(kernels)) as step:
        artifacts = builder.build(
            kernels, emulate=emulate, jobs=jobs, on_done=lambda artifact: step(artifact.slug), force=force
        )
    seconds = time.perf_counter() - started
    if as_json:
        rows = [describe(kernel, artifact) for kernel, artifact in zip(kernels, artifacts, strict=True)]
        output.emit({"artifacts": rows, "seconds": round(seconds, 3)})
    else:
        if kernels:
            print_table(kernels, artifacts)
        built = sum(not artifact.cached for artifact in artifacts)
        if (built and len(artifacts) > 1) or matrix is not None:
            total = output.size(sum(artifact.size for artifact in artifacts))
            output.note(f"{len(artifacts)} kernels, {total}; built {built} in {output.duration(seconds)}")


def _chosen(
    specs: list[AttentionSpec] | None, arch: str | None, matrix: Path | None, shard: str | None, emulate: bool
) -> list[KernelPlan]:
    if matrix is not None:
        return matrix_plans(matrix, arch, shard, planner(emulate))
    if shard is not None:
        raise SpecError("--shard divides what a file names: add --from")
    assert specs is not None
    return plans(specs, arch, emulate=emulate)


def describe(kernel: KernelPlan, artifact: Artifact) -> dict[str, Any]:
    """One built kernel for `--json`. Sizes are in bytes, `registers` and spills are a thread's."""
    resources = artifact.resources
    return {
        "slug": kernel.slug,
        "kind": kernel.kind,
        "spec": kernel.spec.model_dump(mode="json"),
        "arch": kernel.arch.name,
        "emulated": artifact.target == "emulate",
        "cached": artifact.cached,
        "seconds": artifact.seconds,
        "registers": resources and resources.registers,
        "spill_stores": resources and resources.spill_stores,
        "spill_loads": resources and resources.spill_loads,
        "shared_memory": kernel.smem_bytes,
        "size": artifact.size,
        "compiler": artifact.compiler,
        "digest": artifact.digest,
        "directory": artifact.directory,
        "source": artifact.source,
        "binary": artifact.binary,
    }


def print_table(kernels: list[KernelPlan], artifacts: list[Artifact]) -> None:
    """One row a kernel; on a narrow terminal the directories follow the table."""
    columns = (
        output.folded("variant"),
        "arch",
        output.right("seconds"),
        output.right("regs"),
        output.right("spills"),
        output.right("shared"),
        output.right("size"),
        output.folded("directory"),
    )
    rows = [_row(kernel, artifact) for kernel, artifact in zip(kernels, artifacts, strict=True)]
    if output.print_rows(columns, rows):
        print(*("", *(row[-1] for row in rows)), sep="\n")


def _row(kernel: KernelPlan, artifact: Artifact) -> tuple[str, ...]:
    resources = artifact.resources
    return (
        f"{kernel.kind}_{kernel.spec.slug}",
        output.arch(artifact),
        "cached" if artifact.cached else f"{artifact.seconds:.2f}",
        str(resources.registers) if resources else "-",
        output.size(resources.spill_stores + resources.spill_loads) if resources else "-",
        output.size(kernel.smem_bytes),
        output.size(artifact.size),
        output.short(artifact.directory),
    )
