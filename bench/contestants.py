"""Who takes part in the race of bench/peers.py: each turns a pair of states into bytes, and old values plus bytes into
new ones. All in memory, one function a tensor, over the same threads. What is whose is said in ``whose``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from safetensors import deserialize
from safetensors.numpy import save

from deltackpt.checkpoint import Checkpoint
from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CHOICES, Entry, encode
from deltackpt.interop import slime, slime_write
from deltackpt.interop.changes import from_gaps, to_gaps
from deltackpt.patch.part import Origin, PartReader, PartWriter
from deltackpt.util.parallel import ordered_map

Words = npt.NDArray[Any]
State = dict[str, Words]  # by name: flat words

ORIGIN = Origin("0" * 32, 1, "0" * 64, "0" * 64)


@dataclass(frozen=True)
class Pair:
    """Two checkpoints of the same tensors, open and in the page cache."""

    title: str
    old: Checkpoint
    new: Checkpoint
    changes: int

    def words(self, of: Checkpoint) -> State:
        return {name: of.bytes_of(name).view(f"<u{width_of(t.dtype)}") for name, t in of.tensors.items()}


def width_of(dtype: str) -> int:
    return {"BF16": 2, "F16": 2, "F32": 4, "I64": 8}[dtype]


class Contestant(Protocol):
    name: str
    whose: str

    def encode(self, pair: Pair, threads: int) -> Any:
        """Everything that is sent."""

    def size(self, sent: Any) -> int: ...

    def apply(self, sent: Any, state: State, pair: Pair, threads: int) -> None:
        """Turn the old words in ``state`` into the new ones, in place."""


@dataclass(frozen=True)
class Ours:
    encoding: str

    @property
    def name(self) -> str:
        return f"deltackpt {self.encoding}"

    whose: str = "ours"

    def encode(self, pair: Pair, threads: int) -> bytes:
        def one(name: str) -> tuple[Entry, Any] | None:
            found = difference(name, pair.old, pair.new)
            if found.empty or found.change is None:
                return None
            shape = pair.new.tensors[name].shape
            chosen, encoded = encode(found.change, shape, self.encoding)
            return Entry(name, chosen, found.change.dtype, shape, shape, (0,) * len(shape), encoded.detail), encoded

        writer = PartWriter(ORIGIN)
        for made in ordered_map(one, pair.new.tensors, threads):
            if made is not None:
                writer.add(*made)
        return b"".join(writer.chunks())

    def size(self, sent: bytes) -> int:
        return len(sent)

    def apply(self, sent: bytes, state: State, pair: Pair, threads: int) -> None:
        part = PartReader(memoryview(sent), "part")

        def one(entry: Entry) -> None:
            part.decode(entry, state[entry.name]).write_to(state[entry.name])
            xxhash.xxh3_128_digest(state[entry.name].data)  # a receiver proves what it made

        for _ in ordered_map(one, part.entries, threads):
            pass


@dataclass(frozen=True)
class Slime:
    """slime's second layout by our writer: the frame of each changed tensor, and its xxh3-128."""

    encoding: str
    title: str

    @property
    def name(self) -> str:
        return self.title

    whose: str = "our writer, their layout"

    def encode(self, pair: Pair, threads: int) -> bytes:
        def one(name: str) -> tuple[str, Any, str] | None:
            new = pair.new.bytes_of(name)
            blob = slime_write.encode(self.encoding, pair.old.bytes_of(name), new)
            return None if blob is None else (name, blob, xxhash.xxh3_128_hexdigest(new.data))

        found = [made for made in ordered_map(one, pair.new.tensors, threads) if made is not None]
        return save({name: blob for name, blob, _ in found}, {name: digest for name, _, digest in found})

    def size(self, sent: bytes) -> int:
        return len(sent)

    def apply(self, sent: bytes, state: State, pair: Pair, threads: int) -> None:
        def one(item: tuple[str, Any]) -> None:
            name, tensor = item
            blob = np.frombuffer(tensor["data"], np.uint8)
            update = slime.decode(self.encoding, name, blob, pair.old.tensors[name], None, name)
            data = state[name].view(np.uint8)
            if update.positions is None:
                np.bitwise_xor(data, update.values, out=data)
            elif update.xor:
                data[update.positions] ^= update.values
            else:
                data[update.positions] = update.values
            xxhash.xxh3_128_digest(data.data)  # as ours

        for _ in ordered_map(one, deserialize(sent), threads):
            pass


