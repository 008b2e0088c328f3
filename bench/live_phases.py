"""Where the time of a live step goes, on either side: seconds from the call of `step()` on, for processes of one host.

Phases begin as the session tells of them; what lies between is timed around the functions that do it. The clock is
`time.monotonic`, which processes of a host share.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

KINDS = ("announce", "move", "prove", "agree", "write", "live")


class Phases:
    """What one rank did since the last `show`, in the order in which it began."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    def report(self, event: Any) -> None:
        """Take a session's event."""
        if event.kind in KINDS:
            self.mark(event.kind)

    def mark(self, name: str) -> None:
        """Something begins, for the first time of this step."""
        self._begun.setdefault(name, time.monotonic())

    def around(self, owner: Any, name: str, label: str) -> None:
        """Time all calls of a function, or method, of ``owner``."""
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            self.mark(label)
            began = time.monotonic()
            try:
                return inner(*given, **named)
            finally:
                self._taken[label] = self._taken.get(label, 0.0) + time.monotonic() - began

        setattr(owner, name, timed)

    def collections(self) -> None:
        """Time the interpreter's full collections of garbage, which stop all threads for .1 s and more."""
        began = 0.0

        def seen(phase: str, about: dict[str, int]) -> None:
            nonlocal began
            if about["generation"] < 2:
                return
            if phase == "start":
                self.mark("collect")
                began = time.monotonic()
            else:
                self._taken["collect"] = self._taken.get("collect", 0.0) + time.monotonic() - began

        gc.callbacks.append(seen)

    def show(self, began: float) -> dict[str, list[float]]:
        """{phase: [seconds after ``began``, seconds that it took, where that is known]}, and forget it all."""
        found = {
            name: [round(at - began, 4), *([round(self._taken[name], 4)] if name in self._taken else [])]
            for name, at in sorted(self._begun.items(), key=lambda item: item[1])
        }
        self._begun, self._taken = {}, {}
        return found


class Stacks:
    """Where all threads of this process are, looked at every millisecond: what waits shows as well as what works. It
    takes some time of the step itself."""

    DEPTH, MOST = 4, 40
    IDLE = ("_worker", "_accept")  # functions that wait for work

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._looks, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def end(self) -> dict[str, float]:
        """{thread and calls, the innermost first: of all looks, how many saw it there}, the most frequent first."""
        self._ended.set()
        self._thread.join()
        return {where: round(count / max(1, self._looks), 3) for where, count in self._seen.most_common(self.MOST)}

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self._looks += 1
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for ident, frame in sys._current_frames().items():
                if ident != threading.get_ident() and frame.f_code.co_name not in self.IDLE:
                    self._seen[f"{names.get(ident, ident)}: {self._calls(frame)}"] += 1

    def _calls(self, frame: Any) -> str:
        found = list[str]()
        while frame is not None and len(found) < self.DEPTH:
            code = frame.f_code
            found.append(f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno} {code.co_name}")
            frame = frame.f_back
        return " < ".join(found)


def of_trainer(hook: Any, live: Any) -> Phases:
    """Around what a trainer's rank does. Events are told to `Phases.report`."""
    from deltackpt.carriers.pairs import Pair
    from deltackpt.gpu import pipeline
    from deltackpt.hooks import trainer
    from deltackpt.live import delivery

    found = Phases()
    found.collections()
    found.around(hook, "_extract", "extract")
    found.around(pipeline, "find", "capture")  # what changed is found; `encode` has it encoded, or takes it as it is
    found.around(trainer, "counts_with", "count")
    found.around(hook._pending, "put", "put")  # for the repository
    found.around(live, "deliver", "deliver")
    found.around(delivery, "encode_changes", "encode")
    found.around(Pair, "_send", "send")
    found.around(hook.publisher, "publish", "publish")  # into the repository
    return found


def of_engine() -> Phases:
    """Around what an engine's rank does."""
    from deltackpt.carriers.pairs import Pair
    from deltackpt.engines import card
    from deltackpt.live.card import CardWeights
    from deltackpt.live.parts import StepParts
    from deltackpt.live.plain_card import PlainSteps
    from deltackpt.live.rank_state import RankState

    found = Phases()
    found.collections()
    found.around(StepParts, "begin_to_card", "parts")  # headers and tables; the bytes are on their way
    found.around(PlainSteps, "changes", "plain")
    found.around(Pair, "_receive", "receive")
    found.around(CardWeights, "prepare", "prepare")
    found.around(CardWeights, "_sorted_out", "tasks")
    found.around(card, "decode_and_keep", "decode")
    found.around(RankState, "write", "put")
    return found
