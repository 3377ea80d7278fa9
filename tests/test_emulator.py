"""The emulator's scheduler, its faults, and its interface."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from emulator import assemble, body, compile_kernel, launch
from torch import Tensor

from fagen.emulator import EmulatedKernel
from fagen.errors import LaunchError

FAULT_NAMES = re.findall(r"// FAULT (\w+)", body("faults"))


class Faults:
    """The kernel of faults.cu and its tensors, which lie apart from one another in one allocation."""

    def __init__(self, directory: Path) -> None:
        self.kernel = EmulatedKernel(compile_kernel("faults", directory), "faults")
        self.source = (directory / "kernel.cpp").read_text(encoding="utf-8").splitlines()
        arena = torch.zeros(512)
        self.tensors = [arena[start : start + 64] for start in (64, 192, 320)]

    def run(self, name: str | None, seed: int = 0) -> Tensor:
        """Launches with the fault `name` and returns the output."""
        number = 0
        if name is not None:
            line = body("faults").split(f"// FAULT {name}\n")[0]
            number = int(re.findall(r"fault == (\d+)", line)[-1])
        launch(self.kernel, *self.tensors, number, grid=3, threads=64, read_only=(0, 2), seed=seed)
        return self.tensors[1]

    def message(self, name: str, seed: int = 0) -> str:
        with pytest.raises(LaunchError) as error:
            self.run(name, seed)
        return str(error.value)

    def line(self, name: str) -> int:
        """The line of the compiled file that the name marks."""
        return next(i for i, text in enumerate(self.source, 1) if text.endswith(f"// FAULT {name}"))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("emulator") / "faults")


# Name of the fault, warp and lane, and what the message must say of it.
EXPECTED = [
    ("missing_syncthreads_raw", 1, 5, "read-after-write race.*shared byte 128.*warp 0, lane 3 wrote.*__syncthreads"),
    ("missing_syncthreads_war", 1, 5, "write-after-read race.*shared byte 128.*warp 0, lane 3 read.*__syncthreads"),
    ("missing_syncthreads_waw", 1, 5, "write-after-write race.*shared byte 128.*warp 0, lane 3 wrote.*__syncthreads"),
    ("missing_syncwarp", 1, 5, "read-after-write race.*warp 1, lane 4 wrote.*__syncwarp"),
    ("ldmatrix_war", 1, 5, "write-after-read race.*shared byte 96.*read"),
    ("missing_wait", 1, 9, "warp 1, lane 8.*asynchronous copy.*not landed.*cp_async_wait"),
    ("wait_for_too_few", 0, 0, "asynchronous copy.*not landed.*too few groups"),
    ("wait_without_barrier", 1, 9, "read-after-write race.*warp 1, lane 8 wrote"),
    ("copy_over_read", 1, 31, "write-after-read race.*shared byte 112.*warp 0, lane 7 read"),
    ("store_over_copy", 1, 1, "writes shared byte 0.*asynchronous copy"),
    ("shared_read_past_end", 1, 3, "reads 16 bytes at shared byte 1024, out of bounds: the block has 1024"),
    ("shared_write_before_start", 1, 3, "writes 4 bytes at shared byte -4, out of bounds"),
    ("ldmatrix_row_past_end", 0, 9, "reads 16 bytes at shared byte 1168, out of bounds"),
    ("copy_to_past_end", 1, 3, "copies 16 bytes at shared byte 1024, out of bounds"),
    ("global_read_past_end", 1, 3, r"reads 4 bytes of global memory out of bounds: byte 256 of range 0 \(256 bytes"),
    ("global_write_before_start", 1, 3, "writes 4 bytes of global memory out of bounds: byte -4 of range 1"),
    ("global_write_to_read_only", 1, 3, "writes 4 bytes of global memory that is read-only: byte 28 of range 2"),
    ("copy_from_past_end", 1, 3, "reads 16 bytes of global memory out of bounds: byte 256 of range 0"),
    ("global_write_misaligned", 1, 3, "writes 16 bytes of global memory at 0x.* misaligned"),
    ("global_read_misaligned", 1, 3, "reads 8 bytes of global memory at 0x.* misaligned"),
    ("shared_misaligned", 1, 3, "reads 16 bytes at shared byte 8, which is misaligned"),
    ("ldmatrix_misaligned", 0, 9, "reads 16 bytes at shared byte 152, which is misaligned"),
    ("copy_misaligned", 1, 3, "reads 16 bytes of global memory at 0x.* misaligned"),
    ("barrier_after_exit", 1, 5, "barrier at line .*: 1 thread never reaches it; e.g. warp 1, lane 5 has exited"),
    ("barrier_against_syncwarp", 0, 10, "1 thread never reaches it; e.g. warp 0, lane 10 waits at __syncwarp"),
    ("two_barriers", 1, 16, "divergent barrier.*warp 0, lane 0 waits"),
    ("divergent_shuffle", 0, 31, "divergence.*while lane 0 waits at __shfl_xor_sync"),
    ("collective_after_exit", 1, 12, "ldmatrix_x4 at line .*: 1 thread never reaches it.*lane 12 has exited"),
    ("mask_without_caller", 1, 3, "leaves out the calling lane"),
    ("shuffle_from_outside", 0, 0, "shuffle from lane 8, which takes no part"),
    ("unwritten", 1, 30, r"reads shared byte 1008 \(of 1024\), which no thread has written"),
    ("ldmatrix_unwritten", 1, 31, r"reads shared byte 1008 \(of 1024\), which no thread has written"),
    ("warp_writes_one_word", 1, 9, "write-after-write race.*warp 1, lane 8 wrote.*__syncwarp"),
    ("copy_from_null", 1, 3, "reads 16 bytes of global memory out of bounds.*address 0x0"),
    ("word_missing_wait", 1, 10, "shared byte 8, .*warp 1, lane 8.*asynchronous copy.*not landed.*cp_async_wait"),
    ("word_wait_without_barrier", 1, 9, "read-after-write race.*shared byte 8.*warp 1, lane 8 wrote"),
    ("word_copy_over_read", 1, 31, "write-after-read race.*shared byte 28.*warp 0, lane 7 read"),
    ("copy_over_word_copy", 1, 1, "writes shared byte 4, to which warp 0, lane 2 issued an asynchronous copy"),
    ("word_copy_to_past_end", 1, 3, "copies 4 bytes at shared byte 1024, out of bounds"),
    ("word_copy_from_past_end", 1, 3, "reads 4 bytes of global memory out of bounds: byte 256 of range 0"),
    ("word_copy_to_misaligned", 1, 3, "copies 4 bytes at shared byte 2, which is misaligned: .* multiple of 4"),
    ("word_copy_misaligned", 1, 3, "reads 4 bytes of global memory at 0x.* misaligned"),
]


def test_each_fault_is_expected_once() -> None:
    assert [name for name, *_ in EXPECTED] == FAULT_NAMES


@pytest.mark.parametrize(("name", "warp", "lane", "text"), EXPECTED, ids=[name for name, *_ in EXPECTED])
def test_a_fault_names_kernel_line_block_warp_and_lane(
    faults: Faults, name: str, warp: int, lane: int, text: str
) -> None:
    message = faults.message(name)
    line = faults.line(name)
    assert message.startswith(f"faults, line {line}: block 1, warp {warp}, lane {lane}: ")
    assert re.search(text, message, re.DOTALL)
    assert f"{line} | {faults.source[line - 1]}" in message  # the line itself is quoted


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_faults_do_not_depend_on_the_order(faults: Faults, seed: int) -> None:
    """In any order some thread is convicted; which of two racing threads it is may differ."""
    for name in FAULT_NAMES:
        assert faults.message(name, seed).startswith("faults, line "), name


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_a_fault_the_kernel_can_be_launched_again(faults: Faults, seed: int) -> None:
    for name in ("barrier_after_exit", "missing_wait", "global_read_past_end"):
        faults.message(name, seed)
        assert torch.equal(faults.run(None, seed), torch.zeros(64))


@pytest.mark.parametrize("threads", ["1", "2", "5"])
def test_os_threads_give_the_same_results_and_report_the_same_fault(
    faults: Faults, pipeline: EmulatedKernel, monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", threads)
    check_product(pipeline, seed=0)
    assert faults.message("unwritten").startswith(f"faults, line {faults.line('unwritten')}: block 1, warp 1, lane 30")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    return EmulatedKernel(compile_kernel("pipeline", tmp_path_factory.mktemp("emulator") / "pipeline"), "pipeline")


def check_product(kernel: EmulatedKernel, seed: int, k: int = 160) -> Tensor:
    """Runs pipeline.cu on sizes that leave partial tiles and compares with torch."""
    m, n = 150, 70
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    c = torch.full((m, n), torch.nan)
    launch(kernel, a, b, c, m, n, k, grid=-(-m // 64) * -(-n // 32), smem_bytes=15360, read_only=(0, 1), seed=seed)
    torch.testing.assert_close(c.double(), a.double() @ b.double().T, rtol=0, atol=k * 1e-6)
    return c


def test_every_order_gives_the_same_result(pipeline: EmulatedKernel) -> None:
    expected = check_product(pipeline, seed=0)
    for seed in (1, 2, 3, 2**64 - 1):
        assert torch.equal(check_product(pipeline, seed), expected)


def test_copies_that_never_drain_do_not_pile_up(pipeline: EmulatedKernel) -> None:
    """One group is always in flight over 64 steps of 3 copies a thread, more than the queue first holds."""
    check_product(pipeline, seed=0, k=64 * 32)


BREAKS = [
    ("cp_async_wait<1>();", "cp_async_wait<2>();", "has not landed"),
    (
        "__syncthreads();  // this stage has landed",
        "// this stage has landed",
        "read-after-write race|no thread has written",
    ),
    ("__syncthreads();  // all have read", "// all have read", "write-after-read race|has not landed"),
    ("row < rows);", "true);", "out of bounds"),
    ("TILE_N, params.n - n0", "TILE_N - 1, params.n - n0", "no thread has written"),
]


@pytest.mark.parametrize(("right", "wrong", "text"), BREAKS)
def test_a_right_kernel_made_wrong_is_caught_in_every_order(tmp_path: Path, right: str, wrong: str, text: str) -> None:
    source = assemble("pipeline")
    assert source.count(right) == 1
    kernel = EmulatedKernel(
        compile_kernel("pipeline", tmp_path / "broken", source=source.replace(right, wrong)), "pipeline"
    )
    for seed in (0, 1, 2):
        with pytest.raises(LaunchError, match=text):
            check_product(kernel, seed)


def test_the_seed_changes_the_order(tmp_path: Path) -> None:
    kernel = EmulatedKernel(compile_kernel("order", tmp_path / "order"), "order")

    def log(seed: int) -> Tensor:
        length, entries = torch.zeros(2), torch.zeros(2, 2, 128)
        launch(kernel, length, entries, grid=2, seed=seed)
        assert length.tolist() == [256, 256]
        every = torch.arange(128.0)
        assert torch.equal(entries.sort(-1).values, every.expand(2, 2, 128))  # a barrier lies between the rounds
        return entries

    natural = log(0)
    assert torch.equal(natural[0, 0], torch.arange(128.0))
    assert torch.equal(natural[0], natural[1])
    one, two = log(1), log(2)
    assert torch.equal(one, log(1))
    assert not torch.equal(one, natural) and not torch.equal(one, two) and not torch.equal(one[0], one[1])
    warps = (one[0, 0] // 32).long()
    assert (warps.diff() != 0).sum() > 8  # warps interleave
    assert (one[0, 0][warps == 2].diff() != 1).any()  # and lanes do not keep their order


def test_the_environment_gives_the_seed(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument FAGEN_EMULATE_SEED counts: a bad value is refused."""
    monkeypatch.setenv("FAGEN_EMULATE_SEED", "no number")
    with pytest.raises(ValueError, match="FAGEN_EMULATE_SEED"):
        faults.kernel.launch(grid=1, threads=64, smem_bytes=1024, params=b"", ranges=[])


def test_a_launch_that_does_not_fit_is_refused(faults: Faults, tmp_path: Path) -> None:
    def run(params: bytes = bytes(32), grid: int = 1, threads: int = 64) -> None:
        faults.kernel.launch(grid=grid, threads=threads, smem_bytes=1024, params=params, ranges=[], seed=0)

    with pytest.raises(LaunchError, match="24 bytes of parameters, the kernel takes 32"):
        run(bytes(24))
    for threads in (0, 48, 1056):
        with pytest.raises(LaunchError, match="whole warps"):
            run(threads=threads)
    with pytest.raises(LaunchError, match="grid of 0 blocks"):
        run(grid=0)
    with pytest.raises(LaunchError, match="the launch was given no tensor"):
        run()
    with pytest.raises(LaunchError, match="cannot load"):
        EmulatedKernel(tmp_path / "missing.so", "faults")
