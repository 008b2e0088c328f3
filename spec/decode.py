"""A second reader of the deltackpt format, made from FORMAT.md, STORE.md and REGISTRY.md alone.

It is meant to be read beside the spec, imports nothing of deltackpt, and prefers being plain to being fast.
Needs numpy and zstandard; proves tensors by XXH3 too where the module xxhash happens to be there.

    python spec/decode.py restore REPO STEP OUT [REF]   make the checkpoint of a step from a local repository
    python spec/decode.py part PART                     list the entries of a part
"""

import hashlib
import json
import mmap
import re
import stat
import sys
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import zstandard

try:
    import xxhash
except ImportError:
    xxhash = None

SIZE_LIMIT, MAX_NAME, MAX_RANK, MAX_HEADER = 1 << 62, 1024, 32, 100_000_000
MAX_ENTRIES, MAX_CLASSES, MAX_TILE, MAX_K, MAX_EXCEPTION_K, CHUNK = 1 << 20, 15, 1 << 31, 31, 15, 131072
MAX_MANIFEST, MAX_EDGE, MAX_LAYOUT, MAX_DIGESTS, MAX_SMALL = 4194304, 4194304, 268435456, 268435456, 65536
MAX_TABLE, MAX_BOXES, MAX_TENSORS, MAX_MARKS = 268435456, 4096, 1 << 20, {"header": 1 << 21, "json": 1 << 20}
MAX_STEP, MAX_PARTS, MAX_FILES, MAX_PATH, BLOCK = 10**15, 100_000, 100_000, 960, 4096
TABLE, PAYLOAD, RESERVED = "deltackpt:table", "deltackpt:payload", "deltackpt:"
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

Span = namedtuple("Span", "dtype shape start end")  # a tensor in a safetensors file, offsets from the end of the header
Tensor = namedtuple("Tensor", "dtype shape elements")  # a tensor of a state: its storage elements in a flat array
Entry = namedtuple("Entry", "name encoding boxed dtype shape whole offset detail")
Packed = namedtuple("Packed", "grid classes threshold ceiling anchor exception_k counts unary lengths crcs")
Planes = namedtuple("Planes", "changes sizes crcs")
Part = namedtuple("Part", "metadata entries plain payloads")  # plain, payloads: for each entry, its bytes
Layout = namedtuple("Layout", "shards side tensors")  # shards: (path, header, {name: Span}, size of the file)


class Refused(Exception):
    """Input that is not what the spec says. `code` is a code of REGISTRY.md."""

    def __init__(self, code, why=""):
        super().__init__(f"{code}: {why}" if why else code)
        self.code = code


def need(condition, code, why=""):
    if not condition:
        raise Refused(code, why)


# -------------------------------------------------------------------------------------- JSON and names


def load_json(data, prefix, depth):
    """Strict JSON with integers only. `prefix` says whose codes to use: "header" ([F-PART-1], [F-PART-2]) or "json"."""
    syntax, number = ("header-json", "header-json") if prefix == "header" else ("json-syntax", "json-number")
    level, marks, inside = 0, 0, False
    for token in re.finditer(rb'\\.|["\[\]{},]', data, re.DOTALL):  # levels first: the parser recurses
        if token[0] == b'"':
            inside = not inside
        elif not inside and token[0] in b"[{,":
            marks += 1
            need(marks <= MAX_MARKS[prefix], prefix + "-too-long", "marks")  # [F-JSON-1]
        if not inside and token[0] in b"[{":
            level += 1
            need(level <= depth, prefix + "-depth")
        elif not inside and token[0] in b"]}":
            level -= 1

    def integer(text):
        if prefix == "header" and text[0] == "-" and text != "-0":
            return -1  # "no negative number": whoever takes it refuses it as header-field
        need(len(text) <= 20 and text != "-0" and -(2**63) <= int(text) < 2**63, number)
        return int(text)

    def pairs(items):
        need(len(dict(items)) == len(items), prefix + "-duplicate-key")
        return dict(items)

    def fail(text):
        raise Refused(number, text[:40])

    def constant(text):
        raise Refused(number, text)

    hooks = {"parse_int": integer, "parse_float": fail, "parse_constant": constant, "object_pairs_hook": pairs}
    try:
        value = json.loads(bytes(data).decode("utf-8"), **hooks)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails where there is a lone surrogate
        return value
    except ValueError as error:
        raise Refused(syntax, str(error)) from None


def is_canonical(value, data):
    try:
        text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return text.encode("utf-8") == data
    except UnicodeEncodeError:  # a lone surrogate
        return False


def is_int(value, limit):
    return type(value) is int and 0 <= value <= limit


def is_hex(value, digits):
    return isinstance(value, str) and len(value) == digits and not set(value) - set("0123456789abcdef")


def check_name(name):  # [F-PART-4]
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused("name-refused", "not text") from None
    need(1 <= size <= MAX_NAME, "name-refused", "length")
    need(not re.search("[\x00-\x1f\x7f-\x9f]", name), "name-refused", "control character")


def check_path(path, limit=MAX_PATH):  # [F-LAY-2]
    try:
        size = len(path.encode("utf-8"))
    except UnicodeEncodeError:
        raise Refused("name-escapes", "not text") from None
    need(1 <= size <= limit and not re.search("[\x00-\x1f\x7f\\\\:]", path), "name-escapes", ascii(path[:80]))
    for segment in path.split("/"):
        need(1 <= len(segment.encode()) <= 255 and segment not in (".", ".."), "name-escapes", path)
        need(segment.lower() != ".lock" and not segment.lower().startswith(".tmp-"), "name-escapes", path)


