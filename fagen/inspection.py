"""What a built kernel costs: the compiler's report, what follows from it, and how two kernels differ.

A report is plain data, so that a saved one can be compared with what is built later, elsewhere or from other templates.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fagen import disassembly
from fagen.arch import sm90
from fagen.cache import Artifact
from fagen.errors import SpecError, ToolchainError
from fagen.occupancy import occupancy
from fagen.plan import KernelPlan

if TYPE_CHECKING:
    from fagen.banks import Use

Report = dict[str, Any]

_FORMAT = 1
_NAMES = ("kind", "slug", "arch")  # strings that each report has
_NOT_COMPARED = frozenset({"kind", "slug", "digest", "directory", "tile_text", "bank_lines"})
_COUNTED = ("instructions", "banks", "unwritten")  # null where nothing could count them


@dataclass(frozen=True)
class Inspection:
    """Reports in the order of the kernels, and a line for each thing that could not be found out."""

    reports: tuple[Report, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Two kernels of one kind. `changes` maps the path of each value that differs, such as "tile.tile_n", to what the
    other has and what this one has; None where one has no such value."""

    kind: str
    other: str
    this: str
    changes: dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """Kernels that differ, and slugs of those that only one side has."""

    differences: tuple[Difference, ...]
    only_other: tuple[str, ...]
    only_this: tuple[str, ...]


def inspect(
    kernels: Sequence[KernelPlan],
    artifacts: Sequence[Artifact],
    uses: Mapping[KernelPlan, Use] | None = None,
) -> Inspection:
    """Reports of built kernels, with the `uses` of shared memory that `banks.count` has found. Runs the disassembler
    where there is one."""
    notes: list[str] = []
    disassembler = disassembly.find()
    if disassembler is None:
        notes.append(
            "no instruction mix: neither nvdisasm nor cuobjdump is on PATH or beside nvcc "
            "(pip install nvidia-cuda-nvdisasm, or a CUDA toolkit)"
        )
    reports = []
    for kernel, artifact in zip(kernels, artifacts, strict=True):
        instructions = None
        if disassembler is not None and not kernel.arch.ptx_only:
            try:
                instructions = disassembler.instructions(artifact.binary)
            except ToolchainError as error:
                notes.append(f"no instruction mix of {kernel.slug}: {error}")
        reports.append(report(kernel, artifact, instructions) | _of_use((uses or {}).get(kernel)))
    if any(kernel.arch.ptx_only for kernel in kernels):
        notes.append("PTX has no registers, spills and instructions yet: the driver compiles it where it runs")
    return Inspection(tuple(reports), tuple(notes))


def report(kernel: KernelPlan, artifact: Artifact, instructions: dict[str, int] | None) -> Report:
    """One kernel. Sizes are in bytes, registers and spills a thread's, shared memory a block's."""
    resources = artifact.resources
    static = 0 if resources is None else resources.smem
    resident = None
    if resources is not None:
        shared = kernel.smem_bytes + static
        resident = occupancy(kernel.arch, registers=resources.registers, shared=shared, threads=kernel.threads)
    return {
        "kind": kernel.kind,
        "slug": kernel.slug,
        "spec": kernel.spec.model_dump(mode="json"),
        "arch": kernel.arch.name,
        "made_of": kernel.arch.made_of,
        "family": kernel.family,
        "template": kernel.template,
        "fallback": fallback(kernel),
        "tile": dataclasses.asdict(kernel.tile),
        "tile_text": str(kernel.tile),
        "threads": kernel.threads,
        "registers": resources and resources.registers,
        "spill_stores": resources and resources.spill_stores,
        "spill_loads": resources and resources.spill_loads,
        "stack": resources and resources.stack,
        "shared_memory": {"static": resources and static, "dynamic": kernel.smem_bytes},
        "occupancy": None if resident is None else {**dataclasses.asdict(resident), "limits": list(resident.limits)},
        "instructions": None
        if instructions is None
        else {
            "total": sum(instructions.values()),
            "classes": disassembly.by_class(instructions),
            "names": instructions,
        },
        "size": artifact.size,
        "compiler": artifact.compiler,
        "digest": artifact.digest,
        "directory": str(artifact.directory),
    }


