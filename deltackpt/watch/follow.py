"""The loop: take snapshots, publish the next complete step, prune."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

from deltackpt.errors import (
    ChainError,
    CheckpointError,
    ConflictError,
    DeltackptError,
    FormatError,
    NotFoundError,
    StoreError,
)
from deltackpt.format.manifest import Link
from deltackpt.publish.write import WriteResult, write
from deltackpt.repository import Repository
from deltackpt.signing.keys import signer
from deltackpt.sync.backoff import Backoff, explained
from deltackpt.util.metrics import Metrics
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.places import check_local, check_url
from deltackpt.watch.branch import Branch, metadata, same_weights
from deltackpt.watch.completion import CompletionDetector
from deltackpt.watch.options import WatchOptions
from deltackpt.watch.prune import (
    LeftOut,
    clear_trash,
    finish,
    prove,
    prove_patch,
    pruned,
    remove,
    remove_held,
)
from deltackpt.watch.snapshot import DirectorySnapshot, compile_pattern, scan
from deltackpt.watch.unmatched import listed, unmatched


@dataclass(frozen=True)
class Published:
    """A step that was published, its directory, and the directories that were removed after it; ``left`` are files in
    these that were not, and why. ``left_out`` is what its directory has and the step does not."""

    directory: str
    step: int
    id: str
    parent: int | None
    anchor: bool
    patch_bytes: int
    changed: int
    seconds: float
    rewound: int | None
    pruned: tuple[str, ...] = ()
    left: LeftOut = ()
    left_out: LeftOut = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class Watch:
    """Follows ``directory``. Every `turn` publishes at most one step; killed at any instant, another process continues.

    ``notify`` is called with what it waits for, in words, once each; `run` counts in ``metrics``. Raises
    UsageError ``sign-key``.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        repository: str | os.PathLike[str],
        options: WatchOptions = WatchOptions(),
        *,
        notify: Callable[[str], None] = lambda text: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        signer(options.sign)  # a key that cannot sign is told now, and not when a step is complete
        check_local(directory, "the directory that the trainer saves into")
        check_url(os.fspath(repository))
        self.root = Path(directory)
        self._pattern = compile_pattern(options.pattern)
        self._url = repository
        self._options = options
        self._threads = threads_or_default(options.threads)
        self._detector = CompletionDetector(options.marker, options.settle, self._threads)
        self._notify, self._notified = notify, set[str]()
        self._branch: Branch | None = None
        self._same: set[tuple[Link, str]] = set()  # steps and stamps whose weights were compared
        self._proven: set[Link] = set()
        self._waiting = False  # for what time alone may change
        self._held = False  # for anything
        self._seen = False  # the directory was there once
        clear_trash(self.root)
        self._matched = False  # was there ever a directory that the pattern fits?

    def run(self, *, poll: float = 1.0, once: bool = False, stop: Event | None = None) -> Iterator[Published]:
        """Every step as it is published; until ``stop`` is set, or, with ``once``, until nothing unpublished is
        complete.

        ``poll`` is in seconds. A store that does not answer is tried again; what was there and is not any more, the
        directory or the repository, is waited for as the options say. Raises what `turn` raises.
        """
        stop = stop or Event()
        self._metrics.seen()
        backoff = Backoff(first=max(poll, 0.01), grace=self._options.grace, any_store_error=True)
        while not stop.is_set():
            try:
                done = self.turn()
            except DeltackptError as found:
                if once:
                    raise
                stop.wait(self._tell(backoff, found))
                continue
            self._seen = True
            if backoff.reset():
                self._notify("it goes on")
            self._metrics.late() if self._held or done is not None else self._metrics.seen()
            if done is not None:
                self._count(done)
                yield done
            elif once and not self._waiting:
                self._must_match()
                return
            else:
                stop.wait(min(poll, max(self._options.settle, 0.01)) if self._waiting else poll)

    def _count(self, done: Published) -> None:
        self._metrics.set("deltackpt_step", done.step)
        self._metrics.add("deltackpt_steps_total", 1)
        self._metrics.add("deltackpt_bytes_total", done.patch_bytes)
        self._metrics.add("deltackpt_changed_elements_total", done.changed)
        self._metrics.add("deltackpt_work_seconds_total", done.seconds)

    def _tell(self, backoff: Backoff, found: DeltackptError) -> float:
        """Seconds until the next attempt after an error. Raises it where there is none."""
        if found.code == "watch-missing" and not self._seen and math.isfinite(self._options.grace):
            raise found  # a wrong name
        error = found if self._branch is None else explained(self._branch.repo, found)
        wait = backoff.delay(error)
        self._metrics.retry(error)
        if backoff.due:
            silent = isinstance(error, StoreError)
            what = f"the store does not answer, trying again: {error.have}"
            self._notify(what if silent else f"{error.where}: {error.have}, waiting for {error.need}")
        return wait

    def turn(self) -> Published | None:
        """Publish the next complete step, if there is one.

        Raises ConflictError ``watch-rewritten``, ``watch-twice``; NotFoundError ``watch-missing``; CheckpointError
        ``not-readable`` for what this user may not read; what `write` raises for the repository, and what
        `Repository.absent` and `confirm_place` raise where it was there, and is not.
        """
        found = scan(self.root, self._pattern)
        self._first_look(found)
        gone = [snapshot for snapshot in found if pruned(snapshot)]
        snapshots = [snapshot for snapshot in found if snapshot not in gone]
        self._detector.forget({snapshot.step for snapshot in snapshots})
        branch = self._branch
        if branch is None and snapshots:
            branch = self._branch = Branch(self._open(), self._options.ref)
        self._clear(gone)
        self._waiting = self._held = False
        if branch is None or not snapshots:
            return None
        abandon = math.inf if self._options.abandon is None else self._options.abandon
        branch.refresh(snapshots[0].step)
        for snapshot in snapshots:
            if branch.head is not None and snapshot.step <= branch.head.step:
                if self._rewritten(branch, snapshot):
                    return self._publish(branch, snapshots, snapshot)
            elif branch.stale.get(snapshot.step) != snapshot.stamp:
                if (reason := self._detector.check(snapshot)) is None:
                    return self._publish(branch, snapshots, snapshot)
                if not reason.soon and self._detector.unchanged(snapshot.step) >= abandon:
                    self._note(f"{snapshot.name} is given up: {reason.why}")
                    continue
                self._waiting |= reason.soon
                self._held = True
                if not reason.soon:
                    self._note(f"{snapshot.name} and what follows wait: {reason.why}")
                break
        self._prune(branch, snapshots)
        return None

    def _first_look(self, found: list[DirectorySnapshot]) -> None:
        """Clear what a killed run was removing; or say what is there instead of checkpoints."""
        if found and not self._matched:
            self._matched = True
            for folder in {snapshot.path.parent for snapshot in found} - {self.root}:
                clear_trash(folder)
        if not self._matched:
            self._note(unmatched(self.root, self._options.pattern).said)

    def _must_match(self) -> None:
        """Raise NotFoundError ``watch-unmatched`` if there are checkpoints, under names of which none fits."""
        there = None if self._matched else unmatched(self.root, self._options.pattern)
        if there is not None and (there.fits or there.itself):
            hint = "`deltackpt write` publishes one checkpoint; watch the directory that new ones appear in."
            raise NotFoundError(
                "watch-unmatched",
                where=self.root,
                have=there.seen,
                need=f"directories called {self._options.pattern}",
                hint=f"Watch with --pattern '{there.fits}'." if there.fits else hint,
            )

    def _rewritten(self, branch: Branch, snapshot: DirectorySnapshot) -> bool:
        """Whether the trainer went back and saved this step again: hashes decide, where the stamp is another one."""
        record = branch.steps.get(snapshot.step)
        if record is None:
            self._note(f"{snapshot.name} came after a later step was published, and is passed over")
            return False
        if record.stamp == snapshot.stamp or (record.link, snapshot.stamp) in self._same:
            return False
        if (reason := self._detector.check(snapshot)) is not None:
            self._waiting |= reason.soon
            return False
        try:
            same = same_weights(branch.repo, record.link, snapshot, self._threads)
        except CheckpointError:  # it is still changing
            return False
        if same:
            self._same.add((record.link, snapshot.stamp))
            return False
        if self._options.rewind and record.parent is not None:
            return True
        raise ConflictError(
            "watch-rewritten",
            where=snapshot.path,
            have=f"other weights than those published as step {snapshot.step}",
            need="a directory that does not change after it was published",
            hint="If the trainer went back to an earlier step, watch with --rewind: the branch follows it back."
            if record.parent is not None
            else "The first step cannot be followed back. Publish the new run into a repository of its own.",
        )

    def _publish(
        self, branch: Branch, snapshots: list[DirectorySnapshot], snapshot: DirectorySnapshot
    ) -> Published | None:
        old = branch.steps.get(snapshot.step)
        parent, back = branch.head, None
        stale = {step: stamp for step, stamp in branch.stale.items() if step > snapshot.step}
        if old is not None and old.parent is not None:
            parent, back = old.parent, f"{old.parent.step}-{old.parent.id}"
            stale |= {s.step: s.stamp for s in snapshots if s.step > snapshot.step and self._is_published(branch, s)}
        parents = [
            s for s in snapshots if parent is not None and s.step == parent.step and self._is_published(branch, s)
        ]
        entry = metadata(snapshot, stale)
        branch.repo.confirm_place()  # what is gone would be made anew, without the steps that were there
        try:
            done = self._write(snapshot, parents, back, entry)
        except CheckpointError as error:
            lasting = isinstance(error.__cause__, PermissionError)  # of a side file: of weights the detector knows
            if lasting or error.code in ("checkpoint-slices", "link-escapes"):  # no change of a moment
                raise
            self._note(f"{snapshot.name} changed while it was read: {error.have}")
            return None
        except ConflictError as error:
            if error.code not in ("ref-moved", "step-order", "ref-forked"):
                raise
            self._note(f"another writer was first: {error.have}")
            return None
        if self._options.prune_dense is not None:
            self._prove(branch, Link(done.step, done.id), parent, parents)
        branch.refresh(snapshots[0].step)
        removed, left = self._prune(branch, snapshots)
        return Published(
            snapshot.name,
            done.step,
            done.id,
            done.parent,
            done.anchor,
            done.patch_bytes,
            done.changed,
            done.seconds,
            done.rewound,
            removed,
            left,
            tuple(done.left_out),
        )

    def _write(
        self, snapshot: DirectorySnapshot, parents: list[DirectorySnapshot], back: str | None, entry: dict[str, Any]
    ) -> WriteResult:
        how = self._options
        options: dict[str, Any] = {"step": snapshot.step, "resume_from": back, "metadata": entry}
        options |= {"anchor": how.anchor, "encoding": how.encoding, "ref": how.ref, "threads": how.threads}
        options |= {"sign": how.sign, "trust": how.trust}
        if parents:
            try:
                return write(snapshot.path, self._url, base=parents[0].path, **options)
            except (ChainError, CheckpointError) as error:  # the base only saves time: the repository has the values
                if isinstance(error, ChainError) and error.code != "base-differs":
                    raise
        return write(snapshot.path, self._url, **options)

    def _open(self) -> Repository:
        how = self._options
        return Repository.open_or_create(self._url).secure(how.trust, sign=how.sign)

    def _is_published(self, branch: Branch, snapshot: DirectorySnapshot) -> bool:
        """Whether this directory is the one that was published."""
        record = branch.steps.get(snapshot.step)
        return record is not None and (record.stamp == snapshot.stamp or (record.link, snapshot.stamp) in self._same)

    def _prune(self, branch: Branch, snapshots: list[DirectorySnapshot]) -> tuple[tuple[str, ...], LeftOut]:
        """Remove all published directories but the newest ones, each after the repository proved to hold its step.

        -> their names, and what stayed in them, and why.
        """
        if self._options.prune_dense is None or branch.head is None:
            return (), ()
        published = [s for s in snapshots if s.step <= branch.head.step and self._is_published(branch, s)]
        names, left = list[str](), list[tuple[str, str]]()
        for snapshot in published[: -self._options.prune_dense]:
            link = branch.steps[snapshot.step].link
            if not self._prove(branch, link):
                continue
            stayed = self._remove(branch, link, snapshot)
            if stayed is not None:
                names.append(snapshot.name)
                left += [(f"{snapshot.name}/{name}", why) for name, why in stayed]
        return tuple(names), tuple(left)

    def _remove(self, branch: Branch, link: Link, snapshot: DirectorySnapshot) -> LeftOut | None:
        """-> what stayed in the directory; None where all did."""
        if self._options.prune_all:
            return () if remove(snapshot) else None
        try:
            left = remove_held(branch.repo, link, snapshot, self._threads)
        except (CheckpointError, FormatError) as error:
            self._note(f"{snapshot.name} is kept, as it changed: {error.have}")
            return None
        if left:
            self._note(
                f"{snapshot.name}: {listed(left)} stay, which the repository does not hold; --prune-all removes all"
            )
        return left

    def _clear(self, gone: list[DirectorySnapshot]) -> None:
        """Go on with removals that were cut short; with ``prune_all`` remove also what an earlier run had left."""
        if self._options.prune_dense is None:
            return
        for snapshot in gone:
            if self._options.prune_all:
                remove(snapshot)
            else:
                finish(snapshot)

    def _prove(
        self, branch: Branch, link: Link, parent: Link | None = None, parents: Sequence[DirectorySnapshot] = ()
    ) -> bool:
        """Whether the repository holds a step whole. A step after a proven one is proven by its patch."""
        if link in self._proven:
            return True
        try:
            if not (
                parents
                and parent
                and parent in self._proven
                and prove_patch(branch.repo, parent, link, parents[0], self._threads)
            ):
                prove(branch.repo, link, self._threads)
        except (ChainError, FormatError, NotFoundError) as error:
            self._note(f"the directory of step {link.step} is kept, as the repository does not give it: {error.have}")
            return False
        self._proven.add(link)
        return True

    def _note(self, text: str) -> None:
        if text not in self._notified:
            self._notified.add(text)
            self._notify(text)
