import re
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from deltackpt.errors import FormatError
from deltackpt.format.dtypes import (
    BY_CODE,
    DTYPES,
    SIZE_LIMIT,
    DType,
    byte_shape,
    nbytes,
    ordered,
    storage_shape,
    uint,
    unordered,
)

steady = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no failure
FLOATS = [dtype for dtype in DTYPES.values() if dtype.sign_magnitude]
NUMPY_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def library_opens(path, dtype, shape, size):
    entry = f'{{"a":{{"dtype":"{dtype}","shape":{list(shape)},"data_offsets":[0,{size}]}}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(entry)) + entry + bytes(size))
    try:
        with safe_open(path, framework="np") as file:
            return list(file.keys()) == ["a"]
    except SafetensorError:
        return False


def test_the_table_knows_every_dtype_of_the_installed_library(tmp_path):
    entry = b'{"a":{"dtype":"?","shape":[1],"data_offsets":[0,1]}}'
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(entry)) + entry + b"x")
    with pytest.raises(SafetensorError) as error:
        safe_open(tmp_path / "x", framework="np")
    known = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", str(error.value)))
    assert len(known) > 10
    assert known <= set(DTYPES)


def test_codes_never_change():
    order = (
        "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ "
        "I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64"
    )
    assert [(name, dtype.name, dtype.code) for name, dtype in DTYPES.items()] == [
        (name, name, code) for code, name in enumerate(order.split(), 1)
    ]
    assert {dtype.code: dtype for dtype in DTYPES.values()} == BY_CODE


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda d: d.name)
def test_sizes_are_those_of_the_library(dtype, tmp_path):
    size = nbytes(dtype, (8, 2))
    assert library_opens(tmp_path / "x", dtype.name, (8, 2), size)
    assert not library_opens(tmp_path / "x", dtype.name, (8, 2), size + 1)
    stored = storage_shape(dtype, (8, 2))
    assert np.prod(stored) * dtype.width == size
    assert uint(dtype.width).itemsize == dtype.width


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.name)
def test_float_fields_fill_the_word(dtype):
    start, count = dtype.exponent
    assert start + count + 1 == dtype.bits == dtype.width * 8


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.nan is not None], ids=lambda d: d.name)
def test_sentinels_are_nans_that_computations_do_not_leave(dtype):
    assert 0 <= dtype.nan < 1 << dtype.bits
    if dtype.name.endswith("FNUZ"):
        assert dtype.nan == 0x80  # there is no other
        return
    if dtype.name == "F8_E8M0":
        assert dtype.nan == 0xFF  # there is no other
        return
    start, count = dtype.exponent
    exponent, mantissa = (dtype.nan >> start) & ((1 << count) - 1), dtype.nan & ((1 << start) - 1)
    assert exponent == (1 << count) - 1
    assert mantissa == 7 if dtype.name == "F8_E4M3" else mantissa != 0
    if dtype.width > 1:
        assert mantissa >> (start - 1) == 1  # quiet
        assert mantissa not in (1 << (start - 1), (1 << start) - 1)  # neither the default NaN nor all ones
    if dtype.name in NUMPY_FLOATS:
        assert np.isnan(np.array(dtype.nan, uint(dtype.width)).view(NUMPY_FLOATS[dtype.name]))


def test_dtypes_without_a_nan_have_no_sentinel():
    without = {name for name, dtype in DTYPES.items() if dtype.nan is None}
    assert without == {"BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "I16", "U16", "I32", "U32", "C64", "I64", "U64"}


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("BF16", (), ()),
        ("BF16", (3, 0), (3, 0)),
        ("C64", (3, 2), (3, 2)),
        ("F4", (3, 2), (3, 1)),
        ("F4", (2, 3), (3,)),
        ("F4", (5, 0), (5, 0)),
        ("F4", (0, 3), (0,)),
        ("F6_E2M3", (2, 4), (2, 3)),
        ("F6_E3M2", (4, 3), (9,)),
    ],
)
def test_shape_in_parts_of_version_1(name, shape, stored):
    assert byte_shape(DTYPES[name], shape) == stored


@pytest.mark.parametrize(
    ("name", "shape", "stored"),
    [
        ("BF16", (), ()),
        ("BF16", (3, 0), (3, 0)),
        ("C64", (3, 2), (3, 2)),
        ("F4", (3, 2), (3,)),
        ("F4", (2, 3), (3,)),
        ("F4", (5, 0), (0,)),
        ("F6_E2M3", (2, 4), (6,)),
        ("F6_E3M2", (4, 3), (9,)),
    ],
)
def test_storage_shape(name, shape, stored):
    assert storage_shape(DTYPES[name], shape) == stored


