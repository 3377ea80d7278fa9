"""The stages of a block of the backward: of the one that keeps keys and steps through queries, or of dQ's, which keeps
queries and steps through keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fagen import stages
from fagen.check import GRADIENT_BUDGET, LSE_ABSOLUTE, LSE_RELATIVE, Inputs, gradient_bound
from fagen.trace.block import Block, Problem, Written
from fagen.trace.expected import FLOAT32, TINY, Expected, Rounding, ScoreBounds, lse_bound, read_range
from fagen.trace.parts import Part


@dataclass(frozen=True)
class _Step:
    number: int  # where accumulators of the step are
    tile: int
    head: int  # index in the heads of the block
    rows: slice  # of the block's queries
    keys: slice  # of the block's keys


@dataclass(frozen=True)
class _Sum:
    """An accumulator so far, and what rounding explains of it."""

    value: Tensor
    bound: Tensor

    def plus(self, weights: Tensor, off: Tensor, x: Tensor, rounding: Rounding) -> _Sum:
        """With `weights @ x` more, for weights that are off by `off` and then rounded to 16 bits."""
        size = x.abs()
        terms = weights.shape[1] * FLOAT32
        lost = (off + (rounding.unit + terms) * weights.abs() + rounding.least) @ size
        return _Sum(self.value + weights @ x, self.bound + lost + FLOAT32 * self.value.abs())


class Backward:
    """What a block of the backward wrote down, part by part, beside what it should have."""

    def __init__(
        self, problem: Problem, block: Block, inputs: Inputs, written: Written, outputs: Mapping[str, Tensor]
    ) -> None:
        self._problem, self._block, self._written, self._outputs = problem, block, written, outputs
        case, batch = problem.case, block.batch
        seqlen_q, seqlen_k = problem.lengths(batch)
        if problem.keeps_keys:
            heads = range(block.head * problem.group, (block.head + 1) * problem.group)
            rows, first_key = range(seqlen_q), block.tile * problem.tile_n
            kv_head = block.head
        else:
            heads = range(block.head, block.head + 1)
            first = block.tile * problem.tile_m
            rows, first_key = range(first, min(first + problem.tile_m, seqlen_q)), 0
            kv_head = block.head // problem.group
        keys = range(first_key, first_key + written.columns)
        self._heads, self._rows, self._keys, self._kv_head = heads, rows, keys, kv_head
        self._adds_to_queries = problem.keeps_keys and "dQ" in stages.of_steps(problem.kernel)
        self._valid_keys = min(keys.stop, seqlen_k) - keys.start

        self._expected = expected = Expected(batch, heads, rows, keys, problem.device)
        d_o, d_lse = case.upstream(problem.device)
        self._gradients = dict(
            zip(("dq", "dk", "dv"), case.reference_gradients(inputs, d_o, d_lse, expected)[:3], strict=True)
        )
        if not inputs.call.get("dropout_p"):
            expected.keep_all()
        o, lse = case.reference(inputs)
        spread, _ = case.reference(replace(inputs, v=inputs.v.abs()))  # sum of P |v|
        self._q, self._d_o = self._of_heads(inputs.q), self._of_heads(d_o)
        k, v = (problem.of_head(x, batch, kv_head, keys=True) for x in (inputs.k, inputs.v))
        self._k, v = (pad(x, (0, 0, 0, written.columns))[keys.start : keys.stop] for x in (k, v))
        self._lse = self._of_heads(lse.transpose(-1, -2)[..., None])[..., 0]
        self._visible = expected["mask"] > -math.inf
        self._read = read_range(self._visible.transpose(1, 2))[:, None] & read_range(self._visible)

        rounding = self._rounding = Rounding.of(problem.spec)
        bounds = self._bounds = ScoreBounds.of(problem, self._q, self._k, expected)
        lse_size = self._lse.abs().nan_to_num(posinf=0.0)
        self._relative = bounds.relative + LSE_ABSOLUTE + LSE_RELATIVE * lse_size[:, :, None]

        # Of P as dropout leaves it.
        self._kept_off = expected["dropout"] * self._relative + TINY * expected["keep"]

        # delta is of o as the forward left it, in 16 bits.
        o = self._of_heads(o)
        off = bounds.score.masked_fill(~self._visible, 0.0).amax(2, keepdim=True) + LSE_ABSOLUTE
        o_off = (rounding.unit + 2 * off) * self._of_heads(spread) + rounding.unit * o.abs() + rounding.least
        delta = (self._d_o * o).sum(2)
        if d_lse is not None:
            delta -= self._of_heads(d_lse.transpose(-1, -2)[..., None])[..., 0]
        self._delta = delta.masked_fill(self._lse == -math.inf, 0.0)
        self._delta_bound = (self._d_o.abs() * (o_off + problem.spec.dim_v * FLOAT32 * o.abs())).sum(2) + FLOAT32
        self._dp_bound = problem.spec.dim_v * FLOAT32 * self._d_o.norm(dim=2)[:, :, None] * v.norm(dim=1)

    def parts(self) -> Iterator[Part]:
        """In the order in which the block goes through them."""
        dims = {"dK": self._problem.spec.head_dim, "dV": self._problem.spec.dim_v, "dQ": self._problem.spec.head_dim}
        sums = {}
        for name, dim in dims.items():
            zero = self._q.new_zeros(len(self._rows) if name == "dQ" else len(self._keys), dim)
            sums[name] = _Sum(zero, zero)
        for step in self._steps():
            yield from self._scores(step)
            parts = list(self._score_gradients(step))
            yield from (part for part, _ in parts)
            gradient, off = parts[-1]
            yield from self._accumulators(step, sums, gradient.expected, off)
        yield from self._end(sums)

    def _of_heads(self, x: Tensor) -> Tensor:
        """The block's rows (heads, rows, dim) of q or o."""
        of_each = [self._problem.of_head(x, self._block.batch, head) for head in self._heads]
        return torch.stack(of_each)[:, self._rows.start : self._rows.stop]

    def _captured(self, name: str) -> tuple[Tensor, Tensor]:
        """A stage of scores (heads, rows, keys), and where it was written."""
        shape = len(self._heads), self._written.head_rows, self._written.columns
        values, there = (x.view(shape)[:, : len(self._rows)] for x in self._written[name])
        return values, there

    def _steps(self) -> Iterator[_Step]:
        """Those that the block took, or should have."""
        _, there = self._captured("S")
        m_tiles, n_tiles = self._problem.tiles(self._block.batch)
        tile_m, tile_n = self._problem.tile_m, self._problem.tile_n
        steps = []
        if self._problem.keeps_keys:
            for head in range(len(self._heads)):
                for tile in range(m_tiles):
                    rows = slice(tile * tile_m, min((tile + 1) * tile_m, len(self._rows)))
                    steps.append(_Step(head * m_tiles + tile, tile, head, rows, slice(0, len(self._keys))))
        else:
            for tile in range(n_tiles):
                keys = slice(tile * tile_n, (tile + 1) * tile_n)
                steps.append(_Step(tile, tile, 0, slice(0, len(self._rows)), keys))
        for step in steps:
            at = step.head, step.rows, step.keys
            if there[at].any() or self._visible[at].any():
                yield step

    def _part(self, step: _Step, name: str, expected: Tensor, bound: Tensor, read: bool = False) -> Part:
        """Of a stage of scores; `read`: only of rows and keys that the block reads."""
        at = step.head, step.rows, step.keys
        values, there = (x[at] for x in self._captured(name))
        judged = there | self._visible[at]
        if read:
            judged = judged & self._read[step.rows, step.keys] & ~expected[at].isnan()
        bound = (bound[at] + TINY).masked_fill(~judged, math.inf)
        row, column = self._rows.start + step.rows.start, self._keys.start + step.keys.start
        return Part(name, step.tile, self._heads[step.head], row, column, values, expected[at], bound, there)

    def _row_part(self, step: _Step, name: str, number: int, expected: Tensor, bound: Tensor) -> Part:
        """One number a row, which the block has read."""
        shape = 2, len(self._heads), self._written.head_rows
        values, there = (
            x.view(shape)[number, step.head, : len(self._rows)][step.rows, None] for x in self._written["between"]
        )
        at = step.head, step.rows
        row = self._rows.start + step.rows.start
        columns = values, expected[at][:, None], bound[at][:, None] + TINY, there
        return Part(name, step.tile, self._heads[step.head], row, None, *columns)

    def _scores(self, step: _Step) -> Iterator[Part]:
        bounds, there, expected = self._bounds, self._written.stages, self._expected
        yield self._part(step, "S", expected["S"], bounds.product, read=True)
        for name in there[1 : there.index("mask")]:
            yield self._part(step, name, expected[name], bounds.scaled if name == "scaled" else bounds.score, read=True)
        yield self._part(step, "mask", expected["mask"], bounds.score.masked_fill(~self._visible, 0.0))
        # The forward leaves an infinite sum where a row sees nothing, which makes its probabilities zero.
        lse = self._lse.masked_fill(self._lse == -math.inf, math.inf)
        bound = lse_bound(self._lse)
        yield self._row_part(step, "lse", 0, lse, bound)
        yield self._part(step, "P", expected["P"], expected["P"] * self._relative)
        if self._problem.kernel.transposed:
            yield from self._weighted_probabilities(step)

    def _weighted_probabilities(self, step: _Step) -> Iterator[Part]:
        """P times the derivatives of modifications, as the gradients of the reference have them where there are any."""
        p = weighted = self._expected["P"]
        off = p * self._relative
        for name, gradient, after in self._modified():
            if f"P_{name}" not in self._written.stages:
                break
            factor = torch.where(p == 0, 0.0, after / gradient)
            weighted = weighted * factor
            off = off * factor.abs().clamp(min=1.0) + 2 * LSE_ABSOLUTE * p
            yield self._part(step, f"P_{name}", weighted, off, read=True)

    def _modified(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Each modification, from the last to the first: the gradients of the score after it and before it."""
        names = ["scaled", *(mod.name for mod in self._problem.spec.mods)]
        gradient = self._expected["dmask"]
        for name, before in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            after = self._expected[f"d{before}"]
            yield name, gradient, after
            gradient = after

    def _score_gradients(self, step: _Step) -> Iterator[tuple[Part, Tensor]]:
        """From dP to the gradient of the scaled product, and what rounding explains of each."""
        expected, spec, there = self._expected, self._problem.spec, self._written.stages
        p = expected["P"]
        part = self._part(step, "dP", expected["ddropout"], self._dp_bound, read=True)
        yield part, part.bound
        part = self._row_part(step, "delta", 1, self._delta, self._delta_bound)
        yield part, part.bound
        if spec.dropout:
            part = self._part(step, "dropout", expected["dropout"], self._kept_off)
            yield part, part.bound
        gradient = expected["dmask"]
        dp_bound = expected["keep"].max() * self._dp_bound
        off = p * (dp_bound + self._delta_bound[:, :, None]) + gradient.abs() * self._relative
        off = off + TINY * (expected["dP"].abs() + self._delta.abs()[:, :, None])  # of a P that was flushed
        if "dS" in there:
            yield self._part(step, "dS", gradient, off), off
        for name, gradient, after in self._modified():
            growth = torch.where(gradient == 0, 1.0, after / gradient).abs().clamp(min=1.0)
            off = off * growth + 2 * LSE_ABSOLUTE * gradient.abs()
            if f"dS_{name}" in there:
                yield self._part(step, f"dS_{name}", after, off), off

    def _accumulators(self, step: _Step, sums: dict[str, _Sum], gradient: Tensor, off: Tensor) -> Iterator[Part]:
        at, rounding = (step.head, step.rows, step.keys), self._rounding
        off = off[at]
        q, d_o, k = self._q[at[:2]], self._d_o[at[:2]], self._k[step.keys]
        row = self._rows.start + step.rows.start
        if not self._problem.keeps_keys:
            sums["dQ"] = sums["dQ"].plus(gradient, off, k, rounding)
            yield self._sum_part(step, "dQ", self._block.head, row, sums["dQ"])
            return
        weights = self._expected["dropout"][at]
        sums["dK"] = sums["dK"].plus(gradient.T, off.T, q, rounding)
        sums["dV"] = sums["dV"].plus(weights.T, self._kept_off[at].T, d_o, rounding)
        for name in ("dK", "dV"):
            yield self._sum_part(step, name, self._block.head, self._keys.start, sums[name])
        if self._adds_to_queries:
            zero = q.new_zeros(q.shape)
            of_step = _Sum(zero, zero).plus(gradient, off, k, rounding)
            yield self._sum_part(step, "dQ", self._heads[step.head], row, of_step)

    def _sum_part(self, step: _Step, name: str, head: int, row: int, of: _Sum) -> Part:
        values, there = (x[step.number] for x in self._written[name])
        count = self._valid_keys if name in ("dK", "dV") else of.value.shape[0]
        tensors = (x[:count] for x in (values, of.value, of.bound + TINY, there))
        return Part(name, step.tile, head, row, 0, *tensors)

    def _end(self, sums: Mapping[str, _Sum]) -> Iterator[Part]:
        """What the block leaves in the end; dQ of the block that keeps keys is that of all blocks."""
        if not self._problem.keeps_keys:
            yield self._end_part("dq", self._block.head, sums["dQ"])
            return
        yield self._end_part("dk", self._block.head, sums["dK"])
        yield self._end_part("dv", self._block.head, sums["dV"])
        for head in self._heads if self._adds_to_queries else ():
            yield self._end_part("dq", head, None)

    def _end_part(self, name: str, head: int, of: _Sum | None) -> Part:
        keys = name in ("dk", "dv")
        first, count = (self._keys.start, self._valid_keys) if keys else (self._rows.start, len(self._rows))

        def of_block(x: Tensor) -> Tensor:
            return self._problem.of_head(x, self._block.batch, head, keys=keys)[first : first + count]

        value, expected = of_block(self._outputs[name]), of_block(self._gradients[name])
        if of is None:
            bound = of_block(gradient_bound(self._gradients[name], GRADIENT_BUDGET[self._problem.spec.dtype]))
        else:
            scale = 1.0 if name == "dv" else self._problem.scale
            bound = scale * of.bound[:count] + self._rounding.unit * expected.abs() + self._rounding.least
        return Part(name, None, head, first, 0, value, expected, bound, torch.ones_like(value, dtype=torch.bool))
