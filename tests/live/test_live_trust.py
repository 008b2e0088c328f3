"""Sessions of signed repositories: an engine that asks for signatures takes what the trainer's key announced, alone."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cryptography")

from support.live import TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402
from support.signed import key_of, keys_of  # noqa: E402

from deltackpt.errors import ChainError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, delivery, join  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.signing.policy import TrustPolicy  # noqa: E402

KEY, OTHER = key_of(1), key_of(2)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Nothing that this user remembers of other repositories counts."""
    monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memory"))


def made(**options):
    return Session("127.0.0.1:0", token=TOKEN, **{"mode": "sync", "timeout": 20.0, "report": lambda e: None, **options})


def trusting(tmp_path, *keys, threshold=1):
    repo = Repository.open(tmp_path / "repo")
    return repo.secure(TrustPolicy(keys_of(*keys, threshold=threshold)))


@pytest.mark.parametrize("durable", ["first", "behind"])
def test_signed_steps_go_live_to_who_trusts_the_key(tmp_path, durable):
    model, live = make_model(), made(engines=0, durable=durable)
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        hook.step(0)
        hook.flush()
        engines = [
            Engine(make_model(zeros=True), live.address, engine="careful", repository=trusting(tmp_path, KEY)),
            Engine(make_model(zeros=True), live.address, engine="plain"),
        ]
        until(lambda: live.engines == 2)
        for step in range(1, 4):
            nudge(model, step)
            hook.step(step)
            for e in engines:
                e.reach(step)
                assert raw(e.model) == raw(model)
        for e in engines:
            assert {s.way for s in e.steps} == {"live"}
            assert not e.errors
            e.close()
    repo = trusting(tmp_path, KEY)
    assert repo.load(repo.ref("main").link).state == live.state


def test_the_first_load_of_a_signed_session(tmp_path):
    """No branch is there yet: whoever has the key is known from the reader's own set."""
    model, live = make_model(), made(engines=1)
    Repository.open_or_create(tmp_path / "repo")
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        engine = Engine(make_model(zeros=True), live.address, repository=trusting(tmp_path, KEY))
        hook.step(0)
        engine.reach(0)
        assert [s.way for s in engine.steps] == ["live"]
        assert raw(engine.model) == raw(model)
        engine.close()


def test_the_environment_asks_for_signatures(tmp_path, monkeypatch):
    model, live = make_model(), made()
    keys = tmp_path / "keys"
    from deltackpt.signing.policy import show_keys

    keys.write_text("\n".join(show_keys(keys_of(OTHER))))
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        hook.step(0)
        hook.flush()
        monkeypatch.setenv("DELTACKPT_TRUST", str(keys))
        with pytest.raises(ChainError) as error:
            join(make_model(zeros=True), live.address, token=TOKEN, timeout=20, report=lambda e: None)
        assert error.value.code == "signature-missing"
        monkeypatch.delenv("DELTACKPT_TRUST")


def tampered(monkeypatch, change):
    """The trainer's first rank announces what its signer did not say."""
    real = delivery.signed

    def wrong(step, ref, signer, after=0):
        return change(real(step, ref, signer, after))

    monkeypatch.setattr(delivery, "signed", wrong)


FORGED = {
    "unsigned": lambda step: replace(step, signature=None),
    "another key": lambda step: replace(step, signature=OTHER(b"words")),
    "another time": lambda step: replace(step, time=step.time + 1),
    "other parts": lambda step: replace(
        step, parts=tuple(replace(p, file=replace(p.file, sha256="0" * 64)) for p in step.parts)
    ),
    "an old time": lambda step: replace(step, time=1),
}


@pytest.mark.parametrize("how", FORGED)
def test_what_was_not_signed_is_not_taken_from_a_session(tmp_path, monkeypatch, how):
    """The engine takes the step from the repository, where it is signed; whoever asks for no signature is not held."""
    model, live, events = make_model(), made(), []
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        hook.step(0)
        hook.flush()
        engine = Engine(make_model(zeros=True), live.address, repository=trusting(tmp_path, KEY), report=events.append)
        until(lambda: live.engines == 1)
        tampered(monkeypatch, FORGED[how])
        nudge(model, 1)
        hook.step(1)
        engine.reach(1)
        assert raw(engine.model) == raw(model)
        assert [s.way for s in engine.steps] == ["store"]
        assert any(e.kind == "refused" and "not taken from the session" in e.text for e in events)
        assert engine.receiver.received == 0
        monkeypatch.undo()
        monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memory"))
        until(lambda: live.engines == 1)
        nudge(model, 2)
        hook.step(2)
        engine.reach(2)
        assert raw(engine.model) == raw(model)
        assert engine.steps[-1].way == "live"
        engine.close()


def test_an_announcement_is_not_taken_twice(tmp_path, monkeypatch):
    """Whoever has the token, and not the key, says again what was signed before."""
    model, live, said = make_model(), made(), []
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        tampered(monkeypatch, lambda step: said.append(step) or step)
        hook.step(0)
        hook.flush()
        nudge(model, 1)
        hook.step(1)
        hook.flush()
        engine = Engine(make_model(zeros=True), live.address, repository=trusting(tmp_path, KEY))
        until(lambda: live.engines == 1)
        check = engine.receiver._rank_state._check
        for old in said:
            assert check.why_not(old) == "it was signed before what this rank has"
        engine.close()


def test_a_threshold_of_two_is_not_met_by_the_trainer_alone(tmp_path):
    """The session goes on for others; this engine comes by the repository, once both have signed."""
    model, live = make_model(), made()
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, sign=KEY) as hook:
        hook.step(0)
        hook.flush()
        second = Repository.open(tmp_path / "repo").secure(sign=OTHER)
        head = second.head().link
        second.signer.again("refs/main", head, None)
        engine = Engine(make_model(zeros=True), live.address, repository=trusting(tmp_path, KEY, OTHER, threshold=2))
        until(lambda: live.engines == 1)
        before = raw(model)
        nudge(model, 1)
        hook.step(1)
        hook.flush()
        until(lambda: engine.errors)
        assert engine.errors[0].code == "signature-missing"
        assert raw(engine.model) == before
        second.signer.again("refs/main", second.head().link, head)
        engine.reach(1)
        assert raw(engine.model) == raw(model)
        engine.close()
