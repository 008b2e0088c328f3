"""A repository's parts whose sha256 is found beside their use: nothing that came of them may last before `join`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import File
from deltackpt.patch.base import Bytes
from deltackpt.patch.part import ReadInto
from deltackpt.repository import Repository
from deltackpt.repository.objects import object_differs
from deltackpt.restore.source import SMALL, RepositorySource
from deltackpt.store.held_file import HeldFile, open_object
from deltackpt.util.guard import map_guarded
from deltackpt.util.mapped_file import FileMapping

HASHERS = 8  # parts that are hashed at a time
AHEAD = 16  # and that are opened before they are asked for
IN_MEMORY = 256 << 20  # bytes of parts that are read into memory, if there is some for them

# Memory for so many bytes, uint8 [n], contiguous. Raises MemoryError, RuntimeError where there is none.
Room = Callable[[int], Bytes]


class _Opened(NamedTuple):
    """A part that is being hashed: what gives its bytes, once they are there, and what waits for its sha256."""

    there: Callable[[], memoryview]
    hashed: Future[None]


class LateSource(RepositorySource):
    """`part` of a local store returns before the sha256 is known; those of a remote one are hashed as they come.

    With ``room``, such as memory that a card copies from, the first parts are not mapped, but read there whole; then
    `part` returns when they are there.
    """

    def __init__(self, repo: Repository, ref: str = "main", room: Room | None = None) -> None:
        super().__init__(repo, ref)
        self._room, self._left = room, IN_MEMORY
        self._files: dict[File, HeldFile] = {}
        self._in_memory = set[File]()
        self._begun: dict[File, _Opened] = {}
        self._asked: list[Future[None]] = []  # of every view that was given, also where one part is asked for twice
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, files: Iterable[File]) -> None:
        """Open and hash some of what `part` will be asked for, from now on. What is wrong with one is raised there.

        This thread opens them: those that hash hold the interpreter's lock for as little as can be.
        """
        for file in islice(files, AHEAD):
            try:
                if self._local(file) is not None and file not in self._begun:
                    self._begun[file] = self._open(file)
            except (DeltackptError, OSError):
                return

    @property
    def parallel(self) -> int:
        """Files of this machine are only mapped before they are asked for: sooner than a thread starts."""
        return 1 if self._repo.store.capabilities.local else super().parallel

    def part(self, file: File) -> memoryview:
        """The bytes of a part, mapped or in ``room``. Raises FormatError ``object-hash`` for another size, and where
        `RepositorySource.part` hashes, ``object-short``, StoreError."""
        if self._local(file) is None:
            return super().part(file)
        opened = self._begun.pop(file, None) or self._open(file)
        self._asked.append(opened.hashed)
        return opened.there()

    def _local(self, file: File) -> Path | None:
        """Where a part is that is hashed beside its use."""
        store = self._repo.store
        return store.local_path(file.name) if store.capabilities.local and file.size > SMALL else None

    def _open(self, file: File) -> _Opened:
        """Begin to hash a part."""
        store, local = self._repo.store, self._local(file)
        assert local is not None
        where = f"{store.url}/{file.name}"
        with open_object(local, where) as found:
            size = found.seek(0, 2)
            if size != file.size:
                raise object_differs(where, size, file)
            held, into = HeldFile(found.fileno(), where), self._memory(size)
            mapping = map_guarded(found.fileno(), size, Path(local))[0] if into is None else None
        self._pool = self._pool or ThreadPoolExecutor(HASHERS, "deltackpt-hash")
        if mapping is not None:
            self._files[file] = held
            return _Opened(lambda: mapping.view, self._pool.submit(self._check, mapping, file))
        assert into is not None
        self._in_memory.add(file)
        read = Future[None]()

        def there() -> memoryview:
            read.result()
            return memoryview(into)  # type: ignore[arg-type]

        return _Opened(there, self._pool.submit(self._read, held, into, read, file))

    def _memory(self, size: int) -> Bytes | None:
        """Some of ``room``, as long as there is some."""
        if self._room is None or size > self._left:
            return None
        try:
            into = self._room(size)
        except (MemoryError, RuntimeError):  # as where no more can be pinned: this part and all others are mapped
            self._room = None
            return None
        self._left -= size
        return into

    def reads(self, file: File) -> ReadInto | None:
        """Of a part that is a large file of this machine, and mapped: from the file."""
        held = self._files.get(file)
        return held.read_into if held is not None else None

    def in_room(self, file: File) -> bool:
        """See `RepositorySource.in_room`."""
        return file in self._in_memory

    def _read(self, held: HeldFile, into: Bytes, read: Future[None], file: File) -> None:
        try:
            held.read_into(0, into)
        except BaseException as error:
            read.set_exception(error)
            raise
        read.set_result(None)
        self._compare(hashlib.sha256(into).hexdigest(), file)  # type: ignore[arg-type]

    def _check(self, mapping: FileMapping, file: File) -> None:
        digest = hashlib.sha256(mapping.view).hexdigest()  # in one call: a thread that starts often waits for its turn
        mapping.release((0, file.size))  # here, beside all else: whoever ends the mapping would have to wait for it
        self._compare(digest, file)

    def _compare(self, digest: str, file: File) -> None:
        if digest != file.sha256:  # [F-MAN-12] [S-READ-2]
            raise object_differs(f"{self._repo.store.url}/{file.name}", file.size, file)

    def join(self) -> None:
        """Wait until all parts were hashed. Raises FormatError ``object-hash`` for the first that was asked for and has
        other bytes; so does every call after it."""
        self._begun.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for hashed in self._asked:
            hashed.result()
        self._asked = []
