"""One HTML page of benchmarks: tables, and plots of speed, compile time and error. It needs no other file, no network
and no script, and follows the reader's choice of light or dark."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jinja2

from fagen import __version__
from fagen.bench import compile as compile_bench
from fagen.bench import decode, results, speed, variants
from fagen.bench.compile import CompileReport, Job, Timing
from fagen.bench.contestants import CUDNN, FA2, FLEX
from fagen.bench.decode import DecodeReport
from fagen.bench.documents import Run
from fagen.bench.results import OURS, Rates, Report, Table, percent
from fagen.bench.speed import SpeedReport
from fagen.bench.variants import VariantsReport
from fagen.errors import FagenError, SpecError
from fagen.files import replacing

# Classes of page.css, which gives each a colour for light and for dark.
_STYLES = {
    OURS: "ours",
    speed.PACKED: "ours-2",
    speed.DETERMINISTIC: "ours-2",
    speed.PLAIN: "ours-pale",
    decode.ONE_PART: "ours-pale",
    decode.PAGED: "ours-2",
    FA2: "other-1",
    CUDNN: "other-2",
    speed.CUDNN_PLAIN: "other-2-pale",
    FLEX: "other-3",
    "flash-attn": "other-4",
    "FA3": "other-5",
    "FA4": "other-6",
    decode.COPY: "neutral",
}
_ROOM = 1.04  # of an axis, for its largest value
_TICKS = 5  # of an axis, at most


@dataclass(frozen=True)
class Bar:
    """A bar from 0 to `value`, with `text` beside it; without a name where it stands for its group. `low` and
    `high` are the ends of a whisker."""

    name: str
    value: float
    text: str
    style: str = "ours"
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars under one name, and a mark across them, such as a goal."""

    name: str
    bars: tuple[Bar, ...]
    mark: float | None = None
    mark_text: str = ""


@dataclass(frozen=True)
class Chart:
    """Groups of bars on one axis. `line` is a value that runs through all groups."""

    title: str
    unit: str
    groups: tuple[Group, ...]
    line: float | None = None
    line_text: str = ""

    @property
    def limit(self) -> float:
        """The end of the axis."""
        values = [bar.value for group in self.groups for bar in group.bars]
        values += [bar.high for group in self.groups for bar in group.bars if bar.high is not None]
        values += [group.mark for group in self.groups if group.mark is not None]
        return max([value for value in (*values, self.line or 0.0) if math.isfinite(value)], default=0.0) * _ROOM or 1.0

    @property
    def compact(self) -> bool:
        """Whether each group is a line, its name before its only bar."""
        return all(len(group.bars) == 1 and not group.bars[0].name for group in self.groups)

    @property
    def step(self) -> float:
        """From one tick to the next: 1, 2 or 5 times a power of ten."""
        power = 10.0 ** math.floor(math.log10(self.limit / _TICKS))
        return next(factor * power for factor in (1, 2, 5, 10) if factor * power * _TICKS >= self.limit)

    @property
    def ticks(self) -> tuple[float, ...]:
        """Values of the axis that are written down."""
        return tuple(index * self.step for index in range(int(self.limit / self.step) + 1))

    def place(self, value: float) -> str:
        """Where on the axis a value stands, "62.5%"; beyond its end at the end."""
        share = value / self.limit if math.isfinite(value) else 1.0
        return f"{100 * min(max(share, 0.0), 1.0):.2f}%"


@dataclass(frozen=True)
class Section:
    """One measurement. `headline` is its outcome in a line, `facts` says where and how it was taken."""

    title: str
    headline: str
    facts: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]
    legend: tuple[str, ...]
    failures: tuple[str, ...] = ()


def check(path: Path) -> None:
    """Before a long measurement: SpecError for a path that could not be written."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise SpecError(f"--html {str(path)!r} is not named .html")
    if path.is_dir():
        raise SpecError(f"--html {str(path)!r} is a directory")
    try:
        with tempfile.TemporaryFile(dir=path.absolute().parent):
            pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SpecError(f"--html {str(path)!r} cannot be written: {path.absolute().parent}: {reason}") from None


def save(runs: Sequence[Run], path: Path) -> None:
    """Writes the page, in one step: a reader sees the old page or the new one. Raises FagenError where it cannot."""
    text = html(runs)
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise FagenError(f"{path} was not written: {(error.strerror or str(error)).lower()}") from error


def html(runs: Sequence[Run]) -> str:
    """The page of `runs`, in their order."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["tick"] = lambda value: f"{value:.12g}"
    template = environment.get_template("page.html.j2")
    return template.render(sections=[section(run) for run in runs], version=__version__)


