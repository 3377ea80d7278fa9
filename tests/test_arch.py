"""Targets and tiles: what a name means, and that every kernel fits where it is to run."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from strategies import DTYPES, FEATURES, HEAD_DIMS, TOGETHER, served

from fagen import target
from fagen.arch import Arch, capabilities, for_capability, known, parse_list, resolve, why
from fagen.arch.tiles import HopperTile, TileConfig
from fagen.errors import SpecError
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec

# CUDA programming guide, "maximum amount of shared memory per thread block" by compute capability, KiB.
SMEM_KIB = {"sm75": 64, "sm80": 163, "sm86": 99, "sm87": 163, "sm88": 99, "sm89": 99, "sm90": 227, "sm90a": 227}
SMEM_KIB |= {"sm100": 227, "sm103": 227, "sm110": 227, "sm120": 99, "sm121": 99}
MAX_THREADS_PER_BLOCK, MAX_REGISTERS, REGISTERS_PER_SM = 1024, 255, 65536


def names(text: str, capability: tuple[int, int] | None = None) -> list[str]:
    return [arch.name for arch in parse_list(text, lambda: capability)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0", ["sm90"]),
        ("8.0;9.0+PTX", ["sm80", "sm90", "sm90+ptx"]),
        ("8.0 8.6", ["sm80", "sm86"]),
        ("sm80,sm_90; 10.0", ["sm80", "sm90", "sm100"]),
        ("9.0+ptx 9.0", ["sm90", "sm90+ptx"]),
        ("SM89", ["sm89"]),
        ("9.0a", ["sm90a"]),
        ("sm_90a 9.0", ["sm90a", "sm90"]),
        ("9.0a+PTX", ["sm90a", "sm90a+ptx"]),
        ("8.0;8.0", ["sm80"]),
        ("7.5+PTX", ["sm75", "sm75+ptx"]),
        ("7.5;10.3;11.0;12.1", ["sm75", "sm103", "sm110", "sm121"]),
    ],
)
def test_lists(text: str, expected: list[str]) -> None:
    assert names(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8.0 7.2", "unknown architecture '7.2'"),
        ("7.0;9.0", "unknown architecture '7.0'"),
        ("8.0a", "unknown architecture '8.0a'"),
        ("9", "unknown architecture '9'"),
        ("90", "unknown architecture '90'"),
        ("", "empty architecture list"),
        (" ; ", "empty architecture list"),
        ("Ampere", "unknown architecture 'Ampere'"),
        ("sm80;hopper", "unknown architecture 'hopper'"),
        ("8.0+SASS", "unknown architecture '8.0+SASS'"),
        ("native", "'native' needs a GPU, and none was found"),
    ],
)
def test_invalid_entries_are_named(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        parse_list(text)
    assert "\n" not in str(caught.value)
    assert "sm80" in str(caught.value)


def test_native_is_the_card() -> None:
    assert names("native", (9, 0)) == ["sm90a"]
    assert names("8.0 native", (8, 9)) == ["sm80", "sm89"]


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 5), "sm75"),
        ((8, 0), "sm80"),
        ((8, 6), "sm86"),
        ((8, 7), "sm87"),
        ((8, 9), "sm89"),
        ((9, 0), "sm90a"),
        ((10, 0), "sm100"),
        # Machine code runs on later minor versions; more toolkits know the older ones.
        ((8, 8), "sm86"),
        ((10, 3), "sm100"),
        ((12, 0), "sm120"),
        ((12, 1), "sm120"),
        ((11, 0), "sm110"),
        ((13, 0), "sm121+ptx"),  # not on later major ones: the driver compiles
    ],
)
def test_target_of_a_card(capability: tuple[int, int], name: str) -> None:
    assert for_capability(capability).name == name


@pytest.mark.parametrize("capability", [(7, 0), (7, 2), (5, 2)])
def test_cards_that_are_too_old(capability: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match=r"\d\.\d is older than any target"):
        for_capability(capability)


def test_known_targets_and_their_shared_memory() -> None:
    assert {name: resolve(name).smem_limit // 1024 for name in known()} == SMEM_KIB
    assert resolve("9.0+PTX") == Arch("sm90+ptx", "compute_90", "sm80", 227 * 1024, ptx_only=True)
    assert resolve("9.0a") == Arch("sm90a", "sm_90a", "sm90", 227 * 1024)
    for name in known():
        arch = resolve(name)
        assert resolve(arch.sm) == arch and arch.name == name
        # A Hopper card gets its own family; sm90 is for who asks for it. Others get what is theirs, or runs as well.
        chosen = for_capability(arch.capability)
        assert chosen == (resolve("sm90a") if name == "sm90" else arch) or name in ("sm88", "sm103", "sm121")
        assert chosen.smem_limit == arch.smem_limit and chosen.capability[0] == arch.capability[0]


def test_why_a_card_gets_its_target() -> None:
    """A reason for every card that is known, newer, or of a minor version that nobody knows yet."""
    assert why((7, 5)) == "its own" and why((9, 0)) != "its own"
    assert "fewer toolkits" in why((8, 8)) and "fewer toolkits" in why((12, 1))
    assert why((12, 7)) == "the newest that runs there" and for_capability((12, 7)).name == "sm121"
    assert "PTX" in why((13, 0)) and for_capability((13, 0)).ptx_only
    with pytest.raises(SpecError, match="older than any target"):
        why((7, 0))
    assert {for_capability(capability).capability[0] for capability in capabilities()} == {7, 8, 9, 10, 11, 12}


def test_default_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's, then FAGEN_ARCH, then TORCH_CUDA_ARCH_LIST, then sm80 without a source."""
    monkeypatch.setattr(target, "gpu_capability", lambda device=0: None)
    monkeypatch.delenv("FAGEN_ARCH", raising=False)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    assert target.default_archs() == ((resolve("sm80"),), "")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6;9.0")
    assert target.default_archs() == ((resolve("sm86"), resolve("sm90")), "TORCH_CUDA_ARCH_LIST")
    monkeypatch.setenv("FAGEN_ARCH", "sm89")
    assert target.default_archs() == ((resolve("sm89"),), "FAGEN_ARCH")
    monkeypatch.setattr(target, "gpu_capability", lambda device=0: (9, 0))
    assert target.default_archs() == ((resolve("sm90a"),), "the GPU")


