"""The judge itself: what `compare_o`, `compare_lse`, `compare_gradient` and `check` let pass and what they do not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from cases import CASES, GRADIENTS
from torch import Tensor

from fagen import check_decode as decode
from fagen import ops, reference
from fagen.check import (
    Case,
    check,
    compare_gradient,
    compare_gradients,
    compare_lse,
    compare_o,
    flash_error,
    flash_gradient_errors,
    lay_out,
    poisoned_memory,
)
from fagen.errors import LaunchError, SpecError
from fagen.spec import AttentionSpec

SPEC = AttentionSpec(head_dim=16)
BUDGET = 2.5e-3


@pytest.fixture
def expected() -> tuple[Tensor, Tensor]:
    return Case(spec=SPEC, batch=2, heads=4, heads_k=2, seqlen_q=10, seqlen_k=30).reference(
        Case(spec=SPEC, batch=2, heads=4, heads_k=2, seqlen_q=10, seqlen_k=30).inputs()
    )


def test_a_rounded_reference_passes(expected: tuple[Tensor, Tensor]) -> None:
    o, lse = expected
    assert compare_o(o.bfloat16(), o, BUDGET).passed
    assert compare_o(o.half(), o, 4e-4).passed
    assert compare_lse(lse.float(), lse).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(expected: tuple[Tensor, Tensor], value: float) -> None:
    o, lse = expected
    wrong_o, wrong_lse = o.clone(), lse.clone()
    wrong_o[1, 2, 3, 4] = value
    wrong_lse[1, 3, 2] = value
    for result, place in (
        (compare_o(wrong_o, o, BUDGET), (1, 3, 2, 4)),
        (compare_lse(wrong_lse, lse), (1, 3, 2, None)),
    ):
        assert not result.passed and result.worst is not None
        assert (result.worst.batch, result.worst.head, result.worst.row, result.worst.dim) == place


def test_poison_that_was_never_overwritten_fails(expected: tuple[Tensor, Tensor]) -> None:
    o, lse = expected
    assert not compare_o(torch.full_like(o, math.nan), o, BUDGET).passed
    assert not compare_lse(torch.full_like(lse, math.nan), lse).passed
    # Not even where the reference is NaN, which is then at fault itself.
    assert not compare_o(torch.full_like(o, math.nan), torch.full_like(o, math.nan), BUDGET).passed
    assert not compare_lse(torch.full_like(lse, math.nan), torch.full_like(lse, math.nan)).passed


def test_one_wrong_element_among_many_is_named() -> None:
    """A fault that the norm cannot see: one element of a million."""
    expected = torch.randn(4, 512, 8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = expected.clone()
    wrong[3, 500, 7, 63] += 0.5
    result = compare_o(wrong, expected, BUDGET)
    assert result.error < BUDGET and result.elementwise > 1 and not result.passed
    assert result.worst is not None
    assert (result.worst.batch, result.worst.head, result.worst.row, result.worst.dim) == (3, 7, 500, 63)
    assert result.worst.value == wrong[3, 500, 7, 63] and result.worst.reference == expected[3, 500, 7, 63]


def test_a_small_error_everywhere_fails_by_its_norm(expected: tuple[Tensor, Tensor]) -> None:
    o, _ = expected
    result = compare_o(o * 1.004, o, BUDGET)
    assert result.error == pytest.approx(4e-3) and result.elementwise < 1 and not result.passed


def test_rows_that_see_nothing_must_be_exact() -> None:
    o, lse = torch.zeros(1, 2, 1, 8, dtype=torch.float64), torch.tensor([[[-math.inf, 1.0]]], dtype=torch.float64)
    o[:, 1] = 1.0
    assert compare_o(o, o, BUDGET).passed and compare_lse(lse, lse).passed
    tiny = o.clone()
    tiny[0, 0, 0, 0] = 1e-30
    assert not compare_o(tiny, o, BUDGET).passed
    assert not compare_o(torch.full_like(o, 1e-30), torch.zeros_like(o), BUDGET).passed
    for wrong in ([-1e30, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]):
        assert not compare_lse(torch.tensor([[wrong]]), lse).passed


def test_lse_absolute_near_one_and_relative_when_large() -> None:
    lse = torch.tensor([[[1.0, -8192.0, 1.4e11]]], dtype=torch.float64)
    for index, allowed in enumerate([1e-4, 8.192e-3, 1.4e5]):
        for factor, passes in ((0.99, True), (1.01, False)):
            moved = lse.clone()
            moved[0, 0, index] += factor * allowed
            assert compare_lse(moved, lse).passed is passes


def test_empty_outputs_pass_and_other_shapes_do_not() -> None:
    empty = torch.zeros(0, 3, 2, 8)
    result = compare_o(empty, empty.double(), BUDGET)
    assert result.passed and result.worst is None
    assert compare_lse(torch.zeros(0, 2, 3), torch.zeros(0, 2, 3)).passed
    with pytest.raises(LaunchError, match="shape"):
        compare_o(torch.zeros(1, 3, 2, 8), torch.zeros(1, 2, 3, 8), BUDGET)


# ---------------------------------------------------------------- gradients

GRADIENT_BUDGET = 1e-2


@pytest.fixture
def gradient() -> Tensor:
    """(2, 30, 4, 16), of which the first five rows take no part."""
    x = torch.randn(2, 30, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, :5] = 0
    return x


SEEN = torch.arange(30) >= 5


def test_a_rounded_gradient_passes(gradient: Tensor) -> None:
    result = compare_gradient(gradient.bfloat16(), gradient, GRADIENT_BUDGET, SEEN)
    assert result.passed and 0 < result.error < 0.3 * GRADIENT_BUDGET
    assert compare_gradient(gradient.half(), gradient, 1.5e-3, SEEN).passed


@pytest.mark.parametrize("value", [math.nan, math.inf, 5.0])
def test_a_wrong_element_of_a_gradient_is_named(gradient: Tensor, value: float) -> None:
    wrong = gradient.clone()
    wrong[1, 20, 3, 4] = value
    result = compare_gradient(wrong, gradient, GRADIENT_BUDGET, SEEN)
    assert not result.passed and result.worst is not None
    assert (result.worst.batch, result.worst.head, result.worst.row, result.worst.dim) == (1, 3, 20, 4)


def test_a_gradient_that_is_nothing_fails(gradient: Tensor) -> None:
    for wrong in (torch.zeros_like(gradient), torch.full_like(gradient, math.nan), gradient * 1.02, -gradient):
        assert not compare_gradient(wrong, gradient, GRADIENT_BUDGET, SEEN).passed


def test_rows_that_take_no_part_must_be_exactly_zero(gradient: Tensor) -> None:
    tiny = gradient.clone()
    tiny[0, 4, 0, 0] = 1e-30
    assert not compare_gradient(tiny, gradient, GRADIENT_BUDGET, SEEN).passed
    nothing = torch.zeros_like(gradient)
    assert compare_gradient(nothing, nothing, GRADIENT_BUDGET, torch.zeros(30, dtype=torch.bool)).passed
    assert not compare_gradient(nothing + 1e-30, nothing, GRADIENT_BUDGET, torch.zeros(30, dtype=torch.bool)).passed


def test_what_cancels_may_leave_the_rounding_of_float32() -> None:
    """With one key a row dq and dk are 0, and a kernel that subtracts two float32 sums finds 1e-7."""
    nothing = torch.zeros(1, 3, 2, 16, dtype=torch.float64)
    seen = torch.ones(3, dtype=torch.bool)
    assert compare_gradient(nothing + 1e-7, nothing, 1.5e-3, seen).passed
    assert not compare_gradient(nothing + 1e-4, nothing, 1.5e-3, seen).passed


def test_a_gradient_may_be_off_by_what_is_allowed_besides(gradient: Tensor) -> None:
    off, besides = gradient.clone(), torch.zeros_like(gradient)
    off[1, 20, 3, 4] += 0.2
    assert not compare_gradient(off, gradient, GRADIENT_BUDGET, SEEN).passed
    besides[1, 20, 3, 4] = 0.2
    assert compare_gradient(off, gradient, GRADIENT_BUDGET, SEEN, besides).passed
    off[1, 20, 3, 4] += 0.2
    assert not compare_gradient(off, gradient, GRADIENT_BUDGET, SEEN, besides).passed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (0, 0), (2, 0), (0, 3), (-1, 1), (1, -1)])
@pytest.mark.parametrize("seqlens", [(5, 5), (7, 3), (3, 7), (4, 0), (0, 4), (20, 6), (6, 20)])
def test_which_rows_and_keys_are_seen(causal: bool, window: tuple[int, int], seqlens: tuple[int, int]) -> None:
    """As the definition says, one pair at a time."""
    seqlen_q, seqlen_k = seqlens
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            distance = j - (i + seqlen_k - seqlen_q)
            visible[i, j] = not (
                (causal and distance > 0)
                or (window[0] >= 0 and distance < -window[0])
                or (window[1] >= 0 and distance > window[1])
            )
    rows, keys = reference.seen(seqlen_q, seqlen_k, causal=causal, window=window)
    assert torch.equal(rows, visible.any(1)) and torch.equal(keys, visible.any(0))


def test_gradients_are_judged_by_their_names() -> None:
    case = Case(spec=AttentionSpec(head_dim=16, causal=True, backward=True), seqlen_q=20, seqlen_k=10)
    inputs, upstream = case.inputs(), case.upstream()
    dq, dk, dv = case.reference_gradients(inputs, *upstream)
    assert all(result.passed for result in compare_gradients(case, inputs, (dq, dk, dv), (dq, dk, dv), {}).values())
    results = compare_gradients(case, inputs, (dq, 1.02 * dk, dv), (dq, dk, dv), {})
    assert [name for name, result in results.items() if not result.passed] == ["dk"]
    # Where PyTorch's own kernel loses more, so may this one.
    results = compare_gradients(case, inputs, (dq, 1.02 * dk, dv), (dq, dk, dv), {"dk": 0.02})
    assert results["dk"].passed and results["dk"].budget == pytest.approx(0.024)
    assert flash_gradient_errors(case, inputs, upstream[0], (dq, dk, dv)) == {}  # no word on the CPU


def test_poisoned_memory() -> None:
    with poisoned_memory():
        assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(5).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# ---------------------------------------------------------------- cases


def test_the_table_names_each_row_once() -> None:
    for table in (CASES, GRADIENTS):
        assert len({case.id for case in table}) == len(table)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
def test_layouts_hold_the_same_values(layout: Any) -> None:
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    view = lay_out(x, layout)
    assert view.stride(3) == 1 and not view.is_contiguous()
    assert torch.equal(view, x[:1].expand(2, -1, -1, -1) if layout == "expanded" else x)


def test_inputs_are_those_of_the_seed() -> None:
    spec = AttentionSpec(head_dim=16, window=True, softcap=True, alibi=True, dropout=True)
    first, again, other = (Case(spec=spec, seed=seed).inputs() for seed in (3, 3, 4))
    assert torch.equal(first.q, again.q) and torch.equal(first.v, again.v) and not torch.equal(first.q, other.q)
    assert set(first.call) == {"window", "softcap", "alibi_slopes", "dropout_p", "seed"}


def test_upstream_gradients_have_the_layout_of_the_case() -> None:
    case = Case(spec=SPEC, batch=2, heads=4, seqlen_q=5, layout="sliced", lse_gradient=True)
    d_o, d_lse = case.upstream()
    assert d_lse is not None and d_o.dtype == torch.bfloat16 and d_lse.dtype == torch.float32
    assert d_o.shape == (2, 5, 4, 16) and d_lse.shape == (2, 4, 5)
    assert not d_o.is_contiguous() and not d_lse.is_contiguous()
    assert not d_o.isnan().any() and not d_lse.isnan().any()


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("batch", "used"), [(1, [26]), (3, [0, 20, 40])])
def test_ragged_entries_have_their_own_keys(batch: int, used: list[int], paged: bool) -> None:
    """The reference is that of each entry's keys alone, and behind them there is NaN."""
    spec = AttentionSpec(head_dim=16, causal=True, alibi=True, split_kv=True, paged=paged)
    case = Case(spec=spec, batch=batch, heads=4, heads_k=2, seqlen_q=3, seqlen_k=40, ragged=True, num_splits=2)
    inputs = case.inputs()
    assert case.used == inputs.call["seqused_k"].tolist() == used and inputs.call["num_splits"] == 2
    k, v = inputs.k, inputs.v
    if paged:
        k, v = (x[inputs.call["block_table"].long()].flatten(1, 2) for x in (k, v))
    o, lse = case.reference(inputs)
    for b, count in enumerate(used):
        assert k[b, count:].isnan().all() and not k[b, :count].isnan().any() and v[b, count:].isnan().all()
        expected = reference.attention(
            *(inputs.q[b, None], k[b, None, :count], v[b, None, :count]),
            causal=True,
            alibi_slopes=inputs.call["alibi_slopes"],
        )
        assert torch.equal(o[b], expected[0][0]) and torch.equal(lse[b], expected[1][0])
    assert case.id.endswith("-splits2-ragged")


