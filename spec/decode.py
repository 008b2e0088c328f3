"""A second reader of the deltackpt format, made from FORMAT.md, VERSION1.md, STORE.md and REGISTRY.md alone.

It is meant to be read beside the spec, imports nothing of deltackpt, and prefers being plain to being fast.
Needs numpy and zstandard; proves tensors by XXH3 too where the module xxhash happens to be there.

    python spec/decode.py restore REPO STEP OUT [REF]   make the checkpoint of a step, or tag, from a local repository
    python spec/decode.py part PART                     list the entries of a part
"""

import hashlib
import json
import math
import mmap
import re
import stat
import sys
import zlib
from collections import namedtuple
from pathlib import Path

import numpy as np
import zstandard

sys.path.insert(0, str(Path(__file__).parent))  # for whoever loads this file by its path
import decode_v1
from decode_base import (
    BY_CODE,
    DTYPES,
    ENCODINGS,
    FULL,
    INDEX,
    MAX_NAME,
    MAX_RANK,
    NAN,
    PACKED,
    PLANES,
    REMOVED,
    RESERVED,
    SIZE_LIMIT,
    Cursor,
    Refused,
    as_elements,
    check_name,
    check_shape,
    exponents,
    is_packed_dtype,
    need,
    ordered,
    table_name,
)

try:
    import xxhash
except ImportError:
    xxhash = None

TABLE, PAYLOAD, MAX_TABLE, MAX_ENTRIES, MAX_BOXES = "deltackpt:table", "deltackpt:payload", 268435456, 1 << 20, 4096
BOXED, REPEAT, CUT, CHUNK, MAX_WINDOW = 128, 64, 128, 131072, 1 << 18
MAX_CLASSES, MAX_COUNT_BITS, MAX_TILE, MAX_LENGTH, MAX_K = 15, 32, 1 << 31, 1 << 40, 31
MAX_HEADER, JSON_DEPTH, JSON_MARKS = 100_000_000, 16, 1 << 21
MAX_MANIFEST, MAX_PACK, MAX_LAYOUT, MAX_DIGESTS, MAX_SMALL = 4194304, 16777216, 268435456, 268435456, 65536
MAX_STEP, MAX_FILES, MAX_TENSORS = 10**15, 100_000, 1 << 20
MAX_PATH, MAX_OBJECT_NAME, BLOCK = 960, 1024, 4096

Span = namedtuple("Span", "dtype shape start end")  # a tensor in a safetensors file, offsets from the end of the header
Tensor = namedtuple("Tensor", "dtype shape elements")  # a tensor of a state: its storage elements in a flat array
Entry = namedtuple("Entry", "name encoding boxed dtype shape whole offset detail")
Packed = namedtuple("Packed", "grid classes sized top anchor counts lengths crcs")
Planes = namedtuple("Planes", "changes sizes crcs")
Part = namedtuple("Part", "metadata entries plain payloads")  # plain, payloads: for each entry, its bytes
Layout = namedtuple("Layout", "shards side tensors")  # shards: (path, header, {name: Span}, size of the file)


# -------------------------------------------------------------------------------------- JSON and names


def load_json(data, floats=False):
    """The profile of JSON ([F-JSON-1], [F-JSON-2]); an index may have fractions and exponents ([F-DIR-3])."""
    level, marks, inside = 0, 0, False
    for token in re.finditer(rb'\\.|["\[\]{},]', data, re.DOTALL):  # before the parser, which recurses
        if token[0] == b'"':
            inside = not inside
        elif not inside and token[0] in b"[{,":
            marks += 1
            need(marks <= JSON_MARKS, "json-too-long", "marks")
        if not inside and token[0] in b"[{":
            level += 1
            need(level <= JSON_DEPTH, "json-depth")
        elif not inside and token[0] in b"]}":
            level -= 1

    def integer(text):
        need(len(text) <= 20 and text != "-0" and -(2**63) <= int(text) < 2**63, "json-number")
        return int(text)

    def fraction(text):
        need(floats and math.isfinite(float(text)), "json-number", text[:40])
        return float(text)

    def constant(text):  # NaN, Infinity
        raise Refused("json-number", text)

    def pairs(items):
        need(len(dict(items)) == len(items), "json-duplicate-key")
        return dict(items)

    hooks = {"parse_int": integer, "parse_float": fraction, "parse_constant": constant, "object_pairs_hook": pairs}
    try:
        value = json.loads(bytes(data).decode("utf-8"), **hooks)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails where there is a lone surrogate
        return value
    except ValueError as error:
        raise Refused("json-syntax", str(error)) from None


