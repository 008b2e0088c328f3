"""The entries of a patch as tasks for the kernels of a card, and their bytes on the way there."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs import Entry
from deltackpt.codecs.packed.encoding import PackedCodec
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.engines.step_changes import base_blamed
from deltackpt.errors import FormatError
from deltackpt.gpu.decode import DecodedChanges, DecodeTask, TaskGroup, decode_groups, groups, takes
from deltackpt.gpu.decode_tables import TileTables, begin_tables, tables_of
from deltackpt.gpu.room import Room
from deltackpt.gpu.transfers import SplitBytes
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
class GroupBytes:
    """Tasks that are decoded together. Their bytes are those of ``spans``, each of a part's payloads from one byte to
    before another, one after the other; the first of them is ``begin`` as the tasks count."""

    tasks: Sequence[DecodeTask]
    spans: Sequence[tuple[TaskPart, int, int]]
    begin: int


@dataclass(frozen=True)
class DecodedTasks:
    """Some ``tasks``, what was ``decoded`` of them, and what they were decoded from in host memory."""

    tasks: Sequence[TensorTask]
    decoded: DecodedChanges
    source: TaskGroup


BytesOf = Callable[[Any, int, int, torch.device], torch.Tensor]  # of a `TaskPart`
TOGETHER = 8  # groups whose tables are made in one pass: no more, as the card has those before them to do meanwhile
STAGERS = 4  # threads that copy bytes to pinned memory while the groups before them are decoded
PIECE = 4 << 20  # bytes that one copies at a time: less, and it would ask for the interpreter's lock more often
AHEAD = 12  # pieces that may wait for their turn


def decode_tasks(
    device: torch.device, tasks: Sequence[TensorTask], bytes_of: BytesOf | None = None, room: Room | None = None
) -> Iterator[DecodedTasks]:
    """Decode tasks, part by part, and those of one dtype together, in groups that there is ``room`` for.

    Of a part is sent to the card, group by group, what lies between the first and the last byte of its tasks, unless
    ``bytes_of`` has it there: of a part's payloads, from one byte to before another, for a device. Raises
    ChainError ``base-differs`` for old values that the patch does not apply to.
    """
    parts: dict[int, list[TensorTask]] = {}
    for task in tasks:
        parts.setdefault(id(task.part), []).append(task)
    room, order, found = room or Room(), list[TensorTask](), list[GroupBytes]()
    for some in parts.values():
        some.sort(key=lambda one: one.task.dtype.name)
        order += some
        for group in groups([one.task for one in some], room):
            begin, end = _span(group)
            found.append(GroupBytes(group, [(some[0].part, begin, end)], begin))
    at = 0
    for decoded, source in decode_bytes(device, found, bytes_of):
        mine = order[at : at + len(decoded.counts)]
        at += len(mine)
        made = DecodedTasks(mine, decoded, source)
        del decoded  # while the next group is decoded only what is kept of it takes memory
        yield made
        del made


def decode_bytes(
    device: torch.device, found: Sequence[GroupBytes], bytes_of: BytesOf | None = None
) -> Iterator[tuple[DecodedChanges, TaskGroup]]:
    """Decode groups, as `decode_tasks` does. -> of each what was found, and what that was decoded from in host
    memory."""
    if not found:
        return
    parts = list({id(part): part for group in found for part, _, _ in group.spans}.values())
    if bytes_of is not None:
        made = _there(device, found, bytes_of)
    else:
        near = all(isinstance(part, PartReader) and part.near for part in parts)
        made = _near(device, found) if near else _staged(device, found)
    with closing(made) as staged, _blamed(parts):
        sources = deque[TaskGroup]()
        for decoded in decode_groups(_sent(device, staged, sources)):
            both = decoded, sources.popleft()
            del decoded
            yield both
            del both


@contextmanager
def _blamed(parts: Sequence[TaskPart]) -> Iterator[None]:
    """`base_blamed` for the part of which something does not decode."""
    try:
        yield
    except FormatError as error:
        own = (part.where for part in parts if str(error.where).startswith(f"{part.where}, "))
        with base_blamed(next(own, parts[0].where)):
            raise


def _span(group: Sequence[DecodeTask]) -> tuple[int, int]:
    """The first byte of some tasks in the payloads of their part, and the end of the last."""
    return min(task.begin for task in group), max(task.begin + task.size for task in group)


_Ready = tuple[TaskGroup, TileTables]  # a group, its bytes wherever they are, and its tables on the device


def _there(device: torch.device, found: Sequence[GroupBytes], bytes_of: BytesOf) -> Generator[_Ready]:
    """Groups whose bytes ``bytes_of`` has: of each those of one span."""
    tables = _tables(device, [(group.tasks, group.begin) for group in found])
    for group, of_group in zip(found, tables, strict=True):
        (span,) = group.spans
        yield TaskGroup(group.tasks, bytes_of(*span, device), group.begin), of_group


def _near(device: torch.device, found: Sequence[GroupBytes]) -> Generator[_Ready]:
    """Groups whose bytes lie where the device copies them from: no other thread has anything to do, and takes the
    interpreter's lock from this one."""
    for group in found:
        tables = begin_tables(device, [(group.tasks, group.begin)])
        yield TaskGroup(group.tasks, SplitBytes([*_cuts(group)]), group.begin), tables()[0]


