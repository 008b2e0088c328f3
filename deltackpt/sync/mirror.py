"""A copy of a repository in another store: plan -> show -> execute (STORE section "Mirroring").

Objects are put first, then the manifests and edges that name them, parents before children, and refs last: the target
is a whole repository at every instant. What is there counts once its sha256 was read back, or when a manifest that was
read back names it; never for its size. Nothing is ever removed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from deltackpt.collector.inventory import FOLDERS
from deltackpt.errors import ConflictError, FormatError, NotFoundError
from deltackpt.format.manifest import File, Link
from deltackpt.format.pack import FOLDER
from deltackpt.repository import Ref, Repository, chain
from deltackpt.repository.leases import lease
from deltackpt.repository.manifests import FAR
from deltackpt.repository.marker import MARKER, MAX_SMALL
from deltackpt.repository.objects import object_differs
from deltackpt.store import open_store
from deltackpt.sync import selection
from deltackpt.sync.mirror_plan import MirrorPlan, MirrorRecord, MirrorResult, RefMove, elsewhere, target_gone, windows
from deltackpt.sync.selection import Selection
from deltackpt.sync.signature_copy import SignatureCopy
from deltackpt.sync.transfer import BATCH, JOBS, Transfer, default_spool
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

if TYPE_CHECKING:
    from deltackpt.signing.policy import TrustPolicy

Start: TypeAlias = int | Literal["latest"] | None


def mirror(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    start: Start = None,
    force: bool = False,
    check: bool = False,
    limit: float | None = None,
    jobs: int = JOBS,
    spool: Path | None = None,
    progress: Progress = SILENT,
    trust: str | os.PathLike[str] | TrustPolicy | None = None,
) -> MirrorResult:
    """Copy what the store at ``target`` lacks of the repository at ``source``; both are paths or URLs.

    ``trust`` is that of `Repository.secure`: no branch or tag of the source is copied that no trusted key vouches for.
    ``start``, ``force`` and ``check`` are those of `Mirror`; ``limit`` is in bytes a second, ``jobs`` objects are in
    transit at a time, and ``spool`` is the folder of large ones that were fetched in part. Raises what `Mirror.plan`
    and `Mirror.execute` raise.
    """
    origin = Repository.open(source).secure(trust)
    transfer = Transfer(origin.store, open_store(target), limit, jobs, spool or default_spool(), progress)
    return Mirror(origin, transfer, start=start, force=force, check=check).run()


class Mirror:
    """From ``source`` to the store of ``transfer``. Remembers what it proved, so that a later plan reads only what is
    new.

    ``start``: a step from which on steps are wanted, "latest" for the newest of each branch alone, None for all.
    ``force``: move a ref although it holds steps that the source's does not lead to. ``check``: read back every object
    that is there, those of manifests that are there too.
    """

    def __init__(
        self,
        source: Repository,
        transfer: Transfer,
        *,
        start: Start = None,
        force: bool = False,
        check: bool = False,
    ) -> None:
        self._source, self._store = source, transfer.target
        self._transfer = transfer
        self._signatures = SignatureCopy(source.store, transfer.target)
        self._heads: tuple[Ref, ...] = ()  # of the source, when the last plan was made
        self._start, self._force, self._check = start, force, check
        self._proven_names: set[str] = set()  # records and objects that the target has
        self._copied_all = False  # once: then only what is new has to be looked at
        self._made = False  # the target is, or was, a copy of the source

    def plan(self) -> MirrorPlan:
        """Decide what is copied; nothing is changed.

        Raises ConflictError ``mirror-diverged``, ``mirror-elsewhere`` (the target is another repository),
        ``not-a-repository``, NotFoundError ``step-missing``, ``repository-missing`` for a target that was there when
        this was last called and is not any more, and what reading the two raises.
        """
        target = self._target()
        heads: dict[str, Ref] = {}
        if target is not None:  # by name, since a listing may be an old one
            heads = {r.name: found for r in self._source.refs() if (found := target.ref(r.name)) is not None}
        selected = self._select([ref.link for ref in heads.values()])
        self._heads = (*selected.refs, *selected.tags)
        moves = [self._move(ref, heads.get(ref.name), target) for ref in selected.refs]
        named = [self._tag(tag, target.tag(tag.name) if target else None) for tag in selected.tags]
        listed = {} if self._copied_all or target is None else self._listed()
        self._trust_records(selected, listed)
        records, later = [], set(self._proven_names)
        for name, files in selected.records.items():
            mine = [f for f in dict.fromkeys(files) if f.name not in later]
            later.update(f.name for f in mine)
            if mine or name not in self._proven_names:
                there = tuple(f for f in mine if f.name in listed)
                self._check_sizes(there, listed)
                away = tuple(f for f in mine if f.name not in listed)
                records.append(MirrorRecord(name, name not in self._proven_names, away, there))
        return MirrorPlan(
            source=self._source.store.url,
            target=self._store.url,
            id=self._source.id,
            fresh=target is None,
            records=tuple(records),
            refs=tuple(move for move in moves if move),
            tags=tuple(move for move in named if move),
            there=len({f.name for files in selected.records.values() for f in files} & self._proven_names),
        )

    def run(self) -> MirrorResult:
        """Plan and execute, with leases: nothing that is wanted is collected meanwhile, at either place."""
        with lease(self._source, None) as held:  # [S-MIR-5]
            try:
                return self.execute(self.plan(), leased=held is not None)
            finally:
                self._transfer.progress.finish()

    def copy_signatures(self) -> int:
        """Signatures that came since, of steps that were copied: of what the branches and tags are at -> how many."""
        if not self._copied_all:
            return 0
        return self._signatures.copy(self._proven_names, [ref.link.name for ref in self._heads])

    def execute(self, plan: MirrorPlan, *, leased: bool = False) -> MirrorResult:
        """Do what the plan says. Killed at any instant, the next plan continues from there.

        Raises ConflictError ``ref-moved`` if another writer moved a ref of the target meanwhile, FormatError
        ``object-hash`` for objects that are not what their manifest says, and what the stores raise.
        """
        began = time.monotonic()
        if plan.fresh:
            self._make()
            self._made = True
        target = Repository(self._store, self._source.id)
        proven = copied = size = 0
        with lease(target, None):  # [S-MIR-5]
            self._transfer.progress.start("mirror", plan.bytes)
            for window in windows(plan.records):  # [S-MIR-2]: objects, then records, then refs
                proving = [f for record in window for f in record.prove]
                gone = [f for f, there in zip(proving, self._proven(proving), strict=True) if not there]
                files = [*(f for record in window for f in record.copy), *gone]
                size += self._transfer.copy_all(files)
                copied, proven = copied + len(files), proven + len(proving) - len(gone)
                self._put_records([record.name for record in window if record.put])
                self._proven_names.update(record.name for record in window)
                self._proven_names.update(f.name for record in window for f in (*record.copy, *record.prove))
            news = {record.name for record in plan.records} | {ref.link.name for ref in self._heads}
            self._signatures.copy(self._proven_names, sorted(news))  # [S-SIG-16]
            self._move_all(target, plan)
        names = [record.name for record in plan.records if record.put]
        return MirrorResult(
            source=plan.source,
            target=plan.target,
            steps=plan.steps,
            edges=sum(name.startswith("edges/") for name in names),
            objects=copied,
            bytes=size,
            proven=proven,
            there=plan.there,
            refs=plan.refs,
            tags=plan.tags,
            leased=leased,
            seconds=round(time.monotonic() - began, 3),
        )

    # What there is

    def _target(self) -> Repository | None:
        """The repository at the target, None where there is nothing yet."""
        try:
            found = Repository.at(self._store)
        except NotFoundError as error:
            if error.code != "repository-missing":
                raise
            if self._made:  # [S-MIR-8]: a disk that is not mounted looks like an empty place
                raise target_gone(self._store.url, self._source.id) from None
            if next(iter(self._store.list("")), None) is None:
                return None
            # [S-MIR-1]
            need, hint = "a copy of the repository, or an empty place", "Choose a folder or prefix of its own."
            raise ConflictError(
                "not-a-repository", where=self._store.url, have="other files", need=need, hint=hint
            ) from None
        if found.id != self._source.id:  # [S-MIR-1]
            raise elsewhere(self._store.url, found.id, self._source.id)
        self._made = True
        return found

    def _select(self, heads: Sequence[Link]) -> Selection:
        have = [link for link in heads if self._has(link)]
        if self._start == "latest":
            return selection.latest(self._source, have)
        if self._start is not None:
            return selection.since(self._source, self._start, have)
        found = selection.news(self._source, self._proven_names) if self._copied_all else None
        return found or selection.everything(self._source)

    def _has(self, link: Link) -> bool:
        """Is a step of the target one of the source's too?"""
        try:
            self._source.load(link)
        except NotFoundError:
            return False
        return True

    def _listed(self) -> dict[str, int]:
        return {info.name: info.size for folder in FOLDERS for info in self._store.list(folder)}

    def _trust_records(self, selected: Selection, listed: Mapping[str, int]) -> None:
        """Read back the records that are there. What one of them names and the target lists, was there before it."""
        names = [name for name in selected.records if name in listed and name not in self._proven_names]
        for name in ordered_map(self._read_back, names, 1 if self._store.capabilities.local else self._transfer.jobs):
            if name is None:
                continue
            self._proven_names.add(name)
            if not self._check:
                self._proven_names.update(f.name for f in selected.records[name] if listed.get(f.name) == f.size)

    def _read_back(self, name: str) -> str | None:
        try:
            self._transfer.record(self._store, name)
        except NotFoundError:
            return None
        except FormatError:
            if not name.startswith(FOLDER):  # [S-PACK-3]: a damaged pack changes nothing, and verify names it
                raise
        return name

    def _check_sizes(self, files: Sequence[File], listed: Mapping[str, int]) -> None:
        for file in files:
            if listed[file.name] != file.size:  # [S-MIR-3]
                raise object_differs(f"{self._store.url}/{file.name}", listed[file.name], file)

    def _proven(self, files: Sequence[File]) -> list[bool]:
        return list(ordered_map(self._transfer.prove, files, self._transfer.jobs))

    # Refs and tags

    def _move(self, ref: Ref, there: Ref | None, target: Repository | None) -> RefMove | None:
        if there is None or target is None:
            return RefMove(ref.name, None, ref.link)
        if there.link == ref.link:
            return None
        load = self._source.manifests.loading_ahead(ref.link, FAR)
        leads = chain.descends(ref.link, there.link, load)
        if not leads and not self._force:  # [S-MIR-4]
            raise self._diverged(ref, there, collected=leads is None)
        return RefMove(ref.name, there.link, ref.link)

    def _diverged(self, ref: Ref, there: Ref, *, collected: bool) -> ConflictError:
        why = "does not lead to it"
        if collected:
            why = "can no longer tell, since the steps between were collected"
        ours, theirs = ref.link, there.link
        return ConflictError(
            "mirror-diverged",
            where=f"{self._store.url}, ref {ref.name}",
            have=f"step {theirs.step}, {theirs.id[:12]}; the source is at step {ours.step}, {ours.id[:12]}, and {why}",
            need="a step that the source's ref comes from",
            hint="Another writer published there, or the source was rewound. `deltackpt log` shows both; --force moves "
            "the ref all the same, and what it leaves behind stays until gc.",
        )

    def _tag(self, tag: Ref, there: Ref | None) -> RefMove | None:
        if there is not None and there.link == tag.link:
            return None
        if there is not None and not self._force:  # [S-MIR-4]
            raise ConflictError(
                "mirror-diverged",
                where=f"{self._store.url}, tag {tag.name}",
                have=f"step {there.link.step}, {there.link.id[:12]}",
                need=f"step {tag.link.step}, {tag.link.id[:12]}, as at the source",
                hint="Delete the tag there, or give --force.",
            )
        return RefMove(tag.name, there.link if there else None, tag.link)

    def _move_all(self, target: Repository, plan: MirrorPlan) -> None:
        for move in plan.tags:
            if move.old is not None:
                target.delete_tag(move.name)
            target.put_tag(move.name, move.new)
        for move in plan.refs:
            now = target.ref(move.name)
            if (now.link if now else None) != move.old:
                now = Ref(move.name, move.old, b"") if move.old else None  # the swap then says what is there
            target.move_ref(move.name, now, move.new)
        self._copied_all = True

    # Writing

    def _make(self) -> None:
        try:
            self._store.put(MARKER, [self._source.store.get(MARKER, MAX_SMALL)])
        except ConflictError:  # another mirror made it in between
            self._target()

    def _put_records(self, names: Sequence[str]) -> None:
        """In order, since each may be usable only after the one before; of a batch any may be first, but all follow."""
        bodies = [(name, raw) for name in names if (raw := self._record(name)) is not None]
        if self._store.capabilities.batch and len(bodies) > 1:
            for at in range(0, len(bodies), BATCH):
                try:
                    self._store.put_all(bodies[at : at + BATCH])
                except ConflictError:
                    self._put_each(bodies[at : at + BATCH])
        else:
            self._put_each(bodies)

    def _record(self, name: str) -> bytes | None:
        """A record of the source, proven; None for a pack that is damaged, or gone meanwhile ([S-PACK-3])."""
        try:
            return self._transfer.record(self._source.store, name)
        except (FormatError, NotFoundError):
            if name.startswith(FOLDER):
                return None
            raise

    def _put_each(self, bodies: Sequence[tuple[str, bytes]]) -> None:
        for name, raw in bodies:
            try:
                self._store.put(name, [raw])
            except ConflictError:  # its name is its hash
                self._read_back(name)
