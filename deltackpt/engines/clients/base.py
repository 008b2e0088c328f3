"""What the host's follower does with every kind of engine, in this order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from deltackpt.engines.clients.http import Http
from deltackpt.format.manifest import Link


@dataclass(frozen=True)
class Host:
    """What all engines of a host share. ``pause`` is the engine's mode for requests in flight."""

    repository: str
    cache: Path
    ref: str = "main"
    pause: str = "keep"
    timeout: float = 120.0
    mode: str = "auto"


@dataclass
class Ready:
    """An engine that prepared a step. ``quiet``: nothing of its weights changes, so nothing has to stop."""

    mode: str = ""
    reason: str = ""
    elements: int = 0
    quiet: bool = False


class Client(ABC):
    """One engine. Calls raise ChainError ``engine-refused`` or ``engine-wedged``, StoreError ``engine-silent``."""

    kind = ""

    def __init__(self, url: str, host: Host) -> None:
        self.http, self.host = Http(url, host.timeout), host
        self.name = f"{self.kind}={url}"

    @abstractmethod
    def version(self) -> str:
        """The weight version that the engine tells its users."""

    @abstractmethod
    def stage(self, link: Link, state: str, path: Path) -> Ready:
        """Prepare everything while the engine works on; nothing of it changes."""

    @abstractmethod
    def pause(self) -> None: ...

    @abstractmethod
    def apply(self) -> Ready:
        """Write what was staged. An error leaves the engine at its old step."""

    @abstractmethod
    def drop_cache(self) -> None:
        """What was computed with the old weights is computed anew."""

    @abstractmethod
    def finish(self) -> None:
        """It is final, and the version says so."""

    @abstractmethod
    def undo(self) -> None:
        """Back to what was before `apply`, whatever came of it."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Hold the weights against the step that the engine is said to be at, where its kind allows."""
