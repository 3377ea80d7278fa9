"""The benchmarks: their rows, their arithmetic and their tables; a tiny run of each where it can run."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import python_path

from fagen import ops, toolchain
from fagen.bench import compile as compile_bench
from fagen.bench import contestants, goals, plot
from fagen.bench import decode as decode_bench
from fagen.bench import speed as speed_bench
from fagen.bench.compile import CompileReport, Job, Timing
from fagen.bench.contestants import CUDNN, FA2, FLEX
from fagen.bench.results import OURS, Machine
from fagen.bench.speed import CUDNN_PLAIN, DETERMINISTIC, PACKED, PLAIN, Result, Row, SpeedReport
from fagen.cli import main
from fagen.errors import BuildError, SpecError, ToolchainError
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
    assert result.to_cudnn(OURS) is None and result.goal is None and result.share_of_matmul is None


def test_every_row_has_a_goal_beyond_flash_attention_3() -> None:
    rows = (*speed_bench.rows(), *speed_bench.backward_rows())
    assert len(goals.FORWARD) + len(goals.BACKWARD) == len(rows)
    for row in rows:
        assert row.reference and row.reference.goal > row.reference.fa3 > 400
        plain = dataclasses.replace(row, softcap=False).reference
        assert plain and plain.cudnn == row.reference.cudnn
        assert dataclasses.replace(row, tokens=4096).reference is None


def test_a_goal_moves_with_cudnn() -> None:
    """The goal is 620 where cuDNN reaches 523."""
    plain = Result(Row(128, True, 4096), {OURS: 589.0, CUDNN: 523 * 1.1}, matmul=800.0)
    assert plain.goal == pytest.approx(682) and plain.goal_ratio == pytest.approx(589 / 682)
    assert plain.fa3_scaled == pytest.approx(671) and plain.to_cudnn(OURS) == pytest.approx(589 / 523 / 1.1)
    assert plain.share_of_matmul == pytest.approx(589 / 800)


def test_a_goal_with_softcap_moves_with_cudnn_without_it() -> None:
    """FlashAttention-3's 487 with softcap stand beside 523 of cuDNN without, where 530 are to be reached."""
    capped = Result(Row(128, True, 4096, softcap=True), {OURS: 500.0, PLAIN: 600.0, CUDNN_PLAIN: 523 * 0.9})
    assert capped.goal == pytest.approx(477) and capped.goal_ratio == pytest.approx(500 / 477)
    assert capped.fa3_scaled == pytest.approx(487 * 0.9) and capped.fa3_scaled_ratio == pytest.approx(500 / 438.3)
    assert capped.to_cudnn(OURS) == pytest.approx(500 / 523 / 0.9)


MACHINE = Machine("NVIDIA H200", "sm90", "2.13.0", "CUDA 13.0")


def forward_report() -> SpeedReport:
    failed = {FLEX: "RuntimeError: out of shared memory"}
    results = (
        Result(
            Row(128, True, 4096), {OURS: 330.4, FA2: 300.0, CUDNN: 500.0, FLEX: None}, 1.5e-3, FA2, failed, matmul=700.0
        ),
        Result(Row(72, False, 16384), {OURS: 200.0, FA2: 210.0, CUDNN: None, FLEX: None}, 1e-3, FA2, failed),
        Result(
            Row(128, True, 4096, softcap=True),
            {OURS: 300.0, FLEX: 150.0, PLAIN: 330.0, CUDNN_PLAIN: 500.0},
            2e-3,
            FLEX,
            matmul=720.0,
        ),
    )
    return SpeedReport(MACHINE, results, {OURS: 12.34, "SDPA": 17.0})


