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


# Rows of packed sequences lie in a dimension that ends here for each of them: row i of a sequence of n rows that begins
# at row b is at (ROW_END - n + i, b + n, ROW_END) of three dimensions with strides s, s and 2^34 - s bytes. Addresses
# count modulo 2^64, so ROW_END * 2^34 is nothing, and what remains is (b + i) * s; but a row past the n is out of
# bounds.
ROW_END = 1 << 30
_ROW_SPAN = 1 << 34
_MOST_ROWS = 1 << 31  # the size of the dimensions whose bounds do not matter


class TensorMap:
    """The map of a tensor of 16-bit elements but for its address: (batch, row, head, dim), or packed (row, head, dim).

    Boxes are 64 columns of `box_rows` rows of one head, with the 128-byte swizzle. Coordinates are (dim, row, head,
    batch), or those of ROW_END: (dim, ROW_END - n + i, head, b + n, ROW_END).
    """

    def __init__(
        self, shape: Sequence[int], strides: Sequence[int], box_rows: int, *, is_half: bool, emulate: bool
    ) -> None:
        """`shape` and `strides` in elements; strides of dimensions of one entry are ignored."""
        *_, dim = shape
        # Along a dimension of one entry the stride means nothing and may be what no map can hold.
        steps = [
            (stride if size > 1 else dim) * _ELEMENT_BYTES
            for size, stride in zip(shape[:-1], strides[:-1], strict=True)
        ]
        if len(shape) == 4:
            batch, rows, heads, _ = shape
            self._sizes = [dim, rows, heads, batch]
            self._strides = [steps[1], steps[2], steps[0]]
        else:
            if steps[0] >= _ROW_SPAN:
                raise LaunchError(
                    f"rows of packed sequences {steps[0]} bytes apart; a tensor map has less than {_ROW_SPAN}"
                )
            self._sizes = [dim, ROW_END, shape[1], _MOST_ROWS, _MOST_ROWS]
            self._strides = [steps[0], steps[1], steps[0], _ROW_SPAN - steps[0]]
        self._box = [_BOX_COLUMNS, box_rows, *[1] * (len(self._sizes) - 2)]
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
        return emulated_map(address, self._sizes, self._strides, self._box, _ELEMENT_BYTES, _SWIZZLE_128B)

    def _encoded(self, address: int) -> bytes:
        from cuda.bindings import driver

        types, counts = driver.CUtensorMapDataType, driver.cuuint64_t
        error, made = driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if self._is_half else types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(self._sizes),
            address,
            [counts(size) for size in self._sizes],
            [counts(stride) for stride in self._strides],
            [driver.cuuint32_t(size) for size in self._box],
            [driver.cuuint32_t(1)] * len(self._sizes),
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


def emulated_map(
    address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], element_bytes: int, swizzle: int
) -> bytes:
    """What templates/emulate/tma.hpp reads of 4 or 5 dimensions: sizes and box innermost first, strides of all but the
    first in bytes, swizzle 0 to 3."""
    missing = 5 - len(sizes)
    boxes = [*box, *[1] * missing]
    low = sum(size << 16 * index for index, size in enumerate(boxes[:4]))
    kind = swizzle | element_bytes << 8 | len(sizes) << 16
    words = (_EMULATED_MAGIC, address, *sizes, *[1] * missing, *strides, *[0] * missing, low, boxes[4], kind)
    return struct.pack(f"<{len(words)}Q", *words).ljust(MAP_BYTES, b"\0")


def _words(made: Any) -> bytes:
    return struct.pack("<16Q", *(int(word) for word in made.opaque))
