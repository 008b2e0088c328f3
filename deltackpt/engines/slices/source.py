"""The changes of a step for a rank of several that have no cache: its share of the patches, decoded against the words
that it holds itself, and proven with what the other ranks hold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from deltackpt.codecs.types import Elements
from deltackpt.engines.cached_steps import RepositorySteps
from deltackpt.engines.context import RankContext
from deltackpt.engines.journal_source import tie_differs
from deltackpt.engines.layer_reload import layer_reloads
from deltackpt.engines.proof import Proof
from deltackpt.engines.scatter import Fallback, Scatter, Write
from deltackpt.engines.slices.claim import Digests, SliceClaim
from deltackpt.engines.slices.rank_slices import RankSlices
from deltackpt.engines.slices.slice_step import ElementWrite, SliceStep
from deltackpt.engines.step_changes import base_blamed
from deltackpt.errors import ChainError, FormatError
from deltackpt.format.dtypes import storage_shape, uint
from deltackpt.format.manifest import File, Link
from deltackpt.patch.index import PartIndex, Span
from deltackpt.patch.source import PartSource
from deltackpt.patch.tensor import check_together
from deltackpt.repository.chain import Hop, Plan
from deltackpt.restore.patch_reader import check_origin
from deltackpt.shares import EntryShare, HeldTensors, ShareProof, ShareReader, share_of
from deltackpt.shares.bounds import Bounds, offset_of, size
from deltackpt.shares.reader import incomplete
from deltackpt.shares.tensors import HeldTensor, words_at
from deltackpt.util.grouped import grouped

GROUP = 256 << 20  # bytes of a rank's words that are copied to come through several steps at once, or one tensor's
WHOLE = 1 << 30  # bytes of tensors that a rank reads whole for a step, since its slices cut tiles of theirs
OF_OTHERS = ("base-differs", "base-shape", "part-elsewhere")  # this rank cannot: all of them load the step


class ShareSource:
    """Implements `context.ChangeSource` for a rank that has `RankContext.slices`."""

    path = "shares"

    def writes(self, context: RankContext, link: Link) -> Sequence[Write]:
        """Raises Fallback where no patches lead there, the rank's words are not what they apply to, or a tile needs
        those of other ranks; ChainError ``tied-differs``, ``value-inexact``, and what reading raises.

        What is returned is not proven: `SliceWrites.claim` is to be held against those of all ranks."""
        at, proof, steps, slices = context.link, context.proof, context.steps, context.slices
        if at is None or proof is None or slices is None or not isinstance(steps, RepositorySteps):
            raise Fallback(context.why)
        plan = steps.plan(at, link)
        if plan.anchor is not None:
            raise Fallback(f"no patches lead from step {at.step} to {link.step}")
        digests = steps.digests(at) or {}, steps.digests(link) or {}
        work = _Moving(slices, proof, steps, (at, link))
        with slices.beside(), _others_told(at):
            work.open(plan)
            names = work.changed(digests)
            # After a sleep nothing is known of what no step changes either.
            before = work.before(None if context.absences != context.proven else names)
            after = work.decode(before)
        claim = SliceClaim(before, after, (at, link), steps.table(link), digests)
        made = SliceWrites(work.writes, claim, dict(slices.decoder.decoded))
        return [made, *layer_reloads(context, link, work.names)]


class StoredParts:
    """Implements `SliceParts` over a repository."""

    to_card = False

    def __init__(self, source: PartSource) -> None:
        self._source = source

    def of(self, file: File) -> PartSource:
        """The repository has all of them."""
        return self._source

    def tensors(self, file: File, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Never: they are not `to_card`."""
        raise AssertionError("parts in a store")


class SliceWrites:
    """Implements `Write`: all words of a rank that a step changes. ``claim``: what it says of them; ``decoded``: how
    many entries were decoded on a card, and how many on the host, where the weights are on one."""

    def __init__(self, writes: Sequence[Write], claim: SliceClaim, decoded: Mapping[str, int]) -> None:
        self._scatter, self.claim, self.decoded = Scatter(writes), claim, dict(decoded)

    @property
    def elements(self) -> int:
        """How many."""
        return self._scatter.elements

    def apply(self) -> None:
        """Put the new words in place, those of later steps after those of earlier ones."""
        self._scatter.write()

    def revert(self) -> None:
        """Put the old words back, of what was begun."""
        self._scatter.rollback()


