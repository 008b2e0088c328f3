"""Immutable objects through a cache on this host: what is kept, what passes, who waits, and what goes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from deltackpt_cli.options import read_through
from support.chains import World
from support.states import tree
from support.store_contract import StoreContract

from deltackpt.cache import apply_to_cache
from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.errors import FormatError, NotFoundError
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import LocalStore, MemoryStore, Store
from deltackpt.store.object_cache import Differs, ObjectCache, Unusable
from deltackpt.store.read_through import ReadThrough


class TestReadThrough(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return ReadThrough(MemoryStore(), ObjectCache(tmp_path))


class Elsewhere(LocalStore):
    """A folder that is as far away as a bucket; notes what is read, in a file that processes share."""

    capabilities = LocalStore.capabilities.__class__(**{**vars(LocalStore.capabilities), "local": False})

    def __init__(self, root: Path, log: Path, pause: float = 0) -> None:
        super().__init__(root)
        self.log, self.pause = log, pause

    def note(self, name: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{name}\n")

    def get(self, name: str, limit: int) -> bytes:
        self.note(name)
        return super().get(name, limit)

    def get_range(self, name: str, start: int, length: int) -> bytes:
        self.note(name)
        return super().get_range(name, start, length)

    def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
        self.note(name)
        for piece in super().read(name, 64):
            time.sleep(self.pause)
            yield piece

    def local_path(self, name: str) -> Path | None:
        self.stat(name)
        return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = World(tmp_path)
    made.run(4)
    return made


def opened(world: World, **options: Any) -> Repository:
    store = Elsewhere(world.root / "repo", world.root / "log")
    return Repository.at(ReadThrough(store, ObjectCache(world.root / "objects", **options)))


def reads(world: World) -> list[str]:
    log = world.root / "log"
    found = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return found


def test_objects_are_read_once_and_refs_every_time(world: World) -> None:
    for n in range(3):
        done = apply(opened(world), world.root / f"out-{n}", threads=1)
        assert tree(Path(done.path)) == world.trees[done.id]
        seen = reads(world)
        moving = {"deltackpt.json", "refs/main.json", "gc.json"}
        kept = [name for name in seen if name not in moving]
        assert len(kept) == len(set(kept))
        assert {"steps", "states", "anchors", "patches"} == {name.split("/")[0] for name in kept} or n
        assert bool(kept) == (n == 0)
        assert "refs/main.json" in seen


def test_what_is_there_has_the_name_of_its_hash(world: World) -> None:
    apply(opened(world), world.root / "out", threads=1)
    found = list((world.root / "objects" / "objects").iterdir())
    assert len(found) > 8
    assert all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in found)
    assert not list((world.root / "objects" / "coming").iterdir())


def test_two_copies_of_a_repository_share_objects(world: World) -> None:
    import shutil

    apply(opened(world), world.root / "out", threads=1)
    reads(world)
    shutil.copytree(world.root / "repo", world.root / "mirror")
    store = Elsewhere(world.root / "mirror", world.root / "log")
    apply(Repository.at(ReadThrough(store, ObjectCache(world.root / "objects"))), world.root / "two", threads=1)
    assert {*reads(world)} <= {"deltackpt.json", "refs/main.json", "gc.json"}


def test_a_local_store_is_not_read_through(tmp_path: Path) -> None:
    local = LocalStore(tmp_path)
    Repository.at_or_create(local)
    found = read_through(str(tmp_path), tmp_path / "objects", "1GB").store
    assert isinstance(found, LocalStore)
    assert found.url == local.url
    assert not (tmp_path / "objects").exists()


def test_a_damaged_copy_on_disk_is_fetched_again(world: World) -> None:
    apply(opened(world), world.root / "out", threads=1)
    reads(world)
    for path in (world.root / "objects" / "objects").iterdir():
        body = path.read_bytes()
        path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    done = apply(opened(world), world.root / "again", threads=1)
    assert tree(Path(done.path)) == world.trees[done.id]
    assert any(name.startswith("anchors/") for name in reads(world))


def test_damage_in_the_store_is_reported_and_not_kept(world: World) -> None:
    repo = opened(world)
    name = (repo.load(repo.find(2)).patch or ())[0].name
    path = world.root / "repo" / name
    body = path.read_bytes()
    path.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(FormatError, match="object-hash"):
        apply(repo, world.root / "out", threads=1)
    path.write_bytes(body)
    apply(opened(world), world.root / "out", threads=1)


def test_a_step_that_was_collected_is_not_remembered_for_ever(world: World) -> None:
    """Manifests in the cache lead to objects that are gone: then the store is asked what there is."""
    repo = opened(world)
    apply_to_cache(repo, world.root / "cache", 1, threads=1)
    from deltackpt.compaction.plan import plan_compact

    world.run(6)
    plan_compact(world.repo, levels=(8,)).execute(world.repo, threads=1)
    for link in world.repo.steps():  # all manifests are in the cache, and no patch after step 1
        repo.load(link)
    collect(world.repo, Policy(last=1, grace=0))
    assert len(world.repo.steps()) < 6
    done = apply_to_cache(opened(world), world.root / "cache", threads=1)
    assert done.step == 9
    assert tree(world.root / "cache" / "current") == world.trees[done.id]


# The folder


def chunks(body: bytes, size: int = 100) -> list[bytes]:
    return [body[i : i + size] for i in range(0, len(body), size)]


def put(cache: ObjectCache, body: bytes) -> str:
    sha256 = hashlib.sha256(body).hexdigest()
    with cache.fetch(sha256, len(body), lambda: chunks(body)) as file:
        assert file.read() == body
    return sha256


def holds(cache: ObjectCache, sha256: str) -> bool:
    file = cache.open(sha256)
    if file is not None:
        file.close()
    return file is not None


def test_it_stays_below_its_limit_and_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 5000)
    names = [put(cache, bytes([i]) * 1000) for i in range(5)]
    for i in (1, 0):  # used again
        time.sleep(0.01)
        assert holds(cache, names[i])
    time.sleep(0.01)
    names.append(put(cache, b"x" * 2000))
    assert cache.size() <= 5000
    assert [holds(cache, name) for name in names] == [True, True, False, False, True, True]


def test_what_is_larger_than_all_of_it_is_read_past_it(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 100)
    with pytest.raises(Unusable):
        put(cache, b"x" * 101)
    store = MemoryStore()
    world = World(tmp_path)
    world.run(2)
    for info in world.repo.store.list(""):
        store.put(info.name, [world.repo.store.get(info.name, 1 << 20)])
    repo = Repository.at(ReadThrough(store, ObjectCache(tmp_path / "small", 100)))
    assert apply(repo, tmp_path / "out", threads=1).step == 1


def test_a_folder_that_cannot_be_written_to_is_read_past(world: World) -> None:
    (world.root / "objects").write_text("a file in its place")
    assert apply(opened(world), world.root / "out", threads=1).step == 3


def test_evicted_while_it_is_read(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    body = b"a" * 1000
    sha256 = put(cache, body)
    file = cache.open(sha256)
    assert file is not None
    with file:
        put(cache, b"b" * 900)
        assert not holds(cache, sha256)
        assert file.read() == body


def test_other_bytes_are_not_kept(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path)
    with pytest.raises(Differs):
        cache.fetch("0" * 64, 3, lambda: [b"abc"])
    assert not holds(cache, "0" * 64)
    assert not list((tmp_path / "coming").iterdir())


def test_an_object_that_is_missing(tmp_path: Path) -> None:
    store = ReadThrough(MemoryStore(), ObjectCache(tmp_path))
    with pytest.raises(NotFoundError):
        store.get(f"steps/00000001-{'a' * 64}.json", 100)


# Processes


SCRIPT = """
import sys, time
from pathlib import Path
from tests.store.test_object_cache import Elsewhere
from deltackpt.restore.materialize import apply
from deltackpt.repository import Repository
from deltackpt.store.object_cache import ObjectCache
from deltackpt.store.read_through import ReadThrough
root, out, pause = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
store = ReadThrough(Elsewhere(root / "repo", root / "log", pause), ObjectCache(root / "objects"))
print("ready", flush=True)
sys.stdin.readline()
apply(Repository.at(store), root / out, threads=1)
"""


@contextmanager
def reader(world: World, out: str, pause: float) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to read, and does when it is told."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])}
    command = [sys.executable, "-c", SCRIPT, str(world.root), out, str(pause)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.wait(60) in (0, -signal.SIGKILL)


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_of_many_processes_one_fetches_and_all_have_it(world: World) -> None:
    with ExitStack() as stack:
        running = [stack.enter_context(reader(world, f"out-{i}", 0.002)) for i in range(4)]
        for process in running:
            tell(process)
    seen = reads(world)
    kept = [name for name in seen if name not in ("deltackpt.json", "refs/main.json", "gc.json")]
    assert seen.count("refs/main.json") == 4
    assert sorted(kept) == sorted(set(kept)), "each object once"
    assert any(name.startswith("anchors/") for name in kept)
    for i in range(4):
        assert tree(world.root / f"out-{i}") == world.trees[world.repo.find().id]


def test_a_holder_that_is_killed_lets_go(world: World) -> None:
    coming = world.root / "objects" / "coming"
    until = time.monotonic() + 30
    with reader(world, "slow", 0.2) as slow, reader(world, "waiting", 0) as waiting:
        tell(slow)
        while not any(coming.glob("*")):
            assert time.monotonic() < until
            time.sleep(0.01)
        tell(waiting)
        slow.send_signal(signal.SIGKILL)
        assert waiting.wait(60) == 0
    assert tree(world.root / "waiting") == world.trees[world.repo.find().id]
