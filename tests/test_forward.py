"""The table of cases.py against the float64 reference: on the CPU execution of the kernels, and on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, TURING_SPECS, in_fp16, largest, specs
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import fagen
from fagen.arch import resolve
from fagen.build import build
from fagen.check import FLASH_FACTOR, OUTPUT_BUDGET, Case, compare_lse, compare_o, flash_error
from fagen.plan import plan
from fagen.spec import AttentionSpec
from fagen.target import default_archs

HOPPER = resolve("sm90a")
SMALL = [case for case in CASES if not case.large]
TURING = [
    *largest(in_fp16(CASES), TURING_SPECS),
    Case(spec=AttentionSpec(head_dim=256, dtype="fp16", split_kv=True), heads=8, heads_k=2, seqlen_q=1, seqlen_k=300),
]

# One case for each way that threads of a block depend on each other: pipelines, masks, skipped tiles, padded dims.
ORDERS = [
    "hdim64_bf16-b1h2k1-q129k127",
    "hdim64_bf16_causal-b1h2k1-q200k200",
    "hdim64_bf16_window-b1h2k1-q200k200-w40,10",
    "hdim256_bf16-b1h2k1-q64k65",
    "hdim136_hdimv72_fp16_window_softcap_alibi_dropout-b1h2k1-q33k40-w20,7",
    "hdim64_bf16_causal_window_softcap_alibi_dropout-b2h4k2-q65k70-w30,2-alibi_slopes",
]


@pytest.fixture(scope="session")
def emulated_kernels() -> None:
    """All kernels of the table, compiled in one go; the workers of xdist wait for the first."""
    with FileLock(Path(os.environ["FAGEN_CACHE_DIR"]) / "table.lock"):
        (arch, *_), _ = default_archs()
        build([k for spec in specs(SMALL) for one in (arch, HOPPER) for k in plan(spec, one)], emulate=True)


@pytest.fixture(scope="session")
def turing_kernels() -> None:
    with FileLock(Path(os.environ["FAGEN_CACHE_DIR"]) / "turing.lock"):
        build([k for spec in specs(TURING) for k in plan(spec, resolve("sm75"))], emulate=True)


def call(case: Case, device: str, arch: str | None = None) -> tuple[Tensor, Tensor]:
    inputs = case.inputs(device)
    attn = fagen.load(case.spec, arch=arch, emulate=device == "cpu")
    o, lse = attn(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
    return o, lse


def judge(case: Case, device: str, arch: str | None = None) -> None:
    """o and lse within budget of the reference; on a GPU that of o is what PyTorch's flash kernel loses, if more."""
    inputs = case.inputs(device)
    o, lse = call(case, device, arch)
    assert o.dtype == inputs.q.dtype and lse.dtype == torch.float32
    expected_o, expected_lse = case.reference(inputs)
    budget = max(OUTPUT_BUDGET[case.spec.dtype], FLASH_FACTOR * (flash_error(case, inputs, expected_o) or 0.0))
    for name, result in (("o", compare_o(o, expected_o, budget)), ("lse", compare_lse(lse, expected_lse))):
        assert result.passed, f"{name}: {result}"


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_emulated(case: Case) -> None:
    judge(case, "cpu")


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_hopper_emulated(case: Case) -> None:
    judge(case, "cpu", HOPPER.name)


@pytest.mark.usefixtures("turing_kernels")
@pytest.mark.parametrize("case", TURING, ids=lambda case: case.id)
def test_turing_emulated(case: Case) -> None:
    judge(case, "cpu", "sm75")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    judge(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", in_fp16(CASES), ids=lambda case: case.id)
def test_turing_on_this_gpu(case: Case) -> None:
    """Turing's kernels as PTX, which the driver of any newer card compiles: its numbers, not its speed."""
    judge(case, "cuda", "7.5+PTX")


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("id_", ORDERS)
def test_the_order_of_threads_changes_nothing(id_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between barriers threads may run in any order: several seeds of the emulator's order give the same bits."""
    case = next(case for case in CASES if case.id == id_)
    monkeypatch.delenv("FAGEN_EMULATE_SEED", raising=False)
    first = call(case, "cpu")
    for seed in ("1", "2", "20261130"):
        monkeypatch.setenv("FAGEN_EMULATE_SEED", seed)
        assert all(torch.equal(a, b) for a, b in zip(call(case, "cpu"), first, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_without_lse_the_output_is_the_same(device: str) -> None:
    case = next(case for case in CASES if case.id == ORDERS[1])
    inputs = case.inputs(device)
    o = fagen.load(case.spec, emulate=device == "cpu")(inputs.q, inputs.k, inputs.v, **inputs.call)
    assert isinstance(o, Tensor) and torch.equal(o, call(case, device)[0])


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("id_", ORDERS)
def test_a_batch_is_its_entries(id_: str) -> None:
    """Each batch entry alone gives the bits that it gives in a batch; without dropout, whose mask numbers the batch."""
    case = replace(next(case for case in CASES if case.id == id_), batch=2, values={}, dropout_p=None)
    if case.spec.dropout:
        case = replace(case, dropout_p=0.0)
    inputs = case.inputs()
    attn = fagen.load(case.spec, emulate=True)
    both = attn(inputs.q, inputs.k, inputs.v, **inputs.call)
    for b in range(2):
        alone = attn(*(x[b : b + 1] for x in (inputs.q, inputs.k, inputs.v)), **inputs.call)
        assert isinstance(both, Tensor) and isinstance(alone, Tensor) and torch.equal(alone, both[b : b + 1])


EVERYTHING = AttentionSpec(head_dim=64, causal=True, window=True, softcap=True, alibi=True, dropout=True)
SIDE = st.one_of(st.just(-1), st.integers(0, 160))


@pytest.mark.usefixtures("emulated_kernels")
@given(
    spec=st.sampled_from(
        [AttentionSpec(head_dim=64, window=True), EVERYTHING, AttentionSpec(head_dim=64, dtype="fp16")]
    ),
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    seqlen_q=st.integers(0, 150),
    seqlen_k=st.integers(0, 300),
    window=st.tuples(SIDE, SIDE),
    dropout_p=st.sampled_from([0.0, 0.2, 0.99]),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_call(
    spec: AttentionSpec,
    batch: int,
    heads: tuple[int, int],
    window: tuple[int, int],
    dropout_p: float,
    **sizes: Any,
) -> None:
    """Calls that nobody thought of: every element within its bound. The norm of so few is no measure."""
    case = Case(
        spec=spec,
        batch=batch,
        heads=heads[0],
        heads_k=heads[1],
        window=window if spec.window else None,
        dropout_p=dropout_p if spec.dropout else None,
        **sizes,
    )
    o, lse = call(case, "cpu")
    expected_o, expected_lse = case.reference(case.inputs())
    result = compare_o(o, expected_o, OUTPUT_BUDGET[spec.dtype])
    assert result.elementwise <= 1 and result.error <= 2 * result.budget, result
    assert compare_lse(lse, expected_lse).passed, compare_lse(lse, expected_lse)
