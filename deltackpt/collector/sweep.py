"""Remove what no kept step needs: plan -> show -> execute (STORE section "Removing").

Steps go first, newest first, so that no step that is still there ever lacks what it needs; then their objects, anchors
last. While steps go, `gc.json` says so: a reader that begins meanwhile waits, and one that began before is seen by its
lease.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.collector.inventory import FOLDERS, PAYLOADS, Inventory, current_fingerprint
from deltackpt.collector.mark import Reachable
from deltackpt.collector.retention import Policy
from deltackpt.compaction.fold import write_anchor
from deltackpt.errors import ChainError, CheckpointError, ConflictError, FormatError, NotFoundError
from deltackpt.format.canonical import dumps, loads_strict
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository, chain
from deltackpt.repository.heartbeat import Heartbeat, holder
from deltackpt.repository.leases import COLLECTING, Lease, clear_dead, collecting, read_leases
from deltackpt.store.base import is_temporary
from deltackpt.util.disk import open_regular, save_file, space_errors
from deltackpt.util.progress import SILENT, Progress

FORMAT = "deltackpt-gc-plan"
VERSION = 1
MAX_PLAN = 1 << 30
TTL = 60  # seconds for which the record of a killed gc keeps others waiting
ATTEMPTS = 8


@dataclass(frozen=True)
class Rebase:
    """A step that alone needs other objects: an anchor of its own would cost ``cost`` bytes and free ``frees``."""

    step: Link
    cost: int
    frees: int


@dataclass(frozen=True)
class GcResult:
    """What was removed. ``removed`` counts objects by folder."""

    repository: str
    removed: dict[str, int]
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class GcPlan:
    """``keep``: every object that stays, and why. ``delete``: names and sizes in order. ``waiting``: objects and bytes
    that nothing needs and that are too young. ``fingerprint``: of refs, tags, manifests and edges as they were."""

    repository: str
    id: str
    now: int
    policy: Policy
    fingerprint: str
    leases: tuple[str, ...]
    keep: dict[str, str]
    delete: tuple[tuple[str, int], ...]
    waiting: tuple[int, int]
    rebases: tuple[Rebase, ...]
    kept_bytes: int

    @property
    def frees(self) -> int:
        """Bytes of all objects to delete."""
        return sum(size for _, size in self.delete)

    @property
    def steps(self) -> int:
        """How many steps are deleted."""
        return sum(name.startswith("steps/") for name, _ in self.delete)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as canonical JSON. Raises StoreError ``not-writable``, NoSpaceError."""
        with space_errors(Path(path)):
            save_file(Path(path), dumps(self.to_dict()) + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> GcPlan:
        """Raises NotFoundError ``plan-missing``, FormatError ``plan-field``."""
        try:
            with os.fdopen(open_regular(Path(path)), "rb") as file:  # no device, which may have no end
                raw = file.read(MAX_PLAN + 2).rstrip(b"\n")
        except (OSError, CheckpointError) as error:
            have = error.have if isinstance(error, CheckpointError) else error.strerror or error
            raise NotFoundError("plan-missing", where=path, have=have, need="a saved plan") from error
        value = loads_strict(raw, limit=MAX_PLAN, marks=MAX_PLAN, where=os.fspath(path))
        try:
            if (value.pop("format"), value.pop("version")) != (FORMAT, VERSION):
                raise ValueError
            value["policy"] = Policy(**{**value["policy"], "tags": tuple(value["policy"]["tags"])})
            value["rebases"] = tuple(Rebase(Link(**r["step"]), r["cost"], r["frees"]) for r in value["rebases"])
            value["delete"] = tuple((str(name), int(size)) for name, size in value["delete"])
            plan = cls(**{**value, "leases": tuple(value["leases"]), "waiting": tuple(value["waiting"])})
            if any(name in plan.keep or not _removable(name) for name, _ in plan.delete):  # [S-GC-1]
                raise ValueError
            return plan
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError("plan-field", where=path, have="another file", need="a plan of `deltackpt gc`") from error

    def execute(self, repo: Repository, *, ttl: float = TTL, progress: Progress = SILENT) -> GcResult:
        """Remove what the plan says, and nothing else. Raises ConflictError ``plan-stale`` if a ref, tag, step or edge
        came or went, or a reader pinned what would go; ``gc-running``; then nothing was removed."""
        if self.id != repo.id:  # [S-GC-5]
            raise ConflictError("plan-stale", where=repo.store.url, have="another repository", need="the plan's own")
        with _exclusive(repo, ttl) as lock:
            self.check(repo)
            return self._execute(repo, lock, progress)

    def _execute(self, repo: Repository, lock: Heartbeat, progress: Progress) -> GcResult:
        removed: Counter[str] = Counter()
        done = 0
        progress.start("gc", self.frees)
        for name, size in self.delete:
            if name.startswith(("steps/", "edges/")):
                if not lock.fresh:  # [S-GC-7]
                    have, need = "a gc that was stopped for too long", "one that others can rely on"
                    raise ConflictError("plan-stale", where=repo.store.url, have=have, need=need, hint="Run it again.")
            else:
                lock.close()  # from here on no reader reaches what is deleted [S-GC-6]
            repo.store.delete(name)
            removed[name.partition("/")[0]] += 1
            done += size
            progress.advance(size)
        repo.manifests.cache.clear()
        return GcResult(self.repository, dict(removed), done)

    def check(self, repo: Repository) -> None:
        """Raise ConflictError ``plan-stale`` unless all is as it was, as far as that matters."""
        stale = ""
        if current_fingerprint(repo) != self.fingerprint:
            stale = "a ref, tag, step or fold that came, moved or went"
        now, doomed = repo.store.now(), {name for name, _ in self.delete}
        for lease in read_leases(repo):
            if lease.expires > now and lease.name not in self.leases and _affects(repo, lease, doomed):
                stale = f"a lease of {lease.holder} on what would go"
        if stale:  # [S-GC-5]
            hint = "Make the plan again."
            raise ConflictError("plan-stale", where=repo.store.url, have=stale, need="all as it was planned", hint=hint)


def _affects(repo: Repository, lease: Lease, doomed: set[str]) -> bool:
    """Would the holder of a lease that is newer than the plan miss an object?"""
    if lease.link is None:
        return True
    needed = [lease.link.name, *([lease.have.name] if lease.have else [])]
    edges = repo.edges()
    for have in (None, lease.have):
        with suppress(ChainError, FormatError, NotFoundError):
            plan = chain.resolve(lease.link, repo.load, have=have, edges=edges)
            for hop in plan.patches:
                needed += [hop.start.name, hop.end.name]
                needed += [edge.name for edge in edges.get(hop.end, ()) if edge.start == hop.start]
            needed += [edge.name for edge in edges.get(plan.anchor.link, ())] if plan.anchor else []
    return any(name in doomed for name in needed)


@contextmanager
def _exclusive(repo: Repository, ttl: float) -> Iterator[Heartbeat]:
    """Hold `gc.json`: no other gc removes steps, and readers that begin wait ([S-GC-6])."""
    clear_dead(repo)
    found = collecting(repo)
    if found is not None and repo.store.now() < found[2]:  # [S-GC-6]
        raise _running(repo, found[1])
    try:
        heartbeat = Heartbeat(
            repo.store,
            COLLECTING,
            lambda _, expires: dumps({"holder": holder(), "expires": expires}),
            ttl,
            old=found[0] if found else None,
        )
    except ConflictError as error:
        raise _running(repo, "another process") from error
    try:
        yield heartbeat
    finally:
        heartbeat.close()


def _running(repo: Repository, who: str) -> ConflictError:
    hint = "Wait for it; one that was killed is out of the way within a minute."
    return ConflictError("gc-running", where=repo.store.url, have=f"a gc of {who}", need="one at a time", hint=hint)


def plan_gc(repo: Repository, policy: Policy = Policy()) -> GcPlan:
    """Decide what goes and say why the rest stays; nothing is changed.

    Kept are the steps that the policy, a ref, a tag or a live lease wants, the newest anchor of every ref, whatever is
    younger than the grace time, and the cheapest way to each of them. Raises NotFoundError ``tag-missing`` for a tag
    that the policy names, FormatError for a damaged manifest or layout: what those need is not known,
    ChainError ``chain-broken`` for a ref or tag whose step has no way from an anchor any more.
    """
    clear_dead(repo)
    return plan_of(repo, Inventory.read(repo), policy)


def plan_of(repo: Repository, inventory: Inventory, policy: Policy) -> GcPlan:
    """`plan_gc` for an inventory that was read a moment ago."""
    for tag in policy.tags:
        if all(found.name != tag for found in inventory.tags):
            raise NotFoundError("tag-missing", where=repo.store.url, have="no such tag", need=f"tag {tag!r}")
    found = Reachable(repo, inventory, policy)
    keep = found.objects()
    first = min((lease.since for lease in inventory.live), default=None)
    named = None if repo.store.capabilities.clock else found.named_by_others()
    doomed: dict[str, int] = {}
    young: list[int] = []
    for name, info in inventory.objects.items():
        if name in keep:
            continue
        # [S-GC-4]: the holder of a lease may be publishing, and what was put since then may get its manifest yet.
        pending = first is not None and info.modified >= first - 1 and not name.startswith("steps/")
        pending = pending or (named is not None and name not in named)  # only its age is against it
        if pending or inventory.age(name) < policy.grace:
            young.append(info.size)
        else:
            doomed[name] = info.size
    lapsed = {lease.name: 0 for lease in inventory.leases if inventory.now - lease.expires >= policy.grace}
    temporaries = {
        info.name: info.size
        for info in repo.store.temporaries()
        if inventory.now - info.modified >= max(policy.grace, 1) and (first is None or info.modified < first - 1)
    }
    order = [*sorted(doomed, key=_order), *lapsed, *temporaries]
    sizes = {**doomed, **lapsed, **temporaries}
    return GcPlan(
        repository=repo.store.url,
        id=repo.id,
        now=int(inventory.now),
        policy=policy,
        fingerprint=inventory.fingerprint,
        leases=tuple(lease.name for lease in inventory.live),
        keep=keep,
        delete=tuple((name, sizes[name]) for name in order),
        waiting=(len(young), sum(young)),
        rebases=tuple(Rebase(step, cost, frees) for step, cost, frees in found.rebases()),
        kept_bytes=sum(inventory.objects[name].size for name in keep if name in inventory.objects),
    )


def _removable(name: str) -> bool:
    """Is it of a kind that a gc ever removes? Neither marker nor ref is, whatever a saved plan says."""
    return name.startswith((*FOLDERS, "leases/")) or is_temporary(name)


def _order(name: str) -> tuple[int, int, int, str]:
    """[S-GC-3]: steps from the newest, each before the edges to it; then payloads from the newest; anchors last."""
    folder, _, rest = name.partition("/")
    digits = rest.partition("-")[0]
    step = -int(digits) if digits.isdigit() else 0
    if folder in ("steps", "edges"):
        return 0, step, int(folder == "edges"), name
    kind = int(folder == "anchors")
    return 1 + kind, step, PAYLOADS.index(f"{folder}/"), name


def collect(
    repo: Repository,
    policy: Policy = Policy(),
    *,
    ttl: float = TTL,
    progress: Progress = SILENT,
) -> tuple[GcPlan, GcResult]:
    """Plan and execute. Where others publish faster than a plan holds, it is made again while they wait.

    Raises what `plan_gc` and `GcPlan.execute` raise.
    """
    plan = plan_gc(repo, policy)
    with suppress(ConflictError):
        return plan, plan.execute(repo, ttl=ttl, progress=progress)
    with _exclusive(repo, ttl) as lock:  # no reader or writer begins now, and those that began end
        for left in reversed(range(ATTEMPTS)):
            plan = plan_gc(repo, policy)
            try:
                plan.check(repo)
                break
            except ConflictError:
                if not left:
                    raise
        return plan, plan._execute(repo, lock, progress)


def rebase(repo: Repository, plan: GcPlan, *, threads: int | None = None, progress: Progress = SILENT) -> int:
    """Write the anchors that the plan offers in ``rebases``; -> bytes written. Plan again after it."""
    return sum(write_anchor(repo, one.step, threads=threads, progress=progress).size for one in plan.rebases)
