"""What an engine is asked to update to, and what its ranks report."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deltackpt.cache.layout import CacheLayout
from deltackpt.errors import ChainError
from deltackpt.util.disk import replace_file

PHASES = ("stage", "apply", "check", "undo", "report", "final")
START = "default"  # the version of weights that no update changed, as vLLM and SGLang name it


@dataclass(frozen=True)
class Update:
    """``step`` is one that `Repository.find` accepts; ``state`` the digest that it must have. ``phase``: `stage`
    prepares in the background, `apply` prepares what is not and writes, `check` reads all weights, `undo` goes back to
    what was before the last `apply`, `report` only says where the rank is, `final` makes its step its version.
    ``token`` names the report; ``mode`` `reload` asks for no scatter.
    """

    step: int | str = "latest"
    state: str | None = None
    phase: str = "apply"
    mode: str = "auto"
    token: str = ""


@dataclass
class RankReport:
    """Of one rank. ``seconds`` by part; ``reason`` says why the mode was chosen, ``error`` what went wrong.

    ``path`` is the way that the weights take: `none`, `reload`, `layers` where some layers are loaded again and the
    rest is scattered, or the source of what is scattered: `journal`, `patches`, or `shares` of ranks that decode and
    prove a step together; ``expected`` the one that they would take if nothing were in its way, empty where none is
    known.
    """

    rank: int = 0
    phase: str = ""
    step: int | None = None
    id: str = ""
    state: str = ""
    mode: str = ""
    reason: str = ""
    path: str = ""
    expected: str = ""
    draft: str = ""  # the way that the weights of a draft model take; empty where none follows
    elements: int = 0
    decoded: dict[str, int] = field(default_factory=dict)  # tensors, on the card and on the host, for an engine on one
    checked: str = ""
    wedged: bool = False
    open: bool = False  # whether an update session of the engine is open
    final: bool = False  # whether its last update, if it had one, was made final
    version: str = START  # the step that was last made final
    stale: list[str] = field(default_factory=list)  # what no update changes, in words
    error: dict[str, Any] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    proof: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """By the names of its fields."""
        return asdict(self)

    def save(self, folder: str | os.PathLike[str], token: str) -> None:
        """Into the cache, or what stands for it, where the client that gave the token finds it: on the same host.
        Without a token, nowhere."""
        if not token or not str(folder):
            return
        layout = CacheLayout(Path(folder))
        layout.receivers.mkdir(parents=True, exist_ok=True)
        replace_file(layout.report(token, self.rank), json.dumps(self.to_dict()).encode(), sync=False)


def read_reports(folder: str | os.PathLike[str], token: str) -> list[RankReport]:
    """The reports of all ranks under a token, and remove them."""
    found = []
    for path in CacheLayout(Path(folder)).reports(token):
        found.append(RankReport(**json.loads(path.read_text())))
        path.unlink(missing_ok=True)
    return found


def raise_first(reports: Sequence[RankReport], name: str) -> None:
    """Raise what went wrong, in the words of the first rank that says so: ChainError ``engine-wedged`` where its
    weights may be those of no step, ``engine-asleep`` where they are put aside, else ``engine-refused``."""
    for report in reports:
        if (error := report.error) is not None:
            asleep = str(error["error"]) == "engine-asleep"
            code = "engine-wedged" if report.wedged else "engine-asleep" if asleep else "engine-refused"
            have = str(error["have"]) if asleep else f"{error['where']}: {error['have']} [{error['error']}]"
            raise ChainError(code, where=name, have=have, need=str(error["need"]), hint=str(error["hint"]))
