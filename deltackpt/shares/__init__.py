"""Shares: what one rank needs of a patch, who sends what to whom, and the proof that all ranks together have it all.

`bounds` has boxes; `overlap` what two layouts share; `needs` which bytes of a part a rank's boxes take, and what they
decode to; `reader` fetches them by ranges; `tensors` is what a rank holds in host memory; `proof` adds up over ranks;
`step` puts these together: read, decode, prove, and then write.
A carrier asks `share_of` at both of its ends: what one sends is what the other takes.
"""

from deltackpt.shares.bounds import Bounds, Held
from deltackpt.shares.needs import Cut, EntryShare, PartShare, coalesce, share_of
from deltackpt.shares.overlap import Cell, Layouts, Move, Overlap, cells, overlaps
from deltackpt.shares.proof import ProofReport, ShareProof
from deltackpt.shares.reader import ShareReader
from deltackpt.shares.step import StagedShare, stage
from deltackpt.shares.tensors import HeldTensor, HeldTensors

__all__ = [
    "Bounds",
    "Cell",
    "Cut",
    "EntryShare",
    "Held",
    "HeldTensor",
    "HeldTensors",
    "Layouts",
    "Move",
    "Overlap",
    "PartShare",
    "ProofReport",
    "ShareProof",
    "ShareReader",
    "StagedShare",
    "cells",
    "coalesce",
    "overlaps",
    "share_of",
    "stage",
]
