"""The parts of an announced step, as a rank of an engine takes them in: whole, or by ranges."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from deltackpt.carriers.pulled import ManySources
from deltackpt.format.manifest import File
from deltackpt.live.card_part import CardPart
from deltackpt.patch.tensor import PartsPatch
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import PatchReader, check_origin


@dataclass(frozen=True)
class StepParts:
    """``full``: they are all of the weights. ``hashed``: their sha256 is looked at, whatever the carrier."""

    source: ManySources
    hop: Hop
    full: bool
    hashed: bool = False

    @property
    def files(self) -> tuple[File, ...]:
        """Of every rank of the trainer."""
        return self.hop.files

    def patch(self) -> AbstractContextManager[PatchReader]:
        """All of them, fetched and proven by sha256. Raises what `PatchReader.open` raises."""
        return PatchReader.open(self.source, self.hop)

    @property
    def to_card(self) -> bool:
        """Does the carrier bring them to a card, and need no part be hashed?"""
        return self.source.to_card and not self.hashed

    @contextmanager
    def patch_to_card(self) -> Iterator[PartsPatch]:
        """The same for a receiver on a card: their bytes arrive there if the carrier brings them, and are then proven
        by the checksums and sums of what they hold; else as `patch` has it."""
        if not self.to_card:
            with self.patch() as patch:
                yield patch
            return
        parts = [CardPart(self.source.of(file), file) for file in self.files]
        for part in parts:
            check_origin(part, self.hop)
        yield PartsPatch(parts)
