"""GRPO with TRL on a CPU, and an engine in another process that takes every step in while it answers.

    pip install '.[torch]' trl
    python examples/grpo.py [--steps 4] [--work DIR]

The model is tiny and random, so it learns nothing worth having; what is shown is the way of its weights. The trainer
publishes each optimizer step by the callback. The engine, here a loop of Transformers, follows the repository: it comes
to each step in place, and answers with it. `grpo_vllm.py` has vLLM in its place.
At the end both have to hold the same bits.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import deltackpt
from deltackpt.engines.transformers import refresh

WORDS = ["<pad>", "<eos>", "<unk>", "the", "sun", "moon", "is", "bright", "dark", "and", "high", "low"]
DEADLINE = 240.0  # seconds in which the engine has to come to the last step


def tiny_model(**more: Any) -> LlamaForCausalLM:
    """The same random weights each time; ``more`` of its configuration."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=1, max_position_embeddings=64, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A word a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """More for more different words."""
    return [float(len(set(text.split()))) for text in completions]


def train(work: Path, steps: int, **more: Any) -> None:
    """The trainer: TRL's own, with one more callback; ``more`` of the model's configuration."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from deltackpt.hooks.transformers import DeltaCheckpointCallback

    callback = DeltaCheckpointCallback(work / "repo", dtype=torch.bfloat16)
    trainer = GRPOTrainer(
        model=tiny_model(**more),
        reward_funcs=reward,
        args=GRPOConfig(
            str(work / "out"), max_steps=steps, per_device_train_batch_size=2, num_generations=2,
            max_completion_length=8, learning_rate=1e-4, use_cpu=True, bf16=False, report_to=[], save_strategy="no",
            logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["the sun is", "the moon is"] * 8}),
        processing_class=tiny_tokenizer(),
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()


def serve(work: Path, last: int, ready: Any, taken: Any) -> None:
    """The engine: answers with the newest step, and moves to the next as soon as it is there."""
    tokenizer, model = tiny_tokenizer(), tiny_model().to(torch.bfloat16).eval()
    prompt = tokenizer("the sun is", return_tensors="pt").input_ids
    at = -1
    ready.set()
    deadline = time.monotonic() + DEADLINE
    while at < last and time.monotonic() < deadline:
        try:
            repo = deltackpt.Repository.open(work / "repo")
            newest = repo.find("latest")
        except deltackpt.errors.NotFoundError:  # the trainer has not published yet
            newest = None
        if newest is None or newest.step == at:
            time.sleep(0.1)
            continue
        refresh(model, repo, newest.step)  # in place, proven: changed elements only
        at = newest.step
        answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
        print(f"engine: step {at} says {tokenizer.decode(answer[0])!r}", flush=True)
        taken.append(at)
    torch.save(model.state_dict(), work / "engine.pt")


def main() -> None:
    """Train and serve at once, then compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    work = given.work or Path(tempfile.mkdtemp(prefix="grpo-"))
    work.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        taken, ready = manager.list(), context.Event()
        engine = context.Process(target=serve, args=(work, given.steps, ready, taken))
        engine.start()
        try:
            ready.wait(DEADLINE)
            train(work, given.steps)
            engine.join(DEADLINE)
        finally:
            engine.kill()  # no-op where it has ended
        steps = list(taken)
    assert engine.exitcode == 0, f"the engine ended with {engine.exitcode}"
    assert steps == sorted(steps), steps
    assert steps[-1:] == [given.steps], steps
    deltackpt.apply(work / "repo", work / "last", given.steps)
    trained = LlamaForCausalLM.from_pretrained(work / "last", dtype=torch.bfloat16).state_dict()
    served = torch.load(work / "engine.pt", weights_only=True)
    assert all(torch.equal(served[name].view(torch.int16), trained[name].view(torch.int16)) for name in trained)
    print(f"the engine took {len(steps)} of {given.steps + 1} steps: {steps}")
    print(f"its weights are step {given.steps}, bit for bit")


if __name__ == "__main__":
    main()
