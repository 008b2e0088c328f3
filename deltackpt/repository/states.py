"""The layouts and digests of steps: read once, and the last few kept in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock, Thread
from typing import TYPE_CHECKING, TypeVar

from deltackpt.format.manifest import File, Manifest
from deltackpt.repository.objects import Objects

if TYPE_CHECKING:  # these load numpy, which a log does without
    from deltackpt.format.layout import Layout
    from deltackpt.format.state_digest import TensorDigest

KEPT = 4  # layouts, and steps' digests, kept in memory

K = TypeVar("K")
V = TypeVar("V")


class States:
    """The layouts and digests that manifests name. Threads may share it: what two of them want is read once."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._layouts: OrderedDict[File, Layout] = OrderedDict()
        self._digests: OrderedDict[tuple[File, File, str], Mapping[str, TensorDigest]] = OrderedDict()
        self._lock = Lock()

    def layout(self, file: File) -> Layout:
        """The layout in an object. Raises FormatError, NotFoundError ``object-missing``."""
        with self._lock:
            return self._layout(file)

    def _layout(self, file: File) -> Layout:
        if (found := self._layouts.get(file)) is None:
            from deltackpt.format import layout

            found = layout.decode(self._objects.read(file, layout.MAX_LAYOUT), self._where(file))
        _keep(self._layouts, file, found)
        return found

    def digests(self, of: Manifest) -> Mapping[str, TensorDigest]:
        """The digests of a step's tensors, by name, checked against its state digest. Raises FormatError,
        NotFoundError ``object-missing``.
        """
        with self._lock:
            if (found := self._digests.get(_key(of))) is None:
                from deltackpt.format import digests

                raw = self._objects.read(of.digests, digests.MAX_DIGESTS)
                found = digests.decode(raw, self._layout(of.layout), of.state, self._where(of.digests))
            _keep(self._digests, _key(of), found)
            return _unchanging(found)

    def add(self, of: Manifest, digests: Mapping[str, TensorDigest]) -> None:
        """Keep the digests of a step that this process has just published."""
        with self._lock:
            _keep(self._digests, _key(of), _unchanging(digests))

    def clear(self) -> None:
        """Forget all: each is asked of the store again."""
        with self._lock:
            self._layouts.clear()
            self._digests.clear()

    def prefetch(self, of: Manifest) -> Thread:
        """Begin to read the layout and digests of a step; an error is raised to the caller that asks for them later."""

        def read() -> None:
            with suppress(BaseException):
                self.digests(of)

        thread = Thread(target=read, name="deltackpt-states", daemon=True)
        thread.start()
        return thread

    def _where(self, file: File) -> str:
        return f"{self._objects.store.url}/{file.name}"


def _unchanging(digests: Mapping[str, TensorDigest]) -> Mapping[str, TensorDigest]:
    """The same, or a copy of what could be written to."""
    from deltackpt.format.digests import TensorDigests

    return digests if isinstance(digests, TensorDigests) else dict(digests)


def _key(of: Manifest) -> tuple[File, File, str]:
    return of.digests, of.layout, of.state


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    """``value`` is the last to go."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > KEPT:
        kept.popitem(last=False)
