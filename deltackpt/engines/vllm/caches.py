"""What a vLLM server keeps beside its weights, and what is dropped when they change.

`/pause` with mode=keep, our default, ignores its clear_cache; so each cache is dropped by its own route.
"""

from __future__ import annotations

import time

from deltackpt.engines.clients.http import Http
from deltackpt.errors import ChainError

PATIENCE = 5.0  # seconds for blocks that are held by transfers under way
_RETRY = 0.1

# Of the prefix cache: requests that are paused are computed anew, or the blocks that they hold would stay; and what a
# connector has put into other tiers (the host's memory, disks, other hosts) goes too.
PREFIX = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
# What an image was encoded to, on the engine's side and on the processor's: by the old encoder.
ENCODED = ("/reset_encoder_cache", "/reset_mm_cache")


def drop_caches(http: Http, name: str) -> None:
    """Raises ChainError ``engine-refused`` where one of them stays, and what `Http` raises."""
    end = time.monotonic() + PATIENCE
    while not _dropped(http):
        if time.monotonic() > end:
            raise ChainError("engine-refused", where=name, have="a prefix cache that stays", need="an empty one")
        time.sleep(_RETRY)
    for route in ENCODED:
        http.post(route)


def _dropped(http: Http) -> bool:
    answer = http.post(PREFIX)
    return not (isinstance(answer, dict) and answer.get("success") is False)
