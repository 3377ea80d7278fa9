"""Which architecture to build for when none is named."""

from __future__ import annotations

from fagen import env
from fagen.arch import Arch, for_capability, parse_list, resolve
from fagen.driver import gpus

FALLBACK = "sm80"


def gpu_capability() -> tuple[int, int] | None:
    """Compute capability of the first card; None without one."""
    cards = gpus()
    return cards[0].capability if cards else None


def default_archs() -> tuple[tuple[Arch, ...], str]:
    """The targets to build for when none is named, and where they come from.

    The card's; without one FAGEN_ARCH, then TORCH_CUDA_ARCH_LIST, then sm80, which every served card newer than it runs
    the templates of. The second value is "the GPU", the variable's name, or "" for the fallback.
    """
    capability = gpu_capability()
    if capability is not None:
        return (for_capability(capability),), "the GPU"
    for name, value in (("FAGEN_ARCH", env.arch()), ("TORCH_CUDA_ARCH_LIST", env.torch_cuda_arch_list())):
        if value is not None:
            return parse_list(value), name
    return (resolve(FALLBACK),), ""
