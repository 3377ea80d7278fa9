"""A tensor added to the scores: its shapes, strides and types, what it hides, and its gradient."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import everywhere, families
from torch import Tensor

import fagen
from fagen import reference
from fagen.check import Case, compare_gradient, poisoned_memory
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

BOTH = AttentionSpec(head_dim=16, causal=True, bias=True, backward=True)
ORDERED = AttentionSpec(head_dim=16, causal=True, bias=True, backward=True, deterministic=True)
SHAPE = (2, 4, 40, 50)  # batch, heads, queries, keys

both_orders = pytest.mark.parametrize("spec", [BOTH, ORDERED], ids=lambda spec: spec.slug)


def load(spec: AttentionSpec, arch: str = "sm80") -> fagen.Attention:
    attention = fagen.load(spec, arch=None if arch == "gpu" else arch, emulate=arch != "gpu")
    if spec.backward:  # each has a backward of its own
        main = attention.kernel(device_of(arch), "bwd")
        assert main.family == main.arch.family
    return attention


def device_of(arch: str) -> str:
    return "cuda" if arch == "gpu" else "cpu"


def inputs(spec: AttentionSpec, arch: str = "sm80") -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, seqlen_q, seqlen_k = SHAPE
    case = Case(spec=spec, batch=batch, heads=heads, heads_k=2, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    made = case.inputs(device_of(arch))
    return made.q, made.k, made.v


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def gradients(spec: AttentionSpec, bias: Tensor, arch: str, **call: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv and that of the bias, of the sum of o's squares."""
    leaves = [x.detach().requires_grad_() for x in (*inputs(spec, arch), bias)]
    with poisoned_memory():
        o = load(spec, arch)(*leaves[:3], bias=leaves[3], **call)
        return torch.autograd.grad(o.float().square().sum(), leaves)


BROADCASTS = [SHAPE, (1, 4, 40, 50), (2, 1, 40, 50), (4, 1, 50), (2, 1, 1, 50), (40, 1), (50,), (), (1, 1, 1, 1)]


@everywhere
@both_orders
@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_a_shape_that_broadcasts_has_a_gradient_of_its_own(
    spec: AttentionSpec, shape: tuple[int, ...], arch: str
) -> None:
    """The sum over what it is broadcast to; and the gradients of the rest are those with the whole tensor."""
    q, k, v = inputs(spec, arch)
    bias = drawn(*shape).to(q.device)
    *others, d_bias = gradients(spec, bias, arch)
    assert d_bias.shape == shape and d_bias.dtype == torch.float32
    o, _ = reference.attention(q, k, v, causal=True, bias=bias)
    expected = reference.gradients(q, k, v, 2 * o, causal=True, also=["bias"], bias=bias)[3]
    rows = (x.reshape(1, 1, -1, x.shape[-1] if shape else 1).transpose(1, 2) for x in (d_bias, expected))
    x, ref = rows
    # What the rounding of o adds up to stands beside the scores' own gradients, of which a sum over all may be small.
    whole = reference.gradients(q, k, v, 2 * o, causal=True, also=["bias"], bias=bias.expand(SHAPE))[3]
    assert (x - ref).norm() <= 1e-2 * max(ref.norm(), whole.norm())
    *alike, _ = gradients(spec, bias.expand(SHAPE), arch)
    assert spec is BOTH or all(map(torch.equal, others, alike))
    if shape == SHAPE:
        assert compare_gradient(d_bias, expected, 1e-2, torch.ones(4, dtype=torch.bool)).passed


@pytest.mark.parametrize("arch", ["sm80", "sm90a"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_matter(arch: str, dtype: torch.dtype) -> None:
    spec = AttentionSpec(head_dim=16, bias=True)
    q, k, v = inputs(spec)
    bias = drawn(*SHAPE).to(dtype)
    attention = load(spec, arch)
    expected = attention(q, k, v, bias=bias)
    parent = torch.full((3, 6, 45, 107), math.nan, dtype=dtype)
    parent[1:, 1:5, 2:42, 3:103:2] = bias
    for other in (bias.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0), parent[1:, 1:5, 2:42, 3:103:2]):
        assert other.stride() != bias.stride() and torch.equal(attention(q, k, v, bias=other), expected)


@pytest.mark.parametrize(
    ("arch", "features"), [("sm80", {}), ("sm90a", {"causal": True, "dropout": True}), ("sm80", {"split_kv": True})]
)
def test_a_mask_is_what_minus_infinity_is(arch: str, features: dict[str, bool]) -> None:
    spec = AttentionSpec(head_dim=16, bias=True, **features)
    q, k, v = inputs(spec)
    mask = drawn(2, 1, 40, 50) > 0
    mask[1, :, 5] = False
    call: dict[str, Any] = {"return_lse": True} | ({"dropout_p": 0.2, "seed": 1} if spec.dropout else {})
    attention = load(spec, arch)
    o, lse = attention(q, k, v, bias=mask, **call)
    assert (o[1, 5] == 0).all() and (lse[1, :, 5] == -math.inf).all()
    added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    other = attention(q, k, v, bias=added, **call)
    assert torch.equal(other[0], o) and torch.equal(other[1], lse)


@everywhere
@both_orders
def test_what_stands_where_nobody_looks(spec: AttentionSpec, arch: str) -> None:
    """NaN above the diagonal touches nothing, and has a gradient of 0."""
    bias = drawn(*SHAPE).to(device_of(arch))
    hidden = torch.ones(40, 50, dtype=torch.bool, device=bias.device).triu(11)
    results = [gradients(spec, bias.masked_fill(hidden, value), arch) for value in (0.0, math.nan)]
    assert all(map(torch.equal, *results)) or spec is BOTH
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-5)
    assert (results[1][3][..., hidden] == 0).all()


