"""The doctor: what it says of machines that have, and lack, what fagen uses."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from fagen import bundle, doctor, toolchain
from fagen.arch import Arch
from fagen.cli import main
from fagen.doctor import Diagnosis, Finding, Gpu, diagnose
from fagen.errors import CacheError, FagenError, ToolchainError

NVRTC = toolchain.NvrtcCompiler(Path("/opt/libnvrtc.so.13"), "13.0.88")
NVCC = toolchain.NvccCompiler(Path("/opt/cuda/bin/nvcc"), "13.0.88", "")
HOST = toolchain.HostCompiler(("g++",), "g++ 12.2.0", "x86_64-linux-gnu")
H200 = Gpu("NVIDIA H200", (9, 0))


class Machine:
    """A machine to diagnose: everything is there until it is taken away."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._patch = patch
        self.packages = {"torch": "2.13.0", "cuda-bindings": "13.0.3"}
        ninja = root / "ninja"
        ninja.write_text("#!/bin/sh\necho 1.13.0\n")
        ninja.chmod(0o755)
        for name in ("FAGEN_COMPILER", "FAGEN_NVCC", "CUDA_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("FAGEN_CACHE_DIR", str(root / "cache"))
        patch.setattr(metadata, "version", self._version)
        self.have(nvrtc=NVRTC, nvcc=NVCC, host_compiler=HOST, ninja=ninja)
        patch.setattr(doctor, "gpus", lambda: [H200])
        patch.setattr(doctor, "driver_version", lambda: (13, 0))
        patch.setattr(toolchain.NvrtcCompiler, "check", lambda self, arch: None)
        patch.setattr(toolchain.NvccCompiler, "check", lambda self, arch: None)

    def have(self, **found: object) -> None:
        """What each search of the toolchain finds: a thing, None, or an error to raise."""
        for name, thing in found.items():

            def find(thing: object = thing) -> object:
                if isinstance(thing, FagenError):
                    raise thing
                return thing

            self._patch.setattr(toolchain, f"find_{name}", find)

    def lack_gpu(self) -> None:
        self._patch.setattr(doctor, "gpus", list)
        self._patch.setattr(doctor, "driver_version", lambda: None)

    def _version(self, package: str) -> str:
        if package not in self.packages:
            raise metadata.PackageNotFoundError(package)
        return self.packages[package]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def finding(diagnosis: Diagnosis, name: str) -> Finding:
    (found,) = [finding for finding in diagnosis.findings if finding.name == name]
    return found


def test_a_whole_machine(machine: Machine) -> None:
    diagnosis = diagnose()
    assert all(finding.ok and not finding.advice for finding in diagnosis.findings)
    assert diagnosis.ok and diagnosis.runs_cuda and diagnosis.runs_cpu
    assert finding(diagnosis, "GPU").found.startswith("NVIDIA H200 (9.0), kernels for sm90a: wgmma, ")
    assert finding(diagnosis, "CUDA compiler").found == "NVRTC 13.0.88, serves sm90a"
    assert finding(diagnosis, "ninja").found.startswith("1.13.0")


def test_a_laptop(machine: Machine) -> None:
    machine.lack_gpu()
    del machine.packages["cuda-bindings"]
    machine.have(nvrtc=None, nvcc=None, cuda_compiler=ToolchainError("no CUDA compiler was found"))
    diagnosis = diagnose()
    assert diagnosis.ok and diagnosis.runs_cpu and not diagnosis.builds_cuda
    assert "emulated" in diagnosis.summary
    assert finding(diagnosis, "NVRTC").advice == "pip install 'fagen[cuda]'"
    assert finding(diagnosis, "cuda-bindings").status == finding(diagnosis, "GPU").status == "not needed"


def test_either_cuda_compiler_is_enough(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.have(nvcc=None)
    assert finding(diagnose(), "nvcc").status == "not needed" and diagnose().runs_cuda
    machine.have(nvcc=NVCC, nvrtc=None)
    diagnosis = diagnose()
    assert finding(diagnosis, "NVRTC").status == "not needed" and diagnosis.runs_cuda
    assert finding(diagnosis, "CUDA compiler").found.startswith("nvcc 13.0.88")
    monkeypatch.setenv("FAGEN_COMPILER", "nvrtc")
    diagnosis = diagnose()
    assert finding(diagnosis, "NVRTC").status == "missing" and not diagnosis.builds_cuda


def test_a_compiler_that_cannot_serve_the_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: object, arch: object) -> None:
        raise ToolchainError("NVRTC 13.0.88 does not compile for sm90")

    monkeypatch.setattr(toolchain.NvrtcCompiler, "check", check)
    diagnosis = diagnose()
    assert finding(diagnosis, "CUDA compiler").status == "problem"
    assert not diagnosis.runs_cuda and diagnosis.runs_cpu and diagnosis.ok


def test_a_card_without_its_bindings(machine: Machine) -> None:
    del machine.packages["cuda-bindings"]
    diagnosis = diagnose()
    assert finding(diagnosis, "cuda-bindings").status == "missing"
    assert diagnosis.builds_cuda and not diagnosis.runs_cuda and diagnosis.ok


def test_a_driver_without_a_card_and_a_card_that_is_too_old(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", list)
    assert finding(diagnose(), "GPU").status == "problem"
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu("Tesla K80", (3, 7))])
    assert finding(diagnose(), "GPU").status == "problem" and not diagnose().runs_cuda


