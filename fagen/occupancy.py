"""How many blocks of a kernel a multiprocessor holds at once, and what keeps it from holding more."""

from __future__ import annotations

from dataclasses import dataclass

from fagen.arch import KIB, REGISTERS, Arch

_LANES = 32
_REGISTER_UNIT = 256  # registers are given to a warp in steps of this many
_SCHEDULERS = 4  # each with a quarter of the registers; the warps of a block are spread over all
_SHARED_UNIT, _SHARED_UNIT_OF_TURING = 128, 256  # bytes


@dataclass(frozen=True)
class Occupancy:
    """blocks, warps: that a multiprocessor holds at once. most_warps: that it could hold. limits: what keeps it from
    holding another block, of "registers", "shared memory", "warps" and "blocks"."""

    blocks: int
    warps: int
    most_warps: int
    limits: tuple[str, ...]


def occupancy(arch: Arch, *, registers: int, shared: int, threads: int) -> Occupancy:
    """The occupancy of a kernel with `registers` a thread, and `threads` and `shared` bytes, of both kinds, a block.

    The rules are those of the driver's cuOccupancyMaxActiveBlocksPerMultiprocessor, where shared memory has the largest
    share of the L1 cache that it can have.
    """
    multiprocessor = arch.multiprocessor
    warps = -(-threads // _LANES)
    spread = -(-warps // _SCHEDULERS) * _SCHEDULERS
    unit = _SHARED_UNIT if arch.capability >= (8, 0) else _SHARED_UNIT_OF_TURING
    a_warp = _up(registers * _LANES, _REGISTER_UNIT)
    bounds = {
        "registers": REGISTERS // _SCHEDULERS // a_warp * _SCHEDULERS // warps if a_warp * spread <= REGISTERS else 0,
        "shared memory": multiprocessor.shared_kib * KIB // max(1, _up(shared + multiprocessor.system_kib * KIB, unit)),
        "warps": multiprocessor.warps // warps,
        "blocks": multiprocessor.blocks,
    }
    blocks = min(bounds.values())
    limits = tuple(name for name, bound in bounds.items() if bound == blocks)
    return Occupancy(blocks, blocks * warps, multiprocessor.warps, limits)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
