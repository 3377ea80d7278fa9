"""Finding compilers and ninja: order, identity, what each supports, and the errors where there is none."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from fake_toolchain import Stub

from fagen import toolchain
from fagen.arch import Arch, resolve
from fagen.errors import ToolchainError
from fagen.nvrtc import Nvrtc

SM90 = resolve("sm90")
NVRTC = toolchain.find_nvrtc()
needs_nvrtc = pytest.mark.skipif(NVRTC is None, reason="no NVRTC")
VARIABLES = ("FAGEN_COMPILER", "FAGEN_NVCC", "FAGEN_CXX", "CXX", "CUDA_HOME", "CONDA_PREFIX")


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no compiler at all; the returned directory is its PATH."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(toolchain, "_TOOLKITS", ())
    monkeypatch.setattr(toolchain, "_NVRTC_SONAMES", ())
    return folder


def test_nothing_found(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ToolchainError, match=r"pip install 'fagen\[cuda\]'"):
        toolchain.find_cuda_compiler()
    with pytest.raises(ToolchainError, match=r"install g\+\+"):
        toolchain.find_host_compiler()
    monkeypatch.setenv("FAGEN_COMPILER", "nvrtc")
    with pytest.raises(ToolchainError, match="FAGEN_COMPILER=nvrtc"):
        toolchain.find_cuda_compiler()
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    with pytest.raises(ToolchainError, match="CUDA_HOME or FAGEN_NVCC"):
        toolchain.find_cuda_compiler()


def test_nvcc_is_found_in_order(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Stub(tmp_path / "site-packages" / "nvidia" / "cu13" / "bin" / "nvcc", version="13.0.4")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])
    compiler = toolchain.find_cuda_compiler()
    assert (compiler.name, compiler.version) == ("nvcc", "13.0.4")
    assert str(package.path) == compiler.command(SM90, "a.cu", "a.cubin")[0]
    Stub(bare / "nvcc", version="13.0.3")
    assert toolchain.find_cuda_compiler().version == "13.0.3"
    Stub(tmp_path / "home" / "bin" / "nvcc", version="13.0.2")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolchain.find_cuda_compiler().version == "13.0.2"
    Stub(tmp_path / "asked", version="13.0.1")
    monkeypatch.setenv("FAGEN_NVCC", str(tmp_path / "asked"))
    assert toolchain.find_cuda_compiler().version == "13.0.1"
    monkeypatch.setenv("FAGEN_NVCC", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match=r"FAGEN_NVCC=.*nowhere"):
        toolchain.find_cuda_compiler()


def test_identity_of_nvcc_is_its_version(tmp_path: Path) -> None:
    """B1, B2: neither path nor time, but the resolved version."""
    identities = {}
    for name, version in (("one", "13.0.88"), ("two", "13.0.88"), ("three", "13.0.89")):
        identities[name] = toolchain._nvcc_at(Stub(tmp_path / name, version=version).path, "test").identity
    assert identities["one"] == identities["two"] != identities["three"]
    assert str(tmp_path) not in identities["one"]


def test_a_replaced_nvcc_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "nvcc"
    assert toolchain._nvcc_at(Stub(path, version="13.0.88").path, "test").version == "13.0.88"
    os.utime(path, (1, 1))
    assert toolchain._nvcc_at(Stub(path, version="13.1.2").path, "test").version == "13.1.2"


def test_nvcc_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc 11\.8\.89 .*too old: CUDA 12\.0"):
        toolchain._nvcc_at(Stub(tmp_path / "old", version="11.8.89").path, "test")
    for name, body in (("talks", "echo hello"), ("fails", "echo no licence >&2; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ToolchainError, match="does not answer like nvcc: 'hello'"):
        toolchain._nvcc_at(tmp_path / "talks", "FAGEN_NVCC")
    with pytest.raises(ToolchainError, match="status 3: no licence"):
        toolchain._nvcc_at(tmp_path / "fails", "FAGEN_NVCC")


def test_nvcc_flags() -> None:
    compiler = toolchain.NvccCompiler(Path("nvcc"), "13.0.88", "")
    flags = compiler.flags(SM90)
    assert "-arch=sm_90" in flags and "-cubin" in flags and "-std=c++17" in flags
    assert not any("fast" in flag for flag in flags)
    ptx = compiler.flags(resolve("9.0+PTX"))
    assert "-arch=compute_90" in ptx and "-ptx" in ptx and "-cubin" not in ptx


def test_support_is_checked_before_compiling(tmp_path: Path) -> None:
    """B13: the toolkit's own list decides, and the error names both sides."""
    compiler = toolchain._nvcc_at(Stub(tmp_path / "nvcc", arches="75 80 90").path, "test")
    compiler.check(SM90)
    with pytest.raises(
        ToolchainError, match=r"nvcc 13\.0\.88 does not compile for sm100; it knows sm_75, sm_80, sm_90"
    ):
        compiler.check(resolve("sm100"))
    with pytest.raises(ToolchainError, match="an older CUDA toolkit"):
        compiler.check(Arch(name="sm70", sm="sm_70", family="sm80", smem_limit=0))


