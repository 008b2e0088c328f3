"""What a reader knows of a `packed` tensor before it touches the payload (FORMAT section "packed")."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed.exponent_lists import Near
from deltackpt.codecs.packed.steps import Scale
from deltackpt.codecs.tiles import Grid
from deltackpt.errors import FormatError


@dataclass(frozen=True)
class TileIndex:
    """Parameters, and a row for every tile."""

    grid: Grid
    near: Near
    scale: Scale
    exception_k: int
    counts: Ints  # (tiles, lists): changes
    unary: Ints  # (tiles,): bytes of the unary section
    lengths: Ints  # (tiles,): bytes of the tile
    checksums: npt.NDArray[np.uint32]  # (tiles,): crc32 of the tile's bytes

    @property
    def changes(self) -> Ints:
        """Changes of every tile."""
        total: Ints = self.counts.sum(axis=1)
        return total


def check(directory: TileIndex, payload: memoryview, where: str) -> list[memoryview]:
    """The bytes of every tile. Raises FormatError ``tile-checksum`` for one that has not the crc32 of the directory."""
    at = starts(directory.lengths).tolist()
    tiles = [payload[a:b] for a, b in pairwise(at)]
    for t, (tile, checksum) in enumerate(zip(tiles, directory.checksums.tolist(), strict=True)):
        if zlib.crc32(tile) != checksum:
            need = "the crc32 of the directory"
            raise FormatError("tile-checksum", where=f"{where}, tile {t}", have="other bytes", need=need)
    return tiles


def check_counts(directory: TileIndex, spans: Ints, where: str) -> None:
    """Raises FormatError ``count-outside`` for a list with more changes than it has elements."""
    if (directory.counts > spans).any():
        have = "more changes than a list has elements"
        raise FormatError("count-outside", where=where, have=have, need="at most all")
