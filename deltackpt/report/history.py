"""All that a report draws of a branch: manifests, edges and listings, and the tables of parts, by ranges."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.collector.inventory import READERS, Inventory
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import plan_of
from deltackpt.errors import ChainError, DeltackptError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.report.arrivals import Arrival
from deltackpt.report.comparison import layer_of
from deltackpt.report.layers import StepTables, layer_elements, read_tables
from deltackpt.report.log import LogStep, log
from deltackpt.report.ulp_steps import UlpSteps, ulp_steps
from deltackpt.repository import Repository
from deltackpt.repository.paths import Way, cheapest
from deltackpt.util.parallel import ordered_map
from deltackpt.util.progress import SILENT, Progress

TABLES = 400  # steps whose tables are read: more columns than a page has room for
SAMPLES = 8  # steps whose payloads are read


@dataclass(frozen=True)
class RestoreCost:
    """What a reader without anything reads for a step: ``bytes`` of an anchor and ``hops`` patches or folds; None where
    no way is whole."""

    step: int
    bytes: int | None
    hops: int | None


@dataclass(frozen=True)
class Milestone:
    """``kind``: anchor, fold, tag or branch, at ``step``; a fold begins at ``start``. Folds and anchors have bytes."""

    kind: str
    step: int
    name: str
    start: int | None = None
    bytes: int | None = None


@dataclass(frozen=True)
class LeaseHolder:
    """A reader or writer that has a live lease: the step that it is at, or reads. ``behind`` counts steps of the branch
    to the head, and ``seconds`` is for how long a newer step has been there; None where the step is not on it."""

    holder: str
    step: int | None
    behind: int | None
    seconds: float | None


@dataclass(frozen=True)
class History:
    """``steps`` of the branch are oldest first. ``layers`` are elements by layer, in the model's order; ``tables`` and
    ``ulp`` are of some of the steps. ``storage`` counts bytes of objects by folder. ``gc_frees`` and ``gc_steps`` are
    what a gc without a policy would remove, None where it would refuse. ``now`` is the store's time, seconds since
    1970. ``unread`` counts steps of ``tables`` that could not be read."""

    repository: str
    id: str
    ref: str
    now: float
    steps: tuple[LogStep, ...]
    restore: tuple[RestoreCost, ...]
    milestones: tuple[Milestone, ...]
    layers: dict[str, int]
    tables: tuple[StepTables, ...]
    unread: int
    ulp: tuple[UlpSteps, ...]
    holders: tuple[LeaseHolder, ...]
    arrivals: tuple[Arrival, ...]
    storage: dict[str, int]
    gc_frees: int | None
    gc_steps: int | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        found = dict(vars(self))
        for name in ("restore", "milestones", "holders"):
            found[name] = [asdict(each) for each in found[name]]
        for name in ("tables", "ulp", "arrivals"):
            found[name] = [each.to_dict() for each in found[name]]
        return {**found, "steps": [dict(vars(step)) for step in self.steps]}


def read_history(
    repo: Repository,
    ref: str = "main",
    *,
    first: int = 0,
    since: float | None = None,
    ulp: bool = False,
    arrivals: Sequence[Arrival] = (),
    progress: Progress = SILENT,
) -> History:
    """Read what a report draws. ``first``: from this step on; ``since`` (seconds since 1970): as `log`.

    Without ``ulp`` no payload is read; with it, those of at most SAMPLES steps and of the way to them. What was
    collected meanwhile, or is damaged, is left out and counted. Raises what `log` raises, FormatError for a damaged
    manifest, and, with ``ulp``, for a damaged patch.
    """
    inventory = Inventory.read(repo)
    listed = log(repo, ref, since=since)
    steps = tuple(step for step in reversed(listed.steps) if step.step >= first)
    ways = cheapest(inventory.nodes, inventory.edges, inventory.there)
    garbage = None
    with suppress(ChainError, NotFoundError):  # a gc would refuse
        garbage = plan_of(repo, inventory, Policy())
    storage: dict[str, int] = {}
    for info in inventory.objects.values():
        folder = info.name.partition("/")[0]
        storage[folder] = storage.get(folder, 0) + info.size
    layers, tables, unread = _tables(repo, steps, progress)
    return History(
        repository=repo.store.url,
        id=repo.id,
        ref=ref,
        now=inventory.now,
        steps=steps,
        restore=_restore(steps, ways),
        milestones=_milestones(steps, inventory),
        layers=layers,
        tables=tables,
        unread=unread,
        ulp=_sampled(repo, steps, progress) if ulp else (),
        holders=_holders(listed.steps, inventory),
        arrivals=tuple(arrivals),
        storage=storage,
        gc_frees=garbage.frees if garbage else None,
        gc_steps=garbage.steps if garbage else None,
    )


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly, the last one among them."""
    if len(items) <= most:
        return list(items)
    return [items[len(items) - 1 - (i * (len(items) - 1)) // max(1, most - 1)] for i in range(most)][::-1]


def _tables(
    repo: Repository, steps: Sequence[LogStep], progress: Progress
) -> tuple[dict[str, int], tuple[StepTables, ...], int]:
    """Elements by layer of the newest step; the tables of some steps; how many of them could not be read."""
    if not steps:
        return {}, (), 0
    layout = repo.layout(repo.load(_link(steps[-1])))
    layer = {name: layer_of(name) for name in layout.tensors}
    wanted = spread([step for step in steps if step.patch_bytes is not None], TABLES)

    def read(step: LogStep) -> StepTables | None:
        try:
            return read_tables(repo, repo.load(_link(step)), layer)
        except DeltackptError:  # `verify` says what; a report draws the others
            return None

    progress.start("report", len(wanted))
    found: list[StepTables] = []
    for one in ordered_map(read, wanted, 1 if repo.store.capabilities.local else READERS):
        found += [] if one is None else [one]
        progress.advance(1)
    return layer_elements(layout), tuple(found), len(wanted) - len(found)


def _sampled(repo: Repository, steps: Sequence[LogStep], progress: Progress) -> tuple[UlpSteps, ...]:
    wanted = spread([step for step in steps if step.changed], SAMPLES)
    progress.start("ulp", len(wanted))
    found = []
    for step in wanted:
        try:
            one = ulp_steps(repo, _link(step))
        except NotFoundError:  # its parent was collected
            one = None
        found += [] if one is None else [one]
        progress.advance(1)
    return tuple(found)


def _link(step: LogStep) -> Link:
    return Link(step.step, step.id)


def _restore(steps: Sequence[LogStep], ways: dict[str, Way]) -> tuple[RestoreCost, ...]:
    hops: dict[str, int] = {}
    for id_, way in sorted(ways.items(), key=lambda item: item[1].cost):
        hops[id_] = 0 if way.start is None else hops.get(way.start, 0) + 1
    costs = ((step, ways.get(step.id)) for step in steps)
    return tuple(RestoreCost(s.step, way.cost if way else None, hops[s.id] if way else None) for s, way in costs)


def _milestones(steps: Sequence[LogStep], inventory: Inventory) -> tuple[Milestone, ...]:
    """Of the steps of the branch."""
    ids = {step.id for step in steps}
    found = [Milestone("anchor", s.step, "", None, s.anchor_bytes) for s in steps if s.anchor_bytes is not None]
    for edge in inventory.edges:
        if edge.end.id in ids:
            kind = "anchor" if edge.start is None else "fold"
            found.append(Milestone(kind, edge.end.step, "", edge.start.step if edge.start else None, edge.size))
    for kind, refs in (("tag", inventory.tags), ("branch", inventory.refs)):
        found += [Milestone(kind, ref.link.step, ref.name) for ref in refs if ref.link.id in ids]
    return tuple(sorted(found, key=lambda mark: (mark.step, mark.kind, mark.start or 0, mark.name)))


def _holders(newest_first: Sequence[LogStep], inventory: Inventory) -> tuple[LeaseHolder, ...]:
    place = {step.id: i for i, step in enumerate(newest_first)}
    found = []
    for lease in inventory.live:
        link = lease.have or lease.link
        behind = place.get(link.id) if link else None
        # The step after it has been there since it was published: so long the holder could have had it.
        seconds = None if behind is None else 0.0 if not behind else inventory.now - newest_first[behind - 1].time
        found.append(LeaseHolder(lease.holder, link.step if link else None, behind, seconds))
    return tuple(sorted(found, key=lambda holder: (-(holder.behind or 0), holder.holder)))