def test_forward_markdown() -> None:
    text = speed_bench.markdown(forward_report(), date="2026-01-02", command="fagen bench --forward --markdown")
    lines = text.splitlines()
    assert lines[0].startswith("NVIDIA H200, 2026-01-02, kernels for sm90, PyTorch 2.13.0, driver for CUDA 13.0: ")
    assert lines[0].endswith(": `fagen bench --forward --markdown`")
    assert "8192 x 8192 x 8192 in bf16 through cuBLAS in the same turns, 710 TFLOP/s" in lines[2]
    first, second = (line for line in lines if line.startswith("| forward"))
    assert first == (
        "| forward | fagen | FA2 | cuDNN | Flex | fagen / FA2 | fagen / FA3 scaled | fagen / goal | of matmul "
        "| difference |"
    )
    assert "| d128 causal 4k | 330 (0.66) | 300 (0.60) | 500 | - | 1.10 | 0.57 | 0.56 | 47 % | 1.5e-03 |" in lines
    assert "| d72 full 16k | 200 | 210 | - | - | 0.95 | - | - | - | 1.0e-03 |" in lines
    assert second == (
        "| forward, cap 50 | fagen | Flex | without softcap | cuDNN without | fagen / Flex | fagen / without softcap "
        "| fagen / FA3 scaled | fagen / goal | of matmul | difference |"
    )
    assert (
        "| d128 causal 4k softcap | 300 (0.60) | 150 (0.30) | 330 (0.66) | 500 | 2.00 | 0.91 | 0.64 | 0.59 | 42 % "
        "| 2.0e-03 |"
    ) in lines
    assert lines[-1].endswith("fagen 12.3 us, SDPA 17.0 us")


def test_failures_are_told_once() -> None:
    report = forward_report()
    assert report.failures == ("Flex failed in 2 of 3 rows; d128 causal 4k: RuntimeError: out of shared memory",)
    report = dataclasses.replace(report, results=report.results[2:], host_us={}, host_failure="BuildError: no")
    assert report.failures == ("host times failed: BuildError: no",)
    assert "Host time" not in speed_bench.markdown(report, date="2026-01-02", command="fagen")


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--json"]])
def test_forward_command(form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def run(rows: list[Row], **named: Any) -> SpeedReport:
        asked.update(named, rows=rows)
        return forward_report()

    monkeypatch.setattr(speed_bench, "run", run)
    arguments = ["--rows", "d256", "--arch", "9.0", "--repeats", "4", "--against", "cudnn, fa2"]
    assert main(["bench", "--forward", *arguments, *form]) == 0
    assert [row.name for row in asked["rows"]] == ["d256 full 16k", "d256 causal 16k", "d256 causal 16k softcap"]
    assert asked["arch"] == "sm90" and asked["samples"] == 4
    assert [contestant.name for contestant in asked["against"]] == [FA2, CUDNN]
    captured = capsys.readouterr()
    assert captured.err.count("Flex failed in 2 of 3 rows; d128 causal 4k: RuntimeError: out of shared memory") == 1
    if form == ["--json"]:
        document = json.loads(captured.out)
        first, _, capped = document["rows"]
        assert first["tflops"] == {OURS: 330.4, FA2: 300.0, CUDNN: 500.0, FLEX: None}
        assert first["to_cudnn"] == {OURS: 330.4 / 500, FA2: 0.6, CUDNN: 1.0, FLEX: None}
        assert first["failures"] == {FLEX: "RuntimeError: out of shared memory"}
        assert capped["reference"] == {"fa3": 487, "cudnn": 523, "goal": 530} and capped["compared_with"] == FLEX
        assert capped["goal_ratio"] == pytest.approx(300 / (530 / 523 * 500))
        assert capped["fa3_scaled_ratio"] == pytest.approx(300 / (487 / 523 * 500))
        assert capped["share_of_matmul"] == pytest.approx(300 / 720) and document["matmul_tflops"] == 710
    else:
        assert "d128 causal 4k softcap" in captured.out and "0.91" in captured.out and "1.5e-03" in captured.out


def test_a_row_without_a_kernel_of_fagens_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = Result(Row(128, True, 4096), {OURS: None, CUDNN: 500.0}, failures={OURS: "BuildError: no"}, matmul=700.0)
    report = dataclasses.replace(forward_report(), results=(result,))
    monkeypatch.setattr(speed_bench, "run", lambda *_, **__: report)
    assert main(["bench", "--forward", "--no-flex"]) == 1
    captured = capsys.readouterr()
    assert "500" in captured.out and "fagen failed in 1 of 1 rows; d128 causal 4k: BuildError: no" in captured.err


# Decoding


def test_decode_rows() -> None:
    rows = decode_bench.rows()
    assert [row.name for row in rows] == list(goals.DECODE)
    assert rows[0].kv_bytes == 2 * 16384 * 8 * 128 * 2 and rows[0].bytes == rows[0].kv_bytes + 2 * 32 * 128 * 2
    for row, faster in zip(rows, (31.6 / 24, 4.0 / 3.86, 4.28 / 4.27, 4.28 / 4.29), strict=True):
        assert row.spec == AttentionSpec(head_dim=128, split_kv=True)
        result = decode_bench.Result(row, {OURS: 3.0, CUDNN: 4.0})
        assert result.goal == pytest.approx(4.0 * faster) and result.goal_ratio == pytest.approx(0.75 / faster)
    # The reference of the first row is the time that a call took.
    reference = rows[0].reference
    assert reference and rows[0].bytes / reference.cudnn / 1e6 == pytest.approx(31.6, rel=1e-3)


def test_decode_grid() -> None:
    rows = decode_bench.grid()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.batch for row in rows} == {1, 16, 128} and len({(row.heads, row.heads_k) for row in rows}) == 3
    assert {row.keys for row in rows} >= {256, 131072} and {row.name for row in rows} >= {*goals.DECODE}
    assert all(row.kv_bytes < 9e9 and row.keys % decode_bench.PAGE == 0 for row in rows)
    assert "B=1 256 keys 16/16 heads" in {row.name for row in rows}


