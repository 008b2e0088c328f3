"""A managed cache: a checkpoint directory that follows a repository in O(changes).

    CACHE/cache.json              whose cache it is
    CACHE/current -> 00000012-…   the step to load, switched atomically
    CACHE/00000012-…/             a slot: a whole, proven checkpoint; its name is the manifest's
    CACHE/00000011-…/             the other slot, which the next move patches
    CACHE/journal                 what leads from the other slot to the current one
    CACHE/ready/                  in its place, if wanted: the other slot, brought along to the current step
    CACHE/patching/, journal.next the move under way
    CACHE/boot                    the run of the machine in which all of it was written or proven
    CACHE/lock                    held by the process that moves it

A move never touches the current slot: it brings the other one along, proves every byte of it, renames it, and switches.
A path never names two steps, so an engine that remembers by path sees a new one. The slot that was current before the
last switch is the one that is patched next: readers of a slot have until then to let go of its files. Where they have
done so at once, it can be brought along at once (`ready`), and the next move begins with a copy of the current step.

Slots are not synced, which would cost more than all the rest of a move. Instead, the first move after the machine was
started again reads all of the current slot and holds it against its step, and trusts nothing else that it finds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from deltackpt.cache.slot import MappedSlot, SlotMove, patch_slot
from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, CheckpointError, ConflictError, FormatError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.patch.base import Patch
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.repository import Repository, chain
from deltackpt.repository.chain import Plan
from deltackpt.repository.leases import pinned
from deltackpt.restore.journal import Journal
from deltackpt.restore.materialize import ApplyResult, again_if_gone, beside, build, build_order, result
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.proof import prove
from deltackpt.restore.replay import Replay
from deltackpt.restore.squashed import open_squashed
from deltackpt.util.disk import boot_id, fsync_dir, space_errors
from deltackpt.util.parallel import threads_or_default
from deltackpt.util.progress import SILENT, Progress

FORMAT = "deltackpt-cache"
VERSION = 1


class Cache:
    """The directory of a managed cache; everything here happens under its lock."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.patching = root / "patching"
        self.ready = root / "ready"
        self.journal = root / "journal"
        self.next = root / "journal.next"
        self.boot = root / "boot"

    def slot(self, link: Link) -> Path:
        return self.root / f"{link.step:08d}-{link.id}"

    def current(self) -> Link | None:
        """The step that `current` points at."""
        try:
            target = os.readlink(self.root / "current")
        except OSError:
            return None
        link = _link(target)
        return link if link and self.slot(link).is_dir() else None

    def slots(self) -> list[Link]:
        return [link for path in self.root.iterdir() if path.is_dir() and (link := _link(path.name))]

    def drop_slot(self, slot: Path) -> None:
        """Remove a slot, or whatever has its name: of a link the link alone."""
        with suppress(OSError):
            if slot.is_dir() and not slot.is_symlink():
                shutil.rmtree(slot, ignore_errors=True)
            else:
                slot.unlink()

    def switch(self, link: Link) -> None:
        """Point `current` at a slot, atomically."""
        fresh = self.root / ".current"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(self.slot(link).name)
        os.replace(fresh, self.root / "current")

    @property
    def trusted(self) -> bool:
        """Was it all written or proven since the machine was started?"""
        try:
            return self.boot.read_text() == boot_id() != ""
        except (OSError, ValueError):
            return False

    def trust(self) -> None:
        """All that is there was written or proven in this run of the machine."""
        draft = self.root / ".boot"
        draft.write_text(boot_id())
        os.replace(draft, self.boot)

    def drop(self, *, keep: Link | None) -> None:
        """Remove every slot but one, and every trace of a move."""
        for link in self.slots():
            if link != keep:
                self.drop_slot(self.slot(link))
        for path in (self.journal, self.next):
            path.unlink(missing_ok=True)
        self.drop_nameless()

    def drop_nameless(self) -> None:
        """Remove the slots whose name is no step's."""
        for path in (self.patching, self.ready):
            self.drop_slot(path)

    def adopt_journal(self) -> None:
        """The journal of a move that is done takes the place of the one before.

        Not at once: a file that replaces another is written out first by some systems, which takes longer than all else
        here. Between the two calls `finish_switch` finds it.
        """
        self.journal.unlink(missing_ok=True)
        os.rename(self.next, self.journal)

    def finish_switch(self) -> None:
        """A move that was killed after its slot was proven and renamed: finish it. Drop what an earlier one left."""
        for path in (self.patching, self.ready):
            if path.is_symlink() or not path.is_dir():  # of no move, and in the way of the next
                self.drop_slot(path)
        if not self.patching.exists() and (done := Journal.read(self.next)) is not None:
            if self.slot(done.end).is_dir():
                self.switch(done.end)
                self.adopt_journal()
            else:
                self.next.unlink()
        for path in self.root.glob(".*.tmp-*"):
            shutil.rmtree(path, ignore_errors=True)


