"""Bytes of a part that lie in a card's memory: `patch.source.DeviceBytes`, by torch."""

from __future__ import annotations

from typing import Any

import torch

from deltackpt.gpu.transfers import to_host


class CardBytes:
    """The bytes of ``tensor``: contiguous, of any dtype, not written to any more. A slice of them is a view."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.reshape(-1).view(torch.uint8)

    @property
    def nbytes(self) -> int:
        """Their number."""
        return int(self.tensor.numel())

    def __len__(self) -> int:
        return int(self.tensor.numel())

    def __getitem__(self, where: slice) -> CardBytes:
        return CardBytes(self.tensor[where])

    def to_host(self) -> memoryview:
        """A copy in host memory."""
        return memoryview(to_host(self.tensor).numpy())

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.tensor.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, number = self.tensor.__dlpack_device__()
        return int(kind), int(number)
