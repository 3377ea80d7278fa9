"""The Hopper family: `wgmma`, bulk tensor copies and warpgroups with roles, on compute capability 9.0 (sm90a)."""

from __future__ import annotations

from fagen.arch import resolve
from fagen.arch.sm80 import ELEMENT_BYTES, FLOAT_BYTES, ROW_STATISTICS_BYTES, padded
from fagen.arch.tiles import HopperBackwardTile, HopperTile
from fagen.mods import Mod
from fagen.spec import AttentionSpec

PRIMITIVES = ("types", "shared", "global", "mbarrier", "tma", "warpgroup", "stmatrix", "wgmma", "convert", "math")


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


def counts_tiles(spec: AttentionSpec) -> bool:
    """Whether blocks take one tile after the other as they get done with them: where tiles are not equally long."""
    return spec.causal or spec.window or spec.varlen


def work_bytes(spec: AttentionSpec) -> int:
    """Shared memory in which the producer says what tile is next, bytes."""
    return 48 if spec.varlen else 32


def _with_q_and_o(spec: AttentionSpec, tile: HopperTile) -> tuple[int, int]:
    """Shared memory with Q and O side by side, and with one over the other."""
    q_bytes, o_bytes = tile_bytes(tile.tile_m, spec.head_dim), tile_bytes(tile.tile_m, spec.dim_v)
    keys = tile_bytes(tile.tile_n, spec.head_dim) + tile_bytes(tile.tile_n, spec.dim_v)
    rest = tile.stages * keys + 8 * (2 + 4 * tile.stages) + work_bytes(spec)
    return q_bytes + o_bytes + rest, max(q_bytes, o_bytes) + rest


def primitives(spec: AttentionSpec, tile: HopperTile) -> tuple[str, ...]:
    """Base names of the files of primitives that the forward calls."""
    return (*PRIMITIVES, *(["ldmatrix"] if tile.q_in_registers else []), *(["atomic"] if counts_tiles(spec) else []))


def wgmma_shapes(spec: AttentionSpec, tile: HopperTile) -> tuple[tuple[str, int], ...]:
    """The products of the forward: where the first operand comes from, and columns."""
    scores = ("rs" if tile.q_in_registers else "ss", tile.tile_n)
    return tuple(sorted({scores, ("rs", padded(spec.dim_v))}))


def backward_primitives(spec: AttentionSpec, tile: HopperBackwardTile) -> tuple[str, ...]:
    """Base names of the files of primitives that the main backward calls."""
    reduce, turns = ["reduce"] if tile.shares_keys else [], ["turns"] if spec.deterministic else []
    return (*PRIMITIVES, "bulk", *reduce, *turns)


def backward_smem_bytes(spec: AttentionSpec, tile: HopperBackwardTile) -> int:
    """Dynamic shared memory of the main backward, bytes: K, V, `stages` tiles of Q and dO with statistics, dS, dQ
    or P, barriers."""
    keys = tile_bytes(tile.tile_n, spec.head_dim) + tile_bytes(tile.tile_n, spec.dim_v)
    queries = tile_bytes(tile.tile_m, spec.head_dim) + tile_bytes(tile.tile_m, spec.dim_v)
    statistics = tile.tile_m * ROW_STATISTICS_BYTES
    buffers = 2 if tile.late else 1  # of dS and of dQ
    gradients = buffers * tile_bytes(tile.tile_n, tile.tile_m)
    barriers = 1 + 2 * buffers
    if tile.shares_keys:
        passed = tile.tile_n * tile.tile_m * FLOAT_BYTES
        barriers += 2
    else:
        passed = buffers * tile.sum_tile(padded(spec.head_dim)).floats * FLOAT_BYTES
    return keys + tile.stages * (queries + statistics) + gradients + passed + 8 * (barriers + 4 * tile.stages)