@pytest.mark.parametrize(
    ("version", "status", "advised"),
    [
        ("2.13.0+cu130", "ok", False),
        ("2.9.0a0+git1", "ok", False),
        ("2.13.0+cpu", "ok", True),
        ("2.8.1", "problem", True),
        ("", "missing", True),
    ],
)
def test_versions_of_pytorch(machine: Machine, version: str, status: str, advised: bool) -> None:
    if version:
        machine.packages["torch"] = version
    else:
        del machine.packages["torch"]
    found = finding(diagnose(), "PyTorch")
    assert found.status == status and bool(found.advice) == advised
    assert diagnose().ok == (status == "ok")


def test_a_cpu_build_of_pytorch_does_not_run_on_the_gpu(machine: Machine) -> None:
    machine.packages["torch"] = "2.13.0+cpu"
    diagnosis = diagnose()
    assert not diagnosis.runs_cuda and diagnosis.runs_cpu


def test_nothing_to_compile_with(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ToolchainError("no C++ compiler was found: install g++")
    machine.have(nvrtc=None, nvcc=None, host_compiler=missing, cuda_compiler=ToolchainError("none"))
    machine.lack_gpu()
    diagnosis = diagnose()
    assert not diagnosis.ok and finding(diagnosis, "host compiler").advice == str(missing)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "install g++" in out and "No kernel can be built and run here." in out


def test_no_ninja_and_a_broken_one(machine: Machine, tmp_path: Path) -> None:
    machine.have(ninja=ToolchainError("no ninja was found: pip install ninja"))
    assert finding(diagnose(), "ninja").status == "missing" and not diagnose().runs_cpu
    machine.have(ninja=tmp_path)
    assert finding(diagnose(), "ninja").status == "problem"


def test_a_cache_that_cannot_be_written(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def build_dir(target: str) -> Path:
        raise CacheError("no directory to keep kernels in. Set FAGEN_CACHE_DIR to a directory of your own")

    monkeypatch.setattr("fagen.cache.build_dir", build_dir)
    diagnosis = diagnose()
    assert not diagnosis.ok and "FAGEN_CACHE_DIR" in finding(diagnosis, "cache").advice


def test_a_card_with_bundles_alone(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot compile runs what it was given, if that is for its card."""
    machine.have(nvrtc=None, nvcc=None, cuda_compiler=ToolchainError("none"), host_compiler=ToolchainError("none"))
    assert not diagnose().ok
    path = tmp_path / "kernels.zip"
    entry = {"slug": "fwd", "arch": "sm90a"}
    for archs, ok in ((["sm80", "sm90a"], True), (["sm80"], False)):
        entries = tuple(bundle.Entry.model_construct(**(entry | {"arch": arch})) for arch in archs)
        monkeypatch.setattr(bundle, "search", lambda entries=entries: [bundle.Bundle(path, "0", entries)])
        diagnosis = diagnose()
        assert diagnosis.ok == diagnosis.runs_cuda == ok and not diagnosis.builds_cuda
        found = finding(diagnosis, "bundles")
        assert found.found == f"{'2 kernels' if ok else '1 kernel'} for {', '.join(archs)} in {path}"
        assert ok or "--arch sm90a" in found.advice
    assert not diagnosis.ok
    monkeypatch.undo()
    monkeypatch.setenv("FAGEN_BUNDLES", str(tmp_path / "none"))
    assert finding(diagnose(), "bundles").status == "problem"


def test_json(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] and document["runs_cuda"] and document["runs_cpu"] and document["builds_cuda"]
    assert {row["name"] for row in document["findings"]} >= {
        "NVRTC",
        "nvcc",
        "driver",
        "GPU",
        "ninja",
        "PyTorch",
        "cache",
    }
    assert all(set(row) == {"name", "status", "found", "advice"} for row in document["findings"])


def test_a_turing_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [Gpu("NVIDIA GeForce RTX 2060 SUPER", (7, 5))])
    found = finding(diagnose(), "GPU")
    assert found.ok and "(7.5), kernels for sm75: " in found.found and "fp16 alone" in found.found


def test_what_cards_run(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each compute capability, whatever is here: its target, its family, whether the compiler knows it."""

    def check(self: toolchain.NvrtcCompiler, arch: Arch) -> None:
        if arch.capability < (8, 0):
            raise ToolchainError("too old")

    monkeypatch.setattr(toolchain.NvrtcCompiler, "check", check)
    assert main(["doctor", "--cards", "--json"]) == 0
    rows = {row["capability"]: row for row in json.loads(capsys.readouterr().out)["cards"]}
    assert list(rows) == ["7.5", "8.0", "8.6", "8.7", "8.8", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
    assert {key: rows["7.5"][key] for key in ("target", "family", "shared_kib", "compiles")} == {
        "target": "sm75",
        "family": "sm75",
        "shared_kib": 64,
        "compiles": False,
    }
    assert (rows["9.0"]["target"], rows["9.0"]["family"], rows["9.0"]["compiles"]) == ("sm90a", "sm90", True)
    assert rows["12.1"]["target"] == "sm120" and "would be the same" in rows["12.1"]["why"]
    assert main(["doctor", "--cards"]) == 0
    printed = capsys.readouterr().out
    assert "sm75, unknown to the compiler here" in " ".join(printed.split())
    machine.have(nvrtc=None, nvcc=None)
    assert main(["doctor", "--cards", "--json"]) == 0
    assert all(row["compiles"] is None for row in json.loads(capsys.readouterr().out)["cards"])


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is here, the doctor looks at it without failing."""
    assert main(["doctor"]) in (0, 1)
    assert "host compiler" in capsys.readouterr().out
