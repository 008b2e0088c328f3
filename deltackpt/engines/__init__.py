"""The receivers' side: a running engine, or a live module, is updated to a step.

load(repo, step)            the state dict of a step (needs torch)
tensors(repo, step)         the same, one tensor at a time
transformers.refresh(...)   a live module, in place (needs torch)
serve, clients              the engines of a host, over HTTP (needs no torch)
vllm, sglang                what runs inside of these engines
"""

from __future__ import annotations

from typing import Any

__all__ = ["load", "tensors"]


def __getattr__(name: str) -> Any:
    """Torch is imported when it is needed."""
    if name in __all__:
        from deltackpt.engines import weights

        return getattr(weights, name)
    raise AttributeError(name)
