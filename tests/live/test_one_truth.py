"""What went live is what the repository publishes; who comes late or falls out catches up by it."""

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402

from deltackpt.errors import StoreError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.hooks import live as live_hook  # noqa: E402
from deltackpt.hooks.pending import CapturedStep, Pending  # noqa: E402
from deltackpt.live import Session, session  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402


def made(**options):
    return Session("127.0.0.1:0", token=TOKEN, **{"mode": "sync", "timeout": 20.0, "report": lambda e: None, **options})


def failing(hook, times=1):
    """The next puts of parts fail."""
    put, left = hook.repo.store.put, [times]

    def fails(name, chunks):
        if left[0] and name.startswith("patches/"):
            left[0] -= 1
            raise StoreError("store-io", where=name, have="no answer", need="an answer")
        return put(name, chunks)

    hook.repo.store.put = fails


def test_the_parts_are_those_of_the_repository(tmp_path, monkeypatch):
    offered, put = {}, session.PartsInMemory.put

    def watched(self, name, part):
        file = put(self, name, part)
        offered[file.sha256] = file.size
        return file

    monkeypatch.setattr(session.PartsInMemory, "put", watched)
    model, live = make_model(), made(engines=1)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        for step in range(3):
            nudge(model, step)
            hook.step(step)
        engine.reach(2)
        engine.close()
    parts = {f.sha256: f.size for m in Repository.open(tmp_path / "repo").log() for f in m.patch or ()}
    assert len(parts) == 2
    assert parts.items() <= offered.items()


def test_a_publish_begins_when_engines_that_do_not_wait_for_it_have_the_step(tmp_path, monkeypatch):
    """Both at once would hold each other up in one interpreter."""
    monkeypatch.setattr(live_hook, "PATIENCE", 100.0)
    model, live, had = make_model(), made(engines=1, durable="behind"), []
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        publish = hook.publisher.publish
        monkeypatch.setattr(hook.publisher, "publish", lambda item: had.append((item.step, live.step)) or publish(item))
        engine = Engine(make_model(zeros=True), live.address)
        for step in range(3):
            nudge(model, step)
            hook.step(step)
            hook.flush()
        engine.reach(2)
        engine.close()
    assert had == [(0, 0), (1, 1), (2, 2)]


def test_a_publish_does_not_wait_long_for_the_session(tmp_path):
    queue = Pending(4)
    assert not queue.wait_passed(1, 0.01)  # it was not put
    for step in (1, 2):
        queue.put(CapturedStep(step, {}))
    queue.begin()
    assert not queue.wait_passed(1, 0.01)  # it stands
    queue.done(None)
    assert queue.wait_passed(1, 0.0)
    assert not queue.wait_passed(2, 0.01)
    queue.begin()
    queue.done(StoreError("live-lost", where="here", have="nobody", need="somebody"))
    assert queue.wait_passed(2, 0.0)  # nothing waits for what failed


def test_a_step_that_is_not_durable_does_not_go_live(tmp_path):
    model, live, events = make_model(), None, []
    live = made(engines=1, report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, errors="carry", live=live) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        hook.step(0)
        engine.reach(0)
        hook.flush()
        failing(hook)
        before = raw(engine.model)
        nudge(model, 1)
        hook.step(1)
        assert raw(engine.model) == before
        assert live.step == 0
        assert [e.text for e in events if e.kind == "not-live"] == ["live-not-durable"]
        nudge(model, 2)
        hook.step(2)
        engine.reach(2)
        assert raw(engine.model) == raw(model)
        assert {s.way for s in engine.steps} == {"live"}
        engine.close()
    assert [m.step for m in Repository.open(tmp_path / "repo").log()] == [2, 0]


def test_a_step_that_is_live_and_not_durable_is_told(tmp_path):
    model, events = make_model(), []
    live = made(engines=1, durable="behind", report=events.append)
    with TrainerHook(model, tmp_path / "repo", threads=1, errors="carry", live=live) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        hook.step(0)
        hook.flush()
        failing(hook)
        nudge(model, 1)
        hook.step(1)
        engine.reach(1)
        assert raw(engine.model) == raw(model)
        told = until(lambda: [e for e in events if e.kind == "ahead"])
        assert told[0].step == 1
        assert "store-io" in told[0].text
        assert live.published.step == 0
        nudge(model, 2)
        hook.step(2)
        engine.reach(2)
        engine.close()
    repo = Repository.open(tmp_path / "repo")
    assert [m.step for m in repo.log()] == [2, 0]
    assert repo.load(repo.head().link).state == live.state


@pytest.mark.parametrize("zeros", [True, False])
def test_a_late_engine_catches_up_by_the_repository(tmp_path, zeros):
    model, live = make_model(), made()
    start = make_model()
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        for step in range(3):
            if step:
                nudge(model, step)
            hook.step(step)
        engine = Engine(make_model(zeros=True) if zeros else start, live.address)
        engine.reach(2)
        assert raw(engine.model) == raw(model)
        assert engine.receiver.received == 0
        until(lambda: live.engines)
        nudge(model, 3)
        hook.step(3)
        engine.reach(3)
        assert raw(engine.model) == raw(model)
        assert [s.way for s in engine.steps] == ["live"]
        engine.close()


def test_a_resumed_trainer_s_session_goes_on(tmp_path):
    model = make_model()
    with TrainerHook(model, tmp_path / "repo", threads=1) as hook:
        hook.step(0)
    live = made()
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        assert live.step == 0
        engine = Engine(make_model(), live.address)
        until(lambda: live.engines)
        nudge(model, 1)
        hook.step(1)
        engine.reach(1)
        assert raw(engine.model) == raw(model)
        engine.close()


def test_engines_go_on_by_the_repository_without_the_trainer(tmp_path):
    model, live = make_model(), made(engines=1)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        hook.step(0)
        engine.reach(0)
    until(lambda: not engine.receiver.connected)
    assert engine.receiver.why
    with TrainerHook(model, tmp_path / "repo", threads=1) as hook:
        nudge(model, 1)
        hook.step(1)
    engine.reach(1)
    assert raw(engine.model) == raw(model)
    assert engine.steps[-1].way == "store"
    again = Session(live.address, token=TOKEN, mode="sync", timeout=20.0, report=lambda e: None)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=again) as hook:
        until(lambda: again.engines)
        nudge(model, 2)
        hook.step(2)
        engine.reach(2)
        assert raw(engine.model) == raw(model)
    assert engine.steps[-1].way == "live"
    engine.close()