def is_canonical(value, data):  # [F-JSON-3]
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8") == data


def is_int(value, limit):
    return type(value) is int and 0 <= value <= limit


def is_hex(value, digits):
    return isinstance(value, str) and len(value) == digits and not set(value) - set("0123456789abcdef")


def is_plain(name, limit=MAX_PATH):
    """[F-NAME-1], and the length of a path ([F-LAY-2]) or object name ([F-MAN-8])."""
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    if not 1 <= len(raw) <= limit or re.search("[\x00-\x1f\x7f-\x9f\\\\:]", name):
        return False
    segments = raw.lower().split(b"/")  # the lower case of bytes is that of A to Z alone
    bad = (b"", b".", b"..", b".lock")
    return all(s not in bad and len(s) <= 255 and not s.startswith(b".tmp-") for s in segments)


def check_path(path, limit=MAX_PATH):
    need(is_plain(path, limit), "name-escapes", ascii(path[:80]))


# ----------------------------------------------------------------------------------- safetensors files


def parse_header(text):
    """[F-PART-1] to [F-PART-6]: the metadata, the tensors in the order of their bytes, and where they end."""
    need(text[:1] == b"{", "json-syntax")
    header = load_json(text)
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
        size = check_shape(DTYPES[dtype], shape) * DTYPES[dtype].width
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


