"""vLLM's own trainer interface, with its real classes, against a real engine in this process."""

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.vllm_tiny import answers, close, engine, of_fresh, tiny  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="a release without a trainer's side")


class Client:
    """As `HTTPVLLMWeightSyncClient`, for an engine in this process."""

    def __init__(self, llm):
        self.llm = llm

    def init_weight_transfer_engine(self, init_info):
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        self.llm.start_weight_update()

    def update_weights(self, update_info):
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.llm.finish_weight_update(weight_version)


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "own base"])
def test_a_trainer_written_for_vllm_switches_by_one_name(tmp_path, cached):
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from deltackpt.engines.vllm.trainer import DeltaTrainerInit

    tiny(tmp_path / "start")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", torch_dtype=torch.bfloat16)
    llm = engine(tmp_path / "start")
    info = DeltaTrainerInit(
        str(tmp_path / "repo"), cache=str(tmp_path / "cache") if cached else None, rank=0, hook={"threads": 1}
    )
    sending = WeightTransferTrainerFactory.trainer_init(info, client=Client(llm), source=ModuleSource(model))
    seen = {}
    for step in range(1, 4):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=generator) * 0.02
                p.add_((noise * (torch.rand(p.shape, generator=generator) < 0.05)).to(p.dtype))
        sending.send_weights()
        assert llm.get_weight_version() == str(step)
        llm.reset_prefix_cache()
        seen[step] = answers(llm)
        model.save_pretrained(tmp_path / f"saved-{step}")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / f"saved-{step}" / name).write_bytes((tmp_path / "start" / name).read_bytes())
    sending.shutdown()
    close(llm)
    assert len({str(answer) for answer in seen.values()}) == 3
    for step in (1, 3):
        assert of_fresh(tmp_path / f"saved-{step}")[0] == seen[step]
