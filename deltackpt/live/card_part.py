"""A part whose bytes came to a card: its header and table are on the host, all else is where it arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from deltackpt.codecs import Entry
from deltackpt.errors import FormatError
from deltackpt.format.manifest import File
from deltackpt.gpu.device_bytes import CardBytes
from deltackpt.patch.index import PAYLOAD, Span, table_of
from deltackpt.patch.part import PartReader
from deltackpt.patch.remote_part import read_head
from deltackpt.patch.tensor import Part


class CardSource(Protocol):
    """A `PartSource` that brings bytes to a card as well: `carriers.pulled.PulledParts`."""

    @property
    def url(self) -> str:
        """Where the parts are, for errors."""

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        """The bytes of every span in host memory."""

    def begin_tensors(self, file: File, spans: Sequence[Span]) -> Callable[[], list[torch.Tensor]]:
        """The same on the card, uint8 [bytes]: they are on their way, and what is returned waits for them."""


class CardPart(PartReader):
    """What an entry has no kernel for is decoded on the host, from a copy of its bytes alone. The part's sha256 is not
    looked at: checksums of tiles, and the sums of whole tensors, prove what is taken from it."""

    def __init__(self, source: CardSource, file: File) -> None:
        """Reads header and table, and begins to read the rest, which is waited for when it is asked for. Raises
        FormatError, and what ``source`` raises, as do all methods that look at bytes."""
        where = f"{source.url}/{file.name}"

        def read(span: Span) -> bytes:
            return bytes(source.ranges(file, [span])[0]) if span[0] < span[1] else b""

        header, table = read_head(read, file.size, where)
        Part.__init__(self, header, table, where)
        start, end = table_of(header, where)
        self._spans = [(header.data_start, start), (end, file.size)]
        self._held = source.begin_tensors(file, self._spans)

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
