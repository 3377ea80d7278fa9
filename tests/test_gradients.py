"""The table of gradients against float64 autograd of the reference: emulated, and on a GPU."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import (
    DETERMINISTIC,
    GRADIENTS,
    HOPPER_GRADIENT_SPECS,
    TURING_GRADIENT_SPECS,
    in_fp16,
    largest,
    of_specs,
    specs,
)
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import FEATURES
from torch import Tensor

import fagen
from fagen import reference
from fagen.arch import resolve, sm90
from fagen.build import build
from fagen.check import (
    FLASH_FACTOR,
    OUTPUT_BUDGET,
    Case,
    compare_gradients,
    compare_lse,
    compare_o,
    differentiable_values,
    differentiate,
    flash_error,
    flash_gradient_errors,
)
from fagen.mods import MODS, CallContext, Mod, ScoreContext
from fagen.plan import plan
from fagen.spec import AttentionSpec
from fagen.target import default_archs

SMALL = [case for case in GRADIENTS if not case.large]
HOPPER = of_specs(GRADIENTS, HOPPER_GRADIENT_SPECS)
TURING = largest(in_fp16(GRADIENTS), TURING_GRADIENT_SPECS)

# One case for each way that threads and blocks depend on each other: stages, the sum of dQ, masks, padded dims.
ORDERS = [
    "hdim64_bf16_backward-b1h2k1-q129k127",
    "hdim72_bf16_backward-b1h2k1-q130k65",
    "hdim128_fp16_causal_backward-b1h2k1-q140k64",
    "hdim256_bf16_causal_backward-b1h4k2-q100k100",
    "hdim136_hdimv72_fp16_window_softcap_alibi_dropout_backward-b1h2k1-q33k40-w20,7",
    "hdim64_bf16_causal_window_softcap_alibi_dropout_backward-b2h4k2-q65k70-w30,2-alibi_slopes-dlse",
]

# What `load` is told: the default architecture, and the Hopper family.
families = pytest.mark.parametrize("arch", [None, "sm90a"], ids=["default", "hopper"])

Results = tuple[Tensor, Tensor, tuple[Tensor, ...]]


@pytest.fixture(scope="session")
def emulated_kernels() -> None:
    """All kernels of the table, compiled in one go; the workers of xdist wait for the first."""
    with FileLock(Path(os.environ["FAGEN_CACHE_DIR"]) / "gradients.lock"):
        (arch, *_), _ = default_archs()
        kernels = dict.fromkeys(kernel for spec in specs(SMALL) for kernel in plan(spec, arch))
        kernels |= dict.fromkeys(kernel for spec in specs(HOPPER) for kernel in plan(spec, resolve("sm90a")))
        build(list(kernels), emulate=True)


@pytest.fixture(scope="session")
def turing_kernels() -> None:
    with FileLock(Path(os.environ["FAGEN_CACHE_DIR"]) / "turing-gradients.lock"):
        kernels = dict.fromkeys(kernel for spec in specs(TURING) for kernel in plan(spec, resolve("sm75")))
        build(list(kernels), emulate=True)


def by_id(id_: str) -> Case:
    return next(case for case in GRADIENTS if case.id == id_)


def call(case: Case, device: str, arch: str | None = None) -> Results:
    attention = fagen.load(case.spec, arch=arch, emulate=device == "cpu")
    return differentiate(attention, case.inputs(device), *case.upstream(device))


def judge(case: Case, device: str, arch: str | None = None) -> None:
    """o, lse, dq, dk and dv within their budgets of the reference, or of PyTorch's flash kernel's on a GPU if more."""
    inputs, (d_o, d_lse) = case.inputs(device), case.upstream(device)
    o, lse, gradients = call(case, device, arch)
    values = [inputs.call[name] for name in differentiable_values(case.spec, inputs)]
    for x, like in zip(gradients, (inputs.q, inputs.k, inputs.v, *values), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
    expected_o, expected_lse = case.reference(inputs)
    expected = case.reference_gradients(inputs, d_o, d_lse)
    budget = max(OUTPUT_BUDGET[case.spec.dtype], FLASH_FACTOR * (flash_error(case, inputs, expected_o) or 0.0))
    flash = flash_gradient_errors(case, inputs, d_o, expected)
    results = {"o": compare_o(o, expected_o, budget), "lse": compare_lse(lse, expected_lse)}
    results |= compare_gradients(case, inputs, gradients, expected, flash)
    for name, result in results.items():
        assert result.passed, f"{name}: {result}"


def same_bits(results: Results, expected: Results) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip((*results[:2], *results[2]), (*expected[:2], *expected[2]), strict=True)
    )


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_emulated(case: Case) -> None:
    judge(case, "cpu")


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("case", HOPPER, ids=lambda case: case.id)
def test_hopper_emulated(case: Case) -> None:
    judge(case, "cpu", "sm90a")


def test_hopper_rows_have_every_feature_and_tile() -> None:
    """A tile or a feature that joins gets its rows."""
    rows = list(specs(HOPPER))
    some = [
        AttentionSpec(head_dim=head_dim, head_dim_v=dim_v, causal=causal, window=window, dropout=window, backward=True)
        for head_dim in range(8, 257, 8)
        for dim_v in (8, head_dim, 256)
        for causal in (False, True)
        for window in (False, True)
    ]
    assert {sm90.backward_tile(spec) for spec in rows} == {sm90.backward_tile(spec) for spec in some}
    assert {name for spec in rows for name in FEATURES if getattr(spec, name)} == set(FEATURES)
    assert {spec.dtype for spec in rows} == {"bf16", "fp16"}
    assert any(case.lse_gradient for case in HOPPER) and any(case.heads > case.heads_k > 1 for case in HOPPER)
    assert any(spec.deterministic for spec in rows)
    for spec in rows:
        (family,) = [kernel.family for kernel in plan(spec, resolve("sm90a")) if kernel.kind == "bwd"]
        assert family == "sm90"


@pytest.mark.usefixtures("turing_kernels")
@pytest.mark.parametrize("case", TURING, ids=lambda case: case.id)
def test_turing_emulated(case: Case) -> None:
    judge(case, "cpu", "sm75")


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRADIENTS, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    judge(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", in_fp16(GRADIENTS), ids=lambda case: case.id)
def test_turing_on_this_gpu(case: Case) -> None:
    """Turing's kernels as PTX, which the driver of any newer card compiles: its numbers, not its speed."""
    judge(case, "cuda", "7.5+PTX")


