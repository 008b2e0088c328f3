"""Publish from an optimizer: for training loops that stay as they are."""

from __future__ import annotations

from typing import Any

from deltackpt.hooks.options import check_every
from deltackpt.hooks.trainer import TrainerHook


def follow(hook: TrainerHook, optimizer: Any, *, every: int = 1) -> Any:
    """Publish after every ``every``-th step of ``optimizer``; -> a handle whose ``remove()`` ends that.

    The hook numbers the steps from its last one on. An optimizer step that a loss scaler skips publishes nothing. The
    hook still has to be closed, or used as a context manager. Raises UsageError ``hook-option`` for an ``every`` below
    1; ``optimizer.step()`` raises what `TrainerHook.step` raises.
    """
    check_every(every)
    if hook.last_step is None:
        hook.step()  # the weights before the first step: what its patch applies to
    done = 0

    def after(*_: Any) -> None:
        nonlocal done
        done += 1
        if done % every == 0:
            hook.step()

    return optimizer.register_step_post_hook(after)
