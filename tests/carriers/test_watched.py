"""A pair whose other end is gone, or stands still: no call takes longer than its deadline."""

import socket
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from deltackpt.carriers.watched import WatchedCalls  # noqa: E402
from deltackpt.carriers.wire import Deadline, Wire  # noqa: E402
from deltackpt.errors import StoreError  # noqa: E402

LONGEST = 60.0  # seconds of what should take one, on a machine with other load


@pytest.fixture
def ends():
    here, there = socket.socketpair()
    yield Wire(here, "the peer"), there
    here.close()
    there.close()


def watched(wire):
    """-> calls, and what is set when they are aborted."""
    aborted = threading.Event()
    return WatchedCalls(wire, aborted.set), aborted


def test_results_and_errors_come_back(ends):
    calls, aborted = watched(ends[0])
    assert calls.run(lambda: 7, Deadline(LONGEST)) == 7
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, Deadline(LONGEST))
    assert calls.run(lambda: 8, Deadline(LONGEST)) == 8
    assert not aborted.is_set()
    calls.close()
    assert aborted.wait(LONGEST)
    calls.close()


def test_a_call_that_never_returns_is_given_up(ends):
    calls, aborted = watched(ends[0])
    began = time.monotonic()
    with pytest.raises(StoreError) as error:
        calls.run(lambda: aborted.wait(10 * LONGEST), Deadline(0.2))
    assert error.value.code == "live-lost"
    assert time.monotonic() - began < LONGEST
    assert aborted.wait(LONGEST)  # which is what lets the call go
    with pytest.raises(StoreError) as error:
        calls.run(lambda: 1, Deadline(LONGEST))
    assert error.value.code == "live-lost"


def test_a_peer_that_is_gone_is_not_waited_for(ends):
    wire, other = ends
    calls, aborted = watched(wire)
    other.close()
    with pytest.raises(StoreError) as error:
        calls.run(lambda: aborted.wait(10 * LONGEST), Deadline(5 * LONGEST))
    assert error.value.code == "live-lost"
    assert "closed" in error.value.have


def test_a_group_that_fails_is_of_no_use_any_more(ends):
    calls, aborted = watched(ends[0])

    def fails():
        raise RuntimeError("NCCL error: remote process exited")

    with pytest.raises(StoreError) as error:
        calls.run(fails, Deadline(LONGEST))
    assert "remote process" in error.value.have
    assert aborted.wait(LONGEST)
    with pytest.raises(StoreError):
        calls.run(lambda: 1, Deadline(LONGEST))


def test_an_abort_that_hangs_holds_nothing_up(ends):
    forever = threading.Event()
    calls = WatchedCalls(ends[0], lambda: forever.wait(10 * LONGEST))
    began = time.monotonic()
    with pytest.raises(StoreError):
        calls.run(lambda: forever.wait(10 * LONGEST), Deadline(0.1))
    calls.close()
    assert time.monotonic() - began < LONGEST
    forever.set()
