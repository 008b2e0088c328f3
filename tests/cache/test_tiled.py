"""Large tensors go through a move row of tiles by row of tiles: the same bytes, the same journal, and whatever ends a
move in the middle, the next one goes on from there."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support.chains import World
from support.states import State, Value, tree

from deltackpt import kernels
from deltackpt.cache import apply_to_cache, open_current, slot
from deltackpt.checkpoint import Checkpoint
from deltackpt.errors import StoreError
from deltackpt.format.dtypes import DTYPES
from deltackpt.restore.journal import Journal
from deltackpt.restore.journal_files import WHOLE

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

SHAPES = {
    "tall": ("BF16", (65_536, 4)),
    "b": ("F32", (8,)),
    "wide": ("BF16", (256, 512)),
    "word": ("F32", (3, 999, 40)),
}
SHAPES |= {"bytes": ("F8_E4M3", (60_000,))}
SHARES = {"tall": 0.3, "wide": 0.1, "word": 0.2, "bytes": 0.1, "b": 0.5}


def first_state(seed: int = 0) -> State:
    rng = np.random.default_rng(seed)
    state: State = {}
    for name, (dtype, shape) in SHAPES.items():
        count = int(np.prod(shape))
        words = rng.standard_normal(count, np.float32).view(np.uint8).reshape(count, 4)[:, 4 - DTYPES[dtype].width :]
        state[name] = dtype, shape, words.tobytes()
    return state


def nudged(rng: np.random.Generator, value: Value, share: float, bits: int) -> Value:
    """Some elements with other values of their lowest bits."""
    dtype, shape, data = value
    words = np.frombuffer(data, f"u{DTYPES[dtype].width}").copy()
    some = rng.random(len(words)) < share
    words[some] ^= rng.integers(1, 1 << bits, int(some.sum()), np.uint8).astype(words.dtype)
    return dtype, shape, words.tobytes()


def after(state: State, seed: int, share: float | None = None) -> State:
    """The same with some elements changed; of one tensor by one bit, as of most steps of a training."""
    rng = np.random.default_rng((3, seed))
    return {name: nudged(rng, v, share or SHARES[name], 1 if name == "wide" else 3) for name, v in state.items()}


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "LARGE", 1 << 10)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensors of more bytes are."""
    inner = slot.runs_of
    monkeypatch.setattr(slot, "runs_of", lambda layout: [(s, [t]) for s, run in inner(layout) for t in run])


@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("count", [0, 1, 3, 40, 300])
@pytest.mark.parametrize("small", [0.0, 0.1, 0.7, 1.0])
def test_every_piece_of_work_is_begun_once(threads: int, count: int, small: float) -> None:
    rng = np.random.default_rng((threads, count, int(10 * small)))
    large = rng.random(count) >= small
    sizes = np.where(
        large, rng.integers(slot.SMALL, 9 * slot.SMALL, count), rng.integers(0, slot.SMALL, count)
    ).tolist()
    order = slot.order(sizes, threads)
    assert sorted(order) == list(range(count))
    held = [sizes[i] for i in order]
    assert held[:1] == sorted(sizes)[::-1][:1]
    assert [s for s in held if s >= slot.SMALL] == sorted((s for s in sizes if s >= slot.SMALL), reverse=True)
    last = held[-min(count, threads) :] if count else []
    assert sorted(last) == sorted(sizes)[: len(last)]


def leads(cache: Path, before: Path) -> bool:
    """Does a cache's journal lead from a checkpoint to the current one?"""
    found = Journal.read(cache / "journal")
    assert found is not None
    with Checkpoint.open(before) as old, Checkpoint.open(open_current(cache)[0]) as new:
        for number, name in enumerate(sorted(old.tensors, key=str.encode)):
            words = old.bytes_of(name).view(f"u{DTYPES[old.tensors[name].dtype].width}").copy()
            records = found.of(number)
            assert len(records) == 1
            records[0].write_to(words)
            if words.tobytes() != new.bytes_of(name).tobytes():
                return False
    return True


