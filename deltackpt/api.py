"""What the package offers as functions: repositories by URL or open, results as frozen dataclasses with `to_dict()`.

Thin: each opens what it is given and calls the room that does the work. Every function raises the errors of
`deltackpt.errors`, which carry a code, where, have, need and a hint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from deltackpt.cache import apply_to_cache as _apply_to_cache
from deltackpt.errors import UsageError
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.util.progress import SILENT, Progress

if TYPE_CHECKING:
    from deltackpt.collector.retention import Policy
    from deltackpt.collector.sweep import GcPlan, GcResult
    from deltackpt.compaction.plan import CompactResult
    from deltackpt.report.comparison import CheckpointComparison
    from deltackpt.restore.materialize import ApplyResult
    from deltackpt.signing.policy import TrustPolicy
    from deltackpt.sync.follow import FollowOptions, Switch
    from deltackpt.sync.mirror_plan import MirrorResult
    from deltackpt.verification import VerifyReport

Trusted: TypeAlias = "str | os.PathLike[str] | TrustPolicy | None"
Url = str | os.PathLike[str]

__all__ = ["apply", "apply_to_cache", "compact", "diff", "follow", "gc", "mirror", "verify", "write"]


def opened(repository: Url | Repository, trust: Trusted = None) -> Repository:
    """The repository, opened if it is not, and `Repository.secure` by ``trust`` if that is given.

    Raises NotFoundError ``repository-missing``.
    """
    found = repository if isinstance(repository, Repository) else Repository.open(repository)
    return found if trust is None else found.secure(trust)


def apply(
    repository: Url | Repository,
    out: Url,
    step: str | int = "latest",
    *,
    ref: str = "main",
    sync: bool = False,
    threads: int | None = None,
    progress: Progress = SILENT,
    trust: Trusted = None,
) -> ApplyResult:
    """A step as a plain checkpoint directory at ``out``, which must not exist or be empty; every byte is proven.

        deltackpt.apply("s3://bucket/run", "restored", 4200)

    ``step``: a number, a tag, ``number-id`` or "latest". ``trust``, here and below, is that of `Repository.secure`:
    nothing is used that such keys did not sign. Raises ConflictError ``output-exists``, NotFoundError
    ``step-missing``, ChainError, FormatError, NoSpaceError; then there is no ``out``.
    """
    from deltackpt.restore.materialize import apply as materialize

    return materialize(opened(repository, trust), out, step, ref=ref, sync=sync, threads=threads, progress=progress)


def apply_to_cache(
    repository: Url | Repository,
    cache: Url,
    step: str | int = "latest",
    *,
    ref: str = "main",
    threads: int | None = None,
    progress: Progress = SILENT,
    trust: Trusted = None,
) -> ApplyResult:
    """Move a managed cache to a step, in the time of what changed; `cache/current` then names the proven checkpoint.

        done = deltackpt.apply_to_cache("s3://bucket/run", "/var/cache/rollout")
        engine.load(done.path)

    Raises ConflictError ``not-a-cache``, ``cache-locked``, and what `apply` raises; the current step then stays.
    """
    return _apply_to_cache(opened(repository, trust), cache, step, ref=ref, threads=threads, progress=progress)


def verify(
    target: Url | Repository,
    *,
    against: Url | Repository | None = None,
    step: str | int = "latest",
    ref: str = "main",
    threads: int | None = None,
    progress: Progress = SILENT,
    trust: Trusted = None,
) -> VerifyReport:
    """Check a repository, one part file, or, with ``against``, a checkpoint directory against a step.

        report = deltackpt.verify("runs/repo")
        assert report.ok, report.findings

    All findings are collected; nothing is raised for damage. Raises NotFoundError, StoreError, UsageError ``usage``.
    """
    from deltackpt import verification

    if against is not None:
        if isinstance(target, Repository):
            raise UsageError("usage", where="target", have="a repository", need="a checkpoint directory to compare")
        return verification.verify_checkpoint(
            target, opened(against, trust), step, ref=ref, threads=threads, progress=progress
        )
    if not isinstance(target, Repository) and Path(target).is_file():
        return verification.verify_part(target)
    return verification.verify_repository(opened(target, trust), threads=threads, progress=progress)


def diff(a: Url, b: Url, *, threads: int | None = None, progress: Progress = SILENT) -> CheckpointComparison:
    """What a patch from one checkpoint directory to another would hold, by tensor and by layer, in every encoding.

        deltackpt.diff("step_1", "step_2").total.changed

    Raises CheckpointError, FormatError.
    """
    from deltackpt.report.comparison import compare

    return compare(a, b, threads, progress=progress)


def gc(
    repository: Url | Repository, policy: Policy | None = None, *, dry_run: bool = False, progress: Progress = SILENT
) -> tuple[GcPlan, GcResult | None]:
    """Remove what no kept step and no lease needs -> the plan, and what was done (None with ``dry_run``).

        from deltackpt.collector.retention import Policy
        plan, result = deltackpt.gc("runs/repo", Policy(last=20))

    Without a policy every step of a branch is kept. Raises ConflictError ``plan-stale``, StoreError.
    """
    from deltackpt.collector import retention, sweep

    chosen = policy or retention.Policy()
    if dry_run:
        return sweep.plan_gc(opened(repository), chosen), None
    return sweep.collect(opened(repository), chosen, progress=progress)


def compact(
    repository: Url | Repository,
    start: str | int | None = None,
    end: str | int = "latest",
    *,
    ref: str = "main",
    levels: Sequence[int] = (),
    threads: int | None = None,
    progress: Progress = SILENT,
) -> CompactResult:
    """Fold the patches from ``start`` (the last anchor if not given) to ``end`` into one: late readers read less.

        deltackpt.compact("runs/repo", levels=(8, 64, 512))

    Raises NotFoundError ``step-missing``, UsageError ``fold-range``, ChainError ``chain-broken``.
    """
    from deltackpt.compaction.plan import plan_compact

    repo = opened(repository)
    return plan_compact(repo, start, end, ref=ref, levels=levels).execute(repo, threads=threads, progress=progress)


def mirror(source: Url, target: Url, **options: Any) -> MirrorResult:
    """Copy a repository to another store, whole at every instant; run again, it goes on where it was.

        deltackpt.mirror("runs/repo", "s3://bucket/run", limit=100e6)  # bytes a second

    ``options``: those of `sync.mirror.mirror`. Raises ConflictError ``mirror-diverged``, ``mirror-elsewhere``,
    ``not-a-repository``, and what the two stores raise.
    """
    from deltackpt.sync.mirror import mirror as copy

    return copy(source, target, **options)


def follow(
    repository: Url | Repository,
    cache: Url,
    on_switch: Callable[[Switch], object],
    options: FollowOptions | None = None,
    *,
    trust: Trusted = None,
    **callbacks: Any,
) -> None:
    """Keep a managed cache at the newest step, and call ``on_switch`` whenever it moved; returns when it is stopped.

        deltackpt.follow("s3://bucket/run", "/var/cache/rollout", lambda switch: engine.load(switch.path))

    ``options``: branch, polling and the like; ``callbacks``: those of `sync.follow.follow`, and ``stop``. Raises what
    does not pass by itself, and what ``on_switch`` raises.
    """
    from deltackpt.sync import follow as library

    library.follow(opened(repository, trust), cache, on_switch, options or library.FollowOptions(), **callbacks)
