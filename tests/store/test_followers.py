"""One writer and many followers, each a process, on an S3 server behind a proxy that breaks something all the time.

Every follower ends at the writer's step, and whoever looks at `current` never sees anything but a step as it was
written.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.faulty_proxy import Damage, Delay, Fault, FaultyProxy, Reset, Short, Status

from deltackpt.repository import Repository
from deltackpt.verify import verify_repository

pytestmark = pytest.mark.stores

COMMON = """
import hashlib, json, os, sys, threading, time
from pathlib import Path
from deltackpt.errors import DeltackptError
url, root = sys.argv[1], Path(sys.argv[2])
"""
# A trainer: publishes until all steps are there, again where the store failed it, and notes what each one was. It keeps
# its store open and names the step before, else every step would be rebuilt from the first.
WRITER = (
    COMMON
    + """
import shutil
from support.chains import NEVER, next_state, small_state
from deltackpt.repository import Repository
from deltackpt.publish.write import write
from support.states import make_checkpoint
steps = int(sys.argv[3])
repo, state, failed, base = url, small_state(), 0, None
with (root / "written").open("a") as written:
    for step in range(steps):
        if step:
            state = {k: v for k, v in next_state(state, step).items() if k in ("w", "b", "s")}
        folder = root / f"in-{step % 2}"
        shutil.rmtree(folder, ignore_errors=True)
        make_checkpoint(folder, state, side={"config.json": b"{}" if step % 5 else b'{"a":1}'})
        link = None
        while link is None:
            try:
                if repo is url and step:
                    repo = Repository.open(url)
                link = write(folder, repo, step=step, base=base, anchor=NEVER, threads=1).id
            except DeltackptError as error:  # it may have taken effect all the same
                failed += 1
                print(step, error.code, file=sys.stderr)
                try:
                    head = Repository.open(url).ref()
                except DeltackptError:
                    continue
                if head is not None and head.link.step == step:
                    link = head.link.id
        body = (folder / "model.safetensors").read_bytes()
        written.write(json.dumps([f"{step:08d}-{link}", hashlib.sha256(body).hexdigest()]) + "\\n")
        written.flush()
        base = folder
print(failed)
"""
)
# A rollout host: follows, while a thread looks at `current` as an engine would, and notes what it saw.
FOLLOWER = (
    COMMON
    + """
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.repository import Repository
from deltackpt.store.fsspec_store import open_fsspec
from deltackpt.store.retry import RetryPolicy
IMPATIENT = RetryPolicy(total=1.0, silence=5.0, first=0.05, most=0.3)  # else no outage of these would ever be seen
cache, done, stop, poll = root / "cache", Path(sys.argv[3]), threading.Event(), float(sys.argv[4])
def look(seen):
    while not stop.is_set():
        try:
            slot = os.readlink(cache / "current")
            body = (cache / "current" / "model.safetensors").read_bytes()
            if os.readlink(cache / "current") == slot:  # else it moved while it was read
                seen.write(json.dumps([slot, hashlib.sha256(body).hexdigest()]) + "\\n")
                seen.flush()
            if done.exists() and done.read_text() == slot:
                stop.set()
        except OSError:
            pass
        time.sleep(0.25)
failures = []
while True:
    try:
        repo = Repository.at(open_fsspec(url, IMPATIENT))
        if repo.ref() is not None:
            break
    except DeltackptError:
        pass
    time.sleep(0.1)
with (root / "seen").open("w") as seen:
    watcher = threading.Thread(target=look, args=[seen])
    watcher.start()
    failed = lambda error, wait: failures.append(error.code)
    follower = Follower(repo, cache, FollowOptions(poll=poll, threads=1), stop=stop, failed=failed)
    switches = [switch.step for switch in follower.switches()]
    watcher.join()
