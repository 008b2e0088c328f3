"""Ranks of a real vLLM in a live session: they come late by the store, take steps, and hold what a fresh one does."""

import threading

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.live import TOKEN  # noqa: E402
from support.vllm_tiny import answers, checksums, close, engine, of_fresh, tiny  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
WORKER = "deltackpt.live.vllm.LiveWorker"


def nudge(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator) * 0.02
            p.add_((noise * (torch.rand(p.shape, generator=generator) < 0.05)).to(p.dtype))


def left_behind(worker):
    """On the last rank: a layer computes with what a reload has left behind, as `retied` finds it."""
    from deltackpt.engines.vllm import retied

    if worker.rank == worker.parallel_config.world_size - 1:
        retied._LOOSE.add(worker.model_runner.get_model().model.layers[0])


def take(llm, hook, step):
    """A step of the trainer, while the engine asks for steps. -> what each rank said of it."""
    failed = []

    def train():
        try:
            hook.step(step)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    found = None
    for _ in range(200):
        found = llm.collective_rpc("deltackpt_receive", kwargs={"timeout": 0.5})
        if all(one["step"] == step for one in found) or failed:
            break
    thread.join(120)
    assert not failed, failed
    return found


@pytest.mark.parametrize(("tp", "carrier"), [(1, "gloo"), (2, "tcp")])
def test_ranks_of_a_real_engine_take_steps(tmp_path, tp, carrier, monkeypatch):
    from transformers import AutoModelForCausalLM

    if tp > 1:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(r % 2) for r in range(tp)))
    tiny(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", torch_dtype=torch.bfloat16)
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", carrier=carrier, timeout=60.0, load_timeout=120.0,
        report=lambda event: None,
    )  # fmt: skip
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        for step in range(2):  # before there is an engine
            nudge(model, step)
            hook.step(step)
        llm = engine(tmp_path / "start", tp=tp, worker_extension_cls=WORKER)
        try:
            wrong = llm.collective_rpc("deltackpt_join", args=(live.address, "not the token of this one"))
            assert [one["error"]["error"] for one in wrong] == ["live-token"] * tp
            unjoined = llm.collective_rpc("deltackpt_receive")
            assert [one["error"]["error"] for one in unjoined] == ["engine-unattached"] * tp
            joined = llm.collective_rpc("deltackpt_join", args=(live.address, TOKEN))
            assert [(one["step"], one["error"], one["agreed"]) for one in joined] == [(1, None, True)] * tp, joined
            assert joined[0]["state"] == live.state  # by the store
            for step in (2, 3):
                nudge(model, step)
                found = take(llm, hook, step)
                assert [(one["step"], one["way"], one["error"]) for one in found] == [(step, "live", None)] * tp, found
                assert {one["state"] for one in found} == {live.state}
            llm.reset_prefix_cache()
            seen = answers(llm), checksums(llm)
            assert llm.collective_rpc(left_behind) == [None] * tp
            refused = llm.collective_rpc("deltackpt_receive")  # by every rank, whichever has the layer
            assert [one["error"]["error"] for one in refused] == ["weights-packed"] * tp
            llm.collective_rpc("deltackpt_leave")
        finally:
            close(llm)
    model.save_pretrained(tmp_path / "saved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "saved" / name).write_bytes((tmp_path / "start" / name).read_bytes())
    assert of_fresh(tmp_path / "saved", tp=tp) == seen
