"""The packs of a repository: many manifests and edges by few requests (STORE section "Packs").

A pack spares requests and decides nothing. Who reads one knows from a listing which records are there, and takes those
alone, each by its sha256; whatever a pack lacks is read under its own name.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from threading import Lock

from deltackpt.errors import DeltackptError
from deltackpt.format.pack import FOLDER, MAX_PACK, PackName, lines, packs_of
from deltackpt.repository.objects import Objects

FEW = 8  # records up to which each is asked for by itself
KEPT = 32 << 20  # bytes of packs that are kept in memory
READERS = 8

Lines = Mapping[str, bytes]  # records by sha256, in hex


class Packs:
    """Reads packs, and keeps the last ones in memory: a name has its bytes' sha256. Threads may share it."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._read: OrderedDict[PackName, Lines] = OrderedDict()
        self._lock = Lock()

    @property
    def useful(self) -> bool:
        """Is the store one where each object takes a request?"""
        return not self._objects.store.capabilities.local

    def names(self) -> list[PackName]:
        """The packs that there are now, none where they cannot be listed: one request."""
        with suppress(DeltackptError):  # [S-PACK-3]: the next one who needs the store gets its error
            return packs_of(info.name for info in self._objects.store.list(FOLDER))
        return []

    def known(self, sha256: str) -> bytes | None:
        """A record of a pack that is in memory."""
        with self._lock:
            return next((found[sha256] for found in self._read.values() if sha256 in found), None)

    def records(self, names: Sequence[PackName], steps: Iterable[int]) -> dict[str, bytes]:
        """What as few of these packs as possible hold of the ``steps``, one number for each record that is wanted, and
        of others; by sha256. Empty where nothing can be read, or each record may as well be read by itself."""
        from deltackpt.util.parallel import ordered_map

        found: dict[str, bytes] = {}
        for some in ordered_map(self._lines, cover(names, steps), READERS):
            found.update(some)
        return found

    def _lines(self, pack: PackName) -> Lines:
        with self._lock:
            if (known := self._read.get(pack)) is not None:
                self._read.move_to_end(pack)
                return known
        found: Lines = {}
        with suppress(DeltackptError):  # [S-PACK-3]
            found = lines(self._objects.store.get(pack.name, MAX_PACK))
            with self._lock:
                self._read[pack] = found
                while len(self._read) > 1 and sum(sum(map(len, one.values())) for one in self._read.values()) > KEPT:
                    self._read.popitem(last=False)
        return found


def cover(names: Sequence[PackName], steps: Iterable[int]) -> list[PackName]:
    """The packs to read for records of these steps, one number a record: of those that span many steps first, each that
    spans two records or more which none before it does."""
    left = sorted(steps)
    chosen: list[PackName] = []
    for pack in sorted(names, key=lambda pack: (-pack.records, pack.first, pack.name)):
        if len(left) <= FEW and not chosen:
            break
        begin, end = bisect_left(left, pack.first), bisect_right(left, pack.last)
        if end - begin >= 2:
            chosen.append(pack)
            del left[begin:end]
    return chosen


def exact(pack: PackName, there: Sequence[int]) -> bool:
    """Has a pack as many records as there are of its steps? ``there`` is sorted, one number a record."""
    return pack.records == _count(pack, there)


def worth_keeping(names: Iterable[PackName], steps: Iterable[int]) -> set[PackName]:
    """The packs that spare a reader of these ``steps``, one number a record, requests.

    Each has two records or more that are there and in none before it, and half of its records at least are there. Exact
    ones come first, then large ones.
    """
    there = sorted(steps)
    left = list(there)
    kept = set()
    for pack in sorted(names, key=lambda pack: (not exact(pack, there), -_count(pack, there), pack.name)):
        begin, end = bisect_left(left, pack.first), bisect_right(left, pack.last)
        if end - begin >= 2 and 2 * _count(pack, there) >= pack.records:
            kept.add(pack)
            del left[begin:end]
    return kept


def _count(pack: PackName, there: Sequence[int]) -> int:
    return bisect_right(there, pack.last) - bisect_left(there, pack.first)
