"""flash-attention's calls: what they derive, what they compute, what they refuse."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from fagen import interface, reference
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.errors import SpecError
from fagen.interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
GRADIENT_BUDGET = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}  # SEMANTICS.md, Accuracy


def inputs(
    head_dim: int = 16,
    dim_v: int | None = None,
    seqlens: tuple[int, int] = (33, 40),
    heads: tuple[int, int] = (4, 2),
    batch: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v: unit normal, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (batch, seqlens[0], heads[0], head_dim),
        (batch, seqlens[1], heads[1], head_dim),
        (batch, seqlens[1], heads[1], head_dim if dim_v is None else dim_v),
    ]
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected).norm() / expected.norm())


def check_against_reference(tensors: tuple[Tensor, ...], arguments: dict[str, Any], **expected: Any) -> None:
    """o, lse and gradients of a call beside the reference's, called with `expected`."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    o, lse, _ = flash_attn_func(*leaves, return_attn_probs=True, **arguments)
    doubles = [x.double().requires_grad_() for x in tensors]
    expected_o, expected_lse = reference.attention(*doubles, **expected)
    assert o.shape == expected_o.shape and o.dtype == tensors[0].dtype and lse.dtype == torch.float32
    assert compare_o(o.detach(), expected_o.detach(), OUTPUT_BUDGET[NAMES[o.dtype]]).passed
    assert compare_lse(lse.detach(), expected_lse.detach()).passed
    upstream = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o)
    made = torch.autograd.grad(o, leaves, upstream)
    wanted = torch.autograd.grad(expected_o, doubles, upstream.double())
    for x, gradient, right in zip(tensors, made, wanted, strict=True):
        assert gradient.shape == x.shape and gradient.dtype == x.dtype
        assert relative_error(gradient, right) <= GRADIENT_BUDGET[x.dtype]


SIGNATURE = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (flash_attn_func, ["q", "k", "v"]),
        (flash_attn_kvpacked_func, ["q", "kv"]),
        (flash_attn_qkvpacked_func, ["qkv"]),
    ],
)
def test_signatures(function: Any, tensors: list[str]) -> None:
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [*tensors, *SIGNATURE]
    assert {name: parameters[name].default for name in SIGNATURE} == SIGNATURE
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize("device", DEVICES)
def test_grouped_heads_and_causal(device: str) -> None:
    tensors = inputs(dtype=torch.float16, device=device)
    check_against_reference(tensors, {"causal": True}, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_head_dims_that_are_no_multiple_of_8(device: str) -> None:
    """19 becomes 24 and 11 becomes 16, the scale stays 19 ** -0.5; with a window, a cap and slopes."""
    tensors = inputs(19, 11, device=device)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4], device=device)
    check_against_reference(
        tensors,
        {"window_size": (9, 3), "softcap": 3.0, "alibi_slopes": slopes},
        window=(9, 3),
        softcap=3.0,
        alibi_slopes=slopes,
    )


def test_scale_and_every_empty_row() -> None:
    """Causal with more queries than keys: the first rows see nothing."""
    tensors = inputs(seqlens=(40, 33), dtype=torch.float16)
    check_against_reference(tensors, {"causal": True, "softmax_scale": 0.4}, causal=True, softmax_scale=0.4)
    o, lse, _ = flash_attn_func(*tensors, causal=True, return_attn_probs=True)
    assert not o[:, :7].any() and (lse[:, :, :7] == -torch.inf).all() and lse[:, :, 7:].isfinite().all()


