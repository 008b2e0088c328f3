"""A signed repository in which an attacker changes objects by hand: what is there, and what he can do with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltackpt.compaction.fold import fold, write_anchor
from deltackpt.compaction.packs import make_packs, plan_packs
from deltackpt.format.canonical import dumps
from deltackpt.format.manifest import Link
from deltackpt.repository import Ref, Repository
from deltackpt.repository.sign_records import publish_keys
from deltackpt.signing.keys import PrivateKey
from deltackpt.store import MemoryStore
from deltackpt.store.memory import named
from support.signed import keys_of, reader, signed_world

Objects = dict[str, bytes]


def objects_of(repo: Repository) -> Objects:
    """All that the store holds but leases."""
    store = repo.store
    return {info.name: store.get(info.name, 1 << 30) for info in store.list("") if not info.name.startswith("leases/")}


def store_of(url: str, objects: Objects) -> MemoryStore:
    """A store at the place ``url`` that holds these."""
    made = MemoryStore(url.removeprefix("memory://"))
    made._objects = {name: (raw, 0.0) for name, raw in objects.items()}
    return made


class Scene:
    """Branch main with a signed rewind (steps 2 and 3 were left behind), branch dev, tag best, a fold, a later anchor,
    packs, two key sets; and a reader who has seen all of it. ``objects`` are the attacker's to change."""

    def __init__(self, root: Path, key: PrivateKey, second: PrivateKey) -> None:
        self.key, self.second, self.mallory = key, second, PrivateKey.generate()
        self.url = f"memory://{root.name}-{id(self)}"
        self.world = world = signed_world(root, self.url, key)
        assert world.writer is not None
        self.left_behind = world.run(4)[2:]
        world.publish(world.states[world.repo.find(1).id], resume_from=1)
        self.main = world.run(3)
        self.dev = world.run(4, ref="dev")
        self.best = world.repo.find(1)
        world.writer.put_tag("best", self.best)
        fold(world.writer, self.main[0], self.main[3], threads=1)
        write_anchor(world.writer, self.main[2], threads=1)
        make_packs(world.writer, plan_packs(world.writer))
        self.trusted = keys_of(key)
        publish_keys(world.repo, self.trusted, [key])
        publish_keys(world.repo, keys_of(key, second), [key])
        self.objects = objects_of(world.repo)
        repo = reader(named(self.url.removeprefix("memory://")), self.trusted)
        self.right = {ask: repo.find(ask) for ask in ("latest", "best", "2")}
        self.identity = repo.id

    def reader(self) -> Repository:
        """Who has seen all of it, at the store as it is now."""
        return reader(store_of(self.url, self.objects), self.trusted)

    def names(self, folder: str, part: str = "") -> list[str]:
        """Objects below a folder."""
        return sorted(name for name in self.objects if name.startswith(folder) and part in name)

    def signatures(self, link: Link) -> list[str]:
        """The objects of a record's signatures, oldest first."""
        return self.names(f"signatures/{link.step:08d}-{link.id}/")

    def state(self, link: Link, what: str) -> str:
        """The object of a step's ``layout`` or ``digests``."""
        return str(getattr(self.world.repo.load(link), what).name)

    def point(self, link: Link, name: str = "refs/main") -> None:
        """Move a branch or tag."""
        self.objects[f"{name}.json"] = Ref.to("x", link).raw

    def copy_signatures(self, of: Link, to: Link) -> None:
        """Under another record, and their own."""
        for name in self.signatures(of):
            self.objects[f"signatures/{to.step:08d}-{to.id}/{name.rpartition('/')[2]}"] = self.objects[name]

    def edit(self, name: str, change: Callable[[Any], object], to: str | None = None) -> None:
        """The JSON of an object, changed, in canonical form."""
        value = json.loads(self.objects[name])
        change(value)
        self.objects[to or name] = dumps(value)

    def swap(self, a: str, b: str) -> None:
        """Two objects change places."""
        self.objects[a], self.objects[b] = self.objects[b], self.objects[a]

    def forge_manifest(self, link: Link, **fields: Any) -> Link:
        """A step with other fields, put under its own id."""
        new = replace(self.world.repo.load(link), **fields)
        self.objects[new.link.name] = new.encode()
        return new.link
