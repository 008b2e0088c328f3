"""Ranks of bench/live_cards.py of which one is killed in each phase of a step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from live_card_ranks import PHASES, Child, Trainer, engine, reach


def killed_at(phase: str, step: int) -> Callable[[Any], None]:
    """A report that kills this process as a phase of a step begins."""

    def report(event: Any) -> None:
        if (event.kind, event.step) == (phase, step):
            os.kill(os.getpid(), signal.SIGKILL)

    return report


def kill_engine(c: Child) -> None:
    """The last engine is killed in each phase, and a new process takes its place; others stay."""
    if c.rank >= c.o.trainers:
        at = PHASES.index(c.o.phase) + 1 if c.o.phase else 0
        receiver, _ = engine(c, killed_at(c.o.phase, at) if at else None, c.o.phase)
        if at:
            c.store.set(f"in-{c.o.phase}", "1")
        reach(c, receiver, len(PHASES) + 1)
        c.say(rank=c.rank, step=receiver.step, received=receiver.received)
        return
    t = Trainer(c)
    t.hook.step(0)
    t.hook.flush()
    for number, phase in enumerate(PHASES, 1):
        if c.rank == 0:
            c.store.set("next", phase)
            c.store.wait([f"in-{phase}"])
            t.live.wait_for(c.o.engines, c.o.timeout)
        c.meet(f"kill-{phase}", c.o.trainers)
        taken = t.step(number)
        if c.rank == 0:
            have = t.engines_at(number)
            c.say(killed_in=phase, seconds=taken, engines_that_have_it=have, others=c.o.engines - 1)
            assert have >= c.o.engines - 1, [e for e in t.events if e.step == number]
        t.hook.flush()
    t.step(len(PHASES) + 1)
    t.hook.close()


def kill_trainer(c: Child) -> None:
    """The first rank dies in a phase of step 1: each engine says which step it then has."""
    if c.rank < c.o.trainers:
        t = Trainer(c, killed_at(c.o.phase, 1) if c.rank == 0 else None)
        t.hook.step(0)
        t.hook.flush()
        c.meet("begun", c.world)
        t.step(1)
        return
    receiver, state = engine(c)
    reach(c, receiver, 0)
    old = c.sums(state)
    c.meet("begun", c.world)
    end = time.monotonic() + c.o.limit / 2
    while receiver.connected and time.monotonic() < end:
        receiver.receive(0.5)
    with suppress(Exception):
        receiver.receive(0.1)  # by the repository, if that has the step
    has = "old" if c.sums(state) == old else "new"
    assert (has == "old") == (receiver.step == 0), f"step {receiver.step} with the bits of the {has} one"
    c.say(trainer_killed_in=c.o.phase, rank=c.rank, step=receiver.step, bits=has)
