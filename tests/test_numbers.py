"""The cases N1 to N27 of the case list, both ways: inputs whose right value follows from the definition by hand.

Each runs on the reference, on the CPU execution of the kernel, and on a GPU. `s` is a scaled score; with q = 0 every
visible key weighs the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fagen
from fagen import reference
from fagen.check import (
    DTYPES,
    GRADIENT_BUDGET,
    LSE_ABSOLUTE,
    LSE_RELATIVE,
    OUTPUT_BUDGET,
    Inputs,
    differentiate,
    lay_out,
)
from fagen.spec import AttentionSpec

# Where a call runs: the default architecture and the Hopper family, emulated, and a GPU.
places = pytest.mark.parametrize(
    ("device", "arch"),
    [("cpu", None), ("cpu", "sm90a"), pytest.param("cuda", None, marks=pytest.mark.gpu)],
    ids=["emulated", "hopper", "gpu"],
)

Run = Callable[..., tuple[Tensor, Tensor]]


# A gradient of unit-normal inputs that is 0 by cancellation: dP and delta are the same sum in another order, float32.
CANCELLED = 1e-5


class Backend:
    """Computes o and lse for a spec, and gradients, with results poisoned first where a kernel runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = "cuda" if name == "gpu" else "cpu"
        # What `load` is told: "emulated" is the default family, "hopper" the one for sm90a.
        self.where = {"emulate": name != "gpu", "arch": "sm90a" if name == "hopper" else None}

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (to_device(x, self.device) for x in (q, k, v))
        if self.name == "reference":
            o, lse = reference.attention(q, k, v, causal=spec.causal, **call)
        else:
            o, lse = fagen.load(spec, **self.where)(q, k, v, return_lse=True, _poison=True, **call)
            assert o.dtype == q.dtype and lse.dtype == torch.float32
        assert o.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        return o.cpu().double(), lse.cpu().double()

    def gradients(
        self,
        spec: AttentionSpec,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        d_o: Tensor | None = None,
        d_lse: Tensor | None = None,
        **call: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv of a loss with these gradients of o and lse, None for zeros."""
        d_o = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype) if d_o is None else d_o
        q, k, v, d_o = (to_device(x, self.device) for x in (q, k, v, d_o))
        d_lse = None if d_lse is None else to_device(d_lse, self.device)
        if self.name == "reference":
            gradients = reference.gradients(q, k, v, d_o, d_lse, causal=spec.causal, **call)
        else:
            attention = fagen.load(with_backward(spec), **self.where)
            _, _, gradients = differentiate(attention, Inputs(q, k, v, call), d_o, d_lse)
            assert all(x.dtype == q.dtype for x in gradients)
        for x, like in zip(gradients, (q, k, v), strict=True):
            assert x.shape == like.shape and not x.isnan().any()
        dq, dk, dv = (x.cpu().double() for x in gradients)
        return dq, dk, dv


def to_device(x: Tensor, device: str) -> Tensor:
    """x with its strides and what lies between, which `Tensor.to` leaves behind."""
    if x.device.type == device or not x.numel():
        return x.to(device)
    storage = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def with_backward(spec: AttentionSpec) -> AttentionSpec:
    return AttentionSpec(**spec.model_dump() | {"backward": True})


@pytest.fixture(params=["reference", "emulated", "hopper", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Backend]:
    yield Backend(request.param)
    if request.param == "gpu":
        torch.cuda.synchronize()


@pytest.fixture(params=["bf16", "fp16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def normal(dtype: str, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])


def full(dtype: str, value: float, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=DTYPES[dtype])


def assert_lse(lse: Tensor, expected: Tensor | float) -> None:
    """Within 1e-4, or 1e-6 of the magnitude; -inf where expected."""
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(lse.shape)
    torch.testing.assert_close(lse, expected, rtol=LSE_RELATIVE, atol=LSE_ABSOLUTE)


def assert_o(o: Tensor, expected: Tensor, dtype: str) -> None:
    expected = expected.double().expand(o.shape)
    assert not o.isnan().any()
    error = torch.linalg.vector_norm(o - expected) / torch.linalg.vector_norm(expected)
    assert error <= OUTPUT_BUDGET[dtype]
    # Every element within a few roundings of P and o.
    bound = 4 * OUTPUT_BUDGET[dtype] * (expected.abs() + expected.square().mean(-1, keepdim=True).sqrt())
    assert ((o - expected).abs() <= bound).all()


def assert_gradient(x: Tensor, expected: Tensor, dtype: str) -> None:
    """Within the budget of gradients as a whole, and a few of it in every element."""
    expected = expected.double().expand(x.shape)
    budget = GRADIENT_BUDGET[dtype]
    assert torch.linalg.vector_norm(x - expected) <= budget * torch.linalg.vector_norm(expected)
    assert ((x - expected).abs() <= 4 * budget * (expected.abs() + expected.square().mean().sqrt())).all()


def assert_cancelled(x: Tensor) -> None:
    assert (x.abs() <= CANCELLED).all()


def assert_same(results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], dtype: str) -> None:
    """Equal but for the last bit: two kernels, whose compiler may have fused other multiplications and additions."""
    o, lse = results
    torch.testing.assert_close(o, expected[0], rtol=torch.finfo(DTYPES[dtype]).eps, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head_dim", [8, 64, 256])
def test_n1_rows_above_the_first_key(run: Backend, dtype: str, head_dim: int) -> None:
    """N1: Sq=4, Sk=2, causal, q=0. Rows 0 and 1 see nothing."""
    k, v = normal(dtype, 1, 2, 1, head_dim), normal(dtype, 1, 2, 1, head_dim, seed=1)
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype, causal=True)
    o, lse = run(spec, full(dtype, 0, 1, 4, 1, head_dim), k, v)
    assert torch.equal(o[0, :2], torch.zeros(2, 1, head_dim, dtype=torch.float64))
    assert torch.equal(o[0, 2], v[0, 0].double())
    assert_o(o[0, 3], v[0].double().mean(0), dtype)
    assert_lse(lse[0, 0], torch.tensor([-math.inf, -math.inf, 0.0, math.log(2)]))


@pytest.mark.parametrize("head_dim", [8, 64, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_n1_gradients(run: Backend, dtype: str, head_dim: int, deterministic: bool) -> None:
    """N1: rows 0 and 1 touch nothing; row 2 has one key, row 3 two of weight 1/2."""
    k, v, d_o = (normal(dtype, 1, rows, 1, head_dim, seed=seed) for seed, rows in enumerate((2, 2, 4)))
    d_o[0, 3] = v[0, 0] - v[0, 1]  # dP of the two apart, so that dS is no small difference
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype, causal=True, backward=True, deterministic=deterministic)
    dq, dk, dv = run.gradients(spec, full(dtype, 0, 1, 4, 1, head_dim), k, v, d_o)
    k, v, d_o = (x[0, :, 0].double() for x in (k, v, d_o))
    assert not dq[0, :2].any() and not dk.any()
    assert_cancelled(dq[0, 2])
    d_s = (d_o[3] @ (v[0] - v[1])) / 4
    assert_gradient(dq[0, 3, 0], d_s * (k[0] - k[1]) / math.sqrt(head_dim), dtype)
    assert_gradient(dv[0, :, 0], torch.stack([d_o[2] + d_o[3] / 2, d_o[3] / 2]), dtype)


@pytest.mark.parametrize("seqlen_q", [1, 16, 70])
def test_n3_scores_of_minus_8192(run: Backend, dtype: str, seqlen_q: int) -> None:
    """N3: D=64, Sk=16, q=32, k=-32: every s = -8192; prefill and decode."""
    v = normal(dtype, 1, 16, 2, 64)
    spec = AttentionSpec(head_dim=64, dtype=dtype)
    o, lse = run(spec, full(dtype, 32, 1, seqlen_q, 2, 64), full(dtype, -32, 1, 16, 2, 64), v)
    assert_o(o, v.double().mean(1, keepdim=True), dtype)
    assert_lse(lse, -8192 + math.log(16))


@pytest.mark.parametrize("features", [("window",), ("causal", "window")])
def test_n3_first_tiles_masked_then_scores_of_minus_8192(run: Backend, features: tuple[str, ...]) -> None:
    """N3's kind: the tiles that a block of rows starts with are fully masked for its last rows, whose real scores are
    all -8192; a finite sentinel as the running maximum would outweigh them."""
    v = normal("bf16", 1, 300, 1, 64)
    spec = AttentionSpec(head_dim=64, **dict.fromkeys(features, True))
    o, lse = run(spec, full("bf16", 32, 1, 300, 1, 64), full("bf16", -32, 1, 300, 1, 64), v, window=(10, 0))
    expected = torch.stack([v[0, max(0, i - 10) : i + 1].double().mean(0) for i in range(300)])
    assert_o(o[0], expected, "bf16")
    seen = torch.arange(1, 301, dtype=torch.float64).clamp(max=11)
    assert_lse(lse[0, 0], -8192 + seen.log())


def test_n3_scores_of_minus_200_after_masked_tiles(run: Backend) -> None:
    """N3's kind at -200, where exp(-200) would still be a float64 but not a float32."""
    v = normal("bf16", 1, 200, 1, 64)
    q, k = full("bf16", 5, 1, 200, 1, 64), full("bf16", -5, 1, 200, 1, 64)
    o, lse = run(AttentionSpec(head_dim=64, window=True), q, k, v, window=(3, 3))
    seen = torch.tensor([min(i + 3, 199) - max(i - 3, 0) + 1 for i in range(200)], dtype=torch.float64)
    expected = torch.stack([v[0, max(0, i - 3) : i + 4].double().mean(0) for i in range(200)])
    assert_o(o[0], expected, "bf16")
    assert_lse(lse[0, 0], -200 + seen.log())


def test_n4_one_huge_key(run: Backend) -> None:
    """N4: B=H=Sq=Sk=1, D=64, bf16, q=k=v=133120: P is 1, so o = v exactly."""
    x = full("bf16", 133120, 1, 1, 1, 64)
    o, lse = run(AttentionSpec(head_dim=64), x, x, x)
    assert (o == 133120).all()
    assert_lse(lse, 64 * 133120.0**2 / 8)


def test_n4_gradients(run: Backend) -> None:
    """N4: dv = do, and nothing overflows on the way to the others."""
    x, d_o = full("bf16", 133120, 1, 1, 1, 64), normal("bf16", 1, 1, 1, 64)
    dq, dk, dv = run.gradients(AttentionSpec(head_dim=64), x, x, x, d_o)
    assert torch.equal(dv, d_o.double())
    assert dq.isfinite().all() and dk.isfinite().all()


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_n3_gradients_at_minus_8192(run: Backend, dtype: str, seqlen_q: int) -> None:
    """N3's scores, where exp2 of a float32 difference at that size has to find 1/16: dv is the mean of do."""
    d_o, v = normal(dtype, 1, seqlen_q, 2, 64), normal(dtype, 1, 16, 2, 64, seed=1)
    q, k = full(dtype, 32, 1, seqlen_q, 2, 64), full(dtype, -32, 1, 16, 2, 64)
    dq, dk, dv = run.gradients(AttentionSpec(head_dim=64, dtype=dtype), q, k, v, d_o)
    assert_gradient(dv, d_o.double().sum(1, keepdim=True) / 16, dtype)
    expected = reference.gradients(q, k, v, d_o)
    assert_gradient(dk, expected[1], dtype)
    # All keys are equal, so that dq is the sum of dS, which is 0: what is left are the rounding errors of its terms.
    assert (dq.abs() <= 32 / 8 * GRADIENT_BUDGET[dtype] * 8).all()


def test_n7_causal_mask_after_the_cap(run: Backend, dtype: str) -> None:
    """N7: S=2, causal, softcap=1, q=0: a mask before the cap would let row 0 see key 1."""
    k, v = normal(dtype, 1, 2, 1, 64), normal(dtype, 1, 2, 1, 64, seed=1)
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=True, softcap=True)
    o, lse = run(spec, full(dtype, 0, 1, 2, 1, 64), k, v, softcap=1.0)
    assert torch.equal(o[0, 0], v[0, 0].double())
    assert lse[0, 0, 0] == 0


