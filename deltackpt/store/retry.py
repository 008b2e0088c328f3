"""Requests made again: which failures are worth another attempt, when, and for how long."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from deltackpt.errors import DeltackptError, NoSpaceError, StoreError
from deltackpt.store import translate
from deltackpt.store.translate import Fault, Kind

T = TypeVar("T")

WARN_AFTER = 5.0  # seconds without an answer after which a warning is logged
log = logging.getLogger(__name__)

SLOWEST = 256 << 10  # bytes a second below which a transfer counts as stuck


class Answer(Exception):
    """The store answered, and the answer is no error of the store: no such object, name taken, past the end."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self.kind = kind


ANSWERS = frozenset({Kind.MISSING, Kind.BUCKET, Kind.TAKEN, Kind.RANGE})


@dataclass(frozen=True)
class RetryPolicy:
    """How often a request is made again; times in seconds.

    ``total``: no attempt of an operation begins later than this; ``silence``: how long an attempt may go without a
    byte; ``first``: the pause after the first failure, which doubles with each up to ``most``.
    """

    total: float = 60.0
    silence: float = 30.0
    first: float = 0.2
    most: float = 10.0

    def time_limit(self, size: int) -> float:
        """The longest that an attempt to move ``size`` bytes may take as a whole, whatever its library waits for."""
        return self.silence + size / SLOWEST

    def run(
        self,
        where: str,
        attempt: Callable[[], T],
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> T:
        """The result of ``attempt``, called again after a transient failure; it must begin anew each time.

        Raises Answer, and StoreError or NoSpaceError: at once for what another attempt cannot mend, when the time is
        up for what it might have.  One that takes long is logged as a warning, once.
        A service that asks for a pause gets it, if it ends in time.
        """
        began, pause, warned = clock(), self.first, False
        while True:
            try:
                return attempt()
            except (DeltackptError, Answer):
                raise
            except Exception as error:
                fault = translate.fault_of(error, time.time())
                if fault is None:
                    raise
            if fault.kind in ANSWERS:
                raise Answer(fault.kind) from None
            wait = pause * random.uniform(0.5, 1) if fault.wait is None else fault.wait
            if fault.kind not in translate.TRANSIENT or clock() - began + wait > self.total:
                raise failed(where, fault) from None  # the foreign text may hold secrets: no chain
            if not warned and clock() - began >= WARN_AFTER:
                warned = True
                log.warning("%s: %s; asked again for up to %.0f s", where, fault.text, self.total)
            sleep(wait)
            pause = min(2 * pause, self.most)


DEFAULT = RetryPolicy()

_WORDS: dict[Kind, tuple[type[DeltackptError], str, str, str]] = {
    Kind.CREDENTIALS: (
        StoreError,
        "store-credentials",
        "credentials that the store accepts",
        "they are missing, expired or of another account: log in again, or renew the token; check this host's clock",
    ),
    Kind.PERMISSION: (
        StoreError,
        "store-permission",
        "leave to read and write there",
        "ask the owner of the bucket for read, write, list and delete on this prefix",
    ),
    Kind.QUOTA: (NoSpaceError, "no-space", "room for the object", "raise the quota, or remove steps with gc"),
    Kind.BUSY: (
        StoreError,
        "store-busy",
        "a store that has time",
        "it asked to be left alone for longer than the time that is allowed: try again later, or poll less often",
    ),
    Kind.SILENT: (StoreError, "store-silent", "an answer in time", "check the network and the endpoint"),
    Kind.REFUSED: (
        StoreError,
        "store-io",
        "a store that does as it is asked",
        "`deltackpt doctor URL` tries out what it can do; the environment says which endpoint is meant",
    ),
}


def failed(where: str, fault: Fault) -> DeltackptError:
    """The error for a fault that is no answer."""
    kind, code, need, hint = _WORDS[fault.kind]
    wait = f", come back in {fault.wait:.0f} s" if fault.wait is not None else ""
    return kind(code, where=where, have=f"{fault.text}{wait}", need=need, hint=hint)
