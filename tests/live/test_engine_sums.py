"""An engine's ranks add up their sums by `all_reduce`: one proof for the trainer, copies compared, nobody waits."""

import threading

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, until  # noqa: E402
from support.live_engine_sums import grouped_slices, ranks_that_add_up, ranks_that_fail  # noqa: E402
from support.live_layouts import expected, nudge_state, whole_state  # noqa: E402
from support.live_ranks import digest, noted  # noqa: E402
from support.ranks import spawn  # noqa: E402

from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, round  # noqa: E402
from deltackpt.live.engine_sums import EngineSums  # noqa: E402


def test_each_cell_counts_once_and_copies_are_compared(tmp_path):
    assert spawn(4, ranks_that_add_up, tmp_path) == [""] * 4


@pytest.mark.parametrize("group", [None, "ranks", 7])
def test_what_is_no_group(group):
    with pytest.raises(UsageError) as error:
        EngineSums(group, 2, 1.0, {})
    assert error.value.code == "live-option"


@pytest.mark.heavy
def test_who_is_not_ready_and_who_does_not_come(tmp_path):
    assert spawn(3, ranks_that_fail, tmp_path) == [""] * 3


@pytest.mark.heavy
@pytest.mark.parametrize("layout", ["fused", "pipeline"])
def test_a_session_hears_one_proof(tmp_path, monkeypatch, layout):
    """Four ranks, every step live and exact; the trainer is sent the first one's proof alone."""
    heard, real = [], round.Round._add_up

    def watched(self, ranks, tensors):
        heard.append({member.rank: len(self._proofs[member]) for member in ranks})
        return real(self, ranks, tensors)

    monkeypatch.setattr(round.Round, "_add_up", watched)
    state, failed = whole_state(), []
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=90.0, load_timeout=90.0, engines=4)
    with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
        ranks = threading.Thread(
            target=lambda: failed.extend(spawn(4, grouped_slices, tmp_path, live.address, layout, 3)), daemon=True
        )
        ranks.start()
        for step in range(3):
            if step:
                nudge_state(state, step)
            hook.step(step)
            for rank in range(4):
                found = until(lambda rank=rank, step=step: noted(tmp_path / f"sums-{rank}-{step}"))
                assert found["way"] == "live"
                assert found["digest"] == digest(expected(layout, rank, 4, state))
        ranks.join(60)
    assert failed == [""] * 4
    assert len(heard) == 3
    for proofs in heard:
        assert proofs[0] > 0
        assert proofs[1] == proofs[2] == proofs[3] == 0
