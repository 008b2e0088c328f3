"""The parts of a patch, fetched from a store, hashed, and opened."""

from __future__ import annotations

import hashlib
import mmap
import resource
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from deltackpt.codecs import Entry
from deltackpt.codecs.boxes import MAX_BOXES, overlap
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.manifest import File, Manifest
from deltackpt.patch.index import PartIndex
from deltackpt.patch.part import PartReader
from deltackpt.patch.remote_part import RangedPart
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.repository.objects import object_differs
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.parallel import ordered_map

SMALL = 64 << 10  # bytes
FETCHES = 8  # parts on their way at a time
RESERVE = 256  # descriptors for all else

AnyPart = PartReader | RangedPart
Found = tuple[AnyPart, int]


def mapped(repo: Repository, file: File) -> memoryview:
    """The bytes of an object, mapped and proven by sha256; a remote one is downloaded to a temporary file first.

    Small ones are read: a mapping holds a descriptor, and a chain can have thousands of parts.
    """
    with ExitStack() as stack:
        local = repo.store.local_path(file.name) if repo.store.capabilities.local else None
        if local is None:
            folder = Path(tempfile.gettempdir())
            ensure_space(folder, file.size)
            with space_errors(folder):
                spool: BinaryIO = stack.enter_context(tempfile.TemporaryFile(prefix="deltackpt-"))
                for chunk in repo.stream(file):
                    spool.write(chunk)
                spool.flush()
        else:
            repo.store.stat(file.name)  # an object, not a link or a pipe in its place
            spool = stack.enter_context(local.open("rb"))
        size = spool.seek(0, 2)
        if size > SMALL:
            view = memoryview(mmap.mmap(spool.fileno(), size, access=mmap.ACCESS_READ))
        else:
            spool.seek(0)
            view = memoryview(spool.read())
        stack.close()  # the mapping has a descriptor of its own
        if local is not None and (size != file.size or hashlib.sha256(view).hexdigest() != file.sha256):
            raise object_differs(f"{repo.store.url}/{file.name}", size, file)
        return view


def _mapped(repo: Repository, files: Sequence[File]) -> Iterator[memoryview]:
    """In this order, several at a time where each takes requests."""
    fetches = 1 if repo.store.capabilities.local else FETCHES
    return ordered_map(lambda file: mapped(repo, file), files, fetches)


class PatchReader:
    """All parts of one patch or fold. Whoever holds it may trust origin, tables, and the bytes of every part."""

    def __init__(self, hop: Hop, parts: Sequence[AnyPart]) -> None:
        self.hop = hop
        self.parts = parts
        self._entries: dict[str, list[Found]] = {}
        for part in parts:
            for i, entry in enumerate(part.entries):
                self._entries.setdefault(entry.name, []).append((part, i))
        for name, found in self._entries.items():
            if len(found) > 1:
                _check_boxes(name, [part.entries[i] for part, i in found], parts[0].where)

    @classmethod
    @contextmanager
    def open(cls, repo: Repository, hop: Hop | Manifest) -> Iterator[PatchReader]:
        """The parts of a hop; given a step, those of its patch."""
        if isinstance(hop, Manifest):
            hop = Hop.of(hop)
        yield cls._of(repo, hop, iter(list(_mapped(repo, hop.files))))

    @classmethod
    @contextmanager
    def open_all(cls, repo: Repository, hops: Sequence[Hop]) -> Iterator[list[PatchReader]]:
        """The patches of several hops; all of them are fetched and hashed before any is used."""
        yield list(cls.arriving(repo, hops))

    @classmethod
    def arriving(cls, repo: Repository, hops: Sequence[Hop]) -> Iterator[PatchReader]:
        """The patches of several hops in order, each as soon as all its parts are fetched and hashed."""
        _make_room(sum(f.size > SMALL for hop in hops for f in hop.files))
        views = _mapped(repo, [file for hop in hops for file in hop.files])
        for hop in hops:
            yield cls._of(repo, hop, views)

    @classmethod
    def _of(cls, repo: Repository, hop: Hop, views: Iterator[memoryview]) -> PatchReader:
        parts = []
        for file in hop.files:
            parts.append(PartReader(next(views), f"{repo.store.url}/{file.name}"))
            check_origin(parts[-1], hop)
        return cls(hop, parts)

    def entries_of(self, name: str) -> list[Found]:
        """The parts, and the places in their tables, that hold something of a tensor."""
        return self._entries.get(name, [])

    @property
    def names(self) -> set[str]:
        return set(self._entries)


def _make_room(maps: int) -> None:
    """Let this process have the descriptors that it needs, if the system allows: a long chain has many mapped parts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = maps + RESERVE
    if soft != resource.RLIM_INFINITY and soft < need:
        with suppress(ValueError, OSError):  # then the system says that there are too many
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard)
            )


def _check_boxes(name: str, entries: Sequence[Entry], where: str) -> None:
    """What several parts, or several entries, hold of one tensor must be boxes of it that do not overlap."""
    where = f"{where}, {name[:80]!r}"
    if len(entries) > MAX_BOXES:
        have, need = f"{len(entries):,} boxes", f"at most {MAX_BOXES:,} of one tensor"
        raise FormatError("boxes-too-many", where=where, have=have, need=need)
    same = {(e.dtype.name, e.whole) for e in entries}
    if len(same) > 1 or not all(e.boxed for e in entries) or _overlap([e for e in entries if 0 not in e.shape]):
        have = "boxes that overlap, or of different tensors"
        raise FormatError("boxes-overlap", where=where, have=have, need="each element once")


def _overlap(boxes: Sequence[Entry]) -> bool:
    if not boxes:
        return False
    first = np.array([e.offset for e in boxes], np.int64)
    return overlap(first, first + np.array([e.shape for e in boxes], np.int64))


def check_origin(part: PartIndex, hop: Hop) -> None:
    """A part belongs to the patch or fold whose record names it."""
    origin = part.origin
    have = (origin.repository, origin.step, origin.parent, origin.base)
    need = (hop.repository, hop.end.step, hop.start.id, hop.base)
    if have != need:
        raise ChainError(
            "part-elsewhere",
            where=part.where,
            have=f"a part for step {origin.step} after {origin.parent[:12]}, repository {origin.repository[:12]}",
            need=f"step {need[1]} after {need[2][:12]}, repository {need[0][:12]}",
        )
