"""What the log says of a step at whose end a rank of the trainer is lost: the engines may have it by then."""

import logging
import time

import pytest

pytest.importorskip("torch")

from deltackpt.errors import StoreError
from deltackpt.hooks.live import LiveSide
from deltackpt.hooks.pending import CapturedStep


class Group:
    """Of two ranks, of which this is one."""

    size = 2

    def __init__(self, rank):
        self.rank = rank

    def broadcast(self, value):
        return value

    def gather(self, value):
        return [value, value]

    def close(self):
        pass


class Trainer:
    def __init__(self, rank):
        self.group = Group(rank)


class Losing:
    """A session that loses the other rank, before the engines have the step or after it."""

    mode, goes_first, step = "async", False, 6

    def __init__(self, late, code):
        self.late, self.code = late, code

    def open(self, trainer):
        pass

    def deliver(self, captured):
        if self.late:
            self.step = captured.step
        raise StoreError(self.code, where="rank 1", have="no answer", need="an answer in time")

    def close(self):
        pass


@pytest.mark.parametrize(
    ("rank", "late", "code", "words"),
    [
        (0, True, "rank-lost", "the live session ends: step 7 went live, and no other one will"),
        (0, False, "rank-lost", "the live session ends: step 7 did not go live, and no other one will"),
        (1, True, "rank-lost", "the live session ends: step 7 is live if the first rank says so"),
        (0, False, "live-not-durable", "step 7 did not go live, and goes with the next"),
    ],
)
def test_what_is_said_of_the_step(caplog, rank, late, code, words):
    caplog.set_level(logging.WARNING)
    side = LiveSide(Losing(late, code), Trainer(rank), 2, 5.0, False)
    side.put(CapturedStep(7, {}), False)
    end = time.monotonic() + 30
    while not any(words in record.getMessage() for record in caplog.records):
        assert time.monotonic() < end, [record.getMessage() for record in caplog.records]
        time.sleep(0.01)
    side.close(1.0)
