"""The table of cases.py against the float64 reference: on the CPU execution of the kernels, and on a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import CASES, specs
from filelock import FileLock
from torch import Tensor

import fagen
from fagen.build import build
from fagen.check import FLASH_FACTOR, OUTPUT_BUDGET, Case, compare_lse, compare_o, flash_error
from fagen.plan import plan
from fagen.target import default_archs

SMALL = [case for case in CASES if not case.large]

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
        build([kernel for spec in specs(SMALL) for kernel in plan(spec, arch)], emulate=True)


def call(case: Case, device: str) -> tuple[Tensor, Tensor]:
    inputs = case.inputs(device)
    attn = fagen.load(case.spec, emulate=device == "cpu")
    o, lse = attn(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
    return o, lse


def judge(case: Case, device: str) -> None:
    """o and lse within budget of the reference; on a GPU the budget of o is what PyTorch's flash kernel loses, if more."""
    inputs = case.inputs(device)
    o, lse = call(case, device)
    assert o.dtype == inputs.q.dtype and lse.dtype == torch.float32
    expected_o, expected_lse = case.reference(inputs)
    budget = max(OUTPUT_BUDGET[case.spec.dtype], FLASH_FACTOR * (flash_error(case, inputs, expected_o) or 0.0))
    for name, result in (("o", compare_o(o, expected_o, budget)), ("lse", compare_lse(lse, expected_lse))):
        assert result.passed, f"{name}: {result}"


@pytest.mark.usefixtures("emulated_kernels")
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.id)
def test_emulated(case: Case) -> None:
    judge(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    judge(case, "cuda")


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
        assert torch.equal(alone, both[b : b + 1])
