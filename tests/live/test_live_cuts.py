"""A link that is cut, and an engine that loses one of its ranks, at every phase: all have the old step or the new."""

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402
from support.live_layouts import expected, nudge_state, same, whole_state  # noqa: E402
from support.live_ranks import end, noted, sharded_trainer, start, waiting_slices  # noqa: E402
from support.relay import Relay  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402

PHASES = ["announce", "move", "prove", "agree", "write"]
LONGEST = 90.0  # seconds of one step, on a machine with other load


class OnPhase:
    """A report that does something as a phase of a step begins, once; and keeps every event."""

    def __init__(self):
        self.events, self.wanted, self.act = [], None, None

    def __call__(self, event):
        self.events.append(event)
        if (event.kind, event.step) == self.wanted:
            self.wanted = None
            self.act()


@pytest.fixture
def made():
    """A list of what is closed at the end, the last one first."""
    found = []
    yield found
    for one in reversed(found):
        one.close()


@pytest.mark.parametrize("side", ["engine", "trainer"])
@pytest.mark.parametrize("how", ["closed", pytest.param("silent", marks=pytest.mark.heavy)])
def test_a_link_that_is_cut_at_every_phase(tmp_path, how, side, made):
    """Of one engine of two; ``side`` sees the phase. The other engine and the trainer go on; when the link is there
    again the engine is in again, and at no time are its weights of anything but the old step or the new one."""
    model, told = make_model(), OnPhase()
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", timeout=8.0, engines=1,
        report=told if side == "trainer" else lambda e: None,
    )  # fmt: skip
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        healthy = Engine(make_model(zeros=True), live.address, engine="healthy")
        hook.step(0)
        healthy.reach(0)
        made.append(relay := Relay(live.address))
        live._delivery.addresses = [relay.place]  # parts come over the link, too
        report = told if side == "engine" else lambda e: None
        far = Engine(make_model(), relay.address, engine="far", report=report, timeout=8.0)
        made += [healthy, far]
        number = 0

        def step():
            nonlocal number
            number += 1
            nudge(model, number)
            began = time.monotonic()
            hook.step(number)
            assert time.monotonic() - began < LONGEST
            for engine in (healthy, far):
                engine.reach(number)  # it has the step live, or by the repository
                assert raw(engine.model) == raw(model)

        def settle():
            """Until the far engine is in again, which the trainer may learn by the step that it misses."""
            for _ in range(8):
                until(lambda: far.receiver is not None and far.receiver.connected)
                step()
                if far.steps[-1].way == "live":
                    return
            raise AssertionError("it is not in again")

        for phase in PHASES if side == "engine" else ["announce", "move", "agree", "write", "live"]:
            settle()
            told.act = lambda: relay.cut(how)
            told.wanted = (phase, number + 1)
            step()
            assert told.wanted is None, phase
            relay.mend()
        settle()
        assert not far.errors


@pytest.mark.parametrize(
    ("how", "phases"),
    [
        (signal.SIGKILL, ["agree", "write"]),
        *(pytest.param(how, PHASES, marks=pytest.mark.heavy) for how in (signal.SIGKILL, signal.SIGSTOP)),
    ],
)
def test_an_engine_loses_one_of_its_ranks(tmp_path, how, phases):
    """Of two ranks with slices one dies, or stands still. The other keeps the step that they had together, unless the
    step was decided; a rank that is started again comes by the repository, and both are in at the next step."""
    state, others = whole_state(), []
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=8.0, load_timeout=60.0, engines=1)
    try:
        with TrainerHook(state, tmp_path / "repo", threads=1, live=live) as hook:
            held = expected("fused", 0, 2, state)
            stays = Engine(held, live.address, engine="e", rank=(0, 2), load=held.load_weights)
            hook.step(0)
            stays.reach(0)
            for number, phase in enumerate(phases, 1):
                path = tmp_path / phase
                others.append(start(waiting_slices, str(path), live.address, "fused", 1, 2, phase, number, how))
                until(lambda path=path: noted(path).get("step") == number - 1)  # noqa: B023
                until(lambda: live.engines == 2)
                nudge_state(state, number)
                began = time.monotonic()
                hook.step(number)
                assert time.monotonic() - began < LONGEST
                stays.reach(number)  # live, or as the repository has it
                assert same(stays.model, expected("fused", 0, 2, state))
                assert stays.steps[-1].way == ("live" if phase == "write" else "store")
                end(others[-1])
                until(lambda: live.engines == 1)
            stays.close()
    finally:
        for one in others:
            end(one)


@pytest.mark.heavy
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_of_the_trainer_dies_beside_the_first(tmp_path, phase, made):
    """The second of two, from which half of the parts come, as an engine comes to a phase: the engine is at the old
    step, or at the new one, and the first rank is told, within the timeouts."""
    outs = [tmp_path / f"trainer-{rank}" for rank in range(2)]
    ranks = [start(sharded_trainer, str(out), str(tmp_path), rank, 2) for rank, out in enumerate(outs)]
    try:
        address = until(lambda: noted(outs[0]).get("address"))
        told, states = OnPhase(), [whole_state(), whole_state()]
        nudge_state(states[1], 1)
        held = expected("fused", 0, 1, {name: torch.zeros_like(t) for name, t in states[0].items()})
        engine = Engine(held, address, load=held.load_weights, report=told, timeout=8.0)
        made.append(engine)
        for out in outs:
            until(lambda out=out: noted(out).get("step") == 0)
        until(lambda: engine.at(0))
        told.act, told.wanted = lambda: os.kill(ranks[1].pid, signal.SIGKILL), (phase, 1)
        (tmp_path / "go").touch()
        until(lambda: told.wanted is None)
        first = until(lambda: noted(outs[0]).get("step") == 1 and noted(outs[0]))
        until(lambda: engine.receiver.step is not None)
        step = engine.receiver.step
        assert same(held, expected("fused", 0, 1, states[step]))
        assert first["live"] == step
        if phase not in ("prove", "agree"):  # then it may have given all that it has to give
            assert step == (phase == "write")
    finally:
        (tmp_path / "end").touch()
        for one in ranks:
            end(one)
