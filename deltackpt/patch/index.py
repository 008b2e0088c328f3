"""What a part holds, and where: header and table, checked against each other before any other byte is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from deltackpt.codecs import CODECS, VERSIONS, Entry
from deltackpt.codecs.base import PlainSpec
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_table import EntryTable
from deltackpt.codecs.table import read_columns
from deltackpt.errors import FormatError
from deltackpt.format.manifest import MAX_STEP
from deltackpt.format.safetensors_header import Header, Tensor

VERSION = str(CODECS.version)  # of the parts that are written
TABLE = "deltackpt:table"
PAYLOAD = "deltackpt:payload"
MAX_TABLE = 256 << 20  # bytes: a table is read whole, and all else of a part is not


@dataclass(frozen=True)
class Origin:
    """What a part says of itself in ``__metadata__``: the repository, the step it leads to, and what it applies to."""

    repository: str
    step: int
    parent: str  # id of the parent's manifest
    base: str  # state digest it applies to

    def to_metadata(self, version: int = CODECS.version) -> dict[str, str]:
        """``__metadata__`` of the header of a part of ``version``."""
        return {
            "deltackpt": str(version),
            "repository": self.repository,
            "step": str(self.step),
            "parent": self.parent,
            "base": self.base,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: str) -> Origin:
        """Inverse of `to_metadata`. Raises FormatError ``version-unknown``, ``part-metadata``."""
        version_of(metadata, where)
        found = [metadata.get(key, "") for key in _FORMS]
        # [F-META-1]
        if not all(map(re.fullmatch, _FORMS.values(), found)) or int(found[1]) > MAX_STEP:
            need = "repository, step, parent and base"
            raise FormatError("part-metadata", where=where, have="missing or broken fields", need=need)
        return cls(found[0], int(found[1]), found[2], found[3])


_HEX = "[0-9a-f]"
_FORMS = {
    "repository": f"{_HEX}{{32}}",
    "step": "0|[1-9][0-9]{0,15}",
    "parent": f"{_HEX}{{64}}",
    "base": f"{_HEX}{{64}}",
}


def version_of(metadata: Mapping[str, str], where: str) -> int:
    """The version that a part states. Raises FormatError ``version-unknown``."""
    stated = metadata.get("deltackpt")
    if stated is None or stated not in {str(version) for version in VERSIONS}:  # [F-META-2]
        have = "no deltackpt metadata" if stated is None else f"version {stated[:20]!r}"
        hint = "Is this file a part of a patch? A newer deltackpt reads newer versions."
        need = f"part version {' or '.join(map(str, VERSIONS))}"
        raise FormatError("version-unknown", where=where, have=have, need=need, hint=hint)
    return int(stated)


Span = tuple[int, int]  # first byte and end in the file


def table_of(header: Header, where: str) -> Span:
    """Where the table is. Raises FormatError for a file that is no part, or one of another version."""
    Origin.from_metadata(header.metadata, where)
    tensors = {t.name: t for t in header.tensors}
    for name in (TABLE, PAYLOAD):
        t = tensors.get(name)
        if t is None or t.dtype != "U8" or len(t.shape) != 1:  # [F-PART-7]
            need = "a U8 tensor of one dimension"
            raise FormatError("part-tensors", where=where, have=f"no tensor {name!r}", need=need)
    start, end = _span(header, tensors[TABLE])
    if end - start > MAX_TABLE:  # [F-TAB-15]
        need = f"at most {MAX_TABLE:,} bytes"
        raise FormatError("object-too-large", where=where, have=f"a table of {end - start:,} bytes", need=need)
    return start, end


def _span(header: Header, tensor: Tensor) -> Span:
    return header.data_start + tensor.start, header.data_start + tensor.end


class PartIndex:
    """The entries of a part, and the place in the file of every byte that belongs to one.

    It was checked when it was made: every tensor of the file belongs to the table, every entry has its bytes, and
    nothing is left over. ``table`` are the entries as columns, None where they were read one by one or some are boxed.
    Raises FormatError.
    """

    def __init__(self, header: Header, table: bytes | memoryview, where: str) -> None:
        self.where = where
        self.header = header
        self.origin = Origin.from_metadata(header.metadata, where)
        self.version = version_of(header.metadata, where)
        self._tensors = {t.name: t for t in header.tensors}
        self.entries = read_columns(table, f"{where}, table", self.version)
        self._offset: dict[tuple[str, tuple[int, ...]], int] = {}
        self.table = self.entries if isinstance(self.entries, EntryTable) and self._fits(self.entries) else None
        if self.table is None:
            self._check()  # and say what is wrong, if anything is

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of the entry of each tensor, where ``table`` is there: then none is boxed."""
        assert self.table is not None
        return dict(zip(self.table.names, range(len(self.table)), strict=True))

    @cached_property
    def starts(self) -> Ints:
        """Where in the file the payload of each entry of ``table`` begins: int64 [entries]."""
        assert self.table is not None
        starts: Ints = self._span(PAYLOAD)[0] + self.table.payloads.cumsum() - self.table.payloads
        return starts

    def number_of(self, entry: Entry) -> int:
        """Which of ``entries`` it is."""
        return self.numbers[entry.name] if self.table is not None else self._places[entry.name, entry.offset]

    @cached_property
    def _places(self) -> dict[tuple[str, tuple[int, ...]], int]:
        return {(entry.name, entry.offset): i for i, entry in enumerate(self.entries)}

    def payload(self, entry: Entry) -> Span:
        """The entry's part of the payload."""
        if self.table is not None:
            number = self.numbers[entry.name]
            start = int(self.starts[number])
            return start, start + int(self.table.payloads[number])
        start = self._span(PAYLOAD)[0] + self._offset[entry.name, entry.offset]
        return start, start + entry.payload

    def plain(self, entry: Entry, suffix: str) -> Span:
        """A plain tensor of an entry."""
        return self._span(entry.name + suffix)

    def _span(self, name: str) -> Span:
        return _span(self.header, self._tensors[name])

    def _fits(self, table: EntryTable) -> bool:
        """What `_check` does, without an `Entry` for each entry. -> is nothing boxed, and nothing wrong?"""
        payload = self._tensors[PAYLOAD].end - self._tensors[PAYLOAD].start
        odd = table.odd.values()
        plain = [(entry.name + spec.suffix, spec) for entry in odd for spec in entry.plain_tensors]
        if len(dict(plain)) != len(plain) or len(self._tensors) != len(plain) + 2 or any(e.boxed for e in odd):
            return False
        found = [(self._tensors.get(name), spec) for name, spec in plain]
        if any(t is None or (t.dtype, t.shape) != (spec.dtype, spec.shape) for t, spec in found):
            return False
        # In floats first: integers could come back to where they should be, modulo 2^64.
        sizes = [float(table.payloads.sum(dtype=float)), *(e.codec.payload_bound(e.detail) for e in odd)]
        return max(sizes) <= 2 * payload and int(table.payloads.sum()) == payload

    def _check(self) -> None:
        at, expected = 0, {TABLE, PAYLOAD}
        payload = self._tensors[PAYLOAD].end - self._tensors[PAYLOAD].start
        for e in self.entries:
            self._offset[e.name, e.offset] = at
            at += e.payload
            # [F-PART-10], in floats too: the sum of an entry's lengths could come back to where it should be, modulo
            # 2^64.
            if e.codec.payload_bound(e.detail) > 2 * payload:
                raise self._refuse("payload-length", f"{payload:,} bytes of payload", "all tiles of the table")
            for spec in e.plain_tensors:
                self._check_plain(e.name + spec.suffix, spec, expected)
                expected.add(e.name + spec.suffix)
        if set(self._tensors) != expected:  # [F-PART-8]
            extra = sorted(set(self._tensors) - expected)[0]
            raise self._refuse("part-tensors", f"a tensor {extra[:80]!r} that the table does not name", "none")
        if at != payload:  # [F-PART-10]
            raise self._refuse("payload-length", f"{payload:,} bytes of payload", f"{at:,} bytes")

    def _check_plain(self, name: str, spec: PlainSpec, used: set[str]) -> None:
        """[F-PLAIN-1], [F-PLAIN-5], [F-PLAIN-8], [F-PLAIN-9]"""
        t = self._tensors.get(name)
        if t is None or t.dtype != spec.dtype:
            raise self._refuse("part-tensors", f"no fitting tensor {name[:80]!r}", "what the table says")
        if name in used:
            raise self._refuse("part-tensors", f"{name[:80]!r} used twice", "one entry a tensor")
        if t.shape != spec.shape:
            raise self._refuse("part-tensors", f"shape {t.shape}", f"{spec.shape} as in the table")

    def _refuse(self, code: str, have: str, need: str) -> FormatError:
        return FormatError(code, where=self.where, have=have, need=need)
