"""A rank that holds slices: it pulls only the tiles that they touch, and proves the step with the ranks beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.slices.agreement import SharedElements
from deltackpt.engines.slices.decoder import SliceDecoder
from deltackpt.engines.slices.slice_step import SliceStep
from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import uint
from deltackpt.format.state_digest import Sums
from deltackpt.live.parts import StepParts
from deltackpt.live.weights import check_sums
from deltackpt.patch.base import Patch
from deltackpt.restore.patch_reader import check_origin
from deltackpt.shares import Cut, HeldTensors, ShareProof, ShareReader
from deltackpt.shares.bounds import Bounds

Words = npt.NDArray[Any]


@dataclass
class PreparedSlices:
    """Implements `Prepared`. Its ``proof`` is to be added to those of the engine's other ranks."""

    sums: Mapping[str, Sums]
    proof: dict[str, Any]
    unchecked: list[str]
    scatter: Scatter
    done: Callable[[], None]

    @property
    def elements(self) -> int:
        """How many are written."""
        return self.scatter.elements

    def write(self) -> None:
        """All of them, or after an error none."""
        try:
            self.scatter.write()
        except BaseException:
            self.scatter.rollback()
            raise
        self.done()


class SlicedWeights:
    """Implements `HeldWeights` for the boxes of tensors that a rank holds.

    Where no rank of the engine holds some elements of a tensor, sums do not prove it: then its bytes have to have
    checksums.
    """

    whole = False

    def __init__(self, tensors: HeldTensors, decoder: SliceDecoder | None = None) -> None:
        self.tensors, self.decoder = tensors, decoder or SliceDecoder(tensors)
        self._shared = SharedElements(tensors)
        self._proof: ShareProof | None = None

    @property
    def cells(self) -> Mapping[str, Sequence[Bounds]]:
        """What its proofs are of: boxes of each tensor, disjoint."""
        return self.decoder.cells

    def digest(self) -> dict[str, Sums]:
        """Of no tensor: slices have the sums of cells, which are proven with those of other ranks."""
        self._proof = None
        return {}

    def take(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedSlices:
        """See `HeldWeights.take`: only the ranges that the boxes touch are pulled. Its `proof` is to be added up.

        Raises ChainError ``base-shape`` where a tile needs old elements that other ranks hold, ``base-differs`` for a
        tensor of which the step has no sums, ``value-inexact``, and what `ShareReader` raises.
        """
        self.decoder.begin()
        empty = {name: dict.fromkeys(cells, state_digest.ZERO) for name, cells in self.cells.items()}
        made = SliceStep(self.tensors, ShareProof(empty) if parts.full else self._known_proof(), parts.full)
        unchecked: set[str] = set()
        for file in parts.files:
            reader = ShareReader(parts.of(file), file, self.tensors.held)
            check_origin(reader.index, parts.hop)
            for one in reader.share.entries:
                if one.entry.name not in want:  # [F-APPLY-5]: no sum would prove it
                    have, need = "changes of it", "changes of tensors that the step has sums of"
                    raise ChainError("base-differs", where=one.entry.name[:80], have=have, need=need)
            unchecked |= {one.entry.name for one in reader.share.entries if one.cut is Cut.ELEMENTS}
            self.decoder.decode(made, reader, file, parts)
        proof = made.proof
        told = ShareProof({name: cells for name, cells in proof.cells.items() if name in want})

        def done() -> None:
            self._proof = proof

        return PreparedSlices({}, told.to_dict(), sorted(unchecked), Scatter(made.writes), done)

    def prepare(self, patch: Patch, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedSlices:
        """Never: a repository's step is loaded, since a patch needs whole tensors."""
        raise AssertionError("slices are loaded")

    def load(self, read: ReadTensor, want: Mapping[str, Sums], *, prove_first: bool) -> int:
        """See `HeldWeights.load`: whole tensors are read and proven, uint8, and the boxes written."""
        if prove_first:
            for name in self.tensors.tensors:
                self._read(name, read, want)
        self._proof, count = None, 0
        for name, tensor in self.tensors.tensors.items():
            words = self._read(name, read, want)
            self.tensors.fill(name, words)
            count += sum(array.size for _, array in tensor.places)
        return count

    def _read(self, name: str, read: ReadTensor, want: Mapping[str, Sums]) -> Words:
        tensor = self.tensors.tensors[name]
        words: Words = read(name).view(uint(tensor.dtype.width))
        check_sums({name: state_digest.of_run(words)}, want)
        self.tensors.check(name, words)
        return words.reshape(tensor.shape)

    def _known_proof(self) -> ShareProof:
        if self._proof is None:
            self._shared.check()
            self._proof = self.decoder.sums()
        return self._proof