def section(run: Run) -> Section:
    """What the page says of one measurement."""
    report = run.report
    if isinstance(report, CompileReport):
        made = _compile(report)
    elif isinstance(report, VariantsReport):
        made = _variants(report)
    elif isinstance(report, DecodeReport):
        made = _decode(report)
    else:
        made = _speed(report)
    return replace(made, facts=(*made.facts, ("date", run.date), ("command", run.command)))


def _speed(report: SpeedReport) -> Section:
    names = speed.columns()
    groups = tuple(_of_row(result, names, partial(speed.cell, result)) for result in report.results)
    product = f"matrix product through cuBLAS, {results.number(report.matmul)}"
    return Section(
        f"{report.direction.capitalize()} on a GPU",
        _headline(report.results),
        _machine(report),
        (
            *_ratios(report.results),
            Chart("Speed", "TFLOP/s, in parentheses over cuDNN", groups, report.matmul, product),
            *_host(report.host_us),
        ),
        speed.tables(report),
        tuple(speed.legend(report)),
        report.failures,
    )


def _decode(report: DecodeReport) -> Section:
    names = decode.columns()
    groups = tuple(_of_row(result, names, partial(_tbps, result)) for result in report.results)
    return Section(
        "Decoding on a GPU",
        _headline(report.results),
        _machine(report),
        (*_ratios(report.results), Chart("Rate of memory", "TB/s", groups)),
        decode.tables(report),
        tuple(decode.legend(report)),
        report.failures,
    )


def _tbps(result: Rates, name: str) -> str:
    return results.number(result.rates.get(name), 2)


def _machine(report: Report) -> tuple[tuple[str, str], ...]:
    machine = report.machine
    return (
        ("card", machine.card),
        ("kernels for", machine.arch),
        ("PyTorch", machine.torch),
        ("driver for", machine.driver),
    )


def _headline(found: Sequence[Rates]) -> str:
    # Of the same problems: with softcap, which cuDNN lacks, a ratio is to cuDNN without.
    same = [result for result in found if result.cudnn_name == CUDNN]
    ratios = [ratio for result in same if (ratio := result.to_cudnn(OURS)) is not None]
    goals = [ratio for result in found if (ratio := result.goal_ratio) is not None]
    parts = []
    if ratios:
        parts.append(
            f"{statistics.geometric_mean(ratios):.2f} times cuDNN in the mean over {_count(ratios, 'problem')}"
        )
    if goals:
        # As the tables print it: a goal that is reached to two digits is reached.
        reached = sum(round(ratio, 2) >= 1 for ratio in goals)
        parts.append(f"{reached} of {_count(goals, 'goal')} reached")
    return ", ".join(parts) or _count(found, "problem")


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _ratios(found: Sequence[Rates]) -> Iterator[Chart]:
    """fagen over cuDNN, row by row, with what was to be reached."""
    groups = []
    for result in found:
        ratio = result.to_cudnn(OURS)
        if ratio is None:
            continue
        goal = results.quotient(result.goal, result.cudnn)
        text = "" if goal is None else f"goal {goal:.2f}"
        groups.append(Group(result.row.name, (Bar("", ratio, f"{ratio:.2f}"),), goal, text))
    if groups:
        about = "times cuDNN's speed in the same turns, with softcap times its speed without"
        yield Chart("fagen over cuDNN", about, tuple(groups), 1.0, "cuDNN")


def _of_row(result: Rates, names: Sequence[str], text: Callable[[str], str]) -> Group:
    """A row's contestants that have a figure, fagen's first."""
    bars = [Bar(name, rate, text(name), _STYLES[name]) for name in names if (rate := result.rates.get(name))]
    goal = result.goal
    return Group(result.row.name, tuple(bars), goal, "" if goal is None else f"goal {goal:.3g}")


