"""TileConfig: how a kernel is tiled. It changes speed, never results beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass


def _stages(count: int, of: str) -> str:
    return f"{count} stage{'s' if count > 1 else ''} of {of}"


@dataclass(frozen=True)
class TileConfig:
    """How one block works through its part of the problem.

    tile_m: query rows a block. tile_n: keys a step of its loop. warps: warps a block, each with tile_m / warps rows.
    stages: buffers for keys and values in shared memory. blocks_per_sm: blocks that the registers must leave room for.
    q_in_registers: the fragments of Q are read from shared memory once and kept. along_keys: for few query rows, each
    warp has all of them and tile_n / warps keys of a step; what the warps have is summed at the end.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    blocks_per_sm: int
    q_in_registers: bool = False
    along_keys: bool = False

    def __str__(self) -> str:
        stages = _stages(self.stages, "keys and values")
        warps = f"{self.warps} warps{' along the keys' if self.along_keys else ''}"
        return f"{self.tile_m} query rows x {self.tile_n} keys, {warps}, {stages}"


_REGISTERS = 65536  # of a multiprocessor, which is one block's


@dataclass(frozen=True)
class HopperTile:
    """How one block of the Hopper forward works: warpgroups of 64 query rows, and one that feeds the copy engine.

    tile_m: query rows a tile, 64 a consumer. tile_n: keys a step. stages: buffers for K and for V. q_in_registers: Q is
    read from shared memory once. producer_registers: of each of its threads, which leaves more to the consumers.
    """

    tile_m: int
    tile_n: int
    stages: int
    q_in_registers: bool
    producer_registers: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return self.tile_m // 64

    @property
    def warps(self) -> int:
        return 4 * (self.consumers + 1)

    @property
    def consumer_registers(self) -> int:
        """Registers a thread of a consumer: what the producer gives up of an equal share, in steps of 8."""
        share = _REGISTERS // (128 * (self.consumers + 1)) // 8 * 8
        return (share * (self.consumers + 1) - self.producer_registers) // self.consumers

    def __str__(self) -> str:
        return (
            f"{self.tile_m} query rows x {self.tile_n} keys, {self.consumers} consumer warpgroups, "
            f"{_stages(self.stages, 'keys and values')}"
        )


@dataclass(frozen=True)
class BackwardTile:
    """How one block of the main backward kernel works: it keeps tile_n keys and steps through tile_m queries.

    stages: buffers for Q and dO. Of the warps, s_rows lie along the queries in S and dP, kv_rows along the keys in dK
    and dV, q_rows along the queries in dQ; the others along the columns.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    s_rows: int
    kv_rows: int
    q_rows: int
    blocks_per_sm: int

    def __str__(self) -> str:
        return f"{self.tile_n} keys x {self.tile_m} query rows, {self.warps} warps, {_stages(self.stages, 'queries')}"


@dataclass(frozen=True)
class LinearTile:
    """A kernel without tiles in shared memory: threads over elements."""

    warps: int
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        return f"{self.warps} warps"
