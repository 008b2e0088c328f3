"""One entry of a part, as `inspection` reports it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from deltackpt.checkpoint.diff import State
from deltackpt.codecs import Entry
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_table import EntryTable
from deltackpt.codecs.packed.steps import to_steps
from deltackpt.codecs.table import write_table
from deltackpt.codecs.types import Decoded, Elements
from deltackpt.format.dtypes import DTYPES, DType, uint
from deltackpt.patch.index import PartIndex
from deltackpt.patch.many import RunSteps, TensorRun
from deltackpt.patch.tensor import EncodedTensor, Part
from deltackpt.report.ulp import share_by_one
from deltackpt.restore.scratch import writable_copy

LARGE = 64 << 20  # bytes of a tensor or box, above which its changes are looked at piece by piece
PIECE = 1 << 20  # elements


class TensorEntry(NamedTuple):
    """An entry of a part, or a tensor of an anchor.

    ``shape`` is the box's where ``offset`` says where in the tensor it lies. ``changed`` counts storage elements,
    ``density`` is its share of ``elements``; None in an anchor. ``bytes`` counts payload, plain tensors and the row in
    the table; ``one_ulp`` is the share of changes by one ULP, None where there is no float to compare with.
    """

    name: str
    encoding: str
    dtype: str | None  # None for a removed tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...] | None
    elements: int
    changed: int | None
    density: float | None
    bytes: int
    bits_per_change: float | None
    one_ulp: float | None


def sizes(part: PartIndex) -> list[int]:
    """Bytes that every entry adds to its part; in the table, a name is stored as what differs from the one before."""
    plain = {t.name: t.end - t.start for t in part.header.tensors}
    if (table := part.table) is not None:
        sizes: list[int] = (table.payloads + table.table_bytes).tolist()
        for number, e in table.odd.items():
            sizes[number] += sum(plain[e.name + spec.suffix] for spec in e.plain_tensors)
        return sizes
    found: list[int] = []
    before: list[Entry] = []
    for e in part.entries:
        row = len(write_table([*before, e])) - len(write_table(before))
        found.append(e.payload + row + sum(plain[e.name + spec.suffix] for spec in e.plain_tensors))
        before = [e]
    return found


def describe(entry: Entry, size: int, one_ulp: float | None = None) -> TensorEntry:
    """An entry that takes ``size`` bytes of its part; ``one_ulp`` is the share of its changes by one ULP."""
    removed = entry.removes
    elements, changed = (0, 0) if removed else (entry.elements, entry.changes)
    return TensorEntry(
        name=entry.name,
        encoding=entry.encoding,
        dtype=None if removed else entry.dtype.name,
        shape=entry.shape,
        offset=entry.offset if entry.boxed else None,
        elements=elements,
        changed=changed,
        density=changed / max(1, elements),
        bytes=size,
        bits_per_change=8 * size / changed if changed else None,
        one_ulp=one_ulp,
    )


def describe_rows(table: EntryTable, numbers: Ints, sizes: Ints, shares: Sequence[float | None]) -> list[TensorEntry]:
    """`describe` of entries of a table by number, none of them odd, int64 [n]: with the ``sizes`` of all entries,
    int64, and the shares of these."""
    at, n = table.row_of[numbers], len(numbers)
    elements, changed, taken = table.rows["elements"][at], table.rows["changes"][at], sizes[numbers]
    density = (changed / np.maximum(elements, 1)).tolist()
    bits = (8 * taken / np.maximum(changed, 1)).tolist()
    if not changed.all():
        bits = [ratio if some else None for ratio, some in zip(bits, changed.tolist(), strict=True)]
    names, dtypes, shapes = table.names, *([form[i] for form in table.forms] for i in (0, 1))
    form = table.form[at].tolist()
    columns = (
        [names[i] for i in numbers.tolist()],
        ["packed"] * n,
        [dtypes[i] for i in form],
        [shapes[i] for i in form],
        [None] * n,
        elements.tolist(),
        changed.tolist(),
        density,
        taken.tolist(),
        bits,
        shares,
    )
    return [*map(partial(tuple.__new__, TensorEntry), zip(*columns, strict=True))]


def shares_of_run(run: TensorRun, steps: RunSteps) -> list[float | None]:
    """The share of steps by one ULP of every tensor of a run; None where it does not change, or is no float."""
    shares: list[float | None] = [None] * len(run.tensors)
    for number, decoded in steps.others:
        shares[number] = _share(run, number, decoded)
    known = (steps.ones >= 0) & (steps.changes > 0)
    found = (steps.ones / np.maximum(steps.changes, 1))[known].tolist()
    for number, share in zip(steps.which[known].tolist(), found, strict=True):
        shares[number] = share
    return shares


def _share(run: TensorRun, number: int, decoded: Decoded) -> float | None:
    return _steps_by_one(run.bytes_of(number).view(decoded.values.dtype), decoded, DTYPES[run.tensors[number].dtype])


def one_ulp_of(name: str, found: EncodedTensor, old: State) -> list[float | None]:
    """The share of steps by one ULP in every entry of a tensor, whose old elements are asked for once, if at all."""
    known = old.tensors.get(name)
    if known is None or not DTYPES[known.dtype].sign_magnitude:
        return [None] * len(found.held)
    words = old.bytes_of(name).view(uint(DTYPES[known.dtype].width))
    shares: list[float | None] = []
    for part, entry in found.held:
        same = (entry.dtype.name, entry.whole) == (known.dtype, known.shape)
        shares.append(_one_ulp(part, entry, entry.box_of(words)) if same else None)
    old.release(name)
    return shares


def _one_ulp(part: Part, entry: Entry, base: Elements) -> float | None:
    if base.nbytes > LARGE:
        return _one_ulp_of_large(part, entry, base)
    return _steps_by_one(base, part.decode(entry, base), entry.dtype)


def _one_ulp_of_large(part: Part, entry: Entry, base: Elements) -> float | None:
    """The same of what differs, piece by piece: neither positions nor values of all changes are held at a time."""
    if not entry.dtype.sign_magnitude:
        return None
    new = writable_copy(base.view(np.uint8)).view(base.dtype)
    part.decode_into(entry, new)
    ones = changed = 0
    for first in range(0, len(base), PIECE):
        old, now = base[first : first + PIECE], new[first : first + PIECE]
        at = np.flatnonzero(old != now)
        if len(at):
            _, size = to_steps(old[at], now[at], entry.dtype)
            ones, changed = ones + int(np.count_nonzero(size == 0)), changed + len(at)
    return ones / changed if changed else None


def _steps_by_one(base: Elements, decoded: Decoded, dtype: DType) -> float | None:
    if decoded.positions is not None:
        return share_by_one(base[decoded.positions], decoded.values, dtype)
    at = np.flatnonzero(decoded.values != base)
    return share_by_one(base[at], decoded.values[at], dtype)
