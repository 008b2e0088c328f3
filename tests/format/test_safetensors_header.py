import json
import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.safetensors_header import MAX_HEADER, Header, Tensor, build_header, head_size, parse_header

CODES = {
    "header-too-long",
    "header-truncated",
    "json-syntax",
    "json-number",
    "json-duplicate-key",
    "json-depth",
    "json-too-long",
    "header-field",
    "name-refused",
    "dtype-unknown",
    "shape-overflow",
    "shape-bits",
    "offsets-length",
    "offsets-overlap",
    "offsets-gap",
    "offsets-end",
}
KINDS = ["u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8", "?"]

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
NAMES = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20).filter(
    lambda name: name != "__metadata__"
)


def head_of(text):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text


def entry(shape=(1,), start=0, end=1, dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def parse(text, data=0):
    head = head_of(text)
    return parse_header(head, len(head) + data, "here")


def code(text, data=0):
    with pytest.raises(FormatError) as error:
        parse(text, data)
    assert error.value.where.startswith("here")
    assert len(str(error.value)) < 1000
    return error.value.code


def parsed_or_code(head, size):
    """The header, or the code of a FormatError; any other exception ends the test."""
    try:
        return parse_header(head, size, "here")
    except FormatError as error:
        return error.code


@st.composite
def layouts(draw):
    tensors, at = [], 0
    for name in draw(st.lists(NAMES, unique=True, max_size=6)):
        dtype = draw(st.sampled_from(list(DTYPES.values())))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        if dtype.bits < 8:
            shape = (*shape, 4)
        size = nbytes(dtype, shape)
        tensors.append(Tensor(name, dtype.name, shape, at, at + size))
        at += size
    return tensors


@steady
@given(layouts(), st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), st.text(), max_size=3))
def test_what_is_built_is_parsed_and_the_library_agrees(tmp_path_factory, tensors, metadata):
    head = build_header(tensors, metadata)
    assert len(head) % 8 == 0
    end = tensors[-1].end if tensors else 0
    header = parse_header(head, len(head) + end, "here")
    assert header.head == head
    assert header.text == head[8:]
    assert header.metadata == metadata
    assert header.data_start == len(head)
    assert header.file_size == len(head) + end
    assert sorted(header.tensors, key=repr) == sorted((t for t in tensors), key=repr)
    assert [(t.start, t.end) for t in header.tensors] == sorted((t.start, t.end) for t in tensors)

    path = tmp_path_factory.getbasetemp() / "agree.safetensors"
    path.write_bytes(head + bytes(end))
    with safe_open(path, framework="np") as file:
        assert (file.metadata() or {}) == metadata
        assert set(file.keys()) == {t.name for t in tensors}
        for t in tensors:
            piece = file.get_slice(t.name)
            assert (piece.get_dtype(), tuple(piece.get_shape())) == (t.dtype, t.shape)


@steady
@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(KINDS), st.integers(0, 4))),
    st.none() | st.dictionaries(st.text(st.characters(exclude_categories=("Cs",))), st.text(), max_size=2),
)
def test_files_of_the_library_parse_to_what_was_saved(spec, metadata):
    assume(spec or metadata != {})  # safetensors 0.8 then writes `{},"__metadata__":{}}`, which it cannot read either
    arrays = {name: np.arange(size).astype(kind) for name, (kind, size) in spec.items()}
    data = save(arrays, metadata)
    size = head_size(data[:8], len(data), "here")
    header = parse_header(data[:size], len(data), "here")
    assert header.metadata == (metadata or {})
    assert {t.name for t in header.tensors} == set(arrays)
    for t in header.tensors:
        array = arrays[t.name]
        assert t.shape == array.shape
        assert data[size + t.start : size + t.end] == array.tobytes()


@steady
@given(layouts(), st.data())
def test_a_damaged_header_raises_format_errors_alone(tensors, data):
    head = bytearray(build_header(tensors, {"format": "pt"}))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(head) - 1))
        if data.draw(st.booleans()):
            head[at] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789-.eE"[]{}:,\\ ')))
        else:
            del head[at]
    end = tensors[-1].end if tensors else 0
    result = parsed_or_code(bytes(head), len(head) + end)
    if isinstance(result, Header):
        check(result, len(head) + end)
    else:
        assert result in CODES


@steady
@given(st.binary(max_size=60), st.integers(0, 100))
def test_random_bytes_raise_format_errors_alone(head, more):
    for data in (head, head_of(b"{" + head)):
        result = parsed_or_code(data, len(data) + more)
        assert isinstance(result, Header) or result in CODES


def check(header: Header, file_size: int):
    """What a reader trusts."""
    end = 0
    for t in header.tensors:
        assert t.start == end <= t.end
        assert t.end - t.start == nbytes(DTYPES[t.dtype], t.shape)
        assert 0 < len(t.name.encode()) <= 1024
        end = t.end
    assert len({t.name for t in header.tensors}) == len(header.tensors)
    assert header.data_start + end == file_size == header.file_size
    assert all(isinstance(value, str) for value in header.metadata.values())


