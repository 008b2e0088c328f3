"""How a follower reaches the ranks of a vLLM server: by its RL routes, or by the worker extension."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from deltackpt.engines.clients.http import Http
from deltackpt.engines.vllm.release import release_of


class Calls(ABC):
    """The calls of one server. Each raises what `Http` raises."""

    def __init__(self, http: Http) -> None:
        self.http = http

    @abstractmethod
    def attach(self, info: dict[str, Any]) -> None:
        """`Attachment` to every rank."""

    @abstractmethod
    def start(self) -> None:
        """Open an update session."""

    @abstractmethod
    def change(self, want: dict[str, Any]) -> None:
        """`UpdateCall` to every rank, in the session."""

    @abstractmethod
    def finish(self, version: str | None = None) -> None:
        """Close the session; with a version, that is the server's from now on, where it keeps one."""


class RouteCalls(Calls):
    """By the weight-transfer routes of vLLM 0.25 and newer. ``versions``: the server keeps a version of its weights."""

    def __init__(self, http: Http, *, versions: bool) -> None:
        super().__init__(http)
        self._versions = versions

    def attach(self, info: dict[str, Any]) -> None:
        """As `Calls.attach`."""
        self.http.post("/init_weight_transfer_engine", {"init_info": info})

    def start(self) -> None:
        """As `Calls.start`."""
        self.http.post("/start_weight_update")

    def change(self, want: dict[str, Any]) -> None:
        """As `Calls.change`."""
        self.http.post("/update_weights", {"update_info": want})

    def finish(self, version: str | None = None) -> None:
        """As `Calls.finish`."""
        named = version is not None and self._versions
        self.http.post("/finish_weight_update", {"weight_version": version} if named else {})


class ExtensionCalls(Calls):
    """By `worker.DeltaWorker`, which has no session."""

    def attach(self, info: dict[str, Any]) -> None:
        """As `Calls.attach`."""
        self._all("deltackpt_init", info)

    def start(self) -> None:
        """The first write opens it."""

    def change(self, want: dict[str, Any]) -> None:
        """As `Calls.change`."""
        self._all("deltackpt_update", want)

    def finish(self, version: str | None = None) -> None:
        """As `Calls.finish`. The ranks keep the version."""
        self._all("deltackpt_confirm", {})

    def _all(self, method: str, kwargs: dict[str, Any]) -> None:
        self.http.post("/collective_rpc", {"method": method, "kwargs": kwargs})


def calls_of(http: Http, where: str) -> tuple[Calls, bool]:
    """How a server is called, and whether it keeps a version of its weights itself. Raises UsageError
    ``engine-version`` for a vLLM that is not known."""
    release = release_of(str(http.field("/version", "version")), where)
    if release.has_backends:
        return RouteCalls(http, versions=release.has_versions), release.has_versions
    return ExtensionCalls(http), False