def _link(name: str) -> Link | None:
    step, _, identity = name.partition("-")
    return Link(int(step), identity) if step.isascii() and step.isdigit() and len(identity) == 64 else None


def open_current(cache: str | os.PathLike[str]) -> tuple[Path, Link]:
    """The current slot's directory and step. Raises NotFoundError ``cache-empty``, CheckpointError ``cache-unproven``
    after the machine was started again, since a power cut may have torn it."""
    path, link = find_current(cache)
    if not Cache(Path(cache)).trusted:
        raise CheckpointError(
            "cache-unproven",
            where=cache,
            have="a slot that nobody has proven since this machine was started",
            need="one that is sure to be whole",
            hint="`deltackpt apply REPO CACHE --cache` proves it, or builds it anew.",
        )
    return path, link


def find_current(cache: str | os.PathLike[str]) -> tuple[Path, Link]:
    """The same, proven or not. Raises NotFoundError ``cache-empty``."""
    held = Cache(Path(cache))
    link = held.current()
    if link is None:
        raise NotFoundError(
            "cache-empty",
            where=cache,
            have="no current step",
            need="a managed cache",
            hint="`deltackpt apply REPO CACHE --cache` makes one.",
        )
    return held.slot(link), link


def apply_to_cache(
    repo: Repository,
    cache: str | os.PathLike[str],
    step: str | int | Link = "latest",
    *,
    ref: str = "main",
    threads: int | None = None,
    fresh: bool = False,
    kept: InMemoryPatch | None = None,
    standby: MappedSlot | None = None,
    progress: Progress = SILENT,
) -> ApplyResult:
    """Bring a managed cache to a step, creating it if there is none.

    From an ancestor step only the patches in between are read and only changed elements written. From elsewhere, such
    as a branch that was rewound, the other slot is brought along where it is an ancestor, or the step is built from an
    anchor; the result says why. With ``fresh`` a new directory is built. What is ``kept`` of a patch that leads there
    is not decoded again, what `standby.prepare_standby` left in ``standby`` not mapped again. Raises ConflictError
    ``not-a-cache`` for a directory that holds anything else, ``cache-locked`` while another process moves it,
    StoreError ``not-writable``, and what `materialize.apply` raises; the current step then stays.
    """
    began = time.monotonic()
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

            def once() -> ApplyResult:
                plan = repo.resolve(link, have=current)
                if current == link and not fresh:
                    return result(held.slot(link), plan, 0, began)
                move = _Mover(repo, held, plan, current, count, kept, standby, progress)
                if current == link:
                    written = move.rebuild()
                else:
                    written = move.start_over() if plan.anchor or current is None else move.advance(fresh)
                return replace(result(held.slot(link), move.plan, written, began), rebuilt=torn or move.rebuilt)

            done = again_if_gone(repo, once)
            if torn is not None:
                held.trust()
            return replace(done, leased=leased is not None)


def _torn(repo: Repository, current: Link, slot: Path, threads: int, progress: Progress) -> str | None:
    """Why the current slot cannot be used after the machine was started again, if it cannot."""
    try:
        prove(repo, current, slot, threads, progress)
    except _RECOVERABLE as error:
        return f"step {current.step} was not found whole after this machine was started again [{error.code}]"
    return None


