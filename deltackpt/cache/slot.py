"""One slot of a managed cache, patched in place: changed elements only, every byte of the result proven.

The slot is not proven before. A wrong old byte leads to a wrong new one, which the proof of the result finds, or to
bytes that do not decode, which `move` treats as damage as well. Then the slot is removed, and with it the journal of
the move: its records may hold values that were decoded from wrong old ones, and are not used until the journal has its
other name, which it gets after the proof.

What passes is the target, byte for byte. But is its journal what leads there from the step before? A record could lack
an element whose wrong old byte was the new one already. Of one patch it lacks none: the patch says which elements
change, whatever there was (exponent lists depend on old exponents, but count their changes, so that some other element
is written in its place, whose old value would have to be wrong by just its step). A `SquashedPatch` finds them by
comparing: for these, each tensor is proven before the patch is applied to it.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from threading import Thread

import numpy as np

from deltackpt import kernels
from deltackpt.cache.layout import SIDE_DRAFT
from deltackpt.cache.tiled import LARGE, SHARES, SharedTensor, TiledTensor, rest_of
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.layout import Layout, Shard
from deltackpt.format.manifest import Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.patch.apply import decode_step
from deltackpt.patch.base import Bytes, Patch
from deltackpt.patch.many import TensorRun, changes_of, decode_run, runs
from deltackpt.repository import Repository
from deltackpt.restore.journal import Journal, replay_run
from deltackpt.restore.materialize import check_tensor, file_order, runs_of, save, unproven
from deltackpt.restore.proof import holds
from deltackpt.restore.scratch import SpillBuffer
from deltackpt.util.file_server import remove, rename
from deltackpt.util.mapped_file import MappedFile
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import Progress

SMALL = 16 << 20  # bytes of work up to which the interpreter's part of it counts
LAST = 2  # small pieces of work for each thread that are left for the end


class MappedSlot:
    """The shards of a slot that stay mapped in this process from when the standby is prepared until the next move.

    They are known by device and inode, since another process may have moved the slot meanwhile.
    """

    def __init__(self) -> None:
        self._shards: dict[tuple[int, int], MappedFile] = {}

    def add(self, info: os.stat_result, shard: MappedFile) -> None:
        """Keep the mapping of a file."""
        self._shards[info.st_dev, info.st_ino] = shard

    def of(self, info: os.stat_result) -> MappedFile | None:
        """The mapping of a file, if there is one. As long as there is, no other file has its inode."""
        return self._shards.get((info.st_dev, info.st_ino))

    def make_writable(self) -> None:
        """Begin to make the pages writable that the system has written back since; no byte of them changes."""
        shards = list(self._shards.values())

        def run() -> None:
            for shard in shards:
                shard.make_writable()

        Thread(target=run, name="deltackpt-standby", daemon=True).start()

    def clear(self) -> None:
        """Unmap all, once no array refers to it."""
        self._shards.clear()


@dataclass(frozen=True)
class SlotMove:
    """``journal`` leads a slot to the step that ``patches`` apply to, and these lead it to ``target``.

    Without a journal the slot is at that step. ``following`` records what the patches decode to. ``between`` is the
    step that the patches apply to, if each tensor has to be proven there.
    """

    repo: Repository
    target: Manifest
    journal: Journal | None
    patches: Sequence[Patch] = ()
    following: Journal | None = None
    between: Manifest | None = None


def patch_slot(
    move: SlotMove,
    folder: Path,
    threads: int,
    progress: Progress,
    standby: MappedSlot | None = None,
    *,
    keep: bool = False,
) -> int:
    """Patch the slot's files in place. -> bytes written. Raises ChainError ``tensor-differs`` for a slot that is
    damaged.

    What is mapped in ``standby`` is used; with ``keep`` all stays mapped there, every page such that it can be written
    to.

    A killed move may have left a mix: tensors with a record of ``following`` are at any point of the way, all others
    at most where ``journal`` leads. Each is proven while it is in the processor's cache.
    """
    patcher = _Patcher(move, folder, standby, keep=keep)
    layout = patcher.layout
    progress.start("apply", sum(s.size for s in layout.shards))
    total, work = 0, patcher.work(threads)
    for written, size in ordered_map(patcher.patch, work, threads, ahead=len(work)):  # numbers: any may wait
        total += written
        progress.advance(size)
    return total + _side_files(move, folder)


@dataclass(frozen=True)
class _Work:
    """A run of tensors of a shard; or one tensor that several threads share, of whose tiles ``rows``, first and end,
    are done here."""

    shard: Shard
    tensors: Sequence[Tensor]
    shared: SharedTensor | None = None
    rows: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        """Bytes of the tensors, or of what is done here of one."""
        if self.shared is not None:
            first, end = self.shared.tiled.span(*self.rows)
            return end - first
        return self.tensors[-1].end - self.tensors[0].start


class _Patcher:
    """Patches runs of tensors of a slot's shards, each by itself; any thread may."""

    def __init__(self, move: SlotMove, folder: Path, standby: MappedSlot | None, *, keep: bool) -> None:
        self.move, self.keep = move, keep
        self.layout, self.digests = move.repo.layout(move.target), move.repo.digests(move.target)
        self.between = move.repo.digests(move.between) if move.between else None
        self.number = self.layout.named.numbers
        self.mapped = {shard.path: _map(folder, shard, standby, keep=keep) for shard in self.layout.shards}
        self._buffers = threading.local()

    def work(self, threads: int) -> list[_Work]:
        """All that is to be done, in the order in which it is begun."""
        most = sum(s.size for s in self.layout.shards) // (SHARES * threads)
        every = [_Work(*item) for item in runs_of(self.layout)]
        if threads > 1 and self._by_tiles:
            every = [part for work in every for part in self._shares(work, max(most, LARGE))]
        return [every[i] for i in order([work.size for work in every], threads)]

    def _shares(self, work: _Work, most: int) -> Sequence[_Work]:
        if work.size <= most or len(work.tensors) > 1:
            return [work]
        tensor, span = work.tensors[0], _span(work.shard, work.tensors)
        data = self.mapped[work.shard.path].bytes_of(span)
        tiled = self._tiled(tensor, self.number[tensor.name], data)
        if tiled is None or (shared := SharedTensor.cut(tiled, most)) is None:
            return [work]
        return [replace(work, shared=shared, rows=rows) for rows in shared.shares()]

    def patch(self, work: _Work) -> tuple[int, int]:
        """-> bytes written, and bytes of the tensors."""
        shard, tensors = work.shard, work.tensors
        span = _span(shard, tensors)
        file = self.mapped[shard.path]
        if work.shared is not None:
            return self._share(work, work.shared, span, file), work.size
        numbers = np.array([self.number[tensor.name] for tensor in tensors])
        file.populate(span, write=self.keep or self._many(tensors, numbers, span, file))
        run = TensorRun(tensors, file.bytes_of(span), self.layout.named)
        written = self._at_once(run, numbers) if len(tensors) > 1 and kernels.LIB is not None else None
        if written is None:
            each = zip(tensors, numbers.tolist(), strict=True)
            written = sum(self._one(t, number, run.bytes_of(i)) for i, (t, number) in enumerate(each))
        file.release(span)
        return written, len(run.data)

    def _share(self, work: _Work, shared: SharedTensor, span: tuple[int, int], file: MappedFile) -> int:
        (tensor,), tiled = work.tensors, shared.tiled
        first, end = tiled.span(*work.rows)
        many = self._many([tensor], np.array([tiled.number]), span, file)
        file.populate((span[0] + first, span[0] + end), write=self.keep or many)
        written, _ = tiled.move(self.move.journal, *work.rows)
        if shared.is_last():
            check_tensor(tensor.name, file.bytes_of(span), self.digests, self.layout)
            file.release(span)
        return written

    def _many(self, tensors: Sequence[Tensor], numbers: Ints, span: tuple[int, int], file: MappedFile) -> bool:
        """Will so much of a span be written that all its pages may as well be made writable? In memory it makes no
        difference."""
        return not file.in_memory and self._changes(tensors, numbers) >= (span[1] - span[0]) // mmap.PAGESIZE

    @property
    def _by_tiles(self) -> bool:
        """May large tensors be moved by rows of tiles? Not where records of a killed move are there already, or each
        has to be proven in between."""
        move = self.move
        return len(move.patches) == 1 and move.between is None and not (move.following and move.following.records)

    def _tiled(self, tensor: Tensor, number: int, data: Bytes) -> TiledTensor | None:
        if len(data) < LARGE or not self._by_tiles or self.move.following is None:
            return None
        return TiledTensor.of(self.move.patches[0], tensor, number, data, self.move.following)

    def _changes(self, tensors: Sequence[Tensor], numbers: Ints) -> int:
        """About how many elements of a run will be written."""
        journals = (self.move.journal, self.move.following)
        known = sum(int(journal.rows_of(numbers)[1]["count"].sum()) for journal in journals if journal)
        return known + sum(changes_of(patch, tensors, self.layout.named, numbers) for patch in self.move.patches)

    def _at_once(self, run: TensorRun, numbers: Ints) -> int | None:
        """All tensors of a run; None where they have to be done one by one, from what is there then.

        Nothing of ``patches`` was written then, so that the first tensor with an error is found.
        """
        move, written = self.move, 0
        if len(move.patches) > 1 or (move.following is not None and move.following.records):
            return None
        if move.journal is not None and (written := replay_run(move.journal, run, numbers)) < 0:
            return None
        if self.between is not None and unproven(run, self.between) is not None:
            return None
        if move.following is not None and move.patches:
            if (changes := decode_run(move.patches[0], run)) is None:
                return None
            move.following.append_run(numbers, 0, changes)
            changes.write_to(run)
            written += changes.written
        if (wrong := unproven(run, self.digests)) is not None:
            check_tensor(run.tensors[wrong].name, run.bytes_of(wrong), self.digests, self.layout)
        return written

    def _one(self, tensor: Tensor, number: int, data: Bytes) -> int:
        if (tiled := self._tiled(tensor, number, data)) is not None:
            written, found = tiled.move(self.move.journal, 0, tiled.rows)
            if self.digests[tensor.name].xxh3 != found:  # or there is none
                check_tensor(tensor.name, data, self.digests, self.layout)
            return written
        if not hasattr(self._buffers, "own"):
            self._buffers.own = SpillBuffer()
        written = _replay(self.move, tensor, number, data)
        if self.between is not None and not (self.move.following and self.move.following.of(number)):
            check_tensor(tensor.name, data, self.between, self.layout)
        written += _apply(self.move, tensor, number, data, self._buffers.own)
        check_tensor(tensor.name, data, self.digests, self.layout)
        return written


