"""One step into an engine's memory: prepared in full, then written in one pass, and taken back if it must be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof, Read
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.restore.journal import Journal

Words = npt.NDArray[Any]


class Fallback(Exception):
    """A reason to bring the whole checkpoint in instead."""


@dataclass(frozen=True)
class Write:
    memory: int
    positions: Words
    new: Words
    old: Words


class Scatter:
    """The writes that take one rank's memory from a step to the next."""

    def __init__(self, memory: Mapping[int, Memory], writes: list[Write]) -> None:
        self._memory, self._writes = memory, writes
        self._done = 0

    @property
    def elements(self) -> int:
        return sum(len(w.new) for w in self._writes)

    def write(self) -> None:
        """Put every new word in place. Whatever goes wrong, `rollback` mends."""
        for w in self._writes:
            self._done += 1
            self._memory[w.memory].write(w.positions, w.new)

    def rollback(self) -> None:
        """Put the old words back."""
        for w in reversed(self._writes[: self._done]):
            self._memory[w.memory].write(w.positions, w.old)
        self._done = 0


def prepare(
    proof: Proof, memory: Mapping[int, Memory], table: Mapping[str, Tensor], journal: Journal, base: Read
) -> Scatter:
    """All writes of a journal, as absolute words, on this rank. Nothing is written.

    The words that will be overwritten are read, and held against those of the step before (``base`` gives a tensor's
    bytes). Raises Fallback for a tensor without proof, or memory that is not the step's; ChainError ``tied-differs``
    for values that the engine cannot hold.
    """
    writes: list[Write] = []
    changed: dict[str, list[tuple[Words | None, Words]]] = {}
    for number, name in enumerate(table):
        records = journal.of(number)
        if not records:
            continue
        if name in proof.unproven:
            raise Fallback(f"{name}: {proof.unproven[name]}")
        changed[name] = [(r.positions, r.values) for r in records]
    for name, other in proof.ties.items():
        _check_tie(name, other, changed, table, base)
    for name, pieces in changed.items():
        tensor = table[name]
        dtype = DTYPES[tensor.dtype]
        total = nbytes(dtype, tensor.shape) // dtype.width
        before = base(name).view(uint(dtype.width))
        positions, values = _last(pieces, total)
        for region in proof.regions[name]:
            inside, where = region.select(positions, total)
            if len(where) == 0:
                continue
            old = memory[region.memory].read(where)
            if not np.array_equal(old, before[positions[inside]]):
                raise Fallback(f"{name}: the engine's memory is not that of the step before")
            writes.append(Write(region.memory, where, values[inside], old))
    return Scatter(memory, writes)


def _last(pieces: list[tuple[Words | None, Words]], total: int) -> tuple[Words, Words]:
    """One position each, with its last value."""
    if len(pieces) == 1 and pieces[0][0] is not None:
        return pieces[0][0], pieces[0][1]
    words = np.empty(total, pieces[0][1].dtype)
    touched = np.zeros(total, bool)
    for positions, values in pieces:
        where = slice(None) if positions is None else positions
        words[where] = values
        touched[where] = True
    at = np.flatnonzero(touched)
    return at, words[at]


def _check_tie(
    name: str, other: str, changed: Mapping[str, list[tuple[Words | None, Words]]], table: Mapping[str, Tensor],
    base: Read,
) -> None:  # fmt: skip
    if name not in changed and other not in changed:
        return
    ends = []
    for one in (name, other):
        words = base(one).view(uint(DTYPES[table[one].dtype].width)).copy()
        for positions, values in changed.get(one, []):
            words[slice(None) if positions is None else positions] = values
        ends.append(words)
    if not np.array_equal(*ends):
        have, need = f"values that differ from those of {other[:80]!r}", "one value for tensors that share memory"
        hint = "The engine ties them and the step does not. Start an engine from this step."
        raise ChainError("tied-differs", where=name[:80], have=have, need=need, hint=hint)
