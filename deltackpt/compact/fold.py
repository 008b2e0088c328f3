"""A fold, or an anchor for a step that has none: other ways to steps that are there (FORMAT section "Edge").

A fold holds, for every element that some patch on the way changed, the last value, unless that is the first one again.
Memory is that of one tensor a thread, and of a part. Nothing is recorded before its objects are durable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deltackpt import __version__
from deltackpt.cache import apply_to_cache
from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State, StoredTensor, difference
from deltackpt.codecs import Encoded, Entry
from deltackpt.errors import ChainError, ConflictError
from deltackpt.format.edge import Edge
from deltackpt.format.layout import Shard
from deltackpt.format.manifest import File, Link
from deltackpt.patch.base import describe
from deltackpt.patch.encode import encode_entry
from deltackpt.patch.part import Origin, PartWriter
from deltackpt.publish.objects import StepObjects
from deltackpt.publish.sink import EncodedPart, publish_step
from deltackpt.repository import Repository, chain
from deltackpt.repository.leases import lease
from deltackpt.restore.materialize import check_tensor, file_order
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay
from deltackpt.store import Buffer
from deltackpt.util.parallel import ordered_map, threads_or_default
from deltackpt.util.progress import SILENT, Progress

PART_BYTES = 128 << 20  # encoded bytes after which a part is put and the next one begun

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class _One:
    """A state of at most one tensor, in memory."""

    tensors: Mapping[str, StoredTensor]
    data: Bytes | None

    def bytes_of(self, name: str) -> Bytes:
        assert self.data is not None
        return self.data

    def release(self, name: str, start: int = 0, end: int | None = None) -> None: ...


class EdgeSink:
    """Records another way to the step ``end`` of a repository: a fold from ``start``, or, if that is None, an anchor (a
    `publish.sink.Sink`). One part is on its way at a time."""

    def __init__(self, repo: Repository, start: Link | None, end: Link) -> None:
        self.objects = StepObjects(repo, end.step, "folds", at_once=0)
        self._repo, self._start, self._end = repo, start, end
        self._committing = False

    @property
    def size(self) -> int:
        """Bytes of the objects that were put."""
        return sum(file.size for file in self.objects.stored)

    def part_bytes(self, most: int) -> int:
        """``most``, whatever the store: one part is put at a time."""
        return most

    def put(self, part: EncodedPart) -> None:
        """Put a part of a fold; it is durable when this returns."""
        self.objects.put(part)

    def commit(self, files: Sequence[File]) -> Edge:
        """Record the edge, whose ``files`` are durable."""
        edge = Edge(self._repo.id, self._start, self._end, tuple(files), f"deltackpt {__version__}", int(time.time()))
        self._committing = True
        self._repo.put_edge(edge)
        return edge

    def abort(self) -> None:
        """Delete what was put, unless the edge may be recorded."""
        if not self._committing:
            self.objects.withdraw()


def fold(
    repo: Repository,
    start: Link,
    end: Link,
    *,
    cache: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Edge:
    """Put one patch in the place of all those from ``start`` to ``end``, and record it.

    ``cache`` is a managed cache that is updated to ``start``, and so holds the old values; without, they are rebuilt.
    Raises ConflictError ``fold-larger`` where it would save nothing, and ``fold-exists``; then it is not
    there.
    """
    count = threads_or_default(threads)
    with lease(repo, start), lease(repo, end, have=start), ExitStack() as stack:
        layout, edges = repo.layout(repo.load(end)), repo.edges()
        if any(edge.start == start for edge in edges.get(end, ())):
            raise _refuse("fold-exists", start, end, "one already", "none")
        hops = chain.between(start, end, repo.load, edges)
        limit = min(sum(hop.bytes for hop in hops), sum(s.size for s in layout.shards))
        old = stack.enter_context(_state(repo, start, cache, threads, progress))
        patches = stack.enter_context(PatchReader.open_all(repo, hops))
        job, sink = _Folding(repo, start, end, old, patches), EdgeSink(repo, start, end)
        return publish_step(sink, lambda: _encode_fold(job, sink, limit, count, progress))


def write_anchor(
    repo: Repository,
    link: Link,
    *,
    cache: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Edge:
    """Store a step whole that is not, and record it. Raises ConflictError ``anchor-exists``."""
    with lease(repo, link), ExitStack() as stack:
        step = repo.load(link)
        if step.anchor is not None or any(edge.start is None for edge in repo.edges().get(link, ())):
            have = f"an anchor of step {link.step} already"
            raise ConflictError("anchor-exists", where=repo.store.url, have=have, need="none")
        layout, digests = repo.layout(step), repo.digests(step)
        state = stack.enter_context(_state(repo, link, cache, threads, progress))
        sink = EdgeSink(repo, None, link)
        objects = sink.objects

        def chunks(shard: Shard) -> Iterator[Buffer]:
            yield shard.header.head
            for tensor in file_order(shard):
                data = state.bytes_of(tensor.name)
                check_tensor(tensor.name, data, digests, layout)
                yield data.data
                state.release(tensor.name)
                progress.advance(len(data))

        def store() -> list[File]:
            return [objects.store(objects.name("anchors", shard.path), chunks(shard)) for shard in layout.shards]

        progress.start("anchor", sum(s.size for s in layout.shards))
        return publish_step(sink, store)


@contextmanager
def _state(
    repo: Repository, link: Link, cache: str | os.PathLike[str] | None, threads: int | None, progress: Progress
) -> Iterator[State]:
    """The state of a step, not proven yet."""
    if cache is not None:
        path = apply_to_cache(repo, cache, f"{link.step}-{link.id}", threads=threads, progress=progress).path
        with Checkpoint.open(path) as checkpoint:
            yield checkpoint
    else:
        with Replay.open(repo, repo.resolve(link)) as replay:
            yield replay


@dataclass(frozen=True)
class _Folding:
    repo: Repository
    start: Link
    end: Link
    old: State
    patches: Sequence[PatchReader]


def _encode_fold(job: _Folding, sink: EdgeSink, limit: int, threads: int, progress: Progress) -> list[File]:
    """Fold every tensor that a patch touches; both ends of each are proven by the digests of their steps. -> the parts.

    Raises ConflictError ``fold-larger`` as soon as they have ``limit`` bytes.
    """
    first, last = job.repo.load(job.start), job.repo.load(job.end)
    before, after = job.repo.digests(first), job.repo.digests(last)
    layouts = job.repo.layout(first), job.repo.layout(last)
    all_names = {*layouts[0].tensors, *layouts[1].tensors}
    origin = Origin(job.repo.id, job.end.step, job.start.id, first.state)

    def one(name: str) -> tuple[Entry, Encoded | None] | None:
        meta = job.old.tensors.get(name)
        data = job.old.bytes_of(name) if meta is not None else None
        if data is not None:
            check_tensor(name, data, before, layouts[0])
            data = data.view()
            data.flags.writeable = False  # else the patches would be applied to it in place
        old = _One({name: meta} if meta is not None else {}, data)
        *_, (new, known) = Replay(old, job.patches, layouts[1]).history(name)
        want = layouts[1].tensors.get(name)
        if known != ((want.dtype, want.shape) if want is not None else None):
            raise ChainError("tensor-shape", where=name[:80], have=describe(known), need="as the layout says")
        if new is not None:
            check_tensor(name, new, after, layouts[1])
        if meta is not None:
            job.old.release(name)
        if new is None and data is None:
            return None
        return _encode(name, old, _One({name: want} if want is not None else {}, new), all_names)

    def hand_over(number: int, writer: PartWriter) -> None:
        if sink.size + writer.size >= limit:
            have, need = f"{sink.size + writer.size:,} bytes or more", f"less than the {limit:,} bytes it replaces"
            raise _refuse("fold-larger", job.start, job.end, have, need)
        sink.put(EncodedPart.of(writer, number))

    names = sorted({name for patch in job.patches for name in patch.names}, key=str.encode)
    progress.start("fold", len(names))
    number, writer = 1, PartWriter(origin)
    for done in ordered_map(one, names, threads):
        progress.advance(1)
        if done is None:
            continue
        writer.add(done[0], done[1])
        if writer.size >= sink.part_bytes(PART_BYTES):
            hand_over(number, writer)
            number, writer = number + 1, PartWriter(origin)
    if len(writer):
        hand_over(number, writer)
    parts = sink.objects.wait()
    if parts and sink.size >= limit:  # headers and tables count too
        have, need = f"{sink.size:,} bytes", f"less than the {limit:,} bytes it replaces"
        raise _refuse("fold-larger", job.start, job.end, have, need)
    return parts


def _encode(name: str, old: State, new: State, names: set[str]) -> tuple[Entry, Encoded | None] | None:
    change = difference(name, old, new).change
    if change is None:
        return Entry.removal(name), None
    if change.base is not None and len(change.positions) == 0:
        return None
    return encode_entry(name, change, new.tensors[name].shape, names)


def _refuse(code: str, start: Link, end: Link, have: str, need: str) -> ConflictError:
    where = f"the fold from step {start.step} to {end.step}"
    return ConflictError(code, where=where, have=have, need=need)
