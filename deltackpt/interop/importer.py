"""Import: every step of another system becomes a step of a repository.

A step that names its changes costs these, and a hash of the tensors that it changes; one that is whole is compared.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ConflictError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.interop.files import gap_error
from deltackpt.interop.protocol import LayoutReader, Step
from deltackpt.interop.publish import check_working, head_at, publish_changes
from deltackpt.interop.working import Working, by_name
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.util.file_server import remove_tree
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress
from deltackpt.util.scratch import temporary_folder
from deltackpt.verification import verify_checkpoint

if TYPE_CHECKING:
    from deltackpt.signing.keys import Signer
    from deltackpt.signing.policy import TrustPolicy

FIELD = "imported"  # of a manifest's metadata


@dataclass(frozen=True)
class ImportResult:
    """What was imported. ``proofs`` counts steps by what their layout could prove; ``notes`` are in words."""

    format: str
    repository: str
    ref: str
    steps: list[int]
    passed: int  # steps that the branch had already
    changed: int
    bytes: int
    proofs: dict[str, int]
    notes: list[str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def import_steps(
    name: str,
    reader: LayoutReader,
    repository: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    anchor: AnchorPolicy = AnchorPolicy(),
    ref: str = "main",
    threads: int | None = None,
    sign: str | os.PathLike[str] | Signer | None = None,
    trust: str | os.PathLike[str] | TrustPolicy | None = None,
    progress: Progress = SILENT,
) -> ImportResult:
    """Publish the steps of ``reader``, of the format ``name``, that the branch does not have yet.

    ``base`` is the checkpoint that the first step applies to. A branch that has steps is its own base: the next step
    must apply to its last one. ``sign`` and ``trust`` are those of `Repository.secure`. What a step cannot prove is in
    the result, and in the step's metadata. Raises UsageError ``foreign-base``, ChainError ``foreign-*``, FormatError;
    then the steps before are published and that one is not.
    """
    began = time.monotonic()
    steps = list(reader.steps())
    if not steps:
        raise UsageError("foreign-unknown", where=name, have="no step", need="one at least")
    with temporary_folder("import") as temporary:
        options: dict[str, Any] = {"anchor": anchor, "ref": ref, "threads": threads, "progress": progress}
        options |= {"sign": sign, "trust": trust}
        job = _Import(name, reader, repository, temporary, options)
        todo = job.begin(steps, base)
        for step in todo:
            job.step(step)
        return ImportResult(
            format=name,
            repository=str(repository),
            ref=ref,
            steps=job.done,
            passed=len(steps) - len(todo),
            changed=job.changed,
            bytes=job.bytes,
            proofs=dict(job.proofs),
            notes=job.notes,
            seconds=round(time.monotonic() - began, 3),
        )


class _Import:
    def __init__(
        self,
        name: str,
        reader: LayoutReader,
        repository: str | os.PathLike[str],
        work: Path,
        options: dict[str, Any],
    ) -> None:
        self.done: list[int] = []
        self.notes: list[str] = []
        self.proofs: Counter[str] = Counter()
        self.changed = self.bytes = 0
        self._name, self._reader, self._url, self._work = name, reader, repository, work
        self._options = options  # those of `write`
        self._current: Path | None = None  # the state that the next step applies to
        self._working: Working | None = None  # the same, where the directory is ours to change
        self._at: Link | None = None  # that step

    def begin(self, steps: Sequence[Step], base: str | os.PathLike[str] | None) -> Sequence[Step]:
        """Find, or make, the state that the first step applies to. -> the steps that are to be published."""
        head = self._head()
        if head is not None:
            repo, link = head
            imported = repo.load(link).metadata.get(FIELD)
            same = isinstance(imported, dict) and imported.get("format") == self._name
            todo = [step for step in steps if step.number > link.step]
            if len(todo) < len(steps) and not same:
                raise ConflictError(
                    "step-order",
                    where=repo.store.url,
                    have=f"step {link.step} already, which is not of an import of {self._name}",
                    need=f"an earlier one than step {steps[0].number}",
                    hint="Import into a repository, or a --ref, of its own.",
                )
            if base is not None and not verify_checkpoint(base, repo, f"{link.step}-{link.id}", ref=self._ref).ok:
                need = f"the state of step {link.step}, or no --base"
                raise UsageError("foreign-base", where=base, have="another state than the branch", need=need)
            self._at = link
            if todo:
                self._current = Path(base) if base is not None else self._work / "base"
                if base is None:
                    apply(repo, self._current, f"{link.step}-{link.id}", ref=self._ref)
                    self._working = Working(self._current)
            return todo
        if base is not None:
            self._current = Path(base)
        first = steps[0]
        if first.parent is not None:
            if base is None:
                raise UsageError(
                    "foreign-base",
                    where=first.path,
                    have="a step that applies to another one, and no such state",
                    need="--base DIR",
                    hint="Give the checkpoint that the run began with.",
                )
            self._publish(Path(base), Step(first.parent, None, Path(base), "the base, as it was given"))
        return steps

    def step(self, step: Step) -> None:
        if step.parent is not None:
            self._patch(step)
            return
        with ExitStack() as stack:
            base = stack.enter_context(Checkpoint.open(self._current)) if self._current is not None else None
            path = self._reader.whole(step, self._work / f"step-{step.number}", base)
        with Checkpoint.open(path) as new:
            self._reader.prove(step, new)
        self._publish(path, step)

    def _publish(self, path: Path, step: Step) -> None:
        """A whole state, compared with the one before."""
        known = self._current if self._at is not None else None
        done = write(path, self._url, step=step.number, base=known, metadata=self._metadata(step), **self._options)
        self._move_to(path, None)
        self._count(step, Link(done.step, done.id), done.changed, done.bytes)
        self.notes += [f"step {step.number}: left out {left}: {reason}" for left, reason in done.left_out]

    def _patch(self, step: Step) -> None:
        """Changes, applied to the state that is there; nothing else of it is read."""
        if self._at is None or step.parent != self._at.step:
            have = f"step {self._at.step} before it" if self._at else "no step before it"
            raise gap_error(step.path, have, f"step {step.parent}, which it applies to")
        repo, threads = self._open(), threads_or_default(self._options["threads"])
        working = self._working
        if working is None:
            assert self._current is not None
            with Checkpoint.open(self._current) as base:
                working = Working.copy(base, self._work / f"working-{step.number}")
            check_working(repo, self._at, working, threads)
            self._move_to(working.checkpoint.root, working)
        touched = by_name(self._reader.read(step, working.checkpoint), working.checkpoint, step.path)
        done = publish_changes(
            repo,
            head_at(repo, self._ref, self._at),
            step.number,
            working,
            touched,
            partial(self._reader.prove, step),
            anchor=self._options["anchor"],
            threads=threads,
            metadata=self._metadata(step),
            progress=self._options["progress"],
        )
        self._count(step, done.link, done.manifest.counts.changed_elements, done.bytes)

    def _metadata(self, step: Step) -> dict[str, Any]:
        return {FIELD: {"format": self._name, "step": step.number, "proof": step.proof}}

    def _move_to(self, path: Path, working: Working | None) -> None:
        if self._current is not None and self._current != path and self._current.parent == self._work:
            remove_tree(self._current)
        self._current, self._working = path, working

    def _count(self, step: Step, link: Link, changed: int, size: int) -> None:
        self._at = link
        self.done.append(step.number)
        self.changed += changed
        self.bytes += size
        self.proofs[step.proof] += 1

    @property
    def _ref(self) -> str:
        return str(self._options["ref"])

    def _head(self) -> tuple[Repository, Link] | None:
        try:
            repo = self._open()
        except NotFoundError:
            return None
        head = repo.ref(self._ref)
        return (repo, head.link) if head is not None else None

    def _open(self) -> Repository:
        """Raises what `Repository.open` and `Repository.secure` raise."""
        return Repository.open(self._url).secure(self._options["trust"], sign=self._options["sign"])
