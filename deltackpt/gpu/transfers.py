"""Small tables to a device, and results back to host memory, without waiting for what is queued there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

CHUNK = 64 << 20  # bytes of pinned memory that are allocated at once
EXPECTED = 0.25  # bytes for each element of a model: two steps of which 1 % changed, and some more
_ALIGN = 64


class PinnedBuffer:
    """Pinned host memory for copies from a device, cut from chunks of CHUNK bytes.

    A chunk is freed when no view of it is left, and torch's allocator keeps it pinned for the next one: all chunks have
    one size, so that it fits. Pinning takes half a second a GB; see `reserve`.
    """

    def __init__(self) -> None:
        self._chunk: torch.Tensor | None = None
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uninitialized pinned memory of a tensor's shape and dtype, a view of a chunk if it is not larger than one."""
        size = tensor.numel() * tensor.element_size()
        if size > CHUNK:
            return pinned_like(tensor)
        if self._chunk is None or self._used + size > CHUNK:
            self._chunk, self._used = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True), 0
        part = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGN) * _ALIGN
        return part.view(tensor.dtype).view(tensor.shape)

    def bytes(self, size: int) -> npt.NDArray[np.uint8]:
        """The same of bytes, uint8 [size]."""
        found: npt.NDArray[np.uint8] = self.like(torch.empty(size, dtype=torch.uint8, device="meta")).numpy()
        return found


@dataclass(frozen=True)
class SplitBytes:
    """Bytes in pinned memory in several ``pieces``, uint8 each, that are sent to a device as if they lay one after the
    other."""

    pieces: Sequence[torch.Tensor]

    def to(self, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        """All of them on a device, uint8 [n], filled up with 0 to whole words of 4 bytes."""
        size = sum(piece.numel() for piece in self.pieces)
        there, at = torch.empty(size + -size % 4, dtype=torch.uint8, device=device), 0
        there[size:] = 0
        for piece in self.pieces:
            there[at : at + piece.numel()].copy_(piece, non_blocking=non_blocking)
            at += piece.numel()
        return there


def to_host(data: torch.Tensor) -> torch.Tensor:
    """A tensor in host memory, of its shape and dtype; a copy through pinned memory where it is on a GPU."""
    return pinned_like(data).copy_(data) if data.device.type == "cuda" else data.cpu()


def pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    """Uninitialized pinned host memory of a tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def reserve(elements: int) -> None:
    """Pin the memory that the first steps of a model of so many elements need; more is pinned when more is needed."""
    held = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(round(elements * EXPECTED / CHUNK))]
    held.clear()


class CopyStream:
    """A CUDA stream for copies that later kernels need not wait for, and the pinned memory that they are copied to."""

    def __init__(self, device: torch.device) -> None:
        self.stream, self.buffer = torch.cuda.Stream(device), PinnedBuffer()


def copy_stream(device: torch.device) -> CopyStream | None:
    """A stream of a device's own, None where there are no streams."""
    return CopyStream(device) if device.type == "cuda" else None


class Copy:
    """Host copies of some tensors, which are referenced until they have been copied.

    They are made on ``side``, or on the device's current stream: then, or with ``wait``, what is launched there
    afterwards waits for them.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], side: CopyStream | None = None, *, wait: bool = False
    ) -> None:  # fmt: skip
        self._held: Sequence[torch.Tensor] = tensors
        self._event = None
        if not tensors or tensors[0].device.type != "cuda":
            self._host = [t.clone() for t in tensors]
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        if side is not None and not wait:
            side.stream.wait_stream(stream)
            stream = side.stream
        with nullcontext() if side is None or wait else torch.cuda.stream(stream):
            self._host = [pinned_like(t) if side is None else side.buffer.like(t) for t in tensors]
            for into, tensor in zip(self._host, tensors, strict=True):
                into.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[torch.Tensor]:
        """The copies, of the shapes and dtypes of the tensors, once they are complete."""
        if self._event is not None:
            self._event.synchronize()
        self._held = ()
        return self._host


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched on a device's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def current(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels are launched on this device: they go to the one that is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class Sent:
    """Arrays on a device. To be referenced until something that was launched there afterwards has been waited for."""

    arrays: list[torch.Tensor]
    source: torch.Tensor


class Tables:
    """int64 arrays of the shapes ``sizes`` in host memory, written there as ``arrays``, uninitialized at first, and
    sent to the device in one copy. Each begins at a multiple of 512 bytes."""

    def __init__(self, device: torch.device, sizes: Sequence[tuple[int, ...]]) -> None:
        self._device, self._sizes = device, sizes
        lengths = [math.prod(size) for size in sizes]
        self._at = [0, *accumulate(length + -length % _ALIGN for length in lengths)]
        self._here = torch.empty(self._at[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
        flat = self._here.numpy()
        self.arrays: list[npt.NDArray[np.int64]] = [
            flat[at : at + length].reshape(size)
            for at, length, size in zip(self._at, lengths, sizes, strict=False)  # ``_at`` ends with the end
        ]

    def send(self, *, bypass: bool) -> Sent:
        """``bypass``: by a kernel, that does not queue up behind the large copies to the device."""
        if bypass:
            from deltackpt.gpu.triton.fetch import fetch

            there = fetch(self._here, self._device)
        else:
            there = self._here.to(self._device, non_blocking=True)
        views = [
            there.as_strided(size, _steps(size), at) for at, size in zip(self._at, self._sizes, strict=False)
        ]  # fmt: skip
        return Sent(views, self._here)


def _steps(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(size[axis + 1 :]) for axis in range(len(size)))


def send(device: torch.device, *arrays: npt.NDArray[np.int64], bypass: bool) -> Sent:
    """int64 arrays of any shapes to the device, as `Tables` does."""
    tables = Tables(device, [array.shape for array in arrays])
    for into, array in zip(tables.arrays, arrays, strict=True):
        into[...] = array
    return tables.send(bypass=bypass)


def put(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array on the device, of its shape and dtype, by a copy that is not waited for."""
    here = torch.from_numpy(array)
    return here if device.type != "cuda" else here.pin_memory().to(device, non_blocking=True)


def table(rows: Any) -> npt.NDArray[np.int64]:
    """The rows of a kernel's table as int64 [rows, tensors]."""
    return np.array(rows, np.int64)


def owners(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each of the programs of a launch, the index that it works for, int64: ``counts[i]`` of them for i."""
    return np.repeat(np.arange(len(counts)), counts)
