"""One part of a patch: a safetensors file with a table, a payload, and the plain tensors of the simple encodings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from deltackpt.bits import DTYPES
from deltackpt.codecs import Decoded, Encoded, Entry, check, decode
from deltackpt.codecs.change import Buffer, Elements
from deltackpt.codecs.table import read_table, write_table
from deltackpt.errors import FormatError
from deltackpt.format.safetensors_header import (
    MAX_NAME,
    RESERVED,
    Header,
    Tensor,
    build_header,
    head_size,
    parse_header,
)

VERSION = "1"
TABLE = "deltackpt:table"
PAYLOAD = "deltackpt:payload"


@dataclass(frozen=True)
class Origin:
    """What a part says of itself in ``__metadata__``: the repository, the step it leads to, and what it applies to."""

    repository: str
    step: int
    parent: str  # id of the parent's manifest
    base: str  # state digest it applies to

    def to_metadata(self) -> dict[str, str]:
        return {
            "deltackpt": VERSION,
            "repository": self.repository,
            "step": str(self.step),
            "parent": self.parent,
            "base": self.base,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: str) -> Origin:
        if metadata.get("deltackpt") != VERSION:
            have = f"version {metadata['deltackpt'][:20]!r}" if "deltackpt" in metadata else "no deltackpt metadata"
            hint = "Is this file a part of a patch? A newer deltackpt reads newer versions."
            raise FormatError("version-unknown", where=where, have=have, need=f"part version {VERSION}", hint=hint)
        step = metadata.get("step", "")
        values = [metadata.get(key, "") for key in ("repository", "parent", "base")]
        if not (step.isascii() and step.isdigit() and len(step) <= 18 and str(int(step)) == step) or not all(values):
            need = "repository, step, parent and base"
            raise FormatError("part-metadata", where=where, have="missing or broken fields", need=need)
        return cls(values[0], int(step), values[1], values[2])


class PartWriter:
    """Collects the encoded tensors of one part; :meth:`chunks` is the file. Holds encoded bytes, never a tensor."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._items: list[tuple[Entry, Encoded]] = []
        self.size = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, entry: Entry, encoded: Encoded | None = None) -> None:
        self._items.append((entry, encoded or Encoded(None)))
        self.size += self._items[-1][1].size

    def chunks(self) -> Iterator[Buffer]:
        """The bytes of the file: header, plain tensors by falling width (so that all are aligned), table, payload."""
        items = sorted(self._items, key=lambda item: (item[0].name.encode(), item[0].offset))
        table = write_table([entry for entry, _ in items])
        plain = [(entry.name + p.suffix, p) for entry, encoded in items for p in encoded.plain if not entry.boxed]
        plain.sort(key=lambda item: (-DTYPES[item[1].dtype].width, item[0].encode()))
        payload = sum(entry.payload for entry, _ in items)
        rows = [(name, p.dtype, p.shape, len(p.data)) for name, p in plain]
        rows += [(TABLE, "U8", (len(table),), len(table)), (PAYLOAD, "U8", (payload,), payload)]
        ends = list(accumulate(size for *_, size in rows))
        tensors = [Tensor(n, d, s, end - size, end) for (n, d, s, size), end in zip(rows, ends, strict=True)]
        yield build_header(tensors, self._origin.to_metadata())
        for _, p in plain:
            yield p.data
        yield table
        for entry, encoded in items:
            yield from encoded.payload
            if entry.boxed:
                yield from (p.data for p in encoded.plain)


