"""The command line: what each command prints, its exit codes, its JSON, and how it says no."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import python_path

from fagen import cache, toolchain
from fagen.cli import COMMANDS, EXAMPLES, load, main, output, specs
from fagen.errors import BuildError, LaunchError, SpecError, ToolchainError
from fagen.spec import AttentionSpec, feature_names

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--head-dim", "16", "--arch", "sm80", "--emulate")
NO_TORCH = (
    "import sys; from fagen.cli import main; code = main(sys.argv[1:]); sys.exit(9 if 'torch' in sys.modules else code)"
)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


class Fagen:
    """Runs command lines in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Outcome:
        self._capsys.readouterr()
        code = main(arguments)
        return Outcome(code, *self._capsys.readouterr())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Fagen:
    for name in ("FAGEN_ARCH", "TORCH_CUDA_ARCH_LIST", "FAGEN_COMPILER", "FAGEN_NVCC"):
        monkeypatch.delenv(name, raising=False)
    return Fagen(capsys)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of its own with two kernels."""
    directory = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAGEN_CACHE_DIR", str(directory))
        assert main(["build", "--head-dim", "8,16", "--arch", "sm80", "--emulate"]) == 0
    yield directory


@pytest.fixture
def copied(filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that cache, for a test that changes it."""
    directory = tmp_path / "cache"
    shutil.copytree(filled, directory, ignore=shutil.ignore_patterns(".*"))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(directory))
    return directory


def command(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHONPATH": python_path(ROOT)} | changes
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False, timeout=60
    )


def cuda_compiler() -> bool:
    try:
        toolchain.find_cuda_compiler()
    except ToolchainError:
        return False
    return True


# Spec flags


FIELDS = [name for name in AttentionSpec.model_fields if name != "custom"]  # for which modifications have flags


def given(**values: Any) -> dict[str, Any]:
    names = [*FIELDS, "both"]
    return dict.fromkeys(names) | {"head_dim": ["64"], "dtype": ["bf16"]} | values


def test_each_field_of_the_spec_has_a_flag(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = run("build", "--help").out
    for name in FIELDS:
        served = name not in feature_names() or specs._served(name)
        assert (f"--{name.replace('_', '-')}" in text) == served
        assert (str(AttentionSpec.model_fields[name].description) in " ".join(text.split())) == served


def test_a_spec_s_own_flags_name_it() -> None:
    spec = AttentionSpec(head_dim=128, head_dim_v=64, dtype="fp16", causal=True, window=True, softcap=True)
    lists: dict[str, Any] = {"head_dim": ["128"], "head_dim_v": ["64"], "dtype": ["fp16"]}
    assert specs.matrix(given(**lists, causal=True, window=True, softcap=True)) == [spec]
    assert spec.cli_flags()[:4] == ["--head-dim", "128", "--head-dim-v", "64"]


def test_a_feature_not_given_is_off_as_one_that_is_negated() -> None:
    assert specs.matrix(given()) == specs.matrix(given(dropout=False, causal=False)) == [AttentionSpec(head_dim=64)]


def test_a_matrix_is_the_product() -> None:
    made = specs.matrix(given(head_dim=["64,128", "256"], dtype=["bf16,fp16"], both=["causal", "softcap"]))
    assert len(made) == len(set(made)) == 3 * 2 * 4
    assert made[0] == AttentionSpec(head_dim=64)
    assert AttentionSpec(head_dim=256, dtype="fp16", causal=True, softcap=True) in made


def test_a_matrix_names_each_spec_once() -> None:
    assert specs.matrix(given(head_dim=["64,64"], head_dim_v=["64"])) == [AttentionSpec(head_dim=64)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"head_dim": ["64,100"]}, "head_dim=100 is not served"),
        ({"head_dim": ["512"]}, "head_dim=512 is not served"),
        ({"head_dim": ["wide"]}, "head_dim='wide'"),
        ({"head_dim": [","]}, "head_dim is required"),
        ({"dtype": ["int8"]}, "dtype='int8'"),
        ({"bias": True, "varlen": True}, "bias=True with varlen=True is not served: a tensor"),
        ({"both": ["casual"]}, "did you mean causal?"),
        ({"both": ["causal"], "causal": True}, "--both causal and --causal contradict"),
        ({"both": ["causal"], "causal": False}, "--both causal and --no-causal contradict"),
    ],
)
def test_what_is_not_served_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        specs.matrix(given(**values))


