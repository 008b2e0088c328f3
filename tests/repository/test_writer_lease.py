"""A writer that keeps its lease from step to step: whatever a gc does meanwhile, and whatever becomes of the lease, no
step that was published loses anything, and nothing of a writer that is open piles up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.chains import NEVER, NOW, World, next_state
from support.clock import Clock
from support.faulty_store import FaultyStore
from support.states import make_checkpoint

from deltackpt.errors import ConflictError
from deltackpt.format.canonical import dumps
from deltackpt.gc.retention import Policy
from deltackpt.gc.sweep import collect
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.repository.leases import COLLECTING, TTL, lease, read_leases
from deltackpt.repository.writer_lease import WriterLease, publishing, writer_lease
from deltackpt.store import MemoryStore, memory
from deltackpt.verify import verify_repository

ONE = Policy(last=1, grace=0)


class Watched(FaultyStore):
    """Calls ``between`` after each operation, and never within a call of that. ``asked``: names that were read."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.asked: list[str] = []
        self.between: Callable[[], None] = lambda: None
        self._inside = False
        self._lock = threading.RLock()  # parts are put by threads of their own

    def get(self, name: str, limit: int) -> bytes:
        self.asked.append(name)
        try:
            return super().get(name, limit)
        finally:
            self._after()

    def _end(self) -> None:
        super()._end()
        self._after()

    def _after(self) -> None:
        with self._lock:
            if not self._inside:
                self._inside = True
                try:
                    self.between()
                finally:
                    self._inside = False


