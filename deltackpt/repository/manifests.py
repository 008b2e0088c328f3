"""The manifests of a repository, each loaded once and kept in memory."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock, Thread

from deltackpt.errors import ChainError, DeltackptError, FormatError
from deltackpt.format import manifest
from deltackpt.format.manifest import MAX_MANIFEST, Link, Manifest
from deltackpt.format.pack import PackName
from deltackpt.repository.objects import Objects
from deltackpt.repository.packs import Packs

CACHED = 4096  # manifests kept in memory
FAR = 8  # steps from which on manifests are loaded together
READERS = 8
AHEAD, AHEAD_READERS = 64, 16  # steps that are read along by one who goes back, and how many at a time
BLOCK = 1000  # steps that are listed together, or ten times as many, and so on
BLOCKS = 4  # such listings at most

_STEP = re.compile(r"steps/(\d{8,16})-([0-9a-f]{64})\.json")


class ManifestCache:
    """The last CACHED manifests that were asked for or added, by link. Threads may share it."""

    def __init__(self) -> None:
        self._found: OrderedDict[Link, Manifest] = OrderedDict()
        self._lock = Lock()

    def __contains__(self, link: Link) -> bool:
        with self._lock:
            return link in self._found

    def get(self, link: Link) -> Manifest | None:
        """The manifest, if it is in memory; it is then the last to go."""
        with self._lock:
            if (found := self._found.get(link)) is not None:
                self._found.move_to_end(link)
            return found

    def add(self, link: Link, found: Manifest) -> None:
        """Keep the manifest of ``link``, which the caller has checked or published."""
        with self._lock:
            self._found[link] = found
            self._found.move_to_end(link)
            if len(self._found) > CACHED:
                self._found.popitem(last=False)

    def clear(self) -> None:
        """Forget all: each is asked of the store again."""
        with self._lock:
            self._found.clear()


class Manifests:
    """Loads and lists the steps of repository ``identity``."""

    def __init__(self, objects: Objects, identity: str) -> None:
        self._objects, self._id = objects, identity
        self.cache = ManifestCache()
        self.packs = Packs(objects)
        self._prefetch: tuple[tuple[Link, Link], Thread] | None = None
        self._lock = Lock()

    def load(self, link: Link) -> Manifest:
        """The manifest of a step, checked against the link.

        Raises NotFoundError ``object-missing``, FormatError ``manifest-hash`` and what `manifest.decode` raises,
        ChainError ``manifest-elsewhere``.
        """
        if (known := self.cache.get(link)) is not None:
            return known
        return self._accept(link, self._objects.store.get(link.name, MAX_MANIFEST))

    def _accept(self, link: Link, raw: bytes) -> Manifest:
        where = f"{self._objects.store.url}/{link.name}"
        if hashlib.sha256(raw).hexdigest() != link.id:  # [F-MAN-2] [S-NAME-6]
            raise FormatError("manifest-hash", where=where, have="other bytes", need=f"sha256 {link.id}")
        found = manifest.decode(raw, where)
        if (found.step, found.repository) != (link.step, self._id):  # [S-NAME-6]
            have = f"step {found.step} of repository {found.repository}"
            raise ChainError("manifest-elsewhere", where=where, have=have, need=f"step {link.step} of {self._id}")
        self.cache.add(link, found)
        return found

    def confirm(self, link: Link) -> None:
        """Ask the store whether a step is there; one that is not in memory is loaded.

        Raises NotFoundError ``object-missing`` and what `load` raises.
        """
        if link in self.cache:
            self._objects.store.stat(link.name)
        else:
            self.load(link)

    def links(self) -> list[Link]:
        """Every step with a manifest, on any branch, in order of step."""
        return links_of(info.name for info in self._objects.store.list("steps/"))

    def numbered(self, step: int) -> list[Link]:
        """Every step of a number, on any branch."""
        return links_of(info.name for info in self._objects.store.list(f"steps/{step:08d}-"))

    def links_between(self, first: int, last: int) -> list[Link]:
        """Every step from ``first`` to ``last`` with a manifest, in order of step; others are listed as little as may
        be, where a store can list the names that begin alike."""
        block = BLOCK
        while last // block - first // block >= BLOCKS:
            block *= 10
        digits = len(str(block)) - 1
        starts = {f"{step * block:08d}"[:-digits] for step in range(first // block, last // block + 1)}
        if self._objects.store.capabilities.pause or "" in starts:
            starts = {""}  # each listing counts, and is one of a folder
        found = {info.name for start in starts for info in self._objects.store.list(f"steps/{start}")}
        return [link for link in links_of(found) if first <= link.step <= last]

    def loading_ahead(self, target: Link, patience: int = 0) -> Callable[[Link], Manifest]:
        """`load`, for one who goes from ``target`` back: where each takes a request, the steps before are read along,
        from the ``patience``-th on.

        Raises what `load` raises, for the step that is asked for.
        """
        if self._objects.store.capabilities.local:
            return self.load
        listed: list[Link] | None = None
        names: list[PackName] = []

        def load(link: Link) -> Manifest:
            nonlocal listed, names, patience
            if link not in self.cache and link != target:
                patience -= 1
                if patience < 0:
                    if listed is None:
                        names, listed = self._listed()
                    end = bisect_right(listed, (link.step, link.id), key=lambda link: (link.step, link.id))
                    before = listed[max(0, end - AHEAD) : end]
                    self._load_packed(before, names, listed[max(0, end - CACHED // 2) : end])
                    self._load_together(before[::-1], AHEAD_READERS)
            return self.load(link)

        return load

    def _listed(self) -> tuple[list[PackName], list[Link]]:
        """Packs and steps; no steps where requests are counted and there is no pack."""
        names = self.packs.names()
        return names, self.links() if names or not self._objects.store.capabilities.pause else []

    def prefetch(self, have: Link, target: Link) -> Thread | None:
        """Begin to load the manifests between two steps together, where each takes a request; None where that is not
        worth it.

        An error is raised to the caller that loads the manifest later. The same prefetch is begun once.
        """
        if target.step - have.step <= FAR or self._objects.store.capabilities.local:
            return None
        with self._lock:
            if self._prefetch is None or self._prefetch[0] != (have, target):
                thread = Thread(target=self._load_between, args=(have, target), name="deltackpt-chain", daemon=True)
                self._prefetch = (have, target), thread
                thread.start()
            return self._prefetch[1]

    def _load_between(self, have: Link, target: Link) -> None:
        with suppress(DeltackptError):
            names = [pack for pack in self.packs.names() if pack.first <= target.step and pack.last > have.step]
            if names or not self._objects.store.capabilities.pause:
                links = self.links_between(have.step + 1, target.step)[-CACHED:]
                self._load_packed(links, names, links)
                self._load_together(links, READERS)

    def _load_packed(self, wanted: Sequence[Link], names: Sequence[PackName], listed: Sequence[Link]) -> None:
        """Load the ``wanted`` steps from packs, where that spares requests, and of the ``listed`` ones all that come
        with them. What is not listed is not there, whatever a pack holds ([S-PACK-2])."""
        found = self.packs.records(names, [link.step for link in wanted if link not in self.cache])
        for link in listed if found else ():
            if link.id in found and link not in self.cache:
                with suppress(DeltackptError):  # as when it is loaded by itself
                    self._accept(link, found[link.id])

    def _load_together(self, links: Sequence[Link], readers: int) -> None:
        from deltackpt.util.parallel import ordered_map

        def attempt(link: Link) -> None:
            with suppress(DeltackptError):  # the caller that needs it loads it again, and gets the error
                self.load(link)

        if not self._objects.store.capabilities.pause:  # else only what is needed is asked for
            list(ordered_map(attempt, [link for link in links if link not in self.cache], readers))


def links_of(names: Iterable[str]) -> list[Link]:
    """The steps whose manifests have these names, in order of step and id; other names are passed over."""
    found = (_STEP.fullmatch(name) for name in names)
    return sorted((Link(int(m[1]), m[2]) for m in found if m), key=lambda link: (link.step, link.id))
