"""A session whose trainer signs: what an engine reads by the repository is what somebody vouches for."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("cryptography")

from support.live import TOKEN, Engine, make_model, nudge, raw, until  # noqa: E402
from support.signed import keys_of  # noqa: E402

from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402
from deltackpt.signing.keys import PrivateKey  # noqa: E402
from deltackpt.signing.policy import TrustPolicy  # noqa: E402

KEY = PrivateKey.generate()


@pytest.fixture(autouse=True)
def _own_memory(tmp_path, monkeypatch):
    for name in ("DELTACKPT_TRUST", "DELTACKPT_SIGN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DELTACKPT_TRUST_DIR", str(tmp_path / "memory"))


def trusting(place):
    return Repository.open(place).secure(TrustPolicy(keys_of(KEY)))


def test_an_engine_that_asks_for_signatures(tmp_path):
    """It comes late, catches up by signed steps, and is live; without the trainer it takes none that nobody signed,
    and then the next that is."""
    place, model = tmp_path / "repo", make_model()
    live = Session("127.0.0.1:0", token=TOKEN, mode="sync", timeout=20.0, report=lambda event: None)
    with TrainerHook(model, place, threads=1, live=live, sign=KEY) as hook:
        for step in range(2):
            nudge(model, step)
            hook.step(step)
        engine = Engine(make_model(zeros=True), live.address, repository=trusting(place))
        engine.reach(1)
        assert engine.receiver.received == 0
        until(lambda: live.engines)
        nudge(model, 2)
        hook.step(2)
        engine.reach(2)
        assert [step.way for step in engine.steps] == ["live"]
    until(lambda: not engine.receiver.connected)
    signed = raw(model)
    with TrainerHook(make_model(7), place, threads=1, resume="anchor") as hook:  # who can write to the store
        hook.step(3)
    until(lambda: any("signature-missing" in str(error) for error in (*engine.errors, *engine.events)))
    assert raw(engine.model) == signed
    assert engine.at(2)
    engine.close()
