"""Kernels that code changes as `packed` (FORMAT section "packed"), a program a tile.

``grids`` has a row of int64 for each of: the tensor's first tile, its first word in the bits of what changed, height,
width, rows, columns, tile height, tile width; a column for every tensor. A tensor whose tiles are runs of
consecutive elements is said to have rows of one tile each.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.hooks.triton_bits import bit_length, ones

LENGTHS = 33
ANCHORS = 32  # 31 of them are tried
STATS = 6  # of a tile: k, bits of the three runs of unary codes, exceptions, raw bits
_CHUNK = tl.constexpr(1024)
_ROWS = tl.constexpr(64)
_LANES = tl.constexpr(8)
_LENGTHS = tl.constexpr(LENGTHS)
_STATS = tl.constexpr(STATS)


@triton.jit
def _edge(mask, before, position):
    """How many changes come before a position, counted from the first word of its tensor."""
    word = position >> 5
    part = tl.load(mask + word) & ((1 << (position & 31)) - 1)
    return tl.load(before + word) + ones(part)


@triton.jit
def _place(grids, tensors, t, tile):
    """-> (top, bottom, left, right) of a tile, rows counted through the leading slices."""
    height = tl.load(grids + 2 * tensors + t).to(tl.int32)
    width = tl.load(grids + 3 * tensors + t).to(tl.int32)
    rows = tl.load(grids + 4 * tensors + t).to(tl.int32)
    columns = tl.load(grids + 5 * tensors + t).to(tl.int32)
    tile_height = tl.load(grids + 6 * tensors + t).to(tl.int32)
    tile_width = tl.load(grids + 7 * tensors + t).to(tl.int32)
    up = tile // columns
    slice = up // rows
    top = tl.minimum((up - slice * rows) * tile_height, height)
    bottom = tl.minimum(top + tile_height, height) + slice * height
    left = tl.minimum((tile - up * columns) * tile_width, width)
    return top + slice * height, bottom, left, tl.minimum(left + tile_width, width), width, tile_height, tile_width


@triton.jit
def _count(grids, tensors, owner, mask, before, counts):
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    first = tl.load(grids + tensors + t)
    mask += first
    before += first
    top, bottom, left, right, width, _, _ = _place(grids, tensors, t, tile - tl.load(grids + t).to(tl.int32))
    total = tl.zeros((_CHUNK,), tl.int32)
    for r in range(top, bottom, _CHUNK):
        row = r + tl.arange(0, _CHUNK)
        at = tl.where(row < bottom, row, top) * width
        total += tl.where(row < bottom, _edge(mask, before, at + right) - _edge(mask, before, at + left), 0)
    tl.store(counts + 1 + tile, tl.sum(total, 0))
    if tile == 0:
        tl.store(counts, 0)


@triton.jit
def _step(old, new, live, width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr):
    """-> (size, exponent, is the step downward)."""
    a = old.to(tl.int32)
    b = new.to(tl.int32)
    if bits > 0:
        exponent = (a >> low) & ((1 << bits) - 1)
        magnitude: tl.constexpr = (1 << (8 * width - 1)) - 1
        a = a ^ ((a >> 31) & magnitude)
        b = b ^ ((b >> 31) & magnitude)
    else:
        exponent = a & 0
    down = b < a
    return tl.where(live, tl.where(down, a - b, b - a) - 1, 0), exponent, down


@triton.jit
def _put(to, rank, old, new, live, ranks, sizes, kinds, cells, width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr):  # noqa: E501 # fmt: skip
    """Store one change a lane. -> the exponents of those of size 0, 511 for all others."""
    size, exponent, down = _step(old, new, live, width, low, bits)
    tl.store(ranks + to, rank, live)
    tl.store(sizes + to, size, live)
    tl.store(kinds + to, (exponent | (down.to(tl.int32) << 8)).to(tl.int16), live)
    tl.atomic_add(cells + exponent * _LENGTHS + bit_length(size), 1, live & (size != 0), sem="relaxed")
    return tl.where(live & (size == 0), exponent, 511)


@triton.jit
def _arrange(
    grids, tensors, owner, mask, before, starts, positions, olds, news, ranks, sizes, kinds, cells,
    width: tl.constexpr, low: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    first = tl.load(grids + tensors + t)
    mask += first
    before += first
    cells += t.to(tl.int64) * (256 * _LENGTHS)
    top, bottom, left, right, row_width, tile_height, tile_width = _place(
        grids, tensors, t, tile - tl.load(grids + t).to(tl.int32)
    )
    to = tl.load(starts + tile)
    plain = tl.zeros((512,), tl.int32)
    if tile_height == 1:
        origin = top * row_width + left
        begin = _edge(mask, before, origin)
        end = tl.where(bottom > top, _edge(mask, before, top * row_width + right), begin)
        for i in range(begin, end, _CHUNK):
            at = i + tl.arange(0, _CHUNK)
            live = at < end
            rank = tl.load(positions + at, live, 0) - origin
            old = tl.load(olds + at, live, 0)
            new = tl.load(news + at, live, 0)
            plain += tl.histogram(
                _put(to + at - begin, rank, old, new, live, ranks, sizes, kinds, cells, width, low, bits), 512
            )
    else:
        for r in range(top, bottom, _ROWS):
            row = r + tl.arange(0, _ROWS)
            base = tl.where(row < bottom, row, top) * row_width
            begin = _edge(mask, before, base + left)
            n = tl.where(row < bottom, _edge(mask, before, base + right) - begin, 0)
            into = to + tl.cumsum(n, 0) - n
            shift = (row - top) * tile_width - base - left
            for c in range(0, tl.max(n, 0), _LANES):
                lane = c + tl.arange(0, _LANES)
                live = lane[None, :] < n[:, None]
                at = begin[:, None] + lane[None, :]
                rank = tl.load(positions + at, live, 0) + shift[:, None]
                old = tl.load(olds + at, live, 0)
                new = tl.load(news + at, live, 0)
                zero = _put(
                    into[:, None] + lane[None, :], rank, old, new, live, ranks, sizes, kinds, cells, width, low, bits
                )
                plain += tl.histogram(tl.reshape(zero, (_ROWS * _LANES,)), 512)
            to += tl.sum(n, 0)
    bin = tl.arange(0, 512)
    tl.atomic_add(cells + bin * _LENGTHS, plain, (plain != 0) & (bin < 256), sem="relaxed")


@triton.jit
def _weigh(cells, costs, raw_limit: tl.constexpr):
    """What an anchor would cost a tensor -> (cost, ceiling, anchor, exceptions, eligible)."""
    t = tl.program_id(0)
    i = tl.program_id(1)
    e = tl.arange(0, 256)[:, None]
    length = tl.arange(0, 64)[None, :]
    count = tl.load(cells + t.to(tl.int64) * (256 * _LENGTHS) + e * _LENGTHS + length, length < _LENGTHS, 0)
    top = tl.max(tl.max(tl.where((count > 0) & (length > 0), e, -1), 1), 0)
    low = tl.maximum(top - 15, 0)
    anchor = low + i
    count = tl.where(e <= top, count, 0).to(tl.int64)
    raw = tl.minimum(tl.maximum(anchor - e, 0), raw_limit)
    beyond = length > raw
    cost = tl.sum(tl.sum((raw + tl.where(beyond, 3 + 2 * (length - raw), 0)) * count, 1), 0)
    out = costs + (t * 32 + i) * 5
    tl.store(out, tl.where(anchor <= tl.minimum(top + 15, 255), cost, 1 << 57))
    tl.store(out + 1, (top + 1).to(tl.int64))
    tl.store(out + 2, tl.where(top < 0, 0, anchor).to(tl.int64))
    tl.store(out + 3, tl.sum(tl.sum(tl.where(beyond, count, 0), 1), 0))
    tl.store(out + 4, tl.sum(tl.sum(count, 1), 0))


@triton.jit
def _choose(costs, scales, limit: tl.constexpr):
    """The cheapest anchor, the first of several, and the Rice parameter of the exceptions' gaps."""
    t = tl.program_id(0)
    i = tl.arange(0, 32)
    at = costs + t * (32 * 5)
    best = (tl.min(tl.load(at + i * 5) * 32 + i, 0) & 31).to(tl.int32)
    at += best * 5
    eligible = tl.load(at + 4)
    quotient = (eligible - (eligible >> 5)) // tl.maximum(tl.load(at + 3), 1)
    k = tl.sum(((quotient >> i) > 0).to(tl.int32), 0) - 1
    tl.store(scales + t * 3, tl.load(at + 1))
    tl.store(scales + t * 3 + 1, tl.load(at + 2))
    tl.store(scales + t * 3 + 2, tl.minimum(tl.maximum(k, 0), limit).to(tl.int64))


