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


_STEP_COLUMNS = 16  # of a product
_REGISTERS = 65536  # of a multiprocessor, which is one block's


class _Warpgroups:
    """Roles of the warpgroups of a block: the first feeds the copy engine, the others compute."""

    consumers: int
    producer_registers: int

    @property
    def warps(self) -> int:
        return 4 * (self.consumers + 1)

    @property
    def consumer_registers(self) -> int:
        """Registers a thread of a consumer: what the producer gives up of an equal share, in steps of 8."""
        share = _REGISTERS // (128 * (self.consumers + 1)) // 8 * 8
        return (share * (self.consumers + 1) - self.producer_registers) // self.consumers


@dataclass(frozen=True)
class HopperTile(_Warpgroups):
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
    def consumers(self) -> int:  # type: ignore[override]
        """Warpgroups that compute."""
        return self.tile_m // 64

    def __str__(self) -> str:
        return (
            f"{self.tile_m} query rows x {self.tile_n} keys, {self.consumers} consumer warpgroups, "
            f"{_stages(self.stages, 'keys and values')}"
        )


@dataclass(frozen=True)
class BackwardTile:
    """How one block of the main backward kernel works: it keeps tile_n keys and steps through tile_m queries.

    stages: buffers for Q and dO. Of the warps, s_rows lie along the queries in S and dP, kv_rows along the keys in dK
    and dV, q_rows along the queries in dQ; the others along the columns. in_turns: Q and dO take turns in one buffer.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    s_rows: int
    kv_rows: int
    q_rows: int
    blocks_per_sm: int
    in_turns: bool = False

    def sum_tile(self, columns: int) -> SumTile:
        """How the sum of dQ of so many columns is kept: the warps along the columns share them."""
        steps = columns // _STEP_COLUMNS
        return SumTile(self.tile_m, self.warps, self.q_rows, -(-steps // (self.warps // self.q_rows)))

    def __str__(self) -> str:
        queries = _stages(self.stages, "queries in turns" if self.in_turns else "queries")
        return f"{self.tile_n} keys x {self.tile_m} query rows, {self.warps} warps, {queries}"


@dataclass(frozen=True)
class HopperBackwardTile(_Warpgroups):
    """How one block of the Hopper backward works: warpgroups of 64 keys, and one that feeds the copy engine.

    It keeps tile_n keys, 64 a consumer, and steps through tile_m queries. Of dQ a consumer has 64 rows, or 64 of up
    to 128 columns. stages: buffers for Q and for dO. producer_registers: of each of its threads. shares_keys: two
    consumers share 64 keys, one with dV, the other with dK, and each has up to 128 columns of dQ. late: dQ of a step is
    computed in the next, so that no consumer waits for the dS of another.
    """

    tile_m: int
    tile_n: int
    stages: int
    producer_registers: int
    shares_keys: bool = False
    late: bool = False

    @property
    def consumers(self) -> int:  # type: ignore[override]
        """Warpgroups that compute."""
        return 2 if self.shares_keys else self.tile_n // 64

    @property
    def q_columns(self) -> int:
        """Consumers that share the columns of dQ."""
        return self.consumers * 64 // self.tile_m

    def sum_tile(self, columns: int) -> SumTile:
        """How the sum of dQ of so many columns is kept: in blocks of 64 or 128 where warpgroups share them."""
        steps = columns // _STEP_COLUMNS
        if self.q_columns > 1:
            steps = (128 if self.shares_keys else 64) // _STEP_COLUMNS
        return SumTile(self.tile_m, 4 * self.consumers, self.tile_m // 16, steps)

    def __str__(self) -> str:
        return (
            f"{self.tile_n} keys x {self.tile_m} query rows, {self.consumers} consumer warpgroups, "
            f"{_stages(self.stages, 'queries')}"
        )


@dataclass(frozen=True)
class SumTile:
    """How the float32 sum of dQ is kept, as the fragments of `warps` warps that add to it: q_rows of them lie along the
    tile_m queries, the others have q_steps steps of 16 columns each."""

    tile_m: int
    warps: int
    q_rows: int
    q_steps: int
    blocks_per_sm: int = 1

    @property
    def floats(self) -> int:
        """Words of a tile."""
        return self.tile_m // 16 // self.q_rows * 2 * self.q_steps * 4 * 32 * self.warps

    def __str__(self) -> str:
        return f"{self.tile_m} query rows, {self.warps} warps"


@dataclass(frozen=True)
class LinearTile:
    """A kernel without tiles in shared memory: threads over elements."""

    warps: int
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        return f"{self.warps} warps"
