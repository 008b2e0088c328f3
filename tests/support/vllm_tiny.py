"""Tiny models of several architectures with a tokenizer of words, and engines that run them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

PROMPTS = ([5, 6, 7, 8], [100, 101], [*range(5, 205)])  # the last fills a block of the prefix cache
SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3, "dtype": "bfloat16",
}  # fmt: skip


def tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, **{f"w{i}": i for i in range(4, 512)}}
    made = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def model_of(kind: str, **changes: Any) -> torch.nn.Module:
    """A random model in bf16, the same every time."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "tie_word_embeddings": False, **changes})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).to(torch.bfloat16)


def tiny(folder: Path, kind: str = "Qwen3", **changes: Any) -> dict[str, torch.Tensor]:
    """Config and tokenizer into a folder; -> the state of a random model, tied weights once."""
    tokenizer(folder)
    model = model_of(kind, **changes)
    model.save_pretrained(folder)
    tied = model.config.tie_word_embeddings
    return {k: v.detach() for k, v in model.state_dict().items() if not (tied and k == "lm_head.weight")}


def engine(path: Path | str, *, tp: int = 1, **options: Any) -> Any:
    from vllm import LLM

    options = {"weight_transfer_config": {"backend": "deltackpt"}, **options}
    if tp == 1:
        options.setdefault("distributed_executor_backend", "uni")
    options.setdefault("worker_extension_cls", "deltackpt.engines.vllm.worker.DeltaWorker")
    return LLM(
        str(path), enforce_eager=True, dtype="bfloat16", max_model_len=512, seed=0, tensor_parallel_size=tp,
        **options,
    )  # fmt: skip


def answers(llm: Any) -> Any:
    """Greedy tokens and their logprobs: they repeat bit for bit in engines with equal weights."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    out = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)
    return [
        (tuple(x.outputs[0].token_ids), tuple(next(iter(d.values())).logprob for d in x.outputs[0].logprobs))
        for x in out
    ]


def checksums(llm: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for rank in llm.collective_rpc("compute_weight_checksums"):
        found.update(rank)
    return found


def of_fresh(path: Path, *, tp: int = 1, **options: Any) -> Any:
    """(answers, checksums) of an engine that was started from a whole checkpoint."""
    llm = engine(path, tp=tp, **options)
    try:
        return answers(llm), checksums(llm)
    finally:
        close(llm)


def break_writes(worker: Any, rank: int, at: int) -> None:
    """Let the write of that number into the memory of a rank fail, once. Runs in the engine's worker."""
    from deltackpt.engines.memory import Memory

    if worker is not None and worker.rank != rank:
        return
    write, count = Memory.write, [0]

    def breaks(self: Memory, positions: Any, values: Any) -> None:
        count[0] += 1
        if count[0] == at:
            Memory.write = write  # type: ignore[method-assign]
            raise RuntimeError("the device is gone")
        write(self, positions, values)

    Memory.write = breaks  # type: ignore[method-assign]


def error_of(work: Callable[[], object]) -> str:
    """What it raises, as a text: a traceback would keep an engine of this process alive beside the next."""
    try:
        work()
    except Exception as error:
        return f"{error} {error.__cause__ or ''}"
    return ""


def close(llm: Any) -> None:
    if (core := getattr(llm.llm_engine, "engine_core", None)) is not None:
        core.shutdown()
    del llm
    gc.collect()
