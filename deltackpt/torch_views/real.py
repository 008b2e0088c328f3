"""Is a tensor what it says: are its elements in memory, and are they those of its dtype?"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from deltackpt.errors import CheckpointError

ZERO3 = (
    "Publish from a function that gathers: inside of `deepspeed.zero.GatheredParameters(list(model.parameters()))`, at"
    " all ranks, clone what rank 0 is to publish."
)
META = "Load the weights before the hook is made: a meta tensor has none."
FREED = (
    "Something freed the weights and will bring them back, as FSDP 1 and offloading do: capture while they are there,"
    " or give the hook a function that returns a state dict."
)
LAZY = "Publish `tensor.resolve_conj().resolve_neg()`, or leave it out with `rename=`."
QUANTIZED = "Publish the weights that it was made from, or leave it out with `rename=`."


def in_memory(local: torch.Tensor) -> bool:
    """Is it a plain tensor, with a storage?"""
    odd = is_traceable_wrapper_subclass(local) or local.is_nested or local.is_quantized
    return not odd and local.layout == torch.strided and local.device.type != "meta"


def check_real(name: str, local: torch.Tensor, parameter: Any = None) -> None:
    """``parameter``: the module's own, which may say what a state dict does not.

    Raises CheckpointError ``tensor-placeholder`` for a tensor whose elements are not in memory, ``tensor-subclass`` for
    one that holds others than those of its dtype.
    """
    if local.is_nested or local.is_conj() or local.is_neg():
        have = "a nested tensor" if local.is_nested else "a conjugate or negation that is yet to be computed"
        need, hint = "a plain tensor, whose memory is its elements", QUANTIZED if local.is_nested else LAZY
        raise CheckpointError("tensor-subclass", where=name, have=have, need=need, hint=hint)
    shape = tuple(local.shape)
    whole = getattr(parameter, "ds_shape", None)
    if whole is not None and tuple(whole) != shape:
        have = f"a placeholder of ZeRO-3, of shape {list(shape)}; its real shape is {list(whole)}"
        raise CheckpointError("tensor-placeholder", where=name, have=have, need="the weights", hint=ZERO3)
    if local.device.type == "meta":
        have = "a tensor on the meta device"
        raise CheckpointError("tensor-placeholder", where=name, have=have, need="the weights", hint=META)
    if not in_memory(local):
        kind = "quantized tensor" if local.is_quantized else type(local).__name__
        have = f"a {kind}" if local.layout == torch.strided else f"a tensor of layout {local.layout}"
        need = "a plain tensor, whose memory is its elements"
        raise CheckpointError("tensor-subclass", where=name, have=have, need=need, hint=QUANTIZED)
    reach = local.storage_offset() + sum((n - 1) * s for n, s in zip(shape, local.stride(), strict=True)) + 1
    if local.numel() and local.untyped_storage().nbytes() < reach * local.element_size():
        have = f"shape {list(shape)} on a storage of {local.untyped_storage().nbytes()} bytes: it was freed"
        raise CheckpointError("tensor-placeholder", where=name, have=have, need="the weights", hint=FREED)
