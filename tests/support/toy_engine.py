"""A kind of engine that the library does not know: in this process, found by its URL. Its client is all it adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deltackpt.engines.clients.base import Client, ClientOptions, EngineReport
from deltackpt.errors import ChainError
from deltackpt.format.manifest import Link

REGISTERED = "support.toy_engine:ToyClient"  # the line of the registry


@dataclass
class ToyEngine:
    """``path`` is the slot that it computes with, ``calls`` what was asked of it, in order."""

    version: str = "default"
    path: Path = field(default_factory=Path)
    calls: list[str] = field(default_factory=list)
    refuses: bool = False


RUNNING: dict[str, ToyEngine] = {}  # by URL


class ToyClient(Client):
    kind = "toy"

    def __init__(self, url: str, options: ClientOptions) -> None:
        super().__init__(url, options)
        self.engine = RUNNING[url]
        self._staged = self._before = "", Path()

    def version(self) -> str:
        return self.engine.version

    def stage(self, link: Link, state: str, path: Path) -> EngineReport:
        self.engine.calls.append("stage")
        self._before = self.engine.version, self.engine.path
        self._staged = str(link.step), path
        return EngineReport("toy")

    def pause(self) -> None:
        self.engine.calls.append("pause")

    def apply(self) -> EngineReport:
        self.engine.calls.append("apply")
        if self.engine.refuses:
            raise ChainError("engine-refused", where=self.name, have="no", need="yes")
        self.engine.path = self._staged[1]
        return EngineReport("toy", elements=1)

    def drop_cache(self) -> None:
        self.engine.calls.append("drop_cache")

    def finish(self) -> None:
        self.engine.calls.append("finish")
        self.engine.version = self._staged[0]

    def undo(self) -> None:
        self.engine.calls.append("undo")
        self.engine.version, self.engine.path = self._before

    def resume(self) -> None:
        self.engine.calls.append("resume")

    def check(self) -> None: ...
