"""What code written for the `flash_attn` package imports, on fagen's kernels.

Either import from here (`from fagen.compat.flash_attn import flash_attn_func`) or call `install()` once, after which
`import flash_attn` means this package in the whole process. docs/flash-attention.md lists what differs.
"""

from __future__ import annotations

import sys
from importlib import import_module

from fagen.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from fagen.errors import SpecError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
]

# The release of flash-attention whose calls these are: code compares it.
__version__ = "2.8.4"

_MODULES = ("", ".bert_padding", ".flash_attn_interface", ".layers", ".layers.rotary")


def install() -> None:
    """Makes `import flash_attn` and its submodules mean this package, in this process.

    Raises SpecError where another `flash_attn` has been imported before: some code would keep its functions.
    """
    present = sys.modules.get("flash_attn")
    if present is not None and present is not sys.modules[__name__]:
        raise SpecError(f"flash_attn is imported already, from {present.__file__}: call install() before")
    for name in _MODULES:
        sys.modules[f"flash_attn{name}"] = import_module(f"{__name__}{name}")
