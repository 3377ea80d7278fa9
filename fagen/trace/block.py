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
from fagen.reference import keys_seen
from fagen.stages import TracedPlan

# What is where a traced kernel writes nothing: a NaN that no arithmetic makes.
_UNWRITTEN = 0x7FC0DEAD


@dataclass(frozen=True)
class Block:
    """A block, or where the keys are split those of all parts: of queries `tile` of a head, or of a head of k and v
    where a tile has rows of all heads that share it. Of "bwd", which keeps keys, of keys `tile` of a head of k and v;
    of "combine" the query `tile` of a head."""

    batch: int
    head: int
    tile: int


@dataclass(frozen=True)
class Rows:
    """The query rows of a block: head `heads[at[0][r]]` and query `queries[at[1][r]]` of row r."""

    heads: range
    queries: range
    at: tuple[Tensor, Tensor]


class Problem:
    """One call, and the kernel that is traced. `attending` is the kernel whose tiles the call has, which "combine" has
    not. `index` is the card's; None emulates."""

    def __init__(self, case: Case, kernel: KernelPlan, attending: KernelPlan, index: int | None) -> None:
        self.case = case
        self.spec = case.spec
        self.kernel = kernel
        self.traced = TracedPlan.of(kernel)
        self.device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self.group = case.heads // case.heads_k
        self.scale = case.softmax_scale or case.spec.head_dim**-0.5
        self.keeps_keys = kernel.kind == "bwd"
        self.joins = kernel.kind == "combine"
        self.parts = case.num_splits or 1
        self.unit = "part" if self.joins else "tile"  # what a step is of
        tile = attending.tile
        assert isinstance(tile, TileConfig | HopperTile | BackwardTile | HopperBackwardTile)
        self.tile_m, self.tile_n = tile.tile_m, tile.tile_n
        # Warps that have keys of a step each.
        self.key_warps = tile.warps if isinstance(tile, TileConfig) and tile.along_keys else 1
        self._sharing = self.group if attending.shares_keys else 1  # heads whose rows a tile has
        self.of_kv_heads = self.keeps_keys or (self._sharing > 1 and not self.joins)

    def lengths(self, batch: int) -> tuple[int, int]:
        """Queries and keys of a batch entry."""
        return self.case.lengths[batch] if self.spec.varlen else (self.case.seqlen_q, self.case.used[batch])

    def tiles(self, batch: int) -> tuple[int, int]:
        """Tiles of queries and of keys of a batch entry."""
        seqlen_q, seqlen_k = self.lengths(batch)
        return -(-seqlen_q * self._sharing // self.tile_m), -(-seqlen_k // self.tile_n)

    def blocks(self, batch: int) -> int:
        """Blocks of a head."""
        return self.lengths(batch)[0] if self.joins else self.tiles(batch)[self.keeps_keys]

    def block_of(self, batch: int, head: int, row: int) -> Block:
        """The block of queries with a row of o."""
        if self.joins:
            return Block(batch, head, row)
        return Block(batch, head // self._sharing, self._tile_of(head, row))

    def rows(self, block: Block) -> Rows:
        """Those of a block of queries."""
        if self.joins:
            zero = torch.zeros(1, dtype=torch.long, device=self.device)
            return Rows(range(block.head, block.head + 1), range(block.tile, block.tile + 1), (zero, zero))
        first, end = self._numbers(block.batch, block.tile)
        numbers, queries = torch.arange(first, end, device=self.device), self._queries(block.batch, block.tile)
        heads = range(block.head * self._sharing, (block.head + 1) * self._sharing)
        return Rows(heads, queries, (numbers % self._sharing, numbers // self._sharing - queries.start))

    def _tile_of(self, head: int, query: int) -> int:
        """The tile with a row of o."""
        return (query * self._sharing + head % self._sharing) // self.tile_m

    def _numbers(self, batch: int, tile: int) -> tuple[int, int]:
        """The first row of a tile and the end; of heads that share one, those of one query come one after the other."""
        first = tile * self.tile_m
        return first, min(first + self.tile_m, self.lengths(batch)[0] * self._sharing)

    def _queries(self, batch: int, tile: int) -> range:
        """Those of which a tile has a row."""
        first, end = self._numbers(batch, tile)
        return range(first // self._sharing, (end - 1) // self._sharing + 1)

    def tiles_of_parts(self, block: Block) -> list[range]:
        """The tiles of keys of each part, for a block of queries."""
        seqlen_q, seqlen_k = self.lengths(block.batch)
        tile = self._tile_of(block.head, block.tile) if self.joins else block.tile
        queries = self._queries(block.batch, tile)
        keys = keys_seen(queries, seqlen_k - seqlen_q, seqlen_k, self.spec.causal, self.case.window_sides)
        first = keys.start // self.tile_n
        end = -(-keys.stop // self.tile_n) if keys else first
        each = -(-(end - first) // self.parts)
        starts = (min(first + part * each, end) for part in range(self.parts))
        return [range(start, min(start + each, end)) for start in starts]

    def check(self, block: Block) -> None:
        """SpecError unless the call has the block."""
        heads = self.case.heads_k if self.of_kv_heads else self.case.heads
        _check_number("batch entry", block.batch, "the call has", self.case.batch)
        _check_number("head", block.head, "k and v have" if self.of_kv_heads else "the call has", heads)
        of = "rows, one for each query and head that shares the keys" if self._sharing > 1 else "queries"
        what = f"{self.tile_n} keys" if self.keeps_keys else f"{self.tile_m} {of}"
        owner = "in rows of one query, a head has" if self.joins else f"in tiles of {what}, a head has"
        _check_number("tile", block.tile, owner, self.blocks(block.batch))

    def check_step(self, tile: int | None, block: Block | None = None) -> None:
        """SpecError unless the block, or without one some block of the call, may have that step."""
        if tile is None:
            return
        if self.joins:
            _check_number("part", tile, "the keys have", self.parts)
            return
        what = f"{self.tile_m} queries" if self.keeps_keys else f"{self.tile_n} keys"
        entries = range(self.case.batch) if block is None else [block.batch]
        count = max(self.tiles(batch)[not self.keeps_keys] for batch in entries)
        _check_number("step", tile, f"in tiles of {what}, a block has", count)

    def place(self, block: Block) -> str:
        """The block in words."""
        if self.keeps_keys:
            first, end = block.tile * self.tile_n, self.lengths(block.batch)[1]
            what = f"head {block.head} of k and v, keys {first} to {min(first + self.tile_n, end) - 1}"
        else:
            rows = self.rows(block)
            several = len(rows.heads) > 1
            heads = f"heads {rows.heads[0]} to {rows.heads[-1]}" if several else f"head {rows.heads[0]}"
            several = len(rows.queries) > 1
            queries = f"queries {rows.queries[0]} to {rows.queries[-1]}" if several else f"query {rows.queries[0]}"
            what = f"{heads}, {queries}"
        return f"{block.batch},{block.head},{block.tile}: batch entry {block.batch}, {what}"

    def of_head(self, x: Tensor, batch: int, head: int, *, keys: bool = False) -> Tensor:
        """The rows (S, dim) of a batch entry and head of q or o, or of k or v, in float64."""
        length = self.lengths(batch)[keys]
        if not self.spec.varlen:
            return x[batch, :length, head].double()
        first = sum(pair[keys] for pair in self.case.lengths[:batch])
        return x[first : first + length, head].double()

    def of_rows(self, x: Tensor, batch: int, rows: Rows) -> Tensor:
        """Those of q or o (heads, queries, dim)."""
        return torch.stack(
            [self.of_head(x, batch, head)[rows.queries.start : rows.queries.stop] for head in rows.heads]
        )


def _check_number(what: str, number: int, owner: str, count: int) -> None:
    if not 0 <= number < count:
        has = f"0 to {count - 1}" if count > 1 else "0 alone" if count else "none"
        raise SpecError(f"there is no {what} {number}: {owner} {has}")


class Written:
    """The memory that a traced kernel writes to, and its parameters for it.

    A block that keeps queries walks over `steps` steps of keys, `columns` keys in all; one that keeps keys over the
    query tiles of all heads that share its head, `head_rows` of a head.
    """

    def __init__(self, problem: Problem, block: Block) -> None:
        self.stages = problem.traced.trace_stages
        shapes, place = _joined(problem, block) if problem.joins else self._walked(problem, block)
        self._buffers = {
            name: torch.full(shape, _UNWRITTEN, dtype=torch.int32, device=problem.device).view(torch.float32)
            for name, shape in shapes.items()
        }
        self._found: dict[str, tuple[Tensor, Tensor]] = {}
        self.parameters: dict[str, Tensor | int] = {f"trace_{name.lower()}": x for name, x in self._buffers.items()}
        self.parameters |= {f"trace_{name}": number for name, number in place.items()}

    def _walked(self, problem: Problem, block: Block) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Shapes of the buffers of a block that takes steps, and what is traced."""
        kernel, spec = problem.kernel, problem.spec
        m_tiles, n_tiles = problem.tiles(block.batch)
        head = block.head
        if problem.keeps_keys:
            self.steps, self.columns = problem.group * m_tiles, problem.tile_n
            self.head_rows = m_tiles * problem.tile_m
            rows = problem.group * self.head_rows
            row, column = 0, block.tile * problem.tile_n
        else:
            # Steps of a window may begin anywhere, and end past the last tile.
            self.steps, self.columns = (n_tiles + 1) * problem.key_warps, (n_tiles + 1) * problem.tile_n
            rows = self.head_rows = problem.tile_m
            row, column = block.tile * problem.tile_m, 0
            head = problem.rows(block).heads.start
        shapes: dict[str, tuple[int, ...]] = {"scores": (len(self.stages), rows, self.columns)}
        if kernel.kind in stages.FORWARDS:
            shapes["running"] = (self.steps, 3, rows)
        else:
            shapes["between"] = (2, rows)
        for name in stages.of_steps(kernel):
            of_a_step = problem.tile_n if name in ("dK", "dV") else problem.tile_m
            dim = spec.dim_v if name in ("O", "dV") else spec.head_dim
            shapes[name] = (self.steps, of_a_step, dim)
        if spec.split_kv:
            shapes |= {"o_part": (problem.parts, rows, spec.dim_v), "lse_part": (problem.parts, rows)}
        return shapes, {
            "batch": block.batch,
            "head": head,
            "row": row,
            "rows": rows,
            "head_rows": self.head_rows,
            "column": column,
            "columns": self.columns,
            "steps": self.steps,
        }

    def __getitem__(self, name: str) -> tuple[Tensor, Tensor]:
        """What was written, in float64, and where anything was; `name` is that of a buffer, or a stage of scores."""
        if name not in self._found:  # asked for once a step
            buffer = self._buffers["scores"][self.stages.index(name)] if name in self.stages else self._buffers[name]
            self._found[name] = buffer.double(), buffer.view(torch.int32) != _UNWRITTEN
        return self._found[name]


def _joined(problem: Problem, block: Block) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """The same of a row that is joined from parts."""
    parts, case = problem.parts, problem.case
    shapes: dict[str, tuple[int, ...]] = {"lse_part": (parts, 1), "weight": (parts, 1), "sum": (1, 1)}
    shapes["o_part"] = (parts, problem.spec.dim_v)
    return shapes, {"block": (block.batch * case.heads + block.head) * case.seqlen_q + block.tile}
