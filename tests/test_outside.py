"""Score modifications from outside: the examples, and what a folder, a package or a file may get wrong."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import everywhere, families
from processes import python_path
from sessions import blocks

import fagen
from fagen import cli, origin, registry, render
from fagen.arch import resolve
from fagen.check import Case, CheckResult, check, differentiate
from fagen.errors import SpecError
from fagen.mods import MODS, CallContext, Mod, ScoreContext
from fagen.plan import plan
from fagen.spec import AttentionSpec

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "mods"
NAMES = sorted(path.name.removesuffix(registry.SUFFIX) for path in EXAMPLES.iterdir() if path.suffix == ".j2")

FRAGMENT = """
{% set declare = {"fields": [["slant_log2", "float", "value * LOG2E"]], "eager": "scores + value * col",
                  "example": "0.1"} %}
{% set output_scale = none %}
{% macro setup() %}{% endmacro %}
{% macro forward(score, scale) %}
{{ score }} = {{ score }} * {{ scale }} + params.slant_log2 * col;
{% endmacro %}
{% macro backward(grad, output) %}{% endmacro %}
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers goes with it."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_loaded", set(registry._loaded))
    monkeypatch.delenv("FAGEN_MODS", raising=False)
    yield
    render.environment.cache_clear()


@pytest.fixture
def examples() -> None:
    registry.load_mods(EXAMPLES)


def folder(path: Path, name: str = "slant", text: str = FRAGMENT) -> Path:
    path.mkdir(exist_ok=True)
    (path / f"{name}.cuh.j2").write_text(text)
    return path


# ---------------------------------------------------------------- the examples


def check_both_ways(arch: str, head_dim: int = 32, **sizes: Any) -> CheckResult:
    """`check` of a spec with a backward, which is that of the target's own family."""
    features = {name: sizes.pop(name) for name in list(sizes) if isinstance(sizes[name], bool)}
    spec = AttentionSpec(head_dim=head_dim, backward=True, **features)
    emulate = arch != "gpu"
    name = None if arch == "gpu" else arch
    main = fagen.load(spec, arch=name, emulate=emulate).kernel("cpu" if emulate else "cuda", "bwd")
    assert main.family == main.arch.family
    return check(spec, arch=name, emulate=emulate, **sizes)


@pytest.mark.usefixtures("examples")
@everywhere
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_right_both_ways(name: str, arch: str) -> None:
    result = check_both_ways(arch, causal=True, batch=1, seqlen_q=70, seqlen_k=60, **{name: True})
    assert result.passed and list(result.gradients)[:3] == ["dq", "dk", "dv"]


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("names", [["softsign"], ["softcap", "alibi", "bias", *NAMES]], ids=str)
def test_an_example_on_hopper(names: list[str]) -> None:
    spec = AttentionSpec(head_dim=32, **dict.fromkeys(names, True))
    result = check(spec, arch="sm90a", emulate=True, batch=1, seqlen_q=150, seqlen_k=130)
    assert result.passed and result.slug.endswith("sm90a")


@pytest.mark.usefixtures("examples")
def test_the_examples_with_split_keys() -> None:
    spec = AttentionSpec(head_dim=32, window=True, split_kv=True, **dict.fromkeys(NAMES, True))
    assert check(spec, arch="sm80", emulate=True, heads=4, heads_k=2, seqlen_q=20, seqlen_k=90).passed


@pytest.mark.usefixtures("examples")
@everywhere
@pytest.mark.parametrize("features", [{"varlen": True, "dropout": True}, {"head_dim": 136, "bias": True}], ids=str)
def test_the_examples_together(features: dict[str, Any], arch: str) -> None:
    """Packed; and where the warpgroups of Hopper's backward share the keys."""
    on = dict.fromkeys(("window", *NAMES), True) | features
    assert check_both_ways(arch, heads=4, heads_k=2, seqlen_q=20, seqlen_k=90, **on).passed


