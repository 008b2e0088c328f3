"""The engine ranks of a session, as the trainer's first rank knows them."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from deltackpt.carriers.wire import Wire
from deltackpt.errors import ConflictError


@dataclass(eq=False)
class Member:
    """Rank ``rank`` of an engine that has ``ranks`` of them. Ranks of one engine switch together or not at all."""

    wire: Wire
    engine: str
    rank: int
    ranks: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.engine}, rank {self.rank}" if self.ranks > 1 else self.engine


class Members:
    """Who is in. Ranks join and leave at any time; a step is made with those who were there when it was announced."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Member] = {}
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._held)

    def check(self, engine: str, rank: int, ranks: int) -> None:
        """Raise ConflictError ``live-taken`` for a rank that is in already, or an engine of another number of ranks.

        Who has died is out.
        """
        with self._changed:
            for key, member in list(self._held.items()):
                if key[0] != engine or not member.wire.ended:
                    continue
                del self._held[key]
                member.wire.close()
            others = [m for m in self._held.values() if m.engine == engine]
        if any(m.rank == rank for m in others):
            need, hint = "a rank that is not in", "Give each engine a name of its own: engine=."
            where = f"{engine!r}, rank {rank}"
            raise ConflictError("live-taken", where=where, have="one that is in the session", need=need, hint=hint)
        if any(m.ranks != ranks for m in others):
            have = f"{ranks} ranks, where another rank of it says {others[0].ranks}"
            raise ConflictError("live-taken", where=f"engine {engine!r}", have=have, need="one number of ranks")

    def add(self, member: Member) -> None:
        """Let a rank in. Raises what `check` raises."""
        with self._changed:
            self.check(member.engine, member.rank, member.ranks)
            self._held[member.engine, member.rank] = member
            self._changed.notify_all()

    def drop(self, member: Member) -> None:
        """Let a rank go, and end its connection: it sees that, and comes back by the repository."""
        with self._changed:
            if self._held.get((member.engine, member.rank)) is member:
                del self._held[member.engine, member.rank]
        member.wire.close()

    def all(self) -> list[Member]:
        """Those who are in now."""
        with self._changed:
            return list(self._held.values())

    def wait(self, count: int, timeout: float) -> bool:
        """Wait until so many are in, or for ``timeout`` seconds. -> are they?"""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._held) >= count, timeout)
            return len(self._held) >= count

    def close(self) -> None:
        """Let all go, and end every `wait`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for member in self.all():
            self.drop(member)
