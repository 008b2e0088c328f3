"""Several patches as one: each tensor is decoded through all of them in memory, and what differs in the end is written.

A reader that is many steps behind reads the chain once, and writes every changed element once, however often it
changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from deltackpt.checkpoint.diff import changes, count_changes
from deltackpt.codecs.base import Effect, Shape
from deltackpt.codecs.types import DecodeBuffer, Decoded, Elements
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DType
from deltackpt.patch.apply import write_step
from deltackpt.patch.base import Bytes, Patch, TensorPatch

DENSE = 3  # with more changes than a third of the elements, all are written: positions would weigh more

Ahead = Callable[[str], Bytes | None]  # a tensor after the last patch, if it is at hand: the caller's to write to


def _nothing(name: str) -> Bytes | None:
    return None


class SquashedPatch:
    """A `Patch` that leads where ``patches``, one after the other, lead.

    What it decodes follows from a comparison: old elements that are wrong may be missing in it, though the result is
    right. ``ahead`` gives a tensor that went through all of them before, once.
    """

    def __init__(self, patches: Sequence[Patch], ahead: Ahead = _nothing) -> None:
        self.patches, self._ahead = patches, ahead

    @property
    def names(self) -> AbstractSet[str]:
        """Of the tensors that any of the patches holds."""
        return set().union(*(patch.names for patch in self.patches))

    def tensor(self, name: str) -> TensorPatch | None:
        """The patches of a tensor as one, which then has to keep its dtype and shape; the only one, if it is that."""
        found = [held for patch in self.patches if (held := patch.tensor(name)) is not None]
        if len(found) < 2:
            return found[0] if found else None
        return SquashedTensor(tuple(found), self._ahead)


@dataclass(frozen=True)
class SquashedTensor:
    """What two or more patches in a row hold of one tensor. A `TensorPatch`; see there."""

    steps: tuple[TensorPatch, ...]
    ahead: Ahead

    @property
    def name(self) -> str:
        """Of the tensor."""
        return self.steps[0].name

    @property
    def where(self) -> str:
        """Where the first patch comes from."""
        return self.steps[0].where

    @property
    def dtype(self) -> DType:
        """That of the first patch, and so of all."""
        return self.steps[0].dtype

    @property
    def shape(self) -> Shape:
        """That of the first patch, and so of all."""
        return self.steps[0].shape

    @property
    def effect(self) -> Effect:
        """Whatever the patches do: what differs in the end is written."""
        return Effect.CHANGES

    @property
    def changes(self) -> int:
        """The sum of all patches: an element may be in several."""
        return sum(step.changes for step in self.steps)

    def decode(self, old: Elements, buffer: DecodeBuffer | None = None) -> Decoded:
        """The elements that differ after the last patch, positions and words [changes]; all words [n] where there are
        many.

        Raises ChainError ``slot-unusable`` where the tensor is another one in between.
        """
        ahead = self.ahead(self.name)
        new: Elements = self._through(old) if ahead is None else ahead.view(old.dtype)
        if self.changes * DENSE > len(new) and count_changes(old, new) * DENSE > len(new):
            return Decoded(None, new)
        found = changes(old, new)
        return Decoded(found.positions, found.new)

    def decode_into(self, elements: Elements) -> None:
        """What `decode` gives, written to words [n]."""
        self.decode(elements).write_to(elements)

    def whole(self) -> Elements:
        """Never all words [n]: a reader that lacks the tensor takes the patches one by one."""
        have, need = f"no {self.name[:80]!r} to patch", "the tensor before the first of several patches"
        raise ChainError("base-shape", where=self.where, have=have, need=need)

    def _through(self, old: Elements) -> Elements:
        known = (self.dtype.name, self.shape)
        new: Elements = old.copy()
        for step in self.steps:
            if not write_step(new.view(np.uint8), known, step):  # on a copy, as an error may leave it half written
                need = "one shape and dtype all the way"
                raise ChainError("slot-unusable", where=self.name[:80], have="another in between", need=need)
        return new
