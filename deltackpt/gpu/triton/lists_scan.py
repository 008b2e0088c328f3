"""Kernels that count the elements of every class, changed or not, and say where among them the changes are.

A tile's rows are cut into segments of SPAN elements, a row's last one shorter, and these are taken in blocks of
SEGMENTS. The first kernel reads every word once, and writes how many elements of each class come before a segment in
its block: 15 counts of 16 bits in four words of 64, one word in each of four planes. Class c is in plane
2 * (c & 1) + ((c >> 1) & 1), its field is c >> 2. The second kernel reads, of the segments that hold a change, what
comes before it there.

The words are the old ones; or the new ones, ``masked``: then what changed is not counted, and the rest is the same.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from deltackpt.gpu.triton.compare import TYPES
from deltackpt.gpu.triton.lists import CLASSES, class_of, place

SPAN = 128
SEGMENTS = 256
PARTS = 4  # programs that share the changes of a tile
_SPAN, _SEGMENTS = tl.constexpr(SPAN), tl.constexpr(SEGMENTS)
_ROWS = tl.constexpr(32)
_NIBBLES, _BYTES = tl.constexpr(0x0F0F0F0F0F0F0F0F), tl.constexpr(0x00FF00FF00FF00FF)


@triton.jit
def _changed(mask, first, at, live):
    """Did the elements change that are at these places of a tensor?"""
    return (tl.load(mask + first + (at >> 5), live, 0) >> (at & 31)) & 1


@triton.jit
def _pass_on(counts, before, to, live):
    """Store what comes before every segment; -> what comes before the next."""
    running = tl.cumsum(counts, 0)
    tl.store(to, before + running - counts, live)
    return before + tl.sum(counts, 0)


@triton.jit
def _scan(
    grids, tensors, owner, tiles, block_tiles, scales, mask, before, stride, totals,
    word: tl.constexpr, low: tl.constexpr, bits: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    tile = tl.load(block_tiles + block).to(tl.int32)
    t = tl.load(owner + tile)
    classes = tl.load(scales + t * 4)
    if classes > 1:
        exponent_top = tl.load(scales + t * 4 + 2)
        top, left, high, wide, width, _ = place(grids, tensors, t, tile)
        first = tl.load(grids + tensors + t)
        words = tl.load(grids + 8 * tensors + t).to(tl.pointer_type(word))
        level = tl.load(grids + 9 * tensors + t)
        a_row = (wide + _SPAN - 1) // _SPAN
        begin = (block - tl.load(tiles + tile * 2).to(tl.int32)) * _SEGMENTS
        segments = high * a_row
        to = before + tl.load(tiles + tile * 2 + 1) + begin
        stop = tl.minimum(segments - begin, _SEGMENTS)
        inside = tl.arange(0, _SPAN // 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        a = tl.zeros((), tl.int64)
        b = tl.zeros((), tl.int64)
        c = tl.zeros((), tl.int64)
        d = tl.zeros((), tl.int64)
        for r in range(0, stop, _ROWS):
            row = r + tl.arange(0, _ROWS)
            s = begin + tl.minimum(row, stop - 1)
            down = s // a_row
            right = (s - down * a_row) * _SPAN
            held = tl.where(row < stop, tl.minimum(wide - right, _SPAN), 0)
            at = (top + down) * width + left + right
            if level != 0:
                at_8 = tl.multiple_of(at, 8)
                held_8 = tl.multiple_of(held, 8)
                even_words = tl.multiple_of(words, 16)
                x = tl.load(even_words + at_8[:, None, None] + inside, inside < held_8[:, None, None], 0)
            else:
                x = tl.load(words + at[:, None, None] + inside, inside < held[:, None, None], 0)
            live = inside < held[:, None, None]
            kind = class_of((x.to(tl.int32) >> low) & ((1 << bits) - 1), exponent_top, classes)
            if masked:
                live = live & (_changed(mask, first, at[:, None, None] + inside, live) == 0)
            one = tl.full(kind.shape, 1, tl.int64) << (kind * 4).to(tl.int64)
            eight = tl.sum(tl.where(live, one, 0), 2)  # 16 counts of 4 bits
            even = tl.sum(eight & _NIBBLES, 1)  # 8 of 8 bits
            odd = tl.sum((eight >> 4) & _NIBBLES, 1)
            here = to + row
            kept = row < stop
            a = _pass_on(even & _BYTES, a, here, kept)
            b = _pass_on((even >> 8) & _BYTES, b, here + stride, kept)
            c = _pass_on(odd & _BYTES, c, here + 2 * stride, kept)
            d = _pass_on((odd >> 8) & _BYTES, d, here + 3 * stride, kept)
        k = tl.arange(0, 16)
        counts = tl.where((k & 1) == 0, tl.where((k & 2) == 0, a, b), tl.where((k & 2) == 0, c, d))
        tl.store(totals + (1 + block) * 16 + k, ((counts >> ((k >> 2) * 16).to(tl.int64)) & 0xFFFF).to(tl.int32))


@triton.jit
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
    words = tl.load(grids + 8 * tensors + t).to(tl.pointer_type(word))
    a_row = (wide + _SPAN - 1) // _SPAN
    block = tl.load(tiles + tile * 2)
    segment = tl.load(tiles + tile * 2 + 1)
    lane = tl.arange(0, _SPAN)[None, :]
    begin = tl.load(starts + tile) + tl.program_id(1) * _ROWS
    end = tl.load(starts + tile + 1)
    for i in range(begin, end, parts * _ROWS):
        at = i + tl.arange(0, _ROWS)
        live = at < end
        local = tl.load(ranks + at, live, 0)
        row = local // tile_width
        column = local - row * tile_width
        rank = row * wide + column
        if bits > 0:
            if classes > 1:
                kind = class_of(tl.load(kinds + at, live, 0).to(tl.int32) & 255, exponent_top, classes)
                inside = column & (_SPAN - 1)
                place_of = (top + row) * width + left + column - inside
                held = live[:, None] & (lane < inside[:, None])
                x = tl.load(words + place_of[:, None] + lane, held, 0).to(tl.int32)
                same = held & (class_of((x >> low) & ((1 << bits) - 1), exponent_top, classes) == kind[:, None])
                if masked:
                    same = same & (_changed(mask, first, place_of[:, None] + lane, held) == 0)
                rank = tl.sum(same.to(tl.int32), 1)
                s = row * a_row + column // _SPAN
                plane = (kind & 1) * 2 + ((kind >> 1) & 1)
                rank += tl.load(before + (plane * stride + segment + s) * 4 + (kind >> 2), live, 0).to(tl.int32) & 0xFFFF
                outer = tl.load(populations + (block + s // _SEGMENTS) * 16 + kind, live, 0)
                rank += outer - tl.load(populations + block * 16 + kind, live, 0)
        tl.store(ranks + at, rank, live)


class Populations:
    """Where the blocks and segments of a launch are, on the host, and what the kernels say of them, on the device."""

    def __init__(self, segments: npt.NDArray[np.int64]) -> None:
        """``segments`` [tiles]: how many each tile has."""
        blocks = -(-segments // SEGMENTS)
        self.first_block = np.concatenate(([0], np.cumsum(blocks)))
        self.segments = int(segments.sum())
        self.block_tiles = np.repeat(np.arange(len(segments)), blocks)
        self.tiles = np.stack([self.first_block[:-1], np.cumsum(segments) - segments], axis=1)

    def scan(
        self, grids: Any, owner: Any, tiles: Any, block_tiles: Any, scales: Any, mask: Any, width: int,
        exponent: tuple[int, int], masked: bool,
    ) -> tuple[Any, Any]:  # fmt: skip
        """-> what comes before every segment, [4, segments] int64; the elements of each class before every block, and
        in all, [blocks + 1, 16] int32."""
        blocks = len(self.block_tiles)
        totals = torch.zeros((blocks + 1, CLASSES), dtype=torch.int32, device=owner.device)
        before = torch.empty((4, max(self.segments, 1)), dtype=torch.int64, device=owner.device)
        if blocks and exponent[1]:
            _scan[(blocks,)](
                grids, grids.shape[1], owner, tiles, block_tiles, scales, mask, before, before.shape[1], totals,
                word=TYPES[width], low=exponent[0], bits=exponent[1], masked=masked, num_warps=4,
            )  # fmt: skip
        return before, torch.cumsum(totals, 0, dtype=torch.int32)


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
