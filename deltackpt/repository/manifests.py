"""The manifests of a repository, each loaded once and kept in memory."""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock, Thread

from deltackpt.errors import ChainError, DeltackptError, FormatError
from deltackpt.format import manifest
from deltackpt.format.manifest import MAX_MANIFEST, Link, Manifest
from deltackpt.repository.objects import Objects

CACHED = 4096  # manifests kept in memory
FAR = 8  # steps from which on manifests are loaded together
READERS = 8
AHEAD, AHEAD_READERS = 64, 16  # steps that are read along by one who goes back, and how many at a time

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
        self._prefetch: tuple[tuple[Link, Link], Thread] | None = None
        self._lock = Lock()

    def load(self, link: Link) -> Manifest:
        """The manifest of a step, checked against the link.

        Raises NotFoundError ``object-missing``, FormatError ``manifest-hash`` and what `manifest.decode` raises,
        ChainError ``manifest-elsewhere``.
        """
        if (known := self.cache.get(link)) is not None:
            return known
        where = f"{self._objects.store.url}/{link.name}"
        raw = self._objects.store.get(link.name, MAX_MANIFEST)
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

    def loading_ahead(self, target: Link) -> Callable[[Link], Manifest]:
        """`load`, for one who goes from ``target`` back: where each takes a request, the steps before are read along.

        Raises what `load` raises, for the step that is asked for.
        """
        store = self._objects.store.capabilities
        if store.local or store.pause:
            return self.load
        before: list[Link] | None = None

        def load(link: Link) -> Manifest:
            nonlocal before
            if link not in self.cache and link != target:
                if before is None:
                    before = self.links()
                while before and (before[-1].step, before[-1].id) > (link.step, link.id):
                    before.pop()
                self._load_together(before[-AHEAD:][::-1], AHEAD_READERS)
            return self.load(link)

        return load

    def prefetch(self, have: Link, target: Link) -> Thread | None:
        """Begin to load the manifests between two steps together, where each takes a request; None where that is not
        worth it.

        An error is raised to the caller that loads the manifest later. The same prefetch is begun once.
        """
        store = self._objects.store.capabilities
        if target.step - have.step <= FAR or store.local or store.pause:
            return None
        with self._lock:
            if self._prefetch is None or self._prefetch[0] != (have, target):
                thread = Thread(target=self._load_between, args=(have, target), name="deltackpt-chain", daemon=True)
                self._prefetch = (have, target), thread
                thread.start()
            return self._prefetch[1]

    def _load_between(self, have: Link, target: Link) -> None:
        with suppress(DeltackptError):
            links = [link for link in self.links() if have.step < link.step <= target.step]
            self._load_together(links[-CACHED:], READERS)

    def _load_together(self, links: Sequence[Link], readers: int) -> None:
        from deltackpt.util.parallel import ordered_map

        def attempt(link: Link) -> None:
            with suppress(DeltackptError):  # the caller that needs it loads it again, and gets the error
                self.load(link)

        list(ordered_map(attempt, links, readers))


def links_of(names: Iterable[str]) -> list[Link]:
    """The steps whose manifests have these names, in order of step and id; other names are passed over."""
    found = (_STEP.fullmatch(name) for name in names)
    return sorted((Link(int(m[1]), m[2]) for m in found if m), key=lambda link: (link.step, link.id))
