"""The engines of a host and what they follow, put together from names: repository, cache, and a URL for each engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from deltackpt.engines.clients import ClientOptions, client_of
from deltackpt.engines.fleet import Emit
from deltackpt.engines.serve import Serving
from deltackpt.errors import UsageError
from deltackpt.repository import Repository
from deltackpt.sync.backoff import GRACE
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.util.metrics import Metrics
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress

PAUSES = ("keep", "wait", "abort")
MODES = ("auto", "reload")


@dataclass(frozen=True)
class ServeOptions:
    """How engines are updated.

    ``ref``       the branch
    ``pause``     what becomes of requests in flight: "keep", "wait" or "abort"
    ``mode``      "auto", or "reload": no scatter
    ``timeout``   seconds that an engine may take for one answer
    ``together``  all engines come to a step, or none
    ``check``     all weights are read back before an engine is resumed
    ``threads``   None for all processors
    ``grace``     that of `FollowOptions`

    Raises UsageError ``usage`` for another pause or mode.
    """

    ref: str = "main"
    pause: str = "keep"
    mode: str = "auto"
    timeout: float = 120.0
    together: bool = False
    check: bool = False
    threads: int | None = None
    grace: float = GRACE

    def __post_init__(self) -> None:
        if self.pause not in PAUSES:
            raise UsageError("usage", where="--pause", have=self.pause, need="keep, wait or abort")
        if self.mode not in MODES:
            raise UsageError("usage", where="--mode", have=self.mode, need="auto or reload")


def open_serving(
    repo: str | os.PathLike[str],
    cache: str | os.PathLike[str],
    engines: Sequence[str],
    emit: Emit,
    options: ServeOptions = ServeOptions(),
    *,
    metrics: Metrics | None = None,
    stop: Event | None = None,
    progress: Progress = SILENT,
) -> Serving:
    """What keeps ``engines``, each a ``KIND=URL``, at the newest step of a repository through a managed cache.

    ``emit`` and ``metrics`` are those of `Serving`. Raises UsageError ``engine-form``, and what opening the repository
    raises.
    """
    check_local(cache, "CACHE")
    folder, source = Path(cache).absolute(), Repository.open(repo)
    # Engines run elsewhere: a relative path would mean another place to them.
    place = str(repo) if "://" in str(repo) else str(Path(repo).absolute())
    client_options = ClientOptions(place, folder, options.ref, options.pause, options.timeout, options.mode)
    clients = [client_of(engine, client_options) for engine in engines]
    following = FollowOptions(options.ref, threads=options.threads, grace=options.grace)
    follower = Follower(source, folder, following, progress=progress, stop=stop)
    how = {"together": options.together, "check": options.check}
    return Serving(source, follower, clients, emit, metrics or Metrics(), folder, **how)
