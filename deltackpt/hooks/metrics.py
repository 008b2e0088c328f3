"""What a published step cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """One published step. ``steps`` is how many were merged into it; bytes are of its parts, over all ranks.
    ``nonfinite`` elements of the weights are infinite or NaN: over all ranks at rank 0, at others their own.

    ``seconds`` by stage: training stood still for ``diff``, in which few changes of large tensors are encoded too, and
    for ``wait`` (for the queue, or for an anchor); ``encode`` of the others, ``put``, ``anchor`` and ``commit`` were in
    the background, and are those of this rank.
    """

    step: int
    steps: int
    anchor: bool
    elements: int
    changed: int
    bytes: int
    queue: int  # steps that were waiting when this one was done
    nonfinite: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """The share of storage elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bits_per_change(self) -> float | None:
        """Bits of the parts for each changed element; None without one."""
        return 8 * self.bytes / self.changed if self.changed else None

    def to_dict(self) -> dict[str, Any]:
        """All fields, and what follows from them, for JSON."""
        return {**asdict(self), "density": self.density, "bits_per_change": self.bits_per_change}

    def to_log(self) -> dict[str, float]:
        """Numbers by name, flat, for a logger."""
        log = {
            f"deltackpt/{k}": float(getattr(self, k))
            for k in ("step", "density", "changed", "bytes", "queue", "nonfinite")
        }
        if self.bits_per_change is not None:
            log["deltackpt/bits_per_change"] = self.bits_per_change
        return log | {f"deltackpt/seconds_{k}": v for k, v in self.seconds.items()}
