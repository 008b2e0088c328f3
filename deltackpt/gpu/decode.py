"""`packed` entries decoded on a device: from the bytes of a part there to positions, old and new words, and what the
digests gain. Nothing is written to the tensors before `DecodedChanges.placed` is applied.

The bytes are not trusted: every read and write is in bounds, and the first defect by entry and tile is what the host
would name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs.bits import Ints, starts
from deltackpt.codecs.packed import decoder, list_index
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.changes import NARROW
from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.places import PlacedWords, PlaceTable
from deltackpt.gpu.tiles import elements, fits, grid_table, segments
from deltackpt.gpu.transfers import Copy, Sent, current, owners, send
from deltackpt.torch_views.words import INTS
from deltackpt.util.grouped import grouped

SCRATCH = 352 << 20  # bytes that tiles take which are decoded at once; see `kept` for all that a step takes
MAX_TILE_BYTES = 1 << 28  # from here on its bits are not counted in int32
LISTS = 32  # columns of the counts: one for each class, and for the long changes of each
_HALVES = np.repeat(np.eye(2), LISTS // 2, axis=0)  # adds up either half of the columns


@dataclass(frozen=True)
class DecodeTask:
    """One `packed` entry. ``words``: all old words of its tensor or box on the device, contiguous, of any shape and any
    torch dtype of the same width; they lie from element ``origin`` on in the tensor. ``begin``: where in the part's
    bytes on the device its payload, of ``size`` bytes, begins. ``tiles``: how errors number its tiles, int64
    [tiles]; None: as they are."""

    index: ListIndex
    dtype: DType
    words: torch.Tensor
    begin: int
    size: int
    where: str
    origin: int = 0
    tiles: Ints | None = None

    @cached_property
    def scratch(self) -> int:
        """About the bytes that it takes on the device while it is decoded."""
        return scratch(self.index, self.words.numel(), self.dtype.width)


@dataclass(frozen=True)
class TaskGroup:
    """Tasks of one dtype and one part; ``data`` are its bytes from ``begin`` on, uint8, as far as they are needed."""

    tasks: Sequence[DecodeTask]
    data: torch.Tensor
    begin: int = 0


@dataclass(frozen=True)
class DecodedChanges:
    """The changes of some tasks of one dtype, on their device, by task, tile, class and rank.

    ``positions`` (int32, [changes]) are flat in each task's words; ``old`` and ``new`` the words there. ``counts[i]``
    of them are of ``tasks[i]``, and ``sums[i]`` is what they add to the sums of its tensor. ``table``: where they are.
    """

    tasks: Sequence[DecodeTask]
    counts: Sequence[int]
    positions: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    sums: Sequence[Sums]
    table: PlaceTable

    @property
    def elements(self) -> int:
        """How many."""
        return int(self.positions.numel())

    def placed(self) -> PlacedWords:
        """What writes them, and takes them back. It writes to ``new`` when it is applied."""
        return PlacedWords(self.table, self.positions, self.new)


def takes(task: DecodeTask) -> bool:
    """Is there a kernel for it? Not for tensors whose places int32 does not hold, tiles of 2^28 bytes or more, and
    classes of a dtype that has no exponent; those are decoded on the host."""
    index = task.index
    small = task.size < MAX_TILE_BYTES or int(index.lengths.max(initial=0)) < MAX_TILE_BYTES
    return fits(index.grid) and small and (task.dtype.exponent[1] > 0 or index.scale.classes == 1)


def decode(tasks: Sequence[DecodeTask], data: torch.Tensor) -> Iterator[DecodedChanges]:
    """Decode what `takes` every one of, in groups of one dtype, in the order of the tasks.

    ``data``: the bytes of a part, uint8 on the device. Raises what `decode_groups` raises.
    """
    return decode_groups(TaskGroup(group, data) for group in groups(tasks))


def decode_back(group: TaskGroup) -> DecodedChanges:
    """The inverse, of a group whose changes were written, but for those that led to another exponent: these are not.

    ``old`` are the words that are there, ``new`` those from which the others came. Raises what `decode_groups` raises.
    """
    with current(group.data.device):
        return _launch(group, back=True)()


def decode_groups(found: Iterable[TaskGroup]) -> Iterator[DecodedChanges]:
    """Decode groups of tasks, whose bytes are on the device.

    Raises FormatError for the first defect of a group: those that `codecs.packed.decode` raises, but for what only the
    tile's number tells apart.
    """
    ahead: Callable[[], DecodedChanges] | None = None
    for group in found:
        with current(group.data.device):
            after = _launch(group)
        if ahead is not None:
            yield ahead()
        ahead = after  # its kernels run while the host prepares the next group's
    if ahead is not None:
        yield ahead()


def groups(tasks: Sequence[DecodeTask]) -> Iterator[list[DecodeTask]]:
    """Runs of tasks of one dtype whose decoding takes SCRATCH bytes on the device, unless one takes more."""
    for _, of_dtype in groupby(tasks, lambda task: task.dtype):
        yield from grouped(of_dtype, lambda task: task.scratch, SCRATCH)


def scratch(index: ListIndex, elements: int, width: int) -> int:
    """About the bytes that an entry of so many elements takes on the device while it is decoded: for each 64 elements
    32 of counts; for each change a position, an excess and two words; for each number in unary 8."""
    long = int(index.counts[:, index.scale.classes :].sum())
    changes = int(index.counts.sum()) - long
    return elements // 2 + changes * (5 + 2 * width) + 8 * (changes + 2 * long)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """The bytes as int32, from an address that is a multiple of 4; a copy where they are not whole words."""
    if data.numel() % 4 == 0 and data.data_ptr() % 4 == 0:
        return data.view(torch.int32)
    return torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)


@dataclass(frozen=True)
class _SentTiles:
    """All tiles of a group on the device; see the kernels for what each array is. ``sent`` is what they are views of.

    ``total``: changes, ``of`` each task. ``numbers``: at most so many are in unary. ``short``: of every tile below 4
    bytes, its number, where it begins, its bytes, its crc32. ``plan``: where segments of elements are.
    """

    grids: torch.Tensor
    owner: torch.Tensor
    places: torch.Tensor
    block_tiles: torch.Tensor
    scales: torch.Tensor
    spans: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor
    checksums: torch.Tensor
    counts: torch.Tensor
    bases: torch.Tensor
    total: int
    numbers: int
    of: list[int]
    short: list[tuple[int, int, int, int]]
    plan: Any
    sent: Sent


def _launch(group: TaskGroup, *, back: bool = False) -> Callable[[], DecodedChanges]:
    """Launch all kernels. -> what waits for what they say of the bytes."""
    from deltackpt.gpu.triton.crc import first_defects
    from deltackpt.gpu.triton.locate import locate
    from deltackpt.gpu.triton.step_back import step
    from deltackpt.gpu.triton.unlist import unlist

    tasks, data, padded = group.tasks, group.data, _as_words(group.data)
    dtype, device = tasks[0].dtype, data.device
    t = _send(group)
    defects = first_defects(data, t.spans, t.checksums)
    counted = t.plan.scan(
        t.grids, t.owner, t.places, t.block_tiles, t.scales, t.owner, dtype.width, dtype.exponent, False
    )
    lists = unlist(
        t.grids, t.owner, t.places, counted[1], t.scales, padded, t.spans, t.counts, t.firsts, t.numbers, defects
    )
    found = locate(
        t.grids, t.owner, t.places, t.scales, counted, t.starts, t.firsts, t.counts, lists, defects, t.total,
        INTS[dtype.width], dtype.exponent,
    )  # fmt: skip
    table = keys(device, power(max(task.words.numel() + task.origin for task in tasks)))
    new, sums = step(
        t.grids, t.owner, t.scales, padded, t.spans, lists.runs, t.starts, found, table, defects, dtype.exponent,
        back,
    )  # fmt: skip
    known = Copy([defects, sums, _short(t, data)])

    def finish() -> DecodedChanges:
        flags, gained, short = (a.numpy() for a in known.wait())
        _refuse(tasks, t, flags, short)
        both = [(int(x) % (1 << 64), int(y) % (1 << 64)) for x, y in gained.tolist()]
        table = PlaceTable(t.bases, t.owner, t.starts, [task.words for task in tasks])
        return DecodedChanges(tasks, t.of, found[0], found[1], new, both, table)

    return finish


def _of_tasks(tasks: Sequence[DecodeTask]) -> Ints:
    """[4, tasks]: where each one's payload begins in the part, its bytes, its origin, and where its words are."""
    rows = [(task.begin, task.size, task.origin, task.words.data_ptr()) for task in tasks]
    found: Ints = np.array(rows, np.int64).T
    return found