# build


def test_build_shows_a_table_and_then_finds_what_it_built(run: Fagen) -> None:
    first = run("build", *SMALL, "--force")
    assert first.code == 0
    assert "fwd_hdim16_bf16" in first.out and "sm80 CPU" in first.out and "cached" not in first.out
    second = run("build", *SMALL)
    assert second.code == 0 and "cached" in second.out


def test_build_json(run: Fagen) -> None:
    outcome = run("build", "--head-dim", "16", "--both", "causal", "--arch", "sm80", "--emulate", "--json")
    assert outcome.code == 0
    rows = outcome.document["artifacts"]
    assert [row["slug"] for row in rows] == ["fwd_hdim16_bf16_sm80", "fwd_hdim16_bf16_causal_sm80"]
    assert [AttentionSpec(**row["spec"]).causal for row in rows] == [False, True]
    for row in rows:
        assert row["emulated"] and row["registers"] is None and row["size"] > 0 and len(row["digest"]) == 64
        assert Path(row["binary"]).is_file() and Path(row["source"]).is_file()


@pytest.mark.skipif(not cuda_compiler(), reason="no CUDA compiler")
def test_build_json_of_a_cubin_reports_what_ptxas_said(run: Fagen) -> None:
    outcome = run("build", "--head-dim", "16", "--arch", "sm80,9.0", "--json")
    assert outcome.code == 0, outcome.err
    rows = outcome.document["artifacts"]
    assert [row["arch"] for row in rows] == ["sm80", "sm90"]
    for row in rows:
        assert not row["emulated"] and row["registers"] > 16 and row["spill_stores"] >= 0 and row["shared_memory"] > 0


