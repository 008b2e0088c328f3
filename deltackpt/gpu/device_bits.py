"""Bit sections in plain torch ops on a tensor's device: the bytes are those of `codecs.bits`."""

from __future__ import annotations

import torch

# The bits of eight bytes that are 0 or 1, first one lowest, in the top byte of a product: no two terms share a bit.
_GATHER = 0x0102040810204080


def starts(counts: torch.Tensor) -> torch.Tensor:
    """Running offsets of segments, one more than segments; int64."""
    out = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int64, out=out[1:])
    return out


def octets(bits: torch.Tensor) -> torch.Tensor:
    return (bits + 7) >> 3


def pack(bits: torch.Tensor) -> torch.Tensor:
    """uint8 of 0 and 1, a multiple of 8 of them, -> bytes, lowest bit first."""
    return ((bits.view(torch.int64) * _GATHER) >> 56).to(torch.uint8)


def spread(values: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """values[segment] for every item; ``total`` is the sum of the counts, so that nothing has to be waited for."""
    return torch.repeat_interleave(values, counts, output_size=total)


def within(at: torch.Tensor, counts: torch.Tensor, total: int, device: torch.device) -> torch.Tensor:
    """Index of every item in its segment; ``at`` are the segments' starts."""
    return torch.arange(total, device=device) - spread(at[:-1], counts, total)


class Sections:
    """One section of every tile: ``bytes_of`` tile t go to ``offset[t]`` of the output."""

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def put(self, data: torch.Tensor, sizes: torch.Tensor, offset: torch.Tensor) -> None:
        """``data``: the sections one after the other, ``sizes`` bytes each."""
        if data.numel():
            to = torch.arange(data.numel(), device=data.device) + spread(
                offset - starts(sizes)[:-1], sizes, data.numel()
            )
            self._out[to] = data


def padded(values: torch.Tensor, counts: torch.Tensor, at: torch.Tensor, size: int) -> torch.Tensor:
    """Segments, each filled up with zeros to a multiple of 8 items; ``size`` items in all."""
    room = starts(octets(counts) * 8)
    out = torch.zeros(size, dtype=values.dtype, device=values.device)
    out[within(at, counts, values.numel(), values.device) + spread(room[:-1], counts, values.numel())] = values
    return out


def unary_ends(values: torch.Tensor, counts: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bit index, in its segment, of the one that ends every unary code; and the bits of each segment."""
    ends = torch.cumsum(values + 1, 0, dtype=torch.int64)
    before = torch.cat((ends.new_zeros(1), ends))[at]
    return ends - 1 - spread(before[:-1], counts, values.numel()), before[1:] - before[:-1]


def fields(
    values: torch.Tensor, widths: torch.Tensor, counts: torch.Tensor, widest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as fields of ``widths`` > 0 bits, in segments that start on a byte. -> (bytes, bytes of each segment)."""
    at = starts(counts)
    bit = starts(widths)
    before = bit[at]
    sizes = octets(before[1:] - before[:-1])
    offset = starts(sizes)
    address = bit[:-1] + spread(offset[:-1] * 8 - before[:-1], counts, values.numel())
    bits = torch.zeros(int(offset[-1]) * 8 + 8, dtype=torch.uint8, device=values.device)
    nowhere = bits.numel() - 1
    for j in range(widest):
        to = torch.where(widths > j, address + j, nowhere)
        bits[to] = ((values >> j) & 1).to(torch.uint8)
    return pack(bits[:-8]), sizes
