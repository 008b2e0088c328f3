"""The engine's side of a live session: one rank's weights, moved from step to step in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from deltackpt.carriers.handshake import introduce
from deltackpt.carriers.wire import Deadline, Wire, error_of, foreign
from deltackpt.engines.tracing import Load
from deltackpt.errors import (
    ChainError,
    ConflictError,
    DeltackptError,
    FormatError,
    NotFoundError,
    StoreError,
    UsageError,
)
from deltackpt.live.card import module_weights
from deltackpt.live.events import LiveEvent, Report, teller
from deltackpt.live.messages import Announcement, Welcome
from deltackpt.live.options import check_seconds, check_token, host_and_port, require
from deltackpt.live.rank_state import RankState
from deltackpt.live.store_way import Pause, StoredStep
from deltackpt.live.traced import traced
from deltackpt.live.weights import HeldWeights
from deltackpt.repository import Repository
from deltackpt.torch_views.names import Rename

CONNECT = 5.0  # seconds that a trainer that was lost may take to answer again, or less
RETRY = 1.0  # seconds between two attempts to reach it
OF_TRUST = ("signature-", "keys-", "first-use-", "rewind-", "repository-replaced")  # nothing is wrong with the weights
DOUBT = 3.0  # times the session's timeout that a rank that is ready waits for the next word


@dataclass(frozen=True)
class LiveStep:
    """A step that is now in the weights. ``way``: "live", or "store" for one that was read from the repository, and
    ``elements`` were written, ``received`` bytes received.
    """

    step: int
    state: str
    way: str
    elements: int
    received: int

    def to_dict(self) -> dict[str, Any]:
        """By the names of its fields."""
        return asdict(self)


def join(
    model: torch.nn.Module | Callable[[Welcome], HeldWeights],
    address: str,
    *,
    token: str,
    engine: str = "engine",
    rank: tuple[int, int] = (0, 1),
    rename: Rename | None = None,
    load: Load | None = None,
    repository: str | Repository | None = None,
    timeout: float = 60.0,
    report: Report | None = None,
) -> LiveReceiver:
    """Join a session with the weights of ``model``, which may be of any step, or of none.

        receiver = join(model, "10.0.0.1:7700", token=secret, engine="rollout-3")

    ``model``       a torch module with the whole tensors of the session under some names, or a function that gives
                    `HeldWeights` for what the session has
    ``engine``      a name; ``rank``, (this one, of how many): ranks of one engine switch together
    ``load``        the engine's own loader of (name, tensor): it is traced once; this rank then holds what it copies
                    into the parameters of ``model``, where these are, and pulls the tiles of that alone
    ``rename``      gives the checkpoint's name for a module's, None to leave one out
    ``repository``  where this rank reads what it missed, a URL or open; None: the URL that the trainer uses. Where it
                    asks for signatures (`Repository.secure`, DELTACKPT_TRUST), so does this rank of the session: a step
                    that the trainer's key did not sign is not taken from it
    ``timeout``     seconds in which the trainer has to answer
    ``report``      is called with every `LiveEvent` of this rank; None: to the log "deltackpt.live"

    Weights that are not of the step that is live are first moved to the newest one of the repository. Raises StoreError
    ``live-lost`` where no session answers, UsageError ``live-token``, ``live-option``, ConflictError ``live-taken`` for
    a rank that is in, CheckpointError ``model-differs``, and what reading the repository raises.
    """
    host_and_port(address)
    check_token(token)
    check_seconds("timeout", timeout)
    known = isinstance(rank, tuple) and [type(n) for n in rank] == [int, int] and 0 <= rank[0] < rank[1]
    require("rank", rank, known, "a rank, and the number of ranks above it")

    def made(welcome: Welcome) -> HeldWeights:
        if not isinstance(model, torch.nn.Module):
            return model(welcome)
        return module_weights(model, welcome.table, rename) if load is None else traced(load, model, welcome.table)

    hello = {"kind": "join", "engine": engine, "rank": rank[0], "ranks": rank[1]}
    receiver = LiveReceiver(address, token, hello, made, repository, timeout, teller(report))
    receiver.connect(timeout, nullcontext)
    return receiver


class LiveReceiver:
    """One rank's place in a session, made by `join`. Used by one thread."""

    def __init__(
        self, address: str, token: str, hello: dict[str, Any], weights: Callable[[Welcome], HeldWeights],
        repository: str | Repository | None, timeout: float, tell: Report,
    ) -> None:  # fmt: skip
        self._address, self._token, self._hello, self._timeout = address, token, hello, timeout
        self._weights, self._repository, self._tell = weights, repository, tell
        self._wire: Wire | None = None
        self._rank_state: RankState | None = None
        self._closed = False
        self._retry = 0.0  # when the trainer is tried next
        self.why = ""  # the trainer cannot be reached: what was seen last

    @property
    def connected(self) -> bool:
        """Is this rank in the session? If not, it goes by the repository, and tries to come back at each `receive`."""
        return self._wire is not None

    @property
    def step(self) -> int | None:
        """The step that the weights are; None for weights of none."""
        return self._rank_state.step if self._rank_state else None

    @property
    def state(self) -> str | None:
        """The state digest of the weights, as it was proven last."""
        return self._rank_state.state if self._rank_state else None

    @property
    def received(self) -> int:
        """Bytes of parts that came from the trainer's memory, in all."""
        return self._rank_state.received if self._rank_state else 0

    def with_group(self, group: Any) -> LiveReceiver:
        """Say, on every rank of an engine and before the first `receive`, which group of torch.distributed they are, on
        any backend, that nothing else uses -> itself. Ranks that hold slices then add up their sums by `all_reduce`,
        and the trainer hears one proof for the engine. Where a rank does not answer in a third of the session's
        timeout, every rank sends its own, as without. Raises UsageError ``live-option``."""
        assert self._rank_state is not None
        self._rank_state.add_up_by(group, self._hello["ranks"])
        return self

    def connect(self, timeout: float, pause: Pause) -> None:
        """Come in. Raises what `join` raises."""
        wire = Wire.connect(host_and_port(self._address), self._address, Deadline(timeout))
        try:
            introduce(wire, self._token, self._hello, Deadline(timeout))
            welcome = Welcome.of(_field(wire.receive(Deadline(timeout)), "welcome", wire.where), wire.where)
            if self._rank_state is None:
                self._rank_state = RankState(self._weights(welcome), welcome, self._repository, self._token, self._tell)
            self._rank_state.meet(welcome, pause)
            wire.send({"in": True}, Deadline(timeout))
            _field(wire.receive(Deadline(timeout)), "in", wire.where)
        except BaseException:
            wire.close()
            raise
        self._wire, self.why = wire, ""

    def offered(self, timeout: float) -> bool:
        """Is there something to receive, or no session to receive it from, within ``timeout`` seconds? For ranks that
        have to call `receive` at one time."""
        return self._wire is None or self._wire.readable(timeout)

    def receive(self, timeout: float = 0.0, *, pause: Pause = nullcontext) -> LiveStep | None:
        """Receive the next step, if one is offered within ``timeout`` seconds; None if none is.

        Once a step is offered this returns when it is in the weights or will not be, which takes no longer than the
        session's timeouts. ``pause`` gives a context in which the engine uses no weights: it is held while they are
        written. Where the trainer cannot be reached, the newest step of the repository is taken. Raises UsageError
        ``live-closed``, and where neither can be reached, what the repository raised.
        """
        if self._closed or self._rank_state is None:
            raise UsageError("live-closed", where="a live receiver", have="one that was closed", need="an open one")
        before = self._rank_state.state
        if self._wire is None and not self._back(pause):
            return self._by_store(pause, timeout)
        if self._rank_state.state != before:
            return self._stored(self._rank_state.last)
        wire = self._wire
        assert wire is not None
        try:
            if not wire.readable(timeout):
                return None
            message = wire.receive(Deadline(self._timeout))
            if "announce" in message:
                return self._take(wire, Announcement.of(message["announce"], wire.where), pause)
            if "live" in message and message.get("state") != self._rank_state.state:
                return self._stored(self._rank_state.catch_up(pause))  # it went live without this rank
            return None  # a word on a round that is over
        except (StoreError, FormatError, NotFoundError) as error:
            self._fall_out(error)  # nothing is wrong with the weights
            return None
        except BaseException as error:
            self._fall_out(error)
            if isinstance(error, ChainError) and error.code == "base-shape":
                return None  # slices that tiles do not fit
            if isinstance(error, ChainError) and not error.code.startswith(OF_TRUST):
                self._rank_state.distrust()
            raise

    def close(self) -> None:
        """Leave the session. The weights stay as they are."""
        self._closed = True
        if self._wire is not None:
            self._wire.close()
        if self._rank_state is not None:
            self._rank_state.close()

    # One step

    def _take(self, wire: Wire, step: Announcement, pause: Pause) -> LiveStep | None:
        rank = self._rank_state
        assert rank is not None
        answer = {"round": step.round}
        self._tell(LiveEvent("announce", step.step))
        try:
            ready = self._prepared(rank, step, pause)
            proof = rank.proof(step) if ready else {}
        except DeltackptError as error:
            with suppress(DeltackptError):
                wire.send({**answer, "vote": "refused", "error": error.to_dict()}, Deadline(self._timeout))
            raise
        if not ready:
            wire.send({**answer, "vote": "behind", "why": rank.why or f"at step {rank.step}"}, Deadline(self._timeout))
            return None
        self._tell(LiveEvent("agree", step.step))
        try:
            vote = {**answer, "vote": "ready", "proof": proof, "unchecked": rank.unchecked}
            wire.send(vote, Deadline(self._timeout))
            decided = self._decision(wire, step)
        except DeltackptError as error:
            if not self._resolve(step, error):
                rank.forget()
                raise
            decided = True
        if not decided:
            rank.forget()
            return None
        self._tell(LiveEvent("write", step.step))
        with pause():
            elements = rank.write(step)
        if self._wire is wire:
            try:
                wire.send({**answer, "written": step.state}, Deadline(self._timeout))
            except DeltackptError as error:
                self._fall_out(error)
        return LiveStep(step.step, step.state, "live", elements, rank.moved)

    @staticmethod
    def _prepared(rank: RankState, step: Announcement, pause: Pause) -> bool:
        """See `RankState.prepare`; the engine's other ranks do not wait for one that is not ready."""
        ready = False
        try:
            ready = rank.prepare(step, pause)
        finally:
            if not ready:
                rank.absent(step)
        return ready

    def _decision(self, wire: Wire, step: Announcement) -> bool:
        """Is the step to be written? Waits as long as the trainer says that it is still there."""
        assert self._rank_state is not None
        limit = DOUBT * self._rank_state.timeout
        while True:
            message = wire.receive(Deadline(limit))
            if message.get("write") == step.round and message.get("state") == step.state:
                return True
            if message.get("drop") == step.round:
                if message.get("distrust") is True:
                    self._rank_state.distrust()  # the ranks of this engine together do not have the step
                return False
            if message.get("hold") != step.round:
                raise foreign(wire.where, f"{str(message)[:100]}", "a word on the step")

    def _resolve(self, step: Announcement, error: DeltackptError) -> bool:
        """Ready, and no word: was the step decided? The trainer knows, or the repository; if neither has the step, it
        was not, or this rank comes to it by the repository."""
        assert self._rank_state is not None
        self._fall_out(error)
        if not self._rank_state.whole:
            return False  # slices are proven by the trainer, which has not said so
        try:
            deadline = Deadline(min(CONNECT, self._timeout))
            if (found := self._ask(deadline)) is not None:
                return found == step.state
        except DeltackptError:
            pass
        try:
            return self._rank_state.stored(step.state)
        except DeltackptError:
            return False

    def _ask(self, deadline: Deadline) -> str | None:
        """The state that is live, as the trainer has it."""
        wire = Wire.connect(host_and_port(self._address), self._address, deadline)
        try:
            introduce(wire, self._token, {"kind": "ask"}, deadline)
            answer = wire.receive(deadline)
            return str(answer["state"]) if answer.get("state") else None
        finally:
            wire.close()

    # Without the trainer

    def _fall_out(self, error: BaseException) -> None:
        if self._wire is None:
            return
        self._wire.close()
        self._wire = None
        self.why = error.sentence() if isinstance(error, DeltackptError) else f"{type(error).__name__}: {error}"
        self._tell(LiveEvent("left", self.step, text=self.why))

    def _back(self, pause: Pause) -> bool:
        if time.monotonic() < self._retry:
            return False
        try:
            self.connect(min(CONNECT, self._timeout), pause)
        except (StoreError, ConflictError) as error:  # in conflict with the connection that was lost, for a while
            self.why = error.sentence()
            self._retry = time.monotonic() + RETRY
            return False
        self._tell(LiveEvent("joined", self.step))
        return True

    def _by_store(self, pause: Pause, timeout: float) -> LiveStep | None:
        """The repository's newest step, or wait a little for the trainer, or for the next one."""
        assert self._rank_state is not None
        before = self._rank_state.state
        found = self._rank_state.catch_up(pause)
        if found is None or found.state == before:
            time.sleep(min(timeout, RETRY))
            return None
        return self._stored(found)

    def _stored(self, found: StoredStep | None) -> LiveStep | None:
        if found is None:
            return None
        self._tell(LiveEvent("by-store", found.link.step, text=self.why))
        return LiveStep(found.link.step, found.state, "store", found.elements, found.read)


def _field(message: dict[str, Any], name: str, where: str) -> Any:
    if "error" in message:
        raise error_of(message["error"], where)
    if name not in message:
        raise foreign(where, str(message)[:100], f"{name!r}")
    return message[name]
