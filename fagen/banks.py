"""Bank conflicts of shared memory and words of it that nothing writes, counted in one small emulated call:
templates/emulate/banks.hpp.j2 says how."""

from __future__ import annotations

import ctypes
import dataclasses
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fagen import env, origin, toolchain
from fagen import render as renderer
from fagen.arch import Arch
from fagen.check import Case, differentiate
from fagen.errors import BuildError, FagenError
from fagen.kernels import Kernel
from fagen.ops import load
from fagen.spec import AttentionSpec

if TYPE_CHECKING:
    from fagen.plan import KernelPlan

_KERNEL = "// ==== kernel ====\n"
# The queries and keys of the call: no multiples of a tile, as those of `fagen check`.
_QUERIES, _KEYS, _HEADS = 150, 170, 2
_KEYS_OF_FEW = 1700  # where there is 1 query: so that each of two parts goes round all stages
_SECONDS = 300.0


@dataclass(frozen=True)
class Line:
    """What the warps of all blocks did at one line of a template. `least` are the wavefronts without a conflict."""

    template: str
    number: int
    primitive: str
    accesses: int
    wavefronts: int
    least: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.least


@dataclass(frozen=True)
class Use:
    """What one kernel did with shared memory: its accesses, most conflicts first, and how many 4-byte words of it no
    thread and no copy wrote in any block."""

    lines: tuple[Line, ...]
    unwritten: int


class _Count(ctypes.Structure):
    _fields_ = (
        ("primitive", ctypes.c_char_p),
        ("line", ctypes.c_uint64),
        ("accesses", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("least", ctypes.c_uint64),
    )


def count(spec: AttentionSpec, arch: Arch) -> dict[KernelPlan, Use]:
    """How each kernel of `spec` uses shared memory. Accesses are those that give an address a lane.

    Runs the kernels emulated, for 2 heads, 150 queries and 170 keys, and backward where the spec has gradients; with
    split keys in one part too, and for 1 query and 1700 keys in two. What the tensor cores and the copy engine of
    Hopper read and write is no access here, but what the engine writes is written. An access that reads a word nobody
    wrote, or races with another, ends the run with a LaunchError that names its line.

    Raises BuildError where the host compiler refuses a kernel.
    """
    attention = load(spec, arch=arch.name, emulate=True)
    kernels = attention.kernels("cpu")
    with tempfile.TemporaryDirectory(prefix="fagen-banks-") as scratch:
        for kind, kernel in list(kernels.items()):
            folder = Path(scratch, kind)
            folder.mkdir()
            _compile(kernel.plan, folder)
            counted = dataclasses.replace(
                kernel.artifact, directory=folder, source=folder / "kernel.cpp", binary=folder / "kernel.so"
            )
            kernels[kind] = Kernel(kernel.plan, counted, None)
        for case in _cases(spec):
            inputs = case.inputs()
            if spec.backward:
                differentiate(attention, inputs, case.upstream()[0])
            else:
                attention(inputs.q, inputs.k, inputs.v, **inputs.call)
        return {
            kernel.plan: Use(_by_template(kernel.plan, kernel.artifact.binary), unwritten(kernel.artifact.binary))
            for kernel in kernels.values()
        }


def _cases(spec: AttentionSpec) -> list[Case]:
    call = Case(spec=spec, heads=_HEADS, seqlen_q=_QUERIES, seqlen_k=_KEYS)
    if not spec.split_kv:
        return [call]
    few = dataclasses.replace(call, seqlen_q=1, seqlen_k=_KEYS_OF_FEW, num_splits=2)
    return [call, dataclasses.replace(call, num_splits=1), few]


def _source(kernel: KernelPlan) -> tuple[str, int]:
    """The text of `kernel` for the CPU with its accesses counted, and how many lines that puts before the kernel."""
    head, mark, body = renderer.render(kernel, "emulate").partition(_KERNEL)
    if not mark:
        raise FagenError(f"{kernel.slug}: its file does not say where the kernel begins")
    text = renderer.environment().get_template("emulate/banks.hpp.j2").render(**renderer.context(kernel))
    return head + text + mark + body, text.count("\n")


def _compile(kernel: KernelPlan, folder: Path) -> None:
    compiler = toolchain.find_host_compiler()
    (folder / "kernel.cpp").write_text(_source(kernel)[0], encoding="utf-8")
    command = compiler.command(kernel.arch, "kernel.cpp", "kernel.so")
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env=env.for_compilers(),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{kernel.slug} cannot be compiled with its accesses counted: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{kernel.slug} does not compile with its accesses counted", command=command, log=done.stderr)


def counts(library: Path, lines: int) -> dict[int, tuple[str, int, int, int]]:
    """What the launches of a library have done since this was asked last, by its lines, from 1 to `lines`: primitive,
    accesses, wavefronts, and the wavefronts without a conflict."""
    ask = ctypes.CDLL(str(library)).fagen_emulate_banks
    ask.argtypes = (ctypes.c_uint32, ctypes.POINTER(_Count))
    ask.restype = ctypes.c_int
    entry = _Count()
    return {
        number: (entry.primitive.decode(), entry.accesses, entry.wavefronts, entry.least)
        for number in range(lines + 1)  # asked for line 0, it ends the count of the last block
        if ask(number, entry)
    }


def unwritten(library: Path) -> int:
    """How many 4-byte words of shared memory no block of a library's launches has written since this was asked last."""
    ask = ctypes.CDLL(str(library)).fagen_emulate_unwritten
    ask.argtypes, ask.restype = (), ctypes.c_uint32
    return int(ask())


def _by_template(kernel: KernelPlan, library: Path) -> tuple[Line, ...]:
    """The counts by the lines of the templates."""
    lines = origin.lines(kernel, "emulate")
    added = _source(kernel)[1]
    found: dict[tuple[str, int, str], list[int]] = {}
    for number, (primitive, *numbers) in counts(library, len(lines) + added).items():
        place = lines[number - added - 1]
        sums = found.setdefault((place.template, place.number, primitive), [0, 0, 0])
        sums[:] = (before + more for before, more in zip(sums, numbers, strict=True))
    result = [Line(*place, *sums) for place, sums in found.items()]
    return tuple(sorted(result, key=lambda line: (-line.conflicts, line.template, line.number)))
