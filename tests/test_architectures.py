"""Every architecture of the table: kernels compile for it, and its own tiles compute the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from cases import GRADIENTS, HOPPER_GRADIENT_SPECS, of_specs, specs
from strategies import FEATURES
from test_forward import ORDERS, SMALL

import fagen
from fagen import reference
from fagen.arch import known, resolve, sm75
from fagen.build import build
from fagen.cache import Artifact
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.errors import BuildError, ToolchainError
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec
from fagen.toolchain import find_cuda_compiler

SPECS = [
    AttentionSpec(head_dim=128, causal=True, softcap=True),
    AttentionSpec(head_dim=256, dtype="fp16", window=True, alibi=True, dropout=True),
    AttentionSpec(head_dim=128, causal=True, backward=True),
    AttentionSpec(head_dim=256, dtype="fp16", causal=True, backward=True, deterministic=True),
]


# A spec for each feature, alone or with what it needs; fp16, which every family serves.
FEATURE_SPECS = {
    "dense": {},
    "head_dim": {"head_dim": 8},
    "head_dim_v": {"head_dim": 72, "head_dim_v": 40},
    **{name: {name: True} for name in FEATURES if name != "deterministic"},
    "split_kv": {"split_kv": True},
    "paged": {"paged": True, "split_kv": True, "head_dim": 128},
}
# One of each family has each feature, one of each limit, which chooses tiles, both ways and both orders, any other one
# kernel. FAGEN_WHOLE_MATRIX=1 compiles each for each.
WHOLE_MATRIX = os.environ.get("FAGEN_WHOLE_MATRIX") == "1"
FAMILIES = {resolve(name).family: name for name in reversed(known())}.values()
LIMITS = {(resolve(name).family, resolve(name).smem_limit): name for name in reversed(known())}.values()


def served_specs(name: str) -> list[AttentionSpec]:
    """The specs that are compiled for an architecture."""
    turing = resolve(name).family == "sm75"
    specs = [spec.model_copy(update={"dtype": "fp16"}) if turing else spec for spec in SPECS]
    if name not in LIMITS and not WHOLE_MATRIX:
        return specs[:1]
    if name in FAMILIES or WHOLE_MATRIX:
        specs += [AttentionSpec(**{"head_dim": 64, "dtype": "fp16"} | fields) for fields in FEATURE_SPECS.values()]
    return [spec for spec in specs if not turing or sm75.unserved(spec) is None]


@pytest.mark.parametrize("name", known())
def test_kernels_compile_for_every_architecture(name: str) -> None:
    """A cubin without a stack frame beyond a few spilled registers, within the architecture's shared memory."""
    arch = resolve(name)
    try:
        find_cuda_compiler().check(arch)
    except ToolchainError as error:
        pytest.skip(str(error))
    kernels = list(dict.fromkeys(kernel for spec in served_specs(name) for kernel in plan(spec, arch)))
    for kernel, artifact in zip(kernels, build(kernels), strict=True):
        assert artifact.resources is not None
        assert artifact.resources.registers <= 255
        assert artifact.resources.stack <= 128
        # What ptxas says where it gives up the overlap of wgmma with the rest.
        assert "serialized" not in artifact.log, kernel.slug
        assert kernel.smem_bytes <= arch.smem_limit


@pytest.mark.parametrize("name", ["sm86", "sm90", "sm90a"])
@pytest.mark.parametrize("id_", ORDERS)
def test_tiles_of_other_architectures_emulated(id_: str, name: str) -> None:
    """sm80 is what the case table runs by default; 99 KiB and 227 KiB of shared memory have tiles of their own."""
    case = next(case for case in SMALL if case.id == id_)
    inputs = case.inputs("cpu")
    attention = fagen.load(case.spec, arch=name, emulate=True)
    assert attention.kernel("cpu").arch.name == name
    o, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True, _poison=True, **inputs.call)
    expected_o, expected_lse = case.reference(inputs)
    assert compare_o(o, expected_o, OUTPUT_BUDGET[case.spec.dtype]).passed
    assert compare_lse(lse, expected_lse).passed


