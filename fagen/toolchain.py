"""Finds the compilers and ninja, tells what they are, and how to call them.

A compiler's identity goes into the key of whatever it builds. It is the version that the compiler itself reports, never
where it lies or when it was installed: the same toolkit behind another path finds what it built before, another toolkit
at the same path does not.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fagen import env
from fagen.driver import driver_version
from fagen.errors import ToolchainError
from fagen.nvrtc import Nvrtc, NvrtcError

if TYPE_CHECKING:
    from fagen.arch import Arch

_OLDEST_CUDA = (12, 0)
_INSTALL_NVRTC = "pip install 'fagen[cuda]'"
_TOOLKITS = (Path("/usr/local/cuda"), Path("/opt/cuda"))
_NVRTC_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")


class Compiler(Protocol):
    """What the build needs to know of a compiler."""

    @property
    def name(self) -> str:
        """ "nvrtc", "nvcc" or "host"."""

    @property
    def version(self) -> str:
        """For people: "13.0.88", or the first line that a host compiler says of itself."""

    @property
    def identity(self) -> str:
        """For the key of an artifact."""

    def flags(self, arch: Arch) -> tuple[str, ...]:
        """Every flag that can change the binary."""

    def command(self, arch: Arch, source: str, binary: str) -> list[str]:
        """The command that compiles the file `source` to the file `binary` and prints its log."""

    def check(self, arch: Arch) -> None:
        """Raises ToolchainError where this compiler, or the driver here, cannot serve `arch`."""


@dataclass(frozen=True)
class NvrtcCompiler:
    """NVRTC, as a library of this process or of a small Python process."""

    library: Path
    version: str
    name: str = "nvrtc"

    @property
    def identity(self) -> str:
        return f"nvrtc {self.version}"

    def flags(self, arch: Arch) -> tuple[str, ...]:
        report = () if arch.ptx_only else ("--ptxas-options=-v",)
        return ("-std=c++17", f"--gpu-architecture={arch.sm}", *report)

    def command(self, arch: Arch, source: str, binary: str) -> list[str]:
        # Isolated, without site-packages: the module needs none, and Python starts in 10 ms.
        module = str(Path(__file__).with_name("nvrtc.py"))
        return [
            sys.executable,
            "-I",
            "-S",
            module,
            str(self.library),
            source,
            binary,
            *self.flags(arch),
        ]

    def check(self, arch: Arch) -> None:
        numbers = (str(number) for number in Nvrtc(str(self.library)).architectures())
        _check("NVRTC", self.version, arch, tuple(numbers))

    def compile(self, arch: Arch, source: bytes, name: str) -> tuple[bytes, str]:
        """Compiles in this process: the binary and the log. Raises NvrtcError with the log."""
        return Nvrtc(str(self.library)).compile(source, name, self.flags(arch), arch.ptx_only)


@dataclass(frozen=True)
class NvccCompiler:
    """nvcc of a CUDA toolkit. The words of `launcher`, that of FAGEN_LAUNCHER, stand before it in its command: they
    change who compiles and what is compiled twice, never the result, and so are in no key."""

    executable: Path
    version: str
    build: str
    launcher: tuple[str, ...] = ()
    name: str = "nvcc"

    @property
    def identity(self) -> str:
        return f"nvcc {self.version} {self.build}".rstrip()

    def flags(self, arch: Arch) -> tuple[str, ...]:
        kind = ("-ptx",) if arch.ptx_only else ("-cubin", "-Xptxas=-v")
        # Which host compiler preprocesses a file that includes nothing does not matter, so any version of it will do.
        return ("-std=c++17", f"-arch={arch.sm}", *kind, "-allow-unsupported-compiler")

    def command(self, arch: Arch, source: str, binary: str) -> list[str]:
        return [*self.launcher, str(self.executable), *self.flags(arch), "-o", binary, source]

    def check(self, arch: Arch) -> None:
        listed = _output([str(self.executable), "--list-gpu-code"])
        _check("nvcc", self.version, arch, tuple(re.findall(r"sm_(\d+)", listed)))


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler of emulated kernels. `target` is the machine it compiles for, such as "x86_64-linux-gnu"."""

    words: tuple[str, ...]
    version: str
    target: str
    name: str = "host"

    @property
    def identity(self) -> str:
        # gcc begins with the name by which it was called: c++, g++-12 and x86_64-linux-gnu-g++ are one program.
        version = re.sub(r"^(?:[\w.-]+-)?[cg]\+\+(?:-[\d.]+)? (?=\()", "g++ ", self.version)
        # Words before the options are programs, such as the compiler that a launcher runs and that said the version.
        options = list(self.words[1:])
        while options and not options[0].startswith("-") and shutil.which(options[0]):
            del options[0]
        return " ".join([version, self.target, *([shlex.join(options)] if options else [])])

    def flags(self, arch: Arch) -> tuple[str, ...]:
        return (
            "-std=c++17",
            "-O2",
            "-fPIC",
            "-shared",
            "-pthread",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-Wno-unknown-pragmas",
        )

    def command(self, arch: Arch, source: str, binary: str) -> list[str]:
        return [*self.words, *self.flags(arch), "-o", binary, source]

    def check(self, arch: Arch) -> None:
        """Any host compiler executes the kernels of any architecture."""


