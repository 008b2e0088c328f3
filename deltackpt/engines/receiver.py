"""What runs in each rank of an engine: it knows which step the weights are, and moves them to another one, or not at
all.

All that can fail is done first (fetch, prove, map, compare); then the ranks agree, write, and agree again, so that
either all of them are at the new step or all at the old one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deltackpt.engines.cached_steps import CachedSteps, Steps
from deltackpt.engines.card_compile import compile_for
from deltackpt.engines.context import ChangeSource, RankContext
from deltackpt.engines.engine import Engine, attempt, model_differs, raise_on_all
from deltackpt.engines.held import differing, known_digests
from deltackpt.engines.journal_source import JournalSource
from deltackpt.engines.layer_reload import other_layers
from deltackpt.engines.memory import MemoryBackup, memories
from deltackpt.engines.methods import HasMethods, traced
from deltackpt.engines.one_folder import one_folder
from deltackpt.engines.own_steps import OwnSteps
from deltackpt.engines.patch_source import PatchSource
from deltackpt.engines.proof import Proof, left_behind, prove
from deltackpt.engines.rollback import Undo, backup, roll_back
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.slices.claim import Said, judged
from deltackpt.engines.slices.rank_slices import RankSlices
from deltackpt.engines.slices.source import ShareSource
from deltackpt.engines.staging import StagedStep
from deltackpt.engines.update import PHASES, START, RankReport, Update
from deltackpt.errors import ChainError, DeltackptError, UsageError
from deltackpt.format.manifest import Link

log = logging.getLogger(__name__)


class Receiver:
    """``link`` is the step that the weights are, None where it is not known; ``proof`` the map of the engine's memory,
    and ``why`` says what keeps a step from being scattered. ``wedged``: the weights may be those of no step.
    ``version``: the step that was last made final; ``reports``: the folder that reports go to, by default the cache.
    ``compiling``: what compiles kernels in the background since the receiver was made; the first step waits for it.
    """

    def __init__(
        self, engine: Engine, url: str, cache: str | None, *, ref: str = "main", origin: str = "",
        source: ChangeSource | None = None, trusted: bool = False,
    ) -> None:  # fmt: skip
        """``cache``: the managed cache of this host, None for an engine that is its own base. ``source`` says what a
        step writes where; by default it is the journal of the cache, or without one the patches themselves.
        ``trusted``: without a cache, only what is signed by keys that the environment of the engine trusts.

        Raises what opening the repository raises, and ChainError ``base-differs`` where ``origin``, the checkpoint
        that the engine was started from, is on this host and no model of this repository."""
        self.engine, self.reports, self.version = engine, cache or "", START
        self.link: Link | None = None
        self.proof: Proof | None = None
        self.why = "the engine was not started from a step of this repository"
        self.wedged = False
        self.memory = memories(engine.model)
        self.compiling = compile_for(t for storage in self.memory.values() for _, t, _ in storage.tensors)
        self._sliced = cache is None and not engine.whole  # ranks that prove a step together
        self._slices: RankSlices | None = None
        own = ShareSource() if self._sliced else PatchSource()
        self._source = source or (own if cache is None else JournalSource())
        self._absences = self._proven = 0  # how often the weights were put aside, and had been when they were proven
        self._staged: StagedStep | None = None
        self._undoable: tuple[Link | None, Undo] | None = None  # the step before the last `apply`, and what undoes it
        self._trusted = trusted
        raise_on_all(engine, attempt(lambda: self._attach(url, cache, ref, origin)))
        found = engine.agree((self.link, self.proof is not None))
        if any(answer != found[0] for answer in found):
            self.link, self.proof, self.why = None, None, "the ranks were not started from one step"
            self._slices = None

    def update(self, want: Update, *, open: bool = False) -> RankReport:
        """Do a phase. Raises the typed error of the first rank that could not, on every rank."""
        began = time.monotonic()
        report = RankReport(self.engine.rank, want.phase, open=open)
        try:
            if want.phase not in PHASES:
                raise UsageError("update-phase", where="update", have=repr(want.phase), need=" or ".join(PHASES))
            if want.phase == "final":
                self.confirm()
                self.version = str(self.link.step) if self.link is not None else self.version
            elif want.phase != "report":
                self._look()
                phases = {"stage": self._stage, "apply": self._apply, "check": self._check, "undo": self._undo}
                try:
                    phases[want.phase](want, report)
                finally:
                    if want.phase == "apply":
                        self.steps.prepare(None)
        except DeltackptError as error:
            report.error = error.to_dict()
            raise
        finally:
            report.wedged, report.final, report.version = self.wedged, self.final, self.version
            report.stale = self.engine.stale()
            if self.link is not None:
                report.step, report.id = self.link.step, self.link.id
            report.seconds["all"] = round(time.monotonic() - began, 4)
            report.save(self.reports, want.token)
        return report

    @property
    def final(self) -> bool:
        """Whether the last update, if there was one, was confirmed or undone."""
        return self._undoable is None

    def confirm(self) -> None:
        """The update is final: what was held for an undo is released."""
        self._undoable = None

    # Phases

    def _attach(self, url: str, cache: str | None, ref: str, origin: str) -> None:
        """Find the step that the engine was started from, have it in the cache, and learn the map against it."""
        self._proven = self._absences = self.engine.absences()
        self.steps: Steps = (
            OwnSteps.open(url, ref, trusted=self._trusted, alone=self.engine.whole)
            if cache is None
            else CachedSteps.open(url, cache, ref)
        )
        self.link = self.steps.identify(origin)
        if self.link is None:
            return
        self.steps.ensure_any(self.link)
        with self.steps.held(self.link, origin):
            self._prove(self.link, RankReport())
        if self.proof is None:
            self.why = f"step {self.link.step} is not in the cache"
        elif not self.proof.regions and self.proof.mismatch:
            self.link, self.proof, self.why = None, None, "the engine's weights are not those of its checkpoint"
            self._slices = None

    def _stage(self, want: Update, report: RankReport) -> None:
        self._staged = StagedStep(self._context(), self._source, self._target(want), want, open=report.open)

    def _apply(self, want: Update, report: RankReport) -> None:
        staged = self._staged_for(want)
        link = staged.link
        report.seconds.update(staged.seconds)
        raise_on_all(self.engine, staged.error)
        claim = staged.scatter.claim if staged.scatter is not None else None
        mine = (
            staged.scatter is not None,
            self.link,
            self.wedged,
            staged.reason,
            claim.told if claim is not None else None,
        )
        answers = self.engine.agree(mine)
        report.state, report.reason = staged.state, next((reason for *_, reason, _ in answers if reason), "")
        report.expected = staged.expected
        if all(at == link and not wedged for _, at, wedged, *_ in answers):
            report.mode, report.path, report.reason = "none", "none", "the engine is at this step"
            return
        writes = staged.scatter if all(mapped for mapped, *_ in answers) else None
        if writes is not None and claim is not None and (why := claim.refuted([told for *_, told in answers])):
            writes, report.reason = None, why
        report.mode = "reload" if writes is None else writes.mode
        report.path = staged.path(report.mode)
        if report.expected not in ("", report.path):
            log.warning("step %s goes by %s, not by %s: %s", link.step, report.path, report.expected, report.reason)
        report.decoded = writes.decoded if writes is not None else {}
        undo = self._undo_of(writes, staged.backup)
        failed = self._write(writes, link, report)
        try:
            raise_on_all(self.engine, failed)
        except DeltackptError:
            self._roll_back(undo, self.link)
            raise
        self._undoable = self.link, undo
        self.link, self.wedged, self._proven = link, False, staged.context.absences
        report.proof = self.proof.summary() if self.proof else {}

    def _check(self, want: Update, report: RankReport) -> None:
        """Compare every proven weight with the step that the engine reports."""
        report.mode = "check"
        said: list[Said | None] = [None]
        if self._sliced:
            raise_on_all(self.engine, attempt(lambda: said.append(self._say())))
            said = self.engine.agree(said[-1])
        error = attempt(lambda: self._compare(report, said))
        if error is not None and error.code == "engine-wedged":
            self.wedged, self.why = True, "the weights are those of no step"
        raise_on_all(self.engine, error)

    def _undo(self, want: Update, report: RankReport) -> None:
        """Undo the last `apply`, unless it was confirmed."""
        if self._undoable is not None:
            before, undo = self._undoable
            self._roll_back(undo, before)
            self.link, self._undoable = before, None
            report.mode = "undo"

    # Parts

    def _context(self) -> RankContext:
        """The state of the rank now."""
        return RankContext(
            self.engine.rank,
            self.steps,
            self.memory,
            self.link,
            self.proof,
            why=self.why,
            wedged=self.wedged,
            final=self.final,
            absences=self._absences,
            proven=self._proven,
            reports=self.reports,
            slices=self._slices,
            stale=tuple(self.engine.stale()),
            version=self.version,
            load_layers=self.engine.load_layers if isinstance(self.engine, HasMethods) else None,
            loose=self.engine.loose if isinstance(self.engine, HasMethods) else lambda: None,
        )

    def _look(self) -> None:
        """Raises ChainError ``engine-asleep`` on every rank where one of them may not look at its weights."""
        seen: list[int] = []
        raise_on_all(self.engine, attempt(lambda: seen.append(self.engine.absences())))
        self._absences = seen[0]
        if self.proof is not None and left_behind(self.proof, self.engine.model):
            # What is mapped is nobody's any more: a step written there would be proven, and change nothing.
            self.memory, self.proof, self._slices = memories(self.engine.model), None, None
            self.why = "the engine's weights lie in other memory than when they were mapped"
            if self._undoable is not None:
                self._undoable = self._undoable[0], None

    def _target(self, want: Update) -> Link:
        """The same step on every rank."""
        found: list[Link] = []
        raise_on_all(self.engine, attempt(lambda: found.append(self.steps.find(want.step))))
        link: Link = self.engine.agree(found[0])[0]
        return link

    def _staged_for(self, want: Update) -> StagedStep:
        """What was staged for this step, or is now."""
        link, now = self._target(want), self._context()
        staged, self._staged = self._staged, None
        if staged is None or not staged.fits(link, want, now):
            staged = StagedStep(now, self._source, link, want)
        staged.join()
        return staged

    def _undo_of(self, writes: Scatter | None, copied: MemoryBackup | None) -> Undo:
        """What undoes an update, prepared before it begins. ``copied``: all weights, where that was done before."""
        undo: list[Undo] = []
        raise_on_all(self.engine, attempt(lambda: undo.append(writes or copied or backup(self._context()))))
        return undo[0]

    def _write(self, writes: Scatter | None, link: Link, report: RankReport) -> DeltackptError | None:
        """Scatter or reload. -> what went wrong."""
        began = time.monotonic()
        reload = self._reload_together if self._sliced else self._reload
        failed = attempt(lambda: reload(link, report) if writes is None else writes.write())
        report.elements = 0 if writes is None or failed is not None else writes.elements
        report.seconds["write"] = round(time.monotonic() - began, 4)
        return failed

    def _reload(self, link: Link, report: RankReport) -> None:
        """The whole checkpoint, by the engine's own loader; what is proven of it is read back. The map is learned where
        there is none yet."""
        with self.steps.folder(link) as folder:
            self._load(folder, link, report)

    def _reload_together(self, link: Link, report: RankReport) -> None:
        """The same of ranks that have no cache, from one checkpoint on each host."""
        with one_folder(self.engine, self.steps, link) as folder:
            failed = attempt(lambda: self._load(folder, link, report))
        if failed is not None:
            raise failed

    def _load(self, folder: Path, link: Link, report: RankReport) -> None:
        began = time.monotonic()
        missing = self.engine.native(folder)
        report.seconds["load"] = round(time.monotonic() - began, 4)
        if missing and self.link is None:  # else the step has the tensors that the engine was started from
            raise model_differs(f"step {link.step}", missing)
        if self.proof is None:
            self._prove(link, report)
            return
        began = time.monotonic()
        if (wrong := differing(self.steps, link, self.proof, self.memory)) is not None:
            if wrong:
                have, need = f"other bits than step {link.step} after its load", "those of the step"
                raise ChainError("engine-refused", where=wrong[0][:80], have=have, need=need)
            report.checked = self.proof.share(self.steps.table(link))
            report.seconds["compare"] = round(time.monotonic() - began, 4)
        with self.steps.slot(link) as slot:
            if self._slices is not None and slot is not None:
                self._slices.fill(slot.read)

    def _say(self) -> Said | None:
        """What the rank holds, and what it knows itself to be wrong of it; None where it has no map."""
        return None if self._slices is None else self._slices.said()

    def _differing(self, link: Link, proof: Proof, said: Sequence[Said | None]) -> tuple[list[str] | None, int]:
        """See `held.differing`; of ranks that prove a step together all that they hold, and how many tensors there are
        of which that is not all."""
        if self._slices is None:
            return differing(self.steps, link, proof, self.memory), 0
        digests, heard = known_digests(self.steps, link), [one for one in said if one is not None]
        if digests is None or len(heard) < len(said):
            return None, 0
        wrong, open = judged([one.cells for one in heard], self.steps.table(link), digests)
        wrong = sorted({*wrong, *(name for one in heard for name in one.wrong)})
        return wrong, len({*open} - {*wrong})

    def _compare(self, report: RankReport, said: Sequence[Said | None]) -> None:
        wrong, open = None, 0
        if self.link is not None and self.proof is not None:
            wrong, open = self._differing(self.link, self.proof, said)
            if wrong is not None:
                wrong += other_layers(self.engine, self.steps, self.link, self.proof)
        if self.link is None or self.proof is None or wrong is None:
            report.checked = "no map of the weights, or no slot to compare with"
            return
        report.checked = self.proof.share(self.steps.table(self.link), less=open)
        self._proven = self._proven if open else self._absences
        if wrong:
            have, need = f"other bits than step {self.link.step}", "those of the step"
            hint = "Restart the engine; until then it answers from unpublished weights."
            raise ChainError("engine-wedged", where=wrong[0][:80], have=have, need=need, hint=hint)

    def _roll_back(self, undo: Undo, before: Link | None) -> None:
        """Restore the old step. Where that fails, the engine is wedged, and says so."""
        try:
            roll_back(self.engine, replace(self._context(), link=before), undo)
        except Exception as error:
            self.wedged, self.why = True, f"going back failed: {error}"

    def _prove(self, link: Link, report: RankReport) -> None:
        """Trace the map from the loader, and compare it with the step that the engine is at."""
        began = time.monotonic()
        with self.steps.slot(link) as slot:
            if slot is None:
                return
            engine = self.engine
            found, seen = traced(engine, engine.load, engine.model, [*self.steps.load_order(link)])
            self.proof = prove(
                found, engine.model, self.memory, slot.table, slot.read,
                whole=engine.whole, traits=engine.traits, digests=known_digests(self.steps, link), seen=seen,
            )  # fmt: skip
            if self._sliced:
                self._slices = RankSlices(slot.table, self.proof, self.memory)
                self._slices.fill(slot.read)
            self.why = next((f"{n}: {w}" for n, w in self.proof.unproven.items()), self.proof.why_again)
        report.seconds["proof"] = round(time.monotonic() - began, 4)
