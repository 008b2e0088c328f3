"""Process groups of two: which backend a carrier's pairs use, on which device, and how its groups are made and ended.

NCCL's own watchdog ends the whole process where a peer is gone (TORCH_NCCL_ASYNC_ERROR_HANDLING), and its heartbeat
does the same; a trainer is not to die of an engine. A group that is made with TORCH_NCCL_BLOCKING_WAIT has neither, so
it is set while a pair's group is made, and no longer: the training's groups keep what they have. What times out is
aborted by `carriers.watched`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from deltackpt.errors import UsageError

CTAS = 16  # blocks of a card that one pair of NCCL may take: eight pairs at once still run side by side
_ALONE = "TORCH_NCCL_BLOCKING_WAIT"
_LOCK = threading.Lock()


@dataclass(frozen=True)
class PairBackend:
    """``make(store, rank, host, seconds)`` gives a group of two. ``cards``: its tensors lie on a card."""

    name: str
    cards: bool
    make: Callable[[Any, int, str, float], Any]
    why_not: Callable[[], str]  # what is missing here; "" for nothing

    def device(self) -> torch.device:
        """Where the tensors of this process lie: the card that is current, or the host."""
        there = self.cards and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if there else torch.device("cpu")


def _gloo(store: Any, rank: int, host: str, seconds: float) -> Any:
    import torch.distributed as dist

    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _nccl(store: Any, rank: int, host: str, seconds: float) -> Any:
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=seconds)
    options.config.max_ctas = CTAS
    with _without_watchdog():
        return dist.ProcessGroupNCCL(store, rank, 2, options)


@contextmanager
def _without_watchdog() -> Iterator[None]:
    with _LOCK:
        before = os.environ.get(_ALONE)
        os.environ[_ALONE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ALONE]
            else:
                os.environ[_ALONE] = before


def _no_gloo() -> str:
    import torch.distributed as dist

    return "" if dist.is_available() and dist.is_gloo_available() else "a torch without Gloo"


def _no_nccl() -> str:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available()):
        return "a torch without NCCL"
    return "" if torch.cuda.is_available() else "no card"


BACKENDS = {
    "gloo": PairBackend("gloo", False, _gloo, _no_gloo),
    "nccl": PairBackend("nccl", True, _nccl, _no_nccl),
}


def backend_of(carrier: str) -> PairBackend:
    """Of a carrier that has one. Raises UsageError ``live-option`` where torch, or this host, does not have it."""
    found = BACKENDS[carrier]
    if why := found.why_not():
        need, hint = f"torch.distributed with {carrier.upper()}", "Or another carrier=: tcp needs nothing."
        raise UsageError("live-option", where="a live session, carrier=", have=why, need=need, hint=hint)
    return found


def device_of(carrier: str) -> torch.device | None:
    """Where the bytes that a carrier brings lie; None for one that brings them into host memory by itself. Raises what
    `backend_of` does."""
    return backend_of(carrier).device() if carrier in BACKENDS else None


def end_group(group: Any) -> None:
    """Let go of all that waits in a group, whatever the peer does. May take the group's timeout."""
    abort = getattr(group, "abort", None)
    if abort is not None:
        abort()
