"""Target architectures: which template family serves each, and what it may use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fagen.errors import SpecError

KIB = 1024
REGISTERS = 65536  # of a multiprocessor, whatever the card

# Shared memory that a block may opt in to, in KiB (CUDA programming guide, technical specifications by compute
# capability): the maximum of the multiprocessor less 1 KiB that the system keeps a block.
_SMEM_KIB = {"80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "90a": 227, "100": 227, "120": 99}

# Named by DESIGN.md and TORCH_CUDA_ARCH_LIST users, served by a family that is not part of this version.
_OTHER_FAMILIES = {"75": "Turing"}


@dataclass(frozen=True)
class Arch:
    """One compile target.

    name: "sm90", or "sm90+ptx" for PTX that the driver compiles for cards newer than the toolkit.
    sm: what the compilers take, "sm_90" or "compute_90".
    family: folder of the templates.
    smem_limit: dynamic shared memory a block may have, bytes.
    """

    name: str
    sm: str
    family: str
    smem_limit: int
    ptx_only: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, (9, 0)."""
        digits = re.sub(r"\D", "", self.sm)
        return int(digits[:-1]), int(digits[-1])


def known() -> tuple[str, ...]:
    """Names that `resolve` takes."""
    return tuple(f"sm{number}" for number in _SMEM_KIB)


def resolve(name: str) -> Arch:
    """The target called `name`: "sm90", "sm_90", "9.0" or any of these with "+PTX". SpecError for any other."""
    match = re.fullmatch(r"(?:sm_?(\d{2,3}[af]?)|(\d{1,2})\.(\d[af]?))(\+ptx)?", name.strip().lower())
    if not match:
        raise SpecError(f"unknown architecture {name!r}; known: {', '.join(known())} (also written 9.0, or 9.0+PTX)")
    number = match[1] or match[2] + match[3]
    if number in _OTHER_FAMILIES:
        family = _OTHER_FAMILIES[number]
        raise SpecError(f"architecture {name!r} needs the {family} kernels, which this version lacks")
    if number not in _SMEM_KIB:
        raise SpecError(f"unknown architecture {name!r}; known: {', '.join(known())}")
    ptx_only = match[4] is not None
    return Arch(
        name=f"sm{number}" + ("+ptx" if ptx_only else ""),
        sm=f"compute_{number}" if ptx_only else f"sm_{number}",
        family="sm90" if number == "90a" else "sm80",
        smem_limit=_SMEM_KIB[number] * KIB,
        ptx_only=ptx_only,
    )


def for_capability(capability: tuple[int, int]) -> Arch:
    """The target for a card of this compute capability: the newest of the same major version that it can run.

    A card without a target of its own major version gets the PTX of the newest older target, for its driver to compile.
    """
    if capability == (9, 0):
        return resolve("sm90a")  # its instructions exist on this compute capability alone
    major, minor = capability
    numbers = sorted((int(number[:-1]), int(number[-1])) for number in _SMEM_KIB if number.isdigit())
    same = [number for number in numbers if number[0] == major and number[1] <= minor]
    if same:
        return resolve(f"{same[-1][0]}.{same[-1][1]}")
    older = [number for number in numbers if number < (major, minor)]
    if not older:
        raise SpecError(f"compute capability {major}.{minor} is older than any target: {', '.join(known())}")
    return resolve(f"{older[-1][0]}.{older[-1][1]}+PTX")


def parse_list(text: str, native: Callable[[], tuple[int, int] | None] = lambda: None) -> tuple[Arch, ...]:
    """The targets of an architecture list as TORCH_CUDA_ARCH_LIST spells it: "8.0;9.0+PTX", "sm80 sm90", "native".

    Separators are ";", "," and white space. "9.0+PTX" is the target and its PTX, as PyTorch reads it. "native" is the
    card that `native()` reports. An empty list and an unknown entry are SpecErrors that name the entry.
    """
    tokens = [token for token in re.split(r"[;,\s]+", text) if token]
    if not tokens:
        raise SpecError(f"an empty architecture list; known: {', '.join(known())}, native")
    targets: dict[Arch, None] = {}
    for token in tokens:
        if token.lower() == "native":
            capability = native()
            if capability is None:
                raise SpecError("architecture 'native' needs a GPU, and none was found; name one, such as sm80")
            targets[for_capability(capability)] = None
            continue
        arch = resolve(token)
        if arch.ptx_only:
            targets[resolve(arch.name.removesuffix("+ptx"))] = None
        targets[arch] = None
    return tuple(targets)
