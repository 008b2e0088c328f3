"""Messages and bytes over one TCP connection, each with a deadline: a peer that is gone or stands still is an error."""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from deltackpt.errors import BY_EXIT_CODE, DeltackptError, FormatError, StoreError
from deltackpt.format.canonical import loads_strict

MAX_MESSAGE = 64 << 20  # bytes of one message: one line for each of a million tensors
PIECE = 1 << 20  # bytes that are sent or received by one call


class Deadline:
    """An end in time, ``seconds`` from now, on this process's monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then, never below 0."""
        return max(0.0, self._end - time.monotonic())


def lost(where: str, have: str, need: str = "an answer in time") -> StoreError:
    """The error for a peer that does not answer, or is gone: StoreError ``live-lost``."""
    hint = "The process ended, stands still, or cannot be reached. It comes back by the repository."
    return StoreError("live-lost", where=where, have=have, need=need, hint=hint)


def foreign(where: str, have: str, need: str) -> FormatError:
    """The error for bytes that are no message of a session: FormatError ``live-message``."""
    return FormatError("live-message", where=where, have=have[:200], need=need)


def error_of(found: object, where: str) -> DeltackptError:
    """An error that a peer told, as `DeltackptError.to_dict` gave it, to be raised here."""
    if not isinstance(found, Mapping):
        return foreign(where, f"an error {found!r}", "a code and sentences")
    exit_code, code = found.get("exit_code"), str(found.get("error", "live-message"))[:80]
    kind = BY_EXIT_CODE.get(exit_code, StoreError) if isinstance(exit_code, int) else StoreError
    have, need, hint = (str(found.get(key, ""))[:2000] for key in ("have", "need", "hint"))
    return kind(code, where=str(found.get("where", where))[:500], have=have, need=need, hint=hint)


class Wire:
    """One connection. ``where`` names the peer in errors. Used by one thread at a time, but that messages may be sent
    by several.

    Every method raises StoreError ``live-lost`` where the peer is gone or the time is over; the connection is then of
    no use any more.
    """

    def __init__(self, sock: socket.socket, where: str) -> None:
        self.where = where
        self._sock = sock
        self._sending = threading.Lock()
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: tuple[str, int], where: str, deadline: Deadline) -> Wire:
        """To a listening peer."""
        try:
            return cls(socket.create_connection(address, max(0.001, deadline.left)), where)
        except OSError as error:
            raise lost(where, f"{address[0]}:{address[1]}: {error}", "a session that listens") from error

    @property
    def local_host(self) -> str:
        """This end's address, as the peer can reach it."""
        return str(self._sock.getsockname()[0])

    def send(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """A JSON object."""
        data = json.dumps(message, separators=(",", ":")).encode()
        with self._sending:
            self.send_bytes([len(data).to_bytes(4, "big") + data], deadline)

    def send_bytes(self, chunks: Iterable[bytes | memoryview], deadline: Deadline) -> None:
        """Bytes as they are; the peer knows how many."""
        try:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while len(view):
                    self._sock.settimeout(self._left(deadline))
                    view = view[self._sock.send(view[:PIECE]) :]
        except OSError as error:
            raise lost(self.where, f"no way to send: {error}") from error

    def receive(self, deadline: Deadline, limit: int = MAX_MESSAGE) -> dict[str, Any]:
        """The next message. Raises FormatError ``live-message`` for what is none, or has more than ``limit`` bytes."""
        head = bytearray(4)
        self.receive_into(memoryview(head), deadline)
        size = int.from_bytes(head, "big")
        if size > limit:
            raise foreign(self.where, f"a message of {size:,} bytes", f"at most {limit:,}")
        data = bytearray(size)
        self.receive_into(memoryview(data), deadline)
        try:
            found = loads_strict(bytes(data), limit=MAX_MESSAGE, where=self.where)
        except DeltackptError as error:
            raise foreign(self.where, error.have, "a JSON object") from error
        if not isinstance(found, dict):
            raise foreign(self.where, "no object", "a JSON object")
        return found

    def receive_into(self, into: memoryview, deadline: Deadline) -> None:
        """So many bytes as ``into`` has, uint8."""
        try:
            while len(into):
                self._sock.settimeout(self._left(deadline))
                count = self._sock.recv_into(into[:PIECE])
                if count == 0:
                    raise lost(self.where, "a connection that was closed")
                into = into[count:]
        except OSError as error:
            raise lost(self.where, f"nothing to receive: {error}") from error

    def readable(self, seconds: float) -> bool:
        """Is there a byte, or the end of the connection, within some seconds?"""
        poll = select.poll()  # unlike `select.select` it takes any number of descriptors
        try:
            poll.register(self._sock, select.POLLIN)
        except (OSError, ValueError):  # closed by another thread
            return True
        return bool(poll.poll(max(0.0, seconds) * 1000))

    @property
    def ended(self) -> bool:
        """Has the peer closed the connection, as it does when it dies?"""
        try:
            return self.readable(0) and self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        """The descriptor, for `select`; -1 once it is closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """End the connection. Can be called again, and by another thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _left(self, deadline: Deadline) -> float:
        if (left := deadline.left) <= 0:
            raise lost(self.where, f"no answer for {deadline.seconds:g} s")
        return left
