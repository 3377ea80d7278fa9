"""The Hopper family: `wgmma`, bulk tensor copies and warpgroups with roles, on compute capability 9.0 (sm90a)."""

from __future__ import annotations

from fagen.arch import KIB
from fagen.arch.sm80 import ELEMENT_BYTES, padded
from fagen.arch.tiles import HopperTile
from fagen.spec import AttentionSpec

PRIMITIVES = ("types", "shared", "global", "mbarrier", "tma", "warpgroup", "stmatrix", "wgmma", "convert", "math")
Q_PRIMITIVES = ("ldmatrix",)  # for Q in registers

SMEM_LIMIT = 227 * KIB
BLOCK_COLUMNS = 64  # columns of a block of a tile in shared memory: 128 bytes, the span of the swizzle


def tile_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile, bytes: blocks of 64 columns."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS * rows * ELEMENT_BYTES


def smem_bytes(spec: AttentionSpec, tile: HopperTile) -> int:
    """Dynamic shared memory of the forward, bytes: Q, `stages` tiles of K and V, barriers."""
    o_bytes = tile_bytes(tile.tile_m, spec.dim_v)
    inputs = _inputs_bytes(spec, tile)
    return inputs + o_bytes if o_apart(spec, tile) else inputs


def o_apart(spec: AttentionSpec, tile: HopperTile) -> bool:
    """Whether O has a place of its own in shared memory: then the next Q can be loaded before O has left."""
    return _inputs_bytes(spec, tile) + tile_bytes(tile.tile_m, spec.dim_v) <= SMEM_LIMIT


def _inputs_bytes(spec: AttentionSpec, tile: HopperTile) -> int:
    """Q, K, V and barriers; O must fit over Q."""
    keys = tile_bytes(tile.tile_n, spec.head_dim) + tile_bytes(tile.tile_n, spec.dim_v)
    return tile_bytes(tile.tile_m, max(spec.head_dim, spec.dim_v)) + tile.stages * keys + 8 * (2 + 4 * tile.stages)


def wgmma_shapes(spec: AttentionSpec, tile: HopperTile) -> tuple[tuple[str, int], ...]:
    """The products of the forward: where the first operand comes from, and columns."""
    scores = ("rs" if tile.q_in_registers else "ss", tile.tile_n)
    return tuple(sorted({scores, ("rs", padded(spec.dim_v))}))


def serves(spec: AttentionSpec) -> bool:
    """Whether the family has a forward for `spec`; the sm80 family, which runs on the same cards, has all others.

    Dropout draws its numbers for 16 keys at a time from multiples of 16 on, and steps of a window start where it does.
    """
    return not (spec.window and spec.dropout)


def forward_tile(spec: AttentionSpec) -> HopperTile:
    """The tile of the forward kernel of `spec`, by the wider of the two head dims."""
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    if widest <= 64:
        return HopperTile(tile_m=192, tile_n=128, stages=2, turns=False, always_rescale=True, q_in_registers=False)
    if widest <= 128:
        return HopperTile(tile_m=128, tile_n=128, stages=2, turns=True, always_rescale=True, q_in_registers=False)
    if widest <= 192:
        return HopperTile(tile_m=128, tile_n=96, stages=2, turns=True, always_rescale=False, q_in_registers=False)
    return HopperTile(tile_m=128, tile_n=80, stages=2, turns=True, always_rescale=False, q_in_registers=False)
