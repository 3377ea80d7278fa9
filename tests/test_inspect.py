"""`fagen inspect`: occupancy by NVIDIA's rules, instructions, why a kernel falls back, and how two runs differ."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import assemble, compile_kernel, launch
from fake_toolchain import Stub
from test_cli import Fagen, command, cuda_compiler, run  # noqa: F401

from fagen import banks, build, disassembly, inspection, toolchain
from fagen.arch import KIB, known, resolve, sm80, sm90
from fagen.cli.inspect import lines
from fagen.cli.specs import parse
from fagen.disassembly import Disassembler, by_class
from fagen.emulator import EmulatedKernel
from fagen.errors import SpecError, ToolchainError
from fagen.occupancy import Occupancy, occupancy
from fagen.plan import plan
from fagen.render import environment
from fagen.spec import AttentionSpec

CUDA_INCLUDES = (Path("/usr/local/cuda/include"), *sorted(Path("/usr/local").glob("cuda-*/include")))
HEADER = next((folder for folder in CUDA_INCLUDES if (folder / "cuda_occupancy.h").is_file()), None)

SASS = """\
        .global         fagen_fwd
fagen_fwd:
.text.fagen_fwd:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/              @!UP1 FADD R2, R2, R3 ;            /* 0x0000000302027221 */
                                                                 /* 0x000fe20000000000 */
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0050*/                   EXIT ;
        /*0060*/                   NOP;
        /*0070*/                   NOP;