@pytest.mark.parametrize("cap", [1.0, 50.0, 200.0, 700.0])
def test_softcap_where_its_tanh_changes_formula(run: Backend, cap: float) -> None:
    """Scores up to a quarter of the cap, past the border of the cubic: with one key lse is the capped score."""
    scores = (torch.linspace(-0.25, 0.25, 201, dtype=torch.float64) * cap).bfloat16().double()
    q = torch.zeros(1, 201, 1, 64)
    q[0, :, 0, 0] = scores.float()
    one = torch.zeros(1, 1, 1, 64)
    one[..., 0] = 1.0
    spec = AttentionSpec(head_dim=64, softcap=True)
    o, lse = run(spec, q.bfloat16(), one.bfloat16(), one.bfloat16(), softcap=cap, softmax_scale=1.0)
    assert (o[..., 0] == 1).all()
    assert_lse(lse[0, 0], cap * torch.tanh(scores / cap))


def test_n7_window_mask_after_the_cap(run: Backend) -> None:
    """N7's kind with a window: (0, 0) sees only the diagonal, whatever the cap."""
    k, v = normal("bf16", 1, 20, 1, 64), normal("bf16", 1, 20, 1, 64, seed=1)
    spec = AttentionSpec(head_dim=64, window=True, softcap=True)
    o, lse = run(spec, full("bf16", 0, 1, 20, 1, 64), k, v, softcap=1.0, window=(0, 0))
    assert torch.equal(o, v.double())
    assert not lse.any()


