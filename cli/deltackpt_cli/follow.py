"""`deltackpt follow`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deltackpt.errors import ChainError, DeltackptError, UsageError
from deltackpt_cli import format as text
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.mirror import report_failure
from deltackpt_cli.options import ObjectCache, ObjectCacheSize, Ref, Repo, Threads, read_through
from deltackpt_cli.process import run
from deltackpt_cli.serving_metrics import MetricsPort, served
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.signing_options import MaxAge, Trust, policy
from deltackpt_cli.waiting import Grace, Wait, grace_of, open_repository

if TYPE_CHECKING:
    from threading import Event

    from deltackpt.sync.follow import Follower, Switch
    from deltackpt.util.metrics import Metrics

Cache = Annotated[
    Path, typer.Argument(metavar="CACHE", show_default=False, help="A managed cache; made if there is none.")
]
Once = Annotated[bool, typer.Option("--once", help="Move the cache to the newest step, and end.")]
Poll = Annotated[str, typer.Option(metavar="TIME", help="How often to look; a Bucket every 10s, not more often.")]
Prefetch = Annotated[
    bool, typer.Option("--prefetch", help="Fetch the next step while CMD runs; into CACHE.objects, or --object-cache.")
]
Ready = Annotated[
    bool,
    typer.Option(
        "--ready",
        help="Prepare for the next step when CMD has ended, which has then let go of every file of the step before.",
    ),
]
Exec = Annotated[
    str | None,
    typer.Option(
        "--exec",
        metavar="CMD",
        show_default=False,
        help="A shell command to run after each switch, with DELTACKPT_STEP, DELTACKPT_PATH and DELTACKPT_STATE.",
    ),
]


def follow(
    output: Output,
    repo: Repo,
    cache: Cache,
    ref: Ref = "main",
    once: Once = False,
    wait: Wait = False,
    grace: Grace = "60s",
    poll: Poll = "1s",
    prefetch: Prefetch = False,
    ready: Ready = False,
    exec_: Exec = None,
    metrics_port: MetricsPort = None,
    threads: Threads = None,
    object_cache: ObjectCache = None,
    object_cache_size: ObjectCacheSize = "20GB",
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Keep a managed cache at the newest step.

    Until SIGINT, SIGTERM or SIGHUP. CACHE/current moves when every byte of a new step is proven. Steps that were missed
    are read once, and written in one move. A CMD that fails, or was cut short, is reported; it runs again for the next
    step, and at the next start for its own. With --once it is an error, exit code 4. With --json every event is a line:
    switch, exec, outage (when a request had no answer for a minute, or the repository or branch is gone), back,
    current.

    A repository or branch that is gone is reported at the next look, and once a minute. Another repository in its
    place is never read: exit code 4.

    Without --ready the old slot is patched at the next step, and readers have until then to close its files. With
    it that is done as soon as CMD has ended, and the next step is there in about half the time.
    """
    with (
        output.progress() as progress, stopped_by_signals() as stop, served(output, "follow", metrics_port) as metrics
    ):  # fmt: skip
        from deltackpt.sync.follow import Follower, FollowOptions
        from deltackpt.util.places import check_local

        check_local(cache, "CACHE")
        if once and prefetch:
            raise UsageError("usage", where="--prefetch", have="--once too", need="one of the two")
        every, patience = units.duration(poll, "--poll"), grace_of(wait, grace)
        options = FollowOptions(ref, every, prefetch, ready, threads, patience)
        folder = object_cache or (cache.with_name(f"{cache.name}.objects") if prefetch else None)
        reporter = _Reporter(output, exec_)
        whom = policy(trust, max_age)
        opened = partial(read_through, repo, folder, object_cache_size, whom)
        source = open_repository(opened, wait, stop, reporter.failed)
        if source is None:
            return
        follower = Follower(
            source, cache.absolute(), options, progress=progress, stop=stop, failed=reporter.failed,
            recovered=reporter.recovered, standby_failed=reporter.standby_failed, metrics=metrics,
        )  # fmt: skip
        if once:
            _once(reporter, follower, wait)
            return
        _keep(reporter, follower, metrics)


def _keep(reporter: _Reporter, follower: Follower, metrics: Metrics) -> None:
    """Report every switch until the follower stops."""
    for switch in follower.switches():
        if (status := reporter.switched(switch, follower.stop)) == 0:
            follower.acknowledge(switch)
        elif status is not None:
            metrics.add("deltackpt_failures_total", 1)


def _once(reporter: _Reporter, follower: Follower, wait: bool) -> None:
    """Raises ChainError ``exec-failed``; the next call then runs the command again."""
    from deltackpt.sync.backoff import Backoff, patiently

    if wait:
        switch = patiently(follower.catch_up, follower.stop, Backoff(grace=follower.grace), reporter.failed)
    else:
        switch = follower.catch_up()
    if switch is None and follower.stop.is_set():
        return
    if switch is None:
        reporter.event("current", "nothing new")
    elif (status := reporter.switched(switch, follower.stop)) == 0:
        follower.acknowledge(switch)
        follower.prepare()
    elif status is not None:
        hint = "CACHE is at the step all the same. The next `follow` of it runs the command again."
        have = f"a command that ended with status {status}"
        raise ChainError("exec-failed", where=f"--exec, step {switch.step}", have=have, need="status 0", hint=hint)


class _Reporter:
    """Reports every event, and runs the command."""

    def __init__(self, output: Output, command: str | None) -> None:
        self._output, self._command = output, command

    def event(self, event: str, line: str, **fields: Any) -> None:
        self._output.data([json.dumps({"event": event, **fields}) if self._output.json else line])

    def failed(self, error: DeltackptError, wait: float) -> None:
        report_failure(self._output, error, wait)
        if self._output.json:
            self.event("outage", "", **error.to_dict(), retry_in=round(wait, 3))

    def recovered(self) -> None:
        self._output.message("it is there again, and followed")
        if self._output.json:
            self.event("back", "")

    def standby_failed(self, error: DeltackptError) -> None:
        self._output.note(f"note: the next step is not prepared for: {error.where}: {error.have} [{error.code}]")

    def switched(self, switch: Switch, stop: Event) -> int | None:
        """-> the status of the command, None if it was cut short."""
        missed = "" if switch.behind in (None, 0, 1) else f", {switch.behind} steps at once"
        line = (
            f"step {switch.step}  {switch.path}  {switch.lag:.1f} s after it was published{missed}; "
            f"read {text.size(switch.read)}, wrote {text.count(switch.written)} in {switch.seconds:.3f} s"
        )
        self.event("switch", line, **switch.to_dict())
        if switch.rebuilt is not None:
            self._output.note(f"note: the cache was built anew, since {switch.rebuilt}")
        if self._command is None:
            return 0
        variables = {"STEP": str(switch.step), "PATH": switch.path, "STATE": switch.state}
        status = run(self._command, {f"DELTACKPT_{name}": value for name, value in variables.items()}, stop)
        if status != 0:
            how = "was cut short" if status is None else f"ended with status {status}"
            self._output.message(f"the command of step {switch.step} {how}")
        if self._output.json:
            self.event("exec", "", step=switch.step, status=status)
        return status
