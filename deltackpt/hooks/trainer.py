"""The hook: three lines in a training script publish every step."""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import torch

from deltackpt.codecs import SCAN_LIMIT
from deltackpt.errors import ConflictError, UsageError
from deltackpt.hooks.capture import Capture
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep, Pending
from deltackpt.hooks.plan import check_plan, files_of, held_by, plan_state, shard_size
from deltackpt.hooks.process_group import Processes, ProcessGroup, SingleProcess, everyone, share
from deltackpt.hooks.publish import Publisher, PublishOptions, TrainerState
from deltackpt.hooks.resume import Resume, resume_from
from deltackpt.hooks.side import Side, side_files
from deltackpt.hooks.state import added, all_sums, owned, state_of
from deltackpt.hooks.worker import Worker
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.publish.step import EncodeOptions
from deltackpt.repository import Repository
from deltackpt.torch_views.extract import Cast, Locate, Piece, Source, pieces_of
from deltackpt.torch_views.names import Rename
from deltackpt.util.parallel import threads_or_default

QUEUE = 2  # steps that may wait
PATIENCE = 20.0  # seconds that `abandon` waits at most
STALL = 3600.0  # seconds that `step` waits for room before it gives up


@dataclass(frozen=True)
class _Decision:
    """What all ranks do with a step: the leader says so."""

    skip: bool = False  # its changes go into the next one
    merge: bool = False
    whole: bool = False


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
    ``rename``      {stripped name: name} or a function; None leaves a tensor out
    ``snapshot``    "device": a copy of the published weights beside them; "host": in (pinned) host memory; or the path
                    of a managed cache, whose slot is mapped and follows: no memory, and it survives the process
    ``full``        what `step` does when ``queue`` steps wait: "wait", or "merge" it with the last of them
    ``errors``      what `step` does when publishing an earlier step failed: "raise", or "carry" its changes on with
                    the next, and raise in `close` if that failed too
    ``resume``      see `resume_from.attach`
    ``side``        files of the checkpoint: {path: bytes}, or things that have ``save_pretrained``
    ``on_device``   compare and code on the weights' device; None: on all but CPUs
    ``sharded``     None: if torch.distributed runs, every rank makes a hook, and publishes what it owns
    ``timeout``     seconds that ranks wait for each other: more than the slowest of them takes to store its share
    ``report``      is called with the `StepMetrics` of each published step, from the thread that publishes

    A step is lost by no error: what was not published goes out with the next one. `step`, `close` and the constructor
    are called by all ranks alike. Raises what `resume_from` raises, and the errors of names, placements and stores.
    """

    def __init__(
        self,
        source: Source,
        repository: str | os.PathLike[str] | Repository,
        *,
        ref: str = "main",
        dtype: Cast = None,
        rename: Rename | None = None,
        locate: Locate | None = None,
        snapshot: Literal["device", "host"] | os.PathLike[str] = "device",
        full: Literal["wait", "merge"] = "wait",
        errors: Literal["raise", "carry"] = "raise",
        queue: int = QUEUE,
        resume: Resume = "continue",
        anchor: AnchorPolicy = AnchorPolicy(),
        side: Side = None,
        encoding: str = "auto",
        scan_limit: int = SCAN_LIMIT,
        shard_bytes: int | None = None,
        threads: int | None = None,
        on_device: bool | None = None,
        sharded: bool | None = None,
        timeout: float = 1800.0,
        metadata: Mapping[str, Any] | None = None,
        report: Callable[[StepMetrics], None] | None = None,
    ) -> None:
        self._extract: Callable[[], list[Piece]] = lambda: pieces_of(source, dtype=dtype, rename=rename, locate=locate)
        self._front, back = _teams(sharded, timeout)
        self._merging, self._carry = full == "merge", errors == "carry"
        self._threads, self._report = threads_or_default(threads), report
        # In a team the leader gives up before the others take it for dead.
        self._stall = STALL if self._front.size == 1 else 0.9 * timeout
        self.metrics: StepMetrics | None = None  # of the last published step
        self._closed = False
        self._skipped: tuple[int, Mapping[str, Any] | None] | None = None
        pieces = self._extract()
        self._layout = {piece.name: piece.layout for piece in pieces}
        plan = plan_state(everyone(self._front, held_by(pieces)))
        self.repo = _open(self._front, repository)
        mine = owned(pieces, plan, self._front.rank)
        sums = all_sums(pieces, self._threads)
        held = self._front.gather({(piece.name, piece.box): sums[piece.name] for piece in pieces})

        cut = shard_bytes or shard_size(plan, self._front.size)

        def first() -> tuple[Any, ...]:
            base, seek, fresh = resume_from(self.repo, ref, state_of(plan, added(held or [])), resume)
            given = side_files(source, side, dtype if isinstance(dtype, torch.dtype) else None)
            layout = self.repo.layout(base.manifest) if base else None
            known = {s.path: self.repo.read(s.file, s.file.size) for s in layout.side} if layout else {}
            leaders.update(base=base, seek=seek)
            link = base.link if base else None
            return link, fresh, files_of(plan, layout, {**known, **given}, cut)

        leaders: dict[str, Any] = {"base": None, "seek": None}
        link, fresh, files = share(self._front, first)
        self._taker = Capture(
            self.repo, ref, snapshot, self._front, mine, None if fresh else link,
            scan_limit=scan_limit, encoding=encoding, threads=self._threads, device=on_device,
        )  # fmt: skip
        published = TrainerState(plan, files, self._taker.words, self._taker.sums)
        encode = EncodeOptions(encoding, scan_limit, self._threads)
        self.publisher = Publisher(
            self.repo, ref, back, published, PublishOptions(anchor, encode, dict(metadata or {}))
        )
        self.publisher.base, self.publisher.seek, self.publisher.fresh = leaders["base"], leaders["seek"], fresh
        self._plan, self._rank = plan, self._front.rank
        self._last: int | None = link.step if link else None
        self._whole = link is None or fresh or anchor.now
        self._pending = Pending(max(1, queue))
        self._worker = Worker(self._pending, back, self._publish, timeout, self.publisher.lease.close)
        atexit.register(_abandon, weakref.ref(self))

    @property
    def last_step(self) -> int | None:
        """The step that these weights were, when the hook was made, or were taken as."""
        return self._last

    def step(self, step: int | None = None, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Take the weights as they are now as the next step; returns when the change is taken, not when it is out.

        ``step`` is one more than the last if it is not given. Raises an error of an earlier step's publishing (this
        step is then not taken: call again to go on), ConflictError ``step-order``, ChainError ``state-changed``.
        """
        if self._closed:
            raise UsageError("hook-closed", where="the trainer hook", have="a closed hook", need="an open one")
        number = (0 if self._last is None else self._last + 1) if step is None else step
        if number < 0 or (self._last is not None and number <= self._last):
            have, need = f"step {self._last} already", f"a step after it, not {number}"
            raise ConflictError("step-order", where="the trainer hook", have=have, need=need)
        began = time.monotonic()
        decision = share(self._front, self._decide)
        if decision.skip:
            self._skipped, self._last = (number, metadata), number
            return
        if self._rank:
            self._room(carry=True)
        self._take(number, decision, metadata, began)

    def _take(self, number: int, decision: _Decision, metadata: Mapping[str, Any] | None, began: float) -> None:
        waited = time.monotonic()
        try:
            pieces = self._extract()
            self._check(pieces)
            mine = [p for p in pieces if p.name in self._taker.names]
            with self._taker.lock, self._taker.taking(mine, lambda: self._pending.took(number)) as deltas:
                item = CapturedStep(
                    number, deltas, decision.whole, dict(metadata or {}),
                    seconds=time.monotonic() - waited, waited=waited - began,
                )  # fmt: skip
                self._pending.put(item, into_last=decision.merge)
        finally:
            if self._pending.took(number):
                self._whole, self._skipped, self._last = False, None, number
            else:
                self._pending.release()
        if self._taker.live:  # an anchor is read from the weights themselves: they may not move on yet
            self._pending.wait(lambda: not self._pending.held, self._stall, heed=False)

    def _decide(self) -> _Decision:
        """By the leader: what to do with this step, once there is room for it."""
        merge = False
        if self._merging:
            self._surface(self._carry)
            if self._pending.held:
                return _Decision(skip=True)
            merge = self._pending.claim()
        else:
            self._room(carry=self._carry)
        whole, self.publisher.due = self._whole or self.publisher.due, False
        return _Decision(merge=merge, whole=whole)

    def _room(self, carry: bool) -> None:
        """Wait until the snapshot may move on, and, unless steps are merged, until the queue has room."""

        def ready() -> bool:
            return not self._pending.held and (self._merging or not self._pending.full)

        while True:
            self._surface(carry)
            if ready():
                return
            self._pending.wait(ready, self._stall)

    def _surface(self, carry: bool) -> None:
        """Raise what went wrong behind; ``carry``: only if nothing can be published any more."""
        error = self._pending.error()
        if self._worker.fatal is not None:
            raise self._worker.fatal
        if error is not None and not carry:
            raise error

    def _check(self, pieces: list[Piece]) -> None:
        now = {piece.name: piece.layout for piece in pieces}
        if now != self._layout:
            check_plan(now, self._layout)

    def _publish(self, item: CapturedStep) -> StepMetrics:
        found = self.publisher.publish(item)
        found = replace(found, queue=len(self._pending) - 1)
        base = self.publisher.base
        try:
            self._taker.published(base.link if base else None, self._pending, anchor=self.publisher)
        except Exception as error:  # the step is out, and the snapshot stays where it was: only the cache is behind
            self._pending.note(error)
        self.metrics = found
        if self._report is not None:
            with suppress(Exception):  # a logger's trouble is not the training's
                self._report(found)
        return found

    def flush(self) -> None:
        """Wait until every step that was taken is published. Raises what went wrong."""
        self._pending.wait(lambda: len(self._pending) == 0, self._stall)
        self._surface(carry=False)

    def close(self) -> None:
        """Publish what is pending, trying again what failed, and let everything go. Raises if a step is left out."""
        if self._closed:
            return
        try:
            if self._skipped is not None:
                number, metadata = self._skipped
                self._room(carry=True)
                self._last = number - 1
                self._take(number, _Decision(whole=self._whole), metadata, time.monotonic())
            self._pending.error()
            self._pending.retry()
        except BaseException:
            self.abandon()
            raise
        self._finish()
        error = self._pending.error() or self._worker.fatal
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Stop without publishing what is pending; what is half done is taken back.

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
            self.publisher.cancelled = True
            self._worker.wait(PATIENCE)  # to take back what is half done; a second interrupt ends this too
            raise
        finally:
            self._taker.close()

    def __enter__(self) -> TrainerHook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


def _teams(sharded: bool | None, timeout: float) -> tuple[ProcessGroup, ProcessGroup]:
    """One team for the thread that trains, one for the thread that publishes: their words must not mix."""
    import torch.distributed as dist

    running = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if sharded is False or not running:
        if sharded:
            need = "torch.distributed, initialized, with more than one rank"
            raise UsageError("not-distributed", where="the trainer hook", have="one process", need=need)
        return SingleProcess(), SingleProcess()
    return Processes(timeout), Processes(timeout)


def _open(team: ProcessGroup, repository: str | os.PathLike[str] | Repository) -> Repository:
    """The leader makes the repository if there is none; then all open it."""
    if isinstance(repository, Repository):
        return repository
    found = {"repo": None}

    def first() -> str:
        found["repo"] = Repository.open_or_create(repository)  # type: ignore[assignment]
        return found["repo"].id  # type: ignore[attr-defined, no-any-return]

    share(team, first)
    return found["repo"] or Repository.open(repository)


def _abandon(hook: weakref.ref[TrainerHook]) -> None:
    """An interpreter that ends takes back what is half done."""
    if (found := hook()) is not None and found._worker.alive:
        found.abandon()
