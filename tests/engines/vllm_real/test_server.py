"""A vLLM server and `deltackpt serve-updates`, as processes: followed live, killed at random, asked all the while."""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from support.engine_steps import NEVER, Run, nudge  # noqa: E402
from support.vllm_servers import ASK, STARTED, Server, events, free_port, native, serve, stop_all, wait_for  # noqa: E402
from support.vllm_tiny import PROMPTS, tiny  # noqa: E402
from support.vllm_training import Training  # noqa: E402

from deltackpt.publish.write import write  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ROUNDS, SEED = 10, 7
LONG = {"prompt": PROMPTS[0], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _nothing_runs_on():
    yield
    stop_all()


class Asking(threading.Thread):
    """Requests in flight all the time. ``across`` counts those that began before an update and ended after it."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.stopped, self.across, self.errors = server, threading.Event(), 0, []

    def run(self):
        while not self.stopped.is_set():
            try:
                before = self.server.version()
                answer = self.server.call("/v1/completions", {**ASK, **LONG})
                assert answer["usage"]["completion_tokens"] == LONG["max_tokens"]
                self.across += self.server.version() != before
            except Exception as error:
                self.errors.append(error)

    def close(self):
        self.stopped.set()
        self.join(90)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_training_followed_live_over_http(tmp_path, tp):
    """After each step as a server that vLLM itself brought to the whole checkpoint; after the last, as a fresh one."""
    run = Training(tmp_path)
    server = Server(run, run.checkpoint(0), tp)
    follower = serve(run, [server], *(["--check"] if tp == 2 else []))
    asking = Asking(server)
    seen = {}
    try:
        wait_for(server, 0)
        asking.start()
        for _ in range(20 if tp == 1 else 5):
            step = run.step()
            wait_for(server, step)
            seen[step] = server.answers(), server.checksums()
        follower.terminate()
        assert follower.wait(30) == 0
        asking.close()
        for earlier in seen:
            assert native(server, run, earlier) == seen[earlier], earlier
    finally:
        asking.close()
        follower.kill()
        server.close()
        run.close()
    assert not asking.errors
    assert asking.across > 0
    taken = [e for e in events(run) if e["event"] == "taken"]
    assert [e["step"] for e in taken] == [0, *seen]
    assert {e["mode"] for e in taken[1:]} == {"scatter"}
    assert not [e for e in events(run) if e["event"] in ("failed", "wedged")]
    if tp == 1:  # of two ranks: in process
        fresh = Server(run, run.checkpoint(step))
        try:
            assert (fresh.answers(), fresh.checksums()) == seen[step]
        finally:
            fresh.close()


def test_the_stock_routes(tmp_path):
    """Pause, init, start, update, finish, resume, by hand; and what the follower drops besides."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0))
    try:
        server.answers()  # the prefix cache is warm
        run.publish(nudge(run.states[0], 1, share=0.5))
        init = {"repository": str(run.url), "cache": str(run.root / "cache")}
        server.call("/init_weight_transfer_engine", {"init_info": init})
        server.call("/pause?mode=keep&clear_cache=false")
        server.call("/start_weight_update")
        state = run.repo.load(run.repo.find(1)).state
        server.call("/update_weights", {"update_info": {"step": 1, "state": state}})
        server.call("/finish_weight_update", {"weight_version": "1"})
        server.call("/resume")
        stale = server.answers()
        assert server.version() == "1"
        server.call("/reset_prefix_cache")
        by_hand = server.answers()
        assert stale != by_hand
        run.publish(nudge(run.states[1], 2, share=0.5))
        assert serve(run, [server], "--once").wait(120) == 0
        followed = server.answers(), server.checksums()
        assert native(server, run, 1)[0] == by_hand
        assert native(server, run, 2) == followed
    finally:
        server.close()


class Store:
    """The repository over HTTP, by a process that can be killed. It is written to on the disk."""

    def __init__(self, run):
        self.run, self.port = run, free_port()
        self.url = f"http://127.0.0.1:{self.port}/{run.url.name}"
        self.start()

    def start(self):
        shelf = Path(__file__).parents[2] / "support/vllm_shelf.py"
        line = [sys.executable, str(shelf), str(self.run.root), str(self.port)]
        self.process = subprocess.Popen(line, start_new_session=True)
        STARTED.append(self.process)

    def kill(self):
        self.process.kill()
        self.process.wait()


def test_killed_at_random(tmp_path):
    """The follower, the engine and the store end at any point of an update: the engine is at a whole step, old or new,
    and ends at the latest."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    for step in range(1, ROUNDS + 1):
        run.save(nudge(run.states[step - 1], step))
    server, store, rng = Server(run, run.checkpoint(0)), Store(run), random.Random(SEED)
    whole = {step: native(server, run, step) for step in range(ROUNDS, -1, -1)}
    follower = serve(run, [server], url=store.url)
    known = {json.dumps(sums) for _, sums in whole.values()}
    killed = []
    try:
        wait_for(server, 0)
        for step in range(1, ROUNDS + 1):
            write(run.checkpoint(step), run.url, step=step, threads=1, anchor=NEVER)
            time.sleep(rng.random() * 1.2)
            victim = rng.choice(["follower", "follower", "store"]) if step % 5 else "engine"
            killed.append(victim)
            if victim == "store":
                store.kill()
            elif victim == "engine":
                server.kill()
                server.start()
            else:
                follower.kill()
                follower.wait()
            assert json.dumps(server.checksums()) in known, (step, victim)
            time.sleep(rng.random() * 0.5)
            if victim == "store":
                store.start()
            if follower.poll() is not None:
                follower = serve(run, [server], url=store.url)
        wait_for(server, ROUNDS, 90)
        assert (server.answers(), server.checksums()) == whole[ROUNDS]
        assert {"follower", "store", "engine"} == set(killed)
    finally:
        follower.kill()
        store.kill()
        server.close()


def test_what_goes_wrong_is_said_and_the_engine_goes_on(tmp_path):
    """A repository of another model, of other weights, and patches, anchors and steps that are damaged or gone."""
    run = Run(tmp_path, tmp_path / "side")
    state = tiny(tmp_path / "side")
    run.publish(state)
    others = {}
    for name, odd in (("model", {"some.weight": torch.zeros(4, 4)}), ("weights", nudge(state, 9, 0.5))):
        (tmp_path / name).mkdir()
        others[name] = Run(tmp_path / name, tmp_path / "side")
        others[name].publish(odd)
    server = Server(run, run.checkpoint(0))
    try:
        good = server.answers(), server.checksums()
        for name, words in (("model", "another model"), ("weights", "tensors differ")):
            assert serve(others[name], [server], "--once").wait(120) == 4
            (failed,) = [e for e in events(others[name]) if e["event"] == "failed"]
            assert (failed["error"], words in failed["have"]) == ("engine-refused", True)
            assert (server.answers(), server.checksums()) == good
        assert serve(run, [server], "--once").wait(120) == 0
        run.publish(nudge(state, 1))
        link = run.repo.find(1)
        patch = run.url / run.repo.load(link).patch[0].name
        data = patch.read_bytes()
        manifest = next(run.url.glob("steps/00000001-*"))
        for damage, code, status in (
            (lambda: patch.write_bytes(data[:-3] + bytes([data[-3] ^ 64]) + data[-2:]), "object-hash", 3),
            (patch.unlink, "object-missing", 6),
            (lambda: manifest.rename(manifest.with_suffix(".away")), "object-missing", 6),
        ):
            damage()
            assert serve(run, [server], "--once").wait(120) == status, code
            said = (run.root / "events.jsonl").read_text().partition('"error"')[2]
            assert f'"{code}"' in said
            (run.root / "events.jsonl").unlink()
            assert (server.answers(), server.checksums(), server.version()) == (*good, "0")
            patch.write_bytes(data)
        manifest.with_suffix(".away").rename(manifest)
        (anchor,) = (run.url / "anchors").rglob("*.safetensors")
        anchor.rename(anchor.with_suffix(".away"))
        assert serve(run, [server], "--once", cache="other").wait(120) == 6  # one who has nothing needs the anchor
        assert (server.answers(), server.checksums(), server.version()) == (*good, "0")
        assert serve(run, [server], "--once").wait(120) == 0  # one who has step 0 does not
        assert (server.version(), server.answers() != good[0]) == ("1", True)
    finally:
        server.close()


KILLED = """
import os
from deltackpt.engines.vllm.client import VllmClient
called = VllmClient.{method}
def dies(self, *args):
    {call}
    os.kill(os.getpid(), 9)
VllmClient.{method} = dies"""


def paused(server):
    return server.call("/is_paused", method="GET")["is_paused"]


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_an_updater_that_is_killed_does_not_leave_its_engine_paused(tmp_path):
    """Nobody starts another: what was not written is resumed, and what was, but is not final, is not."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0))
    try:
        assert serve(run, [server], "--once").wait(120) == 0
        old = server.answers(), server.checksums()
        run.publish(nudge(run.states[0], 1, share=0.5))
        whole = {}
        # killed before it writes: the engine answers again by itself, from its old step
        dies = KILLED.format(method="apply", call="pass")
        assert serve(run, [server], "--once", before=dies).wait(120) == -9
        assert paused(server)
        until(lambda: not paused(server))
        assert (server.answers(), server.checksums(), server.version()) == (*old, "0")
        # killed when it has written: its caches are of old weights, and it waits for another updater
        dies = KILLED.format(method="drop_cache", call="pass")
        assert serve(run, [server], "--once", before=dies).wait(120) == -9
        whole["written"] = server.checksums()
        assert whole["written"] != old[1]
        time.sleep(3)
        assert paused(server)
        assert serve(run, [server], "--once").wait(120) == 0
        assert (paused(server), server.version()) == (False, "1")
        followed = server.answers(), server.checksums()
        # killed when the update is final, and the engine not yet resumed
        run.publish(nudge(run.states[1], 2, share=0.5))
        dies = KILLED.format(method="resume", call="pass")
        assert serve(run, [server], "--once", before=dies).wait(120) == -9
        until(lambda: not paused(server))
        assert server.version() == "2"
        newest = server.answers(), server.checksums()
        assert native(server, run, 1) == followed
        assert native(server, run, 2) == newest
    finally:
        server.close()


ENDED = """
import os, signal
from deltackpt.engines.vllm.client import VllmClient
called = VllmClient.{method}
def ends(self, *args):
    {call}
    for number in {signals}:
        os.kill(os.getpid(), number)
VllmClient.{method} = ends"""


def test_however_an_updater_ends_in_a_pause_its_engine_goes_on(tmp_path):
    """With a cache, or with a folder for reports that its exit removes; once, twice, or by force."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0))
    hard, twice, once = "[9]", "[2, 2]", "[1]"
    try:
        assert serve(run, [server], "--once").wait(120) == 0
        old = server.answers(), server.checksums()
        run.publish(nudge(run.states[0], 1, share=0.5))
        for signals, cache in ((hard, "cache"), (hard, None), (hard, "cache"), (twice, "cache"), (twice, None)):
            ends = ENDED.format(method="pause", call="called(self, *args)", signals=signals)
            status = serve(run, [server], "--once", before=ends, cache=cache).wait(120)
            assert status == (-9 if signals == hard else 0)
            until(lambda: not paused(server))
            assert (server.answers(), server.checksums(), server.version()) == (*old, "0"), (signals, cache)
        # one that has begun to write: the engine's log says for what it waits
        ends = ENDED.format(method="drop_cache", call="pass", signals=hard)
        assert serve(run, [server], "--once", before=ends).wait(120) == -9
        until(lambda: "until another serve-updates is started" in Path(server.log.name).read_text())
        assert paused(server)
        # a terminal that is closed: what is under way is brought to its end
        ends = ENDED.format(method="pause", call="called(self, *args)", signals=once)
        run.publish(nudge(run.states[1], 2, share=0.5))
        assert serve(run, [server], before=ends).wait(120) == 0
        assert (paused(server), server.version()) == (False, "2")
    finally:
        server.close()


def test_an_engine_at_the_step_is_not_paused_at_a_start(tmp_path):
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0))
    asking = Asking(server)
    try:
        assert serve(run, [server], "--once").wait(120) == 0
        never = "from deltackpt.engines.vllm.client import VllmClient\nVllmClient.pause = None"
        asking.start()
        for _ in range(2):
            assert serve(run, [server], "--once", before=never).wait(120) == 0
        server.call("/pause?mode=keep&clear_cache=false")  # one that another process left paused is resumed
        assert serve(run, [server], "--once", before=never).wait(120) == 0
        assert not paused(server)
        asking.close()
        assert not asking.errors
        taken = [e for e in events(run) if e["event"] == "taken"]
        assert [(e["mode"], e["pause"]) for e in taken[1:]] == [("none", 0.0)] * 3
    finally:
        asking.close()
        server.close()


def test_two_engines_together(tmp_path):
    """One of them cannot take the step: neither does. Later both do."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    a, b = Server(run, run.checkpoint(0), ready=False), Server(run, run.checkpoint(0), core=1, ready=False)
    try:
        a.ready()
        b.ready()
        first = serve(run, [a, b], "--together", "--once")
        assert first.wait(120) == 0
        assert (a.version(), b.version()) == ("0", "0")
        b.kill()
        run.publish(nudge(run.states[0], 1))
        assert serve(run, [a, b], "--together", "--once").wait(120) == 4
        assert a.version() == "0"
        b.start()
        assert serve(run, [a, b], "--together", "--once").wait(120) == 0
        assert (a.version(), b.version()) == ("1", "1")
        assert a.answers() == b.answers()
        assert a.checksums() == b.checksums()
    finally:
        a.close()
        b.close()
