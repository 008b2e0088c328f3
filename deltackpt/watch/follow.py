"""The loop: look, publish the next finished step, prune; again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.errors import (
    ChainError,
    CheckpointError,
    ConflictError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
)
from deltackpt.format.manifest import Link
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.publish.write import WriteResult, write
from deltackpt.repository import Repository
from deltackpt.util.parallel import threads_or_default
from deltackpt.watch.branch import Branch, metadata, same_weights
from deltackpt.watch.completion import CompletionDetector
from deltackpt.watch.prune import clear_trash, prove, prove_patch, remove
from deltackpt.watch.snapshot import PATTERN, DirectorySnapshot, compile_pattern, scan

PATIENCE = 60.0  # seconds between attempts, at most, while the store does not answer


@dataclass(frozen=True)
class Published:
    """A step that was published, its directory, and the directories that were removed after it."""

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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Watch:
    """Follows ``directory``. Every `turn` publishes at most one step; killed at any instant, another one goes on.

    ``marker``       a file that the trainer writes into a checkpoint directory last; None where it writes none
    ``settle``       seconds for which a directory must not change where no marker vouches
    ``rewind``       follow a trainer that went back and saves steps anew, instead of stopping with ``watch-rewritten``
    ``prune_dense``  keep so many published directories, remove older ones; None keeps all
    ``abandon``      seconds after which a directory that stays unfinished no longer holds up later ones; None: never
    ``say``          is told what keeps it waiting, each thing once
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        repository: str | os.PathLike[str],
        *,
        pattern: str = PATTERN,
        marker: str | None = None,
        settle: float = 5.0,
        rewind: bool = False,
        prune_dense: int | None = None,
        abandon: float | None = None,
        anchor: AnchorPolicy = AnchorPolicy(),
        encoding: str = "auto",
        ref: str = "main",
        threads: int | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if prune_dense is not None and prune_dense < 1:
            need = "1 or more: the newest is what the next one is compared with"
            raise UsageError("usage", where="--prune-dense", have=prune_dense, need=need)
        self.root = Path(directory)
        self._pattern = compile_pattern(pattern)
        self._url = repository
        self._options: dict[str, Any] = {"anchor": anchor, "encoding": encoding, "ref": ref, "threads": threads}
        self._threads = threads_or_default(threads)
        self._judge, self._settle = CompletionDetector(marker, settle, self._threads), max(settle, 0.01)
        self._rewind, self._keep, self._abandon = rewind, prune_dense, abandon
        self._say, self._said = say, set[str]()
        self._branch: Branch | None = None
        self._same: set[tuple[Link, str]] = set()  # steps and stamps whose weights were compared
        self._proven: set[Link] = set()
        self._waiting = False
        clear_trash(self.root)

    def run(self, *, poll: float = 1.0, once: bool = False) -> Iterator[Published]:
        """Every step as it is published; without end, or, with ``once``, until nothing unpublished is finished.

        A store that does not answer is tried again. Raises what `turn` raises.
        """
        pause = poll
        while True:
            try:
                done = self.turn()
                pause = poll
            except StoreError as error:
                if once:
                    raise
                self._note(f"the store does not answer, trying again: {error.have}")
                done, pause = None, min(2 * pause, PATIENCE)
            if done is not None:
                yield done
            elif once and not self._waiting:
                return
            else:
                time.sleep(min(pause, self._settle) if self._waiting else pause)

    def turn(self) -> Published | None:
        """Publish the next finished step, if there is one.

        Raises ConflictError ``watch-rewritten``, ``watch-twice``; NotFoundError ``watch-missing``; what `write` raises
        for the repository.
        """
        sights = scan(self.root, self._pattern)
        self._judge.forget({sight.step for sight in sights})
        branch = self._branch
        if branch is None and sights:
            branch = self._branch = Branch(Repository.open_or_create(self._url), self._options["ref"])
        self._waiting = False
        if branch is None or not sights:
            return None
        branch.refresh(sights[0].step)
        for sight in sights:
            if branch.head is not None and sight.step <= branch.head.step:
                if self._rewritten(branch, sight):
                    return self._publish(branch, sights, sight)
            elif branch.stale.get(sight.step) != sight.stamp:
                if (wait := self._judge.unfinished(sight)) is None:
                    return self._publish(branch, sights, sight)
                if self._abandon is not None and not wait.soon and self._judge.unchanged(sight.step) >= self._abandon:
                    self._note(f"{sight.path.name} is given up: {wait.why}")
                    continue
                self._waiting |= wait.soon
                if not wait.soon:
                    self._note(f"{sight.path.name} and what follows wait: {wait.why}")
                break
        self._prune(branch, sights)
        return None

    def _rewritten(self, branch: Branch, sight: DirectorySnapshot) -> bool:
        """Has the trainer gone back and saved this step anew? Its stamp raises the question, hashes answer it."""
        record = branch.steps.get(sight.step)
        if record is None:
            self._note(f"{sight.path.name} came after a later step was published, and is passed over")
            return False
        if record.stamp == sight.stamp or (record.link, sight.stamp) in self._same:
            return False
        if (wait := self._judge.unfinished(sight)) is not None:
            self._waiting |= wait.soon
            return False
        try:
            same = same_weights(branch.repo, record.link, sight, self._threads)
        except CheckpointError:  # it goes on changing
            return False
        if same:
            self._same.add((record.link, sight.stamp))
            return False
        if self._rewind and record.parent is not None:
            return True
        raise ConflictError(
            "watch-rewritten",
            where=sight.path,
            have=f"other weights than those published as step {sight.step}",
            need="a directory that does not change after it was published",
            hint="If the trainer went back to an earlier step, watch with --rewind: the branch follows it back."
            if record.parent is not None
            else "The first step cannot be followed back. Publish the new run into a repository of its own.",
        )

    def _publish(self, branch: Branch, sights: list[DirectorySnapshot], sight: DirectorySnapshot) -> Published | None:
        old = branch.steps.get(sight.step)
        parent, back = branch.head, None
        stale = {step: stamp for step, stamp in branch.stale.items() if step > sight.step}
        if old is not None and old.parent is not None:
            parent, back = old.parent, f"{old.parent.step}-{old.parent.id}"
            stale |= {s.step: s.stamp for s in sights if s.step > sight.step and self._is(branch, s)}
        near = [s for s in sights if parent is not None and s.step == parent.step and self._is(branch, s)]
        said = metadata(sight, stale)
        try:
            done = self._write(sight, near, back, said)
        except CheckpointError as error:
            self._note(f"{sight.path.name} changed while it was read: {error.have}")
            return None
        except ConflictError as error:
            if error.code not in ("ref-moved", "step-order", "ref-forked"):
                raise
            self._note(f"another writer was first: {error.have}")
            return None
        if self._keep is not None:
            self._prove(branch, Link(done.step, done.id), parent, near)
        branch.refresh(sights[0].step)
        pruned = self._prune(branch, sights)
        return Published(
            sight.path.name,
            done.step,
            done.id,
            done.parent,
            done.anchor,
            done.patch_bytes,
            done.changed,
            done.seconds,
            done.rewound,
            tuple(pruned),
        )

    def _write(
        self, sight: DirectorySnapshot, near: list[DirectorySnapshot], back: str | None, said: dict[str, Any]
    ) -> WriteResult:
        options = {"step": sight.step, "resume_from": back, "metadata": said, **self._options}
        if near:
            try:
                return write(sight.path, self._url, base=near[0].path, **options)
            except (ChainError, CheckpointError) as error:  # the base only saves time: the repository has the values
                if isinstance(error, ChainError) and error.code != "base-differs":
                    raise
        return write(sight.path, self._url, **options)

    def _is(self, branch: Branch, sight: DirectorySnapshot) -> bool:
        """Is this directory the one that was published?"""
        record = branch.steps.get(sight.step)
        return record is not None and (record.stamp == sight.stamp or (record.link, sight.stamp) in self._same)

    def _prune(self, branch: Branch, sights: list[DirectorySnapshot]) -> list[str]:
        """Remove all published directories but the newest ones, each after the repository proved to hold its step."""
        if self._keep is None or branch.head is None:
            return []
        published = [s for s in sights if s.step <= branch.head.step and self._is(branch, s)]
        pruned = []
        for sight in published[: -self._keep]:
            if self._prove(branch, branch.steps[sight.step].link) and remove(sight):
                pruned.append(sight.path.name)
        return pruned

    def _prove(
        self, branch: Branch, link: Link, parent: Link | None = None, near: Sequence[DirectorySnapshot] = ()
    ) -> bool:
        """Does the repository hold a step whole? A step after a proven one is proven by its patch."""
        if link in self._proven:
            return True
        try:
            if not (
                near
                and parent
                and parent in self._proven
                and prove_patch(branch.repo, parent, link, near[0], self._threads)
            ):
                prove(branch.repo, link, self._threads)
        except (ChainError, FormatError, NotFoundError) as error:
            self._note(f"the directory of step {link.step} is kept, as the repository does not give it: {error.have}")
            return False
        self._proven.add(link)
        return True

    def _note(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)
