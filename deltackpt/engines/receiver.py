"""What runs in each rank of an engine: it knows which step the weights are, and takes them to another one, or nowhere.

All that can fail is done first (fetch, prove, map, compare); then the ranks agree, write, and agree again, so that
either all of them are at the new step or all at the old one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from deltackpt import errors
from deltackpt.cache import find_current
from deltackpt.checkpoint import Checkpoint
from deltackpt.engines.host import bring, reading
from deltackpt.engines.identify import identify
from deltackpt.engines.memory import memories
from deltackpt.engines.proof import Proof, prove, same
from deltackpt.engines.scatter import Fallback, Scatter, prepare
from deltackpt.engines.tracing import Load, trace
from deltackpt.engines.update import PHASES, Report, Update
from deltackpt.errors import ChainError, CheckpointError, DeltackptError, NotFoundError, UsageError
from deltackpt.format.manifest import Link
from deltackpt.journal import Journal
from deltackpt.repository import Repository


class Engine(Protocol):
    """What the receiver needs of an engine's rank."""

    rank: int
    whole: bool  # it holds all of the model
    model: torch.nn.Module
    load: Load  # the model's own loader

    def native(self, folder: Path) -> None:
        """Take a whole checkpoint in, in place. May leave a mix when it raises."""

    def mend(self) -> None:
        """Make the engine ready for `native` again after it raised."""

    def agree(self, word: Any) -> list[Any]:
        """What every rank says, in their order."""