def test_the_canonical_bytes():
    tensors = [Tensor("b", "BF16", (2, 1), 0, 4), Tensor("a\u00e9", "F4", (4,), 4, 6), Tensor("z", "I64", (), 6, 14)]
    head = build_header(tensors, {"y": "2", "x": "1\n"})
    text = (
        '{"__metadata__":{"x":"1\\n","y":"2"},"b":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]},'
        '"a\u00e9":{"dtype":"F4","shape":[4],"data_offsets":[4,6]},"z":{"dtype":"I64","shape":[],"data_offsets":[6,14]}}'
    ).encode()
    padded = text + b" " * (-len(text) % 8)
    assert head == struct.pack("<Q", len(padded)) + padded
    assert build_header([], {}) == struct.pack("<Q", 8) + b"{}      "


def test_text_and_order_are_kept_as_stored():
    text = (
        b'{ "b":{"shape":[1],"dtype":"U8","data_offsets":[1,2]},\n'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}  \n'
    )
    header = parse(text, 2)
    assert header.text == text
    assert header.head == head_of(text)
    assert [t.name for t in header.tensors] == ["a", "b"]


def test_empty_tensors_may_lie_anywhere_between_others():
    text = {
        "a": entry(),
        "e": entry((0,), 2, 2),
        "c": entry((0, 3), 0, 0),
        "b": entry((1,), 1, 2),
        "d": entry((0,), 1, 1),
    }
    header = parse(text, 2)
    check(header, header.file_size)
    assert [t.name for t in header.tensors] == ["c", "a", "d", "b", "e"]


def test_names_are_text_not_paths():
    for name in ("../../x", "/etc/passwd", "C:\\x", "a b", "\u00e9\U0001f600", "con", "\u200b", "x" * 1024):
        assert parse({name: entry()}, 1).tensors[0].name == name


def test_header_too_long():
    head = struct.pack("<Q", MAX_HEADER + 1)
    for size in (8, 1 << 40, None):
        with pytest.raises(FormatError) as error:
            parse_header(head, size, "here")
        assert error.value.code == "header-too-long"
    with pytest.raises(FormatError) as error:
        head_size(b"\xff" * 8, 1 << 62, "here")
    assert error.value.code == "header-too-long"


@pytest.mark.parametrize(
    ("head", "size"), [(b"", 0), (b"\x02" + bytes(6), 7), (head_of("{}")[:-1], 9), (head_of("{}")[:9], 99)]
)
def test_header_truncated(head, size):
    with pytest.raises(FormatError) as error:
        parse_header(head, size, "here")
    assert error.value.code == "header-truncated"


def test_bytes_after_the_header_are_not_looked_at():
    head = head_of({"a": entry()})
    assert parse_header(head + b"x", len(head) + 1, "here") == parse_header(head, len(head) + 1, "here")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b" {}",
        b"\n{}",
        b"\xef\xbb\xbf{}",
        b"{",
        b"{}}",
        b'{"a":NaN}',
        b'{"a":1.0}',
        b'{"a":1e3}',
        b'{"a":99999999999999999999}',
        b'{"\xff":1}',
        b'{"\\ud800":1}',
        b'{"a\x01":1}',
        b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
    ],
)
def test_header_json(text):
    assert code(text) == ("json-number" if re.search(rb"NaN|[:\[][-\d.e]{2,}", text) else "json-syntax")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b'{"__metadata__":{"x":"1","x":"1"}}',
        b'{"__metadata__":{},"__metadata__":{}}',
    ],
)
def test_header_duplicate_key(text):
    assert code(text, 1) == "json-duplicate-key"


def test_header_depth():
    assert code(b'{"a":' + b"[" * 1_000_000) == "json-depth"
    assert code(b'{"a":' + b"[" * 16 + b"]" * 16 + b"}") == "json-depth"
    assert code(b'{"a":' + b"[" * 15 + b"]" * 15 + b"}") == "header-field"


@pytest.mark.parametrize(
    "item",
    [
        1,
        None,
        [],
        {},
        {"dtype": "U8", "shape": [1]},
        {**entry(), "extra": 1},
        {"dtype": "U8", "shape": [1], "offsets": [0, 1]},
        {**entry(), "dtype": 1},
        {**entry(), "dtype": None},
        {**entry(), "shape": None},
        {**entry(), "shape": 1},
        {**entry(), "shape": {"0": 1}},
        {**entry(), "shape": ["1"]},
        {**entry(), "shape": [True]},
        {**entry(), "shape": [[1]]},
        {**entry(), "shape": [-1]},
        {**entry(), "shape": [1] * 33},
        {**entry(), "data_offsets": [0]},
        {**entry(), "data_offsets": [0, 1, 1]},
        {**entry(), "data_offsets": [False, True]},
        {**entry(), "data_offsets": [-1, 0]},
        {**entry(), "data_offsets": "01"},
        {**entry(), "data_offsets": {"0": 0, "1": 1}},
    ],
    ids=range(23),
)
def test_header_field(item):
    assert code({"a": item}, 1) == "header-field"


@pytest.mark.parametrize("metadata", [None, 1, "x", [], {"a": 1}, {"a": None}, {"a": {}}, {"a": ["b"]}])
def test_header_field_in_the_metadata(metadata):
    assert code({"__metadata__": metadata}) == "header-field"


