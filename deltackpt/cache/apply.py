"""Moving a managed cache to a step of a repository."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from deltackpt.cache.cache import locked
from deltackpt.cache.move import RECOVERABLE, CacheMove
from deltackpt.cache.slot import MappedSlot
from deltackpt.format.manifest import Link
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.repository import Repository
from deltackpt.repository.leases import pinned
from deltackpt.restore.materialize import ApplyResult, again_if_gone, result
from deltackpt.restore.proof import prove
from deltackpt.util.disk import space_errors
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.places import check_local
from deltackpt.util.progress import SILENT, Progress


def apply_to_cache(
    repo: Repository,
    cache: str | os.PathLike[str],
    step: str | int | Link = "latest",
    *,
    ref: str = "main",
    threads: int | None = None,
    fresh: bool = False,
    in_memory: InMemoryPatch | None = None,
    standby: MappedSlot | None = None,
    progress: Progress = SILENT,
) -> ApplyResult:
    """Move a managed cache to a step, creating it if there is none.

    From an ancestor step only the patches in between are read and only changed elements written. From elsewhere, such
    as a branch that was rewound, the other slot is patched where it is an ancestor, or the step is built from an
    anchor; the result says why. With ``fresh`` a new directory is built. What is ``in_memory`` of a patch that leads
    there is not decoded again, what `standby.prepare_standby` left in ``standby`` not mapped again. Raises
    ConflictError ``not-a-cache`` for a directory that holds anything else, ``cache-locked`` while another process moves
    it, StoreError ``not-writable``, and what `materialize.apply` raises; the current step then stays.
    """
    began = time.monotonic()
    check_local(cache, "CACHE")
    root = Path(cache)
    count = threads_or_default(threads)
    with space_errors(root), locked(repo, root) as held:
        if not (trusted := held.trusted):
            held.drop(keep=held.current())
        held.finish_switch()
        current = held.current()
        with pinned(repo, step, ref, have=current) as (link, leased):
            torn = None
            if not trusted:
                if current is not None and (torn := _torn(repo, current, held.slot(current), count, progress)):
                    current = None  # it stays in place, and untrusted, until another one can take it
                else:
                    held.trust()
            if repo.trust is None:
                held.set_signed(None)
            elif current is not None and not held.is_signed(current):  # [S-SIG-14]
                torn, current = f"step {current.step} was put there when no signature was asked for", None

            def once() -> ApplyResult:
                plan = repo.resolve(link, have=current)
                if current == link and not fresh:
                    return result(held.slot(link), plan, 0, began)
                move = CacheMove(repo, held, plan, current, count, in_memory, standby, progress)
                if current == link:
                    written = move.rebuild()
                else:
                    written = move.start_over() if plan.anchor or current is None else move.forward(fresh)
                return replace(result(held.slot(link), move.plan, written, began), rebuilt=torn or move.rebuilt)

            done = again_if_gone(repo, once)
            if repo.trust is not None:
                held.set_signed(link)
            if torn is not None:
                held.trust()
            return replace(done, leased=leased is not None)


def _torn(repo: Repository, current: Link, slot: Path, threads: int, progress: Progress) -> str | None:
    """Why the current slot cannot be used after the machine was started again, if it cannot."""
    try:
        prove(repo, current, slot, threads, progress)
    except RECOVERABLE as error:
        return f"step {current.step} was not found whole after this machine was started again [{error.code}]"
    return None
