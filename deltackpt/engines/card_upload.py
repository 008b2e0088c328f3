"""Changes that were decoded on the host, on the way to the card that holds an engine's weights: before a step is
written, many at a time, and never tensor by tensor."""

from __future__ import annotations

import numpy as np
import torch

from deltackpt.engines.card_memory import TOGETHER, aside
from deltackpt.engines.card_writes import CardWrites
from deltackpt.engines.memory import Memory
from deltackpt.engines.scatter import Fallback, Words, Write
from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.compile_ahead import join_receiving
from deltackpt.gpu.places import Place, by_width, other
from deltackpt.gpu.transfers import put


class CardUpload:
    """Collects changed words, sends them in runs of TOGETHER bytes or so, and compares old words on the card."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: list[tuple[str, Memory, Words, Words, Words]] = []
        self._size = 0
        self._made: list[Write] = []

    def add(self, name: str, storage: Memory, positions: Words, new: Words, old: Words) -> None:
        """Words of a tensor: [n] ``positions`` in the storage, and [n] unsigned words that will be there, and that
        have to be there now. Raises Fallback where, of those that were added before, other words are there."""
        self._waiting.append((name, storage, positions, new, old))
        self._size += len(new) * (4 + 2 * new.itemsize)
        if self._size >= TOGETHER:
            self._send()

    def writes(self) -> list[Write]:
        """All of them. Raises Fallback as `add`."""
        self._send()
        return [CardWrites(self._device, self._made)] if self._made else []

    def _send(self) -> None:
        """Send what waits, in one copy for each width, and compare it there."""
        waiting, self._waiting, self._size = self._waiting, [], 0
        if not waiting:
            return
        join_receiving(self._device)
        with aside(self._device):
            widths = sorted({new.itemsize for _, _, _, new, _ in waiting})
            for width in widths:
                some = [one for one in waiting if one[3].itemsize == width]
                places = self._places(some, width)
                (made,) = by_width(places)
                if (number := other(places, made)) is not None:
                    raise Fallback(f"{some[number][0]}: the engine's memory is not that of the step before")
                self._made.append(made)

    def _places(self, some: list[tuple[str, Memory, Words, Words, Words]], width: int) -> list[Place]:
        signed = np.dtype(np.uint8 if width == 1 else f"<i{width}")
        starts = [int(positions.min()) for _, _, positions, _, _ in some]
        if any(int(one[2].max()) - start >= NARROW for one, start in zip(some, starts, strict=True)):
            raise Fallback("changes of one tensor that are 2^31 elements apart")
        near = [(one[2] - one[2].dtype.type(start)).astype(np.int32) for one, start in zip(some, starts, strict=True)]
        where = put(np.concatenate(near), self._device)
        new, old = (put(np.concatenate([one[k] for one in some]).view(signed), self._device) for k in (3, 4))
        counts = [len(one[3]) for one in some]
        pieces = zip(some, starts, where.split(counts), new.split(counts), old.split(counts), strict=True)
        return [Place(one[1].flat, start, at, value, was) for one, start, at, value, was in pieces]
