"""An update that is being prepared while the engine works, in a thread of its own: nothing of the engine is written."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from deltackpt.cache.layout import CacheLayout
from deltackpt.engines.engine import attempt
from deltackpt.engines.scatter import Fallback, Scatter, prepare
from deltackpt.engines.shared_cache import bring
from deltackpt.engines.slots import shapes, slot_of
from deltackpt.engines.update import RankReport, Update
from deltackpt.errors import ChainError, CheckpointError, DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.restore.journal import Journal

if TYPE_CHECKING:
    from deltackpt.engines.receiver import Receiver


class StagedStep:
    """``scatter``: the writes, or None with the ``reason`` why the whole checkpoint has to be loaded; ``error``: why
    the step cannot be taken at all. All three are there when the thread has ended.
    """

    def __init__(self, to: Receiver, link: Link, want: Update, *, open: bool = False) -> None:
        self.to, self.link, self.want, self.open = to, link, want, open
        self.scatter: Scatter | None = None
        self.state = self.reason = ""
        self.error: DeltackptError | None = None
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="deltackpt-stage", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        """Prepare, and say so: whoever asked pauses the engine only then."""
        self.error = attempt(self._prepare)
        if self.want.token:
            self._report().save(self.to.cache, f"{self.want.token}-staged")

    def _report(self) -> RankReport:
        at = self.to.link
        mode = "reload" if self.scatter is None else "scatter"
        return RankReport(
            self.to.engine.rank,
            "staged",
            step=at.step if at else None,
            id=at.id if at else "",
            state=self.state,
            mode="none" if self._there() else mode,
            reason=self.reason,
            elements=self.scatter.elements if self.scatter else 0,
            open=self.open,
            error=self.error.to_dict() if self.error else None,
            seconds=dict(self.seconds),
        )

    def _there(self) -> bool:
        return self.to.link == self.link and not self.to.wedged

    def _prepare(self) -> None:
        to, link, began = self.to, self.link, time.monotonic()
        target = to.repo.load(link)
        self.state = target.state
        if self.want.state not in (None, target.state):
            have, need = f"state {target.state[:16]}", f"state {str(self.want.state)[:16]}, as asked for"
            raise ChainError("state-unexpected", where=f"step {link.step}", have=have, need=need)
        if self._there():
            return
        bring(to.repo, to.cache, link)
        self.seconds["cache"] = round(time.monotonic() - began, 4)
        self._fits()
        began = time.monotonic()
        try:
            self.scatter = self._scatter()
        except Fallback as reason:
            self.reason = str(reason)
        self.seconds["prepare"] = round(time.monotonic() - began, 4)

    def _fits(self) -> None:
        """A loader that meets another shape in the middle leaves a mix: it is not let that far."""
        to = self.to
        if to.link is None:
            return
        old, new = shapes(to.repo, to.link), shapes(to.repo, self.link)
        if old != new:
            other = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
            have, need = f"{len(other)} other tensors, such as {other[0][:80]!r}", "those of the engine's model"
            hint = "Start an engine from this step."
            raise CheckpointError("model-differs", where=f"step {self.link.step}", have=have, need=need, hint=hint)

    def _scatter(self) -> Scatter:
        to = self.to
        if self.want.mode == "reload":
            raise Fallback("asked for")
        if to.wedged or to.link is None or to.proof is None:
            raise Fallback(to.why or "the engine's memory is not mapped")
        with slot_of(to.repo, to.cache, to.link) as before:
            journal = Journal.read(CacheLayout(to.cache).journal)
            if before is None or journal is None or (journal.start, journal.end) != (to.link, self.link):
                raise Fallback(f"the cache does not lead from step {to.link.step} to {self.link.step}")
            return prepare(to.proof, to.memory, before.table, journal, before.read)
