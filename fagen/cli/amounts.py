"""Ages and sizes that people write: `30d`, `12 h`, `2G`, `500 MiB`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from fagen.errors import SpecError

_AGES = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_age(flag: str, text: str) -> float:
    """Seconds. Raises SpecError that names `flag`."""
    seconds = _parse(text, _AGES)
    if seconds is None:
        raise SpecError(f"{flag}: {text!r} is no age; write a number and one of {', '.join(_AGES)}, such as 30d")
    return seconds


def parse_size(flag: str, text: str) -> float:
    """Bytes, in powers of 1024. Raises SpecError that names `flag`."""
    count = _parse(re.sub(r"(?<=[KMGT])(i?B)?$", "", text.strip().upper().replace("IB", "iB")), _SIZES)
    if count is None:
        raise SpecError(f"{flag}: {text!r} is no size; write bytes, or a number and one of K, M, G, T, such as 2G")
    return count


def _parse(text: str, units: Mapping[str, int]) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip(), re.ASCII)
    if match is None or match[2] not in units:
        return None
    value = float(match[1]) * units[match[2]]
    return value if math.isfinite(value) else None
