"""vLLM's ranks in a live session: a worker extension.

    llm = LLM(MODEL, worker_extension_cls="deltackpt.live.vllm.LiveWorker")
    llm.collective_rpc("deltackpt_join", args=("10.0.0.1:7700", token))
    while serving():
        if llm.collective_rpc("deltackpt_receive")[0]["way"]:
            llm.reset_prefix_cache()

Every rank holds what vLLM's own loader copies into its parameters, and pulls the tiles of that alone. A step is written
while a call of `collective_rpc` runs, so that no request sees weights of two steps.
"""

from __future__ import annotations

from typing import Any

from deltackpt.engines.vllm.traits import TRAITS
from deltackpt.engines.vllm.worker import with_config
from deltackpt.errors import DeltackptError, UsageError
from deltackpt.live.messages import Welcome
from deltackpt.live.receiver import LiveReceiver, LiveStep, join
from deltackpt.live.traced import traced
from deltackpt.live.weights import HeldWeights

BESIDE = 5.0  # seconds after which a step that one rank was offered has come to the others
TURNS = 8  # how often ranks that read the repository at different moments look again


class LiveWorker:
    """Mixed into vLLM's worker, whose ``model_runner`` and ``vllm_config`` it uses.

    Every method is called on all ranks at once, by `collective_rpc`, and returns on each {"step", "state": where the
    weights are, None for no step, "way": how they came there if they were moved: "live" or "store", "agreed": are all
    ranks at one step, "error": as `DeltackptError.to_dict`, or None}.

    Errors are returned and not raised, since vLLM reads no more answers after the first error.
    """

    model_runner: Any
    vllm_config: Any
    _deltackpt_live: LiveReceiver | None = None

    def deltackpt_join(
        self, address: str, token: str, engine: str = "vllm", repository: str | None = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Join the session at ``address``; see `live.join`. A second call joins anew."""
        from vllm.distributed.parallel_state import get_world_group

        from deltackpt.engines.vllm.rank import refuse_loose, refuse_packed, watch_workers
        from deltackpt.engines.vllm.retied import loose
        from deltackpt.engines.vllm.world import everyone

        self.deltackpt_leave()
        watch_workers()
        model, group = self.model_runner.get_model(), get_world_group()

        def held(welcome: Welcome) -> HeldWeights:
            refuse_packed(model)
            refuse_loose(loose(model))
            return traced(model.load_weights, model, welcome.table, TRAITS)

        def come() -> LiveStep | None:
            rank = (group.rank_in_group, group.world_size)
            with with_config(self.vllm_config):
                self._deltackpt_live = join(
                    held, address, token=token, engine=engine, rank=rank, repository=repository, timeout=timeout
                )
            return None

        found = self._deltackpt_together(come, None)
        if any(everyone(found["error"] is not None)):  # a rank alone would keep the trainer waiting
            self.deltackpt_leave()
        return found

    def deltackpt_receive(self, timeout: float = 1.0) -> dict[str, Any]:
        """Take the next step, if one is offered within ``timeout`` seconds; without the trainer, the repository's
        newest. Caches of the engine that belong to other weights are the caller's to empty where "way" is not None."""
        from deltackpt.engines.vllm.rank import refuse_loose
        from deltackpt.engines.vllm.retied import loose
        from deltackpt.engines.vllm.world import everyone

        receiver = self._deltackpt_live
        if not all(everyone(receiver is not None)):
            have, need = "no session", "deltackpt_join, first, on every rank"
            error = UsageError("engine-unattached", where="the engine", have=have, need=need)
            return _report(None, None, False, error)
        assert receiver is not None
        try:  # a step would be agreed on, and answered with other weights
            refuse_loose(next((name for name in everyone(loose(self.model_runner.get_model())) if name), None))
        except DeltackptError as error:
            return _report(receiver, None, False, error)
        if not any(everyone(receiver.offered(timeout))):
            return _report(receiver, None, True, None)
        return self._deltackpt_together(lambda: receiver.receive(BESIDE), receiver)

    def deltackpt_leave(self) -> None:
        """Leave the session. The weights stay."""
        receiver, self._deltackpt_live = self._deltackpt_live, None
        if receiver is not None:
            receiver.close()

    def _deltackpt_together(self, work: Any, receiver: LiveReceiver | None) -> dict[str, Any]:
        """Do it on every rank, and again where ranks came by the repository, and to different steps of it."""
        from deltackpt.engines.vllm.world import everyone

        way, error = None, None
        for _ in range(TURNS):
            try:
                with with_config(self.vllm_config):
                    found = work()
                way = found.way if found is not None else way
            except DeltackptError as found_error:
                error = found_error
            receiver = receiver or self._deltackpt_live
            told = everyone((receiver.state if receiver is not None else None, error is not None))
            failed = any(wrong for _, wrong in told)
            agreed = not failed and len({state for state, _ in told}) == 1
            if agreed or failed:
                break
            assert receiver is not None
            work = lambda receiver=receiver: receiver.receive(0.1)  # noqa: E731
        return _report(receiver, way, agreed, error)


def _report(
    receiver: LiveReceiver | None, way: str | None, agreed: bool, error: DeltackptError | None
) -> dict[str, Any]:
    step, state = (receiver.step, receiver.state) if receiver is not None else (None, None)
    told = error.to_dict() if error is not None else None
    return {"step": step, "state": state, "way": way, "agreed": agreed, "error": told}
