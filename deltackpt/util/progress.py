"""What long work tells of itself; a terminal, a notebook or nothing may listen."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener to one piece of work after the other."""

    def start(self, what: str, total: int) -> None:
        """A phase begins; ``total`` counts bytes."""

    def advance(self, count: int) -> None:
        """So many bytes more are done."""


class Silent:
    """Listens to nothing."""

    def start(self, what: str, total: int) -> None: ...

    def advance(self, count: int) -> None: ...


SILENT = Silent()
