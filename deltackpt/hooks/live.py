"""The live side of a hook: captured steps go to a session as well as to the repository, each at its own pace.

What the repository has and what the session has are kept apart: each queue of captured steps advances when its own
receivers have the step, and a step that did not get there is merged into the next.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from deltackpt.errors import DeltackptError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.process_group import Processes, ProcessGroup, SingleProcess
from deltackpt.hooks.publish import Publisher, TrainerState
from deltackpt.hooks.worker import Worker
from deltackpt.publish.step import EncodeOptions
from deltackpt.repository import Repository

log = logging.getLogger(__name__)

PATIENCE = 0.5  # seconds that a publish leaves to the session, which is faster: no engine that stands still delays it


@dataclass(frozen=True)
class LiveBase:
    """The step that the weights were when the hook was made, and that the repository has: what the first live step
    follows."""

    link: Link
    state: str
    sums: Mapping[str, Sums]


@dataclass(frozen=True)
class LiveTrainer:
    """What a session is told of one rank of the trainer. ``group`` is used by the session's thread alone.

    ``base`` is known to rank 0; None where the weights were of no step: the first live step then is all of them.
    """

    repository: Repository
    ref: str
    group: ProcessGroup
    state: TrainerState
    encode: EncodeOptions
    base: LiveBase | None


class LiveSession(Protocol):
    """What takes steps to engines without a store between: `deltackpt.live.Session`. Every rank has one."""

    @property
    def mode(self) -> str:
        """ "sync": `TrainerHook.step` waits until the engines have the step; "async": it does not."""

    @property
    def step(self) -> int | None:
        """The step that is live, at the trainer's first rank; None before the first."""

    @property
    def goes_first(self) -> bool:
        """Do engines have a step before the repository does?"""

    def open(self, trainer: LiveTrainer) -> None:
        """Begin, by all ranks together."""

    def deliver(self, captured: CapturedStep) -> StepMetrics | None:
        """Take a step to the engines, by all ranks together.

        Where it raises, at all ranks, no engine has the step: it is merged into the next one. With ``captured.whole``
        it is all of the weights, which do not change until this returns.
        """

    def publishing(self, step: int) -> None:
        """The repository's side begins to publish a step. Called at every rank, as are the next two."""

    def published_step(self, link: Link, state: str) -> None:
        """The repository has a step, whose state digest is ``state``."""

    def publish_failed(self, step: int, error: BaseException) -> None:
        """The repository does not have the step: it is published with the next one."""

    def close(self) -> None:
        """End the session at this rank. Can be called again."""


def live_group(live: LiveSession | None, sharded: bool, timeout: float) -> ProcessGroup:
    """The group of the thread that delivers: its messages must not mix with those of the others."""
    return Processes(timeout) if live is not None and sharded else SingleProcess()


class LiveSide:
    """The queue and the thread of a session. Training waits for neither: where the queue is full, steps are merged."""

    def __init__(self, session: LiveSession, trainer: LiveTrainer, queue: int, timeout: float, fresh: bool) -> None:
        """``fresh``: the weights are of no step, so that the first one put is all of them. Raises what the session
        raises."""
        self._session, self._group, self._whole, self._told = session, trainer.group, fresh, False
        session.open(trainer)
        self._pending = Pending(queue)
        self._worker = Worker(self._pending, trainer.group, self._deliver, timeout, session.close)  # type: ignore[arg-type]

    @property
    def snapshot_in_use(self) -> bool:
        """Are all weights on their way, so that their copy may not change?"""
        return self._worker.alive and self._pending.snapshot_in_use

    def reserve_merge(self) -> bool:
        """See `Pending.reserve_merge`. At rank 0; the others are told."""
        return self._pending.reserve_merge()

    def cancel_merge(self) -> None:
        """See `Pending.cancel_merge`."""
        self._pending.cancel_merge()

    def put(self, item: CapturedStep, into_last: bool) -> None:
        """Deliver a captured step. A session that has ended takes none."""
        if self._worker.alive:
            self._pending.put(replace(item, whole=self._whole), into_last=into_last)
            self._whole = False
        elif not self._told:
            self._told = True
            log.warning("the live session has ended: engines go on by the repository (%s)", self._worker.fatal)

    def wait(self, timeout: float) -> None:
        """In a session of mode "sync": wait until no step waits for engines. Errors of the session are none of
        training."""
        if self._session.mode == "sync":
            self._pending.wait(lambda: self._idle, timeout, until_error=False)

    @property
    def _idle(self) -> bool:
        return not self._worker.alive or len(self._pending) == 0 or self._pending.failed

    def _deliver(self, item: CapturedStep) -> StepMetrics | None:
        try:
            return self._session.deliver(item)
        except DeltackptError as error:
            log.warning("%s: %s", self._became_of(item.step, error), error.sentence())
            raise
        except Exception:
            log.exception("step %d did not go live, and goes with the next", item.step)
            raise

    def _became_of(self, step: int, error: DeltackptError) -> str:
        if error.code != "rank-lost":
            return f"step {step} did not go live, and goes with the next"
        if self._group.rank:
            return f"the live session ends: step {step} is live if the first rank says so"
        # A rank may be lost when all engines have the step, which the first one knows.
        what = "went live" if self._session.step == step else "did not go live"
        return f"the live session ends: step {step} {what}, and no other one will"

    def publish(self, publisher: Publisher, item: CapturedStep) -> StepMetrics:
        """Publish a step into the repository, and tell the session what became of it."""
        self._session.publishing(item.step)
        if self._session.goes_first and self._worker.alive:  # both at once would take turns in one interpreter
            self._pending.wait_passed(item.step, PATIENCE)
        try:
            found = publisher.publish(item)
        except BaseException as error:
            self._session.publish_failed(item.step, error)
            raise
        if publisher.base is not None:
            self._session.published_step(publisher.base.link, publisher.base.manifest.state)
        return found

    def close(self, patience: float | None = None) -> None:
        """Deliver what waits, and end the session; not longer than ``patience`` seconds. None: as long as the session's
        own timeouts allow."""
        self._pending.pop_error()
        if patience is None:
            self._pending.retry()
        self._pending.close()
        self._worker.wait(patience)
        self._session.close()
        if patience is None and self._worker.fatal is None:
            self._group.close()


def live_side(
    live: LiveSession | None, group: ProcessGroup, publisher: Publisher, queue: int, timeout: float
) -> LiveSide | None:
    """The live side of a hook whose ``publisher`` has not published yet. ``timeout`` in seconds is how long ranks wait
    for each other. Raises what the session raises."""
    if live is None:
        return None
    base = None if publisher.fresh else publisher.base
    known = LiveBase(base.link, base.manifest.state, {n: d.sums for n, d in base.digests.items()}) if base else None
    trainer = LiveTrainer(publisher.repo, publisher.ref, group, publisher.state, publisher.encode, known)
    return LiveSide(live, trainer, queue, timeout, group.broadcast(known is None))


def check_live(live: Any) -> None:
    """Raise UsageError ``hook-option`` unless ``live`` is a session, or None."""
    needed = ("open", "deliver", "publishing", "published_step", "publish_failed", "close")
    if live is not None and not all(callable(getattr(live, name, None)) for name in needed):
        need = "a deltackpt.live.Session, or None"
        raise UsageError("hook-option", where="the trainer hook, live=", have=repr(live)[:200], need=need)
