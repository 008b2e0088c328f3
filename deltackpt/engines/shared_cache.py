"""The managed cache of a host, as its engines share it: whoever is first moves it, the others find it moved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from deltackpt.cache import Cache, apply_to_cache, open_current
from deltackpt.cache.cache import lock_cache
from deltackpt.errors import CheckpointError, ConflictError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository

PATIENCE = 600.0  # seconds to wait for another process that moves the cache
_PAUSE = 0.05

T = TypeVar("T")


def bring(repo: Repository, cache: str | os.PathLike[str], link: Link, patience: float = PATIENCE) -> None:
    """Bring the cache to a step, unless it is there. Waits for another process at it; raises what `apply_to_cache`
    raises."""
    waiting(lambda: _bring(repo, cache, link), patience)


def _bring(repo: Repository, cache: str | os.PathLike[str], link: Link) -> None:
    try:
        if open_current(cache)[1] == link:
            return
    except (NotFoundError, CheckpointError):
        pass
    apply_to_cache(repo, cache, f"{link.step}-{link.id}")


def waiting(work: Callable[[], T], patience: float = PATIENCE) -> T:
    """Try again as long as another process holds the cache."""
    end = time.monotonic() + patience
    while True:
        try:
            return work()
        except ConflictError as error:
            if error.code != "cache-locked" or time.monotonic() > end:
                raise
            time.sleep(_PAUSE)


@contextmanager
def standing(cache: str | os.PathLike[str]) -> Iterator[Cache]:
    """The cache while nobody moves it: readers share it, and whoever wants to move it waits.

    Raises ConflictError ``cache-locked`` while it is being moved.
    """
    held = Cache(Path(cache))
    with lock_cache(held, shared=True, need="a cache that stands still", hint="Try again."):
        yield held


@contextmanager
def reading(cache: str | os.PathLike[str], patience: float = PATIENCE) -> Iterator[Cache]:
    """`standing`, with patience."""
    held = waiting(lambda: _entered(cache), patience)
    try:
        yield held[1]
    finally:
        held[0].__exit__(None, None, None)


def _entered(cache: str | os.PathLike[str]):  # type: ignore[no-untyped-def]
    context = standing(cache)
    return context, context.__enter__()
