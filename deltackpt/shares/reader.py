"""A rank's share of a part, fetched from any source by ranges: header and table, then what its boxes take.

Ranges near each other are one request. What comes is proven by the checksums of tiles and chunks as it is decoded, and
by the sums of all ranks (`deltackpt.shares.proof`) before anything is written; the part's sha256 is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deltackpt.codecs import Decoded
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.manifest import File
from deltackpt.patch.index import PartIndex, Span
from deltackpt.patch.remote_part import read_head
from deltackpt.patch.source import PartSource, to_host
from deltackpt.shares.bounds import Held
from deltackpt.shares.needs import EntryShare, coalesce, share_of, split
from deltackpt.shares.tensors import HeldTensors
from deltackpt.util.grouped import grouped
from deltackpt.util.parallel import ordered_map

GAP = 64 << 10  # bytes between two ranges that are read rather than asked around,
VAIN = 1 / 16  # as long as all that is read so is no larger a part of what is wanted: a gap may be other ranks' tiles
WINDOW = 16 << 20  # bytes of a share that are fetched together, unless one entry takes more
CALLS = 4  # to the source for each request that it serves at a time, so that slow ones do not hold up the others


class ShareReader:
    """What one rank needs of one part; making it reads header and table."""

    def __init__(self, source: PartSource, file: File, held: Held, *, gap: int = GAP, vain: float = VAIN) -> None:
        """Ranges with at most ``gap`` bytes between them are one request, the nearest first, while what is read in
        between is at most ``vain`` of what is wanted. Raises FormatError, ChainError ``base-shape``, and what
        `PartSource.ranges` raises.
        """
        self._source, self._file, self._gap, self._vain = source, file, gap, vain
        where = f"{source.url}/{file.name}"
        self.index = PartIndex(*read_head(self._one, file.size, where), where)
        self.share = share_of(self.index, held)

    def __iter__(self) -> Iterator[tuple[EntryShare, memoryview]]:
        """Every entry's share with its bytes, in the order of the table; memory is that of a window of them."""
        return self.some(self.share.entries)

    def some(self, entries: Sequence[EntryShare]) -> Iterator[tuple[EntryShare, memoryview]]:
        """The same of some of them, in their order."""
        for group in _windows(entries):
            vain = int(self._vain * sum(one.size for one in group))
            spans = coalesce([span for one in group for span in one.spans], self._gap, vain)
            yield from split(group, list(zip(spans, self._fetch(spans), strict=True)))

    def changes(
        self, tensors: HeldTensors, entries: Sequence[EntryShare] | None = None
    ) -> Iterator[tuple[str, Decoded]]:  # fmt: skip
        """The rank's new elements, entry by entry, of all, or of some: flat positions in the whole tensor, int64 [n],
        and words [n].

        Raises FormatError for bytes that do not decode, ChainError ``base-shape`` where a tile needs old elements that
        the rank does not hold: `EntryShare.shared` says which.
        """
        for one, data in self if entries is None else self.some(entries):
            if not one.complete:
                raise incomplete(one, self.index.where)
            yield one.entry.name, one.decode(data, tensors.base(one), self.index.where)

    def _fetch(self, spans: Sequence[Span]) -> list[memoryview]:
        step = max(1, len(spans) // (CALLS * self._source.parallel))
        calls = [spans[at : at + step] for at in range(0, len(spans), step)]
        found = ordered_map(self._ranges, calls, self._source.parallel)
        return [data for some in found for data in some]

    def _ranges(self, spans: Sequence[Span]) -> list[memoryview]:
        found = [to_host(data) for data in self._source.ranges(self._file, spans)]
        if [len(data) for data in found] != [end - start for start, end in spans]:
            where = f"{self._source.url}/{self._file.name}"
            raise FormatError(
                "object-short", where=where, have="other ranges", need=f"{len(spans)} that were asked for"
            )
        return found

    def _one(self, span: Span) -> bytes:
        return bytes(self._ranges([span])[0]) if span[0] < span[1] else b""


def incomplete(one: EntryShare, where: str) -> ChainError:
    """ChainError ``base-shape`` for a share that cannot be decoded from what the rank holds."""
    have = f"{len(one.shared):,} of {len(one.pieces):,} tiles of which other ranks hold elements"
    need = "the old elements of whole tiles"
    hint = "Decode it with all old elements of the tensor, or publish with tiles that fit the ranks."
    return ChainError("base-shape", where=f"{where}, {one.entry.name[:80]!r}", have=have, need=need, hint=hint)


def _windows(entries: Sequence[EntryShare]) -> Iterator[list[EntryShare]]:
    return grouped(entries, lambda one: one.size, WINDOW)