@pytest.mark.parametrize("row", [*decode_bench.grid(), decode_bench.Row(1, 256, 8, 1)], ids=lambda row: row.name)
def test_keys_come_from_memory_and_a_replay_takes_long(row: decode_bench.Row) -> None:
    """Between two readings of the same keys four caches go by, also from one replay of a graph to the next."""
    cache = 50 << 20
    copies = decode_bench.copies(row.kv_bytes, cache)
    calls = decode_bench.calls(row.kv_bytes, copies)
    assert calls % copies == 0 and copies * row.kv_bytes >= 4 * cache
    assert copies == 1 or (copies - 1) * row.kv_bytes < 4 * cache
    assert calls >= 20 or calls * row.kv_bytes >= 4e9


SMALL_DECODE = decode_bench.Row(2, 512, 4, 2)


def emulated(spec: AttentionSpec, arch: str | None) -> Any:
    return ops.load(spec, arch=arch, emulate=True)


def test_everyone_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys in one part, in several and in pages whose order is random."""
    monkeypatch.setattr(speed_bench, "load", emulated)
    against = [contestant for contestant in contestants.decoders() if contestant.key == "fa2"]
    makers = decode_bench._makers(SMALL_DECODE, against, "sm80")
    assert list(makers) == [OURS, decode_bench.ONE_PART, decode_bench.PAGED, FA2, decode_bench.COPY]
    tensors = decode_bench._inputs(SMALL_DECODE, 1, "cpu")[0]
    _, outputs, failures = speed_bench.first_calls(makers, tensors)
    assert not failures
    assert torch.equal(outputs[decode_bench.COPY], torch.cat([x.flatten() for x in tensors[1:]]))
    for name in (OURS, decode_bench.ONE_PART, decode_bench.PAGED):
        assert outputs[name].shape == (2, 1, 4, 128)
        difference, other = speed_bench.differences(outputs, [name], [CUDNN, FA2])
        assert difference is not None and difference < 1e-2 and other == FA2


def test_pages_lie_in_random_order() -> None:
    _, k, v = decode_bench._inputs(SMALL_DECODE, 1, "cpu")[0]
    pages_k, pages_v, named = decode_bench._in_pages(k, v)
    table = named["block_table"]
    assert not torch.equal(table.flatten(), torch.arange(4)) and named["seqused_k"].tolist() == [512, 512]
    for pages, x in ((pages_k, k), (pages_v, v)):
        assert torch.equal(pages[table.long()].flatten(1, 2), x)


def test_copies_of_the_inputs_are_apart() -> None:
    first, second = decode_bench._inputs(SMALL_DECODE, 2, "cpu")
    for a, b in zip(first[1:], second[1:], strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()


def test_packages_decode_from_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(
        "def flash_attn_with_kvcache(q, k_cache, v_cache, causal=True):\n    return None if causal else q + 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    (fa3,) = contestants.choose(["fa3"], among=contestants.decoders())
    q, k, v = qkv()
    assert torch.equal(fa3.make(q, k, v, False, None)(), q + 1)
    del sys.modules["flash_attn_interface"]
    with pytest.raises(SpecError, match="'flex' is none of: fa2, cudnn, flash-attn, fa3"):
        contestants.choose(["flex"], among=contestants.decoders())


class FakeProperties:
    L2_cache_size = 1 << 20


def measured(
    monkeypatch: pytest.MonkeyPatch, against: list[contestants.Contestant], make_ours: Callable[..., Any]
) -> tuple[decode_bench.Result, dict[str, list[Any]]]:
    """A row measured without a card: a graph's replay takes 8 us for each of its calls. And what each replay holds."""
    captured: dict[str, list[Any]] = {}

    def capture(calls: list[Any], count: int) -> Callable[[], Any]:
        assert count % len(calls) == 0
        captured[f"{len(captured)}"] = [calls[index % len(calls)]() for index in range(count)]
        return lambda: count

    def turns(graphs: dict[str, Callable[[], Any]], samples: int) -> dict[str, float]:
        return {name: 8e-6 * replay() for name, replay in graphs.items()}

    inputs = decode_bench._inputs
    monkeypatch.setattr(torch.cuda, "get_device_properties", FakeProperties)
    monkeypatch.setattr(decode_bench, "_inputs", lambda row, copies, device: inputs(row, copies, "cpu"))
    monkeypatch.setattr(decode_bench, "captured", capture)
    monkeypatch.setattr(speed_bench, "take_turns", turns)
    monkeypatch.setattr(speed_bench, "load", lambda spec, arch: make_ours)
    return decode_bench.measure(SMALL_DECODE, against=against), captured


