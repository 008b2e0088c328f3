"""Kernels that count the elements of every class, changed or not, and say where among them the changes are.

A tile's rows are cut into segments of SPAN elements, a row's last one shorter, and these are taken in blocks of
SEGMENTS. The first kernel reads every word once, and writes how many elements of each class come before a segment in
its block: 15 counts of 16 bits in four words of 64, one word in each of four planes. Class c is in plane
(c & 1) + 2 * (c >> 3), its field is (c >> 1) & 3. Of a tile with 8 classes or fewer, as most have, the last two planes
are neither written nor read; where all tiles are such, they need not be there. The second kernel reads, of the segments
that hold a change, what comes before it there.

The words are the old ones; or the new ones, ``masked``: then what changed is not counted, and the rest is the same.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from deltackpt.gpu.blocks import ROOM, SEGMENTS, SPAN
from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.host_kernel import host_kernel
from deltackpt.gpu.triton.lists import CLASSES, class_of, place

PARTS = 4  # programs that share the changes of a tile
_SPAN, _SEGMENTS = tl.constexpr(SPAN), tl.constexpr(SEGMENTS)
_ROWS = tl.constexpr(64)  # segments that a program counts at once
_CHUNK = tl.constexpr(64)  # changes that it ranks at once
_NIBBLES = tl.constexpr(0x0F0F0F0F)


@triton.jit
def _changed(mask, first, at, live):
    """Did the elements change that are at these places of a tensor?"""
    return (tl.load(mask + first + (at >> 5), live, 0) >> (at & 31)) & 1


@triton.jit
def _spread(bytes, class_0: tl.constexpr, absent_class, absent):
    """Counts of 8 bits in int32 -> of 16 bits in int64, less the ``absent`` elements that were counted in a class.

    The four are of the classes from ``class_0`` on, every second one.
    """
    x = bytes.to(tl.int64) & 0xFFFFFFFF
    x = (x | (x << 16)) & 0x0000FFFF0000FFFF
    x = (x | (x << 8)) & 0x00FF00FF00FF00FF
    field = absent_class - class_0
    here = (field >= 0) & (field < 8) & ((field & 1) == 0)
    shift = tl.where(here, field >> 1, 0) * 16
    return x - tl.where(here, absent.to(tl.int64) << shift.to(tl.int64), 0)


@triton.jit
def _one(words, shift: tl.constexpr, bits: tl.constexpr, top_4, last_4):
    """Of every word (int32), whose exponent is ``bits`` bits from bit ``shift`` + 2 on, a 1 in the field of its class:
    int64, 16 fields of 4 bits. ``top_4`` and ``last_4``: four times the top exponent, and the last class."""
    mask: tl.constexpr = ((1 << bits) - 1) << 2
    moved = words << (0 - shift) if shift < 0 else words >> shift
    class_4 = tl.minimum(tl.maximum(top_4 - (moved & mask), 0), last_4)
    return tl.full(words.shape, 1, tl.int64) << class_4.to(tl.int64)


@triton.jit
def _by_class(one):
    """[2, rows, SPAN / 16, n] of `_one`, or of sums of it: 8 words in the last axis -> of every row 4 x 4 counts of 8
    bits, of classes from 0, 1, 8 and 9 on."""
    near = tl.sum(one.to(tl.int32), 3)  # 8 counts of 4 bits: classes 0 to 7
    far = tl.sum((one >> 32).to(tl.int32), 3)
    counts_0 = tl.sum(tl.sum(near & _NIBBLES, 0), 1)
    counts_1 = tl.sum(tl.sum((near >> 4) & _NIBBLES, 0), 1)
    counts_8 = tl.sum(tl.sum(far & _NIBBLES, 0), 1)
    counts_9 = tl.sum(tl.sum((far >> 4) & _NIBBLES, 0), 1)
    return counts_0, counts_1, counts_8, counts_9


@triton.jit
def _store_totals(to, a, b, c, d):
    """The counts of four planes by class, int32."""
    k = tl.arange(0, 16)
    counts = tl.where((k & 1) == 0, tl.where(k < 8, a, c), tl.where(k < 8, b, d))
    tl.store(to + k, ((counts >> (((k >> 1) & 3) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32))


@triton.jit
def _running(counts, to, live):
    """Store what comes before every segment of a block, [SEGMENTS] int64; -> all of it."""
    tl.store(to, tl.cumsum(counts, 0) - counts, live)
    return tl.sum(counts, 0)


@triton.jit
def _ones(
    address, at, held, level, mask, first, top_4, last_4,
    word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """`_one` of the ``held`` words from each of the places ``at`` on, [2, rows, SPAN / 16, n], n being 8 or, of pairs
    that are added up, 4. What is not there counts as a word of 0."""
    # In this order, the elements of a segment are in few threads: there is little to add up across them.
    half = tl.arange(0, 2)[:, None, None, None] * (_SPAN // 2)
    quarter = tl.arange(0, _SPAN // 16)[None, None, :, None] * 8
    limit = held[None, :, None, None]
    origin = at[None, :, None, None]
    words = address.to(tl.pointer_type(word))
    held_8 = (held >> 3) << 3  # shifted, here and below: what is said of a value counts wherever it is used
    if (word == tl.int16) and (masked == 0):  # two words at once
        pair = (half + quarter) // 2 + tl.arange(0, 4)[None, None, None, :]
        if level != 0:
            runs = tl.multiple_of(((address >> 4) << 4).to(tl.pointer_type(tl.int32)), 16)
            at_4 = tl.multiple_of((at >> 3) << 2, 4)[None, :, None, None]
            both = tl.load(runs + at_4 + pair, pair < tl.multiple_of(held_8 >> 1, 4)[None, :, None, None], 0)
        else:
            even = tl.load(words + origin + 2 * pair, 2 * pair < limit, 0).to(tl.int32) & 0xFFFF
            odd = tl.load(words + origin + 2 * pair + 1, 2 * pair + 1 < limit, 0).to(tl.int32)
            both = even | (odd << 16)
        one = _one(both, low - 2, bits, top_4, last_4) + _one(both, low + 14, bits, top_4, last_4)
    else:
        inside = half + quarter + tl.arange(0, 8)[None, None, None, :]
        if level != 0:
            runs = tl.multiple_of(((address >> 4) << 4).to(tl.pointer_type(word)), 16)
            at_8 = tl.multiple_of((at >> 3) << 3, 8)[None, :, None, None]
            x = tl.load(runs + at_8 + inside, inside < tl.multiple_of(held_8, 8)[None, :, None, None], 0)
        else:
            x = tl.load(words + origin + inside, inside < limit, 0)
        one = _one(x.to(tl.int32), low - 2, bits, top_4, last_4)
        if masked:
            changed = _changed(mask, first, origin + inside, inside < limit)
            one = tl.where(changed != 0, tl.full(one.shape, 1, tl.int64) << 60, one)
    return one


@triton.jit
def _add_up(before, halves, stride, totals, begin, stop, a_row, wide, zero, classes):
    """Counts of 8 bits in ``halves`` -> what comes before every segment of a block, in ``before``; and ``totals``.

    ``zero``: the class in which the elements were counted that are not there."""
    row = tl.arange(0, _SEGMENTS)
    live = row < stop
    s = begin + tl.minimum(row, stop - 1)
    far = tl.where(live, classes, 0) > 8
    absent = tl.where(live, _SPAN - tl.minimum(wide - s % a_row * _SPAN, _SPAN), 0)
    halves += row
    a = _spread(tl.load(halves, live, 0), 0, zero, absent)
    b = _spread(tl.load(halves + 2 * stride, live, 0), 1, zero, absent)
    c = _spread(tl.load(halves + 4 * stride, far, 0), 8, zero, absent)
    d = _spread(tl.load(halves + 6 * stride, far, 0), 9, zero, absent)
    tl.debug_barrier()  # all of them are read, before the first is written over
    before += row
    a = _running(a, before, live)
    b = _running(b, before + stride, live)
    c = _running(c, before + 2 * stride, far)
    d = _running(d, before + 3 * stride, far)
    _store_totals(totals, a, b, c, d)


@host_kernel(do_not_specialize=["tensors"])
def _scan(
    grids, tensors, owner, tiles, block_tiles, scales, mask, before, halves, stride, totals,
    word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """``halves``: ``before`` as int32. At first the counts of a block's segments are put there, where their elements
    were added up: in that layout a count is in several threads, and to go on would be done several times."""
    block = tl.program_id(0)
    tile = tl.load(block_tiles + block).to(tl.int32)
    t = tl.load(owner + tile)
    classes = tl.load(scales + t * 4)
    if classes > 1:
        exponent_top = tl.load(scales + t * 4 + 2)
        top_4 = (exponent_top * 4).to(tl.int32)
        last_4 = ((classes - 1) * 4).to(tl.int32)
        top, left, high, wide, width, _ = place(grids, tensors, t, tile)
        first = tl.load(grids + tensors + t)
        address = tl.load(grids + 7 * tensors + t)
        level = tl.load(grids + 8 * tensors + t)
        a_row = (wide + _SPAN - 1) // _SPAN
        begin = (block - tl.load(tiles + tile * 2).to(tl.int32)) * _SEGMENTS
        to = tl.multiple_of(tl.load(tiles + tile * 2 + 1) + begin, 16)
        stop = tl.minimum(high * a_row - begin, _SEGMENTS)
        for r in range(0, stop, _ROWS):
            row = r + tl.arange(0, _ROWS)
            s = begin + tl.minimum(row, stop - 1)
            down = s // a_row
            right = (s - down * a_row) * _SPAN
            held = tl.where(row < stop, tl.minimum(wide - right, _SPAN), 0)
            at = (top + down) * width + left + right
            one = _ones(address, at, held, level, mask, first, top_4, last_4, word, low, bits, masked)
            counts_0, counts_1, counts_8, counts_9 = _by_class(one)
            here = halves + 2 * to + row
            far = tl.where(row < stop, classes, 0) > 8
            tl.store(here, counts_0, row < stop)
            tl.store(here + 2 * stride, counts_1, row < stop)
            tl.store(here + 4 * stride, counts_8, far)
            tl.store(here + 6 * stride, counts_9, far)
        tl.debug_barrier()
        zero = class_of(0, exponent_top, classes)
        _add_up(
            before + to, halves + 2 * to, stride, totals + (1 + block) * 16, begin, stop, a_row, wide, zero, classes
        )


@triton.jit
def _same_before(
    words, at, inside, live, lowest, span, mask, first,
    level: tl.constexpr, low: tl.constexpr, bits: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """How many of the ``inside`` words from ``at`` on have an exponent in ``span`` numbers from ``lowest`` on."""
    group = tl.arange(0, _SPAN // 8)[None, :, None] * 8
    lane = group + tl.arange(0, 8)[None, None, :]
    limit = tl.where(live, inside, 0)[:, None, None]
    begin = at[:, None, None]
    if level:  # whole groups of 8, whose words are all of the row
        limit_8 = tl.multiple_of(((tl.where(live, inside, 0) + 7) >> 3) << 3, 8)[:, None, None]
        at_8 = tl.multiple_of((at >> 3) << 3, 8)[:, None, None]
        x = tl.load(words + at_8 + lane, lane < limit_8, 0)
    else:
        x = tl.load(words + begin + lane, lane < limit, 0)
    above = ((x.to(tl.int32) >> low) & ((1 << bits) - 1)) - lowest[:, None, None]
    same = (lane < limit) & (above >= 0) & (above < span[:, None, None])
    if masked:
        same = same & (_changed(mask, first, begin + lane, lane < limit) == 0)
    return tl.sum(tl.sum(same.to(tl.int32), 2), 1)


@host_kernel(do_not_specialize=["tensors"])
def _rank(
    grids, tensors, owner, tiles, starts, scales, mask, before, stride, populations, ranks, kinds,
    word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr, masked: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    t = tl.load(owner + tile)
    classes = tl.load(scales + t * 4)
    exponent_top = tl.load(scales + t * 4 + 2)
    top, left, _, wide, width, tile_width = place(grids, tensors, t, tile)
    first = tl.load(grids + tensors + t)
    address = tl.load(grids + 7 * tensors + t)
    level = tl.load(grids + 8 * tensors + t)
    a_row = (wide + _SPAN - 1) // _SPAN
    block = tl.load(tiles + tile * 2)
    segment = tl.load(tiles + tile * 2 + 1)
    begin = tl.load(starts + tile) + tl.program_id(1) * _CHUNK
    end = tl.load(starts + tile + 1)
    for i in range(begin, end, parts * _CHUNK):
        at = i + tl.arange(0, _CHUNK)
        live = at < end
        local = tl.load(ranks + at, live, 0)
        row = local // tile_width
        column = local - row * tile_width
        rank = row * wide + column
        if classes > 1:
            kind = class_of(tl.load(kinds + at, live, 0).to(tl.int32) & 255, exponent_top, classes)
            inside = column & (_SPAN - 1)
            origin = (top + row) * width + left + column - inside
            lowest = tl.where(kind == classes - 1, 0, exponent_top - kind)
            span = tl.where(kind == 0, 256, exponent_top - kind + 1) - lowest
            if level != 0:
                words = tl.multiple_of(((address >> 4) << 4).to(tl.pointer_type(word)), 16)
                rank = _same_before(
                    words, origin, inside, live, lowest, span, mask, first, True, low, bits, masked
                )  # fmt: skip
            else:
                words = address.to(tl.pointer_type(word))
                rank = _same_before(
                    words, origin, inside, live, lowest, span, mask, first, False, low, bits, masked
                )  # fmt: skip
            s = row * a_row + column // _SPAN
            plane = (kind & 1) + 2 * (kind >> 3)
            field = before + (plane * stride + segment + s) * 4 + ((kind >> 1) & 3)
            rank += tl.load(field, live, 0).to(tl.int32) & 0xFFFF
            outer = tl.load(populations + (block + s // _SEGMENTS) * 16 + kind, live, 0)
            rank += outer - tl.load(populations + block * 16 + kind, live, 0)
        tl.debug_barrier()  # several warps load a local index, and one stores its rank in that place: first all have it
        tl.store(ranks + at, rank, live)


def scan(
    grids: Any, owner: Any, tiles: Any, block_tiles: Any, segments: int, scales: Any, mask: Any, width: int,
    exponent: tuple[int, int], masked: bool, far: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """``tiles``, ``block_tiles`` and ``segments``: those of `blocks.BlockPlan`; ``far``: may a tile have more than 8
    classes? -> what comes before every segment, [4 or 2, segments] int64; the elements of each class before every
    block, and in all, [blocks + 1, 16] int32."""
    blocks = block_tiles.numel()
    totals = torch.zeros((blocks + 1, CLASSES), dtype=torch.int32, device=owner.device)
    before = torch.empty((4 if far else 2, max(segments, ROOM)), dtype=torch.int64, device=owner.device)
    if blocks and exponent[1]:
        _scan[(blocks,)](
            grids, grids.shape[1], owner, tiles, block_tiles, scales, mask, before, before.view(torch.int32),
            before.shape[1], totals,
            word=TYPES[width], low=exponent[0], bits=exponent[1], masked=masked, num_warps=4,
        )  # fmt: skip
    # Only differences within a class are used: one scan of all, since torch's scan of columns is slow.
    running = torch.cumsum(totals.t().reshape(-1), 0, dtype=torch.int32)
    return before, running.view(CLASSES, blocks + 1).t().contiguous()


def rank(
    grids: Any, owner: Any, tiles: Any, starts: Any, scales: Any, mask: Any, counted: tuple[Any, Any],
    changes: tuple[Any, Any], width: int, exponent: tuple[int, int], masked: bool,
) -> None:  # fmt: skip
    """Local indices of changes -> ranks in their class; with several classes and ``masked``, less those of changes."""
    before, populations = counted
    _rank[(owner.numel(), PARTS)](
        grids, grids.shape[1], owner, tiles, starts, scales, mask, before.view(torch.int16), before.shape[1],
        populations, *changes, word=TYPES[width], low=exponent[0], bits=exponent[1], masked=masked, parts=PARTS,
        num_warps=4,
    )  # fmt: skip
