"""Cases of the case list whose keys lie in a cache or in packed sequences: the right value follows from the definition.

The same dense inputs are laid out as each kind of kernel takes them, with other memory between and behind the keys.
tests/test_numbers.py has the dense forms, and what is asserted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_numbers import (
    assert_cancelled,
    assert_gradient,
    assert_lse,
    assert_o,
    far_apart,
    full,
    normal,
    to_device,
)
from torch import Tensor

import fagen
from fagen import reference
from fagen.check import DTYPES, Inputs, differentiate
from fagen.spec import AttentionSpec

PAGE = 16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = ["bf16", "fp16"]
BEHIND = 5  # rows behind the keys of each entry that are none of them


class Form:
    """How keys lie: "split" in a cache, "paged" in pages of 16 in random order, "packed" behind each other."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Sequence[int] | None = None,
        *,
        causal: bool = False,
        parts: int | None = None,
        fill: float = math.nan,
        **call: Any,
    ) -> tuple[Tensor, Tensor]:
        """o and lse of the first `lengths` keys of each entry, all by default. Memory of no key holds `fill`."""
        batch, seqlen_q, heads, head_dim = q.shape
        lengths = [k.shape[1]] * batch if lengths is None else lengths
        spec = AttentionSpec(
            head_dim=head_dim,
            dtype=next(name for name, dtype in DTYPES.items() if dtype == q.dtype),
            causal=causal,
            softcap="softcap" in call,
            split_kv=self.name != "packed",
            paged=self.name == "paged",
            varlen=self.name == "packed",
        )
        call["seqused_k"] = self._int32(lengths)
        if self.name == "paged":
            k, v, table = in_pages(k, v, lengths, fill)
            call["block_table"] = table.to(self.device)
        else:
            k, v = (with_rows_behind(x, lengths, fill) for x in (k, v))
        if self.name == "packed":
            rows = k.shape[1]
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            call["cu_seqlens_q"] = self._int32([b * seqlen_q for b in range(batch + 1)])
            call["cu_seqlens_k"] = self._int32([b * rows for b in range(batch + 1)])
        else:
            call["num_splits"] = parts
        attention = fagen.load(spec, emulate=self.device == "cpu")
        o, lse = attention(*(x.to(self.device) for x in (q, k, v)), return_lse=True, _poison=True, **call)
        if self.name == "packed":
            o = o.view(batch, seqlen_q, heads, -1)
            lse = lse.view(heads, batch, seqlen_q).transpose(0, 1)
        return o.cpu().double(), lse.cpu().double()

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def with_rows_behind(x: Tensor, lengths: Sequence[int], fill: float) -> Tensor:
    stored = torch.full((x.shape[0], x.shape[1] + BEHIND, *x.shape[2:]), fill, dtype=x.dtype)
    for b, length in enumerate(lengths):
        stored[b, :length] = x[b, :length]
    return stored


def in_pages(k: Tensor, v: Tensor, lengths: Sequence[int], fill: float) -> tuple[Tensor, Tensor, Tensor]:
    """Pages of k and v, more than are needed, and block_table, whose entries past the lengths name no page at all."""
    needed = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    pages_k, pages_v = (torch.full((len(order), PAGE, *x.shape[2:]), fill, dtype=x.dtype) for x in (k, v))
    for b, length in enumerate(lengths):
        for i in range(needed[b]):
            page = table[b, i] = order.pop()
            keys = slice(i * PAGE, min(length, (i + 1) * PAGE))
            for pages, dense in ((pages_k, k), (pages_v, v)):
                pages[page, : keys.stop - keys.start] = dense[b, keys]
    return pages_k, pages_v, table


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["split", "paged", "packed"])
def form(request: pytest.FixtureRequest, device: str) -> Form:
    return Form(request.param, device)


@pytest.fixture(params=["split", "paged"])
def cache(request: pytest.FixtureRequest, device: str) -> Form:
    return Form(request.param, device)


def parts_of(form: Form) -> list[int | None]:
    return [None] if form.name == "packed" else [None, 1, 2, 8]


