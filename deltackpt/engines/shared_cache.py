"""The managed cache of a host, as its engines share it: one process moves it, the others find it moved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from deltackpt.cache import Cache, apply_to_cache, open_current
from deltackpt.cache.cache import lock_cache
from deltackpt.errors import CheckpointError, ConflictError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository

LOCK_TIMEOUT = 600.0  # seconds to wait for another process that moves the cache
_RETRY = 0.05  # seconds between two tries

T = TypeVar("T")


def ensure_cached(
    repo: Repository, cache: str | os.PathLike[str], link: Link, lock_timeout: float = LOCK_TIMEOUT
) -> None:
    """Move the cache to a step, unless it is there. Waits up to ``lock_timeout`` seconds for another process that moves
    it; raises what `apply_to_cache` raises."""
    retry_while_locked(lambda: _ensure(repo, cache, link), lock_timeout)


def _ensure(repo: Repository, cache: str | os.PathLike[str], link: Link) -> None:
    try:
        if open_current(cache)[1] == link:
            return
    except (NotFoundError, CheckpointError):
        pass
    apply_to_cache(repo, cache, f"{link.step}-{link.id}")


def retry_while_locked(work: Callable[[], T], lock_timeout: float = LOCK_TIMEOUT) -> T:
    """Try again as long as another process holds the cache, up to ``lock_timeout`` seconds."""
    end = time.monotonic() + lock_timeout
    while True:
        try:
            return work()
        except ConflictError as error:
            if error.code != "cache-locked" or time.monotonic() > end:
                raise
            time.sleep(_RETRY)


@contextmanager
def read_locked(cache: str | os.PathLike[str]) -> Iterator[Cache]:
    """The cache under a shared lock: any number of readers, and a process that wants to move it waits.

    Raises ConflictError ``cache-locked`` while it is being moved.
    """
    held = Cache(Path(cache))
    with lock_cache(held, shared=True, need="a cache that stands still", hint="Try again."):
        yield held


@contextmanager
def reading(cache: str | os.PathLike[str], lock_timeout: float = LOCK_TIMEOUT) -> Iterator[Cache]:
    """`read_locked`, which waits up to ``lock_timeout`` seconds for a process that moves the cache."""
    with ExitStack() as stack:
        yield retry_while_locked(lambda: stack.enter_context(read_locked(cache)), lock_timeout)