def test_n8_gradient_of_softcap(run: Backend, dtype: str) -> None:
    """N8: D=64, softcap=10, both scores 10 before the cap: dq[1] = 0.125 * 1/2 * (1 - tanh(1)^2) = 0.026248."""
    q, k, v = (torch.zeros(1, rows, 1, 64, dtype=DTYPES[dtype]) for rows in (1, 2, 2))
    q[..., 0] = 80
    k[0, :, 0, :2] = torch.tensor([[1, 1], [1, -1]])
    v[0, 0, 0, 0] = 1
    spec = AttentionSpec(head_dim=64, dtype=dtype, softcap=True)
    _, lse = run(spec, q, k, v, softcap=10.0)
    assert_lse(lse, 10 * math.tanh(1) + math.log(2))
    dq, dk, dv = run.gradients(spec, q, k, v, v[:, :1], softcap=10.0)
    rounded = torch.finfo(DTYPES[dtype]).eps
    expected = torch.zeros(64, dtype=torch.float64)
    expected[1] = 0.026248
    torch.testing.assert_close(dq[0, 0, 0], expected, rtol=2 * rounded, atol=0)
    expected = torch.zeros(2, 64, dtype=torch.float64)
    expected[:, 0] = torch.tensor([0.5, -0.5]) * 80 * 0.026248
    torch.testing.assert_close(dk[0, :, 0], expected, rtol=2 * rounded, atol=0)
    expected[:, 0] = 0.5
    torch.testing.assert_close(dv[0, :, 0], expected, rtol=rounded, atol=0)


def test_n11_windows_that_mean_the_same(run: Backend, dtype: str) -> None:
    """N11: S=6, the window (2, 0) without causal, with causal, and (2, 5) with causal."""
    q, k, v = (normal(dtype, 1, 6, 2, 64, seed=seed) for seed in range(3))
    plain = AttentionSpec(head_dim=64, dtype=dtype, window=True)
    causal = AttentionSpec(head_dim=64, dtype=dtype, window=True, causal=True)
    first = run(plain, q, k, v, window=(2, 0))
    for spec, window in ((causal, (2, 0)), (causal, (2, 5))):
        assert_same(run(spec, q, k, v, window=window), first, dtype)


