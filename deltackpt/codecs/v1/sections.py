"""The sections of many `packed` tiles, read side by side (FORMAT section "packed")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.bits import Ints, join, octets, read_fields, read_planes, read_unary, starts
from deltackpt.errors import FormatError


class TileReader:
    """Cuts tiles into sections, checks that these fill each tile exactly, and decodes a section of all tiles at once.

    ``gap_quotients``, ``exceptions`` (per tile) and ``excess`` are there after construction.
    """

    def __init__(
        self,
        tiles: Sequence[memoryview],
        plane_bits: Ints,
        codes: Ints,
        changes: Ints,
        unary: Ints,
        exception_k: int,
        where: str,
    ) -> None:
        self._tiles, self._codes, self._changes = tiles, codes, changes
        self._exception_k, self._where = exception_k, where
        self._plane_bits = plane_bits
        self._signs_at = octets(plane_bits).sum(axis=1)
        unary_at = self._signs_at + octets(changes)
        self._low_at = unary_at + unary
        if (self._low_at > [len(t) for t in tiles]).any():  # [F-PACK-4]
            raise self._error("tile-short", "a tile shorter than its sections", "all of them")
        data = join(t[a:b] for t, a, b in zip(tiles, unary_at.tolist(), self._low_at.tolist(), strict=True))
        values, held, used = read_unary(data, starts(unary))
        self.exceptions = (held - codes) >> 1
        # [F-PACK-6]
        if (self.exceptions < 0).any() or (codes + 2 * self.exceptions != held).any() or (octets(used) != unary).any():
            raise self._error("unary-count", "unary codes that do not add up", "one per gap and two per exception")
        self._fields_at = self._low_at + exception_k * octets(self.exceptions)
        if (self._fields_at > [len(t) for t in tiles]).any():  # [F-PACK-4]
            raise self._error("tile-short", "a tile shorter than its sections", "all of them")
        self._split(values, starts(held)[:-1])

    def _split(self, values: Ints, first: Ints) -> None:
        """Unary values of each tile: those of the gaps, of the exceptions' gaps, of the exceptions' excess."""
        if not self.exceptions.any():
            self.gap_quotients = values
            self._exception_quotients = self.excess = values[:0]
            return
        within = np.arange(int(self.exceptions.sum())) - np.repeat(starts(self.exceptions)[:-1], self.exceptions)
        at = within + np.repeat(first + self._codes, self.exceptions)
        self._exception_quotients = values[at]
        at_excess = at + np.repeat(self.exceptions, self.exceptions)
        self.excess = values[at_excess]
        keep = np.ones(len(values), np.bool_)
        keep[at] = keep[at_excess] = False
        self.gap_quotients = values[keep]

    def _error(self, code: str, have: str, need: str) -> FormatError:
        return FormatError(code, where=self._where, have=have, need=need)

    def _planes(self, counts: Ints, bits: Ints, at: Ints) -> npt.NDArray[Any]:
        """Planes of ``bits`` (tiles, planes), one after the other from byte ``at`` of each tile: ``counts`` values."""
        sizes, full = octets(bits), octets(counts)
        ends = at[:, None] + np.cumsum(sizes, axis=1)
        begins = ends - sizes
        planes = []
        for j in range(bits.shape[1]):
            cuts = zip(self._tiles, begins[:, j].tolist(), ends[:, j].tolist(), strict=True)
            pieces: list[memoryview | bytes] = [tile[a:b] for tile, a, b in cuts]
            self._check_padding(pieces, bits[:, j])
            if (short := full - sizes[:, j]).any():
                pieces = [x for piece, n in zip(pieces, short.tolist(), strict=True) for x in (piece, bytes(n))]
            planes.append(join(pieces))
        return read_planes(planes, counts)

    def _check_padding(self, pieces: Sequence[memoryview | bytes], bits: Ints) -> None:
        for piece, used in zip(pieces, (bits & 7).tolist(), strict=True):
            if used and piece[-1] >> used:  # [F-BIT-2]
                raise self._error("padding", "a set bit in the padding of a section", "zeros")

    def gap_remainders(self) -> npt.NDArray[Any]:
        """Low bits of every gap, [gaps]."""
        return self._planes(self._codes, self._plane_bits, np.zeros(len(self._codes), np.int64))

    def signs(self) -> npt.NDArray[np.bool_]:
        """Is the step of each change downward? bool [changes]."""
        return self._planes(self._changes, self._changes[:, None], self._signs_at).astype(np.bool_)

    def exception_gaps(self) -> Ints:
        """Gaps of the exceptions among the eligible changes of each tile, int64 [exceptions]."""
        bits = np.repeat(self.exceptions[:, None], self._exception_k, axis=1)
        low = self._planes(self.exceptions, bits, self._low_at)
        gaps: Ints = (self._exception_quotients << self._exception_k) | low
        return gaps

    def fields(self, widths: Ints, counts: Ints) -> npt.NDArray[np.uint64]:
        """The raw bits of the changes that have any, uint64 [n], ``counts`` of them per tile; they are the rest of
        every tile.
        """
        bit = starts(widths)
        before = bit[starts(counts)]
        begin = self._fields_at
        used = octets(np.diff(before))
        if (begin + used != [len(t) for t in self._tiles]).any():  # [F-PACK-4]
            raise self._error("tile-length", "a tile of another length than its contents", "an exact fit")
        data = join(t[a:] for t, a in zip(self._tiles, begin.tolist(), strict=True))
        self._check_padding([t[a:] for t, a in zip(self._tiles, begin.tolist(), strict=True)], np.diff(before))
        return read_fields(data, bit[:-1] + np.repeat(starts(used)[:-1] * 8 - before[:-1], counts), widths)
