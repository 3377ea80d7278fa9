"""`fagen build`."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from fagen import build as builder
from fagen.cache import Artifact
from fagen.cli import output
from fagen.cli.options import ArchOption, EmulateOption, JsonOption
from fagen.cli.specs import takes_specs
from fagen.cli.targets import plans
from fagen.plan import KernelPlan
from fagen.spec import AttentionSpec

_JOBS_HELP = "most compilers at once; default: what cores and memory allow"


@takes_specs
def build(
    specs: list[AttentionSpec],
    arch: ArchOption = None,
    emulate: EmulateOption = False,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help=_JOBS_HELP)] = None,
    force: Annotated[bool, typer.Option("--force", help="build again what the cache has")] = False,
    as_json: JsonOption = False,
) -> None:
    """Builds every kernel that the flags name and shows what each became."""
    kernels = plans(specs, arch)
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
        print_table(kernels, artifacts)
        if any(not artifact.cached for artifact in artifacts) and len(artifacts) > 1:
            output.note(f"{len(artifacts)} kernels in {output.duration(seconds)}")


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
