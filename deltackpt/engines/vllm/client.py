"""A vLLM server with the `deltackpt` backend, by its RL routes (VLLM_SERVER_DEV_MODE=1)."""

from __future__ import annotations

import atexit
import secrets
import time
from pathlib import Path
from typing import Any

from deltackpt.engines.clients.base import Client, ClientOptions, EngineReport
from deltackpt.engines.update import RankReport, raise_first, read_reports
from deltackpt.engines.watchdog import UpdaterLock
from deltackpt.errors import ChainError, StoreError
from deltackpt.format.manifest import Link

_POLL = 0.02  # seconds


class VllmClient(Client):
    """vLLM's update session is opened when a step is staged, and closed by `finish`, `undo`, or an error."""

    kind = "vllm"
    no_route = "Is it this engine? vLLM has this route with VLLM_SERVER_DEV_MODE=1 only."

    def __init__(self, url: str, options: ClientOptions) -> None:
        super().__init__(url, options)
        self._want: dict[str, Any] = {}
        self._step, self._ranks = "", 0
        self._open = False  # vLLM's update session
        self._updater, self._paused = UpdaterLock(options.cache), False
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends; where the engine is paused, it is for the watchdog in it to see that."""
        if not self._paused:
            self._updater.release()

    def version(self) -> str:
        """The weight version that the engine reports to its users."""
        return str(self.http.field("/weight_info", "weight_version"))

    def stage(self, link: Link, state: str, path: Path) -> EngineReport:
        """Every rank prepares the step in the background; then an update session is opened."""
        self._want = {"step": f"{link.step}-{link.id}", "state": state, "mode": self.options.mode}
        self._step = str(link.step)
        reports = self._staged()
        raise_first(reports, self.name)
        report = _report_of(reports)
        report.unchanged = all(r.mode == "none" or (r.mode == "scatter" and r.elements == 0) for r in reports)
        report.served = all(r.mode == "none" and r.final for r in reports) and self.version() == self._step
        if any(r.open for r in reports):  # a follower that was killed left it so
            self._close()
        self._begin()
        return report

    def _staged(self) -> list[RankReport]:
        """Attach, begin to prepare, and wait until every rank has. No session is needed for that."""
        token = secrets.token_hex(8)
        init = {"repository": self.options.repository, "cache": str(self.options.cache), "ref": self.options.ref}
        init |= {"updater": self._updater.hold(), "url": self.http.url}
        self.http.post("/init_weight_transfer_engine", {"init_info": {**init, **self._want, "token": token}})
        self._ranks = int(self.http.field("/get_world_size?include_dp=true", "world_size"))
        found: list[RankReport] = []
        end = time.monotonic() + self.options.timeout
        while len(found) < self._ranks:
            found += read_reports(self.options.cache, f"{token}-staged")
            if time.monotonic() > end:
                have, need = f"{len(found)} of {self._ranks} ranks", "all of them"
                raise StoreError("engine-silent", where=self.name, have=have, need=need)
            time.sleep(_POLL)
        read_reports(self.options.cache, token)
        return found

    def _begin(self) -> None:
        self.http.post("/start_weight_update")
        self._open = True

    def _close(self, **more: str) -> None:
        self._open = False
        self.http.post("/finish_weight_update", more)

    def _phase(self, phase: str) -> list[RankReport]:
        """Of an open session, which an error closes; no answer leaves it open."""
        token = secrets.token_hex(8)
        try:
            self.http.post("/update_weights", {"update_info": {**self._want, "phase": phase, "token": token}})
        except ChainError:
            self._open = False
            raise
        reports = read_reports(self.options.cache, token)
        if any(report.error is not None for report in reports):
            self._close()
        raise_first(reports, self.name)
        if len(reports) != self._ranks:
            have, need = f"{len(reports)} of {self._ranks} ranks", "all of them"
            raise StoreError("engine-silent", where=self.name, have=have, need=need)
        return reports

    def pause(self) -> None:
        """Stop generation; requests in flight as the options say."""
        self._paused = True
        self.http.post(f"/pause?mode={self.options.pause}")

    def apply(self) -> EngineReport:
        """Scatter or reload, as staged."""
        return _report_of(self._phase("apply"))

    def drop_cache(self) -> None:
        """Requests that are paused are computed anew, or the blocks that they hold would stay."""
        answer = self.http.post("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ChainError("engine-refused", where=self.name, have="a prefix cache that stays", need="an empty one")

    def finish(self) -> None:
        """Close the session with the new version."""
        self._close(weight_version=self._step)
        if (found := self.version()) != self._step:
            raise ChainError("engine-refused", where=self.name, have=f"version {found}", need=self._step)

    def undo(self) -> None:
        """Every rank restores its old step, in the open session, which is closed."""
        if self._open:  # else it was final, or it never began
            self._phase("undo")
            self._close()

    def resume(self) -> None:
        """Resume generation."""
        self.http.post("/resume")
        self._paused = False

    def check(self) -> None:
        """Every rank compares all proven weights with its step; in a session of its own where none is open."""
        if self._open:
            self._phase("check")
            return
        self._begin()
        self._phase("check")
        self._close()


def _report_of(reports: list[RankReport]) -> EngineReport:
    first = reports[0] if reports else RankReport()
    return EngineReport(first.mode, first.reason, sum(r.elements for r in reports))