def test_a_row_of_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are of the bytes that a call moves, and cuDNN's output is the one that all are compared with."""

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
        return (1.25 if "block_table" in named else 1.0) * q

    def fails(*_: Any) -> Callable[[], Any]:
        raise RuntimeError("no such kernel")

    against = [
        contestants.Contestant("fa2", FA2, False, lambda q, *_: lambda: 9 * q),
        contestants.Contestant("cudnn", CUDNN, False, lambda q, *_: lambda: q),
        contestants.Contestant("fa3", "FA3", False, fails),
    ]
    result, captured = measured(monkeypatch, against, ours)
    kv_bytes = 2 * 2 * 512 * 2 * 128 * 2
    assert result.rates[OURS] == pytest.approx((kv_bytes + 2 * 2 * 4 * 128 * 2) / 8e6)
    assert result.rates[decode_bench.COPY] == pytest.approx(2 * kv_bytes / 8e6)
    assert result.microseconds(CUDNN) == pytest.approx(8) and result.to_cudnn(FA2) == pytest.approx(1)
    assert result.share_of_copy == pytest.approx(0.5, rel=0.01)
    assert result.rates["FA3"] is None and result.failures == {"FA3": "RuntimeError: no such kernel"}
    # The largest of fagen's three, here that of the pages, and of cuDNN's though FA2's comes first.
    assert result.difference == pytest.approx(0.25, rel=1e-2) and result.compared_with == CUDNN
    assert {len(outputs) for outputs in captured.values()} == {20} and len(captured) == 6


def test_nan_is_a_difference() -> None:
    outputs = {OURS: torch.ones(3), decode_bench.PAGED: torch.full((3,), torch.nan), CUDNN: torch.ones(3)}
    difference, _ = speed_bench.differences(outputs, [OURS, decode_bench.PAGED], [CUDNN])
    assert difference is not None and difference != difference