class Receiver:
    def __init__(self, engine: Engine, url: str, cache: str, *, ref: str = "main", origin: str = "") -> None:
        """Raises what opening the repository raises, ChainError ``base-differs`` where ``origin``, the checkpoint that
        the engine was started from, is at hand and no model of this repository."""
        self.engine, self.cache, self.ref = engine, Path(cache), ref
        self.repo = Repository.open(url)
        self.origin = origin
        self.link: Link | None = None
        self.proof: Proof | None = None
        self.why = "the engine was not started from a step of this repository"
        self.wedged = False
        self.memory = memories(engine.model)
        self._staged: _Staged | None = None
        self._kept: tuple[Link | None, Scatter | None] | None = None
        self._all(self._attempt(self._attach))
        found = engine.agree((self.link, self.proof is not None))
        if any(said != found[0] for said in found):
            self.link, self.proof, self.why = None, None, "the ranks were not started from one step"

    def update(self, want: Update) -> Report:
        """Do a phase. Raises the typed error of the first rank that could not, on every rank."""
        began = time.monotonic()
        report = Report(self.engine.rank, want.phase)
        try:
            if want.phase not in PHASES:
                raise UsageError("update-phase", where="update", have=repr(want.phase), need=" or ".join(PHASES))
            phases = {"stage": self._stage, "apply": self._apply, "check": self._check, "undo": self._take_back}
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

    def _attach(self) -> None:
        """Find the step that the engine was started from, have it in the cache, and learn the map against it."""
        self.link = identify(self.repo, self.origin, self.ref)
        if self.link is None:
            return
        try:
            find_current(self.cache)
        except NotFoundError:
            bring(self.repo, self.cache, self.link)
        self._prove(self.link, Report())
        if self.proof is None:
            self.why = f"step {self.link.step} is not in the cache"
        elif not self.proof.regions and self.proof.mismatch:
            self.link, self.proof, self.why = None, None, "the engine's weights are not those of its checkpoint"

    def _stage(self, want: Update, report: Report) -> None:
        link = self._target(want)
        self._staged = _Staged(self, link, want)
        self._staged.thread.start()

    def _apply(self, want: Update, report: Report) -> None:
        link = self._target(want)
        staged, self._staged = self._staged, None
        if staged is None or staged.link != link or staged.want.mode != want.mode:
            staged = _Staged(self, link, want)
            staged.thread.start()
        staged.thread.join()
        report.seconds.update(staged.seconds)
        self._all(staged.error)
        writes = staged.scatter
        said = self.engine.agree((writes is not None, self.link, self.wedged, staged.reason))
        report.state, report.reason = staged.state, next((reason for *_, reason in said if reason), "")
        if not all(mapped for mapped, *_ in said):
            writes = None
        report.mode = "reload" if writes is None else "scatter"
        if all(at == link and not wedged for _, at, wedged, _ in said):
            report.mode, report.reason = "none", "the engine is at this step"
            return
        before, began = self.link, time.monotonic()
        failed = self._attempt(lambda: self._write(writes, link, report))
        report.seconds["write"] = round(time.monotonic() - began, 4)
        if failed is None and self.proof is None:
            failed = self._attempt(lambda: self._prove(link, report))
        try:
            self._all(failed)
        except DeltackptError:
            self._back(writes, before)
            raise
        self.link, self._kept, self.wedged = link, (before, writes), False
        report.proof = self.proof.summary() if self.proof else {}

    def _check(self, want: Update, report: Report) -> None:
        """Every proven weight against the step that the engine is said to be at."""
        report.mode = "check"
        with self._slot(self.link) as held:
            if self.proof is None or held is None:
                report.checked = "no map of the weights, or no slot to compare with"
                return
            wrong = same(self.proof, self.memory, held.table, held.read)
            report.checked = f"{len(self.proof.regions)} of {len(held.table)} tensors"
        error = None
        if wrong:
            self.wedged, self.why = True, "the weights are those of no step"
            have, need = f"other bits than step {self.link.step if self.link else '?'}", "those of the step"
            hint = "Restart the engine; until then it answers from weights that nobody published."
            error = ChainError("engine-wedged", where=wrong[0][:80], have=have, need=need, hint=hint)
        self._all(error)

    def _take_back(self, want: Update, report: Report) -> None:
        """Undo the last `apply`, unless it was confirmed."""
        if self._kept is not None:
            before, writes = self._kept
            self._back(writes, before)
            self.link, self._kept = before, None
            report.mode = "undo"

    # Parts

    def _target(self, want: Update) -> Link:
        """The same step on every rank."""
        found: list[Link] = []
        self._all(self._attempt(lambda: found.append(self.repo.find(want.step, self.ref))))
        link: Link = self.engine.agree(found[0])[0]
        return link

    def _attempt(self, work: Any) -> DeltackptError | None:
        """Any error as a typed one: the ranks have to hear of it, whatever it is."""
        try:
            work()
        except DeltackptError as error:
            return error
        except Exception as error:
            have = f"{type(error).__name__}: {str(error)[:300]}"
            need, hint = "the engine to take the step", "The engine was taken back to its step."
            return ChainError("engine-refused", where="the engine", have=have, need=need, hint=hint)
        return None

    def _all(self, mine: DeltackptError | None) -> None:
        """Raise on every rank what any of them met."""
        for said in self.engine.agree(None if mine is None else (type(mine).__name__, mine.to_dict())):
            if said is not None:
                kind, error = said
                words = {key: error[key] for key in ("where", "have", "need", "hint")}
                raise getattr(errors, kind)(error["error"], **words)

    def _write(self, writes: Scatter | None, link: Link, report: Report) -> None:
        if writes is not None:
            writes.write()
            report.elements = writes.elements
            return
        with reading(self.cache) as held:
            self.engine.native(held.slot(link))
        if self.proof is not None:
            with self._slot(link) as slot:
                if slot is not None and (wrong := same(self.proof, self.memory, slot.table, slot.read)):
                    raise _not_taken(wrong[0], link)
                report.checked = "all"

    def _back(self, writes: Scatter | None, before: Link | None) -> None:
        """To the old step: by the old words, or by its slot. Where that fails, the engine is wedged, and says so."""
        try:
            if writes is not None:
                writes.rollback()
                return
            self.engine.mend()
            with self._slot(before) as held:
                if held is None:
                    raise Fallback("no slot of the old step")
                if self.proof is None or same(self.proof, self.memory, held.table, held.read):
                    self.engine.native(held.root)
                    if self.proof is not None and same(self.proof, self.memory, held.table, held.read):
                        raise Fallback("other bits than those of the old step")
        except Exception as error:
            self.wedged, self.why = True, f"going back failed: {error}"

    def _prove(self, link: Link, report: Report) -> None:
        """Learn the map from the loader, and hold it against a step that the engine is at."""
        began = time.monotonic()
        with self._slot(link) as held:
            if held is None:
                return
            order = (t for shard in self.repo.layout(self.repo.load(link)).shards for t in shard.header.tensors)
            found = trace(self.engine.load, self.engine.model, self.memory, order)
            proof = prove(
                found, self.engine.model, self.memory, held.table, held.read, whole=self.engine.whole
            )  # fmt: skip
            self.proof = proof
            self.why = next((f"{n}: {w}" for n, w in proof.unproven.items()), "")
        report.seconds["proof"] = round(time.monotonic() - began, 4)

    @contextmanager
    def _slot(self, link: Link | None) -> Iterator[_Slot | None]:
        """The bytes of a step that lie in this host's cache, or in the checkpoint that the engine was started from."""
        with reading(self.cache) as held:
            root = held.slot(link) if link is not None else None
            if link is None or root is None or not root.is_dir() or not held.trusted:
                yield None
                return
            with Checkpoint.open(root) as found:
                yield _Slot(root, self.repo.layout(self.repo.load(link)).tensors, found)


