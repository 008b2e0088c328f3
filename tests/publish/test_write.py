"""Publishing: what is refused publishes nothing, and what fails or dies leaves the old step as the latest."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest
from support.faulty_store import Died, FaultyStore
from support.states import State, changed, make_checkpoint, mutate, random_bytes, random_state, tree

from deltackpt.errors import (
    ChainError,
    CheckpointError,
    ConflictError,
    DeltackptError,
    FormatError,
    NoSpaceError,
    StoreError,
    UsageError,
)
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import PartReader
from deltackpt.publish import step as step_module
from deltackpt.publish import write as write_module
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository
from deltackpt.repository import repository as repository_module
from deltackpt.restore.materialize import apply
from deltackpt.store import MemoryStore, open_store

NEVER = AnchorPolicy(ratio=float("inf"))
SIDE = {"config.json": b'{"a": 1}\n', "tokenizer/vocab.txt": b"a\nb\n"}


class World:
    """A few checkpoint directories, one step apart, and a repository that holds the first two."""

    def __init__(self, root: Path, url: str | Path) -> None:
        rng = np.random.default_rng(0)
        state = random_state(rng)
        states = [state, *(s for _, s in zip(range(4), mutate(rng, state), strict=False))]
        sides = [SIDE, SIDE, {**SIDE, "config.json": b"{}"}, SIDE, SIDE]
        self.root, self.url, self.states = root, url, states
        self.dirs = [
            make_checkpoint(root / f"step{i}", s, shards=2, side=side)
            for i, (s, side) in enumerate(zip(states, sides, strict=True))
        ]
        for i in range(2):
            write(self.dirs[i], url, anchor=NEVER, threads=1)

    @property
    def repo(self) -> Repository:
        return Repository.open(self.url)

    def objects(self, store=None) -> set[str]:
        """All names, but for the leases of writers that died."""
        return {o.name for o in (store or open_store(self.url)).list("") if not o.name.startswith("leases/")}

    def check(self, step: int, directory: int | None = None) -> None:
        """The latest step is this one, and gives its directory back."""
        out = self.root / uuid4().hex
        assert apply(self.repo, out, threads=1).step == step
        assert tree(out) == tree(self.dirs[step if directory is None else directory])


@pytest.fixture
def world(tmp_path):
    return World(tmp_path, f"memory://{uuid4().hex}")


@pytest.fixture
def on_disk(tmp_path):
    return World(tmp_path, tmp_path / "repo")


def refused(kind, world, call) -> str:
    """The code of the error; nothing is published, and the latest step is still there."""
    before = world.objects()
    with pytest.raises(kind) as error:
        call()
    assert world.objects() == before
    world.check(1)
    assert all((error.value.where, error.value.have, error.value.need))
    return error.value.code


# What a step says of itself


def test_the_first_step_is_an_anchor_and_the_next_ones_are_patches(world):
    first, second = world.repo.log()[::-1]
    assert (first.step, first.parent, first.base, first.patch) == (0, None, None, None)
    assert len(first.anchor) == 2
    assert (second.step, second.parent, second.base) == (1, first.link, first.state)
    assert second.anchor is None
    done = write(world.dirs[2], world.url, anchor=NEVER, metadata={"loss": "0.5", "n": [1, None]})
    third = world.repo.load(world.repo.find())
    assert (third.step, third.metadata) == (2, {"loss": "0.5", "n": [1, None]})
    assert (done.step, done.parent, done.id, done.state) == (2, 1, third.link.id, third.state)
    assert done.patch_bytes == sum(f.size for f in third.patch)


def test_the_counts_are_those_of_the_states(world):
    for i in (2, 3, 4):
        old, new = world.states[i - 1], world.states[i]
        done = write(world.dirs[i], world.url, anchor=NEVER)
        counts = world.repo.load(world.repo.find()).counts
        same = {n for n in old.keys() & new.keys() if old[n] == new[n]}
        assert counts.added == len(new.keys() - old.keys()) == done.tensors["added"]
        assert counts.removed == len(old.keys() - new.keys()) == done.tensors["removed"]
        assert counts.changed == len((old.keys() & new.keys()) - same) == done.tensors["changed"]
        elements = changes = 0
        for name, (dtype, shape, data) in new.items():
            words = np.frombuffer(data, f"<u{DTYPES[dtype].width}")
            elements += len(words)
            if name in old and old[name][:2] == (dtype, shape):
                changes += np.count_nonzero(words != np.frombuffer(old[name][2], words.dtype))
            else:
                changes += len(words)
        assert (counts.elements, counts.changed_elements) == (elements, changes)
        assert (done.elements, done.changed, done.density) == (elements, changes, changes / elements)


def test_an_unchanged_checkpoint_is_a_step_too(world):
    done = write(world.dirs[1], world.url)
    step = world.repo.load(world.repo.find())
    assert step.patch == ()
    assert (done.changed, done.density, done.patch_bytes, done.bits_per_change) == (0, 0.0, 0, None)
    assert step.state == step.base
    world.check(2, 1)


def test_step_numbers(world):
    assert write(world.dirs[2], world.url, step=70).step == 70
    assert write(world.dirs[3], world.url).step == 71
    assert [m.step for m in world.repo.log()] == [71, 70, 1, 0]


def test_side_files_are_stored_once(world):
    before = world.objects()
    write(world.dirs[2], world.url, anchor=NEVER)  # config.json differs, the rest does not
    new = world.objects() - before
    assert [name.rpartition("/")[2] for name in sorted(new) if "/side/" in name] == ["config.json"]


def test_strays_are_reported_and_left_out(world):
    (world.dirs[2] / "old.safetensors").write_bytes(b"stray")
    (world.dirs[2] / "optimizer.pt").write_bytes(b"pickle")
    done = write(world.dirs[2], world.url)
    assert [name for name, _ in done.left_out] == ["old.safetensors", "optimizer.pt"]
    assert not any("old.safetensors" in name or "optimizer" in name for name in world.objects())


@pytest.mark.parametrize("name", ["chat\u0085template.jinja", ".lock", ".tmp-1", "notes:v1.txt"])
def test_a_side_file_whose_name_no_store_takes_is_left_out(world, name):
    (world.dirs[2] / name).write_bytes(b"x")
    assert [left for left, _ in write(world.dirs[2], world.url).left_out] == [name]


# When it is an anchor


def test_anchor_policies(tmp_path):
    rng = np.random.default_rng(1)
    state: State = {"x": ("F32", (64, 64), random_bytes(rng, "F32", (64, 64)))}
    dirs = [make_checkpoint(tmp_path / "0", state)]
    for i in range(1, 7):
        state = {"x": changed(rng, state["x"], 0.5)}
        dirs.append(make_checkpoint(tmp_path / str(i), state))

    def anchored(policy: AnchorPolicy) -> list[bool]:
        url = f"memory://{uuid4().hex}"
        return [write(d, url, anchor=policy, threads=1).anchor for d in dirs]

    assert anchored(NEVER) == [True] + [False] * 6
    assert anchored(AnchorPolicy(now=True)) == [True] * 7
    assert anchored(replace(NEVER, every=3)) == [True, False, False, True, False, False, True]
    assert anchored(replace(NEVER, every=1)) == [True] * 7
    patches = [write(d, "memory://policy", anchor=NEVER, threads=1).patch_bytes for d in dirs]
    whole = (dirs[0] / "model.safetensors").stat().st_size
    expected, since = [], 0
    for patch in patches:
        since += patch
        expected.append(not expected or since > 1.2 * whole)
        since = 0 if expected[-1] else since
    assert anchored(AnchorPolicy(ratio=1.2)) == expected
    assert expected.count(True) > 1


# What the bytes depend on


def test_threads_and_the_base_change_nothing(world):
    """Parts differ in what they say of their parent, and in nothing else."""
    bodies = []
    for options in ({"threads": 1}, {"threads": 4}, {"threads": 3, "base": world.dirs[1]}):
        url = f"memory://{uuid4().hex}"
        for i in range(2):
            write(world.dirs[i], url, anchor=NEVER)
        done = write(world.dirs[2], url, anchor=NEVER, **options)
        repo = Repository.open(url)
        step = repo.load(repo.find())
        parts = [repo.read(file, 1 << 30) for file in step.patch]
        bodies.append((done.state, [raw[PartReader(memoryview(raw), "part").header.data_start :] for raw in parts]))
    assert bodies[0] == bodies[1] == bodies[2]


def test_a_patch_of_many_parts(world, monkeypatch):
    monkeypatch.setattr(step_module, "PART_BYTES", 100)
    write(world.dirs[2], world.url, anchor=NEVER)
    assert len(world.repo.load(world.repo.find()).patch) > 2
    world.check(2)


# A base that is not the parent


def test_a_base_of_another_step(world):
    for i in (0, 2, 3):
        call = lambda base=world.dirs[i]: write(world.dirs[2], world.url, base=base)  # noqa: E731
        assert refused(ChainError, world, call) == "base-differs"
    write(world.dirs[2], world.url, base=world.dirs[1])
    world.check(2)


def test_a_base_that_was_edited_by_one_bit(world):
    rng = np.random.default_rng(2)
    for shard in sorted(world.dirs[1].glob("*.safetensors")):
        good = shard.read_bytes()
        start = 8 + int.from_bytes(good[:8], "little")
        for at in (start, len(good) - 1, *rng.integers(start, len(good), 3).tolist()):
            damaged = bytearray(good)
            damaged[at] ^= 1 << int(rng.integers(8))
            shard.write_bytes(damaged)
            with pytest.raises(ChainError) as error:
                write(world.dirs[2], world.url, base=world.dirs[1])
            assert (error.value.code, error.value.exit_code) == ("base-differs", 4)
            assert error.value.where == str(world.dirs[1])
        shard.write_bytes(good)
    world.check(1)


def test_a_base_with_other_tensors(world):
    names = list(world.states[1])
    less, renamed, reshaped = dict(world.states[1]), dict(world.states[1]), dict(world.states[1])
    del less[names[0]]
    renamed["other"] = renamed.pop(names[0])
    name = next(n for n, (dtype, shape, _) in world.states[1].items() if dtype == "BF16" and len(shape) == 2)
    dtype, shape, data = reshaped[name]
    reshaped[name] = (dtype, shape[::-1], data)
    for i, state in enumerate((less, renamed, reshaped, {})):
        base = make_checkpoint(world.root / f"base{i}", state)
        assert refused(ChainError, world, lambda b=base: write(world.dirs[2], world.url, base=b)) == "base-differs"


def test_a_base_that_is_no_checkpoint(world):
    call = lambda: write(world.dirs[2], world.url, base=world.root / "nothing")  # noqa: E731
    assert refused(CheckpointError, world, call) == "checkpoint-missing"


def test_an_anchor_that_was_changed_is_not_written_on(on_disk):
    """Without a base, the old values come from the repository, and are proven as well."""
    (anchor,) = (p for p in (on_disk.root / "repo/anchors").rglob("*1-of-00002.safetensors"))
    good = anchor.read_bytes()
    anchor.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(FormatError) as error:
        write(on_disk.dirs[2], on_disk.url)
    assert (error.value.code, error.value.exit_code) == ("object-hash", 3)
    anchor.write_bytes(good)
    on_disk.check(1)


# Other calls that are refused


def test_a_step_that_is_not_after_the_last(world):
    for step in (0, 1):
        call = lambda s=step: write(world.dirs[2], world.url, step=s)  # noqa: E731
        assert refused(ConflictError, world, call) == "step-order"
    with pytest.raises(UsageError):
        write(world.dirs[2], f"memory://{uuid4().hex}", step=-1)


@pytest.mark.parametrize(
    "options", [{"step": 10**15 + 1}, {"metadata": {"x": "y" * (5 << 20)}}, {"metadata": {"x": 0.5}}]
)
def test_a_step_that_no_reader_would_take(world, options):
    refused(DeltackptError, world, lambda: write(world.dirs[2], world.url, **options))


def test_an_encoding_that_there_is_not(world):
    refused(UsageError, world, lambda: write(world.dirs[2], world.url, encoding="gzip"))


@pytest.mark.parametrize("ref", ["", "../x", "a/b", ".hidden", "x" * 101, "ä"])
def test_names_of_refs(world, ref):
    assert refused(UsageError, world, lambda: write(world.dirs[2], world.url, ref=ref)) == "ref-name"


def test_a_reserved_tensor_name(world):
    path = make_checkpoint(world.root / "reserved", {"deltackpt:x": ("U8", (1,), b"a")})
    assert refused(CheckpointError, world, lambda: write(path, world.url)) == "name-reserved"


def test_a_checkpoint_with_a_missing_shard(world):
    next(world.dirs[2].glob("*2-of-00002.safetensors")).unlink()
    assert refused(CheckpointError, world, lambda: write(world.dirs[2], world.url)) == "shard-missing"


def test_a_place_that_is_no_repository(world, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"x")
    with pytest.raises(ConflictError) as error:
        write(world.dirs[0], tmp_path / "other")
    assert error.value.code == "not-a-repository"
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["file"]


class Meddling:
    """A progress that does something once, in the middle of the work."""

    def __init__(self, action) -> None:
        self.action = action

    def start(self, what, total): ...

    def advance(self, count):
        action, self.action = self.action, None
        if action is not None:
            action()


def test_a_checkpoint_that_changes_while_it_is_read(world):
    shard = next(world.dirs[2].glob("*1-of-00002.safetensors"))

    def rewrite():
        copy = shard.with_suffix(".new")
        copy.write_bytes(shard.read_bytes())
        copy.replace(shard)

    call = lambda: write(world.dirs[2], world.url, progress=Meddling(rewrite))  # noqa: E731
    assert refused(CheckpointError, world, call) == "checkpoint-changed"


def test_an_interrupt(world):
    def interrupt():
        raise KeyboardInterrupt

    before = world.objects()
    with pytest.raises(KeyboardInterrupt):
        write(world.dirs[2], world.url, progress=Meddling(interrupt))
    assert world.objects() == before
    write(world.dirs[2], world.url)
    world.check(2)


# Somebody else publishes


def test_another_writer_was_faster(world, monkeypatch):
    """In between, while this writer works: its own step is refused, the other's stands, and nothing is lost."""
    inner = open_store(world.url)

    class Racing(FaultyStore):
        def swap(self, name, old, new):
            current[0] = inner
            write(world.dirs[3], world.url, step=5)
            super().swap(name, old, new)

    current = [Racing(inner)]
    opens(monkeypatch, lambda: current[0])
    with pytest.raises(ConflictError) as error:
        write(world.dirs[2], world.url, step=9)
    assert (error.value.code, error.value.exit_code) == ("ref-moved", 7)
    assert "step 5" in error.value.have
    assert "step 1" in error.value.need
    reachable = world.repo.log()
    assert [m.step for m in reachable] == [5, 1, 0]
    assert {f.name for m in reachable for f in m.files} <= world.objects()
    world.check(5, 3)
    write(world.dirs[2], world.url)  # and the refused step can be published after it
    world.check(6, 2)
    # What the loser left behind is a whole step or none: verify finds no manifest without its objects.
    for link in world.repo.steps():
        assert {f.name for f in world.repo.load(link).files} <= world.objects()


