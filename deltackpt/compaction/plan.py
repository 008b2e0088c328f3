"""Folds for a chain, and packs of its records: plan -> show -> execute.

With levels, so that a reader that is any distance behind reads few.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.compaction.fold import fold
from deltackpt.compaction.packs import MadePack, PlannedPack, make_packs, plan_packs
from deltackpt.errors import ConflictError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository, chain
from deltackpt.util.progress import SILENT, Progress

LEVELS = (8, 64, 512)  # steps that a fold of each level spans


@dataclass(frozen=True)
class Planned:
    """A fold to make: it replaces ``patches`` patches of ``replaces`` bytes."""

    start: Link
    end: Link
    patches: int
    replaces: int


@dataclass(frozen=True)
class Made:
    """The outcome of a planned fold: ``bytes`` of its parts, or the reason why there is none."""

    start: Link
    end: Link
    replaces: int
    bytes: int | None
    reason: str | None


@dataclass(frozen=True)
class CompactResult:
    """The outcome of every fold of a plan, and the packs that were made."""

    repository: str
    folds: tuple[Made, ...]
    packs: tuple[MadePack, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of the folds that were made."""
        return sum(made.bytes or 0 for made in self.folds)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class CompactPlan:
    """Folds in the order in which they are made: short ones first, since long ones are made of them. ``packs`` are
    those that the records need as they are now; what the folds add is packed with them."""

    repository: str
    ref: str
    folds: tuple[Planned, ...]
    packs: tuple[PlannedPack, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def execute(
        self,
        repo: Repository,
        *,
        cache: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        progress: Progress = SILENT,
    ) -> CompactResult:
        """Make them; a fold that would be no smaller than what it replaces is left out, and reported. Packs are made
        last, for all records of the repository."""
        folds = tuple(self._make(repo, cache, threads, progress))
        return CompactResult(self.repository, folds, make_packs(repo, plan_packs(repo), progress))

    def _make(
        self, repo: Repository, cache: str | os.PathLike[str] | None, threads: int | None, progress: Progress
    ) -> Iterator[Made]:
        for one in self.folds:
            size, reason = None, None
            try:
                size = fold(repo, one.start, one.end, cache=cache, threads=threads, progress=progress).size
            except ConflictError as error:
                if error.code not in ("fold-larger", "fold-exists"):
                    raise
                reason = f"{error.have}, and not {error.need}"
            yield Made(one.start, one.end, one.replaces, size, reason)


def plan_compact(
    repo: Repository,
    start: str | int | None = None,
    end: str | int = "latest",
    *,
    ref: str = "main",
    levels: Sequence[int] = (),
) -> CompactPlan:
    """One fold from ``start`` (the last anchor if not given) to ``end``; with ``levels``, one for every aligned run of
    so many steps between them (from the first step that is there). A step to which no patch leads, as an anchor is less
    to read, parts what is before it from what follows.

    Those that exist are not planned again. Raises what `Repository.find` raises, ChainError ``chain-broken`` where
    ``start`` does not lead to ``end``.
    """
    last = repo.find(end, ref)
    if levels:
        first = repo.find(start, ref) if start is not None else None
        runs = _unbroken(repo, _links(repo, last, first))
        found = [run for links in runs for run in _runs(repo, links, sorted(set(levels)))]
    else:
        if start is None:
            plan = repo.resolve(last)
            first = plan.patches[0].start if plan.patches else last
        else:
            first = repo.find(start, ref)
        if first.step >= last.step:
            have = f"from {first.step} to {last.step}"
            raise UsageError("fold-range", where="compact", have=have, need="an earlier step and a later one")
        links = _links(repo, last, first)
        # Where `start` is on no way to `end`, what is planned says so.
        found = [(run[0], run[-1]) for run in _unbroken(repo, links)] if links[0] == first else [(first, last)]
    edges = repo.edges()
    exists = {(edge.start, edge.end) for _, end in found for edge in edges.get(end, ())}
    planned = tuple(_planned(repo, [run for run in found if run not in exists]))
    return CompactPlan(repo.store.url, ref, planned, plan_packs(repo))


def plan_packs_alone(repo: Repository, ref: str = "main") -> CompactPlan:
    """`plan_compact` without a fold: what is published stays as it is, and late readers ask for fewer objects."""
    return CompactPlan(repo.store.url, ref, (), plan_packs(repo))


def _links(repo: Repository, last: Link, first: Link | None) -> list[Link]:
    """The chain between two steps, oldest first."""
    manifests = repo.walk(last)
    links = [last, *(m.parent for m in manifests[:-1] if m.parent)][::-1]
    return [link for link in links if first is None or link.step >= first.step]


def _unbroken(repo: Repository, links: Sequence[Link]) -> list[list[Link]]:
    """The chain, cut before every step to which no patch leads."""
    runs = [[links[0]]]
    for link in links[1:]:
        if repo.load(link).patch is None:
            runs.append([link])
        else:
            runs[-1].append(link)
    return runs


def _runs(repo: Repository, links: Sequence[Link], levels: Sequence[int]) -> list[tuple[Link, Link]]:
    """Aligned runs of at least two patches. A run ends with the last step up to a multiple of its level."""
    found: list[tuple[int, int, tuple[Link, Link]]] = []
    for level in levels:
        begin = 0
        for i, link in enumerate(links):
            following = links[i + 1].step - 1 if i + 1 < len(links) else link.step
            if following // level < -(-link.step // level):  # no multiple from here to the next step
                continue
            if i - begin > 1:
                found.append((link.step, level, (links[begin], link)))
            begin = i
    runs = dict.fromkeys(run for *_, run in sorted(found, key=lambda item: item[:2]))
    return list(runs)


def _planned(repo: Repository, runs: Sequence[tuple[Link, Link]]) -> Iterator[Planned]:
    for start, end in runs:
        patches, size, link = 0, 0, end
        while link != start:
            manifest = repo.load(link)
            if manifest.parent is None or manifest.parent.step < start.step or manifest.patch is None:
                hops = chain.between(start, end, repo.load, repo.edges())  # over collected steps, or not at all
                patches, size = len(hops), sum(hop.bytes for hop in hops)
                break
            patches, size, link = patches + 1, size + sum(f.size for f in manifest.patch), manifest.parent
        if patches > 1:
            yield Planned(start, end, patches, size)
