"""What a rank holds, in host memory: the words of its boxes, and what a step changes in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import Decoded
from deltackpt.codecs.boxes import inside, runs
from deltackpt.codecs.types import Elements
from deltackpt.errors import ChainError, UsageError
from deltackpt.format.dtypes import DType, uint
from deltackpt.format.widening import Widening
from deltackpt.shares.bounds import Bounds, Held, Shape, check, meet, of_run, offset_of, shape_of, size
from deltackpt.shares.needs import EntryShare


class FarWords(Protocol):
    """Words that are no array of numpy: in memory elsewhere, or in another form there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the box."""

    @property
    def size(self) -> int:
        """Its elements."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Unsigned words."""

    def read(self, index: Any, *, exact: bool = True) -> Elements:
        """The words at an index as numpy's arrays take it; those of another form are cut unless ``exact``."""

    def write(self, index: Any, words: Elements) -> None:
        """Put words there."""


@dataclass(frozen=True)
class WideWords:
    """Words of tensor ``name`` in ``memory`` of a wider dtype, unsigned words of that one: read and written as those of
    the tensor, exactly."""

    memory: Elements | FarWords
    widening: Widening
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.memory.shape

    @property
    def size(self) -> int:
        """Elements of the array."""
        return self.memory.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tensor's words."""
        return uint(self.widening.source.width)

    def read(self, index: Any, *, exact: bool = True) -> Elements:
        """The words there; see `Widening.narrow`."""
        return self.widening.narrow(words_at(self.memory, index), self.name, exact=exact)

    def write(self, index: Any, words: Elements) -> None:
        """Put words there. Raises ChainError ``value-inexact``."""
        _put(self.memory, index, self.widening.widen(words, self.name))


Place = Elements | FarWords


@dataclass(frozen=True)
class HeldTensor:
    """The words of boxes of one tensor, each an array of its box's shape. ``shape`` is the tensor's storage shape.

    ``copies``: boxes whose words lie in other memory too, as those of tied weights; they are written, and not read.
    ``kept``: the box of all of it is no weight, but a copy that the rank keeps to decode by.
    """

    dtype: DType
    shape: Shape
    boxes: Mapping[Bounds, Place]
    copies: Sequence[tuple[Bounds, Place]] = ()
    kept: bool = False

    @property
    def places(self) -> list[tuple[Bounds, Place]]:
        """All memory that holds words of the tensor, and which."""
        return [*self.boxes.items(), *self.copies]