def check_tile(kernel: KernelPlan) -> None:
    """What the template asserts, what the hardware allows, and room for what the plan promises."""
    tile, where = kernel.tile, f"{kernel.slug} {kernel.tile}"
    assert kernel.smem_bytes % 16 == 0 and kernel.smem_bytes <= kernel.arch.smem_limit, where
    if isinstance(tile, HopperTile):
        check_hopper_tile(kernel, tile, where)
        return
    assert isinstance(tile, TileConfig), where
    row_warps, key_warps = (1, tile.warps) if tile.along_keys else (tile.warps, 1)
    assert tile.tile_m % (16 * row_warps) == 0 and tile.tile_n % (16 * key_warps) == 0, where
    # On Turing the second stage is in registers.
    stages = (1,) if kernel.family == "sm75" else (2, 3, 4, 5, 6) if tile.along_keys else (1, 2)
    assert tile.stages in stages and tile.blocks_per_sm >= 1, where
    assert kernel.threads == 32 * tile.warps <= MAX_THREADS_PER_BLOCK, where
    # The multiprocessor has the limit of one block and what the system takes of each: 1 KiB, on Turing nothing.
    system = 0 if kernel.arch.capability == (7, 5) else 1024
    resident = tile.blocks_per_sm * (kernel.smem_bytes + system)
    assert resident <= kernel.arch.smem_limit + system, where
    # O alone must leave registers for the rest.
    registers = REGISTERS_PER_SM // (tile.blocks_per_sm * kernel.threads)
    o_registers = tile.tile_m // row_warps * (-(-kernel.spec.dim_v // 16) * 16) // 32
    assert o_registers < min(registers, MAX_REGISTERS) * 3 // 4, where