def test_deterministic() -> None:
    tensors = inputs(seqlens=(150, 150))
    leaves = [x.requires_grad_() for x in tensors]
    upstream = torch.randn(2, 150, 4, 16).bfloat16()
    first, second = (
        torch.autograd.grad(flash_attn_func(*leaves, deterministic=True), leaves, upstream) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    check_against_reference(tuple(x.detach() for x in tensors), {"deterministic": True})


def test_packed_forms() -> None:
    """The same numbers as separate tensors, and the gradients in the layout of the packed one."""
    q, k, v = inputs(seqlens=(33, 33), heads=(2, 2), dtype=torch.float16)
    upstream = torch.randn(2, 33, 2, 16).half()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o = flash_attn_func(*leaves, causal=True)
    gradients = torch.autograd.grad(o, leaves, upstream)

    qkv = torch.stack([q, k, v], 2).requires_grad_()
    packed = flash_attn_qkvpacked_func(qkv, causal=True)
    assert torch.equal(packed, o)
    (d_qkv,) = torch.autograd.grad(packed, qkv, upstream)
    assert d_qkv.shape == qkv.shape
    for part, gradient in zip(d_qkv.unbind(2), gradients, strict=True):
        assert relative_error(part, gradient.double()) < 1e-3  # dQ is summed in another order from run to run

    kv = torch.stack([k, v], 2).requires_grad_()
    packed = flash_attn_kvpacked_func(leaves[0], kv, causal=True)
    assert torch.equal(packed, o)
    assert torch.autograd.grad(packed, kv, upstream)[0].shape == kv.shape


def test_dropout() -> None:
    """One mask a state of the generator, with and without S_dmask, which has the dropped ones negative."""
    q, k, v = inputs()
    results: list[Any] = []
    for probs in (False, True):
        torch.manual_seed(5)
        results.append(flash_attn_func(q, k, v, 0.25, causal=True, return_attn_probs=probs))
    o, lse, s = results[1]
    assert torch.equal(results[0], o)
    assert not torch.equal(flash_attn_func(q, k, v, 0.25, causal=True), o)

    assert s.shape == (2, 4, 33, 40) and s.dtype == q.dtype and s.abs().max() == 1
    expected_o, expected_lse = reference.attention(q, k, v, causal=True)
    assert compare_lse(lse, expected_lse).passed and not compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed
    p = s.double().abs()
    p = p / p.sum(3, keepdim=True)
    assert 0.2 < float((s < 0)[p > 0].double().mean()) < 0.3
    dropped = (p * (s >= 0)).view(2, 2, 2, 33, 40) @ v.double().transpose(1, 2)[:, :, None] / 0.75
    assert relative_error(o, dropped.view(2, 4, 33, 16).transpose(1, 2)) < 1e-2


def test_without_dropout_there_are_no_probabilities_to_return() -> None:
    assert flash_attn_func(*inputs(), causal=True, return_attn_probs=True)[2].numel() == 0


def test_layouts() -> None:
    """Any strides, the last dimension's too."""
    q, k, v = inputs()
    expected = flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn_func(q.transpose(1, 3).contiguous().transpose(1, 3), k, v, causal=True), expected)
    wide = torch.stack([v, v], 4).flatten(3)[..., ::2]
    assert wide.stride(3) == 2 and torch.equal(flash_attn_func(q, k, wide, causal=True), expected)


