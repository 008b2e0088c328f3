"""What stores answer, and what a gc, a mirror and a writer do, is what fixtures/conduct says."""

import json
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import fsspec
import pytest
from support.faulty_store import FaultyStore
from support.vectors import FIXTURES, code_of, name_of, of_kind, restore, tree

from deltackpt.collector.retention import Policy
from deltackpt.collector.sweep import plan_gc
from deltackpt.publish.write import write
from deltackpt.repository import Repository
from deltackpt.store import LocalStore, MemoryStore
from deltackpt.store.fsspec_store import FsspecDriver
from deltackpt.store.remote import RemoteStore
from deltackpt.sync.mirror import Mirror
from deltackpt.sync.transfer import Transfer

STORES = {
    "memory": lambda root: MemoryStore("here"),
    "local": LocalStore,
    "remote": lambda root: RemoteStore(
        FsspecDriver(fsspec.filesystem("memory", skip_instance_cache=True)), f"fsspec:/{root}", f"{root}"
    ),
}
OWN = ("leases/", "gc.json")  # of the process itself, which takes them away


def files_of(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stored(store):
    return {i.name: store.get(i.name, 1 << 30) for i in store.list("") if not i.name.startswith(OWN)}


# A store


def hexed(value):
    return None if value is None else bytes.fromhex(value)


ANSWERS = {
    "put": lambda store, name, data: store.put(name, [hexed(data)]) and None,
    "get": lambda store, name, limit: store.get(name, limit).hex(),
    "read": lambda store, name: b"".join(store.read(name)).hex(),
    "get_range": lambda store, name, start, length: store.get_range(name, start, length).hex(),
    "stat": lambda store, name: store.stat(name).size,
    "list": lambda store, name: [info.name for info in store.list(name)],
    "delete": lambda store, name: store.delete(name),
    "swap": lambda store, name, old, new: store.swap(name, hexed(old), hexed(new)),
}


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("vector", of_kind("store"), ids=name_of)
def test_a_store(vector, kind, tmp_path):
    store = STORES[kind](tmp_path / "root")
    for request in json.loads((FIXTURES / vector["path"]).read_bytes()):
        given = {k: v for k, v in request.items() if k not in ("do", "answer", "error")}
        answers = []
        code = code_of(lambda: answers.append(ANSWERS[request["do"]](store, **given)))  # noqa: B023
        assert code == request.get("error"), request
        assert answers == ([] if code else [request.get("answer")]), request


# A gc


@pytest.mark.parametrize("vector", of_kind("gc"), ids=name_of)
def test_a_gc(vector):
    clock, ages = [0.0], vector["ages"]
    store = MemoryStore("here", clock=lambda: clock[0])
    objects = files_of(FIXTURES / vector["path"])
    for name, data in objects.items():
        fitting = [start for start in ages if name.startswith(start)]
        clock[0] = vector["now"] - (ages[max(fitting, key=len)] if fitting else 86_400)
        store.put(name, [data])
    clock[0], watched = float(vector["now"]), FaultyStore(store)
    repo = Repository.at(watched)
    code = code_of(lambda: plan_gc(repo, Policy(**vector["policy"])).execute(repo))
    assert code == vector.get("error")
    left = {info.name for info in store.list("")}
    assert sorted(objects.keys() - left) == vector.get("removed", [])
    assert all(store.get(name, 1 << 30) == objects[name] for name in left if name in objects)
    gone = [name for do, name in watched.changes if do == "delete" and name != "gc.json"]
    steps = [name for name in gone if name.startswith("steps/")]
    assert steps == sorted(steps, reverse=True)  # [S-GC-3]
    assert gone[: len(steps)] == steps


# A mirror


@pytest.mark.parametrize("vector", of_kind("mirror"), ids=name_of)
def test_a_mirror(vector, tmp_path):
    folder = shutil.copytree(FIXTURES / vector["path"], tmp_path / "both")
    source, copy = LocalStore(folder / "source"), LocalStore(folder / "copy")
    before = files_of(folder / "copy") if (folder / "copy").exists() else {}
    transfer = Transfer(source, copy, jobs=1, folder=tmp_path / "spool")
    code = code_of(lambda: Mirror(Repository.at(source), transfer).run())
    assert code == vector.get("error")
    after = stored(copy)
    if code is None:
        assert after == stored(source)
    else:
        assert before.items() <= after.items()
        assert {n for n in after if n.startswith("refs/")} == {n for n in before if n.startswith("refs/")}


# A writer


class Meanwhile(FaultyStore):
    """Another process writes just before a manifest is put."""

    others: dict[str, bytes]

    def put(self, name, chunks):
        if name.startswith("steps/"):
            for other, data in self.others.items():
                self.inner.swap(other, self.inner.get(other, 1 << 20), data)
            self.others = {}
        return super().put(name, chunks)


PLACES = ("deltackpt.json", "leases", "patches", "anchors", "states", "steps", "refs")


@pytest.mark.parametrize("vector", of_kind("write"), ids=name_of)
def test_a_writer(vector, tmp_path):
    folder = shutil.copytree(FIXTURES / vector["path"], tmp_path / "all")
    inner = MemoryStore("here")
    before = files_of(folder / "store") if (folder / "store").exists() else {}
    for name, data in before.items():
        inner.put(name, [data])
    store = Meanwhile(inner)
    store.others = {name: bytes.fromhex(data) for name, data in vector["meanwhile"].items()}
    others, request, made = dict(store.others), dict(vector["request"]), []
    number, ref = request.pop("step", None), request.pop("ref", "main")

    def publish():
        repo = Repository.at_or_create(store)
        made.append(write(folder / "checkpoint", repo, step=number, ref=ref, **request))

    assert code_of(publish) == vector.get("error")
    after, mine = stored(inner), f"refs/{ref}.json"
    assert {n: d for n, d in after.items() if n in before and n != mine}.items() == {
        n: d for n, d in before.items() if n != mine
    }.items()
    if "error" in vector:
        assert after.get(mine) == others.get(mine, before.get(mine))
        return
    order = [name.partition("/")[0] for do, name in store.changes if do != "delete" and not name.startswith("leases/")]
    assert order[-2:] == ["steps", "refs"]  # [S-PUB-1]
    assert order.count("steps") == 1
    with tempfile.TemporaryDirectory() as out:
        target = LocalStore(Path(out) / "repository")
        for name, data in after.items():
            target.put(name, [data])
        link = json.loads(after[mine])
        restore(Path(out) / "repository", f"{link['step']}-{link['id'][:12]}", Path(out) / "out")
        assert tree(Path(out) / "out") == tree(folder / "checkpoint")


def test_every_kind_is_here():
    count = defaultdict(int)
    for vector in of_kind("store", "gc", "mirror", "write"):
        count[vector["kind"]] += 1
    assert min(count.values()) >= 8
    assert len(count) == 4
