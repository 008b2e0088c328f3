"""`early`: a cache that is behind decodes while parts are on their way, and touches nothing before all are here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chains import World, next_state, small_state
from support.states import tree
from test_squashed import Counted

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.errors import DeltackptError
from deltackpt.patch.squashed import SquashedTensor
from deltackpt.repository import Repository
from deltackpt.restore import decode_ahead
from deltackpt.restore.decode_ahead import DecodeAhead

STEPS = 9


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A chain of tensors that stay, and a cache at its second step."""
    world = World(tmp_path)
    state = small_state(rows=200)
    for n in range(STEPS):
        world.publish(state)
        state = {k: v for k, v in next_state(state, n + 1).items() if k in ("w", "b", "s")}
    for step in (0, 1):
        apply_to_cache(world.repo, tmp_path / "cache", step, threads=1)
    return world


def is_at(world: World, cache: Path, step: int) -> bool:
    path, link = open_current(cache)
    return link.step == step and tree(path) == world.trees[link.id]


def unfinished() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("deltackpt-early")]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_nothing_is_decoded_again(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(SquashedTensor, "_through", None)
    done = apply_to_cache(world.repo, tmp_path / "cache", threads=threads)
    assert (done.step, done.rebuilt, done.patches) == (STEPS - 1, None, STEPS - 2)
    assert is_at(world, tmp_path / "cache", STEPS - 1)
    assert not unfinished()


@pytest.mark.parametrize("held", [0, 40, 10_000])
def test_what_there_is_no_room_for_is_decoded_when_it_is_asked_for(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(decode_ahead, "HELD", held)
    held_at_once: list[int] = []
    advance = DecodeAhead._advance

    def watched(self, name, patch, new):  # type: ignore[no-untyped-def]
        fits = advance(self, name, patch, new)
        held_at_once.append(sum(data.nbytes for data in new.values()))
        return fits

    monkeypatch.setattr(DecodeAhead, "_advance", watched)
    apply_to_cache(world.repo, tmp_path / "cache", threads=1)
    assert is_at(world, tmp_path / "cache", STEPS - 1)
    assert max(held_at_once, default=0) <= held
    assert bool(held_at_once) == (held > 0)


def test_decoding_begins_before_the_last_part_is_here(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, advance = threading.Event(), DecodeAhead._advance

    def noticed(self, *what):  # type: ignore[no-untyped-def]
        begun.set()
        return advance(self, *what)

    class Slow(Counted):
        def read(self, name: str, chunk: int = 1 << 20) -> Iterator[bytes]:
            if name == last and not begun.wait(20):
                raise AssertionError("nobody began")
            return super().read(name, chunk)

    monkeypatch.setattr(DecodeAhead, "_advance", noticed)
    ((last),) = [file.name for file in world.repo.load(world.repo.find()).patch or ()]
    done = apply_to_cache(Repository.at(Slow(tmp_path / "repo")), tmp_path / "cache", threads=2)
    assert (done.rebuilt, done.anchor) == (None, None)
    assert is_at(world, tmp_path / "cache", STEPS - 1)


@pytest.mark.parametrize("damage", ["missing", "flipped", "short"])
def test_a_part_that_does_not_come_leaves_all_as_it_was(world: World, tmp_path: Path, damage: str) -> None:
    repo = Repository.at(Counted(tmp_path / "repo"))
    (file,) = repo.load(repo.find(6)).patch or ()
    path = tmp_path / "repo" / file.name
    body = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(body[:-9] if damage == "short" else body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    before = tree(tmp_path / "cache")
    with pytest.raises(DeltackptError) as caught:
        apply_to_cache(repo, tmp_path / "cache", threads=2)
    assert caught.value.code == ("object-missing" if damage == "missing" else "object-hash")
    if damage != "missing":  # then other ways were tried, which the other slot makes room for
        assert tree(tmp_path / "cache") == before
    assert is_at(world, tmp_path / "cache", 1)
    assert not unfinished()
    path.write_bytes(body)
    apply_to_cache(Repository.at(Counted(tmp_path / "repo")), tmp_path / "cache", threads=2)
    assert is_at(world, tmp_path / "cache", STEPS - 1)


def test_a_current_slot_that_was_changed_leads_nobody_astray(world: World, tmp_path: Path) -> None:
    shard = open_current(tmp_path / "cache")[0] / "model.safetensors"
    body = bytearray(shard.read_bytes())
    for at in range(len(body) - 9_000, len(body), 7):
        body[at] ^= 0x55
    shard.write_bytes(body)
    apply_to_cache(world.repo, tmp_path / "cache", threads=2)
    assert is_at(world, tmp_path / "cache", STEPS - 1)


def test_a_current_slot_that_is_no_checkpoint_is_not_needed(world: World, tmp_path: Path) -> None:
    (open_current(tmp_path / "cache")[0] / "model.safetensors").unlink()
    done = apply_to_cache(world.repo, tmp_path / "cache", threads=2)
    assert done.anchor is None
    assert is_at(world, tmp_path / "cache", STEPS - 1)


@pytest.mark.parametrize("what", ["thread", "memory"])
def test_a_machine_without_room_for_it_does_without(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nobody waits for ever for patches that do not come, and no tensor is taken half-way."""
    if what == "thread":
        start, begun = threading.Thread.start, list[threading.Thread]()

        def refused(self: threading.Thread) -> None:
            if self.name.startswith("deltackpt-early"):
                if begun:
                    raise RuntimeError("can't start new thread")
                begun.append(self)
            start(self)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            with pytest.raises(RuntimeError):
                apply_to_cache(world.repo, tmp_path / "cache", threads=2)
        for thread in begun:
            thread.join(5)
        assert is_at(world, tmp_path / "cache", 1)
    else:
        write_step, calls = decode_ahead.write_step, list[int]()

        def full(*what: object) -> bool:
            calls.append(1)
            if len(calls) in (2, 5):
                raise MemoryError
            return bool(write_step(*what))

        monkeypatch.setattr(decode_ahead, "write_step", full)
    assert not unfinished()
    apply_to_cache(world.repo, tmp_path / "cache", threads=2)
    assert is_at(world, tmp_path / "cache", STEPS - 1)
    assert not unfinished()
