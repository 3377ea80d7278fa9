"""`flash_attn_with_kvcache`: new keys go where they should, and the queries see them and what was there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import reference
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.errors import SpecError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = [40, 0, 77]


def normal(*shape: int, seed: int = 0, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(device)


def caches(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(3, 90, 2, 64), NaN behind the lengths."""
    k, v = (normal(3, 90, 2, 64, seed=seed, device=device) for seed in (1, 2))
    for b, length in enumerate(LENGTHS):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    return k, v


def each(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], **call: Any) -> tuple[Tensor, Tensor]:
    results = [reference.attention(q[b, None], k[b, None, :n], v[b, None, :n], **call) for b, n in enumerate(lengths)]
    return torch.cat([o for o, _ in results]), torch.cat([lse for _, lse in results])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        ({}, {}),
        ({"causal": True, "num_splits": 3}, {"causal": True}),
        ({"window_size": (10, 0), "softcap": 5.0}, {"causal": True, "window": (10, -1), "softcap": 5.0}),
        ({"softmax_scale": 0.3, "num_splits": 1}, {"softmax_scale": 0.3}),
    ],
)
def test_a_cache_as_it_is(arguments: dict[str, Any], call: dict[str, Any], device: str) -> None:
    q = normal(3, 4, 8, 64, device=device)
    k, v = caches(device)
    used = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    o, lse = fagen.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, return_softmax_lse=True, **arguments)
    expected_o, expected_lse = each(q, k, v, LENGTHS, **call)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed
    same = fagen.flash_attn_with_kvcache(q, k[:, :40], v[:, :40], cache_seqlens=30, **arguments)
    assert torch.equal(same[:1], fagen.flash_attn_with_kvcache(q, k[:, :30], v[:, :30], **arguments)[:1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_keys_behind_a_padding(num_splits: int, device: str) -> None:
    """cache_leftpad: rows before it are no keys and may hold anything; in pages likewise, with the same bits."""
    q = normal(3, 2, 8, 64, device=device)
    k, v = caches(device)
    pads = [0, 0, 37]
    k[2, :37], v[2, :37] = torch.nan, torch.nan
    used, leftpad = (torch.tensor(x, dtype=torch.int32, device=device) for x in (LENGTHS, pads))
    call = {"cache_seqlens": used, "cache_leftpad": leftpad, "causal": True, "num_splits": num_splits}
    o, lse = fagen.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **call)
    shifted = [torch.stack([x[b].roll(-pad, 0) for b, pad in enumerate(pads)]) for x in (k, v)]
    expected_o, expected_lse = each(q, *shifted, [n - pad for n, pad in zip(LENGTHS, pads, strict=True)], causal=True)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 6)).view(18, 16, 2, 64) for x in (k, v))
    order = torch.randperm(18, generator=torch.Generator().manual_seed(0)).to(device)
    table = torch.argsort(order).int().view(3, 6)
    assert torch.equal(o, fagen.flash_attn_with_kvcache(q, k[order], v[order], block_table=table, **call))


@pytest.mark.parametrize("device", DEVICES)
def test_entries_of_a_larger_cache(device: str) -> None:
    """cache_batch_idx: new keys go to the entries that it names, which are then those of the queries."""
    q, new_k, new_v = (normal(2, 3, h, 64, seed=s, device=device) for h, s in ((8, 3), (2, 4), (2, 5)))
    k, v = caches(device)
    before = k.clone()
    index, used = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0], [77, 40]))
    entries = {"cache_seqlens": used, "cache_batch_idx": index}
    o = fagen.flash_attn_with_kvcache(q, k, v, new_k, new_v, causal=True, **entries)
    assert torch.equal(k[2, 77:80], new_k[0]) and torch.equal(k[0, 40:43], new_k[1])
    assert torch.equal(k[1].nan_to_num(), before[1].nan_to_num())
    expected_o, _ = each(q, k[index.long()], v[index.long()], [80, 43], causal=True)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed


