"""A vLLM server and `deltackpt serve-updates`, as processes that a test begins and ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress

import torch

from deltackpt.engines.vllm.release import EXTENSION
from support.ending import ENDING
from support.vllm_tiny import PROMPTS

ASK = {"model": "tiny", "max_tokens": 12, "temperature": 0, "logprobs": 0}
BACKEND = ("--weight-transfer-config", '{"backend":"deltackpt"}')


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# Two servers have room; and vLLM looks at every block of its cache when it drops it, of which a card has millions.
_ON_A_CARD = ["--gpu-memory-utilization", "0.2", "--num-gpu-blocks-override", "4096"]
SHARED_CARD = _ON_A_CARD if torch.cuda.is_available() else []
START = 300.0  # seconds that a server may take: 104 to 154 were seen on two busy cores
STARTED: list[subprocess.Popen] = []  # groups of processes that a test began


def stop_all():
    """What a test began ends with it, however that ends: three servers that are left take the machine."""
    while STARTED:
        process = STARTED.pop()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        ENDING.ended(process)


def options_of(release):
    """By the backend where there is one, else by the worker extension."""
    return BACKEND if release.has_backends else ("--worker-extension-cls", EXTENSION)


class Server:
    """``core``: where its threads run, so that two servers do not spin on one; ``how``: options for the plugin;
    ``graphs``: compiled, with CUDA graphs."""

    def __init__(self, run, path, tp=1, core=0, ready=True, how=BACKEND, graphs=False):
        self.core, self.how = core, [*how, *([] if graphs else ["--enforce-eager"]), *SHARED_CARD]
        self.run, self.path, self.tp, self.port = run, path, tp, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = (run.root / f"server-{self.port}.log").open("w")
        self.launch()
        if ready:
            self.ready()

    def start(self):
        self.launch()
        self.ready()

    def launch(self):
        env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1" if self.tp == 2 else str(self.core)
        line = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.path)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"),
            *("--max-model-len", "512", "--served-model-name", "tiny", "--tensor-parallel-size", str(self.tp)),
            *self.how,
        ]
        self.process = subprocess.Popen(line, env=env, stdout=self.log, stderr=self.log, start_new_session=True)
        STARTED.append(ENDING.began(self.process))

    def ready(self):
        end = time.monotonic() + START
        while time.monotonic() < end:
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


def serve(run, servers, *more, cache="cache", url=None, before="pass"):
    """``before``: statements that run first, by which a test makes it fail; ``cache``: its name, None for none."""
    engines = [word for s in servers for word in ("--engine", f"vllm={s.url}")]
    line = [
        sys.executable,
        "-c",
        f"{before}\nfrom deltackpt_cli.app import main; main()",
        "serve-updates",
        url or str(run.url),
        *([] if cache is None else [str(run.root / cache)]),
        *engines,
    ]
    with (run.root / "events.jsonl").open("a") as out:
        how = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        STARTED.append(ENDING.began(subprocess.Popen([*line, "--json", "--poll", "100ms", *more], **how)))
    return STARTED[-1]


def events(run):
    found = [line for line in (run.root / "events.jsonl").read_text().splitlines() if line.startswith('{"event"')]
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


def native(server, run, step):
    """Brought to a whole checkpoint by vLLM itself; -> its answers and checksums."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(run.checkpoint(step))}}
    server.call("/collective_rpc", body)
    server.call("/reset_prefix_cache")
    return server.answers(), server.checksums()
