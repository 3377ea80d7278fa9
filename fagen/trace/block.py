"""One block of one call: which it is, and the memory that a traced kernel writes of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fagen import stages
from fagen.arch.tiles import BackwardTile, HopperBackwardTile, HopperTile, TileConfig
from fagen.check import Case
from fagen.errors import SpecError
from fagen.plan import KernelPlan
from fagen.stages import TracedPlan

# What is where a traced kernel writes nothing: a NaN that no arithmetic makes.
_UNWRITTEN = 0x7FC0DEAD


@dataclass(frozen=True)
class Block:
    """A block: of queries `tile` of a head or, where it keeps keys ("bwd"), of keys `tile` of a head of k and v."""

    batch: int
    head: int
    tile: int


class Problem:
    """One call, and the kernel that is traced. `index` is the card's; None emulates."""

    def __init__(self, case: Case, kernel: KernelPlan, index: int | None) -> None:
        self.case = case
        self.spec = case.spec
        self.kernel = kernel
        self.traced = TracedPlan.of(kernel)
        self.device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self.group = case.heads // case.heads_k
        self.scale = case.softmax_scale or case.spec.head_dim**-0.5
        self.keeps_keys = kernel.kind == "bwd"
        tile = kernel.tile
        assert isinstance(tile, TileConfig | HopperTile | BackwardTile | HopperBackwardTile)
        self.tile_m, self.tile_n = tile.tile_m, tile.tile_n

    def lengths(self, batch: int) -> tuple[int, int]:
        """Queries and keys of a batch entry."""
        return self.case.lengths[batch] if self.spec.varlen else (self.case.seqlen_q, self.case.seqlen_k)

    def tiles(self, batch: int) -> tuple[int, int]:
        """Tiles of queries and of keys of a batch entry."""
        seqlen_q, seqlen_k = self.lengths(batch)
        return -(-seqlen_q // self.tile_m), -(-seqlen_k // self.tile_n)

    def check(self, block: Block) -> None:
        """SpecError unless the call has the block."""
        heads = self.case.heads_k if self.keeps_keys else self.case.heads
        _check_number("batch entry", block.batch, "the call has", self.case.batch)
        _check_number("head", block.head, "k and v have" if self.keeps_keys else "the call has", heads)
        what = f"{self.tile_n} keys" if self.keeps_keys else f"{self.tile_m} queries"
        _check_number("tile", block.tile, f"in tiles of {what}, a head has", self.tiles(block.batch)[self.keeps_keys])

    def check_step(self, tile: int | None, block: Block | None = None) -> None:
        """SpecError unless the block, or without one some block of the call, may have that step."""
        if tile is not None:
            what = f"{self.tile_m} queries" if self.keeps_keys else f"{self.tile_n} keys"
            entries = range(self.case.batch) if block is None else [block.batch]
            count = max(self.tiles(batch)[not self.keeps_keys] for batch in entries)
            _check_number("step", tile, f"in tiles of {what}, a block has", count)

    def place(self, block: Block) -> str:
        """The block in words."""
        size, what = (self.tile_n, "keys") if self.keeps_keys else (self.tile_m, "queries")
        first, end = block.tile * size, self.lengths(block.batch)[self.keeps_keys]
        return (
            f"{block.batch},{block.head},{block.tile}: batch entry {block.batch}, head {block.head}"
            f"{' of k and v' if self.keeps_keys else ''}, {what} {first} to {min(first + size, end) - 1}"
        )

    def of_head(self, x: Tensor, batch: int, head: int, *, keys: bool = False) -> Tensor:
        """The rows (S, dim) of a batch entry and head of q or o, or of k or v, in float64."""
        if not self.spec.varlen:
            return x[batch, :, head].double()
        first = sum(pair[keys] for pair in self.case.lengths[:batch])
        return x[first : first + self.lengths(batch)[keys], head].double()


def _check_number(what: str, number: int, owner: str, count: int) -> None:
    if not 0 <= number < count:
        has = f"0 to {count - 1}" if count > 1 else "0 alone" if count else "none"
        raise SpecError(f"there is no {what} {number}: {owner} {has}")


class Written:
    """The memory that a traced kernel writes to, and its parameters for it.

    A block that keeps queries walks over `steps` tiles of keys, `columns` of them; one that keeps keys over the query
    tiles of all heads that share its head, `head_rows` of a head.
    """

    def __init__(self, problem: Problem, block: Block) -> None:
        kernel, spec = problem.kernel, problem.spec
        m_tiles, n_tiles = problem.tiles(block.batch)
        if problem.keeps_keys:
            self.steps, self.columns = problem.group * m_tiles, problem.tile_n
            self.head_rows = m_tiles * problem.tile_m
            rows = problem.group * self.head_rows
            row, column = 0, block.tile * problem.tile_n
        else:
            # Steps of a window may begin anywhere, and end past the last tile.
            self.steps, self.columns = n_tiles + 1, (n_tiles + 1) * problem.tile_n
            rows = self.head_rows = problem.tile_m
            row, column = block.tile * problem.tile_m, 0
        self.stages = problem.traced.trace_stages
        shapes: dict[str, tuple[int, ...]] = {"scores": (len(self.stages), rows, self.columns)}
        if kernel.kind == "fwd":
            shapes["running"] = (self.steps, 3, rows)
        else:
            shapes["between"] = (2, rows)
        for name in stages.of_steps(kernel):
            of_a_step = problem.tile_n if name in ("dK", "dV") else problem.tile_m
            dim = spec.dim_v if name in ("O", "dV") else spec.head_dim
            shapes[name] = (self.steps, of_a_step, dim)
        self._buffers = {
            name: torch.full(shape, _UNWRITTEN, dtype=torch.int32, device=problem.device).view(torch.float32)
            for name, shape in shapes.items()
        }
        self.parameters: dict[str, Tensor | int] = {
            **{f"trace_{name.lower()}": buffer for name, buffer in self._buffers.items()},
            "trace_batch": block.batch,
            "trace_head": block.head,
            "trace_row": row,
            "trace_rows": rows,
            "trace_head_rows": self.head_rows,
            "trace_column": column,
            "trace_columns": self.columns,
            "trace_steps": self.steps,
        }

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """What was written, in float64, and where anything was; `name` is that of a buffer, or a stage of scores."""
        buffer = self._buffers["scores"][self.stages.index(name)] if name in self.stages else self._buffers[name]
        return buffer.double(), buffer.view(torch.int32) != _UNWRITTEN
