"""The thread that publishes captured steps, one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.process_group import ProcessGroup


class Worker:
    """Runs until the queue is closed. An error of a step goes to the queue, and the thread goes on; the loss of a rank
    ends it, and stays in ``fatal``. ``release`` is called when it ends. ``timeout`` in seconds is how long a rank waits
    for a step that rank 0 has announced.
    """

    def __init__(
        self,
        pending: Pending,
        group: ProcessGroup,
        publish: Callable[[CapturedStep], StepMetrics],
        timeout: float | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.fatal: BaseException | None = None
        self._pending, self._group, self._publish, self._timeout = pending, group, publish, timeout
        self._release = release
        self._ended = threading.Event()
        # A daemon: it does not keep an interpreter from ending; its lease then lapses, and its objects are left to gc.
        self._thread = threading.Thread(target=self._run, name="deltackpt-publish", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Has the thread not ended yet? (After an interrupt, `Thread.join` may report one as ended that runs.)"""
        return not self._ended.is_set()

    def wait(self, seconds: float | None) -> None:
        """Wait until it has ended, or for some seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.alive and (end is None or time.monotonic() < end):
            self._ended.wait(0.2)  # in short waits, so that an interrupt is handled soon

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                error: BaseException | None = None
                try:
                    self._publish(item)
                except BaseException as failed:
                    error = failed
                self._pending.done(error)
                if getattr(error, "code", "") == "rank-lost":
                    self.fatal = error
                    return
        except BaseException as lost:
            self.fatal = lost
            self._pending.stop(lost)
        finally:
            try:
                self._release()
            finally:
                self._ended.set()

    def _next(self) -> CapturedStep | None:
        """The step to publish now, None at the end. Rank 0 announces its number, since it may have merged one more."""
        item = self._pending.head()
        if item is None:
            return None
        if self._group.rank == 0:
            item = self._pending.begin()
            self._group.broadcast(item.step)
            return item
        step = self._group.broadcast(None)
        if self._pending.head(step, self._timeout) is None:
            return None
        return self._pending.begin()
