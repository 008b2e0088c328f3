"""Which directories are published already. The manifests are the only record of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import NotFoundError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.repository import Repository
from deltackpt.restore.identify import has_weights
from deltackpt.watch.snapshot import DirectorySnapshot

FIELD = "watch"  # of a manifest's metadata


@dataclass(frozen=True)
class PublishedStep:
    """A published step. ``stamp`` is that of the directory that it was made from, None where no watch made it."""

    link: Link
    parent: Link | None
    stamp: str | None

    @classmethod
    def of(cls, step: Manifest, link: Link) -> PublishedStep:
        """The step ``link``, whose manifest is ``step``."""
        stamp = _field(step).get("stamp")
        return cls(link, step.parent, stamp if isinstance(stamp, str) else None)


def metadata(snapshot: DirectorySnapshot, stale: Mapping[int, str]) -> dict[str, Any]:
    """The entry in a manifest's metadata: the directory, and those that a rewind left behind."""
    left = {str(step): stamp for step, stamp in sorted(stale.items())}
    return {FIELD: {"directory": snapshot.name, "stamp": snapshot.stamp, "stale": left}}


class Branch:
    """The steps of one branch by number, as far down as directories go; read again when the branch moves."""

    def __init__(self, repo: Repository, ref: str) -> None:
        self.repo = repo
        self.head: Link | None = None
        self.stale: dict[int, str] = {}  # stamps of directories that belong to steps that a rewind left behind
        self.steps: dict[int, PublishedStep] = {}
        self._ref = ref
        self._lowest = 0

    def refresh(self, lowest: int) -> None:
        """``lowest`` is the first step that is asked about."""
        head = self.repo.ref(self._ref)
        if head is None and self.head is not None:  # what follows would begin anew where the steps before are lost
            raise self.repo.lost(self._ref)
        link = head.link if head else None
        if link == self.head and lowest >= self._lowest:
            return
        found: dict[int, PublishedStep] = {}
        at = link
        while at is not None and at.step >= lowest:
            known = self.steps.get(at.step)
            if known is not None and known.link == at and lowest >= self._lowest:
                found |= {step: record for step, record in self.steps.items() if step <= at.step}
                break
            try:
                manifest = self.repo.load(at)
            except NotFoundError:  # collected: nothing before it is on the branch any more
                break
            found[at.step] = PublishedStep.of(manifest, at)
            at = manifest.parent
        self.head, self.steps, self._lowest = link, found, lowest
        self.stale = _stale(self.repo.load(link)) if link is not None else {}


def same_weights(repo: Repository, link: Link, snapshot: DirectorySnapshot, threads: int) -> bool:
    """Does the directory hold the step's weights? Decided by hashes. Raises CheckpointError, FormatError."""
    with Checkpoint.open(snapshot.path) as checkpoint:
        return has_weights(repo, repo.load(link), checkpoint, threads)


def _field(step: Manifest) -> Mapping[str, Any]:
    value = step.metadata.get(FIELD)
    return value if isinstance(value, dict) else {}


def _stale(step: Manifest) -> dict[int, str]:
    value = _field(step).get("stale")
    pairs = value.items() if isinstance(value, dict) else ()
    return {int(k): v for k, v in pairs if k.isascii() and k.isdigit() and len(k) < 16 and isinstance(v, str)}
