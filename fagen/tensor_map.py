"""Tensor maps: what the copy engine of Hopper knows of a tensor, as the driver encodes or the emulator reads it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from fagen.errors import LaunchError
from fagen.params import MAP_BYTES

_ELEMENT_BYTES = 2
_BOX_COLUMNS = 64  # 128 bytes: the span of the swizzle
_EMULATED_MAGIC = 0x70616D5F6E656761  # as in templates/emulate/tma.hpp
_SWIZZLE_128B = 3
_MOST_ADDRESSES = 1024  # maps kept a tensor: allocators bring back the same few addresses


class TensorMap:
    """The map of one (batch, row, head, dim) tensor of 16-bit elements, but for its address.

    Boxes are 64 columns of `box_rows` rows of one head, with the 128-byte swizzle.
    """

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], box_rows: int, *, is_half: bool, emulate: bool
    ) -> None:
        """`shape` and `strides`, in elements, are of (batch, row, head, dim); strides of entries of one are ignored."""
        batch, rows, heads, dim = shape
        self._sizes = [dim, rows, heads, batch]
        given = (strides[1], strides[2], strides[0])
        # Along a dimension of one entry the stride means nothing and may be what no map can hold.
        self._strides = [
            (stride if size > 1 else dim) * _ELEMENT_BYTES for size, stride in zip(self._sizes[1:], given, strict=True)
        ]
        self._box = [_BOX_COLUMNS, box_rows, 1, 1]
        self._is_half = is_half
        self._encode = self._emulated if emulate else self._encoded
        self._made: dict[int, bytes] = {}

    def at(self, address: int) -> bytes:
        """The 128 bytes of the map for a tensor at `address`. Raises LaunchError where the driver refuses."""
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= _MOST_ADDRESSES:
                self._made.clear()
            made = self._made[address] = self._encode(address)
        return made

    def _emulated(self, address: int) -> bytes:
        box = sum(size << 16 * index for index, size in enumerate(self._box))
        kind = _SWIZZLE_128B | _ELEMENT_BYTES << 8
        words = (_EMULATED_MAGIC, address, *self._sizes, *self._strides, box, kind)
        return struct.pack(f"<{len(words)}Q", *words).ljust(MAP_BYTES, b"\0")

    def _encoded(self, address: int) -> bytes:
        from cuda.bindings import driver

        types, counts = driver.CUtensorMapDataType, driver.cuuint64_t
        error, made = driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if self._is_half else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            4,
            address,
            [counts(size) for size in self._sizes],
            [counts(stride) for stride in self._strides],
            [driver.cuuint32_t(size) for size in self._box],
            [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(error) != 0:
            raise LaunchError(f"CUDA driver: {error.name} for a tensor map of {self._described()}")
        return _words(made)

    def _described(self) -> str:
        return f"sizes {self._sizes} and strides of {self._strides} bytes"


def _words(made: Any) -> bytes:
    return struct.pack("<16Q", *(int(word) for word in made.opaque))