@triton.jit
def _last_two(last, other, next_last, next_other):
    """The last two exceptions of two stretches in a row; -1 stands for none."""
    return (
        tl.where(next_last < 0, last, next_last),
        tl.where(next_last < 0, other, tl.where(next_other < 0, last, next_other)),
    )


@triton.jit
def _values(sizes, kinds, at, live, ordinals, last, ceiling, anchor, raw_limit: tl.constexpr):
    """-> of every change (size, its length, raw bits, is it an exception, gap of that), and the two carries."""
    size = tl.load(sizes + at, live, 0)
    exponent = tl.load(kinds + at, live, 0).to(tl.int32) & 255
    length = bit_length(size)
    eligible = live & (exponent < ceiling)
    raw = tl.where(eligible, tl.minimum(tl.maximum(anchor - exponent, 0), raw_limit), 0)
    exception = eligible & (length > raw)
    running = tl.cumsum(eligible.to(tl.int32), 0)
    ordinal = ordinals + running - 1
    own = tl.where(exception, ordinal, -1)
    latest, other = tl.associative_scan((own, own * 0 - 1), 0, _last_two)
    gap = tl.where(exception, ordinal - tl.where(other < 0, last, other) - 1, 0)
    return size, length, raw, exception, gap, ordinals + tl.max(running, 0), tl.maximum(last, tl.max(latest, 0))


