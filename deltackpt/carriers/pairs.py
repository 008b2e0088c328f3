"""Payload over torch.distributed: a process group of two for each pair of ranks that exchanges parts.

A group of its own for each pair, so that the death of one peer breaks nothing but its pair, and who joins late needs
nothing of the others. Requests go over the connection that made the pair; only bytes of parts go here, as tensors of
the group's device: with Gloo in host memory, with NCCL on cards, where no byte that is on a card comes to the host.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch

from deltackpt.carriers.groups import BACKENDS, backend_of, end_group
from deltackpt.carriers.one_sided import OneSided, api
from deltackpt.carriers.watched import WatchedCalls
from deltackpt.carriers.wire import Deadline, Wire, foreign, lost
from deltackpt.gpu.device_bytes import CardBytes

PIECE, CARD_PIECE = 16 << 20, 32 << 20  # bytes of one message, in host memory and between cards
AHEAD = 3  # messages that are on their way at a time
POLL = 0.00005  # seconds between two looks at a message of NCCL


class Payload(Protocol):
    """One end of a way for bytes beside the connection that asks for them."""

    def send(self, chunks: Iterable[memoryview], total: int, deadline: Deadline) -> None:
        """So many bytes, uint8."""

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """So many bytes as ``into`` has, uint8."""


class Pair:
    """One end of a pair of ranks, 0 the publisher's. Raises StoreError ``live-lost`` where the other is silent.

    ``device`` is where its tensors lie: here chunks may lie on the host or there.
    """

    def __init__(
        self, store: Any, prefix: str, rank: int, wire: Wire, carrier: str, device: torch.device | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        backend = backend_of(carrier)
        self.device = device or backend.device()
        self._peer, self._cards = 1 - rank, self.device.type == "cuda"
        self._piece = CARD_PIECE if self._cards else PIECE
        self._group: Any = None
        self._stream = torch.cuda.Stream(self.device) if self._cards else None
        self._slots: list[_Slot] = []
        self._calls = WatchedCalls(wire, self._abort)
        host, seconds = wire.local_host, max(0.1, deadline.left)

        def make() -> None:
            with self._current():
                self._group = backend.make(dist.PrefixStore(prefix, store), rank, host, seconds)

        self._calls.run(make, deadline)

    def send(self, chunks: Iterable[Any], total: int, deadline: Deadline) -> None:
        """So many bytes, uint8, copied into messages of one size where the pair's tensors lie."""
        self._calls.run(lambda: self._send(chunks, total, deadline), deadline)

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """So many bytes as ``into`` has, uint8."""
        if not self._cards:
            data = torch.frombuffer(into, dtype=torch.uint8) if len(into) else torch.empty(0, dtype=torch.uint8)
            self._calls.run(lambda: self._receive(data, deadline), deadline)
            return
        into[:] = CardBytes(self.begin_tensor(len(into), deadline)()).to_host()

    def begin_tensor(self, size: int, deadline: Deadline) -> Callable[[], torch.Tensor]:
        """So many bytes, uint8 [size] on the pair's device: what is returned waits for them. They belong to the
        caller's stream."""
        data = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self._stream is not None:  # the memory may be in use there until now
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        wait = self._calls.begin(lambda: self._receive(data, deadline), deadline)

        def complete() -> torch.Tensor:
            wait()
            return data

        return complete

    def close(self) -> None:
        """Leave the pair. Can be called again."""
        self._calls.close()

    # By the pair's own thread

    def _send(self, chunks: Iterable[Any], total: int, deadline: Deadline) -> None:
        waiting: deque[_Slot] = deque()
        with self._current():
            for slot, size in self._filled(chunks, total, deadline):
                slot.work = self._group.send([slot.data[:size]], self._peer, 0)
                waiting.append(slot)
                if len(waiting) == AHEAD:
                    self._finish(waiting.popleft(), deadline)
            for slot in waiting:
                self._finish(slot, deadline)

    def _receive(self, into: torch.Tensor, deadline: Deadline) -> None:
        waiting: deque[_Slot] = deque()
        with self._current():
            for piece in into.split(self._piece):
                if not piece.numel():
                    continue
                slot = _Slot(piece)
                slot.work = self._group.recv([piece], self._peer, 0)
                waiting.append(slot)
                if len(waiting) == AHEAD:
                    self._finish(waiting.popleft(), deadline)
            for slot in waiting:
                self._finish(slot, deadline)

    def _filled(self, chunks: Iterable[Any], total: int, deadline: Deadline) -> Iterator[tuple[_Slot, int]]:
        """The bytes in messages of one size, each in a slot of which nothing is on its way any more; a message that
        lies on the pair's device in one piece is sent from there."""
        left, turn, held, some = total, 0, 0, list[Any]()
        for chunk in chunks:
            at = 0
            while at < len(chunk):
                size = min(self._piece, left)
                if not held and len(chunk) - at >= size and self._lies_here(chunk):
                    yield _Slot(chunk.tensor[at : at + size]), size
                    at, left = at + size, left - size
                    continue
                count = min(len(chunk) - at, size - held)
                some.append(chunk if count == len(chunk) else chunk[at : at + count])
                at, held = at + count, held + count
                if held == size:
                    slot = self._slot(turn, deadline)
                    slot.fill(some)
                    yield slot, held
                    left, held, turn, some = left - held, 0, (turn + 1) % AHEAD, []

    def _lies_here(self, chunk: Any) -> bool:
        return isinstance(chunk, CardBytes) and chunk.tensor.device == self.device

    def _slot(self, turn: int, deadline: Deadline) -> _Slot:
        if turn == len(self._slots):
            self._slots.append(_Slot(torch.empty(self._piece, dtype=torch.uint8, device=self.device)))
        self._finish(self._slots[turn], deadline)
        return self._slots[turn]

    def _finish(self, slot: _Slot, deadline: Deadline) -> None:
        """Wait for the host to see that a message has passed: NCCL's own wait would hold up a stream, and not it."""
        work, slot.work = slot.work, None
        if work is None:
            return
        while self._cards and not work.is_completed():
            if self._calls.given_up or deadline.left <= 0:
                raise RuntimeError("a message that did not pass in time")
            time.sleep(POLL)
        work.wait(timedelta(seconds=max(0.001, deadline.left)))
        if self._calls.given_up:  # what was aborted looks as if it were done
            raise RuntimeError("a pair that was given up")

    def _current(self) -> AbstractContextManager[Any]:
        found = ExitStack()
        if self._stream is not None:
            found.enter_context(torch.cuda.device(self.device))
            found.enter_context(torch.cuda.stream(self._stream))
        return found

    def _abort(self) -> None:
        if self._group is not None:
            end_group(self._group)


