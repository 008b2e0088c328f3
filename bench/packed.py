"""`packed` by itself: its sizes against the floor given the old exponent, and what it costs the host.

Sizes: chains of tensors made here, fp32 masters moved by AdamW, SGD with momentum, or Lion and rounded to bf16, at
several learning rates, each read again; and any chain of checkpoints given by --chain. Times: one large bf16 tensor at
three densities, taking turns with the bare compare pass; medians. --cpu: of processor time, which a busy machine
distorts less.

    python bench/packed.py [--elements 1e8] [--turns 5] [--threads 1 2] [--cpu] [--chain DIR ...] [--only sizes|times]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from floor import SMALL, ExponentFloor, floor_given_exponent, tensors

from deltackpt import kernels
from deltackpt.codecs.packed import codec, list_index
from deltackpt.codecs.packed.jobs import EncodeJob
from deltackpt.codecs.types import DecodeBuffer
from deltackpt.format.dtypes import DTYPES

Words = npt.NDArray[Any]
Pair = tuple[tuple[int, ...], Words, Words, str]
BF16 = DTYPES["BF16"]
CHAINS = {
    "lr 1e-7": (1e-7, 8),
    "lr 3e-7": (3e-7, 12),
    "lr 2e-6": (2e-6, 12),
    "lr 1e-5": (1e-5, 12),
    "lr 2e-6, first step": (2e-6, 1),
}
OTHERS = {
    "sgd, lr 4e-9": (4e-9, 10),
    "sgd, lr 1e-7": (1e-7, 10),
    "sgd, lr 1e-6": (1e-6, 10),
    "lion, lr 1e-8": (1e-8, 8),
    "lion, lr 3e-7": (3e-7, 10),
    "lion, lr 3e-6": (3e-6, 6),
}
SIGMAS = (7.5e-8, 2.5e-7, 1.25e-6)  # of a step: .3, 1 and 5 %


def to_bf16(values: npt.NDArray[np.float32]) -> Words:
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)


def adamw(shape: tuple[int, int], rate: float, steps: int) -> tuple[Words, Words]:
    """A tensor before and after the last step."""
    rng = np.random.default_rng(0)
    masters = rng.standard_normal(shape, np.float32) * np.float32(0.02)
    masters *= np.exp(np.float32(0.3) * rng.standard_normal((shape[0], 1), np.float32))
    drift = rng.standard_normal(shape, np.float32) * np.float32(0.3)
    scale = np.exp(rng.standard_normal(shape, np.float32))
    first, second, old = np.zeros(shape, np.float32), np.zeros(shape, np.float32), to_bf16(masters)
    for step in range(1, steps + 1):
        old = to_bf16(masters)
        gradient = (drift + rng.standard_normal(shape, np.float32)) * scale
        first += (gradient - first) * np.float32(0.1)
        second += (gradient * gradient - second) * np.float32(0.001)
        root = np.sqrt(second / np.float32(1 - 0.999**step)) + np.float32(1e-8)
        masters -= np.float32(rate) * (first / np.float32(1 - 0.9**step)) / root
    return old, to_bf16(masters)


def by_momentum(name: str, shape: tuple[int, int], rate: float, steps: int) -> tuple[Words, Words]:
    """The same of SGD with momentum, or of Lion with weight decay; masters have longer tails, and no scale by rows."""
    rng = np.random.default_rng(15)
    masters = rng.standard_t(5, shape).astype(np.float32) * np.float32(0.015)
    drift = rng.standard_normal(shape, np.float32) * np.float32(0.3)
    scale = np.exp(rng.standard_normal(shape, np.float32))
    momentum, old = np.zeros(shape, np.float32), to_bf16(masters)
    for _ in range(steps):
        old = to_bf16(masters)
        gradient = (drift + rng.standard_normal(shape, np.float32)) * scale
        if name.startswith("lion"):
            sign = np.sign(np.float32(0.9) * momentum + np.float32(0.1) * gradient)
            momentum += (gradient - momentum) * np.float32(0.01)
            masters -= np.float32(rate) * (sign + np.float32(0.1) * masters)
        else:
            momentum = np.float32(0.9) * momentum + gradient
            masters -= np.float32(rate) * momentum
    return old, to_bf16(masters)


def chains(given: list[Path]) -> Iterator[tuple[str, Iterator[Pair]]]:
    shape = (2048, 1024)
    for name, (rate, steps) in (CHAINS | OTHERS).items():
        old, new = by_momentum(name, shape, rate, steps) if name in OTHERS else adamw(shape, rate, steps)
        yield name, iter([(old.shape, old.ravel(), new.ravel(), "BF16")])
        blocks = ((slice(i, i + 64), slice(j, j + 256)) for i in range(0, 1024, 64) for j in range(0, 1024, 256))
        yield f"{name}, in 64 x 256", (((64, 256), old[b].ravel(), new[b].ravel(), "BF16") for b in blocks)
    for path in given:
        folders = sorted(p for p in path.iterdir() if p.is_dir())
        for a, b in pairwise(folders):
            yield f"{path.name} {b.name}", pairs(a, b)


def pairs(old: Path, new: Path) -> Iterator[Pair]:
    """Tensors of two checkpoints; the files' headers give the shapes."""
    from safetensors import safe_open

    shapes = {}
    for file in sorted(new.glob("*.safetensors")):
        with safe_open(file, "numpy") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in list(opened.keys())}
    after = tensors(new)
    for name, (dtype, words) in tensors(old).items():
        if name in after and after[name][0] == dtype and len(after[name][1]) == len(words):
            yield shapes[name], words, after[name][1], dtype


