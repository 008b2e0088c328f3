"""Repositories for the chain manager's tests: small states published step by step, and what every step was
remembered.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.format.edge import Edge
from deltackpt.format.layout import Layout
from deltackpt.format.manifest import Counts, File, Link, Manifest
from deltackpt.publish.write import AnchorPolicy, WriteResult, write
from deltackpt.repository import Repository
from deltackpt.restore.materialize import apply
from deltackpt.store import MemoryStore
from support.states import State, Value, changed, make_checkpoint, tree

NEVER = AnchorPolicy(ratio=float("inf"))
NOW = AnchorPolicy(now=True)
LAYOUT = Layout((), ()).encode()
HASH = hashlib.sha256(b"anything").hexdigest()


def small_state(seed: int = 0, rows: int = 40) -> State:
    rng = np.random.default_rng(seed)
    data = rng.standard_normal((rows, 64), np.float32).view(np.uint16)[:, 1::2].copy()  # upper halves: bf16
    return {"w": ("BF16", (rows, 64), data.tobytes()), "b": ("F32", (8,), bytes(32)), "s": ("I64", (), bytes(8))}


def next_state(state: State, seed: int, share: float = 0.03) -> State:
    rng = np.random.default_rng((7, seed))
    new = dict(state)
    new["w"] = changed(rng, state["w"], share)
    if seed % 3 == 0:
        new["b"] = changed(rng, state["b"], 0.5)
    if seed % 7 == 3:
        name = f"extra{seed % 2}"
        if name in new:
            del new[name]
        else:
            new[name] = _whole(rng, seed)
    return new


def _whole(rng: np.random.Generator, seed: int) -> Value:
    return "U8", (5 + seed % 3,), rng.integers(0, 256, 5 + seed % 3, np.uint8).tobytes()


class World:
    """A repository, the directories that were published, and the state that every step must restore to."""

    def __init__(self, root: Path, url: str | Path | None = None) -> None:
        self.root = root
        self.url = url or root / "repo"
        self.states: dict[str, State] = {}
        self.trees: dict[str, dict[str, bytes]] = {}
        self.count = 0
        self.writer: Repository | None = None  # one that is kept open, where there is one

    @property
    def repo(self) -> Repository:
        return Repository.open(self.url)

    def publish(self, state: State, **options: Any) -> WriteResult:
        options.setdefault("anchor", NEVER)
        path = self.root / "in"
        shutil.rmtree(path, ignore_errors=True)
        make_checkpoint(path, state, side={"config.json": b"{}" if self.count % 5 else b'{"a":1}'})
        self.count += 1
        done = write(path, self.writer or self.url, threads=1, **options)
        self.states[done.id], self.trees[done.id] = state, tree(path)
        return done

    def run(self, steps: int, **options: Any) -> list[Link]:
        """Publish so many steps, each changed from the one before; -> all of the branch so far."""
        head = Repository.open_or_create(self.url).ref(options.get("ref", "main"))
        state = self.states[head.link.id] if head else small_state()
        for _ in range(steps):
            if head is not None or self.count:
                state = next_state(state, self.count)
            self.publish(state, **options)
        return [m.link for m in self.repo.log(options.get("ref", "main"))][::-1]

    def check(self, link: Link, repo: Repository | None = None) -> None:
        """The step restores bit for bit."""
        out = self.root / "out"
        shutil.rmtree(out, ignore_errors=True)
        done = apply(repo or self.repo, out, f"{link.step}-{link.id}", threads=1)
        assert done.id == link.id
        assert tree(out) == self.trees[link.id]


def bare_chain(
    steps: int,
    *,
    begin: int = 0,
    anchor_every: int = 100,
    patch: int = 1_000,
    whole: int = 50_000,
    store: Any = None,
    payloads: bool = False,
) -> tuple[Repository, list[Link]]:
    """A repository of manifests alone, as large as wanted: what no payload is read for can be tried on it.

    With ``begin`` it goes on where one of so many steps ended; with ``payloads`` there is something under every name.
    """
    store = store or MemoryStore()
    repo = Repository(store, "ab" * 16)
    head = repo.ref() if begin else None
    if head is None:
        store.put("deltackpt.json", [b'{"format":"deltackpt","repository":"%s","version":1}' % (b"ab" * 16)])
        if payloads:
            store.put(f"states/00000000-{HASH[:12]}/layout.json", [LAYOUT])
    links: list[Link] = [head.link] if head else []
    state = repo.load(head.link).state if head else ""
    for step in range(begin, steps):
        anchored = step % anchor_every == 0
        manifest = Manifest(
            repository=repo.id,
            step=step,
            parent=links[-1] if links else None,
            base=state if links else None,
            state=(state := hashlib.sha256(b"%d" % step).hexdigest()),
            anchor=(File(f"anchors/{step:08d}-{HASH[:12]}/model.safetensors", whole, HASH),) if anchored else None,
            patch=(File(f"patches/{step:08d}-{HASH[:12]}/part-00001.safetensors", patch, HASH),) if links else None,
            layout=File(f"states/00000000-{HASH[:12]}/layout.json", len(LAYOUT), hashlib.sha256(LAYOUT).hexdigest()),
            digests=File(f"states/{step:08d}-{HASH[:12]}/digests.safetensors", 10, HASH),
            counts=Counts(0, 0, 1, 10, 1),
            time=step,
            producer="tests",
        )
        raw = manifest.encode()
        links.append(manifest.link)
        store.put(links[-1].name, [raw])
        if payloads:
            for file in (*(manifest.anchor or ()), *(manifest.patch or ()), manifest.digests):
                store.put(file.name, [bytes(file.size)])
    repo.move_ref("main", head, links[-1])
    return repo, links


def still_chain(root: Path, steps: int, *, folds: bool = False) -> tuple[Repository, list[Link]]:
    """A repository in memory whose first step is an anchor, and in whose other ``steps`` nothing changes.

    Any reader can follow it over thousands of steps, and reads no patch. With ``folds`` it has as many edges as
    `compact --levels` makes.
    """
    store = MemoryStore()
    repo = Repository.at_or_create(store)
    write(make_checkpoint(root / "first", small_state()), repo, threads=1)
    link = repo.find()
    first, links = repo.load(link), [link]
    for step in range(1, steps + 1):
        state = {"parent": links[-1], "base": first.state, "step": step, "anchor": None, "patch": (), "time": step}
        counts = Counts(0, 0, 0, first.counts.elements, 0)
        links.append(publish_bare(repo, replace(first, **state, counts=counts)))
        for level in (8, 64, 512):
            if folds and step % level == 0:
                repo.put_edge(Edge(repo.id, links[step - level], links[step], (), "tests", step))
    repo.move_ref("main", repo.ref(), links[-1])
    repo.manifests.cache.clear()
    return repo, links


def publish_bare(repo: Repository, step: Manifest) -> Link:
    """Put a manifest, and move no ref."""
    repo.store.put(step.link.name, [step.encode()])
    return step.link
