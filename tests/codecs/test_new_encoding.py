"""An encoding that this library does not know: its class and a line in the registry, and nothing else, take it
everywhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.chains import World
from support.states import FORMS, Form, State, changed, part_of, patched, random_bytes, tree
from support.tile_by_tile import PARTS

from deltackpt.cache import apply_to_cache, open_current
from deltackpt.codecs import CHOICES, CODECS, Change, Decoded, Elements, Encoded, Entry, choices
from deltackpt.codecs.base import Auto, BaseUse, Codec, CodecEntry, Shape
from deltackpt.codecs.registry import Registry
from deltackpt.codecs.types import DecodeBuffer, Source, words
from deltackpt.compaction.fold import fold
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DType, storage_shape
from deltackpt.format.varint import VarintReader, write
from deltackpt.patch.part import PartReader
from deltackpt.report.inspection import inspect_part, inspect_step
from deltackpt.verification import verify_part, verify_repository


@dataclass(frozen=True)
class Run:
    first: int
    changes: int
    checksum: int


class RunCodec(Codec[Run]):
    """One run of elements, each changed by the same exclusive or, which is the payload."""

    name = "run"
    code = 59
    auto = Auto.SPARSE

    def write_detail(self, detail: Run) -> bytes:
        return write([detail.first, detail.changes]) + detail.checksum.to_bytes(4, "little")

    def read_detail(self, reader: VarintReader, dtype: DType, shape: Shape, elements: int) -> Run:
        first = reader.number(elements)
        return Run(first, reader.number(elements - first), int.from_bytes(reader.raw(4), "little"))

    def payload_size(self, entry: CodecEntry[Run]) -> int:
        return entry.dtype.width

    def base_use(self, detail: Run) -> BaseUse:
        return BaseUse.CHANGED

    def encode(self, change: Change, shape: Shape, *, boxed: bool) -> Encoded | None:
        at, masks = change.positions, change.old ^ change.new
        if len(at) == 0 or int(at[-1] - at[0]) != len(at) - 1 or (masks != masks[0]).any():
            return None
        payload = masks[:1].tobytes()
        return Encoded(Run(int(at[0]), len(at), zlib.crc32(payload)), [payload])

    def decode(
        self,
        entry: CodecEntry[Run],
        base: Elements | None,
        source: Source,
        where: str,
        buffer: DecodeBuffer | None = None,
    ) -> Decoded:
        assert base is not None
        self.check(entry, source, where)
        first, count = entry.detail.first, entry.detail.changes
        mask = words(source.payload(), entry.dtype.width)[0]
        return Decoded(np.arange(first, first + count), base[first : first + count] ^ mask)

    def check(self, entry: CodecEntry[Run], source: Source, where: str) -> None:
        if zlib.crc32(source.payload()) != entry.detail.checksum:
            raise FormatError("tensor-checksum", where=where, have="other bytes", need="the crc32 of the table")


@pytest.fixture
def known() -> Iterator[None]:
    with CODECS.including(RunCodec()):
        yield


def start(rows: int = 64) -> State:
    data = np.random.default_rng(3).standard_normal((rows, 64), np.float32).view(np.uint16)[:, 1::2].copy()
    return {"w": ("BF16", (rows, 64), data.tobytes())}


def flipped(state: State, first: int, last: int) -> State:
    """Rows of `w` with their lowest bit, and another, the other way around."""
    dtype, shape, data = state["w"]
    bits = np.frombuffer(data, np.uint16).reshape(shape).copy()
    bits[first:last] ^= 5
    return {"w": (dtype, shape, bits.tobytes())}


def encodings(world: World, names: list[str]) -> set[str]:
    parts = [PartReader(memoryview((world.root / "repo" / name).read_bytes()), name) for name in names]
    return {entry.encoding for part in parts for entry in part.entries}


def test_it_goes_everywhere(tmp_path: Path, known: None) -> None:
    """Written by `auto` and by name, applied anew and in a cache, verified, inspected and folded."""
    world, cache, state = World(tmp_path), tmp_path / "cache", start()
    done = [world.publish(state)]
    for first, last in ((0, 8), (8, 16), (16, 30), (2, 5)):
        apply_to_cache(world.repo, cache)
        state = flipped(state, first, last)
        done.append(world.publish(state))
    state = {"w": changed(np.random.default_rng(4), state["w"], 0.02)}
    done.append(world.publish(state, encoding="run"))  # no run: the smallest of the others
    links = [m.link for m in world.repo.log()][::-1]
    for link in links:
        world.check(link)
    apply_to_cache(world.repo, cache)
    assert tree(open_current(cache)[0]) == world.trees[links[-1].id]
    patches = [[f.name for f in world.repo.load(link).patch or ()] for link in links]
    assert [encodings(world, names) for names in patches[1:]] == [*[{"run"}] * 4, {"packed"}]

    part = tmp_path / "repo" / patches[1][0]
    assert verify_part(part).ok
    for report in (inspect_part(part), inspect_step(world.repo, 1)):
        (row,) = report.tensors
        assert (row.encoding, row.changed, row.elements) == ("run", 8 * 64, 64 * 64)
    assert inspect_step(world.repo, 1).one_ulp == 0.0  # 5 is not 1
    made = fold(world.repo, links[0], links[3])
    assert encodings(world, [f.name for f in made.files]) == {"run"}
    assert [hop.fold for hop in world.repo.resolve(links[3], have=links[0]).patches] == [True]
    world.check(links[3])
    assert verify_repository(world.repo).ok


def test_a_cache_that_is_behind(tmp_path: Path, known: None) -> None:
    world, cache, state = World(tmp_path), tmp_path / "cache", start()
    for step in range(6):
        world.publish(state)
        if step < 2:
            apply_to_cache(world.repo, cache)
        state = flipped(state, step, step + 3)
    assert apply_to_cache(world.repo, cache).patches == 4
    assert tree(open_current(cache)[0]) == world.trees[world.repo.find().id]


def test_every_reader_of_a_part(tmp_path: Path, known: None) -> None:
    world, old = World(tmp_path), start()
    new = flipped(old, 3, 9)
    world.publish(old)
    world.publish(new)
    (file,) = world.repo.load(world.repo.find()).patch or ()
    raw = (tmp_path / "repo" / file.name).read_bytes()
    assert patched(old, raw) == new
    for read in PARTS.values():
        found = read(raw).tensor("w")
        result = np.frombuffer(old["w"][2], np.uint16).copy()
        found.decode(result.copy()).write_to(result)
        assert result.tobytes() == new["w"][2]
    damaged = bytearray(raw)
    damaged[-1] ^= 1  # the last byte of the payload
    (tmp_path / "damaged").write_bytes(damaged)
    assert [finding.code for finding in verify_part(tmp_path / "damaged").findings] == ["tensor-checksum"]


def test_without_it(tmp_path: Path) -> None:
    """What it wrote is refused by name, not misread, once it is gone; nothing of it is left."""
    world, state = World(tmp_path), start()
    with CODECS.including(RunCodec()):
        assert choices() == (*CHOICES, "run")
        world.publish(state)
        world.publish(flipped(state, 0, 8))
    assert choices() == CHOICES
    (file,) = world.repo.load(world.repo.find()).patch or ()
    (finding,) = verify_part(tmp_path / "repo" / file.name).findings
    assert finding.code == "encoding-unknown"


def test_names_and_codes_are_used_once() -> None:
    with pytest.raises(ValueError, match="'packed'"), CODECS.including(CODECS["packed"]):
        pass
    with pytest.raises(ValueError, match="59"):
        Registry(2, [RunCodec(), RunCodec()], storage_shape)
    assert len(CODECS) == len({codec.code for codec in CODECS})


@pytest.mark.parametrize("encoding", CHOICES[1:])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I64"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_needed_of_the_base(encoding: str, dtype: str, form: Form) -> None:
    """Old elements that an entry says it does not need may be anything."""
    rng = np.random.default_rng(11)
    old: State = {"x": (dtype, (96, 80), random_bytes(rng, dtype, (96, 80)))}
    new = {"x": changed(rng, old["x"], 0.1)}
    part = PartReader(memoryview(part_of(old, new, encoding, form=form)), "part")
    (entry,) = part.entries
    base, target = (np.frombuffer(s["x"][2], f"<u{entry.dtype.width}") for s in (old, new))
    expected = target[base != target]
    given = base.copy()
    if entry.base_use is not BaseUse.ALL:
        given[base == target] = 0x55
    if entry.base_use is BaseUse.NOTHING:
        given[:] = 0xAA
        assert part.decode(entry, None).values.tobytes() == part.decode(entry, given).values.tobytes()
    found = part.decode(entry, given)
    values = found.values
    if found.positions is None:
        assert (values == target).all()
    else:
        assert values[np.argsort(found.positions)].tobytes() == expected.tobytes()
    assert Entry.removal("x").base_use is BaseUse.NOTHING