def storage_shape(dtype, shape):
    """[F-ELEM-2], [F-ELEM-3]: the storage shape, and the number of storage elements."""
    bits, total = dtype.bits, dtype.bits
    for d in shape:
        bits *= d
        total *= max(d, 1)
    need(len(shape) <= MAX_RANK and total < 8 * SIZE_LIMIT, "shape-overflow")
    need(bits % 8 == 0, "shape-bits")
    if dtype.bits == 8 * dtype.width:
        return list(shape), bits // dtype.bits
    if shape[-1] * dtype.bits % 8 == 0:
        return [*shape[:-1], shape[-1] * dtype.bits // 8], bits // 8
    return [bits // 8], bits // 8


# ----------------------------------------------------------------------------------- safetensors files


def parse_header(text):
    """[F-PART-1] to [F-PART-6]: the metadata, the tensors in the order of their bytes, and where they end."""
    need(text[:1] == b"{" and text.rstrip(b" \t\r\n")[-1:] == b"}", "header-json")
    header = load_json(text, "header", 8)
    metadata = header.pop("__metadata__", {})
    need(isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values()), "header-field")
    tensors = []
    for name, item in header.items():
        check_name(name)
        need(isinstance(item, dict) and item.keys() == {"dtype", "shape", "data_offsets"}, "header-field", name)
        dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
        need(isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list), "header-field", name)
        need(len(shape) <= MAX_RANK and len(offsets) == 2, "header-field", name)
        need(all(is_int(v, 2**63 - 1) for v in shape + offsets), "header-field", name)
        need(dtype in DTYPES, "dtype-unknown", name)
        size = storage_shape(DTYPES[dtype], shape)[1] * DTYPES[dtype].width
        start, end = offsets
        need(end - start == size and end < SIZE_LIMIT, "offsets-length", name)
        tensors.append((start, end, name, DTYPES[dtype], shape))
    spans, at = {}, 0
    for start, end, name, dtype, shape in sorted(tensors, key=lambda t: t[:2]):  # [F-PART-5]
        need(start >= at, "offsets-overlap", name)
        need(start == at, "offsets-gap", name)
        spans[name], at = Span(dtype, shape, start, end), end
    return metadata, spans, at


def open_safetensors(data):
    need(len(data) >= 8, "header-truncated")
    length = int.from_bytes(data[:8], "little")
    need(length <= MAX_HEADER, "header-too-long")
    need(length <= len(data) - 8, "header-truncated")
    metadata, spans, end = parse_header(bytes(data[8 : 8 + length]))
    need(end == len(data) - 8 - length, "offsets-end")
    return metadata, spans, memoryview(data)[8 + length :]


# -------------------------------------------------------------------------------------- part and table


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


