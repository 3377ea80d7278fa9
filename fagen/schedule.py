"""In which order the blocks of a persistent kernel take the tiles of a problem.

Block b of P takes tile b of each round of P tiles; where lengths differ, from the other end in every second round.
Within a group of heads the tiles go from the longest to the shortest, all heads of one length side by side: the smaller
the group, the more of its keys and values stay in L2, but the less even the rounds.
"""

from __future__ import annotations

import torch

from fagen.call import MOST_SPLITS

L2_BYTES = 50 << 20  # of an H100 or H200
_EVEN_ENOUGH = 1.02
_MOST_TILES = 1 << 17  # beyond these so many rounds even out


def heads_a_group(lengths: torch.Tensor, heads: int, group_size: int, kv_bytes: int, blocks: int) -> int:
    """How many query heads to walk through together.

    lengths: time of each tile of a head, longest first. heads: query heads, of all batches, of which `group_size` share
    keys and values of `kv_bytes` bytes. blocks: that run at once.
    """
    group = min(heads, max(1, L2_BYTES // 2 // max(1, kv_bytes)) * group_size)
    if heads * len(lengths) > _MOST_TILES:
        return group
    best, best_group = float("inf"), group
    while best > _EVEN_ENOUGH:
        uneven = unevenness(lengths, heads, group, blocks)
        if uneven < best:
            best, best_group = uneven, group
        if group == heads:
            break
        group = min(heads, 2 * group)
    return best_group


def unevenness(lengths: torch.Tensor, heads: int, group: int, blocks: int) -> float:
    """Time of the slowest block over the mean."""
    tiles = len(lengths)
    index = torch.arange(heads * tiles)
    first = index // (group * tiles) * group
    in_group = torch.clamp(heads - first, max=group)
    length = lengths[(index - first * tiles) // in_group].double()
    rounds, place = index // blocks, index % blocks
    block = torch.where(rounds % 2 == 0, place, blocks - 1 - place)
    sums = torch.zeros(blocks, dtype=torch.float64).index_add_(0, block, length)
    return float(sums.max() / sums.mean())


def splits(blocks: int, steps: int, at_once: int) -> int:
    """Into how many parts to split the keys, so that `blocks` blocks of `steps` tiles of keys each take the least time
    where `at_once` run at once: rounds of blocks times tiles of a part, and the fewest parts that reach it within 5%.
    """
    most = max(1, min(MOST_SPLITS, steps))
    time = {n: -(-blocks * n // at_once) * -(-steps // n) for n in range(1, most + 1)}
    best = min(time.values())
    return next(n for n, taken in time.items() if taken <= 1.05 * best)
