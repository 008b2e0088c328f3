"""Full collections wait for the end of a block, those of young objects come seldom, and what others set is theirs."""

import gc
import sys
import threading

import pytest

from deltackpt.util import garbage
from deltackpt.util.garbage import collections_put_off


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Node:
    pass


def churn(seen, count=400):
    """Make garbage in cycles, and survivors, such that every age is collected. -> the ages that were."""
    ages = set()

    def noted(phase, info):
        if phase == "start":
            ages.add(info["generation"])

    gc.callbacks.append(noted)
    try:
        for _ in range(count):
            seen.append([[] for _ in range(40)])
            node = Node()
            node.itself = node
    finally:
        gc.callbacks.remove(noted)
    return ages


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="its collections of all ages come in small steps")
def test_full_collections_wait(monkeypatch):
    monkeypatch.setattr(garbage, "SELDOM", 100)
    gc.set_threshold(50, 2, 2)
    gc.freeze()
    gc.collect()  # how much is old decides as well: nothing is
    try:
        held = []
        with collections_put_off():
            inside = churn(held)
        after = churn(held)
    finally:
        gc.unfreeze()
    assert 0 in inside
    assert 2 not in inside
    assert 2 in after
    assert gc.get_threshold() == (50, 2, 2)


def test_blocks_of_several_threads_end_with_the_last():
    gc.set_threshold(700, 10, 10)
    begun, end = threading.Event(), threading.Event()

    def other():
        with collections_put_off():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with collections_put_off():
        thread.start()
        begun.wait()
    assert gc.get_threshold()[2] > 1 << 20
    end.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_an_error_ends_it_and_thresholds_of_others_stay():
    gc.set_threshold(700, 10, 10)
    with pytest.raises(KeyError), collections_put_off():
        raise KeyError
    assert gc.get_threshold() == (700, 10, 10)
    with collections_put_off():
        gc.set_threshold(0)
    assert gc.get_threshold()[0] == 0


def test_young_garbage_of_a_short_block_waits_too():
    gc.set_threshold(50, 2, 2)
    with collections_put_off():
        assert churn([], 20) == set()
    assert 0 in churn([], 20)


def test_no_search_begins_where_there_was_none():
    gc.set_threshold(0, 10, 10)
    with collections_put_off():
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == (0, 10, 10)
