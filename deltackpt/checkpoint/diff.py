"""Two states -> changed elements: in parallel, bit by bit, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from deltackpt import kernels
from deltackpt.codecs import DENSE, Change, ChangedElements
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.state_digest import xxh3
from deltackpt.util import reuse, spill
from deltackpt.util.parallel import ordered_map

BEHIND = 16 << 20  # bytes after which the pages that were read are released
GATHERED = 4 << 20  # changes of a tensor that are gathered before it is known whether it changed densely
PIECE = 4 << 20  # bytes of one call: what differs in them has room in memory
KEPT = 256 << 20  # bytes of a tensor up to which the old pages stay mapped for the encoder, which looks at them again
REBUILT = 1 << 20  # bytes from which a tensor is rebuilt by itself
OFTEN, AT_FIRST = 32, 1 << 19  # one element of so many is thought to change, so many at most: room for what is found
CHUNK = 1 << 20  # bytes: both sides of a chunk stay in the cache while they are compared and hashed


class StoredTensor(Protocol):
    """A tensor of a state: a dtype of the registry, and its shape in elements."""

    @property
    def dtype(self) -> str:
        """The name of a dtype as safetensors writes it: "BF16"."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements, outermost axis first; () for a scalar."""


class State(Protocol):
    """Anything that has tensors: a checkpoint directory, or a step rebuilt from a repository."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name."""

    def bytes_of(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of a tensor in order, uint8 [n]."""

    def release(self, name: str, start: int = 0, end: int | None = None) -> None:
        """The caller is done with the tensor, or with its bytes from ``start`` to ``end``: their memory may go."""


@runtime_checkable
class ReadsPieces(Protocol):
    """A `State` whose tensors are made anew when they are asked for, and need not be held whole."""

    def pieces(self, name: str) -> Iterator[npt.NDArray[np.uint8]] | None:
        """`State.bytes_of` from first to last, piece by piece, of whole words: uint8 [n], each valid until the next is
        asked for. None where that is not possible. Where they end early something is wrong, and `bytes_of` says
        what."""


class Rebuilding(Protocol):
    """A tensor that is rebuilt and compared; see `deltackpt.codecs.packed.native_rebuild.RebuiltPass`."""

    defect: bool

    @property
    def at(self) -> int:
        """Bytes that are done."""

    @property
    def words(self) -> int:
        """For so many there has to be room for the next call to go on."""

    def advance(self, into: tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]], first: int = 0) -> int:
        """Go on, as far as there is room. What differs is put ``into`` int64 positions, old and new words, [n] each,
        from their element ``first`` on. -> how many."""

    def xxh3(self) -> tuple[bytes, bytes]:
        """Of both states, 16 bytes each."""


@runtime_checkable
class ReadsRebuilt(Protocol):
    """A `State` whose tensors can be made anew while they are compared, and need be nowhere at all."""

    def rebuilding(self, name: str, new: npt.NDArray[Any], most: int) -> Rebuilding | None:
        """The pass that compares a tensor with ``new``, unsigned words [n], by at most ``most`` bytes a call.

        None where that is not possible, or where much of the tensor has changed before. Where it has a defect something
        is wrong, and `bytes_of` says what.
        """


@dataclass(frozen=True)
class Difference:
    """How one tensor differs. ``change`` is None where it is gone; its ``base`` is None where it is new or reshaped.

    ``old_xxh3`` and ``new_xxh3`` are of the bytes that were compared, computed in the same pass.
    """

    name: str
    change: Change | None
    old_xxh3: bytes | None
    new_xxh3: bytes | None

    @property
    def empty(self) -> bool:
        """Is the tensor the same in both states?"""
        return self.change is not None and self.change.base is not None and self.change.count == 0


class Comparison:
    """Where two states of a tensor differ, gathered run by run: position, and the word before and after.

    ``most``: words of the longest run, ``width``: their dtype. Compared as bits: no float, no tolerance.
    """

    def __init__(self, most: int, width: np.dtype[Any]) -> None:
        size = most if kernels.LIB is not None else 0
        self._buffers = np.empty(size, np.int64), np.empty(size, width), np.empty(size, width)
        self._found = [_nothing(width)]
        self.count = 0

    def add(self, old: npt.NDArray[Any], new: npt.NDArray[Any], first: int) -> None:
        """Compare two contiguous runs, unsigned words [n] each, that begin at word ``first`` of the tensor.

        Runs are added in rising order.
        """
        if kernels.LIB is None:
            at = np.flatnonzero(old != new)
            found = ChangedElements(at + first, old[at], new[at])
        else:
            count = kernels.compare(old, new, first, self._buffers)
            found = ChangedElements(*(array[:count].copy() for array in self._buffers))
        if len(found.positions):
            self._found.append(found)
            self.count += len(found.positions)

    def changes(self) -> ChangedElements:
        """All that was found, by rising position."""
        return ChangedElements(*(np.concatenate(arrays) for arrays in zip(*self._found, strict=True)))


def changes(old: npt.NDArray[Any] | None, new: npt.NDArray[Any]) -> ChangedElements:
    """Where two contiguous arrays of unsigned words, [n] each, differ: int64 positions, old and new words, [changes].

    ``old`` None means zeros: the words of an exclusive or that are set.
    """
    most = min(CHUNK // new.itemsize, len(new))
    compared, zeros = Comparison(most, new.dtype), np.zeros(0 if old is not None else most, new.dtype)
    for first in range(0, len(new), max(1, most)):
        piece = new[first : first + most]
        compared.add(zeros[: len(piece)] if old is None else old[first : first + most], piece, first)
    return compared.changes()


def count_changes(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> int:
    """How many words of two contiguous arrays, unsigned [n] each, differ: several times faster than to gather them."""
    step = CHUNK // new.itemsize
    return sum(int(np.count_nonzero(old[i : i + step] != new[i : i + step])) for i in range(0, len(new), step))


def difference(name: str, old: State, new: State, *, most: int | None = None) -> Difference:
    """Compare one tensor of two states as unsigned words: no float, no tolerance.

    Of a tensor of more bytes than ``most`` that changed densely, what changed is only counted: to hold it takes several
    times the tensor (`Change.withheld`; `gathered` gathers it). With ``most`` the caller encodes the change, and
    releases the tensor then.
    """
    a, b = old.tensors.get(name), new.tensors.get(name)
    if b is None:
        return Difference(name, None, xxh3(old.bytes_of(name)), None)
    dtype = DTYPES[b.dtype]
    width = uint(dtype.width)
    shape = storage_shape(dtype, b.shape)
    target = new.bytes_of(name)
    if a is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        old_xxh3 = xxh3(old.bytes_of(name)) if a else None
        change = Change(dtype, shape, *_nothing(width), None, target.view(width))
        return Difference(name, change, old_xxh3, xxh3(target))
    if most is not None and len(target) >= REBUILT and kernels.LIB is not None:
        change = Change(dtype, shape, *_nothing(width), target.view(width), target.view(width), spill.room, after=True)
        if (made := _rebuilt(name, old, new, change)) is not None:
            return made
        if len(target) > spill.spill_above() and (made := _by_pieces(name, old, new, change)) is not None:
            return made
    base = old.bytes_of(name)

    keep = most is not None and len(target) <= KEPT

    def release(start: int, end: int) -> None:
        if not keep:
            old.release(name, start, end)
        new.release(name, start, end)

    one_pass = _one_pass if kernels.LIB is not None and len(target) > kernels.HASHED else _in_chunks
    found, withheld, hashes = one_pass(base.view(width), target.view(width), most, release)
    change = Change(dtype, shape, *found, base.view(width), target.view(width), spill.room, withheld)
    return Difference(name, change, *hashes)


# What was found, or how many changes there are where they are withheld; and the xxh3-128 of both states.
_Found = tuple[ChangedElements, int | None, tuple[bytes, bytes]]
_Release = Callable[[int, int], None]  # from byte, to byte


def _one_pass(old: npt.NDArray[Any], new: npt.NDArray[Any], most: int | None, release: _Release) -> _Found:
    """Of a tensor of more bytes than ``most`` of which much has changed, what is left is counted before it is gathered.
    Needs the compiled kernels."""
    found, count, withheld = _ChangesSoFar(len(new), old.dtype), 0, None
    counting = most is not None and new.nbytes > most
    compared = kernels.ComparedPass(old, new, PIECE)
    while compared.at < new.nbytes:
        count = found.go_on(compared) if withheld is None else compared.advance(None)
        if counting and count > min(len(new) // (2 * DENSE), GATHERED):
            counting, left = False, slice(compared.at // new.itemsize, None)
            if (total := count + count_changes(old[left], new[left])) * DENSE > len(new):
                withheld, found = total, _ChangesSoFar(0, old.dtype)
        if compared.at % BEHIND == 0:
            release(compared.at - BEHIND, compared.at)
    return found.all(), withheld, compared.xxh3()


class _ChangesSoFar:
    """What was found of ``words`` words, each of dtype ``width``: arrays as long as it will be, if it goes on so.
    ``likely``: how many there may be, before anything is known.
    """

    def __init__(self, words: int, width: np.dtype[Any], likely: int = 0) -> None:
        self._words, self._width, self._count = words, width, 0
        self._arrays = self._room(likely)

    def _room(self, size: int) -> ChangedElements:
        width = self._width
        return ChangedElements(reuse.empty(size, np.int64), reuse.empty(size, width), reuse.empty(size, width))

    def go_on(self, compared: kernels.ComparedPass | Rebuilding) -> int:
        """What comes next. -> how many were found so far."""
        count, most = self._count, self._count + compared.words
        if most > len(self._arrays.positions):
            done = max(1, compared.at // self._width.itemsize)
            likely = min(count * self._words // done * 9 // 8 + 1024, GATHERED)
            room = self._room(min(self._words, max(most, count + count // 2, likely + compared.words)))
            for to, array in zip(room, self._arrays, strict=True):
                to[:count] = array[:count]
            self._arrays = room
        self._count += compared.advance(self._arrays, count)
        return self._count

    def all(self) -> ChangedElements:
        """Of all words, by rising position."""
        return ChangedElements(*(array[: self._count] for array in self._arrays))


def _nothing(width: np.dtype[Any]) -> ChangedElements:
    return ChangedElements(np.zeros(0, np.int64), np.zeros(0, width), np.zeros(0, width))


def _rebuilt(name: str, old: State, new: State, change: Change) -> Difference | None:
    """`difference` of a tensor whose old elements are nowhere; ``change`` and None as of `_by_pieces`."""
    target = change.target
    if not isinstance(old, ReadsRebuilt) or (compared := old.rebuilding(name, target, BEHIND)) is None:
        return None
    likely = compared.words + min(len(target) // OFTEN, AT_FIRST)
    found, done = _ChangesSoFar(len(target), target.dtype, likely), 0
    while compared.at < target.nbytes:
        count = found.go_on(compared)
        if compared.defect or count > min(len(target) // (2 * DENSE), GATHERED):
            return None
        if compared.at - done >= BEHIND:
            old.release(name, done, compared.at)
            if target.nbytes > KEPT:
                new.release(name, done, compared.at)
            done = compared.at
    return Difference(name, replace(change, **found.all()._asdict()), *compared.xxh3())


def _by_pieces(name: str, old: State, new: State, change: Change) -> Difference | None:
    """`difference` of a tensor whose old elements are not held: ``change`` is of no element, all of which are the new
    ones. None where the old state cannot do so, or much has changed.
    """
    if not isinstance(old, ReadsPieces) or (pieces := old.pieces(name)) is None:
        return None
    target, first, released = change.target, 0, 0
    step = CHUNK // target.itemsize
    compared, hashes = Comparison(step, target.dtype), (xxhash.xxh3_128(), xxhash.xxh3_128())
    for piece in pieces:
        words = piece.view(target.dtype)
        for at in range(0, len(words), step):
            x = words[at : at + step]
            y = target[first : first + len(x)]
            compared.add(x, y, first)
            for hashed, run in zip(hashes, (x, y), strict=True):
                hashed.update(run.data)
            first += len(x)
        if compared.count > min(len(target) // (2 * DENSE), GATHERED):
            return None
        if target.nbytes > KEPT:
            new.release(name, released, first * target.itemsize)
            released = first * target.itemsize
    if first < len(target):
        return None
    found = replace(change, **compared.changes()._asdict())
    return Difference(name, found, hashes[0].digest(), hashes[1].digest())


def _in_chunks(old: npt.NDArray[Any], new: npt.NDArray[Any], most: int | None, release: _Release) -> _Found:
    """The same, chunk by chunk."""
    count = count_changes(old, new) if most is not None and new.nbytes > most else 0
    dense = count * DENSE > len(new)
    step = min(CHUNK // new.itemsize, len(new))
    compared = Comparison(step, new.dtype)
    old_hash, new_hash = xxhash.xxh3_128(), xxhash.xxh3_128()
    for first in range(0, len(new), max(1, step)):
        x, y = old[first : first + step], new[first : first + step]
        if not dense:
            compared.add(x, y, first)
        old_hash.update(x.data)
        new_hash.update(y.data)
        if (end := (first + step) * new.itemsize) % BEHIND == 0:
            release(end - BEHIND, end)
    return compared.changes(), count if dense else None, (old_hash.digest(), new_hash.digest())


def gathered(change: Change) -> Change:
    """The same, with what was withheld."""
    if change.withheld is None:
        return change
    return replace(change, withheld=None, **changes(change.base, change.target)._asdict())


def differences(old: State, new: State, threads: int) -> Iterator[Difference]:
    """All tensors of both states, in the order of their names' bytes."""
    names = sorted({*old.tensors, *new.tensors}, key=str.encode)
    return ordered_map(lambda name: difference(name, old, new), names, threads)
