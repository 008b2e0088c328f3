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
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest
from deltackpt.restore.journal import Journal, JournalRecord

Change = tuple[Words, Words]  # positions and values of the elements of a tensor that a step changes


class JournalSource:
    """Implements `context.ChangeSource` where the cache's last move was from the engine's step to the new one."""

    path = "journal"

    def writes(self, context: RankContext, link: Link) -> Sequence[Write]:
        """Raises Fallback where the cache does not lead there, and what `prepare` raises."""
        at, proof, steps = context.link, context.proof, context.steps
        if at is None or proof is None:
            raise Fallback(context.why)
        with steps.slot(at) as before:
            journal = steps.journal(at, link)
            if before is None or journal is None:
                raise Fallback(f"the cache does not lead from step {at.step} to {link.step}")
            changes = proven_changes(before, journal, (steps.digests(at) or {}, steps.digests(link) or {}))
            writes = prepare(proof, context.memory, before, changes)
        return [*writes, *layer_reloads(context, link, [*changes])]


def proven_changes(
    before: Slot, journal: Journal, digests: tuple[Mapping[str, TensorDigest], Mapping[str, TensorDigest]]
) -> dict[str, Change]:
    """What a journal changes, by tensor, each element once: it takes every tensor's sums from those of the step before
    to those of the step, and leaves no tensor out. ``digests``: of both steps.

    The move that wrote the journal has proven what came of it; here its files are read anew, and one that was cut off,
    or is of another move, says so by nothing else. Raises Fallback where they do not lead there.
    """
    changes: dict[str, Change] = {}
    old, new = digests
    for number, (name, tensor) in enumerate(before.table.items()):
        other = Fallback(f"{name}: the cache's journal does not lead to the step")
        try:
            records, sums = journal.of(number), old[name].sums
            if records:
                words = before.read(name).view(uint(DTYPES[tensor.dtype].width))
                where, what = changes[name] = _last(records, len(words))
                sums = state_digest.add(sums, state_digest.of_change(where.astype(np.int64), words[where], what))
        except (ChainError, IndexError, KeyError, ValueError) as error:
            raise other from error
        if name not in new or sums != new[name].sums:  # [F-APPLY-5]
            raise other
    return changes


def prepare(proof: Proof, memory: Mapping[int, Memory], before: Slot, changes: Mapping[str, Change]) -> Sequence[Write]:
    """All writes of what changed, as absolute words, on this rank. Nothing is written.

    The words that will be overwritten are read, and held against those of the step before: on a card, if the weights
    are on one, to which all is sent beforehand. Raises Fallback for a tensor
    without proof, or memory that is not the step's; ChainError ``tied-differs`` for values that the engine cannot hold.
    """
    table = before.table
    card = card_of(proof, memory)
    writes: list[MemoryWrite] = []
    to_card = CardUpload(card) if card is not None else None
    changed = {name: change for name, change in changes.items() if name not in proof.again}
    for name in changed:
        if name in proof.unproven:
            raise Fallback(f"{name}: {proof.unproven[name]}")
    for name, other in proof.ties.items():
        _check_tie(name, other, changed, table, before.read)
    for name, (positions, values) in changed.items():
        tensor = table[name]
        dtype = DTYPES[tensor.dtype]
        total = nbytes(dtype, tensor.shape) // dtype.width
        words = before.read(name).view(uint(dtype.width))
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


def _last(records: Sequence[JournalRecord], total: int) -> Change:
    """One position each, with its last value. Raises ChainError, IndexError for records of another tensor."""
    if len(records) == 1 and records[0].positions is not None:
        return records[0].positions, records[0].values
    words = np.empty(total, records[0].values.dtype)
    touched = np.zeros(total, bool)
    for record in records:
        record.write_to(words)
        touched[slice(None) if record.positions is None else record.positions] = True
    at = np.flatnonzero(touched)
    return at, words[at]


def _check_tie(
    name: str, other: str, changed: Mapping[str, Change], table: Mapping[str, Tensor], base: ReadTensor
) -> None:
    if name not in changed and other not in changed:
        return
    ends = []
    for one in (name, other):
        words = base(one).view(uint(DTYPES[table[one].dtype].width)).copy()
        if one in changed:
            positions, values = changed[one]
            words[positions] = values
        ends.append(words)
    if not np.array_equal(*ends):
        raise tie_differs(name, other)


def tie_differs(name: str, other: str) -> ChainError:
    """ChainError ``tied-differs``: one memory cannot hold two values."""
    have, need = f"values that differ from those of {other[:80]!r}", "one value for tensors that share memory"
    hint = "The engine ties them and the step does not. Start an engine from this step."
    return ChainError("tied-differs", where=name[:80], have=have, need=need, hint=hint)
