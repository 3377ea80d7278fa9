"""The benchmarks: their rows, their arithmetic and their tables; a tiny run of each where it can run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fagen import toolchain
from fagen.bench import compile as compile_bench
from fagen.bench import speed as speed_bench
from fagen.bench.compile import CompileReport, Job, Timing
from fagen.bench.speed import CUDNN, FA2, OURS, PLAIN, Result, Row, SpeedReport
from fagen.cli import main
from fagen.errors import BuildError, ToolchainError
from fagen.spec import AttentionSpec


def cuda_compiler() -> bool:
    try:
        toolchain.find_cuda_compiler()
    except ToolchainError:
        return False
    return True


needs_cuda_compiler = pytest.mark.skipif(not cuda_compiler(), reason="no CUDA compiler")


# Compile times


def test_compile_rows() -> None:
    rows = compile_bench.jobs("sm90")
    assert len({row.name for row in rows}) == len(rows)
    assert {row.arch for row in rows if row.spec} == {"sm90"}
    cold = [row for row in rows if row.kind == "build" and not row.warm and not row.emulate]
    assert {row.spec.head_dim for row in cold if row.spec} == {64, 128, 256}
    assert all((row.goal, row.goal_ratio) == (1.5, 5.0) for row in cold if row.spec and not row.spec.backward)
    assert [row.goal for row in cold if row.spec and row.spec.backward] == [4.0]
    assert {row.kind for row in rows if row.warm} == {"build", "load"} and any(row.emulate for row in rows)


@pytest.mark.parametrize(
    ("seconds", "ratio", "reached"),
    [((1.0, 1.4, 9.0), 4.9, True), ((1.0, 1.6, 1.7), 4.0, False), ((1.0, 1.1, 1.2), 5.1, False)],
)
def test_a_goal_is_reached_by_the_median_and_the_ratio(seconds: tuple[float, ...], ratio: float, reached: bool) -> None:
    assert Timing(Job("row", "build", goal=1.5, goal_ratio=5.0), seconds, ratio).reached is reached
    assert Timing(Job("row", "build"), seconds, ratio).reached


def test_goals_as_text() -> None:
    assert compile_bench.goal(Job("row", "build", goal=1.5, goal_ratio=5.0)) == "1.5 s, 5 x"
    assert compile_bench.goal(Job("row", "build", goal=0.3)) == "0.3 s"
    assert compile_bench.goal(Job("row", "build")) == ""


def test_runs_are_cold_warm_and_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cold run has an empty cache of its own, all warm runs share one, and the first round does not count."""
    caches: dict[str, list[Path]] = {"cold": [], "warm": []}
    order: list[str] = []

    def time_job(job: Job, cache: Path) -> float:
        order.append(job.name)
        caches[job.name].append(cache)
        return 100.0 if len(caches[job.name]) == 1 else 3.0

    spec = AttentionSpec(head_dim=64)
    monkeypatch.setattr(compile_bench, "_time", time_job)
    monkeypatch.setattr(compile_bench, "_time_empty", lambda *_: 2.0)
    monkeypatch.setattr(toolchain, "find_cuda_compiler", lambda: toolchain.NvrtcCompiler(Path("x"), "13.0.88"))
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    steps: list[str] = []
    report = compile_bench.run(
        [Job("cold", "build", spec), Job("warm", "build", spec, warm=True)], repeats=3, on_done=steps.append
    )
    assert order == ["cold", "warm"] * 4 and len(steps) == 4 * 3
    assert len(set(caches["cold"])) == 4 and len(set(caches["warm"])) == 1
    assert [timing.seconds for timing in report.timings] == [(3.0,) * 3] * 2
    assert [timing.ratio for timing in report.timings] == [1.5, 1.5]
    assert report.empty_name.startswith("NVRTC") and report.compiler == "nvrtc 13.0.88"


def test_a_benchmarked_command_that_fails() -> None:
    with pytest.raises(BuildError, match="a benchmarked command failed"):
        compile_bench._output([sys.executable, "-c", "raise SystemExit('no')"], {})


@needs_cuda_compiler
def test_compile_times_of_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compile", "--rows", "--help", "--repeats", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (row,) = document["rows"]
    assert row["name"] == "fagen --help" and 0 < row["seconds"] < 20
    assert row["ratio"] == pytest.approx(row["seconds"] / document["empty_file"]["seconds"])
    assert main(["bench", "--compile", "--rows", "--help", "--repeats", "1", "--markdown"]) == 0
    assert "| fagen --help | " in capsys.readouterr().out


@needs_cuda_compiler
def test_load_is_timed_in_a_process_of_its_own(tmp_path: Path) -> None:
    job = Job("load", "load", AttentionSpec(head_dim=16))
    cold, warm = (compile_bench._time(job, tmp_path) for _ in range(2))
    assert 0 < warm < cold < 60


def compile_report() -> CompileReport:
    timings = (
        Timing(
            Job("build, d128", "build", AttentionSpec(head_dim=128), goal=1.5, goal_ratio=5.0), (1.0, 0.9, 1.2), 4.0
        ),
        Timing(Job("warm build", "build", AttentionSpec(head_dim=128), warm=True, goal=0.3), (0.4, 0.4, 0.4), 1.6),
    )
    return CompileReport("nvcc -cubin of an empty file", (0.25, 0.24, 0.26), timings, "nvrtc 13.0.88", "g++ 12.2.0", 2)