class _Moving:
    """One move of one rank. ``names``: of all tensors that the patches may change; ``writes``: what is decoded."""

    def __init__(self, slices: RankSlices, proof: Proof, steps: RepositorySteps, ends: tuple[Link, Link]) -> None:
        self._slices, self._proof, self._steps, self._ends = slices, proof, steps, ends
        self._parts = StoredParts(steps.parts())
        self._cut: list[str] = []  # tensors of which a tile has elements of other ranks too
        self._hops: list[list[tuple[File, ShareReader]]] = []
        self.names: list[str] = []
        self.writes: list[Write] = []

    def open(self, plan: Plan) -> None:
        """Read header and table of every part. Raises what `ShareReader` raises."""
        held = self._slices.tensors.held
        for hop in plan.patches:
            self._hops.append([(file, ShareReader(self._parts.of(file), file, held)) for file in hop.files])
            self._check(hop, [reader for _, reader in self._hops[-1]])
        every = set[str]().union(*(_names(reader.index) for hop in self._hops for _, reader in hop))
        self.names = sorted(every, key=str.encode)
        self._leave_out_cut()

    def _leave_out_cut(self) -> None:
        """Tensors with tiles that no rank decodes alone: they are read whole, if they are few."""
        tensors, readers = self._slices.tensors, [reader for hop in self._hops for _, reader in hop]
        cut = {one.entry.name: one for reader in readers for one in reader.share.entries if not one.complete}
        if not cut:
            return
        if sum(_whole_size(tensors.tensors[name]) for name in cut) > WHOLE:
            raise incomplete(next(iter(cut.values())), readers[0].index.where)
        held = {name: boxes for name, boxes in tensors.held.items() if name not in cut}
        for reader in readers:
            reader.share = share_of(reader.index, held)
        self._cut = sorted(cut)

    def changed(self, digests: tuple[Digests, Digests]) -> list[str]:
        """The tensors of ``names`` that the rank holds something of. Raises Fallback for one that cannot be written,
        ChainError ``tied-differs``."""
        proof, (before, after), changing = self._proof, digests, {*self.names}
        for name in self.names:
            if name not in proof.again and name in proof.unproven:
                raise Fallback(f"{name}: {proof.unproven[name]}")
            if name in proof.regions and not (name in before and name in after):
                raise Fallback(f"{name}: the step has no digest of it")
        for name, other in proof.ties.items():
            if (name in changing or other in changing) and after[name].sums != after[other].sums:
                raise tie_differs(name, other)
        return [name for name in self.names if name in self._slices.tensors.tensors]

    def before(self, names: Sequence[str] | None) -> ShareProof:
        """The sums of what the rank holds of some tensors now, or of all. Raises ChainError ``base-differs``."""
        self._slices.shared.check(names)
        return self._slices.decoder.sums(names)

    def decode(self, before: ShareProof) -> ShareProof:
        """Decode all, from what the proof is of. -> the sums of what it leads to, of the tensors that change."""
        after = self._read_whole(self._one_hop(before) if len(self._hops) == 1 else self._several(before))
        return ShareProof({name: after.cells[name] for name in self.names if name in after.cells})

    def _one_hop(self, before: ShareProof) -> ShareProof:
        decoder = self._slices.decoder
        decoder.begin()
        made = SliceStep(decoder.tensors, before, full=False)
        for file, reader in self._hops[0]:
            with _blamed(reader):
                decoder.decode(made, reader, file, self._parts)
        self.writes += made.writes
        return made.proof

    def _read_whole(self, before: ShareProof) -> ShareProof:
        """What the step has in place of the rank's words, of the tensors that were left out."""
        held, cells = self._slices.tensors.tensors, dict(before.cells)
        for names in grouped(self._cut, lambda name: _whole_size(held[name]), GROUP):
            for name, data in self._steps.read(self._ends[1], names).items():
                new = data.view(uint(held[name].dtype.width)).reshape(held[name].shape)
                proof = ShareProof({name: cells[name]})  # of one: a proof of all is copied with each change
                for cell in self._slices.decoder.cells[name]:
                    proof = self._replaced(name, cell, new[tuple(slice(*axis) for axis in cell)], proof)
                cells |= proof.cells
        return ShareProof(cells)

    def _replaced(self, name: str, cell: Bounds, new: Elements, before: ShareProof) -> ShareProof:
        tensors = self._slices.tensors
        tensors.check(name, new)
        old, shape = tensors.words_of(name, cell), tensors.tensors[name].shape
        at = np.nonzero(old != new)
        where = np.ravel_multi_index(tuple(i + o for i, o in zip(at, offset_of(cell), strict=True)), shape)
        change = where.astype(np.int64), old[at], new[at]
        self.writes.append(ElementWrite(tensors, name, *change))
        return before.after(name, shape, change)

    def _several(self, before: ShareProof) -> ShareProof:
        """Through one step after the other, on copies of the words in host memory: some tensors at a time."""
        tensors, cells, decoder = self._slices.tensors, dict(before.cells), self._slices.decoder
        cut = {*self._cut}
        changed = [name for name in self.names if name in tensors.tensors and name not in cut]
        decoder.begin()
        hops = [[(reader, _by_name(reader)) for _, reader in hop] for hop in self._hops]
        for names in grouped(changed, lambda name: _size(tensors.tensors[name]), GROUP):
            copy = HeldTensors({name: _copied(tensors.tensors[name]) for name in names})
            proof = ShareProof({name: cells[name] for name in names})
            for hop in hops:
                made = SliceStep(copy, proof, full=False)
                for reader, by_name in hop:
                    entries = [one for name in names for one in by_name.get(name, ())]
                    decoder.decoded |= {"host": decoder.decoded["host"] + len(entries)} if decoder.decoded else {}
                    with _blamed(reader):
                        made.decode(reader, entries)
                proof = made.proof
                for write in made.writes:
                    assert isinstance(write, ElementWrite)
                    tensors.check(write.name, write.new)
                    write.apply()
                    self.writes.append(replace(write, tensors=tensors))
            cells |= proof.cells
        return ShareProof(cells)

    def _check(self, hop: Hop, readers: Sequence[ShareReader]) -> None:
        """Parts of the hop, of the tensors that the rank holds."""
        for reader in readers:
            check_origin(reader.index, hop)
        check_together([reader.index for reader in readers])
        for reader in readers:
            for name in reader.share.removed:
                raise Fallback(f"{name}: it goes, and comes back, on the way to step {self._ends[1].step}")
            for one in reader.share.entries:
                held, entry = self._slices.tensors.tensors[one.entry.name], one.entry
                if (held.dtype.name, held.shape) != (entry.dtype.name, storage_shape(entry.dtype, entry.whole)):
                    raise Fallback(f"{entry.name}: another tensor on the way to step {self._ends[1].step}")