@pytest.mark.parametrize("dtype", TYPES)
def test_n1_rows_above_the_first_key(form: Form, dtype: str) -> None:
    """N1: Sq=4, Sk=2, causal, q=0. Rows 0 and 1 see nothing, row 2 one key."""
    k, v = normal(dtype, 1, 2, 2, 64), normal(dtype, 1, 2, 2, 64, seed=1)
    of_query_heads = v[0].double().repeat_interleave(4, 1)
    for parts in parts_of(form):
        o, lse = form(full(dtype, 0, 1, 4, 8, 64), k, v, causal=True, parts=parts)
        assert not o[0, :2].any() and torch.equal(o[0, 2], of_query_heads[0])
        assert_o(o[0, 3], of_query_heads.mean(0), dtype)
        assert_lse(lse[0], torch.tensor([-math.inf, -math.inf, 0.0, math.log(2)]))


@pytest.mark.parametrize("causal", [False, True])
def test_n1_decoding_of_nothing(form: Form, causal: bool) -> None:
    """N1's kind at Sq=1: an entry without keys beside others of one and two."""
    k, v = normal("bf16", 3, 2, 2, 64), normal("bf16", 3, 2, 2, 64, seed=1)
    of_query_heads = v.double().repeat_interleave(4, 2)
    for parts in parts_of(form):
        o, lse = form(full("bf16", 0, 3, 1, 8, 64), k, v, [0, 1, 2], causal=causal, parts=parts)
        assert not o[0].any() and torch.equal(o[1], of_query_heads[1, :1])
        assert_o(o[2, 0], of_query_heads[2].mean(0), "bf16")
        assert_lse(lse[..., 0], torch.tensor([-math.inf, 0.0, math.log(2)])[:, None])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_n1_gradients_packed(device: str, dtype: str, deterministic: bool) -> None:
    """N1, packed, before a sequence that is whole: rows 0 and 1 touch nothing; row 2 has one key, row 3 two."""
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=True, varlen=True, backward=True, deterministic=deterministic)
    k, v, d_o = (normal(dtype, rows, 1, 64, seed=seed) for seed, rows in enumerate((5, 5, 7)))
    d_o[3] = v[0] - v[1]  # dP of the two apart, so that dS is no small difference
    _, _, (dq, dk, dv) = packed(spec, device, full(dtype, 0, 7, 1, 64), k, v, d_o, [0, 4, 7], [0, 2, 5])
    k, v, d_o = (x[:, 0].double() for x in (k, v, d_o))
    assert not dq[:2].any() and not dk.any() and dq.isfinite().all()
    assert_cancelled(dq[2])
    assert_gradient(dq[3, 0], d_o[3] @ (v[0] - v[1]) / 4 * (k[0] - k[1]) / 8, dtype)
    assert_gradient(dv[:2, 0], torch.stack([d_o[2] + d_o[3] / 2, d_o[3] / 2]), dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 16), (4, 16), (1, 300)])
def test_n3_scores_of_minus_8192(form: Form, dtype: str, seqlen_q: int, seqlen_k: int) -> None:
    """N3: D=64, q=32, k=-32: every s = -8192; parts without keys weigh nothing beside it."""
    q, k = full(dtype, 32, 1, seqlen_q, 8, 64), full(dtype, -32, 1, seqlen_k, 2, 64)
    v = normal(dtype, 1, seqlen_k, 2, 64)
    for parts in parts_of(form):
        o, lse = form(q, k, v, parts=parts)
        assert_o(o, v.double().mean(1, keepdim=True).repeat_interleave(4, 2), dtype)
        assert_lse(lse, -8192 + math.log(seqlen_k))


@pytest.mark.parametrize("dtype", TYPES)
def test_n7_causal_mask_after_the_cap(form: Form, dtype: str) -> None:
    """N7: S=2, causal, softcap=1, q=0: a mask before the cap would let row 0 see key 1."""
    k, v = normal(dtype, 1, 2, 2, 64), normal(dtype, 1, 2, 2, 64, seed=1)
    of_query_heads = v[0].double().repeat_interleave(4, 1)
    for parts in parts_of(form):
        o, lse = form(full(dtype, 0, 1, 2, 8, 64), k, v, causal=True, softcap=1.0, parts=parts)
        assert torch.equal(o[0, 0], of_query_heads[0])
        assert_o(o[0, 1], of_query_heads.mean(0), dtype)
        assert not lse[..., 0].any()
        assert_lse(lse[..., 1], math.log(2))


