"""The worker extension, for versions of vLLM without the weight-transfer API:

    --worker-extension-cls deltackpt.engines.vllm.worker.DeltaWorker

`collective_rpc` then calls `deltackpt_init`, `deltackpt_update` and `deltackpt_confirm` on every rank.
"""

from __future__ import annotations

from typing import Any

from deltackpt.engines.update import Update
from deltackpt.errors import UsageError


class DeltaWorker:
    """Mixed into vLLM's worker, whose ``model_runner`` and ``vllm_config`` it uses."""

    model_runner: Any
    vllm_config: Any

    def deltackpt_init(self, repository: str, cache: str, ref: str = "main") -> int | None:
        """Attach to a repository. -> the step that the engine is at, if it is known."""
        from deltackpt.engines.vllm.rank import attach

        receiver = attach(self.model_runner.get_model(), self.vllm_config, repository, cache, ref)
        self._deltackpt = receiver
        return receiver.link.step if receiver.link else None

    def deltackpt_update(self, **update: Any) -> dict[str, Any]:
        """The fields of `Update`. -> the rank's report."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return self._deltackpt_receiver().update(Update(**update)).to_dict()  # type: ignore[no-any-return]

    def deltackpt_confirm(self) -> None:
        """The last update is final."""
        self._deltackpt_receiver().confirm()

    def _deltackpt_receiver(self) -> Any:
        found = getattr(self, "_deltackpt", None)
        if found is None:
            have, need = "no repository", "deltackpt_init, first"
            raise UsageError("engine-unattached", where="the engine", have=have, need=need)
        return found
