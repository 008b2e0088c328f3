"""What a reader that asks for signatures takes, and what it refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.chains import World
from support.signed import keys_of, memory, reader, signed_world, statement

from deltackpt.cache import apply_to_cache
from deltackpt.compaction.fold import fold, write_anchor
from deltackpt.errors import ChainError, ConflictError, DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.format.signature import KeySet, Statement
from deltackpt.publish.write import write
from deltackpt.report.inspection import inspect_step
from deltackpt.report.layers import read_tables
from deltackpt.repository import Ref, Repository
from deltackpt.repository.sign_records import newest_keys, publish_keys, sign_records
from deltackpt.repository.signatures import put_signature, read_signatures
from deltackpt.restore.materialize import apply
from deltackpt.restore.selected import apply_tensors
from deltackpt.restore.source import RepositorySource
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.policy import TrustPolicy
from deltackpt.verification import verify_repository

KEY, OTHER, THIRD = (PrivateKey.generate() for _ in range(3))
TRUSTED = keys_of(KEY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return signed_world(tmp_path, tmp_path / "repo", KEY)


def refused(code: str, repo: Repository, *, ref: str = "main") -> None:
    with pytest.raises(DeltackptError) as caught:
        repo.find("latest", ref)
    assert caught.value.code == code, caught.value


def move(repo: Repository, link: Link, ref: str = "main") -> None:
    """The attacker's own way to move a branch."""
    raw = Ref.to(ref, link).raw
    repo.store.delete(f"refs/{ref}.json")
    repo.store.put(f"refs/{ref}.json", [raw])


def test_signed_steps_are_read_and_unsigned_ones_are_not(world: World, tmp_path: Path) -> None:
    links = world.run(3)
    repo = reader(world.repo, TRUSTED)
    world.check(links[2], repo)
    world.check(links[1], repo)
    refused("signature-missing", reader(world.repo, keys_of(OTHER)))
    world.writer = None
    world.run(1)
    refused("signature-missing", reader(world.repo, TRUSTED))
    with pytest.raises(ChainError, match="signature-missing"):
        apply(reader(world.repo, TRUSTED), tmp_path / "no", 3)
    assert not (tmp_path / "no").exists()
    world.check(links[2], reader(world.repo, TRUSTED))  # by its number and id it is still there


def test_an_unsigned_repository_has_no_object_more_and_a_signed_one_is_read_by_all(world: World) -> None:
    world.run(2)
    names = {info.name.partition("/")[0] for info in world.repo.store.list("")}
    plain = World(world.root / "plain")
    plain.root.mkdir()
    plain.run(2)
    assert names - {info.name.partition("/")[0] for info in plain.repo.store.list("")} == {"signatures"}
    assert world.repo.find("latest").step == 1
    assert verify_repository(world.repo, threads=1).ok


def test_an_older_step_is_not_taken_for_a_newer_one(world: World) -> None:
    links = world.run(4)
    repo = reader(world.repo, TRUSTED)
    assert repo.find("latest") == links[3]
    move(repo, links[1])
    refused("signature-replayed", reader(world.repo, TRUSTED))
    move(repo, links[3])
    assert reader(world.repo, TRUSTED).find("latest") == links[3]
    assert reader(world.repo, TRUSTED).find(1) == links[1]


def test_a_signed_rewind_is_followed_and_an_unsigned_one_is_not(world: World) -> None:
    links = world.run(4)
    assert reader(world.repo, TRUSTED).find("latest") == links[3]
    state = world.states[links[1].id]
    world.publish(state, resume_from=1)
    after = world.repo.ref()
    assert after is not None
    assert after.link.step == 2
    assert reader(world.repo, TRUSTED).find("latest") == after.link
    world.run(2)  # the rewind lies between what was seen and what is there
    assert reader(world.repo, TRUSTED).find("latest").step == 4


