"""`deltackpt status --watch`: a screen that is drawn again at every look; without a terminal, lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deltackpt.util.moments import utc
from deltackpt_cli import format as text
from deltackpt_cli.console import Output, printable

if TYPE_CHECKING:
    from threading import Event

    from deltackpt.report.live import LiveStatus, LiveView


def watch(output: Output, view: LiveView, every: float, stop: Event) -> None:
    """Look every so many seconds until ``stop`` is set."""
    if output.json or not sys.stdout.isatty():
        _lines(output, view, every, stop)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while not stop.is_set():
            shown = "\n".join(map(printable, screen(view.look())))
            live.update(Text(shown), refresh=True)  # plain text: a name is never markup
            stop.wait(every)


def _lines(output: Output, view: LiveView, every: float, stop: Event) -> None:
    """A line when anything but the time has changed; with --json an object at every look."""
    before: object = None
    while not stop.is_set():
        now = view.look()
        seen = (now.id, now.errors, [(reader.name, reader.step, reader.wrong) for reader in now.readers])
        if output.json:
            output.data([json.dumps(now.to_dict())])
        elif seen != before:
            output.data(["  ".join(filter(None, (_head(now), *map(_short, now.readers), *now.errors)))])
        before = seen
        stop.wait(every)


def screen(now: LiveStatus) -> Iterator[str]:
    """The lines of the screen."""
    rate = "-" if now.per_hour is None else f"{now.per_hour:,.1f} steps an hour, {text.short(now.bytes_per_step)} each"
    yield from text.fields([("head", _head(now)), ("rate", rate), ("at", utc(int(now.now)))])
    yield ""
    rows = [
        [r.name[:60], text.count(r.step), text.count(r.behind), "-" if r.lag is None else seconds(r.lag), r.wrong]
        for r in now.readers
    ]
    if rows:
        yield from text.table(["reader or engine", ">step", ">behind", ">lag", ""], rows)
    else:
        yield "no reader has a lease"
    yield ""
    yield from (f"error: {error}" for error in now.errors)


def _head(now: LiveStatus) -> str:
    if now.step is None or now.age is None:
        return "no head"
    return f"step {now.step} ({str(now.id)[:12]}), {seconds(now.age)} old"


def _short(reader: object) -> str:
    name, step, wrong = (getattr(reader, field) for field in ("name", "step", "wrong"))
    return f"{name} at {'-' if step is None else step}{f' ({wrong})' if wrong else ''}"


def seconds(value: float) -> str:
    """A time for people: seconds, then minutes, hours or days."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if value >= 2 * size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"
