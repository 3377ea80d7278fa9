"""What only a card can say: accuracy beside PyTorch's flash kernel, the sanitizer, both compilers, the emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import test_gradients
import torch
from cases import CASES
from test_forward import ORDERS, call

import fagen
from fagen.check import (
    FLASH_FACTOR,
    GRADIENT_BUDGET,
    OUTPUT_BUDGET,
    Case,
    compare_gradient,
    compare_lse,
    compare_o,
    flash_error,
    flash_gradient_errors,
)
from fagen.errors import FagenError
from fagen.spec import AttentionSpec
from fagen.toolchain import find_cuda_compiler

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parent

# Partial tiles in both directions, every feature, padded head dims; few blocks, since the sanitizer is slow.
SANITIZED = [
    "hdim64_bf16-b1h2k1-q129k127",
    "hdim64_bf16-b1h2k1-q5k0",
    "hdim72_bf16-b1h2k1-q33k70-sliced",
    "hdim256_bf16-b1h8k4-q2k130",
    *ORDERS[4:],
]
SANITIZED_OTHERS = [
    "test_split.py::test_heads_that_share_keys[True-2-cuda]",
    "test_split.py::test_n16_pages_in_any_order[True-16-cuda]",
    "test_kvcache.py::test_keys_behind_a_padding[3-cuda]",
    "test_varlen.py::test_each_sequence_as_if_it_were_alone[True-features1-cuda]",
    "test_varlen.py::test_gradients_of_each_sequence_as_if_it_were_alone[cuda]",
]
SANITIZED_GRADIENTS = [
    "hdim64_bf16_backward-b1h2k1-q129k127",
    "hdim64_bf16_causal_backward-b1h2k1-q5k0",
    "hdim72_bf16_backward-b1h2k1-q33k70-sliced",
    "hdim72_fp16_backward_deterministic-b1h2k1-q130k65-sliced",
    "hdim128_bf16_backward-b1h2k1-q130k63",
    "hdim128_fp16_causal_backward-b1h2k1-q140k64",
    "hdim128_bf16_causal_backward_deterministic-b2h2k1-q70k130",
    "hdim256_bf16_causal_backward-b1h2k1-q40k70",
    "hdim256_bf16_causal_backward_deterministic-b1h4k2-q65k70",
    "hdim64_bf16_bias_backward-b2h2k1-q65k70-bias-dlse",
    "hdim136_fp16_softcap_bias_dropout_backward-b2h2k1-q70k130-bias",
    *test_gradients.ORDERS[4:],
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [511, 2048])
def test_error_beside_pytorch_flash(dtype: str, head_dim: int, causal: bool, seqlen: int) -> None:
    """At most 1.2 times what PyTorch's own flash kernel loses on the same inputs."""
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype, causal=causal)
    case = Case(spec=spec, batch=2, heads=8, heads_k=2, seqlen_q=seqlen, seqlen_k=seqlen)
    inputs = case.inputs("cuda")
    expected, _ = case.reference(inputs)
    flash = flash_error(case, inputs, expected)
    assert flash is not None
    result = compare_o(call(case, "cuda")[0], expected, FLASH_FACTOR * flash)
    assert result.passed, result


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seqlen", [511, 2048])
def test_error_of_gradients_beside_pytorch_flash(
    dtype: str, head_dim: int, causal: bool, deterministic: bool, seqlen: int
) -> None:
    """dq, dk and dv lose at most 1.2 times what PyTorch's own flash kernel loses on the same inputs."""
    spec = AttentionSpec(head_dim=head_dim, dtype=dtype, causal=causal, backward=True, deterministic=deterministic)
    case = Case(spec=spec, batch=2, heads=8, heads_k=2, seqlen_q=seqlen, seqlen_k=seqlen)
    inputs, (d_o, d_lse) = case.inputs("cuda"), case.upstream("cuda")
    expected = case.reference_gradients(inputs, d_o, d_lse)
    flash = flash_gradient_errors(case, inputs, d_o, expected)
    seen = torch.ones(seqlen, dtype=torch.bool)
    gradients = test_gradients.call(case, "cuda")[2]
    for x, ref, (name, error) in zip(gradients, expected, flash.items(), strict=True):
        result = compare_gradient(x, ref, GRADIENT_BUDGET[dtype], seen)
        assert result.passed and result.error <= FLASH_FACTOR * error, (name, error, result)


