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
from deltackpt.checkpoint.diff import REBUILT, Difference, ReadsRebuilt, State, StoredTensor, difference
from deltackpt.checkpoint.rows import TensorRows, reads_ranges
from deltackpt.codecs import ManyChanges
from deltackpt.codecs.bits import Ints
from deltackpt.format import state_digest
from deltackpt.format.digests import Hashes, Words, hashes
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.layout import TensorsByName
from deltackpt.format.state_digest import TensorDigest, xxh3
from deltackpt.format.tensor_columns import Form, NameRange
from deltackpt.util.grouped import grouped

BATCH = 4 << 20  # bytes of one state's tensors: both stay in the cache while they are compared, hashed and encoded


MOST = 1024  # tensors of a batch
GATHERED = 64 << 20  # bytes of a tensor up to which dense change is gathered, and any encoding tried
PIECE = 8 << 20  # bytes of a larger tensor that are hashed at a time


@runtime_checkable
class ReadsMany(Protocol):
    """A `State` that has a way of its own to do this for many tensors."""

    def read_many(self, names: Sequence[str]) -> tuple[Sequence[npt.NDArray[np.uint8]], Sequence[int]]:
        """`bytes_of` of each, [n] uint8, and where they begin in memory. Raises what `bytes_of` raises."""

    def release_many(self, names: Sequence[str]) -> None:
        """`release` of each, whole."""


def batches(old: State, new: State, most: int = BATCH) -> Iterator[Sequence[str]]:
    """All names of both states, in the order of their bytes, in runs of at most ``most`` bytes and `MOST` tensors; one
    that is longer is alone. Of two states that have the same tensors they are `NameRange`s.
    """
    if reads_ranges(old) and reads_ranges(new) and old.named is new.named:
        yield from _ranges(new.named, most)
        return
    names = sorted({*old.tensors, *new.tensors})  # code points sort as their UTF-8 bytes do
    yield from grouped(names, lambda n: max(_size(old.tensors.get(n)), _size(new.tensors.get(n))), most, MOST)


def _ranges(named: TensorsByName, most: int) -> Iterator[NameRange]:
    ends, first = named.columns.sizes.cumsum(), 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        end = min(int(np.searchsorted(ends, before + most, "right")), first + MOST)
        yield NameRange(named.names, first, max(end, first + 1))
        first = max(end, first + 1)


def _size(tensor: StoredTensor | None) -> int:
    return _nbytes(tensor.dtype, tensor.shape) if tensor is not None else 0


@lru_cache(4096)  # most tensors of a model have one of a few shapes
def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return nbytes(DTYPES[dtype], shape)


def _no_bytes(number: int) -> npt.NDArray[np.uint8]:
    raise IndexError(number)


NONE = ManyChanges([], np.zeros(0, np.int64), _no_bytes, _no_bytes, *kernels.NOTHING)
NO_HASHES = np.zeros((0, 16), np.uint8)


@dataclass(frozen=True)
class ComparedBatch:
    """A batch, compared. ``names`` are those of the tensors that have one dtype and shape in both states, in the order
    of ``changes``, and of their xxh3, uint8 [tensors, 16]; ``others`` are of the rest of the batch.
    """

    names: Sequence[str]
    changes: ManyChanges
    old_xxh3: Hashes
    new_xxh3: Hashes
    others: Sequence[Difference]

    @property
    def nbytes(self) -> int:
        """Bytes of what was found to differ."""
        alone = [found.change for found in self.others if found.change is not None]
        arrays = [*self.changes.memory, *(a for c in alone for a in (c.positions, c.old, c.new))]
        return sum(array.nbytes for array in arrays)

    def differences(self) -> Iterator[Difference]:
        """Of each tensor, what `difference` finds."""
        yield from self.together()
        yield from self.others

    def together(self) -> Iterator[Difference]:
        """The same of ``names`` alone."""
        for i, name in enumerate(self.names):
            yield Difference(name, self.changes.change(i), self.old_xxh3[i].tobytes(), self.new_xxh3[i].tobytes())


