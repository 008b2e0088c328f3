"""Any release of vLLM, on a card or a CPU: twenty steps of a training are followed while requests are in flight."""

import threading
import time
from contextlib import contextmanager

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

import vllm  # noqa: E402
from support.vllm_servers import ASK, Server, events, options_of, serve, stop_all  # noqa: E402
from support.vllm_tiny import PROMPTS  # noqa: E402
from support.vllm_training import Training  # noqa: E402

from deltackpt.engines.vllm.release import release_of  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
HOW = options_of(release_of(vllm.__version__, "this test"))
STEPS = 20
LONG = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


def taken(run):
    return [e for e in events(run) if e["event"] == "taken"]


class LongRequests(threading.Thread):
    """One request after another. ``across`` counts those that began before an update and ended after it."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.stopped, self.across, self.errors = server, False, 0, []
        self.goes_on, self.asks = threading.Event(), threading.Lock()
        self.goes_on.set()

    def run(self):
        while not self.stopped:
            self.goes_on.wait()
            with self.asks:
                try:
                    before = len(taken(self.server.run))
                    answer = self.server.call("/v1/completions", {**ASK, **LONG})
                    assert answer["usage"]["completion_tokens"] == LONG["max_tokens"]
                    self.across += len(taken(self.server.run)) != before
                except Exception as error:
                    self.errors.append(error)
            time.sleep(0.001)  # whoever waits for the lock gets it

    @contextmanager
    def held(self):
        """None is in flight: on a card an answer's last bits depend on what is computed beside it."""
        self.goes_on.clear()
        with self.asks:
            yield
        self.goes_on.set()

    def close(self):
        self.stopped = True
        self.goes_on.set()
        if self.ident is not None:
            self.join(90)


def wait_until_taken(run, step, seconds=90):
    end = time.monotonic() + seconds
    while step not in {e["step"] for e in taken(run)}:
        assert time.monotonic() < end, f"step {step}: {events(run)[-3:]}"
        time.sleep(0.05)


def loaded_whole(server, run, step):
    """What vLLM answers that has loaded the checkpoint of a step by itself."""
    server.call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(run.checkpoint(step))}})
    server.call("/reset_prefix_cache")
    return server.answers()


def test_twenty_steps_with_requests_in_flight(tmp_path):
    """Answers are those of the same server with each whole checkpoint; after the last step, those of a fresh one."""
    run = Training(tmp_path)
    server = Server(run, run.checkpoint(0), how=HOW, graphs=torch.cuda.is_available())
    follower = serve(run, [server], "--check", cache=None)
    asking, seen = LongRequests(server), {}
    try:
        wait_until_taken(run, 0)
        asking.start()
        for _ in range(STEPS):
            step = run.step()
            wait_until_taken(run, step)
            with asking.held():
                seen[step] = server.answers()
        follower.terminate()
        assert follower.wait(30) == 0
        asking.close()
        assert not asking.errors
        assert asking.across > 0
        for earlier, answers in seen.items():
            assert loaded_whole(server, run, earlier) == answers, earlier
        assert [e["step"] for e in taken(run)] == [0, *seen]
        assert {(e["mode"], e["path"]) for e in taken(run)[1:]} == {("scatter", "patches")}
        assert not [e for e in events(run) if e["event"] in ("failed", "wedged")]
        fresh = Server(run, run.checkpoint(step), how=HOW, graphs=torch.cuda.is_available())
        try:
            assert fresh.answers() == seen[step]
        finally:
            fresh.close()
        pauses = sorted(e["pause"] for e in taken(run)[1:])
        print(f"{asking.across} requests across an update; pauses {pauses[0]} to {pauses[-1]} s")
    finally:
        asking.close()
        follower.kill()
        server.close()
        run.close()
