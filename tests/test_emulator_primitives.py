"""Each primitive of the emulator against its definition in the PTX ISA, computed by torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from emulator import HOPPER_PRIMITIVES, Hopper, compile_kernel, header, launch
from torch import Tensor

from fagen.arch import sm75, sm80
from fagen.emulator import EmulatedKernel

Kernels = Callable[[str], EmulatedKernel]
LANE = torch.arange(32)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The test kernels by name, each compiled once."""
    built: dict[str, EmulatedKernel] = {}
    directory = tmp_path_factory.mktemp("emulator")

    def get(name: str) -> EmulatedKernel:
        if name not in built:
            built[name] = EmulatedKernel(compile_kernel(name, directory / name), name)
        return built[name]

    return get


def bits(x: Tensor) -> Tensor:
    """The 16 or 32 bits of each element, as int64."""
    integer = {2: torch.int16, 4: torch.int32}[x.element_size()]
    patterns: Tensor = x.view(integer).long() & (2 ** (8 * x.element_size()) - 1)
    return patterns


def words(x: Tensor) -> Tensor:
    """Pairs of 16-bit elements along the last dimension as 32-bit words, the first in the lower half."""
    halves = bits(x)
    return halves[..., ::2] | halves[..., 1::2] << 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ldmatrix_and_mma_have_the_layouts_of_the_ptx_isa(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    c = torch.randn(16, 8)
    plain, trans = torch.zeros(2, 32, 4, dtype=torch.int32)
    d = c.clone()
    launch(kernels("fragments"), a, b, plain, trans, d, int(dtype == torch.bfloat16), threads=32)

    matrices = torch.stack([a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]])
    received = words(matrices)[:, LANE // 4, LANE % 4]  # word t of row g
    assert torch.equal(bits(plain), received.T)
    transposed = words(matrices.transpose(1, 2).contiguous())[:, LANE // 4, LANE % 4]
    assert torch.equal(bits(trans), transposed.T)

    exact = c.double() + a.double() @ b.double().T
    torch.testing.assert_close(d.double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_decodes_every_finite_number_exactly(kernels: Kernels, dtype: torch.dtype) -> None:
    """Times the identity, each element comes back: subnormals, the largest, infinity and NaN too."""
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.smallest_normal, info.max, -info.max, info.eps]
    pattern = torch.tensor(special, dtype=dtype).view(torch.int16)
    subnormal = torch.tensor([1, 0x8001 - 0x10000, 0x3F, 0x7F], dtype=torch.int16)
    column = torch.cat([pattern, subnormal]).view(dtype)
    a = torch.zeros(16, 16, dtype=dtype)
    a[: len(column), 0] = column
    b = torch.zeros(8, 16, dtype=dtype)
    b[0, 0] = 1
    scratch = torch.zeros(2, 32, 4, dtype=torch.int32)
    d = torch.zeros(16, 8)
    launch(kernels("fragments"), a, b, *scratch, d, int(dtype == torch.bfloat16), threads=32)
    assert torch.equal(d[:, 0], a[:, 0].float())

    a[0, 0], a[1, 0] = math.inf, math.nan
    d.zero_()
    launch(kernels("fragments"), a, b, *scratch, d, int(dtype == torch.bfloat16), threads=32)
    assert d[0, 0] == math.inf and torch.isnan(d[1]).all() and torch.equal(d[2:, 0], a[2:, 0].float())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_copies_of_words(kernels: Kernels, seed: int) -> None:
    """Each lands in its own word alone, zero where it is not valid, in a group with copies of 16 bytes."""
    source, out = torch.arange(100, 164, dtype=torch.int32), torch.zeros(68, dtype=torch.int32)
    launch(kernels("words"), source, out, threads=64, smem_bytes=272, seed=seed, read_only=(0,))
    copied = source[torch.arange(0, 64, 4) * 7 % 64].tolist()
    assert out.tolist() == [x for word in copied for x in (word, -2, 0, -2)] + [104, 105, 106, 107]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffles_votes_indices_and_exchange(kernels: Kernels, seed: int) -> None:
    torch.manual_seed(seed)
    blocks, threads = 3, 128
    x = torch.randn(blocks, threads)
    x[0, :32], x[1, 32:64] = 1.0, -1.0  # votes: all, none
    swapped, turned, halves = torch.zeros(3, blocks, threads)
    received = torch.zeros(blocks, threads, 4, dtype=torch.int32)
    launch(kernels("warps"), x, swapped, turned, received, halves, grid=blocks, seed=seed, read_only=(0,))

    lanes = x.view(blocks, -1, 32)
    assert torch.equal(swapped.view_as(lanes), lanes[..., LANE ^ 5])
    assert torch.equal(turned.view_as(lanes), lanes.roll(-7, -1))
    index = torch.arange(blocks * threads, dtype=torch.int32).view(blocks, threads)
    assert torch.equal(received[..., 0], ((LANE ^ 16) + 100 * blocks).repeat(blocks, threads // 32).int())
    assert torch.equal(received[..., 1], index.view_as(lanes).roll(1, -1).view_as(index))
    assert torch.equal(received[..., 2], 2 * index.roll(1, -1))
    votes = (lanes > 0).any(-1).int() + 2 * (lanes > 0).all(-1).int()
    assert torch.equal(received[..., 3].view_as(lanes), votes.unsqueeze(-1).expand_as(lanes))
    sums = x.view(blocks, -1, 16).sum(-1, keepdim=True).expand(-1, -1, 16).reshape_as(x)
    torch.testing.assert_close(halves, sums)


def numbers(kernels: Kernels, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """exp2, log2, tanh (n) and the packed words (n, 4) of x (n), float32."""
    n = x.numel()
    exp2, log2, tanh = torch.zeros(3, n)
    packed = torch.zeros(n, 4, dtype=torch.int32)
    launch(kernels("numbers"), x, exp2, log2, tanh, packed, n, grid=-(-n // 128), read_only=(0,))
    return exp2, log2, tanh, packed


@pytest.fixture(scope="module")
def floats() -> Tensor:
    """Float32 numbers of every exponent and sign, ties of both 16-bit roundings, and the special ones."""
    torch.manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (40000,), dtype=torch.int64)
    ties = torch.arange(0, 2**16, 7) << 16
    ties = torch.cat([ties | 0x8000, ties | 0x7FFF, ties | 0x1000, ties | 0x3000])
    patterns = torch.cat([patterns & 0xFFFFFFFF, ties])
    patterns = torch.where(patterns >= 2**31, patterns - 2**32, patterns).int()
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, math.nan, 65504, 65519.99, 65520, 2.0**-14, 2.0**-24, 2.0**-25]
    )
    return torch.cat([patterns.view(torch.float32), special, torch.linspace(-20, 20, 4001)])


def test_packing_rounds_to_nearest_even(kernels: Kernels, floats: Tensor) -> None:
    packed = bits(numbers(kernels, floats)[3])
    for column, dtype in enumerate([torch.bfloat16, torch.float16]):
        for offset, pair in ((0, (floats, -floats)), (2, (floats / 3, floats))):
            for half, x in enumerate(pair):
                got = packed[:, column + offset] >> (16 * half) & 0xFFFF
                expected = torch.where(torch.isnan(x), 0x7FFF, bits(x.to(dtype)))
                assert torch.equal(got, expected), (dtype, offset, half)


def flush(x: Tensor) -> Tensor:
    return torch.where(x.abs() < torch.finfo(torch.float32).smallest_normal, x * 0, x)


def test_exp2_and_log2_flush_subnormals(kernels: Kernels, floats: Tensor) -> None:
    exp2, log2, _, _ = numbers(kernels, floats)
    expected = flush(torch.exp2(flush(floats).double()).float())
    torch.testing.assert_close(exp2, expected, rtol=2.0**-22, atol=0, equal_nan=True)
    expected = torch.log2(flush(floats).double()).float()
    torch.testing.assert_close(log2, expected, rtol=2.0**-22, atol=2.0**-22, equal_nan=True)
    x = torch.tensor([-math.inf, math.inf, -127.0, -126.0, 1e-40, 0.0, -0.0, -1e-40, 128.0])
    exp2, log2, _, _ = numbers(kernels, x)
    assert exp2.tolist() == [0.0, math.inf, 0.0, 2.0**-126, 1.0, 1.0, 1.0, 1.0, math.inf]
    assert log2[4:8].tolist() == [-math.inf] * 4 and math.isnan(log2[0]) and log2[1] == math.inf


def test_tanh_errs_as_much_as_the_hardware_may(kernels: Kernels, floats: Tensor) -> None:
    tanh = numbers(kernels, floats)[2]
    expected = torch.tanh(floats.double())
    error = ((tanh.double() - expected) / expected).abs()
    normal = expected.abs() >= torch.finfo(torch.float32).smallest_normal
    assert error[normal].max() <= 2.0**-11
    assert error[normal].max() > 2.0**-11.1
    x = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 20.0])
    tanh = numbers(kernels, x)[2]
    assert tanh[:4].tolist() == [0.0, 0.0, 1.0, -1.0] and math.copysign(1, tanh[1]) == -1
    assert math.isnan(tanh[4]) and tanh[5] == 1.0


HOPPER = Hopper((("rs", 64), ("rs", 80), ("ss", 16), ("ss", 128), ("ss_new", 16), ("ss_new", 128)))


EVERY_PRIMITIVE = {
    *sm80.PRIMITIVES,
    *sm75.primitives(sm80.PRIMITIVES),
    *sm80.PAGE_PRIMITIVES,
    *("tanh", "unpack"),
    *HOPPER_PRIMITIVES,
}


@pytest.mark.parametrize("primitive", sorted(EVERY_PRIMITIVE))
def test_every_ptx_primitive_has_its_emulation(primitive: str) -> None:
    """Same functions with the same parameters in both directories, up to the line that the emulator adds."""
    name = re.compile(r"(\w+ \w+)\(([^)]*(?:\(&\w+\)[^)]*)*)\) \{")
    ptx = header(f"ptx/{primitive}.cuh", HOPPER)
    emulated = header(f"emulate/{primitive}.hpp", HOPPER)
    emulated = re.sub(r"namespace emu \{.*?\}  // namespace emu", "", emulated, flags=re.DOTALL)
    emulated = re.sub(r"(,\s+)?int line = __builtin_LINE\(\)", "", emulated)

    def functions(text: str) -> list[list[str]]:
        return [[re.sub(r"\s+", " ", part) for part in match] for match in name.findall(text)]

    assert functions(ptx) == functions(emulated)
    assert functions(ptx) or primitive == "types"