@pytest.mark.usefixtures("examples")
@everywhere
@pytest.mark.parametrize("head_dim", [32, 136])
def test_what_stands_before_and_behind_a_gradient(head_dim: int, arch: str, tmp_path: Path) -> None:
    """The gradient of a table is that of what it is added to: through a cap behind it, not through one before."""
    text = (EXAMPLES / "softsign.cuh.j2").read_text()
    registry.load_mods(
        folder(tmp_path / "mods", "squash", text.replace("softsign", "squash").replace('"order": 0', '"order": 40'))
    )
    on = {"softsign": True, "relative": True, "squash": True}
    assert check_both_ways(arch, head_dim, batch=1, heads=2, heads_k=1, seqlen_q=40, seqlen_k=70, **on).passed


# Each by its head, and a cap; both with a number that others may have too.
BY_HEAD = """
{% set declare = {"fields": [["NAME_log2", "float", "value * LOG2E"]], "example": "0.01",
                  "eager": "scores + value * col * torch.arange(scores.shape[1]).to(scores)[:, None, None]"} %}
{% set output_scale = none %}
{% set reads_head = true %}
{% macro setup() %}{% endmacro %}
{% macro forward(score, scale) %}
const float distance = params.NAME_log2 * col;
{{ score }} = {{ score }} * {{ scale }} + distance * score_head;
{% endmacro %}
{% macro backward(grad, output) %}{% endmacro %}
"""
CAP = """
{% set declare = {"fields": [["cap_inverse", "float", "1 / value"], ["cap_log2", "float", "value * LOG2E"]],
                  "eager": "scores / (1 + scores.abs() / value)", "example": "5.0", "order": 40} %}
{% set output_scale = none %}
{% set backward_reads_output = true %}
{% macro setup() %}{% endmacro %}
{% macro forward(score, scale) %}
const float distance = {{ score }} * {{ scale }} * 0.6931471805599453f * params.cap_inverse;
{{ score }} = params.cap_log2 * distance / (1.0f + fabsf(distance));
{% endmacro %}
{% macro backward(grad, output) %}
const float distance = 1.0f - fabsf({{ output }}) / params.cap_log2;
{{ grad }} *= distance * distance;
{% endmacro %}
"""


@everywhere
@pytest.mark.parametrize("head_dim", [32, 128, 136])
def test_several_of_one_score_at_a_time(head_dim: int, arch: str, tmp_path: Path) -> None:
    """Behind one of whole tiles. Their names are in no other's way, and derivatives read their own outputs."""
    mods = tmp_path / "mods"
    for name in ("one", "two"):
        folder(mods, name, BY_HEAD.replace("NAME", name))
    registry.load_mods(folder(mods, "cap", CAP))
    on = dict.fromkeys(("softcap", "alibi", "one", "two", "cap"), True)
    sizes = {"batch": 1, "heads": 4, "heads_k": 2, "seqlen_q": 70, "seqlen_k": 90}
    assert check_both_ways(arch, head_dim, **on, **sizes).passed


SHIFT = """
{% set declare = {"takes": "tensor", "dtypes": ["float32"], "checks": [["value.numel() == 1", "must be one number"]],
                  "fields": [["shift", "const float*", "value"]], "eager": "scores + value",
                  "example": "torch.ones(1, device=device)", "gradient": {"sum": "d_shift"}} %}
{% set output_scale = none %}
{% macro setup() %}{% endmacro %}
{% macro tile(scale) %}
const float shift_log2 = ld_global_f32(params.shift) * 1.4426950408889634f;
#pragma unroll
for (int m = 0; m < M_FRAGS; ++m) {
#pragma unroll
    for (int j = 0; j < S_FRAGS; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) S_rmem[m][j][e] = fmaf(S_rmem[m][j][e], {{ scale }}, shift_log2);
    }
}
{% endmacro %}
{% macro backward(grad, output) %}{% endmacro %}
{% macro value_gradient(grad) %}
red_global_add_f32(params.d_shift, {{ grad }});
{% endmacro %}
"""


