"""The encodings. Pure: arrays in, buffers out; what they store where is FORMAT's, the literal dict below names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltackpt.codecs import plain, planes
from deltackpt.codecs.packed import codec as packed
from deltackpt.codecs.packed import tile_index
from deltackpt.codecs.packed.exponent_lists import FAR_ONLY, SCAN_LIMIT, choose_near
from deltackpt.codecs.packed.steps import count_exponents
from deltackpt.codecs.table import Entry, detail_size
from deltackpt.codecs.tiles import choose_grid
from deltackpt.codecs.types import Change, DecodeBuffer, Decoded, Elements, Encoded, Source
from deltackpt.errors import UsageError
from deltackpt.format.dtypes import DType

__all__ = [
    "CHOICES",
    "DENSE",
    "SCAN_LIMIT",
    "SMALL",
    "Change",
    "Decoded",
    "Encoded",
    "Entry",
    "check",
    "decode",
    "decode_into",
    "encode",
    "wants_base",
]

CHOICES = ("auto", "packed", "index", "nan", "planes", "full")
DENSE = 4  # more than a quarter changed: `planes` may win
SMALL = 1 << 16  # elements below which `full` may be smaller than anything else


def wants_base(dtype: DType, elements: int, changes: int, limit: int = SCAN_LIMIT) -> bool:
    """May `auto` look at elements that did not change? ``limit``: elements below which it always may."""
    return changes > 0 and (elements < max(limit, SMALL) or dtype.width == 8 or changes * DENSE > elements)


def encode(
    change: Change,
    shape: tuple[int, ...],
    encoding: str = "auto",
    *,
    scan_limit: int = SCAN_LIMIT,
    boxed: bool = False,
) -> tuple[str, Encoded]:
    """One tensor's change in the encoding asked for, or in the smallest one that can carry it exactly.

    ``shape`` is the box's, as a checkpoint's header has it. Tensors with fewer elements than ``scan_limit`` may be
    coded such that a reader has to scan their old values. ``boxed``: a box of a tensor, which has no plain tensors.
    -> (name of the encoding used, its bytes). Raises UsageError ``encoding-choice`` for a name not in CHOICES.
    """
    if encoding not in CHOICES:
        raise UsageError("encoding-choice", where="encoding", have=repr(encoding), need=", ".join(CHOICES))
    if change.base is None:
        return "full", plain.encode_full(change, shape)
    wanted: dict[str, Callable[[], Encoded | None]] = {
        "packed": lambda: _packed(change, scan_limit),
        "planes": lambda: planes.encode(change),
        "index": lambda: plain.encode_index(change, shape),
        "nan": lambda: plain.encode_nan(change, shape),
    }
    if (
        encoding in wanted
        and not (boxed and encoding in ("index", "nan"))
        and (chosen := wanted[encoding]()) is not None
    ):
        return encoding, chosen
    if encoding == "full":
        return "full", plain.encode_full(change, shape)
    dense = len(change.positions) * DENSE > change.elements
    sparse = "packed" if change.dtype.width in packed.WIDTHS and len(change.positions) else "index"
    if boxed and sparse == "index":
        sparse = "planes"
    names = [sparse, *(["planes"] if dense else [])]
    tried = {name: got for name in names if (got := wanted[name]()) is not None}
    sizes = {name: got.size + detail_size(name, got.detail) for name, got in tried.items()}
    best = min(sizes, key=lambda name: sizes[name])
    if sizes[best] >= change.target.nbytes:
        return "full", plain.encode_full(change, shape)
    return best, tried[best]


def _packed(change: Change, scan_limit: int) -> Encoded | None:
    if change.dtype.width not in packed.WIDTHS or change.base is None or len(change.positions) == 0:
        return None
    near = FAR_ONLY
    if change.elements < scan_limit and change.dtype.sign_magnitude:
        near = choose_near(count_exponents(change.base, change.dtype), len(change.positions))
    grid = choose_grid(change.shape, len(change.positions))
    detail, tiles = packed.encode(change.positions, change.old, change.new, change.base, change.dtype, grid, near)
    return Encoded(detail, tiles)


def decode(
    entry: Entry, base: Elements | None, source: Source, where: str, room: DecodeBuffer | None = None
) -> Decoded:
    """The new elements of an entry's tensor or box, given its flat old elements; in ``room`` if that can take them.

    Raises FormatError.
    """
    if entry.encoding == "packed":
        assert base is not None
        return Decoded(*packed.decode(entry.detail, source.payload(), base, entry.dtype, where, room))
    return _DECODERS[entry.encoding](entry.detail, entry.dtype, base, source, where)


def decode_into(entry: Entry, elements: Elements, source: Source, where: str) -> None:
    """Write the new elements of an entry to the flat ``elements`` of its tensor or box, which hold the old ones.

    Several times faster than `decode` and `Decoded.write_to`. Raises FormatError; then ``elements`` are worth nothing:
    for who has a copy to throw away.
    """
    if entry.encoding == "packed":
        packed.decode_into(entry.detail, source.payload(), elements, entry.dtype, where)
    else:
        decode(entry, elements, source, where).write_to(elements)


def check(entry: Entry, source: Source, where: str) -> None:
    """Checksums alone, for whoever has no old elements. Raises FormatError."""
    if entry.encoding == "packed":
        tile_index.check(entry.detail, source.payload(), where)
    elif entry.encoding == "planes":
        planes.check(entry.detail, source.payload(), where)
    elif entry.encoding != "removed":
        plain.check(entry.detail, [source.plain(suffix) for suffix in plain.suffixes(entry.encoding)], where)


def _decode_removed(detail: Any, dtype: DType, base: Elements | None, source: Source, where: str) -> Decoded:
    return Decoded(None, np.zeros(0, np.uint8))


_DECODERS: dict[str, Callable[[Any, DType, Elements | None, Source, str], Decoded]] = {
    "removed": _decode_removed,
    "full": plain.decode_full,
    "nan": plain.decode_nan,
    "index": plain.decode_index,
    "planes": planes.decode,
}
