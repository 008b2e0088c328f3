"""The whole graph of a repository: every step on any branch or none, folds, later anchors, refs and tags."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.format.edge import Edge
from deltackpt.format.manifest import Link
from deltackpt.gc.inventory import Inventory
from deltackpt.repository import Repository
from deltackpt.repository.paths import Node, branch


@dataclass(frozen=True)
class GraphStep:
    """``lane`` is the column it is drawn in. ``collected``: its parent is gone. ``left_behind``: no branch leads to it.
    ``refs`` and ``tags`` are those that point at it."""

    step: int
    id: str
    parent: int | None
    parent_id: str | None
    lane: int
    collected: bool
    left_behind: bool
    anchor: bool
    later_anchor: bool
    folds_from: tuple[int, ...]
    refs: tuple[str, ...]
    tags: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """Newest step first."""

    repository: str
    lanes: int
    steps: tuple[GraphStep, ...]

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def graph(repo: Repository) -> Graph:
    """Raises FormatError for a damaged manifest."""
    inventory = Inventory.read(repo)
    nodes = sorted(inventory.nodes.values(), key=lambda node: (node.link.step, node.link.id), reverse=True)
    lanes = _lanes(nodes, [ref.link for ref in inventory.refs])
    into: dict[Link, list[Edge]] = {}
    for edge in inventory.edges:
        into.setdefault(edge.end, []).append(edge)
    on_branch = {node.link.id for ref in inventory.refs for node in branch(ref.link, inventory.nodes)}
    # Where history was collected, a step below cannot be told to be left behind.
    begin = min((node.link.step for node in nodes if node.link.id in on_branch), default=0)

    def one(node: Node) -> GraphStep:
        edges = into.get(node.link, [])
        return GraphStep(
            step=node.link.step,
            id=node.link.id,
            parent=node.parent.step if node.parent else None,
            parent_id=node.parent.id if node.parent else None,
            lane=lanes[node.link.id],
            collected=node.parent is not None and node.parent.id not in inventory.nodes,
            left_behind=node.link.id not in on_branch and node.link.step >= begin,
            anchor=node.anchor is not None,
            later_anchor=any(edge.start is None for edge in edges),
            folds_from=tuple(sorted(edge.start.step for edge in edges if edge.start)),
            refs=tuple(ref.name for ref in inventory.refs if ref.link == node.link),
            tags=tuple(tag.name for tag in inventory.tags if tag.link == node.link),
        )

    return Graph(repo.store.url, max(lanes.values(), default=0) + 1, tuple(map(one, nodes)))


def _lanes(nodes: list[Node], heads: list[Link]) -> dict[str, int]:
    """A column for every step: that of the newest child which continues it; a new one for every other tip."""
    lanes: dict[str, int] = {}
    claimed: dict[str, int] = {}
    free = 0
    order = {head.id: i for i, head in enumerate(heads)}
    for node in sorted(nodes, key=lambda n: (-n.link.step, order.get(n.link.id, len(order)))):
        if node.link.id not in claimed:
            claimed[node.link.id] = free
            free += 1
        lane = lanes[node.link.id] = claimed[node.link.id]
        if node.parent is not None:
            claimed[node.parent.id] = min(claimed.get(node.parent.id, lane), lane)
    return lanes
