"""Plain changes of a trainer's rank as one part on its card: put together by few calls, whatever the number of tensors.

What does not change from step to step, the order of the bytes and all text of head and table but for numbers, is kept
as long as the same tensors change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs.index import IndexCodec
from deltackpt.codecs.plain import Checked
from deltackpt.gpu.crc_runs import begin_crc32
from deltackpt.gpu.device_bytes import CardBytes
from deltackpt.gpu.transfers import synchronize
from deltackpt.hooks.parts import Share
from deltackpt.live.card_encode import free_names
from deltackpt.patch.part import Origin
from deltackpt.patch.plain_layout import Form, PlainCounts, PlainEntries, PlainLayout
from deltackpt.patch.source import PartBytes
from deltackpt.publish.sink import EncodedPart
from deltackpt.torch_views.delta import CardDelta, CardWords
from deltackpt.torch_views.words import INTS

Ints = npt.NDArray[np.int64]
MOST = 1 << 31  # bytes of changes that are put together in one piece, beside what the capture has of them


class LateTable:
    """The table of a part, of which a card is still making the checksums: who looks at its bytes waits for that. Any
    thread may. Implements what `carriers.memory` asks of the bytes of a part."""

    def __init__(
        self, layout: PlainLayout, changes: Ints, checksums: Callable[[], npt.NDArray[np.uint32]]
    ) -> None:  # fmt: skip
        self._layout, self._changes, self._checksums = layout, changes, checksums
        self.nbytes = layout.table_size(changes)
        self._counts: PlainCounts | None = None
        self._bytes = b""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, where: slice) -> memoryview:
        return self.to_host()[where]

    def to_host(self) -> memoryview:
        """Them."""
        self._known()
        return memoryview(self._bytes)

    def details(self) -> list[Checked]:
        """Those of the entries."""
        return self._known().details()

    def _known(self) -> PlainCounts:
        with self._lock:
            if self._counts is None:
                found = PlainCounts(self._changes, self._checksums())
                self._bytes, self._counts = self._layout.table(found), found
            return self._counts


class PlainParts:
    """Makes them, one after the other. Used by one thread."""

    def __init__(self) -> None:
        self._layout = PlainLayout([])
        self._forms: list[Form] = []

    @staticmethod
    def takes(found: Sequence[CardDelta], names: AbstractSet[str]) -> bool:
        """Do changes fit into one of them: are there some, and can all of them go out under names that are free?
        ``names`` are those of all tensors."""
        return 0 < sum(one.nbytes for one in found) <= MOST and all(free_names(one.name, names) for one in found)

    def made(self, found: Sequence[CardDelta], origin: Origin, number: int) -> tuple[EncodedPart, Share]:
        """Changes that it `takes`, as `index` entries whose bytes are on the card."""
        order = sorted(found, key=lambda one: one.name.encode())
        layout = self._of([(one.name, one.dtype, one.shape) for one in order])
        changes = np.array([one.words.positions.numel() for one in order], np.int64)
        sizes = layout.sizes(changes)
        ends = np.cumsum(sizes)
        body = _together([one.words for one in order], layout, sizes)
        spans = np.lexsort((layout.values, layout.tensor))  # those of a tensor side by side, positions before values
        checksums = begin_crc32(body, (ends - sizes)[spans], sizes[spans], layout.tensor[spans])
        table = LateTable(layout, changes, checksums)
        head = layout.head(origin, changes)
        at = len(head) + body.numel()
        near = len(head), at, at + len(table)
        chunks = (head, cast(PartBytes, CardBytes(body)), cast(PartBytes, table))
        made = EncodedPart(number, origin, PlainEntries(layout.forms, table.details), chunks, near[2], near=near)
        share = Share(
            sums={one.name: one.sums for one in order},
            changed={one.name: n for one, n in zip(order, changes.tolist(), strict=True)},
            encodings={IndexCodec.name: len(order)},
        )
        return made, share

    def _of(self, forms: list[Form]) -> PlainLayout:
        if forms != self._forms:
            self._layout, self._forms = PlainLayout(forms), forms
        return self._layout


def _together(found: Sequence[CardWords], layout: PlainLayout, sizes: Ints) -> torch.Tensor:
    """Positions and words of all tensors as they lie in the part, uint8: a launch for those of each width."""
    views = [
        found[tensor].new if values else found[tensor].positions
        for tensor, values in zip(layout.tensor.tolist(), layout.values.tolist(), strict=True)
    ]
    body = torch.empty(int(sizes.sum()), dtype=torch.uint8, device=views[0].device)
    cuts = [0, *(np.flatnonzero(np.diff(layout.widths)) + 1).tolist(), len(views)]
    bytes_to = np.concatenate(([0], np.cumsum(sizes)))
    for first, stop in pairwise(cuts):
        dtype = INTS[int(layout.widths[first])]
        torch.cat(views[first:stop], out=body[bytes_to[first] : bytes_to[stop]].view(dtype))
    synchronize(body.device)  # it is sent on streams of others
    return body