class HeldTensors:
    """The boxes that a rank holds, by tensor. Several may hold the same element; a write goes to all of them."""

    def __init__(self, tensors: Mapping[str, HeldTensor]) -> None:
        """Raises UsageError ``usage`` for a box that does not lie in its tensor, or an array of another shape or
        dtype."""
        for name, tensor in tensors.items():
            for box, array in tensor.places:
                check(box, tensor.shape, name[:80])
                if array.shape != shape_of(box) or array.dtype != uint(tensor.dtype.width):
                    have = f"{array.dtype} {list(array.shape)}"
                    need = f"{uint(tensor.dtype.width)} {list(shape_of(box))}"
                    raise UsageError("usage", where=name[:80], have=have, need=need)
        self.tensors = dict(tensors)

    @property
    def held(self) -> Held:
        """The boxes alone: what `share_of`, `cells` and `overlaps` take."""
        return {name: tuple(tensor.boxes) for name, tensor in self.tensors.items()}

    def base(self, share: EntryShare) -> Elements:
        """What `EntryShare.decode` looks at: words [elements of the entry], those that are not held undefined.

        Only pages that are held are touched, whatever the size of the tensor.
        """
        entry = share.entry
        offset, shape = (entry.offset, entry.shape) if entry.boxed else ((0,) * len(entry.storage), entry.storage)
        flat = np.empty(entry.elements, uint(entry.dtype.width))
        box = tuple((o, o + n) for o, n in zip(offset, shape, strict=True))
        for mine, array in self._boxes(entry.name, shape if not entry.boxed else entry.whole):
            if (common := meet(mine, box)) is not None:
                flat.reshape(shape)[_within(common, box)] = words_at(array, _within(common, mine), exact=False)
        return flat

    def old(self, name: str, positions: npt.NDArray[np.int64], *, known: bool | None = None) -> Elements:
        """The words at flat ``positions`` of a tensor, int64 [n], all of which are held: words [n].

        ``known``: they are those of a step: raise ChainError ``base-differs`` where two places hold other words of one
        element, or wider memory a word that is none of the tensor's dtype, which else is cut. None: in the latter case
        alone.
        """
        tensor = self.tensors[name]
        found = np.zeros(len(positions), uint(tensor.dtype.width))
        read = np.zeros(len(positions), np.bool_)
        for box, array in tensor.places if known else tensor.boxes.items():
            mine, index = _locate(positions, tensor.shape, box)
            words = words_at(array, index, exact=known is not False)
            if known and (found[mine] != words)[read[mine]].any():
                have, need = f"other words in two places, in {list(box)}"[:120], "the same in all places"
                hint = "Other code wrote to the weights."
                raise ChainError("base-differs", where=name[:80], have=have, need=need, hint=hint)
            found[mine] = words
            read |= mine
        return found

    def check(self, name: str, words: Elements) -> None:
        """Raise ChainError ``value-inexact`` unless all memory of a tensor can hold some words of it exactly."""
        for widening in {array.widening for _, array in self.tensors[name].places if isinstance(array, WideWords)}:
            widening.widen(words, name)

    def fill(self, name: str, words: Elements) -> None:
        """Put all words of a tensor, of its shape, where they are held. Raises ChainError ``value-inexact``."""
        for box, array in self.tensors[name].places:
            _put(array, ..., words[tuple(slice(*axis) for axis in box)])

    def put(self, name: str, box: Bounds, words: Any) -> None:
        """Put the words of a box of a tensor, of its shape, wherever some of it is held: an array of numpy, or what all
        of its `FarWords` take. Raises as `fill`."""
        for mine, array in self.tensors[name].places:
            if (common := meet(mine, box)) is not None:
                _put(array, _within(common, mine), words[_within(common, box)])

    def write(self, name: str, new: Decoded) -> None:
        """Put new words where they are held: flat positions in the whole tensor, int64 [n], and words [n]."""
        tensor = self.tensors[name]
        assert new.positions is not None
        for box, array in tensor.places:
            mine, index = _locate(new.positions, tensor.shape, box)
            _put(array, index, new.values[mine])

    def words_of(self, name: str, box: Bounds) -> Elements:
        """The words of a box that is held, of its shape: gathered where it lies in several."""
        tensor = self.tensors[name]
        found = np.zeros(shape_of(box), uint(tensor.dtype.width))
        for mine, array in tensor.boxes.items():
            if (common := meet(mine, box)) is not None:
                found[_within(common, box)] = words_at(array, _within(common, mine))
        return found

    def _boxes(self, name: str, shape: Shape) -> Iterator[tuple[Bounds, Place]]:
        tensor = self.tensors[name]
        if tensor.shape == shape:
            yield from tensor.boxes.items()
            return
        for box, array in tensor.boxes.items():  # a packed dtype in a part of version 1: the same bytes, in rows
            array = words_at(array, ...)
            at, length = runs(tensor.shape, offset_of(box), shape_of(box))
            flat = array.reshape(-1)
            for number, start in enumerate(at.tolist()):
                yield from _as_boxes(flat[number * length : (number + 1) * length], start, shape)


def words_at(array: Place, index: Any, *, exact: bool = True) -> Elements:
    """The unsigned words of a place at an index, as numpy takes it: a view of an array of numpy where indexing gives
    one. ``exact`` as of `FarWords.read`."""
    if not isinstance(array, np.ndarray):
        return array.read(index, exact=exact)
    found: Elements = _at_least_1d(array, index)[index]
    return found


def _put(array: Place, index: Any, words: Elements) -> None:
    if isinstance(array, np.ndarray):
        _at_least_1d(array, index)[index] = words
    else:
        array.write(index, words)


def _at_least_1d(array: Elements, index: Any) -> Elements:
    """Of rank 0, where `_locate` has found places: an array of one element."""
    return np.atleast_1d(array) if isinstance(index, tuple) and len(index) > array.ndim else array


def _as_boxes(flat: Elements, start: int, shape: Sequence[int]) -> Iterator[tuple[Bounds, Elements]]:
    at = 0
    for box in of_run(shape, start, start + len(flat)):
        yield box, flat[at : at + size(box)].reshape(shape_of(box))
        at += size(box)


def _within(box: Bounds, outer: Bounds) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, outer, strict=True))


def _locate(
    positions: npt.NDArray[np.int64], shape: Shape, box: Bounds
) -> tuple[npt.NDArray[np.bool_], tuple[npt.NDArray[np.intp], ...]]:
    """Which positions lie in a box, and where in its array."""
    mine = inside(positions, shape, offset_of(box), shape_of(box))
    index = np.unravel_index(positions[mine], shape or (1,))  # of rank 0: in an array of one element
    return mine, tuple(i - o for i, o in zip(index, offset_of(box) or (0,), strict=True))
