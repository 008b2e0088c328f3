"""A batch of tensors on its way into a part: compared, proven, encoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deltackpt.checkpoint.batch import BATCH, ComparedBatch, batches, compare_batch, release
from deltackpt.checkpoint.diff import Difference, State, difference
from deltackpt.codecs import Encoded, Entry
from deltackpt.format import state_digest
from deltackpt.format.digests import UNSTATED, proves
from deltackpt.format.manifest import Counts
from deltackpt.format.state_digest import TensorDigest
from deltackpt.patch.encode import encode_entries, encode_entry

Compare = Callable[[str, State, State], Difference]
CompareBatch = Callable[[Sequence[str], State, State], ComparedBatch]


@dataclass(frozen=True)
class Comparing:
    """Two states to encode the difference of: ``old``, whose digests have to be ``before``, and ``new``.

    ``compare`` is for callers that know how a tensor differs without reading all of it, and is asked for each alone;
    ``compare_batch`` for those that have compared some already. ``found`` is told, by any thread, what was found of
    each tensor. ``where`` names the old state in errors.
    """

    old: State
    new: State
    before: Mapping[str, TensorDigest]
    where: str | os.PathLike[str]
    compare: Compare = difference
    compare_batch: CompareBatch = compare_batch
    found: Callable[[Difference], None] | None = None


class TensorOfStep(NamedTuple):
    """A tensor, compared and encoded. It may be queued, so it holds counts and encoded bytes, no old values."""

    name: str
    counts: Counts | None  # what it adds to the counts of the step; None: nothing
    entry: Entry | None
    encoded: Encoded | None
    after: TensorDigest | None
    size: int


class BatchEncoder:
    """Encodes the difference of two states, batch by batch, for any thread.

    ``wrong``: names of old tensors that are not what their digests say; what was encoded is then worth nothing.
    """

    def __init__(self, states: Comparing, encoding: str) -> None:
        self.wrong: list[str] = []
        self._states, self._encoding = states, encoding
        self._names = {*states.old.tensors, *states.new.tensors}

    def batches(self) -> Iterator[list[str]]:
        """The names of every batch, in order."""
        alone = self._states.compare is not difference
        return batches(self._states.old, self._states.new, 0 if alone else BATCH)

    def encode(self, names: Sequence[str]) -> list[TensorOfStep]:
        """The tensors of one batch. Raises UsageError ``encoding-choice``, and what the states raise."""
        states = self._states
        if states.compare is not difference:
            made = {name: self._one(states.compare(name, states.old, states.new)) for name in names}
        else:
            compared = states.compare_batch(names, states.old, states.new)
            if states.found is not None:
                for found in compared.differences():
                    states.found(found)
            made = {found.name: self._one(found) for found in compared.others}
            made.update((done.name, done) for done in self._many(compared))
        for state in (states.old, states.new):
            release(names, state)
        return [made[name] for name in names]

    def _many(self, compared: ComparedBatch) -> Iterator[TensorOfStep]:
        """Tensors that have old elements of their dtype and shape."""
        changes, before = compared.changes, self._states.before
        for name, xxh3 in zip(compared.names, compared.old_xxh3, strict=True):
            self._prove(name, xxh3)
        which = [i for i, changed in enumerate(changes.counts) if changed]
        entries = dict(
            zip(which, encode_entries(compared.names, changes, which, self._names, self._encoding), strict=True)
        )
        for i, (name, n, gain) in enumerate(zip(compared.names, changes.counts, changes.gains, strict=True)):
            known = before.get(name)
            sums = state_digest.add(known.sums, gain) if known is not None else state_digest.ZERO  # else it is wrong
            counts = Counts(changed=1, changed_elements=n) if n else None
            entry, encoded = entries.get(i, (None, None))
            after = TensorDigest(sums, compared.new_xxh3[i])
            yield TensorOfStep(name, counts, entry, encoded, after, changes.new[i].nbytes)

    def _one(self, found: Difference) -> TensorOfStep:
        """Any tensor."""
        name, new, before = found.name, self._states.new, self._states.before.get(found.name)
        if found.old_xxh3 is not None:
            self._prove(name, found.old_xxh3)
        change = found.change
        if change is None:
            return TensorOfStep(name, Counts(removed=1), Entry.removal(name), None, None, 0)
        assert found.new_xxh3 is not None
        size = change.target.nbytes
        if found.empty:
            assert before is not None
            return TensorOfStep(name, None, None, None, TensorDigest(before.sums, found.new_xxh3), size)
        if change.base is None or before is None:
            sums = state_digest.of_run(change.target)
        else:
            sums = state_digest.add(before.sums, state_digest.of_change(change.positions, change.old, change.new))
        shape = tuple(new.tensors[name].shape)
        entry, encoded = encode_entry(name, change, shape, self._names, self._encoding)
        return TensorOfStep(name, _counts(found), entry, encoded, TensorDigest(sums, found.new_xxh3), size)

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


def _counts(found: Difference) -> Counts:
    """What one tensor that differs and is there adds to the counts of a step."""
    change = found.change
    assert change is not None
    if change.base is None:
        new = found.old_xxh3 is None
        return Counts(added=int(new), changed=int(not new), changed_elements=change.elements)
    return Counts(changed=1, changed_elements=len(change.positions))
