"""Target architectures: which template family serves each, and what it may use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fagen.errors import SpecError

KIB = 1024
REGISTERS = 65536  # of a multiprocessor, whatever the card


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor holds at once, and what a block may have of it.

    generation: NVIDIA's name. shared_kib: its shared memory, KiB. system_kib: of that what the system keeps a block.
    warps, blocks: that it holds.
    """

    generation: str
    shared_kib: int
    system_kib: int
    warps: int
    blocks: int


# CUDA programming guide, technical specifications by compute capability; of 8.8 and 11.0, cuda_occupancy.h of the
# toolkit, which gives 8.8 what it gives 8.6.
_TURING = Multiprocessor("Turing", 64, 0, 32, 16)
_AMPERE = Multiprocessor("Ampere", 164, 1, 64, 32)
_AMPERE_GEFORCE = Multiprocessor("Ampere", 100, 1, 48, 16)
_ORIN = Multiprocessor("Ampere", 164, 1, 48, 16)
_ADA = Multiprocessor("Ada", 100, 1, 48, 24)
_HOPPER = Multiprocessor("Hopper", 228, 1, 64, 32)
_BLACKWELL = Multiprocessor("Blackwell", 228, 1, 64, 32)
_THOR = Multiprocessor("Blackwell", 228, 1, 48, 24)
_BLACKWELL_GEFORCE = Multiprocessor("Blackwell", 100, 1, 48, 24)

_TABLE = {
    "75": _TURING,
    "80": _AMPERE,
    "86": _AMPERE_GEFORCE,
    "87": _ORIN,
    "88": _AMPERE_GEFORCE,
    "89": _ADA,
    "90": _HOPPER,
    "90a": _HOPPER,
    "100": _BLACKWELL,
    "103": _BLACKWELL,
    "110": _THOR,
    "120": _BLACKWELL_GEFORCE,
    "121": _BLACKWELL_GEFORCE,
}
_FAMILIES = {"75": "sm75", "90a": "sm90"}  # all others: sm80, whose instructions every later card has
_MADE_OF = {
    "sm75": "mma.sync of 8 deep, copies through registers; fp16 alone, since its tensor cores know no bf16",
    "sm80": "mma.sync of 16 deep, cp.async",
    "sm90": "wgmma, bulk tensor copies; for what this family lacks, the kernels of sm80",
}
_OWN_MISSING = "none of Blackwell's own"

# Cards that get the code of an older minor version, which is the same, runs on them, and which more toolkits know.
_AS_GOOD = {(8, 8): (8, 6), (10, 3): (10, 0), (12, 1): (12, 0)}


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

    @property
    def made_of(self) -> str:
        """What the kernels that run there are made of, for people."""
        made_of = _MADE_OF[self.family]
        return f"{made_of}; {_OWN_MISSING}" if self.multiprocessor.generation == "Blackwell" else made_of

    @property
    def multiprocessor(self) -> Multiprocessor:
        """What a multiprocessor of this compute capability holds."""
        return _TABLE[self.sm.partition("_")[2]]


def known() -> tuple[str, ...]:
    """Names that `resolve` takes."""
    return tuple(f"sm{number}" for number in _TABLE)


def resolve(name: str) -> Arch:
    """The target called `name`: "sm90", "sm_90", "9.0" or any of these with "+PTX". SpecError for any other."""
    pattern = r"(?:sm_?(\d{2,3}[af]?)|(\d{1,2})\.(\d[af]?))(\+ptx)?"
    match = re.fullmatch(pattern, name.strip().lower()) if isinstance(name, str) else None
    if not match:
        raise SpecError(f"unknown architecture {name!r}; known: {', '.join(known())} (also written 9.0, or 9.0+PTX)")
    number = match[1] or match[2] + match[3]
    if number not in _TABLE:
        raise SpecError(f"unknown architecture {name!r}; known: {', '.join(known())}")
    ptx_only = match[4] is not None
    multiprocessor = _TABLE[number]
    return Arch(
        name=f"sm{number}" + ("+ptx" if ptx_only else ""),
        sm=f"compute_{number}" if ptx_only else f"sm_{number}",
        family=_FAMILIES.get(number, "sm80"),
        smem_limit=(multiprocessor.shared_kib - multiprocessor.system_kib) * KIB,
        ptx_only=ptx_only,
    )


def for_capability(capability: tuple[int, int]) -> Arch:
    """The target for a card of this compute capability: the newest of the same major version that it can run.

    A card without a target of its own major version gets the PTX of the newest older target, for its driver to compile.
    """
    if capability == (9, 0):
        return resolve("sm90a")  # its instructions exist on this compute capability alone
    major, minor = _AS_GOOD.get(capability, capability)
    numbers = sorted((int(number[:-1]), int(number[-1])) for number in _TABLE if number.isdigit())
    same = [number for number in numbers if number[0] == major and number[1] <= minor]
    if same:
        return resolve(f"{same[-1][0]}.{same[-1][1]}")
    older = [number for number in numbers if number < (major, minor)]
    if not older:
        raise SpecError(f"compute capability {major}.{minor} is older than any target: {', '.join(known())}")
    return resolve(f"{older[-1][0]}.{older[-1][1]}+PTX")


def why(capability: tuple[int, int]) -> str:
    """Why `for_capability` chooses as it does, for people. Raises SpecError as it does."""
    chosen = for_capability(capability)
    if capability == (9, 0):
        return "instructions that this capability alone has"
    if capability in _AS_GOOD:
        return "a target of its own would be the same, and fewer toolkits know it"
    if chosen.ptx_only:
        return f"no target of major version {capability[0]}: the driver compiles the PTX of the newest older one"
    return "its own" if chosen.capability == capability else "the newest that runs there"


def capabilities() -> tuple[tuple[int, int], ...]:
    """The compute capabilities that have targets of their own, oldest first."""
    return tuple(sorted({resolve(name).capability for name in known()}))


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
