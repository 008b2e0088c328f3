"""A plain AdamW loop, published step by step and compared with full checkpoints saved beside."""

import pytest

torch = pytest.importorskip("torch")

from hooks.training import Ledger, Net, published, train_step  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402


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
