"""The worker extension, for releases of vLLM without weight-transfer backends that are given the model:

    --worker-extension-cls deltackpt.engines.vllm.worker.DeltaWorker

`collective_rpc` then calls `deltackpt_init`, `deltackpt_update` and `deltackpt_confirm` on every rank. It works in the
releases that have backends as well.
"""

from __future__ import annotations

from typing import Any

from deltackpt.errors import UsageError


class DeltaWorker:
    """Mixed into vLLM's worker, whose ``model_runner`` and ``vllm_config`` it uses."""

    model_runner: Any
    vllm_config: Any

    def deltackpt_init(self, repository: str, cache: str | None = None, ref: str = "main", **more: Any) -> int | None:
        """Attach to a repository; ``more`` are the other fields of `Attachment`. -> the step that the engine is at, if
        it is known. Raises UsageError ``engine-version``."""
        import vllm

        from deltackpt.engines.vllm.drafts import note_worker
        from deltackpt.engines.vllm.endpoint import Attachment, RankEndpoint
        from deltackpt.engines.vllm.rank import watch_workers
        from deltackpt.engines.vllm.release import release_of

        release_of(vllm.__version__, "the worker extension")
        watch_workers()
        note_worker(self)
        found = getattr(self, "_deltackpt", None)
        if found is None:
            found = self._deltackpt = RankEndpoint(self.model_runner.get_model(), self.vllm_config)
        with with_config(self.vllm_config):
            found.attach(Attachment(repository, cache, ref, **more))
        link = found.receiver.link if found.receiver else None
        return link.step if link else None

    def deltackpt_update(self, **change: Any) -> dict[str, Any]:
        """The fields of `UpdateCall`. -> the rank's report. What is written is final with `deltackpt_confirm`."""
        from deltackpt.engines.vllm.endpoint import UpdateCall

        endpoint = self._deltackpt_endpoint()
        with with_config(self.vllm_config):
            if change.get("phase", "apply") == "apply":
                endpoint.start()
            return endpoint.change(UpdateCall(**change))  # type: ignore[no-any-return]

    def deltackpt_confirm(self) -> None:
        """The last update is final."""
        self._deltackpt_endpoint().finish()

    def _deltackpt_endpoint(self) -> Any:
        found = getattr(self, "_deltackpt", None)
        if found is None:
            have, need = "no repository", "deltackpt_init, first"
            raise UsageError("engine-unattached", where="the engine", have=have, need=need)
        return found


def with_config(config: Any) -> Any:
    """What models of vLLM ask for while their weights are loaded."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(config)
