"""What a session tells of itself: who came and went, which step went live, and which did not, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger("deltackpt.live")

LOUD = ("left", "not-live", "behind", "by-store", "refused")  # kinds that are warnings in the log
PHASES = ("announce", "move", "prove", "agree", "write")


@dataclass(frozen=True)
class LiveEvent:
    """``kind``: "joined", "left", "refused", "behind" (of ``member``, an engine's rank); "live" (the engines have
    ``step``), "not-live" (none has it: it goes with the next one), "ahead" (the repository does not have what is live);
    "by-store" (an engine took a step from the repository); or one of PHASES, as it begins.

    ``text`` says why, ``seconds`` how long it took.
    """

    kind: str
    step: int | None = None
    member: str = ""
    text: str = ""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """By the names of its fields."""
        return asdict(self)


Report = Callable[[LiveEvent], None]


def to_log(event: LiveEvent) -> None:
    """What is done with events where no ``report`` is given: to the log "deltackpt.live"."""
    level = logging.WARNING if event.kind in LOUD else logging.DEBUG
    log.log(level, "%s %s step %s: %s", event.kind, event.member or "session", event.step, event.text)


def teller(report: Report | None) -> Report:
    """``report``, of which an error does no harm."""
    given = report or to_log

    def tell(event: LiveEvent) -> None:
        with suppress(Exception):
            given(event)

    return tell