def _require(group: TaskGroup, grids: Ints, lengths: Ints, ends: Ints) -> None:
    """What `takes` and the caller have seen to: kernels read and write by it. ``grids``: the table of the kernels,
    ``lengths`` [tiles] the bytes of tiles, ``ends`` [tasks] where payloads end."""
    assert int(lengths.max(initial=0)) < MAX_TILE_BYTES
    assert all(fits(task.index.grid) and task.words.is_contiguous() for task in group.tasks)
    assert [task.words.numel() for task in group.tasks] == grids[12].tolist()
    assert all(task.words.element_size() == task.dtype.width for task in group.tasks)
    assert all(task.begin >= group.begin for task in group.tasks)
    assert int(ends.max(initial=0)) <= group.begin + group.data.numel()


def _odd(counts: npt.NDArray[np.int32]) -> bool:
    """Are there counts, [tiles, LISTS] as `_columns` makes them, that the host's decoder refuses?"""
    long = counts[:, LISTS // 2 :] > counts[:, : LISTS // 2]
    return bool(long.any() or counts.min(initial=0) < 0)


def _refuse_index(task: DecodeTask) -> None:
    index = task.index
    if (defect := list_index.count_defect(index)) is not None:
        raise FormatError(defect[0], where=task.where, have=defect[1], need=defect[2])
    if (need := int(index.lengths.sum())) != task.size:
        raise FormatError("tile-length", where=task.where, have=f"{task.size:,} bytes", need=f"{need:,} of the tiles")


def _send(group: TaskGroup) -> _SentTiles:
    """The tables of all tasks, in one copy."""
    from deltackpt.gpu.triton.lists_scan import SPAN, Populations

    tasks = group.tasks
    indices = [task.index for task in tasks]
    several = tasks[0].dtype.exponent[1] > 0  # classes, perhaps
    tiles = [i.grid.tiles for i in indices]
    plan = Populations(
        np.concatenate([segments(i.grid, SPAN) for i in indices]) if several else np.zeros(sum(tiles), np.int64)
    )
    first = [0, *accumulate(tiles)]
    begins, sizes, origins, addresses = _of_tasks(tasks)
    grids = grid_table([i.grid for i in indices], first[:-1], [0] * len(tasks), addresses, plan.first_block)
    grids = np.vstack([grids, origins])
    lengths = np.concatenate([i.lengths for i in indices])
    ends = starts(lengths)
    at = ends[:-1] + np.repeat(begins - group.begin - ends[first[:-1]], tiles)
    crcs = np.concatenate([i.checksums for i in indices]).astype(np.int64)
    short = [(i, int(at[i]), int(lengths[i]), int(crcs[i])) for i in np.flatnonzero(lengths < 4).tolist()]
    counts = _columns(indices, first)
    of, long = (counts.astype(np.float64) @ _HALVES).T.astype(np.int64)  # exact, and faster than sums of int32
    held = np.concatenate([elements(i.grid) for i in indices])
    if (of > np.minimum(held, 8 * lengths)).any() or (np.diff(ends[first]) != sizes).any() or _odd(counts):
        for task in tasks:  # what the host's decoder checks before it looks at a tile
            _refuse_index(task)
    _require(group, grids, lengths, begins + sizes)
    changes, numbers = starts(of), starts(of + 2 * long)  # a long change has a code, if it is listed, and an excess
    sent = send(
        group.data.device,
        grids,
        owners(tiles),
        np.concatenate([plan.tiles, [[plan.first_block[-1], plan.segments]]]),
        plan.block_tiles,
        np.array([_scale(i) for i in indices], np.int64),
        np.stack([8 * at, 8 * lengths], axis=1),
        changes,
        numbers[:-1],
        crcs,
        counts.view(np.int64),
        grids[7],  # by itself: kernels are compiled for addresses that are a multiple of 16
        bypass=False,
    )
    table, owner, places, block_tiles, scales, spans, first_changes, first_numbers, checksums, pairs, bases = (
        sent.arrays
    )
    return _SentTiles(
        table, owner, places, block_tiles, scales, spans, first_changes, first_numbers, checksums,
        pairs.view(torch.int32), bases, int(changes[-1]), int(numbers[-1]), np.diff(changes[first]).tolist(), short,
        plan, sent,
    )  # fmt: skip


def _columns(indices: Sequence[ListIndex], first: Sequence[int]) -> npt.NDArray[np.int32]:
    """The counts of all tiles, [tiles, LISTS]: those of class c in column c, of its long changes LISTS / 2 on. A count
    that is no int32 is -1. ``first``: the first tile of each index, and how many there are."""
    wide = np.zeros((first[-1], LISTS), np.int32)
    for index, tile in zip(indices, first, strict=False):
        scale, counts, rows = index.scale, index.counts, wide[tile : tile + len(index.counts)]
        if counts.view(np.uint64).max(initial=0) >= NARROW:
            counts = np.where((counts < 0) | (counts >= NARROW), -1, counts)
        rows[:, : scale.classes] = counts[:, : scale.classes]
        rows[:, LISTS // 2 + scale.first : LISTS // 2 + scale.classes] = counts[:, scale.classes :]
    return wide


def _scale(index: ListIndex) -> tuple[int, int, int, int]:
    scale = index.scale
    return scale.classes, scale.first, scale.top, scale.anchor


def _short(tiles: _SentTiles, data: torch.Tensor) -> torch.Tensor:
    """The bytes of tiles that are too short for the kernel of checksums, one after the other."""
    at = [np.arange(begin, begin + size) for _, begin, size, _ in tiles.short]
    return data[torch.from_numpy(np.concatenate(at)).to(data.device)] if at else data[:0]


def _refuse(
    tasks: Sequence[DecodeTask], tiles: _SentTiles, flags: npt.NDArray[np.int32], short: npt.NDArray[np.uint8]
) -> None:
    """Raise FormatError for the first tile that has a defect."""
    from deltackpt.gpu.triton.read_bits import CHECKSUM, CODES, NONE

    at = 0
    for tile, _, size, checksum in tiles.short:
        if zlib.crc32(short[at : at + size].tobytes()) != checksum:
            flags[tile] = CHECKSUM
        at += size
    bad = np.flatnonzero(flags != NONE)
    if not len(bad):
        return
    tile = int(bad[0])
    for task in tasks:
        if tile < len(task.index.lengths):
            number = tile if task.tiles is None else int(task.tiles[tile])
            raise decoder.refuse(CODES[int(flags[bad[0]])], f"{task.where}, tile {number}")
        tile -= len(task.index.lengths)