def exact(world: World, cache: Path) -> None:
    path, link = open_current(cache)
    assert tree(path) == world.trees[link.id]
    assert link == world.repo.find()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_step_is_exact_and_its_journal_leads_there(tmp_path: Path, threads: int) -> None:
    world, cache, state = World(tmp_path), tmp_path / "cache", first_state()
    for seed in range(5):
        before = open_current(cache)[0] if seed else None
        world.publish(state)
        done = apply_to_cache(world.repo, cache, threads=threads)
        assert done.rebuilt is None
        exact(world, cache)
        if seed > 1:
            assert before is not None
            assert leads(cache, before)
            found = Journal.read(cache / "journal")
            assert found is not None
            parts = found.parts_of(sorted(SHAPES, key=str.encode).index("tall"))
            assert len(parts) == 8  # a row of tiles each
            assert sorted(parts["first"].tolist()) == [65_536 * 4 // 8 * i for i in range(8)]
            assert (parts["end"] < WHOLE).all()
        state = after(state, seed)


def test_grids_that_differ_from_step_to_step(tmp_path: Path) -> None:
    """What the last move recorded by other rows of tiles, or whole, is written by those of this one."""
    world, cache, state = World(tmp_path), tmp_path / "cache", first_state()
    for seed, share in enumerate([0.3, 0.02, 0.3, 0.1, 0.9, 0.3, 0.0005, 0.3]):
        world.publish(state)
        assert apply_to_cache(world.repo, cache, threads=2).rebuilt is None
        exact(world, cache)
        state = after(state, seed, share)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """What would make a file longer is an error, after a part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def at_the_last_but_one(tmp_path: Path) -> tuple[World, Path]:
    world, state = World(tmp_path), first_state()
    for seed in range(3):
        world.publish(state)
        apply_to_cache(world.repo, tmp_path / "cache", threads=2)
        state = after(state, seed)
    world.publish(state)
    return world, tmp_path / "cache"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_move_that_ends_at_any_byte_of_its_journal_is_finished(tmp_path: Path, threads: int) -> None:
    world, made = at_the_last_but_one(tmp_path)
    shutil.copytree(made, tmp_path / "whole", symlinks=True)
    before = open_current(made)[0]
    apply_to_cache(world.repo, tmp_path / "whole", threads=threads)
    longest = max(path.stat().st_size for path in (tmp_path / "whole").glob("*") if path.is_file())
    for turn, size in enumerate(np.linspace(1_000, longest - 1, 12).astype(int).tolist()):
        cache = tmp_path / f"cache {turn}"
        shutil.copytree(made, cache, symlinks=True)
        for at_most in [size, size + 10_000] if turn == 6 else [size]:
            with files_of_at_most(at_most), suppress(StoreError):  # of threads, none may have had so much to write
                apply_to_cache(world.repo, cache, threads=threads)
        if threads == 1 or turn == 0:
            assert open_current(cache)[1] != world.repo.find()
            assert Journal.read(cache / "journal.next") is not None
        done = apply_to_cache(world.repo, cache, threads=threads)
        assert done.rebuilt is None
        exact(world, cache)
        assert leads(cache, before)
        shutil.rmtree(cache)


KILLED = """
import sys
from deltackpt.cache import apply_to_cache, slot
from deltackpt.repository import Repository
slot.LARGE = 1 << 10
inner = slot.runs_of
slot.runs_of = lambda layout: [(s, [t]) for s, run in inner(layout) for t in run]
apply_to_cache(Repository.open(sys.argv[1]), sys.argv[2], threads=3)
"""


def written(cache: Path) -> int:
    """Bytes of records, while a move is under way."""
    size = 0
    for path in cache.glob("records-*"):
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size if (cache / "journal.next").exists() else 0


def test_a_process_that_is_killed_while_it_moves(tmp_path: Path) -> None:
    world, made = at_the_last_but_one(tmp_path)
    before = open_current(made)[0]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for turn in range(4):
        cache = tmp_path / f"cache {turn}"
        shutil.copytree(made, cache, symlinks=True)
        command = [sys.executable, "-c", KILLED, str(world.repo.store.url), str(cache)]
        process = subprocess.Popen(command, env=environment)
        while process.poll() is None:
            if written(cache) > 30_000 * turn:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.001)
        assert process.wait(60) in (0, -signal.SIGKILL)
        done = apply_to_cache(world.repo, cache, threads=2)
        assert done.rebuilt is None
        exact(world, cache)
        assert leads(cache, before)


def test_what_is_left_is_not_known_without_the_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the current slot is copied."""
    world, cache = at_the_last_but_one(tmp_path)
    size = max(path.stat().st_size for path in [cache / "journal", *cache.glob("records-*")])
    with files_of_at_most(size * 2 // 3), pytest.raises(StoreError):
        apply_to_cache(world.repo, cache, threads=1)
    monkeypatch.setattr(kernels, "LIB", None)
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_damaged_slot_or_journal_is_found(tmp_path: Path, threads: int) -> None:
    world, made = at_the_last_but_one(tmp_path)
    (other,) = {path for path in made.iterdir() if path.is_dir() and not path.is_symlink()} - {open_current(made)[0]}
    files = [path for path in (made / "journal", *made.glob("records-*")) if path.stat().st_size]
    for turn, (path, at) in enumerate([(other / "model.safetensors", -1000), *((path, -9) for path in files)]):
        cache = tmp_path / f"cache {turn}"
        shutil.copytree(made, cache, symlinks=True)
        data = bytearray((cache / path.relative_to(made)).read_bytes())
        data[at] ^= 255
        (cache / path.relative_to(made)).write_bytes(data)
        before = open_current(cache)[0]
        assert apply_to_cache(world.repo, cache, threads=threads).written
        exact(world, cache)
        assert leads(cache, before)


def test_a_journal_of_before_is_none(tmp_path: Path) -> None:
    """Its rows do not say which elements they are of: the current slot is copied, once."""
    world, cache = at_the_last_but_one(tmp_path)
    head, _, rest = (cache / "journal").read_bytes().partition(b"\n")
    (cache / "journal").write_bytes(head.replace(b'"start"', b'"from"').replace(b'"end"', b'"to"') + b"\n" + rest)
    assert Journal.read(cache / "journal") is None
    apply_to_cache(world.repo, cache, threads=1)
    exact(world, cache)


def test_steps_that_state_no_xxh3_are_proven_by_their_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, cache = at_the_last_but_one(tmp_path)
    found = type(world.repo).digests

    def unstated(repo: object, manifest: object) -> dict[str, object]:
        return {name: row._replace(xxh3=bytes(16)) for name, row in found(repo, manifest).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.repo), "digests", unstated)
    assert apply_to_cache(world.repo, cache, threads=3).rebuilt is None
    exact(world, cache)
