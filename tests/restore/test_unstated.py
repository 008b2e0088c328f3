"""Steps whose writer saw no tensor whole: no xxh3 is stated, and every reader proves by the sums."""

import shutil

import pytest
from support.chains import NEVER, World, small_state
from support.states import make_checkpoint, tree
from support.vectors import refused
from support.vectors import second as the_second

from deltackpt.cache import apply_to_cache
from deltackpt.compaction.fold import fold, write_anchor
from deltackpt.errors import ChainError, FormatError
from deltackpt.format import digests as digests_format
from deltackpt.publish.write import write
from deltackpt.restore.materialize import apply
from deltackpt.verification import verify_checkpoint, verify_repository

second = the_second()


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Five steps without a single xxh3."""
    encode = digests_format.encode
    unstated = digests_format.UNSTATED
    monkeypatch.setattr(
        digests_format,
        "encode",
        lambda layout, digests: encode(layout, {n: d._replace(xxh3=unstated) for n, d in digests.items()}),
    )
    world = World(tmp_path)
    world.links = world.run(5)
    monkeypatch.undo()
    return world


def test_every_reader_takes_a_step_without_xxh3(world, tmp_path):
    repo, last = world.repo, world.links[-1]
    for link in world.links:
        world.check(link)
        second.restore(tmp_path / "repo", link.step, tmp_path / f"second{link.step}")
        assert tree(tmp_path / f"second{link.step}") == world.trees[link.id]
        apply_to_cache(repo, tmp_path / "cache", link.step, threads=1)
    assert tree(tmp_path / "cache" / "current") == world.trees[last.id]
    assert not verify_repository(repo, threads=1).findings
    assert not verify_checkpoint(tmp_path / "cache" / "current", repo, threads=1).findings
    fold(repo, world.links[1], last, threads=1)
    write_anchor(repo, world.links[2], threads=1)
    assert not verify_repository(repo, threads=1).findings
    state = small_state(9)  # the next writer has whole tensors, and states theirs
    write(make_checkpoint(tmp_path / "next", state), tmp_path / "repo", base=tmp_path / "cache" / "current")
    stated = repo.digests(repo.load(repo.ref().link))
    assert all(d.xxh3 != digests_format.UNSTATED for d in stated.values())


def test_damage_is_found_by_the_sums(world, tmp_path):
    repo = world.repo
    path = next((tmp_path / "repo").glob("anchors/*/model.safetensors"))
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)
    with pytest.raises(FormatError, match="object-hash"):  # the sums differ, so the anchor is looked at
        apply(repo, tmp_path / "out", 2, threads=1)
    assert refused(second.restore, tmp_path / "repo", 2, tmp_path / "second") == "object-hash"
    assert verify_repository(repo, threads=1).findings


def test_a_base_that_is_not_the_parent_is_found(world, tmp_path):
    apply(world.repo, tmp_path / "base", 4, threads=1)
    path = tmp_path / "base" / "model.safetensors"
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)
    new = make_checkpoint(tmp_path / "new", small_state(9))
    with pytest.raises(ChainError, match="base-differs"):
        write(new, tmp_path / "repo", base=tmp_path / "base", anchor=NEVER)
    shutil.rmtree(tmp_path / "base")
