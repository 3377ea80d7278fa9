"""The judge itself: what `compare_o`, `compare_lse` and `check` let pass and what they do not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from cases import CASES
from torch import Tensor

from fagen import ops
from fagen.check import Case, check, compare_lse, compare_o, flash_error, lay_out
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


# ---------------------------------------------------------------- cases


def test_the_table_names_each_row_once() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


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
    result = check(AttentionSpec(head_dim=64, causal=True), seqlen_q=512, seqlen_k=512)
    assert result.passed and not result.emulated and result.flash_error is not None
    assert result.o.error <= 1.2 * result.flash_error
