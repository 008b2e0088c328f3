"""What a writer found to differ, kept for the move of its cache that follows: it need not read its own patch back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from deltackpt.checkpoint.diff import Difference, StoredTensor
from deltackpt.codecs import Decoded, Entry
from deltackpt.codecs.types import DecodeBuffer, Elements
from deltackpt.format.dtypes import DTYPES
from deltackpt.format.manifest import Link
from deltackpt.patch.part import PartReader
from deltackpt.repository.chain import Hop
from deltackpt.restore.patch_reader import Found, PatchReader
from deltackpt.restore.squashed import Changes

LIMIT = 128 << 20  # bytes of positions and values; what is beyond is decoded from the patch


class InMemoryPatch:
    """The changed elements of tensors on the way from ``start`` to ``end``, which is known once it is published."""

    def __init__(self, start: Link) -> None:
        self.start = start
        self.end: Link | None = None
        self.whole = True  # is every changed tensor here?
        self._tensors: dict[str, _Tensor] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, found: Difference, tensor: StoredTensor | None) -> None:
        """Take in how ``tensor`` of the new step differs, while there is room. Any thread may call it.

        None: it is gone.
        """
        change = found.change
        if tensor is None or change is None or change.base is None:
            self.whole = False
            return
        if len(change.positions) == 0:
            return
        positions = change.positions.astype(np.uint32) if change.elements <= 1 << 32 else change.positions
        size = positions.nbytes + change.new.nbytes
        with self._lock:
            if self._bytes + size > LIMIT:
                self.whole = False
                return
            self._bytes += size
            shape = tuple(tensor.shape)
            detail = Changes(len(positions))
            entry = Entry(found.name, "index", DTYPES[tensor.dtype], shape, shape, (0,) * len(shape), detail)
            self._tensors[found.name] = _Tensor(
                f"what was written of {found.name[:80]!r}", (entry,), Decoded(positions, change.new)
            )

    def leads(self, start: Link, end: Link, hops: Sequence[Hop]) -> bool:
        """Is it this one move?"""
        return (start, end) == (self.start, self.end) and len(hops) == 1

    def as_patch(self, hop: Hop, patch: PatchReader | None) -> PatchReader:
        """Stands for the patch of ``hop``; ``patch``, which may be None if all is here, for what is not."""
        return _Patch(hop, self._tensors, patch)


class _Patch(PatchReader):
    """Where `PatchReader.entries_of` is all that is asked for."""

    def __init__(self, hop: Hop, tensors: dict[str, _Tensor], patch: PatchReader | None) -> None:
        super().__init__(hop, ())
        self._tensors, self._patch = tensors, patch

    def entries_of(self, name: str) -> list[Found]:
        if name in self._tensors:
            return [(cast(PartReader, self._tensors[name]), 0)]
        return self._patch.entries_of(name) if self._patch else []


@dataclass(frozen=True)
class _Tensor:
    """What is kept of one tensor, as a part with one entry."""

    where: str
    entries: tuple[Entry, ...]
    decoded: Decoded

    def decode(self, entry: Entry, words: Elements, room: DecodeBuffer | None = None) -> Decoded:
        return self.decoded
