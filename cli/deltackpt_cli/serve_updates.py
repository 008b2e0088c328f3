"""`deltackpt serve-updates`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deltackpt.errors import ChainError, UsageError
from deltackpt_cli import units
from deltackpt_cli.console import Output
from deltackpt_cli.follow import Cache, Poll
from deltackpt_cli.options import Ref, Repo, Threads, read_through
from deltackpt_cli.signals import stopped_by_signals

Engines = Annotated[
    list[str],
    typer.Option("--engine", metavar="KIND=URL", show_default=False, help="vllm=http://HOST:PORT or sglang=…; many."),
]
Once = Annotated[bool, typer.Option("--once", help="Bring the engines to the newest step, and end.")]
Together = Annotated[bool, typer.Option("--together", help="All engines come to a step, or none.")]
Check = Annotated[bool, typer.Option("--check", help="Read all weights back before an engine is resumed.")]
Pause = Annotated[str, typer.Option(metavar="MODE", help="Requests in flight: keep, wait or abort.")]
Mode = Annotated[str, typer.Option(metavar="MODE", help="auto, or reload: no scatter.")]
Timeout = Annotated[str, typer.Option(metavar="TIME", help="How long an engine may take for one answer.")]
Metrics_ = Annotated[
    int | None, typer.Option("--metrics-port", show_default=False, help="Prometheus metrics, on loopback.")
]


def serve_updates(
    voice: Output,
    repo: Repo,
    cache: Cache,
    engine: Engines,
    ref: Ref = "main",
    once: Once = False,
    together: Together = False,
    check: Check = False,
    poll: Poll = "1s",
    pause: Pause = "keep",
    mode: Mode = "auto",
    timeout: Timeout = "120s",
    metrics_port: Metrics_ = None,
    threads: Threads = None,
) -> None:
    """Bring running engines to every new step.

    Until SIGINT or SIGTERM. A step is fetched and proven, and the engines prepare it, before any is paused. An engine
    that does not take it goes on with its old step, and is told of. With --json every event is a line. With --once the
    command ends with 4 if an engine is not at the newest step.
    """
    from deltackpt.engines.clients import Host, client_of
    from deltackpt.engines.metrics import Metrics
    from deltackpt.engines.serve import Serving
    from deltackpt.sync.follow import Follower

    if pause not in ("keep", "wait", "abort"):
        raise UsageError("usage", where="--pause", have=pause, need="keep, wait or abort")
    if mode not in ("auto", "reload"):
        raise UsageError("usage", where="--mode", have=mode, need="auto or reload")
    every, patience = units.duration(poll, "--poll"), units.duration(timeout, "--timeout")
    folder, metrics = Path(cache).absolute(), Metrics()
    with voice.progress() as progress, stopped_by_signals() as stop, metrics.on(metrics_port) as port:
        source = read_through(repo, None, "20GB")
        host = Host(_absolute(str(repo)), folder, ref, pause, patience, mode)
        clients = [client_of(spec, host) for spec in engine]
        follower = Follower(source, folder, ref=ref, poll=every, threads=threads, progress=progress, stop=stop)
        serving = Serving(source, follower, clients, _Teller(voice), metrics, folder, together=together, check=check)
        if port is not None:
            voice.note(f"metrics: http://127.0.0.1:{port}/metrics")
        if not once:
            serving.run(stop, every)
            return
        serving.move()
        if not serving.engines():
            have, need = "an engine at another step", "all of them at the newest"
            raise ChainError("engine-refused", where=str(repo), have=have, need=need, hint="The lines above say why.")


def _absolute(repo: str) -> str:
    """Engines run elsewhere: a relative path would mean another place to them."""
    return repo if "://" in repo else str(Path(repo).absolute())


class _Teller:
    def __init__(self, voice: Output) -> None:
        self._voice = voice

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        line = json.dumps({"event": event, **fields}) if self._voice.json else _line(event, fields)
        self._voice.data([line])


def _line(event: str, f: dict[str, Any]) -> str:
    if event == "switch":
        return f"step {f['step']}  {f['path']}"
    if event == "taken":
        why = f" ({f['reason']})" if f["reason"] else ""
        return f"step {f['step']}  {f['engine']}  {f['mode']}{why}, paused {f['pause']:.3f} s of {f['total']:.3f} s"
    return f"{event}  {f.get('engine', '')}  {f['where']}: have {f['have']}, need {f['need']} [{f['error']}]"
