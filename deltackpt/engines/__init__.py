"""The receivers' side: a running engine, or a live module, takes a step in (needs torch)."""

from __future__ import annotations

from deltackpt.engines.load import load, tensors

__all__ = ["load", "tensors"]