def decode_report() -> decode_bench.DecodeReport:
    first, other = decode_bench.rows()[0], decode_bench.Row(1, 256, 16, 16)
    rates: dict[str, float | None] = {OURS: first.bytes / 25e6, CUDNN: first.bytes / 30e6, FA2: first.bytes / 40e6}
    rates |= {decode_bench.ONE_PART: first.bytes / 600e6, decode_bench.COPY: 4.0}
    results = (
        decode_bench.Result(first, rates, 1.5e-3, CUDNN),
        decode_bench.Result(other, {OURS: 0.5, CUDNN: None}, failures={CUDNN: "RuntimeError: no engine"}),
    )
    return decode_bench.DecodeReport(MACHINE, results, {"fwd": 100 << 10, "combine": 0})


def test_decode_markdown() -> None:
    text = decode_bench.markdown(decode_report(), date="2026-01-02", command="fagen bench --decode --markdown")
    lines = text.splitlines()
    assert lines[0].endswith("driver for CUDA 13.0: `fagen bench --decode --markdown`")
    assert "a block: fwd 100.0 KiB." in lines[2] and "scaled by cuDNN" in lines[2]
    times, rates = (index for index, line in enumerate(lines) if line.startswith("| decode"))
    assert lines[times] == "| decode, us | fagen | fagen num_splits=1 | FA2 | cuDNN |"
    assert lines[times + 2] == "| B=1 16k keys | 25.0 (1.20) | 600.0 (0.05) | 40.0 (0.75) | 30.0 |"
    assert lines[times + 3] == "| B=1 256 keys 16/16 heads | 4.2 | - | - | - |"
    assert lines[rates] == (
        "| decode, TB/s | fagen | fagen num_splits=1 | FA2 | cuDNN | copy | fagen / FA3 scaled | fagen / goal "
        "| of copy | difference |"
    )
    assert lines[rates + 2] == "| B=1 16k keys | 2.69 | 0.11 | 1.68 | 2.24 | 4.00 | 1.22 | 0.91 | 67 % | 1.5e-03 |"
    assert lines[rates + 3] == "| B=1 256 keys 16/16 heads | 0.50 | - | - | - | - | - | - | - | - |"