def test_n11_windows_that_mean_causal(run: Backend, dtype: str) -> None:
    """N11: S=5, windows (-1, 0), (4, 0) and (1000, 0) against causal."""
    q, k, v = (normal(dtype, 1, 5, 2, 64, seed=seed) for seed in range(3))
    causal = run(AttentionSpec(head_dim=64, dtype=dtype, causal=True), q, k, v)
    spec = AttentionSpec(head_dim=64, dtype=dtype, window=True)
    for window in ((-1, 0), (4, 0), (1000, 0)):
        assert_same(run(spec, q, k, v, window=window), causal, dtype)


def test_n12_a_window_of_four_keys(run: Backend, dtype: str) -> None:
    """N12: S=16, q=0, causal, window (3, 0): row 10 is the mean of v[7..10]."""
    k, v = normal(dtype, 1, 16, 1, 64), normal(dtype, 1, 16, 1, 64, seed=1)
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=True, window=True)
    o, lse = run(spec, full(dtype, 0, 1, 16, 1, 64), k, v, window=(3, 0))
    assert_o(o[0, 10], v[0, 7:11].double().mean(0), dtype)
    assert_lse(lse[0, 0, 10], math.log(4))
    assert_lse(lse[0, 0, :3], torch.tensor([1.0, 2.0, 3.0]).log())


@pytest.mark.parametrize("causal", [False, True])
def test_n12_a_window_of_the_diagonal(run: Backend, dtype: str, causal: bool) -> None:
    """N12: window (0, 0): o[i] = v[i], lse[i] = s_ii."""
    q, k, v = (normal(dtype, 1, 16, 1, 64, seed=seed) for seed in range(3))
    o, lse = run(AttentionSpec(head_dim=64, dtype=dtype, causal=causal, window=True), q, k, v, window=(0, 0))
    assert torch.equal(o, v.double())
    assert_lse(lse[0, 0], (q.double() * k.double()).sum(3)[0, :, 0] / 8)


def test_n12_gradients_of_a_window_of_four_keys(run: Backend, dtype: str) -> None:
    """N12: q=0, causal, window (3, 0): dv_j sums do_i over the four rows that see j, each over its number of keys."""
    k, v, d_o = (normal(dtype, 1, 16, 1, 64, seed=seed) for seed in range(3))
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=True, window=True)
    _, dk, dv = run.gradients(spec, full(dtype, 0, 1, 16, 1, 64), k, v, d_o, window=(3, 0))
    weighted = d_o[0].double() / torch.arange(1, 17).clamp(max=4)[:, None, None]
    assert_gradient(dv[0], torch.stack([weighted[j : j + 4].sum(0) for j in range(16)]), dtype)
    assert not dk.any()


@pytest.mark.parametrize("causal", [False, True])
def test_n12_gradients_of_a_window_of_the_diagonal(run: Backend, dtype: str, causal: bool) -> None:
    """N12: window (0, 0): P is 1, so dq = dk = 0 and dv = do."""
    q, k, v, d_o = (normal(dtype, 1, 16, 1, 64, seed=seed) for seed in range(4))
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=causal, window=True)
    dq, dk, dv = run.gradients(spec, q, k, v, d_o, window=(0, 0))
    assert_cancelled(dq)
    assert_cancelled(dk)
    assert torch.equal(dv, d_o.double())


def test_n14_lse_is_the_natural_log(run: Backend, dtype: str) -> None:
    """N14: q=0, Sk=8: lse = ln 8 = 2.0794."""
    k, v = normal(dtype, 1, 8, 1, 64), normal(dtype, 1, 8, 1, 64, seed=1)
    _, lse = run(AttentionSpec(head_dim=64, dtype=dtype), full(dtype, 0, 1, 3, 1, 64), k, v)
    assert_lse(lse, 2.0794415416798357)


@pytest.mark.parametrize("deterministic", [False, True])
def test_n14_gradient_of_lse(run: Backend, dtype: str, deterministic: bool) -> None:
    """N14: loss = lse.sum() on S=5, D=8: dq_i = scale * sum_j P_ij k_j."""
    q, k, v = (normal(dtype, 1, 5, 1, 8, seed=seed) for seed in range(3))
    spec = AttentionSpec(head_dim=8, dtype=dtype, deterministic=deterministic, backward=True)
    dq, dk, dv = run.gradients(spec, q, k, v, d_lse=torch.ones(1, 1, 5))
    q, k = q[0, :, 0].double(), k[0, :, 0].double()
    p = torch.softmax(q @ k.T / math.sqrt(8), dim=1)
    assert_gradient(dq[0, :, 0], p @ k / math.sqrt(8), dtype)
    assert_gradient(dk[0, :, 0], p.T @ q / math.sqrt(8), dtype)
    assert not dv.any()


@places
def test_n14_a_loss_of_lse_alone(device: str, arch: str | None) -> None:
    """N14: o takes no part in the loss, as autograd says it: by None."""
    attention = fagen.load(AttentionSpec(head_dim=8, backward=True), arch=arch, emulate=device == "cpu")
    leaves = [normal("bf16", 1, 5, 1, 8, seed=seed).to(device).requires_grad_() for seed in range(3)]
    _, lse = attention(*leaves, return_lse=True)
    lse.sum().backward()
    expected = reference.gradients(*leaves, torch.zeros_like(leaves[0]), torch.ones_like(lse))
    for leaf, x in zip(leaves[:2], expected, strict=False):
        assert leaf.grad is not None
        assert_gradient(leaf.grad.double(), x, "bf16")
    assert leaves[2].grad is None or not leaves[2].grad.any()


