"""An update that is prepared while the engine works, in a thread of its own: nothing of the engine is written."""

from __future__ import annotations

import threading
import time

from deltackpt.engines.context import ChangeSource, RankContext
from deltackpt.engines.engine import attempt
from deltackpt.engines.held import differing
from deltackpt.engines.memory import MemoryBackup
from deltackpt.engines.proof import Proof
from deltackpt.engines.rollback import backup
from deltackpt.engines.scatter import Fallback, Scatter
from deltackpt.engines.update import RankReport, Update
from deltackpt.errors import ChainError, CheckpointError, DeltackptError
from deltackpt.format.manifest import Link
from deltackpt.torch_views.names import listed


class StagedStep:
    """``scatter``: the writes, or None with the ``reason`` why the whole checkpoint has to be loaded; ``error``: why
    the step cannot be reached at all. All three are there when the thread has ended.

    All of it holds for the rank as it was: ``context``.
    """

    def __init__(
        self, context: RankContext, source: ChangeSource, link: Link, want: Update, *, open: bool = False
    ) -> None:
        self.context, self.link, self.want, self.open = context, link, want, open
        self._source = source
        self.scatter: Scatter | None = None
        self.backup: MemoryBackup | None = None  # of all weights, where they will be loaded and no slot has them
        self.state = self.reason = ""
        self.error: DeltackptError | None = None
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="deltackpt-stage", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is prepared, or cannot be."""
        self._thread.join()

    def fits(self, link: Link, want: Update, now: RankContext) -> bool:
        """Is it what an update asks for, of the rank as it is now?"""
        return self.link == link and self.want.mode == want.mode and self.context.still(now)

    @property
    def expected(self) -> str:
        """The way that the weights take if nothing is in its way, as `RankReport` names it."""
        if self.context.at(self.link):
            return "none"
        if self.want.mode == "reload":
            return "reload"
        way = self.scatter.mode if self.scatter is not None else "scatter"
        return self.path(way) if self.context.link is not None and not self.context.wedged else ""

    def path(self, mode: str) -> str:
        """The way that the weights take in a mode."""
        return str(getattr(self._source, "path", mode)) if mode == "scatter" else mode

    def _run(self) -> None:
        """Prepare, and report: a client pauses the engine only then."""
        self.error = attempt(self._prepare)
        if self.want.token:
            self._report().save(self.context.reports, f"{self.want.token}-staged")

    def _report(self) -> RankReport:
        at = self.context.link
        mode = "reload" if self.scatter is None else self.scatter.mode
        mode = "none" if self.context.at(self.link) else mode
        return RankReport(
            self.context.rank,
            "staged",
            step=at.step if at else None,
            id=at.id if at else "",
            state=self.state,
            mode=mode,
            reason=self.reason,
            path=self.path(mode),
            expected=self.expected,
            elements=self.scatter.elements if self.scatter else 0,
            decoded=self.scatter.decoded if self.scatter else {},
            open=self.open,
            final=self.context.final,
            version=self.context.version,
            stale=list(self.context.stale),
            error=self.error.to_dict() if self.error else None,
            seconds=dict(self.seconds),
        )

    def _prepare(self) -> None:
        steps, link, began = self.context.steps, self.link, time.monotonic()
        self.state = steps.state(link)
        if self.want.state not in (None, self.state):
            have, need = f"state {self.state[:16]}", f"state {str(self.want.state)[:16]}, as asked for"
            raise ChainError("state-unexpected", where=f"step {link.step}", have=have, need=need)
        if self.context.at(link):
            return
        steps.ensure(link)
        self.seconds["cache"] = round(time.monotonic() - began, 4)
        self._check_shapes()
        began = time.monotonic()
        try:
            self.scatter = self._scatter()
            if layers := self.scatter.layers:
                self.reason = f"{listed(layers, 2)} loaded again: {self.context.why}"
        except Fallback as reason:
            self.reason = str(reason)
        steps.prepare(link if self.scatter is None else None)
        if self.scatter is None:
            self.backup = backup(self.context)
        self.seconds["prepare"] = round(time.monotonic() - began, 4)

    def _check_shapes(self) -> None:
        """A loader that meets another shape in the middle leaves tensors of two steps: it is not called then."""
        if self.context.link is None:
            return
        steps = self.context.steps
        old, new = steps.shapes(self.context.link), steps.shapes(self.link)
        if old != new:
            other = sorted(n for n in old.keys() | new.keys() if old.get(n) != new.get(n))
            have, need = f"{len(other)} other tensors, such as {other[0][:80]!r}", "those of the engine's model"
            hint = "Start an engine from this step."
            raise CheckpointError("model-differs", where=f"step {self.link.step}", have=have, need=need, hint=hint)

    def _scatter(self) -> Scatter:
        context = self.context
        if self.want.mode == "reload":
            raise Fallback("asked for")
        if context.wedged or context.link is None or context.proof is None:
            raise Fallback(context.why or "the engine's memory is not mapped")
        if (layer := context.loose()) is not None:
            raise Fallback(f"{layer} computes with tensors that a reload has left behind")
        if context.absences != context.proven and context.slices is None:  # all ranks together prove these
            self._prove_all(context.link, context.proof)
        return Scatter(self._source.writes(context, self.link))

    def _prove_all(self, link: Link, proof: Proof) -> None:
        """Of weights that were put aside, what came back: a step that leaves a tensor alone never looks at it."""
        wrong = differing(self.context.steps, link, proof, self.context.memory)
        if wrong is None:
            raise Fallback(f"the engine slept, and there is nothing of step {link.step} to hold its weights against")
        if wrong:
            raise Fallback(f"{wrong[0]}: other weights than before the engine slept")
