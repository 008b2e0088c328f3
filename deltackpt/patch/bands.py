"""A large tensor through several patches band by band: some rows of its tiles, which lie side by side in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deltackpt.codecs.packed.native_rows import ChainJobs
from deltackpt.format.layout import TensorsByName
from deltackpt.format.safetensors_header import Tensor
from deltackpt.kernels import address
from deltackpt.patch.base import Bytes, Patch
from deltackpt.patch.many import RUN, TensorRun, chain_of, found_in_all

LARGEST = 32 << 20  # bytes of a band; one row of tiles may have more, and then there are no bands


@dataclass(frozen=True)
class Bands:
    """``edges``: where in the tensor each band begins, in bytes, and the last one ends; ``rows``: the same in rows of
    tiles."""

    edges: Sequence[int]
    rows: Sequence[int]
    jobs: ChainJobs

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def largest(self) -> int:
        """Bytes of a band at most."""
        return int(np.diff(self.edges).max())

    def advance(self, number: int, data: Bytes) -> bool:
        """A band through all patches. ``data`` are its old elements, uint8 [n], which are written to; False where
        anything is wrong, and then they are worthless."""
        jobs = self.jobs.at(address(data) - self.edges[number])
        return jobs.decode(rows=(self.rows[number], self.rows[number + 1]))


def bands_of(patches: Sequence[Patch], tensor: Tensor, named: TensorsByName) -> Bands | None:
    """Of a tensor of a state that has the tensors ``named``, with bytes; None where it cannot be cut so, or where
    anything is wrong. Needs the compiled kernels."""
    run = TensorRun([tensor], np.empty(0, np.uint8), named)
    found = found_in_all(patches, run)
    if found is None or any(one.others for one in found):
        return None
    jobs = chain_of(found, run)
    if not jobs.jobs["tiles"].any():
        edges = [*range(0, tensor.end - tensor.start, RUN), tensor.end - tensor.start]
        return Bands(edges, [*range(len(edges))], jobs)
    if (starts := jobs.bands()) is None:
        return None
    rows = [0]
    for row in range(1, len(starts)):  # as many as a run has, but one at least
        if row == len(starts) - 1 or starts[row + 1] - starts[rows[-1]] > RUN:
            rows.append(row)
    bands = Bands(starts[rows].tolist(), rows, jobs)
    return bands if bands.largest <= LARGEST else None
