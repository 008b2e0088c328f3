"""A part whose bytes came to a card: its header and table are on the host, all else is where it arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from deltackpt.codecs import Entry
from deltackpt.errors import FormatError
from deltackpt.format.manifest import File
from deltackpt.format.safetensors_header import parse_header
from deltackpt.gpu.device_bytes import CardBytes
from deltackpt.patch.index import PAYLOAD, Span, table_of
from deltackpt.patch.part import NOWHERE, Near, PartReader
from deltackpt.patch.remote_part import read_head
from deltackpt.patch.tensor import Part


class CardSource(Protocol):
    """A `PartSource` that brings bytes to a card as well: `carriers.pulled.PulledParts`."""

    @property
    def url(self) -> str:
        """Where the parts are, for errors."""

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span in host memory."""

    def begin_part(
        self, file: File, near: Sequence[Span], spans: Sequence[Span]
    ) -> tuple[list[memoryview], Callable[[], list[torch.Tensor]]]:  # fmt: skip
        """Bytes of the ``near`` spans in host memory; and those of ``spans`` on the card, uint8 [bytes]: they are on
        their way, and what is returned waits for them."""


@dataclass(frozen=True)
class ArrivingPart:
    """``head`` and ``table`` are there, and where these are was only said: `CardPart` looks at it. The other bytes,
    ``spans`` of the part, are on their way to the card, and ``held`` waits for them."""

    where: str
    size: int
    head: bytes
    table: bytes
    spans: Sequence[Span]
    held: Callable[[], list[torch.Tensor]]

    @classmethod
    def begin(cls, source: CardSource, file: File, near: Near) -> ArrivingPart:
        """By one request, unless it is not known what is ``near``. Raises FormatError, and what ``source`` raises."""
        where = f"{source.url}/{file.name}"
        if near == NOWHERE:

            def read(span: Span) -> bytes:
                return bytes(source.ranges(file, [span])[0]) if span[0] < span[1] else b""

            header, table = read_head(read, file.size, where)
            spans = [(header.data_start, table_of(header, where)[0]), (table_of(header, where)[1], file.size)]
            return cls(where, file.size, header.head, table, spans, source.begin_part(file, [], spans)[1])
        head, start, end = near
        spans = [(head, start), (end, file.size)]
        both, held = source.begin_part(file, [(0, head), (start, end)], spans)
        return cls(where, file.size, bytes(both[0]), bytes(both[1]), spans, held)


class CardPart(PartReader):
    """What an entry has no kernel for is decoded on the host, from a copy of its bytes alone. The part's sha256 is not
    looked at: checksums of tiles, and the sums of whole tensors, prove what is taken from it."""

    def __init__(self, found: ArrivingPart) -> None:
        """Looks at header and table. Raises FormatError, and what ``found.held`` raises, as do all methods that look at
        bytes."""
        header = parse_header(found.head, found.size, found.where)
        start, end = table_of(header, found.where)
        if found.spans != [(header.data_start, start), (end, found.size)]:
            have, need = "a header, or a table, in another place than was said", f"a table at {start:,}"
            raise FormatError("part-tensors", where=found.where, have=have, need=need)
        Part.__init__(self, header, found.table, found.where)
        self._spans, self._held = found.spans, found.held

    def payload_on_card(self) -> torch.Tensor:
        """The payloads of all entries, uint8; `payload_of` says where in it an entry's is."""
        return self.on_card(self._span(PAYLOAD))

    def on_card(self, span: Span) -> torch.Tensor:
        """Bytes of the part, uint8: a view."""
        for (start, end), data in zip(self._spans, self._held(), strict=True):
            if start <= span[0] and span[1] <= end:
                return data[span[0] - start : span[1] - start]
        raise FormatError("part-tensors", where=self.where, have="a tensor across the table", need="one beside it")

    def plain_on_card(self, entry: Entry, suffix: str) -> torch.Tensor:
        """The bytes of a plain tensor of an entry, uint8."""
        return self.on_card(self.plain(entry, suffix))

    def _at(self, span: Span) -> memoryview:
        return CardBytes(self.on_card(span)).to_host()
