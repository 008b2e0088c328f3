import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deltackpt import kernels
from deltackpt.errors import FormatError
from deltackpt.format.canonical import MAX_DEPTH, dumps, loads_canonical, loads_strict, nesting

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def loads(data, **more):
    return loads_strict(data, **{"limit": 1 << 20, "where": "here", **more})


def code(data, **more):
    with pytest.raises(FormatError) as error:
        loads(data, **more)
    assert error.value.where == "here"
    return error.value.code


def outcome(data):
    """The value, or "refused" with a code of ours; any other exception ends the test."""
    try:
        return loads(data)
    except FormatError as error:
        return "refused" if error.code.startswith("json-") else error.code


def by_the_standard_library(data):
    try:
        return json.loads(data)
    except ValueError:
        return "invalid"


@steady
@given(VALUES)
def test_what_is_written_is_read_back(value):
    data = dumps(value)
    assert loads(data) == value
    assert dumps(loads(data)) == data
    assert json.loads(data) == value


def test_canonical_bytes():
    value = {"b": [1, True, None, ()], "a\u00e9": "x\n\u2028\U0001f600\x7f", "": {}, "\U0001f600": 1, "\uffff": 2}
    text = '{"":{},"a\u00e9":"x\\n\u2028\U0001f600\x7f","b":[1,true,null,[]],"\uffff":2,"\U0001f600":1}'
    assert dumps(value) == text.encode()
    assert sorted(map(str.encode, value)) == [key.encode() for key in json.loads(text)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, "json-number"),
        ({"a": [float("nan")]}, "json-number"),
        (1 << 63, "json-number"),
        (-(1 << 63) - 1, "json-number"),
        (10**5000, "json-number"),
        ({1: 2}, "json-syntax"),
        ({"a": b"x"}, "json-syntax"),
        ([{1, 2}], "json-syntax"),
        ("\ud800", "json-syntax"),
        ({"\udfff": 1}, "json-syntax"),
    ],
    ids=range(10),
)
def test_values_that_json_would_not_give_back_are_not_written(value, expected):
    with pytest.raises(FormatError) as error:
        dumps(value)
    assert error.value.code == expected


def test_depth_of_what_is_written():
    value = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert loads(dumps(value)) == value
    loop = []
    loop.append(loop)
    for deep in ([value], loop):
        with pytest.raises(FormatError) as error:
            dumps(deep)
        assert error.value.code == "json-depth"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"}",
        b"[1,]",
        b'{"a":1,}',
        b"{'a':1}",
        b"{} {}",
        b"{}x",
        b"01",
        b"+1",
        b"truE",
        b"// x\n{}",
        b"\xef\xbb\xbf{}",
        b'"\xff"',
        b'"\xed\xa0\x80"',
        b'"\xc0\xaf"',
        b'"a\x00b"',
        b'"a\nb"',
        b'"\\x"',
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'{"\\uD800":1}',
        b'"\\u12"',
        b"{}\x00",
        b"[" + b'"\\"',
    ],
)
def test_json_syntax(data):
    assert code(data) == "json-syntax"


def test_good_escapes_pass():
    assert loads(rb'"\ud83d\ude00\u0000\"\\ud800\/"') == '\U0001f600\0"\\ud800/'


@pytest.mark.parametrize(
    "data", [b'{"a":1,"a":1}', b'[{"x":{"b":1,"c":2,"b":3}}]', b'{"a":1,"\\u0061":2}', b'{"":1,"":1}']
)
def test_json_duplicate_key(data):
    assert code(data) == "json-duplicate-key"


@pytest.mark.parametrize(
    "data",
    [
        b"1.0",
        b"[1e3]",
        b"-0",
        b"-0.0",
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"9223372036854775808",
        b"-9223372036854775809",
        b"9" * 10_000,
        b"-" + b"9" * 10_000,
        b"[1E400]",
    ],
)
def test_json_number(data):
    assert code(data) == "json-number"


def test_numbers_at_the_border():
    assert loads(b"[9223372036854775807,-9223372036854775808,0]") == [(1 << 63) - 1, -(1 << 63), 0]
    assert loads(b'["-0", "9999999999999999999999"]') == ["-0", "9" * 22]


def test_floats_of_other_tools():
    assert loads(b"[1.5,2e3,7]", allow_floats=True) == [1.5, 2000.0, 7]
    for data in (b"1e400", b"NaN", b"-Infinity", b"9" * 30):
        assert code(data, allow_floats=True) == "json-number"


