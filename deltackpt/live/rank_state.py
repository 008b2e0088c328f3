"""What one engine rank is in a session: its weights, what they were proven to be, and the step that it is ready for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from deltackpt.carriers.pulled import ManySources, PulledParts
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.state_digest import Sums
from deltackpt.live.engine_sums import EngineSums
from deltackpt.live.events import LiveEvent, Report
from deltackpt.live.messages import Announcement, Welcome
from deltackpt.live.parts import StepParts
from deltackpt.live.signed import AnnouncementCheck
from deltackpt.live.slices import SlicedWeights
from deltackpt.live.store_way import HeldState, Pause, StoredStep, StoreWay
from deltackpt.live.weights import HeldWeights, Prepared
from deltackpt.repository import Repository
from deltackpt.shares import ShareProof
from deltackpt.signing.policy import trust_policy


class RankState:
    """``weights`` of one rank. ``state`` is None while they are of no step that is known."""

    def __init__(
        self, weights: HeldWeights, welcome: Welcome, repository: str | Repository | None, token: str, tell: Report
    ) -> None:
        self.step: int | None = None
        self.state: str | None = None
        self.moved = 0  # bytes of parts, for the last step
        self.last: StoredStep | None = None  # what came from the repository last
        self.why = ""
        self._check: AnnouncementCheck | None = None  # where this rank asks for signatures
        self._weights, self._welcome, self._token, self._tell = weights, welcome, token, tell
        self._url = repository  # None: the trainer's
        self._way: StoreWay | None = None
        self._engine_sums: EngineSums | None = None
        self._sums: Mapping[str, Sums] = weights.digest()  # of what this rank holds
        self._known: Mapping[str, Sums] = {}  # of all tensors of the step that it is at
        self._all: Mapping[str, Sums] = {}  # the same, of the step that it is ready for
        self._ready: tuple[Announcement, Prepared | None] | None = None
        self._gone = 0
        self._sources: dict[tuple[str, int], PulledParts] = {}

    @property
    def timeout(self) -> float:
        """Seconds, of the session."""
        return self._welcome.timeout

    @property
    def whole(self) -> bool:
        """Can this rank prove a step by itself?"""
        return self._weights.whole

    @property
    def received(self) -> int:
        """Bytes of parts that came from the trainer's ranks, in all."""
        return self._gone + sum(source.received for source in self._sources.values())

    def add_up_by(self, group: Any, ranks: int) -> None:
        """See `LiveReceiver.with_group`."""
        if isinstance(self._weights, SlicedWeights):  # whole tensors prove themselves
            self._engine_sums = EngineSums(group, ranks, self.timeout / 3, self._weights.cells)

    def proof(self, step: Announcement) -> dict[str, Any]:
        """What this rank adds to the proof of its engine's ranks, for the step that it is ready for. Raises ChainError
        ``tensor-differs`` where it has a copy of what another rank has otherwise."""
        assert self._ready is not None
        prepared = self._ready[1]
        if prepared is None or self._engine_sums is None:
            self.absent(step)
            return prepared.proof if prepared is not None else {}
        mine = ShareProof.from_dict(prepared.proof, "this rank")
        return self._engine_sums.add_up(step.round, mine, step.sums).to_dict()

    def absent(self, step: Announcement) -> None:
        """This rank has no proof to add up with those of the engine's others."""
        if self._engine_sums is not None:
            self._engine_sums.absent(step.round)

    @property
    def unchecked(self) -> list[str]:
        """Of the same step, the tensors that nothing but that proof proves."""
        return self._ready[1].unchecked if self._ready is not None and self._ready[1] is not None else []

    def meet(self, welcome: Welcome, pause: Pause) -> None:
        """Come to the step that is live, or to the repository's newest. Raises ChainError ``tensor-shape`` for a
        session of other tensors, and what reading the repository raises."""
        mine, theirs = ({n: (t.dtype, tuple(t.shape)) for n, t in w.table.items()} for w in (self._welcome, welcome))
        if mine != theirs:
            have = "a session of other tensors"
            raise ChainError("tensor-shape", where=welcome.repository, have=have, need="those of the one before")
        self._close_sources()
        if welcome.repository != self._welcome.repository:
            self._way = None
        self._welcome = welcome
        self._ask_for_signatures()
        if self.state is None and welcome.state is not None and self._is(welcome):
            self.step, self.state, self._known = welcome.step, welcome.state, dict(welcome.sums)
        if welcome.state is not None and self.state != welcome.state:
            self.catch_up(pause, welcome.step)  # before the first step there is nothing to catch up to: it brings all

    def _ask_for_signatures(self) -> None:
        """As the repository that this rank was given does, or as the environment says."""
        asks = self._url.trust if isinstance(self._url, Repository) else trust_policy()
        if asks is not None:
            self._check = AnnouncementCheck(self._store_way().repo, self._welcome.ref)

    def _is(self, welcome: Welcome) -> bool:
        """Are the weights those of the step that is live?"""
        return self._weights.whole and self._digest(welcome.sums) == welcome.state and self._same(welcome.sums)

    def _same(self, sums: Mapping[str, Sums]) -> bool:
        return all(sums.get(name) == found for name, found in self._sums.items())

    def _digest(self, sums: Mapping[str, Sums]) -> str | None:
        """The state digest, hex; None without the sums of every tensor."""
        table = self._welcome.table
        if sums.keys() != table.keys():
            return None
        return state_digest.state((t.name, t.dtype, tuple(t.shape), sums[t.name]) for t in table.values())

    def prepare(self, step: Announcement, pause: Pause) -> bool:
        """Move and prove a step; nothing is written. -> is it ready? Not where this rank is at another step
        than the one that it follows, and the repository does not lead there, nor where signatures are asked for that
        the step does not have; `why` then says so.

        Raises what `PulledParts.part`, `PatchReader` and `HeldWeights.prepare` raise, ChainError ``state-unexpected``
        for an announcement that does not agree with itself.
        """
        self._ready, self.moved, self.why = None, 0, ""
        if step.full and self._weights.whole and self._digest(self._sums) == step.state:
            self.state, self._known = step.state, dict(step.sums)  # the weights that training began with
        if self.state == step.state:
            self._ready = (step, None)
            return True
        if self._check is not None and (why := self._check.why_not(step)):
            self.why = f"at step {self.step}: step {step.step} is not taken from the session: {why}"
            self._tell(LiveEvent("refused", step.step, text=self.why))
            return False
        if not step.full and self.state != step.base:
            self.catch_up(pause, step.step - 1)
            if self.state == step.state:
                self._ready = (step, None)
                return True
            if self.state != step.base:
                return False
        sums = dict(step.sums) if step.full else {**self._known, **step.sums}
        agrees = cache(lambda: self._agrees(step, sums))  # nothing is written before that is looked at
        self._tell(LiveEvent("move", step.step))
        before = self.received
        near = {part.file.name: part.near for part in step.parts}
        hashed = self._check is not None
        parts = StepParts(self._source(step), step.hop, step.full, hashed=hashed, near=near, meanwhile=agrees)
        prepared = self._weights.take(parts, self._sums, sums if step.full else step.sums)
        agrees()
        self._tell(LiveEvent("prove", step.step))
        self.moved = self.received - before
        self._all = sums
        self._ready = (step, prepared)
        return True

    def _agrees(self, step: Announcement, sums: Mapping[str, Sums]) -> None:
        if self._digest(sums) != step.state:
            have, need = "sums of another state", f"state {step.state[:16]}"
            raise ChainError("state-unexpected", where=f"step {step.step}, as it was announced", have=have, need=need)

    def write(self, step: Announcement) -> int:
        """Write the step that this rank is ready for; -> elements. Raises what writing raises: the weights then are
        what they were, or, where they were of no step, of none."""
        assert self._ready is not None
        assert self._ready[0] is step, "the step that is ready"
        prepared, self._ready = self._ready[1], None
        if prepared is None:
            self.step = step.step
            return 0
        if step.full:
            self.step = self.state = None
        prepared.write()
        self._sums = dict(prepared.sums) if self._weights.whole else {}
        self._known, self.step, self.state = self._all, step.step, step.state
        return prepared.elements

    def forget(self) -> None:
        """The step that was prepared is not written."""
        self._ready = None

    def stored(self, state: str) -> bool:
        """Does the repository have a step with this state? Raises what reading it raises."""
        return self._store_way().has(state) is not None

    def catch_up(self, pause: Pause, session: int | None = None) -> StoredStep | None:
        """Move to the repository's newest step; None where there is none yet, or only an earlier one than this rank
        has: unless the ``session`` is at an earlier one, too. Raises what reading it raises."""
        back = session is not None and self.step is not None and session < self.step
        at = HeldState(self.step, self.state, self._sums)
        if self.state is None:
            self.step = None
        found = self._store_way().catch_up(self._weights, at, pause, back=back)
        if found is None:
            return None
        if found.state == self.state:
            self.step = found.link.step
            return found
        self.last = found
        self.step, self.state, self._known = found.link.step, found.state, dict(found.sums)
        self._sums = {name: found.sums[name] for name in self._sums}
        return found

    def distrust(self) -> None:
        """The weights are not what they were proven to be: look at all of them again."""
        self.step = self.state = self._ready = None
        self._sums = self._weights.digest()

    def close(self) -> None:
        """End the connections to the trainer's ranks."""
        self._close_sources()

    def _store_way(self) -> StoreWay:
        if self._way is None:
            found = self._url or self._welcome.repository
            repo = found if isinstance(found, Repository) else Repository.open(found)
            self._way = StoreWay(repo, self._welcome.ref, self._welcome.table)
        return self._way

    def _source(self, step: Announcement) -> ManySources:
        owners: dict[str, PulledParts] = {}
        limit = self._welcome.load_timeout if step.full else self._welcome.timeout
        for part in step.parts:
            if part.address not in self._sources:
                device = getattr(self._weights, "device", None)
                made = PulledParts(part.address, part.rank, self._token, self._welcome.carrier, limit, device)
                self._sources[part.address] = made
            owners[part.file.name] = self._sources[part.address]
            owners[part.file.name].timeout = limit
        return ManySources(owners)

    def _close_sources(self) -> None:
        self._gone = self.received
        for source in self._sources.values():
            source.close()
        self._sources.clear()
