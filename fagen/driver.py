"""What the NVIDIA driver says of itself and its cards, through its library alone: importing bindings takes longer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_LIBRARY = "libcuda.so.1"
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One card, as the driver describes it."""

    name: str
    capability: tuple[int, int]


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver here supports, (13, 0); None without a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
        number = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return number.value // 1000, number.value % 1000 // 10


def gpus() -> list[Gpu]:
    """The cards that the driver shows; none without a driver."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
        count = ctypes.c_int()
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return []
        return [_describe(driver, index) for index in range(count.value)]
    except (OSError, AttributeError):
        return []


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        number = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return Gpu(name.value.decode(errors="replace"), (numbers[0], numbers[1]))