@everywhere
@pytest.mark.parametrize("head_dim", [32, 136])
def test_a_value_of_whole_tiles_has_a_gradient(head_dim: int, arch: str, tmp_path: Path) -> None:
    """What shifts all scores but the sink's has the sum of all their gradients: with few keys, more than rounding."""
    registry.load_mods(folder(tmp_path / "mods", "shift", SHIFT))
    on = {"shift": True, "sink": True}
    for keys in (70, 7):
        result = check_both_ways(arch, head_dim, batch=1, heads=2, heads_k=1, seqlen_q=40, seqlen_k=keys, **on)
        assert all(result.gradients[name].passed for name in ("dq", "dk", "dv"))
    worst = result.gradients["dshift"].worst
    assert abs(worst.reference) > 1 and worst.value == pytest.approx(worst.reference, rel=0.05)


@pytest.mark.usefixtures("examples")
@everywhere
@pytest.mark.parametrize(
    ("head_dim", "cap", "behind"),
    [
        (64, "softsign", []),
        (128, "softcap", []),
        (136, "softcap", []),
        (64, "softcap", ["alibi"]),
        (128, "softcap", ["alibi"]),
    ],
)
def test_a_derivative_far_from_0(head_dim: int, cap: str, behind: list[str], arch: str) -> None:
    """Scores above 2000, whose references the forward would leave apart from the sums."""
    spec = AttentionSpec(head_dim=head_dim, backward=True, **dict.fromkeys([cap, *behind], True))
    values: dict[str, Any] = {cap: 5000.0}
    case = Case(spec=spec, batch=1, heads=1, heads_k=1, seqlen_q=40, seqlen_k=70, softmax_scale=1.0, values=values)
    device = "cuda" if arch == "gpu" else "cpu"
    inputs = case.inputs(device)
    inputs.q[..., 0], inputs.k[..., 0] = 64.0, 64.0
    d_o, _ = case.upstream(device)
    attention = fagen.load(spec, arch=None if arch == "gpu" else arch, emulate=arch != "gpu")
    gradients = differentiate(attention, inputs, d_o)[2]
    for found, expected in zip(gradients, case.reference_gradients(inputs, d_o, None), strict=True):
        x, ref = found[..., 1:], expected[..., 1:]  # what cancels in the first column has its rounding times 64
        assert (x - ref).norm() <= 1e-2 * ref.norm()


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("name", NAMES)
def test_the_definition_of_an_example_by_finite_differences(name: str) -> None:
    mod = registry.named(name)
    call = CallContext(batch=1, heads_q=2, seqlen_q=3, seqlen_k=4, softmax_scale=0.5, device=torch.device("cpu"))
    value = mod.example(call)
    scores = 3 * torch.randn(1, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row, col = torch.arange(1, 4)[:, None], torch.arange(4)[None, :]
    context = ScoreContext(row=row, col=col, rows=slice(0, 3), keys=slice(0, 4))
    assert torch.autograd.gradcheck(lambda s: mod.eager(s, value, context), scores.requires_grad_())


@pytest.mark.usefixtures("examples")
@families
def test_a_table_learns(arch: str) -> None:
    """Gradient of the table alone; in a fixed order of additions none, but the rest."""
    case = Case(spec=AttentionSpec(head_dim=32, relative=True, backward=True), seqlen_q=40, seqlen_k=50)
    inputs = case.inputs()
    table = inputs.call["relative_table"].requires_grad_()
    o = fagen.load(case.spec, arch=arch, emulate=True)(inputs.q, inputs.k, inputs.v, relative_table=table)
    (found,) = torch.autograd.grad(o.float().square().sum(), table)
    expected = case.reference_gradients(inputs, 2 * o.detach(), None)[3]
    assert found.shape == table.shape and (found - expected).norm() <= 1e-2 * expected.norm()

    ordered = replace(case, spec=AttentionSpec(head_dim=32, relative=True, backward=True, deterministic=True))
    attention = fagen.load(ordered.spec, arch=arch, emulate=True)
    with pytest.raises(SpecError, match=r"in no fixed order.*relative_table\.detach\(\)"):
        attention(inputs.q, inputs.k, inputs.v, relative_table=table)
    results = [differentiate(attention, ordered.inputs(), inputs.q) for _ in range(2)]
    assert len(results[0][2]) == 3 and all(map(torch.equal, results[0][2], results[1][2]))


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("softsign", None, r"pass softsign=\.\.\."),
        ("softsign", 0.0, "softsign must be a positive number, got 0.0"),
        ("softsign", "2", "softsign must be a number, got str"),
        ("relative", torch.zeros(3, 5), r"relative_table must be \(heads, 2 \* reach \+ 1\), got a tensor \(3, 5\)"),
        ("relative", torch.zeros(2, 5, dtype=torch.float16), "dtype torch.float16; expected float32"),
        ("relative", 3, "relative_table must be a tensor, got int"),
    ],
)
def test_values_that_an_example_refuses(name: str, value: Any, message: str) -> None:
    spec = AttentionSpec(head_dim=32, **{name: True})
    inputs = Case(spec=spec).inputs()
    attention = fagen.load(spec, arch="sm80", emulate=True)
    with pytest.raises(SpecError, match=message):
        attention(inputs.q, inputs.k, inputs.v, **{registry.named(name).argument: value})