def find_cuda_compiler() -> NvrtcCompiler | NvccCompiler:
    """The compiler of cubins: what FAGEN_COMPILER, FAGEN_NVCC or FAGEN_LAUNCHER ask for, else NVRTC, else nvcc.

    Raises ToolchainError that says what to install, or which variables contradict each other.
    """
    choice = env.compiler()
    if choice == "nvrtc" and env.launcher():
        raise ToolchainError(
            "FAGEN_LAUNCHER runs commands of nvcc, and NVRTC is a library that no launcher can run: "
            "unset FAGEN_LAUNCHER, or set FAGEN_COMPILER=nvcc"
        )
    if choice is None and (env.nvcc() is not None or env.launcher()):
        choice = "nvcc"
    if choice != "nvcc":
        nvrtc = find_nvrtc()
        if nvrtc is not None:
            return nvrtc
        if choice == "nvrtc":
            raise ToolchainError(f"FAGEN_COMPILER=nvrtc, and no NVRTC was found: {_INSTALL_NVRTC}")
    nvcc = find_nvcc()
    if nvcc is not None:
        return nvcc
    if choice == "nvcc":
        raise ToolchainError(f"no nvcc was found{_who_asks()}: install a CUDA toolkit and set CUDA_HOME or FAGEN_NVCC")
    raise ToolchainError(
        f"no CUDA compiler was found: {_INSTALL_NVRTC} brings NVRTC; or install a CUDA toolkit and set CUDA_HOME. "
        "Kernels for the CPU need neither"
    )


def find_nvrtc() -> NvrtcCompiler | None:
    """NVRTC of CUDA 12 or newer: of Python packages, of conda, of CUDA_HOME, of the system, of a usual toolkit folder.

    Of several, the first that the driver here can take; without a driver, the first.
    """
    found: list[NvrtcCompiler] = []
    for path in _nvrtc_libraries():
        version = _nvrtc_version(path)
        if version is None:
            continue
        compiler = NvrtcCompiler(path, version)
        if found and compiler.version == found[0].version:
            continue
        driver = driver_version()
        if driver is None or _major_minor(version)[0] <= driver[0]:
            return compiler
        found.append(compiler)
    return found[0] if found else None


def find_nvcc() -> NvccCompiler | None:
    """nvcc: FAGEN_NVCC, of CUDA_HOME, on PATH, of Python packages, of a usual toolkit folder.

    Raises ToolchainError where FAGEN_NVCC names something that is not an nvcc.
    """
    asked = env.nvcc()
    if asked is not None:
        resolved = shutil.which(asked)
        if resolved is None:
            raise ToolchainError(f"FAGEN_NVCC={asked!r} is not an executable")
        return _nvcc_at(Path(os.path.abspath(resolved)), "FAGEN_NVCC")
    home = env.cuda_home()
    on_path = shutil.which("nvcc")
    candidates = [
        *((home / "bin" / "nvcc",) if home else ()),
        *((Path(os.path.abspath(on_path)),) if on_path else ()),
        *(folder / "nvcc" for folder in package_folders("bin", "cuda_nvcc")),
        *(toolkit / "bin" / "nvcc" for toolkit in _TOOLKITS),
    ]
    for candidate in candidates:
        if _is_program(candidate):
            return _nvcc_at(candidate, "nvcc")
    return None