def check_hopper_tile(kernel: KernelPlan, tile: HopperTile, where: str) -> None:
    """Shapes that wgmma has, boxes that the copy engine takes, and registers for what a consumer holds."""
    assert tile.tile_m == 64 * tile.consumers and tile.consumers in (2, 3), where
    assert tile.tile_n % 16 == 0 and tile.tile_n <= 256 and tile.tile_m <= 256, where
    assert kernel.threads == 128 * (tile.consumers + 1), where
    # A block starts with as many registers a thread as fit, a multiple of 8, and has no more to share out.
    budget = 128 * (tile.producer_registers + tile.consumers * tile.consumer_registers)
    assert budget <= REGISTERS_PER_SM // kernel.threads // 8 * 8 * kernel.threads, where
    assert tile.consumer_registers % 8 == tile.producer_registers % 8 == 0, where
    # S and O in float32, P and perhaps Q in 16 bits, of 64 rows over 128 threads.
    spec = kernel.spec
    columns = tile.tile_n + -(-spec.dim_v // 16) * 16 + tile.tile_n // 2
    columns += -(-spec.head_dim // 16) * 8 if tile.q_in_registers else 0
    assert columns // 2 <= tile.consumer_registers * 0.9, where
    # With a probability of 0, dropout gives the bits of the kernel without it.
    if not spec.dropout and not spec.window:
        other = plan(spec.model_copy(update={"dropout": True}), kernel.arch)[0].tile
        assert isinstance(other, HopperTile), where
        assert other.tile_n == tile.tile_n, where


# One of each family and limit: what decides tiles.
TILED = {(resolve(name).family, resolve(name).smem_limit): resolve(name) for name in known()}


@pytest.mark.parametrize("arch", TILED.values(), ids=lambda arch: arch.name)
def test_every_head_dim_has_a_tile_that_fits(arch: Arch) -> None:
    features: list[dict[str, bool]] = [{}, *({name: True} for name in FEATURES), dict.fromkeys(TOGETHER, True)]
    for head_dim in HEAD_DIMS:
        for dim_v in (None, 8, 64, 72, 128, 136, 192, 256):
            for on in features:
                for dtype in DTYPES if arch.family != "sm75" else ("fp16",):
                    spec = AttentionSpec(head_dim=head_dim, head_dim_v=dim_v, dtype=dtype, **on)
                    check_tile(plan(spec, arch)[0])
                    check_tile(plan(spec.model_copy(update={"split_kv": True}), arch)[1])
                    for kernel in plan(spec.model_copy(update={"backward": True}), arch):
                        assert kernel.smem_bytes <= arch.smem_limit


@settings(max_examples=300)
@given(served())
@example((AttentionSpec(head_dim=8, backward=True, deterministic=True), resolve("sm90a")))
@example((AttentionSpec(head_dim=8, backward=True, deterministic=True), resolve("sm90")))
def test_any_spec_has_a_tile_that_fits(pair: tuple[AttentionSpec, Arch]) -> None:
    spec, arch = pair
    kernel, *others = plan(spec, arch)
    check_tile(kernel)
    called = spec.slug.replace("_deterministic", "")  # the forward is the same
    assert kernel.slug == f"fwd_{called}_{arch.name}" and kernel.entry == "fagen_fwd"
    order = ["bwd_dq"] if spec.deterministic and arch.family != "sm90" else ["bwd_convert"]  # Hopper adds in turns
    rest = ["bwd_delta", "bwd", *order] if spec.backward else ["decode", "combine"] if spec.split_kv else []
    assert [other.kind for other in others] == rest
    assert all(other.smem_bytes <= arch.smem_limit for other in others)
    # A tile of the backward reads whole tiles of rows of what the forward wrote.
    assert all(kernel.tile.tile_m % other.tile.tile_m == 0 for other in others if other.kind in ("bwd", "bwd_dq"))


@pytest.mark.parametrize("name", ["sm75", "7.5+PTX"])
def test_turing_has_no_bf16(name: str) -> None:
    message = r"hdim64_bf16_causal is not served on sm75.*: the tensor cores of Turing multiply fp16, not bf16"
    with pytest.raises(SpecError, match=message):
        plan(AttentionSpec(head_dim=64, causal=True), resolve(name))


@pytest.mark.parametrize("name", known())
def test_a_tile_that_does_not_fit_is_refused(name: str) -> None:
    """Whether it is for the card or for the emulator, which runs what was planned."""
    tile = TileConfig(tile_m=128, tile_n=128, warps=4, stages=2, blocks_per_sm=1)
    message = rf"needs 327680 bytes of shared memory a block; {name} has {SMEM_KIB[name] * 1024}"
    with pytest.raises(SpecError, match=message):
        plan(AttentionSpec(head_dim=256, dtype="fp16"), resolve(name), {"fwd": tile})
