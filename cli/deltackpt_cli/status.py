"""`deltackpt status`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt.errors import UsageError
from deltackpt.util.moments import utc
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.options import Ref, Repo
from deltackpt_cli.signals import stopped_by_signals

if TYPE_CHECKING:
    from deltackpt.report.status import CacheStatus, Status

Cache = Annotated[
    Path | None, typer.Option(metavar="DIR", show_default=False, help="A managed cache: how far behind it is.")
]


Watch = Annotated[bool, typer.Option("--watch", help="Draw head, rate, and who is behind again and again.")]
Poll = Annotated[str, typer.Option(metavar="TIME", help="With --watch: how often to look.")]
Pages = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        metavar="URL",
        show_default=False,
        help="With --watch: followers and engines of a page that --metrics-port serves; many.",
    ),
]


def status(
    output: Output,
    repo: Repo,
    cache: Cache = None,
    watch: Watch = False,
    poll: Poll = "2s",
    metrics: Pages = None,
    ref: Ref = "main",
) -> None:
    """Show where a repository and a cache are.

    With --watch until SIGINT, SIGTERM or SIGHUP, from the branch, the leases of readers, and pages of metrics.
    """
    every = units.duration(poll, "--poll")
    if watch:
        if cache is not None:
            raise UsageError("usage", where="--cache", have="--watch too", need="one of the two")
        _watch(output, repo, ref, metrics or [], every)
        return
    if metrics:
        raise UsageError("usage", where="--metrics", have="no --watch", need="--watch too")
    from deltackpt.report import status as report
    from deltackpt.repository import Repository

    found = report.status(Repository.open(repo), cache, ref=ref)
    output.result(found, lambda: text.fields(list(_rows(found))))


def _watch(output: Output, repo: str, ref: str, pages: list[str], every: float) -> None:
    from deltackpt.report.live import LiveView
    from deltackpt.repository import Repository
    from deltackpt_cli import live

    with stopped_by_signals() as stop:
        live.watch(output, LiveView(Repository.open(repo), ref, pages), max(every, 0.1), stop)


def _rows(s: Status) -> Iterator[tuple[str, str]]:
    yield "repository", f"{s.repository} ({s.id})"
    yield "head", f"no step on {s.ref} yet" if s.step is None else f"step {s.step} on {s.ref} ({str(s.head)[:12]})"
    yield "steps", text.count(s.steps)
    if s.step is not None and s.restore_bytes is None:
        yield "restore", "no intact way from an anchor"
    if s.restore_bytes is not None:
        yield "restore", f"{text.size(s.restore_bytes)}: an anchor and {_patches(s.restore_patches or 0)}"
    yield "storage", ", ".join(f"{folder} {_size(size)}" for folder, size in sorted(s.storage.items()))
    if s.tags:
        yield "tags", ", ".join(f"{name} (step {step})" for name, step in sorted(s.tags.items()))
    for lease in s.leases:
        what = f"step {lease.link.step}" if lease.link else "every step"
        yield "lease", f"{what}, {lease.holder}, until {utc(lease.expires)}"
    if s.gc_frees is None:
        yield "gc", "would refuse: a ref or tag cannot be restored; `deltackpt verify REPO` tells why"
    else:
        yield "gc", f"would free {text.size(s.gc_frees)}, {text.count(s.gc_steps)} steps"
    if s.cache is not None:
        yield from _cache(s.cache)


def _cache(c: CacheStatus) -> Iterator[tuple[str, str]]:
    if not c.on_branch:
        where = "not on the branch: it was rewound, or steps were collected"
    else:
        where = "up to date" if c.behind == 0 else f"{text.count(c.behind)} step{'s' * (c.behind != 1)} behind"
    yield "cache", f"step {c.step} ({c.id[:12]}), {where}"
    yield "catch up", f"{text.size(c.catch_up_bytes)}: {_patches(c.catch_up_patches)}"


def _size(size: int) -> str:
    return text.count(size) if size < 1_000_000 else f"{text.count(size)} ({text.short(size)})"


def _patches(count: int) -> str:
    return f"{text.count(count)} patch{'es' * (count != 1)}"
