"""The flags that commands share beside those of the spec."""

from __future__ import annotations

from typing import Annotated, Any

import typer

KERNEL_PANEL = "Kernel"
CALL_PANEL = "Call"

_ARCH_HELP = (
    "targets: sm80, 9.0, a list of such, or native; default: the GPU's, without one FAGEN_ARCH or "
    "TORCH_CUDA_ARCH_LIST, without those sm80"
)
_SHARD_HELP = "only part I of N, such as 3/16; the parts can be built on any machines, and are all"
_JOBS_HELP = "most compilers at once; default: what cores and memory allow"
MODS_HELP = "a folder of score modifications from outside, whose code is run; each has a flag then"
_EMULATE_HELP = "the same kernel compiled for the CPU"


def _size(flag: str, what: str) -> Any:
    return typer.Option(flag, metavar="N", help=f"{what}; default: chosen", rich_help_panel=CALL_PANEL)


BatchOption = Annotated[int | None, _size("--batch", "sequences")]
HeadsOption = Annotated[int | None, _size("--heads", "heads of q")]
HeadsKOption = Annotated[int | None, _size("--heads-k", "heads of k and v, a divisor of --heads")]
QueriesOption = Annotated[int | None, _size("--seqlen-q", "queries a sequence")]
KeysOption = Annotated[int | None, _size("--seqlen-k", "keys a sequence")]
SplitsOption = Annotated[int | None, _size("--num-splits", "with --split-kv, parts of the keys")]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", help="of the random inputs", rich_help_panel=CALL_PANEL)
]
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="ARCH,...", help=_ARCH_HELP, rich_help_panel=KERNEL_PANEL)
]
EmulateOption = Annotated[bool, typer.Option("--emulate", help=_EMULATE_HELP, rich_help_panel=KERNEL_PANEL)]
ShardOption = Annotated[str | None, typer.Option("--shard", metavar="I/N", help=_SHARD_HELP)]
JobsOption = Annotated[int | None, typer.Option("--jobs", "-j", min=1, metavar="N", help=_JOBS_HELP)]
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON document")]