def find_host_compiler() -> HostCompiler:
    """The C++ compiler of emulated kernels: FAGEN_CXX, CXX, c++, g++, clang++. Raises ToolchainError."""
    asked = env.cxx()
    if asked is not None:
        variable, (program, *options) = asked
        resolved = shutil.which(program)
        if resolved is None:
            raise ToolchainError(f"{variable}={shlex.join([program, *options])!r}: {program!r} is not an executable")
        # A name stays a name; a path must hold in the directory where ninja runs.
        return _host((os.path.abspath(resolved) if os.sep in program else program, *options))
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name) is not None:
            return _host((name,))
    raise ToolchainError(
        "no C++ compiler was found for kernels on the CPU: install g++ or clang++ "
        "(apt install g++, dnf install gcc-c++, xcode-select --install), or set FAGEN_CXX"
    )


def find_ninja() -> Path:
    """ninja: beside the running Python, of a package on its path, on PATH. Raises ToolchainError."""
    candidates = [Path(sys.executable).parent / "ninja"]
    for root in map(Path, sys.path):
        if root.name in ("site-packages", "dist-packages") and len(root.parents) > 2:
            candidates.append(root.parents[2] / "bin" / "ninja")  # where pip puts the program of a package there
    for candidate in candidates:
        if _is_program(candidate):
            return candidate
    on_path = shutil.which("ninja") or shutil.which("ninja-build")
    if on_path is not None:
        return Path(os.path.abspath(on_path))
    raise ToolchainError("no ninja was found: pip install ninja")


@lru_cache(maxsize=1)
def _is_program(path: Path) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)  # unlike Path.is_file, False in an unreadable folder


def _check(what: str, version: str, arch: Arch, numbers: Sequence[str]) -> None:
    """The compiler knows the architecture, and the driver, where there is one, can load what it writes."""
    number = re.sub(r"\D", "", arch.sm)
    if number not in numbers:
        known = ", ".join(f"sm_{known}" for known in numbers)
        dropped = int(number) < min(map(int, numbers), default=0)
        advice = "an older CUDA toolkit (CUDA_HOME)" if dropped else f"a newer one ({_INSTALL_NVRTC}, or a toolkit)"
        raise ToolchainError(
            f"{what} {version} does not compile for {arch.name}; it knows {known}. "
            f"Install {advice}, or choose another architecture"
        )
    driver = driver_version()
    if driver is None:
        return
    compiled = _major_minor(version)
    # A driver loads the cubins of any release of its major version, but PTX only up to its own release.
    too_old = compiled > driver if arch.ptx_only else compiled[0] > driver[0]
    if too_old:
        kind = "PTX" if arch.ptx_only else "cubins"
        package = (
            f"nvidia-cuda-nvrtc-cu{driver[0]}" if driver[0] < 13 else f"nvidia-cuda-nvrtc=={driver[0]}.{driver[1]}.*"
        )
        raise ToolchainError(
            f"the driver supports CUDA {driver[0]}.{driver[1]} and cannot load {kind} of {what} {version}: "
            f"update the driver, or pip install '{package}' and set FAGEN_COMPILER=nvrtc"
        )


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def package_folders(kind: str, old_name: str) -> Iterator[Path]:
    """Folders `kind` ("lib", "bin") of NVIDIA's pip packages: CUDA 13 and newer share one, CUDA 12 has one each."""
    for root in sys.path:
        nvidia = Path(root or ".") / "nvidia"
        toolkits = (re.fullmatch(r"cu(\d+)", entry.name) for entry in nvidia.glob("cu*"))
        for match in sorted(
            (match for match in toolkits if match),
            key=lambda match: int(match[1]),
            reverse=True,
        ):
            yield nvidia / match[0] / kind
        yield nvidia / old_name / kind


def _nvrtc_libraries() -> Iterator[Path]:
    """Files that may be NVRTC, best first. A generator: what comes later is looked for only where it is needed."""
    for folder in package_folders("lib", "cuda_nvrtc"):
        yield from _nvrtc_in(folder)
    for root in sys.path:  # some builds of PyTorch carry the library themselves
        yield from _nvrtc_in(Path(root or ".") / "torch" / "lib")
    conda = env.conda_prefix()
    if conda is not None:
        yield from _nvrtc_in(conda / "lib")
    home = env.cuda_home()
    if home is not None:
        yield from _nvrtc_in_toolkit(home)
    for soname in _NVRTC_SONAMES:
        path = _system_library(soname)
        if path is not None:
            yield path
    for toolkit in _TOOLKITS:
        yield from _nvrtc_in_toolkit(toolkit)


def _nvrtc_in_toolkit(home: Path) -> Iterator[Path]:
    for folder in (home / "lib64", home / "lib", *home.glob("targets/*/lib")):
        yield from _nvrtc_in(folder)


