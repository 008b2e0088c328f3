"""Progress of long work as a bar on a terminal: bytes, rate, time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn


class Bar:
    """A `deltackpt.util.progress.Progress` that is drawn on stderr, one phase at a time, and erased when closed."""

    def __init__(self) -> None:
        self._rich = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task: TaskID | None = None

    def start(self, what: str, total: int) -> None:
        if self._task is None:
            self._rich.start()
        else:
            self._rich.remove_task(self._task)
        self._task = self._rich.add_task(what, total=total)

    def advance(self, count: int) -> None:
        if self._task is not None:
            self._rich.advance(self._task, count)

    def finish(self) -> None:
        """Nothing stands on the terminal until the next phase begins."""
        if self._task is not None:
            self._rich.remove_task(self._task)
            self._rich.stop()
            self._task = None

    def close(self) -> None:
        self._rich.stop()
