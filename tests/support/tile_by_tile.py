"""The readers of one part: whole from memory, by ranges, and by ranges of a single tile each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from deltackpt.codecs import Decoded, Entry, subset
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.patch.part import PartReader
from deltackpt.patch.remote_part import RemotePart
from deltackpt.store import MemoryStore


class TileByTile(RemotePart):
    """A part of which every read is one of a single tile, the last one first."""

    def decode(self, entry: Entry, base: Any, buffer: DecodeBuffer | None = None) -> Decoded:
        if not entry.has_pieces:
            return super().decode(entry, base)
        tiles = range(len(subset.lengths(entry)))
        found = [self._decode(entry, np.array([t]), base) for t in reversed(tiles)]
        positions = np.concatenate([base[:0].astype(np.int64), *(d.positions for d in found)])
        return Decoded(positions, np.concatenate([base[:0], *(d.values for d in found)]))


def ranged(kind: type[RemotePart], data: bytes) -> RemotePart:
    store = MemoryStore()
    store.put("part", [data])
    return kind.open(store, "part", gap=0)


PARTS: dict[str, Callable[[bytes], Any]] = {
    "streamed": lambda data: PartReader(memoryview(data), "vector"),
    "ranged": lambda data: ranged(RemotePart, data),
    "tile by tile": lambda data: ranged(TileByTile, data),
}
