"""vLLM's patches in checkpoint coordinates: exported, in memory or as a file.

A sparse patch is a list of flat positions and values of one floating-point tensor. Its receiver marks what does not
change with NaN, so a change to a NaN is sent as a whole tensor, and so does any dtype that holds none. One call takes
sparse ones or dense ones, never both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import State, differences
from deltackpt.errors import ChainError
from deltackpt.interop.changes import changes
from deltackpt.interop.files import Tensors, placed, write_tensors
from deltackpt.interop.protocol import Bytes

SPARSE: Final = ("BF16", "F16", "F32", "F64")
NAN: Final = {"BF16": (0x7F80, 0x7FFF), "F16": (0x7C00, 0x7FFF), "F32": (0x7F800000, 0x7FFFFFFF)}
INDICES, VALUES = ".indices", ".values"


@dataclass(frozen=True)
class VllmTensor:
    """One tensor: bit patterns ``values`` at flat ``positions`` (int32, or int64 past 2^31), None: all of them."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors calls it
    values: npt.NDArray[Any]
    positions: npt.NDArray[Any] | None


@dataclass(frozen=True)
class Call:
    """What one call of the receiver takes: all sparse, or all dense."""

    sparse: bool
    patches: tuple[VllmTensor, ...]


def calls(old: State, new: State, threads: int = 1) -> Iterator[Call]:
    """From one state to another: a call of the sparse patches, and one of the dense ones, where there are any.

    Raises ChainError ``foreign-carry`` for a tensor that is added, removed, retyped or reshaped: the receiver's
    tensors are allocated.
    """
    sparse, dense = [], []
    for found in differences(old, new, threads):
        change = found.change
        if found.empty:
            continue
        if change is None or change.base is None:
            have = f"{found.name[:80]!r}, which is new, gone, or of another dtype or shape"
            raise ChainError(
                "foreign-carry", where="vllm", have=have, need="the same tensors, reloaded from a directory"
            )
        name, shape, dtype = found.name, tuple(new.tensors[found.name].shape), change.dtype.name
        if dtype not in SPARSE or has_nan(change.new, dtype):
            dense.append(VllmTensor(name, shape, dtype, change.target, None))
        else:
            wide = "<i4" if change.elements <= 1 << 31 else "<i8"
            sparse.append(VllmTensor(name, shape, dtype, change.new, change.positions.astype(wide)))
    for is_sparse, patches in ((True, sparse), (False, dense)):
        if patches:
            yield Call(is_sparse, tuple(patches))


def has_nan(words: npt.NDArray[Any], dtype: str) -> bool:
    """Is any of the words, [n] of a dtype of SPARSE, a NaN?"""
    if dtype == "F64":
        return bool(np.isnan(words.view("<f8")).any())
    infinity, mask = NAN[dtype]
    return bool(((words & words.dtype.type(mask)) > infinity).any())


class VllmWriter:
    """`step_000007.safetensors`: `{name}.indices` and `{name}.values`, and whole tensors under their own names.

    vLLM has no file of its own for them: this one is ours, and `read` returns the calls of one.
    """

    consecutive = True
    anchored = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def whole(self, number: int, new: Checkpoint) -> None:
        """Never called: the engine has loaded a directory."""
        raise AssertionError("the engine has loaded a directory")

    def delta(self, number: int, old: Checkpoint, new: Checkpoint, threads: int) -> str | None:
        """The calls of a step as one safetensors file. Raises ChainError ``foreign-carry`` where none can carry it."""
        if (reason := next(changes(old, new), None)) is not None:
            need = "the same tensors, reloaded from a directory"
            raise ChainError("foreign-carry", where=f"step {number}", have=reason, need=need)
        rows: list[tuple[str, str, tuple[int, ...], Bytes]] = []
        for call in calls(old, new, threads):
            for p in call.patches:
                if p.positions is None:
                    rows.append((p.name, p.dtype, p.shape, p.values.view(np.uint8)))
                    continue
                wide = "I32" if p.positions.itemsize == 4 else "I64"
                rows.append((p.name + INDICES, wide, (len(p.positions),), p.positions.view(np.uint8)))
                rows.append((p.name + VALUES, p.dtype, (len(p.positions),), p.values.view(np.uint8)))
        with placed(self._root / f"step_{number:06d}.safetensors") as draft:
            write_tensors(draft, rows, {"format": "deltackpt-vllm", "version": "1", "step": str(number)})
        return None


def read(path: Path, base: State) -> list[Call]:
    """The calls of a file. ``base`` is the state before: shapes are not in the file."""
    tensors = Tensors.open(path)
    sparse, dense = [], []
    for name, t in tensors.tensors.items():
        if name in base.tensors:
            dense.append(VllmTensor(name, t.shape, t.dtype, tensors.bytes_of(name), None))
        elif (stem := name.removesuffix(INDICES)) in base.tensors and stem + VALUES in tensors.tensors:
            positions, known = tensors.words(name, {"I32": "<i4", "I64": "<i8"}), base.tensors[stem]
            dtype = tensors.tensors[stem + VALUES].dtype
            values = tensors.bytes_of(stem + VALUES).view(f"<u{8 if dtype == 'F64' else 4 if dtype == 'F32' else 2}")
            sparse.append(VllmTensor(stem, tuple(known.shape), dtype, values, positions))
    return [Call(kind, tuple(found)) for kind, found in ((True, sparse), (False, dense)) if found]
