"""The branch of a trainer's state beside that of its weights: `TrainerHook(optimizer=)` (decision 0030).

A hook of its own publishes it, with a snapshot, a queue and a thread of its own. A step of it is published after the
step of the weights, whose manifest it names: who finds a state finds its weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from deltackpt.errors import DeltackptError, StoreError
from deltackpt.hooks.options import HookOptions
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.publish import Base, Extra
from deltackpt.hooks.training_names import FILE
from deltackpt.hooks.training_state import TrainingState
from deltackpt.repository import Repository
from deltackpt.torch_views.extract import Source

if TYPE_CHECKING:
    from deltackpt.hooks.process_group import ProcessGroup
    from deltackpt.hooks.worker import Worker

SUFFIX = "-optimizer"

# What the hook of the state has of the options of the weights' hook; all else of it is as it is for any state dict.
SHARED = ("queue", "resume", "anchor", "encoding", "shard_bytes", "threads", "on_device", "sharded", "timeout",
          "metadata", "sign", "trust")  # fmt: skip


class TrainingBranch:
    """Keeps ``options.optimizer`` on the branch ``REF-optimizer``; without one it does nothing.

    ``pending`` and ``worker`` are the weights' queue and thread. Every rank makes the same calls in the same order.
    """

    def __init__(
        self,
        options: HookOptions,
        source: Source,
        repo: Repository,
        group: ProcessGroup,
        pending: Pending,
        worker: Worker,
    ) -> None:
        self.error: BaseException | None = None  # what `finish` left unpublished
        self._state = TrainingState.of(options.optimizer)
        self._options, self._source, self._repo, self._group = options, source, repo, group
        self._pending, self._worker = pending, worker
        self._make: Callable[..., Any] | None = None
        self._hook: Any = None
        self._cancelled = False
        self._tensors: dict[str, torch.Tensor] = {}
        self._layout: dict[str, Any] = {}
        self._documents: dict[int, bytes] = {}
        self._weights: dict[int, dict[str, Any]] = {}

    def begin(self, make: Callable[..., Any], abandon: Callable[[], None]) -> None:
        """Open the branch; ``make`` is `TrainerHook`. An error is raised once the weights' hook is ended by
        ``abandon``."""
        if self._state is None:
            return
        self._make = make
        try:
            self._state.document(self._source, self._group.gather)  # to refuse at once what cannot be kept
            self._follow(self._state, self._options.resume)
        except BaseException:
            abandon()
            raise

    def _follow(self, state: TrainingState, resume: str) -> None:
        """Look at the tensors as they are now. Where they are others than before, a new hook begins with all of them.

        An optimizer has no moments before its first step.
        """
        self._tensors = state.tensors(self._source)
        layout = {name: (value.dtype, tuple(value.shape)) for name, value in self._tensors.items()}
        if layout == self._layout:
            return
        lost: DeltackptError | None = None
        if self._hook is not None:
            try:
                self._hook.close()
            except DeltackptError as error:  # the new hook stores all of it
                lost = error
            resume = "anchor"
        make = self._make
        assert make is not None
        shared = {name: getattr(self._options, name) for name in SHARED}
        shared |= {"ref": self._options.ref + SUFFIX, "snapshot": state.snapshot, "resume": resume, "errors": "carry"}
        self._hook = make(lambda: self._tensors, self._repo, **shared)
        self._hook.publisher.before = self._before
        self._layout = layout
        if lost is not None:
            what = "the training's state has other tensors than before, and what waited of it was not published"
            message = f"deltackpt: {what}: {lost.sentence()}. The next step of it is stored whole."
            warnings.warn(message, RuntimeWarning, stacklevel=3)

    def step(self, number: int, metadata: Mapping[str, Any] | None) -> None:
        """Capture the state as it is now, if the step is one that is kept. Raises what a hook's `step` raises."""
        state = self._state
        if state is None or number % state.every:
            return
        self._follow(state, "anchor")
        document = state.document(self._source, self._group.gather)
        if document is not None:
            self._documents[number] = document
        self._hook.step(number, metadata=metadata)

    def raise_error(self) -> None:
        """At rank 0: raise what went wrong in the background, unless errors are to be carried."""
        if self._hook is not None:
            try:
                self._hook._raise_error(ordinary=self._options.errors == "raise")
            except StoreError as error:
                if error.code != "weights-unpublished":  # the weights' own error says why
                    raise

    def weights_published(self, step: int, base: Base | None) -> None:
        """The weights' branch has a step. Only rank 0 knows of a base."""
        if self._state is not None and base is not None and not step % self._state.every:
            link, digest = base.link, base.manifest.state
            self._weights[step] = {"ref": self._options.ref, "step": step, "id": link.id, "state": digest}

    def _before(self, captured: CapturedStep) -> Extra:
        """Wait for the weights' step, and say which it is. Raises StoreError ``weights-unpublished``; the state then
        goes with the next step."""

        def settled() -> bool:
            over = self._cancelled or not self._worker.alive or not self._pending.stands(captured.step)
            return captured.step in self._weights or over

        self._pending.wait(settled, None, until_error=False)
        found = self._weights.get(captured.step)
        for older in [step for step in self._documents if step < captured.step]:
            del self._documents[older]
        for older in [step for step in self._weights if step < captured.step]:
            del self._weights[older]
        if found is None:
            where = f"{self._repo.store.url}, ref {self._options.ref}{SUFFIX}, step {captured.step}"
            have, hint = "weights that were not published", "The state goes with the next step that is published."
            raise StoreError("weights-unpublished", where=where, have=have, need="those of the same step", hint=hint)
        return Extra({"weights": found}, {FILE: self._documents[captured.step]})

    def flush(self) -> None:
        """Wait until every captured state is published. Raises what went wrong."""
        if self._hook is not None:
            self._hook.flush()

    def finish(self, patience: float | None) -> None:
        """Publish what is pending, once the weights' thread has ended; with a ``patience`` drop it. What went wrong is
        `error`."""
        if self._hook is None:
            return
        if patience is not None:
            self._cancelled = True
            self._hook.abandon()
            return
        try:
            self._hook.close()
        except Exception as error:
            self.error = error
