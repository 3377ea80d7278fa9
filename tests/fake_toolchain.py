"""Stand-ins for the tests of the build: kernels without a template, and compilers that are small shell scripts.

A stub compiler answers what the build asks of one, notes each compilation in a file, and writes a minimal ELF file with
the symbol that is expected, and then the source, so that each kernel has a binary of its own. What it does with a
source depends on words in it: `BROKEN` fails, `SLOW` never ends, `PAUSE` takes a little longer, `EMPTY` writes nothing,
`ALIEN` writes text, `NAMELESS` lacks the symbol.
"""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import python_path

from fagen.arch import Arch, resolve

ROOT = Path(__file__).resolve().parent.parent

PTXAS_LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fagen_fwd' for 'sm_90'
ptxas info    : Function properties for fagen_fwd
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 256 bytes smem, 368 bytes cmem[0]
"""

_STUB = """\
#!/bin/sh
case "$*" in
*--version) printf '%s\\n' {version}; exit 0 ;;
--list-gpu-code) printf 'sm_%s\\n' {architectures}; exit 0 ;;
*-dumpmachine) echo test-machine; exit 0 ;;
esac
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then out=$2; fi
    shift
done
echo compiled "$(head -n 1 "$1")" >> {count}
word=$(grep -a -o -w -E 'BROKEN|SLOW|PAUSE|EMPTY|ALIEN|NAMELESS' "$1" | head -n 1)
case "$word" in
BROKEN) echo "$1(3): error: expected a ;" >&2; exit 2 ;;
SLOW) echo $$ > {pid}; sleep 60 ;;
PAUSE) sleep 0.05 ;;
EMPTY) : > "$out"; exit 0 ;;
ALIEN) echo text > "$out"; exit 0 ;;
NAMELESS) cp {nameless} "$out"; exit 0 ;;
esac
cat {log}
cat {binary} "$1" > "$out"
"""


@dataclass(frozen=True)
class FakeSpec:
    """Stands for an AttentionSpec."""

    name: str = "a"

    def model_dump_json(self, **_options: Any) -> str:
        return json.dumps({"name": self.name})

    def model_dump(self, **_options: Any) -> dict[str, Any]:
        return {"name": self.name}

    def cli_flags(self) -> list[str]:
        return ["--name", self.name]


@dataclass(frozen=True)
class FakeKernel:
    """Stands for a KernelPlan; `text` is what it renders to."""

    slug: str = "fwd_a_sm90"
    text: str = "int x;"
    entry: str = "fagen_fwd"
    arch: Arch = field(default_factory=lambda: resolve("sm90"))
    spec: FakeSpec = field(default_factory=FakeSpec)


def render(kernel: FakeKernel, target: str, templates: Path | None = None) -> str:
    return f"// {kernel.slug} {target}\n{kernel.text}\n"


def make_kernel(**fields: Any) -> Any:
    """A FakeKernel, typed so that it passes for a KernelPlan."""
    return FakeKernel(**fields)


def kernels(names: Sequence[str]) -> list[Any]:
    return [make_kernel(slug=f"fwd_{name}_sm90", spec=FakeSpec(name)) for name in names]


def elf(symbol: str, dynamic: bool = False) -> bytes:
    """A little-endian ELF64 file that defines `symbol` in .symtab, or in .dynsym, and nothing else."""
    strings = b"\0" + symbol.encode() + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 1, 0, 0)
    start = 64
    sections = (
        bytes(64)
        + struct.pack("<IIQQQQIIQQ", 0, 11 if dynamic else 2, 0, 0, start, len(symbols), 2, 1, 8, 24)
        + struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, start + len(symbols), len(strings), 0, 0, 1, 0)
    )
    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, start + len(symbols) + len(strings), 0, 64, 0, 0, 64, 3, 0)
    return header + symbols + strings + sections


def nvcc_version(version: str) -> str:
    release = ".".join(version.split(".")[:2])
    return (
        "nvcc: NVIDIA (R) Cuda compiler driver\n"
        f"Cuda compilation tools, release {release}, V{version}\n"
        f"Build cuda_{release}.r{release}/compiler.1_0"
    )


class Stub:
    """A stub compiler at `path`; with `host`, a C++ compiler, else nvcc."""

    def __init__(
        self, path: Path, *, version: str = "13.0.88", host: bool = False, arches: str = "75 80 90 100"
    ) -> None:
        self.path = path
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.count_file = folder / f"{path.name}.count"
        self.pid_file = folder / f"{path.name}.pid"
        parts: dict[str, bytes] = {
            "log": b"" if host else PTXAS_LOG.encode(),
            "binary": elf("fagen_emulate_launch" if host else "fagen_fwd", dynamic=host),
            "nameless": elf("other", dynamic=host),
        }
        names = {}
        for name, content in parts.items():
            file = folder / f"{path.name}.{name}"
            file.write_bytes(content)
            names[name] = shlex.quote(str(file))
        path.write_text(
            _STUB.format(
                version=shlex.quote(version if host else nvcc_version(version)),
                architectures=arches,
                count=shlex.quote(str(self.count_file)),
                pid=shlex.quote(str(self.pid_file)),
                **names,
            )
        )
        path.chmod(0o755)

    def binary_of(self, source: str) -> bytes:
        """What it compiles `source` to."""
        return self.path.with_name(f"{self.path.name}.binary").read_bytes() + source.encode()

    @property
    def compilations(self) -> list[str]:
        """The first line of each file that it has been asked to compile, in order."""
        lines = self.count_file.read_text().splitlines() if self.count_file.exists() else []
        return [line.removeprefix("compiled ") for line in lines]

    @property
    def compiled(self) -> int:
        """How many files it has been asked to compile."""
        return len(self.compilations)


def script(body: str) -> list[str]:
    """A command that runs `body` in a fresh Python, with this module imported as `fake` and its renderer in place."""
    head = (
        "import fake_toolchain as fake, fagen.render\n"
        "from fagen import build, cache\n"
        "fagen.render.render = fake.render\n"
    )
    return [sys.executable, "-c", head + body]


def script_env(**changes: str) -> dict[str, str]:
    """The environment for `script`: no FAGEN_* variable but those of `changes`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FAGEN_")}
    return kept | {"PYTHONPATH": python_path(ROOT, ROOT / "tests")} | changes


def run_as_other(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` as a user without any privilege, without a name and without a home."""
    kept = {name: value for name, value in script_env(**environment).items() if name not in ("HOME", "XDG_CACHE_HOME")}
    # What is imported late is imported now: that user may not be able to read this environment of Python.
    drop = "import os, json, platformdirs, warnings, pwd, grp\n"
    if os.geteuid() == 0:
        drop += "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
    return subprocess.run(
        script(drop + code),
        env=kept,
        capture_output=True,
        text=True,
        cwd="/",
        check=False,
    )
