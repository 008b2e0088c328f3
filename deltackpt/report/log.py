"""The steps of a branch, from their manifests: no object but manifests is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deltackpt.format.manifest import Manifest
from deltackpt.repository import Repository, chain
from deltackpt.repository.manifests import FAR


@dataclass(frozen=True)
class LogStep:
    """One step. ``anchor_bytes`` and ``patch_bytes`` are None where it is not stored that way; ``time`` is in seconds
    since 1970; ``changed`` and ``density`` (its share of ``elements``) compare it with its parent: a step to
    which no patch leads has none."""

    step: int
    id: str
    parent: int | None
    state: str
    anchor_bytes: int | None
    patch_bytes: int | None
    elements: int
    changed: int | None
    density: float | None
    bits_per_change: float | None
    tensors: dict[str, int]
    time: int
    producer: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Log:
    """A branch, newest step first. ``collected`` is the step where history goes on that a gc removed, if one did, and
    ``kept`` are the numbers of the steps up to there that it left, in order."""

    repository: str
    id: str
    ref: str
    steps: tuple[LogStep, ...]
    collected: int | None = None
    kept: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**vars(self), "steps": [dict(vars(step)) for step in self.steps]}


def log(repo: Repository, ref: str = "main", *, limit: int | None = None, since: float | None = None) -> Log:
    """The chain of ``ref`` from its head to its first step; each manifest is checked against its id and its child.

    ``limit``: of the newest steps only so many; ``since`` (seconds since 1970): only those up to the first one that was
    published before. ``collected`` is then not known unless the listed steps end there. Nothing published yet is an
    empty log. Raises NotFoundError ``ref-missing`` where only other branches have steps, or the ref was lost;
    ChainError, FormatError for a chain that does not hold.
    """
    steps: list[LogStep] = []
    collected = None
    for step, last in _walk(repo, ref, limit, since):
        steps.append(step)
        collected = last
    if collected is None:
        return Log(repo.store.url, repo.id, ref, tuple(steps))
    kept = tuple(sorted({other.step for other in repo.steps() if other.step <= collected}))
    return Log(repo.store.url, repo.id, ref, tuple(steps), collected, kept)


def log_steps(
    repo: Repository, ref: str = "main", *, limit: int | None = None, since: float | None = None
) -> Iterator[LogStep]:
    """The steps of `log`, each as soon as it is read. Raises what that raises."""
    return (step for step, _ in _walk(repo, ref, limit, since))


def _walk(repo: Repository, ref: str, limit: int | None, since: float | None) -> Iterator[tuple[LogStep, int | None]]:
    """Steps, newest first; with the last one the step where history goes on that was collected, if it was."""
    head = repo.branch(ref)
    if head is None:
        return
    load = repo.load if limit is not None and limit <= FAR else repo.manifests.loading_ahead(head.link)
    before: tuple[LogStep, Manifest] | None = None
    for count, manifest in enumerate(chain.walk(head.link, load, repo.edges())):
        if before is not None:
            yield before[0], None
        if count == limit or (since is not None and manifest.time < since):
            return
        own = before[1].parent if before is not None else head.link
        assert own is not None
        before = _step(manifest, own.id), manifest
    if before is not None:
        yield before[0], before[1].parent.step if before[1].parent else None


def _step(m: Manifest, own: str) -> LogStep:
    patch = None if m.patch is None else sum(f.size for f in m.patch)
    changed = m.counts.changed_elements if m.patch is not None else None
    return LogStep(
        step=m.step,
        id=own,
        parent=m.parent.step if m.parent else None,
        state=m.state,
        anchor_bytes=None if m.anchor is None else sum(f.size for f in m.anchor),
        patch_bytes=patch,
        elements=m.counts.elements,
        changed=changed,
        density=None if changed is None else changed / max(1, m.counts.elements),
        bits_per_change=8 * patch / changed if changed and patch is not None else None,
        tensors={"added": m.counts.added, "removed": m.counts.removed, "changed": m.counts.changed},
        time=m.time,
        producer=m.producer,
        metadata=dict(m.metadata),
    )
