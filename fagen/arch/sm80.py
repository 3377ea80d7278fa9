"""The sm80 family: `mma.sync`, `ldmatrix` and `cp.async`, on every card from Ampere on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fagen.arch import KIB, Arch
from fagen.arch.tiles import BackwardTile, TileConfig
from fagen.spec import AttentionSpec

AnyTile = TypeVar("AnyTile")

# Primitives that the family's templates call, in `templates/ptx/` for a card and `templates/emulate/` for a CPU.
PRIMITIVES = ("types", "shared", "global", "ldmatrix", "mma", "cp_async", "convert", "math")
SPLIT_PRIMITIVES = (*PRIMITIVES, "grid")
PAGE_PRIMITIVES = ("cp_async_narrow",)  # beside others, where numbers of pages are copied to shared memory
BACKWARD_PRIMITIVES = (*PRIMITIVES, "reduce")
DELTA_PRIMITIVES = ("types", "global", "unpack")
COMBINE_PRIMITIVES = ("types", "shared", "global", "convert", "math", "grid")
CONVERT_PRIMITIVES = ("types", "shared", "global", "cp_async", "convert")

ELEMENT_BYTES = 2
FLOAT_BYTES = 4
LEAST_PAGE = 16  # keys of the smallest page
PAGE_NUMBER_BYTES = 4
COPY_BYTES = 16
WARP_ROW_BYTES = 8  # reference and sum of a row in one warp, float32
ROW_STATISTICS_BYTES = 12  # reference, log2 of the sum and delta of a query, float32
MMA_K = 16  # head dims are padded to whole steps of the m16n8k16 product


def padded(head_dim: int) -> int:
    """Head dim as it lies in shared memory, columns past the true one zero."""
    return -(-head_dim // MMA_K) * MMA_K


def page_numbers_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Shared memory of the numbers of pages that the forward copies ahead of their use, bytes: of 2 (stages - 1) steps,
    each with a page more than the smallest pages that its keys fill."""
    if not spec.paged or tile.stages == 1:
        return 0
    numbers = 2 * (tile.stages - 1) * (tile.tile_n // LEAST_PAGE + 1)
    return -(-numbers * PAGE_NUMBER_BYTES // COPY_BYTES) * COPY_BYTES


def smem_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Dynamic shared memory of the forward, bytes: Q, `stages` tiles of K and V, perhaps numbers of pages; O is staged
    over them, or where the warps lie along the keys that of each warp in float32."""
    dim, dim_v = padded(spec.head_dim), padded(spec.dim_v)
    inputs = (tile.tile_m * dim + tile.stages * tile.tile_n * (dim + dim_v)) * ELEMENT_BYTES
    inputs += page_numbers_bytes(spec, tile)
    if tile.along_keys:
        return max(inputs, tile.warps * tile.tile_m * (dim_v * FLOAT_BYTES + WARP_ROW_BYTES))
    return max(inputs, tile.tile_m * dim_v * ELEMENT_BYTES)


def backward_smem_bytes(spec: AttentionSpec, tile: BackwardTile) -> int:
    """Dynamic shared memory of the main backward, bytes: K, V, `stages` tiles of Q and dO with statistics, P and dS."""
    dim, dim_v = padded(spec.head_dim), padded(spec.dim_v)
    keys = tile.tile_n * (dim + dim_v) * ELEMENT_BYTES
    columns = max(dim, dim_v) if tile.in_turns else dim + dim_v
    queries = tile.tile_m * (columns * ELEMENT_BYTES + ROW_STATISTICS_BYTES)
    return keys + tile.stages * queries + 2 * tile.tile_m * tile.tile_n * ELEMENT_BYTES


def dq_smem_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Dynamic shared memory of the ordered dQ, bytes: Q and dO with statistics, `stages` tiles of K and V."""
    row = (padded(spec.head_dim) + padded(spec.dim_v)) * ELEMENT_BYTES
    return tile.tile_m * (row + ROW_STATISTICS_BYTES) + tile.stages * tile.tile_n * row


def first_that_fits(
    tiles: Iterable[tuple[int, AnyTile]],
    spec: AttentionSpec,
    arch: Arch,
    smem_bytes: Callable[[AttentionSpec, AnyTile], int],
) -> AnyTile:
    """Of a table of widest head dims and tiles the first tile that serves those of `spec` and that `arch` holds."""
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    for limit, tile in tiles:
        if widest <= limit and smem_bytes(spec, tile) <= arch.smem_limit:
            return tile
    raise AssertionError(f"no tile for {spec.slug} on {arch.name}")


def dq_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile of the ordered dQ kernel of `spec` on `arch`: the first of the table that its shared memory holds."""
    return first_that_fits(_DQ_TILES, spec, arch, dq_smem_bytes)


_DQ_TILES = (
    (256, TileConfig(tile_m=64, tile_n=64, warps=4, stages=2, blocks_per_sm=1)),
    (256, TileConfig(tile_m=64, tile_n=32, warps=4, stages=1, blocks_per_sm=1)),
)


def backward_tile(spec: AttentionSpec, arch: Arch) -> BackwardTile:
    """The tile of the main backward kernel of `spec` on `arch`: the first of the table that its shared memory holds."""
    return first_that_fits(_BACKWARD_TILES, spec, arch, backward_smem_bytes)


# Widest head dim, tile. Ratios are of the time of PyTorch's FA2 backward on one H200, bf16, causal, 16384 tokens.
_BACKWARD_TILES = (
    # d64: 1.07 with two stages of queries; one stage 0.91 to 0.95 as much, 64 queries a step 0.9.
    (64, BackwardTile(128, 128, warps=8, stages=2, s_rows=4, kv_rows=4, q_rows=4, blocks_per_sm=1)),
    # d128: 1.04. One stage 0.94 as much, 64x64 with two blocks 0.87, 128x64 0.70.
    (128, BackwardTile(64, 128, warps=8, stages=2, s_rows=2, kv_rows=4, q_rows=2, blocks_per_sm=1)),
    (128, BackwardTile(64, 64, warps=8, stages=1, s_rows=4, kv_rows=2, q_rows=2, blocks_per_sm=1)),
    # d256: 1.01 with two stages, which need Hopper's 227 KiB; one 0.93 as much.
    (256, BackwardTile(64, 64, warps=8, stages=2, s_rows=2, kv_rows=2, q_rows=2, blocks_per_sm=1)),
    (256, BackwardTile(64, 64, warps=8, stages=1, s_rows=2, kv_rows=2, q_rows=2, blocks_per_sm=1)),
    (256, BackwardTile(32, 32, warps=4, stages=1, s_rows=2, kv_rows=2, q_rows=2, blocks_per_sm=1)),
)


def forward_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile of the forward kernel of `spec` on `arch`.

    Chosen by the wider of the two head dims, which decides the registers of O, and by the shared memory that lets the
    wanted number of blocks share a multiprocessor. Speeds are in TFLOP/s on one H200, bf16, 16384 keys.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    roomy = arch.smem_limit >= 160 * KIB
    # Masks and modifications hold registers of their own; where the plain kernel has none left, they spill. Dropout
    # must not choose: with a probability of 0 it gives the bits of the kernel without it. The addresses of a bias take
    # so many that the keys a step are the most without a spill.
    plain = not (spec.causal or spec.window or spec.mods)
    hopper = arch.smem_limit >= 227 * KIB
    if widest <= 32:
        # d32: 261 full, 245 causal with 64 keys a step; 96 keys 239 and 228.
        return TileConfig(tile_m=128, tile_n=64, warps=4, stages=2, blocks_per_sm=2)
    if widest <= 64:
        # d64: 346 full, 337 causal with 96 keys a step; 64 keys 327 and 309, 112 spill. 99 KiB: two blocks of 48 KiB.
        return TileConfig(tile_m=128, tile_n=96 if roomy and not spec.bias else 64, warps=4, stages=2, blocks_per_sm=2)
    if not roomy:
        return _tile_of_99_kib(widest)
    if widest <= 128:
        # d80: 356 full, 341 causal with 64 keys a step; d96: 356 and 353, 48 keys 350 and 346. d128 full: 391, 48 keys
        # 389; causal: 331, 48 keys 363; causal with softcap 340, 48 keys 331: its fragment seldom needs the maxima of a
        # tile. Two blocks of 96 KiB need the 227 KiB of Hopper.
        capped = [mod.name for mod in spec.mods] == ["softcap"]
        wide = hopper and (plain or capped or widest <= 96)
        tile_n = 32 if spec.bias else 64 if wide else 48
        return TileConfig(tile_m=128, tile_n=tile_n, warps=4, stages=2, blocks_per_sm=2)
    # O leaves registers for 16 rows a warp only.
    if widest <= 192:
        # d192: 351 full, 352 causal with 4 warps and 64 keys a step; 8 warps and 96 keys 342 and 337.
        return TileConfig(tile_m=64, tile_n=64, warps=4, stages=1, blocks_per_sm=2)
    # d256: 351 full, 352 causal with 8 warps and 96 keys a step; 4 warps and 64 keys, two blocks, 336 and 350; a second
    # stage 324.
    tile_n = 64 if spec.bias else 80 if spec.alibi else 96
    return TileConfig(tile_m=128, tile_n=tile_n, warps=8, stages=1, blocks_per_sm=1)


def _tile_of_99_kib(widest: int) -> TileConfig:
    """The tile of the forward kernel for head dims above 64 where a block has 99 KiB, and two together have 100.

    Argued from occupancy, as CUDA 13.0 compiles: 8 warps are what the registers leave, two for each scheduler, so that
    one multiplies while the other is at its softmax or a barrier. None of these spills.
    """
    if widest <= 96:  # two blocks of 42 KiB; 64 keys would spill up to 56 bytes with alibi and dropout
        return TileConfig(tile_m=128, tile_n=48, warps=4, stages=1, blocks_per_sm=2)
    if widest <= 128:  # two blocks of 48 KiB
        return TileConfig(tile_m=128, tile_n=32, warps=4, stages=1, blocks_per_sm=2)
    if widest <= 192:  # two blocks of 48 KiB; 64 keys, 72 KiB, would leave one block, of 4 warps
        return TileConfig(tile_m=64, tile_n=32, warps=4, stages=1, blocks_per_sm=2)
    # d256: 96 KiB. Two blocks of 48 KiB have as many warps, but 16 keys a step: twice the barriers, twice the reads of
    # keys and values, and 1.2 times those of shared memory.
    return TileConfig(tile_m=128, tile_n=32, warps=8, stages=1, blocks_per_sm=1)


def decode_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile for few query rows, which is to read keys and values as fast as memory gives them.

    What counts is bytes under way, 64 to 96 KiB of them: steps of 48 KiB, three stages, one block a multiprocessor.
    With more, some multiprocessors get theirs long before others; docs/decode.md has figures. Beyond d192 a step of
    the least that four warps take, 64 keys, has more, and where shared memory is small two stages have to do.
    """
    row_bytes = (padded(spec.head_dim) + padded(spec.dim_v)) * ELEMENT_BYTES
    for stages, step_bytes, warp_counts in (
        (3, 48 * KIB, (8, 6, 4)),
        (3, 32 * KIB, (4,)),
        (2, 32 * KIB, (4,)),
        (2, 16 * KIB, (2,)),
    ):
        most = max(16 * warp_counts[-1], min(256, step_bytes // row_bytes))
        keys, warps = max((most // (16 * warps) * 16 * warps, warps) for warps in warp_counts)
        tile = TileConfig(16, keys, warps=warps, stages=stages, blocks_per_sm=1, q_in_registers=True, along_keys=True)
        if smem_bytes(spec, tile) <= arch.smem_limit:
            return tile
    raise AssertionError(f"no decode tile for {spec.slug} on {arch.name}")
