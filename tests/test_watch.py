"""`fagen watch`, driven by changes of real files: verdicts, what survives, and what each is compared with."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, GRADIENTS
from processes import python_path
from test_cli import NO_TORCH, Fagen, cuda_compiler, run  # noqa: F401

from fagen import check, origin, watch, watch_worker
from fagen.arch import resolve
from fagen.cli.watch import lines
from fagen.errors import FagenError, SpecError
from fagen.spec import AttentionSpec
from fagen.watch import Error, Row, Saves, Variant, Verdict, kind_of
from fagen.watch_worker import calls

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ("--head-dim", "16", "--causal", "--arch", "sm80", "--emulate")
SLUG = "hdim16_bf16_causal_sm80"

# Small, so that a verdict takes a second: two calls, and that of `fagen check`.
TABLE = """\
from fagen.check import Case
from fagen.spec import AttentionSpec

SPEC = AttentionSpec(head_dim=16, causal=True)
CASES = [Case(spec=SPEC, seqlen_q=17, seqlen_k=64), Case(spec=SPEC, seqlen_q=70, seqlen_k=70)]
GRADIENTS = []
"""
CALLS = ["b1h2k1-q17k64", "b1h2k1-q70k70", "b2h2k1-q150k170"]
ENDLESS = "    for (volatile int i = 0;; i = 1 - i) {\n    }\n"
BEGIN = "    const u32 Q_smem = shared_base();\n"  # a line at the top of the forward kernel, which every kernel has


class Watching:
    """A `fagen watch` in a process group of its own, on a copy of the checkout, and what it prints of the variant that
    `slug` matches."""

    def __init__(self, root: Path, flags: Sequence[str], slug: str) -> None:
        self.root, self._slug = root, slug
        self.forward = root / "templates" / "sm80" / "fwd.cu.j2"
        self.text = self.forward.read_text()
        assert self.text.count(BEGIN) == 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fagen", "watch", *flags],
            cwd=root,
            env=dict(os.environ) | {"PYTHONPATH": python_path(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join(timeout=30)
        self.forward.write_text(self.text)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def until(self, pattern: str, seconds: float = 90) -> str:
        """All that is printed up to a line that matches, and that line."""
        seen: list[str] = []
        end = time.monotonic() + seconds
        while not seen or not re.search(pattern, seen[-1]):
            try:
                seen.append(self._lines.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                raise AssertionError(f"no line matches {pattern!r} in:\n" + "\n".join(seen)) from None
        return "\n".join(seen)

    def verdict(self, state: str) -> str:
        """What is printed with the next verdict, which has to be `state`."""
        said = self.until(rf"^{self._slug}: ")
        assert re.search(rf"^{self._slug}: {state}", said, re.M), said
        return said + "\n" + self.until("^$") if "unchanged" not in said else said

    def insert(self, text: str) -> str:
        """Saves the forward with `text` at the top of its kernel, in one step, as editors do. Returns where it is."""
        head, mark, tail = self.text.partition(BEGIN)
        self.save(head + mark + text + tail)
        return f"sm80/fwd.cu.j2:{(head + mark).count(chr(10)) + 1}"

    def save(self, text: str) -> None:
        beside = self.forward.with_name("fwd.cu.j2.saving")
        beside.write_text(text)
        beside.replace(self.forward)

    def end(self) -> int:
        """Ctrl-C, as a terminal sends it: to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(timeout=30)
        self._reader.join(timeout=30)
        return code


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package and the templates, with a case table of its own."""
    root = tmp_path_factory.mktemp("checkout")
    for folder in ("fagen", "templates"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tests").mkdir()
    (root / "tests" / "cases.py").write_text(TABLE)
    return root


@pytest.fixture
def watching(checkout: Path) -> Iterator[Watching]:
    with Watching(checkout, (*FLAGS, "--limit", "3"), SLUG) as one:
        yield one


def test_each_save_gets_a_verdict(watching: Watching) -> None:
    first = watching.verdict("right")
    assert "watching templates; Ctrl-C ends it" in first and "CPU (emulated), 3 calls" in first
    assert re.search(r"error of o +0\.\d+ of its budget$", first, re.M)
    known = r"\d+" if cuda_compiler() else "unknown"
    assert re.search(rf"^  kernel +registers.*\n.*\n  fwd +{known} ", first, re.M)

    # Other text, the same kernel.
    watching.insert("    // nothing\n")
    said = watching.verdict("right")
    assert re.search(r"^\d\d:\d\d:\d\d  saved templates/sm80/fwd.cu.j2$", said, re.M)
    assert re.search(r", [\d.]+ s after the save$", said, re.M)
    assert re.search(r"error of o +0\.\d+ of its budget, as before$", said, re.M)
    assert "registers, spills, stack and shared memory as in the last good run" in said

    # Text that leaves no trace in the kernel.
    watching.insert("    // nothing\n{# of any kernel #}\n")
    assert "unchanged, right" in watching.verdict("unchanged")

    # What does not render, nor compile, nor run, nor compute what it should.
    place = watching.insert("{% if %}\n")
    said = watching.verdict("does not render")
    assert f"{place.replace(':', ', line ')}: " in said
    place = watching.insert("    int missing = absent;\n")
    said = watching.verdict("does not compile")
    assert re.search(rf"^ +{re.escape(place)} \(kernel\.c\w+:\d+\): error: .*absent", said, re.M)
    place = watching.insert("    if (threadIdx.x != 3) __syncthreads();\n")
    said = watching.verdict("stopped")
    assert CALLS[0] in said and re.search(rf"line \d+ \({re.escape(place)}\)", said)
    watching.save(watching.text.replace("masks.mask(masks.at_edge())", "''"))
    said = watching.verdict("past the budget")
    assert re.search(
        rf"^  o of {CALLS[0]}: .*\n    batch 0, head \d, row \d+, dim \d+: kernel .*, reference ", said, re.M
    )
    assert re.search(r"error of o +0\.\d+ -> [\d.]+ \(\+[\d.]+\) of its budget$", said, re.M)

    # What ends the process that runs it, or would never end.
    watching.insert("    if (threadIdx.x == 3) *reinterpret_cast<volatile int*>(8) = 1;\n")
    assert f"{CALLS[0]}: the process died of SIGSEGV" in watching.verdict("stopped")
    watching.insert(ENDLESS)
    assert f"{CALLS[0]}: has not ended within 3 s" in watching.verdict("stopped")

    # A save while a verdict is made: the last text gets one, and nobody waits for the other's.
    watching.insert("    // this time a save ends it\n" + ENDLESS)
    watching.until("saved")
    time.sleep(1.5)
    watching.insert("    // something\n")
    said = watching.verdict("right")  # the last good run is still what it is compared with
    assert re.search(r"error of o +0\.\d+ of its budget, as before$", said, re.M)

    # Code of fagen, and the table of calls.
    (watching.root / "fagen" / "plan.py").touch()
    assert "fagen/plan.py is code of fagen itself" in watching.until("code of fagen")
    (watching.root / "tests" / "cases.py").write_text(TABLE.replace("seqlen_q=17", "seqlen_q=0"))
    assert "saved tests/cases.py" in watching.verdict("right")

    assert watching.end() == 130
    with pytest.raises(ProcessLookupError):  # nothing is left of it
        for _ in range(100):
            os.killpg(watching.process.pid, 0)
            time.sleep(0.1)


def test_costs_are_compared(checkout: Path) -> None:
    if not cuda_compiler():
        pytest.skip("no CUDA compiler")
    with Watching(checkout, FLAGS, SLUG) as watching:
        watching.verdict("right")
        watching.insert(
            "#ifdef __CUDA_ARCH__\n    __shared__ volatile float more[256];\n    more[threadIdx.x] = 0.0f;\n#endif\n"
        )
        said = watching.verdict("right")
        assert re.search(r"^  shared memory, static  0 B -> 1\.0 KiB \(\+1\.0 KiB\)$", said, re.M), said
        assert "as in the last good run" not in said


@pytest.mark.gpu
def test_on_a_gpu(checkout: Path) -> None:
    """Times too; and what ends a CUDA context does not end the watch."""
    pytest.importorskip("watchfiles")
    with Watching(checkout, ("--head-dim", "16", "--split-kv"), r"hdim16_bf16_splitkv_\w+") as watching:
        first = watching.verdict("right")
        assert re.search(r"^  time +[\d.]+ \w+$", first, re.M) and "emulated" not in first
        watching.insert("    if (threadIdx.x == 3) *reinterpret_cast<volatile int*>(8) = 1;\n")
        watching.verdict("stopped")
        watching.insert("    // nothing\n")
        said = watching.verdict("right")
        assert re.search(r"^  time +[\d.]+ \w+( -> [\d.]+ \w+ \([+-][\d.]+%\)|, as before)$", said, re.M), said


# One verdict


def once(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ) | {"PYTHONPATH": python_path(root)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=90
    )


def test_once(checkout: Path) -> None:
    """The exit code is the verdict's, and the process that watches never imports torch."""
    done = once(checkout, "-c", NO_TORCH, "watch", *FLAGS, "--once", "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert done.stderr == "" and document["passed"]
    (verdict,) = document["verdicts"]
    assert verdict["slug"] == SLUG and verdict["state"] == "right" and verdict["calls"] == 3
    assert set(verdict["errors"]) == {"o", "lse"} and verdict["failures"] == []
    assert all(0 < each["ratio"] <= 1 and each["call"] in CALLS for each in verdict["errors"].values())
    assert [report["kind"] for report in verdict["kernels"]] == ["fwd"]

    mask = checkout / "templates" / "common" / "mask.cuh.j2"
    text = mask.read_text()
    assert text.count("min(seqlen_k - 1, position) - col0") == 1
    mask.write_text(text.replace("min(seqlen_k - 1, position) - col0", "min(seqlen_k - 1, position + 1) - col0"))
    try:
        done = once(checkout, "-m", "fagen", "watch", *FLAGS, "--once")
    finally:
        mask.write_text(text)
    assert done.returncode == 1 and f"{SLUG}: past the budget" in done.stdout


def test_folders_of_mods_reach_the_process_that_runs(checkout: Path) -> None:
    examples = Path(__file__).resolve().parent.parent / "examples" / "mods"
    done = once(checkout, "-m", "fagen", "watch", "--mods", str(examples), *FLAGS, "--softsign", "--once")
    assert done.returncode == 0 and "_softsign_sm80: right" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (("--json",), 2, "--json prints one document: add --once"),
        (("--limit", "0"), 2, "--limit 0 is no number of seconds above 0"),
        (("--limit", "nan"), 2, "--limit nan is no number of seconds above 0"),
        (("--arch", "sm80,sm81"), 2, "sm81"),
        ((), 1, "watch needs watchfiles: pip install 'fagen[watch]' (or watchfiles alone)"),
    ],
)
def test_what_cannot_be(
    run: Fagen,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "watchfiles" else find_spec(name))
    outcome = run("watch", "--head-dim", "64", "--emulate", *flags)
    assert outcome.code == code and "fagen: error: " in outcome.err and said in outcome.err


