"""The stages of a block that joins the parts of split keys: one row of o."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from fagen.check import LSE_RELATIVE, Inputs
from fagen.trace.block import Block, Problem, Written
from fagen.trace.expected import FLOAT32, TINY, Expected, Rounding, ScoreBounds, lse_bound, mean
from fagen.trace.parts import Part


class Combine:
    """What the block of a row wrote down, part by part, beside what it should have."""

    def __init__(
        self, problem: Problem, block: Block, inputs: Inputs, written: Written, outputs: Mapping[str, Tensor]
    ) -> None:
        self._problem, self._block, self._written, self._outputs = problem, block, written, outputs
        batch, rows = block.batch, problem.rows(block)
        tiles_of_parts = problem.tiles_of_parts(block)
        keys = range(max(problem.lengths(batch)[1], *(tiles.stop * problem.tile_n for tiles in tiles_of_parts)))
        expected = Expected(batch, rows.heads, rows.queries, keys, problem.device)
        self._references = dict(zip(("o", "lse"), problem.case.reference(inputs, expected), strict=True))
        if not inputs.call.get("dropout_p"):
            expected.keep_all()
        kv_head = block.head // problem.group
        k, v = (problem.of_head(x, batch, kv_head, keys=True) for x in problem.case.keys_and_values(inputs))
        k, v = (pad(x, (0, 0, 0, len(keys) - x.shape[0])) for x in (k, v))
        bounds = ScoreBounds.of(problem, problem.of_rows(inputs.q, batch, rows), k, expected)
        score, keep = expected["mask"][0], expected["keep"][0]
        self._rounding = Rounding.of(problem.spec)
        self._lse, self._o, self._o_bound = [], [], []
        for number, tiles in enumerate(tiles_of_parts):
            span = slice(tiles.start * problem.tile_n, tiles.stop * problem.tile_n)
            of_part = score[:, span]
            lse = of_part.logsumexp(1)
            off = bounds.score[0, :, span].masked_fill(of_part == -math.inf, 0.0)
            off = off.amax(1) if off.shape[1] else lse.new_zeros(1)
            off = off + LSE_RELATIVE * lse.abs().nan_to_num(posinf=0.0)
            o, bound, _ = mean(of_part, lse, v[span], keep[:, span], off, self._rounding)
            if problem.spec.sink and number == 0:
                with_sink = lse.logaddexp(inputs.call["sink"].double()[block.head])
                share = torch.exp(lse - with_sink).masked_fill(lse == -math.inf, 0.0)
                lse, o, bound = with_sink, o * share, bound * share
            self._lse.append(lse)
            self._o.append(o)
            self._o_bound.append(bound)

    def parts(self) -> Iterator[Part]:
        """Part by part of the keys, then what is made of all."""
        largest = torch.stack(self._lse).amax()
        reference = 0.0 if largest == -math.inf else largest
        total = total_off = o_off = self._lse[0].new_zeros(1)
        for number, (lse, o, bound) in enumerate(zip(self._lse, self._o, self._o_bound, strict=True)):
            weight = torch.exp(lse - reference)
            off = weight * (2 * lse_bound(lse) + 4 * FLOAT32)
            yield self._number(number, "lse_part", lse, lse_bound(lse))
            yield self._part(number, "o_part", *self._written_of("o_part", number), o, bound + FLOAT32 * o.abs())
            yield self._number(number, "weight", weight, off)
            total, total_off = total + weight, total_off + off + FLOAT32 * weight
            o_off = o_off + weight * bound + off * o.abs()
        yield self._number(None, "sum", total, total_off)

        o, expected = (self._of_row(x) for x in (self._outputs["o"], self._references["o"]))
        inverse = torch.where(total > 0, 1 / total, 0.0)
        bound = o_off * inverse + self._rounding.unit * expected.abs() + self._rounding.least
        yield self._part(None, "o", o, torch.ones_like(o, dtype=torch.bool), expected, bound)
        both = (self._outputs["lse"], self._references["lse"])
        lse, expected = (self._of_row(x.transpose(-1, -2)[..., None]) for x in both)
        yield self._part(None, "lse", lse, torch.ones_like(lse, dtype=torch.bool), expected, lse_bound(expected), None)

    def _of_row(self, x: Tensor) -> Tensor:
        """(1, dim) of o."""
        block = self._block
        return self._problem.of_head(x, block.batch, block.head)[block.tile : block.tile + 1]

    def _written_of(self, name: str, number: int) -> tuple[Tensor, Tensor]:
        """(1, columns): what was captured of a part, and where anything was."""
        values, there = self._written[name]
        return values[number, None], there[number, None]

    def _number(self, part: int | None, name: str, expected: Tensor, bound: Tensor) -> Part:
        captured = self._written_of(name, part or 0)
        return self._part(part, name, *captured, expected[:, None], bound[:, None], None)

    def _part(
        self,
        part: int | None,
        name: str,
        captured: Tensor,
        there: Tensor,
        expected: Tensor,
        bound: Tensor,
        column: int | None = 0,
    ) -> Part:
        return Part(name, part, self._block.head, self._block.tile, column, captured, expected, bound + TINY, there)
