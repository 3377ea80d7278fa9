"""What a spec, a path or an environment variable may hold: it reaches no shell and writes nothing outside the cache.
And a cache that another user could have filled is not loaded from."""

from __future__ import annotations

import ast
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fake_toolchain import FakeSpec, Stub, kernels, make_kernel, render, run_as_other
from hypothesis import given
from hypothesis import strategies as st

import fagen
from fagen import build, cache, env, target, toolchain
from fagen.errors import BuildError, CacheError, FagenError, SpecError, ToolchainError
from fagen.spec import AttentionSpec

# `touch` is a program and `>` makes a file: if any of these reaches a shell or a file name, `pwned` appears somewhere.
EVIL = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "' ; touch pwned ; '",
    '" ; touch pwned ; "',
    "&& touch pwned",
    "| touch pwned",
    "> pwned",
    "$out > pwned",
    "${IFS}pwned",
    "\\'$(touch pwned)",
    "-o pwned",
    "--output=pwned",
    "a: b | c",
]
LINES = ["a\n  command = touch pwned\n", "a\r\nbuild pwned: phony", "a\nrule touch\n  command = touch pwned"]
PATHS = ["../pwned", "../../pwned", "/pwned", "a/../../../pwned", "..", ".", "~/pwned", "a\0b/pwned"]


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with a cache in it that is made by the first build."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("FAGEN_COMPILER", "FAGEN_NVCC", "FAGEN_CXX", "CXX", "CUDA_HOME", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("fagen.render.render", render)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "c++", version="c++ (Test) 2", host=True)
    monkeypatch.setenv("FAGEN_CXX", str(stub.path))
    return stub


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    return stub


def everything(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "cache" not in path.relative_to(folder).parts}


# Nothing reaches a shell


