"""Environment variables: what each means, and that a bad value is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fagen import env
from fagen.errors import BuildError, FagenError, SpecError, ToolchainError, first_errors

NUMBERS: list[tuple[str, Callable[[], int | None]]] = [
    ("MAX_JOBS", env.max_jobs),
    ("FAGEN_EMULATE_THREADS", env.emulate_threads),
    ("FAGEN_EMULATE_SEED", env.emulate_seed),
]


@pytest.mark.parametrize(("name", "function"), NUMBERS)
def test_numbers(name: str, function: Callable[[], int | None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    assert function() is None
    monkeypatch.setenv(name, "  ")
    assert function() is None
    monkeypatch.setenv(name, "2")
    assert function() == 2


@pytest.mark.parametrize(("name", "function"), NUMBERS)
@pytest.mark.parametrize("value", ["abc", "-1", "1.5", "0x2", "٣", "1 2"])
def test_bad_numbers(
    name: str, function: Callable[[], int | None], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=rf"{name}=.*integer"):
        function()


def test_range_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_JOBS", "0")
    with pytest.raises(SpecError, match="MAX_JOBS='0' is not an integer of at least 1"):
        env.max_jobs()
    monkeypatch.setenv("FAGEN_EMULATE_THREADS", "0")
    with pytest.raises(SpecError, match="FAGEN_EMULATE_THREADS"):
        env.emulate_threads()
    monkeypatch.setenv("FAGEN_EMULATE_SEED", "0")
    assert env.emulate_seed() == 0
    monkeypatch.setenv("FAGEN_EMULATE_SEED", str(2**64))
    with pytest.raises(SpecError, match="FAGEN_EMULATE_SEED"):
        env.emulate_seed()


def test_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAGEN_JIT", raising=False)
    assert env.jit()
    for value, meaning in (("1", True), ("0", False), ("off", False), ("True", True)):
        monkeypatch.setenv("FAGEN_JIT", value)
        assert env.jit() is meaning
    monkeypatch.setenv("FAGEN_JIT", "maybe")
    with pytest.raises(SpecError, match="FAGEN_JIT"):
        env.jit()


def test_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAGEN_COMPILER", raising=False)
    assert env.compiler() is None
    monkeypatch.setenv("FAGEN_COMPILER", "NVCC")
    assert env.compiler() == "nvcc"
    monkeypatch.setenv("FAGEN_COMPILER", "clang")
    with pytest.raises(ToolchainError, match="FAGEN_COMPILER='clang' is not one of: nvrtc, nvcc"):
        env.compiler()


def test_cxx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAGEN_CXX", raising=False)
    monkeypatch.setenv("CXX", "ccache g++")
    assert env.cxx() == ("CXX", ["ccache", "g++"])
    monkeypatch.setenv("FAGEN_CXX", "clang++")
    assert env.cxx() == ("FAGEN_CXX", ["clang++"])
    monkeypatch.setenv("FAGEN_CXX", "'unfinished")
    with pytest.raises(ToolchainError, match="FAGEN_CXX"):
        env.cxx()


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FAGEN_CACHE_DIR", raising=False)
    assert env.cache_dir() is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FAGEN_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAGEN_CACHE_DIR", "here")
    assert env.cache_dir() == tmp_path / "here"
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(SpecError, match=r"FAGEN_CACHE_DIR=.* is not a directory"):
        env.cache_dir()


def test_compilers_run_without_hidden_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--use_fast_math")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    environment = env.for_compilers()
    assert "NVCC_APPEND_FLAGS" not in environment
    assert environment["LC_ALL"] == "C"


def test_only_this_module_reads_these_variables() -> None:
    package = Path(env.__file__).parent
    reading = re.compile(r"(environ(\.get\(|\[)|getenv\()\s*[\"'](FAGEN_|CUDA_|CXX|MAX_JOBS|TORCH_CUDA)")
    assert [path.name for path in package.rglob("*.py") if reading.search(path.read_text())] == []


def test_exit_codes() -> None:
    assert SpecError("x").exit_code == 2
    assert isinstance(SpecError("x"), ValueError)
    assert BuildError("x").exit_code == FagenError("x").exit_code == 1


def test_build_error_shows_the_first_errors() -> None:
    log = "kernel.cu(1): warning: fine\n" + "\n".join(f"kernel.cu({n}): error: no {n}" for n in range(2, 40))
    error = BuildError("fwd does not compile", command=["nvcc", "a b.cu"], log=log, source=Path("kept/kernel.cu"))
    text = str(error)
    assert "kernel.cu(2): error: no 2" in text and "no 30" not in text and "warning" not in text
    assert "nvcc 'a b.cu'" in text and "kept/kernel.cu" in text
    assert first_errors("all is\nwell") == "all is\nwell"
