"""What was captured beside what was expected, by stage and step, and how it is judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

_KINDS = (("captured", math.nan), ("expected", math.nan), ("bound", math.inf))  # and what is where nothing is


@dataclass(frozen=True)
class Element:
    """One element, by its place in the whole call: query and key of a score, query or key and dim of an accumulator."""

    row: int
    column: int | None  # None for a number a row
    captured: float | None  # None where the kernel did not compute what it should have
    expected: float


@dataclass(frozen=True)
class Part:
    """One stage at one step. The tensors are float64 (rows, columns); `bound` is infinite where nothing is judged."""

    stage: str
    tile: int | None  # of keys, in a block that keeps keys of queries; None at the end of the block
    head: int  # of q, or of k and v for what keys have
    row: int
    column: int | None
    captured: Tensor
    expected: Tensor
    bound: Tensor
    written: Tensor

    @property
    def judged(self) -> Tensor:
        return self.bound < math.inf

    @property
    def difference(self) -> Tensor:
        """|captured - expected|; 0 between equal infinities, infinite for what is NaN or was not computed."""
        gap = (self.captured - self.expected).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        return gap.masked_fill(self.captured == self.expected, 0.0).masked_fill(~self.written, math.inf)

    @property
    def ratio(self) -> Tensor:
        """Difference over bound; 0 where nothing is judged."""
        difference = self.difference
        ratio = torch.where(difference == 0, 0.0, difference / self.bound)
        return ratio.nan_to_num(nan=math.inf).masked_fill(~self.judged, 0.0)


@dataclass(frozen=True)
class Stage:
    """One stage over all steps that were looked at: the largest error, and the element that is furthest off for what it
    may be."""

    name: str
    error: float  # largest, absolute
    relative: float  # ||captured - expected|| / ||expected||, of what is finite
    badness: float  # of the worst element: its error over what rounding explains
    tile: int | None
    head: int
    worst: Element | None  # None where nothing was judged
    departs: bool


def stage_of(parts: Sequence[Part]) -> Stage:
    """Several steps of one stage as one."""
    ratios = [float(part.ratio.max()) if part.ratio.numel() else 0.0 for part in parts]
    badness = max(ratios)
    judged = [part for part in parts if part.judged.any()]
    worst = parts[ratios.index(badness)] if badness or not judged else judged[0]
    error = square = reference = 0.0
    for part in judged:
        error = max(error, float(part.difference[part.judged].max()))
        finite = part.judged & part.expected.isfinite() & part.captured.isfinite()
        square += float((part.captured - part.expected)[finite].square().sum())
        reference += float(part.expected[finite].square().sum())
    element = None
    if judged:
        flat = int((worst.ratio if badness else worst.judged.int()).argmax())
        i, j = divmod(flat, worst.expected.shape[1])
        element = Element(
            worst.row + i,
            None if worst.column is None else worst.column + j,
            float(worst.captured[i, j]) if worst.written[i, j] else None,
            float(worst.expected[i, j]),
        )
    relative = math.sqrt(square / reference) if reference else math.sqrt(square)
    return Stage(worst.stage, error, relative, badness, worst.tile, worst.head, element, badness > 1)


def canvas(name: str, parts: Sequence[Part]) -> dict[str, Tensor]:
    """Scores of all steps in one rectangle a head, (heads, rows, columns): `name`, its `.expected` and `.bound`, and
    `.first`, its first head, row and column."""
    heads = sorted({part.head for part in parts})
    places = [(part.row, part.column or 0, *part.captured.shape) for part in parts]
    row, column = min(place[0] for place in places), min(place[1] for place in places)
    rows = max(i + height for i, _, height, _ in places) - row
    columns = max(j + width for _, j, _, width in places) - column
    made = {}
    for kind, empty in _KINDS:
        made[_key(name, kind)] = whole = parts[0].captured.new_full((len(heads), rows, columns), empty)
        for part, (i, j, height, width) in zip(parts, places, strict=True):
            span = slice(i - row, i - row + height), slice(j - column, j - column + width)
            whole[heads.index(part.head), span[0], span[1]] = getattr(part, kind)
    return made | {f"{name}.first": torch.tensor([heads[0], row, column])}


def stack(name: str, parts: Sequence[Part]) -> dict[str, Tensor]:
    """What there is for each step, (steps, rows, columns): `name`, its `.expected` and `.bound`, and of each step its
    `.tile`, -1 at the end, `.head` and first `.row`. Tiles that are cut off are filled up."""
    rows = max(part.captured.shape[0] for part in parts)
    made = {}
    for kind, empty in _KINDS:
        values = [getattr(part, kind) for part in parts]
        made[_key(name, kind)] = torch.stack([pad(x, (0, 0, 0, rows - x.shape[0]), value=empty) for x in values])
    return made | {
        f"{name}.tile": torch.tensor([-1 if part.tile is None else part.tile for part in parts]),
        f"{name}.head": torch.tensor([part.head for part in parts]),
        f"{name}.row": torch.tensor([part.row for part in parts]),
    }


def _key(name: str, kind: str) -> str:
    return name if kind == "captured" else f"{name}.{kind}"