def test_a_tensor_named_like_the_metadata_is_impossible():
    assert code({"__metadata__": entry()}, 1) == "header-field"


@pytest.mark.parametrize("name", ["", "a\x00", "\n", "a\x7f", "\x85b", "x" * 1025, "\u00e9" * 513, "\U0001f600" * 257])
def test_name_refused(name):
    assert code({name: entry()}, 1) == "name-refused"


@pytest.mark.parametrize("dtype", ["", "u8", "U4", "F128", "BF16 ", "U" * 10_000])
def test_dtype_unknown(dtype):
    assert code({"a": entry(dtype=dtype)}, 1) == "dtype-unknown"


def test_shape_overflow():
    assert code({"a": entry((1 << 31, 1 << 31))}, 1) == "shape-overflow"
    assert code({"a": entry((1 << 62, 0), 0, 0)}) == "shape-overflow"
    assert code({"a": entry((1 << 62,) * 32)}, 1) == "shape-overflow"


def test_shape_bits():
    assert code({"a": entry((3,), 0, 2, "F4")}, 2) == "shape-bits"


def test_offsets_length():
    assert code({"a": entry((2,), 0, 1)}, 1) == "offsets-length"
    assert code({"a": entry((1,), 1, 0)}, 1) == "offsets-length"
    assert code({"a": entry((1,), (1 << 62) - 1, 1 << 62)}, 1) == "offsets-length"
    assert code({"a": entry((0,), 0, 1)}, 1) == "offsets-length"


def test_offsets_overlap():
    assert code({"a": entry((2,), 0, 2), "b": entry((2,), 1, 3)}, 3) == "offsets-overlap"
    assert code({"a": entry((1,), 0, 1), "b": entry((1,), 0, 1)}, 1) == "offsets-overlap"
    assert code({"a": entry((4,), 0, 4), "b": entry((0,), 2, 2)}, 4) == "offsets-overlap"


def test_offsets_gap():
    assert code({"a": entry((1,), 1, 2)}, 2) == "offsets-gap"
    assert code({"a": entry(), "b": entry((1,), 2, 3)}, 3) == "offsets-gap"
    assert code({"a": entry((0,), 1, 1)}, 1) == "offsets-gap"


def test_offsets_end():
    assert code({"a": entry()}, 0) == "offsets-end"
    assert code({"a": entry()}, 2) == "offsets-end"
    assert code({}, 1) == "offsets-end"


def test_without_a_size_the_header_says_it():
    head = head_of({"a": entry((5,), 0, 5)})
    assert parse_header(head, None, "here").file_size == len(head) + 5


def test_one_defect_has_one_place():
    with pytest.raises(FormatError) as error:
        parse({"a": entry(), "layer.7": entry(dtype="F128")}, 1)
    assert error.value.where == "here: tensor 'layer.7'"
    assert error.value.have == "F128"
    assert "BF16" in error.value.need


@pytest.mark.parametrize(
    ("tensors", "metadata", "expected"),
    [
        ([Tensor("a", "U8", (1,), 0, 1), Tensor("a", "U8", (1,), 1, 2)], {}, "name-refused"),
        ([Tensor("__metadata__", "U8", (1,), 0, 1)], {}, "name-refused"),
        ([Tensor("\ud800", "U8", (1,), 0, 1)], {}, "name-refused"),
        ([Tensor("", "U8", (1,), 0, 1)], {}, "name-refused"),
        ([Tensor("a", "U8", (1,), 1, 2)], {}, "offsets-gap"),
        ([Tensor("a", "U9", (1,), 0, 1)], {}, "dtype-unknown"),
        ([Tensor("a", "U8", (2,), 0, 1)], {}, "offsets-length"),
        ([], {"a": 1}, "header-field"),
    ],
    ids=range(8),
)
def test_a_header_that_would_be_refused_is_not_built(tensors, metadata, expected):
    with pytest.raises(FormatError) as error:
        build_header(tensors, metadata)
    assert error.value.code == expected


@steady
@given(layouts().filter(bool), st.sampled_from(["end", "shape", "shift", "dtype", "rest"]))
def test_what_the_library_refuses_is_refused(tmp_path_factory, tensors, lie):
    entries = {t.name: entry(t.shape, t.start, t.end, t.dtype) for t in tensors}
    first, size = entries[tensors[0].name], tensors[-1].end
    if lie == "end":
        first["data_offsets"][1] += 1
    elif lie == "shape":
        first["shape"].append(2)
    elif lie == "dtype":
        first["dtype"] = "F3"
    elif lie == "rest":
        size += 1
    else:
        size += 1
        for item in entries.values():
            item["data_offsets"] = [offset + 1 for offset in item["data_offsets"]]
    head = head_of(entries)
    path = tmp_path_factory.getbasetemp() / "lie.safetensors"
    path.write_bytes(head + bytes(size))
    try:
        with safe_open(path, framework="np"):
            refused = False
    except SafetensorError:
        refused = True
    assert isinstance(parsed_or_code(head, len(head) + size), Header) == (not refused)
