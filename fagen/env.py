"""The one place that reads environment variables. An empty variable counts as unset everywhere.

| variable | meaning | accepted |
|---|---|---|
| `FAGEN_CACHE_DIR` | where artifacts are kept | a directory, made on demand |
| `FAGEN_COMPILER` | which CUDA compiler builds kernels | `nvrtc`, `nvcc` |
| `FAGEN_NVCC` | the nvcc to run; without `FAGEN_COMPILER` it also chooses nvcc | a path, or a name on `PATH` |
| `FAGEN_LAUNCHER` | what runs nvcc; without `FAGEN_COMPILER` it also chooses nvcc | `sccache`, `ccache`, a command |
| `CUDA_HOME` | toolkit to take nvcc from after `FAGEN_NVCC` | a directory |
| `FAGEN_CXX`, `CXX` | C++ compiler of emulated kernels | an executable, with options if need be: `ccache g++` |
| `FAGEN_ARCH` | default architecture | one architecture or a list, such as `sm90` |
| `TORCH_CUDA_ARCH_LIST` | default architecture after `FAGEN_ARCH` | PyTorch's syntax, such as `8.0;9.0+PTX` |
| `FAGEN_JIT` | whether a missing kernel may be compiled | `1` (default), `0` |
| `FAGEN_BUNDLES` | where `load` finds built kernels | bundles and directories of such, with `:` between |
| `FAGEN_TUNED` | whether the tiles that `fagen tune` found are used | `1` (default), `0` |
| `FAGEN_MODS` | folders of score modifications from outside, whose code is run | directories, with `:` between |
| `FAGEN_EMULATE_SEED` | order in which emulated threads run | an integer from 0 to 2**64 - 1 |
| `FAGEN_EMULATE_THREADS` | host threads that run emulated blocks | an integer of at least 1 |
| `MAX_JOBS` | most compilers at once | an integer of at least 1 |

Found by others' rules and only followed: `CONDA_PREFIX` (an activated conda environment), `PATH`.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Literal

from fagen.errors import SpecError, ToolchainError

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

_KEPT_FROM_COMPILERS = frozenset(
    {"NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"}  # flags of nvcc
    | {"CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LD_RUN_PATH", "CCC_OVERRIDE_OPTIONS"}  # flags of gcc and clang
    | {"DEPENDENCIES_OUTPUT", "SUNPRO_DEPENDENCIES"}  # files that gcc writes
    | {"LC_ALL", "LANGUAGE"}
)


def _get(name: str) -> str | None:
    value = os.environ.get(name, "").strip()
    return value or None


def _integer(name: str, low: int, high: int | None = None) -> int | None:
    value = _get(name)
    if value is None:
        return None
    accepted = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if not (value.isascii() and value.isdigit()):
        raise SpecError(f"{name}={value!r} is not {accepted}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise SpecError(f"{name}={value!r} is not {accepted}")
    return number


def cache_dir() -> Path | None:
    """`FAGEN_CACHE_DIR`: directory of the artifacts, absolute, with `~` expanded; None when unset.

    Raises SpecError where the path exists and is not a directory.
    """
    value = _get("FAGEN_CACHE_DIR")
    if value is None:
        return None
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        raise SpecError(f"FAGEN_CACHE_DIR={value!r}: {error}") from error
    if os.path.exists(path) and not os.path.isdir(path):  # which are False where this user may not look
        raise SpecError(f"FAGEN_CACHE_DIR={value!r} is not a directory")
    return Path(os.path.abspath(path))


def compiler() -> Literal["nvrtc", "nvcc"] | None:
    """`FAGEN_COMPILER`: the CUDA compiler to use, None for the default choice. ToolchainError for another name."""
    value = _get("FAGEN_COMPILER")
    if value is None:
        return None
    lowered = value.lower()
    if lowered == "nvrtc":
        return "nvrtc"
    if lowered == "nvcc":
        return "nvcc"
    raise ToolchainError(f"FAGEN_COMPILER={value!r} is not one of: nvrtc, nvcc")


def nvcc() -> str | None:
    """`FAGEN_NVCC`: path or name of the nvcc to run, None when unset; the toolchain checks that it runs."""
    return _get("FAGEN_NVCC")


def launcher() -> list[str]:
    """`FAGEN_LAUNCHER`: the command that nvcc's is handed to, as a list; empty when unset.

    Raises ToolchainError for a value that a shell could not split.
    """
    value = _get("FAGEN_LAUNCHER")
    try:
        return shlex.split(value or "")
    except ValueError as error:
        raise ToolchainError(f"FAGEN_LAUNCHER={value!r} is not a command: {error}") from error


def cuda_home() -> Path | None:
    """`CUDA_HOME`: directory of a CUDA toolkit, None when unset."""
    value = _get("CUDA_HOME")
    return None if value is None else Path(value)


def conda_prefix() -> Path | None:
    """`CONDA_PREFIX`: the activated conda environment; None when unset."""
    value = _get("CONDA_PREFIX")
    return None if value is None else Path(value)


def for_compilers() -> dict[str, str]:
    """The environment that compilers run in.

    Messages are in English, for they are parsed. What would change a binary without changing its key is left out, and
    what makes a compiler write files of its own.
    """
    return {name: value for name, value in os.environ.items() if name not in _KEPT_FROM_COMPILERS} | {"LC_ALL": "C"}


def cxx() -> tuple[str, list[str]] | None:
    """`FAGEN_CXX`, else `CXX`: (name of the variable, command as a list); None when neither is set.

    Raises ToolchainError for a value that a shell could not split.
    """
    for name in ("FAGEN_CXX", "CXX"):
        value = _get(name)
        if value is None:
            continue
        try:
            command = shlex.split(value)
        except ValueError as error:
            raise ToolchainError(f"{name}={value!r} is not a command: {error}") from error
        return name, command
    return None


def bundles() -> list[Path]:
    """`FAGEN_BUNDLES`: bundles and directories of bundles, absolute, with `~` expanded. Raises SpecError."""
    return _paths("FAGEN_BUNDLES")


def mods() -> list[Path]:
    """`FAGEN_MODS`: folders of score modifications, absolute, with `~` expanded. Raises SpecError."""
    return _paths("FAGEN_MODS")


def _paths(name: str) -> list[Path]:
    value = _get(name) or ""
    parts = [part.strip() for part in value.split(os.pathsep)]
    try:
        return [Path(os.path.abspath(Path(part).expanduser())) for part in parts if part]
    except RuntimeError as error:
        raise SpecError(f"{name}={value!r}: {error}") from error


def arch() -> str | None:
    """`FAGEN_ARCH`: the architecture to build for by default, as written; `fagen.arch` says which names are known."""
    return _get("FAGEN_ARCH")


def torch_cuda_arch_list() -> str | None:
    """`TORCH_CUDA_ARCH_LIST`, as written; None when unset."""
    return _get("TORCH_CUDA_ARCH_LIST")


def _switch(name: str, off: str, on: str) -> bool:
    """A variable that is on by default; `off` and `on` say what its values mean."""
    value = _get(name)
    if value is None or value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise SpecError(f"{name}={value!r} is not 0 ({off}) or 1 ({on})")


def jit() -> bool:
    """`FAGEN_JIT`: whether `load` may compile a kernel that the cache lacks. Default yes. Raises SpecError."""
    return _switch("FAGEN_JIT", "never compile on demand", "compile what is missing")


def tuned() -> bool:
    """`FAGEN_TUNED`: whether the tiles that `fagen tune` found are used. Default yes. Raises SpecError."""
    return _switch("FAGEN_TUNED", "the tiles of the tables", "those that fagen tune found")


def emulate_seed() -> int | None:
    """`FAGEN_EMULATE_SEED`: seed of the order in which emulated threads run; None for lane order. Raises SpecError."""
    return _integer("FAGEN_EMULATE_SEED", 0, 2**64 - 1)


def emulate_threads() -> int | None:
    """`FAGEN_EMULATE_THREADS`: host threads that run emulated blocks; None for one a core. Raises SpecError."""
    return _integer("FAGEN_EMULATE_THREADS", 1)


def max_jobs() -> int | None:
    """`MAX_JOBS`: the most compilers that run at once; None for what cores and memory allow. Raises SpecError."""
    return _integer("MAX_JOBS", 1)
