"""The weight-transfer backend: vLLM's own RL API and HTTP routes drive it.

vLLM (0.32) reads the answers of its ranks in their order, stops at the first error, and then reads the rest as the
answers to the next call. So an error that all ranks share is raised by the last one alone; and for a caller with a
token, which reads the reports, none is raised at all, and it closes the session with finish_weight_update.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.parallel_state import get_world_group as world
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltackpt.engines.clients.http import Http
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.update import RankReport, Update
from deltackpt.engines.vllm.rank import attach
from deltackpt.engines.watchdog import FINAL, Watchdog
from deltackpt.errors import DeltackptError, UsageError

RESUMED = 5.0  # seconds that the engine has to answer when its own rank resumes it
log = logging.getLogger(__name__)


@dataclass
class DeltaInit(WeightTransferInitInfo):  # type: ignore[misc]
    """``repository`` is a URL, ``cache`` a directory of this host that all its engines may share.

    A second call with the same three changes nothing. With a ``token``, the step is prepared in the background as well
    (`Update`). ``updater`` is the lock of the process that will pause the engine, ``url`` the engine's own as that
    process sees it: with both, the engine is resumed there should the process end before it wrote anything.
    """

    repository: str
    cache: str
    ref: str = "main"
    step: int | str = "latest"
    state: str | None = None
    mode: str = "auto"
    token: str = ""
    updater: str = ""
    url: str = ""

    @property
    def where(self) -> tuple[str, str, str]:
        """What a receiver is attached to."""
        return self.repository, self.cache, self.ref


@dataclass
class DeltaUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`Update`, and the repository again for callers that name it with every step."""

    step: int | str = "latest"
    state: str | None = None
    phase: str = "apply"
    mode: str = "auto"
    token: str = ""
    repository: str | None = None


class DeltaTransfer(WeightTransferEngine[DeltaInit, DeltaUpdate]):  # type: ignore[misc]
    """A receiver behind vLLM's calls. Errors are ours, DeltackptError."""

    init_info_cls, update_info_cls, supports_draft_weight_update = DeltaInit, DeltaUpdate, False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.receiver: Receiver | None = None
        self._init: DeltaInit | None = None
        self._open = False  # vLLM's session, as far as this engine saw it
        self._watchdog = Watchdog()

    def init_transfer_engine(self, init_info: DeltaInit) -> None:
        """Attach to a repository; with a token, begin to prepare a step too."""
        i = init_info
        self._watchdog.call_off()
        try:
            self._attach(i)
            if i.token and self.receiver is not None:
                self.receiver.update(Update(i.step, i.state, "stage", i.mode, i.token), open=self._open)
                self._watch()
        except DeltackptError as error:
            if i.token:
                RankReport(world().rank_in_group, "staged", error=error.to_dict()).save(i.cache, f"{i.token}-staged")
            else:
                _by_the_last(error)

    def _attach(self, info: DeltaInit) -> None:
        if self.receiver is None or self._init is None or self._init.where != info.where:
            self.receiver = None
            self.receiver = attach(self.model, self.vllm_config, *info.where)
        self._init = info

    def _watch(self, seconds: float | None = None) -> None:
        """Resume the engine if its updater dies, as long as its weights and caches are those of its version."""
        info, receiver = self._init, self.receiver
        if info is None or not info.updater or not info.url or world().rank_in_group != 0:
            return
        if receiver is not None and receiver.final and not receiver.wedged:
            http = Http(info.url, RESUMED)
            self._watchdog.watch(info.updater, lambda: http.post("/resume"), seconds=seconds)

    def start_weight_update(self) -> None:
        """Nothing is written yet."""
        self._open = True

    def receive_weights(self, update_info: DeltaUpdate) -> None:
        """Any phase. An error leaves the weights as they were, on every rank, and ends vLLM's update session."""
        try:
            self._receive(update_info)
        except DeltackptError as error:
            if not update_info.token or self.receiver is None:
                _by_the_last(error)

    def _receive(self, u: DeltaUpdate) -> None:
        if self.receiver is None or self._init is None:
            need = "init_weight_transfer_engine with repository and cache, first"
            raise UsageError("engine-unattached", where="the engine", have="no repository", need=need)
        if u.repository is not None:
            self._attach(replace(self._init, repository=u.repository))
        if u.phase == "apply":
            self._watchdog.call_off()
        try:
            report = self.receiver.update(Update(u.step, u.state, u.phase, u.mode, u.token))
            log.info("deltackpt: %s", report.to_dict())
        finally:  # what was refused or undone is as before
            self._watch()

    def finish_weight_update(self) -> None:
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
