"""Loads cubins and launches kernels through the CUDA driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fagen.errors import LaunchError, ToolchainError

MAX_GRID = 2**31 - 1
_MOST_CONFIGS = 256  # prepared configurations of a kernel's launches


class CudaKernel:
    """One kernel of one cubin (or PTX file, compiled by the driver), loaded into a device's primary context."""

    def __init__(self, binary: Path | bytes, entry: str, device: int, smem_bytes: int, overlaps: bool = False) -> None:
        """`binary`: the file, or what it holds. `overlaps`: it may start before the kernel before it in its stream has
        ended, for which it waits itself."""
        driver = self._driver = _driver()
        handle = _check(driver.cuDeviceGet(device))
        self._context = _check(driver.cuDevicePrimaryCtxRetain(handle))
        image = binary if isinstance(binary, bytes) else binary.read_bytes()
        image += b"\0"  # PTX is text and must end in NUL; a cubin knows its own length
        with self._current():
            self._module = _check(driver.cuModuleLoadData(image))
            self._function = _check(driver.cuModuleGetFunction(self._module, entry.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(self._function, attribute, smem_bytes))
        self.device = device
        self._smem_bytes = smem_bytes
        self._handle = int(self._context)
        # Looked up once: a launch is a matter of a microsecond.
        self._get_current = driver.cuCtxGetCurrent
        self._launch = self._launch_overlapping if overlaps else driver.cuLaunchKernel
        self._configs: dict[tuple[int, ...], Any] = {}
        self._success = driver.CUresult.CUDA_SUCCESS

    def launch(self, *, grid: int, threads: int, params: bytes, stream: int) -> None:
        """Queues the kernel on `stream` (a CUstream's address). Raises LaunchError where the driver refuses."""
        # The driver copies the parameters before it returns; a buffer a call keeps concurrent callers apart.
        buffer = ctypes.create_string_buffer(params, len(params))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
        self.launch_at(grid, threads, ctypes.addressof(pointers), stream)

    def launch_at(self, grid: int, threads: int, pointers: int, stream: int) -> None:
        """`launch` with the address of the array that holds the address of the parameter struct."""
        if not 0 < grid <= MAX_GRID:
            raise LaunchError(f"{grid} blocks in one launch; a grid has from 1 to {MAX_GRID}")
        # The kernel's context is current but for rare cases: another device's, or a thread that has none yet.
        error, context = self._get_current()
        if error is self._success and int(context) == self._handle:
            (error,) = self._launch(self._function, grid, 1, 1, threads, 1, 1, self._smem_bytes, stream, pointers, 0)
            if error is not self._success:
                _check((error,))
            return
        with self._current():
            _check(self._launch(self._function, grid, 1, 1, threads, 1, 1, self._smem_bytes, stream, pointers, 0))

    def _launch_overlapping(self, function: Any, *sizes_and_stream: int) -> tuple[Any]:
        """cuLaunchKernel, as far as this file uses it, with programmatic stream serialization."""
        *sizes, pointers, extra = sizes_and_stream
        config = self._configs.get(tuple(sizes))
        if config is None:
            config = self._overlapping(*sizes)
            if len(self._configs) >= _MOST_CONFIGS:
                self._configs.clear()
            self._configs[tuple(sizes)] = config
        return self._driver.cuLaunchKernelEx(config, function, pointers, extra)  # type: ignore[no-any-return]

    def _overlapping(self, *sizes: int) -> Any:
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ, *block, config.sharedMemBytes, config.hStream = sizes
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.attrs, config.numAttrs = [attribute], 1
        return config

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes the kernel's context current meanwhile."""
        driver = self._driver
        _check(driver.cuCtxPushCurrent(self._context))
        try:
            yield
        finally:
            _check(driver.cuCtxPopCurrent())


def current_stream(device: int) -> int:
    """Address of PyTorch's current stream of a device."""
    if _RAW_STREAM is not None:
        return _RAW_STREAM(device)
    return torch.cuda.current_stream(device).cuda_stream


# PyTorch's own way to the address, without a Stream object around it: ten times as fast.
_RAW_STREAM: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_INIT_LOCK = threading.Lock()


def _driver() -> Any:
    """The driver's bindings, initialised."""
    driver = _bindings()
    with _INIT_LOCK:
        _check(driver.cuInit(0), driver)
    return driver


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise ToolchainError("launching on a GPU needs cuda-bindings: pip install 'fagen[cuda]'") from None
    return driver


def _check(result: tuple[Any, ...], driver: Any = None) -> Any:
    """The value of a driver call's (error, value...); LaunchError unless the error is CUDA_SUCCESS."""
    error, *values = result
    if int(error) != 0:
        driver = driver or _bindings()
        _, text = driver.cuGetErrorString(error)
        raise LaunchError(f"CUDA driver: {error.name}: {text.decode() if text else 'no description'}")
    return values[0] if values else None
