"""What a rank of vLLM does when it is called: the same behind a weight-transfer backend and a worker extension.

vLLM (0.32) reads the answers of its ranks in their order, stops at the first error, and then reads the rest as the
answers to the next call. So an error that all ranks share is raised by the last one alone; and for a caller with a
token, which reads the reports, none is raised at all, and it closes the session with finish_weight_update.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.parallel_state import get_world_group as world

from deltackpt.engines.both_models import BothModels
from deltackpt.engines.clients.http import Http
from deltackpt.engines.clients.keys import engine_key
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.update import RankReport, Update
from deltackpt.engines.vllm.rank import attach, attach_draft
from deltackpt.engines.vllm.release import KEY
from deltackpt.engines.watchdog import FINAL, Watchdog
from deltackpt.errors import DeltackptError, UsageError

RESUMED = 5.0  # seconds that the engine has to answer when its own rank resumes it
WAITS = "it had begun to write, so that generation stays paused until another serve-updates is started"
log = logging.getLogger(__name__)


@dataclass
class Attachment:
    """``repository`` is a URL, ``cache`` a directory of this host that all its engines may share; without one the
    engine is its own base.

    A second call with the same three changes nothing. With a ``token``, the step is prepared in the background as well
    (`Update`), and ``phase`` may be another one that needs no session; the reports go to ``reports``, or else into the
    cache. ``updater`` is the lock of the process that will pause the engine, ``url`` the engine's own as that process
    sees it: with both, the engine is resumed there should the process end before it wrote anything. ``draft`` is the
    branch of a draft model that has a checkpoint of its own.
    """

    repository: str
    cache: str | None = None
    ref: str = "main"
    step: int | str = "latest"
    state: str | None = None
    mode: str = "auto"
    token: str = ""
    updater: str = ""
    url: str = ""
    reports: str = ""
    phase: str = "stage"
    trusted: bool = False
    draft: str = ""

    @property
    def where(self) -> tuple[str, str | None, str, bool, str]:
        """What a receiver is attached to."""
        return self.repository, self.cache, self.ref, self.trusted, self.draft

    @property
    def folder(self) -> str:
        """Where the reports of the ranks go; nowhere if it is empty."""
        return self.reports or self.cache or ""


@dataclass
class UpdateCall:
    """`Update`, and the repository again for callers that name it with every step."""

    step: int | str = "latest"
    state: str | None = None
    phase: str = "apply"
    mode: str = "auto"
    token: str = ""
    repository: str | None = None


class RankEndpoint:
    """A receiver behind vLLM's calls. Errors are ours, DeltackptError."""

    def __init__(self, model: Any, config: Any) -> None:
        self.receiver: Receiver | BothModels | None = None
        self._model, self._config = model, config
        self._attached: Attachment | None = None
        self._open = False  # vLLM's session, as far as this engine saw it
        self._watchdog = Watchdog()

    def attach(self, info: Attachment) -> None:
        """Attach to a repository; with a token, begin to prepare a step too."""
        if info.phase == "stage":
            self._watchdog.call_off()
        try:
            self._attach(info)
            if info.token and self.receiver is not None:
                want = Update(info.step, info.state, info.phase, info.mode, info.token)
                self.receiver.update(want, open=self._open)
                if info.phase == "stage":
                    self._watch()
        except DeltackptError as error:
            if info.token:
                token = f"{info.token}-staged" if info.phase == "stage" else info.token
                RankReport(world().rank_in_group, "staged", error=error.to_dict()).save(info.folder, token)
            else:
                _by_the_last(error)

    def _attach(self, info: Attachment) -> None:
        if self.receiver is None or self._attached is None or self._attached.where != info.where:
            self.receiver = None
            where = info.repository, info.cache, info.ref, info.trusted
            self.receiver = main = attach(self._model, self._config, *where)
            found = attach_draft(main, *where, branch=info.draft)
            if found is not None:
                self.receiver = BothModels(main, *found)
        self.receiver.reports = info.folder
        self._attached = info

    def _watch(self, seconds: float | None = None) -> None:
        """Resume the engine if its updater dies, as long as its weights and caches are those of its version; else say
        in its log for what it waits."""
        info, receiver = self._attached, self.receiver
        if info is None or not info.updater or not info.url or world().rank_in_group != 0 or receiver is None:
            return
        if receiver.final and not receiver.wedged:
            http = Http(info.url, RESUMED, key=engine_key(KEY))
            self._watchdog.watch(info.updater, lambda: http.post("/resume"), seconds=seconds)
        else:
            self._watchdog.watch(info.updater, lambda: None, words=WAITS)

    def start(self) -> None:
        """A session begins. Nothing is written yet."""
        self._open = True

    def change(self, want: UpdateCall) -> dict[str, Any]:
        """Any phase. An error leaves the weights as they were, on every rank. -> the rank's report."""
        try:
            return self._change(want).to_dict()
        except DeltackptError as error:
            if not want.token or self.receiver is None:
                _by_the_last(error)
            return RankReport(world().rank_in_group, want.phase, error=error.to_dict()).to_dict()

    def _change(self, u: UpdateCall) -> RankReport:
        if self.receiver is None or self._attached is None:
            need = "init_weight_transfer_engine with repository and cache, first"
            raise UsageError("engine-unattached", where="the engine", have="no repository", need=need)
        if u.repository is not None:
            self._attach(replace(self._attached, repository=u.repository))
        if u.phase == "apply":
            self._watchdog.call_off()
        try:
            report = self.receiver.update(Update(u.step, u.state, u.phase, u.mode, u.token))
            log.info("deltackpt: %s", report.to_dict())
        finally:  # what was refused or undone is as before
            self._watch()
        return report

    def finish(self) -> None:
        """The last update is final."""
        self._open = False
        if self.receiver is not None:
            self.receiver.confirm()
            self._watch(FINAL)

    def shutdown(self) -> None:
        """Detach."""
        self._watchdog.call_off()
        self.receiver = None


def _by_the_last(error: DeltackptError) -> None:
    if world().rank_in_group == world().world_size - 1:
        raise error
    log.error("deltackpt: %s", error)
