"""How the work of a problem is shared out: tiles in an order, keys in parts."""

from __future__ import annotations

from collections.abc import Sequence

from fagen.call import MOST_SPLITS

L2_BYTES = 50 << 20  # of an H100 or H200


def heads_a_group(lengths: Sequence[int], heads: int, group_size: int, kv_bytes: int, blocks: int) -> int:
    """How many query heads a persistent kernel walks through together, from their longest tiles to the shortest.

    As many as have their keys and values in half of L2, but enough that the last of them, whose longest tile starts
    when all others are under way, still take the blocks as long as that tile does.

    lengths: time of each tile of a head, longest first. heads: of all batches, of which `group_size` share keys and
    values of `kv_bytes` bytes. blocks: that run at once.
    """
    fitting = max(1, L2_BYTES // 2 // max(1, kv_bytes)) * group_size
    lasting = -(-lengths[0] * blocks // sum(lengths))
    groups = max(1, heads // max(fitting, lasting))
    return min(heads, -(-heads // (groups * group_size)) * group_size)


def splits(blocks: int, steps: int, at_once: int) -> int:
    """Into how many parts to split the keys, so that `blocks` blocks of `steps` tiles of keys each take the least time
    where `at_once` run at once: rounds of blocks times tiles of a part, and the fewest parts that reach it within 5%.
    """
    most = max(1, min(MOST_SPLITS, steps))
    time = {n: -(-blocks * n // at_once) * -(-steps // n) for n in range(1, most + 1)}
    best = min(time.values())
    return next(n for n, taken in time.items() if taken <= 1.05 * best)
