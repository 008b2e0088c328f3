"""vLLM's own layers in this process, one rank of it: what tests of single layers and methods begin with."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from support.vllm_servers import free_port


@contextmanager
def one_rank():
    """A configuration that is current, with groups of one rank; other tests of the process may have made them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    made = VllmConfig()
    made.model_config = None
    with set_current_vllm_config(made):
        if not torch.distributed.is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        made.model_config = SimpleNamespace(dtype=torch.bfloat16, is_encoder_decoder=False)
        yield made


class LayersRank:
    """What `VllmRank` does with the layers of a model, without an engine."""

    def __init__(self, model, config):
        from deltackpt.engines.vllm.rank import VllmRank

        self.model, self.config = model, config
        self.shared, self.skipped = frozenset(), {}
        for name in ("as_loaded", "load_layers", "differs", "loose", "_current"):
            setattr(self, name, getattr(VllmRank, name).__get__(self))
