"""What ranks hold of a state of the tests, and a source of parts that counts what is asked of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.manifest import File
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import TensorDigest, of_tensor
from deltackpt.patch.index import Span
from deltackpt.shares.bounds import Bounds, Held, of_run
from deltackpt.shares.tensors import HeldTensor, HeldTensors
from support.states import State


def file_of(part: bytes, name: str = "part") -> File:
    return File(name, len(part), hashlib.sha256(part).hexdigest())


@dataclass
class CountedSource:
    """Parts in memory. ``asked``: every span, in any order."""

    parts: dict[str, bytes]
    parallel: int = 3
    url: str = "memory"
    asked: list[Span] = field(default_factory=list)

    def part(self, file: File) -> memoryview:
        self.asked.append((0, file.size))
        return memoryview(self.parts[file.name])

    def ranges(self, file: File, spans: Sequence[Span]) -> list[memoryview]:
        self.asked += spans
        data = memoryview(self.parts[file.name])
        return [data[start:end] for start, end in spans]

    @property
    def bytes(self) -> int:
        return sum(end - start for start, end in self.asked)


def shape_of_state(state: State, name: str) -> tuple[int, ...]:
    dtype, shape, _ = state[name]
    return storage_shape(DTYPES[dtype], shape)


def words(state: State, name: str) -> np.ndarray:
    dtype, _, data = state[name]
    return np.frombuffer(data, uint(DTYPES[dtype].width)).reshape(shape_of_state(state, name))


def holding(state: State, held: Held) -> HeldTensors:
    """A rank with the words of its boxes."""
    found = {}
    for name, boxes in held.items():
        array = words(state, name)
        mine = {box: np.array(array[tuple(slice(a, b) for a, b in box)]) for box in boxes}
        found[name] = HeldTensor(DTYPES[state[name][0]], array.shape, mine)
    return HeldTensors(found)


def even(n: int, rank: int, ranks: int) -> tuple[int, int]:
    """A rank's part of an axis, in even shards, the last ones shorter."""
    step = -(-n // ranks)
    return min(n, rank * step), min(n, (rank + 1) * step)


def split_on(state: State, axis: int, rank: int, ranks: int) -> Held:
    """Every tensor cut on one axis; what has none of it is on all ranks."""
    found: dict[str, list[Bounds]] = {}
    for name in state:
        shape = shape_of_state(state, name)
        box = [(0, n) for n in shape]
        if len(shape) > 1:
            box[axis % len(shape)] = even(shape[axis % len(shape)], rank, ranks)
        found[name] = [tuple(box)]
    return found


def flat_shards(state: State, rank: int, ranks: int) -> Held:
    """Runs of the flat tensors, which end inside of rows."""
    found: dict[str, list[Bounds]] = {}
    for name in state:
        shape = shape_of_state(state, name)
        found[name] = of_run(shape, *even(int(np.prod(shape, dtype=int)), rank, ranks))
    return found


def same(tensors: HeldTensors, state: State) -> bool:
    """Does a rank hold the bits of a state?"""
    return all(
        np.array_equal(array, words(state, name)[tuple(slice(a, b) for a, b in box)])
        for name, tensor in tensors.tensors.items()
        for box, array in tensor.boxes.items()
    )


def tables(state: State) -> dict[str, Tensor]:
    return {name: Tensor(name, dtype, shape, 0, len(data)) for name, (dtype, shape, data) in state.items()}


def digests(state: State, names: Iterable[str] | None = None) -> dict[str, TensorDigest]:
    return {
        name: of_tensor(np.frombuffer(state[name][2], np.uint8), DTYPES[state[name][0]])
        for name in (state if names is None else names)
    }
