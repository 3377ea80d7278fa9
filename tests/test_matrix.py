"""Matrices: which kernels a file names, how they are divided, and how a bad file is refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import python_path

from fagen import matrix
from fagen.arch import Arch, parse_list, resolve
from fagen.cli import main
from fagen.errors import SpecError
from fagen.matrix import Variant
from fagen.plan import KernelPlan
from fagen.spec import AttentionSpec

ROOT = Path(__file__).resolve().parent.parent


def targets(text: str | None) -> Sequence[Arch]:
    return parse_list(text or "sm80")


@pytest.fixture
def read(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Reads a text as a matrix."""

    def read_text(text: str, arch: str | None = None, name: str = "variants.toml") -> list[Variant]:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return matrix.read(tmp_path / name, targets, arch)

    return read_text


def test_the_example_of_the_module(read: Any) -> None:
    example = "\n".join(line for line in str(matrix.__doc__).splitlines() if line.startswith("    "))
    expected = [
        (AttentionSpec(head_dim=head_dim, causal=causal, softcap=True), arch)
        for head_dim in (64, 128)
        for causal in (False, True)
        for arch in ("sm80", "sm90a")
        if (head_dim, arch) != (64, "sm80")
    ]
    expected.append((AttentionSpec(head_dim=256, backward=True), "sm90a"))
    assert [(variant.spec, variant.arch.name) for variant in read(example)] == expected


def test_one_variant_and_its_defaults(read: Any) -> None:
    assert read("[[variants]]\nhead_dim = 64") == [Variant(AttentionSpec(head_dim=64), resolve("sm80"))]
    assert [one.arch.name for one in read("[[variants]]\nhead_dim = 64", "sm90,sm90a")] == ["sm90", "sm90a"]
    text = 'arch = "sm86"\n[[variants]]\nhead_dim = 64\n[[variants]]\nhead_dim = 128\narch = ["9.0", "sm80"]'
    assert [one.arch.name for one in read(text)] == ["sm86", "sm90", "sm80"]
    assert [one.arch.name for one in read(text, "sm89")] == ["sm89", "sm89"], "--arch stands for all of the file's"


def test_each_variant_once(read: Any) -> None:
    twice = "[[variants]]\nhead_dim = [64, 64]\nhead_dim_v = 64\n[[variants]]\nhead_dim = 64\n"
    assert len(read(twice)) == 1


def test_pyproject(read: Any) -> None:
    text = """
        [project]
        name = "model"
        [tool.other]
        variants = 3
        [tool.fagen]
        arch = "sm90a"
        [[tool.fagen.variants]]
        head_dim = 64
    """
    assert read(text, name="pyproject.toml") == [Variant(AttentionSpec(head_dim=64), resolve("sm90a"))]
    with pytest.raises(SpecError, match=r"no \[tool.fagen\]"):
        read("[tool.other]\nx = 1", name="pyproject.toml")


AXES: dict[str, list[Any]] = {"head_dim": [32, 64, 128], "dtype": ["bf16", "fp16"], "causal": [False, True]}
AXES |= {"softcap": [False, True], "arch": ["sm80", "sm90a"]}


@st.composite
def subsets(draw: st.DrawFn, names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: draw(st.lists(st.sampled_from(AXES[name]), min_size=1, unique=True)) for name in names}


