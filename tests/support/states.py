"""Checkpoints for tests: states as plain dicts of raw bytes, changed at random, and written as real safetensors files.

Functions and not fixtures, since hypothesis calls a test many times; all randomness comes from a seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import numpy as np
import pytest

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import CODECS, Change, Decoded, Encoded, Entry, Registry, decode, decode_into, select
from deltackpt.codecs.types import Source
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, nbytes, ordered, storage_shape, uint, unordered
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.patch.encode import encode_entry
from deltackpt.patch.part import Origin, PartReader, PartWriter
from deltackpt.restore.patch_reader import PatchReader
from deltackpt.restore.replay import Replay
from support import v1_writer

Value: TypeAlias = tuple[str, tuple[int, ...], bytes]
State: TypeAlias = dict[str, Value]

INDEX = "model.safetensors.index.json"
ORIGIN = Origin("ab" * 16, 7, "cd" * 32, "ef" * 32)
FLOATS = [name for name, dtype in DTYPES.items() if dtype.sign_magnitude]


# Files


def make_checkpoint(
    path: Path, state: State, *, shards: int = 1, side: Mapping[str, bytes] | None = None, stem: str = "model"
) -> Path:
    """Write a checkpoint directory; more than one shard come with an index. Tensors keep the order of the dict."""
    path.mkdir(parents=True)
    names = [f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    if shards == 1:
        names = [f"{stem}.safetensors"]
    else:
        weight_map = {name: names[i % shards] for i, name in enumerate(state)}
        index = {"metadata": {"total_size": sum(len(data) for *_, data in state.values())}, "weight_map": weight_map}
        (path / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))
    for i, shard in enumerate(names):
        (path / shard).write_bytes(file_bytes(dict(list(state.items())[i::shards])))
    for name, data in (side or {}).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def file_bytes(state: State) -> bytes:
    """One safetensors file, its tensors in the order of the dict and so not always aligned."""
    tensors, at = [], 0
    for name, (dtype, shape, data) in state.items():
        tensors.append(Tensor(name, dtype, shape, at, at + len(data)))
        at += len(data)
    return build_header(tensors, {"format": "pt"}) + b"".join(data for *_, data in state.values())


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a folder, as ``diff -r`` sees it."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


# States


def random_bytes(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Any bits for integers; for floats mostly weights as they are, with NaNs, infinities and -0.0 in between."""
    kind = DTYPES[dtype]
    size = nbytes(kind, shape)
    data = rng.integers(0, 256, size, np.uint8)
    if kind.sign_magnitude and kind.width > 1:
        words = data.view(uint(kind.width))
        start, count = kind.exponent
        bias = (1 << (count - 1)) - 1
        exponent = np.clip(bias - rng.geometric(0.4, len(words)), 0, None).astype(words.dtype)
        usual = rng.random(len(words)) < 0.95
        field = words.dtype.type(((1 << count) - 1) << start)
        words[usual] = (words & ~field | exponent << words.dtype.type(start))[usual]
    return data.tobytes()


def random_state(rng: np.random.Generator, tensors: int = 8) -> State:
    """Tensors of any dtype; among them a larger matrix, experts, a scalar, an empty one, and two tied ones."""
    state: State = {}
    for dtype, shape in [("BF16", (67, 190)), ("BF16", (3, 16, 24)), ("F32", (40, 9)), ("F32", ()), ("I64", (5, 0, 3))]:
        state[_new_name(rng, state)] = (dtype, shape, random_bytes(rng, dtype, shape))
    state["tied.weight"] = state["tied.copy"] = ("F16", (6, 7), random_bytes(rng, "F16", (6, 7)))
    while len(state) < tensors:
        state[_new_name(rng, state)] = _random_value(rng)
    names = list(state)
    rng.shuffle(names)
    return {name: state[name] for name in names}


def mutate(rng: np.random.Generator, state: State) -> Iterator[State]:
    """Next states without end: changed elements, and now and then a tensor added, removed, resized or retyped."""
    while True:
        state = dict(state)
        for name in list(state):
            if rng.random() < 0.6:
                state[name] = changed(rng, state[name], float(rng.choice([0.002, 0.02, 0.3, 1.0])))
        kind = rng.choice(["add", "remove", "resize", "retype", "swap", "none", "same"])
        names = sorted(state)
        name = names[rng.integers(len(names))]
        if kind == "add":
            state[_new_name(rng, state)] = _random_value(rng)
        elif kind == "remove" and len(state) > 2:
            del state[name]
        elif kind == "resize":
            dtype, shape, _ = state[name]
            shape = (*shape[:-1], shape[-1] + 8) if shape else (2,)
            state[name] = (dtype, shape, random_bytes(rng, dtype, shape))
        elif kind == "retype":
            dtype, shape, data = state[name]
            others = [d.name for d in DTYPES.values() if d.bits == DTYPES[dtype].bits and d.name != dtype]
            state[name] = (str(rng.choice(others)) if others else dtype, shape, data)
        elif kind == "swap":  # other files, the same tensors
            state = dict(reversed(state.items()))
        yield state


