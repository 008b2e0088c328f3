"""A rank's listener: it serves the parts that the rank offers, and hands other kinds of connections on."""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from deltackpt.carriers.handshake import accept
from deltackpt.carriers.memory import PartsInMemory, pieces_of, spans_of
from deltackpt.carriers.pairs import Pair, PairHost, Payload
from deltackpt.carriers.wire import Deadline, Wire, foreign
from deltackpt.errors import ConflictError, DeltackptError, UsageError

HANDSHAKE = 10.0  # seconds that a peer has to show its token
IDLE = 0.5  # seconds after which a waiting thread looks whether it should end
MAX_PEERS = 8192  # connections at a time

log = logging.getLogger(__name__)

Handler = Callable[[Wire, Mapping[str, Any]], bool]


class PartServer:
    """Listens at ``host``:``port`` (0: any port) until it is closed.

    A connection of kind "pull" asks for parts of ``parts``; one of another kind goes to the handler that is registered
    for it, which returns whether it keeps the connection. ``timeout`` in seconds is how long sending one answer may
    take; ``device`` is where the tensors of pairs lie. Raises ConflictError ``live-taken`` where another process
    listens there, UsageError ``live-option`` for an address that this host does not have.
    """

    def __init__(
        self, host: str, port: int, token: str, parts: PartsInMemory, timeout: float,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.handlers: dict[str, Handler] = {}
        self._token, self._parts, self._timeout = token, parts, timeout
        self._closed = threading.Event()
        self._wires: set[Wire] = set()
        self._lock = threading.Lock()
        self._pairs = PairHost(timeout, device)
        try:
            self._sock = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            where = f"{host}:{port}"
            if error.errno == errno.EADDRINUSE:
                have, need = "another session, or another program, that listens there", "an address of its own"
                hint = "One trainer leads a session. End the other one, or give this one another address."
                raise ConflictError("live-taken", where=where, have=have, need=need, hint=hint) from error
            need = "an address of this host"
            raise UsageError("live-option", where=where, have=str(error), need=need) from error
        self.port = int(self._sock.getsockname()[1])
        threading.Thread(target=self._accept, name="deltackpt-live-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end every connection that no handler has kept. Can be called again."""
        self._closed.set()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            wires, self._wires = self._wires, set()
        for wire in wires:
            wire.close()
        self._pairs.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, peer = self._sock.accept()
            except OSError:
                if self._closed.wait(0.05):
                    return
                continue
            wire = Wire(sock, f"{peer[0]}:{peer[1]}")
            with self._lock:
                full = len(self._wires) >= MAX_PEERS
                if not full:
                    self._wires.add(wire)
            if full:
                wire.close()
                continue
            threading.Thread(target=self._serve, args=(wire,), name="deltackpt-live-peer", daemon=True).start()

    def _serve(self, wire: Wire) -> None:
        kept = False
        try:
            hello = accept(wire, self._token, Deadline(HANDSHAKE))
            handler = self.handlers.get(str(hello.get("kind")))
            if handler is not None:
                kept = handler(wire, hello)
            elif hello.get("kind") == "pull":
                self._serve_pulls(wire, hello)
        except DeltackptError:
            pass  # the peer was told, or is gone
        except Exception:
            log.exception("a connection of %s ends", wire.where)
        finally:
            with self._lock:
                self._wires.discard(wire)
            if not kept:
                wire.close()

    def _serve_pulls(self, wire: Wire, hello: Mapping[str, Any]) -> None:
        pair = self._pairs.open(wire, str(hello["pair"])) if hello.get("pair") else None
        try:
            while not self._closed.is_set():
                if wire.readable(IDLE):
                    self._serve_one(wire, pair)
        finally:
            if isinstance(pair, Pair):
                pair.close()

    def _serve_one(self, wire: Wire, pair: Payload | None) -> None:
        """One request; with "wire" the answer comes over the connection itself, and so does that to "near", first."""
        deadline = Deadline(self._timeout)
        request = wire.receive(deadline)
        over_pair = pair if request.get("wire") is not True else None
        try:
            part = self._parts.find(str(request.get("part")))
            spans = _spans(wire.where, request.get("spans"), part.size)
            near = _spans(wire.where, request.get("near", []), part.size)
            first: Any = spans_of(part, near) if near else ()
            chunks: Any = pieces_of(part, spans) if isinstance(over_pair, Pair) else spans_of(part, spans)
        except DeltackptError as error:
            wire.send({"error": error.to_dict()}, deadline)
            return
        sizes = [end - start for start, end in spans]
        wire.send({"sizes": sizes, "near": [end - start for start, end in near]}, deadline)
        wire.send_bytes(first, deadline)
        if over_pair is None:
            wire.send_bytes(chunks, deadline)
        else:
            over_pair.send(chunks, sum(sizes), deadline)


def _spans(where: str, found: object, size: int) -> Sequence[tuple[int, int]]:
    if found is None:
        return [(0, size)]
    if not isinstance(found, list) or not all(
        isinstance(s, list) and len(s) == 2 and all(type(n) is int for n in s) for s in found
    ):
        raise foreign(where, f"spans {found!r}", "pairs of a first byte and an end")
    return [(int(a), int(b)) for a, b in found]
