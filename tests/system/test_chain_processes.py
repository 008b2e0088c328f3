"""Real processes on one repository: a writer, readers with leases, and a gc that runs all the time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.chains import World

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.repository import Repository
from deltackpt.verification import verify_repository

COMMON = """
import shutil, sys, time
from pathlib import Path
from deltackpt.errors import ConflictError
from deltackpt.repository import Repository
repo, root, until = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
count = 0
"""
WRITER = (
    COMMON
    + """
from support.chains import World, next_state
from deltackpt.publish.write import AnchorPolicy
world = World(root, repo)
world.count = 1
from support.states import make_checkpoint
from support.chains import small_state
state = small_state()
while time.time() < until or count < 3:
    state = next_state(state, count)
    world.publish(state, anchor=AnchorPolicy(every=5, ratio=float("inf")))
    count += 1
print(count)
"""
)
# A reader takes whatever is newest, sometimes into a cache, sometimes cold, and sometimes the tag.
READER = (
    COMMON
    + """
from deltackpt.cache import apply_to_cache
from deltackpt.restore.materialize import apply
while time.time() < until or count < 3:
    if count % 3 == 0:
        shutil.rmtree(root / "out", ignore_errors=True)
        apply(Repository.open(repo), root / "out", "kept" if count % 2 else "latest", threads=1)
    else:
        apply_to_cache(Repository.open(repo), root / "cache", threads=1)
    count += 1
print(count)
"""
)
# Says, too, how many steps there were at most after it.
COLLECTOR = (
    COMMON
    + """
from deltackpt.collector.sweep import collect
from deltackpt.collector.retention import Policy
most = 0
while time.time() < until or count < 3:
    try:
        collect(Repository.open(repo), Policy(last=3, grace=0), ttl=20)
        most = max(most, len(Repository.open(repo).steps()))
    except ConflictError as error:
        assert error.code == "plan-stale", error
    count += 1
    time.sleep(0.05)
print(count)
print(most)
"""
)


def test_nobody_is_cut_off(tmp_path: Path) -> None:
    _run(tmp_path, 2, 2)


@pytest.mark.heavy
def test_nobody_is_cut_off_for_a_minute(tmp_path: Path) -> None:
    _run(tmp_path, 60, 4)


def _run(tmp_path: Path, seconds: float, readers: int) -> None:
    world = World(tmp_path)
    links = world.run(4)
    world.repo.put_tag("kept", links[1])
    until = str(time.time() + seconds)
    scripts = {"writer": WRITER, "gc": COLLECTOR} | {f"reader-{i}": READER for i in range(readers)}
    running = {}
    for name, script in scripts.items():
        (tmp_path / name).mkdir()
        command = [sys.executable, "-c", script, str(tmp_path / "repo"), str(tmp_path / name), until]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running[name] = subprocess.Popen(command, env=environment, text=True, **pipes)
    counts, most = {}, 0
    for name, process in running.items():
        out, err = process.communicate(timeout=seconds * 4 + 60)
        assert process.returncode == 0, f"{name}: {err[-2000:]}"
        counts[name], *rest = map(int, out.split())
        most = rest[0] if rest else most
    assert all(counts.values()), counts
    repo = Repository.open(tmp_path / "repo")
    assert verify_repository(repo, threads=1).ok
    world.check(links[1], repo)
    assert not list(repo.store.list("leases/"))
    steps = [link.step for link in repo.steps()]
    print(counts, most, len(steps))  # how often a gc comes to its end beside so fast a writer is up to the machine
    collect(repo, Policy(last=3, grace=0))
    # The last three, the way to them from an anchor at most five steps before, and the tag with its own.
    assert len(repo.steps()) <= 3 + 5 + 2
    world.check(links[1], repo)
    folders = {info.name.split("/")[1] for info in repo.store.list("patches/")}
    assert len(folders) < 3 + 5 + 2