class Grid:
    """The tiles of a storage shape ("Tiles")."""

    def __init__(self, shape, rows, columns):
        self.height, self.width = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        need(1 <= rows <= max(1, self.height) and 1 <= columns <= max(1, self.width), "grid")  # [F-TILE-1]
        self.columns, self.tiles = columns, rows * columns
        self.th, self.tw = -(-self.height // rows), -(-self.width // columns)
        need(self.th * self.tw <= MAX_TILE, "grid")  # [F-TILE-2]

    def tile(self, t):
        """First row, first column, and the rows and columns that exist in tile t."""
        top, left = t // self.columns * self.th, t % self.columns * self.tw
        return top, left, max(0, min(self.th, self.height - top)), max(0, min(self.tw, self.width - left))


def parse_packed(r, dtype, shape):
    if is_packed_dtype(dtype):  # [F-ELEM-4]
        shape = [check_shape(dtype, shape)]
    form = r.byte()
    bits, cut = form & 127, form & CUT
    need(bits <= MAX_COUNT_BITS, "number-limit", "bits of a count")  # [F-PACK-10]
    rows, columns = r.numbers(2, SIZE_LIMIT, "grid") if cut else (1, 1)
    grid = Grid(shape, rows, columns)
    need(not cut or grid.tiles > 1, "grid", "one tile")  # [F-PACK-10]
    scale = r.byte()
    classes, sized = scale & 15, scale >> 4
    need(1 <= classes <= MAX_CLASSES and sized <= classes, "number-limit", "scale")  # [F-PACK-7]
    top = r.byte() if classes > 1 else 0
    need(top < 2**dtype.b, "number-limit", "top")
    anchor = r.byte() if sized else 0
    lists = classes + sized
    size = -(-grid.tiles * lists * bits // 8)
    need(size + 5 * grid.tiles <= r.left(), "grid")
    run = int.from_bytes(r.take(size), "little")
    flat = [run >> i * bits & (1 << bits) - 1 for i in range(grid.tiles * lists)]
    need(run >> len(flat) * bits == 0, "padding", "counts")  # [F-PACK-11]
    need(max(flat).bit_length() == bits, "number-form", "counts")  # [F-PACK-10]
    need(max(flat) <= MAX_TILE, "number-limit", "counts")
    counts = [flat[i : i + lists] for i in range(0, len(flat), lists)]
    lengths, crcs = r.numbers(grid.tiles, MAX_LENGTH), r.crcs(grid.tiles)
    changes = [sum(count[:classes]) for count in counts]
    for t, count in enumerate(counts):
        _, _, high, wide = grid.tile(t)
        need(changes[t] <= high * wide, "count-outside")  # [F-PACK-8]
        long, of = count[classes:], count[classes - sized : classes]
        need(all(m <= n for m, n in zip(long, of, strict=True)), "count-outside")
    need(all(m <= 8 * length for m, length in zip(changes, lengths, strict=True)), "tile-short")  # [F-PACK-9]
    return Packed(grid, classes, sized, top, anchor, counts, lengths, crcs)


def parse_planes(r, dtype, elements):
    changes, chunks = r.number(elements), -(-elements // CHUNK)
    need(chunks * (dtype.width + 4) <= r.left(), "table-short")
    return Planes(changes, r.numbers(chunks * dtype.width, 4 * CHUNK), r.crcs(chunks))


def parse_name(r, before, version):
    """The bytes of a name after the name before ([F-TAB-17]; in version 1 [F-TAB-2])."""
    shared = r.number(len(before))
    tail = r.number(len(before) - shared) if version > 1 else 0
    return before[:shared] + r.take(r.number(MAX_NAME)) + before[len(before) - tail :]


def parse_entry(r, before, last, version):
    """`before`: the bytes of the name before; `last`: the entry before, or None."""
    raw = parse_name(r, before, version)
    name, code = table_name(raw), r.byte()
    encoding, boxed, repeat = code & 127, code >= BOXED, False
    if version > 1:
        encoding, repeat = code & 63, bool(code & REPEAT)
    need(encoding < len(ENCODINGS), "encoding-unknown", name)
    if repeat:  # [F-TAB-18]
        need(last and last.encoding != REMOVED and encoding != REMOVED and not boxed, "table-repeat", name)
    if encoding == REMOVED:
        need(not boxed, "box-outside", name)
        return raw, Entry(name, encoding, False, None, None, None, [], None)
    if repeat:
        dtype, shape = last.dtype, last.shape
    else:
        number = r.byte()
        need(number in BY_CODE, "dtype-unknown", name)
        dtype, rank = BY_CODE[number], r.byte()
        need(rank <= MAX_RANK, "shape-overflow", name)  # [F-TAB-7]
        shape = r.numbers(rank, 2**63 - 1)
    whole, offset = shape, [0] * len(shape)
    if boxed:  # [F-TAB-8], [F-TAB-9]
        whole, offset = r.numbers(len(shape), 2**63 - 1), r.numbers(len(shape), 2**63 - 1)
        need(all(o + s <= w for o, s, w in zip(offset, shape, whole, strict=True)), "box-outside", name)
        need(shape != whole and not is_packed_dtype(dtype), "box-outside", name)
        need(encoding not in (NAN, INDEX), "encoding-boxed", name)
    if encoding == NAN:
        need(dtype.sentinel is not None, "encoding-dtype", name)  # [F-PLAIN-4]
    if encoding == PACKED:
        need(dtype.width in (1, 2, 4), "encoding-dtype", name)  # [F-PACK-1]
    check_shape(dtype, whole)
    elements = check_shape(dtype, shape)
    if encoding == PACKED:
        detail = (parse_packed if version > 1 else decode_v1.parse_packed)(r, dtype, shape)
    elif encoding == PLANES:
        detail = parse_planes(r, dtype, elements)
    else:
        detail = (r.number(elements), r.crcs(1)[0])  # changes, crc32
    return raw, Entry(name, encoding, boxed, dtype, shape, whole, offset, detail)


def parse_table(data, version=2):
    r = Cursor(data)
    entries, raw, entry = [], b"", None
    for _ in range(r.number(MAX_ENTRIES)):  # [F-TAB-1]
        last, before = entry, raw
        raw, entry = parse_entry(r, before, last, version)
        if last:  # [F-TAB-4], [F-TAB-5]
            need((before, last.offset) < (raw, entry.offset), "table-order", entry.name)
            need(before != raw or (last.boxed and entry.boxed), "table-order", entry.name)
        entries.append(entry)
    need(r.left() == 0, "table-long")  # [F-TAB-11]
    return entries


FORMS = {"repository": "[0-9a-f]{32}", "step": "0|[1-9][0-9]{0,15}", "parent": "[0-9a-f]{64}", "base": "[0-9a-f]{64}"}


def plain_tensors(e, version):
    """The plain tensors of an entry, as (name, dtype, shape)."""
    if e.encoding == INDEX:  # [F-PLAIN-8], [F-PLAIN-9]
        indices = DTYPES["U32" if check_shape(e.dtype, e.shape) <= 1 << 32 else "U64"]
        values = DTYPES["U8"] if is_packed_dtype(e.dtype) else e.dtype
        return [(e.name + ".indices", indices, [e.detail[0]]), (e.name + ".values", values, [e.detail[0]])]
    if e.encoding == NAN or (e.encoding == FULL and version == 1 and not e.boxed):
        return [(e.name, e.dtype, e.shape)]  # [F-PLAIN-5], [F-PLAIN-1]
    return []


def payload_size(e, version):
    if e.encoding == FULL and (version > 1 or e.boxed):
        return check_shape(e.dtype, e.shape) * e.dtype.width  # [F-FULL-1], [F-PLAIN-2]
    if e.encoding == PACKED:
        return sum(e.detail.lengths)  # [F-PACK-2]
    return sum(s >> 1 for s in e.detail.sizes) if e.encoding == PLANES else 0  # [F-PLANE-1]


def parse_part(data):
    """All checks of a part that need neither the manifest nor the old tensors."""
    metadata, spans, body = open_safetensors(data)
    need(metadata.get("deltackpt") in ("1", "2"), "version-unknown")  # [F-META-2]
    version = int(metadata["deltackpt"])
    for key, form in FORMS.items():  # [F-META-1]
        need(re.fullmatch(form, metadata.get(key, "")), "part-metadata", key)
    need(int(metadata["step"]) <= MAX_STEP, "part-metadata", "step")
    rest = dict(spans)
    for name in (TABLE, PAYLOAD):  # [F-PART-7]
        need(name in rest and rest[name].dtype.name == "U8" and len(rest[name].shape) == 1, "part-tensors", name)
    table, payload = (body[span.start : span.end] for span in (rest.pop(TABLE), rest.pop(PAYLOAD)))
    need(len(table) <= MAX_TABLE, "object-too-large", "table")  # [F-TAB-15]
    entries, plain, payloads, at = parse_table(table, version), [], [], 0
    for e in entries:
        found = []
        for name, dtype, shape in plain_tensors(e, version):
            span = rest.pop(name, None)  # popped: it belongs to no other entry
            need(span and span.dtype is dtype and span.shape == shape, "part-tensors", name)
            found.append(body[span.start : span.end])
        plain.append(found)
    need(not rest, "part-tensors", "more than the table names")  # [F-PART-8]
    for e in entries:  # [F-PART-10]
        size = payload_size(e, version)
        need(size <= len(payload) - at, "payload-length", e.name)
        payloads.append(payload[at : at + size])
        at += size
    need(at == len(payload), "payload-length")
    return Part(metadata, entries, plain, payloads)


# ------------------------------------------------------------------------------------ decoding entries


def rice(listed, candidates):  # [F-GAP-6]
    t = candidates - (listed >> 1)
    fitting = [k for k in range(MAX_K + 1) if listed << k <= t - (t >> 5)]
    return max(fitting, default=0)


def fields(bits, at, widths):
    """Values of their own widths, one after the other from bit `at` on, lowest bit first."""
    starts = at + np.cumsum(widths) - widths
    values = np.zeros(len(widths), np.int64)
    for j in range(int(widths.max(initial=0))):
        has = np.flatnonzero(widths > j)
        values[has] |= bits[starts[has] + j].astype(np.int64) << j
    return values


def chosen_of(m, n, k, quotients, low):
    """Which of n candidates a list chooses ([F-GAP-1], [F-GAP-2]): their ranks, rising."""
    need(not np.any(quotients > n >> k), "gap-outside")  # [F-READ-3]
    listed = np.cumsum((quotients << k) + low + 1) - 1
    need(len(listed) == 0 or listed[-1] < n, "gap-outside")
    if 2 * m <= n:
        return listed
    chosen = np.ones(n, bool)
    chosen[listed] = False
    return np.flatnonzero(chosen)


class Tile:
    """The lists of a tile: which elements changed, which of the changes are long, and where the values begin."""

    def __init__(self, p, counts, data, e):
        kind = np.clip(p.top - e, 0, p.classes - 1)
        first = p.classes - p.sized
        sizes = [int(np.count_nonzero(kind == c)) for c in range(p.classes)] + counts[first : p.classes]
        need(all(m <= n for m, n in zip(counts, sizes, strict=True)), "count-outside")  # [F-PACK-8]
        listed = [n - m if 2 * m > n else m for m, n in zip(counts, sizes, strict=True)]
        ks = [rice(m, n) if m else 0 for m, n in zip(listed, sizes, strict=True)]
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")  # [F-BIT-1]
        low_bits = sum(k * m for k, m in zip(ks, listed, strict=True))
        codes = sum(listed) + sum(counts[p.classes :])
        need(low_bits + codes <= len(self.bits), "tile-short")
        ones = np.flatnonzero(self.bits[low_bits:])[:codes]
        need(len(ones) == codes, "tile-short")
        unary = np.diff(ones, prepend=-1) - 1
        self.end = low_bits + (int(ones[-1]) + 1 if codes else 0)
        low = fields(self.bits, 0, np.repeat(ks, listed))
        lists, at = [], 0
        for m, n, k, count in zip(counts, sizes, ks, listed, strict=True):
            lists.append(chosen_of(m, n, k, unary[at : at + count], low[at : at + count]))
            at += count
        self.changes = [np.flatnonzero(kind == c)[lists[c]] for c in range(p.classes)]  # local, class by class
        self.long = [np.zeros(m, bool) for m in counts[: p.classes]]
        for c in range(first, p.classes):
            self.long[c][lists[p.sized + c]] = True  # list classes + (c - first)
        self.excess = unary[at:]


def decode_tile(p, t, data, dtype, old):
    """The flat positions of a tile's changes, and their new elements."""
    need(zlib.crc32(data) == p.crcs[t], "tile-checksum")
    top, left, high, wide = p.grid.tile(t)
    region = old.reshape(p.grid.height, p.grid.width)[top : top + high, left : left + wide].reshape(-1)
    tile = Tile(p, p.counts[t], data, exponents(region, dtype))
    local, long = np.concatenate(tile.changes), np.concatenate(tile.long)
    before, w_bits = region[local], 8 * dtype.width
    # [F-STEP-7]: the bits of size that stand in the value, by class.
    unsized = sum(map(len, tile.changes[: p.classes - p.sized]))
    raw = np.clip(p.anchor - exponents(before, dtype), 0, w_bits - 1)
    raw[:unsized] = 0
    need(not np.any(tile.excess > w_bits - raw[long] - 1), "step-outside")  # [F-READ-3]
    raw[long] += tile.excess
    widths = 1 + raw
    end = tile.end + int(widths.sum())
    need(end <= len(tile.bits), "tile-short")
    need(len(data) == -(-end // 8), "tile-length")
    need(not tile.bits[end:].any(), "padding")  # [F-BIT-3]
    values = fields(tile.bits, tile.end, widths)
    size = values >> 1
    size[long] |= np.int64(1) << raw[long]  # the leading one is implied
    step = (size + 1).astype(np.uint64).astype(before.dtype)  # modulo 2^W
    new = ordered(ordered(before, dtype) + np.where(values & 1 == 1, 0 - step, step), dtype)
    row, column = local // max(1, wide), local % max(1, wide)
    return (top + row) * p.grid.width + left + column, new


def decode_packed(e, payload, old):
    decode = decode_tile if isinstance(e.detail, Packed) else decode_v1.decode_tile
    new, at = old.copy(), 0
    for t in range(e.detail.grid.tiles):
        tile = payload[at : at + e.detail.lengths[t]]
        at += len(tile)
        positions, values = decode(e.detail, t, tile, e.dtype, old)
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
        need(head.content_size == length and head.window_size <= MAX_WINDOW and not head.dict_id, "frame-size")
        return zstd.decompress(frame, max_output_size=length, read_across_frames=False, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused("frame-broken", str(error)) from None


def decode_entry(e, plain, payload, old):
    """The new storage elements of an entry's box or tensor; `old` are the old ones, or None ([F-TAB-10])."""
    if e.encoding in (PACKED, PLANES):
        return (decode_packed if e.encoding == PACKED else decode_planes)(e, payload, old)
    changes, crc = e.detail
    found = 0
    for data in plain or [payload]:
        found = zlib.crc32(data, found)
    need(found == crc, "tensor-checksum", e.name)
    if e.encoding == FULL:
        return as_elements(plain[0] if plain else payload, e.dtype)
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
    need(len({part.metadata["deltackpt"] for part in parts}) <= 1, "version-mixed")  # [F-META-5]
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
    whole, elements = first.whole, check_shape(first.dtype, first.whole)
    if old is None:  # [F-APPLY-3]: as many elements as it takes; that no two boxes overlap is seen below
        covered = sum(check_shape(e.dtype, e.shape) for e, _, _ in group)
        need(covered >= elements, "base-shape", first.name)
        need(covered == elements, "boxes-overlap", first.name)
    new = np.zeros(elements, f"<u{first.dtype.width}") if old is None else old.copy()
    seen = np.zeros(elements, bool)
    for e, plain, payload in group:
        if check_shape(e.dtype, e.shape) == 0:
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
    check_path(file["name"], MAX_OBJECT_NAME)
    need(file["name"].startswith(("anchors/", "patches/", "states/", "folds/")), "name-escapes", file["name"])


def is_link(value):
    fields = isinstance(value, dict) and value.keys() == {"step", "id"}
    return fields and is_int(value["step"], MAX_STEP) and is_hex(value["id"], 64)


def parse_manifest(data, manifest_id=None):
    need(len(data) <= MAX_MANIFEST, "json-too-long")
    need(manifest_id is None or hashlib.sha256(data).hexdigest() == manifest_id, "manifest-hash")  # [F-MAN-2]
    m = load_json(data)
    need(isinstance(m, dict) and m.get("format") == "deltackpt", "manifest-field", "format")
    need(is_int(m.get("version"), 1) and m["version"] == 1, "version-unknown")
    requires = m.get("requires", [])
    need(isinstance(requires, list) and all(isinstance(v, str) for v in requires), "manifest-field", "requires")
    need(not requires, "feature-unknown", ascii(requires)[:80])  # [F-MAN-11]
    need(is_canonical(m, data), "manifest-canonical")  # [F-MAN-1]

    def field(name, good):
        need(name in m and good(m[name]), "manifest-field", name)  # [F-MAN-3]

    def files(value):
        return value is None or (isinstance(value, list) and all(map(is_file, value)))

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
    need(len(data) <= MAX_MANIFEST, "json-too-long")
    edge = load_json(data)
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
    need(isinstance(files, list) and all(map(is_file, files)), "manifest-field", "files")
    for file in files:  # [F-EDGE-3]
        check_object_name(file)
        folder = "anchors/" if start is None else "folds/"
        need(file["name"].startswith(folder), "manifest-field", file["name"])
    return edge


def parse_pack(data):
    """The records of a pack, manifests and edges. Whoever restores a step can do without packs ([S-PACK-3])."""
    need(len(data) <= MAX_PACK, "object-too-large")  # [F-LINE-1]
    *lines, rest = bytes(data).split(b"\n")
    need(not rest, "pack-field", "lines")
    records, keys = [], []
    for line in lines:
        value = load_json(line)
        is_edge = isinstance(value, dict) and value.get("format") == "deltackpt-edge"
        records.append(parse_edge(line) if is_edge else parse_manifest(line))
        step = value["to"]["step"] if is_edge else value["step"]
        keys.append((step, hashlib.sha256(line).hexdigest()))
    need(keys == sorted(set(keys)), "pack-field", "order")  # [F-LINE-2]
    need(len({record["repository"] for record in records}) == 1, "pack-field", "repositories")  # [F-LINE-3]
    return records


def parse_layout(data):
    need(len(data) <= MAX_LAYOUT, "json-too-long")  # [F-LAY-5]
    value = load_json(data)
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
            raise Refused("json-syntax", "not text") from None
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
    for name in state:
        need(name in layout.tensors, "tensor-shape", name)
    proven = {}
    for name, span in layout.tensors.items():
        tensor = state.get(name)
        need(tensor and tensor.dtype is span.dtype and tensor.shape == span.shape, "tensor-shape", name)
        sums, xxh3 = digests[name]
        need(sums_of(tensor.elements) == sums, "tensor-differs", name)
        if xxhash and any(xxh3):
            need(xxhash.xxh3_128_digest(np.ascontiguousarray(tensor.elements).data) == xxh3, "tensor-differs", name)
        proven[name] = tensor
    return proven


# -------------------------------------------------------------------------------- checkpoint directory

SINGLE = ("model.safetensors", "adapter_model.safetensors", "diffusion_pytorch_model.safetensors")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
CUT_OFF = ("header-truncated", "header-too-long", "offsets-end")
FOREIGN = (
    b"PK\3\4",
    b"\x80\2",
    b"\x80\3",
    b"\x80\4",
    b"\x80\5",
    b"\x1f\x8b",
    bytes(8),
    b"\x28\xb5\x2f\xfd",
    b"GGUF",
    b"<",
    b"version ",
)


def find_shards(root):
    """The shards of a checkpoint, and its weight_map or None ([F-DIR-1] to [F-DIR-4])."""
    names = sorted(path.name for path in root.iterdir())
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    need(len(indexes) <= 1, "checkpoint-ambiguous")
    if not indexes:
        files = [name for name in SINGLE if name in names][:1] or [n for n in names if n.endswith(".safetensors")]
        need(files or not any(name.endswith(PICKLES) for name in names), "checkpoint-pickle")  # [F-DIR-7]
        need(files, "checkpoint-empty")
        need(len(files) == 1, "checkpoint-ambiguous")
        return files, None
    data = (root / indexes[0]).read_bytes()
    need(len(data) <= MAX_HEADER, "json-too-long")
    index = load_json(data, floats=True)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    need(isinstance(weight_map, dict) and weight_map, "index-field")
    need(all(isinstance(shard, str) for shard in weight_map.values()), "index-field")
    shards = sorted(set(weight_map.values()))
    need(all(map(is_plain, shards)), "shard-escapes")
    return shards, weight_map


def read_checkpoint(root):
    """{name: Tensor} of a checkpoint directory ([F-DIR-5], [F-DIR-6])."""
    root, state, where = Path(root), {}, {}
    shards, weight_map = find_shards(root)
    for shard in shards:
        need((root / shard).is_file(), "shard-missing", shard)
        data = (root / shard).read_bytes()
        try:
            _, spans, body = open_safetensors(data)
        except Refused as refusal:
            other = refusal.code in CUT_OFF or data.startswith(FOREIGN)
            raise Refused("not-safetensors" if other else refusal.code, shard) from None
        for name, span in spans.items():
            need(name not in state, "tensor-duplicate", name)
            state[name] = Tensor(span.dtype, span.shape, as_elements(body[span.start : span.end], span.dtype))
            where[name] = shard
    if weight_map is not None:
        need(where.keys() <= weight_map.keys(), "tensor-unlisted")
        need(weight_map == where, "tensor-missing")
    return state


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
    marker = load_json(data)
    need(isinstance(marker, dict) and marker.get("format") == "deltackpt", "marker-field")
    need(is_int(marker.get("version"), 1) and marker["version"] == 1, "version-unknown")
    need(marker.keys() == {"format", "repository", "version"} and is_canonical(marker, data), "marker-field")
    need(is_hex(marker["repository"], 32), "marker-field")
    return marker["repository"]


def read_ref(root, name, kind="ref"):  # [S-REF-1], and of a tag
    need(re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name), "ref-name", name)  # [S-NAME-7]
    missing = "ref-missing" if kind == "ref" else "step-missing"
    data = bytes(fetch(root, f"{kind}s/{name}.json", MAX_SMALL, missing))
    ref = load_json(data)
    need(isinstance(ref, dict) and ref.keys() == {"id", "step"}, "manifest-field", "ref")
    need(is_hex(ref["id"], 64) and is_int(ref["step"], MAX_STEP), "manifest-field", "ref")
    need(is_canonical(ref, data), "manifest-canonical", "ref")
    return ref


def read_manifest(root, repository, link, missing="object-missing"):
    data = bytes(fetch(root, f"steps/{link['step']:08d}-{link['id']}.json", MAX_MANIFEST, missing))
    m = parse_manifest(data, link["id"])
    need(m["step"] == link["step"] and m["repository"] == repository, "manifest-elsewhere")  # [F-MAN-2]
    return m


def find_step(root, repository, step, link):
    """The step of this number on the chain of a ref; beyond a hole in it, the only one there is ([S-READ-6])."""
    missing = "step-missing"  # that the ref names
    while link is not None and link["step"] >= step:
        try:
            m = read_manifest(root, repository, link, missing)
        except Refused as refusal:
            need(refusal.code == "object-missing", refusal.code, str(refusal))
            found = sorted((Path(root) / "steps").glob(f"{step:08d}-*.json"))
            need(found, "step-missing", str(step))
            need(len(found) == 1, "step-ambiguous", str(step))
            return {"step": step, "id": found[0].stem.partition("-")[2]}
        if m["step"] == step:
            return link
        link, missing = m["parent"], "object-missing"
    raise Refused("step-missing", str(step))


def read_edges(root, repository):
    """{id of a step: the edges that lead to it}; one that fails a check is passed over ([F-EDGE-5], [F-EDGE-6])."""
    edges = {}
    for path in sorted((Path(root) / "edges").glob("*.json")):
        try:
            data = bytes(fetch(root, f"edges/{path.name}", MAX_MANIFEST))
            edge = parse_edge(data)
            name = f"{edge['to']['step']:08d}-{hashlib.sha256(data).hexdigest()}"
            need(path.stem == name, "manifest-hash")
            need(edge["repository"] == repository, "manifest-elsewhere")
        except Refused:
            continue
        edges.setdefault(edge["to"]["id"], []).append(edge)
    return edges


def find_way(root, repository, target, edges):
    """(manifest of an anchor, its files, hops), each hop (files, id it starts from, manifest it leads to); or None."""
    untried, seen = [(target, None)], set()  # with what follows: (files, manifest, what follows)
    while untried:
        link, follow = untried.pop()
        if link["id"] in seen:
            continue
        seen.add(link["id"])
        try:
            m = read_manifest(root, repository, link)
        except Refused as refusal:
            need(refusal.code == "object-missing" and follow, refusal.code, str(refusal))
            continue
        if follow and follow[0] is follow[1]["patch"]:
            need(follow[1]["base"] == m["state"], "chain-differs")  # [F-MAN-7]
        ways = edges.get(link["id"], [])
        anchors = [m["anchor"], *(edge["files"] for edge in ways if edge["from"] is None)]
        for files in anchors:
            if files is not None:
                hops, start = [], link["id"]
                first = m
                while follow:
                    hops.append((follow[0], start, m, follow[1]))
                    start, m, follow = follow[2], follow[1], follow[3]
                return first, files, hops
        untried += [(edge["from"], (edge["files"], m, link["id"], follow)) for edge in ways if edge["from"]]
        if m["patch"] is not None:  # last, hence tried first
            untried.append((m["parent"], (m["patch"], m, link["id"], follow)))
    return None


def read_plan(root, step, ref):
    """The nearest way to a step, or tag: of manifests, or else of manifests and edges ([S-READ-1], [F-EDGE-7])."""
    repository = read_marker(root)
    if isinstance(step, str):
        target = read_ref(root, step, "tag")
        read_manifest(root, repository, target, "step-missing")
    else:
        target = find_step(root, repository, step, read_ref(root, ref))
    way = find_way(root, repository, target, {}) or find_way(root, repository, target, read_edges(root, repository))
    need(way, "chain-broken", str(step))
    return way


def read_state(root, m):
    layout = parse_layout(bytes(fetch_file(root, m["layout"], MAX_LAYOUT)))
    return layout, parse_digests(fetch_file(root, m["digests"], MAX_DIGESTS), layout, m["state"])


def read_anchor(root, files, layout):
    need([file["size"] for file in files] == [shard[3] for shard in layout.shards], "anchor-files")  # [F-MAN-9]
    state = {}
    for file, (_, header, spans, _) in zip(files, layout.shards, strict=True):
        body = memoryview(fetch_file(root, file))[8 + len(header) :]
        for name, span in spans.items():
            state[name] = Tensor(span.dtype, span.shape, as_elements(body[span.start : span.end], span.dtype))
    return state


def read_patch(root, files, start, before, after):
    """The parts that lead from the step of id `start` and manifest `before` to that of manifest `after`."""
    parts = []
    for file in files:
        part = parse_part(fetch_file(root, file))
        wanted = (after["repository"], str(after["step"]), start, before["state"])  # [F-META-3], [F-EDGE-4]
        found = tuple(part.metadata[key] for key in ("repository", "step", "parent", "base"))
        need(found == wanted, "part-elsewhere", file["name"])
        parts.append(part)
    return parts


def read_step(root, step, ref="main"):
    """The layout, the proven state and the side files of a step. Every step on the way is proven too."""
    first, files, hops = read_plan(root, step, ref)
    objects = [read_state(root, m) for m in (first, *(after for *_, after in hops))]
    patches = [read_patch(root, *hop) for hop in hops]  # [F-APPLY-4]: all of them before any is applied
    layout, digests = objects[0]
    state = prove(read_anchor(root, files, layout), layout, digests)
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
            lists = e.detail.classes if part.metadata["deltackpt"] == "2" else e.detail.classes + 1
            changes = sum(sum(count[:lists]) for count in e.detail.counts)
        print(ascii(e.name), ENCODINGS[e.encoding], e.dtype.name if e.dtype else "", box or "", changes)


def main(arguments):
    try:
        if len(arguments) in (4, 5) and arguments[0] == "restore":
            step = int(arguments[2]) if arguments[2].isdecimal() else arguments[2]
            restore(arguments[1], step, *arguments[3:])
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
