"""Every reader as a function of bytes, for hypothesis and atheris: only our own errors may leave it."""

from __future__ import annotations

import json
import struct
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from deltackpt.checkpoint import Checkpoint
from deltackpt.codecs import Entry, plain, planes
from deltackpt.codecs.bits import starts
from deltackpt.codecs.packed import codec as packed_v2
from deltackpt.codecs.packed.jobs import DecodeJob
from deltackpt.codecs.packed.list_index import ListIndex
from deltackpt.codecs.v1 import codec as packed
from deltackpt.codecs.v1 import native
from deltackpt.codecs.v1.tile_index import TileIndex
from deltackpt.errors import DeltackptError
from deltackpt.format import digests, edge, layout, manifest
from deltackpt.patch.apply import decode_step, replace_whole, write_step
from deltackpt.patch.part import Origin, PartReader
from deltackpt.restore.patch_reader import PatchReader
from support.tile_by_tile import PARTS

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "fixtures"
MOST = 1 << 20  # elements of a base that is made up
LAYOUT = (FIXTURES / "valid/layout_of_one_shard.json").read_bytes()


def part(data: bytes) -> None:
    """A part, applied to a base that fits its entries: whole, by ranges, tile by tile, in place, with one outcome."""
    found: list[object] = []
    for read, in_place in [*((read, False) for read in PARTS.values()), (PARTS["streamed"], True)]:
        try:
            found.append(applied(read(data), in_place=in_place))
        except DeltackptError as error:
            found.append(error)
    refused = [isinstance(one, DeltackptError) for one in found]
    assert len(set(refused)) == 1, found
    if isinstance(found[0], DeltackptError):
        raise found[0]
    assert all(one == found[0] for one in found), "other bytes"


def applied(reader: PartReader, *, in_place: bool = False) -> dict[str, bytes]:
    """What a part makes of tensors of every exponent."""
    patch, result = PatchReader([reader]), {}  # type: ignore[arg-type]
    for name in patch.names:
        found = patch.tensor(name)
        entry = found.entries[0]
        base = base_of(entry)
        known = (entry.dtype.name, entry.whole)
        if in_place and base is not None and write_step(base, known, found):
            pass
        elif in_place or base is None or (decoded := decode_step(base, known, found)) is None:
            base, _ = replace_whole(found)
        else:
            decoded.write_to(base.view(decoded.values.dtype))
        result[name] = b"" if base is None else base.tobytes()
    return result


def base_of(entry: Entry) -> np.ndarray | None:
    """Old bytes of every exponent, or None where the tensor is too large to be there."""
    count = int(np.prod(entry.whole, dtype=object)) * entry.dtype.bits // 8
    if entry.removes or count > MOST:
        return None
    return (np.arange(count, dtype=np.uint64) * 2654435761 >> np.uint64(7)).astype(np.uint8)


def table(data: bytes) -> None:
    """A table of version 1 and a payload, in a part whose container is sound: first the table's size, in two bytes."""
    part(wrapped(data, 1))


def table_v2(data: bytes) -> None:
    """The same of version 2."""
    part(wrapped(data, 2))


def wrapped(data: bytes, version: int) -> bytes:
    size = int.from_bytes(data[:2], "little")
    body, payload = data[2 : 2 + size], data[2 + size :]
    rows = {"deltackpt:table": (0, len(body)), "deltackpt:payload": (len(body), len(body) + len(payload))}
    header: dict[str, object] = {"__metadata__": Origin("a" * 32, 1, "b" * 64, "c" * 64).to_metadata(version)}
    for name, (a, b) in rows.items():
        header[name] = {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body + payload


def unwrapped(data: bytes) -> tuple[str, bytes] | None:
    """The target, and what it makes a given part of, if that holds no plain tensors."""
    reader = PartReader(memoryview(data), "seed")
    if len(reader.header.tensors) > 2:
        return None
    body, payload = bytes(reader._bytes("deltackpt:table")), bytes(reader._bytes("deltackpt:payload"))
    target = "table" if reader.version == 1 else "table_v2"
    return target, len(body).to_bytes(2, "little") + body + payload


def digests_object(data: bytes) -> None:
    digests.decode(data, layout.decode(LAYOUT, "layout"), "0" * 64, "fuzz")


def checkpoint(data: bytes) -> None:
    """A shard: the bytes are all of the file."""
    _open({"model.safetensors": data})


def index(data: bytes) -> None:
    _open({"model.safetensors.index.json": data, "1.safetensors": b"\2\0\0\0\0\0\0\0{}"})


def _open(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for path, data in files.items():
            (Path(name) / path).write_bytes(data)
        with Checkpoint.open(name) as found:
            for tensor in found.tensors:
                found.bytes_of(tensor)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "part": part,
    "table": table,
    "table_v2": table_v2,
    "manifest": lambda data: void(manifest.decode(data, "fuzz").encode()),
    "edge": lambda data: void(edge.decode(data, "fuzz").encode()),
    "layout": lambda data: void(layout.decode(data, "fuzz").encode()),
    "digests": digests_object,
    "checkpoint": checkpoint,
    "index": index,
}


def void(_: object) -> None:
    """Nothing."""


def run(target: str, data: bytes) -> str | None:
    """The code that the bytes are refused with; any exception that is not ours is a finding, and leaves."""
    try:
        TARGETS[target](data)
    except DeltackptError as error:
        return error.code
    return None


@contextmanager
def unchecked() -> Iterator[None]:
    """Without checksums, which would keep every mutation from the decoders behind them."""

    def tiles(directory: TileIndex, payload: memoryview, where: str) -> list[memoryview]:
        at = starts(directory.lengths).tolist()
        return [payload[a:b] for a, b in zip(at, at[1:], strict=False)]

    def resealed(index: ListIndex, payload: memoryview, *rest: object) -> DecodeJob:
        at = starts(index.lengths).tolist()
        if at[-1] == len(payload):
            sums = [zlib.crc32(payload[a:b]) for a, b in zip(at, at[1:], strict=False)]
            index = replace(index, checksums=np.array(sums, np.uint32))
        return DecodeJob(index, payload, *rest)  # type: ignore[arg-type]

    with (
        mock.patch.object(packed_v2, "DecodeJob", resealed),
        mock.patch.object(packed, "check", tiles),
        mock.patch.object(native, "check", tiles),
        mock.patch.object(planes, "check"),
        mock.patch.object(plain, "check", lambda detail, data, where: data),
    ):
        yield


def seeds() -> Iterator[tuple[str, bytes]]:
    """(target, bytes) of every vector."""
    for vector in json.loads((FIXTURES / "index.json").read_text()):
        kind, path = vector["kind"], FIXTURES / vector["path"]
        if kind in TARGETS and kind != "checkpoint":
            yield kind, path.read_bytes()
        if kind == "part" and "error" not in vector and (seed := unwrapped(path.read_bytes())) is not None:
            yield seed
        if kind == "checkpoint":
            for file in sorted(path.rglob("*")):
                if file.name.endswith(("safetensors", "index.json")) and file.is_file():
                    yield "index" if file.name.endswith("json") else "checkpoint", file.read_bytes()


def corpus() -> Iterator[tuple[str, bytes]]:
    """(target, bytes) of what coverage-guided runs found worth keeping: each unit takes a reader somewhere new."""
    with tarfile.open(ROOT / "tests/fuzz/corpus.tar.xz") as units:
        for unit in units:
            if (held := units.extractfile(unit)) is not None:
                yield unit.name.partition("/")[0], held.read()
