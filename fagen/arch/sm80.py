"""The sm80 family: `mma.sync`, `ldmatrix` and `cp.async`, on every card from Ampere on."""

from __future__ import annotations

from fagen.arch import Arch
from fagen.arch.tiles import TileConfig
from fagen.spec import AttentionSpec

# Primitives that the family's templates call, in `templates/ptx/` for a card and `templates/emulate/` for a CPU.
PRIMITIVES = ("types", "shared", "global", "ldmatrix", "mma", "cp_async", "convert", "math")

ELEMENT_BYTES = 2
MMA_K = 16  # head dims are padded to whole steps of the m16n8k16 product


def padded(head_dim: int) -> int:
    """Head dim as it lies in shared memory, columns past the true one zero."""
    return -(-head_dim // MMA_K) * MMA_K


def smem_bytes(spec: AttentionSpec, tile: TileConfig) -> int:
    """Dynamic shared memory of the forward, bytes: Q, `stages` tiles of K and V; O is staged over them."""
    dim, dim_v = padded(spec.head_dim), padded(spec.dim_v)
    inputs = tile.tile_m * dim + tile.stages * tile.tile_n * (dim + dim_v)
    return max(inputs, tile.tile_m * dim_v) * ELEMENT_BYTES


def forward_tile(spec: AttentionSpec, arch: Arch) -> TileConfig:
    """The tile of the forward kernel of `spec` on `arch`."""
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    if widest <= 64:
        return TileConfig(tile_m=128, tile_n=64, warps=4, stages=2, blocks_per_sm=2)
    if widest <= 128:
        return TileConfig(tile_m=128, tile_n=64, warps=4, stages=1, blocks_per_sm=2)
    return TileConfig(tile_m=64, tile_n=64, warps=4, stages=1, blocks_per_sm=2)
