"""What a build costs: whole commands, cold and warm, beside a compiler's time for an empty file in the same run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fagen import toolchain
from fagen.arch import Arch, resolve
from fagen.errors import BuildError
from fagen.spec import AttentionSpec

Kind = Literal["build", "load", "help"]


@dataclass(frozen=True)
class Job:
    """One row of the table. `goal` is in seconds, `goal_ratio` in times of the empty file; None where there is none.

    build: the command `fagen build`; load: `fagen.load` in a running process; help: `fagen --help`. `warm` finds the
    kernel in the cache.
    """

    name: str
    kind: Kind
    spec: AttentionSpec | None = None
    arch: str = "sm80"
    emulate: bool = False
    warm: bool = False
    goal: float | None = None
    goal_ratio: float | None = None


@dataclass(frozen=True)
class Timing:
    """What one job took: the median of `seconds`, and how many times the empty file's median that is."""

    job: Job
    seconds: tuple[float, ...]
    ratio: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def reached(self) -> bool:
        """Whether every goal of the job is reached."""
        job = self.job
        in_time = job.goal is None or self.median <= job.goal
        return in_time and (job.goal_ratio is None or self.ratio <= job.goal_ratio)


@dataclass(frozen=True)
class CompileReport:
    """All timings. `empty` are the seconds of the empty file, `empty_name` what compiled it."""

    empty_name: str
    empty: tuple[float, ...]
    timings: tuple[Timing, ...]
    compiler: str
    host_compiler: str | None
    cores: int

    @property
    def empty_median(self) -> float:
        return statistics.median(self.empty)


def jobs(arch: str = "sm80") -> tuple[Job, ...]:
    """The rows: the variants of the compile-time table that exist."""
    plain = AttentionSpec(head_dim=128)
    full = AttentionSpec(head_dim=128, causal=True, softcap=True)
    gradients = AttentionSpec(head_dim=128, causal=True, softcap=True, backward=True)

    hopper = resolve(arch).family == "sm90"

    def cold(name: str, spec: AttentionSpec) -> Job:
        return Job(name, "build", spec, arch, goal=2.0 if hopper else 1.5, goal_ratio=6.0 if hopper else 5.0)

    return (
        cold("build, d128 causal softcap", full),
        cold("build, d128", plain),
        cold("build, d256", AttentionSpec(head_dim=256)),
        cold("build, d64", AttentionSpec(head_dim=64)),
        Job("build, d128 causal softcap, forward and backward", "build", gradients, arch, goal=4.0),
        Job("build --emulate, d128 causal softcap", "build", full, arch, emulate=True, goal=1.5),
        Job("load of a new kernel, d128 causal softcap", "load", full, arch, goal=1.0 if hopper else 0.6),
        Job("warm build, d128 causal softcap", "build", full, arch, warm=True, goal=0.3),
        Job("warm load, d128 causal softcap", "load", full, arch, warm=True, goal=0.03),
        Job("fagen --help", "help", goal=0.2),
    )


def run(rows: Sequence[Job], *, repeats: int = 5, on_done: Callable[[str], None] = lambda name: None) -> CompileReport:
    """Times every row `repeats` times, in rounds so that a drift of the machine meets all rows, after one round whose
    times do not count. `on_done` hears the name of each finished run.

    Raises ToolchainError without a CUDA compiler or, for an emulated row, a host compiler; BuildError where a command
    fails.
    """
    compiler = toolchain.find_cuda_compiler()
    nvcc = toolchain.find_nvcc()
    emulates = any(job.emulate for job in rows)
    host = toolchain.find_host_compiler().version if emulates else None
    empty: list[float] = []
    seconds: dict[str, list[float]] = {job.name: [] for job in rows}
    with tempfile.TemporaryDirectory(prefix="fagen-bench-") as folder:
        scratch = Path(folder)
        warm = scratch / "warm"
        for round_number in range(repeats + 1):
            taken = _time_empty(nvcc or compiler, resolve(rows[0].arch), scratch)
            on_done("empty file")
            if round_number:
                empty.append(taken)
            for job in rows:
                with tempfile.TemporaryDirectory(dir=scratch) as cold:
                    taken = _time(job, warm if job.warm else Path(cold))
                on_done(job.name)
                if round_number:
                    seconds[job.name].append(taken)
    floor = statistics.median(empty)
    return CompileReport(
        empty_name="nvcc -cubin of an empty file" if nvcc else "NVRTC of an empty file, in a process",
        empty=tuple(empty),
        timings=tuple(
            Timing(job, tuple(seconds[job.name]), statistics.median(seconds[job.name]) / floor) for job in rows
        ),
        compiler=compiler.identity,
        host_compiler=host,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )


def goal(job: Job) -> str:
    """The goals of a row, "1.5 s, 5 x"."""
    parts = [] if job.goal is None else [f"{job.goal:g} s"]
    parts += [] if job.goal_ratio is None else [f"{job.goal_ratio:g} x"]
    return ", ".join(parts)


def markdown(report: CompileReport, *, date: str, command: str) -> str:
    """The report as a section of BENCHMARKS.md."""
    host = f", {report.host_compiler}" if report.host_compiler else ""
    cells = [(report.empty_name, report.empty_median, 1.0, "")]
    cells += [(timing.job.name, timing.median, timing.ratio, goal(timing.job)) for timing in report.timings]
    return "\n".join(
        [
            f"{report.cores} cores, {report.compiler}{host}, {date}: `{command}`",
            "",
            f"Seconds of whole commands, medians of {len(report.empty)} taken in turns.",
            "",
            "| compile time | seconds | x empty file | goal |",
            "| --- | ---: | ---: | ---: |",
            *(f"| {name} | {seconds:.3f} | {ratio:.1f} | {aim} |" for name, seconds, ratio, aim in cells),
        ]
    )


def _time_empty(compiler: toolchain.Compiler, arch: Arch, scratch: Path) -> float:
    source = scratch / "empty.cu"
    source.write_text("")
    return _seconds(compiler.command(arch, str(source), str(scratch / "empty.cubin")), dict(os.environ))


def _time(job: Job, cache: Path) -> float:
    """Seconds of one run of `job` with the cache in `cache`."""
    # The commands run this very package, whether it is installed or a checkout.
    package_root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([package_root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = dict(os.environ) | {"FAGEN_CACHE_DIR": str(cache), "PYTHONPATH": path}
    if job.kind == "load":
        assert job.spec is not None
        command = [sys.executable, "-m", "fagen.bench.load", job.spec.model_dump_json(), job.arch]
        return float(_output(command, environment))
    command = [sys.executable, "-m", "fagen"]
    if job.spec is None:
        command.append("--help")
    else:
        command += ["build", *job.spec.cli_flags(), "--arch", job.arch, *(["--emulate"] if job.emulate else [])]
    return _seconds(command, environment)


def _seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    _output(command, environment)
    return time.perf_counter() - start


def _output(command: Sequence[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise BuildError("a benchmarked command failed", command=command, log=done.stderr or done.stdout)
    return done.stdout