def test_one_unserved_combination_stops_all(run: Fagen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    outcome = run("build", "--head-dim", "64,100", "--emulate")
    assert outcome.code == 2 and outcome.out == ""
    assert outcome.err.startswith("fagen: error: head_dim=100 is not served")
    assert not (tmp_path / "cache").exists()


def test_the_fallback_architecture_is_said(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fagen.target.gpu_capability", lambda: None)
    outcome = run("show", "--head-dim", "64", "--json")
    assert "using sm80" in outcome.err and outcome.document["kernels"][0]["slug"].endswith("_sm80")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0")
    outcome = run("show", "--head-dim", "64", "--json")
    assert outcome.err == "" and [kernel["slug"][-4:] for kernel in outcome.document["kernels"]] == ["sm86", "sm90"]
    monkeypatch.setattr("fagen.target.gpu_capability", lambda: (8, 9))
    assert run("show", "--head-dim", "64", "--json").document["kernels"][0]["slug"].endswith("_sm89")
    assert (
        run("show", "--head-dim", "64", "--arch", "native", "--json").document["kernels"][0]["slug"].endswith("_sm89")
    )


# show, list, clean


def test_show_prints_the_file_and_nothing_else(run: Fagen) -> None:
    from fagen.arch import resolve
    from fagen.plan import plan
    from fagen.render import render

    (kernel,) = plan(AttentionSpec(head_dim=64, softcap=True), resolve("sm90"))
    shown = run("show", "--head-dim", "64", "--backward", "--arch", "sm90", "--kernel", "bwd_delta", "--json").document
    assert [row["slug"] for row in shown["kernels"]] == ["bwd_delta_hdim64_bf16_backward_sm90"]
    refused = run("show", "--head-dim", "64", "--backward", "--arch", "sm90", "--kernel", "dq")
    assert refused.code == 2 and "fwd, bwd_delta, bwd, bwd_convert" in refused.err
    outcome = run("show", "--head-dim", "64", "--softcap", "--arch", "sm90")
    assert outcome.code == 0 and outcome.err == "" and outcome.out == render(kernel)
    outcome = run("show", "--head-dim", "64", "--softcap", "--arch", "sm90", "--emulate", "--json")
    assert outcome.document["kernels"] == [
        {"slug": kernel.slug, "target": "emulate", "source": render(kernel, "emulate")}
    ]


def test_list(run: Fagen, copied: Path) -> None:
    outcome = run("list")
    assert outcome.code == 0 and "2 built kernels" in outcome.err
    assert "fwd_hdim8_bf16 " in outcome.out and "fwd_hdim16_bf16 " in outcome.out
    document = run("list", "--json").document
    assert document["cache"] == str(copied)
    row = document["artifacts"][0]
    assert row["spec"]["head_dim"] in (8, 16) and row["arch"] == "sm80" and row["size"] > 0 and row["age"] >= 0
    assert [row["slug"] for row in run("list", "--json", "*hdim8*").document["artifacts"]] == ["fwd_hdim8_bf16_sm80"]


def test_list_of_nothing(run: Fagen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "none"))
    outcome = run("list")
    assert outcome.code == 0 and outcome.out == "" and "0 built kernels" in outcome.err
    assert run("list", "--json").document["artifacts"] == []
    assert not (tmp_path / "none").exists()


def test_list_says_what_compiled_each_and_when_it_was_used(run: Fagen, copied: Path) -> None:
    (directory,) = copied.glob("fwd_hdim8_*")
    os.utime(directory / cache.MANIFEST, (1, time.time() - 3 * 86400))
    os.utime(directory, (1, time.time() - 3 * 3600))
    (copied / "failed" / "fwd_hdim24_bf16_sm80-0123456789ab").mkdir(parents=True)
    document = run("list", "--json").document
    (row,) = (row for row in document["artifacts"] if row["slug"] == "fwd_hdim8_bf16_sm80")
    assert row["kind"] == "fwd" and row["compiler"] == toolchain.find_host_compiler().identity
    assert 3 * 86400 <= row["age"] < 3 * 86400 + 60 and 3 * 3600 <= row["used"] < 3 * 3600 + 60
    assert row["disk"] == sum(path.stat().st_size for path in directory.iterdir()) > row["size"]
    assert [entry["problem"] for entry in document["unreadable"]] == ["its build failed"]
    outcome = run("list", "*hdim8_*")
    assert "3 d ago" in outcome.out and "3 h ago" in outcome.out and row["compiler"] in outcome.out
    assert run("build", "--head-dim", "8", "--arch", "sm80", "--emulate").code == 0
    (row,) = run("list", "--json", "*hdim8_*").document["artifacts"]
    assert row["used"] < 60 and row["age"] >= 3 * 86400


def test_clean_takes_the_code_of_templates(run: Fagen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path))
    code = tmp_path / ".templates"
    code.mkdir()
    (code / "some").write_bytes(b"code")
    for what in (["--older-than", "30d"], ["--dry-run"]):
        assert run("clean", *what, "--yes").code == 0
        assert code.exists()
    assert run("clean", "--yes").code == 0
    assert not code.exists()


def test_clean_by_last_use_and_by_size(run: Fagen, copied: Path) -> None:
    (old,), (new,) = copied.glob("fwd_hdim8_*"), copied.glob("fwd_hdim16_*")
    os.utime(old, (1, time.time() - 40 * 86400))
    assert run("clean", "--older-than", "60d", "--yes", "--json").document["removed"] == 0
    assert run("clean", "--older-than", "30d", "--dry-run", "--json").document["artifacts"][0]["directory"] == str(old)
    size = sum(path.stat().st_size for path in new.iterdir())
    assert run("clean", "--keep-size", "1G", "--yes", "--json").document["removed"] == 0
    document = run("clean", "--keep-size", str(size), "--yes", "--json").document
    assert document["removed"] == 1 and [one["directory"] for one in document["artifacts"]] == [str(old)]
    assert not old.exists() and new.is_dir()
    os.utime(new, (1, time.time() - 8 * 86400))
    assert run("clean", "--older-than", "1w", "--yes").code == 0 and not new.exists()


