"""Torch tensors as unsigned words: integer views in, integer views out, so that no copy ever touches a NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deltackpt.errors import CheckpointError
from deltackpt.format.dtypes import DTYPES, DType, uint

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
NAMES = {getattr(torch, name): safe for name, safe in _NAMES.items() if hasattr(torch, name)}  # older torches lack some
INTS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # the integer that views a word of so many bytes


def dtype_of(torch_dtype: torch.dtype, where: str) -> DType:
    """The safetensors dtype. Raises CheckpointError ``dtype-unpublishable`` for one that safetensors has not."""
    if torch_dtype not in NAMES:
        raise CheckpointError(
            "dtype-unpublishable",
            where=where,
            have=str(torch_dtype),
            need="a dtype that safetensors has",
            hint="Cast it with `dtype=`, or leave the tensor out with `rename=`.",
        )
    return DTYPES[NAMES[torch_dtype]]


def shape_of(tensor: torch.Tensor, dtype: DType) -> tuple[int, ...]:
    """The shape as a safetensors header counts it: torch counts F4 in pairs."""
    shape = tuple(tensor.shape)
    return (*shape[:-1], shape[-1] * 2) if dtype.name == "F4" else shape


def words(tensor: torch.Tensor, dtype: DType) -> torch.Tensor:
    """A flat view of a contiguous tensor as integers of ``dtype.width`` bytes, on its device."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.dtype == INTS[dtype.width] else flat.view(INTS[dtype.width])


def run_of(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements ``start`` to ``stop`` of a tensor in row-major order, flat: a view of a contiguous one, else a copy of
    no more than the rows that they are in."""
    while not tensor.is_contiguous() and start < stop:
        inner = tensor.numel() // tensor.shape[0]
        first, last = start // inner, -(-stop // inner)
        start, stop = start - first * inner, stop - first * inner
        if last - first > 1 or tensor.dim() == 1:
            return tensor[first:last].reshape(-1)[start:stop]
        tensor = tensor[first]
    return tensor.reshape(-1)[start:stop]


def on_host(flat: torch.Tensor, dtype: DType) -> npt.NDArray[Any]:
    """Integers as unsigned numpy words: a view if they are in host memory, else a copy."""
    array: npt.NDArray[Any] = flat.cpu().numpy().view(uint(dtype.width))
    return array


def from_host(array: npt.NDArray[Any], device: Any) -> torch.Tensor:
    """Unsigned numpy words as integers on ``device``, always a copy."""
    width = array.dtype.itemsize
    signed = np.ascontiguousarray(array).view(np.uint8 if width == 1 else np.dtype(f"<i{width}"))
    return torch.tensor(signed, device=device)
