"""The entry point in vLLM's group `vllm.general_plugins`: called in every process, maybe more than once."""

from __future__ import annotations

import os
from functools import wraps

NAME = "deltackpt"
KEEP_PACKED = "DELTACKPT_KEEP_ONEDNN"


def _register_trainer() -> None:
    """The trainer's side, of releases that have one."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory as Trainers
    except ImportError:
        return
    if NAME not in Trainers._registry:
        Trainers.register_engine(NAME, "deltackpt.engines.vllm.trainer", "DeltaTrainer")


def _leave_unpacked() -> None:
    """Have vLLM pack no small weights for AMX, other than INT8, which is computed by nothing else."""
    import torch

    try:
        from vllm.model_executor.layers import utils
    except ImportError:  # of a release that has it elsewhere, packed weights are refused
        return
    packs = getattr(utils, "check_cpu_sgl_kernel", None)
    if packs is not None and not hasattr(packs, "__wrapped__"):

        @wraps(packs)
        def only_int8(n: int, k: int, dtype: torch.dtype) -> bool:
            return bool(dtype == torch.int8 and packs(n, k, dtype))

        utils.check_cpu_sgl_kernel = only_int8


def register() -> None:
    """Make the backend and the load format known. Nothing else is imported until they are asked for.

    On a CPU, vLLM hands weights to oneDNN in a form that cannot be read back, and that leaves a tied head at old
    weights when they are loaded again; where the CPU has AMX, small ones are packed for kernels of its own. Both are
    switched off, unless DELTACKPT_KEEP_ONEDNN is 1; then updates are refused. INT8 layers, which only oneDNN computes,
    keep what a reload would free (`int8`).
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        import vllm._custom_ops as ops

        from deltackpt.engines.vllm.int8 import keep_scales

        keep_scales(ops)
        if os.environ.get(KEEP_PACKED) != "1":
            ops._supports_onednn = False
            _leave_unpacked()
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory
    except ImportError:  # before vLLM had that API: the worker extension is used instead
        pass
    else:
        if NAME not in Factory._registry:
            Factory.register_engine(NAME, "deltackpt.engines.vllm.transfer", "DeltaTransfer")
    _register_trainer()
    from vllm.model_executor import model_loader

    if NAME not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        from deltackpt.engines.vllm.loader import DeltaLoader

        model_loader.register_model_loader(NAME)(DeltaLoader)