@pytest.mark.parametrize("features", [(), ("causal", "softcap", "alibi", "dropout", "window")])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_n18_empty_inputs(run: Backend, features: tuple[str, ...], batch: int, seqlen_q: int, seqlen_k: int) -> None:
    """N18: B=0 and Sq=0 give empties of the right shape; Sk=0 gives o=0, lse=-inf; nothing pending afterwards."""
    spec = AttentionSpec(head_dim=64, **dict.fromkeys(features, True))
    call: dict[str, Any] = {}
    if features:
        call = {"softcap": 2.0, "dropout_p": 0.1, "seed": 1, "window": (5, 5)}
        call["alibi_slopes"] = torch.ones(2, device=run.device)
    q, k, v = (normal("bf16", batch, seqlen, 2, 64) for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    o, lse = run(spec, q, k, v, **call)
    assert not o.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("features", [(), ("deterministic",), ("causal", "softcap", "alibi", "dropout", "window")])
@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 3, 3), (2, 0, 3), (2, 3, 0), (0, 0, 0)])
def test_n18_gradients_of_empty_inputs(
    run: Backend, features: tuple[str, ...], batch: int, seqlen_q: int, seqlen_k: int
) -> None:
    """N18: gradients shaped as the inputs, and 0: without keys dq, without queries dk and dv."""
    spec = AttentionSpec(head_dim=64, backward=True, **dict.fromkeys(features, True))
    call: dict[str, Any] = {}
    if "softcap" in features:
        call = {"softcap": 2.0, "dropout_p": 0.1, "seed": 1, "window": (5, 5)}
        call["alibi_slopes"] = torch.ones(2, device=run.device)
    q, k, v, d_o = (normal("bf16", batch, seqlen, 2, 64) for seqlen in (seqlen_q, seqlen_k, seqlen_k, seqlen_q))
    for gradient in run.gradients(spec, q, k, v, d_o, torch.ones(batch, 2, seqlen_q), **call):
        assert not gradient.any()


def n19_views() -> dict[str, tuple[Tensor, ...]]:
    packed = normal("bf16", 1, 128, 3, 2, 64)
    tiny = normal("bf16", 200)
    q, k, v = (normal("bf16", 2, 40, 2, 64, seed=seed) for seed in range(3))
    return {
        "packed": packed.unbind(2),
        "expanded over the batch": (q, lay_out(k, "expanded"), lay_out(v, "expanded")),
        "expanded over the sequence": tuple(x[:, :1].expand(2, 3, 2, 64) for x in (q, k, v)),
        "heads before the sequence": tuple(lay_out(x, "transposed") for x in (q, k, v)),
        "sliced": tuple(lay_out(x, "sliced") for x in (q, k, v)),
        "strides (7, 3, 5, 1)": tuple(tiny[n : n + 64].as_strided((1, 1, 1, 64), (7, 3, 5, 1)) for n in (0, 64, 128)),
    }


@pytest.mark.parametrize("name", n19_views())
def test_n19_views_equal_their_contiguous_clones(run: Backend, name: str) -> None:
    """N19, forward: any strides with a contiguous last dimension."""
    spec = AttentionSpec(head_dim=64)
    views = n19_views()[name]
    o, lse = run(spec, *views)
    expected_o, expected_lse = run(spec, *(x.clone(memory_format=torch.contiguous_format) for x in views))
    assert torch.equal(o, expected_o) and torch.equal(lse, expected_lse)


@pytest.mark.parametrize("name", n19_views())
def test_n19_gradients_of_views(run: Backend, name: str) -> None:
    """N19: the gradients of views are those of their contiguous clones."""
    spec = AttentionSpec(head_dim=64, backward=True, deterministic=True)
    views = n19_views()[name]
    d_o = normal("bf16", *views[0].shape, seed=5)
    gradients = run.gradients(spec, *views, d_o)
    expected = run.gradients(spec, *(x.clone(memory_format=torch.contiguous_format) for x in views), d_o)
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))


def n19_upstream() -> dict[str, Tensor]:
    shape = (2, 40, 2, 64)
    beside = normal("bf16", 2 * 40 * 2 * 64 + 8)
    return {
        "of o.sum()": torch.ones((), dtype=torch.bfloat16).expand(shape),
        "heads before the sequence": lay_out(normal("bf16", *shape), "transposed"),
        "transposed within heads": normal("bf16", 2, 40, 64, 2).transpose(2, 3),
        "sliced": lay_out(normal("bf16", *shape), "sliced"),
        "expanded over rows": normal("bf16", 2, 1, 2, 64).expand(shape),
        "2 bytes in": beside[1 : 1 + math.prod(shape)].view(shape),
        "packed for a projection": normal("bf16", 2, 40, 3, 2, 64)[:, :, 1],
    }


