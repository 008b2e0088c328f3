"""Ranks that die or stand still, at every phase of a step: all engines have a step or none, and training goes on."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402
from support.live_ranks import digest, end, engine, noted, start, trainer, wait_for_member, wait_for_note  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

PHASES = ["announce", "move", "prove", "agree", "write"]
TIMEOUT = 10.0
LONGEST = 90.0  # seconds of one step, on a machine with other load


@pytest.mark.parametrize("carrier", ["tcp", "gloo", "nixl"])
@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.heavy)])
def test_an_engine_rank_is_lost_at_every_phase(tmp_path, how, carrier):
    """One healthy engine, and for each phase another one that dies or stops there, and is woken or started again."""
    if (carrier, how) == ("gloo", signal.SIGSTOP):
        pytest.skip("the same code as with tcp, but for the way of bytes")
    if carrier == "nixl":
        pytest.importorskip("nixl_cu13")
    model, events, victims = make_model(), [], []
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", carrier=carrier, timeout=TIMEOUT, report=events.append, engines=1
    )
    try:
        with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
            healthy = Engine(make_model(zeros=True), live.address, engine="healthy")
            hook.step(0)
            healthy.reach(0)
            for number, phase in enumerate(PHASES, 1):
                path = tmp_path / f"{phase}.json"
                victims.append(start(engine, str(path), live.address, phase, phase, number, how, 0, 1))
                wait_for_member(live, phase)
                nudge(model, number)
                began = time.monotonic()
                hook.step(number)
                assert time.monotonic() - began < LONGEST
                healthy.reach(number)
                assert raw(healthy.model) == raw(model)
                if how == signal.SIGKILL:
                    victims[-1].join(30)
                    assert not victims[-1].is_alive()
                    continue
                found = noted(path)
                assert found["step"] == number - 1  # it stands still before it wrote, or after it said nothing
                os.kill(victims[-1].pid, signal.SIGCONT)
                wait_for_note(path, number)
                assert noted(path)["digest"] == digest(model)
                wait_for_member(live, phase)
                end(victims[-1])
            hook.step(9)  # whoever is left
            healthy.reach(9)
            assert raw(healthy.model) == raw(model)
            healthy.close()
    finally:
        for victim in victims:
            end(victim)
    assert {e.step for e in events if e.kind == "left"} <= {*range(1, 6), 9}
    assert len(Repository.open(tmp_path / "repo").log()) == 7


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["announce", "move", "agree", "write", "live"])
@pytest.mark.parametrize("carrier", ["tcp", "nixl"])
def test_the_trainer_is_lost_at_every_phase(tmp_path, how, phase, carrier):
    """The engine has the old step or the new one, the one that the repository has; a new trainer goes on with it."""
    if carrier == "nixl":
        pytest.importorskip("nixl_cu13")
    out, repo = tmp_path / "trainer.json", tmp_path / "repo"
    first = start(trainer, str(out), str(repo), "127.0.0.1:0", phase, 1, how, 3, carrier)
    try:
        address = until(lambda: noted(out).get("address"))
        receiver = Engine(make_model(zeros=True), address, engine="e", timeout=3.0)
        if how == signal.SIGKILL:
            first.join(60)
            assert not first.is_alive()
        else:
            until(lambda: noted(out).get("step") == 0)
            until(lambda: receiver.receiver is not None and receiver.receiver.step is not None)
            until(lambda: _stopped(first.pid))
        until(lambda: (receiver.receiver is not None and not receiver.receiver.connected) or how == signal.SIGSTOP)
        known = make_model()
        states = [digest(known)]
        nudge(known, 1)
        states.append(digest(known))
        head = until(lambda: Repository.open(repo).head()).link
        until(lambda: how == signal.SIGSTOP or receiver.receiver.step == head.step)
        assert digest(receiver.model) in states
        if how == signal.SIGSTOP:
            os.kill(first.pid, signal.SIGCONT)
            nudge(known, 2)
            until(lambda: receiver.receiver.step == 2)
            assert digest(receiver.model) == digest(known)
        else:
            assert digest(receiver.model) == states[head.step]
            second = start(trainer, str(tmp_path / "second.json"), str(tmp_path / "again"), address, "", 0, 0, 1)
            until(lambda: noted(tmp_path / "second.json").get("step") == -1)
            end(second)
        receiver.close()
    finally:
        end(first)


def _stopped(pid):
    with open(f"/proc/{pid}/stat") as f:  # noqa: PTH123
        return f.read().rpartition(")")[2].split()[0] == "T"
