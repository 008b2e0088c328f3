"""A repository's parts whose sha256 is found beside their use: nothing that came of them may last before `join`."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from deltackpt.format.manifest import File
from deltackpt.repository import Repository
from deltackpt.repository.objects import object_differs
from deltackpt.restore.source import SMALL, RepositorySource
from deltackpt.util.guard import map_guarded

HASHERS = 4  # parts that are hashed at a time


class LateSource(RepositorySource):
    """`part` of a local store returns before the sha256 is known; those of a remote one are hashed as they come."""

    def __init__(self, repo: Repository, ref: str = "main") -> None:
        super().__init__(repo, ref)
        self._hashing: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = None

    @property
    def parallel(self) -> int:
        """Files of this machine are only mapped before they are asked for: sooner than a thread starts."""
        return 1 if self._repo.store.capabilities.local else super().parallel

    def part(self, file: File) -> memoryview:
        """The bytes of a part, mapped. Raises FormatError ``object-hash`` for another size, and where `part` hashes."""
        store = self._repo.store
        local = store.local_path(file.name) if store.capabilities.local else None
        if local is None or file.size <= SMALL:
            return super().part(file)
        store.stat(file.name)  # an object, not a link or a pipe in its place
        with local.open("rb") as found:
            size = found.seek(0, 2)
            if size != file.size:
                raise object_differs(f"{store.url}/{file.name}", size, file)
            view = map_guarded(found.fileno(), size, Path(local))[0].view
        self._pool = self._pool or ThreadPoolExecutor(HASHERS, "deltackpt-hash")
        self._hashing.append(self._pool.submit(self._check, view, file))
        return view

    def _check(self, view: memoryview, file: File) -> None:
        if hashlib.sha256(view).hexdigest() != file.sha256:  # [F-MAN-12] [S-READ-2]
            raise object_differs(f"{self._repo.store.url}/{file.name}", len(view), file)

    def join(self) -> None:
        """Wait until all parts were hashed. Raises FormatError ``object-hash`` for the first that has other bytes."""
        hashing, self._hashing = self._hashing, []
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for found in hashing:
            found.result()
