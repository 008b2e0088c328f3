"""deltackpt's patches as vLLM's own class for changes in checkpoint coordinates."""

from __future__ import annotations

from typing import Any, Final

from deltackpt.errors import UsageError
from deltackpt.interop.vllm import Call
from deltackpt.util.extras import install_line

_TORCH: Final = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{'u' * (kind == 'U')}int{bits}" for kind in "IU" for bits in (8, 16, 32, 64)},
}


def to_vllm(call: Call) -> list[Any]:
    """The patches of one call as `CheckpointWeightPatch`, bit for bit, on the CPU.

    Raises UsageError ``extra-missing``, and ``foreign-format`` for a dtype that torch does not have.
    """
    try:
        import torch
        from vllm.model_executor.model_loader.checkpoint_weight_patch import CheckpointWeightPatch
    except ImportError as error:
        need, hint = "a vllm that has CheckpointWeightPatch", install_line("vllm")
        raise UsageError("extra-missing", where="vllm", have=str(error)[:120], need=need, hint=hint) from error
    found = []
    for patch in call.patches:
        if patch.dtype not in _TORCH:
            raise UsageError("foreign-format", where=patch.name[:80], have=patch.dtype, need=", ".join(_TORCH))
        signed = torch.from_numpy(patch.values.view(f"<i{patch.values.itemsize}").copy())
        values = signed.view(getattr(torch, _TORCH[patch.dtype]))
        positions = None if patch.positions is None else torch.from_numpy(patch.positions.copy())
        found.append(CheckpointWeightPatch(patch.name, patch.shape, values.dtype, values, positions))
    return found
