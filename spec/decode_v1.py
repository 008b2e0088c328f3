"""What parts of version 1 do otherwise (VERSION1.md): their grid, and the encoding `packed`."""

import zlib
from collections import namedtuple

import numpy as np
from decode_base import SIZE_LIMIT, exponents, is_packed_dtype, need, ordered

MAX_CLASSES, MAX_TILE, MAX_K, MAX_EXCEPTION_K = 15, 1 << 31, 31, 15
Packed = namedtuple("Packed", "grid classes threshold ceiling anchor exception_k counts unary lengths crcs")


def storage_shape(dtype, shape):
    """[F-ELEM-3]."""
    if not is_packed_dtype(dtype):
        return list(shape)
    bits = dtype.bits
    for d in shape:
        bits *= d
    return [*shape[:-1], shape[-1] * dtype.bits // 8] if shape[-1] * dtype.bits % 8 == 0 else [bits // 8]


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
    slices, rows, columns = r.numbers(3, SIZE_LIMIT, "grid")
    grid = Grid(storage_shape(dtype, shape), slices, rows, columns)
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


def bits_of(data, count, what="padding"):
    """The first `count` bits of a section; those that fill up its last byte are zero ([F-BIT-1], [F-BIT-2])."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    need(not bits[count:].any(), "padding", what)
    return bits[:count].astype(np.int64)


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
