"""What is Hopper's own: the order of tiles of a persistent kernel, and tiles that see nothing between others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fagen
from fagen import prepared, reference
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.schedule import heads_a_group, unevenness
from fagen.spec import AttentionSpec


def slowest(lengths: list[int], heads: int, group: int, blocks: int) -> float:
    """Time of the slowest block over the mean, tile by tile as the module describes the order."""
    order = []
    for first in range(0, heads, group):
        order += [length for length in lengths for _ in range(min(group, heads - first))]
    sums = [0] * blocks
    for index, length in enumerate(order):
        place = index % blocks
        sums[place if index // blocks % 2 == 0 else blocks - 1 - place] += length
    return max(sums) * blocks / sum(sums)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 9), st.integers(1, 7))
def test_the_slowest_block(lengths: list[int], heads: int, group: int, blocks: int) -> None:
    group = min(group, heads)
    expected = slowest(lengths, heads, group, blocks)
    assert unevenness(torch.tensor(lengths), heads, group, blocks) == pytest.approx(expected)


def test_groups_are_as_small_as_evenness_allows() -> None:
    """d256 causal at 16k, as on a card of 132 multiprocessors: what fits L2 is one head, which is far from even."""
    lengths = torch.arange(128, 0, -1) * 128 // 80 + 2
    kv_bytes = 16384 * 512 * 2
    assert unevenness(lengths, 8, 1, 132) > 1.5
    assert unevenness(lengths, 8, heads_a_group(lengths, 8, 1, kv_bytes, 132), 132) < 1.02
    assert heads_a_group(torch.ones(8), 64, 4, kv_bytes, 128) == 4  # heads that share keys stay together


@pytest.mark.parametrize("head_dim", [64, 192, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_that_see_nothing_between_others(monkeypatch: pytest.MonkeyPatch, head_dim: int, seed: int) -> None:
    """Sq > Sk: a head's last tiles have no keys, and the next head's first ones do; o = 0 there, right elsewhere."""
    monkeypatch.setattr(prepared, "heads_a_group", lambda *_: 1)
    monkeypatch.setenv("FAGEN_EMULATE_SEED", str(seed))
    attention = fagen.load(AttentionSpec(head_dim=head_dim, causal=True), arch="sm90a", emulate=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 5, head_dim, generator=generator).bfloat16() for rows in (500, 140, 140))
    o, lse = attention(q, k, v, return_lse=True, _poison=True)
    expected_o, expected_lse = reference.attention(q, k, v, causal=True)
    assert not o[:, :360].any() and (lse[:, :, :360] == -torch.inf).all()
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed
    assert compare_lse(lse, expected_lse).passed
