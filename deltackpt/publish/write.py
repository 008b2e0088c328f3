"""Publish a checkpoint directory as the next step: an anchor first, patches after."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from deltackpt.cache import apply_to_cache
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State, difference
from deltackpt.codecs import SCAN_LIMIT
from deltackpt.errors import ConflictError, UsageError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.publish.diff_ahead import diff_ahead
from deltackpt.publish.manifest import ANCHOR_RATIO, AnchorPolicy, record, since_anchor
from deltackpt.publish.step import Draft, check_base, check_names, digest_all, put_parts
from deltackpt.repository import Repository
from deltackpt.repository.writer_lease import publishing
from deltackpt.restore.in_memory import InMemoryPatch
from deltackpt.restore.replay import Replay
from deltackpt.store import open_store
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress


@dataclass(frozen=True)
class WriteResult:
    """What `write` published. Bytes are those of new objects; ``bits_per_change`` counts the parts, headers
    included.
    """

    repository: str
    ref: str
    step: int
    id: str
    parent: int | None
    state: str
    anchor: bool
    tensors: dict[str, int]  # added, removed, changed, and how many in each encoding
    elements: int
    changed: int
    density: float
    patch_bytes: int
    bytes: int
    bits_per_change: float | None
    left_out: list[tuple[str, str]]
    seconds: float
    published: float = 0.0  # seconds until readers could see the step; then a cache was brought along
    rewound: int | None = None  # the step that the ref was at, where it was taken back

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def write(
    checkpoint: str | os.PathLike[str],
    repository: str | os.PathLike[str] | Repository,
    *,
    step: int | None = None,
    resume_from: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    encoding: str = "auto",
    anchor: AnchorPolicy = AnchorPolicy(),
    ref: str = "main",
    threads: int | None = None,
    scan_limit: int = SCAN_LIMIT,
    metadata: Mapping[str, Any] | None = None,
    progress: Progress = SILENT,
) -> WriteResult:
    """Publish ``checkpoint`` as the next step of ``repository``, which is made if there is none; one that is open, and
    kept open from step to step, saves connecting anew; inside `writer_lease` it also saves a lease a step.

    The old values are the repository's own, rebuilt from anchor and chain; ``base``, the parent step's directory, or
    ``cache``, a managed cache that is brought along, saves that work and is proven tensor by tensor in the pass that
    compares. ``resume_from`` takes the ref back to a step on purpose: the new step follows that one, and those after it
    are left behind, readable until gc. Raises ConflictError ``step-order`` (not after the ref's step), ``ref-moved``,
    ``lease-lapsed``; ChainError ``base-differs``; CheckpointError; then nothing is published.
    """
    began = time.monotonic()
    if base is not None and cache is not None:
        raise UsageError("base-and-cache", where="write", have="a base and a cache", need="one of them")
    count = threads_or_default(threads)
    store = repository.store if isinstance(repository, Repository) else open_store(repository)
    with Checkpoint.open(checkpoint) as new, ExitStack() as stack:
        new.check_whole()
        check_names(new)
        compare, since = difference, None
        given = None
        if base is not None and not store.capabilities.local:  # until it has said what it holds
            given = stack.enter_context(Checkpoint.open(base))
            compare = stack.enter_context(diff_ahead(given, new, count)).compare
        repo = repository if isinstance(repository, Repository) else Repository.at_or_create(store)
        head = repo.head(ref) if resume_from is None else repo.ref(ref)
        before = head.link if head else None
        if resume_from is not None:
            before = repo.find(resume_from, ref)
        # Pins the parent, and, with nothing to pin, whatever is put before the manifest names it.
        held = stack.enter_context(publishing(repo, before))
        draft = Draft(repo, _next_step(repo, ref, before, step))
        parent = repo.load(before) if before else None
        if before is not None and given is not None:
            pool = stack.enter_context(ThreadPoolExecutor(1))
            since = pool.submit(since_anchor, repo, before, anchor).result
        kept: InMemoryPatch | None = None
        try:
            if parent is None:
                progress.start("digest", sum(s.size for s in new.shards))
                draft.digests = digest_all(new, count, progress)
            else:
                old: State
                if cache is not None:
                    at = f"{parent.step}-{before.id}" if before else "latest"
                    base = apply_to_cache(repo, cache, at, ref=ref, threads=threads, progress=progress).path
                if base is not None:
                    old = given or stack.enter_context(Checkpoint.open(base))
                    check_base(old, repo.layout(parent), Path(base))
                else:
                    plan = repo.resolve(before or parent.link)
                    names = repo.layout(plan.target).tensors  # in the order in which they are compared
                    old = stack.enter_context(Replay.open(repo, plan, order=names))
                if cache is not None:
                    kept = InMemoryPatch(before or parent.link)
                progress.start("write", sum(s.size for s in new.shards))
                put_parts(draft, parent, old, new, encoding, count, scan_limit, base, progress, compare, kept)
            manifest = record(draft, new, before, parent, anchor, dict(metadata or {}), progress, since)
            new.verify_unchanged()
            held.check()
        except BaseException:
            draft.withdraw()
            raise
        link = repo.publish(manifest, ref, head, held.check)  # nothing is taken back any more: it may have taken effect
        held.published(link)
        published = time.monotonic() - began
        repo.know(manifest, draft.digests)
        if kept is not None:
            kept.end = link
        if cache is not None:
            apply_to_cache(repo, cache, ref=ref, threads=threads, kept=kept, progress=progress)
        rewound = head.link.step if head and head.link != before else None
        done = _result(draft, manifest, link, ref, new, began)
        return replace(done, rewound=rewound, published=round(published, 3))


def _next_step(repo: Repository, ref: str, before: Link | None, step: int | None) -> int:
    if step is None:
        return before.step + 1 if before else 0
    if before and step <= before.step:
        raise ConflictError(
            "step-order",
            where=f"{repo.store.url}, ref {ref}",
            have=f"step {before.step} already",
            need=f"a step after it, not {step}",
            hint="Leave --step out to follow the ref, go back with --resume-from N, or use a --ref of its own.",
        )
    if step < 0:
        raise UsageError("step-negative", where="--step", have=step, need="0 or more")
    return step


def _result(draft: Draft, m: Manifest, link: Link, ref: str, new: Checkpoint, began: float) -> WriteResult:
    changed, patch = m.counts.changed_elements, sum(f.size for f in draft.parts)
    return WriteResult(
        repository=draft.repo.store.url,
        ref=ref,
        step=m.step,
        id=link.id,
        parent=m.parent.step if m.parent else None,
        state=m.state,
        anchor=m.anchor is not None,
        tensors={"added": draft.added, "removed": draft.removed, "changed": draft.changed, **draft.encodings},
        elements=m.counts.elements,
        changed=changed,
        density=changed / m.counts.elements if m.counts.elements else 0.0,
        patch_bytes=patch,
        bytes=sum(f.size for f in draft.put),
        bits_per_change=8 * patch / changed if changed else None,
        left_out=list(new.left_out),
        seconds=round(time.monotonic() - began, 3),
    )


__all__ = ["ANCHOR_RATIO", "AnchorPolicy", "WriteResult", "write"]
