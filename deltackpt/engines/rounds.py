"""The loop of what serves engines: a round, a wait, and a longer one where the repository is away."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

from deltackpt.engines.fleet import Emit
from deltackpt.errors import DeltackptError
from deltackpt.sync.backoff import Backoff
from deltackpt.util.metrics import Metrics


def rounds(
    look: Callable[[], object], then: Callable[[], object], *, stop: Event, poll: float, grace: float, emit: Emit,
    metrics: Metrics,
) -> None:  # fmt: skip
    """Until ``stop``, every ``poll`` seconds: ``look``, which reads the repository, and after it ``then``, also where
    ``look`` failed.

    What may pass by itself is tried again after a growing time: ``emit`` is called with `outage`, and with
    `back` when it has passed. Raises an error of ``look`` that does not pass by itself, and that the repository is
    gone, once that lasted for ``grace`` seconds.
    """
    backoff = Backoff(grace=grace)
    metrics.seen()
    while not stop.is_set():
        wait, asked = poll, time.monotonic()
        try:
            look()
            metrics.seen(asked)
            if backoff.reset():
                emit("back", {})
        except DeltackptError as error:
            wait = backoff.delay(error)
            metrics.retry(error)
            if backoff.due:
                emit("outage", {**error.to_dict(), "retry_in": round(wait, 3)})
        then()
        stop.wait(wait)