def backward_wgmma_shapes(spec: AttentionSpec, tile: HopperBackwardTile) -> tuple[tuple[str, int], ...]:
    """The products of the main backward: S and dP, dQ; dV and dK."""
    columns = padded(spec.head_dim)
    of_queries = {16 * tile.sum_tile(columns).q_steps}
    if tile.shares_keys:
        blocks = -(-columns // BLOCK_COLUMNS) * BLOCK_COLUMNS
        of_queries = {n for n in (min(columns, 128), blocks - 128) if n > 0}
    of_descriptors = {tile.tile_m, *of_queries}
    of_registers = {padded(spec.dim_v), padded(spec.head_dim)}
    shapes = {(form, n) for form in ("ss", "ss_new") for n in of_descriptors} | {("rs", n) for n in of_registers}
    return tuple(sorted(shapes))


def serves(spec: AttentionSpec) -> bool:
    """Whether the family has a forward for `spec`; the sm80 family, which runs on the same cards, has all others."""
    return unserved(spec) is None


def unserved(spec: AttentionSpec) -> str | None:
    """Why the family has no forward for `spec`; None where it has one."""
    if spec.split_kv:
        return "split keys are for few queries, which would leave a tile of 128 rows nearly empty"
    if spec.paged:
        return "the copy engine knows of no pages"
    if spec.window and spec.dropout:
        return (
            "dropout draws its numbers for 16 keys from multiples of 16 on, and steps of a window start where it does"
        )
    return None


def forward_tile(spec: AttentionSpec) -> HopperTile:
    """The tile of the forward kernel of `spec`, by the wider of the two head dims.

    Figures are TFLOP/s on one H200, bf16, 16384 keys unless another number is given; docs/hopper-forward.md has all.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    # Of the producer beside two consumers: finding sequences takes more than 24, which the consumers can spare.
    two = 40 if spec.varlen else 24
    # Dropout needs the registers of two consumers, and of Q. It may not change the keys a step: with a probability of 0
    # it gives the bits of the kernel without it. With gradients the rows of statistics are padded to whole tiles of
    # 128.
    three = not (spec.backward or spec.dropout)
    if widest <= 64 and spec.backward:
        # d64 full, causal: 515 and 519; 160 keys 500 and 474, 112 keys 416 and 438.
        return HopperTile(128, tile_n=192, stages=2, q_in_registers=not spec.dropout, producer_registers=two)
    if widest <= 64 and spec.mods:
        # 128 keys would spill 60 bytes with a causal softcap.
        return _three_or_two(three, 112, two, q_in_registers=not spec.dropout)
    if widest <= 64:
        # d64 full, causal: 590 and 550; 112 keys and Q in registers 577 and 531, 96 keys 568 and 536.
        return _three_or_two(three, 128, two)
    if widest <= 96 and not (spec.causal or spec.window or spec.mods or spec.backward):
        # d96 full: 656, 1k 518; two consumers with 128 keys 507 and 503. Causal 1k would be slower: 368, which has 431.
        return _three_or_two(three, 96, two)
    if widest <= 128:
        # d128 full: 689, 1k 598, causal 1k 372. 144 keys 711, 538 and 324; 112 keys 661, 536 and 339.
        # All of these together would spill 8 bytes with Q in registers.
        crowded = spec.dropout or (spec.window and spec.mods and spec.backward)
        return HopperTile(128, tile_n=128, stages=2, q_in_registers=not crowded, producer_registers=two)
    # d192 full, 1k, causal, 1k: 729, 668, 678, 484; 96 keys and Q in shared memory 721, 570, 674, 413, 80 keys so 724,
    # 635, 685, 460.
    q_in_registers = widest <= 192 and not (spec.dropout or spec.mods)
    return HopperTile(128, tile_n=80, stages=2, q_in_registers=q_in_registers, producer_registers=two)


def _three_or_two(three: bool, keys: int, producer: int, q_in_registers: bool = False) -> HopperTile:
    """Three consumers, or two where those have too few registers."""
    rows, registers = (192, 32) if three else (128, producer)
    return HopperTile(rows, keys, stages=2, q_in_registers=q_in_registers, producer_registers=registers)


def late_mods(spec: AttentionSpec) -> tuple[Mod, ...]:
    """The modifications up to the last of whose value the main backward adds up the gradient: their derivatives are for
    the gradient of a score, and those of the others go into the probability."""
    last = max((spec.mods.index(mod) + 1 for mod in spec.mods_with_sums), default=0)
    return spec.mods[:last]


def backward_tile(spec: AttentionSpec) -> HopperBackwardTile:
    """The tile of the main backward kernel of `spec`, by the wider of the two head dims.

    Figures are ratios to cuDNN in the same run on one H200, bf16, 16384 keys; docs/hopper-backward.md has all.
    """
    widest = max(padded(spec.head_dim), padded(spec.dim_v))
    if widest > 128:
        return HopperBackwardTile(64, tile_n=64, stages=2, producer_registers=24, shares_keys=True)
    # Addresses of a bias, and scores that are kept for a gradient behind a cap, take the registers of half the queries:
    # 904 and 1708 bytes would spill at d64 causal, where 64 queries spill nothing.
    crowded = spec.bias or len(late_mods(spec)) > 1
    if widest <= 64 and not crowded:
        # d64 causal: 1.21; 1.19 with dQ late; 64 queries, three stages 0.80.
        return HopperBackwardTile(128, tile_n=128, stages=2, producer_registers=24)
    # d128 full: 1.045 with dQ late, 1.020 at once; causal 1.066 and 1.079.
    late = not (spec.causal or spec.window)
    return HopperBackwardTile(64, tile_n=128, stages=2, producer_registers=24, late=late)