# Parts


def test_saves_are_told_once(templates: Path) -> None:
    """Written in place, renamed into place, or removed; what an editor writes beside is not."""
    mask, forward, product = (
        templates / name for name in ("common/mask.cuh.j2", "sm80/fwd.cu.j2", "common/product.cuh.j2")
    )
    with Saves() as saves:
        for _ in range(2):
            mask.write_text("")
        beside = forward.with_name("4913")
        beside.write_text("")
        beside.replace(forward)
        product.unlink()
        for name in ("sm80/.fwd.cu.j2.swp", "sm80/fwd.cu.j2~", "sm80/.#fwd.cu.j2", "sm80/#fwd.cu.j2#"):
            (templates / name).write_text("")
        found = saves.take()
        while found != {mask, forward, product}:
            found |= saves.take()
        assert not saves.ready.poll(1)


def test_folders_that_cannot_be_watched(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "template_folders", lambda: (templates / "absent",))
    with pytest.raises(FagenError, match="cannot be watched"), Saves():
        pass


def test_a_save_is_as_old_as_its_file(tmp_path: Path) -> None:
    before = time.time()
    kept, gone = tmp_path / "kept", tmp_path / "gone"
    kept.write_text("")
    os.utime(kept, (0, 0))  # as copied with its times
    assert before - 0.1 <= watch.saved_at([kept, gone]) <= time.time()
    assert before <= watch.saved_at([gone]) <= time.time()


