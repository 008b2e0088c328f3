"""What a part holds, and where: header and table, checked against each other before any other byte is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from deltackpt.codecs import Entry
from deltackpt.codecs.table import read_table
from deltackpt.errors import FormatError
from deltackpt.format.safetensors_header import MAX_NAME, METADATA, RESERVED, Header, Tensor

VERSION = "1"
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


Span = tuple[int, int]  # first byte and end in the file


def table_of(header: Header, where: str) -> Span:
    """Where the table is. Raises FormatError for a file that is no part, or one of another version."""
    Origin.from_metadata(header.metadata, where)
    tensors = {t.name: t for t in header.tensors}
    for name in (TABLE, PAYLOAD):
        t = tensors.get(name)
        if t is None or t.dtype != "U8" or len(t.shape) != 1:
            need = "a U8 tensor of one dimension"
            raise FormatError("part-tensors", where=where, have=f"no tensor {name!r}", need=need)
    start, end = _span(header, tensors[TABLE])
    if end - start > MAX_TABLE:
        need = f"at most {MAX_TABLE:,} bytes"
        raise FormatError("object-too-large", where=where, have=f"a table of {end - start:,} bytes", need=need)
    return start, end


def _span(header: Header, tensor: Tensor) -> Span:
    return header.data_start + tensor.start, header.data_start + tensor.end


class PartIndex:
    """The entries of a part, and the place in the file of every byte that belongs to one.

    Whoever holds it may trust it: every tensor of the file belongs to the table, every entry has its bytes, and nothing
    is left over. Raises FormatError.
    """

    def __init__(self, header: Header, table: bytes | memoryview, where: str) -> None:
        self.where = where
        self.header = header
        self.origin = Origin.from_metadata(header.metadata, where)
        self._tensors = {t.name: t for t in header.tensors}
        self.entries = read_table(table, f"{where}, table")
        self._offset: dict[tuple[str, tuple[int, ...]], int] = {}
        self._check()

    def payload(self, entry: Entry) -> Span:
        """The entry's part of the payload."""
        start = self._span(PAYLOAD)[0] + self._offset[entry.name, entry.offset]
        return start, start + entry.payload

    def plain(self, entry: Entry, suffix: str) -> Span:
        """A plain tensor of an entry. A box has none: the bytes of a `full` one are in the payload."""
        return self.payload(entry) if entry.boxed else self._span(entry.name + suffix)

    def _span(self, name: str) -> Span:
        return _span(self.header, self._tensors[name])

    def _check(self) -> None:
        at, expected = 0, {TABLE, PAYLOAD}
        payload = self._tensors[PAYLOAD].end - self._tensors[PAYLOAD].start
        for e in self.entries:
            if e.name.startswith(RESERVED) or e.name == METADATA:
                have, need = (
                    f"a tensor named {e.name[:80]!r}",
                    f"no {METADATA}, and nothing that starts with {RESERVED}",
                )
                raise self._refuse("name-refused", have, need)
            self._offset[e.name, e.offset] = at
            at += e.payload
            # In floats too: the sum of a tile's lengths could come back to where it should be, modulo 2^64.
            if e.encoding == "packed" and np.sum(e.detail.lengths, dtype=np.float64) > 2 * payload:
                raise self._refuse("payload-length", f"{payload:,} bytes of payload", "all tiles of the table")
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
        if at != payload:
            raise self._refuse("payload-length", f"{payload:,} bytes of payload", f"{at:,} bytes")

    def _refuse(self, code: str, have: str, need: str) -> FormatError:
        return FormatError(code, where=self.where, have=have, need=need)


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