def _of_use(use: Use | None) -> Report:
    """Sums of the accesses of shared memory, those lines that have conflicts, and what is not written."""
    if use is None:
        return {"banks": None, "bank_lines": [], "unwritten": None}
    lines = use.lines
    names = ("accesses", "wavefronts", "conflicts")
    return {
        "banks": {name: sum(getattr(line, name) for line in lines) for name in names},
        "bank_lines": [{**dataclasses.asdict(line), "conflicts": line.conflicts} for line in lines if line.conflicts],
        "unwritten": {"words": use.unwritten, "bytes": 4 * use.unwritten},
    }


def fallback(kernel: KernelPlan) -> str | None:
    """Why a kernel is not of the family that its architecture has of its own; None where it is."""
    if kernel.family == kernel.arch.family:
        return None
    if kernel.kind in ("bwd_delta", "bwd_convert") or kernel.arch.family == "sm75":
        return "it has no products, and is the same for all families"
    return sm90.unserved(kernel.spec)


def compare(other: Sequence[Report], this: Sequence[Report]) -> Comparison:
    """Pairs kernels of one kind, those of one architecture first, and says what differs in each pair."""
    left = list(this)
    pairs: list[tuple[Report, Report]] = []
    unpaired = list(other)
    for names in (("slug",), ("kind", "arch"), ("kind",)):
        for one in list(unpaired):
            match = next((each for each in left if all(each[name] == one[name] for name in names)), None)
            if match is not None:
                left.remove(match)
                unpaired.remove(one)
                pairs.append((one, match))
    pairs.sort(key=lambda pair: this.index(pair[1]))
    differences = []
    for one, match in pairs:
        changes = _changes(one, match)
        if changes or one["slug"] != match["slug"]:
            differences.append(Difference(match["kind"], one["slug"], match["slug"], changes))
    return Comparison(tuple(differences), tuple(one["slug"] for one in unpaired), tuple(each["slug"] for each in left))


def _changes(other: Report, this: Report) -> dict[str, tuple[Any, Any]]:
    """What differs. What is counted is compared where both have counts; an instruction that a kernel lacks counts 0."""
    lacking = [name for name in _COUNTED if not all(isinstance(each.get(name), dict) for each in (other, this))]
    before, after = _flat(other), _flat(this)
    changes = {}
    for path in dict.fromkeys([*after, *before]):
        name = path.partition(".")[0]
        absent = 0 if name in _COUNTED else None
        values = before.get(path, absent), after.get(path, absent)
        if values[0] != values[1] and name not in lacking:
            changes[path] = values
    return changes


def save(path: Path, inspection: Inspection) -> None:
    """Writes the reports where `read` finds them. Raises SpecError for a place that cannot be written."""
    text = json.dumps({"format": _FORMAT, "kernels": inspection.reports}, indent=2)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from error


def read(path: Path) -> list[Report]:
    """The reports of a file that `save` wrote. Raises SpecError for any other."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{path} is no run that fagen inspect --save wrote: not JSON") from error
    found = document.get("kernels") if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(_is_report(one) for one in found):
        raise SpecError(f"{path} is no run that fagen inspect --save wrote")
    if document.get("format") != _FORMAT:
        raise SpecError(f"{path} has format {document.get('format')!r}, not {_FORMAT}: save it again")
    return found


def _is_report(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in _NAMES)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The values in nested dictionaries by the path of their names."""
    if not isinstance(value, dict):
        return {path: value}
    flat: dict[str, Any] = {}
    for name, each in value.items():
        if path or name not in _NOT_COMPARED:
            flat |= _flat(each, f"{path}.{name}" if path else name)
    return flat
