"""A header by the kernels is what Python reads of it; what is refused is refused alike."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltackpt import kernels
from deltackpt.errors import FormatError
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.header_columns import read_tensors
from deltackpt.format.safetensors_header import parse_header
from deltackpt.format.tensor_names import check_name

pytestmark = pytest.mark.skipif(kernels.LIB is None, reason="the kernels were not compiled")

seeds = st.integers(0, 2**32 - 1)
SHAPES = [(), (8,), (4, 6), (0, 3), (2, 0), (2, 3, 8), (1,) * 8, (2,) * 9]
NAMES = ["a", "b", "model.layers.0", 'with "quotes"', "x" * 1024, "ä", "deltackpt:table", "~", "b "]
NAMES += ["層.0", "\U0001f600", "e\u0301", "\u2028", "\\", "ä" * 512, "ä" * 513, "\x7f", "a\x85", "\t"]


def text_of(rng: np.random.Generator) -> bytes:
    entries: dict[str, object] = {}
    if rng.random() < 0.6:
        entries["__metadata__"] = {k: "v \u00e4" if rng.random() < 0.1 else "pt" for k in "fg"[: rng.integers(3)]}
    at, made = 0, []
    for name in rng.permutation(NAMES)[: rng.integers(1, 10)].tolist():
        dtype = str(rng.choice(sorted(DTYPES)))
        shape = SHAPES[rng.integers(len(SHAPES))] if DTYPES[dtype].bits == 8 * DTYPES[dtype].width else (8,)
        size = nbytes(DTYPES[dtype], shape)
        made.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}))
        at += size
    if rng.random() < 0.3:
        made = [made[i] for i in rng.permutation(len(made))]
    compact = (",", ":") if rng.random() < 0.9 else (", ", ": ")
    text = json.dumps(entries | dict(made), separators=compact, ensure_ascii=bool(rng.random() < 0.5)).encode()
    return text + b" " * int(rng.integers(9))


def read(text: bytes) -> object:
    try:
        return parse_header(len(text).to_bytes(8, "little") + text, None, "here")
    except FormatError as error:
        return str(error)


def agree(text: bytes) -> None:
    found = read(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "LIB", None)
        assert read(text) == found


@given(seeds)
def test_whole_and_damaged(seed):
    rng = np.random.default_rng(seed)
    text = text_of(rng)
    agree(text)
    for _ in range(30):
        damaged = bytearray(text)
        at, kind = int(rng.integers(len(text))), rng.integers(4)
        if kind == 0:
            damaged[at] = rng.integers(256)
        elif kind == 1:
            damaged[at] = rng.choice(list(b'0123456789{}[]",: '))
        elif kind == 2:
            del damaged[at]
        else:
            damaged.insert(at, rng.choice(list(b'0123456789{}[]",: -.')))
        agree(bytes(damaged))


def test_what_nearly_all_writers_write_is_taken():
    entry = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [12, 24]}
    first = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}
    text = json.dumps({"__metadata__": {"format": "pt"}, "b": entry, "a": first}, separators=(",", ":")).encode()
    found = read_tensors(text + b"   ")
    assert found is not None
    assert found[0] == b'{"format":"pt"}'
    assert found[1].rows() == list(zip(["a", "b"], ["BF16"] * 2, [(2, 3)] * 2, [0, 12], [12, 24], strict=True))
    assert (found[1].names, found[1].forms, found[1].form.tolist()) == (["a", "b"], [("BF16", (2, 3))], [0, 0])


@pytest.mark.parametrize("what", ["twice", "overlap", "gap", "late"])
def test_how_tensors_lie_beside_each_other(what):
    at = {"overlap": (11, 23), "gap": (13, 25)}.get(what, (12, 24))
    begin = (1, 13) if what == "late" else (0, 12)
    row = '"%s":{"dtype":"BF16","shape":[2,3],"data_offsets":[%d,%d]}'
    text = f"{{{row % ('a', *begin)},{row % ('a' if what == 'twice' else 'b', *at)}}}".encode()
    assert isinstance(read(text), str)
    agree(text)


def one_tensor(name: bytes) -> bytes:
    return b'{"%s":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' % name


def test_a_name_is_taken_if_and_only_if_it_is_utf8_without_control_characters():
    seconds = (0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0)
    more = (b"", b"\x80", b"\xbf", b"\x7f", b"\x80\x80", b"\xbf\xbf", b"\x80\xc0", b"\x80\x80\x80")
    for first, second, rest in itertools.product(range(0x78, 0x100), seconds, more):
        name = bytes([first, second]) + rest
        try:
            check_name(name.decode(), "here")
            good = True
        except (UnicodeDecodeError, FormatError):
            good = False
        assert (read_tensors(one_tensor(name)) is not None) == good, name


@pytest.mark.parametrize("name", ["ä.weight", "層", "\U0001f600.1", 'with "quotes"', "a\\b", "ä" * 512])
@pytest.mark.parametrize("escaped", [False, True])
def test_names_beyond_ascii_are_taken(name, escaped):
    found = read_tensors(one_tensor(json.dumps(name, ensure_ascii=escaped)[1:-1].encode()))
    assert found is not None
    assert found[1].names == [name]


@pytest.mark.parametrize(
    "name",
    [
        rb"\ud800",
        rb"\ud83d",
        rb"\u0000",
        rb"a\u0085",
        rb"\n",
        rb"\u00e4" * 513,
        rb"\u005f_metadata__",
        rb"\x",
        rb"\u12",
    ],
)
def test_escapes_that_make_no_name_are_left_to_python(name):
    text = one_tensor(name)
    assert read_tensors(text) is None
    agree(text)


def test_one_name_written_in_two_ways_is_one_name_twice():
    text = one_tensor(b"a")[:-1] + b"," + one_tensor(rb"\u0061").replace(b"[0,1]", b"[1,2]")[1:]
    assert read_tensors(text) is None
    agree(text)
