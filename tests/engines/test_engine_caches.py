"""What an engine keeps beside its weights, over vLLM's routes: caches, drafts, sleep, keys, and ways that fail."""

import importlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from deltackpt_cli.app import run as command  # noqa: E402
from support.engine_steps import Run, nudge  # noqa: E402
from support.fake_vllm import FakeServer, installed  # noqa: E402
from support.fake_vllm_ranks import NEWEST, TABLE, VLLM, first_state, started  # noqa: E402

from deltackpt.engines.clients import ClientOptions, client_of  # noqa: E402
from deltackpt.engines.clients.http import Http, on_loopback  # noqa: E402
from deltackpt.engines.serve_updates import ServeOptions, open_serving  # noqa: E402
from deltackpt.errors import ChainError, StoreError, UsageError  # noqa: E402

SECRET = "sk-very-secret"


class Followed:
    """One server of the newest release, its rank and model, and what follows it."""

    def __init__(self, root, cache=None, **config):
        self.run, self.events = Run(root), []
        self.run.publish(first_state())
        self.rank, self.model = started(self.run, NEWEST, **config)
        self.server = FakeServer(NEWEST, TABLE[NEWEST], self.rank)
        options, specs = ServeOptions(timeout=60, threads=1), [f"vllm={self.server.url}"]
        self.serving = open_serving(self.run.url, cache, specs, lambda e, f: self.events.append((e, f)), options)

    def step(self, share=0.2):
        step = max(self.run.states) + 1
        self.run.publish(nudge(self.run.states[step - 1], step, share))

    def look(self):
        self.serving.update_cache()
        return self.serving.update_engines()

    def told(self, kind):
        return [fields for event, fields in self.events if event == kind]

    def holds(self, step):
        return self.model.is_step(self.run.states[step])


@pytest.fixture
def followed(tmp_path):
    made = []

    def make(**options):
        made.append(Followed(tmp_path, **options))
        return made[-1]

    with installed(NEWEST, TABLE[NEWEST]):
        yield make
        for one in made:
            one.server.close()


def test_every_cache_is_dropped_while_the_engine_is_paused(followed):
    one = followed()
    one.look()
    one.step()
    one.server.calls.clear()
    assert one.look()
    calls = [call.partition("?")[0] for call in one.server.calls]
    order = ["/pause", "/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache", "/resume"]
    assert [call for call in calls if call in order] == order
    (prefix,) = [call for call in one.server.calls if call.startswith("/reset_prefix_cache")]
    assert {*prefix.partition("?")[2].split("&")} == {"reset_running_requests=true", "reset_external=true"}


@pytest.mark.parametrize("route", ["/reset_prefix_cache", "/reset_encoder_cache", "/reset_mm_cache"])
def test_a_cache_that_stays_takes_the_step_back(followed, route):
    one = followed()
    one.look()
    one.step()
    one.server.refuses.add(route)
    assert not one.look()
    assert one.holds(0)
    assert (one.server.weight_version, one.server.paused) == ("0", False)
    assert one.look()
    assert one.holds(1)


def test_blocks_that_a_transfer_still_holds_are_waited_for(followed):
    one = followed()
    one.look()
    one.step()
    one.server.stays = 3
    assert one.look()
    assert one.holds(1)
    assert not one.told("failed")


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", None, "ngram", "ngram_gpu", "suffix"])
def test_drafts_that_stay_old_are_told_once(followed, method):
    one = followed(speculative_config=SimpleNamespace(method=method))
    for _ in range(2):
        assert one.look()
        one.step()
    told = one.told("stale")
    if method is not None and method.startswith(("ngram", "suffix")):
        assert not told
    else:
        assert [t["step"] for t in told] == [0]
        assert "draft model" in told[0]["what"]
        assert one.events[0][0] == "stale"


