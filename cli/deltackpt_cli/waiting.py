"""What commands that follow a repository do where it is not there: say so, and wait or end as they are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from deltackpt_cli import units

if TYPE_CHECKING:
    from threading import Event

    from deltackpt.errors import DeltackptError
    from deltackpt.repository import Repository

Wait = Annotated[bool, typer.Option("--wait", help="Wait, however long, for a repository or branch that is not there.")]
Grace = Annotated[
    str,
    typer.Option(metavar="TIME", help="Without --wait: how long it may be gone before the command ends, with code 6."),
]


def grace_of(wait: bool, grace: str) -> float:
    """Seconds for which what is followed may be missing: without end with --wait."""
    seconds = units.duration(grace, "--grace")
    return math.inf if wait else seconds


def open_repository(
    opened: Callable[[], Repository], wait: bool, stop: Event, failed: Callable[[DeltackptError, float], None]
) -> Repository | None:
    """What ``opened`` returns. With ``wait`` it is called until there is a repository; None if ``stop`` was set first.

    ``failed`` is called with what is waited for, and the seconds until the next attempt.
    """
    from deltackpt.sync.backoff import Backoff, patiently

    return patiently(opened, stop, Backoff(grace=math.inf), failed) if wait else opened()