def test_clean_without_a_limit_it_can_read(run: Fagen, copied: Path) -> None:
    for flag, value in (("--older-than", "30"), ("--older-than", "-1d"), ("--keep-size", "2X"), ("--keep-size", "")):
        outcome = run("clean", flag, value, "--yes")
        assert outcome.code == 2 and f"{flag}: {value!r} is no" in outcome.err
    assert len(cache.list_artifacts()) == 2


def test_why(run: Fagen, copied: Path) -> None:
    flags = ("--arch", "sm80", "--emulate")
    assert "fwd_hdim8_bf16_sm80 CPU: built, in" in run("why", "--head-dim", "8", *flags).out
    outcome = run("why", "--head-dim", "8", "--causal", *flags)
    assert outcome.code == 0 and "would be built" in outcome.out and "causal=False -> causal=True" in outcome.out
    (row,) = run("why", "--head-dim", "8", "--arch", "sm90", "--emulate", "--json").document["kernels"]
    assert not row["built"] and row["differences"] == [{"ingredient": "arch", "built": "sm80", "asked": "sm90"}]
    assert Path(row["nearest"]).name.startswith("fwd_hdim8_bf16_sm80-")


def test_clean_takes_what_is_named(run: Fagen, copied: Path) -> None:
    before = run("list", "--json").document["artifacts"]
    dry = run("clean", "fwd_hdim8_bf16_sm80", "--dry-run", "--json").document
    assert dry["dry_run"] and dry["removed"] == 0 and len(dry["artifacts"]) == 1
    assert run("list", "--json").document["artifacts"][0]["digest"] == before[0]["digest"]
    document = run("clean", "fwd_hdim8_bf16_sm80", "-y", "--json").document
    assert document["removed"] == 1 and document["freed"] > 0
    assert [row["slug"] for row in run("list", "--json").document["artifacts"]] == ["fwd_hdim16_bf16_sm80"]
    assert run("clean", "--yes").code == 0
    assert run("list", "--json").document["artifacts"] == []


def test_clean_of_a_name_that_is_not_there(run: Fagen, copied: Path) -> None:
    outcome = run("clean", "fwd_hdim8_bf16_sm90", "-y")
    assert outcome.code == 2 and "did you mean fwd_hdim8_bf16_sm80?" in outcome.err
    assert len(cache.list_artifacts()) == 2


def test_clean_never_removes_without_an_answer(run: Fagen, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    outcome = run("clean")
    assert outcome.code == 2 and "--yes" in outcome.err
    assert len(cache.list_artifacts()) == 2


@pytest.mark.parametrize(("answer", "left", "code"), [("n", 2, 1), ("y", 0, 0)])
def test_clean_asks_at_a_terminal(copied: Path, answer: str, left: int, code: int) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fagen", "clean"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(os.environ) | {"PYTHONPATH": python_path(ROOT)},
    )
    os.close(theirs)
    os.write(ours, f"{answer}\n".encode())
    assert process.wait(timeout=30) == code
    assert b"Remove 2 built kernels" in os.read(ours, 10000)
    os.close(ours)
    assert len(cache.list_artifacts()) == left


# check


def test_check_says_all_that_one_wants_to_know(run: Fagen) -> None:
    shape = ("--batch", "1", "--heads", "2", "--heads-k", "1", "--seqlen-q", "33", "--seqlen-k", "40", "--seed", "3")
    outcome = run("check", *SMALL, "--causal", *shape)
    assert outcome.code == 0, outcome.err
    for text in (
        "fwd_hdim16_bf16_causal_sm80",
        "CPU (emulated)",
        "batch 1, 2 heads over 1, 33 queries, 40 keys, seed 3",
        "reference  ",
        "kernel     ",
        "error of o",
        "of 2.50e-03",
        "error of lse",
        "row",
        "dim",
        "time",
        "a block",
        "right",
    ):
        assert text in outcome.out
    document = run("check", *SMALL, "--causal", *shape, "--json").document
    assert document["passed"]
    (result,) = document["checks"]
    assert result["shape"] == {"batch": 1, "heads": 2, "heads_k": 1, "seqlen_q": 33, "seqlen_k": 40}
    assert result["o"]["error"] <= result["o"]["budget"] and result["o"]["worst"]["dim"] in range(16)