"""


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """A stub compiler, a cache of its own, and nothing that disassembles."""
    stub = Stub(tmp_path / "toolkit" / "nvcc", arches="80 90")
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    monkeypatch.setattr(toolchain, "package_folders", lambda kind, old_name: iter(()))
    return stub


@pytest.fixture
def inspect(run: Fagen, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> Fagen:  # noqa: F811
    monkeypatch.setenv("FAGEN_NVCC", str(nvcc.path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert disassembly.find() is None
    return run


@pytest.fixture
def nvdisasm(inspect: Fagen, nvcc: Stub) -> Path:
    """A stub disassembler beside the stub compiler."""
    return program(nvcc.path.with_name("nvdisasm"), f"cat <<'END'\n{SASS}END")


# Occupancy


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "blocks", "limits"),
    [
        ("sm80", 255, 80 * KIB, 128, 2, ("registers", "shared memory")),  # 65536 / (256 * 128) = 2; 164 / 81 = 2
        ("sm90a", 168, 196720, 384, 1, ("registers", "shared memory")),
        ("sm80", 32, 0, 1024, 2, ("registers", "warps")),
        ("sm80", 32, 0, 32, 32, ("blocks",)),
        ("sm86", 32, 0, 32, 16, ("blocks",)),
        ("sm89", 40, 0, 256, 6, ("registers", "warps")),
        ("sm90", 33, 0, 256, 6, ("registers",)),  # 33 registers are 40: 32 lanes of 33 in steps of 256
        ("sm90", 16, 113 * KIB, 64, 2, ("shared memory",)),  # and 1 KiB of the system's for each block
        ("sm90", 16, 113 * KIB + 1, 64, 1, ("shared memory",)),
        ("sm90", 255, 0, 1024, 0, ("registers",)),
    ],
)
def test_occupancy_by_hand(
    arch: str, registers: int, shared: int, threads: int, blocks: int, limits: tuple[str, ...]
) -> None:
    found = occupancy(resolve(arch), registers=registers, shared=shared, threads=threads)
    most = 64 if resolve(arch).capability in ((8, 0), (9, 0)) else 48
    assert found == Occupancy(blocks, blocks * threads // 32, most, limits)


@pytest.mark.skipif(HEADER is None, reason="no cuda_occupancy.h")
def test_occupancy_is_that_of_nvidia_s_own_header(tmp_path: Path) -> None:
    (tmp_path / "ask.cpp").write_text(
        "#include <cuda_occupancy.h>\n#include <cstdio>\n"
        "int main() {\n"
        "    int major, minor, threads_sm, shared_sm, optin, system, registers, fixed, dynamic, threads;\n"
        '    while (scanf("%d %d %d %d %d %d %d %d %d %d", &major, &minor, &threads_sm, &shared_sm, &optin, &system,\n'
        "                 &registers, &fixed, &dynamic, &threads) == 10) {\n"
        "        cudaOccDeviceProp card;\n"
        "        card.computeMajor = major, card.computeMinor = minor, card.maxThreadsPerBlock = 1024;\n"
        "        card.maxThreadsPerMultiprocessor = threads_sm;\n"
        "        card.regsPerBlock = card.regsPerMultiprocessor = 65536;\n"
        "        card.warpSize = 32, card.sharedMemPerBlock = 49152, card.sharedMemPerMultiprocessor = shared_sm;\n"
        "        card.numSms = 1, card.sharedMemPerBlockOptin = optin, card.reservedSharedMemPerBlock = system;\n"
        "        cudaOccFuncAttributes kernel;\n"
        "        kernel.maxThreadsPerBlock = 1024, kernel.numRegs = registers, kernel.sharedSizeBytes = fixed;\n"
        "        kernel.partitionedGCConfig = PARTITIONED_GC_OFF, kernel.numBlockBarriers = 1;\n"
        "        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, kernel.maxDynamicSharedSizeBytes = optin;\n"
        "        cudaOccDeviceState state;\n"
        "        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;\n"
        "        cudaOccResult found;\n"
        "        const int failed =\n"
        "            cudaOccMaxActiveBlocksPerMultiprocessor(&found, &card, &kernel, &state, threads, dynamic);\n"
        '        printf("%d %d\\n", failed ? -1 : found.activeBlocksPerMultiprocessor, found.limitingFactors & 15);\n'
        "    }\n"
        "}\n"
    )
    program_path = tmp_path / "ask"
    words = toolchain.find_host_compiler().words
    subprocess.run([*words, f"-I{HEADER}", "-o", program_path, tmp_path / "ask.cpp"], check=True)
    draw = random.Random(7)
    asked: list[tuple[Any, int, int, int, int]] = []
    for _ in range(4000):
        arch = resolve(draw.choice(known()))
        fixed = draw.choice([0, 0, 100, 5000])
        dynamic = draw.randint(0, draw.choice([3000, arch.smem_limit - fixed]))
        asked.append((arch, draw.randint(8, 255), fixed, dynamic, draw.choice([32, 96, 100, 128, 256, 384, 512, 1024])))
    questions = []
    for arch, *numbers in asked:
        holds = arch.multiprocessor
        card = (*arch.capability, holds.warps * 32, holds.shared_kib * KIB, arch.smem_limit, holds.system_kib * KIB)
        questions.append(" ".join(map(str, (*card, *numbers))))
    said = subprocess.run([program_path], input="\n".join(questions), capture_output=True, text=True, check=True).stdout
    factors = {"warps": 1, "registers": 2, "shared memory": 4, "blocks": 8}
    for (arch, registers, fixed, dynamic, threads), answer in zip(asked, said.splitlines(), strict=True):
        found = occupancy(arch, registers=registers, shared=fixed + dynamic, threads=threads)
        assert f"{found.blocks} {sum(factors[name] for name in found.limits)}" == answer


# Which kernel serves


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({"causal": True, "softcap": True}, None),
        ({"window": True}, None),
        ({"dropout": True}, None),
        ({"varlen": True}, None),
        ({"window": True, "dropout": True}, "multiples of 16"),
        ({"split_kv": True}, "few queries"),
        ({"split_kv": True, "paged": True}, "few queries"),
        ({"varlen": True, "paged": True}, "no pages"),
    ],
)
def test_why_hopper_s_own_family_does_not_serve(features: dict[str, bool], reason: str | None) -> None:
    spec = AttentionSpec(head_dim=64, **features)
    forward = plan(spec, resolve("sm90a"))[0]
    assert sm90.serves(spec) == (reason is None) == (forward.family == "sm90")
    said = inspection.fallback(forward)
    assert said is None if reason is None else reason in str(said)
    assert inspection.fallback(plan(spec, resolve("sm90"))[0]) is None  # that family is sm90's own


def test_every_kernel_of_another_family_says_why() -> None:
    for features in ({"backward": True}, {"backward": True, "deterministic": True}, {"split_kv": True}):
        for kernel in plan(AttentionSpec(head_dim=64, **features), resolve("sm90a")):
            assert bool(inspection.fallback(kernel)) == (kernel.family != "sm90")


def test_turing_s_kernels_without_products_are_those_of_every_card() -> None:
    for features in ({"backward": True}, {"split_kv": True}):
        for kernel in plan(AttentionSpec(head_dim=64, dtype="fp16", **features), resolve("sm75")):
            own = kernel.kind not in ("combine", "bwd_delta")
            assert (kernel.family == "sm75") == own == (inspection.fallback(kernel) is None)


# The disassembler


def test_instructions_are_counted_without_predicates_and_padding(nvdisasm: Path, tmp_path: Path) -> None:
    found = disassembly.find()
    assert found == Disassembler(nvdisasm)
    counts = found.instructions(tmp_path / "any.cubin")
    assert counts == {"HMMA.16816.F32.BF16": 2, "BRA": 1, "EXIT": 1, "FADD": 1, "LDC": 1}
    assert by_class(counts) == {
        "tensor products": 2,
        "float arithmetic": 1,
        "control": 2,
        "integers and moves": 1,
    }


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("HGMMA.64x128x16.F32.BF16", "tensor products"),
        ("LDSM.16.M88.4", "loads from shared memory"),
        ("LDGSTS.E.BYPASS.128", "loads from global memory"),
        ("UTMALDG.4D", "loads from global memory"),
        ("STL.64", "spills and stack"),
        ("F2FP.BF16.F32.PACK_AB", "conversions"),
        ("UI2F.U32.RP", "conversions"),
        ("FENCE.VIEW.ASYNC.S", "barriers and fences"),
        ("FSETP.NEU.AND", "float arithmetic"),
        ("MUFU.EX2", "special functions"),
        ("WARPSYNC.ALL", "barriers and fences"),
        ("BSYNC", "control"),
        ("FLO.U32", "integers and moves"),
        ("ISETP.GE.AND", "integers and moves"),
    ],
)
def test_classes(name: str, of: str) -> None:
    assert by_class({name: 3}) == {of: 3}


def test_where_a_disassembler_is_looked_for(
    inspect: Fagen, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = program(nvcc.path.with_name("cuobjdump"), "exit 0")
    assert disassembly.find() == Disassembler(beside)
    package = program(tmp_path / "package" / "nvdisasm", "exit 0")
    monkeypatch.setattr(toolchain, "package_folders", lambda kind, old_name: iter([package.parent]))
    assert disassembly.find() == Disassembler(package)  # which cuobjdump would need too
    on_path = program(tmp_path / "bin" / "nvdisasm", "exit 0")
    monkeypatch.setenv("PATH", f"{on_path.parent}:/usr/bin:/bin")
    assert disassembly.find() == Disassembler(on_path)


@pytest.mark.parametrize(
    ("body", "message"), [("echo no >&2; exit 3", "status 3: no"), ("echo text", "no instruction")]
)
def test_a_disassembler_that_fails(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        Disassembler(program(tmp_path / "nvdisasm", body)).instructions(tmp_path / "any.cubin")


# Comparisons


def a_report(kind: str = "fwd", arch: str = "sm80", name: str = "a", **values: Any) -> dict[str, Any]:
    return {"kind": kind, "arch": arch, "slug": f"{kind}_{name}_{arch}", "registers": 1, **values}


def test_kernels_are_paired_by_kind_and_architecture_first() -> None:
    other = [a_report(), a_report(arch="sm90"), a_report("bwd")]
    this = [a_report(arch="sm90", name="b"), a_report(name="b"), a_report("combine")]
    found = inspection.compare(other, this)
    assert [(one.other, one.this) for one in found.differences] == [
        ("fwd_a_sm90", "fwd_b_sm90"),
        ("fwd_a_sm80", "fwd_b_sm80"),
    ]
    assert found.only_other == ("bwd_a_sm80",) and found.only_this == ("combine_a_sm80",)
    (one,) = inspection.compare([a_report(arch="sm90")], [a_report()]).differences
    assert one.changes == {"arch": ("sm90", "sm80")}


def test_only_what_differs_is_named() -> None:
    same = a_report(tile={"warps": 4}, directory="/a", digest="1")
    assert inspection.compare([same], [same | {"directory": "/b", "digest": "2"}]) == inspection.Comparison((), (), ())
    other = a_report(tile={"warps": 4, "stages": 2}, instructions={"names": {"BRA": 2, "EXIT": 1}})
    this = a_report(tile={"warps": 8}, instructions={"names": {"EXIT": 1, "NANOSLEEP": 1}})
    (one,) = inspection.compare([other], [this]).differences
    assert one.changes == {
        "tile.warps": (4, 8),
        "tile.stages": (2, None),
        "instructions.names.BRA": (2, 0),
        "instructions.names.NANOSLEEP": (0, 1),
    }
    without = a_report(tile={"warps": 8}, instructions=None)
    assert inspection.compare([this], [without]).differences == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "not JSON"),
        ("[1]", "no run that"),
        ('{"format": 1, "kernels": [{"kind": "fwd"}]}', "no run that"),
        ('{"format": 2, "kernels": []}', "format 2, not 1"),
    ],
)
def test_what_is_no_saved_run(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SpecError, match=message):
        inspection.read(path)


# Bank conflicts


def test_bank_conflicts_that_are_known(tmp_path: Path) -> None:
    """Each line of conflicts.cu says what a warp does there; 2 warps of 3 blocks do it, on any number of threads."""
    head, mark, rest = assemble("conflicts").partition("// ==== kernel ====\n")
    primitives = (*sm80.PRIMITIVES, *sm80.PAGE_PRIMITIVES)
    counting = environment().get_template("emulate/banks.hpp.j2").render(kernel={"primitives": primitives})
    source = head + counting + mark + rest
    library = compile_kernel("conflicts", tmp_path / "conflicts", source=source)
    said = {
        number: [6 * int(word) for word in text.split("// BANKS ")[1].split()]
        for number, text in enumerate(source.split("\n"), 1)
        if re.search(r"// BANKS \d", text)
    }
    kernel = EmulatedKernel(library, "conflicts")
    for seed in (0, 1):
        launch(kernel, torch.zeros(1), grid=3, threads=64, smem_bytes=8192, seed=seed)
        assert banks.unwritten(library) == 0
        found = banks.counts(library, source.count("\n"))
        assert {number: numbers for number, (_, *numbers) in found.items()} == said
    assert found[min(found)][0] == "st_shared_b128" and len(said) == 16
    assert banks.counts(library, source.count("\n")) == {}
    # Each warp writes 4096 bytes, all of them.
    launch(kernel, torch.zeros(1), grid=3, threads=64, smem_bytes=8192 + 100)
    assert banks.unwritten(library) == 25
    launch(kernel, torch.zeros(1), grid=1, threads=32, smem_bytes=8192)
    assert banks.unwritten(library) == 1024
    launch(kernel, torch.zeros(1), grid=1, threads=32, smem_bytes=8192)
    launch(kernel, torch.zeros(1), grid=1, threads=64, smem_bytes=8192)  # two launches are one count
    assert banks.unwritten(library) == banks.unwritten(library) == 0


@pytest.mark.parametrize(
    ("features", "arch"),
    [
        ({"causal": True, "softcap": True}, "sm80"),
        ({"backward": True}, "sm80"),
        ({"split_kv": True}, "sm80"),
        ({"backward": True, "dtype": "fp16"}, "sm75"),
        ({}, "sm90a"),
    ],
)
def test_tiles_are_laid_out_without_conflicts(features: dict[str, Any], arch: str) -> None:
    variant = AttentionSpec(head_dim=64, **features), resolve(arch)
    found = banks.count(*variant)
    assert tuple(found) == plan(*variant)
    for kernel, use in found.items():
        counted = use.lines
        # All is written, by threads or the engine, but for less than 16 bytes beside Hopper's barriers.
        assert use.unwritten < (4 if kernel.family == "sm90" else 1)
        assert counted or kernel.kind == "bwd_delta"  # which has no shared memory
        matrices = [line for line in counted if "matrix_x4" in line.primitive]
        assert matrices or kernel.kind in ("bwd_delta", "bwd_convert", "combine")
        assert all(line.conflicts == 0 and line.wavefronts == 4 * line.accesses for line in matrices)
        # What goes through registers is stored as cp.async writes it.
        placed = [line for line in counted if line.template == "sm75/tile.cuh.j2"]
        assert bool(placed) == (kernel.family == "sm75" and kernel.kind != "bwd_convert")
        assert all(line.conflicts == 0 for line in placed)


def test_inspect_emulated(inspect: Fagen, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("inspect", "--head-dim", "16", "--arch", "sm80")
    outcome = inspect(*line, "--emulate")
    assert outcome.code == 0, outcome.err
    assert "accesses of shared memory by warps" in outcome.out and "no unwritten word read" in outcome.out
    (row,) = inspect(*line, "--json").document["kernels"]
    assert row["banks"] is None and row["unwritten"] is None
    some = [banks.Line("a.cuh", number, "ld_shared_b32", 10, 10 + number, 10) for number in range(9, -1, -1)]
    monkeypatch.setattr(banks, "count", lambda spec, arch: {plan(spec, arch)[0]: banks.Use(tuple(some), 96)})
    outcome = inspect(*line, "--emulate")
    assert "  unwritten  96 words of the shared memory of a block, 384 B\n" in outcome.out
    (row,) = inspect(*line, "--emulate", "--json").document["kernels"]
    assert row["unwritten"] == {"words": 96, "bytes": 384}
    assert "100 accesses of shared memory by warps, 145 wavefronts, 45 of them for conflicts" in outcome.out
    assert "9  at a.cuh:9, ld_shared_b32, 10 accesses" in outcome.out and "at 3 more lines" in outcome.out
    monkeypatch.setattr(
        banks,
        "count",
        lambda spec, arch: {plan(spec, arch)[0]: banks.Use(tuple(some[: 9 if spec.causal else 10]), 3 - spec.causal)},
    )
    outcome = inspect(*line, "--causal", "--emulate", "--diff", "--head-dim 16")
    assert "banks.accesses    100 -> 90  (-10)" in outcome.out and "banks.conflicts" not in outcome.out
    assert "unwritten.bytes   12 -> 8  (-4)" in outcome.out


# The command


def test_inspect_shows_the_compiler_s_report(inspect: Fagen, nvcc: Stub) -> None:
    arguments = ("inspect", "--head-dim", "64", "--arch", "sm90")
    outcome = inspect(*arguments)
    assert outcome.code == 0, outcome.err
    assert "no instruction mix: neither nvdisasm nor cuobjdump" in outcome.err and outcome.err.count("\n") == 1
    for text in (
        "fwd_hdim64_bf16_sm90",
        "sm80/fwd.cu.j2, of the sm80 family",
        "128 query rows x 96 keys",
        "128 a block",
        "42 a thread",
        "8 B stored, 4 B loaded",
        "64.0 KiB dynamic, 256 B static",
        "3 blocks a multiprocessor, 12 of 64 warps; limited by shared memory",
        "nvcc 13.0.88",
    ):
        assert text in outcome.out
    document = inspect(*arguments, "--json").document
    (row,) = document["kernels"]
    assert row["stack"] == 16 and row["shared_memory"] == {"static": 256, "dynamic": 65536}
    assert row["occupancy"] == {"blocks": 3, "warps": 12, "most_warps": 64, "limits": ["shared memory"]}
    assert row["instructions"] is None and row["fallback"] is None and len(document["notes"]) == 1
    assert nvcc.compiled == 1


def test_inspect_with_a_disassembler(inspect: Fagen, nvdisasm: Path) -> None:
    outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80")
    assert outcome.err == "" and "6 instructions, those of loops counted once" in outcome.out
    assert "2  tensor products  (HMMA.16816.F32.BF16 2)" in outcome.out
    program(nvdisasm, "echo broken >&2; exit 1")
    outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80")
    assert outcome.code == 0 and "status 1: broken" in outcome.err and "42 a thread" in outcome.out


def test_ptx_has_no_report(inspect: Fagen, nvcc: Stub, nvdisasm: Path) -> None:
    nvcc.path.with_name(f"{nvcc.path.name}.binary").write_bytes(b".visible .entry fagen_fwd(\n")
    nvcc.path.with_name(f"{nvcc.path.name}.log").write_bytes(b"")
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm90+ptx"))
    found = inspection.inspect([kernel], build.build([kernel]))
    (row,) = found.reports
    assert row["registers"] is None and row["occupancy"] is None and row["instructions"] is None
    assert row["shared_memory"] == {"static": None, "dynamic": kernel.smem_bytes}
    assert [note.partition(" yet")[0] for note in found.notes] == ["PTX has no registers, spills and instructions"]
    assert "  shared    64.0 KiB dynamic a block" in lines(row)


def test_inspect_says_why_a_kernel_falls_back(inspect: Fagen) -> None:
    flags = ("--head-dim", "64", "--window", "--dropout")
    assert "the family of sm90a does not have it: dropout" in inspect("inspect", *flags, "--arch", "sm90a").out
    assert "does not have it" not in inspect("inspect", *flags, "--arch", "sm90").out


def test_diff_against_flags_and_a_saved_run(inspect: Fagen, tmp_path: Path) -> None:
    line = ("inspect", "--head-dim", "64", "--causal", "--arch", "sm80")
    outcome = inspect(*line, "--diff", "--head-dim 64")
    assert outcome.code == 0, outcome.err
    assert "fwd_hdim64_bf16_sm80 -> fwd_hdim64_bf16_causal_sm80\n" in outcome.out
    assert "spec.causal  False -> True\n" in outcome.out and "registers" not in outcome.out
    path = tmp_path / "run.json"
    assert inspect(*line, "--save", str(path)).code == 0
    assert inspect(*line, "--diff", str(path)).out == "no difference\n"
    saved = json.loads(path.read_text())
    saved["kernels"][0]["registers"] = 40
    path.write_text(json.dumps(saved))
    assert "registers  40 -> 42  (+2)" in inspect(*line, "--diff", str(path), "--save", str(path)).out
    assert inspect(*line, "--diff", str(path)).out == "no difference\n"
    document = inspect(*line, "--diff", "--head-dim 64 --arch sm90", "--json").document
    (one,) = document["diff"]["differences"]
    assert one["other"] == "fwd_hdim64_bf16_sm90" and one["changes"]["arch"] == ["sm90", "sm80"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diff", "--head-dim 63"], "--diff '--head-dim 63': head_dim=63 is not served"),
        (["--diff", "--hed-dim 64"], "No such option: --hed-dim"),
        (["--diff", "--causal"], "--head-dim"),
        (["--diff", "--head-dim '64"], "No closing quotation"),
        (["--diff", "--head-dim 64 --help"], "--help"),
        (
            ["--diff", "nowhere.json"],
            "--diff 'nowhere.json': neither flags, which begin with -, nor a file that is there; and ",
        ),
        (["--save", "nowhere/run.json"], "there is no folder nowhere"),
        (["--save", "."], "--save .: is a folder"),
        (["--arch", "sm75"], "use fp16"),
    ],
)
def test_bad_input_is_one_line_and_builds_nothing(
    inspect: Fagen, nvcc: Stub, arguments: list[str], message: str
) -> None:
    outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80", *arguments)
    assert outcome.code == 2 and outcome.out == "" and message in outcome.err
    assert outcome.err.startswith("fagen: error: ") and "Traceback" not in outcome.err
    assert nvcc.compiled == 0


@pytest.fixture
def repository(inspect: Fagen, templates: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs git in a repository of the templates that are rendered from, whose one commit has them as they are."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    monkeypatch.setenv("HOME", str(templates.parent))
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=templates, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    git("init", "-q", "..")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_diff_against_a_commit(
    inspect: Fagen, nvcc: Stub, templates: Path, repository: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stub's binary grows with its source, byte by byte."""
    line = ("inspect", "--head-dim", "64", "--arch", "sm80", "--diff")
    append(templates / "kernel.j2", "// 10 more\n")
    repository("commit", "-q", "-a", "-m", "second")
    append(templates / "kernel.j2", "// and 14 more\n")
    state = repository("status", "--porcelain", ".")
    assert state == "M templates/kernel.j2"
    outcome = inspect(*line, "HEAD")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("fwd_hdim64_bf16_sm80\n  size  ") and outcome.out.endswith("(+15)\n")
    assert outcome.out.count("\n") == 2 and nvcc.compiled == 2
    monkeypatch.chdir("/")  # it is fagen's checkout that counts, not the one of the current directory
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as a hook of another one may leave it
    (one,) = inspect(*line, "HEAD~1", "--json").document["diff"]["differences"]
    assert one["other"] == one["this"] and one["changes"].keys() == {"size"}
    assert one["changes"]["size"][1] - one["changes"]["size"][0] == 26 and nvcc.compiled == 3
    monkeypatch.delenv("GIT_DIR")
    assert inspect(*line, repository("rev-parse", "HEAD~1")).out.endswith("(+26)\n") and nvcc.compiled == 3
    assert repository("status", "--porcelain", ".") == state and repository("log", "--format=%s") == "second\nfirst"
    repository("commit", "-q", "-a", "-m", "third")
    assert inspect(*line, "HEAD").out == "no difference\n" and nvcc.compiled == 3


