"""`deltackpt mirror`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import DeltackptError, UsageError
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.repair import repair_target
from deltackpt_cli.serving_metrics import MetricsPort, served
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.signing_options import MaxAge, Trust, opened
from deltackpt_cli.waiting import Grace, Wait, grace_of, open_repository

if TYPE_CHECKING:
    from deltackpt.repository import Repository
    from deltackpt.sync.mirror import Mirror
    from deltackpt.sync.mirror_plan import MirrorPlan, MirrorResult, RefMove
    from deltackpt.util.metrics import Metrics

Source = Annotated[str, typer.Argument(metavar="SRC", show_default=False, help="The repository to copy.")]
Target = Annotated[
    str, typer.Argument(metavar="DST", show_default=False, help="Its copy: a directory or URL, empty at first.")
]
FromStep = Annotated[
    int | None,
    typer.Option(metavar="A", min=0, show_default=False, help="Only the steps from A on, and what restoring A needs."),
]
Latest = Annotated[bool, typer.Option("--latest-only", help="Only what the newest step of each branch needs.")]
Watch = Annotated[bool, typer.Option("--watch", help="Go on: copy each new step as it is published.")]
Poll = Annotated[str, typer.Option(metavar="TIME", help="With --watch: how often to look for a new step.")]
Limit = Annotated[
    str | None, typer.Option(metavar="RATE", show_default=False, help="Bytes a second at most, such as 100MB/s.")
]
Jobs = Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Objects in transit at a time.")]
Spool = Annotated[
    Path | None,
    typer.Option(metavar="DIR", show_default=False, help="Where half-fetched large objects wait; ~/.cache/deltackpt."),
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Show the plan; copy nothing.")]
Check = Annotated[bool, typer.Option("--check", help="Read back and prove every object that DST has already.")]
Force = Annotated[bool, typer.Option("--force", help="Move DST's refs even from steps that SRC's do not come from.")]
Repair = Annotated[
    bool,
    typer.Option(
        "--repair", help="Copy nothing else: put right what is damaged or missing at DST, from an SRC older or newer."
    ),
]


def mirror(
    output: Output,
    source: Source,
    target: Target,
    from_step: FromStep = None,
    latest_only: Latest = False,
    watch: Watch = False,
    poll: Poll = "1s",
    wait: Wait = False,
    grace: Grace = "60s",
    metrics_port: MetricsPort = None,
    limit: Limit = None,
    jobs: Jobs = 8,
    spool: Spool = None,
    dry_run: Dry = False,
    check: Check = False,
    force: Force = False,
    repair: Repair = False,
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Copy a repository to another store.

    DST is whole at every instant, and never loses a step. What is there and proven is skipped; a mirror that was
    stopped continues where it was. With --repair no step is copied and no ref moves; the exit code is 0 if nothing
    stays damaged, else that of `verify`. With --watch a SRC or DST that is gone is reported at the next look, and once
    a minute; another repository in its place is never read or written.
    """
    from deltackpt.store import open_store
    from deltackpt.sync.mirror import Mirror, Start
    from deltackpt.sync.transfer import Transfer, default_spool

    others = [from_step is not None and "--from-step", latest_only and "--latest-only", watch and "--watch"]
    others += [check and "--check", force and "--force"]
    _one_of("--repair", repair, others)
    _one_of("--from-step", from_step is not None, [latest_only and "--latest-only"])
    _one_of("--dry-run", dry_run, [watch and "--watch"])
    _no_watch(watch, {"--wait": wait, "--metrics-port": metrics_port is not None})
    start: Start = "latest" if latest_only else from_step
    cap = None if limit is None else units.rate(limit, "--limit")
    every, patience = units.duration(poll, "--poll"), grace_of(wait, grace)
    with ExitStack() as stack:
        progress = stack.enter_context(output.progress())
        stop = stack.enter_context(stopped_by_signals()) if watch else Event()
        origin = open_repository(partial(opened, source, trust, max_age), wait, stop, partial(report_failure, output))
        if origin is None:
            return
        transfer = Transfer(origin.store, open_store(target), cap, jobs, spool or default_spool(), progress)
        if repair:
            repair_target(output, origin, transfer, dry_run=dry_run)
            return
        work = Mirror(origin, transfer, start=start, force=force, check=check)
        if dry_run:
            plan = work.plan()
            output.result(plan, lambda: _plan(plan))
        elif watch:
            metrics = stack.enter_context(served(output, "mirror", metrics_port))
            _keep(output, work, origin, stop, every, patience, metrics)
        else:
            report(output, work.run())


def _one_of(option: str, given: bool, others: Sequence[str | bool]) -> None:
    """Raises UsageError ``usage`` where an option was given with ones that do not go with it."""
    if given and any(others):
        have = f"{', '.join(other for other in others if isinstance(other, str))} too"
        raise UsageError("usage", where=option, have=have, need="one of the two")


def _no_watch(watch: bool, given: dict[str, bool]) -> None:
    """Raises UsageError ``usage`` for an option that is about watching."""
    for option, there in given.items():
        if there and not watch:
            raise UsageError("usage", where=option, have="no --watch", need="--watch too")


def _keep(
    output: Output, work: Mirror, origin: Repository, stop: Event, poll: float, grace: float, metrics: Metrics
) -> None:
    """Report every copy until ``stop``; times in seconds."""
    from deltackpt.sync.poller import keep_mirrored

    failed = partial(report_failure, output)
    back = partial(output.message, "it is there again, and copied")
    every = {"poll": poll, "grace": grace}
    for done in keep_mirrored(
        work, origin, stop=stop, failed=failed, recovered=back, metrics=metrics, **every
    ):  # fmt: skip
        report(output, done)


def report_failure(output: Output, error: DeltackptError, wait: float) -> None:
    """An error that passes, and when the next attempt is made."""
    output.message(f"{error.where}: {error.have} [{error.code}]; again in {wait:.1f} s")


def report(output: Output, done: MirrorResult) -> None:
    if not done.leased:
        output.note("note: the source is read-only, so no lease keeps gc from what is read")
    output.result(done, lambda: _lines(done))


def _plan(plan: MirrorPlan) -> Iterator[str]:
    prove = [f for record in plan.records for f in record.prove]
    copy = [f for record in plan.records for f in record.copy]
    yield from text.fields(
        [
            ("steps", text.count(plan.steps)),
            ("copy", f"{text.count(len(copy))} objects, {text.size(plan.bytes)}"),
            ("prove", f"{text.count(len(prove))} objects, {text.size(sum(f.size for f in prove))}"),
            ("there", f"{text.count(plan.there)} objects"),
            *_moves(plan.refs, "ref"),
            *_moves(plan.tags, "tag"),
        ]
    )


def _lines(done: MirrorResult) -> Iterator[str]:
    yield from text.fields(
        [
            ("steps", text.count(done.steps)),
            ("copied", f"{text.count(done.objects)} objects, {text.size(done.bytes)} in {done.seconds:.3f} s"),
            ("there", f"{text.count(done.there)} objects, and {text.count(done.proven)} that were read back"),
            *_moves(done.refs, "ref"),
            *_moves(done.tags, "tag"),
        ]
    )


def _moves(moves: tuple[RefMove, ...], kind: str) -> Iterator[tuple[str, str]]:
    for move in moves:
        yield f"{kind} {move.name}", f"{f'{move.old.step} to ' if move.old else 'at '}{move.new.step}"
