"""Publish from an optimizer: for loops that nobody wants to touch."""

from __future__ import annotations

from typing import Any

from deltackpt.hooks.trainer import TrainerHook


def follow(hook: TrainerHook, optimizer: Any, *, every: int = 1) -> Any:
    """Publish after every ``every``-th step of ``optimizer``; -> a handle whose ``remove()`` ends that.

    The hook numbers the steps on from its last one. An optimizer that a loss scaler keeps from stepping publishes
    nothing. The hook still has to be closed, or used as a context manager. Raises what `TrainerHook.step` raises, out
    of ``optimizer.step()``.
    """
    if hook.last_step is None:
        hook.step()  # the weights before the first step: what its patch applies to
    done = 0

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            hook.step()

    return optimizer.register_step_post_hook(after)
