"""What vLLM's models hold beside their weights."""

from __future__ import annotations

from deltackpt.engines.traits import EngineTraits

TRAITS = EngineTraits(
    scratch=frozenset({"kv_cache"}),  # of attention layers
    method="quant_method",
    unprocessed="Unquantized",
    packages=("vllm.",),
)
