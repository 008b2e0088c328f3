"""Answers of HTTP servers, read whole, and not for longer than was agreed."""

from __future__ import annotations

import http.client
import time
from typing import Any

_TOGETHER = 1 << 20  # bytes of a read


def read_whole(answer: Any, most: int, seconds: float) -> bytes:
    """At most ``most`` bytes of what `urllib.request` has opened.

    A socket's own timeout is for each of its packets: a server that sends one now and then would be waited for
    without an end. Raises TimeoutError after ``seconds``, OSError, http.client.HTTPException for a body that is cut
    short.
    """
    end, found, size = time.monotonic() + seconds, [], 0
    while size < most and (data := answer.read1(min(most - size, _TOGETHER))):
        found.append(data)
        size += len(data)
        if time.monotonic() > end:
            raise TimeoutError(f"timed out after {seconds:g} s, with {size:,} bytes of an answer")
    whole = b"".join(found)
    if size < most and answer.length:
        raise http.client.IncompleteRead(whole, answer.length)
    return whole
