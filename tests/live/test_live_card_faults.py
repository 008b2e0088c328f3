"""Engines on cards that die or stand still, at every phase: the others have the step, and training goes on.

With three cards or more all are real ones, with two the engine that dies is the only one; without any NCCL is Gloo.
"""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from support.live_card import card, card_engine, real_cards, stand_in  # noqa: E402 isort:skip

pytest.importorskip("triton")  # after its mode is set, in the line above

from support.live import TOKEN, make_model, nudge, until  # noqa: E402
from support.live_ranks import digest, end, noted, start, wait_for_member, wait_for_note  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402

PHASES = ["announce", "move", "prove", "agree", "write"]
LONGEST = 90.0  # seconds of one step, on a machine with other load

pytestmark = [pytest.mark.heavy, pytest.mark.skipif(real_cards() == 1, reason="needs two cards, or none")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rate", [None, 1e12])
@pytest.mark.parametrize("how", [signal.SIGKILL])
def test_an_engine_on_a_card_is_lost_at_every_phase(tmp_path, monkeypatch, how, rate):
    if not real_cards():
        stand_in(monkeypatch.setattr, monkeypatch.setitem)
    host, events, started = make_model(), [], []
    model = make_model().to(card(0))
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", carrier="nccl", timeout=15.0, load_timeout=120.0, engines=1,
        report=events.append,
    )  # fmt: skip
    if rate is not None:
        live.with_rate(rate)
    alone = real_cards() == 2
    try:
        with TrainerHook(model, tmp_path / "repo", threads=1, live=live, encoding="packed", on_device=True) as hook:
            if not alone:
                started.append(start(card_engine, str(tmp_path / "healthy"), live.address, "healthy", "", 0, 0, 1))
                wait_for_member(live, "healthy")
            else:
                live.options = live.options.__class__(**{**vars(live.options), "engines": 0})
            hook.step(0)
            for number, phase in enumerate(PHASES, 1):
                path = tmp_path / phase
                started.append(start(card_engine, str(path), live.address, phase, phase, number, how, 2))
                wait_for_member(live, phase)
                nudge(host, number)
                model.load_state_dict(host.state_dict())
                began = time.monotonic()
                hook.step(number)
                assert time.monotonic() - began < LONGEST
                if not alone:
                    wait_for_note(tmp_path / "healthy", number)
                    assert noted(tmp_path / "healthy")["digest"] == digest(host)
                    assert noted(tmp_path / "healthy")["way"] == "live"
                if how == signal.SIGSTOP:
                    pid = started[-1].pid  # one that was let go before the phase does not come to it
                    until(lambda pid=pid, path=path, n=number: stopped(pid) or noted(path).get("step") == n)
                    os.kill(started[-1].pid, signal.SIGCONT)
                    wait_for_note(path, number)  # it comes back, by the repository
                    assert noted(path)["digest"] == digest(host)
                end(started[-1])
    finally:
        for process in started:
            end(process)


def stopped(pid):
    with open(f"/proc/{pid}/stat") as f:  # noqa: PTH123
        return f.read().rpartition(")")[2].split()[0] == "T"
