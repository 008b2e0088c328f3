"""Encodings by the rate of the link: plain changes where that is faster, the same bits either way."""

import pytest

torch = pytest.importorskip("torch")

from support.live import TOKEN, Engine, make_model, nudge, raw  # noqa: E402

from deltackpt.errors import UsageError  # noqa: E402
from deltackpt.hooks import TrainerHook  # noqa: E402
from deltackpt.live import Session, delivery  # noqa: E402
from deltackpt.live.link_rate import PLAIN, LinkRate  # noqa: E402
from deltackpt.publish.step import EncodeOptions  # noqa: E402
from deltackpt.repository import Repository  # noqa: E402

AUTO = EncodeOptions("auto", 1)


@pytest.mark.parametrize(("rate", "wanted"), [(1e6, "auto"), (1e8, "auto"), (1e10, PLAIN)])
def test_the_way_that_takes_less_time(rate, wanted):
    """A coder of 20 ns and a byte a change, plain changes of 1 ns and six bytes: they meet at 263 MB/s."""
    link = LinkRate(rate)
    first = link.choose(AUTO)
    assert first == AUTO
    link.saw(first, 1000, 20e-6, 1000)
    second = link.choose(AUTO)
    assert second.encoding == PLAIN  # tried once
    link.saw(second, 1000, 1e-6, 6000)
    assert link.choose(AUTO).encoding == wanted


def test_what_is_measured_moves_on():
    link = LinkRate(1e10)
    link.saw(AUTO, 1000, 20e-6, 1000)
    link.saw(EncodeOptions(PLAIN, 1), 1000, 1e-6, 6000)
    for _ in range(20):
        link.saw(AUTO, 1000, 0.1e-6, 1000)  # another coder
        link.saw(AUTO, 0, 5.0, 0)  # nothing changed: nothing is known
    assert link.choose(AUTO) == AUTO


def test_without_a_rate_all_is_coded():
    link = LinkRate(None)
    link.saw(AUTO, 1000, 1.0, 1000)
    assert link.choose(AUTO) is AUTO


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "fast", True])
def test_rates_that_there_are_not(rate):
    with pytest.raises(UsageError) as error:
        Session("127.0.0.1:0", token=TOKEN).with_rate(rate)
    assert error.value.code == "live-option"


@pytest.mark.parametrize("encoding", ["auto", "packed@4"])
def test_both_ways_bring_the_same_step(tmp_path, monkeypatch, encoding):
    """Step 1 is coded, step 2 plain; the repository has coded parts of the same states."""
    seen, real = [], delivery.encode_changes

    def watched(*given):
        share = real(*given)
        seen.append({*share.encodings})
        return share

    monkeypatch.setattr(delivery, "encode_changes", watched)
    model = make_model()
    live = Session(
        "127.0.0.1:0", token=TOKEN, mode="sync", timeout=30.0, load_timeout=60.0, engines=1,
        report=lambda e: None,
    ).with_rate(1e9)  # fmt: skip
    with TrainerHook(model, tmp_path / "repo", threads=1, live=live, encoding=encoding) as hook:
        engine = Engine(make_model(zeros=True), live.address)
        for step in range(3):
            if step:
                nudge(model, step)
            hook.step(step)
            engine.reach(step)
            assert raw(engine.model) == raw(model)
        assert {s.way for s in engine.steps} == {"live"}
        engine.close()
    assert PLAIN not in seen[0]
    assert PLAIN in seen[1]
    repo = Repository.open(tmp_path / "repo")
    assert repo.load(repo.head().link).state == live.state
