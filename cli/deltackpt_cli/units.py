"""Durations, sizes and rates as people write them: one parser of each, for every option of every command."""

from __future__ import annotations

import math
import re
from datetime import datetime

from deltackpt.errors import UsageError

DURATIONS = "a time in seconds (90, 0.5), or with a unit: 500ms, 90s, 20m, 6h, 7d; at most 100000d"
MOMENTS = "a time ago (90m, 6h, 7d), or a date (2026-11-28, 2026-11-28T18:00)"
SIZES = "a size in bytes (500000), or with a unit: 64KB, 500MB, 20GB, 16GiB"
RATES = "a rate in bytes a second (500000), or with a unit: 500KB/s, 100MB/s, 12MiB/s"

LONGEST = 100_000 * 86_400.0  # seconds: what a thread can wait

_NUMBER = r"(\d{1,12}(?:\.\d{1,6})?)"
_DURATION = re.compile(_NUMBER + r"\s?(ms|s|m|h|d)?")
_SIZE = re.compile(_NUMBER + r"\s?(?:([kmgt])(i?))?b?", re.IGNORECASE)
_SECONDS = {None: 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
_POWERS = {None: 0, "k": 1, "m": 2, "g": 3, "t": 4}


def duration(value: str, option: str) -> float:
    """Seconds: a plain number of them, or one with a unit: ms, s, m, h or d.

    ``option`` is what the value was given for. Raises UsageError ``usage`` for anything else.
    """
    found = _DURATION.fullmatch(value.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found is not None else math.inf
    if seconds > LONGEST:
        raise _unreadable(value, option, DURATIONS)
    return seconds


def whole_seconds(value: str, option: str) -> int:
    """`duration` for what counts in whole seconds: a fraction is rounded up."""
    return math.ceil(duration(value, option))


def moment(value: str, option: str, now: float) -> float:
    """Seconds since 1970: of a `duration` before ``now``, or of a date, or date and time, by the clock of this place.

    ``option`` is what the value was given for. Raises UsageError ``usage`` for anything else.
    """
    try:
        return now - duration(value, option)
    except UsageError:
        try:
            return datetime.fromisoformat(value.strip()).timestamp()
        except (ValueError, OverflowError, OSError):
            raise _unreadable(value, option, MOMENTS) from None


def size(value: str, option: str) -> int:
    """Bytes, one at least: a plain number of them, or one with a unit: KB, MB, GB and TB, or KiB and so on.

    ``option`` is what the value was given for. Raises UsageError ``usage`` for anything else.
    """
    return _bytes(value, option, SIZES)


def rate(value: str, option: str) -> float:
    """Bytes a second: a size, with or without ``/s`` behind it. Raises UsageError ``usage`` for anything else."""
    return float(_bytes(value.strip().removesuffix("/s"), option, RATES, value))


def _bytes(value: str, option: str, need: str, given: str | None = None) -> int:
    found = _SIZE.fullmatch(value.strip())
    count = 0
    if found is not None:
        unit = found[2].lower() if found[2] else None
        count = int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[unit])
    if count < 1:
        raise _unreadable(value if given is None else given, option, need)
    return count


def _unreadable(value: str, option: str, need: str) -> UsageError:
    return UsageError("usage", where=option, have=repr(value)[:40], need=need)
