"""Payload over torch.distributed: a process group of two for each pair of ranks that exchanges parts.

A group of its own for each pair, so that the death of one peer breaks nothing but its pair, and who joins late needs
nothing of the others. Requests go over the connection that made the pair; only bytes of parts go here. Gloo moves host
memory; a backend for devices would take the same calls with tensors on them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import numpy as np

from deltackpt.carriers.one_sided import OneSided, api
from deltackpt.carriers.wire import Deadline, Wire, foreign, lost
from deltackpt.errors import UsageError

PIECE = 16 << 20  # bytes of one message


class Payload(Protocol):
    """One end of a way for bytes beside the connection that asks for them."""

    def send(self, chunks: Iterable[memoryview], total: int, deadline: Deadline) -> None:
        """So many bytes, uint8."""

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """So many bytes as ``into`` has, uint8."""


class Pair:
    """One end of a pair of ranks, 0 the publisher's. Raises StoreError ``live-lost`` where the other is silent."""

    def __init__(self, store: Any, prefix: str, rank: int, host: str, where: str, deadline: Deadline) -> None:
        import torch.distributed as dist

        self._where, self._peer = where, 1 - rank
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = timedelta(seconds=max(0.1, deadline.left))
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), rank, 2, options)
        except RuntimeError as error:
            raise _lost(where, error) from error

    def send(self, chunks: Iterable[memoryview], total: int, deadline: Deadline) -> None:
        """So many bytes, uint8, copied into messages of one size."""
        import torch

        for piece in _blocks(chunks, total):
            self._wait(self._group.send([torch.from_numpy(piece)], self._peer, 0), deadline)

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """So many bytes as ``into`` has, uint8."""
        import torch

        for at in range(0, len(into), PIECE):
            piece = torch.frombuffer(into[at : at + PIECE], dtype=torch.uint8)
            self._wait(self._group.recv([piece], self._peer, 0), deadline)

    def _wait(self, work: Any, deadline: Deadline) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, deadline.left)))
        except RuntimeError as error:
            raise _lost(self._where, error) from error


class PairHost:
    """The publisher's end: it has the store at which both ends of a pair meet, made when the first pair is wanted."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._store: Any = None
        self._lock = threading.Lock()

    def open(self, wire: Wire, carrier: str) -> Payload:
        """Tell the peer where to meet, and meet it."""
        if carrier == "nixl":
            return OneSided(wire)
        if carrier != "gloo":
            raise foreign(wire.where, f"a carrier {carrier!r}", "gloo or nixl")
        import torch.distributed as dist

        with self._lock:
            if self._store is None:
                limit = timedelta(seconds=self._timeout)
                self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
        prefix, deadline = secrets.token_hex(16), Deadline(self._timeout)
        wire.send({"port": self._store.port, "prefix": prefix}, deadline)
        return Pair(self._store, prefix, 0, wire.local_host, wire.where, deadline)

    def close(self) -> None:
        """Let the store go."""
        self._store = None


def meet(wire: Wire, host: str, carrier: str, deadline: Deadline) -> Payload:
    """The receiver's end of a pair with the publisher at ``host``."""
    if carrier == "nixl":
        return OneSided(wire)
    import torch.distributed as dist

    place = wire.receive(deadline)
    port, prefix = place.get("port"), place.get("prefix")
    if type(port) is not int or not isinstance(prefix, str):
        raise foreign(wire.where, f"{place!r}", "a port and a prefix")
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=max(0.1, deadline.left)))
    except RuntimeError as error:
        raise _lost(wire.where, error) from error
    return Pair(store, prefix, 1, wire.local_host, wire.where, deadline)


def check_carrier(name: str) -> None:
    """Raise UsageError ``live-option``, or ExtraMissingError, unless what a carrier needs is there."""
    if name == "nixl":
        api()
    import torch.distributed as dist

    if name == "gloo" and not (dist.is_available() and dist.is_gloo_available()):
        need = "torch.distributed with Gloo"
        raise UsageError("live-option", where="carrier", have="a torch without it", need=need)


def _blocks(chunks: Iterable[memoryview], total: int) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    block, held, left = np.empty(min(PIECE, total), np.uint8), 0, total
    for chunk in chunks:
        view = np.frombuffer(chunk, np.uint8)
        while len(view):
            count = min(len(view), len(block) - held)
            block[held : held + count] = view[:count]
            view, held = view[count:], held + count
            if held == len(block):
                yield block
                left -= held
                block, held = np.empty(min(PIECE, left), np.uint8), 0


def _lost(where: str, error: RuntimeError) -> Exception:
    text = (str(error).splitlines() or [""])[0][:200]
    return lost(where, f"torch.distributed: {text}", "the other rank of the pair")
