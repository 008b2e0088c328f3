"""Results in the order of the items, while a slow one holds up none of those after it."""

from collections.abc import Iterator
from threading import Event

import pytest

from deltackpt.errors import UsageError
from deltackpt.util import parallel
from deltackpt.util.parallel import MOST_THREADS, threads_or_default, weighed_map


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_the_order_is_that_of_the_items(threads: int, count: int) -> None:
    assert list(weighed_map(lambda i: 2 * i, range(count), threads, lambda _: 1)) == [2 * i for i in range(count)]


def test_hundreds_go_on_while_the_first_is_slow() -> None:
    last = Event()

    def work(i: int) -> int:
        if i == 0:
            assert last.wait(60)
        if i == 299:
            last.set()
        return i

    assert list(weighed_map(work, range(300), 2, lambda _: 1)) == [*range(300)]


def test_no_more_than_so_many_bytes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "WAITING", 10)
    begun: list[int] = []
    enough = Event()

    def items() -> Iterator[int]:
        for i in range(100):
            begun.append(i)
            yield i

    def work(i: int) -> int:
        if i == 0:
            assert enough.wait(60)
        if i == 2:
            enough.set()
        return i

    found = weighed_map(work, items(), 2, lambda _: 5)
    assert next(found) == 0
    assert len(begun) <= 8  # two wait, as many as there are threads and two more were begun, one is next
    assert list(found) == [*range(1, 100)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_first_error_by_order_is_raised(threads: int) -> None:
    def work(i: int) -> int:
        if i in (3, 5):
            raise ValueError(i)
        return i

    found = weighed_map(work, range(50), threads, lambda _: 1)
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="3"):
        next(found)


@pytest.mark.parametrize("threads", [0, -1, MOST_THREADS + 1, 1 << 70, 1.5, "2", True, float("nan")])
def test_what_is_no_number_of_threads(threads: object) -> None:
    with pytest.raises(UsageError, match="threads: found"):
        threads_or_default(threads)  # type: ignore[arg-type]
    assert threads_or_default(MOST_THREADS) == MOST_THREADS
    assert threads_or_default(None) >= 1
