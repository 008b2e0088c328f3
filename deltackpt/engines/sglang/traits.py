"""What SGLang's models hold beside their weights; its layers are made after vLLM's."""

from __future__ import annotations

from deltackpt.engines.traits import EngineTraits

TRAITS = EngineTraits(
    scratch=frozenset({"kv_cache"}),
    method="quant_method",
    unprocessed="Unquantized",
    packages=("sglang.",),
)
