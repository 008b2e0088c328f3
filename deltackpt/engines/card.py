"""A step's changes decoded on the card where a module's weights are: no tensor goes to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from deltackpt.engines.card_columns import ColumnTasks, column_tasks
from deltackpt.engines.card_tasks import BytesOf, TensorTask, decode_bytes, decode_tasks, tensor_tasks
from deltackpt.engines.module import WeightPlace
from deltackpt.engines.scatter import Write
from deltackpt.format.layout import TensorsByName
from deltackpt.format.state_digest import ZERO, Sums, add
from deltackpt.gpu.compile_ahead import join_receiving
from deltackpt.gpu.digest import has_kernels
from deltackpt.gpu.kept import TOTAL, KeptChanges
from deltackpt.gpu.places import PlacedWords, lend_room
from deltackpt.restore.patch_reader import PatchReader


@dataclass
class CardChanges:
    """What was decoded on a card. ``gained``: what the sums of these tensors gain; all others are left to the host.
    ``spent``: bytes that are kept there, of the hops before too."""

    writes: list[Write] = field(default_factory=list)
    gained: dict[str, Sums] = field(default_factory=dict)
    spent: int = 0

    def look(self) -> None:
        """Of the last step that is decoded: old words are looked at before they are written over, where there is room
        for all of them beside what is kept."""
        placed = [write for write in self.writes if isinstance(write, PlacedWords)]
        if self.spent + sum(write.room for write in placed) <= TOTAL:
            for write in placed:
                write.look()


def card_of(found: Mapping[str, WeightPlace]) -> torch.device | None:
    """The device that all of a module's weights are on, if there are kernels for it."""
    return kernels_on(place.tensor.device for place in found.values())


def kernels_on(used: Iterable[torch.device]) -> torch.device | None:
    """The one device that is used, if it is one and there are kernels for it."""
    devices = set(used)
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and has_kernels(device) else None


def decode_on(
    device: torch.device, patch: PatchReader, found: Mapping[str, WeightPlace], spent: int = 0,
    named: TensorsByName | None = None,
) -> CardChanges:  # fmt: skip
    """Decode the tensors of a patch for which there are kernels. Nothing is written. ``spent``: what the hops before
    it keep; ``named``: the step's tensors, all of ``found``, if that is known.

    Left to the host are other encodings, boxes whose elements lie apart, weights that do not lie in row-major order,
    and those that several names share. Raises ChainError ``base-differs`` for old values that the patch does not apply
    to.
    """
    if named is not None and (columns := column_tasks(patch, named, found)) is not None:
        changes = _decode_columns(device, columns, named, spent)
    else:
        changes = decode_and_keep(device, _each_task(patch, found), spent)
    lend_room([write for write in changes.writes if isinstance(write, PlacedWords)])
    return changes


def _each_task(patch: PatchReader, found: Mapping[str, WeightPlace]) -> Sequence[TensorTask]:
    tasks = list[TensorTask]()
    places = {name: found[name] for name in patch.names if name in found}
    names = [name for name, place in places.items() if not place.shared and place.tensor.is_contiguous()]
    for name, encoded in zip(names, patch.tensors(names), strict=True):
        tasks += tensor_tasks(encoded, places[name].tensor, places[name].known) or ()
    return tasks


def _decode_columns(device: torch.device, columns: ColumnTasks, named: TensorsByName, spent: int) -> CardChanges:
    """`decode_and_keep` of tasks in columns, each of a tensor of its own."""
    changes = CardChanges()
    join_receiving(device)
    kept = KeptChanges(columns.needs, spent)
    sums = list[Sums]()
    for decoded, source in decode_bytes(device, list(columns.groups(kept.room))):
        sums += decoded.sums
        changes.writes.append(kept.keep(decoded, source))
        del decoded, source
    names = map(named.names.__getitem__, columns.tensors)
    changes.gained, changes.spent = dict(zip(names, sums, strict=True)), kept.spent
    return changes


def decode_and_keep(
    device: torch.device, tasks: Sequence[TensorTask], spent: int = 0, bytes_of: BytesOf | None = None
) -> CardChanges:
    """Decode tasks, and keep what writes them; nothing is written. ``spent`` as of `decode_on`, ``bytes_of`` as of
    `decode_tasks`, which says what is raised."""
    changes = CardChanges()
    join_receiving(device)
    kept = KeptChanges((one.task.need for one in tasks), spent)
    for found in decode_tasks(device, tasks, bytes_of, kept.room):
        for one, both in zip(found.tasks, found.decoded.sums, strict=True):
            changes.gained[one.name] = add(changes.gained.get(one.name, ZERO), both)
        changes.writes.append(kept.keep(found.decoded, found.source))
        del found
    changes.spent = kept.spent
    return changes