def test_check_of_gradients(run: Fagen) -> None:
    shape = ("--batch", "1", "--seqlen-q", "33", "--seqlen-k", "20")
    outcome = run("check", *SMALL, "--backward", "--both", "causal", *shape)
    assert outcome.code == 0, outcome.err
    for text in (
        "error of dq",
        "error of dk",
        "error of dv",
        "of 1.00e-02",
        "key",
        "bwd_hdim16_bf16_causal_backward",
        "gradients",
    ):
        assert text in outcome.out
    assert "2 of 2 kernels are right" in outcome.err
    document = run("check", *SMALL, "--backward", "--deterministic", *shape, "--json").document
    (result,) = document["checks"]
    assert result["spec"]["deterministic"] and result["slug"] == "bwd_hdim16_bf16_backward_deterministic_sm80"
    assert document["passed"] and list(result["gradients"]) == ["dq", "dk", "dv"]
    assert result["gradients"]["dq"]["error"] <= result["gradients"]["dq"]["budget"]


def test_check_past_the_budget_fails(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import check

    right = check.check

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = right(*arguments, **named)
        o = dataclasses.replace(result.o, error=float("nan"), passed=False)
        return dataclasses.replace(result, o=o, passed=False)

    monkeypatch.setattr(check, "check", wrong)
    outcome = run("check", *SMALL)
    assert outcome.code == 1 and "past the budget" in outcome.out and "too much" in outcome.out


def test_check_of_a_kernel_that_stops_goes_on_with_the_others(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import check

    right = check.check

    def stops(spec: AttentionSpec, **named: Any) -> Any:
        if spec.causal:
            raise LaunchError("line 7, block 0, warp 1, lane 2: read of an unwritten shared word")
        return right(spec, **named)

    monkeypatch.setattr(check, "check", stops)
    arguments = ("check", *SMALL, "--both", "causal", "--seqlen-q", "16")
    outcome = run(*arguments)
    assert outcome.code == 1 and "unwritten shared word" in outcome.out and "1 of 2 kernels are right" in outcome.err
    outcome = run(*arguments, "--json")
    assert outcome.code == 1 and [check["passed"] for check in outcome.document["checks"]] == [True, False]


def test_check_refuses_sizes_that_cannot_be(run: Fagen) -> None:
    outcome = run("check", *SMALL, "--heads", "3", "--heads-k", "2")
    assert outcome.code == 2 and "fagen: error: heads=3" in outcome.err and outcome.out == ""


DECODE = ("check", *SMALL, "--decode", "--split-kv", "--batch", "2", "--seqlen-k", "100", "--heads", "8")


def test_check_of_decoding(run: Fagen) -> None:
    outcome = run(*DECODE, "--both", "paged")
    assert outcome.code == 0, outcome.err
    for text in (
        "fwd_hdim16_bf16_splitkv_sm80",
        "fwd_hdim16_bf16_paged_splitkv_sm80",
        "CPU (emulated)",
        "a block",
        "error of lse",
        "0 to 100",
        "chosen",
        "worst call",
        "of 2.50e-03",
    ):
        assert text in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if line.split()[1:2] == ["8/4"]]
    assert len(rows) == 2 * 2 * 3 and all(row[-1] == "right" for row in rows)
    assert [row[-4] for row in rows[:3]] == ["chosen", "1", "5"] and "TB/s" not in outcome.out
    assert "2 of 2 kernels are right" in outcome.err
    document = run(*DECODE, "--json").document
    (result,) = document["checks"]
    assert document["passed"] and result["passed"] and len(result["calls"]) == 6
    assert result["calls"][0]["o"]["error"] <= result["calls"][0]["o"]["budget"]


def test_check_of_decoding_past_the_budget_fails(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import check_decode

    right = check_decode.check_decode

    def wrong(*arguments: Any, **named: Any) -> Any:
        """As on a card, with times, and one call wrong."""
        result = right(*arguments, **named)
        calls = [dataclasses.replace(call, seconds=1e-5) for call in result.calls]
        lse = dataclasses.replace(calls[1].lse, error=float("nan"), passed=False)
        calls[1] = dataclasses.replace(calls[1], lse=lse)
        return dataclasses.replace(result, calls=tuple(calls), emulated=False)

    monkeypatch.setattr(check_decode, "check_decode", wrong)
    outcome = run(*DECODE)
    assert outcome.code == 1 and "past the budget" in outcome.out
    assert outcome.out.count("right") == 5 and "TB/s" in outcome.out and outcome.out.count("10.0 us") == 6
    assert "splits 1" in next(line for line in outcome.out.splitlines() if "worst call" in line)


def test_check_of_decoding_that_stops_or_cannot_be(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    from fagen import check_decode

    def stops(cases: Any, **named: Any) -> Any:
        raise LaunchError(f"{cases[0].id}: a fault")

    monkeypatch.setattr("fagen.build.build", lambda *_, **__: None)
    monkeypatch.setattr(check_decode, "check_decode", stops)
    outcome = run(*DECODE)
    assert outcome.code == 1 and "b2h8k4-q1k100: a fault" in outcome.out and "stopped" in outcome.out
    monkeypatch.setattr("fagen.build.build", lambda *_, **__: pytest.fail("built before it looked"))
    for arguments, message in ((DECODE[:-2], "add --split-kv"), (DECODE, "multiple")):
        more = ("--no-split-kv",) if arguments is not DECODE else ("--heads-k", "3")
        outcome = run(*arguments, *more)
        assert outcome.code == 2 and message in outcome.err and outcome.out == ""


# How it says no


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["build", "--head-dim", "100"], 2, "pad the tensors to 104"),
        (["build", "--head-dim", "512"], 2, "from 8 to 256"),
        (["build", "--head-dim", "64", "--dtype", "int8"], 2, "input should be 'bf16' or 'fp16'"),
        (["build", "--head-dim", "64", "--arch", "sm42"], 2, "unknown architecture 'sm42'; known: sm75"),
        (["build", "--head-dim", "64", "--arch", ","], 2, "an empty architecture list"),
        (["build", "--head-dim", "64", "--sofcap"], 2, "--softcap"),
        (["build", "--head-dim", "64", "-j", "0"], 2, "-j"),
        (["build"], 2, "--head-dim"),
        (["buidl"], 2, "Did you mean 'build'"),
        (["show", "surplus", "--head-dim", "64"], 2, "surplus"),
        (["bench"], 2, "--compile, --forward, --backward, --decode or --variants"),
    ],
)
def test_bad_input_is_one_clear_error(run: Fagen, arguments: list[str], code: int, message: str) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith("fagen: error: ") and message in outcome.err and "Traceback" not in outcome.err
    outcome = run(*arguments, "--json")
    error = outcome.document["error"]
    assert outcome.code == error["exit_code"] == code and message in error["message"]


