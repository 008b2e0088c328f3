"""Payload by one-sided reads: NIXL reads the publisher's host memory without its help.

The publisher stages what was asked for in memory that its agent has registered, and says where; the receiver's agent
reads it, and says when that is done. Over the network that NIXL's UCX finds.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from deltackpt.carriers.wire import Deadline, Wire, foreign, lost
from deltackpt.errors import ExtraMissingError
from deltackpt.util.extras import install_line

POLL = 0.0005  # seconds between two looks at a transfer
MAX_AGENT = 1 << 20  # characters of an agent's description


def api() -> Any:
    """NIXL's module. Raises ExtraMissingError ``extra-missing``."""
    try:
        from nixl_cu13 import _api
    except ImportError as error:
        raise ExtraMissingError("nixl", "a live session, carrier=", install_line("nixl")) from error
    return _api


class OneSided:
    """One end of a pair of ranks; see `carriers.pairs.Pair`, of which it has the methods. ``wire`` is their connection.

    Raises StoreError ``live-lost`` where the other end is silent, or NIXL fails.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire, self._api = wire, api()
        with _failing(wire.where):
            self._agent = self._api.nixl_agent(secrets.token_hex(8), self._api.nixl_agent_config(backends=["UCX"]))

    def send(self, chunks: Iterable[memoryview], total: int, deadline: Deadline) -> None:
        """Offer so many bytes, uint8, until the receiver has read them."""
        staged, at = np.empty(max(total, 1), np.uint8), 0
        for chunk in chunks:
            staged[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
            at += len(chunk)
        with _failing(self._wire.where):
            held = self._agent.register_memory([(staged.ctypes.data, staged.nbytes, 0, "")], "DRAM")
            known = base64.b64encode(self._agent.get_agent_metadata()).decode()
        try:
            self._wire.send({"agent": known, "at": staged.ctypes.data}, deadline)
            if self._wire.receive(deadline).get("read") != total:
                raise foreign(self._wire.where, "another word", "that the bytes were read")
        finally:
            with _failing(self._wire.where):
                self._agent.deregister_memory(held)

    def receive(self, into: memoryview, deadline: Deadline) -> None:
        """Read so many bytes as ``into`` has, uint8."""
        offer = self._wire.receive(deadline)
        known, at = offer.get("agent"), offer.get("at")
        if not isinstance(known, str) or len(known) > MAX_AGENT or type(at) is not int or at < 0:
            raise foreign(self._wire.where, str(offer)[:100], "an agent, and an address of its memory")
        if len(into):
            self._read(base64.b64decode(known), at, into, deadline)
        self._wire.send({"read": len(into)}, deadline)

    def _read(self, known: bytes, at: int, into: memoryview, deadline: Deadline) -> None:
        agent, array = self._agent, np.frombuffer(into, np.uint8)
        with _failing(self._wire.where):
            held = agent.register_memory([(array.ctypes.data, array.nbytes, 0, "")], "DRAM")
            other = agent.add_remote_agent(known)
            here = agent.get_xfer_descs([(array.ctypes.data, array.nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(at, array.nbytes, 0)], "DRAM")
            transfer = agent.initialize_xfer("READ", here, there, other)
            try:
                state = agent.transfer(transfer)
                while state == "PROC" and deadline.left > 0:
                    time.sleep(POLL)
                    state = agent.check_xfer_state(transfer)
            finally:
                agent.release_xfer_handle(transfer)
                agent.remove_remote_agent(other)
                agent.deregister_memory(held)
        if state != "DONE":
            raise lost(self._wire.where, f"a read that is {state}", "a read that is done in time")


class _failing:
    """NIXL's errors as ours."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and type(error).__module__.startswith("nixl"):
            raise lost(self._where, f"NIXL: {error}"[:200], "a transfer") from error
