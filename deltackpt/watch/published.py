"""What a watcher says of a step that it published."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deltackpt.watch.prune import LeftOut


@dataclass(frozen=True)
class Published:
    """A step that was published, its directory, and the directories that were removed after it; ``left`` are files in
    these that were not, and why. ``left_out`` is what its directory has and the step does not."""

    directory: str
    step: int
    id: str
    parent: int | None
    anchor: bool
    patch_bytes: int
    changed: int
    seconds: float
    rewound: int | None
    pruned: tuple[str, ...] = ()
    left: LeftOut = ()
    left_out: LeftOut = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)
