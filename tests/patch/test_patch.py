"""One part of a patch: the file, its origin, boxes, and what is wrong with files that are no part."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from support.states import (
    ORIGIN,
    V1_NEAR,
    Memory,
    changed,
    entries_of,
    file_bytes,
    mutate,
    part_of,
    patched,
    random_bytes,
    random_state,
    value,
)

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import Entry, encode
from deltackpt.errors import ChainError, DeltackptError, FormatError
from deltackpt.format.dtypes import DTYPES, nbytes, uint
from deltackpt.format.safetensors_header import Tensor, build_header, parse_header
from deltackpt.patch.part import PAYLOAD, TABLE, Origin, PartReader, PartWriter

seeds = st.integers(0, 2**32 - 1)


def parts_by_name(part: bytes) -> dict:
    return dict(deserialize(part))


def pair(seed: int):
    rng = np.random.default_rng(seed)
    old = random_state(rng)
    return old, next(mutate(rng, old))


# The file


@given(seeds, st.sampled_from(["auto", "index", "nan", "full"]))
def test_a_part_is_a_safetensors_file(seed, encoding):
    old, new = pair(seed)
    part = part_of(old, new, encoding)
    found = parts_by_name(part)
    for name, entry in entries_of(part).items():
        if entry.encoding == "full":
            assert name not in found  # its bytes are payload
        elif entry.encoding == "index":
            kind = uint(DTYPES[new[name][0]].width)
            words = np.frombuffer(old[name][2], kind).copy()
            indices = np.frombuffer(found[name + ".indices"]["data"], "<u4")
            words[indices] = np.frombuffer(found[name + ".values"]["data"], kind)
            assert words.tobytes() == new[name][2]
        elif entry.encoding == "nan":
            kind = DTYPES[new[name][0]]
            words = np.frombuffer(found[name]["data"], uint(kind.width))
            before = np.frombuffer(old[name][2], uint(kind.width))
            assert np.where(words == kind.nan, before, words).tobytes() == new[name][2]
            assert (found[name]["dtype"], tuple(found[name]["shape"])) == new[name][:2]


def test_plain_tensors_are_aligned():
    dtypes = ["U8", "I64", "BF16", "F32", "F4", "F8_E4M3", "C64"]
    rng = np.random.default_rng(0)
    new = {f"t{i}": (dtype, (8,), random_bytes(rng, dtype, (8,))) for i, dtype in enumerate(dtypes)}
    part = part_of({}, new)
    header = parse_header(part[: 8 + int.from_bytes(part[:8], "little")], len(part), "part")
    for tensor in header.tensors:
        assert (header.data_start + tensor.start) % DTYPES[tensor.dtype].width == 0


def test_the_same_change_gives_the_same_bytes_in_any_order_of_work():
    old, new = pair(1)
    part = part_of(old, new)
    reader = PartReader(memoryview(part), "part")
    assert part_of(dict(reversed(old.items())), dict(reversed(new.items()))) == part
    assert [e.name for e in reader.entries] == sorted((e.name for e in reader.entries), key=str.encode)


def test_origin():
    part = part_of({}, {"x": ("U8", (2,), b"ab")})
    assert PartReader(memoryview(part), "part").origin == ORIGIN
    metadata = ORIGIN.to_metadata()
    assert Origin.from_metadata(metadata, "part") == ORIGIN

    def code(**fields):
        with pytest.raises(FormatError) as error:
            Origin.from_metadata({k: v for k, v in {**metadata, **fields}.items() if v is not None}, "part")
        return error.value.code

    assert code(deltackpt="3") == code(deltackpt=None) == "version-unknown"
    for field in ("repository", "step", "parent", "base"):
        assert code(**{field: None}) == code(**{field: ""}) == "part-metadata"
    for step in ("1" + "0" * 15 + "1", "1000000000000001", "-1", "+1", "01", "1.0", "٣", "²", "9" * 19, " 1"):
        assert code(step=step) == "part-metadata"


def test_a_part_of_nothing():
    part = part_of({}, {})
    assert PartReader(memoryview(part), "part").entries == []
    assert patched({"x": ("U8", (1,), b"a")}, part) == {"x": ("U8", (1,), b"a")}


# Boxes


def boxes(shape: tuple[int, ...], cuts: tuple[int, ...]):
    """The (offset, shape) of a grid of boxes."""
    edges = [np.linspace(0, n, c + 1).astype(int).tolist() for n, c in zip(shape, cuts, strict=True)]
    for corner in product(*(zip(e, e[1:], strict=False) for e in edges)):
        yield tuple(a for a, _ in corner), tuple(b - a for a, b in corner)


def boxed_parts(old, new, cuts, encoding, parts=1) -> list[bytes]:
    """Every box of one tensor encoded by itself, spread over parts, as ranks would write them."""
    dtype, shape, _ = new
    kind = DTYPES[dtype]
    arrays = [np.frombuffer(v[2], uint(kind.width)).reshape(shape) if v else None for v in (old, new)]
    writers = [PartWriter(ORIGIN) for _ in range(parts)]
    for i, (offset, size) in enumerate(boxes(shape, cuts)):
        cut = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        before, after = (None if a is None else value(dtype, size, a[cut]) for a in arrays)
        found = difference("x", Memory({"x": before} if before else {}), Memory({"x": after}))
        if not found.empty:
            chosen, encoded = encode(found.change, size, encoding, boxed=True)
            entry = Entry("x", chosen, kind, size, shape, offset, encoded.detail)
            writers[i % parts].add(entry, encoded)
    return [b"".join(writer.chunks()) for writer in writers]


@pytest.mark.parametrize("encoding", ["packed", "planes", "full"])
@pytest.mark.parametrize(
    ("shape", "cuts"), [((64, 96), (2, 3)), ((7, 40), (1, 4)), ((200,), (3,)), ((4, 9, 8), (4, 2, 1))]
)
@pytest.mark.parametrize("parts", [1, 3])
def test_boxes_of_a_change(encoding, shape, cuts, parts):
    rng = np.random.default_rng(7)
    old = ("BF16", shape, random_bytes(rng, "BF16", shape))
    new = changed(rng, old, 0.1)
    files = boxed_parts(old, new, cuts, encoding, parts)
    assert patched({"x": old}, *files) == {"x": new}
    assert all(e.boxed for file in files for e in entries_of(file).values())


@pytest.mark.parametrize("dtype", ["F64", "I64"])
def test_boxes_of_8_bytes(dtype):
    rng = np.random.default_rng(8)
    old = (dtype, (64, 64), random_bytes(rng, dtype, (64, 64)))
    new = changed(rng, old, 0.05)
    assert patched({"x": old}, *boxed_parts(old, new, (2, 2), "auto")) == {"x": new}


def test_boxes_of_a_new_tensor():
    rng = np.random.default_rng(9)
    new = ("F32", (16, 24), random_bytes(rng, "F32", (16, 24)))
    files = boxed_parts(None, new, (2, 2), "full", 2)
    assert patched({}, *files) == {"x": new}
    assert patched({"x": ("F32", (2,), bytes(8))}, *files) == {"x": new}
    with pytest.raises(ChainError) as error:
        patched({}, files[0])
    assert error.value.code == "base-shape"


# What does not fit


@pytest.mark.parametrize("encoding", ["packed", "planes", "index", "nan"])
@pytest.mark.parametrize("there", [None, ("BF16", (32, 2)), ("F16", (8, 8)), ("BF16", (8, 9))])
def test_a_change_of_a_tensor_that_is_not_there(encoding, there):
    rng = np.random.default_rng(10)
    old = ("BF16", (8, 8), random_bytes(rng, "BF16", (8, 8)))
    part = part_of({"x": old}, {"x": changed(rng, old, 0.3)}, encoding)
    assert entries_of(part)["x"].encoding == encoding
    with pytest.raises(ChainError) as error:
        patched({} if there is None else {"x": (*there, bytes(nbytes(DTYPES[there[0]], there[1])))}, part)
    assert error.value.code == "base-shape"


@pytest.mark.parametrize("encoding", ["packed", "full"])
def test_a_tensor_in_two_parts(encoding):
    rng = np.random.default_rng(11)
    old = ("BF16", (8, 8), random_bytes(rng, "BF16", (8, 8)))
    part = part_of({"x": old}, {"x": changed(rng, old, 0.3)}, encoding)
    with pytest.raises(DeltackptError):
        patched({"x": old}, part, part)


# Defects


def rebuilt(part: bytes, *, drop=(), add=(), metadata=None, table=None) -> bytes:
    """The part with other tensors or metadata."""
    header = parse_header(part[: 8 + int.from_bytes(part[:8], "little")], len(part), "part")
    data = {
        t.name: (t.dtype, t.shape, part[header.data_start + t.start : header.data_start + t.end])
        for t in header.tensors
    }
    for name in drop:
        del data[name]
    for name, *rest in add:
        data[name] = tuple(rest)
    if table is not None:
        data[TABLE] = ("U8", (len(table),), table)
    at, tensors = 0, []
    for name, (dtype, shape, raw) in data.items():
        tensors.append(Tensor(name, dtype, shape, at, at + len(raw)))
        at += len(raw)
    head = build_header(tensors, header.metadata if metadata is None else metadata)
    return head + b"".join(raw for *_, raw in data.values())


def code(part: bytes) -> str:
    with pytest.raises(FormatError) as error:
        PartReader(memoryview(part), "part")
    assert error.value.exit_code == 3
    return error.value.code


def test_defects():
    old = {"a": ("I64", (40, 40), bytes(40 * 40 * 8)), "b": ("BF16", (4,), bytes(8))}
    new = {"a": (*old["a"][:2], old["a"][2][:-1] + b"\1"), "b": ("BF16", (2,), b"abcd"), "c": ("U8", (), b"x")}
    part = part_of(old, new)
    assert {n: e.encoding for n, e in entries_of(part).items()} == {"a": "index", "b": "full", "c": "full"}
    for drop in (TABLE, PAYLOAD, "a.indices", "a.values"):
        assert code(rebuilt(part, drop=[drop])) == "part-tensors"
    assert code(rebuilt(part, add=[("b", "BF16", (2,), b"abcd")])) == "part-tensors"
    part = part_of(old, new, form=V1_NEAR)  # of which `b` and `c` are plain tensors
    assert {n: e.encoding for n, e in entries_of(part).items()} == {"a": "index", "b": "full", "c": "full"}
    PartReader(memoryview(rebuilt(part)), "part")
    for drop in (TABLE, PAYLOAD, "a.indices", "a.values", "b"):
        assert code(rebuilt(part, drop=[drop])) == "part-tensors"
    assert code(rebuilt(part, add=[("d", "U8", (1,), b"x")])) == "part-tensors"
    assert code(rebuilt(part, add=[("b", "F16", (2,), b"abcd")])) == "part-tensors"
    assert code(rebuilt(part, add=[("b", "BF16", (1, 2), b"abcd")])) == "part-tensors"
    assert code(rebuilt(part, add=[("a.values", "I64", (2,), bytes(16))])) == "part-tensors"
    assert code(rebuilt(part, add=[("a.indices", "I32", (1,), bytes(4))])) == "part-tensors"
    assert code(rebuilt(part, add=[(PAYLOAD, "U8", (1,), b"x")])) == "payload-length"
    assert code(rebuilt(part, add=[(PAYLOAD, "U8", (1, 0), b"")])) == "part-tensors"
    assert code(rebuilt(part, table=b"")) == "table-short"
    assert code(rebuilt(part, metadata={})) == "version-unknown"
    assert code(file_bytes(old)) == "version-unknown"
    assert code(part + b"x") == "offsets-end"
    assert code(part[:-1]) == "offsets-end"
    assert code(part[:20]) == "header-truncated"
    assert code(b"") == "header-truncated"


def test_reserved_names():
    writer = PartWriter(ORIGIN)
    found = difference("deltackpt:x", Memory({}), Memory({"deltackpt:x": ("U8", (1,), b"a")}))
    chosen, encoded = encode(found.change, (1,))
    writer.add(Entry("deltackpt:x", chosen, DTYPES["U8"], (1,), (1,), (0,), encoded.detail), encoded)
    assert code(b"".join(writer.chunks())) == "name-refused"


def test_the_longest_names():
    rng = np.random.default_rng(12)
    name = "x" * 1024
    old = {name: ("I64", (64, 64), random_bytes(rng, "I64", (64, 64)))}
    new = {name: changed(rng, old[name], 0.01)}
    for encoding in ("auto", "index", "full"):
        assert patched(old, part_of(old, new, encoding)) == new


@given(seeds)
def test_any_bit_of_a_part_may_flip(seed):
    """Without the manifest's sha256, some flips cannot be seen; none may do worse than an error of ours."""
    rng = np.random.default_rng(seed)
    old, new = pair(seed)
    part = part_of(old, new, str(rng.choice(["auto", "index", "nan", "planes"])))
    payload_seen = total = 0
    header = parse_header(part[: 8 + int.from_bytes(part[:8], "little")], len(part), "part")
    (table,) = (t for t in header.tensors if t.name == TABLE)
    begin, end = header.data_start + table.start, header.data_start + table.end
    regions = {"header": range(header.data_start), "table": range(begin, end)}
    regions["data"] = [i for i in range(header.data_start, len(part)) if not begin <= i < end]
    for region, places in regions.items():
        for _ in range(15 if len(places) else 0):
            damaged = bytearray(part)
            damaged[places[rng.integers(len(places))]] ^= 1 << int(rng.integers(8))
            seen = not decodes(bytes(damaged), old)
            payload_seen += seen and region == "data"
            total += region == "data"
    assert payload_seen == total  # every byte of a tensor is under a checksum


def decodes(part: bytes, old) -> bool:
    try:
        reader = PartReader(memoryview(part), "part")
        for entry in reader.entries:
            reader.check(entry)
            kind = entry.dtype
            if (entry.dtype.name, entry.whole) == old.get(entry.name, (None,))[:2] and not entry.boxed:
                reader.decode(entry, np.frombuffer(old[entry.name][2], uint(kind.width)))
    except DeltackptError:
        return False
    return True
