"""The emulator's primitives of Hopper: what they compute, the faults they name, and that a GPU agrees."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from emulator import Argument, Hopper, Map, assemble, body, compile_kernel, launch, pack, span
from torch import Tensor

from fagen.emulator import EmulatedKernel
from fagen.errors import LaunchError

COLUMNS = (16, 64, 80, 96, 128, 176, 256)
PRODUCTS = (*((form, n) for form in ("rs", "ss") for n in COLUMNS), ("ss_new", 64))
HOPPER = {
    "boxes": Hopper(),
    "matrices": Hopper(),
    "products": Hopper(PRODUCTS),
    "products_f16": Hopper(PRODUCTS, "fp16"),
    "handovers": Hopper(),
    "hopper_faults": Hopper((("rs", 16), ("ss", 16), ("ss_new", 16))),
    "stream": Hopper((("ss", 64),)),
    "bulk": Hopper(),
    "turns": Hopper(),
}
Kernels = Callable[[str], EmulatedKernel]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The test kernels by name, each compiled once."""
    built: dict[str, EmulatedKernel] = {}
    directory = tmp_path_factory.mktemp("emulator")

    def get(name: str) -> EmulatedKernel:
        if name not in built:
            entry = name.removesuffix("_f16")
            built[name] = EmulatedKernel(compile_kernel(entry, directory / name, hopper=HOPPER[name]), entry)
        return built[name]

    return get


# ---- Tensor copies ----


