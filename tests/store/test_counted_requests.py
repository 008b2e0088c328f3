"""What following and mirroring ask of real clients and servers, counted in requests; never in seconds."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chains import World, next_state, small_state, still_chain
from support.fake_bucket import PAGE, FakeBucket
from support.faulty_proxy import FaultyProxy
from support.states import make_checkpoint, tree

from deltackpt.cache import apply_to_cache
from deltackpt.compaction.packs import make_packs, plan_packs
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.repository.writer_lease import writer_lease
from deltackpt.store import MemoryStore, open_store
from deltackpt.store.hub import PAUSE, open_bucket
from deltackpt.store.remote import RemoteStore
from deltackpt.store.s3 import S3Driver
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.poller import RefPoller, poll_interval
from deltackpt.sync.transfer import Transfer
from deltackpt.verification import verify_repository
from tests.store.conftest import BUCKET, QUICK

pytestmark = pytest.mark.stores

FOLLOWERS = 64
WINDOW = 300  # seconds of the Hub's limits
CALLS, RESOLVES = 1_000, 5_000  # what a free account may ask for in one


@pytest.fixture
def proxy(s3_environment: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_environment).serve() as proxy:
        yield proxy


def proxied(proxy: FaultyProxy, root: str) -> Repository:
    import s3fs

    from deltackpt.store.s3 import options

    fs = s3fs.S3FileSystem(endpoint_url=proxy.url, skip_instance_cache=True, **options(QUICK))
    return Repository.at(RemoteStore(S3Driver(fs, BUCKET, QUICK), f"s3://{BUCKET}/{root}", root, retry=QUICK))


def test_a_look_at_s3_is_one_conditional_get(
    tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy, s3: Any
) -> None:
    world = World(tmp_path, s3_url)
    world.run(2)
    repo = proxied(proxy, root)
    poller = RefPoller(repo, "main")
    assert poller.poll() is not None
    proxy.requests.clear()
    for n in range(5):
        assert poller.poll() is None
        assert [(m, p.split("?")[0]) for _, m, p in proxy.requests] == [("GET", f"/{BUCKET}/{root}/refs/main.json")] * (
            n + 1
        )
    world.run(1)
    proxy.requests.clear()
    found = poller.poll()
    assert found is not None
    assert found.link.step == 2
    assert len(proxy.requests) == 1


def asked(proxy: FaultyProxy, root: str) -> list[str]:
    """Method and kind of object of each request, in order of arrival."""
    found = []
    for _, method, path in proxy.requests:
        name = path.split("?")[0].removeprefix(f"/{BUCKET}/{root}/")
        found.append(f"{method} {name.partition('/')[0]}")
    proxy.requests.clear()
    return found


def small_steps(tmp_path: Path) -> list[Path]:
    state, dirs = small_state(), []
    for step in range(5):
        dirs.append(make_checkpoint(tmp_path / f"step-{step}", state))
        state = {k: v for k, v in next_state(state, step + 1).items() if k in state}
    return dirs


def test_a_small_step_of_a_writer_that_stays_open_is_five_requests(
    tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy, s3: Any
) -> None:
    dirs = small_steps(tmp_path)
    write(dirs[0], s3_url)
    writer = proxied(proxy, root)
    with writer_lease(writer):
        for step in range(1, 5):
            proxy.requests.clear()
            write(dirs[step], writer, base=dirs[step - 1], anchor=AnchorPolicy(ratio=float("inf")), threads=1)
            published = asked(proxy, root)
    assert published[0] == "GET refs"
    assert sorted(published[1:3]) == ["PUT patches", "PUT states"]
    assert published[3:] == ["PUT steps", "PUT refs"]
    assert asked(proxy, root) == ["DELETE leases"]


def test_a_small_step_is_nine_requests_to_publish_and_four_to_follow(
    tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy, s3: Any
) -> None:
    dirs = small_steps(tmp_path)
    write(dirs[0], s3_url)
    writer = proxied(proxy, root)
    follower = Follower(proxied(proxy, root), tmp_path / "cache", FollowOptions(threads=1))
    for step in range(1, 5):
        proxy.requests.clear()
        write(dirs[step], writer, base=dirs[step - 1], anchor=AnchorPolicy(ratio=float("inf")), threads=1)
        published = asked(proxy, root)
        done = follower.catch_up()
        assert done is not None
        assert tree(Path(done.path)) == tree(dirs[step])
        follower.acknowledge(done)
        followed = asked(proxy, root)
    assert published[:4] == ["GET refs", "PUT leases", "GET gc.json", "HEAD steps"]
    assert sorted(published[4:6]) == ["PUT patches", "PUT states"]
    assert published[6:] == ["PUT steps", "PUT refs", "DELETE leases"]
    assert followed[:2] == ["GET refs", "GET steps"]
    assert sorted(followed[2:]) == ["GET patches", "GET states"]
    assert [info.name for info in writer.store.list("leases/")] == []


def calls(hub: FakeBucket) -> Counter[str]:
    """Requests by what the Hub limits: `resolve`, and all else of its API; those to its storage are not counted."""
    kinds: Counter[str] = Counter()
    for method, path in hub.requests:
        if path.startswith("/storage/"):
            continue
        kind = "resolve" if "/resolve/" in path else "tree" if "/tree" in path else "api"
        kinds[f"{kind} {method}" if kind == "resolve" else kind] += 1
    hub.requests.clear()
    return kinds


def test_a_bucket_follower_stays_inside_the_limits(tmp_path: Path, hub: FakeBucket, root: str) -> None:
    url = f"hf://buckets/someone/{root}"
    world = World(tmp_path, url)
    world.run(3)
    repo = Repository.at(open_bucket(f"buckets/someone/{root}", QUICK))
    follower = Follower(repo, tmp_path / "cache", FollowOptions(poll=0.1, threads=1))
    assert poll_interval(repo, 0.1) == PAUSE
    assert follower.catch_up() is not None
    poller = RefPoller(repo, "main")
    poller.poll()
    calls(hub)
    for _ in range(5):
        assert poller.poll() is None
    looks = calls(hub)
    assert looks == {"resolve HEAD": 5}
    for _ in range(3):
        world.run(1)
        calls(hub)
        ref = poller.poll()
        assert ref is not None
        assert follower._move(ref.link) is not None
        move = calls(hub)
        assert set(move) <= {"resolve HEAD", "resolve GET"}, "no tree, no listing, no API"
        assert tree(tmp_path / "cache" / "current") == world.trees[ref.link.id]
    # 64 of them, and a step a minute
    resolves = sum(move.values()) * WINDOW / 60 + WINDOW / PAUSE
    assert resolves * FOLLOWERS < RESOLVES
    assert not list(repo.store.list("leases/"))


@pytest.mark.parametrize("behind", [2, 5])
def test_a_bucket_follower_that_is_behind_lists_once(tmp_path: Path, hub: FakeBucket, root: str, behind: int) -> None:
    world = World(tmp_path, f"hf://buckets/someone/{root}")
    world.run(2)
    repo = Repository.at(open_bucket(f"buckets/someone/{root}", QUICK))
    follower = Follower(repo, tmp_path / "cache", FollowOptions(threads=1))
    follower.catch_up()
    world.run(behind)
    calls(hub)
    done = follower.catch_up()
    assert done is not None
    assert done.behind == behind
    assert calls(hub)["tree"] <= 1


def test_small_objects_go_to_a_bucket_in_batches(tmp_path: Path, hub: FakeBucket, root: str) -> None:
    world = World(tmp_path)
    world.run(30)
    target = open_bucket(f"buckets/someone/{root}", QUICK)
    done = Mirror(world.repo, Transfer(world.repo.store, target, folder=tmp_path / "spool")).run()
    asked = Counter(re.sub(r"^/api/buckets/[^/]+/[^/]+/?", "", p.split("?")[0]).split("/")[0] for m, p in hub.requests)
    assert done.steps == 30
    assert done.objects > 60
    assert asked["batch"] < 12, asked
    assert sum(asked.values()) < 90, asked
    assert verify_repository(Repository.open(f"hf://buckets/someone/{root}"), threads=1).ok
    back = MemoryStore()
    Mirror(Repository.at(target), Transfer(target, back, folder=tmp_path / "spool")).run()
    names = {i.name for i in world.repo.store.list("")}
    assert {i.name for i in back.list("")} == names


def test_a_batch_in_which_something_failed_is_a_failure(tmp_path: Path, hub: FakeBucket, root: str) -> None:
    from deltackpt.errors import StoreError

    world = World(tmp_path)
    world.run(3)
    target = open_bucket(f"buckets/someone/{root}", QUICK)
    name = next(i.name for i in world.repo.store.list("patches/"))
    hub.refuse[f"{root.partition('/')[2]}/{name}"] = "no"
    mirror = Mirror(world.repo, Transfer(world.repo.store, target, folder=tmp_path / "spool"))
    with pytest.raises(StoreError, match="store-refused"):
        mirror.run()
    assert not list(target.list("steps/"))
    hub.refuse.clear()
    assert mirror.run().steps == 3


def test_between_s3_and_a_bucket(tmp_path: Path, s3_url: str, hub: FakeBucket, root: str) -> None:
    world = World(tmp_path, s3_url)
    world.run(4)
    target = open_bucket(f"buckets/someone/{root}", QUICK)
    assert Mirror(world.repo, Transfer(world.repo.store, target, folder=tmp_path / "spool")).run().steps == 4
    world.run(1)
    assert Mirror(world.repo, Transfer(world.repo.store, target, folder=tmp_path / "spool")).run().steps == 1
    world.check(world.repo.find(), Repository.at(target))


def packed(tmp_path: Path, steps: int) -> Repository:
    repo, _ = still_chain(tmp_path, steps, folds=True)
    make_packs(repo, plan_packs(repo))
    return repo


def test_a_late_reader_of_s3_asks_for_packs(tmp_path: Path, s3_url: str, root: str, proxy: FaultyProxy) -> None:
    origin = packed(tmp_path, 120)
    Mirror(origin, Transfer(origin.store, open_store(s3_url), folder=tmp_path / "spool")).run()
    apply_to_cache(Repository.open(s3_url), tmp_path / "cache", 0, threads=1)
    proxy.requests.clear()
    assert apply_to_cache(proxied(proxy, root), tmp_path / "cache", threads=1).step == 120
    kinds = Counter(asked(proxy, root))
    assert kinds["GET packs"] == 1
    assert sum(kinds.values()) <= 24, kinds


def test_a_late_follower_of_a_bucket_asks_for_packs(tmp_path: Path, hub: FakeBucket, root: str) -> None:
    origin = packed(tmp_path, 60)
    target = open_bucket(f"buckets/someone/{root}", QUICK)
    Mirror(origin, Transfer(origin.store, target, folder=tmp_path / "spool")).run()
    repo = Repository.at(open_bucket(f"buckets/someone/{root}", QUICK))
    apply_to_cache(repo, tmp_path / "cache", 0, threads=1)
    follower = Follower(
        Repository.at(open_bucket(f"buckets/someone/{root}", QUICK)), tmp_path / "cache", FollowOptions()
    )
    calls(hub)
    done = follower.catch_up()
    assert done is not None
    assert (done.step, done.behind) == (60, 60)
    kinds = calls(hub)
    assert kinds["tree"] <= -(-(61 + 7) // PAGE) + 3, kinds  # steps, edges and packs, each listed once
    assert kinds["resolve GET"] <= 16, kinds
