"""Small models of Transformers whose names in memory are not those on disk, and what their own saving writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip


def _qwen3_moe() -> Any:
    config = T.Qwen3MoeConfig(**TEXT, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8)
    return T.Qwen3MoeForCausalLM(config)


def _mixtral() -> Any:
    return T.MixtralForCausalLM(T.MixtralConfig(**TEXT, num_local_experts=4, num_experts_per_tok=2))


def _deepseek() -> Any:
    config = T.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 4}, moe_intermediate_size=16, first_k_dense_replace=1, n_routed_experts=8,
        n_group=1, topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
    )  # fmt: skip
    return T.DeepseekV3ForCausalLM(config)


def _llava() -> Any:
    config = T.LlavaConfig(vision_config=T.CLIPVisionConfig(**VISION), text_config=T.LlamaConfig(**TEXT))
    return T.LlavaForConditionalGeneration(config)


def _qwen2_vl() -> Any:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    return T.Qwen2VLForConditionalGeneration(T.Qwen2VLConfig(text_config=TEXT, vision_config=vision))


def _gemma3() -> Any:
    text = T.Gemma3TextConfig(**TEXT, head_dim=8)
    vision = T.SiglipVisionConfig(**VISION)
    return T.Gemma3ForConditionalGeneration(
        T.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    )


def _llama() -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT))


def _llama_tied() -> Any:
    return T.LlamaForCausalLM(T.LlamaConfig(**TEXT, tie_word_embeddings=True))


MODELS = {
    "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "deepseek": _deepseek, "llava": _llava, "qwen2_vl": _qwen2_vl,
    "gemma3": _gemma3, "llama": _llama, "llama_tied": _llama_tied,
}  # fmt: skip


def make(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().to(dtype)


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` writes."""
    model.save_pretrained(folder)
    return read(folder)


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def nudge(model: Any, seed: int) -> None:
    """Change some elements of every floating-point parameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            hit = torch.rand(parameter.shape, generator=generator) < 0.1
            parameter.add_(hit.to(parameter.dtype) * 0.25)
