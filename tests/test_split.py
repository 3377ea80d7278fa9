"""Keys in parts: the same o and lse for every number of parts, and nothing of the lengths on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fagen
from fagen import reference, schedule
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPEC = AttentionSpec(head_dim=64, split_kv=True)


def inputs(queries: int, keys: int, device: str = "cpu", batch: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, queries, 8, 64), (batch, keys, 2, 64), (batch, keys, 2, 64))
    return tuple(torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("features", [(), ("causal",), ("alibi",), ("window", "softcap")])
def test_n15_every_number_of_parts(features: tuple[str, ...], device: str) -> None:
    """N15, contiguous: Sq = 1, Hq = 8, Hk = 2, lengths 1, 17 and 3000 in one batch, what lies behind them NaN."""
    q, k, v = inputs(1, 3000, device)
    lengths = [1, 17, 3000]
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    values: dict[str, Any] = {"window": (1000, 0)} if "window" in features else {}
    values |= {"softcap": 20.0} if "softcap" in features else {}
    values |= {"alibi_slopes": torch.rand(8, device=device)} if "alibi" in features else {}
    attention = fagen.load(SPEC.model_copy(update=dict.fromkeys(features, True)), emulate=device == "cpu")
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    each = [
        reference.attention(q[b, None], k[b, None, :n], v[b, None, :n], causal="causal" in features, **values)
        for b, n in enumerate(lengths)
    ]
    for parts in (None, 1, 2, 8, 128):
        o, lse = attention(q, k, v, seqused_k=used, num_splits=parts, return_lse=True, _poison=True, **values)
        assert compare_o(o, torch.cat([o for o, _ in each]), OUTPUT_BUDGET["bf16"]).passed
        assert compare_lse(lse, torch.cat([lse for _, lse in each])).passed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [16, 64, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_n16_pages_in_any_order(causal: bool, size: int, device: str) -> None:
    """N16 and more: the bits of a contiguous cache, NaN in all slots that hold no key, and no page of most entries."""
    lengths = [1, 13, 130, 700]
    count = -(-700 // size)
    q, k, v = inputs(3, count * size, device, batch=4)
    table = torch.full((4, count), 2**30, dtype=torch.int32)
    order = torch.randperm(4 * count + 3, generator=torch.Generator().manual_seed(1)).tolist()
    paged_k, paged_v = (torch.full((4 * count + 3, size, 2, 64), torch.nan).bfloat16().to(device) for _ in range(2))
    for b, length in enumerate(lengths):
        for i in range(-(-length // size)):
            page = table[b, i] = order.pop()
            keys = slice(i * size, min(length, (i + 1) * size))
            for pages, dense in ((paged_k, k), (paged_v, v)):
                pages[page, : keys.stop - keys.start] = dense[b, keys]
    used = torch.tensor(lengths, dtype=torch.int32, device=device)
    spec = SPEC.model_copy(update={"causal": causal})
    dense = fagen.load(spec, emulate=device == "cpu")
    paged = fagen.load(spec.model_copy(update={"paged": True}), emulate=device == "cpu")
    for parts in (1, 4):
        results = paged(
            *(q, paged_k, paged_v),
            block_table=table.to(device),
            seqused_k=used,
            num_splits=parts,
            return_lse=True,
            _poison=True,
        )
        expected = dense(q, k, v, seqused_k=used, num_splits=parts, return_lse=True)
        for x, y in zip(results, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("size", [16, 64, 256])
def test_pages_of_keys_that_begin_and_end_anywhere(size: int, queries: int, device: str) -> None:
    """The bits of a contiguous cache, behind any padding, in a window, in more parts than there are tiles. 40 queries
    are more than the kernel for few rows takes. The table ends with the last key; what is not visible has no page."""
    spec = SPEC.model_copy(update={"window": True})
    dense = fagen.load(spec, emulate=device == "cpu")
    paged = fagen.load(spec.model_copy(update={"paged": True}), emulate=device == "cpu")
    for leftpad, end, left in ((0, 700, 5000), (7, 1601, 5000), (301, 1500, 700), (250, 1537, 1), (90, 91, 0)):
        pages = -(-end // size)
        q, k, v = inputs(queries, pages * size, device, batch=1)
        seen = range(max(leftpad, end - queries - left), end)  # the keys that some query sees
        first = seen.start // size
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
        table = torch.argsort(order).int()[None]
        table[:, :first] = 2**30
        hidden = [at for at in range(pages * size) if at not in seen]
        k[:, hidden], v[:, hidden] = torch.nan, torch.nan
        caches = [x.view(pages, size, 2, 64)[order.to(device)] for x in (k, v)]
        bounds = {
            name: torch.tensor([x], dtype=torch.int32, device=device)
            for name, x in (("seqused_k", end), ("leftpad_k", leftpad))
        }
        for parts in (1, 3, 50):
            call = {**bounds, "window": (left, 0), "num_splits": parts, "return_lse": True, "_poison": True}
            results = paged(q, *caches, block_table=table.to(device), **call)
            for x, y in zip(results, dense(q, k, v, **call), strict=True):
                assert torch.equal(x, y) and not x.isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": None}, "the spec has paged=True: pass block_table="),
        ({"seqused_k": None}, "the spec has paged=True: pass seqused_k="),
        ({"block_table": torch.zeros(2, 5)}, r"block_table must be an int32 tensor \(2, pages\) on cpu"),
        ({"block_table": torch.zeros(3, 5, dtype=torch.int32)}, r"block_table must be an int32 tensor \(2, pages\)"),
        ({"block_table": [[0]]}, "block_table must be an int32 tensor"),
        ({"k": torch.zeros(9, 16, 2, 64).bfloat16()}, "k has 9 pages and v 8"),
        ({"k": torch.zeros(8, 24, 2, 64).bfloat16(), "v": torch.zeros(8, 24, 2, 64).bfloat16()}, "pages of 24 keys"),
        ({"k": torch.zeros(8, 8, 2, 64).bfloat16(), "v": torch.zeros(8, 8, 2, 64).bfloat16()}, "pages of 8 keys"),
    ],
)
def test_what_pages_need(change: dict[str, Any], message: str) -> None:
    attention = fagen.load(SPEC.model_copy(update={"paged": True}), emulate=True)
    pages = torch.zeros(8, 16, 2, 64).bfloat16()
    arguments = {"q": torch.zeros(2, 1, 8, 64).bfloat16(), "k": pages, "v": pages} | {
        "block_table": torch.zeros(2, 4, dtype=torch.int32),
        "seqused_k": torch.ones(2, dtype=torch.int32),
    }
    with pytest.raises(SpecError, match=message):
        attention(**(arguments | change))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("queries", [1, 2, 16, 33])
@pytest.mark.parametrize("alibi", [False, True])
def test_heads_that_share_keys(alibi: bool, queries: int, device: str) -> None:
    """A tile has rows of four heads: positions are those of the row's own query, slopes of its head, in any strides.

    33 queries of four heads are more than the kernel for few rows takes.
    """
    q, k, v = inputs(queries, 100, device)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    values = {"alibi_slopes": torch.rand(3, 8, device=device)} if alibi else {}
    spec = AttentionSpec(head_dim=64, split_kv=True, causal=True, alibi=alibi)
    attention = fagen.load(spec, emulate=device == "cpu")
    expected_o, expected_lse = reference.attention(q, k, v, causal=True, **values)
    for parts in (1, 3):
        o, lse = attention(q, k, v, num_splits=parts, return_lse=True, _poison=True, **values)
        assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed


@pytest.mark.parametrize(
    ("arch", "head_dim", "dim_v"),
    [("sm90", 32, 32), ("sm80", 72, 72), ("sm90", 128, 64), ("sm80", 64, 192), ("sm86", 256, 256)],
)
@pytest.mark.parametrize("paged", [False, True])
def test_few_queries_at_any_head_dim(paged: bool, arch: str, head_dim: int, dim_v: int) -> None:
    """Tiles of any number of warps and stages, and rows of K and V of different lengths."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((2, 1, 4, head_dim), generator=generator).bfloat16()
    k, v = (torch.randn((2, 512, 2, dim), generator=generator).bfloat16() for dim in (head_dim, dim_v))
    used = torch.tensor([500, 37], dtype=torch.int32)
    spec = AttentionSpec(head_dim=head_dim, head_dim_v=dim_v, split_kv=True, paged=paged)
    attention = fagen.load(spec, emulate=True, arch=arch)
    caches, table = (k, v), {}
    if paged:
        order = torch.randperm(64, generator=generator)
        table = {"block_table": torch.argsort(order).int().view(2, 32)}
        caches = tuple(x.view(64, 16, 2, -1)[order].clone() for x in (k, v))
    expected = [reference.attention(q[b, None], k[b, None, :n], v[b, None, :n]) for b, n in enumerate(used.tolist())]
    for parts in (1, 3):
        o, lse = attention(q, *caches, seqused_k=used, num_splits=parts, return_lse=True, _poison=True, **table)
        assert compare_o(o, torch.cat([o for o, _ in expected]), OUTPUT_BUDGET["bf16"]).passed
        assert compare_lse(lse, torch.cat([lse for _, lse in expected])).passed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_splits": 0}, "num_splits=0 must be an integer from 1 to 128"),
        ({"num_splits": 129}, "num_splits=129 must be"),
        ({"num_splits": True}, "num_splits=True must be"),
        ({"num_splits": 2.0}, "num_splits=2.0 must be"),
        (
            {"seqused_k": torch.tensor([1, 2, 3])},
            r"seqused_k is torch.int64 \(3,\) on cpu; expected int32 \(3,\) on cpu",
        ),
        (
            {"seqused_k": torch.tensor([1, 2], dtype=torch.int32)},
            r"seqused_k is torch.int32 \(2,\) .*expected int32 \(3,\)",
        ),
        ({"seqused_k": [1, 2, 3]}, r"seqused_k=\[1, 2, 3\]; expected"),
        ({"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)}, "cu_seqlens_q is given, but .*varlen=True"),
    ],
)
def test_values_that_mean_nothing(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fagen.load(SPEC, emulate=True)(*inputs(1, 20), **change)


def test_more_rows_than_are_counted() -> None:
    q, k = (torch.zeros(64).bfloat16().expand(2**16, 1, heads, 64) for heads in (2**15, 1))
    with pytest.raises(SpecError, match=r"2147483648 rows of q .*; at most 2147483647"):
        fagen.load(SPEC, emulate=True)(q, k, k)


def test_not_without_the_feature_nor_with_some() -> None:
    with pytest.raises(SpecError, match=r"num_splits is given, but .*split_kv=True"):
        fagen.load(AttentionSpec(head_dim=64), emulate=True)(*inputs(1, 20), num_splits=2)
    attention = fagen.load(SPEC, emulate=True)
    attention(*inputs(1, 20), num_splits=1)
    with pytest.raises(SpecError, match="num_splits=True must be"):  # also behind a call with what equals it
        attention(*inputs(1, 20), num_splits=True)
    with pytest.raises(SpecError, match=r"block_table is given, but .*paged=True"):
        fagen.load(SPEC, emulate=True)(*inputs(1, 20), block_table=torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(SpecError, match="paged=True needs split_kv=True, for few queries, or varlen=True"):
        AttentionSpec(head_dim=64, paged=True)
    for name in ("backward", "varlen"):
        with pytest.raises(SpecError, match=f"split_kv=True with {name}=True is not served"):
            AttentionSpec(head_dim=64, split_kv=True, **{name: True})


@given(st.integers(1, 600), st.integers(1, 2000), st.integers(1, 300))
def test_how_many_parts(blocks: int, steps: int, at_once: int) -> None:
    """Within 5% of the best, and with fewer parts it would not be."""

    def time(parts: int) -> int:
        return -(-blocks * parts // at_once) * -(-steps // parts)

    parts = schedule.splits(blocks, steps, at_once)
    best = min(time(n) for n in range(1, min(128, steps) + 1))
    assert 1 <= parts <= 128 and time(parts) <= 1.05 * best
    assert all(time(n) > 1.05 * best for n in range(1, parts))


def test_traced() -> None:
    attention = fagen.load(SPEC, emulate=True)
    q, k, v = inputs(2, 90)
    used = torch.tensor([5, 90, 40], dtype=torch.int32)
    compiled = torch.compile(lambda *x: attention(*x, seqused_k=used, num_splits=2), backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v), attention(q, k, v, seqused_k=used, num_splits=2))


@pytest.mark.gpu
def test_captured_with_lengths_that_change() -> None:
    q, k, v = inputs(1, 4000, "cuda")
    used = torch.full((3,), 4000, dtype=torch.int32, device="cuda")
    attention = fagen.load(SPEC)
    attention(q, k, v, seqused_k=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, seqused_k=used)
    for lengths in ([4000, 1, 300], [0, 17, 3999]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        each = [reference.attention(q[b, None], k[b, None, :n], v[b, None, :n])[0] for b, n in enumerate(lengths)]
        assert compare_o(o, torch.cat(each), OUTPUT_BUDGET["bf16"]).passed