def test_programs_are_started_with_lists_and_without_a_shell() -> None:
    """Read from the source: no shell, no string that something else would split, nothing that runs data as code."""
    forbidden = {"system", "popen", "getoutput", "getstatusoutput", "eval", "exec", "execfile"}
    modules = {"pickle", "marshal", "shelve", "yaml", "dill"}
    starters = {"run", "Popen", "call", "check_call", "check_output"}
    for path in Path(fagen.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not names & modules, f"{path}:{node.lineno}"
            if not isinstance(node, ast.Call):
                continue
            where = f"{path}:{node.lineno}"
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            own = path.name == "registry.py" and name == "eval"  # of folders that the user says are to be run
            assert own or not (name in forbidden and owner in ("", "os", "subprocess")), where
            assert not any(keyword.arg == "shell" for keyword in node.keywords), where
            if owner == "subprocess" and name in starters:
                assert not isinstance(node.args[0], ast.Constant | ast.JoinedStr), where


@pytest.mark.parametrize("evil", [*EVIL, *LINES, *PATHS])
def test_slugs_and_specs(evil: str, nvcc: Stub, fresh: Path) -> None:
    """A score modification of somebody else may have any name. What is built, or fails, stays in the cache."""
    before = everything(fresh.parent)
    good = [make_kernel(slug=f"{evil}{index}", spec=FakeSpec(evil)) for index in range(2)]
    artifacts = build.build(good)
    assert all(artifact.directory.parent == fresh / "cache" for artifact in artifacts)
    assert [artifact.slug for artifact in cache.list_artifacts()] == sorted(kernel.slug for kernel in good)
    with pytest.raises(BuildError) as caught:
        build.build([make_kernel(slug=evil, text="BROKEN", spec=FakeSpec(evil))])
    assert caught.value.source is not None and fresh / "cache" / "failed" in caught.value.source.parents
    cache.clean()
    assert everything(fresh.parent) - before <= {nvcc.count_file}


@pytest.mark.parametrize("evil", EVIL)
def test_paths_of_cache_and_compiler(evil: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fresh / "cache" / evil.replace("/", "_")
    stub = Stub(folder / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder / "kernels"))
    before = everything(fresh.parent)
    assert len(build.build(kernels("ab"))) == 2 == stub.compiled
    assert everything(fresh.parent) == before and not any("pwned" in path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("evil", [*EVIL, *LINES])
def test_options_of_the_host_compiler(evil: str, host: Stub, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One argument stays one argument; a line break, which no ninja file can hold, is refused before anything runs."""
    monkeypatch.setenv("FAGEN_CXX", f"{host.path} {json.dumps('-D' + evil) if evil in LINES else _quote('-D' + evil)}")
    before = everything(fresh.parent)
    words = env.cxx()
    assert words is not None
    if len(words[1]) == 2 and "\n" not in words[1][1]:
        assert build.build(kernels("ab"), emulate=True)[0].digest
        assert host.compiled == 2
    monkeypatch.setattr(env, "cxx", lambda: ("FAGEN_CXX", [str(host.path), f"-D{evil}"]))
    if evil in LINES:
        with pytest.raises(ToolchainError, match="a line break in the compiler's command"):
            build.build(kernels("cd"), emulate=True)
    else:
        build.build(kernels("cd"), emulate=True)
    assert everything(fresh.parent) - before <= {host.count_file}


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"


@pytest.mark.parametrize("evil", [*EVIL, "../pwned", "a\nb"])
@pytest.mark.parametrize(
    "variable",
    ["FAGEN_COMPILER", "FAGEN_NVCC", "CUDA_HOME", "FAGEN_ARCH", "TORCH_CUDA_ARCH_LIST", "FAGEN_JIT", "MAX_JOBS", "CXX"],
)
def test_environment_variables(variable: str, evil: str, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is used as what it is, or refused with one error of ours; none is run."""
    monkeypatch.setattr(toolchain, "_TOOLKITS", ())
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: None)
    monkeypatch.setenv(variable, evil)
    before = everything(fresh.parent)
    for work in (
        target.default_archs,
        lambda: build.find_or_build(kernels("a")),
        lambda: build.find_or_build(kernels("a"), emulate=True),
    ):
        try:
            work()
        except FagenError as error:
            assert str(error)
    assert everything(fresh.parent) == before


def test_variables_that_make_a_compiler_do_more(host: Stub, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gcc writes a file where DEPENDENCIES_OUTPUT says, reads headers of CPATH, and neither is in a key."""
    names = ("DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES", "CPATH", "CPLUS_INCLUDE_PATH", "LD_RUN_PATH")
    for name in names:
        monkeypatch.setenv(name, str(fresh / "pwned"))
    seen = fresh / "cache" / "seen"
    text = host.path.read_text()
    host.path.write_text(text.replace("echo compiled", f"env > '{seen}'; echo compiled", 1))
    build.build(kernels("a"), emulate=True)
    assert seen.read_text() and not any(line.startswith(names) for line in seen.read_text().splitlines())


@given(
    field=st.sampled_from([name for name in AttentionSpec.model_fields if name != "custom"]),
    value=st.one_of(st.sampled_from([*EVIL, *LINES, *PATHS]), st.text(), st.binary(), st.lists(st.text())),
)
def test_a_spec_takes_no_text_but_its_types(field: str, value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        AttentionSpec(**{"head_dim": 64, field: value if value not in ("bf16", "fp16") else "f"})
    assert field in str(caught.value)


# Nothing is read from outside the cache


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "notes.txt", ""])
def test_a_manifest_names_files_of_the_artifact_only(name: str, nvcc: Stub) -> None:
    (artifact,) = build.build(kernels("a"))
    manifest = artifact.directory / cache.MANIFEST
    content = json.loads(manifest.read_text())
    (artifact.directory.parent / "outside").write_bytes(artifact.binary.read_bytes())
    for field in ("binary", "source"):
        changed = content | {field: name}
        changed["files"] = content["files"] | {name: content["files"]["kernel.cubin"]}
        del changed["sha256"]
        manifest.write_text(json.dumps(changed | {"sha256": cache._manifest_checksum(changed)}))
        with pytest.raises(cache.CorruptArtifact, match=r"not an artifact's|lacks a file"):
            cache.read(artifact.directory)


# A cache that another user can write


def test_a_directory_above_that_everybody_can_write(host: Stub, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There anybody could put another directory in the cache's place. With the sticky bit nobody can."""
    shared = fresh / "shared"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(shared / "mine" / "cache"))
    build.build(kernels("a"), emulate=True)
    shared.chmod(0o777)
    with pytest.raises(CacheError, match=f"{shared} is writable by everybody.*chmod o-w '{shared}'"):
        build.build(kernels("a"), emulate=True)
    shared.chmod(0o1777)
    assert build.build(kernels("a"), emulate=True)[0].cached
    assert host.compiled == 1


def test_directories_that_are_made_are_not_writable_by_others(
    host: Stub, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(fresh / "a" / "b" / "cache"))
    old = os.umask(0)
    try:
        build.build(kernels("a"), emulate=True)
    finally:
        os.umask(old)
    for path in (fresh / "a", fresh / "a" / "b", fresh / "a" / "b" / "cache", *(fresh / "a" / "b" / "cache").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022, path


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
@pytest.mark.parametrize("planted", ["artifact", "library", "staging"])
def test_what_another_user_put_into_a_shared_directory(planted: str, host: Stub, fresh: Path) -> None:
    """In a directory with the sticky bit each user may add entries: whole and well sealed, yet not ours."""
    (artifact,) = build.build(kernels("a"), emulate=True)
    root = artifact.directory.parent
    root.chmod(0o1777)
    (root / ".tmp").mkdir()
    victim = {"artifact": artifact.directory, "library": artifact.binary, "staging": root / ".tmp"}[planted]
    os.chown(victim, 54321, 54321)
    with pytest.raises(CacheError, match=f"{victim} belongs to user 54321.*FAGEN_CACHE_DIR"):
        build.build(kernels("ab"), emulate=True)
    assert host.compiled == 1


def test_a_shared_cache_whose_locks_are_another_user_s() -> None:
    """What is built there is found; what is not goes to a directory of the user's own, with one warning."""
    with tempfile.TemporaryDirectory(prefix="fagen-test-") as name:
        shared = Path(name) / "cache"
        Path(name).chmod(0o755)
        stub = Stub(Path(name) / "bin" / "nvcc")
        stub.count_file.touch(0o666)
        stub.count_file.chmod(0o666)
        (Path(name) / "tmp").mkdir()
        (Path(name) / "tmp").chmod(0o1777)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FAGEN_CACHE_DIR", str(shared))
            patch.setenv("FAGEN_NVCC", str(stub.path))
            build.build(kernels("a"))
        shared.chmod(0o1777)
        (shared / ".locks").chmod(0o555)
        code = (
            "with warnings.catch_warnings(record=True) as caught:\n"
            "    warnings.simplefilter('always')\n"
            "    made = build.build(fake.kernels('ab'))\n"
            "print(json.dumps([[str(a.directory.parent), a.cached] for a in made] + [str(w.message) for w in caught]))"
        )
        environment = {"FAGEN_CACHE_DIR": str(shared), "FAGEN_NVCC": str(stub.path), "TMPDIR": f"{name}/tmp"}
        done = run_as_other(code, **environment)
        assert done.returncode == 0, done.stderr
        old, new, said = json.loads(done.stdout)
        assert old == [str(shared), True] and new[0].startswith(f"{name}/tmp/") and not new[1]
        assert "is not writable; kernels are built in" in said


def test_a_link_in_the_place_of_an_artifact(nvcc: Stub, fresh: Path) -> None:
    """Cleaning takes neither the link nor what it points to."""
    (artifact,) = build.build(kernels("a"))
    elsewhere = fresh / "elsewhere"
    shutil.move(artifact.directory, elsewhere)
    artifact.directory.symlink_to(elsewhere)
    assert cache.clean() == (0, 0) and (elsewhere / "kernel.cubin").is_file()
