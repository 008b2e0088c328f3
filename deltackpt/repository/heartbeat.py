"""A small object that says "I am at work until": renewed by a thread, and lapsing by the store's clock if that
dies.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from deltackpt.errors import ConflictError, DeltackptError, NotFoundError
from deltackpt.store import Store
from deltackpt.util.presence import Presence

MAX_RECORD = 64 << 10


def holder() -> str:
    """Host and process id, for people who look at the object."""
    return f"{socket.gethostname()} pid {os.getpid()}"[:200]


class Heartbeat:
    """``name`` holds ``record(now, expires)``, and is written again at a third of ``ttl`` seconds until `close`.

    Takes over an object whose bytes are ``old``, or creates it. ``now`` is the store's time if it was just asked for.
    The thread is a daemon: a process that ends without `close` leaves the object to lapse, or to `leases.clear_dead` on
    the same host. A fork has no such thread,
    and does not own the object. Raises what `Store.put` and `Store.swap` raise.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        record: Callable[[float, int], bytes],
        ttl: float,
        *,
        old: bytes | None = None,
        now: float | None = None,
    ) -> None:
        self.name = name
        self._store, self._record, self._ttl = store, record, ttl
        self._process = os.getpid()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._raw = self._sent = old
        self._renewed, self._expires = time.monotonic(), float("inf")
        self._lapsed = self._lost = False
        self._presence = Presence(store.url, name, holder())  # before the object: no kill leaves it without
        try:
            self._renew(now)
        except BaseException:
            self._presence.close()
            raise
        self._thread = threading.Thread(target=self._run, name="deltackpt-heartbeat", daemon=True)
        self._thread.start()

    @property
    def fresh(self) -> bool:
        """Is more than a third of the lifetime left, by this process's own clock?

        False for ever once the object has lapsed, by the store's clock, or was changed by another process: a gc may
        have relied on that. False too in a fork, which does not renew it.
        """
        ours = self._process == os.getpid()
        return ours and not self._lapsed and time.monotonic() - self._renewed < self._ttl * 2 / 3

    def close(self) -> None:
        """Stop, and remove the object; a store that does not answer leaves it to lapse. Can be called again."""
        if self._process == os.getpid() and not self._stop.is_set():
            self._stop.set()
            with self._lock, suppress(DeltackptError):
                if not self._lost:
                    self._store.delete(self.name)
            self._presence.close()

    def _renew(self, now: float | None = None) -> None:
        began = time.monotonic()
        now = self._store.now() if now is None else now
        self._lapsed |= now >= self._expires
        # Rounded up: a lifetime below a second must not be over at once.
        expires = int(now + self._ttl) + 1
        self._sent = raw = self._record(now, expires)
        if self._raw is None:
            self._store.put(self.name, [raw])
        else:
            self._store.swap(self.name, self._raw, raw)
        self._lapsed |= time.monotonic() - self._renewed > self._ttl  # what was there had lapsed when this came
        self._raw, self._renewed, self._expires = raw, began, expires

    def _run(self) -> None:
        while not self._stop.wait(self._ttl / 3):
            with self._lock, suppress(DeltackptError):  # tried again at the next renewal
                if self._stop.is_set():
                    return
                sent = self._sent
                try:
                    self._renew()
                except ConflictError:
                    self._raw = self._current()
                    if self._raw == sent:  # ours: the answer to the time before was lost
                        continue
                    self._lapsed, self._lost = True, self._raw is not None
                    if self._lost:  # another process found it lapsed, and took the object over
                        return

    def _current(self) -> bytes | None:
        try:
            return self._store.get(self.name, MAX_RECORD)
        except NotFoundError:
            return None
