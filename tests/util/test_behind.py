"""What is done behind a caller's back: all of it, whether or not there is a thread for it."""

import subprocess
import sys
import threading

import pytest
from support.finished import finish_behind

from deltackpt.util import behind


def test_a_caller_goes_on_meanwhile() -> None:
    may_go_on, done = threading.Event(), list[int]()

    def work() -> None:
        may_go_on.wait(60)
        done.append(1)

    behind.begin(work)
    behind.begin(work)
    assert not done
    may_go_on.set()
    finish_behind()
    assert done == [1, 1]


def test_without_a_thread_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    done = list[int]()
    behind.begin(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]


def test_a_process_ends_after_it() -> None:
    lines = "import time", "from deltackpt.util import behind", "behind.begin(lambda: (time.sleep(.2), print('done')))"
    found = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert found.stdout == "done\n"
