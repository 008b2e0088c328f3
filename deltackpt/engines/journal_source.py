"""The changes of a step from the journal of the host's cache: decoded once for all engines that share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from deltackpt.engines.cached_steps import ReadTensor, Slot
from deltackpt.engines.card_memory import card_of
from deltackpt.engines.card_upload import CardUpload
from deltackpt.engines.context import RankContext
from deltackpt.engines.layer_reload import layer_reloads
from deltackpt.engines.memory import Memory
from deltackpt.engines.proof import Proof
from deltackpt.engines.scatter import Fallback, MemoryWrite, Words, Write
from deltackpt.errors import ChainError
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.restore.journal import Journal

Pieces = list[tuple[Words | None, Words]]  # positions (None: all) and values, the later ones winning


class JournalSource:
    """Implements `scatter.ChangeSource` where the cache's last move was from the engine's step to the new one."""

    path = "journal"

    def writes(self, context: RankContext, link: Link) -> Sequence[Write]:
        """Raises Fallback where the cache does not lead there, and what `prepare` raises."""
        at, proof = context.link, context.proof
        if at is None or proof is None:
            raise Fallback(context.why)
        with context.steps.slot(at) as before:
            journal = context.steps.journal(at, link)
            if before is None or journal is None:
                raise Fallback(f"the cache does not lead from step {at.step} to {link.step}")
            writes = prepare(proof, context.memory, before, journal)
            changed = [name for number, name in enumerate(before.table) if journal.of(number)]
        return [*writes, *layer_reloads(context, link, changed)]


def prepare(proof: Proof, memory: Mapping[int, Memory], before: Slot, journal: Journal) -> Sequence[Write]:
    """All writes of a journal, as absolute words, on this rank. Nothing is written.

    The words that will be overwritten are read, and held against those of the step before: on a card, if the weights
    are on one, to which all is sent beforehand. Raises Fallback for a tensor
    without proof, or memory that is not the step's; ChainError ``tied-differs`` for values that the engine cannot hold.
    """
    table = before.table
    card = card_of(proof, memory)
    writes: list[MemoryWrite] = []
    to_card = CardUpload(card) if card is not None else None
    changed: dict[str, Pieces] = {}
    for number, name in enumerate(table):
        records = journal.of(number)
        if not records or name in proof.again:
            continue
        if name in proof.unproven:
            raise Fallback(f"{name}: {proof.unproven[name]}")
        changed[name] = [(r.positions, r.values) for r in records]
    for name, other in proof.ties.items():
        _check_tie(name, other, changed, table, before.read)
    for name, pieces in changed.items():
        tensor = table[name]
        dtype = DTYPES[tensor.dtype]
        total = nbytes(dtype, tensor.shape) // dtype.width
        words = before.read(name).view(uint(dtype.width))
        positions, values = _last(pieces, total)
        for region in proof.regions[name]:
            inside, where = region.select(positions, total)
            if len(where) == 0:
                continue
            storage = memory[region.memory]
            if to_card is not None:
                to_card.add(name, storage, where, values[inside], words[positions[inside]])
                continue
            old = storage.read(where)
            if not np.array_equal(old, words[positions[inside]]):
                raise Fallback(f"{name}: the engine's memory is not that of the step before")
            writes.append(MemoryWrite(storage, where, values[inside], old))
    return writes if to_card is None else to_card.writes()


def _last(pieces: Pieces, total: int) -> tuple[Words, Words]:
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
    name: str, other: str, changed: Mapping[str, Pieces], table: Mapping[str, Tensor], base: ReadTensor
) -> None:
    if name not in changed and other not in changed:
        return
    ends = []
    for one in (name, other):
        words = base(one).view(uint(DTYPES[table[one].dtype].width)).copy()
        for positions, values in changed.get(one, []):
            words[slice(None) if positions is None else positions] = values
        ends.append(words)
    if not np.array_equal(*ends):
        raise tie_differs(name, other)


def tie_differs(name: str, other: str) -> ChainError:
    """ChainError ``tied-differs``: one memory cannot hold two values."""
    have, need = f"values that differ from those of {other[:80]!r}", "one value for tensors that share memory"
    hint = "The engine ties them and the step does not. Start an engine from this step."
    return ChainError("tied-differs", where=name[:80], have=have, need=need, hint=hint)