def test_json_too_long():
    assert loads(b"[1]", limit=3) == [1]
    assert code(b"[1] ", limit=3) == "json-too-long"


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'[{"":', b'["\\"",', b'["\\\\",', b'["[",'])
def test_json_depth(opening):
    assert code(opening * 100_000, limit=1 << 30) == "json-depth"


def test_depth_is_counted_outside_strings():
    assert loads(b"[[1]]", depth=2) == [[1]]
    assert code(b"[[[1]]]", depth=2) == "json-depth"
    assert code(b'{"a":[{}]}', depth=2) == "json-depth"
    assert loads(b'["[[[[", "\\"[[[[", "\\\\", "]", "{{{"]', depth=1) == ["[[[[", '"[[[[', "\\", "]", "{{{"]
    assert nesting(b"[[],[[]],{}]") == 3


@steady
@given(VALUES, st.booleans())
def test_nesting_is_that_of_the_value(value, ascii_only):
    def depth(item):
        inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert nesting(json.dumps(value, ensure_ascii=ascii_only).encode()) == depth(value)


@steady
@given(st.lists(st.sampled_from(['"', "\\", "[", "]", "{", "}", ":", ",", "1", "a", "-0", "1.5", "\\u", "d800"])))
def test_junk_raises_format_errors_alone(pieces):
    data = "".join(pieces).encode()
    assert outcome(data) in ("refused", by_the_standard_library(data))


@steady
@given(st.binary(max_size=40))
def test_random_bytes_raise_format_errors_alone(data):
    assert outcome(data) in ("refused", by_the_standard_library(data))


def canonical(data):
    """Value, and canonical or not, or the code; held against the strict reader and the writer."""
    try:
        value, found = loads_canonical(data, limit=1 << 20, where="here")
    except FormatError as error:
        assert error.code == code(data)
        return error.code
    assert repr(value) == repr(loads(data))
    assert found == (dumps(value) == data)
    return found


@steady
@given(VALUES, st.integers(0, 1 << 10), st.sampled_from([b" ", b"-", b".0", b"e1", b"0", b"[", b'"', b"\\", b"9" * 19]))
def test_what_is_canonical_is_found_by_writing_it_again(value, at, more):
    data = dumps(value)
    assert canonical(data) is True
    canonical(json.dumps(value).encode())
    at %= len(data) + 1
    canonical(data[:at] + more + data[at:])
    canonical(data[:at] + data[at + 1 :])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"a":1,"b":[]}', True),
        (b'{"b":[],"a":1}', False),
        (b'{"a":1}\n', False),
        (b'{"a":1,"a":1}', "json-duplicate-key"),
        (b'{"a":-0}', "json-number"),
        (b'{"a":1.5}', "json-number"),
        (b'{"a":NaN}', "json-number"),
        (b'{"a":9223372036854775807}', True),
        (b'{"a":9223372036854775808}', "json-number"),
        (b'{"a":"\\u0061"}', False),
        (b'{"a":"\\ud800"}', "json-syntax"),
        (b'{"a":"\xed\xa0\x80"}', "json-syntax"),
        (b"\xef\xbb\xbf{}", "json-syntax"),
        (b"[" * 16 + b"]" * 16, True),
        (b"[" * 17 + b"]" * 17, "json-depth"),
        (b"[" * 100_000, "json-depth"),
        (b"[" + b"{}," * 40 + b"{}]", True),
        (b"", "json-syntax"),
    ],
)
def test_canonical_or_why_not(data, expected):
    assert canonical(data) == expected


MARKED = st.lists(
    st.sampled_from(
        ['"', "\\", "\\u00e9", "{", "}", "[", "]", ",", ":", "-0", "-", "0", "9" * 18, "12", "a", " ", "é"]
    ),
    max_size=30,
).map(lambda pieces: "".join(pieces).encode())


@pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")
@steady
@given(data=MARKED | st.binary(max_size=60) | VALUES.map(lambda v: json.dumps(v).encode()), depth=st.integers(1, 4))
def test_the_kernel_looks_as_python_does(data, depth):
    """The same value or the same code, whichever looks at the text first."""

    def found():
        try:
            return repr(loads(data, depth=depth, marks=8))
        except FormatError as error:
            return error.code

    compiled = found()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        assert found() == compiled
