"""A trainer rank's share of a live step, made where its weights are: changes, coded or plain, or all of the weights.

What the capture found and encoded is on the card already; a part is put together of views of it, and of a header and a
table, which are made on the host. No byte of a payload is copied to host memory, and from there, for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch

from deltackpt.codecs import Encoded, Entry
from deltackpt.codecs.index import INDICES, VALUES, IndexCodec
from deltackpt.codecs.plain import Checked
from deltackpt.codecs.registry import FULL
from deltackpt.codecs.types import PlainTensor
from deltackpt.format.dtypes import DType
from deltackpt.format.tensor_names import MAX_NAME
from deltackpt.gpu.crc_runs import crc32_of
from deltackpt.gpu.device_bytes import CardBytes
from deltackpt.torch_views.boxes import Box
from deltackpt.torch_views.delta import CardChange, Delta
from deltackpt.util.grouped import grouped

TOGETHER = 1 << 28  # bytes whose checksums are taken at once


def fits_card(delta: Delta, names: AbstractSet[str]) -> bool:
    """Can the change go out of the card's memory plainly: is it there, of a whole tensor, under names that are free?"""
    if delta.on_card is None or delta.on_card.words is None or delta.box.proper or not len(delta.positions):
        return False
    return free_names(delta.name, names)


def free_names(name: str, names: AbstractSet[str]) -> bool:
    """Are the names of the plain tensors of a change none of a tensor's, and short enough?"""
    made = (name + INDICES, name + VALUES)  # as `patch.encode.collides` has it
    return not any(one in names or len(one.encode()) > MAX_NAME for one in made)


def coded_on_card(delta: Delta, used: str) -> tuple[Entry, Encoded] | None:
    """A change as it was encoded when it was captured, in the encoding ``used``, with its bytes on the card; None if
    they are not there."""
    if delta.on_card is None or delta.on_card.tiles is None or delta.encoded is None:
        return None
    box, detail = delta.box, delta.encoded.detail
    entry = Entry(delta.name, used, delta.dtype, box.shape, box.whole, box.offset, detail)
    return entry, Encoded(detail, cast(Any, [CardBytes(delta.on_card.tiles)]))


def plain_on_card(deltas: Sequence[Delta]) -> Iterator[tuple[Delta, Entry, Encoded]]:
    """Changes that `fits_card`, as `index` entries whose bytes are on the card."""
    for some in grouped(deltas, lambda delta: len(delta.positions) * (4 + delta.dtype.width), TOGETHER):
        held = [cast(CardChange, delta.on_card).words for delta in some]
        runs = [(CardBytes(words.positions), CardBytes(words.new)) for words in held if words is not None]
        sizes = [len(at) + len(new) for at, new in runs]
        sums = crc32_of(torch.cat([data.tensor for both in runs for data in both]), sizes)
        for delta, both, checksum in zip(some, runs, sums, strict=True):
            detail = Checked(len(delta.positions), checksum)
            entry = _entry(delta, detail)
            tensors = [
                PlainTensor(spec.suffix, spec.dtype, spec.shape, cast(Any, data))
                for spec, data in zip(entry.plain_tensors, both, strict=True)
            ]
            assert [tensor.suffix for tensor in tensors] == [INDICES, VALUES]
            yield delta, entry, Encoded(detail, plain=tensors)


def full_on_card(name: str, dtype: DType, box: Box, words: torch.Tensor) -> tuple[Entry, Encoded]:
    """All words of a box, flat on a card, in `full`; they may not change as long as the entry is in use."""
    data = CardBytes(words)
    detail = Checked(words.numel(), crc32_of(data.tensor, [len(data)])[0])
    entry = Entry(name, FULL.name, dtype, box.shape, box.whole, box.offset, detail)
    return entry, Encoded(detail, payload=cast(Any, [data]))


def settled(words: torch.Tensor) -> torch.Tensor:
    """The same, once all that any stream of its device was given is done: the snapshot is made by another thread."""
    if words.device.type == "cuda":
        torch.cuda.synchronize(words.device)
    return words


def _entry(delta: Delta, detail: Checked) -> Entry:
    return Entry(delta.name, IndexCodec.name, delta.dtype, delta.box.shape, delta.box.whole, delta.box.offset, detail)
