"""The weight-transfer backend: vLLM's own RL API and HTTP routes drive it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltackpt.engines.receiver import Receiver
from deltackpt.engines.update import Update
from deltackpt.engines.vllm.rank import attach
from deltackpt.errors import UsageError

log = logging.getLogger(__name__)


@dataclass
class DeltaInit(WeightTransferInitInfo):  # type: ignore[misc]
    """``repository`` is a URL, ``cache`` a directory of this host that all its engines may share."""

    repository: str
    cache: str
    ref: str = "main"


@dataclass
class DeltaUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`Update`, and the repository again for whoever wants to name it with every step."""

    step: int | str = "latest"
    state: str | None = None
    phase: str = "apply"
    mode: str = "auto"
    token: str = ""
    repository: str | None = None


class DeltaTransfer(WeightTransferEngine[DeltaInit, DeltaUpdate]):  # type: ignore[misc]
    init_info_cls, update_info_cls, supports_draft_weight_update = DeltaInit, DeltaUpdate, False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.receiver: Receiver | None = None
        self._init: DeltaInit | None = None

    def init_transfer_engine(self, init_info: DeltaInit) -> None:
        self.receiver = attach(self.model, self.vllm_config, init_info.repository, init_info.cache, init_info.ref)
        self._init = init_info

    def start_weight_update(self) -> None:
        """Nothing is begun before all is prepared."""

    def receive_weights(self, update_info: DeltaUpdate) -> None:
        """Any phase. An error leaves the weights as they were, on every rank, and ends vLLM's update session."""
        if self.receiver is None or self._init is None:
            need = "init_weight_transfer_engine with repository and cache, first"
            raise UsageError("engine-unattached", where="the engine", have="no repository", need=need)
        if update_info.repository not in (None, self._init.repository):
            self.init_transfer_engine(DeltaInit(update_info.repository or "", self._init.cache, self._init.ref))
        u = update_info
        report = self.receiver.update(Update(u.step, u.state, u.phase, u.mode, u.token))
        log.info("deltackpt: %s", report.to_dict())

    def finish_weight_update(self) -> None:
        if self.receiver is not None:
            self.receiver.confirm()

    def shutdown(self) -> None:
        self.receiver = None
