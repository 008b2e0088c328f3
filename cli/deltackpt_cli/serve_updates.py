"""`deltackpt serve-updates`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deltackpt.errors import ChainError, DeltackptError, sentence
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.follow import Poll
from deltackpt_cli.options import Ref, Repo, Threads
from deltackpt_cli.serving_metrics import MetricsPort, served
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.signing_options import MaxAge, Trust, policy
from deltackpt_cli.waiting import Grace, Wait, grace_of, open_repository

Engines = Annotated[
    list[str],
    typer.Option("--engine", metavar="KIND=URL", show_default=False, help="vllm=http://HOST:PORT or sglang=…; many."),
]
Cache = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CACHE]",
        show_default=False,
        help="A managed cache; made if there is none. Without it each engine is its own base.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Update the engines to the newest step, and end.")]
Together = Annotated[bool, typer.Option("--together", help="All engines come to a step, or none.")]
Check = Annotated[bool, typer.Option("--check", help="Read all weights back before an engine is resumed.")]
Pause = Annotated[str, typer.Option(metavar="MODE", help="Requests in flight: keep, wait or abort.")]
Mode = Annotated[str, typer.Option(metavar="MODE", help="auto, or reload: no scatter.")]
Draft = Annotated[
    str, typer.Option(metavar="BRANCH", help="Whose steps a draft model with a checkpoint of its own takes, by number.")
]
Timeout = Annotated[str, typer.Option(metavar="TIME", help="How long an engine may take for one answer.")]


def serve_updates(
    output: Output,
    repo: Repo,
    engine: Engines,
    cache: Cache = None,
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
    trust: Trust = None,
    max_age: MaxAge = None,
    draft: Draft = "",
) -> None:
    """Update running engines at every new step.

    Until SIGINT, SIGTERM or SIGHUP. A step is fetched and proven, and the engines prepare it, before any is paused. One
    that does not take it keeps its old step, and is reported. With --json every event is a line, with its time. With
    --once the command ends with 4 if an engine is not at the newest step.

    Without CACHE an engine decodes a step against its own weights, those of several ranks together. An engine that
    loads files, such as SGLang, needs CACHE. A key that an engine asks for is read from DELTACKPT_ENGINE_KEY, or from
    VLLM_API_KEY or SGLANG_API_KEY; a URL that may hold one is refused.

    What vLLM drafts with, for speculative decoding, comes to the step in the same pause: a head that is in the steps
    themselves, such as MTP's, or with --draft a model of its own. An event names its way; else `stale` says that it
    keeps its weights.

    A repository or branch that is gone is reported at the next look, and once a minute; the engines keep their step.
    Another repository in its place is never read: exit code 4.
    """
    from deltackpt.engines.serve_updates import ServeOptions, open_serving
    from deltackpt.repository import Repository

    every, patience = units.duration(poll, "--poll"), grace_of(wait, grace)
    patient, whom = units.duration(timeout, "--timeout"), policy(trust, max_age)
    options = ServeOptions(ref, pause, mode, patient, together, check, threads, patience, whom, draft)
    report = _Reporter(output)
    with (
        output.progress() as progress, stopped_by_signals() as stop,
        served(output, "serve-updates", metrics_port) as metrics,
    ):  # fmt: skip
        if open_repository(lambda: Repository.open(repo), wait, stop, report.failed) is None:
            return
        serving = open_serving(repo, cache, engine, report, options, metrics=metrics, stop=stop, progress=progress)
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
        if event in ("warning", "stale"):  # for people, whatever reads the data
            self._output.message(f"warning: {_warning(event, fields)}")
            if event == "warning":
                return
        line = json.dumps({"event": event, **fields}) if self._output.json else _line(event, fields)
        self._output.data([line])

    def failed(self, error: DeltackptError, wait: float) -> None:
        from deltackpt.engines.fleet import now_utc

        self("outage", {"time": now_utc(), **error.to_dict(), "retry_in": round(wait, 3)})


def _way(f: dict[str, Any]) -> str:
    return f["mode"] if f["path"] in ("", f["mode"]) else f"{f['mode']} by {f['path']}"


def _warning(event: str, f: dict[str, Any]) -> str:
    if event == "stale":
        return f"{f['engine']}: {f['what']} keeps its weights: no step has others"
    return f"{f['engine']}: step {f['step']} goes by {f['path']}, not by {f['expected']}: {f['reason']}"


def _line(event: str, f: dict[str, Any]) -> str:
    if event == "stale":
        return f"stale  {f['engine']}  {f['what']}"
    if event == "switch":
        return f"step {f['step']}  {f['path']}"
    if event == "taken":
        why = f" ({f['reason']})" if f["reason"] else ""
        why += f", draft by {f['draft']}" if f["draft"] else ""
        return f"step {f['step']}  {f['engine']}  {_way(f)}{why}, paused {f['pause']:.3f} s of {f['total']:.3f} s"
    if event == "back":
        return "the repository is there again, and followed"
    hint = f". {f['hint']}" if f["hint"] else ""
    return f"{event}  {f.get('engine', '')}  {sentence(f['where'], f['have'], f['need'])} [{f['error']}]{hint}"
