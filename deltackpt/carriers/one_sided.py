"""Payload by one-sided reads: NIXL reads the publisher's host memory without its help.

The publisher registers the memory in which the wanted bytes lie with its agent, and says where; the receiver's agent
reads it, and says when that is done. Small pieces are put side by side first. Over the network that NIXL's UCX finds.

No agent has a thread of its own: one would take a tenth of a core while nothing moves. Each end moves its own side
forward while it waits.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.carriers.wire import Deadline, Wire, foreign, lost
from deltackpt.errors import ExtraMissingError
from deltackpt.util.extras import install_line

POLL = 0.0005  # seconds between two looks at a transfer
PUSHES = 32  # how often each side is moved forward between two looks
MAX_AGENT = 1 << 20  # characters of an agent's description
MAX_RUNS = 1 << 16  # pieces of one answer
SMALL = 1 << 18  # bytes of a piece below which it is copied
LEVEL = "NIXL_LOG_LEVEL"

Run = tuple[int, int]  # address and bytes
Pieces = list[npt.NDArray[np.uint8]]


def api() -> Any:
    """NIXL's module. Raises ExtraMissingError ``extra-missing``."""
    try:
        from nixl_cu13 import _api
    except ImportError as error:
        raise ExtraMissingError("nixl", "a live session, carrier=", install_line("nixl")) from error
    if LEVEL not in os.environ:  # it tells of every agent on stdout, which is the program's
        logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api


class OneSided:
    """One end of a pair of ranks; see `carriers.pairs.Pair`, of which it has the methods. ``wire`` is their connection.

    Raises StoreError ``live-lost`` where the other end is silent, or NIXL fails.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._api = wire, api()
        with _failing(wire.where):
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent = self._api.nixl_agent(secrets.token_hex(8), config)
        self._broken: list[object] = []  # memory that a read may still write to: it outlives the agent

    def send(self, chunks: Iterable[memoryview], total: int, deadline: Deadline) -> None:
        """Offer so many bytes, uint8, until the receiver has read them."""
        pieces = _gathered(chunks)
        runs = [(piece.ctypes.data, piece.nbytes) for piece in pieces]
        held = self._registered(runs)
        try:
            with _failing(self._wire.where):
                known = base64.b64encode(self._agent.get_agent_metadata()).decode()
            self._wire.send({"agent": known, "runs": runs}, deadline)
            while not self._wire.readable(POLL) and deadline.left > 0:
                with _failing(self._wire.where):
                    for _ in range(PUSHES):
                        self._agent.get_new_notifs()  # what moves this side forward
            if self._wire.receive(deadline).get("read") != total:
                raise foreign(self._wire.where, "another word", "that the bytes were read")
        finally:
            self._deregister(held)

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """Read so many bytes as ``into`` has, uint8."""
        offer = self._wire.receive(deadline)
        known, runs = _offered(offer, len(into), self._wire.where)
        if len(into):
            self._read(known, runs, into, deadline)
        self._wire.send({"read": len(into)}, deadline)

    def _read(self, known: bytes, runs: Sequence[Run], into: memoryview, deadline: Deadline) -> None:
        agent, array, state = self._agent, np.frombuffer(into, np.uint8), "PROC"
        self._broken.append(array)
        here = _side_by_side(array.ctypes.data, [size for _, size in runs])
        held = self._registered([(array.ctypes.data, array.nbytes)])
        with _failing(self._wire.where):
            other = agent.add_remote_agent(known)
            mine, there = _described(agent, here), _described(agent, runs)
            transfer = agent.initialize_xfer("READ", mine, there, other)
            try:
                state = agent.transfer(transfer)
                while state == "PROC" and not self._ended(deadline):
                    self._wire.readable(POLL)  # waits a little, less where the peer has died
                    for _ in range(PUSHES):
                        state = agent.check_xfer_state(transfer) if state == "PROC" else state
            finally:
                agent.release_xfer_handle(transfer)
                agent.remove_remote_agent(other)
        if state != "DONE":
            raise lost(self._wire.where, f"a read that is {state}", "a read that is done in time")
        self._deregister(held)
        self._broken.clear()

    def _ended(self, deadline: Deadline) -> bool:
        return deadline.left <= 0 or self._wire.ended

    def _registered(self, runs: Sequence[Run]) -> Any:
        """Memory that NIXL knows; no byte twice, which it does not forget again."""
        regions = [(at, size, 0, "") for at, size in _merged(runs)]
        with _failing(self._wire.where):
            return self._agent.register_memory(regions, "DRAM") if regions else None

    def _deregister(self, held: Any) -> None:
        if held is not None:
            with _failing(self._wire.where):
                self._agent.deregister_memory(held)


def _gathered(chunks: Iterable[memoryview]) -> Pieces:
    """The same bytes in fewer pieces: large ones where they lie, small ones in a row copied together."""
    found: Pieces = []
    row: list[memoryview] = []

    def end() -> None:
        if row:
            found.append(np.frombuffer(b"".join(row), np.uint8))
            row.clear()

    for chunk in chunks:
        if len(chunk) < SMALL:
            row.append(chunk)
            if sum(map(len, row)) >= SMALL:
                end()
            continue
        end()
        found.append(np.frombuffer(chunk, np.uint8))
    end()
    return [piece for piece in found if len(piece)]


def _side_by_side(at: int, sizes: Sequence[int]) -> list[Run]:
    runs = []
    for size in sizes:
        runs.append((at, size))
        at += size
    return runs


def _merged(runs: Sequence[Run]) -> list[Run]:
    """The same bytes, each once, in rising runs that do not touch."""
    found: list[Run] = []
    for at, size in sorted(runs):
        if found and at <= sum(found[-1]):
            first, before = found.pop()
            size, at = max(before, at + size - first), first
        found.append((at, size))
    return found


def _described(agent: Any, runs: Sequence[Run]) -> Any:
    return agent.get_xfer_descs([(at, size, 0) for at, size in runs], "DRAM")


def _offered(offer: dict[str, Any], total: int, where: str) -> tuple[bytes, list[Run]]:
    known, found = offer.get("agent"), offer.get("runs")
    need = f"an agent, and where {total:,} bytes of its memory lie"
    if not isinstance(known, str) or len(known) > MAX_AGENT or not isinstance(found, list) or len(found) > MAX_RUNS:
        raise foreign(where, str(offer)[:100], need)
    runs = [
        (run[0], run[1])
        for run in found
        if isinstance(run, list)
        and len(run) == 2
        and all(type(n) is int for n in run)
        and 0 < run[0] < 1 << 64
        and 0 < run[1] <= total
        and run[0] + run[1] <= 1 << 64
    ]
    if len(runs) != len(found) or sum(size for _, size in runs) != total:
        raise foreign(where, f"{len(found)} runs, such as {found[:1]}"[:100], need)
    try:
        return base64.b64decode(known, validate=True), runs
    except binascii.Error as error:
        raise foreign(where, f"an agent {known[:50]!r}", need) from error


class _failing:
    """NIXL's errors as ours."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and type(error).__module__.startswith("nixl"):
            raise lost(self._where, f"NIXL: {error}"[:200], "a transfer") from error