def _host(times: Mapping[str, float]) -> Iterator[Chart]:
    if times:
        bars = tuple(
            Bar(name, us, f"{us:.1f}", "ours" if name.startswith(OURS) else "neutral") for name, us in times.items()
        )
        yield Chart("Host time of a call", "us, B=1, S=128, less is better", (Group("", bars),))


def _compile(report: CompileReport) -> Section:
    goals = [timing for timing in report.timings if compile_bench.goal(timing.job)]
    empty = Timing(Job(report.empty_name, "help"), report.empty, 1.0)
    groups, rows = [], []
    for timing in (empty, *report.timings):
        job, low, high = timing.job, min(timing.seconds), max(timing.seconds)
        style = "neutral" if timing is empty else "ours-2" if job.warm else "ours-pale" if job.emulate else "ours"
        bar = Bar("", timing.median, f"{timing.median:.3f}", style, low, high)
        groups.append(Group(job.name, (bar,), job.goal, "" if job.goal is None else f"goal {job.goal:g} s"))
        figures = (f"{timing.median:.3f}", f"{low:.3f}", f"{high:.3f}", f"{timing.ratio:.1f}")
        outcome = "" if timing not in goals else "reached" if timing.reached else "missed"
        rows.append((job.name, *figures, compile_bench.goal(job), outcome))
    header = ("compile time", "median s", "least", "most", "x empty file", "goal", "result")
    about = f"seconds, medians of {len(report.empty)}, whiskers from least to most"
    reached = sum(timing.reached for timing in goals)
    return Section(
        "Compile time",
        f"{reached} of {_count(goals, 'row')} with a goal reach it" if goals else _count(report.timings, "row"),
        (
            ("compiler", report.compiler),
            *((("host compiler", report.host_compiler),) if report.host_compiler else ()),
            ("cores", str(report.cores)),
        ),
        (Chart("Whole commands", about, tuple(groups)),),
        (Table(header, tuple(rows)),),
        ("cold: nothing is in the cache; warm: the kernel is", "goals: seconds, and times what an empty file takes"),
    )


def _variants(report: VariantsReport) -> Section:
    shares, seconds, registers = [], [], []
    for one in report.variants:
        name = one.row.name
        shares.append(Group(name, tuple(_error_bars(one))))
        seconds.append(Group(name, tuple(Bar(k.kind, k.seconds, f"{k.seconds:.2f}") for k in one.kernels)))
        bars = (
            Bar(k.kind, k.registers, _registers(k), "bad" if k.spills else "ours-2") for k in one.kernels if k.registers
        )
        registers.append(Group(name, tuple(bars)))
    charts = [
        Chart("Error", "as a part of its budget, in front of that the error itself", tuple(shares), 1.0, "budget"),
        Chart("Time of the compiler", "seconds, one kernel at a time", tuple(seconds)),
        Chart("Registers", "a thread, with bytes of spills", tuple(registers), 255.0, "most that a thread can have"),
    ]
    passed = sum(one.passed for one in report.variants)
    worst = max((error.share for one in report.variants for error in one.errors), default=None)
    headline = f"{passed} of {_count(report.variants, 'variant')} within budget"
    return Section(
        "Variants: error and cost",
        headline if worst is None else f"{headline}, the worst error at {percent(worst)} of its own",
        (
            ("ran on", report.device),
            ("kernels for", report.arch),
            ("compiler", report.compiler),
            ("PyTorch", report.torch),
        ),
        tuple(chart for chart in charts if any(group.bars for group in chart.groups)),
        variants.tables(report),
        tuple(variants.legend(report)),
        report.failures,
    )


def _error_bars(one: variants.Variant) -> Iterator[Bar]:
    for error in one.errors:
        text = f"{error.error:.1e} ({percent(error.share)})"
        yield Bar(error.name, error.share, text, "ours" if error.passed else "bad")
        if error.flash is not None:
            yield Bar(f"{FA2}, {error.name}", error.flash / error.budget, f"{error.flash:.1e}", _STYLES[FA2])


def _registers(kernel: variants.Kernel) -> str:
    return f"{kernel.registers}, {kernel.spills} B spilled" if kernel.spills else str(kernel.registers)
