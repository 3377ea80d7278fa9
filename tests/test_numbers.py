"""The forward cases N1 to N25 of the case list: inputs whose right value follows from the definition by hand.

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
from fagen.check import DTYPES, LSE_ABSOLUTE, LSE_RELATIVE, OUTPUT_BUDGET, lay_out
from fagen.spec import AttentionSpec

Run = Callable[..., tuple[Tensor, Tensor]]


class Backend:
    """Computes o and lse for a spec, with outputs poisoned first where a kernel runs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.device = "cuda" if name == "gpu" else "cpu"

    def __call__(self, spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(self.device) for x in (q, k, v))
        if self.name == "reference":
            o, lse = reference.attention(q, k, v, causal=spec.causal, **call)
        else:
            o, lse = fagen.load(spec, emulate=self.name == "emulated")(q, k, v, return_lse=True, _poison=True, **call)
            assert o.dtype == q.dtype and lse.dtype == torch.float32
        assert o.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        return o.cpu().double(), lse.cpu().double()


@pytest.fixture(params=["reference", "emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
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


def test_n7_causal_mask_after_the_cap(run: Backend, dtype: str) -> None:
    """N7: S=2, causal, softcap=1, q=0: a mask before the cap would let row 0 see key 1."""
    k, v = normal(dtype, 1, 2, 1, 64), normal(dtype, 1, 2, 1, 64, seed=1)
    spec = AttentionSpec(head_dim=64, dtype=dtype, causal=True, softcap=True)
    o, lse = run(spec, full(dtype, 0, 1, 2, 1, 64), k, v, softcap=1.0)
    assert torch.equal(o[0, 0], v[0, 0].double())
    assert lse[0, 0, 0] == 0


def test_n7_window_mask_after_the_cap(run: Backend) -> None:
    """N7's kind with a window: (0, 0) sees only the diagonal, whatever the cap."""
    k, v = normal("bf16", 1, 20, 1, 64), normal("bf16", 1, 20, 1, 64, seed=1)
    spec = AttentionSpec(head_dim=64, window=True, softcap=True)
    o, lse = run(spec, full("bf16", 0, 1, 20, 1, 64), k, v, softcap=1.0, window=(0, 0))
    assert torch.equal(o, v.double())
    assert not lse.any()


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


def test_n14_lse_is_the_natural_log(run: Backend, dtype: str) -> None:
    """N14: q=0, Sk=8: lse = ln 8 = 2.0794."""
    k, v = normal(dtype, 1, 8, 1, 64), normal(dtype, 1, 8, 1, 64, seed=1)
    _, lse = run(AttentionSpec(head_dim=64, dtype=dtype), full(dtype, 0, 1, 3, 1, 64), k, v)
    assert_lse(lse, 2.0794415416798357)


def test_n14_gradient_of_lse_in_the_reference() -> None:
    """N14: loss = lse.sum() on S=5, D=8: dq_i = scale * sum_j P_ij k_j."""
    q, k, v = (torch.randn(1, 5, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    _, lse = reference.attention(q, k, v)
    lse.sum().backward()
    p = torch.softmax(q[0, :, 0] @ k[0, :, 0].T / math.sqrt(8), dim=1)
    torch.testing.assert_close(q.grad, (p @ k[0, :, 0] / math.sqrt(8))[None, :, None])
    assert v.grad is None or not v.grad.any()


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


# What a GPU does at once takes minutes as fibers; the emulated grids are past 256 in each dimension.
@pytest.mark.parametrize(
    ("batch", "heads"),
    [(257, 1), (1, 257), (17, 17)]
    + [pytest.param(*shape, marks=pytest.mark.gpu) for shape in [(65537, 1), (1, 65537), (300, 300)]],
)
def test_n22_large_grids(run: Backend, batch: int, heads: int) -> None:
    """N22: S=1, outputs poisoned first: o = v."""
    if run.name == "emulated" and batch * heads > 1000:
        pytest.skip("too many blocks to emulate")
    q, k, v = (normal("bf16", batch, 1, heads, 64, seed=seed) for seed in range(3))
    o, lse = run(AttentionSpec(head_dim=64), q, k, v)
    assert torch.equal(o, v.double())
    assert_lse(lse[..., 0], ((q.double() * k.double()).sum(3) / 8)[:, 0])


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
