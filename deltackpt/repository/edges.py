"""The edges of a repository: listed once, read when the step that they lead to is."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from deltackpt.errors import ChainError, FormatError, NotFoundError
from deltackpt.format import edge
from deltackpt.format.edge import MAX_EDGE, Edge
from deltackpt.format.manifest import Link
from deltackpt.format.pack import PackName
from deltackpt.repository.packs import FEW, Packs
from deltackpt.store import Store

AHEAD = 64  # edges on either side of one that is asked for, which are read with it if packs hold them


class StoredEdges(Mapping[Link, tuple[Edge, ...]]):
    """By the step that they lead to. An edge that cannot be read is left out, since it is never the only truth: what it
    leads to can be reached otherwise, or `resolve` says that it cannot; `verify` names the damage. So is one that
    is not signed, as ``vouches`` says: no manifest names it, so that no signature of a step covers it.

    With ``packs``, many are read from those; without, each under its own name.
    """

    def __init__(
        self,
        store: Store,
        repository: str,
        vouches: Callable[[Link], bool] = lambda record: True,
        packs: Packs | None = None,
    ) -> None:
        self._store, self._repository, self._vouches = store, repository, vouches
        self._packs = packs if packs is not None and packs.useful else None
        self._packed: list[PackName] | None = None  # once they were listed
        self._alone = 0  # how many were read under their own names
        self._steps: list[int] = []
        self.names = [info.name for info in store.list("edges/") if edge.NAME.fullmatch(info.name)]
        self._by_step: dict[int, list[str]] = {}
        for name in self.names:
            self._by_step.setdefault(step_of(name), []).append(name)
        self._read: dict[int, dict[Link, tuple[Edge, ...]]] = {}

    def load(self, name: str) -> Edge:
        """One edge, checked against its name. Raises FormatError, ChainError, NotFoundError ``object-missing``."""
        where = f"{self._store.url}/{name}"
        raw = self._from_packs(name) if self._packs is not None else None
        if raw is None:
            raw, self._alone = self._store.get(name, MAX_EDGE), self._alone + 1
        if hashlib.sha256(raw).hexdigest() != name[-69:-5]:  # [F-EDGE-5] [S-EDGE-1]
            raise FormatError("manifest-hash", where=where, have="other bytes", need=f"sha256 {name[-69:-5]}")
        found = edge.decode(raw, where)
        if (found.end.step, found.repository) != (step_of(name), self._repository):  # [F-EDGE-5]
            have = f"step {found.end.step} of repository {found.repository}"
            raise ChainError("manifest-elsewhere", where=where, have=have, need=f"a step of {self._repository}")
        return found

    def _from_packs(self, name: str) -> bytes | None:
        """The bytes of an edge that a pack holds. It is listed ([S-PACK-2])."""
        assert self._packs is not None
        sha256 = name[-69:-5]
        if (known := self._packs.known(sha256)) is not None or self._alone < FEW:
            return known
        if self._packed is None:
            self._packed = self._packs.names()
            self._steps = sorted(map(step_of, self.names))
        if not self._packed:
            return None
        at = bisect_left(self._steps, step_of(name))
        return self._packs.records(self._packed, self._steps[max(0, at - AHEAD) : at + AHEAD]).get(sha256)

    def __getitem__(self, link: Link) -> tuple[Edge, ...]:
        if link.step not in self._by_step:
            raise KeyError(link)
        return self._of_step(link.step)[link]

    def _of_step(self, step: int) -> dict[Link, tuple[Edge, ...]]:
        if step not in self._read:
            found: dict[Link, tuple[Edge, ...]] = {}
            for name in self._by_step[step]:
                try:
                    one = self.load(name)
                except (FormatError, ChainError, NotFoundError):  # [F-EDGE-6] [S-EDGE-3]
                    continue
                if not self._vouches(record_of(name)):  # [S-SIG-12]
                    continue
                found[one.end] = (*found.get(one.end, ()), one)
            self._read[step] = found
        return self._read[step]

    def __iter__(self) -> Iterator[Link]:
        for step in self._by_step:
            yield from self._of_step(step)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def record_of(name: str) -> Link:
    """The step that an edge leads to, and the sha256 of its bytes, by which it is signed."""
    return Link(step_of(name), name[-69:-5])


def step_of(name: str) -> int:
    """The step in the name of an edge."""
    return int(name[len("edges/") : -70])
