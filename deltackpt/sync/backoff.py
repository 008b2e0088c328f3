"""Which errors are transient, and how long to wait before the next attempt."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import TypeVar

from deltackpt.errors import DeltackptError, StoreError, UsageError
from deltackpt.repository import Repository

T = TypeVar("T")

TRANSIENT = frozenset({"store-busy", "store-silent"})
# What damage in transit looks like, or a collection that was faster than a reader. Lasting damage looks the same.
AMBIGUOUS = frozenset(
    {
        *("object-hash", "manifest-hash", "object-short", "object-changed", "object-missing", "object-too-large"),
        *("step-missing", "ref-moved", "chain-broken", "chain-differs", "tensor-differs", "part-elsewhere"),
        *("json-syntax", "json-depth", "json-duplicate-key", "json-number", "json-too-long", "manifest-field"),
        *("manifest-canonical", "manifest-elsewhere", "gc-running", "signature-replayed"),
    }
)
# What is followed is not there: a disk that is not mounted for a moment, a place that is made anew, or a wrong name.
GONE = frozenset({"repository-missing", "bucket-missing", "ref-missing", "watch-missing"})
# So is a signature: another signer may be on the way, and a branch may rest. [S-SIG-15]
GONE |= {"signature-missing", "signature-stale"}
EMPTY = "branch-empty"  # a trainer that has yet to publish: no reason to end

# Seconds for which what is not there is waited for. A remount or a restore of a folder takes less; what supervises
# the process learns of a wrong name, or of a loss, within this time, by an exit code that no log has to be read for.
GRACE = 60.0
_LOOK = 5.0  # seconds between two looks for what is not there, at most


@dataclass
class Backoff:
    """How long to wait after each failure in a row, in seconds: ``first``, doubled up to ``most`` ([S-FOL-3]).

    Transient errors are retried without end, ambiguous ones ``attempts`` times in a row. What is not there is looked
    for during ``grace`` seconds in a row ([S-FOL-5]), and not more often than every ``pause``; a branch without a first
    step without end. With ``any_store_error`` all errors of a store count as transient. ``due``: the failure is to be
    told; of what is not there, only every ``most`` seconds.
    """

    first: float = 1.0
    most: float = 60.0
    attempts: int = 5
    grace: float = GRACE
    pause: float = 0.0
    any_store_error: bool = False
    failures: int = 0  # in a row
    due: bool = True
    _gone: float | None = field(default=None, repr=False)  # since when it is not there
    _told: tuple[str, float] = field(default=("", 0.0), repr=False)  # what was told last of that, and when

    def __post_init__(self) -> None:
        check_grace(self.grace)

    def delay(self, error: DeltackptError) -> float:
        """Seconds to wait before the next attempt, counted as another failure.

        Raises the error itself where another attempt cannot help.
        """
        if error.code in GONE or error.code == EMPTY:
            return self._absent(error)
        transient = isinstance(error, StoreError) and (self.any_store_error or error.code in TRANSIENT)
        # [S-FOL-3]: it ends where asking again cannot help.
        if not transient and (error.code not in AMBIGUOUS or self.failures >= self.attempts):
            raise error
        self.due = True
        return self._next(self.most)

    def _absent(self, error: DeltackptError) -> float:
        now = time.monotonic()
        left = float("inf")
        if error.code in GONE:
            self._gone = now if self._gone is None else self._gone
            left = self._gone + self.grace - now
        if left <= 0:  # [S-FOL-5]
            raise error
        self.due = self.failures == 0 or error.code != self._told[0] or now - self._told[1] >= self.most
        if self.due:
            self._told = error.code, now
        return min(max(self._next(_LOOK), self.pause), left)

    def _next(self, most: float) -> float:
        longest: float = min(most, self.first * 2 ** min(self.failures, 30))
        self.failures += 1
        return longest * random.uniform(0.5, 1)

    def reset(self) -> bool:
        """An attempt succeeded; -> whether any had failed before it."""
        failed, self.failures, self._gone = self.failures > 0, 0, None
        return failed


def check_grace(grace: float) -> None:
    """Refuse a grace time that is none: UsageError ``usage``."""
    if not grace >= 0:
        raise UsageError("usage", where="grace", have=grace, need="seconds, 0 or more")


def explained(repo: Repository, error: DeltackptError) -> DeltackptError:
    """What is behind a reader's error: that the repository is gone, or that another one is in its place ([S-FOL-4]).

    The error itself where the repository is there, or where no such thing can be behind it.
    """
    if error.code in AMBIGUOUS:
        try:
            repo.confirm_place()
        except DeltackptError as reason:
            return reason
    return error


@contextmanager
def explaining(repo: Repository) -> Iterator[None]:
    """Where the block fails, what `explained` finds is raised, and the next attempt reads manifests anew."""
    try:
        yield
    except DeltackptError as error:
        repo.manifests.cache.clear()
        if (reason := explained(repo, error)) is error:
            raise
        raise reason from error


def patiently(
    work: Callable[[], T],
    stop: Event,
    backoff: Backoff,
    failed: Callable[[DeltackptError, float], None] = lambda error, wait: None,
) -> T | None:
    """What ``work`` returns, tried again after errors as ``backoff`` says; None once ``stop`` is set.

    ``failed`` is called with what is due to be told, and the seconds until the next attempt. Raises an error that does
    not pass.
    """
    while not stop.is_set():
        try:
            return work()
        except DeltackptError as error:
            wait = backoff.delay(error)
            if backoff.due:
                failed(error, wait)
            stop.wait(wait)
    return None
