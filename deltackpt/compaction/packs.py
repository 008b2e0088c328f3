"""Packs for a repository: the records of neighboring steps in few objects (STORE section "Packs"). Plan -> show ->
execute.

What is planned follows from the names of records and packs alone. A pack that is large and holds all that is there of
its steps stays as it is; smaller ones go into the next, together with what came since, and a gc removes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deltackpt.errors import ConflictError, NotFoundError
from deltackpt.format.manifest import MAX_MANIFEST
from deltackpt.format.pack import FOLDER, MAX_PACK, PackName, encode, packs_of, record_of
from deltackpt.repository import Repository
from deltackpt.repository.packs import exact
from deltackpt.store import ObjectInfo
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

RECORDS = 512  # of a pack
BYTES = 1 << 20  # of a pack, unless one step has more
LEAST = 16  # records that no pack holds, from which on they are worth one
READERS = 16


@dataclass(frozen=True)
class PlannedPack:
    """A pack to make: of ``records`` manifests and edges, which lead to the steps ``first`` to ``last``; ``bytes`` of
    the pack."""

    first: int
    last: int
    records: int
    bytes: int


@dataclass(frozen=True)
class MadePack:
    """A pack that was made; ``records`` are fewer than planned where a gc was faster."""

    name: str
    first: int
    last: int
    records: int
    bytes: int


@dataclass(frozen=True)
class _Record:
    step: int
    sha256: str
    info: ObjectInfo


def plan_packs(repo: Repository) -> tuple[PlannedPack, ...]:
    """The packs that would spare a late reader requests; nothing is read but listings. None where all is packed, or too
    little is new."""
    listed = _listed(repo)
    packs = {name: info.size for info in repo.store.list(FOLDER) for name in packs_of([info.name])}
    there = [record.step for record in listed]
    whole = [pack for pack in packs if exact(pack, there)]
    done = [p for p in whole if 2 * p.records >= RECORDS or 2 * packs[p] >= BYTES]
    return tuple(_planned(listed, _apart(done), _apart(whole)))


def make_packs(repo: Repository, plan: Sequence[PlannedPack], progress: Progress = SILENT) -> tuple[MadePack, ...]:
    """Make them. Each record is proven by the sha256 of its name; one that is gone, or damaged, is left out.

    Raises what the store raises.
    """
    return tuple(made for made in _made(repo, plan, progress) if made is not None)


def _listed(repo: Repository) -> list[_Record]:
    """Every manifest and edge, by step."""
    infos = [info for folder in ("steps/", "edges/") for info in repo.store.list(folder)]
    found = [_Record(*key, info) for info in infos if (key := record_of(info.name)) is not None]
    return sorted(found, key=lambda record: (record.step, record.sha256))


def _apart(packs: Sequence[PackName]) -> list[PackName]:
    """Those of which no step is in a larger one, in order."""
    chosen: list[PackName] = []
    for pack in sorted(packs, key=lambda pack: (-pack.records, pack.first)):
        if all(pack.last < other.first or other.last < pack.first for other in chosen):
            chosen.append(pack)
    return sorted(chosen, key=lambda pack: pack.first)


def _planned(listed: Sequence[_Record], done: Sequence[PackName], whole: Sequence[PackName]) -> Iterator[PlannedPack]:
    for run in _runs(listed, done):
        for some, full in _cut(run):
            first, last, count = some[0].step, some[-1].step, len(some)
            packed = [pack.records for pack in whole if first <= pack.first and pack.last <= last]
            new = count - sum(packed)
            if count > 1 and (new >= LEAST or (full and new) or (len(packed) > 1 and not new)):
                yield PlannedPack(first, last, count, sum(record.info.size + 1 for record in some))


def _runs(listed: Sequence[_Record], done: Sequence[PackName]) -> Iterator[list[_Record]]:
    """The records between packs that stay as they are."""
    run: list[_Record] = []
    after = iter([*done, None])
    pack = next(after)
    for record in listed:
        while pack is not None and record.step > pack.last:
            yield run
            run, pack = [], next(after)
        if pack is None or record.step < pack.first:
            run.append(record)
    yield run


def _cut(run: Sequence[_Record]) -> Iterator[tuple[list[_Record], bool]]:
    """Pieces that a pack takes, and whether it is full; what there is of one step stays together."""
    some: list[_Record] = []
    size = 0
    for record in run:
        full = len(some) >= RECORDS or size + record.info.size > BYTES
        if some and full and record.step != some[-1].step:
            yield some, True
            some, size = [], 0
        some.append(record)
        size += record.info.size + 1
    if some:
        yield some, False


def _made(repo: Repository, plan: Sequence[PlannedPack], progress: Progress) -> Iterator[MadePack | None]:
    listed = _listed(repo)
    names = repo.manifests.packs.names()
    progress.start("packs", sum(one.bytes for one in plan))
    for one in plan:
        some = [record for record in listed if one.first <= record.step <= one.last]
        packed = repo.manifests.packs.records(names, [record.step for record in some])
        read = ordered_map(lambda record: _read(repo, record, packed), some, READERS)  # noqa: B023
        records = [(record.step, raw) for record, raw in zip(some, read, strict=True) if raw is not None]
        progress.advance(one.bytes)
        yield _put(repo, records) if len(records) > 1 and sum(len(raw) + 1 for _, raw in records) <= MAX_PACK else None


def _read(repo: Repository, record: _Record, packed: Mapping[str, bytes]) -> bytes | None:
    raw = packed.get(record.sha256)
    if raw is None:
        with suppress(NotFoundError):
            raw = repo.store.get(record.info.name, MAX_MANIFEST)
    return raw if raw is not None and hashlib.sha256(raw).hexdigest() == record.sha256 else None


def _put(repo: Repository, records: Sequence[tuple[int, bytes]]) -> MadePack:
    pack, data = encode(records)
    try:
        repo.store.put(pack.name, [data])  # [S-PACK-1]
    except ConflictError as error:  # its name is its hash: another process was faster
        if error.code != "object-exists":
            raise
    return MadePack(pack.name, pack.first, pack.last, pack.records, len(data))
