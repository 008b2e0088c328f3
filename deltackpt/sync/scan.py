"""What is wrong with a copy of a repository, and what of it another copy can replace."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from deltackpt.errors import ChainError, DeltackptError, FormatError, NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.repository import Repository
from deltackpt.repository.marker import MARKER, MAX_SMALL
from deltackpt.sync.mirror_plan import elsewhere
from deltackpt.sync.transfer import Transfer
from deltackpt.util.parallel import ordered_map

T = TypeVar("T")

WRONG = (FormatError, ChainError, NotFoundError)  # the errors of damaged and missing objects


@dataclass(frozen=True)
class Damage:
    """An object that is ``gone``, or holds other bytes than ``file`` says."""

    file: File
    gone: bool


@dataclass
class DamageScan:
    """Reads all that the target of ``transfer`` has. ``left`` are the errors of what ``source`` cannot replace."""

    source: Repository
    transfer: Transfer
    checked: int = 0
    marker: list[Damage] = field(default_factory=list)
    objects: list[Damage] = field(default_factory=list)
    records: list[Damage] = field(default_factory=list)
    left: list[DeltackptError] = field(default_factory=list)

    def run(self) -> None:
        """Raises ConflictError ``mirror-elsewhere``, what `Repository.at` raises, and what the stores do."""
        self.target = self._target()
        self.stored = {repo: repo.edges() for repo in (self.target, self.source)}
        edges = [edge for name in self.stored[self.target].names if (edge := self._edge(name)) is not None]
        steps = self._steps(edges)
        for pack in self.target.manifests.packs.names():
            self._record(pack.name, lambda repo: repo)
        files = {f: None for m in steps for f in m.files} | {f: None for edge in edges for f in edge.files}
        for layout in dict.fromkeys(m.layout for m in steps):
            files.update(dict.fromkeys(self._side(layout)))
        self._hash(list(files))

    def _target(self) -> Repository:
        """The repository there. Where its marker is damaged, a manifest that is not damaged names it."""
        store, ours = self.transfer.target, self.source.id
        try:
            found = Repository.at(store)
        except (FormatError, NotFoundError) as error:
            found = Repository(store, ours)
            if not any(_loads(found, link) for link in found.steps()):
                raise
            self.marker.append(_damage(MARKER, self.source.store.get(MARKER, MAX_SMALL), error))
        if found.id != ours:
            raise elsewhere(store.url, found.id, ours)
        return found

    def _steps(self, edges: Iterable[Edge]) -> list[Manifest]:
        """Every step that is listed, that a ref or tag is at, or that another one follows and has no other way."""
        steps: dict[Link, Manifest | None] = {}
        wanted = {*self.target.steps(), *self._heads()}
        while wanted:
            for link in sorted(wanted, key=lambda link: link.name):
                steps[link] = self._manifest(link)
            rooted = {e.end for e in edges if e.start is None or steps.get(e.start) is not None}
            rooted |= {link for link, m in steps.items() if m is not None and m.anchor is not None}
            parents = {m.parent for link, m in steps.items() if m is not None and m.parent and link not in rooted}
            wanted = parents - steps.keys()
        return [m for m in steps.values() if m is not None]

    def _heads(self) -> Iterator[Link]:
        target = self.target
        for read, names in ((target.ref, target.ref_names()), (target.tag, target.ref_names("tags/"))):
            for name in names:
                try:
                    ref = read(name)
                except FormatError as error:  # no other object says which step it named
                    self.left.append(error)
                    continue
                if ref is not None:
                    yield ref.link

    def _manifest(self, link: Link) -> Manifest | None:
        return self._record(link.name, lambda repo: repo.load(link))

    def _edge(self, name: str) -> Edge | None:
        return self._record(name, lambda repo: self.stored[repo].load(name))

    def _record(self, name: str, load: Callable[[Repository], T]) -> T | None:
        """A manifest or edge of the target, or the source's in its place; None if neither is whole."""
        self.checked += 1
        repo = self.target
        try:
            self.transfer.record(repo.store, name)
        except WRONG as error:
            try:
                raw = self.transfer.record(self.source.store, name)
            except WRONG:
                self.left.append(error)
                return None
            self.records.append(_damage(name, raw, error))
            repo = self.source
        try:
            return load(repo)
        except WRONG as error:  # its bytes are those of its name: they were never right
            self.left.append(error)
            return None

    def _side(self, layout: File) -> Iterator[File]:
        for repo in (self.target, self.source):
            try:
                found = repo.layout_of(layout)
            except WRONG:
                continue
            yield from (side.file for side in found.side)
            return

    def _hash(self, files: list[File]) -> None:
        progress = self.transfer.progress
        progress.start("verify", sum(file.size for file in files))

        def one(file: File) -> tuple[DeltackptError | None, bool]:
            found = self.transfer.find_damage(file)
            progress.advance(file.size)
            return found, found is not None and self.transfer.source_has(file)

        for file, (error, replaceable) in zip(files, ordered_map(one, files, self.transfer.jobs), strict=True):
            self.checked += 1
            if replaceable:
                self.objects.append(Damage(file, isinstance(error, NotFoundError)))
            elif error is not None:
                self.left.append(error)


def _damage(name: str, raw: bytes, error: DeltackptError) -> Damage:
    """What ``error`` says of a record whose bytes should be ``raw``."""
    return Damage(File(name, len(raw), hashlib.sha256(raw).hexdigest()), isinstance(error, NotFoundError))


def _loads(repo: Repository, link: Link) -> bool:
    try:
        repo.load(link)
    except WRONG:
        return False
    return True
