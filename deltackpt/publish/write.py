"""Publish a checkpoint directory as the next step: an anchor first, patches after."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict

from deltackpt.cache import apply_to_cache
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.batch import ComparedBatch, compare_batch
from deltackpt.checkpoint.diff import State
from deltackpt.errors import ConflictError, UsageError
from deltackpt.format.manifest import Link, Manifest
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.patch.part import Origin
from deltackpt.publish.diff_ahead import diff_ahead
from deltackpt.publish.encode_batch import CompareBatch, Comparing
from deltackpt.publish.manifest import ANCHOR_RATIO, AnchorPolicy, check_step, since_anchor
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.repository_sink import CommittedStep, RepositorySink, StepTarget
from deltackpt.publish.sink import StepCommit, elements_of, publish_step
from deltackpt.publish.step import (
    PIECE,
    EncodeOptions,
    StepBuilder,
    check_base,
    check_names,
    digest_all,
    encode_step,
)
from deltackpt.repository import Ref, Repository
from deltackpt.repository.refs import check_ref_name
from deltackpt.repository.writer_lease import publishing
from deltackpt.restore.replay import Replay
from deltackpt.store import Buffer, open_store
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from deltackpt.signing.keys import Signer
    from deltackpt.signing.policy import TrustPolicy


class WriteOptions(TypedDict, total=False):
    """How `write` works: options that change no step's state.

    ``encoding``    of the changes, "auto" (the default) for the smallest of each tensor; `deltackpt.codecs` has them;
                    "auto@8" cuts finer tiles, so that each of 8 ranks of an engine reads its share and little else
    ``threads``     None (the default): one for every processor that this process may use
    ``progress``    counts the bytes that are done
    ``sign``        the key that signs the step: a path, or ``command:…``; None: what DELTACKPT_SIGN_KEY says
    ``trust``       whose signatures the steps before have: that of `Repository.secure`
    """

    encoding: str
    threads: int | None
    progress: Progress
    sign: str | os.PathLike[str] | Signer | None
    trust: str | os.PathLike[str] | TrustPolicy | None


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
    published: float = 0.0  # seconds until readers could see the step; a cache follows after that
    rewound: int | None = None  # the step that the ref was at, where it was moved back

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def write(
    checkpoint: str | os.PathLike[str],
    repository: str | os.PathLike[str] | Repository,
    *,
    step: int | None = None,
    resume_from: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    anchor: AnchorPolicy = AnchorPolicy(),
    ref: str = "main",
    metadata: Mapping[str, Any] | None = None,
    **options: Unpack[WriteOptions],
) -> WriteResult:
    """Publish a checkpoint directory as the next step of a repository, which is made if there is none.

        deltackpt.write("step_12", "runs/repo", base="step_11").bits_per_change

    A repository that stays open from step to step saves connecting anew, inside `writer_lease` also a lease a step.

    The old values are the repository's own, rebuilt from anchor and chain; ``base``, the parent step's directory, or
    ``cache``, a managed cache that then follows to the new step, saves that work and is proven tensor by tensor in the
    pass that compares. ``resume_from`` moves the ref back to a step on purpose: the new step follows that one, and
    those after it are left behind, readable until gc. ``options`` are `WriteOptions`. Raises ConflictError
    ``step-order`` (not after the ref's step), ``ref-moved``, ``lease-lapsed``; ChainError ``base-differs``;
    CheckpointError; then nothing is published.
    """
    began = time.monotonic()
    if base is not None and cache is not None:
        raise UsageError("base-and-cache", where="write", have="a base and a cache", need="one of them")
    if step is not None:
        check_step(step)
    if cache is not None:
        check_local(cache, "CACHE")
    progress, count = options.get("progress", SILENT), threads_or_default(options.get("threads"))
    encode = EncodeOptions(options.get("encoding", "auto"), count)
    check_ref_name(ref)  # before a repository is made
    store = repository.store if isinstance(repository, Repository) else open_store(repository)
    with Checkpoint.open(checkpoint) as new, ExitStack() as stack:
        new.check_whole()
        check_names(new)
        job = _WriteJob(new, base, cache, encode, progress, stack)
        if not store.capabilities.local:
            job.compare_ahead()  # until the store has answered what it holds
        repo = repository if isinstance(repository, Repository) else Repository.at_or_create(store).secure()
        if (security := (options.get("trust"), options.get("sign"))) != (None, None):
            repo.secure(security[0], sign=security[1])
        head, before = _follows(repo, ref, resume_from)
        # Pins the parent, and, with nothing to pin, whatever is put before the manifest names it.
        lease = stack.enter_context(publishing(repo, before))
        objects = StepObjects(repo, _next_step(repo, ref, before, step), threads=count)
        target = StepTarget(ref, head, before, repo.load(before) if before else None)
        since = job.since_anchor(repo, target, anchor)
        sink = RepositorySink(objects, target, lease, anchor, since=since, verify=new.verify_unchanged)
        done = publish_step(sink, lambda: job.encode(sink, metadata or {}))
        published = time.monotonic() - began
        job.follow(repo, ref, done)
        times = round(published, 3), round(time.monotonic() - began, 3)
        return _result(sink, done, job.builder, new, times)


class _WriteJob:
    """One `write`: the new state, and the one that it follows, from a directory, a cache, or the repository itself."""

    def __init__(
        self,
        new: Checkpoint,
        base: str | os.PathLike[str] | None,
        cache: str | os.PathLike[str] | None,
        options: EncodeOptions,
        progress: Progress,
        stack: ExitStack,
    ) -> None:
        self._new, self._base, self._cache = new, base, cache
        self._options, self._progress, self._stack = options, progress, stack
        self.builder = StepBuilder()
        self._opened: Checkpoint | None = None
        self._compare_batch: CompareBatch = compare_batch
        self._in_memory: InMemoryPatch | None = None  # what changed, for the cache that follows

    def compare_ahead(self) -> None:
        """Open a base that was named, and begin to compare it."""
        if self._base is not None:
            self._opened = self._stack.enter_context(Checkpoint.open(self._base))
            ahead = self._stack.enter_context(diff_ahead(self._opened, self._new, self._options.threads))
            self._compare_batch = ahead.compare_batch

    def since_anchor(
        self, repo: Repository, target: StepTarget, policy: AnchorPolicy
    ) -> Callable[[], tuple[int, int]] | None:
        """`since_anchor`, asked while a base is compared ahead; None where none is."""
        if target.before is None or self._opened is None:
            return None
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        return pool.submit(since_anchor, repo, target.before, policy).result

    def encode(self, sink: RepositorySink, metadata: Mapping[str, Any]) -> StepCommit:
        """Hand what differs to the sink; -> the record to commit."""
        self.builder = self._encode(sink)
        counts, read = self.builder.counts(elements_of(self._new)), ShardReader(self._new, self._progress).chunks
        return StepCommit(self._new, self.builder.digests, counts, metadata, read=read)

    def _encode(self, sink: RepositorySink) -> StepBuilder:
        """Without a parent there is nothing to compare with, and all is digested."""
        repo, target, progress = sink.objects.repo, sink.target, self._progress
        whole = sum(shard.size for shard in self._new.shards)
        if target.before is None or target.parent is None:
            progress.start("digest", whole)
            return StepBuilder(digest_all(self._new, self._options.threads, progress))
        if self._cache is not None:
            at = f"{target.before.step}-{target.before.id}"
            self._base = self._to_cache(repo, target.ref, at)
            self._in_memory = InMemoryPatch(target.before)
        old = self._open(repo, target.before, target.parent)
        progress.start("write", whole)
        where = self._base or repo.store.url
        origin = Origin(repo.id, sink.objects.step, target.before.id, target.parent.state)
        found = self._hold if self._in_memory is not None else None
        digests = repo.digests(target.parent)
        states = Comparing(old, self._new, digests, where, compare_batch=self._compare_batch, found=found)
        return encode_step(sink, origin, states, self._options, progress)

    def _open(self, repo: Repository, before: Link, parent: Manifest) -> State:
        if self._base is not None:
            old = self._opened or self._stack.enter_context(Checkpoint.open(self._base))
            check_base(old, repo.layout(parent), Path(self._base))
            return old
        order = repo.layout(parent).tensors  # in which they are compared
        return self._stack.enter_context(Replay.open(repo, repo.resolve(before), order=order))

    def _hold(self, compared: ComparedBatch) -> None:
        if self._in_memory is not None:
            self._in_memory.add_batch(compared, self._new)

    def follow(self, repo: Repository, ref: str, done: CommittedStep) -> None:
        """Let the cache follow to the step that was published."""
        repo.know(done.manifest, self.builder.digests)
        if self._in_memory is not None:
            self._in_memory.end = done.link
        if self._cache is not None:
            self._to_cache(repo, ref, "latest", self._in_memory)

    def _to_cache(self, repo: Repository, ref: str, step: str, patch: InMemoryPatch | None = None) -> str:
        assert self._cache is not None
        threads, progress = self._options.threads, self._progress
        return apply_to_cache(
            repo, self._cache, step, ref=ref, threads=threads, in_memory=patch, progress=progress
        ).path


class ShardReader:
    """The files of a checkpoint's shards, for a sink that stores the step whole."""

    def __init__(self, new: Checkpoint, progress: Progress) -> None:
        self._new, self._progress = new, progress
        self._started, self._lock = False, Lock()

    def chunks(self, name: str) -> Iterator[Buffer]:
        """The bytes of one file, in pieces; for several threads at a time, each with its own file."""
        with self._lock:
            if not self._started:
                self._started = True
                self._progress.start("anchor", sum(shard.size for shard in self._new.shards))
        with self._new.open_shard(name) as file:
            while piece := file.read(PIECE):
                yield piece
                with self._lock:
                    self._progress.advance(len(piece))


def _follows(repo: Repository, ref: str, resume_from: int | str | None) -> tuple[Ref | None, Link | None]:
    """The ref as it is now, and the step that the new one follows."""
    if resume_from is not None:
        return repo.ref(ref), repo.find(resume_from, ref)
    head = repo.head(ref)
    return head, head.link if head else None


def _next_step(repo: Repository, ref: str, before: Link | None, step: int | None) -> int:
    if step is None:
        return before.step + 1 if before else 0
    if before and step <= before.step:  # [S-REF-5]
        raise ConflictError(
            "step-order",
            where=f"{repo.store.url}, ref {ref}",
            have=f"step {before.step} already",
            need=f"a step after it, not {step}",
            hint="Leave --step out to follow the ref, go back with --resume-from N, or use a --ref of its own.",
        )
    return step


def _result(
    sink: RepositorySink, done: CommittedStep, builder: StepBuilder, new: Checkpoint, times: tuple[float, float]
) -> WriteResult:
    m, target = done.manifest, sink.target
    counts, head = builder.counts(m.counts.elements), target.head
    return WriteResult(
        repository=sink.objects.repo.store.url,
        ref=target.ref,
        step=m.step,
        id=done.link.id,
        parent=m.parent.step if m.parent else None,
        state=m.state,
        anchor=m.anchor is not None,
        tensors={"added": counts.added, "removed": counts.removed, "changed": counts.changed, **builder.encodings},
        elements=counts.elements,
        changed=counts.changed_elements,
        density=counts.changed_elements / counts.elements if counts.elements else 0.0,
        patch_bytes=done.patch_bytes,
        bytes=done.bytes,
        bits_per_change=8 * done.patch_bytes / counts.changed_elements if counts.changed_elements and m.patch else None,
        left_out=list(new.left_out),
        seconds=times[1],
        published=times[0],
        rewound=head.link.step if head and head.link != target.before else None,
    )


__all__ = ["ANCHOR_RATIO", "AnchorPolicy", "WriteOptions", "WriteResult", "write"]
