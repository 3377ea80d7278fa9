"""The oracle against independent statements of SEMANTICS.md: Python loops, PyTorch's SDPA, formulas of gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fagen import reference
from fagen.errors import SpecError

F64 = torch.float64
INF = math.inf


def inputs(
    batch: int = 2, seqlen_q: int = 5, seqlen_k: int = 7, heads: int = 4, heads_k: int = 2, d: int = 8, dv: int = 6
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seqlen_q * 1000 + seqlen_k)
    return (
        torch.randn(batch, seqlen_q, heads, d, dtype=F64, generator=generator),
        torch.randn(batch, seqlen_k, heads_k, d, dtype=F64, generator=generator),
        torch.randn(batch, seqlen_k, heads_k, dv, dtype=F64, generator=generator),
    )


# ---------------------------------------------------------------- the definition as loops


def philox_loop(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, as the paper writes it."""
    for _ in range(10):
        p0, p1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (p1 >> 32) ^ counter[1] ^ key[0],
            p1 % 2**32,
            (p0 >> 32) ^ counter[3] ^ key[1],
            p0 % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def keep_loop(seed: int, offset: int, head: int, i: int, j: int, p: float) -> bool:
    counter = [(i >> 4) * 8 + (i & 7), (j >> 4) * 4 + ((j & 7) >> 1), head % 2**32, offset % 2**32]
    out = philox_loop(counter, [seed % 2**32, (seed >> 32) % 2**32 ^ (offset >> 32) % 2**32])
    e = (i >> 3 & 1) * 4 + (j >> 3 & 1) * 2 + (j & 1)
    return (out[e >> 1] >> 16 * (e & 1)) & 0xFFFF < max(1, round((1 - p) * 65536))


def loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """SEMANTICS.md, one Python number at a time."""
    batch, seqlen_q, heads, d = q.shape
    seqlen_k, heads_k, dv = v.shape[1:]
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    off = seqlen_k - seqlen_q
    o = torch.zeros(batch, seqlen_q, heads, dv, dtype=F64)
    lse = torch.full((batch, heads, seqlen_q), -INF, dtype=F64)
    for b in range(batch):
        for h in range(heads):
            hk = h // (heads // heads_k)
            for i in range(seqlen_q):
                scores = {}
                for j in range(seqlen_k):
                    if causal and j > i + off:
                        continue
                    if window[0] != -1 and j < i + off - window[0]:
                        continue
                    if window[1] != -1 and j > i + off + window[1]:
                        continue
                    s = scale * sum(float(x) * float(y) for x, y in zip(q[b, i, h], k[b, j, hk], strict=True))
                    if softcap is not None:
                        s = softcap * math.tanh(s / softcap)
                    if alibi_slopes is not None:
                        slope = alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h]
                        s -= float(slope) * abs(i + off - j)
                    scores[j] = s
                if not scores:
                    continue
                top = max(scores.values())
                total = top + math.log(sum(math.exp(s - top) for s in scores.values()))
                lse[b, h, i] = total
                for j, s in scores.items():
                    weight = math.exp(s - total)
                    if dropout_p:
                        kept = keep_loop(seed, offset, b * heads + h, i, j, dropout_p)
                        weight *= kept * 65536 / max(1, round((1 - dropout_p) * 65536))
                    o[b, i, h] += weight * v[b, j, hk]
    return o, lse


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window-left": {"window": (2, -1)},
    "window-right": {"window": (-1, 1)},
    "window-both": {"window": (1, 2)},
    "window-diagonal": {"window": (0, 0)},
    "causal-window": {"causal": True, "window": (2, 5)},
    "softcap": {"softcap": 0.8},
    "alibi-heads": {"alibi_slopes": SLOPES},
    "alibi-batch": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES])},
    "dropout": {"dropout_p": 0.4, "seed": 3, "offset": 2**32 + 5},
    "all": {
        "causal": True,
        "window": (3, 1),
        "softcap": 0.8,
        "alibi_slopes": SLOPES,
        "dropout_p": 0.4,
        "seed": -(2**40),
    },
}


