"""What the follower of a host does with every kind of engine, in this order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from deltackpt.engines.clients.adapters import AdapterClient
from deltackpt.engines.clients.http import Http
from deltackpt.engines.clients.keys import engine_key
from deltackpt.errors import UsageError
from deltackpt.format.manifest import Link


@dataclass(frozen=True)
class ClientOptions:
    """What all engines of a host share. ``pause`` is the engine's mode for requests in flight, ``timeout`` in seconds,
    ``mode`` that of `Update`. Without a ``cache`` each engine is its own base, and ``reports`` is the folder through
    which its ranks answer; ``trusted``: they read only what is signed by keys that they trust themselves. ``draft`` is
    the branch of a draft model that has a checkpoint of its own.
    """

    repository: str
    cache: Path | None
    ref: str = "main"
    pause: str = "keep"
    timeout: float = 120.0
    mode: str = "auto"
    reports: Path | None = None
    trusted: bool = False
    draft: str = ""

    @property
    def folder(self) -> Path:
        """Where ranks report, and the locks of updaters are. Raises UsageError ``engine-cache`` where there is none."""
        if (found := self.reports or self.cache) is None:
            raise UsageError("engine-cache", where="the engines", have="no cache", need="a folder for their reports")
        return found


@dataclass
class EngineReport:
    """What an engine prepared, or wrote. ``unchanged``: nothing of its weights changes, so it need not pause.
    ``served``: it is at the step already, by a final update, and says so as its version. ``path`` and ``expected`` are
    those of `RankReport`, and ``draft``; ``stale`` is what no update changes, in words."""

    mode: str = ""
    reason: str = ""
    elements: int = 0
    unchanged: bool = False
    served: bool = False
    path: str = ""
    expected: str = ""
    stale: tuple[str, ...] = ()
    draft: str = ""


class Client(ABC):
    """One engine. Calls raise ChainError ``engine-refused``, ``engine-wedged`` or ``engine-asleep``, StoreError
    ``engine-silent``."""

    kind = ""  # as in the registry
    no_route = "Is it this engine?"  # the hint where the engine does not have a route
    keys: tuple[str, ...] = ()  # variables of the environment that its own key may be in
    adapters: type[AdapterClient] | None = None  # what serves adapters of its kind

    def __init__(self, url: str, options: ClientOptions) -> None:
        self.http = Http(url, options.timeout, no_route=self.no_route, key=engine_key(*self.keys))
        self.options = options
        self.name = f"{self.kind}={url}"

    @abstractmethod
    def version(self) -> str:
        """The weight version that the engine reports to its users."""

    def locate(self) -> None:
        """Note what the engine runs on. Called before the cache moves, for an engine that was not updated yet."""
        return

    @abstractmethod
    def stage(self, link: Link, state: str, path: Path | None) -> EngineReport:
        """Prepare everything while the engine works on; nothing of it changes.

        ``state`` is the step's digest, ``path`` its slot in the cache, None where there is no cache."""

    @abstractmethod
    def pause(self) -> None:
        """Stop generation; requests in flight as the options say."""

    @abstractmethod
    def apply(self) -> EngineReport:
        """Write what was staged. An error leaves the engine at its old step."""

    @abstractmethod
    def drop_cache(self) -> None:
        """Discard what was computed with the old weights: caches of prefixes, and the like."""

    @abstractmethod
    def finish(self) -> None:
        """Make the update final, and set the version."""

    @abstractmethod
    def undo(self) -> None:
        """Restore what was before `apply`, whether it succeeded or not."""

    @abstractmethod
    def resume(self) -> None:
        """Resume generation."""

    @abstractmethod
    def check(self) -> None:
        """Compare the weights with the step that the engine reports, where its kind allows."""