def test_a_bias_gradient_may_have_the_rounding_of_o() -> None:
    """A row of two keys, of which one has nearly all the weight, has a dS that is little more than the error of delta
    from o in bf16: no kernel that stores o can do better."""
    case = by_id("hdim256_bf16_causal_bias_backward-b2h8k2-q515k515")
    inputs, (d_o, _) = case.inputs("cpu"), case.upstream("cpu")
    o, _ = case.reference(inputs)
    error = ((o.bfloat16().double() - o) * d_o.double()).sum(-1).transpose(1, 2)
    rounded = case.reference_gradients(inputs, d_o, -error)
    expected = case.reference_gradients(inputs, d_o, None)
    assert compare_gradients(case, inputs, rounded, expected, {})["dbias"].passed
    wrong = (*rounded[:3], rounded[3] * 1.05)
    assert not compare_gradients(case, inputs, wrong, expected, {})["dbias"].passed


# ---------------------------------------------------------------- order


@pytest.mark.usefixtures("emulated_kernels")
@families
@pytest.mark.parametrize("id_", ORDERS)
def test_the_order_of_threads_changes_nothing(id_: str, arch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between barriers threads may run in any order: several seeds of the emulator's order give the same bits, but for
    the last one of dq, a sum of float32 in any order."""
    case = by_id(id_)
    eps = torch.finfo(case.inputs().q.dtype).eps
    monkeypatch.delenv("FAGEN_EMULATE_SEED", raising=False)
    o, lse, (dq, dk, dv) = call(case, "cpu", arch)
    for seed in ("1", "2", "20261130"):
        monkeypatch.setenv("FAGEN_EMULATE_SEED", seed)
        other_o, other_lse, (other_dq, other_dk, other_dv) = call(case, "cpu", arch)
        assert torch.equal(other_o, o) and torch.equal(other_lse, lse)
        assert torch.equal(other_dk, dk) and torch.equal(other_dv, dv)
        torch.testing.assert_close(other_dq, dq, rtol=2 * eps, atol=1e-6)


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("spec", list(specs(DETERMINISTIC)), ids=lambda spec: spec.slug)
def test_deterministic_gradients_emulated(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise equal from run to run, in any order of the threads."""
    case = max(
        (case for case in DETERMINISTIC if case.spec == spec and not case.large), key=lambda c: c.seqlen_q * c.seqlen_k
    )
    monkeypatch.delenv("FAGEN_EMULATE_SEED", raising=False)
    first = call(case, "cpu")
    assert same_bits(call(case, "cpu"), first)
    for seed in ("1", "2", "20261130"):
        monkeypatch.setenv("FAGEN_EMULATE_SEED", seed)
        assert same_bits(call(case, "cpu"), first)


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("spec", [s for s in specs(HOPPER) if s.deterministic], ids=lambda spec: spec.slug)
def test_hopper_adds_to_dq_in_turns(spec: AttentionSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise equal where more than two blocks add to a tile of dQ, whichever OS threads run them in any order: up to
    two begin with 0, and their sum has no order."""
    window = (900, 900) if spec.window else None
    case = Case(spec=spec, batch=1, heads=2, heads_k=1, seqlen_q=100, seqlen_k=600, window=window, lse_gradient=True)
    monkeypatch.delenv("FAGEN_EMULATE_SEED", raising=False)
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", "1")
    first = call(case, "cpu", "sm90a")
    for seed, os_threads in (("0", "8"), ("1", "8"), ("20261130", "2")):
        monkeypatch.setenv("FAGEN_EMULATE_SEED", seed)
        monkeypatch.setenv("FAGEN_EMULATE_THREADS", os_threads)
        assert same_bits(call(case, "cpu", "sm90a"), first)


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("spec", list(specs(DETERMINISTIC)), ids=lambda spec: spec.slug)
def test_deterministic_and_not_agree(spec: AttentionSpec) -> None:
    """The two ways of dq: the same sums, in another order."""
    case = next(case for case in DETERMINISTIC if case.spec == spec and not case.large and case.seqlen_q > 64)
    inputs, upstream = case.inputs(), case.upstream()
    gradients = differentiate(fagen.load(spec, emulate=True), inputs, *upstream)[2]
    other = spec.model_copy(update={"deterministic": False})
    expected = differentiate(fagen.load(other, emulate=True), inputs, *upstream)[2]
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=4 * torch.finfo(x.dtype).eps, atol=1e-5)


# ---------------------------------------------------------------- what is asked for


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize(
    ("device", "arch"),
    [("cpu", None), ("cpu", "sm90a"), pytest.param("cuda", None, marks=pytest.mark.gpu)],
    ids=["default", "hopper", "gpu"],
)
@pytest.mark.parametrize(
    "id_",
    [
        "hdim72_fp16_backward_deterministic-b1h2k1-q130k65-sliced",
        "hdim64_hdimv128_bf16_backward_deterministic-b1h2k1-q65k40-dlse",
        "hdim64_bf16_backward-b1h2k1-q129k127",
        "hdim256_bf16_causal_backward-b1h4k2-q100k100",
    ],
)
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_gradients_of_some_inputs(id_: str, wanted: tuple[int, ...], device: str, arch: str | None) -> None:
    """The gradients that are asked for are those that all three together give, and the others are not computed."""
    case = by_id(id_)
    inputs, (d_o, d_lse) = case.inputs(device), case.upstream(device)
    expected = call(case, device, arch)[2]
    leaves = [x.detach().requires_grad_(n in wanted) for n, x in enumerate((inputs.q, inputs.k, inputs.v))]
    attention = fagen.load(case.spec, arch=arch, emulate=device == "cpu")
    o, lse = attention(*leaves, return_lse=True, **inputs.call)
    torch.autograd.backward(*((o, d_o) if d_lse is None else ((o, lse), (d_o, d_lse))))
    for n, leaf in enumerate(leaves):
        if n not in wanted:
            assert leaf.grad is None
            continue
        assert leaf.grad is not None
        if n > 0 or case.spec.deterministic or device == "cpu":
            assert torch.equal(leaf.grad, expected[n])
        else:
            torch.testing.assert_close(leaf.grad, expected[n], rtol=2 * torch.finfo(leaf.dtype).eps, atol=1e-5)


@pytest.mark.usefixtures("emulated_kernels")
@families
@pytest.mark.parametrize("id_", ORDERS)
def test_a_batch_is_its_entries(id_: str, arch: str | None) -> None:
    """Each batch entry alone gives the gradients that it gives in a batch; without dropout, whose mask numbers the
    batch."""
    case = replace(by_id(id_), batch=2, values={}, dropout_p=None)
    if case.spec.dropout:
        case = replace(case, dropout_p=0.0)
    inputs, (d_o, d_lse) = case.inputs(), case.upstream()
    attention = fagen.load(case.spec, arch=arch, emulate=True)
    both = differentiate(attention, inputs, d_o, d_lse)
    for b in range(2):
        entry = slice(b, b + 1)
        part = replace(inputs, q=inputs.q[entry], k=inputs.k[entry], v=inputs.v[entry])
        o, lse, gradients = differentiate(attention, part, d_o[entry], None if d_lse is None else d_lse[entry])
        assert torch.equal(o, both[0][entry]) and torch.equal(lse, both[1][entry])
        assert all(torch.equal(x, y[entry]) for x, y in zip(gradients, both[2], strict=True))


@pytest.mark.usefixtures("emulated_kernels")
@families
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "id_", ["hdim64_bf16_causal_backward-b1h32k16-q15k2", "hdim64_bf16_causal_backward-b1h2k1-q5k0"]
)
def test_lse_gradients_of_rows_that_see_nothing(id_: str, value: float, arch: str | None) -> None:
    """Their lse is -inf, and what a loss makes of that is often NaN; it touches nothing."""
    case = replace(by_id(id_), lse_gradient=True)
    inputs, (d_o, d_lse) = case.inputs(), case.upstream()
    assert d_lse is not None
    attention = fagen.load(case.spec, arch=arch, emulate=True)
    expected = differentiate(attention, inputs, d_o, d_lse)
    rows, _ = reference.seen(case.seqlen_q, case.seqlen_k, causal=case.spec.causal)
    dirty = d_lse.clone()
    dirty[:, :, ~rows] = value
    assert not rows.all() and same_bits(differentiate(attention, inputs, d_o, dirty), expected)


@pytest.mark.usefixtures("emulated_kernels")
@families
@pytest.mark.parametrize("name", ["q", "d_o"])
@pytest.mark.parametrize("spec", ["hdim64_bf16_causal_backward", "hdim64_bf16_causal_backward_deterministic"])
def test_what_rows_that_see_nothing_hold(spec: str, name: str, arch: str | None) -> None:
    """NaN there, as a loss makes of o = 0, touches nothing but what the row itself owns: 0."""
    case = by_id(f"{spec}-b1h32k16-q15k2")
    inputs, (d_o, _) = case.inputs(), case.upstream()
    attention = fagen.load(case.spec, arch=arch, emulate=True)
    expected = differentiate(attention, inputs, d_o)
    rows, _ = reference.seen(case.seqlen_q, case.seqlen_k, causal=True)
    q, d_o = inputs.q.clone(), d_o.clone()
    (q if name == "q" else d_o)[:, ~rows] = math.nan
    assert same_bits(differentiate(attention, replace(inputs, q=q), d_o), expected)


# ---------------------------------------------------------------- score modifications


@pytest.mark.parametrize("mod", MODS, ids=lambda mod: mod.name)
def test_eager_definitions_by_finite_differences(mod: Mod) -> None:
    """What the table trusts: autograd through the eager definition of each modification."""
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=generator)
    call = CallContext(batch=1, heads_q=2, seqlen_q=3, seqlen_k=4, softmax_scale=0.5, device=torch.device("cpu"))
    value = mod.example(call)
    row, col = torch.arange(1, 4)[:, None], torch.arange(4)[None, :]
    context = ScoreContext(row=row, col=col, rows=slice(0, 3), keys=slice(0, 4))
    assert torch.autograd.gradcheck(lambda s: mod.eager(s, value, context), scores.requires_grad_())
    if mod.gradient is not None:
        wanted = value.double().requires_grad_()
        assert torch.autograd.gradcheck(lambda value: mod.eager(scores, value, context), wanted)


@pytest.mark.parametrize("mod", [mod for mod in MODS if mod.differentiable], ids=lambda mod: mod.name)
@pytest.mark.parametrize(
    ("head_dim", "dtype", "arch", "deterministic"),
    [
        (16, "bf16", None, False),
        (16, "bf16", None, True),
        (128, "fp16", None, False),
        (128, "fp16", None, True),
        (136, "fp16", "sm90a", True),
    ],
)
def test_each_modification_alone(mod: Mod, head_dim: int, dtype: str, arch: str | None, deterministic: bool) -> None:
    """Whatever joins the list of modifications: its backward fragment against autograd of its eager definition."""
    on = {mod.name: True, "deterministic": deterministic}
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype, backward=True, **on)
    judge(Case(spec=spec, batch=2, heads=4, heads_k=2, seqlen_q=70, seqlen_k=40, lse_gradient=True), "cpu", arch)


@pytest.mark.usefixtures("emulated_kernels")
@families
@pytest.mark.parametrize("scale", [1e-3, 0.1, 0.3, 1.0, 4.0])
def test_softcap_from_its_linear_part_to_where_it_is_flat(scale: float, arch: str | None) -> None:
    """The derivative 1 - tanh^2 over its whole range: scores of `scale` caps."""
    case = by_id("hdim64_bf16_softcap_backward-b1h2k1-q64k64")
    judge(replace(case, heads=4, heads_k=2, values={"softcap": 1.0 / scale}), "cpu", arch)


# ---------------------------------------------------------------- calls that nobody thought of

EVERYTHING = AttentionSpec(head_dim=64, causal=True, window=True, softcap=True, alibi=True, dropout=True, backward=True)
SIDE = st.one_of(st.just(-1), st.integers(0, 160))


@pytest.mark.usefixtures("emulated_kernels")
@given(
    spec=st.sampled_from(
        [
            AttentionSpec(head_dim=64, window=True, backward=True),
            AttentionSpec(head_dim=64, causal=True, backward=True, deterministic=True),
            AttentionSpec(head_dim=64, dtype="fp16", backward=True),
            EVERYTHING,
        ]
    ),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    seqlen_q=st.integers(0, 150),
    seqlen_k=st.integers(0, 300),
    window=st.tuples(SIDE, SIDE),
    dropout_p=st.sampled_from([0.0, 0.2, 0.5]),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
    lse_gradient=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_call(
    spec: AttentionSpec,
    batch: int,
    heads: tuple[int, int],
    window: tuple[int, int],
    dropout_p: float,
    **sizes: Any,
) -> None:
    """Every element within four of its bounds, since errors over few rows are no average; or off by less than a budget
    of 1, the size of one key's part: with hardly any keys a row, that is all one knows of what cancels. What takes no
    part is exactly 0."""
    case = Case(
        spec=spec,
        batch=batch,
        heads=heads[0],
        heads_k=heads[1],
        window=window if spec.window else None,
        dropout_p=dropout_p if spec.dropout else None,
        **sizes,
    )
    inputs, upstream = case.inputs(), case.upstream()
    o, lse, gradients = call(case, "cpu")
    expected = case.reference_gradients(inputs, *upstream)
    compared = compare_gradients(case, inputs, gradients, expected, {})
    for (name, result), x, ref in zip(compared.items(), gradients, expected, strict=True):
        if result.elementwise > 4:
            assert math.isfinite(result.elementwise), f"{name}: {result}"
            assert (x - ref).abs().max() <= result.budget, f"{name}: {result}"
    expected_o, expected_lse = case.reference(inputs)
    assert compare_o(o, expected_o, OUTPUT_BUDGET[spec.dtype]).elementwise <= 1
    assert compare_lse(lse, expected_lse).passed
