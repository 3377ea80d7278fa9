"""Packed sequences: each as if it were alone, whatever lies between, and nothing of the lengths on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fagen
from fagen import prepared, reference
from fagen.check import GRADIENT_BUDGET, OUTPUT_BUDGET, compare_gradient, compare_lse, compare_o
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PLAIN = AttentionSpec(head_dim=64, varlen=True)
MMA = {"cpu": "sm80", "cuda": "sm90"}  # where calls of one sequence run the kernel that packed ones do


def cumulative(lengths: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)


def packed(spec: AttentionSpec, queries: int, keys: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, 4, spec.head_dim), (keys, 2, spec.head_dim), (keys, 2, spec.dim_v))
    return tuple(torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("features", [(), ("causal",), ("window", "softcap"), ("alibi",)])
@pytest.mark.parametrize("hopper", [False, True])
def test_each_sequence_as_if_it_were_alone(hopper: bool, features: tuple[str, ...], device: str) -> None:
    """The same bits as a call of its own, empty sequences among them, also with queries and no keys."""
    on = dict.fromkeys(features, True)
    lengths_q, lengths_k = [70, 0, 5, 130, 33], [90, 40, 0, 100, 200]
    values: dict[str, Any] = {"window": (30, 10)} if "window" in features else {}
    values |= {"softcap": 20.0} if "softcap" in features else {}
    values |= {"alibi_slopes": torch.rand(4, device=device)} if "alibi" in features else {}
    q, k, v = packed(PLAIN, sum(lengths_q), sum(lengths_k), device)
    emulate = device == "cpu"
    arch = "sm90a" if hopper else MMA[device]
    attention = fagen.load(AttentionSpec(head_dim=64, varlen=True, **on), arch=arch, emulate=emulate)
    o, lse = attention(
        *(q, k, v),
        cu_seqlens_q=cumulative(lengths_q, device),
        cu_seqlens_k=cumulative(lengths_k, device),
        max_seqlen_q=130,
        max_seqlen_k=200,
        return_lse=True,
        _poison=True,
        **values,
    )
    alone = fagen.load(AttentionSpec(head_dim=64, **on), arch=arch, emulate=emulate)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    each = [alone(*(x[None] for x in part), return_lse=True, **values) for part in parts]
    assert torch.equal(o, torch.cat([o[0] for o, _ in each]))
    assert torch.equal(lse, torch.cat([lse[0] for _, lse in each], 1))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_the_count_of_tiles_ends_at_0(causal: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that take one tile, several, or none: one counter serves call after call, packed and dense."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(prepared, "zero_counter", lambda *_, **__: counter)
    packed_attention, dense = (
        fagen.load(AttentionSpec(head_dim=head_dim, causal=causal, varlen=varlen), arch="sm90a", emulate=True)
        for varlen in (True, False)
    )
    for lengths in ([3, 0, 0], [0, 0], [200, 0, 150, 1], [500]):
        q = torch.randn(sum(lengths), 2, head_dim).bfloat16()
        begins = cumulative(lengths)
        o = packed_attention(q, q, q, cu_seqlens_q=begins, cu_seqlens_k=begins, _poison=True)
        assert counter == 0
        if sum(lengths):
            expected, _ = reference.packed(q, q, q, begins, begins, causal=causal)
            assert compare_o(o, expected, OUTPUT_BUDGET["bf16"]).passed
            o = dense(q[None], q[None], q[None], _poison=True)
            assert counter == 0
            expected, _ = reference.attention(q[None], q[None], q[None], causal=causal)
            assert compare_o(o, expected, OUTPUT_BUDGET["bf16"]).passed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_pages_of_packed_queries(head_dim: int, size: int, device: str) -> None:
    """The bits of the keys one after the other, through flash-attention's function; NaN in slots that hold no key."""
    lengths_q, lengths_k = [70, 0, 5, 33], [90, 40, 130, 0]
    spec = AttentionSpec(head_dim=head_dim, causal=True, varlen=True)
    q, k, v = packed(spec, sum(lengths_q), sum(lengths_k), device)
    count = -(-max(lengths_k) // size)
    order = torch.randperm(4 * count, generator=torch.Generator().manual_seed(0)).view(4, count)
    pages = []
    for x in (k, v):
        slots = x.new_full((4, count * size, *x.shape[1:]), torch.nan)
        for b, keys in enumerate(x.split(lengths_k)):
            slots[b, : len(keys)] = keys
        made = torch.empty_like(slots).view(4 * count, size, *x.shape[1:])
        made[order.flatten().to(device)] = slots.view_as(made)
        pages.append(made)
    begins = cumulative(lengths_q, device), cumulative(lengths_k, device)
    o, lse, _ = fagen.flash_attn_varlen_func(
        *(q, *pages, *begins, max(lengths_q), max(lengths_k)),
        causal=True,
        return_attn_probs=True,
        block_table=order.int().to(device),
    )
    contiguous = fagen.load(spec, arch=MMA[device], emulate=device == "cpu")
    longest = {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    expected = contiguous(
        *(q, k, v), cu_seqlens_q=begins[0], cu_seqlens_k=begins[1], return_lse=True, _poison=True, **longest
    )
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_no_sequence_and_keys_that_do_not_count(device: str) -> None:
    """They hold NaN, and results between, before and behind stay as they were."""
    q, k, v = packed(PLAIN, 100, 150, device)
    cu_seqlens_q = torch.tensor([10, 40, 90], dtype=torch.int32, device=device)
    cu_seqlens_k = torch.tensor([20, 80, 140], dtype=torch.int32, device=device)
    used = torch.tensor([33, 0], dtype=torch.int32, device=device)
    for x in (q, k, v):
        x[:10] = torch.nan
    for x in (k, v):
        x[20 + 33 :] = torch.nan
    q[90:] = torch.nan
    attention = fagen.load(PLAIN, emulate=device == "cpu")
    o, lse = attention(
        *(q, k, v), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=used, return_lse=True, _poison=True
    )
    expected_o, expected_lse = reference.packed(q, k, v, cu_seqlens_q, cu_seqlens_k, used)
    assert compare_o(o[10:90], expected_o[10:90], OUTPUT_BUDGET["bf16"]).passed
    assert compare_lse(lse[:, 10:90], expected_lse[:, 10:90]).passed
    assert not o[40:90].any() and (lse[:, 40:90] == -torch.inf).all()
    assert o[:10].isnan().all() and o[90:].isnan().all() and lse[:, :10].isnan().all() and lse[:, 90:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
def test_other_lengths_in_tensors_of_the_same_shape(device: str) -> None:
    q, k, v = packed(PLAIN, 120, 120, device)
    attention = fagen.load(PLAIN, emulate=device == "cpu")
    for lengths in ([60, 60], [1, 119], [120, 0]):
        begins = cumulative(lengths, device)
        o = attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins)
        longest = attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=120, max_seqlen_k=120)
        assert compare_o(o, reference.packed(q, k, v, begins, begins)[0], OUTPUT_BUDGET["bf16"]).passed
        assert torch.equal(o, longest)


def test_no_sequences() -> None:
    q, k, v = packed(PLAIN, 0, 0)
    none = torch.zeros(1, dtype=torch.int32)
    o, lse = fagen.load(PLAIN, emulate=True)(q, k, v, cu_seqlens_q=none, cu_seqlens_k=none, return_lse=True)
    assert o.shape == (0, 4, 64) and lse.shape == (4, 0)


BEGINS = cumulative([3, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": None}, "the spec has varlen=True: pass cu_seqlens_q="),
        ({"cu_seqlens_k": None}, "the spec has varlen=True: pass cu_seqlens_k="),
        (
            {"cu_seqlens_q": [0, 3, 7]},
            r"cu_seqlens_q is \[0, 3, 7\]; expected a tensor of one dimension and dtype int32",
        ),
        ({"cu_seqlens_q": BEGINS.long()}, "cu_seqlens_q is torch.int64 .*int32"),
        ({"cu_seqlens_k": BEGINS[None]}, r"cu_seqlens_k is torch.int32 \(1, 3\); expected .* one dimension"),
        ({"cu_seqlens_k": BEGINS[:2]}, "cu_seqlens_k has 2 entries, cu_seqlens_q 3"),
        ({"cu_seqlens_q": BEGINS[:0]}, "cu_seqlens_q has 0 entries"),
        ({"seqused_k": BEGINS}, "seqused_k has 3 entries, cu_seqlens_q 3: .* seqused_k as many"),
        ({"cu_seqlens_q": BEGINS.repeat(2)[::2]}, "cu_seqlens_q must be contiguous"),
        ({"cu_seqlens_q": BEGINS.to("meta")}, "cu_seqlens_q is on meta, q on cpu"),
        ({"max_seqlen_q": -1}, "max_seqlen_q=-1 must be an integer of at least 0"),
        ({"max_seqlen_k": 2.0}, "max_seqlen_k=2.0 must be an integer"),
    ],
)
def test_what_packed_sequences_need(change: dict[str, Any], message: str) -> None:
    given = {"cu_seqlens_q": BEGINS, "cu_seqlens_k": BEGINS} | change
    with pytest.raises(SpecError, match=message):
        fagen.load(PLAIN, emulate=True)(*packed(PLAIN, 7, 7), **given)


def test_a_list_after_a_call_that_was_right() -> None:
    """The call before is known by its tensors, of which there are fewer now."""
    attention = fagen.load(PLAIN, emulate=True)
    attention(*packed(PLAIN, 7, 7), cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS)
    with pytest.raises(SpecError, match=r"cu_seqlens_q is \[0, 3, 7\]; expected a tensor"):
        attention(*packed(PLAIN, 7, 7), cu_seqlens_q=[0, 3, 7], cu_seqlens_k=BEGINS)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "given",
    [
        {"cu_seqlens_q": BEGINS},
        {"cu_seqlens_k": BEGINS},
        {"seqused_k": BEGINS},
        {"max_seqlen_q": 7},
        {"max_seqlen_k": 7},
    ],
    ids=lambda given: next(iter(given)),
)
def test_given_to_a_spec_without(given: dict[str, Any]) -> None:
    q, k, v = (x[None] for x in packed(PLAIN, 7, 7))
    with pytest.raises(SpecError, match=rf"{next(iter(given))} is given, but .*varlen=True"):
        fagen.load(AttentionSpec(head_dim=64), emulate=True)(q, k, v, **given)


