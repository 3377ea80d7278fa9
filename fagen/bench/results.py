"""What a benchmark on a GPU found: rates of contestants beside each other, and the tables that show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fagen.bench import goals
from fagen.bench.contestants import CUDNN

OURS = "fagen"


class Row(Protocol):
    """One problem."""

    @property
    def name(self) -> str:
        """As the tables call it."""

    @property
    def reference(self) -> goals.Reference | None:
        """What the row is to reach, for the rows of the tables."""


@dataclass(frozen=True)
class Table:
    """A table of text: the first column names the row, numbers stand in the others."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Machine:
    """Where a benchmark ran: the card, the architecture of fagen's kernels, PyTorch's version, and what the driver is
    for."""

    card: str
    arch: str
    torch: str
    driver: str


@dataclass(frozen=True)
class Rates:
    """The rate of each contestant in a row, None for one that failed, of which `failures` has the reason.

    `difference`: ||fagen - other|| / ||other|| of the results, `compared_with` names the other.
    """

    row: Row
    rates: Mapping[str, float | None]
    difference: float | None = None
    compared_with: str | None = None
    failures: Mapping[str, str] = field(default_factory=dict)

    def ratio(self, other: str) -> float | None:
        """How many times as fast as `other` fagen is."""
        return quotient(self.rates.get(OURS), self.rates.get(other))

    @property
    def cudnn_name(self) -> str:
        """The contestant whose rate goals are multiples of."""
        return CUDNN

    @property
    def cudnn(self) -> float | None:
        """Its rate."""
        return self.rates.get(self.cudnn_name)

    def to_cudnn(self, name: str) -> float | None:
        """How many times as fast as that a contestant is."""
        return quotient(self.rates.get(name), self.cudnn)

    @property
    def goal(self) -> float | None:
        """The rate to reach: the row's goal, scaled by cuDNN's rate in this run."""
        reference, cudnn = self.row.reference, self.cudnn
        return reference.goal_today(cudnn) if reference and cudnn else None

    @property
    def goal_ratio(self) -> float | None:
        """fagen's part of the goal."""
        return quotient(self.rates.get(OURS), self.goal)

    @property
    def fa3_scaled(self) -> float | None:
        """The rate of FlashAttention-3 in the run that the goals are from, scaled by cuDNN's in this one."""
        reference, cudnn = self.row.reference, self.cudnn
        return reference.fa3_today(cudnn) if reference and cudnn else None

    @property
    def fa3_scaled_ratio(self) -> float | None:
        """How many times as fast as that fagen is."""
        return quotient(self.rates.get(OURS), self.fa3_scaled)


@dataclass(frozen=True)
class Report:
    """All results of a run."""

    machine: Machine
    results: tuple[Rates, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each contestant that failed: in how many rows, and why in the first."""
        first: dict[str, tuple[Row, str]] = {}
        count: dict[str, int] = {}
        for result in self.results:
            for name, reason in result.failures.items():
                first.setdefault(name, (result.row, reason))
                count[name] = count.get(name, 0) + 1
        return tuple(
            f"{name} failed in {count[name]} of {len(self.results)} rows; {row.name}: {reason}"
            for name, (row, reason) in first.items()
        )

    @property
    def compared_with(self) -> list[str]:
        """Whose results fagen's were compared with, each once."""
        return list(dict.fromkeys(result.compared_with for result in self.results if result.compared_with))


def markdown(report: Report, tables: Sequence[Table], about: str, *, date: str, command: str) -> str:
    """A section of BENCHMARKS.md; `about` says how it was measured and what the columns mean."""
    machine = report.machine
    where = (
        f"{machine.card}, {date}, kernels for {machine.arch}, PyTorch {machine.torch}, driver for {machine.driver}: "
        f"`{command}`"
    )
    return section(where, about, tables)


def section(where: str, about: str, tables: Sequence[Table]) -> str:
    """Markdown: two paragraphs and the tables."""
    parts = [where, about]
    for table in tables:
        lines = (table.header, ("---", *("---:" for _ in table.header[1:])), *table.rows)
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(parts)


def shown(columns: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, Sequence[str]]]:
    """Of columns, each a header and its cells, those that have a number in any row."""
    return [(header, cells) for header, cells in columns if set(cells) != {"-"}]


def number(value: float | None, digits: int = 0) -> str:
    """A cell of a table; "-" where there is no number."""
    return "-" if value is None else f"{value:.{digits}f}"


def small(value: float | None) -> str:
    """A cell of a table for a number far below 1."""
    return "-" if value is None else f"{value:.1e}"


def percent(value: float | None) -> str:
    """A cell of a table for a part of a whole."""
    return "-" if value is None else f"{100 * value:.0f} %"


def beside(figure: str, result: Rates, name: str) -> str:
    """A contestant's figure in a row and how its rate compares: "664 (1.08)" where cuDNN has one."""
    ratio = result.to_cudnn(name)
    return figure if ratio is None or name == result.cudnn_name else f"{figure} ({number(ratio, 2)})"


def quotient(a: float | None, b: float | None) -> float | None:
    """a / b, None where either is missing."""
    return a / b if a and b else None
