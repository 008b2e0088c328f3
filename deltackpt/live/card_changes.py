"""Plain changes on a card: positions and words of `index` entries, checked and compared there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deltackpt.codecs.index import INDICES, VALUES, IndexCodec
from deltackpt.errors import FormatError
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.digest import of_changes
from deltackpt.gpu.places import Place, fits
from deltackpt.live.card_part import CardPart
from deltackpt.patch.base import Known
from deltackpt.patch.tensor import EncodedTensor
from deltackpt.torch_views.words import INTS
from deltackpt.util.grouped import grouped

TOGETHER = 1 << 24  # changes whose sums are added up at once: some 64 bytes of scratch memory each


@dataclass(frozen=True)
class PlainTask:
    """The `index` entry of a tensor: ``words`` are all its old words on the card, flat; ``positions`` int32 or int64,
    and ``new``, words [n], came with the part."""

    name: str
    where: str
    words: torch.Tensor
    positions: torch.Tensor
    new: torch.Tensor


@dataclass(frozen=True)
class PlainChanges:
    """Tensors whose changes are checked: what their sums gain, and where what is written."""

    gained: dict[str, Sums]
    places: list[Place]


def plain_task(found: EncodedTensor, words: torch.Tensor, known: Known) -> PlainTask | None:
    """What a part on the card holds of a tensor, if that is `index`, and its places fit the kernels."""
    part, entry = found.held[0]
    if len(found.held) > 1 or not isinstance(part, CardPart) or not isinstance(entry.codec, IndexCodec):
        return None
    if (entry.dtype.name, entry.whole) != known or not fits(words.numel()):
        return None
    positions = part.plain_on_card(entry, INDICES).view(torch.int32)  # U32 where int32 holds all places
    new = part.plain_on_card(entry, VALUES).view(INTS[entry.dtype.width])
    return PlainTask(found.name, f"{part.where}, {entry.name!r}", words, positions, new)


def plain_changes(tasks: Sequence[PlainTask]) -> Iterator[PlainChanges]:
    """Check, and compare with the words that are there; nothing is written. Raises FormatError ``indices-order``,
    ``count-differs``."""
    ordered = sorted((task for task in tasks if task.new.numel()), key=lambda task: task.new.element_size())
    for task in ordered:
        if task.new.numel() != task.positions.numel():
            have, need = f"{task.new.numel()} values", f"{task.positions.numel()} of each"
            raise FormatError("count-differs", where=task.where, have=have, need=need)
    for width in sorted({task.new.element_size() for task in ordered}):
        same = [task for task in ordered if task.new.element_size() == width]
        for some in grouped(same, lambda task: task.new.numel(), TOGETHER):
            yield _changes(some)


def _changes(some: Sequence[PlainTask]) -> PlainChanges:
    _check(some)
    # Within bounds before they are checked: a place outside would end the card's context, and not the step alone.
    wide = [task.positions.long().clamp_(0, task.words.numel() - 1) for task in some]
    old = [task.words[at] for task, at in zip(some, wide, strict=True)]
    counts = [task.new.numel() for task in some]
    most = max(task.words.numel() for task in some)
    sums = of_changes(torch.cat(wide), torch.cat(old), torch.cat([task.new for task in some]), counts, most)
    places = [Place(task.words, 0, task.positions, task.new, was) for task, was in zip(some, old, strict=True)]
    return PlainChanges({task.name: both for task, both in zip(some, sums, strict=True)}, places)


def _check(some: Sequence[PlainTask]) -> None:
    flags = []
    for task in some:
        at, size = task.positions, task.words.numel()
        flags.append((at[1:] <= at[:-1]).any() | (at[0] < 0) | (at[-1] >= size))  # rising: the ends tell for all
    for task, wrong in zip(some, torch.stack(flags).tolist(), strict=True):
        if wrong:  # [F-PLAIN-8]
            have, need = "indices out of order or range", f"rising, below {task.words.numel():,}"
            raise FormatError("indices-order", where=task.where, have=have, need=need)
