"""The other slot of a managed cache, moved to the current step before there is a next one.

It is opt-in: readers of that slot must have closed its files already, and not only by the next move. It becomes a copy
of the current step, proven whole, and is then called `ready`, which is no step's name: only the next move uses it. That
one has left to fetch, to decode, to write what its own patch changes, and to prove.

The journal stays, and says what `ready` is a copy of: the step that it leads to. Killed anywhere on the way, the slot
is found as `patching`, which is a move that has not begun to write anything of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from deltackpt.cache.cache import Cache, locked
from deltackpt.cache.slot import MappedSlot, SlotMove, of_these_shards, patch_slot
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository
from deltackpt.restore.journal import Journal
from deltackpt.util.disk import space_errors
from deltackpt.util.file_server import remove_any, rename
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress


def prepare_standby(
    repo: Repository,
    cache: str | os.PathLike[str],
    standby: MappedSlot,
    *,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> bool:
    """Move the other slot to the current step, and leave its shards mapped in ``standby``, writable.

    -> False where there is none, none of the same shards, no journal that leads there, or a move that was killed: the
    next move then does without, and nothing was changed. Raises what `apply_to_cache` raises for a damaged slot or
    journal, or a cache that cannot be written; the next move then finds the damage, and falls back to a copy.
    """
    root = Path(cache)
    standby.clear()
    with space_errors(root), locked(repo, root) as held:
        held.finish_switch()
        if not held.trusted or (current := held.current()) is None or (slot := _other(held, current)) is None:
            return False
        target = repo.load(current)
        if not of_these_shards(slot, repo.layout(target)):  # tensors were added, removed or reshaped since
            return False
        if slot not in (held.ready, held.patching):
            remove_any(held.next)  # not of this move, whose records it would be taken for
            rename(slot, held.patching)
            slot = held.patching
        move = SlotMove(repo, target, Journal.read(held.journal))
        try:
            patch_slot(move, slot, threads_or_default(threads), progress, standby, keep=True)
        except BaseException:
            standby.clear()  # files that are removed take space as long as they are mapped
            raise
        if slot != held.ready:
            held.drop_slot(held.ready)
            rename(slot, held.ready)
    return True


def _other(held: Cache, current: Link) -> Path | None:
    """The slot that the journal leads to the current step, or has led there."""
    ends = Journal.ends(held.journal)
    if ends is None or ends[1] != current:
        return None
    if held.patching.is_dir():
        return None if held.next.exists() else held.patching
    slots = (held.ready, held.slot(ends[0]))
    return next((slot for slot in slots if slot.is_dir()), None)
