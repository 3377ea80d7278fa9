"""What is Hopper's own: the order of tiles of a persistent kernel, and tiles that see nothing between others."""

from __future__ import annotations

import heapq
import re
import shutil
from pathlib import Path

import pytest
import torch

import fagen
from fagen import prepared, reference, render
from fagen.check import OUTPUT_BUDGET, compare_lse, compare_o
from fagen.schedule import heads_a_group
from fagen.spec import AttentionSpec


def slowest(lengths: list[int], heads: int, group: int, blocks: int) -> float:
    """When the last block is done over the mean, where each takes the next tile when it is done with one."""
    order = []
    for first in range(0, heads, group):
        order += [length for length in lengths for _ in range(min(group, heads - first))]
    done = [0] * blocks
    for length in order:
        heapq.heapreplace(done, done[0] + length)
    return max(done) * blocks / sum(done)


@pytest.mark.parametrize("seqlen", [1024, 4096, 16384])
@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 112), (128, 128), (256, 80)])
def test_groups_are_even_enough(seqlen: int, head_dim: int, tile_n: int) -> None:
    """16384 tokens, causal, as on a card of 132 multiprocessors."""
    lengths = [-(-end // tile_n) + 1 for end in range(seqlen, 0, -128)]
    heads, kv_bytes = 16384 // seqlen * 2048 // head_dim, seqlen * head_dim * 4
    group = heads_a_group(lengths, heads, 1, kv_bytes, 132)
    assert slowest(lengths, heads, group, 132) < 1.03


def test_groups_are_as_small_as_that_allows() -> None:
    """d256 causal at 8k: three heads fit L2, and the longest tile of the last two would be the last to end."""
    lengths = [-(-end // 80) + 1 for end in range(8192, 0, -128)]
    kv_bytes = 8192 * 512 * 2
    assert slowest(lengths, 8, 3, 132) > 1.1
    assert heads_a_group(lengths, 8, 1, kv_bytes, 132) == 8
    assert heads_a_group([1] * 64, 8, 1, kv_bytes, 132) == 4
    assert heads_a_group([1] * 8, 64, 4, 2**24, 1) == 4  # heads that share keys stay together
    assert heads_a_group([1] * 8, 64, 1, 2**20, 1) == 32  # two groups rather than 25, 25 and 14


def test_a_default_device_of_torch_does_not_matter() -> None:
    """Compiled code of PyTorch runs under one; the order of tiles is made on the host."""
    attention = fagen.load(AttentionSpec(head_dim=64, causal=True), arch="sm90a", emulate=True)
    q = torch.randn(1, 70, 2, 64).bfloat16()
    with torch.device("meta"):
        o = attention(q, q, q)
    assert compare_o(o, reference.attention(q, q, q, causal=True)[0], OUTPUT_BUDGET["bf16"]).passed


@pytest.mark.gpu
def test_compiled_into_graphs_of_pytorch() -> None:
    """Inductor's own CUDA graphs, which let no tensor of their pools live on."""
    attention = fagen.load(AttentionSpec(head_dim=128, causal=True))
    compiled = torch.compile(lambda q, k, v: attention(q * 1, k, v) + 1, mode="reduce-overhead", fullgraph=True)
    q, k, v = (torch.randn(1, 512, 8, 128, device="cuda").bfloat16() for _ in range(3))
    expected = attention(q, k, v) + 1
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k, v), expected)


@pytest.mark.parametrize("head_dim", [64, 192, 256])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiles_that_see_nothing_between_others(monkeypatch: pytest.MonkeyPatch, head_dim: int, seed: int) -> None:
    """Sq > Sk: a head's last tiles have no keys, and the next head's first ones do; o = 0 there, right elsewhere."""
    monkeypatch.setattr(prepared, "heads_a_group", lambda *_: 1)
    monkeypatch.setenv("FAGEN_EMULATE_SEED", str(seed))
    attention = fagen.load(AttentionSpec(head_dim=head_dim, causal=True), arch="sm90a", emulate=True)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, rows, 5, head_dim, generator=generator).bfloat16() for rows in (500, 140, 140))
    o, lse = attention(q, k, v, return_lse=True, _poison=True)
    expected_o, expected_lse = reference.attention(q, k, v, causal=True)
    assert not o[:, :360].any() and (lse[:, :, :360] == -torch.inf).all()
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed
    assert compare_lse(lse, expected_lse).passed