@pytest.mark.gpu
@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("name", NAMES)
def test_an_example_on_a_card(name: str) -> None:
    for features in ({"backward": True}, {"backward": True, "causal": True, "bias": True}, {"split_kv": True}):
        assert check(AttentionSpec(head_dim=128, **features, **{name: True}), emulate=False).passed


def test_what_the_pages_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands and the code of examples/README.md, and the example of docs/modifications.md."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("FAGEN_ARCH", "sm80")
    text = (ROOT / "examples" / "README.md").read_text()
    for line in "".join(blocks(text, "bash")).splitlines():
        assert cli.main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
    (code,) = blocks(text, "python")
    exec(code, {})
    assert "tensor([[" in capsys.readouterr().out
    assert {path.name for path in EXAMPLES.iterdir()} == set(re.findall(r"\[(\S+\.cuh\.j2)\]", text))
    (slant,) = blocks((ROOT / "docs" / "modifications.md").read_text(), "jinja")
    registry.load_mods(folder(tmp_path / "mods", text=slant))
    assert check(AttentionSpec(head_dim=32, slant=True), arch="sm80", emulate=True, batch=1, seqlen_q=20).passed


# ---------------------------------------------------------------- the spec, the kernel


@pytest.mark.usefixtures("examples")
def test_a_field_as_any_other() -> None:
    spec = AttentionSpec(head_dim=64, relative=True, softsign=True, causal=True)
    assert spec == AttentionSpec(head_dim=64, causal=True, custom=("softsign", "relative", "softsign"))
    assert spec == AttentionSpec(head_dim=64, causal=True, custom=["relative"], softsign=True)
    assert hash(spec) == hash(AttentionSpec.model_validate_json(spec.model_dump_json())) and spec.slug.endswith(
        "causal_relative_softsign"
    )
    assert AttentionSpec.model_validate(json.loads(spec.model_dump_json(exclude_defaults=True))) == spec
    assert spec.cli_flags()[2:] == ["--causal", "--relative", "--softsign"]
    assert AttentionSpec(head_dim=64, softsign=False) == AttentionSpec(head_dim=64)
    # A cap comes before what is added, in whatever order they are named.
    everything = AttentionSpec(head_dim=64, softcap=True, alibi=True, bias=True, relative=True, softsign=True)
    assert [mod.name for mod in everything.mods] == ["softcap", "softsign", "alibi", "bias", "relative"]


