"""Where in memory the tensors of a state dict lie: while that is the same, so is what is to be known of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

MemorySpan = tuple[Any, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def spans_of(state: Mapping[str, Any]) -> list[MemorySpan] | None:
    """Of every tensor its name, where it lies, and all that says which elements of its storage it has; None unless all
    of them are plain tensors with a storage. No tensor is kept by it.
    """
    found: list[MemorySpan] = []
    for name, value in state.items():
        if type(value) not in _PLAIN or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return None
        storage = value.untyped_storage()  # one that was freed has no bytes
        form = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device
        odd = value.is_nested, value.is_conj(), value.is_neg()
        found.append((name, storage.data_ptr(), storage.nbytes(), form, odd))
    return found
