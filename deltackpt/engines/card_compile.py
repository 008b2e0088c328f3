"""The kernels that a receiver needs, compiled in the background from its making on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from deltackpt.format.dtypes import DTYPES
from deltackpt.gpu.compile_ahead import CompileAhead, compile_receiving
from deltackpt.torch_views.words import NAMES


def compile_for(weights: Iterable[torch.Tensor]) -> Sequence[CompileAhead]:
    """Begin to compile what it takes to receive steps of a model's weights, on each card that they are on; once in a
    process for each dtype. -> what compiles now, or did."""
    used = {(tensor.device, NAMES.get(tensor.dtype)) for tensor in weights}
    return compile_receiving((device, DTYPES[name]) for device, name in used if name is not None)