def changed(rng: np.random.Generator, value: Value, share: float) -> Value:
    """The value with about a share of its elements other than before: most by one ULP, some by any bits."""
    dtype, shape, data = value
    kind = DTYPES[dtype]
    words = np.frombuffer(data, uint(kind.width)).copy()
    at = np.flatnonzero(rng.random(len(words)) < share)
    old = words[at]
    if kind.sign_magnitude:
        moved = unordered(ordered(old, kind.width) + rng.choice([-1, 1], len(at)).astype(f"<i{kind.width}"), kind.width)
    else:
        moved = old + np.ones(len(at), old.dtype)
    anything = rng.integers(0, 256, old.nbytes, np.uint8).view(old.dtype)
    words[at] = np.where(rng.random(len(at)) < 0.9, moved, anything)
    return dtype, shape, words.tobytes()


def _random_value(rng: np.random.Generator) -> Value:
    dtype = str(rng.choice(sorted(DTYPES)))
    shape = [(8,), (40, 24), (2, 3, 8), (0, 8), (17, 64), (1, 8)][rng.integers(6)]  # whole bytes for F4 and F6 too
    return dtype, shape, random_bytes(rng, dtype, shape)


def _new_name(rng: np.random.Generator, state: State) -> str:
    stem = ("layers.{}.weight", "ä.{}", "t{}", "t{}.indices", "重み/{}", "a b\\{}")[rng.integers(6)]
    return next(name for n in range(int(rng.integers(9)), 1 << 20) if (name := stem.format(n)) not in state)


# Through the codecs, without any file


@dataclass(frozen=True)
class Meta:
    dtype: str
    shape: tuple[int, ...]


class Memory:
    """A state that `difference` and `Replay` can read; bytes are read-only, as those of a mapped file are."""

    def __init__(self, state: State) -> None:
        self.tensors = {name: Meta(dtype, shape) for name, (dtype, shape, _) in state.items()}
        self._state = state

    def bytes_of(self, name: str) -> np.ndarray:
        return np.frombuffer(self._state[name][2], np.uint8)

    def release(self, name: str, start: int = 0, end: int | None = None) -> None: ...


@dataclass(frozen=True)
class Form:
    """How a part is written: in which version, and, in version 1, with near lists of tensors below so many elements."""

    version: int = 2
    scan_limit: int = 1 << 20

    @property
    def codecs(self) -> Registry:
        return CODECS if self.version == CODECS.version else v1_writer.CODECS

    @contextmanager
    def used(self) -> Iterator[None]:
        """`select` chooses among the encodings of the form."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(v1_writer.PACKED, "scan_limit", self.scan_limit)
            patch.setattr(select, "CODECS", self.codecs)
            patch.setattr(select, "FULL", self.codecs["full"])
            yield


V2, V1_NEAR, V1_FAR = Form(), Form(1), Form(1, 0)
FORMS = (V2, V1_NEAR, V1_FAR)


def encode(
    change: Change, shape: tuple[int, ...], encoding: str = "auto", *, form: Form = V2, boxed: bool = False
) -> tuple[str, Encoded]:
    """`select.encode` of a form."""
    with form.used():
        return select.encode(change, shape, encoding, boxed=boxed)


def part_of(old: State, new: State, encoding: str = "auto", *, form: Form = V2) -> bytes:
    """The part that takes ``old`` to ``new``."""
    writer, names = PartWriter(ORIGIN, form.version), {*old, *new}
    for name in sorted(names, key=str.encode):
        found = difference(name, Memory(old), Memory(new))
        if found.change is None:
            writer.add(Entry.removal(name, form.version))
        elif not found.empty:
            with form.used():
                entry, encoded = encode_entry(name, found.change, new[name][1], names, encoding)
            writer.add(replace(entry, version=form.version), encoded)
    return b"".join(writer.chunks())


def patched(old: State, *parts: bytes) -> State:
    """``old`` with the parts of one step applied."""
    readers = [PartReader(memoryview(part), f"part {i}") for i, part in enumerate(parts)]
    patch = PatchReader(readers)  # type: ignore[arg-type]
    names = {*old, *patch.names}
    replay = Replay(Memory(old), [patch], SimpleNamespace(tensors=dict.fromkeys(names)))  # type: ignore[arg-type]
    new = {}
    for name in names:
        *_, (data, known) = replay.history(name)
        if data is not None:
            new[name] = (*known, data.tobytes())
    return new


def both_ways(entry: Entry, base: np.ndarray, source: Source) -> Decoded | str:
    """What an entry decodes to, or the code of its error: the same where it is written to a copy of ``base``."""
    words, into = base.copy(), None
    try:
        decode_into(entry, words, source, "here")
    except FormatError as error:
        into = error.code
    try:
        found = decode(entry, base, source, "here")
    except FormatError as error:
        assert into == error.code
        return error.code
    expected = base.copy()
    found.write_to(expected)
    assert into is None
    assert (words == expected).all()
    return found


def entries_of(part: bytes) -> dict[str, Entry]:
    return {entry.name: entry for entry in PartReader(memoryview(part), "part").entries}


def value(dtype: str, shape: tuple[int, ...], words: np.ndarray) -> Value:
    """A value from its storage elements."""
    data = np.ascontiguousarray(words.astype(uint(DTYPES[dtype].width))).tobytes()
    assert len(data) == nbytes(DTYPES[dtype], shape)
    return dtype, shape, data


def elements(dtype: str, shape: tuple[int, ...]) -> int:
    """Storage elements of a shape."""
    return int(np.prod(storage_shape(DTYPES[dtype], shape), dtype=np.int64))
