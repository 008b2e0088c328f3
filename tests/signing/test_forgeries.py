"""10,000 forgeries, replays and mixes by one who can write to the store: a reader takes the signed step, or nothing."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.forgeries import ATTACKS, Attacker, Objects
from support.signed import keys_of, reader, signed_world
from support.signed_by_hand import objects_of, store_of
from support.states import tree

from deltackpt.compaction.fold import fold, write_anchor
from deltackpt.errors import DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.repository.sign_records import publish_keys
from deltackpt.restore.materialize import apply
from deltackpt.signing.keys import PrivateKey
from deltackpt.signing.memory import TrustMemory
from deltackpt.store.memory import named

KEY = PrivateKey.generate()
TRUSTED = keys_of(KEY)


class Scene:
    """A repository with two branches, a tag, edges and keys, all of it signed, and a reader who has seen all of it."""

    def __init__(self, root: Path) -> None:
        url = f"memory://{root.name}-{id(self)}"
        self.world = world = signed_world(root, url, KEY)
        assert world.writer is not None
        past = []
        for step in range(6):
            world.run(1)
            past.append(objects_of(world.repo))
            if step == 2:
                world.writer.put_tag("best", world.repo.find(1))
                world.run(1, ref="dev")
                publish_keys(world.repo, keys_of(KEY), [KEY])
        links = [m.link for m in world.repo.log()][::-1]
        fold(world.writer, links[0], links[4], threads=1)
        write_anchor(world.writer, links[3], threads=1)
        self.past = [*past, objects_of(world.repo)]
        (root / "other").mkdir()
        other = signed_world(root / "other", f"{url}-other", KEY)
        other.run(3)
        self.attacker = Attacker(self.past, objects_of(other.repo), KEY.public, world.repo.id)
        self.url = url
        repo = reader(named(url.removeprefix("memory://")), TRUSTED)
        self.head, self.tag, self.numbered = repo.find("latest"), repo.find("best"), repo.find(2)
        self.memory = TrustMemory(repo.id)
        self.signed = {*links, self.head, self.tag}

    def takes(self, objects: Objects, ask: str) -> Link | None:
        """What the reader takes; None where it refuses."""
        try:
            repo = reader(store_of(self.url, objects), TRUSTED)
            return repo.find(ask)
        except DeltackptError:
            return None

    def restores(self, objects: Objects, out: Path) -> bool:
        """Whether the newest step is restored; it then is what was published."""
        shutil.rmtree(out, ignore_errors=True)
        try:
            done = apply(reader(store_of(self.url, objects), TRUSTED), out, threads=1)
        except DeltackptError:
            assert not out.exists()
            return False
        assert done.id == self.head.id
        assert tree(out) == self.world.trees[self.head.id]
        return True

    def run(self, seeds: range, out: Path, *, apply_every: int) -> Counter[str]:
        """-> how often it was refused, or went well since the attack had not touched what is asked for."""
        before = self.memory.seen("refs/main"), self.memory.keys(TRUSTED)
        counts: Counter[str] = Counter()
        for seed in seeds:
            objects, what = self.attacker.attack(seed)
            for ask, right in (("latest", self.head), ("best", self.tag), ("2", self.numbered)):
                found = self.takes(objects, ask)
                assert found in (None, right), (seed, what, ask, found)
                counts["refused" if found is None else "right"] += 1
            if seed % apply_every == 0:
                counts["restored" if self.restores(objects, out) else "not restored"] += 1
        assert (self.memory.seen("refs/main"), self.memory.keys(TRUSTED)) == before
        return counts


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_none_of_some_hundred_is_taken(scene: Scene, tmp_path: Path) -> None:
    counts = scene.run(range(400), tmp_path / "out", apply_every=8)
    assert min(counts["refused"], counts["right"]) > 200, counts
    assert min(counts["restored"], counts["not restored"]) > 5, counts


@pytest.mark.heavy
def test_none_of_ten_thousand_is_taken(scene: Scene, tmp_path: Path) -> None:
    counts = scene.run(range(400, 10_400), tmp_path / "out", apply_every=10)
    assert min(counts["refused"], counts["right"]) > 5000, counts


def test_every_attack_alone_is_refused_or_in_vain(scene: Scene) -> None:
    """Each kind changes the store, so that none of them is tried in vain."""
    import random

    for one in ATTACKS:
        changed = 0
        for seed in range(6):
            objects = dict(scene.past[-1])
            one(scene.attacker, random.Random(seed), objects, PrivateKey.generate())
            changed += objects != scene.past[-1]
            assert scene.takes(objects, "latest") in (None, scene.head)
        assert changed, one.__name__
