"""What a trainer's hook counts, for Prometheus."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from deltackpt.errors import StoreError
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.util.metrics import Metrics
from deltackpt.util.traces import span


class HookExporter:
    """Counts published steps, and serves the counts at `metrics.address` until it is closed, if there is one.

    ``port`` is then the one in use: None also where it cannot be had, which is logged, and no reason not to train.
    """

    def __init__(self, pending: Pending, port: int | str | None) -> None:
        self.metrics = Metrics("hook")
        self.metrics.ask("deltackpt_queue_steps", lambda: float(len(pending)))
        self.metrics.ask("deltackpt_behind_seconds", lambda: _age(pending))
        self._stack = ExitStack()
        self.port: int | None = None
        try:
            self.port = self._stack.enter_context(self.metrics.on(port))
        except StoreError as error:
            logging.getLogger("deltackpt").warning("no metrics are served: %s", error.sentence())

    def published(self, found: StepMetrics) -> None:
        """A step is in the repository."""
        waited = sum(found.seconds.get(stage, 0.0) for stage in ("diff", "wait"))
        self.metrics.set("deltackpt_step", found.step)
        self.metrics.add("deltackpt_steps_total", 1)
        self.metrics.add("deltackpt_bytes_total", found.bytes)
        self.metrics.add("deltackpt_changed_elements_total", found.changed)
        self.metrics.add("deltackpt_stall_seconds_total", waited)
        self.metrics.add("deltackpt_work_seconds_total", sum(found.seconds.values()) - waited)

    @contextmanager
    def publishing(self, item: CapturedStep) -> Iterator[None]:
        """The block publishes a step; where it raises, the changes go with the next one."""
        try:
            with span("deltackpt.publish", item.metadata, step=item.step):
                yield
        except BaseException:
            for name in ("deltackpt_retries_total", "deltackpt_failures_total"):
                self.metrics.add(name, 1)
            raise

    def close(self) -> None:
        """Serve no more."""
        self._stack.close()


def _age(pending: Pending) -> float:
    """Seconds since the oldest step that is not published was captured; 0 where there is none."""
    waiting = pending.oldest
    return 0.0 if waiting is None else max(0.0, time.monotonic() - waiting)
