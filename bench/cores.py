"""A step of an 8 B model on one host, by the number of threads: `write --base` and `apply --cache`, as a table.

bf16 tensors with the shapes of an 8 B model, 16 GB in 7 shards, in memory-backed storage; 1 % of the elements change a
step, each by one ULP. Every step is written from the directory of the one before with so many threads; then a cache
that has both slots is moved through the same steps, one move for each number of threads. Beside them: how fast as many
threads copy memory, and `cp -r` of the checkpoint. No more than three checkpoints are held at a time.

The most threads come first, and every line is printed when it was measured. What would take longer than `--seconds`
leave is left out: a step is then written with all threads, for the moves, which take less time, to have it.

    python bench/cores.py [--size 8b|1b|small] [--threads 1 2 4 8 16] [--seconds 90] [--work /dev/shm]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from rows import machine, say

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deltackpt import kernels
from deltackpt.cache import apply_to_cache
from deltackpt.format.safetensors_header import Tensor, build_header
from deltackpt.publish.write import AnchorPolicy, write
from deltackpt.repository import Repository

SIZES = {  # vocabulary, hidden, inner, keys, layers
    "8b": (128_256, 4096, 14_336, 1024, 32),
    "1b": (128_256, 2048, 8192, 512, 16),
    "500m": (32_064, 1024, 3584, 256, 32),  # a sixteenth of 8b, in as many tensors
    "small": (2048, 256, 512, 128, 2),
}
SHARDS = 8  # at most
BLOCK = 1 << 22  # elements that one thread makes at a time
CHANGED = 100  # one element of so many changes a step
WARM = 1  # steps before the first that counts: with them a cache has both slots
NEVER = AnchorPolicy(ratio=float("inf"))


@dataclass
class Times:
    """Of a checkpoint of ``size`` bytes: seconds of the calls, by the number of threads, and bytes a second that a copy
    in memory reads and writes."""

    size: int = 0
    write: dict[int, float] = field(default_factory=dict)
    move: dict[int, float] = field(default_factory=dict)
    copy: dict[int, float] = field(default_factory=dict)
    anchor: float | None = None
    cp: float | None = None
    build: float | None = None


def shapes(size: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of a Llama of this size; 291 tensors at 8 B."""
    vocabulary, hidden, inner, keys, layers = SIZES[size]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}"
        for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def make_files(folder: Path, size: str) -> None:
    """The shards of a checkpoint and their index, without the values."""
    every = list(shapes(size))
    total, done = sum(prod(shape) for _, shape in every), 0
    groups: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for name, shape in every:
        if len(groups) < SHARDS and done * SHARDS >= total * len(groups):
            groups.append([])
        groups[-1].append((name, shape))
        done += prod(shape)
    folder.mkdir(parents=True)
    weight_map = {}
    for i, group in enumerate(groups):
        path = folder / f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= {name: path.name for name, _ in group}
        ends = np.cumsum([2 * prod(shape) for _, shape in group]).tolist()
        tensors = [Tensor(n, "BF16", s, e - 2 * prod(s), e) for (n, s), e in zip(group, ends, strict=True)]
        with path.open("wb") as file:
            file.write(build_header(tensors, {}))
            file.truncate(file.tell() + ends[-1])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def blocks(folder: Path) -> Iterator[tuple[int, np.ndarray]]:
    """The elements of a checkpoint, a number and some of them at a time, to be changed in place."""
    number = 0
    for path in sorted(folder.glob("*.safetensors")):
        head = 8 + int.from_bytes(path.open("rb").read(8), "little")
        words = np.memmap(path, np.uint16, "r+", head)
        for first in range(0, len(words), BLOCK):
            yield number, words[first : first + BLOCK]
            number += 1