def test_an_engine_asleep_is_waited_for(followed):
    """vLLM says that it is asleep, or only its ranks know: it says the same of one that is paused."""
    sleep = importlib.import_module(f"{VLLM}.sleep").STATE
    one = followed()
    one.look()
    one.step()
    one.server.asleep = True
    assert not one.look()
    one.server.asleep, one.server.paused, sleep.asleep = False, True, True
    assert not one.look()
    assert [t["error"] for t in one.told("failed")] == ["engine-asleep"]  # told once
    assert one.holds(0)
    one.server.paused = sleep.asleep = False
    assert one.look()
    assert one.holds(1)
    assert [t["step"] for t in one.told("taken")] == [0, 1]


def test_workers_say_when_they_sleep(followed):
    one = followed()
    one.look()
    module = importlib.import_module(f"{VLLM}.sleep")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker()
    module.watch_sleep(type(worker))
    seen = []
    for call in (
        lambda: worker.sleep(), lambda: worker.wake_up(tags=["kv_cache"]), lambda: worker.wake_up(["weights"]),
        lambda: worker.sleep(level=0), lambda: worker.sleep(2), lambda: worker.wake_up(),
    ):  # fmt: skip
        call()
        seen.append((module.STATE.asleep, module.STATE.times))
    assert seen == [(True, 1), (True, 1), (False, 1), (False, 1), (True, 2), (False, 2)]


@pytest.mark.parametrize("cached", [True, False], ids=["cache", "own base"])
def test_after_a_wake_up_all_weights_are_proven_first(tmp_path, followed, cached):
    """A step that leaves a tensor alone never looks at it; other weights in it are seen, and the whole step loaded."""
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker()
    one = followed(cache=tmp_path / "cache" if cached else None)
    one.look()
    worker.sleep()
    worker.wake_up()
    one.step()
    assert one.look()
    assert (one.holds(1), one.told("taken")[-1]["mode"]) == (True, "scatter")  # what came back is what it was
    worker.sleep(2)
    one.model.head.data.zero_()
    worker.wake_up()
    state = dict(one.run.states[1])
    one.run.publish({**nudge(state, 7, 0.2), "head": state["head"]})
    assert one.look()
    assert one.holds(2)
    taken, (warning,) = one.told("taken")[-1], one.told("warning")
    assert (taken["mode"], taken["path"]) == ("reload", "reload")
    assert (warning["expected"], warning["path"]) == ("journal" if cached else "patches", "reload")
    assert "slept" in warning["reason"]
    one.step()
    assert one.look()
    assert (one.holds(3), one.told("taken")[-1]["mode"]) == (True, "scatter")


def test_weights_that_others_wrote_to_are_a_warning_told_once(followed):
    one = followed()
    one.look()
    for _ in range(2):
        one.step(share=0.9)
        one.model.fused.data.view(torch.int16).add_(1)
        assert one.look()
        assert one.holds(max(one.run.states))
    assert [t["path"] for t in one.told("taken")] == ["none", "reload", "reload"]
    assert [w["step"] for w in one.told("warning")] == [1, 2]  # each names its step in the reason


def test_a_key_comes_from_the_environment(tmp_path, followed, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    one = followed()
    one.server.key = SECRET
    assert one.look()
    monkeypatch.delenv("VLLM_API_KEY")
    line = ["serve-updates", str(one.run.url), "--once", "--json", "--engine", f"vllm={one.server.url}"]
    assert command(line) == 4
    said = capsys.readouterr()
    event = json.loads(said.out.splitlines()[0])
    assert (event["event"], event["error"]) == ("failed", "engine-refused")
    assert "DELTACKPT_ENGINE_KEY" in event["hint"]
    monkeypatch.setenv("DELTACKPT_ENGINE_KEY", f" {SECRET}\n")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    assert command(line) == 0
    assert SECRET not in said.out + said.err + "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "spec",
    [
        f"vllm=http://user:{SECRET}@127.0.0.1:8000", f"vllm=http://{SECRET}@host", f"vllm=http://host:1?key={SECRET}",
        f"vllm=http://host#{SECRET}", f"http://user:{SECRET}@host", f"sglang=http://a:{SECRET}@host",
    ],
)  # fmt: skip
def test_a_secret_in_a_url_is_refused_and_not_shown(tmp_path, spec, capsys):
    Run(tmp_path).publish(first_state())
    assert command(["serve-updates", str(tmp_path / "repo"), "--json", "--engine", spec]) == 2
    said = capsys.readouterr()
    assert "engine-form" in said.out
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("key", [f"{SECRET}\nx: y", f"{SECRET}\u20ac", f"two {SECRET}", f"{SECRET}\x7f"])
def test_a_key_that_no_header_holds_is_refused_and_not_shown(tmp_path, key, monkeypatch, capsys):
    Run(tmp_path).publish(first_state())
    monkeypatch.setenv("DELTACKPT_ENGINE_KEY", key)
    assert command(["serve-updates", str(tmp_path / "repo"), "--json", "--engine", "vllm=http://127.0.0.1:1"]) == 2
    said = capsys.readouterr()
    assert "engine-form" in said.out
    assert SECRET not in said.out + said.err