@triton.jit
def _gap(ranks, start, i, live):
    """Distance of the i-th rank of a tile to the one before, less one."""
    before = tl.load(ranks + start + i - 1, live & (i > 0), -1)
    return tl.where(live, tl.load(ranks + start + i, live, 0) - before - 1, 0)


@triton.jit
def _measure(owner, spans, starts, scales, ranks, sizes, kinds, stats, lengths, raw_limit: tl.constexpr):
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    start = tl.load(starts + tile)
    n = tl.load(starts + tile + 1) - start
    ceiling = tl.load(scales + t * 3).to(tl.int32)
    anchor = tl.load(scales + t * 3 + 1).to(tl.int32)
    exception_k = tl.load(scales + t * 3 + 2).to(tl.int32)
    span = tl.load(spans + t)
    quotient = (span - (span >> 5)) // tl.maximum(n, 1).to(tl.int64)
    k = tl.maximum(tl.sum(((quotient >> tl.arange(0, 32)) > 0).to(tl.int32), 0) - 1, 0)
    k = tl.where(n > 0, k, 0)
    zeros = tl.zeros((_CHUNK,), tl.int64)
    far = tl.zeros((_CHUNK,), tl.int64)
    excess = tl.zeros((_CHUNK,), tl.int64)
    bits = tl.zeros((_CHUNK,), tl.int64)
    found = tl.zeros((_CHUNK,), tl.int32)
    ordinals = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    for c in range(0, n, _CHUNK):
        i = c + tl.arange(0, _CHUNK)
        live = i < n
        zeros += _gap(ranks, start, i, live) >> k
        size, length, raw, exception, gap, ordinals, last = _values(
            sizes, kinds, start + i, live, ordinals, last, ceiling, anchor, raw_limit
        )
        found += exception.to(tl.int32)
        far += gap >> exception_k
        excess += tl.where(exception, length - raw, 0)
        bits += tl.where(exception, length - 1, raw)
    x = tl.sum(found, 0).to(tl.int64)
    codes = tl.sum(zeros, 0) + n
    gaps = tl.sum(far, 0) + x
    over = tl.sum(excess, 0)
    field = tl.sum(bits, 0)
    plane = ((n + 7) >> 3).to(tl.int64)
    size = (k + 1) * plane + ((codes + gaps + over + 7) >> 3) + exception_k * ((x + 7) >> 3) + ((field + 7) >> 3)
    stats += tile * _STATS
    tl.store(stats, k.to(tl.int64))
    tl.store(stats + 1, codes)
    tl.store(stats + 2, gaps)
    tl.store(stats + 3, over)
    tl.store(stats + 4, x)
    tl.store(stats + 5, field)
    tl.store(lengths + 1 + tile, size)
    if tile == 0:
        tl.store(lengths, size * 0)