def test_n7_keys_behind_the_length_after_the_cap(form: Form) -> None:
    """N7's kind at Sq=1: of two keys one counts; the other would weigh exp(-1) if it were masked before the cap."""
    k, v = normal("bf16", 1, 2, 1, 64), normal("bf16", 1, 2, 1, 64, seed=1)
    for fill in (0.0, math.nan):
        for parts in parts_of(form):
            o, lse = form(full("bf16", 0, 1, 1, 1, 64), k, v, [1], softcap=1.0, parts=parts, fill=fill)
            assert torch.equal(o[0, 0], v[0, 0].double()) and lse[0, 0, 0] == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_n15_every_number_of_parts(cache: Form, dtype: str) -> None:
    """N15: Sq=1, Hq=8, Hk=2, lengths 1, 17 and 3000 in one batch: right, and the same for every number of parts."""
    lengths = [1, 17, 3000]
    q = normal(dtype, 3, 1, 8, 64)
    k, v = (normal(dtype, 3, 3000, 2, 64, seed=seed) for seed in (1, 2))
    each = [reference.attention(q[b, None], k[b, None, :n], v[b, None, :n]) for b, n in enumerate(lengths)]
    first = cache(q, k, v, lengths, parts=1)
    for parts in (None, 1, 2, 8):
        o, lse = cache(q, k, v, lengths, parts=parts)
        assert o.isfinite().all() and lse.isfinite().all()
        # One tile of keys is one part, whatever their number; of several, each rounds P to its own maximum.
        assert torch.equal(o[:2], first[0][:2])
        assert_o(o, first[0], dtype)
        torch.testing.assert_close(lse, first[1], rtol=1e-6, atol=1e-6)
        assert_o(o, torch.cat([o for o, _ in each]), dtype)
        assert_lse(lse, torch.cat([lse for _, lse in each]))


@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
def test_n16_slots_of_no_key(form: Form, fill: float, seqlen_q: int) -> None:
    """N16: page 16, 13 keys; slots 13 to 15 and pages that are not referenced: the bits of zeros there."""
    q, k, v = (normal("bf16", 1, rows, 2, 64, seed=seed) for seed, rows in enumerate((seqlen_q, 13, 13)))
    for parts in parts_of(form):
        zeros, dirty = (form(q, k, v, causal=True, parts=parts, fill=value) for value in (0.0, fill))
        assert all(torch.equal(x, y) for x, y in zip(dirty, zeros, strict=True))
        assert_o(zeros[0], reference.attention(q, k, v, causal=True)[0], "bf16")


def packed(
    spec: AttentionSpec,
    device: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    begins_q: list[int],
    begins_k: list[int],
    d_lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
    """o, lse and gradients of packed sequences. All memory that the call takes holds NaN before."""
    attention = fagen.load(spec, emulate=device == "cpu")
    cu_seqlens = (torch.tensor(x, dtype=torch.int32, device=device) for x in (begins_q, begins_k))
    call = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True))
    q, k, v, d_o = (to_device(x, device) for x in (q, k, v, d_o))
    d_lse = None if d_lse is None else d_lse.to(device)
    o, lse, gradients = differentiate(attention, Inputs(q, k, v, call), d_o, d_lse)
    dq, dk, dv = (x.cpu().double() for x in gradients)
    return o.cpu().double(), lse.cpu().double(), (dq, dk, dv)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_n17_empty_sequences(device: str, causal: bool, deterministic: bool) -> None:
    """N17: cu_q=[0,0,5,5,7], cu_k=[0,3,7,9,9], memory NaN before: keys without queries, queries without keys."""
    begins_q, begins_k = [0, 0, 5, 5, 7], [0, 3, 7, 9, 9]
    spec = AttentionSpec(head_dim=64, causal=causal, varlen=True, backward=True, deterministic=deterministic)
    q, d_o = (normal("bf16", 7, 4, 64, seed=seed) for seed in (0, 3))
    k, v = (normal("bf16", 9, 2, 64, seed=seed) for seed in (1, 2))
    d_lse = torch.randn(4, 7, generator=torch.Generator().manual_seed(4))
    o, lse, (dq, dk, dv) = packed(spec, device, q, k, v, d_o, begins_q, begins_k, d_lse)
    assert not o[5:].any() and (lse[:, 5:] == -math.inf).all() and not dq[5:].any()
    for x in (dk, dv):
        assert not x[:3].any() and not x[7:].any()
    one = q[None, :5], k[None, 3:7], v[None, 3:7]
    expected_o, expected_lse = reference.attention(*one, causal=causal)
    assert_o(o[None, :5], expected_o, "bf16")
    assert_lse(lse[None, :, :5], expected_lse)
    expected = reference.gradients(*one, d_o[None, :5], d_lse[None, :, :5], causal=causal)
    for x, y in zip((dq[:5], dk[3:7], dv[3:7]), expected, strict=True):
        assert_gradient(x[None], y, "bf16")


