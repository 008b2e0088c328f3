"""Import: every step of another system becomes a step of a repository."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ConflictError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.interop.changes import advance
from deltackpt.interop.files import gap_error
from deltackpt.interop.protocol import Reader, Step
from deltackpt.materialize import apply
from deltackpt.progress import SILENT, Progress
from deltackpt.record import AnchorPolicy
from deltackpt.repository import Repository
from deltackpt.verify import verify_checkpoint
from deltackpt.write import write

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
        return asdict(self)


def bring(
    name: str,
    reader: Reader,
    repository: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    anchor: AnchorPolicy = AnchorPolicy(),
    ref: str = "main",
    threads: int | None = None,
    progress: Progress = SILENT,
) -> ImportResult:
    """Publish the steps of ``reader``, of the format ``name``, that the branch does not have yet.

    ``base`` is the checkpoint that the first step applies to. A branch that has steps is its own base: the next step
    must apply to its last one. What a step cannot prove is in the result, and in the step's metadata. Raises UsageError
    ``foreign-base``, ChainError ``foreign-*``, FormatError; then the steps before are published and that one is not.
    """
    began = time.monotonic()
    steps = list(reader.steps())
    if not steps:
        raise UsageError("foreign-unknown", where=name, have="no step", need="one at least")
    with tempfile.TemporaryDirectory(prefix="deltackpt-import-") as temporary:
        job = _Import(name, reader, repository, Path(temporary), anchor, ref, threads, progress)
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
        reader: Reader,
        repository: str | os.PathLike[str],
        work: Path,
        anchor: AnchorPolicy,
        ref: str,
        threads: int | None,
        progress: Progress,
    ) -> None:
        self.done: list[int] = []
        self.notes: list[str] = []
        self.proofs: Counter[str] = Counter()
        self.changed = self.bytes = 0
        self._name, self._reader, self._url, self._work = name, reader, repository, work
        self._options: dict[str, Any] = {"anchor": anchor, "ref": ref, "threads": threads, "progress": progress}
        self._current: Path | None = None  # the state that the next step applies to
        self._at: int | None = None  # its number

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
            self._at = link.step
            if todo:
                self._current = Path(base) if base is not None else self._work / "base"
                if base is None:
                    apply(repo, self._current, f"{link.step}-{link.id}", ref=self._ref)
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
        into = self._work / f"step-{step.number}"
        if step.parent is None:
            with _opened(self._current) as base:
                path = self._reader.whole(step, into, base)
        else:
            if step.parent != self._at:
                raise gap_error(step.path, f"step {self._at} before it", f"step {step.parent}, which it applies to")
            assert self._current is not None
            with Checkpoint.open(self._current) as base:
                advance(base, self._reader.read(step, base), into, str(step.path))
            path = into
        with Checkpoint.open(path) as new:
            self._reader.prove(step, new)
        self._publish(path, step)

    def _publish(self, path: Path, step: Step) -> None:
        said = {FIELD: {"format": self._name, "step": step.number, "proof": step.proof}}
        known = self._current if self._at is not None else None
        done = write(path, self._url, step=step.number, base=known, metadata=said, **self._options)
        if self._current is not None and self._current != path and self._current.parent == self._work:
            shutil.rmtree(self._current)
        self._current, self._at = path, step.number
        self.done.append(step.number)
        self.changed += done.changed
        self.bytes += done.bytes
        self.proofs[step.proof] += 1
        self.notes += [f"step {step.number}: left out {left}: {reason}" for left, reason in done.left_out]

    @property
    def _ref(self) -> str:
        return str(self._options["ref"])

    def _head(self) -> tuple[Repository, Link] | None:
        try:
            repo = Repository.open(self._url)
        except NotFoundError:
            return None
        head = repo.ref(self._ref)
        return (repo, head.link) if head is not None else None


class _opened:
    """A checkpoint, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self._held = Checkpoint.open(path) if path is not None else None

    def __enter__(self) -> Checkpoint | None:
        return self._held

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.close()
