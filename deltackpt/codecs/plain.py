"""What the encodings `full`, `nan` and `index` share: any safetensors reader can use their tensors.

FORMAT section "Plain encodings". Their detail is a count and one checksum over all bytes of the entry.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from deltackpt.codecs.base import Codec, CodecEntry, Shape
from deltackpt.codecs.types import Source
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType
from deltackpt.format.varint import VarintReader, write


@dataclass(frozen=True)
class Checked:
    """Table detail of a plain encoding: how many storage elements change, and the crc32 of its bytes in order."""

    changes: int
    checksum: int


class PlainCodec(Codec[Checked]):
    """An encoding without a payload of its own form: its bytes are plain tensors."""

    def write_detail(self, detail: Checked) -> bytes:
        """Count and checksum."""
        return write([detail.changes]) + detail.checksum.to_bytes(4, "little")

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> Checked:
        """Count and checksum."""
        return Checked(reader.number(elements), int.from_bytes(reader.raw(4), "little"))

    def data(self, entry: CodecEntry[Checked], source: Source) -> Sequence[memoryview]:
        """The bytes of an entry, in the order of its checksum."""
        return [source.plain(spec.suffix) for spec in self.plain_tensors(entry)]

    def checked(self, entry: CodecEntry[Checked], source: Source, where: str) -> Sequence[memoryview]:
        """The same, compared with the checksum. Raises FormatError ``tensor-checksum``."""
        return check(entry.detail, self.data(entry, source), where)

    def check(self, entry: CodecEntry[Checked], source: Source, where: str) -> None:
        """Raises FormatError ``tensor-checksum``."""
        self.checked(entry, source, where)


def crc32(data: Sequence[memoryview]) -> int:
    """Of several runs of bytes, as if they were one."""
    checksum = 0
    for piece in data:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def check(detail: Checked, data: Sequence[memoryview], where: str) -> Sequence[memoryview]:
    """Raise FormatError ``tensor-checksum`` unless the bytes have the crc32 of the table."""
    if crc32(data) != detail.checksum:  # [F-PLAIN-10]
        raise FormatError("tensor-checksum", where=where, have="other bytes", need="the crc32 of the table")
    return data


def count_differs(have: str, need: str, where: str) -> FormatError:
    """The bytes hold another number of changes than the table says."""
    return FormatError("count-differs", where=where, have=have, need=need)