@pytest.mark.parametrize("name", n19_upstream())
def test_n19_any_strides_of_do(run: Backend, name: str) -> None:
    """N19: o.sum().backward(), whose do has no strides at all, and other views: as their contiguous clones."""
    q, k, v = (normal("bf16", 2, 40, 2, 64, seed=seed) for seed in range(3))
    spec = AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=True)
    d_o = n19_upstream()[name]
    gradients = run.gradients(spec, q, k, v, d_o)
    expected = run.gradients(spec, q, k, v, d_o.clone(memory_format=torch.contiguous_format))
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True))
    for x, y in zip(gradients, reference.gradients(q, k, v, d_o, causal=True), strict=True):
        assert_gradient(x, y, "bf16")


@places
def test_n19_backward_through_one_packed_tensor(device: str, arch: str | None) -> None:
    """N19: q, k, v sliced from one (1, 128, 3, H, D); o.sum().backward() reaches it whole."""
    attention = fagen.load(AttentionSpec(head_dim=64, backward=True), arch=arch, emulate=device == "cpu")
    packed = normal("bf16", 1, 128, 3, 2, 64).to(device).requires_grad_()
    attention(*packed.unbind(2)).sum().backward()
    assert packed.grad is not None
    expected = reference.gradients(*packed.unbind(2), torch.ones(1, 128, 2, 64, device=device))
    for x, y in zip(packed.grad.double().unbind(2), expected, strict=True):
        assert_gradient(x, y, "bf16")


@pytest.mark.parametrize("head_dim", [40, 46, 72, 96, 100])
@pytest.mark.parametrize("bytes_in", [0, 2])
def test_n20_head_dims_and_alignment(run: Backend, dtype: str, head_dim: int, bytes_in: int) -> None:
    """N20: right, or a clear error before any launch; the default scale is that of the true head dim."""
    if head_dim % 8:
        with pytest.raises(fagen.SpecError, match="head_dim"):
            AttentionSpec(head_dim=head_dim, dtype=dtype)
        return
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype)
    shape = (1, 20, 2, head_dim)
    q, k, v = (
        torch.empty(math.prod(shape) + bytes_in // 2, dtype=DTYPES[dtype], device=run.device)[bytes_in // 2 :].view(
            shape
        )
        for _ in range(3)
    )
    for seed, x in enumerate((q, k, v)):
        x.copy_(normal(dtype, *shape, seed=seed))
    try:
        o, lse = run(spec, q, k, v)
    except fagen.FagenError as error:
        assert bytes_in and "align" in str(error)
        return
    expected_o, expected_lse = reference.attention(q.cpu(), k.cpu(), v.cpu(), softmax_scale=head_dim**-0.5)
    assert_o(o, expected_o, dtype)
    assert_lse(lse, expected_lse)


def test_n20_default_scale_of_72(run: Backend) -> None:
    """N20: 1/sqrt(72) = 0.11785, not 1/sqrt(80) or 1/sqrt(96)."""
    ones = full("bf16", 1, 1, 1, 1, 72)
    _, lse = run(AttentionSpec(head_dim=72), ones, ones, ones)
    assert_lse(lse, 72 * 0.11785113019775793)


def far_apart(x: Tensor, stride: int) -> Tensor:
    """x (1, S, H, D) with `stride` elements from row to row, of which the system hands out only what is touched."""
    _, rows, heads, dim = x.shape
    try:
        parent = torch.empty((rows - 1) * stride + heads * dim, dtype=x.dtype)
    except RuntimeError:
        pytest.skip("not enough address space")
    return parent.as_strided(x.shape, (parent.numel(), stride, dim, 1)).copy_(x)


@pytest.mark.parametrize("deterministic", [False, True])
def test_n21_strides_past_32_bits(run: Backend, deterministic: bool) -> None:
    """N21: do with strides (2^30, 64, 1): the third row starts 2^31 elements in."""
    spec = AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=deterministic)
    q, k, v = (normal("bf16", 1, 3, 2, 64, seed=seed) for seed in range(3))
    d_o = normal("bf16", 1, 3, 2, 64, seed=3)
    expected = run.gradients(spec, q, k, v, d_o)
    gradients = run.gradients(spec, q, k, v, far_apart(d_o, 2**30))
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


def test_n21_one_row_of_many_keys(run: Backend) -> None:
    """N21: Sq=1, Sk=33000, q=k=0, v=1: o=1, lse=10.4043; dq=dk=0, dv = do / 33000."""
    q, k, v = full("bf16", 0, 1, 1, 1, 64), full("bf16", 0, 1, 33000, 1, 64), full("bf16", 1, 1, 33000, 1, 64)
    o, lse = run(AttentionSpec(head_dim=64), q, k, v)
    assert ((o - 1).abs() <= (1e-12 if run.name == "reference" else 0)).all()
    assert_lse(lse, 10.4043)
    d_o = normal("bf16", 1, 1, 1, 64)
    for deterministic in (False, True):
        spec = AttentionSpec(head_dim=64, backward=True, deterministic=deterministic)
        dq, dk, dv = run.gradients(spec, q, k, v, d_o)
        assert not dq.any() and not dk.any()
        assert_gradient(dv, d_o.double() / 33000, "bf16")


@pytest.mark.parametrize("batch", [40, pytest.param(8300, marks=pytest.mark.gpu)])
def test_n21_many_single_rows(run: Backend, batch: int) -> None:
    """N21: B=8300, S=1, H=16, D=128: more blocks than 65535 both ways; dq=dk=0, dv=do."""
    if run.where["emulate"] and batch > 40:
        pytest.skip("too many blocks to emulate")
    heads = 4 if batch == 40 else 16
    q, k, v, d_o = (normal("bf16", batch, 1, heads, 128, seed=seed) for seed in range(4))
    dq, dk, dv = run.gradients(AttentionSpec(head_dim=128), q, k, v, d_o)
    assert_cancelled(dq)
    assert_cancelled(dk)
    assert torch.equal(dv, d_o.double())


