"""The hook: three lines in a training script publish every step."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import torch

from deltackpt.errors import ConflictError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.hooks.capture import Capture
from deltackpt.hooks.decisions import StepDecision, TrainingStart
from deltackpt.hooks.exporter import HookExporter
from deltackpt.hooks.finite import counts_with, refuse
from deltackpt.hooks.live import LiveSession, live_group, live_side
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.opening import Target, everyones, existing, extractor, process_groups, secured
from deltackpt.hooks.options import QUEUE, TIMEOUT, Errors, Full, HookOptions, NonFinite, Resume
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.plan import FilePlan, Global, check_plan, files_of, held_by, plan_state, shard_cut
from deltackpt.hooks.process_group import ProcessGroup, everyone, share
from deltackpt.hooks.publish import Base, Publisher, PublishOptions, TrainerState
from deltackpt.hooks.resume import resume_from
from deltackpt.hooks.side import Side, side_files
from deltackpt.hooks.state import added, all_sums, owned
from deltackpt.hooks.training_branch import TrainingBranch
from deltackpt.hooks.training_state import TrainingState
from deltackpt.hooks.unchanged import Unchanged
from deltackpt.hooks.worker import Worker
from deltackpt.publish.manifest import AnchorPolicy, check_step
from deltackpt.publish.step import EncodeOptions
from deltackpt.quantize.checkpoint import with_side
from deltackpt.quantize.pieces import Quantizer
from deltackpt.quantize.recipe import Recipe
from deltackpt.repository import Ref, Repository
from deltackpt.signing.keys import Signer
from deltackpt.signing.policy import TrustPolicy
from deltackpt.torch_views.adapters import Peft
from deltackpt.torch_views.extract import Cast, Locate, Piece, Source
from deltackpt.torch_views.names import Rename
from deltackpt.util.garbage import collections_put_off
from deltackpt.util.traces import span, with_trace

PATIENCE = 20.0  # seconds that `abandon` waits at most
STALL = 3600.0  # seconds that `step` waits for the queue before it raises


class TrainerHook:
    """Publish a model's weights after every step, without stalling its training.

        with TrainerHook(model, "runs/repo", dtype=torch.bfloat16) as hook:
            hook.step(0)
            for step in range(1, steps + 1):
                train()
                hook.step(step)

    ``source``      a module, a state dict whose tensors are written in place, or a function that gives one
    ``repository``  URL or directory, made if there is none
    ``dtype``       what floating-point tensors are cast to on the way in: a dtype, {name: dtype}, or a function
    ``rename``      {name: name} or a function, asked with the names that ``save_pretrained`` of the model would write;
                    None leaves a tensor out
    ``model``       whose state dict it is, where the source is none: it says names, configs and what stays in fp32
    ``locate``      (offset, whole shape) of a plain tensor that is a shard, by its name in the model and tensor; None
                    for a whole one
    ``snapshot``    "device": a copy of the published weights beside them; "host": in (pinned) host memory; or the path
                    of a managed cache, whose slot is mapped and follows: no memory, and it survives the process
    ``full``        what `step` does when ``queue`` steps wait: "wait", or "merge" it with the last of them
    ``errors``      what `step` does when publishing an earlier step failed: "raise", or "carry": publish its changes
                    with the next, and raise in `close` if that failed too
    ``peft``        of a model with adapters of PEFT: the base model with the adapter "merged", or the "adapter" alone
    ``resume``      what to do where the weights are not the ref's step: see `resume.resume_from`
    ``nonfinite``   elements that are infinite or NaN: "count" them in metrics and log, or "refuse" the step
    ``quantize``    a `quantize.Recipe`, or its name: what the weights are quantised to, after ``dtype``'s cast
    ``anchor``      which steps are also stored whole
    ``side``        files of the checkpoint: {path: bytes}, or things that have ``save_pretrained``
    ``encoding``    "auto", or that of `codecs.CHOICES` which is to be used where it can be; "auto@8" cuts finer tiles,
                    so that each of 8 ranks of an engine reads its share and little else
    ``shard_bytes`` bytes of an anchor's file; None: as Hugging Face's tools cut them, less where there are more ranks
    ``threads``     that compare and encode; None: one a processor
    ``on_device``   compare and encode on the weights' device; None: on all but CPUs
    ``sharded``     None: if torch.distributed runs, every rank makes a hook, and publishes what it owns
    ``timeout``     seconds that ranks wait for each other: more than the slowest of them takes to store its share
    ``metadata``    of every step's manifest
    ``sign``        the key that signs every step: the path of an OpenSSH private key, or ``command:…``; None: what
                    DELTACKPT_SIGN_KEY says, if anything
    ``trust``       whose signatures the step that training goes on from has: that of `Repository.secure`
    ``report``      is called with the `StepMetrics` of each published step, from the thread that publishes
    ``metrics_port`` serves Prometheus metrics at rank 0, on loopback or at ``HOST:PORT``; 0: on any port, which is
                    `exporter.port`
    ``live``        a `deltackpt.live.Session`, which takes every step to engines as well
    ``optimizer``   what a resumed training needs, kept on ``REF-optimizer``: an optimizer, or a `TrainingState`

    An error loses no step: what was not published is published with the next one. `step`, `close` and the constructor
    are called by all ranks. Raises UsageError ``hook-option`` or ``encoding-choice`` for a value that an option does
    not take, what `resume_from` raises, and the errors of names, placements and stores.
    """

    metrics: StepMetrics | None = None  # of the last published step
    _closed = False
    _skipped: tuple[int, Mapping[str, Any] | None] | None = None

    def __init__(
        self,
        source: Source,
        repository: str | os.PathLike[str] | Repository,
        *,
        ref: str = "main",
        dtype: Cast = None,
        rename: Rename | None = None,
        model: torch.nn.Module | None = None,
        locate: Locate | None = None,
        snapshot: Literal["device", "host"] | os.PathLike[str] = "device",
        full: Full = "wait",
        errors: Errors = "raise",
        queue: int = QUEUE,
        peft: Peft | None = None,
        resume: Resume = "continue",
        nonfinite: NonFinite = "count",
        quantize: Recipe | str | None = None,
        anchor: AnchorPolicy = AnchorPolicy(),
        side: Side = None,
        encoding: str = "auto",
        shard_bytes: int | None = None,
        threads: int | None = None,
        on_device: bool | None = None,
        sharded: bool | None = None,
        timeout: float = TIMEOUT,
        metadata: Mapping[str, Any] | None = None,
        report: Callable[[StepMetrics], None] | None = None,
        metrics_port: int | str | None = None,
        sign: str | os.PathLike[str] | Signer | None = None,
        trust: str | os.PathLike[str] | TrustPolicy | None = None,
        live: LiveSession | None = None,
        optimizer: torch.optim.Optimizer | TrainingState | None = None,
    ) -> None:
        self._options = options = HookOptions(
            ref=ref, dtype=dtype, rename=rename, model=model, locate=locate, snapshot=snapshot, full=full,
            errors=errors, queue=queue, peft=peft, resume=resume, nonfinite=nonfinite, quantize=quantize, anchor=anchor,
            side=side, encoding=encoding, shard_bytes=shard_bytes, threads=threads, on_device=on_device,
            sharded=sharded, timeout=timeout, metadata=metadata, report=report, sign=sign, trust=trust, live=live,
            metrics_port=metrics_port, optimizer=optimizer,
        )  # fmt: skip
        self._group, publishing = process_groups(sharded, timeout)
        self._stall = STALL if self._group.size == 1 else 0.9 * timeout  # rank 0 gives up before it is taken for lost
        found = existing(self._group, repository, options)
        self._extract = extractor(self._group, found, source, options)
        pieces, held = everyones(self._group, self._extract, held_by)
        plan, self._layout = plan_state(held), {piece.name: piece.layout for piece in pieces}
        start = self._start(source, pieces, plan, found or repository)
        self.repo, self._last = start.repo, start.step
        mine, link = owned(pieces, plan, self._group.rank), None if start.fresh else start.link
        self._capture = Capture(self.repo, mine, link, options, ranks=self._group.size)
        self.publisher, self._whole = self._publisher(publishing, plan, start), start.first_is_whole or anchor.now
        self._pending, self._unchanged = Pending(queue), Unchanged(source)
        self.exporter = HookExporter(self._pending, None if self._group.rank else metrics_port)
        self._live = live_side(live, live_group(live, self._group.size > 1, timeout), self.publisher, queue, timeout)
        self._worker = Worker(self._pending, publishing, self._publish, timeout, self.publisher.lease.close)
        self._training = TrainingBranch(options, source, self.repo, self._group, self._pending, self._worker)
        self._training.begin(TrainerHook, self.abandon)
        atexit.register(_abandon, weakref.ref(self))

    def _start(self, source: Source, pieces: list[Piece], plan: Mapping[str, Global], target: Target) -> TrainingStart:
        """Find out, by all ranks together, which step the weights are. A repository is made if there is none."""
        options = self._options
        sums = all_sums(pieces, options.threads_or_default)
        held = self._group.gather({(piece.name, piece.box): sums[piece.name] for piece in pieces})
        stem, cut = shard_cut(plan, options.peft == "adapter", options.shard_bytes, self._group.size)
        base: Base | None = None
        seek: Ref | None = None
        repo: Repository | None = target if isinstance(target, Repository) else None

        def first() -> tuple[Link | None, bool, FilePlan]:
            nonlocal base, seek, repo
            total = added(held or [])
            given = side_files(options.model or source, options.side, options.dtype, options.peft)
            if isinstance(self._extract, Quantizer):
                given = with_side(given, self._extract.recipe, self._extract.kept, self._extract.taken)
            repo = repo or secured(Repository.open_or_create(target), options)  # type: ignore[arg-type]
            base, seek, fresh = resume_from(repo, options.ref, plan, total, options.resume)
            layout = repo.layout(base.manifest) if base else None
            read = {s.path: repo.read(s.file, s.file.size) for s in layout.side} if layout else {}
            return base.link if base else None, fresh, files_of(plan, layout, {**read, **given}, cut, stem)

        link, fresh, files = share(self._group, first)
        opened = repo or Repository.open(target)  # type: ignore[arg-type]
        return TrainingStart(opened, link, fresh, files, base, seek)

    def _publisher(self, group: ProcessGroup, plan: Mapping[str, Global], start: TrainingStart) -> Publisher:
        options = self._options
        state = TrainerState(plan, start.files, self._capture.words, self._capture.sums, self._capture.instead)
        encode = EncodeOptions(options.encoding, options.threads_or_default)
        publishing = PublishOptions(options.anchor, encode, dict(options.metadata or {}))
        publisher = Publisher(self.repo, options.ref, group, state, publishing)
        publisher.base, publisher.seek, publisher.fresh = start.base, start.seek, start.fresh
        return publisher

    @property
    def last_step(self) -> int | None:
        """The step that was captured last; before the first, the one that the hook began at."""
        return self._last

    @property
    def compiling(self) -> Sequence[Any]:
        """Of each card, the `gpu.compile_ahead.CompileAhead` that compiles what `step` needs, from the making on."""
        return self._capture.compiling

    def step(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Capture the weights as they are now as the next step; returns when that is done, before it is published.

        ``step`` is one more than the last if it is not given. Raises an error of an earlier step's publishing (this
        step is then not captured: call again to continue), ConflictError ``step-order``, ChainError ``state-changed``,
        StoreError ``publish-stalled``, CheckpointError ``not-finite``, UsageError ``hook-closed``, ``step-negative``.
        """
        if self._closed:
            raise UsageError("hook-closed", where="the trainer hook", have="a closed hook", need="an open one")
        number = check_step((0 if self._last is None else self._last + 1) if step is None else step)
        if self._last is not None and number <= self._last:
            have, need = f"step {self._last} already", f"a step after it, not {number}"
            raise ConflictError("step-order", where="the trainer hook", have=have, need=need)
        self._unchanged.warn()
        began = time.monotonic()
        decision = share(self._group, self._decide)
        if decision.skip:
            self._skipped, self._last = (number, metadata), number
            return
        if self._group.rank:
            self._wait_for_queue(raise_errors=False)
        with span("deltackpt.step", metadata, step=number) as traced:
            self._capture_step(number, decision, with_trace(metadata, traced), began)
            self._training.step(number, metadata)

    def _capture_step(
        self, number: int, decision: StepDecision, metadata: Mapping[str, Any] | None, began: float
    ) -> None:
        waited = time.monotonic()
        try:
            with collections_put_off():  # an object a tensor is made
                pieces = self._extract()
                self._check(pieces)
                mine = [p for p in pieces if p.name in self._capture.names]
            with self._capture.lock, self._capture.capturing(mine, lambda: self._pending.was_put(number)) as found:
                counts = counts_with(self._capture.nonfinite, found.gains)
                if self._options.nonfinite == "refuse":
                    refuse(everyone(self._group, counts))
                item = CapturedStep(
                    number, found.deltas, decision.whole, dict(metadata or {}),
                    seconds=time.monotonic() - waited, waited=waited - began, nonfinite=sum(counts.values()),
                )  # fmt: skip
                self._pending.put(item.off_card(), into_last=decision.merge)
                self._capture.nonfinite = counts
        finally:
            if self._pending.was_put(number):
                if self._live is not None:
                    self._live.put(item, decision.live_merge)
                self._whole, self._skipped, self._last = False, None, number
            else:
                for queue in (self._pending, self._live) if self._live else (self._pending,):
                    queue.cancel_merge()
        if self._capture.anchors_from_weights:  # they may not change until the anchor is stored
            self._pending.wait(lambda: not self._snapshot_in_use, self._stall, until_error=False)
        if self._live is not None:
            self._live.wait(self._stall)

    @property
    def _snapshot_in_use(self) -> bool:
        return self._pending.snapshot_in_use or (self._live is not None and self._live.snapshot_in_use)

    def _decide(self) -> StepDecision:
        """At rank 0: what to do with this step, once the queue is not full."""
        merge = False
        self._training.raise_error()
        if self._options.full == "merge":
            self._raise_error(ordinary=self._options.errors == "raise")
            if self._snapshot_in_use:
                return StepDecision(skip=True)
            merge = self._pending.reserve_merge()
        else:
            self._wait_for_queue(raise_errors=self._options.errors == "raise")
        whole, self.publisher.due = self._whole or self.publisher.due, False
        return StepDecision(merge=merge, live_merge=self._live is not None and self._live.reserve_merge(), whole=whole)

    def _wait_for_queue(self, raise_errors: bool) -> None:
        """Wait until the snapshot may change, and, unless steps are merged, until the queue is not full."""

        def ready() -> bool:
            return not self._snapshot_in_use and (self._options.full == "merge" or not self._pending.full)

        while True:
            self._raise_error(ordinary=raise_errors)
            if ready():
                return
            self._pending.wait(ready, self._stall)

    def _raise_error(self, ordinary: bool) -> None:
        """Raise what went wrong in the background; unless ``ordinary``, only if nothing can be published any more."""
        error = self._pending.pop_error()
        if self._worker.fatal is not None:
            raise self._worker.fatal
        if error is not None and ordinary:
            raise error

    def _check(self, pieces: list[Piece]) -> None:
        now = {piece.name: piece.layout for piece in pieces}
        if now != self._layout:
            check_plan(now, self._layout)

    def _publish(self, item: CapturedStep) -> StepMetrics:
        with self.exporter.publishing(item):
            found = self._live.publish(self.publisher, item) if self._live else self.publisher.publish(item)
        found = replace(found, queue=len(self._pending) - 1)
        base = self.publisher.base
        self._training.weights_published(item.step, base)
        try:
            self._capture.published(base.link if base else None, self._pending, self.publisher)
        except Exception as error:  # the step is published, and the snapshot unchanged: only the cache is behind
            self._pending.add_error(error)
        self.metrics = found
        self._unchanged.saw(found)
        self.exporter.published(found)
        if self._options.report is not None:
            with suppress(Exception):  # a logger that fails does not fail the training
                self._options.report(found)
        return found

    def flush(self) -> None:
        """Wait until every captured step is published. Raises what went wrong."""
        self._pending.wait(lambda: len(self._pending) == 0, self._stall)
        self._raise_error(ordinary=True)
        self._training.flush()

    def close(self) -> None:
        """Publish what is pending, try again what failed, and free everything. Raises if a step is not published."""
        if self._closed:
            return
        try:
            if self._skipped is not None:
                number, metadata = self._skipped
                self._wait_for_queue(raise_errors=False)
                self._last = number - 1
                self._capture_step(number, StepDecision(whole=self._whole), metadata, time.monotonic())
            self._pending.pop_error()
            self._pending.retry()
        except BaseException:
            self.abandon()
            raise
        self._finish()
        if (error := self._pending.pop_error() or self._worker.fatal or self._training.error) is not None:
            raise error

    def abandon(self) -> None:
        """Stop without publishing what is pending; an unfinished step is withdrawn.

        Waits for the publishing thread to notice, but not for ranks or stores that do not answer.
        """
        self.publisher.cancelled = True
        self._finish(PATIENCE)

    def _finish(self, patience: float | None = None) -> None:
        self._closed = True
        self._pending.close()
        try:
            self._worker.wait(patience)
        except BaseException:
            self.publisher.cancelled, patience = True, PATIENCE
            self._worker.wait(PATIENCE)  # to withdraw an unfinished step; a second interrupt ends this too
            raise
        finally:
            self.exporter.close()
            if self._live is not None:
                self._live.close(patience)
            self._capture.close()
            self._training.finish(patience)
            if patience is None and self._worker.fatal is None:  # else threads may be at work in them
                self._group.close()
                self.publisher.group.close()

    def __enter__(self) -> TrainerHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


def _abandon(hook: weakref.ref[TrainerHook]) -> None:
    """At the end of the interpreter: withdraw an unfinished step."""
    if (found := hook()) is not None and found._worker.alive:
        found.abandon()
