"""When steps arrived where they are used, from the events that followers print with `--json`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltackpt.errors import FormatError, NotFoundError

MAX_LINE = 1 << 20  # bytes


@dataclass(frozen=True)
class Arrival:
    """A step that a follower or an engine came to, ``lag`` seconds after it was published; ``pause`` is how long an
    engine stood still for it, None of a cache."""

    follower: str
    step: int
    lag: float
    pause: float | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def read_arrivals(paths: Sequence[str | os.PathLike[str]]) -> tuple[Arrival, ...]:
    """The `switch` events of `follow --json`, named by their file, and the `taken` events of `serve-updates --json`,
    by the engine. Other lines of JSON are passed over.

    Raises NotFoundError ``events-missing``, FormatError ``json-syntax`` for a file that holds something else.
    """
    found: list[Arrival] = []
    for path in map(Path, paths):
        try:
            with path.open("rb") as file:
                for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
                    if line.strip() and (one := _arrival(line, path, number)) is not None:
                        found.append(one)
        except OSError as error:
            have = error.strerror or str(error)
            raise NotFoundError("events-missing", where=path, have=have, need="a file of events") from error
    return tuple(found)


def _arrival(line: bytes, path: Path, number: int) -> Arrival | None:
    try:
        value = json.loads(line) if len(line) <= MAX_LINE else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        need = "an event, as `follow --json` and `serve-updates --json` print them"
        raise FormatError("json-syntax", where=f"{path}, line {number}", have="something else", need=need)
    names = {"switch": path.name, "taken": str(value.get("engine", ""))[:200]}
    event, step, lag, pause = (value.get(key) for key in ("event", "step", "lag", "pause"))
    if event not in names or type(step) is not int or not isinstance(lag, int | float) or not 0 <= lag < 1e12:
        return None
    stood = float(pause) if event == "taken" and isinstance(pause, int | float) else None
    return Arrival(names[str(event)], step, float(lag), stood)
