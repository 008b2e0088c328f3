"""Who may speak: both ends of a connection show that they know the session's token, without sending it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from deltackpt.carriers.wire import Deadline, Wire, error_of, foreign
from deltackpt.errors import DeltackptError, UsageError

PROTOCOL = 2
FIRST = 4096  # bytes of the message of a peer that has not shown that it knows the token


def accept(wire: Wire, token: str, deadline: Deadline) -> dict[str, Any]:
    """The listening end. -> what the peer wants: its ``kind``, and what goes with that.

    Raises UsageError ``live-token`` for a peer with another token, after it was told; FormatError ``live-message``.
    """
    nonce = secrets.token_hex(16)
    wire.send({"deltackpt-live": PROTOCOL, "nonce": nonce}, deadline)
    hello = wire.receive(deadline, FIRST)
    both = f"{nonce} {hello.get('nonce')} {hello.get('kind')}"
    if not _proven(token, "client", both, hello):
        error = _refused(wire.where)
        wire.send({"error": error.to_dict()}, deadline)
        raise error
    wire.send({"proof": _proof(token, "server", both)}, deadline)
    return hello


def introduce(wire: Wire, token: str, hello: Mapping[str, Any], deadline: Deadline) -> None:
    """The other end: ``hello`` says the ``kind`` of the connection, and what goes with it.

    Raises UsageError ``live-token`` where the tokens differ, FormatError ``live-message`` for a peer that is
    no session.
    """
    greeting = wire.receive(deadline)
    if greeting.get("deltackpt-live") != PROTOCOL:
        raise foreign(wire.where, "no greeting of a session, or of another version", f"version {PROTOCOL}")
    nonce = secrets.token_hex(16)
    both = f"{greeting.get('nonce')} {nonce} {hello.get('kind')}"
    wire.send({**hello, "nonce": nonce, "proof": _proof(token, "client", both)}, deadline)
    answer = wire.receive(deadline)
    if "error" in answer:
        raise error_of(answer["error"], wire.where)
    if not _proven(token, "server", both, answer):
        raise _refused(wire.where)


def _proof(token: str, side: str, both: str) -> str:
    return hmac.new(token.encode(), f"{side} {both}".encode(), hashlib.sha256).hexdigest()


def _proven(token: str, side: str, both: str, message: Mapping[str, Any]) -> bool:
    """In bytes: of text `compare_digest` takes ASCII alone."""
    return hmac.compare_digest(_proof(token, side, both).encode(), str(message.get("proof")).encode())


def _refused(where: str) -> DeltackptError:
    hint = "Give all ranks of a session the same token=."
    return UsageError("live-token", where=where, have="another token", need="the token of this session", hint=hint)
