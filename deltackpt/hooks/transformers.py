"""A callback for the Trainer of Transformers, and for those of TRL, which are built on it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from deltackpt.errors import ExtraMissingError
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.options import HookOptions, check_every
from deltackpt.hooks.trainer import TrainerHook
from deltackpt.repository import Repository
from deltackpt.util.extras import install_line
from deltackpt.util.places import check_url

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":  # it is there, and lacks something itself
        raise
    where = "deltackpt.hooks.transformers"
    raise ExtraMissingError("transformers", where, install_line("transformers")) from error


class DeltaCheckpointCallback(TrainerCallback):  # type: ignore[misc]
    """Publishes the model after every optimizer step, or every ``every``-th, and the last one in any case.

        callback = DeltaCheckpointCallback("runs/repo", dtype=torch.bfloat16)
        trainer = Trainer(..., callbacks=[callback])
        callback.log_to(trainer)    # optional: metrics in the trainer's own logs

    Config, generation config and tokenizer go with every anchor. All other arguments are `TrainerHook`'s, and are
    checked at once. A training that ends by an exception leaves the hook open: call `close`, or `abandon` to drop what
    is pending. Raises UsageError ``hook-option``, ``encoding-choice``.
    """

    def __init__(self, repository: str | os.PathLike[str] | Repository, *, every: int = 1, **options: Any) -> None:
        check_every(every)
        HookOptions(**options)
        if not isinstance(repository, Repository):
            check_url(os.fspath(repository))
        self.hook: TrainerHook | None = None
        self._repository, self._every, self._options = repository, every, options
        self._log: Callable[[dict[str, float]], None] | None = None
        self._logged: StepMetrics | None = None

    def log_to(self, trainer: Any) -> None:
        """Report metrics through ``trainer.log``: to W&B, TensorBoard and all else that it reports to.

        They join the trainer's own lines: a line of our own, in between, would end the turn of its next one, and take
        what trainers like TRL's collect for it.
        """
        self._log = log = trainer.log

        @wraps(log)
        def with_metrics(logs: dict[str, float], *rest: Any, **more: Any) -> None:
            evaluation = any(name.startswith("eval_") for name in logs)
            log({**logs, **({} if evaluation else self._new_metrics())}, *rest, **more)

        trainer.log = with_metrics

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the hook, and publish the weights unless they are a published step."""
        if self.hook is not None:  # a second call of train(): the weights may have changed
            self.close()
        options = {"side": _tokenizers(kwargs), **self._options}
        self.hook = TrainerHook(kwargs["model"], self._repository, **options)
        if self.hook.last_step is None or self.hook.last_step < state.global_step:
            self.hook.step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish every ``every``-th step."""
        hook = self.hook
        if hook is not None and state.global_step % self._every == 0 and state.global_step != hook.last_step:
            hook.step(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the last step, and close the hook."""
        if self.hook is not None and self.hook.last_step != state.global_step:
            self.hook.step(state.global_step)
        hook = self.hook
        self.close()
        if self._log is not None and (metrics := self._new_metrics(hook)):
            self._log(metrics)

    def close(self) -> None:
        """Publish what is pending. Raises if a step is left out."""
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook.close()

    def abandon(self) -> None:
        """Stop without publishing what is pending."""
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook.abandon()

    def _new_metrics(self, hook: TrainerHook | None = None) -> dict[str, float]:
        """Of the newest step, if they were not logged yet."""
        hook = hook or self.hook
        if hook is None or hook.metrics is None or hook.metrics is self._logged:
            return {}
        self._logged = hook.metrics
        return self._logged.to_log()


def _tokenizers(kwargs: dict[str, Any]) -> list[Any]:
    """What the trainer processes its data with, as far as it can be saved."""
    for name in ("processing_class", "tokenizer"):
        if hasattr(kwargs.get(name), "save_pretrained"):
            return [kwargs[name]]
    return []
