"""The stages of a block of the forward, or where the keys are split of the blocks of all parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fagen.check import LSE_ABSOLUTE, LSE_RELATIVE, Inputs
from fagen.trace.block import Block, Problem, Written
from fagen.trace.expected import TINY, Expected, Rounding, ScoreBounds, lse_bound, mean, read_range
from fagen.trace.parts import Part

# How far the maximum may exceed the reference of a running softmax: 2^8 in the sm80 family, 2^14 there where scores
# have a bound, 2^15 in Hopper's.
_HEADROOM = 15 * math.log(2)


@dataclass(frozen=True)
class _Step:
    number: int  # where what there is for each step is
    tile: int
    column: int
    span: slice  # of keys
    reach: slice  # of the keys up to this step: this and what was before it
    seen: Tensor  # of these, (rows, keys)


@dataclass
class _Walk:
    """The steps that share a running softmax: of a part of the keys, or where warps have keys of a step each, of a warp
    in it. `bound` is what rounding explains of O so far."""

    seen: Tensor
    bound: Tensor


class Forward:
    """What a block of the forward wrote down, part by part, beside what it should have."""

    def __init__(
        self, problem: Problem, block: Block, inputs: Inputs, written: Written, outputs: Mapping[str, Tensor]
    ) -> None:
        self._problem, self._block, self._written = problem, block, written
        rows = self._rows = problem.rows(block)
        self._count = len(rows.at[0])
        # Which of the block's rows are of a head, and the query of the first of them.
        self._of_heads = [(head, (rows.at[0] == i).nonzero()[:, 0]) for i, head in enumerate(rows.heads)]
        self._of_heads = [(head, indices) for head, indices in self._of_heads if len(indices)]
        expected = Expected(block.batch, rows.heads, rows.queries, range(written.columns), problem.device)
        o, lse = problem.case.reference(inputs, expected)
        self._ends = {"o": (outputs["o"], o)} | {
            "lse": (outputs["lse"].transpose(-1, -2)[..., None], lse.transpose(-1, -2)[..., None])
        }
        kv_head = rows.heads.start // problem.group
        k, v = (problem.of_head(x, block.batch, kv_head, keys=True) for x in problem.case.keys_and_values(inputs))
        k, self._v = (pad(x, (0, 0, 0, written.columns - x.shape[0])) for x in (k, v))
        bounds = ScoreBounds.of(problem, problem.of_rows(inputs.q, block.batch, rows), k, expected)
        self._off, self._relative = bounds.score[rows.at], bounds.relative[rows.at]
        self._score = expected["mask"][rows.at]
        self._visible = self._score > -math.inf
        self._read = read_range(self._visible)
        # Of each stage up to the mask.
        self._scored = {"S": (expected["S"][rows.at], bounds.product[rows.at])}
        for name in written.stages[1 : written.stages.index("mask")]:
            bound = bounds.scaled if name == "scaled" else bounds.score
            self._scored[name] = expected[name][rows.at], bound[rows.at]
        if not inputs.call.get("dropout_p"):
            expected.keep_all()
        self._keep = expected["keep"][rows.at]
        self._sink = inputs.call["sink"].double()[rows.heads.start + rows.at[0]] if problem.spec.sink else None
        self._rounding = Rounding.of(problem.spec)
        self._empty = torch.zeros_like(self._visible)

    def parts(self) -> Iterator[Part]:
        """In the order in which a block goes through them: from the last keys to the first."""
        problem = self._problem
        ends = []
        for tiles in problem.tiles_of_parts(self._block) if problem.spec.split_kv else [self._all_tiles]:
            walks = [_Walk(self._empty, self._v.new_zeros(self._count, self._v.shape[1])) for _ in self._warps]
            for step, walk in self._steps(tiles, walks):
                yield from self._scores(step)
                yield from self._softmax(step, walk)
            ends.append((tiles, walks))
        yield from self._end(ends)

    @property
    def _warps(self) -> range:
        return range(self._problem.key_warps)

    @property
    def _all_tiles(self) -> range:
        return range(self._written.steps // len(self._warps))

    def _of_block(self, x: Tensor) -> Tensor:
        """The block's rows of q or o."""
        return self._problem.of_rows(x, self._block.batch, self._rows)[self._rows.at]

    def _steps(self, tiles: range, walks: Sequence[_Walk]) -> Iterator[tuple[_Step, _Walk]]:
        """Those of some tiles that some warp took, or should have."""
        running, there = self._written["running"]
        columns = running[:, 0].masked_fill(~there[:, 0], -1).amax(1).int().tolist()
        size = self._problem.tile_n // len(walks)
        phase = max(columns) % size if max(columns) >= 0 else 0  # steps of a window may begin anywhere
        for tile in reversed(tiles):
            for warp, walk in enumerate(walks):
                number = tile * len(walks) + warp
                column = number * size + phase
                span = slice(column, min(column + size, self._written.columns))
                walk.seen = walk.seen.clone()
                walk.seen[:, span] = self._visible[:, span]
                reach = slice(column, min(tiles.stop * self._problem.tile_n + phase, self._written.columns))
                if columns[number] >= 0 or self._visible[:, span].any():
                    yield _Step(number, tile, column, span, reach, walk.seen[:, reach]), walk

    def _by_head(self, name: str, tile: int | None, column: int | None, *of_rows: Tensor) -> Iterator[Part]:
        """Captured, expected, bound and where anything was captured, of the block's rows."""
        for head, indices in self._of_heads:
            row = self._rows.queries.start + int(self._rows.at[1][indices[0]])
            yield Part(name, tile, head, row, column, *(x[indices] for x in of_rows))

    def _part(self, step: _Step, name: str, expected: Tensor, bound: Tensor, read: bool = False) -> Iterator[Part]:
        """Of a stage of scores; `read`: only of keys that the block reads, for others are no numbers of the call."""
        values, there = (x[: self._count, step.span] for x in self._written[name])
        expected, bound = expected[:, step.span], bound[:, step.span] + TINY
        # A warp that sees nothing of a step leaves out the step.
        judged = there | self._visible[:, step.span]
        if read:
            judged = judged & self._read[step.span] & ~expected.isnan()
        bound = bound.masked_fill(~judged, math.inf)
        return self._by_head(name, step.tile, step.column, values, expected, bound, there)

    def _row_part(
        self, tile: int | None, name: str, values: Tensor, expected: Tensor, bound: Tensor, there: Tensor
    ) -> Iterator[Part]:
        """One number a row."""
        return self._by_head(name, tile, None, *(x[:, None] for x in (values, expected, bound + TINY, there)))

    def _scores(self, step: _Step) -> Iterator[Part]:
        for name, (expected, bound) in self._scored.items():
            yield from self._part(step, name, expected, bound, read=True)
        yield from self._part(step, "mask", self._score, self._off.masked_fill(~self._visible, 0.0))

    def _softmax(self, step: _Step, walk: _Walk) -> Iterator[Part]:
        """All is compared for the reference that the kernel has, so long as that may be one."""
        running, there = (x[step.number] for x in self._written["running"])
        reference, captured_sum = running[1, : self._count], running[2, : self._count]
        there = there[0, : self._count]
        judged = there | self._visible[:, step.span].any(1)
        score = self._score[:, step.reach].masked_fill(~step.seen, -math.inf)

        largest = score.amax(1)
        nearest = reference.maximum(largest - _HEADROOM).minimum(largest)
        nearest = torch.where(reference.isnan(), largest, nearest)
        loose = self._off[:, step.reach].masked_fill(~step.seen, 0.0).amax(1)
        loose = loose + LSE_RELATIVE * reference.abs().nan_to_num(posinf=0.0)
        bound = loose.masked_fill(~judged, math.inf)
        yield from self._row_part(step.tile, "max", reference, nearest, bound, there)

        shift = reference.masked_fill(reference == -math.inf, 0.0)[:, None]
        relative = self._relative + LSE_RELATIVE * shift.abs().nan_to_num()
        p = torch.exp(self._score - shift)
        yield from self._part(step, "P", p, p * relative)

        # In units of o: divided by the sum, and of what is kept as much as of all. P is rounded to 16 bits.
        v, keep = self._v[step.reach], self._keep[:, step.reach]
        expected, walk.bound, total = mean(score, reference, v, keep, loose, self._rounding)
        bound = (total * (LSE_ABSOLUTE + loose)).masked_fill(~judged, math.inf)
        yield from self._row_part(step.tile, "sum", captured_sum, total, bound, there)
        if self._problem.spec.dropout:
            # In Hopper's family that is of P in 16 bits.
            off = relative + (self._rounding.unit if self._problem.kernel.family == "sm90" else 0.0)
            yield from self._part(step, "dropout", p * (self._keep > 0), p * off + self._rounding.least)

        values, there = (x[step.number, : self._count] for x in self._written["O"])
        captured = values * torch.where(captured_sum > 0, self._keep.max() / captured_sum, 1.0)[:, None]
        bound = (walk.bound + TINY).masked_fill(~judged[:, None], math.inf)
        yield from self._by_head("O", step.tile, 0, captured, expected, bound, there)

    def _end(self, ends: Sequence[tuple[range, Sequence[_Walk]]]) -> Iterator[Part]:
        """What the block of each part leaves, and what is made of that."""
        lse_found, lse = (self._of_block(x)[:, 0] for x in self._ends["lse"])
        o_bound = torch.zeros_like(self._v[:1])
        for number, (tiles, walks) in enumerate(ends):
            seen = torch.stack([walk.seen for walk in walks]).any(0)
            score = self._score.masked_fill(~seen, -math.inf)
            lse_part = score.logsumexp(1)
            if self._sink is not None and number == 0:
                lse_part = lse_part.logaddexp(self._sink)
            bound = o_bound.new_zeros(o_bound.shape)
            for walk in walks:
                lse_walk = self._score.masked_fill(~walk.seen, -math.inf).logsumexp(1)
                bound = bound + _share(lse_walk, lse_part) * walk.bound
            o_bound = o_bound + _share(lse_part, lse) * bound
            if self._problem.spec.split_kv:
                weights = _share(score, lse_part[:, None])[..., 0] * self._keep
                tile = tiles.start if tiles else None  # the last of its steps
                values, there = (x[number, : self._count] for x in self._written["o_part"])
                yield from self._by_head("o_part", tile, 0, values, weights @ self._v, bound + TINY, there)
                values, there = (x[number, : self._count] for x in self._written["lse_part"])
                yield from self._row_part(tile, "lse_part", values, lse_part, lse_bound(lse_part), there)
        o, expected = map(self._of_block, self._ends["o"])
        bound = o_bound + self._rounding.unit * expected.abs() + self._rounding.least
        yield from self._by_head("o", None, 0, o, expected, bound, torch.ones_like(o, dtype=torch.bool))
        everywhere = torch.ones_like(lse, dtype=torch.bool)
        yield from self._row_part(None, "lse", lse_found, lse, lse_bound(lse), everywhere)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole) with one dimension more: what part of a sum of exponentials the exponentials of another are. 0
    where there are none."""
    return torch.exp(part - whole).masked_fill(part == -math.inf, 0.0)[..., None]
