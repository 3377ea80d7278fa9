"""Which tiles a kernel can have beside the one of the table, and what rules one out before it is compiled.

`fagen tune` compiles and times what is left. The ranges are small on purpose: about what won or came close for some
head dim (docs/sm80-forward.md, docs/sm80-backward.md, docs/hopper-forward.md, docs/decode.md), and what lies between.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import product
from typing import Any, TypeVar

from fagen.arch import KIB, REGISTERS, Arch
from fagen.arch.sm80 import MMA_K, padded
from fagen.arch.tiles import BackwardTile, HopperBackwardTile, HopperTile, TileConfig
from fagen.spec import AttentionSpec

Tile = TileConfig | HopperTile | BackwardTile | HopperBackwardTile  # that have ranges
AnyTile = TypeVar("AnyTile")

_STATS_ROWS = 128  # to which the rows of statistics of a head are padded
_MOST_THREADS = 1024
_MOST_REGISTERS = 255  # of a thread
_OTHER_REGISTERS = 24  # addresses, loops and references: no kernel here does with fewer beside its fragments
_MMA_ROWS = 16
_REGISTER_STEP = 8  # in which warpgroups give and take registers
_LEAST_KEYS = 32  # of a step on Hopper: as many give the first references
_MOST_BOX = 256  # rows of a box of the copy engine, and columns of a wgmma

_FORWARD_WARP_ROWS = (16, 32)
_FORWARD_WARPS = (4, 8)
_FORWARD_KEYS = (32, 48, 64, 80, 96, 112, 128)
_FORWARD_STAGES = (1, 2, 3)
_FORWARD_BLOCKS = (1, 2, 3)

_HOPPER_CONSUMERS = (2, 3)
_HOPPER_KEYS = tuple(range(64, 193, 16))
_HOPPER_STAGES = (2, 3, 4)
_HOPPER_PRODUCER_REGISTERS = (24, 32, 40)

_DECODE_WARPS = (2, 4, 6, 8)
_DECODE_WARP_KEYS = (16, 32, 64)
_DECODE_STAGES = (2, 3, 4, 6)
_DECODE_BLOCKS = (1, 2)

_BACKWARD_QUERIES = (32, 64, 128)
_BACKWARD_KEYS = (32, 64, 128)
_BACKWARD_WARPS = (4, 8)
_BACKWARD_STAGES = (1, 2)
_BACKWARD_DIVISIONS = (2, 4)  # of the warps, along the rows of each product
_BACKWARD_BLOCKS = (1, 2)

_HOPPER_BACKWARD_QUERIES = (64, 128)
_HOPPER_BACKWARD_STAGES = (1, 2, 3)

_DQ_WARP_ROWS = (16, 32)
_DQ_WARPS = (4, 8)
_DQ_KEYS = (32, 48, 64, 96, 128)
_DQ_STAGES = (1, 2)
_DQ_BLOCKS = (1, 2)


def tiles(kind: str, shipped: object) -> Iterator[Tile]:
    """The range of a kernel of that kind, whose tile in the table is `shipped`: of the same family, fitting or not.
    Nothing for one that has no tile to choose."""
    if isinstance(shipped, HopperTile):
        for consumers, keys, stages, q_in_registers, producer in product(
            _HOPPER_CONSUMERS, _HOPPER_KEYS, _HOPPER_STAGES, (False, True), _HOPPER_PRODUCER_REGISTERS
        ):
            # What its producer needs beside as many consumers, the table knows.
            if consumers != shipped.consumers or producer == shipped.producer_registers:
                yield HopperTile(64 * consumers, keys, stages, q_in_registers, producer)
    elif kind == "decode":
        one_stage = isinstance(shipped, TileConfig) and shipped.stages == 1
        numbers = product(_DECODE_WARPS, _DECODE_WARP_KEYS, (1,) if one_stage else _DECODE_STAGES, _DECODE_BLOCKS)
        for warps, keys, stages, blocks in numbers:
            yield TileConfig(_MMA_ROWS, warps * keys, warps, stages, blocks, not one_stage, along_keys=True)
    elif kind == "fwd":
        for rows, warps, keys, stages, blocks, q_in_registers in product(
            _FORWARD_WARP_ROWS, _FORWARD_WARPS, _FORWARD_KEYS, _FORWARD_STAGES, _FORWARD_BLOCKS, (False, True)
        ):
            yield TileConfig(rows * warps, keys, warps, stages, blocks, q_in_registers)
    elif isinstance(shipped, HopperBackwardTile):
        for queries, stages in product(_HOPPER_BACKWARD_QUERIES, _HOPPER_BACKWARD_STAGES):
            yield dataclasses.replace(shipped, tile_m=queries, stages=stages)
    elif isinstance(shipped, BackwardTile) and kind == "bwd":
        for queries, keys, warps, stages, s_rows, kv_rows, q_rows, blocks in product(
            _BACKWARD_QUERIES,
            _BACKWARD_KEYS,
            _BACKWARD_WARPS,
            _BACKWARD_STAGES,
            *[_BACKWARD_DIVISIONS] * 3,
            _BACKWARD_BLOCKS,
        ):
            yield BackwardTile(queries, keys, warps, stages, s_rows, kv_rows, q_rows, blocks, shipped.in_turns)
    elif kind == "bwd_dq":
        for rows, warps, keys, stages, blocks in product(_DQ_WARP_ROWS, _DQ_WARPS, _DQ_KEYS, _DQ_STAGES, _DQ_BLOCKS):
            yield TileConfig(rows * warps, keys, warps, stages, blocks)


def problem(kind: str, spec: AttentionSpec, arch: Arch, tile: object, smem_bytes: int) -> str | None:
    """Why the kernel `kind` of `spec`, with `smem_bytes` of shared memory a block, cannot have the tile; or None.

    What the templates assert and assume, and what the hardware has: the same for every tile, of the table or not. Of
    kernels without a range nothing is known.
    """
    if not isinstance(tile, TileConfig | HopperTile | BackwardTile | HopperBackwardTile):
        return None
    if min(_numbers(tile)) < 1:
        return "a number in it is less than 1"
    threads = 32 * tile.warps
    if threads > _MOST_THREADS:
        return f"{threads} threads a block"
    if smem_bytes > arch.smem_limit:
        return f"{smem_bytes} bytes of shared memory a block; {arch.name} has {arch.smem_limit}"
    if spec.backward and kind in ("fwd", "bwd", "bwd_dq") and _STATS_ROWS % tile.tile_m:
        return f"statistics are padded to {_STATS_ROWS} rows, which {tile.tile_m} do not divide"
    if isinstance(tile, HopperTile | HopperBackwardTile):
        return _hopper_problem(spec, tile)
    of_system = _system_bytes(arch)
    if tile.blocks_per_sm * (smem_bytes + of_system) > arch.smem_limit + of_system:
        return f"{tile.blocks_per_sm} blocks of {smem_bytes} bytes do not share a multiprocessor of {arch.name}"
    shape = _backward_problem(tile) if isinstance(tile, BackwardTile) else _forward_problem(kind, tile)
    if shape is not None:
        return shape
    if arch.family == "sm75":
        if tile.stages > 1 or (isinstance(tile, TileConfig) and tile.q_in_registers):
            return "copies through registers have one stage, and Q in shared memory"
    elif kind == "decode" and tile.stages < 2:
        return "a single stage has no keys under way"
    held, bound = fragment_registers(kind, spec, tile), register_bound(tile)
    if held + _OTHER_REGISTERS > bound:
        return f"{held} registers of fragments a thread, of {bound}"
    return None


def largest(tile: AnyTile, arch: Arch, smem_bytes: int) -> AnyTile:
    """`tile` with the largest `blocks_per_sm` that gives its threads as many registers and has room: a smaller one
    compiles to the same instructions."""
    if not isinstance(tile, TileConfig | BackwardTile):
        return tile
    fitting = (arch.smem_limit + _system_bytes(arch)) // (smem_bytes + _system_bytes(arch))
    alike = [dataclasses.replace(tile, blocks_per_sm=blocks) for blocks in range(1, fitting + 1)]
    return max(
        (one for one in alike if register_bound(one) == register_bound(tile)),
        key=lambda one: one.blocks_per_sm,
        default=tile,
    )


def _system_bytes(arch: Arch) -> int:
    """Shared memory that each block costs besides its own."""
    return arch.multiprocessor.system_kib * KIB


def with_dropout(shipped: AnyTile, tile: AnyTile) -> AnyTile | None:
    """What the kernel with dropout, whose tile in the table is `shipped`, has where `tile` was found for the one
    without: all that decides the bits of a result, for with a probability of 0 the two give the same. None where they
    are of different families, which have bits of their own."""
    if type(shipped) is not type(tile):
        return None
    of_both: Any = tile
    return dataclasses.replace(shipped, tile_n=of_both.tile_n) if isinstance(shipped, HopperTile) else tile


def register_bound(tile: TileConfig | BackwardTile) -> int:
    """Registers a thread that let `blocks_per_sm` blocks share a multiprocessor."""
    return min(_MOST_REGISTERS, REGISTERS // (32 * tile.warps * tile.blocks_per_sm) // 8 * 8)


def fragment_registers(kind: str, spec: AttentionSpec, tile: TileConfig | BackwardTile) -> int:
    """Registers a thread of the matrices that live through a step: 8 for 16 x 16 float32 elements of a warp."""
    dim_steps, dim_v_steps = (padded(dim) // MMA_K for dim in (spec.head_dim, spec.dim_v))
    if isinstance(tile, BackwardTile):
        columns = tile.warps // tile.kv_rows
        keys = tile.tile_n // tile.kv_rows // _MMA_ROWS
        kept = keys * (-(-dim_steps // columns) + -(-dim_v_steps // columns))
        scores = tile.tile_m // tile.s_rows // _MMA_ROWS * (tile.tile_n * tile.s_rows // tile.warps) // MMA_K
        return 8 * (kept + 2 * scores)
    rows, keys = _warp_part(tile)
    m_frags, k_frags = rows // _MMA_ROWS, keys // MMA_K
    if kind == "bwd_dq":
        return 8 * m_frags * (dim_steps + 2 * k_frags)
    return m_frags * (8 * dim_v_steps + 8 * k_frags + (4 * dim_steps if tile.q_in_registers else 0))


def _numbers(tile: Tile) -> list[int]:
    values = (getattr(tile, field.name) for field in dataclasses.fields(tile))
    return [value for value in values if not isinstance(value, bool)]


def _warp_part(tile: TileConfig) -> tuple[int, int]:
    """Rows and keys of a warp in a step."""
    if tile.along_keys:
        return tile.tile_m, tile.tile_n // tile.warps
    return tile.tile_m // tile.warps, tile.tile_n


def _forward_problem(kind: str, tile: TileConfig) -> str | None:
    row_warps, key_warps = (1, tile.warps) if tile.along_keys else (tile.warps, 1)
    if tile.tile_m % (_MMA_ROWS * row_warps) or tile.tile_n % (MMA_K * key_warps):
        return "tiles are no whole fragments"
    if tile.along_keys != (kind == "decode"):
        return "the warps lie along the keys for few query rows, and only there"
    if kind == "bwd_dq" and (tile.q_in_registers or tile.stages > 2):
        return "dQ has at most two stages, and Q in shared memory"
    return None


def _backward_problem(tile: BackwardTile) -> str | None:
    if any(tile.warps % rows for rows in (tile.s_rows, tile.kv_rows, tile.q_rows)):
        return "the warps do not divide evenly"
    if tile.tile_m % (tile.s_rows * _MMA_ROWS) or tile.tile_n % (tile.warps // tile.s_rows * MMA_K):
        return "S is no whole fragments"
    if tile.tile_n % (tile.kv_rows * _MMA_ROWS) or tile.tile_m % (tile.q_rows * _MMA_ROWS):
        return "gradients are no whole fragments"
    if tile.tile_m > 64 * tile.warps:
        return "too few threads to copy the statistics"
    if tile.stages > 2:
        return "at most two stages"
    return None


def _hopper_problem(spec: AttentionSpec, tile: HopperTile | HopperBackwardTile) -> str | None:
    if isinstance(tile, HopperBackwardTile):
        apart = tile.tile_n == 64 * tile.consumers  # each consumer has keys of its own
        if tile.consumers != 2 or tile.tile_m not in ((64, 128) if apart else (64,)):
            return "two consumers have 64 query rows of dQ each, or half of its columns"
        # dK and dV of 64 keys, or one of them, S and dP, in float32 over 128 threads.
        dims = padded(spec.head_dim), padded(spec.dim_v)
        held = (sum(dims) if apart else max(dims)) // 2 + tile.tile_m
    else:
        if tile.tile_m % 64 or tile.consumers not in (2, 3):
            return "two or three consumers have 64 rows each"
        if tile.tile_n % MMA_K or not _LEAST_KEYS <= tile.tile_n <= _MOST_BOX:
            return f"{tile.tile_n} keys are no product of wgmma"
        # S and O in float32, P and perhaps Q in 16 bits, of 64 rows over 128 threads.
        columns = tile.tile_n + padded(spec.dim_v) + tile.tile_n // 2
        held = (columns + (padded(spec.head_dim) // 2 if tile.q_in_registers else 0)) // 2
    if tile.producer_registers % _REGISTER_STEP or tile.consumer_registers % _REGISTER_STEP:
        return f"the producer's {tile.producer_registers} registers leave {tile.consumer_registers} to each consumer"
    given = tile.producer_registers + tile.consumers * tile.consumer_registers
    if given > REGISTERS // (32 * tile.warps) // _REGISTER_STEP * _REGISTER_STEP * (tile.consumers + 1):
        return f"{given} registers of a thread of each warpgroup are more than a block starts with"
    if held + _OTHER_REGISTERS > tile.consumer_registers:
        return f"{held} registers of fragments a thread, of {tile.consumer_registers}"
    return None
