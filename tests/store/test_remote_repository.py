"""A tiny chain over real clients and servers: written, applied, kept in a cache, verified; and what damage does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import World
from support.fake_bucket import FakeBucket
from support.faulty_proxy import Damage, FaultyProxy, Reset, Short, Stale, Status

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.errors import ConflictError, DeltackptError, FormatError, StoreError
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import MemoryStore, open_store
from deltackpt.store.doctor import diagnose
from deltackpt.store.remote import RemoteStore
from deltackpt.store.retry import RetryPolicy
from deltackpt.store.s3 import S3Driver
from deltackpt.verify import verify_repository
from tests.store.conftest import BUCKET

pytestmark = pytest.mark.stores

BRIEF = RetryPolicy(total=0.5, silence=2.0, first=0.01, most=0.1)


@pytest.fixture(params=["s3", "hub"])
def url(request: pytest.FixtureRequest, root: str) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3_url"))
    request.getfixturevalue("hub")
    return f"hf://buckets/someone/{root}/prefix"


def same(world: World, path: str, step: str) -> bool:
    tree = {str(p.relative_to(path)): p.read_bytes() for p in Path(path).rglob("*") if p.is_file()}
    return tree == world.trees[step]


def test_a_chain_goes_round(tmp_path: Path, url: str) -> None:
    world = World(tmp_path, url)
    world.run(2)
    repo = world.repo
    assert [step.step for step in repo.log()] == [1, 0]
    assert same(world, apply(repo, tmp_path / "one", 1).path, repo.find(1).id)
    apply_to_cache(repo, tmp_path / "cache", 1)
    world.run(1)
    apply_to_cache(world.repo, tmp_path / "cache")
    path, link = open_current(tmp_path / "cache")
    assert link.step == 2
    assert same(world, str(path), link.id)
    assert verify_repository(world.repo).ok


def test_doctor_tells_the_two_apart(url: str) -> None:
    found = diagnose(open_store(url))
    assert found.ok, found
    swaps = url.startswith("s3://")
    assert {check.name: check.claimed for check in found.checks} == {
        **dict.fromkeys(("write", "list", "delete", "range", "clock"), True),
        **dict.fromkeys(("create-only", "compare-and-swap"), swaps),
    }
    assert bool(found.not_guaranteed) != swaps
    assert not list(open_store(url).list(""))


# Damage


@pytest.fixture
def proxy(s3_environment: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_environment).serve() as proxy:
        yield proxy


def repository(proxy: FaultyProxy, root: str, identity: str) -> Repository:
    """The same repository, seen through the proxy."""
    import s3fs

    from deltackpt.store.s3 import options

    fs = s3fs.S3FileSystem(endpoint_url=proxy.url, skip_instance_cache=True, **options(BRIEF))
    return Repository(RemoteStore(S3Driver(fs, BUCKET, BRIEF), f"s3://{BUCKET}/{root}", root, retry=BRIEF), identity)


def test_no_fault_shows_a_reader_anything_but_a_whole_step(
    tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")  # as with a service that sends none
    world = World(tmp_path, s3_url)
    world.run(2)
    apply_to_cache(world.repo, tmp_path / "cache")
    before = open_current(tmp_path / "cache")
    world.run(2)
    repo = repository(proxy, root, world.repo.id)
    faults: list[tuple[Any, type[DeltackptError], int]] = [
        (Damage(40, xor=1), DeltackptError, 99),
        (Damage(64, 64), DeltackptError, 99),
        (Short(10), StoreError, 99),
        (Reset(), StoreError, 9999),
        (Status(403), StoreError, 99),
    ]
    for kind in ("patches", "states", "steps", "refs"):
        for fault, error, times in faults:
            if isinstance(fault, Short | Reset) and kind != "patches":
                continue  # they take all of our patience
            repo.manifests.cache.clear()
            repo.states.clear()
            proxy.calm()
            proxy.fail(fault, "GET", f"/{kind}/", times)
            with pytest.raises((error, FormatError)):
                apply_to_cache(repo, tmp_path / "cache")
            assert open_current(tmp_path / "cache") == before
            if kind != "patches":
                continue
            with pytest.raises((error, FormatError)):
                apply(repo, tmp_path / "out")
            assert not (tmp_path / "out").exists()
    proxy.calm()
    apply_to_cache(repo, tmp_path / "cache")
    path, link = open_current(tmp_path / "cache")
    assert same(world, str(path), link.id)


def test_a_stale_listing_hides_no_step(tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy) -> None:
    world = World(tmp_path, s3_url)
    world.run(1)
    repo = repository(proxy, root, world.repo.id)
    assert len(repo.steps()) == 1
    world.run(2)
    proxy.fail(Stale(), "GET", "list-type=2", times=99)
    assert repo.find().step == 2
    assert same(world, apply(repo, tmp_path / "out").path, repo.find().id)


# Two writers where there is no compare-and-swap


def test_a_fork_is_reported(tmp_path: Path, hub: FakeBucket, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"hf://buckets/someone/{root}"
    World(tmp_path / "first", url).run(1)
    together = threading.Barrier(2)
    put = RemoteStore.put

    def slow(store: RemoteStore, name: str, chunks: Any) -> Any:
        if name.startswith("steps/"):
            together.wait(timeout=20)  # neither manifest was there when the other writer looked
        written = put(store, name, chunks)
        if name.startswith("steps/"):
            together.wait(timeout=20)  # both are, before either ref moves
        return written

    monkeypatch.setattr(RemoteStore, "put", slow)
    codes: list[str] = []

    def run(i: int) -> None:
        world = World(tmp_path / str(i), url)
        world.count = i + 1
        try:
            world.publish({"w": ("U8", (4,), bytes([i] * 4))})
            codes.append("published")
        except ConflictError as error:
            codes.append(error.code)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "published" not in codes
    assert set(codes) <= {"ref-forked", "ref-moved"}
    assert "ref-forked" in codes
    assert verify_repository(Repository.open(url)).ok


def test_memory_stores_have_compare_and_swap_and_list_nothing(tmp_path: Path) -> None:
    """The price of looking for forks is paid only where it is needed."""

    class Counted(MemoryStore):
        lists = 0

        def list(self, prefix: str) -> Any:
            self.lists += prefix.startswith("steps/")
            return super().list(prefix)

    from deltackpt.store import memory

    store = memory._named["counted"] = Counted("counted")
    world = World(tmp_path, "memory://counted")
    world.run(1)  # which asks whether a ref was lost
    store.lists = 0
    world.run(2)
    memory._named.pop("counted")
    assert store.lists == 0
