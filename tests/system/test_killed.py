"""SIGKILL at random moments: of a writer, whose old step stays the latest, and of readers, whose rerun is exact."""

import json
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.states import State, changed, make_checkpoint, random_bytes, tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply

NEVER = AnchorPolicy(ratio=float("inf"))
TIMES = 6  # kills of each kind
SHAPES = [(256, 512), (1024, 256), (150_000,), (2, 128, 512)]

SERVER = """
import json, os, sys, time, traceback
from signal import SIGKILL
from deltackpt.cache import apply_to_cache
from deltackpt.restore.materialize import apply
from deltackpt.repository import Repository
from deltackpt.publish.write import AnchorPolicy, write

NEVER = AnchorPolicy(ratio=float("inf"))
JOBS = {
    "patch": lambda *a: write(*a, threads=2),
    "anchor": lambda *a: write(*a, anchor=AnchorPolicy(now=True), threads=2),
    "apply": lambda repo, out: apply(Repository.open(repo), out, threads=2),
    "write with a cache": lambda new, repo, cache: write(new, repo, cache=cache, anchor=NEVER, threads=2),
    "cache": lambda repo, out: apply_to_cache(Repository.open(repo), out, threads=2),
}
for line in sys.stdin:
    kill_after, kind, *arguments = json.loads(line)
    began, pid = time.monotonic(), os.fork()
    if not pid:
        try:
            JOBS[kind](*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, SIGKILL)
    print(json.dumps([os.waitpid(pid, 0)[1], time.monotonic() - began]), flush=True)
"""


class Server:
    """A process that has imported everything, and forks another one for every job: only the work itself is waited
    for.
    """

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def run(self, kind: str, *arguments: object, kill_after: float | None = None) -> float:
        """A job, killed so many seconds after it began. -> seconds."""
        self.process.stdin.write(json.dumps([kill_after, kind, *map(str, arguments)]) + "\n")
        self.process.stdin.flush()
        status, seconds = json.loads(self.process.stdout.readline())
        assert status in (0, signal.SIGKILL)
        assert kill_after is not None or status == 0
        return seconds


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Server(process)
        process.stdin.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Four directories, a repository that holds the first three, and how long things take. Not to be changed."""
    root, rng = tmp_path_factory.mktemp("killed"), np.random.default_rng(0)
    state: State = {f"t{i}": ("BF16", shape, random_bytes(rng, "BF16", shape)) for i, shape in enumerate(SHAPES)}
    for i in range(4):
        side = {"config.json": b"%d" % i, "tokenizer.json": b"{}"}
        make_checkpoint(root / f"step{i}", state, shards=2, side=side)
        state = {name: changed(rng, value, 0.02) for name, value in state.items()}
    for i in range(3):
        write(root / f"step{i}", root / "repo", anchor=NEVER)
    return root


def moments(seconds: float, seed: int) -> list[float]:
    """At once, and spread over the work and a little beyond its end."""
    chance = random.Random(seed)
    return [0.0, *(seconds * 1.15 * (i + chance.random()) / TIMES for i in range(1, TIMES))]


def check(repo: Path, step: int, made: Path, out: Path) -> None:
    apply(Repository.open(repo), out, step)
    assert tree(out) == tree(made / f"step{step}")
    shutil.rmtree(out)


@pytest.mark.parametrize("kind", ["patch", "anchor"])
def test_a_writer(server, made, tmp_path, kind):
    repo, out, ends = tmp_path / "repo", tmp_path / "out", []
    shutil.copytree(made / "repo", tmp_path / "trial")
    seconds = server.run(kind, made / "step3", tmp_path / "trial")
    for moment in moments(seconds, 1):
        shutil.rmtree(repo, ignore_errors=True)
        shutil.copytree(made / "repo", repo)
        server.run(kind, made / "step3", repo, kill_after=moment)
        latest = Repository.open(repo).find().step
        check(repo, latest, made, out)
        if latest == 2:
            assert write(made / "step3", repo).step == 3
        check(repo, 2, made, out)
        check(repo, 3, made, out)
        ends.append(latest)
    assert 2 in ends  # some were killed in time


def test_a_writer_with_a_cache(server, made, tmp_path):
    """Killed before or after its step is published: the cache holds a whole step, and gets to the latest one."""
    before, trial, ends = tmp_path / "before", tmp_path / "trial", []
    shutil.copytree(made / "repo", before / "repo")
    for step in (1, 2):
        apply_to_cache(Repository.open(before / "repo"), before / "cache", step)
    shutil.copytree(before, trial, symlinks=True)
    seconds = server.run("write with a cache", made / "step3", trial / "repo", trial / "cache")
    for moment in moments(seconds, 5):
        shutil.rmtree(trial)
        shutil.copytree(before, trial, symlinks=True)
        server.run("write with a cache", made / "step3", trial / "repo", trial / "cache", kill_after=moment)
        repo, cache = Repository.open(trial / "repo"), trial / "cache"
        path, link = open_current(cache)
        assert tree(path) == tree(made / f"step{link.step}")
        ends.append(repo.find().step)
        assert link.step <= ends[-1]
        apply_to_cache(repo, cache)
        path, link = open_current(cache)
        assert link.step == ends[-1]
        assert tree(path) == tree(made / f"step{link.step}")
    assert 2 in ends


def test_a_reader(server, made, tmp_path):
    seconds, killed = server.run("apply", made / "repo", tmp_path / "trial"), 0
    for i, moment in enumerate(moments(seconds, 2)):
        out = tmp_path / str(i)
        server.run("apply", made / "repo", out, kill_after=moment)
        if not out.exists():
            killed += 1
            apply(Repository.open(made / "repo"), out)
        assert tree(out) == tree(made / "step2")
    assert killed


@pytest.mark.parametrize("start", [0, 1])
def test_a_managed_cache(server, made, tmp_path, start):
    """Killed on its way from step 0 or 1 to step 2; what is current then is a whole step, and the rerun gets there."""
    repo, cache, killed = Repository.open(made / "repo"), tmp_path / "cache", 0
    apply_to_cache(repo, tmp_path / "before", 0)
    if start:
        apply_to_cache(repo, tmp_path / "before", 1)  # now there is another slot, and a journal
    shutil.copytree(tmp_path / "before", tmp_path / "trial", symlinks=True)
    seconds = server.run("cache", made / "repo", tmp_path / "trial")
    for moment in moments(seconds, 3 + start):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(tmp_path / "before", cache, symlinks=True)
        server.run("cache", made / "repo", cache, kill_after=moment)
        path, link = open_current(cache)
        assert link.step in (start, 2)
        assert tree(path) == tree(made / f"step{link.step}")
        killed += link.step == start
        apply_to_cache(repo, cache)
        path, link = open_current(cache)
        assert link.step == 2
        assert tree(path) == tree(made / "step2")
    assert killed
