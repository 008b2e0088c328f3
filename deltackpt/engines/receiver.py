"""What runs in each rank of an engine: it knows which step the weights are, and takes them to another one, or nowhere.

All that can fail is done first (fetch, prove, map, compare); then the ranks agree, write, and agree again, so that
either all of them are at the new step or all at the old one.
"""

from __future__ import annotations

import time
from pathlib import Path

from deltackpt.cache.cache import find_current
from deltackpt.engines.cached_steps import slot_of
from deltackpt.engines.engine import Engine, attempt, model_differs, raise_on_all
from deltackpt.engines.identify import identify
from deltackpt.engines.memory import Copies, memories
from deltackpt.engines.proof import Proof, derived, prove, quantized, same
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.shared_cache import bring, reading
from deltackpt.engines.staging import StagedStep
from deltackpt.engines.tracing import trace
from deltackpt.engines.update import PHASES, RankReport, Update
from deltackpt.errors import ChainError, DeltackptError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.repository import Repository

Undo = Scatter | Copies | None  # None: the slot of the step before


class Receiver:
    """``link`` is the step that the weights are, None where nobody knows; ``proof`` the map of the engine's memory, and
    ``why`` says what keeps a step from being scattered. ``wedged``: the weights may be those of no step.
    """

    def __init__(self, engine: Engine, url: str, cache: str, *, ref: str = "main", origin: str = "") -> None:
        """Raises what opening the repository raises, ChainError ``base-differs`` where ``origin``, the checkpoint that
        the engine was started from, is at hand and no model of this repository."""
        self.engine, self.cache, self.ref = engine, Path(cache), ref
        self.origin = origin
        self.link: Link | None = None
        self.proof: Proof | None = None
        self.why = "the engine was not started from a step of this repository"
        self.wedged = False
        self.memory = memories(engine.model)
        self._staged: StagedStep | None = None
        self._kept: tuple[Link | None, Undo] | None = None
        raise_on_all(engine, attempt(lambda: self._attach(url)))
        found = engine.agree((self.link, self.proof is not None))
        if any(said != found[0] for said in found):
            self.link, self.proof, self.why = None, None, "the ranks were not started from one step"

    def update(self, want: Update, *, open: bool = False) -> RankReport:
        """Do a phase. Raises the typed error of the first rank that could not, on every rank."""
        began = time.monotonic()
        report = RankReport(self.engine.rank, want.phase, open=open)
        try:
            if want.phase not in PHASES:
                raise UsageError("update-phase", where="update", have=repr(want.phase), need=" or ".join(PHASES))
            phases = {"stage": self._stage, "apply": self._apply, "check": self._check, "undo": self._undo}
            phases[want.phase](want, report)
        except DeltackptError as error:
            report.error = error.to_dict()
            raise
        finally:
            report.wedged = self.wedged
            if self.link is not None:
                report.step, report.id = self.link.step, self.link.id
            report.seconds["all"] = round(time.monotonic() - began, 4)
            report.save(self.cache, want.token)
        return report

    def confirm(self) -> None:
        """The update is final: what was kept for going back is let go."""
        self._kept = None

    # Phases

    def _attach(self, url: str) -> None:
        """Find the step that the engine was started from, have it in the cache, and learn the map against it."""
        self.repo = Repository.open(url)
        self.link = identify(self.repo, self.origin, self.ref)
        if self.link is None:
            return
        try:
            find_current(self.cache)
        except NotFoundError:
            bring(self.repo, self.cache, self.link)
        self._prove(self.link, RankReport())
        if self.proof is None:
            self.why = f"step {self.link.step} is not in the cache"
        elif not self.proof.regions and self.proof.mismatch:
            self.link, self.proof, self.why = None, None, "the engine's weights are not those of its checkpoint"

    def _stage(self, want: Update, report: RankReport) -> None:
        self._staged = StagedStep(self, self._target(want), want, open=report.open)

    def _apply(self, want: Update, report: RankReport) -> None:
        staged = self._ready(want)
        link = staged.link
        report.seconds.update(staged.seconds)
        raise_on_all(self.engine, staged.error)
        said = self.engine.agree((staged.scatter is not None, self.link, self.wedged, staged.reason))
        report.state, report.reason = staged.state, next((reason for *_, reason in said if reason), "")
        if all(at == link and not wedged for _, at, wedged, _ in said):
            report.mode, report.reason = "none", "the engine is at this step"
            return
        writes = staged.scatter if all(mapped for mapped, *_ in said) else None
        report.mode = "reload" if writes is None else "scatter"
        undo: list[Undo] = []
        raise_on_all(self.engine, attempt(lambda: undo.append(writes or self._copies())))
        began = time.monotonic()
        failed = attempt(lambda: self._write(writes, link, report))
        report.seconds["write"] = round(time.monotonic() - began, 4)
        if failed is None and self.proof is None:
            failed = attempt(lambda: self._prove(link, report))
        try:
            raise_on_all(self.engine, failed)
        except DeltackptError:
            self._back(undo[0], self.link)
            raise
        self._kept = self.link, undo[0]
        self.link, self.wedged = link, False
        report.proof = self.proof.summary() if self.proof else {}

    def _check(self, want: Update, report: RankReport) -> None:
        """Every proven weight against the step that the engine is said to be at."""
        report.mode = "check"
        error = attempt(lambda: self._compare(report))
        if error is not None and error.code == "engine-wedged":
            self.wedged, self.why = True, "the weights are those of no step"
        raise_on_all(self.engine, error)

    def _undo(self, want: Update, report: RankReport) -> None:
        """Undo the last `apply`, unless it was confirmed."""
        if self._kept is not None:
            before, undo = self._kept
            self._back(undo, before)
            self.link, self._kept = before, None
            report.mode = "undo"

    # Parts

    def _target(self, want: Update) -> Link:
        """The same step on every rank."""
        found: list[Link] = []
        raise_on_all(self.engine, attempt(lambda: found.append(self.repo.find(want.step, self.ref))))
        link: Link = self.engine.agree(found[0])[0]
        return link

    def _ready(self, want: Update) -> StagedStep:
        """What was staged for this step, or is now."""
        link = self._target(want)
        staged, self._staged = self._staged, None
        if staged is None or staged.link != link or staged.want.mode != want.mode:
            staged = StagedStep(self, link, want)
        staged.join()
        return staged

    def _write(self, writes: Scatter | None, link: Link, report: RankReport) -> None:
        if writes is not None:
            writes.write()
            report.elements = writes.elements
            return
        with reading(self.cache) as held:
            missing = self.engine.native(held.slot(link))
        if missing and self.link is None:  # else the step has the tensors that the engine was started from
            raise model_differs(f"step {link.step}", missing)
        with slot_of(self.repo, self.cache, link) as slot:
            if self.proof is not None and slot is not None:
                if wrong := same(self.proof, self.memory, slot.table, slot.read):
                    have, need = f"other bits than step {link.step} after its load", "those of the step"
                    raise ChainError("engine-refused", where=wrong[0][:80], have=have, need=need)
                report.checked = self.proof.share(slot.table)

    def _compare(self, report: RankReport) -> None:
        with slot_of(self.repo, self.cache, self.link) as held:
            if self.proof is None or held is None:
                report.checked = "no map of the weights, or no slot to compare with"
                return
            wrong = same(self.proof, self.memory, held.table, held.read)
            report.checked = self.proof.share(held.table)
        if wrong:
            have, need = f"other bits than step {self.link.step if self.link else '?'}", "those of the step"
            hint = "Restart the engine; until then it answers from weights that nobody published."
            raise ChainError("engine-wedged", where=wrong[0][:80], have=have, need=need, hint=hint)

    def _copies(self) -> Undo:
        """All weights, where no slot has those that a load will overwrite."""
        with slot_of(self.repo, self.cache, self.link) as held:
            return Copies(self.memory) if held is None else None

    def _back(self, undo: Undo, before: Link | None) -> None:
        """To the old step: by the old words, or by its slot. Where that fails, the engine is wedged, and says so."""
        try:
            if isinstance(undo, Scatter):
                undo.rollback()
                return
            self.engine.mend()
            if undo is None:
                self._reload(before)
                return
            undo.rollback()
            if made := quantized(self.engine.model) or derived(self.engine.model, self.memory):
                raise ValueError(made)
        except Exception as error:
            self.wedged, self.why = True, f"going back failed: {error}"

    def _reload(self, before: Link | None) -> None:
        """The old step from its slot, unless all of it is still there."""
        with slot_of(self.repo, self.cache, before) as held:
            if held is None:
                raise ValueError("no slot of the old step")
            proof = self.proof
            if proof is None or proof.unproven or same(proof, self.memory, held.table, held.read):
                self.engine.native(held.root)
                if proof is not None and same(proof, self.memory, held.table, held.read):
                    raise ValueError("other bits than those of the old step")

    def _prove(self, link: Link, report: RankReport) -> None:
        """Learn the map from the loader, and hold it against a step that the engine is at."""
        began = time.monotonic()
        with slot_of(self.repo, self.cache, link) as held:
            if held is None:
                return
            engine = self.engine
            order = (t for shard in self.repo.layout(self.repo.load(link)).shards for t in shard.header.tensors)
            found = trace(engine.load, engine.model, self.memory, order)
            self.proof = prove(found, engine.model, self.memory, held.table, held.read, whole=engine.whole)
            self.why = next((f"{n}: {w}" for n, w in self.proof.unproven.items()), "")
        report.seconds["proof"] = round(time.monotonic() - began, 4)