def order(sizes: Sequence[int], threads: int) -> list[int]:
    """The numbers of pieces of work of so many bytes, in the order in which they are begun: the largest first, and the
    smallest last, so that all threads are done at about the same time.

    Most of the small ones go among the large ones: what the interpreter does for each, on one thread at a time, would
    keep many threads waiting if these followed each other.
    """
    every = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    large = sum(size >= SMALL for size in sizes)
    among = every[large : -LAST * threads]
    if threads == 1 or not large or not among:
        return every
    each = -(-len(among) // large)
    mixed = [i for k in range(large) for i in (every[k], *among[k * each : (k + 1) * each])]
    return mixed + every[large + len(among) :]


def of_these_shards(folder: Path, layout: Layout) -> bool:
    """Has a slot the layout's shards, by sizes and headers? True also where it is damaged otherwise."""
    for shard in layout.shards:
        with suppress(OSError), open(folder / shard.path, "rb", opener=_no_link) as file:
            if file.read(len(shard.header.head)) != shard.header.head or file.seek(0, 2) != shard.size:
                return False
    return True


def _replay(move: SlotMove, tensor: Tensor, number: int, data: Bytes) -> int:
    """The records of ``journal``. -> bytes written."""
    words = data.view(uint(DTYPES[tensor.dtype].width))
    records = move.journal.of(number) if move.journal else []
    for record in records:
        record.write_to(words)
    return sum(record.values.nbytes for record in records)


def _apply(move: SlotMove, tensor: Tensor, number: int, data: Bytes, buffer: DecodeBuffer) -> int:
    """The records of ``following``, then the patches that have none yet. -> bytes written."""
    words = data.view(uint(DTYPES[tensor.dtype].width))
    written, done = 0, -1
    if move.following is None:
        return written
    for record in move.following.of(number):
        record.write_to(words)
        done = record.patch
    if done >= len(move.patches):
        raise ChainError("slot-unusable", where=tensor.name[:80], have=f"a record of patch {done}", need="one there is")
    if done >= 0:
        written += rest_of(move.patches[done], tensor, number, data, move.following, done)
    for k, patch in enumerate(move.patches):
        if k <= done or (found := patch.tensor(tensor.name)) is None:
            continue
        decoded = decode_step(data, (tensor.dtype, tensor.shape), found, buffer)
        if decoded is None:
            raise ChainError("slot-unusable", where=tensor.name[:80], have="another shape in between", need="one shape")
        move.following.append(number, k, decoded).write_to(words)
        written += decoded.values.nbytes
    return written


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _span(shard: Shard, run: Sequence[Tensor]) -> tuple[int, int]:
    return shard.header.data_start + run[0].start, shard.header.data_start + run[-1].end


def _map(folder: Path, shard: Shard, standby: MappedSlot | None, *, keep: bool) -> MappedFile:
    path, need = folder / shard.path, f"the slot's own shard of {shard.size:,} bytes"
    for at in (folder, *(folder / up for up in PurePosixPath(shard.path).parents)):
        if at.is_symlink():  # what it leads to is not the cache's to change
            raise ChainError("slot-unusable", where=at, have="a symlink in place of a directory", need=need)
    try:
        with open(path, "r+b", opener=_no_link) as file:
            if file.seek(0, 2) != shard.size:
                raise ChainError("slot-unusable", where=path, have="a file of another size", need=need)
            if (info := os.fstat(file.fileno())).st_nlink > 1:  # a copy by hard links, say, which must not change
                raise ChainError("slot-unusable", where=path, have="a file that has another name too", need=need)
            if standby is None or (found := standby.of(info)) is None:
                spans = [_span(shard, run) for run in runs(file_order(shard))]
                found = MappedFile(file.fileno(), shard.size, spans, keep=keep)
                if standby is not None and keep:
                    standby.add(info, found)
    except OSError as error:
        raise ChainError("slot-unusable", where=path, have=error.strerror or error, need=need) from error
    if found.bytes_of((0, shard.header.data_start)).tobytes() != shard.header.head:
        raise ChainError("slot-unusable", where=path, have="another header", need=need)
    return found


def _side_files(move: SlotMove, folder: Path) -> int:
    """Replace the side files that differ from the target's, never writing into one, and remove other files. -> bytes
    written.
    """
    layout = move.repo.layout(move.target)
    _clear(folder, {s.path for s in layout.shards} | {s.path for s in layout.side})
    written = 0
    for side in layout.side:
        path = folder / side.path
        if not holds(path, side.file):
            draft = folder / SIDE_DRAFT
            save(move.repo, side.file, draft)
            path.parent.mkdir(parents=True, exist_ok=True)
            rename(draft, path)
            written += side.file.size
    return written


def _clear(folder: Path, keep: set[str]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a directory before it
        name = path.relative_to(folder).as_posix()
        if path.is_dir() and not path.is_symlink():
            if not any(other.startswith(f"{name}/") for other in keep):
                with suppress(FileNotFoundError):
                    path.rmdir()
        elif name not in keep or path.is_symlink():
            remove(path)
