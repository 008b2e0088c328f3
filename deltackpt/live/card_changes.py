"""Plain changes on a card: positions and words of `index` entries, checked and compared there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from deltackpt.codecs.index import INDICES, VALUES, IndexCodec
from deltackpt.errors import FormatError
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.places import PlacedWords, fits
from deltackpt.gpu.plain import PlainWords, look_at
from deltackpt.live.card_part import CardPart
from deltackpt.patch.base import Known
from deltackpt.patch.tensor import EncodedTensor
from deltackpt.torch_views.words import INTS
from deltackpt.util.grouped import grouped

TOGETHER = 1 << 28  # changes that are looked at, and written, at once


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
    """Tensors whose changes are checked: what their sums gain, and what writes them."""

    gained: dict[str, Sums]
    write: PlacedWords


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
    found = look_at([PlainWords(task.words, task.positions, task.new) for task in some])
    for task, wrong in zip(some, found.wrong, strict=True):
        if wrong:
            raise out_of_order(task.where, task.words.numel())
    return PlainChanges({task.name: both for task, both in zip(some, found.sums, strict=True)}, found.write)


def out_of_order(where: str, elements: int) -> FormatError:
    """Positions do not rise, or lie outside of so many elements: FormatError ``indices-order``."""
    have, need = "indices out of order or range", f"rising, below {elements:,}"  # [F-PLAIN-8]
    return FormatError("indices-order", where=where, have=have, need=need)
