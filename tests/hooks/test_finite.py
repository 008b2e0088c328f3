"""Weights that are infinite or NaN: counted, or refused; and a state dict that stands still."""

import json
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from support import ranks  # noqa: E402
from support.training import Ledger, Net, published  # noqa: E402

from deltackpt.errors import CheckpointError, UsageError  # noqa: E402
from deltackpt.format.dtypes import DTYPES  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks.finite import count_pieces, count_words  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.torch_views.extract import pieces_of  # noqa: E402
from deltackpt.torch_views.words import NAMES, on_host, words  # noqa: E402

FLOATS = [d for d in NAMES if d.is_floating_point and NAMES[d] != "F4"]


def command(*args):
    program = "from deltackpt_cli.app import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *map(str, args)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_word_of_small_dtypes_is_told_as_torch_tells_it(dtype):
    if dtype.itemsize <= 2:
        every = torch.arange(1 << 8 * dtype.itemsize).to(torch.uint8 if dtype.itemsize == 1 else torch.int16)
        tensor = every.view(dtype)
    else:
        inf = float("inf")
        tensor = torch.tensor([0.0, inf, -inf, float("nan"), -float("nan"), 1e30, -1e-30], dtype=dtype)
    want = int((~torch.isfinite(tensor.double())).sum())
    kind = DTYPES[NAMES[dtype]]
    assert count_words(on_host(words(tensor, kind), kind), kind) == want
    assert sum(count_pieces(pieces_of({"w": tensor}), 1).values()) == want


def spoil(model, *places):
    with torch.no_grad():
        for place in places:
            model.layers[0].weight[0, place] = float("inf") if place else float("nan")


@pytest.mark.parametrize("cached", [False, True])
def test_counted_in_metrics_and_log(tmp_path, cached):
    model, ledger = Net(), Ledger(tmp_path, tmp_path / "repo")
    seen = []

    def step(hook, number):
        hook.step(number)
        hook.flush()
        ledger.save(number, published(model))

    snapshot = tmp_path / "cache" if cached else "device"
    options = {"dtype": torch.bfloat16, "snapshot": snapshot, "threads": 1, "report": seen.append}
    with TrainerHook(model, tmp_path / "repo", **options) as hook:
        step(hook, 0)
        spoil(model, 0, 1, 2)
        step(hook, 1)
        with torch.no_grad():
            model.layers[0].weight[0, 1] = 0.5
        step(hook, 2)
    with TrainerHook(model, tmp_path / "repo", **options) as hook:  # counted anew
        with torch.no_grad():
            model.layers[0].weight[0, 2] = 0.5
        step(hook, 3)
    assert [m.nonfinite for m in seen] == [0, 3, 2, 1]
    assert seen[1].to_log()["deltackpt/nonfinite"] == 3
    ledger.check()
    assert [m.metadata.get("nonfinite") for m in Repository.open(tmp_path / "repo").log()] == [1, 2, 3, None]
    lines = command("log", tmp_path / "repo").splitlines()
    assert "not finite" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == ["1", "2", "3", "0"]
    told = json.loads(command("log", tmp_path / "repo", "--json"))
    assert told["steps"][0]["metadata"] == {"nonfinite": 1}


def test_a_log_of_finite_weights_is_as_it_was(tmp_path):
    with TrainerHook(Net(), tmp_path / "repo", threads=1) as hook:
        hook.step(0)
    assert "finite" not in command("log", tmp_path / "repo")


def test_refused(tmp_path):
    model, ledger = Net(), Ledger(tmp_path, tmp_path / "repo")
    with pytest.raises(UsageError, match="hook-option"):
        TrainerHook(model, tmp_path / "repo", nonfinite="no")
    with TrainerHook(model, tmp_path / "repo", nonfinite="refuse", threads=1) as hook:
        before = model.layers[0].weight.detach().clone()
        for number in range(2):  # the first step, and one that has a patch
            spoil(model, 0)
            with pytest.raises(CheckpointError, match="not-finite") as raised:
                hook.step(number)
            assert "'layers.0.weight'" in raised.value.have
            with torch.no_grad():
                model.layers[0].weight.copy_(before + number)
            hook.step(number)
            ledger.save(number, published(model, None))
    ledger.check([0, 1])


@pytest.mark.heavy
def test_all_ranks_refuse(tmp_path):
    failed = ranks.spawn(2, ranks.one_not_finite, tmp_path)
    assert not any(failed), "\n".join(failed)


def test_a_state_dict_whose_tensors_are_no_longer_the_models(tmp_path):
    model = Net()
    with TrainerHook(model.state_dict(), tmp_path / "repo", threads=1) as hook:
        hook.step(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(1, 4):
                for parameter in model.parameters():
                    parameter.data = parameter.data + 1
                hook.step(step)
                hook.flush()
        with pytest.warns(RuntimeWarning, match="3 steps in a row did not change the state dict"):
            hook.step(4)
        for step in range(5, 9):  # once
            hook.step(step)
    with TrainerHook(Net(), tmp_path / "other", threads=1) as hook:  # a model is asked at each step
        for step in range(6):
            hook.step(step)
            hook.flush()
