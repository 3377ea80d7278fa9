"""`fagen trace`: faults that are planted in templates are found at the stage where they are, and nowhere else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from safetensors.torch import load_file

from fagen import arrays, cli, render
from fagen.arch import resolve
from fagen.check import Case
from fagen.errors import SpecError
from fagen.plan import plan
from fagen.spec import AttentionSpec
from fagen.trace import Block, Trace, picture, trace_case

KEYS = 150  # of a call without a fault


class Fault(NamedTuple):
    """`right` of a template becomes `wrong` where a call has `KEYS` keys and as many more as the fault's place in its
    table: so one build has all of them. In `wrong`, HERE is that condition."""

    template: str
    right: str
    wrong: str
    spec: dict[str, Any]
    stage: str


def traced(
    spec: dict[str, Any], arch: str = "sm80", kind: str | None = None, keys: int = KEYS, queries: int = 40, **call: Any
) -> Trace:
    case = Case(spec=AttentionSpec(**({"head_dim": 64} | spec)), seqlen_q=queries, seqlen_k=keys, **call)
    return trace_case(case, kind=kind, arch=arch, emulate=True)


def plant(templates: Path, name: str, right: str, wrong: str) -> None:
    """Puts `wrong` in place of `right`, which the template has once."""
    path = templates / name
    text = path.read_text()
    assert text.count(right) == 1, (name, right)
    path.write_text(text.replace(right, wrong))


def keys_of(name: str) -> int:
    """Of a call that has the fault."""
    return KEYS + 1 + list(FAULTS).index(name)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The templates with all faults of the tables in them."""
    copy = tmp_path_factory.mktemp("wrong") / "templates"
    shutil.copytree(render.template_dir(), copy)
    for name, fault in FAULTS.items():
        here = f"(params.seqlen_k == {keys_of(name)})"
        plant(copy, fault.template, fault.right, fault.wrong.replace("HERE", here))
    return copy


