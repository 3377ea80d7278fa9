"""Runs kernels that were built for the CPU: loads the library, launches it, and turns a fault into a readable error."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

from fagen import env
from fagen.errors import LaunchError

_MESSAGE_BYTES = 4096
_MOST_DEFAULT_THREADS = 8  # beyond that the caches that the blocks share are what counts
_LINE = re.compile(r"\bline (\d+)\b")
_U32_MAX = 2**32 - 1


class _Range(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("writable", ctypes.c_uint64))


_ARGUMENTS = (
    ctypes.c_char_p,  # params
    ctypes.c_size_t,
    ctypes.c_uint32,  # grid
    ctypes.c_uint32,  # threads
    ctypes.c_uint32,  # shared memory
    ctypes.POINTER(_Range),
    ctypes.c_uint32,
    ctypes.c_uint64,  # seed
    ctypes.c_uint32,  # OS threads
    ctypes.c_char_p,  # message
    ctypes.c_size_t,
)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class EmulatedKernel:
    """A kernel compiled for the CPU. `library` is its shared library, with its source `kernel.cpp` beside it.

    Raises LaunchError if the library cannot be loaded here.
    """

    def __init__(self, library: Path, entry: str) -> None:
        self.entry = entry
        self._source = library.with_name("kernel.cpp")
        try:
            self._launch = ctypes.CDLL(str(library)).fagen_emulate_launch
        except (OSError, AttributeError) as error:
            raise LaunchError(f"{entry}: cannot load the emulated kernel: {error}") from error
        self._launch.argtypes = _ARGUMENTS
        self._launch.restype = ctypes.c_int

    def launch(
        self,
        *,
        grid: int,
        threads: int,
        smem_bytes: int,
        params: bytes,
        ranges: Sequence[tuple[int, int, bool]],
        seed: int | None = None,
    ) -> None:
        """Runs `grid` blocks of `threads` threads, each with `smem_bytes` of shared memory, and waits for them.

        `params` are the bytes of the kernel's parameter struct. `ranges` are (address, bytes, writable) of every tensor
        that the kernel may touch, exact to the byte; the tensors must stay alive and in place. `seed` shuffles the
        order in which threads run between barriers; 0 is lane order, None takes FAGEN_EMULATE_SEED or else 0. A kernel
        without races gives the same result for every seed. The GIL is released meanwhile.

        Raises LaunchError for a fault of the kernel: its line in the generated file, block, warp and lane, what it did,
        and the lines concerned. Outputs are then undefined; the kernel can be launched again.
        """
        if seed is None:
            seed = env.emulate_seed() or 0
        if not 0 < grid <= _U32_MAX:
            raise LaunchError(f"{self.entry}: a grid of {grid} blocks; it must be from 1 to {_U32_MAX}")
        os_threads = env.emulate_threads() or min(_cores(), _MOST_DEFAULT_THREADS)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        status = self._launch(
            params,
            len(params),
            grid,
            threads,
            smem_bytes,
            (_Range * len(ranges))(*(_Range(*entry) for entry in ranges)),
            len(ranges),
            seed,
            os_threads,
            message,
            _MESSAGE_BYTES,
        )
        if status:
            raise LaunchError(self._quote(message.value.decode(errors="replace")))

    def _quote(self, message: str) -> str:
        """The message, then the source lines that it names, where the source can be read, and where they are."""
        try:
            source = self._source.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            return message
        numbers = [number for number in map(int, dict.fromkeys(_LINE.findall(message))) if 0 < number <= len(source)]
        if not numbers:
            return message
        quotes = [f"{number:>6} | {source[number - 1]}" for number in numbers]
        return "\n".join([message, *quotes, f"  in {self._source}"])