def test_shapes_that_are_refused() -> None:
    attention = fagen.load(PLAIN, emulate=True)
    q, k, v = packed(PLAIN, 7, 7)
    with pytest.raises(SpecError, match=r"q has 4 dimensions; expected \(total, heads, head_dim\)"):
        attention(q[None], k, v, cu_seqlens_q=BEGINS, cu_seqlens_k=BEGINS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_rows_that_take_no_part(deterministic: bool, device: str) -> None:
    """Rows of no sequence and keys that do not count have zeros, those of a sequence without keys too."""
    spec = AttentionSpec(head_dim=64, varlen=True, backward=True, deterministic=deterministic)
    q, k, v = (x.requires_grad_() for x in packed(spec, 100, 150, device))
    begins_q = torch.tensor([10, 40, 90], dtype=torch.int32, device=device)
    begins_k = torch.tensor([20, 80, 140], dtype=torch.int32, device=device)
    used = torch.tensor([33, 0], dtype=torch.int32, device=device)
    attention = fagen.load(spec, emulate=device == "cpu")
    o = attention(q, k, v, cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, seqused_k=used)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    d_q, d_k, d_v = torch.autograd.grad(o, (q, k, v), d_o)
    call = {"cu_seqlens_q": begins_q, "cu_seqlens_k": begins_k, "seqused_k": used}
    expected = reference.gradients(q, k, v, d_o, **call)
    rows, keys = torch.zeros(100, dtype=torch.bool), torch.zeros(150, dtype=torch.bool)
    rows[10:40], keys[20:53] = True, True
    for x, ref, seen in zip((d_q, d_k, d_v), expected, (rows, keys, keys), strict=True):
        assert compare_gradient(x, ref, GRADIENT_BUDGET["bf16"], seen).passed


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_each_sequence_as_if_it_were_alone(device: str) -> None:
    """The same bits where the order of additions is fixed."""
    on = {"head_dim": 64, "causal": True, "backward": True, "deterministic": True}
    lengths_q, lengths_k = [70, 0, 5, 130], [90, 40, 0, 100]
    q, k, v = (x.requires_grad_() for x in packed(PLAIN, sum(lengths_q), sum(lengths_k), device))
    emulate = device == "cpu"
    attention = fagen.load(AttentionSpec(varlen=True, **on), arch=MMA[device], emulate=emulate)
    begins = {"cu_seqlens_q": cumulative(lengths_q, device), "cu_seqlens_k": cumulative(lengths_k, device)}
    o = attention(q, k, v, **begins, max_seqlen_q=130, max_seqlen_k=100)
    d_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    alone = fagen.load(AttentionSpec(**on), arch=MMA[device], emulate=emulate)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), d_o.split(lengths_q), strict=True)
    each = []
    for *inputs, upstream in parts:
        leaves = [x.detach()[None].requires_grad_() for x in inputs]
        each.append(torch.autograd.grad(alone(*leaves), leaves, upstream[None]))
    for x, those in zip(gradients, zip(*each, strict=True), strict=True):
        assert torch.equal(x, torch.cat([y[0] for y in those]))


