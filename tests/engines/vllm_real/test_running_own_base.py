"""Any release of vLLM, without a cache: the engine is its own base. By the backend where there is one, else by the
worker extension."""

import json

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

import vllm  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.vllm_servers import Server, events, options_of, serve, stop_all  # noqa: E402
from support.vllm_tiny import tiny  # noqa: E402

from deltackpt.engines.vllm.release import release_of  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
RELEASE = release_of(vllm.__version__, "this test")
HOW = options_of(RELEASE)


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


def test_a_server_follows_without_a_cache(tmp_path):
    """Four steps, one of them by a load of the whole checkpoint; then it answers as a fresh one."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0), how=HOW)
    try:
        assert serve(run, [server], "--once", cache=None).wait(240) == 0, events(run)
        for step in (1, 2, 3):
            run.publish(nudge(run.states[step - 1], step, share=0.3))
            more = ["--mode", "reload"] if step == 2 else ["--check"]
            assert serve(run, [server], "--once", *more, cache=None).wait(240) == 0, events(run)
            seen = server.answers()
        taken = [e for e in events(run) if e["event"] == "taken"]
        assert [(e["step"], e["mode"], e["path"]) for e in taken] == [
            (0, "none", "none"), (1, "scatter", "patches"), (2, "reload", "reload"), (3, "scatter", "patches"),
        ]  # fmt: skip
        assert all(e["time"].endswith("Z") for e in events(run))
    finally:
        server.close()
    (tmp_path / "done.json").write_text(json.dumps(str(RELEASE)))
    fresh = Server(run, run.checkpoint(3), how=HOW)
    try:
        assert fresh.answers() == seen
    finally:
        fresh.close()


def test_two_ranks_follow_without_a_cache(tmp_path):
    """Each decodes its share; one step is loaded whole, by both. A fresh engine answers alike."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0), tp=2, how=HOW)
    try:
        for step in (1, 2, 3):
            run.publish(nudge(run.states[step - 1], step, share=0.3))
            more = ["--mode", "reload"] if step == 2 else ["--check"]
            assert serve(run, [server], "--once", *more, cache=None).wait(240) == 0, events(run)
            seen = server.answers()
        taken = [e for e in events(run) if e["event"] == "taken"]
        assert [(e["step"], e["mode"], e["path"]) for e in taken] == [
            (1, "scatter", "shares"), (2, "reload", "reload"), (3, "scatter", "shares"),
        ]  # fmt: skip
    finally:
        server.close()
    fresh = Server(run, run.checkpoint(3), tp=2, how=HOW)
    try:
        assert fresh.answers() == seen
    finally:
        fresh.close()
