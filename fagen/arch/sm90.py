"""The Hopper family: `wgmma`, bulk tensor copies and warpgroups with roles, on compute capability 9.0 (sm90a)."""

from __future__ import annotations

from fagen.arch import resolve
from fagen.arch.sm80 import ELEMENT_BYTES, padded
from fagen.arch.tiles import HopperTile
from fagen.spec import AttentionSpec

PRIMITIVES = ("types", "shared", "global", "mbarrier", "tma", "warpgroup", "stmatrix", "wgmma", "convert", "math")
Q_PRIMITIVES = ("ldmatrix",)  # for Q in registers

SMEM_LIMIT = resolve("sm90a").smem_limit
BLOCK_COLUMNS = 64  # columns of a block of a tile in shared memory: 128 bytes, the span of the swizzle


def tile_bytes(rows: int, columns: int) -> int:
    """Shared memory of a tile, bytes: blocks of 64 columns."""
    return -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS * rows * ELEMENT_BYTES


def smem_bytes(spec: AttentionSpec, tile: HopperTile) -> int:
    """Dynamic shared memory of the forward, bytes: Q, `stages` tiles of K and V, O, barriers."""
    both, widest = _with_q_and_o(spec, tile)
    return both if o_apart(spec, tile) else widest


def o_apart(spec: AttentionSpec, tile: HopperTile) -> bool:
    """Whether O has a place of its own in shared memory: then the next Q can be loaded before O has left."""
    return _with_q_and_o(spec, tile)[0] <= SMEM_LIMIT


def _with_q_and_o(spec: AttentionSpec, tile: HopperTile) -> tuple[int, int]:
    """Shared memory with Q and O side by side, and with one over the other."""
    q_bytes, o_bytes = tile_bytes(tile.tile_m, spec.head_dim), tile_bytes(tile.tile_m, spec.dim_v)
    keys = tile_bytes(tile.tile_n, spec.head_dim) + tile_bytes(tile.tile_n, spec.dim_v)
    rest = tile.stages * keys + 8 * (2 + 4 * tile.stages)
    return q_bytes + o_bytes + rest, max(q_bytes, o_bytes) + rest


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
    """The tile of the forward kernel of `spec`, by the wider of the two head dims.

    Figures are TFLOP/s on one H200, bf16, 16384 keys unless another number is given; docs/hopper-forward.md has all.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    if widest <= 64 and not spec.mods:
        # d64 full: 504, causal 466. 128 keys with Q in shared memory 476 and 442; 128 x 192 486 and 459. With gradients
        # the rows of statistics are padded to whole tiles of 128; dropout needs the registers of two consumers. Neither
        # may change the keys a step: with a probability of 0, dropout gives the bits of the kernel without it.
        wide = not (spec.backward or spec.dropout)
        return HopperTile(
            tile_m=192 if wide else 128,
            tile_n=112,
            stages=2,
            turns=False,
            always_rescale=True,
            q_in_registers=not spec.dropout,
        )
    if widest <= 64:
        # d64 causal with softcap: 345; 128 x 128 328, 128 x 160 337, 192 x 112 323, and without turns some 15 less.
        return HopperTile(
            tile_m=128, tile_n=192, stages=2, turns=True, always_rescale=False, q_in_registers=not spec.dropout
        )
    if widest <= 128:
        # d128 full: 626, 1k 550, causal 4k 504. Q read from shared memory for each product 598, 523, 507; in turns 616,
        # 555, 520 (another day); 144 keys 632 but 492 at 1k. With softcap turns pay: causal 479, without 451.
        return HopperTile(
            tile_m=128,
            tile_n=128,
            stages=2,
            turns=bool(spec.mods),
            always_rescale=False,
            q_in_registers=not spec.dropout,
        )
    if widest <= 192:
        return HopperTile(tile_m=128, tile_n=96, stages=2, turns=False, always_rescale=False, q_in_registers=False)
    # d256 full: 695, causal 680. In turns 687 and 678; rescaling always 676 and 661.
    return HopperTile(tile_m=128, tile_n=80, stages=2, turns=False, always_rescale=False, q_in_registers=False)
