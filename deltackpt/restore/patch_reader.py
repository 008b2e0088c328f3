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

from deltackpt.errors import ChainError
from deltackpt.format.manifest import File, Manifest
from deltackpt.patch.index import PartIndex
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import PartsPatch
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.repository.repository import object_differs
from deltackpt.util.disk import ensure_space, space_errors
from deltackpt.util.parallel import ordered_map

SMALL = 64 << 10  # bytes
FETCHES = 8  # parts on their way at a time
RESERVE = 256  # descriptors for all else


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


class PatchReader(PartsPatch):
    """All parts of one patch or fold, which were checked: origin, tables, and the bytes of every part by sha256."""

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
        _raise_descriptor_limit(sum(f.size > SMALL for hop in hops for f in hop.files))
        views = _mapped(repo, [file for hop in hops for file in hop.files])
        for hop in hops:
            yield cls._of(repo, hop, views)

    @classmethod
    def _of(cls, repo: Repository, hop: Hop, views: Iterator[memoryview]) -> PatchReader:
        parts = []
        for file in hop.files:
            parts.append(PartReader(next(views), f"{repo.store.url}/{file.name}"))
            check_origin(parts[-1], hop)
        return cls(parts)


def _raise_descriptor_limit(maps: int) -> None:
    """Let this process open the descriptors that it needs, if the system allows: a chain has many mapped parts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = maps + RESERVE
    if soft != resource.RLIM_INFINITY and soft < need:
        with suppress(ValueError, OSError):  # then the system says that there are too many
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (need if hard == resource.RLIM_INFINITY else min(need, hard), hard)
            )


def check_origin(part: PartIndex, hop: Hop) -> None:
    """Raise ChainError ``part-elsewhere`` unless a part belongs to the patch or fold whose record names it."""
    origin = part.origin
    have = (origin.repository, origin.step, origin.parent, origin.base)
    need = (hop.repository, hop.end.step, hop.start.id, hop.base)
    if have != need:  # [F-META-3]
        raise ChainError(
            "part-elsewhere",
            where=part.where,
            have=f"a part for step {origin.step} after {origin.parent[:12]}, repository {origin.repository[:12]}",
            need=f"step {need[1]} after {need[2][:12]}, repository {need[0][:12]}",
        )
