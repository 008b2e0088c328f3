"""What a step needs: the cheapest way to every step at once, over all manifests and edges. Pure: no I/O.

`chain.resolve` answers for one step and loads as little as it can; a gc asks for all steps, and has all manifests in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from deltackpt.format.edge import Edge
from deltackpt.format.manifest import FORMAT, VERSION, File, Link, Manifest


@dataclass(frozen=True)
class Node:
    """A manifest, as far as reachability goes. Ten thousand of these are held at once, so it is no more than that."""

    __slots__ = ("anchor", "digests", "layout", "link", "parent", "patch")

    link: Link
    parent: Link | None
    anchor: tuple[File, ...] | None
    patch: tuple[File, ...] | None
    layout: File
    digests: File

    @property
    def files(self) -> Iterator[File]:
        """Every object that the step names."""
        yield from self.anchor or ()
        yield from self.patch or ()
        yield self.layout
        yield self.digests

    @classmethod
    def of(cls, m: Manifest, link: Link) -> Node:
        """From a manifest that was loaded by ``link``."""
        return cls(link, m.parent, m.anchor, m.patch, m.layout, m.digests)

    @classmethod
    def peek(cls, raw: bytes, link: Link) -> Node:
        """From the bytes of a manifest whose sha256 was checked. Raises KeyError, TypeError or ValueError for any
        other: `Repository.load` then says what is wrong."""
        value = json.loads(raw)
        if (value["format"], value["version"], value["step"]) != (FORMAT, VERSION, link.step) or "requires" in value:
            raise ValueError(link)  # it may need objects that are not known here
        return cls(
            link,
            None if value["parent"] is None else _link(**value["parent"]),
            _files(value["anchor"]),
            _files(value["patch"]),
            _file(**value["layout"]),
            _file(**value["digests"]),
        )


def _link(step: Any, id: Any) -> Link:
    if type(step) is not int or type(id) is not str:
        raise ValueError(id)
    return Link(step, id)


def _file(name: Any, size: Any, sha256: Any) -> File:
    if type(name) is not str or type(size) is not int or size < 0 or type(sha256) is not str:
        raise ValueError(name)
    return File(name, size, sha256)


def _files(value: Any) -> tuple[File, ...] | None:
    return None if value is None else tuple([_file(**item) for item in value])


@dataclass(frozen=True)
class Way:
    """The last move of the cheapest way to a step: from ``start`` (None: an anchor), by ``edge`` or by the step's own
    patch or anchor. ``cost`` counts the bytes of the whole way."""

    cost: int
    start: str | None
    edge: Edge | None


def cheapest(
    nodes: Mapping[str, Node], edges: Iterable[Edge], there: Callable[[tuple[File, ...]], bool]
) -> dict[str, Way]:
    """The cheapest way to every step that has one (Dijkstra, 1959), ties as in `chain.resolve`: fewer hops first.

    ``there`` says whether all of some files are in the store: a way over missing ones is none.
    """
    onward: dict[str, list[tuple[str, tuple[File, ...], Edge | None]]] = {}
    heap: list[tuple[int, int, int, str, str | None, Edge | None]] = []
    number = 0

    def push(cost: int, hops: int, files: tuple[File, ...], to: str, start: str | None, edge: Edge | None) -> None:
        nonlocal number
        number += 1
        heappush(heap, (cost + sum(f.size for f in files), hops + 1, number, to, start, edge))

    for id_, node in nodes.items():
        if node.anchor is not None and there(node.anchor):
            push(0, 0, node.anchor, id_, None, None)
        if node.patch is not None and node.parent is not None and there(node.patch):
            onward.setdefault(node.parent.id, []).append((id_, node.patch, None))
    for edge in edges:
        if edge.end.id not in nodes or not there(edge.files):
            continue
        if edge.start is None:
            push(0, 0, edge.files, edge.end.id, None, edge)
        else:
            onward.setdefault(edge.start.id, []).append((edge.end.id, edge.files, edge))
    ways: dict[str, Way] = {}
    while heap:
        cost, hops, _, id_, start, edge_in = heappop(heap)
        if id_ in ways:
            continue
        ways[id_] = Way(cost, start, edge_in)
        for to, files, edge_out in onward.get(id_, ()):
            if to not in ways:
                push(cost, hops, files, to, id_, edge_out)
    return ways


def branch(head: Link, nodes: Mapping[str, Node]) -> Iterator[Node]:
    """The steps of a branch that are there, newest first, up to where history was collected."""
    link: Link | None = head
    while link is not None and (node := nodes.get(link.id)) is not None:
        yield node
        link = node.parent
