"""Objects from one store to another, each hashed in transit: none is published with other bytes than are named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from deltackpt.errors import ConflictError, DeltackptError, FormatError, NotFoundError
from deltackpt.format.edge import MAX_EDGE
from deltackpt.format.manifest import MAX_MANIFEST, File
from deltackpt.format.pack import MAX_PACK
from deltackpt.repository.objects import object_differs
from deltackpt.store import Store
from deltackpt.store.base import missing
from deltackpt.sync import spool
from deltackpt.sync.rate import Rate
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

T = TypeVar("T")

JOBS = 8  # objects in transit at a time
LARGE = 16 << 20  # bytes from which an object is fetched by ranges, and passes through the spool
SMALL = 1 << 20  # bytes up to which an object may go in a batch
BATCH = 200  # objects of a batch
BATCH_BYTES = 16 << 20
LIMITS = {"steps": MAX_MANIFEST, "edges": MAX_EDGE, "packs": MAX_PACK}  # bytes of records
ATTEMPTS = 3  # at an object that was damaged in transit


def default_spool() -> Path:
    """Where large objects are stored that were fetched in part: the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "deltackpt" / "spool"


@dataclass
class Transfer:
    """From ``source`` to ``target``; ``limit`` is in bytes a second, on each of the two links that is no local disk."""

    source: Store
    target: Store
    limit: float | None = None
    jobs: int = JOBS
    folder: Path = field(default_factory=default_spool)
    progress: Progress = SILENT

    def __post_init__(self) -> None:
        self._down = Rate(None if self.source.capabilities.local else self.limit)
        self._up = Rate(None if self.target.capabilities.local else self.limit)

    def copy_all(self, files: Sequence[File]) -> int:
        """Copy many, in any order, small ones in batches where the store takes them; -> bytes that were copied.

        Raises what `copy` raises; some of them may then be there.
        """
        alone = list(files)
        moved = 0
        if self.target.capabilities.batch:
            alone = [f for f in files if f.size > SMALL]
            moved += sum(map(self._copy_batch, _batches([f for f in files if f.size <= SMALL])))
        return moved + sum(ordered_map(self.copy, alone, self.jobs))

    def copy(self, file: File) -> int:
        """Copy one object; -> the bytes copied, 0 if it was there already, and proven by its sha256.

        Raises FormatError ``object-hash`` where the source's bytes, or those that the target has under this name, are
        others; and what the two stores raise. Then nothing was published.
        """
        try:
            _retried(partial(self._put, file))
            return file.size
        except ConflictError as error:
            if error.code != "object-exists" or not self.prove(file):
                raise
            return 0

    def prove(self, file: File) -> bool:
        """Read back what the target has; False if it has nothing. Raises FormatError ``object-hash``."""
        self._up.acquire(file.size)
        try:
            for _ in self._checked(self.target, file, self.target.read(file.name)):
                pass
        except NotFoundError:
            return False
        return True

    def find_damage(self, file: File) -> DeltackptError | None:
        """The error that a reader of the target's object meets, None if its bytes, which are read, are right."""
        try:
            there = _retried(partial(self.prove, file), always=True)
            return None if there else missing(f"{self.target.url}/{file.name}")
        except FormatError as error:
            return error

    def source_has(self, file: File) -> bool:
        """Read the source's object; whether its bytes are right."""
        self._down.acquire(file.size)
        try:
            for _ in self._checked(self.source, file, self.source.read(file.name)):
                pass
        except (NotFoundError, FormatError):
            return False
        return True

    def replace(self, file: File, error: DeltackptError) -> None:
        """Put the source's object in the place of the target's, of which `find_damage` returned ``error`` ([S-MIR-7]).

        It is in the spool, proven, before anything is removed; then its name is free until it is put. Raises what
        `copy` raises.
        """
        with self._spooled(file) as body:
            if not isinstance(error, NotFoundError):
                self.target.delete(file.name)
            try:
                self.target.put(file.name, self._paced(_chunks(body)))
            except ConflictError as conflict:  # another repair was first
                if conflict.code != "object-exists" or not self.prove(file):
                    raise

    def record(self, store: Store, name: str) -> bytes:
        """A manifest, an edge or a pack, proven by the hash in its name. Raises FormatError ``manifest-hash``."""
        limit, sha256 = LIMITS[name.partition("/")[0]], name.rpartition("-")[2].partition(".")[0]

        def attempt() -> bytes:
            raw = store.get(name, limit)
            if hashlib.sha256(raw).hexdigest() != sha256:  # [S-MIR-3]
                need = f"sha256 {sha256}"
                raise FormatError("manifest-hash", where=f"{store.url}/{name}", have="other bytes", need=need)
            return raw

        return _retried(attempt)

    def _put(self, file: File) -> None:
        if file.size > LARGE and not self.source.capabilities.local:
            with self._spooled(file) as body:
                self.target.put(file.name, self._paced(_chunks(body)))
            return
        self._down.acquire(file.size)
        read = self._checked(self.source, file, self.source.read(file.name))
        self.target.put(file.name, self._counted(self._paced(read)))

    def _copy_batch(self, files: Sequence[File]) -> int:
        bodies = list(ordered_map(self._fetch, files, self.jobs))
        try:
            self.target.put_all([(f.name, body) for f, body in zip(files, bodies, strict=True)])
        except ConflictError as error:  # one of them is there: find out which
            if error.code != "object-exists":
                raise
            return sum(ordered_map(self.copy, files, self.jobs))
        size = sum(f.size for f in files)
        self.progress.advance(size)
        return size

    def _fetch(self, file: File) -> bytes:
        def attempt() -> bytes:
            self._down.acquire(file.size)
            return b"".join(self._checked(self.source, file, self.source.read(file.name)))

        return _retried(attempt)

    def _spooled(self, file: File) -> AbstractContextManager[BinaryIO]:
        """The source's object in the spool, fetched by ranges and proven."""
        return spool.fetched(
            self.folder, self.source, file, self._down.piece, self._down.acquire, self.progress.advance
        )

    def _paced(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._up.acquire(len(chunk))
            yield chunk

    def _counted(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            yield chunk
            self.progress.advance(len(chunk))

    @staticmethod
    def _checked(store: Store, file: File, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The chunks; an error instead of the end if they are not the file's."""
        digest, size = hashlib.sha256(), 0
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            yield chunk
        if size != file.size or digest.hexdigest() != file.sha256:  # [S-MIR-3]
            raise object_differs(f"{store.url}/{file.name}", size, file)


def _retried(attempt: Callable[[], T], *, always: bool = False) -> T:
    """The result of ``attempt``, made again where bytes were damaged in transit; ``always``: after any FormatError."""
    for left in reversed(range(ATTEMPTS)):
        try:
            return attempt()
        except FormatError as error:
            if not left or not (always or error.code in ("object-hash", "manifest-hash")):
                raise
    raise AssertionError


def _chunks(body: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: body.read(1 << 20), b"")


def _batches(files: Sequence[File]) -> Iterator[list[File]]:
    batch: list[File] = []
    for file in files:
        if batch and (len(batch) == BATCH or sum(f.size for f in batch) + file.size > BATCH_BYTES):
            yield batch
            batch = []
        batch.append(file)
    if batch:
        yield batch
