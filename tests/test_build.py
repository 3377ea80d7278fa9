"""The build: what is compiled and what is not, races, interruptions, errors, and the real compilers once each."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_toolchain import (
    PTXAS_LOG,
    FakeSpec,
    Stub,
    elf,
    kernels,
    make_kernel,
    render,
    script,
    script_env,
)

from fagen import build, cache, toolchain
from fagen.arch import resolve
from fagen.cache import Artifact, Resources
from fagen.errors import BuildError, CacheError, SpecError, ToolchainError

KERNEL = """
extern "C" __global__ void __launch_bounds__(64) fagen_fwd(float* x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[63 - threadIdx.x];
}
"""
LIBRARY = 'extern "C" __attribute__((visibility("default"))) int fagen_emulate_launch() { return 7; }'
WEIRD = "a b$HOME:c'é"


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(folder))
    for name in (
        "FAGEN_COMPILER",
        "FAGEN_NVCC",
        "FAGEN_CXX",
        "CXX",
        "CUDA_HOME",
        "MAX_JOBS",
        "FAGEN_JIT",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("fagen.render.render", render)
    return folder


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub(tmp_path / "bin" / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    return stub


@pytest.fixture
def real_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    if toolchain.find_nvrtc() is None:
        pytest.skip("no NVRTC")
    monkeypatch.setenv("FAGEN_COMPILER", "nvrtc")


@pytest.fixture
def real_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "driver_version", lambda: None)
    if toolchain.find_nvcc() is None:
        pytest.skip("no nvcc")
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")


def litter(root: Path) -> set[str]:
    """What lies in the cache besides artifacts and locks."""
    return {path.name for path in root.iterdir() if not re.search(r"-[0-9a-f]{12}$", path.name)} - {".locks"}


def ended(pid: int) -> bool:
    """Whether that process is gone, or only waits for its parent to notice."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


# What is compiled


def test_compiles_once(root: Path, nvcc: Stub) -> None:
    seen: list[Artifact] = []
    first = build.build(kernels("ab"), on_done=seen.append)
    assert [artifact.slug for artifact in first] == ["fwd_a_sm90", "fwd_b_sm90"]
    assert not any(artifact.cached for artifact in first) and nvcc.compiled == 2
    assert sorted(artifact.slug for artifact in seen) == ["fwd_a_sm90", "fwd_b_sm90"]
    assert all(artifact.seconds > 0 for artifact in first)
    seen.clear()
    second = build.build(kernels("ba"), on_done=seen.append)
    assert [artifact.slug for artifact in second] == ["fwd_b_sm90", "fwd_a_sm90"]
    assert all(artifact.cached for artifact in second) and nvcc.compiled == 2
    assert seen == second
    assert litter(root) == set()


def test_duplicates_build_once(nvcc: Stub) -> None:
    seen: list[Artifact] = []
    result = build.build(kernels("aba"), on_done=seen.append)
    assert result[0] == result[2] and len(seen) == 2 and nvcc.compiled == 2


def test_nothing_to_build(nvcc: Stub) -> None:
    assert build.build([]) == []


def test_force_builds_again(root: Path, nvcc: Stub) -> None:
    build.build(kernels("a"))
    (again,) = build.build(kernels("a"), force=True)
    assert not again.cached and nvcc.compiled == 2
    assert litter(root) == set() and len(cache.list_artifacts()) == 1


def test_progress_comes_as_each_kernel_ends(nvcc: Stub) -> None:
    """The fast kernel is reported and published while the slow one still compiles."""
    slow = make_kernel(slug="slow", text="SLOW")
    start = time.monotonic()

    class Enough(Exception):
        pass

    def stop(artifact: Artifact) -> None:
        raise Enough(artifact.slug)

    with pytest.raises(Enough, match="fwd_a_sm90"):
        build.build([slow, *kernels("a")], on_done=stop, jobs=2)
    assert time.monotonic() - start < 10
    assert [artifact.slug for artifact in cache.list_artifacts()] == ["fwd_a_sm90"]


def test_an_error_of_the_caller_is_passed_on(nvcc: Stub) -> None:
    def closed(artifact: Artifact) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        build.build(kernels("a"), on_done=closed)


def test_another_version_builds_again(nvcc: Stub) -> None:
    """B1."""
    (first,) = build.build(kernels("a"))
    newer = Stub(nvcc.path, version="13.0.99")
    (second,) = build.build(kernels("a"))
    assert not second.cached and newer.compiled == 2
    assert first.directory != second.directory and first.directory.is_dir()


