"""FAGEN_LAUNCHER: nvcc runs through it, its results count as nvcc's own; NVRTC and a launcher exclude each other."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from fake_toolchain import Stub, kernels, make_kernel, render

from fagen import build, cache, env, toolchain
from fagen.arch import resolve
from fagen.errors import BuildError, ToolchainError

# Notes where each call runs and where temporary files would go, and runs it; what it compiled once, it copies.
_LAUNCHER = """\
#!/bin/sh
echo "$TMPDIR" >> {folder}/calls
/bin/pwd -P >> {folder}/places
for word; do last=$word; done
key=$(cksum < "$last" | tr ' ' -)
while [ $# -gt 1 ] && [ "$1" = --quiet ]; do shift; done
if [ -e {folder}/"$key" ]; then cp {folder}/"$key" kernel.cubin; cat {folder}/"$key".log; exit 0; fi
"$@" > {folder}/"$key".log 2>&1; code=$?
cat {folder}/"$key".log
[ $code = 0 ] && cp kernel.cubin {folder}/"$key"
exit $code
"""


@pytest.fixture(autouse=True)
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """nvcc on PATH, where NVRTC would be taken without a launcher."""
    for name in ("FAGEN_COMPILER", "FAGEN_NVCC", "CUDA_HOME", "FAGEN_LAUNCHER", "FAGEN_BUNDLES", "FAGEN_JIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("fagen.render.render", render)
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("PATH", f"{stub.path.parent}:/usr/bin:/bin")
    return stub


@pytest.fixture
def launcher(tmp_path: Path) -> Path:
    path = tmp_path / "a launcher"
    path.mkdir()
    (path / "share").write_text(_LAUNCHER.format(folder=shlex.quote(str(path))))
    (path / "share").chmod(0o755)
    return path / "share"


def calls(launcher: Path) -> list[str]:
    file = launcher.with_name("calls")
    return file.read_text().splitlines() if file.exists() else []


def test_nvcc_runs_through_the_launcher(launcher: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_LAUNCHER", f"{shlex.quote(str(launcher))} --quiet")
    artifacts = build.build(kernels("ab"))
    assert len(calls(launcher)) == 2 == nvcc.compiled
    command = toolchain.find_cuda_compiler().command(resolve("sm90"), "kernel.cu", "kernel.cubin")
    assert command[:3] == [str(launcher), "--quiet", str(nvcc.path)]
    assert all(shlex.join(command) in artifact.log for artifact in artifacts)


def test_another_machine_takes_what_the_launcher_kept(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of ptxas, which the artifact needs, is part of what a launcher gives back."""
    monkeypatch.setenv("FAGEN_LAUNCHER", str(launcher).replace(" ", "\\ "))
    (first,) = build.build(kernels("a"))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "other"))
    (second,) = build.build(kernels("a"))
    assert nvcc.compiled == 1 and len(calls(launcher)) == 2
    assert second.digest == first.digest and second.resources == first.resources is not None
    assert second.binary.read_bytes() == first.binary.read_bytes()


def test_a_launcher_is_in_no_key(launcher: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    (without,) = build.build(kernels("a"))
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    (artifact,) = build.build(kernels("a"))
    assert artifact.cached and artifact.digest == without.digest and calls(launcher) == []


def test_its_server_keeps_the_user_s_temporary_directory(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edge's own folder, which nvcc alone gets, is gone when the edge ends; a server that it started is not."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    build.build(kernels("a"))
    assert calls(launcher) == [str(tmp_path)]


def test_the_same_kernel_is_compiled_at_the_same_path(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a launcher for which the path counts, as for sccache, finds nothing again. No two kernels share a path."""
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    for names in ("ab", "cba"):
        build.build(kernels(names), force=True)
    places = launcher.with_name("places").read_text().splitlines()
    assert len(places) == 5 and len(set(places)) == 3
    assert all(Path(place).parent == tmp_path / "cache" / ".launch" for place in places)
    assert list((tmp_path / "cache" / ".launch").iterdir()) == [], "and leaves nothing there"
    assert len(cache.list_artifacts()) == 3 and all(build.build(kernels("abc"), force=False))


def test_what_a_killed_build_left_goes_unless_another_is_at_it(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    (artifact,) = build.build(kernels("a"))
    folders = tmp_path / "cache" / ".launch"
    for name in (artifact.directory.name, "fwd_old-0123456789ab", "fwd_busy-0123456789ab"):
        (folders / name).mkdir()
        (folders / name / "kernel.cubin").write_text("half of it")
    with cache.lock(tmp_path / "cache", "fwd_busy-0123456789ab"):
        (again,) = build.build(kernels("a"), force=True)
    assert [path.name for path in folders.iterdir()] == ["fwd_busy-0123456789ab"]
    assert again.binary.read_bytes() == cache.read(again.directory).binary.read_bytes() != b"half of it"


def test_a_failure_behind_a_launcher_is_nvcc_s(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    with pytest.raises(BuildError, match=r"error: expected a ;") as caught:
        build.build([make_kernel(text="BROKEN")])
    assert cache.list_artifacts() == []
    kept = caught.value.source
    assert kept is not None and "BROKEN" in kept.read_text() and not kept.parent.is_symlink()
    assert list((tmp_path / "cache" / ".launch").iterdir()) == []


def test_it_chooses_nvcc_and_excludes_nvrtc(
    launcher: Path, nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "find_nvrtc", lambda: toolchain.NvrtcCompiler(Path("libnvrtc.so.13"), "13.0.88"))
    assert toolchain.find_cuda_compiler().name == "nvrtc"
    monkeypatch.setenv("FAGEN_LAUNCHER", shlex.quote(str(launcher)))
    assert toolchain.find_cuda_compiler().name == "nvcc"
    monkeypatch.setenv("FAGEN_COMPILER", "nvrtc")
    with pytest.raises(ToolchainError, match="unset FAGEN_LAUNCHER, or set FAGEN_COMPILER=nvcc"):
        toolchain.find_cuda_compiler()
    monkeypatch.delenv("FAGEN_COMPILER")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    with pytest.raises(ToolchainError, match="no nvcc was found, which FAGEN_LAUNCHER needs"):
        toolchain.find_cuda_compiler()


@pytest.mark.parametrize("value", ["/nowhere/sccache", "no-such-launcher", "'unfinished", "sccache; true"])
def test_bad_launchers(value: str, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell reads it: what a shell would run is a name that does not exist."""
    monkeypatch.setenv("FAGEN_LAUNCHER", value)
    with pytest.raises(ToolchainError, match=r"FAGEN_LAUNCHER=.*is not (an executable|a command)"):
        build.build(kernels("a"))
    assert nvcc.compiled == 0


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.launcher() == []
    monkeypatch.setenv("FAGEN_LAUNCHER", "  ")
    assert env.launcher() == []
    monkeypatch.setenv("FAGEN_LAUNCHER", "ccache --opt 'a b'")
    assert env.launcher() == ["ccache", "--opt", "a b"]
