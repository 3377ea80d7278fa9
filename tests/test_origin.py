"""`fagen show --annotate`: the template and the line of it that each line of a generated file comes from."""

from __future__ import annotations

import pytest
from test_cli import Fagen, run  # noqa: F401

from fagen import origin
from fagen.arch import resolve
from fagen.errors import FagenError
from fagen.plan import KernelPlan, plan
from fagen.render import Target, render, template_dir
from fagen.spec import AttentionSpec

FEATURES = {"causal": True, "window": True, "softcap": True, "alibi": True, "dropout": True}
KERNELS = [
    kernel
    for spec, arch in (
        (AttentionSpec(head_dim=64, **FEATURES), "sm90"),
        (AttentionSpec(head_dim=72, causal=True, softcap=True, backward=True, varlen=True), "sm90a"),
        (AttentionSpec(head_dim=64, window=True, dropout=True, backward=True, deterministic=True), "sm80"),
        (AttentionSpec(head_dim=128, split_kv=True, paged=True), "sm90a"),
    )
    for kernel in plan(spec, resolve(arch))
]


@pytest.mark.parametrize("target", ["cuda", "emulate"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.slug)
def test_a_line_stands_where_its_origin_says(kernel: KernelPlan, target: Target) -> None:
    lines = origin.lines(kernel, target)
    assert "\n".join(line.text for line in lines) + "\n" == render(kernel, target)
    templates: dict[str, list[str]] = {}
    for line in lines:
        if not line.text.strip():
            assert not line.template
        if line.template:
            path = template_dir() / line.template
            there = templates.setdefault(line.template, path.read_text().split("\n"))[line.number - 1]
            if not any(mark in there for mark in ("{{", "{%", "{#", "#}", "%}")):
                assert there.strip() in line.text
    assert kernel.template in templates and "kernel.j2" in templates
    # Nothing but values stands in few lines only: members of the parameter struct, above all.
    assert sum(not line.template for line in lines if line.text.strip()) < 60


def test_show_annotate(run: Fagen) -> None:  # noqa: F811
    flags = ("show", "--head-dim", "64", "--softcap", "--arch", "sm80")
    outcome = run(*flags, "--annotate")
    assert outcome.code == 0 and outcome.err == ""
    plain = run(*flags).out
    assert [line.partition(" | ")[2] for line in outcome.out.splitlines()] == plain.splitlines()
    first = outcome.out.splitlines()[0]
    assert first.startswith("kernel.j2") and "   1 | // fwd_hdim64_bf16_softcap_sm80" in first
    assert "mods/softcap.cuh.j2" in outcome.out
    (row,) = run(*flags, "--annotate", "--json").document["kernels"]
    assert row["source"] == plain and len(row["origins"]) == plain.count("\n")
    assert row["origins"][0] == ["kernel.j2", 1] and None in row["origins"]
    assert "origins" not in run(*flags, "--json").document["kernels"][0]


def test_a_template_that_looks_at_its_own_text_has_no_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    monkeypatch.setattr("fagen.render.render", lambda kernel, target: "another text\n")
    with pytest.raises(FagenError, match="look at their own text"):
        origin.lines(kernel)
