"""The trainer's side of a live session: given to a hook, it takes every captured step to the engines that are in."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Literal

from deltackpt.carriers.groups import device_of
from deltackpt.carriers.memory import PartsInMemory
from deltackpt.carriers.pairs import check_carrier
from deltackpt.carriers.server import PartServer
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link
from deltackpt.hooks.live import LiveTrainer
from deltackpt.hooks.metrics import StepMetrics
from deltackpt.hooks.pending import CapturedStep
from deltackpt.hooks.process_group import collect, everyone
from deltackpt.live.delivery import Delivery
from deltackpt.live.events import LiveEvent, Report, teller
from deltackpt.live.gate import PublishGate
from deltackpt.live.lobby import Lobby
from deltackpt.live.members import Members
from deltackpt.live.network import reachable_host
from deltackpt.live.options import Durable, LiveOptions, Mode, host_and_port
from deltackpt.live.state import LiveState


class Session:
    """Takes a trainer's steps into running engines, from memory to memory.

        session = Session("10.0.0.1:7700", token=secret)
        with TrainerHook(model, "runs/repo", live=session) as hook: ...

    ``address``      host:port at which the trainer's first rank listens (port 0: any; see `address`)
    ``token``        a secret that trainer and engines share
    ``mode``         "async": `step` returns when the change is taken, and it moves behind the next training step;
                     "sync": when the engines have it
    ``durable``      "first": engines switch when the repository has the step; "behind": at once, and the session tells
                     of steps that the repository does not get
    ``carrier``      what bytes go over: "tcp"; "gloo", that of torch.distributed; "nccl", the same between cards: each
                     rank's is the one that is current when its hook, or receiver, is made; or "nixl", one-sided reads
    ``engines``      how many engine ranks the first step waits for, at most ``load_timeout`` seconds
    ``timeout``      seconds that one rank waits for another with a step
    ``load_timeout`` the same, where all of the weights go
    ``report``       is called with every `LiveEvent`; None: to the log "deltackpt.live"

    Every rank of a trainer makes one, alike, and gives it to its hook; it is used once. An engine's rank that is lost,
    stands still or refuses a step is let go, and its engine with it; the others go on, training too. Raises UsageError
    ``live-option``; the hook then raises ConflictError ``live-taken`` where another session has the address.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        mode: Mode = "async",
        durable: Durable = "first",
        carrier: str = "tcp",
        engines: int = 0,
        timeout: float = 60.0,
        load_timeout: float = 1800.0,
        report: Report | None = None,
    ) -> None:
        self.options = LiveOptions(
            address=address, token=token, mode=mode, durable=durable, carrier=carrier, engines=engines,
            timeout=timeout, load_timeout=load_timeout,
        )  # fmt: skip
        self._tell = teller(report)
        self._gate, self._members, self._parts = PublishGate(), Members(), PartsInMemory()
        self._server: PartServer | None = None
        self._delivery: Delivery | None = None
        self._state: LiveState | None = None
        self._closed = threading.Event()
        check_carrier(carrier)

    def with_rate(self, rate: float) -> Session:
        """Say, before the hook is made, how many bytes a second the link moves -> itself. Where plain changes take less
        time than coded ones, as measured on the steps themselves, they are sent plainly. Raises UsageError
        ``live-option``."""
        self.options = replace(self.options, rate=rate)
        return self

    # What a user asks

    @property
    def keeps_on_card(self) -> Literal["", "tiles", "all"]:
        """What of a change is wanted where a card found it, until the step is live: what was encoded, some 1.3 bytes a
        changed element, and where plain changes may be sent, its positions and words, 4 bytes and a word."""
        if self.options.carrier != "nccl":
            return ""
        return "tiles" if self.options.rate is None else "all"

    @property
    def goes_first(self) -> bool:
        """Do engines have a step before the repository does?"""
        return self.options.durable == "behind"

    @property
    def mode(self) -> str:
        """As given."""
        return self.options.mode

    @property
    def address(self) -> str:
        """Where engines join: host:port, once the hook was made."""
        host, port = host_and_port(self.options.address)
        return f"{host}:{self._server.port if self._server else port}"

    @property
    def step(self) -> int | None:
        """The step that is live, at the trainer's first rank; None before the first."""
        return self._state.step if self._state else None

    @property
    def state(self) -> str | None:
        """The state digest of the step that is live, at the trainer's first rank."""
        return self._state.state if self._state else None

    @property
    def published(self) -> Link | None:
        """The last step that the repository has, of those published by this hook."""
        return self._gate.newest[1] if self._gate.newest else None

    @property
    def engines(self) -> int:
        """How many engine ranks are in."""
        return len(self._members)

    def wait_for(self, engines: int, timeout: float) -> bool:
        """Wait until so many engine ranks are in, for ``timeout`` seconds. -> are they?"""
        return self._members.wait(engines, timeout)

    # What the hook calls

    def open(self, trainer: LiveTrainer) -> None:
        """Listen, at every rank. Raises ConflictError ``live-taken``, UsageError ``live-option``, ``live-closed``,
        StoreError ``rank-failed``."""
        options, leads = self.options, trainer.group.rank == 0
        host, port = host_and_port(options.address)
        error: Exception | None = None
        mine: tuple[str, int] | None = None
        try:
            if self._server is not None or self._closed.is_set():
                need = "one that is new"
                raise UsageError("live-closed", where="a live session", have="one that was used", need=need)
            here = host if leads else reachable_host(host)
            # A card's kernels wait for a receiver that stands still: no longer than for a step.
            limit = options.timeout if options.carrier == "nccl" else max(options.timeout, options.load_timeout)
            device = device_of(options.carrier)
            self._server = PartServer(here, port if leads else 0, options.token, self._parts, limit, device)
            mine = (here, self._server.port)
        except Exception as failed:
            error = failed
        try:
            collect(trainer.group, None, error)
        except BaseException:
            if not isinstance(error, UsageError) or error.code != "live-closed":
                self.close()
            raise
        addresses = [place for place in everyone(trainer.group, mine) if place is not None]
        if leads:
            self._state = LiveState.of(trainer)
            lobby = Lobby(trainer, options, self._state, self._members, self._tell)
            assert self._server is not None
            self._server.handlers |= {"join": lobby.admit, "ask": lobby.say}
        delivery = Delivery(trainer, options, self._members, self._gate, self._parts, self._tell)
        delivery.addresses, delivery.live = addresses, self._state
        self._delivery = delivery

    def deliver(self, captured: CapturedStep) -> StepMetrics | None:
        """Take a step to the engines that are in, by all ranks together.

        Where it raises, the step is merged into the next: StoreError ``live-not-durable``, ``rank-failed``,
        ``rank-lost``.
        """
        assert self._delivery is not None, "an open session"
        return self._delivery.deliver(captured)

    def publishing(self, step: int) -> None:
        """The repository's side begins to publish a step."""
        self._gate.began(step)

    def published_step(self, link: Link, state: str) -> None:
        """The repository has a step, whose state digest is ``state``."""
        self._gate.published(link, state)

    def publish_failed(self, step: int, error: BaseException) -> None:
        """The repository does not have the step."""
        why = f"the publish failed [{getattr(error, 'code', type(error).__name__)}]"
        self._gate.failed(why)
        if self.options.durable == "behind":
            self._tell(LiveEvent("ahead", step, text=f"the repository does not have the step: {why}"))

    def close(self) -> None:
        """End the session: engines go on by the repository. Can be called again."""
        self._closed.set()
        self._gate.close()
        if self._server is not None:
            self._server.close()
        self._members.close()  # after the server, which lets no rank in any more
