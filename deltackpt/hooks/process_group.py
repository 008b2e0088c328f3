"""The processes that publish one state together, and the messages that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from deltackpt.errors import DeltackptError, StoreError, UsageError

T = TypeVar("T")


class ProcessGroup(Protocol):
    """The ranks that publish one state. Every call is made by all of them, in the same order, from one thread; `send`
    and `receive` by the two that are concerned."""

    rank: int
    size: int

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, at every rank."""

    def gather(self, value: Any) -> list[Any] | None:
        """All values by rank, at rank 0; None at the others."""

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send a contiguous tensor in host memory to rank ``to``."""

    def receive(self, data: torch.Tensor, of: int) -> None:
        """Receive from rank ``of`` into a contiguous tensor in host memory, of the size that is sent."""

    def close(self) -> None:
        """The last call, at a rank that waits for no other."""


class SingleProcess:
    """A group of one process."""

    rank, size = 0, 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def send(self, data: torch.Tensor, to: int) -> None:
        """Not called: there is no other rank."""
        raise AssertionError("there is no other rank")

    def receive(self, data: torch.Tensor, of: int) -> None:
        """Not called: there is no other rank."""
        raise AssertionError("there is no other rank")

    def close(self) -> None:
        """There is nothing to let go of."""


class Processes:
    """All ranks of the default process group, over a gloo group of their own: that of the training is not used.

    ``timeout`` in seconds is how long a rank waits for another; then, or when one has ended, StoreError ``rank-lost``.
    Raises UsageError ``hook-option`` for a torch without Gloo.
    """

    def __init__(self, timeout: float) -> None:
        import torch.distributed as dist

        if not dist.is_gloo_available():
            have, need = "a torch without Gloo", "torch.distributed with Gloo, beside what the training uses"
            hint = "The ranks' messages are in host memory, which NCCL does not move."
            raise UsageError("hook-option", where="the trainer hook, sharded=", have=have, need=need, hint=hint)
        self._dist = dist
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, at every rank."""
        box = [value]
        self._guarded(lambda: self._dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        """All values by rank, at rank 0."""
        into: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._guarded(lambda: self._dist.gather_object(value, into, dst=0, group=self._group))
        return into

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send host memory to a rank."""
        self._guarded(lambda: self._dist.send(data, dst=to, group=self._group))

    def receive(self, data: torch.Tensor, of: int) -> None:
        """Receive host memory from a rank."""
        self._guarded(lambda: self._dist.recv(data, src=of, group=self._group))

    def close(self) -> None:
        """Let go of the group with its threads and connections: one of these threads that is still at work when the
        interpreter ends aborts the process."""
        group, self._group = self._group, None
        if group is not None and self._dist.is_initialized():
            with suppress(ValueError):  # it went with all others
                self._dist.destroy_process_group(group)

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise StoreError(
                "rank-lost",
                where=f"rank {self.rank}",
                have=str(error).splitlines()[0][:200],
                need=f"all {self.size} ranks",
                hint="A rank died, or was too slow. The last published step is complete; restart from it.",
            ) from error


def share(group: ProcessGroup, work: Callable[[], T]) -> T:
    """Rank 0 does the work, and all ranks get its result. If it fails, the others raise StoreError ``rank-failed``."""
    outcome: tuple[Any, ...] = ()
    failure: Exception | None = None
    if group.rank == 0:
        try:
            outcome = (True, work())
        except Exception as error:
            failure, outcome = error, (False, describe(error))
    outcome = group.broadcast(outcome)
    if failure is not None:
        raise failure
    if not outcome[0]:
        raise rank_failed(0, outcome[1])
    result: T = outcome[1]
    return result


def collect(group: ProcessGroup, value: T, error: Exception | None) -> list[T]:
    """Every rank's value at rank 0, an empty list at the others; raises at all of them if one has an ``error``."""
    found = group.gather((value, None if error is None else describe(error)))
    bad = [(rank, text) for rank, (_, text) in enumerate(found) if text is not None] if found is not None else []
    failed = group.broadcast(bad)
    if error is not None:
        raise error
    if failed:
        raise rank_failed(*failed[0])
    return [item for item, _ in found] if found is not None else []


def everyone(group: ProcessGroup, value: T) -> list[T]:
    """Every rank's value, at every rank."""
    found: list[T] = group.broadcast(group.gather(value))
    return found


def describe(error: BaseException) -> str:
    """An error as a line for other ranks: its code or class, and its message."""
    return f"{error.code}: {error}" if isinstance(error, DeltackptError) else f"{type(error).__name__}: {error}"


def rank_failed(rank: int, what: str) -> StoreError:
    """The error to raise where another rank has failed; ``what`` is `describe`'s."""
    need = "every rank to publish its share"
    return StoreError("rank-failed", where=f"rank {rank}", have=what[:500], need=need)
