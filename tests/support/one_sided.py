"""A publisher in a process of its own whose parts are read one-sidedly: it dies or stops as it has offered some."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from deltackpt.carriers import server
from deltackpt.carriers.memory import PartsInMemory
from deltackpt.carriers.server import PartServer
from deltackpt.carriers.wire import Deadline, Wire
from deltackpt.publish.sink import EncodedPart
from support.live import TOKEN, until
from support.live_ranks import note
from support.states import ORIGIN

SIZES = (1, 1000, (9 << 20) + 5)


def data_of(size: int) -> bytes:
    """The bytes of a part, known to both ends."""
    return np.random.default_rng(size).bytes(size)


def made_of(size: int) -> EncodedPart:
    """They in pieces: small ones, and one that is read where it lies."""
    data = memoryview(data_of(size))
    cuts = [0, 0, size // 9, size // 9 + size // 100, size]
    chunks = tuple(data[a:b] for a, b in zip(cuts, cuts[1:], strict=False))
    return EncodedPart(1, ORIGIN, (), chunks, size)


class Dying(Wire):
    """A connection over which memory is offered, and then a signal ends or stops the process."""

    how, after = 0, 0

    def send(self, message: Any, deadline: Deadline) -> None:
        super().send(message, deadline)
        if "agent" in message and Dying.how:
            Dying.after -= 1
            if Dying.after < 0:
                how, Dying.how = Dying.how, 0
                os.kill(os.getpid(), how)


def publisher(out: str, how: int, after: int, env: dict[str, str]) -> None:
    """It serves parts until it is told to end; with ``how`` it gives itself that signal, at an offer after some."""
    os.environ |= env
    Dying.how, Dying.after = how, after
    server.Wire = Dying  # type: ignore[misc]
    parts, path = PartsInMemory(), Path(out)
    files = [parts.put(f"part-{size}", made_of(size)) for size in SIZES]
    serving = PartServer("127.0.0.1", 0, TOKEN, parts, 30.0)
    note(path, port=serving.port, files=[[f.name, f.size, f.sha256] for f in files])
    until(path.with_suffix(".end").exists)
    serving.close()
