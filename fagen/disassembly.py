"""The instructions of a cubin, counted: what a toolkit's disassembler says of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fagen import env, toolchain
from fagen.errors import FagenError, ToolchainError

# An instruction has its address before it, perhaps a predicate, and its name in capitals with modifiers after points.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE)
_PADDING = "NOP"
_SECONDS = 120.0

# What names, without their modifiers, are of; the first that matches. CUDA binary utilities, instruction set reference.
_CLASSES = (
    ("tensor products", r"[A-Z]*MMA"),
    ("loads from global memory", r"LDG|LDGSTS|LD|UTMALDG|UBLKCP"),
    ("stores to global memory", r"STG|ST|UTMASTG|UTMAREDG|RED|REDG|ATOM|ATOMG"),
    ("loads from shared memory", r"LDS|LDSM"),
    ("stores to shared memory", r"STS|STSM|ATOMS"),
    ("spills and stack", r"LDL|STL"),
    ("special functions", r"MUFU"),
    ("conversions", r"U?(?:F2F|F2FP|F2I|I2F|I2FP|F2IP|FRND)"),
    ("float arithmetic", r"F(?:ADD|MUL|FMA|MNMX|SEL|SETP|SET|CHK|SWZADD)\w*|H(?:ADD|MUL|FMA|MNMX|SET|SETP)2\w*"),
    ("between lanes", r"SHFL|VOTE|VOTEU|MATCH|REDUX|CREDUX|ELECT"),
    (
        "barriers and fences",
        r"BAR|SYNCS|WARPSYNC|DEPBAR|LDGDEPBAR|MEMBAR|FENCE|ERRBAR|CCTL|WARPGROUP|ARRIVES|UTMACMDFLUSH|UTMACCTL|ACQBULK",
    ),
    ("control", r"BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BMOV|YIELD|NANOSLEEP|KILL|BPT|WARPSYNC"),
)
_REST = "integers and moves"


@dataclass(frozen=True)
class Disassembler:
    """nvdisasm or cuobjdump."""

    executable: Path

    @property
    def name(self) -> str:
        return self.executable.name

    def instructions(self, cubin: Path) -> dict[str, int]:
        """How often each instruction stands in `cubin`, with its modifiers, without the padding behind the last.

        Counts are of the text: what a loop repeats counts once. Raises ToolchainError where the program fails.
        """
        command = [str(self.executable), "-c" if self.name == "nvdisasm" else "-sass", str(cubin)]
        environment = env.for_compilers()
        # cuobjdump runs the nvdisasm that PATH has.
        environment["PATH"] = os.pathsep.join([str(self.executable.parent), environment.get("PATH", os.defpath)])
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_SECONDS,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ToolchainError(f"{self.executable} does not run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().partition("\n")[0][:300]
            raise ToolchainError(f"{self.executable} failed with status {done.returncode}: {said}")
        counts = Counter(_INSTRUCTION.findall(done.stdout))
        counts.pop(_PADDING, None)
        if not counts:
            raise ToolchainError(f"{self.executable} shows no instruction of {cubin}")
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def find() -> Disassembler | None:
    """nvdisasm, else cuobjdump: on PATH, beside nvcc, of NVIDIA's Python packages; None where there is neither."""
    for name in ("nvdisasm", "cuobjdump"):
        places = (shutil.which(name, path=folder and str(folder)) for folder in (None, *_folders()))
        found = next(filter(None, places), None)
        if found is not None:
            return Disassembler(Path(os.path.abspath(found)))
    return None


def by_class(instructions: dict[str, int]) -> dict[str, int]:
    """The same counts by what the instructions do, classes without any left out."""
    counts: Counter[str] = Counter()
    for name, count in instructions.items():
        counts[_class_of(name.partition(".")[0])] += count
    order = [name for name, _ in _CLASSES] + [_REST]
    return {name: counts[name] for name in order if counts[name]}


def _class_of(name: str) -> str:
    return next((each for each, pattern in _CLASSES if re.fullmatch(pattern, name)), _REST)


def _folders() -> Iterator[Path]:
    """Where a toolkit may lie that PATH does not name."""
    try:
        nvcc = toolchain.find_nvcc()
    except FagenError:  # a bad FAGEN_NVCC is the build's to refuse
        nvcc = None
    if nvcc is not None:
        yield nvcc.executable.parent
        yield nvcc.executable.resolve().parent
    home = env.cuda_home()
    if home is not None:
        yield home / "bin"
    yield from toolchain.package_folders("bin", "cuda_nvdisasm")