@pytest.mark.parametrize("seqlens", [(5, 7), (7, 5), (1, 9), (4, 4), (18, 20)])
@pytest.mark.parametrize("name", FEATURES)
def test_equals_the_loops(name: str, seqlens: tuple[int, int]) -> None:
    q, k, v = inputs(seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    values = FEATURES[name]
    o, lse = reference.attention(q, k, v, **values)
    expected_o, expected_lse = loop(q, k, v, **values)
    torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("block", [1, 40, 300])
def test_the_size_of_the_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    q, k, v = inputs(batch=3, seqlen_q=37, seqlen_k=20)
    values: dict[str, Any] = {"causal": True, "alibi_slopes": SLOPES, "dropout_p": 0.3, "seed": 11}
    whole = reference.attention(q, k, v, **values)
    monkeypatch.setattr(reference, "BLOCK_SCORES", block)
    for part, full in zip(reference.attention(q, k, v, **values), whole, strict=True):
        torch.testing.assert_close(part, full, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_equals_sdpa_in_float64(causal: bool) -> None:
    q, k, v = inputs(seqlen_q=33, seqlen_k=33)
    o = reference.attention(q, k, v, causal=causal, return_lse=False)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(o, sdpa.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_half_precision_inputs_are_taken_as_they_are() -> None:
    q, k, v = (x.bfloat16() for x in inputs())
    o, lse = reference.attention(q, k, v)
    o64, lse64 = reference.attention(q.double(), k.double(), v.double())
    assert o.dtype == lse.dtype == F64
    assert torch.equal(o, o64) and torch.equal(lse, lse64)


# ---------------------------------------------------------------- rows that see nothing, gradients


@pytest.mark.parametrize(
    ("seqlens", "values"),
    [
        ((4, 2), {"causal": True}),
        ((3, 0), {}),
        ((3, 0), {"causal": True, "softcap": 1.0, "dropout_p": 0.5, "seed": 1}),
        ((3, 3), {"window": (-1, -1), "causal": True}),
        ((9, 4), {"window": (1, 1), "alibi_slopes": SLOPES, "softcap": 2.0}),
    ],
)
def test_rows_that_see_nothing(seqlens: tuple[int, int], values: dict[str, Any]) -> None:
    """o = 0, lse = -inf, gradients 0, no NaN."""
    q, k, v = (x.requires_grad_() for x in inputs(seqlen_q=seqlens[0], seqlen_k=seqlens[1]))
    o, lse = reference.attention(q, k, v, **values)
    blind = torch.isneginf(lse[0, 0])
    off = seqlens[1] - seqlens[0]
    left, right = values.get("window", (-1, -1))
    for i in range(seqlens[0]):
        low = 0 if left < 0 else i + off - left
        high = min(
            seqlens[1] - 1, *([i + off] if values.get("causal") else []), *([i + off + right] * (right >= 0)), INF
        )
        assert bool(blind[i]) == (max(low, 0) > high)
    assert torch.equal(o[:, blind], torch.zeros_like(o[:, blind]))
    (o.sum() + lse[:, :, ~blind].sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None and torch.isfinite(x.grad).all()
    assert q.grad is not None and not q.grad[:, blind].any()


@pytest.mark.parametrize(
    ("batch", "seqlen_q", "seqlen_k", "heads"), [(0, 3, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (1, 2, 2, 0)]
)
def test_empty_inputs(batch: int, seqlen_q: int, seqlen_k: int, heads: int) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(batch, seqlen_q, seqlen_k, heads, heads // 2))
    o, lse = reference.attention(q, k, v, causal=True, dropout_p=0.1, seed=0)
    assert o.shape == (batch, seqlen_q, heads, 6) and lse.shape == (batch, heads, seqlen_q)
    o.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape and not x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("seqlens", [(3, 4), (4, 2)])
def test_gradients_by_finite_differences(name: str, seqlens: tuple[int, int]) -> None:
    """Of o, and of lse where it is finite."""
    call = FEATURES[name]
    seen, _ = reference.seen(*seqlens, causal=call.get("causal", False), window=call.get("window", (-1, -1)))

    def results(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = reference.attention(*leaves, **call)
        return o, lse[:, :, seen]

    leaves = [x.requires_grad_() for x in inputs(2, *seqlens, heads=4, heads_k=2, d=3, dv=2)]
    assert torch.autograd.gradcheck(results, leaves)


def test_gradients_of_many_blocks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that autograd computes again, dropout and rows that see nothing included."""
    q, k, v = inputs(seqlen_q=40, seqlen_k=21)
    d_o, d_lse = torch.randn(2, 40, 4, 6, dtype=F64), torch.randn(2, 4, 40, dtype=F64)
    call: dict[str, Any] = {"causal": True, "dropout_p": 0.3, "seed": 5}
    expected = reference.gradients(q, k, v, d_o, d_lse, **call)
    monkeypatch.setattr(reference, "BLOCK_SCORES", 2 * 4 * 21 * 7)
    for x, y in zip(reference.gradients(q, k, v, d_o, d_lse, **call), expected, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_gradients_are_those_of_the_formulas(softcap: float | None, dropout_p: float) -> None:
    """SEMANTICS.md, Gradients, written out, with a gradient through lse and rows that see nothing."""
    seqlen_q, seqlen_k, scale = 6, 5, 0.5
    q, k, v = (x.requires_grad_() for x in inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k))
    o, lse = reference.attention(
        q, k, v, softmax_scale=scale, causal=True, softcap=softcap, alibi_slopes=SLOPES, dropout_p=dropout_p, seed=4
    )
    generator = torch.Generator().manual_seed(1)
    do = torch.randn(o.shape, dtype=F64, generator=generator)
    dlse = torch.randn(lse.shape, dtype=F64, generator=generator).masked_fill(torch.isneginf(lse), 0)
    torch.autograd.backward((o, lse), (do, dlse))

    with torch.no_grad():
        k_, v_ = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        raw = scale * torch.einsum("bihd,bjhd->bhij", q, k_)
        t = torch.tanh(raw / softcap) if softcap else raw
        distance = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q - torch.arange(seqlen_k)
        s = (softcap * t if softcap else raw) - SLOPES.double()[None, :, None, None] * distance.abs()
        p = torch.exp(s.masked_fill(distance < 0, -INF) - lse[..., None].masked_fill(torch.isneginf(lse[..., None]), 0))
        mask = reference.dropout_mask(4, 0, 2, 4, seqlen_q, seqlen_k, dropout_p)
        drop = mask.double() * 65536 / reference.keep_threshold(dropout_p)
        dp = drop * torch.einsum("bihd,bjhd->bhij", do, v_)
        ds = p * (dp - ((p * dp).sum(3) - dlse)[..., None])
        ds = ds * (1 - t**2) if softcap else ds
        dq = scale * torch.einsum("bhij,bjhd->bihd", ds, k_)
        dk = scale * torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (2, 2)).sum(3)
        dv = torch.einsum("bhij,bihd->bjhd", p * drop, do).unflatten(2, (2, 2)).sum(3)
    for x, expected in ((q, dq), (k, dk), (v, dv)):
        torch.testing.assert_close(x.grad, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("poison", [math.nan, INF])
def test_what_no_row_sees_never_reaches_a_result(poison: float) -> None:
    q, k, v = inputs(seqlen_q=2, seqlen_k=9)
    clean = reference.attention(q, k, v, window=(2, 0))
    k[:, :5], v[:, :5] = poison, poison
    q.requires_grad_()
    dirty = reference.attention(q, k, v, window=(2, 0))
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    dirty[0].sum().backward()
    assert q.grad is not None and torch.isfinite(q.grad).all()


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    """The known-answer vectors of Random123 (kat_vectors, philox4x32 10)."""
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in reference.philox((c0, c1, c2, c3), key)) == expected
    assert tuple(philox_loop(list(counter), list(key))) == expected


@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    size=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    p=st.floats(0, 1, exclude_max=True),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_dropout_mask_element_by_element(
    seed: int, offset: int, size: tuple[int, int, int, int], p: float, data: st.DataObject
) -> None:
    mask = reference.dropout_mask(seed, offset, *size, p)
    assert mask.shape == size and mask.dtype == torch.bool
    for _ in range(20):
        b, h, i, j = (data.draw(st.integers(0, n - 1)) for n in size)
        assert bool(mask[b, h, i, j]) == keep_loop(seed, offset, b * size[1] + h, i, j, p)


def test_dropout_mask_depends_on_nothing_but_its_arguments() -> None:
    """The same (seed, offset, b, h, i, j) in another size is the same value; another seed or offset is another mask."""
    mask = reference.dropout_mask(5, 1, 2, 3, 50, 70, 0.5)
    assert torch.equal(mask[:1, :, :19, :33], reference.dropout_mask(5, 1, 1, 3, 19, 33, 0.5))
    for seed, offset in [(6, 1), (5, 2), (5 + 2**32, 1), (5, 1 + 2**32)]:
        other = reference.dropout_mask(seed, offset, 2, 3, 50, 70, 0.5)
        assert 0.45 < (mask == other).double().mean() < 0.55


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.1, 0.5, 0.9, 0.99999])
def test_dropout_keeps_with_the_quantised_probability(p: float) -> None:
    threshold = reference.keep_threshold(p)
    assert 1 <= threshold <= 65536 and (abs(threshold / 65536 - (1 - p)) <= 0.5 / 65536 or threshold == 1)
    kept = reference.dropout_mask(7, 0, 2, 4, 256, 256, p).double()
    expected, deviation = threshold / 65536, math.sqrt(threshold / 65536 * (1 - threshold / 65536) / kept.numel())
    assert abs(kept.mean() - expected) <= 5 * deviation
    if p == 0:
        assert kept.all()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan])
def test_dropout_p_outside_its_range(p: float) -> None:
    with pytest.raises(SpecError, match="dropout_p"):
        reference.keep_threshold(p)
    with pytest.raises(SpecError, match="dropout_p"):
        reference.attention(*inputs(), dropout_p=p, seed=0)


def test_lse_is_that_of_the_undropped_softmax() -> None:
    q, k, v = inputs()
    assert torch.equal(reference.attention(q, k, v, dropout_p=0.5, seed=1)[1], reference.attention(q, k, v)[1])


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((1, 2, 3, 8), (1, 2, 2, 8), (1, 2, 2, 8)), "multiple"),
        (((1, 2, 2, 8), (1, 2, 2, 16), (1, 2, 2, 8)), "belong"),
        (((1, 2, 2, 8), (1, 3, 2, 8), (1, 2, 2, 8)), "belong"),
        (((2, 2, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8)), "belong"),
        (((2, 2, 8), (1, 2, 2, 8), (1, 2, 2, 8)), "B, S, H, D"),
    ],
)
def test_shapes_that_do_not_belong_together(shapes: tuple[tuple[int, ...], ...], match: str) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(SpecError, match=match):
        reference.attention(q, k, v)


def test_unknown_modification_and_missing_seed() -> None:
    with pytest.raises(SpecError, match="softcup"):
        reference.attention(*inputs(), softcup=1.0)
    with pytest.raises(SpecError, match="seed"):
        reference.attention(*inputs(), dropout_p=0.5)