def test_n21_one_row_of_many_keys(form: Form) -> None:
    """N21: Sq=1, Sk=33000, q=k=0, v=1: o=1, lse=10.4043."""
    q, k, v = full("bf16", 0, 1, 1, 1, 64), full("bf16", 0, 1, 33000, 1, 64), full("bf16", 1, 1, 33000, 1, 64)
    for parts in parts_of(form):
        o, lse = form(q, k, v, parts=parts)
        assert (o == 1).all()
        assert_lse(lse, 10.4043)


@pytest.mark.parametrize("deterministic", [False, True])
def test_n21_gradients_of_one_row_of_many_keys(device: str, deterministic: bool) -> None:
    """N21, packed: dq=dk=0, dv = do / 33000."""
    spec = AttentionSpec(head_dim=64, varlen=True, backward=True, deterministic=deterministic)
    q, k, v = full("bf16", 0, 1, 1, 64), full("bf16", 0, 33000, 1, 64), full("bf16", 1, 33000, 1, 64)
    d_o = normal("bf16", 1, 1, 64)
    _, _, (dq, dk, dv) = packed(spec, device, q, k, v, d_o, [0, 1], [0, 33000])
    assert not dq.any() and not dk.any()
    assert_gradient(dv, d_o.double() / 33000, "bf16")


@pytest.mark.parametrize("deterministic", [False, True])
def test_n21_packed_do_past_32_bits(device: str, deterministic: bool) -> None:
    """N21: do with strides (2^30, 64, 1): the third row starts 2^31 elements in, and is the second of its sequence."""
    spec = AttentionSpec(head_dim=64, causal=True, varlen=True, backward=True, deterministic=deterministic)
    q, k, v, d_o = (normal("bf16", 3, 2, 64, seed=seed) for seed in range(4))
    spread = far_apart(d_o[None], 2**30)[0]
    assert spread.stride() == (2**30, 64, 1)
    *_, expected = packed(spec, device, q, k, v, d_o, [0, 1, 3], [0, 1, 3])
    *_, gradients = packed(spec, device, q, k, v, spread, [0, 1, 3], [0, 1, 3])
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


@pytest.mark.parametrize("sequences", [40, pytest.param(8300, marks=pytest.mark.gpu)])
def test_n21_many_sequences_of_one_row(device: str, sequences: int) -> None:
    """N21, packed: B=8300, S=1, H=16, D=128: dq=dk=0, dv=do."""
    if device == "cpu" and sequences > 40:
        pytest.skip("too many blocks to emulate")
    heads = 4 if sequences == 40 else 16
    q, k, v, d_o = (normal("bf16", sequences, heads, 128, seed=seed) for seed in range(4))
    begins = list(range(sequences + 1))
    spec = AttentionSpec(head_dim=128, varlen=True, backward=True)
    o, _, (dq, dk, dv) = packed(spec, device, q, k, v, d_o, begins, begins)
    assert torch.equal(o, v.double()) and torch.equal(dv, d_o.double())
    assert_cancelled(dq)
    assert_cancelled(dk)
