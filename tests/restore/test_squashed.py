"""A cache that is several steps behind: the chain is read once, and each element that differs is written once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.chains import World, next_state, small_state
from support.states import tree

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.patch import many
from deltackpt.repository import Repository
from deltackpt.restore.journal import Journal
from deltackpt.store import LocalStore


class Counted(LocalStore):
    """Not local, as far as a reader sees; counts what is read whole."""

    capabilities = LocalStore.capabilities.__class__(**{**vars(LocalStore.capabilities), "local": False})

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.whole: list[str] = []

    def read(self, name: str, chunk: int = 1 << 20):  # type: ignore[no-untyped-def]
        self.whole.append(name)
        return super().read(name, chunk)

    def local_path(self, name: str) -> Path | None:
        self.stat(name)
        return None


def changes(world: World, first: str, last: str) -> int:
    """Bytes of the elements that differ between two steps of one shape."""
    total = 0
    for name, (dtype, _, data) in world.states[last].items():
        width = {"BF16": 2, "F32": 4, "I64": 8, "U8": 1}[dtype]
        old, new = (np.frombuffer(d, f"u{width}") for d in (world.states[first][name][2], data))
        total += int((old != new).sum()) * width
    return total


@pytest.fixture(params=["each", "runs"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go through the patches by themselves, as where there are few, or by runs."""
    if request.param == "runs":
        monkeypatch.setattr(many, "MANY", 0)


@pytest.mark.usefixtures("way")
def test_each_changed_element_is_written_once(tmp_path: Path) -> None:
    world = World(tmp_path)
    state = small_state(rows=400)
    links = []
    for n in range(12):
        done = world.publish(state)
        links.append(done.id)
        state = next_state({k: v for k, v in state.items() if k in ("w", "b", "s")}, 7 * n + 1)
        state = {k: v for k, v in state.items() if k in ("w", "b", "s")}
    repo = Repository.at(Counted(tmp_path / "repo"))
    for step in (0, 1):
        apply_to_cache(repo, tmp_path / "cache", step, threads=1)
    store = repo.store
    assert isinstance(store, Counted)
    store.whole.clear()
    before = written(tmp_path / "cache")
    done = apply_to_cache(repo, tmp_path / "cache", threads=1)
    assert (done.patches, done.anchor) == (10, None)
    patches = [f.name for step in range(2, 12) for f in repo.load(repo.find(step)).patch or ()]
    assert sorted(n for n in store.whole if "/part-" in n) == sorted(patches)
    dense = 8 * 4  # the bias: most of it changed, so all of it is written
    assert changes(world, links[1], links[-1]) <= written(tmp_path / "cache")
    assert written(tmp_path / "cache") <= changes(world, links[1], links[-1]) + dense
    side = len(b"{}")  # the config, which changed too
    assert done.written == written(tmp_path / "cache") + before + side  # the other slot was a step further back
    path, _ = open_current(tmp_path / "cache")
    assert tree(path) == world.trees[links[-1]]


def written(cache: Path) -> int:
    """Bytes of elements in the journal: what the last move wrote, once a tensor."""
    journal = Journal.read(cache / "journal")
    assert journal is not None
    assert all(len(journal.of(i)) <= 1 for i in range(3))
    return sum(record.values.nbytes for i in range(3) for record in journal.of(i))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("behind", range(1, 9))
def test_any_number_of_steps_of_any_kind(tmp_path: Path, behind: int) -> None:
    """Tensors come and go on the way: then there is another way than merging."""
    world = World(tmp_path)
    links = world.run(12)
    apply_to_cache(world.repo, tmp_path / "cache", 0, threads=1)
    for step in range(1, 12, behind):
        done = apply_to_cache(world.repo, tmp_path / "cache", step, threads=1)
        path, link = open_current(tmp_path / "cache")
        assert (link.step, done.id) == (step, links[step].id)
        assert tree(path) == world.trees[link.id]