def test_flash_has_no_word_on_the_cpu() -> None:
    case = Case(spec=SPEC)
    inputs = case.inputs()
    assert flash_error(case, inputs, case.reference(inputs)[0]) is None


# ---------------------------------------------------------------- check


def test_check_emulated() -> None:
    result = check(SPEC, emulate=True, batch=1, seqlen_q=20, seqlen_k=33)
    assert result.passed and result.o.passed and result.lse.passed and result.emulated
    assert 0 < result.o.error <= result.o.budget == BUDGET
    assert result.shape == {"batch": 1, "heads": 2, "heads_k": 1, "seqlen_q": 20, "seqlen_k": 33}
    assert len(result.first_values) == len(result.first_reference) == 4
    assert result.first_values == pytest.approx(result.first_reference, abs=0.02)
    assert result.seconds > 0 and result.smem_bytes > 0 and result.slug.startswith("fwd_hdim16_bf16")
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["spec"]["head_dim"] == 16 and document["o"]["worst"]["dim"] == result.o.worst.dim  # type: ignore[union-attr]


def test_check_reports_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that drops the last key is found out, and the report stays printable as JSON with its NaN."""
    original = ops.Attention.__call__

    def wrong(self: ops.Attention, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
        o, lse = original(self, q, k[:, :-1], v[:, :-1], **call)  # type: ignore[misc]
        o[0, 0, 0, 0] = math.nan
        return o, lse

    monkeypatch.setattr(ops.Attention, "__call__", wrong)
    result = check(SPEC, emulate=True, batch=1, seqlen_q=20, seqlen_k=33)
    assert not result.passed and not result.o.passed and not result.lse.passed
    assert math.isnan(result.o.error) and result.to_json()["o"]["error"] == "nan"
    assert result.o.worst is not None and result.o.worst.row == 0


BACKWARD = AttentionSpec(head_dim=16, causal=True, backward=True)


def test_check_of_gradients() -> None:
    result = check(BACKWARD, emulate=True, batch=1, seqlen_q=33, seqlen_k=20)
    assert result.passed and list(result.gradients) == ["dq", "dk", "dv"]
    for comparison in result.gradients.values():
        assert comparison.passed and 0 < comparison.error <= comparison.budget == GRADIENT_BUDGET
        assert comparison.worst is not None
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["gradients"]["dv"]["error"] == result.gradients["dv"].error
    assert document["gradients"]["dk"]["worst"]["row"] in range(20)
    assert result.slug.startswith("bwd_hdim16") and result.backward_seconds is not None
    without = check(SPEC, emulate=True, batch=1, seqlen_q=5)
    assert without.gradients == {} and without.backward_seconds is None


@pytest.mark.parametrize("wrong", ["dq", "dk", "dv"])
@pytest.mark.parametrize("lse_too", [False, True])
def test_check_reports_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch, wrong: str, lse_too: bool) -> None:
    """One of the three, of a loss of o alone or only where lse takes part."""
    original = torch.autograd.grad

    def grad(outputs: Any, *arguments: Any, **named: Any) -> Any:
        gradients = list(original(outputs, *arguments, **named))
        if isinstance(outputs, tuple) == lse_too and gradients[0].dtype == torch.bfloat16:
            gradients[["dq", "dk", "dv"].index(wrong)] *= 1.05
        return tuple(gradients)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    result = check(BACKWARD, emulate=True, batch=1, seqlen_q=33, seqlen_k=20)
    assert not result.passed and result.o.passed
    assert [name for name, comparison in result.gradients.items() if not comparison.passed] == [wrong]


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"heads": 3, "heads_k": 2}, "multiple"),
        ({"heads": 0}, "positive"),
        ({"batch": -1}, "batch"),
        ({"seqlen_k": -5}, "seqlen_k"),
    ],
)
def test_check_refuses_sizes_that_cannot_be(sizes: dict[str, int], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        check(SPEC, emulate=True, **sizes)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_check_on_the_gpu() -> None:
    result = check(AttentionSpec(head_dim=64, causal=True, backward=True), seqlen_q=512, seqlen_k=512)
    assert result.passed and not result.emulated and result.flash_error is not None
    assert result.o.error <= 1.2 * result.flash_error
    assert set(result.flash_gradient_errors) == set(result.gradients)


# ---------------------------------------------------------------- check --decode

SPLIT = AttentionSpec(head_dim=16, split_kv=True)
TINY = {"batch": 2, "heads": 8, "heads_k": 4, "seqlen_q": 2, "seqlen_k": 150}


def test_the_grid_for_a_gpu() -> None:
    cases = decode.problems(AttentionSpec(head_dim=128, split_kv=True), emulated=False, seed=3)
    assert len({case.id for case in cases}) == len(cases) and {case.seed for case in cases} == {3}
    full = [case for case in cases if not case.ragged]
    assert {case.seqlen_q for case in full} == {1} and len(full) * 2 == len(cases)
    assert {case.seqlen_q for case in cases if case.ragged} == {1, 3, 8, 16}
    assert {case.seqlen_k for case in full} == {256, 1024, 4096, 16384, 65536, 131072}
    assert {(case.heads, case.heads_k) for case in full} == {(32, 8), (16, 16)}
    assert {case.batch for case in full} == {1, 16, 128}
    assert max(2 * case.batch * case.seqlen_k * case.heads_k * 128 * 2 for case in cases) <= 2**31


@pytest.mark.parametrize("head_dim", [8, 64, 128, 256])
def test_the_emulated_grid_is_small_and_each_norm_is_over_many_elements(head_dim: int) -> None:
    cases = decode.problems(AttentionSpec(head_dim=head_dim, split_kv=True), emulated=True)
    assert {case.batch for case in cases} == {1, 3} and any(case.heads == case.heads_k for case in cases)
    assert all(case.batch * case.seqlen_k <= 2048 for case in cases)
    assert all(case.batch * case.seqlen_q * case.heads * head_dim >= 512 for case in cases)


def test_sizes_that_are_given_take_the_place_of_the_grid_s() -> None:
    full, ragged = decode.problems(SPLIT, emulated=True, **TINY)
    for case in (full, ragged):
        assert {name: getattr(case, name) for name in TINY} == TINY
    assert ragged.ragged and not full.ragged
    # More keys than the grid has, but some call there is.
    assert {case.batch for case in decode.problems(SPLIT, emulated=True, seqlen_k=5000)} == {1}
    assert {case.seqlen_k for case in decode.problems(SPLIT, emulated=True, batch=100)} == {256}


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"heads": 3, "heads_k": 2}, "multiple"),
        ({"heads": 0}, "positive"),
        ({"batch": 0}, "batch=0 must be positive"),
        ({"seqlen_k": -5}, "seqlen_k=-5 must be positive"),
    ],
)
def test_the_grid_refuses_sizes_that_cannot_be(sizes: dict[str, int], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        decode.problems(SPLIT, emulated=True, **sizes)
    with pytest.raises(SpecError, match="add --split-kv"):
        decode.problems(SPEC, emulated=True)


@pytest.mark.parametrize("paged", [False, True])
def test_check_decode_emulated(paged: bool) -> None:
    cases = decode.problems(SPLIT.model_copy(update={"paged": paged}), emulated=True, **TINY)
    done: list[Case] = []
    result = decode.check_decode(cases, arch="sm80", emulate=True, on_done=done.append)
    assert result.passed and result.emulated and done == cases and result.smem_bytes["fwd"] > 0
    assert [(call.case.ragged, call.case.num_splits) for call in result.calls] == [
        (ragged, parts) for ragged in (False, True) for parts in (None, 1, 5)
    ]
    for call in result.calls:
        assert 0 < call.o.error <= call.o.budget == BUDGET and call.seconds is None and call.tbps is None
    # 2 * 150 keys, or none and 150, of 4 heads, and 2 * 2 queries of 8; k and v, q and o.
    assert {call.bytes for call in result.calls} == {(300 * 4 + 32) * 16 * 2 * 2, (150 * 4 + 32) * 16 * 2 * 2}
    assert max(call.o.error for call in result.calls) == result.worst.o.error
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["passed"] and document["spec"]["paged"] == paged and document["calls"][5]["num_splits"] == 5


def test_check_decode_reports_which_calls_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that loses the last part of several."""
    original = ops.Attention.__call__

    def wrong(self: ops.Attention, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
        if call["num_splits"] == 5:
            call["seqused_k"] = call["seqused_k"] * 4 // 5
        return original(self, q, k, v, **call)

    monkeypatch.setattr(ops.Attention, "__call__", wrong)
    result = decode.check_decode(decode.problems(SPLIT, emulated=True, **TINY), arch="sm80", emulate=True)
    assert not result.passed
    assert [call.case.num_splits for call in result.calls if not call.passed] == [5, 5]
    assert result.worst.case.num_splits == 5


def test_check_decode_finds_keys_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ops.Attention.__call__

    def wrong(self: ops.Attention, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Any:
        return original(self, q, k, v, **(call | {"seqused_k": None}))

    monkeypatch.setattr(ops.Attention, "__call__", wrong)
    result = decode.check_decode(decode.problems(SPLIT, emulated=True, **TINY), arch="sm80", emulate=True)
    assert [call.passed for call in result.calls] == [True] * 3 + [False] * 3
    assert result.to_json()["calls"][3]["o"]["error"] == "nan" and result.worst.case.ragged


def test_a_fault_names_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: Any, num_splits: int | None, **__: Any) -> Any:
        raise LaunchError("line 7: read of an unwritten shared word")

    monkeypatch.setattr(ops.Attention, "__call__", stops)
    with pytest.raises(LaunchError, match=r"b2h8k4-q2k150.*: line 7: read"):
        decode.check_decode(decode.problems(SPLIT, emulated=True, **TINY), arch="sm80", emulate=True)


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
def test_check_decode_on_the_gpu(paged: bool) -> None:
    spec = AttentionSpec(head_dim=128, split_kv=True, paged=paged, causal=True)
    result = decode.check_decode(decode.problems(spec, emulated=False, seqlen_k=65536))
    assert result.passed and not result.emulated
    assert all(call.seconds and call.tbps for call in result.calls)
