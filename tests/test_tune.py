"""Tuning: what can be tiled how, who wins, what is kept of it, and that load takes it."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_toolchain import Stub, script_env

import fagen
from fagen import build, cache, kernels, toolchain, tune, tune_card, tuned
from fagen.arch import for_capability, known, ranges, resolve
from fagen.arch.tiles import BackwardTile, HopperBackwardTile, HopperTile, TileConfig
from fagen.cache import Artifact, Resources
from fagen.cli import main
from fagen.driver import Gpu
from fagen.errors import BuildError, LaunchError, SpecError
from fagen.ops import PlannedAttention
from fagen.plan import KernelPlan, Kind, Tile, plan
from fagen.render import render
from fagen.spec import AttentionSpec

CARD = Gpu("Test Card", (9, 0))
SM80, SM90, SM90A = (resolve(name) for name in ("sm80", "sm90", "sm90a"))
PLAIN = AttentionSpec(head_dim=64)
CPU = torch.device("cpu")


# What can be tiled how


SPECS = [
    AttentionSpec(head_dim=dim, **features)
    for dim in (8, 32, 40, 64, 80, 96, 128, 136, 192, 200, 256)
    for features in (
        {},
        {"causal": True, "softcap": True},
        {"dropout": True},
        {"varlen": True},
        {"split_kv": True, "paged": True},
        {"backward": True, "varlen": True},
        {"backward": True, "deterministic": True, "causal": True, "window": True, "softcap": True, "alibi": True},
    )
]


@pytest.mark.parametrize("arch", [resolve(name) for name in known()], ids=known())
def test_no_tile_of_the_tables_is_ruled_out(arch: Any) -> None:
    for each in SPECS:
        spec = each.model_copy(update={"dtype": "fp16"}) if arch.family == "sm75" else each
        assert tuned.problem(plan(spec, arch)) is None, spec.slug


@pytest.mark.parametrize("arch", [SM80, resolve("sm86"), SM90A], ids=lambda arch: arch.name)
def test_tiles_of_the_tables_are_in_the_ranges(arch: Any) -> None:
    """So a range holds what it is to beat, up to a bound on registers that makes no difference."""
    for spec in SPECS:
        for kernel in plan(spec, arch):
            tile = kernel.tile
            found = set(ranges.tiles(kernel.kind, tile))
            if not found:
                assert kernel.kind in ("combine", "bwd_delta", "bwd_convert"), kernel.slug
            elif spec.alibi and spec.head_dim > 192 and kernel.kind == "fwd" and arch is SM80:
                continue
            else:
                alike = {ranges.largest(one, arch, kernel.smem_bytes) for one in found}
                assert ranges.largest(tile, arch, kernel.smem_bytes) in alike, f"{kernel.slug} {tile}"


@pytest.mark.parametrize(
    ("kind", "spec", "tile", "why"),
    [
        ("fwd", PLAIN, TileConfig(96, 64, 4, 2, 1), "whole fragments"),
        ("fwd", PLAIN, TileConfig(128, 56, 4, 2, 1), "whole fragments"),
        ("fwd", PLAIN, TileConfig(128, 64, 4, 0, 1), "less than 1"),
        ("fwd", PLAIN, TileConfig(1024, 16, 64, 1, 1), "2048 threads"),
        ("fwd", PLAIN, TileConfig(16, 64, 4, 2, 1, along_keys=True), "few query rows, and only there"),
        ("fwd", PLAIN, TileConfig(128, 128, 4, 2, 3), "do not share a multiprocessor"),
        ("fwd", PLAIN, TileConfig(128, 96, 4, 1, 4), "160 registers of fragments a thread, of 128"),
        ("decode", PLAIN, TileConfig(16, 32, 4, 2, 1, along_keys=True), "whole fragments"),
        ("decode", PLAIN, TileConfig(16, 64, 4, 1, 1, along_keys=True), "single stage"),
        ("bwd_dq", PLAIN, TileConfig(64, 64, 4, 3, 1), "at most two stages"),
        ("fwd", AttentionSpec(head_dim=64, backward=True), TileConfig(256, 64, 8, 1, 1), "padded to 128 rows"),
        ("fwd", AttentionSpec(head_dim=64, backward=True), HopperTile(192, 112, 2, True, 32), "padded to 128 rows"),
        ("bwd", PLAIN, BackwardTile(64, 64, 8, 1, 3, 2, 2, 1), "do not divide evenly"),
        ("bwd", PLAIN, BackwardTile(64, 64, 8, 1, 8, 2, 2, 1), "S is no whole"),
        ("bwd", PLAIN, BackwardTile(64, 64, 8, 1, 4, 8, 2, 1), "gradients are no whole"),
        ("bwd", PLAIN, BackwardTile(64, 64, 8, 3, 4, 2, 2, 1), "at most two stages"),
        ("fwd", PLAIN, HopperTile(64, 112, 2, True, 24), "two or three consumers"),
        ("fwd", PLAIN, HopperTile(256, 112, 2, True, 24), "two or three consumers"),
        ("fwd", PLAIN, HopperTile(128, 100, 2, True, 24), "no product of wgmma"),
        ("fwd", PLAIN, HopperTile(128, 16, 2, True, 24), "no product of wgmma"),
        ("fwd", PLAIN, HopperTile(128, 112, 2, True, 32), "leave 236 to each consumer"),
        ("fwd", PLAIN, HopperTile(192, 112, 2, True, 40), "leave 157 to each consumer"),
        ("fwd", PLAIN, HopperTile(128, 112, 2, True, 20), "leave 242 to each consumer"),
        ("fwd", PLAIN, HopperTile(192, 160, 2, True, 32), "of 160"),
        ("bwd", PLAIN, HopperBackwardTile(128, 192, 1, 24), "two consumers have 64 query rows"),
        ("bwd", PLAIN, HopperBackwardTile(32, 128, 2, 24), "or half of its columns"),
        ("bwd", AttentionSpec(head_dim=104), HopperBackwardTile(128, 128, 1, 24), "240 registers of fragments"),
    ],
)
def test_what_is_ruled_out(kind: str, spec: AttentionSpec, tile: Any, why: str) -> None:
    kernel = KernelPlan(spec, cast(Kind, kind), SM90A, tile)
    assert why in str(ranges.problem(kind, spec, SM90A, tile, kernel.smem_bytes))


@pytest.mark.parametrize(
    ("kind", "tile"),
    [
        ("fwd", TileConfig(128, 32, 4, 2, 1)),
        ("fwd", TileConfig(128, 32, 4, 1, 1, q_in_registers=True)),
        ("decode", TileConfig(16, 64, 4, 2, 1, along_keys=True)),
        ("bwd", BackwardTile(32, 64, 8, 2, 2, 2, 2, 1)),
        ("bwd_dq", TileConfig(64, 32, 4, 2, 1)),
    ],
)
def test_turing_s_tiles_have_one_stage(kind: Kind, tile: Any) -> None:
    spec, turing = PLAIN.model_copy(update={"dtype": "fp16"}), resolve("sm75")
    kernel = KernelPlan(spec, kind, turing, tile)
    assert "have one stage" in str(ranges.problem(kind, spec, turing, tile, kernel.smem_bytes))
    one_stage = dataclasses.replace(tile, stages=1, **({"q_in_registers": False} if kind == "fwd" else {}))
    assert ranges.problem(kind, spec, turing, one_stage, kernel.smem_bytes) is None
    shipped = {kernel.kind: kernel.tile for kernel in plan(spec.model_copy(update={"split_kv": True}), turing)}
    found = [one for one in ranges.tiles("decode", shipped["decode"]) if isinstance(one, TileConfig)]
    assert found and all(one.stages == 1 and not one.q_in_registers for one in found)


def test_registers_by_hand() -> None:
    """16 x 16 elements in float32 are 8 registers: d128 and 32 rows a warp have 2 x 8 x 8 of O, 64 keys 2 x 4 x 8."""
    spec = AttentionSpec(head_dim=128)
    tile = TileConfig(128, 64, warps=4, stages=2, blocks_per_sm=2)
    assert ranges.fragment_registers("fwd", spec, tile) == 128 + 64
    assert ranges.fragment_registers("fwd", spec, dataclasses.replace(tile, q_in_registers=True)) == 192 + 2 * 8 * 4
    assert ranges.fragment_registers("bwd_dq", spec, dataclasses.replace(tile, tile_m=64)) == 64 + 2 * 32
    # 128 keys by 4 of 8 warps: 2 x 4 steps of dK and of dV; 64 queries by 2, keys by 4: 2 x 2 of S and of dP.
    backward = BackwardTile(64, 128, warps=8, stages=2, s_rows=2, kv_rows=4, q_rows=2, blocks_per_sm=1)
    assert ranges.fragment_registers("bwd", spec, backward) == 8 * (8 + 8 + 4 + 4)
    # 65536 registers, 128 or 256 threads a block
    bounds = [(4, 1, 255), (4, 2, 255), (4, 3, 168), (8, 1, 255), (8, 2, 128)]
    for warps, blocks, bound in bounds:
        one = dataclasses.replace(tile, warps=warps, blocks_per_sm=blocks)
        assert ranges.register_bound(one) == bound


def test_bounds_that_make_no_difference() -> None:
    """One block of four warps may have as many registers as each of two: with room for both there is one candidate."""
    one = TileConfig(64, 64, warps=4, stages=1, blocks_per_sm=1)
    assert ranges.largest(one, SM80, 80 * 1024) == dataclasses.replace(one, blocks_per_sm=2)
    assert ranges.largest(one, SM80, 90 * 1024) == one
    assert ranges.largest(dataclasses.replace(one, warps=8), SM80, 1024).blocks_per_sm == 1
    assert ranges.largest(HopperTile(128, 64, 2, True, 24), SM90A, 1024) == HopperTile(128, 64, 2, True, 24)


def test_rows_of_the_backward_divide_those_of_the_forward() -> None:
    spec = AttentionSpec(head_dim=64, backward=True)
    table = tune._tiles(plan(spec, SM80))
    narrow = TileConfig(64, 64, warps=4, stages=2, blocks_per_sm=2)
    assert "128 query rows do not divide the 64" in str(tuned.problem(plan(spec, SM80, {"fwd": narrow})))
    _, fitting = tune.candidates(spec, SM80, "fwd", table)
    assert fitting and all(tile.tile_m == 128 for tile in fitting if isinstance(tile, TileConfig))


@pytest.mark.parametrize(("spec", "arch"), [(spec, arch) for spec in SPECS[::4] for arch in (SM80, SM90A)])
def test_candidates(spec: AttentionSpec, arch: Any) -> None:
    """They fit, are no two the same, are not the table's, and render to kernels that say their sizes."""
    table = plan(spec, arch)
    for kernel in table:
        if not any(ranges.tiles(kernel.kind, kernel.tile)):
            continue
        considered, fitting = tune.candidates(spec, arch, kernel.kind, tune._tiles(table))
        assert len(set(fitting)) == len(fitting) < considered and kernel.tile not in fitting
        for tile in fitting:
            plans = plan(spec, arch, {kernel.kind: tile})
            assert tuned.problem(plans) is None and all(one.smem_bytes <= arch.smem_limit for one in plans)
        for tile in fitting[:: max(1, len(fitting) // 2)]:
            text = render(tune._kernel(plan(spec, arch, {kernel.kind: tile}), kernel.kind))
            assert f"TILE_N = {tile.tile_n};" in text  # type: ignore[union-attr]


# The templates are right for tiles that no table has


EMULATED: list[tuple[Kind, Any, dict[str, Any], Tile]] = [
    ("fwd", SM80, {"head_dim": 32, "causal": True}, TileConfig(256, 48, 8, 3, 1, q_in_registers=True)),
    ("fwd", SM80, {"head_dim": 40, "window": True}, TileConfig(64, 112, 4, 1, 3)),
    ("fwd", SM90A, {"head_dim": 32, "causal": True}, HopperTile(192, 80, 4, False, 32)),
    ("fwd", SM90A, {"head_dim": 16, "varlen": True}, HopperTile(128, 176, 3, True, 40)),
    ("decode", SM80, {"head_dim": 16, "split_kv": True, "paged": True}, TileConfig(16, 192, 6, 4, 1, True, True)),
    (
        "decode",
        SM80,
        {"head_dim": 16, "dtype": "fp16", "split_kv": True, "paged": True},
        TileConfig(16, 32, 2, 6, 1, True, True),
    ),
    ("bwd", SM80, {"head_dim": 32, "backward": True}, BackwardTile(32, 128, 4, 2, 2, 2, 2, 1)),
    ("bwd", SM90A, {"head_dim": 32, "backward": True}, HopperBackwardTile(64, 128, 3, 24)),
    ("bwd_dq", SM80, {"head_dim": 32, "backward": True, "deterministic": True}, TileConfig(128, 48, 4, 2, 1)),
]


@pytest.fixture(scope="module")
def emulated() -> None:
    """Builds all of their kernels at once."""
    wanted = [one for kind, arch, fields, tile in EMULATED for one in plan(AttentionSpec(**fields), arch, {kind: tile})]
    build.build(wanted, emulate=True)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("kind", "arch", "fields", "tile"), EMULATED)
def test_other_tiles_emulated(kind: Kind, arch: Any, fields: dict[str, Any], tile: Tile) -> None:
    """Corners of the ranges run through the emulator, which stops at races and unwritten words, and are right."""
    spec = AttentionSpec(**fields)
    assert tile in set(ranges.tiles(kind, tune._kernel(plan(spec, arch), kind).tile))
    plans = plan(spec, arch, {kind: tile})
    assert tuned.problem(plans) is None
    attention = PlannedAttention(spec, plans, CPU)
    (judge, *_) = tune_card.judges(spec, CPU, [(3, 500)] if kind == "decode" else [(70, 150)])
    assert judge.problem(attention) is None
    assert attention.kernel(CPU, kind).tile == tile


@pytest.mark.usefixtures("emulated")
def test_what_is_timed_emulated() -> None:
    """The call returns what is compared, o or the gradients; two results that are right are not further apart."""
    *_, (_, arch, fields, tile), _, _ = EMULATED
    spec = AttentionSpec(**fields)
    attention = PlannedAttention(spec, plan(spec, arch, {"bwd": tile}), CPU)
    for kind, count in (("fwd", 1), ("bwd", 3)):
        problem = tune_card._Problem(spec, cast(Kind, kind), tune.Shape(2, 2, 1, 40, 30), CPU)
        call, outputs = problem.prepare(attention)
        assert len(outputs) == count and problem.calls == 1
        again = call() if count == 3 else (call(),)
        assert problem.apart([one.detach() for one in again], outputs) is None
        assert outputs[0].shape == (2, 40, 2, 32)
        off = [outputs[0] * (1.03 if count == 3 else 1.006), *outputs[1:]]
        assert "off from that of the table's tile by" in str(problem.apart(off, outputs))
        assert problem.apart([outputs[0] * torch.nan, *outputs[1:]], outputs) is not None


def test_a_judge_sees_what_is_wrong(templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    spec = AttentionSpec(head_dim=16)
    (judge,) = tune_card.judges(spec, CPU, [(20, 40)])
    assert judge.problem(PlannedAttention(spec, plan(spec, SM80), CPU)) is None
    text = (templates / "common" / "row_end.cuh.j2").read_text()
    (templates / "common" / "row_end.cuh.j2").write_text(text.replace("/ sum;", "/ sum * 1.01f;"))
    wrong = judge.problem(PlannedAttention(spec, plan(spec, SM80), CPU))
    assert re.fullmatch(r"o is off by 1\.0\de-02 of 2\.50e-03 \(20 queries, 40 keys\)", str(wrong))


# Who wins


@dataclass(frozen=True)
class Built(Artifact):
    """An artifact without a directory."""

    said: str = ""

    @property
    def log(self) -> str:
        return self.said


@dataclass
class Workshop:
    """A compiler and a card that do as they are told. `seconds` are of a tile on a shape; `spills` are bytes, `wrong`
    are reasons, by tile."""

    card: Gpu = CARD
    seconds: dict[Tile, tuple[float, ...]] = field(default_factory=dict)
    spills: dict[Tile, int] = field(default_factory=dict)
    wrong: dict[Tile, str] = field(default_factory=dict)
    wrong_with_dropout: set[Tile] = field(default_factory=set)
    apart: set[Tile] = field(default_factory=set)
    broken: set[Tile] = field(default_factory=set)
    serialized: set[Tile] = field(default_factory=set)
    checked: list[Tile] = field(default_factory=list)
    timed: list[tuple[list[Tile], int, int]] = field(default_factory=list)  # tiles, keys, samples
    kind: Kind = "fwd"
    shapes: tuple[tune.Shape, ...] = ()

    def build(self, asked: Sequence[KernelPlan], **_options: Any) -> list[Artifact]:
        if any(kernel.tile in self.broken for kernel in asked):
            raise BuildError("does not compile")
        return [self._artifact(kernel) for kernel in asked]

    def _artifact(self, kernel: KernelPlan) -> Artifact:
        folder = Path("/nowhere") / f"{kernel.slug}-{abs(hash(kernel.tile)):x}"
        resources = Resources(100, self.spills.get(kernel.tile, 0), 0, 0, 0)
        said = "are serialized" if kernel.tile in self.serialized else ""
        names = (kernel.slug, "0" * 64, kernel.entry, kernel.arch.name)
        return Built(folder, *names, "cuda", "nvcc", (), 0.1, folder, folder, resources, False, said)

    def check(self, spec: AttentionSpec, plans: Sequence[KernelPlan]) -> str | None:
        tile = tune._kernel(plans, self.kind).tile
        if spec.dropout:
            return "lse is off" if tile in self.wrong_with_dropout else None
        self.checked.append(tile)
        return self.wrong.get(tile)

    def time(
        self,
        spec: AttentionSpec,
        kind: Kind,
        contestants: Mapping[str, Sequence[KernelPlan]],
        shape: tune.Shape,
        samples: int,
    ) -> dict[str, float | str]:
        tiles = {name: tune._kernel(plans, kind).tile for name, plans in contestants.items()}
        self.timed.append((list(tiles.values()), shape.seqlen_k, samples))
        index = self.shapes.index(shape)
        return {
            name: "far apart" if tile in self.apart else self.seconds.get(tile, (2.0,) * len(self.shapes))[index]
            for name, tile in tiles.items()
        }


SHIPPED = cast(TileConfig, plan(PLAIN, SM80)[0].tile)
FAST, SAME, MIXED = (
    TileConfig(128, keys, warps=4, stages=stages, blocks_per_sm=2) for keys, stages in ((80, 2), (64, 2), (48, 3))
)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workshop:
    made = Workshop(shapes=tune.shapes(PLAIN))
    made.seconds = {SHIPPED: (1.0, 1.0, 1.0), SAME: (0.995, 0.995, 0.995), MIXED: (0.5, 0.5, 1.02)}
    monkeypatch.setattr(tune.builder, "build", made.build)
    monkeypatch.setattr(cache, "clean", lambda accept: (0, 0))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAGEN_TUNED", "1")
    return made


def run(shop: Workshop, spec: AttentionSpec = PLAIN, arch: Any = SM80) -> tune.Outcome:
    (outcome,) = tune.tune(spec, arch, shop, shop.shapes, samples=30)
    return outcome


def test_the_fastest_wins(shop: Workshop) -> None:
    shop.seconds[FAST] = (0.9, 0.8, 1.0)
    outcome = run(shop)
    assert outcome.winner is not None and outcome.winner.tile == FAST
    assert outcome.winner.gain == pytest.approx((1 / 0.9 / 0.8) ** (1 / 3))
    assert outcome.winner.ratios == pytest.approx((1 / 0.9, 1.25, 1.0))
    assert outcome.considered == 504 and outcome.right == outcome.compiled == outcome.fitting > 100
    # MIXED has the better mean, and is 2% slower on one shape.
    assert [one.tile for one in outcome.timed[:3]] == [MIXED, FAST, SAME]
    entry = outcome.entry(CARD, "nvrtc 1", date(2026, 12, 1))
    assert entry is not None and entry.tile == dataclasses.asdict(FAST) and entry.date == "2026-12-01"
    assert [figure.shipped_seconds for figure in entry.figures] == [1.0, 1.0, 1.0]
    assert [figure.seconds for figure in entry.figures] == [0.9, 0.8, 1.0]
    assert entry.figures[0].shape == {"batch": 16, "heads": 32, "heads_k": 32, "seqlen_q": 1024, "seqlen_k": 1024}


def test_noise_does_not_win(shop: Workshop) -> None:
    """Half a percent is none, and neither is a gain that one shape pays for."""
    outcome = run(shop)
    assert outcome.winner is None and outcome.entry(CARD, "nvrtc 1", date.today()) is None
    assert outcome.timed[0].tile == MIXED and SHIPPED in [one.tile for one in outcome.timed]


@pytest.mark.parametrize(
    ("ratios", "order"),
    [
        ({"a": [1.011, 1.011], "b": [1.2, 0.995]}, ["b", "a"]),
        ({"a": [1.009, 1.009]}, []),
        ({"a": [2.0, 0.98]}, []),
        ({}, []),
    ],
)
def test_who_qualifies(ratios: dict[str, list[float]], order: list[str]) -> None:
    assert tune.qualify(ratios) == order


def test_what_spills_or_is_serialized_is_not_run(shop: Workshop) -> None:
    shop.seconds |= {FAST: (0.5, 0.5, 0.5), SAME: (0.6, 0.6, 0.6)}
    shop.spills[FAST] = 4
    shop.serialized = {SAME}
    outcome = run(shop)
    assert outcome.winner is None and outcome.compiled == outcome.fitting - 2
    assert FAST not in shop.checked and SAME not in shop.checked
    shop.spills[SHIPPED] = 4  # so may others
    outcome = run(shop)
    assert outcome.winner is not None and outcome.winner.tile == FAST and outcome.winner.spills == 4


def test_what_is_wrong_is_named_and_not_timed(shop: Workshop) -> None:
    shop.seconds |= {FAST: (0.5, 0.5, 0.5)}
    shop.wrong[FAST] = "o is off by 1"
    outcome = run(shop)
    assert outcome.winner is None and (FAST, "o is off by 1") in outcome.dropped
    assert outcome.right == outcome.compiled - 1
    assert shop.timed and all(FAST not in tiles for tiles, _, _ in shop.timed)
    shop.wrong[SHIPPED] = "lse is off"
    with pytest.raises(LaunchError, match="fwd_hdim64_bf16_sm80 is not right here: lse is off"):
        run(shop)


def test_another_result_on_the_shape_itself(shop: Workshop) -> None:
    """A race may show at large sizes only."""
    shop.seconds |= {FAST: (0.5, 0.5, 0.5)}
    shop.apart = {FAST}
    outcome = run(shop)
    assert outcome.winner is None and (FAST, "B=4 4k: far apart") in outcome.dropped
    assert sum(FAST in tiles for tiles, _, _ in shop.timed) == 1  # it is out from there on


def test_what_does_not_compile_is_named(shop: Workshop) -> None:
    shop.broken = {FAST}
    outcome = run(shop)
    assert (FAST, "does not compile") in outcome.dropped and outcome.compiled == outcome.fitting - 1
    shop.broken = {SHIPPED}
    with pytest.raises(BuildError, match="does not compile"):
        run(shop)


def test_everybody_runs_beside_the_table_s_tile(shop: Workshop) -> None:
    """All on one shape, in groups; the best on all; the best of those in full: what is timed beside nothing says
    nothing."""
    outcome = run(shop)
    assert all(tiles[0] == SHIPPED for tiles, _, _ in shop.timed)
    full = [(tiles, keys) for tiles, keys, samples in shop.timed if samples == 30]
    assert [keys for _, keys in full] == [1024, 4096, 16384]
    assert all(len(tiles) == 1 + tune._FINALISTS for tiles, _ in full)
    screened = [tile for tiles, keys, samples in shop.timed if samples == 2 and keys == 4096 for tile in tiles[1:]]
    assert len(screened) == len(set(screened)) == outcome.right
    assert max(len(tiles) for tiles, _, _ in shop.timed) <= 1 + tune._GROUP


def test_dropout_goes_with_it(shop: Workshop) -> None:
    """Its kernel has the same tile, so a tile that it cannot have is none: the next takes its place."""
    shop.seconds |= {FAST: (0.5, 0.5, 0.5), SAME: (0.6, 0.6, 0.6)}
    shop.wrong_with_dropout = {FAST}
    outcome = run(shop)
    assert outcome.winner is not None and outcome.winner.tile == SAME
    assert (FAST, "with dropout, lse is off") in outcome.dropped


def test_gradients_after_the_forward(shop: Workshop) -> None:
    """The backward runs with what was found for the forward."""
    spec = AttentionSpec(head_dim=192, backward=True, deterministic=True)
    shop.shapes = tune.shapes(spec)
    forward = TileConfig(128, 32, warps=8, stages=1, blocks_per_sm=1)
    wide = BackwardTile(128, 32, warps=8, stages=1, s_rows=4, kv_rows=2, q_rows=4, blocks_per_sm=1)
    for first, others in ((forward, True), (None, False)):
        shop.seconds = {plan(spec, SM90)[0].tile: (1.0, 1.0, 1.0)}
        for kernel in plan(spec, SM90):
            shop.seconds[kernel.tile] = (1.0, 1.0, 1.0)
        if first is not None:
            shop.seconds[first] = (0.5, 0.5, 0.5)
        shop.timed.clear()
        shop.check = lambda spec, plans: None  # type: ignore[method-assign]
        outcomes = tune.tune(spec, SM90, shop, shop.shapes)
        assert [outcome.kernel.kind for outcome in outcomes] == ["fwd", "bwd", "bwd_dq"]
        # 128 query rows a step need a forward of as many.
        assert any(wide in tiles for tiles, _, _ in shop.timed) is others


def test_losers_leave_the_cache(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.seconds[FAST] = (0.5, 0.5, 0.5)
    asked: list[Any] = []
    monkeypatch.setattr(cache, "clean", asked.append)
    run(shop)
    (accept,) = asked
    directories = {
        tile: shop._artifact(plan(PLAIN, SM80, {"fwd": tile})[0]).directory for tile in (SHIPPED, FAST, SAME)
    }
    gone = {tile: accept(cache.Entry(folder, None, "", 0.0, 0)) for tile, folder in directories.items()}
    assert gone == {SHIPPED: False, FAST: False, SAME: True}
    assert not accept(cache.Entry(Path("/elsewhere"), None, "", 0.0, 0))


# Shapes


def test_shapes() -> None:
    assert [(one.batch, one.heads, one.heads_k, one.seqlen_q, one.seqlen_k) for one in tune.shapes(PLAIN)] == [
        (16, 32, 32, 1024, 1024),
        (4, 32, 32, 4096, 4096),
        (1, 32, 32, 16384, 16384),
    ]
    (one,) = tune.shapes(PLAIN, batch=3, heads=8, heads_k=2, seqlens=[500], seqlen_q=7)
    assert one == tune.Shape(3, 8, 2, 7, 500) and one.name == "B=3 500"
    split = AttentionSpec(head_dim=64, split_kv=True)
    assert {(one.heads, one.heads_k, one.seqlen_q) for one in tune.shapes(split)} == {(32, 8, 1)}
    assert tune.shapes(split, heads=3)[0].heads_k == 3
    with pytest.raises(SpecError, match="--seqlen 500: with pages, a multiple of 16"):
        tune.shapes(AttentionSpec(head_dim=64, varlen=True, paged=True), seqlens=[512, 500])
    with pytest.raises(SpecError, match="heads=3 must be a positive multiple of heads_k=2"):
        tune.shapes(PLAIN, heads=3, heads_k=2)


def test_which_kernels_run() -> None:
    split = AttentionSpec(head_dim=64, split_kv=True)
    assert tune.kinds(PLAIN, SM80, tune.shapes(PLAIN)) == ("fwd",)
    assert tune.kinds(split, SM80, tune.shapes(split)) == ("decode",)
    assert tune.kinds(split, SM80, tune.shapes(split, seqlen_q=8)) == ("decode",)  # of 4 heads a head of k: 32 rows
    assert tune.kinds(split, SM80, tune.shapes(split, seqlen_q=9)) == ("fwd",)
    with pytest.raises(SpecError, match="tune them apart"):
        tune.kinds(split, SM80, [*tune.shapes(split), *tune.shapes(split, seqlen_q=9)])
    with pytest.raises(SpecError, match="tune it without --dropout"):
        tune.kinds(AttentionSpec(head_dim=64, dropout=True), SM80, tune.shapes(PLAIN))


@pytest.mark.parametrize(
    "fields", [{"varlen": True}, {"varlen": True, "paged": True}, {"window": True, "softcap": True, "alibi": True}]
)
def test_tensors_of_a_shape(fields: dict[str, bool]) -> None:
    """Emulated: the call is one that the spec takes, and packed sequences are as long as the shape says."""
    spec = AttentionSpec(head_dim=16, **fields)
    inputs = tune_card.inputs_of(spec, tune.Shape(2, 2, 1, 32, 48), CPU)
    attention = fagen.load(spec, arch="sm80", emulate=True)
    o = attention(inputs.q, inputs.k, inputs.v, **inputs.call)
    assert torch.isfinite(o).all()
    assert o.shape == ((64, 2, 16) if spec.varlen else (2, 32, 2, 16))
    if spec.varlen:
        assert inputs.call["cu_seqlens_k"].tolist() == [0, 48, 96] and inputs.call["max_seqlen_q"] == 32


@pytest.mark.parametrize(
    ("name", "capability", "runs"),
    [
        ("sm90a", (9, 0), True),
        ("sm90a", (10, 0), False),
        ("sm90", (9, 0), True),
        ("sm80", (9, 0), False),
        ("sm80+ptx", (9, 0), True),
        ("sm80", (8, 6), True),
        ("sm86", (8, 0), False),
        ("sm120+ptx", (9, 0), False),
    ],
)
def test_what_a_card_runs(name: str, capability: tuple[int, int], runs: bool) -> None:
    assert tune_card.runs_on(resolve(name), capability) is runs
    assert tune_card.runs_on(for_capability(capability), capability)


# What is kept, and who takes it


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A cache of its own, tuned tiles in use, and a compiler of that identity."""
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAGEN_TUNED", "1")
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    yield stub


def entry(
    spec: AttentionSpec = PLAIN,
    kind: Kind = "fwd",
    tile: Tile | None = FAST,
    arch: Any = SM80,
    card: Gpu = CARD,
    **changes: Any,
) -> tuned.Entry:
    kernel = tune._kernel(plan(spec, arch, None if tile is None else {kind: tile}), kind)
    compiler = tuned.compiler_identity()
    assert compiler is not None
    made = tuned.entry_of(kernel, card, compiler, gain=1.1, figures=[], date="2026-12-01")
    return dataclasses.replace(made, **changes)


def tiles(spec: AttentionSpec = PLAIN, arch: Any = SM80, card: Gpu | None = CARD) -> dict[Kind, Tile]:
    return tune._tiles(tuned.plan_for(spec, arch, lambda: card))


def test_round_trip(nvcc: Stub) -> None:
    assert tuned.entries() == () and tiles() == {"fwd": SHIPPED}
    one, other = entry(), entry(AttentionSpec(head_dim=64, causal=True))
    file = tuned.keep([one, other])
    assert file == cache.cache_dir() / "tuned.json" and tuned.entries() == (one, other)
    assert not stat.S_IMODE(file.stat().st_mode) & 0o022
    assert tiles() == {"fwd": FAST}
    assert "TILE_N = 80;" in render(tuned.plan_for(PLAIN, SM80, lambda: CARD)[0])
    tuned.keep([entry(tile=SAME)])  # in place of the one before
    assert len(tuned.entries()) == 2 and tiles() == {"fwd": SAME}
    assert tuned.forget(lambda each: each.slug == one.slug) == [entry(tile=SAME)]
    assert tiles() == {"fwd": SHIPPED} and tuned.entries() == (other,)
    assert tuned.forget(lambda each: True) == [other] and not file.exists()


def test_all_of_the_key_must_be_the_same(nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep([entry()])
    assert tiles(card=Gpu("Test Card", (9, 0))) == {"fwd": FAST}
    assert tiles(card=Gpu("Another", (9, 0))) == tiles(card=Gpu("Test Card", (8, 0))) == tiles(card=None)
    assert tiles(card=None) == {"fwd": SHIPPED}
    assert tiles(AttentionSpec(head_dim=64, causal=True)) == {"fwd": SHIPPED}
    assert tiles(AttentionSpec(head_dim=64, dtype="fp16")) == {"fwd": SHIPPED}
    assert tiles(arch=resolve("sm87"))["fwd"] != FAST
    monkeypatch.setenv("FAGEN_TUNED", "0")
    assert tiles() == {"fwd": SHIPPED}
    monkeypatch.setenv("FAGEN_TUNED", "1")
    monkeypatch.setenv("FAGEN_NVCC", str(Stub(tmp_path / "other" / "nvcc", version="12.9.1").path))
    assert tiles() == {"fwd": SHIPPED}
    monkeypatch.setattr(tuned, "compiler_identity", lambda: None)
    assert tiles() == {"fwd": SHIPPED}
    monkeypatch.undo()


def test_another_version_of_fagen(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep([entry(fagen="0.0.1")])
    assert tiles() == {"fwd": SHIPPED}


def test_a_kernel_on_the_cpu_has_the_table_s_tile(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one for a card what was tuned there: load, build and show by the same function."""
    tuned.keep([entry()])
    monkeypatch.setattr(tuned, "gpus", lambda: [CARD])
    monkeypatch.setattr(kernels, "card", lambda device: CARD)
    loaded: list[tuple[Any, int | None]] = []
    monkeypatch.setattr(kernels, "load_planned", lambda plans, device: loaded.append((plans[0].tile, device)))
    kernels.load(PLAIN, SM80, 0)
    kernels.load(PLAIN, SM80, None)
    assert loaded == [(FAST, 0), (SHIPPED, None)]


def test_commands_take_what_load_takes(
    nvcc: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tuned.keep([entry()])
    monkeypatch.setattr(tuned, "gpus", lambda: [CARD])
    (tmp_path / "variants.toml").write_text('arch = "sm80"\n[[variants]]\nhead_dim = 64\n')
    flags = ["--head-dim", "64", "--arch", "sm80", "--json"]
    matrix = ["--from", str(tmp_path / "variants.toml"), "--json"]

    def keys(*command: str) -> str:
        assert main(list(command)) == 0
        document = json.loads(capsys.readouterr().out)
        if "artifacts" in document:
            source = Path(document["artifacts"][0]["source"]).read_text()
        else:
            source = document["kernels"][0].get("source") or str(document["kernels"][0]["tile"]["tile_n"])
        found = re.search(r"TILE_N = (\d+);", source)
        return found[1] if found else source

    assert keys("show", *flags) == keys("build", *flags) == keys("inspect", *flags) == "80"
    assert keys("build", *matrix) == "80"
    assert keys("show", *flags, "--emulate") == "96"
    assert main(["why", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["built"]
    monkeypatch.setenv("FAGEN_TUNED", "0")
    assert keys("show", *flags) == keys("inspect", *flags) == "96"
    monkeypatch.setenv("FAGEN_TUNED", "1")
    monkeypatch.setattr(tuned, "gpus", list)  # a machine without the card builds what ships
    assert keys("show", *flags) == "96"


def test_a_bundle_has_what_ships(nvcc: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tuned.keep([entry()])
    monkeypatch.setattr(tuned, "gpus", lambda: [CARD])
    (tmp_path / "variants.toml").write_text('arch = "sm80"\n[[variants]]\nhead_dim = 64\n')
    assert main(["bundle", str(tmp_path / "variants.toml"), "-o", str(tmp_path / "kernels.zip")]) == 0
    (artifact,) = cache.list_artifacts()
    assert "TILE_N = 96;" in artifact.source.read_text()


def test_where_nothing_may_be_compiled(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned kernel that is not built gives way to the table's, which a bundle may have; one that is built runs."""
    tuned.keep([entry()])
    monkeypatch.setenv("FAGEN_JIT", "0")
    assert tiles() == {"fwd": SHIPPED}
    build.build(plan(PLAIN, SM80, {"fwd": FAST}))
    assert tiles() == {"fwd": FAST}


def test_a_look_up_without_tuned_tiles_asks_nobody(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the driver nor a compiler, which would take longer than all of it."""

    def never() -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(tuned, "compiler_identity", never)
    assert tuned.plan_for(PLAIN, SM80, never) == plan(PLAIN, SM80)
    monkeypatch.undo()


def test_the_file_is_read_once(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.keep([entry()])
    assert tiles() == {"fwd": FAST}
    monkeypatch.setattr(tuned.json, "loads", lambda text: pytest.fail("read again"))
    assert tiles() == {"fwd": FAST}


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "entries": []}',
        '{"format": 1, "entries": [{}]}',
        '{"format": 1, "entries": 3}',
        '{"format": 1, "entries": [3]}',
        b"\xff\xfe".decode("latin-1"),
    ],
)
def test_a_damaged_file_is_not_used(nvcc: Stub, damage: str) -> None:
    file = tuned.keep([entry()])
    file.write_text(damage, encoding="latin-1")
    with pytest.warns(RuntimeWarning, match=r"tuned\.json is damaged .* fagen tune --forget removes it") as caught:
        assert tiles() == {"fwd": SHIPPED}
        assert tiles() == {"fwd": SHIPPED}
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    tuned.keep([entry()])  # in its place
    assert tiles() == {"fwd": FAST}


@pytest.mark.parametrize(
    "changes",
    [
        {"gain": "x"},
        {"card": None},
        {"spec": []},
        {"tile": 3},
        {"tile": {"tile_m": "1"}},
        {"new": 1},
        {"figures": [{}]},
    ],
)
def test_an_entry_that_is_none(nvcc: Stub, changes: dict[str, Any]) -> None:
    file = tuned.keep([entry()])
    document = json.loads(file.read_text())
    document["entries"][0] |= changes
    file.write_text(json.dumps(document))
    with pytest.warns(RuntimeWarning, match="is damaged"):
        assert tiles() == {"fwd": SHIPPED}


def test_a_damaged_file_can_be_forgotten(nvcc: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    file = tuned.keep([entry()])
    file.write_text("{")
    assert main(["tune", "--forget"]) == 0
    assert not file.exists() and "0 tuned tiles forgotten" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tile_n": 72}, "tiles are no whole fragments"),
        ({"tile_n": 512}, "bytes of shared memory a block; sm80 has"),
        ({"warps": True}, "a tile has tile_m"),
        ({"stages": -1}, "a number in it is less than 1"),
        ({"color": 3}, "a tile has tile_m"),
    ],
)
def test_a_tile_that_does_not_fit_is_not_used(nvcc: Stub, changes: dict[str, Any], why: str) -> None:
    tuned.keep([entry(tile=FAST)])
    one = entry()
    tuned.keep([dataclasses.replace(one, tile=one.tile | changes)])
    with pytest.warns(RuntimeWarning, match=why) as caught:
        assert tiles() == {"fwd": SHIPPED}
    assert "the tuned tile of fwd_hdim64_bf16_sm80 is not used" in str(caught[0].message) and len(caught) == 1


def test_tiles_that_do_not_go_together(nvcc: Stub) -> None:
    """A forward of 64 rows wants a backward of as many: without it, it is left out; with it, both are used."""
    spec = AttentionSpec(head_dim=64, backward=True)
    narrow = TileConfig(64, 64, warps=4, stages=2, blocks_per_sm=2)
    rows_64 = BackwardTile(64, 64, warps=8, stages=1, s_rows=4, kv_rows=2, q_rows=2, blocks_per_sm=1)
    tuned.keep([entry(spec, "fwd", narrow)])
    with pytest.warns(RuntimeWarning, match="128 query rows do not divide the 64 of the forward"):
        assert tiles(spec) == tune._tiles(plan(spec, SM80))
    tuned.keep([entry(spec, "bwd", rows_64)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiles(spec) == {"fwd": narrow, "bwd": rows_64}
    tuned.forget(lambda each: each.kind == "fwd")
    assert tiles(spec) == {"fwd": plan(spec, SM80)[0].tile, "bwd": rows_64}


def test_the_conversion_goes_with_the_backward(nvcc: Stub) -> None:
    """Both know how the sum of dQ lies in memory."""
    spec = AttentionSpec(head_dim=64, backward=True)
    tile = BackwardTile(64, 64, warps=8, stages=1, s_rows=4, kv_rows=2, q_rows=2, blocks_per_sm=1)
    tuned.keep([entry(spec, "bwd", tile)])
    main, convert = (tune._kernel(tuned.plan_for(spec, SM80, lambda: CARD), kind) for kind in ("bwd", "bwd_convert"))
    assert main.tile == tile and convert.tile != tune._kernel(plan(spec, SM80), "bwd_convert").tile
    assert cast(Any, convert.tile).tile_m == 64 and convert.threads == main.threads == 256


def test_a_forward_that_two_specs_share(nvcc: Stub) -> None:
    """In a fixed order of additions or in any, the forward is one kernel: tuned for one it is for both."""
    spec = AttentionSpec(head_dim=64, backward=True)
    tuned.keep([entry(spec, "fwd", FAST)])
    assert tiles(spec.model_copy(update={"deterministic": True}))["fwd"] == tiles(spec)["fwd"] == FAST


def test_dropout_has_the_keys_of_the_kernel_without(nvcc: Stub) -> None:
    """With a probability of 0 it gives the same bits."""
    hopper = HopperTile(192, 80, 3, False, 32)
    tuned.keep([entry(), entry(tile=hopper, arch=SM90A)])
    dropout = AttentionSpec(head_dim=64, dropout=True)
    assert tiles(dropout) == {"fwd": FAST}
    (kernel,) = plan(dropout, SM90A)
    assert isinstance(kernel.tile, HopperTile) and kernel.tile.tile_m == 128
    assert tiles(dropout, SM90A) == {"fwd": dataclasses.replace(kernel.tile, tile_n=80)}
    # With a window as well the kernel is of the other family, whose bits are its own.
    window = AttentionSpec(head_dim=64, window=True)
    tuned.keep([entry(window, tile=hopper, arch=SM90A)])
    assert tiles(window, SM90A) == {"fwd": hopper}
    both = AttentionSpec(head_dim=64, window=True, dropout=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiles(both, SM90A) == tune._tiles(plan(both, SM90A))


def test_dropout_with_a_probability_of_0_emulated(nvcc: Stub) -> None:
    """The same bits where a tuned tile has other keys a step, on Hopper by tiles of other rows."""
    spec, tile = AttentionSpec(head_dim=32), HopperTile(192, 80, 3, False, 32)
    tuned.keep([entry(spec, tile=tile, arch=SM90A)])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 100, 2, 32, generator=generator).bfloat16() for _ in range(3))
    outputs = []
    for one, call in ((spec, {}), (spec.model_copy(update={"dropout": True}), {"dropout_p": 0.0})):
        attention = PlannedAttention(one, tuned.plan_for(one, SM90A, lambda: CARD), CPU)
        assert cast(Any, attention.kernel(CPU).tile).tile_n == 80
        outputs.append(attention(q, k, v, return_lse=True, **cast(Any, call)))
    assert all(torch.equal(x, y) for x, y in zip(*outputs, strict=True))


def test_two_processes_keep_both(nvcc: Stub, tmp_path: Path) -> None:
    """Each reads, adds and replaces under the lock."""
    code = (
        "import sys; from fagen import tuned; from fagen.arch import resolve; from fagen.driver import Gpu\n"
        "from fagen.plan import plan; from fagen.spec import AttentionSpec\n"
        "for dim in map(int, sys.argv[1:]):\n"
        "    (kernel,) = plan(AttentionSpec(head_dim=dim), resolve('sm80'))\n"
        "    tuned.keep([tuned.entry_of(kernel, Gpu('c', (8, 0)), 'x', gain=1.1, figures=[], date='')])\n"
    )
    environment = script_env(FAGEN_CACHE_DIR=str(tmp_path / "cache"))
    dims = [range(8, 129, 8), range(136, 257, 8)]
    running = [subprocess.Popen([sys.executable, "-c", code, *map(str, some)], env=environment) for some in dims]
    assert [process.wait() for process in running] == [0, 0]
    assert {each.spec["head_dim"] for each in tuned.entries()} == set(range(8, 257, 8))
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {".locks", "tuned.json"}


def test_a_cache_of_others(nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the owner of a shared cache has tuned counts for all; what a user has tuned counts first, for that user."""
    tuned.keep([entry(), entry(AttentionSpec(head_dim=128), tile=None)])
    shared, own = cache.cache_dir(), tmp_path / "own"
    monkeypatch.setattr(cache, "_writable", lambda root: root != shared)
    monkeypatch.setattr(cache, "_fallbacks", lambda primary, target: [own])
    assert tiles() == {"fwd": FAST}
    with pytest.warns(RuntimeWarning, match="is not writable; kernels are built in"):
        assert tuned.keep([entry(tile=SAME)]) == own / "tuned.json"
    assert tiles() == {"fwd": SAME} and len(tuned.entries()) == 2


# The command


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fagen.cli.tune.gpu_capability", lambda: None)
    assert main(["tune", "--head-dim", "64"]) == 2
    said = capsys.readouterr()
    assert said.err == "fagen: error: no GPU that PyTorch can use: tiles are timed on one (see fagen doctor)\n"
    assert said.out == ""
    assert main(["tune", "--head-dim", "64", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "say which kernel: --head-dim 128 and the features"),
        (["--causal"], "say which kernel"),
        (["--list", "--forget"], "--list and --forget exclude each other"),
        (["--head-dim", "64", "--seqlen", "1k"], "--seqlen '1k' is no number of keys"),
        (["--head-dim", "64", "--dropout"], "tune it without --dropout"),
        (["--head-dim", "64", "--kernel", "bwd"], "no kernel of kind 'bwd' to tune for hdim64_bf16; there are: fwd"),
        (["--head-dim", "64", "--heads", "3", "--heads-k", "2"], "must be a positive multiple"),
        (["--head-dim", "65"], "head_dim=65 is not served"),
        (["--head-dim", "64", "--batch", "0"], "--batch"),
    ],
)
def test_bad_input(
    arguments: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fagen.cli.tune.gpu_capability", lambda: (9, 0))
    monkeypatch.setenv("FAGEN_ARCH", "sm90")
    assert main(["tune", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.fixture
def tuning(shop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Workshop:
    """The command on that card."""
    monkeypatch.setenv("FAGEN_NVCC", str(Stub(tmp_path / "bin" / "nvcc").path))
    monkeypatch.setattr("fagen.cli.tune.gpu_capability", lambda: (9, 0))
    monkeypatch.setattr(tune_card, "Card", lambda arch: shop)
    return shop


def test_command(tuning: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.seconds[FAST] = (0.9, 0.8, 1.0)
    tuning.wrong[TileConfig(64, 32, 4, 1, 2)] = "o is off by 1"
    arguments = ["tune", "--head-dim", "64", "--arch", "sm80"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert tuned.entries() == () and said.err == ""
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert "fwd_hdim64_bf16_sm80 on Test Card, nvcc 13.0.88" in said.out
    assert re.search(
        r"^  \d+ of 504 tiles fit beside the table's, \d+ of them spill no more, \d+ of them", said.out, re.M
    )
    assert "dropped: tile_m=64 tile_n=32 warps=4 stages=1 blocks_per_sm=2" in said.out and "o is off by 1" in said.out
    assert (
        "tile_m=128 tile_n=80 warps=4 stages=2 blocks_per_sm=2 q_in_registers=0 along_keys=0: 1.116 times" in said.out
    )
    assert "(the table's)" in said.out and said.err.startswith("fagen: kept in ")
    assert tiles() == {"fwd": FAST}
    assert main([*arguments, "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["kernels"]
    assert document["winner"]["tile_n"] == 80 and document["card"] == "Test Card"
    assert sum(tile["shipped"] for tile in document["tiles"]) == 1
    del tuning.seconds[FAST]
    assert main(arguments) == 0
    assert "the table's tile stays" in capsys.readouterr().out


def test_list_and_forget(nvcc: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    spec = AttentionSpec(head_dim=64, backward=True)
    tuned.keep([entry(), entry(spec, "bwd", None), entry(arch=SM90A, tile=None), entry(fagen="0.0.1")])
    assert main(["tune", "--list"]) == 0
    said = capsys.readouterr()
    assert "fwd_hdim64_bf16_sm80" in said.out and "bwd_hdim64_bf16_backward_sm80" in said.out
    assert said.out.count("not used") == 1 and said.err == "fagen: 4 tuned tiles\n"
    assert main(["tune", "--list", "--head-dim", "64", "--backward", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["entries"]
    assert row["kind"] == "bwd" and row["current"] is True
    assert main(["tune", "--forget", "--head-dim", "64", "--arch", "sm90a"]) == 0
    assert capsys.readouterr().err == "fagen: 1 tuned tile forgotten\n" and len(tuned.entries()) == 3
    assert main(["tune", "--forget", "--kernel", "bwd"]) == 0
    assert {each.kind for each in tuned.entries()} == {"fwd"}
    assert main(["tune", "--forget"]) == 0
    assert tuned.entries() == ()


# On a card


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"backward": True}, {"split_kv": True}], ids=["fwd", "bwd", "decode"])
def test_on_the_card(
    fields: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few candidates on a small shape, to the end: what load takes afterwards is the winner, and right."""
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FAGEN_TUNED", "1")
    every = ranges.tiles
    monkeypatch.setattr(ranges, "tiles", lambda *asked: list(every(*asked))[::17])
    spec = AttentionSpec(head_dim=64, causal=True, **fields)
    arch = for_capability(torch.cuda.get_device_capability())
    if spec.backward and arch.name == "sm90a":  # whose backward has a range of a few tiles
        arch = SM90
    sizes = ["--batch", "2", "--heads", "4", "--seqlen", "512,1024", "--repeats", "5"]
    assert main(["tune", *spec.cli_flags(), "--arch", arch.name, *sizes, "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)["kernels"]
    assert [document["kind"] for document in documents] == list(tune.kinds(spec, arch, tune.shapes(spec)))
    device = torch.device("cuda", torch.cuda.current_device())
    attention = fagen.load(spec, arch=arch.name)
    for document in documents:
        assert document["right"] > 0 and len(document["tiles"]) > 1
        assert all(seconds > 0 for tile in document["tiles"] for seconds in tile["seconds"])
        wanted = document["winner"] or document["shipped"]
        assert dataclasses.asdict(attention.kernel(device, document["kind"]).tile) == wanted
    for judge in tune_card.judges(spec, device, [(3, 300)] if spec.split_kv else [(300, 310)]):
        assert judge.problem(attention) is None


@pytest.mark.gpu
def test_a_target_that_the_card_does_not_run() -> None:
    with pytest.raises(SpecError, match=r"kernels for sm80 do not run on .*, of compute capability 9\.0"):
        tune_card.Card(SM80) if torch.cuda.get_device_capability() == (9, 0) else pytest.skip("another card")
