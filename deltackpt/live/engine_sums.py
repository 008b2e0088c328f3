"""The sums of an engine's ranks added up among themselves, by torch.distributed: the trainer then hears one proof.

Without a group every rank sends its sums to the trainer, which adds up those of 512 ranks. With one, each cell comes
from the first rank that holds it, all ranks add up by `all_reduce`, and who holds a copy compares it with the sum.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deltackpt.errors import ChainError, StoreError, UsageError
from deltackpt.format.state_digest import Sums
from deltackpt.shares import ShareProof
from deltackpt.shares.bounds import Bounds

Cell = tuple[str, Bounds]

POLL = 0.0005  # seconds between two looks at a collective of NCCL


class EngineSums:
    """One rank's end. ``group``: of all ranks of the engine, which nothing else uses; collectives that do not pass
    within ``timeout`` seconds leave it of no use, and every rank sends its own proof from then on."""

    def __init__(
        self, group: Any, ranks: int, timeout: float, cells: Mapping[str, Sequence[Bounds]]
    ) -> None:  # fmt: skip
        """``cells``: what this rank's proofs are of. Raises UsageError ``live-option`` for a group of other ranks."""
        try:
            size = dist.get_world_size(group)
        except (ValueError, RuntimeError, TypeError, AttributeError) as error:  # no group, or none of this process
            have, need = f"{group!r}: {error}"[:160], "a group of torch.distributed"
            raise UsageError("live-option", where="a live receiver, group=", have=have, need=need) from error
        if size != ranks:
            need = f"one of the engine's {ranks} ranks"
            raise UsageError("live-option", where="a live receiver, group=", have=f"a group of {size}", need=need)
        self._group, self._rank, self._timeout = group, dist.get_rank(group), timeout
        self._cells = sorted((name, box) for name, boxes in cells.items() for box in boxes)
        cards = "nccl" in str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if cards else torch.device("cpu")
        self._owners: dict[Cell, int] | None = None
        self.broken = ""  # why the group is not used any more

    def absent(self, number: int) -> None:
        """Tell the others that this rank is not ready for the round ``number``."""
        if not self.broken:
            self._tried(lambda: self._all_here(number, False))

    def add_up(self, number: int, proof: ShareProof, names: Collection[str]) -> ShareProof:
        """The proof that this rank sends: of all ranks from the first one, and from the others of nothing. ``names``:
        the tensors of the step that change, the same on all ranks.

        It is this rank's own where not all are ready for the round ``number``, or the group has failed. Raises
        ChainError ``tensor-differs`` where a copy of a cell is another than the first rank's that holds it.
        """
        total: list[ShareProof] = [proof]

        def work() -> None:
            if self._all_here(number, True):
                total[0] = self._total(proof, names)

        if not self.broken:
            self._tried(work)
        return total[0]

    def _tried(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (StoreError, RuntimeError, ValueError) as error:
            self.broken = str(error)[:200]

    def _all_here(self, number: int, ready: bool) -> bool:
        """Are all ranks ready, and for the same round?"""
        said = torch.tensor([int(ready), number, -number], dtype=torch.int64, device=self._device)
        self._passed(dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group, async_op=True))
        least, first, last = said.tolist()
        return bool(least) and first == -last

    def _total(self, proof: ShareProof, names: Collection[str]) -> ShareProof:
        mine = {(name, box): sums for name, cells in proof.cells.items() for box, sums in cells.items()}
        if self._owners is None:
            self._owners = self._exchanged()
        owners = self._owners
        every = [cell for cell in owners if cell[0] in names]
        sums = np.zeros((len(every), 2), np.uint64)
        for i, cell in enumerate(every):
            if owners[cell] == self._rank and cell in mine:
                sums[i] = mine[cell]
        there = torch.from_numpy(sums.view(np.int64)).to(self._device)
        self._passed(dist.all_reduce(there, group=self._group, async_op=True))
        found = there.cpu().numpy().view(np.uint64).tolist()
        made: dict[str, dict[Bounds, Sums]] = {}
        for (name, box), (a, b) in zip(every, found, strict=True):
            if mine.get((name, box), (a, b)) != (a, b):
                where, need = f"{name[:80]!r}, {list(box)}"[:160], "the same bits in every copy"
                raise ChainError("tensor-differs", where=where, have="other sums than another rank's", need=need)
            made.setdefault(name, {})[box] = (a, b)
        return ShareProof(made) if self._rank == 0 else ShareProof()

    def _exchanged(self) -> dict[Cell, int]:
        """Which rank counts each cell of all ranks: the first that holds it. In one order on all of them."""
        said = np.frombuffer(json.dumps(self._cells).encode(), np.uint8)
        sizes = torch.zeros(dist.get_world_size(self._group), dtype=torch.int64, device=self._device)
        sizes[self._rank] = len(said)
        self._passed(dist.all_reduce(sizes, group=self._group, async_op=True))
        lengths = sizes.tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(said)] = torch.from_numpy(said.copy())
        into = [torch.zeros(max(lengths), dtype=torch.uint8, device=self._device) for _ in lengths]
        self._passed(dist.all_gather(into, padded.to(self._device), group=self._group, async_op=True))
        owners: dict[Cell, int] = {}
        for rank, (data, size) in enumerate(zip(into, lengths, strict=True)):
            for name, box in json.loads(data[:size].cpu().numpy().tobytes()):
                owners.setdefault((name, tuple((a, b) for a, b in box)), rank)
        return dict(sorted(owners.items()))

    def _passed(self, work: Any) -> None:
        """Wait for a collective. Raises StoreError ``live-lost`` where it does not pass in time."""
        end = time.monotonic() + self._timeout
        while self._device.type != "cpu" and not work.is_completed() and time.monotonic() < end:
            time.sleep(POLL)
        left = max(0.001, end - time.monotonic())
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            have, need = f"no word of another rank [{error}]"[:160], "all ranks of the engine"
            raise StoreError("live-lost", where="the engine's group", have=have, need=need) from error
