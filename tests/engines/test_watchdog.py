"""The watchdog of an engine, and the process that it looks at: real ones, which are killed."""

import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.running import environment

from deltackpt.engines.watchdog import OLD, UpdaterLock, Watchdog, holder_of

HOLDS = """
import sys, time
from deltackpt.engines.watchdog import UpdaterLock
held = UpdaterLock(sys.argv[1])
print(held.hold(), flush=True)
if sys.stdin.readline():
    held.release()
print("released", flush=True)
time.sleep(600)
"""


class Updater:
    def __init__(self, cache):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", HOLDS, str(cache)], env=environment(), **pipes)
        self.lock = self.process.stdout.readline().strip()

    def release(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "released\n"

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)

    def close(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def updater(tmp_path):
    made = Updater(tmp_path)
    yield made
    made.close()


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def watches():
    return [t for t in threading.enumerate() if t.name == "deltackpt-watchdog"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_updater_that_dies(updater, number):
    resumed = []
    Watchdog(0.02).watch(updater.lock, lambda: resumed.append(1))
    time.sleep(0.2)
    assert resumed == []
    updater.kill(number)
    wait_for(lambda: resumed)
    wait_for(lambda: not watches())
    assert resumed == [1]
    assert holder_of(updater.lock) == "dead"


def test_one_that_hangs_is_alive(updater):
    resumed = []
    dog = Watchdog(0.02)
    dog.watch(updater.lock, lambda: resumed.append(1))
    updater.kill(signal.SIGSTOP)
    time.sleep(0.3)
    assert (resumed, holder_of(updater.lock)) == ([], "alive")
    dog.call_off()
    updater.kill()
    updater.process.wait()
    wait_for(lambda: not watches())
    assert resumed == []


def test_one_that_is_done_with_the_engine(updater):
    """What is paused by somebody else after it stays paused."""
    resumed = []
    Watchdog(0.02).watch(updater.lock, lambda: resumed.append(1))
    updater.release()
    wait_for(lambda: not watches())
    assert (resumed, holder_of(updater.lock)) == ([], "done")
    Watchdog(0.02).watch(updater.lock, lambda: resumed.append(1))
    assert watches() == []


def test_one_whose_folder_goes_with_it(updater, tmp_path):
    """As where there is no cache: its temporary folder is removed when it ends, or by the next such process."""
    resumed = []
    Watchdog(0.02).watch(updater.lock, lambda: resumed.append(1))
    shutil.rmtree(tmp_path / "receivers")
    time.sleep(0.2)
    assert resumed == []
    updater.kill()
    wait_for(lambda: resumed)


def test_one_that_had_begun_to_write_is_told_of(updater, caplog):
    Watchdog(0.02).watch(updater.lock, lambda: None, words="it waits")
    updater.kill()
    wait_for(lambda: not watches())
    assert [record.getMessage() for record in caplog.records] == [
        "deltackpt: the process that updates this engine died; it waits"
    ]


def test_a_watch_with_an_end(updater):
    resumed = []
    Watchdog(0.02).watch(updater.lock, lambda: resumed.append(1), seconds=0.1)
    wait_for(lambda: not watches())
    updater.kill()
    updater.process.wait()
    assert resumed == []


def test_nothing_is_written_while_it_resumes(updater):
    """Who calls it off waits until the engine is resumed, or knows that it will not be."""
    order, begun, go = [], threading.Event(), threading.Event()

    def resume():
        begun.set()
        go.wait(30)
        order.append("resumed")
        raise OSError("no engine: not our death")

    dog = Watchdog(0.02)
    dog.watch(updater.lock, resume)
    updater.kill()
    assert begun.wait(30)
    threading.Timer(0.2, go.set).start()
    dog.call_off()
    order.append("written")
    assert order == ["resumed", "written"]
    dog.watch(updater.lock, resume)
    dog.watch(updater.lock, lambda: order.append("the second watch"))
    wait_for(lambda: len(order) == 3)
    assert order[2] == "the second watch"


def test_locks_of_the_dead_are_removed_when_nobody_looks_any_more(updater, tmp_path, monkeypatch):
    updater.kill()
    updater.process.wait()
    held = UpdaterLock(tmp_path)
    assert held.hold() == held.hold()
    assert holder_of(updater.lock) == "dead"
    now = time.time() + OLD + 60
    monkeypatch.setattr("deltackpt.engines.watchdog.time.time", lambda: now)
    other = UpdaterLock(tmp_path)
    other.hold()
    assert (holder_of(updater.lock), holder_of(held.path)) == ("done", "alive")
    held.release()
    other.release()
    held.release()
