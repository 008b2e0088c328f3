"""`packed` read by the compiled kernels through several patches, and compared with a new state on the way: the state in
between is held nowhere.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.packed.native_rows import ChainJobs
from deltackpt.codecs.types import Elements
from deltackpt.kernels import address, addresses
from deltackpt.util import reuse

BLOCK = 1024  # bytes that xxh3 takes at a time
# Bytes that are compared at a time, in the first cache; or a line of the tensor, or some that make blocks.
STEP = 4 << 10
CHUNK, ROW = 64, 16  # elements that are looked at together, a byte each, and the counts of their classes
LARGEST = 32 << 20  # bytes of a row of tiles
_FIELDS = ("jobs", "patches", "payload", "from", "new", "tiles", "looks", "bytes", "at", "step", "row")
_PASS = np.dtype(
    [
        *((name, np.int64) for name in (*_FIELDS, "positions", "before", "after", "room", "found")),
        ("acc", np.uint64, 16),
        ("xxh3", np.uint8, (2, 16)),
    ]
)


class RebuiltPass:
    """One pass over a tensor: its old state, rebuilt row of tiles by row of tiles from the elements of an anchor, is
    compared with the new one as `kernels.ComparedPass` compares two that are there.

    ``at``: bytes that are done. ``defect``: is a patch damaged, or is there no memory? What was found is worth nothing
    then.
    """

    def __init__(self, jobs: ChainJobs, start: int, new: Elements, sizes: tuple[int, int, int, int]) -> None:
        """``start``: the address of the anchor's elements, which stay there; ``new``: words [n]. ``sizes`` in bytes: of
        a row of tiles, of what is seen of it, of what is compared at a time, and of one call at most."""
        tall, looks, step, self._most = sizes
        jobs = ChainJobs(np.ascontiguousarray(jobs.jobs))
        self._words, self._row = new, np.zeros(1, _PASS)
        payload, room = np.zeros(jobs.jobs.size, np.int64), reuse.empty(tall + looks, np.uint8)
        self._held = jobs.jobs, payload, room, room[tall:]
        given = (*addresses(*self._held), start, address(new), new.nbytes, step, jobs.jobs.size, -1)
        names = ("jobs", "payload", "tiles", "looks", "from", "new", "bytes", "step", "patches", "row")
        for name, value in zip(names, given, strict=True):
            self._row[name] = value
        self.defect = False

    @classmethod
    def of(cls, jobs: ChainJobs, start: int, new: Elements, most: int) -> RebuiltPass | None:
        """The pass over one tensor; None where its patches cut it in different ways, or no row of its tiles ends where
        a block of the hash does. ``most``: bytes of one call."""
        if kernels.LIB is None or (cut := jobs.cut()) is None or new.nbytes <= kernels.HASHED:
            return None
        line, tall = cut.width * cut.word, -(-cut.height // cut.rows)
        if cut.height * line != new.nbytes or line < 64 or tall * line > LARGEST:
            return None
        lines = BLOCK // gcd(line, BLOCK)  # that are whole blocks
        if tall % lines and cut.rows > 1:
            return None
        step = min(max(STEP // line // lines, 1) * lines, -(-tall // lines) * lines) * line
        looks = (tall * -(-cut.width // cut.columns) // CHUNK + 1) * (CHUNK + ROW)
        return cls(jobs, start, new, (tall * line, looks, step, most)) if step <= most else None

    @property
    def at(self) -> int:
        """Bytes that are done."""
        return int(self._row["at"][0])

    @property
    def words(self) -> int:
        """For so many words there has to be room for the next call to go on."""
        return min(int(self._row["step"][0]), self._words.nbytes - self.at) // self._words.itemsize

    def advance(self, into: tuple[npt.NDArray[Any], ...], first: int = 0) -> int:
        """Go on, as far as there is room. What differs is put ``into`` int64 positions, old and new words, [n] each,
        from their element ``first`` on. -> how many."""
        assert kernels.LIB is not None
        self._row["room"] = room = min(map(len, into)) - first
        assert room >= self.words
        for array, name in zip(into, ("positions", "before", "after"), strict=True):
            self._row[name] = address(array) + first * array.itemsize
        until = min(self.at + self._most, self._words.nbytes)
        self.defect = bool(kernels.LIB.dk_rebuild(address(self._row), until))
        return 0 if self.defect else int(self._row["found"][0])

    def xxh3(self) -> tuple[bytes, bytes]:
        """Of the old and the new words, 16 bytes each, once all is done."""
        assert self.at == self._words.nbytes
        old, new = self._row["xxh3"][0]
        return old.tobytes(), new.tobytes()