@given(subsets(list(AXES)), st.lists(st.sampled_from(list(AXES)), min_size=1, unique=True).flatmap(subsets))
def test_a_matrix_is_the_product_without_what_agrees_with_an_exclusion(
    axes: dict[str, list[Any]], excluded: dict[str, list[Any]]
) -> None:
    """By the definition: each combination, but for those of which every named field is among the excluded values."""
    import tempfile

    named = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    kept = [one for one in named if not all(one[name] in values for name, values in excluded.items())]
    lines = ["[[variants]]", *(f"{name} = {json.dumps(values)}" for name, values in axes.items())]
    lines += ["[[exclude]]", *(f"{name} = {json.dumps(values)}" for name, values in excluded.items())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "variants.toml"
        path.write_text("\n".join(lines))
        if len(kept) == len(named):
            with pytest.raises(SpecError, match="exclude 1 excludes nothing"):
                matrix.read(path, targets)
            return
        found = matrix.read(path, targets)
    expected = {
        Variant(AttentionSpec(**{name: value for name, value in one.items() if name != "arch"}), resolve(one["arch"]))
        for one in kept
    }
    assert len(found) == len(expected) and set(found) == expected


def test_an_exclusion_knows_defaults(read: Any) -> None:
    text = (
        "[[variants]]\nhead_dim = 64\nsoftcap = [false, true]\n[[variants]]\nhead_dim = 128\nhead_dim_v = [64, 128]\n"
    )
    without = [variant.spec for variant in read(text + "[[exclude]]\nhead_dim_v = [64, 128]\nsoftcap = false")]
    assert without == [AttentionSpec(head_dim=64, softcap=True)]


def test_what_no_kernel_serves_can_be_left_out(read: Any) -> None:
    text = "[[variants]]\nhead_dim = 64\npaged = true\nsplit_kv = [false, true]\n"
    with pytest.raises(SpecError, match=r"variants.toml, variants 1: paged=True needs split_kv=True.*\[\[exclude\]\]"):
        read(text)
    assert len(read(text + "[[exclude]]\nsplit_kv = false")) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no variants"),
        ("[[variants", "is not TOML"),
        ("[variants]\nhead_dim = 64", r"headed by \[\[variants\]\]"),
        ("variants = [64]", r"headed by \[\[variants\]\]"),
        ("[[variants]]\nhead_dims = 64", "variants 1: there is no 'head_dims'; did you mean head_dim?"),
        ("[[variant]]\nhead_dim = 64", "there is no 'variant'; did you mean variants?"),
        ("[[variants]]\ncausal = true", "variants 1: head_dim is required"),
        ("[[variants]]\nhead_dim = []", "variants 1: head_dim must be a value or a list"),
        ("[[variants]]\nhead_dim = {a = 1}", "variants 1: head_dim must be a value or a list"),
        ("[[variants]]\nhead_dim = 64\n[[variants]]\nhead_dim = 100", "variants 2: head_dim=100 is not served"),
        ('[[variants]]\nhead_dim = "64"', "variants 1: head_dim='64'"),
        ("[[variants]]\nhead_dim = 64\ncausal = 1", "variants 1: causal=1"),
        ("[[variants]]\nhead_dim = 64\narch = 90", "variants 1: arch must be a name"),
        ('[[variants]]\nhead_dim = 64\narch = "sm42"', "variants 1: unknown architecture 'sm42'"),
        ("arch = 90\n[[variants]]\nhead_dim = 64", "arch must be a name"),
        ("[[variants]]\nhead_dim = 64\n[[exclude]]", "exclude 1 is empty"),
        ("[[variants]]\nhead_dim = 64\n[[exclude]]\nhead_dim = 128", "exclude 1 excludes nothing.*head_dim 128"),
        ('[[variants]]\nhead_dim = 64\n[[exclude]]\narch = "sm42"', "exclude 1: unknown architecture"),
    ],
)
def test_bad_files_are_one_clear_error(text: str, message: str, read: Any) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        read(text)
    assert "variants.toml" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, reason in ((tmp_path / "none.toml", "no such file"), (tmp_path, "is a directory")):
        assert main(["build", "--from", str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"fagen: error: {path}: {reason}")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert main(["build", "--from", str(tmp_path / "bytes.toml")]) == 2
    assert "is not TOML" in capsys.readouterr().err


# Shards

WHOLE = """
arch = ["sm80", "sm90a"]
[[variants]]
head_dim = [64, 128, 256]
dtype = ["bf16", "fp16"]
causal = [false, true]
softcap = [false, true]
backward = [false, true]
"""


@pytest.fixture
def whole(read: Any) -> list[KernelPlan]:
    return matrix.kernels(read(WHOLE))


def test_variants_share_kernels_and_each_is_named_once(whole: list[KernelPlan]) -> None:
    assert len(set(whole)) == len(whole)
    deltas = [kernel for kernel in whole if kernel.kind == "bwd_delta"]
    assert len(deltas) == 3 * 2 * 2  # by head dim, type and architecture, whatever else the variant has


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 1000])
def test_shards_are_a_balanced_partition(count: int, whole: list[KernelPlan]) -> None:
    shards = [matrix.shard(whole, index, count) for index in range(1, count + 1)]
    assert Counter(kernel for part in shards for kernel in part) == Counter(whole)
    sizes = [len(part) for part in shards]
    assert max(sizes) - min(sizes) <= 1
    for kind, head_dim in {(kernel.kind, kernel.spec.head_dim) for kernel in whole}:
        shares = [sum((kernel.kind, kernel.spec.head_dim) == (kind, head_dim) for kernel in part) for part in shards]
        assert max(shares) - min(shares) <= 1, f"{kind} of head dim {head_dim}"


def test_shards_follow_from_the_kernels_alone(whole: list[KernelPlan], tmp_path: Path) -> None:
    """Neither their order nor the process decides, so machines that never speak to each other agree."""
    shuffled = random.Random(1).sample(whole, len(whole))
    assert all(matrix.shard(shuffled, index, 5) == matrix.shard(whole, index, 5) for index in range(1, 6))
    program = (
        "import sys, pathlib; from fagen import arch, matrix\n"
        "kernels = matrix.kernels(matrix.read(pathlib.Path(sys.argv[1]), arch.parse_list))\n"
        "print(*(kernel.slug for kernel in matrix.shard(kernels, 2, 5)))\n"
    )
    expected = [kernel.slug for kernel in matrix.shard(whole, 2, 5)]
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": python_path(ROOT), "PATH": ""}
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "variants.toml")],
            capture_output=True, text=True, env=environment, check=True,
        )  # fmt: skip
        assert done.stdout.split() == expected


@pytest.mark.parametrize("text", ["0/4", "5/4", "1/0", "1", "a/b", "-1/4", "1/4/2", "1.5/4", "٣/٤", ""])
def test_bad_shards(text: str) -> None:
    with pytest.raises(SpecError, match="not a part such as 3/16"):
        matrix.parse_shard(text)
    assert matrix.parse_shard(" 3/16 ") == (3, 16)
