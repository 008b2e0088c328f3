"""The options of a session, each checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from deltackpt.carriers.pulled import CARRIERS
from deltackpt.errors import UsageError

Mode = Literal["sync", "async"]
Durable = Literal["first", "behind"]
TOKEN = 16  # characters of a token, at least


@dataclass(frozen=True, kw_only=True)
class LiveOptions:
    """What `Session` documents. Raises UsageError ``live-option`` for a value that an option does not take."""

    address: str
    token: str = field(repr=False)
    mode: Mode = "async"
    durable: Durable = "first"
    carrier: str = "tcp"
    engines: int = 0
    timeout: float = 60.0
    load_timeout: float = 1800.0
    rate: float | None = None

    def __post_init__(self) -> None:
        host_and_port(self.address)
        check_token(self.token)
        _one_of("mode", self.mode, ("sync", "async"))
        _one_of("durable", self.durable, ("first", "behind"))
        _one_of("carrier", self.carrier, CARRIERS)
        whole = isinstance(self.engines, int) and not isinstance(self.engines, bool) and self.engines >= 0
        require("engines", self.engines, whole, "how many engine ranks the first step waits for, 0 for none")
        check_seconds("timeout", self.timeout)
        check_seconds("load_timeout", self.load_timeout)
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        known = self.rate is None or (number and 0 < self.rate < math.inf)
        require("rate", self.rate, known, "bytes a second, more than 0, or None")


def host_and_port(address: object) -> tuple[str, int]:
    """("host", 7700) of "host:7700". Raises UsageError ``live-option``."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    known = (
        bool(colon and host)
        and host.strip("[]") not in ("0.0.0.0", "::")
        and port.isascii()
        and port.isdigit()
        and int(port) < 1 << 16
    )
    require("address", address, known, "host:port", "The host is the trainer's first rank's, as engines reach it.")
    return host.strip("[]"), int(port)


def check_token(token: object) -> None:
    """Raise UsageError ``live-option`` unless it can be a session's secret. It is not shown."""
    known = isinstance(token, str) and len(token) >= TOKEN
    require("token", "one that is too short, or none", known, f"a secret of at least {TOKEN} characters")


def check_seconds(name: str, value: object) -> None:
    """Raise UsageError ``live-option`` unless ``value`` is a number of seconds above 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    known = number and 0 < value < 1e6  # type: ignore[operator]
    require(name, value, known, "a number of seconds above 0")


def require(name: str, value: object, known: bool, need: str, hint: str = "") -> None:
    """Raise UsageError ``live-option`` unless the value of an option is one that is ``known``."""
    if not known:
        have = value if name == "token" else repr(value)[:200]
        raise UsageError("live-option", where=f"a live session, {name}=", have=have, need=need, hint=hint)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    require(name, value, value in choices, f"one of {', '.join(map(repr, choices))}")
