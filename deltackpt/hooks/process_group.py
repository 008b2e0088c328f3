"""The processes that publish one state together, and the few words that they exchange."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch

from deltackpt.errors import DeltackptError, StoreError

T = TypeVar("T")


class ProcessGroup(Protocol):
    """``rank`` 0 leads. Every call is made by all members, in the same order, from one thread."""

    rank: int
    size: int

    def broadcast(self, value: Any) -> Any:
        """The leader's value."""

    def gather(self, value: Any) -> list[Any] | None:
        """All values, by rank; None but at the leader."""

    def send(self, data: torch.Tensor, to: int) -> None:
        """Host memory, contiguous."""

    def receive(self, data: torch.Tensor, of: int) -> None:
        """Into host memory, contiguous."""


class SingleProcess:
    """A team of one."""

    rank, size = 0, 1

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def send(self, data: torch.Tensor, to: int) -> None:
        raise AssertionError("nobody to send to")

    def receive(self, data: torch.Tensor, of: int) -> None:
        raise AssertionError("nobody to receive from")


class Processes:
    """All processes of the default group, over a gloo group of their own: the training's is left alone.

    ``timeout`` in seconds is how long a member waits for another; then, or when one is gone, StoreError
    ``rank-lost``.
    """

    def __init__(self, timeout: float) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def broadcast(self, value: Any) -> Any:
        box = [value]
        self._guarded(lambda: self._dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def gather(self, value: Any) -> list[Any] | None:
        into: list[Any] | None = [None] * self.size if self.rank == 0 else None
        self._guarded(lambda: self._dist.gather_object(value, into, dst=0, group=self._group))
        return into

    def send(self, data: torch.Tensor, to: int) -> None:
        self._guarded(lambda: self._dist.send(data, dst=to, group=self._group))

    def receive(self, data: torch.Tensor, of: int) -> None:
        self._guarded(lambda: self._dist.recv(data, src=of, group=self._group))

    def _guarded(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise StoreError(
                "rank-lost",
                where=f"rank {self.rank}",
                have=str(error).splitlines()[0][:200],
                need=f"all {self.size} ranks",
                hint="A rank died, or was too slow. The last published step is whole; restart from it.",
            ) from error


def share(team: ProcessGroup, work: Callable[[], T]) -> T:
    """The leader does the work, and all get its result, or its error."""
    outcome: tuple[Any, ...] = ()
    failure: Exception | None = None
    if team.rank == 0:
        try:
            outcome = (True, work())
        except Exception as error:
            failure, outcome = error, (False, describe(error))
    outcome = team.broadcast(outcome)
    if failure is not None:
        raise failure
    if not outcome[0]:
        raise rank_failed(0, outcome[1])
    result: T = outcome[1]
    return result


def collect(team: ProcessGroup, value: T, error: Exception | None) -> list[T]:
    """Every rank's value at the leader, an empty list at the others; raises everywhere if one of them failed."""
    found = team.gather((value, None if error is None else describe(error)))
    bad = [(rank, text) for rank, (_, text) in enumerate(found) if text is not None] if found is not None else []
    failed = team.broadcast(bad)
    if error is not None:
        raise error
    if failed:
        raise rank_failed(*failed[0])
    return [item for item, _ in found] if found is not None else []


def everyone(team: ProcessGroup, value: T) -> list[T]:
    """Every rank's value, at every rank."""
    found: list[T] = team.broadcast(team.gather(value))
    return found


def describe(error: BaseException) -> str:
    return f"{error.code}: {error}" if isinstance(error, DeltackptError) else f"{type(error).__name__}: {error}"


def rank_failed(rank: int, what: str) -> StoreError:
    need = "every rank to do its share"
    return StoreError("rank-failed", where=f"rank {rank}", have=what[:500], need=need)