def test_two_first_writers(world, monkeypatch):
    url = f"memory://{uuid4().hex}"
    inner = open_store(url)

    class Racing(FaultyStore):
        def swap(self, name, old, new):
            current[0] = inner
            write(world.dirs[3], url)
            super().swap(name, old, new)

    current = [Racing(inner)]
    opens(monkeypatch, lambda: current[0])
    with pytest.raises(ConflictError) as error:
        write(world.dirs[2], url)
    assert error.value.code == "ref-moved"
    out = world.root / "out"
    apply(Repository.open(url), out)
    assert tree(out) == tree(world.dirs[3])


def test_branches_are_apart(world):
    write(world.dirs[0], world.url, ref="other")
    write(world.dirs[2], world.url, ref="other", step=1)
    assert [m.step for m in world.repo.log("other")] == [1, 0]
    world.check(1)
    assert len(world.repo.steps()) == 4


# A store that fails


def opens(patch, store):
    """Whatever URL is opened, it is this store."""
    for module in (repository_module, write_module):
        patch.setattr(module, "open_store", lambda url: store())


def dying(world, monkeypatch, k, when, **options):
    """Write the next step to a copy of the repository's store, which dies at its k-th change. -> (store, did it
    die?)
    """
    store = MemoryStore()
    store._objects = dict(open_store(world.url)._objects)
    faulty = FaultyStore(store, k, when=when)
    with monkeypatch.context() as patch:
        opens(patch, lambda: faulty)
        try:
            write(world.dirs[2], "x", threads=1, **options)
        except Died:
            return store, faulty
    return store, faulty


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("options", [{}, {"anchor": AnchorPolicy(now=True)}], ids=["patch", "anchor"])
def test_a_writer_that_dies_at_any_change_of_the_store(world, monkeypatch, when, options):
    monkeypatch.setattr(step_module, "PART_BYTES", 3000)
    _, whole = dying(world, monkeypatch, None, when, **options)
    (last,) = (i for i, (kind, _) in enumerate(whole.changes, 1) if kind == "swap")
    assert last >= 5
    assert whole.changes[last - 2][1].startswith("steps/")  # the manifest is put before the ref moves, and last
    for k in range(1, whole.operations + 1):
        store, faulty = dying(world, monkeypatch, k, when, **options)
        changes = [kind for kind, _ in faulty.changes]
        took_effect = "swap" in changes[: -1 if when == "before" else None]
        with monkeypatch.context() as patch:
            opens(patch, lambda s=store: s)
            world.check(2 if took_effect else 1)
            assert {f.name for m in world.repo.log() for f in m.files} <= world.objects(store)
            if not took_effect:
                write(world.dirs[2], "x", threads=1)  # the rerun publishes the very step
                world.check(2)
            write(world.dirs[3], "x", threads=1)
            world.check(3)