# Scores by position, in the order in which a kernel walks over the keys, from the last to the first: how they grow from
# one step to the next decides whether references serve. In units of log2(e): 2^15 is 10.4, and 2^128 is 88.7.
WALKS = {
    "rising a little": [0, 4, 8, 9, 14, 20],
    "rising past the limit": [-40, -25, 0, 11, 30, 60],
    "rising past the range of float32": [-200, -60, 100, 300, 310, 500],
    "far from 0": [-1500, 1000, 1004, 996, 1016, 1000],
    "falling": [100, 99, 60, 0, -100, -300],
    "a peak": [0, 0, 0, 120, 0, 0],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("walk", list(WALKS))
@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"head_dim": 64}, {}),
        ({"head_dim": 128}, {}),
        ({"head_dim": 128, "dtype": "fp16", "causal": True}, {}),
        ({"head_dim": 256, "window": True}, {"window": (400, 100)}),
        ({"head_dim": 128, "softcap": True}, {"softcap": 200.0}),
        ({"head_dim": 64, "softcap": True}, {"softcap": 700.0}),
        ({"head_dim": 128, "alibi": True}, {"alibi_slopes": torch.tensor([0.5, 0.01])}),
    ],
    ids=lambda value: "-".join(str(x) for x in value if x != "head_dim") if isinstance(value, dict) else None,
)
def test_references_that_do_not_serve(
    fields: dict[str, object], values: dict[str, object], walk: str, device: str
) -> None:
    """Scores that leave the references of the steps before behind give the softmax."""
    generator = torch.Generator().manual_seed(0)
    spec = AttentionSpec(**fields)
    dtype = torch.float16 if spec.dtype == "fp16" else torch.bfloat16
    rows, keys = 200, 720
    levels = torch.tensor(WALKS[walk]).repeat_interleave(keys // 6).flip(0)
    q, k = (torch.randn(1, n, 2, spec.head_dim, generator=generator) / spec.head_dim**0.25 for n in (rows, keys))
    q[..., 0], k[..., 0] = 1.0, levels[:, None]
    q, k, v = (x.to(dtype) for x in (q, k, torch.randn(1, keys, 2, spec.head_dim, generator=generator)))
    values = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    attention = fagen.load(spec, arch="sm90a", emulate=device == "cpu")
    o, lse = attention(*(x.to(device) for x in (q, k, v)), softmax_scale=1.0, return_lse=True, _poison=True, **values)
    expected = reference.attention(*(x.to(device) for x in (q, k, v)), causal=spec.causal, softmax_scale=1.0, **values)
    assert compare_o(o, expected[0], OUTPUT_BUDGET[spec.dtype]).passed
    assert compare_lse(lse, expected[1]).passed


def test_a_modification_that_needs_all_scores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fragment with `tile` alone: every step has its maxima, and the numbers are as right."""
    shutil.copytree(render.template_dir(), tmp_path / "templates")
    path = tmp_path / "templates" / "mods" / "softcap.cuh.j2"
    fragment = path.read_text()
    for name in ("exponent_setup", "exponent"):
        fragment, found = re.subn(rf"{{% macro {name}\(.*?\n{{% endmacro %}}\n", "", fragment, flags=re.DOTALL)
        assert found == 1
    path.write_text(re.sub(r"{% set exponent_holds.*\n", "", fragment))
    monkeypatch.setattr(render, "template_dir", lambda: tmp_path / "templates")
    render.environment.cache_clear()
    try:
        spec = AttentionSpec(head_dim=64, causal=True, softcap=True)
        attention = fagen.load(spec, arch="sm90a", emulate=True)
        assert "references" not in attention.artifact("cpu").source.read_text()
    finally:
        render.environment.cache_clear()
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, generator=generator).bfloat16() for _ in range(3))
    o, lse = attention(q, k, v, softcap=5.0, return_lse=True, _poison=True)
    expected_o, expected_lse = reference.attention(q, k, v, causal=True, softcap=5.0)
    assert compare_o(o, expected_o, OUTPUT_BUDGET["bf16"]).passed and compare_lse(lse, expected_lse).passed