class _Slot:
    def __init__(self, root: Path, table: Any, found: Checkpoint) -> None:
        self.root, self.table, self.read = root, table, found.bytes_of


class _Staged:
    """An update that is being prepared, in a thread of its own: nothing of the engine is written here."""

    def __init__(self, to: Receiver, link: Link, want: Update) -> None:
        self.to, self.link, self.want = to, link, want
        self.scatter: Scatter | None = None
        self.state = self.reason = ""
        self.error: DeltackptError | None = None
        self.seconds: dict[str, float] = {}
        self.thread = threading.Thread(target=self._run, name="deltackpt-stage", daemon=True)

    def _run(self) -> None:
        """Prepare, and say so: whoever asked pauses the engine only then."""
        self.error = self.to._attempt(self._prepare)
        report = Report(self.to.engine.rank, "staged", state=self.state, reason=self.reason, seconds=dict(self.seconds))
        report.mode = "reload" if self.scatter is None else "scatter"
        report.elements = self.scatter.elements if self.scatter else 0
        if self.to.link is not None:
            report.step, report.id = self.to.link.step, self.to.link.id
            if self.to.link == self.link and not self.to.wedged:
                report.mode = "none"
        report.error = self.error.to_dict() if self.error else None
        if self.want.token:
            report.save(self.to.cache, f"{self.want.token}-staged")

    def _prepare(self) -> None:
        to, link, began = self.to, self.link, time.monotonic()
        target = to.repo.load(link)
        self.state = target.state
        if self.want.state not in (None, target.state):
            have, need = f"state {target.state[:16]}", f"state {str(self.want.state)[:16]}, as asked for"
            raise ChainError("state-unexpected", where=f"step {link.step}", have=have, need=need)
        if link == to.link and not to.wedged:
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
        """A loader that meets another shape in the middle leaves the engine broken: it is not let that far."""
        to = self.to
        if to.link is None:
            return
        old, new = (_table(to.repo, link) for link in (to.link, self.link))
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
        with to._slot(to.link) as before:
            journal = Journal.read(to.cache / "journal")
            if before is None or journal is None or (journal.start, journal.end) != (to.link, self.link):
                raise Fallback(f"the cache does not lead from step {to.link.step} to {self.link.step}")
            return prepare(to.proof, to.memory, before.table, journal, before.read)


def _table(repo: Repository, link: Link) -> dict[str, Any]:
    return {name: (t.dtype, tuple(t.shape)) for name, t in repo.layout(repo.load(link)).tensors.items()}


def _not_taken(name: str, link: Link) -> ChainError:
    have, need = f"other bits than step {link.step} after its load", "those of the step"
    return ChainError("engine-refused", where=name[:80], have=have, need=need)
