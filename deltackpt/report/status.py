"""The state of a repository, and of a cache that follows it: nothing but records is read."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.cache.cache import find_current
from deltackpt.collector.inventory import Inventory
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import plan_of
from deltackpt.errors import ChainError, NotFoundError
from deltackpt.repository import Ref, Repository
from deltackpt.repository.chain import descends
from deltackpt.repository.leases import Lease

_RECORDS = ("refs/", "tags/", "leases/")


@dataclass(frozen=True)
class CacheStatus:
    """Where a cache is. ``behind`` counts the steps to the head, None where they are not all there; ``on_branch`` is
    False after a rewind."""

    path: str
    step: int
    id: str
    on_branch: bool
    behind: int | None
    catch_up_bytes: int
    catch_up_patches: int


@dataclass(frozen=True)
class Status:
    """``restore_bytes`` is what a reader without anything reads for the head; ``storage`` counts bytes of objects by
    folder; ``gc_frees`` and ``gc_steps`` are what a gc without a policy would remove, None where it would
    refuse, since the way to a ref or tag is broken."""

    repository: str
    id: str
    ref: str
    step: int | None
    head: str | None
    steps: int
    tags: dict[str, int]
    restore_bytes: int | None
    restore_patches: int | None
    storage: dict[str, int]
    leases: tuple[Lease, ...]
    gc_frees: int | None
    gc_steps: int | None
    cache: CacheStatus | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def status(repo: Repository, cache: str | os.PathLike[str] | None = None, *, ref: str = "main") -> Status:
    """Raises NotFoundError ``cache-empty`` for a cache without a step, and what `Repository.branch` raises; ChainError,
    FormatError for damaged records."""
    head = _head(repo, ref)
    plan = None
    if head is not None:
        try:
            plan = repo.resolve(head.link)
        except ChainError:  # verify says why
            plan = None
    inventory = Inventory.read(repo)
    garbage = None
    with suppress(ChainError):  # the same: a gc refuses
        garbage = plan_of(repo, inventory, Policy())
    storage: dict[str, int] = {}
    for info in (*inventory.objects.values(), *(i for folder in _RECORDS for i in repo.store.list(folder))):
        folder = info.name.partition("/")[0]
        storage[folder] = storage.get(folder, 0) + info.size
    return Status(
        repository=repo.store.url,
        id=repo.id,
        ref=ref,
        step=head.link.step if head else None,
        head=head.link.id if head else None,
        steps=len(inventory.nodes),
        tags={tag.name: tag.link.step for tag in inventory.tags},
        restore_bytes=plan.bytes if plan else None,
        restore_patches=len(plan.patches) if plan else None,
        storage=storage,
        leases=tuple(inventory.live),
        gc_frees=garbage.frees if garbage else None,
        gc_steps=garbage.steps if garbage else None,
        cache=_cache(repo, cache, ref) if cache is not None and head is not None else None,
    )


def _head(repo: Repository, name: str) -> Ref | None:
    """The branch; None also where it was lost, of which the rest of the status tells more."""
    try:
        return repo.branch(name)
    except NotFoundError as error:
        if error.code != "ref-missing" or next(repo.ref_names(), None) is not None:
            raise
        return None


def _cache(repo: Repository, cache: str | os.PathLike[str], ref: str) -> CacheStatus:
    path, current = find_current(cache)
    head = repo.find("latest", ref)
    plan = repo.resolve(head, have=current)
    behind: int | None = 0
    link = head
    while behind is not None and link.step > current.step:
        try:
            parent = repo.load(link).parent
        except NotFoundError:
            parent = None
        behind = None if parent is None else behind + 1
        link = parent or link
    on_branch = descends(head, current, repo.load) is True
    return CacheStatus(
        path=str(path),
        step=current.step,
        id=current.id,
        on_branch=on_branch,
        behind=behind if on_branch else None,
        catch_up_bytes=plan.bytes,
        catch_up_patches=len(plan.patches),
    )
