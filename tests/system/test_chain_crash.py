"""Each flow killed at its k-th operation: as an exception out of the store, and as a SIGKILL of a real process.

Afterwards every step that was there restores, `verify` finds nothing, and doing it again ends where it should.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.chains import NOW, World, next_state
from support.faulty_store import Died, FaultyStore
from support.flows import FLOWS as SCRIPTS
from support.flows import KEEP_TWO, SCRIPT, check_after, expire_leases, prepare
from support.states import make_checkpoint

from deltackpt.collector.sweep import collect
from deltackpt.compaction.fold import write_anchor
from deltackpt.compaction.plan import plan_compact
from deltackpt.errors import ConflictError
from deltackpt.publish.write import write
from deltackpt.restore.materialize import apply
from deltackpt.store import MemoryStore, memory
from deltackpt.verification import verify_repository

URL = "memory://crash"


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        self.now += 1e-3
        return self.now


def snapshot(store: MemoryStore, clock: Clock) -> MemoryStore:
    copy = MemoryStore("crash", clock=clock)
    copy._objects = dict(store._objects)
    return copy


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[World, MemoryStore, Clock]]:
    clock = Clock()
    store = MemoryStore("crash", clock=clock)
    memory._named["crash"] = store
    made = World(tmp_path, URL)
    made.run(7)
    yield made, store, clock
    memory._named.pop("crash", None)


def publish(world: World) -> None:
    make_checkpoint(world.root / f"new-{time.monotonic_ns()}", world.states["next"])
    newest = max(world.root.glob("new-*"))
    write(newest, URL, threads=1, anchor=NOW)


def levels(world: World) -> None:
    plan_compact(world.repo, levels=(2, 4)).execute(world.repo, threads=1)


def late_anchor(world: World) -> None:
    link = world.repo.log()[2].link
    try:
        write_anchor(world.repo, link, threads=1)
    except ConflictError as error:  # the run before got that far
        assert error.code == "anchor-exists"


def gc(world: World) -> None:
    collect(world.repo, KEEP_TWO)


def materialize(world: World) -> None:
    out = world.root / "materialized"
    shutil.rmtree(out, ignore_errors=True)
    apply(world.repo, out, threads=1)


FLOWS: dict[str, Callable[[World], None]] = {
    "publish": publish,
    "compact": levels,
    "anchor": late_anchor,
    "gc": gc,
    "apply": materialize,
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_some_operations(world: tuple[World, MemoryStore, Clock], flow: str, when: str) -> None:
    _killed(world, flow, when, 2)


@pytest.mark.heavy
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_at_every_operation(world: tuple[World, MemoryStore, Clock], flow: str, when: str) -> None:
    _killed(world, flow, when, 10_000)


def _killed(world: tuple[World, MemoryStore, Clock], flow: str, when: str, most: int) -> None:
    """Killed at each operation, or at ``most`` of them, evenly spread."""
    made, store, clock = world
    links = [m.link for m in made.repo.log()][::-1]
    made.states["next"] = next_state(made.states[links[-1].id], 99)
    if flow == "gc":  # something of every kind to remove
        levels(made)
        late_anchor(made)
    base = snapshot(store, clock)
    counting = FaultyStore(snapshot(base, clock))
    memory._named["crash"] = counting  # type: ignore[assignment]
    FLOWS[flow](made)
    assert counting.operations > 1
    kept = links[-2:] if flow == "gc" else links
    stride = max(1, counting.operations // most)
    for k in range(1, counting.operations + 1, stride):
        inner = snapshot(base, clock)
        memory._named["crash"] = FaultyStore(inner, k, when=when)  # type: ignore[arg-type, assignment]
        with pytest.raises(Died):
            FLOWS[flow](made)
        memory._named["crash"] = inner
        clock.now += 1_000  # leases and locks of the dead lapse
        report = verify_repository(made.repo, threads=1)
        assert report.ok, (k, report.to_dict())
        made.check(kept[-1])
        made.check(kept[0])
        head = made.repo.ref()
        assert head is not None
        done = head.link != links[-1]
        if not done:
            assert head.link == links[-1]
            FLOWS[flow](made)
        if flow == "publish":
            assert len({m.step for m in made.repo.log()}) == len(made.repo.log())
            assert made.repo.log()[0].step == links[-1].step + 1
        assert verify_repository(made.repo, threads=1).ok
        if flow == "gc":
            assert {link.step for link in made.repo.steps()} >= {link.step for link in kept}
            clock.now += 10
            again = collect(made.repo, KEEP_TWO)[0]
            assert again.frees == 0
        for link in kept[:: len(kept) - 1]:
            made.check(link)


# Ends the process by SIGKILL at its k-th change of the file system: nothing is flushed, nothing is cleaned up.
KILLER = """
import os, signal, sys
left = int(sys.argv.pop(1))
def deadly(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("link", "symlink", "unlink", "rename", "replace", "mkdir", "write", "writev", "truncate", "fsync"):
    deadly(name)
"""


@pytest.mark.parametrize("flow", SCRIPTS)
def test_sigkill(tmp_path: Path, flow: str) -> None:
    _sigkill(tmp_path, flow, [11])


@pytest.mark.heavy
@pytest.mark.parametrize("flow", SCRIPTS)
def test_sigkill_everywhere(tmp_path: Path, flow: str) -> None:
    _sigkill(tmp_path, flow, range(1, 10_000))


def _sigkill(tmp_path: Path, flow: str, moments: list[int] | range) -> None:
    made, links = prepare(tmp_path, flow)
    for k in moments:
        copy = tmp_path / f"at-{k}"
        copy.mkdir()
        shutil.copytree(tmp_path / "repo", copy / "repo")
        shutil.copytree(tmp_path / "cache", copy / "cache", symlinks=True)
        (copy / "next").symlink_to(tmp_path / "next")
        command = [sys.executable, "-c", KILLER + SCRIPT, str(k), flow, str(copy / "repo"), str(copy)]
        status = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}).returncode
        assert status in (0, -signal.SIGKILL)
        expire_leases(copy / "repo")
        check_after(copy, made, links, flow)
        shutil.rmtree(copy)
        if status == 0:
            break