@pytest.mark.usefixtures("examples")
def test_the_text_is_the_key(tmp_path: Path) -> None:
    """No path is in it; an edited fragment is another kernel, and says where its lines come from."""
    path = folder(tmp_path / "one") / "slant.cuh.j2"
    registry.load_mods(path.parent)
    (kernel,) = plan(AttentionSpec(head_dim=64, slant=True), resolve("sm80"))
    text = render.render(kernel)
    assert str(tmp_path) not in text and "// >>> mods/slant.cuh.j2" in text and "--mods DIR" in text
    at = next(line for line in origin.lines(kernel) if "slant_log2 * col" in line.text)
    assert (at.template, FRAGMENT.splitlines()[at.number - 1].strip()[:9]) == ("mods/slant.cuh.j2", "{{ score ")
    path.write_text(FRAGMENT.replace("* col;", "* (col + 1);"))
    assert render.render(kernel) != text
    path.write_text(FRAGMENT)
    assert render.render(kernel) == text
    path.write_text(FRAGMENT.replace("params.slant_log2", "{{ slope }}"))
    with pytest.raises(fagen.BuildError, match=rf"{re.escape(str(path))}, line 7: 'slope' is undefined"):
        render.render(kernel)


def test_call_arguments_are_those_of_a_call() -> None:
    named = [name for name in inspect.signature(fagen.Attention.__call__).parameters if name[0] != "_"]
    of_mods = {mod.argument for mod in MODS}
    assert {*named} - {"self", "values_of_mods"} - of_mods == set(registry.CALL_ARGUMENTS)


# ---------------------------------------------------------------- where they come from


def run(*arguments: str, beside: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fagen", *arguments],
        env=os.environ | {"PYTHONPATH": python_path(*beside, ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "--mods", str(EXAMPLES), "--head-dim", "64", "--softsign"],
        [f"--mods={EXAMPLES}", "show", "--head-dim", "64", "--softsign"],
        ["show", "--head-dim", "64", "--softsign"],
    ],
)
def test_the_command_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    place = {} if any("--mods" in word for word in arguments) else {"FAGEN_MODS": str(EXAMPLES)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, value)
        assert cli.main([*arguments, "--arch", "sm80"]) == 0
    assert "softsign_inverse" in capsys.readouterr().out


def test_flags_come_and_go(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["build", "--help"]) == 0
    assert "--mods" in (plain := capsys.readouterr().out) and "--softsign" not in plain
    assert cli.main(["build", "--mods", str(EXAMPLES), "--help"]) == 0
    text = capsys.readouterr().out
    assert "--softsign" in text and registry.named("softsign").description in text
    command = ["why", "--head-dim", "64", "--both", "softsign,relativ", "--arch", "sm80"]
    assert cli.main(command) == 2 and "did you mean relative?" in capsys.readouterr().err


def test_a_matrix_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "variants.toml"
    file.write_text("[[variants]]\nhead_dim = 64\nsoftsign = [false, true]\n[[exclude]]\nsoftsign = false\n")
    command = ["build", "--from", str(file), "--arch", "sm80", "--emulate", "--json"]
    assert cli.main(command) == 2 and "no 'softsign'" in capsys.readouterr().err
    assert cli.main([*command, "--mods", str(EXAMPLES)]) == 0
    (row,) = json.loads(capsys.readouterr().out)["artifacts"]
    assert row["slug"] == "fwd_hdim64_bf16_softsign_sm80"


def test_a_package(tmp_path: Path) -> None:
    """An installed package offers its own by an entry point, and is loaded where a spec asks for what nobody knows."""
    package = tmp_path / "slants"
    folder(package)
    (package / "__init__.py").write_text(
        "from pathlib import Path\nimport fagen\ndef register():\n    fagen.load_mods(Path(__file__).parent / 'mods')\n"
    )
    folder(package / "mods")
    info = tmp_path / "slants-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slants\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[fagen.mods]\nslants = slants:register\n")
    command = ["show", "--head-dim", "64", "--slant", "--arch", "sm80"]
    assert run(*command).returncode == 2
    done = run(*command, beside=[tmp_path])
    assert done.returncode == 0 and "slant_log2" in done.stdout, done.stderr
    (package / "__init__.py").write_text("import nothing_of_the_kind\n")
    broken = run(*command, beside=[tmp_path])
    assert broken.returncode == 2 and "entry point slants = slants:register: ModuleNotFoundError" in broken.stderr
    assert len(broken.stderr.splitlines()) == 1