@pytest.mark.parametrize("spec", ["vllm=http://", "vllm=http://:80", "vllm=http://host:port", "vllm=http://[::1"])
def test_a_url_without_a_host_is_refused(tmp_path, spec):
    with pytest.raises(UsageError, match="engine-form"):
        client_of(spec, ClientOptions("r", tmp_path))


class Elsewhere:
    """A server that answers everything the same, and remembers the keys that it was sent."""

    def __init__(self, status, location=""):
        self.keys = keys = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                keys.append(self.headers.get("authorization"))
                self.send_response(status)
                if location:
                    self.send_header("location", location)
                self.send_header("content-length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_): ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def test_engines_on_loopback_are_not_behind_a_proxy(monkeypatch):
    engine, proxy = Elsewhere(200), Elsewhere(404)
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url)
    try:
        assert Http(engine.url, 10).get("/version") == {}
        assert not proxy.keys
        with pytest.raises(ChainError, match="404"):
            Http("http://an.engine.example:8000", 10).get("/version")  # whose proxy it is
        assert len(proxy.keys) == 1
    finally:
        engine.close()
        proxy.close()


def test_a_key_is_for_no_other_place():
    other = Elsewhere(200)
    engine = Elsewhere(302, other.url + "/version")
    try:
        with pytest.raises(ChainError, match="302"):
            Http(engine.url, 10, key=SECRET).get("/version")
    finally:
        engine.close()
        other.close()
    assert (engine.keys, other.keys) == ([f"Bearer {SECRET}"], [])


def test_an_error_that_stands_still_within_its_words():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        ended = threading.Event()

        def serve():
            peer, _ = server.accept()
            with peer:
                peer.settimeout(60)
                peer.recv(65536)
                peer.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 100\r\n\r\nnot all")
                ended.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ChainError, match="status 500"):
            Http(f"http://127.0.0.1:{server.getsockname()[1]}", 2.0).get("/version")
        ended.set()
        thread.join()


def test_hosts_on_loopback():
    yes = ("http://localhost:1", "http://127.9.9.9", "http://[::1]:80/x", "http://a.localhost", "http://localhost.")
    assert all(map(on_loopback, yes))
    no = ("http://localhost.example", "http://128.0.0.1", "http://engine", "http://[2001:db8::1]", "http://")
    assert not any(map(on_loopback, no))


def test_events_say_when(followed):
    one = followed()
    one.look()
    for _, fields in one.events:
        assert fields["time"][10] == "T"
        assert (len(fields["time"]), fields["time"][-1]) == (24, "Z")


def test_an_engine_that_is_gone_is_told(followed):
    one = followed()
    one.look()
    one.server.close()
    with pytest.raises(StoreError, match="engine-silent"):
        one.serving.engines[0].client.version()


def test_engines_that_load_files_need_a_cache(tmp_path):
    Run(tmp_path).publish(first_state())
    with pytest.raises(UsageError, match="engine-cache"):
        open_serving(tmp_path / "repo", None, ["sglang=http://127.0.0.1:1"], lambda e, f: None)
    with pytest.raises(UsageError, match="engine-cache"):
        client_of("vllm=http://127.0.0.1:1", ClientOptions("r", None))