@pytest.mark.parametrize("id_", ORDERS)
def test_the_emulator_computes_what_the_card_does(id_: str) -> None:
    """The same inputs through the same kernel text: apart by less than half of what either may be off from float64."""
    case = next(case for case in CASES if case.id == id_)
    emulated, card = call(case, "cpu"), call(case, "cuda")
    budget = OUTPUT_BUDGET[case.spec.dtype] / 2
    result = compare_o(card[0].cpu(), emulated[0].double(), budget)
    assert result.passed, result
    torch.testing.assert_close(card[1].cpu(), emulated[1], rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("id_", test_gradients.ORDERS)
def test_the_emulator_computes_the_gradients_that_the_card_does(id_: str) -> None:
    case = test_gradients.by_id(id_)
    emulated, card = test_gradients.call(case, "cpu")[2], test_gradients.call(case, "cuda")[2]
    for x, y in zip(card, emulated, strict=True):
        seen = y.ne(0).any(3).any(2).any(0)
        result = compare_gradient(x.cpu(), y.double(), GRADIENT_BUDGET[case.spec.dtype] / 2, seen)
        assert result.passed, result


@pytest.mark.parametrize("id_", ORDERS)
def test_thirty_runs_give_the_same_bits(id_: str) -> None:
    case = next(case for case in CASES if case.id == id_)
    first = call(case, "cuda")
    for _ in range(29):
        assert all(torch.equal(a, b) for a, b in zip(call(case, "cuda"), first, strict=True))


@pytest.mark.parametrize("id_", ORDERS)
def test_thirty_replays_of_a_graph_give_the_same_bits(id_: str) -> None:
    """Two calls in one graph, what they wrote overwritten before each replay, other calls beside them."""
    case = next(case for case in CASES if case.id == id_)
    inputs, attention = case.inputs("cuda"), fagen.load(case.spec)

    def both() -> list[torch.Tensor]:
        return [x for _ in range(2) for x in attention(inputs.q, inputs.k, inputs.v, return_lse=True, **inputs.call)]

    first = both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    for _ in range(30):
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        again = both()
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, captured, again, strict=True))


# d128 handed Q back before ldmatrix had read all of it, which the next Q may overtake only where tiles have one step: a
# wrong score shows in lse alone, since one probability is 1 whatever it was made of.
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_one_step(causal: bool, head_dim: int) -> None:
    q, k, v = (torch.randn(8300, 1, 16, head_dim, device="cuda").bfloat16() for _ in range(3))
    expected = (q.double() * k.double()).sum(3).transpose(1, 2) * head_dim**-0.5
    attention = fagen.load(AttentionSpec(head_dim=head_dim, causal=causal))
    for _ in range(5):
        o, lse = attention(q, k, v, return_lse=True, _poison=True)
        assert torch.equal(o, v) and compare_lse(lse, expected).passed


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool: str, tmp_path: Path) -> None:
    """compute-sanitizer finds nothing in a small set of the table."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        pytest.skip("compute-sanitizer is not installed")
    probe = subprocess.run(
        [program, "--tool", tool, sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "not supported" in probe.stdout + probe.stderr or probe.returncode:
        pytest.skip(f"compute-sanitizer does not work here: {(probe.stdout + probe.stderr)[-500:]}")
    tests = [f"{TESTS / 'test_forward.py'}::test_gpu[{id_}]" for id_ in SANITIZED]
    tests += [f"{TESTS / 'test_gradients.py'}::test_gpu[{id_}]" for id_ in SANITIZED_GRADIENTS]
    tests += [str(TESTS / test) for test in SANITIZED_OTHERS]
    done = subprocess.run(
        [
            *(program, "--tool", tool, "--error-exitcode", "99", "--report-api-errors", "no"),
            *("--kernel-name", "kernel_substring=fagen"),
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),
        ],
        # Each tensor its own allocation, so that memcheck knows where it ends.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert f"{len(tests)} passed" in output, output[-4000:]


@pytest.mark.parametrize("id_", ORDERS)
def test_nvcc_and_nvrtc_give_the_same_numbers(id_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same variant by either compiler; bit for bit where they are of one release."""
    case = next(case for case in CASES if case.id == id_)
    results, versions = [], []
    for compiler in ("nvrtc", "nvcc"):
        monkeypatch.setenv("FAGEN_COMPILER", compiler)
        try:
            versions.append(find_cuda_compiler().version.rsplit(".", 1)[0])
        except FagenError as error:
            pytest.skip(f"{compiler}: {error}")
        results.append(call(case, "cuda"))
    for by_nvrtc, by_nvcc in zip(*results, strict=True):
        if versions[0] == versions[1]:
            assert torch.equal(by_nvrtc, by_nvcc)
        else:
            torch.testing.assert_close(by_nvrtc, by_nvcc, rtol=1e-2, atol=1e-3)