@pytest.mark.parametrize("form", [[], ["--markdown"], ["--json"]])
def test_decode_command(form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {}

    def run(rows: list[decode_bench.Row], **named: Any) -> decode_bench.DecodeReport:
        asked.update(named, rows=rows)
        return decode_report()

    monkeypatch.setattr(decode_bench, "run", run)
    arguments = ["--rows", "16k", "--arch", "9.0", "--repeats", "4", "--against", "cudnn,fa2"]
    assert main(["bench", "--decode", *arguments, *form]) == 0
    assert [row.name for row in asked["rows"]] == ["B=1 16k keys", "B=16 16k keys"]
    assert asked["arch"] == "sm90" and asked["samples"] == 4
    assert [contestant.name for contestant in asked["against"]] == [FA2, CUDNN]
    captured = capsys.readouterr()
    assert captured.err.count("cuDNN failed in 1 of 2 rows; B=1 256 keys 16/16 heads: RuntimeError: no engine") == 1
    if form == ["--json"]:
        document = json.loads(captured.out)
        first, other = document["rows"]
        assert document["card"] == "NVIDIA H200" and document["smem_bytes"] == {"fwd": 102400, "combine": 0}
        assert first["us"][OURS] == pytest.approx(25) and "copy" not in first["us"] and first["tbps"]["copy"] == 4.0
        assert first["goal_ratio"] == pytest.approx(24 / 31.6 * 30 / 25) and first["heads_k"] == 8
        assert other["failures"] == {CUDNN: "RuntimeError: no engine"} and other["goal_tbps"] is None
    else:
        assert "B=1 16k keys" in captured.out and "25.0 (1.20)" in captured.out and "67 %" in captured.out


def test_decode_grid_command(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[decode_bench.Row] = []

    def run(rows: list[decode_bench.Row], **_: Any) -> decode_bench.DecodeReport:
        asked.extend(rows)
        failed = dataclasses.replace(decode_report().results[0], failures={OURS: "LaunchError: no"})
        return dataclasses.replace(decode_report(), results=(failed,))

    monkeypatch.setattr(decode_bench, "run", run)
    assert main(["bench", "--decode", "--grid", "--rows", "B=128 "]) == 1
    assert asked == [row for row in decode_bench.grid() if row.batch == 128]


# Contestants


def test_contestants_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(*arguments: Any, **named: Any) -> list[str]:
        return [contestant.key for contestant in contestants.choose(*arguments, **named)]

    here = {"torch", "flash_attn_interface"}
    monkeypatch.setattr(contestants, "installed", lambda module: module in here)
    assert keys() == ["fa2", "cudnn", "flex", "fa3"]
    assert keys(flex=False) == ["fa2", "cudnn", "fa3"]
    assert keys(["flex", "fa2"]) == ["fa2", "flex"]
    with pytest.raises(SpecError, match="'fa5' is none of: fa2, cudnn, flex, flash-attn, fa3, fa4"):
        keys(["fa5"])
    with pytest.raises(SpecError, match=r"the module flash_attn\.cute is not installed"):
        keys(["fa4"])


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_attn" / "cute").mkdir(parents=True)
    (tmp_path / "some_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "some_attn" / "interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = ["some_attn", "some_attn.cute", "some_attn.interface"]
    assert [name for name in (*found, "some_attn.other", "other_attn") if contestants.installed(name)] == found
    assert "some_attn" not in sys.modules


def qkv(seqlen: int = 96) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, seqlen, 3, 32, generator=generator) for _ in range(3))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, cap: float | None) -> torch.Tensor:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def make(key: str) -> Callable[..., Callable[[], Any]]:
    return next(contestant.make for contestant in contestants.everyone() if contestant.key == key)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_computes_the_row(causal: bool) -> None:
    torch.testing.assert_close(make("fa2")(*qkv(), causal, None)(), attention(*qkv(), causal, None))