@dataclass(frozen=True)
class Sparse:
    """Positions and values as tensors of one file, perhaps under zstd: what most systems send.

    ``pack`` and ``unpack`` are given flat positions, the old and the new words (old ones at the positions when
    unpacking), the row length, and make a list of arrays.
    """

    name: str
    whose: str
    pack: Callable[[Words, Words, Words, int], list[Words]]
    unpack: Callable[[list[Words], Words, int], tuple[Words, Words]]
    level: int | None = None

    def encode(self, pair: Pair, threads: int) -> bytes:
        old, new = pair.words(pair.old), pair.words(pair.new)

        def one(name: str) -> tuple[str, list[Words]] | None:
            at = np.flatnonzero(old[name] != new[name])
            if len(at) == 0:
                return None
            return name, self.pack(at, old[name][at], new[name][at], row_of(pair, name))

        found = (made for made in ordered_map(one, pair.new.tensors, threads) if made is not None)
        sent = save({f"{name}.{i}": array for name, arrays in found for i, array in enumerate(arrays)})
        return sent if self.level is None else zstandard.ZstdCompressor(level=self.level).compress(sent)

    def size(self, sent: bytes) -> int:
        return len(sent)

    def apply(self, sent: bytes, state: State, pair: Pair, threads: int) -> None:
        raw = sent if self.level is None else zstandard.ZstdDecompressor().decompress(sent)
        arrays: dict[str, dict[int, Words]] = {}
        kinds = {"U8": "u1", "U16": "<u2", "U32": "<u4", "I32": "<i4", "I64": "<i8", "U64": "<u8"}
        for key, tensor in deserialize(raw):
            name, _, i = key.rpartition(".")
            arrays.setdefault(name, {})[int(i)] = np.frombuffer(tensor["data"], kinds[tensor["dtype"]])

        def one(name: str) -> None:
            parts = [arrays[name][i] for i in range(len(arrays[name]))]
            at, values = self.unpack(parts, state[name], row_of(pair, name))
            state[name][at] = values

        for _ in ordered_map(one, arrays, threads):
            pass


def row_of(pair: Pair, name: str) -> int:
    shape = pair.new.tensors[name].shape
    return shape[-1] if len(shape) > 1 else 1 << 16


def _gaps16(at: Words) -> Words:
    gaps = to_gaps(at)
    return gaps.astype("<u2" if int(gaps.max()) < 1 << 16 else "<u4")


def _nemo(at: Words, old: Words, new: Words, row: int) -> list[Words]:
    return [_gaps16(at), old ^ new]


def _un_nemo(parts: list[Words], state: Words, row: int) -> tuple[Words, Words]:
    at = from_gaps(parts[0], len(state), "")
    return at, state[at] ^ parts[1]


def _pulse(at: Words, old: Words, new: Words, row: int) -> list[Words]:
    """Rows as differences of 8 bits (16 where one is larger), columns as differences within a row of 16."""
    rows, columns = np.divmod(at, row)
    steps = np.diff(rows, prepend=0)
    columns = np.where(steps > 0, columns, np.diff(columns, prepend=0))
    return [
        steps.astype("u1" if int(steps.max()) < 256 else "<u4"),
        columns.astype("<u2" if row <= 1 << 16 else "<u4"),
        new,
    ]


def _un_pulse(parts: list[Words], state: Words, row: int) -> tuple[Words, Words]:
    steps, deltas = parts[0].astype(np.int64), parts[1].astype(np.int64)
    starts = np.flatnonzero(steps > 0)
    total = np.cumsum(deltas)
    ends = np.searchsorted(starts, np.arange(len(steps)), side="right") - 1
    before = np.where(ends >= 0, (total - deltas)[starts[np.maximum(ends, 0)]] if len(starts) else 0, 0)
    return np.cumsum(steps) * row + total - before, parts[2]


CONTESTANTS: tuple[Any, ...] = (
    *(Ours(encoding) for encoding in CHOICES if encoding not in ("nan", "full")),
    Slime("xor", "slime / miles / SGLang xor"),
    Slime("overwrite", "slime / miles / SGLang overwrite"),
    Slime("xor_sparse", "stitch xor_sparse"),
    Sparse(
        "TRL gap_delta, slime v1 deltas",
        "our writer, their layout",
        lambda at, old, new, row: [_gaps16(at), new],
        lambda parts, state, row: (from_gaps(parts[0], len(state), ""), parts[1]),
    ),
    Sparse(
        "slime v1 deltas_zstd",
        "our writer, their layout",
        lambda at, old, new, row: [_gaps16(at), new],
        lambda parts, state, row: (from_gaps(parts[0], len(state), ""), parts[1]),
        1,
    ),
    Sparse(
        "TRL raw, vLLM sparse, verl",
        "our writer, their layout",
        lambda at, old, new, row: [at.astype("<i4"), new],
        lambda parts, state, row: (parts[0], parts[1]),
    ),
    Sparse(
        "prime-rl draft, int64",
        "our writer, their layout",
        lambda at, old, new, row: [at, new],
        lambda parts, state, row: (parts[0], parts[1]),
    ),
    Sparse("PULSE rows and columns, zstd-1", "ours, after their description", _pulse, _un_pulse, 1),
    Sparse("NeMo-RL gaps and xor, zstd-1", "ours, after their description", _nemo, _un_nemo, 1),
)


__all__ = ["CONTESTANTS", "Contestant", "Pair", "State"]
