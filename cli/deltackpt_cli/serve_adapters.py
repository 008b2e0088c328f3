"""`deltackpt serve-adapters`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from deltackpt.errors import ChainError, sentence
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.follow import Poll
from deltackpt_cli.options import Repo, Threads
from deltackpt_cli.serve_updates import Engines, Timeout
from deltackpt_cli.signals import stopped_by_signals
from deltackpt_cli.signing_options import MaxAge, Trust, opened
from deltackpt_cli.waiting import Grace, Wait, grace_of, open_repository

Folder = Annotated[
    Path, typer.Argument(metavar="FOLDER", show_default=False, help="Where adapters go; the engines read it, too.")
]
Adapters = Annotated[
    list[str],
    typer.Option(
        "--adapter",
        metavar="NAME[=REF]",
        show_default=False,
        help="What engines call it, and the branch that publishes it (main); many.",
    ),
]
Keep = Annotated[int, typer.Option(metavar="N", min=1, help="Steps that an engine offers, the newest among them.")]
BaseRepo = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="REPO",
        show_default=False,
        help="The repository whose weights the engines run: an adapter trained over others is refused.",
    ),
]
BaseRef = Annotated[str, typer.Option("--base-ref", metavar="REF", help="Its branch.")]
Once = Annotated[bool, typer.Option("--once", help="Load the newest steps, and end.")]


def serve_adapters(
    output: Output,
    repo: Repo,
    folder: Folder,
    engine: Engines,
    adapter: Adapters,
    base_model: BaseRepo = None,
    base_ref: BaseRef = "main",
    keep: Keep = 2,
    once: Once = False,
    wait: Wait = False,
    grace: Grace = "60s",
    poll: Poll = "1s",
    timeout: Timeout = "120s",
    threads: Threads = None,
    trust: Trust = None,
    max_age: MaxAge = None,
) -> None:
    """Load every new step of an adapter into running engines.

    Until SIGINT, SIGTERM or SIGHUP. Step 12 of adapter `a` is offered as `a@12`; requests name the step that they want.
    Of the older steps, those that requests use stay until they are idle. SGLang does not tell which these are: it loads
    nothing while it waits for the requests of one that goes, and a greater --keep gives them time to end. An adapter
    whose layers are not those of an engine's model is refused, where that is a folder of this machine or has a
    --base-model. With --json every event is a line. With --once the command ends with 4 if an engine does not offer the
    newest step.
    """
    from deltackpt.engines.adapters import Adapter, AdapterOptions, AdapterServing
    from deltackpt.engines.fleet import now_utc

    named = [Adapter(name, ref or "main") for name, _, ref in (text.partition("=") for text in adapter)]
    every = units.duration(poll, "--poll")
    options = AdapterOptions(keep, units.duration(timeout, "--timeout"), threads, grace_of(wait, grace))
    if base_model is None:
        replace(options, base_ref=base_ref)  # refused at once

    def emit(event: str, fields: dict[str, Any]) -> None:
        output.data([json.dumps({"event": event, **fields}) if output.json else _line(event, fields)])

    def outage(error: Any, retry: float) -> None:
        emit("outage", {"time": now_utc(), **error.to_dict(), "retry_in": round(retry, 3)})

    with stopped_by_signals() as stop:
        if (source := open_repository(partial(opened, repo, trust, max_age), wait, stop, outage)) is None:
            return
        if base_model is not None:
            options = replace(options, base=opened(base_model, trust, max_age), base_ref=base_ref)
        serving = AdapterServing(source, folder, engine, named, emit, options)
        if not once:
            serving.run(stop, every)
        elif not serving.update():
            have, need = "an engine without the newest step", "all of them with it"
            raise ChainError("engine-refused", where=str(repo), have=have, need=need, hint="The lines above say why.")


def _line(event: str, f: dict[str, Any]) -> str:
    if event == "loaded":
        return f"{f['name']}  {f['engine']}  loaded in {f['seconds']:.3f} s, rank {f['rank']}"
    if event == "unloaded":
        return f"{f['name']}  {f['engine']}  unloaded"
    if event == "base-moved":
        trained = "" if f["trained_over"] is None else f", and trained over {f['trained_over']}"
        moved = f"its base is at {f['base']} now; it was loaded over {f['before']}"
        return f"{f['adapter']}  {f['engine']}  {moved}{trained}"
    if event == "back":
        return "the repository is there again, and followed"
    return f"{event}  {f.get('engine', '')}  {sentence(f['where'], f['have'], f['need'])} [{f['error']}]"