def test_a_writer_that_was_fooled_cannot_take_a_branch_back(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store shows an older branch to a writer without memory: what it signs follows from there, and is refused."""
    links = world.run(4)
    assert reader(world.repo, TRUSTED).find("latest") == links[3]
    move(world.repo, links[1])
    with memory(monkeypatch, tmp_path / "other"):
        world.writer = Repository.open(world.url).secure(sign=KEY)
        world.run(3)
    refused("rewind-unsigned", reader(world.repo, TRUSTED))


def test_a_signer_does_not_go_on_from_where_it_did_not_leave_the_branch(world: World) -> None:
    links = world.run(4)
    move(world.repo, links[1])
    world.writer = Repository.open(world.url).secure(sign=KEY)
    with pytest.raises(ConflictError, match="sign-behind"):
        world.run(1)
    assert world.repo.find("latest") == links[1]
    assert world.writer.signer is not None
    with pytest.raises(ConflictError, match="sign-behind"):
        sign_records(world.writer, world.writer.signer, ["latest"])
    world.writer.signer.forget("refs/main")
    world.run(1)
    assert world.repo.find("latest").step == 2


def test_a_writer_that_died_before_its_branch_moved_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statement is in the store, and the branch is where it was before: nothing has to be forgotten."""
    links = world.run(2)
    assert world.writer is not None

    def dies(name: str, old: bytes | None, new: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as inner:
        inner.setattr(world.writer.store, "swap", dies)
        with pytest.raises(KeyboardInterrupt):
            world.run(1)
    assert reader(world.repo, TRUSTED).find("latest") == links[1]
    for writer in (world.writer, Repository.open(world.url).secure(sign=KEY)):  # the same process, and the next one
        world.writer = writer
        world.run(1)
    assert reader(world.repo, TRUSTED).find("latest").step == 3
    times = [one.statement.time for m in world.repo.log() for one in read_signatures(world.repo.store, m.link)]
    assert len(times) == 4
    assert times == sorted(times, reverse=True)


def test_another_host_may_go_on(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run(2)
    here = world.writer
    with memory(monkeypatch, tmp_path / "other"):
        world.writer = Repository.open(world.url).secure(sign=KEY)
        world.run(2)
    world.writer = here
    world.run(2)
    assert reader(world.repo, TRUSTED).find("latest").step == 5


def test_a_branch_that_nobody_confirms_is_stale(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    links = world.run(2)
    policy = TrustPolicy(TRUSTED, max_age=1000)
    repo = reader(world.repo, policy)
    assert repo.find("latest") == links[1]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2000)
    refused("signature-stale", repo)  # also one that was read a moment ago
    with pytest.raises(ChainError, match="signature-stale"):
        repo.check_again("main")
    refused("signature-stale", reader(world.repo, policy))
    assert world.writer is not None
    assert world.writer.signer is not None
    monkeypatch.setattr(time, "time_ns", lambda: int((now + 2000) * 1e9))
    sign_records(world.writer, world.writer.signer, ["latest"])
    assert repo.find("latest") == links[1]
    repo.check_again("main")
    monkeypatch.setattr(time, "time", lambda: now - 5000)  # a clock that is wrong the other way
    refused("signature-stale", reader(world.repo, policy))


def test_statements_about_something_else_count_for_nothing(world: World) -> None:
    links = world.run(3)
    repo = reader(world.repo, TRUSTED)
    world.writer = None
    forged = world.run(1)[-1]
    good = Statement(repo.id, "refs/main", forged, links[2], time.time_ns() // 1000)
    false = (
        statement(OTHER, good),
        statement(OTHER, good, key=KEY.public),
        statement(KEY, replace(good, repository="ab" * 16)),
        statement(KEY, replace(good, ref="refs/dev")),
        statement(KEY, replace(good, ref="tags/main")),
        statement(KEY, replace(good, ref=None)),
    )
    for number, one in enumerate(false):
        put_signature(repo.store, replace(one, statement=replace(one.statement, time=good.time + 100 + number)))
        refused("signature-missing", repo)
    for number, one in enumerate(false):
        later = replace(one.statement, time=good.time + 200 + number)
        by = KEY if number > 1 else OTHER
        put_signature(repo.store, statement(by, later, key=KEY.public if number == 1 else None))
        refused("signature-missing", repo)
    put_signature(repo.store, statement(KEY, replace(good, time=good.time + 9)))
    assert repo.find("latest") == forged


def test_signatures_of_other_names_and_forms_are_passed_over(world: World) -> None:
    links = world.run(2)
    store = world.repo.store
    folder = f"signatures/{links[1].step:08d}-{links[1].id}/"
    right = next(iter(store.list(folder)))
    raw = store.get(right.name, 1 << 20)
    for number, other in enumerate(
        (b"", b"{}", raw + b" ", raw[:-1], raw.replace(b'"version":1', b'"version":2'), raw)
    ):
        store.put(f"{folder}{KEY.public[:16]}-{9 * 10**15 + number:016d}.json", [other])
    store.put(f"{folder}x.json", [raw])
    assert len(list(read_signatures(store, links[1]))) == 1
    assert reader(world.repo, TRUSTED).find("latest") == links[1]


def test_more_than_one_signer(world: World) -> None:
    links = world.run(2)
    both = keys_of(KEY, OTHER, THIRD, threshold=2)
    refused("signature-missing", reader(world.repo, both))
    second = Repository.open(world.url).secure(sign=OTHER)
    assert second.signer is not None
    sign_records(second, second.signer, ["latest", "0"])
    repo = reader(world.repo, both)
    assert repo.find("latest") == links[1]
    assert repo.find(0) == links[0]
    for _ in range(2):  # two statements of one key are one signer
        assert world.writer is not None
        assert world.writer.signer is not None
        world.run(1)
        sign_records(world.writer, world.writer.signer, ["latest"])
        refused("signature-missing", reader(world.repo, both))


def test_what_was_asked_for_stays(world: World) -> None:
    """A repository that asks for signatures, and is told to sign, still asks."""
    world.run(1)
    repo = reader(world.repo, keys_of(OTHER)).secure(sign=KEY)
    assert repo.trust is not None
    assert repo.signer is not None
    refused("signature-missing", repo.secure())


def test_a_tag_does_not_grow_old(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    links = world.run(1)
    assert world.writer is not None
    world.writer.put_tag("best", links[0])
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2000)
    repo = reader(world.repo, TrustPolicy(TRUSTED, max_age=1000))
    assert repo.find("best") == links[0]
    refused("signature-stale", repo)


def test_tags(world: World) -> None:
    links = world.run(3)
    assert world.writer is not None
    world.writer.put_tag("best", links[1])
    repo = reader(world.repo, TRUSTED)
    assert repo.find("best") == links[1]
    store = world.repo.store
    store.delete("tags/best.json")
    store.put("tags/best.json", [Ref.to("best", links[2]).raw])
    with pytest.raises(ChainError, match="signature-missing"):
        reader(world.repo, TRUSTED).find("best")
    store.delete("tags/best.json")
    world.writer.put_tag("best", links[2])
    assert reader(world.repo, TRUSTED).find("best") == links[2]
    store.delete("tags/best.json")
    store.put("tags/best.json", [Ref.to("best", links[1]).raw])
    with pytest.raises(ChainError, match="signature-replayed"):
        reader(world.repo, TRUSTED).find("best")


def test_folds_and_later_anchors_are_used_where_they_are_signed(world: World) -> None:
    links = world.run(6)
    fold(world.repo, links[0], links[5], threads=1)
    write_anchor(world.repo, links[3], threads=1)
    assert len(world.repo.edges()) == 2
    assert len(reader(world.repo, TRUSTED).edges()) == 0
    report = verify_repository(reader(world.repo, TRUSTED), threads=1)
    assert {found.code for found in report.findings} == {"signature-missing"}
    assert len(report.findings) == 2
    assert world.writer is not None
    assert world.writer.signer is not None
    sign_records(world.writer, world.writer.signer, ["latest"], edges=True)
    repo = reader(world.repo, TRUSTED)
    assert len(repo.edges()) == 2
    assert len(repo.resolve(links[5]).patches) < 5
    world.check(links[5], repo)
    assert verify_repository(repo, threads=1).ok


def test_a_writer_that_signs_signs_its_edges(world: World) -> None:
    links = world.run(5)
    assert world.writer is not None
    fold(world.writer, links[0], links[4], threads=1)
    assert len(reader(world.repo, TRUSTED).edges()) == 1


def test_an_anchor_is_hashed_before_it_is_used(world: World, tmp_path: Path) -> None:
    """The digests of tensors withstand no forger: with signatures, sha256 decides over every byte."""
    links = world.run(1)
    repo = reader(world.repo, TRUSTED)
    [file] = repo.load(links[0]).anchor or ()
    path = tmp_path / "repo" / file.name
    raw = bytearray(path.read_bytes())
    path.chmod(0o644)
    at = raw.index(b"__metadata__") if b"__metadata__" in raw[:200] else 8  # in the header: no tensor's byte
    raw[at] ^= 1
    path.write_bytes(bytes(raw))
    with pytest.raises(DeltackptError, match="object-hash"):
        apply(repo, tmp_path / "out")


def test_ranges_of_a_part_are_of_a_part_that_was_hashed(world: World) -> None:
    """What a rank reads by ranges has only checksums of its own, which a forger can make."""
    links = world.run(2)
    repo = reader(world.repo, TRUSTED)
    [file] = repo.load(links[1]).patch or ()
    source, whole = RepositorySource(repo), world.repo.read(file, 1 << 30)
    assert source.ranges(file, [(8, 20), (3, 3)]) == [whole[8:20], b""]
    path = Path(world.url) / file.name
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert RepositorySource(world.repo).ranges(file, [(8, 20)]) == [whole[8:20]]
    with pytest.raises(DeltackptError, match="object-hash"):
        RepositorySource(repo).ranges(file, [(8, 20)])


def test_single_tensors_and_tables_are_of_parts_that_were_hashed(world: World, tmp_path: Path) -> None:
    """Of those who read little of a part: a byte that they do not look at counts as well."""
    links = world.run(2)
    repo = reader(world.repo, TRUSTED)
    [file] = repo.load(links[1]).patch or ()
    whole = world.repo.read(file, 1 << 30)
    path = Path(world.url) / file.name
    path.chmod(0o644)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    apply_tensors(world.repo, tmp_path / "plain", ["s"])
    read_tables(world.repo, repo.load(links[1]), {})
    for look in (
        lambda: apply_tensors(repo, tmp_path / "out", ["s"]),
        lambda: read_tables(repo, repo.load(links[1]), {}),
        lambda: inspect_step(repo, 1),
    ):
        with pytest.raises(DeltackptError, match="object-hash"):
            look()
    assert not (tmp_path / "out").exists()
    path.write_bytes(whole)
    apply_tensors(repo, tmp_path / "out", ["s", "w"])


def test_a_cache_that_was_filled_without_signatures_is_built_anew(world: World, tmp_path: Path) -> None:
    world.run(3)
    apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    done = apply_to_cache(reader(world.repo, TRUSTED), tmp_path / "cache", threads=1)
    assert done.rebuilt is not None
    assert "no signature" in done.rebuilt
    world.run(1)
    done = apply_to_cache(reader(world.repo, TRUSTED), tmp_path / "cache", threads=1)
    assert done.rebuilt is None
    assert done.anchor is None
    apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    assert apply_to_cache(reader(world.repo, TRUSTED), tmp_path / "cache", threads=1).rebuilt is not None


def test_another_repository_of_the_same_signer_is_not_taken(world: World, tmp_path: Path) -> None:
    world.run(2)
    assert reader(world.repo, TRUSTED).find("latest").step == 1
    (tmp_path / "two").mkdir()
    signed_world(tmp_path / "two", tmp_path / "two" / "repo", KEY).run(3)
    (tmp_path / "repo").rename(tmp_path / "away")
    (tmp_path / "two" / "repo").rename(tmp_path / "repo")
    with pytest.raises(ChainError, match="repository-replaced"):
        reader(Repository.open(tmp_path / "repo"), TRUSTED)
    with pytest.raises(ChainError, match="repository-replaced"):
        reader(Repository.open(tmp_path / "away"), replace(TRUSTED, repository="ab" * 16))


def test_first_use(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    links = world.run(2)
    first = TrustPolicy(None)
    assert reader(world.repo, first).find("latest") == links[1]
    assert "trusted on first use" in caplog.text
    world.writer = Repository.open(world.url).secure(sign=OTHER)
    world.run(1)
    refused("signature-missing", reader(world.repo, first))


def test_first_use_of_what_nobody_or_many_have_signed(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run(1)
    refused("signature-missing", reader(world.repo, TrustPolicy(None)))
    for key in (KEY, OTHER):
        repo = Repository.open(world.url).secure(sign=key)
        assert repo.signer is not None
        sign_records(repo, repo.signer, ["latest"])
    refused("first-use-unclear", reader(world.repo, TrustPolicy(None)))


def test_keys_are_rotated_and_revoked(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    links = world.run(2)
    repo = world.repo
    publish_keys(repo, keys_of(KEY, OTHER), [KEY])
    assert reader(repo, TRUSTED).find("latest") == links[1]
    world.writer = Repository.open(world.url).secure(sign=OTHER)
    world.run(1)
    assert reader(repo, TRUSTED).find("latest").step == 2
    with pytest.raises(ChainError, match="keys-wrong"):
        publish_keys(repo, keys_of(THIRD), [THIRD])
    publish_keys(repo, keys_of(OTHER), [OTHER])  # KEY is revoked, for what it signed too
    assert reader(repo, TRUSTED).find("latest").step == 2
    with pytest.raises(ChainError, match="signature-missing"):
        reader(repo, TRUSTED).find(0)
    assert world.writer.signer is not None
    sign_records(world.writer, world.writer.signer, [], whole=True)
    assert reader(repo, TRUSTED).find(0) == links[0]
    found = newest_keys(repo)
    assert found is not None
    assert found.keys.number == 2
    repo.store.delete("keys/00000002.json")  # a revocation is not forgotten
    sign_records(Repository.open(world.url), (Repository.open(world.url).secure(sign=KEY)).signer, ["1"])  # type: ignore[arg-type]
    with memory(monkeypatch, tmp_path / "newcomer"):
        assert reader(repo, TRUSTED).find(1) == links[1]
    refused_keys = reader(repo, TRUSTED)
    assert refused_keys.trust is not None
    assert refused_keys.trust.keys().number == 2


def test_a_damaged_key_set_is_a_finding_also_where_it_is_believed_already(world: World) -> None:
    world.run(2)
    repo = world.repo
    publish_keys(repo, keys_of(OTHER), [KEY, OTHER])
    sign_records(Repository.open(world.url), Repository.open(world.url).secure(sign=OTHER).signer, [], whole=True)  # type: ignore[arg-type]
    assert verify_repository(reader(repo, TRUSTED)).ok
    path = Path(world.url) / "keys" / "00000001.json"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    [finding] = verify_repository(reader(repo, TRUSTED)).findings
    assert finding.where.startswith(f"{repo.store.url}/keys/00000001.json")


def test_key_sets_of_somebody_else(world: World) -> None:
    world.run(1)
    repo = world.repo
    publish_keys(repo, keys_of(OTHER), [OTHER])
    refused("keys-wrong", reader(repo, TRUSTED))


def test_key_sets_that_expired(world: World) -> None:
    world.run(1)
    publish_keys(world.repo, KeySet(None, 0, (KEY.public,), 1, int(time.time()) - 5), [KEY])
    refused("keys-expired", reader(world.repo, TRUSTED))
    publish_keys(world.repo, KeySet(None, 0, (KEY.public,), 1, int(time.time()) + 5000), [KEY])
    assert reader(world.repo, TRUSTED).find("latest").step == 0


def test_the_writer_asks_for_signatures_too(world: World) -> None:
    world.run(1)
    world.writer = None
    world.run(1)
    path = world.root / "in"
    with pytest.raises(ChainError, match="signature-missing"):
        write(path, Repository.open(world.url).secure(TrustPolicy(TRUSTED), sign=KEY))
