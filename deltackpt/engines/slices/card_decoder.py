"""Slices whose words lie on a card: a rank's tiles are decoded and summed up there, and none of the others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deltackpt.codecs.bits import Ints, starts
from deltackpt.engines.card import decode_and_keep
from deltackpt.engines.card_tasks import TensorTask, decode_tasks
from deltackpt.engines.card_writes import CardWrites
from deltackpt.engines.scatter import Write
from deltackpt.engines.slices.box_words import all_on_card, as_box, within, words_there
from deltackpt.engines.slices.card_changes import BlockChanges, HeldPlaces, write_of
from deltackpt.engines.slices.card_tiles import BlockTask, BlockWords, block_tasks
from deltackpt.engines.slices.decoder import SliceDecoder, SliceParts
from deltackpt.engines.slices.slice_step import BoxWrite, SliceStep, all_of_a_box, box_of
from deltackpt.format.manifest import File
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.box_digest import sums_of_boxes
from deltackpt.gpu.compile_ahead import join_receiving
from deltackpt.gpu.decode import DecodedChanges, DecodeTask
from deltackpt.gpu.transfers import put
from deltackpt.patch.index import Span
from deltackpt.patch.source import to_host
from deltackpt.shares import EntryShare, HeldTensors, ShareProof, ShareReader, coalesce
from deltackpt.shares.bounds import Bounds, meet, shape_of
from deltackpt.shares.reader import incomplete
from deltackpt.torch_views.words import INTS


@dataclass
class SharePart:
    """The bytes of a part that a rank has, uint8 on the card: those of ``spans``, one after the other."""

    where: str
    spans: Sequence[Span]
    data: torch.Tensor


_Loaded = tuple[Bounds, tuple[str, Bounds, torch.Tensor]]  # a cell, and what of it came: of a tensor a box, its words


def bytes_of(part: SharePart, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """See `card_tasks.BytesOf`."""
    return part.data[begin:end]


class CardSliceDecoder(SliceDecoder):
    """The same for boxes of tensors on one card.

    Tiles of `packed` have kernels. What has none, and words in another form, are decoded on the host, from a copy of
    the old words, and written to the card.
    """

    def __init__(self, tensors: HeldTensors, device: torch.device) -> None:
        super().__init__(tensors)
        self.device, self._spent = device, 0
        self._held: dict[str, HeldPlaces] = {}
        self._words = BlockWords()
        self.begin()

    def begin(self) -> None:
        """See `SliceDecoder.begin`. What is changed comes to the card, and does not leave it."""
        self.decoded, self._spent = {"card": 0, "host": 0}, 0

    def decode(self, made: SliceStep, reader: ShareReader, file: File, parts: SliceParts) -> None:
        """See `SliceDecoder.decode`."""
        part = SharePart(reader.index.where, (), torch.empty(0, dtype=torch.uint8, device=self.device))
        tasks, mine, left = list[BlockTask](), list[EntryShare](), list[EntryShare]()
        loaded = list[_Loaded]()
        for one in reader.share.entries:
            tensor = self.tensors.tensors[one.entry.name]
            if made.full and parts.to_card and all_of_a_box(one) and all_on_card(tensor):
                loaded += self._load(made, one, parts.tensors(file, one.spans))
                self.decoded["card"] += 1
                continue
            found = None if made.full else block_tasks(one, tensor, len(self.cells[one.entry.name]), part, self._words)
            if found is None:
                left.append(one)
                continue
            if not one.complete:
                raise incomplete(one, part.where)
            mine.append(one)
            tasks += found
        for (cell, (name, *_)), sums in zip(loaded, self._sums_of([words for _, words in loaded]), strict=True):
            made.gain(name, {cell: sums})
        self.decoded["card"] += len(mine)
        self.decoded["host"] += len(left)
        made.decode(reader, left)
        if tasks:
            part.spans = coalesce([span for one in mine for span in one.spans])
            part.data = _fetched(parts, file, part.spans, self.device)
            self._on_card(made, _with_bytes(tasks, reader, part))

    def _load(self, made: SliceStep, one: EntryShare, data: Sequence[torch.Tensor]) -> list[_Loaded]:
        """Take all words of a box, which came to the card as they are. -> the words of each cell, which it gains."""
        name, box = one.entry.name, box_of(one)
        words = torch.cat(list(data)).view(INTS[one.entry.dtype.width]).reshape(shape_of(box))
        made.writes.append(BoxWrite(self.tensors, name, box, words))
        met = ((cell, meet(cell, box)) for cell in self.cells[name])
        return [(cell, (name, common, words[within(common, box)])) for cell, common in met if common is not None]

    def _on_card(self, made: SliceStep, tasks: Sequence[BlockTask]) -> None:
        writes = list[Write]()
        direct = [one for one in tasks if one.direct]
        if direct:
            coded = decode_and_keep(self.device, direct, self._spent, bytes_of)
            self._spent = coded.spent
            writes += coded.writes
            for name, sums in coded.gained.items():
                (cell,) = self.cells[name]
                made.gain(name, {cell: sums})
        join_receiving(self.device)
        for found in decode_tasks(self.device, [one for one in tasks if not one.direct], bytes_of):
            writes += self._apart(made, found.tasks, found.decoded)
        made.writes.append(CardWrites(self.device, writes, dict(self.decoded)))

    def _apart(self, made: SliceStep, tasks: Sequence[TensorTask], decoded: DecodedChanges) -> list[Write]:
        """Changes of copies of tiles, wherever the rank holds these elements; and what its cells gain."""
        blocks = list[BlockChanges]()
        for one in tasks:
            assert isinstance(one, BlockTask)
            blocks.append(BlockChanges(one.name, one.block, self._places(one.name)))
        writes, gains = write_of(blocks, decoded)
        for name, cell, sums in gains:
            made.gain(name, {cell: sums})
        return writes

    def _places(self, name: str) -> HeldPlaces:
        if name not in self._held:
            self._held[name] = HeldPlaces(self.tensors.tensors[name], self.cells[name])
        return self._held[name]

    def _sums(self, cells: Mapping[str, Sequence[Bounds]]) -> ShareProof:
        """See `SliceDecoder`: of words where they are, but for those in another form."""
        found: dict[str, dict[Bounds, Sums]] = {}
        here = list[tuple[str, Bounds, torch.Tensor]]()
        for name, boxes in cells.items():
            tensor, found[name] = self.tensors.tensors[name], {}
            some = [(name, cell, words_there(tensor, cell, self.device)) for cell in boxes]
            if any(words is None for *_, words in some):
                found[name] = dict(ShareProof.of(self.tensors, {name: boxes}).cells[name])
            else:
                here += [(name, cell, words) for name, cell, words in some if words is not None]
        for (name, cell, _), sums in zip(here, self._sums_of(here), strict=True):
            found[name][cell] = sums
        return ShareProof(found)

    def _sums_of(self, some: Sequence[tuple[str, Bounds, torch.Tensor]]) -> list[Sums]:
        """Of words on the card, of boxes of tensors."""
        shapes = self.tensors.tensors
        return sums_of_boxes([(words, as_box(box, shapes[name].shape)) for name, box, words in some])


def _fetched(parts: SliceParts, file: File, spans: Sequence[Span], device: torch.device) -> torch.Tensor:
    """The bytes of spans, on the card: there they arrive where the carrier brings them."""
    if parts.to_card:
        return torch.cat(parts.tensors(file, spans))
    found = [np.frombuffer(to_host(data), np.uint8) for data in parts.of(file).ranges(file, spans)]
    return put(np.concatenate(found), device)


def _with_bytes(tasks: Sequence[BlockTask], reader: ShareReader, part: SharePart) -> list[BlockTask]:
    """Tasks that know where in the bytes of the share their tiles are: one after the other, so that blocks whose tiles
    lie apart there get a copy of them at its end."""
    begins, lengths, payloads = list[Ints](), list[Ints](), dict[int, Ints]()
    for one in tasks:
        block = one.block
        if (every := payloads.get(id(block.every))) is None:
            every = starts(block.every.lengths)[:-1] + reader.index.payload(block.entry)[0]
            payloads[id(block.every)] = every
        has = block.index.lengths > 0
        begins.append(every[block.tiles[has]])
        lengths.append(block.index.lengths[has])
    first = np.array([start for start, _ in part.spans], np.int64)
    here = starts(np.array([stop - start for start, stop in part.spans], np.int64))
    cuts = starts(np.array([len(one) for one in lengths], np.int64))
    begin, size = np.concatenate(begins), np.concatenate(lengths)
    span = np.searchsorted(first, begin, side="right") - 1
    begin += here[span] - first[span]
    on = np.append(begin[1:] == begin[:-1] + size[:-1], True)  # does the next tile go on where one ends?
    on[cuts[1:] - 1] = True
    together: list[bool] = np.logical_and.reduceat(on, cuts[:-1]).tolist()
    made, extra, end = list[BlockTask](), [part.data], part.data.numel()
    for one, a, b, whole in zip(tasks, cuts[:-1].tolist(), cuts[1:].tolist(), together, strict=True):
        at = int(begin[a])
        if not whole:
            extra += [part.data[i : i + n] for i, n in zip(begin[a:b].tolist(), size[a:b].tolist(), strict=True)]
            at, end = end, end + int(size[a:b].sum())
        t = one.task
        task = DecodeTask(t.index, t.dtype, t.words, at, t.size, t.where, t.origin, t.tiles)
        made.append(BlockTask(one.name, one.part, task, one.block, one.direct))
    part.data = torch.cat(extra) if len(extra) > 1 else part.data
    return made
