"""What a mirror will do, and what it did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.errors import ConflictError, NotFoundError
from deltackpt.format.manifest import File, Link

WINDOW = 256 << 20  # bytes of objects that are copied before their manifests follow
WINDOW_RECORDS = 64


@dataclass(frozen=True)
class RefMove:
    """A ref or tag of the target that changes, or is made where ``old`` is None."""

    name: str
    old: Link | None
    new: Link


@dataclass(frozen=True)
class MirrorRecord:
    """A manifest, edge or pack: whether it is put, and of its objects, which to copy and which are there, to be read
    back."""

    name: str
    put: bool
    copy: tuple[File, ...]
    prove: tuple[File, ...]

    @property
    def bytes(self) -> int:
        """Bytes to copy and to read back."""
        return sum(f.size for f in (*self.copy, *self.prove))


@dataclass(frozen=True)
class MirrorPlan:
    """``fresh``: the target is still empty. ``there`` counts the objects that the target has, proven."""

    source: str
    target: str
    id: str
    fresh: bool
    records: tuple[MirrorRecord, ...]
    refs: tuple[RefMove, ...]
    tags: tuple[RefMove, ...]
    there: int

    @property
    def bytes(self) -> int:
        """Bytes of objects to copy."""
        return sum(f.size for record in self.records for f in record.copy)

    @property
    def steps(self) -> int:
        """How many manifests are put."""
        return sum(record.put and record.name.startswith("steps/") for record in self.records)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "steps": self.steps, "bytes": self.bytes}


@dataclass(frozen=True)
class MirrorResult:
    """What was done: ``objects`` and ``bytes`` copied, ``proven`` objects that were read back, ``there`` those that
    needed neither. ``leased`` is False where the source is read-only, so that no lease keeps a gc there waiting."""

    source: str
    target: str
    steps: int
    edges: int
    objects: int
    bytes: int
    proven: int
    there: int
    refs: tuple[RefMove, ...]
    tags: tuple[RefMove, ...]
    leased: bool
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def elsewhere(where: str, have: str, need: str) -> ConflictError:
    """The error for a target that is the repository ``have``, and no copy of ``need``."""
    return ConflictError(
        "mirror-elsewhere",
        where=where,
        have=f"repository {have}",
        need=f"a copy of repository {need}, or an empty place",
        hint="It holds other steps: mirror into a folder or prefix of its own.",
    )


def target_gone(where: str, need: str) -> NotFoundError:
    """The error for a target that held a copy of the repository ``need`` a moment ago, and is empty now."""
    return NotFoundError(
        "repository-missing",
        where=where,
        have="nothing, where the copy was",
        need=f"the copy of repository {need}",
        hint="Is its disk mounted? If it was removed on purpose, mirror again: all of it is then copied anew.",
    )


def windows(records: Sequence[MirrorRecord]) -> Iterator[list[MirrorRecord]]:
    """Runs of records, each of a bounded size: what was copied gets its manifest soon, and needs no second proof."""
    window: list[MirrorRecord] = []
    size = 0
    for record in records:
        window.append(record)
        size += record.bytes
        if size >= WINDOW or len(window) == WINDOW_RECORDS:
            yield window
            window, size = [], 0
    if window:
        yield window
