"""An engine's model and the one that it drafts with, brought to a step together: both of them, or neither."""

from __future__ import annotations

from dataclasses import replace

from deltackpt.engines.methods import HasMethods
from deltackpt.engines.receiver import Receiver
from deltackpt.engines.update import RankReport, Update
from deltackpt.errors import DeltackptError, NotFoundError
from deltackpt.format.manifest import Link


class BothModels:
    """``main`` and ``draft``, as one receiver. ``branch``: the draft's own, which has the steps of the training by
    their numbers; empty where the draft is in the checkpoint of the model. A step that the branch does not have leaves
    the draft as it is, and the report says so; so it does of a tensor for which the engine gives the draft the model's,
    where that is another.
    """

    def __init__(self, main: Receiver, draft: Receiver, branch: str = "") -> None:
        self.main, self.draft, self.branch = main, draft, branch
        draft.reports = ""  # of both, the main one's report tells

    @property
    def link(self) -> Link | None:
        """The step that the weights of the model are."""
        return self.main.link

    @property
    def final(self) -> bool:
        """Was the last update of either made final, or undone?"""
        return self.main.final and self.draft.final

    @property
    def wedged(self) -> bool:
        """May the weights of either be those of no step?"""
        return self.main.wedged or self.draft.wedged

    @property
    def reports(self) -> str:
        """The folder that reports go to."""
        return self.main.reports

    @reports.setter
    def reports(self, folder: str) -> None:
        self.main.reports = folder

    def confirm(self) -> None:
        """The update is final."""
        self.main.confirm()
        self.draft.confirm()

    def update(self, want: Update, *, open: bool = False) -> RankReport:
        """Do a phase with both. Raises as `Receiver.update`; of an `apply`, both are at their old steps then."""
        if want.phase == "report":
            return self.main.update(want, open=open)
        if want.phase == "undo":
            self.draft.update(replace(want, token=""))
        report = self.main.update(want, open=open)
        if want.phase == "undo":
            return report
        try:
            self._follow(want, report)
        except DeltackptError as error:
            if want.phase == "stage":  # it is prepared again when it is applied, and said then
                return report
            if want.phase == "apply":
                self.main.update(Update(phase="undo"))
            report.error, report.wedged = error.to_dict(), self.wedged
            report.save(self.reports, want.token)
            raise
        if want.phase != "stage":
            report.save(self.reports, want.token)
        return report

    def _follow(self, want: Update, report: RankReport) -> None:
        """The same with the draft, as the model's step says."""
        mine = replace(want, token="", state=None)
        if want.phase in ("stage", "apply"):
            try:
                mine = replace(mine, step=self._step(want, report))
            except NotFoundError as error:
                report.stale.append(f"the draft model: {error.where} is not on the branch {self.branch}")
                return
        made = self.draft.update(mine)
        report.draft = made.path
        report.seconds["draft"] = made.seconds.get("all", 0.0)
        if want.phase in ("apply", "check"):
            report.stale += self._of_the_model()

    def _of_the_model(self) -> list[str]:
        """The tensors of the draft's step in whose place the engine has the model's, and that are not known to be equal
        to those: vLLM lets both have one embedding, say, if they were alike when it started."""
        engine = self.draft.engine
        skipped = engine.skipped if isinstance(engine, HasMethods) else {}
        if not skipped or self.draft.link is None or self.main.link is None:
            return []
        mine, its = self.draft.steps.digests(self.draft.link), self.main.steps.digests(self.main.link)
        known = {} if self.main.proof is None else self.main.proof.regions
        twins = {frozenset(r.place for r in regions): name for name, regions in known.items()}
        found = []
        for name, regions in skipped.items():
            twin = twins.get(frozenset(r.place for r in regions), name)
            a, b = (mine or {}).get(name), (its or {}).get(twin)
            if a is None or b is None or a.sums != b.sums:
                found.append(f"{name} of the draft model: the engine has {twin} of its model in its place")
        return found

    def _step(self, want: Update, report: RankReport) -> int | str:
        if not self.branch:
            return want.step
        number = self.main.steps.find(want.step).step if report.step is None or want.phase == "stage" else report.step
        self.draft.steps.find(number)
        return number
