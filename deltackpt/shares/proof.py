"""The proof of a step that many ranks hold together: each adds up what it holds, and the sums of all are the tensor's.

Ranks that hold the same elements hold the same cells (`deltackpt.shares.overlap.cells`): a cell counts once, however
many hold copies, and every copy is compared with the others. The sums are those of the state digest (FORMAT section
"State digest"): a step's changes advance them, so a rank looks at all that it holds once, when it joins.

What advances proves what was read and decoded, and not that the rank's memory is what it was: `packed` and `planes` are
steps from the old bits, so a word that something else wrote to may go on by the right difference from the wrong bits.
`ShareProof.of`, which looks at all words again, finds that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from deltackpt.codecs.boxes import inside, overlap
from deltackpt.codecs.types import Elements
from deltackpt.errors import ChainError, FormatError
from deltackpt.format import state_digest
from deltackpt.format.dtypes import DTYPES, storage_shape
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.shares.bounds import Bounds, Shape, offset_of, shape_of, size, whole
from deltackpt.shares.tensors import HeldTensors

_HINT = "One of the ranks has other bits than the step. Load its weights again."


@dataclass(frozen=True)
class ProofReport:
    """``proven``: tensors whose every element was counted, and whose sums are the step's. ``open``: those of which
    no rank holds some elements, which sums cannot prove."""

    proven: tuple[str, ...]
    open: tuple[str, ...]


@dataclass(frozen=True)
class ShareProof:
    """The sums of what some ranks hold: of every cell of every tensor, two lanes modulo 2^64. Proofs add up."""

    cells: Mapping[str, Mapping[Bounds, Sums]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: HeldTensors, cells: Mapping[str, Sequence[Bounds]]) -> ShareProof:
        """Of all words that a rank holds; ``cells``: what it holds, cut as all ranks cut it."""
        found = {}
        for name, boxes in cells.items():
            shape = tensors.tensors[name].shape
            sums = (state_digest.of_box(_words(tensors, name, box), offset_of(box), shape) for box in boxes)
            found[name] = dict(zip(boxes, sums, strict=True))
        return cls(found)

    def after(self, name: str, shape: Shape, change: tuple[npt.NDArray[np.int64], Elements, Elements]) -> ShareProof:
        """The proof once elements of a tensor of storage shape ``shape`` change.

        ``change``: flat positions in the tensor, int64 [n], in any order, old words and new ones [n].
        """
        positions, old, new = change
        order = np.argsort(positions, kind="stable")
        positions, old, new = positions[order], old[order], new[order]
        boxes = self.cells.get(name, {})
        cells = {}
        for box, sums in boxes.items():
            if box == whole(shape):
                mine: Any = slice(None)
            else:
                mine = inside(positions, shape, offset_of(box), shape_of(box))
            delta = state_digest.of_change(*map(np.ascontiguousarray, (positions[mine], old[mine], new[mine])))
            cells[box] = state_digest.add(sums, delta)
        return ShareProof({**self.cells, name: cells})

    def gained(self, name: str, gains: Mapping[Bounds, Sums]) -> ShareProof:
        """The proof once the sums of some cells of a tensor gain what a change adds to them."""
        cells = {**self.cells.get(name, {})}
        for box, sums in gains.items():
            cells[box] = state_digest.add(cells[box], sums)
        return ShareProof({**self.cells, name: cells})

    def __add__(self, other: ShareProof) -> ShareProof:
        """Of both. Raises ChainError ``tensor-differs`` where two copies of a cell differ."""
        found = dict(self.cells)
        for name, cells in other.cells.items():
            mine = found.get(name, {})
            for box, sums in cells.items():
                if mine.get(box, sums) != sums:
                    where, need = f"{name[:80]!r}, {_text(box)}", "the same bits in every copy"
                    have = f"sums {_hex(sums)} and {_hex(mine[box])}"
                    raise ChainError("tensor-differs", where=where, have=have, need=need, hint=_HINT)
            found[name] = {**mine, **cells}
        return ShareProof(found)

    def check(self, tensors: Mapping[str, Tensor], need: Mapping[str, TensorDigest], where: str) -> ProofReport:
        """Compare with a step: its tensors, and the digests of each.

        Raises ChainError ``tensor-differs`` for sums that are not the step's, and for cells that overlap, or do not
        lie in a tensor of the step.
        """
        proven, missing = list[str](), list[str]()
        for name, cells in self.cells.items():
            at = f"{where}, {name[:80]!r}"
            if name not in tensors:
                raise ChainError("tensor-differs", where=at, have="a tensor that the step has not", need="its tensors")
            shape = storage_shape(DTYPES[tensors[name].dtype], tensors[name].shape)
            _check_cells(list(cells), shape, at)
            if sum(map(size, cells)) < math.prod(shape):
                missing.append(name)
                continue
            total = state_digest.ZERO
            for sums in cells.values():
                total = state_digest.add(total, sums)
            if total != need[name].sums:
                have, wanted = f"sums {_hex(total)} over all ranks", f"the step's {_hex(need[name].sums)}"
                raise ChainError("tensor-differs", where=at, have=have, need=wanted, hint=_HINT)
            proven.append(name)
        return ProofReport(tuple(proven), tuple(missing))

    def to_dict(self) -> dict[str, list[list[Any]]]:
        """For JSON: by tensor a list of cells, each the (start, stop) of every axis and the two sums, in hex."""
        return {
            name: [[[list(axis) for axis in box], f"{a:016x}", f"{b:016x}"] for box, (a, b) in cells.items()]
            for name, cells in self.cells.items()
        }

    @classmethod
    def from_dict(cls, found: Any, where: str) -> ShareProof:
        """The inverse, of what a peer sent. Raises FormatError ``json-syntax`` for anything else."""
        try:
            return cls({str(name): dict(_cell(*cell) for cell in cells) for name, cells in found.items()})
        except (AttributeError, TypeError, ValueError) as error:
            have = f"something else ({error})"[:120]
            raise FormatError("json-syntax", where=where, have=have, need="a proof of shares") from error


def _words(tensors: HeldTensors, name: str, box: Bounds) -> Elements:
    """Of a box that is held, where they are if they are there in one piece."""
    place = tensors.tensors[name].boxes.get(box)
    return place if isinstance(place, np.ndarray) else tensors.words_of(name, box)


def _cell(box: Any, a: Any, b: Any) -> tuple[Bounds, Sums]:
    bounds = tuple((start, stop) for start, stop in box)
    if not all(type(n) is int and 0 <= n < 1 << 62 for axis in bounds for n in axis):
        raise ValueError("a box")
    if not all(type(lane) is str and len(lane) == 16 for lane in (a, b)):
        raise ValueError("sums")
    return bounds, (int(a, 16), int(b, 16))


def _check_cells(boxes: Sequence[Bounds], shape: Shape, where: str) -> None:
    """Disjoint boxes of the tensor, or ChainError ``tensor-differs``."""
    for box in boxes:
        if len(box) != len(shape) or any(not 0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=False)):
            have = f"a cell {_text(box)} outside of it"
            raise ChainError("tensor-differs", where=where, have=have, need=f"cells of {list(shape)}", hint=_HINT)
    held = [box for box in boxes if size(box)]
    first, end = (np.array([[axis[i] for axis in box] for box in held], np.int64) for i in (0, 1))
    if held and overlap(first, end):
        raise ChainError("tensor-differs", where=where, have="cells that overlap", need="each element once", hint=_HINT)


def _hex(sums: Sums) -> str:
    return f"{sums[0]:016x} {sums[1]:016x}"


def _text(box: Bounds) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in box)}]"[:120]
