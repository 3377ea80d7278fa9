"""Draws a table of speeds: a group of bars a row, one colour a contestant. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from fagen.bench.contestants import CUDNN, FA2, FLEX
from fagen.bench.results import OURS
from fagen.bench.speed import CUDNN_PLAIN, DETERMINISTIC, PACKED, PLAIN, SpeedReport, cell, columns
from fagen.errors import SpecError, ToolchainError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Inches, at 100 pixels an inch: a bar as high as its figure's text.
_DPI = 100
_WIDTH = 10.0
_BAR = 0.17
_GAP = 0.16  # between rows
_TEXT = 8.5  # points

_COLORS = {
    OURS: "#d62728",
    FA2: "#9ecae1",
    CUDNN: "#2f7d32",
    FLEX: "#f2a93b",
    "flash-attn": "#8c6bb1",
    "FA3": "#3173b4",
    "FA4": "#133e74",
}
_PALE = (FA2, FLEX, PLAIN, CUDNN_PLAIN)  # black text stands on these
_LIKE = {PLAIN: OURS, CUDNN_PLAIN: CUDNN}  # the same colour, pale and hatched
_LABELS = {PLAIN: f"{OURS} without softcap", CUDNN_PLAIN: f"{CUDNN} without softcap"}


def check(path: Path, flag: str = "--plot") -> None:
    """Before long work: ToolchainError without matplotlib, SpecError for a path that could not be written."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ToolchainError(f"{flag} needs matplotlib: pip install 'fagen[bench]' (or matplotlib alone)")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise SpecError(f"{flag} {str(path)!r} is not named .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise SpecError(f"{flag} {str(path)!r}: no such directory")


def save(report: SpeedReport, path: Path, *, date: str) -> None:
    """Writes the picture."""
    figure(report, date=date).savefig(path, dpi=_DPI)


def figure(report: SpeedReport, *, date: str) -> Figure:
    """The picture: as many bars as the report has figures, in a row those of one problem, fagen's first."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    shown = [name for name in columns() if name not in (PACKED, DETERMINISTIC)]
    names = [name for name in shown if any(result.rates.get(name) for result in report.results)]
    bars = sum(bool(value) for result in report.results for value in result.rates.values())
    height = bars * _BAR + len(report.results) * _GAP
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    drawn = Figure(figsize=(_WIDTH, height + 1.6), dpi=_DPI, layout=layout)
    axes = drawn.add_subplot()
    rates = [value for result in report.results for value in (*result.rates.values(), result.goal) if value]
    limit = max([*rates, report.matmul or 0.0, 1.0]) * 1.04
    place = 0.0
    ticks = []
    for result in report.results:
        present = [name for name in names if result.rates.get(name)]
        top = place
        for name in present:
            value = result.rates[name] or 0.0
            _bar(axes, place + _BAR / 2, value, name, cell(result, name), inside=value > 0.15 * limit)
            place += _BAR
        if result.goal:
            axes.vlines(result.goal, top, place, color="black", linewidth=1.4, linestyle=(0, (2, 1)), label="goal")
        ticks.append(((top + place) / 2, result.row.name))
        place += _GAP
    if report.matmul:
        axes.axvline(report.matmul, color="gray", linewidth=1, label="matrix product (cuBLAS)", zorder=0)
    axes.set_yticks([middle for middle, _ in ticks], [name for _, name in ticks], fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(max(place - _GAP / 2, _BAR), -_GAP / 2)
    axes.set_xlim(0, limit)
    axes.set_xlabel("TFLOP/s (in parentheses: over cuDNN in the same run)")
    axes.set_title(f"Attention {report.direction}, bf16, {report.machine.card}, {date}", pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    labels = [label for name in names if (label := _LABELS.get(name, name)) in found]
    labels += [label for label in found if label not in labels]
    handles = [found[label] for label in labels]
    drawn.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return drawn


def _bar(axes: Axes, place: float, value: float, name: str, text: str, *, inside: bool) -> None:
    """A bar with its figure at its end: inside, so that the goal's mark does not cross it, where it is long enough."""
    from matplotlib.colors import to_rgb
    from matplotlib.patheffects import withStroke

    solid = to_rgb(_COLORS[_LIKE.get(name, name)])
    strength = 0.45 if name in _LIKE else 1.0
    color = tuple(1 - strength * (1 - part) for part in solid)
    axes.barh(
        place,
        value,
        height=_BAR * 0.92,
        color=color,
        hatch="////" if name in _LIKE else None,
        edgecolor="white",
        linewidth=0,
        label=_LABELS.get(name, name),
    )
    axes.annotate(
        text,
        (value, place),
        xytext=(-4 if inside else 3, 0),
        textcoords="offset points",
        horizontalalignment="right" if inside else "left",
        verticalalignment="center",
        fontsize=_TEXT,
        fontweight="bold" if name == OURS else "normal",
        color="white" if inside and name not in _PALE else "black",
        path_effects=[withStroke(linewidth=2, foreground=color if inside else "white")],
        zorder=4,
    )
