"""What of a repository a mirror copies: records in an order that is safe to put, and the objects that they name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from deltackpt.collector.inventory import Inventory
from deltackpt.errors import NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest
from deltackpt.format.pack import PackName, packs_of, record_of
from deltackpt.repository import Ref, Repository
from deltackpt.repository.packs import worth_keeping
from deltackpt.repository.paths import Node, cheapest


@dataclass(frozen=True)
class Selection:
    """``records`` are names of manifests and edges, each with every object that it names, side files included: parents
    before children, and an edge before the step that it leads to, which may have no other way; and of packs, which name
    none, after what they hold."""

    refs: tuple[Ref, ...]
    tags: tuple[Ref, ...]
    records: Mapping[str, tuple[File, ...]]


def everything(repo: Repository) -> Selection:
    """Every branch and tag, every step that can be restored, and every edge between such steps.

    A step that a branch is at is selected even if objects of it, or of its way, are not listed, or with other sizes:
    the copy of each finds out what is there.
    """
    inventory = Inventory.read(repo)
    ways = cheapest(inventory.nodes, inventory.edges, inventory.there)
    steps = {id_: node for id_, node in inventory.nodes.items() if id_ in ways}
    for ref in inventory.refs:
        if ref.link.id not in ways:
            found: dict[Link, Manifest] = {}
            _way(repo, ref.link, (), found)
            steps |= {link.id: Node.of(manifest, link) for link, manifest in found.items()}
    packs = packs_of(inventory.objects)
    return _selection(repo, inventory.refs, inventory.tags, steps.values(), inventory.edges, packs)


def since(repo: Repository, step: int, have: Collection[Link] = ()) -> Selection:
    """The branches from ``step`` on, and the cheapest way to restore the first of those; nothing of branches that end
    before it. Edges and tags that belong to these steps too.

    ``have``: steps that can be restored there already. Raises NotFoundError ``step-missing`` if no branch gets that
    far.
    """
    refs = [ref for ref in repo.refs() if ref.link.step >= step]
    if not refs:
        raise repo.gone(step)
    steps: dict[Link, Manifest] = {}
    for ref in refs:
        link: Link | None = ref.link
        first = ref.link
        while link is not None and link.step >= step and link not in steps:
            try:
                steps[link] = repo.load(link)
            except NotFoundError:
                if link == ref.link:
                    raise
                break
            first, link = link, steps[link].parent
        if link not in steps:  # else this branch joins one that is selected already
            _way(repo, first, have, steps)
    edges = [found for end in repo.edges().values() for found in end]
    packs = repo.manifests.packs.names()
    return _selection(repo, refs, repo.refs("tags/"), map(Node.of, steps.values(), steps), edges, packs)


def latest(repo: Repository, have: Collection[Link] = ()) -> Selection:
    """The newest step of each branch, and what the cheapest way to it needs."""
    refs = list(repo.refs())
    steps: dict[Link, Manifest] = {}
    edges: list[Edge] = []
    for ref in refs:
        edges += _way(repo, ref.link, have, steps)
    packs = repo.manifests.packs.names()
    return _selection(repo, refs, repo.refs("tags/"), map(Node.of, steps.values(), steps), edges, packs)


def news(repo: Repository, known: Collection[str]) -> Selection | None:
    """What came since the steps, edges and packs ``known`` by name; None where steps in between were collected."""
    refs = list(repo.refs())
    steps: dict[Link, Manifest] = {}
    for ref in refs:
        link: Link | None = ref.link
        while link is not None and link.name not in known and link not in steps:
            try:
                steps[link] = repo.load(link)
            except NotFoundError:
                return None
            link = steps[link].parent
    stored = repo.edges()
    edges = [stored.load(name) for name in stored.names if name not in known]
    packs, new = repo.manifests.packs.names(), map(Node.of, steps.values(), steps)
    return _selection(repo, refs, repo.refs("tags/"), new, edges, packs, known)


def _way(repo: Repository, link: Link, have: Collection[Link], steps: dict[Link, Manifest]) -> list[Edge]:
    """[S-MIR-6]: add the steps on the cheapest way to ``link``, from one that is there or from an anchor; -> the edges
    on it."""
    edges = repo.edges()
    ways = [repo.resolve(link, have=start) for start in have if start.step <= link.step] or [repo.resolve(link)]
    plan = min(ways, key=lambda plan: plan.bytes)
    begin = plan.anchor.link if plan.anchor else plan.patches[0].start if plan.patches else link
    for at in (begin, *(hop.end for hop in plan.patches)):
        steps[at] = repo.load(at)
    used = [e for e in edges.get(begin, ()) if e.start is None and e.files == plan.whole]
    return used + [e for hop in plan.patches if hop.fold for e in edges.get(hop.end, ()) if e.files == hop.files]


def _selection(
    repo: Repository,
    refs: Iterable[Ref],
    tags: Iterable[Ref],
    steps: Iterable[Node],
    edges: Iterable[Edge],
    packs: Iterable[PackName],
    there: Collection[str] = (),
) -> Selection:
    named = {node.link.name: node for node in steps}
    ends = {*named, *(name for name in there if name.startswith("steps/"))}
    records = {name: tuple(_files(repo, node)) for name, node in named.items()}
    for edge in edges:
        if edge.end.name in ends and (edge.start is None or edge.start.name in ends):
            records[edge.name] = edge.files
    numbers = [found[0] for name in {*records, *there} if (found := record_of(name)) is not None]
    records.update({pack.name: () for pack in worth_keeping(packs, numbers) if pack.name not in there})
    ordered = {name: records[name] for name in sorted(records, key=put_order)}
    return Selection(tuple(refs), tuple(tag for tag in tags if tag.link.name in ends), ordered)


def _files(repo: Repository, node: Node) -> Iterator[File]:
    yield from node.files
    for side in repo.layout_of(node.layout).side:
        yield side.file


def put_order(name: str) -> tuple[int, int]:
    """Sorts the names of records as they may be put: by step, an edge before the step's manifest, and a pack after the
    last one that it holds."""
    folder, _, rest = name.partition("/")
    numbers = rest.split("-")
    return int(numbers[folder == "packs"]), ("edges", "steps", "packs").index(folder)
