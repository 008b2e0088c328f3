"""One lock between processes, one replacement of a small file."""

import os
import subprocess
import sys
import threading
import time

import pytest

from deltackpt.util.disk import draft_of, replace_file
from deltackpt.util.lock import lock, lock_file, locked

HOLD = """
import sys, time
from pathlib import Path
from deltackpt.util.lock import lock, lock_file
with lock_file(Path(sys.argv[1])) as fd:
    lock(fd, shared=sys.argv[2] == "shared")
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    """Another process that holds the lock until it is let go, or dies."""
    running = []

    def start(how):
        command = [sys.executable, "-c", HOLD, str(tmp_path / "lock"), how]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert running[-1].stdout.readline() == b"held\n"
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def free(path, **how):
    with lock_file(path) as fd:
        try:
            lock(fd, wait=False, **how)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_of_one_process_or_shared(hold, tmp_path):
    path = tmp_path / "lock"
    assert free(path)
    reader = hold("shared")
    assert (free(path), free(path, shared=True)) == (False, True)
    reader.kill()
    reader.wait()
    assert free(path), "a lock goes with its holder"
    hold("alone")
    assert (free(path), free(path, shared=True)) == (False, False)


def test_a_lock_is_waited_for(hold, tmp_path):
    holder, got = hold("alone"), threading.Event()

    def wait():
        with lock_file(tmp_path / "lock") as fd, locked(fd):
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    assert not got.is_set()
    holder.stdin.close()
    thread.join(20)
    assert got.is_set()


def test_locked_ends_with_its_block(tmp_path):
    path = tmp_path / "lock"
    with lock_file(path) as fd:
        with locked(fd):
            assert not free(path)
        assert free(path)


@pytest.mark.parametrize("sync", [False, True])
def test_a_small_file_is_replaced_at_once(tmp_path, monkeypatch, sync):
    path, synced = tmp_path / "file", []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_mode), real(fd)))
    for data in (b"first", b"", b"second"):
        replace_file(path, data, sync=sync)
        assert path.read_bytes() == data
    assert len(synced) == (6 if sync else 0)  # each time the file, then the folder
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    replace_file(path, b"before", sync=False)
    draft_of(path).mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(path, b"after", sync=False)
    assert path.read_bytes() == b"before"
