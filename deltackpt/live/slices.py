"""A rank that holds slices: it pulls only the tiles that they touch, and proves the step with the ranks beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Decoded
from deltackpt.engines.cached_steps import ReadTensor
from deltackpt.engines.memory import Memory, memories
from deltackpt.engines.proof import prove
from deltackpt.engines.regions import Region
from deltackpt.engines.tracing import Load, trace
from deltackpt.engines.traits import EngineTraits
from deltackpt.errors import ChainError, CheckpointError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums
from deltackpt.format.widening import Widening
from deltackpt.live.parts import StepParts
from deltackpt.live.weights import check_sums
from deltackpt.patch.base import Patch
from deltackpt.restore.patch_reader import check_origin
from deltackpt.shares import Cut, HeldTensors, ShareProof, ShareReader
from deltackpt.shares.bounds import Bounds, disjoint, of_strided, shape_of, whole
from deltackpt.shares.tensors import HeldTensor, Place, WideWords
from deltackpt.torch_views.names import listed

Words = npt.NDArray[Any]

SMALL = 1 << 20  # elements up to which a rank keeps a copy of all of a tensor of which it has slices


@dataclass
class PreparedSlices:
    """Implements `Prepared`. ``changes``: by tensor, flat positions in it, old words and new ones."""

    tensors: HeldTensors
    sums: Mapping[str, Sums]
    proof: dict[str, Any]
    unchecked: list[str]
    changes: list[tuple[str, Words, Words, Words]]
    done: Callable[[], None]
    begun: int = field(default=0, init=False)

    @property
    def elements(self) -> int:
        """How many are written."""
        return sum(len(new) for *_, new in self.changes)

    def write(self) -> None:
        """All of them, or after an error none."""
        try:
            for name, positions, _, new in self.changes:
                self.begun += 1
                self.tensors.write(name, Decoded(positions, new))
        except BaseException:
            for name, positions, old, _ in self.changes[: self.begun]:
                self.tensors.write(name, Decoded(positions, old))
            raise
        self.done()


class SlicedWeights:
    """Implements `HeldWeights` for the boxes of tensors in a rank's host memory.

    Boxes of ranks that share an engine are the same or apart. Where no rank of the engine holds some elements of a
    tensor, sums do not prove it: then its bytes have to have checksums.
    """

    whole = False

    def __init__(self, tensors: HeldTensors) -> None:
        self.tensors = tensors
        # Who has a copy of all of a tensor proves all of it, as do those of the other ranks that hold some of it.
        self._cells = {
            name: [all_of] if (all_of := whole(tensor.shape)) in tensor.boxes else disjoint(list(tensor.boxes))
            for name, tensor in tensors.tensors.items()
        }
        self._proof: ShareProof | None = None

    def digest(self) -> dict[str, Sums]:
        """Of no tensor: slices have the sums of cells, which are proven with those of other ranks."""
        self._proof = None
        return {}

    def take(self, parts: StepParts, known: Mapping[str, Sums], want: Mapping[str, Sums]) -> PreparedSlices:
        """See `HeldWeights.take`: only the ranges that the boxes touch are pulled. Its `proof` is to be added up.

        Raises ChainError ``base-shape`` where a tile needs old elements that other ranks hold, ``base-differs`` for a
        tensor of which the step has no sums, ``value-inexact``, and what `ShareReader` raises.
        """
        empty = {name: dict.fromkeys(cells, state_digest.ZERO) for name, cells in self._cells.items()}
        proof = ShareProof(empty) if parts.full else self._known_proof()
        changes: list[tuple[str, Words, Words, Words]] = []
        unchecked: set[str] = set()
        for file in parts.files:
            reader = ShareReader(parts.source, file, self.tensors.held)
            check_origin(reader.index, parts.hop)
            unchecked |= {one.entry.name for one in reader.share.entries if one.cut is Cut.ELEMENTS}
            for name, found in reader.changes(self.tensors):
                assert found.positions is not None
                if name not in want:  # [F-APPLY-5]: no sum would prove it
                    have, need = "changes of it", "changes of tensors that the step has sums of"
                    raise ChainError("base-differs", where=name[:80], have=have, need=need)
                self.tensors.check(name, found.values)
                old = self.tensors.old(name, found.positions, known=not parts.full)
                changes.append((name, found.positions, old, found.values))
                before = np.zeros_like(old) if parts.full else old
                proof = proof.after(name, self.tensors.tensors[name].shape, (found.positions, before, found.values))
        told = ShareProof({name: cells for name, cells in proof.cells.items() if name in want})

        def done() -> None:
            self._proof = proof

        return PreparedSlices(self.tensors, {}, told.to_dict(), sorted(unchecked), changes, done)

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
            self._proof = ShareProof.of(self.tensors, self._cells)
        return self._proof


def traced(
    load: Load, model: torch.nn.Module, table: Mapping[str, Tensor], traits: EngineTraits | None = None
) -> SlicedWeights:
    """The slices that an engine's own loader puts into the parameters of ``model``, in host memory. ``traits``: of that
    engine.

    ``load`` is run once over stand-ins of the tensors of ``table``; nothing is written. Parameters may be of a wider
    dtype than the checkpoint's tensor, which holds each of its values exactly. Raises CheckpointError
    ``model-differs`` where it does anything but plain copies.
    """
    memory = memories(model)
    found = trace(load, model, memory, table.values(), wide=True)
    proof = prove(found, model, memory, table, None, whole=False, traits=traits or EngineTraits())
    if proof.unproven or proof.ties:
        wrong = [f"{name}: {why}" for name, why in {**proof.ties, **proof.unproven}.items()]
        need, hint = "a loader that only copies", "This rank goes by the repository: `deltackpt serve-updates`."
        raise CheckpointError("model-differs", where="the model", have=listed(sorted(wrong), 3), need=need, hint=hint)
    held = {name: _held(table[name], some, memory) for name, some in proof.regions.items() if some}
    return SlicedWeights(HeldTensors(held))


def _elements(tensor: Tensor) -> int:
    return int(np.prod(storage_shape(DTYPES[tensor.dtype], tensor.shape), dtype=np.int64))


def _held(tensor: Tensor, regions: Sequence[Region], memory: Mapping[int, Memory]) -> HeldTensor:
    dtype = DTYPES[tensor.dtype]
    shape = storage_shape(dtype, tensor.shape)
    boxes: dict[Bounds, Place] = {}
    copies: list[tuple[Bounds, Place]] = []
    for region in regions:
        widening = Widening.between(tensor.dtype, region.wide)
        for box, words in _views(region, shape, memory[region.memory].words()):
            array = words if widening is None else WideWords(words, widening, tensor.name)
            if boxes.setdefault(box, array) is not array:
                copies.append((box, array))
    if _elements(tensor) <= SMALL:  # it has few tiles, or one, so that no slice has all the old words of one
        boxes.setdefault(whole(shape), np.zeros(shape, uint(dtype.width)))
    return HeldTensor(dtype, shape, boxes, copies)


def _views(region: Region, shape: tuple[int, ...], words: Words) -> Iterator[tuple[Bounds, Words]]:
    """The boxes of a region, each with its view of the memory."""
    steps = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    for box in of_strided(shape, region.source, [(n, s) for n, s, _ in region.dims]):
        first = sum(start * step for (start, _), step in zip(box, steps, strict=True))
        _, where = region.select(np.array([first], np.int64), -1)
        strides = [_target_stride(region, step) * words.itemsize for step in steps]
        view = np.lib.stride_tricks.as_strided(words[int(where[0]) :], shape_of(box), strides)
        yield box, view


def _target_stride(region: Region, step: int) -> int:
    """How far apart in the memory elements are that are ``step`` apart in the tensor."""
    for _, source, target in region.dims:
        if source <= step:
            return target * (step // source)
    return 0  # an axis of one element
