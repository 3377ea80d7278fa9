"""Compiles one file with NVRTC, in process or as a ninja edge: `python -I -S nvrtc.py LIBRARY SOURCE BINARY FLAG...`.

The library is opened by the path that `fagen.toolchain` found, so the version in an artifact's key is that of the code
which compiled it. Only the standard library is imported: opening NVRTC this way takes 5 ms, `cuda.bindings.nvrtc` with
its own search 140 ms, and every edge and every look-up in the cache would pay it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

_SUCCESS = 0
_COMPILATION = 6  # NVRTC_ERROR_COMPILATION: the program's fault, explained in its log

_Handle = ctypes.c_void_p
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "nvrtcVersion": (ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int)),
    "nvrtcGetNumSupportedArchs": (ctypes.POINTER(ctypes.c_int),),
    "nvrtcGetSupportedArchs": (ctypes.POINTER(ctypes.c_int),),
    "nvrtcCreateProgram": (
        ctypes.POINTER(_Handle),
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ),
    "nvrtcDestroyProgram": (ctypes.POINTER(_Handle),),
    "nvrtcCompileProgram": (_Handle, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    **{
        name: (_Handle, argument)
        for kind in ("ProgramLog", "CUBIN", "PTX")
        for name, argument in (
            (f"nvrtcGet{kind}Size", ctypes.POINTER(ctypes.c_size_t)),
            (f"nvrtcGet{kind}", ctypes.c_char_p),
        )
    },
}


class NvrtcError(Exception):
    """NVRTC refused the program; the text is its log, or the name of its error where there is no log."""


class Nvrtc:
    """An opened NVRTC library. Raises OSError where the file is not one."""

    def __init__(self, library: str) -> None:
        self._path = library
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            try:
                function = getattr(self._library, name)
            except AttributeError as error:
                raise OSError(f"{library} has no {name}: not NVRTC, or older than CUDA 11.2") from error
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """CUDA version, (13, 0)."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def architectures(self) -> tuple[int, ...]:
        """Numbers of the architectures that it compiles for, (75, 80, ...)."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(numbers)

    def compile(self, source: bytes, name: str, flags: Sequence[str], ptx: bool) -> tuple[bytes, str]:
        """The cubin (or PTX text) of `source`, and the log. `name` is what the log calls the file.

        Raises NvrtcError.
        """
        self._preload_builtins()
        program = _Handle()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source, os.fsencode(name), 0, None, None)
        try:
            options = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
            status = self._library.nvrtcCompileProgram(program, len(flags), options)
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if status != _SUCCESS:
                raise NvrtcError(log if status == _COMPILATION and log else f"{self._name(status)}\n{log}".rstrip())
            return self._read(program, "PTX" if ptx else "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _preload_builtins(self) -> None:
        # NVRTC opens its second library by bare name, which fails where the directory is not on the loader's path, as
        # in the pip package of CUDA 13.0; a library of that name that is already open is found.
        major, minor = self.version()
        sibling = os.path.join(os.path.dirname(os.path.realpath(self._path)), f"libnvrtc-builtins.so.{major}.{minor}")
        if os.path.isfile(sibling):
            ctypes.CDLL(sibling)

    def _read(self, program: ctypes.c_void_p, kind: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{kind}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, function)(*arguments)
        if status != _SUCCESS:
            raise NvrtcError(f"{function}: {self._name(status)}")

    def _name(self, status: int) -> str:
        name: bytes = self._library.nvrtcGetErrorString(status)
        return name.decode()


def main(arguments: Sequence[str]) -> int:
    """One edge: compiles, prints the log, and writes the binary. Returns the exit status."""
    library, source, binary, *flags = arguments
    try:
        with open(source, "rb") as file:
            text = file.read()
        data, log = Nvrtc(library).compile(text, os.path.basename(source), flags, ptx=binary.endswith(".ptx"))
    except (NvrtcError, OSError) as error:
        print(error)
        return 1
    with open(binary, "wb") as file:
        file.write(data)
    print(log)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
