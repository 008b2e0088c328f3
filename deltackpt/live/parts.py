"""The parts of an announced step, as a rank of an engine takes them in: whole, or by ranges."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from deltackpt.format.manifest import File
from deltackpt.patch.source import PartSource
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import PatchReader


@dataclass(frozen=True)
class StepParts:
    """``full``: they are all of the weights."""

    source: PartSource
    hop: Hop
    full: bool

    @property
    def files(self) -> tuple[File, ...]:
        """Of every rank of the trainer."""
        return self.hop.files

    def patch(self) -> AbstractContextManager[PatchReader]:
        """All of them, fetched and proven by sha256. Raises what `PatchReader.open` raises."""
        return PatchReader.open(self.source, self.hop)
