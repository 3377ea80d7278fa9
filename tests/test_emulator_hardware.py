"""The emulator's test kernels are real CUDA, and a GPU gives the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulator import compile_cuda, compile_kernel, launch, pack
from torch import Tensor

from fagen.arch import for_capability, resolve
from fagen.emulator import EmulatedKernel
from fagen.errors import ToolchainError
from fagen.launch import CudaKernel
from fagen.toolchain import find_cuda_compiler

KERNELS = ["fragments", "warps", "numbers", "pipeline", "order", "faults", "races", "words"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_cuda_compiler_accepts_the_same_body(tmp_path: Path, name: str) -> None:
    try:
        find_cuda_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert compile_cuda(name, tmp_path / name, resolve("sm80")).stat().st_size > 0


def run_both(
    directory: Path,
    name: str,
    arguments: list[Tensor | int],
    *,
    grid: int = 1,
    threads: int = 128,
    smem_bytes: int = 1024,
) -> list[tuple[Tensor, Tensor]]:
    """Runs the kernel emulated and on the GPU; each tensor as both left it, on the CPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    on_gpu = [value.to(device) if isinstance(value, Tensor) else value for value in arguments]
    emulated = EmulatedKernel(compile_kernel(name, directory / "emulated"), name)
    launch(emulated, *arguments, grid=grid, threads=threads, smem_bytes=smem_bytes)

    arch = for_capability(torch.cuda.get_device_capability(device))
    real = CudaKernel(compile_cuda(name, directory / "cuda", arch), name, device.index, smem_bytes)
    stream = torch.cuda.current_stream(device)
    real.launch(grid=grid, threads=threads, params=pack(on_gpu), stream=stream.cuda_stream)
    stream.synchronize()
    return [
        (a, b.cpu()) for a, b in zip(arguments, on_gpu, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fragments_are_those_of_the_hardware(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, d = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.randn(16, 8)
    received = torch.zeros(2, 32, 4, dtype=torch.int32)
    bf16 = int(dtype == torch.bfloat16)
    *exact, (mine, real) = run_both(tmp_path, "fragments", [a, b, received[0], received[1], d, bf16], threads=32)
    for emulated, hardware in exact:
        assert torch.equal(emulated, hardware)
    torch.testing.assert_close(mine, real, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_warp_operations_are_those_of_the_hardware(tmp_path: Path) -> None:
    x = torch.randn(3, 128)
    arguments: list[Tensor | int] = [
        x,
        torch.zeros(3, 128),
        torch.zeros(3, 128),
        torch.zeros(3, 128, 4, dtype=torch.int32),
        torch.zeros(3, 128),
    ]
    for emulated, hardware in run_both(tmp_path, "warps", arguments, grid=3):
        assert torch.equal(emulated, hardware)


@pytest.mark.gpu
def test_numbers_are_those_of_the_hardware(tmp_path: Path) -> None:
    """Rounding to 16 bits is bit for bit the same; the approximations agree within twice their documented error."""
    torch.manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (2**18,), dtype=torch.int64).int()
    x = torch.cat([patterns.view(torch.float32), torch.linspace(-20, 20, 2**14)])
    n = x.numel()
    arguments: list[Tensor | int] = [x, *torch.zeros(3, n), torch.zeros(n, 4, dtype=torch.int32), n]
    _, exp2, log2, tanh, packed = run_both(tmp_path, "numbers", arguments, grid=-(-n // 128))
    assert torch.equal(*packed)
    torch.testing.assert_close(*exp2, rtol=2.0**-21, atol=0, equal_nan=True)
    torch.testing.assert_close(*log2, rtol=2.0**-21, atol=2.0**-21, equal_nan=True)
    torch.testing.assert_close(*tanh, rtol=2.0**-10, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_copies_of_words_are_those_of_the_hardware(tmp_path: Path) -> None:
    source, out = torch.arange(100, 164, dtype=torch.int32), torch.zeros(68, dtype=torch.int32)
    _, (mine, real) = run_both(tmp_path, "words", [source, out], threads=64)
    assert torch.equal(mine, real)


@pytest.mark.gpu
def test_a_pipelined_product_is_that_of_the_hardware(tmp_path: Path) -> None:
    m, n, k = 150, 70, 160
    torch.manual_seed(0)
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.zeros(m, n)
    *_, (mine, real) = run_both(tmp_path, "pipeline", [a, b, c, m, n, k], grid=3 * 3, smem_bytes=15360)
    torch.testing.assert_close(mine, real, rtol=0, atol=1e-4)