@triton.jit
def _set(words, address, bits, live):
    """Or ``bits`` into the 32 bits that start at a bit address; what goes beyond a word's end goes into the next."""
    shift = (address & 31).to(tl.int32)
    low = bits.to(tl.uint32, bitcast=True)
    at = words + (address >> 5)
    here = (low << shift.to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(at, here, live & (here != 0), sem="relaxed")
    over = tl.where(shift == 0, 0, (low >> ((32 - shift) & 31).to(tl.uint32)).to(tl.int32, bitcast=True))
    tl.atomic_or(at + 1, over, live & (over != 0), sem="relaxed")


@triton.jit
def _set_one(words, address, live):
    one = tl.full(address.shape, 1, tl.int32)
    tl.atomic_or(words + (address >> 5), one << (address & 31).to(tl.int32), live, sem="relaxed")


@triton.jit
def _write(owner, starts, scales, stats, addresses, ranks, sizes, kinds, out, words, raw_limit: tl.constexpr):
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    start = tl.load(starts + tile)
    n = tl.load(starts + tile + 1) - start
    ceiling = tl.load(scales + t * 3).to(tl.int32)
    anchor = tl.load(scales + t * 3 + 1).to(tl.int32)
    exception_k = tl.load(scales + t * 3 + 2).to(tl.int32)
    stats += tile * _STATS
    k = tl.load(stats).to(tl.int32)
    codes = tl.load(stats + 1)
    gaps = tl.load(stats + 2)
    over = tl.load(stats + 3)
    x = tl.load(stats + 4)
    plane = ((n + 7) >> 3).to(tl.int64)
    begin = tl.load(addresses + tile)
    signs = begin + k * plane
    unary = (signs + plane) * 8
    low = signs + plane + ((codes + gaps + over + 7) >> 3)
    stride = (x + 7) >> 3
    far = unary + codes
    excess = far + gaps
    field = (low + exception_k * stride) * 8
    found = tl.zeros((), tl.int32)
    ordinals = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    row = tl.arange(0, _CHUNK // 8)
    bit = tl.arange(0, 8)[None, :]
    for c in range(0, n, _CHUNK):
        i = c + row[:, None] * 8 + bit
        live = i < n
        gap = _gap(ranks, start, i, live)
        down = (tl.load(kinds + start + i, live, 0).to(tl.int32) >> 8) & 1
        to = (c >> 3) + row
        for j in range(k):
            tl.store(out + begin + j * plane + to, tl.sum(((gap >> j) & 1) << bit, 1).to(tl.uint8), to < plane)
        tl.store(out + signs + to, tl.sum(down << bit, 1).to(tl.uint8), to < plane)

        i = c + tl.arange(0, _CHUNK)
        live = i < n
        run = tl.cumsum(tl.where(live, (_gap(ranks, start, i, live) >> k) + 1, 0).to(tl.int64), 0)
        _set_one(words, unary + run - 1, live)
        unary += tl.max(run, 0)
        size, length, raw, exception, apart, ordinals, last = _values(
            sizes, kinds, start + i, live, ordinals, last, ceiling, anchor, raw_limit
        )
        wide = tl.where(exception, length - 1, raw)
        run = tl.cumsum(wide.to(tl.int64), 0)
        _set(words, field + run - wide, size & ((1 << wide) - 1), live & (wide > 0))
        field += tl.max(run, 0)
        ordinal = found + tl.cumsum(exception.to(tl.int32), 0) - 1
        run = tl.cumsum(tl.where(exception, (apart >> exception_k) + 1, 0).to(tl.int64), 0)
        _set_one(words, far + run - 1, exception)
        far += tl.max(run, 0)
        run = tl.cumsum(tl.where(exception, length - raw, 0).to(tl.int64), 0)
        _set_one(words, excess + run - 1, exception)
        excess += tl.max(run, 0)
        for j in range(exception_k):
            _set_one(words, (low + j * stride) * 8 + ordinal, exception & (((apart >> j) & 1) == 1))
        found += tl.sum(exception.to(tl.int32), 0)


def count(grids: Any, owner: Any, mask: Any, before: Any) -> Any:
    """A 0, and the changes of every tile, int32."""
    counts = torch.empty(owner.numel() + 1, dtype=torch.int32, device=owner.device)
    _count[(owner.numel(),)](grids, grids.shape[1], owner, mask, before, counts, num_warps=4)
    return counts


def arrange(
    grids: Any, owner: Any, mask: Any, before: Any, starts: Any, positions: Any, olds: Any, news: Any, total: int,
    exponent: tuple[int, int],
) -> tuple[Any, ...]:  # fmt: skip
    """Changes in order of (tile, local index): (local index, size, exponent and sign), and how many changes every
    tensor has of each exponent and length, [tensors, 256, 33] int32."""
    device = owner.device
    ranks, sizes = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(2))
    kinds = torch.empty(total, dtype=torch.int16, device=device)
    cells = torch.zeros((grids.shape[1], 256, LENGTHS), dtype=torch.int32, device=device)
    if olds.dtype == torch.uint8:
        olds, news = olds.view(torch.int8), news.view(torch.int8)
    _arrange[(owner.numel(),)](
        grids, grids.shape[1], owner, mask, before, starts, positions, olds, news, ranks, sizes, kinds, cells,
        width=olds.element_size(), low=exponent[0], bits=exponent[1], num_warps=4,
    )  # fmt: skip
    return ranks, sizes, kinds, cells


def scale(cells: Any, width: int, limit: int) -> Any:
    """(ceiling, anchor, exception_k) of every tensor, int64: `codecs.steps.choose_scale`."""
    costs = torch.empty((cells.shape[0], ANCHORS, 5), dtype=torch.int64, device=cells.device)
    scales = torch.empty((cells.shape[0], 3), dtype=torch.int64, device=cells.device)
    _weigh[(cells.shape[0], ANCHORS)](cells, costs, raw_limit=8 * width - 1, num_warps=8)
    _choose[(cells.shape[0],)](costs, scales, limit=limit, num_warps=1)
    return scales


def measure(owner: Any, spans: Any, starts: Any, scales: Any, changes: tuple[Any, ...], width: int) -> tuple[Any, Any]:
    """What is known of every tile: [tiles, STATS] int64; and a 0 and the bytes of every tile, int64."""
    stats = torch.empty((owner.numel(), STATS), dtype=torch.int64, device=owner.device)
    lengths = torch.empty(owner.numel() + 1, dtype=torch.int64, device=owner.device)
    _measure[(owner.numel(),)](
        owner, spans, starts, scales, *changes, stats, lengths, raw_limit=8 * width - 1, num_warps=4
    )  # fmt: skip
    return stats, lengths


def write(
    owner: Any, starts: Any, scales: Any, stats: Any, addresses: Any, changes: tuple[Any, ...], size: int, width: int
) -> Any:
    """The tiles, ``size`` bytes in all, one after the other."""
    words = torch.zeros((size + 3) // 4 + 1, dtype=torch.int32, device=owner.device)
    out = words.view(torch.uint8)
    _write[(owner.numel(),)](
        owner, starts, scales, stats, addresses, *changes, out, words, raw_limit=8 * width - 1, num_warps=4
    )  # fmt: skip
    return out[:size]
