"""Named tensors in one file, .npz for NumPy or .safetensors, without either library."""

from __future__ import annotations

import ctypes
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from fagen.errors import SpecError

SUFFIXES = (".npz", ".safetensors")

# What NumPy and safetensors call a dtype.
_NAMES = {torch.float32: ("<f4", "F32"), torch.float64: ("<f8", "F64"), torch.int64: ("<i8", "I64")}


def check_path(flag: str, path: Path) -> None:
    """Before a long computation: SpecError that names `flag` for a path that could not be written."""
    if path.suffix not in SUFFIXES:
        raise SpecError(f"{flag} {str(path)!r} is not named {' or '.join(SUFFIXES)}")
    if path.is_dir():
        raise SpecError(f"{flag} {str(path)!r} is a folder, not a file")
    if not path.absolute().parent.is_dir():
        raise SpecError(f"{flag} {str(path)!r}: there is no folder {path.parent}")


def save(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes float32, float64 and int64 tensors in the format that the suffix of `path` names."""
    (_save_npz if path.suffix == ".npz" else _save_safetensors)(path, tensors)


def _bytes(tensor: torch.Tensor) -> bytes:
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def _save_npz(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A zip file of NumPy's format 1.0 (numpy.lib.format): magic, length of the header, header padded to 64, data."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, tensor in tensors.items():
            header = str({"descr": _NAMES[tensor.dtype][0], "fortran_order": False, "shape": tuple(tensor.shape)})
            padding = -(10 + len(header) + 1) % 64
            text = (header + " " * padding + "\n").encode("latin1")
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + _bytes(tensor))


def _save_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Length of a JSON header, the header with each tensor's dtype, shape and place, the data."""
    header: dict[str, object] = {}
    parts: list[bytes] = []
    end = 0
    for name, tensor in tensors.items():
        parts.append(_bytes(tensor))
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": _NAMES[tensor.dtype][1], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *parts]))
