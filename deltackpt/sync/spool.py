"""Large objects in transit, in a local folder: what was fetched before an interruption is not fetched again.

    SPOOL/<sha256>.part   the object's bytes that were fetched; locked by the process that fetches them
    SPOOL/<sha256>.done   a byte for each block of it, 1 once the block is there

Nothing here is trusted: an object leaves the spool proven by its sha256, or not at all.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from deltackpt.format.manifest import File
from deltackpt.repository.objects import object_differs
from deltackpt.store import Store
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.lock import lock
from deltackpt.util.parallel import ordered_map

BLOCK = 64 << 10  # bytes; a piece is some of these
FETCHES = 4  # pieces in transit at a time

Count = Callable[[int], None]  # is given a number of bytes


@contextmanager
def fetched(folder: Path, store: Store, file: File, piece: int, acquire: Count, advance: Count) -> Iterator[BinaryIO]:
    """The object in a local file, read from its beginning. It is removed when the with-block ends well, else kept.

    ``acquire`` is given the bytes of each request before it, ``advance`` after it. Raises FormatError
    ``object-hash``, and what `Store.get_range` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part, done = folder / f"{file.sha256}.part", folder / f"{file.sha256}.done"
    with _locked(part) as body:
        ensure_space(folder, file.size - os.fstat(body.fileno()).st_blocks * 512)
        with space_errors(part), done.open("ab"):  # made where there is none
            os.truncate(part, file.size)
        _fill(body, done, store, file, max(BLOCK, piece - piece % BLOCK), acquire, advance)
        digest = hashlib.sha256()
        while chunk := body.read(1 << 20):
            digest.update(chunk)
        if digest.hexdigest() != file.sha256:
            _remove(part, done)
            raise object_differs(f"{store.url}/{file.name}", file.size, file)
        body.seek(0)
        yield body
        _remove(part, done)


def _fill(body: BinaryIO, done: Path, store: Store, file: File, piece: int, acquire: Count, advance: Count) -> None:
    """Fetch what is not there yet, in pieces."""
    there = done.read_bytes()
    blocks = -(-file.size // BLOCK)
    missing = [i for i in range(blocks) if there[i : i + 1] != b"\1"]
    advance(file.size - sum(min(BLOCK, file.size - i * BLOCK) for i in missing))

    def fetch(run: range) -> int:
        start, end = run.start * BLOCK, min(run.stop * BLOCK, file.size)
        acquire(end - start)
        data = memoryview(store.get_range(file.name, start, end - start))
        with space_errors(done):
            while data:
                count = os.pwrite(body.fileno(), data, start)
                data, start = data[count:], start + count
            os.pwrite(marks, b"\1" * len(run), run.start)
        return end - run.start * BLOCK

    marks = os.open(done, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for count in ordered_map(fetch, _runs(missing, piece // BLOCK), FETCHES):
            advance(count)
    finally:
        os.close(marks)


def _runs(blocks: list[int], most: int) -> Iterator[range]:
    """Neighbors together, at most so many."""
    begin = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1 or i - begin == most:
            yield range(blocks[begin], blocks[i - 1] + 1)
            begin = i


@contextmanager
def _locked(part: Path) -> Iterator[BinaryIO]:
    """The file, locked by this process; another one that fetches the same is waited for."""
    while True:
        with space_errors(part):
            body = open(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")  # noqa: PTH123, SIM115
        with body:
            lock(body.fileno())
            try:
                same = os.path.samestat(part.stat(), os.fstat(body.fileno()))
            except FileNotFoundError:
                same = False
            if same:  # else it was finished and removed while we waited
                yield body
                return


def _remove(part: Path, done: Path) -> None:
    done.unlink(missing_ok=True)
    part.unlink(missing_ok=True)
