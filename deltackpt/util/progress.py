"""Progress of long work, reported to a terminal, a notebook, or not at all."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the progress of one phase after the other."""

    def start(self, what: str, total: int) -> None:
        """A phase begins; ``total`` counts bytes."""

    def advance(self, count: int) -> None:
        """So many bytes more are done."""

    def finish(self) -> None:
        """Called by what goes on for ever, when it begins to wait: what is shown of the last phase is over."""


class Silent:
    """Ignores all progress."""

    def start(self, what: str, total: int) -> None:
        """Ignored."""

    def advance(self, count: int) -> None:
        """Ignored."""

    def finish(self) -> None:
        """Ignored."""


SILENT = Silent()
