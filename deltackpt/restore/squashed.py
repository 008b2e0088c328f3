"""Several patches as one: each tensor is decoded through all of them in memory, and what differs in the end is written.

A reader that is many steps behind reads the chain once, and writes every changed element once, however often it
changed in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import changes, count_changes
from deltackpt.codecs import Decoded, Entry
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.errors import ChainError, CheckpointError
from deltackpt.patch.part import PartReader
from deltackpt.repository import Repository
from deltackpt.repository.chain import Hop
from deltackpt.restore.decode_ahead import DecodeAhead
from deltackpt.restore.patch_reader import Found, PatchReader
from deltackpt.restore.replay import Known, write_step

DENSE = 3  # with more changes than a third of the elements, all are written: positions would weigh more


class SquashedPatch(PatchReader):
    """Stands for ``patches``, in this order, where `PatchReader.entries_of` is all that is asked for."""

    def __init__(self, patches: Sequence[PatchReader], early: DecodeAhead | None = None) -> None:
        super().__init__(patches[-1].hop, ())
        self._patches, self._early = patches, early

    @classmethod
    @contextmanager
    def through(cls, repo: Repository, hops: Sequence[Hop], folder: Path, threads: int) -> Iterator[SquashedPatch]:
        """Of several hops; all parts are fetched and hashed on entry.

        What ``folder`` holds, which should be the state that they apply to, goes through them meanwhile.
        """
        patches = PatchReader.arriving(repo, hops)
        with ExitStack() as stack:
            try:
                base = stack.enter_context(Checkpoint.open(folder))
            except CheckpointError:  # another way may be open: this is nobody's only one
                yield cls(list(patches))
                return
            early, every = stack.enter_context(DecodeAhead.of(base, patches, threads))
            yield cls(every, early)

    def entries_of(self, name: str) -> list[Found]:
        found = [entries for patch in self._patches if (entries := patch.entries_of(name))]
        if len(found) < 2:
            return found[0] if found else []
        part, i = found[0][0]
        entry = part.entries[i]
        # As of a part of its own: unboxed, and of an encoding that changes elements.
        most = sum(part.entries[i].changes for entries in found for part, i in entries)
        alone = replace(
            entry, encoding="index", shape=entry.whole, offset=(0,) * len(entry.whole), detail=Changes(most)
        )
        return [(cast(PartReader, _Tensor(part.where, (alone,), found, self._early)), 0)]

    @property
    def names(self) -> set[str]:
        return set().union(*(patch.names for patch in self._patches))


@dataclass(frozen=True)
class Changes:
    """What is known of an entry that no bytes describe: at most so many elements change."""

    changes: int


@dataclass(frozen=True)
class _Tensor:
    """What all patches hold of one tensor, as a part with one entry."""

    where: str
    entries: tuple[Entry, ...]
    found: Sequence[list[Found]]
    early: DecodeAhead | None

    def decode(self, entry: Entry, words: npt.NDArray[Any], room: DecodeBuffer | None = None) -> Decoded:
        """The elements that differ after the last patch; ``words`` is not written to."""
        new = self.early.take(entry.name) if self.early is not None else None
        new = self._through(entry, words) if new is None else new.view(words.dtype)
        if entry.changes * DENSE > len(new) and count_changes(words, new) * DENSE > len(new):
            return Decoded(None, new)
        positions, _, values = changes(words, new)
        return Decoded(positions, values)

    def _through(self, entry: Entry, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        known: Known = (entry.dtype.name, entry.whole)
        new: npt.NDArray[Any] = words.copy()
        for found in self.found:
            if not write_step(new.view(np.uint8), known, found):  # on a copy, as an error may leave it half written
                need = "one shape and dtype all the way"
                raise ChainError("slot-unusable", where=entry.name[:80], have="another in between", need=need)
        return new
