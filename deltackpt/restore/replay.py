"""A step's state, rebuilt tensor by tensor from an anchor, or another state, and the patches after it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint.diff import State
from deltackpt.codecs import Decoded, Entry
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import File, Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.repository import Repository
from deltackpt.repository.chain import Plan
from deltackpt.restore.journal import Journal
from deltackpt.restore.patch_reader import AnyPart, Found, PatchReader
from deltackpt.store.readahead import ObjectRange, ReadAhead

Bytes = npt.NDArray[np.uint8]


class Anchor:
    """The tensors of an anchor in its store: mapped where the store is local, read by range where it is not."""

    def __init__(
        self, repo: Repository, step: Manifest, files: Sequence[File] | None = None, order: Iterable[str] = ()
    ) -> None:
        """``files`` if an edge names them, and not the step's own manifest. ``order``: names of tensors that will be
        asked for one after the other, and so can be read ahead; it then has to be closed.
        """
        files = files or step.anchor or ()
        layout = repo.layout(step)
        if [f.size for f in files] != [s.size for s in layout.shards]:  # [F-MAN-9]
            have, need = f"{len(files)} files of other sizes", f"the {len(layout.shards)} shards of the layout"
            raise ChainError("anchor-files", where=f"step {step.step}", have=have, need=need)
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._store = repo.store
        self._at = {
            t.name: ObjectRange(file.name, shard.header.data_start + t.start, t.end - t.start)
            for file, shard in zip(files, layout.shards, strict=True)
            for t in shard.header.tensors
        }
        self._maps: dict[str, mmap.mmap] = {}
        for file in files if repo.store.capabilities.local else ():
            if (path := repo.store.local_path(file.name)) is not None and repo.store.stat(file.name).size == file.size:
                with path.open("rb") as f:
                    self._maps[file.name] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        ahead = [(name, at) for name in order if (at := self._at.get(name)) and at.length and at.file not in self._maps]
        self._runs = ReadAhead(repo.store, ahead) if ahead else None

    def bytes_of(self, name: str) -> Bytes:
        at = self._at[name]
        if at.file in self._maps:
            return np.frombuffer(self._maps[at.file], np.uint8)[at.start : at.end]
        if self._runs is not None and (found := self._runs.take(name)) is not None:
            return found
        return np.frombuffer(self._store.get_range(at.file, at.start, at.length) if at.length else b"", np.uint8)

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        at = self._at[name]
        first, last = at.start + start, at.end if end is None else at.start + end
        if at.file in self._maps and first < last:
            page = first - first % mmap.PAGESIZE
            self._maps[at.file].madvise(mmap.MADV_DONTNEED, page, last - page)

    def close(self) -> None:
        """Read nothing more ahead."""
        if self._runs is not None:
            self._runs.close()


class Replay:
    """The state of ``layout``: ``base`` with ``patches`` applied, each tensor when it is asked for."""

    def __init__(
        self, base: State, patches: Sequence[PatchReader], layout: Layout, journal: Journal | None = None
    ) -> None:
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._base = base
        self._patches = patches
        self._journal = journal
        self._number = {name: i for i, name in enumerate(layout.tensors)}

    @classmethod
    @contextmanager
    def open(
        cls,
        repo: Repository,
        plan: Plan,
        base: State | None = None,
        journal: Journal | None = None,
        order: Iterable[str] = (),
    ) -> Iterator[Replay]:
        """Open what the plan needs. Every part is hashed here, before any tensor is rebuilt.

        What is decoded is recorded in ``journal``, if there is one. ``order`` is that of `Anchor`. An anchor is proven
        tensor by tensor, as its bytes are used: where the block raises, its files are hashed, since damage there leads
        all else astray. Raises FormatError ``object-hash`` then.
        """
        with ExitStack() as stack:
            if base is None:
                anchor = Anchor(repo, plan.anchor or plan.target, plan.whole, order)
                stack.callback(anchor.close)
            patches = stack.enter_context(PatchReader.open_all(repo, plan.patches))
            try:
                yield cls(anchor if base is None else base, patches, repo.layout(plan.target), journal)
            except (ChainError, FormatError) as error:
                if base is None and error.code != "object-hash":
                    repo.prove(plan.whole)
                raise

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a tensor. Not proven yet: compare their xxh3 with the step's digests."""
        *_, (current, known) = self.history(name)
        want = self.tensors[name]
        if current is None or known != (want.dtype, want.shape):
            need = describe((want.dtype, want.shape)) + " by the layout"
            raise ChainError("tensor-shape", where=name[:80], have=describe(known), need=need)
        return current

    def history(self, name: str) -> Iterator[tuple[Bytes | None, Known | None]]:
        """The tensor before the first patch and after each: bytes (written to by the next step), dtype and shape."""
        current = self._base.bytes_of(name) if name in self._base.tensors else None
        meta = self._base.tensors.get(name)
        known = (meta.dtype, tuple(meta.shape)) if meta else None
        yield current, known
        for k, patch in enumerate(self._patches):
            if found := patch.entries_of(name):
                if current is None or known is None or not changes_elements(known, found):
                    current, known = replace_whole(found)
                else:
                    decoded = None
                    if self._journal is not None:
                        decoded = decode_step(current, known, found)
                        assert decoded is not None
                        self._journal.append(self._number[name], k, decoded)
                    if not current.flags.writeable:
                        current = current.copy()
                        self.release(name)
                    if decoded is not None:
                        decoded.write_to(current.view(decoded.values.dtype))
                    else:
                        write_step(current, known, found)
            yield current, known

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        if name in self._base.tensors:
            self._base.release(name, start, end)


