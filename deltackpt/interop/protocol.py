"""The protocols of readers and writers of other systems' layouts. A reader never guesses: what it cannot prove it
reports, or refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State

Bytes = npt.NDArray[np.uint8]
Check = Callable[[Bytes], None]

UNVERIFIABLE = "unverifiable: no parent, no digest"


@dataclass(frozen=True)
class Step:
    """One step of another system. ``parent`` is the number of the step that it applies to, None where it is whole.

    ``proof`` says what its layout can prove, and what it cannot.
    """

    number: int
    parent: int | None
    path: Path
    proof: str


@dataclass(frozen=True)
class LayoutUpdate:
    """New values of one tensor: words of ``unit`` bytes at flat ``positions``, counted in such words; None: all words.

    ``xor``: to be combined with what is there. ``check`` is given all new bytes, and raises if they are not the right
    ones. No `deltackpt.codecs.Change`, which it becomes once it is held against the state: positions may be in any
    order, words may be single bytes of wider elements, and what is given may be what is there already.
    """

    name: str
    unit: int
    positions: npt.NDArray[np.int64] | None
    values: npt.NDArray[Any]
    xor: bool = False
    check: Check | None = None


@dataclass(frozen=True)
class Touched:
    """A tensor that a step changes. ``load`` unpacks the update; it is called later, in any thread."""

    name: str
    load: Callable[[], LayoutUpdate]


class LayoutReader(Protocol):
    """A run of another system in a directory."""

    def steps(self) -> Sequence[Step]:
        """In order of number, gaps and restarts refused. Raises FormatError, ChainError ``foreign-*``."""

    def whole(self, step: Step, into: Path, base: Checkpoint | None) -> Path:
        """A checkpoint directory of a whole step: one that is there, or made at ``into``. ``base`` is the state before,
        if there is any: its layout and side files may be taken over."""

    def read(self, step: Step, base: Checkpoint) -> Iterator[Touched]:
        """The tensors of ``base`` that a step changes. Sizes are checked against it before anything is unpacked, and
        of its bytes none are read."""

    def prove(self, step: Step, new: State) -> None:
        """Check the whole new state as far as the layout allows. Raises ChainError ``foreign-digest``."""


class LayoutWriter(Protocol):
    """Puts steps into the layout of another system, each visible only when it is whole.

    ``consecutive``: its readers take only numbers without a gap. ``anchored``: it has whole steps, so `whole` may be
    called.
    """

    consecutive: bool
    anchored: bool

    def whole(self, number: int, new: Checkpoint) -> None:
        """Write a step that needs no other."""

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        """Write a step that applies to the one before, or, where the layout cannot carry the change, a whole one.

        -> why it is whole, None if it is not.
        """