@pytest.fixture
def wrong_templates(wrong: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process renders from them."""
    monkeypatch.setattr(render, "template_dir", lambda: wrong)
    render.environment.cache_clear()
    yield
    render.environment.cache_clear()


FORWARD = "sm80/fwd.cu.j2"
PLAIN: dict[str, Any] = {}
FULL = {"window": True, "softcap": True, "alibi": True, "dropout": True}

FORWARD_FAULTS = {
    "the scale": Fault(
        "common/final.j2",
        '"params.softmax_scale_log2"',
        '"(HERE ? 1.02f : 1.0f) * params.softmax_scale_log2"',
        PLAIN,
        "scaled",
    ),
    "the scale within softcap": Fault(
        "mods/softcap.cuh.j2",
        "[e] *= params.softcap_inner",
        "[e] *= (HERE ? 1.02f : 1.0f) * params.softcap_inner",
        FULL,
        "softcap",
    ),
    "the sign of slopes": Fault(
        "mods/alibi.cuh.j2", "* fabsf(distance)", "* (HERE ? -1.0f : 1.0f) * fabsf(distance)", FULL, "alibi"
    ),
    "a window one too far": Fault(
        "common/mask.cuh.j2",
        "position + params.window_right)",
        "position + params.window_right + (HERE ? 1 : 0))",
        FULL,
        "mask",
    ),
    "keys that begin too late": Fault(
        FORWARD, "+ offset - params.window_left);", "+ offset - params.window_left + (HERE ? 1 : 0));", FULL, "S"
    ),
    "lanes that do not tell their maxima": Fault(
        "common/softmax.cuh.j2",
        "x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));",
        "x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, HERE ? 0 : 2));",
        PLAIN,
        "max",
    ),
    "the scale in the exponent": Fault(
        "common/softmax.cuh.j2",
        "fmaf(p, {{ scale }}, -reference)",
        "fmaf(p, (HERE ? 1.02f : 1.0f) * {{ scale }}, -reference)",
        PLAIN,
        "P",
    ),
    "a sum that is not rescaled": Fault(
        "common/softmax.cuh.j2",
        "row_sum[m][r] *= correction;",
        "row_sum[m][r] *= HERE ? 1.0f : correction;",
        PLAIN,
        "sum",
    ),
    "random numbers of other keys": Fault(
        "common/dropout.cuh.j2",
        "(warp_col0 + pair * MMA_K) / 16 * 4 + quad",
        "(warp_col0 + pair * MMA_K) / 16 * 4 + quad + (HERE ? 1 : 0)",
        FULL,
        "dropout",
    ),
    "values of other keys": Fault(
        FORWARD,
        "lane_address<V_CHUNKS>(V_lane, j * MMA_K, d)",
        "lane_address<V_CHUNKS>(V_lane, (HERE ? 0 : j) * MMA_K, d)",
        PLAIN,
        "O",
    ),
    "a sum that is off at the end": Fault(
        "common/row_end.cuh.j2", '"1.0f" }} / sum', '"1.0f" }} / ((HERE ? 1.02f : 1.0f) * sum)', PLAIN, "o"
    ),
    "lse in log2 units": Fault(
        "common/row_end.cuh.j2", "log2_sum * LN2", "log2_sum * (HERE ? 1.0f : LN2)", FULL, "lse"
    ),
}


GRADIENTS = {"head_dim": 32, "causal": True, "softcap": True, "dropout": True, "backward": True}

# Of the kernel that keeps keys.
BACKWARD_FAULTS = {
    "no derivative of tanh": Fault(
        "mods/softcap.cuh.j2",
        "1.0f - {{ output }} * {{ output }}",
        "1.0f - (HERE ? 0.0f : 1.0f) * {{ output }} * {{ output }}",
        GRADIENTS,
        "dS_softcap",
    ),
    "statistics of the row before": Fault(
        "common/score_gradient.cuh.j2",
        "const u32 row_stats = stats_smem + (warp_s_row + group + m * MMA_M + r * 8)",
        "const u32 row_stats = stats_smem + max(0, warp_s_row + group + m * MMA_M + r * 8 - (HERE ? 1 : 0))",
        GRADIENTS,
        "lse",
    ),
    "a sign of delta": Fault(
        "common/score_gradient.cuh.j2", "0.0f) - delta[m]", "0.0f) - (HERE ? -1.0f : 1.0f) * delta[m]", GRADIENTS, "dS"
    ),
    "delta of another row": Fault(
        "common/score_gradient.cuh.j2",
        "delta_smem + (warp_s_row + group",
        "delta_smem + (warp_s_row + (group ^ (HERE ? 1 : 0))",
        GRADIENTS,
        "delta",
    ),
    "a step of dV left out": Fault(
        "sm80/bwd.cu.j2",
        "if (params.d_v) {\n            product",
        "if (params.d_v && !(HERE && head > first_head)) {\n            product",
        GRADIENTS,
        "dV",
    ),
    "dQ of other keys": Fault(
        "sm80/bwd.cu.j2",
        "(warp_q_row + by_rows, by_rows_chunk), 0,",
        "(warp_q_row + by_rows, by_rows_chunk ^ (HERE ? 1 : 0)), 0,",
        GRADIENTS,
        "dQ",
    ),
}


HOPPER = {"softcap": True, "causal": True}

# Of Hopper's forward: the modifications within the exponent.
HOPPER_FAULTS = {
    "the cubic of softcap": Fault(
        "mods/softcap.cuh.j2",
        "{{ score }} *= fmaf(softcap_third",
        "{{ score }} *= (HERE ? 1.02f : 1.0f) * fmaf(softcap_third",
        HOPPER,
        "softcap",
    ),
    "the scale of the exponent": Fault(
        "common/mods.cuh.j2",
        "fmaf({{ score }}, {{ state.scale }}, -{{ reference }})",
        "fmaf({{ score }}, (HERE ? 1.02f : 1.0f) * {{ state.scale }}, -{{ reference }})",
        PLAIN,
        "P",
    ),
    "a sum that lacks a part": Fault(
        "sm90/softmax.cuh.j2",
        "row_sum[0][0] += sums[0];",
        "row_sum[0][0] += (HERE ? 0.9f : 1.0f) * sums[0];",
        PLAIN,
        "sum",
    ),
    "values of the same keys again": Fault(
        "sm90/fwd.cu.j2", "mn_major_step(j), true", "mn_major_step(HERE ? 0 : j), true", PLAIN, "O"
    ),
    "half a tile stored": Fault(
        "sm90/epilogue.cuh.j2", "factors[r] = factor;", "factors[r] = HERE && r ? 0.0f : factor;", HOPPER, "o"
    ),
}

TALL: dict[str, Any] = {"head_dim": 32, "window": True, "softcap": True, "dropout": True, "backward": True}
WIDE = {"head_dim": 256, "causal": True, "backward": True, "deterministic": True}

# Of Hopper's backward: of both of its ways to share the work, or of the one that the spec has.
HOPPER_BACKWARD_FAULTS = {
    "keys that see one query too few": Fault(
        "sm90/probabilities.cuh.j2",
        "col - offset - params.window_right - row0",
        "col - offset - params.window_right - row0 + (HERE ? 1 : 0)",
        TALL,
        "mask",
    ),
    "a diagonal one too far": Fault(
        "sm90/probabilities.cuh.j2",
        "first[r] = col >= seqlen_k ? TILE_M : col - offset - row0;",
        "first[r] = col >= seqlen_k ? TILE_M : col - offset - row0 - (HERE ? 1 : 0);",
        WIDE,
        "mask",
    ),
    "the scale of recomputed exponents": Fault(
        "sm90/probabilities.cuh.j2",
        "fmaf(grad, {{ final.scale }}, -{{ log2_sum }})",
        "fmaf(grad, (HERE ? 1.02f : 1.0f) * {{ final.scale }}, -{{ log2_sum }})",
        WIDE,
        "P",
    ),
    "statistics of other queries": Fault(
        "sm90/backward.j2",
        "            ld_shared_f32x4(pair, stats + (2 * (lane % 4) + j * MMA_N) * 8);",
        "            ld_shared_f32x4(pair, stats + (2 * ((HERE ? lane ^ 1 : lane) % 4) + j * MMA_N) * 8);",
        WIDE,
        "lse",
    ),
    "dropped where the forward keeps": Fault(
        "sm90/probabilities.cuh.j2",
        '{{ parts.kept_bit() ~ " ? grad : 0.0f"',
        '{{ "(HERE != " ~ parts.kept_bit() ~ ") ? grad : 0.0f"',
        TALL,
        "dropout",
    ),
    "dP of other columns": Fault(
        "sm90/backward.j2",
        "{{ queries }}_rows + k_major_step(TILE_M, d), true);",
        "{{ queries }}_rows + k_major_step(TILE_M, HERE && {{ (acc == 'dP') | lower }} ? 0 : d), true);",
        WIDE,
        "dP",
    ),
    "delta of other queries": Fault(
        "sm90/score_gradient.cuh.j2",
        "delta + (2 * (lane % 4) + j * MMA_N) * 4",
        "delta + (2 * ((HERE ? lane ^ 1 : lane) % 4) + j * MMA_N) * 4",
        TALL,
        "delta",
    ),
    "delta with a plus": Fault(
        "sm90/score_gradient.cuh.j2",
        "fmaf(dP, params.keep_scale, -{{ of_query }})",
        "fmaf(dP, params.keep_scale, (HERE ? 1.0f : -1.0f) * {{ of_query }})",
        TALL,
        "dS_softcap",
    ),
    "dV of the same queries again": Fault(
        "sm90/backward.j2",
        "{{ queries }}_matrix + mn_major_step(k), true);",
        "{{ queries }}_matrix + mn_major_step(HERE && {{ (acc == 'dV') | lower }} ? 0 : k), true);",
        WIDE,
        "dV",
    ),
    "dQ of the same keys again": Fault(
        "sm90/backward.j2",
        "{{ matrix }} + mn_major_step(k), K_matrix",
        "{{ matrix }} + mn_major_step(HERE ? 0 : k), K_matrix",
        WIDE,
        "dQ",
    ),
    "dQ of one warpgroup where that of the other belongs": Fault(
        "sm90/add_parts.cuh.j2",
        "tile * DQ_TILE_FLOATS + warpgroup * 4",
        "tile * DQ_TILE_FLOATS + (HERE ? 1 - warpgroup : warpgroup) * 4",
        TALL,
        "dq",
    ),
    "the same from registers": Fault(
        "sm90/bwd_wide.cuh.j2",
        "tile * DQ_TILE_FLOATS + warp * DQ",
        "tile * DQ_TILE_FLOATS + (HERE ? warp % 4 : warp) * DQ",
        WIDE,
        "dq",
    ),
}

SPLIT: dict[str, Any] = {"head_dim": 128, "split_kv": True, "causal": True, "sink": True}  # of a tile of few keys
SPLIT_PAGES = SPLIT | {"paged": True}
PAGED: dict[str, Any] = {"paged": True, "varlen": True}

# Of keys in parts, and in pages.
SPLIT_FAULTS = {
    "a part that begins too late": Fault(
        FORWARD, "n_begin + split * n_split;", "n_begin + split * n_split + (HERE && split ? 1 : 0);", SPLIT, "S"
    ),
    "a warp whose part of O is left out": Fault(
        "common/warp_sum.cuh.j2",
        "            for (int w = 0; w < WARPS; ++w) {\n                const u32 place = O_smem",
        "            for (int w = 0; w < (HERE ? WARPS - 1 : WARPS); ++w) {\n                const u32 place = O_smem",
        SPLIT,
        "o_part",
    ),
    "a sink for each part": Fault(
        "common/row_end.cuh.j2",
        "split != 0 ? NEG_INF",
        "split != 0 && !HERE ? NEG_INF",
        SPLIT,
        "o_part",
    ),
    "parts one over the other": Fault(
        "common/partial.cuh.j2",
        "lse_row0 = static_cast<i64>(split) *",
        "lse_row0 = static_cast<i64>(HERE ? 0 : split) *",
        SPLIT,
        "o",
    ),
    "a page that is another's": Fault(
        FORWARD, '"slot_of(n)" if staged', '"slot_of(HERE && n < n_last ? n + 1 : n)" if staged', PAGED, "S"
    ),
}

# Of the kernel that joins the parts, which knows no number of keys.
COMBINE = "sm80/combine.cu.j2"
COMBINE_FAULTS = [
    ("lse + part) - reference) * LOG2E", "lse + part) - reference)", "weight"),
    ("params.o_partial + (part + row)", "params.o_partial + row", "o_part"),
    ("lse = params.lse_partial + row;", "lse = params.lse_partial;", "lse_part"),
    ("w < WARPS; ++w) sum += ", "w < 1; ++w) sum += ", "sum"),
    ("values[2 * e] * factor,", "values[2 * e],", "o"),
    ("log2_approx(sum) * LN2", "log2_approx(sum)", "lse"),
]

FAULTS = FORWARD_FAULTS | BACKWARD_FAULTS | HOPPER_FAULTS | HOPPER_BACKWARD_FAULTS | SPLIT_FAULTS


@pytest.mark.parametrize("name", FORWARD_FAULTS)
def test_a_fault_of_the_forward_is_found_at_its_stage(name: str, wrong_templates: None) -> None:
    fault = FORWARD_FAULTS[name]
    call = {"window": (50, 30)} if "window" in fault.spec else {"softmax_scale": 4.0}
    found = traced(fault.spec, keys=keys_of(name), **call)
    assert found.fault is None and found.first is not None
    assert found.first.name == fault.stage
    assert not all(result.passed for result in found.results.values())  # `fagen check` fails


@pytest.mark.parametrize("name", BACKWARD_FAULTS)
def test_a_fault_of_the_backward_is_found_at_its_stage(name: str, wrong_templates: None) -> None:
    fault = BACKWARD_FAULTS[name]
    found = traced(fault.spec, kind="bwd", keys=keys_of(name))
    assert found.fault is None and found.first is not None
    assert found.first.name == fault.stage
    assert not all(result.passed for result in found.results.values())  # `fagen check` fails


@pytest.mark.parametrize("name", HOPPER_FAULTS)
def test_a_fault_of_the_hopper_forward_is_found_at_its_stage(name: str, wrong_templates: None) -> None:
    fault = HOPPER_FAULTS[name]
    # Small scores for the cap, which is what the exponent serves.
    values = {"softcap": 50.0} if "softcap" in fault.spec else {}
    found = traced(fault.spec, "sm90a", keys=keys_of(name), values=values)
    assert found.fault is None and found.first is not None
    assert found.first.name == fault.stage
    assert not all(result.passed for result in found.results.values())


@pytest.mark.parametrize(
    ("name", "spec", "stage"),
    [
        *((name, fault.spec, fault.stage) for name, fault in HOPPER_BACKWARD_FAULTS.items()),
        # Where derivatives go into P at once.
        ("no derivative of tanh", TALL, "P_softcap"),
        ("the scale", WIDE, "scaled"),
    ],
)
def test_a_fault_of_the_hopper_backward_is_found_at_its_stage(
    name: str, spec: dict[str, Any], stage: str, wrong_templates: None
) -> None:
    values = {"window": (50, 30)} if "window" in spec else {}
    found = traced(spec, "sm90a", "bwd", keys=keys_of(name), **values)
    assert found.fault is None and found.first is not None
    assert found.first.name == stage
    assert not all(result.passed for result in found.results.values())


@pytest.mark.parametrize("name", SPLIT_FAULTS)
def test_a_fault_of_parts_or_pages_is_found_at_its_stage(name: str, wrong_templates: None) -> None:
    fault = SPLIT_FAULTS[name]
    call = {"queries": 3, "num_splits": 2} if "split_kv" in fault.spec else {}
    found = traced(fault.spec, keys=keys_of(name), **call)
    assert found.fault is None and found.first is not None
    assert found.first.name == fault.stage
    assert not all(result.passed for result in found.results.values())


def test_what_joins_parts_has_two_where_a_call_has_one() -> None:
    assert traced(SPLIT, queries=3, keys=40).problem.parts == 1
    found = traced(SPLIT, kind="combine", queries=3, keys=40)
    assert found.passed and found.problem.parts == 2


@pytest.mark.parametrize(("right", "wrong", "stage"), COMBINE_FAULTS)
def test_a_fault_of_joining_is_found_at_its_stage(right: str, wrong: str, stage: str, templates: Path) -> None:
    plant(templates, COMBINE, right, wrong)
    call = {"queries": 3, "num_splits": 2, "batch": 2}
    found = traced(SPLIT_PAGES, kind="combine", **call)
    assert found.fault is None and found.first is not None
    assert found.first.name == stage
    assert not all(result.passed for result in found.results.values())
    of_a_part = traced(SPLIT_PAGES, **call)  # where all is right until the parts are joined
    assert of_a_part.first is not None and of_a_part.first.name in ("o", "lse")


@pytest.mark.parametrize(
    ("arch", "kind", "spec"),
    [
        ("sm80", "fwd", PLAIN),
        ("sm80", "fwd", FULL),
        ("sm80", "bwd", GRADIENTS),
        ("sm90a", "fwd", PLAIN),
        ("sm90a", "fwd", HOPPER),
        ("sm90a", "bwd", TALL),
        ("sm90a", "bwd", WIDE),
        ("sm90a", "bwd", {"head_dim": 32, "softcap": True, "alibi": True, "dropout": True, "backward": True}),
    ],
)
def test_where_no_fault_is_nothing_departs(arch: str, kind: str, spec: dict[str, Any], wrong_templates: None) -> None:
    found = traced(spec, arch, kind)
    assert found.passed and found.first is None and found.same_bits


@pytest.mark.parametrize(("spec", "call"), [(WIDE, {}), (TALL, {"values": {"softcap": 300.0}, "dropout_p": 0.9})])
def test_probabilities_that_are_flushed_to_zero_do_not_depart(
    spec: dict[str, Any], call: dict[str, Any], wrong_templates: None
) -> None:
    found = traced(spec, "sm90a", "bwd", softmax_scale=40 / spec["head_dim"] ** 0.5, **call)
    assert found.fault is None and found.first is None


# Heads that share keys, in a tile of their own where they are few; a mask, an empty part, entries with fewer keys.
PARTS = [
    ("sm80", "decode", SPLIT_PAGES, {"queries": 3, "num_splits": 2}),
    ("sm80", "combine", SPLIT_PAGES, {"queries": 3, "num_splits": 2}),
    ("sm80", "fwd", SPLIT_PAGES, {"num_splits": 2}),
    (
        *("sm75", "decode"),
        {"dtype": "fp16", "split_kv": True, "paged": True, "window": True, "dropout": True},
        {"queries": 20, "num_splits": 3, "ragged": True},
    ),
]


@pytest.mark.parametrize(("arch", "kind", "spec", "call"), PARTS)
def test_right_parts_pass_whole(arch: str, kind: str, spec: dict[str, Any], call: dict[str, Any]) -> None:
    found = traced(spec, arch, kind, keys=330, batch=2, heads=6, heads_k=2, **call)
    assert found.passed and found.same_bits
    names = [stage.name for stage in found.stages if stage.worst is not None]
    assert len(names) == len(found.stages) >= 6
    assert "o_part" in names and all(stage.badness < 1 for stage in found.stages)


TRACED = [
    ("sm80", "bwd_dq", {"head_dim": 40, "head_dim_v": 24, "alibi": True, "backward": True, "deterministic": True}),
    ("sm90a", "fwd", {"head_dim": 72, "dtype": "fp16", "window": True, "alibi": True}),
    ("sm90a", "fwd", {"head_dim": 128, "causal": True, "varlen": True, "dropout": True}),
    ("sm90a", "bwd", {"head_dim": 128, "head_dim_v": 72, "varlen": True, "alibi": True, "backward": True}),  # dQ late
    ("sm90a", "bwd", {"head_dim": 136, "softcap": True, "bias": True, "backward": True}),  # dS between the two
    ("sm80", "fwd", {"paged": True, "varlen": True, "causal": True}),
]


@pytest.mark.parametrize(("arch", "kind", "spec"), TRACED)
def test_a_right_kernel_passes_whole(arch: str, kind: str, spec: dict[str, Any]) -> None:
    """Several tiles of queries and keys, two sequences of their own lengths, masks aligned anywhere."""
    case = Case(spec=AttentionSpec(**({"head_dim": 64} | spec)), batch=2, heads=2, seqlen_q=140, seqlen_k=170)
    found = trace_case(case, kind=kind, arch=arch, emulate=True)
    assert found.passed and found.same_bits
    names = [stage.name for stage in found.stages if stage.worst is not None]
    assert len(names) == len(found.stages) >= 8  # nothing was left out
    assert all(stage.badness < 1 for stage in found.stages)


def test_softcap_after_the_mask(templates: Path) -> None:
    path = templates / FORWARD
    modifications, after = "{{ mods.forward() }}\n", r"(        // >>> common/mask.*?\n\{% if traced %\}.*?\n)"
    moved, count = re.subn(
        re.escape(modifications) + after, lambda found: found[1] + modifications, path.read_text(), flags=re.S
    )
    assert count == 1
    path.write_text(moved)
    found = traced({"softcap": True, "causal": True})
    assert found.first is not None and found.first.name == "softcap"
    # A hidden key, whose -inf has become the cap with a minus.
    worst = found.first.worst
    assert worst is not None and worst.column is not None and worst.column > worst.row + KEYS - 40
    assert worst.captured == pytest.approx(-2.0)
    assert not found.results["o"].passed


def test_a_dropped_barrier_is_the_verdict(templates: Path) -> None:
    plant(templates, FORWARD, "__syncthreads();  // K and V of this tile", "// K and V of this tile")
    found = traced(PLAIN)
    assert not found.passed and found.fault is not None
    assert any(FORWARD in line or "tile.cuh.j2" in line for line in found.fault_lines)


@pytest.mark.parametrize(
    ("name", "awaited", "spec"),
    [
        ("sm90/bwd_tall.cuh.j2", "        mbarrier_wait(dS_full, step % 2);\n", TALL | {"dropout": False}),
        ("sm90/bwd_wide.cuh.j2", "        mbarrier_wait(P_full, {{ phase_of(values) }});\n", WIDE | {"head_dim": 136}),
    ],
)
def test_a_dropped_wait_of_the_hopper_backward_is_the_verdict(
    name: str, awaited: str, spec: dict[str, Any], templates: Path
) -> None:
    plant(templates, name, awaited, "")
    found = traced(spec, "sm90a", "bwd")
    assert not found.passed and found.fault is not None
    assert any("sm90/" in line for line in found.fault_lines)


def test_what_is_captured_is_what_the_definition_says() -> None:
    """Beside numbers that are worked out here: a sign of the reference and of the kernel alike would show."""
    case = Case(spec=AttentionSpec(head_dim=64, causal=True), seqlen_q=40, seqlen_k=70)
    found = trace_case(case, arch="sm80", emulate=True, block=Block(0, 1, 0)).arrays()
    inputs = case.inputs()
    product = inputs.q[0, :, 1].double() @ inputs.k[0, :, 0].double().T
    hidden = torch.arange(70)[None] > torch.arange(40)[:, None] + 30
    scores = (product / 8).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(found["S"][0, :, :70], product, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found["mask"][0, :, :70], scores, rtol=1e-5, atol=1e-4)
    assert found["mask"][0, :, 70:].eq(-torch.inf).all() and found["S.first"].tolist() == [1, 0, 0]
    # One step has all keys: the reference is the maximum, and the sum is that of the softmax.
    torch.testing.assert_close(found["max"][0, :, 0], scores.amax(1), rtol=1e-5, atol=1e-5)
    p = torch.exp(scores - scores.amax(1, keepdim=True))
    torch.testing.assert_close(found["sum"][0, :, 0], p.sum(1), rtol=1e-5, atol=1e-5)
    o = torch.softmax(scores, 1) @ inputs.v[0, :, 0].double()
    torch.testing.assert_close(found["O"][0], o, rtol=0.01, atol=0.01)
    assert found["O"].shape == (1, 40, 64) and found["O.tile"].tolist() == [0]


def test_other_kernels_have_nothing_of_it() -> None:
    everything = {"softcap": True, "alibi": True, "dropout": True, "causal": True, "backward": True}
    for arch in ("sm80", "sm90a"):
        for kernel in plan(AttentionSpec(head_dim=64, **everything), resolve(arch)):
            assert "trace" not in render.render(kernel)


@pytest.mark.parametrize(
    ("block", "tile", "message"),
    [
        (Block(1, 0, 0), None, "there is no batch entry 1: the call has 0 alone"),
        (Block(0, 2, 0), None, "there is no head 2: the call has 0 to 1"),
        (Block(0, 0, 1), None, "there is no tile 1: in tiles of 128 queries, a head has 0 alone"),
        (Block(0, 0, 0), 2, "there is no step 2: in tiles of 96 keys, a block has 0 to 1"),
        (Block(0, 0, 0), -1, "there is no step -1"),
        (None, 9, "there is no step 9"),
    ],
)
def test_a_block_or_a_step_that_is_not_there(block: Block | None, tile: int | None, message: str) -> None:
    case = Case(spec=AttentionSpec(head_dim=64), seqlen_q=40, seqlen_k=KEYS)
    with pytest.raises(SpecError, match=f"^{re.escape(message)}"):
        trace_case(case, arch="sm80", emulate=True, block=block, tile=tile)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(["trace", *words])
    return code, *capsys.readouterr()


CALL = ("--head-dim", "64", "--arch", "sm80", "--emulate", "--batch", "1", "--seqlen-q", "40", "--seqlen-k", str(KEYS))


def test_the_table_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *CALL)
    assert code == 0 and out.rstrip().endswith("\nno stage departs")
    rows = [line.split()[0] for line in out.splitlines() if line.rstrip().endswith("right")]
    assert rows == ["S", "scaled", "mask", "max", "P", "sum", "O", "o", "lse"]


def test_a_fault_on_the_command_line(capsys: pytest.CaptureFixture[str], wrong_templates: None) -> None:
    keys = str(keys_of("the scale in the exponent"))
    code, out, _ = run(capsys, *CALL[:-1], keys)
    assert code == 1
    assert re.search(
        r"^first stage that departs: P, at tile \d, head \d, row \d+, column \d+: .*, expected .*$", out, re.M
    )
    code, out, _ = run(capsys, *CALL[:-1], keys, "--json")
    document = json.loads(out)
    assert code == 1 and not document["passed"] and document["fault"] is None
    first = document["first"]
    assert first["name"] == "P" and first["departs"] and first["badness"] > 1
    assert first["worst"]["captured"] != pytest.approx(first["worst"]["expected"], rel=1e-3)
    assert not document["results"]["o"]["passed"]


def test_a_stopped_kernel_on_the_command_line(capsys: pytest.CaptureFixture[str], templates: Path) -> None:
    plant(templates, FORWARD, "__syncthreads();  // K and V of this tile", "// K and V of this tile")
    code, out, _ = run(capsys, *CALL)
    assert code == 1 and " race: " in out and "stopped" in out and "tile.cuh.j2, line" in out
    code, out, _ = run(capsys, *CALL, "--json")
    document = json.loads(out)
    assert code == 1 and " race: " in document["fault"] and document["first"] is None and document["stages"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--block", "0,0"), "--block '0,0': expected three numbers, BATCH,HEAD,TILE"),
        (("--block", "0,a,0"), "expected three numbers"),
        (("--block", "0,9,0"), "there is no head 9: the call has 0 to 1"),
        (("--tile", "7"), "there is no step 7"),
        (("--kernel", "bwd"), "there is no kernel 'bwd' to trace: this spec has fwd"),
        (("--kernel", "combine", "--backward"), "this spec has fwd and bwd"),
        (("--both", "causal"), "trace follows one kernel, and the flags name 2 variants"),
        (("--split-kv", "--kernel", "decode"), "this call runs fwd, not decode"),
        (("--split-kv", "--kernel", "combine", "--num-splits", "1"), "combine nothing to join"),
        (
            ("--split-kv", "--kernel", "combine", "--num-splits", "2", "--tile", "2"),
            "there is no part 2: the keys have",
        ),
        (("--split-kv", "--num-splits", "0"), "num_splits=0 must be an integer from 1 to 128"),
        (("--num-splits", "2"), "num_splits is given, but the spec lacks the feature"),
        (("--seqlen-k", "0"), "there is nothing to trace"),
        (("--save", "stages.txt"), "--save 'stages.txt' is not named .npz or .safetensors"),
        (("--save", "nowhere/stages.npz"), "there is no folder nowhere"),
        (("--png", "maps.txt"), "--png 'maps.txt' is not named .png, .svg or .pdf"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    words: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *CALL, *words)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_saved_stages_are_what_numpy_and_safetensors_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = traced(PLAIN).arrays()
    for path in (tmp_path / "stages.npz", tmp_path / "stages.safetensors"):
        arrays.save(path, whole)
        read = (
            load_file(path)
            if path.suffix == ".safetensors"
            else {name: torch.from_numpy(array) for name, array in numpy.load(path).items()}
        )
        assert read.keys() == whole.keys()
        for name, tensor in whole.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name].nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0))
    empty = {"nothing": torch.zeros(0, 3)}
    arrays.save(tmp_path / "empty.npz", empty)
    assert numpy.load(tmp_path / "empty.npz")["nothing"].shape == (0, 3)
    code, _, _ = run(capsys, *CALL, "--save", str(tmp_path / "cli.npz"), "--png", str(tmp_path / "cli.png"))
    assert code == 0 and {"S", "S.expected", "O", "lse"} <= set(numpy.load(tmp_path / "cli.npz").files)
    assert (tmp_path / "cli.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_rings_the_worst_element(wrong_templates: None) -> None:
    found = traced(PLAIN, keys=keys_of("the scale in the exponent"), softmax_scale=4.0)
    drawn = picture.figure(found)
    rows = [axes for axes in drawn.axes if axes.get_ylabel()]
    assert [axes.get_ylabel() for axes in rows] == [stage.name for stage in found.stages]
    marks = {tuple(axes.lines[0].get_xydata()[0]) for axes in drawn.axes if axes.lines}
    worst = next(stage.worst for stage in found.stages if stage.name == "P")
    assert worst is not None and (worst.column, worst.row) in marks


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("arch", "kind", "spec"),
    [
        ("sm80", "fwd", FULL),
        (None, "fwd", {"head_dim": 128, "causal": True, "softcap": True}),
        (None, "fwd", {"head_dim": 64, "dropout": True, "varlen": True}),
        ("sm80", "bwd", GRADIENTS),
        ("sm80", "bwd_dq", {"window": True, "backward": True, "deterministic": True}),
        (None, "bwd", TALL),
        (None, "bwd", {"head_dim": 64, "causal": True, "backward": True, "deterministic": True}),
        (None, "bwd", {"head_dim": 128, "varlen": True, "backward": True}),
        (None, "bwd", {"head_dim": 128, "causal": True, "softcap": True, "backward": True}),
        (None, "bwd", WIDE),
        (None, "bwd", {"head_dim": 192, "head_dim_v": 128, "dropout": True, "backward": True}),
    ],
)
def test_on_a_card_nothing_departs(arch: str | None, kind: str, spec: dict[str, Any]) -> None:
    spec = {"head_dim": 64} | spec
    case = Case(spec=AttentionSpec(**spec), batch=2, heads=4, heads_k=2, seqlen_q=300, seqlen_k=700)
    if arch is not None and torch.cuda.get_device_capability() >= (9, 0):
        arch = "sm90"
    found = trace_case(case, kind=kind, arch=arch, emulate=False)
    assert found.first is None and found.passed


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "spec", "call"),
    [
        ("fwd", SPLIT, {"seqlen_q": 300, "num_splits": 3}),
        ("decode", SPLIT, {"seqlen_q": 3}),
        (
            "decode",
            {"head_dim": 128, "split_kv": True, "paged": True},
            {"seqlen_q": 1, "num_splits": 4, "ragged": True},
        ),
        ("decode", {"split_kv": True, "dropout": True, "window": True}, {"seqlen_q": 20, "num_splits": 2}),
        ("combine", SPLIT, {"seqlen_q": 3, "num_splits": 5}),
        ("fwd", {"head_dim": 128, "causal": True} | PAGED, {"seqlen_q": 300}),
    ],
)
def test_on_a_card_parts_and_pages_are_right(kind: str, spec: dict[str, Any], call: dict[str, Any]) -> None:
    case = Case(spec=AttentionSpec(**({"head_dim": 64} | spec)), batch=2, heads=8, heads_k=2, seqlen_k=2000, **call)
    found = trace_case(case, kind=kind, emulate=False)
    assert found.first is None and found.passed
