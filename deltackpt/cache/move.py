"""One move of a managed cache: patch the other slot, copy and patch, or build anew; the cheapest that is proven."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from deltackpt.cache.cache import Cache
from deltackpt.cache.slot import MappedSlot, SlotMove, patch_slot
from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import ChainError, CheckpointError, FormatError, NotFoundError
from deltackpt.format.manifest import Link
from deltackpt.patch.base import Patch
from deltackpt.patch.in_memory import InMemoryPatch
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.repository import Repository, chain
from deltackpt.repository.chain import Plan
from deltackpt.restore.journal import Journal
from deltackpt.restore.materialize import beside, build, build_order
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay, check_left_over
from deltackpt.restore.squashed import open_squashed
from deltackpt.util.file_server import rename
from deltackpt.util.progress import Progress

# What can be wrong with the slots, the journal or the way, so that another way is tried.
RECOVERABLE = (ChainError, FormatError, CheckpointError, NotFoundError)
JOURNALS = 32  # files of one journal, at most: a thread that moves a large tensor has one for itself
_DAMAGE = {"object-missing"}  # no lease pins the step of the other slot: gc may have removed it
_DAMAGE |= {"slot-unusable", "tensor-differs", "tensor-shape", "base-shape", "checkpoint-changed", "not-safetensors"}
_DAMAGE |= {"shard-missing", "count-outside", "gap-outside", "position-outside", "exception-outside", "step-outside"}
_DAMAGE |= {"unary-count", "tile-length", "tile-short", "padding", "list-wrong"}  # what wrong old values decode to


class CacheMove:
    """One move of a cache from ``current`` to the plan's target. Each way returns the bytes written.

    ``plan`` is the one that was carried out; ``rebuilt`` says why the other slot was not patched.
    """

    def __init__(
        self,
        repo: Repository,
        held: Cache,
        plan: Plan,
        current: Link | None,
        threads: int,
        in_memory: InMemoryPatch | None,
        standby: MappedSlot | None,
        progress: Progress,
    ) -> None:
        self.repo, self.held, self.plan, self.current = repo, held, plan, current
        self.in_memory, self.standby = in_memory, standby
        self.threads, self.progress = threads, progress
        self.target = plan.target.link
        self.rebuilt: str | None = None

    def start_over(self) -> int:
        """The current slot does not lead to the target, or not cheapest: use the other one, or an anchor."""
        if self.current is not None:
            self.rebuilt = self._why(self.current)
            if (journal := Journal.read(self.held.journal)) is not None and journal.start != self.target:
                plan = self.repo.resolve(self.target, have=journal.start)
                if plan.anchor is None and self.held.slot(journal.start).is_dir():
                    whole, self.plan = self.plan, plan
                    try:
                        return self.branch(journal.start)
                    except RECOVERABLE as error:
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

    def forward(self, fresh: bool) -> int:
        """Patch the other slot, or copy the current one and patch, or start over: the first whose result is proven."""
        ways = [self.copy, self.rebuild] if fresh else [self.patch, self.copy, self.rebuild]
        for way in ways[:-1]:
            try:
                return way()
            except RECOVERABLE as error:
                if error.code not in _DAMAGE:
                    raise
                if way == self.copy and self.current is not None:
                    self.rebuilt = f"step {self.current.step} could not be patched [{error.code}]"
        return ways[-1]()

    def patch(self) -> int:
        """In O(changes): the other slot, through the redo journal, or the standby, which is at the current step.

        Killed in the middle, the next move uses the journal in both cases: its values are absolute.
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
            self.standby.make_writable()  # while the patch is read from the store
        at = self.repo.load(self.current)  # the journal numbers its tensors
        if [s.header for s in self.repo.layout(at).shards] != [s.header for s in layout.shards]:
            raise _unusable("a journal of other tensors")
        begun = Journal.read(held.next) if moving else None
        via = route(self.plan) + ("" if len(self.plan.patches) == 1 else "-merged")
        if begun is not None and (begun.start, begun.end, begun.via) != (self.current, self.target, via):
            raise _unusable("a slot on its way to another step")
        if begun is not None:
            begun.resume()  # before another journal is mapped: no file is made shorter that is
        held.drop_slot(held.slot(self.target))  # of an earlier move: the new journal would claim it
        with ExitStack() as stack:
            reader = stack.enter_context(ThreadPoolExecutor(1))  # beside fetching and hashing, which takes as long
            reading = None if ready else reader.submit(Journal.read, held.journal, check=False)
            steps = stack.enter_context(self._steps(self.current))
            journal = reading.result() if reading is not None else None
            following = stack.enter_context(begun or self._journal(self.current, via))
            if not moving:
                rename(other, held.patching)
            between = at if any(isinstance(step, SquashedPatch) for step in steps) else None
            move = SlotMove(self.repo, self.plan.target, journal, steps, following, between)
            written = patch_slot(move, held.patching, self.threads, self.progress, self.standby)
        rename(held.patching, held.slot(self.target))
        held.switch(self.target)
        held.adopt_journal(journal)
        return written

    def _journal(self, start: Link, via: str) -> Journal:
        """A new one, with a file for each thread, up to JOURNALS."""
        more = self.held.records(min(self.threads, JOURNALS) - 1)
        return Journal.create(self.held.next, start, self.target, via, more)

    @contextmanager
    def _steps(self, current: Link) -> Iterator[Sequence[Patch]]:
        """What leads to the target: one patch, or several squashed into one."""
        hops = self.plan.patches
        known = self.in_memory if self.in_memory and self.in_memory.leads(current, self.target, hops) else None
        if known and known.whole:
            yield [known]
            return
        if len(hops) > 1:
            with open_squashed(self.repo, hops, self.held.slot(current), self.threads) as squashed:
                self._check_left_over(current, squashed.patches)
                yield [squashed]
            return
        with PatchReader.open_all(self.repo, hops) as patches:
            self._check_left_over(current, patches)
            yield [known.over(patches[0]) if known else patches[0]]

    def _check_left_over(self, current: Link, patches: Sequence[Patch]) -> None:
        held, layout = self.repo.layout(self.repo.load(current)), self.repo.layout(self.plan.target)
        check_left_over(held.tensors, patches, layout)

    def copy(self) -> int:
        """A new slot from the current one and the patches; the current one stays as the other slot."""
        assert self.current is not None
        self._drop_others(self.current)
        return self.branch(self.current)

    def _drop_others(self, *keep: Link) -> None:
        self._unmap()
        for link in self.held.slots():
            if link not in keep:
                self.held.drop_slot(self.held.slot(link))
        self.held.drop_nameless()

    def _unmap(self) -> None:
        """Files that are removed take space on the disk as long as they are mapped."""
        if self.standby is not None:
            self.standby.clear()

    def branch(self, start: Link) -> int:
        """A new slot from that of ``start``, which stays as the other slot; a third one is removed once this one is
        current.
        """
        self.held.drop_slot(self.held.slot(self.target))  # of an earlier move; nothing proves it
        with Checkpoint.open(self.held.slot(start)) as base, beside(self.held.slot(self.target)) as folder:
            layout = self.repo.layout(self.plan.target)
            digests = self.repo.digests(self.plan.target)
            with (
                self._journal(start, route(self.plan)) as following,
                Replay.open(self.repo, self.plan, base, following) as state,
            ):
                build(self.repo, layout, digests, state, folder, self.threads, self.progress, huge=True)
            rename(folder, self.held.slot(self.target))
        self.held.switch(self.target)
        self.held.adopt_journal()
        self._drop_others(start, self.target)
        return layout.size

    def rebuild(self) -> int:
        """A new slot from the repository alone; the old ones are removed."""
        plan = self.plan if self.plan.anchor else self.repo.resolve(self.target)
        self.plan = plan
        self._unmap()
        layout = self.repo.layout(plan.target)
        slot = self.held.slot(self.target)
        with beside(slot) as folder, Replay.open(self.repo, plan, order=build_order(layout)) as state:
            digests = self.repo.digests(plan.target)
            build(self.repo, layout, digests, state, folder, self.threads, self.progress, huge=True)
            if os.path.lexists(slot):  # a slot of this step, which nothing proves, until the new one is whole
                rename(slot, folder.with_name(f"{folder.name}-old"))
            rename(folder, slot)
        self.held.switch(self.target)
        self.held.drop(keep=self.target)
        self.held.finish_switch()
        return layout.size


def route(plan: Plan) -> str:
    """Tells the ways from one step to another apart: a journal counts the patches of one of them."""
    return hashlib.sha256("".join(f.sha256 for hop in plan.patches for f in hop.files).encode()).hexdigest()


def _unusable(have: str) -> ChainError:
    return ChainError("slot-unusable", where="the cache", have=have, need="a slot to patch")
