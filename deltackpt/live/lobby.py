"""How an engine's rank comes in: it is told what there is, catches up by itself, and then takes part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deltackpt.carriers.wire import Deadline, Wire, foreign
from deltackpt.errors import DeltackptError
from deltackpt.hooks.live import LiveTrainer
from deltackpt.live.events import LiveEvent, Report
from deltackpt.live.members import Member, Members
from deltackpt.live.messages import Welcome
from deltackpt.live.options import LiveOptions
from deltackpt.live.state import LiveState

MAX_RANKS = 1 << 16
MAX_NAME = 200  # characters of an engine's name


class Lobby:
    """At the trainer's first rank. `admit` is called by the thread of a connection."""

    def __init__(
        self, trainer: LiveTrainer, options: LiveOptions, live: LiveState, members: Members, tell: Report
    ) -> None:
        self._trainer, self._options, self._live = trainer, options, live
        self._members, self._tell = members, tell

    def admit(self, wire: Wire, hello: Mapping[str, Any]) -> bool:
        """Talk to a rank that wants to join; -> is it in? It may take ``load_timeout`` to catch up before it is."""
        options = self._options

        def send(message: Mapping[str, Any]) -> None:
            wire.send(message, Deadline(options.timeout))

        try:
            engine, rank, ranks = _who(hello, wire.where)
            self._members.check(engine, rank, ranks)
            welcome = self._welcome()
            send({"welcome": welcome.to_dict()})
            answer = wire.receive(Deadline(options.load_timeout))
            if answer.get("in") is not True:
                return False
            member = Member(wire, engine, rank, ranks)
            self._members.check(engine, rank, ranks)
            send({"in": True})
            self._members.add(member)
            step, state, _ = self._live.now
            if state != welcome.state:  # a step went live meanwhile
                send({"live": step, "state": state})
        except DeltackptError as error:
            self._tell(LiveEvent("refused", None, wire.where, error.sentence()))
            send({"error": error.to_dict()})
            return False
        self._tell(LiveEvent("joined", self._live.step, member.name))
        return True

    def say(self, wire: Wire, hello: Mapping[str, Any]) -> bool:
        """Tell which state is live, to a rank that lost its connection before it heard; the connection is not kept."""
        step, state, _ = self._live.now
        wire.send({"step": step, "state": state}, Deadline(self._options.timeout))
        return False

    def _welcome(self) -> Welcome:
        step, state, sums = self._live.now
        trainer, options = self._trainer, self._options
        url, times = trainer.repository.store.url, (options.timeout, options.load_timeout)
        return Welcome(url, trainer.ref, self._live.tensors, step, state, sums, options.carrier, *times)


def _who(hello: Mapping[str, Any], where: str) -> tuple[str, int, int]:
    engine, rank, ranks = hello.get("engine"), hello.get("rank"), hello.get("ranks")
    known = isinstance(engine, str) and 0 < len(engine) <= MAX_NAME and engine.isprintable()
    if not known or type(rank) is not int or type(ranks) is not int or not 0 <= rank < ranks <= MAX_RANKS:
        raise foreign(where, f"engine {engine!r}, rank {rank!r} of {ranks!r}"[:200], "a name, and a rank of its ranks")
    assert isinstance(engine, str)
    return engine, rank, ranks
