"""`packed` entries decoded on a device: from the bytes of a part there to positions, old and new words, and what the
digests gain. Nothing is written to the tensors before `DecodedChanges.placed` is applied.

The bytes are not trusted: every read and write is in bounds, and the first defect by entry and tile is what the host
would name.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.codecs.packed import decoder
from deltackpt.format.state_digest import Sums
from deltackpt.gpu.decode_tables import TileTables, tables_of
from deltackpt.gpu.decode_task import DecodeTask, groups, takes
from deltackpt.gpu.digest import keys, power
from deltackpt.gpu.places import PlacedWords, PlaceTable
from deltackpt.gpu.task_columns import dtype_of, reach_of, words_of
from deltackpt.gpu.transfers import Copy, SplitBytes, current
from deltackpt.torch_views.words import INTS

__all__ = [
    "DecodeTask", "DecodedChanges", "TaskGroup", "decode", "decode_back", "decode_groups", "groups", "takes",
]  # fmt: skip


@dataclass(frozen=True)
class TaskGroup:
    """Tasks of one dtype; ``data`` are bytes of parts, of which the first is ``begin`` as the tasks count, uint8, as
    far as they are needed. ``tables``: those of `tables_of`, if they are made."""

    tasks: Sequence[DecodeTask]
    data: torch.Tensor | SplitBytes
    begin: int = 0
    tables: TileTables | None = None

    @property
    def sent(self) -> torch.Tensor:
        """``data`` of a group whose bytes are on the device."""
        assert isinstance(self.data, torch.Tensor)
        return self.data


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


def decode(tasks: Sequence[DecodeTask], data: torch.Tensor) -> Iterator[DecodedChanges]:
    """Decode what `takes` every one of, in groups of one dtype, in the order of the tasks.

    ``data``: the bytes of a part, uint8 on the device. Raises what `decode_groups` raises.
    """
    return decode_groups(TaskGroup(group, data) for group in groups(tasks))


def decode_back(group: TaskGroup) -> DecodedChanges:
    """The inverse, of a group whose changes were written, but for those that led to another exponent: these are not.

    ``old`` are the words that are there, ``new`` those from which the others came. Raises what `decode_groups` raises.
    """
    with current(group.sent.device):
        return _launch(group, back=True)()


def decode_groups(found: Iterable[TaskGroup]) -> Iterator[DecodedChanges]:
    """Decode groups of tasks, whose bytes are on the device.

    Raises FormatError for the first defect of a group: those that `codecs.packed.decode` raises, but for what only the
    tile's number tells apart.
    """
    ahead: Callable[[], DecodedChanges] | None = None
    groups = iter(found)
    while True:
        try:
            if (group := next(groups, None)) is None:
                break
            with current(group.sent.device):
                after = _launch(group)
        except Exception:
            if ahead is not None:
                ahead()  # what is wrong there comes first
            raise
        del group
        if ahead is not None:
            yield ahead()
        ahead = after  # its kernels run while the host prepares the next group's
    if ahead is not None:
        yield ahead()


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """The bytes as int32, from an address that is a multiple of 4; a copy where they are not whole words."""
    if data.numel() % 4 == 0 and data.data_ptr() % 4 == 0:
        return data.view(torch.int32)
    return torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)


def _launch(group: TaskGroup, *, back: bool = False) -> Callable[[], DecodedChanges]:
    """Launch all kernels. -> what waits for what they say of the bytes."""
    from deltackpt.gpu.triton.crc import first_defects
    from deltackpt.gpu.triton.lists_scan import scan
    from deltackpt.gpu.triton.locate import locate
    from deltackpt.gpu.triton.step_back import step
    from deltackpt.gpu.triton.unlist import unlist

    tasks, data, padded = group.tasks, group.sent, _as_words(group.sent)
    dtype, device = dtype_of(tasks), data.device
    t = group.tables or tables_of(device, [(tasks, group.begin)])[0]
    t.check(tasks, data)
    # What the host is told comes in one copy: the sums, and behind them the defects.
    told = torch.zeros(2 * len(tasks) + (t.owner.numel() + 1) // 2, dtype=torch.int64, device=device)
    sums = told[: 2 * len(tasks)].view(-1, 2)
    defects = first_defects(data, t.spans, t.checksums, told[2 * len(tasks) :].view(torch.int32)[: t.owner.numel()])
    counted = scan(
        t.grids,
        t.owner,
        t.places,
        t.block_tiles,
        t.segments,
        t.scales,
        t.owner,
        dtype.width,
        dtype.exponent,
        False,
        t.far,
    )
    lists = unlist(
        t.grids, t.owner, t.places, counted[1], t.scales, padded, t.spans, t.counts, t.firsts, t.numbers, defects
    )
    found = locate(
        t.grids, t.owner, t.places, t.scales, counted, t.starts, t.firsts, t.counts, lists, defects, t.total,
        INTS[dtype.width], dtype.exponent,
    )  # fmt: skip
    table = keys(device, power(reach_of(tasks)))
    new = step(
        t.grids, t.owner, t.scales, padded, t.spans, lists.runs, t.starts, found, table, sums, defects, dtype.exponent,
        back,
    )  # fmt: skip
    known = Copy([told, *_short(t, data)])

    def finish() -> DecodedChanges:
        told, *short = (a.numpy() for a in known.wait())
        gained, flags = told[: 2 * len(tasks)].reshape(-1, 2), told[2 * len(tasks) :].view(np.int32)[: t.owner.numel()]
        _refuse(tasks, t, flags, short)
        both = [(x, y) for x, y in gained.view(np.uint64).tolist()]
        table = PlaceTable(t.bases, t.owner, t.starts, words_of(tasks))
        return DecodedChanges(tasks, t.of, found[0], found[1], new, both, table)

    return finish


def _short(tiles: TileTables, data: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of tiles that are too short for the kernel of checksums, one after the other, if there are any."""
    at = [np.arange(begin, begin + size) for _, begin, size, _ in tiles.short]
    return [data[torch.from_numpy(np.concatenate(at)).to(data.device)]] if at else []


def _refuse(
    tasks: Sequence[DecodeTask], tiles: TileTables, flags: npt.NDArray[np.int32],
    short: Sequence[npt.NDArray[np.uint8]],
) -> None:  # fmt: skip
    """Raise FormatError for the first tile that has a defect."""
    from deltackpt.gpu.triton.read_bits import CHECKSUM, CODES, NONE

    at = 0
    for tile, _, size, checksum in tiles.short:
        if zlib.crc32(short[0][at : at + size].tobytes()) != checksum:
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