@pytest.mark.gpu
def test_ptx_is_compiled_by_the_driver() -> None:
    """PTX for an older target runs on this card and gives the numbers of the emulator within the budget."""
    spec = AttentionSpec(head_dim=64, causal=True)
    attention = fagen.load(spec, arch="8.0+PTX")
    q, k, v = (torch.randn(1, 100, 2, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    expected, _ = reference.attention(q, k, v, causal=True)
    assert compare_o(attention(q, k, v), expected, OUTPUT_BUDGET["bf16"]).passed


HOPPER_SPECS = [
    AttentionSpec(head_dim=head_dim, **features)
    for head_dim in (64, 128, 256)
    for features in (
        {"causal": True, "softcap": True},
        {"causal": True, "window": True, "softcap": True, "backward": True},
        {"causal": True, "alibi": True, "dropout": True, "varlen": True, "backward": True},
        {"window": True, "varlen": True},
    )
    if head_dim != 64 or "varlen" not in features or "backward" in features  # 8 bytes of a third consumer's producer
]


def test_hopper_forwards_keep_all_in_registers() -> None:
    """No spill and no local memory, and products overlap: what ptxas reports."""
    kernels = [plan(spec, resolve("sm90a"))[0] for spec in HOPPER_SPECS]
    for kernel, artifact in zip(kernels, build(kernels), strict=True):
        assert kernel.family == "sm90"
        check_registers(kernel, artifact)


def hopper_backwards(specs: Iterable[AttentionSpec]) -> list[tuple[KernelPlan, Artifact]]:
    """The main backward kernels of the Hopper family for these specs, compiled."""
    arch = resolve("sm90a")
    try:
        find_cuda_compiler().check(arch)
    except ToolchainError as error:
        pytest.skip(str(error))
    planned = dict.fromkeys(kernel for spec in specs for kernel in plan(spec, arch))
    kernels = [kernel for kernel in planned if kernel.kind == "bwd" and kernel.family == "sm90"]
    return list(zip(kernels, build(kernels), strict=True))


def check_registers(kernel: KernelPlan, artifact: Artifact, spilled: int = 0) -> None:
    """Products overlap, and all is kept in registers, or all but `spilled` bytes: what ptxas reports."""
    assert artifact.resources is not None
    assert "serialized" not in artifact.log, kernel.slug
    assert artifact.resources.spill_stores <= spilled, kernel.slug
    assert artifact.resources.stack == artifact.resources.spill_stores, kernel.slug


def test_hopper_backwards_of_the_table_keep_all_in_registers() -> None:
    """The kernels of the gradient table: of cases that run emulated; FAGEN_WHOLE_MATRIX=1 for all."""
    cases = GRADIENTS if WHOLE_MATRIX else of_specs(GRADIENTS, HOPPER_GRADIENT_SPECS)
    compiled = hopper_backwards(specs(cases))
    assert compiled
    for kernel, artifact in compiled:
        check_registers(kernel, artifact)


BACKWARD_FEATURES: list[dict[str, bool]] = [
    {},
    {"causal": True},
    {"causal": True, "softcap": True},
    {"causal": True, "alibi": True},
    {"dropout": True},
    {"softcap": True, "dropout": True},
    {"softcap": True, "alibi": True, "dropout": True},
    {"window": True, "varlen": True},
    {"window": True, "varlen": True, "softcap": True, "alibi": True, "dropout": True},
]


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_hopper_backwards_keep_all_in_registers(head_dim: int) -> None:
    """Nothing spills with any feature, nor with all; deterministic, the plain ones."""
    compiled = hopper_backwards(
        AttentionSpec(head_dim=head_dim, backward=True, deterministic=deterministic, **features)
        for deterministic in (False, True)
        for features in (BACKWARD_FEATURES[:2] if deterministic else BACKWARD_FEATURES)
    )
    assert len(compiled) == len(BACKWARD_FEATURES) + 2
    for kernel, artifact in compiled:
        check_registers(kernel, artifact)


def test_hopper_backwards_of_a_bias_keep_nearly_all_in_registers() -> None:
    """A few addresses may spill, but not one for each row of the bias and of its gradient."""
    compiled = hopper_backwards(
        AttentionSpec(head_dim=head_dim, causal=True, bias=True, backward=True) for head_dim in (64, 128, 256)
    )
    assert len(compiled) == 3
    for kernel, artifact in compiled:
        check_registers(kernel, artifact, spilled=64)


@pytest.mark.parametrize("call", ["cp_async_commit();", "pack_bf16(0.0f, 0.0f);"])
def test_what_turing_lacks_does_not_even_compile_emulated(templates: Path, call: str) -> None:
    """Copies that are asynchronous and bf16 are no primitives of the family, for the card and for the CPU alike."""
    path = templates / "sm75" / "fwd.cu.j2"
    path.write_text(path.read_text().replace("        fetch_v(n);\n", f"        fetch_v(n);\n        {call}\n"))
    kernels = plan(AttentionSpec(head_dim=16, dtype="fp16"), resolve("sm75"))
    for emulate in (False, True):
        with pytest.raises(BuildError, match=call.partition("(")[0]):
            build(kernels, emulate=emulate)
