"""spec/decode.py was made from the spec alone; it restores what the library writes, byte for byte."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.states import (
    FORMS,
    ORIGIN,
    Memory,
    changed,
    make_checkpoint,
    mutate,
    part_of,
    random_bytes,
    random_state,
    tree,
)
from support.vectors import refused
from support.vectors import second as the_second

from deltackpt.checkpoint.diff import difference
from deltackpt.codecs import Entry, encode
from deltackpt.format.dtypes import DTYPES
from deltackpt.patch.part import PartWriter
from deltackpt.publish.write import AnchorPolicy, write

SPEC = Path(__file__).parents[2] / "spec"
DECODER = sorted(SPEC.glob("decode*.py"))
NEVER = AnchorPolicy(ratio=float("inf"))
ENCODINGS = ["auto", "packed", "planes", "index", "nan", "full"]


second = the_second()


def second_state(state):
    """A state of tests/states.py as the second decoder holds it."""
    found = {}
    for name, (dtype, shape, data) in state.items():
        dtype = second.DTYPES[dtype]
        found[name] = second.Tensor(dtype, list(shape), second.as_elements(data, dtype))
    return found


def raw(state):
    return {name: (t.dtype.name, tuple(t.shape), t.elements.tobytes()) for name, t in state.items()}


# Repositories


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_step_of_a_repository(tmp_path, encoding):
    """Tensors are added, removed, resized and retyped; shards and side files come, change and go."""
    rng = np.random.default_rng(ENCODINGS.index(encoding))
    state, trees = random_state(rng, 12), []
    states = mutate(rng, state)
    for step in range(6):
        side = {"config.json": b"{}", "vocab/bytes.txt": b"step %d" % (step // 2), "empty": b""}
        if step == 3:
            side.pop("config.json")
        path = make_checkpoint(tmp_path / f"in{step}", state, shards=(1, 3, 3, 2, 2, 1)[step], side=side)
        trees.append(tree(path))
        # Step 4 is both: an anchor and a patch.
        anchor = AnchorPolicy(now=True) if step == 4 else NEVER
        write(path, tmp_path / "repo", encoding=encoding, anchor=anchor)
        state = next(states)
    for step, files in enumerate(trees):
        second.restore(tmp_path / "repo", step, tmp_path / f"out{step}")
        assert tree(tmp_path / f"out{step}") == files


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_all_dtypes_and_odd_shapes(tmp_path, encoding):
    rng = np.random.default_rng(1)
    shapes = [(), (8,), (1, 8), (5, 0, 8), (0,), (20, 24), (3, 5, 16)]
    state = {
        f"{dtype}{len(shape)}.{i}": (dtype, shape, random_bytes(rng, dtype, shape))
        for dtype in DTYPES
        for i, shape in enumerate(shapes)
        if shape or DTYPES[dtype].bits % 8 == 0
    }
    write(make_checkpoint(tmp_path / "in0", state), tmp_path / "repo")
    for step, share in enumerate([0.02, 0.8], 1):
        state = {name: changed(rng, value, share) for name, value in state.items()}
        path = make_checkpoint(tmp_path / f"in{step}", state)
        write(path, tmp_path / "repo", encoding=encoding, anchor=NEVER)
    for step in range(3):
        second.restore(tmp_path / "repo", step, tmp_path / f"out{step}")
        assert tree(tmp_path / f"out{step}") == tree(tmp_path / f"in{step}")


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8", "I16"])
def test_large_tensors_are_cut_into_tiles_and_chunks(dtype):
    """More changes than one tile takes, on a grid that does not divide the shape; more elements than one chunk."""
    rng = np.random.default_rng(2)
    old = {
        name: (dtype, shape, random_bytes(rng, dtype, shape))
        for name, shape in (("m", (151, 997)), ("e", (3, 51, 499)))
    }
    for share in (0.2, 0.7):
        new = {name: changed(rng, value, share) for name, value in old.items()}
        for encoding in ("packed", "planes"):
            for form in FORMS:
                part = second.parse_part(part_of(old, new, encoding, form=form))
                assert {second.ENCODINGS[e.encoding] for e in part.entries} == {encoding}
                assert encoding == "planes" or any(e.detail.grid.tiles > 4 for e in part.entries)
                assert raw(second.apply_patch(second_state(old), [part])) == new


def test_an_unchanged_step_and_many_refs(tmp_path):
    state = random_state(np.random.default_rng(3))
    path = make_checkpoint(tmp_path / "in", state)
    write(path, tmp_path / "repo", ref="other", step=7)
    write(path, tmp_path / "repo", ref="other", step=9, anchor=NEVER)
    second.restore(tmp_path / "repo", 9, tmp_path / "out", "other")
    assert tree(tmp_path / "out") == tree(path)
    assert refused(second.restore, tmp_path / "repo", 8, tmp_path / "no", "other") == "step-missing"
    assert refused(second.restore, tmp_path / "repo", 6, tmp_path / "no", "other") == "step-missing"
    assert refused(second.restore, tmp_path / "repo", 9, tmp_path / "no") == "ref-missing"
    assert refused(second.restore, tmp_path / "repo", 9, tmp_path / "no", "../refs/other") == "ref-name"
    assert refused(second.restore, tmp_path, 9, tmp_path / "no") == "repository-missing"
    assert refused(second.restore, tmp_path / "repo", 9, tmp_path / "out", "other") == "output-exists"
    assert not (tmp_path / "no").exists()


# Boxes


def boxed_part(old, new, cuts, encoding, which=lambda i: True):
    """A part with a box for each piece of the tensor `x`, as a rank would write it."""
    (dtype, shape, _), kind, writer = new, DTYPES[new[0]], PartWriter(ORIGIN)
    words = [np.frombuffer(v[2], f"<u{kind.width}").reshape(shape) if v else None for v in (old, new)]
    for i, at in enumerate(np.ndindex(*cuts)):
        if not which(i):
            continue
        low = tuple(d * a // c for d, a, c in zip(shape, at, cuts, strict=True))
        high = tuple(d * (a + 1) // c for d, a, c in zip(shape, at, cuts, strict=True))
        size = tuple(b - a for a, b in zip(low, high, strict=True))
        cut = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        before, after = ({} if w is None else {"x": (dtype, size, w[cut].tobytes())} for w in words)
        found = difference("x", Memory(before), Memory(after))
        chosen, encoded = encode(found.change, size, encoding, boxed=True)
        assert chosen == encoding
        writer.add(Entry("x", chosen, kind, size, shape, low, encoded.detail), encoded)
    return second.parse_part(b"".join(writer.chunks()))


@pytest.mark.parametrize("encoding", ["packed", "planes", "full"])
@pytest.mark.parametrize(
    ("shape", "cuts"), [((64, 96), (2, 3)), ((9, 41), (2, 4)), ((200,), (3,)), ((4, 9, 8), (4, 2, 1))]
)
def test_boxes(encoding, shape, cuts):
    rng = np.random.default_rng(4)
    old = ("BF16", shape, random_bytes(rng, "BF16", shape))
    new = changed(rng, old, 0.1)
    whole = boxed_part(old, new, cuts, encoding)
    assert all(e.boxed for e in whole.entries)
    assert raw(second.apply_patch(second_state({"x": old}), [whole])) == {"x": new}
    halves = [boxed_part(old, new, cuts, encoding, which) for which in (lambda i: i % 2, lambda i: i % 2 == 0)]
    assert raw(second.apply_patch(second_state({"x": old}), halves)) == {"x": new}


def test_boxes_that_make_a_tensor_have_to_cover_it_once():
    rng = np.random.default_rng(5)
    new = ("F32", (16, 24), random_bytes(rng, "F32", (16, 24)))
    whole = boxed_part(None, new, (2, 2), "full")
    some = boxed_part(None, new, (2, 2), "full", lambda i: i < 3)
    assert raw(second.apply_patch({}, [whole])) == {"x": new}
    assert refused(second.apply_patch, {}, [some]) == "base-shape"
    old = second_state({"x": new})
    assert refused(second.apply_patch, old, [whole, some]) == "boxes-overlap"
    assert raw(second.apply_patch(old, [some])) == {"x": new}
    other = second_state({"x": ("F32", (2,), bytes(8))})
    assert raw(second.apply_patch(other, [whole])) == {"x": new}
    packed = boxed_part(new, changed(rng, new, 0.5), (2, 2), "packed")
    assert refused(second.apply_patch, other, [packed]) == "base-shape"


# The examples in the spec


CHANGES = {5: 0x3C06, 13: 0x3C01, 27: 0x3C1A}
BEFORE = "13d5ecec8a0c5f61f84d36b19ee5fb0679a350e5fe6bcc100bfbfda35378828c"
AFTER = "2700b837ca112cadd4fb30b3e59bb2e1171c58bd8b2606c7f1f522b84d1c5fdc"


def test_the_examples_of_the_state_digest():
    words = np.arange(0x3C00, 0x3C20, dtype="<u2")
    assert second.sums_of(words) == [0xFB1DEB3A7829AB42, 0x637375D1669AEA4F]
    assert second.state_digest([("w", "BF16", [4, 8], second.sums_of(words))]) == BEFORE
    for i, word in CHANGES.items():
        words[i] = word
    assert second.state_digest([("w", "BF16", [4, 8], second.sums_of(words))]) == AFTER
    one = np.zeros(5000, "u1")
    one[4096] = 1
    assert second.sums_of(one) == [0x41ADCD63A888F4CF, 0xF715A5B2B73F4724]
    assert second.state_digest([]) == "005adbd7f7147ee37d48af1e9a9c55ee82723cd4233764cc8aa553fb0286342c"
    minus_zero = np.array([1 << 63], "<u8")
    assert second.sums_of(minus_zero) == [0x60E4D20080000000, 0x88B9AB7200000000]


def test_the_registry_has_the_codes_that_are_used():
    known = set(re.findall(r"^\| `([a-z0-9-]+)` \| [a-z]+ \|", (SPEC / "REGISTRY.md").read_text(), re.MULTILINE))
    text = "".join(path.read_text() for path in DECODER)
    used = re.findall(r'(?:need|Refused|number)\([^\n]*?"([a-z0-9]+(?:-[a-z0-9]+)+)"', text)
    assert len(set(used)) > 50
    formats = {f"deltackpt-{kind}" for kind in ("layout", "digests", "edge", "statement", "keys")}
    assert set(used) - formats <= known


# What is damaged, or was made to be


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damaged_parts_are_refused(encoding, monkeypatch):
    """With checksums, nothing else than the original is accepted; without, nothing else than `Refused` is raised."""
    rng = np.random.default_rng(6)
    old = random_state(rng, 10)
    new = next(mutate(rng, old))
    part = part_of(old, new, encoding)
    state = second_state(old)

    def run(data):
        second.apply_patch(state, [second.parse_part(data)])

    for at in rng.integers(0, len(part), 20):
        assert refused(run, part[:at]) is not None
    codes = set()
    unchecked = second.need

    def need(condition, code, why=""):
        if code not in ("tensor-checksum", "tile-checksum"):
            unchecked(condition, code, why)

    monkeypatch.setattr(second, "need", need)
    monkeypatch.setattr(second.decode_v1, "need", need)
    body = 8 + int.from_bytes(part[:8], "little")
    spans = second.open_safetensors(part)[1]
    places = [(spans[second.TABLE].start, spans[second.TABLE].end), (0, len(part) - body), (-body, 0)]
    for i in range(100):
        damaged = bytearray(part)
        at = body + int(rng.integers(*places[(0, 0, 0, 1, 1, 2)[i % 6]]))
        damaged[at] = int(rng.choice([0, 1, 127, 128, 255, damaged[at] ^ (1 << int(rng.integers(8)))]))
        codes.add(refused(run, bytes(damaged)))
    assert len(codes) > 2


def hex_part(table, payload=b"", tensors=(), version="2"):
    """A part with any table."""
    metadata = {"deltackpt": version, "repository": "a" * 32, "step": "1", "parent": "b" * 64, "base": "c" * 64}
    header, at = {"__metadata__": metadata}, 0
    for name, data in ((second.TABLE, table), (second.PAYLOAD, payload), *tensors):
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + table + payload + b"".join(data for _, data in tensors)


HUGE = "ffffffffffffffff3f"  # 2^62 - 1


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("", "table-short"),
        ("00", None),
        ("0000", "table-long"),
        ("8000", "number-form"),
        ("ff" * 10, "number-form"),
        ("818040", "number-limit"),
        ("01 00 00 01 78 00", None),
        ("01 01 00 01 78 00", "number-limit"),
        ("01 00 01 01 78 00", "number-limit"),
        ("02 00 00 02 6178 00 01 01 01 79 00", None),
        ("02 00 00 02 6178 00 01 02 01 62 00", "number-limit"),
        ("01 00 00 ffffffffffffffff7f", "number-limit"),
        ("01 00 00 00 00", "name-refused"),
        ("01 00 00 01 ff 00", "name-refused"),
        ("01 00 00 0a 64656c7461636b70743a 00", "name-refused"),
        ("01 00 00 01 78 80", "box-outside"),
        ("01 00 00 01 78 06", "encoding-unknown"),
        ("01 00 00 01 78 40", "table-repeat"),
        ("01 00 00 01 78 41", "table-repeat"),
        ("02 00 00 01 77 00 00 00 01 78 41 00 00000000", "table-repeat"),
        ("02 00 00 01 77 01 05 01 00 00 00000000 00 00 01 78 c1", "table-repeat"),
        ("02 00 00 01 77 01 05 01 00 00 00000000 00 00 01 78 40", "table-repeat"),
        ("02 00 00 01 77 01 05 01 00 00 00000000 00 00 01 78 41 00 00000000", None),
        ("01 00 00 01 78 01 00", "dtype-unknown"),
        ("01 00 00 01 78 01 0f 21", "shape-overflow"),
        (f"01 00 00 01 78 01 0f 02 {HUGE} {HUGE}", "shape-overflow"),
        ("01 00 00 01 78 01 02 01 03 00 00000000", "shape-bits"),
        ("01 00 00 01 78 81 0f 01 02 02 00", "box-outside"),
        ("01 00 00 01 78 81 0f 01 02 03 02", "box-outside"),
        ("01 00 00 01 78 81 02 01 02 04 00", "box-outside"),
        ("01 00 00 01 78 02 05 01 02 00 00000000", "encoding-dtype"),
        ("01 00 00 01 78 82 0f 01 02 03 00 00 00000000", "encoding-boxed"),
        ("01 00 00 01 78 83 0f 01 02 03 00 00 00000000", "encoding-boxed"),
        ("01 00 00 01 78 04 14 00", "encoding-dtype"),
        ("01 00 00 01 78 04 0f 01 08 81 00 01 01", "grid"),
        ("01 00 00 01 78 04 0f 01 08 81 02 01 01", "grid"),
        ("01 00 00 01 78 04 0f 01 08 81 01 09 01", "grid"),
        ("01 00 00 01 78 04 0f 01 08 21", "number-limit"),
        ("01 00 00 01 78 04 0f 01 08 40", "number-limit"),
        ("01 00 00 01 78 04 0f 01 08 81 01 01 01 01 01 00000000", "grid"),
        ("01 00 00 01 78 04 0f 01 08 01 01 03 01 00000000", "padding"),
        ("01 00 00 01 78 04 0f 01 08 02 01 01 01 00000000", "number-form"),
        ("01 00 00 01 78 04 0f 01 08 01 01 00 01 00000000", "number-form"),
        ("01 00 00 01 78 04 0f 01 08 00 01 00 00000000", None),
        (f"01 00 00 01 78 04 05 01 {HUGE} 01 01", "grid"),
        ("01 00 00 01 78 04 05 01 ffffff7f 81 01 ffff7f 01", "grid"),
        ("01 00 00 01 78 04 02 02 02 08 81 02 01 01", "grid"),
        ("01 00 00 01 78 04 0f 01 08 01 00", "number-limit"),
        ("01 00 00 01 78 04 0f 01 08 01 21", "number-limit"),
        ("01 00 00 01 78 04 05 01 08 01 02 01", "number-limit"),
        ("01 00 00 01 78 04 0f 01 08 20 01 01000080 01 00000000", "number-limit"),
        ("01 00 00 01 78 04 0f 02 05 01 82 04 01 01" + "aa" + "01" * 4 + "00" * 16, "count-outside"),
        ("01 00 00 01 78 04 0f 01 08 02 11 69 09 01 00000000", "count-outside"),
        ("01 00 00 01 78 04 0f 01 08 01 01 01 00 00000000", "tile-short"),
        (f"01 00 00 01 78 05 0f 01 {HUGE[:-2]}1f 00", "table-short"),
        ("02 00 00 01 78 00 00 00 01 77 00", "table-order"),
        ("02 00 00 01 78 00 01 00 00 00", "table-order"),
        ("01 00 00 01 78 01 05 01 03 00 00000000", "payload-length"),
        ("01 00 00 01 78 03 05 01 03 00 00000000", "part-tensors"),
        ("01 00 00 01 78 81 05 01 03 04 00 00 00000000", "payload-length"),
    ],
)
def test_tables(table, code):
    assert refused(second.parse_part, hex_part(bytes.fromhex(table))) == code


@pytest.mark.parametrize(
    ("table", "code"),
    [
        ("", "table-short"),
        ("00", None),
        ("0000", "table-long"),
        ("8000", "number-form"),
        ("ff" * 10, "number-form"),
        ("818040", "number-limit"),
        ("01 00 01 78 00", None),
        ("01 01 01 78 00", "number-limit"),
        ("01 00 ffffffffffffffff7f", "number-limit"),
        ("01 00 00 00", "name-refused"),
        ("01 00 01 ff 00", "name-refused"),
        ("01 00 0a 64656c7461636b70743a 00", "name-refused"),
        ("01 00 01 78 80", "box-outside"),
        ("01 00 01 78 06", "encoding-unknown"),
        ("01 00 01 78 01 00", "dtype-unknown"),
        ("01 00 01 78 01 0f 21", "shape-overflow"),
        (f"01 00 01 78 01 0f 02 {HUGE} {HUGE}", "shape-overflow"),
        ("01 00 01 78 01 02 01 03 00 00000000", "shape-bits"),
        ("01 00 01 78 81 0f 01 02 02 00", "box-outside"),
        ("01 00 01 78 81 0f 01 02 03 02", "box-outside"),
        ("01 00 01 78 81 02 01 02 04 00", "box-outside"),
        ("01 00 01 78 02 05 01 02 00 00000000", "encoding-dtype"),
        ("01 00 01 78 82 0f 01 02 03 00 00 00000000", "encoding-boxed"),
        ("01 00 01 78 83 0f 01 02 03 00 00 00000000", "encoding-boxed"),
        ("01 00 01 78 04 14 00", "encoding-dtype"),
        ("01 00 01 78 04 0f 01 08 00 01 01 00 00", "grid"),
        ("01 00 01 78 04 0f 01 08 01 02 01 00 00", "grid"),
        ("01 00 01 78 04 0f 01 08 01 01 09 00 00", "grid"),
        (f"01 00 01 78 04 05 01 {HUGE} 01 01 01 00 00", "grid"),
        ("01 00 01 78 04 05 01 ffffff7f 01 01 ffff7f 00 00", "grid"),
        ("01 00 01 78 04 0f 01 08 01 01 01 10", "number-limit"),
        ("01 00 01 78 04 0f 01 08 01 01 01 00 8102", "number-limit"),
        ("01 00 01 78 04 0f 01 08 01 01 01 00 00 09 01 01 00000000", "number-limit"),
        ("01 00 01 78 04 0f 02 05 01 01 04 01 01 00 00" + "02" * 4 + "00" * 40, "count-outside"),
        ("01 00 01 78 04 0f 01 08 01 01 01 00 00 01 01 01 00000000", "tile-short"),
        (f"01 00 01 78 05 0f 01 {HUGE[:-2]}1f 00", "table-short"),
        ("02 00 01 78 00 00 01 77 00", "table-order"),
        ("02 00 01 78 00 01 00 00", "table-order"),
        ("01 00 01 78 01 05 01 03 00 00000000", "part-tensors"),
        ("01 00 01 78 03 05 01 03 00 00000000", "part-tensors"),
        ("01 00 01 78 81 05 01 03 04 00 00 00000000", "payload-length"),
    ],
)
def test_tables_of_version_1(table, code):
    assert refused(second.parse_part, hex_part(bytes.fromhex(table), version="1")) == code


def test_parts():
    empty = bytes(1)
    assert refused(second.parse_part, hex_part(empty, b"x")) == "payload-length"
    assert refused(second.parse_part, hex_part(empty, b"", [("t", b"x")])) == "part-tensors"
    good = hex_part(empty)
    assert refused(second.parse_part, good[:7]) == "header-truncated"
    assert refused(second.parse_part, good[:9]) == "header-truncated"
    assert refused(second.parse_part, good + b"x") == "offsets-end"
    assert refused(second.parse_part, (10**9).to_bytes(8, "little") + good[8:]) == "header-too-long"
    for old, new, code in [
        ('"deltackpt": "2"', '"deltackpt": "3"', "version-unknown"),
        ('"step": "1"', '"step": "01"', "part-metadata"),
        ('"step": "1"', '"step": 1', "header-field"),
        ('"dtype"', '"DTYPE"', "header-field"),
        ('"U8"', '"U9"', "dtype-unknown"),
        ('"U8"', '"I8"', "part-tensors"),
        ("[1]", "[1.0]", "json-number"),
        ("[1]", "[-1]", "header-field"),
        ("[1]", "[1, 4611686018427387903, 4611686018427387903]", "shape-overflow"),
        ("[1]", "[" * 15 + "1" + "]" * 15, "json-depth"),
        ("[1]", "[" * 100000 + "1" + "]" * 100000, "json-depth"),
        ("[1]", "[2]", "offsets-length"),
        ("[1, 1]", "[2, 2]", "offsets-gap"),
        ("[0, 1]", "[-0, 1]", "json-number"),
        ("[0, 1]", "[-1, 1]", "header-field"),
        ('"step": "1"', '"step": "1", "step": "1"', "json-duplicate-key"),
        ("deltackpt:payload", "a\\u0085", "name-refused"),
        ("deltackpt:payload", "\\ud800", "json-syntax"),
        ("{", "[", "json-syntax"),
        ("{", "\ufeff{", "json-syntax"),
    ]:
        text = good[8:-1].decode().replace(old, new, 1).encode()
        assert refused(second.parse_part, len(text).to_bytes(8, "little") + text + b"\0") == code, (old, new)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    root = tmp_path_factory.mktemp("second")
    rng = np.random.default_rng(8)
    state = random_state(rng)
    for step in range(3):
        write(
            make_checkpoint(root / f"in{step}", state, side={"config.json": b"%d" % step}), root / "repo", anchor=NEVER
        )
        state = {name: changed(rng, value, 0.3) for name, value in state.items()}
    return root


def test_any_damage_to_a_repository_is_found(repository, tmp_path):
    root = shutil.copytree(repository / "repo", tmp_path / "repo")
    rng = np.random.default_rng(9)
    codes = set()
    for file in sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size and p.name != ".lock"):
        data = file.read_bytes()
        at = int(rng.integers(len(data)))
        for damaged in (data[:at], data + b" ", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], None):
            if damaged is None:
                file.unlink()
            else:
                file.write_bytes(damaged)
            code = refused(second.restore, root, 2, tmp_path / "out")
            used = file.name != "config.json" or data == b"2"  # those of other steps are not read
            assert code is not None or not used, (file, at)
            assert code is None or not (tmp_path / "out").exists()
            codes.add(code)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
        file.write_bytes(data)
    assert {"object-hash", "manifest-hash", "object-missing", "repository-missing", "ref-missing"} <= codes
    second.restore(root, 2, tmp_path / "out")


def test_links_and_pipes_in_a_repository_are_refused(repository, tmp_path):
    root = shutil.copytree(repository / "repo", tmp_path / "repo")
    marker = (root / "deltackpt.json").rename(tmp_path / "marker")
    (root / "deltackpt.json").symlink_to(marker)
    assert refused(second.restore, root, 2, tmp_path / "out") == "object-not-a-file"
    (root / "deltackpt.json").unlink()
    (root / "deltackpt.json").mkdir()
    assert refused(second.restore, root, 2, tmp_path / "out") == "object-not-a-file"


def manifest(repository):
    return json.loads(next((repository / "repo" / "steps").glob("00000002-*")).read_bytes())


def canonical(value):
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"unknown": [1]}, None),
        ({"requires": []}, None),
        ({"requires": ["folds"]}, "feature-unknown"),
        ({"requires": 1}, "manifest-field"),
        ({"format": "other"}, "manifest-field"),
        ({"version": 2}, "version-unknown"),
        ({"version": True}, "version-unknown"),
        ({"step": -1}, "manifest-field"),
        ({"step": True}, "manifest-field"),
        ({"step": 0}, "manifest-field"),
        ({"step": 10**15 + 1}, "manifest-field"),
        ({"time": 2**63}, "json-number"),
        ({"time": 1.5}, "json-number"),
        ({"patch": None}, "manifest-field"),
        ({"parent": None}, "manifest-field"),
        ({"base": None}, "manifest-field"),
        ({"state": "A" * 64}, "manifest-field"),
        ({"counts": {}}, "manifest-field"),
        ({"layout": {"name": "states/../x", "size": 0, "sha256": "0" * 64}}, "name-escapes"),
        ({"layout": {"name": "refs/x", "size": 0, "sha256": "0" * 64}}, "name-escapes"),
        ({"layout": {"name": "states/x", "size": -1, "sha256": "0" * 64}}, "manifest-field"),
        ({"metadata": {"x": [[[[[[[[[[[[[[[]]]]]]]]]]]]]]]}}, "json-depth"),
        ({"metadata": {"x": [[[[[[[[[[[[[]]]]]]]]]]]]]}}, None),
    ],
)
def test_manifests(repository, change, code):
    assert refused(second.parse_manifest, canonical(manifest(repository) | change)) == code


def test_manifests_have_one_form(repository):
    good = canonical(manifest(repository))
    for data, code in [
        (json.dumps(manifest(repository)).encode(), "manifest-canonical"),
        (good + b"\n", "manifest-canonical"),
        (good.replace(b'"producer":"', b'"producer":"\\u0041', 1), "manifest-canonical"),
        (good.replace(b'"producer":"', b'"producer":"\\ud800', 1), "json-syntax"),
        (good.replace(b'"producer":"', b'"producer":"\xff', 1), "json-syntax"),
        (good[:-1], "json-syntax"),
        (good[:-1] + b',"step":2}', "json-duplicate-key"),
        (good.replace(b'"metadata":{', b'"metadata":{"x":NaN', 1), "json-number"),
        (good + b" " * 4194304, "json-too-long"),
        (b"[" * 100000, "json-depth"),
        (b"[]", "manifest-field"),
        (b"", "json-syntax"),
    ]:
        assert refused(second.parse_manifest, data) == code


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, None),
        ({"version": 2, "new": 1}, "version-unknown"),
        ({"format": "x"}, "layout-field"),
        ({"new": 1}, "layout-field"),
        ({"side": [{"path": "a", "file": {}}]}, "layout-field"),
        ({"shards": [{"path": "../a", "header": "{}"}]}, "name-escapes"),
        ({"shards": [{"path": "a", "header": "{"}]}, "json-syntax"),
        ({"shards": [{"path": "a", "header": "{}"}, {"path": "a/b", "header": "{}"}]}, "layout-field"),
        ({"shards": [{"path": "a", "header": "{}"}, {"path": "a", "header": "{}"}]}, "layout-field"),
    ],
)
def test_layouts(change, code):
    layout = {"format": "deltackpt-layout", "version": 1, "shards": [], "side": []}
    assert refused(second.parse_layout, canonical(layout | change)) == code


# The command


def command(*args):
    return subprocess.run(
        [sys.executable, SPEC / "decode.py", *map(str, args)], capture_output=True, text=True, check=False
    )


def test_the_command(repository, tmp_path):
    done = command("restore", repository / "repo", 2, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert tree(tmp_path / "out") == tree(repository / "in2")
    part = next((repository / "repo" / "patches").rglob("*.safetensors"))
    done = command("part", part)
    assert done.returncode == 0
    assert "tied.weight" in done.stdout
    done = command("part", tmp_path / "none")
    assert (done.returncode, done.stderr[:12]) == (1, "part-missing")
    assert command().returncode == 2


def test_it_imports_nothing_of_the_library():
    text = "".join(path.read_text() for path in DECODER)
    modules = set(re.findall(r"^ *(?:import|from) (\w+)", text, re.MULTILINE))
    assert modules - {"numpy", "zstandard", "xxhash", *(path.stem for path in DECODER)} <= sys.stdlib_module_names
