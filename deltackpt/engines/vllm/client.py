"""A vLLM server with the `deltackpt` backend, or its worker extension (VLLM_SERVER_DEV_MODE=1)."""

from __future__ import annotations

import atexit
import secrets
import time
from pathlib import Path
from typing import Any

from deltackpt.engines.clients.base import Client, ClientOptions, EngineReport
from deltackpt.engines.update import START, RankReport, raise_first, read_reports
from deltackpt.engines.vllm.adapters import VllmAdapters
from deltackpt.engines.vllm.caches import drop_caches
from deltackpt.engines.vllm.calls import Calls, calls_of
from deltackpt.engines.vllm.release import KEY
from deltackpt.engines.watchdog import UpdaterLock
from deltackpt.errors import ChainError, DeltackptError, StoreError
from deltackpt.format.manifest import Link

_POLL = 0.02  # seconds


class VllmClient(Client):
    """vLLM's update session is opened when a step is staged, and closed by `finish`, `undo`, or an error."""

    kind = "vllm"
    no_route = "Is it this engine? vLLM has this route with VLLM_SERVER_DEV_MODE=1 only."
    keys = (KEY,)
    adapters = VllmAdapters

    def __init__(self, url: str, options: ClientOptions) -> None:
        super().__init__(url, options)
        self._want: dict[str, Any] = {}
        self._step, self._ranks = "", 0
        self._open = False  # vLLM's update session
        self._known: tuple[Calls, bool] | None = None  # how it is called, and whether it keeps versions
        self._updater, self._paused = UpdaterLock(options.folder), False
        atexit.register(self._end)

    def _end(self) -> None:
        """The process ends; where the engine is paused, it is for the watchdog in it to see that."""
        if not self._paused:
            self._updater.release()

    @property
    def _calls(self) -> Calls:
        return self._release()[0]

    def _release(self) -> tuple[Calls, bool]:
        if self._known is None:
            self._known = calls_of(self.http, self.name)
        return self._known

    def version(self) -> str:
        """The weight version that the engine reports to its users; of one that keeps none, its ranks' word."""
        try:
            if self._release()[1]:
                return str(self.http.field("/weight_info", "weight_version"))
            return self._version_of_ranks()
        except DeltackptError:
            self._known = None  # another vLLM may be started there
            raise

    def _version_of_ranks(self) -> str:
        reports = self._attached("report")
        raise_first(reports, self.name)
        said = {report.version for report in reports}
        return said.pop() if len(said) == 1 else START

    def stage(self, link: Link, state: str, path: Path | None) -> EngineReport:
        """Every rank prepares the step in the background; then an update session is opened."""
        self._refuse_asleep()
        self._want = {"step": f"{link.step}-{link.id}", "state": state, "mode": self.options.mode}
        self._step = str(link.step)
        reports = self._attached("stage")
        raise_first(reports, self.name)
        report = _report_of(reports)
        report.unchanged = all(r.mode == "none" or (r.mode == "scatter" and r.elements == 0) for r in reports)
        report.served = all(r.mode == "none" and r.final for r in reports) and self.version() == self._step
        if any(r.open for r in reports):  # a follower that was killed left it so
            self._close()
        self._begin()
        return report

    def _refuse_asleep(self) -> None:
        """An engine asleep is waited for. vLLM says that of one that is only paused as well: then its ranks know."""
        if not self._answer("/is_sleeping", "is_sleeping") or self._answer("/is_paused", "is_paused"):
            return
        need, hint = "one that is awake", "It is updated when it wakes up."
        raise ChainError("engine-asleep", where=self.name, have="an engine asleep", need=need, hint=hint)

    def _answer(self, path: str, name: str) -> bool:
        try:
            return bool(self.http.field(path, name))
        except ChainError:  # a route that it does not have
            return False

    def _attached(self, phase: str) -> list[RankReport]:
        """Attach; begin to prepare, or only ask; wait until every rank has answered. No session is needed for that."""
        token, folder, cache = secrets.token_hex(8), self.options.folder, self.options.cache
        info: dict[str, Any] = {"repository": self.options.repository, "ref": self.options.ref, "phase": phase}
        info |= {"cache": None if cache is None else str(cache), "reports": str(folder), "token": token}
        info |= {"trusted": True} if self.options.trusted else {}
        info |= {"draft": self.options.draft} if self.options.draft else {}
        info |= {"updater": self._updater.hold(), "url": self.http.url, **self._want}
        self._calls.attach(info)
        self._ranks = int(self.http.field("/get_world_size?include_dp=true", "world_size"))
        found: list[RankReport] = []
        end = time.monotonic() + self.options.timeout
        answer = f"{token}-staged" if phase == "stage" else token
        while len(found) < self._ranks:
            found += read_reports(folder, answer)
            if time.monotonic() > end:
                have, need = f"{len(found)} of {self._ranks} ranks", "all of them"
                raise StoreError("engine-silent", where=self.name, have=have, need=need)
            time.sleep(_POLL)
        read_reports(folder, token)
        return found

    def _begin(self) -> None:
        self._calls.start()
        self._open = True

    def _close(self, version: str | None = None) -> None:
        self._open = False
        self._calls.finish(version)

    def _phase(self, phase: str) -> list[RankReport]:
        """Of an open session, which an error closes; no answer leaves it open."""
        token = secrets.token_hex(8)
        try:
            self._calls.change({**self._want, "phase": phase, "token": token})
        except ChainError:
            self._open = False
            raise
        reports = read_reports(self.options.folder, token)
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
        """All that was computed with the old weights, wherever vLLM keeps it."""
        drop_caches(self.http, self.name)

    def finish(self) -> None:
        """Close the session with the new version."""
        if not self._release()[1]:
            self._phase("final")
        self._close(self._step)
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
    """What the ranks have in common; of the ways that they take, one that was not expected."""
    first = next((r for r in reports if r.path != r.expected), reports[0]) if reports else RankReport()
    stale = tuple(dict.fromkeys(words for report in reports for words in report.stale))
    elements = sum(r.elements for r in reports)
    found = EngineReport(first.mode, first.reason, elements, path=first.path, expected=first.expected, stale=stale)
    found.draft = first.draft
    return found
