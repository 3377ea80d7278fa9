"""The emulator's test kernels for Hopper are real CUDA, and a GPU gives the same answers."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from emulator import Argument, Map, compile_cuda, compile_kernel, launch, pack
from test_emulator_hopper import (
    BOXES,
    BULKS,
    COLUMNS,
    HOPPER,
    STREAM_BYTES,
    SWIZZLES,
    Boxes,
    Bulk,
    Matrices,
    Product,
    Turns,
    stream_arguments,
)
from torch import Tensor

from fagen.arch import resolve
from fagen.emulator import EmulatedKernel
from fagen.errors import ToolchainError
from fagen.launch import CudaKernel
from fagen.toolchain import find_cuda_compiler

ARCH = "sm90a"


@pytest.mark.parametrize("name", HOPPER)
def test_a_cuda_compiler_accepts_the_same_body(tmp_path: Path, name: str) -> None:
    try:
        find_cuda_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    assert compile_cuda(name.removesuffix("_f16"), tmp_path / name, resolve(ARCH), HOPPER[name]).stat().st_size > 0


def encode(entry: Map) -> bytes:
    """The tensor map as the driver encodes it."""
    from cuda.bindings import driver

    missing = 4 - entry.tensor.dim()
    each = entry.tensor.element_size()
    strides = [*(stride * each for stride in reversed(entry.tensor.stride()[:-1])), *[16] * missing]
    swizzles = driver.CUtensorMapSwizzle
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[entry.swizzle]
    error, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4,
        entry.tensor.data_ptr(),
        [driver.cuuint64_t(size) for size in (*reversed(entry.tensor.shape), *[1] * missing)],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in (*reversed(entry.box), *[1] * missing)],
        [driver.cuuint32_t(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    assert int(error) == 0, error
    return struct.pack("<16Q", *(int(word) for word in made.opaque))


def tensor_of(argument: Argument) -> Tensor | None:
    if isinstance(argument, Map):
        return argument.tensor
    return argument if isinstance(argument, Tensor) else None


class Both:
    """One test kernel, emulated and on the GPU."""

    def __init__(self, name: str, directory: Path) -> None:
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs compute capability 9.0")
        entry = name.removesuffix("_f16")
        library = compile_kernel(entry, directory / "emulated", hopper=HOPPER[name])
        self.emulated = EmulatedKernel(library, entry)
        self.cubin = compile_cuda(entry, directory / "cuda", resolve(ARCH), HOPPER[name])
        self.entry = entry

    def run(
        self, arguments: Sequence[Argument], *, smem_bytes: int, grid: int = 1, threads: int = 128
    ) -> list[tuple[Tensor, Tensor]]:
        """Each tensor as both left it, on the CPU."""
        device = torch.device("cuda", torch.cuda.current_device())

        def moved(tensor: Tensor) -> Tensor:  # with its strides
            copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            return copy.copy_(tensor)

        on_gpu: list[Argument] = []
        for argument in arguments:
            if isinstance(argument, Map):
                on_gpu.append(argument._replace(tensor=moved(argument.tensor)))
            else:
                on_gpu.append(moved(argument) if isinstance(argument, Tensor) else argument)
        launch(self.emulated, *arguments, grid=grid, threads=threads, smem_bytes=smem_bytes)
        real = CudaKernel(self.cubin, self.entry, device.index, smem_bytes)
        stream = torch.cuda.current_stream(device)
        real.launch(grid=grid, threads=threads, params=pack(on_gpu, encode), stream=stream.cuda_stream)
        stream.synchronize()
        pairs = zip(map(tensor_of, arguments), map(tensor_of, on_gpu), strict=True)
        return [(mine, real.cpu()) for mine, real in pairs if mine is not None and real is not None]


@pytest.mark.gpu
def test_boxes_are_those_of_the_hardware(tmp_path: Path) -> None:
    both = Both("boxes", tmp_path)
    for swizzle, rows, at in BOXES:
        boxes = Boxes(swizzle, rows, at)
        for emulated, hardware in both.run(boxes.arguments, smem_bytes=boxes.smem_bytes):
            assert torch.equal(emulated, hardware), (swizzle, rows, at)


@pytest.mark.gpu
def test_stmatrix_is_that_of_the_hardware(tmp_path: Path) -> None:
    for emulated, hardware in Both("matrices", tmp_path).run(Matrices().arguments, smem_bytes=512, threads=32):
        assert torch.equal(emulated, hardware)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["products", "products_f16"])
def test_products_are_those_of_the_hardware(tmp_path: Path, name: str) -> None:
    both = Both(name, tmp_path)
    dtype = torch.float16 if name.endswith("f16") else torch.bfloat16

    def compare(case: Product, what: object) -> None:
        *_, (emulated, hardware) = both.run(case.arguments, smem_bytes=case.smem_bytes)
        torch.testing.assert_close(emulated, hardware, rtol=0, atol=1e-4, msg=lambda text: f"{what}: {text}")

    for n, trans_b, from_registers in product(COLUMNS, [False, True], [False, True]):
        swizzle = next(span for span in (128, 64, 32) if not trans_b or n % (span // 2) == 0)
        case = Product(n, b_swizzle=swizzle, trans_b=trans_b, from_registers=from_registers, dtype=dtype)
        compare(case, (n, trans_b, from_registers))
    for trans_a, trans_b, a_swizzle, b_swizzle in product([False, True], [False, True], SWIZZLES, SWIZZLES):
        layout = (trans_a, trans_b, a_swizzle, b_swizzle)
        case = Product(64, trans_a=trans_a, trans_b=trans_b, a_swizzle=a_swizzle, b_swizzle=b_swizzle, dtype=dtype)
        compare(case, layout)
    for accumulate, repeats in product([False, True], [1, 3]):
        compare(Product(96, accumulate=accumulate, repeats=repeats, dtype=dtype), (accumulate, repeats))
    compare(Product(80, trans_b=True, dtype=dtype), "a partial block")
    for trans, repeats in product([False, True], [1, 3]):
        case = Product(64, trans_a=trans, trans_b=trans, accumulate=False, repeats=repeats, fresh=True, dtype=dtype)
        compare(case, (trans, repeats, "new"))


@pytest.mark.gpu
@pytest.mark.parametrize("trans_b", [False, True], ids=["k-major", "mn-major"])
def test_wrong_descriptors_read_what_the_hardware_reads(tmp_path: Path, trans_b: bool) -> None:
    both = Both("products", tmp_path)
    failed = []
    for name, case in Product.wrong(trans_b):
        *_, (emulated, hardware) = both.run(case.arguments, smem_bytes=case.smem_bytes)
        if not torch.allclose(emulated, hardware, rtol=0, atol=1e-4):
            failed.append(name)
    assert not failed


@pytest.mark.gpu
def test_a_pipeline_is_that_of_the_hardware(tmp_path: Path) -> None:
    both = Both("stream", tmp_path)
    for m, n, k, grid in ((200, 136, 320, 2), (128, 64, 64 * 40, 1), (640, 256, 64, 3)):
        torch.manual_seed(0)
        a, b, c = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.zeros(m, n).bfloat16()
        arguments = stream_arguments(a, b, c)
        *_, (emulated, hardware) = both.run(arguments, grid=grid, threads=384, smem_bytes=STREAM_BYTES)
        torch.testing.assert_close(emulated.float(), hardware.float(), rtol=2.0**-7, atol=1e-4)


@pytest.mark.gpu
def test_bulk_copies_are_those_of_the_hardware(tmp_path: Path) -> None:
    both = Both("bulk", tmp_path)
    for words, place in BULKS:
        case = Bulk(words, place)
        for emulated, hardware in both.run(case.arguments, grid=case.grid, smem_bytes=case.smem_bytes):
            assert torch.equal(emulated, hardware), (words, place)
        assert torch.equal(case.sum, case.expected), (words, place)


@pytest.mark.gpu
def test_sums_in_turns_are_those_of_the_hardware(tmp_path: Path) -> None:
    """Bitwise, in whichever order the blocks run."""
    both = Both("turns", tmp_path)
    for _ in range(20):
        case = Turns(range(100))
        for emulated, hardware in both.run(case.arguments, grid=case.blocks, threads=64, smem_bytes=1024):
            assert torch.equal(emulated, hardware)
        assert torch.equal(case.by_engine, case.expected) and torch.equal(case.by_threads, case.expected)
