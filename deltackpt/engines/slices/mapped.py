"""The boxes that a rank holds, with their words, as a map of its memory has them: in host memory or on a card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from deltackpt.codecs.types import Elements
from deltackpt.engines.memory import Memory
from deltackpt.engines.regions import Region
from deltackpt.engines.slices.box_words import BoxWords
from deltackpt.format.dtypes import DTYPES, storage_shape, uint
from deltackpt.format.safetensors_header import Tensor
from deltackpt.format.widening import Widening
from deltackpt.shares import HeldTensors
from deltackpt.shares.bounds import Bounds, of_strided, shape_of, whole
from deltackpt.shares.tensors import FarWords, HeldTensor, Place, WideWords
from deltackpt.torch_views.words import INTS

SMALL = 1 << 20  # elements up to which a rank keeps a copy of all of a tensor of which it has slices


def held_tensors(
    table: Mapping[str, Tensor], regions: Mapping[str, Sequence[Region]], memory: Mapping[int, Memory],
    device: torch.device | None = None,
) -> HeldTensors:  # fmt: skip
    """Of all tensors that have regions. ``device``: a card that all of the memory is on, and its words are left there;
    else they are arrays of numpy. The copies of small tensors are zeros."""
    return HeldTensors({name: _held(table[name], some, memory, device) for name, some in regions.items() if some})


def _elements(tensor: Tensor) -> int:
    return int(np.prod(storage_shape(DTYPES[tensor.dtype], tensor.shape), dtype=np.int64))


def _held(
    tensor: Tensor, regions: Sequence[Region], memory: Mapping[int, Memory], device: torch.device | None
) -> HeldTensor:  # fmt: skip
    dtype = DTYPES[tensor.dtype]
    shape = storage_shape(dtype, tensor.shape)
    boxes: dict[Bounds, Place] = {}
    copies: list[tuple[Bounds, Place]] = []
    for region in regions:
        widening = Widening.between(tensor.dtype, region.wide)
        for box, words in _views(region, shape, memory[region.memory], far=device is not None):
            array = words if widening is None else WideWords(words, widening, tensor.name)
            if boxes.setdefault(box, array) is not array:
                copies.append((box, array))
    # It has few tiles, or one, so that no slice has all the old words of one.
    kept = _elements(tensor) <= SMALL and whole(shape) not in boxes
    if kept and device is None:
        boxes[whole(shape)] = np.zeros(shape, uint(dtype.width))
    elif kept:
        boxes[whole(shape)] = BoxWords(torch.zeros(shape, dtype=INTS[dtype.width], device=device))
    return HeldTensor(dtype, shape, boxes, copies, kept)


def _views(
    region: Region, shape: tuple[int, ...], memory: Memory, *, far: bool
) -> Iterator[tuple[Bounds, Elements | FarWords]]:  # fmt: skip
    """The boxes of a region, each with its view of the memory: numpy's unless it is ``far``, on a card."""
    steps = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
    strides = [_target_stride(region, step) for step in steps]
    words = None if far or memory.flat.device.type != "cpu" else memory.words()
    for box in of_strided(shape, region.source, [(n, s) for n, s, _ in region.dims]):
        first = sum(start * step for (start, _), step in zip(box, steps, strict=True))
        _, where = region.select(np.array([first], np.int64), -1)
        if words is None:
            yield box, BoxWords(memory.flat.as_strided(shape_of(box), strides, int(where[0])))
            continue
        apart = [stride * words.itemsize for stride in strides]
        yield box, np.lib.stride_tricks.as_strided(words[int(where[0]) :], shape_of(box), apart)


def _target_stride(region: Region, step: int) -> int:
    """How far apart in the memory elements are that are ``step`` apart in the tensor."""
    for _, source, target in region.dims:
        if source <= step:
            return target * (step // source)
    return 0  # an axis of one element
