"""The stages of a block of the forward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fagen.check import LSE_ABSOLUTE, LSE_RELATIVE, Inputs
from fagen.trace.block import Block, Problem, Written
from fagen.trace.expected import FLOAT32, TINY, Expected, Rounding, ScoreBounds, read_range
from fagen.trace.parts import Part

# How far the maximum may exceed the reference of a running softmax: 2^8 in the sm80 family, 2^14 there where scores
# have a bound, 2^15 in Hopper's.
_HEADROOM = 15 * math.log(2)


@dataclass(frozen=True)
class _Step:
    tile: int
    column: int
    span: slice  # of keys
    seen: Tensor  # of the keys up to this step, (rows, keys)


class Forward:
    """What a block of the forward wrote down, part by part, beside what it should have."""

    def __init__(
        self, problem: Problem, block: Block, inputs: Inputs, written: Written, outputs: Mapping[str, Tensor]
    ) -> None:
        self._problem, self._block, self._written = problem, block, written
        first, (seqlen_q, _) = block.tile * problem.tile_m, problem.lengths(block.batch)
        rows = range(first, min(first + problem.tile_m, seqlen_q))
        self._first, self._count = first, len(rows)
        expected = Expected(
            block.batch, range(block.head, block.head + 1), rows, range(written.columns), problem.device
        )
        self._expected = expected
        o, lse = problem.case.reference(inputs, expected)
        self._ends = {"o": (outputs["o"], o)} | {
            "lse": (outputs["lse"].transpose(-1, -2)[..., None], lse.transpose(-1, -2)[..., None])
        }
        kv_head = block.head // problem.group
        k, v = (problem.of_head(x, block.batch, kv_head, keys=True) for x in (inputs.k, inputs.v))
        k, self._v = (pad(x, (0, 0, 0, written.columns - x.shape[0])) for x in (k, v))
        self._bounds = ScoreBounds.of(problem, self._of_block(inputs.q)[None], k, expected)
        self._score = expected["mask"][0]
        self._visible = self._score > -math.inf
        self._read = read_range(self._visible)
        if not inputs.call.get("dropout_p"):
            expected.keep_all()
        self._keep = expected["keep"][0]
        self._o_bound = torch.zeros(self._count, problem.spec.dim_v, dtype=torch.float64, device=problem.device)

    def parts(self) -> Iterator[Part]:
        """In the order in which the block goes through them: from the last keys to the first."""
        for step in self._steps():
            yield from self._scores(step)
            yield from self._softmax(step)
        yield from self._end()

    def _of_block(self, x: Tensor) -> Tensor:
        """The block's rows of q or o."""
        return self._problem.of_head(x, self._block.batch, self._block.head)[self._first : self._first + self._count]

    def _steps(self) -> Iterator[_Step]:
        """Those that some warp took, or should have."""
        running, there = self._written["running"]
        columns = running[:, 0].masked_fill(~there[:, 0], -1).amax(1).int().tolist()
        size = self._problem.tile_n
        phase = max(columns) % size if max(columns) >= 0 else 0  # steps of a window may begin anywhere
        seen = torch.zeros_like(self._visible)
        for tile in reversed(range(self._written.steps)):
            column = tile * size + phase
            span = slice(column, min(column + size, self._written.columns))
            seen[:, span] = self._visible[:, span]
            if columns[tile] >= 0 or self._visible[:, span].any():
                yield _Step(tile, column, span, seen.clone())

    def _part(self, step: _Step, name: str, expected: Tensor, bound: Tensor, read: bool = False) -> Part:
        """Of a stage of scores; `read`: only of keys that the block reads, for others are no numbers of the call."""
        values, there = (x[: self._count, step.span] for x in self._written[name])
        expected, bound = expected[:, step.span], bound[:, step.span] + TINY
        # A warp that sees nothing of a step leaves out the step.
        judged = there | self._visible[:, step.span]
        if read:
            judged = judged & self._read[step.span] & ~expected.isnan()
        bound = bound.masked_fill(~judged, math.inf)
        return Part(name, step.tile, self._block.head, self._first, step.column, values, expected, bound, there)

    def _row_part(
        self, tile: int | None, name: str, values: Tensor, expected: Tensor, bound: Tensor, there: Tensor
    ) -> Part:
        """One number a row."""
        columns = (x[:, None] for x in (values, expected, bound + TINY, there))
        return Part(name, tile, self._block.head, self._first, None, *columns)

    def _scores(self, step: _Step) -> Iterator[Part]:
        bounds, stages = self._bounds, self._written.stages
        yield self._part(step, "S", self._expected["S"][0], bounds.product[0], read=True)
        for name in stages[1 : stages.index("mask")]:
            bound = bounds.scaled if name == "scaled" else bounds.score
            yield self._part(step, name, self._expected[name][0], bound[0], read=True)
        yield self._part(step, "mask", self._score, bounds.score[0].masked_fill(~self._visible, 0.0))

    def _softmax(self, step: _Step) -> Iterator[Part]:
        """All is compared for the reference that the kernel has, so long as that may be one."""
        running, there = (x[step.tile] for x in self._written["running"])
        reference, captured_sum = running[1, : self._count], running[2, : self._count]
        there = there[0, : self._count]
        judged = there | self._visible[:, step.span].any(1)
        score = self._score.masked_fill(~step.seen, -math.inf)

        largest = score.amax(1)
        nearest = reference.maximum(largest - _HEADROOM).minimum(largest)
        nearest = torch.where(reference.isnan(), largest, nearest)
        loose = self._bounds.score[0].masked_fill(~step.seen, 0.0).amax(1)
        loose = loose + LSE_RELATIVE * reference.abs().nan_to_num(posinf=0.0)
        bound = loose.masked_fill(~judged, math.inf)
        yield self._row_part(step.tile, "max", reference, nearest, bound, there)

        shift = reference.masked_fill(reference == -math.inf, 0.0)[:, None]
        relative = self._bounds.relative[0] + LSE_RELATIVE * shift.abs().nan_to_num()
        p = torch.exp(self._score - shift)
        yield self._part(step, "P", p, p * relative)

        rounding = Rounding.of(self._problem.spec)
        weights = torch.exp(score - shift)
        total = weights.sum(1)
        bound = (total * (LSE_ABSOLUTE + loose)).masked_fill(~judged, math.inf)
        yield self._row_part(step.tile, "sum", captured_sum, total, bound, there)
        if self._problem.spec.dropout:
            # In Hopper's family that is of P in 16 bits.
            off = relative + (rounding.unit if self._problem.kernel.family == "sm90" else 0.0)
            yield self._part(step, "dropout", p * (self._keep > 0), p * off + rounding.least)

        # In units of o: divided by the sum, and of what is kept as much as of all. P is rounded to 16 bits.
        inverse = torch.where(total > 0, 1 / total, 0.0)[:, None]
        expected = (weights * self._keep) @ self._v * inverse
        loss = rounding.unit + 2 * loose[:, None] + LSE_ABSOLUTE + self._written.columns * FLOAT32
        spread = loss * ((weights * self._keep) @ self._v.abs())
        underflow = rounding.least * (step.seen * self._keep) @ self._v.abs()
        self._o_bound = (spread + underflow) * inverse
        values, there = (x[step.tile, : self._count] for x in self._written["O"])
        captured = values * torch.where(captured_sum > 0, self._keep.max() / captured_sum, 1.0)[:, None]
        bound = (self._o_bound + TINY).masked_fill(~judged[:, None], math.inf)
        yield Part("O", step.tile, self._block.head, self._first, 0, captured, expected, bound, there)

    def _end(self) -> Iterator[Part]:
        rounding = Rounding.of(self._problem.spec)
        o, expected = map(self._of_block, self._ends["o"])
        bound = self._o_bound + rounding.unit * expected.abs() + rounding.least
        yield Part(
            "o", None, self._block.head, self._first, 0, o, expected, bound, torch.ones_like(o, dtype=torch.bool)
        )
        lse, expected = (self._of_block(x)[:, 0] for x in self._ends["lse"])
        bound = (LSE_RELATIVE * expected.abs().nan_to_num(posinf=0.0)).clamp(min=LSE_ABSOLUTE)
        yield self._row_part(None, "lse", lse, expected, bound, torch.ones_like(lse, dtype=torch.bool))