def test_autocast() -> None:
    q, k, v = inputs()
    expected = flash_attn_func(q, k, v, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(flash_attn_func(q.float(), k.float(), v.float(), causal=True), expected)


def test_inside_a_compiled_function() -> None:
    """One graph, whose specs are derived while it is traced."""

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_func(q, k, v, causal=True)
        return o.float().sum() + flash_attn_func(q[..., :19], k[..., :19], v, window_size=(9, 3)).float().square().sum()

    leaves = [x.requires_grad_() for x in inputs(24, 16)]
    expected = two(*leaves)
    torch._dynamo.reset()
    made = torch.compile(two, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.allclose(made, expected)
    for a, b in zip(torch.autograd.grad(made, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-3)


# What is derived


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Slugs of the specs that calls derive from here on; nothing is built or computed."""
    slugs: list[str] = []

    class Recorder:
        def __init__(self, spec: Any) -> None:
            slugs.append(spec.slug)

        def __call__(self, q: Tensor, *rest: Any, **values: Any) -> Tensor:
            self.values = values
            return q

    monkeypatch.setattr(interface, "_ATTENTIONS", {})
    monkeypatch.setattr(interface, "Attention", Recorder)
    return slugs


@pytest.mark.parametrize(
    ("arguments", "slug"),
    [
        ({}, "hdim16_bf16"),
        ({"softcap": -1.0, "dropout_p": 0.0, "window_size": (-1, -1)}, "hdim16_bf16"),
        ({"causal": True}, "hdim16_bf16_causal"),
        ({"window_size": (-1, 0)}, "hdim16_bf16_causal"),
        ({"causal": True, "window_size": (-1, 7)}, "hdim16_bf16_causal"),
        ({"window_size": (5, 0)}, "hdim16_bf16_causal_window"),
        ({"window_size": [5, -1]}, "hdim16_bf16_window"),
        ({"window_size": torch.tensor([5, 2])}, "hdim16_bf16_window"),
        ({"softcap": 50.0, "dropout_p": 0.1}, "hdim16_bf16_softcap_dropout"),
        ({"alibi_slopes": torch.ones(4)}, "hdim16_bf16_alibi"),
        ({"deterministic": True}, "hdim16_bf16"),
    ],
)
def test_the_spec_follows_from_the_arguments(derived: list[str], arguments: dict[str, Any], slug: str) -> None:
    flash_attn_func(*inputs(), **arguments)
    assert derived == [slug]


def test_gradients_are_derived_where_one_is_needed(derived: list[str]) -> None:
    q, k, v = inputs(dtype=torch.float16)
    v.requires_grad_()
    flash_attn_func(q, k, v)
    flash_attn_func(q, k, v, deterministic=True)
    with torch.no_grad():
        flash_attn_func(q, k, v)
    assert derived == ["hdim16_fp16_backward", "hdim16_fp16_backward_deterministic", "hdim16_fp16"]


def test_values_share_a_spec(derived: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of a kind looks its kernels up: no spec is made, whatever the values and the shapes."""
    flash_attn_func(*inputs(), softcap=50.0, window_size=(3, 4))
    monkeypatch.delattr(interface, "AttentionSpec")
    flash_attn_func(*inputs(seqlens=(7, 9), heads=(6, 6)), softcap=30.0, window_size=(100, -1), softmax_scale=1.0)
    assert derived == ["hdim16_bf16_window_softcap"]


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q.float(), k, v), r"q has dtype torch\.float32; q, k and v must be float16 or bfloat16"),
        (lambda q, k, v: (q, k.half(), v), r"k has dtype torch\.float16; the spec's dtype is bf16"),
        (lambda q, k, v: (q[0], k, v), r"\(33, 4, 16\).*expected \(batch, seqlen, heads, head_dim\)"),
        (lambda q, k, v: (q[..., :15], k[..., :14], v), "k has head dim 14, q has 15: must be equal"),
        (lambda q, k, v: (q[..., :8], k, v), "k has head dim 16; the spec's is 8"),
        (lambda q, k, v: (q[:, :, :3], k, v), "3 query heads over 2 key heads"),
        (lambda q, k, v: (q.repeat(1, 1, 1, 17), k.repeat(1, 1, 1, 17), v), "head_dim=272 is not served"),
    ],
)
def test_tensors_that_fit_no_kernel(change: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        flash_attn_func(*change(*inputs()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_p": 1.0}, r"dropout_p=1\.0 must be"),
        ({"dropout_p": -0.5}, r"dropout_p=-0\.5 must be"),
        ({"softcap": float("nan")}, "softcap must be a finite positive number"),
        ({"softmax_scale": 0.0}, "softmax_scale must be a finite positive number"),
        ({"window_size": (-3, 4)}, r"window=\(-3, 4\)"),
        ({"window_size": 5}, r"window_size=5: expected \(left, right\)"),
        ({"window_size": (1, 2, 3)}, r"window_size=\(1, 2, 3\): expected \(left, right\)"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,\)"),
        ({"alibi_slopes": torch.ones(4).half()}, r"alibi_slopes has dtype torch\.float16"),
    ],
)
def test_values_that_mean_nothing(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        flash_attn_func(*inputs(), **arguments)


def test_packed_tensors_of_the_wrong_shape() -> None:
    with pytest.raises(SpecError, match=r"qkv has the shape .*expected \(batch, seqlen, 3, heads, head_dim\)"):
        flash_attn_qkvpacked_func(torch.zeros(1, 2, 2, 4, 16).half())
    with pytest.raises(SpecError, match=r"kv has the shape .*expected \(batch, seqlen, 2, heads, head_dim\)"):
        flash_attn_kvpacked_func(torch.zeros(1, 2, 4, 16).half(), torch.zeros(1, 2, 3, 4, 16).half())