def compare_batch(names: Sequence[str], old: State, new: State) -> ComparedBatch:
    """Compare tensors of two states, bit by bit; those that have old elements of their shape in one call, but for large
    ones that are rebuilt while they are compared."""

    def alone(name: str) -> Difference:
        return difference(name, old, new, most=GATHERED)

    held: list[str] = []
    others: list[Difference] = []
    if isinstance(names, NameRange) and reads_ranges(old) and reads_ranges(new):
        columns = new.named.columns
        form, widths, sizes = (c[names.rows] for c in (columns.form, columns.widths, columns.sizes))
        large = sizes >= REBUILT if isinstance(old, ReadsRebuilt) else np.zeros(len(sizes), bool)
        if kernels.LIB is not None and sizes.sum() <= BATCH and not large.any():
            before, after = old.read_range(names), new.read_range(names)
            return _compared(names, (columns.forms, form), (before, after), (widths, sizes), others)
        others += [alone(names[i]) for i in np.flatnonzero(large).tolist()]
        names = [names[i] for i in np.flatnonzero(~large).tolist()]
    if not names or kernels.LIB is None or sum(_size(new.tensors.get(name)) for name in names) > BATCH:
        others += map(alone, names)
        return ComparedBatch([], NONE, NO_HASHES, NO_HASHES, others)
    for name in names:
        a, b = old.tensors.get(name), new.tensors.get(name)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            others.append(alone(name))
        else:
            held.append(name)
    (old_data, old_at), (new_data, new_at) = _read(old, held), _read(new, held)
    known: dict[tuple[str, tuple[int, ...]], int] = {}
    found = [new.tensors[name] for name in held]
    form = np.array([known.setdefault((t.dtype, tuple(t.shape)), len(known)) for t in found], np.int64)
    forms = [(DTYPES[dtype], shape) for dtype, shape in known]
    widths = np.array([dtype.width for dtype, _ in forms], np.int64)[form]
    rows = (
        TensorRows(np.array(old_at, np.int64), old_data.__getitem__),
        TensorRows(np.array(new_at, np.int64), new_data.__getitem__),
    )
    return _compared(held, (forms, form), rows, (widths, np.array([*map(len, new_data)], np.int64)), others)


def _compared(
    names: Sequence[str],
    forms: tuple[Sequence[Form], Ints],
    rows: tuple[TensorRows, TensorRows],
    counts: tuple[Ints, Ints],
    others: Sequence[Difference],
) -> ComparedBatch:
    """Tensors of the same dtype and shape in both states. ``forms`` as `ManyChanges` has them; ``counts``: bytes of a
    word, and of each tensor.
    """
    (old, new), (widths, sizes) = rows, counts
    found = kernels.diff_many(np.array([old.addresses, new.addresses, sizes // widths, widths]).T)
    old_xxh3, new_xxh3 = (hash_rows(r, sizes) for r in rows)
    return ComparedBatch(names, ManyChanges(*forms, old.bytes_of, new.bytes_of, *found), old_xxh3, new_xxh3, others)


def hash_rows(rows: TensorRows, sizes: Ints) -> Hashes:
    """The xxh3-128 of tensors of so many bytes, int64 [n]: uint8 [n, 16]. Needs the compiled kernels."""
    found: Hashes = kernels.xxh3_many(np.array([rows.addresses, sizes]).T)
    for i in np.flatnonzero(sizes <= kernels.HASHED).tolist():
        found[i] = np.frombuffer(xxh3(rows.bytes_of(i)), np.uint8)
    return found


def digest_range(names: NameRange, state: State) -> tuple[Words, Hashes]:
    """Both digests of every tensor of a range: ``sums``, uint64 [n, 2], and ``xxh3``, uint8 [n, 16]; their pages are
    released."""
    ranged = state
    assert reads_ranges(ranged)
    columns = ranged.named.columns
    widths, sizes = columns.widths[names.rows], columns.sizes[names.rows]
    if kernels.LIB is None or sizes.sum() > BATCH:
        found = [_digest(name, state) for name in names]
        return np.array([d.sums for d in found], np.uint64).reshape(-1, 2), hashes([d.xxh3 for d in found])
    rows = ranged.read_range(names)
    sums = kernels.digest_many(np.array([rows.addresses, sizes // widths, widths]).T)
    made = sums, hash_rows(rows, sizes)
    ranged.release_range(names)
    return made


def release(names: Sequence[str], state: State) -> None:
    """The caller is done with the tensors of a batch, those that the state has."""
    if isinstance(names, NameRange) and reads_ranges(state):
        state.release_range(names)
        return
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