def test_compile_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compile_bench, "run", lambda *_, **__: compile_report())
    assert main(["bench", "--compile"]) == 0
    captured = capsys.readouterr()
    rows = [line.split() for line in captured.out.splitlines()]
    assert ["build,", "d128", "1.000", "0.900", "4.0", "1.5", "s,", "5", "x"] in rows
    assert ["nvcc", "-cubin", "of", "an", "empty", "file", "0.250", "0.240", "1.0"] in rows
    assert "nvrtc 13.0.88, 2 cores" in captured.err


def test_compile_markdown() -> None:
    lines = compile_bench.markdown(compile_report(), date="2026-01-02", command="fagen bench --compile").splitlines()
    assert lines[0] == "2 cores, nvrtc 13.0.88, g++ 12.2.0, 2026-01-02: `fagen bench --compile`"
    assert lines[-2:] == ["| build, d128 | 1.000 | 4.0 | 1.5 s, 5 x |", "| warm build | 0.400 | 1.6 | 0.3 s |"]


# Speed


def test_forward_rows() -> None:
    rows = speed_bench.rows()
    assert len({row.name for row in rows}) == len(rows) == 13
    assert [row.name for row in rows if row.softcap] == [
        "d128 causal 4k softcap",
        "d128 causal 16k softcap",
        "d256 causal 16k softcap",
    ]
    for row in rows:
        assert row.batch * row.seqlen == 16384 and row.heads * row.head_dim == 2048
        assert row.spec == AttentionSpec(head_dim=row.head_dim, causal=row.causal, softcap=row.softcap)


def test_flop() -> None:
    full = Row(128, False, 4096)
    assert full.flop == 4 * 4 * 16 * 4096 * 4096 * 128
    assert dataclasses.replace(full, causal=True).flop == full.flop / 2
    assert dataclasses.replace(full, softcap=True).flop == full.flop
    assert dataclasses.replace(full, backward=True).flop == 2.5 * full.flop


def test_backward_rows() -> None:
    rows = speed_bench.backward_rows()
    assert len({row.name for row in rows}) == len(rows) == 6
    assert all(row.spec.backward for row in rows)


def test_ratios() -> None:
    result = Result(Row(128, False, 1024), {OURS: 330.0, FA2: 300.0, CUDNN: None}, 1e-3)
    assert result.ratio(FA2) == pytest.approx(1.1)
    assert result.ratio(CUDNN) is None and result.ratio(PLAIN) is None


def forward_report() -> SpeedReport:
    results = (
        Result(Row(128, True, 4096), {OURS: 330.4, FA2: 300.0, CUDNN: 500.0}, 1.5e-3),
        Result(Row(72, False, 16384), {OURS: 200.0, FA2: 210.0, CUDNN: None}, 1e-3),
        Result(Row(128, True, 4096, softcap=True), {OURS: 300.0, PLAIN: 330.0}, None),
    )
    return SpeedReport("NVIDIA H200", "sm90", "2.13.0", "CUDA 13.0", results, {OURS: 12.34, "SDPA": 17.0})


def test_forward_markdown() -> None:
    text = speed_bench.markdown(forward_report(), date="2026-01-02", command="fagen bench --forward --markdown")
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200, 2026-01-02, kernels for sm90, PyTorch 2.13.0, driver for CUDA 13.0: ")
    assert lines[0].endswith(": `fagen bench --forward --markdown`")
    assert "| d128 causal 4k | 330 | 300 | 500 | 1.10 | 0.66 |" in lines
    assert "| d72 full 16k | 200 | 210 | - | 0.95 | - |" in lines
    assert "| d128 causal 4k softcap | 300 | 330 | 0.91 |" in lines
    assert lines[-1].endswith("fagen 12.3 us, SDPA 17.0 us")
    tables = [line.count("|") for line in lines if line.startswith("|")]
    assert sorted(set(tables)) == [5, 7]


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--json"]])
def test_forward_command(form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def run(rows: list[Row], **named: Any) -> SpeedReport:
        asked.update(named, rows=rows)
        return forward_report()

    monkeypatch.setattr(speed_bench, "run", run)
    assert main(["bench", "--forward", "--rows", "d256", "--arch", "9.0", "--repeats", "4", *form]) == 0
    assert [row.name for row in asked["rows"]] == ["d256 full 16k", "d256 causal 16k", "d256 causal 16k softcap"]
    assert asked["arch"] == "sm90" and asked["samples"] == 4
    out = capsys.readouterr().out
    if form == ["--json"]:
        assert json.loads(out)["rows"][0]["tflops"] == {OURS: 330.4, FA2: 300.0, CUDNN: 500.0}
    else:
        assert "d128 causal 4k softcap" in out and "0.91" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "--forward"], "--compile, --forward or --backward"),
        (["--forward", "--rows", "d96"], "matches none of: d64 full 16k"),
        (["--forward", "--markdown", "--json"], "exclude each other"),
        (["--compile", "--arch", "sm42"], "unknown architecture"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_forward_without_a_gpu_says_so() -> None:
    program = "import sys; from fagen.cli import main; sys.exit(main(['bench', '--forward']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parent.parent,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and done.stderr.startswith("fagen: error: no GPU that PyTorch can use")


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_tiny_row_on_the_gpu(softcap: bool, backward: bool) -> None:
    report = speed_bench.run([Row(64, True, 256, softcap, backward, tokens=1024, width=128)], samples=3)
    (result,) = report.results
    assert result.tflops[OURS] and report.card and report.arch.startswith("sm")
    assert {f"{OURS}{suffix}" for suffix in ("", " under autograd", " forward and backward")} < set(report.host_us)
    if softcap:
        assert result.ratio(PLAIN)
    else:
        assert result.ratio(FA2) and result.difference is not None and result.difference < 1e-2
    assert speed_bench.markdown(report, date="today", command="fagen bench --forward")
