"""fagen turns a description of an attention kernel into that kernel."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Resolved on first use: the command line must start without pydantic, jinja2 or torch.
_HOMES = {
    "AttentionSpec": "fagen.spec",
    "Attention": "fagen.ops",
    "load": "fagen.ops",
    "register_mod": "fagen.registry",
    "load_mods": "fagen.registry",
    "flash_attn_func": "fagen.interface",
    "flash_attn_kvpacked_func": "fagen.interface",
    "flash_attn_qkvpacked_func": "fagen.interface",
    "flash_attn_varlen_func": "fagen.interface",
    "flash_attn_varlen_kvpacked_func": "fagen.interface",
    "flash_attn_varlen_qkvpacked_func": "fagen.interface",
    "flash_attn_with_kvcache": "fagen.interface",
    "FagenError": "fagen.errors",
    "SpecError": "fagen.errors",
    "ToolchainError": "fagen.errors",
    "BuildError": "fagen.errors",
    "CacheError": "fagen.errors",
    "LaunchError": "fagen.errors",
}

__all__ = [
    "Attention",
    "AttentionSpec",
    "BuildError",
    "CacheError",
    "FagenError",
    "LaunchError",
    "SpecError",
    "ToolchainError",
    "__version__",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "load",
    "load_mods",
    "register_mod",
]

if TYPE_CHECKING:
    from fagen.errors import BuildError, CacheError, FagenError, LaunchError, SpecError, ToolchainError
    from fagen.interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from fagen.ops import Attention, load
    from fagen.registry import load_mods, register_mod
    from fagen.spec import AttentionSpec


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fagen' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