def sizes(given: list[Path]) -> None:
    print(f"{'chain':38} {'':5} {'density':>9} {'floor':>7} {'packed':>7} {'ratio':>6}   bits a change")
    for name, found in chains(given):
        total = {kind: [ExponentFloor(), 0] for kind in ("large", "small")}
        for shape, old, new, dtype in found:
            at = np.flatnonzero(old != new)
            if not len(at):
                continue
            job = EncodeJob(at, old[at], new[at], old, DTYPES[dtype], shape)
            index, payload = codec.encode_many([job])[0]
            again = old.copy()
            codec.decode_into(index, payload, again, DTYPES[dtype], name)
            assert (again == new).all(), name
            row = total["large" if len(old) >= SMALL else "small"]
            row[0] += floor_given_exponent(old, new, dtype)
            row[1] += 8 * (len(payload) + len(list_index.write(index)))
        for kind, (low, bits) in total.items():
            if low.changes:
                a, b = low.bits / low.changes, bits / low.changes
                print(f"{name:38} {kind:5} {low.density:9.4%} {a:7.3f} {b:7.3f} {b / a:6.3f}", flush=True)


def in_turns(work: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each."""
    spent: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(turns):
        for name, one in work.items():
            start = clock()
            one()
            spent[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in spent.items()}


def compare(old: Words, new: Words) -> int:
    """The bare compare pass."""
    return sum(
        int(np.count_nonzero(old[i : i + (1 << 20)] != new[i : i + (1 << 20)])) for i in range(0, len(old), 1 << 20)
    )


def candidates(job: EncodeJob, threads: list[int]) -> dict[str, Callable[[], object]]:
    """What takes turns: to write and to read the same change."""
    old = job.base
    assert old is not None
    index, payload = codec.encode_many([job])[0]
    buffer = DecodeBuffer()
    positions, values = codec.decode(index, payload, old, BF16, "x")
    same = old[positions]
    work: dict[str, Callable[[], object]] = {}
    for n in threads:
        work[f"encode, {n} threads"] = partial(codec.encode_many, [job], n)
    work["decode"] = partial(codec.decode, index, payload, old, BF16, "x")
    work["decode to a buffer"] = partial(codec.decode, index, payload, old, BF16, "x", buffer)
    work["write what was decoded"] = partial(kernels.scatter, old, positions, same)
    bits = 8 * len(payload) / len(values)
    print(f"{index.scale}, {index.grid.rows} x {index.grid.columns} tiles, {bits:.3f} b a change")
    return work


def times(elements: int, turns: int, threads: list[int], clock: Callable[[], float]) -> None:
    shape = (elements // 4096, 4096)
    rng = np.random.default_rng(0)
    masters = rng.standard_normal(shape[0] * shape[1], np.float32) * np.float32(0.02)
    old = to_bf16(masters)
    for sigma in SIGMAS:
        new = to_bf16(masters + np.clip(rng.standard_normal(len(old), np.float32), -2, 2) * np.float32(sigma))
        at = np.flatnonzero(old != new)
        print(f"\n{len(at) / len(old):.3%} of {len(old):,} bf16: ", end="")
        job = EncodeJob(at, old[at], new[at], old, BF16, shape)
        found = in_turns({"compare": partial(compare, old, new), **candidates(job, threads)}, turns, clock)
        for name, seconds in found.items():
            rate = f"{2e-6 * len(old) / seconds:8,.0f} MB/s of model"
            print(
                f"  {name:28} {seconds * 1e3:8.1f} ms {seconds / len(old) * 1e9:7.3f} ns an element {rate}", flush=True
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=float, default=1e8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--chain", type=Path, nargs="+", default=[])
    parser.add_argument("--only", choices=("sizes", "times"))
    args = parser.parse_args()
    if args.only != "times":
        sizes(args.chain)
    if args.only != "sizes":
        times(int(args.elements), args.turns, args.threads, time.process_time if args.cpu else time.perf_counter)


if __name__ == "__main__":
    main()