@pytest.mark.parametrize("head_dim", [64, 36])
def test_functions_of_flash_attention(head_dim: int) -> None:
    """The three functions on views of one tensor; a head dim that is padded; what return_attn_probs adds."""
    begins = cumulative([30, 0, 41])
    qkv = torch.randn(71, 3, 2, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = qkv.unbind(1)
    expected_o, expected_lse = reference.packed(q, k, v, begins, begins, causal=True)
    o, lse, mask = fagen.flash_attn_varlen_func(q, k, v, begins, begins, 41, 41, causal=True, return_attn_probs=True)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed
    assert not mask.numel()
    of_kv = fagen.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], begins, begins, 41, 41, causal=True)
    of_qkv = fagen.flash_attn_varlen_qkvpacked_func(qkv, begins, 41, causal=True)
    assert torch.equal(o, of_kv) and torch.equal(o, of_qkv)
    with pytest.raises(SpecError, match=r"with a block_table \(pages, page size, heads, head_dim\)"):
        fagen.flash_attn_varlen_func(q, k, v, begins, begins, 41, 41, block_table=begins)
    with pytest.raises(SpecError, match=r"expected \(total, heads, head_dim\)"):
        fagen.flash_attn_varlen_func(q[None], k[None], v[None], begins, begins, 41, 41)
    with pytest.raises(SpecError, match=r"kv has the shape .*expected \(total, 2, heads, head_dim\)"):
        fagen.flash_attn_varlen_kvpacked_func(q, k, begins, begins, 41, 41)
    with pytest.raises(SpecError, match=r"qkv has the shape .*expected \(total, 3, heads, head_dim\)"):
        fagen.flash_attn_varlen_qkvpacked_func(q, begins, 41)


