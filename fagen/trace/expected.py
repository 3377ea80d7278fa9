"""What a block should have computed, from the reference, and by how much rounding may change that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fagen.call import DTYPES
from fagen.check import LSE_ABSOLUTE, LSE_RELATIVE
from fagen.spec import AttentionSpec
from fagen.trace.block import Problem

FLOAT32 = 2.0**-23  # of a sum or a product, relative: tensor cores truncate
TINY = 2.0**-125  # probabilities below are flushed to zero
_UNSEEN = {"mask": -math.inf, "P": 0.0, "keep": 0.0, "dropout": 0.0}  # of a key that nobody sees; else unknown, NaN


class Expected:
    """Takes from the reference what it computes of some heads of a batch entry, of some queries and keys; and where it
    computes gradients those, as `dmask`."""

    def __init__(self, batch: int, heads: range, rows: range, keys: range, device: torch.device) -> None:
        self._batch, self._heads, self._rows, self._keys = batch, heads, rows, keys
        self._device = device
        self._found: dict[str, Tensor] = {}

    def __call__(self, name: str, first_batch: int, rows: range, keys: range, values: Tensor) -> None:
        if not first_batch <= self._batch < first_batch + values.shape[0]:
            return
        self._keep(name, first_batch, rows, keys, values.detach())
        if values.requires_grad:

            def hook(gradient: Tensor) -> None:
                self._keep(f"d{name}", first_batch, rows, keys, gradient)

            values.register_hook(hook)  # type: ignore[no-untyped-call]

    def keep_all(self) -> None:
        """Says that dropout keeps all, of which the reference then says nothing."""
        self._found["keep"] = torch.ones_like(self["P"])
        self._found["dropout"], self._found["ddropout"] = self["P"], self["dP"]

    def _keep(self, name: str, first_batch: int, rows: range, keys: range, values: Tensor) -> None:
        i, j = _common(rows, self._rows), _common(keys, self._keys)
        if i and j:
            heads = slice(self._heads.start, self._heads.stop)
            part = values[self._batch - first_batch, heads, _within(i, rows), _within(j, keys)]
            self[name][:, _within(i, self._rows), _within(j, self._keys)] = part

    def __getitem__(self, name: str) -> Tensor:
        """(heads, rows, keys)."""
        if name not in self._found:
            shape = len(self._heads), len(self._rows), len(self._keys)
            unseen = 0.0 if name.startswith("d") else math.nan
            unseen = _UNSEEN.get(name, unseen)
            self._found[name] = torch.full(shape, unseen, dtype=torch.float64, device=self._device)
        return self._found[name]


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


@dataclass(frozen=True)
class ScoreBounds:
    """What rounding explains of scores (heads, rows, keys)."""

    product: Tensor
    scaled: Tensor
    score: Tensor  # after the modifications
    relative: Tensor  # of exp(score)

    @classmethod
    def of(cls, problem: Problem, q: Tensor, k: Tensor, expected: Expected) -> ScoreBounds:
        """For `q` (heads, rows, D) and `k` (keys, D). A product of D terms in float32 is off by D roundings of its
        largest partial sum; a modification by what SEMANTICS allows lse."""
        norms = q.norm(dim=2)[:, :, None] * k.norm(dim=1)
        product = problem.spec.head_dim * FLOAT32 * norms
        scaled = problem.scale * (product + 4 * FLOAT32 * norms)
        score = scaled
        if problem.spec.mods:
            size = sum(expected[name].abs().nan_to_num(posinf=0.0) for name in ("scaled", "mask"))
            score = scaled + LSE_ABSOLUTE + LSE_RELATIVE * size
        return cls(product, scaled, score, torch.expm1(score) + 4 * FLOAT32)


def lse_bound(lse: Tensor) -> Tensor:
    """What each may be off by."""
    return (LSE_RELATIVE * lse.abs().nan_to_num(posinf=0.0)).clamp(min=LSE_ABSOLUTE)


def mean(
    score: Tensor, reference: Tensor, v: Tensor, keep: Tensor, off: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, Dv) of the means of `v` (keys, Dv) with weights exp(score - reference), of which dropout multiplies those
    above by `keep`, what rounding them to 16 bits and scores that are off by `off` (rows,) explain of it, and the sums
    of the weights; for `score` and `keep` (rows, keys), `reference` (rows,)."""
    weights = torch.exp(score - reference.masked_fill(reference == -math.inf, 0.0)[:, None])
    total = weights.sum(1)
    inverse = torch.where(total > 0, 1 / total, 0.0)[:, None]
    loss = rounding.unit + 2 * off[:, None] + LSE_ABSOLUTE + score.shape[1] * FLOAT32
    spread = loss * ((weights * keep) @ v.abs())
    underflow = rounding.least * ((score > -math.inf) * keep) @ v.abs()
    return (weights * keep) @ v * inverse, (spread + underflow) * inverse, total


@dataclass(frozen=True)
class Rounding:
    """To 16 bits: relative, and absolute where numbers underflow."""

    unit: float
    least: float

    @classmethod
    def of(cls, spec: AttentionSpec) -> Rounding:
        info = torch.finfo(DTYPES[spec.dtype])
        return cls(info.eps / 2, info.smallest_normal * info.eps / 2)


def read_range(visible: Tensor) -> Tensor:
    """Of which indices of the last dimension a block reads the memory: from the first that is seen to the last."""
    seen = visible.flatten(0, -2).any(0)
    found = seen.nonzero()
    if found.numel():
        seen[int(found.min()) : int(found.max()) + 1] = True
    return seen
