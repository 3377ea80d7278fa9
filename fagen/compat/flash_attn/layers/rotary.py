"""`flash_attn.layers.rotary`: a name to import; fagen has no rotary embedding."""

from __future__ import annotations

from typing import Any, NoReturn

from fagen.errors import SpecError


def apply_rotary_emb(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises SpecError: fagen has attention kernels only."""
    raise SpecError("apply_rotary_emb is not served: fagen has attention kernels only; rotate q and k before the call")
