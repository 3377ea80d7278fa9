"""What is shipped: a wheel that works away from the checkout, a complete source archive, and declared dependencies."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import CALLERS

import fagen

ROOT = Path(__file__).resolve().parent.parent

# Modules whose distribution has another name.
DISTRIBUTIONS = {"cuda": "cuda-bindings", "tomllib": "tomli"}

USE = """
import sys
from pathlib import Path

import torch

import fagen
from fagen.render import template_dir

home = Path(sys.prefix).resolve()
assert home in Path(fagen.__file__).resolve().parents and home in template_dir().parents
attn = fagen.load(fagen.AttentionSpec(head_dim=64, causal=True), arch="sm80", emulate=True)
q, k, v = torch.randn(3, 1, 70, 2, 64).bfloat16()
heads_first = [x.float().transpose(1, 2) for x in (q, k, v)]
expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
torch.testing.assert_close(attn(q, k, v).float(), expected, rtol=2e-2, atol=2e-2)
print(attn.artifact("cpu").directory)
"""


def run(command: Sequence[str | Path], **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT])
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def test_the_source_archive_is_complete(archives: tuple[Path, Path]) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = run(["git", "ls-files"], cwd=ROOT).splitlines()
    with tarfile.open(archives[0]) as archive:
        packed = {name.split("/", 1)[1] for name in archive.getnames()}
    assert set(tracked) - packed == set()
    assert not [name for name in packed if name.startswith(("generated/", ".venv/")) and name != "generated/README.md"]


def test_the_wheel_holds_the_package_and_the_templates(archives: tuple[Path, Path]) -> None:
    wheel = archives[1]
    assert wheel.name == f"fagen-{fagen.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.startswith("fagen/")}
        metadata = archive.read(f"fagen-{fagen.__version__}.dist-info/METADATA").decode()
    files = {path for path in (ROOT / "fagen").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    files |= {path for path in (ROOT / "templates").rglob("*") if path.is_file()}
    expected = {}
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        expected[f"fagen/{name}" if name.startswith("templates/") else name] = path.read_bytes()
    assert packed == expected
    assert "fagen/py.typed" in packed and "fagen/templates/sm80/fwd.cu.j2" in packed
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: >=3.10" in metadata
    assert "# fagen" in metadata


def test_the_wheel_works_away_from_the_checkout(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """In an empty environment elsewhere, that borrows its dependencies from this one, from the user's own cache."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", archives[1]])
    (site,) = (home / "lib").glob("python*/site-packages")
    callers = [str(path) for path in CALLERS if path != ROOT]
    (site / "dependencies.pth").write_text("\n".join([sysconfig.get_paths()["purelib"], *callers]))

    hidden = {"PYTHONPATH", "FAGEN_CACHE_DIR", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "caches")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    flags = ["--head-dim", "64", "--causal", "--arch", "sm80", "--emulate"]
    built = run([home / "bin" / "fagen", "build", *flags], cwd=elsewhere, env=environment)
    assert "fwd_hdim64_bf16_causal" in built
    directory = Path(run([python, "-c", USE], cwd=elsewhere, env=environment).strip())
    assert (tmp_path / "caches") in directory.parents
    assert len(list(directory.parent.glob("fwd_*"))) == 1, "load built again what the command had built"
    assert run([home / "bin" / "fagen", "--version"], env=environment).split() == ["fagen", fagen.__version__]
    assert list(elsewhere.iterdir()) == []


def declared(section: str) -> set[str]:
    """Names of the distributions in one list of pyproject.toml."""
    match = re.search(rf"^{section} = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert match is not None
    return set(re.findall(r'^\s*"([A-Za-z0-9-]+)', match[1], re.M))


def test_every_import_is_a_declared_dependency() -> None:
    imported = set()
    for path in (ROOT / "fagen").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                imported.add(node.module.split(".")[0])
    others = {DISTRIBUTIONS.get(name, name) for name in imported - sys.stdlib_module_names - {"fagen"}}
    optional = {"cuda-bindings", "matplotlib", "transformers", "watchfiles"}
    assert others - optional == declared("dependencies") - {"ninja"}  # ninja is run, not imported
    assert "cuda-bindings" in declared("cuda") and "transformers" in declared("transformers")


def test_every_dependency_has_its_version_for_development() -> None:
    pins = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert declared("dependencies") | declared("cuda") | declared("dev") <= pins


def test_every_public_name_is_there() -> None:
    assert sorted(fagen.__all__) == dir(fagen)
    for name in fagen.__all__:
        assert getattr(fagen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        fagen.flash  # noqa: B018