@pytest.mark.parametrize(
    "error", [StoreError("store-io", where="x", have="x", need="x"), KeyboardInterrupt()], ids=repr
)
@pytest.mark.parametrize("operation", ["put", "swap"])
def test_an_answer_that_is_lost(world, monkeypatch, error, operation):
    """The store did it, and the writer sees an error: what is published by then stays whole."""

    class Lossy(FaultyStore):
        def put(self, name, chunks):
            done = super().put(name, chunks)
            if operation == "put" and name.startswith("steps/"):
                raise error
            return done

        def swap(self, name, old, new):
            super().swap(name, old, new)
            if operation == "swap":
                raise error

    lossy = Lossy(open_store(world.url))
    with monkeypatch.context() as patch:
        opens(patch, lambda: lossy)
        with pytest.raises(type(error)):
            write(world.dirs[2], "x")
    assert {f.name for m in world.repo.log() for f in m.files} <= world.objects()
    world.check(2 if operation == "swap" else 1)
    write(world.dirs[3], world.url)
    world.check(3 if operation == "swap" else 2, 3)


def test_a_disk_that_fills(on_disk, monkeypatch):
    """At any of its writes: the error says so, and the old step and all of its bytes are still there."""
    writes = os.write
    before, left = tree(on_disk.root / "repo"), [0]

    def full(fd, data):
        if "/repo/" in os.readlink(f"/proc/self/fd/{fd}"):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writes(fd, data)

    monkeypatch.setattr(os, "write", full)
    failures = 0
    for allowed in (*range(6), *range(6, 400, 5)):
        left[0] = allowed
        try:
            write(on_disk.dirs[2], on_disk.url, threads=1)
            break
        except (NoSpaceError, StoreError) as error:
            assert (error.code, error.exit_code) == ("no-space", 9)
            failures += 1
        left[0] = 1 << 30
        now = {k: v for k, v in tree(on_disk.root / "repo").items() if not k.startswith("steps/")}
        assert {k: v for k, v in before.items() if not k.startswith("steps/")}.items() <= now.items()
        on_disk.check(1)
    assert failures > 5
    left[0] = 1 << 30
    on_disk.check(2)