def _nvrtc_in(folder: Path) -> list[Path]:
    """`libnvrtc.so.13` and the like in `folder`, newest first."""
    matches = (re.fullmatch(r"libnvrtc\.so\.(\d+)", path.name) for path in folder.glob("libnvrtc.so.*"))
    majors = sorted((int(match[1]) for match in matches if match), reverse=True)
    return [folder / f"libnvrtc.so.{major}" for major in majors]


def _system_library(soname: str) -> Path | None:
    """Where the loader finds `soname`; None where it does not, or does not tell."""
    try:
        ctypes.CDLL(soname)
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    match = re.search(rf"\s(/\S.*/{re.escape(soname)}[.\d]*)$", maps, re.MULTILINE)
    return Path(match[1]) if match else None


@lru_cache(maxsize=16)
def _nvrtc_version(path: Path) -> str | None:
    """ "13.0.88", or None where the file is not an NVRTC that can be used.

    The library tells only "13.0". The rest is in its file's name in a toolkit, in the name of the package's metadata in
    an environment of Python, and else in the PTX that it writes.
    """
    try:
        library = Nvrtc(str(path))
        release = library.version()
    except (OSError, NvrtcError):
        return None
    if release < _OLDEST_CUDA:
        return None
    number = rf"{release[0]}\.{release[1]}\.[.\d]+"
    match = re.fullmatch(rf"libnvrtc\.so\.({number})", path.resolve().name)
    if match:
        return match[1]
    if len(path.parents) > 3 and path.parents[2].name == "nvidia":
        names = (entry.name for entry in path.parents[3].glob("nvidia_cuda_nvrtc*.dist-info"))
        owners = [
            match[1] for name in names if (match := re.fullmatch(rf"nvidia_cuda_nvrtc\w*-({number})\.dist-info", name))
        ]
        if len(owners) == 1:
            return owners[0]
    try:
        newest = max(library.architectures())
        ptx, _ = library.compile(b"", "version.cu", [f"--gpu-architecture=compute_{newest}"], ptx=True)
    except NvrtcError:
        return None
    match = re.search(rf"\bV({number})", ptx.decode(errors="replace"))
    return match[1] if match else f"{release[0]}.{release[1]}"


def _nvcc_at(executable: Path, variable: str) -> NvccCompiler:
    text = _output([str(executable), "--version"])
    version = re.search(r"release \d+\.\d+, V(\d+\.\d+[.\d]*)", text)
    if not version:
        raise ToolchainError(f"{variable}: {executable} --version does not answer like nvcc: {text.strip()[:200]!r}")
    if _major_minor(version[1]) < _OLDEST_CUDA:
        raise ToolchainError(
            f"nvcc {version[1]} ({executable}) is too old: CUDA {_OLDEST_CUDA[0]}.{_OLDEST_CUDA[1]} or newer"
        )
    build = re.search(r"^Build (\S+)", text, re.MULTILINE)
    return NvccCompiler(executable, version[1], build[1] if build else "", _launcher())


def _launcher() -> tuple[str, ...]:
    """The words of FAGEN_LAUNCHER, the program as a path that holds wherever ninja runs it."""
    words = env.launcher()
    if not words:
        return ()
    resolved = shutil.which(words[0])
    if resolved is None:
        raise ToolchainError(f"FAGEN_LAUNCHER={shlex.join(words)!r}: {words[0]!r} is not an executable")
    return os.path.abspath(resolved), *words[1:]


def _who_asks() -> str:
    return ", which FAGEN_LAUNCHER needs" if env.launcher() else ""


def _host(words: tuple[str, ...]) -> HostCompiler:
    lines = _output([*words, "--version"]).strip().splitlines()
    if not lines:
        raise ToolchainError(f"{' '.join(words)} --version says nothing: not a C++ compiler")
    target = _output([*words, "-dumpmachine"]).strip()
    return HostCompiler(words, lines[0].strip(), target)


def _output(command: Sequence[str]) -> str:
    """What `command` prints, asked once a process for each state of its file."""
    executable = shutil.which(command[0]) or command[0]
    try:
        state = os.stat(executable)
    except OSError as error:
        raise ToolchainError(f"{executable}: {error.strerror}") from error
    return _output_of(tuple(command), state.st_mtime_ns, state.st_ino)


@lru_cache(maxsize=64)
def _output_of(command: tuple[str, ...], _mtime: int, _inode: int) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            env=env.for_compilers(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()[:300]
        raise ToolchainError(f"{' '.join(command)} failed with status {done.returncode}: {said}")
    return done.stdout
