"""The engines of a host and what they follow, put together from names: repository, cache, and a URL for each engine."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from deltackpt.engines.branch import BranchHead
from deltackpt.engines.clients import ClientOptions, client_of
from deltackpt.engines.fleet import Emit
from deltackpt.engines.serve import Serving
from deltackpt.errors import UsageError
from deltackpt.repository import Repository
from deltackpt.signing.policy import TrustPolicy
from deltackpt.sync.backoff import GRACE
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.util.metrics import Metrics
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.scratch import temporary_folder

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
    ``trust``     whose signatures a step has: that of `Repository.secure`, whose policy holds the greatest age too
    ``draft``     the branch of a draft model with a checkpoint of its own: its steps have the numbers of ``ref``'s

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
    trust: str | os.PathLike[str] | TrustPolicy | None = None
    draft: str = ""

    def __post_init__(self) -> None:
        if self.pause not in PAUSES:
            raise UsageError("usage", where="--pause", have=self.pause, need="keep, wait or abort")
        if self.mode not in MODES:
            raise UsageError("usage", where="--mode", have=self.mode, need="auto or reload")


def open_serving(
    repo: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None,
    engines: Sequence[str],
    emit: Emit,
    options: ServeOptions = ServeOptions(),
    *,
    metrics: Metrics | None = None,
    stop: Event | None = None,
    progress: Progress = SILENT,
) -> Serving:
    """What keeps ``engines``, each a ``KIND=URL``, at the newest step of a repository: through a managed cache, or
    without one where each engine is its own base, and a patch at a time is in host memory, of ranks their share.

    ``emit`` and ``metrics`` are those of `Serving`. Raises UsageError ``engine-form``, ``engine-cache`` for an engine
    that needs a cache, and what opening the repository raises.
    """
    if cache is not None:
        check_local(cache, "CACHE")
    folder = None if cache is None else Path(cache).absolute()
    source = Repository.open(repo).secure(options.trust)
    # Engines run elsewhere: a relative path would mean another place to them.
    place = str(repo) if "://" in str(repo) else str(Path(repo).absolute())
    reports = _reports() if folder is None else None
    own = folder is None and source.trust is not None  # with a cache, what is read was judged here
    shared = ClientOptions(
        place, folder, options.ref, options.pause, options.timeout, options.mode, reports, own, options.draft
    )
    clients = [client_of(engine, shared) for engine in engines]
    rules = {"together": options.together, "check": options.check}
    if folder is None:
        head = BranchHead(source, options.ref, options.grace)
        return Serving(source, head, clients, emit, metrics or Metrics(), None, **rules)
    following = FollowOptions(options.ref, threads=options.threads, grace=options.grace)
    follower = Follower(source, folder, following, progress=progress, stop=stop)
    return Serving(source, follower, clients, emit, metrics or Metrics(), folder, **rules)


def _reports() -> Path:
    """A folder of this user through which ranks answer, as long as this process lives (TMPDIR)."""
    life = ExitStack()
    atexit.register(life.close)
    return life.enter_context(temporary_folder("updates"))
