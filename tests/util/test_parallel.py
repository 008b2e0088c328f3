"""Work on many items at once, whose consumer stops anywhere, also where garbage is collected."""

import subprocess
import sys
import threading
import time
import weakref

import pytest
from support.running import environment

from deltackpt.util.parallel import ordered_map, weighed_map

LOCKS = ["_shutdown_locks_lock", "_active_limbo_lock"]  # what a thread that starts holds, where Python has it


class Item:
    """Something whose life can be watched."""


@pytest.mark.parametrize("stops", [1, 3, 40])
@pytest.mark.parametrize("mapped", ["ordered", "weighed"])
def test_what_has_begun_is_done_when_a_consumer_stops(mapped, stops):
    running, most = [], []

    def work(number):
        running.append(number)
        most.append(number)
        running.remove(number)
        return number

    made = ordered_map(work, range(200), 4) if mapped == "ordered" else weighed_map(work, range(200), 4, lambda _: 1)
    assert [next(made) for _ in range(stops)] == list(range(stops))
    made.close()
    begun = len(most)
    assert running == []
    time.sleep(0.05)
    assert begun == len(most)  # and nothing begins later


@pytest.mark.parametrize("mapped", ["ordered", "weighed"])
def test_no_thread_refers_to_an_item_whose_result_is_there(mapped):
    """So that memory which items look at can be given back."""
    for _ in range(50):
        item = Item()
        seen, items = weakref.ref(item), [(0, item)]
        del item

        def first(pair):
            return pair[0]

        made = ordered_map(first, items, 2) if mapped == "ordered" else weighed_map(first, items, 2, lambda _: 1)
        assert list(made) == [0]
        del made, items
        assert seen() is None


@pytest.mark.parametrize("lock", LOCKS)
@pytest.mark.parametrize("mapped", ["ordered_map(str, range(99), 2)", "weighed_map(str, range(99), 2, len)"])
def test_one_that_is_collected_in_a_thread_that_starts_does_not_wait_for_itself(lock, mapped):
    """A join takes that lock: seen as a process that stood still, in a generator that an error's frames had kept."""
    if not hasattr(threading, lock):
        pytest.skip("this Python has no such lock")
    text = f"""
import threading
from deltackpt.util.parallel import ordered_map, weighed_map
made = {mapped}
assert next(made) == "0"
with threading.{lock}:
    made.close()
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, env=environment(), check=False)
    assert (done.stdout, done.stderr) == (b"ended\n", b"")