def test_a_file_is_taken_for_no_commit(
    inspect: Fagen, repository: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert inspect("inspect", "--head-dim", "64", "--arch", "sm80", "--save", "HEAD").code == 0
    assert (
        "fwd_hdim64_bf16_sm80 -> fwd_hdim128_bf16_sm80\n"
        in inspect("inspect", "--head-dim", "128", "--arch", "sm80", "--diff", "HEAD").out
    )


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{{ no_such_name }}", "kernel.j2, line {last}: 'no_such_name' is undefined"),
        ("{{ spec.head_dim + 'a' }}", "kernel.j2, line {last}: unsupported operand"),
        ("{% macro a() %}{% endmacro %}{{ a(1) }}", "kernel.j2, line {last}: macro 'a' takes no"),
        ("{% if %}", "kernel.j2, line {last}: "),
        ("{% include 'gone.j2' %}", "there is no template gone.j2"),
    ],
)
def test_a_commit_that_cannot_be_rendered(
    inspect: Fagen, nvcc: Stub, templates: Path, repository: Callable[..., str], broken: str, message: str
) -> None:
    path = templates / "kernel.j2"
    sound = path.read_text()
    append(path, broken)
    repository("commit", "-q", "-a", "-m", "broken")
    path.write_text(sound)
    outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80", "--diff", "HEAD")
    assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1 and nvcc.compiled == 0
    assert outcome.err.startswith(
        "fagen: error: the Python side at hand cannot render the templates of HEAD: fwd_hdim64"
    )
    assert message.format(last=sound.count("\n") + 1) in outcome.err


