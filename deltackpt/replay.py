"""A step's state, rebuilt tensor by tensor from an anchor, or another state, and the patches after it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.bits import storage_shape, uint
from deltackpt.chain import Plan
from deltackpt.codecs import Entry
from deltackpt.diff import State
from deltackpt.errors import ChainError
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Manifest
from deltackpt.format.safetensors_header import Tensor
from deltackpt.parts import Found, PatchReader
from deltackpt.repository import Repository

Bytes = npt.NDArray[np.uint8]


class Anchor:
    """The tensors of an anchor in its store: mapped where the store is local, read by range where it is not."""

    def __init__(self, repo: Repository, step: Manifest) -> None:
        assert step.anchor is not None
        layout = repo.layout(step)
        if [f.size for f in step.anchor] != [s.size for s in layout.shards]:
            have, need = f"{len(step.anchor)} files of other sizes", f"the {len(layout.shards)} shards of the layout"
            raise ChainError("anchor-files", where=f"step {step.step}", have=have, need=need)
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._store = repo.store
        self._at = {
            t.name: (file.name, shard.header.data_start + t.start, t.end - t.start)
            for file, shard in zip(step.anchor, layout.shards, strict=True)
            for t in shard.header.tensors
        }
        self._maps: dict[str, mmap.mmap] = {}
        for file in step.anchor:
            if (path := repo.store.local_path(file.name)) is not None and repo.store.stat(file.name).size == file.size:
                with path.open("rb") as f:
                    self._maps[file.name] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)

    def bytes_of(self, name: str) -> Bytes:
        file, start, length = self._at[name]
        if file in self._maps:
            return np.frombuffer(self._maps[file], np.uint8)[start : start + length]
        return np.frombuffer(self._store.get_range(file, start, length) if length else b"", np.uint8)

    def release(self, name: str) -> None:
        file, start, length = self._at[name]
        if file in self._maps and length:
            first = start - start % mmap.PAGESIZE
            self._maps[file].madvise(mmap.MADV_DONTNEED, first, start + length - first)


class Replay:
    """The state of ``layout``: ``base`` with ``patches`` applied, each tensor when it is asked for."""

    def __init__(self, base: State, patches: Sequence[PatchReader], layout: Layout) -> None:
        self.tensors: Mapping[str, Tensor] = layout.tensors
        self._base = base
        self._patches = patches

    @classmethod
    @contextmanager
    def open(cls, repo: Repository, plan: Plan, base: State | None = None) -> Iterator[Replay]:
        """Open what the plan needs. Every part is hashed here, before any tensor is rebuilt."""
        with ExitStack() as stack:
            start: State = base if base is not None else Anchor(repo, plan.anchor or plan.target)
            patches = [stack.enter_context(PatchReader.open(repo, step)) for step in plan.patches]
            yield cls(start, patches, repo.layout(plan.target))

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a tensor. Not proven yet: compare their xxh3 with the step's digests."""
        current = self._base.bytes_of(name) if name in self._base.tensors else None
        meta = self._base.tensors.get(name)
        known = (meta.dtype, tuple(meta.shape)) if meta else None
        for patch in self._patches:
            if found := patch.entries_of(name):
                current, known = apply(current, known, found)
        want = self.tensors[name]
        if current is None or known != (want.dtype, want.shape):
            have = f"{known[0]} {list(known[1])}" if current is not None and known else "no tensor"
            raise ChainError("tensor-shape", where=name[:80], have=have, need=f"{want.dtype} {list(want.shape)} by the layout")
        return current

    def release(self, name: str) -> None:
        if name in self._base.tensors:
            self._base.release(name)


Known = tuple[str, tuple[int, ...]] | None


def apply(current: Bytes | None, known: Known, found: Sequence[Found]) -> tuple[Bytes | None, Known]:
    """One step of one tensor: its bytes, dtype and shape, and the entries that change it -> the new ones.

    ``current`` is written to if it can be, and copied first if not. Raises ChainError ``base-shape`` where an entry does
    not fit what is there, FormatError for bytes that do not decode.
    """
    whole = [part.entries[i] for part, i in found if not part.entries[i].boxed]
    if whole and whole[0].encoding == "removed":
        return None, None
    if whole and whole[0].encoding == "full":
        part, _ = found[0]
        return part.decode(whole[0], None).values.view(np.uint8), (whole[0].dtype.name, whole[0].shape)
    first = found[0][0].entries[found[0][1]]
    want = (first.dtype.name, first.whole)
    if known != want or current is None:
        boxes = [part.entries[i] for part, i in found]
        if any(e.encoding != "full" for e in boxes) or sum(e.elements for e in boxes) != _elements(first):
            have = f"{known[0]} {list(known[1])}" if known else "no tensor"
            raise ChainError("base-shape", where=f"{found[0][0].where}, {first.name!r}", have=have, need=f"{want[0]} {list(want[1])}")
        current = np.empty(_elements(first) * first.dtype.width, np.uint8)
    elif not current.flags.writeable:
        current = current.copy()
    words: npt.NDArray[Any] = current.view(uint(first.dtype.width))
    for part, i in found:
        entry = part.entries[i]
        if (entry.dtype.name, entry.whole) != want:
            raise ChainError("base-shape", where=f"{part.where}, {entry.name!r}", have="boxes of different tensors", need="one tensor")
        if entry.boxed:
            box = tuple(slice(o, o + n) for o, n in zip(entry.offset, entry.shape, strict=True))
            region = words.reshape(entry.whole)[box]
            flat = region.reshape(-1).copy()
            part.decode(entry, flat).write_to(flat)
            region[...] = flat.reshape(entry.shape)
        else:
            part.decode(entry, words).write_to(words)
    return current, want


def _elements(entry: Entry) -> int:
    return int(np.prod(storage_shape(entry.dtype, entry.whole), dtype=np.int64))
