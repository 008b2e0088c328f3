"""What the ranks of an engine say of a step, each of what it holds, and whether all of that together proves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

from deltackpt.errors import ChainError
from deltackpt.format import state_digest
from deltackpt.format.manifest import Link
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.shares import Bounds, ShareProof

Cells = Mapping[str, Mapping[Any, Any]]  # as `ShareProof.cells`
Digests = Mapping[str, TensorDigest]


@dataclass(frozen=True)
class Said:
    """What a rank says of all that it holds: its ``cells``, but for the tensors that it knows to be ``wrong``."""

    cells: Cells
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class SliceClaim:
    """``before``: the sums of what the rank holds, as it was read; ``after``: of what the changes lead to. The rest is
    the same on all ranks: both steps, their ``table``, and the digests of both."""

    before: ShareProof
    after: ShareProof
    steps: tuple[Link, Link]
    table: Mapping[str, Tensor]
    digests: tuple[Digests, Digests]

    @property
    def told(self) -> tuple[Link, Link, Cells, Cells]:
        """What the other ranks hear."""
        return *self.steps, self.before.cells, self.after.cells

    def refuted(self, said: Sequence[tuple[Link, Link, Cells, Cells] | None]) -> str:
        """Why the claims of all ranks do not prove the step; empty if they do. All ranks find the same.

        Of the changed tensors every element counts, as it was and as it will be: a step up from words that are all one
        off would be as long, and sums that are right before say nothing of what was read."""
        heard = [one for one in said if one is not None]
        if len(heard) < len(said) or any(one[:2] != self.steps for one in heard):
            return "the ranks did not prepare one step"
        start, end = self.steps
        wrong, open = judged([one[2] for one in heard], self.table, self.digests[0])
        if wrong:
            return f"{wrong[0]}: the engine's memory is not that of step {start.step}"
        if open:
            return f"{open[0]}: no rank holds some of its elements"
        wrong, open = judged([one[3] for one in heard], self.table, self.digests[1])
        if wrong or open:
            return f"{[*wrong, *open][0]}: what was decoded is not step {end.step}"
        return ""


def judged(said: Sequence[Cells], table: Mapping[str, Tensor], digests: Digests) -> tuple[list[str], list[str]]:
    """The tensors whose cells, of all ranks together, do not have the sums of a step; and those of which no rank holds
    some elements."""
    together: dict[str, dict[Bounds, Sums]] = {}
    wrong, open = set[str](), list[str]()
    for cells in said:
        for name, boxes in cells.items():
            mine = together.setdefault(name, {})
            for box, sums in boxes.items():
                if mine.setdefault(box, sums) != sums:  # two copies of a cell
                    wrong.add(name)
    for name, boxes in together.items():
        covered = _covered(table[name].dtype, tuple(table[name].shape), tuple(boxes)) if name in table else None
        if covered is False:
            open.append(name)
        elif covered is None or reduce(state_digest.add, boxes.values(), state_digest.ZERO) != digests[name].sums:
            wrong.add(name)
    return sorted(wrong), sorted({*open} - wrong)


@lru_cache(maxsize=1 << 14)
def _covered(dtype: str, shape: tuple[int, ...], boxes: tuple[Bounds, ...]) -> bool | None:
    """Are some boxes all of a tensor? None for such as overlap, or do not lie in it. The engine is paused when this is
    asked, and asked the same at every step."""
    tensor, some = Tensor("", dtype, shape, 0, 0), ShareProof({"": dict.fromkeys(boxes, state_digest.ZERO)})
    try:
        return not some.check({"": tensor}, {"": TensorDigest(state_digest.ZERO, b"")}, "").open
    except ChainError:
        return None
