"""The encodings. Pure: arrays in, buffers out; what they store where is FORMAT's.

`base` holds the Codec protocol, `registry` the list of encodings; an encoding is a module. `select` chooses one for a
change, an `Entry` of the `table` asks its own.
"""

from __future__ import annotations

from deltackpt.codecs.entry import Entry
from deltackpt.codecs.many import ManyChanges
from deltackpt.codecs.registry import CODECS, VERSIONS, Registry
from deltackpt.codecs.select import CHOICES, DENSE, SMALL, alone, choices, encode, encode_many, parse_choice, wants_base
from deltackpt.codecs.types import Change, ChangedElements, DecodeBuffer, Decoded, Elements, Encoded, Source

__all__ = [
    "CHOICES",
    "CODECS",
    "DENSE",
    "SMALL",
    "VERSIONS",
    "Change",
    "ChangedElements",
    "Decoded",
    "Encoded",
    "Entry",
    "ManyChanges",
    "Registry",
    "alone",
    "check",
    "choices",
    "decode",
    "decode_into",
    "encode",
    "encode_many",
    "parse_choice",
    "wants_base",
]


def decode(
    entry: Entry, base: Elements | None, source: Source, where: str, buffer: DecodeBuffer | None = None
) -> Decoded:
    """The new elements of an entry, at flat positions in its tensor or box.

    ``base``: its old elements, flat, as unsigned words of the dtype's width; None is allowed where `Entry.base_use` is
    NOTHING. The result may lie in ``buffer``, if there is one. Raises FormatError.
    """
    return entry.codec.decode(entry, base, source, where, buffer)


def decode_into(entry: Entry, elements: Elements, source: Source, where: str) -> None:
    """Write the new elements of an entry to the flat ``elements`` of its tensor or box, words [n] that hold the old
    ones.

    Several times faster than `decode` and `Decoded.write_to`. Raises FormatError; ``elements`` are then worthless, so
    this is for a caller that has a copy to throw away.
    """
    entry.codec.decode_into(entry, elements, source, where)


def check(entry: Entry, source: Source, where: str) -> None:
    """Checksums alone, for a reader without the old elements. Raises FormatError."""
    entry.codec.check(entry, source, where)
