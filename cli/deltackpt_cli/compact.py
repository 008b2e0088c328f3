"""`deltackpt compact`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import UsageError
from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo, Threads
from deltackpt_cli.signing_options import Sign, opened

if TYPE_CHECKING:
    from deltackpt.compaction.plan import CompactPlan, CompactResult

From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="A",
        show_default=False,
        help="The step where the fold begins; the last anchor if not given.",
    ),
]
To = Annotated[str, typer.Option("--to", metavar="B", help="The step that it leads to.")]
Levels = Annotated[
    bool, typer.Option("--levels", help="Folds of aligned runs of 8, 64 and 512 steps: few to read from any distance.")
]
Packs = Annotated[bool, typer.Option("--packs", help="Pack manifests alone; fold nothing.")]
Cache = Annotated[
    Path | None,
    typer.Option(metavar="CACHE", show_default=False, help="A managed cache that has the old values; it is moved."),
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Show the plan; write nothing.")]


def compact(
    output: Output,
    repo: Repo,
    start: From = None,
    end: To = "latest",
    levels: Levels = False,
    packs: Packs = False,
    cache: Cache = None,
    dry_run: Dry = False,
    ref: Ref = "main",
    threads: Threads = None,
    sign: Sign = None,
) -> None:
    """Fold many patches into one, and pack manifests, so that late readers read less, by fewer requests.

    The patches stay until gc, for readers that are in between.
    """
    if packs and (levels or start is not None or end != "latest" or cache is not None):
        raise UsageError("usage", where="--packs", have="an option of folds", need="--packs alone, or folds")
    from deltackpt.compaction.plan import LEVELS, plan_compact, plan_packs_alone

    source = opened(repo, sign=sign)
    if packs:
        plan = plan_packs_alone(source, ref)
    else:
        plan = plan_compact(source, start, end, ref=ref, levels=LEVELS if levels else ())
    if dry_run:
        output.result(plan, lambda: _plan(plan, folds=not packs))
        return
    with output.progress() as progress:
        done = plan.execute(source, cache=cache, threads=threads, progress=progress)
    output.result(done, lambda: _lines(done, folds=not packs))


def _plan(plan: CompactPlan, *, folds: bool) -> Iterator[str]:
    rows = [[str(f.start.step), str(f.end.step), text.count(f.patches), text.count(f.replaces)] for f in plan.folds]
    if rows:
        yield from text.table([">from", ">to", ">patches", ">their bytes"], rows)
    elif folds:
        yield "nothing to fold"
    elif not plan.packs:
        yield "nothing to pack"
    if plan.packs:
        if folds:
            yield ""
        rows = [[str(p.first), str(p.last), text.count(p.records), text.count(p.bytes)] for p in plan.packs]
        yield from text.table([">first step", ">last step", ">records to pack", ">bytes"], rows)


def _lines(done: CompactResult, *, folds: bool) -> Iterator[str]:
    rows = [
        [str(f.start.step), str(f.end.step), text.count(f.replaces), text.count(f.bytes), f.reason or ""]
        for f in done.folds
    ]
    if rows:
        yield from text.table([">from", ">to", ">patches' bytes", ">fold's bytes", ""], rows)
        yield ""
    made = sum(f.bytes is not None for f in done.folds)
    if folds:
        yield f"{text.count(made)} fold{'s' * (made != 1)} written, {text.size(done.bytes)}"
    elif not done.packs:
        yield "nothing to pack"
    if done.packs:
        records, size = sum(pack.records for pack in done.packs), sum(pack.bytes for pack in done.packs)
        what = f"{text.count(len(done.packs))} pack{'s' * (len(done.packs) != 1)}"
        yield f"{what} of {text.count(records)} records written, {text.size(size)}"