# What a GPU does at once takes minutes as fibers; the emulated grids are past 256 in each dimension.
@pytest.mark.parametrize(
    ("batch", "heads"),
    [(257, 1), (1, 257), (17, 17)]
    + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in [(65537, 1), (1, 65537), (300, 300)]],
)
def test_n22_large_grids(run: Backend, batch: int, heads: int) -> None:
    """N22: S=1, outputs poisoned first: o = v."""
    if run.where["emulate"] and batch * heads > 1000:
        pytest.skip("too many blocks to emulate")
    q, k, v = (normal("bf16", batch, 1, heads, 64, seed=seed) for seed in range(3))
    o, lse = run(AttentionSpec(head_dim=64), q, k, v)
    assert torch.equal(o, v.double())
    assert_lse(lse[..., 0], ((q.double() * k.double()).sum(3) / 8)[:, 0])


@pytest.mark.parametrize(
    ("batch", "heads"),
    [(257, 1), (1, 257), (17, 17)]
    + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in [(65537, 1), (1, 65537), (300, 300)]],
)
def test_n22_gradients_of_large_grids(run: Backend, batch: int, heads: int) -> None:
    """N22: S=1, results poisoned first: dv=do, dq=dk=0."""
    if run.where["emulate"] and batch * heads > 1000:
        pytest.skip("too many blocks to emulate")
    q, k, v, d_o = (normal("bf16", batch, 1, heads, 64, seed=seed) for seed in range(4))
    dq, dk, dv = run.gradients(AttentionSpec(head_dim=64), q, k, v, d_o)
    assert_cancelled(dq)
    assert_cancelled(dk)
    assert torch.equal(dv, d_o.double())


def test_n25_dropout_reads_out_the_mask(run: Backend, dtype: str) -> None:
    """N25, forward: Sq = Sk = D = 64, v = I, p = 0.3: o is the dropped P, lse that of p = 0."""
    q, k = (normal(dtype, 2, 64, 2, 64, seed=seed) for seed in range(2))
    eye = torch.eye(64, dtype=DTYPES[dtype])[None, :, None].expand(2, 64, 2, 64).contiguous()
    spec = AttentionSpec(head_dim=64, dtype=dtype, dropout=True)
    o, lse = run(spec, q, k, eye, dropout_p=0.3, seed=1234)
    kept = reference.dropout_mask(1234, 0, 2, 2, 64, 64, 0.3)
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8, dim=3)
    dropped = o.transpose(1, 2)
    assert torch.equal(dropped != 0, kept)
    expected = p * kept * 65536 / reference.keep_threshold(0.3)
    assert_o(dropped, expected, dtype)
    assert torch.equal(lse, run(spec, q, k, eye, dropout_p=0.0, seed=1234)[1])


@pytest.mark.parametrize("deterministic", [False, True])
def test_n25_gradients_with_the_same_mask(run: Backend, dtype: str, deterministic: bool) -> None:
    """N25: dv = (dropped P)^T do with the mask of the forward, which an identity for do reads out."""
    q, k, v = (normal(dtype, 2, 64, 2, 64, seed=seed) for seed in range(3))
    eye = torch.eye(64, dtype=DTYPES[dtype])[None, :, None].expand(2, 64, 2, 64).contiguous()
    spec = AttentionSpec(head_dim=64, dtype=dtype, dropout=True, backward=True, deterministic=deterministic)
    dq, dk, dv = run.gradients(spec, q, k, v, eye, dropout_p=0.3, seed=1234)
    kept = reference.dropout_mask(1234, 0, 2, 2, 64, 64, 0.3)
    p = torch.softmax(torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8, dim=3)
    dropped = p * kept * 65536 / reference.keep_threshold(0.3)
    assert torch.equal(dv.permute(0, 2, 3, 1) != 0, kept)
    assert_gradient(dv.permute(0, 2, 3, 1), dropped, dtype)
    expected = reference.gradients(q, k, v, eye, dropout_p=0.3, seed=1234)
    assert_gradient(dq, expected[0], dtype)
    assert_gradient(dk, expected[1], dtype)


def test_n25_gradients_with_p_zero_are_those_without_dropout(run: Backend, dtype: str) -> None:
    """p = 0 is bit-identical to the variant that has no dropout, both ways."""
    q, k, v, d_o = (normal(dtype, 1, 70, 2, 64, seed=seed) for seed in range(4))
    spec = AttentionSpec(head_dim=64, dtype=dtype, backward=True, deterministic=True)
    without = run.gradients(spec, q, k, v, d_o)
    with_dropout = spec.model_copy(update={"dropout": True})
    zero = run.gradients(with_dropout, q, k, v, d_o, dropout_p=0.0, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(zero, without, strict=True))


