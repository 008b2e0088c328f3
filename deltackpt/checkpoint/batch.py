"""Many small tensors of two states compared in one call: the place where batches are made.

Threads of Python share one interpreter, so a call for each small tensor would cost more than the work on its bytes. A
tensor that is larger than a batch is one by itself, and is read in pieces (`diff.difference`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.checkpoint.diff import Difference, State, StoredTensor, difference
from deltackpt.codecs import ManyChanges
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.state_digest import TensorDigest, xxh3

BATCH = 4 << 20  # bytes of one state's tensors: both stay in the cache while they are compared, hashed and encoded


MOST = 1024  # tensors of a batch
PIECE = 8 << 20  # bytes of a larger tensor that are hashed at a time


@runtime_checkable
class ReadsMany(Protocol):
    """A `State` that has a way of its own to do this for many tensors."""

    def read_many(self, names: Sequence[str]) -> tuple[Sequence[npt.NDArray[np.uint8]], Sequence[int]]:
        """`bytes_of` of each, [n] uint8, and where they begin in memory. Raises what `bytes_of` raises."""

    def release_many(self, names: Sequence[str]) -> None:
        """`release` of each, whole."""


def batches(old: State, new: State, most: int = BATCH) -> Iterator[list[str]]:
    """All names of both states, in the order of their bytes, in runs of at most ``most`` bytes and `MOST` tensors; one
    that is longer is alone."""
    held, size = list[str](), 0
    for name in sorted({*old.tensors, *new.tensors}):  # code points sort as their UTF-8 bytes do
        own = max(_size(old.tensors.get(name)), _size(new.tensors.get(name)))
        if held and (size + own > most or len(held) == MOST):
            yield held
            held, size = [], 0
        held.append(name)
        size += own
    if held:
        yield held


def _size(tensor: StoredTensor | None) -> int:
    return _nbytes(tensor.dtype, tensor.shape) if tensor is not None else 0


@lru_cache(4096)  # most tensors of a model have one of a few shapes
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return nbytes(DTYPES[dtype], shape)


NONE = ManyChanges([], [], [], [], *kernels.NOTHING)


@dataclass(frozen=True)
class ComparedBatch:
    """A batch, compared. ``names`` are those of the tensors that have one dtype and shape in both states, in the order
    of ``changes``; ``others`` are of the rest of the batch.
    """

    names: Sequence[str]
    changes: ManyChanges
    old_xxh3: Sequence[bytes]
    new_xxh3: Sequence[bytes]
    others: Sequence[Difference]

    @property
    def nbytes(self) -> int:
        """Bytes of what was found to differ."""
        alone = [found.change for found in self.others if found.change is not None]
        arrays = [*self.changes.memory, *(a for c in alone for a in (c.positions, c.old, c.new))]
        return sum(array.nbytes for array in arrays)

    def differences(self) -> Iterator[Difference]:
        """Of each tensor, what `difference` finds."""
        for i, name in enumerate(self.names):
            yield Difference(name, self.changes.change(i), self.old_xxh3[i], self.new_xxh3[i])
        yield from self.others


def compare_batch(names: Sequence[str], old: State, new: State) -> ComparedBatch:
    """Compare tensors of two states, bit by bit; those that have old elements of their shape in one call."""
    if kernels.LIB is None or sum(_size(new.tensors.get(name)) for name in names) > BATCH:
        return ComparedBatch([], NONE, [], [], [difference(name, old, new) for name in names])
    held: list[str] = []
    others: list[Difference] = []
    for name in names:
        a, b = old.tensors.get(name), new.tensors.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            others.append(difference(name, old, new))
        else:
            held.append(name)
    (before, old_at), (after, new_at) = _read(old, held), _read(new, held)
    found = [new.tensors[name] for name in held]
    dtypes, shapes = [DTYPES[t.dtype] for t in found], [t.shape for t in found]
    widths = np.array([dtype.width for dtype in dtypes], np.int64)
    words = np.array([len(data) for data in after], np.int64) // widths
    rows = np.array([old_at, new_at, words, widths], np.int64).T
    changes = ManyChanges(dtypes, shapes, before, after, *kernels.diff_many(rows))
    return ComparedBatch(held, changes, [xxh3(data) for data in before], [xxh3(data) for data in after], others)


def digest_batch(names: Sequence[str], state: State) -> list[tuple[str, TensorDigest, int]]:
    """Both digests of every tensor of a batch, and its bytes; their pages are released."""
    data, at = _read(state, names)
    if kernels.LIB is None or sum(map(len, data)) > BATCH:
        return [(name, _digest(name, state), len(found)) for name, found in zip(names, data, strict=True)]
    widths = [DTYPES[state.tensors[name].dtype].width for name in names]
    words = [len(found) // width for found, width in zip(data, widths, strict=True)]
    sums = kernels.digest_many(np.array([at, words, widths], np.int64).T).tolist()
    made = []
    for name, found, (a, b) in zip(names, data, sums, strict=True):
        made.append((name, TensorDigest((a, b), xxh3(found)), len(found)))
    release(names, state)
    return made


def release(names: Sequence[str], state: State) -> None:
    """The caller is done with the tensors of a batch, those that the state has."""
    held = [name for name in names if name in state.tensors]
    if isinstance(state, ReadsMany):
        state.release_many(held)
        return
    for name in held:
        state.release(name)


def _digest(name: str, state: State) -> TensorDigest:
    """In pieces."""
    data, dtype = state.bytes_of(name), DTYPES[state.tensors[name].dtype]
    sums, hashed = state_digest.ZERO, xxhash.xxh3_128()
    for at in range(0, len(data), PIECE):
        piece = data[at : at + PIECE]
        sums = state_digest.add(sums, state_digest.of_run(piece.view(uint(dtype.width)), at // dtype.width))
        hashed.update(piece.data)
        state.release(name, at, at + len(piece))
    return TensorDigest(sums, hashed.digest())


def _read(state: State, names: Sequence[str]) -> tuple[Sequence[npt.NDArray[np.uint8]], Sequence[int]]:
    """The bytes of each tensor, and their address."""
    if isinstance(state, ReadsMany):
        return state.read_many(names)
    data = [state.bytes_of(name) for name in names]
    return data, kernels.addresses(*data)
