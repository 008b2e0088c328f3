"""Each flow ends in a power cut at its k-th change of the disk: what was not synced is gone, or half of it is there.

Every step that was there restores, `verify` finds nothing, and doing it again ends where it should; a cache is proven
before anybody gets anything out of it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import power_cut
from support.flows import FLOWS, SCRIPT, check_after, expire_leases, prepare
from support.power_cut import Cut
from support.states import tree

from deltackpt.cache import apply_to_cache, cache, open_current
from deltackpt.cache.cache import find_current
from deltackpt.errors import CheckpointError, FormatError, NotFoundError
from deltackpt.store import dirfd
from deltackpt.util import disk

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="reads open files by /proc")


@pytest.mark.parametrize("flow", FLOWS)
def test_power_cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: str) -> None:
    _cuts(tmp_path, monkeypatch, flow, 2)


@pytest.mark.heavy
@pytest.mark.parametrize("flow", FLOWS)
def test_a_power_cut_at_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: str) -> None:
    _cuts(tmp_path, monkeypatch, flow, 10_000)


def _cuts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: str, most: int) -> None:
    """Cut at each change, or at ``most`` of them, evenly spread."""
    made, links = prepare(tmp_path, flow)
    changes = _run(tmp_path, flow, 1 << 30)
    assert "fsync" in changes or flow in ("cache", "ready", "cache that is ready", "cache by threads")
    for k in range(1, len(changes) + 1, max(1, len(changes) // most)):
        try:
            few = _run(tmp_path, flow, k)
        except Cut:
            pass
        else:  # what threads do side by side may take fewer changes than it took when they were counted
            assert len(few) < k
            continue
        for image in ("dropped", "torn"):
            found = tmp_path / "images" / image
            expire_leases(found / "repo")
            with monkeypatch.context() as restarted:
                restarted.setattr(cache, "boot_id", lambda: "the next run of the machine")
                if (found / "cache" / "current").is_symlink():
                    with pytest.raises((CheckpointError, NotFoundError)):
                        open_current(found / "cache")
                check_after(found, made, links, flow)


def _run(tmp_path: Path, flow: str, k: int) -> list[str]:
    copy, images = tmp_path / "copy", tmp_path / "images"
    for path in (copy, images):
        shutil.rmtree(path, ignore_errors=True)
    copy.mkdir()
    shutil.copytree(tmp_path / "repo", copy / "repo")
    shutil.copytree(tmp_path / "cache", copy / "cache", symlinks=True)
    (copy / "next").symlink_to(tmp_path / "next")
    before = sys.argv
    try:
        sys.argv = ["script", flow, str(copy / "repo"), str(copy)]
        with power_cut.power_cut(copy, images, k) as changes:
            exec(compile(SCRIPT, "script", "exec"), {})
    finally:
        sys.argv = before
    return changes


def _cut_at_the_end(tmp_path: Path, flow: str) -> None:
    """Cut at the last change. A run may need fewer than the one before, since threads work side by side: then again."""
    k = 1 << 30
    while True:
        try:
            k = len(_run(tmp_path, flow, k))
        except Cut:
            return


@pytest.mark.heavy
def test_a_process_that_loses_its_power(tmp_path: Path) -> None:
    """The same in a process that is killed, once."""
    made, links = prepare(tmp_path, "publish")
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.move(tmp_path / "repo", folder / "repo")
    (folder / "next").symlink_to(tmp_path / "next")
    command = [sys.executable, power_cut.__file__, str(folder), str(tmp_path / "images"), "30", SCRIPT]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "publish", str(folder / "repo"), str(folder)], env=environment)
    assert done.returncode == -signal.SIGKILL
    for image in ("dropped", "torn"):
        found = tmp_path / "images" / image
        expire_leases(found / "repo")
        check_after(found, made, links, "publish")


def test_a_slot_that_is_torn_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, links = prepare(tmp_path, "cache")
    path, link = open_current(tmp_path / "cache")
    damage = {
        "a tensor": lambda at: _overwrite(at / "model.safetensors", -1, b"x"),
        "a header": lambda at: _overwrite(at / "model.safetensors", 20, b" "),
        "the length": lambda at: os.truncate(at / "model.safetensors", 100),
        "a side file": lambda at: (at / "config.json").write_bytes(b""),
        "all": lambda at: shutil.rmtree(at),
    }
    for run, (what, tear) in enumerate(damage.items()):
        shutil.rmtree(tmp_path / "torn", ignore_errors=True)
        shutil.copytree(tmp_path / "cache", tmp_path / "torn", symlinks=True)
        tear(find_current(tmp_path / "torn")[0])
        monkeypatch.setattr(cache, "boot_id", lambda run=run: f"run {run}")
        done = apply_to_cache(made.repo, tmp_path / "torn", link.step, threads=1)
        assert what == "all" or (done.rebuilt or "").startswith(f"step {link.step} was not found whole"), what
        assert done.written
        assert tree(open_current(tmp_path / "torn")[0]) == made.trees[link.id]
    monkeypatch.setattr(cache, "boot_id", lambda: "the last run")
    done = apply_to_cache(made.repo, tmp_path / "cache", link.step, threads=1)
    assert (done.rebuilt, done.written) == (None, 0)
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir() and not p.is_symlink()] == [path.name]
    done = apply_to_cache(made.repo, tmp_path / "cache", threads=1)
    assert done.rebuilt is None
    assert tree(open_current(tmp_path / "cache")[0]) == made.trees[links[-1].id]


def test_where_the_system_does_not_tell_its_runs_apart_every_move_proves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, links = prepare(tmp_path, "cache")
    monkeypatch.setattr(cache, "boot_id", lambda: "")
    for _ in range(2):
        path, link = find_current(tmp_path / "cache")
        _overwrite(path / "model.safetensors", -1, b"x")
        assert apply_to_cache(made.repo, tmp_path / "cache", link.step, threads=1).rebuilt is not None
        with pytest.raises(CheckpointError) as caught:
            open_current(tmp_path / "cache")
        assert caught.value.code == "cache-unproven"


def _overwrite(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at] = new[0] if data[at] != new[0] else new[0] ^ 1
    path.write_bytes(data)


def test_a_run_of_the_machine_has_a_name() -> None:
    assert disk.boot_id() == disk.boot_id() != ""


def test_the_images_are_what_was_synced(tmp_path: Path) -> None:
    """The tool itself: data, names, removals and renames, each synced and not."""
    root, images = tmp_path / "root", tmp_path / "images"
    (root / "a").mkdir(parents=True)
    (root / "a" / "old").write_bytes(b"old")
    (root / "a" / "gone").write_bytes(b"gone")
    long = bytes(range(256)) * 48  # three pages
    with pytest.raises(Cut), power_cut.power_cut(root, images, 7):
        _change(root, long)
    assert tree(images / "dropped") == {"a/old": b"old", "a/gone": b"gone", "a/renamed": b"", "a/synced": b"synced"}
    half = bytes(4096) + long[4096:8192] + bytes(4096)
    assert tree(images / "torn") == {"a/old": b"old", "a/renamed": half, "a/synced": b"synced"}
    assert (images / "torn" / "b").is_dir()
    assert not (images / "dropped" / "b").exists()


def _change(root: Path, long: bytes) -> None:
    (root / "a" / "named").write_bytes(long)
    os.rename(root / "a" / "named", root / "a" / "renamed")  # 1
    fd = os.open(root / "a" / "synced", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"synced")  # 2
    os.fsync(fd)  # 3
    os.close(fd)
    at = os.open(root / "a", os.O_RDONLY)
    os.fsync(at)  # 4
    os.close(at)
    os.unlink(root / "a" / "gone")  # 5  # noqa: PTH108
    os.mkdir(root / "b")  # 6  # noqa: PTH102
    (root / "a" / "old").write_bytes(b"new")
    os.rename(root / "a" / "old", root / "b" / "old")  # 7: never happens


@pytest.mark.parametrize("needed", ["sync", "seal"])
def test_a_store_that_does_not_sync_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: str) -> None:
    made, links = prepare(tmp_path, "publish")
    monkeypatch.setattr(dirfd, needed, lambda file: None)
    _cut_at_the_end(tmp_path, "publish")
    monkeypatch.undo()
    expire_leases(tmp_path / "images" / "torn" / "repo")
    with pytest.raises((AssertionError, FormatError)):
        check_after(tmp_path / "images" / "torn", made, links, "publish")
