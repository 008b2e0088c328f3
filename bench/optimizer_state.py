"""What a training's state costs as steps, beside storing it whole: fp32 weights, and what an optimizer keeps.

MiniLM is fine-tuned as in `chain.py`; the state of each step is published by the hook. By kind of tensor: bytes of the
patch against bytes of the tensors. zstd is level 3 over each tensor's bytes, alone.

    python bench/optimizer_state.py [--optimizer AdamW] [--steps 4] [--lr 1e-6] [--warm 2] [--every 1]
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import zstandard
from chain import Batches, loss_of, pretrained

from deltackpt.hooks import TrainerHook
from deltackpt.hooks.training_state import TrainingState
from deltackpt.publish.manifest import AnchorPolicy
from deltackpt.report.inspection import inspect_step
from deltackpt.repository import Repository


def optimizers() -> dict[str, Callable[..., Any]]:
    """By name: each takes parameters and ``lr``. Those of bitsandbytes keep moments in 8 bits."""
    found: dict[str, Callable[..., Any]] = {
        "AdamW": torch.optim.AdamW,
        "AdamW-amsgrad": partial(torch.optim.AdamW, amsgrad=True),
        "SGD-momentum": partial(torch.optim.SGD, momentum=0.9),
        "Adafactor": torch.optim.Adafactor,
    }
    if importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

        found["AdamW8bit"] = AdamW8bit
    return found


def kind_of(name: str) -> str:
    """Weights, or the key of the optimizer's state; those of rows that a batch does not use are apart."""
    kind = name.rsplit(".", 1)[1] if name.startswith("optimizer.") else "weights"
    return f"{kind} of word embeddings" if "word_embeddings" in name and kind != "step" else kind


def zstd_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Of all tensors, each compressed alone."""
    compressor = zstandard.ZstdCompressor(level=3)
    flat = (t.detach().contiguous().reshape(-1).view(torch.uint8).numpy() for t in tensors.values())
    return sum(len(compressor.compress(memoryview(words))) for words in flat)  # type: ignore[arg-type]


def report(repo: Repository, step: int, whole: Counter[str], zstd: int, seconds: float) -> None:
    """One line for a step, and its kinds."""
    found = inspect_step(repo, step, "main-optimizer")
    bytes_: Counter[str] = Counter()
    encodings: dict[str, Counter[str]] = {}
    for entry in found.tensors:
        bytes_[kind_of(entry.name)] += entry.bytes
        encodings.setdefault(kind_of(entry.name), Counter())[entry.encoding] += 1
    total, all_ = sum(bytes_.values()), sum(whole.values())
    print(f"| {step} | all | {all_:,} | {total:,} | {all_ / total:.2f} | {all_ / zstd:.2f} | {seconds:.2f} | |")
    for kind in whole:
        if not bytes_[kind]:
            print(f"| {step} | {kind} | {whole[kind]:,} | 0 | | | | |")
            continue
        ratio, used = whole[kind] / bytes_[kind], dict(encodings[kind])
        print(f"| {step} | {kind} | {whole[kind]:,} | {bytes_[kind]:,} | {ratio:.2f} | | | {used} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=optimizers(), default="AdamW")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--warm", type=int, default=2, help="steps before the first that is published")
    parser.add_argument("--every", type=int, default=1, help="steps of the optimizer between two that are published")
    args = parser.parse_args()
    model, tokenizer = pretrained()
    batches, optimizer = Batches(tokenizer), optimizers()[args.optimizer](model.parameters(), lr=args.lr)

    def train(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, batches[step]).backward()
        optimizer.step()

    for step in range(args.warm):
        train(step)
    print("| step | tensors | whole, bytes | patch, bytes | whole / patch | whole / zstd | step(), s | encodings |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "anchor": AnchorPolicy(ratio=1000)}
        with TrainerHook(model, Path(folder) / "repo", optimizer=optimizer, **options) as hook:
            hook.step(0)
            hook.flush()
            for step in range(1, args.steps + 1):
                for part in range(args.every):
                    train(args.warm + step * args.every + part)
                began = time.monotonic()
                hook.step(step)
                seconds = time.monotonic() - began
                hook.flush()
                tensors = TrainingState(optimizer).tensors(model)
                whole: Counter[str] = Counter()
                for name, tensor in tensors.items():
                    whole[kind_of(name)] += tensor.nbytes
                report(hook.repo, step, whole, zstd_bytes(tensors), seconds)


if __name__ == "__main__":
    main()