class Grid:
    """The tiles of a storage shape ("Tiles")."""

    def __init__(self, shape, slices, rows, columns):
        self.lead, self.height, self.width = 1, 1, 1
        for d in shape[:-2]:
            self.lead *= d
        if len(shape) > 1:
            self.height = shape[-2]
        if len(shape) > 0:
            self.width = shape[-1]
        need(slices >= 1 and slices in (1, self.lead), "grid")  # [F-TILE-5]
        if slices == 1:  # the leading axes count as rows
            self.lead, self.height = 1, self.lead * self.height
        need(1 <= rows <= max(1, self.height) and 1 <= columns <= max(1, self.width), "grid")  # [F-TILE-1]
        self.rows, self.columns = rows, columns
        self.th, self.tw = -(-self.height // rows), -(-self.width // columns)
        self.tiles, self.span = self.lead * rows * columns, self.th * self.tw
        need(self.span <= MAX_TILE, "grid")  # [F-TILE-2]

    def tile(self, t):
        """Row in the collapsed tensor of lead * height rows, column, and the extent of what exists in tile t."""
        slice_, row, column = t // (self.rows * self.columns), t // self.columns % self.rows, t % self.columns
        top, left = row * self.th, column * self.tw
        high = max(0, min(self.th, self.height - top))
        wide = max(0, min(self.tw, self.width - left))
        return slice_ * self.height + top, left, high, wide


def parse_packed(r, dtype, shape):
    need(dtype.width in (1, 2, 4), "encoding-dtype")  # [F-PACK-1]
    slices, rows, columns = r.numbers(3, SIZE_LIMIT, "grid")
    grid = Grid(shape, slices, rows, columns)
    classes = r.number(MAX_CLASSES)
    threshold = r.number(2**dtype.b - 1) if classes else 0
    ceiling = r.number(2**dtype.b)
    anchor, exception_k = (r.number(255), r.number(MAX_EXCEPTION_K)) if ceiling else (0, 0)
    need(grid.tiles * (classes + 7) <= r.left(), "grid")
    counts = []
    for t in range(grid.tiles):
        counts.append(r.numbers(classes + 1, grid.span))
        _, _, high, wide = grid.tile(t)
        need(sum(counts[t]) <= high * wide, "count-outside")  # [F-PACK-3]
    unary, lengths = r.numbers(grid.tiles, 1 << 40), r.numbers(grid.tiles, 1 << 40)
    for t in range(grid.tiles):
        need((sum(counts[t]) + 7) // 8 + unary[t] <= lengths[t], "tile-short")
    return Packed(grid, classes, threshold, ceiling, anchor, exception_k, counts, unary, lengths, r.crcs(grid.tiles))


def parse_entry(r, before):
    shared = r.number(len(before))  # [F-TAB-2]
    raw = before[:shared] + r.take(r.number(MAX_NAME))
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("name-refused", "not UTF-8") from None
    check_name(name)
    need(not name.startswith(RESERVED), "name-refused", name)  # [F-TAB-3]
    code = r.byte()
    encoding, boxed = code & 127, code >= 128
    need(encoding < len(ENCODINGS), "encoding-unknown", name)
    if encoding == REMOVED:
        need(not boxed, "box-outside", name)
        return raw, Entry(name, encoding, False, None, None, None, [], None)
    number = r.byte()
    need(number in BY_CODE, "dtype-unknown", name)
    dtype, rank = BY_CODE[number], r.byte()
    need(rank <= MAX_RANK, "shape-overflow", name)  # [F-TAB-7]
    shape = r.numbers(rank, 2**63 - 1)
    whole, offset = shape, [0] * rank
    if boxed:  # [F-TAB-8], [F-TAB-9]
        whole, offset = r.numbers(rank, 2**63 - 1), r.numbers(rank, 2**63 - 1)
        need(all(o + s <= w for o, s, w in zip(offset, shape, whole, strict=True)), "box-outside", name)
        need(shape != whole and dtype.bits == 8 * dtype.width, "box-outside", name)
        need(encoding not in (NAN, INDEX), "encoding-boxed", name)
    if encoding == NAN:
        need(dtype.sentinel is not None, "encoding-dtype", name)  # [F-PLAIN-4]
    storage_shape(dtype, whole)
    stored, elements = storage_shape(dtype, shape)
    if encoding == PACKED:
        detail = parse_packed(r, dtype, stored)
    elif encoding == PLANES:
        changes = r.number(elements)
        chunks = -(-elements // CHUNK)
        need(chunks * (dtype.width + 4) <= r.left(), "table-short")
        detail = Planes(changes, r.numbers(chunks * dtype.width, 4 * CHUNK), r.crcs(chunks))
    else:
        detail = (r.number(elements), r.crcs(1)[0])  # changes, crc32
    return raw, Entry(name, encoding, boxed, dtype, shape, whole, offset, detail)


def parse_table(data):
    r = Cursor(data)
    entries, raw, last = [], b"", None
    for _ in range(r.number(MAX_ENTRIES)):  # [F-TAB-1]
        raw, entry = parse_entry(r, raw)
        if last:  # [F-TAB-4], [F-TAB-5]
            need((last[0], last[1].offset) < (raw, entry.offset), "table-order", entry.name)
            need(last[0] != raw or (last[1].boxed and entry.boxed), "table-order", entry.name)
        entries.append(entry)
        last = (raw, entry)
    need(r.left() == 0, "table-long")  # [F-TAB-11]
    return entries


def parse_part(data):
    """All checks of a part that need neither the manifest nor the old tensors."""
    metadata, spans, body = open_safetensors(data)
    need(metadata.get("deltackpt") == "1", "version-unknown")  # [F-META-2]
    need(re.fullmatch("0|[1-9][0-9]{0,17}", metadata.get("step", ""), re.ASCII), "part-metadata", "step")  # [F-META-1]
    for key in ("repository", "parent", "base"):  # their form is that of the manifest's: see [F-META-3]
        need(metadata.get(key), "part-metadata", key)
    rest = dict(spans)
    for name in (TABLE, PAYLOAD):  # [F-PART-7]
        need(name in rest and rest[name].dtype.name == "U8" and len(rest[name].shape) == 1, "part-tensors", name)
    table, payload = (body[span.start : span.end] for span in (rest.pop(TABLE), rest.pop(PAYLOAD)))
    need(len(table) <= MAX_TABLE, "object-too-large", "table")  # [F-TAB-15]
    entries, plain, payloads, at = parse_table(table), [], [], 0
    for e in entries:
        wanted, size = [], 0  # plain tensors as (name, dtype, shape); bytes of the payload
        elements = storage_shape(e.dtype, e.shape)[1] if e.dtype else 0
        if e.encoding == INDEX:  # [F-PLAIN-8], [F-PLAIN-9]
            indices = DTYPES["U32" if elements <= 1 << 32 else "U64"]
            values = e.dtype if e.dtype.bits == 8 * e.dtype.width else DTYPES["U8"]
            wanted = [(e.name + ".indices", indices, [e.detail[0]]), (e.name + ".values", values, [e.detail[0]])]
        elif e.encoding == NAN or (e.encoding == FULL and not e.boxed):
            wanted = [(e.name, e.dtype, e.shape)]  # [F-PLAIN-1], [F-PLAIN-5]
        elif e.encoding == FULL:
            size = elements * e.dtype.width  # [F-PLAIN-2]
        elif e.encoding == PACKED:
            size = sum(e.detail.lengths)  # [F-PACK-2]
        elif e.encoding == PLANES:
            size = sum(s >> 1 for s in e.detail.sizes)  # [F-PLANE-1]
        found = []
        for name, dtype, shape in wanted:
            span = rest.pop(name, None)  # popped: it belongs to no other entry
            need(span and span.dtype is dtype and span.shape == shape, "part-tensors", name)
            found.append(body[span.start : span.end])
        plain.append(found)
        need(size <= len(payload) - at, "payload-length", e.name)  # [F-PART-10]
        payloads.append(payload[at : at + size])
        at += size
    need(not rest, "part-tensors", "more than the table names")  # [F-PART-8]
    need(at == len(payload), "payload-length")
    return Part(metadata, entries, plain, payloads)


# ------------------------------------------------------------------------------------ decoding entries


def as_elements(data, dtype):
    return np.frombuffer(data, f"<u{dtype.width}")  # [F-ELEM-1]


def bits_of(data, count, what="padding"):
    """The first `count` bits of a section; those that fill up its last byte are zero ([F-BIT-1], [F-BIT-2])."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    need(not bits[count:].any(), "padding", what)
    return bits[:count].astype(np.int64)


def ordered(elements, dtype):
    """[F-ORD-1], [F-ORD-2], as unsigned words that may be added modulo 2^W; its own inverse."""
    if not dtype.b:
        return elements
    s = elements.view(f"<i{dtype.width}")
    return (s ^ ((s >> (8 * dtype.width - 1)) & np.iinfo(s.dtype).max)).view(elements.dtype)


def exponents(elements, dtype):
    return (elements.astype(np.int64) >> dtype.low) & (2**dtype.b - 1)  # 0 for a dtype without an exponent field


def rice(c, s):  # [F-GAP-3]
    k = 0
    while max(c, 1) << (k + 1) <= s - (s >> 5):
        k += 1
    return k


def unfold(quotients, low, k, limit):
    """Ranks below `limit` from the quotients and the low bits of their gaps ([F-GAP-2], [F-STEP-3])."""
    # The quotients alone must stay inside, so that the shift cannot overflow ([F-READ-3]).
    need(int(quotients.sum()) <= limit >> k, "gap-outside")
    ranks = np.cumsum((quotients << k) + low + 1) - 1
    need(len(ranks) == 0 or ranks[-1] < limit, "gap-outside")
    return ranks


def decode_tile(p, t, tile, dtype, old):
    """The flat positions of a tile's changes, and their new elements."""
    grid, counts, w_bits = p.grid, p.counts[t], 8 * dtype.width
    top, left, high, wide = grid.tile(t)
    # Lists: how many candidates has each, and for near lists, which.
    candidates = [grid.span] + [0] * p.classes
    if p.classes:
        class_of = np.zeros(0, np.int64)
        if high and wide:
            e = exponents(old.reshape(-1, grid.width)[top : top + high, left : left + wide], dtype).reshape(-1)
            class_of = np.where(e > p.threshold, 0, 1 + np.minimum(p.threshold - e, p.classes - 1))
        for j in range(1, p.classes + 1):
            candidates[j] = int(np.count_nonzero(class_of == j))
    for c, s in zip(counts, candidates, strict=True):
        need(c <= s, "count-outside")  # [F-PACK-3]
    need(zlib.crc32(tile) == p.crcs[t], "tile-checksum")

    # Sections: how many gaps has each list, with which parameter, and where does each section lie.
    flipped = [2 * c > s for c, s in zip(counts, candidates, strict=True)]  # [F-GAP-1]
    listed = [s - c if f else c for c, s, f in zip(counts, candidates, flipped, strict=True)]
    ks, k = [], MAX_K
    for m_list, s in zip(listed, candidates, strict=True):
        if m_list:
            k = min(k, rice(m_list, s))
        ks.append(k if m_list else 0)
    n, m = sum(counts), sum(listed)
    prefixes = []  # [F-GAP-5]: gaps in plane j
    for j in range(max(ks)):
        prefixes.append(sum(m_list for m_list, k in zip(listed, ks, strict=True) if k > j))
    n_at = sum((prefix + 7) // 8 for prefix in prefixes)
    u_at = n_at + (n + 7) // 8
    x_at = u_at + p.unary[t]
    need(x_at <= len(tile), "tile-short")

    # U. A code is the distance of its one from the one before; what follows the last one is not needed.
    need(m <= 8 * p.unary[t], "unary-count")
    ones = np.flatnonzero(np.unpackbits(np.frombuffer(tile[u_at:x_at], np.uint8), bitorder="little"))
    need(len(ones) >= m and (len(ones) - m) % 2 == 0, "unary-count")
    need(p.unary[t] == (int(ones[-1]) // 8 + 1 if len(ones) else 0), "unary-count")  # [F-PACK-6]
    codes = np.diff(ones, prepend=-1) - 1
    x = (len(ones) - m) // 2
    r_at = x_at + p.exception_k * ((x + 7) // 8)
    need(r_at <= len(tile), "tile-short")

    # G, and from it the ranks and local indices of the changes, list by list ([F-PACK-5]).
    low, at = np.zeros(m, np.int64), 0
    for j, prefix in enumerate(prefixes):
        low[:prefix] |= bits_of(tile[at : at + (prefix + 7) // 8], prefix, "G") << j
        at += (prefix + 7) // 8
    rows, columns, at = [], [], 0
    for j, (m_list, s, k) in enumerate(zip(listed, candidates, ks, strict=True)):
        ranks = unfold(codes[at : at + m_list], low[at : at + m_list], k, s)
        at += m_list
        if flipped[j]:
            changed = np.ones(s, bool)
            changed[ranks] = False
            ranks = np.flatnonzero(changed)
        if j == 0:  # list 0: the rank is the local index, of pitch tw
            row, column = ranks // max(1, grid.tw), ranks % max(1, grid.tw)
            need(np.all((row < high) & (column < wide)), "position-outside")  # [F-TILE-3]
            need(not p.classes or not np.any(class_of[row * wide + column]), "list-wrong")  # [F-LIST-1]
        else:  # near: the rank counts the elements of this class
            local = np.flatnonzero(class_of == j)[ranks] if len(ranks) else ranks
            row, column = local // max(1, wide), local % max(1, wide)
        rows.append(row)
        columns.append(column)
    positions = (top + np.concatenate(rows)) * grid.width + left + np.concatenate(columns)
    before = old[positions]

    # Steps: the widths of the raw fields, of which exceptions have their own.
    e = exponents(before, dtype)
    eligible = e < p.ceiling
    raw = np.where(eligible, np.clip(p.anchor - e, 0, w_bits - 1), 0)
    x_low = np.zeros(x, np.int64)
    for j in range(p.exception_k):  # [F-STEP-4]
        start = x_at + j * ((x + 7) // 8)
        x_low |= bits_of(tile[start : start + (x + 7) // 8], x, "X") << j
    among = np.flatnonzero(eligible)
    exceptions = among[unfold(codes[m : m + x], x_low, p.exception_k, len(among))]
    bit_length = raw[exceptions] + codes[m + x :] + 1
    need(np.all(bit_length <= w_bits), "step-outside")
    raw[exceptions] = bit_length - 1

    # R: field after field ([F-STEP-5]); bit j of all fields that have one at a time.
    ends = np.cumsum(raw)
    total = int(ends[-1]) if n else 0
    need(len(tile) - r_at == (total + 7) // 8, "tile-length")
    fields = bits_of(tile[r_at:], total, "R")
    size = np.zeros(n, np.uint64)
    for j in range(w_bits):
        has = np.flatnonzero(raw > j)
        size[has] |= fields[(ends - raw)[has] + j].astype(np.uint64) << np.uint64(j)
    size[exceptions] |= np.uint64(1) << (bit_length - 1).astype(np.uint64)  # the leading one is implied
    down = bits_of(tile[n_at:u_at], n, "N")
    step = (size + np.uint64(1)).astype(before.dtype)  # modulo 2^W
    return positions, ordered(ordered(before, dtype) + np.where(down, 0 - step, step), dtype)


def decode_packed(e, payload, old):
    new, at = old.copy(), 0
    for t in range(e.detail.grid.tiles):
        tile = payload[at : at + e.detail.lengths[t]]
        at += len(tile)
        positions, values = decode_tile(e.detail, t, tile, e.dtype, old)
        new[positions] = values
    return new


def decode_planes(e, payload, old):
    new, width, at = np.empty_like(old), e.dtype.width, 0
    zstd = zstandard.ZstdDecompressor(max_window_size=1 << 18)
    for chunk, crc in enumerate(e.detail.crcs):
        run = old[chunk * CHUNK : (chunk + 1) * CHUNK]
        sizes = e.detail.sizes[chunk * width : (chunk + 1) * width]
        need(zlib.crc32(payload[at : at + sum(s >> 1 for s in sizes)]) == crc, "tile-checksum")
        z = np.zeros(len(run), old.dtype)
        for j, size in enumerate(sizes):
            plane = bytes(payload[at : at + (size >> 1)])
            at += len(plane)
            if size & 1:
                plane = decompress(zstd, plane, len(run))
            need(len(plane) == len(run), "plane-length")  # [F-PLANE-2]
            z |= np.frombuffer(plane, np.uint8).astype(z.dtype) << z.dtype.type(8 * j)
        d = (z >> z.dtype.type(1)) ^ (0 - (z & z.dtype.type(1)))
        new[chunk * CHUNK : (chunk + 1) * CHUNK] = ordered(ordered(run, e.dtype) + d, e.dtype)
    return new


def decompress(zstd, frame, length):  # [F-PLANE-3], [F-PLANE-4]
    need(frame[:4] == b"\x28\xb5\x2f\xfd", "frame-broken")
    try:
        head = zstandard.get_frame_parameters(frame)
        need(head.content_size == length and head.window_size <= 1 << 18 and not head.dict_id, "frame-size")
        return zstd.decompress(frame, max_output_size=length, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("frame-broken", str(error)) from None


def decode_entry(e, plain, payload, old):
    """The new storage elements of an entry's box or tensor; `old` are the old ones, or None ([F-TAB-10])."""
    if e.encoding in (PACKED, PLANES):
        return (decode_packed if e.encoding == PACKED else decode_planes)(e, payload, old)
    changes, crc = e.detail
    found = 0
    for data in [payload] if e.boxed else plain:
        found = zlib.crc32(data, found)
    need(found == crc, "tensor-checksum", e.name)
    if e.encoding == FULL:
        return as_elements(payload if e.boxed else plain[0], e.dtype)
    new = old.copy()
    if e.encoding == NAN:  # [F-PLAIN-5], [F-PLAIN-7]
        values = as_elements(plain[0], e.dtype)
        changed = values != e.dtype.sentinel
        need(np.count_nonzero(changed) == changes, "count-differs", e.name)
        new[changed] = values[changed]
    else:  # [F-PLAIN-8], [F-PLAIN-9]
        indices = as_elements(plain[0], DTYPES["U32" if len(old) <= 1 << 32 else "U64"])
        values = as_elements(plain[1], e.dtype)
        rising = len(indices) == 0 or (np.all(indices[1:] > indices[:-1]) and indices[-1] < len(old))
        need(rising, "indices-order", e.name)
        new[indices] = values
    return new


def apply_patch(state, parts):
    """The state after a patch ([F-APPLY-1]): every entry is decoded against `state`, which is left as it is."""
    by_name = {}
    for part in parts:
        for e, plain, payload in zip(part.entries, part.plain, part.payloads, strict=True):
            by_name.setdefault(e.name, []).append((e, plain, payload))
    result = dict(state)
    for name, group in by_name.items():
        first = group[0][0]
        need(len(group) <= MAX_BOXES, "boxes-too-many", name)  # [F-TAB-16]
        for e, _, _ in group[1:]:  # [F-TAB-6]
            need(e.boxed and first.boxed and e.dtype is first.dtype and e.whole == first.whole, "boxes-overlap", name)
        if first.encoding == REMOVED:
            result.pop(name, None)
            continue
        old = state.get(name)
        fits = old is not None and old.dtype is first.dtype and old.shape == first.whole
        need(fits or all(e.encoding == FULL for e, _, _ in group), "base-shape", name)  # [F-APPLY-2]
        if not first.boxed:
            e, plain, payload = group[0]
            new = decode_entry(e, plain, payload, old.elements if fits else None)
        else:
            new = apply_boxes(group, first, old.elements if fits else None)
        result[name] = Tensor(first.dtype, first.whole, new)
    return result


def apply_boxes(group, first, old):
    whole, elements = first.whole, storage_shape(first.dtype, first.whole)[1]
    if old is None:  # [F-APPLY-3]: as many elements as it takes; that no two boxes overlap is seen below
        covered = sum(storage_shape(e.dtype, e.shape)[1] for e, _, _ in group)
        need(covered >= elements, "base-shape", first.name)
        need(covered == elements, "boxes-overlap", first.name)
    new = np.zeros(elements, f"<u{first.dtype.width}") if old is None else old.copy()
    seen = np.zeros(elements, bool)
    for e, plain, payload in group:
        if storage_shape(e.dtype, e.shape)[1] == 0:
            decode_entry(e, plain, payload, new[:0])
            continue
        region = tuple(slice(o, o + s) for o, s in zip(e.offset, e.shape, strict=True))
        need(not seen.reshape(whole)[region].any(), "boxes-overlap", e.name)  # [F-TAB-6]
        seen.reshape(whole)[region] = True
        box = None if old is None else old.reshape(whole)[region].reshape(-1)
        new.reshape(whole)[region] = decode_entry(e, plain, payload, box).reshape(e.shape)
    return new


# ---------------------------------------------------------------------------------------- state digest


def mix(n):
    z = (np.asarray(n, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


KEY_A = [mix(np.arange(BLOCK) * 4 + lane) for lane in (0, 1)]


def sums_of(elements):
    """D[0] and D[1] of a tensor ("State digest"), 64 blocks at a time."""
    total = [0, 0]
    for start in range(0, len(elements), 64 * BLOCK):
        v = elements[start : start + 64 * BLOCK].astype(np.uint64)
        if elements.itemsize == 8:
            v ^= v >> np.uint64(32)
        blocks = -(-len(v) // BLOCK)
        v = np.concatenate([v, np.zeros(blocks * BLOCK - len(v), np.uint64)]).reshape(blocks, BLOCK)
        h = start // BLOCK + np.arange(blocks)
        for lane in (0, 1):
            b = mix(4 * h + 2 + lane) | np.uint64(1)
            total[lane] += int(((v @ KEY_A[lane]) * b).sum())
    return [d % 2**64 for d in total]


def state_digest(rows):
    """`rows`: (name, dtype name, shape, [D0, D1]) of every tensor ([F-DIG-1])."""
    digest = hashlib.sha256(b"deltackpt state 1\n")
    for name, dtype, shape, d in sorted(rows, key=lambda row: row[0].encode()):
        raw = name.encode()
        digest.update(len(raw).to_bytes(4, "little") + raw + bytes([len(dtype)]) + dtype.encode() + bytes([len(shape)]))
        for value in [*shape, *d]:
            digest.update(value.to_bytes(8, "little"))
    return digest.hexdigest()


# ------------------------------------------------------------------------ manifest, layout and digests


def is_file(value):
    fields = isinstance(value, dict) and value.keys() == {"name", "size", "sha256"}
    return fields and isinstance(value["name"], str) and is_int(value["size"], 1 << 62) and is_hex(value["sha256"], 64)


def check_object_name(file):  # [F-MAN-8]
    check_path(file["name"], 1024)
    need(file["name"].startswith(("anchors/", "patches/", "states/", "folds/")), "name-escapes", file["name"])


def is_link(value):
    fields = isinstance(value, dict) and value.keys() == {"step", "id"}
    return fields and is_int(value["step"], MAX_STEP) and is_hex(value["id"], 64)


def parse_manifest(data, manifest_id=None):
    need(len(data) <= MAX_MANIFEST, "json-too-long")
    need(manifest_id is None or hashlib.sha256(data).hexdigest() == manifest_id, "manifest-hash")  # [F-MAN-2]
    m = load_json(data, "json", 16)
    need(isinstance(m, dict) and m.get("format") == "deltackpt", "manifest-field", "format")
    need(is_int(m.get("version"), 1) and m["version"] == 1, "version-unknown")
    requires = m.get("requires", [])
    need(isinstance(requires, list) and all(isinstance(v, str) for v in requires), "manifest-field", "requires")
    need(not requires, "feature-unknown", ascii(requires)[:80])  # [F-MAN-11]
    need(is_canonical(m, data), "manifest-canonical")  # [F-MAN-1]

    def field(name, good):
        need(name in m and good(m[name]), "manifest-field", name)  # [F-MAN-3]

    def files(value):  # [F-MAN-10]
        return value is None or (isinstance(value, list) and len(value) <= MAX_PARTS and all(map(is_file, value)))

    def counts(value):
        names = {"added", "removed", "changed", "elements", "changed_elements"}
        return isinstance(value, dict) and value.keys() == names and all(is_int(v, 1 << 62) for v in value.values())

    field("repository", lambda v: is_hex(v, 32))
    field("step", lambda v: is_int(v, MAX_STEP))
    field("parent", lambda v: v is None or is_link(v))
    field("base", lambda v: v is None or is_hex(v, 64))
    field("state", lambda v: is_hex(v, 64))
    field("anchor", files)
    field("patch", files)
    field("layout", is_file)
    field("digests", is_file)
    field("counts", counts)
    field("time", lambda v: is_int(v, 1 << 53))
    field("producer", lambda v: isinstance(v, str))
    field("metadata", lambda v: isinstance(v, dict))
    need(m["anchor"] is not None or m["patch"] is not None, "manifest-field", "neither anchor nor patch")  # [F-MAN-4]
    need(m["parent"] is not None or m["patch"] is None, "manifest-field", "a patch without parent")  # [F-MAN-5]
    need((m["parent"] is None) == (m["base"] is None), "manifest-field", "base")
    need(m["parent"] is None or m["parent"]["step"] < m["step"], "manifest-field", "parent.step")  # [F-MAN-6]
    for file in [*(m["anchor"] or []), *(m["patch"] or []), m["layout"], m["digests"]]:
        check_object_name(file)
    return m


def parse_edge(data):
    """An edge by itself. Nothing here follows one: a reader need not ([F-EDGE-6])."""
    need(len(data) <= MAX_EDGE, "json-too-long")
    edge = load_json(data, "json", 16)
    need(isinstance(edge, dict) and edge.get("format") == "deltackpt-edge", "manifest-field", "format")
    need(is_int(edge.get("version"), 1) and edge["version"] == 1, "version-unknown")
    need(is_canonical(edge, data), "manifest-canonical")
    names = {"format", "version", "repository", "from", "to", "files", "producer", "time"}
    need(edge.keys() == names, "manifest-field", "fields")  # [F-EDGE-1]
    start, files = edge["from"], edge["files"]
    need(is_hex(edge["repository"], 32) and is_link(edge["to"]), "manifest-field")
    need(start is None or is_link(start), "manifest-field", "from")
    need(isinstance(edge["producer"], str) and is_int(edge["time"], 1 << 53), "manifest-field")
    need(start is None or start["step"] < edge["to"]["step"], "manifest-field", "from.step")  # [F-EDGE-2]
    need(isinstance(files, list) and len(files) <= MAX_PARTS and all(map(is_file, files)), "manifest-field", "files")
    for file in files:  # [F-EDGE-3]
        check_object_name(file)
        folder = "anchors/" if start is None else "folds/"
        need(file["name"].startswith(folder), "manifest-field", file["name"])
    return edge


def parse_layout(data):
    need(len(data) <= MAX_LAYOUT, "json-too-long")  # [F-LAY-5]
    value = load_json(data, "json", 16)
    need(isinstance(value, dict) and value.get("format") == "deltackpt-layout", "layout-field", "format")
    # [F-LAY-1]. Version first: another version may have other fields ([F-VER-2]).
    need(is_int(value.get("version"), 1) and value["version"] == 1, "version-unknown")
    need(value.keys() == {"format", "version", "shards", "side"}, "layout-field")
    for key, other, good in (("shards", "header", lambda v: isinstance(v, str)), ("side", "file", is_file)):
        need(isinstance(value[key], list), "layout-field", key)
        for item in value[key]:
            need(isinstance(item, dict) and item.keys() == {"path", other} and good(item[other]), "layout-field", key)
            need(isinstance(item["path"], str), "layout-field", key)
            check_path(item["path"])
    for item in value["side"]:
        check_object_name(item["file"])
    shards, tensors = [], {}
    for item in value["shards"]:
        try:
            header = item["header"].encode("utf-8")
        except UnicodeEncodeError:
            raise Refused("header-json", "not text") from None
        need(len(header) <= MAX_HEADER, "header-too-long")
        _, spans, end = parse_header(header)  # [F-LAY-4]
        for name, span in spans.items():
            need(name not in tensors, "layout-field", "a tensor in two shards")
            need(not name.startswith(RESERVED), "name-refused", name)  # [F-PART-9]
            tensors[name] = span
        need(len(tensors) <= MAX_TENSORS, "layout-field", "tensors")  # [F-LAY-5]
        shards.append((item["path"], header, spans, 8 + len(header) + end))
    paths = [item["path"] for item in value["shards"] + value["side"]]
    need(len(paths) <= MAX_FILES and len(set(paths)) == len(paths), "layout-field", "files")  # [F-LAY-3]
    folders = {path[:i] for path in paths for i, c in enumerate(path) if c == "/"}
    need(folders.isdisjoint(paths), "layout-field", "a path is the folder of another")
    side = [(item["path"], item["file"]) for item in value["side"]]
    return Layout(shards, side, dict(sorted(tensors.items(), key=lambda item: item[0].encode())))


def parse_digests(data, layout, state):
    """{name: (sums, xxh3)}, once the sums have been found to give the state digest ([F-DOBJ-1], [F-DOBJ-2])."""
    metadata, spans, body = open_safetensors(data)
    need(metadata.get("deltackpt-digests") == "1", "version-unknown")
    n = len(layout.tensors)
    wanted = {"sums": ("U64", [n, 2]), "xxh3": ("U8", [n, 16])}
    need({name: (span.dtype.name, span.shape) for name, span in spans.items()} == wanted, "digests-shape")
    sums = as_elements(body[spans["sums"].start : spans["sums"].end], DTYPES["U64"]).reshape(n, 2).tolist()
    xxh3 = bytes(body[spans["xxh3"].start : spans["xxh3"].end])
    rows = [(name, span.dtype.name, span.shape, sums[i]) for i, (name, span) in enumerate(layout.tensors.items())]
    need(state_digest(rows) == state, "state-differs")
    return {name: (sums[i], xxh3[16 * i : 16 * i + 16]) for i, name in enumerate(layout.tensors)}


def prove(state, layout, digests):
    """[F-APPLY-5]: the layout's tensors, each with the bits of its digests, and no others."""
    proven = {}
    for name, span in layout.tensors.items():
        tensor = state.get(name)
        need(tensor and tensor.dtype is span.dtype and tensor.shape == span.shape, "tensor-shape", name)
        sums, xxh3 = digests[name]
        need(sums_of(tensor.elements) == sums, "tensor-differs", name)
        if xxhash:
            need(xxhash.xxh3_128_digest(np.ascontiguousarray(tensor.elements).data) == xxh3, "tensor-differs", name)
        proven[name] = tensor
    return proven


# ------------------------------------------------------------------------------------------ repository


def fetch(root, name, limit, missing="object-missing"):
    """The bytes of an object in a local store. Mapped, so that its size costs no memory."""
    path = Path(root)
    for segment in name.split("/"):  # the name was checked as [F-MAN-8], or made from digits
        path = path / segment
        try:
            need(not path.is_symlink(), "object-not-a-file", name)  # [S-STORE-4]
        except OSError as error:
            raise Refused("store-io", str(error)) from None
    try:
        need(stat.S_ISREG(path.stat().st_mode), "object-not-a-file", name)
        with path.open("rb") as file:
            size = path.stat().st_size
            need(size <= limit, "object-too-large", name)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(missing, name) from None
    except (OSError, ValueError) as error:
        raise Refused("store-io", str(error)) from None


def fetch_file(root, file, limit=SIZE_LIMIT):  # [F-MAN-12], [F-APPLY-4]
    data = fetch(root, file["name"], limit)
    need(len(data) == file["size"], "object-hash", file["name"])
    need(hashlib.sha256(data).hexdigest() == file["sha256"], "object-hash", file["name"])
    return data


def read_marker(root):  # [S-MARK-1], [S-MARK-5]
    data = bytes(fetch(root, "deltackpt.json", MAX_SMALL, "repository-missing"))
    marker = load_json(data, "json", 16)
    need(isinstance(marker, dict) and marker.get("format") == "deltackpt", "marker-field")
    need(is_int(marker.get("version"), 1) and marker["version"] == 1, "version-unknown")
    need(marker.keys() == {"format", "repository", "version"} and is_canonical(marker, data), "marker-field")
    need(is_hex(marker["repository"], 32), "marker-field")
    return marker["repository"]


def read_ref(root, name):  # [S-REF-1]
    need(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name), "ref-name", name)  # [S-NAME-7]
    data = bytes(fetch(root, f"refs/{name}.json", MAX_SMALL, "ref-missing"))
    ref = load_json(data, "json", 16)
    need(isinstance(ref, dict) and ref.keys() == {"id", "step"}, "manifest-field", "ref")
    need(is_hex(ref["id"], 64) and is_int(ref["step"], MAX_STEP), "manifest-field", "ref")
    need(is_canonical(ref, data), "manifest-canonical", "ref")
    return ref


def read_manifest(root, repository, link):
    data = bytes(fetch(root, f"steps/{link['step']:08d}-{link['id']}.json", MAX_MANIFEST))
    m = parse_manifest(data, link["id"])
    need(m["step"] == link["step"] and m["repository"] == repository, "manifest-elsewhere")  # [F-MAN-2]
    return m


def read_plan(root, step, ref):
    """Manifests (with their ids) from the nearest anchor to the step ([S-READ-1])."""
    repository, link, plan = read_marker(root), read_ref(root, ref), []
    while True:
        need((link is not None and link["step"] >= step) or plan, "step-missing", str(step))
        try:
            m = read_manifest(root, repository, link)
        except Refused as refusal:  # a parent that is gone, and no step after it has another way
            need(not plan or refusal.code != "object-missing", "chain-broken", str(link["step"]))
            raise
        if plan:
            need(plan[-1][1]["base"] == m["state"], "chain-differs")  # [F-MAN-7]
        if plan or m["step"] == step:
            plan.append((link["id"], m))
            if m["anchor"] is not None:
                return plan[::-1]
            need(m["parent"] is not None, "chain-broken")
        link = m["parent"]


def read_state(root, m):
    layout = parse_layout(bytes(fetch_file(root, m["layout"], MAX_LAYOUT)))
    return layout, parse_digests(fetch_file(root, m["digests"], MAX_DIGESTS), layout, m["state"])


def read_anchor(root, m, layout):
    files = m["anchor"]  # [F-MAN-9]
    need([file["size"] for file in files] == [shard[3] for shard in layout.shards], "anchor-files")
    state = {}
    for file, (_, header, spans, _) in zip(files, layout.shards, strict=True):
        body = memoryview(fetch_file(root, file))[8 + len(header) :]
        for name, span in spans.items():
            state[name] = Tensor(span.dtype, span.shape, as_elements(body[span.start : span.end], span.dtype))
    return state


def read_patch(root, m):
    parts = []
    for file in m["patch"]:
        part = parse_part(fetch_file(root, file))
        wanted = (m["repository"], str(m["step"]), m["parent"]["id"], m["base"])  # [F-META-3]
        found = tuple(part.metadata[key] for key in ("repository", "step", "parent", "base"))
        need(found == wanted, "part-elsewhere", file["name"])
        parts.append(part)
    return parts


def read_step(root, step, ref="main"):
    """The layout, the proven state and the side files of a step. Every step on the way is proven too."""
    plan = read_plan(root, step, ref)
    objects = [read_state(root, m) for _, m in plan]
    patches = [read_patch(root, m) for _, m in plan[1:]]  # [F-APPLY-4]: all of them before any is applied
    layout, digests = objects[0]
    state = prove(read_anchor(root, plan[0][1], layout), layout, digests)
    for parts, (layout, digests) in zip(patches, objects[1:], strict=True):
        state = prove(apply_patch(state, parts), layout, digests)
    side = [(path, fetch_file(root, file)) for path, file in layout.side]
    return layout, state, side


def restore(root, step, out, ref="main"):
    out = Path(out)
    need(not out.exists() or (out.is_dir() and not any(out.iterdir())), "output-exists", str(out))
    layout, state, side = read_step(root, step, ref)
    files = [(path, [data]) for path, data in side]
    for path, header, spans, _ in layout.shards:
        tensors = [np.ascontiguousarray(state[name].elements).data for name in spans]
        files.append((path, [len(header).to_bytes(8, "little"), header, *tensors]))
    out.mkdir(parents=True, exist_ok=True)
    for path, pieces in files:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        with (out / path).open("xb") as file:
            for piece in pieces:
                file.write(piece)


def list_part(path):
    part = parse_part(fetch(Path(path).parent, Path(path).name, SIZE_LIMIT, "part-missing"))
    print(" ".join(f"{key}={value!a}" for key, value in sorted(part.metadata.items())))
    for e in part.entries:
        box = f"{e.shape} at {e.offset} of {e.whole}" if e.boxed else e.shape
        changes = "" if e.encoding == REMOVED else e.detail[0]
        if e.encoding == PACKED:
            changes = sum(map(sum, e.detail.counts))
        print(ascii(e.name), ENCODINGS[e.encoding], e.dtype.name if e.dtype else "", box or "", changes)


def main(arguments):
    try:
        if len(arguments) in (4, 5) and arguments[0] == "restore" and arguments[2].isdecimal():
            restore(arguments[1], int(arguments[2]), *arguments[3:])
        elif len(arguments) == 2 and arguments[0] == "part":
            list_part(arguments[1])
        else:
            print(__doc__, file=sys.stderr)
            return 2
    except Refused as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
