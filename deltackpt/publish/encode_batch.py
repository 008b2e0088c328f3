"""A batch of tensors on its way into a part: compared, proven, encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from deltackpt.checkpoint.batch import BATCH, NO_HASHES, ComparedBatch, batches, compare_batch, release
from deltackpt.checkpoint.diff import Difference, State, difference, gathered
from deltackpt.checkpoint.rows import ReadsRanges
from deltackpt.codecs import CODECS, Encoded, Entry
from deltackpt.codecs.base import Auto
from deltackpt.codecs.bits import Ints
from deltackpt.codecs.entry_block import EntryBlock
from deltackpt.codecs.select import AUTO, parse_choice
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED, Hashes, TensorDigests, Words, hashes, proves
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.manifest import Counts
from deltackpt.format.state_digest import ZERO, TensorDigest
from deltackpt.format.tensor_columns import NameRange
from deltackpt.patch.encode import encode_entries, encode_entry

Compare = Callable[[str, State, State], Difference]
CompareBatch = Callable[[Sequence[str], State, State], ComparedBatch]
_DENSE = {AUTO, *(codec.name for codec in CODECS if codec.auto in (Auto.DENSE, Auto.WHOLE))}  # look at all elements
NO_SUMS = np.zeros((0, 2), np.uint64)
SHARED = 128 << 20  # bytes of a tensor for each thread that encodes it: others would wait for a large one's turn


@dataclass(frozen=True)
class Comparing:
    """Two states to encode the difference of: ``old``, whose digests have to be ``before``, and ``new``.

    ``compare`` is for callers that know how a tensor differs without reading all of it, and is asked for each alone;
    ``compare_batch`` for those that have compared some already. ``found`` is told, by any thread, what was found of
    each batch. ``where`` names the old state in errors.
    """

    old: State
    new: State
    before: Mapping[str, TensorDigest]
    where: str | os.PathLike[str]
    compare: Compare = difference
    compare_batch: CompareBatch = compare_batch
    found: Callable[[ComparedBatch], None] | None = None


class TensorOfStep(NamedTuple):
    """A tensor, compared and encoded. It may be queued, so it holds counts and encoded bytes, no old values."""

    name: str
    counts: Counts | None  # what it adds to the counts of the step; None: nothing
    entry: Entry | None
    encoded: Encoded | None
    after: TensorDigest | None


class BlockOfStep(NamedTuple):
    """The same of many tensors that changed, whose digests are elsewhere; ``changed`` counts their elements, int64
    [tensors]."""

    block: EntryBlock
    changed: Ints


@dataclass(frozen=True)
class BatchOfStep:
    """The tensors of a batch by rising name, of which those that did not change may be missing among the ``tensors``.

    ``sums`` (uint64 [n, 2]) and ``xxh3`` (uint8 [n, 16]) are the digests of ``names``, or empty where each tensor has
    its own; ``size`` are the bytes of all new ones.
    """

    names: Sequence[str]
    tensors: Sequence[TensorOfStep | BlockOfStep]
    sums: Words
    xxh3: Hashes
    size: int

    @property
    def encoded(self) -> int:
        """Bytes of what was encoded."""
        blocks = (int(one.block.sizes.sum()) for one in self.tensors if isinstance(one, BlockOfStep))
        alone = (one.encoded.size for one in self.tensors if isinstance(one, TensorOfStep) and one.encoded is not None)
        return sum(blocks) + sum(alone)


class BatchEncoder:
    """Encodes the difference of two states, batch by batch, for any thread.

    ``wrong``: names of old tensors that are not what their digests say; what was encoded is then worth nothing.
    ``threads`` of its own may encode a large tensor.
    """

    def __init__(self, states: Comparing, encoding: str, threads: int = 1) -> None:
        self.wrong: list[str] = []
        self._states, self._encoding, self._threads = states, encoding, threads

    @cached_property
    def _names(self) -> AbstractSet[str]:
        old, new = self._states.old, self._states.new
        if isinstance(old, ReadsRanges) and isinstance(new, ReadsRanges) and old.named is new.named:
            return new.named.tensors.keys()
        return {*old.tensors, *new.tensors}

    def batches(self) -> Iterator[Sequence[str]]:
        """The names of every batch, in order."""
        alone = self._states.compare is not difference
        return batches(self._states.old, self._states.new, 0 if alone else BATCH)

    def encode(self, names: Sequence[str]) -> BatchOfStep:
        """The tensors of one batch. Raises UsageError ``encoding-choice``, and what the states raise."""
        states = self._states
        if states.compare is not difference:
            made = [self._one(states.compare(name, states.old, states.new)) for name in names]
            done = BatchOfStep([], made, NO_SUMS, NO_HASHES, _bytes_of(names, states.new))
        else:
            compared = states.compare_batch(names, states.old, states.new)
            if states.found is not None:
                states.found(compared)
            done = self._joined(names, compared)
        for state in (states.old, states.new):
            release(names, state)
        return done

    def _joined(self, names: Sequence[str], compared: ComparedBatch) -> BatchOfStep:
        """Those that were compared together, and the others, in the order of their names."""
        sums = self._prove_many(compared)
        changes = compared.changes
        which = np.flatnonzero(changes.counts)
        entries = encode_entries(compared.names, changes, which, self._names, self._encoding)
        tensors: list[TensorOfStep | BlockOfStep] = []
        for numbers, made in entries:
            if isinstance(made, EntryBlock):
                tensors.append(BlockOfStep(made, changes.counts[numbers]))
                continue
            (i,) = numbers.tolist()
            counts = Counts(changed=1, changed_elements=int(changes.counts[i]))
            tensors.append(TensorOfStep(compared.names[i], counts, *made, None))
        if not compared.others:
            return BatchOfStep(compared.names, tensors, sums, compared.new_xxh3, int(changes.nbytes.sum()))
        tensors = [*_apart(tensors), *map(self._one, compared.others)]
        tensors.sort(key=lambda one: one.name if isinstance(one, TensorOfStep) else one.block.names[one.block.first])
        size = _bytes_of(names, self._states.new)
        return BatchOfStep(compared.names, tensors, sums, compared.new_xxh3, size)

    def _prove_many(self, compared: ComparedBatch) -> Words:
        """Are the old tensors the parent step's? -> the sums of the new ones: uint64 [n, 2]."""
        names, before = compared.names, self._states.before
        if isinstance(before, TensorDigests) and isinstance(names, NameRange) and before.named.names is names.names:
            sums, hashed = before.sums[names.rows], before.xxh3[names.rows]
        else:
            known = [before.get(name, TensorDigest(ZERO, UNSTATED)) for name in names]
            sums = np.array([digest.sums for digest in known], np.uint64).reshape(-1, 2)
            hashed = hashes([digest.xxh3 for digest in known])
        for i in np.flatnonzero((hashed != compared.old_xxh3).any(axis=1)).tolist():
            self._prove(names[i], compared.old_xxh3[i].tobytes())
        return sums + compared.changes.gains

    def _one(self, found: Difference) -> TensorOfStep:
        """Any tensor."""
        name, new, before = found.name, self._states.new, self._states.before.get(found.name)
        if found.old_xxh3 is not None:
            self._prove(name, found.old_xxh3)
        change = found.change
        if change is None:
            return TensorOfStep(name, Counts(removed=1), Entry.removal(name), None, None)
        assert found.new_xxh3 is not None
        if found.empty:
            sums = before.sums if before is not None else ZERO  # else it is wrong
            return TensorOfStep(name, None, None, None, TensorDigest(sums, found.new_xxh3))
        if change.withheld is not None and parse_choice(self._encoding).name not in _DENSE:
            change = gathered(change)
        if change.base is None or before is None or change.withheld is not None:
            sums = state_digest.of_run(change.target)
        else:
            sums = state_digest.add(before.sums, state_digest.of_change(change.positions, change.old, change.new))
        shape = tuple(new.tensors[name].shape)
        if (threads := min(self._threads, change.target.nbytes // SHARED)) > 1:
            change = replace(change, threads=threads)
        entry, encoded = encode_entry(name, change, shape, self._names, self._encoding)
        return TensorOfStep(name, _counts(found), entry, encoded, TensorDigest(sums, found.new_xxh3))

    def _prove(self, name: str, xxh3: bytes) -> None:
        """Is an old tensor the parent step's? ``xxh3`` was computed in the pass that compared; if the step states none,
        the ``sums`` decide."""
        old, before = self._states.old, self._states.before.get(name)
        if before is None:
            self.wrong.append(name)
        elif before.xxh3 == UNSTATED:
            if not proves(old.bytes_of(name), old.tensors[name].dtype, before):
                self.wrong.append(name)
        elif before.xxh3 != xxh3:
            self.wrong.append(name)


def _apart(tensors: Iterable[TensorOfStep | BlockOfStep]) -> Iterator[TensorOfStep | BlockOfStep]:
    """Blocks of one entry each, so that others can come between them."""
    for one in tensors:
        if isinstance(one, TensorOfStep):
            yield one
            continue
        for i in range(len(one.block)):
            yield BlockOfStep(one.block.cut(i, i + 1), one.changed[i : i + 1])


def _bytes_of(names: Sequence[str], state: State) -> int:
    found = (state.tensors[name] for name in names if name in state.tensors)
    return sum(nbytes(DTYPES[tensor.dtype], tuple(tensor.shape)) for tensor in found)


def _counts(found: Difference) -> Counts:
    """What one tensor that differs and is there adds to the counts of a step."""
    change = found.change
    assert change is not None
    if change.base is None:
        new = found.old_xxh3 is None
        return Counts(added=int(new), changed=int(not new), changed_elements=change.elements)
    return Counts(changed=1, changed_elements=change.count)
