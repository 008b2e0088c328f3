"""The journal of a cache, in any of its files, as anything may have left it: the next move is exact all the same."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from support.chains import World, small_state
from support.states import changed, tree

from deltackpt.cache import apply_to_cache, move, open_current
from deltackpt.cache.slot import MappedSlot
from deltackpt.cache.standby import prepare_standby
from deltackpt.errors import DeltackptError
from deltackpt.restore.journal_files import HEAD, ROW

Damage = Callable[[np.random.Generator, Path, Path], None]
STEPS = 6


class Killed(BaseException):
    """Nothing catches it, as nothing does a signal."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, dict[str, Path]]:
    """A repository, and caches that are a move, or two, behind it: at rest, killed in the middle, and with a standby;
    and one with the journal of another move."""
    root = tmp_path_factory.mktemp("caches")
    world, state, rng = World(root), small_state(rows=400), np.random.default_rng(5)
    made = {name: root / name for name in ("at rest", "killed", "ready", "behind", "other")}
    for step in range(STEPS):
        world.publish(state)
        state = {**state, "w": changed(rng, state["w"], 0.03), "b": changed(rng, state["b"], 0.5)}
        if step < STEPS - 1:
            apply_to_cache(world.repo, made["at rest"], threads=4)
        for name, at in {"other": 2, "behind": 3, "killed": 4, "ready": 4}.items():
            if step == at:
                shutil.copytree(made["at rest"], made[name], symlinks=True)
    with pytest.MonkeyPatch.context() as patch:

        def rename(path: Path, to: Path, inner: Callable[[Path, Path], None] = move.rename) -> None:
            if path.name == "patching":
                raise Killed
            inner(path, to)

        patch.setattr(move, "rename", rename)
        with pytest.raises(Killed):
            apply_to_cache(world.repo, made["killed"], threads=4)
    assert (made["killed"] / "journal.next").exists()
    assert prepare_standby(world.repo, made["ready"], MappedSlot(), threads=1)
    return world, made


def rewritten(path: Path, change: Callable[[npt.NDArray[np.uint8]], None]) -> None:
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    if len(data):
        change(data)
    path.write_bytes(data.tobytes())


def flip(rng: np.random.Generator, path: Path, other: Path) -> None:
    def change(data: npt.NDArray[np.uint8]) -> None:
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)

    rewritten(path, change)


def other_fields(rng: np.random.Generator, path: Path, other: Path) -> None:
    """Of any record: fields of its row, and a sum that fits them."""

    def change(data: npt.NDArray[np.uint8]) -> None:
        raw, at, heads = data.data, 0, []
        if path.name.startswith("journal"):
            at = data.tobytes().index(b"\n") + 1
        while at + HEAD.size <= len(data):
            count, _, width, wide, size, _ = HEAD.unpack_from(raw, at)
            end = at + HEAD.size + (size * (width + wide) if width else size)
            heads.append((at, end, 0 if width else count))
            at = end
        if not heads:
            return
        at, end, count = heads[rng.integers(len(heads))]
        first = at + HEAD.size
        if count:
            row = np.frombuffer(raw, ROW, 1, first + ROW.itemsize * int(rng.integers(count)))[0]
            name = str(rng.choice(row.dtype.names))
            most = np.iinfo(row.dtype[name]).max
            row.setflags(write=True)
            row[name] = rng.choice(np.array([0, 1, 3, 4, 8, 255, most, most // 2 + 1], np.uint64) & np.uint64(most))
        HEAD.pack_into(raw, at, *HEAD.unpack_from(raw, at)[:5], xxhash.xxh3_64_intdigest(raw[first:end]))

    rewritten(path, change)


def cut(rng: np.random.Generator, path: Path, other: Path) -> None:
    os.truncate(path, rng.integers(path.stat().st_size + 1))


def zeros(rng: np.random.Generator, path: Path, other: Path) -> None:
    def change(data: npt.NDArray[np.uint8]) -> None:
        data[(at := rng.integers(len(data))) : at + 512] = 0

    rewritten(path, change)


def of_another_move(rng: np.random.Generator, path: Path, other: Path) -> None:
    shutil.copy(rng.choice(sorted([other / "journal", *other.glob("records-*")])), path)


def gone(rng: np.random.Generator, path: Path, other: Path, make: Callable[[Path], object] = lambda at: None) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, Damage] = {"flip": flip, "fields": other_fields, "cut": cut, "zeros": zeros}
DAMAGE |= {"another move": of_another_move, "gone": gone, "folder": partial(gone, make=os.mkdir)}
DAMAGE |= {"fifo": partial(gone, make=os.mkfifo), "link": partial(gone, make=lambda at: at.symlink_to("cache.json"))}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["at rest", "killed", "ready", "behind"])
def test_the_next_move_is_exact(tmp_path: Path, caches: tuple[World, dict[str, Path]], name: str, damage: str) -> None:
    world, made = caches
    rng = np.random.default_rng([*f"{name} {damage}".encode()])
    for turn in range(5):
        cache = tmp_path / str(turn)
        shutil.copytree(made[name], cache, symlinks=True)
        marker = (cache / "cache.json").read_bytes()
        files = [path for path in sorted([*cache.glob("journal*"), *cache.glob("records-*")]) if path.stat().st_size]
        DAMAGE[damage](rng, files[rng.integers(len(files))], made["other"])
        with at_most(60):
            if turn == 4:
                try:
                    prepare_standby(world.repo, cache, MappedSlot(), threads=1)
                except DeltackptError as error:  # as it says: what it found damaged is not used by the next move
                    assert error.code in ("slot-unusable", "tensor-differs")
            apply_to_cache(world.repo, cache, threads=1 + 2 * (turn % 2))
        path, link = open_current(cache)
        assert link == world.repo.find()
        assert tree(path) == world.trees[link.id]
        assert (cache / "cache.json").read_bytes() == marker
