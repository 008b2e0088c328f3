"""One entry of a part, as `inspection` tells it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deltackpt.checkpoint.diff import State
from deltackpt.codecs import Entry
from deltackpt.codecs.table import write_table
from deltackpt.codecs.types import Elements
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.patch.index import PartIndex
from deltackpt.patch.tensor import EncodedTensor, Part
from deltackpt.report.ulp import share_by_one


@dataclass(frozen=True)
class TensorEntry:
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
    decoded = part.decode(entry, base)
    if decoded.positions is not None:
        return share_by_one(base[decoded.positions], decoded.values, entry.dtype)
    at = np.flatnonzero(decoded.values != base)
    return share_by_one(base[at], decoded.values[at], entry.dtype)
