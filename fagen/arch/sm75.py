"""The Turing family: `mma.sync` of 8 deep, in fp16 alone, and copies through registers; 64 KiB of shared memory.

What the tiles are argued from, by count, is in docs/turing.md: nobody has measured them on a card of this kind.
"""

from __future__ import annotations

from fagen.arch import KIB, Arch
from fagen.arch.sm80 import ELEMENT_BYTES, backward_smem_bytes, dq_smem_bytes, first_that_fits, padded, smem_bytes
from fagen.arch.tiles import BackwardTile, TileConfig
from fagen.spec import AttentionSpec

# What is in place of primitives of sm80; of cp_async, nothing.
_IN_PLACE_OF = {"mma": "mma_m16n8k8", "convert": "convert_f16", "cp_async": None}


def primitives(names: tuple[str, ...]) -> tuple[str, ...]:
    """The family's own primitives for those that a kernel of sm80 calls."""
    own = (_IN_PLACE_OF.get(name, name) for name in names)
    return tuple(name for name in own if name is not None)


_FETCHED_BYTES = 16 * KIB  # of keys, or of values, of a step of decoding


def unserved(spec: AttentionSpec) -> str | None:
    """Why the family has no kernel for `spec`; None where it has."""
    if spec.dtype == "bf16":
        return "the tensor cores of Turing multiply fp16, not bf16, which came with sm80; use fp16"
    return None


def forward_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile of the forward kernel of `spec`: one stage, for the next tile waits in registers.

    By the wider of the two head dims. What was weighed is in docs/turing.md; spills are those of CUDA 13.0.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    if widest <= 64:
        # Two blocks of 32 KiB and up to 255 registers a thread. 32 rows a warp use what they read of K and V twice; 8
        # warps of 16 rows would have 128 registers, and spill from 48 keys on. Dropout must not choose: with a
        # probability of 0 it gives the bits of the kernel without it.
        crowded = spec.window or spec.alibi
        return TileConfig(tile_m=128, tile_n=48 if crowded else 64, warps=4, stages=1, blocks_per_sm=2)
    if widest <= 128:
        # One block of up to 64 KiB, all that a multiprocessor has, and 208 to 234 registers.
        return TileConfig(tile_m=128, tile_n=64, warps=8, stages=1, blocks_per_sm=1)
    # O of 16 rows takes half of a thread's registers: 4 warps. d192: 48 keys would spill up to 64 bytes. d256 spills 16
    # bytes, and up to 84 with all modifications; 16 keys would not, but wait at twice as many barriers.
    return TileConfig(tile_m=64, tile_n=32, warps=4, stages=1, blocks_per_sm=1)


def decode_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile for few query rows, which is to read keys and values as fast as memory gives them.

    A fetch of either is under way while the other is used: 16 KiB a block, where 448 GB/s and 0.6 us of latency ask for
    8 KiB of each of 34 multiprocessors. From d232 on shared memory holds what 2 warps use at a time, not 4.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    for warps in (4, 2):
        least = 16 * warps
        keys = max(least, min(256, _FETCHED_BYTES // (widest * ELEMENT_BYTES) // least * least))
        tile = TileConfig(16, keys, warps=warps, stages=1, blocks_per_sm=1, along_keys=True)
        if smem_bytes(spec, tile) <= arch.smem_limit:
            return tile
    raise AssertionError(f"no decode tile for {spec.slug} on {arch.name}")


def backward_tile(spec: AttentionSpec, arch: Arch) -> BackwardTile:
    """The tile of the main backward kernel of `spec`: the first of the table that 64 KiB hold, by the wider head dim.

    Many keys a block, for each block of keys adds a whole dQ to the float32 sum; few queries a step.
    """
    return first_that_fits(_BACKWARD_TILES, spec, arch, backward_smem_bytes)


_BACKWARD_TILES = (
    (64, BackwardTile(32, 128, warps=8, stages=1, s_rows=2, kv_rows=4, q_rows=2, blocks_per_sm=1)),
    (128, BackwardTile(32, 64, warps=8, stages=1, s_rows=2, kv_rows=4, q_rows=2, blocks_per_sm=1)),
    (224, BackwardTile(32, 32, warps=4, stages=1, s_rows=2, kv_rows=2, q_rows=2, blocks_per_sm=1)),
    # K, V, Q and dO of 32 rows would take all of 64 KiB: Q and dO take turns, and Q comes twice.
    (256, BackwardTile(32, 32, warps=4, stages=1, s_rows=2, kv_rows=2, q_rows=2, blocks_per_sm=1, in_turns=True)),
)


def dq_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile of the ordered dQ kernel of `spec`: the first of the table that 64 KiB hold, by the wider head dim."""
    return first_that_fits(_DQ_TILES, spec, arch, dq_smem_bytes)


_DQ_TILES = (
    (64, TileConfig(tile_m=128, tile_n=64, warps=8, stages=1, blocks_per_sm=1)),
    (160, TileConfig(tile_m=64, tile_n=32, warps=4, stages=1, blocks_per_sm=1)),
    (192, TileConfig(tile_m=64, tile_n=16, warps=4, stages=1, blocks_per_sm=1)),
    (256, TileConfig(tile_m=32, tile_n=16, warps=2, stages=1, blocks_per_sm=1)),
)
