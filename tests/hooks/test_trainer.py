"""A plain AdamW loop, published step by step and compared with full checkpoints saved beside."""

import pytest

torch = pytest.importorskip("torch")

from support.training import Ledger, Net, published, train_step  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


def test_the_device_path_publishes_the_same_bytes(tmp_path):
    """On a CPU device here: what both publish of the same steps has the same size, state and counts."""
    model = Net(width=320)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    hooks = {
        name: TrainerHook(model, tmp_path / name, dtype=torch.bfloat16, on_device=name == "device", threads=1)
        for name in ("device", "host")
    }
    ledgers = {name: Ledger(tmp_path, tmp_path / name) for name in hooks}
    for step in range(4):
        if step:
            train_step(model, optimizer, step)
        for name, hook in hooks.items():
            hook.step(step)
            ledgers[name].save(step, published(model))
    for name, hook in hooks.items():
        hook.close()
        ledgers[name].check()
    logs = [Repository.open(tmp_path / name).log() for name in hooks]
    for a, b in zip(*logs, strict=True):
        assert a.state == b.state
        assert a.counts == b.counts
        assert [f.size for f in a.patch or ()] == [f.size for f in b.patch or ()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("snapshot", ["device", "host"])
def test_on_a_gpu(tmp_path, snapshot):
    model = Net(width=320).cuda()
    flat = [p for p in model.state_dict().values() if p.is_floating_point()]
    ledger = Ledger(tmp_path, tmp_path / "repo")
    with TrainerHook(model, tmp_path / "repo", snapshot=snapshot) as hook:
        for step in range(4):
            for p in flat:
                hit = torch.rand(p.shape, device="cuda") < 0.02
                p.view(torch.int32).bitwise_xor_(hit.to(torch.int32))
            hook.step(step)
            ledger.save(step, {k: v.cpu() for k, v in published(model, None).items()})
    ledger.check()


@pytest.mark.parametrize("snapshot", ["device", "host", "cache"])
@pytest.mark.parametrize("full", ["wait", "merge"])
def test_every_step_comes_back(tmp_path, snapshot, full):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ledger = Ledger(tmp_path, tmp_path / "repo")
    where = tmp_path / "cache" if snapshot == "cache" else snapshot
    seen = []
    with TrainerHook(
        model, tmp_path / "repo", dtype=torch.bfloat16, snapshot=where, full=full, report=seen.append
    ) as hook:
        hook.step(0)
        ledger.save(0, published(model))
        for step in range(1, 6):
            train_step(model, optimizer, step)
            hook.step(step)
            ledger.save(step, published(model))
    steps = sorted({m.step for m in seen})
    assert steps[-1] == 5
    if full == "wait":
        assert steps == list(range(6))
    ledger.check(steps)
