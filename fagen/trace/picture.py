"""Heat maps of a trace: a row a stage, with what was captured, what was expected, and the error over its bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fagen.trace.parts import Part, Stage, stage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fagen.trace.run import Trace

# Inches, at 100 pixels an inch.
_DPI = 100
_WIDTH, _ROW_HEIGHT, _HEAD_HEIGHT = 13.0, 1.7, 0.8
_LEAST, _MOST = 1e-3, 1e2  # of error over bound; a stage departs from 1 on
_NOTHING = "#d0d0d0"  # not computed, not judged, or an infinity
_DEPARTS = "#c62828"
_MOST_TICKS = 8  # named steps
_NARROWEST = 1e-3  # range of values, of the largest: less would show their rounding
_TITLES = ("captured", "expected", "error over bound: departs from 1 on")


@dataclass(frozen=True)
class _Maps:
    """What a row shows: three matrices whose first element is that of `row` and `column`."""

    captured: Tensor
    expected: Tensor
    ratio: Tensor
    row: int
    column: int
    ticks: Sequence[str] | None = None  # of the columns, where they are steps


def save(trace: Trace, path: Path) -> None:
    """Writes the picture; its format is that of the suffix."""
    figure(trace).savefig(path, dpi=_DPI)


def figure(trace: Trace) -> Figure:
    """The picture. Of scores it shows the head with the worst element, of accumulators the step with it."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stages = [stage for stage in trace.stages if stage.worst is not None]
    height = len(stages) * _ROW_HEIGHT + _HEAD_HEIGHT
    drawn = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout=ConstrainedLayoutEngine(hspace=0.04))
    first = trace.first
    assert trace.block is not None
    verdict = "no stage departs" if first is None else f"first stage that departs: {first.name}"
    drawn.suptitle(f"{trace.problem.kernel.slug}, block {trace.problem.place(trace.block)}\n{verdict}", fontsize=10)
    rows = drawn.subplots(len(stages), 3, squeeze=False)
    for axes, stage in zip(rows, stages, strict=True):
        parts = [part for part in trace.parts if part.stage == stage.name and part.head == stage.head]
        of_scores = stage.name in trace.problem.traced.trace_stages
        _draw(axes, stage, _maps(stage, parts, of_scores=of_scores, unit=trace.problem.unit))
    for at, title in zip(rows[0], _TITLES, strict=True):
        at.set_title(title, fontsize=9)
    return drawn


def _draw(axes: Sequence[Axes], stage: Stage, maps: _Maps) -> None:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    shown = torch.cat([x[x.isfinite()] for x in (maps.captured, maps.expected)])
    values = Normalize(*_range(shown)) if shown.numel() else Normalize(0.0, 1.0)
    rows, columns = maps.captured.shape
    extent = (maps.column - 0.5, maps.column + columns - 0.5, maps.row + rows - 0.5, maps.row - 0.5)
    # What is right to the last bit has no place on a scale of logarithms.
    ratio = maps.ratio.clamp(_LEAST, _MOST)
    scales = (("viridis", values), ("viridis", values), ("inferno", LogNorm(_LEAST, _MOST)))
    images = []
    for at, matrix, (colors, norm) in zip(axes, (maps.captured, maps.expected, ratio), scales, strict=True):
        kept = matrix.masked_fill(~matrix.isfinite(), math.nan).cpu().numpy()
        images.append(at.imshow(kept, cmap=colors, norm=norm, aspect="auto", interpolation="nearest", extent=extent))
        at.set_facecolor(_NOTHING)
        at.tick_params(labelsize=7)
        at.yaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        if maps.ticks is not None:
            at.set_xticks(*_named(maps.ticks))
    for image, of in ((images[0], list(axes[:2])), (images[2], [axes[2]])):
        axes[0].figure.colorbar(image, ax=of, pad=0.01).ax.tick_params(labelsize=7)
    axes[0].set_ylabel(stage.name, fontsize=11, fontweight="bold", color=_DEPARTS if stage.departs else "black")
    worst = stage.worst
    if worst is not None and worst.column is not None:
        ring = "#00e5ff" if stage.departs else "#7f7f7f"
        axes[2].plot(worst.column, worst.row, marker="o", markersize=9, markerfacecolor="none", markeredgecolor=ring)


def _range(values: Tensor) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    margin = max(0.0, _NARROWEST * max(abs(low), abs(high)) - (high - low)) / 2
    return low - margin, high + margin


def _named(steps: Sequence[str]) -> tuple[list[int], list[str]]:
    """Where names are, so many that they can be read: of steps of one name, as those of several warps, the first."""
    first = [i for i, name in enumerate(steps) if i == 0 or name != steps[i - 1]]
    some = first[:: -(-len(first) // _MOST_TICKS)]
    return some, [steps[i] for i in some]


def _maps(stage: Stage, parts: Sequence[Part], *, of_scores: bool, unit: str) -> _Maps:
    if parts[0].column is None:  # one number a row: the steps side by side
        last = max(part.row + part.captured.shape[0] for part in parts)
        first = min(part.row for part in parts)
        placed = [(part, part.row - first, step) for step, part in enumerate(parts)]
        ticks = ["end" if part.tile is None else f"{unit} {part.tile}" for part in parts]
        return _Maps(*_joined(placed, last - first, len(parts)), first, 0, ticks)
    if not of_scores:
        parts = [next(part for part in parts if part.tile == stage.tile and stage_of([part]).badness == stage.badness)]
    row, column = min(part.row for part in parts), min(part.column or 0 for part in parts)
    placed = [(part, part.row - row, (part.column or 0) - column) for part in parts]
    rows = max(i + part.captured.shape[0] for part, i, _ in placed)
    columns = max(j + part.captured.shape[1] for part, _, j in placed)
    return _Maps(*_joined(placed, rows, columns), row, column)


def _joined(placed: Sequence[tuple[Part, int, int]], rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Captured, expected and ratio of several parts, each put where it belongs in one matrix; NaN elsewhere."""
    captured, expected, ratio = (placed[0][0].captured.new_full((rows, columns), math.nan) for _ in range(3))
    for part, i, j in placed:
        at = slice(i, i + part.captured.shape[0]), slice(j, j + part.captured.shape[1])
        captured[at], expected[at] = part.captured, part.expected
        ratio[at] = part.ratio.masked_fill(~part.judged, math.nan)
    return captured, expected, ratio
