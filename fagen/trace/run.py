"""`trace`: runs a kernel, runs it traced, and compares."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fagen import check, origin, stages
from fagen.arch import resolve
from fagen.build import find_or_build
from fagen.cache import Artifact
from fagen.call import Sizes, check_splits
from fagen.check import Case, Comparison, Inputs
from fagen.errors import LaunchError, SpecError
from fagen.kernels import Kernel, planned
from fagen.ops import Attention, default_arch
from fagen.plan import KernelPlan
from fagen.prepared import MOST_DECODE_ROWS, in_parts
from fagen.spec import AttentionSpec
from fagen.trace.backward import Backward
from fagen.trace.block import Block, Problem, Written
from fagen.trace.combine import Combine
from fagen.trace.forward import Forward
from fagen.trace.parts import Part, Stage, canvas, stack, stage_of

_SOURCE, _LINE = re.compile(r"^  in (.+)$", re.M), re.compile(r"\bline (\d+)\b")  # of the emulator's messages


@dataclass(frozen=True)
class Trace:
    """What `trace` found."""

    problem: Problem
    device: str  # the card's name, or "CPU (emulated)"
    block: Block | None  # None where a fault came before one was chosen
    results: Mapping[str, Comparison]  # of the kernel as it is, by output
    parts: Sequence[Part]  # in the order in which the block computes them
    same_bits: bool = True  # the traced kernel returns what the kernel does
    fault: str | None = None  # what stopped the kernel; then there is nothing to compare
    fault_lines: Sequence[str] = ()  # where in the templates the lines are that it names

    @property
    def stages(self) -> list[Stage]:
        """The stages in order."""
        names = dict.fromkeys(part.stage for part in self.parts)
        return [stage_of([part for part in self.parts if part.stage == name]) for name in names]

    @property
    def first(self) -> Stage | None:
        """The first stage that departs, at the step where it does; None where none does."""
        return next((stage for part in self.parts if (stage := stage_of([part])).departs), None)

    @property
    def passed(self) -> bool:
        """Nothing stopped the kernel, no stage departs and no output is past its budget."""
        return self.fault is None and self.first is None and all(result.passed for result in self.results.values())

    def arrays(self) -> dict[str, Tensor]:
        """What was captured and what was expected of each stage: scores as `parts.canvas` lays them out, what there is
        for each step as `parts.stack` does."""
        found: dict[str, Tensor] = {}
        for name in dict.fromkeys(part.stage for part in self.parts):
            parts = [part for part in self.parts if part.stage == name]
            found |= canvas(name, parts) if name in self.problem.traced.trace_stages else stack(name, parts)
        return found

    def _parts(self) -> list[tuple[int, int]] | None:
        """First tile of keys and end of each part, where they are split."""
        if self.block is None or not self.problem.spec.split_kv:
            return None
        return [(tiles.start, tiles.stop) for tiles in self.problem.tiles_of_parts(self.block)]

    def to_json(self) -> dict[str, Any]:
        """All but the tensors, as JSON can hold it."""
        case, kernel, first = self.problem.case, self.problem.kernel, self.first
        sizes = ("batch", "heads", "heads_k", "seqlen_q", "seqlen_k")
        fields = {
            "slug": kernel.slug,
            "spec": case.spec.model_dump(mode="json"),
            "arch": kernel.arch.name,
            "kernel": kernel.kind,
            "device": self.device,
            "shape": {name: getattr(case, name) for name in sizes},
            "seed": case.seed,
            "block": None if self.block is None else asdict(self.block),
            "parts": self._parts(),
            "results": {name: asdict(result) for name, result in self.results.items()},
            "stages": [asdict(stage) for stage in self.stages],
            "first": None if first is None else asdict(first),
            "same_bits": self.same_bits,
            "fault": self.fault,
            "fault_lines": list(self.fault_lines),
            "passed": self.passed,
        }
        return {name: check.jsonable(value) for name, value in fields.items()}


def trace(
    spec: AttentionSpec,
    *,
    kind: str | None = None,
    arch: str | None = None,
    emulate: bool | None = None,
    block: Block | None = None,
    tile: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    heads_k: int | None = None,
    seqlen_q: int | None = None,
    seqlen_k: int | None = None,
    num_splits: int | None = None,
    seed: int = 0,
) -> Trace:
    """Traces a block of the kernel `kind` (`stages.KINDS`) of `spec`, on the GPU if there is one, or emulated. Default
    the forward, of split keys the one of "fwd" and "decode" that the call runs.

    block: default the one that computes the worst element of the kernel's outputs; where keys are split, those of all
    parts. tile: only this step of it is looked at, a tile of keys, for "bwd" of queries, for "combine" a part of the
    keys. The sizes are those of `check.check`, but one query for "decode". num_splits: with spec.split_kv, parts of the
    keys, default what a call would choose, for "combine" at least two. Gradients are those of a loss of o and lse.

    Raises SpecError for a kernel that the spec lacks or that cannot be traced, and for a block or a tile that is not
    there; and what `fagen.load` raises.
    """
    emulated = not torch.cuda.is_available() if emulate is None else emulate
    case = check.default_case(spec, emulated, batch, heads, heads_k, seqlen_q, seqlen_k, seed)
    if kind == "decode" and seqlen_q is None:
        case = replace(case, seqlen_q=1)
    case = replace(case, num_splits=num_splits)
    return trace_case(case, kind=kind, arch=arch, emulate=emulated, block=block, tile=tile)


def trace_case(
    case: Case,
    *,
    kind: str | None = None,
    arch: str | None = None,
    emulate: bool,
    block: Block | None = None,
    tile: int | None = None,
) -> Trace:
    """`trace` of one call."""
    case = replace(case, lse_gradient=case.spec.backward)
    index = None if emulate else torch.cuda.current_device()
    kernels = planned(case.spec, default_arch(index) if arch is None else resolve(arch), index)
    problem = _problem(case, kernels, kind, index)
    if block is not None:
        problem.check(block)
    problem.check_step(tile, block)
    device = "CPU (emulated)" if index is None else torch.cuda.get_device_name(index)
    inputs = problem.case.inputs(problem.device)
    artifacts = find_or_build([*kernels, problem.traced], emulate=emulate)
    try:
        outputs = _call(problem, _attention(problem), inputs)
        results = _results(problem, inputs, outputs)
        for one in _suspects(problem, results) if block is None else [block]:
            problem.check_step(tile, one)
            parts, same = _trace(problem, artifacts[-1], inputs, one, outputs)
            found = Trace(problem, device, one, results, _of_tile(parts, tile), same)
            if found.first is not None:
                break
    except LaunchError as error:
        lines = _origins(str(error), dict(zip([*kernels, problem.traced], artifacts, strict=True)))
        return Trace(problem, device, block, {}, (), fault=str(error), fault_lines=lines)
    return found


def _problem(case: Case, kernels: Sequence[KernelPlan], kind: str | None, index: int | None) -> Problem:
    """The call and the kernel that is traced. SpecError where there is none, or nothing to trace."""
    check_splits(case.spec, case.num_splits)
    if not (case.batch and case.seqlen_q and case.seqlen_k):
        raise SpecError("there is nothing to trace: the call has no query that sees a key")
    there: dict[str, KernelPlan] = {kernel.kind: kernel for kernel in kernels if kernel.kind in stages.KINDS}
    if kind is not None and kind not in there:
        *others, last = there
        has = f"{', '.join(others)} and {last}" if others else last
        raise SpecError(
            f"there is no kernel {kind!r} to trace: this spec has {has}; decode and combine come with split_kv=True, "
            "bwd with backward=True, bwd_dq with deterministic=True too where bwd does not add to dQ"
        )
    if not case.spec.split_kv:
        chosen = there[kind or "fwd"]
        return Problem(case, chosen, chosen, index)
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    sizes = Sizes(case.batch, case.seqlen_q, case.heads, case.seqlen_k, case.heads_k)
    attending, _, parts = in_parts(there, sizes, case.num_splits, device)
    if kind == "combine" and parts == 1 and case.num_splits is None:  # of a small call: two
        attending, _, parts = in_parts(there, sizes, 2, device)
    if kind == "combine" and parts == 1:
        raise SpecError("this call has its keys in one part, and combine nothing to join: num_splits=2 or more")
    if kind in stages.FORWARDS and kind != attending.kind:
        raise SpecError(
            f"this call runs {attending.kind}, not {kind}: decode is for up to {MOST_DECODE_ROWS} rows, which are "
            "queries times the heads that share a head of k and v; seqlen_q says how many queries"
        )
    return Problem(replace(case, num_splits=parts), there[kind or attending.kind], attending, index)


def _of_tile(parts: Sequence[Part], tile: int | None) -> list[Part]:
    """Those of one step, and of the end."""
    return [part for part in parts if tile is None or part.tile in (tile, None)]


def _attention(problem: Problem) -> Attention:
    """The kernels as they are."""
    return Attention(problem.spec, arch=problem.kernel.arch.name, emulate=problem.device.type == "cpu")


def _call(problem: Problem, attention: Attention, inputs: Inputs) -> dict[str, Tensor]:
    """What the kernels return."""
    if problem.kernel.kind not in ("bwd", "bwd_dq"):
        o, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
        return {"o": o, "lse": lse}
    o, lse, gradients = check.differentiate(attention, inputs, *problem.case.upstream(problem.device))
    names = ("dq", "dk", "dv", *(f"d{name}" for name in check.differentiable_values(problem.spec, inputs)))
    return {"o": o, "lse": lse, **dict(zip(names, gradients, strict=True))}


def _results(problem: Problem, inputs: Inputs, outputs: Mapping[str, Tensor]) -> dict[str, Comparison]:
    """Each output beside the reference, as `fagen check` judges it."""
    case = problem.case
    o, lse = case.reference(inputs)
    flash = check.flash_error(case, inputs, o) or 0.0
    budget = max(check.OUTPUT_BUDGET[problem.spec.dtype], check.FLASH_FACTOR * flash)
    found = {"o": check.compare_o(outputs["o"], o, budget), "lse": check.compare_lse(outputs["lse"], lse)}
    if "dq" in outputs:
        expected = case.reference_gradients(inputs, *case.upstream(problem.device))
        gradients = tuple(x for name, x in outputs.items() if name not in found)
        found |= check.compare_gradients(case, inputs, gradients, expected, {})
    return found


def _suspects(problem: Problem, results: Mapping[str, Comparison]) -> Iterator[Block]:
    """The block with the worst element of what the kernel puts out; all of a head where any may have spoilt it."""
    names = {"bwd": ("dk", "dv", "dq"), "bwd_dq": ("dq",)}.get(problem.kernel.kind, ("o", "lse"))
    name = max(names, key=lambda name: check.badness(results[name]))
    worst = results[name].worst
    assert worst is not None
    batch, row = worst.batch, worst.row
    if problem.spec.varlen:  # rows of all sequences, numbered through
        batch = 0
        while row >= problem.lengths(batch)[name in ("dk", "dv")]:
            row -= problem.lengths(batch)[name in ("dk", "dv")]
            batch += 1
    if not problem.keeps_keys:
        yield problem.block_of(batch, worst.head, row)
    elif name != "dq":
        yield Block(batch, worst.head, row // problem.tile_n)
    else:
        for tile in range(problem.tiles(batch)[1]):
            yield Block(batch, worst.head // problem.group, tile)


def _trace(
    problem: Problem, artifact: Artifact, inputs: Inputs, block: Block, outputs: Mapping[str, Tensor]
) -> tuple[list[Part], bool]:
    """The parts of a block, and whether the traced kernel, which `artifact` holds, returns the bits of `outputs`."""
    written, attention = Written(problem, block), _attention(problem)
    kernel = Kernel(problem.traced, artifact, problem.device.index, written.parameters)
    attention.kernels(problem.device)[problem.traced.kind] = kernel
    traced = _call(problem, attention, inputs)
    # Blocks add to dQ, and to gradients of values, in any order.
    ordered = [name for name in outputs if name in ("o", "lse", "dk", "dv") or problem.spec.deterministic]
    same = all(torch.equal(traced[name], outputs[name]) for name in ordered)
    compared: type[Forward | Backward | Combine] = Combine if problem.joins else Backward
    if problem.kernel.kind in stages.FORWARDS:
        compared = Forward
    return list(compared(problem, block, inputs, written, traced).parts()), same


def _origins(fault: str, artifacts: Mapping[KernelPlan, Artifact]) -> list[str]:
    """Which lines of templates the lines come from that the emulator names in a fault."""
    source = _SOURCE.search(fault)
    for kernel, artifact in artifacts.items():
        if source is not None and str(artifact.source) == source[1]:
            lines = origin.lines(kernel, "emulate")
            named = [(number, lines[number - 1]) for number in map(int, dict.fromkeys(_LINE.findall(fault)))]
            return [f"line {number} is {line.template}, line {line.number}" for number, line in named if line.number]
    return []