def swizzled(offset: Tensor, swizzle: int) -> Tensor:
    """Bits 4 to 6 of byte offsets, xor bits 7 to 9, as far as the swizzle's span goes."""
    return offset ^ (((offset >> 7) & (swizzle // 16 - 1)) << 4 if swizzle else 0)


class Boxes:
    """The arguments of boxes.cu for a box of a (3, 4, 40, 72) tensor, and what it shall have done."""

    TENSOR = (3, 4, 40, 72)

    def __init__(self, swizzle: int, rows: int, at: Sequence[int]) -> None:
        box = (2, 3, rows, swizzle // 2 or 24)
        torch.manual_seed(0)
        values = torch.randint(-(2**15), 2**15, self.TENSOR).short()
        padded = torch.zeros(3, 4, 40, 80, dtype=torch.int16)  # rows lie further apart than they are long
        self.source = padded[..., :72]
        self.source.copy_(values)
        self.target = torch.zeros(3, 4, 40, 80, dtype=torch.int16)[..., :72]
        self.at = list(at)
        words = 2 * 3 * rows * box[3] // 2
        self.loaded = torch.zeros(words, dtype=torch.int32)
        self.stored = torch.randint(-(2**31), 2**31, (words,)).int()
        self.arguments: list[Argument] = [
            Map(self.source, box, swizzle),
            Map(self.target, box, swizzle),
            self.loaded,
            self.stored,
            *self.at,
            words,
        ]
        self.smem_bytes = 1024 + 4 * words

        # Element i of the box lies at byte place[i] of shared memory.
        indices = [torch.arange(size) + start for size, start in zip(box, reversed(self.at), strict=True)]
        grid = torch.stack(torch.meshgrid(*indices, indexing="ij"), -1).reshape(-1, 4)
        inside = ((grid >= 0) & (grid < torch.tensor(self.TENSOR))).all(-1)
        place = swizzled(2 * torch.arange(2 * words), swizzle) // 2
        clamped = [column.clamp(0, size - 1) for column, size in zip(grid.T, self.TENSOR, strict=True)]
        elements = torch.where(inside, self.source[tuple(clamped)], torch.zeros((), dtype=torch.int16))
        self.expected_loaded = torch.zeros(2 * words, dtype=torch.int16)
        self.expected_loaded[place] = elements
        self.expected_target = torch.zeros(self.TENSOR, dtype=torch.int16)
        self.expected_target[tuple(grid[inside].T)] = self.stored.view(torch.int16)[place][inside]


# Those that a card has run, too.
BOXES = [
    *product((0, 32, 64, 128), (8, 13), [(8, 3, 1, 0)]),
    (128, 8, (40, 35, 3, 2)),
    (128, 8, (72, 0, 0, 0)),
]


@pytest.mark.parametrize(("swizzle", "rows", "at"), BOXES)
def test_boxes_lie_swizzled_and_what_is_outside_is_zero(
    kernels: Kernels, swizzle: int, rows: int, at: Sequence[int]
) -> None:
    boxes = Boxes(swizzle, rows, at)
    launch(kernels("boxes"), *boxes.arguments, smem_bytes=boxes.smem_bytes, read_only=(0, 3))
    assert torch.equal(boxes.loaded.view(torch.int16), boxes.expected_loaded)
    assert torch.equal(boxes.target, boxes.expected_target)


@pytest.mark.parametrize("at", [(-5, 0, 0, 0), (0, -3, 0, 0), (0, 0, 0, -1)])
def test_negative_coordinates_are_refused(kernels: Kernels, at: Sequence[int]) -> None:
    """An H200 takes the load and the store alike for an illegal instruction."""
    boxes = Boxes(128, 8, at)
    with pytest.raises(LaunchError, match="a negative coordinate is an illegal instruction"):
        launch(kernels("boxes"), *boxes.arguments, smem_bytes=boxes.smem_bytes, read_only=(0, 3))


# ---- stmatrix ----


class Matrices:
    """The arguments of matrices.cu and what it shall have done."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        fragments = torch.randint(-(2**31), 2**31, (32, 4)).int()
        order = torch.randperm(32)
        self.rows, self.again = torch.zeros(2, 32, 4, dtype=torch.int32)
        self.arguments: list[Argument] = [fragments, self.rows, self.again, order.float()]
        # Lane 4 r + t has elements 2 t and 2 t + 1 of row r of each matrix; lane 8 m + r says where row r of m goes.
        self.expected_rows = torch.zeros(32, 4, dtype=torch.int32)
        self.expected_rows[order] = fragments.view(8, 4, 4).permute(2, 0, 1).reshape(32, 4)
        self.expected_again = fragments


def test_stmatrix_has_the_layout_of_the_ptx_isa(kernels: Kernels) -> None:
    case = Matrices()
    launch(kernels("matrices"), *case.arguments, threads=32, read_only=(0, 3))
    assert torch.equal(case.rows, case.expected_rows)
    assert torch.equal(case.again, case.expected_again)


# ---- Products ----

SWIZZLES = {0: 0, 128: 1, 64: 2, 32: 3}  # as descriptors write them
LANE = torch.arange(128)


def descriptor(start: int, leading: int, stride: int, swizzle: int, base: int = 0) -> int:
    bits = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | SWIZZLES[swizzle] << 62
    return bits - 2**64 if bits >= 2**63 else bits


class Layout:
    """A canonical layout of a (rows, 16) operand: where its elements lie and the descriptor that says so."""

    def __init__(self, rows: int, swizzle: int, *, mn_major: bool, start: int) -> None:
        row, k = torch.meshgrid(torch.arange(rows), torch.arange(16), indexing="ij")
        span = swizzle or 16  # bytes of a row of the swizzle's pattern
        if mn_major:
            across = span // 2  # elements of M or N side by side
            if swizzle:
                leading, stride = 2 * 8 * span + 1024, 8 * span  # from block to block of N, from 8 rows of k to 8
                offset = row % across * 2 + row // across * leading + k % 8 * span + k // 8 * stride
            else:
                leading, stride = 128, 256  # 8 rows of k, 8 of N
                offset = row % 8 * 2 + row // 8 * stride + k % 8 * 16 + k // 8 * leading
        else:
            stride = 8 * span if swizzle else 256
            leading = 0 if swizzle else 128
            offset = row // 8 * stride + row % 8 * span + (k * 2 if swizzle else k % 8 * 2 + k // 8 * leading)
        self.elements = swizzled(start + offset, swizzle) // 2  # (rows, 16): their places in shared memory
        self.descriptor = descriptor(start, leading, stride, swizzle)
        self.end = int(start + offset.max()) + 2


def read_by_hand(shared: Tensor, bits: int, rows: int, trans: bool) -> Tensor:
    """(rows, 16): the operand that a descriptor names, element by element."""
    start, leading, stride = ((bits >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = {0: 16, 1: 128, 2: 64, 3: 32}[bits >> 62 & 3]
    row, k = torch.meshgrid(torch.arange(rows), torch.arange(16), indexing="ij")
    if trans and span > 16:
        offset = row % (span // 2) * 2 + row // (span // 2) * leading + k % 8 * span + k // 8 * stride
    elif trans:
        offset = row % 8 * 2 + row // 8 * stride + k % 8 * 16 + k // 8 * leading
    elif span > 16:
        offset = row // 8 * stride + row % 8 * span + k * 2
    else:
        offset = row // 8 * stride + row % 8 * 16 + k % 8 * 2 + k // 8 * leading
    address = start + offset
    pattern = (address >> 7) - (bits >> 49 & 7) & (span // 16 - 1)
    return shared[(address ^ pattern << 4) // 2]


WRONG = {
    "one k-step further": descriptor(2048 + 32, 0, 1024, 128),
    "rows too near": descriptor(2048, 0, 512, 128),
    "another swizzle": descriptor(2048, 0, 1024, 64),
    "a start within the pattern": descriptor(2048 + 128, 1024, 512, 32),
    "no swizzle": descriptor(2048, 256, 128, 0),
    "a start within a row": descriptor(2048 + 16, 1024, 2048, 128),
    "a start in the fourth row": descriptor(2048 + 384, 1024, 2048, 128),
    "a base offset": descriptor(2048 + 384, 1024, 2048, 128, base=3),
}


class Product:
    """The arguments of products.cu and what it shall compute."""

    def __init__(
        self,
        n: int,
        *,
        a_swizzle: int = 128,
        b_swizzle: int = 128,
        trans_a: bool = False,
        trans_b: bool = False,
        from_registers: bool = False,
        accumulate: bool = True,
        repeats: int = 1,
        early: bool = False,
        fresh: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        torch.manual_seed(n)
        a, b, c = torch.randn(64, 16).to(dtype), torch.randn(n, 16).to(dtype), torch.randn(64, n)
        self.a_layout = Layout(64, a_swizzle, mn_major=trans_a, start=0)
        start = -(-self.a_layout.end // 1024) * 1024
        self.b_layout = Layout(n, b_swizzle, mn_major=trans_b, start=start)
        words = -(-self.b_layout.end // 1024) * 256
        self.shared = torch.randn(2 * words).to(dtype)  # what lies around the operands is not zero
        self.shared[self.a_layout.elements] = a
        self.shared[self.b_layout.elements] = b
        self.descriptors = torch.tensor([self.a_layout.descriptor, self.b_layout.descriptor])
        registers = a.view(torch.int32)[self.rows(torch.arange(4) % 2), (LANE % 4)[:, None] + torch.arange(4) // 2 * 4]
        self.columns = (torch.arange(n // 8) * 8)[:, None] + torch.arange(4) % 2  # of d[j][i] of lane 0
        self.d = self.fragments(c)
        self.arguments: list[Argument] = [self.shared, registers.contiguous(), self.descriptors, self.d]
        self.arguments += [words, n, int(trans_a), int(trans_b), int(from_registers), int(accumulate), repeats]
        self.arguments += [int(early), int(fresh)]
        self.smem_bytes = 4 * words
        exact = repeats * (a.double() @ b.double().T)
        self.expected = self.fragments(exact + c.double() if accumulate else exact)
        self.n = n

    @staticmethod
    def rows(upper: Tensor) -> Tensor:
        """(128, ...): the row of each thread, 8 further down where `upper` is 1."""
        return (LANE // 32 * 16 + LANE % 32 // 4).view(-1, *[1] * upper.dim()) + 8 * upper

    def fragments(self, matrix: Tensor) -> Tensor:
        """(128, n / 2): the elements of a (64, n) matrix that each thread holds."""
        rows = self.rows((torch.arange(4) // 2).expand_as(self.columns))
        columns = (LANE % 4 * 2).view(-1, 1, 1) + self.columns
        return matrix[rows, columns].reshape(128, -1).contiguous()

    @classmethod
    def wrong(cls, trans_b: bool) -> Iterator[tuple[str, Product]]:
        """Products whose descriptor of b does not fit any tile, and what each shall read."""
        for name, bits in WRONG.items():
            case = cls(16, trans_b=trans_b, accumulate=False)
            case.shared = torch.randn(8192).bfloat16()
            case.arguments[0], case.arguments[4], case.smem_bytes = case.shared, 4096, 16384
            case.descriptors[1] = bits
            a = case.shared[case.a_layout.elements]
            b = read_by_hand(case.shared, bits & (2**64 - 1), 16, trans_b)
            case.expected = case.fragments(a.double() @ b.double().T)
            yield name, case

    def run(self, kernel: EmulatedKernel, seed: int = 0) -> None:
        launch(kernel, *self.arguments, smem_bytes=self.smem_bytes, read_only=(0, 1, 2), seed=seed)

    def check(self, result: Tensor) -> None:
        torch.testing.assert_close(result.double(), self.expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("n", COLUMNS)
@pytest.mark.parametrize("trans_b", [False, True], ids=["k-major", "mn-major"])
def test_products_of_every_width(kernels: Kernels, n: int, trans_b: bool) -> None:
    for from_registers in (False, True):
        # The widest swizzle whose blocks the columns fill, as a tile would be laid out.
        swizzle = next(span for span in (128, 64, 32) if not trans_b or n % (span // 2) == 0)
        case = Product(n, b_swizzle=swizzle, trans_b=trans_b, from_registers=from_registers)
        case.run(kernels("products"))
        case.check(case.d)


@pytest.mark.parametrize(("trans_a", "trans_b"), [*product([False, True], repeat=2)])
def test_products_of_every_layout(kernels: Kernels, trans_a: bool, trans_b: bool) -> None:
    for a_swizzle, b_swizzle in product(SWIZZLES, repeat=2):
        case = Product(64, a_swizzle=a_swizzle, b_swizzle=b_swizzle, trans_a=trans_a, trans_b=trans_b)
        case.run(kernels("products"))
        case.check(case.d)


@pytest.mark.parametrize("name", ["products", "products_f16"])
def test_products_in_flight_accumulate_in_order(kernels: Kernels, name: str) -> None:
    dtype = torch.float16 if name.endswith("f16") else torch.bfloat16
    for accumulate, repeats in product([False, True], [1, 3]):
        case = Product(96, accumulate=accumulate, repeats=repeats, dtype=dtype)
        case.run(kernels(name), seed=repeats)
        case.check(case.d)


@pytest.mark.parametrize("name", ["products", "products_f16"])
def test_a_new_product_takes_nothing_of_its_accumulators(kernels: Kernels, name: str) -> None:
    dtype = torch.float16 if name.endswith("f16") else torch.bfloat16
    for trans, repeats in product([False, True], [1, 3]):
        case = Product(64, trans_a=trans, trans_b=trans, accumulate=False, repeats=repeats, fresh=True, dtype=dtype)
        case.run(kernels(name), seed=repeats)
        case.check(case.d)


def test_accumulators_are_nan_until_the_wait(kernels: Kernels) -> None:
    case = Product(64, early=True)
    case.run(kernels("products"))
    assert torch.isnan(case.d).all()


def test_a_partial_block_of_columns_is_read_as_far_as_it_goes(kernels: Kernels) -> None:
    """80 columns, MN-major, in blocks of 64: the second block is read for 16."""
    case = Product(80, b_swizzle=128, trans_b=True)
    case.run(kernels("products"))
    case.check(case.d)


@pytest.mark.parametrize("trans_b", [False, True], ids=["k-major", "mn-major"])
def test_a_wrong_descriptor_reads_what_it_says(kernels: Kernels, trans_b: bool) -> None:
    """Start, offsets and swizzle that do not fit the tile give the numbers that lie there."""
    for _, case in Product.wrong(trans_b):
        case.run(kernels("products"))
        case.check(case.d)


# ---- Faults ----


class Faults:
    """The kernel of hopper_faults.cu and its tensors, which lie apart from one another in one allocation."""

    def __init__(self, directory: Path) -> None:
        self.kernel = EmulatedKernel(
            compile_kernel("hopper_faults", directory, hopper=HOPPER["hopper_faults"]), "hopper_faults"
        )
        self.source = (directory / "kernel.cpp").read_text(encoding="utf-8").splitlines()
        arena = torch.zeros(10240, dtype=torch.bfloat16)
        arena = arena[-arena.data_ptr() % 64 // 2 :]
        self.tensors = [arena[start : start + 1024].view(16, 64) for start in (0, 2048, 4096)]
        beyond = arena[:1088].view(17, 64)
        self.arguments = [Map(tensor, (8, 64)) for tensor in (*self.tensors, beyond)]
        self.no_map = arena[6144:7168]

    def run(self, name: str | None, seed: int = 0) -> Tensor:
        """Launches with the fault `name` and returns the output."""
        number = 0
        if name is not None:
            before = body("hopper_faults").split(f"// FAULT {name}\n")[0]
            number = int(re.findall(r"fault == (\d+)", before)[-1])
        self.tensors[1].fill_(7)
        self.kernel.launch(
            grid=3,
            threads=256,
            smem_bytes=13312,
            params=pack([*self.arguments, self.no_map, *self.tensors, number]),
            ranges=[(tensor.data_ptr(), span(tensor), index == 1) for index, tensor in enumerate(self.tensors)],
            seed=seed,
        )
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
    return Faults(tmp_path_factory.mktemp("emulator") / "hopper_faults")


# Name of the fault, warp and lane, and what the message must say of it.
EXPECTED = [
    ("mbarrier_uninitialised", 1, 3, "arrives at the mbarrier at shared byte 16, which is not initialised"),
    ("mbarrier_init_unordered", 1, 5, "mbarrier at shared byte 16, which warp 0, lane 3 initialised.*no barrier"),
    ("mbarrier_too_many_arrivals", 1, 3, "whose phase 0 has all its 1 arrivals and waits for 16 bytes"),
    (
        "mbarrier_too_few_arrivals",
        1,
        4,
        r"deadlock: waits at mbarrier_wait, line \d+, for parity 0 of the mbarrier at shared byte 8 \(in phase 0, "
        r"parity 0: 1 of 2 arrivals and 0 bytes are missing\).*255 of 256 threads have exited",
    ),
    ("mbarrier_wrong_parity", 1, 3, r"deadlock.*for parity 1 .* shared byte 0 \(in phase 1, parity 1.*wrong parity"),
    ("mbarrier_overwritten", 1, 3, r"writes shared byte 4, which is part of the mbarrier that line \d+ initialised"),
    ("mbarrier_read", 1, 3, "reads shared byte 8, which is part of the mbarrier"),
    ("bytes_never_copied", 1, 4, "deadlock.*0 of 1 arrivals and 1024 bytes are missing.*never copied"),
    ("mbarrier_parity_two", 1, 3, "waits for parity 2"),
    ("mbarrier_misaligned", 1, 3, "shared byte 4, which is misaligned: it must be a multiple of 8"),
    ("mbarrier_initialised_twice", 1, 3, "writes shared byte 0, which is part of the mbarrier"),
    ("mbarrier_for_nobody", 1, 3, "initialises an mbarrier for 0 arrivals"),
    ("load_without_init_fence", 1, 3, "missing mbarrier_init_fence"),
    ("load_not_announced", 1, 3, "reads shared byte 1024, .* tensor copy .* has not landed.*mbarrier_arrive_expect_tx"),
    ("load_not_waited_for", 2, 6, "warp 1, lane 3 issued a tensor copy at line .* has not landed.*mbarrier_wait"),
    ("load_waited_for_by_another", 1, 4, "race: reads shared byte 1024.*without having waited.*at shared byte 0"),
    ("load_over_read", 1, 3, "write-after-read race: writes shared byte 1024, which warp 0, lane 3 read at line"),
    ("store_over_load", 1, 3, "writes shared byte 1032, .* tensor copy .* has not landed"),
    ("load_over_read_unfenced", 1, 3, "asynchronously, which warp 0, lane 3 read.*no fence_proxy_async"),
    ("load_misaligned", 1, 3, "a box at shared byte 1088, which must be a multiple of 128"),
    ("load_past_end", 1, 3, "a box of 1024 bytes at shared byte 12800, out of bounds: the block has 13312"),
    ("load_by_no_map", 1, 3, "no tensor map of the emulator"),
    ("load_from_address_0", 1, 3, "the tensor has the address 0"),
    ("load_past_tensor", 1, 3, "reads 2 bytes of global memory out of bounds: byte 2048 of range 0"),
    (
        "store_without_fence",
        1,
        3,
        "reads shared byte 1036 asynchronously, which warp 1, lane 3 wrote.*fence_proxy_async",
    ),
    ("store_after_late_fence", 4, 7, "shared byte 1036 asynchronously, which warp 2, lane 6 wrote.*fence_proxy_async"),
    ("store_source_overwritten", 1, 3, "write-after-read race: writes shared byte 1036, which a tensor copy to global"),
    ("store_wait_for_too_few", 1, 3, "write-after-read race: writes shared byte 2048.*tma_store_wait_read"),
    ("store_unordered", 1, 3, "read-after-write race: reads shared byte 1024, which warp 0, lane 3 wrote"),
    ("store_to_read_only", 1, 3, "writes 2 bytes of global memory that is read-only: byte 0 of range 2"),
    ("load_never_waited_for", 1, 3, "the block ends while a tensor copy.*nobody waited for the mbarrier"),
    ("product_without_fence", 0, 0, "without a wgmma_fence since"),
    ("product_without_proxy_fence", 0, 0, "reads shared byte 2048 asynchronously.*missing fence_proxy_async"),
    ("product_of_three_warps", 3, 0, r"wgmma_m64n16k16_bf16_ss at line \d+: 32 threads never reach it"),
    ("product_divergent", 2, 0, "divergence.*warp 0, lane 0 of its warpgroup waits.*All four warps"),
    ("exit_with_product", 0, 0, "exits while the product of line .* is in flight"),
    ("accumulator_written", 0, 5, "accumulators of the product of line .* were written while it was in flight"),
    ("operand_overwritten", 0, 5, "writes shared byte 10240, which a product of warpgroup 0 reads.*wgmma_wait"),
    ("load_over_product", 0, 5, "writes shared byte 2048, which a product of warpgroup 0 reads"),
    ("wait_for_too_few_products", 0, 5, "writes shared byte 10272, which a product of warpgroup 0 reads"),
    ("descriptor_past_end", 0, 0, r"reads shared byte 12288 \(of 13312\), which no thread has written"),
    ("descriptors_differ", 2, 13, "descriptors or its `accumulate` differ"),
    ("operand_unwritten", 0, 0, r"reads shared byte 12288 \(of 13312\), which no thread has written"),
    ("registers_never_free", 0, 0, r"deadlock: waits at setmaxnreg_inc.*for 256 registers a thread \(it has 248"),
    ("registers_given_back_upwards", 3, 31, "setmaxnreg_dec to 32 registers a thread, and the warpgroup has 24"),
    ("named_counts_differ", 1, 0, "of 96 threads with barrier 1, for which warp 0 arrived at line .* as one of 64"),
    ("named_too_few", 0, 0, r"deadlock.*for barrier 3 \(32 of 64 threads have arrived\)"),
    ("named_sixteen", 0, 0, "with barrier 16; it must be from 1 to 15"),
    ("named_half_warps", 0, 16, r"named_barrier_sync at line \d+: 16 threads never reach it"),
    ("named_odd_count", 0, 0, "of 40 threads with barrier 1; it must be whole warps"),
    ("named_twice", 0, 0, "arrives at barrier 1 again, before the 96 threads that it expects have come: 32 have"),
    ("stmatrix_misaligned", 0, 9, "writes 16 bytes at shared byte 1176, which is misaligned"),
    ("stmatrix_unordered", 1, 8, "read-after-write race: reads shared byte 1104, which warp 0, lane 5 wrote"),
    ("written_after_arrival", 2, 6, "read-after-write race.*warp 0, lane 3 wrote"),
    ("arrival_of_one_lane", 2, 6, "read-after-write race: reads shared byte 1028, which warp 0, lane 1 wrote"),
    ("warp_races_after_mbarriers", 1, 1, "write-after-write race.*__syncwarp"),
    ("write_over_many_readers", 7, 0, "write-after-read race: writes shared byte 1088, which warp 0, lane 0 read"),
    (
        "accumulator_written_after_fence",
        2,
        5,
        "accumulates into registers that were written after the last wgmma_fence",
    ),
    ("fragment_written_after_fence", 2, 5, "registers a that were written after the last wgmma_fence"),
    ("named_for_two_purposes", 6, 0, "race.*with barrier 1, not knowing of the arrival of warp 0 before"),
    ("arrival_for_another_phase", 1, 3, "race.*shared byte 0 in phase 1, not knowing of the arrival of warp 0 in the"),
    ("two_phases_late", 1, 3, r"deadlock.*for parity 0 of the mbarrier at shared byte 0 \(in phase 2, parity 0"),
    ("product_by_two_branches", 6, 0, "divergence.*of its warpgroup waits"),
    ("bulk_load_misaligned", 1, 3, "bulk_load: 1024 bytes between .* and shared byte 1032; .* multiples of 16"),
    ("bulk_load_from_misaligned", 1, 3, "bulk_load: 1024 bytes between .* and shared byte 1024; .* multiples of 16"),
    ("bulk_load_of_odd_bytes", 1, 3, "bulk_load: 1000 bytes.*and so must the number of bytes"),
    ("bulk_load_of_nothing", 1, 3, "bulk_load: 0 bytes.*which is at least 16"),
    ("bulk_load_past_end", 1, 3, "bulk_load: 1024 bytes at shared byte 12800, out of bounds: the block has 13312"),
    ("bulk_load_past_tensor", 1, 3, "reads 4 bytes of global memory out of bounds: byte 2048 of range 0"),
    ("bulk_load_without_init_fence", 1, 3, "missing mbarrier_init_fence"),
    ("bulk_load_not_waited_for", 2, 6, "reads shared byte 1084, to which warp 1, lane 3 .* has not landed"),
    ("bulk_load_not_announced", 1, 3, "reads shared byte 1024, .* has not landed.*mbarrier_arrive_expect_tx"),
    ("bulk_load_over_read", 1, 3, "write-after-read race: writes shared byte 1068, which warp 0, lane 3 read at line"),
    ("bulk_load_over_read_unfenced", 1, 3, "asynchronously, which warp 0, lane 3 read.*no fence_proxy_async"),
    ("bulk_add_from_misaligned", 1, 3, "bulk_add_f32: 16 bytes between .* and shared byte 1028; .* multiples of 16"),
    ("bulk_add_misaligned", 1, 3, "bulk_add_f32: 16 bytes between .* and shared byte 1024; .* multiples of 16"),
    ("bulk_add_past_tensor", 1, 3, "writes 4 bytes of global memory out of bounds: byte 2048 of range 1"),
    ("bulk_add_to_read_only", 1, 3, "writes 4 bytes of global memory that is read-only: byte 0 of range 2"),
    ("bulk_add_of_unwritten", 1, 3, r"reads shared byte 12288 \(of 13312\), which no thread has written"),
    ("bulk_add_without_fence", 1, 3, "reads shared byte 1036 asynchronously, which warp 1, lane 3.*fence_proxy_async"),
    ("bulk_add_after_late_fence", 4, 7, "byte 1036 asynchronously, which warp 2, lane 6 wrote.*fence_proxy_async"),
    ("bulk_add_unordered", 1, 3, "read-after-write race: reads shared byte 1036, which warp 0, lane 3 wrote"),
    ("bulk_add_source_overwritten", 1, 3, "write-after-read race: writes shared byte 1036.*tma_store_wait_read"),
    ("bulk_add_wait_for_too_few", 1, 3, "write-after-read race: writes shared byte 1040.*tma_store_wait_read"),
    ("bulk_add_waited_for_by_another", 1, 4, "write-after-read race: .*which .* warp 1, lane 3 issued"),
    ("turn_of_read_only", 1, 3, "writes 4 bytes of global memory that is read-only: byte 0 of range 2"),
    ("turn_out_of_bounds", 1, 3, "reads 4 bytes of global memory out of bounds"),
    ("pair_misaligned", 1, 3, "reads 8 bytes at shared byte 1028, which is misaligned: it must be a multiple of 8"),
    ("first_lane_reads", 1, 0, "read-after-write race: reads shared byte 1028, which warp 0, lane 3 wrote"),
    ("new_accumulator_written", 0, 5, "accumulators of the product of line .* were written while it was in flight"),
]


def test_each_fault_is_expected_once() -> None:
    assert [name for name, *_ in EXPECTED] == re.findall(r"// FAULT (\w+)", body("hopper_faults"))


@pytest.mark.parametrize(("name", "warp", "lane", "text"), EXPECTED, ids=[name for name, *_ in EXPECTED])
def test_a_fault_names_kernel_line_block_warp_and_lane(
    faults: Faults, name: str, warp: int, lane: int, text: str
) -> None:
    message = faults.message(name)
    line = faults.line(name)
    assert message.startswith(f"hopper_faults, line {line}: block 1, warp {warp}, lane {lane}: ")
    assert re.search(text, message, re.DOTALL), message
    assert f"{line} | {faults.source[line - 1]}" in message  # the line itself is quoted


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_faults_do_not_depend_on_the_order(faults: Faults, seed: int) -> None:
    """In any order some thread is convicted; which of two racing threads it is may differ."""
    for name, *_ in EXPECTED:
        assert faults.message(name, seed).startswith("hopper_faults, line "), name


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_after_a_fault_the_kernel_can_be_launched_again(faults: Faults, seed: int) -> None:
    for name in ("load_over_product", "mbarrier_wrong_parity", "store_to_read_only", "exit_with_product"):
        faults.message(name, seed)
        assert torch.equal(faults.run(None, seed), torch.full((16, 64), 7).bfloat16())


# ---- Bulk copies of consecutive bytes ----


class Bulk:
    """The arguments of bulk.cu and what it shall have done. Sums of such numbers are exact, in any order."""

    def __init__(self, words: int, place: int, blocks: int = 5) -> None:
        generator = torch.Generator().manual_seed(0)
        self.source = torch.randn(blocks, words, generator=generator)
        terms = torch.randint(-1000, 1000, (blocks, words), generator=generator).float()
        self.loaded, self.pairs = torch.zeros(2, blocks, words)
        self.sum = torch.full((words,), 0.5)
        self.arguments: list[Argument] = [self.source, terms, self.loaded, self.pairs, self.sum, words, place]
        self.expected = terms.sum(0) + 0.5
        self.grid, self.smem_bytes = blocks, place + 4 * words


# One copy of 16 bytes, numbers of bytes that are no power of two at places that are no multiple of them, and 40 KiB.
BULKS = [(4, 16), (12, 1040), (768, 2048), (756, 16), (10240, 1024)]


@pytest.mark.parametrize(("words", "place"), BULKS)
@pytest.mark.parametrize("seed", [0, 1])
def test_bulk_copies_move_and_add_each_word(kernels: Kernels, words: int, place: int, seed: int) -> None:
    case = Bulk(words, place)
    launch(kernels("bulk"), *case.arguments, grid=case.grid, smem_bytes=case.smem_bytes, read_only=(0, 1), seed=seed)
    assert torch.equal(case.loaded, case.source) and torch.equal(case.pairs, case.source)
    assert torch.equal(case.sum, case.expected)


def test_bulk_additions_of_blocks_side_by_side_lose_none(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Atomic a word, whichever OS threads run the blocks."""
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", "8")
    case = Bulk(1024, 16, blocks=200)
    launch(kernels("bulk"), *case.arguments, grid=case.grid, smem_bytes=case.smem_bytes, read_only=(0, 1))
    assert torch.equal(case.sum, case.expected)


# ---- Turns ----


class Turns:
    """The arguments of turns.cu: terms of which a float32 sum knows the order."""

    def __init__(self, order: Sequence[int], *, mute: int = -1, faulty: int = -1) -> None:
        generator = torch.Generator().manual_seed(0)
        terms = torch.randn(len(order), 128, generator=generator) * 10.0 ** torch.arange(len(order))[:, None].fmod(6)
        self.by_engine, self.by_threads = torch.zeros(2, 128)
        self.turns = torch.zeros(2, dtype=torch.int32)
        turn = torch.tensor(order, dtype=torch.int32)
        self.arguments: list[Argument] = [terms, self.by_engine, self.by_threads, self.turns, turn, mute, faulty]
        self.blocks = len(order)
        self.expected, self.reversed = torch.zeros(2, 128)
        for block in turn.argsort().tolist():
            self.expected = self.expected + terms[block]
        for block in turn.argsort(descending=True).tolist():
            self.reversed = self.reversed + terms[block]

    def run(self, kernel: EmulatedKernel, seed: int = 0) -> None:
        launch(kernel, *self.arguments, grid=self.blocks, threads=64, read_only=(0, 4), seed=seed)


@pytest.fixture(scope="module")
def hasty_turns(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    """turns.cu, whose waits end after a second at most."""
    source = assemble("turns", HOPPER["turns"])
    assert source.count("TURN_SECONDS = 60;") == 1
    source = source.replace("TURN_SECONDS = 60;", "TURN_SECONDS = 0;")
    return EmulatedKernel(compile_kernel("turns", tmp_path_factory.mktemp("turns") / "hasty", source=source), "turns")


@pytest.mark.parametrize("os_threads", ["1", "2", "8"])
@pytest.mark.parametrize("seed", [0, 1, 2, 2**64 - 1])
def test_sums_in_turns_have_one_order(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, seed: int, os_threads: str
) -> None:
    """Bitwise the sum in the order of turns, by the copy engine and by threads."""
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", os_threads)
    case = Turns(range(40))
    assert (case.expected != case.reversed).any()  # the order shows
    case.run(kernels("turns"), seed)
    assert torch.equal(case.by_engine, case.expected) and torch.equal(case.by_threads, case.expected)
    assert case.turns.tolist() == [40, 40]


@pytest.mark.parametrize("os_threads", ["1", "2"])
def test_a_turn_after_a_later_block_is_a_deadlock(
    hasty_turns: EmulatedKernel, monkeypatch: pytest.MonkeyPatch, os_threads: str
) -> None:
    """Blocks that wait hold all that could run: on a GPU with as many places the kernel hangs."""
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", os_threads)
    with pytest.raises(LaunchError, match="deadlock: turn_await: waits for turn"):
        Turns([2, 1, 0]).run(hasty_turns)


def test_a_turn_that_nobody_passes_on_is_a_deadlock(
    hasty_turns: EmulatedKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", "1")
    with pytest.raises(LaunchError, match=r"block 2, .*turn_await: waits for turn 2 of a number that is 1"):
        Turns(range(4), mute=1).run(hasty_turns)


def test_a_fault_ends_the_waits_of_the_blocks_after_it(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: the report is of the fault, and no wait for the turn that never comes goes on until its own end."""
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", "4")
    began = time.monotonic()
    with pytest.raises(LaunchError, match="block 1, warp 0, lane 0: writes 4 bytes of global memory out of bounds"):
        Turns(range(4), mute=1, faulty=1).run(kernels("turns"))
    assert time.monotonic() - began < 30
    Turns(range(4)).run(kernels("turns"))


# ---- A whole pipeline ----


def run_stream(kernel: EmulatedKernel, seed: int, *, m: int = 200, n: int = 136, k: int = 320, grid: int = 2) -> Tensor:
    """Runs stream.cu on sizes that leave partial tiles and compares with torch."""
    torch.manual_seed(0)
    a, b, c = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16(), torch.zeros(m, n).bfloat16()
    launch(
        kernel, *stream_arguments(a, b, c), grid=grid, threads=384, smem_bytes=STREAM_BYTES, read_only=(0, 1), seed=seed
    )
    exact = a.double() @ b.double().T
    torch.testing.assert_close(c.double(), exact, rtol=2.0**-8, atol=1e-4)
    return c


STREAM_BYTES = 2 * (16384 + 8192) + 2 * 8192 + 32


def stream_arguments(a: Tensor, b: Tensor, c: Tensor) -> list[Argument]:
    maps = [Map(a, (128, 64)), Map(b, (64, 64)), Map(c, (64, 64))]
    return [*maps, -(-a.shape[0] // 128), -(-b.shape[0] // 64), -(-a.shape[1] // 64)]


def test_every_order_gives_the_same_result(kernels: Kernels) -> None:
    expected = run_stream(kernels("stream"), seed=0)
    for seed in (1, 2, 3, 2**64 - 1):
        assert torch.equal(run_stream(kernels("stream"), seed), expected)


def test_phases_and_blocks_go_round_many_times(kernels: Kernels) -> None:
    run_stream(kernels("stream"), 5, m=128, n=64, k=64 * 40, grid=1)
    run_stream(kernels("stream"), 0, m=640, n=256, k=64, grid=3)


BREAKS = [
    ("mbarrier_wait(empty + stage * 8, phase ^ 1);", ";", "has not landed|race|has all its 1 arrivals"),
    ("mbarrier_wait(full + stage * 8, phase);", ";", "no thread has written|has not landed|without having waited"),
    (
        "mbarrier_wait(full + stage * 8, phase);",
        "mbarrier_wait(full + stage * 8, phase ^ 1);",
        "has not landed|not written|which no thread|deadlock",
    ),
    (
        "mbarrier_wait(empty + stage * 8, phase ^ 1);",
        "mbarrier_wait(empty + stage * 8, phase);",
        "deadlock.*mbarrier_wait",
    ),
    ("mbarrier_init(empty + stage * 8, 2);", "mbarrier_init(empty + stage * 8, 1);", "race|arrivals"),
    ("mbarrier_init(empty + stage * 8, 2);", "mbarrier_init(empty + stage * 8, 3);", "deadlock.*1 of 3 arrivals"),
    (
        "mbarrier_init(full + stage * 8, 1);",
        "mbarrier_init(full + stage * 8, 2);",
        "deadlock.*1 of 2 arrivals and 0 bytes",
    ),
    (
        "mbarrier_arrive_expect_tx(full + stage * 8, STAGE_BYTES)",
        "mbarrier_arrive_expect_tx(full + stage * 8, A_BYTES)",
        "deadlock.*-8192 bytes|has not landed|without having waited",
    ),
    (
        "mbarrier_arrive_expect_tx(full + stage * 8, STAGE_BYTES)",
        "mbarrier_arrive(full + stage * 8)",
        "deadlock.*bytes|has not landed|without having waited",
    ),
    ("mbarrier_init_fence();", "", "mbarrier_init_fence"),
    ("wgmma_fence();", "", "wgmma_fence"),
    ("wgmma_wait<0>();", "", "race|in flight"),
    ("wgmma_wait<0>();", "wgmma_wait<1>();", "race|in flight"),
    ("fence_proxy_async();", "", "fence_proxy_async"),
    ("named_barrier_sync(1 + consumer, 128);  // all have written", "// all have written", "read-after-write race"),
    ("named_barrier_sync(1 + consumer, 128);  // the copy", "// the copy", "race"),
    ("if (threadIdx.x % 128 == 0) tma_store_wait_read<0>();\n            named", "named", "write-after-read race"),
    ("named_barrier_sync(1 + consumer, 128);  // all", "named_barrier_sync(1, 128);  // all", "barrier 1|race"),
    ("setmaxnreg_inc<240>", "setmaxnreg_inc<248>", "deadlock.*setmaxnreg_inc"),
    ("tma_load_4d(A_smem, params.a, step * 64, m0,", "tma_load_4d(A_smem, params.b, step * 64, m0,", "deadlock.*bytes"),
]


@pytest.mark.parametrize(("right", "wrong", "text"), BREAKS)
def test_a_right_kernel_made_wrong_is_caught_in_every_order(tmp_path: Path, right: str, wrong: str, text: str) -> None:
    source = assemble("stream", HOPPER["stream"])
    text_of_kernel = source.split("// ==== kernel ====")[1]
    assert text_of_kernel.count(right) == 1
    broken = source.replace(text_of_kernel, text_of_kernel.replace(right, wrong))
    kernel = EmulatedKernel(compile_kernel("stream", tmp_path / "broken", source=broken), "stream")
    for seed in (0, 1, 2):
        with pytest.raises(LaunchError) as error:
            run_stream(kernel, seed)
        assert re.search(text, str(error.value), re.DOTALL), error.value
