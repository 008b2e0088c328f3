"""What a repository holds, read once: every manifest, edge, ref, tag, lease and object, and a fingerprint of what may
move.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from deltackpt.errors import ChainError, DeltackptError, FormatError, NotFoundError
from deltackpt.format.canonical import dumps
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import MAX_MANIFEST, File, Link
from deltackpt.format.pack import PackName, packs_of
from deltackpt.repository import Ref, Repository
from deltackpt.repository.edges import StoredEdges
from deltackpt.repository.leases import Lease, read_leases
from deltackpt.repository.paths import Node
from deltackpt.store import ObjectInfo
from deltackpt.util.parallel import ordered_map

READERS = 16  # manifests that are asked for at a time where each takes a request
TOGETHER = 4096  # manifests that are held at a time
# In the order in which a gc removes them.
PAYLOADS = ("packs/", "signatures/", "patches/", "folds/", "states/", "anchors/")
FOLDERS = ("steps/", "edges/", *PAYLOADS)


@dataclass(frozen=True)
class Inventory:
    """``now`` is the store's clock in seconds, ``objects`` and ``nodes`` are by name and by id.

    The clock is read first, so that nothing looks older than it is; refs before the steps, so that no step is missing
    that a ref names; leases last: a writer whose step is listed still has its lease then, or has moved its ref since.
    """

    now: float
    refs: tuple[Ref, ...]
    tags: tuple[Ref, ...]
    leases: tuple[Lease, ...]
    objects: dict[str, ObjectInfo]
    nodes: dict[str, Node]
    edges: tuple[Edge, ...]
    broken: tuple[DeltackptError, ...]  # of the edges that cannot be read

    @classmethod
    def read(cls, repo: Repository) -> Inventory:
        """Raises FormatError for a manifest that is damaged, or a record of a newer version: what it needs cannot be
        told ([S-GC-1]). A step that a gc removes meanwhile is not in it."""
        now = repo.store.now()
        refs, tags = tuple(repo.refs()), tuple(repo.refs("tags/"))
        objects = {info.name: info for folder in FOLDERS for info in repo.store.list(folder)}
        links = repo.listed(objects)
        nodes = dict(_nodes(repo, links, packs_of(objects)))
        for link in links:
            if link.id not in nodes:
                del objects[link.name]
        edges, broken = _edges(repo)
        return cls(now, refs, tags, tuple(read_leases(repo)), objects, nodes, edges, broken)

    def age(self, name: str) -> float:
        """Seconds since the object was put, by the store's clock."""
        return self.now - self.objects[name].modified

    def there(self, files: Iterable[File]) -> bool:
        """Are all of these in the store, with their sizes?"""
        return all((info := self.objects.get(f.name)) is not None and info.size == f.size for f in files)

    @property
    def live(self) -> list[Lease]:
        """The leases that have not lapsed."""
        return [lease for lease in self.leases if lease.expires > self.now]

    @property
    def fingerprint(self) -> str:
        """Of all that must be the same when a plan is executed ([S-GC-5])."""
        return fingerprint([*self.refs, *self.tags], self.objects)


def fingerprint(refs: Iterable[Ref], names: Iterable[str]) -> str:
    """Of the refs and tags, and of the names of all manifests and edges."""
    moving = [[ref.name, ref.link.to_dict()] for ref in refs]
    return hashlib.sha256(dumps([moving, sorted(n for n in names if n.startswith(FOLDERS[:2]))])).hexdigest()


def current_fingerprint(repo: Repository) -> str:
    """What the fingerprint is now."""
    refs = [*repo.refs(), *repo.refs("tags/")]
    return fingerprint(refs, [info.name for folder in FOLDERS[:2] for info in repo.store.list(folder)])


def _nodes(repo: Repository, links: Sequence[Link], packs: Sequence[PackName]) -> Iterator[tuple[str, Node]]:
    """The steps that were listed, by id, of packs where that spares requests; without those removed meanwhile."""
    known = repo.manifests.packs
    readers = 1 if repo.store.capabilities.local else READERS
    for at in range(0, len(links), TOGETHER):
        some = links[at : at + TOGETHER]
        found = known.records(packs, [link.step for link in some]) if known.useful else {}
        nodes = ordered_map(lambda link: _there(repo, link, found.get(link.id)), some, readers)  # noqa: B023
        yield from ((link.id, node) for link, node in zip(some, nodes, strict=True) if node is not None)


def _there(repo: Repository, link: Link, packed: bytes | None) -> Node | None:
    """A step that was listed, None if it was removed meanwhile."""
    try:
        return _node(repo, link, packed)
    except NotFoundError:
        if any(repo.store.list(link.name)):  # listed and not found: no plan can be made of such a store
            raise
        return None


def _node(repo: Repository, link: Link, packed: bytes | None) -> Node:
    raw = repo.store.get(link.name, MAX_MANIFEST) if packed is None else packed
    if hashlib.sha256(raw).hexdigest() == link.id:  # [S-NAME-6]
        try:
            return Node.peek(raw, link)
        except (KeyError, TypeError, ValueError):
            pass
    return Node.of(repo.load(link), link)


def _edges(repo: Repository) -> tuple[tuple[Edge, ...], tuple[DeltackptError, ...]]:
    """Those that can be read, and the errors of the others, which a gc removes unless a wanted step may need them."""
    stored = StoredEdges(repo.store, repo.id, packs=repo.manifests.packs)
    found: list[Edge] = []
    broken: list[DeltackptError] = []
    for name in stored.names:
        try:
            found.append(stored.load(name))
        except (FormatError, ChainError) as error:
            if error.code == "version-unknown":  # [S-GC-1]: no damage, the release that wrote it can read it
                raise
            broken.append(error)
        except NotFoundError:  # removed meanwhile
            continue
    return tuple(found), tuple(broken)
