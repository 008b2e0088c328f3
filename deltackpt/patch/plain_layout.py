"""Parts of nothing but plain changes (`index`) of whole tensors: head and table of one after the other of one layout.

From step to step of a training the tensors are the same, and only the numbers of their changes differ. What these do
not change is made once; a head and a table are then put together, and read, without an `Entry` for each tensor. Both
are, byte for byte, what `PartWriter` writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from deltackpt.codecs import Entry
from deltackpt.codecs.index import IndexCodec
from deltackpt.codecs.plain import Checked
from deltackpt.codecs.table import table_heads
from deltackpt.format.dtypes import DTYPES, DType
from deltackpt.format.tensor_names import METADATA
from deltackpt.format.varint import write
from deltackpt.patch.index import PAYLOAD, TABLE, Origin

Ints = npt.NDArray[np.int64]
Form = tuple[str, DType, tuple[int, ...]]  # name, dtype, and shape in elements
CHECKSUM = 4  # bytes


@dataclass(frozen=True)
class PlainCounts:
    """Of each tensor of a layout: its ``changes``, int64 [tensors], and the crc32 of its positions and values, uint32
    [tensors]."""

    changes: Ints
    checksums: npt.NDArray[np.uint32]

    def details(self) -> list[Checked]:
        """As entries have them."""
        return [Checked(n, crc) for n, crc in zip(self.changes.tolist(), self.checksums.tolist(), strict=True)]


class PlainLayout:
    """Of tensors by rising names, each with changes, whose plain tensors' names are free.

    ``tensor`` and ``values`` are of the plain tensors in the order in which they lie in a part, int64 and bool: which
    tensor each is of, and whether it has the values of it, or the positions. ``widths``, int64, are those of their
    elements in bytes.
    """

    def __init__(self, forms: Sequence[Form]) -> None:
        self.forms = list(forms)
        none = [Checked(0, 0)] * len(self.forms)
        entries = list(PlainEntries(self.forms, lambda: none))
        self.elements = np.array([entry.elements for entry in entries], np.int64)
        plain = [(i, k, spec) for i, entry in enumerate(entries) for k, spec in enumerate(entry.plain_tensors)]
        names = [self.forms[i][0] + spec.suffix for i, _, spec in plain]
        widths = [DTYPES[spec.dtype].width for *_, spec in plain]
        order = sorted(range(len(plain)), key=lambda n: (-widths[n], names[n].encode()))
        self.tensor = np.array([plain[n][0] for n in order], np.int64)
        self.values = np.array([plain[n][1] for n in order], np.bool_)
        self.widths = np.array([widths[n] for n in order], np.int64)
        self._rows = [_quoted(names[n]) + f':{{"dtype":"{plain[n][2].dtype}","shape":[' for n in order]
        self._heads = table_heads(entries)

    def sizes(self, changes: Ints) -> Ints:
        """Bytes of each plain tensor, in their order, int64."""
        return changes[self.tensor] * self.widths

    def table_size(self, changes: Ints) -> int:
        """Bytes of the part's table for so many ``changes``, int64 [tensors], whatever the checksums."""
        digits = sum(int((changes >= 1 << 7 * i).sum()) for i in range(1, 9)) + len(changes)
        return sum(map(len, self._heads)) + digits + CHECKSUM * len(changes)

    def table(self, counts: PlainCounts) -> bytes:
        """The part's table."""
        checksums = counts.checksums.astype("<u4").tobytes()
        pieces = list[bytes]()
        for i, (head, changes) in enumerate(zip(self._heads, counts.changes.tolist(), strict=True)):
            pieces += head, write((changes,)), checksums[CHECKSUM * i : CHECKSUM * (i + 1)]
        return b"".join(pieces)

    def head(self, origin: Origin, changes: Ints) -> bytes:
        """The part's first bytes, up to its plain tensors; behind these is the table, and no payload."""
        sizes, table = self.sizes(changes), self.table_size(changes)
        ends = np.cumsum(sizes)
        shapes, starts = changes[self.tensor].tolist(), (ends - sizes).tolist()
        rows = [
            f'{row}{count}],"data_offsets":[{start},{end}]}}'
            for row, count, start, end in zip(self._rows, shapes, starts, ends.tolist(), strict=True)
        ]
        at = int(ends[-1]) if len(ends) else 0
        for name, start, end in ((TABLE, at, at + table), (PAYLOAD, at + table, at + table)):
            rows.append(f'{_quoted(name)}:{{"dtype":"U8","shape":[{end - start}],"data_offsets":[{start},{end}]}}')
        metadata = json.dumps(dict(sorted(origin.to_metadata().items())), ensure_ascii=False, separators=(",", ":"))
        text = f'{{"{METADATA}":{metadata},{",".join(rows)}}}'.encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def read(self, head: bytes, table: bytes, origin: Origin) -> PlainCounts | None:
        """Of a part of a step, whose ``origin`` is known, what `head` and `table` were given; None unless it is these
        bytes that they give, of tensors that each have changes, and no more than elements."""
        at, changes, checksums = 0, list[int](), list[bytes]()
        for expected in self._heads:
            if not table.startswith(expected, at):
                return None
            at += len(expected)
            number, shift = 0, 0
            while at < len(table) and shift < 63:
                byte, at = table[at], at + 1
                number |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            changes.append(number)
            checksums.append(table[at : at + CHECKSUM])
            at += CHECKSUM
        if at != len(table) or not changes:
            return None
        found = np.array(changes, np.int64)
        if (found < 1).any() or (found > self.elements).any():
            return None
        counts = PlainCounts(found, np.frombuffer(b"".join(checksums), "<u4"))
        same = self.table(counts) == table and self.head(origin, found) == head
        return counts if same else None


class PlainEntries(Sequence[Entry]):
    """Entries of ``forms``, with what ``details`` gives: made when one is asked for."""

    def __init__(self, forms: Sequence[Form], details: Callable[[], Sequence[Checked]]) -> None:
        self._forms, self._details = forms, details

    @overload
    def __getitem__(self, number: int) -> Entry: ...

    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...

    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        (name, dtype, shape), detail = self._forms[number], self._details()[number]
        return Entry(name, IndexCodec.name, dtype, shape, shape, (0,) * len(shape), detail)

    def __len__(self) -> int:
        return len(self._forms)

    def __iter__(self) -> Iterator[Entry]:
        return map(self.__getitem__, range(len(self)))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
