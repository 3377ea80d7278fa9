"""The generated file: what is in it, what is not, and that it is the same everywhere.

`tests/golden/` holds the whole text of a dozen kernels, so that a change of a template shows in review as the change of
code that it is. FAGEN_ACCEPT=1 writes them anew.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jinja2
import pytest
from hypothesis import example, given, settings
from processes import python_path
from strategies import FEATURES, TOGETHER, served, specs

from fagen import build, cli, render, toolchain
from fagen.arch import Arch, resolve
from fagen.errors import ToolchainError
from fagen.mods import MODS
from fagen.plan import KernelPlan, plan
from fagen.spec import AttentionSpec

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
BEGIN, END = "// ==== kernel ====\n", "// ==== end of kernel ====\n"

# Every template and every branch in it: both types, each feature alone, padded and unequal head dims, each tile.
GOLDEN_KERNELS = [
    ("sm80", AttentionSpec(head_dim=128)),
    ("sm80", AttentionSpec(head_dim=64, dtype="fp16")),
    ("sm90", AttentionSpec(head_dim=64, causal=True)),
    ("sm90", AttentionSpec(head_dim=128, causal=True, softcap=True)),
    ("sm90", AttentionSpec(head_dim=256, causal=True, softcap=True, dtype="fp16")),
    ("sm86", AttentionSpec(head_dim=128, window=True)),
    ("sm89", AttentionSpec(head_dim=256, causal=True, window=True)),
    ("sm100", AttentionSpec(head_dim=64, dropout=True)),
    ("sm90", AttentionSpec(head_dim=192, head_dim_v=128, causal=True)),
    ("sm120", AttentionSpec(head_dim=40, causal=True, window=True, softcap=True, alibi=True, dropout=True)),
    *(("sm80", AttentionSpec(head_dim=72, **{mod.name: True})) for mod in MODS),
    ("sm90", AttentionSpec(head_dim=128, causal=True, backward=True)),
    ("sm90", AttentionSpec(head_dim=128, causal=True, varlen=True, backward=True)),
    ("sm90", AttentionSpec(head_dim=128, causal=True, split_kv=True)),
    ("sm80", AttentionSpec(head_dim=64, dtype="fp16", alibi=True, split_kv=True)),
    ("sm80", AttentionSpec(head_dim=64, bias=True, split_kv=True)),
    ("sm90a", AttentionSpec(head_dim=64, dtype="fp16", sink=True)),
    ("sm80", AttentionSpec(head_dim=72, dtype="fp16", bias=True, sink=True, backward=True)),
    ("sm90", AttentionSpec(head_dim=72, window=True, paged=True, split_kv=True)),
    (
        "sm86",
        AttentionSpec(
            head_dim=40,
            head_dim_v=72,
            dtype="fp16",
            window=True,
            softcap=True,
            alibi=True,
            dropout=True,
            backward=True,
            deterministic=True,
        ),
    ),
]
GOLDEN_KERNELS += [
    ("sm90a", AttentionSpec(head_dim=128, causal=True)),
    ("sm90a", AttentionSpec(head_dim=64, dtype="fp16", window=True)),
    ("sm90a", AttentionSpec(head_dim=64, varlen=True)),
    ("sm90a", AttentionSpec(head_dim=256, causal=True, softcap=True, alibi=True, dropout=True)),
    ("sm90a", AttentionSpec(head_dim=128, causal=True, softcap=True, backward=True)),
    (
        "sm90a",
        AttentionSpec(
            head_dim=40,
            head_dim_v=72,
            dtype="fp16",
            window=True,
            softcap=True,
            alibi=True,
            dropout=True,
            varlen=True,
            backward=True,
        ),
    ),
    ("sm90a", AttentionSpec(head_dim=64, backward=True)),
    ("sm90a", AttentionSpec(head_dim=192, causal=True, backward=True)),
]
# Of Turing's what differs from sm80.
GOLDEN_KERNELS += [
    ("sm75", AttentionSpec(head_dim=128, dtype="fp16", causal=True)),
    ("sm75", AttentionSpec(head_dim=40, head_dim_v=72, dtype="fp16", window=True, paged=True, split_kv=True)),
    ("sm75", AttentionSpec(head_dim=64, dtype="fp16", varlen=True, backward=True)),
    ("sm75", AttentionSpec(head_dim=256, dtype="fp16", causal=True, backward=True, deterministic=True)),
]
GOLDENS = {kernel.slug: kernel for arch, spec in GOLDEN_KERNELS for kernel in plan(spec, resolve(arch))}

# Words that only code of the feature has. Masks of a window need the positions that causal ones do, as ALiBi does.
TOKENS = {
    "causal": r"causal|diagonal|the longest first|int position",
    "window": r"window",
    "varlen": r"cu_seqlens",
    "split_kv": r"splits?\b",
    "paged": r"page|block_table",
    "dropout": r"dropout|philox|random|keep_|undropped",
} | {mod.name: mod.name for mod in MODS}
TOKENS["sink"] = r"sink"
TOKENS["softcap"] += r"|tanh|\bcap\b"
TOKENS["alibi"] += r"|slope|distance"
POSITIONS = r"\boffset = seqlen_k"


def kernels_of(spec: AttentionSpec, arch: str | Arch = "sm80") -> tuple[KernelPlan, ...]:
    return plan(spec, resolve(arch) if isinstance(arch, str) else arch)


def kernel_of(spec: AttentionSpec, arch: str | Arch = "sm80") -> KernelPlan:
    """The forward."""
    return kernels_of(spec, arch)[0]


def body(text: str) -> str:
    """The kernel itself, without header, primitives and the emulator."""
    assert text.count(BEGIN) == 1
    return text.split(BEGIN)[1].split(END)[0]


@pytest.mark.parametrize("slug", GOLDENS)
def test_golden(slug: str) -> None:
    kernel = GOLDENS[slug]
    path, text = GOLDEN / f"{kernel.slug}.cu", render.render(kernel)
    if os.environ.get("FAGEN_ACCEPT") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    golden = path.read_text() if path.exists() else ""
    diff = "\n".join(
        difflib.unified_diff(golden.splitlines(), text.splitlines(), path.name, "rendered now", lineterm="")
    )
    assert golden == text, f"{diff}\nIf that is what you want: FAGEN_ACCEPT=1 pytest {Path(__file__).name}"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{slug}.cu" for slug in GOLDENS}


@pytest.fixture
def a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has read no template yet; `fresh` makes it so again."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(cache))
    fresh()
    yield cache
    fresh()


def fresh() -> None:
    render.environment.cache_clear()
    render._environment.cache_clear()


def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def generate(*_: object, **__: object) -> str:
        raise AssertionError("a template is compiled")

    monkeypatch.setattr(jinja2.Environment, "_generate", generate)


def test_templates_are_compiled_once(a_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    text = render.render(kernel)
    fresh()
    compiles_nothing(monkeypatch)
    assert render.render(kernel) == text


def test_a_changed_template_is_compiled_anew(a_cache: Path, tmp_path: Path) -> None:
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    templates = tmp_path / "templates"
    shutil.copytree(render.template_dir(), templates)
    render.render(kernel, templates=templates)
    fresh()
    forward = templates / "sm80" / "fwd.cu.j2"
    forward.write_text(forward.read_text().replace("// S = Q K^T", "// here"))
    assert "// here" in render.render(kernel, templates=templates)


def test_damaged_code_of_templates_is_not_read(a_cache: Path) -> None:
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    text = render.render(kernel)
    files = list((a_cache / ".templates").iterdir())
    assert len(files) > 5
    for file in files:
        file.write_bytes(file.read_bytes()[:-1])
    fresh()
    assert render.render(kernel) == text
    for file in files:
        file.write_bytes(b"")
    fresh()
    assert render.render(kernel) == text


def test_code_of_templates_is_of_this_module(a_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another version of it made, whose filters may do something else, is compiled anew."""
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    text = render.render(kernel)
    fresh()
    monkeypatch.setattr(jinja2, "__version__", "0")
    with monkeypatch.context() as patched:
        compiles_nothing(patched)
        with pytest.raises(AssertionError, match="a template is compiled"):
            render.render(kernel)
    fresh()
    assert render.render(kernel) == text


