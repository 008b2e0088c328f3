"""The state that the next step applies to: a directory that is changed in place where a step names changes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint, Located
from deltackpt.checkpoint.diff import Difference, State, changes
from deltackpt.codecs import Change
from deltackpt.codecs.types import Elements
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.state_digest import TensorDigest, xxh3
from deltackpt.interop.changes import same_length, tensor_of
from deltackpt.interop.files import copy_checkpoint
from deltackpt.interop.protocol import Bytes, LayoutUpdate, Touched
from deltackpt.kernels import scatter
from deltackpt.util.disk import ensure_space

_POPULATE_WRITE = 23  # not in Python's mmap


def by_name(touched: Iterable[Touched], base: Checkpoint, where: object) -> dict[str, Touched]:
    """Raises FormatError ``foreign-twice`` for a tensor that occurs twice, ChainError ``foreign-tensor``."""
    found: dict[str, Touched] = {}
    for item in touched:
        if item.name in found:
            have = f"{item.name[:80]!r} twice"
            raise FormatError("foreign-twice", where=where, have=have, need="each tensor once")
        tensor_of(base, item.name, str(where))
        found[item.name] = item
    return found


class Working:
    """A checkpoint directory of this process alone, mapped to be written to. A failed step leaves it unusable."""

    def __init__(self, root: Path) -> None:
        with Checkpoint.open(root) as checkpoint:
            self.checkpoint = checkpoint  # for its headers: what was written since is read through `bytes_of`
        self.tensors: Mapping[str, Located] = self.checkpoint.tensors
        self._maps = {shard.path: _map(root / shard.path) for shard in self.checkpoint.shards}

    @classmethod
    def copy(cls, base: Checkpoint, into: Path) -> Working:
        """A copy of ``base`` in the new directory ``into``. Raises NoSpaceError ``no-space``."""
        ensure_space(into, sum(shard.size for shard in base.shards))
        copy_checkpoint(base, into)
        return cls(into)

    def bytes_of(self, name: str) -> Bytes:
        """The tensor's bytes as they are now, uint8 [bytes]: a view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._maps[tensor.shard], np.uint8)[tensor.start : tensor.end]

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """Let the system drop the pages of a tensor's bytes from ``start`` to ``end``."""
        tensor = self.tensors[name]
        first, last = tensor.start + start, tensor.end if end is None else tensor.start + end
        if first < last:
            page = first - first % mmap.PAGESIZE
            self._maps[tensor.shard].madvise(mmap.MADV_DONTNEED, page, last - page)

    def _populate(self, name: str) -> None:
        """Map the pages of a tensor to be written to, in one call: a fault each costs several times as much."""
        tensor = self.tensors[name]
        if tensor.start < tensor.end:
            page = tensor.start - tensor.start % mmap.PAGESIZE
            with suppress(OSError):  # before Linux 5.14
                self._maps[tensor.shard].madvise(_POPULATE_WRITE, page, tensor.end - page)

    def apply(self, update: LayoutUpdate) -> Change:
        """Change the tensor in place, and run the update's check on it; -> the change, of flat elements.

        Its ``base`` is the old elements where an encoding may want them, and zeros where none looks at them.
        """
        dtype, shape = DTYPES[self.tensors[update.name].dtype], self.tensors[update.name].shape
        data = self.bytes_of(update.name)
        words = data.view(uint(dtype.width))
        if update.positions is None or len(update.positions) > len(data) // mmap.PAGESIZE:
            self._populate(update.name)
        positions, new = changed_words(update, words)
        old = words[positions]
        keep = len(positions) > 0
        base = words.copy() if keep else np.broadcast_to(np.zeros(1, words.dtype), words.shape)
        scatter(words, positions, new)
        if update.check is not None:
            update.check(data)
        return Change(dtype, storage_shape(dtype, shape), positions, old, new, base, words)

    def comparison(
        self, touched: Mapping[str, Touched], before: Mapping[str, TensorDigest]
    ) -> Callable[[str, State, State], Difference]:
        """Used instead of comparing two states: applies the changes that a step names, and returns them."""

        def one(name: str, old: State, new: State) -> Difference:
            if name in touched:
                change = self.apply(touched[name].load())
                return Difference(name, change, None, xxh3(self.bytes_of(name)))
            dtype, shape = DTYPES[self.tensors[name].dtype], self.tensors[name].shape
            words = self.bytes_of(name).view(uint(dtype.width))
            none = np.zeros(0, words.dtype)
            change = Change(dtype, storage_shape(dtype, shape), np.zeros(0, np.int64), none, none, words, words)
            return Difference(name, change, None, before[name].xxh3)

        return one


def rebuild(base: Checkpoint, touched: Iterable[Touched], into: Path, where: object) -> None:
    """A copy of ``base`` at ``into`` with a step applied, each tensor proven as far as it can be."""
    found = by_name(touched, base, where)
    working = Working.copy(base, into)
    for item in found.values():
        working.apply(item.load())


def changed_words(update: LayoutUpdate, words: Elements) -> tuple[npt.NDArray[np.int64], Elements]:
    """What an update changes: rising flat positions, int64 [n], and the new elements, [n] of the dtype of ``words``.

    ``words`` are the elements that are there, flat. Raises FormatError ``foreign-length``.
    """
    where, wide = f"tensor {update.name[:80]!r}", words.itemsize
    if update.positions is None:
        values = update.values.view(words.dtype)
        same_length(len(values), len(words), where)
        at, _, new = changes(None if update.xor else words, values)
        return at, words[at] ^ new if update.xor else new
    same_length(len(update.values), len(update.positions), where)
    if update.unit == wide:
        at, new = update.positions, update.values.view(words.dtype)
        if not (at[1:] > at[:-1]).all():
            order = np.argsort(at)
            at, new = at[order], new[order]
        new = words[at] ^ new if update.xor else new
    else:  # single bytes of wider elements
        at, index = np.unique(update.positions // wide, return_inverse=True)
        new = words[at]
        at_byte = index * wide + update.positions % wide
        raw = new.view(np.uint8)
        raw[at_byte] = raw[at_byte] ^ update.values if update.xor else update.values
    differ = new != words[at]
    return (at, new) if differ.all() else (at[differ], new[differ])


def _map(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)
