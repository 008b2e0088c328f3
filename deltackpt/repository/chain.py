"""The graph of steps. Pure: manifests in, plans out, no I/O. Every rule of lineage lives here, and only here.

Nodes are steps, by id. A patch leads from a parent to its child, a fold from a step to a later one, and an anchor from
nowhere to its step. A parent that is gone is the beginning of history where the step has another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TypeAlias

from deltackpt.errors import ChainError, NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link, Manifest

Load: TypeAlias = Callable[[Link], Manifest]
Edges: TypeAlias = Mapping[Link, Sequence[Edge]]  # by the step that they lead to

NO_EDGES: Edges = {}


@dataclass(frozen=True)
class Hop:
    """One move: the parts ``files`` take the state of ``start``, whose digest is ``base``, to the state of ``end``."""

    repository: str
    start: Link
    end: Link
    base: str
    files: tuple[File, ...]
    fold: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the parts."""
        return sum(f.size for f in self.files)

    @classmethod
    def of(cls, step: Manifest, own: Link | None = None) -> Hop:
        """The patch of a step; ``own`` spares hashing its manifest."""
        assert step.parent is not None
        return cls(step.repository, step.parent, own or step.link, step.base or "", step.patch or ())


@dataclass(frozen=True)
class Plan:
    """How to reach ``target``: from the ``anchor`` (None: from the state that is there), then ``patches`` in order.

    ``whole`` are the files of the anchor, named by its manifest or by an edge.
    """

    target: Manifest
    anchor: Manifest | None
    patches: tuple[Hop, ...]
    whole: tuple[File, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of payload to read."""
        return sum(f.size for f in self.whole) + sum(hop.bytes for hop in self.patches)


def walk(target: Link, load: Load, edges: Edges = NO_EDGES) -> Iterator[Manifest]:
    """The chain from ``target`` back to its first step, newest first; each manifest is checked against its child.

    Ends where a parent was collected and a step after it has another way: the last one's ``parent`` is then not among
    them. Raises ChainError ``chain-differs`` where a child and its parent do not agree, NotFoundError
    ``object-missing`` for a step that all after it need.
    """
    link: Link | None = target
    child: Manifest | None = None
    rooted = False
    while link is not None:
        try:
            manifest = load(link)
        except NotFoundError:
            if rooted:
                break
            raise
        if child is not None:
            check_parent(child, manifest)
        yield manifest
        rooted = rooted or manifest.anchor is not None or bool(edges.get(link))
        child, link = manifest, manifest.parent


def check_parent(child: Manifest, parent: Manifest) -> None:
    """A child names its parent's repository, step and state; the id is checked where the parent was loaded."""
    step = child.parent.step if child.parent else None
    _check(child.step, (child.repository, step, child.base), parent)


def _check(step: int, need: tuple[str, int | None, str | None], parent: Manifest) -> None:
    if (parent.repository, parent.step, parent.state) != need:  # [F-MAN-7]
        raise ChainError(
            "chain-differs",
            where=f"step {step}",
            have=f"a parent of step {parent.step}, state {parent.state[:16]}, repository {parent.repository}",
            need=f"step {need[1]}, state {(need[2] or '')[:16]}, repository {need[0]}",
            hint="`deltackpt verify` shows what is left of the chain.",
        )


def descends(target: Link, ancestor: Link, load: Load) -> bool | None:
    """Is ``ancestor`` on the chain of ``target``? None where the steps between them are not all there."""
    link: Link | None = target
    while link is not None and link.step > ancestor.step:
        try:
            link = load(link).parent
        except NotFoundError:
            return None
    return link == ancestor


def resolve(target: Link, load: Load, *, have: Link | None = None, edges: Edges = NO_EDGES) -> Plan:
    """The cheapest way, in bytes, to the state of ``target``, for a reader that holds the state of ``have``.

    Searches backwards from the target by bytes (Dijkstra, 1959); of ways that cost the same the one with fewer hops. It
    loads only what is nearer than the answer. Raises ChainError ``chain-broken`` where no way leads to the target.
    """
    onward: dict[str, Hop] = {}  # by id: the hop from that step towards the target
    done: set[str] = set()
    heap: list[tuple[int, int, int, Link, Hop | None, tuple[File, ...] | None]] = [(0, 0, 0, target, None, None)]
    number, lost = 0, ""
    while heap:
        cost, hops, _, link, via, whole = heappop(heap)
        if whole is not None:
            return _plan(target, link, load, onward, whole)
        if link.id in done:
            continue
        if link == have and via is not None and not via.fold:
            onward[link.id] = via
            return _plan(target, None, load, onward, (), have)
        try:
            manifest = load(link)
        except NotFoundError:
            if via is None:
                raise
            lost = lost or f", as step {link.step} is gone"
            continue
        if via is not None:
            via = replace(via, base=manifest.state) if via.fold else via
            _check(via.end.step, (via.repository, via.start.step, via.base), manifest)
            onward[link.id] = via
        done.add(link.id)
        if link == have:
            return _plan(target, None, load, onward, (), have)
        ways: list[tuple[Link, Hop | None, tuple[File, ...] | None]] = []
        if manifest.anchor is not None:
            ways.append((link, None, manifest.anchor))
        if manifest.patch is not None and manifest.parent is not None:
            ways.append((manifest.parent, Hop.of(manifest, link), None))
        for edge in edges.get(link, ()):
            if edge.start is None:
                ways.append((link, None, edge.files))
            else:
                ways.append((edge.start, Hop(edge.repository, edge.start, link, "", edge.files, fold=True), None))
        for at, hop, anchor in ways:
            number += 1
            size = sum(f.size for f in (anchor if hop is None else hop.files) or ())
            heappush(heap, (cost + size, hops + 1, number, at, hop, anchor))
    raise ChainError(  # [F-EDGE-7]: edges were among the ways
        "chain-broken",
        where=f"step {target.step}",
        have=f"a chain that reaches no anchor{lost}",
        need="an anchor, and patches from there",
        hint="`deltackpt verify` shows which steps can be restored.",
    )


def next_step(target: Link, load: Load, have: Link) -> Plan | None:
    """The plan of a reader that holds the parent, where the patch is smaller than the step's anchor; None for others.

    No fold is of use to it.
    """
    manifest = load(target)
    if manifest.parent != have or manifest.patch is None:
        return None
    hop = Hop.of(manifest, target)
    if manifest.anchor is not None and sum(f.size for f in manifest.anchor) <= hop.bytes:
        return None
    return Plan(manifest, None, (hop,))


def between(start: Link, end: Link, load: Load, edges: Edges = NO_EDGES) -> tuple[Hop, ...]:
    """The cheapest patches and folds from one step to a later one. Raises ChainError ``chain-broken`` if none lead
    there.
    """
    folds = {to: [edge for edge in found if edge.start is not None] for to, found in edges.items()}
    return resolve(end, lambda link: replace(load(link), anchor=None), have=start, edges=folds).patches


def _plan(
    target: Link,
    anchor: Link | None,
    load: Load,
    onward: Mapping[str, Hop],
    whole: tuple[File, ...],
    have: Link | None = None,
) -> Plan:
    hops: list[Hop] = []
    at = anchor or have or target
    while at != target:
        hops.append(onward[at.id])
        at = hops[-1].end
    return Plan(load(target), load(anchor) if anchor else None, tuple(hops), whole)


def index(manifests: Mapping[str, Manifest]) -> Load:
    """A loader over manifests that are in memory, by id."""

    def load(link: Link) -> Manifest:
        if link.id not in manifests:
            raise NotFoundError("object-missing", where=link.name, have="no such manifest", need="a published step")
        return manifests[link.id]

    return load