@pytest.mark.parametrize(
    ("driver", "arch", "fails"),
    [
        ((12, 8), "sm90", True),
        ((13, 0), "sm90", False),
        ((14, 0), "sm90", False),
        ((13, 0), "9.0+PTX", True),
        ((13, 1), "9.0+PTX", False),
    ],
)
def test_driver_is_checked_before_compiling(
    driver: tuple[int, int], arch: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = toolchain._nvcc_at(Stub(tmp_path / "nvcc", version="13.1.5").path, "test")
    monkeypatch.setattr(toolchain, "driver_version", lambda: driver)
    if not fails:
        compiler.check(resolve(arch))
        return
    with pytest.raises(ToolchainError, match=rf"driver supports CUDA {driver[0]}\.{driver[1]} .*update the driver"):
        compiler.check(resolve(arch))


def test_host_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Stub(bare / "clang++", version="clang 1", host=True)
    assert toolchain.find_host_compiler().version == "clang 1"
    Stub(bare / "c++", version="c++ (Test) 2", host=True)
    compiler = toolchain.find_host_compiler()
    assert compiler.identity == "g++ (Test) 2 test-machine"
    assert "-ffp-contract=off" in compiler.flags(SM90)
    monkeypatch.setenv("CXX", "clang++ --driver-mode=g++")
    assert toolchain.find_host_compiler().identity.endswith("--driver-mode=g++")
    monkeypatch.setenv("FAGEN_CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="FAGEN_CXX='no-such-compiler'"):
        toolchain.find_host_compiler()


def test_identity_of_the_host_compiler_is_no_name_or_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2 for the CPU: gcc says first how it was called, a launcher stands before it, and options stay apart."""
    launcher = tmp_path / "ccache"
    launcher.write_text('#!/bin/sh\nexec "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    identities = set()
    for name in ("c++", "g++", "g++-12", "x86_64-linux-gnu-g++", "x86_64-linux-gnu-g++-12"):
        path = Stub(tmp_path / name, version=f"{name} (Test 1-2) 3.4", host=True).path
        for text in (name, str(path), f"ccache {name}", f"ccache '{path}'", f"'{launcher}' {name}"):
            monkeypatch.setenv("FAGEN_CXX", text)
            identities.add(toolchain.find_host_compiler().identity)
    assert identities == {"g++ (Test 1-2) 3.4 test-machine"}
    for options in ("-O1", "-DA -DB", "'-DA -DB'", "-DA", "-include ccache", "-include g++"):
        monkeypatch.setenv("FAGEN_CXX", f"g++ {options}")
        identities.add(toolchain.find_host_compiler().identity)
    for version in ("g++ (Test 1-2) 3.5", "gcc (Test 1-2) 3.4", "Test clang version 3.4"):
        Stub(tmp_path / "g++", version=version, host=True)
        monkeypatch.setenv("FAGEN_CXX", "g++")
        identities.add(toolchain.find_host_compiler().identity)
    assert len(identities) == 10


def test_real_host_compiler() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no c++")
    assert re.search(r"\d+\.\d+\.\d+", toolchain.find_host_compiler().identity)


def test_ninja_beside_python(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: the environment that runs Python need not be on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    with pytest.raises(ToolchainError, match="pip install ninja"):
        toolchain.find_ninja()
    Stub(bare / "ninja")
    assert toolchain.find_ninja() == bare / "ninja"
    packages = tmp_path / "env" / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(packages)])
    inside = Stub(tmp_path / "env" / "bin" / "ninja").path
    assert toolchain.find_ninja() == inside
    beside = Stub(tmp_path / "venv" / "bin" / "ninja").path
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    assert toolchain.find_ninja() == beside


@needs_nvrtc
def test_nvrtc_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVRTC is not None
    assert toolchain.find_cuda_compiler() == NVRTC
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    Stub(tmp_path / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert toolchain.find_cuda_compiler().name == "nvcc"
    monkeypatch.delenv("FAGEN_COMPILER")
    monkeypatch.setenv("FAGEN_NVCC", "nvcc")
    assert toolchain.find_cuda_compiler().name == "nvcc"
    monkeypatch.setenv("FAGEN_COMPILER", "nvrtc")
    assert toolchain.find_cuda_compiler() == NVRTC


@needs_nvrtc
def test_identity_of_nvrtc_is_what_it_writes_into_ptx() -> None:
    """The version is taken from a file's name; the compiler itself must say the same."""
    assert NVRTC is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+", NVRTC.version)
    ptx, _ = Nvrtc(str(NVRTC.library)).compile(b"", "empty.cu", ["--gpu-architecture=compute_90"], ptx=True)
    assert f"V{NVRTC.version}" in ptx.decode()


@needs_nvrtc
def test_identity_of_nvrtc_behind_a_link(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2 for NVRTC: a toolkit that is a link to the same library gives the same identity."""
    assert NVRTC is not None
    library = tmp_path / "toolkit" / "lib64" / NVRTC.library.name
    library.parent.mkdir(parents=True)
    library.symlink_to(NVRTC.library)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    found = toolchain.find_nvrtc()
    assert found is not None and found.library == library
    assert found.identity == NVRTC.identity


@needs_nvrtc
def test_nvrtc_that_the_driver_takes_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_nvrtc_libraries", lambda: iter([Path("new"), Path("same"), Path("old")]))
    versions = {"new": "13.0.88", "same": "13.0.88", "old": "12.8.93"}
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda path: versions[path.name])
    for driver, expected in ((None, "new"), ((13, 0), "new"), ((12, 8), "old"), ((11, 8), "new")):
        monkeypatch.setattr(toolchain, "driver_version", lambda driver=driver: driver)
        found = toolchain.find_nvrtc()
        assert found is not None and found.library == Path(expected)


def test_files_that_are_not_nvrtc_are_passed_over(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "toolkit" / "lib64" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.write_text("not a library")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert toolchain.find_nvrtc() is None


@needs_nvrtc
def test_nvrtc_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NVRTC is not None
    NVRTC.check(SM90)
    NVRTC.check(resolve("9.0+PTX"))
    with pytest.raises(ToolchainError, match=r"NVRTC .* does not compile for sm52"):
        NVRTC.check(Arch(name="sm52", sm="sm_52", family="sm80", smem_limit=0))
