"""Which architecture to build for when none is named."""

from __future__ import annotations

from fagen import env
from fagen.arch import Arch, for_capability, parse_list, resolve

FALLBACK = "sm80"


def gpu_capability(device: int = 0) -> tuple[int, int] | None:
    """Compute capability of the card, asked of the driver; None without a card, a driver or cuda-bindings."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    try:
        (error,) = driver.cuInit(0)
        if error != driver.CUresult.CUDA_SUCCESS:
            return None
        error, handle = driver.cuDeviceGet(device)
        if error != driver.CUresult.CUDA_SUCCESS:
            return None
        attribute = driver.CUdevice_attribute
        _, major = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle)
        _, minor = driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle)
    except RuntimeError:  # cuda-bindings found no driver library to load
        return None
    return int(major), int(minor)


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
