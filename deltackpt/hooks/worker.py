"""The thread that publishes what was taken, one step after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.process_group import ProcessGroup


class Worker:
    """Runs until the queue is closed. An error of a step goes to the queue, and the thread goes on; one that leaves the
    ranks without each other ends it, and stays in ``fatal``. ``release`` is called when it ends.
    """

    def __init__(
        self,
        pending: Pending,
        team: ProcessGroup,
        publish: Callable[[CapturedStep], StepMetrics],
        timeout: float | None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.fatal: BaseException | None = None
        self._pending, self._team, self._publish, self._timeout = pending, team, publish, timeout
        self._release = release
        self._ended = threading.Event()
        # A daemon: an interpreter that ends without `close` is not held up; what it leaves lapses, or is gc's.
        self._thread = threading.Thread(target=self._run, name="deltackpt-publish", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self._ended.is_set()  # an interrupted `Thread.join` may take a thread for ended that is not

    def wait(self, seconds: float | None) -> None:
        """Until it has ended, or for some seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        while self.alive and (end is None or time.monotonic() < end):
            self._ended.wait(0.2)  # in short waits: an interrupt is never held up

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
            self._pending.lost(lost)
        finally:
            try:
                self._release()
            finally:
                self._ended.set()

    def _next(self) -> CapturedStep | None:
        """The step to publish now: which one that is, the leader says, since it may have merged one more."""
        item = self._pending.head()
        if item is None:
            return None
        if self._team.rank == 0:
            item = self._pending.begin()
            self._team.broadcast(item.step)
            return item
        step = self._team.broadcast(None)
        if self._pending.head(step, self._timeout) is None:
            return None
        return self._pending.begin()
