"""One weight, or one rank's box of it, quantised: largest magnitudes, scales, values.

Scales follow from the largest magnitude of each cell, the elements that share a scale. So ranks that hold parts of a
cell agree on it by the largest of theirs, and the values are those of the whole weight, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from deltackpt.quantize.recipe import Recipe
from deltackpt.torch_views.boxes import Box

FP8 = torch.float8_e4m3fn


def cells(recipe: Recipe, whole: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a cell of a weight of shape ``whole``."""
    rows, columns = recipe.cell
    return rows or max(1, whole[0]), columns or max(1, whole[1])


def window(recipe: Recipe, box: Box) -> Box:
    """The cells that a box touches, as a box of the grid of all of the weight's cells."""
    grid, offset, shape = [], [], []
    for cell, whole, first, size in zip(cells(recipe, box.whole), box.whole, box.offset, box.shape, strict=True):
        grid.append(-(-whole // cell))
        offset.append(first // cell)
        shape.append(-(-(first + size) // cell) - first // cell if size else 0)
    return Box(tuple(grid), tuple(offset), tuple(shape))


def without_scale(recipe: Recipe, scales: dict[str, torch.Tensor]) -> int:
    """Cells whose scale is zero, infinite or NaN, so that no value comes back from it: the block format has them where
    all of a block is below 448 / 3.4e38."""
    odd = torch.zeros((), dtype=torch.int64)
    for name, scale in scales.items():
        if name != "used" and not (recipe.name == "mxfp4" and name == "weight_scale"):  # those are exponents
            values = scale.float()
            odd = odd + (~torch.isfinite(values) | (values == 0)).sum().cpu()
    return int(odd)


def divided(recipe: Recipe, box: Box) -> bool:
    """May a cell that the box touches be touched by another box of the weight?"""
    return box.proper and not (recipe.cell[0] == 1 and box.shape[1] == box.whole[1])


def magnitudes(recipe: Recipe, box: Box, values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each cell of `window`, in the dtype of ``values`` [rows of cells, columns of cells]."""
    if not box.size:
        return values.new_zeros(window(recipe, box).shape)
    return _blocked(recipe, box, values).abs().amax(dim=(1, 3))


def scales_of(recipe: Recipe, largest: torch.Tensor, most: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """{"used": by which values are divided, or, of "fp8-block", multiplied; others: as they are stored}.

    ``largest`` is `magnitudes` over all ranks, ``most`` that of the whole weight, where scales have one of their own.
    """
    if recipe.name == "fp8-block":
        # As transformers' `Fp8Quantize` computes and stores it: 448 / largest is used, its inverse kept.
        largest = largest.float()
        inverse = torch.finfo(FP8).max / torch.where(largest > 0, largest, 1.0)
        used = torch.where(largest > 0, inverse, 1.0)
        return {"used": used, "weight_scale_inv": 1.0 / used}
    from compressed_tensors.compressors.mx_utils import compress_mx_scale
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    over_all = None if most is None else generate_gparam(-most, most)
    used, _ = calculate_qparams(-largest, largest, recipe.scheme.weights, global_scale=over_all)
    if recipe.name == "mxfp4":
        return {"used": used, "weight_scale": compress_mx_scale(used, torch.uint8)}
    if over_all is not None:
        return {"used": used, "weight_scale": used.to(FP8), "weight_global_scale": over_all}
    return {"used": used, "weight_scale": used.reshape(1) if recipe.cell == (None, None) else used}


def values_of(
    recipe: Recipe, box: Box, values: torch.Tensor, scales: dict[str, torch.Tensor]
) -> tuple[str, torch.Tensor]:
    """("weight" or "weight_packed", the box's values); ``scales`` of its `window`.

    The columns of a box that is packed begin and end with whole bytes or words: the caller has checked it.
    """
    blocks = _blocked(recipe, box, values)
    if recipe.name == "fp8-block":
        most = torch.finfo(FP8).max
        scaled = blocks.float() * scales["used"].unsqueeze(-1).unsqueeze(1)
        name, made = "weight", scaled.clamp(-most, most).to(FP8).flatten(2).flatten(0, 1)
    else:
        name, made = _compressed(recipe, blocks.flatten(2).flatten(0, 1), scales)
    top, left = (offset % cell for offset, cell in zip(box.offset, cells(recipe, box.whole), strict=True))
    columns = slice(left // recipe.together, -(-(left + box.shape[1]) // recipe.together))
    return name, made[top : top + box.shape[0], columns].contiguous()


def _compressed(recipe: Recipe, values: torch.Tensor, scales: dict[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """By the compressor of compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor

    used = scales["used"].reshape(1) if recipe.cell == (None, None) else scales["used"]
    state: dict[str, Any] = {"weight": values, "weight_scale": used, "weight_zero_point": torch.zeros_like(used)}
    if "weight_global_scale" in scales:
        state["weight_global_scale"] = scales["weight_global_scale"]
    made = BaseCompressor.get_value_from_registry(recipe.compressed_format).compress(state, recipe.scheme)
    name = "weight_packed" if "weight_packed" in made else "weight"
    return name, made[name]


def _blocked(recipe: Recipe, box: Box, values: torch.Tensor) -> torch.Tensor:
    """The box's values as [rows of cells, rows, columns of cells, columns], filled with zeros to whole cells."""
    rows, columns = cells(recipe, box.whole)
    before = box.offset[0] % rows, box.offset[1] % columns
    after = -(before[0] + box.shape[0]) % rows, -(before[1] + box.shape[1]) % columns
    filled = pad(values, (before[1], after[1], before[0], after[0]))
    return filled.reshape(filled.shape[0] // rows, rows, filled.shape[1] // columns, columns)