def test_another_path_does_not(nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: CUDA_HOME, a link to it, and PATH find the same artifact."""
    monkeypatch.delenv("FAGEN_NVCC")
    monkeypatch.setenv("FAGEN_COMPILER", "nvcc")
    home = tmp_path / "toolkit"
    stub = Stub(home / "bin" / "nvcc")
    (tmp_path / "link").symlink_to(home)
    for value in (home, tmp_path / "link"):
        monkeypatch.setenv("CUDA_HOME", str(value))
        build.build(kernels("a"))
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(home / "bin"), prepend=os.pathsep)
    assert build.build(kernels("a"))[0].cached
    assert stub.compiled == 1


def test_keys_are_the_same_in_any_process(root: Path, nvcc: Stub) -> None:
    """B6: whatever the order of the specs and the seed of Python's hashes."""
    names = set()
    for order, seed in (("ab", "1"), ("ba", "2")):
        body = f"print([a.directory.name for a in build.build(fake.kernels({order!r}))])"
        environment = script_env(FAGEN_CACHE_DIR=str(root), FAGEN_NVCC=str(nvcc.path), PYTHONHASHSEED=seed)
        done = subprocess.run(script(body), env=environment, capture_output=True, text=True, check=True)
        names.add(tuple(sorted(json.loads(done.stdout.replace("'", '"')))))
    assert len(names) == 1 and nvcc.compiled == 2


def test_targets_are_apart(nvcc: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Stub(tmp_path / "bin" / "c++", version="c++ (Test) 2", host=True)
    monkeypatch.setenv("FAGEN_CXX", str(host.path))
    (cubin,) = build.build(kernels("a"))
    (library,) = build.build(kernels("a"), emulate=True)
    assert cubin.directory != library.directory
    assert (cubin.binary.name, cubin.source.name) == ("kernel.cubin", "kernel.cu")
    assert (library.binary.name, library.source.name) == ("kernel.so", "kernel.cpp")
    assert library.resources is None and cubin.resources is not None


# Races and interruptions


def test_eight_cold_processes(root: Path, nvcc: Stub) -> None:
    """B8, B10: 8 processes want the same kernels in different orders: one compilation of each, 8 right answers."""
    names = "abcd"
    environment = script_env(
        FAGEN_CACHE_DIR=str(root),
        FAGEN_NVCC=str(nvcc.path),
        PYTHONDONTWRITEBYTECODE="1",
    )
    processes = []
    for index in range(8):
        order = names[index % 4 :] + names[: index % 4]
        body = f"result = build.build(fake.kernels({order!r}), jobs=2)\nfor a in result: cache.read(a.directory)\n"
        body += "print(sorted(a.directory.name for a in result))"
        processes.append(
            subprocess.Popen(
                script(body),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    assert len({out for out, _ in answers}) == 1
    assert nvcc.compiled == len(names)
    assert litter(root) == set()


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_build_leaves_the_cache_sound(stop: signal.Signals, root: Path, nvcc: Stub) -> None:
    """Ctrl-C ends the compilers, publishes nothing and leaves no files; a killed process's are swept later."""
    body = "build.build([fake.make_kernel(slug='slow', text='SLOW'), *fake.kernels('a')], jobs=2)"
    environment = script_env(FAGEN_CACHE_DIR=str(root), FAGEN_NVCC=str(nvcc.path))
    process = subprocess.Popen(
        script(body),
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not (nvcc.pid_file.exists() and nvcc.pid_file.read_text().strip()) or not cache.list_artifacts():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    compiler = int(nvcc.pid_file.read_text())
    process.send_signal(stop)
    _, said = process.communicate(timeout=20)
    assert process.returncode != 0
    if stop == signal.SIGINT:
        assert "KeyboardInterrupt" in said
        assert ended(compiler)
        assert litter(root) == set()
    else:
        os.kill(compiler, signal.SIGTERM)
    assert [artifact.slug for artifact in cache.list_artifacts()] == ["fwd_a_sm90"]
    (artifact,) = build.build([make_kernel(slug="slow", text="fast now")])
    assert not artifact.cached


# Errors


def test_broken_kernel(root: Path, nvcc: Stub) -> None:
    """The others are built; the error has command, first errors and the kept source; nothing broken is published."""
    broken = make_kernel(slug="fwd_broken_sm90", text="BROKEN")
    with pytest.raises(BuildError) as caught:
        build.build([broken, *kernels("a")])
    error = caught.value
    assert "fwd_broken_sm90 does not compile" in str(error) and "error: expected a ;" in str(error)
    assert error.source is not None and error.source.read_text() == render(broken, "cuda")
    assert str(error.source) in error.command and str(error.source) in str(error)
    assert "expected a ;" in (error.source.parent / "build.log").read_text()
    assert [artifact.slug for artifact in cache.list_artifacts()] == ["fwd_a_sm90"]
    assert litter(root) == {"failed"}
    with pytest.raises(BuildError):
        build.build([broken])
    assert cache.clean()[0] == 2 and litter(root) == set()


def test_several_broken_kernels(nvcc: Stub) -> None:
    broken = [make_kernel(slug=f"broken_{name}", text=f"BROKEN {name}") for name in "xyz"]
    with pytest.raises(BuildError, match="3 of 4 kernels failed"):
        build.build([*broken, *kernels("a")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EMPTY", "reported success and wrote no kernel.cubin"),
        ("ALIEN", "kernel.cubin is not an ELF file"),
        ("NAMELESS", "kernel.cubin has no function fagen_fwd"),
    ],
)
def test_output_that_is_not_the_kernel(text: str, message: str, root: Path, nvcc: Stub) -> None:
    with pytest.raises(BuildError, match=message):
        build.build([make_kernel(text=text)])
    assert cache.list_artifacts() == []


def test_truncated_elf() -> None:
    whole = elf("fagen_fwd")
    assert build._elf_symbols(whole, 2) == {"fagen_fwd"}
    assert build._elf_symbols(whole, 11) == set()
    for size in (8, 70, len(whole) - 70):
        with pytest.raises((struct.error, IndexError, ValueError)):
            build._elf_symbols(whole[:size], 2)


def test_disk_full(root: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B8: a clear error, and nothing published, whether the compiler or this process hits the limit."""

    def full(*_arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "seal", full)
        with pytest.raises(CacheError, match=r"no space left in .*FAGEN_CACHE_DIR"):
            build.build(kernels("a"))
    assert cache.list_artifacts() == [] and litter(root) == set()
    nvcc.path.write_text(nvcc.path.read_text().replace("echo compiled", "echo 'No space left on device'; exit 1; echo"))
    with pytest.raises(CacheError, match=r"no space left"):
        build.build(kernels("a"))
    assert cache.list_artifacts() == [] and litter(root) == set()


def test_unsupported_architecture_compiles_nothing(nvcc: Stub) -> None:
    """B13: all architectures are checked before any compiler starts."""
    with pytest.raises(ToolchainError, match="does not compile for sm120"):
        build.build([*kernels("a"), make_kernel(slug="b", arch=resolve("sm120"))])
    assert nvcc.compiled == 0


def test_without_just_in_time_compilation(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B15: the error names the variant and the command that builds it."""
    monkeypatch.setenv("FAGEN_JIT", "0")
    kernel = make_kernel(slug="fwd_a_sm90", spec=FakeSpec("a b"))
    with pytest.raises(
        CacheError,
        match=r"fwd_a_sm90 is not built .*`fagen build --name 'a b' --arch sm90`",
    ):
        build.find_or_build([kernel])
    assert nvcc.compiled == 0
    build.build([kernel])
    assert build.find_or_build([kernel])[0].cached
    monkeypatch.setenv("FAGEN_JIT", "1")
    assert not build.find_or_build(kernels("b"))[0].cached


def test_changed_source_is_built(nvcc: Stub) -> None:
    """B15: a template that changes under a running process gives a new kernel."""
    (old,) = build.find_or_build([make_kernel(text="one")])
    (new,) = build.find_or_build([make_kernel(text="two")])
    assert not new.cached and new.digest != old.digest


def test_a_machine_without_a_compiler_uses_what_is_there(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    build.build(kernels("a"))

    def none() -> None:
        raise ToolchainError("no CUDA compiler was found")

    monkeypatch.setattr(toolchain, "find_cuda_compiler", none)
    assert build.find_or_build(kernels("a"))[0].slug == "fwd_a_sm90"
    with pytest.raises(ToolchainError):
        build.find_or_build(kernels("ab"))


# Jobs, paths, ptxas


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: bounded by cores, by memory and by MAX_JOBS."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(96)), raising=False)
    monkeypatch.setattr(build, "_available_memory", lambda: 32 * 2**30)
    assert build.job_limit() == 96
    monkeypatch.setattr(build, "_available_memory", lambda: 6 * 2**30)
    assert build.job_limit() == 20
    assert build.job_limit(4) == 4
    assert build.job_limit(50) == 20
    monkeypatch.setenv("MAX_JOBS", "2")
    assert build.job_limit() == build.job_limit(4) == 2
    monkeypatch.setattr(build, "_available_memory", lambda: 1000)
    assert build.job_limit() == 1
    monkeypatch.setattr(build, "_available_memory", lambda: None)
    monkeypatch.delenv("MAX_JOBS")
    assert build.job_limit() == 96


@pytest.mark.parametrize("value", ["0", "abc"])
def test_bad_max_jobs(value: str, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(SpecError, match=f"MAX_JOBS='{value}'"):
        build.build(kernels("a"))
    assert nvcc.compiled == 0


def test_ninja_without_path(nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B16: ninja lies beside the running Python, and PATH lacks that directory."""
    if not (Path(sys.executable).parent / "ninja").exists():
        pytest.skip("no ninja beside this Python")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert not build.build(kernels("a"))[0].cached


def test_strange_path(tmp_path: Path, nvcc: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12, with the compiler in such a place as well, and a slug longer than a file name."""
    stub = Stub(tmp_path / WEIRD / "nvcc")
    monkeypatch.setenv("FAGEN_NVCC", str(stub.path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / WEIRD / "cache"))
    long = [make_kernel(slug="fwd" + "_feature" * 40 + name) for name in "ab"]
    artifacts = build.build([*kernels("ab"), *long])
    assert len({artifact.directory for artifact in artifacts}) == 4 == stub.compiled
    assert all(len(part.encode()) <= 255 for artifact in artifacts for part in artifact.binary.parts)
    assert [artifact.slug for artifact in build.build(long)] == [kernel.slug for kernel in long]


def test_ptxas_report() -> None:
    expected = Resources(registers=42, spill_stores=8, spill_loads=4, stack=16, smem=256)
    assert build.parse_resources(PTXAS_LOG, "fagen_fwd") == expected
    nvrtc = PTXAS_LOG.replace("    16 bytes stack", "ptxas         .     16 bytes stack").replace(
        ", 256 bytes smem", ""
    )
    assert build.parse_resources(nvrtc, "fagen_fwd") == Resources(42, 8, 4, 16, 0)
    assert build.parse_resources(PTXAS_LOG, "other") is None
    assert build.parse_resources("", "fagen_fwd") is None
    other = PTXAS_LOG.replace("fagen_fwd", "helper").replace("42", "99")
    assert build.parse_resources(other + PTXAS_LOG, "fagen_fwd") == expected
    assert build.parse_resources(PTXAS_LOG + other, "fagen_fwd") == expected


# The real compilers


def real(name: str = "", text: str = KERNEL, arch: str = "sm90") -> Any:
    return make_kernel(slug=f"fwd_real{name}", text=text, arch=resolve(arch))


def test_real_nvrtc(real_nvrtc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel in process, then two through ninja under a strange path: the same binary and the same report."""
    (alone,) = build.build([real()])
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / WEIRD))
    together = build.build([real(), real("2")])
    assert alone.digest == together[0].digest
    assert alone.binary.read_bytes() == together[0].binary.read_bytes()
    assert alone.resources == together[0].resources
    assert alone.resources is not None and alone.resources.registers > 0 and alone.resources.smem >= 256


def test_real_nvcc_under_a_strange_path(real_nvcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / WEIRD))
    (artifact,) = build.build([real()])
    assert artifact.resources is not None
    assert artifact.resources.registers > 0 and artifact.resources.smem >= 256
    assert "-arch=sm_90" in artifact.log


def test_real_ptx(real_nvrtc: None) -> None:
    (artifact,) = build.build([real(arch="9.0+PTX")])
    assert artifact.binary.name == "kernel.ptx" and artifact.resources is None
    assert ".entry fagen_fwd" in artifact.binary.read_text()


def test_real_nvrtc_error(real_nvrtc: None) -> None:
    broken = KERNEL.replace("63 - ", "y - ")
    for names in ([""], ["", "2"]):
        with pytest.raises(BuildError, match=r'kernel\.cu\(\d+\): error: identifier "y" is undefined') as caught:
            build.build([real(name, broken) for name in names])
        assert caught.value.source is not None
        again = subprocess.run(
            caught.value.command,
            capture_output=True,
            text=True,
            cwd=caught.value.source.parent,
            check=False,
        )
        assert again.returncode == 1 and 'identifier "y" is undefined' in again.stdout


def test_real_host_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    try:
        toolchain.find_host_compiler()
    except ToolchainError:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / WEIRD))
    (artifact,) = build.build([real(text=LIBRARY)], emulate=True)
    assert ctypes.CDLL(str(artifact.binary)).fagen_emulate_launch() == 7
    hidden = LIBRARY.replace("default", "hidden")
    with pytest.raises(BuildError, match=r"kernel\.so has no function fagen_emulate_launch"):
        build.build([real(text=hidden)], emulate=True)
