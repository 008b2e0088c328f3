"""A vLLM server and `deltackpt serve-updates`, as processes: followed live, killed at random, asked all the while."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("vllm")
pytest.importorskip("torch")

from engines.steps import Run, nudge
from engines.vllm_real.tiny import PROMPTS, tiny

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
ASK = {"model": "tiny", "max_tokens": 12, "temperature": 0, "logprobs": 0}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """``core``: where its threads run, so that two servers do not spin on one."""

    def __init__(self, run, path, tp=1, core=0):
        self.core = core
        self.run, self.path, self.tp, self.port = run, path, tp, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (run.root / f"server-{self.port}.log").open("w")
        self.start()

    def start(self):
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if self.tp == 2 else str(self.core)
        line = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.path)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--dtype", "bfloat16"),
            *("--max-model-len", "256", "--served-model-name", "tiny", "--tensor-parallel-size", str(self.tp)),
            *("--weight-transfer-config", '{"backend":"deltackpt"}'),
        ]
        self.process = subprocess.Popen(line, env=env, stdout=self.log, stderr=self.log, start_new_session=True)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.url + "/health", timeout=2)
                return
            except OSError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.2)
        raise TimeoutError

    def call(self, path, body=None, method="POST"):
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.loads(answer.read() or b"null")

    def version(self):
        return self.call("/weight_info", method="GET")["weight_version"]

    def answers(self):
        found = []
        for prompt in PROMPTS:
            choice = self.call("/v1/completions", {**ASK, "prompt": prompt})["choices"][0]
            found.append((choice["text"], choice["logprobs"]["token_logprobs"]))
        return found

    def checksums(self):
        return self.call("/weight_checker", {"action": "checksum"})["checksums"]

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self):
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
        self.log.close()


def serve(run, servers, *more, cache="cache"):
    engines = [word for s in servers for word in ("--engine", f"vllm={s.url}")]
    line = [sys.executable, "-m", "deltackpt_cli", "serve-updates", str(run.url), str(run.root / cache), *engines]
    out = (run.root / "events.jsonl").open("a")
    return subprocess.Popen([*line, "--json", "--poll", "200ms", *more], stdout=out, stderr=subprocess.STDOUT)


def events(run):
    found = [line for line in (run.root / "events.jsonl").read_text().splitlines() if line.startswith("{")]
    return [json.loads(line) for line in found]


def wait_for(server, step, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if server.version() == str(step):
                return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.1)
    raise TimeoutError(f"still at {server.version()}, not {step}: {events(server.run)[-3:]}")


def native(reference, run, step):
    """A second server, brought to the whole checkpoint by vLLM itself."""
    reference.call(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(run.checkpoint(step))}}
    )
    reference.call("/reset_prefix_cache")
    return reference.checksums()


class Asking(threading.Thread):
    """Requests in flight all the time; none may see an error."""

    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.stopped, self.finished, self.errors = server, threading.Event(), 0, []

    def run(self):
        while not self.stopped.is_set():
            try:
                body = {**ASK, "prompt": PROMPTS[2], "max_tokens": 120, "ignore_eos": True}
                answer = self.server.call("/v1/completions", body)
                assert answer["usage"]["completion_tokens"] == 120
                self.finished += 1
            except Exception as error:
                self.errors.append(error)

    def close(self):
        self.stopped.set()
        self.join(90)


@pytest.mark.parametrize("tp", [1, 2])
def test_followed_live_over_http(tmp_path, tp):
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server, reference = Server(run, run.checkpoint(0), tp), Server(run, run.checkpoint(0), tp, core=1)
    follower = serve(run, [server])
    asking = Asking(server)
    try:
        asking.start()
        for step in range(1, 21 if tp == 1 else 6):
            run.publish(nudge(run.states[step - 1], step))
            wait_for(server, step)
            assert server.checksums() == native(reference, run, step)
            if step % 10 == 0:
                assert server.answers() == reference.answers()
        follower.terminate()
        assert follower.wait(30) == 0
        taken = [e for e in events(run) if e["event"] == "taken"]
        assert {e["mode"] for e in taken[1:]} == {"scatter"}  # the first may find a cache that is past the base
        assert taken[-1]["step"] == step
        assert not [e for e in events(run) if e["event"] in ("failed", "wedged")]
    finally:
        asking.close()
        follower.kill()
        server.close()
        reference.close()
    assert not asking.errors
    assert asking.finished > 0


def test_killed_at_random(tmp_path):
    """The follower, the engine and the store go away at random; the engine is at a step, and ends at the latest."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    server = Server(run, run.checkpoint(0))
    reference = Server(run, run.checkpoint(0), core=1)
    rng, whole = random.Random(7), [reference.checksums()]
    follower = serve(run, [server])
    try:
        for step in range(1, 11):
            run.publish(nudge(run.states[step - 1], step))
            whole.append(native(reference, run, step))
            time.sleep(rng.random() * 4)
            what = step % 4
            if what == 0:  # the store is away
                os.rename(run.url, f"{run.url}.away")
                time.sleep(0.7)
                os.rename(f"{run.url}.away", run.url)
            elif step == 5:
                server.kill()
                server.start()
            else:
                follower.kill()
                follower.wait()
                # Whatever it was in the midst of: the engine holds one whole step, old or new.
                assert server.checksums() in whole
                follower = serve(run, [server])
            if follower.poll() is not None:
                follower = serve(run, [server])
        wait_for(server, 10)
        assert server.checksums() == whole[10]
        assert server.answers() == reference.answers()
    finally:
        follower.kill()
        server.close()
        reference.close()


def test_two_engines_together(tmp_path):
    """One of them cannot take the step: neither does. Later both do."""
    run = Run(tmp_path, tmp_path / "side")
    run.publish(tiny(tmp_path / "side"))
    a, b = Server(run, run.checkpoint(0)), Server(run, run.checkpoint(0), core=1)
    try:
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