class Open:
    """A world whose writer is kept open, and the store below it."""

    def __init__(self, world: World, store: MemoryStore, watched: Watched, clock: Clock) -> None:
        self.world, self.store, self.watched, self.clock = world, store, watched, clock
        assert world.writer is not None
        self.repo, self.below = world.writer, Repository.at(store)
        self.seed = 100

    @property
    def held(self) -> WriterLease:
        found = self.repo.writer
        assert isinstance(found, WriterLease)
        return found

    def publish(self, **options: Any) -> int:
        head = self.below.ref()
        assert head is not None
        self.seed += 1
        return self.world.publish(next_state(self.world.states[head.link.id], self.seed), **options).step

    def renew(self) -> None:
        renewal = self.held._heartbeat
        assert renewal is not None
        with renewal._lock:
            renewal._renew()

    def clean(self) -> None:
        """All is as it should be, once the writer is gone."""
        assert read_leases(self.below) == []
        for found in self.below.log():
            self.world.check(found.link, self.below)
        assert verify_repository(self.below, threads=1).ok


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The process's own clock, which stands still unless it is moved."""
    clock = Clock()
    monkeypatch.setattr("deltackpt.repository.heartbeat.time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.fixture
def made(tmp_path: Path, own: Clock) -> Iterator[Open]:
    clock = Clock()
    store = MemoryStore("holding", clock=clock)
    memory._named["holding"] = store
    world = World(tmp_path, "memory://holding")
    world.run(3)
    clock.now += 100
    watched = Watched(store)
    world.writer = Repository.at(watched)
    yield Open(world, store, watched, clock)
    memory._named.pop("holding", None)


def test_one_lease_for_many_steps(made: Open) -> None:
    with writer_lease(made.repo):
        assert read_leases(made.below) == []  # nothing is asked for before there is a step
        made.publish()
        made.watched.asked.clear()
        made.watched.changes.clear()
        for _ in range(3):
            made.publish(encoding="index")
        assert COLLECTING not in made.watched.asked
        assert not [name for _, name in made.watched.changes if name.startswith("leases/")]
        assert len(read_leases(made.below)) == 1
    made.clean()


def test_a_renewal_says_where_the_writer_is(made: Open) -> None:
    with writer_lease(made.repo):
        made.publish()
        made.clock.now += 50
        during: list[tuple[int, float]] = []

        def look() -> None:
            made.clock.now += 10
            made.renew()
            (found,) = read_leases(made.below)
            assert found.link is not None
            during.append((found.link.step, made.clock.now - found.since))

        made.renew()
        made.watched.between = look
        made.publish()
        made.watched.between = lambda: None
        assert {step for step, _ in during} == {3}
        assert [ago for _, ago in during] == [10 * i for i in range(len(during))]  # since it looked at the ref
        made.clock.now += 50
        made.renew()
        (found,) = read_leases(made.below)
        assert (found.link and found.link.step, found.since) == (4, made.clock.now)
    made.clean()


@pytest.mark.parametrize("every", [1, 3, 1 << 30])
def test_a_gc_between_any_two_operations(made: Open, every: int) -> None:
    """That keeps nothing but the newest step, with no grace, and the clock moves on by more than it rounds."""
    count = 0
    removed = 0

    def between() -> None:
        nonlocal count, removed
        count += 1
        made.clock.now += 3
        if count % every == 0 and made.held._heartbeat is not None:
            made.renew()
        made.clock.now += 3
        removed += sum(collect(made.below, ONE)[1].removed.values())

    with writer_lease(made.repo):
        made.publish()
        made.watched.between = between
        for anchor in (NEVER, NOW, NEVER, NEVER):
            made.publish(anchor=anchor)
            head = made.below.ref()
            assert head is not None
            made.world.check(head.link, made.below)
        made.watched.between = lambda: None
    assert count > 20
    assert removed or every == 1 << 30
    made.clock.now += 10
    collect(made.below, ONE)
    assert [link.step for link in made.below.steps()] == [5, 6, 7]  # from the anchor on
    made.clean()


def test_an_open_writer_keeps_nothing_that_is_older(made: Open) -> None:
    with writer_lease(made.repo):
        for step in range(4):
            made.clock.now += 100
            made.publish(anchor=NOW if step == 3 else NEVER)
        made.repo.put("patches/00000009-0123456789ab/part-00001.safetensors", [b"abandoned"])
        collect(made.below, ONE)
        assert [link.step for link in made.below.steps()] == [*range(7)]  # since the lease was put, and the way there
        made.clock.now += 10
        made.renew()
        made.clock.now += 10
        collect(made.below, ONE)
        assert [link.step for link in made.below.steps()] == [6]
        assert len({info.name.split("/")[1] for info in made.store.list("patches/")}) == 1
        assert made.publish() == 7
    made.clean()


def test_between_steps_a_lease_may_lapse(made: Open, own: Clock) -> None:
    with writer_lease(made.repo):
        made.publish()
        (first,) = read_leases(made.below)
        own.now += TTL
        made.clock.now += 2 * TTL
        until = int(made.clock.now) + 60
        made.store.put(COLLECTING, [dumps({"holder": "a gc", "expires": until})])
        made.watched.between = lambda: setattr(made.clock, "now", made.clock.now + 10)
        made.watched.changes.clear()
        made.publish()
        made.watched.between = lambda: None
        assert made.clock.now >= until  # it waited for the gc
        puts = [name.partition("/")[0] for what, name in made.watched.changes if what == "put"]
        assert puts == ["leases", "patches", "states", "steps"]
        (second,) = read_leases(made.below)
        assert first.name != second.name
    made.clean()


@pytest.mark.parametrize("at", ["patches", "states", "steps"])
def test_a_lease_that_lapses_within_a_step(made: Open, own: Clock, at: str) -> None:
    """What a process sees that was stopped after it put something: a gc has taken that."""
    gone = False

    def stop() -> None:
        nonlocal gone
        if not gone and made.watched.changes[-1][1].startswith(at):
            gone = True
            made.clock.now += 2 * TTL
            collect(made.below, Policy(grace=0))
            own.now += 2 * TTL

    with writer_lease(made.repo):
        step = made.publish()
        made.watched.between = stop
        with pytest.raises(ConflictError) as caught:
            made.publish()
        assert (caught.value.code, caught.value.exit_code) == ("lease-lapsed", 7)
        assert made.below.find().step == step
        assert gone
        made.watched.between = lambda: None
        made.clock.now += 10
        collect(made.below, Policy(grace=0))
        assert len(made.below.steps()) == step + 1
        assert made.publish() == step + 1
    made.clean()


@pytest.mark.parametrize("how", ["removed", "changed"])
def test_a_lease_that_somebody_takes(made: Open, how: str) -> None:
    with writer_lease(made.repo, ttl=0.03):
        made.publish()
        (found,) = read_leases(made.below)
        theirs = b'{"theirs":1}'
        while True:  # we renew at the same time
            try:
                if how == "removed":
                    made.store.delete(found.name)
                else:
                    made.store.swap(found.name, made.store.get(found.name, 999), theirs)
                break
            except ConflictError:
                continue
        end = time.monotonic() + 60
        while made.held._heartbeat is not None and made.held._heartbeat.fresh and time.monotonic() < end:
            time.sleep(0.005)
        made.publish()
        assert made.held._name != found.name
    if how == "changed":
        assert made.store.get(found.name, 999) == theirs
        made.store.delete(found.name)
    made.clean()


def test_two_writers_in_turn(made: Open, tmp_path: Path) -> None:
    """Who finds another's step on the ref follows it, under a new lease."""
    with writer_lease(made.repo):
        made.publish()
        (first,) = read_leases(made.below)
        made.world.writer = None
        made.world.run(1)
        made.world.writer = made.repo
        made.watched.asked.clear()
        assert made.publish() == 5
        (second,) = read_leases(made.below)
        assert (second.link and second.link.step, first.name != second.name) == (4, True)
        assert COLLECTING in made.watched.asked
    made.clean()


def test_two_writers_at_once_in_one_process(made: Open, tmp_path: Path) -> None:
    """Who comes second has a lease for its step alone, and the first one's stays as it is."""
    seen: set[int] = set()
    with writer_lease(made.repo):
        step = made.publish()
        with publishing(made.repo, made.below.find()):
            before = read_leases(made.below)
            make_checkpoint(tmp_path / "other", next_state(made.world.states[made.below.find().id], 7))
            made.watched.between = lambda: seen.add(len(read_leases(made.below)))
            write(tmp_path / "other", made.repo, ref="other", threads=1)
            made.watched.between = lambda: None
            assert read_leases(made.below) == before
        assert seen == {1, 2}
        assert made.publish() == step + 1
        assert read_leases(made.below) == before
    made.clean()


def test_a_rewind_pins_what_it_goes_back_to(made: Open) -> None:
    with writer_lease(made.repo):
        made.publish()
        made.publish()
        done = made.publish(resume_from=2)
        (found,) = read_leases(made.below)
        assert (found.link and found.link.step, done) == (2, 3)
        made.clock.now += 100
        made.renew()
        made.clock.now += 100
        collect(made.below, ONE)
        assert made.publish() == 4
    made.clean()


def test_an_exception_ends_it(made: Open) -> None:

    def fail() -> None:
        with writer_lease(made.repo):
            made.publish()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert made.repo.writer is None
    made.clean()
    made.publish()
    made.clean()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from deltackpt.errors import ConflictError
from deltackpt.repository.writer_lease import writer_lease
from deltackpt.repository import Repository
from deltackpt.publish.write import write
root = Path(sys.argv[1])
repo = Repository.open(root / "repo")
"""
STOPPED = (
    SCRIPT
    + """
put = type(repo.store).put
def stop(store, name, chunks):
    written = put(store, name, chunks)
    if name.startswith("states/"):
        type(repo.store).put = put
        os.kill(os.getpid(), signal.SIGSTOP)
    return written
with writer_lease(repo, ttl=1):
    write(root / "a", repo, threads=1)
    type(repo.store).put = stop
    try:
        write(root / "b", repo, threads=1)
    except ConflictError as error:
        print(error.code)
    print(write(root / "b", repo, threads=1).step)
"""
)


def _directories(tmp_path: Path) -> World:
    world = World(tmp_path)
    (*_, link) = world.run(2)
    state = world.states[link.id]
    for seed, name in enumerate("abc"):
        make_checkpoint(tmp_path / name, state := next_state(state, 50 + seed))
    return world


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_a_process_that_is_stopped_for_longer_than_its_lease(tmp_path: Path) -> None:
    world = _directories(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path)], env=_environment(), stdout=subprocess.PIPE, text=True
    )
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    repo = world.repo
    while any(found.expires > repo.store.now() for found in read_leases(repo)):
        time.sleep(0.1)
    collect(repo, Policy(grace=0))
    assert len({info.name.split("/")[1] for info in repo.store.list("patches/")}) == 2  # its parts are gone
    os.kill(process.pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out.split()) == (0, ["lease-lapsed", "3"])
    assert read_leases(world.repo) == []
    assert verify_repository(world.repo, threads=1).ok


FORKED = (
    SCRIPT
    + """
with writer_lease(repo):
    write(root / "a", repo, threads=1)
    child = os.fork()
    if not child:
        write(root / "b", repo, threads=1)  # under a lease of its own
        print(len(list(repo.store.list("leases/"))))
        sys.exit()
    os.waitpid(child, 0)
    child = os.fork()
    if not child:
        sys.exit()  # and not a word to the store
    os.waitpid(child, 0)
    print(len(list(repo.store.list("leases/"))))
    print(write(root / "c", repo, threads=1).step)
"""
)


def test_a_fork_has_no_part_in_it(tmp_path: Path) -> None:
    world = _directories(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], env=_environment(), stdout=subprocess.PIPE, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, ["2", "1", "4"])
    assert read_leases(world.repo) == []
    assert verify_repository(world.repo, threads=1).ok


def test_a_reader_has_its_own(made: Open) -> None:
    with writer_lease(made.repo):
        made.publish()
        with lease(made.repo, made.repo.find(1)):
            assert len(read_leases(made.below)) == 2
        assert len(read_leases(made.below)) == 1
    made.clean()
