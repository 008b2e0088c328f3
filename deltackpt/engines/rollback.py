"""How an update is undone: by the old words of a scatter, by a copy of all words, or by the slot of the old step."""

from __future__ import annotations

from contextlib import ExitStack

from deltackpt.engines.card_memory import aside
from deltackpt.engines.context import RankContext
from deltackpt.engines.engine import Engine
from deltackpt.engines.memory import MemoryBackup
from deltackpt.engines.proof import same
from deltackpt.engines.scatter import Scatter
from deltackpt.engines.traits import derived, quantized

Undo = Scatter | MemoryBackup | None  # None: the slot of the step before


def backup(context: RankContext) -> MemoryBackup | None:
    """A copy of all weights, where no slot has those that a load will overwrite; made beside an engine's work."""
    with context.steps.slot(context.link) as slot:
        if slot is not None:
            return None
        memory = {**context.memory, **(context.slices.copies() if context.slices is not None else {})}
        with ExitStack() as stack:
            for device in {storage.flat.device for storage in memory.values()}:
                stack.enter_context(aside(device))
            return MemoryBackup(memory)


def roll_back(engine: Engine, before: RankContext, undo: Undo) -> None:
    """The weights of ``before`` again. Any error means that they may be those of no step."""
    if isinstance(undo, Scatter):
        undo.rollback()
        return
    engine.reset()
    if undo is None:
        _reload(engine, before)
        return
    undo.rollback()
    if reason := quantized(engine.model, engine.traits) or derived(engine.model, before.memory, engine.traits):
        raise ValueError(reason)


def _reload(engine: Engine, before: RankContext) -> None:
    """The old step from its slot, unless the engine still has all of it."""
    with before.steps.slot(before.link) as slot:
        if slot is None:
            raise ValueError("no slot of the old step")
        proof = before.proof
        if proof is None or proof.unproven or proof.again or same(proof, before.memory, slot.table, slot.read):
            engine.native(slot.root)
            if proof is not None and same(proof, before.memory, slot.table, slot.read):
                raise ValueError("other bits than those of the old step")
