"""Signatures where repositories are published to, collected, copied and followed."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from support.chains import World
from support.signed import keys_of, memory, reader, signed_world

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import collect
from deltackpt.compaction.fold import fold
from deltackpt.errors import ChainError, DeltackptError, UsageError
from deltackpt.repository import Ref, Repository
from deltackpt.repository.sign_records import publish_keys, sign_records
from deltackpt.repository.signatures import signed_id
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.policy import TrustPolicy
from deltackpt.store import LocalStore
from deltackpt.sync.follow import Follower, FollowOptions
from deltackpt.sync.mirror import Mirror, mirror
from deltackpt.sync.transfer import Transfer

KEY, OTHER = PrivateKey.generate(), PrivateKey.generate()
TRUSTED = keys_of(KEY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return signed_world(tmp_path, tmp_path / "repo", KEY)


def signatures(repo: Repository) -> set[str]:
    """The ids of the records that are signed."""
    return {found for info in repo.store.list("signatures/") if (found := signed_id(info.name))}


def test_the_signature_is_there_before_the_branch_moves(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(1)
    swap, moved = LocalStore.swap, []

    def seen(store: LocalStore, name: str, old: bytes | None, new: bytes) -> None:
        if name.startswith("refs/"):
            at = Repository.at(store).parse_ref("main", new).link
            moved.append(at.id in signatures(Repository.at(store)))
        swap(store, name, old, new)

    monkeypatch.setattr(LocalStore, "swap", seen)
    world.run(2)
    assert moved == [True, True]


def test_a_key_that_fails_publishes_nothing(world: World) -> None:
    links = world.run(1)
    world.writer = Repository.open(world.url).secure(sign="command:false")
    with pytest.raises(UsageError, match="sign-key"):
        world.run(1)
    assert world.repo.find("latest") == links[0]


def test_gc_keeps_signatures_of_what_stays_and_removes_others(world: World) -> None:
    links = world.run(6)
    assert world.writer is not None
    publish_keys(world.repo, keys_of(KEY), [KEY])
    fold(world.writer, links[0], links[5], threads=1)
    before = signatures(world.repo)
    assert {link.id for link in links} < before
    assert len(before) == 7
    collect(world.repo, Policy(last=1, grace=0))
    left = {link.id for link in world.repo.steps()}
    assert links[5].id in left
    assert links[2].id not in left
    edges = {name[-69:-5] for name in world.repo.edges().names}
    assert signatures(world.repo) == left | edges
    assert edges
    world.check(links[5], reader(world.repo, TRUSTED))


def test_a_mirror_carries_signatures_and_keys(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(3)
    publish_keys(world.repo, keys_of(KEY, OTHER), [KEY])
    copy = tmp_path / "copy"
    mirror(world.url, copy, trust=TrustPolicy(TRUSTED))
    ours = {info.name for info in world.repo.store.list("") if not info.name.startswith("leases/")}
    assert {info.name for info in Repository.open(copy).store.list("")} == ours
    with memory(monkeypatch, tmp_path / "newcomer"):
        world.check(world.run(0)[-1], reader(Repository.open(copy), TRUSTED))
    work = Mirror(world.repo, Transfer(world.repo.store, LocalStore(copy)))
    work.run()
    world.run(1)
    work.run()
    second = Repository.open(world.url).secure(sign=OTHER)
    assert second.signer is not None
    sign_records(second, second.signer, ["latest"])
    assert work.copy_signatures() == 1  # of a second signer, who came later
    both = keys_of(KEY, OTHER, threshold=2)
    with memory(monkeypatch, tmp_path / "another"):
        publish_keys(world.repo, both, [KEY, OTHER])
        work.copy_signatures()
        assert reader(Repository.open(copy), TRUSTED).find("latest").step == 3


def test_a_mirror_copies_no_branch_that_nobody_signed(world: World, tmp_path: Path) -> None:
    links = world.run(2)
    copy = tmp_path / "copy"
    mirror(world.url, copy, trust=TrustPolicy(TRUSTED))
    world.writer = None
    world.run(1)
    with pytest.raises(ChainError, match="signature-missing"):
        mirror(world.url, copy, trust=TrustPolicy(TRUSTED))
    assert Repository.open(copy).find("latest") == links[1]


def test_a_follower_keeps_what_it_holds_and_goes_on_when_it_is_signed(world: World, tmp_path: Path) -> None:
    links = world.run(2)
    told: list[str] = []
    stop = Event()

    def failed(error: DeltackptError, wait: float) -> None:
        told.append(error.code)
        assert follower.catch_up_to_nothing()  # type: ignore[attr-defined]

    class Once(Follower):
        def catch_up_to_nothing(self) -> bool:
            """While it waits, somebody signs."""
            current = self._current()
            second = Repository.open(world.url).secure(sign=KEY)
            assert second.signer is not None
            assert current == links[1]
            sign_records(second, second.signer, ["latest"])
            return True

    repo = reader(Repository.open(world.url), TRUSTED)
    follower = Once(repo, tmp_path / "cache", FollowOptions(poll=0.01, threads=1), stop=stop, failed=failed)
    steps = []
    for switch in follower.switches():
        follower.acknowledge(switch)
        steps.append(switch.step)
        if len(steps) == 1:
            world.writer = None
            world.run(1)
        else:
            stop.set()
    assert steps == [1, 2]
    assert told[:1] == ["signature-missing"]


def test_a_follower_ends_where_the_branch_was_taken_back(world: World, tmp_path: Path) -> None:
    links = world.run(3)
    repo = reader(Repository.open(world.url), TRUSTED)
    follower = Follower(repo, tmp_path / "cache", FollowOptions(threads=1))
    assert follower.catch_up() is not None
    store = world.repo.store
    store.delete("refs/main.json")
    store.put("refs/main.json", [Ref.to("main", links[0]).raw])
    with pytest.raises(ChainError, match="signature-replayed"):
        follower.catch_up()
    assert follower._current() == links[2]
