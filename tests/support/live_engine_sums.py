"""What the ranks of an engine do that add up their sums by torch.distributed; run by `support.ranks.spawn`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deltackpt.errors import ChainError
from deltackpt.live import join
from deltackpt.live.engine_sums import EngineSums
from deltackpt.shares import ShareProof
from support.live import TOKEN
from support.live_ranks import digest, note

TOP = (1 << 64) - 3
BOXES = [((start, start + 2), (0, 4)) for start in range(0, 8, 2)]
ALL = ((0, 3),)


def proof_of(rank: int, other: int = 0) -> ShareProof:
    """Rows of ``a`` of its own, and a copy of all of ``b``; ``c`` is of one rank."""
    cells: dict[str, Any] = {"a": {BOXES[rank]: (TOP + rank, 5 * rank)}, "b": {ALL: (9 + other, 10)}}
    if rank == 2:
        cells["c"] = {ALL: (7, 8)}
    return ShareProof(cells)


def cells_of(rank: int) -> dict[str, list[Any]]:
    return {name: list(cells) for name, cells in proof_of(rank).cells.items()}


def ranks_that_add_up(rank: int, world: int, root: Path, *, device: str) -> None:
    """Several rounds, of all tensors and of some; then one with a copy that differs."""
    sums = EngineSums(dist.new_group(), world, 60.0, cells_of(rank))
    everything = {"a": dict(zip(BOXES, ((TOP + r, 5 * r) for r in range(4)), strict=True)), "b": {ALL: (9, 10)}}
    everything["a"] = {box: (a % (1 << 64), b) for box, (a, b) in everything["a"].items()}
    mine = ShareProof(
        {n: {box: (a % (1 << 64), b) for box, (a, b) in c.items()} for n, c in proof_of(rank).cells.items()}
    )
    for number, names in enumerate((("a", "b", "c"), ("b",), ("a",), ())):
        some = ShareProof({name: cells for name, cells in mine.cells.items() if name in names})
        found = sums.add_up(number, some, names)
        want = {**everything, "c": {ALL: (7, 8)}}
        assert found == (ShareProof({n: want[n] for n in want if n in names}) if rank == 0 else ShareProof())
        assert not sums.broken
    other = ShareProof({"b": {ALL: (9 + (rank == 3), 10)}})
    if rank == 3:
        with pytest.raises(ChainError) as error:
            sums.add_up(7, other, ["b"])
        assert error.value.code == "tensor-differs"
        assert "'b'" in error.value.where
    else:
        sums.add_up(7, other, ["b"])
    dist.barrier()


def ranks_that_fail(rank: int, world: int, root: Path, *, device: str) -> None:
    """One that is not ready, one of another round, and one that never comes."""
    sums, mine = EngineSums(dist.new_group(), world, 3.0, cells_of(rank)), ShareProof({"b": {ALL: (1, 2)}})
    if rank == 1:
        sums.absent(1)
    else:
        assert sums.add_up(1, mine, ["b"]) == mine
    assert sums.add_up(2 + (rank == 2), mine, ["b"]) == mine
    assert sums.add_up(5, mine, ["b"]) == (mine if rank == 0 else ShareProof())
    assert not sums.broken
    dist.barrier()
    if rank != 1:
        began = time.monotonic()
        assert sums.add_up(6, mine, ["b"]) == mine
        assert sums.broken
        assert sums.add_up(7, mine, ["b"]) == mine  # without waiting again
        assert time.monotonic() - began < 60
    (root / f"done-{rank}").touch()
    while len(list(root.glob("done-*"))) < world:  # a rank that is gone would be told at once
        time.sleep(0.05)


def grouped_slices(rank: int, world: int, root: Path, address: str, layout: str, steps: int, *, device: str) -> None:
    """A rank that holds slices, in a group of the engine's ranks."""
    from support.live_layouts import LAYOUTS

    model = LAYOUTS[layout](rank, world)
    options: dict[str, Any] = {"engine": "e", "rank": (rank, world), "load": model.load_weights, "timeout": 90.0}
    receiver = join(model, address, token=TOKEN, **options).with_group(dist.new_group())
    while receiver.step != steps - 1:
        if (found := receiver.receive(1.0)) is not None:
            note(root / f"sums-{rank}-{found.step}", way=found.way, digest=digest(model))
    receiver.close()