def named(cases: list[check.Case]) -> set[tuple[Any, ...]]:
    return {(case.spec, case.id) for case in cases}


def places(cases: Iterable[check.Case]) -> set[tuple[Any, ...]]:
    """The calls, but for their heads and the spec."""
    return {(case.batch, case.seqlen_q, case.seqlen_k, case.window, case.layout) for case in cases}


def rows_with(*features: str) -> list[check.Case]:
    return [row for row in (*CASES, *GRADIENTS) if row.spec.features == features and not row.large]


def test_calls_are_those_of_the_features() -> None:
    """The rows with exactly these features, at the spec's own head dims and type; and the call of fagen check."""
    spec = AttentionSpec(head_dim=128, dtype="fp16", window=True)
    rows = rows_with("window")
    assert len(rows) > 12 and not any(row.spec == spec for row in rows)
    found = calls(spec, emulated=True, every=False)
    assert places(found) == places([check.default_case(spec, True), *rows])
    assert all(case.spec == spec for case in found)
    sizes = [case.batch * case.heads * case.seqlen_q * case.seqlen_k for case in found]
    assert sizes == sorted(sizes)
    assert any(case.large for case in calls(spec, emulated=False, every=False))
    every = calls(spec, emulated=True, every=True)
    assert places(every) >= places([*rows, *rows_with()]) and len(every) > len(found)


