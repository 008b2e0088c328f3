"""Whether a vLLM worker is asleep, and how often it was: its weights are unmapped then, and maybe others afterwards.

vLLM says over HTTP that an engine is asleep when it is only paused, so that the worker itself has to be asked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deltackpt.errors import ChainError


@dataclass
class SleepState:
    """Of the worker of this process. ``times``: how often it went to sleep."""

    asleep: bool = False
    times: int = 0


STATE = SleepState()


def watch_sleep(worker: type) -> None:
    """Note from now on when a worker class goes to sleep and wakes up. Said again it changes nothing."""
    for name, note in (("sleep", _slept), ("wake_up", _woke)):
        call = worker.__dict__.get(name)
        if call is not None and not hasattr(call, "_deltackpt"):
            setattr(worker, name, _noted(call, note))


def _noted(call: Callable[..., Any], note: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def noted(self: Any, *args: Any, **options: Any) -> Any:
        given = next(iter((*args, *options.values())), None)  # the level, or the tags
        if note is _slept:  # before: a sleep that fails halfway has unmapped something
            note(given)
            return call(self, *args, **options)
        found = call(self, *args, **options)
        note(given)
        return found

    noted._deltackpt = True  # type: ignore[attr-defined]
    return noted


def _slept(level: Any) -> None:
    if level != 0:  # 0 only stops the scheduler
        STATE.asleep = True
        STATE.times += 1


def _woke(tags: Any) -> None:
    if tags is None or "weights" in tags:
        STATE.asleep = False


def refuse_asleep() -> None:
    """Raises ChainError ``engine-asleep``: to look at weights that are unmapped ends the process."""
    if STATE.asleep:
        need, hint = "one that is awake", "It is updated when it wakes up."
        raise ChainError("engine-asleep", where="the engine", have="an engine asleep", need=need, hint=hint)
