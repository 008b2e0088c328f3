"""A vLLM server in eight bits that follows a training in bf16, over HTTP and in place."""

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors")

from support.vllm_servers import Server, events, serve, stop_all, wait_for  # noqa: E402
from support.vllm_training import Training  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
STEPS = 4


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


@pytest.mark.parametrize(("recipe", "mode"), [("int8-channel", "layers"), ("fp8-channel", "scatter")])
def test_a_quantised_server_follows(tmp_path, recipe, mode):
    """Each step is read back before the engine goes on; after the last it is a server that was started there."""
    run = Training(tmp_path, quantize=recipe)
    server = Server(run, run.checkpoint(0))
    follower = serve(run, [server], "--check")
    seen = []
    try:
        wait_for(server, 0)
        for _ in range(STEPS):
            step = run.step()
            wait_for(server, step)
            seen.append((server.answers(), server.checksums()))
        follower.terminate()
        assert follower.wait(30) == 0
    finally:
        follower.kill()
        server.close()
        run.close()
    said = events(run)
    assert not [e for e in said if e["event"] in ("failed", "wedged", "stale", "warning")]
    taken = [e for e in said if e["event"] == "taken"]
    assert [e["step"] for e in taken] == [*range(STEPS + 1)]
    assert {e["mode"] for e in taken[1:]} == {mode}
    assert len({str(sums) for _, sums in seen}) == STEPS
    fresh = Server(run, run.checkpoint(STEPS))
    try:
        assert (fresh.answers(), fresh.checksums()) == seen[-1]
    finally:
        fresh.close()