def test_flex_computes_the_row() -> None:
    """A block mask and a modification of the score, compiled; a cap at which it matters."""
    torch.testing.assert_close(make("flex")(*qkv(), True, 0.7)(), attention(*qkv(), True, 0.7))


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_package_of_flash_attention_computes_the_row(
    with_lse: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = "(q + softcap, k)" if with_lse else "q + softcap"
    module = f"def flash_attn_func(q, k, v, causal=False, softcap=0.0):\n    return {returned} if causal else None\n"
    (tmp_path / "flash_attn_interface.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    q, k, v = qkv()
    assert torch.equal(make("fa3")(q, k, v, True, 50.0)(), q + 50)
    assert torch.equal(make("fa3")(q, k, v, True, None)(), q)
    del sys.modules["flash_attn_interface"]


def test_who_takes_part_in_a_row() -> None:
    against = contestants.choose(["fa2", "cudnn", "flex"])
    assert list(speed_bench._makers(Row(64, True, 256), against, None)) == [OURS, PACKED, FA2, CUDNN, FLEX]
    backward = speed_bench._makers(Row(64, True, 256, backward=True), against, None)
    assert list(backward) == [OURS, DETERMINISTIC, FA2, CUDNN, FLEX]
    capped = speed_bench._makers(Row(64, True, 256, softcap=True), against, None)
    assert list(capped) == [OURS, FLEX, PLAIN, CUDNN_PLAIN]
    assert list(speed_bench._makers(Row(64, True, 256, softcap=True), against[2:], None)) == [OURS, FLEX, PLAIN]


@pytest.mark.parametrize("backward", [False, True])
def test_a_contestant_that_fails_leaves_the_others(backward: bool) -> None:
    def fails(*_: Any) -> Callable[[], Any]:
        raise ImportError("undefined symbol\nand more")

    def fails_when_called(*_: Any) -> Callable[[], Any]:
        return lambda: torch.ones(()).item().nothing

    tensors = tuple(x.requires_grad_(backward) for x in qkv())
    makers = {
        "import": fails,
        "call": fails_when_called,
        OURS: lambda *qkv: lambda: attention(*qkv, causal=True, cap=None),
        FA2: lambda *qkv: make("fa2")(*qkv, True, None),
    }
    calls, outputs, failures = speed_bench.first_calls(makers, tensors)
    assert list(calls) == list(outputs) == [OURS, FA2]
    assert failures["import"] == "ImportError: undefined symbol" and failures["call"].startswith("AttributeError: ")
    difference, other = speed_bench.differences(outputs, [OURS], [FA2])
    assert difference is not None and 0 <= difference < 1e-5 and other == FA2
    assert torch.equal(calls[FA2](), outputs[FA2]) and outputs[FA2].shape == tensors[0].shape


def test_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round has each contestant once, each follows each other, and the rounds to warm up do not count."""
    clock = [0.0]
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.time = clock[0]

        def elapsed_time(self, end: Event) -> float:
            return end.time - self.time

    def contestant(name: str, milliseconds: float) -> Callable[[], None]:
        def call() -> None:
            log.append(name)
            clock[0] += milliseconds if len(log) > 3 * 4 else 1000.0

        return call

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {name: contestant(name, time) for name, time in (("a", 2.0), ("b", 3.0), ("c", 5.0))}
    assert speed_bench.take_turns(calls, 20, warm_up_seconds=0.0) == {"a": 0.002, "b": 0.003, "c": 0.005}
    rounds = [log[index : index + 3] for index in range(0, len(log), 3)]
    assert len(rounds) == 20 + 4 and all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {pair for one in rounds for pair in itertools.pairwise(one)} == {
        (a, b) for a in "abc" for b in "abc" if a != b
    }


# The plot


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    report = forward_report()
    monkeypatch.setattr(speed_bench, "run", lambda *_, **__: report)
    path = tmp_path / "speed.png"
    assert main(["bench", "--forward", "--no-flex", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG\r\n") and "speed.png" in capsys.readouterr().err


def test_bars_of_the_plot() -> None:
    pytest.importorskip("matplotlib")
    drawn = plot.figure(forward_report(), date="2026-01-02")
    (axes,) = drawn.axes
    assert axes.get_title() == "Attention forward, bf16, NVIDIA H200, 2026-01-02"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "d128 causal 4k",
        "d72 full 16k",
        "d128 causal 4k softcap",
    ]
    bars = [bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
    assert bars == [330.4, 300.0, 500.0, 200.0, 210.0, 300.0, 150.0, 330.0, 500.0]
    assert [text.get_text() for text in axes.texts][:3] == ["330 (0.66)", "300 (0.60)", "500"]
    (legend,) = drawn.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *(OURS, FA2, CUDNN, FLEX, "fagen without softcap", "cuDNN without softcap"),
        *("goal", "matrix product (cuBLAS)"),
    ]
    colors = {bar.get_facecolor() for bar in axes.patches}
    assert len(colors) == 6


def test_text_of_the_plot_does_not_overlap() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    names = [contestant.name for contestant in contestants.everyone()]
    tflops = dict.fromkeys([OURS, *names, PLAIN, CUDNN_PLAIN], 500.0)
    results = tuple(Result(row, tflops, matmul=700.0) for row in speed_bench.rows())
    drawn = plot.figure(dataclasses.replace(forward_report(), results=results), date="2026-01-02")
    FigureCanvasAgg(drawn).draw()
    (axes,) = drawn.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 13 * 9 and all(box.height >= 10 for box in boxes)
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
    names_boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(box.x0 >= 0 for box in names_boxes)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("speed.txt", SpecError, "is not named .png, .svg or .pdf"),
        ("nowhere/speed.png", SpecError, "no such directory"),
    ],
)
def test_a_path_that_cannot_be_drawn_to(name: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(error, match=message):
        plot.check(tmp_path / name)


def test_a_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(speed_bench, "run", lambda *_, **__: pytest.fail("measured before it looked"))
    assert main(["bench", "--forward", "--plot", "speed.png"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "fagen: error: --plot needs matplotlib: pip install 'fagen[bench]' (or matplotlib alone)"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "--forward"], "--compile, --forward, --backward, --decode or --variants"),
        (["--forward", "--rows", "d96"], "matches none of: d64 full 16k"),
        (["--forward", "--markdown", "--json"], "exclude each other"),
        (["--forward", "--against", "fa2,fa5"], "'fa5' is none of: fa2, cudnn"),
        (["--compile", "--no-flex"], "belong to --forward and --backward"),
        (["--compile", "--against", "fa2"], "belongs to --forward, --backward and --decode"),
        (["--decode", "--plot", "speed.png"], "belong to --forward and --backward"),
        (["--decode", "--against", "flex"], "'flex' is none of: fa2, cudnn, flash-attn, fa3"),
        (["--forward", "--grid"], "--grid belongs to --decode"),
        (["--compile", "--arch", "sm42"], "unknown architecture"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("what", ["--forward", "--decode"])
def test_without_a_gpu_it_says_so(what: str) -> None:
    program = f"import sys; from fagen.cli import main; sys.exit(main(['bench', '{what}']))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).resolve().parent.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 1 and done.stderr.startswith("fagen: error: no GPU that PyTorch can use")


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_tiny_row_on_the_gpu(softcap: bool, backward: bool) -> None:
    against = contestants.choose(["fa2", "cudnn", "flex"])
    row = Row(64, True, 256, softcap, backward, tokens=1024, width=128)
    report = speed_bench.run([row], against=against, samples=3)
    (result,) = report.results
    assert result.rates[OURS] and report.machine.card and report.machine.arch.startswith("sm")
    assert {f"{OURS}{suffix}" for suffix in ("", " under autograd", " forward and backward")} < set(report.host_us)
    assert result.rates[FLEX] and FLEX not in result.failures
    assert result.matmul and result.share_of_matmul and result.goal is None
    assert result.ratio(PLAIN if softcap else FA2)
    assert result.compared_with == (FLEX if softcap else FA2)
    assert result.difference is not None and result.difference < 1e-2
    assert speed_bench.markdown(report, date="today", command="fagen bench --forward")


@pytest.mark.gpu
def test_each_contestant_on_the_gpu_computes_the_same() -> None:
    """All that are installed, with and without softcap, forward and backward; one that cannot do a row says so."""
    for softcap in (False, True):
        for backward in (False, True):
            generator = torch.Generator("cuda").manual_seed(0)
            tensors = tuple(
                torch.randn(2, 256, 4, 64, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3)
            )
            for tensor in tensors:
                tensor.requires_grad_(backward)
            makers = speed_bench._makers(Row(64, True, 256, softcap, backward), contestants.choose(), None)
            _, outputs, _ = speed_bench.first_calls(makers, tensors)
            for name, output in outputs.items():
                if name not in (PLAIN, CUDNN_PLAIN):
                    torch.testing.assert_close(output, outputs[OURS], rtol=3e-2, atol=3e-2, msg=name)


@pytest.mark.gpu
def test_a_tiny_row_of_decoding_on_the_gpu() -> None:
    """Replayed graphs compute what the calls did."""
    against = contestants.choose(["fa2", "cudnn"], among=contestants.decoders())
    report = decode_bench.run([decode_bench.Row(2, 1024)], against=against, samples=3)
    (result,) = report.results
    assert not result.failures and report.smem_bytes["fwd"] > 0
    assert all(result.rates.values()) and result.share_of_copy
    assert result.difference is not None and result.difference < 1e-2 and result.compared_with == CUDNN
    assert decode_bench.markdown(report, date="today", command="fagen bench --decode")


@pytest.mark.gpu
def test_a_captured_graph_makes_every_call() -> None:
    values = [torch.zeros(1, device="cuda") for _ in range(3)]
    replay = decode_bench.captured([lambda x=x: x.add_(1) for x in values], 6)
    replay(), replay()
    torch.cuda.synchronize()
    assert [x.item() for x in values] == [4.0] * 3
