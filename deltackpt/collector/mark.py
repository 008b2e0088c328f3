"""What a gc keeps: the steps that are wanted, what they need, and the objects of both, each with the reason ([S-GC-1],
[S-GC-2], [S-GC-4])."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from deltackpt.collector.inventory import Inventory
from deltackpt.collector.retention import Policy, kept
from deltackpt.errors import ChainError, NotFoundError
from deltackpt.format.edge import Edge
from deltackpt.format.manifest import File, Link
from deltackpt.format.pack import packs_of
from deltackpt.repository import Repository, chain
from deltackpt.repository.chain import Hop
from deltackpt.repository.leases import Lease
from deltackpt.repository.packs import worth_keeping
from deltackpt.repository.paths import Node, branch, cheapest
from deltackpt.repository.signatures import FOLDER as SIGNATURES
from deltackpt.repository.signatures import signed_id


class Reachable:
    """What stays, computed when this is made: `objects` with the reasons, and `rebases`.

    Raises FormatError, ChainError for an edge that cannot be read where a step that is wanted has no other way,
    ChainError ``chain-broken`` for a ref or tag that has none.
    """

    def __init__(self, repo: Repository, inventory: Inventory, policy: Policy) -> None:
        self._repo, self._inventory = repo, inventory
        self._nodes = inventory.nodes
        self._ways = cheapest(inventory.nodes, inventory.edges, inventory.there)
        self.roots = self._roots(policy)
        self.needed: dict[str, str] = {}  # by id: every step that stays, and why
        self.used: dict[str, Edge] = {}  # by name: every edge that stays
        self._followed: set[str] = set()
        self._past: set[str] = set()
        self._check_heads()
        for id_ in self.roots:
            self._follow(id_)
        by_end: dict[Link, list[Edge]] = {}
        for edge in inventory.edges:
            by_end.setdefault(edge.end, []).append(edge)
        for lease in inventory.live:
            self._pin(lease, by_end)
        for edge in inventory.edges:
            self._consider(edge, policy)

    def _roots(self, policy: Policy) -> dict[str, str]:
        inventory = self._inventory
        heads = [(f"ref {ref.name}", ref.link) for ref in inventory.refs]
        ages = {id_: inventory.age(node.link.name) for id_, node in self._nodes.items()}
        why = kept(policy, self._nodes, ages, heads)
        for tag in inventory.tags:
            why.setdefault(tag.link.id, f"tag {tag.name}")
        first = min((lease.since for lease in inventory.live), default=None)
        for lease in inventory.live:
            for link in (lease.link, lease.have):
                if link is not None:
                    why.setdefault(link.id, f"lease of {lease.holder}")
            if lease.link is None:
                for id_ in self._nodes:
                    why.setdefault(id_, f"lease of {lease.holder} on every step")
        if not heads:  # a ref that was lost, or that another copy has: what was left behind is not known
            for id_ in self._nodes:
                why.setdefault(id_, "no ref is there")
        on_branch = {node.link.id for _, head in heads for node in branch(head, self._nodes)}
        for id_, node in self._nodes.items():
            if ages[id_] < policy.grace:  # [S-GC-4]
                why.setdefault(id_, "younger than the grace time")
            elif not self._repo.store.capabilities.clock and id_ not in on_branch:
                why.setdefault(id_, "of an age that the store cannot tell")
            elif first is not None and inventory.objects[node.link.name].modified >= first - 1:
                why.setdefault(id_, "published since a live lease began")
        for name, head in heads:
            if (newest := self._newest_anchor(head)) is not None:
                why.setdefault(newest, f"newest anchor of {name}")  # [S-GC-2]
        return {id_: reason for id_, reason in why.items() if id_ in self._nodes}

    def _check_heads(self) -> None:
        """[S-GC-1]: what a ref or tag needs and is missing may come back from a mirror, and then needs objects that
        nothing seems to need meanwhile."""
        inventory = self._inventory
        for kind, named in (("ref", inventory.refs), ("tag", inventory.tags)):
            for ref in named:
                if ref.link.id in self._ways:
                    continue
                if inventory.broken:  # [S-GC-1]
                    raise inventory.broken[0]
                raise ChainError(  # [S-GC-1]
                    "chain-broken",
                    where=f"{self._repo.store.url}, {kind} {ref.name}",
                    have=f"no intact way to step {ref.link.step}, and steps that may belong to it",
                    need="a step that can be restored, before anything is removed",
                    hint="`deltackpt verify REPO` tells what is gone; `deltackpt mirror MIRROR REPO --repair` puts it "
                    "back. Without a mirror, `write --resume-from STEP` takes the ref back to a step that is whole.",
                )

    def _newest_anchor(self, head: Link) -> str | None:
        edges, there = self._inventory.edges, self._inventory.there
        later = {edge.end.id for edge in edges if edge.start is None and there(edge.files)}
        for node in branch(head, self._nodes):
            if (node.anchor is not None and there(node.anchor)) or node.link.id in later:
                return node.link.id
        return None

    def _follow(self, root: str) -> None:
        """A root, and the steps and edges on the cheapest way to it."""
        self.needed[root] = self.roots[root]
        reason = f"on the way to step {self._nodes[root].link.step}"
        at = root
        while at not in self._followed:
            self._followed.add(at)
            way = self._ways.get(at)
            if way is None:  # nothing leads there: keep what is left of its past
                if self._inventory.broken:  # [S-GC-1]: it may be what led there, and be readable the next time
                    raise self._inventory.broken[0]
                for node in branch(self._nodes[at].link, self._nodes):
                    if node.link.id in self._past:
                        return
                    self._past.add(node.link.id)
                    self.needed.setdefault(node.link.id, self.roots.get(node.link.id, f"{reason}, which is broken"))
                return
            if way.edge is not None:
                self.used[way.edge.name] = way.edge
            if way.start is None:
                return
            at = way.start
            self.needed.setdefault(at, self.roots.get(at, reason))

    def _pin(self, lease: Lease, by_end: dict[Link, list[Edge]]) -> None:
        """Every way that the holder of a lease may have chosen."""
        if lease.link is None:
            self.used.update({edge.name: edge for edge in self._inventory.edges})
            return
        ways: list[tuple[Hop, ...]] = []
        for have in (None, lease.have):
            with suppress(ChainError, NotFoundError):
                ways.append(chain.resolve(lease.link, self._repo.load, have=have, edges=by_end).patches)
        if lease.have is not None:
            with suppress(ChainError, NotFoundError):
                ways.append(chain.between(lease.have, lease.link, self._repo.load, by_end))
        for way in ways:
            for link in {lease.link, *(hop.start for hop in way), *(hop.end for hop in way)}:
                if link.id in self._nodes:
                    self.needed.setdefault(link.id, f"lease of {lease.holder}")
            folds = {hop.files for hop in way if hop.fold}
            begin = way[0].start if way else lease.link
            found = [edge for hop in way for edge in by_end.get(hop.end, ()) if edge.start and edge.files in folds]
            found += [edge for edge in by_end.get(begin, ()) if edge.start is None]
            self.used.update({edge.name: edge for edge in found})

    def _consider(self, edge: Edge, policy: Policy) -> None:
        """A fold between two steps that stay saves their readers bytes; one that is young is kept as well."""
        stays = edge.end.id in self.needed and edge.start is not None and edge.start.id in self.needed
        if stays or self._inventory.age(edge.name) < policy.grace:
            self.used[edge.name] = edge

    def objects(self) -> dict[str, str]:
        """Every object that stays, and why. Raises FormatError, NotFoundError for a layout that cannot be read."""
        keep: dict[str, str] = {}
        layouts: dict[File, int] = {}
        for id_, why in self.needed.items():
            node = self._nodes[id_]
            reason = f"step {node.link.step}: {why}"
            keep[node.link.name] = reason
            for file in node.files:
                keep.setdefault(file.name, reason)
            layouts.setdefault(node.layout, node.link.step)
        for name, edge in self.used.items():
            what = f"fold from {edge.start.step} to" if edge.start else "later anchor of"
            keep[name] = f"{what} step {edge.end.step}"
            for file in edge.files:
                keep.setdefault(file.name, keep[name])
        signed = {*self.needed, *(name[-69:-5] for name in self.used)}
        for name in self._inventory.objects:
            if name.startswith(SIGNATURES) and signed_id(name) in signed:  # [S-SIG-16]
                keep[name] = "signature of a step or edge that stays"
        for file, step in layouts.items():
            for side in self._repo.layout_of(file).side:
                keep.setdefault(side.file.name, f"side file of step {step}")
        stay = [self._nodes[id_].link.step for id_ in self.needed] + [edge.end.step for edge in self.used.values()]
        for pack in worth_keeping(packs_of(self._inventory.objects), stay):  # [S-PACK-4]
            keep[pack.name] = f"pack of steps {pack.first} to {pack.last}"
        return keep

    def named_by_others(self) -> set[str]:
        """What the steps and edges that go name, and they themselves."""
        gone = [node for id_, node in self._nodes.items() if id_ not in self.needed]
        edges = [edge for edge in self._inventory.edges if edge.name not in self.used]
        found = {name for node in gone for name in (node.link.name, *(f.name for f in node.files))}
        found |= {pack.name for pack in packs_of(self._inventory.objects)}  # which nothing else ever names
        found |= {name for edge in edges for name in (edge.name, *(f.name for f in edge.files))}
        ids = {name[-69:-5] for name in found if name.startswith(("steps/", "edges/"))}
        return found | {name for name in self._inventory.objects if signed_id(name) in ids}

    def rebases(self) -> Iterator[tuple[Link, int, int]]:
        """Wanted steps that alone hold more than an anchor of theirs would weigh: (step, cost, frees)."""
        wanted: Counter[str] = Counter()
        for id_ in self.roots:
            at: str | None = id_
            seen = 0
            while at is not None and (way := self._ways.get(at)) is not None and (seen == 0 or at not in self.roots):
                wanted[at] += 1
                at, seen = way.start, seen + 1
        for id_ in self.roots:
            held = list(self._alone(id_, wanted))
            if not held:
                continue
            cost = sum(shard.size for shard in self._repo.layout_of(self._nodes[id_].layout).shards)
            frees = sum(f.size for node in held for f in {*(node.anchor or ()), *(node.patch or ()), node.digests})
            if frees > cost:
                yield self._nodes[id_].link, cost, frees

    def _alone(self, root: str, wanted: Counter[str]) -> Iterator[Node]:
        way = self._ways.get(root)
        while way is not None and way.start is not None and way.start not in self.roots and wanted[way.start] == 1:
            yield self._nodes[way.start]
            way = self._ways.get(way.start)