Known = tuple[str, tuple[int, ...]]


def describe(known: Known | None) -> str:
    return f"{known[0]} {list(known[1])}" if known else "no tensor"


def changes_elements(known: Known, found: Sequence[Found]) -> bool:
    """Does a tensor stay one of this dtype and shape by one step's entries?

    Raises ChainError ``base-shape`` where an entry does not fit what is there.
    """
    entries = [part.entries[i] for part, i in found]
    others = [e for e in entries if (e.dtype.name, e.whole) != known]
    if any(e.encoding == "removed" for e in entries) or any(e.encoding == "full" for e in others):
        return False
    if others:
        part = found[entries.index(others[0])][0]
        need, where = describe((others[0].dtype.name, others[0].whole)), f"{part.where}, {others[0].name[:80]!r}"
        raise ChainError("base-shape", where=where, have=describe(known), need=need)
    return True


def write_step(current: Bytes, known: Known, found: Sequence[Found]) -> bool:
    """What `decode_step` gives, written to ``current``, which is contiguous; False where that gives None.

    Faster than both, as no position is kept. After an error ``current`` is worth nothing.
    """
    if not changes_elements(known, found):
        return False
    words = current.view(uint(DTYPES[known[0]].width))
    for part, i in found:
        entry = part.entries[i]
        if not entry.boxed:
            part.decode_into(entry, words)
            continue
        box = words.reshape(entry.whole)[_box(entry)]
        inside = box.reshape(-1)  # a copy, unless the box is contiguous
        part.decode_into(entry, inside)
        box[...] = inside.reshape(box.shape)
    return True


def decode_step(
    current: Bytes, known: Known, found: Sequence[Found], room: DecodeBuffer | None = None
) -> Decoded | None:
    """The new elements that one step's entries give a tensor, as flat positions in the whole tensor.

    They may be in ``room``, if there is one.
    None where the tensor gets another dtype or shape, or goes. Nothing is written. Raises ChainError ``base-shape``
    where an entry does not fit what is there, FormatError for bytes that do not decode.
    """
    if not changes_elements(known, found):
        return None
    words = current.view(uint(DTYPES[known[0]].width))
    decoded = []
    for part, i in found:
        entry = part.entries[i]
        if not entry.boxed and room is not None:  # then it is the only one
            return part.decode(entry, words, room)
        decoded.append(_decode_box(part, entry, words) if entry.boxed else part.decode(entry, words))
    if len(decoded) == 1:
        return decoded[0]
    return Decoded(np.concatenate([d.positions for d in decoded]), np.concatenate([d.values for d in decoded]))


def _box(entry: Entry) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.shape, strict=True))


def _decode_box(part: AnyPart, entry: Entry, words: npt.NDArray[Any]) -> Decoded:
    decoded = part.decode(entry, words.reshape(entry.whole)[_box(entry)].reshape(-1))
    inside = np.arange(entry.elements) if decoded.positions is None else decoded.positions
    index = np.unravel_index(inside, entry.shape)
    moved = tuple(i + o for i, o in zip(index, entry.offset, strict=True))
    return Decoded(np.ravel_multi_index(moved, entry.whole), decoded.values)


def replace_whole(found: Sequence[Found]) -> tuple[Bytes | None, Known | None]:
    """A tensor that is new, reshaped or gone after a step: its bytes, from `full` entries alone."""
    part, i = found[0]
    first = part.entries[i]
    if first.encoding == "removed":
        return None, None
    known = (first.dtype.name, first.whole)
    if first.encoding != "full":
        raise ChainError("base-shape", where=part.where, have=f"no {first.name[:80]!r} to patch", need=describe(known))
    if not first.boxed:
        return part.decode(first, None).values.view(np.uint8), known
    boxes = [(part, part.entries[i]) for part, i in found]
    for part, entry in boxes:
        if entry.encoding != "full" or (entry.dtype.name, entry.whole) != known:
            have = f"no {entry.name[:80]!r} to patch"
            raise ChainError("base-shape", where=part.where, have=have, need=describe(known))
    # Boxes do not overlap, so counting tells whether they cover it: before there is room for all of it.
    count = nbytes(first.dtype, first.whole) // first.dtype.width
    if sum(entry.elements for _, entry in boxes) != count:
        have = "boxes that leave parts of it open"
        raise ChainError("base-shape", where=f"{part.where}, {first.name[:80]!r}", have=have, need=describe(known))
    words = np.empty(count, uint(first.dtype.width))
    for part, entry in boxes:
        _decode_box(part, entry, words).write_to(words)
    return words.view(np.uint8), known
