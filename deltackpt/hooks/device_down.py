"""Copies from a device to host memory that are waited for later, and small ones to it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class Copy:
    """Host copies of some tensors, which are kept alive until they have been copied."""

    def __init__(self, tensors: Sequence[torch.Tensor], stream: Any = None) -> None:
        self._held: Sequence[torch.Tensor] = tensors
        self._event = None
        if not tensors or tensors[0].device.type != "cuda":
            self._host = [t.clone() for t in tensors]
            return
        if stream is None:
            stream = torch.cuda.current_stream(tensors[0].device)
        else:
            stream.wait_stream(torch.cuda.current_stream(tensors[0].device))
        with torch.cuda.stream(stream):
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for into, tensor in zip(self._host, tensors, strict=True):
                into.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        self._held = ()
        return self._host


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels are launched on the device that is current: make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def side_stream(device: torch.device) -> Any:
    """A stream for copies that the kernels after them need not wait for; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def put(rows: Any, device: torch.device) -> torch.Tensor:
    """Numbers as int64 on the device, without waiting for what is queued there."""
    return _there(np.array(rows, np.int64), device)


def owners(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """For each of the programs of a launch, whose it is: ``counts[i]`` of them are i's; int32."""
    return _there(np.repeat(np.arange(len(counts), dtype=np.int32), counts), device)


def _there(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return torch.from_numpy(array)
    here = torch.from_numpy(array).pin_memory()
    return here.to(device, non_blocking=True)
