"""Many tensors at once: neighbors in a buffer, which a patch changes by one call of the kernels.

This is where a batch is made, by `runs`, and where it is decoded, by `decode_run` and `advance_run`. What a batch
cannot carry, and whatever turns out wrong in one, its caller does tensor by tensor, so that an error is that of the
first tensor that has one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from deltackpt import kernels
from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.native import READ
from deltackpt.codecs.packed.native_rows import ChainJobs, PackedRows, Positions32
from deltackpt.codecs.types import Decoded, Elements
from deltackpt.errors import DeltackptError
from deltackpt.format.dtypes import DTYPES, uint
from deltackpt.format.layout import TensorsByName
from deltackpt.format.safetensors_header import Tensor
from deltackpt.kernels import address
from deltackpt.patch.apply import changes_elements
from deltackpt.patch.base import Bytes, Patch, TensorPatch
from deltackpt.patch.in_memory import ChangeColumns, InMemoryPatch
from deltackpt.patch.part import PartReader
from deltackpt.patch.squashed import SquashedPatch
from deltackpt.patch.tensor import EncodedTensor, PartsPatch
from deltackpt.util.spill import room

RUN = 4 << 20  # bytes of a batch: it stays in the cache of a processor from one pass over it to the next
KEPT = 16 << 20  # bytes of a batch up to which a thread uses the memory again
MOST = 1024  # tensors of a batch
MANY = 1000  # tensors of a step, above which they go through several patches by runs


@dataclass(frozen=True)
class TensorRun:
    """``tensors`` side by side: their bytes are in ``data``, uint8, in this order and without gaps.

    ``named`` are all tensors of the step that they are of.
    """

    tensors: Sequence[Tensor]
    data: Bytes
    named: TensorsByName

    @cached_property
    def numbers(self) -> Ints:
        """Of each among the ``named``: int64 [tensors]."""
        return np.array([*map(self.named.numbers.__getitem__, [t.name for t in self.tensors])], np.int64)

    @property
    def widths(self) -> Ints:
        """Bytes of a storage element of each: int64 [tensors]."""
        widths: Ints = self.named.columns.widths[self.numbers]
        return widths

    @cached_property
    def places(self) -> Ints:
        """Address and bytes of each: int64 [tensors, 2]."""
        places: Ints = np.array([address(self.data) + self.starts[:-1], np.diff(self.starts)]).T
        return places

    @cached_property
    def starts(self) -> Ints:
        """The first byte of each in ``data``, and the end: int64 [tensors + 1]."""
        return starts(np.array([t.end - t.start for t in self.tensors], np.int64))

    def bytes_of(self, number: int) -> Bytes:
        """The bytes of a tensor of the run."""
        return self.data[self.starts[number] : self.starts[number + 1]]


@dataclass(frozen=True)
class RunChanges:
    """The new elements of tensors of a run.

    ``which`` are their numbers in the run, ``counts`` how many elements of each, ``widths`` bytes of an element (int64
    [changed] all three). ``positions`` (uint32) and ``values`` (uint8) hold those of one after the other. ``others``
    are tensors that were decoded by themselves.
    """

    which: Ints
    counts: Ints
    widths: Ints
    positions: Positions32
    values: Bytes
    others: list[tuple[int, Decoded]] = field(default_factory=list)

    @property
    def written(self) -> int:
        """Bytes of all new elements."""
        return len(self.values) + sum(decoded.values.nbytes for _, decoded in self.others)

    def write_to(self, run: TensorRun) -> None:
        """Put them in their places."""
        if len(self.which):
            self._scatter(run)
        for number, decoded in self.others:
            decoded.write_to(run.bytes_of(number).view(decoded.values.dtype))

    def _scatter(self, run: TensorRun) -> None:
        jobs = kernels.scatter_jobs(len(self.which))
        jobs["words"] = address(run.data) + run.starts[self.which]
        jobs["n"] = np.diff(run.starts)[self.which] // self.widths
        jobs["positions"] = address(self.positions) + 4 * starts(self.counts)[:-1]
        jobs["values"] = address(self.values) + starts(self.counts * self.widths)[:-1]
        jobs["count"], jobs["wide"], jobs["width"] = self.counts, 4, self.widths
        if kernels.scatter_many(jobs) is not None:
            raise IndexError("a position outside of the tensor")


class RunRoom:
    """Memory of runs whose tensors are not side by side anywhere else: each thread has its own, and uses it again."""

    def __init__(self) -> None:
        self._local = threading.local()

    def run(self, tensors: Sequence[Tensor], named: TensorsByName) -> TensorRun:
        """A run whose ``data`` is anything, until the next call of this thread."""
        size = tensors[-1].end - tensors[0].start
        if size > KEPT:
            return TensorRun(tensors, room(size), named)
        held: Bytes | None = getattr(self._local, "room", None)
        if held is None or len(held) < size:
            held = self._local.room = np.empty(max(size, RUN), np.uint8)
        return TensorRun(tensors, held[:size], named)


def runs(tensors: Iterable[Tensor], limit: int = RUN) -> Iterator[list[Tensor]]:
    """Neighbors of a file, in the order of their bytes, that have ``limit`` bytes together; a larger one is alone."""
    run: list[Tensor] = []
    last = 0  # byte at which the run has to end
    for tensor in tensors:
        if run and (tensor[4] > last or len(run) == MOST):  # its end: by number, as there are many
            yield run
            run = []
        if not run:
            last = tensor.start + limit
        run.append(tensor)
    if run:
        yield run


def changes_of(patch: Patch, tensors: Sequence[Tensor], named: TensorsByName, numbers: Ints) -> int:
    """How many elements of some tensors, which have these ``numbers`` (int64 [tensors]) among the ``named``, a patch
    changes, at most."""
    if isinstance(patch, InMemoryPatch) and patch.columns is not None and patch.columns.named is named:
        alone = (patch.one(tensor.name) for tensor in tensors)
        return int(patch.columns.counts[numbers].sum()) + sum(found.changes for found in alone if found is not None)
    if not (isinstance(patch, PartsPatch) and patch.whole is not None):
        return sum(found.changes for tensor in tensors if (found := patch.tensor(tensor.name)) is not None)
    return int(patch.whole.rows_of(named).changes[numbers].sum())


def by_runs(named: TensorsByName) -> bool:
    """Do small tensors go through several patches by runs, and not each by itself as soon as a patch arrives?"""
    return len(named.names) > MANY


def decode_run(patch: Patch, run: TensorRun) -> RunChanges | None:
    """What a patch changes in a run; ``run.data`` holds the old elements, and is not written to.

    None where it cannot be done at once, or where anything is wrong.
    """
    if isinstance(patch, InMemoryPatch) and (held := patch.columns) is not None and held.named is run.named:
        return _held_changes(patch, held, run)
    if isinstance(patch, SquashedPatch) and kernels.LIB is not None and by_runs(run.named):
        return _squashed_changes(patch, run)
    if (both := _found_in(patch, run)) is None:
        return None
    found, others = both
    made = [(which, rows, rows.decode(address(run.data) + run.starts[which])) for which, rows in found.batches]
    arrays = [outcome for *_, outcome in made if outcome is not None]
    if len(arrays) != len(made):
        return None
    none = np.zeros(0, np.int64)
    return RunChanges(
        np.concatenate([none, *(which for which, *_ in made)]),
        np.concatenate([none, *(rows.changes for _, rows, _ in made)]),
        np.concatenate([none, *(rows.widths for _, rows, _ in made)]),
        np.concatenate([np.zeros(0, np.uint32), *(positions for positions, _ in arrays)]),
        np.concatenate([np.zeros(0, np.uint8), *(values for _, values in arrays)]),
        others,
    )


def _found_in(patch: Patch, run: TensorRun) -> tuple[_Found, list[tuple[int, Decoded]]] | None:
    """What a patch has of a run, and those of its tensors that are decoded by themselves; None as of `decode_run`."""
    try:
        if (found := _find(patch, run)) is None:
            return None
        return found, [(number, one.decode(_words(run, number))) for number, one in found.others]
    except DeltackptError:
        return None


@dataclass(frozen=True)
class RunSteps:
    """Of tensors of a run, numbered in it by ``which``: ``changes``, and how many of them are steps by one ULP,
    ``ones`` (int64 [changed] all); -1 of what is no float. ``others`` are tensors that were decoded by themselves.
    """

    which: Ints
    changes: Ints
    ones: Ints
    others: list[tuple[int, Decoded]]


def count_run(patch: Patch, run: TensorRun) -> RunSteps | None:
    """What `decode_run` gives, counted and not kept."""
    if (both := _found_in(patch, run)) is None:
        return None
    found, others = both
    which, changes, ones = ([np.zeros(0, np.int64)] for _ in range(3))
    for numbers, rows in found.batches:
        if (count := rows.steps_by_one(address(run.data) + run.starts[numbers])) is None:
            return None
        which.append(numbers)
        changes.append(rows.changes)
        ones.append(np.where(rows.floats, count, -1))
    return RunSteps(np.concatenate(which), np.concatenate(changes), np.concatenate(ones), others)


def _held_changes(patch: InMemoryPatch, held: ChangeColumns, run: TensorRun) -> RunChanges:
    which = np.flatnonzero(held.counts[run.numbers])
    numbers = run.numbers[which]
    counts, widths = held.counts[numbers], held.widths[numbers]
    positions = np.empty(counts.sum(), np.uint32)
    kernels.copy_many(np.array([address(positions) + 4 * starts(counts)[:-1], held.positions[numbers], 4 * counts]).T)
    values = _side_by_side(held.values[numbers], counts * widths)
    alone = [(i, found.decoded) for i, t in enumerate(run.tensors) if (found := patch.one(t.name)) is not None]
    return RunChanges(which, counts, widths, positions, values, alone)


def _side_by_side(at: Ints, sizes: Ints) -> Bytes:
    """Runs of bytes, of which each begins at an address, one after the other."""
    held = np.empty(sizes.sum(), np.uint8)
    kernels.copy_many(np.array([address(held) + starts(sizes)[:-1], at, sizes]).T)
    return held


def _squashed_changes(patch: SquashedPatch, run: TensorRun) -> RunChanges | None:
    """Through all patches, and what differs then."""
    new = TensorRun(run.tensors, run.data.copy(), run.named)
    if not all(advance_run(step, new) for step in patch.patches):
        return None
    (old_at, sizes), (new_at, _) = run.places.T, new.places.T
    if (sizes // run.widths > 1 << 32).any():
        return None
    rows, memory = kernels.diff_many(np.array([old_at, new_at, sizes // run.widths, run.widths]).T)
    which = np.flatnonzero(rows[:, 7])
    counts, widths = rows[which, 7], rows[which, 3]
    values = _side_by_side(rows[which, 6], counts * widths)
    return RunChanges(which, counts, widths, memory[0].astype(np.uint32), values)


def advance_run(patch: Patch, run: TensorRun) -> bool:
    """What `decode_run` gives, written to ``run.data``; False where that gives None. Then the bytes are worthless."""
    try:
        if (found := _find(patch, run)) is None:
            return False
        for number, one in found.others:
            one.decode_into(_words(run, number))
    except DeltackptError:
        return False
    return all(rows.decode_into(address(run.data) + run.starts[which]) for which, rows in found.batches)


def found_in_all(patches: Sequence[Patch], run: TensorRun) -> list[_Found] | None:
    """What each of several patches has of a run, whose ``data`` is not looked at; None where any cannot be done at
    once, or is wrong."""
    try:
        found = [_find(patch, run) for patch in patches]
    except DeltackptError:
        return None
    held = [one for one in found if one is not None]
    return held if len(held) == len(found) else None


def advance_through(held: Sequence[_Found], run: TensorRun, threads: int = 1) -> bool:
    """`advance_run` by one patch after the other, as `found_in_all` has them: each tile goes through all of them while
    it is in the cache."""
    # These go through their patches by themselves, also where one has rows of them.
    apart = np.zeros(len(run.tensors), bool)
    apart[[number for one in held for number, _ in one.others]] = True
    chain = chain_of(held, run)
    if not (ChainJobs(chain.jobs[~apart]) if apart.any() else chain).decode(threads):
        return False
    try:
        return not apart.any() or all(_advance_apart(one, run, apart) for one in held)
    except DeltackptError:
        return False


def chain_of(held: Sequence[_Found], run: TensorRun) -> ChainJobs:
    """What the kernels are to do with a run in its ``data``, but for tensors that are decoded by themselves."""
    at = address(run.data) + run.starts
    jobs = np.zeros((len(run.tensors), len(held)), READ)
    for k, one in enumerate(held):
        for which, rows in one.batches:
            jobs[which, k] = rows.jobs(at[which], in_place=1)
    return ChainJobs(jobs)


def _advance_apart(one: _Found, run: TensorRun, apart: npt.NDArray[np.bool_]) -> bool:
    """One patch, of the tensors that are ``apart`` (bool [tensors])."""
    for number, alone in one.others:
        alone.decode_into(_words(run, number))
    for which, rows in one.batches:
        late = apart[which]
        if not rows.some(late).decode_into(address(run.data) + run.starts[which[late]]):
            return False
    return True


def tiles_of(patch: Patch, tensor: Tensor, data: Bytes) -> DecodeJob | None:
    """What a patch changes in a tensor, whose bytes are ``data``, uint8 [n], as tiles; None where it holds nothing of
    it, or not by tiles of the whole tensor. Raises ChainError ``base-shape`` where the patch does not fit."""
    found = patch.tensor(tensor.name)
    if not isinstance(found, EncodedTensor) or len(found.held) != 1:
        return None
    part, entry = found.held[0]
    if not isinstance(part, PartReader) or not changes_elements((tensor.dtype, tensor.shape), found):
        return None
    return part.tiles(entry, data.view(uint(DTYPES[tensor.dtype].width)))


def _words(run: TensorRun, number: int) -> Elements:
    return run.bytes_of(number).view(uint(DTYPES[run.tensors[number].dtype].width))


@dataclass(frozen=True)
class _Found:
    """What a patch holds of a run: numbers in the run (int64) with their rows, and tensors to decode by themselves."""

    batches: list[tuple[Ints, PackedRows]]
    others: list[tuple[int, TensorPatch]]


def _find(patch: Patch, run: TensorRun) -> _Found | None:
    """None where a tensor gets another dtype or shape, or goes. Raises DeltackptError where anything is wrong."""
    whole = patch.whole if isinstance(patch, PartsPatch) and kernels.LIB is not None else None
    batches: list[tuple[Ints, PackedRows]] = []
    alone: Sequence[int] = range(len(run.tensors))
    if whole is not None:
        held = whole.rows_of(run.named)
        part, entry = held.part[run.numbers], held.entry[run.numbers]
        if not held.fits[run.numbers].all():
            return None
        row = entry >= 0
        for k in range(len(whole.parts)):
            which = np.flatnonzero(row & (part == k)) if len(whole.parts) > 1 else np.flatnonzero(row)
            reader = whole.parts[k]
            if not len(which):
                continue
            if not isinstance(reader, PartReader):
                return None
            batches.append((which, reader.rows_of(entry[which])))
        alone = [] if row.all() else np.flatnonzero((part >= 0) & ~row).tolist()
    others = []
    for i in alone:
        tensor = run.tensors[i]
        if (found := patch.tensor(tensor.name)) is not None:
            if not changes_elements((tensor.dtype, tensor.shape), found):
                return None
            others.append((i, found))
    if any(int(rows.rows["elements"].max()) > 1 << 32 for _, rows in batches):  # positions that 32 bits do not hold
        return None
    return _Found(batches, others)