def test_n25_the_mask_is_one_function_of_seed_and_place(run: Backend) -> None:
    """N25: the same mask with other features and other shapes; another with another seed."""
    q, k = full("bf16", 0, 1, 70, 2, 64), full("bf16", 0, 1, 64, 2, 64)
    eye = torch.eye(64, dtype=torch.bfloat16)[None, :, None].expand(1, 64, 2, 64).contiguous()
    plain = AttentionSpec(head_dim=64, dropout=True)
    causal = AttentionSpec(head_dim=64, dropout=True, causal=True)
    for seed in (0, 2**33 + 1, 2**63 + 5):
        kept = reference.dropout_mask(seed, 0, 1, 2, 70, 64, 0.5)
        o, _ = run(plain, q, k, eye, dropout_p=0.5, seed=seed)
        assert torch.equal(o.transpose(1, 2) != 0, kept)
        o, _ = run(causal, q, k, eye, dropout_p=0.5, seed=seed)
        visible = torch.ones(70, 64, dtype=torch.bool).tril(-6)
        assert torch.equal(o.transpose(1, 2) != 0, kept & visible)


def test_n25_p_zero_is_the_variant_without_dropout(run: Backend, dtype: str) -> None:
    """p = 0 is bit-identical to the variant that has no dropout."""
    q, k, v = (normal(dtype, 1, 70, 2, 64, seed=seed) for seed in range(3))
    without = run(AttentionSpec(head_dim=64, dtype=dtype), q, k, v)
    zero = run(AttentionSpec(head_dim=64, dtype=dtype, dropout=True), q, k, v, dropout_p=0.0, seed=9)
    assert all(torch.equal(a, b) for a, b in zip(zero, without, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_memory_that_no_visible_key_owns(run: Backend, poison: float) -> None:
    """Guards: keys that no row of the call sees, and memory beside and beyond the tensors, never reach a result."""
    q, k, v = (normal("bf16", 1, 200 if n else 20, 2, 64, seed=n) for n in range(3))
    spec = AttentionSpec(head_dim=64, causal=True, window=True)
    expected = run(spec, q, k, v, window=(30, 0))
    k, v = (lay_out(x, "sliced") for x in (k, v))
    k[:, :140], v[:, :140] = poison, poison
    dirty = run(spec, q, k, v, window=(30, 0))
    assert all(torch.equal(a, b) for a, b in zip(dirty, expected, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("features", [("window",), ("causal", "window"), ("causal", "window", "deterministic")])
def test_gradients_of_memory_that_no_visible_key_owns(run: Backend, poison: float, features: tuple[str, ...]) -> None:
    """Guards: what lies in keys that no row sees, and beside the tensors, reaches no gradient; theirs are 0."""
    q, k, v, d_o = (normal("bf16", 1, 200 if n in (1, 2) else 20, 2, 64, seed=n) for n in range(4))
    spec = AttentionSpec(head_dim=64, backward=True, **dict.fromkeys(features, True))
    expected = run.gradients(spec, q, k, v, d_o, window=(30, 0))
    q, k, v, d_o = (lay_out(x, "sliced") for x in (q, k, v, d_o))
    k[:, :140], v[:, :140] = poison, poison
    dq, dk, dv = run.gradients(spec, q, k, v, d_o, window=(30, 0))
    assert not dk[:, :140].any() and not dv[:, :140].any()
    assert torch.equal(dk, expected[1]) and torch.equal(dv, expected[2])
    torch.testing.assert_close(dq, expected[0], rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


@places
@pytest.mark.parametrize(("seqlen", "runs"), [(130, 3), pytest.param(2048, 30, marks=pytest.mark.gpu)])
def test_n26_deterministic_gradients(device: str, arch: str | None, seqlen: int, runs: int) -> None:
    """N26: Hq=8, Hk=2, bf16, causal: bitwise equal gradients from run to run, with other kernels between."""
    if device == "cpu" and seqlen > 130:
        pytest.skip("too many blocks to emulate")
    spec = AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=True)
    attention = fagen.load(spec, arch=arch, emulate=device == "cpu")
    q, d_o = (normal("bf16", 1, seqlen, 8, 64, seed=seed).to(device) for seed in (0, 3))
    k, v = (normal("bf16", 1, seqlen, 2, 64, seed=seed).to(device) for seed in (1, 2))
    first = differentiate(attention, Inputs(q, k, v, {}), d_o)
    for n in range(1, runs):
        torch.randn(64 * n, 512, device=device) @ torch.randn(512, 512, device=device)
        o, lse, gradients = differentiate(attention, Inputs(q, k, v, {}), d_o)
        assert torch.equal(o, first[0]) and torch.equal(lse, first[1])
        assert all(torch.equal(x, y) for x, y in zip(gradients, first[2], strict=True))


@places
def test_n27_calls_without_gradients_leave_no_trace(device: str, arch: str | None) -> None:
    """N27: a call under no_grad, with other values, before and between; then only v requires a gradient."""
    attention = fagen.load(AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=True), arch=arch)
    q, k, v, d_o = (normal("bf16", 1, 70, 2, 64, seed=seed).to(device) for seed in range(4))
    expected = differentiate(attention, Inputs(q, k, v, {}), d_o)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v), expected[0])
        attention(k, v, q)
    leaf = v.clone().requires_grad_()
    o = attention(q, k, leaf)
    with torch.no_grad():
        attention(v, q, k)
    o.backward(d_o)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected[2][2])
    again = differentiate(attention, Inputs(q, k, v, {}), d_o)
    assert all(torch.equal(x, y) for x, y in zip(again[2], expected[2], strict=True))
