"""One captured step to the engines: every rank of the trainer offers its share, the first one leads the round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from deltackpt.carriers.memory import PartsInMemory
from deltackpt.format import state_digest
from deltackpt.format.manifest import File
from deltackpt.format.state_digest import Sums
from deltackpt.hooks.encode import sums_of
from deltackpt.hooks.live import LiveTrainer
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.parts import Share
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.process_group import collect, share
from deltackpt.live.encode import MemorySink, encode_all, encode_changes
from deltackpt.live.events import LiveEvent, Report
from deltackpt.live.gate import PublishGate
from deltackpt.live.link_rate import LinkRate
from deltackpt.live.members import Member, Members
from deltackpt.live.messages import NOTHING, Announcement, PartOffer
from deltackpt.live.options import LiveOptions
from deltackpt.live.plain_part import PlainParts
from deltackpt.live.round import Round, run
from deltackpt.live.signed import signed
from deltackpt.live.state import LiveState
from deltackpt.patch.part import Near, Origin
from deltackpt.util.garbage import collections_put_off


@dataclass(frozen=True)
class _Plan:
    """What all ranks do with a step: the first one decides."""

    origin: Origin
    full: bool  # of all weights
    wanted: bool  # is there an engine rank to take parts?


@dataclass
class _Offer:
    """What one rank did: its share, and the parts that it offers."""

    share: Share
    files: list[File]
    near: list[Near]  # of each file


class Delivery:
    """Used by one thread of every rank of the trainer. ``live`` is known to the first rank, ``addresses`` are those at
    which the ranks serve parts, in their order."""

    def __init__(
        self, trainer: LiveTrainer, options: LiveOptions, members: Members, gate: PublishGate, parts: PartsInMemory,
        tell: Report,
    ) -> None:  # fmt: skip
        self.live: LiveState | None = None
        self.addresses: list[tuple[str, int]] = []
        self._trainer, self._options, self._members = trainer, options, members
        self._gate, self._parts, self._tell = gate, parts, tell
        self._link, self._plain = LinkRate(options.rate), PlainParts()
        # Bytes on a card are hashed, on the host, only for who has to sign them.
        self._hashed = options.carrier != "nccl" or trainer.repository.signer is not None
        self._round = 0
        self._signed = 0  # when the last announcement was
        self._asked: list[Member] = []  # who was in when the step was planned
        self._parent = trainer.base.link.id if trainer.base else NOTHING

    def deliver(self, captured: CapturedStep) -> StepMetrics | None:
        """See `Session.deliver`."""
        began = time.monotonic()
        group = self._trainer.group
        plan = share(group, lambda: self._plan(captured))
        sink = MemorySink(self._parts, captured.step, hashed=self._hashed)
        try:
            offer, error = _Offer(Share(), [], []), None
            try:
                offer = self._offer(sink, captured, plan)
            except Exception as failed:
                error = failed
            offers = collect(group, offer, error)
            metrics: StepMetrics | None = share(group, lambda: self._lead(captured, plan, offers, began))
            return metrics
        finally:
            sink.withdraw()

    def _offer(self, sink: MemorySink, captured: CapturedStep, plan: _Plan) -> _Offer:
        if plan.full and not plan.wanted:
            return _Offer(Share(sums=self._trainer.state.sums()), [], [])
        if plan.full:
            return _Offer(encode_all(sink, self._trainer, plan.origin), sink.files, sink.near)
        if plan.wanted:
            with collections_put_off():
                made = encode_changes(sink, self._trainer, captured, plan.origin, self._link, self._plain)
            return _Offer(made, sink.files, sink.near)
        deltas = captured.deltas
        sums = {name: sums_of(delta) for name, delta in deltas.items()}
        return _Offer(Share(sums=sums, changed={name: len(d.positions) for name, d in deltas.items()}), [], [])

    # The first rank

    def _plan(self, captured: CapturedStep) -> _Plan:
        assert self.live is not None
        repository, state = self._trainer.repository.id, self.live.state
        if state is None:
            count, limit = self._options.engines, self._options.load_timeout
            if not self._members.wait(count, limit):
                have, need = f"{len(self._members)} engine ranks after {limit:g} s", str(count)
                self._tell(LiveEvent("left", captured.step, text=f"found {have}, expected {need}"))
            self._asked = self._members.all()
            return _Plan(Origin(repository, captured.step, NOTHING, NOTHING), True, bool(self._asked))
        found = self._gate.find(state)
        parent = found.id if found else self._parent
        self._asked = self._members.all()
        return _Plan(Origin(repository, captured.step, parent, state), False, bool(self._asked))

    def _lead(self, captured: CapturedStep, plan: _Plan, offers: list[_Offer], began: float) -> StepMetrics:
        assert self.live is not None
        sums = self._sums(plan, offers)
        state = self.live.digest(sums)
        self._round += 1
        changed = sums if plan.full else {name: sums[name] for offer in offers for name in offer.share.sums}
        step = Announcement(
            self._round, captured.step, plan.origin.repository, plan.origin.parent, plan.origin.base, state,
            self._offered(offers), changed,
        )  # fmt: skip
        step = signed(step, self._trainer.ref, self._trainer.repository.signer, self._signed)
        self._signed = step.time
        limit = self._options.load_timeout if plan.full else self._options.timeout
        made = Round(self._members, self._asked, step, self._tell, limit=limit, timeout=self._options.timeout)
        first = self._options.durable == "first"

        def durable(tick: Callable[[], None]) -> None:
            self._gate.wait(captured.step, state, tick)

        def decide() -> None:
            assert self.live is not None
            self.live.move(captured.step, state, sums)
            self._parent = state

        try:
            done = run(made, self.live.tensors, durable if first else None, decide)
        except Exception as error:
            self._tell(LiveEvent("not-live", captured.step, text=getattr(error, "code", type(error).__name__)))
            raise
        took = time.monotonic() - began
        self._tell(LiveEvent("live", captured.step, text=f"{len(done)} engine ranks", seconds=took))
        size = sum(file.size for offer in offers for file in offer.files)
        return self._metrics(captured, offers, size, {**made.seconds, "live": took})

    def _sums(self, plan: _Plan, offers: list[_Offer]) -> dict[str, Sums]:
        """Those of every tensor after the step: what all ranks' shares come to, each element once."""
        assert self.live is not None
        sums: dict[str, Sums] = {} if plan.full else dict(self.live.sums)
        for offer in offers:
            for name, gained in offer.share.sums.items():
                sums[name] = state_digest.add(sums.get(name, state_digest.ZERO), gained)
        return {name: sums.get(name, state_digest.ZERO) for name in self.live.tensors}

    def _offered(self, offers: list[_Offer]) -> tuple[PartOffer, ...]:
        return tuple(
            PartOffer(file, rank, self.addresses[rank], near)
            for rank, offer in enumerate(offers)
            for file, near in zip(offer.files, offer.near, strict=True)
        )

    def _metrics(
        self, captured: CapturedStep, offers: list[_Offer], size: int, seconds: Mapping[str, float]
    ) -> StepMetrics:
        return StepMetrics(
            step=captured.step,
            steps=captured.merged,
            anchor=False,
            elements=0,
            changed=sum(count for offer in offers for count in offer.share.changed.values()),
            bytes=size,
            queue=0,
            seconds=dict(seconds),
        )
