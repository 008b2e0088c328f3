"""`deltackpt serve-updates`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from deltackpt.errors import ChainError, DeltackptError, sentence
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.follow import Cache, Poll
from deltackpt_cli.options import MetricsPort, Ref, Repo, Threads
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.waiting import Grace, Wait, grace_of, open_repository

Engines = Annotated[
    list[str],
    typer.Option("--engine", metavar="KIND=URL", show_default=False, help="vllm=http://HOST:PORT or sglang=…; many."),
]
Once = Annotated[bool, typer.Option("--once", help="Update the engines to the newest step, and end.")]
Together = Annotated[bool, typer.Option("--together", help="All engines come to a step, or none.")]
Check = Annotated[bool, typer.Option("--check", help="Read all weights back before an engine is resumed.")]
Pause = Annotated[str, typer.Option(metavar="MODE", help="Requests in flight: keep, wait or abort.")]
Mode = Annotated[str, typer.Option(metavar="MODE", help="auto, or reload: no scatter.")]
Timeout = Annotated[str, typer.Option(metavar="TIME", help="How long an engine may take for one answer.")]


def serve_updates(
    output: Output,
    repo: Repo,
    cache: Cache,
    engine: Engines,
    ref: Ref = "main",
    once: Once = False,
    together: Together = False,
    check: Check = False,
    wait: Wait = False,
    grace: Grace = "60s",
    poll: Poll = "1s",
    pause: Pause = "keep",
    mode: Mode = "auto",
    timeout: Timeout = "120s",
    metrics_port: MetricsPort = None,
    threads: Threads = None,
) -> None:
    """Update running engines at every new step.

    Until SIGINT or SIGTERM. A step is fetched and proven, and the engines prepare it, before any is paused. An engine
    that does not take it keeps its old step, and is reported. With --json every event is a line. With --once the
    command ends with 4 if an engine is not at the newest step.

    A repository or branch that is gone is reported at the next look, and once a minute; the engines keep their step.
    Another repository in its place is never read: exit code 4.
    """
    from deltackpt.engines.serve_updates import ServeOptions, open_serving
    from deltackpt.repository import Repository
    from deltackpt.util.metrics import Metrics

    every, patience = units.duration(poll, "--poll"), grace_of(wait, grace)
    options = ServeOptions(ref, pause, mode, units.duration(timeout, "--timeout"), together, check, threads, patience)
    metrics, report = Metrics("serve-updates"), _Reporter(output)
    with output.progress() as progress, stopped_by_signals() as stop, metrics.on(metrics_port) as port:
        if open_repository(lambda: Repository.open(repo), wait, stop, report.failed) is None:
            return
        serving = open_serving(repo, cache, engine, report, options, metrics=metrics, stop=stop, progress=progress)
        output.metrics_at(port)
        if not once:
            serving.run(stop, every)
            return
        serving.update_cache()
        if not serving.update_engines():
            have, need = "an engine at another step", "all of them at the newest"
            raise ChainError("engine-refused", where=str(repo), have=have, need=need, hint="The lines above say why.")


class _Reporter:
    """Prints every event."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"event": event, **fields}) if self._output.json else _line(event, fields)
        self._output.data([line])

    def failed(self, error: DeltackptError, wait: float) -> None:
        self("outage", {**error.to_dict(), "retry_in": round(wait, 3)})


def _line(event: str, f: dict[str, Any]) -> str:
    if event == "switch":
        return f"step {f['step']}  {f['path']}"
    if event == "taken":
        why = f" ({f['reason']})" if f["reason"] else ""
        return f"step {f['step']}  {f['engine']}  {f['mode']}{why}, paused {f['pause']:.3f} s of {f['total']:.3f} s"
    if event == "back":
        return "the repository is there again, and followed"
    return f"{event}  {f.get('engine', '')}  {sentence(f['where'], f['have'], f['need'])} [{f['error']}]"
