"""Progress of long work, reported to a terminal, a notebook, or not at all."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one phase after the other."""

    def start(self, what: str, total: int) -> None:
        """A phase begins; ``total`` counts bytes."""

    def advance(self, count: int) -> None:
        """So many bytes more are done."""


class Silent:
    """Ignores all progress."""

    def start(self, what: str, total: int) -> None:
        """Ignored."""

    def advance(self, count: int) -> None:
        """Ignored."""


SILENT = Silent()
