"""A trainer written for vLLM, whose engines are Ray actors: vLLM's own Ray client, a real Ray, real engines."""

import os
import secrets
import shutil
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ray = pytest.importorskip("ray")
torch = pytest.importorskip("torch")
clients = pytest.importorskip("vllm.distributed.weight_transfer.clients", reason="a release without a trainer's side")

from support.vllm_actor import Actor  # noqa: E402
from support.vllm_tiny import of_fresh, tiny  # noqa: E402

from deltackpt.repository import Repository  # noqa: E402
from deltackpt.restore.materialize import apply  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Ray on loopback, of which nothing is left."""
    tests = str(Path(__file__).parents[2])
    path = os.pathsep.join([tests, str(Path(tests).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # so that none is left in the home directory
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it holds sockets
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1",
        _temp_dir=folder, runtime_env={"env_vars": {**_inherited(), "PYTHONPATH": path}},
    )  # fmt: skip
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def _inherited():
    return {name: value for name, value in os.environ.items() if name.startswith(("VLLM_", "HF_", "DO_NOT"))}


def nudge(model, step):
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator) * 0.02
            p.add_((noise * (torch.rand(p.shape, generator=generator) < 0.05)).to(p.dtype))


def test_two_actors_take_every_step_by_the_ray_client(tmp_path, cluster):
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from deltackpt.engines.vllm.trainer import DeltaTrainerInit

    tiny(tmp_path / "start")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", torch_dtype=torch.bfloat16)
    made = ray.remote(num_cpus=0)(Actor)
    actors = [made.remote(str(tmp_path / "start")) for _ in range(2)]
    client = clients.RayVLLMWeightSyncClient(actors)
    info = DeltaTrainerInit(str(tmp_path / "repo"), rank=0, hook={"threads": 1})
    sending = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    seen = []
    for step in (1, 2):
        nudge(model, step)
        sending.send_weights()
        assert ray.get([a.version.remote() for a in actors]) == [str(step)] * 2
        states = ray.get([a.state.remote() for a in actors])
        assert states[0] == states[1]
        seen.append(states[0])
    ray.get(actors[1].spoil.remote())
    nudge(model, 3)
    sending.send_weights()  # whoever holds other bits loads the whole step
    states = ray.get([a.state.remote() for a in actors])
    assert states[0] == states[1]
    seen.append(states[0])
    ray.kill(actors[1])
    nudge(model, 4)
    with pytest.raises(ray.exceptions.RayActorError):
        sending.send_weights()
    assert sending.hook.last_step == 4  # it is published all the same
    sending.shutdown()
    ray.kill(actors[0])
    assert len({str(s) for s in seen}) == 3
    saved = tmp_path / "saved"
    repo = Repository.open(tmp_path / "repo")
    apply(repo, saved, step=3)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if not (saved / name).exists():
            (saved / name).write_bytes((tmp_path / "start" / name).read_bytes())
    assert of_fresh(saved) == seen[-1]