@pytest.mark.parametrize(("name", "shape"), [("F4", ()), ("F4", (3,)), ("F6_E2M3", (2,)), ("F4", (3, 5))])
def test_a_part_of_a_byte_is_refused(name, shape, tmp_path):
    for function in (nbytes, storage_shape):
        with pytest.raises(FormatError) as error:
            function(DTYPES[name], shape)
        assert error.value.code == "shape-bits"
    assert not any(library_opens(tmp_path / "x", name, shape, size) for size in (0, 1, 2, 7, 8))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("U8", (SIZE_LIMIT,)),
        ("U16", (1 << 61,)),
        ("F4", (1 << 63,)),
        ("U8", (1 << 40, 1 << 40)),
        ("U8", (0, 1 << 40, 1 << 40)),
        ("U8", (1 << 40, 1 << 40, 0)),
        ("U8", (-1,)),
        ("U8", (0, -1)),
        ("U8", (10**5000,)),
        ("U8", tuple([1 << 62] * 100_000)),
    ],
    ids=range(10),
)
def test_sizes_that_overflow_are_refused(name, shape):
    with pytest.raises(FormatError) as error:
        nbytes(DTYPES[name], shape, where="here")
    assert error.value.code == "shape-overflow"
    assert error.value.where == "here"
    assert len(str(error.value)) < 400


def test_the_largest_size_is_taken():
    assert nbytes(DTYPES["U8"], (SIZE_LIMIT - 1,)) == SIZE_LIMIT - 1
    assert nbytes(DTYPES["U64"], (0, 1 << 50)) == 0


@pytest.mark.parametrize("width", [1, 2])
def test_ordered_is_one_to_one_on_every_pattern(width):
    every = np.arange(1 << (8 * width)).astype(uint(width))
    signed = ordered(every, width)
    assert signed.dtype == np.dtype(f"<i{width}")
    assert len(np.unique(signed)) == len(every)
    assert unordered(signed, width).dtype == uint(width)
    np.testing.assert_array_equal(unordered(signed, width), every)
    np.testing.assert_array_equal(unordered(signed.view(uint(width)), width), every)


def test_ordered_follows_every_f16_and_neighbors_are_one_apart():
    every = np.arange(1 << 16).astype("<u2")
    values = every.view("<f2").astype(np.float64)
    finite = every[np.isfinite(values)]
    by_order = finite[np.argsort(ordered(finite, 2))]
    assert (np.diff(by_order.view("<f2").astype(np.float64)) >= 0).all()
    assert (np.diff(ordered(by_order, 2).astype(int)) == 1).all()


def test_ordered_follows_every_bf16():
    every = np.arange(1 << 16).astype("<u4")
    finite = every[((every >> 7) & 0xFF) != 0xFF]
    by_order = finite[np.argsort(ordered(finite.astype("<u2"), 2))]
    assert (np.diff((by_order << 16).view("<f4").astype(np.float64)) >= 0).all()


def test_ordered_at_zero():
    assert ordered(np.array([0x0001, 0x0000, 0x8000, 0x8001], "<u2"), 2).tolist() == [1, 0, -1, -2]


@pytest.mark.parametrize(("width", "kind"), [(4, "<f4"), (8, "<f8")])
@steady
@given(data=st.data())
def test_ordered_follows_wide_floats(width, kind, data):
    words = st.integers(0, (1 << (8 * width)) - 1)
    bits = np.array(data.draw(st.lists(words, max_size=20)), uint(width))
    np.testing.assert_array_equal(unordered(ordered(bits, width), width), bits)
    finite = bits[np.isfinite(bits.view(kind))]
    by_order = finite[np.argsort(ordered(finite, width))].view(kind)
    assert (by_order[:-1] <= by_order[1:]).all()


def test_ordered_leaves_its_input_and_takes_any_layout():
    bits = np.arange(0x7FF0, 0x8010).astype("<u2").reshape(4, 8)
    before = bits.copy()
    strided = bits[:, ::3]
    np.testing.assert_array_equal(unordered(ordered(strided, 2), 2), strided)
    np.testing.assert_array_equal(bits, before)
    bits.flags.writeable = False
    assert ordered(bits, 2).flags.writeable
    assert ordered(bits[:0], 2).shape == (0, 8)
    assert int(ordered(np.array(0x8000, "<u2"), 2)) == -1


def test_uint_is_little_endian_and_refuses_other_widths():
    assert [uint(width) for width in (1, 2, 4, 8)] == [np.dtype(kind) for kind in ("u1", "<u2", "<u4", "<u8")]
    with pytest.raises(KeyError):
        uint(3)


def test_a_dtype_is_a_value():
    assert DType("U8", 5, 8, 1) == DTYPES["U8"]
    with pytest.raises(AttributeError):
        DTYPES["U8"].code = 9
