"""The state digest of boxes of tensors on a device: of all of them by a few launches, and one transfer to the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from deltackpt.codecs.boxes import runs
from deltackpt.format.state_digest import ZERO, Sums, add
from deltackpt.gpu import digest
from deltackpt.gpu.digest import Launched, keys, launch_runs, of_positions, of_run, power, sums_of_launched, values
from deltackpt.gpu.transfers import current
from deltackpt.torch_views.boxes import Box, strides

LONG = 1 << 30  # elements of a row, from which on it is a run by itself
MOST = 4096  # pieces of a box that are told to the card

Boxed = tuple[torch.Tensor, Box]  # integers of the box's shape, in any strides, and where they lie in the tensor
_Axes = list[tuple[int, int, int]]  # of each: indices, elements from one to the next in the tensor, and in memory


def sums_of_box(words: torch.Tensor, box: Box) -> Sums:
    """`state_digest.of_box` on a device: ``words``, integers of the box's shape."""
    if not box.size:
        return ZERO
    starts, length = runs(box.whole, box.offset, box.shape)
    if len(starts) == 1:
        return of_run(words.reshape(-1), int(starts[0]))
    total, rows = ZERO, words.reshape(len(starts), length)
    step = max(1, digest.RUN // length)
    inner = torch.arange(length, device=words.device)
    for first in range(0, len(starts), step):
        at = torch.from_numpy(starts[first : first + step]).to(words.device)
        where = (at[:, None] + inner).reshape(-1)
        total = add(total, of_positions(where, values(rows[first : first + step].reshape(-1))))
    return total


def sums_of_boxes(boxes: Sequence[Boxed]) -> list[Sums]:
    """`sums_of_box` of boxes on one device, all together where there are kernels: no positions are made there, and the
    card is waited for once."""
    found, flat = [ZERO] * len(boxes), list[tuple[torch.Tensor, int]]()
    of_flat, rows = list[int](), dict[int, list[tuple[int, torch.Tensor, Box, _Axes]]]()
    for i, (words, box) in enumerate(boxes):
        if not digest.has_kernels(words.device):
            found[i] = sums_of_box(words, box)
            continue
        if not words.numel():
            continue
        axes = _axes(words, box)
        if axes[-1][1:] != (1, 1):  # neighbors in the tensor lie apart in memory
            words = words.contiguous()
            axes = _axes(words, box)
        if len(axes) == 1:
            flat.append((words.as_strided((axes[0][0],), (1,)), box.start))
            of_flat.append(i)
        elif axes[-1][0] >= LONG or math.prod(n for n, *_ in axes[:-1]) // max(n for n, *_ in axes[:-1]) > MOST:
            found[i] = sums_of_box(words, box)
        else:
            rows.setdefault(words.element_size(), []).append((i, words, box, axes))
    launched = [([of_flat[i] for i in members], both) for members, both in launch_runs(flat)]
    launched += [_launch_rows(some) for some in rows.values()]
    for i, sums in sums_of_launched(launched):
        found[i] = sums
    return found


def _axes(words: torch.Tensor, box: Box) -> _Axes:
    """The axes of a box that are left where those are joined that go on evenly, in the tensor and in memory."""
    found: _Axes = []
    for n, step, apart in zip(box.shape, strides(box.whole), words.stride(), strict=True):
        if n == 1:
            continue
        if found and found[-1][1:] == (n * step, n * apart):
            found[-1] = found[-1][0] * n, step, apart
        else:
            found.append((n, step, apart))
    if not found or found[-1][1] != 1:  # rows of one element
        found.append((1, 1, 1))
    return found


def _launch_rows(some: Sequence[tuple[int, torch.Tensor, Box, _Axes]]) -> Launched:
    """Boxes of one width, each with its number in the call. The longest axis but the last is that of a piece's rows."""
    from deltackpt.gpu.triton.digest_rows import digest_rows

    pieces = list[tuple[int, ...]]()
    for number, (_, words, box, axes) in enumerate(some):
        *outer, (length, _, _) = axes
        longest = max(range(len(outer)), key=lambda axis: outer[axis][0])
        count, step, apart = outer.pop(longest)
        place, address, width = np.array([box.start]), np.array([words.data_ptr()]), words.element_size()
        for n, far, further in outer:
            index = np.arange(n)
            place = (place[:, None] + index * far).ravel()
            address = (address[:, None] + index * further * width).ravel()
        for at, first in zip(address.tolist(), place.tolist(), strict=True):
            pieces.append((count * length, at, first, length, step, apart, number))
    like = some[0][1]
    reach = max(math.prod(box.whole) for _, _, box, _ in some)
    with current(like.device):
        sums = digest_rows(pieces, len(some), like, *keys(like.device, power(reach)))
    return [i for i, *_ in some], sums
