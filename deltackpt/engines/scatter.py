"""One step into an engine's memory: prepared in full, then written in one pass, and rolled back if it must be.

What is written where is said by a `context.ChangeSource`. Where its words lie, in host memory or on a device, and how
they were decoded is its own business: the rest of an update sees writes that are done, or undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy.typing as npt

from deltackpt.engines.memory import Memory
from deltackpt.engines.slices.claim import SliceClaim

Words = npt.NDArray[Any]


class Fallback(Exception):
    """A reason to load the whole checkpoint instead."""


class Write(Protocol):
    """Some words of an engine's memory, prepared: done and undone any number of times, in place."""

    @property
    def elements(self) -> int:
        """How many."""

    def apply(self) -> None:
        """Put the new words in place. May be left in the middle when it raises; `revert` mends that."""

    def revert(self) -> None:
        """Put the old words back."""


@runtime_checkable
class Claiming(Protocol):
    """A `Write` that is not proven by this rank alone."""

    claim: SliceClaim


@dataclass(frozen=True)
class MemoryWrite:
    """``positions``: [n] integers, elements of the storage, each once; ``new`` and ``old``: [n] unsigned words of its
    width. All in host memory.
    """

    memory: Memory
    positions: Words
    new: Words
    old: Words

    @property
    def elements(self) -> int:
        """How many."""
        return len(self.new)

    def apply(self) -> None:
        """Put the new words in place."""
        self.memory.write(self.positions, self.new)

    def revert(self) -> None:
        """Put the old words back."""
        self.memory.write(self.positions, self.old)


class Scatter:
    """The writes that take one rank's memory from a step to the next, in order."""

    def __init__(self, writes: Sequence[Write]) -> None:
        self._writes = writes
        self._begun = 0

    @property
    def elements(self) -> int:
        """How many are written in all."""
        return sum(w.elements for w in self._writes)

    @property
    def layers(self) -> list[str]:
        """The layers that the engine loads again for it."""
        return [name for w in self._writes for name in getattr(w, "layers", ())]

    @property
    def mode(self) -> str:
        """What it is called in reports: `scatter`, or `layers` where some are loaded again."""
        return "layers" if self.layers else "scatter"

    @property
    def claim(self) -> SliceClaim | None:
        """What this rank says of it, where it is proven by all ranks together."""
        return next((w.claim for w in self._writes if isinstance(w, Claiming)), None)

    @property
    def decoded(self) -> dict[str, int]:
        """How many tensors were decoded on the card, and how many on the host, where the weights are on a card."""
        found: dict[str, int] = {}
        for w in self._writes:
            found |= getattr(w, "decoded", {})
        return found

    def write(self) -> None:
        """Put every new word in place. After any error `rollback` puts the old ones back."""
        for w in self._writes:
            self._begun += 1
            w.apply()

    def rollback(self) -> None:
        """Put the old words back, of the writes that were begun."""
        for w in reversed(self._writes[: self._begun]):
            w.revert()
        self._begun = 0
