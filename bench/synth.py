"""A synthetic run of a 0.6 B model: bf16 checkpoints with the shapes of Qwen3-0.6B, 1.2 GB in 3 shards.

fp32 masters are N(0, 0.02); a step adds an Adam-like update, a Gaussian clipped at two sigma, and each checkpoint is
the masters rounded to bf16. `UPDATE` is such that some 1 % of the bf16 elements change a step, mostly by one ULP.
A block of masters is taken through all steps before the next one is made, so memory does not follow the model.
The bytes depend on the seed and the scale alone, not on the threads.

    python bench/synth.py OUT [--steps 3] [--seed 0] [--scale 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 18  # elements: all work on one stays in the cache
SHARDS = 3
SPREAD = np.float32(0.02)
UPDATE = np.float32(2.5e-7)  # sigma of a step


@dataclass(frozen=True)
class Model:
    """The sizes that the shapes follow from. ``scale`` shrinks all but the head's, for tests."""

    hidden: int
    inner: int
    query: int
    key: int
    head: int
    layers: int
    vocabulary: int

    @classmethod
    def scaled(cls, scale: float) -> Model:
        def part(size: int) -> int:
            return max(16, round(size * scale / 16) * 16)

        sizes = (part(1024), part(3072), part(2048), part(1024), 128)
        return cls(*sizes, max(1, round(28 * scale)), max(16, round(151_936 * scale)))

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """In the order of the layers; the output head is tied to the embedding, and so has no tensor."""
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            yield f"{layer}.input_layernorm.weight", (self.hidden,)
            yield f"{layer}.mlp.down_proj.weight", (self.hidden, self.inner)
            yield f"{layer}.mlp.gate_proj.weight", (self.inner, self.hidden)
            yield f"{layer}.mlp.up_proj.weight", (self.inner, self.hidden)
            yield f"{layer}.post_attention_layernorm.weight", (self.hidden,)
            yield f"{layer}.self_attn.k_norm.weight", (self.head,)
            yield f"{layer}.self_attn.k_proj.weight", (self.key, self.hidden)
            yield f"{layer}.self_attn.o_proj.weight", (self.hidden, self.query)
            yield f"{layer}.self_attn.q_norm.weight", (self.head,)
            yield f"{layer}.self_attn.q_proj.weight", (self.query, self.hidden)
            yield f"{layer}.self_attn.v_proj.weight", (self.key, self.hidden)
        yield "model.norm.weight", (self.hidden,)


@dataclass(frozen=True)
class Block:
    """A run of one tensor's elements, and where it is in a shard. ``number`` seeds it."""

    number: int
    shard: str
    offset: int  # of bytes in the file
    elements: int
    center: np.float32  # 1 for norms, which start there


def generate(out: Path, steps: int, *, seed: int = 0, scale: float = 1.0, threads: int | None = None) -> list[Path]:
    """Write the checkpoints ``out/step_000000`` to ``out/step_<steps>``; returns their directories."""
    model = Model.scaled(scale)
    heads, blocks = _plan(model)
    folders = [out / f"step_{step:06d}" for step in range(steps + 1)]
    files: dict[str, list[int]] = {}
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            _side_files(folder, model, heads)
            for shard, (head, size) in heads.items():
                fd = os.open(folder / shard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                files.setdefault(shard, []).append(fd)
                os.pwrite(fd, head, 0)
                os.truncate(fd, size)
        with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
            for _ in pool.map(lambda block: _write(block, seed, files[block.shard]), blocks):
                pass
    finally:
        for fd in (fd for fds in files.values() for fd in fds):
            os.close(fd)
    return folders


def _plan(model: Model) -> tuple[dict[str, tuple[bytes, int]], list[Block]]:
    """-> each shard's header and file size, and the blocks of all tensors."""
    shapes = list(model.shapes())
    total = sum(prod(shape) for _, shape in shapes)
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    done = 0
    for name, shape in shapes:
        if len(groups) < SHARDS and done * SHARDS >= total * len(groups):
            groups.append([])
        groups[-1].append((name, shape))
        done += prod(shape)
    heads: dict[str, tuple[bytes, int]] = {}
    blocks: list[Block] = []
    for i, group in enumerate(groups):
        shard = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        head, size = _header(group)
        heads[shard] = (head, size)
        at = len(head)
        for name, shape in group:
            center = np.float32(1 if "norm" in name else 0)
            for start in range(0, prod(shape), BLOCK):
                count = min(BLOCK, prod(shape) - start)
                blocks.append(Block(len(blocks), shard, at + 2 * start, count, center))
            at += 2 * prod(shape)
    return heads, blocks


def _header(group: list[tuple[str, tuple[int, ...]]]) -> tuple[bytes, int]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in group:
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at


def _side_files(folder: Path, model: Model, heads: dict[str, tuple[bytes, int]]) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "bfloat16",
        "head_dim": model.head,
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "model_type": "qwen3",
        "num_attention_heads": max(1, model.query // model.head),
        "num_hidden_layers": model.layers,
        "num_key_value_heads": max(1, model.key // model.head),
        "tie_word_embeddings": True,
        "vocab_size": model.vocabulary,
    }
    weight_map = {name: shard for shard, (head, _) in heads.items() for name in json.loads(head[8:])}
    del weight_map["__metadata__"]
    total = sum(size - len(head) for head, size in heads.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    for name, value in {"config.json": config, "model.safetensors.index.json": index}.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n")


def _write(block: Block, seed: int, fds: list[int]) -> None:
    """Take one block of masters through all steps, into one file a step."""
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence((seed, block.number))))
    masters = rng.standard_normal(block.elements, np.float32)
    masters *= SPREAD
    masters += block.center
    update = np.empty_like(masters)
    for step, fd in enumerate(fds):
        if step:
            rng.standard_normal(dtype=np.float32, out=update)
            np.clip(update, -2, 2, out=update)
            update *= UPDATE
            masters += update
        os.pwrite(fd, _to_bf16(masters).data, block.offset)


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even; there is no NaN here."""
    bits: npt.NDArray[np.uint32] = values.view(np.uint32)
    bits = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return bits.astype(np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    for path in generate(args.out, args.steps, seed=args.seed, scale=args.scale):
        print(path)


if __name__ == "__main__":
    main()