@contextmanager
def _others_told(at: Link) -> Iterator[None]:
    """Raise Fallback for what one rank cannot do: then all load the step, from its whole parts."""
    try:
        yield
    except ChainError as error:
        if error.code not in OF_OTHERS:
            raise
        if error.code == "base-differs":
            raise Fallback(f"{error.where}: the engine's memory is not that of step {at.step}") from error
        raise Fallback(f"{error.where}: {error.have}") from error


@contextmanager
def _blamed(reader: ShareReader) -> Iterator[None]:
    """As `base_blamed`, but for parts that are not what they were published as."""
    found: list[FormatError] = []
    with base_blamed(reader.index.where):
        try:
            yield
        except FormatError as error:
            if error.code != "object-hash":
                raise
            found.append(error)
    if found:
        raise found[0]


def _names(index: PartIndex) -> Iterable[str]:
    return index.numbers if index.table is not None else (entry.name for entry in index.entries)


def _by_name(reader: ShareReader) -> Mapping[str, Sequence[EntryShare]]:
    """What the rank takes of a part, in its order, by tensor."""
    found: dict[str, list[EntryShare]] = {}
    for one in reader.share.entries:
        found.setdefault(one.entry.name, []).append(one)
    return found


def _size(tensor: HeldTensor) -> int:
    return sum(map(size, tensor.boxes)) * tensor.dtype.width


def _whole_size(tensor: HeldTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.width


def _copied(tensor: HeldTensor) -> HeldTensor:
    """Its words, copied to host memory."""
    boxes: dict[Any, Any] = {box: words_at(place, ...).copy() for box, place in tensor.boxes.items()}
    return HeldTensor(tensor.dtype, tensor.shape, boxes, kept=tensor.kept)
