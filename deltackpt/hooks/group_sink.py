"""The sink of one rank, where all ranks of a process group publish one step together."""

from __future__ import annotations

from collections.abc import Callable

from deltackpt.errors import DeltackptError
from deltackpt.hooks.parts import Share
from deltackpt.hooks.process_group import ProcessGroup, collect, describe, rank_failed
from deltackpt.publish.repository_sink import RepositorySink
from deltackpt.publish.sink import EncodedPart

Attempt = tuple[Share, Exception | None]  # what a rank did, and the error that stopped it


class GroupSink:
    """Every rank commits what it did: the step is published for all of them, or for none.

    ``sink`` is this rank's own. Rank 0 calls ``lead`` with the shares of all ranks, which commits its own sink, and
    returns whether an anchor is due at the next step.
    """

    def __init__(self, group: ProcessGroup, sink: RepositorySink, lead: Callable[[list[Share]], bool]) -> None:
        self._group, self._sink, self._lead = group, sink, lead
        self._unclear = False  # rank 0 may have committed what this rank stored

    def part_bytes(self, most: int) -> int:
        """As the sink of this rank asks for: each rank numbers its own."""
        return self._sink.part_bytes(most)

    def put(self, part: EncodedPart) -> None:
        """Put a part of this rank."""
        self._sink.put(part)

    def commit(self, attempt: Attempt) -> tuple[list[Share], bool]:
        """-> the shares of all ranks (at rank 0; none at the others), and whether an anchor is due.

        Raises the error of this rank, StoreError ``rank-failed`` with that of another, ``rank-lost`` where one does not
        answer.
        """
        try:
            shares = collect(self._group, *attempt)
            return shares, self._commit(shares)
        except DeltackptError as error:
            # Rank 0 may have committed without this rank; only rank 0 knows.
            self._unclear = self._unclear or (self._group.rank > 0 and error.code == "rank-lost")
            raise

    def _commit(self, shares: list[Share]) -> bool:
        failure: Exception | None = None
        outcome: tuple[str, bool, bool] = ("", False, False)  # what went wrong, was it too late to withdraw, due
        if self._group.rank == 0:
            try:
                outcome = ("", True, self._lead(shares))
            except Exception as error:
                failure, outcome = error, (describe(error), self._sink.committing, False)
        text, committing, due = self._group.broadcast(outcome)
        self._unclear = bool(committing)
        if text:
            raise failure or rank_failed(0, text)
        return bool(due)

    def abort(self) -> None:
        """Withdraw what this rank put, unless rank 0 may have committed it."""
        if not self._unclear:
            self._sink.abort()