def test_a_python_file(tmp_path: Path) -> None:
    """For what expressions cannot say: it registers the fragment beside it."""
    place = folder(tmp_path / "mods", "tilt", re.sub(r"\{% set declare.*?%\}", "", FRAGMENT, flags=re.S))
    with pytest.raises(SpecError, match=r"tilt\.cuh\.j2: it has no `declare`, and no Python file"):
        registry.load_mods(place)
    script = place / "tilt.py"
    script.write_text(
        "from pathlib import Path\nimport fagen\nfrom fagen.mods import Field, LOG2E, Mod\n"
        "fagen.register_mod(Mod(name='tilt', argument='tilt', fields=(Field('slant_log2', 'float'),),\n"
        "    pack=lambda value, call: {'slant_log2': value * LOG2E},\n"
        "    eager=lambda scores, value, context: scores + value * context.col, example=lambda call: 0.1),\n"
        "    fragment=Path(__file__).with_name('tilt.cuh.j2'))\n"
    )
    registry.load_mods(place)
    assert check(AttentionSpec(head_dim=32, tilt=True), arch="sm80", emulate=True, batch=1, seqlen_q=20).passed
    other = folder(tmp_path / "other", "lean")
    (other / "lean.py").write_text("import fagen\n\nfagen.register_mod(1 / 0)\n")
    with pytest.raises(SpecError, match=rf"{other}/lean\.py, line 3: ZeroDivisionError: division by zero"):
        registry.load_mods(other)
    (other / "lean.py").write_text("import fagen\nif\n")
    with pytest.raises(SpecError, match=rf"{other}/lean\.py, line 2: invalid syntax"):
        registry.load_mods(other)


# ---------------------------------------------------------------- what may be wrong


def test_a_name_that_nobody_knows() -> None:
    for fields in ({"custom": ("slnt",)}, {"custom": ["slnt"]}):
        with pytest.raises(SpecError, match=r"no score modification 'slnt' here .*--mods DIR or FAGEN_MODS"):
            AttentionSpec(head_dim=64, **fields)
    with pytest.raises(SpecError, match="no field 'slant'"):
        AttentionSpec(head_dim=64, slant=True)
    for value in ("softsign", [3], None, [["x"]]):
        with pytest.raises(SpecError, match="custom"):
            AttentionSpec(head_dim=64, custom=value)