class PartReader:
    """A part in memory or mapped: its header and table are checked when it is made, tensors when they are decoded."""

    def __init__(self, data: memoryview, where: str) -> None:
        self.where = where
        self._data = data
        self.header: Header = parse_header(
            bytes(data[: head_size(bytes(data[:8]), len(data), where)]), len(data), where
        )
        self.origin = Origin.from_metadata(self.header.metadata, where)
        self._tensors = {t.name: t for t in self.header.tensors}
        for name in (TABLE, PAYLOAD):
            t = self._tensors.get(name)
            if t is None or t.dtype != "U8" or len(t.shape) != 1:
                raise FormatError(
                    "part-tensors", where=where, have=f"no tensor {name!r}", need="a U8 tensor of one dimension"
                )
        self.entries = read_table(self._bytes(TABLE), f"{where}, table")
        self._offset: dict[tuple[str, tuple[int, ...]], int] = {}
        self._check()

    def _check(self) -> None:
        """Every tensor of the file belongs to the table, every entry has its bytes, and nothing is left over."""
        at, expected = 0, {TABLE, PAYLOAD}
        for e in self.entries:
            if e.name.startswith(RESERVED):
                raise self._refuse(
                    "name-refused", f"a tensor named {e.name[:80]!r}", f"names that do not start with {RESERVED}"
                )
            self._offset[e.name, e.offset] = at
            at += e.payload
            for suffix, dtypes, size in _plain_tensors(e):
                t = self._tensors.get(e.name + suffix)
                if t is None or t.dtype not in dtypes or (size is not None and t.end - t.start != size):
                    raise self._refuse(
                        "part-tensors", f"no fitting tensor {(e.name + suffix)[:80]!r}", "what the table says"
                    )
                if e.boxed or e.name + suffix in expected:
                    raise self._refuse("part-tensors", f"{(e.name + suffix)[:80]!r} used twice", "one entry a tensor")
                if t.shape != (e.shape if not suffix else (e.changes,)):
                    raise self._refuse("part-tensors", f"shape {t.shape}", f"{e.shape} as in the table")
                expected.add(e.name + suffix)
        if set(self._tensors) != expected:
            extra = sorted(set(self._tensors) - expected)[0]
            raise self._refuse("part-tensors", f"a tensor {extra[:80]!r} that the table does not name", "none")
        if at != len(self._bytes(PAYLOAD)):
            raise self._refuse("payload-length", f"{len(self._bytes(PAYLOAD)):,} bytes of payload", f"{at:,} bytes")

    def _refuse(self, code: str, have: str, need: str) -> FormatError:
        return FormatError(code, where=self.where, have=have, need=need)

    def _bytes(self, name: str) -> memoryview:
        t = self._tensors[name]
        return self._data[self.header.data_start + t.start : self.header.data_start + t.end]

    def source(self, entry: Entry) -> _Source:
        return _Source(self, entry)

    def check(self, entry: Entry) -> None:
        """Raise FormatError unless the bytes of an entry have the checksums that the table gives."""
        check(entry, self.source(entry), f"{self.where}, {entry.name!r}")

    def decode(self, entry: Entry, base: Elements | None) -> Decoded:
        """New elements of an entry. ``base``: flat old elements of its tensor or box; None where the entry is
        `full`.
        """
        return decode(entry, base, self.source(entry), f"{self.where}, {entry.name!r}")


@dataclass(frozen=True)
class _Source:
    part: PartReader
    entry: Entry

    def payload(self) -> memoryview:
        start = self.part._offset[self.entry.name, self.entry.offset]
        return self.part._bytes(PAYLOAD)[start : start + self.entry.payload]

    def plain(self, suffix: str) -> memoryview:
        """A box has no plain tensors: the bytes of a `full` one are in the payload."""
        if self.entry.boxed:
            return self.payload()
        return self.part._bytes(self.entry.name + suffix)


def _plain_tensors(entry: Entry) -> list[tuple[str, tuple[str, ...], int | None]]:
    """(suffix, dtypes, bytes or None) of the plain tensors of an entry."""
    if entry.encoding == "full" and entry.boxed:
        return []
    if entry.encoding in ("full", "nan"):
        return [("", (entry.dtype.name,), None)]
    if entry.encoding == "index":
        values = entry.changes * entry.dtype.width
        wide = "U32" if entry.elements <= 1 << 32 else "U64"
        plain = entry.dtype.name if entry.dtype.bits == 8 * entry.dtype.width else "U8"
        return [(".indices", (wide,), entry.changes * (4 if wide == "U32" else 8)), (".values", (plain,), values)]
    return []


def collides(entry: Entry, names: set[str]) -> bool:
    """Would the plain tensors of an `index` entry take the name of another tensor of the checkpoint, or too long a
    one?
    """
    new = [entry.name + suffix for suffix, *_ in _plain_tensors(entry)] if entry.encoding == "index" else []
    return any(name in names or len(name.encode()) > MAX_NAME for name in new)
