"""The objects of a repository, each read against the size and sha256 that name it."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator

from deltackpt.errors import FormatError
from deltackpt.format.manifest import File
from deltackpt.store import Buffer, Store
from deltackpt.store.base import DAMAGED
from deltackpt.store.side_hash import SideHash, waits_for


class Objects:
    """Payloads and side objects in ``store``, which can be replaced by another connection to the same place."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def read(self, file: File, limit: int) -> bytes:
        """A whole object of at most ``limit`` bytes. Raises FormatError ``object-hash``, NotFoundError
        ``object-missing``.
        """
        raw = self.store.get(file.name, limit)
        if len(raw) != file.size or hashlib.sha256(raw).hexdigest() != file.sha256:  # [F-MAN-12] [S-READ-2]
            raise object_differs(f"{self.store.url}/{file.name}", len(raw), file)
        return raw

    def stream(self, file: File) -> Iterator[bytes]:
        """An object in pieces, proven at its end: FormatError ``object-hash`` there, or once it has too many bytes."""
        size = 0
        with SideHash() as found:
            for chunk in self.store.read(file.name):
                found.update(memoryview(chunk))
                size += len(chunk)
                if size > file.size:
                    break
                yield chunk
                found.settle(waits_for(chunk))
            if size != file.size or found.hexdigest() != file.sha256:  # [F-MAN-12] [S-READ-2]
                raise object_differs(f"{self.store.url}/{file.name}", size, file)

    def prove(self, files: Iterable[File]) -> None:
        """Read objects and hash them. Raises FormatError ``object-hash`` at the first that has other bytes."""
        for file in files:
            for _ in self.stream(file):
                pass

    def put(self, name: str, chunks: Iterable[Buffer]) -> File:
        """Create an object; -> its name, size in bytes and sha256. Raises what `Store.put` raises."""
        written = self.store.put(name, chunks)
        return File(written.name, written.size, written.sha256)


def object_differs(where: str, size: int, file: File) -> FormatError:
    """The error ``object-hash`` for an object of ``size`` bytes that is not what ``file`` says."""
    return FormatError(
        "object-hash",
        where=where,
        have=f"other bytes ({size:,})",
        need=f"{file.size:,} bytes of sha256 {file.sha256[:16]}…",
        hint=DAMAGED,
    )


def new_folder(kind: str, step: int) -> str:
    """A name never used before: ``anchors/<step>-<nonce>`` and the like."""
    return f"{kind}/{step:08d}-{secrets.token_hex(6)}"
