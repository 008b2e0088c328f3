"""`deltackpt mirror --repair`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from deltackpt_cli import format as text
from deltackpt_cli.console import Output
from deltackpt_cli.verify import findings

if TYPE_CHECKING:
    from deltackpt.repository import Repository
    from deltackpt.sync.repair import RepairPlan, RepairResult
    from deltackpt.sync.transfer import Transfer


def repair_target(output: Output, origin: Repository, transfer: Transfer, *, dry_run: bool) -> None:
    from deltackpt.sync.repair import Repair

    work = Repair(origin, transfer)
    if dry_run:
        plan = work.plan()
        output.result(plan, lambda: _plan(plan))
        left, code = plan.left, plan.exit_code
    else:
        done = work.run()
        output.result(done, lambda: _lines(done))
        left, code = done.left, done.exit_code
    if left:
        raise typer.Exit(code)


def _plan(plan: RepairPlan) -> Iterator[str]:
    for damage in plan.repairs:
        yield f"{'missing' if damage.gone else 'damaged'}  {damage.file.name}"
    yield from findings(plan.left)
    repairs = f"{text.count(len(plan.repairs))} objects, {text.size(plan.bytes)}"
    yield from text.fields(
        [("checked", f"{text.count(plan.checked)} objects"), ("repair", repairs), ("left", _left(len(plan.left)))]
    )


def _lines(done: RepairResult) -> Iterator[str]:
    yield from (f"repaired  {name}" for name in done.repaired)
    yield from findings(done.left)
    repaired = f"{text.count(len(done.repaired))} objects, {text.size(done.bytes)} in {done.seconds:.3f} s"
    yield from text.fields(
        [("checked", f"{text.count(done.checked)} objects"), ("repaired", repaired), ("left", _left(len(done.left)))]
    )


def _left(count: int) -> str:
    return "nothing" if count == 0 else f"{text.count(count)} of the above that --repair cannot put right from there"
