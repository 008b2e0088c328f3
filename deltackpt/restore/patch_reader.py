"""The parts of a patch, fetched from a store, hashed, and opened."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from deltackpt.errors import ChainError
from deltackpt.format.manifest import Manifest
from deltackpt.patch.index import PartIndex
from deltackpt.patch.part import PartReader
from deltackpt.patch.remote_part import RemotePart
from deltackpt.patch.source import PartSource
from deltackpt.patch.tensor import Part, PartsPatch
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.source import SMALL, RepositorySource, as_source, host_parts

RESERVE = 256  # descriptors for all else


class PatchReader(PartsPatch):
    """All parts of one patch or fold, which were checked: origin, tables, and the bytes of every part by sha256."""

    @classmethod
    @contextmanager
    def open(cls, source: Repository | PartSource, hop: Hop | Manifest) -> Iterator[PatchReader]:
        """The parts of a hop, or of the patch of a step."""
        if isinstance(hop, Manifest):
            hop = Hop.of(hop)
        found = as_source(source)
        yield cls._of(found, hop, iter(list(host_parts(found, hop.files))))

    @classmethod
    @contextmanager
    def open_all(cls, source: Repository | PartSource, hops: Sequence[Hop]) -> Iterator[list[PatchReader]]:
        """The patches of several hops; all of them are fetched and hashed before any is used."""
        yield list(cls.arriving(source, hops))  # [F-APPLY-4]

    @classmethod
    def arriving(cls, source: Repository | PartSource, hops: Sequence[Hop]) -> Iterator[PatchReader]:
        """The patches of several hops in order, each as soon as all its parts are fetched and hashed."""
        _raise_descriptor_limit(sum(f.size > SMALL for hop in hops for f in hop.files))
        found = as_source(source)
        views = host_parts(found, [file for hop in hops for file in hop.files])
        for hop in hops:
            yield cls._of(found, hop, views)

    @classmethod
    def _of(cls, source: PartSource, hop: Hop, views: Iterator[memoryview]) -> PatchReader:
        parts = []
        for file in hop.files:
            view = next(views)
            read, near = None, False
            if isinstance(source, RepositorySource):
                read, near = source.reads(file), source.in_room(file)
            parts.append(PartReader(view, f"{source.url}/{file.name}", read, near=near))
            check_origin(parts[-1], hop)
        return cls(parts)


def ranged_parts(repo: Repository, hop: Hop) -> list[Part]:
    """The parts of a hop, of which headers and tables are read now, and payloads by range when they are decoded.

    Where signatures are asked for they are fetched whole and proven first: checksums of tiles and digests of tensors
    withstand no forger. Raises FormatError, ChainError ``part-elsewhere``, NotFoundError ``object-missing``.
    """
    if repo.trust is not None:  # [S-SIG-14]
        return list(next(PatchReader.arriving(repo, [hop])).parts)
    parts = [RemotePart.open(repo.store, file.name, file.size) for file in hop.files]
    for part in parts:
        check_origin(part, hop)
    return [*parts]


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
    if have != need:  # [F-META-3] [F-EDGE-4]
        raise ChainError(
            "part-elsewhere",
            where=part.where,
            have=f"a part for step {origin.step} after {origin.parent[:12]}, repository {origin.repository[:12]}",
            need=f"step {need[1]} after {need[2][:12]}, repository {need[0][:12]}",
        )
