"""The weight-transfer backend: the RL API and the HTTP routes of vLLM 0.25 and newer drive it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltackpt.engines.vllm.endpoint import Attachment, RankEndpoint, UpdateCall
from deltackpt.engines.vllm.rank import watch_workers
from deltackpt.engines.vllm.release import check_backend
from deltackpt.errors import UsageError


@dataclass
class DeltaInit(Attachment, WeightTransferInitInfo):  # type: ignore[misc]
    """`Attachment`, as vLLM's own class."""


@dataclass
class DeltaUpdate(UpdateCall, WeightTransferUpdateInfo):  # type: ignore[misc]
    """`UpdateCall`, as vLLM's own class."""


class DeltaTransfer(WeightTransferEngine[DeltaInit, DeltaUpdate]):  # type: ignore[misc]
    """A receiver behind vLLM's calls. Errors are ours, DeltackptError; one of them says which releases it is for."""

    init_info_cls, update_info_cls, supports_draft_weight_update = DeltaInit, DeltaUpdate, False

    def __init__(self, *args: Any, **options: Any) -> None:
        check_backend(vllm.__version__, "the backend deltackpt")
        super().__init__(*args, **options)
        watch_workers()
        self.endpoint = RankEndpoint(self.model, self.vllm_config)

    def init_transfer_engine(self, init_info: DeltaInit) -> None:
        """Attach to a repository; with a token, begin to prepare a step too."""
        self.endpoint.attach(init_info)

    def start_weight_update(self) -> None:
        """Nothing is written yet."""
        self.endpoint.start()

    def receive_weights(self, update_info: DeltaUpdate) -> None:
        """Any phase. An error leaves the weights as they were, on every rank, and ends vLLM's update session."""
        self.endpoint.change(update_info)

    def finish_weight_update(self) -> None:
        """The last update is final."""
        self.endpoint.finish()

    def shutdown(self) -> None:
        """Detach."""
        self.endpoint.shutdown()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> NoReturn:
        """Abstract up to 0.27. Nothing is sent from here: a trainer publishes to the repository."""
        have, need = "a trainer that sends weights", "one that publishes steps, with `deltackpt.hooks.TrainerHook`"
        raise UsageError("engine-form", where="the backend deltackpt", have=have, need=need)
