"""`deltackpt gc`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltackpt.errors import UsageError
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.options import Repo, Threads
from deltackpt_cli.signing_options import Sign, Trust, opened

if TYPE_CHECKING:
    from deltackpt.collector.sweep import GcPlan, GcResult

Last = Annotated[
    int | None, typer.Option(metavar="N", min=1, show_default=False, help="Keep the newest N steps of every branch.")
]
Every = Annotated[
    int | None,
    typer.Option(metavar="M", min=1, show_default=False, help="Keep the steps whose number is a multiple of M."),
]
Within = Annotated[
    str | None,
    typer.Option(metavar="TIME", show_default=False, help="Keep what was published within TIME: 30s, 20m, 6h, 7d."),
]
Tag = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", show_default=False, help="A tag that must be there. All tags are kept, named or not."),
]
Grace = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        show_default=False,
        help="Leave what is younger, by the store's clock: uploads may be under way. 1h if not given.",
    ),
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Show the plan; remove nothing.")]
Plan = Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Save the plan; remove nothing.")]
Execute = Annotated[
    Path | None, typer.Option(metavar="FILE", show_default=False, help="Carry out a saved plan, unless it is stale.")
]
Rebase = Annotated[bool, typer.Option("--rebase", help="First write the anchors that the plan offers, and plan again.")]


@dataclass(frozen=True)
class Outcome:
    """A plan, and what became of it."""

    plan: GcPlan
    result: GcResult | None

    def to_dict(self) -> dict[str, Any]:
        return {"plan": self.plan.to_dict(), "result": self.result.to_dict() if self.result else None}


def gc(
    output: Output,
    repo: Repo,
    keep_last: Last = None,
    keep_every: Every = None,
    keep_within: Within = None,
    keep_tag: Tag = None,
    grace: Grace = None,
    dry_run: Dry = False,
    plan: Plan = None,
    execute: Execute = None,
    rebase: Rebase = False,
    threads: Threads = None,
    sign: Sign = None,
    trust: Trust = None,
) -> None:
    """Remove what no kept step needs.

    Heads, tags, leases and the newest anchor are always kept, with all that they need. Without any --keep option every
    step of a branch is, and what rewinds and broken uploads left behind is removed.
    """
    from deltackpt.collector import sweep as library
    from deltackpt.collector.retention import Policy

    policed = keep_last or keep_every or keep_within or keep_tag or grace
    if execute is not None and (plan is not None or dry_run or rebase or policed):
        raise UsageError("usage", where="--execute", have="another way to plan", need="the saved plan alone")
    if sign is not None and not rebase:
        raise UsageError("usage", where="--sign", have="nothing to sign", need="--rebase, which writes anchors")
    within = None if keep_within is None else units.whole_seconds(keep_within, "--keep-within")
    young = units.whole_seconds("1h" if grace is None else grace, "--grace")
    policy = Policy(keep_last, keep_every, within, tuple(keep_tag or ()), young)
    source = opened(repo, trust, sign=sign)
    result = None
    with output.progress() as progress:
        if execute is not None:
            found = library.GcPlan.load(execute)
            result = found.execute(source, progress=progress)
        elif dry_run or plan is not None:
            found = library.plan_gc(source, policy)
            if plan is not None:
                found.save(plan)
        else:
            if rebase:
                library.rebase(source, library.plan_gc(source, policy), threads=threads, progress=progress)
            found, result = library.collect(source, policy, progress=progress)
    for one in found.rebases:
        gain = f"costs {text.size(one.cost)} and frees {text.count(one.frees)}"
        output.note(f"note: an anchor at step {one.step.step} {gain}: run it with --rebase")
    output.result(Outcome(found, result), lambda: _lines(found, result, verbose=output.verbose))


def _lines(plan: GcPlan, result: GcResult | None, *, verbose: bool) -> Iterator[str]:
    kept = {name: why for name, why in plan.keep.items() if name.startswith("steps/")}
    if verbose:
        yield from (f"keep    {name}: {why}" for name, why in plan.keep.items())
        yield from (f"delete  {name}" for name, _ in plan.delete)
        yield ""
    else:
        reasons = Counter(_reason(why) for why in kept.values())
        yield from text.table([">steps", "kept as"], [[text.count(n), why] for why, n in reasons.most_common(20)])
        yield ""
    gone = Counter[str]()
    for name, size in plan.delete:
        gone[name.partition("/")[0]] += size
    what = ", ".join(f"{folder} {text.count(size)}" for folder, size in gone.items())
    yield from text.fields(
        [
            ("keep", f"{text.count(len(kept))} steps, {text.size(plan.kept_bytes)}"),
            ("remove", f"{text.count(plan.steps)} steps, {text.size(plan.frees)}{f' ({what})' if what else ''}"),
            ("too young", f"{text.count(plan.waiting[0])} objects, {text.size(plan.waiting[1])}"),
            ("done", "nothing removed" if result is None else f"{sum(result.removed.values()):,} objects removed"),
        ]
    )


def _reason(why: str) -> str:
    """Why a step is kept, without its own number; steps on the way to one that is kept are one kind."""
    reason = why.partition(": ")[2]
    return "on the way to a kept step" if reason.startswith("on the way") else reason
