"""Small numbers to a device, and results down to host memory, without waiting for what is queued there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64 << 20  # bytes of pinned memory that are taken at once
EXPECTED = 0.25  # bytes for each element of a model: two steps of which 1 % changed, and some more
_ALIGN = 64


class PinnedBuffer:
    """Pinned host memory for what comes down, cut from chunks.

    A chunk goes back to torch when nobody holds a piece of it any more, and torch keeps it pinned for the next one:
    chunks are all alike, so that it fits. Pinning takes half a second a GB; see `reserve`.
    """

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Room for a tensor's copy."""
        size = tensor.numel() * tensor.element_size()
        if size > CHUNK:
            return pinned_like(tensor)
        if self._chunk is None or self._used + size > CHUNK:
            self._chunk, self._used = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True), 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGN) * _ALIGN
        return part.view(tensor.dtype).view(tensor.shape)


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def reserve(elements: int) -> None:
    """Pin the memory that the first steps of a model of so many elements will want; it grows where they want more."""
    held = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(round(elements * EXPECTED / CHUNK))]
    held.clear()


class Aside:
    """A stream for copies that the kernels after them need not wait for, and room for what they bring."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.room = torch.cuda.Stream(device), PinnedBuffer()


def aside(device: torch.device) -> Aside | None:
    """None where there are no streams."""
    return Aside(device) if device.type == "cuda" else None


class Copy:
    """Host copies of some tensors, which are kept alive until they have been copied."""

    def __init__(self, tensors: Sequence[torch.Tensor], side: Aside | None = None) -> None:
        self._held: Sequence[torch.Tensor] = tensors
        self._event = None
        if not tensors or tensors[0].device.type != "cuda":
            self._host = [t.clone() for t in tensors]
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        if side is not None:
            side.stream.wait_stream(stream)
            stream = side.stream
        with torch.cuda.stream(stream):
            self._host = [pinned_like(t) if side is None else side.room.like(t) for t in tensors]
            for into, tensor in zip(self._host, tensors, strict=True):
                into.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        self._held = ()
        return self._host


def settled(device: torch.device) -> None:
    """Wait for everything that was launched on a device's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the device that is current: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Sent:
    """Arrays on a device. To be kept until something that was launched there afterwards has been waited for."""

    arrays: list[torch.Tensor]
    source: torch.Tensor


def send(device: torch.device, *arrays: npt.NDArray[np.int64], past: bool) -> Sent:
    """Arrays to the device, together. ``past``: past the large copies that are queued, which others stand behind."""
    sizes = [array.size + -array.size % _ALIGN for array in arrays]
    here = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    flat, at = here.numpy(), 0
    for array, size in zip(arrays, sizes, strict=True):
        flat[at : at + array.size] = array.reshape(-1)
        at += size
    if past:
        from deltackpt.gpu.triton.fetch import fetch

        there = fetch(here, device)
    else:
        there = here.to(device, non_blocking=True)
    views = [part[: array.size].view(array.shape) for part, array in zip(there.split(sizes), arrays, strict=True)]
    return Sent(views, here)


def put(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on the device, by a copy that nobody waits for."""
    here = torch.from_numpy(array)
    return here if device.type != "cuda" else here.pin_memory().to(device, non_blocking=True)


def table(rows: Any) -> npt.NDArray[np.int64]:
    """The rows of a kernel's table, a column for every tensor."""
    return np.array(rows, np.int64)


def owners(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each of the programs of a launch, whose it is: ``counts[i]`` of them are i's."""
    return np.repeat(np.arange(len(counts)), counts)
