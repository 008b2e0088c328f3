"""The entries of a patch as tasks for the kernels of a card, and their bytes on the way there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from deltackpt.codecs import Entry
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.step_changes import base_blamed
from deltackpt.gpu.decode import DecodedChanges, DecodeTask, TaskGroup, decode_groups, groups, takes
from deltackpt.gpu.decode_tables import TileTables, tables_of
from deltackpt.patch.base import Known
from deltackpt.patch.part import PartReader
from deltackpt.patch.tensor import EncodedTensor
from deltackpt.util.parallel import ordered_map


class TaskPart(Protocol):
    """What `BytesOf` takes the bytes of a task from: a part, or a share of one."""

    where: str


@dataclass(frozen=True)
class TensorTask:
    """An entry of the tensor ``name`` in ``part``."""

    name: str
    part: TaskPart
    task: DecodeTask


def tensor_tasks(found: EncodedTensor, words: torch.Tensor, known: Known) -> list[TensorTask] | None:
    """What a patch holds of a tensor as tasks; None if some of it has no kernel, and the tensor is left to the host.

    ``words``: all its old words, contiguous on the card, of any shape; ``known``: its dtype and shape. Boxes have
    kernels where their elements lie side by side in the tensor.
    """
    made = []
    for part, entry in found.held:
        detail = entry.detail
        if not isinstance(entry.codec, PackedCodec) or not isinstance(detail, ListIndex):
            return None
        if (entry.dtype.name, entry.whole) != known or not isinstance(part, PartReader):
            return None
        if (origin := _origin(entry)) is None:
            return None
        start, end = part.payload_of(entry)
        here = words.detach().view(-1)[origin : origin + math.prod(entry.storage)] if entry.boxed else words
        where = f"{part.where}, {entry.name!r}"
        task = DecodeTask(detail, entry.dtype, here, start, end - start, where, origin)
        if not takes(task):
            return None
        made.append(TensorTask(found.name, part, task))
    return made


def _origin(entry: Entry) -> int | None:
    """Where in its tensor an entry's elements begin, None where they do not lie side by side in it."""
    if not entry.boxed:
        return 0
    if math.prod(entry.storage) * math.prod(entry.whole) != math.prod(entry.shape) * math.prod(entry.whole):
        return None  # elements of less than a byte
    wide = [axis for axis, size in enumerate(entry.shape) if size > 1]
    first = wide[0] if wide else len(entry.shape)
    if entry.shape[first + 1 :] != entry.whole[first + 1 :]:
        return None
    steps = [math.prod(entry.whole[axis + 1 :]) for axis in range(len(entry.whole))]
    return sum(at * step for at, step in zip(entry.offset, steps, strict=True))


@dataclass(frozen=True)
class DecodedTasks:
    """Some ``tasks``, what was ``decoded`` of them, and what they were decoded from in host memory."""

    tasks: Sequence[TensorTask]
    decoded: DecodedChanges
    source: TaskGroup


def staged(part: PartReader, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Bytes of a part's payloads in host memory, from where they go to a device, as uint8: pinned there, in memory that
    is used again, and whole words of 4 bytes, filled up with 0."""
    size = end - begin
    here = torch.empty(size + -size % 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    into = here.numpy()
    part.copy_payloads(begin, into[:size])
    into[size:] = 0
    return here


BytesOf = Callable[[Any, int, int, torch.device], torch.Tensor]  # of a `TaskPart`
TOGETHER = 8  # groups whose tables are made in one pass: no more, as the card has those before them to do meanwhile
STAGERS = 2  # threads that copy bytes to pinned memory while the groups before them are decoded


def decode_tasks(
    device: torch.device, tasks: Sequence[TensorTask], bytes_of: BytesOf | None = None
) -> Iterator[DecodedTasks]:
    """Decode tasks, part by part, and those of one dtype together, in groups.

    Of a part is sent to the card, group by group, what lies between the first and the last byte of its tasks, unless
    ``bytes_of`` has it there: of a part's payloads, from one byte to before another, for a device. Raises
    ChainError ``base-differs`` for old values that the patch does not apply to.
    """
    parts: dict[int, list[TensorTask]] = {}
    for task in tasks:
        parts.setdefault(id(task.part), []).append(task)
    for some in parts.values():
        some.sort(key=lambda one: one.task.dtype.name)
    runs = [(some, [(group, *_span(group)) for group in groups([one.task for one in some])]) for some in parts.values()]
    spans = [(some[0].part, begin, end) for some, found in runs for _, begin, end in found]
    tables = _tables(device, [(group, begin) for _, found in runs for group, begin, _ in found])
    with closing(_bytes(device, spans, bytes_of)) as data:
        for some, found in runs:
            sources = deque[TaskGroup]()
            at = 0
            with base_blamed(some[0].part.where):
                for decoded in decode_groups(_sent(device, found, zip(tables, data, strict=False), sources)):
                    mine = some[at : at + len(decoded.counts)]
                    at += len(mine)
                    made = DecodedTasks(mine, decoded, sources.popleft())
                    del decoded  # while the next group is decoded only what is kept of it takes memory
                    yield made
                    del made


def _span(group: Sequence[DecodeTask]) -> tuple[int, int]:
    """The first byte of some tasks in the payloads of their part, and the end of the last."""
    return min(task.begin for task in group), max(task.begin + task.size for task in group)


def _bytes(
    device: torch.device, spans: Sequence[tuple[TaskPart, int, int]], bytes_of: BytesOf | None
) -> Generator[torch.Tensor]:
    """What ``bytes_of`` has of each span; what is copied in host memory is so by other threads, ahead of its use, and
    from now on."""
    if bytes_of is not None:
        return (bytes_of(*span, device) for span in spans)
    copied: BytesOf = staged
    found = ordered_map(
        lambda span: copied(*span, device) if span else torch.empty(0), [None, *spans], STAGERS, ahead=STAGERS
    )
    next(found)  # of nothing: those after it are begun
    return found


def _sent(
    device: torch.device, found: Sequence[tuple[list[DecodeTask], int, int]],
    needed: Iterator[tuple[TileTables, torch.Tensor]], sources: deque[TaskGroup],
) -> Iterator[TaskGroup]:  # fmt: skip
    """Groups of tasks of one part, with their bytes and tables on the card, as they are asked for; and in ``sources``
    the same where they were."""
    for group, begin, _ in found:
        tables, data = next(needed)
        sources.append(TaskGroup(group, data, begin))
        yield replace(sources[-1], data=data.to(device, non_blocking=True), tables=tables)


def _tables(device: torch.device, found: Sequence[tuple[list[DecodeTask], int]]) -> Iterator[TileTables]:
    """The tables of every group: at first of one, so that the card has work, then of more at a time."""
    at, count = 0, 1
    while some := found[at : at + count]:
        yield from tables_of(device, some)
        at, count = at + count, min(2 * count, TOGETHER)