class _Mover:
    """One move of a cache from ``current`` to the plan's target."""

    def __init__(
        self,
        repo: Repository,
        held: Cache,
        plan: Plan,
        current: Link | None,
        threads: int,
        kept: InMemoryPatch | None,
        standby: MappedSlot | None,
        progress: Progress,
    ) -> None:
        self.repo, self.held, self.plan, self.current = repo, held, plan, current
        self.kept, self.standby = kept, standby
        self.threads, self.progress = threads, progress
        self.target = plan.target.link
        self.rebuilt: str | None = None

    def start_over(self) -> int:
        """The current slot is no way to the target, or not the cheapest: take the other one, or an anchor."""
        if self.current is not None:
            self.rebuilt = self._why(self.current)
            if (journal := Journal.read(self.held.journal)) is not None and journal.start != self.target:
                plan = self.repo.resolve(self.target, have=journal.start)
                if plan.anchor is None and self.held.slot(journal.start).is_dir():
                    whole, self.plan = self.plan, plan
                    try:
                        return self.branch(journal.start)
                    except _RECOVERABLE as error:
                        if error.code not in _DAMAGE:
                            raise
                    self.plan = whole
        return self.rebuild()

    def _why(self, current: Link) -> str:
        on_chain = chain.descends(self.target, current, self.repo.load)
        if on_chain is None:
            return f"the steps after {current.step} were collected"
        if on_chain:
            return f"an anchor is cheaper than the patches after step {current.step}"
        if current.step > self.target.step and chain.descends(current, self.target, self.repo.load):
            return f"step {current.step} is after it"
        return f"step {current.step} ({current.id[:12]}) is not on the way to it: the branch was rewound, or is another"

    def advance(self, fresh: bool) -> int:
        """The cheapest way that proves: patch the other slot, or copy the current one and patch, or start over."""
        ways = [self.copy, self.rebuild] if fresh else [self.patch, self.copy, self.rebuild]
        for way in ways[:-1]:
            try:
                return way()
            except _RECOVERABLE as error:
                if error.code not in _DAMAGE:
                    raise
                if way == self.copy and self.current is not None:
                    self.rebuilt = f"step {self.current.step} could not be brought along [{error.code}]"
        return ways[-1]()

    def patch(self) -> int:
        """In O(changes): the other slot, through the redo journal, or as one that was brought along already.

        Killed in the middle, the next move goes by the journal in both cases: its values are absolute.
        """
        assert self.current is not None
        held, moving = self.held, self.held.patching.is_dir()
        layout = self.repo.layout(self.plan.target)
        ends = Journal.ends(held.journal)
        if ends is None or ends[1] != self.current:
            raise _unusable("no journal that leads to the current step")
        if moving:
            held.drop_slot(held.ready)
        ready = held.ready.is_dir()
        other = held.ready if ready else held.slot(ends[0])
        if not moving and not other.is_dir():
            raise _unusable("no other slot")
        if ready and self.standby is not None:
            self.standby.wake()  # while the patch is on its way
        at = self.repo.load(self.current)  # the journal numbers its tensors
        if [s.header for s in self.repo.layout(at).shards] != [s.header for s in layout.shards]:
            raise _unusable("a journal of other tensors")
        begun = Journal.read(held.next) if moving else None
        via = route(self.plan) + ("" if len(self.plan.patches) == 1 else "-merged")
        if begun is not None and (begun.start, begun.end, begun.via) != (self.current, self.target, via):
            raise _unusable("a slot on its way to another step")
        held.drop_slot(held.slot(self.target))  # left by a move long ago: a new journal would vouch for it
        with self._steps(self.current) as steps:
            journal = None if ready else Journal.read(held.journal)
            if begun is not None:
                begun.resume()
            with begun or Journal.create(held.next, self.current, self.target, via) as following:
                if not moving:
                    os.rename(other, held.patching)
                between = at if any(isinstance(step, SquashedPatch) for step in steps) else None
                move = SlotMove(self.repo, self.plan.target, journal, steps, following, between)
                written = patch_slot(move, held.patching, self.threads, self.progress, self.standby)
        os.rename(held.patching, held.slot(self.target))
        held.switch(self.target)
        held.adopt_journal()
        return written

    @contextmanager
    def _steps(self, current: Link) -> Iterator[Sequence[Patch]]:
        """What leads to the target: one patch, or what stands for it."""
        hops = self.plan.patches
        kept = self.kept if self.kept and self.kept.leads(current, self.target, hops) else None
        if kept and kept.whole:
            yield [kept]
            return
        if len(hops) > 1:
            with open_squashed(self.repo, hops, self.held.slot(current), self.threads) as merged:
                yield [merged]
            return
        with PatchReader.open_all(self.repo, hops) as patches:
            yield [kept.over(patches[0]) if kept else patches[0]]

    def copy(self) -> int:
        """A new slot from the current one and the patches; the current one stays as the other slot."""
        assert self.current is not None
        self._drop_others(self.current)
        return self.branch(self.current)

    def _drop_others(self, *keep: Link) -> None:
        self._let_go()
        for link in self.held.slots():
            if link not in keep:
                self.held.drop_slot(self.held.slot(link))
        self.held.drop_nameless()

    def _let_go(self) -> None:
        """What is mapped would keep its room on the disk."""
        if self.standby is not None:
            self.standby.clear()

    def branch(self, start: Link) -> int:
        """A new slot from that of ``start``, which stays as the other slot; a third one goes once this one is
        current.
        """
        self.held.drop_slot(self.held.slot(self.target))  # of an earlier move; nothing proves it
        with Checkpoint.open(self.held.slot(start)) as base, beside(self.held.slot(self.target)) as folder:
            layout = self.repo.layout(self.plan.target)
            digests = self.repo.digests(self.plan.target)
            with (
                Journal.create(self.held.next, start, self.target, route(self.plan)) as following,
                Replay.open(self.repo, self.plan, base, following) as state,
            ):
                build(self.repo, layout, digests, state, folder, self.threads, self.progress)
            os.rename(folder, self.held.slot(self.target))
        self.held.switch(self.target)
        self.held.adopt_journal()
        self._drop_others(start, self.target)
        return layout.size

    def rebuild(self) -> int:
        """A new slot from the repository alone; the old ones go."""
        plan = self.plan if self.plan.anchor else self.repo.resolve(self.target)
        self.plan = plan
        self._let_go()
        layout = self.repo.layout(plan.target)
        slot = self.held.slot(self.target)
        with beside(slot) as folder, Replay.open(self.repo, plan, order=build_order(layout)) as state:
            digests = self.repo.digests(plan.target)
            build(self.repo, layout, digests, state, folder, self.threads, self.progress)
            if os.path.lexists(
                slot
            ):  # a slot of this step that nothing proves: it makes room once the new one is whole
                os.rename(slot, folder.with_name(f"{folder.name}-old"))
            os.rename(folder, slot)
        self.held.switch(self.target)
        self.held.drop(keep=self.target)
        self.held.finish_switch()
        return layout.size


