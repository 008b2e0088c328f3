"""INT8 layers of a CPU: what vLLM's own reload needs to be right.

oneDNN packs the weights, and keeps the address of the scales that it was given. A layerwise reload packs anew, copies
the new scales into the tensors that the layer had, and drops those that oneDNN was given: from then on it computes with
memory that is free. So they are kept for as long as what oneDNN has made of them.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

KEPT = "deltackpt_scales"
MAKE = "create_onednn_scaled_mm"


def keep_scales(ops: Any) -> None:
    """Let each handler that ``ops``, vLLM's `_custom_ops`, makes hold its scales. Can be called again."""
    make = getattr(ops, MAKE, None)
    if make is None or hasattr(make, KEPT):
        return

    @wraps(make)
    def keeping(weight: torch.Tensor, weight_scales: torch.Tensor, *rest: Any, **more: Any) -> Any:
        handler = make(weight, weight_scales, *rest, **more)
        setattr(handler, KEPT, weight_scales)
        return handler

    setattr(keeping, KEPT, True)
    setattr(ops, MAKE, keeping)


def reloads_right(layer: torch.nn.Module) -> bool:
    """Is this a layer that a reload was seen to leave as a fresh engine has it: W8A8 of compressed-tensors, a scale a
    row, symmetric, activations quantized as they come, packed by oneDNN with its scales kept? Or an attention layer
    without scales of its own?"""
    method: Any = getattr(layer, "quant_method", None)
    if type(method).__name__ == "CompressedTensorsKVCacheMethod":
        return getattr(method.quant_config, "kv_cache_scheme", "") is None
    if type(method).__name__ == "Fp8KVCacheMethod":
        return getattr(method.quant_config, "kv_cache_quant_algo", None) is None
    if _by_torch(layer):
        return True
    kernel = getattr(getattr(layer, "scheme", None), "kernel", None)
    config = getattr(kernel, "config", None)
    return (
        type(kernel).__name__ == "CPUInt8ScaledMMLinearKernel"
        and getattr(config, "is_channelwise", False) is True
        and getattr(config, "is_static_input_scheme", True) is False
        and getattr(config, "input_symmetric", False) is True
        and getattr(getattr(kernel, "linear_method", None), "__name__", "") == "_apply_weights_onednn"
        and getattr(getattr(kernel, "dnnl_handler", None), KEPT, None) is not None
    )


def _by_torch(layer: torch.nn.Module) -> bool:
    """Is this an FP8 layer that torch computes with, from its parameters? Nothing of it is packed."""
    method: Any = getattr(layer, "quant_method", None)
    kernel = getattr(method, "fp8_linear", None) or getattr(getattr(layer, "scheme", None), "fp8_linear", None)
    return type(kernel).__name__ in ("PerTensorTorchFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel")