def test_nvcc_missing(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_NVCC", "/nowhere/nvcc")
    outcome = run("build", "--head-dim", "64", "--arch", "sm80", "--json")
    assert outcome.code == 1 and outcome.document["error"]["type"] == "ToolchainError"
    assert "fagen: error: FAGEN_NVCC='/nowhere/nvcc' is not an executable" in outcome.err


def test_a_failed_build_shows_command_log_and_source(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise BuildError("it does not compile", command=["nvcc", "a b"], log="x.cu(3): error: no", source=Path("x.cu"))

    monkeypatch.setattr("fagen.build.build", fails)
    outcome = run("build", *SMALL)
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        "fagen: error: it does not compile",
        "  x.cu(3): error: no",
        "command: nvcc 'a b'",
        "source kept: x.cu",
    ]
    assert run("build", *SMALL, "--json").document["error"] == {
        "type": "BuildError",
        "message": "it does not compile",
        "exit_code": 1,
        "command": ["nvcc", "a b"],
        "log": "x.cu(3): error: no",
        "source": "x.cu",
    }


def test_ctrl_c_is_one_line(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fagen.build.build", interrupted)
    assert run("build", *SMALL) == (130, "", "fagen: interrupted\n")
    assert run("build", *SMALL, "--json").document["error"]["exit_code"] == 130


def test_ctrl_c_in_the_middle_of_a_build_leaves_a_sound_cache(
    run: Fagen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path))
    line = ["build", "--head-dim", "8,16,24,32,40,48,56,64", "--arch", "sm80", "--emulate", "-j", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "fagen", *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ) | {"PYTHONPATH": python_path(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not cache.list_artifacts() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "fagen: interrupted\n")
    kept = run("list", "--json").document["artifacts"]
    assert 1 <= len(kept) < 8
    # What is listed is whole: it is found again, without a warning.
    outcome = run("build", "--head-dim", str(kept[0]["spec"]["head_dim"]), "--arch", "sm80", "--emulate", "--json")
    assert outcome.err == "" and outcome.document["artifacts"][0]["cached"]


def test_a_warning_is_one_line_on_standard_error(run: Fagen, copied: Path) -> None:
    (artifact,) = [artifact for artifact in cache.list_artifacts() if "hdim8_" in artifact.slug]
    artifact.binary.write_bytes(b"")
    outcome = run("build", "--head-dim", "8", "--arch", "sm80", "--emulate", "--json")
    assert outcome.code == 0 and outcome.err.startswith("fagen: warning: ") and "damaged" in outcome.err
    assert outcome.err.count("\n") == 1 and not outcome.document["artifacts"][0]["cached"]


def test_without_pytorch_only_what_computes_fails(run: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run("build", *SMALL).code == 0
    outcome = run("check", *SMALL)
    assert outcome.code == 1 and "pip install torch" in outcome.err


# Start-up


def test_help_lists_every_command(run: Fagen) -> None:
    outcome = run("--help")
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    for name, (_, line) in COMMANDS.items():
        assert f"{name} {line}" in text
        help_text = run(name, "--help")
        assert help_text.code == 0 and line in " ".join(help_text.out.split())
    assert run("-h").code == 0 and run("--version").out.startswith("fagen ")
    assert run().code == 2


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_the_help_are_valid(name: str) -> None:
    words = shlex.split(EXAMPLES[name].split(" | ")[0])
    assert words[:2] == ["fagen", name]
    assert load(name).make_context(name, words[2:]).params  # the flags exist and take these values


def test_python_m_fagen() -> None:
    done = command("-m", "fagen", "show", "--head-dim", "64", "--arch", "sm80")
    assert done.returncode == 0 and done.stdout.startswith("// fwd_hdim64_bf16_sm80")
    done = command("-m", "fagen", "show", "--head-dim", "63")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["build", *SMALL],
        ["show", "--head-dim", "64", "--arch", "sm80"],
        ["list"],
        ["why", *SMALL],
        ["clean", "-n"],
        ["doctor"],
    ],
)
def test_torch_is_not_imported(arguments: list[str]) -> None:
    assert command("-c", NO_TORCH, *arguments).returncode in (0, 1)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from fagen.cli import main; main(['--help']);"
        "sys.exit(bool({'torch', 'pydantic', 'jinja2', 'numpy', 'cuda'} & set(sys.modules)))"
    )
    assert command("-c", program).returncode == 0


# Numbers for people


def test_sizes_durations_and_ages() -> None:
    assert [output.size(count) for count in (0, 512, 2048, 40000, 3 * 2**20)] == [
        "0 B",
        "512 B",
        "2.0 KiB",
        "39.1 KiB",
        "3.0 MiB",
    ]
    assert [output.duration(s) for s in (12.345, 1.0, 0.5, 0.0123, 35e-6, 0.0)] == [
        "12.3 s",
        "1.00 s",
        "0.500 s",
        "12.3 ms",
        "35.0 us",
        "0.00 us",
    ]
    assert [output.age(s) for s in (-1, 5, 61, 7300, 200000)] == ["0 s", "5 s", "1 min", "2 h", "2 d"]


def test_json_has_no_numbers_that_json_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    output.emit({"a": float("-inf"), "b": [float("nan"), 1.5], "c": Path("x")})
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": "-inf", "b": ["nan", 1.5], "c": "x"}