_RECOVERABLE = (ChainError, FormatError, CheckpointError, NotFoundError)
_DAMAGE = {"object-missing"}  # nothing pins the step of the other slot: gc may have taken it
_DAMAGE |= {"slot-unusable", "tensor-differs", "tensor-shape", "base-shape", "checkpoint-changed", "not-safetensors"}
_DAMAGE |= {"shard-missing", "count-outside", "gap-outside", "position-outside", "exception-outside", "step-outside"}
_DAMAGE |= {"unary-count", "tile-length", "tile-short", "padding", "list-wrong"}  # wrong old values lead astray


def route(plan: Plan) -> str:
    """Tells the ways from one step to another apart: a journal counts the patches of one of them."""
    return hashlib.sha256("".join(f.sha256 for hop in plan.patches for f in hop.files).encode()).hexdigest()


def _unusable(have: str) -> ChainError:
    return ChainError("slot-unusable", where="the cache", have=have, need="a slot to patch")


# What another process that makes this cache, or an engine that waits for it, has put there so far.
_MAKING = {"lock", ".cache.json", "cache.json", "receivers"}


@contextmanager
def locked(repo: Repository, root: Path) -> Iterator[Cache]:
    """The cache's directory, made if there is none, checked to be this repository's, and locked by this process."""
    marker = root / "cache.json"
    if not marker.exists():
        there = root.is_symlink() or (root.exists() and not root.is_dir())
        if there or (root.exists() and any(path.name not in _MAKING for path in root.iterdir())):
            raise _not_a_cache(root, "something else there")
        root.mkdir(parents=True, exist_ok=True)
    fd = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConflictError(
                "cache-locked",
                where=root,
                have="another process at work",
                need="one at a time",
                hint="Wait for it, or give every process a cache of its own.",
            ) from error
        if not marker.exists():
            draft = root / ".cache.json"
            with draft.open("w") as file:
                file.write(json.dumps({"format": FORMAT, "version": VERSION, "repository": repo.id}) + "\n")
                file.flush()
                os.fsync(file.fileno())  # the one file here that nothing else can stand for
            os.replace(draft, marker)
            fsync_dir(root)
        try:
            value = json.loads(marker.read_bytes())
            about = (value["format"], value["version"], value["repository"])
        except (OSError, ValueError, KeyError, TypeError):
            about = ("", 0, "")
        if about != (FORMAT, VERSION, repo.id):
            have = f"the cache of repository {about[2]}" if about[0] == FORMAT else "another cache.json"
            raise _not_a_cache(root, have)
        yield Cache(root)
    finally:
        os.close(fd)


def _not_a_cache(root: Path, have: str) -> ConflictError:
    return ConflictError(
        "not-a-cache",
        where=root,
        have=have,
        need="a managed cache of this repository, or an empty directory",
        hint="Choose a directory of its own.",
    )
