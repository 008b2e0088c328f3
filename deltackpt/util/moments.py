"""Moments as people read them."""

from __future__ import annotations

import time

ISO = "%Y-%m-%dT%H:%M:%SZ"


def utc(seconds: float, form: str = ISO) -> str:
    """Seconds since 1970 as UTC; times outside of what calendars hold as the number."""
    try:
        return time.strftime(form, time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return str(seconds)
