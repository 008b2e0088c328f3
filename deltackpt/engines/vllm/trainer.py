"""vLLM's own trainer interface: a trainer that was written for it publishes steps by `send_weights`, on every rank.

    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from deltackpt.engines.vllm.trainer import DeltaTrainerInit

    engine = WeightTransferTrainerFactory.trainer_init(
        DeltaTrainerInit("s3://BUCKET/RUN", cache="/dev/shm/cache", rank=rank),
        client=HTTPVLLMWeightSyncClient("http://rollout:8000"),
        source=ModuleSource(model),
    )
    engine.send_weights()    # after every step, on every rank

The trainer's ranks publish what changed, each what it owns; then the first of them tells the engine, which has
`--weight-transfer-config '{"backend": "deltackpt"}'`, to take the step from the repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from deltackpt.engines.vllm.plugin import NAME
from deltackpt.engines.vllm.sources import located, tensors_of
from deltackpt.errors import UsageError
from deltackpt.hooks import TrainerHook


@dataclass
class DeltaTrainerInit(TrainerInitInfo):  # type: ignore[misc]
    """``repository`` is a URL that trainer and engines reach, ``cache`` a directory of the engines' hosts; without one
    an engine of one rank is its own base.

    ``hook``: options of `TrainerHook`, as ``dtype``, ``anchor``, ``sign`` or ``live``. ``rank``, of this process, is
    that in torch.distributed's default group, 0 where there is none.
    """

    backend: ClassVar[str] = NAME

    repository: str
    cache: str | None = None
    ref: str = "main"
    hook: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := {"ref", "locate", "source", "repository"} & {*self.hook}:
            have, need = f"hook={{{', '.join(sorted(map(repr, taken)))}}}", "what the interface does not say itself"
            raise UsageError("hook-option", where="the trainer for vLLM", have=have, need=need)


class DeltaTrainer(TrainerWeightTransferEngine[DeltaTrainerInit]):  # type: ignore[misc]
    """A `TrainerHook` behind vLLM's calls. Errors are ours, DeltackptError, and what the ``client`` raises."""

    init_info_cls = DeltaTrainerInit

    def __init__(self, init_info: DeltaTrainerInit, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        _check_rank(init_info.rank)
        options = {"model": getattr(source, "_module", None), **init_info.hook}
        where = located(source, self.rank)
        self.hook = TrainerHook(
            lambda: dict(tensors_of(source)), init_info.repository, ref=init_info.ref, locate=where, **options
        )

    @classmethod
    def trainer_init(cls, init_info: DeltaTrainerInit, *, client: Any, source: Any = None) -> DeltaTrainer:
        """Publish the weights, unless they are a published step, and attach the engine to the repository.

        Called on every rank, like the others. Raises UsageError ``engine-form`` without a ``source``,
        ``not-distributed`` for a rank that torch.distributed does not know, and what `TrainerHook` raises.
        """
        if source is None:
            need = "source=, a WeightSource such as ModuleSource(model)"
            raise UsageError("engine-form", where="the trainer for vLLM", have="no weights", need=need)
        made = cls(init_info, client, source)
        try:
            if made.hook.last_step is None:
                made._publish(0)
            if made.is_sender:
                info = {"repository": init_info.repository, "cache": init_info.cache, "ref": init_info.ref}
                client.init_weight_transfer_engine(info)
        except BaseException:
            made.hook.abandon()
            raise
        return made

    def send_weights(self) -> None:
        """Publish the weights as the next step, and have the engine take it; returns when it has.

        On every rank. Raises what the hook raises at all ranks, and at the first what the client raises: the step is
        published then, the engine at the one before, and the next call takes it to the newest.
        """
        self._publish((self.hook.last_step or 0) + 1)
        if not self.is_sender:
            return
        base = self.hook.publisher.base
        assert base is not None, "a step was published"
        step = base.link.step
        self.client.start_weight_update()
        self.client.update_weights({"step": f"{step}-{base.link.id}", "state": base.manifest.state})
        self.client.finish_weight_update(weight_version=str(step))

    def _publish(self, step: int) -> None:
        self.hook.step(step)
        self.hook.flush()

    def shutdown(self) -> None:
        """Publish what is pending, and free everything. The engine keeps its weights."""
        self.hook.close()


def _check_rank(rank: int) -> None:
    import torch.distributed as dist

    here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if rank != here:
        need = f"rank={here}, that of torch.distributed's default group"
        raise UsageError("not-distributed", where="the trainer for vLLM", have=f"rank={rank!r}"[:80], need=need)


def register() -> None:
    """Make the backend known to `WeightTransferTrainerFactory`."""
    if NAME not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(NAME, __name__, DeltaTrainer.__name__)


register()
