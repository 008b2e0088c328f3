"""`deltackpt log`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import UsageError
from deltackpt.util.moments import utc
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo

if TYPE_CHECKING:
    from deltackpt.report.graph import Graph, GraphStep
    from deltackpt.report.log import Log

MOST = 8  # kept steps that are named

Graphic = Annotated[
    bool, typer.Option("--graph", help="Draw all steps: every branch, what rewinds left behind, folds, refs and tags.")
]
Limit = Annotated[
    int | None, typer.Option("--number", "-n", metavar="N", min=1, show_default=False, help="The newest N steps alone.")
]
Since = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN",
        show_default=False,
        help="Up to the first step from before: a time ago (90m, 6h, 7d), or a date (2026-11-28, 2026-11-28T18:00).",
    ),
]
Lines = Annotated[
    bool, typer.Option("--json-lines", help="A JSON object a step, each on a line of its own, as soon as it is read.")
]


def log(
    output: Output,
    repo: Repo,
    ref: Ref = "main",
    limit: Limit = None,
    since: Since = None,
    lines: Lines = False,
    graph: Graphic = False,
) -> None:
    """List the steps, newest first."""
    if graph and (limit is not None or since is not None or lines):
        raise UsageError("usage", where="--graph", have="-n, --since or --json-lines", need="all steps, which it draws")
    after = None if since is None else units.moment(since, "--since", time.time())
    from deltackpt.report import log as report
    from deltackpt.repository import Repository

    if graph:
        from deltackpt.report.graph import graph as draw

        drawn = draw(Repository.open(repo))
        output.result(drawn, lambda: _graph(drawn, verbose=output.verbose))
        return
    if lines:
        for step in report.log_steps(Repository.open(repo), ref, limit=limit, since=after):
            output.data([json.dumps(vars(step))])
        return
    found = report.log(Repository.open(repo), ref, limit=limit, since=after)
    if not found.steps:
        output.note(f"no step on {ref} yet" if since is None else f"no step on {ref} since then")
    output.result(found, lambda: _lines(found, verbose=output.verbose))
    if found.steps and found.collected is not None:
        output.note(_gap(found))


def _gap(found: Log) -> str:
    said = f"older steps were collected, from step {found.collected}"
    if not found.kept:
        return f"{said}; `log --graph` lists those that were kept"
    newest, more = found.kept[-MOST:], len(found.kept) - MOST
    which = text.steps(newest) + (f" and {more} before" if more > 0 else "")
    kept = "was kept" if len(found.kept) == 1 else "were kept"
    return f"{said}, but {which} {kept}; `log --graph` draws all that is there"


def _graph(found: Graph, *, verbose: bool) -> Iterator[str]:
    """A row a step; `*` in its lane, `|` in those that pass by, `/` where a lane joins the one of its parent."""
    open_lanes: dict[int, str] = {}  # lane: the step that it goes down to
    for step in found.steps:
        joins = {lane for lane, down in open_lanes.items() if down == step.id and lane != step.lane}
        marks = []
        for lane in range(found.lanes):
            passing = "|" if lane in open_lanes else " "
            marks.append("*" if lane == step.lane else "/" if lane in joins else passing)
        for lane in (*joins, step.lane):
            open_lanes.pop(lane, None)
        if step.parent_id is not None and not step.collected:
            open_lanes[step.lane] = step.parent_id
        yield f"{' '.join(marks)}  {step.step:>8}  {step.id if verbose else step.id[:12]}  {_about(step)}".rstrip()
        if step.collected:
            cut = (":" if lane == step.lane else "|" if lane in open_lanes else " " for lane in range(found.lanes))
            yield " ".join(cut).rstrip()


def _about(step: GraphStep) -> str:
    words = [f"ref {name}" for name in step.refs] + [f"tag {name}" for name in step.tags]
    words += ["anchor"] * step.anchor + ["later anchor"] * step.later_anchor
    words += [f"fold from {start}" for start in step.folds_from]
    words += ["left behind"] * step.left_behind
    return ", ".join(words)


def _lines(found: Log, *, verbose: bool) -> Iterator[str]:
    if not found.steps:
        return
    odd = any(s.metadata.get("nonfinite") for s in found.steps)  # elements that are infinite or NaN, as hooks count
    large = any((s.anchor_bytes or 0) + (s.patch_bytes or 0) >= 1_000_000 for s in found.steps)
    headers = [">step", "stored as", ">bytes", *[">size"] * large, ">changed", ">density", ">bits/change", "time", "id"]
    headers += [">not finite"] * odd
    rows = [
        [
            str(s.step),
            " and ".join(k for k, size in (("anchor", s.anchor_bytes), ("patch", s.patch_bytes)) if size is not None),
            text.count((s.anchor_bytes or 0) + (s.patch_bytes or 0)),
            *[text.short((s.anchor_bytes or 0) + (s.patch_bytes or 0))] * large,
            text.count(s.changed),
            text.share(s.density),
            text.bits(s.bits_per_change),
            utc(s.time),
            s.id if verbose else s.id[:12],
            *([str(s.metadata.get("nonfinite", 0))] if odd else []),
        ]
        for s in found.steps
    ]
    yield from text.table(headers, rows)
