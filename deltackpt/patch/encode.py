"""A change as an entry of a part: encoded, or `full` where its plain tensors would take the name of another tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from deltackpt.codecs import Change, Encoded, Entry, ManyChanges, encode, encode_many
from deltackpt.codecs.base import Shape
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_block import EntryBlock
from deltackpt.codecs.registry import FULL
from deltackpt.format.dtypes import DType
from deltackpt.format.tensor_names import MAX_NAME

Encode = Callable[[str], tuple[str, Encoded]]  # the encoding asked for -> the one used, and its bytes


def encode_entry(
    name: str,
    change: Change,
    shape: Shape,
    names: AbstractSet[str],
    encoding: str = "auto",
) -> tuple[Entry, Encoded]:
    """A whole tensor's change. ``shape`` as its header has it; ``names``: of all tensors of the old and new state.

    ``encoding`` as `deltackpt.codecs.encode` has it. Raises UsageError ``encoding-choice``.
    """

    def coded(choice: str) -> tuple[str, Encoded]:
        return encode(change, shape, choice)

    return fitting_entry(name, change.dtype, shape, shape, (0,) * len(shape), names, coded, encoding)


Encoding = EntryBlock | tuple[Entry, Encoded]


def encode_entries(
    names: Sequence[str], changes: ManyChanges, which: Ints, taken: AbstractSet[str], encoding: str = "auto"
) -> Iterator[tuple[Ints, Encoding]]:
    """`encode_entry` of the tensors ``which`` (int64, rising) of many, whole ones that differ, by the ``names`` of all.

    ``taken``: names of all tensors of the old and new state. -> by rising number the tensors, int64, of a block of
    entries, or of one.
    """
    done = encode_many(changes, which, encoding)
    good = np.array([i for i in done.held.tolist() if i not in done.others], np.int64) if done.others else done.held
    found: list[tuple[Ints, Encoding]] = []
    if done.rows is not None and len(good):
        rows = np.searchsorted(done.held, good)
        at = [names[i] for i in done.held.tolist()]
        # A block has neighbors alone: of the rows, and, as names rise, of all that changed.
        order = np.searchsorted(which, good)
        cuts = np.flatnonzero((np.diff(rows) != 1) | (np.diff(order) != 1)) + 1
        for some in np.split(rows, cuts):
            block = EntryBlock(at, changes.forms, changes.form[done.held], done.rows, int(some[0]), int(some[-1]) + 1)
            found.append((done.held[some], block))
    for i, (used, encoded) in done.others.items():
        shape, dtype = changes.shape(i), changes.dtype(i)
        entry = Entry(names[i], used, dtype, shape, shape, (0,) * len(shape), encoded.detail)
        if encoded.plain and collides(entry, taken):
            entry, encoded = encode_entry(names[i], changes.change(i), shape, taken, FULL.name)
        found.append((np.array([i]), (entry, encoded)))
    found.sort(key=lambda item: int(item[0][0]))
    return iter(found)


def fitting_entry(
    name: str,
    dtype: DType,
    shape: Shape,
    whole: Shape,
    offset: Shape,
    names: AbstractSet[str],
    coded: Encode,
    encoding: str,
) -> tuple[Entry, Encoded]:
    """The entry of the box of ``shape`` at ``offset`` in ``whole``: what ``coded`` makes of it, if its names are free.

    ``coded`` is asked for ``encoding``, and for `full` where that collides.
    """
    for choice in (encoding, FULL.name):
        used, encoded = coded(choice)
        entry = Entry(name, used, dtype, shape, whole, offset, encoded.detail)
        if not collides(entry, names):
            break
    return entry, encoded


def collides(entry: Entry, names: AbstractSet[str]) -> bool:
    """Would a plain tensor of an entry take the name of another tensor of the checkpoint, or too long a one?

    [F-PLAIN-11]
    """
    made = [entry.name + spec.suffix for spec in entry.plain_tensors if spec.suffix]
    return any(name in names or len(name.encode()) > MAX_NAME for name in made)