assert switches == sorted(switches), switches
print(len(switches), len(failures))
"""
)


PERIOD, OUTAGE = 30.0, 2.5  # seconds


@dataclass
class Hostile(FaultyProxy):
    """Breaks a share of all requests, by a die of its own; and all of them for some seconds every now and then."""

    share: float = 0.04
    dice: random.Random = field(default_factory=lambda: random.Random(5))
    broken: Counter[str] = field(default_factory=Counter)

    def take(self, method: str, path: str) -> Fault | None:
        with self._lock:
            if time.monotonic() % PERIOD < OUTAGE:
                self.broken["outage"] += 1
                return Status(503)
            if self.dice.random() >= self.share:
                return None
            fault = self._fault(method, "list-type" in path)
            self.broken[type(fault).__name__] += 1
            return fault

    def _fault(self, method: str, listing: bool) -> Fault:
        choices: list[Fault] = [
            Status(503, {}, b"<Error><Code>SlowDown</Code></Error>"),
            Status(429, {"Retry-After": "0"}),
            Status(500),
            Reset(),
            Reset(answered=True),
            Delay(0.1),
        ]
        if method == "GET":
            choices.append(Short(self.dice.randrange(200)))
            if not listing:  # of a listing nobody could tell
                choices.append(Damage(self.dice.randrange(100), 1, 1 << self.dice.randrange(8)))
        return self.dice.choice(choices)


def test_followers_on_a_bad_day(tmp_path: Path, s3_url: str, s3_environment: str) -> None:
    bad_day(tmp_path, s3_url, s3_environment, steps=25, followers=2)


@pytest.mark.heavy
def test_sixteen_followers(tmp_path: Path, s3_url: str, s3_environment: str) -> None:
    """Some six minutes on two cores; DELTACKPT_FOLLOWED_STEPS asks for fewer steps."""
    steps = int(os.environ.get("DELTACKPT_FOLLOWED_STEPS", "500"))
    bad_day(tmp_path, s3_url, s3_environment, steps=steps, followers=16)


def bad_day(tmp_path: Path, url: str, server: str, *, steps: int, followers: int) -> None:
    patience = time.monotonic() + 120 + steps * (2 + followers / 4)
    with Hostile(server).serve() as proxy, ExitStack() as stack:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])]),
            "AWS_ENDPOINT_URL": proxy.url,
        }

        def start(script: str, name: str, *more: object) -> subprocess.Popen[str]:
            (tmp_path / name).mkdir()
            command = [sys.executable, "-c", script, url, str(tmp_path / name), *map(str, more)]
            with (tmp_path / name / "errors").open("w") as errors:
                pipes: Any = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
                process = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            stack.callback(process.kill)
            return process

        done = tmp_path / "done"
        writer = start(WRITER, "writer", steps)
        readers = [start(FOLLOWER, f"follower-{i}", done, followers / 4) for i in range(followers)]
        failed, _ = writer.communicate(timeout=max(1, patience - time.monotonic()))
        assert writer.returncode == 0, (tmp_path / "writer" / "errors").read_text()[-2000:]
        written = dict(map(json.loads, (tmp_path / "writer" / "written").read_text().splitlines()))
        assert len(written) == steps
        draft = tmp_path / "draft"
        draft.write_text(list(written)[-1])
        draft.replace(done)
        outcomes = []
        for i, reader in enumerate(readers):
            out, _ = reader.communicate(timeout=max(1, patience - time.monotonic()))
            assert reader.returncode == 0, (tmp_path / f"follower-{i}" / "errors").read_text()[-2000:]
            outcomes.append(tuple(map(int, out.split())))
    head = Repository.open(url).ref()
    assert head is not None
    assert f"{head.link.step:08d}-{head.link.id}" == list(written)[-1]
    looks = 0
    for i in range(followers):
        seen = [json.loads(line) for line in (tmp_path / f"follower-{i}" / "seen").read_text().splitlines()]
        assert seen[-1][0] == list(written)[-1]
        assert all(written[slot] == sha256 for slot, sha256 in seen)
        looks += len(seen)
    assert steps < 100 or sum(failures for _, failures in outcomes) > 0
    assert len(proxy.broken) >= 4  # of five kinds, at random
    assert threading.active_count() < 100
    print(f"writer failed {failed.strip()} times; followers {outcomes}; {looks} looks; broken {dict(proxy.broken)}")
    if steps < 100:
        assert verify_repository(Repository.open(url), threads=1).ok
