"""The words of a checkpoint's tensors in an engine's memory on a card: looked at where they are, or gathered there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.engines.memory import Memory
from deltackpt.engines.regions import Region
from deltackpt.format.dtypes import DTYPES, nbytes
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.state_digest import Sums, TensorDigest
from deltackpt.gpu.digest import has_kernels, sums_of_runs
from deltackpt.gpu.places import Place, fits
from deltackpt.torch_views.words import INTS, from_host
from deltackpt.util.grouped import grouped

TOGETHER = 1 << 28  # bytes that are gathered, or sent to the card, at once, unless one tensor has more


class Mapped(Protocol):
    """What has a map: `proof.Proof`."""

    @property
    def regions(self) -> Mapping[str, Sequence[Region]]:
        """Of each proven tensor."""


def card_of(proof: Mapped, memory: Mapping[int, Memory]) -> torch.device | None:
    """The one device that all proven weights are on, if there are kernels for it."""
    used = {region.memory for regions in proof.regions.values() for region in regions}
    devices = {memory[address].flat.device for address in used}
    device = devices.pop() if len(devices) == 1 else None
    return device if device is not None and has_kernels(device) else None


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Within the block work goes to a stream of its own, beside an engine that computes; all of it is done at the
    end."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def elements(tensor: Tensor) -> int:
    """Storage elements of a tensor."""
    dtype = DTYPES[tensor.dtype]
    return nbytes(dtype, tensor.shape) // dtype.width


def lies_whole(regions: Sequence[Region], total: int) -> bool:
    """Does a tensor of so many elements lie in one place, in its own order?"""
    return len(regions) == 1 and regions[0].plain and regions[0].source == 0 and regions[0].elements == total


def covers(regions: Sequence[Region], total: int) -> bool:
    """Is every element of a tensor in the regions, as far as their sizes tell?"""
    return sum(region.elements for region in regions) == total


def words_of(regions: Sequence[Region], memory: Mapping[int, Memory], tensor: Tensor, *, copy: bool) -> torch.Tensor:
    """All words of a tensor that the regions cover, flat, as integers of its width on their device: a view where it
    lies whole, unless ``copy``."""
    total = elements(tensor)
    if lies_whole(regions, total):
        first = regions[0]
        here = memory[first.memory].flat[first.target : first.target + total]
        return here.clone() if copy else here
    device = memory[regions[0].memory].flat.device
    words = torch.zeros(total, dtype=INTS[DTYPES[tensor.dtype].width], device=device)
    for region in regions:
        source_view(region, words).copy_(target_view(region, memory[region.memory].flat))
    return words


def source_view(region: Region, words: torch.Tensor) -> torch.Tensor:
    """A region of a tensor's flat words: a strided view. Raises IndexError for one outside of them, as does
    `target_view`."""
    return _view(words, region.source, [(n, s) for n, s, _ in region.dims])


def target_view(region: Region, flat: torch.Tensor) -> torch.Tensor:
    """The same region of a storage's flat words, as a view of the same shape."""
    return _view(flat, region.target, [(n, t) for n, _, t in region.dims])


def _view(words: torch.Tensor, offset: int, dims: Sequence[tuple[int, int]]) -> torch.Tensor:
    if offset + sum((n - 1) * s for n, s in dims) >= words.numel():
        raise IndexError("a box outside of its memory")
    return words.as_strided([n for n, _ in dims], [s for _, s in dims], words.storage_offset() + offset)


def sums_of(words: Sequence[torch.Tensor]) -> list[Sums]:
    """Both sums of the digest of whole tensors on one device, with one transfer to the host for each width."""
    return sums_of_runs([(run, 0) for run in words])


def unlike(
    device: torch.device, held: Mapping[str, Sequence[Region]], memory: Mapping[int, Memory],
    table: Mapping[str, Tensor], digests: Mapping[str, TensorDigest],
) -> list[str]:  # fmt: skip
    """The tensors that the regions cover whose sums on the card are not those of their digests."""
    wrong = []
    with aside(device):
        for names in _together(held, table):
            words = [words_of(held[name], memory, table[name], copy=False) for name in names]
            found = zip(names, sums_of(words), strict=True)
            wrong += [name for name, sums in found if sums != digests[name].sums]
    return wrong


def _together(held: Mapping[str, Sequence[Region]], table: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Names of tensors whose copies take TOGETHER bytes, unless one alone takes more; views take none."""

    def copied(name: str) -> int:
        total = elements(table[name])
        return 0 if lies_whole(held[name], total) else total * DTYPES[table[name].dtype].width

    return grouped(held, copied, TOGETHER)


def same_words(region: Region, data: npt.NDArray[Any], flat: torch.Tensor) -> bool:
    """Does a storage's ``flat`` words on a card hold a region of a tensor's words in host memory, unsigned [n]?"""
    want = np.ascontiguousarray(region.source_view(data)).reshape(-1)
    there = target_view(region, flat)
    return bool(torch.equal(from_host(want, flat.device).view(there.shape), there))


def mappable(regions: Sequence[Region]) -> bool:
    """Does the map of the regions have positions that the kernels take?"""
    return all(fits(1 + sum((n - 1) * t for n, _, t in region.dims)) for region in regions)


def placed(
    regions: Sequence[Region], memory: Mapping[int, Memory], total: int,
    positions: torch.Tensor, new: torch.Tensor, old: torch.Tensor,
) -> Iterator[Place]:  # fmt: skip
    """Changed words of a tensor of ``total`` elements, where its regions have them.

    ``positions``: [n] integers, flat in the tensor; ``new`` and ``old``: [n] words. All on the regions' device.
    """
    for region in regions:
        flat = memory[region.memory].flat
        if lies_whole([region], total):
            yield Place(flat, region.target, positions, new, old)
            continue
        inside, where = _select(region, positions)
        yield Place(flat, region.target, where, new[inside], old[inside])


def _select(region: Region, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Region.select` on a device: a mask [n], and [m] positions that count from the region's first element."""
    rest = positions.to(torch.int64) - region.source
    inside = rest >= 0
    where = torch.zeros_like(rest)
    for n, s, t in region.dims:
        at = torch.div(rest, s, rounding_mode="floor")
        inside &= at < n
        rest = rest - at * s
        where += at * t
    inside &= rest == 0
    return inside, where[inside].to(torch.int32)
