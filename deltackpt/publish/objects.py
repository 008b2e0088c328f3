"""The objects of a step in the making: put, durable, or withdrawn. No manifest names them yet."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress

from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import File
from deltackpt.publish.sink import EncodedPart
from deltackpt.publish.uploads import AT_ONCE, MOST_AT_ONCE, Uploads, Whole, put_side_by_side
from deltackpt.repository import Repository
from deltackpt.repository.objects import new_folder
from deltackpt.store import Buffer

MOST_FILES = 32  # large files put at a time: each holds a few pieces of `publish.step.PIECE` bytes and descriptors
REMOTE_FILES = 2  # the same for a store that sends several parts of each at a time, and holds them
# Encoded bytes of the first parts; later ones grow with what was put before. A sha256 of 16 MiB takes 16 ms.
FIRST_PART, FIRST_REMOTE_PART, LARGEST_REMOTE_PART = 16 << 20, 4 << 20, 16 << 20


class StepObjects:
    """A `PartSink`, and more. ``kind`` of folder is that of its parts; ``folders`` are the names of each kind's, where
    others use them too. ``at_once`` objects are put in the background; 0: none, `put` returns when the part is durable.
    ``threads`` may put large files side by side (`store_all`), and more parts, where hashing is what takes time.
    ``check`` is called between the pieces of an object, and raises to stop.
    """

    def __init__(
        self,
        repo: Repository,
        step: int,
        kind: str = "patches",
        *,
        folders: Mapping[str, str] | None = None,
        at_once: int = AT_ONCE,
        threads: int = 1,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.repo, self.step, self.check = repo, step, check
        self.stored: list[File] = []  # all that is durable
        self.patch_bytes = 0  # of all parts, those in transit included
        self._threads = threads
        self._kind, self._folders = kind, dict(folders or {})
        if at_once and repo.store.capabilities.local:
            at_once = max(at_once, min(threads, MOST_AT_ONCE))
        self._uploads = Uploads(self.store, at_once)
        self._parts: list[Future[File]] = []

    def name(self, kind: str, path: str) -> str:
        """The name of a new object, in the step's folder of its kind."""
        return f"{self._folders.setdefault(kind, new_folder(kind, self.step))}/{path}"

    def store(self, name: str, chunks: Iterable[Buffer]) -> File:
        """Put an object; it is durable when this returns. Raises what `Store.put` raises."""
        file = self.repo.put(name, self._checked(chunks))
        self.stored.append(file)
        return file

    def store_all(self, objects: Sequence[Whole]) -> list[File]:
        """`store` of large files, several at a time; all are durable when this returns. -> in the same order.

        Each is read by the thread that puts it. Raises what `store` raises, after all have ended.
        """
        most = _files_at_once() if self.repo.store.capabilities.local else REMOTE_FILES
        return put_side_by_side(self.store, objects, min(self._threads, most))

    def begin(self, name: str, chunks: Iterable[Buffer]) -> Future[File]:
        """`store` in the background. Raises what an earlier upload raised."""
        return self._uploads.begin(name, chunks)

    def part_bytes(self, most: int) -> int:
        """Small parts at first, larger ones later: `AT_ONCE` of them are put while one is made, and a receiver hashes
        them side by side. A step of 100 MB has six on a disk."""
        if self.repo.store.capabilities.local:
            return min(most, max(FIRST_PART, self.patch_bytes // 8))
        return min(most, LARGEST_REMOTE_PART, max(FIRST_REMOTE_PART, self.patch_bytes // 4))

    def put(self, part: EncodedPart) -> None:
        """`begin` for a part."""
        self.patch_bytes += part.size
        name = self.name(self._kind, f"part-{part.number:05d}.safetensors")
        self._parts.append(self.begin(name, part.host_chunks()))

    def wait(self) -> list[File]:
        """Wait for all that was begun to be durable. -> the parts, in order. Raises what `store` raised."""
        self._uploads.wait()
        return [part.result() for part in self._parts]

    def drop_parts(self) -> None:
        """Delete the parts that were put: no manifest is to name them. Raises what `store` raised."""
        dropped = set(self.wait())
        self.stored = [file for file in self.stored if file not in dropped]
        self._parts, self.patch_bytes = [], 0
        remove(self.repo, dropped)

    def withdraw(self) -> None:
        """Delete what no manifest names yet; gc finds what this misses."""
        self._uploads.stop()
        remove(self.repo, self.stored)

    def _checked(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
        for chunk in chunks:
            self.check()
            yield chunk


def _files_at_once() -> int:
    """As many as memory allows, and the descriptors of this process: a file takes four."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else max(1, min(MOST_FILES, (soft - 32) // 4))


def remove(repo: Repository, files: Iterable[File]) -> None:
    """Delete objects that no manifest names; gc finds what this misses."""
    for file in files:
        with suppress(DeltackptError, OSError):
            repo.store.delete(file.name)