def test_a_commit_that_does_not_compile(inspect: Fagen, templates: Path, repository: Callable[..., str]) -> None:
    path = templates / "kernel.j2"
    sound = path.read_text()
    append(path, "BROKEN\n")
    repository("commit", "-q", "-a", "-m", "broken")
    path.write_text(sound)
    outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80", "--diff", "HEAD")
    assert (
        outcome.code == 1 and outcome.out == "" and "with the templates of HEAD: fwd_hdim64_bf16_sm80 " in outcome.err
    )


def test_what_is_no_commit(
    inspect: Fagen,
    nvcc: Stub,
    templates: Path,
    repository: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def said(diff: str) -> str:
        outcome = inspect("inspect", "--head-dim", "64", "--arch", "sm80", "--diff", diff)
        assert outcome.code == 2 and outcome.out == "" and outcome.err.count("\n") == 1 and nvcc.compiled == 0
        assert f"--diff {diff!r}: neither flags, which begin with -, nor a file that is there; and " in outcome.err
        return outcome.err

    for name in ("HEAD~1", "^HEAD", "HEAD..HEAD", "HEAD:templates", "", "a" * 300):
        assert "git knows no such commit in the checkout that fagen runs from" in said(name)
    repository("commit", "-q", "--allow-empty", "-m", "second")
    repository("rm", "-q", "-r", "--cached", ".")
    repository("commit", "-q", "-m", "none")
    assert "has no templates" in said("HEAD")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    shutil.rmtree(tmp_path / ".git")
    assert "fagen does not run from a git checkout" in said("HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git, which would know of a commit, is not on PATH" in said("HEAD")


def test_flags_in_a_string_name_what_they_name_on_the_command_line() -> None:
    specs, arch = parse("--diff", "--head-dim 64,128 --both causal --dtype fp16 --arch sm90")
    assert arch == "sm90" and len(specs) == 4 and specs[1] == AttentionSpec(head_dim=64, dtype="fp16", causal=True)


@pytest.mark.skipif(not cuda_compiler(), reason="no CUDA compiler")
def test_inspect_of_real_kernels(run: Fagen) -> None:  # noqa: F811
    document = run("inspect", "--head-dim", "64", "--backward", "--arch", "sm90a", "--json").document
    forward, delta, main, convert = document["kernels"]
    assert forward["template"] == "sm90/fwd.cu.j2" and forward["fallback"] is None and forward["threads"] == 384
    assert forward["registers"] == 168 and forward["occupancy"]["blocks"] == 1
    assert delta["kind"] == "bwd_delta" and delta["shared_memory"]["dynamic"] == 0
    assert main["template"] == "sm90/bwd.cu.j2" and main["fallback"] is None and main["threads"] == 384
    assert all(one["family"] == "sm80" and "no products" in one["fallback"] for one in (delta, convert))
    if disassembly.find() is not None:
        assert forward["instructions"]["classes"]["tensor products"] > 0


def test_torch_is_not_imported(nvcc: Stub, tmp_path: Path) -> None:
    code = "import sys; from fagen.cli import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    line = ("inspect", "--head-dim", "64", "--arch", "sm80")
    assert command("-c", code, *line, FAGEN_NVCC=str(nvcc.path)).returncode == 0, sys.executable
