"""When the repository has a step: what a session that is durable first waits for before engines switch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from deltackpt.errors import StoreError
from deltackpt.format.manifest import Link

KEPT = 1024  # published states that are remembered

TICK = 1.0  # seconds between two calls of ``tick``


class PublishGate:
    """Told by the thread that publishes, asked by the one that delivers."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, Link] = OrderedDict()
        self._current, self._failed = -1, ""
        self._closed = False
        self._changed = threading.Condition()

    @property
    def newest(self) -> tuple[str, Link] | None:
        """The state that was published last, and its step."""
        with self._changed:
            return next(reversed(self._states.items()), None)

    def began(self, step: int) -> None:
        """A step is being published; those before it, unless they are, never will be by themselves."""
        with self._changed:
            self._current, self._failed = step, ""
            self._changed.notify_all()

    def published(self, link: Link, state: str) -> None:
        """The repository has a state."""
        with self._changed:
            self._states[state] = link
            self._states.move_to_end(state)
            if len(self._states) > KEPT:
                self._states.popitem(last=False)
            self._changed.notify_all()

    def failed(self, why: str) -> None:
        """The step that was begun last was not published."""
        with self._changed:
            self._failed = why
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is published any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def find(self, state: str) -> Link | None:
        """The step that has a state, if it was published."""
        with self._changed:
            return self._states.get(state)

    def verdict(self, step: int, state: str) -> str | None:
        """Why a step will not be published by itself; "" where it is; None where that is open."""
        with self._changed:
            if state in self._states:
                return ""
            if self._current > step:
                return f"step {self._current} was published in its place"
            if self._current == step and self._failed:
                return self._failed
            return "the trainer has ended" if self._closed else None

    def wait(self, step: int, state: str, tick: Callable[[], None]) -> Link:
        """Wait until the repository has the state; ``tick`` is called about once a second meanwhile.

        Raises StoreError ``live-not-durable`` where it will not have it: the publish failed, or steps were merged.
        """
        while True:
            with self._changed:  # so that what is told between the look and the wait is not missed
                if (why := self.verdict(step, state)) is None:
                    self._changed.wait(TICK)
                    why = self.verdict(step, state)
            if why is not None:
                break
            tick()
        if why:
            need = "the step in the repository before it goes live"
            hint = "It goes live with the next step that is published."
            raise StoreError("live-not-durable", where=f"step {step}", have=why[:500], need=need, hint=hint)
        with self._changed:
            return self._states[state]
