"""How the rows of tiles are cut for the kernels that count elements by class; see `triton.lists_scan`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SPAN = 64  # elements of a segment
SEGMENTS = 512  # of a block
ROOM = 16  # what a tile's segments begin at is a multiple of it, so that several are read and written at once


class BlockPlan:
    """Where the blocks and segments of some tiles are.

    ``first_block`` and ``first_segment`` [tiles + 1] are those of each tile, and how many there are; ``tiles``
    [tiles + 1, 2] both side by side. ``block_tiles`` [blocks]: the tile of every block. All int64.
    """

    def __init__(self, segments: npt.NDArray[np.int64]) -> None:
        """``segments`` [tiles]: how many each tile has."""
        blocks = -(-segments // SEGMENTS)
        self.tiles = np.zeros((len(segments) + 1, 2), np.int64)
        self.first_block, self.first_segment = self.tiles.T
        np.cumsum(blocks, out=self.first_block[1:])
        np.cumsum(segments + -segments % ROOM, out=self.first_segment[1:])
        self.block_tiles = np.repeat(np.arange(len(segments)), blocks)

    @property
    def segments(self) -> int:
        """How many there is room for, in all."""
        return int(self.first_segment[-1])