def test_compiled() -> None:
    """torch.compile sees one operator, and shapes on meta tensors are those of the results."""
    attention = fagen.load(PLAIN, emulate=True)
    q, k, v = packed(PLAIN, 50, 60)
    given = {"cu_seqlens_q": cumulative([20, 30]), "cu_seqlens_k": cumulative([25, 35]), "max_seqlen_q": 30}
    compiled = torch.compile(lambda *x: attention(*x, return_lse=True, **given), backend="eager", fullgraph=True)
    for result, expected in zip(compiled(q, k, v), attention(q, k, v, return_lse=True, **given), strict=True):
        assert torch.equal(result, expected)


def test_compiled_function_of_flash_attention() -> None:
    """The call of flash-attention is traced whole, gradients included."""
    begins = cumulative([20, 30])
    inputs = [x.requires_grad_() for x in packed(PLAIN, 50, 50)]

    def call(*x: torch.Tensor) -> Any:
        return fagen.flash_attn_varlen_func(*x, begins, begins, 30, 30, causal=True)

    results = [function(*inputs) for function in (call, torch.compile(call, backend="aot_eager", fullgraph=True))]
    d_o = torch.randn(50, 4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = [torch.autograd.grad(o, inputs, d_o) for o in results]
    assert torch.equal(*results)
    for x, y in zip(*gradients, strict=True):
        assert torch.allclose(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("used", [False, True])
def test_operator(used: bool) -> None:
    spec = AttentionSpec(head_dim=16, varlen=True, backward=True, deterministic=True)
    q, k, v = (x.requires_grad_() for x in packed(spec, 9, 12))
    sequences = [
        cumulative([4, 5]),
        cumulative([5, 7]),
        torch.tensor([3, 7], dtype=torch.int32) if used else None,
        None,
    ]
    arguments = (spec.model_dump_json(), "", None, None, None, [], [], [], sequences, 5, 7, None, None)
    fagen.load(spec, emulate=True)  # the operators exist from here on
    torch.library.opcheck(torch.ops.fagen.forward, (q, k, v, *arguments))


@pytest.mark.gpu
def test_captured_with_lengths_that_change() -> None:
    q, k, v = packed(PLAIN, 300, 300, "cuda")
    begins = cumulative([150, 150], "cuda")
    attention = fagen.load(PLAIN)
    attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, cu_seqlens_q=begins, cu_seqlens_k=begins)
    for lengths in ([150, 150], [1, 299], [300, 0]):
        begins.copy_(cumulative(lengths))
        graph.replay()
        assert compare_o(o, reference.packed(q, k, v, begins, begins)[0], OUTPUT_BUDGET["bf16"]).passed
