"""A vLLM server with the `deltackpt` backend, by its RL routes (VLLM_SERVER_DEV_MODE=1)."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

from deltackpt.engines.clients.base import Client, Host, Ready
from deltackpt.engines.update import Report, read_reports
from deltackpt.errors import ChainError, DeltackptError, StoreError
from deltackpt.format.manifest import Link

_POLL = 0.02  # seconds


class VllmClient(Client):
    kind = "vllm"

    def __init__(self, url: str, host: Host) -> None:
        super().__init__(url, host)
        self._want: dict[str, Any] = {}
        self._step = ""

    def version(self) -> str:
        return str(self.http.get("/weight_info", 10)["weight_version"])

    def stage(self, link: Link, state: str, path: Path) -> Ready:
        self._want = {"step": f"{link.step}-{link.id}", "state": state, "mode": self.host.mode}
        self._step = str(link.step)
        try:
            reports = self._staged()
        except ChainError as error:
            if error.code != "engine-refused" or "engine-unattached" not in error.have:
                raise
            init = {"repository": self.host.repository, "cache": str(self.host.cache), "ref": self.host.ref}
            self.http.post("/init_weight_transfer_engine", {"init_info": init})
            reports = self._staged()
        _raise(reports, self.name)
        ready = _ready(reports)
        ready.quiet = all(r.mode == "none" or (r.mode == "scatter" and r.elements == 0) for r in reports)
        return ready

    def _staged(self) -> list[Report]:
        """Begin, and wait until every rank has prepared."""
        self._session()
        token = secrets.token_hex(8)
        self._send("stage", token)
        read_reports(self.host.cache, token)
        ranks = int(self.http.get("/get_world_size?include_dp=true", 10)["world_size"])
        found: list[Report] = []
        end = time.monotonic() + self.host.timeout
        while len(found) < ranks:
            found += read_reports(self.host.cache, f"{token}-staged")
            if time.monotonic() > end:
                have, need = f"{len(found)} of {ranks} ranks", "all of them"
                raise StoreError("engine-silent", where=self.name, have=have, need=need)
            time.sleep(_POLL)
        return found

    def _session(self) -> None:
        """vLLM's update session; one that a killed follower left open is closed first."""
        try:
            self.http.post("/start_weight_update")
        except ChainError:
            self.http.post("/finish_weight_update", {})
            self.http.post("/start_weight_update")

    def _send(self, phase: str, token: str) -> None:
        self.http.post("/update_weights", {"update_info": {**self._want, "phase": phase, "token": token}})

    def pause(self) -> None:
        self.http.post(f"/pause?mode={self.host.pause}")

    def apply(self) -> Ready:
        reports = self._phase("apply")
        return _ready(reports)

    def _phase(self, phase: str) -> list[Report]:
        token = secrets.token_hex(8)
        try:
            self._send(phase, token)
        except DeltackptError:
            _raise(read_reports(self.host.cache, token), self.name)
            raise
        return read_reports(self.host.cache, token)

    def drop_cache(self) -> None:
        """Requests that stand still are computed anew, or the blocks that they hold would stay."""
        answer = self.http.post("/reset_prefix_cache?reset_running_requests=true")
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ChainError("engine-refused", where=self.name, have="a prefix cache that stays", need="an empty one")

    def finish(self) -> None:
        self.http.post("/finish_weight_update", {"weight_version": self._step})
        if (found := self.version()) != self._step:
            raise ChainError("engine-refused", where=self.name, have=f"version {found}", need=self._step)

    def undo(self) -> None:
        self._phase("undo")
        self.http.post("/finish_weight_update", {})

    def resume(self) -> None:
        self.http.post("/resume")

    def check(self) -> None:
        self._session()
        self._phase("check")
        self.http.post("/finish_weight_update", {})


def _ready(reports: list[Report]) -> Ready:
    first = reports[0] if reports else Report()
    return Ready(first.mode, first.reason, sum(r.elements for r in reports))


def _raise(reports: list[Report], name: str) -> None:
    """What the ranks say went wrong, in their own words."""
    for report in reports:
        if report.error is not None:
            e = report.error
            code = "engine-wedged" if report.wedged else "engine-refused"
            have = f"{e['where']}: {e['have']} [{e['error']}]"
            raise ChainError(code, where=name, have=have, need=str(e["need"]), hint=str(e["hint"]))