def test_code_of_templates_that_others_could_have_written_is_not_run(
    a_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    text = render.render(kernel)
    a_cache.chmod(0o777)
    fresh()
    with monkeypatch.context() as patched:
        compiles_nothing(patched)
        with pytest.raises(AssertionError, match="a template is compiled"):
            render.render(kernel)
    for file in (a_cache / ".templates").iterdir():
        file.unlink()
    fresh()
    assert render.render(kernel) == text
    assert not list((a_cache / ".templates").iterdir())


def test_where_there_is_no_cache_rendering_makes_none(a_cache: Path) -> None:
    a_cache.rmdir()
    (kernel,) = plan(AttentionSpec(head_dim=64), resolve("sm80"))
    render.render(kernel)
    assert not a_cache.exists()


def test_golden_kernels_meet_every_template() -> None:
    """All but the primitives, of which a fragment of one's own may call some that no kernel here does."""
    rendered = "".join(render.render(kernel) for kernel in GOLDENS.values())
    shown = set(re.findall(r"^ *// >>> (.+)$", rendered, re.M))
    folder = render.template_dir()
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert shown <= there
    # These are not marked: they are the file itself, or hand on to what is.
    itself = {
        "kernel.j2",
        "common/final.j2",
        "common/find_pages.cuh.j2",
        "common/mods.cuh.j2",
        "common/page_ring.cuh.j2",
        "common/place.j2",
        "common/row_end.cuh.j2",
        "common/trace.cuh.j2",  # which tests/test_trace.py renders
        "sm90/backward.j2",
        *(kernel.template for kernel in GOLDENS.values()),
    }
    assert {path for path in there - shown if not path.startswith(("ptx/", "emulate/"))} == itself


@settings(max_examples=60)
@given(served())
@example((AttentionSpec(head_dim=64, backward=True, deterministic=True), resolve("sm90a")))
def test_features_that_are_off_leave_no_token(pair: tuple[AttentionSpec, Arch]) -> None:
    spec, arch = pair
    for kernel in kernels_of(spec, arch):
        text, on = render.render(kernel), kernel.spec
        for name, pattern in TOKENS.items():
            wanted = getattr(on, name) or (name == "causal" and on.window)
            found = re.search(pattern, text, re.IGNORECASE)
            assert (found is not None) == wanted, f"{kernel.slug}: {name}={wanted}, found {found}"
        assert bool(re.search(POSITIONS, text)) == (on.causal or on.window or on.alibi)
    assert bool(re.search(r"stats|backward", render.render(kernel_of(spec, arch)))) == spec.backward
    order = "".join(render.render(kernel) for kernel in kernels_of(spec, arch))
    summed = spec.backward and (not spec.deterministic or arch.family == "sm90")  # where blocks add in turns
    assert bool(re.search(r"dq_sum|red_global", order)) == summed


def test_every_feature_has_its_tokens() -> None:
    assert set(TOKENS) == {*FEATURES, "split_kv", "paged"}


@settings(max_examples=30)
@given(specs())
def test_one_type_only(spec: AttentionSpec) -> None:
    other = "f16" if spec.dtype == "bf16" else "bf16"
    for kernel in kernels_of(spec):
        assert not re.search(rf"_{other}\b", body(render.render(kernel)))


@settings(max_examples=60)
@given(served())
def test_body_is_the_same_for_both_targets(pair: tuple[AttentionSpec, Arch]) -> None:
    spec, arch = pair
    for kernel in kernels_of(spec, arch):
        cuda, emulated = render.render(kernel, "cuda"), render.render(kernel, "emulate")
        assert emulated.count(END) == 1 and END not in cuda
        assert body(cuda) == body(emulated)
        entry = rf'extern "C" __global__ void __launch_bounds__\(THREADS[^)]*\)\s+{kernel.entry}\('
        assert re.search(entry, body(cuda))
        assert "asm" not in body(cuda)


@settings(max_examples=60)
@given(served())
def test_a_cuda_file_stands_alone_and_reads_well(pair: tuple[AttentionSpec, Arch]) -> None:
    spec, arch = pair
    for kernel in kernels_of(spec, arch):
        text = render.render(kernel)
        assert "#include" not in text and "#define" not in text
        assert not re.search(r"\{%[ -]|\{\{|\{#", text)
        assert not re.search(r"[ \t]+$", text, re.M) and "\t" not in text
        assert "\n\n\n" not in text and text.endswith("}\n")
        assert text.splitlines()[0] == f"// {kernel.slug}"
        assert f"shared memory  {kernel.smem_bytes} bytes a block" in text
        assert text.isascii()


def test_the_header_s_command_reproduces_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    for kernel in GOLDENS.values():
        for target in ("cuda", "emulate"):
            text = render.render(kernel, target)
            reproduce = re.search(r"^//   reproduce +fagen (.+)$", text, re.M)
            assert reproduce is not None
            assert cli.main(shlex.split(reproduce[1])) == 0
            assert capsys.readouterr().out == text


def test_the_header_s_spec_is_the_spec() -> None:
    for kernel in GOLDENS.values():
        found = re.search(r"^//   spec +(\{.+\})$", render.render(kernel), re.M)
        assert found is not None and AttentionSpec.model_validate_json(found[1]) == kernel.spec


def test_nothing_of_the_machine_enters(tmp_path: Path) -> None:
    """The same bytes from an installation elsewhere, in another folder, time zone, locale and order of hashes."""
    shutil.copytree(ROOT / "fagen", tmp_path / "fagen", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(render.template_dir(), tmp_path / "fagen" / "templates")
    spec = AttentionSpec(head_dim=64, **dict.fromkeys(TOGETHER, True))
    changed = {
        "PYTHONPATH": python_path(tmp_path),
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C",
        "HOME": "/",
    }
    command = [sys.executable, "-m", "fagen", "show", *spec.cli_flags(), "--arch", "sm80"]
    shown = subprocess.run(command, env=os.environ | changed, cwd="/", capture_output=True, text=True, check=True)
    assert shown.stdout == render.render(kernel_of(spec))
    assert str(ROOT) not in shown.stdout and str(tmp_path) not in shown.stdout


def test_a_modification_has_a_backward_where_it_says_so() -> None:
    for mod in MODS:
        fragment = render.environment().get_template(f"mods/{mod.name}.cuh.j2").module
        assert hasattr(fragment, "backward") == mod.differentiable


def test_an_undefined_name_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError, match="tile_k"):
        render.environment().from_string("{{ tile_k }}").render()


# Swizzle


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, list[list[int]]]]:
    """Byte offsets that the template's own `tile_offset` gives, [row][chunk], by chunks a row."""
    counts, rows = range(2, 33, 2), 32
    calls = "\n".join(
        f"for (int row = 0; row < {rows}; ++row) for (int c = 0; c < {count}; ++c) "
        f"print({count}, tile_offset<{count}>(row, c), "
        f"lane_address<{count}>(tile_offset<{count}>(row % 8, c % 2), row / 8 * 8, c / 2));"
        for count in counts
    )
    main = f"""
void print(int count, u32 offset, u32 from_lane) {{ printf("%d %u %u\\n", count, offset, from_lane); }}
int main() {{ {calls} }}
"""
    folder = tmp_path_factory.mktemp("swizzle")
    source, program = folder / "swizzle.cpp", folder / "swizzle"
    source.write_text(render.render(kernel_of(AttentionSpec(head_dim=64)), "emulate") + main)
    words = toolchain.find_host_compiler().words
    subprocess.run([*words, "-std=c++17", "-w", "-pthread", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    offsets: dict[int, list[int]] = {count: [] for count in counts}
    for line in printed.splitlines():
        count, offset, from_lane = map(int, line.split())
        assert from_lane == offset, f"lane_address differs from tile_offset with {count} chunks a row"
        offsets[count].append(offset)
    yield {count: [offsets[count][row * count : (row + 1) * count] for row in range(rows)] for count in counts}


@pytest.mark.parametrize("chunks", range(2, 33, 2))
def test_swizzle_permutes_within_a_row(chunks: int, addresses: dict[int, list[list[int]]]) -> None:
    for row, offsets in enumerate(addresses[chunks]):
        assert sorted(offsets) == [16 * (row * chunks + chunk) for chunk in range(chunks)]


@pytest.mark.parametrize("chunks", range(2, 33, 2))
def test_swizzle_has_no_bank_conflicts(chunks: int, addresses: dict[int, list[list[int]]]) -> None:
    """The 8 rows that ldmatrix reads at once, of any chunk column, lie in the 8 groups of 4 banks."""
    rows = addresses[chunks]
    for first in range(0, len(rows), 8):
        for chunk in range(chunks):
            assert {rows[first + row][chunk] // 16 % 8 for row in range(8)} == set(range(8))


# The real compiler


@pytest.mark.parametrize(
    ("arch", "spec"),
    [
        ("sm80", AttentionSpec(head_dim=64, **dict.fromkeys(TOGETHER, True))),
        ("sm86", AttentionSpec(head_dim=256, dtype="fp16", causal=True)),
        ("sm90+ptx", AttentionSpec(head_dim=128, window=True, softcap=True)),
        ("sm120", AttentionSpec(head_dim=72, head_dim_v=136, dropout=True, alibi=True)),
        ("sm89", AttentionSpec(head_dim=256, softcap=True, backward=True, deterministic=True)),
        ("sm90", AttentionSpec(head_dim=104, head_dim_v=40, **dict.fromkeys((*TOGETHER, "backward"), True))),
    ],
)
def test_a_cuda_compiler_takes_it(arch: str, spec: AttentionSpec) -> None:
    try:
        toolchain.find_cuda_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    kernels = kernels_of(spec, arch)
    for kernel, artifact in zip(kernels, build.build(kernels), strict=True):
        assert artifact.source.read_text() == render.render(kernel)
        if not kernel.arch.ptx_only:
            assert artifact.resources is not None and 0 < artifact.resources.registers <= 255
