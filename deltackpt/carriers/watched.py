"""Calls that may never return, made by a thread of their own and given up in time.

A peer that dies inside of NCCL leaves a call, or a kernel on the card, that waits for ever. Here the caller waits no
longer than its deadline, or until the peer's connection has ended; then the group is aborted, which lets the call go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from deltackpt.carriers.wire import Deadline, Wire, lost

T = TypeVar("T")
LOOK = 0.05  # seconds after which a waiting caller looks whether the peer is still there
GRACE = 1.0  # seconds that what is on its way has to arrive, once the peer has closed its connection


class _Call:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.done = work, threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class WatchedCalls:
    """One thread, that makes one call at a time. ``wire`` is the connection to the peer, ``abort`` lets a call go."""

    def __init__(self, wire: Wire, abort: Callable[[], None]) -> None:
        self.given_up = False
        self._wire, self._abort = wire, abort
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._ended = False

    def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """What ``work`` returns. Raises StoreError ``live-lost`` where that takes longer, the peer is gone, or the
        group has failed (a RuntimeError), and for every call after that; other errors as they are."""
        return self.begin(work, deadline)()

    def begin(self, work: Callable[[], T], deadline: Deadline) -> Callable[[], T]:
        """The same in two: what is returned waits, and returns or raises."""
        if self.given_up or self._ended:
            raise self._lost("a pair that was given up")
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="deltackpt-live-pair", daemon=True)
            self._thread.start()
        call = _Call(work)
        self._calls.put(call)

        def wait() -> T:
            self._wait(call, deadline)
            if isinstance(call.error, RuntimeError):
                self._give_up()
                text = (str(call.error).splitlines() or [""])[0][:200]
                raise self._lost(f"torch.distributed: {text}") from call.error
            if call.error is not None:
                raise call.error
            result: T = call.result
            return result

        return wait

    def close(self) -> None:
        """End the thread, and the group: nothing of it is used any more. Can be called again."""
        if not self._ended:
            self._ended = True
            self._calls.put(None)
            if not self.given_up:
                self._give_up()

    def _wait(self, call: _Call, deadline: Deadline) -> None:
        gone = 0.0  # when the peer was seen to be gone
        while not call.done.wait(min(LOOK, max(0.001, deadline.left))):
            if deadline.left <= 0:
                self._give_up()
                raise self._lost(f"no bytes for {deadline.seconds:g} s")
            if self._wire.ended:
                gone = gone or time.monotonic()
                if time.monotonic() - gone > GRACE:
                    self._give_up()
                    raise self._lost("a connection that was closed")

    def _give_up(self) -> None:
        """By a thread of its own: to abort may take as long as the group's timeout."""
        self.given_up = True
        threading.Thread(target=self._try_abort, name="deltackpt-live-abort", daemon=True).start()

    def _try_abort(self) -> None:
        with suppress(Exception):
            self._abort()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.result = call.work()
            except BaseException as error:
                call.error = error
            call.done.set()

    def _lost(self, have: str) -> Exception:
        return lost(self._wire.where, have, "the other rank of the pair")
