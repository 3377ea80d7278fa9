"""Kernel parameters: one field list gives the C struct's text, its packing from Python and its size."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fagen.errors import LaunchError

_FORMATS = {"i64": "q", "int": "i", "u32": "I", "float": "f"}
MAP_BYTES, _MAP_ALIGNMENT = 128, 64  # of a TensorMap


@dataclass(frozen=True)
class Field:
    """One member of the parameter struct: a C type (TensorMap, i64, int, u32, float or any pointer) and a name.

    `note` becomes its comment in the generated file.
    """

    name: str
    ctype: str
    note: str = ""

    @property
    def format(self) -> str:
        """Format character of the struct module; a pointer is packed as its address."""
        if self.is_map:
            return f"{MAP_BYTES}s"
        return "Q" if self.ctype.endswith("*") else _FORMATS[self.ctype]

    @property
    def is_map(self) -> bool:
        """The member is a tensor map."""
        return self.ctype.removeprefix("const ") == "TensorMap"

    @property
    def is_tensor(self) -> bool:
        """A call gives the member from a tensor: its address, or a map of it."""
        return self.ctype.endswith("*") or self.is_map

    @property
    def declaration(self) -> str:
        """The C declaration of the member."""
        note = f"  // {self.note}" if self.note else ""
        return f"{self.ctype} {self.name};{note}"


class ParamStruct:
    """The parameter struct of one kernel. The widest members come first, so that C and Python agree without padding."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self.fields = tuple(sorted(fields, key=lambda field: -struct.calcsize("=" + field.format)))
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise ValueError(f"two parameters of one name among {names}")
        self._packer = struct.Struct("<" + "".join(field.format for field in self.fields))

    @property
    def size(self) -> int:
        """sizeof(Params): a multiple of its alignment, the trailing padding of C included."""
        alignment = _MAP_ALIGNMENT if any(field.is_map for field in self.fields) else 8
        return -(-self._packer.size // alignment) * alignment

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """The bytes of the struct. Every field must have a value, and no other name may."""
        try:
            ordered = [values[field.name] for field in self.fields]
        except KeyError as missing:
            raise LaunchError(f"no value for the kernel parameter {missing}") from None
        if len(values) != len(self.fields):
            extra = sorted(set(values) - {field.name for field in self.fields})
            raise LaunchError(f"the kernel has no parameters {', '.join(extra)}")
        try:
            return self._packer.pack(*ordered).ljust(self.size, b"\0")
        except (struct.error, OverflowError) as error:
            raise LaunchError(f"a kernel parameter is out of range: {error}") from None