def flip(block: tuple[int, np.ndarray], steps: list[int]) -> None:
    """What changes in these steps, the same wherever it is done."""
    number, words = block
    for step in steps:
        rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence((step, number))))
        words[rng.integers(0, len(words), len(words) // CHANGED, np.uint32)] ^= np.uint16(1)


def on_all(work: Callable[[Any], object], items: Iterator[Any]) -> None:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(work, items))


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def memory_speeds(counts: list[int]) -> dict[int, float]:
    """Bytes a second that a copy reads and writes, by the number of threads."""
    size = (1 << 28) if len(os.sched_getaffinity(0)) > 4 else (1 << 26)  # elements of 8 bytes
    old, new = np.ones(size, np.uint64), np.ones(size, np.uint64)
    found = {}
    for threads in counts:
        cuts = [slice(size * i // threads, size * (i + 1) // threads) for i in range(threads)]
        with ThreadPoolExecutor(threads) as pool:

            def copy(pool: ThreadPoolExecutor = pool, cuts: list[slice] = cuts) -> None:
                list(pool.map(lambda cut: np.copyto(new[cut], old[cut]), cuts))

            found[threads] = 2 * old.nbytes / min(timed(copy) for _ in range(3))
    return found


def line(what: str, took: float, times: Times) -> None:
    """At once: a run that is ended early has said what it measured."""
    print(f"{what}: {took:.2f} s, {times.size / took / 1e9:.1f} GB/s", flush=True)


def write_steps(work: Path, size: str, counts: list[int], times: Times, until: float) -> int:
    """Publish the anchor, and a step for each number of threads. -> the last step."""
    folders, repo = [work / "even", work / "odd"], work / "repo"
    make_files(folders[0], size)
    values = np.random.default_rng(0).standard_normal(BLOCK, np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    on_all(lambda block: np.copyto(block[1], bits[: len(block[1])]), blocks(folders[0]))
    make_files(folders[1], size)
    on_all(lambda block: np.copyto(block[1], bits[: len(block[1])]), blocks(folders[1]))
    say(f"made; free: {shutil.disk_usage(work).free / 1e9:.0f} GB")
    times.anchor = timed(lambda: write(folders[0], repo))
    line("anchor", times.anchor, times)
    on_all(lambda block: flip(block, [1]), blocks(folders[1]))
    last = 0
    one = 0.0  # about the seconds of one thread
    for step, asked in enumerate([max(counts)] * WARM + counts, 1):
        threads = asked if one and time.monotonic() + one / asked < until else max(counts)
        if step > 1:  # the directory has the step before the last one
            on_all(lambda block, step=step: flip(block, [step - 1, step]), blocks(folders[step % 2]))
        new, base = folders[step % 2], folders[(step - 1) % 2]
        took = timed(lambda n=new, b=base, t=threads: write(n, repo, base=b, threads=t, anchor=NEVER))
        one, last = max(one, took * threads), step
        if step > WARM and threads == asked:
            times.write[threads] = took
            line(f"write --base, {threads} threads", took, times)
    for folder in folders:
        shutil.rmtree(folder)
    return last


def move_steps(work: Path, last: int, counts: list[int], times: Times, until: float) -> None:
    """The same steps, taken in by a cache; before it, `cp -r` of the anchor."""
    repo, cache, copy, one = work / "repo", work / "cache", work / "copy", 0.0
    times.cp = timed(lambda: subprocess.run(["cp", "-r", *(repo / "anchors").iterdir(), copy], check=True))
    shutil.rmtree(copy)
    line("cp -r", times.cp, times)
    for step, threads in enumerate([max(counts)] * (WARM + 1) + counts):
        if step > last or time.monotonic() + one / threads > until:
            break
        found = Repository.open(repo)
        took = timed(lambda f=found, s=step, t=threads: apply_to_cache(f, cache, s, threads=t))
        if step == 0:
            times.build = took
        if step > WARM:
            times.move[threads], one = took, max(one, took * threads)
            line(f"apply --cache, {threads} threads", took, times)


def shown(times: Times, counts: list[int], size: int) -> str:
    def cell(value: float | None, form: str = "{:.2f}") -> str:
        return "" if value is None else form.format(value)

    lines = [
        "| threads | `apply --cache`, a step, s | / `cp -r` | `write --base`, s | GB/s of checkpoint "
        "| copy in memory, GB/s read and written |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for threads in sorted(counts):
        move, made = times.move.get(threads), times.write.get(threads)
        ratio, speed = move and times.cp and move / times.cp, made and size / made / 1e9
        cells = [str(threads), cell(move), cell(ratio), cell(made), cell(speed, "{:.1f}")]
        lines.append(f"| {' | '.join([*cells, cell(times.copy.get(threads, 0) / 1e9, '{:.0f}')])} |")
    made = f"an anchor {cell(times.anchor)} s, an empty cache {cell(times.build)} s"
    beside = f"`cp -r` {cell(times.cp)} s; by all threads {made}"
    return "\n".join([*lines, f"\n{size / 1e9:.2f} GB; {beside}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--seconds", type=float, default=90, help="no measurement is begun later than this")
    parser.add_argument("--work", type=Path, default=Path("/dev/shm"))
    args = parser.parse_args()
    counts, began = sorted(args.threads, reverse=True), time.monotonic()
    size = 2 * sum(prod(shape) for _, shape in shapes(args.size))
    if (free := shutil.disk_usage(args.work).free) < 3.2 * size:
        raise SystemExit(f"{args.work} has {free / 1e9:.0f} GB free, and {3.2 * size / 1e9:.0f} are needed")
    facts, times = f"{machine()}; kernels {kernels.status()}", Times(size)
    times.copy = memory_speeds(counts)
    work = Path(tempfile.mkdtemp(prefix="deltackpt-cores-", dir=args.work))
    try:
        last = write_steps(work, args.size, counts, times, began + 0.6 * args.seconds)
        move_steps(work, last, counts, times, began + args.seconds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        print(shown(times, counts, size))
        print(f"\n{facts}; {time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