@everywhere
def test_rows_that_a_bias_hides_have_no_gradient(arch: str) -> None:
    bias = drawn(2, 1, 40, 50).to(device_of(arch))
    bias[0, :, 7:9] = -math.inf
    dq, dk, dv, d_bias = gradients(BOTH, bias, arch)
    assert (dq[0, 7:9] == 0).all() and (d_bias[0, :, 7:9] == 0).all()
    assert all(x.isfinite().all() for x in (dq, dk, dv, d_bias))


@families
def test_a_fixed_order_gives_the_same_bits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the gradient is a sum over batch entries, heads and queries, whose blocks run in any order."""
    bias = drawn(1, 1, 1, 50).bfloat16()
    first = gradients(ORDERED, bias, arch)
    assert first[3].dtype == torch.bfloat16
    for seed in ("1", "2"):
        monkeypatch.setenv("FAGEN_EMULATE_SEED", seed)
        assert all(map(torch.equal, gradients(ORDERED, bias, arch), first))


@everywhere
@both_orders
def test_only_what_needs_a_gradient_has_one(spec: AttentionSpec, arch: str) -> None:
    """The bias alone; and the others alone, for which no float32 sum of a bias is taken."""
    q, k, v = inputs(spec, arch)
    bias = drawn(4, 40, 50).to(q.device).requires_grad_()
    attention = load(spec, arch)
    whole = gradients(spec, bias, arch)
    (alone,) = torch.autograd.grad(attention(q, k, v, bias=bias).float().square().sum(), bias)
    torch.testing.assert_close(alone, whole[3])
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attention(q, k, v, bias=bias.detach()).float().square().sum(), q)
    torch.testing.assert_close(dq, whole[0])


@families
def test_a_bias_that_comes_back_in_another_layout(arch: str) -> None:
    """Hooks on saved tensors may bring back the values of an expanded tensor as one that is not."""
    q, k, v = inputs(BOTH)
    bias = drawn(1, 1, 1, 50).expand(SHAPE)
    q.requires_grad_()
    results = []
    for unpack in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            o = load(BOTH, arch)(q, k, v, bias=bias)
        results.append(torch.autograd.grad(o.float().square().sum(), q)[0])
    torch.testing.assert_close(*results)


@families
def test_compiled(arch: str) -> None:
    q, k, v = inputs(BOTH)
    bias = drawn(4, 40, 50).requires_grad_()
    attention = load(BOTH, arch)

    def loss(bias: Tensor) -> Tensor:
        return attention(q, k, v, bias=2 * bias).float().square().sum()

    (expected,) = torch.autograd.grad(loss(bias), bias)
    (found,) = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(bias), bias)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (None, r"pass bias=\.\.\."),
        (3.0, "bias must be a tensor, got float"),
        (torch.zeros(40, 49), r"bias has shape \(40, 49\), which does not broadcast to .* \(2, 4, 40, 50\)"),
        (torch.zeros(1, 2, 4, 40, 50), "which does not broadcast"),
        (torch.zeros(40, 50, dtype=torch.float16), "float16; expected torch.float32, torch.bfloat16 or torch.bool"),
        (torch.zeros(40, 50, dtype=torch.int64), "int64; expected"),
    ],
)
def test_what_is_no_bias(bias: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load(BOTH)(*inputs(BOTH), bias=bias)


def test_a_gradient_needs_a_backward() -> None:
    spec = AttentionSpec(head_dim=16, bias=True)
    with pytest.raises(SpecError, match="backward=True"):
        load(spec)(*inputs(spec), bias=torch.zeros(50, requires_grad=True))
    with pytest.raises(SpecError, match="bias is given, but the spec lacks"):
        load(AttentionSpec(head_dim=16))(*inputs(spec), bias=torch.zeros(50))
    with pytest.raises(SpecError, match="knows of no packed sequences"):
        AttentionSpec(head_dim=16, bias=True, varlen=True)
