"""Bytes, rates and times as people write them."""

from __future__ import annotations

import re

from deltackpt.errors import UsageError

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_TIMES = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def size(value: str, where: str) -> int:
    """Bytes such as 500000, 20GB or 16GiB."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,3})?)\s?([kmgt]?i?)b?", value.strip(), re.IGNORECASE)
    if (
        found is None
        or found[2].lower() not in _BYTES
        or not (count := int(float(found[1]) * _BYTES[found[2].lower()]))
    ):
        raise UsageError("usage", where=where, have=repr(value)[:40], need="a size such as 20GB or 16GiB")
    return count


def rate(value: str, where: str) -> float:
    """Bytes a second such as 100MB/s or 12MiB."""
    return float(size(value.strip().removesuffix("/s"), where))


def seconds(value: str, where: str) -> float:
    """A time such as 1s, 500ms or 2m."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s?(ms|s|m|h)?", value.strip())
    if found is None:
        raise UsageError("usage", where=where, have=repr(value)[:40], need="a time such as 1s, 500ms or 2m")
    return float(found[1]) * _TIMES[found[2] or ""]
