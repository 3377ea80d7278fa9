"""`fagen bundle`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import typer

from fagen import build as builder
from fagen import bundle as bundles
from fagen.cli import output
from fagen.cli.options import ArchOption, JobsOption, JsonOption, ShardOption
from fagen.cli.targets import matrix_plans
from fagen.errors import SpecError

_FILES_HELP = "a matrix: a TOML file, or a pyproject.toml with a table tool.fagen; with --merge: bundles"
_OUTPUT_HELP = "the bundle: kernels.zip, or a wheel, NAME-1.0-py3-none-any.whl"


def bundle(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help=_FILES_HELP, show_default=False)],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help=_OUTPUT_HELP),
    ],
    merge: Annotated[bool, typer.Option("--merge", help="join bundles into one")] = False,
    arch: ArchOption = None,
    shard: ShardOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Builds every kernel that a matrix names, as far as the cache lacks it, and writes all of them into one file."""
    bundles.check_output(out)
    if merge:
        if arch is not None or shard is not None or jobs is not None:
            raise SpecError("--merge joins what is built: it goes without --arch, --shard and --jobs")
        if missing := [str(file) for file in files if not file.exists()]:
            raise SpecError(f"{', '.join(missing)}: no such file or directory")
        made = bundles.merge(out, [bundles.read(file) for file in files])
    else:
        if len(files) > 1:
            raise SpecError(f"one matrix makes a bundle, and {len(files)} files were given; --merge joins bundles")
        kernels = matrix_plans(files[0], arch, shard)
        with output.progress("compiling", len(kernels)) as step:
            artifacts = builder.build(kernels, jobs=jobs, on_done=lambda artifact: step(artifact.slug))
        made = bundles.write(out, artifacts)
    data = out.read_bytes()
    checksum = hashlib.sha256(data).hexdigest()
    if as_json:
        rows = [
            {"slug": entry.slug, "arch": entry.arch, "digest": entry.digest, "compiler": entry.compiler}
            | {"size": entry.binary.bytes}
            for entry in made.entries
        ]
        output.emit({"bundle": out, "size": len(data), "sha256": checksum, "kernels": rows})
        return
    count = f"{len(made.entries)} kernel{'' if len(made.entries) == 1 else 's'}"
    print(f"{output.short(out)}: {count}, {output.size(len(data))}, sha256 {checksum}")
