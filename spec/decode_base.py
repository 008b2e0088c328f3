"""What both versions of a part share: codes, dtypes, and the parts of a table. FORMAT.md, REGISTRY.md."""

import re
from collections import namedtuple

import numpy as np

SIZE_LIMIT, MAX_NAME, MAX_RANK, RESERVED = 1 << 62, 1024, 32, "deltackpt:"
REMOVED, FULL, NAN, INDEX, PACKED, PLANES = range(6)
ENCODINGS = ["removed", "full", "nan", "index", "packed", "planes"]

# REGISTRY.md, "Dtypes": bits of an element, bytes of a storage element, exponent field (lowest bit, bits), sentinel.
Dtype = namedtuple("Dtype", "code name bits width low b sentinel")
_ROWS = """1 BOOL 8 1 0 0 -|2 F4 4 1 0 0 -|3 F6_E2M3 6 1 0 0 -|4 F6_E3M2 6 1 0 0 -|5 U8 8 1 0 0 -|6 I8 8 1 0 0 -
7 F8_E5M2 8 1 2 5 7D|8 F8_E4M3 8 1 3 4 FF|9 F8_E8M0 8 1 0 0 FF|10 F8_E4M3FNUZ 8 1 3 4 80|11 F8_E5M2FNUZ 8 1 2 5 80
12 I16 16 2 0 0 -|13 U16 16 2 0 0 -|14 F16 16 2 10 5 7EA5|15 BF16 16 2 7 8 7FE5|16 I32 32 4 0 0 -|17 U32 32 4 0 0 -
18 F32 32 4 23 8 7FE5A5A5|19 C64 64 8 0 0 -|20 F64 64 8 52 11 7FFCA5A5A5A5A5A5|21 I64 64 8 0 0 -|22 U64 64 8 0 0 -"""
DTYPES = {}
for _row in _ROWS.replace("\n", "|").split("|"):
    _code, _name, _bits, _width, _low, _b, _nan = _row.split()
    _nan = None if _nan == "-" else int(_nan, 16)
    DTYPES[_name] = Dtype(int(_code), _name, int(_bits), int(_width), int(_low), int(_b), _nan)
BY_CODE = {d.code: d for d in DTYPES.values()}


class Refused(Exception):
    """Input that is not what the spec says. `code` is a code of REGISTRY.md."""

    def __init__(self, code, why=""):
        super().__init__(f"{code}: {why}" if why else code)
        self.code = code


def need(condition, code, why=""):
    if not condition:
        raise Refused(code, why)


def check_name(name):  # [F-PART-4]
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused("name-refused", "not text") from None
    need(1 <= size <= MAX_NAME, "name-refused", "length")
    need(not re.search("[\x00-\x1f\x7f-\x9f]", name), "name-refused", "control character")


def check_shape(dtype, shape):
    """[F-ELEM-2]: the number of storage elements."""
    bits, total = dtype.bits, dtype.bits
    for d in shape:
        bits *= d
        total *= max(d, 1)
    need(len(shape) <= MAX_RANK and total < 8 * SIZE_LIMIT, "shape-overflow")
    need(bits % 8 == 0, "shape-bits")
    return bits // 8 // dtype.width


def is_packed_dtype(dtype):  # several elements share a byte
    return dtype.bits != 8 * dtype.width


class Cursor:
    """Reads a table. Whatever it returns has been paid for by bytes that were there ([F-READ-2])."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def left(self):
        return len(self.data) - self.at

    def take(self, size):
        need(size <= self.left(), "table-short")
        self.at += size
        return bytes(self.data[self.at - size : self.at])

    def byte(self):
        return self.take(1)[0]

    def number(self, limit, code="number-limit"):
        value = 0
        for i in range(9):  # [F-NUM-2]
            byte = self.byte()
            value |= (byte & 127) << 7 * i
            if byte < 128:
                need(byte > 0 or i == 0, "number-form")  # [F-NUM-1]
                need(value <= limit, code)  # [F-NUM-3]
                return value
        raise Refused("number-form")

    def numbers(self, count, limit, code="number-limit"):
        return [self.number(limit, code) for _ in range(count)]

    def crcs(self, count):
        need(4 * count <= self.left(), "table-short")
        return [int.from_bytes(self.take(4), "little") for _ in range(count)]


def table_name(raw):
    """[F-TAB-3]: the name that these bytes are."""
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("name-refused", "not UTF-8") from None
    check_name(name)
    need(not name.startswith(RESERVED) and name != "__metadata__", "name-refused", name)  # [F-PART-9]
    return name


def as_elements(data, dtype):
    return np.frombuffer(data, f"<u{dtype.width}")  # [F-ELEM-1]


def ordered(elements, dtype):
    """[F-ORD-1], [F-ORD-2], as unsigned words that may be added modulo 2^W; its own inverse."""
    if not dtype.b:
        return elements
    s = elements.view(f"<i{dtype.width}")
    return (s ^ ((s >> (8 * dtype.width - 1)) & np.iinfo(s.dtype).max)).view(elements.dtype)


def exponents(elements, dtype):
    return (elements.astype(np.int64) >> dtype.low) & (2**dtype.b - 1)  # 0 for a dtype without an exponent field