def test_calls_of_many_rows() -> None:
    """All of the spec itself, as they are, and of the others those that take no more than a moment."""
    spec = AttentionSpec(head_dim=256)
    own = [row for row in rows_with() if row.spec == spec]
    assert own and len(places(rows_with())) > 24
    found = calls(spec, emulated=True, every=False)
    assert len(found) == 24 and {row.id for row in own} <= {case.id for case in found}
    largest = max(rows_with(), key=lambda row: row.batch * row.heads * row.seqlen_q * row.seqlen_k)
    assert places([largest]) <= places(found) <= places([check.default_case(spec, True), *rows_with()])
    assert places(calls(spec, emulated=True, every=True)) >= places(rows_with())
    assert len(calls(AttentionSpec(head_dim=32, causal=True, backward=True), emulated=True, every=False)) == 12


def test_another_spec_s_row_has_enough_elements() -> None:
    """The relative error of a few elements may be past the budget by chance."""
    spec = AttentionSpec(head_dim=8, causal=True)
    for case in calls(spec, emulated=True, every=False):
        elements = case.batch * case.heads * case.seqlen_q * spec.dim_v
        assert elements == 0 or elements >= 4096
        assert case.heads % case.heads_k == 0


def test_calls_of_a_kernel_with_few_rows() -> None:
    """Others of the same shapes of tensors, whose features are among its own."""
    spec = AttentionSpec(head_dim=64, causal=True, varlen=True, softcap=True, backward=True)
    nearest, further = rows_with("causal", "varlen", "backward"), rows_with("varlen", "backward")
    assert nearest and further and not rows_with(*spec.features)
    found = calls(spec, emulated=True, every=False)
    assert places(nearest) <= places(found) <= places([check.default_case(spec, True), *nearest, *further])
    assert len(found) <= 12 and all(case.spec == spec for case in found)