class _Slot:
    """Memory of one message, ``data``, on the pair's device."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.work: Any = None
        self._host: torch.Tensor | None = None  # pinned: from where bytes go to a card, until they have passed

    def fill(self, chunks: list[Any]) -> None:
        """Bytes, one after the other: a launch for all that are on a card, and one copy to it of those that are not."""
        if self.data.device.type == "cpu":
            _put(chunks, self.data)
            return
        size = sum(map(len, chunks))
        sent = self._sent([chunk for chunk in chunks if not isinstance(chunk, CardBytes)])
        views = [chunk.tensor if isinstance(chunk, CardBytes) else next(sent) for chunk in chunks]
        torch.cat(views, out=self.data[:size])

    def _sent(self, chunks: list[Any]) -> Iterator[torch.Tensor]:
        """Chunks of host memory on the device."""
        sizes = [len(chunk) for chunk in chunks]
        if not sizes:
            return iter(())
        if self._host is None or len(self._host) < sum(sizes):
            self._host = torch.empty(1 << sum(sizes).bit_length(), dtype=torch.uint8, pin_memory=True)
        _put(chunks, self._host)
        return iter(self._host[: sum(sizes)].to(self.data.device, non_blocking=True).split(sizes))


def _put(chunks: Iterable[Any], host: torch.Tensor) -> None:
    """Bytes in host memory, one after the other."""
    into, at = host.numpy(), 0
    for chunk in chunks:
        data = chunk.tensor.numpy() if isinstance(chunk, CardBytes) else np.frombuffer(chunk, np.uint8)
        into[at : at + len(data)] = data
        at += len(data)


class PairHost:
    """The publisher's end: it has the store at which both ends of a pair meet, made when the first pair is wanted."""

    def __init__(self, timeout: float, device: torch.device | None = None) -> None:
        """``device``: where the tensors of its pairs lie; None: where the carrier says."""
        self._timeout, self._device = timeout, device
        self._store: Any = None
        self._lock = threading.Lock()

    def open(self, wire: Wire, carrier: str) -> Payload:
        """Tell the peer where to meet, and meet it."""
        if carrier == "nixl":
            return OneSided(wire)
        if carrier not in BACKENDS:
            raise foreign(wire.where, f"a carrier {carrier!r}"[:100], f"nixl, {', '.join(BACKENDS)}")
        import torch.distributed as dist

        with self._lock:
            if self._store is None:
                limit = timedelta(seconds=self._timeout)
                self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
        prefix, deadline = secrets.token_hex(16), Deadline(self._timeout)
        wire.send({"port": self._store.port, "prefix": prefix}, deadline)
        return Pair(self._store, prefix, 0, wire, carrier, self._device, deadline)

    def close(self) -> None:
        """Let the store go."""
        self._store = None


def meet(wire: Wire, host: str, carrier: str, device: torch.device | None, deadline: Deadline) -> Payload:
    """The receiver's end of a pair with the publisher at ``host``; ``device`` as `PairHost` has it."""
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
        text = (str(error).splitlines() or [""])[0][:200]
        raise lost(wire.where, f"torch.distributed: {text}", "the other rank of the pair") from error
    return Pair(store, prefix, 1, wire, carrier, device, deadline)


def check_carrier(name: str) -> None:
    """Raise UsageError ``live-option``, or ExtraMissingError, unless what a carrier needs is there."""
    if name == "nixl":
        api()
    if name in BACKENDS:
        backend_of(name)