def rotated(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """The definition, in complex numbers: columns in pairs are turned by the angles (S, pairs)."""
    pairs = angles.shape[1]
    head = x[..., : 2 * pairs].double()
    z = torch.complex(*((head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, 3)))
    z = z * torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.stack((z.real, z.imag), 4).flatten(3) if interleaved else torch.cat((z.real, z.imag), 3)
    return torch.cat((turned, x[..., 2 * pairs :].double()), 3).bfloat16()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_new_keys_with_a_rotary_embedding(causal: bool, interleaved: bool, device: str) -> None:
    """Rows behind the lengths get them, no others change; positions of queries without a mask are all the first."""
    q, new_k, new_v = (normal(3, 5, h, 64, seed=s, device=device) for h, s in ((8, 3), (2, 4), (2, 5)))
    k, v = caches(device)
    before = k.clone()
    angles = torch.rand(90, 16, dtype=torch.float64) * 6
    cos, sin = (f(angles).float().to(device) for f in (torch.cos, torch.sin))
    o = fagen.flash_attn_with_kvcache(
        *(q, k, v, new_k, new_v, cos, sin),
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        causal=causal,
        rotary_interleaved=interleaved,
    )
    angles = angles.to(device)
    turned_q = []
    for b, n in enumerate(LENGTHS):
        expected = rotated(new_k[b, None], angles[n : n + 5], interleaved)[0]
        assert (k[b, n : n + 5].double() - expected.double()).abs().max() <= 2**-6  # a rounding of float32 apart
        assert torch.equal(v[b, n : n + 5], new_v[b])
        assert torch.equal(k[b, :n], before[b, :n]) and k[b, n + 5 :].isnan().all()
        turned_q.append(rotated(q[b, None], angles[n : n + 5] if causal else angles[n].expand(5, -1), interleaved))
    expected_o, _ = each(torch.cat(turned_q), k, v, [n + 5 for n in LENGTHS], causal=causal)
    # An element of q may be rounded the other way: 2^-8 of it.
    assert compare_o(o, expected_o, 2 * OUTPUT_BUDGET["bf16"]).passed


@pytest.mark.parametrize("device", DEVICES)
def test_token_by_token_is_the_whole(device: str) -> None:
    q, new_k, new_v = (normal(2, 20, h, 64, seed=s, device=device) for h, s in ((4, 3), (2, 4), (2, 5)))
    k, v = (torch.full((2, 32, 2, 64), torch.nan, device=device).bfloat16() for _ in range(2))
    steps = []
    for i in range(20):
        at = slice(i, i + 1)
        used = torch.full((2,), i, dtype=torch.int32, device=device)
        steps.append(
            fagen.flash_attn_with_kvcache(
                q[:, at], k, v, new_k[:, at], new_v[:, at], cache_seqlens=used, causal=True, num_splits=2
            )
        )
    expected, _ = reference.attention(q, new_k, new_v, causal=True)
    assert compare_o(torch.cat(steps, 1), expected, OUTPUT_BUDGET["bf16"]).passed


@pytest.mark.parametrize("device", DEVICES)
def test_token_by_token_in_pages(device: str) -> None:
    """Pages that lie apart fill up one after the other, in the bits of a contiguous cache."""
    q, new_k, new_v = (normal(2, 40, h, 64, seed=s, device=device) for h, s in ((4, 3), (2, 4), (2, 5)))
    dense = [torch.full((2, 48, 2, 64), torch.nan, device=device).bfloat16() for _ in range(2)]
    pages = [torch.full((9, 16, 2, 64), torch.nan, device=device).bfloat16() for _ in range(2)]
    table = torch.tensor([[5, 0, 7], [8, 2, 3]], dtype=torch.int32, device=device)
    for i in range(0, 40, 5):
        at = slice(i, i + 5)
        used = torch.full((2,), i, dtype=torch.int32, device=device)
        new = {"k": new_k[:, at], "v": new_v[:, at], "cache_seqlens": used, "causal": True, "num_splits": 2}
        o = fagen.flash_attn_with_kvcache(q[:, at], *pages, block_table=table, **new)
        assert torch.equal(o, fagen.flash_attn_with_kvcache(q[:, at], *dense, **new))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros(3, 1)}, "block_table is given: pass cache_seqlens"),
        ({"cache_batch_idx": torch.zeros(3)}, r"cache_batch_idx is torch.float32 \(3,\) .*int32 \(3,\)"),
        ({"cache_leftpad": [0, 1, 2]}, r"cache_leftpad=\[0, 1, 2\]; expected int32 \(3,\)"),
        (
            {"block_table": torch.zeros(3, 1).int()}
            | dict.fromkeys(("cache_seqlens", "cache_batch_idx"), torch.ones(3).int()),
            "cache_batch_idx and block_table exclude each other",
        ),
        ({"k": normal(3, 1, 2, 64)}, "k and v go together"),
        ({"k": normal(3, 1, 2, 64), "v": normal(3, 1, 2, 64)}, "pass cache_seqlens"),
        (dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(9, 8)), "a rotary embedding goes with new keys"),
        ({"rotary_cos": torch.zeros(9, 8)}, "rotary_cos and rotary_sin go together"),
        ({"cache_seqlens": 8.5}, r"cache_seqlens=8.5; expected an integer or int32 \(3,\)"),
        ({"cache_seqlens": True}, "cache_seqlens=True; expected an integer"),
        ({"v_cache": normal(3, 90, 1, 64)}, r"v_cache \(3, 90, 1, 64\): equal but for the last"),
        (
            {"k": normal(3, 1, 2, 64), "v": normal(3, 1, 1, 64), "cache_seqlens": 3},
            r"v is torch.bfloat16 \(3, 1, 1, 64\) .*v_cache wants torch.bfloat16 \(3, 1, 2, 64\)",
        ),
        (
            {"k": normal(3, 1, 2, 64), "v": normal(3, 2, 2, 64), "cache_seqlens": 3},
            r"v_cache wants torch.bfloat16 \(3, 1, 2, 64\)",
        ),
        ({"cache_seqlens": torch.tensor([1, 2, 3])}, r"cache_seqlens is torch.int64 \(3,\) .*int32 \(3,\)"),
        ({"q": normal(1, 8, 64)}, r"expected \(batch, seqlen, heads, head_dim\)"),
        ({"q": normal(3, 1, 8, 64).requires_grad_()}, "no gradients: call it under torch.no_grad"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], message: str) -> None:
    """Before anything is written to the caches."""
    k, v = caches()
    copies = k.clone(), v.clone()
    arguments = {"q": normal(3, 1, 8, 64), "k_cache": k, "v_cache": v} | change
    with pytest.raises(SpecError, match=message):
        fagen.flash_attn_with_kvcache(**arguments)
    for cache, copy in zip((k, v), copies, strict=True):
        assert torch.equal(cache.nan_to_num(), copy.nan_to_num())