def test_without_the_table_the_call_is_that_of_check(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(head_dim=64)
    monkeypatch.setattr("fagen.watch_worker.case_table", lambda: None)
    assert named(calls(spec, emulated=True, every=True)) == named([check.default_case(spec, True)])


def test_a_table_with_a_mistake_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "cases.py"
    table.write_text("CASES = [")
    monkeypatch.setattr("fagen.watch_worker.case_table", lambda: table)
    with pytest.raises(FagenError, match=r"cases\.py cannot be read: SyntaxError"):
        calls(AttentionSpec(head_dim=64), emulated=True, every=False)


def test_a_row_that_cannot_be_called_ends_a_verdict_and_a_bad_setting_all(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(head_dim=16)
    row = check.Case(spec=spec, heads=3, heads_k=2, seqlen_q=1)
    monkeypatch.setattr("fagen.watch_worker._table", lambda: [row])
    begun: list[str] = []
    job = watch.Job(Variant(spec, resolve("sm80")), emulate=True, every=False)
    found = watch_worker.judge(job, begun.append)
    assert found.state == "stopped" and found.problem.startswith("b1h3k2-q1k64: ") and found.calls == 0
    assert begun == ["b1h3k2-q1k64", ""]
    monkeypatch.setenv("FAGEN_EMULATE_SEED", "first")
    with pytest.raises(SpecError, match="FAGEN_EMULATE_SEED"):
        watch_worker.judge(job, begun.append)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("templates/sm80/fwd.cu.j2", "template"),
        ("templates/ptx/mma.cuh", "template"),
        ("templates/emulate/mma.hpp", "template"),
        ("templates/sm80/.fwd.cu.j2.swp", None),
        ("templates/sm80/fwd.cu.j2~", None),
        ("templates/sm80/4913", None),
        ("tests/cases.py", "table"),
        ("tests/test_watch.py", None),
        ("fagen/arch/sm80.py", "code"),
        ("fagen/py.typed", None),
    ],
)
def test_what_a_file_is(name: str, kind: str | None) -> None:
    assert kind_of(ROOT / name) == kind


def test_lines_are_located() -> None:
    said = [origin.Line("a", "x.j2", 7), origin.Line("b"), origin.Line("c", "y.cuh", 9)]
    for text, located in (
        ("kernel.cu(1): error: no", "x.j2:7 (kernel.cu:1): error: no"),
        ("kernel.cpp:3:14: error: no", "y.cuh:9 (kernel.cpp:3): error: no"),
        ("line 3, block 0: written at line 1", "line 3 (y.cuh:9), block 0: written at line 1 (x.j2:7)"),
        ("kernel.cu(2): of no template", "kernel.cu(2): of no template"),
        ("kernel.cu(4), line 0: not of the file", "kernel.cu(4), line 0: not of the file"),
        ("online 3, line 33", "online 3, line 33"),
    ):
        assert origin.locate(text, said) == located


def verdict(ratio: float = 0.5, seconds: float | None = None, **report: Any) -> Verdict:
    costs = {
        "registers": 128,
        "spill_stores": 0,
        "spill_loads": 0,
        "stack": 0,
        "shared_memory": {"static": 0, "dynamic": 81920},
        "occupancy": {"blocks": 2},
        "digest": "of the text",
    }
    reports = tuple(
        {"kind": kind, "slug": kind, "arch": "sm80", **costs, **(report if kind == "bwd" else {})}
        for kind in ("fwd", "bwd")
    )
    return Verdict(
        variant=Variant(AttentionSpec(head_dim=64), resolve("sm80")),
        state="right",
        errors={"o": Error("o", "b1", ratio * 1e-2, 1e-2, ratio, True, "")},
        reports=reports,
        seconds={} if seconds is None else {"time": seconds},
    )


def test_differences_by_hand() -> None:
    good = verdict(0.5, 1e-3)
    assert lines(watch.rows(good, None)) == ["  error of o  0.500 of its budget", "  time        1.00 ms"]
    assert watch.rows(good, good) == [Row("error of o", 0.5, 0.5, "budget"), Row("time", 1e-3, 1e-3, "s")]
    now = verdict(0.75, 1.1e-3, registers=120, spill_stores=8, shared_memory={"static": 0, "dynamic": 40960})
    assert lines(watch.rows(now, good)) == [
        "  error of o                   0.500 -> 0.750 (+0.250) of its budget",
        "  bwd: registers               128 -> 120 (-8)",
        "  bwd: spill stores            0 B -> 8 B (+8 B)",
        "  bwd: shared memory, dynamic  80.0 KiB -> 40.0 KiB (-40.0 KiB)",
        "  time                         1.00 ms -> 1.10 ms (+10.0%)",
    ]
    # A run that was stopped has made a part of the calls, and may not even have costs.
    assert watch.rows(replace(now, state="stopped", reports=(), seconds={}), good) == []
    endless = replace(good, errors={"o": replace(good.errors["o"], ratio=math.inf)})
    assert lines(watch.rows(endless, good))[0] == "  error of o  0.500 -> inf of its budget"
    assert lines(watch.rows(verdict(0.5, registers=None), good))[1].endswith("registers  128 -> unknown")
