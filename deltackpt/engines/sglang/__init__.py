"""All that knows SGLang: a client for its routes, and what runs inside of its workers (which needs torch)."""

from __future__ import annotations

from typing import Any

__all__ = ["UpdateRequest", "load_weights"]


def __getattr__(name: str) -> Any:
    """Torch is imported when it is needed."""
    if name in __all__:
        from deltackpt.engines.sglang import loader

        return getattr(loader, name)
    raise AttributeError(name)