# Odd checkpoints


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"empty": ("BF16", (0, 7), b"")},
        {"scalar": ("U8", (), b"a")},
        {"nibbles": ("F4", (2, 4), b"abcd"), "x": ("F6_E2M3", (4,), b"abc")},
        {"x" * 1024: ("I64", (64,), bytes(512))},
    ],
    ids=["no tensors", "empty", "scalar", "packed dtypes", "long name"],
)
@pytest.mark.parametrize("encoding", ["auto", "index"])
def test_odd_states(tmp_path, state, encoding):
    url = f"memory://{uuid4().hex}"
    later = {n: (d, s, bytes(255 - b for b in data)) for n, (d, s, data) in state.items()}
    some = {n: (d, s, data[:-1] + b"\x01" if data else b"") for n, (d, s, data) in state.items()}
    for i, now in enumerate((state, later, {}, {"other": ("U8", (1,), b"x")}, later, some, state)):
        path = make_checkpoint(tmp_path / str(i), now)
        write(path, url, anchor=NEVER, encoding=encoding)
        apply(Repository.open(url), tmp_path / f"out{i}")
        assert tree(tmp_path / f"out{i}") == tree(path)


def test_errors_of_a_broken_repository_are_typed(world):
    store = open_store(world.url)
    raw = store.get("refs/main.json", 1 << 20)
    for broken in (b"", b"{", b"null", b'{"step":1}', b'{"id":"x","step":1}', raw.replace(b'"step":1', b'"step":true')):
        store.swap("refs/main.json", raw, broken)
        with pytest.raises(FormatError):
            write(world.dirs[2], world.url)
        store.swap("refs/main.json", broken, raw)
    world.check(1)
