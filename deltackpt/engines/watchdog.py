"""An engine that was paused for an update, and whose updater ended before it wrote anything, is resumed by itself.

The updater holds a lock on a file in the host's cache as long as it lives; the system drops it however the process
ends. A rank of the engine opens that file when it prepares a step, and looks at the lock until the first write; after
it, it only says that the updater is gone.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Literal, TypeAlias

from deltackpt.cache.layout import CacheLayout
from deltackpt.util.lock import lock

LOOK = 0.5  # seconds between two looks at the updater's lock
FINAL = 30.0  # seconds for which an updater that ends after a final update may have left the engine paused
OLD = 3600.0  # seconds after which the lock of a dead process is not looked at any more
RESUMES = "generation is resumed"
_RELEASED = b"."  # what is in a lock that its holder gave back
Holder: TypeAlias = Literal["alive", "dead", "done"]
log = logging.getLogger(__name__)


class UpdaterLock:
    """Held by a process that updates an engine, from the first update to its end, in the cache that they share."""

    def __init__(self, cache: str | os.PathLike[str]) -> None:
        self._layout = CacheLayout(cache)
        self._fd: int | None = None
        self.path = self._layout.updater(secrets.token_hex(8))

    def hold(self) -> str:
        """Take the lock, once; -> its file, which the engine is told. Those of processes long dead are removed."""
        if self._fd is None:
            self._layout.receivers.mkdir(parents=True, exist_ok=True)
            for path in self._layout.updaters():
                with suppress(OSError):
                    if time.time() - path.stat().st_mtime > OLD and holder_of(path) == "dead":
                        path.unlink()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            lock(self._fd)
        return str(self.path)

    def release(self) -> None:
        """The engine needs nothing more of this process. One that ends without it is dead."""
        if self._fd is not None:
            os.ftruncate(self._fd, len(_RELEASED))  # for an engine that has it open
            self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def holder_of(updater: str | os.PathLike[str]) -> Holder:
    """What became of the process that took this lock. One that hangs is alive."""
    with closing(_OpenLock(updater)) as found:
        return found.holder()


class _OpenLock:
    """A lock that stays open: its file may be removed, by its holder's last act or with the holder's folder."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._fd: int | None = None

    def holder(self) -> Holder:
        """As `holder_of`."""
        try:
            if self._fd is None:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            lock(self._fd, shared=True, wait=False)
            return "done" if os.fstat(self._fd).st_size == len(_RELEASED) else "dead"
        except FileNotFoundError:
            return "done"
        except OSError:  # it is held, or that is not known
            return "alive"

    def close(self) -> None:
        """Nothing is looked at any more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Watchdog:
    """Says that the updater died, and calls ``resume``, unless it is called off first.

    While it decides and resumes, `call_off` waits: nothing is written before an engine that it resumed is paused again.
    """

    def __init__(self, look: float = LOOK) -> None:
        self._look = look
        self._lock = threading.Lock()
        self._over: threading.Event | None = None  # ends the watch under way

    def watch(
        self, updater: str, resume: Callable[[], object], *, seconds: float | None = None, words: str = RESUMES
    ) -> None:  # fmt: skip
        """Look at the lock ``updater``, with an end after so many ``seconds``; an earlier watch ends. ``words`` are
        for the engine's log.

        Where the lock is not there to begin with, as with a cache that is not shared, there is nothing to look at.
        """
        self.call_off()
        found = _OpenLock(updater)
        if found.holder() == "done":
            found.close()
            return
        self._over = over = threading.Event()
        end = None if seconds is None else time.monotonic() + seconds
        arguments = (found, resume, over, end, words)
        threading.Thread(target=self._run, args=arguments, name="deltackpt-watchdog", daemon=True).start()

    def call_off(self) -> None:
        """From now on the engine is not resumed."""
        with self._lock:
            if self._over is not None:
                self._over.set()
                self._over = None

    def _run(
        self, found: _OpenLock, resume: Callable[[], object], over: threading.Event, end: float | None, words: str
    ) -> None:  # fmt: skip
        with closing(found):
            while not over.wait(self._look) and (end is None or time.monotonic() < end):
                with self._lock:
                    if over.is_set() or (holder := found.holder()) == "done":
                        return
                    if holder == "dead":
                        log.warning("deltackpt: the process that updates this engine died; %s", words)
                        with suppress(Exception):  # an engine that cannot be resumed says so in its own log
                            resume()
                        return
