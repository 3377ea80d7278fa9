"""One more score for each row of a head, whose key has no value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from families import families
from torch import Tensor

import fagen
from fagen import reference
from fagen.check import Case
from fagen.errors import SpecError
from fagen.spec import AttentionSpec

BOTH = AttentionSpec(head_dim=16, causal=True, sink=True, backward=True)
SINK = torch.tensor([0.5, -math.inf, 300.0, -2.0])


def inputs(spec: AttentionSpec, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    made = Case(spec=spec, **{"batch": 2, "heads": 4, "heads_k": 2, "seqlen_q": 40, "seqlen_k": 30, **sizes}).inputs()
    return made.q, made.k, made.v


@pytest.mark.parametrize(
    ("arch", "features"), [("sm80", {"backward": True}), ("sm90a", {"softcap": True}), ("sm80", {"split_kv": True})]
)
def test_a_sink_is_a_share_of_the_softmax(arch: str, features: dict[str, bool]) -> None:
    """Of the kernel without one: o times what the keys keep of the denominator; -inf is none, and 300 takes all."""
    plain = AttentionSpec(head_dim=16, causal=True, **features)
    q, k, v = inputs(plain)
    call: dict[str, Any] = {"return_lse": True} | ({"softcap": 2.0} if plain.softcap else {})
    o, lse = fagen.load(plain, arch=arch, emulate=True)(q, k, v, **call)
    attention = fagen.load(plain.model_copy(update={"sink": True}), arch=arch, emulate=True)
    found, found_lse = attention(q, k, v, sink=SINK, **call)
    total = torch.logaddexp(lse, SINK[:, None])
    torch.testing.assert_close(found_lse, total, rtol=1e-6, atol=1e-5)
    kept = torch.exp(lse - total).nan_to_num(nan=0.0).transpose(1, 2)[..., None]
    torch.testing.assert_close(found.float(), o.float() * kept, rtol=1e-2, atol=1e-3)
    assert torch.equal(found[:, :, 1], o[:, :, 1]) and (found[:, :, 2] == 0).all()
    assert (lse[:, :, :10] == -math.inf).all() and (found[:, :10] == 0).all()  # rows that see nothing
    assert torch.equal(found_lse[:, 3, :10], torch.full((2, 10), -2.0))
    assert all(map(torch.equal, attention(q, k, v, sink=SINK.bfloat16(), **call), (found, found_lse)))


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_one_part_of_the_keys_has_it(splits: int) -> None:
    spec = AttentionSpec(head_dim=16, sink=True, split_kv=True)
    q, k, v = inputs(spec, seqlen_q=2, seqlen_k=2000)
    call: dict[str, Any] = {"sink": SINK, "return_lse": True}
    o, lse = fagen.load(spec, arch="sm80", emulate=True)(q, k, v, num_splits=splits, **call)
    dense = AttentionSpec(head_dim=16, sink=True)
    expected, expected_lse = fagen.load(dense, arch="sm80", emulate=True)(q, k, v, **call)
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-5)


@families
def test_no_keys_at_all(arch: str) -> None:
    q, k, v = inputs(BOTH, seqlen_k=0)
    sink = SINK.clone().requires_grad_()
    o, lse = fagen.load(BOTH, arch=arch, emulate=True)(q, k, v, sink=sink, return_lse=True)
    assert (o == 0).all() and torch.equal(lse, SINK[:, None].expand(2, 4, 40))
    (found,) = torch.autograd.grad(lse[:, :, :3].sum(), sink)
    assert torch.equal(found, torch.full((4,), 6.0))


@families
@pytest.mark.parametrize("compiled", [False, True])
def test_its_gradient_alone(compiled: bool, arch: str) -> None:
    """In its dtype, also of rows that see nothing, whose lse it is, and where no other gradient is wanted."""
    q, k, v = inputs(BOTH)
    attention = fagen.load(BOTH, arch=arch, emulate=True)

    def loss(sink: Tensor) -> Tensor:
        o, lse = attention(q, k, v, sink=sink, return_lse=True)
        return o.float().square().sum() + lse.square().sum()

    sink = torch.tensor([0.5, 1.0, 3.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    (found,) = torch.autograd.grad(run(sink), sink)
    wanted = sink.detach().double().requires_grad_()
    o, lse = reference.attention(q, k, v, causal=True, sink=wanted)
    (expected,) = torch.autograd.grad(o.square().sum() + lse.square().sum(), wanted)
    assert found.dtype == torch.bfloat16 and found.shape == (4,)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        (None, r"pass sink=\.\.\."),
        (1.0, "sink must be a tensor, got float"),
        (torch.zeros(2), r"float32 \(2,\); expected a number for each of 4 heads"),
        (torch.zeros(1, 4), "expected a number for each"),
    ],
)
def test_what_is_no_sink(sink: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        fagen.load(BOTH, arch="sm80", emulate=True)(*inputs(BOTH), sink=sink)
    with pytest.raises(SpecError, match="sink is given, but the spec lacks the feature"):
        fagen.load(AttentionSpec(head_dim=16), arch="sm80", emulate=True)(*inputs(BOTH), sink=torch.zeros(4))