def _cuts(group: GroupBytes) -> Iterator[torch.Tensor]:
    for part, begin, end in group.spans:
        assert isinstance(part, PartReader)
        yield torch.from_numpy(np.frombuffer(part.payloads()[begin:end], np.uint8))


def _staged(device: torch.device, found: Sequence[GroupBytes]) -> Generator[_Ready]:
    """Groups whose bytes are copied in host memory, and whose tables are made, by other threads: ahead of their use,
    and from now on."""
    made = ordered_map(lambda job: job(), _jobs(device, found), STAGERS, ahead=AHEAD)
    next(made)  # of nothing: those after it are begun
    return _in_groups(found, made)


def _in_groups(found: Sequence[GroupBytes], made: Generator[Any]) -> Generator[_Ready]:
    with closing(made):
        for group in found:
            tables = next(made)
            while (data := next(made)) is None:
                pass
            yield TaskGroup(group.tasks, data, group.begin), tables()[0]


def _jobs(device: torch.device, found: Sequence[GroupBytes]) -> Iterator[Callable[[], Any]]:
    """For each group one that makes its tables, and some that copy its bytes, of which the last returns them."""
    yield lambda: None
    for group in found:
        yield partial(begin_tables, device, [(group.tasks, group.begin)])
        yield from _pieces(device, group)


def _pieces(device: torch.device, group: GroupBytes) -> Iterator[Callable[[], torch.Tensor | None]]:
    """They fill a tensor, uint8: pinned on the way to a card, in memory that is used again, and whole words of 4 bytes,
    filled up with 0."""
    size = sum(end - begin for _, begin, end in group.spans)
    data = torch.empty(size + -size % 4, dtype=torch.uint8, pin_memory=device.type == "cuda")
    into, at = data.numpy(), 0
    into[size:] = 0
    cuts = list[tuple[TaskPart, int, npt.NDArray[np.uint8]]]()
    for part, begin, end in group.spans:
        for start in range(begin, end, PIECE):
            stop = min(start + PIECE, end)
            cuts.append((part, start, into[at : at + stop - start]))
            at += stop - start
    for cut in cuts[:-1]:
        yield partial(_copied, *cut, None)
    yield partial(_copied, *cuts[-1], data) if cuts else lambda: data


def staged(part: TaskPart, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Bytes of a part's payloads in host memory, from where they go to a device, as uint8 [n], filled up with 0."""
    *_, data = (piece() for piece in _pieces(device, GroupBytes([], [(part, begin, end)], begin)))
    assert data is not None
    return data


def _copied(
    part: TaskPart, begin: int, into: npt.NDArray[np.uint8], data: torch.Tensor | None
) -> torch.Tensor | None:  # fmt: skip
    assert isinstance(part, PartReader)
    part.copy_payloads(begin, into)
    return data


def _sent(device: torch.device, staged: Iterator[_Ready], sources: deque[TaskGroup]) -> Iterator[TaskGroup]:
    """Groups with their bytes and tables on the card, as they are asked for; and in ``sources`` the same where they
    were."""
    for source, tables in staged:
        sources.append(source)
        yield replace(source, data=source.data.to(device, non_blocking=True), tables=tables)


def _tables(device: torch.device, found: Sequence[tuple[Sequence[DecodeTask], int]]) -> Iterator[TileTables]:
    """The tables of every group: at first of one, so that the card has work, then of more at a time."""
    at, count = 0, 1
    while some := found[at : at + count]:
        yield from tables_of(device, some)
        at, count = at + count, min(2 * count, TOGETHER)
