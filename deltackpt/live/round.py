"""One step, seen from the trainer's first rank: announce, wait for votes, agree, write, wait for the word that it is.

The step is decided at one instant: when all votes that came in time are in and, unless the session is ahead of the
repository, the step is durable. Before it no rank writes; after it every rank that voted for it does.
"""

from __future__ import annotations

import selectors
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from deltackpt.carriers.wire import Deadline, error_of
from deltackpt.errors import ChainError, DeltackptError
from deltackpt.format.digests import UNSTATED
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.live.events import LiveEvent, Report
from deltackpt.live.members import Member, Members
from deltackpt.live.messages import Announcement
from deltackpt.shares import ShareProof

MESSAGE = 5.0  # seconds that one message may take to pass, once it has begun

LOOK = 0.5  # seconds after which a waiting thread looks around

Answer = dict[str, Any]


class Round:
    """Of ``asked``, who were in when the step was made. ``limit``: seconds for the votes, moving and proving included;
    ``timeout``: for writing."""

    def __init__(
        self, members: Members, asked: list[Member], step: Announcement, tell: Report, *, limit: float, timeout: float
    ) -> None:
        self._members, self._asked, self._step, self._tell = members, asked, step, tell
        self._limit, self._timeout = limit, timeout
        self.ready: list[Member] = []
        self._proofs: dict[Member, Any] = {}
        self._unchecked: dict[Member, Any] = {}
        self.seconds: dict[str, float] = {}

    def vote(self) -> None:
        """Announce the step, and find out who is ready for it. Who does not answer in time is let go."""
        began = time.monotonic()
        self._phase("announce")
        asked = self._send(self._asked, {"announce": self._step.to_dict()})
        self._phase("move")
        answers = self._answers(asked, Deadline(self._limit))
        ready = [m for m, answer in answers.items() if answer.get("vote") == "ready"]
        for member, answer in answers.items():
            if answer.get("vote") == "behind":
                self._tell(LiveEvent("behind", self._step.step, member.name, str(answer.get("why", ""))[:500]))
            elif answer.get("vote") != "ready":
                error = error_of(answer.get("error"), member.name)
                self._let_go(member, "refused", f"{error.code}: {error.sentence()}")
        self._proofs = {m: answer.get("proof") or {} for m, answer in answers.items()}
        self._unchecked = {m: answer.get("unchecked") for m, answer in answers.items()}
        self.ready = self._whole_engines(ready)
        self.seconds["move"] = time.monotonic() - began

    def prove(self, tensors: Mapping[str, Tensor]) -> None:
        """Add up what the ranks of each engine have sent of their slices: an engine whose ranks together do not have
        the step is let go."""
        for engine in {m.engine for m in self.ready if self._proofs[m]}:
            ranks = [m for m in self.ready if m.engine == engine]
            try:
                self._add_up(ranks, tensors)
            except DeltackptError as error:
                for member in self._send(ranks, {"drop": self._step.round, "distrust": True}):
                    self._let_go(member, "refused", f"{error.code}: {error.sentence()}")
                self.ready = [m for m in self.ready if m not in ranks]

    def _add_up(self, ranks: list[Member], tensors: Mapping[str, Tensor]) -> None:
        total = ShareProof()
        for member in ranks:
            total = total + ShareProof.from_dict(self._proofs[member], member.name)
        wanted = {name: TensorDigest(sums, UNSTATED) for name, sums in self._step.sums.items()}
        known = {name: tensors[name] for name in wanted if name in tensors}
        where = f"step {self._step.step}"
        report = total.check(known, wanted, where)
        for member in ranks:
            names = self._unchecked[member]
            loose = {*report.open} & {str(name) for name in names} if isinstance(names, list) else {*report.open}
            if loose:
                have, need = "bytes that no checksum and no sum proves", "a rank for every element of it"
                raise ChainError("tensor-differs", where=f"{where}, {min(loose)[:80]!r}", have=have, need=need)

    def hold(self) -> None:
        """Tell those who are ready that it takes longer. Who is gone meanwhile is let go, and its engine with it."""
        alive = self._send(self.ready, {"hold": self._step.round})
        for member in alive:
            if member.wire.ended:
                self._let_go(member, "left", "the connection was closed")
        self.ready = self._whole_engines(m for m in alive if m.wire.fileno() >= 0)

    def withdraw(self, why: str) -> None:
        """No one is to write."""
        self._send(self.ready, {"drop": self._step.round, "why": why[:500]})
        self.ready = []

    def write(self) -> list[Member]:
        """The step is decided: everyone who is ready writes. -> who has said that it did."""
        began = time.monotonic()
        self._phase("write")
        asked = self._send(self.ready, {"write": self._step.round, "state": self._step.state})
        answers = self._answers(asked, Deadline(self._timeout))
        done = [m for m, answer in answers.items() if answer.get("written") == self._step.state]
        for member, answer in answers.items():
            if member not in done:
                error = error_of(answer.get("error"), member.name)
                self._let_go(member, "left", f"{error.code}: {error.sentence()}")
        self.seconds["write"] = time.monotonic() - began
        return done

    def tell_others(self, done: Iterable[Member]) -> None:
        """Who is in and was not part of it learns that the step is live, and where: in the repository."""
        there = set(done)
        others = [m for m in self._members.all() if m not in there]
        self._send(others, {"live": self._step.step, "state": self._step.state})

    def agree(self) -> None:
        """All votes are in."""
        self._phase("agree")

    def _phase(self, name: str) -> None:
        self._tell(LiveEvent(name, self._step.step))

    def _whole_engines(self, ready: Iterable[Member]) -> list[Member]:
        """Those of ``ready`` all of whose engine's ranks are. The others are told that the step is not for them."""
        found = list(ready)
        there = Counter(m.engine for m in found)
        alone = [m for m in found if there[m.engine] < m.ranks]
        if alone:
            why = "another rank of this engine is not ready"
            self._send(alone, {"drop": self._step.round, "why": why})
        return [m for m in found if m not in alone]

    def _send(self, members: Iterable[Member], message: dict[str, Any]) -> list[Member]:
        """-> those whom it reached."""
        sent = []
        for member in members:
            try:
                member.wire.send(message, Deadline(MESSAGE))
                sent.append(member)
            except DeltackptError as error:
                self._let_go(member, "left", error.sentence())
        return sent

    def _answers(self, asked: Iterable[Member], deadline: Deadline) -> dict[Member, Answer]:
        """The answer of each, those to earlier rounds left out. Who gives none in time is let go."""
        answers: dict[Member, Answer] = {}
        with selectors.DefaultSelector() as waiting:
            for member in asked:
                with suppress(ValueError, KeyError, OSError):
                    waiting.register(member.wire, selectors.EVENT_READ, member)
            missing = set(asked)
            while missing and deadline.left > 0:
                missing -= {m for m in missing if m.wire.fileno() < 0}  # let go by another thread
                for key, _ in waiting.select(min(deadline.left, LOOK)):
                    answer = self._answer_of(key.data)
                    if answer == {}:
                        continue
                    waiting.unregister(key.fileobj)
                    missing.discard(key.data)
                    if answer is not None:
                        answers[key.data] = answer
                    else:
                        self._members.drop(key.data)
        for member in missing:
            self._let_go(member, "left", f"no answer in {deadline.seconds:g} s")
        return answers

    def _answer_of(self, member: Member) -> Answer | None:
        """The next message of a member; {} for one of another round, None where there is none any more."""
        try:
            answer = member.wire.receive(Deadline(MESSAGE))
        except DeltackptError as error:
            self._tell(LiveEvent("left", self._step.step, member.name, error.sentence()))
            return None
        return answer if answer.get("round") == self._step.round else {}

    def _let_go(self, member: Member, kind: str, why: str) -> None:
        self._tell(LiveEvent(kind, self._step.step, member.name, why))
        self._members.drop(member)


Decide = Callable[[], None]


def run(
    step: Round, tensors: Mapping[str, Tensor], durable: Callable[[Callable[[], None]], None] | None, decide: Decide
) -> list[Member]:
    """The whole of a round. ``durable`` waits until the repository has the step, calling what it is given once in a
    while; None: that is not waited for. ``decide`` is called at the instant of the decision. -> who has written.

    Raises what ``durable`` raises, when everyone was told not to write.
    """
    step.vote()
    step.prove(tensors)
    step.agree()
    try:
        if durable is not None:
            durable(step.hold)
        step.hold()
        decide()
    except BaseException as error:
        step.withdraw(getattr(error, "code", type(error).__name__))
        raise
    done = step.write()
    step.tell_others(done)
    return done
