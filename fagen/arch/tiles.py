"""TileConfig: how a kernel is tiled. It changes speed, never results beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """How one block works through its part of the problem.

    tile_m: query rows a block. tile_n: keys a step of its loop. warps: warps a block, each with tile_m / warps rows.
    stages: buffers for keys and values in shared memory. blocks_per_sm: blocks that the registers must leave room for.
    q_in_registers: the fragments of Q are read from shared memory once and kept.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    blocks_per_sm: int
    q_in_registers: bool = False