@pytest.mark.usefixtures("examples")
def test_a_spec_outlives_its_modification(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(head_dim=64, softsign=True)
    assert spec.mods[0] is registry.named("softsign")
    with pytest.raises(SpecError, match="softsign='yes': input should be a valid boolean"):
        AttentionSpec(head_dim=64, softsign="yes")
    monkeypatch.setattr(registry, "_registered", {})
    with pytest.raises(SpecError, match="no score modification 'softsign'"):
        plan(spec, resolve("sm80"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", "there is no such folder"),
        (lambda path: path, r"no modification in it; one is a file NAME\.cuh\.j2"),
    ],
)
def test_no_folder(make: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["list", "--mods", str(make(tmp_path)), "--json"]
    assert cli.main(command) == 2
    captured = capsys.readouterr()
    assert re.search(f"--mods {tmp_path}.*: {message}", captured.err) and json.loads(captured.out)["error"]
    assert cli.main(["build", "--head-dim", "64", "--mods"]) == 2
    assert "--mods wants a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("alibi", FRAGMENT, r"alibi\.cuh\.j2: fagen has a 'alibi' of its own"),
        ("features", FRAGMENT, "fagen has a 'features' of its own"),
        ("Slant", FRAGMENT, "'Slant' is no name of a modification"),
        ("slant", FRAGMENT.replace('"fields"', '"argument": "window", "fields"'), "argument 'window' is taken"),
        ("slant", FRAGMENT.replace("slant_log2", "alibi_slopes"), "parameter float alibi_slopes is another's"),
        ("slant", FRAGMENT.replace('"float"', '"double"'), "parameter double slant_log2 .* no kernel takes"),
        ("slant", FRAGMENT.replace("macro forward", "macro change"), r"lacks forward \(\(score, scale\)"),
        ("slant", FRAGMENT.replace("macro setup", "macro prepare"), "lacks setup"),
        ("slant", FRAGMENT.replace("set output_scale", "set scale"), "lacks output_scale"),
        ("slant", FRAGMENT.replace("{% endmacro %}\n{% macro b", "{% macro b"), r"slant\.cuh\.j2, line \d+: "),
        ("slant", "\n{% set x = nothing.at_all %}" + FRAGMENT, r"slant\.cuh\.j2, line 2: 'nothing' is undefined"),
        ("slant", FRAGMENT.replace('"example": "0.1"', '"sample": "0.1"'), "knows no sample and has no example"),
        ("slant", FRAGMENT.replace('"fields"', '"feilds": 1, "fields"'), "declare knows no feilds"),
        ("slant", FRAGMENT.replace("scores + value", "scores +* value"), "eager: .*: invalid syntax"),
        ("slant", FRAGMENT.replace('"value * LOG2E"', '"value", "a", "b"'), "is not .name, type, expression."),
        ("slant", FRAGMENT.replace('"fields"', '"takes": "list", "fields"'), 'takes must be "number" or "tensor"'),
        ("slant", FRAGMENT.replace('"fields"', '"gradient": {"sum": "d_s"}, "fields"'), "lacks value_gradient"),
        ("slant", FRAGMENT.replace('"fields"', '"order": -1, "fields"'), "order must be at least 0"),
    ],
)
def test_a_file_that_is_wrong(
    name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path / "mods", name, text)
    assert cli.main(["build", "--head-dim", "64", "--mods", str(tmp_path / "mods")]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error) and len(error.splitlines()) == 1 and str(tmp_path / "mods" / name) in error


def test_an_expression_that_fails(tmp_path: Path) -> None:
    """When it is evaluated, in a call: with the file, the expression and what was wrong."""
    registry.load_mods(folder(tmp_path / "mods", text=FRAGMENT.replace("value * LOG2E", "valu * LOG2E")))
    spec = AttentionSpec(head_dim=32, slant=True)
    inputs = Case(spec=spec, values={"slant": 1.0}).inputs()
    with pytest.raises(
        SpecError, match=r"slant\.cuh\.j2: fields, slant_log2: valu \* LOG2E: name 'valu' is not defined"
    ):
        fagen.load(spec, arch="sm80", emulate=True)(inputs.q, inputs.k, inputs.v, slant=1.0)


def test_two_of_one_name(tmp_path: Path) -> None:
    """From two files an error; one file again is its new self."""
    registry.load_mods(folder(tmp_path / "one"))
    with pytest.raises(SpecError, match=rf"two/slant\.cuh\.j2: {tmp_path}/one/slant\.cuh\.j2 has the name"):
        registry.load_mods(folder(tmp_path / "two"))
    mod: Mod = registry.named("slant")
    fagen.register_mod(replace(mod, description="anew"), fragment=tmp_path / "one" / "slant.cuh.j2")
    assert registry.named("slant").description == "anew"


def test_a_fragment_without_a_backward(tmp_path: Path) -> None:
    text = re.sub(r"\{% macro backward.*", "", FRAGMENT)
    registry.load_mods(folder(tmp_path / "mods", text=text))
    AttentionSpec(head_dim=64, slant=True)
    with pytest.raises(SpecError, match="slant has no backward"):
        AttentionSpec(head_dim=64, slant=True, backward=True)


def test_digests_differ_by_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for where, text in (("a", FRAGMENT), ("b", FRAGMENT), ("c", FRAGMENT.replace("col;", "row;"))):
        monkeypatch.setattr(registry, "_registered", {})
        registry.load_mods(folder(tmp_path / where, text=text))
        (kernel,) = plan(AttentionSpec(head_dim=64, slant=True), resolve("sm80"))
        seen.append(render.render(kernel))
    assert seen[0] == seen[1] != seen[2]
