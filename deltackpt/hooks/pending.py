"""Captured steps that are not published yet: in order, bounded, and none lost when a publish fails."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deltackpt.errors import StoreError
from deltackpt.hooks.late_deltas import LateDeltas, off_card
from deltackpt.torch_views.delta import Delta, merge


@dataclass(frozen=True)
class CapturedStep:
    """One step, or several that were merged: what changed since the one before it.

    ``whole``: the step is also stored as an anchor, read from the snapshot, which may not change until that is done.
    ``merged`` is how many steps it is made of; ``seconds`` were spent on the capture, ``waited`` before it;
    ``nonfinite`` elements of this rank are infinite or NaN.
    """

    step: int
    deltas: Mapping[str, Delta]
    whole: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    merged: int = 1
    seconds: float = 0.0
    waited: float = 0.0
    nonfinite: int = 0
    captured: float = field(default_factory=time.monotonic)  # the first of them

    def off_card(self) -> CapturedStep:
        """The same without what cards hold of it, for who waits with it in host memory alone."""
        deltas = self.deltas
        return replace(self, deltas=deltas.off_card() if isinstance(deltas, LateDeltas) else off_card(deltas))

    def then(self, later: CapturedStep) -> CapturedStep:
        """Both as one step, exact: the old words are those of the last published state."""
        deltas = dict(self.deltas)
        for name, delta in later.deltas.items():
            deltas[name] = merge(deltas[name], delta) if name in deltas else delta
        return replace(
            later,
            deltas={name: d for name, d in deltas.items() if len(d.positions)},
            whole=self.whole or later.whole,
            merged=self.merged + later.merged,
            seconds=self.seconds + later.seconds,
            waited=self.waited + later.waited,
            captured=min(self.captured, later.captured),
        )


class Pending:
    """The queue between the thread that trains and the one that publishes. The head is being published or has failed;
    a step that follows a failed one is merged into it.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: deque[CapturedStep] = deque()
        self._begun = False  # the head is being published
        self._failed: BaseException | None = None  # the head was not published
        self._unseen: BaseException | None = None  # an error that was not raised yet
        self._merging = False
        self._closing = False
        self._newest = -1  # the last step that was put
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def oldest(self) -> float | None:
        """When the first step that is not published was captured, by the monotonic clock; None where there is none."""
        with self._changed:
            return self._items[0].captured if self._items else None

    @property
    def snapshot_in_use(self) -> bool:
        """Does an anchor still read the snapshot as it is? One that failed is read again at a later step."""
        return self._failed is None and any(item.whole for item in self._items)

    @property
    def full(self) -> bool:
        """Do as many steps wait as may?"""
        return self._failed is None and len(self._items) >= self._depth

    @property
    def failed(self) -> bool:
        """Does the head wait for a step to be merged with, or for `retry`?"""
        return self._failed is not None

    def stands(self, step: int) -> bool:
        """Is a step up to this one neither published nor failed, so that there is something to wait for?"""
        with self._changed:
            return self._failed is None and any(item.step <= step for item in self._items)

    def reserve_merge(self) -> bool:
        """If the queue is full: keep its last step from being begun, so that the next can be merged into it.

        -> whether it was; `put` or `cancel_merge` ends that.
        """
        with self._changed:
            self._merging = self.full and len(self._items) > int(self._begun)
            return self._merging

    def after_head(self) -> list[CapturedStep]:
        """The steps that wait behind the first."""
        with self._changed:
            return list(self._items)[1:]

    def add_error(self, error: BaseException) -> None:
        """An error for `pop_error`, though no step has to be published again."""
        with self._changed:
            self._unseen = error

    def put(self, item: CapturedStep, *, into_last: bool = False) -> None:
        """Append a step; merge it into the last one if that is wanted, or if that one failed and is alone."""
        with self._changed:
            if self._items and (into_last or (self._failed and len(self._items) == 1)):
                self._items[-1] = self._items[-1].then(item)
            else:
                self._items.append(item)
            self._newest = item.step
            self._failed, self._merging = None, False
            self._changed.notify_all()

    def was_put(self, step: int) -> bool:
        """Was the step put, even if `put` was interrupted?"""
        with self._changed:
            return self._newest == step or any(item.step == step for item in self._items)

    def wait_passed(self, step: int, timeout: float) -> bool:
        """Wait until a step was put, and none up to it stands any more, or for ``timeout`` seconds. -> is it so?"""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest >= step and not self.stands(step), timeout)

    def cancel_merge(self) -> None:
        """The step that `reserve_merge` was called for does not come."""
        with self._changed:
            self._merging = False
            self._changed.notify_all()

    def retry(self) -> None:
        """Let a failed head be tried again."""
        with self._changed:
            self._failed = None
            self._changed.notify_all()

    def pop_error(self) -> BaseException | None:
        """The newest error that was not returned yet."""
        with self._changed:
            error, self._unseen = self._unseen, None
            return error

    def wait(self, ready: Callable[[], bool], timeout: float | None, *, until_error: bool = True) -> None:
        """Wait until ``ready``, or, with ``until_error``, until there is an error for `pop_error`.

        Raises StoreError ``publish-stalled`` after ``timeout`` seconds.
        """
        with self._changed:
            end = None if timeout is None else time.monotonic() + timeout
            while not ready() and not (until_error and self._unseen is not None):
                # In short waits, so that an interrupt is handled soon.
                left = 0.5 if end is None else min(0.5, end - time.monotonic())
                if left <= 0:
                    need = f"progress within {timeout:g} seconds"
                    raise StoreError("publish-stalled", where="the hook", have="steps that wait", need=need)
                self._changed.wait(left)

    def close(self) -> None:
        """No step comes any more: the publishing thread ends when the queue is empty, or its head has failed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    # The publishing thread

    def head(self, step: int | None = None, timeout: float | None = None) -> CapturedStep | None:
        """Wait for a step to publish, or for exactly ``step``; None when there will be none. It is not begun yet.

        Raises StoreError ``publish-stalled`` after ``timeout`` seconds.
        """
        with self._changed:
            end = None if timeout is None else time.monotonic() + timeout
            while True:
                if self._items and not self._failed and (step is None or self._items[0].step == step):
                    return self._items[0]
                if self._closing and (not self._items or self._failed):
                    return None
                if end is not None and time.monotonic() > end:
                    raise StoreError("publish-stalled", where="the hook", have="no such step", need=f"step {step}")
                self._changed.wait(0.5)

    def begin(self) -> CapturedStep:
        """The head, to be published now; from here on nothing is merged into it."""
        with self._changed:
            while self._merging and len(self._items) == 1:
                self._changed.wait(0.5)
            self._begun = True
            return self._items[0]

    def done(self, error: BaseException | None) -> None:
        """The head was published, or failed: then it waits for the next step, or is merged into it at once."""
        with self._changed:
            self._begun = False
            if error is None:
                self._items.popleft()
            else:
                self._unseen = error
                if len(self._items) > 1:
                    first = self._items.popleft()
                    self._items[0] = first.then(self._items[0])
                else:
                    self._failed = error
            self._changed.notify_all()

    def stop(self, error: BaseException) -> None:
        """Nothing will be published any more, because of an error."""
        with self._changed:
            self._begun = False
            self._unseen = self._failed = error
            self._changed.notify_all()
